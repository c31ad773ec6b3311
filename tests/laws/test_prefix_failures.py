"""Law 5 for shared prefixes: every driver call of each way in, on and out fails once, and all is as before.

What was evicted to make room stays evicted, and what an adoption would have written over may be forgotten: both are cache.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.laws.model import append, attend, check_limits, num_null_pages
from tests.laws.prefix_model import LAYOUTS, Talk, Texts, large_extents, talk
from tests.laws.simulated_driver import SimulatedDriver
from vmmkv import DriverError, KVCache, Pool, Sequence
from vmmkv.prefix import AttachMethod, PrefixCache
from vmmkv.units import PAGE_BYTES

SLOTS = 4
MAX_TOKENS = 20
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


class World:
    """A prefix cache, and sequences whose rows are known."""

    def __init__(self, layout: str) -> None:
        self.closing = contextlib.ExitStack()
        self.closing.enter_context(large_extents(4))
        self.driver = SimulatedDriver(haste=0)
        self.pool = Pool("cpu", 80 * PAGE_BYTES, driver=self.driver)
        self.cache = KVCache(LAYOUTS[layout], self.pool, slots=SLOTS, max_tokens=MAX_TOKENS)
        self.prefix = PrefixCache(self.cache)
        self.texts = Texts()
        self.talks: list[Talk] = []

    def attach(self, prompt: list[int], method: AttachMethod | None = None) -> Talk:
        attached = self.prefix.attach(prompt, namespace="red", method=method)
        assert method in (None, attached.method), f"attached by {attached.method} and not by {method}"
        return self.know(attached.sequence, prompt[: attached.num_tokens])

    def begin(self, prompt: list[int], method: AttachMethod | None = None, *, by_tokens: bool = False) -> Talk:
        """Attach a prompt, compute the rest of it and insert all of it."""
        new = self.attach(prompt, method)
        self.say(new, prompt[new.sequence.length :], by_tokens=by_tokens)
        self.driver.finish_all()  # what is inserted was read back
        self.prefix.insert(new.sequence, prompt)
        return new

    def know(self, sequence: Sequence, tokens: list[int]) -> Talk:
        self.talks.append(talk(self.cache, self.texts, sequence, tokens, inserted=None))
        return self.talks[-1]

    def say(self, each: Talk, tokens: list[int], *, by_tokens: bool = False) -> None:
        sequence = each.sequence
        for length in range(
            sequence.length + 1 if by_tokens else sequence.length + len(tokens), sequence.length + len(tokens) + 1
        ):
            sequence.grow(length)
        each.tokens += tokens
        each.rows.stamps = self.texts.stamps("red", each.tokens)
        append(self.driver, each, range(sequence.length, len(each.tokens)))
        sequence.advance(len(tokens))

    def running(self) -> list[Talk]:
        return [each for each in self.talks if not each.sequence.closed]

    def verify(self) -> None:
        for each in self.running():
            del each.tokens[each.sequence.length :], each.rows.stamps[each.sequence.length :]
            each.rows.starts = [each.sequence.start(group) for group in range(len(each.rows.starts))]
            attend(self.driver, each)
        self.driver.finish_all()
        check_limits(self.cache)

    def check(self) -> None:
        self.cache.check()
        stats = self.cache.stats()
        pages = (stats.mapped_bytes + stats.pending_reclaim_bytes) // PAGE_BYTES
        assert len(self.driver._pages) - num_null_pages([self.cache]) == pages
        assert self.driver.used_bytes - PAGE_BYTES == self.pool.created_bytes

    def state(self, *, cached: bool) -> list[object]:
        """All that a failure leaves alone; with `cached` what is kept for others too."""
        stats, prefix = self.cache.stats(), self.prefix.stats()
        return [
            [(each.sequence.length, each.sequence.limit, each.rows.starts) for each in self.running()],
            self.cache.limits.tolist(),
            (stats.num_sequences, stats.num_tokens, stats.mapped_bytes - stats.parked_bytes, stats.adopted_slots),
            (prefix.attached, prefix.hit_tokens, prefix.missed_tokens),
            (stats.num_parked, prefix.num_tokens, prefix.held_bytes, self.prefix.match([*PROMPT, 0], namespace="red"))
            if cached
            else None,
        ]

    def end(self) -> None:
        self.cache.close()
        self.pool.close()
        assert (self.driver.live_mappings, self.driver.live_handles, self.driver.used_bytes) == (0, 0, 0)
        assert self.driver.broken is None
        self.closing.close()


@dataclass(frozen=True)
class Operation:
    """`act` is what may fail, after `prepare`. `cached`: even the cache is as before a failure. `absorbs`: a fence that could
    not be made is made again, and the operation succeeds. `layouts`: where it can be done at all."""

    act: Callable[[World], object]
    prepare: Callable[[World], object]
    cached: bool = True
    absorbs: bool = False
    layouts: tuple[str, ...] = tuple(sorted(LAYOUTS))


def attaches(method: AttachMethod, common: int = len(PROMPT)) -> Callable[[World], object]:
    return lambda world: world.attach([*PROMPT[:common], 7, 7], method)


def running(world: World) -> None:
    world.begin(PROMPT)


def parked(world: World) -> None:
    world.prefix.park(world.begin(PROMPT).sequence, PROMPT)


def released(world: World) -> None:
    world.prefix.release(world.begin(PROMPT, by_tokens=True).sequence)


def parked_and_forked(world: World) -> None:
    """The pages of a parked slot are a running fork's too."""
    first = world.begin(PROMPT)
    world.know(world.cache.fork(first.sequence)[0], list(PROMPT))
    world.prefix.park(first.sequence, PROMPT)


def full_of_old_prefixes(world: World) -> None:
    """There is no page that is not kept for some prompt, and no slot but parked ones; the newest is the one that is wanted."""
    for number in (20, 21):
        prompt = [number] * 9
        world.prefix.park(world.begin(prompt).sequence, prompt)
    running(world)
    world.pool.resize(max(world.pool.held_bytes, PAGE_BYTES))


def aliased(world: World) -> None:
    """The last sequence has the prompt's pages by alias, and rows of its own behind."""
    running(world)
    world.begin([*PROMPT, 7, 7], AttachMethod.ALIAS)


def fork(world: World, count: int = 1) -> None:
    parent = world.talks[-1]
    for each in world.cache.fork(parent.sequence, count):
        world.know(each, list(parent.tokens))


def ends(how: str) -> Callable[[World], object]:
    def act(world: World) -> None:
        last = world.talks[-1]
        getattr(world.prefix, how)(last.sequence, last.tokens)

    return act


OPERATIONS = {
    "adopt": Operation(attaches(AttachMethod.ADOPT), parked),
    "adopt_part": Operation(attaches(AttachMethod.ADOPT, 5), parked, cached=False),
    "adopt_part_of_shared": Operation(attaches(AttachMethod.ADOPT, 5), parked_and_forked, cached=False),
    "alias_of_running": Operation(attaches(AttachMethod.ALIAS), running),
    "alias_of_parked": Operation(attaches(AttachMethod.ALIAS, 8), parked),
    "alias_of_released": Operation(attaches(AttachMethod.ALIAS, 8), released, absorbs=True),
    "alias_evicting": Operation(attaches(AttachMethod.ALIAS), full_of_old_prefixes, cached=False),
    "alias_of_less_than_a_page": Operation(attaches(AttachMethod.ALIAS, 2), parked),
    "park": Operation(ends("park"), running),
    "park_aliased": Operation(ends("park"), aliased),
    "release": Operation(ends("release"), running),
    "release_aliased": Operation(ends("release"), aliased),
    "fork": Operation(fork, running),
    "fork_twice": Operation(lambda world: fork(world, 2), running),
    "fork_evicting": Operation(fork, full_of_old_prefixes, cached=False),
    "truncate_aliased": Operation(lambda world: world.talks[-1].sequence.truncate(5), aliased, layouts=("one_group",)),
    "truncate_inserted": Operation(lambda world: world.talks[0].sequence.truncate(5), running),
    "truncate_forked": Operation(
        lambda world: world.talks[0].sequence.truncate(len(PROMPT) - 1),
        lambda world: (running(world), fork(world)),
        layouts=("even", "one_group", "two_groups"),
    ),
    "adopt_unasked": Operation(
        lambda world: world.know(world.cache.adopt(world.cache.parked()[0], 5, tenant="red"), PROMPT[:5]),
        parked_and_forked,
        cached=False,
    ),
}


def attempt(operation: Operation, layout: str, failing: set[int]) -> bool:
    """Do it with these of its driver calls failing: did it fail? In any case the world is as it should be, and goes on."""
    world = World(layout)
    with world.closing:
        operation.prepare(world)
        before = world.state(cached=operation.cached)
        world.driver.fail_at = {world.driver.num_calls + number for number in failing}
        failed = False
        try:
            operation.act(world)
        except DriverError as error:
            assert error.code == "FAKE_INJECTED"
            failed = True
            world.driver.fail_at = set()
            world.check()
            assert world.state(cached=operation.cached) == before
            world.verify()
            operation.act(world)
        world.driver.fail_at = set()
        world.check()
        world.verify()
        for each in world.running():
            if each.sequence.length < each.sequence.limit:
                world.say(each, [7])
        world.check()
        world.verify()
        world.end()
    return failed


def count_calls(operation: Operation, layout: str) -> int:
    world = World(layout)
    with world.closing:
        operation.prepare(world)
        before = world.driver.num_calls
        operation.act(world)
        num_calls = world.driver.num_calls - before
        world.end()
    assert num_calls, "nothing can fail"
    return num_calls


CASES = [(name, layout) for name, operation in OPERATIONS.items() for layout in operation.layouts]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_call_can_fail_and_nothing_changes(name, layout):
    operation = OPERATIONS[name]
    for number in range(count_calls(operation, layout)):
        failed = attempt(operation, layout, {number})
        assert failed or operation.absorbs, f"{name} hid the failure of its call {number}"


def test_operations_make_every_kind_of_call():
    made = set()
    for operation in OPERATIONS.values():
        world = World(operation.layouts[0])
        with world.closing:
            operation.prepare(world)
            before = world.driver.calls.copy()
            operation.act(world)
            made |= (world.driver.calls - before).keys()
            world.end()
    assert made == {"create", "map", "set_access", "unmap", "zero", "write", "fence"}
