"""The public cache: sequences over slots of one contiguous range of addresses each, with memory mapped on demand.

    pool = Pool("cuda:0", budget_bytes=8 * GIB)
    cache = KVCache(layout, pool, slots=256, max_tokens=32768)
    sequence = cache.open()
    sequence.grow(1000)                       # maps pages under the slot
    sequence.k(layer)[:1000] = keys           # a plain tensor: any kernel, any write
    sequence.advance(1000)

Sharing a pool, several caches take its lock for every operation, so driver calls come from one thread at a time.
"""

import contextlib
import functools
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.arguments import whole, wholes
from vmmkv.driver.base import Fence
from vmmkv.errors import BudgetError, Closed, DriverError, Evicted, OutOfPages, OutOfSlots, RowsUnmapped, SequenceTooLong
from vmmkv.layout import SCALES, KVLayout
from vmmkv.mapper_thread import MapperThread
from vmmkv.memory import sharing
from vmmkv.memory.address_space import SlotTable
from vmmkv.memory.memory_map import SlotMap, SlotState, slot_maps
from vmmkv.memory.pool import Evictable, Extent, Pool
from vmmkv.memory.slot_memory import SlotMemory
from vmmkv.units import PAGE_BYTES, ceil_div, counted, format_bytes

# -------- sequence
# What a user holds of a slot: a running sequence, or a parked one.


@dataclass(eq=False, slots=True)
class ParkedSlot:
    """A slot whose sequence has ended and whose mappings stay, until it is adopted or evicted."""

    slot: int
    length: int
    """Rows [0, length) that may be adopted; 0 is a blank slot, whose memory anybody of the tenant may have."""
    tenant: Hashable
    stamp: int
    """The pool's clock when it was parked."""
    fence: Fence
    """Behind all work that may still touch it: whoever reads it since then renews this."""
    num_pages: int
    """Mapped under it, over all groups."""

    def __repr__(self) -> str:
        return f"<ParkedSlot in slot {self.slot}: {counted(self.length, 'token')} in {counted(self.num_pages, 'page')}>"


class Sequence:
    """One sequence's memory: a slot of addresses, and what is mapped there. Made by `KVCache.open` or `adopt`.

    `length` tokens are written; rows [length, limit) are mapped and may be written next. Addresses never change
    while the sequence lives (law 6). Every method raises Closed after `close` or `park`.
    """

    __slots__ = ("_occupancy", "_rows", "closed", "max_tokens", "slot", "tenant")

    def __init__(self, occupancy: "Occupancy", slot: int, max_tokens: int, tenant: Hashable) -> None:
        self._occupancy = occupancy
        self._rows: dict[int, tuple[tuple[int, int], torch.Tensor]] = {}
        self.slot = slot
        self.max_tokens = max_tokens
        self.tenant = tenant
        self.closed = False

    @property
    def length(self) -> int:
        """Tokens written."""
        return int(self._table.lengths[self.slot])

    @property
    def limit(self) -> int:
        """Tokens that the mapped memory has room for, at most `max_tokens`; the device sees it as `cache.limit[slot]`."""
        return int(self._table.limits[self.slot])

    def start(self, group: int = 0) -> int:
        """The first row still kept in a group: 0 unless `advance_start` was called."""
        group = self._check_group(group)
        return int(self._table.starts[group, self.slot])

    def grow(self, num_tokens: int) -> None:
        """Map memory so that this sequence can hold `num_tokens` tokens in all.

        On failure the sequence, its mappings and the budget are exactly as before, but that parked slots may have been
        evicted to make room.

        Cost: one map and one access call for each page that is missing (and a create or a zero where there is no free
        page of this tenant); none, nor the pool's lock, if enough is mapped. Blocks only if the pool must wait for a
        retirement, or the lock is taken. Not under graph capture.
        Raises: SequenceTooLong; OutOfPages, naming the pages wanted, free and evictable; DriverError.
        """
        num_tokens = self._check_reach(num_tokens)
        if num_tokens <= self.limit:
            return
        occupancy, began_ns = self._occupancy, time.perf_counter_ns()
        with occupancy.pool.lock:
            occupancy.check_thread()
            if num_tokens > self._table.committed[self.slot]:  # else the mapper was at it
                try:
                    occupancy.memory.grow(self.slot, num_tokens)
                except OutOfPages as error:
                    raise OutOfPages(f"sequence in slot {self.slot} cannot grow to {num_tokens} tokens: {error}") from None
            if self.length:
                occupancy.stalls += 1
                occupancy.stall_us += (time.perf_counter_ns() - began_ns) / 1e3

    def expect(self, num_tokens: int) -> None:
        """Say that `num_tokens` tokens in all are to come soon, so that the mapper has the memory ready. No driver call.

        Raises: SequenceTooLong.
        """
        table = self._table
        table.expected[self.slot] = self._check_reach(num_tokens)
        self._occupancy.wake()

    def advance(self, num_tokens: int = 1) -> None:
        """`num_tokens` more rows have been written. No driver call.

        Raises: RowsUnmapped if that passes `limit`: grow first.
        """
        self._check_live()
        self._occupancy.advance(self.slot, num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens only; pages wholly past them (and the guard) retire.

        Cost: one fence if any page retires; no map or unmap. Does not block.
        Raises: ValueError for more than `length`; RowsUnmapped if a window has moved past what would be needed.
        """
        with self._occupancy.pool.lock:
            table = self._table
            num_tokens = self._check_kept(num_tokens)
            self._occupancy.check_windows(self.slot, num_tokens)
            sharing.own_from(self._occupancy.memory, self.slot, num_tokens)
            self._occupancy.memory.retire_from(self.slot, num_tokens)
            self._occupancy.forget(self.slot, num_tokens)
            table.lengths[self.slot] = num_tokens
            table.expected[self.slot] = 0
            self._occupancy.memory.assert_owned(self.slot)

    def own_from(self, num_tokens: int) -> None:
        """Have pages of its own for the rows from `num_tokens` on, as far as `truncate(num_tokens)` keeps their pages.

        What `truncate` does first, and alone can find no page. So several sequences are cut all or none: who cuts them has
        each own its rows before the first is cut. A fork made in between shares again.
        Cost: none if nobody else holds those pages; else, for each, an unmap, a map and two copies, and it waits for all work
        launched so far. On failure all tokens are as before.
        Raises: as truncate; OutOfPages, DriverError.
        """
        with self._occupancy.pool.lock:
            num_tokens = self._check_kept(num_tokens)
            self._occupancy.check_windows(self.slot, num_tokens)
            sharing.own_from(self._occupancy.memory, self.slot, num_tokens)

    def advance_start(self, group: int, start_token: int | None = None) -> None:
        """Give back a windowed group's rows before `start_token`, by default all that the next token cannot see.

        Cost: one fence if any page retires. Does not block.
        Raises: ValueError if the group has no window, or rows would go that the next token still sees.
        """
        with self._occupancy.pool.lock:
            table = self._table
            group = self._check_group(group)
            layout_group = self._layout.groups[group]
            if layout_group.window is None:
                raise ValueError(f"group {group} has no window: all its rows are needed")
            current = int(table.starts[group, self.slot])
            unseen = self._layout.start_for(layout_group, int(table.lengths[self.slot]))
            latest = max(unseen, current)
            start_token = latest if start_token is None else whole("start_token", start_token)
            if not current <= start_token <= latest:
                raise ValueError(
                    f"start_token={start_token} in group {group} of slot {self.slot}: it is {current} now, and with a window "
                    f"of {layout_group.window} the next token sees rows from {unseen} on"
                )
            self._occupancy.memory.retire_before(self.slot, group, start_token)

    def k(self, layer: int) -> torch.Tensor:
        """Keys of a layer: `view(layer, "k")`. Not to be used once the sequence has ended."""
        return self.view(layer, "k")

    def v(self, layer: int) -> torch.Tensor:
        """Values of a layer: `view(layer, "v")`."""
        return self.view(layer, "v")

    def k_scale(self, layer: int) -> torch.Tensor:
        """The scales of quantised keys, kept in the rows: [limit - start, heads], strided by 2."""
        return self.view(layer, SCALES)[..., 0]

    def v_scale(self, layer: int) -> torch.Tensor:
        """The scales of quantised values, each behind that of its keys."""
        return self.view(layer, SCALES)[..., 1]

    def view(self, layer: int, plane: str) -> torch.Tensor:
        """A plane of a layer over the rows [start, limit): [limit - start, heads, dim], to read and to write in place.

        A plane without a dim, as scales have none, gives [limit - start, heads].

        Its storage ends with the last mapped row, so that torch itself refuses whatever goes past it. Take a new view
        after `grow`, `truncate` or `advance_start`; the addresses stay the same. Drop it before `close` or `park`: then others
        may have the memory, and when it is unmapped touching it ends the process, or loses the CUDA context.
        Cost: 3 us; no driver call, no copy.
        Raises: LayoutError for a layer or plane that there is not.
        """
        table = self._table
        arena = self._occupancy.memory.arena_of(layer)
        bounds = int(table.starts[arena.index, self.slot]), int(table.limits[self.slot])
        known = self._rows.get(arena.index)
        if known is None or known[0] != bounds:
            known = self._rows[arena.index] = bounds, arena.rows(self.slot, *bounds)
        return arena.view_rows(known[1], layer, plane)

    def park(self, num_tokens: int | None = None) -> ParkedSlot:
        """End the sequence and keep its memory mapped, with its first `num_tokens` (all by default) to be adopted.

        Parked slots are taken back, the oldest first, when the pool runs short. 0 tokens makes a blank slot, which the
        next `open` of this tenant takes without a driver call.
        Cost: one fence.
        """
        occupancy = self._occupancy
        with occupancy.pool.lock:
            num_tokens = int(self._table.lengths[self.slot]) if num_tokens is None else num_tokens
            num_tokens = self._check_kept(num_tokens)
            if num_tokens:
                self._occupancy.check_windows(self.slot, num_tokens)
            return occupancy.park(self, num_tokens)

    def close(self) -> None:
        """End the sequence; its pages retire and are free once all work launched so far is done. Idempotent.

        Cost: one fence. Does not block.
        """
        with self._occupancy.pool.lock:
            if not self.closed:
                self._occupancy.close(self)

    def __repr__(self) -> str:
        if self.closed:
            return f"<Sequence in slot {self.slot}, closed>"
        return f"<Sequence in slot {self.slot}: {counted(self.length, 'token')}, room for {self.limit} of {self.max_tokens}>"

    def __enter__(self) -> "Sequence":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _table(self) -> SlotTable:
        self._check_live()
        return self._occupancy.table

    @property
    def _layout(self) -> KVLayout:
        return self._occupancy.layout

    def _check_live(self) -> None:
        self._occupancy.pool.lock.check_process()
        if self.closed:
            raise Closed(f"the sequence in slot {self.slot} was closed or parked; open or adopt another")

    def _check_group(self, group: int) -> int:
        group = whole("group", group)
        if not 0 <= group < len(self._layout.groups):
            raise ValueError(f"group={group}: this cache has groups 0 to {len(self._layout.groups) - 1}")
        return group

    def _check_reach(self, num_tokens: int) -> int:
        self._check_live()
        num_tokens = whole("num_tokens", num_tokens)
        if num_tokens < 0:
            raise ValueError(f"num_tokens={num_tokens}: it cannot be negative")
        if num_tokens > self.max_tokens:
            raise SequenceTooLong(
                f"the sequence in slot {self.slot} cannot have {counted(num_tokens, 'token')}: it was opened with "
                f"max_tokens={self.max_tokens}"
            )
        return num_tokens

    def _check_kept(self, num_tokens: int) -> int:
        num_tokens = whole("num_tokens", num_tokens)
        length = int(self._table.lengths[self.slot])
        if not 0 <= num_tokens <= length:
            raise ValueError(f"num_tokens={num_tokens}: the sequence in slot {self.slot} has {length} tokens to keep")
        return num_tokens


# -------- occupancy
# Who is in which slot, and every way from one occupant to the next.
#
#     free ──open──> live ──park──> parked ──adopt, open──> live
#      ^              │               │
#      │            close           evict
#      └──unmapped── closing <────────┘
#
# What may fail comes first in every step, so that a failure leaves the occupants as they were.


class Keeper(Protocol):
    """Who keeps more than parked slots, for sequences to come: see `vmmkv.prefix`. Calls come with the pool's lock held."""

    def keeps(self, slot: int) -> bool:
        """Is this parked slot evicted with what the keeper gives up, and not by itself?"""
        ...

    def is_pinned(self, slot: int) -> bool:
        """Is this parked slot to be kept before others?"""
        ...

    def forget(self, slot: int, num_tokens: int) -> None:
        """The rows of a slot past `num_tokens` are gone, or about to be written."""
        ...

    def leave(self, slot: int) -> None:
        """Whoever had the slot does not any more, with all its rows."""
        ...

    def oldest(self) -> Evictable | None:
        """What was used least recently of what it keeps."""
        ...

    def evict_oldest(self) -> None:
        """Give that up."""
        ...

    def unevictable_bytes(self) -> int:
        """See Reclaimable."""
        ...

    def clear(self) -> None:
        """Give everything up, whatever is pinned; no sequence runs any more."""
        ...

    def idle_pages(self, enough: int) -> int:
        """Pages that this would free at once, counted no further than `enough`."""
        ...

    def holders(self) -> Counter[Extent]:
        """How often it holds each extent."""
        ...

    def check(self) -> None:
        """Recount what it keeps."""
        ...


class Occupancy:
    """The sequences and the parked slots of one cache. What the pool asks of a cache, it asks here (see Reclaimable).

    Every call comes with the pool's lock held, but for `advance` and `wake`, and those that say so because they wait.
    """

    def __init__(self, layout: KVLayout, pool: Pool, memory: SlotMemory) -> None:
        self.layout = layout
        self.pool = pool
        self.memory = memory
        self.table = memory.table
        self.sequences: dict[int, Sequence] = {}
        self.parked: dict[int, ParkedSlot] = {}
        """Oldest first."""
        self.keeper: Keeper | None = None
        self.thread: MapperThread | None = None
        """Who pumps in the background, if anybody does; perhaps it has failed, and nobody was told yet."""
        self.closed = False
        """Is it of no use any more? Something can still be mapped, as long as it is attached."""
        self.attached = False
        """Is it known to the pool, and so perhaps a holder of extents?"""
        self.stalls = 0
        self.stall_us = 0.0
        self.pumped_pages = 0
        self.adopted_slots = 0

    def attach(self) -> None:
        """From now on the pool asks here when pages run short, and closes this when it closes."""
        self.pool.attach(self)
        self.attached = True

    # in

    def open_at(self, slot: int, end: int, tenant: Hashable) -> Sequence:
        """A new sequence in a free slot. No driver call."""
        sequence = Sequence(self, slot, end, tenant)
        self.sequences[slot] = sequence
        self.memory.tenants[slot] = tenant
        self.table.states[slot] = SlotState.LIVE
        self.table.ends[slot] = end
        return sequence

    def take_over(self, parked: ParkedSlot, num_tokens: int, end: int) -> Sequence:
        """A parked slot becomes live with what is mapped there, and its first rows if `num_tokens` is not 0."""
        slot = parked.slot
        self.leave(slot)
        del self.parked[slot]  # so that making room for it does not evict it
        try:
            parked.fence.order(self.memory.streams)
            sharing.cut_shared(self.memory, slot, num_tokens, parked.fence)
            sharing.own_from(self.memory, slot, num_tokens)
            committed = self.memory.committed(slot, from_first=not num_tokens)
            self.memory.raise_limits({slot: min(committed, end)})
        except BaseException:
            self.memory.unuse(slot)
            parked.length = min(parked.length, self.memory.committed(slot))  # what was cut by now does not come back
            parked.num_pages = self.memory.num_pages(slot)
            self.parked = dict(sorted({**self.parked, slot: parked}.items(), key=lambda entry: entry[1].stamp))
            with contextlib.suppress(DriverError):  # else the device is lost, and nothing is read or unmapped any more
                parked.fence = self.memory.fence()
            raise
        if not num_tokens:
            self.memory.retire_cut(slot, parked.fence)
        self.memory.use(slot)
        self.adopted_slots += 1
        sequence = self.open_at(slot, end, parked.tenant)
        self.table.lengths[slot] = num_tokens
        self.memory.assert_owned(slot)
        return sequence

    def open_with(
        self, slot: int, end: int, tenant: Hashable, num_tokens: int, pages: Seq[sharing.Pages], source: sharing.Source
    ) -> Sequence:
        """A new sequence in a free slot that has `num_tokens` tokens already: see `sharing.take`.

        The slot's starts are set before, and are 0 again if this fails.
        """
        sequence = self.open_at(slot, end, tenant)
        try:
            sharing.take(self.memory, slot, num_tokens, pages, source)
        except BaseException:
            if self.table.limits[slot]:
                self.close(sequence)  # what is mapped by now retires
            else:
                self._unopen(sequence)
            raise
        self.table.lengths[slot] = num_tokens
        self.memory.assert_owned(slot)
        return sequence

    def _unopen(self, sequence: Sequence) -> None:
        """Nothing is mapped for a sequence, and nobody was told of it: no driver call, so that this cannot fail too."""
        self.table.clear(sequence.slot, SlotState.CLOSING)
        self.table.starts[:, sequence.slot] = 0
        del self.sequences[sequence.slot]
        sequence.closed = True
        self._free_if_bare(sequence.slot)

    def fork(self, parent: Sequence, slot: int, end: int) -> Sequence:
        """A new sequence in a free slot with all that another one has."""
        num_tokens = parent.length
        pages = sharing.shareable(self.memory, parent.slot, num_tokens)
        self.table.starts[:, slot] = self.table.starts[:, parent.slot]
        return self.open_with(slot, end, parent.tenant, num_tokens, pages, sharing.SlotRows(self.memory, parent.slot))

    def clear_run(self, count: int) -> int:
        """The first of `count` adjacent free slots; made free, if need be, from parked and closing ones."""
        first = self.table.run_of(count, SlotState.FREE)
        if first is None and self._collect():
            first = self.table.run_of(count, SlotState.FREE)
        if first is None and count == 1 and self.parked:
            first = next((slot for slot in self.parked if not self.is_pinned(slot)), next(iter(self.parked)))
        if first is None:
            first = self.table.run_of(count, SlotState.FREE, SlotState.PARKED, SlotState.CLOSING)
        if first is None:
            raise OutOfSlots(
                f"{'a slot is' if count == 1 else f'{count} adjacent slots are'} wanted; {len(self.sequences)} of "
                f"{self.table.num_slots} run sequences; close some, or make the cache with more slots"
            )
        run = range(first, first + count)
        for slot in run:
            if slot in self.parked:
                self.evict(self.parked[slot])
        while not all(self.table.state(slot) is SlotState.FREE for slot in run):
            self.wait_for_retired()
            self._collect()
        return first

    # on

    def advance(self, slots: npt.ArrayLike, num_tokens: npt.ArrayLike) -> None:
        """See KVCache.advance. Takes no lock: a slot's length is written by its sequence's owner alone."""
        indices = np.atleast_1d(wholes("slots", slots))
        try:
            before = self.table.lengths[indices]
        except IndexError:
            unknown = [int(slot) for slot in indices if not 0 <= slot < len(self.table)]
            raise ValueError(f"there is no slot {unknown[0]}: this cache has slots 1 to {self.table.num_slots}") from None
        after = before + wholes("num_tokens", num_tokens)
        named = np.zeros(len(self.table), dtype=np.bool_)  # np.unique sorts: 50 us for 256 slots
        named[indices] = True
        if np.count_nonzero(named) != len(indices):
            raise ValueError("a slot is named twice: its rows would be counted once; add its tokens up")
        wrong = (after > self.table.limits[indices]) | (after < before) | (indices < 0)
        if wrong.any():
            slot, length, wanted = (int(values[wrong][0]) for values in (indices, before, after))
            if slot < 0 or wanted < length:
                raise ValueError(
                    f"slot {slot} cannot advance from {length} to {wanted} tokens: slots and num_tokens are at least 0"
                )
            if self.table.states[slot] != SlotState.LIVE:
                raise RowsUnmapped(f"no sequence runs in slot {slot}: it is {self.table.state(slot).name.lower()}")
            raise RowsUnmapped(
                f"slot {slot} has {counted(length, 'token')} and memory for {self.table.limits[slot]}: "
                f"it cannot advance to {wanted}; grow first"
            )
        self.table.lengths[indices] = after
        self.wake()

    def wake(self) -> None:
        """Somebody may be short of memory, or something may have retired."""
        thread = self.thread
        if thread is not None:
            thread.wake()

    def check_thread(self) -> None:
        """Raise what the mapper's thread failed with, once: then there is none any more, and another may be started."""
        if self.thread is not None and self.thread.failed:
            self.stop_thread()

    def stop_thread(self) -> None:
        """End the mapper's thread, if there is one; raises what it failed with. Without the lock, unless it has failed."""
        thread, self.thread = self.thread, None
        if thread is not None:
            thread.stop()

    def map_ahead(self, budget_us: float, lookahead_tokens: int, *, settle: bool) -> int:
        """See KVCache.map_ahead and SlotMemory.map_ahead."""
        began_ns = time.perf_counter_ns()
        mapped = self.memory.map_ahead(budget_us, lookahead_tokens, settle=settle)
        self.pumped_pages += mapped
        left_us = budget_us - (time.perf_counter_ns() - began_ns) / 1e3
        if mapped and left_us < self.memory.mapper.unmap_us:
            return mapped
        return mapped + self._collect(left_us)

    # out

    def end(self, sequence: Sequence, state: SlotState) -> Fence:
        """A sequence is over; the fence behind its work. Cost: the limit's write, which gives it, or a fence."""
        fence = self.memory.lower_limit(sequence.slot, 0)
        self.table.clear(sequence.slot, state)
        del self.sequences[sequence.slot]
        sequence.closed = True
        return fence

    def park(self, sequence: Sequence, num_tokens: int) -> ParkedSlot:
        """End a sequence and keep its memory, with its first `num_tokens` to be adopted."""
        fence, slot = self.end(sequence, SlotState.PARKED), sequence.slot
        self.leave(slot)
        self.memory.unuse(slot)
        self.parked[slot] = parked = ParkedSlot(
            slot, num_tokens, sequence.tenant, self.pool.tick(), fence, self.memory.num_pages(slot)
        )
        return parked

    def close(self, sequence: Sequence) -> None:
        """End a sequence and retire its memory."""
        fence = self.end(sequence, SlotState.CLOSING)
        self.leave(sequence.slot)
        self.memory.retire_all(sequence.slot, fence)
        self._free_if_bare(sequence.slot)
        self.wake()

    def evict(self, parked: ParkedSlot) -> None:
        """Retire a parked slot's mappings. No driver call."""
        del self.parked[parked.slot]
        self.leave(parked.slot)
        self.table.clear(parked.slot, SlotState.CLOSING)
        self.memory.retire_all(parked.slot, parked.fence)
        self._free_if_bare(parked.slot)

    def cut_parked(self, slot: int, num_tokens: int) -> None:
        """A parked slot keeps its first `num_tokens` only. No driver call."""
        parked = self.parked[slot]
        self.memory.retire_run(slot, self.memory.end_pages(num_tokens), parked.fence)
        parked.length, parked.num_pages = num_tokens, self.memory.num_pages(slot)

    def drain(self) -> None:
        """Unmap what retires. Waits for its fences without the lock, which others need meanwhile."""
        while True:
            with self.pool.lock:
                self._collect()
                fence = self.memory.mapper.oldest_fence()
            if fence is None:
                return
            fence.wait()

    def close_all(self) -> None:
        """See Reclaimable. Waits without the lock; if it fails it can be called again, and goes on."""
        self.pool.lock.check_process()
        try:
            self.stop_thread()
        finally:
            self._close_all()

    def _close_all(self) -> None:
        with self.pool.lock:
            if not self.attached:
                return
            for sequence in list(self.sequences.values()):
                self.close(sequence)
            for parked in list(self.parked.values()):
                self.evict(parked)
            if self.keeper is not None:
                self.keeper.clear()
            fence = self.memory.fence()
            self.closed = True  # nothing is launched, opened or grown here while the lock is not held
        fence.wait()
        self.drain()
        with self.pool.lock:
            if self.attached:
                self.memory.unmap_pads()
                self.pool.detach(self)
                self.attached = False

    # what the pool asks

    def retiring_pages(self) -> int:
        """See Reclaimable."""
        return self.memory.mapper.retiring_pages

    def idle_pages(self, enough: int) -> int:
        """See Reclaimable."""
        num_pages = self.memory.mapper.retired_pages()
        for parked in itertools.takewhile(lambda parked: parked.fence.done(), self._evictable_slots()):  # the oldest goes first
            if num_pages >= enough:
                return num_pages
            num_pages += self.memory.idle_pages(parked.slot)
        if self.keeper is not None:
            num_pages += self.keeper.idle_pages(enough - num_pages)
        return num_pages

    def unevictable_bytes(self) -> int:
        """See Reclaimable."""
        return 0 if self.keeper is None else self.keeper.unevictable_bytes()

    def parked_pages(self) -> int:
        """Pages of parked slots, which can be evicted."""
        return sum(parked.num_pages for parked in self.parked.values())

    def oldest_evictable(self) -> Evictable | None:
        """See Reclaimable."""
        parked = next(self._evictable_slots(), None)
        slot = None if parked is None else Evictable(parked.stamp, parked.fence.done())
        leaf = None if self.keeper is None else self.keeper.oldest()
        return min(filter(None, (slot, leaf)), key=lambda each: each.stamp, default=None)

    def evict_oldest(self) -> None:
        """See Reclaimable."""
        parked = next(self._evictable_slots(), None)
        leaf = None if self.keeper is None else self.keeper.oldest()
        if self.keeper is not None and leaf is not None and (parked is None or leaf.stamp < parked.stamp):
            self.keeper.evict_oldest()
        else:
            assert parked is not None, "nothing is evictable"
            self.evict(parked)

    def _evictable_slots(self) -> Iterator[ParkedSlot]:
        """Parked slots, the oldest first, but for those that go with what is kept of their tokens."""
        return (parked for slot, parked in self.parked.items() if self.keeper is None or not self.keeper.keeps(slot))

    def collect(self, num_pages: int) -> int:
        """See Reclaimable."""
        return self._collect(max_pages=num_pages)

    def wait_for_retired(self) -> bool:
        """See Reclaimable."""
        fence = self.memory.mapper.oldest_fence()
        if fence is not None:
            fence.wait()
        return fence is not None

    def holders(self) -> Counter[Extent]:
        """See Reclaimable."""
        return self.memory.holders() + (Counter() if self.keeper is None else self.keeper.holders())

    def users(self) -> Counter[Extent]:
        """See Reclaimable."""
        return self.memory.users()

    # laws

    def check(self) -> None:
        """The occupants are those that the slots' states tell of."""
        assert sorted(self.sequences) == self.table.where(SlotState.LIVE), "a live slot has no sequence"
        assert sorted(self.parked) == self.table.where(SlotState.PARKED), "a parked slot is not listed"
        for slot, parked in self.parked.items():
            assert parked.num_pages == self.memory.num_pages(slot), f"parked slot {slot} has lost or gained pages"
        if self.keeper is not None:
            self.keeper.check()

    def check_windows(self, slot: int, num_tokens: int) -> None:
        """Are all rows kept that a sequence of so many tokens needs for its next one? Raises RowsUnmapped if not."""
        for index, group in enumerate(self.layout.groups):
            start, needed = int(self.table.starts[index, slot]), self.layout.start_for(group, num_tokens)
            if start > needed:
                raise RowsUnmapped(
                    f"with {num_tokens} tokens the window of group {index} begins at row {needed}, and rows before {start} "
                    f"are gone; call advance_start later, or recompute"
                )

    # within

    def is_pinned(self, slot: int) -> bool:
        """Does the prefix cache keep this parked slot before others?"""
        return self.keeper is not None and self.keeper.is_pinned(slot)

    def forget(self, slot: int, num_tokens: int) -> None:
        """The rows of a slot past `num_tokens` are nobody's any more."""
        if self.keeper is not None:
            self.keeper.forget(slot, num_tokens)

    def leave(self, slot: int) -> None:
        """Whoever had the slot does not any more."""
        if self.keeper is not None:
            self.keeper.leave(slot)

    def _collect(self, budget_us: float = float("inf"), max_pages: float = float("inf")) -> int:
        try:
            return self.memory.mapper.collect(budget_us, max_pages)
        finally:
            for slot in self.table.where(SlotState.CLOSING):
                self._free_if_bare(slot)

    def _free_if_bare(self, slot: int) -> None:
        if self.memory.is_bare(slot):
            self.table.clear(slot, SlotState.FREE)


# -------- stats
# What a cache tells of itself.


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """A cache at one moment.

    mapped = tokens + guard + waste + parked;  held = mapped + retiring (of this cache's share of the pool)
    """

    reserved_bytes: int
    """Addresses, which cost nothing."""
    mapped_bytes: int
    """Memory under live and parked slots."""
    retiring_bytes: int
    """Memory that waits for a fence before it is unmapped."""
    parked_bytes: int
    """Memory under parked slots: it can be adopted, and is taken back under pressure."""
    token_bytes: int
    """What the rows of the tokens written need, of running sequences."""
    guard_bytes: int
    """Mapped past the tokens for kernels that read whole tiles."""
    waste_bytes: int
    """Mapped for running sequences beyond tokens and guard: unfilled pages and what was mapped ahead."""
    pool_created_bytes: int
    pool_held_bytes: int
    pool_used_bytes: int
    """Of what is held: by running sequences, of all caches, once however many share it; the rest can be had."""
    pool_free_bytes: int
    pool_budget_bytes: int
    num_tokens: int
    """Tokens of running sequences."""
    num_sequences: int
    num_parked: int
    num_slots: int
    stalls: int
    """Growths of a sequence that had tokens already and lacked memory: its caller waited, for the driver or the lock."""
    stall_us: float
    """How long they waited in all, from the call on."""
    mapped_pages: int
    """Pages mapped in the cache's life, by anybody."""
    pumped_pages: int
    """Of these, ahead of need: by `map_ahead` or the mapper's thread."""
    adopted_slots: int
    """Slots handed on with their mappings, which cost no driver call."""
    driver_calls: dict[str, int]
    """Successful calls by name, of the whole pool."""


def snapshot(memory: SlotMemory, occupancy: Occupancy) -> CacheStats:
    """Count what is mapped for whom. The pool's lock is held."""
    table, pool = memory.table, memory.pool.stats()
    live, parked_pages = list(occupancy.sequences), occupancy.parked_pages()
    token_bytes = guard_bytes = 0
    for index, arena in enumerate(memory.arenas):
        row_bytes = arena.group.row_bytes
        for slot in live:
            length_bytes = int(table.lengths[slot]) * row_bytes
            token_bytes += length_bytes - int(table.starts[index, slot]) * row_bytes
            room_bytes = max(0, arena.spans[slot].end_page * PAGE_BYTES - length_bytes)
            guard_bytes += min(memory.guard_tokens * row_bytes, room_bytes)
    live_bytes = sum(memory.num_pages(slot) for slot in live) * PAGE_BYTES
    return CacheStats(
        reserved_bytes=sum(arena.reserved_bytes for arena in memory.arenas),
        mapped_bytes=live_bytes + parked_pages * PAGE_BYTES,
        retiring_bytes=memory.mapper.retiring_pages * PAGE_BYTES,
        parked_bytes=parked_pages * PAGE_BYTES,
        token_bytes=token_bytes,
        guard_bytes=guard_bytes,
        waste_bytes=live_bytes - token_bytes - guard_bytes,
        pool_created_bytes=pool.created_bytes,
        pool_held_bytes=pool.held_bytes,
        pool_used_bytes=pool.used_bytes,
        pool_free_bytes=pool.free_bytes,
        pool_budget_bytes=pool.budget_bytes,
        num_tokens=int(table.lengths.sum()),
        num_sequences=len(live),
        num_parked=len(occupancy.parked),
        num_slots=table.num_slots,
        stalls=occupancy.stalls,
        stall_us=occupancy.stall_us,
        mapped_pages=memory.mapped_pages,
        pumped_pages=occupancy.pumped_pages,
        adopted_slots=occupancy.adopted_slots,
        driver_calls=pool.driver_calls,
    )


# -------- cache

_THREAD_BUDGET_US = 200.0
"""For how long the mapper's thread keeps the pool's lock: a few pages."""


class KVCache:
    """Keys and values of up to `slots` sequences of up to `max_tokens` tokens each.

    `guard_tokens` rows past the committed ones are kept mapped for kernels that load whole tiles (FlashAttention-3:
    176; 0 for predicated kernels). Addresses are reserved at once, memory only as sequences grow.

    Raises: ValueError; BudgetError if the pool cannot hold a page for each group; DriverError.
    Cost: a reserve, a map and an access call for each group, and waiting for the caller's current stream.
    """

    def __init__(self, layout: KVLayout, pool: Pool, *, slots: int, max_tokens: int, guard_tokens: int = 0) -> None:
        slots, max_tokens = whole("slots", slots), whole("max_tokens", max_tokens)
        guard_tokens = whole("guard_tokens", guard_tokens)
        if not isinstance(layout, KVLayout) or not isinstance(pool, Pool):
            raise TypeError(f"KVCache(layout, pool, ...) takes a KVLayout and a Pool, not {type(layout)} and {type(pool)}")
        if slots < 1 or max_tokens < 1 or guard_tokens < 0:
            raise ValueError(
                f"slots={slots}, max_tokens={max_tokens}, guard_tokens={guard_tokens}: slots and max_tokens must be at "
                f"least 1, guard_tokens at least 0"
            )
        if max_tokens + guard_tokens >= 2**31:
            raise ValueError(
                f"max_tokens={max_tokens} with its guard must stay below 2**31, for limits are int32 on the device"
            )
        if pool.budget_bytes < len(layout.groups) * PAGE_BYTES:
            raise BudgetError(
                f"a pool of {format_bytes(pool.budget_bytes)} cannot hold a page for each of {len(layout.groups)} groups; "
                f"the least is {format_bytes(len(layout.groups) * PAGE_BYTES)}"
            )
        self.layout: Final = layout
        self.pool: Final = pool
        self.device: Final = pool.device
        self.max_tokens: Final = max_tokens
        self.guard_tokens: Final = guard_tokens
        with pool.lock:
            pool.check_open()
            self._memory = SlotMemory(layout, pool, slots=slots, max_tokens=max_tokens, guard_tokens=guard_tokens)
            self._table = self._memory.table
            self._lengths, self._limits = _read_only(self._table.lengths), _read_only(self._table.limits)
            self._occupancy = Occupancy(layout, pool, self._memory)
            self._occupancy.attach()

    @property
    def closed(self) -> bool:
        """Has it been closed, by `close` or with its pool? Nothing but `close` can be called any more."""
        return self._occupancy.closed

    # sequences

    @property
    def num_slots(self) -> int:
        """Slots that sequences can have, taken or not: they are numbered from 1."""
        return self._table.num_slots

    @property
    def slot_pages(self) -> list[int]:
        """Pages of addresses that each slot has, by group of layers."""
        return [arena.slot_bytes // PAGE_BYTES for arena in self._memory.arenas]

    @property
    def limit(self) -> torch.Tensor:
        """[1 + slots] int32 on the device: rows below it may be written; 0 where no sequence runs."""
        return self._memory.limit

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[1 + slots] tokens written, by slot; read-only."""
        return self._lengths

    @property
    def limits(self) -> npt.NDArray[np.int32]:
        """[1 + slots] what `limit` holds on the device; read-only."""
        return self._limits

    def open(self, *, max_tokens: int | None = None, tenant: Hashable = None) -> Sequence:
        """A new sequence in a free slot, with `max_tokens` (the cache's by default) as its end.

        A blank parked slot of the same tenant is taken first, with what is mapped there.
        Memory that another tenant wrote is zeroed before this one sees it (law 7).

        Cost: no driver call if a slot is free, but the limit's write if it is blank. If none is, the tenant's oldest
        parked slot is taken over like a blank one, or another's is evicted and its fence waited for.
        Raises: OutOfSlots; DriverError, after which parked slots may have been evicted; SequenceTooLong if `max_tokens`
        is more than the cache's.
        """
        with self.pool.lock:
            end = self._check_end(max_tokens)
            parked = self._open_over(tenant)
            if parked is not None:
                return self._occupancy.take_over(parked, 0, end)
            return self._occupancy.open_at(self._occupancy.clear_run(1), end, tenant)

    def open_batch(self, count: int, *, max_tokens: int | None = None, tenant: Hashable = None) -> list[Sequence]:
        """`count` new sequences in adjacent slots, so that `cache.k(layer)[first:first + count]` is their batch.

        Cost and errors: as `open`.
        """
        count = whole("count", count)
        if count < 1:
            raise ValueError(f"count={count}: a batch has at least 1 sequence")
        with self.pool.lock:
            end = self._check_end(max_tokens)
            first = self._occupancy.clear_run(count)
            return [self._occupancy.open_at(slot, end, tenant) for slot in range(first, first + count)]

    def adopt(
        self, parked: ParkedSlot, num_tokens: int | None = None, *, max_tokens: int | None = None, tenant: Hashable = None
    ) -> Sequence:
        """A new sequence in a parked slot, whose first `num_tokens` rows (all by default) are its own already.

        Cost: no driver call but the limit's write; where these rows end within a page that others hold too, as they can if
        there were more before, that page is exchanged for one of its own (see Sequence.truncate).
        Raises: Evicted if it was taken back or adopted meanwhile; ValueError for another tenant's, or more rows than
        were parked; RowsUnmapped if a window has moved past what `num_tokens` needs; SequenceTooLong; where a page is exchanged
        OutOfPages and DriverError, and the slot stays parked.
        """
        with self.pool.lock:
            end = self._check_end(max_tokens)
            self._check_parked(parked)
            num_tokens = parked.length if num_tokens is None else whole("num_tokens", num_tokens)
            if parked.tenant != tenant:
                raise ValueError(f"slot {parked.slot} was parked by another tenant")
            if not 0 <= num_tokens <= parked.length:
                raise ValueError(f"num_tokens={num_tokens}: slot {parked.slot} was parked with {parked.length} tokens")
            if num_tokens > end:
                raise SequenceTooLong(f"{num_tokens} parked tokens are adopted by a sequence of max_tokens={end}")
            if num_tokens:
                self._occupancy.check_windows(parked.slot, num_tokens)
            return self._occupancy.take_over(parked, num_tokens, end)

    def fork(self, sequence: Sequence, count: int = 1, *, max_tokens: int | None = None) -> list[Sequence]:
        """`count` new sequences that have all tokens of a running one, as vLLM's forked block tables do.

        Extents that are full are shared, and their rows to be read only: nothing makes a copy when one is written. The last,
        partial page is copied, so that each goes its own way from there; to go back further, truncate first.
        Cost: for each new sequence and group a map and an access call for each full extent, the same and a copy for the
        partial page. All or none. Raises: OutOfSlots, OutOfPages, SequenceTooLong, DriverError.
        """
        count = whole("count", count)
        if count < 1:
            raise ValueError(f"count={count}: a fork makes at least 1 sequence")
        with self.pool.lock:
            end = self._check_end(max_tokens)
            self._check_fork(sequence, end)
            available = self._table.num_slots - len(self._occupancy.sequences)
            if count > available:
                raise OutOfSlots(
                    f"{count} slots are wanted and {available} of {self._table.num_slots} run no sequence; close some"
                )
            return self._fork_all(((sequence, self._occupancy.clear_run(1)) for _ in range(count)), end)

    def fork_batch(self, sequences: Iterable[Sequence], *, max_tokens: int | None = None) -> list[Sequence]:
        """A fork of each of these running sequences, in this order and in adjacent slots; one may be named several times.

        So a batch grows, shrinks or changes its order: the forks are a batch as those of `open_batch` are, and the sequences
        that it has left are closed by the caller.
        Cost and errors: as `fork`; ValueError for none.
        """
        with self.pool.lock:
            end = self._check_end(max_tokens)
            parents = list(sequences)
            if not parents:
                raise ValueError("a batch has at least 1 sequence, and none was named to fork")
            for parent in parents:
                self._check_fork(parent, end)
            first = self._occupancy.clear_run(len(parents))
            return self._fork_all([(parent, slot) for slot, parent in enumerate(parents, first)], end)

    def copy_rows(self, pairs: Iterable[tuple[Sequence, Sequence]], first: int, end: int) -> None:
        """Of each pair (source, target) the target takes rows [first, end) of the source, and then has `end` tokens.

        What a beam search does when one beam goes on from another: the rows that both have already stay where they are. No
        sequence is a target twice, or target and source. In a windowed group the target keeps the rows that both still have.
        Cost: a copy for each pair and group, launched on the caller's current stream (about 10 us each on a GPU until they
        are larger than some MiB, where copying in one kernel would take 1 us for 2 MiB); no driver call. All or none.
        Raises: RowsUnmapped if a target has no memory for `end` tokens, or a window has moved past what its next token needs;
        ValueError if a sequence has too few tokens, or others hold a page that would be written (truncate and grow it first).
        """
        first, end = whole("first", first), whole("end", end)
        with self.pool.lock:
            self._check_open()
            pairs = list(pairs)
            targets = {target.slot for _, target in pairs}
            if len(targets) < len(pairs) or any(source.slot in targets for source, _ in pairs):
                raise ValueError("a sequence is a target twice, or target and source: the order of the copies would matter")
            for source, target in pairs:
                for sequence in (source, target):
                    self._check_running(sequence)
                    self._occupancy.check_windows(sequence.slot, end)
                sharing.check_copy(self._memory, source.slot, target.slot, first, end)
            with self._memory.copying():
                for source, target in pairs:
                    self._occupancy.forget(target.slot, first)
                    sharing.copy_rows(self._memory, source.slot, target.slot, first, end)

    def parked(self) -> list[ParkedSlot]:
        """The parked slots, the oldest first."""
        with self.pool.lock:
            return list(self._occupancy.parked.values())

    def evict(self, parked: ParkedSlot) -> None:
        """Retire a parked slot's mappings. Raises Evicted if that has happened, or it was adopted. No driver call."""
        with self.pool.lock:
            self._check_parked(parked)
            self._occupancy.evict(parked)

    def advance(self, slots: npt.ArrayLike, num_tokens: npt.ArrayLike = 1) -> None:
        """`num_tokens` (one number, or one for each) more rows have been written in each of these different slots.

        Cost: a few numpy calls whatever the number of slots; no lock, no driver call.
        Raises: RowsUnmapped, naming the first slot that would pass its limit; ValueError for a negative number or a slot
        that there is not; TypeError for what is no whole number; then none has advanced.
        """
        self._check_open()
        self._occupancy.advance(slots, num_tokens)

    # views

    def k(self, layer: int) -> torch.Tensor:
        """Keys of a layer over all slots: `view(layer, "k")`."""
        return self.view(layer, "k")

    def v(self, layer: int) -> torch.Tensor:
        """Values of a layer over all slots: `view(layer, "v")`."""
        return self.view(layer, "v")

    def k_scale(self, layer: int) -> torch.Tensor:
        """The scales of quantised keys, kept in the rows: [1 + slots, slot_tokens, heads], strided by 2."""
        return self.view(layer, SCALES)[..., 0]

    def v_scale(self, layer: int) -> torch.Tensor:
        """The scales of quantised values, each behind that of its keys."""
        return self.view(layer, SCALES)[..., 1]

    def view(self, layer: int, plane: str) -> torch.Tensor:
        """A plane of a layer over the whole arena: [1 + slots, slot_tokens, heads, dim], strided; for batched kernels.

        A plane without a dim, as scales have none, gives [1 + slots, slot_tokens, heads].

        Slot 0 is the pad: its first page is always mapped, read-only and zero, so that kernels and launchers that look at
        the tensor's own address find memory there, and rows that only fill up a batch have a slot to point to. Most of
        the rest is not mapped: a kernel must load rows below each sequence's length only (plus the guard). Strides pass
        2**31 elements. It stays valid for the cache's life. Cost: about 4 us; no driver call, no copy, no touch.
        """
        self._check_open()
        return self._memory.arena_of(layer).view(layer, plane)

    # ahead of need, and behind

    def lookahead_tokens(self, step_us: float) -> int:
        """How many tokens ahead memory should be mapped so that no step waits, if the mapper has `step_us` in each.

        One token a step. If every sequence crosses a page at once, the mapper needs `pages due * measured cost`; it must
        have begun that many steps before.
        """
        pages_due = len(self._occupancy.sequences) * len(self.layout.groups)
        return 1 + ceil_div(int(pages_due * self._memory.mapper.map_us), max(1, int(step_us)))

    def map_ahead(self, budget_us: float = float("inf"), *, lookahead_tokens: int = 1) -> int:
        """Do the mapper's work for about `budget_us`: call it while launched work is still queued on the device.

        First it maps for sequences that have less memory than their next token needs, then than `lookahead_tokens` more do,
        then than they `expect`: each time the most urgent first, and never past their end. A sequence that finds too few
        pages for one of these gets none for it, and the others theirs. Then it unmaps what has retired and whose fence
        has passed.

        Cost: map and access, or unmap, for each page; the number of pages is returned. At least one page if there is
        any to do, however small the budget. Never waits for a fence, nor takes a parked slot that running work may touch.
        Not under graph capture.
        Raises: DriverError; what was done before it stays done. ValueError for a negative budget or lead.
        """
        lookahead_tokens = whole("lookahead_tokens", lookahead_tokens)
        if not budget_us >= 0:  # nor is it NaN
            raise ValueError(f"budget_us={budget_us}: time to spend is at least 0; leave it out for no limit")
        if lookahead_tokens < 0:
            raise ValueError(f"lookahead_tokens={lookahead_tokens}: how far memory is mapped ahead is at least 0")
        with self.pool.lock:
            self._check_open()
            return self._occupancy.map_ahead(budget_us, lookahead_tokens, settle=False)

    def drain(self) -> None:
        """Unmap everything that retires, waiting for its fences: for when there is nothing else to do.

        Cost: one unmap for each page; blocks until the work that touches them is done, but not the other users of the
        pool. Raises: DriverError.
        """
        self._check_open()
        self._occupancy.drain()

    def start_mapper(self, lookahead_tokens: int | None = None) -> None:
        """Pump in a thread, for users with no loop of their own. A graph capture then needs capture_error_mode="thread_local".

        `lookahead_tokens` is by default as many as a page holds. A DriverError of the thread is raised by `stop_mapper`, or
        by the next `grow` that lacks memory or `start_mapper`, once; then another can be started.
        """
        with self.pool.lock:
            self._check_open()
            self._occupancy.check_thread()
            if self._occupancy.thread is not None:
                raise ValueError("the mapper's thread runs already; stop_mapper() ends it")
            if lookahead_tokens is None:
                lookahead_tokens = max(1, *(group.tokens_under(1) for group in self.layout.groups))
            lookahead_tokens = whole("lookahead_tokens", lookahead_tokens)
            if lookahead_tokens < 1:
                raise ValueError(f"lookahead_tokens={lookahead_tokens}: the mapper maps at least 1 token ahead")
            name = f"vmmkv-mapper-{self._memory.number}"
            self._occupancy.thread = MapperThread(functools.partial(self._pump_some, lookahead_tokens), name=name)

    def stop_mapper(self) -> None:
        """End the thread. Idempotent. Raises what the thread failed with, if it did."""
        self.pool.lock.check_process()
        self._occupancy.stop_thread()

    def record_stream(self, stream: torch.Stream) -> None:
        """Work on this stream touches the cache too.

        Retirements wait for it, and what is zeroed or limited is ordered before it, as for the stream that is current
        when the cache is called. Work on streams that are neither must be ordered by whoever launches it.
        Raises: ValueError for another device's.
        """
        with self.pool.lock:
            self._check_open()
            if stream.device != self.device:
                raise ValueError(f"a stream of {stream.device} cannot be recorded by a cache on {self.device}")
            if stream not in self._memory.streams:
                self._memory.streams.append(stream)
                self._memory.order()

    # the whole

    def stats(self) -> CacheStats:
        """The cache at this moment. Cost: some tens of microseconds; no driver call."""
        with self.pool.lock:
            return snapshot(self._memory, self._occupancy)

    def taken_slots(self) -> list[int]:
        """The slots that are not free, in order: those under which something can be mapped."""
        with self.pool.lock:
            self._check_open()
            return (1 + np.flatnonzero(self._table.states[1:] != SlotState.FREE)).tolist()

    def slot_maps(self, slots: Iterable[int]) -> list[SlotMap]:
        """What is mapped under each of these slots, and for what: see `vmmkv.memory.memory_map`.

        Cost: some 3 us for each slot, and 0.1 us for each extent mapped there; no driver call.
        Raises: ValueError for what is no slot of sequences.
        """
        slots = list(slots)
        unknown = [slot for slot in slots if not 1 <= slot <= self._table.num_slots]
        if unknown:
            raise ValueError(f"there is no slot {unknown[0]}: this cache has slots 1 to {self._table.num_slots}")
        with self.pool.lock:
            self._check_open()
            return slot_maps(self._memory, self._occupancy, slots)

    def close(self) -> None:
        """End all sequences, wait for the work that touches them, unmap everything. Idempotent.

        The addresses stay reserved until the process ends, so that a stale view faults (law 6).
        Cost: an unmap for each page; blocks on the fences, but not the other users of the pool.
        Raises: DriverError, and then it can be called again; what the mapper's thread failed with, and then it is closed.
        """
        self._occupancy.close_all()

    def __enter__(self) -> "KVCache":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        occupancy = getattr(self, "_occupancy", None)  # there is none if it could not be made
        if occupancy is not None and occupancy.attached:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        if not self._occupancy.attached:
            return f"<KVCache on {self.device}, closed>"
        sequences = counted(len(self._occupancy.sequences), "sequence")
        return f"<KVCache on {self.device}: {sequences} in {counted(self._table.num_slots, 'slot')}>"

    def check(self) -> None:
        """Recount the laws from scratch, for this cache and its pool; AssertionError says which is broken."""
        with self.pool.lock:
            self._memory.check()
            self._occupancy.check()
            self.pool.check()

    # within

    def _pump_some(self, lookahead_tokens: int) -> bool:
        """The thread's unit of work, made visible before anybody is told. Is there more to do?"""
        with self.pool.lock:
            return self._occupancy.map_ahead(_THREAD_BUDGET_US, lookahead_tokens, settle=True) > 0

    def _open_over(self, tenant: Hashable) -> ParkedSlot | None:
        """The parked slot that the next sequence of a tenant takes: the newest blank one; if no slot is free, the oldest that
        is not pinned."""
        parked = [parked for parked in self._occupancy.parked.values() if parked.tenant == tenant]
        blank = [each for each in parked if not each.length]
        if blank:
            return blank[-1]
        if self._table.where(SlotState.FREE):
            return None
        return next((each for each in parked if not self._occupancy.is_pinned(each.slot)), None)

    def _fork_all(self, pairs: Iterable[tuple[Sequence, int]], end: int) -> list[Sequence]:
        """Forks of these sequences in these free slots; all or none."""
        forks: list[Sequence] = []
        try:
            for parent, slot in pairs:
                forks.append(self._occupancy.fork(parent, slot, end))
        except BaseException:
            for fork in forks:
                fork.close()
            raise
        return forks

    def _check_fork(self, sequence: Sequence, end: int) -> None:
        self._check_running(sequence)
        if sequence.length > end:
            raise SequenceTooLong(f"{sequence.length} tokens are forked to sequences of max_tokens={end}")

    def _check_running(self, sequence: Sequence) -> None:
        if self._occupancy.sequences.get(sequence.slot) is not sequence:
            raise Closed(f"{sequence!r} is no running sequence of this cache")

    def _check_parked(self, parked: ParkedSlot) -> None:
        if self._occupancy.parked.get(parked.slot) is not parked:
            raise Evicted(f"slot {parked.slot} is parked no longer: it was evicted or adopted; open a new sequence")

    def _check_open(self) -> None:
        self.pool.lock.check_process()
        if self.closed:
            raise Closed("this cache is closed")

    def _check_end(self, max_tokens: int | None) -> int:
        self._check_open()
        end = self.max_tokens if max_tokens is None else whole("max_tokens", max_tokens)
        if end < 1:
            raise ValueError(f"max_tokens={end}: a sequence has at least 1")
        if end > self.max_tokens:
            raise SequenceTooLong(f"max_tokens={end} is more than this cache's slots have addresses for, {self.max_tokens}")
        return end


_Number = TypeVar("_Number", bound=np.generic)


def _read_only(array: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    view = array.view()
    view.flags.writeable = False
    return view
