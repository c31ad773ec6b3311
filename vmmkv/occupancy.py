"""Who is in which slot, and every way from one occupant to the next.

    free ──open──> live ──park──> parked ──adopt, open──> live
     ^              │               │
     │            close           evict
     └──unmapped── closing <────────┘

What may fail comes first in every step, so that a failure leaves the occupants as they were.
"""

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vmmkv import sharing
from vmmkv.arguments import wholes
from vmmkv.driver.base import Fence
from vmmkv.errors import DriverError, OutOfSlots, RowsUnmapped
from vmmkv.extents import Evictable, Extent
from vmmkv.layout import KVLayout
from vmmkv.mapper_thread import MapperThread
from vmmkv.memory import SlotMemory
from vmmkv.pool import Pool
from vmmkv.sequence import ParkedSlot, Sequence
from vmmkv.slots import SlotState
from vmmkv.units import counted


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
            first = next((slot for slot in self.parked if not self._is_pinned(slot)), next(iter(self.parked)))
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

    def _is_pinned(self, slot: int) -> bool:
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
