"""A Store under random use, over tiers that fail: what is found has the right bytes, and spans are used until `done` alone.

The spans of what is done are overwritten at once. So a store that reads them later keeps wrong bytes under a key, and one that
writes them later changes what the test has written.
"""

import ctypes
import random
import tempfile
from collections import deque
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.laws.faulty_tier import DISK_FAULTS, FAULTS, FaultyTier
from tests.laws.machine import cases, picks
from tests.laws.test_tier_machine import PromptDisk
from vmmkv.driver import open_driver
from vmmkv.tiers import HostTier, KeyChain, Store
from vmmkv.tiers import store as store_module
from vmmkv.tiers.store import BufferCopier

SIZE = 4096
BLOCKS = KeyChain("model", every=1).of(range(12)).keys()
blocks = st.integers(0, len(BLOCKS) - 1)
some_blocks = st.lists(blocks, min_size=1, max_size=3, unique=True)


def records(numbers: list[int]) -> bytes:
    return b"".join(bytes([number + 1]) * SIZE for number in numbers)


class LateFence:
    """Copies that run when the walk says so."""

    def __init__(self, run):
        self.run = run

    def done(self):
        return self.run is None

    def wait(self):
        if self.run is not None:
            self.run()
            self.run = None

    def order(self, streams=()):
        self.wait()


class LateCopier(BufferCopier):
    """Copies long after they were launched, those of stores and loads in any order; sometimes there is no room for more."""

    def __init__(self, driver, seed):
        super().__init__(driver)
        self.random = random.Random(seed)
        self.launched = deque()

    def has_room(self, *, is_load):
        return len(self.launched) < 4

    def copy(self, buffer, runs, *, is_load):
        self.launched.append(LateFence(lambda: BufferCopier.copy(self, buffer, runs, is_load=is_load)))
        return self.launched[-1]

    def advance(self):
        for _ in range(self.random.randint(0, len(self.launched))):
            at = self.random.randrange(len(self.launched))
            self.launched[at].wait()
            del self.launched[at]


class StoreMachine(RuleBasedStateMachine):
    @initialize(seed=picks)
    def make(self, seed):
        self.folder = tempfile.TemporaryDirectory()
        self.disk = PromptDisk(self.folder.name, 8 * SIZE, record_bytes=SIZE)
        self.disk.random = random.Random(seed)
        self.disk.faults = DISK_FAULTS[: seed % 3]
        self.tiers = [
            FaultyTier(HostTier((1 + seed % 6) * SIZE, record_bytes=SIZE), seed, set(FAULTS) - {"lies"} if seed % 4 else ()),
            FaultyTier(self.disk, seed + 1, FAULTS if seed % 3 == 1 else ()),
        ]
        self.copier = LateCopier(open_driver("cpu"), seed)
        with patch.object(store_module, "BufferCopier", lambda driver: self.copier):
            self.store = Store(self.tiers[: 1 + seed % 2], "cpu")
        self.puts, self.gets, self.kept = [], [], []

    def spans(self, content, size):
        """A buffer, in spans that lie apart."""
        buffer = ctypes.create_string_buffer(content, size)
        start, cut = ctypes.addressof(buffer), self.copier.random.randrange(1, size)
        return buffer, [(start, cut), (start + cut, size - cut)]

    @rule(some=some_blocks)
    def put(self, some):
        buffer, spans = self.spans(records(some), SIZE * len(some))
        self.puts.append((self.store.put([BLOCKS[block] for block in some], spans), buffer))

    @rule(some=some_blocks)
    def get(self, some):
        buffer, spans = self.spans(b"", SIZE * len(some))
        self.gets.append((self.store.get([BLOCKS[block] for block in some], spans), some, buffer))

    @rule(some=st.lists(blocks, max_size=4))
    def lookup(self, some):
        found = self.store.lookup([BLOCKS[block] for block in some])
        assert found is None or len(found) == len(some)

    @rule(budget_us=st.sampled_from([0.0, float("inf")]))
    def poll(self, budget_us):
        self.store.poll(budget_us)

    @rule()
    def time_passes(self):
        self.copier.advance()
        for tier in self.tiers:
            tier.advance()

    @precondition(lambda self: self.puts or self.gets)
    @rule(pick=picks)
    def give_up(self, pick):
        (self.puts + self.gets)[pick % len(self.puts + self.gets)][0].give_up()

    @rule(pick=picks, is_gone=st.booleans())
    def a_tier_goes_or_comes_back(self, pick, is_gone):
        self.tiers[pick % 2].chance = 1.0 if is_gone else 0.2

    @invariant()
    def spans_are_free_when_they_are_done_and_not_before(self):
        for put, buffer in [each for each in self.puts if each[0].done]:
            self.puts.remove((put, buffer))
            self.keep(buffer)
        for get, some, buffer in [each for each in self.gets if each[0].done]:
            self.gets.remove((get, some, buffer))
            assert not get.found or buffer.raw == records(some), "wrong bytes under a key"
            self.keep(buffer)
        assert all(buffer.raw == b"\xee" * len(buffer) for buffer in self.kept), "written after it was done"

    def keep(self, buffer):
        ctypes.memset(buffer, 0xEE, len(buffer))
        self.kept = [*self.kept[-10:], buffer]

    @invariant()
    def what_is_lent_is_under_way(self):
        under_way = {id(transfer) for transfer in self.store.transfers_under_way()}
        for tier in self.tiers:
            assert {id(transfer) for transfer in tier.lent} <= under_way, "a tier's memory was not given back"

    def flush(self):
        self.copier.has_room = lambda *, is_load: True
        for tier in self.tiers:
            tier.chance, tier.tier.faults = 0.0, ()
            tier.hurry()
        assert self.store.flush(60), "a put or a get never ends"
        self.spans_are_free_when_they_are_done_and_not_before()
        assert not self.puts and not self.gets

    @rule()
    def what_is_put_in_tiers_that_work_is_found(self):
        chances = [tier.chance for tier in self.tiers]
        self.flush()
        self.put([3])
        self.flush()
        assert self.store.lookup(BLOCKS[3:4]) == [True]
        self.get([3])
        get = self.gets[0][0]
        self.flush()
        assert get.found
        del self.copier.has_room
        for tier, chance in zip(self.tiers, chances, strict=True):
            tier.chance = chance

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            self.spans_are_free_when_they_are_done_and_not_before()
            assert not self.puts and not self.gets, "something is under way in a store that is closed"
            for tier in self.tiers:
                assert not tier.lent
                tier.close()
            self.disk.close()
            self.folder.cleanup()


TestStore, TestStoreAtLength = cases(StoreMachine, 40, 1000)
