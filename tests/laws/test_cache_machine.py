"""The laws of a cache under random use: two caches on one pool, two tenants each, work in flight, against a model.

Now and then a driver call fails: then the caches are as the model says that they were, and the operation can be tried again.
"""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.laws.machine import MAX_TOKENS, SLOTS, LawMachine, picks, seeds, walks
from tests.laws.model import LAYOUTS, Kept, Live, Rows, addresses, num_null_pages
from vmmkv import Closed, Evicted, KVCache, OutOfPages, OutOfSlots, RowsUnmapped, Sequence
from vmmkv.errors import BudgetError
from vmmkv.units import PAGE_BYTES

cuts = st.none() | st.just(0) | st.integers(0, MAX_TOKENS)
tenants = st.sampled_from(["red", "blue"])


class CacheMachine(LawMachine):
    """Two caches, without prefixes."""

    @initialize(
        layouts=st.tuples(st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(LAYOUTS))),
        guards=st.tuples(st.sampled_from([0, 2]), st.sampled_from([0, 2])),
        pages=st.integers(6, 24),
        seed=seeds,
    )
    def make(self, layouts, guards, pages, seed):
        self.open_device(seed, pages)
        self.geometry = [(LAYOUTS[name], guard) for name, guard in zip(layouts, guards, strict=True)]
        self.caches = [self.cache_of(index) for index in range(len(self.geometry))]
        self.stamp = 0
        self.open(0, "red", None, 9)
        self.open(1, "blue", None, 9)

    def cache_of(self, index: int) -> KVCache:
        layout, guard = self.geometry[index]
        return self.new_cache(layout, self.pool, slots=SLOTS, max_tokens=MAX_TOKENS, guard_tokens=guard)

    def owner(self, cache: KVCache, tenant: str) -> int:
        return 2 * self.caches.index(cache) + (tenant == "blue")

    def opened(self, cache: KVCache, sequence: Sequence) -> Live:
        groups = cache.layout.groups
        rows = Rows(self.owner(cache, sequence.tenant), [], [0] * len(groups), addresses(cache, sequence.slot))
        self.live.append(Live(cache, sequence, rows))
        self.forget_evicted()
        assert sequence.length == 0
        assert all(sequence.start(group) == 0 for group in range(len(groups)))
        return self.live[-1]

    # in

    @rule(pick=picks, tenant=tenants, end=st.none() | st.integers(1, MAX_TOKENS), first=st.integers(0, MAX_TOKENS))
    def open(self, pick, tenant, end, first):
        cache = self.caches[pick % 2]
        try:
            sequence = self.attempt(lambda: cache.open(max_tokens=end, tenant=tenant))
        except OutOfSlots:
            assert sum(live.cache is cache for live in self.live) == SLOTS
        else:
            self.opened(cache, sequence)
            self.append(-1, first, advance=True)

    @rule(pick=picks, tenant=tenants, count=st.integers(2, 3))
    def open_batch(self, pick, tenant, count):
        cache = self.caches[pick % 2]
        taken = {live.sequence.slot for live in self.live if live.cache is cache}
        runs = [first for first in range(1, SLOTS - count + 2) if taken.isdisjoint(range(first, first + count))]
        try:
            sequences = self.attempt(lambda: cache.open_batch(count, tenant=tenant))
        except OutOfSlots:
            assert not runs
        else:
            first = sequences[0].slot
            assert [sequence.slot for sequence in sequences] == list(range(first, first + count))
            for sequence in sequences:
                self.opened(cache, sequence)

    @precondition(lambda self: self.kept)
    @rule(pick=picks, cut=cuts)
    def adopt(self, pick, cut):
        kept = self.kept[pick % len(self.kept)]
        num_tokens = None if cut is None else min(cut, kept.parked.length)
        calls = self.driver.calls.copy()
        try:
            sequence = self.attempt(lambda: kept.cache.adopt(kept.parked, num_tokens, tenant=kept.parked.tenant))
        except RowsUnmapped:
            assert num_tokens and any(kept.rows.starts)
            return
        made = {call for call in self.driver.calls if self.driver.calls[call] != calls[call]}
        assert made <= {"write", "fence"}, made  # the fence: where the write failed first
        self.opened_over(kept, sequence, kept.parked.length if num_tokens is None else num_tokens)
        with pytest.raises(Evicted):
            kept.cache.adopt(kept.parked, tenant=kept.parked.tenant)

    def opened_over(self, kept: Kept, sequence: Sequence, num_tokens: int) -> Live:
        rows = kept.rows
        starts = rows.starts if num_tokens else [0] * len(rows.starts)
        self.live.append(Live(kept.cache, sequence, Rows(rows.owner, rows.stamps[:num_tokens], starts, rows.bases)))
        self.forget_evicted()
        assert sequence.length == num_tokens
        assert sequence.slot == kept.parked.slot
        return self.live[-1]

    # on

    @precondition(lambda self: self.live)
    @rule(pick=picks, more=st.integers(0, MAX_TOKENS))
    def grow(self, pick, more):
        live = self.live[pick % len(self.live)]
        sequence = live.sequence
        wanted = min(sequence.length + more, sequence.max_tokens)
        before, calls = sequence.limit, self.driver.num_calls
        try:
            self.attempt(lambda: sequence.grow(wanted))
        except OutOfPages:
            assert sequence.limit == before < wanted
        else:
            assert sequence.limit >= wanted
            assert before < wanted or self.driver.num_calls == calls
        self.forget_evicted()

    @precondition(lambda self: self.live)
    @rule(pick=picks, more=st.integers(1, MAX_TOKENS), advance=st.booleans())
    def append(self, pick, more, advance):
        live = self.live[pick % len(self.live)]
        sequence = live.sequence
        wanted = min(sequence.length + more, sequence.max_tokens)
        try:
            self.attempt(lambda: sequence.grow(wanted))
        except OutOfPages:
            wanted = sequence.limit
        self.forget_evicted()
        self.fill(live, range(sequence.length, wanted))
        if advance:
            sequence.advance(wanted - sequence.length)
        else:  # overrun: written, and never said to be
            del live.rows.stamps[sequence.length :]

    def fill(self, live: Live, tokens: range) -> None:
        """Rows are computed; and a row more, which the device drops where it passes the limit."""
        overrun = range(tokens.start, min(tokens.stop + 1, live.sequence.max_tokens))
        live.rows.stamps += [self.next_stamp() for _ in overrun]
        self.compute(live, tokens if self.real_memory else overrun)
        del live.rows.stamps[tokens.stop :]

    @precondition(lambda self: self.live)
    @rule(pick=picks)
    def advance_all(self, pick):
        cache = self.caches[pick % 2]
        rows = [live for live in self.live if live.cache is cache]
        room = [live for live in rows if live.sequence.length < live.sequence.limit]
        full = [live.sequence.slot for live in rows if live.sequence.length == live.sequence.limit]
        if full:
            with pytest.raises(RowsUnmapped, match="grow first"):
                cache.advance([live.sequence.slot for live in rows])
        for live in room:
            self.fill(live, range(live.sequence.length, live.sequence.length + 1))
        cache.advance([live.sequence.slot for live in room])

    def next_stamp(self) -> int:
        self.stamp += 1
        return self.stamp

    @rule(
        pick=picks, budget_us=st.sampled_from([0.0, float("inf")]), lead=st.integers(0, 4)
    )  # what it does in 200 us is chance
    def map_ahead(self, pick, budget_us, lead):
        cache = self.caches[pick % 2]
        waits = getattr(self.driver, "num_waits", 0)
        self.attempt(lambda: cache.map_ahead(budget_us, lookahead_tokens=lead), partial=True)
        assert getattr(self.driver, "num_waits", 0) == waits, "map_ahead waited for a fence"
        self.forget_evicted()

    @precondition(lambda self: self.live)
    @rule(pick=picks, fewer=st.integers(1, MAX_TOKENS), steps=st.lists(st.integers(1, 5), min_size=1, max_size=3))
    def go_back_and_on(self, pick, fewer, steps):
        """Some tokens are rejected, and others follow, while steps are in flight."""
        self.attend({pick})
        self.truncate(pick, fewer)
        for more in steps:
            self.attend({pick})
            self.append(pick, more, advance=True)

    @precondition(lambda self: self.live)
    @rule(pick=picks, fewer=st.integers(0, MAX_TOKENS))
    def truncate(self, pick, fewer):
        live = self.live[pick % len(self.live)]
        num_tokens = max(0, live.sequence.length - fewer)
        try:
            self.attempt(lambda: live.sequence.truncate(num_tokens))
        except RowsUnmapped:
            assert any(live.rows.starts)
        else:
            del live.rows.stamps[num_tokens:]

    @precondition(lambda self: self.live)
    @rule(pick=picks, short=st.integers(0, 2))
    def advance_start(self, pick, short):
        live = self.live[pick % len(self.live)]
        self.attend({pick})
        for group, description in enumerate(live.cache.layout.groups):
            if description.window is None:
                with pytest.raises(ValueError, match="no window"):
                    live.sequence.advance_start(group)
                continue
            latest = max(0, live.sequence.length - description.window + 1)
            start = max(latest - short, live.rows.starts[group])
            self.attempt(lambda group=group, start=start: live.sequence.advance_start(group, start if short else None))
            live.rows.starts[group] = max(latest, live.rows.starts[group]) if not short else start
            assert live.sequence.start(group) == live.rows.starts[group]

    @rule(pages=st.integers(1, 24))
    def resize(self, pages):
        before = self.pool.stats()
        try:
            self.attempt(lambda: self.pool.resize(pages * PAGE_BYTES))
        except BudgetError:
            after = self.pool.stats()
            assert (before.budget_bytes, before.created_bytes) == (after.budget_bytes, after.created_bytes)
        else:
            assert self.pool.stats().budget_bytes == pages * PAGE_BYTES
        self.forget_evicted()

    # out

    @precondition(lambda self: self.live)
    @rule(pick=picks, keep=cuts)
    def park(self, pick, keep):
        live = self.live[pick % len(self.live)]
        self.verify([live])
        num_tokens = None if keep is None else min(keep, live.sequence.length)
        try:
            parked = self.attempt(lambda: live.sequence.park(num_tokens))
        except RowsUnmapped:
            assert any(live.rows.starts)
            return
        self.ended(live)
        live.rows.stamps = live.rows.stamps[: parked.length]
        self.kept.append(Kept(live.cache, parked, live.rows))

    @precondition(lambda self: self.kept)
    @rule(pick=picks)
    def evict(self, pick):
        kept = self.kept.pop(pick % len(self.kept))
        kept.cache.evict(kept.parked)
        with pytest.raises(Evicted):
            kept.cache.evict(kept.parked)

    @precondition(lambda self: self.live)
    @rule(pick=picks)
    def close(self, pick):
        live = self.live[pick % len(self.live)]
        self.verify([live])
        self.attempt(live.sequence.close)
        self.ended(live)

    @rule(pick=picks)
    def close_cache(self, pick):
        if pick:  # now and then
            return
        index = self.stamp % 2
        gone = self.caches[index]
        self.attempt(gone.close, partial=True)
        self.driver.fail_at = set()  # what follows is no operation of a cache's life
        self.live = [live for live in self.live if live.cache is not gone]
        self.kept = [kept for kept in self.kept if kept.cache is not gone]
        with pytest.raises(Closed):
            gone.open()
        if self.pool.budget_bytes >= len(gone.layout.groups) * PAGE_BYTES:
            self.caches[index] = self.cache_of(index)
        else:
            self.pool.resize(8 * PAGE_BYTES)
            self.caches[index] = self.cache_of(index)

    # always

    @invariant()
    def laws_hold(self):
        if not hasattr(self, "pool"):
            return
        for cache in self.caches:
            cache.check()
            limits = [0] * (1 + SLOTS)
            for live in self.live:
                if live.cache is cache:
                    limits[live.sequence.slot] = live.sequence.limit
            assert cache.limits.tolist() == limits
            stats = cache.stats()
            assert stats.mapped_bytes == stats.token_bytes + stats.guard_bytes + stats.waste_bytes + stats.parked_bytes
            assert min(stats.token_bytes, stats.guard_bytes, stats.waste_bytes) >= 0
            assert stats.num_tokens == sum(len(live.rows.stamps) for live in self.live if live.cache is cache)
        pool = self.pool.stats()
        assert sum(s.mapped_bytes + s.pending_reclaim_bytes for s in map(KVCache.stats, self.caches)) == pool.held_bytes
        assert (self.driver.live_mappings - num_null_pages(self.caches)) * PAGE_BYTES == pool.held_bytes
        assert (self.driver.live_handles - 1) * PAGE_BYTES == pool.created_bytes  # the pad is beyond the budget


class RealMemoryMachine(CacheMachine):
    """Over the host driver: the bytes of every plane, through the views."""

    real_memory = True


class TestOnASimulatedDevice(CacheMachine.TestCase):
    settings = walks(200, 2000)


class TestOnHostMemory(RealMemoryMachine.TestCase):
    settings = walks(20, 1000)


@pytest.mark.nightly
class TestOnASimulatedDeviceAtLength(TestOnASimulatedDevice):
    """New walks each night."""


@pytest.mark.nightly
class TestOnHostMemoryAtLength(TestOnHostMemory):
    """New walks each night."""
