"""The law of the vLLM adapter, over an engine that stands in for it: what a request reads is what its tokens give.

The engine shares and reuses blocks, preempts, aborts and forgets, as vLLM does; copies go on whenever time passes. No block is
read before its load has ended, none is stored once it is reused, and in the end nothing is left. Layers may be in groups, each
with blocks of its own; those with a window give the blocks before it back. Tokens may stand for images, which they do not tell.
"""

import hashlib
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.laws.faulty_tier import FAULTS, FaultyTier
from tests.laws.machine import cases
from vmmkv.adapters.vllm.blocks import BlockMemory, BlockMover
from vmmkv.adapters.vllm.namespaces import Features
from vmmkv.adapters.vllm.schedule import Schedule, of_group
from vmmkv.adapters.vllm.worth import Worth
from vmmkv.tiers import HostTier, Store

BLOCK_TOKENS, PER_RECORD, LAYERS, BLOCK_BYTES = 2, 2, 2, 2048
RECORD_TOKENS, RECORD_BYTES = BLOCK_TOKENS * PER_RECORD, BLOCK_BYTES * PER_RECORD


WINDOWS = [(None,), (None,), (5,), (None, 4), (None, 3, 9)]
"""Windows of the groups of layers."""

NAMES = ["0" * 64, "1" * 64]
"""Names of images."""

NULL = 0
"""Block that stands for one that was taken back."""


Content = tuple[tuple[int, ...], tuple[tuple[int, int, str], ...]]
"""First tokens of a request, and offset, length and name of the images that begin within them."""


def stamp(group: int, content: Content) -> int:
    """The stamp of a group's block: a hash of all tokens up to its end, and of the images that they stand for."""
    return int.from_bytes(hashlib.blake2b(repr((group, content)).encode(), digest_size=7).digest(), "little")


@dataclass(eq=False)
class Request:
    name: str
    tokens: list[int]
    blocks: list[list[int]]
    """Blocks of each group."""
    num_computed: int = 0
    state: str = "waiting"
    images: list[tuple[int, int, str]] = field(default_factory=list)
    """Offset, length and name of each."""

    def content(self, end: int) -> Content:
        return tuple(self.tokens[:end]), tuple(each for each in self.images if each[0] < end)

    @property
    def features(self) -> Features:
        """The images, as vLLM has them."""
        features = [
            SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))
            for offset, length, name in self.images
        ]
        return Features(features)


class Engine(RuleBasedStateMachine):
    """Stands in for vLLM: its scheduler, its block pool with a prefix cache, and its worker."""

    @initialize(
        num_blocks=st.integers(17, 40),
        records=st.integers(1, 20),
        has_cache=st.booleans(),
        seed=st.integers(0, 9),
        windows=st.sampled_from(WINDOWS),
    )
    def make(self, num_blocks: int, records: int, has_cache: bool, seed: int, windows: tuple[int | None, ...]) -> None:
        self.windows = windows
        self.most_tokens = (num_blocks - 1) * BLOCK_TOKENS  # of a request: as many as fit alone
        num_blocks, records = num_blocks * len(windows), records * len(windows)
        self.memory = torch.zeros(LAYERS, num_blocks, BLOCK_BYTES // LAYERS // 8, dtype=torch.int64)
        host = HostTier(records * RECORD_BYTES, record_bytes=RECORD_BYTES)
        self.tier = FaultyTier(host, seed, FAULTS if seed % 2 else ("slow",))
        self.store = Store([self.tier])
        self.schedule = Schedule(
            "model",
            block_tokens=BLOCK_TOKENS,
            record_tokens=RECORD_TOKENS,
            lookup=self.lookup,
            worth=Worth(record_tokens=RECORD_TOKENS, record_bytes=RECORD_BYTES),
            may_wait=has_cache,
            windows=windows,
        )
        self.mover = BlockMover(self.store, BlockMemory([*self.memory], num_blocks))
        self.has_cache = has_cache
        self.free = [block for block in range(num_blocks) if block != NULL]
        self.cached: dict[tuple[int, Content], int] = {}
        """Blocks by group and content up to their end, also those in `free`, which are evicted when they are taken."""
        self.uses = [0] * num_blocks
        self.requests: list[Request] = []
        self.names = map(str, itertools.count())
        self.num_stored = 0

    def lookup(self, keys):
        count = len(self.windows)
        found = self.store.lookup([of_group(key, group) for key in keys for group in range(count)])
        return found and ["host" if all(found[at : at + count]) else "" for at in range(0, len(found), count)]

    # vLLM's block pool

    def take(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        self.cached = {tokens: block for tokens, block in self.cached.items() if block not in taken}
        for block in taken:
            self.uses[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        for block in blocks:
            if block != NULL:
                if block in self.free:
                    self.free.remove(block)
                self.uses[block] += 1

    def unshare(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            if block != NULL:
                self.uses[block] -= 1
                if not self.uses[block]:
                    self.free.append(block)

    def give_back(self, request: Request) -> None:
        for blocks in request.blocks:
            self.unshare(blocks)
        request.blocks, request.num_computed = [[] for _ in self.windows], 0

    def first_seen(self, group: int, num_tokens: int) -> int:
        """The first block that the token behind so many sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, num_tokens - window + 1) // BLOCK_TOKENS

    def take_back(self, request: Request) -> None:
        for group, blocks in enumerate(request.blocks):
            count = min(self.first_seen(group, request.num_computed), len(blocks))
            self.unshare(blocks[:count])
            blocks[:count] = [NULL] * count

    def local_hit(self, request: Request) -> list[list[int]]:
        for count in range((len(request.tokens) - 1) // BLOCK_TOKENS if self.has_cache else 0, 0, -1):
            keys = [request.content((at + 1) * BLOCK_TOKENS) for at in range(count)]
            hit = [
                [
                    NULL if at < self.first_seen(group, count * BLOCK_TOKENS) else self.cached.get((group, keys[at]))
                    for at in range(count)
                ]
                for group in range(len(self.windows))
            ]
            if not any(None in blocks for blocks in hit):
                return hit
        return [[] for _ in self.windows]

    def remember(self, request: Request) -> None:
        for group, blocks in enumerate(request.blocks):
            for at in range(request.num_computed // BLOCK_TOKENS):
                if blocks[at] != NULL:
                    self.cached.setdefault((group, request.content((at + 1) * BLOCK_TOKENS)), blocks[at])

    # its memory

    def compute(self, request: Request, end: int) -> None:
        for position in range(request.num_computed, end):
            for group, blocks in enumerate(request.blocks):
                assert blocks[position // BLOCK_TOKENS] != NULL
                self.memory[:, blocks[position // BLOCK_TOKENS]] = stamp(group, request.content(position + 1))
        request.num_computed = end

    def verify(self, request: Request, end: int) -> None:
        for group, blocks in enumerate(request.blocks):
            for at in range(self.first_seen(group, end), end // BLOCK_TOKENS):
                wanted = stamp(group, request.content((at + 1) * BLOCK_TOKENS))
                assert (self.memory[:, blocks[at]] == wanted).all(), f"block {at} of group {group} of {request.name}"

    # what happens

    @rule(
        head=st.integers(0, 1),
        length=st.sampled_from([3, 8, 13, 18]),
        owns=st.lists(st.integers(0, 3), min_size=1, max_size=3),
        images=st.lists(st.tuples(st.integers(0, 15), st.sampled_from([1, 4, 7]), st.sampled_from(NAMES)), max_size=2),
    )
    def come(self, head: int, length: int, owns: list[int], images: list[tuple[int, int, str]]) -> None:
        tokens = [[head] * length + [own] * 3 for own in owns]
        self.requests += [Request(next(self.names), each, [[] for _ in self.windows], images=sorted(images)) for each in tokens]

    @rule(budget=st.integers(1, 12), grows=st.booleans(), times=st.integers(1, 3))
    def steps(self, budget: int, grows: bool, times: int) -> None:
        for _ in range(times):
            self.step(budget, grows)

    def step(self, budget: int, grows: bool) -> None:
        self.no_unfinished_load_is_read()
        scheduled: list[tuple[Request, list[list[int]], int, bool]] = []
        for request in (running := [each for each in self.requests if each.state == "running"]):
            if request.state != "running":
                continue
            if grows and request.num_computed == len(request.tokens) < self.most_tokens:
                request.tokens.append(7)
            self.take_back(request)
            num_new = min(budget, len(request.tokens) - request.num_computed)
            needed = -(-(request.num_computed + num_new) // BLOCK_TOKENS) - len(request.blocks[0])
            new = self.take(needed * len(self.windows))
            while new is None and running[-1] is not request:
                self.preempt(running.pop())
                new = self.take(needed * len(self.windows))
            if new is None or num_new == 0:
                if new is None:
                    self.preempt(request)
                continue
            of_groups = [new[at * needed : (at + 1) * needed] for at in range(len(self.windows))]
            for blocks, more in zip(request.blocks, of_groups, strict=True):
                blocks += more
            scheduled.append((request, of_groups if needed else (), num_new, False))
        waiting = [each for each in self.requests if each.state == "waiting"]
        waiting.sort(key=lambda each: not each.num_computed)  # those that have loaded come first, as in vLLM
        for request in waiting:
            hit = self.local_hit(request)
            if request.num_computed == 0:
                on_device = len(hit[0]) * BLOCK_TOKENS
                found = self.schedule.matched(request.name, request.tokens, "salt", on_device, beside=request.features)
                if found is None:
                    continue
            else:
                hit, found = request.blocks, 0  # it has loaded
            start = request.num_computed or len(hit[0]) * BLOCK_TOKENS + found
            num_new = 0 if found else min(budget, len(request.tokens) - start)
            count = max(len(hit[0]), -(-(start + num_new) // BLOCK_TOKENS))
            seen = [self.first_seen(group, start) for group in range(len(self.windows))]
            kept = [
                [NULL if at < first else block for at, block in enumerate(blocks)]
                for first, blocks in zip(seen, hit, strict=True)
            ]
            if hit is not request.blocks:
                for blocks in kept:
                    self.share(blocks)
            new = self.take(sum(count - max(len(blocks), first) for first, blocks in zip(seen, kept, strict=True)))
            if new is None:
                for blocks in kept if hit is not request.blocks else ():
                    self.unshare(blocks)
                if not any(each.state in ("running", "loading") for each in self.requests):  # else all would wait for ever
                    self.give_back(next(each for each in reversed(self.requests) if any(each.blocks)))
                break
            if hit is request.blocks:
                self.take_back(request)
            request.blocks = [
                [*blocks, *([NULL] * (first - len(blocks))), *(new.pop() for _ in range(count - max(len(blocks), first)))]
                for first, blocks in zip(seen, kept, strict=True)
            ]
            request.num_computed = start
            self.schedule.allocated(request.name, request.blocks, found)
            if found:
                request.state = "loading"
                continue
            request.state = "running"
            scheduled.append((request, request.blocks, num_new, True))
        for request, new, num_new, is_new in scheduled:
            self.schedule.scheduled(request.name, [[*each] for each in new], request.num_computed, num_new, is_new=is_new)
        plan = self.schedule.take_plan()
        self.mover.before_step(plan)
        for request, _, num_new, _ in scheduled:
            self.verify(request, request.num_computed)
            self.compute(request, request.num_computed + num_new)
            self.remember(request)
        self.mover.begin(plan)
        self.mover.after_step(plan)
        self.num_stored += len(plan.stores)
        if chance := self.num_stored % 3:
            self.mover.go_on(computes=chance > 1)
        self.what_has_come()

    def what_has_come(self) -> None:
        ended, failed = self.mover.ended_loads()
        self.schedule.failed(failed)
        for request in [each for each in self.requests if each.name in ended]:
            self.schedule.loaded(request.name)
            if request.state == "aborted":
                self.give_back(request)
                self.requests.remove(request)
                continue
            if bad := failed.get(request.name):
                is_one_table = self.windows == (None,)
                first_bad = (
                    next(number for number, block in enumerate(request.blocks[0]) if block in bad) if is_one_table else 0
                )
                request.num_computed = first_bad * BLOCK_TOKENS
            self.verify(request, request.num_computed)
            self.remember(request)
            request.state = "waiting"
            if not request.num_computed:
                self.give_back(request)

    @rule(times=st.integers(1, 20))
    def time_passes(self, times: int) -> None:
        for _ in range(times):
            self.tier.advance()
            self.store.poll(20)

    @rule(pick=st.integers(0, 99))
    def is_preempted(self, pick: int) -> None:
        if running := [each for each in self.requests if each.state == "running"]:
            self.preempt(running[pick % len(running)])

    def preempt(self, request: Request) -> None:
        self.schedule.preempted(request.name)
        self.give_back(request)
        request.state = "waiting"

    @rule(pick=st.integers(0, 99))
    def ends(self, pick: int) -> None:
        if self.requests:
            request = self.requests[pick % len(self.requests)]
            if request.state == "aborted":
                return
            self.schedule.ended(request.name)
            if request.state == "loading":
                request.state = "aborted"  # its blocks are being written
            else:
                self.give_back(request)
                self.requests.remove(request)

    @rule()
    def forgets(self) -> None:
        self.cached = {tokens: block for tokens, block in self.cached.items() if block not in self.free}

    @invariant()
    def no_unfinished_load_is_read(self) -> None:
        for request in getattr(self, "requests", ()):
            if request.state == "running":
                self.verify(request, request.num_computed)

    def teardown(self) -> None:
        if not hasattr(self, "requests"):
            return
        self.tier.faults.clear()
        for _ in range(60 + sum(len(each.tokens) for each in self.requests)):
            self.tier.hurry()
            self.step(12, False)
            self.time_passes(10)
            for request in [each for each in self.requests if each.num_computed >= len(each.tokens)]:
                if request.state == "running":
                    self.ends(self.requests.index(request))
            if not self.requests:
                break
        assert not [(each.state, each.num_computed, len(each.tokens)) for each in self.requests], "each ends in the end"
        self.tier.hurry()
        assert self.store.flush(60)
        assert not self.tier.lent
        self.store.close()
        self.tier.close()


TestEngine, TestEngineAtLength = cases(Engine, 60, 1000)
