"""The laws of a cache under random use: two caches on one pool, two tenants each, work in flight, against a model.

Now and then a driver call fails: then the caches are as the model says that they were, and the operation can be tried again.
"""

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.laws.machine import MAX_TOKENS, SLOTS, LawMachine, cases, picks, seeds
from tests.laws.model import LAYOUTS, Live, opened
from vmmkv import Closed, KVCache, OutOfPages, OutOfSlots, RowsUnmapped, Sequence
from vmmkv.units import PAGE_BYTES

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
        self.live.append(opened(cache, sequence, owner=self.owner(cache, sequence.tenant)))
        self.forget_evicted()
        assert (sequence.length, set(self.live[-1].starts)) == (0, {0})
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
            del live.stamps[sequence.length :]

    def fill(self, live: Live, tokens: range) -> None:
        """Rows are computed; and a row more, which the device drops where it passes the limit."""
        overrun = range(tokens.start, min(tokens.stop + 1, live.sequence.max_tokens))
        live.stamps += [self.next_stamp() for _ in overrun]
        self.compute(live, tokens if self.real_memory else overrun)
        del live.stamps[tokens.stop :]

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

    @precondition(lambda self: self.live)
    @rule(pick=picks, fewer=st.integers(1, MAX_TOKENS), steps=st.lists(st.integers(1, 5), min_size=1, max_size=3))
    def go_back_and_on(self, pick, fewer, steps):
        """Some tokens are rejected, and others follow, while steps are in flight."""
        self.attend({pick})
        live = self.live[pick % len(self.live)]
        self.cut(live, max(0, live.sequence.length - fewer))
        for more in steps:
            self.attend({pick})
            self.append(pick, more, advance=True)

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


def test_what_a_sequence_without_memory_has_launched_writes_to_no_later_one() -> None:
    walk = CacheMachine()
    walk.make(layouts=("mixed_dtypes", "mixed_dtypes"), guards=(0, 0), pages=6, seed=1)
    walk.close(pick=0)
    walk.open(end=None, first=0, pick=0, tenant="blue")  # a row is launched, past the limit of 0
    walk.close(pick=1)
    walk.attend(chosen={0})
    walk.attend(chosen={0})
    walk.append(advance=False, more=1, pick=0)
    walk.open_batch(count=2, pick=0, tenant="red")  # in the same slot
    walk.open(end=None, first=0, pick=0, tenant="red")
    walk.map_ahead(budget_us=math.inf, lead=1, pick=0)
    walk.teardown()


TestOnASimulatedDevice, TestOnASimulatedDeviceAtLength = cases(CacheMachine, 100, 1000)
TestOnHostMemory, TestOnHostMemoryAtLength = cases(CacheMachine, 8, 500, real_memory=True)
