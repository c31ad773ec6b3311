"""Store: bytes of any engine in tiers. Random use, and failures, are in tests/laws/test_store_machine.py."""

import contextlib
import ctypes
import itertools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.laws.faulty_tier import FaultyTier
from vmmkv.driver import open_driver
from vmmkv.driver.base import DONE
from vmmkv.tiers import DiskTier, HostTier, KeyChain, Put, Refusal, Store
from vmmkv.tiers.mover import Run
from vmmkv.tiers.store import BufferCopier

SIZE = 3 * 4096
KEYS = KeyChain("model", every=16).of(range(16 * 40)).keys()


def block(number):
    """A block of an engine: two layers of K and V, which lie apart."""
    return [torch.full((SIZE // 4,), number + layer, dtype=torch.uint8) for layer in range(4)]


BLOCKS = []
"""All that were given to a store: it knows addresses alone, and memory that is freed may be another's."""


def spans(layers):
    BLOCKS.append(layers)
    return [(layer.data_ptr(), layer.numel()) for layer in layers]


@pytest.fixture
def host():
    tier = HostTier(4 * SIZE, record_bytes=SIZE)
    yield tier
    tier.close()


@pytest.fixture
def disk(tmp_path):
    tier = DiskTier(tmp_path, 32 * SIZE, record_bytes=SIZE)
    yield tier
    tier.close()


def test_what_is_put_is_got_from_any_tier_that_has_it(host, disk):
    with Store([host, disk]) as store:
        for number in range(10):
            assert store.lookup([KEYS[number]]) == [False]
            put = store.put(KEYS[number], spans(given := block(number)))
            assert not put.done
            assert store.flush() and put.done
            assert put.answers == {"host": Refusal.THERE, "disk": Refusal.THERE}
            for layer in given:
                layer.zero_()  # the engine uses the block again
        assert store.lookup(KEYS[:11]) == [True] * 10 + [False]
        for number in (9, *range(10)):
            got = block(99)
            get = store.get(KEYS[number], spans(got))
            assert not get.done
            assert store.flush() and get.found
            assert all(torch.equal(one, other) for one, other in zip(got, block(number), strict=True))
        missing = store.get(KEYS[10], spans(block(0)))
        assert store.flush() and missing.found is False
        assert [tier.loaded_bytes > 0 for tier in store.stats()] == [True, True]


def test_what_comes_from_one_tier_is_brought_to_those_that_lack_it(host, disk):
    with Store([host, disk]) as store:
        for number in range(8):  # the host keeps four
            store.put(KEYS[number], spans(block(number)))
            store.flush()
        assert host.lookup(KEYS[:1]) == [False]
        assert store.get(KEYS[0], spans(block(9))) and store.flush()
        assert host.lookup(KEYS[:1]) == [True]


def test_a_poll_brings_one_record_to_another_tier_when_its_time_is_over(host, disk):
    given = [torch.full((SIZE,), number, dtype=torch.uint8) for number in range(4)]
    with Store([disk]) as store:
        for start in (0, 4):
            store.put(KEYS[start : start + 4], spans(given))
        store.flush()
    with Store([host, disk]) as store:
        for start, ends in ((0, True), (4, False)):  # the second time the store is closed meanwhile
            get, held = store.get(KEYS[start : start + 4], spans(given)), [host.stats().stored_bytes]
            while not get.done:
                store.poll(0)
            assert get.found and host.stats().stored_bytes <= held[0] + SIZE, "the get waits for none of them"
            while ends and not store.is_idle:
                store.poll(0)
                held.append(host.stats().stored_bytes)
            assert {after - before for before, after in itertools.pairwise(held)} <= {0, SIZE}
        assert 4 * SIZE <= host.stats().stored_bytes <= 5 * SIZE
    disk.close()


def test_a_record_that_a_tier_misses_comes_from_another(host, disk):
    forgets = FaultyTier(host, 0, ["forgets"], chance=0)
    with Store([forgets, disk]) as store:
        store.put(KEYS[0], spans(block(1)))
        store.flush()
        forgets.chance = 1.0
        get = store.get(KEYS[0], spans(got := block(9)))
        assert store.flush() and get.found and torch.equal(got[0], block(1)[0])
        assert disk.stats().loaded_bytes == SIZE


def together(numbers):
    """Blocks one behind the other, and a block of zeroes for each."""
    return [layer for number in numbers for layer in block(number)], [layer for _ in numbers for layer in block(99)]


def test_records_that_are_put_together_are_got_together_or_one_by_one(host, disk):
    with Store([host, disk]) as store:
        store.put(KEYS[1], spans(block(1)))
        store.flush()
        given, got = together([0, 1, 2])
        store.put(KEYS[:3], spans(given))  # one of them is there
        assert store.flush() and store.lookup(KEYS[:4]) == [True] * 3 + [False]
        both, single = store.get([KEYS[2], KEYS[0]], spans(got[:8])), store.get(KEYS[1], spans(got[8:]))
        assert store.flush() and both.found and single.found
        assert all(map(torch.equal, got, [*block(2), *block(0), *block(1)]))


def test_of_records_that_are_got_together_all_are_found_or_none(host, disk):
    with Store([host, disk]) as store:
        store.put(KEYS[:2], spans(together([0, 1])[0]))
        store.flush()
        get = store.get(KEYS[:3], spans(together([0, 1, 2])[1]))
        assert store.flush() and get.found is False
        with pytest.raises(ValueError, match="there twice"):
            store.put([KEYS[0], KEYS[0]], spans(together([0, 0])[0]))
        with pytest.raises(ValueError, match=f"spans of {SIZE} bytes for 2 records"):
            store.put(KEYS[:2], spans(block(0)))


def test_of_records_that_are_got_together_one_that_a_tier_misses_comes_from_another(host, disk):
    forgets = FaultyTier(host, 0, ["forgets"], chance=0)
    with Store([forgets, disk]) as store:
        given, got = together([0, 1, 2])
        store.put(KEYS[:3], spans(given))
        store.flush()
        host.drop(host.load(KEYS[1]))
        forgets.chance = 1.0
        get = store.get(KEYS[:3], spans(got))
        assert store.flush() and get.found and all(map(torch.equal, got, given))


def test_answers_tell_a_tier_that_has_a_record_from_one_without_room_or_time(host, disk):
    with Store([host, disk]) as store:
        store.put(KEYS[0], spans(block(0)))
        store.flush()
        again = store.put(KEYS[0], spans(block(0)))
        assert store.flush() and {*again.answers.values()} == {Refusal.THERE}
        full = [host.load(KEYS[0])] + [host.store(key) for key in KEYS[10:13]]
        busy = [disk.store(key) for key in KEYS[20:40]] + [disk.load(KEYS[0]) for _ in range(8192)]
        busy = [transfer for transfer in busy if transfer and not isinstance(transfer, Refusal)]
        put = store.put(KEYS[1], spans(block(1)))
        store.poll()
        assert not put.done and put.answers == {"host": Refusal.NO_ROOM, "disk": Refusal.NOT_NOW}
        for tier, transfers in ((host, full), (disk, busy)):
            for transfer in transfers:
                tier.drop(transfer)
        assert store.flush() and put.done and {*put.answers.values()} == {Refusal.THERE}


def test_what_no_tier_takes_or_finds_is_waited_for_no_longer_than_was_said(host):
    tier = FaultyTier(host, 0, ["refuses", "asks"], chance=1.0)
    with Store([tier]) as store:
        late = [store.put(KEYS[0], spans(block(0)), timeout_s=0), store.get(KEYS[1], spans(block(0)), timeout_s=0)]
        waits = [store.put(KEYS[2], spans(block(0))), store.get(KEYS[3], spans(block(0)))]
        store.poll()
        assert [each.done for each in late] == [True, True] and late[0].answers == {tier.name: Refusal.NOT_NOW}
        store.poll()
        assert not any(each.done for each in waits)
        for each in waits:
            each.give_up()
        assert all(each.done for each in waits) and not store.poll()


def test_a_tier_of_this_engine_alone_gets_what_is_worth_it(host, disk):
    with Store([host, disk]) as store:
        store.worth = lambda name: name == "disk"
        put = store.put(KEYS[0], spans(block(0)))
        assert store.flush() and put.answers == {"disk": Refusal.THERE}


def test_a_tier_that_raises_is_a_miss_and_is_counted(host, disk):
    gone = FaultyTier(host, 0, ["raises"], chance=1.0)
    with Store([gone, disk]) as store:
        put = store.put(KEYS[0], spans(block(0)))
        assert store.flush() and put.answers["disk"] is Refusal.THERE
        get = store.get(KEYS[0], spans(block(9)))
        assert store.flush() and get.found and store.errors and len(store.stats()) == 1


def test_what_is_no_record_of_the_store_is_refused_by_what_is(host, tmp_path):
    with pytest.raises(ValueError, match="tiers: none; give one at least"):
        Store([])
    other = HostTier(4096, record_bytes=4096)
    other.name = "small"
    with pytest.raises(ValueError, match=f"host with record_bytes={SIZE} and small with record_bytes=4096; .* of one size"):
        Store([host, other])
    with Store([host]) as store:
        buffer = ctypes.create_string_buffer(SIZE)
        for call in (store.put, store.get):
            with pytest.raises(ValueError, match=f"spans of 4096 bytes: .* has {SIZE}; .*record_bytes=4096"):
                call(KEYS[0], [(ctypes.addressof(buffer), 4096)])
            with pytest.raises(ValueError, match="spans of 0 bytes"):
                call(KEYS[0], [])
            with pytest.raises(ValueError, match="a key is 32 bytes, as KeyChain gives"):
                call(b"short", [(ctypes.addressof(buffer), SIZE)])


def test_keys_are_those_of_the_tokens_that_were_given_whatever_becomes_of_their_array():
    root, tokens = KeyChain("model", every=16), np.full(64, 1, np.int32)
    first = root.of(tokens[:32])
    tokens[:48] = 2
    assert first.grown(tokens[:48]) is None, "it goes on from other tokens"
    assert first.keys() == root.of([1] * 32).keys()


def test_an_announcement_that_raises_costs_no_memory_of_tiers(host, disk):
    faulty = [FaultyTier(host, 0, ()), FaultyTier(disk, 0, ())]

    class Announced(Put):
        def portions(self, tier, has):
            for portion in super().portions(tier, has):
                yield portion._replace(announce=lambda numbers: 1 // 0)

    store = Store(faulty)
    store.queue(Announced(store, faulty, KEYS[0], spans(block(1)), DONE, math.inf), faulty)
    for _ in faulty:
        with pytest.raises(ZeroDivisionError):
            store.poll()
    assert not store.poll() and not any(tier.lent for tier in faulty)
    store.put(KEYS[0], spans(block(1)))
    assert store.flush() and store.lookup(KEYS[:1]) == [True]
    store.close()


def test_what_one_tier_gives_is_brought_to_others_before_its_memory_goes_back(host, disk):
    with Store([disk]) as one:
        one.put(KEYS[0], spans(block(1)))
        assert one.flush()
    lent = FaultyTier(disk, 0, ())
    host_store = host.store

    def store_while_lent(key):
        assert [transfer.key for transfer in lent.lent] == [key]
        return host_store(key)

    with Store([host, lent]) as store:
        host.store = store_while_lent
        store.get(KEYS[0], spans(block(2)))
        assert store.flush() and host.lookup(KEYS[:1]) == [True]


def test_few_bytes_are_copied_to_the_host_at_once_and_loads_go_on(monkeypatch):
    copier = BufferCopier(open_driver("cpu"))
    ended = []
    monkeypatch.setattr(copier.driver, "fence", lambda: SimpleNamespace(done=lambda: bool(ended)))
    nothing = SimpleNamespace(size_bytes=0, copy=lambda driver, runs, *, is_load: None)
    for _ in range(2):
        assert copier.has_room(is_load=False)
        copier.copy(nothing, [Run(0, 0, 32 << 20)], is_load=False)
    assert not copier.has_room(is_load=False) and copier.has_room(is_load=True)
    ended.append(True)
    assert copier.has_room(is_load=False)


def test_threads_share_a_store(host, disk):
    with Store([host, disk]) as store, ThreadPoolExecutor(4) as threads:

        def wait(for_):
            while not for_.done:
                store.poll(0)
                time.sleep(1e-3)

        def use(number):
            wait(store.put(KEYS[number], spans(block(number))))
            wait(get := store.get(KEYS[number], spans(got := block(99))))
            return get.found and torch.equal(got[3], block(number)[3])

        assert all(threads.map(use, [0, 1, 2, 3] * 4))  # as many as the host keeps


def test_a_worth_that_raises_costs_no_memory_of_tiers(host, disk):
    with Store([disk]) as one:
        one.put(KEYS[0], spans(block(1)))
        assert one.flush()
    store = Store([host, disk])
    store.worth = lambda name: 1 // 0
    store.get(KEYS[0], spans(block(2)))
    with contextlib.suppress(ZeroDivisionError):
        store.flush()
    store.close()  # and then the tiers, which have lent nothing any more
