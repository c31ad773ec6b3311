"""KeptBlocks under random use: what an engine finds in the holder has the bytes of its hash, however the one before has ended.

An engine that is killed closes its connection and does nothing else; what it had launched and had not ended is lost.
"""

import contextlib
import ctypes
import tempfile
import threading
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.laws.machine import cases
from vmmkv.adapters.vllm.elastic.kept import KeptBlocks, Shape
from vmmkv.adapters.vllm.elastic.memory import ElasticBlocks, Run, aligned
from vmmkv.driver import open_driver
from vmmkv.driver.host import HostDriver
from vmmkv.holder import HolderClient
from vmmkv.holder.process import Holder
from vmmkv.units import MIB, PAGE_BYTES

NUM_BLOCKS = 14
SHAPES = [[Run(0, PAGE_BYTES)], aligned(NUM_BLOCKS, [PAGE_BYTES // 4, PAGE_BYTES // 2])]
"""A block in one piece, and in two runs, of which four blocks are a group."""
some = st.integers(1, NUM_BLOCKS - 1)


class LateFence:
    """Passes when the walk says so."""

    def __init__(self):
        self.passed = False

    def done(self):
        return self.passed

    def wait(self):
        self.passed = True

    def order(self, streams=()):
        self.passed = True


class LateDriver(HostDriver):
    """Writes of steps end long after they were launched."""

    def __init__(self):
        super().__init__()
        self.fences = []

    def fence(self, streams=()):
        self.fences.append(LateFence())
        return self.fences[-1]


class Engine:
    """An engine as vLLM's pool behaves: blocks are in use, free, and free with a prefix."""

    def __init__(self, path, runs, identity, budget_groups):
        self.runs = runs
        self.driver = LateDriver()
        self.kept = KeptBlocks(self.driver, HolderClient(path, self.driver.device), identity)
        budget_bytes = budget_groups * sum(Shape.of(runs, NUM_BLOCKS).part_bytes)
        self.kept.find(Shape.of(runs, NUM_BLOCKS), budget_bytes)
        self.memory = ElasticBlocks(self.driver, runs, NUM_BLOCKS, budget_bytes=budget_bytes, source=self.kept)
        _, self.found = self.kept.restore(self.memory)
        self.hashes = {each.block: each.hash for each in self.found}
        self.pending = []
        """Blocks that launched steps write, and their bytes."""

    def places(self, block):
        base = self.memory.tensor().data_ptr()
        return [(base + run.offset_bytes + block * run.stride_bytes, run.stride_bytes) for run in self.runs]

    def write(self, block, hash_):
        for address, size in self.places(block):
            ctypes.memset(address, hash_[0], size)

    def holds(self, block, hash_):
        return all(ctypes.string_at(address, size) == hash_[:1] * size for address, size in self.places(block))


class KeptMachine(RuleBasedStateMachine):
    @initialize(shape=st.sampled_from(SHAPES))
    def begin(self, shape):
        self.folder = tempfile.TemporaryDirectory()
        self.path, self.runs = Path(self.folder.name) / "holder", shape
        self.holder = Holder(self.path, 64 * MIB, open_driver("cpu"), lambda line: None)
        self.thread = threading.Thread(target=self.holder.run)
        self.thread.start()
        self.number, self.engine = 0, None
        self.start(b"one", 8)

    def start(self, identity, budget_groups):
        self.identity, self.engine = identity, Engine(self.path, self.runs, identity, budget_groups)

    @rule(block=some)
    def compute(self, block):
        """A block is handed out, and a step that writes it is launched; another prefix than any before."""
        memory = self.engine.memory
        if not memory.may_hand_out(block):
            memory.grow(1)
        if memory.may_hand_out(block):
            self.evict(block)
            self.number += 1
            hash_ = bytes([1 + self.number % 250]) * 36
            self.engine.kept.cached(block, hash_, depth=1 + block)
            self.engine.hashes[block] = hash_
            self.engine.pending.append((block, hash_))

    @rule(block=some)
    def evict(self, block):
        if self.engine.hashes.pop(block, None) is not None:
            self.engine.kept.dropped(block)
            if not any(pending == block for pending, _ in self.engine.pending):
                self.engine.write(block, b"\xff")  # it may be written from now on

    @rule(block=some)
    def cache_again(self, block):
        """As vLLM does for a block that several requests complete."""
        if block in self.engine.hashes:
            self.engine.kept.cached(block, self.engine.hashes[block], depth=1 + block)

    @rule(block=some)
    def fail(self, block):
        """A block is handed out and cached for a step that fails before it is launched; steps before it are read."""
        self.engine.kept.seal_written()
        memory = self.engine.memory
        if memory.may_hand_out(block):
            self.evict(block)
            self.engine.kept.cached(block, b"\xfd" * 36, depth=1)
            self.engine.kept.void_step()

    @rule()
    def step(self):
        self.engine.kept.seal_written()

    @rule()
    def time_passes(self):
        """All steps that were launched end, in order, and then their fences."""
        self.engine.kept.seal_written()
        for block, hash_ in self.engine.pending:
            if self.engine.memory.may_hand_out(block):
                self.engine.write(block, hash_)
        self.engine.pending.clear()
        for fence in self.engine.driver.fences:
            fence.wait()

    @precondition(lambda self: not self.engine.pending)
    @rule(groups=st.integers(1, 8))
    def resize(self, groups):
        memory = self.engine.memory
        memory.set_budget(groups * memory.group_bytes)
        leaving, _ = memory.settle()
        for group in leaving:
            for block in memory.blocks_in(group):
                self.evict(block)
        memory.reclaim(wait=True)

    @rule(
        ends=st.sampled_from(["killed", "closed"]), identity=st.sampled_from([b"one", b"one", b"two"]), groups=st.integers(2, 8)
    )
    def restart(self, ends, identity, groups):
        before = self.engine
        if ends == "killed":
            before.kept.close()
            for block, _ in before.pending:  # of what was launched a part was written
                if before.memory.may_hand_out(block):
                    before.write(block, b"\xfe")
        else:
            self.time_passes()
            before.kept.seal_all()
            before.memory.close()
            before.kept.close()
        same = identity == self.identity
        self.start(identity, groups)
        found = {each.block: each for each in self.engine.found}
        assert same or not found, "blocks of another model"
        assert all(before.hashes[block] == each.hash for block, each in found.items()), "an evicted block came back"
        if ends == "closed" and same:
            num_whole = NUM_BLOCKS // before.memory.group_blocks  # a last group with fewer blocks is not kept
            there = {before.memory.group_of(block) for block in before.hashes} & {*range(num_whole)}
            back = {before.memory.group_of(block) for block in found}
            assert len(back) == min(len(there - {0}), groups - 1) + (0 in there), "a group was lost, or is above the budget"
            assert found.keys() == {block for block in before.hashes if before.memory.group_of(block) in back}, (
                "a block was lost"
            )
        if ends == "killed":  # its addresses go; nothing is said to the holder
            before.memory.on_unmapped, before.kept.release = lambda group: None, before.driver.release
            before.memory.close()

    @invariant()
    def what_came_back_has_the_bytes_of_its_hash(self):
        if self.engine is not None:
            written = {block for block, _ in self.engine.pending}
            for each in self.engine.found:
                if self.engine.hashes.get(each.block) == each.hash and each.block not in written:
                    assert self.engine.holds(each.block, each.hash), "other bytes under a hash"

    def teardown(self):
        if getattr(self, "engine", None) is not None:
            self.engine.kept.seal_all()
            self.engine.memory.close()
            self.engine.kept.close()
            self.holder.stop()
            self.thread.join()
            with contextlib.suppress(Exception):
                self.holder.close()
            self.folder.cleanup()


TestKept, TestKeptAtLength = cases(KeptMachine, 100, 1000)
