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
    check_limits,
    verify_unwritten,
    verify_written,
    write,
)
from tests.laws.simulated_driver import SimulatedDriver
from vmmkv import Closed, DriverError, KVCache, Pool
from vmmkv.driver.host import HostDriver
from vmmkv.memory.address_space import wrap
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import PAGE_BYTES

T = TypeVar("T")
SLOTS = 4
MAX_TOKENS = 14

picks = st.integers(0, 11)
seeds = st.integers(0, 2**31)


class LawMachine(RuleBasedStateMachine):
    """A pool and its caches on a simulated device. `live` and `kept` are what runs and what is parked."""

    real_memory = False
    """Is it real memory over the host driver instead?"""

    def open_device(self, seed: int, pages: int) -> None:
        """The driver and a pool of so many pages, before anything else."""
        self.below = HostDriver() if self.real_memory else None
        if self.real_memory:
            self.driver = FakeDriver(over=self.below)
        else:
            self.driver = SimulatedDriver(seed=seed, creates_zeroed=seed % 3 == 0)
        self.pool = Pool(self.driver.device, pages * PAGE_BYTES, driver=self.driver)
        self.caches: list[KVCache] = []
        self.live: list[Any] = []
        self.kept: list[Any] = []
        self.streams: list[torch.Stream] = []
        if isinstance(self.driver, SimulatedDriver):
            self.streams = [self.driver.main, self.driver.new_stream(), self.driver.new_stream()]
            self.stream = self.driver.main
            self.records_all = seed % 2 == 0
            """Are all streams recorded? Else all but the main one, which is the only one to be current in a call."""

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

    def state(self) -> list[object]:
        """All that a failure leaves alone: everything but what is kept as cache, which may have been evicted on the way."""
        running = [
            (live.sequence.length, live.sequence.limit, [live.sequence.start(i) for i in range(len(live.rows.starts))])
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

    # always

    def laws_hold(self) -> None:
        """An invariant of each machine: the books, recounted."""
        raise NotImplementedError

    @invariant()
    def no_work_has_broken_a_law(self) -> None:
        """Not even where an error was suppressed."""
        broken = getattr(getattr(self, "driver", None), "broken", None)
        if broken is not None:
            raise broken

    @invariant()
    def null_pages_stand_whatever_happens_to_sequences(self) -> None:
        """They are mapped, read-only and zero, and no sequence runs there."""
        for cache in getattr(self, "caches", []):
            bases = addresses(cache, 0)
            assert all(self.driver.is_read_only(base, PAGE_BYTES) for base in bases)
            if self.real_memory:
                assert not any(wrap(base, PAGE_BYTES, self.driver.device)[::SAMPLE].any() for base in bases)
        assert all(live.sequence.slot > 0 for live in getattr(self, "live", []))

    @invariant()
    def rows_are_where_and_what_they_were(self) -> None:
        """Addresses never change (law 6), and what may be written is mapped."""
        for live in getattr(self, "live", []):
            assert live.sequence.length == len(live.rows.stamps)
            limit, guard = live.sequence.limit, live.cache.guard_tokens
            assert addresses(live.cache, live.sequence.slot) == live.rows.bases
            for index, group in enumerate(live.cache.layout.groups):
                base, start, row_bytes = live.rows.bases[index], live.rows.starts[index], group.row_bytes
                assert live.sequence.start(index) == start
                if limit > start:
                    assert self.driver.is_accessible(base + start * row_bytes, (limit + guard - start) * row_bytes)
            if self.real_memory:
                verify_written(live, every=SAMPLE)

    def forget_evicted(self) -> None:
        """Drop from the model what was evicted to make room."""
        self.kept = [kept for kept in self.kept if any(kept.parked is parked for parked in kept.cache.parked())]

    def ended(self, live: Live) -> None:
        """A sequence is over, and refuses everything but `close`."""
        self.live.remove(live)
        live.sequence.close()
        with pytest.raises(Closed):
            live.sequence.grow(1)

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
        if self.below is not None:
            self.below.close()


NIGHTLY = settings.get_current_profile_name() == "nightly"


def walks(num_examples: int, nightly_examples: int, num_steps: int = 50) -> settings:
    """So many random walks: the same in each default run, new ones each night."""
    return settings(
        deadline=None,
        derandomize=not NIGHTLY,
        max_examples=nightly_examples if NIGHTLY else num_examples,
        stateful_step_count=num_steps,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
