"""Rows of a batch: which are equal prompts, which sequence each goes on from, and where their keys and values lie.

A batch of transformers is padded on the left, so all sequences have the same number of rows. They lie in adjacent slots of one
cache for each window, so that a layer is one strided tensor:

    slot first     | p | p | p | p | new |
    slot first + 1 | p | p | p | p | new |

Legend: B rows of the batch, or sequences; P pairs of rows; L layers; K kv heads; T tokens; D head dim;
S slots; E elements of a row of all layers.
"""

import copy
import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vmmkv.cache import KVCache
from vmmkv.errors import LayoutError, OutOfPages, OutOfSlots, RowsUnmapped
from vmmkv.layout import Group, KVLayout, Plane
from vmmkv.memory import sharing
from vmmkv.memory.pool import Pool
from vmmkv.memory.sharing import num_unmoved
from vmmkv.memory.slots import LiveSlot
from vmmkv.saved import Offloaded
from vmmkv.sequence import Sequence
from vmmkv.units import MIB, PAGE_BYTES, ceil_div, counted
from vmmkv_kernels.reference import turn

T = TypeVar("T")

_INT32_END: Final = 2**31

# equal prompts

COMPARED_BYTES = 64 * MIB
"""Temporary memory of a comparison: all of a batch of long prompts would take more than its keys and values."""

_HALF_EQUAL = 0.9
"""Share of a token's numbers in half precision that are equal to the bit in the same prompt."""


def prompts(k_BKTD: Tensor, v_BKTD: Tensor) -> list[int]:
    """Number the prompts of a batch: for each row the number of its prompt, the next one where it differs from the row before.

    transformers repeats a prompt before the cache sees it, and passes keys and values only. In the first layer these follow
    from each token and its position. Two rows are the same prompt if all numbers of K and V agree to the last bits: the order
    of summation in a matrix product may differ. Every number must agree, since a token at another position has other keys only
    where a rotary embedding turns them, and rounding may hide its slow turns. In half precision rounding hides the order of
    summation, and nearly all numbers must be equal to the bit.

    Not detected: differences past the first layer or in the attention mask alone; other positions where keys do not depend on
    them (ALiBi).
    Cost: a copy to the host, which waits for the device; two if neighbours agree in their last tokens.
    """
    pairs = [(row - 1, row) for row in range(1, len(k_BKTD))]
    return [*itertools.accumulate((not same for same in _are_same(k_BKTD, v_BKTD, pairs)), initial=0)]


def agree(k_BKTD: Tensor, v_BKTD: Tensor, parents: Seq[int]) -> bool:
    """Do rows of the same parent have the same tokens here too?"""
    pairs = [(first, row) for row, parent in enumerate(parents) if (first := parents.index(parent)) != row]
    return all(_are_same(k_BKTD, v_BKTD, pairs))


def _are_same(k_BKTD: Tensor, v_BKTD: Tensor, pairs: list[tuple[int, int]]) -> list[bool]:
    same = _compare(k_BKTD[:, :, -1:], v_BKTD[:, :, -1:], pairs)  # different prompts mostly end differently
    if not any(same):
        return same
    wholly = iter(_compare(k_BKTD, v_BKTD, [*itertools.compress(pairs, same)]))
    return [ends_same and next(wholly) for ends_same in same]


def _compare(k_BKTD: Tensor, v_BKTD: Tensor, pairs: list[tuple[int, int]]) -> list[bool]:
    left_P, right_P = torch.tensor(pairs, device=k_BKTD.device).unbind(1)
    same_P = torch.ones_like(left_P, dtype=torch.bool)
    for states in (k_BKTD, v_BKTD):
        # The two, up to four of `_agree_in`, and whether they agree.
        number_bytes = 2 * states.itemsize + 4 * torch.promote_types(states.dtype, torch.float32).itemsize + 1
        token_bytes = states.shape[1] * states.shape[3] * number_bytes
        num_pairs = min(len(pairs), max(1, COMPARED_BYTES // token_bytes))
        num_tokens = max(1, COMPARED_BYTES // (num_pairs * token_bytes))
        for some, one, other in zip(*(torch.split(each, num_pairs) for each in (same_P, left_P, right_P)), strict=True):
            for block in torch.split(states, num_tokens, dim=2):
                some &= _agree_in(block.index_select(0, one), block.index_select(0, other))
    return same_P.tolist()


def _agree_in(one_PKTD: Tensor, other_PKTD: Tensor) -> Tensor:
    """Do the two agree in all numbers? [P]"""
    dtype = one_PKTD.dtype
    is_half = dtype.itemsize <= 2
    wide = torch.promote_types(dtype, torch.float32)
    size_PKTD = one_PKTD.to(wide, copy=True).abs_()
    size_PKTD += size_PKTD.mean(3, keepdim=True)  # a sum near 0 is as inexact as its terms
    size_PKTD *= torch.finfo(dtype).eps * (2 if is_half else 64)
    same_P = ((one_PKTD.to(wide) - other_PKTD.to(wide)).abs_() <= size_PKTD).all(3).all(2).all(1)
    if is_half:
        same_P &= ((one_PKTD == other_PKTD).float().mean((1, 3)) >= _HALF_EQUAL).all(1)
    return same_P


# the sequences behind the rows


@dataclass(frozen=True, eq=False)
class Lineage:
    """The sequence that each row of a batch goes on from, and how many tokens any two sequences have in common. Immutable.

        sequence 0 | p | p | p | a | b |           the prompt is common to both, and its full pages are shared
        sequence 1 | p | p | p | a | c |           rows from `own_from` on lie in pages of one sequence alone

    Memory follows new parents by copying what two sequences do not have in common, where that may be written; else by forks.
    """

    parents: tuple[int, ...]
    """The sequence that has the tokens of each row of the batch."""
    common: npt.NDArray[np.int64]
    """[sequences, sequences] tokens that two have in common from the first on; meaningless on the diagonal."""
    own_from: int = 0
    """First token from which on no row of a sequence lies in a shared page."""

    @classmethod
    def of_prompts(cls, parents: Seq[int]) -> "Lineage":
        """New sequences, numbered from 0 without a gap; rows of the batch with the same parent are the same prompt."""
        num_sequences = max(parents) + 1
        return cls(tuple(parents), np.zeros((num_sequences, num_sequences), np.int64))

    @property
    def num_sequences(self) -> int:
        """Sequences that have memory."""
        return len(self.common)

    @functools.cached_property
    def is_identity(self) -> bool:
        """Is each row of the batch the sequence of its number? Every layer of every pass asks."""
        return self.parents == tuple(range(self.num_sequences))

    @functools.cached_property
    def leaders(self) -> tuple[int, ...]:
        """The first row of the batch that goes on from each sequence; there is one if the lineage is compact."""
        return tuple(self.parents.index(sequence) for sequence in range(self.num_sequences))

    @property
    def compact(self) -> bool:
        """Is each sequence a run of rows, and are the runs in order? A batch begins like that: equal prompts side by side."""
        return [*dict.fromkeys(self.parents)] == [*range(self.num_sequences)] and [*self.parents] == sorted(self.parents)

    def select(self, rows: Seq[int]) -> "Lineage":
        """The batch of these rows, in this order; a row may be named several times, or not at all."""
        return Lineage(tuple(self.parents[row] for row in rows), self.common, self.own_from)

    def moves(self) -> tuple[list[int], list[int], int] | None:
        """Copies by which memory follows: sources, targets, and the first token to copy. All are read before any is written.

        None if it takes forks, for other sequences or rows that may not be written.
        """
        if len(self.parents) != self.num_sequences:
            return None
        targets = [row for row, parent in enumerate(self.parents) if parent != row]
        sources = [self.parents[row] for row in targets]
        first_token = int(self.common[targets, sources].min())
        return (sources, targets, first_token) if first_token >= self.own_from else None

    def followed(self, num_tokens: int, *, forked: bool) -> "Lineage":
        """The lineage after each row has become the sequence of its number, with `num_tokens` tokens, by copies or forks."""
        parents = np.array(self.parents)
        common = self.common[np.ix_(parents, parents)]
        common[parents[:, None] == parents] = num_tokens
        return Lineage(tuple(range(len(parents))), common, num_tokens if forked else self.own_from)

    def share(self, num_tokens: int) -> "Lineage":
        """The lineage after another batch has forked all sequences at `num_tokens` tokens, or after rows were dropped."""
        return Lineage(self.parents, self.common, num_tokens)

    def cut(self, num_tokens: int) -> "Lineage":
        """The lineage after all sequences were truncated, and shared last pages exchanged."""
        return Lineage(self.parents, np.minimum(self.common, num_tokens), min(self.own_from, num_tokens))


# keys and values as torch reads and writes them

_Kind = tuple[torch.Size, torch.dtype, torch.device]


class _Rows(NamedTuple):
    """Some rows of each layer: keys and values, [B, K, T, D]."""

    of_layer: dict[int, tuple[Tensor, Tensor]]
    kinds: list[_Kind]
    """Shape, type and device of keys and of values, in every layer."""


class BatchViews:
    """Keys and values of all layers in `num_slots` adjacent slots of a cache, from `first_slot` on.

    A decode step without a graph is bound by the host, where each call of torch costs a microsecond or more. So one call makes
    the views of all layers, and a pass makes them twice: of the rows to write, and of those that are seen.
    """

    def __init__(self, cache: KVCache, first_slot: int, num_slots: int) -> None:
        self._known: dict[tuple[int, int], _Rows] = {}
        self._planes: list[tuple[tuple[int, ...], list[Tensor]]] = []
        with torch.inference_mode(False):  # else nothing here could be written under another mode
            for group in cache.layout.groups:
                both = [_plane(cache.view(group.layers[0], name), group, first_slot, num_slots) for name in ("k", "v")]
                self._planes.append((group.layers, both))
            k_LBKTD = self._planes[0][1][0]
            span_bytes = (num_slots - 1) * k_LBKTD.stride(1) * k_LBKTD.itemsize + cache.layout.groups[0].row_bytes
            splits = splits_a_copy(cache.device, span_bytes)
            self._slots_B = torch.arange(num_slots, device=cache.device) if splits else None

    def rows(self, first: int, count: int) -> _Rows:
        """Rows [first, first + count) of each layer. Cost: a few calls of torch for each group, on the host alone."""
        rows = self._known.get((first, count))
        if rows is None:
            if len(self._known) == 2:  # those of another pass
                self._known.clear()
            of_layer: dict[int, tuple[Tensor, Tensor]] = {}
            for layers, planes in self._planes:
                k_LBKTD, v_LBKTD = (plane.narrow(3, first, count).unbind() for plane in planes)
                of_layer.update(zip(layers, zip(k_LBKTD, v_LBKTD, strict=True), strict=True))
            rows = self._known[first, count] = _Rows(of_layer, [_kind(states) for states in next(iter(of_layer.values()))])
        return rows

    def write(self, layer: int, first: int, *new: Tensor) -> None:
        """Copy keys and values of a layer to its rows from `first` on. Cost: two launches. Raises: LayoutError."""
        rows = self.rows(first, new[0].shape[2])
        for states, kind in zip(new, rows.kinds, strict=True):
            if _kind(states) != kind:
                shape, dtype, device = kind
                raise LayoutError(
                    f"layer {layer} gives {list(states.shape)} {states.dtype} on {states.device}, and its rows are "
                    f"{list(shape)} {dtype} on {device}: all layers of one window have one shape and type, on the pool's "
                    f"device; another model wants a VmmCache of its own"
                )
        for place, states in zip(rows.of_layer[layer], new, strict=True):
            if self._slots_B is None:
                place.copy_(states)
            else:  # the offset along the dimension of the index has 64 bits
                place.index_copy_(0, self._slots_B, states)


def _kind(states: Tensor) -> _Kind:
    return states.shape, states.dtype, states.device


def _plane(first_STKD: Tensor, group: Group, first_slot: int, num_slots: int) -> Tensor:
    """K or V of all layers of a group, of which the first is given: [L, B, K, T, D]."""
    _, num_tokens, heads, dim = first_STKD.shape
    slot_stride, row_stride, head_stride, _ = first_STKD.stride()
    return first_STKD.as_strided(
        (len(group.layers), num_slots, heads, num_tokens, dim),
        (group.leading_bytes // first_STKD.itemsize, slot_stride, head_stride, row_stride, 1),
        first_STKD.storage_offset() + first_slot * slot_stride,
    )


def splits_a_copy(device: torch.device, span_bytes: int) -> bool:
    """Does torch copy in several launches to a view that spans so many bytes?

    Offsets in its CUDA kernels have 32 bits: a larger view is halved until each part fits, down to a launch for each slot.
    """
    return device.type == "cuda" and span_bytes > _INT32_END


# the sequences of one window


@dataclass(slots=True, kw_only=True)
class _SharedCache:
    """A cache with slots of several batches, of which the last one closes it."""

    cache: KVCache
    num_batches: int = 1
    is_written: bool = False
    """Has a whole pass been written to it, so that its shapes are the model's?"""


class WindowRows:
    """The rows of all sequences of a batch, for layers of one window (None for all tokens) and one shape.

    It has no cache until `open` sees keys and values, which tell the shape and the type. Row numbers are token numbers less
    `num_dropped`: of a first prompt longer than the window the first tokens are not written, and a compaction drops tokens.
    Then that holds of the tokens behind it.
    """

    def __init__(self, layers: tuple[int, ...], window: int | None, *, pool: Pool, slots: int, max_tokens: int) -> None:
        self.layers: Final = layers
        self.window: Final = window
        self.pool: Final = pool
        self._slots: Final = slots
        self._max_tokens: Final = max_tokens
        self._shared: _SharedCache | None = None
        self._take([], 0)

    def _take(self, sequences: list[Sequence], dropped: int) -> None:
        self.sequences, self.num_dropped = sequences, dropped
        self._views: BatchViews | None = None

    @property
    def cache(self) -> KVCache:
        """The cache that has the slots."""
        assert self._shared is not None, "no keys and values have been seen"
        return self._shared.cache

    @property
    def live_slots(self) -> list[LiveSlot]:
        """The slots of its sequences."""
        return [sequence.live for sequence in self.sequences]

    @property
    def closed(self) -> bool:
        """Is there no cache to be closed?"""
        return self._shared is None or self._shared.cache.closed

    # in and out

    def open(self, k_BKTD: Tensor, v_BKTD: Tensor, num_sequences: int, *, dropped: int) -> None:
        """Give `num_sequences` new sequences their slots, in a cache for keys and values such as these."""
        layout = self._layout(k_BKTD, v_BKTD)
        if self._shared is not None and not self._shared.is_written and self.cache.layout != layout:
            self.close()  # it was made for a pass that failed, perhaps for its shapes
        if self._shared is None:
            # A rearranged batch is forked to as many slots more, which need not be free in one run.
            slots = max(self._slots, 3 * k_BKTD.shape[0])
            with torch.inference_mode(False):  # else no tensor of it could be written under another mode
                self._shared = _SharedCache(cache=KVCache(layout, self.pool, slots=slots, max_tokens=self._max_tokens))
        self._take(self.cache.open_batch(num_sequences), dropped)

    def _layout(self, k_BKTD: Tensor, v_BKTD: Tensor) -> KVLayout:
        """The layout of these layers, which are alike."""
        planes = tuple(
            Plane(name=name, heads=states.shape[1], dim=states.shape[3], dtype=states.dtype)
            for name, states in (("k", k_BKTD), ("v", v_BKTD))
        )
        return KVLayout.of_rows(dict.fromkeys(self.layers, (planes, self.window)))

    def fork(self, parents: Seq[int]) -> list[Sequence]:
        """Forks of the sequence that each entry names, in adjacent slots."""
        named = self._named(parents)
        return self.cache.fork_batch(named) if named else []

    def fork_pages(self, parents: Seq[int]) -> int:
        """Pages that `fork` will ask for."""
        with self.pool.lock:
            return sum(
                sharing.fork_pages(self.cache.slots.memory, sequence.slot, sequence.length) for sequence in self._named(parents)
            )

    def _named(self, parents: Seq[int]) -> list[Sequence]:
        return [self.sequences[parent] for parent in parents] if self.sequences else []

    def replace(self, forks: list[Sequence]) -> list[Sequence]:
        """Replace the sequences by these forks of them, or by none. Returns the sequences, which the caller closes."""
        replaced = self.sequences
        self._take(forks, self.num_dropped if forks else 0)
        return replaced

    def beside(self, forks: list[Sequence]) -> "WindowRows":
        """The rows of another batch in the same cache, whose sequences are these forks."""
        other = copy.copy(self)
        other._take(forks, self.num_dropped)
        if self._shared is not None:
            self._shared.num_batches += 1
        return other

    def close(self) -> None:
        """Close the cache if no other batch has slots in it; no sequence may be left. Idempotent, also after a failure."""
        if self._shared is not None:
            if self._shared.num_batches == 1:
                self._shared.cache.close()
            self._shared.num_batches -= 1
            self._shared = None

    def opened_for_file(self) -> None:
        """Keep the cache, whose sequences got all rows from a file: its shapes are the model's."""
        assert self._shared is not None, "there are sequences"
        self._shared.is_written = True

    def leave(self) -> bool:
        """Leave the cache and these sequences to other batches that have slots in it; False if there is none."""
        if self._shared is None or self._shared.num_batches == 1:
            return self._shared is None
        self._shared.num_batches -= 1
        self._shared = None
        return True

    # each forward pass

    def slide(self, num_tokens: int) -> None:
        """Reclaim whole pages that the window has passed, with so many tokens written, once no launch can read them."""
        if self.window is None or not self.sequences:
            return
        start = num_tokens - self.window + 1 - self.num_dropped
        kept, (group, *_) = self.sequences[0].start(), self.cache.layout.groups
        if start > 0 and group.page_of(start) > group.page_of(kept):
            for sequence in self.sequences:
                for index in range(len(self.cache.layout.groups)):
                    sequence.advance_start(index, start)

    def missing_pages(self, num_tokens: int) -> int:
        """Pages that `grow` will ask for, for all sequences; 0 for more tokens than they may have, which it refuses."""
        num_rows = num_tokens - self.num_dropped
        if not self._is_short(num_rows) or num_rows > self._max_tokens:
            return 0
        with self.pool.lock:
            return sum(self.cache.slots.memory.missing_pages(sequence.slot, num_rows) for sequence in self.sequences)

    def pages_like(self, k_BKTD: Tensor, v_BKTD: Tensor, num_rows: int) -> int:
        """Pages of one sequence of so many rows, if these layers' keys and values are as those of another layer."""
        groups = self._layout(k_BKTD, v_BKTD).groups
        return sum(ceil_div(num_rows * group.row_bytes, PAGE_BYTES) for group in groups)

    def grow(self, num_tokens: int) -> None:
        """Have memory for `num_tokens` tokens of each sequence. Raises: see Sequence.grow; what has grown by then stays."""
        num_rows = num_tokens - self.num_dropped
        if self._is_short(num_rows):
            if self.window is not None:
                self.cache.map_ahead(lookahead_tokens=0)  # the pages that the window has left are the next ones
            for sequence in self.sequences:
                sequence.grow(num_rows)

    def _is_short(self, num_rows: int) -> bool:
        if not self.sequences:
            return False
        first = self.sequences[0].slot
        return bool(num_rows > self.cache.limits[first : first + len(self.sequences)].min())

    def write(self, layer: int, num_tokens: int, k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        """Write a layer's keys and values for the tokens from `num_tokens` on, without those before the first row."""
        left_out, num_new = max(0, self.num_dropped - num_tokens), k_BKTD.shape[2]
        if left_out:
            k_BKTD, v_BKTD = (states.narrow(2, left_out, num_new - left_out) for states in (k_BKTD, v_BKTD))
        self._all_rows().write(layer, num_tokens - self.num_dropped + left_out, k_BKTD, v_BKTD)

    def view(self, layer: int, num_past: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that a token with `num_past` before it sees, up to `num_tokens`: [B, K, T, D]."""
        first = self.first_token(num_past) - self.num_dropped
        return self._all_rows().rows(first, num_tokens - self.num_dropped - first).of_layer[layer]

    def view_alone(self, layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values that the next token of the one sequence sees: as `view`, over a storage of mapped rows alone."""
        (sequence,) = self.sequences
        before = self.num_dropped + sequence.start(self.cache.layout.group_of[layer])
        rows = slice(self.first_token(num_tokens) - before, num_tokens - before)
        k_TKD, v_TKD = sequence.k(layer)[rows], sequence.v(layer)[rows]
        return k_TKD.transpose(0, 1)[None], v_TKD.transpose(0, 1)[None]

    def _all_rows(self) -> BatchViews:
        if self._views is None:
            self._views = BatchViews(self.cache, self.sequences[0].slot, len(self.sequences))
        return self._views

    def first_token(self, num_past: int) -> int:
        """Number of the first token that one with `num_past` before it sees, as if dropped tokens had been the first."""
        return self.num_dropped if self.window is None else max(0, num_past - self.window + 1)

    def advance(self, num_tokens: int) -> None:
        """Count the tokens that all layers have written, `num_tokens` in all."""
        assert self._shared is not None, "there are sequences"
        slots = [sequence.slot for sequence in self.sequences]
        self._shared.cache.advance(slots, num_tokens - self.num_dropped - self.sequences[0].length)
        self._shared.is_written = True

    def change_streams(self, *streams: torch.Stream | None) -> None:
        """Record that work on these streams touches the rows (see KVCache.record_stream), and make views anew.

        Where a copy is split, writing takes an index on the device. Another stream might read it before it is written, or
        torch's allocator reuse its memory on the first stream while the other still reads.
        """
        self._views = None
        if not self.closed:
            for stream in streams:
                if stream is not None:
                    self.cache.record_stream(stream)

    # between passes

    def copies(
        self, sources: Seq[int], targets: Seq[int], first_token: int, num_tokens: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Arguments of `index_copy_` (dimension 0) that copy rows from `first_token` on from each source to its target.

        The rows to be written must be in pages of one sequence alone. The rows of the sources are read here, which takes as
        much memory. Cost: a kernel for each group of the layout, and another to write.
        """
        first = max(first_token - self.num_dropped, self.sequences[0].start())
        count = num_tokens - self.num_dropped - first
        if count <= 0:
            return
        from_B, to_B = (torch.tensor(each, device=self.cache.device) for each in (sources, targets))
        first_slot = self.sequences[0].slot
        for group in self.cache.layout.groups:
            plane = self.cache.k(group.layers[0])  # over the arena's whole storage, from its first byte on
            size = (*plane.shape[:2], group.row_bytes // plane.itemsize)
            whole_STE = plane.as_strided(size, (*plane.stride()[:2], 1), 0)  # all layers' rows as they lie
            part_BTE = whole_STE[first_slot : first_slot + len(self.sequences), first : first + count]
            yield part_BTE, to_B, part_BTE.index_select(0, from_B)

    def compact(self, kept: Seq[npt.NDArray[np.int64]]) -> None:
        """Keep these rows of each sequence, as many of each. All or none. See Sequence.compact."""
        with self.pool.lock:
            for sequence, rows in zip(self.sequences, kept, strict=True):  # all that can find no page
                sharing.own_from(self.cache.slots.memory, sequence.slot, num_unmoved(rows), len(rows))
        self.num_dropped += self.sequences[0].length - len(kept[0])
        for sequence, rows in zip(self.sequences, kept, strict=True):
            sequence.compact(rows)

    def turn_keys(self, kept: Seq[npt.NDArray[np.int64]], num_tokens: int, inv_freq_R: Tensor) -> None:
        """Turn the keys that `compact` has moved back to the positions of their rows, of `num_tokens` tokens in all.

        Cost: about 15 launches for each sequence and layer.
        """
        for place, rows in enumerate(kept):
            first = num_unmoved(rows)
            back_T = torch.from_numpy(rows[first:] - np.arange(first, len(rows))).to(self.cache.device)
            for layer in self.layers:
                moved_TKD = self.view(layer, num_tokens, num_tokens)[0][place, :, first:].transpose(0, 1)
                moved_TKD.copy_(turn(moved_TKD, back_T, inv_freq_R))

    def check_kept(self, num_tokens: int) -> None:
        """Can it be truncated to so many tokens? Raises RowsUnmapped if the window has passed rows that the next one sees."""
        if self.sequences and num_tokens:
            kept = self.num_dropped + max(sequence.start() for sequence in self.sequences)
            if self.first_token(num_tokens) < kept:
                raise RowsUnmapped(
                    f"with {num_tokens} tokens a window of {self.window} begins at token {self.first_token(num_tokens)}, and "
                    f"what was before {kept} is gone; call activate_past_recording() before the tokens that may be cropped"
                )

    def own_from(self, num_tokens: int) -> None:
        """Give each sequence pages of its own for what `truncate` leaves of a shared page, so that truncating cannot fail.

        On failure all tokens are as before. Cost and errors: see Sequence.own_from.
        """
        for sequence in self.sequences:
            sequence.own_from(max(0, num_tokens - self.num_dropped))

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of each sequence, after `own_from`. See Sequence.truncate."""
        for sequence in self.sequences:
            sequence.truncate(max(0, num_tokens - self.num_dropped))


def current_stream(device: torch.device) -> torch.Stream | None:
    """Current stream of a GPU; None on the host, where calls are done when they return."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


# the sequences of all windows


class SavedWindow(NamedTuple):
    """The sequences of one window, as a file describes them."""

    num_dropped: int
    states: tuple[Tensor, Tensor]
    """Keys and values of no token, as a model would give them: [B, K, 0, D], on the meta device."""


class SavedBatch(NamedTuple):
    """A batch, as a file describes it."""

    num_tokens: int
    compacted_tokens: int
    lineage: Lineage
    windows: list[SavedWindow]
    """Sequences of each window, in the order of the cache's groups."""


class BatchRows:
    """The rows of all sequences of a batch in all layers, and which sequence each row of the model's batch goes on from.

    A change of the batch sets `lineage` at once; memory follows in `extend`. Deep copies have slots in the same caches.
    """

    def __init__(self, pool: Pool, groups: list[WindowRows]) -> None:
        self.pool: Final = pool
        self.num_tokens = 0
        """Tokens of each sequence, in all layers."""
        self.compacted_tokens = 0
        """`num_tokens` at the last compaction."""
        self.lineage: Lineage | None = None
        """The sequences behind the rows of the batch; None as long as there are none."""
        self.record_past = False
        """Do windows keep the rows that they have passed until `truncate`?"""
        self._replaced: list[Sequence] = []
        """Sequences that have left the batch and are not closed yet: the driver may have refused it."""
        self._collected: list[Sequence] = []
        """Sequences of deep copies that were collected as garbage; one list of all copies, the next of which closes them."""
        self._offloaded: Offloaded | None = None
        """The rows in host memory, if they were offloaded since the last pass."""
        self._indices: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        """Row numbers of the lineage on the device, which every layer of every pass asks for."""
        self._stream: torch.Stream | None = None
        """The current stream at the last use, on CUDA."""
        self._set_groups(groups)

    def _set_groups(self, groups: list[WindowRows]) -> None:
        self.groups = groups
        self.rows_of = {layer: rows for rows in groups for layer in rows.layers}

    def rows(self, layer: int) -> WindowRows:
        """The rows with this layer. Raises: ValueError naming the layers there are."""
        rows = self.rows_of.get(layer)
        if rows is None:
            raise ValueError(f"layer {layer} keeps no keys and values by the configuration; layers {[*self.rows_of]} do")
        return rows

    @property
    def size(self) -> int | None:
        """Rows of the model's batch, if there is one."""
        return None if self.lineage is None else len(self.lineage.parents)

    # each forward pass

    def open(self, rows: WindowRows, k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        """Open the sequences of one window, with memory for a first prompt of these keys and values.

        On failure some windows have sequences: call `end`. Raises: OutOfPages, OutOfSlots, SequenceTooLong.
        """
        assert self.lineage is not None, "a pass has begun"
        num_new, num_sequences = k_BKTD.shape[2], self.lineage.num_sequences
        later_pages = sum(
            num_sequences * later.pages_like(k_BKTD, v_BKTD, num_new - self._left_out(later, num_new))
            for later in self.groups
            if later is not rows and not later.sequences
        )
        dropped = self._left_out(rows, num_new)
        self._take_slots(rows, lambda: rows.open(k_BKTD, v_BKTD, num_sequences, dropped=dropped))
        self._grow([rows], num_new, later_pages=later_pages)

    def _left_out(self, rows: WindowRows, num_new: int) -> int:
        """Number of first tokens of a first prompt that are longer ago than the window: this pass alone sees them."""
        return 0 if self.record_past else rows.first_token(num_new)

    def extend(self, k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        """Let memory follow the rows of the batch, reclaim rows that windows have passed, and map memory for new rows.

        Keys and values are those of the first layer, [B, K, T, D]. On failure no row is lost; see `_grow`.
        Cost: see VmmCache.update.
        """
        lineage, num_new = self.lineage, k_BKTD.shape[2]
        assert lineage is not None, "there are tokens"
        # A prompt may come in chunks that are equal too. With single tokens the answers have begun.
        if not (lineage.is_identity or (num_new > 1 and lineage.compact and agree(k_BKTD, v_BKTD, lineage.parents))):
            self._follow(lineage)
        self._close_replaced()
        if not self.record_past:
            for rows in self.groups:
                rows.slide(self.num_tokens)
        self._grow(self.groups, self.num_tokens + num_new)

    def _follow(self, lineage: Lineage) -> None:
        """Let memory follow the batch. All or none: no row is written before all groups have read theirs."""
        moves = lineage.moves()
        if moves is not None:
            copies = [each for rows in self.groups for each in rows.copies(*moves, self.num_tokens)]
            for place_BTE, targets_B, source_BTE in copies:
                place_BTE.index_copy_(0, targets_B, source_BTE)
        else:
            for rows, forks in zip(self.groups, self._fork(lineage.parents), strict=True):
                self._replaced += rows.replace(forks)
        self._indices.clear()
        self.lineage = lineage.followed(self.num_tokens, forked=moves is None)

    def write(self, rows: WindowRows, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        """Write a layer's keys and values of new tokens, [B, K, T, D] by rows of the batch. Cost: two copies."""
        assert self.lineage is not None, "a pass has begun"
        if not self.lineage.is_identity:
            leaders = self._index(self.lineage.leaders, k_BKTD.device)
            k_BKTD, v_BKTD = k_BKTD.index_select(0, leaders), v_BKTD.index_select(0, leaders)
        rows.write(layer, self.num_tokens, k_BKTD, v_BKTD)

    def advance(self, num_new: int) -> None:
        """Count tokens that all layers have written."""
        self.num_tokens += num_new
        for rows in self.groups:
            rows.advance(self.num_tokens)

    def seen(self, layer: int, num_new: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values that the next token sees, and `num_new` behind them: [B, K, T, D] by rows of the batch.

        They are views; while equal prompts are kept once they are copies.
        """
        assert self.lineage is not None, "there are tokens"
        k_BKTD, v_BKTD = self.rows(layer).view(layer, self.num_tokens, self.num_tokens + num_new)
        if self.lineage.is_identity:
            return k_BKTD, v_BKTD
        parents = self._index(self.lineage.parents, k_BKTD.device)
        return k_BKTD.index_select(0, parents), v_BKTD.index_select(0, parents)

    def seen_alone(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that the next token sees, as `seen`; of one sequence over a storage of mapped rows alone."""
        assert self.lineage is not None, "there are tokens"
        is_alone = self.lineage.is_identity and self.lineage.num_sequences == 1
        return self.rows(layer).view_alone(layer, self.num_tokens) if is_alone else self.seen(layer)

    def _index(self, rows: tuple[int, ...], device: torch.device) -> Tensor:
        index = self._indices.get((rows, device))
        if index is None:
            with torch.inference_mode(False):  # it may outlive the mode of this pass
                index = self._indices[rows, device] = torch.tensor(rows, device=device)
        return index

    def follow_stream(self) -> None:
        """Follow the current stream: if it has changed, reclaimed memory waits for both, and indices are made anew."""
        current = current_stream(self.pool.device)
        if self._stream is not None and current != self._stream:
            self._indices.clear()
            for rows in self.groups:
                rows.change_streams(self._stream, current)
        self._stream = current

    # slots and pages

    def _close_replaced(self) -> None:
        """Close the sequences that have left. If this fails, the next pass or `end` goes on."""
        for sequences in (self._replaced, self._collected):
            while sequences:
                sequence = sequences.pop()  # at once, for a copy can be collected at any time
                try:
                    sequence.close()
                except BaseException:
                    sequences.append(sequence)
                    raise

    def _with_room(self, take: Callable[[], T]) -> T:
        """Take slots or pages; where they are short, end copies that are garbage and try once more."""
        self._close_replaced()
        try:
            return take()
        except (OutOfPages, OutOfSlots):
            gc.collect()  # a cache and its layers refer to each other
            if not self._collected:
                raise
        self._close_replaced()
        return take()

    def _take_slots(self, rows: WindowRows, take: Callable[[], T]) -> T:
        try:
            return self._with_room(take)
        except OutOfSlots:
            raise OutOfSlots(
                f"this VmmCache and its deep copies have {counted(rows.cache.num_slots, 'slot')}, and "
                f"{len(rows.cache.sequences)} of them hold rows: close() copies that are no longer needed, or give VmmCache "
                f"more slots"
            ) from None

    def _grow(self, groups: Seq[WindowRows], num_tokens: int, *, later_pages: int = 0) -> None:
        """Have memory for `num_tokens` tokens of each row in these groups; none grows if there is too little for all.

        `later_pages` are for groups that this pass opens later. If another thread takes from the pool between the check and
        the growth, some rows may have grown when this raises; they keep that.
        """
        self._check_room(sum(rows.missing_pages(num_tokens) for rows in groups), f"grow to {num_tokens} tokens", later_pages)
        for rows in groups:
            rows.grow(num_tokens)

    def _check_room(self, num_pages: int, what: str, later_pages: int = 0) -> None:
        """Check that the whole batch can have so many pages now. Raises: OutOfPages."""
        if not num_pages:
            return
        remedy = "give the model fewer rows in a batch, offload() or reset() another cache of this pool"

        def check() -> None:
            with self.pool.lock:
                self.pool.check_room(num_pages, remedy, later_pages=later_pages)

        try:
            self._with_room(check)
        except OutOfPages as error:
            raise OutOfPages(f"a batch of {counted(self.size or 0, 'row')} cannot {what}: {error}") from None

    def _fork(self, parents: Seq[int]) -> list[list[Sequence]]:
        """Fork, in each group, the sequence that each entry names. All or none."""
        self._check_room(sum(rows.fork_pages(parents) for rows in self.groups), "be forked, so that each goes its own way")
        forked: list[list[Sequence]] = []
        with ExitStack() as undo:
            for rows in self.groups:
                forked.append(self._take_slots(rows, functools.partial(rows.fork, parents)))
                for sequence in forked[-1]:
                    undo.callback(sequence.close)
            undo.pop_all()
        return forked

    # between passes

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of each sequence. All or none. Raises: RowsUnmapped, OutOfPages."""
        assert self.lineage is not None, "there are tokens"
        self.follow_stream()
        self.restore()
        for rows in self.groups:
            rows.check_kept(num_tokens)
        for rows in self.groups:
            rows.own_from(num_tokens)  # all that can fail, before anything is cut
        for rows in self.groups:
            rows.truncate(num_tokens)
            rows.slide(num_tokens)
        self.num_tokens, self.lineage = num_tokens, self.lineage.cut(num_tokens)

    def full_rows(self) -> WindowRows | None:
        """The rows of the layers of full attention, if there are such layers and tokens."""
        return next((rows for rows in self.groups if rows.window is None and rows.sequences), None)

    def compact(self, kept: Seq[npt.NDArray[np.int64]]) -> None:
        """Keep these rows alone of each sequence, in the layers of full attention. All or none. See Sequence.compact."""
        assert self.lineage is not None, "there are tokens"
        full = self.full_rows()
        assert full is not None, "there are rows to drop"
        full.compact(kept)
        self.compacted_tokens, self.lineage = self.num_tokens, self.lineage.share(self.num_tokens)

    def end(self) -> None:
        """End all sequences: the memory goes back to the pool, the addresses stay. If closing fails, call it again."""
        self.follow_stream()
        for rows in self.groups:
            self._replaced += rows.replace([])
        self.num_tokens, self.compacted_tokens, self.lineage, self._offloaded = 0, 0, None, None
        self._indices.clear()
        self._close_replaced()

    @property
    def is_offloaded(self) -> bool:
        """Are the rows in host memory?"""
        return self._offloaded is not None and self._offloaded.released

    def offload(self) -> None:
        """Move all rows to host memory. On failure all is as before. Cost and errors: see VmmCache.offload."""
        self.follow_stream()
        self._close_replaced()
        batches = [rows.live_slots for rows in self.groups if rows.sequences]
        if batches and not self.is_offloaded:
            self._offloaded = Offloaded(batches)
            self._offloaded.release()

    def restore(self) -> None:
        """Bring offloaded rows back to their addresses. On failure they stay offloaded. Raises: OutOfPages, DriverError."""
        if self._offloaded is not None and self.is_offloaded:
            self._check_room(self._offloaded.num_pages, "come back from host memory")
            self._offloaded.restore()
        self._offloaded = None

    def fill(self, batch: SavedBatch, read: Callable[[list[tuple[list[LiveSlot], int]]], None]) -> None:
        """Open the sequences of a saved batch, and have `read` fill so many rows of each. On failure call `end`."""
        for rows, (num_dropped, states) in zip(self.groups, batch.windows, strict=True):
            num_sequences = batch.lineage.num_sequences
            self._take_slots(rows, functools.partial(rows.open, *states, num_sequences, dropped=num_dropped))
        read([(rows.live_slots, batch.num_tokens - rows.num_dropped) for rows in self.groups])
        for rows in self.groups:
            rows.opened_for_file()
        self.num_tokens, self.compacted_tokens, self.lineage = batch.num_tokens, batch.compacted_tokens, batch.lineage

    # copies, and the end

    def fork(self) -> "BatchRows":
        """The same batch in slots of its own: full pages are shared. Raises: as KVCache.fork_batch."""
        self.follow_stream()
        self.restore()
        lineage = self.lineage
        forked = self._fork(range(0 if lineage is None else lineage.num_sequences))
        if lineage is not None:
            self.lineage = lineage.share(self.num_tokens)
        other = copy.copy(self)
        other._set_groups([rows.beside(sequences) for rows, sequences in zip(self.groups, forked, strict=True)])
        other._replaced, other._indices = [], {}
        return other

    @property
    def closed(self) -> bool:
        """Is there no cache to be closed?"""
        return all(rows.closed for rows in self.groups)

    def close(self) -> None:
        """Close the caches in which no other batch has slots, after `end`. Idempotent, also after a failure."""
        for rows in self.groups:
            rows.close()

    def leave(self) -> bool:
        """Leave all sequences to the other copies, which close them; False if there is none for some.

        Takes no lock and calls no driver: garbage collection may run it within any other call.
        """
        left = [rows for rows in self.groups if rows.leave()]
        self._collected += [*self._replaced, *(sequence for rows in left for sequence in rows.sequences)]
        return len(left) == len(self.groups)

    def check(self) -> None:
        """Recount the laws of all arenas and of the pool. See KVCache.check."""
        for rows in self.groups:
            if not rows.closed:
                rows.cache.check()
