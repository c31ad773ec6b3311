"""The laws of a cache under random use: two caches on one pool, two tenants each, launches in flight, against a model.

The fake driver refuses whatever breaks a law of the device, and now and then one of its calls fails: then the caches are
as the model says that they were, and the operation can be tried again (law 5). Over the host driver the memory is real,
and every byte written is read back.
"""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.laws.model import LAYOUTS, SAMPLE, Kept, Live, Rows, addresses, num_pads, verify_unwritten, verify_written, write
from vmmkv import Closed, DriverError, Evicted, KVCache, OutOfPages, OutOfSlots, Pool, RowsUnmapped, Sequence
from vmmkv.driver import Driver
from vmmkv.driver.host import HostDriver
from vmmkv.errors import BudgetError
from vmmkv.memory.address_space import wrap
from vmmkv.testing.fake_driver import FakeDriver, Launch
from vmmkv.units import PAGE_BYTES

T = TypeVar("T")
SLOTS = 4
MAX_TOKENS = 14

picks = st.integers(0, 11)
cuts = st.none() | st.just(0) | st.integers(0, MAX_TOKENS)
tenants = st.sampled_from(["red", "blue"])


class CacheMachine(RuleBasedStateMachine):
    """On the fake driver alone: addresses, mappings and counts."""

    real_memory = False
    """Is there memory whose bytes can be read and written?"""

    def open_below(self) -> Driver | None:
        """The driver below the fake one, with the memory, if there is to be any."""
        return None

    @initialize(
        layouts=st.tuples(st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(LAYOUTS))),
        guards=st.tuples(st.sampled_from([0, 2]), st.sampled_from([0, 2])),
        pages=st.integers(6, 24),
    )
    def make(self, layouts, guards, pages):
        self.below = self.open_below()
        self.driver = FakeDriver(over=self.below)
        self.pool = Pool(self.driver.device, pages * PAGE_BYTES, driver=self.driver)
        self.geometry = [(LAYOUTS[name], guard) for name, guard in zip(layouts, guards, strict=True)]
        self.caches = [self.new_cache(index) for index in range(len(self.geometry))]
        self.live: list[Live] = []
        self.kept: list[Kept] = []
        self.launches: list[Launch] = []
        self.stamp = 0

    # failures

    @precondition(lambda self: not self.driver.fail_at)
    @rule(number=st.integers(0, 12))
    def let_a_call_fail(self, number):
        """The driver call of that number from now on, whatever operation makes it."""
        self.driver.fail_at = {self.driver.num_calls + number}

    def attempt(self, act: Callable[[], T], *, partial: bool = False) -> T:
        """Do it, and again if a call was to fail: meanwhile all is as it was. `partial`: but for what was done by then."""
        if not self.driver.fail_at:
            return act()
        before = self.state()
        try:
            return act()
        except DriverError as error:
            assert error.code == "FAKE_INJECTED"
        finally:
            if self.driver.num_calls > max(self.driver.fail_at):
                self.driver.fail_at = set()
        for cache in self.caches:
            cache.check()
        if not partial:
            assert self.state() == before
            self.laws_hold()
            self.pads_stand_whatever_happens_to_sequences()
            self.rows_are_where_and_what_they_were()
        return act()

    def state(self) -> list[object]:
        """All that a failure leaves alone: everything but parked slots, which may have been evicted on the way."""
        running = [
            (live.sequence.length, live.sequence.limit, [live.sequence.start(i) for i in range(len(live.rows.starts))])
            for live in self.live
        ]
        stats = [cache.stats() for cache in self.caches]
        mapped = [each.mapped_bytes - each.parked_bytes for each in stats]
        counts = [(each.num_sequences, each.num_tokens, each.stalls, each.adopted_slots) for each in stats]
        return [running, mapped, counts, self.pool.budget_bytes]

    def new_cache(self, index: int) -> KVCache:
        layout, guard = self.geometry[index]
        return KVCache(layout, self.pool, slots=SLOTS, max_tokens=MAX_TOKENS, guard_tokens=guard)

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

    def forget_evicted(self) -> None:
        self.kept = [kept for kept in self.kept if any(kept.parked is parked for parked in kept.cache.parked())]

    def look(self, live: Live) -> None:
        if self.real_memory:
            verify_unwritten(live)

    # in

    @rule(pick=picks, tenant=tenants, end=st.none() | st.integers(1, MAX_TOKENS), first=st.integers(0, MAX_TOKENS))
    def open(self, pick, tenant, end, first):
        cache = self.caches[pick % 2]
        try:
            sequence = self.attempt(lambda: cache.open(max_tokens=end, tenant=tenant))
        except OutOfSlots:
            assert sum(live.cache is cache for live in self.live) == SLOTS
        else:
            self.look(self.opened(cache, sequence))
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
                self.look(self.opened(cache, sequence))

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
        assert {call for call in self.driver.calls if self.driver.calls[call] != calls[call]} <= {"write"}
        live = self.opened_over(kept, sequence, kept.parked.length if num_tokens is None else num_tokens)
        self.look(live)
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
        self.look(live)
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
        self.look(live)
        self.fill(live, range(sequence.length, wanted), through_arena=bool(more % 2))
        if advance:
            sequence.advance(wanted - sequence.length)
        else:  # overrun: written, and never said to be
            del live.rows.stamps[sequence.length :]

    def fill(self, live: Live, tokens: range, *, through_arena: bool) -> None:
        live.rows.stamps += [self.next_stamp() for _ in tokens]
        if self.real_memory:
            write(live, tokens, through_arena=through_arena)

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
            self.fill(live, range(live.sequence.length, live.sequence.length + 1), through_arena=True)
        cache.advance([live.sequence.slot for live in room])

    def next_stamp(self) -> int:
        self.stamp += 1
        return self.stamp

    @precondition(lambda self: self.live)
    @rule(pick=picks, more=st.integers(0, 6))
    def expect(self, pick, more):
        sequence = self.live[pick % len(self.live)].sequence
        sequence.expect(min(sequence.length + more, sequence.max_tokens))

    @rule(
        pick=picks, budget_us=st.sampled_from([0.0, float("inf")]), lead=st.integers(0, 4)
    )  # what it does in 200 us is chance
    def map_ahead(self, pick, budget_us, lead):
        cache = self.caches[pick % 2]
        busy = [launch for launch in self.launches if not launch.finished]
        self.attempt(lambda: cache.map_ahead(budget_us, lookahead_tokens=lead), partial=True)
        assert not any(launch.finished for launch in busy), "pump waited for a fence"
        for live in self.live:
            self.look(live)
        self.forget_evicted()

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

    # the device

    @precondition(lambda self: self.live)
    @rule(chosen=st.sets(picks, min_size=1))
    def launch(self, chosen):
        ranges = []
        for live in {pick % len(self.live): self.live[pick % len(self.live)] for pick in chosen}.values():
            for index, group in enumerate(live.cache.layout.groups):
                base, start = live.rows.bases[index], live.rows.starts[index]
                if start < live.sequence.length:
                    ranges.append((base + start * group.row_bytes, base + live.sequence.length * group.row_bytes))
        if ranges:
            self.launches.append(self.driver.launch(ranges))

    @precondition(lambda self: self.launches)
    @rule(pick=picks)
    def finish(self, pick):
        self.launches.pop(pick % len(self.launches)).finish()

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
        self.verify(live)
        num_tokens = None if keep is None else min(keep, live.sequence.length)
        try:
            parked = self.attempt(lambda: live.sequence.park(num_tokens))
        except RowsUnmapped:
            assert any(live.rows.starts)
            return
        self.live.remove(live)
        live.rows.stamps = live.rows.stamps[: parked.length]
        self.kept.append(Kept(live.cache, parked, live.rows))
        with pytest.raises(Closed):
            live.sequence.grow(1)

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
        self.verify(live)
        self.attempt(live.sequence.close)
        self.live.remove(live)
        live.sequence.close()
        with pytest.raises(Closed):
            live.sequence.view(live.cache.layout.groups[0].layers[0], live.cache.layout.groups[0].planes[0].name)

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
            self.caches[index] = self.new_cache(index)
        else:
            self.pool.resize(8 * PAGE_BYTES)
            self.caches[index] = self.new_cache(index)

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
            assert cache.limit.tolist() == limits
            stats = cache.stats()
            assert stats.mapped_bytes == stats.token_bytes + stats.guard_bytes + stats.waste_bytes + stats.parked_bytes
            assert min(stats.token_bytes, stats.guard_bytes, stats.waste_bytes) >= 0
            assert stats.num_tokens == sum(len(live.rows.stamps) for live in self.live if live.cache is cache)
        pool = self.pool.stats()
        assert sum(s.mapped_bytes + s.retiring_bytes for s in map(KVCache.stats, self.caches)) == pool.held_bytes
        assert (self.driver.live_mappings - num_pads(self.caches)) * PAGE_BYTES == pool.held_bytes
        assert (self.driver.live_handles - 1) * PAGE_BYTES == pool.created_bytes  # the pad is beyond the budget

    @invariant()
    def pads_stand_whatever_happens_to_sequences(self):
        for cache in getattr(self, "caches", []):
            bases = addresses(cache, 0)
            assert all(self.driver.is_read_only(base, PAGE_BYTES) for base in bases)
            if self.real_memory:
                assert not any(wrap(base, PAGE_BYTES, self.driver.device)[::SAMPLE].any() for base in bases)
        assert all(live.sequence.slot > 0 for live in getattr(self, "live", []))

    @invariant()
    def rows_are_where_and_what_they_were(self):
        for live in getattr(self, "live", []):
            assert live.sequence.length == len(live.rows.stamps)
            limit, guard = live.sequence.limit, live.cache.guard_tokens
            assert addresses(live.cache, live.sequence.slot) == live.rows.bases
            for index, group in enumerate(live.cache.layout.groups):
                base, start, row_bytes = live.rows.bases[index], live.rows.starts[index], group.row_bytes
                view = live.sequence.view(group.layers[0], group.planes[0].name)
                assert view.shape[0] == limit - start
                if limit > start:
                    assert view.data_ptr() == base + start * row_bytes
                    assert self.driver.is_accessible(base + start * row_bytes, (limit + guard - start) * row_bytes)
            if self.real_memory:
                verify_written(live, every=SAMPLE)

    def verify(self, live: Live) -> None:
        if self.real_memory:
            verify_written(live)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        self.driver.fail_at = set()
        for live in self.live:
            self.verify(live)
        for cache in self.caches:
            cache.close()
            cache.close()
        assert self.driver.live_mappings == 0
        assert self.pool.stats().held_bytes == 0
        self.pool.close()
        assert self.driver.live_handles == 0
        assert self.driver.used_bytes == 0
        if isinstance(self.below, HostDriver):
            self.below.close()


class RealMemoryMachine(CacheMachine):
    """Over the host driver: the bytes too."""

    real_memory = True

    def open_below(self) -> Driver | None:
        return HostDriver()


_SETTINGS = settings(
    deadline=None,
    derandomize=True,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

TestOnFakeDriver = CacheMachine.TestCase
TestOnFakeDriver.settings = settings(_SETTINGS, max_examples=300)
TestOnHostMemory = RealMemoryMachine.TestCase
TestOnHostMemory.settings = settings(_SETTINGS, max_examples=200)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
