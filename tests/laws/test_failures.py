"""Law 5: a failed call leaves everything as it was. For every operation, and every driver call of it that can fail."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.laws.model import LAYOUTS, Live, Rows, addresses, append, attend, check_limits, num_null_pages
from tests.laws.simulated_driver import SimulatedDriver
from vmmkv import DriverError, KVCache, Pool, Sequence
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import PAGE_BYTES

SLOTS = 4
MAX_TOKENS = 14


class World:
    """A pool, a cache, a sequence that is operated on and one that stands by; what they hold is known."""

    def __init__(self, layout: str, *, pages: int = 40, guard_tokens: int = 1) -> None:
        self.driver = SimulatedDriver(haste=0)
        self.pool = Pool("cpu", pages * PAGE_BYTES, driver=self.driver)
        self.layout = LAYOUTS[layout]
        self.cache = KVCache(self.layout, self.pool, slots=SLOTS, max_tokens=MAX_TOKENS, guard_tokens=guard_tokens)
        self.caches = [self.cache]
        self.known: list[Live] = []
        self.stamps = itertools.count(1)
        self.other = self.open(5)
        self.sequence = self.open(4)

    def open(self, num_tokens: int, tenant: str = "red") -> Sequence:
        sequence = self.cache.open(tenant=tenant)
        owner = ("red", "blue").index(tenant)
        live = Live(self.cache, sequence, Rows(owner, [], [0] * len(self.layout.groups), addresses(self.cache, sequence.slot)))
        self.known.append(live)
        sequence.grow(num_tokens)
        self.write(sequence, num_tokens)
        return sequence

    def write(self, sequence: Sequence, num_tokens: int) -> None:
        live = self.live(sequence)
        live.rows.stamps += itertools.islice(self.stamps, num_tokens)
        append(self.driver, live, range(sequence.length, sequence.length + num_tokens))
        sequence.advance(num_tokens)

    def live(self, sequence: Sequence) -> Live:
        return next(live for live in self.known if live.sequence is sequence)

    def parked_foreign(self, num_tokens: int = 6) -> None:
        """Another tenant's parked slot, behind work that has finished."""
        self.open(num_tokens, "blue").park()

    def fill_slots(self) -> None:
        while len(self.known) < SLOTS:
            self.open(1, "blue").park()

    def verify(self) -> None:
        for live in self.known:
            if not live.sequence.closed:
                live.rows.stamps = live.rows.stamps[: live.sequence.length]
                live.rows.starts = [live.sequence.start(group) for group in range(len(live.rows.starts))]
                for group, base, start in zip(self.layout.groups, live.rows.bases, live.rows.starts, strict=True):
                    kept_bytes = (live.sequence.limit - start) * group.row_bytes
                    assert not kept_bytes or self.driver.is_accessible(base + start * group.row_bytes, kept_bytes)
                attend(self.driver, live)
        self.driver.finish_all()
        for cache in self.caches:
            if not cache.closed:
                check_limits(cache)

    def check(self, *, strays: bool = False) -> None:
        """The laws hold. `strays`: an undoing failed too, so there may be pads of no cache, which go with the pool."""
        for cache in self.caches:
            if not cache.closed:
                cache.check()
        self.pool.check()
        pad = self.pool.null_page.handle
        pads = 0 if pad is None else self.driver.mappings_of(pad)
        assert strays or pads == num_null_pages(self.caches)
        assert (self.driver.live_mappings - pads) * PAGE_BYTES == self.pool.stats().held_bytes
        assert (self.driver.live_handles - (pad is not None)) * PAGE_BYTES == self.pool.stats().created_bytes

    def state(self, *, parked: bool) -> tuple[object, ...]:
        """All that a failure must leave alone. Without `parked`: slots that may be evicted on the way do not count."""
        stats = self.cache.stats()
        running = [(live.sequence.length, live.sequence.limit) for live in self.known if not live.sequence.closed]
        return (
            running,
            [live.sequence.closed for live in self.known],
            self.cache.limits.tolist(),
            stats.mapped_bytes - (0 if parked else stats.parked_bytes),
            stats.num_parked if parked else 0,
            stats.pool_budget_bytes,
            (stats.num_tokens, stats.num_sequences, stats.blocked_steps, stats.adopted_slots),
            len(self.pool._caches),
        )

    def end(self) -> None:
        """Everything closes, and nothing is left."""
        for cache in self.caches:
            cache.close()
        self.pool.close()
        assert (self.driver.live_mappings, self.driver.live_handles, self.driver.used_bytes) == (0, 0, 0)
        assert self.driver.broken is None


@dataclass(frozen=True)
class Operation:
    """`act` is what may fail, after `prepare`. `partial`: what it did before the failure may stay done."""

    act: Callable[[World], object]
    prepare: Callable[[World], object] = lambda world: None
    pages: int = 40
    evicts: bool = False
    partial: bool = False


def retire_under_launch(world: World) -> None:
    """The sequence's last pages retire, and a launch keeps them mapped."""
    world.sequence.grow(MAX_TOKENS)
    world.write(world.sequence, MAX_TOKENS - 4)
    attend(world.driver, world.live(world.sequence))
    world.sequence.truncate(1)


def own_windows_advanced(world: World) -> None:
    world.sequence.grow(12)
    world.write(world.sequence, 8)
    for index, group in enumerate(world.layout.groups):
        if group.window is not None:
            world.sequence.advance_start(index)


def park_own(world: World) -> None:
    world.kept = world.sequence.park()


def park_own_blank(world: World) -> None:
    world.sequence.park(0)


def park_own_with_windows(world: World) -> None:
    own_windows_advanced(world)
    world.kept = world.sequence.park()


def foreign_memory_is_free(world: World) -> None:
    world.open(8, "blue").close()
    world.cache.map_ahead()


def something_retires(world: World) -> None:
    world.open(8, "blue").close()


def another_cache(world: World) -> None:
    world.caches.append(KVCache(LAYOUTS["one_group"], world.pool, slots=2, max_tokens=9))


def close_everything(world: World) -> None:
    world.cache.close()
    world.pool.close()


OPERATIONS = {
    "construct": Operation(another_cache),
    "open": Operation(lambda world: world.open(0)),
    "open_blank": Operation(lambda world: world.cache.open(tenant="red"), park_own_blank),
    "open_blank_after_window": Operation(
        lambda world: world.cache.open(tenant="red"), lambda world: (own_windows_advanced(world), park_own_blank(world))
    ),
    "open_evicting": Operation(lambda world: world.cache.open(tenant="red"), World.fill_slots, evicts=True),
    "open_batch_evicting": Operation(lambda world: world.cache.open_batch(2, tenant="red"), World.fill_slots, evicts=True),
    "grow_one_page": Operation(lambda world: world.sequence.grow(6)),
    "grow_many_pages": Operation(lambda world: world.sequence.grow(MAX_TOKENS)),
    "grow_into_foreign_memory": Operation(lambda world: world.sequence.grow(MAX_TOKENS), foreign_memory_is_free),
    "grow_over_pending_reclaim": Operation(lambda world: world.sequence.grow(MAX_TOKENS), retire_under_launch),
    "grow_evicting": Operation(lambda world: world.sequence.grow(12), World.parked_foreign, pages=24, evicts=True),
    "pump": Operation(lambda world: world.cache.map_ahead(lookahead_tokens=3), something_retires, partial=True),
    "truncate": Operation(lambda world: world.sequence.truncate(1)),
    "advance_start": Operation(
        lambda world: [world.sequence.advance_start(i) for i, group in enumerate(world.layout.groups) if group.window],
        lambda world: (world.sequence.grow(12), world.write(world.sequence, 8)),
    ),
    "park": Operation(lambda world: world.sequence.park()),
    "adopt": Operation(lambda world: world.cache.adopt(world.kept, tenant="red"), park_own),
    "adopt_part": Operation(lambda world: world.cache.adopt(world.kept, 2, tenant="red"), park_own),
    "adopt_none_after_window": Operation(lambda world: world.cache.adopt(world.kept, 0, tenant="red"), park_own_with_windows),
    "evict": Operation(lambda world: world.cache.evict(world.kept), park_own),
    "close": Operation(lambda world: world.sequence.close()),
    "resize_shrinking": Operation(
        lambda world: world.pool.resize(26 * PAGE_BYTES),
        lambda world: (world.parked_foreign(), foreign_memory_is_free(world)),
        evicts=True,
    ),
    "close_cache": Operation(close_everything, World.parked_foreign, partial=True),
}


def attempt(operation: Operation, world: World, fail_at: set[int]) -> bool:
    """Do it with these of its driver calls failing: did it fail? In any case the world is as it should be, and goes on."""
    operation.prepare(world)
    before = world.state(parked=not operation.evicts)
    world.driver.fail_at = {world.driver.num_calls + number for number in fail_at}
    try:
        operation.act(world)
    except DriverError as error:
        assert error.code == "FAKE_INJECTED"
        failed = True
        world.check(strays=len(fail_at) > 1 or operation.partial)
        if not operation.partial:
            assert world.state(parked=not operation.evicts) == before
        world.verify()
        world.driver.fail_at = set()
        operation.act(world)
    else:
        failed = False
    world.driver.fail_at = set()
    world.check(strays=len(fail_at) > 1)
    world.verify()
    for live in world.known:
        if not live.sequence.closed and live.sequence.length < live.sequence.limit:
            world.write(live.sequence, 1)
    world.verify()
    world.end()
    return failed


def count_calls(name: str, layout: str) -> int:
    """How many driver calls the operation makes when none fails."""
    operation = OPERATIONS[name]
    world = World(layout, pages=operation.pages)
    operation.prepare(world)
    before = world.driver.num_calls
    operation.act(world)
    num_calls = world.driver.num_calls - before
    world.end()
    return num_calls


def fail_each_call(name: str, layout: str) -> None:
    operation = OPERATIONS[name]
    for number in range(count_calls(name, layout)):
        world = World(layout, pages=operation.pages)
        assert attempt(operation, world, {number}), f"{name} hid the failure of its call {number}"


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_call_of_an_operation_can_fail_and_nothing_changes(name, layout):
    fail_each_call(name, layout)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.nightly) for name in LAYOUTS if name != "two_groups"] + ["two_groups"]
)
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_the_undoing_can_fail_too(name, layout):
    operation = OPERATIONS[name]
    for first in range(count_calls(name, layout)):
        for later in ({1}, {2}, {3}, {5}, {1, 2}):  # two in a row: a mapping that cannot be used, nor be unmapped
            failing = {first, *(first + number for number in later)}
            attempt(operation, World(layout, pages=operation.pages), failing)


def test_operations_cover_every_driver_call():
    """Each kind of call is made, and so failed, by some operation above."""
    made = set()
    for operation in OPERATIONS.values():
        world = World("two_groups", pages=operation.pages)
        operation.prepare(world)
        before = world.driver.calls.copy()
        operation.act(world)
        made |= {call for call, count in world.driver.calls.items() if count > before[call]}
        world.end()
    assert made == {"reserve", "create", "release", "map", "set_access", "unmap", "zero", "write", "fence"}


def test_limits_that_could_not_be_ordered_are_taken_back_from_the_device() -> None:
    driver = FakeDriver()
    with (
        Pool("cpu", 8 * PAGE_BYTES, driver=driver) as pool,
        KVCache(LAYOUTS["one_group"], pool, slots=2, max_tokens=9) as cache,
    ):
        sequence = cache.open()
        sequence.grow(2)
        before = cache.limit.tolist()
        driver.order_fails = True
        with pytest.raises(DriverError, match="order"):
            sequence.grow(9)
        assert cache.limit.tolist() == before
        cache.check()
        driver.order_fails = False
        sequence.grow(9)
        assert cache.limit.tolist()[sequence.slot] == 9
        cache.check()
