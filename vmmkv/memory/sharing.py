"""Rows of one slot under another: by alias where whole extents are shared, by copy where they are not; and back again.

    source   | A | A | A | A | b..|         A aliased: all their rows are among those wanted
    target   | A | A | A | A | c..|         c a page of its own, with a copy of the rows that were left

An extent with more than one holder is never written (law 3): rows are appended behind the aliased extents, and a sequence that
is cut inside one first gets a page of its own (`own_from`). The caller holds the pool's lock.
"""

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from collections.abc import Mapping as ReadOnlyDict
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.driver.base import DONE, Fence, retried
from vmmkv.errors import DriverError, RowsUnmapped
from vmmkv.memory.address_space import Arena, Mapping, Span, arena_bytes
from vmmkv.memory.extents import SIZE_CLASSES, Extent, largest_at
from vmmkv.memory.mapper import Target
from vmmkv.memory.slot_memory import SlotMemory
from vmmkv.units import MIB, PAGE_BYTES, ceil_div, counted

Pages: TypeAlias = ReadOnlyDict[int, Extent]
"""Extents by the page of a slot under which they stand, of one group."""


def shareable(memory: SlotMemory, slot: int, num_tokens: int) -> list[Pages]:
    """The live extents of a slot, by group, that have no row but among the first `num_tokens`."""
    return [
        {
            mapping.page: mapping.extent
            for mapping in span.live()
            if mapping.end_page * PAGE_BYTES <= num_tokens * span.group.row_bytes
        }
        for span in memory.spans(slot)
    ]


def fork_pages(memory: SlotMemory, slot: int, num_tokens: int) -> int:
    """Pages of its own that a fork of a slot takes: see `take`."""
    first_pages = (span.group.page_of(memory.start(span)) for span in memory.spans(slot))
    shared = (extent.num_pages for pages in shareable(memory, slot, num_tokens) for extent in pages.values())
    return sum(memory.end_pages(num_tokens)) - sum(first_pages) - sum(shared)


CopyBytes: TypeAlias = Callable[[int, int, int, int], None]
"""Copies rows that are not aliased: (group, first byte of the slot, size in bytes, target address), on the caller's current
stream. Raises: DriverError."""


def copy_slot_bytes(memory: SlotMemory, slot: int, group: int, first_byte: int, size_bytes: int, target: int) -> None:
    """Copy bytes of a slot from `first_byte` on to the address `target`: a CopyBytes but for its first two arguments."""
    memory.pool.driver.copy(target, memory.arenas[group].spans[slot].address + first_byte, size_bytes)


def take(
    memory: SlotMemory,
    slot: int,
    num_tokens: int,
    given: Sequence[Pages],
    copy_bytes: CopyBytes,
    large_ends: Sequence[int | None] | None = None,
) -> None:
    """Give a slot without rows its first `num_tokens`: what is `given` by alias, if `alias` has not, and what is left by copy.

    The rows that the slot keeps are those from `memory.table.starts[:, slot]` on. What is given of a group is a run of pages
    from the first of those on. Of the first page, if it is not given, the rows from `memory.table.firsts[:, slot]` on are
    copied. `large_ends` are the pages of each group behind which no new extent is large.
    Cost: map and access for each extent, given or new; a copy for each group, launched on the caller's current stream. On
    failure nothing is mapped, or it is pending reclaim. Raises: OutOfPages, DriverError.
    """
    targets, spans = [], memory.spans(slot)
    filled, ends = memory.filled_ends(num_tokens), memory.end_pages(num_tokens)
    for span, pages, end, filled_end, large_end in zip(spans, given, ends, filled, large_ends or filled, strict=True):
        if not span.num_live_pages:
            span.first_page = span.end_page = span.group.page_of(memory.start(span))
        large_end = filled_end if large_end is None else min(large_end, filled_end)
        targets.append(Target(span, end, memory.tenant_in(span), pages, large_end))
    try:
        memory.publish([memory.mapper.stage(targets)])
    except BaseException:
        for span in memory.spans(slot):
            if not span.num_live_pages:
                span.first_page = span.end_page = 0
        raise
    with memory.copying():
        for span, pages in zip(memory.spans(slot), given, strict=True):
            end_page = max((page + extent.num_pages for page, extent in pages.items()), default=0)
            first_row = int(memory.table.firsts[span.index, slot])
            first_byte = max(max(end_page, span.first_page) * PAGE_BYTES, first_row * span.group.row_bytes)
            end_byte = num_tokens * span.group.row_bytes
            if first_byte < end_byte:
                copy_bytes(span.index, first_byte, end_byte - first_byte, span.address + first_byte)


def alias(memory: SlotMemory, slot: int, given: Sequence[Pages]) -> None:
    """Map a part of what `take` will be given under a slot: of each group the next extents, or the first ones.

    Cost: map and access for each extent. On failure none is mapped, or is pending reclaim. Raises: DriverError.
    """
    targets = []
    for span, pages in zip(memory.spans(slot), given, strict=True):
        if pages:
            if not span.num_live_pages:
                span.first_page = span.end_page = min(pages)
            end = max(page + extent.num_pages for page, extent in pages.items())
            targets.append(Target(span, end, memory.tenant_in(span), pages))
    memory.publish([memory.mapper.stage(targets)])


def cut_shared(memory: SlotMemory, slot: int, num_tokens: int, fence: Fence) -> None:
    """Reclaim what a parked slot has mapped past `num_tokens` tokens, from the first page on that is shared."""
    ends = []
    for span, end in zip(memory.spans(slot), memory.cut_ends(slot, num_tokens), strict=True):
        shared = (mapping.page for mapping in span.live_from(end) if mapping.extent.shared)
        ends.append(next(shared, span.end_page))
    memory.reclaim_run(slot, ends, fence)


def own_from(memory: SlotMemory, slot: int, first: int, num_tokens: int) -> None:
    """Give a slot its own pages for the rows from `first` on, as far as they stay when it is cut to `num_tokens`.

    A page that others hold too is exchanged for one with the same bytes. There is no atomic exchange of a mapping: the old
    one is unmapped first, and so this waits for all work launched so far. Where only rows behind the cut will be written,
    each page gets an extent of its own: a tree then has all but one of them already.
    Cost: none if nothing is shared, and that is known from a page or two; else for each extent a fence, an unmap and two
    copies, and a map for each new one. On failure all is as before. Raises: OutOfPages, DriverError.
    """
    for span, end in zip(memory.spans(slot), memory.end_pages(num_tokens), strict=True):
        for mapping in list(span.live_rows_from(first)):
            if mapping.page < end and mapping.extent.shared:
                with memory.copying():
                    _exchange(memory, mapping, end if first < num_tokens else 0)


def check_copy(memory: SlotMemory, source: int, target: int, first_token: int, end_token: int) -> None:
    """Can `copy_rows` copy these? Raises: ValueError, RowsUnmapped."""
    table = memory.table
    if memory.tenants[source] != memory.tenants[target]:
        raise ValueError(f"slots {source} and {target} are two tenants', and neither may read the other's rows")
    if not 0 <= first_token <= end_token:
        raise ValueError(f"rows [{first_token}, {end_token}): they begin at 0 at least, and end no earlier than they begin")
    if table.lengths[source] < end_token or table.lengths[target] < first_token:
        raise ValueError(
            f"rows [{first_token}, {end_token}): the source in slot {source} has {table.lengths[source]} tokens and must have "
            f"{end_token}; the target in slot {target} has {table.lengths[target]} and must have {first_token}"
        )
    if table.limits[target] < end_token:
        raise RowsUnmapped(f"slot {target} has memory for {counted(table.limits[target], 'token')}: grow({end_token}) first")
    if memory.is_shared_from(target, first_token):
        raise ValueError(
            f"slot {target} shares a page with rows from {first_token} on, which so cannot be written: "
            f"truncate({first_token}) and grow({end_token}) give it its own"
        )


def copy_rows(memory: SlotMemory, source: int, target: int, first_token: int, end_token: int) -> None:
    """Give a slot rows [first_token, end_token) of another one, and so many tokens; what `check_copy` allows.

    Where a window has passed rows of either, neither has them. Cost: a copy for each group, launched on the caller's current
    stream; no driver call.
    """
    assert not memory.is_shared_from(target, first_token), f"slot {target} would write what others hold too (law 3)"
    starts = np.maximum(memory.table.starts[:, target], memory.table.starts[:, source])
    firsts = np.where(first_token < starts, starts, memory.table.firsts[:, target])  # what is not copied is another token's
    memory.table.begin(target, starts, firsts)  # the pages before go when the window advances again
    for span in memory.spans(target):
        first_byte = max(first_token, memory.start(span)) * span.group.row_bytes
        end_byte = end_token * span.group.row_bytes
        if first_byte < end_byte:
            copy_slot_bytes(memory, source, span.index, first_byte, end_byte - first_byte, span.address + first_byte)
    memory.table.lengths[target] = end_token


def num_unmoved(rows: npt.NDArray[np.int64]) -> int:
    """Number of these rows that stay at their place in a compaction to them."""
    return int((rows == np.arange(len(rows))).sum())  # no row moves back, so that all behind one that moves do too


CHUNK_BYTES: Final = 32 * MIB
"""Size of the buffer through which `compact` moves rows."""


def compact(memory: SlotMemory, slot: int, rows: npt.NDArray[np.int64], first: int) -> None:
    """Move `rows` of a slot, in ascending order, to its front, and reclaim the pages wholly past them and the guard.

    The first `first` of them stay where they are; the pages that the others move to are the slot's own (`own_from`). Chunk by
    chunk the rows are gathered outside and copied back: no row is written before it is read, for rows only move to the front.
    Cost: for each group and each 32 MiB of rows that move a gather and a copy, launched on the caller's current stream; a
    fence if any page is reclaimed.
    """
    device = memory.pool.device
    moved_T = torch.from_numpy(rows[first:])
    moved_T = moved_T.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else moved_T
    largest = max(span.group.row_bytes for span in memory.spans(slot))
    chunk_rows = min(max(1, CHUNK_BYTES // largest), len(moved_T))
    buffer = torch.empty(chunk_rows * largest, dtype=torch.uint8, device=device)
    with memory.copying():
        for span in memory.spans(slot) if chunk_rows else ():
            row_bytes = span.group.row_bytes
            rows_SE = memory.arenas[span.index].rows(slot, 0, int(rows[-1]) + 1).view(-1, row_bytes)
            for at in range(0, len(moved_T), chunk_rows):
                chunk_T = moved_T[at : at + chunk_rows]
                chunk_TE = buffer[: len(chunk_T) * row_bytes].view(-1, row_bytes)
                # Numbers of 8 bytes: torch copies number by number.
                memory.pool.driver.gather(chunk_TE.view(torch.int64), rows_SE.view(torch.int64), chunk_T)
                memory.pool.driver.copy(span.address + (first + at) * row_bytes, chunk_TE.data_ptr(), chunk_TE.numel())
    with contextlib.suppress(DriverError):  # then the pages stay as if they were mapped ahead; but the device is lost
        retried(lambda: memory.reclaim_from(slot, len(rows)))  # the moves cannot be taken back


def _exchange(memory: SlotMemory, old: Mapping, end: int) -> None:
    """Takes extents as large as they can be before the page `end`, and behind it one for each page, to go one by one."""
    mapper, pool, span = memory.mapper, memory.pool, old.span
    tenant_of = memory.tenant_in(span)
    sizes: list[int] = []
    while (page := old.page + sum(sizes)) < old.end_page:
        sizes.append(largest_at(page, min(end, old.end_page)) if page < end else 1)
    by_size = pool.acquire_mixed(Counter(sizes))
    extents = deque(by_size[size].pop() for size in sizes)
    new: list[Mapping] = []

    def restore() -> None:
        for page in range(old.page, old.end_page):
            if page in span.mappings:
                mapper.finish(span.mappings[page])
        mapper.alias(span, old.page, old.extent)

    try:
        kept = torch.empty(old.extent.size_bytes, dtype=torch.uint8, device=pool.device)
        pool.driver.copy(kept.data_ptr(), old.address, kept.numel())
        memory.fence().wait()
        mapper.unmap(old)
        try:
            while extents:
                extents[0].tenant, extents[0].zeroed = None, False  # until the copy its bytes are some other's
                new.append(mapper.map(span, new[-1].end_page if new else old.page, extents.popleft()))
            pool.driver.copy(old.address, kept.data_ptr(), kept.numel())
        except BaseException:
            mapper.reclaim(new, DONE)
            retried(restore)
            raise
        finally:
            mapper.let_go(old)
    finally:
        for extent in extents:
            pool.drop(extent)
    for mapping in new:
        mapping.extent.tenant = tenant_of(mapping.page)
    memory.mapped_pages += old.extent.num_pages


_NUM_WINDOWS: Final = 64


class Windows:
    """Windows: addresses of no slot, to read extents that are mapped under none.

    The prefix tree holds extents that no slot has mapped. To copy a few rows from one it is mapped in a window, and reclaimed
    at once: it is unmapped when the copy is done. Each window is as wide as the largest extent. The caller holds the lock.
    """

    def __init__(self, memory: SlotMemory) -> None:
        group = memory.arenas[0].group
        rows = ceil_div(max(SIZE_CLASSES) * PAGE_BYTES, group.row_bytes)
        self._memory = memory
        address = memory.reserve(arena_bytes([group], _NUM_WINDOWS, rows))
        self._arena = Arena(memory.pool.driver, address, -1, group, slots=_NUM_WINDOWS, max_rows=rows)
        memory.windows = self._arena

    @property
    def num_free(self) -> int:
        """Windows under which nothing is mapped."""
        return sum(not span.mappings for span in self._arena.spans)

    def copy(self, extent: Extent, first_byte: int, size_bytes: int, target: int) -> None:
        """Copy bytes from `first_byte` of an extent on to the address `target`, on the caller's current stream. See `run`."""
        self.run(extent, lambda address: self._memory.pool.driver.copy(target, address + first_byte, size_bytes))

    def run(self, extent: Extent, launch: Callable[[int], object]) -> Fence:
        """Launch copies to or from an extent, which `launch` is told the address of, on the caller's current stream.

        The window holds the extent until they have ended. Returns the fence behind them.
        Cost: a map, an access call, the copies and a fence; an unmap later. Waits for an earlier copy if all windows are in
        use.
        """
        memory, pool, span = self._memory, self._memory.pool, self._free_span()
        mapping = memory.mapper.alias(span, 0, extent)
        try:
            launch(mapping.address)
        finally:
            fence = retried(pool.driver.fence)
            memory.mapper.reclaim([mapping], fence)
        return fence

    def _free_span(self) -> Span:
        while True:
            for span in self._arena.spans:
                if not span.mappings:
                    return span
            fence = self._memory.mapper.oldest_fence()
            assert fence is not None, "every window is in use, and none is pending reclaim"
            fence.wait()
            self._memory.mapper.collect()
