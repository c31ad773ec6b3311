"""Addresses: the arenas of a cache, the slots in them, what is mapped under each slot, and tensors over addresses.

    arena   | null | slot 1            | slot 2          | ...   one for each group of layers, all in one reservation
    slot    |..PPPP|LLLLLLLLLL|PP|......................|        pages of one sequence
                   ^first     ^end
            L live; P pending reclaim: still mapped, waiting for a fence; . nothing mapped

The live pages of a slot are one run [first, end), bounded by borders of extents. Pending pages lie anywhere else. A run that
grows over a pending page makes it live again, unless another holder has come to share its extent.
"""

import ctypes
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import from_dlpack

from vmmkv.arguments import wholes
from vmmkv.driver.base import ADDRESS_SPACE_BYTES, Driver, Fence
from vmmkv.errors import OutOfAddresses, RowsUnmapped
from vmmkv.layout import Group
from vmmkv.memory.extents import SIZE_CLASSES, Extent
from vmmkv.memory.states import SlotState
from vmmkv.memory.storage import mapped, reserved
from vmmkv.units import PAGE_BYTES, counted, format_bytes


class SlotTable:
    """State and token counts of each slot, as arrays: a step over 256 sequences is a few numpy calls.

    Slot 0 is the null slot. If a slot is not live, its length, end and limit are 0.

        start <= length <= limit = min(committed, end)

    Choices of slots depend on the states alone, so that all ranks of a group choose alike.
    """

    def __init__(self, num_slots: int, num_groups: int) -> None:
        num_rows = 1 + num_slots
        self.states = np.zeros(num_rows, dtype=np.int8)
        self.states[0] = SlotState.NULL
        self.lengths = np.zeros(num_rows, dtype=np.int64)
        """Tokens written."""
        self.committed = np.zeros(num_rows, dtype=np.int64)
        """Tokens whose rows lie wholly under live mappings in every group, less the guard."""
        self.ends = np.zeros(num_rows, dtype=np.int64)
        """The most tokens that the sequence may ever have."""
        self.starts = np.zeros((num_groups, num_rows), dtype=np.int64)
        """The first row still kept, in each group."""
        self.firsts = np.zeros((num_groups, num_rows), dtype=np.int64)
        """The first row that is really there, in each group, at most `starts`: what is mapped has no rows before it.

        Pages go as a whole, so that a page of which a window has passed a part has all its rows still.
        """
        self.limits = np.zeros(num_rows, dtype=np.int32)
        """Copy of the device's limit tensor."""

    def __len__(self) -> int:
        return len(self.states)

    def state(self, slot: int) -> SlotState:
        """The state of a slot."""
        return SlotState(int(self.states[slot]))

    def clear(self, slot: int, state: SlotState) -> None:
        """Take a slot's sequence from the table, and set its state."""
        self.states[slot] = state
        self.lengths[slot] = self.ends[slot] = 0

    def begin(self, slot: int, starts: npt.ArrayLike, firsts: npt.ArrayLike | None = None) -> None:
        """Set from which row on a slot keeps rows, in each group, and the first that is really there: by default the same."""
        self.starts[:, slot] = starts
        self.firsts[:, slot] = starts if firsts is None else firsts

    def advance(self, slots: npt.ArrayLike, num_tokens: npt.ArrayLike) -> None:
        """Count more rows as written in each of these slots. See `KVCache.advance`."""
        indices, counts = np.atleast_1d(wholes("slots", slots)), wholes("num_tokens", num_tokens)
        lengths, limits = self.lengths, self.limits
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise self.no_such_slot(next(int(slot) for slot in indices if not 0 <= slot < len(self)))
        if counts.min(initial=0) < 0:
            raise ValueError(f"num_tokens={num_tokens!r}: at least 0; see Sequence.truncate")
        sums = lengths.copy()  # so that an interrupt, or a refusal, finds every length as it was
        np.add.at(sums, indices, counts)
        advanced = sums.take(indices)
        wrong = advanced > limits.take(indices)
        if wrong.any():
            slot = int(indices[wrong][0])
            if self.states[slot] != SlotState.LIVE:
                raise RowsUnmapped(f"no sequence runs in slot {slot}: it is {self.state(slot).name.lower()}")
            raise RowsUnmapped(
                f"slot {slot} has {counted(int(lengths[slot]), 'token')} and memory for {limits[slot]}: "
                f"it cannot advance to {sums[slot]}; grow first"
            )
        lengths[indices] = advanced

    def no_such_slot(self, slot: int) -> ValueError:
        """The error for a slot of another number."""
        return ValueError(f"there is no slot {slot}: this cache has slots 1 to {len(self) - 1}")

    def where(self, state: SlotState) -> list[int]:
        """The slots in that state, in order."""
        return [int(slot) for slot in np.flatnonzero(self.states == state)]

    def num(self, *states: SlotState) -> int:
        """Number of slots that are in one of these states."""
        return sum(int(np.count_nonzero(self.states == state)) for state in states)

    def run_of(self, count: int, *states: SlotState, without: Sequence[int] = ()) -> int | None:
        """The first of the lowest `count` adjacent slots that all are in one of these states, or None."""
        suitable = np.logical_or.reduce([self.states == state for state in states])
        suitable[list(without)] = False
        if count == 1:
            return int(suitable.argmax()) if suitable.any() else None
        if count > len(suitable):
            return None
        sums = np.concatenate(([0], np.cumsum(suitable)))
        starts = np.flatnonzero(sums[count:] - sums[:-count] == count)
        return int(starts[0]) if len(starts) else None

    def wanted_ahead(self, lookahead_tokens: int) -> Iterator[npt.NDArray[np.int64]]:
        """Tokens that each slot should have memory for, most urgent first: the next token, then `lookahead_tokens`."""
        yield np.where(self.lengths > 0, self.lengths + min(1, lookahead_tokens), 0)
        yield self.lengths + lookahead_tokens

    def short_of(self, wanted: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Live slots with less memory than `wanted` tokens need, most urgent first, and what each should have.

        A slot's deadline is the number of tokens until it stands still: committed - length. A sequence without tokens comes
        last, for no step waits for it.
        """
        targets = np.minimum(wanted, self.ends)
        short = np.flatnonzero((self.committed < targets) & (self.states == SlotState.LIVE))
        deadlines, are_new = (self.committed - self.lengths)[short], self.lengths[short] == 0
        short = short[np.lexsort((deadlines, are_new))]
        return short, targets[short]


# Tensors over raw addresses come from a DLPack capsule: the same code for CPU and CUDA, no copy, no touch. The consumer calls
# the capsule's deleter when its tensor dies. Capsule, shape and strides are one libc `malloc`, and the deleter is libc's
# `free`: no Python runs when a tensor dies, in any thread, at interpreter exit too. Two other ways do not work:
# `__cuda_array_interface__` silently copies if the pointer's device is another, and `torch.frombuffer` knows no GPU.

_CAPSULE_NAME: Final = b"dltensor"  # a consumer renames it; capsules keep a pointer to the name, so it must stay alive
_DEVICE_TYPES: Final = {"cpu": 1, "cuda": 2}  # kDLCPU, kDLCUDA
_UINT8: Final = (1, 8, 1)  # kDLUInt, bits, lanes


# DLManagedTensor of dlpack.h: data; device type, index; dimensions; type code, bits, lanes; pointers to shape and strides;
# offset; manager and deleter. Behind it a shape and strides of one dimension.
_STRUCTURE: Final = struct.Struct("Q ii i BBH QQ Q QQ qq")
_SHAPE_OFFSET: Final = _STRUCTURE.size - 16
_STRIDE_OFFSET: Final = _STRUCTURE.size - 8

_libc = ctypes.CDLL(None)
_malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", _libc))
_free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("free", _libc))
_FREE_ADDRESS: Final = ctypes.cast(_free, ctypes.c_void_p).value or 0

# prototypes of our own, since the functions on ctypes.pythonapi are one for the whole process
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))


def wrap(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """The bytes [address, address + size_bytes) as a uint8 tensor `[size_bytes]`; other types by `.view(dtype)` of it.

    Nothing is copied or touched: the addresses may have no memory under them (64 TiB of them is fine), and only an
    operation on elements that are not mapped faults. The storage ends where the tensor does, so torch refuses an
    `as_strided` that would reach past it. The tensor does not own the addresses: they must stay reserved while it lives.

    Cost: some 4 us, no driver call; safe while a graph is captured.
    Raises: ValueError for a size or address that is not positive, a CUDA device without an index, another device.
    """
    if address <= 0 or size_bytes <= 0:
        raise ValueError(f"address={address:#x}, size_bytes={size_bytes}: both must be above 0")
    if device.type not in _DEVICE_TYPES:
        raise ValueError(f"addresses of device {str(device)!r} cannot be wrapped; only those of cpu and cuda")
    if device.type == "cuda" and device.index is None:
        raise ValueError("device 'cuda' does not say which GPU these addresses are of; write 'cuda:0'")
    pointer, capsule = _malloc(_STRUCTURE.size), None
    try:
        if not pointer:
            raise MemoryError(f"malloc of {_STRUCTURE.size} bytes failed")
        structure = _STRUCTURE.pack(
            *(address, _DEVICE_TYPES[device.type], device.index or 0, 1, *_UINT8),
            *(pointer + _SHAPE_OFFSET, pointer + _STRIDE_OFFSET, 0, 0, _FREE_ADDRESS),
            *(size_bytes, 1),
        )
        ctypes.memmove(pointer, structure, len(structure))
        capsule = _new_capsule(pointer, _CAPSULE_NAME, None)
        return from_dlpack(capsule)
    finally:
        # The capsule never leaves this function, so it needs no destructor: if torch did not take it, it is ours to free.
        if capsule is None or _is_capsule(capsule, _CAPSULE_NAME):
            _free(pointer)


@dataclass(eq=False, slots=True)
class Mapping:
    """One extent under the addresses of one slot, from `page` on. It is one holder of the extent.

    `fence` is None while it is live. Else it is pending reclaim, and is unmapped when the fence has passed (law 2).
    """

    span: "Span"
    page: int
    extent: Extent
    fence: Fence | None = None
    used: bool = False
    """Is the mapping one of the extent's users? It is while it is live, or about to be, under a running sequence."""

    @property
    def end_page(self) -> int:
        """The page behind the last one of its extent."""
        return self.page + self.extent.num_pages

    @property
    def address(self) -> int:
        """Address of its first page."""
        return self.span.address + self.page * PAGE_BYTES


@dataclass(eq=False, slots=True)
class Span:
    """The pages of one slot in one arena. Pages are counted from the slot's first address."""

    slot: int
    address: int
    index: int
    """Index of the arena."""
    group: Group
    first_page: int = 0
    """The first live page. Views start in it or behind."""
    end_page: int = 0
    """The page behind the last live one."""
    mappings: dict[int, Mapping] = field(default_factory=dict)
    """Mappings here, live or pending reclaim, by the first page of each."""

    def live(self) -> Iterator[Mapping]:
        """The live mappings in order."""
        return self.live_from(self.first_page)

    def live_from(self, page: int) -> Iterator[Mapping]:
        """The live mappings from a border of extents on."""
        while page < self.end_page:
            mapping = self.mappings[page]
            yield mapping
            page += mapping.extent.num_pages

    def live_rows_from(self, token: int) -> Iterator[Mapping]:
        """The live mappings that have rows from a token on."""
        page = max(self.first_page, self.group.page_of(token))
        return self.live_from(self.at(page).page) if page < self.end_page else iter(())

    def at(self, page: int) -> Mapping:
        """The live mapping that has this page."""
        for num_pages in SIZE_CLASSES:  # extents stand at multiples of their size
            mapping = self.mappings.get(page // num_pages * num_pages)
            if mapping is not None and mapping.end_page > page:
                return mapping
        raise AssertionError(f"page {page} is not mapped in slot {self.slot}")

    def border_before(self, page: int) -> int:
        """The last border of live extents at or before a page of [first, end]."""
        return page if page >= self.end_page else self.at(page).page

    def live_border(self, page: int) -> int:
        """The first border of live extents at or behind a page, or behind the nearest live one."""
        page = max(self.first_page, min(self.end_page, page))
        return page if self.border_before(page) == page else self.at(page).end_page

    @property
    def num_live_pages(self) -> int:
        """Pages that are mapped and not pending reclaim."""
        return self.end_page - self.first_page


def arena_bytes(groups: Sequence[Group], slots: int, max_rows: int) -> int:
    """Bytes of addresses of the arenas of some groups, with `slots` slots and the null slot in each."""
    return (1 + slots) * sum(group.slot_tokens(max_rows) * group.row_bytes for group in groups)


def check_addresses(driver: Driver, groups: Sequence[Group], *, slots: int, max_tokens: int, guard_tokens: int = 0) -> None:
    """Check that these slots can be reserved. Raises: OutOfAddresses if fewer or shorter ones can, naming what can."""

    def fits(slots: int, max_tokens: int) -> bool:
        return driver.has_addresses(arena_bytes(groups, slots, max_tokens + guard_tokens))

    def most(count: int, fits: Callable[[int], bool]) -> int:
        return bisect_left(range(1, min(count, ADDRESS_SPACE_BYTES) + 1), True, key=lambda each: not fits(each))

    if fits(slots, max_tokens):
        return
    most_slots = most(slots, lambda count: fits(count, max_tokens))
    most_tokens = most(max_tokens, lambda length: fits(slots, length))
    works = [f"slots={most_slots} of that length"] if most_slots else []
    works += [f"slots={slots} of max_tokens={most_tokens}"] if most_tokens else []
    if works:
        size = format_bytes(arena_bytes(groups, slots, max_tokens + guard_tokens))
        raise OutOfAddresses(
            f"slots={slots} of max_tokens={max_tokens} take {size} of addresses, which cannot be reserved: at most "
            f"{' or '.join(works)} can",
            slots=most_slots,
            max_tokens=most_tokens,
        )


class Arena:
    """The addresses of one group: the null slot and `slots` spans of the same size, from a reserved address on."""

    def __init__(self, driver: Driver, address: int, index: int, group: Group, *, slots: int, max_rows: int) -> None:
        self.index = index
        self.group = group
        self.slot_tokens = group.slot_tokens(max_rows)
        self.slot_bytes = self.slot_tokens * group.row_bytes
        self.reserved_bytes = arena_bytes([group], slots, max_rows)
        self.address = address
        self.spans = [Span(slot, address + slot * self.slot_bytes, index, group) for slot in range(1 + slots)]
        self._bytes = reserved(wrap(address, self.reserved_bytes, driver.device))
        self._driver = driver

    def view(self, layer: int, plane: str) -> torch.Tensor:
        """All slots of one plane of one layer: [1 + slots, slot_tokens, heads, dim], strided, mapped or not."""
        known = self.group.plane(plane)
        itemsize = known.dtype.itemsize
        return self._bytes.view(known.dtype).as_strided(
            (len(self.spans), self.slot_tokens, known.heads, known.dim),
            (self.slot_bytes // itemsize, self.group.row_bytes // itemsize, known.head_stride, 1),
            self.group.offset_bytes(layer, plane) // itemsize,
        )

    def rows(self, slot: int, start_token: int, end_token: int) -> torch.Tensor:
        """The bytes of rows [start, end) of a slot, in a storage that ends with them: uint8 [(end - start) * row_bytes]."""
        if end_token <= start_token:
            return torch.empty(0, dtype=torch.uint8, device=self._driver.device)  # a storage that ends at once
        row_bytes = self.group.row_bytes
        size_bytes = (end_token - start_token) * row_bytes
        return mapped(wrap(self.spans[slot].address + start_token * row_bytes, size_bytes, self._driver.device))

    def view_rows(self, rows: torch.Tensor, layer: int, plane: str) -> torch.Tensor:
        """One plane of one layer of what `rows` gave: [tokens, heads, dim]."""
        known, row_bytes = self.group.plane(plane), self.group.row_bytes
        itemsize = known.dtype.itemsize
        return rows.view(known.dtype).as_strided(
            (rows.numel() // row_bytes, known.heads, known.dim),
            (row_bytes // itemsize, known.head_stride, 1),
            self.group.offset_bytes(layer, plane) // itemsize,
        )
