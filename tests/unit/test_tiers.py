"""Tiers: what goes to them and comes back, what that costs, and what is said of bad input.

That bytes are right under any order of calls and failures is proved in tests/laws.
"""

import signal
import subprocess
import sys
import time
import weakref
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.laws.faulty_tier import FAULTS, FaultyTier
from tests.unit.support import LAYOUT, PROMPT, WINDOWED, Calls, assert_reads, launch_over, write
from tests.unit.test_prefix import hooks
from vmmkv import BudgetError, DiskTier, DriverError, HostTier, KVCache, KVLayout, KVType, Pool
from vmmkv.prefix import PrefixCache
from vmmkv.prefix.index import IndexFollower
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.tiers import mover
from vmmkv.tiers.keys import KeyChain, PageKeys
from vmmkv.tiers.transfers import Transfers
from vmmkv.units import PAGE_BYTES

ROOT = Path(__file__).parents[2]
LONG = [token % 251 for token in range(300)]
FLOAT16 = KVLayout.uniform(layers=4, kv_heads=8, head_dim=1024, dtype=torch.float16)
"""Rows of the same size as LAYOUT's."""


@pytest.fixture
def cache(pool, host):
    """Closed before the tier."""
    with KVCache(LAYOUT, pool, slots=4, max_tokens=512) as cache:
        yield cache
        cache.check()


@pytest.fixture
def prefix(cache, host):
    return PrefixCache(cache, [host], fingerprint="model")


def compute(prefix, tokens, **options):
    """A prompt is computed and released: its full pages are in the tree."""
    sequence = prefix.attach(tokens, **options).sequence
    write(sequence, tokens)
    prefix.release(sequence, tokens)


def asked_of(tier, monkeypatch):
    """Lists of keys by which a tier is asked, from now on."""
    asked, lookup = [], tier.lookup
    monkeypatch.setattr(tier, "lookup", lambda keys: (asked.append(list(keys)), lookup(keys))[1])
    return asked


def compute_nothing(prefix, tokens):
    """Over a driver without memory: as `compute`, and stored nowhere."""
    sequence = prefix.attach(tokens).sequence
    sequence.grow(len(tokens))
    sequence.advance(len(tokens))
    prefix.release(sequence, tokens)
    prefix.transfers.give_up()


def test_transfers_override_the_hooks_that_they_answer() -> None:
    """A hook that is not overridden does nothing, and would not be missed."""
    assert hooks(IndexFollower) - hooks(Transfers) == {"added", "check", "dropped", "look", "unwritten", "waits_for_writes"}


@pytest.mark.parametrize("layout", [LAYOUT, WINDOWED], ids=["one group", "two groups"])
def test_keys_are_the_same_whether_a_prompt_is_hashed_at_once_or_as_it_grows(layout):
    tokens = np.arange(200, dtype=np.int32)
    keys = PageKeys(layout, "model")
    chain = keys.of(tokens[:5], "red")
    for end, looks in ((40, True), (41, False), (90, False), (200, True)):
        chain = chain.grown(tokens[:end])
        if looks:
            whole = keys.of(tokens[:end], "red")
            assert [*chain.hash_some(None), *whole.hash_some(None)]
            assert (chain.in_order, chain.by_group) == (whole.in_order, whole.by_group)
            assert all(whole.key(group, page) == key for group, of in enumerate(whole.by_group) for page, key in enumerate(of))
            behind = keys.of(tokens[:end], "red")
            behind.skip([1] * len(whole.by_group))
            behind.hash_some(None)
            assert behind.by_group == [[b"", *of[1:]] for of in whole.by_group]
    assert len(set(chain.in_order)) == len(chain.in_order)
    assert chain.grown(tokens[1:]) is None and chain.grown(tokens[:100]) is None


def test_a_chain_of_any_engine_has_a_key_for_each_whole_record_of_its_tokens():
    blocks = KeyChain("model", every=16)
    chain = blocks.of([*range(40)])
    keys = chain.keys().copy()
    assert len(keys) == len(set(keys)) == 2 and blocks.of(torch.arange(47)).keys() == keys
    grown = chain.grown([*range(100)])
    assert grown.keys()[:2] == keys and len(grown.keys()) == 6 and chain.keys() == keys
    other = [KeyChain("other", every=16).of([*range(40)]), KeyChain("model", every=8).of([*range(80)])]
    other += [blocks.of([*range(40)], namespace="red"), blocks.of([1, *range(1, 40)])]
    assert not any({*each.keys()} & {*keys} for each in other)


@pytest.mark.parametrize("tokens", [[[1, 2]], [2**31], ["a"], [1.5]])
def test_tokens_that_are_no_ids_have_no_keys(tokens):
    with pytest.raises((ValueError, TypeError), match="tokens="):
        KeyChain("model", every=16).of(tokens)
    with pytest.raises(ValueError, match=r"every=0: .* such as 16"):
        KeyChain("model", every=0)


def test_keys_take_in_what_their_tokens_stand_for_beside_their_ids():
    plain, tokens = KeyChain("model", every=4).of(range(12)), np.arange(12, dtype=np.int32)
    imaged = KeyChain("model", every=4).of(range(4), None, lambda end: b"" if end < 5 else b"image").grown(range(12))
    assert imaged.keys()[0] == plain.keys()[0] and not {*imaged.keys()[1:]} & {*plain.keys()}
    assert imaged.keys() == [imaged.key(0, record) for record in range(3)]
    spelt = KeyChain("model", every=4).of(range(4), None, lambda end: tokens[4:8].tobytes())
    assert not {*spelt.keys()} & {*plain.keys()}, "they have the bytes of tokens"


def test_what_is_evicted_comes_back_from_the_host(prefix, cache):
    compute(prefix, PROMPT)
    prefix.flush()
    assert prefix.evict() == 6
    assert prefix.match(PROMPT) == 0
    fetch = prefix.fetch(PROMPT)
    assert (fetch.num_tokens, fetch.size_bytes, fetch.done) == (96, 6 * PAGE_BYTES, False)
    prefix.flush()
    assert fetch.done
    cache.check()
    attached = prefix.attach(PROMPT)
    assert attached.num_tokens == 96
    assert_reads(attached.sequence, PROMPT[:96])


def stored(prefix, tokens, **options):
    """A prompt is computed, stored in the tiers, and evicted."""
    compute(prefix, tokens, **options)
    prefix.flush()
    prefix.evict()


def fetched(prefix, tokens, **options):
    """A prompt is attached after what tiers have of it has come."""
    fetch = prefix.fetch(tokens, **options)
    assert prefix.flush() and (fetch is None or fetch.done)
    prefix.cache.check()
    return prefix.attach(tokens, **options)


def test_after_a_flush_a_slow_tier_has_what_was_inserted(cache, tmp_path, monkeypatch):
    disk, write = DiskTier(tmp_path, 64 * PAGE_BYTES), DiskTier.write
    monkeypatch.setattr(DiskTier, "write", lambda *record: (time.sleep(0.02), write(*record))[1])
    prefix = PrefixCache(cache, [disk], fingerprint="model")
    compute(prefix, PROMPT)
    assert not prefix.flush(0.001)
    assert prefix.flush()
    assert disk.stats().stored_bytes == disk.stats().held_bytes == 6 * PAGE_BYTES
    prefix.evict()
    assert fetched(prefix, PROMPT).num_tokens == 96
    cache.close()
    disk.close()


def test_a_poll_without_time_copies_one_extent(prefix, host):
    compute(prefix, PROMPT)
    for held in (1, 2, 6):
        prefix.poll(0)
        assert host.stats().held_bytes == held * PAGE_BYTES
    assert not prefix.poll(0)


def test_loads_and_stores_share_the_time_of_polls(prefix, host):
    stored(prefix, PROMPT)
    fetch = prefix.fetch(PROMPT)
    compute(prefix, [9] * 100)
    before = host.stats()
    for _ in range(3):
        prefix.poll(0)
    assert host.stats().stored_bytes > before.stored_bytes
    assert host.stats().loaded_bytes > before.loaded_bytes
    assert not fetch.done


class Asking(FaultyTier):
    """From some moment on it knows of the first key that it is asked about, and has to ask about all others."""

    known: bytes | None = None
    asks = False

    def lookup(self, keys):
        if not self.asks:
            return super().lookup(keys)
        self.known = self.known or keys[0]
        return [True] if [*keys] == [self.known] else None


@pytest.mark.parametrize("asks", [False, True])
def test_the_cost_of_a_call_does_not_grow_with_the_path(host, asks):
    """While it is stored, or while it is fetched and a tier is asked about it."""

    def most_calls(num_pages):
        """Of functions, by a fetch or one poll that has no time."""
        counts = [0]
        tokens = np.arange(16 * num_pages, dtype=np.int32)
        tier = Asking(host, 0, ())
        with (
            Pool("cpu", (num_pages + 20) * PAGE_BYTES, driver=FakeDriver()) as pool,
            KVCache(LAYOUT, pool, slots=1, max_tokens=len(tokens) + 16) as cache,
        ):
            prefix = PrefixCache(cache, [tier], fingerprint=f"{num_pages}")
            sequence = prefix.attach(tokens).sequence
            for end in range(16, len(tokens) + 1, 16):  # laid in pages
                sequence.grow(end)
            sequence.advance(len(tokens))
            prefix.release(sequence, tokens)
            if asks:
                prefix.flush()
                prefix.evict()
                tier.asks = True
            sys.setprofile(lambda _, event, __: counts.__setitem__(-1, counts[-1] + event.endswith("call")))
            fetch = prefix.fetch(tokens) if asks else None
            while prefix.poll(0) and not (asks and len(counts) > 30):
                counts.append(0)
            sys.setprofile(None)
            assert (fetch is not None) == asks
        return max(counts)

    assert most_calls(800) < 1.1 * most_calls(400)


def test_a_fetch_looks_no_further_than_tiers_have_and_no_nearer_than_the_device_lacks():
    """In polls, where the prompt is long."""
    tokens = np.arange(16 * 5000, dtype=np.int32)
    tier = FaultyTier(HostTier(PAGE_BYTES), 0, ())
    with (
        Pool("cpu", 1000 * PAGE_BYTES, driver=FakeDriver(memory_bytes=2**50)) as pool,
        KVCache(LAYOUT, pool, slots=1, max_tokens=len(tokens)) as cache,
    ):
        prefix = PrefixCache(cache, [tier], fingerprint="model")
        compute_nothing(prefix, tokens[: 16 * 160])
        chain = PageKeys(LAYOUT, "model").of(tokens)
        chain.hash_some(None)
        known = set(chain.in_order[160:600])
        asked = []
        tier.lookup = lambda keys: (asked.extend(keys), [key in known for key in keys])[1]
        fetch = prefix.fetch(tokens)
        assert fetch.known_tokens == 16 * 160 and not fetch.size_bytes
        while not fetch.size_bytes:
            prefix.poll(0)
        assert (fetch.num_tokens, fetch.size_bytes) == (16 * 600, 440 * PAGE_BYTES)
        cache.check()
        assert {*chain.in_order[160:601]} <= {*asked} <= {*chain.in_order[160:2000]}
        fetch.give_up()
        cache.check()
    tier.close()


def test_of_a_growing_prompt_that_waits_to_be_stored_only_the_whole_is(prefix, host, monkeypatch):
    compute(prefix, [9] * 80)
    sequence = prefix.attach(PROMPT).sequence
    for end in (32, 64, 100):
        write(sequence, PROMPT[:end])
        prefix.insert(sequence, PROMPT[:end])
    asked = asked_of(host, monkeypatch)
    prefix.flush()
    assert [len(keys) for keys in asked] == [5, 6], "of 80 and of 100 tokens"
    assert host.stats().held_bytes == 11 * PAGE_BYTES


def test_of_too_many_paths_that_wait_to_be_stored_the_oldest_is_dropped(prefix, host, monkeypatch):
    monkeypatch.setattr(mover, "MOST_QUEUED", 2)
    for first in range(4):
        compute(prefix, [first, *PROMPT])
    asked = asked_of(host, monkeypatch)
    prefix.flush()
    chains = [PageKeys(LAYOUT, "model").of([first, *PROMPT]) for first in (2, 3)]
    for chain in chains:
        chain.hash_some(None)
    assert [set(keys) for keys in asked] == [set(chain.in_order) for chain in chains]
    assert host.stats().held_bytes == 2 * 6 * PAGE_BYTES


TYPES = {
    **{str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16)},
    **{str(each): each for each in (KVType("fp8"), KVType("fp8", "head"), KVType("int8"), KVType("int4"))},
}


def test_no_type_finds_the_records_of_another():
    layouts = [
        KVLayout.uniform(layers=4, kv_heads=8, head_dim=dim, dtype=dtype) for dim in (128, 256) for dtype in TYPES.values()
    ]
    assert len({layout.identity("model") for layout in layouts}) == len(layouts)


@pytest.mark.parametrize("windows", [None, [None, 40, None, 40]], ids=["one group", "windowed"])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_every_byte_of_every_type_comes_back(pool, host, dtype, windows):
    """Scales among them, which lie in the rows."""
    layout = KVLayout.uniform(layers=4, kv_heads=8, head_dim=1024, dtype=dtype, windows=windows)
    generator = torch.Generator().manual_seed(1)
    with KVCache(layout, pool, slots=4, max_tokens=512) as cache:
        prefix = PrefixCache(cache, [host], fingerprint="model")
        sequence = prefix.attach(LONG[:200]).sequence
        sequence.grow(200)
        planes = [(layer, plane.name) for group in layout.groups for layer in group.layers for plane in group.planes]
        written = {}
        for layer, name in planes:
            plane = sequence.view(layer, name)[:200]
            rows = torch.randint(0, 256, (*plane.shape[:-1], plane.shape[-1] * plane.itemsize), generator=generator)
            written[layer, name] = rows.to(torch.uint8)
            plane.view(torch.uint8).copy_(written[layer, name])
        sequence.advance(200)
        prefix.release(sequence, LONG[:200])
        prefix.flush()
        prefix.evict()
        sequence = fetched(prefix, LONG[:200]).sequence
        assert prefix.stats().fetched_tokens == sequence.length >= 100
        for layer, name in planes:
            start = sequence.start(layout.group_of[layer])
            plane = sequence.view(layer, name)[: sequence.length - start].view(torch.uint8)
            assert torch.equal(plane, written[layer, name][start : sequence.length])


def test_a_match_that_ends_on_the_device_goes_on_in_the_tiers(prefix):
    stored(prefix, PROMPT)
    compute(prefix, PROMPT[:40])
    fetch = prefix.fetch(PROMPT)
    assert fetch.size_bytes == 4 * PAGE_BYTES  # two of six are there
    assert_reads(fetched(prefix, PROMPT).sequence, PROMPT[:96])


def test_a_fetch_that_is_not_worth_it_does_not_start(prefix, cache, pool):
    stored(prefix, PROMPT)
    cache.drain()
    asked = []
    assert prefix.fetch(PROMPT, least_tokens=97) is None
    assert prefix.fetch(PROMPT, worth=lambda fetch: asked.append((fetch.num_tokens, fetch.bytes_by_tier.copy()))) is None
    assert asked == [(96, {"host": 6 * PAGE_BYTES})]
    assert pool.stats().held_bytes == 0


def test_a_fetch_that_is_not_worth_it_may_be_without_the_last_tier_and_what_is_behind_its_records(cache, host, tmp_path):
    middle, last = HostTier(64 * PAGE_BYTES), DiskTier(tmp_path, 64 * PAGE_BYTES)
    prefix = PrefixCache(cache, [host, middle, last], fingerprint="model")
    stored(prefix, PROMPT)
    chain = PageKeys(LAYOUT, "model").of(PROMPT)
    chain.hash_some(None)
    for tier, lost in ((host, (2, 4)), (middle, (4,))):  # host, host, middle, host, last, host
        missing = {chain.in_order[page] for page in lost}
        has = tier.lookup
        tier.lookup = lambda keys, has=has, missing=missing: [
            there and key not in missing for key, there in zip(keys, has(keys), strict=True)
        ]
    middle.name = "middle"
    asked = []
    assert prefix.fetch(PROMPT, worth=lambda fetch: asked.append(fetch.num_tokens)) is None
    assert asked == [96, 64, 32]
    asked.clear()

    def worth(fetch):
        asked.append((fetch.num_tokens, [*fetch.bytes_by_tier.values()]))
        return "disk" not in fetch.bytes_by_tier

    fetch = prefix.fetch(PROMPT, worth=worth)
    assert asked == [(96, [4 * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES]), (64, [3 * PAGE_BYTES, PAGE_BYTES])]
    assert (fetch.num_tokens, fetch.bytes_by_tier) == (64, {"host": 3 * PAGE_BYTES, "middle": PAGE_BYTES})
    prefix.flush()
    assert_reads(prefix.attach(PROMPT).sequence, PROMPT[:64])
    cache.close()
    for tier in (middle, last):
        tier.close()


def test_a_fetch_leaves_memory_for_sequences_that_run(prefix, pool):
    stored(prefix, PROMPT)
    pool.resize(8 * PAGE_BYTES)
    assert prefix.fetch(PROMPT, room_pages=9) is None
    assert prefix.fetch(PROMPT, room_pages=8).num_tokens == 96


def test_one_load_serves_all_that_wait_for_it(prefix, host):
    stored(prefix, PROMPT)
    first, second = prefix.fetch(PROMPT), prefix.fetch([*PROMPT[:60], 0, 0])
    assert first is second and first.waiting == 2
    second.give_up()
    assert not first.done
    prefix.flush()
    assert host.stats().loaded_bytes == 6 * PAGE_BYTES
    both = [prefix.attach(PROMPT), prefix.attach([*PROMPT[:60], 0, 0])]
    assert [each.num_tokens for each in both] == [96, 60]
    assert_reads(both[1].sequence, PROMPT[:60])


def test_a_fetch_waits_for_a_tier_that_finds_out_what_it_has(cache, host):
    """As behind a network. What another fetch loads already is not loaded again."""
    tier = FaultyTier(host, 0, ["asks"], chance=0.0)
    prefix = PrefixCache(cache, [tier], fingerprint="model")
    stored(prefix, PROMPT)
    tier.chance = 1.0
    fetches = [prefix.fetch(tokens) for tokens in (PROMPT, PROMPT, LONG, PROMPT)]
    fetches.pop().give_up()
    assert prefix.poll() and not any(fetch.done or fetch.size_bytes for fetch in fetches)
    tier.chance = 0.0
    assert prefix.flush() and all(fetch.done for fetch in fetches)
    assert [(fetch.num_tokens, fetch.size_bytes // PAGE_BYTES) for fetch in fetches] == [(96, 6), (0, 0), (0, 0)]
    cache.check()
    assert_reads(prefix.attach(PROMPT).sequence, PROMPT[:96])


def test_a_fetch_that_nothing_waits_for_gives_everything_back(prefix, cache, pool, driver):
    stored(prefix, PROMPT)
    before = pool.stats().held_bytes
    fetch = prefix.fetch(PROMPT)
    assert pool.stats().used_bytes == 6 * PAGE_BYTES
    fetch.give_up()
    cache.check()
    assert fetch.done and pool.stats().held_bytes == before and not prefix.match(PROMPT)
    fetch = prefix.fetch(PROMPT)
    driver.fail_at = {driver.num_calls + 3}
    with pytest.raises(Exception, match="told to fail"):
        prefix.poll()
    assert prefix.flush() and fetch.done
    cache.check()
    assert fetch.num_tokens < 96
    assert_reads(fetched(prefix, PROMPT).sequence, PROMPT[:96])


def test_the_beginning_that_has_come_of_a_fetch_that_nothing_waits_for_is_kept(prefix, cache, host):
    stored(prefix, PROMPT)
    fetch = prefix.fetch(PROMPT)
    for _ in range(2):
        assert not prefix.match(PROMPT) and prefix.poll(0)
    fetch.give_up()
    cache.check()
    assert fetch.done and 0 < fetch.num_tokens < 96
    assert prefix.match(PROMPT) == fetch.num_tokens == fetch.loaded_bytes["host"] // PAGE_BYTES * 16
    assert_reads(prefix.attach(PROMPT).sequence, PROMPT[: fetch.num_tokens])


def test_a_budget_below_what_is_fetched_is_refused_by_the_name_of_fetches(prefix, pool):
    stored(prefix, PROMPT)
    fetch = prefix.fetch(PROMPT)
    with pytest.raises(BudgetError, match=f"tiers load into.* give fetches up, or ask for at least {6 * PAGE_BYTES} bytes"):
        pool.resize(5 * PAGE_BYTES)
    fetch.give_up()
    pool.resize(5 * PAGE_BYTES)


class FailsAfter(Future):
    """A load that fails behind so many looks at it, as a thread may at any moment."""

    def __init__(self, num_looks):
        super().__init__()
        self.num_looks = num_looks

    def done(self):
        is_done = super().done()
        self.num_looks -= not is_done
        if not is_done and not self.num_looks:
            self.set_exception(OSError("the disk is broken"))
        return is_done


@pytest.mark.parametrize("num_looks", [1, 2, 3, 4])
def test_a_load_that_fails_between_two_looks_at_it_is_a_miss(prefix, host, monkeypatch, num_looks):
    stored(prefix, PROMPT)
    load = host.load

    def load_one_that_fails(key):
        transfer = load(key)
        if not futures:
            transfer.future = FailsAfter(num_looks)
            futures.append(transfer.future)
        return transfer

    futures: list[Future] = []
    monkeypatch.setattr(host, "load", load_one_that_fails)
    assert fetched(prefix, PROMPT).num_tokens == 0
    assert isinstance(futures[0].exception(), OSError)


def test_a_fetch_whose_extents_cannot_be_created_ends_as_a_miss(cache, host, driver):
    tier = FaultyTier(host, 0, ["asks"], chance=0.0)
    prefix = PrefixCache(cache, [tier], fingerprint="model")
    stored(prefix, PROMPT)
    cache.drain()
    cache.pool.resize(PAGE_BYTES)
    cache.pool.resize(32 * PAGE_BYTES)
    tier.chance = 1.0
    fetch = prefix.fetch(PROMPT)
    tier.chance = 0.0
    driver.fail_at = {driver.num_calls + 2}
    with pytest.raises(Exception, match="told to fail"):
        prefix.poll()
    assert prefix.flush() and fetch.done and not fetch.num_tokens
    cache.check()
    assert_reads(fetched(prefix, PROMPT).sequence, PROMPT[:96])


def test_a_fetch_that_is_done_keeps_nothing_of_the_request_that_asked_for_it(prefix):
    """That keeps the fetch, and cycles of old objects are not collected in a server."""
    stored(prefix, PROMPT)

    def worth(fetch):
        return True

    fetch, asked = prefix.fetch(PROMPT, worth=worth), weakref.ref(worth)
    del worth
    prefix.flush()
    assert fetch.done and asked() is None


def test_sixteen_records_come_back_in_one_extent_by_one_copy(prefix, pool, cache, driver, monkeypatch):
    pool.resize(64 * PAGE_BYTES)
    sequence = prefix.attach(LONG).sequence
    for token in range(len(LONG)):  # laid in pages
        write(sequence, LONG[: token + 1])
    prefix.release(sequence, LONG)
    prefix.flush()
    prefix.evict()
    cache.drain()
    copied, copy = [], driver.copy
    monkeypatch.setattr(driver, "copy", lambda to, at, size_bytes: (copied.append(size_bytes), copy(to, at, size_bytes)))
    assert prefix.fetch(LONG).size_bytes == 18 * PAGE_BYTES
    prefix.flush()
    assert copied == [16 * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES]
    calls = Calls(driver)
    attached = prefix.attach(LONG)
    assert calls.made()["map"] == attached.num_aliased == 3
    assert_reads(attached.sequence, LONG[:288])


def test_no_other_tenant_model_or_layout_finds_a_record(prefix, pool, host):
    stored(prefix, PROMPT, namespace="red")
    for namespace in ("blue", None, ("red",), b"red"):
        assert prefix.fetch(PROMPT, namespace=namespace) is None
    with KVCache(FLOAT16, pool, slots=4, max_tokens=512) as other:
        assert PrefixCache(other, [host], fingerprint="model").fetch(PROMPT, namespace="red") is None
    with KVCache(LAYOUT, pool, slots=4, max_tokens=512) as other:
        assert PrefixCache(other, [host], fingerprint="other model").fetch(PROMPT, namespace="red") is None
    with KVCache(LAYOUT, pool, slots=4, max_tokens=512) as other:
        twin = PrefixCache(other, [host], fingerprint="model")
        assert_reads(fetched(twin, PROMPT, namespace="red").sequence, PROMPT[:96])


def test_memory_of_a_load_that_failed_is_zeroed_for_the_next_tenant(prefix, pool, cache, driver):
    stored(prefix, PROMPT, namespace="red")
    cache.drain()
    pool.resize(PAGE_BYTES)
    pool.resize(32 * PAGE_BYTES)  # so that what is loaded into is new, and zero
    fetch = prefix.fetch(PROMPT, namespace="red")
    driver.fail_at = {driver.num_calls + 4}
    with pytest.raises(Exception, match="told to fail"):
        prefix.poll()
    fetch.give_up()
    cache.drain()
    blue = cache.open(tenant="blue")
    blue.grow(400)
    assert not any(view[:400].any() for layer in range(4) for view in (blue.k(layer), blue.v(layer)))


def test_a_disk_tier_answers_after_a_restart_as_before_and_brings_the_host_up_to_date(pool, tmp_path):
    for start in range(2):
        with KVCache(LAYOUT, pool, slots=4, max_tokens=512) as cache:
            host, disk = HostTier(20 * PAGE_BYTES), DiskTier(tmp_path / "kv", 20 * PAGE_BYTES)
            prefix = PrefixCache(cache, [host, disk], fingerprint="model")
            if not start:
                stored(prefix, PROMPT)
            attached = fetched(prefix, PROMPT)
            assert attached.num_tokens == 96
            assert_reads(attached.sequence, PROMPT[:96])
            assert disk.stats().loaded_bytes == start * 6 * PAGE_BYTES
            assert host.stats().held_bytes == 6 * PAGE_BYTES
        host.close()
        disk.close()


KILLED = """
import os, signal, sys
from tests.unit.test_tiers import LAYOUT, PAGE_BYTES, PROMPT, DiskTier, KVCache, Pool, PrefixCache, stored

with Pool("cpu", 32 * PAGE_BYTES) as pool, KVCache(LAYOUT, pool, slots=4, max_tokens=512) as cache:
    prefix = PrefixCache(cache, [DiskTier(sys.argv[1], 20 * PAGE_BYTES)], fingerprint="model")
    stored(prefix, PROMPT, namespace=("red", 7))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_another_process_finds_what_a_killed_one_stored(cache, tmp_path):
    child = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "kv")], cwd=ROOT, check=False, timeout=100)
    assert child.returncode == -signal.SIGKILL
    disk = DiskTier(tmp_path / "kv", 20 * PAGE_BYTES)
    prefix = PrefixCache(cache, [disk], fingerprint="model")
    assert prefix.fetch(PROMPT, namespace=("red", 8)) is None
    assert_reads(fetched(prefix, PROMPT, namespace=("red", 7)).sequence, PROMPT[:96])
    disk.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tier_that_is_gone_is_a_miss_and_raises_nothing(cache, host, pool, fault):
    tier = FaultyTier(host, 0, [fault], chance=0)
    prefix = PrefixCache(cache, [tier], fingerprint="model")
    stored(prefix, PROMPT)
    tier.chance = 1
    fetch = prefix.fetch(PROMPT)
    prefix.flush(0.05)
    assert fetch is None or fault in ("asks", "forgets", "refuses", "slow")
    assert prefix.match(PROMPT) == 0
    if fetch is not None and not fetch.done:  # it never ends
        fetch.give_up()
    cache.check()
    compute(prefix, [3, *PROMPT])
    prefix.flush(0.05)
    assert prefix.match([3, *PROMPT]) == 96
    assert (prefix.stats().tier_errors > 0) == (fault == "raises")
    prefix.evict()
    cache.drain()
    assert pool.stats().held_bytes == 0


def test_a_cache_closes_while_a_tier_hangs(pool, host):
    with KVCache(LAYOUT, pool, slots=4, max_tokens=512) as cache:
        tier = FaultyTier(host, 0, ["slow"], chance=0)
        prefix = PrefixCache(cache, [tier], fingerprint="model")
        stored(prefix, PROMPT)
        compute(prefix, [3, *PROMPT])
        tier.chance = 1
        fetch = prefix.fetch(PROMPT)
        prefix.poll()
    assert fetch.done and not tier.lent and pool.stats().held_bytes == 0


def test_without_room_on_the_device_nothing_is_fetched(prefix, pool, cache):
    stored(prefix, PROMPT)
    cache.drain()
    running = cache.open()
    running.grow(16 * 30)
    assert prefix.fetch(PROMPT) is None
    assert prefix.attach(PROMPT).num_tokens == 0
    cache.check()


def test_a_fetch_takes_the_room_of_a_prompt_that_has_just_ended(prefix, pool, cache):
    pool.resize(9 * PAGE_BYTES)
    stored(prefix, PROMPT)
    running = cache.open()
    running.grow(16)  # a page; while none ran, the fetch would wait for what has ended
    compute(prefix, [3, *PROMPT])  # its pages are in the tree, and still mapped
    prefix.flush()
    attached = fetched(prefix, PROMPT)
    assert attached.num_tokens == 96
    assert_reads(attached.sequence, PROMPT[:96])
    running.close()


def test_a_fetch_waits_for_fences_to_make_room_only_where_nothing_runs(prefix, pool, cache, driver):
    pool.resize(9 * PAGE_BYTES)
    stored(prefix, PROMPT)
    running = cache.open()
    running.grow(16)
    ended = prefix.attach([3, *PROMPT]).sequence
    write(ended, [3, *PROMPT])
    launch = launch_over(driver, cache, ended)
    prefix.release(ended, [3, *PROMPT])
    assert prefix.fetch(PROMPT) is None and not launch.finished
    running.close()
    assert prefix.fetch(PROMPT).num_tokens == 96


def test_a_path_that_is_used_again_is_whole_in_the_tier_and_loses_its_end_first(cache):
    tier = HostTier(8 * PAGE_BYTES)
    prefix = PrefixCache(cache, [tier], fingerprint="model")
    compute(prefix, PROMPT)
    prefix.flush()
    compute(prefix, [9] * 80)  # five pages: three of the first six go
    prefix.flush()
    prefix.evict()
    assert prefix.fetch([9] * 81).num_tokens == 80
    prefix.flush()
    fetch = prefix.fetch(PROMPT)
    assert fetch.num_tokens == 48
    tier.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_path_that_is_stored_in_pieces_loses_its_end_first(cache, tmp_path, kind):
    tier = HostTier(8 * PAGE_BYTES) if kind == "host" else DiskTier(tmp_path, 8 * PAGE_BYTES)
    prefix = PrefixCache(cache, [tier], fingerprint="model")
    for tokens in (LONG[:65], LONG[:113], [9] * 48):  # four pages, three more, and three for which two go
        compute(prefix, tokens)
        prefix.flush()
    prefix.evict()
    assert prefix.fetch(LONG).num_tokens == 5 * 16
    cache.close()
    tier.close()


def test_of_a_path_that_is_longer_than_the_tier_its_beginning_is_stored(cache):
    tier = HostTier(5 * PAGE_BYTES)
    prefix = PrefixCache(cache, [tier], fingerprint="model")
    for tokens in (LONG[:65], LONG[:113]):
        compute(prefix, tokens)
        prefix.flush()
    prefix.evict()
    assert prefix.fetch(LONG).num_tokens == 5 * 16
    assert tier.stats().stored_bytes == 5 * PAGE_BYTES, "none was stored in vain"
    cache.close()
    tier.close()


SHORT_WINDOW = KVLayout.uniform(layers=4, kv_heads=8, head_dim=512, dtype=torch.float32, windows=[None, 20, None, 20])
"""Two groups of 64 KiB a row, 32 tokens a page: more than the window of the second."""


@pytest.fixture
def short_window(pool, host):
    with KVCache(SHORT_WINDOW, pool, slots=4, max_tokens=512) as cache:
        yield PrefixCache(cache, [host], fingerprint="model")
        cache.check()


def bring_back(prefix, prompt):
    """A sequence with what tiers have of a prompt, of which the device keeps nothing."""
    prefix.flush()
    prefix.evict()
    prefix.fetch(prompt)
    prefix.flush()
    return prefix.attach(prompt).sequence


@pytest.mark.parametrize("step", [7, 20, 100])
def test_pages_that_a_window_has_passed_in_part_come_back_as_they_were(short_window, step):
    """A page goes as a whole: until then it has all its rows."""
    prefix, sequence = short_window, short_window.attach(LONG).sequence
    for num_tokens in [*range(step, 300, step), 300]:
        write(sequence, LONG[:num_tokens])
        prefix.insert(sequence, LONG[:num_tokens])
        sequence.advance_start(1)
    prefix.release(sequence, LONG)
    assert prefix.match([*LONG, 1]) == 288
    for num_tokens in (300, 200, 100):  # other ends, and other windows
        prompt = [*LONG[:num_tokens], 1]
        again = bring_back(prefix, prompt)
        assert_reads(again, LONG[: num_tokens // 32 * 32])
        prefix.release(again)


def test_a_turn_that_begins_within_a_page_of_a_window_has_the_page_stored(short_window):
    """What is attached by copy is copied with the rows before its window: so the page is whole when it is full."""
    prefix, first = short_window, short_window.attach(LONG[:90]).sequence
    write(first, LONG[:90])
    prefix.insert(first, LONG[:90])
    turn = [*LONG[:86], *range(200, 230)]
    second = prefix.attach(turn).sequence
    assert second.length == 86 and second.start(1) == 67
    write(second, turn)
    prefix.release(second, turn)
    prefix.release(first)
    assert_reads(bring_back(prefix, turn), turn[:96])
    prefix.fetch(turn[:65])
    prefix.flush()
    assert_reads(prefix.attach(turn[:80]).sequence, turn[:79])


def test_what_a_failed_copy_was_to_store_is_not_kept(prefix, host, monkeypatch):
    compute(prefix, PROMPT)

    def fail(*_):
        raise DriverError("injected", call="copy", code="FAKE_INJECTED")

    with monkeypatch.context() as patch:
        patch.setattr(prefix.cache.pool.driver, "copy", fail)
        with pytest.raises(DriverError):
            prefix.flush()
    assert_reads(bring_back(prefix, PROMPT), [])
    assert host.stats().held_bytes == 0


def with_the_last_rows_alone(prefix, text):
    """A running sequence with a text, inserted, of which it has taken all but a few rows from a beam whose window is past."""
    source, target = (prefix.attach(text[:5]).sequence for _ in range(2))
    write(source, text[:60])
    write(target, [*text[:5], *range(100, 155)])
    source.advance_start(1)
    prefix.cache.copy_rows([(source, target)], 5, 60)
    prefix.release(source)
    write(target, text)
    prefix.insert(target, text)
    return target


def test_a_page_that_lacks_its_first_rows_is_not_stored(short_window):
    prefix = short_window
    prefix.release(with_the_last_rows_alone(prefix, LONG[:70]))
    assert_reads(bring_back(prefix, LONG[:40]), [])
    assert_reads(bring_back(prefix, LONG[:70]), [])


def test_rows_that_a_page_on_the_device_lacks_are_fetched(short_window):
    prefix = short_window
    compute(prefix, LONG[:70])
    prefix.flush()
    prefix.evict()
    target = with_the_last_rows_alone(prefix, LONG[:70])
    assert prefix.match(LONG[:65]) == 64 and prefix.match(LONG[:61]) == 60, "the last rows are there"
    assert prefix.match(LONG[:50]) == 0
    fetch = prefix.fetch(LONG[:50])
    assert fetch.num_tokens == 32 and fetch.size_bytes == PAGE_BYTES
    prefix.flush()
    again = prefix.attach(LONG[:50]).sequence
    assert_reads(again, LONG[:32])
    prefix.release(again)
    prefix.release(target)


@pytest.mark.parametrize("ends", [(113,), (65, 113), (33, 65, 97, 113)])
def test_of_a_path_in_a_disk_tier_that_shrinks_its_beginning_is_kept(pool, tmp_path, ends):
    """Also where it grew turn by turn, and so its end was written last."""
    for num_pages in (20, 4, 2):
        with KVCache(LAYOUT, pool, slots=4, max_tokens=512) as cache:
            disk = DiskTier(tmp_path, num_pages * PAGE_BYTES)
            prefix = PrefixCache(cache, [disk], fingerprint="model")
            for num_tokens in ends if num_pages == 20 else ():
                compute(prefix, LONG[:num_tokens])
                prefix.flush()
            prefix.evict()
            assert disk.stats().held_bytes == min(7, num_pages) * PAGE_BYTES
            assert_reads(bring_back(prefix, LONG), LONG[: min(7, num_pages) * 16])
        disk.close()


def test_without_tiers_nothing_is_fetched_and_nothing_is_made(cache, driver):
    prefix = PrefixCache(cache)
    compute(prefix, PROMPT)
    calls = Calls(driver)
    assert prefix.fetch(PROMPT) is None and not prefix.poll() and prefix.flush()
    assert calls.made() == {} and prefix.stats().tiers == ()


def test_tiers_without_a_fingerprint_are_refused(cache, host):
    with pytest.raises(ValueError, match="fingerprint: none"):
        PrefixCache(cache, [host])


def test_a_tier_whose_records_are_no_pages_is_refused_by_the_size_that_works(cache):
    with pytest.raises(ValueError, match=f"records of 4096 bytes; .* record_bytes={PAGE_BYTES}"):
        PrefixCache(cache, [HostTier(PAGE_BYTES, record_bytes=4096)], fingerprint="model")
