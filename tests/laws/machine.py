"""What the machines of the laws have in common: a device, failures, streams, the rows of running sequences, and the laws.

On a simulated device, rows are written and read by kernels that run late and in any order. Over the host driver the memory is
real, and every byte is compared at once.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.laws.model import (
    SAMPLE,
    Live,
    addresses,
    append,
    attend,
    check_addresses,
    check_books,
    check_limits,
    mapped_bytes,
    verify_unwritten,
    verify_written,
    write,
)
from tests.laws.simulated_driver import SimulatedDriver
from vmmkv import Closed, DriverError, Evicted, KVCache, OutOfPages, ParkedSlot, Pool, RowsUnmapped, Sequence
from vmmkv.driver.base import Driver
from vmmkv.driver.host import HostDriver
from vmmkv.errors import BudgetError
from vmmkv.memory.address_space import wrap
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import PAGE_BYTES

T = TypeVar("T")
SLOTS = 4
MAX_TOKENS = 14

picks = st.integers(0, 11)
cuts = st.none() | st.just(0) | st.integers(0, MAX_TOKENS)
seeds = st.integers(0, 2**31)


class LawMachine(RuleBasedStateMachine):
    """A pool and its caches on a simulated device. `live` and `kept` are what runs and what is parked."""

    real_memory = False
    """Is it real memory over the host driver instead?"""
    shares_pages = False
    """May a page have several holders? Then cutting a sequence may need another one."""
    most_pages = 24
    """Of the pool."""

    def open_device(self, seed: int, pages: int) -> None:
        """The driver and a pool of so many pages, before anything else."""
        self.below = self.open_below() if self.real_memory else None
        if self.real_memory:
            self.driver = FakeDriver(over=self.below)
        else:
            self.driver = SimulatedDriver(seed=seed, creates_zeroed=seed % 3 == 0)
        self.pool = Pool(self.driver.device, pages * PAGE_BYTES, driver=self.driver)
        self.caches: list[KVCache] = []
        self.live: list[Live] = []
        self.kept: list[Live] = []
        self.streams: list[torch.Stream] = []
        if isinstance(self.driver, SimulatedDriver):
            self.streams = [self.driver.main, self.driver.new_stream(), self.driver.new_stream()]
            self.stream = self.driver.main
            self.records_all = seed % 2 == 0
            """Are all streams recorded? Else all but the main one, which is the only one to be current in a call."""

    def open_below(self) -> Driver:
        """The driver of the real memory."""
        return HostDriver()

    def new_cache(self, *arguments: Any, **options: Any) -> KVCache:
        """A cache that knows the streams."""
        cache = KVCache(*arguments, **options)
        for stream in self.streams[0 if self.records_all else 1 :] if self.streams else []:
            cache.record_stream(stream)
        return cache

    # failures

    @precondition(lambda self: not self.driver.fail_at)
    @rule(number=st.integers(0, 12))
    def let_a_call_fail(self, number: int) -> None:
        """The driver call of that number from now on, whatever operation makes it."""
        self.driver.fail_at = {self.driver.num_calls + number}

    def attempt(self, act: Callable[[], T], *, partial: bool = False) -> T:
        """Do it, and again if a call was to fail: meanwhile all is as it was (law 5).

        `partial`: what it did before the failure may stay done.
        """
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
            assert (after := self.state()) == before, f"before {before}, after {after}"
            self.laws_hold()
            self.rows_are_where_and_what_they_were()
        return act()

    def without_waits(self, act: Callable[[], T]) -> T:
        """Attempt it: the host waits for no work. Over the host driver that is a kernel, for all else has ended."""
        if isinstance(self.driver, SimulatedDriver):
            num_waits = self.driver.num_waits
            done = self.attempt(act, partial=True)
            assert self.driver.num_waits == num_waits, "it waited for a fence"
        else:
            kernel = self.driver.launch([])
            done = self.attempt(act, partial=True)
            assert not kernel.finished, "it waited for a fence"
            kernel.finish()
        return done

    def state(self) -> list[object]:
        """All that a failure leaves alone: everything but what is kept as cache, which may have been evicted on the way."""
        running = [
            (live.sequence.length, live.sequence.limit, [live.sequence.start(i) for i in range(len(live.starts))])
            for live in self.live
        ]
        stats = [cache.stats() for cache in self.caches]
        mapped = [each.mapped_bytes - each.parked_bytes for each in stats]
        counts = [(each.num_sequences, each.num_tokens, each.blocked_steps, each.adopted_slots) for each in stats]
        return [running, mapped, counts, self.pool.budget_bytes]

    # rows

    def compute(self, live: Live, tokens: range) -> None:
        """Write rows whose stamps are in the model; tokens past the limit are dropped by the device."""
        if self.real_memory:
            write(live, tokens, through_arena=bool(len(tokens) % 2))
        else:
            with self.working_on(live):
                append(self.driver, live, tokens)

    def verify(self, lives: Iterable[Live], every: int = 1) -> None:
        """Read all rows of some sequences."""
        for live in lives:
            if self.real_memory:
                verify_written(live, every)
                verify_unwritten(live)
            else:
                with self.working_on(live):
                    attend(self.driver, live)

    def working_on(self, live: Live):
        """Work on a sequence comes behind what was launched for it before, on whatever stream."""
        if live.stream is not None:
            self.driver.wait_stream(self.stream, live.stream)
        live.stream = self.stream
        return self.driver.on(self.stream)

    def read_back(self, live: Live) -> None:
        """The host waits for what was launched for a sequence: so its rows are confirmed."""
        if not self.real_memory and live.stream is not None:
            with self.driver.on(live.stream):
                self.driver.synchronize_stream(live.stream)

    # the device

    @precondition(lambda self: self.streams)
    @rule(pick=picks)
    def turn_to_a_stream(self, pick: int) -> None:
        """What is launched next is launched there; and perhaps that stream is current in calls from now on."""
        self.stream = self.streams[pick % 3]
        if self.records_all:
            self.driver.current = self.streams[pick // 3 % 3]

    @precondition(lambda self: self.live)
    @rule(chosen=st.sets(picks, min_size=1))
    def attend(self, chosen: set[int]) -> None:
        """A step's kernels read all rows."""
        self.verify([self.live[index] for index in sorted({pick % len(self.live) for pick in chosen})])

    @precondition(lambda self: self.streams)
    @rule()
    def synchronize(self) -> None:
        """The host waits for the device: then the device knows what the host knows."""
        self.driver.finish_all()
        for cache in self.caches:
            check_limits(cache)

    @precondition(lambda self: self.streams)
    @rule(pick=picks)
    def finish_a_stream(self, pick: int) -> None:
        """The host waits for one stream."""
        self.driver.synchronize_stream(self.streams[pick % 3])

    # what the user does to a sequence, a slot or the pool

    @precondition(lambda self: self.live)
    @rule(pick=picks, fewer=st.integers(0, MAX_TOKENS))
    def truncate(self, pick: int, fewer: int) -> None:
        live = self.live[pick % len(self.live)]
        self.cut(live, max(0, live.sequence.length - fewer))

    def cut(self, live: Live, num_tokens: int) -> None:
        try:
            self.attempt(lambda: live.sequence.truncate(num_tokens))
        except RowsUnmapped:
            assert any(live.starts)
        except OutOfPages:  # a page that others hold too has to be exchanged
            assert self.shares_pages
            self.forget_evicted()
        else:
            self.forget_evicted()
            live.number()
            del live.stamps[num_tokens:], live.tokens[num_tokens:]
            live.number()
            if live.inserted is not None:
                live.inserted = min(live.inserted, num_tokens)

    @precondition(lambda self: self.live)
    @rule(pick=picks, kept=st.sets(st.integers(0, MAX_TOKENS), min_size=1), as_mask=st.booleans())
    def compact(self, pick: int, kept: set[int], as_mask: bool) -> None:
        live = self.live[pick % len(self.live)]
        length = live.sequence.length
        rows = [row for row in range(length) if row in kept]
        keep = torch.tensor([row in kept for row in range(length)], dtype=torch.bool) if as_mask else rows
        if not rows or any(group.window for group in live.cache.layout.groups):
            with pytest.raises(ValueError, match=r"names no row|windows"):
                live.sequence.compact(keep)
            return
        self.verify([live])
        try:
            self.attempt(lambda: live.sequence.compact(keep))
        except OutOfPages:  # a page that others hold too has to be exchanged
            assert self.shares_pages
            self.forget_evicted()
            return
        self.forget_evicted()
        if len(rows) < length:
            live.number()
            live.at = [live.at[row] for row in (*rows, length)]
            live.stamps, live.tokens = ([each[row] for row in rows if each] for each in (live.stamps, live.tokens))
            live.inserted = None

    @precondition(lambda self: self.live)
    @rule(pick=picks, short=st.integers(0, 2))
    def advance_start(self, pick: int, short: int) -> None:
        live = self.live[pick % len(self.live)]
        self.attend({pick})
        for group, description in enumerate(live.cache.layout.groups):
            if description.window is None:
                with pytest.raises(ValueError, match="no window"):
                    live.sequence.advance_start(group)
                continue
            latest = max(0, live.sequence.length - description.window + 1, live.starts[group])
            start = max(latest - short, live.starts[group])
            self.attempt(lambda group=group, start=start: live.sequence.advance_start(group, start if short else None))
            live.starts[group] = start

    @precondition(lambda self: self.kept)
    @rule(pick=picks, cut=cuts)
    def adopt(self, pick: int, cut: int | None) -> None:
        kept = self.kept[pick % len(self.kept)]
        num_tokens = kept.parked.length if cut is None else min(cut, kept.parked.length)
        calls = self.driver.calls.copy()
        try:
            sequence = self.attempt(lambda: kept.cache.adopt(kept.parked, num_tokens, tenant=kept.parked.tenant))
        except RowsUnmapped:
            assert num_tokens and any(kept.starts)
            return
        except OutOfPages:
            assert self.shares_pages and (cut is not None or kept.is_cut or kept.cache.guard_tokens)
            return
        made = (self.driver.calls - calls).keys()
        assert self.shares_pages or made <= {"write", "fence"}, made  # the fence: where the write failed first
        assert (sequence.slot, sequence.length) == (kept.parked.slot, num_tokens)
        starts = kept.starts if num_tokens else [0] * len(kept.starts)
        stamps, tokens = kept.stamps[:num_tokens], kept.tokens[:num_tokens]
        self.live.append(Live(kept.cache, sequence, kept.owner, stamps, starts, kept.bases, tokens=tokens, at=kept.at))
        self.forget_evicted()
        self.verify(self.live[-1:])
        with pytest.raises(Evicted):
            kept.cache.adopt(kept.parked, tenant=kept.parked.tenant)

    @precondition(lambda self: self.live)
    @rule(pick=picks, keep=cuts)
    def park_slot(self, pick: int, keep: int | None) -> None:
        live = self.live[pick % len(self.live)]
        self.verify([live])
        num_tokens = None if keep is None else min(keep, live.sequence.length)
        try:
            parked = self.attempt(lambda: live.sequence.park(num_tokens))
        except RowsUnmapped:
            assert any(live.starts)
            return
        self.rests(live, parked)

    def rests(self, live: Live, parked: ParkedSlot) -> None:
        """The slot of a sequence is parked."""
        self.ended(live)
        live.number()
        live.parked, live.is_cut = parked, parked.length < len(live.stamps)
        del live.stamps[parked.length :], live.tokens[parked.length :]
        self.kept.append(live)

    @precondition(lambda self: self.kept)
    @rule(pick=picks)
    def evict_slot(self, pick: int) -> None:
        kept = self.kept.pop(pick % len(self.kept))
        kept.cache.evict(kept.parked)
        with pytest.raises(Evicted):
            kept.cache.evict(kept.parked)

    @precondition(lambda self: self.live)
    @rule(pick=picks)
    def close(self, pick: int) -> None:
        live = self.live[pick % len(self.live)]
        self.verify([live])
        self.attempt(live.sequence.close)
        self.over(live)

    def over(self, live: Live) -> None:
        """A sequence has ended, and its slot is free, or parked with what is pinned."""
        parked = next((each for each in live.cache.parked() if each.slot == live.sequence.slot), None)
        if parked is None:
            self.ended(live)
        else:
            self.rests(live, parked)

    def ended(self, live: Live) -> None:
        """A sequence is over, and refuses everything but `close`."""
        self.live.remove(live)
        live.sequence.close()
        with pytest.raises(Closed):
            live.sequence.grow(1)

    @rule(pick=picks, budget_us=st.sampled_from([0.0, float("inf")]), lead=st.integers(0, 4))  # 200 us would be chance
    def map_ahead(self, pick: int, budget_us: float, lead: int) -> None:
        cache = self.caches[pick % len(self.caches)]
        self.without_waits(lambda: cache.map_ahead(budget_us, lookahead_tokens=lead))
        self.forget_evicted()

    @rule(pages=st.integers(0, 40))
    def resize(self, pages: int) -> None:
        before, budget_bytes = self.pool.stats(), pages % (1 + self.most_pages) * PAGE_BYTES
        try:
            self.attempt(lambda: self.pool.resize(budget_bytes))
        except BudgetError:
            after = self.pool.stats()
            assert (before.budget_bytes, before.created_bytes) == (after.budget_bytes, after.created_bytes)
        else:
            assert self.pool.stats().budget_bytes == budget_bytes
        self.forget_evicted()

    def forget_evicted(self) -> None:
        """Drop from the model what was evicted to make room."""
        self.kept = [kept for kept in self.kept if any(kept.parked is parked for parked in kept.cache.parked())]

    # always

    def sequences(self) -> list[Sequence]:
        """All that run."""
        return [live.sequence for live in self.live]

    @invariant()
    def laws_hold(self) -> None:
        """The books, recounted."""
        self.forget_evicted()
        mapped = check_books(self.driver, self.pool, self.caches)
        assert mapped == mapped_bytes(self.caches)
        assert self.shares_pages or mapped == self.pool.held_bytes
        for cache in self.caches:
            running = {sequence.slot: sequence for sequence in self.sequences() if sequence.live.slots is cache.slots}
            limits = [running[slot].limit if slot in running else 0 for slot in range(1 + cache.num_slots)]
            assert cache.limits.tolist() == limits
            stats = cache.stats()
            assert stats.mapped_bytes == stats.token_bytes + stats.guard_bytes + stats.waste_bytes + stats.parked_bytes
            assert min(stats.token_bytes, stats.guard_bytes, stats.waste_bytes) >= 0
            assert stats.num_tokens == sum(sequence.length for sequence in running.values())
            assert stats.num_sequences == len(running)
            assert stats.num_parked == sum(kept.cache is cache for kept in self.kept)

    @invariant()
    def no_work_has_broken_a_law(self) -> None:
        """Not even where an error was suppressed."""
        broken = getattr(self.driver, "broken", None)
        if broken is not None:
            raise broken

    @invariant()
    def null_pages_stand_whatever_happens_to_sequences(self) -> None:
        """They are mapped, read-only and zero, and no sequence runs there."""
        for cache in self.caches:
            bases = addresses(cache, 0)
            assert all(self.driver.is_read_only(base, PAGE_BYTES) for base in bases)
            if self.real_memory:
                assert not any(wrap(base, PAGE_BYTES, self.driver.device)[::SAMPLE].any() for base in bases)
        assert all(live.sequence.slot > 0 for live in self.live)

    @invariant()
    def rows_are_where_and_what_they_were(self) -> None:
        for live in self.live:
            assert live.sequence.length == len(live.stamps)
            live.number()
            assert [*live.sequence.positions(), live.sequence.position] == live.at
            check_addresses(self.driver, live)
            if self.real_memory:
                verify_written(live, every=SAMPLE)

    def teardown(self) -> None:
        """Everything closes, and nothing is left."""
        if not hasattr(self, "pool"):
            return
        self.no_work_has_broken_a_law()
        self.verify(self.live)
        for cache in self.caches:
            try:
                cache.close()
            except DriverError as error:
                assert error.code == "FAKE_INJECTED"
                cache.close()
            cache.close()
        self.driver.fail_at = set()
        self.no_work_has_broken_a_law()
        assert self.driver.live_mappings == 0
        assert self.pool.stats().held_bytes == 0
        self.pool.close()
        assert (self.driver.live_handles, self.driver.used_bytes) == (0, 0)
        if isinstance(self.below, HostDriver):
            self.below.close()


NIGHTLY = settings.get_current_profile_name() == "nightly"


def cases(machine: type[RuleBasedStateMachine], num_examples: int, nightly_examples: int, **changes: object) -> tuple[Any, Any]:
    """Two test cases of a machine with these attributes: the same random walks in each run, and new ones nightly."""
    changed: Any = type(machine.__name__, (machine,), changes) if changes else machine
    walks = settings(
        deadline=None,
        derandomize=not NIGHTLY,
        max_examples=nightly_examples if NIGHTLY else num_examples,
        stateful_step_count=50,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    case = type("Walks", (changed.TestCase,), {"settings": walks})
    return case, pytest.mark.nightly(type("WalksAtLength", (case,), {}))
