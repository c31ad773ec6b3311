"""ElasticBlocks under random use, on a device whose work runs late, and whose calls fail: a block in use has its memory."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.laws.machine import cases, picks
from tests.laws.simulated_driver import UNDEFINED, SimulatedDriver
from vmmkv.adapters.vllm.elastic.memory import ElasticBlocks, aligned
from vmmkv.units import PAGE_BYTES

STRIDES = ([PAGE_BYTES // 2], [PAGE_BYTES], [PAGE_BYTES * 3 // 4], [PAGE_BYTES // 4, PAGE_BYTES // 2], [PAGE_BYTES * 9 // 8])


class ElasticMachine(RuleBasedStateMachine):
    """Stands for vLLM's pool: `free` is its queue, and `cached` those in it that keep a prefix."""

    @initialize(seed=picks, strides=st.sampled_from(STRIDES), num_blocks=st.integers(1, 40), device_groups=st.integers(1, 30))
    def make(self, seed, strides, num_blocks, device_groups):
        self.now = 0.0
        self.driver = SimulatedDriver(seed=seed)
        self.other = self.driver.new_stream()
        runs = aligned(num_blocks, strides)
        self.memory = ElasticBlocks(self.driver, runs, num_blocks, clock=lambda: self.now)
        self.driver.memory_bytes = device_groups * self.memory.group_bytes
        self.memory.streams.add(self.driver.main)
        self.memory.streams.add(self.other)
        self.memory.take([0])
        self.runs, self.num_blocks = runs, num_blocks
        self.free = [block for block in self.memory.blocks_in(0) if block]
        self.used, self.touched = list[int](), set[int]()

    def ranges(self, block):
        base = self.memory.tensor().data_ptr()
        return [(start := base + run.offset_bytes + block * run.stride_bytes, start + run.stride_bytes) for run in self.runs]

    def compute(self, blocks, stream):
        """A step of the engine: it reads and writes these blocks."""
        ranges = [each for block in blocks for each in self.ranges(block)]

        def act():
            for start, end in ranges:
                if any(run.label == UNDEFINED for run in self.driver.read(start, end - start)):
                    raise self.driver.law_broken("a step reads what another tenant has left")

        with self.driver.on(stream):
            self.driver.launch_kernel(act, ranges)

    @rule(count=st.integers(1, 12), fails=st.integers(0, 12))
    def allocate(self, count, fails):
        if fails < 3:
            self.driver.fail_at = {self.driver.num_calls + fails, self.driver.num_calls + fails + 4}
        could = len(self.free) + self.memory.num_growable
        added = self.memory.grow(count - len(self.free))
        self.driver.fail_at = set()
        if len(self.free) + len(added) < min(count, could):
            assert self.memory.failure is not None and not self.memory.num_growable, "vLLM sees no blocks that there are not"
        self.free += added
        taken, self.free = self.free[:count], self.free[count:]
        self.memory.take(taken)
        self.used += taken
        if taken:
            self.compute(taken, self.driver.main)

    @precondition(lambda self: self.used)
    @rule(at=picks, on_other=st.booleans())
    def step(self, at, on_other):
        self.compute(self.used[at % len(self.used) :][:3], self.other if on_other else self.driver.main)

    @precondition(lambda self: self.used)
    @rule(at=picks, count=st.integers(1, 12))
    def end(self, at, count):
        at %= len(self.used)
        given, self.used = self.used[at : at + count], self.used[:at] + self.used[at + count :]
        self.memory.give(given)
        self.free += [block for block in given if self.memory.may_hand_out(block)]

    @rule(groups=st.integers(1, 40))
    def resize(self, groups):
        self.memory.set_budget(groups * self.memory.group_bytes)

    @rule(worth=st.randoms(use_true_random=False))
    def settle(self, worth):
        leaving, back = self.memory.settle(lambda group: worth.random())
        for group in leaving:
            self.free = [block for block in self.free if self.memory.group_of(block) != group]
        for group in back:
            self.free += [block for block in self.memory.blocks_in(group) if block not in self.used]
        mapped, budget = self.memory.state().mapped_bytes, self.memory.state().budget_bytes
        assert self.memory.is_leaving == (mapped > budget) or (self.memory.is_leaving and self.memory.failure is not None)

    @rule(wait=st.booleans(), fails=st.integers(0, 12))
    def reclaim(self, wait, fails):
        if fails < 6:  # each call is tried three times
            self.driver.fail_at = set(range(self.driver.num_calls + fails, self.driver.num_calls + fails + 3))
        self.memory.reclaim(wait=wait)
        self.driver.fail_at = set()

    @rule()
    def settle_for_good(self):
        self.settle_all()
        state = self.memory.state()
        assert state.mapped_bytes <= max(state.budget_bytes, state.used_bytes, self.memory.group_bytes)

    def settle_all(self):
        leaving, back = self.memory.settle()
        gone = set(leaving)
        self.free = [block for block in self.free if self.memory.group_of(block) not in gone]
        self.free += [block for group in back for block in self.memory.blocks_in(group) if block not in self.used]
        self.memory.reclaim(wait=True)

    @rule(seconds=st.sampled_from([0.05, 1.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.driver.advance()

    @invariant()
    def each_block_that_may_be_touched_has_its_memory(self):
        if not hasattr(self, "memory"):
            return
        assert self.driver.broken is None
        assert len(set(self.free) | set(self.used)) == len(self.free) + len(self.used)
        for block in (0, *self.free, *self.used):
            assert all(self.driver.is_accessible(start, end - start) for start, end in self.ranges(block))
        state = self.memory.state()
        assert self.driver.mapped_bytes <= state.mapped_bytes <= state.reserved_bytes
        assert self.driver.live_handles == self.driver.live_mappings or self.memory.is_leaving
        assert state.mapped_bytes + self.memory.num_growable // self.memory.group_blocks * self.memory.group_bytes <= max(
            state.mapped_bytes, state.budget_bytes
        )

    def teardown(self):
        if hasattr(self, "memory"):
            self.memory.close()
            self.memory.close()
            self.driver.finish_all()
            assert self.driver.broken is None
            assert (self.driver.live_handles, self.driver.live_mappings, self.driver.live_reservations) == (0, 0, 0)


TestElasticBlocks, TestElasticBlocksAtLength = cases(ElasticMachine, 200, 1000)
