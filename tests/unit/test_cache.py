"""KVCache by example: what each call costs, how it refuses bad input, and defects that were found once.

That rows, limits and books are right under any order of calls is proved in tests/laws.
"""

import contextlib
import copy
import errno
import gc
import itertools
import os
import pickle
import re
import signal
import threading
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.unit.support import LAYOUT, ROW_BYTES, TOKENS_PER_PAGE, WINDOWED, Calls, grown, launch_over
from vmmkv import (
    BudgetError,
    Closed,
    DriverError,
    Evicted,
    ForkedProcess,
    GraphCapture,
    Group,
    KVCache,
    KVLayout,
    LayoutError,
    OutOfPages,
    OutOfSlots,
    Plane,
    Pool,
    RowsUnmapped,
    SequenceTooLong,
)
from vmmkv.driver.base import Reservations
from vmmkv.driver.host import HostDriver
from vmmkv.errors import OutOfAddresses
from vmmkv.layout import KVType
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import PAGE_BYTES
from vmmkv_kernels.quantise import quantise


@pytest.fixture
def pool_pages():
    return 16


@pytest.fixture
def cache(pool):
    with KVCache(LAYOUT, pool, slots=4, max_tokens=128) as cache:
        yield cache


@pytest.fixture
def windowed(pool):
    with KVCache(WINDOWED, pool, slots=2, max_tokens=256) as cache:
        yield cache


def written(cache, num_tokens):
    """A sequence with token t's rows full of t."""
    sequence = grown(cache, num_tokens)
    numbers = torch.arange(num_tokens, dtype=torch.float32).view(-1, 1, 1)
    for layer in cache.layout.group_of:
        sequence.k(layer)[:num_tokens] = numbers
        sequence.v(layer)[:num_tokens] = -numbers
    return sequence


# what is refused


def new(cache, layout=LAYOUT, **sizes):
    return KVCache(layout, cache.pool, **{"slots": 1, "max_tokens": 1, **sizes})


NO_LAYER = "no layer 4 in this cache; it has [0, 1, 2, 3]"
NO_NUMBER = "whole number"
CUDA_STREAM = SimpleNamespace(device=torch.device("cuda:1"))
REFUSALS = [
    (ValueError, "slots=0, max_tokens=1, guard_tokens=0: slots and", lambda c, s, p: new(c, slots=0)),
    (ValueError, "must be at least 1, guard_tokens at least 0", lambda c, s, p: new(c, max_tokens=0)),
    (ValueError, "must be at least 1, guard_tokens at least 0", lambda c, s, p: new(c, guard_tokens=-1)),
    (ValueError, "must stay below 2**31", lambda c, s, p: new(c, max_tokens=2**31 - 1, guard_tokens=1)),
    (TypeError, "takes a KVLayout and a Pool", lambda c, s, p: KVCache(c.pool, LAYOUT, slots=1, max_tokens=1)),
    (TypeError, NO_NUMBER, lambda c, s, p: new(c, slots=1.0)),
    (TypeError, NO_NUMBER, lambda c, s, p: new(c, max_tokens=1.5)),
    (ValueError, "max_tokens=0: a sequence has at least 1", lambda c, s, p: c.open(max_tokens=0)),
    (SequenceTooLong, "max_tokens=129 is more than this cache's slots have", lambda c, s, p: c.open(max_tokens=129)),
    (TypeError, "max_tokens=True is not a whole number", lambda c, s, p: c.open(max_tokens=True)),
    (TypeError, NO_NUMBER, lambda c, s, p: c.open(max_tokens=2.5)),
    (ValueError, "count=0: a batch has at least 1", lambda c, s, p: c.open_batch(0)),
    (TypeError, NO_NUMBER, lambda c, s, p: c.open_batch(1.5)),
    (OutOfSlots, "4 adjacent slots are wanted; 1 of 4 run sequences; close some", lambda c, s, p: c.open_batch(4)),
    (OutOfSlots, "5 adjacent slots are wanted", lambda c, s, p: c.open_batch(5)),
    (ValueError, "num_tokens=-1: it cannot be negative", lambda c, s, p: s.grow(-1)),
    (SequenceTooLong, "slot 1 cannot have 101 tokens: it was opened with max_tokens=100", lambda c, s, p: s.grow(101)),
    (TypeError, NO_NUMBER, lambda c, s, p: s.grow(2.5)),
    (TypeError, NO_NUMBER, lambda c, s, p: s.grow("7")),
    (RowsUnmapped, "20 tokens and memory for 32: it cannot advance to 33; grow first", lambda c, s, p: s.advance(13)),
    (ValueError, "num_tokens=-1: at least 0", lambda c, s, p: s.advance(-1)),
    (TypeError, NO_NUMBER, lambda c, s, p: s.advance(1.9)),
    (RowsUnmapped, "no sequence runs in slot 0: it is null", lambda c, s, p: c.advance([1, 0])),
    (RowsUnmapped, "no sequence runs in slot 4: it is free", lambda c, s, p: c.advance([1, 4])),
    (RowsUnmapped, "no sequence runs in slot 2: it is parked", lambda c, s, p: c.advance([1, 2])),
    (ValueError, "there is no slot 99: this cache has slots 1 to 4", lambda c, s, p: c.advance([99])),
    (ValueError, "there is no slot 5", lambda c, s, p: c.advance([1, 5])),
    (ValueError, "there is no slot -99", lambda c, s, p: c.advance([-99])),
    (ValueError, "slot -1", lambda c, s, p: c.advance([-1], 0)),
    (RowsUnmapped, "it cannot advance to 33; grow first", lambda c, s, p: c.advance([1, 1], [6, 7])),
    (TypeError, NO_NUMBER, lambda c, s, p: c.advance([1.0])),
    (TypeError, NO_NUMBER, lambda c, s, p: c.advance([1], [0.5])),
    (LayoutError, NO_LAYER, lambda c, s, p: c.k(4)),
    (LayoutError, NO_LAYER, lambda c, s, p: s.k(4)),
    (LayoutError, "no plane 'q' in this group; it has k, v", lambda c, s, p: c.view(0, "q")),
    (LayoutError, "no plane 'q' in this group; it has k, v", lambda c, s, p: s.view(0, "q")),
    (ValueError, "num_tokens=21: the sequence in slot 1 has 20 tokens to keep", lambda c, s, p: s.truncate(21)),
    (ValueError, "num_tokens=-1: the sequence in slot 1", lambda c, s, p: s.truncate(-1)),
    (TypeError, NO_NUMBER, lambda c, s, p: s.truncate(0.5)),
    (TypeError, NO_NUMBER, lambda c, s, p: s.park(0.5)),
    (ValueError, "give the numbers of rows in ascending order, each once, of 20", lambda c, s, p: s.compact([3, 2])),
    (ValueError, "keep=[2, 2]: give the numbers", lambda c, s, p: s.compact([2, 2])),
    (ValueError, "keep=[0, 20]: give the numbers", lambda c, s, p: s.compact([0, 20])),
    (ValueError, "keep=[-1]: give the numbers", lambda c, s, p: s.compact([-1])),
    (ValueError, "keep=3: give the numbers", lambda c, s, p: s.compact(3)),
    (ValueError, "keep names no row; truncate(0) takes back all", lambda c, s, p: s.compact([])),
    (ValueError, "keep: a mask of shape (19,); the sequence in slot 1 has 20 rows", lambda c, s, p: s.compact([True] * 19)),
    (TypeError, "are not whole numbers but float64", lambda c, s, p: s.compact([0.0, 1.0])),
    (ValueError, "group 0 has no window: all its rows are needed", lambda c, s, p: s.advance_start(0)),
    (ValueError, "group=1: this cache has groups 0 to 0", lambda c, s, p: s.start(1)),
    (TypeError, NO_NUMBER, lambda c, s, p: s.start(0.0)),
    (ValueError, "num_tokens=31: slot 2 was parked with 30 tokens", lambda c, s, p: c.adopt(p, 31)),
    (ValueError, "num_tokens=-1: slot 2 was parked", lambda c, s, p: c.adopt(p, -1)),
    (ValueError, "slot 2 was parked by another tenant", lambda c, s, p: c.adopt(p, tenant="blue")),
    (SequenceTooLong, "30 parked tokens are adopted by a sequence of max_tokens=20", lambda c, s, p: c.adopt(p, max_tokens=20)),
    (TypeError, "parked=None is a NoneType; give a ParkedSlot", lambda c, s, p: c.adopt(None)),
    (TypeError, "is a Sequence; give a ParkedSlot", lambda c, s, p: c.evict(s)),
    (TypeError, "sequence=None is a NoneType; give a Sequence of this cache", lambda c, s, p: c.fork(None)),
    (TypeError, "sequence=None is a NoneType", lambda c, s, p: c.fork_batch([None])),
    (TypeError, "sequence=None is a NoneType", lambda c, s, p: c.copy_rows([(s, None)], 0, 1)),
    (ValueError, "a fork makes at least 1 sequence", lambda c, s, p: c.fork(s, 0)),
    (OutOfSlots, "4 slots are wanted and 3 of 4 run no sequence", lambda c, s, p: c.fork(s, 4)),
    (SequenceTooLong, "20 tokens are forked to sequences of max_tokens=19", lambda c, s, p: c.fork(s, max_tokens=19)),
    (ValueError, "none was named to fork", lambda c, s, p: c.fork_batch([])),
    (ValueError, "budget_us=-1: time to spend is at least 0", lambda c, s, p: c.map_ahead(-1)),
    (ValueError, "budget_us=nan", lambda c, s, p: c.map_ahead(float("nan"))),
    (ValueError, "lookahead_tokens=-1", lambda c, s, p: c.map_ahead(lookahead_tokens=-1)),
    (TypeError, NO_NUMBER, lambda c, s, p: c.map_ahead(lookahead_tokens=1.5)),
    (TypeError, "stream=None is a NoneType; give a torch.Stream", lambda c, s, p: c.record_stream(None)),
    (ValueError, "a stream of cuda:1 cannot be recorded", lambda c, s, p: c.record_stream(CUDA_STREAM)),
    (TypeError, NO_NUMBER, lambda c, s, p: c.pool.resize(16.0 * PAGE_BYTES)),
    (TypeError, "count=1.5 is not a whole number", lambda c, s, p: c.pool.acquire(1.5)),
    (TypeError, "a Sequence can be neither pickled nor copied", lambda c, s, p: copy.copy(s)),
    (TypeError, "a KVCache can be neither pickled nor copied", lambda c, s, p: copy.deepcopy(c)),
    (TypeError, "a Pool can be neither pickled nor copied", lambda c, s, p: pickle.dumps(c.pool)),
    (TypeError, "a ParkedSlot can be neither pickled nor copied", lambda c, s, p: pickle.dumps(p)),
]


def test_bad_input_is_refused_in_our_words_and_changes_nothing(cache, driver):
    sequence, parked = grown(cache, 20, max_tokens=100), grown(cache, 30).park()
    before, calls = cache.stats(), driver.num_calls
    for number, (error, message, use) in enumerate(REFUSALS):
        with pytest.raises(error, match=re.escape(message)) as caught:
            use(cache, sequence, parked)
        assert caught.type is error, (number, message)
        assert (cache.stats(), driver.num_calls, cache.parked()) == (before, calls, [parked]), (number, message)
    sequence.grow(np.int64(25))
    sequence.advance(torch.tensor(2))
    assert sequence.length == 22
    cache.check()


def test_a_budget_below_a_page_for_each_group_is_refused(driver):
    with Pool("cpu", PAGE_BYTES, driver=driver) as pool:
        with pytest.raises(BudgetError, match=r"2\.0 MiB cannot hold a page for each of 2 groups; the least is 4\.0 MiB"):
            KVCache(WINDOWED, pool, slots=1, max_tokens=10)
        KVCache(LAYOUT, pool, slots=1, max_tokens=10)


def test_more_addresses_than_a_process_has_are_refused_at_once(pool):
    group = Group(layers=(0,), planes=(Plane(name="k", heads=1, dim=PAGE_BYTES // 2, dtype=torch.float16),))
    wide = KVLayout(groups=(group,))  # 8,192 slots of 2**30 tokens are 2**64 bytes, which wrap around to nothing
    with pytest.raises(ValueError, match=r"slots=8191 of max_tokens=1073741824 take 16777216.0 TiB of addresses"):
        KVCache(wide, pool, slots=8191, max_tokens=2**30)
    with pytest.raises(ValueError, match=r"at most slots=[1-9][0-9]+ of that length can$"):
        KVCache(LAYOUT, pool, slots=2**70, max_tokens=1)
    assert pool.driver.calls["reserve"] == 0


@pytest.mark.parametrize("layout", [LAYOUT, WINDOWED], ids=["one group", "two groups"])
def test_refused_slots_name_the_most_slots_and_the_most_tokens_that_fit(layout):
    with Pool("cpu", 4 * PAGE_BYTES, driver=FakeDriver()) as pool:

        def make(slots=500, max_tokens=2**26):
            KVCache(layout, pool, slots=slots, max_tokens=max_tokens, guard_tokens=77).close()

        with pytest.raises(OutOfAddresses) as caught:
            make()
        fits = caught.value
        make(slots=fits.slots)
        make(max_tokens=fits.max_tokens)
        for more in ({"slots": fits.slots + 1}, {"max_tokens": fits.max_tokens + 1}):
            with pytest.raises(OutOfAddresses):
                make(**more)


def test_out_of_pages_says_what_would_work(cache):
    grown(cache, 128)
    sequence = cache.open()
    sequence.grow(112)
    message = (
        r"slot 2 cannot grow to 128 tokens: 1 page \(2\.0 MiB\) is needed, 0 are free and 0 can be evicted; resize\(\) "
        r"the budget to at least 33554432 bytes \(32\.0 MiB\), close or park sequences, or ask for fewer tokens"
    )
    cache.pool.resize(15 * PAGE_BYTES)
    with pytest.raises(OutOfPages, match=message):
        sequence.grow(128)
    cache.pool.resize(33554432)
    sequence.grow(128)


# opening and growing


def test_a_page_that_passes_to_a_group_of_other_types_is_zeroed_first():
    """Bytes that are numbers of one type can be NaN of another."""

    def half(name, dtype):
        return Plane(name=name, heads=1, dim=PAGE_BYTES // 2 // dtype.itemsize, dtype=dtype)

    some = Group(layers=(0,), planes=(half("k", torch.uint8), half("v", torch.float16)))
    others = Group(layers=(1,), planes=(half("k", torch.float16), half("v", torch.uint8)))
    driver = FakeDriver(creates_zeroed=False)
    with (
        Pool("cpu", 2 * PAGE_BYTES, driver=driver) as pool,
        KVCache(KVLayout(groups=(some, others)), pool, slots=1, max_tokens=1) as cache,
    ):
        grown(cache, 1).close()
        cache.drain()
        zeroed = driver.calls["zero"]
        grown(cache, 1).close()
        cache.drain()
        assert driver.calls["zero"] == zeroed, "each page came back to its group"
        for extent in pool.acquire(2):
            pool.drop(extent)  # the one that is freed last is given first
        grown(cache, 1)
        assert driver.calls["zero"] == zeroed + 2


def test_a_new_sequence_is_empty_and_costs_no_driver_call(cache, driver):
    calls = Calls(driver)
    sequence = cache.open(max_tokens=30, tenant="red")
    assert calls.made() == {}
    assert (sequence.slot, sequence.length, sequence.limit, sequence.start()) == (1, 0, 0, 0)
    assert (sequence.max_tokens, sequence.tenant, sequence.closed) == (30, "red", False)
    assert sequence.k(0).shape == (0, 8, 512)
    assert repr(sequence) == "<Sequence in slot 1: 0 tokens, room for 0 of 30>"
    assert repr(cache) == "<KVCache on cpu: 1 sequence in 4 slots>"


def test_growing_maps_whole_pages_and_nothing_when_enough_is_mapped(cache, driver):
    sequence = cache.open()
    calls = Calls(driver)
    sequence.grow(17)
    assert sequence.limit == 32
    assert calls.made() == {"create": 2, "map": 2, "set_access": 2, "write": 1}
    calls = Calls(driver)
    for num_tokens in (0, 1, 17, 32):
        sequence.grow(num_tokens)
    sequence.advance(32)
    assert calls.made() == {}
    assert cache.limit.tolist() == cache.limits.tolist() == [0, 32, 0, 0, 0]


def test_many_slots_advance_at_once_or_none(cache):
    for sequence in cache.open_batch(3):
        sequence.grow(16)
    cache.advance([1, 2, 3])
    cache.advance(np.array([3, 1]), [3, 4])
    cache.advance([])
    with pytest.raises(RowsUnmapped, match="slot 2 has 1 token and memory for 16: it cannot advance to 17"):
        cache.advance([1, 2], [1, 16])
    assert cache.lengths.tolist() == [0, 5, 1, 4, 0]


def test_in_steady_state_a_step_makes_no_driver_call(cache, driver):
    sequences = cache.open_batch(2)
    for sequence in sequences:
        sequence.grow(16)
    for _ in range(100):
        calls = Calls(driver)
        for sequence in sequences:
            sequence.grow(sequence.length + 1)
        cache.advance([sequence.slot for sequence in sequences])
        assert calls.made() == {}
        cache.map_ahead(lookahead_tokens=4)
    assert cache.stats().blocked_steps == 0


# views


def test_counts_are_seen_and_not_written_by_users(cache):
    lengths, limits = cache.lengths, cache.limits
    for array in (lengths, limits):
        with pytest.raises(ValueError, match="read-only"):
            array[1] = 1
    grown(cache, 3)
    assert (lengths[1], limits[1]) == (3, 16)


def test_torch_itself_refuses_to_go_past_what_is_mapped(cache):
    sequence = cache.open()
    empty = sequence.k(0)
    sequence.grow(1)
    view = sequence.v(3)
    with pytest.raises(IndexError):
        view[16]
    for bad in (view, empty):
        with pytest.raises(RuntimeError, match="out of bounds"):
            bad.as_strided((17, 8, 512), sequence.k(0).stride())
    assert view.untyped_storage().nbytes() == PAGE_BYTES


@pytest.mark.parametrize("kv_type", [KVType("fp8"), KVType("fp8", "head"), KVType("int8"), KVType("int4")], ids=str)
def test_quantised_rows_come_back_as_they_were_written(pool, kv_type):
    layout = KVLayout.uniform(layers=3, kv_heads=3, head_dim=64, dtype=kv_type)
    per_token = kv_type.scale == "token"
    with KVCache(layout, pool, slots=2, max_tokens=700) as cache:
        _, sequence = cache.open_batch(2)
        sequence.grow(700)
        kept = {}
        for layer in range(3):
            for name in ("k", "v"):
                x_TKD = torch.randn(700, 3, 64) * (1 + layer)
                payload, scales = quantise(x_TKD, kv_type.kind, None if per_token else torch.full((3,), 0.25))
                sequence.view(layer, name)[:700] = payload
                if per_token:
                    sequence.view(layer, "scales")[:700, :, "kv".index(name)] = scales
                kept[layer, name] = payload, scales
        for (layer, name), (payload, scales) in kept.items():
            whole, one = (owner.view(layer, name) for owner in (cache, sequence))
            assert (whole.dtype, whole.shape[2:]) == (payload.dtype, payload.shape[1:])
            for rows in (whole[sequence.slot, :700], one[:700]):
                assert torch.equal(rows.view(torch.uint8), payload.view(torch.uint8))
            assert whole.data_ptr() % 16 == 0 and whole.stride(1) * whole.element_size() % 16 == 0
            if per_token:
                batched, single = (getattr(owner, f"{name}_scale")(layer) for owner in (cache, sequence))
                assert batched.shape[2:] == (3,) and batched.stride(2) == 2
                assert torch.equal(batched[sequence.slot, :700], scales) and torch.equal(single[:700], scales)
        if not per_token:
            for owner in (cache, sequence):
                with pytest.raises(LayoutError, match="no plane 'scales' in this group; it has k, v"):
                    owner.k_scale(0)


# truncating, windows, parking


def test_growing_again_revives_truncated_pages_without_a_driver_call(cache, driver):
    sequence = written(cache, 60)
    calls = Calls(driver)
    sequence.truncate(20)
    assert calls.made() == {"write": 1}
    assert (sequence.length, sequence.limit) == (20, 32)
    assert cache.stats().pending_reclaim_bytes == 2 * PAGE_BYTES
    sequence.truncate(17)  # within a page: for nothing
    assert calls.made() == {"write": 1}
    sequence.grow(60)
    assert calls.made() == {"write": 2}
    assert sequence.limit == 64
    assert sequence.k(0)[:20, 0, 0].tolist() == list(range(20))


def test_growing_again_revives_extents_of_several_pages_while_work_runs(cache, driver):
    sequence = grown(cache, 128)
    launch_over(driver, cache, sequence)
    sequence.truncate(40)
    calls = Calls(driver)
    cache.map_ahead(lookahead_tokens=80)
    assert sequence.limit == 128
    sequence.truncate(40)
    sequence.grow(128)
    assert set(calls.made()) == {"write"}
    assert [mapping.extent.num_pages for mapping in cache.slots.memory.spans(sequence.slot)[0].live()] == [4, 4]


def test_a_windowed_group_gives_rows_back_for_good(windowed, driver):
    sequence = written(windowed, 150)
    sequence.advance_start(1, 70)
    for start in (69, 112):
        with pytest.raises(ValueError, match=f"start_token={start} .* is 70 now, .* window of 40 .* from 111 on"):
            sequence.advance_start(1, start)
    mappings = driver.live_mappings
    sequence.advance_start(1)
    windowed.map_ahead()
    assert mappings - driver.live_mappings == 3  # rows [0, 96) of 32 a page
    assert (sequence.start(0), sequence.start(1)) == (0, 111)
    assert (len(sequence.k(0)), len(sequence.k(1)), sequence.k(1)[0, 0, 0], sequence.v(3)[38, 0, 0]) == (160, 49, 111, -149)
    assert windowed.stats().token_bytes == (150 + 39) * 64 * 1024
    for act in (sequence.truncate, sequence.park):
        with pytest.raises(RowsUnmapped, match=r"window of group 1 begins at row .* rows before 111 are gone"):
            act(149)
    parked = sequence.park()
    with pytest.raises(RowsUnmapped, match="with 140 tokens the window of group 1 begins at row 101"):
        windowed.adopt(parked, 140)
    assert windowed.adopt(parked).k(1)[0, 0, 0] == 111


def test_adopting_a_parked_slot_costs_the_write_of_its_limit(cache, driver):
    parked = written(cache, 40).park()
    assert (parked.slot, parked.length, parked.num_pages) == (1, 40, 3)
    assert repr(parked) == "<ParkedSlot in slot 1: 40 tokens in 3 pages>"
    assert cache.parked() == [parked]
    calls = Calls(driver)
    sequence = cache.adopt(parked, 33)
    assert calls.made() == {"write": 1}
    assert (sequence.length, sequence.limit) == (33, 48)
    assert sequence.k(1)[:33, 0, 0].tolist() == list(range(33))
    assert cache.stats().adopted_slots == 1
    with pytest.raises(Evicted, match="slot 1 is parked no longer: it was evicted or adopted; open a new sequence"):
        cache.adopt(parked)


def test_a_blank_slot_is_opened_by_its_tenant_with_what_is_mapped(cache, driver):
    grown(cache, 40, tenant="red").park(0)
    other = cache.open(tenant="blue")
    assert (other.slot, other.limit) == (2, 0)
    calls = Calls(driver)
    sequence = cache.open(tenant="red", max_tokens=45)
    sequence.grow(45)
    assert calls.made() == {"write": 1}
    assert (sequence.slot, sequence.length, sequence.limit) == (1, 0, 45)


def test_with_no_slot_free_a_tenant_takes_its_oldest_parked_one_over(cache, driver):
    for _ in range(4):
        grown(cache, 20).park()
    calls = Calls(driver)
    sequence = cache.open()
    assert calls.made() == {"write": 1}
    assert (sequence.slot, sequence.length, sequence.limit) == (1, 0, 32)


def test_a_tenants_own_memory_is_not_zeroed_again(cache):
    grown(cache, 64, tenant="red").close()
    cache.map_ahead()
    cache.open(tenant="red").grow(64)
    assert "zero" not in cache.stats().driver_calls


def test_a_batch_of_forks_stands_in_adjacent_slots_and_shares_full_pages(pool):
    with KVCache(LAYOUT, pool, slots=8, max_tokens=128) as cache:
        num_tokens = 2 * TOKENS_PER_PAGE + 3
        parents = [written(cache, num_tokens) for _ in range(2)]
        parents[1].k(0)[:] += 100
        held = pool.held_bytes
        forks = cache.fork_batch([parents[1], parents[0], parents[1]])
        first = forks[0].slot
        assert [fork.slot for fork in forks] == [first, first + 1, first + 2]
        assert pool.held_bytes == held + 3 * PAGE_BYTES  # the last page of each
        for parent in parents:
            parent.close()
        batch = cache.k(0)[first : first + 3, :num_tokens, 0, 0]
        assert batch.tolist() == [[mark + row for row in range(num_tokens)] for mark in (100, 0, 100)]
        cache.check()


def test_truncating_owned_pages_needs_no_page(cache, driver):
    sequence = written(cache, 3 * TOKENS_PER_PAGE)
    (fork,) = cache.fork(sequence)
    held, cut = cache.pool.held_bytes, TOKENS_PER_PAGE + 5
    cache.pool.resize(held)
    with pytest.raises(OutOfPages):
        fork.own_from(cut)
    assert (fork.length, cache.pool.held_bytes) == (3 * TOKENS_PER_PAGE, held)
    cache.pool.resize(held + PAGE_BYTES)
    fork.own_from(cut)
    assert (fork.length, cache.pool.held_bytes) == (3 * TOKENS_PER_PAGE, held + PAGE_BYTES)
    assert fork.k(0)[:, 0, 0].tolist() == sequence.k(0)[:, 0, 0].tolist() == list(range(3 * TOKENS_PER_PAGE))
    calls = Calls(driver)
    fork.own_from(cut)
    assert calls.made() == {}
    fork.truncate(cut)
    assert calls.made() == {"write": 1}  # the limit, and neither map nor unmap
    fork.k(0)[cut] = -1
    assert sequence.k(0)[cut, 0, 0] == cut
    cache.check()


# fewer rows


@pytest.mark.parametrize("guard_tokens", [0, 5])
def test_the_memory_of_dropped_rows_returns(pool, driver, guard_tokens):
    with KVCache(LAYOUT, pool, slots=2, max_tokens=128, guard_tokens=guard_tokens) as cache:
        sequence = written(cache, 120)
        calls = Calls(driver)
        sequence.compact(torch.arange(120) % 3 == 0)
        assert calls.made() == {"write": 1}  # the limit; neither map nor unmap
        cache.drain()
        wanted_pages = -(-(40 + guard_tokens) * ROW_BYTES // PAGE_BYTES)
        assert wanted_pages == 3 and cache.stats().mapped_bytes == pool.stats().used_bytes == 4 * PAGE_BYTES, "one extent"
        assert (sequence.length, sequence.position, sequence.limit) == (40, 120, 4 * 16 - guard_tokens)
        assert sequence.k(3)[:40, 0, 0].tolist() == list(range(0, 120, 3))
        cache.check()


def test_forks_and_cuts_know_which_tokens_their_rows_hold(cache):
    sequence = written(cache, 20)
    sequence.compact([1, 9, 19])
    (fork,) = cache.fork(sequence)
    assert (fork.positions().tolist(), fork.position) == ([1, 9, 19], 20)
    fork.truncate(2)
    fork.advance()
    assert (fork.positions().tolist(), fork.position) == ([1, 9, 19], 20), "token 19 comes next again"
    fork.truncate(0)
    fork.grow(2)
    fork.advance(2)
    assert fork.positions().tolist() == [0, 1]
    assert sequence.positions().tolist() == [1, 9, 19]


@pytest.mark.parametrize("chunk_rows", [1, 3, 1000])
def test_no_row_is_written_before_it_is_read(pool, monkeypatch, chunk_rows):
    monkeypatch.setattr("vmmkv.memory.sharing.CHUNK_BYTES", chunk_rows * ROW_BYTES)
    narrow = Group(layers=(4,), planes=tuple(Plane(name=name, heads=1, dim=96, dtype=torch.float32) for name in "kv"))
    with KVCache(KVLayout(groups=(*LAYOUT.groups, narrow)), pool, slots=1, max_tokens=100) as cache:
        for _ in range(5):
            sequence = written(cache, 100)
            rows = (torch.rand(100) < torch.rand(())).nonzero()[:, 0]
            if len(rows):
                sequence.compact(rows)
                for layer, sign in itertools.product(range(5), (1, -1)):
                    kept = (sequence.k if sign == 1 else sequence.v)(layer)[: len(rows)]
                    assert torch.equal(kept, sign * rows.float().view(-1, 1, 1).expand_as(kept))
            sequence.close()


# ahead of need


def test_map_ahead_serves_the_nearest_deadline_and_never_passes_an_end(cache, driver):
    newcomer, near, far = cache.open(max_tokens=30), cache.open(max_tokens=17), cache.open()
    for sequence, num_tokens in ((near, 16), (far, 10)):
        sequence.grow(16)
        sequence.advance(num_tokens)
    calls = Calls(driver)
    for limits in ((0, 17, 16), (0, 17, 32), (16, 17, 32)):  # without tokens last: no step waits for it
        assert cache.map_ahead(0.0, lookahead_tokens=8) == 1
        assert (newcomer.limit, near.limit, far.limit) == limits
    assert cache.map_ahead(lookahead_tokens=8) == 0
    assert calls.made() == {"create": 3, "map": 3, "set_access": 3, "write": 3}
    assert cache.stats().mapped_ahead_pages == 3


def test_map_ahead_serves_every_next_token_before_any_lookahead(cache):
    first, second = grown(cache, 16), grown(cache, 16)
    cache.pool.resize(4 * PAGE_BYTES)
    assert cache.map_ahead(lookahead_tokens=32) == 2
    assert (first.limit, second.limit) == (32, 32)


def test_map_ahead_evicts_no_slot_that_running_work_may_touch(cache, driver):
    cache.pool.resize(8 * PAGE_BYTES)
    idle, busy = grown(cache, 33).park(), grown(cache, 33)
    launch = launch_over(driver, cache, busy)
    busy = busy.park()
    running = grown(cache, 32)
    assert cache.map_ahead(lookahead_tokens=16) == 1 + 2  # the idle one gives a page, and the rest is unmapped
    assert running.limit == 48
    assert cache.parked() == [busy] and idle not in cache.parked()
    launch.finish()
    assert cache.map_ahead(lookahead_tokens=96) > 0
    assert running.limit == 128


@pytest.mark.parametrize(("budget_pages", "mapped"), [(0.0, 1), (3.5, 3), (6.5, 6), (20.0, 8)])
def test_the_budget_of_map_ahead_is_shared_among_the_groups(windowed, budget_pages, mapped):
    windowed.slots.memory.mapper.map_us = windowed.slots.memory.mapper.unmap_us = 1e6  # what it really takes is little
    windowed.open()
    assert windowed.map_ahead(budget_pages * 1e6, lookahead_tokens=128) == mapped
    ends = [span.end_page for span in windowed.slots.memory.spans(1)]
    assert max(ends) - min(ends) <= 1, "no group is far ahead of another"
    windowed.check()


def test_lookahead_follows_from_the_cost_of_mapping_and_the_sequences(windowed):
    windowed.open_batch(2)
    map_us = windowed.slots.memory.mapper.map_us
    assert windowed.lookahead_tokens(4 * map_us) == 2
    assert windowed.lookahead_tokens(map_us) == 5
    assert windowed.lookahead_tokens(0.0) > 100


# waiting


@pytest.fixture
def clock(monkeypatch):
    """The real one, on which `late_s` more seconds have passed; `readers` are the threads that looked at it."""
    clock, real_ns = SimpleNamespace(late_s=0, readers=set()), time.perf_counter_ns

    def now_ns():
        clock.readers.add(threading.current_thread())
        return real_ns() + clock.late_s * 10**9

    monkeypatch.setattr(time, "perf_counter_ns", now_ns)
    return clock


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_mapping_is_measured_without_what_finding_pages_took(cache, driver, monkeypatch, clock):
    busy = grown(cache, 128)
    launch_over(driver, cache, busy)
    busy.close()
    cache.pool.resize(8 * PAGE_BYTES)
    fence = cache.slots.memory.mapper.oldest_fence()
    slow = type(fence).wait
    monkeypatch.setattr(type(fence), "wait", lambda self: (setattr(clock, "late_s", 3600), slow(self)))
    cache.open().grow(16)
    assert clock.late_s and cache.slots.memory.mapper.map_us < 60e6, "some of the hour is in it"


@pytest.mark.parametrize("end", [KVCache.drain, KVCache.close])
def test_a_cache_waits_for_its_fences_without_the_lock(cache, pool, driver, end, monkeypatch):
    other = KVCache(LAYOUT, pool, slots=1, max_tokens=64)
    sequence = grown(other, 1)
    launch_over(driver, other, sequence)
    waiting, finish = threading.Event(), threading.Event()
    fence = type(driver.fence())
    slow = fence.wait
    monkeypatch.setattr(fence, "wait", lambda self: (waiting.set(), finish.wait(60), slow(self)))
    sequence.close()
    thread = in_thread(lambda: end(other))
    assert waiting.wait(60)
    running = cache.open()
    running.grow(64)  # would be refused the lock
    assert not finish.is_set() and thread.is_alive()
    assert other.map_ahead() == 0 if end is KVCache.drain else other.closed
    finish.set()
    thread.join()
    assert running.limit == 64
    assert other.stats().pending_reclaim_bytes == 0
    other.close()
    cache.check()


def test_a_blocked_step_is_a_running_sequence_that_waited_for_memory(cache, pool, clock):
    sequence = cache.open()
    sequence.grow(16)
    sequence.advance(16)
    assert cache.stats().blocked_steps == 0
    with pool.lock:
        thread = in_thread(lambda: sequence.grow(20))
        deadline_s = time.monotonic() + 60
        while thread not in clock.readers:
            assert time.monotonic() < deadline_s, "it does not look when it begins"
            time.sleep(0.001)
        clock.late_s += 3600
    thread.join()
    assert cache.stats().blocked_steps == 1
    assert cache.stats().blocked_us > 3600e6
    with pool.lock:  # what lacks nothing does not even wait for the lock
        thread = in_thread(lambda: sequence.grow(20))
        thread.join(60)
        assert not thread.is_alive()
    assert cache.stats().blocked_steps == 1


# what it tells, and its end


def test_stats_are_what_one_counts_by_hand(pool, driver):
    with KVCache(LAYOUT, pool, slots=4, max_tokens=128, guard_tokens=3) as cache:
        grown(cache, 20)  # 23 rows: 2 pages
        grown(cache, 15)  # 18 rows: 2 pages
        grown(cache, 30).park()  # 33 rows: 3 pages
        closing = grown(cache, 5)  # 1 page
        launch = launch_over(driver, cache, closing)
        closing.close()
        stats = cache.stats()
        assert stats.reserved_bytes == (1 + 4) * 144 * ROW_BYTES
        assert stats.mapped_bytes == 7 * PAGE_BYTES
        assert stats.parked_bytes == 3 * PAGE_BYTES
        assert stats.pending_reclaim_bytes == PAGE_BYTES
        assert stats.token_bytes == 35 * ROW_BYTES
        assert stats.guard_bytes == 6 * ROW_BYTES
        assert stats.waste_bytes == (64 - 35 - 6) * ROW_BYTES
        assert (stats.pool_created_bytes, stats.pool_held_bytes, stats.pool_free_bytes) == (8 * PAGE_BYTES, 8 * PAGE_BYTES, 0)
        assert stats.pool_budget_bytes == 16 * PAGE_BYTES
        assert (stats.num_tokens, stats.num_sequences, stats.num_parked, stats.num_slots) == (35, 2, 1, 4)
        assert (stats.mapped_pages, stats.mapped_ahead_pages, stats.adopted_slots, stats.blocked_steps) == (8, 0, 0, 0)
        launch.finish()
        cache.map_ahead()
        assert (cache.stats().pending_reclaim_bytes, cache.stats().pool_free_bytes) == (0, PAGE_BYTES)


def test_use_of_an_ended_sequence_is_refused(cache):
    with cache.open() as closed:
        closed.grow(5)
    closed.close()
    parked = cache.open()
    parked.park()
    uses = [
        *(lambda s: s.length, lambda s: s.limit, lambda s: s.start(), lambda s: s.k(0), lambda s: s.grow(1)),
        *(lambda s: s.advance(), lambda s: s.truncate(0), lambda s: s.advance_start(0), lambda s: s.park()),
        *(lambda s: s.compact([0]), lambda s: s.position, lambda s: s.positions()),
    ]
    for sequence, use in itertools.product((closed, parked), uses):
        with pytest.raises(Closed, match=f"slot {sequence.slot} was closed or parked; open or adopt another"):
            use(sequence)
    assert repr(closed) == "<Sequence in slot 1, closed>"


def test_a_closed_cache_refuses_everything_and_holds_nothing(pool, driver):
    cache = KVCache(LAYOUT, pool, slots=2, max_tokens=64)
    sequence, parked = grown(cache, 20), grown(cache, 20).park()
    launch = launch_over(driver, cache, sequence)
    cache.close()
    cache.close()
    assert launch.finished
    assert (driver.live_mappings, pool.stats().held_bytes, cache.stats().mapped_bytes) == (0, 0, 0)
    for use in (
        cache.open,
        lambda: cache.open_batch(1),
        lambda: cache.adopt(parked),
        lambda: cache.advance([1]),
        lambda: cache.k(0),
        cache.map_ahead,
        lambda: cache.record_stream(None),
    ):
        with pytest.raises(Closed, match="this cache is closed"):
            use()
    with pytest.raises(Closed):
        sequence.grow(1)
    with pytest.raises(Evicted):
        cache.evict(parked)
    assert repr(cache) == "<KVCache on cpu, closed>"


def test_a_cache_that_was_forgotten_says_so_and_one_that_was_never_made_does_not(pool, driver, recwarn):
    gc.collect()
    recwarn.clear()  # of what other tests have left
    driver.fail_at = {driver.num_calls}
    with pytest.raises(DriverError):
        KVCache(LAYOUT, pool, slots=1, max_tokens=10)
    gc.collect()
    assert not recwarn.list
    cache = KVCache(LAYOUT, pool, slots=1, max_tokens=10)
    with pytest.warns(ResourceWarning, match="was not closed"):
        cache.slots.__del__()
    cache.close()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_is_refused_though_the_lock_was_held(cache, pool):
    sequence, held, over = written(cache, 3), threading.Event(), threading.Event()

    def hold():
        with pool.lock:
            held.set()
            over.wait(60.0)

    uses = [
        *(lambda num_tokens=num_tokens: sequence.grow(num_tokens) for num_tokens in (1, 100)),
        *(sequence.advance, lambda: sequence.k(0), sequence.park, sequence.close, lambda: sequence.truncate(1)),
        *(cache.open, lambda: cache.advance([1]), lambda: cache.k(0), cache.map_ahead, cache.drain, cache.stats, cache.close),
        *(
            pool.stats,
            pool.close,
            lambda: pool.used_bytes,
            lambda: pool.acquire(1),
            lambda: KVCache(LAYOUT, pool, slots=1, max_tokens=1),
        ),
    ]
    thread = in_thread(hold)
    assert held.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(120)  # it may hang
        try:
            for use in uses:
                with pytest.raises(ForkedProcess):
                    use()
            os._exit(0)
        finally:
            os._exit(1)
    over.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    sequence.grow(100)
    assert sequence.k(0)[:3, 0, 0].tolist() == [0, 1, 2]


# defects that were found once


def test_closed_caches_give_their_addresses_to_later_ones_of_the_same_size():
    layout = KVLayout.uniform(layers=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    addresses = set()
    for _ in range(200):  # of 1 TiB; a process has addresses for 124 of them
        with Pool("cpu", 4 * PAGE_BYTES) as pool, KVCache(layout, pool, slots=1, max_tokens=2**22) as cache:
            assert cache.stats().reserved_bytes == 2**40
            sequence = cache.open()
            sequence.grow(1)
            addresses.add(sequence.k(0).data_ptr())
            assert not sequence.k(0).any()
            sequence.k(0)[0] = 7.0
    assert len(addresses) == 1


def test_a_reservation_that_fails_tells_what_open_and_closed_caches_have(monkeypatch):
    refuse = mock.Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory"))
    monkeypatch.setattr("vmmkv.driver.host.reservations", Reservations())
    with Pool("cpu", 4 * PAGE_BYTES) as host, KVCache(LAYOUT, host, slots=3, max_tokens=128):
        KVCache(LAYOUT, host, slots=1, max_tokens=128).close()
        monkeypatch.setattr("vmmkv.driver.host.reserve", refuse)
        with pytest.raises(DriverError, match=r" 64\.0 MiB for open caches, and keeps 32\.0 MiB of closed ones"):
            KVCache(LAYOUT, host, slots=3, max_tokens=12345)


def test_while_a_graph_is_captured_memory_stays_as_it_is(pool, driver, monkeypatch):
    cache, side = KVCache(WINDOWED, pool, slots=4, max_tokens=128), torch.Stream("cpu")
    sequence, source, parked = grown(cache, 20), grown(cache, 20), grown(cache, 20).park()
    grown(cache, 20, tenant="red").park(0)
    cache.record_stream(side)
    cache.record_stream(torch.Stream("cpu"))
    assert len(cache.slots.memory.streams) == 1
    empty = Pool("cpu", PAGE_BYTES, driver=driver)
    before = cache.stats()
    driver.captures = True
    for use in (
        *(cache.open, cache.map_ahead, cache.drain, cache.close, sequence.park, sequence.close, empty.close),
        *(lambda: sequence.grow(100), lambda: sequence.truncate(1), lambda: sequence.own_from(1)),
        lambda: sequence.compact([0]),
        *(lambda: cache.adopt(parked), lambda: cache.fork(sequence), lambda: cache.fork_batch([sequence])),
        *(lambda: cache.open_batch(3), lambda: cache.open(tenant="red"), lambda: pool.resize(4 * PAGE_BYTES)),
        *(lambda: sequence.advance_start(1), lambda: cache.copy_rows([(source, sequence)], 0, 20)),
        lambda: cache.record_stream(torch.Stream("cpu")),
        lambda: KVCache(LAYOUT, pool, slots=1, max_tokens=9),
    ):
        with pytest.raises(GraphCapture, match="a CUDA graph is being captured"):
            use()
        after = cache.stats()
        assert after.driver_calls == before.driver_calls
        assert (after.mapped_bytes, after.num_parked) == (before.mapped_bytes, before.num_parked)
        cache.check()
    sequence.grow(20)
    sequence.advance(1)
    driver.captures = False
    with monkeypatch.context() as patch, pytest.raises(GraphCapture):
        patch.setattr(driver, "is_capturing", lambda streams=(): side in streams)
        sequence.close()
    sequence.close()
    cache.drain()
    empty.close()


def test_a_rollback_survives_a_synchronize_that_fails(cache, driver, monkeypatch):
    sequence = grown(cache, 3)
    fail = mock.Mock(side_effect=DriverError("synchronize was told to fail", call="synchronize", code="FAKE_INJECTED"))
    with monkeypatch.context() as patch:
        patch.setattr(driver, "synchronize", fail)
        driver.fail_at = {driver.num_calls + 9}  # behind six creates, the second page's access call
        with pytest.raises(DriverError, match="told to fail"):
            sequence.grow(100)
        # The first page, and the second, which was mapped without access.
        assert (sequence.limit, cache.stats().pending_reclaim_bytes) == (16, 2 * PAGE_BYTES)
        cache.map_ahead(0.0, lookahead_tokens=0)
        cache.check()
    cache.drain()
    assert cache.stats().pending_reclaim_bytes == 0
    sequence.grow(100)
    cache.check()


def test_a_failed_raise_of_limits_is_written_back(cache, driver, monkeypatch):
    sequence = grown(cache, 40)
    launch_over(driver, cache, sequence)
    sequence.truncate(3)
    write_behind, fails = driver.write_behind, iter([True, False])

    def write_and_fail(tensor, values, streams=()):
        fence = write_behind(tensor, values, streams)
        if next(fails, False):
            raise DriverError("write was told to fail behind its write", call="write", code="FAKE_INJECTED")
        return fence

    monkeypatch.setattr(driver, "write_behind", write_and_fail)
    with pytest.raises(DriverError, match="behind its write"):
        sequence.grow(100)
    assert cache.limit.tolist() == cache.limits.tolist()
    cache.check()
    sequence.grow(100)
    assert cache.limit.tolist() == cache.limits.tolist()


@pytest.mark.parametrize("number", range(6))
def test_a_fork_of_no_rows_that_fails_leaves_nothing_mapped(pool, driver, number):
    with KVCache(LAYOUT, pool, slots=2, max_tokens=64, guard_tokens=16) as cache:  # a page, and a limit of no rows
        cache.record_stream(torch.Stream("cpu"))
        empty = cache.open()
        driver.fail_at = {driver.num_calls + number}
        with contextlib.suppress(DriverError):
            cache.fork(empty)
        driver.fail_at = set()
        cache.check()


def test_an_exchange_whose_copy_fails_leaves_the_shared_page_in_place(cache, driver, monkeypatch):
    parent, copy = grown(cache, 64), driver.copy
    parent.k(0)[:64] = 7.0
    (child,) = cache.fork(parent)
    fail = mock.Mock(side_effect=DriverError("copy: refused", call="copy", code="TEST"))
    copies = iter([copy, lambda *arguments: fail(copy(*arguments))])  # the second: back, into the slot's own page
    monkeypatch.setattr(driver, "copy", lambda *arguments: next(copies)(*arguments))
    with pytest.raises(DriverError, match="refused"):
        child.truncate(20)
    cache.check()
    assert child.length == 64 and (child.k(0)[:64] == 7.0).all()
    other = cache.open(tenant="other")
    other.grow(16)
    assert not other.k(0).any(), "the page that it was copied to counts as written"


@pytest.mark.parametrize("number", range(13))
def test_an_exchange_that_fails_leaves_no_tenant_the_bytes_of_another(number):
    driver = FakeDriver(over=HostDriver())
    with Pool("cpu", 16 * PAGE_BYTES, driver=driver) as pool, KVCache(LAYOUT, pool, slots=4, max_tokens=128) as cache:
        parent, other = grown(cache, 64, tenant="mine"), cache.open(tenant="other")
        for num_tokens in range(1, 129):
            other.grow(num_tokens)  # page by page
        for layer in cache.layout.group_of:
            other.k(layer)[:128] = 7.0
        other.close()
        cache.drain()
        (child,) = cache.fork(parent)
        driver.fail_at = {driver.num_calls + number}
        with contextlib.suppress(DriverError):
            child.truncate(40)
        has_failed, driver.fail_at, zeroed = child.length == 64, set(), driver.calls["zero"]
        cache.check()
        if not has_failed:
            child.close()
            cache.drain()
            cache.open(tenant="mine").grow(16)
            assert driver.calls["zero"] == zeroed, "what was exchanged is its own"
        mine = cache.open(tenant="mine")
        for num_tokens in range(1, 65):
            mine.grow(num_tokens)
        assert not any((mine.k(layer)[:64] == 7.0).any() for layer in cache.layout.group_of)


def test_limits_that_cannot_be_ordered_are_taken_back_and_memory_counts_as_written(cache, driver, monkeypatch):
    sequence = cache.open(tenant="first")
    sequence.grow(16)
    before = cache.limit.tolist()
    with monkeypatch.context() as patch, pytest.raises(DriverError, match="refused"):
        patch.setattr(driver, "order", mock.Mock(side_effect=DriverError("order: refused", call="order", code="TEST")))
        sequence.grow(32)  # the device's limit was raised: a kernel that runs can have written rows
    assert cache.limit.tolist() == before
    cache.check()
    zeroed = driver.calls["zero"]
    cache.open(tenant="second").grow(16)
    assert driver.calls["zero"] > zeroed
    sequence.grow(32)
    assert cache.limit[sequence.slot] == 32
