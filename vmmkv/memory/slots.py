"""The slots of a cache and what occupies them: the base of KVCache and of the prefix tree.

    free ──open──> live ──park──> parked ──adopt, open──> live
     ^              │               │
     │             end            evict
     └──unmapped── closing <────────┘

A slot is the unit that sequences occupy. The caller holds the pool's lock, so caches may share a pool and threads may share a
cache. In every step the calls that can fail come first: a failure leaves the slots as they were.
"""

import contextlib
import functools
import operator
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from vmmkv.arguments import whole
from vmmkv.driver.base import Fence, retried
from vmmkv.errors import Closed, DriverError, OutOfSlots, RowsUnmapped, SequenceTooLong
from vmmkv.layout import KVLayout
from vmmkv.lifetime import Closing, Unique
from vmmkv.memory import sharing
from vmmkv.memory.extents import Extent
from vmmkv.memory.pool import Evictable, Pool, Reclaimer
from vmmkv.memory.slot_memory import SlotMemory
from vmmkv.memory.states import SlotState
from vmmkv.units import counted

Positions: TypeAlias = npt.NDArray[np.int64] | None
"""Positions of the rows that were there after a compaction, then the next position. None if no row was dropped: then row i has
position i."""


def cut_positions(known: Positions, num_tokens: int) -> Positions:
    """Positions of a sequence that is cut to its first `num_tokens`. One without tokens begins anew."""
    return known[: num_tokens + 1] if known is not None and num_tokens else None


@dataclass(eq=False, slots=True)
class LiveSlot(Unique):
    """A slot in which a sequence runs, until it is ended or parked."""

    slots: "Slots"
    slot: int
    max_tokens: int
    tenant: Hashable
    positions: Positions = None
    """Positions of its rows, if they were compacted."""
    closed: bool = False

    @property
    def length(self) -> int:
        """Tokens written: rows in use. Raises: Closed."""
        self.check_live()
        return int(self.slots.table.lengths[self.slot])

    @property
    def limit(self) -> int:
        """Tokens that the mapped memory has room for, at most `max_tokens`. Raises: Closed."""
        self.check_live()
        return int(self.slots.table.limits[self.slot])

    def check_live(self) -> None:
        """Check that the sequence runs. Raises: Closed once it has ended, ForkedProcess in a child."""
        self.slots.pool.lock.check_process()
        if self.closed:
            raise Closed(f"the sequence in slot {self.slot} was closed or parked; open or adopt another")

    def close(self) -> None:
        """End it, and take the lock for that. Idempotent. Raises: GraphCapture."""
        with self.slots.pool.lock:
            if not self.closed:
                self.slots.check_capture()
                self.slots.end(self)

    def __repr__(self) -> str:
        if self.closed:
            return f"<Sequence in slot {self.slot}, closed>"
        return f"<Sequence in slot {self.slot}: {counted(self.length, 'token')}, room for {self.limit} of {self.max_tokens}>"


@contextlib.contextmanager
def all_or_none() -> Iterator[list[LiveSlot]]:
    """The list of sequences that begin within: they end again if the block raises.

    It stands around the pool's lock. A signal handler may raise where that is released: the caller gets no sequence to close.
    """
    begun: list[LiveSlot] = []
    try:
        yield begun
    except BaseException:
        for live in begun:
            retried(live.close)
        raise


@dataclass(eq=False, slots=True)
class ParkedSlot(Unique):
    """A slot whose sequence has ended and whose memory stays mapped, until it is adopted or evicted."""

    slot: int
    length: int
    """Rows [0, length) may be adopted. 0 is a blank slot: the tenant's next sequence takes its memory."""
    tenant: Hashable
    stamp: int
    """The pool's clock when it was parked."""
    positions: Positions
    """Positions of its rows, if they were compacted."""
    fence: Fence
    """Fence behind all work that may still touch it. Each later read renews it."""
    num_pages: int
    """Pages mapped under it, over all groups."""

    def __repr__(self) -> str:
        return f"<ParkedSlot in slot {self.slot}: {counted(self.length, 'token')} in {counted(self.num_pages, 'page')}>"


class RowKeeper:
    """Keeper of rows of ended sequences for others to attach. This one keeps none; the prefix tree overrides every method."""

    def has(self, slot: int) -> bool:
        """Does the keeper have a parked slot, and say when that is evicted?"""
        return False

    def is_pinned(self, slot: int) -> bool:
        """Has a parked slot pinned rows?"""
        return False

    def park_pinned(self, live: LiveSlot) -> bool:
        """Park a running sequence with the pinned rows that no other slot has; False, and it runs, if there are none."""
        return False

    def forget(self, slot: int, num_tokens: int) -> None:
        """The rows of a slot past `num_tokens` are gone, or about to be written."""

    def leave(self, slot: int) -> None:
        """A slot's sequence has ended, or its parked rows are gone."""

    def poll(self) -> None:
        """Go on with what waits for a fence that has passed. Never blocks."""

    def unsealed(self) -> Fence | None:
        """The fence that it waits for longest; None for none."""
        return None

    def clear(self) -> list[Fence]:
        """Evict everything; no sequence runs. When these fences have passed it is closed."""
        return []

    def close(self) -> None:
        """Give back what copies that have ended took."""

    def check(self) -> None:
        """Recount everything; AssertionError says what is broken."""


class Slots(Reclaimer, Closing):
    """The slots of one cache: opened, filled, parked, taken over and evicted.

    Raises, cost: see KVCache.
    """

    def __init__(self, layout: KVLayout, pool: Pool, *, num_slots: int, max_tokens: int, guard_tokens: int) -> None:
        self.layout: Final = layout
        self.pool: Final = pool
        self.num_slots: Final = num_slots
        """Slots that sequences can have, taken or not: they are numbered from 1."""
        self.max_tokens: Final = max_tokens
        self.closed = False
        self.live_slots: dict[int, LiveSlot] = {}
        self.parked_slots: dict[int, ParkedSlot] = {}
        """Parked slots, the oldest first."""
        self.loose_slots: dict[int, ParkedSlot] = {}
        """Parked slots that the keeper does not keep, in the same order."""
        self._parked_of: dict[tuple[Hashable, bool], dict[int, ParkedSlot]] = {}
        """The parked slots by tenant, the blank ones apart, in the same order."""
        self.keeper = RowKeeper()
        """The prefix tree that shares these slots and their extents, or nothing."""
        self.num_taken_over = 0
        """Parked slots that sequences have taken over."""
        self.blocked_steps = 0
        self.blocked_us = 0.0
        self._attached = False
        try:
            with pool.lock:
                pool.check_open()
                pool.check_capture()
                self.memory: Final = SlotMemory(layout, pool, slots=num_slots, max_tokens=max_tokens, guard_tokens=guard_tokens)
                self.table: Final = self.memory.table
                pool.caches.append(self)
                pool.reclaimers.append(self)
                self._attached = True
        except BaseException:  # of a signal handler too, which waits for the lock
            if self._attached:
                self.close()
            raise

    # to live

    def open(self, end: int, tenant: Hashable) -> LiveSlot:
        """A new sequence in a blank parked slot of the tenant, a free slot, or one that is made free: see `KVCache.open`."""
        chosen = next(reversed(self._parked_of.get((tenant, True), {}).values()), None)
        if chosen is None and not self.table.num(SlotState.FREE):
            chosen = next(self.unpinned(self._parked_of.get((tenant, False), {}).values()), None)
        if chosen is not None:
            self.check_capture()
            return self.adopt(chosen, 0, end)
        return self.open_at(self.clear_run(1), end, tenant)

    def open_at(self, slot: int, end: int, tenant: Hashable) -> LiveSlot:
        """A new sequence in a slot that is free, or that it takes over."""
        live = self.live_slots[slot] = LiveSlot(self, slot, end, tenant)
        self.memory.tenants[slot] = tenant
        self.table.states[slot] = SlotState.LIVE
        self.table.ends[slot] = end
        return live

    def adopt(self, parked: ParkedSlot, num_tokens: int, end: int) -> LiveSlot:
        """A parked slot becomes live with what is mapped there, and its first rows if `num_tokens` is not 0."""
        slot = parked.slot
        self.keeper.leave(slot)
        self._unlist(parked)  # so that making room for it does not evict it
        try:
            parked.fence.order(self.memory.streams)
            sharing.cut_shared(self.memory, slot, num_tokens, parked.fence)
            sharing.own_from(self.memory, slot, num_tokens, num_tokens)
            committed = self.memory.committed(slot, from_first=not num_tokens)
            self.memory.raise_limits({slot: min(committed, end)})
        except BaseException:
            self.memory.unuse(slot)
            parked.length = min(parked.length, self.memory.committed(slot))  # what was cut by now does not come back
            parked.num_pages = self.memory.num_pages(slot)
            self._list(parked)
            with contextlib.suppress(DriverError):  # else the device is lost, and nothing is read or unmapped any more
                parked.fence = retried(self.memory.fence)
            raise
        if not num_tokens:
            self.memory.reclaim_all(slot, parked.fence, only_cut=True)
        self.memory.use(slot)
        self.num_taken_over += 1
        live = self.open_at(slot, end, parked.tenant)
        live.positions = cut_positions(parked.positions, num_tokens)
        self.table.lengths[slot] = num_tokens
        self.memory.assert_owned(slot)
        return live

    def open_with(
        self,
        slot: int,
        end: int,
        tenant: Hashable,
        num_tokens: int,
        pages: Sequence[sharing.Pages],
        copy_bytes: sharing.CopyBytes,
    ) -> LiveSlot:
        """A new sequence in a free slot that has `num_tokens` tokens already: see `sharing.take`.

        The slot's starts are set before, and are 0 again if this fails.
        """
        live = self.open_at(slot, end, tenant)
        try:
            self.fill(slot, num_tokens, pages, copy_bytes)
        except BaseException:
            if not self.memory.num_pages(slot):  # no driver call, so that this cannot fail too
                self._leave(live, SlotState.CLOSING)
                self._free_if_bare(slot)
            raise
        return live

    def fill(
        self,
        slot: int,
        num_tokens: int,
        pages: Sequence[sharing.Pages],
        copy_bytes: sharing.CopyBytes,
        large_ends: Sequence[int | None] | None = None,
    ) -> None:
        """Give a running sequence without any row its first rows: see `sharing.take`.

        Its starts are set before, and are 0 again if this fails.
        """
        try:
            sharing.take(self.memory, slot, num_tokens, pages, copy_bytes, large_ends)
        except BaseException:
            if self.memory.num_pages(slot):
                self.memory.reclaim_all(slot, retried(lambda: self.memory.lower_limit(slot, 0)))
            self.table.begin(slot, 0)
            raise
        self.table.lengths[slot] = num_tokens
        self.memory.assert_owned(slot)

    def vacate(self, slot: int, fence: Fence) -> None:
        """Reclaim all memory of a running sequence, which keeps its slot and cannot grow; its limit is 0 behind the fence."""
        self.keeper.forget(slot, 0)
        self.table.lengths[slot] = self.table.ends[slot] = 0
        self.memory.reclaim_all(slot, fence)

    # from live

    def park(self, live: LiveSlot, num_tokens: int) -> ParkedSlot:
        """End a sequence and keep its memory, with its first `num_tokens` to be adopted. Cost: a fence."""
        slot = live.slot
        fence = self.memory.lower_limit(slot, 0)
        self._leave(live, SlotState.PARKED)
        self.keeper.leave(slot)
        self.memory.unuse(slot)
        num_pages = self.memory.num_pages(slot)
        positions = cut_positions(live.positions, num_tokens)
        parked = ParkedSlot(slot, num_tokens, live.tenant, self.pool.tick(), positions, fence, num_pages)
        self._list(parked)
        return parked

    def end(self, live: LiveSlot) -> None:
        """End a sequence and reclaim its memory, or park its slot with rows that are pinned and in no other.

        Cost: the limit's write, which gives the fence, or a fence.
        """
        if self.keeper.park_pinned(live):
            return
        slot = live.slot
        fence = self.memory.lower_limit(slot, 0)
        self._leave(live, SlotState.CLOSING)
        self.keeper.leave(slot)
        self.memory.reclaim_all(slot, fence)
        self._free_if_bare(slot)

    def _leave(self, live: LiveSlot, state: SlotState) -> None:
        self.table.clear(live.slot, state)
        del self.live_slots[live.slot]
        live.closed = True

    # parked

    def park_bare(self, slot: int, tenant: Hashable, starts: Sequence[int], stamp: int) -> ParkedSlot:
        """A free slot, parked without rows and with that stamp; it will keep those from `starts` on. Cost: a fence."""
        parked = ParkedSlot(slot, 0, tenant, stamp, None, self.memory.fence(), 0)
        self.memory.tenants[slot] = tenant
        self.table.states[slot] = SlotState.PARKED
        self.table.begin(slot, starts)
        self._list(parked)
        return parked

    @contextlib.contextmanager
    def mapping_under(self, parked: ParkedSlot) -> Iterator[None]:
        """Map more under a parked slot, and set its length, within: making room does not evict it. Cost: a fence."""
        self._unlist(parked)
        try:
            yield
        finally:
            self.memory.unuse(parked.slot)
            parked.num_pages = self.memory.num_pages(parked.slot)
            self._list(parked)
            parked.fence = retried(self.memory.fence)  # copies may have been launched

    def cut(self, slot: int, num_tokens: int) -> None:
        """A parked slot keeps its first `num_tokens` only. No driver call."""
        parked = self.parked_slots[slot]
        self.memory.reclaim_run(slot, self.memory.cut_ends(slot, num_tokens), parked.fence)
        parked.length, parked.num_pages = num_tokens, self.memory.num_pages(slot)

    def evict(self, parked: ParkedSlot) -> None:
        """Reclaim a parked slot's memory. No driver call."""
        slot = parked.slot
        self._unlist(parked)
        self.keeper.leave(slot)
        self.table.clear(slot, SlotState.CLOSING)
        self.memory.reclaim_all(slot, parked.fence)
        self._free_if_bare(slot)

    def can_spare_pinned(self) -> bool:
        """Is there another slot than pinned ones for one more sequence?"""
        can_clear = self.table.num(SlotState.FREE, SlotState.CLOSING) > 0
        return can_clear or next(self.unpinned(self.parked_slots.values()), None) is not None

    def unpinned(self, parked_slots: Iterable[ParkedSlot]) -> Iterator[ParkedSlot]:
        """Parked slots without pinned rows, in the same order. Cost: grows with the pinned ones that come first."""
        return (parked for parked in parked_slots if not self.keeper.is_pinned(parked.slot))

    def _list(self, parked: ParkedSlot) -> None:
        """Add a parked slot to all lists that it is in, by its stamp."""
        of_tenant = self._parked_of.setdefault((parked.tenant, not parked.length), {})
        for listed in (self.parked_slots, self.loose_slots, of_tenant):
            newest = next(reversed(listed.values()), parked)
            listed[parked.slot] = parked
            if newest.stamp > parked.stamp:
                in_order = sorted(listed.values(), key=_stamp)
                listed.clear()
                listed.update((each.slot, each) for each in in_order)

    def _unlist(self, parked: ParkedSlot) -> None:
        of_tenant = self._parked_of[parked.tenant, not parked.length]
        del self.parked_slots[parked.slot], of_tenant[parked.slot]
        self.loose_slots.pop(parked.slot, None)
        if not of_tenant:
            del self._parked_of[parked.tenant, not parked.length]

    # to free

    def clear_run(self, count: int) -> int:
        """The first of `count` adjacent free slots; if need be, parked and closing ones are made free."""
        first = self.table.run_of(count, SlotState.FREE)
        if first is not None:
            return first
        self.check_capture()
        if self.collect():
            first = self.table.run_of(count, SlotState.FREE)
        if first is None:
            first = self._run_to_clear(count)
        run = range(first, first + count)
        for slot in run:
            if slot in self.parked_slots:
                self.evict(self.parked_slots[slot])
        for slot in run:
            self.make_bare(slot)
        return first

    def _run_to_clear(self, count: int) -> int:
        """The first of `count` adjacent slots that run no sequence, without pinned ones if possible; one: the oldest parked."""
        if count == 1 and (parked := next(self.unpinned(self.parked_slots.values()), None)) is not None:
            return parked.slot
        pinned = [slot for slot in self.parked_slots if self.keeper.is_pinned(slot)]
        states = SlotState.FREE, SlotState.PARKED, SlotState.CLOSING
        for spared in (pinned, pinned[1:], ()):
            first = self.table.run_of(count, *states, without=spared)
            if first is not None:
                return first
        raise OutOfSlots(
            f"{'a slot is' if count == 1 else f'{count} adjacent slots are'} wanted; {len(self.live_slots)} of "
            f"{self.num_slots} run sequences; close some, or make the cache with more slots"
        )

    def make_bare(self, slot: int) -> None:
        """Wait until what was reclaimed under a slot is unmapped. Raises: DriverError."""
        while not self.memory.is_bare(slot):
            waited = self.wait_for_reclaim()
            assert waited, f"what is mapped under slot {slot} was not reclaimed"
            self.collect()

    def _free_if_bare(self, slot: int) -> None:
        if self.memory.is_bare(slot):
            self.table.clear(slot, SlotState.FREE)

    # checks

    def check_open(self) -> None:
        """Check that the cache is open. Raises: Closed, or ForkedProcess in a child."""
        self.pool.lock.check_process()
        if self.closed:
            raise Closed("this cache is closed")

    def check_capture(self) -> None:
        """Check that neither the current stream nor a recorded one is captured. Raises and cost: as Pool.check_capture."""
        self.pool.check_capture(self.memory.streams)

    def check_end(self, max_tokens: int | None) -> int:
        """Most tokens of a new sequence, by default those of the slots. Raises: SequenceTooLong, ValueError, Closed."""
        self.check_open()
        end = self.max_tokens if max_tokens is None else whole("max_tokens", max_tokens)
        if end < 1:
            raise ValueError(f"max_tokens={end}: a sequence has at least 1")
        if end > self.max_tokens:
            raise SequenceTooLong(f"max_tokens={end} is more than this cache's slots have addresses for, {self.max_tokens}")
        return end

    def check_running(self, live: LiveSlot) -> None:
        """Check that a sequence runs in this cache. Raises: Closed if it has ended or is another cache's."""
        if self.live_slots.get(live.slot) is not live:
            raise Closed(f"{live!r} is no running sequence of this cache")

    def check_windows(self, slot: int, num_tokens: int) -> None:
        """Does the slot keep all rows that a sequence of so many tokens needs for its next one? Raises RowsUnmapped if not."""
        for index, group in enumerate(self.layout.groups):
            start, needed = int(self.table.starts[index, slot]), self.layout.start_for(group, num_tokens)
            if start > needed:
                raise RowsUnmapped(
                    f"with {num_tokens} tokens the window of group {index} begins at row {needed}, and rows before {start} "
                    f"are gone; call advance_start later, or recompute"
                )

    # for the pool: see Reclaimer

    @property
    def pending_pages(self) -> int:
        """Pages that wait for a fence, to be unmapped."""
        return self.memory.mapper.pending_pages

    def idle_pages(self, enough: int) -> int:
        """Pages that can be evicted and that no running work may touch; counted no further than `enough`."""
        num_pages = self.memory.mapper.passed_pages()
        for parked in self.loose_slots.values():
            if num_pages >= enough or not parked.fence.done():  # the oldest goes first
                break
            num_pages += self.memory.idle_pages(parked.slot)
        return num_pages

    def oldest_evictable(self) -> Evictable | None:
        """The oldest parked slot that the prefix tree does not keep, and how to evict it."""
        parked = next(iter(self.loose_slots.values()), None)
        return None if parked is None else Evictable(parked.stamp, parked.fence.done(), functools.partial(self.evict, parked))

    def collect(self, budget_us: float = float("inf"), max_pages: float = float("inf")) -> int:
        """Unmap reclaimed memory whose fence has passed, as far as time and `max_pages` allow; the pages. Never blocks."""
        self.keeper.poll()
        try:
            return self.memory.mapper.collect(budget_us, max_pages)
        finally:
            emptied = self.memory.mapper.emptied_slots
            while emptied:
                if self.table.states[slot := emptied.pop()] == SlotState.CLOSING:
                    self._free_if_bare(slot)

    def wait_for_reclaim(self) -> bool:
        """Block until the oldest fence of reclaimed memory has passed; False if there is none."""
        fence = self.memory.mapper.oldest_fence()
        if fence is not None:
            fence.wait()
        return fence is not None

    def holders(self) -> Counter[Extent]:
        """Recounted from scratch: how often each extent is mapped."""
        return self.memory.holders()

    def users(self) -> Counter[Extent]:
        """Recounted from scratch: how many of these are uses."""
        return self.memory.users()

    # the whole; these take the lock

    def drain(self) -> None:
        """Unmap all reclaimed memory, and seal what a holder process keeps, waiting for fences without the lock."""
        while True:
            with self.pool.lock:
                self.check_capture()
                self.collect()
                fence = self.memory.mapper.oldest_fence()
                if fence is None:
                    fence = self.keeper.unsealed()
            if fence is None:
                return
            fence.wait()

    def close(self) -> None:
        """End all sequences, wait for the work that touches them, unmap everything. Idempotent. See KVCache.close."""
        self.pool.lock.check_process()
        with self.pool.lock:
            if not self._attached:
                return
            self.check_capture()
            for live in list(self.live_slots.values()):
                self.end(live)
            for parked in list(self.parked_slots.values()):
                self.evict(parked)
            fences = [self.memory.fence(), *self.keeper.clear()]
            self.closed = True  # nothing is launched, opened or grown here while the lock is not held
        for fence in fences:
            fence.wait()
        self.drain()
        with self.pool.lock:
            if self._attached:
                self.memory.close()
                self.keeper.close()
                self.pool.caches.remove(self)
                self.pool.reclaimers.remove(self)
                self._attached = False

    def check(self) -> None:
        """Recount the laws from scratch, for these slots and their pool; AssertionError says which is broken."""
        with self.pool.lock:
            self.memory.check()
            assert sorted(self.live_slots) == self.table.where(SlotState.LIVE), "a live slot has no sequence"
            assert sorted(self.parked_slots) == self.table.where(SlotState.PARKED), "a parked slot is not listed"
            parked_slots = self.parked_slots.values()
            assert list(parked_slots) == sorted(parked_slots, key=_stamp), "parked slots are out of order"
            loose = [parked for parked in parked_slots if not self.keeper.has(parked.slot)]
            assert list(self.loose_slots.values()) == loose, "the slots that no prefix tree keeps are miscounted"
            assert sum(map(len, self._parked_of.values())) == len(parked_slots), "a parked slot is of two tenants, or of none"
            for (tenant, is_blank), found in self._parked_of.items():
                wanted = [parked for parked in parked_slots if (parked.tenant, not parked.length) == (tenant, is_blank)]
                assert list(found.values()) == wanted != [], f"the parked slots of {tenant!r} are miscounted"
            for slot, parked in self.parked_slots.items():
                assert parked.num_pages == self.memory.num_pages(slot), f"parked slot {slot} has lost or gained pages"
            self.keeper.check()
        self.pool.check()

    def __del__(self) -> None:
        if getattr(self, "_attached", False):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        """A text that names the cache, for users' messages."""
        if not self._attached:
            return f"<KVCache on {self.pool.device}, closed>"
        sequences = counted(len(self.live_slots), "sequence")
        return f"<KVCache on {self.pool.device}: {sequences} in {counted(self.num_slots, 'slot')}>"


_stamp = operator.attrgetter("stamp")
