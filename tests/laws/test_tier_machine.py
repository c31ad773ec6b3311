"""Prefixes with tiers under random use: as without, and stores and loads that fail, are slow, or are given up.

Whatever comes back from a tier, a sequence reads the bytes that were written for its tokens in its namespace; nothing is lost
of the pool or of a tier's memory; and no step waits for a tier.
"""

import contextlib
import functools
import random
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from unittest import mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.laws.faulty_tier import DISK_FAULTS, FAULTS, STORE_FAULTS, FaultyDisk, FaultyStore, FaultyTier
from tests.laws.machine import MAX_TOKENS, cases, picks
from tests.laws.model import PREFIX_LAYOUTS, Texts, append, attend, large_extents, opened
from tests.laws.simulated_driver import SimulatedDriver
from tests.laws.test_prefix_machine import PrefixMachine, counts, namespaces, words
from tests.stores import Clock
from vmmkv import HostTier, KVCache, Pool
from vmmkv.prefix import Fetch, PrefixCache
from vmmkv.tiers import answering, shared
from vmmkv.tiers.threaded import ThreadedTier
from vmmkv.units import PAGE_BYTES

turns = st.lists(st.sampled_from([5, 5, 6]), min_size=4, max_size=12)


class TierMachine(PrefixMachine):
    """A prefix cache with two tiers of host memory, some with faults."""

    def new_prefix(self, seed):
        self.fetches: list[Fetch] = []
        self.tiers = [
            FaultyTier(HostTier((4 + seed % 30) * PAGE_BYTES), seed, FAULTS if seed % 3 else ()),
            FaultyTier(HostTier(60 * PAGE_BYTES), seed + 1, FAULTS if seed % 2 else ()),
        ]
        return PrefixCache(self.cache, self.tiers[: 1 + seed % 2], fingerprint="model")

    def loading_bytes(self):
        return sum(fetch.size_bytes for fetch in self.fetches if not fetch.done)

    @rule(pick=picks, common=counts, own=words, other=st.none() | namespaces, least=st.integers(1, 4))
    def fetch(self, pick, common, own, other, least):
        """What tiers have of a prompt is loaded, at most once at a time."""
        namespace, said = self.said[-1 - pick % len(self.said)]
        prompt, namespace = (said[:common] + own)[:MAX_TOKENS], other or namespace
        known = self.prefix.match(prompt, namespace=namespace)
        begin = functools.partial(self.prefix.fetch, prompt, namespace=namespace, least_tokens=least)
        fetch = self.making_room(begin)
        self.forget_evicted()
        if fetch is None:
            return
        if fetch.waiting == 1:
            assert fetch.num_tokens >= known + least
            honest = not any("lies" in tier.faults for tier in self.tiers)
            is_known = honest and fetch.size_bytes
            most = self.texts.num_confirmed(namespace, prompt[:-1]) if is_known else len(prompt) - 1
            assert fetch.num_tokens <= most, "what was never confirmed is fetched"
        if fetch not in self.fetches:
            self.fetches.append(fetch)

    def making_room(self, act):
        """Attempt to find and load: where nothing runs it may wait for fences to make room."""
        runs = any(sequence.limit for sequence in self.cache.sequences.values())
        return self.without_waits(act) if runs else self.attempt(act, partial=True)

    @rule(budget_us=st.sampled_from([0.0, float("inf"), float("inf")]))
    def poll(self, budget_us):
        self.making_room(lambda: self.prefix.poll(budget_us))
        self.fetches = [fetch for fetch in self.fetches if not fetch.done]

    @rule()
    def time_passes(self):
        for tier in self.tiers:
            tier.advance()

    @precondition(lambda self: self.fetches)
    @rule(pick=picks)
    def give_up(self, pick):
        fetch = self.fetches[pick % len(self.fetches)]
        fetch.give_up()
        assert fetch.done == (not fetch.waiting)
        if fetch.done:
            self.fetches.remove(fetch)

    @rule(pick=picks, own=turns, waits=st.sampled_from([True, True, False]))
    def come_back(self, pick, own, waits):
        """A conversation goes on after all that can be evicted was; perhaps without waiting for what is fetched."""
        namespace, said = self.said[-1 - pick % min(4, len(self.said))]
        live = self.begin((said + own)[: MAX_TOKENS - 1], namespace, None)
        if live is None:
            return
        tokens = live.tokens
        self.release_known(live, MAX_TOKENS)
        self.driver.fail_at = set()
        if waits:
            self.hurry()
        self.prefix.evict()
        self.forget_evicted()
        fetch = self.prefix.fetch([*tokens, 7], namespace=namespace)
        if fetch is not None:
            if waits:
                self.hurry()
                assert fetch.done
                known = self.prefix.match([*tokens, 7], namespace=namespace)
                assert known >= fetch.num_tokens, "what was fetched cannot be attached"
            else:
                self.fetches += [fetch] if fetch not in self.fetches else []
        live = self.begin([*tokens, 7], namespace, None)
        if live is not None:
            self.insert_first(live, live.inserted)

    def hurry(self):
        """Everything that is under way ends."""
        for tier in self.tiers:
            tier.hurry()
            chance, tier.chance = tier.chance, 0
            tier.was = chance
        assert self.prefix.flush(), "a store or a load never ends"
        for tier in self.tiers:
            tier.chance = tier.was
        self.fetches = [fetch for fetch in self.fetches if not fetch.done]
        self.forget_evicted()

    @invariant()
    def what_is_lent_is_under_way(self):
        under_way = {id(transfer) for transfer in self.prefix.transfers.mover.transfers_under_way()}
        for tier in self.tiers:
            assert {id(transfer) for transfer in tier.lent} <= under_way, "a tier's memory was not given back"

    def teardown(self):
        super().teardown()
        for tier in getattr(self, "tiers", ()):
            assert not tier.lent, "a tier's memory was not given back"
            tier.close()


class PromptThread:
    """Does what a tier leaves to its threads when the walk says so: then a walk is the same each time."""

    def __init__(self):
        self.work = []

    def submit(self, call, *arguments):
        future = Future()
        self.work.append((future, call, arguments))
        return future

    def go_on(self):
        while self.work:
            future, call, arguments = self.work.pop(0)
            try:
                future.set_result(call(*arguments))
            except Exception as error:
                future.set_exception(error)

    def shutdown(self, wait, cancel_futures=False):
        self.go_on()


class Prompt(ThreadedTier):
    """Has read or written before a call returns. Each time one of its faults strikes, or none."""

    faults: Sequence[str] = ()
    random: random.Random

    def read(self, key, data):
        self.fault = self.random.choice((None, *self.faults))
        super().read(key, data)

    def write(self, key, data):
        self.fault = self.random.choice((None, *self.faults))
        super().write(key, data)

    def open(self, device):
        super().open(device)
        self._threads.shutdown(wait=True)
        self._threads = PromptThread()
        self.answering.asker.shutdown(wait=True)
        self.answering.asker = PromptThread()

    def load(self, key):
        transfer = super().load(key)
        self._threads.go_on()
        return transfer

    def finished(self, transfer):
        super().finished(transfer)
        self._threads.go_on()


class PromptDisk(Prompt, FaultyDisk):
    pass


class PromptStore(Prompt, FaultyStore):
    """Has answered before it is asked again."""

    def lookup(self, keys):
        self.answering.asker.go_on()
        return super().lookup(keys)


class DiskMachine(TierMachine):
    """Over the host driver, with a disk behind a small host tier, and perhaps a store behind it."""

    real_memory = True

    def new_prefix(self, seed):
        self.fetches = []
        self.clock = Clock()
        for module in (answering, shared):
            self.closing.enter_context(mock.patch.object(module, "time", self.clock))
        self.folder = self.closing.enter_context(tempfile.TemporaryDirectory())
        self.disk = PromptDisk(self.folder, (10 + seed % 30) * PAGE_BYTES)
        self.store = PromptStore(10 + seed % 40)
        for tier in (self.disk, self.store):
            tier.random = random.Random(seed)
            self.closing.callback(tier.close)
        self.tiers = [
            FaultyTier(HostTier((1 + seed % 5) * PAGE_BYTES), seed, FAULTS if seed % 3 else ()),
            FaultyTier(self.disk, seed + 1, FAULTS if seed % 2 else ()),
            FaultyTier(self.store, seed + 2, FAULTS if seed % 5 == 0 else ()),
        ]
        used = [[0, 1], [0, 1, 2], [0, 2], [2]][seed % 4]
        self.tiers = [self.tiers[number] for number in used]
        return PrefixCache(self.cache, self.tiers, fingerprint="model")

    @rule(
        disk=st.sets(st.sampled_from(DISK_FAULTS), max_size=2),
        store=st.sets(st.sampled_from(STORE_FAULTS), max_size=2),
        seconds=st.sampled_from([0.0, 1.0, 60.0]),
        pick=picks,
        own=turns,
    )
    def come_back_from_what_breaks(self, disk, store, seconds, pick, own):
        self.disk.faults, self.store.faults = sorted(disk), sorted(store)
        self.clock.pass_for(seconds)
        self.come_back(pick, own, waits=True)

    @rule(num_left=st.integers(0, 10))
    def other_engines_take_the_room_of_the_store(self, num_left):
        while len(self.store.values) > num_left:
            self.store.values.pop(next(iter(self.store.values)))

    @rule(pick=picks, is_gone=st.booleans())
    def a_tier_goes_or_comes_back(self, pick, is_gone):
        self.tiers[pick % len(self.tiers)].chance = 1.0 if is_gone else 0.2


NIGHTS = [pytest.param(seed, 20, marks=pytest.mark.nightly) for seed in range(2, 40)]


@pytest.mark.parametrize(("seed", "num_turns"), [(1, 5), *NIGHTS])
def test_what_comes_from_a_disk_and_a_store_that_break_is_right(seed, num_turns):
    """Conversations go on in turn; a walk over all rules rarely comes back from a fault."""
    machine, chance = DiskMachine(), random.Random(seed)
    try:
        machine.make(layout=chance.choice(sorted(PREFIX_LAYOUTS)), guard=0, pages=24, large=chance.choice([2, 4]), seed=seed)
        for _ in range(num_turns):
            machine.come_back_from_what_breaks(
                disk=chance.sample(DISK_FAULTS, 2),
                store=chance.sample(STORE_FAULTS, 2),
                seconds=chance.choice([0.0, 1.0, 60.0]),
                pick=chance.randrange(4),
                own=chance.choices([5, 5, 6], k=chance.randint(4, 12)),
            )
            machine.verify(machine.live)
            machine.laws_hold()
            machine.what_is_lent_is_under_way()
            if chance.random() < 0.2:
                machine.other_engines_take_the_room_of_the_store(chance.randint(0, 10))
            if chance.random() < 0.2:
                machine.a_tier_goes_or_comes_back(chance.randrange(3), chance.random() < 0.5)
            while machine.live:
                machine.close(0)
    finally:
        machine.teardown()


def test_what_is_fetched_can_be_attached_where_prompts_part_in_a_row_over_two_pages():
    """The page belongs to the node that begins with that row, behind all rows that can be attached."""
    machine = DiskMachine()
    try:
        machine.make(layout="mixed_dtypes", guard=0, pages=11, large=2, seed=0)
        machine.come_back(own=[5] * 8, pick=0, waits=True)
        machine.time_passes()
        machine.time_passes()
        machine.come_back(own=[6, 5, 5, 5], pick=2, waits=True)
    finally:
        machine.teardown()


@contextlib.contextmanager
def over_host_memory(*, seed=1, pages=60, max_tokens=20):
    """A simulated device on which nothing runs before it must, a prefix cache there, and its host tier, which lends nothing
    in the end."""
    driver, host = SimulatedDriver(seed=seed, haste=0), HostTier(pages * PAGE_BYTES)
    with (
        Pool("cpu", pages * PAGE_BYTES, driver=driver) as pool,
        KVCache(PREFIX_LAYOUTS["one_group"], pool, slots=4, max_tokens=max_tokens) as cache,
    ):
        yield driver, PrefixCache(cache, [host], fingerprint="model"), host
        driver.finish_all()
        assert driver.broken is None
    host.close()


def laid_in_pages(prefix, tokens):
    """A sequence with these tokens, all inserted."""
    sequence = prefix.attach(tokens).sequence
    for num_tokens in range(2, len(tokens) + 1, 2):
        sequence.grow(num_tokens)
    sequence.advance(len(tokens))
    prefix.insert(sequence, tokens)
    return sequence


def attached(prefix, texts, tokens):
    """What a prompt of a tenant is attached to, and the sequence as the model has it."""
    found = prefix.attach(tokens, namespace="red")
    return found, opened(prefix.cache, found.sequence, owner=0, stamps=texts.stamps("red", tokens[: found.num_tokens]))


def computed(driver, prefix, texts, prompt, num_rows):
    """A sequence with memory for so many rows, whose prompt the device has computed; all inserted."""
    found, live = attached(prefix, texts, prompt)
    found.sequence.grow(num_rows)
    live.stamps = texts.stamps("red", prompt)
    append(driver, live, range(len(prompt)))
    found.sequence.advance(len(prompt))
    driver.finish_all()
    prefix.insert(found.sequence, prompt)
    return found.sequence


def assert_brought_back(driver, prefix, texts, prompt, num_tokens):
    """Tiers have so many of its tokens, and the right rows."""
    prefix.evict()
    assert prefix.match(prompt, namespace="red") == 0
    fetch = prefix.fetch(prompt, namespace="red")
    prefix.flush()
    assert fetch.done and fetch.num_tokens == num_tokens
    attend(driver, attached(prefix, texts, prompt)[1])


@pytest.mark.parametrize("seed", range(12))
def test_a_store_comes_behind_the_copies_that_made_the_rows(seed):
    """Rows that attaching copies are shared at once, while the copy is still on its way."""
    with large_extents(4), over_host_memory(seed=seed) as (driver, prefix, _):
        texts, prompt = Texts(), list(range(1, 14))
        sequence = computed(driver, prefix, texts, prompt, len(prompt))
        parting = [*prompt[:10], 50, 51]  # within a large extent: what it shares is copied into pages of its own
        copied, _ = attached(prefix, texts, parting)
        assert copied.num_tokens == 10 and copied.num_aliased < 3
        prefix.release(sequence)
        prefix.evict()  # of these rows the copies alone are left
        prefix.poll()
        driver.finish_all()
        prefix.flush()
        prefix.release(copied.sequence)
        assert_brought_back(driver, prefix, texts, parting, 8)


def test_copies_that_another_brings_while_a_path_is_stored_come_first(monkeypatch):
    """The path's last rows are in no piece, for its extent is not full. Of another sequence they are copied into pages."""
    with large_extents(4), over_host_memory(max_tokens=40) as (driver, prefix, host):
        texts, prompt = Texts(), list(range(1, 24))
        sequence = computed(driver, prefix, texts, prompt, 24)
        with monkeypatch.context() as patch:
            patch.setattr(host, "lookup", lambda keys: None)  # as a store that has not answered yet
            for _ in range(4):
                prefix.poll()
                driver.finish_all()
            kernel = driver.launch_kernel(lambda: None, [])
            copied, _ = attached(prefix, texts, [*prompt[:21], 50, 51])
        prefix.poll()
        while ready := [work for work in driver.ready() if work is not kernel]:
            driver.run(ready[0])
            prefix.poll()
        driver.finish_all()
        prefix.flush()
        for each in (sequence, copied.sequence):
            prefix.release(each)
        prefix.evict()
        driver.finish_all()
        assert prefix.fetch(prompt, namespace="red") is not None
        prefix.flush()
        attend(driver, attached(prefix, texts, prompt)[1])


def test_copies_of_a_path_not_worth_storing_come_before_the_store_of_another():
    """Both have computed or copied the same rows at once, and the tree has the copies."""
    with large_extents(4), over_host_memory() as (driver, prefix, _):
        texts, prompt = Texts(), list(range(1, 14))
        parting = [*prompt[:10], 50, 51]  # within a large extent: what it shares is copied into pages of its own
        prefix.store_if(lambda tier: False)
        computing, live = attached(prefix, texts, parting)
        computing.sequence.grow(10)
        live.stamps = texts.stamps("red", parting[:10])
        append(driver, live, range(10))
        computing.sequence.advance(10)
        sequence = computed(driver, prefix, texts, prompt, len(prompt))
        copied, _ = attached(prefix, texts, parting)
        assert copied.num_tokens == 10
        prefix.store_if(lambda tier: True)
        prefix.insert(computing.sequence, parting[:10])
        prefix.poll()
        driver.finish_all()
        prefix.flush()
        for each in (sequence, computing.sequence, copied.sequence):
            prefix.release(each)
        assert_brought_back(driver, prefix, texts, parting, 8)


def test_a_load_waits_for_no_store_and_a_store_holds_nothing_before_its_rows_are_written():
    """Not on a stream, and not for a window."""
    with over_host_memory(pages=200, max_tokens=200) as (driver, prefix, _):
        prompt = list(range(20))
        prefix.release(laid_in_pages(prefix, prompt))
        driver.finish_all()
        prefix.flush()
        prefix.evict()
        kernel = driver.launch_kernel(lambda: None, [])
        laid_in_pages(prefix, list(range(100, 298)))  # in more extents than there are windows
        for _ in range(3):
            prefix.poll()
        mover = prefix.transfers.mover
        assert mover.oldest_fence() is None and not kernel.done
        driver.finish_all()
        for _ in range(3):
            prefix.poll()
        stores = driver.ready()
        assert mover.oldest_fence() is not None and stores
        fetch = prefix.fetch(prompt)
        assert prefix.poll()
        while ready := [work for work in driver.ready() if work not in stores]:
            driver.run(ready[0])
        prefix.poll()
        assert fetch.done and prefix.match(prompt) >= fetch.num_tokens
        assert mover.oldest_fence() is not None


def test_a_cache_closes_behind_its_stores_without_the_lock_that_steps_of_others_need(monkeypatch):
    with over_host_memory() as (driver, prefix, _):
        prefix.release(laid_in_pages(prefix, list(range(20))))
        prefix.poll()
        made = type(driver.fence())
        wait = made.wait

        def checked(fence):
            other = threading.Thread(target=prefix.cache.pool.stats, daemon=True)
            other.start()
            other.join(60)
            assert not other.is_alive(), "the lock is held"
            wait(fence)

        monkeypatch.setattr(made, "wait", checked)
        before = driver.num_waits
        prefix.cache.close()
        assert driver.num_waits > before


TestOnASimulatedDevice, TestOnASimulatedDeviceAtLength = cases(TierMachine, 40, 1000)
TestOnHostMemory, TestOnHostMemoryAtLength = cases(TierMachine, 4, 500, real_memory=True)
TestWithADiskAndAStore = cases(DiskMachine, 20, 500)[1]
