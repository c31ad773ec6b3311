"""The law of the vLLM adapter, over an engine that stands in for it: what a request reads is what its tokens give.

The engine shares and reuses blocks, preempts, aborts and forgets, as vLLM does; copies go on whenever time passes. No block is
read before its load has ended, none is stored once it is reused, and in the end nothing is left.
"""

import hashlib
import itertools
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.laws.faulty_tier import FAULTS, FaultyTier
from tests.laws.machine import cases
from vmmkv.adapters.vllm.blocks import BlockMemory, BlockMover
from vmmkv.adapters.vllm.schedule import Schedule
from vmmkv.adapters.vllm.worth import Worth
from vmmkv.tiers import HostTier, Store

BLOCK_TOKENS, PER_RECORD, LAYERS, BLOCK_BYTES = 2, 2, 2, 2048
RECORD_TOKENS, RECORD_BYTES = BLOCK_TOKENS * PER_RECORD, BLOCK_BYTES * PER_RECORD


def stamp(tokens: list[int]) -> int:
    """The stamp of a block: a hash of all tokens up to its end."""
    return int.from_bytes(hashlib.blake2b(repr(tokens).encode(), digest_size=7).digest(), "little")


@dataclass(eq=False)
class Request:
    name: str
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    state: str = "waiting"
    was_scheduled: bool = False


class Engine(RuleBasedStateMachine):
    """Stands in for vLLM: its scheduler, its block pool with a prefix cache, and its worker."""

    @initialize(num_blocks=st.integers(16, 40), records=st.integers(1, 20), has_cache=st.booleans(), seed=st.integers(0, 9))
    def make(self, num_blocks: int, records: int, has_cache: bool, seed: int) -> None:
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
        )
        self.mover = BlockMover(self.store, BlockMemory([*self.memory], num_blocks))
        self.has_cache = has_cache
        self.free = list(range(num_blocks))
        self.cached: dict[tuple[int, ...], int] = {}
        """Blocks by the tokens up to their end, also those in `free`, which are evicted when they are taken."""
        self.uses = [0] * num_blocks
        self.requests: list[Request] = []
        self.names = map(str, itertools.count())
        self.failed = set[int]()

    def lookup(self, keys):
        found = self.store.lookup(keys)
        return found and ["host" if each else "" for each in found]

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
            if block in self.free:
                self.free.remove(block)
            self.uses[block] += 1

    def give_back(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.uses[block] -= 1
            if not self.uses[block]:
                self.free.append(block)
        request.blocks, request.num_computed = [], 0

    def local_hit(self, request: Request) -> list[int]:
        blocks = []
        for end in range(BLOCK_TOKENS, len(request.tokens), BLOCK_TOKENS):
            if not self.has_cache or (block := self.cached.get(tuple(request.tokens[:end]))) is None:
                break
            blocks.append(block)
        return blocks

    def remember(self, request: Request) -> None:
        for number in range(request.num_computed // BLOCK_TOKENS):
            self.cached.setdefault(tuple(request.tokens[: (number + 1) * BLOCK_TOKENS]), request.blocks[number])

    # its memory

    def compute(self, request: Request, end: int) -> None:
        for position in range(request.num_computed, end):
            self.memory[:, request.blocks[position // BLOCK_TOKENS]] = stamp(request.tokens[: position + 1])
        request.num_computed = end

    def verify(self, request: Request, end: int) -> None:
        for number in range(end // BLOCK_TOKENS):
            wanted = stamp(request.tokens[: (number + 1) * BLOCK_TOKENS])
            assert (self.memory[:, request.blocks[number]] == wanted).all(), f"block {number} of {request.name}"

    # what happens

    @rule(
        head=st.integers(0, 1), length=st.sampled_from([3, 8, 13, 18]), owns=st.lists(st.integers(0, 3), min_size=1, max_size=3)
    )
    def come(self, head: int, length: int, owns: list[int]) -> None:
        self.requests += [Request(next(self.names), [head] * length + [own] * 3) for own in owns]

    @rule(budget=st.integers(1, 12), grows=st.booleans(), times=st.integers(1, 3))
    def steps(self, budget: int, grows: bool, times: int) -> None:
        for _ in range(times):
            self.step(budget, grows)

    def step(self, budget: int, grows: bool) -> None:
        self.no_unfinished_load_is_read()
        scheduled: list[tuple[Request, list[int], int, bool]] = []
        for request in (running := [each for each in self.requests if each.state == "running"]):
            if request.state != "running":
                continue
            if grows and request.num_computed == len(request.tokens):
                request.tokens.append(7)
            num_new = min(budget, len(request.tokens) - request.num_computed)
            needed = -(-(request.num_computed + num_new) // BLOCK_TOKENS) - len(request.blocks)
            new = self.take(needed)
            while new is None and running[-1] is not request:
                self.preempt(running.pop())
                new = self.take(needed)
            if new is None or num_new == 0:
                if new is None:
                    self.preempt(request)
                continue
            request.blocks += new
            scheduled.append((request, new, num_new, False))
        for request in [each for each in self.requests if each.state == "waiting"]:
            hit = self.local_hit(request)
            if request.num_computed == 0:
                found = self.schedule.matched(request.name, request.tokens, "salt", len(hit) * BLOCK_TOKENS)
                if found is None:
                    continue
            else:
                hit, found = [], 0  # it has loaded
            start = max(request.num_computed, len(hit) * BLOCK_TOKENS + found)
            num_new = 0 if found else min(budget, len(request.tokens) - start)
            needed = -(-(start + num_new) // BLOCK_TOKENS) - len(hit) - len(request.blocks)
            self.share(hit)
            new = self.take(max(0, needed))
            if new is None:
                for block in hit:
                    self.uses[block] -= 1
                    self.free += [block] if not self.uses[block] else []
                if not any(each.state in ("running", "loading") for each in self.requests):  # else all would wait for ever
                    self.give_back(next(each for each in reversed(self.requests) if each.blocks))
                break
            request.blocks += hit + new
            request.num_computed = start
            self.schedule.allocated(request.name, request.blocks, found)
            if found:
                request.state = "loading"
                continue
            request.state = "running"
            scheduled.append((request, request.blocks, num_new, True))
        for request, new, num_new, is_new in scheduled:
            self.schedule.scheduled(request.name, list(new), request.num_computed, num_new, is_new=is_new)
        plan = self.schedule.take_plan()
        self.mover.before_step(plan)
        for request, _, num_new, _ in scheduled:
            self.verify(request, request.num_computed)
            self.compute(request, request.num_computed + num_new)
            self.remember(request)
        self.mover.begin(plan)
        self.mover.after_step(plan)
        if chance := self.mover.counts["stored"] % 3:
            self.mover.go_on(computes=chance > 1)
        self.what_has_come()

    def what_has_come(self) -> None:
        ended, bad = self.mover.ended_loads()
        self.schedule.failed(bad)
        for request in [each for each in self.requests if each.name in ended]:
            self.schedule.loaded(request.name)
            if request.state == "aborted":
                self.give_back(request)
                self.requests.remove(request)
                continue
            first_bad = [number for number, block in enumerate(request.blocks) if block in bad][:1]
            if first_bad:
                request.num_computed = first_bad[0] * BLOCK_TOKENS
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
