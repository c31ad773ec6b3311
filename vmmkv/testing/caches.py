"""Memory as the checks want it: sequences between poison, shuffled pages, rows far apart.

A cache's row here is a power of two, which a plane of its own fills up: so rows end where pages end, and what is mapped under a
sequence can end with its guard, to the byte.
"""

import math
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from vmmkv.cache import KVCache
from vmmkv.dlpack import wrap
from vmmkv.driver import open_driver
from vmmkv.driver.base import Access, Handle
from vmmkv.layout import PLANE_ALIGNMENT_BYTES, Group, KVLayout, Plane
from vmmkv.pool import Pool
from vmmkv.sequence import Sequence
from vmmkv.testing.subject import Subject
from vmmkv.units import GIB, KIB, PAGE_BYTES, round_up

BUDGET_BYTES: Final = 4 * GIB
"""What no check comes near; handles are created as they are needed."""

ROW_BYTES: Final = 32 * KIB
"""64 rows are a page, so that sequences of some hundred tokens have several."""

_LAYERS: Final = 4

NAN: Final = math.nan
STALE: Final = 100.0
"""What a row past the length may hold: another sequence's values. These are larger, so that they show."""

_SPARE_PAGES: Final = 16
"""Free extents to shuffle, more than a check takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedRows:
    """What is mapped under a slot from row `first` on: all bytes of its rows, of whatever layer, as int64 [rows, words]."""

    slot: int
    first: int
    words_TW: torch.Tensor


def layout_of(subject: Subject, row_bytes: int = ROW_BYTES) -> KVLayout:
    """K, V and filling in each of a few layers, so that a row is `row_bytes`, or the next power of two that holds it."""
    dtype = subject.dtype
    kv_bytes = 2 * round_up(subject.kv_heads * subject.head_dim * dtype.itemsize, PLANE_ALIGNMENT_BYTES)
    layer_bytes = max(row_bytes // _LAYERS, 1 << (kv_bytes - 1).bit_length())
    planes = [Plane(name=name, heads=subject.kv_heads, dim=subject.head_dim, dtype=dtype) for name in ("k", "v")]
    if layer_bytes > kv_bytes:
        planes.append(Plane(name="filling", heads=1, dim=(layer_bytes - kv_bytes) // dtype.itemsize, dtype=dtype))
    return KVLayout(groups=(Group(layers=tuple(range(_LAYERS)), planes=tuple(planes)),))


class Memory:
    """A cache and the one layer of it, in the middle, that is attended to."""

    def __init__(self, subject: Subject, cache: KVCache) -> None:
        (self.group,) = cache.layout.groups
        self.cache, self.subject = cache, subject
        self.layer = _LAYERS // 2
        self.k_STKD, self.v_STKD = cache.k(self.layer), cache.v(self.layer)
        self.page_rows = self.group.tokens_under(1)
        self._generator = torch.Generator().manual_seed(0)
        self._written: dict[int, Sequence] = {}
        """By slot. Under the others nothing is mapped but the pad, which no one can write to."""

    def write(self, sequence: Sequence, num_tokens: int, *, past: float) -> None:
        """Grow a sequence to so many tokens: random rows of this layer, NaN in all others, `past` in what is mapped behind."""
        start, cache = sequence.length, self.cache
        self._written[sequence.slot] = sequence
        sequence.grow(num_tokens)
        end = self.mapped_rows(sequence)
        for layer in self.group.layers:
            for plane in self.group.planes:
                cache.view(layer, plane.name)[sequence.slot, start:end] = NAN
        for view_STKD in (self.k_STKD, self.v_STKD):
            new_TKD = torch.randn(num_tokens - start, *view_STKD.shape[2:], generator=self._generator)
            view_STKD[sequence.slot, start:num_tokens] = new_TKD.to(cache.device, view_STKD.dtype)
            view_STKD[sequence.slot, num_tokens:end] = past
        sequence.advance(num_tokens - start)

    def fill(self, sequence: Sequence, value: float) -> None:
        """The same value in all rows of a sequence that nobody attends to."""
        for view_STKD in (self.k_STKD, self.v_STKD):
            view_STKD[sequence.slot, : self.mapped_rows(sequence)] = value

    def mapped(self) -> list[MappedRows]:
        """All that is mapped under all sequences, guards and other layers among it."""
        k_STKD, row_bytes = self.k_STKD, self.group.row_bytes
        address = k_STKD.data_ptr() - self.group.offset_bytes(self.layer, "k")
        slot_bytes = k_STKD.stride(0) * k_STKD.itemsize
        found = []
        for slot, sequence in self._written.items():
            num_rows = self.mapped_rows(sequence)
            rows_E = wrap(address + slot * slot_bytes, num_rows * row_bytes, self.cache.device)
            found.append(MappedRows(slot=slot, first=0, words_TW=rows_E.view(torch.int64).view(num_rows, -1)))
        return found

    def mapped_rows(self, sequence: Sequence) -> int:
        """Rows that are mapped under a sequence, guard and all: whole pages."""
        return round_up(sequence.limit + self.cache.guard_tokens, self.page_rows)


@contextmanager
def open_memory(
    subject: Subject, *, slots: int, max_tokens: int = 4096, row_bytes: int = ROW_BYTES, shuffled: bool = False
) -> Iterator[Memory]:
    """A cache of its own. shuffled: whoever grows gets physical pages in a random order."""
    with Pool(subject.device, BUDGET_BYTES) as pool:
        if shuffled:
            extents = pool.acquire(_SPARE_PAGES)
            random.Random(0).shuffle(extents)
            for extent in extents:  # the newest free extent is taken first
                pool.drop(extent)
        layout = layout_of(subject, row_bytes)
        with KVCache(layout, pool, slots=slots, max_tokens=max_tokens, guard_tokens=subject.guard_tokens) as cache:
            yield Memory(subject, cache)


@contextmanager
def far_rows(subject: Subject, num_past: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, list[MappedRows]]]:
    """K and V of a slot 1 whose rows are a page each, and its length: `num_past` rows lie 2**31 elements from its first.

    That would be gigabytes, so a few physical pages are mapped over and over; others under the last rows, whose larger keys
    draw most of the weight. What is mapped is given with each physical page once.
    """
    row_elements = PAGE_BYTES // subject.dtype.itemsize
    border = 2**31 // row_elements
    length = border + num_past
    num_pages = length + subject.guard_tokens
    driver = open_driver(subject.device)
    address = driver.reserve(2 * num_pages * PAGE_BYTES)
    handles: list[Handle] = []
    mapped: list[int] = []

    def put(handle: Handle, pages: Iterable[int]) -> None:
        for page in pages:
            driver.map(address + page * PAGE_BYTES, handle, PAGE_BYTES)
            mapped.append(address + page * PAGE_BYTES)
            driver.set_access(address + page * PAGE_BYTES, PAGE_BYTES, Access.READ_WRITE)

    try:
        handles += [driver.create(PAGE_BYTES) for _ in range(15)]
        pad, near, far = handles[0], handles[1:8], handles[8:]
        # A tensor's own first address is to be mapped, which is slot 0's; and the guard.
        put(pad, [0, *range(num_pages + length, 2 * num_pages)])
        for index, handle in enumerate(near):
            put(handle, range(num_pages + index, num_pages + border, len(near)))
        for index, handle in enumerate(far):
            put(handle, range(num_pages + border + index, num_pages + length, len(far)))
        bytes_E = wrap(address, 2 * num_pages * PAGE_BYTES, driver.device)
        for page in (0, *range(num_pages, num_pages + len(near)), *range(num_pages + border, num_pages + length)):
            bytes_E[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = 0
        elements = bytes_E.view(subject.dtype)
        shape = (2, num_pages, subject.kv_heads, subject.head_dim)
        strides = (num_pages * row_elements, row_elements, subject.head_dim, 1)
        k_offset = round_up(subject.kv_heads * subject.head_dim, 8)
        k_STKD, v_STKD = (elements.as_strided(shape, strides, index * k_offset) for index in range(1, 3))
        generator = torch.Generator().manual_seed(0)
        for first, count, factor in ((0, len(near), 1.0), (border, min(len(far), num_past), 2.0)):
            for view_STKD in (k_STKD, v_STKD):
                rows_TKD = factor * torch.randn(count, *shape[2:], generator=generator)
                view_STKD[1, first : first + count] = rows_TKD.to(driver.device, subject.dtype)
        words_PW = bytes_E.view(torch.int64).view(2 * num_pages, -1)
        mapped_rows = [
            MappedRows(slot=slot, first=first, words_TW=words_PW[slot * num_pages + first :][:count])
            for slot, first, count in ((0, 0, 1), (1, 0, len(near)), (1, border, num_past))
        ]
        yield k_STKD, v_STKD, length, mapped_rows
    finally:
        driver.fence().wait()
        for page_address in mapped:
            driver.unmap(page_address, PAGE_BYTES)
        for handle in handles:
            driver.release(handle)
