"""Law 5: a failed call leaves everything as it was. For every operation, and every driver call of it that can fail.

Operations of a cache alone, and of prefixes: every way in, on and out. What was evicted to make room stays evicted, and what an
adoption would have written over may be forgotten: both are cache.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.laws.model import (
    LAYOUTS,
    PREFIX_LAYOUTS,
    TENANTS,
    Live,
    Texts,
    append,
    attend,
    check_addresses,
    check_books,
    check_limits,
    large_extents,
    mapped_bytes,
    opened,
)
from tests.laws.simulated_driver import SimulatedDriver
from vmmkv import DriverError, HostTier, KVCache, Pool, Sequence
from vmmkv.prefix import AttachMethod, PrefixCache
from vmmkv.saved import Offloaded
from vmmkv.units import PAGE_BYTES

SLOTS = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


class World:
    """A pool, a cache, and sequences whose rows are known. `sequence` is operated on, another one is left alone."""

    max_tokens, guard_tokens = 14, 1
    shares_pages = False

    def __init__(self, layout: str, pages: int) -> None:
        self.driver = SimulatedDriver(haste=0)
        self.pool = Pool("cpu", pages * PAGE_BYTES, driver=self.driver)
        self.layout = PREFIX_LAYOUTS[layout]
        size = {"slots": SLOTS, "max_tokens": self.max_tokens, "guard_tokens": self.guard_tokens}
        self.cache = KVCache(self.layout, self.pool, **size)
        self.caches = [self.cache]
        self.known: list[Live] = []
        self.stamps = itertools.count(1)
        self.begin_sequences()

    def begin_sequences(self) -> None:
        self.open(5)
        self.sequence = self.open(4)

    def open(self, num_tokens: int, tenant: str = "red") -> Sequence:
        sequence = self.cache.open(tenant=tenant)
        self.known.append(opened(self.cache, sequence, owner=TENANTS.index(tenant)))
        sequence.grow(num_tokens)
        self.write(self.known[-1], num_tokens)
        return sequence

    def write(self, live: Live, num_tokens: int) -> None:
        """Launch a kernel that appends so many rows."""
        live.stamps += itertools.islice(self.stamps, num_tokens)
        append(self.driver, live, range(live.sequence.length, live.sequence.length + num_tokens))
        live.sequence.advance(num_tokens)

    def live(self, sequence: Sequence) -> Live:
        return next(live for live in self.known if live.sequence is sequence)

    def running(self) -> list[Live]:
        return [live for live in self.known if not live.sequence.closed]

    def verify(self) -> None:
        """Every row that a sequence has is what was written."""
        for live in self.running():
            length = live.sequence.length
            del live.stamps[length:], live.tokens[length:]
            live.starts = [live.sequence.start(group) for group in range(len(live.starts))]
            check_addresses(self.driver, live)
            attend(self.driver, live)
        self.driver.finish_all()
        for cache in self.caches:
            if not cache.closed:
                check_limits(cache)

    def check(self, *, strays: bool) -> None:
        """The books are right. `strays`: as of `check_books`."""
        mapped = check_books(self.driver, self.pool, self.caches, strays=strays)
        assert mapped == (mapped_bytes(self.caches) if self.shares_pages else self.pool.held_bytes)

    def state(self, *, cached: bool) -> list[object]:
        """All that a failure leaves alone; with `cached` what is kept for others too."""
        stats = self.cache.stats()
        return [
            [(live.sequence.length, live.sequence.limit, live.starts) for live in self.running()],
            [live.sequence.closed for live in self.known],
            self.cache.limits.tolist(),
            stats.mapped_bytes - (0 if cached else stats.parked_bytes),
            stats.num_parked if cached else 0,
            (stats.num_tokens, stats.num_sequences, stats.blocked_steps, stats.adopted_slots, stats.pool_budget_bytes),
            len(self.pool.caches),
        ]

    def end(self) -> None:
        """Everything closes, and nothing is left."""
        for cache in self.caches:
            cache.close()
        self.pool.close()
        assert (self.driver.live_mappings, self.driver.live_handles, self.driver.used_bytes) == (0, 0, 0)
        assert self.driver.broken is None

    # what operations prepare

    def parked_foreign(self, num_tokens: int = 6) -> None:
        """Another tenant's parked slot, behind work that has finished."""
        self.open(num_tokens, "blue").park()

    def fill_slots(self) -> None:
        while len(self.known) < SLOTS:
            self.open(1, "blue").park()

    def leave_pages_pending(self) -> None:
        self.open(8, "blue").close()

    def foreign_memory_is_free(self) -> None:
        self.leave_pages_pending()
        self.cache.map_ahead()

    def reclaim_under_launch(self) -> None:
        """The sequence's last pages are pending reclaim, and a launch keeps them mapped."""
        live = self.live(self.sequence)
        self.sequence.grow(self.max_tokens)
        self.write(live, self.max_tokens - 4)
        attend(self.driver, live)
        self.sequence.truncate(1)

    def long(self) -> None:
        self.sequence.grow(12)
        self.write(self.live(self.sequence), 8)

    def advance_windows(self) -> None:
        for index, group in enumerate(self.layout.groups):
            if group.window is not None:
                self.sequence.advance_start(index)

    def compact(self) -> None:
        """The newest sequence keeps some rows."""
        live, rows = self.known[-1], [0, 1, 3, 4, 7, 9]
        live.sequence.compact(rows)
        live.stamps, live.tokens = ([each[row] for row in rows if each] for each in (live.stamps, live.tokens))

    def parked(self, num_tokens: int | None = None, *, long: bool = False) -> None:
        if long:
            self.long()
            self.advance_windows()
        self.kept = self.sequence.park(num_tokens)

    def another_cache(self) -> None:
        self.caches.append(KVCache(LAYOUTS["one_group"], self.pool, slots=2, max_tokens=9))


class PrefixWorld(World):
    """A prefix cache, and large extents of four pages. The rows of `known` are those of their tokens."""

    max_tokens, guard_tokens = 20, 0
    shares_pages = True

    def begin_sequences(self) -> None:
        self.prefix = PrefixCache(self.cache)
        self.texts = Texts()

    def attach(self, prompt: list[int], method: AttachMethod | None = None) -> Live:
        attached = self.prefix.attach(prompt, namespace="red", method=method)
        assert method in (None, attached.method), f"attached by {attached.method} and not by {method}"
        return self.know(attached.sequence, prompt[: attached.num_tokens])

    def begin(self, prompt: list[int], method: AttachMethod | None = None, *, by_tokens: bool = False) -> Live:
        """Attach a prompt, compute the rest of it and insert all of it."""
        live = self.attach(prompt, method)
        first = live.sequence.length
        for length in range(first + 1 if by_tokens else len(prompt), len(prompt) + 1):
            live.sequence.grow(length)
        self.say(live, prompt[first:])
        self.driver.finish_all()  # what is inserted was read back
        self.prefix.insert(live.sequence, prompt)
        return live

    def know(self, sequence: Sequence, tokens: list[int]) -> Live:
        self.known.append(opened(self.cache, sequence, owner=0, stamps=self.texts.stamps("red", tokens)))
        self.known[-1].tokens = list(tokens)
        return self.known[-1]

    def say(self, live: Live, tokens: list[int]) -> None:
        live.tokens += tokens
        live.stamps += self.texts.stamps("red", live.tokens)[len(live.stamps) :]
        append(self.driver, live, range(live.sequence.length, len(live.tokens)))
        live.sequence.advance(len(tokens))

    def write(self, live: Live, num_tokens: int) -> None:
        self.say(live, [7] * num_tokens)

    def state(self, *, cached: bool) -> list[object]:
        prefix = self.prefix.stats()
        kept = prefix.num_tokens, prefix.held_bytes, self.prefix.match([*PROMPT, 0], namespace="red")
        return [
            *super().state(cached=cached),
            (prefix.attached, prefix.hit_tokens, prefix.missed_tokens),
            kept if cached else None,
        ]

    # what operations prepare

    def run(self) -> None:
        self.begin(PROMPT)

    def park(self) -> None:
        self.prefix.park(self.begin(PROMPT).sequence, PROMPT)

    def release(self) -> None:
        self.prefix.release(self.begin(PROMPT, by_tokens=True).sequence)

    def park_and_fork(self) -> None:
        """The pages of a parked slot are a running fork's too."""
        first = self.begin(PROMPT)
        self.fork()
        self.prefix.park(first.sequence, PROMPT)

    def fill_with_old_prefixes(self) -> None:
        """Every page is kept for some prompt. The wanted prefix is the newest."""
        for number in (20, 21):
            prompt = [number] * 9
            self.prefix.park(self.begin(prompt).sequence, prompt)
        self.run()
        self.pool.resize(max(self.pool.held_bytes, PAGE_BYTES))

    def alias(self) -> None:
        """The last sequence has the prompt's pages by alias, and rows of its own behind."""
        self.run()
        self.begin([*PROMPT, 7, 7], AttachMethod.ALIAS)

    def fork(self, count: int = 1) -> None:
        parent = self.known[-1]
        for each in self.cache.fork(parent.sequence, count):
            self.know(each, parent.tokens)


class TierWorld(PrefixWorld):
    """A host tier, which has the prompt."""

    def begin_sequences(self) -> None:
        self.host = HostTier(40 * PAGE_BYTES)
        self.prefix = PrefixCache(self.cache, [self.host], fingerprint="model")
        self.texts = Texts()

    def insert(self) -> None:
        """The prompt waits to be stored."""
        self.release()
        self.driver.finish_all()

    def store(self) -> None:
        """It is stored, and no longer on the device."""
        self.insert()
        assert self.prefix.flush(5)
        self.prefix.evict()

    def fetch(self) -> None:
        """It is on its way back."""
        self.store()
        self.fetched = self.prefix.fetch([*PROMPT, 7], namespace="red")
        assert self.fetched is not None

    def come_back(self) -> None:
        """All that comes back is attached."""
        assert self.prefix.flush(5) and self.fetched is not None and self.fetched.done
        self.attach([*PROMPT, 7])

    def end(self) -> None:
        super().end()
        self.host.close()


class OffloadWorld(PrefixWorld):
    """Two sequences with a prompt in common and rows of their own, which leave for host memory."""

    def part(self) -> None:
        self.run()
        self.fork()
        for live in self.known:
            live.sequence.grow(self.max_tokens)
            self.write(live, self.max_tokens - len(PROMPT))
        self.used_bytes = self.pool.used_bytes
        self.said = [[*live.tokens] for live in self.known]

    def offload(self) -> None:
        self.offloaded = Offloaded([[live.sequence.live for live in self.known]])
        self.offloaded.release()

    def leave(self) -> None:
        self.part()
        self.offload()
        self.cache.map_ahead(lookahead_tokens=9)
        assert not self.cache.limits.any(), "memory is mapped ahead for sequences that are not there"

    def come_back(self) -> None:
        self.offloaded.restore()
        assert self.pool.used_bytes == self.used_bytes, "what was shared came back as several"
        for live, said in zip(self.known, self.said, strict=True):
            live.tokens, live.stamps = [*said], self.texts.stamps("red", said)


@dataclass(frozen=True)
class Operation:
    """`act` is what may fail, after `prepare`.

    evicts: slots and prefixes may be evicted on the way. partial: what it did before the failure may stay done. absorbs: a
    fence that could not be made is made again, and the operation succeeds. layouts: where it can be done.
    """

    act: Callable[[World], object]
    prepare: Callable[[World], object] = lambda world: None
    world: type[World] = World
    layouts: tuple[str, ...] = tuple(sorted(LAYOUTS))
    pages: int = 40
    evicts: bool = False
    partial: bool = False
    absorbs: bool = False

    @contextlib.contextmanager
    def prepared(self, layout: str) -> Iterator[World]:
        """A world in which it can be done next."""
        with large_extents(4) if issubclass(self.world, PrefixWorld) else contextlib.nullcontext():
            world = self.world(layout, self.pages)
            self.prepare(world)
            yield world


def of_prefixes(act: Callable[[PrefixWorld], object], prepare: Callable[[PrefixWorld], object], **options) -> Operation:
    options = {"layouts": tuple(sorted(PREFIX_LAYOUTS)), "world": PrefixWorld, "pages": 80, **options}
    return Operation(act, prepare, **options)


def attaches(method: AttachMethod, common: int = len(PROMPT)) -> Callable[[PrefixWorld], object]:
    return lambda world: world.attach([*PROMPT[:common], 7, 7], method)


def ends(how: str) -> Callable[[PrefixWorld], object]:
    return lambda world: getattr(world.prefix, how)(world.known[-1].sequence, world.known[-1].tokens)


def opens(world: World) -> object:
    return world.cache.open(tenant="red")


def adopts(num_tokens: int | None) -> Callable[[World], object]:
    return lambda world: world.cache.adopt(world.kept, num_tokens, tenant="red")


def grows(num_tokens: int) -> Callable[[World], object]:
    return lambda world: world.sequence.grow(num_tokens)


OPERATIONS = {
    "construct": Operation(World.another_cache),
    "open": Operation(lambda world: world.open(0)),
    "open_blank": Operation(opens, lambda world: world.parked(0)),
    "open_blank_after_window": Operation(opens, lambda world: world.parked(0, long=True)),
    "open_evicting": Operation(opens, World.fill_slots, evicts=True),
    "open_batch_evicting": Operation(lambda world: world.cache.open_batch(2, tenant="red"), World.fill_slots, evicts=True),
    "grow_one_page": Operation(grows(6)),
    "grow_many_pages": Operation(grows(14)),
    "grow_into_foreign_memory": Operation(grows(14), World.foreign_memory_is_free),
    "grow_over_pending_reclaim": Operation(grows(14), World.reclaim_under_launch),
    "grow_evicting": Operation(grows(12), World.parked_foreign, pages=24, evicts=True),
    "map_ahead": Operation(lambda world: world.cache.map_ahead(lookahead_tokens=3), World.leave_pages_pending, partial=True),
    "truncate": Operation(lambda world: world.sequence.truncate(1)),
    "compact": Operation(World.compact, World.long, layouts=("one_group",), absorbs=True),
    "advance_start": Operation(World.advance_windows, World.long),
    "park": Operation(lambda world: world.sequence.park()),
    "adopt": Operation(adopts(None), World.parked),
    "adopt_part": Operation(adopts(2), World.parked),
    "adopt_none_after_window": Operation(adopts(0), lambda world: world.parked(long=True)),
    "evict": Operation(lambda world: world.cache.evict(world.kept), World.parked),
    "close": Operation(lambda world: world.sequence.close()),
    "resize_shrinking": Operation(
        lambda world: world.pool.resize(26 * PAGE_BYTES),
        lambda world: (world.parked_foreign(), world.foreign_memory_is_free()),
        evicts=True,
    ),
    "close_cache": Operation(lambda world: (world.cache.close(), world.pool.close()), World.parked_foreign, partial=True),
    "attach_adopt": of_prefixes(attaches(AttachMethod.ADOPT), PrefixWorld.park),
    "attach_adopt_part": of_prefixes(attaches(AttachMethod.ADOPT, 5), PrefixWorld.park, evicts=True),
    "attach_adopt_part_of_shared": of_prefixes(attaches(AttachMethod.ADOPT, 5), PrefixWorld.park_and_fork, evicts=True),
    "alias_of_running": of_prefixes(attaches(AttachMethod.ALIAS), PrefixWorld.run),
    "alias_of_parked": of_prefixes(attaches(AttachMethod.ALIAS, 8), PrefixWorld.park),
    "alias_of_released": of_prefixes(attaches(AttachMethod.ALIAS, 8), PrefixWorld.release, absorbs=True),
    "alias_evicting": of_prefixes(attaches(AttachMethod.ALIAS), PrefixWorld.fill_with_old_prefixes, evicts=True),
    "alias_of_less_than_a_page": of_prefixes(attaches(AttachMethod.ALIAS, 2), PrefixWorld.park),
    "park_known": of_prefixes(ends("park"), PrefixWorld.run),
    "park_aliased": of_prefixes(ends("park"), PrefixWorld.alias),
    "release": of_prefixes(ends("release"), PrefixWorld.run),
    "release_aliased": of_prefixes(ends("release"), PrefixWorld.alias),
    "fork": of_prefixes(PrefixWorld.fork, PrefixWorld.run),
    "fork_twice": of_prefixes(lambda world: world.fork(2), PrefixWorld.run),
    "fork_evicting": of_prefixes(PrefixWorld.fork, PrefixWorld.fill_with_old_prefixes, evicts=True),
    "truncate_aliased": of_prefixes(
        lambda world: world.known[-1].sequence.truncate(5), PrefixWorld.alias, layouts=("one_group",)
    ),
    "truncate_inserted": of_prefixes(lambda world: world.known[0].sequence.truncate(5), PrefixWorld.run),
    "truncate_forked": of_prefixes(
        lambda world: world.known[0].sequence.truncate(len(PROMPT) - 1),
        lambda world: (world.run(), world.fork()),
        layouts=("even", "one_group", "two_groups"),
    ),
    "compact_aliased": of_prefixes(World.compact, PrefixWorld.alias, layouts=("one_group",), absorbs=True),
    "compact_inserted": of_prefixes(World.compact, PrefixWorld.run, layouts=("one_group",), absorbs=True),
    "adopt_unasked": of_prefixes(
        lambda world: world.know(world.cache.adopt(world.cache.parked()[0], 5, tenant="red"), PROMPT[:5]),
        PrefixWorld.park_and_fork,
        evicts=True,
    ),
    "store": of_prefixes(lambda world: world.prefix.poll(), TierWorld.insert, world=TierWorld, partial=True, absorbs=True),
    "fetch": of_prefixes(
        lambda world: world.prefix.fetch([*PROMPT, 7], namespace="red"), TierWorld.store, world=TierWorld, evicts=True
    ),
    "offload": of_prefixes(OffloadWorld.offload, OffloadWorld.part, world=OffloadWorld, absorbs=True),
    "come_back": of_prefixes(OffloadWorld.come_back, OffloadWorld.leave, world=OffloadWorld),
    "load": of_prefixes(TierWorld.come_back, TierWorld.fetch, world=TierWorld, partial=True, absorbs=True),
}


def attempt(operation: Operation, layout: str, failing: set[int]) -> bool:
    """Do it with these of its driver calls failing: did it fail? In any case the world is as it should be, and goes on."""
    with operation.prepared(layout) as world:
        before = world.state(cached=not operation.evicts)
        world.driver.fail_at = {world.driver.num_calls + number for number in failing}
        failed = False
        try:
            operation.act(world)
        except DriverError as error:
            assert error.code == "FAKE_INJECTED"
            failed = True
            world.driver.fail_at = set()
            world.check(strays=operation.partial)
            if not operation.partial:
                assert world.state(cached=not operation.evicts) == before
            world.verify()
            operation.act(world)
        world.driver.fail_at = set()
        world.check(strays=False)
        world.verify()
        for live in world.running():
            if live.sequence.length < live.sequence.limit:
                world.write(live, 1)
        world.check(strays=False)
        world.verify()
        world.end()
    return failed


def calls_of(operation: Operation, layout: str) -> tuple[int, set[str]]:
    """How many driver calls that can fail an operation makes, and which."""
    with operation.prepared(layout) as world:
        num_calls, calls = world.driver.num_calls, world.driver.calls.copy()
        operation.act(world)
        made = world.driver.num_calls - num_calls, set(world.driver.calls - calls)
        world.end()
    return made


CASES = [(name, layout) for name, operation in OPERATIONS.items() for layout in operation.layouts]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_call_of_an_operation_can_fail_and_nothing_changes(name, layout):
    operation = OPERATIONS[name]
    for number in range(calls_of(operation, layout)[0]):
        failed = attempt(operation, layout, {number})
        assert failed or operation.absorbs, f"{name} hid the failure of its call {number}"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if layout == OPERATIONS[name].layouts[-1] else pytest.mark.nightly)
        for name, layout in CASES
    ],
)
def test_a_call_of_the_undoing_can_fail_too_and_nothing_changes(name, layout):
    """Or a call that cannot be undone, and is made again, fails twice."""
    operation = OPERATIONS[name]
    for first in range(calls_of(operation, layout)[0]):
        for later in (1, 2, 3):
            attempt(operation, layout, {first, first + later})


@pytest.mark.parametrize(("world", "others"), [(World, {"reserve", "release"}), (PrefixWorld, set())])
def test_operations_cover_every_driver_call(world, others):
    """Each kind of call is made, and so failed, by some operation above."""
    made = [calls_of(each, each.layouts[-1])[1] for each in OPERATIONS.values() if each.world is world]
    assert set().union(*made) == {"create", "map", "set_access", "unmap", "zero", "write", "fence"} | others
