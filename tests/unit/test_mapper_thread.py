"""The mapper in a thread: it maps ahead of whoever advances, says when it failed, and stops."""

import threading
import time

import pytest
import torch

from vmmkv import Closed, DriverError, KVCache, KVLayout, Pool
from vmmkv.mapper_thread import MapperThread
from vmmkv.units import PAGE_BYTES

# 128 KiB a row: 16 tokens a page.
LAYOUT = KVLayout.uniform(layers=4, kv_heads=8, head_dim=512, dtype=torch.float32)


def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("vmmkv-mapper")]


@pytest.fixture
def cache(driver):
    pool = Pool("cpu", 64 * PAGE_BYTES, driver=driver)
    cache = KVCache(LAYOUT, pool, slots=4, max_tokens=256)
    yield cache
    cache.close()
    pool.close()
    assert driver.live_handles == 0
    assert not threads()


def test_it_maps_ahead_and_nobody_who_advances_stalls(cache):
    sequences = [cache.open() for _ in range(4)]
    for sequence in sequences:
        sequence.grow(1)
    cache.start_mapper(lookahead_tokens=20)
    for token in range(200):
        until(lambda token=token: all(sequence.limit > token for sequence in sequences))
        for sequence in sequences:
            sequence.grow(token + 1)
            sequence.k(0)[token] = token
        cache.advance([sequence.slot for sequence in sequences])
    for sequence in sequences:
        assert torch.equal(sequence.k(0)[:200, 0, 0], torch.arange(200.0))
    stats = cache.stats()
    assert stats.stalls == 0
    assert stats.pumped_pages == stats.mapped_pages - 4
    cache.stop_mapper()
    cache.check()


def test_it_unmaps_what_retires(cache, driver):
    cache.start_mapper()
    sequence = cache.open()
    sequence.grow(100)
    sequence.close()
    until(lambda: driver.live_mappings == 1)  # the pad


def test_growing_and_closing_beside_it_keeps_the_laws(cache):
    cache.start_mapper(lookahead_tokens=40)
    for turn in range(30):
        sequences = [cache.open(tenant=turn % 3) for _ in range(3)]
        for sequence in sequences:
            sequence.grow(30 + turn)
            assert not sequence.k(1)[:, 0, ::97].count_nonzero() or turn >= 3
            sequence.k(1)[:30] = turn
            sequence.advance(30)
        cache.check()
        for sequence in sequences:
            assert (sequence.k(1)[:30, :, ::97] == turn).all()
        sequences[0].truncate(3)
        sequences[0].park()
        sequences[1].park(0)
        sequences[2].close()
        cache.check()


def test_what_it_failed_with_is_raised_by_the_next_grow_that_maps(cache, driver):
    sequence = cache.open()
    driver.fail_at = set(range(driver.num_calls, driver.num_calls + 1))
    cache.start_mapper()
    sequence.expect(100)
    until(lambda: not threads())
    with pytest.raises(DriverError, match="told to fail"):
        sequence.grow(1)
    sequence.grow(1)
    cache.check()
    cache.stop_mapper()


def test_after_its_failure_was_raised_it_starts_again(cache, driver):
    sequence = cache.open()
    for use in (lambda: sequence.grow(1), cache.start_mapper):
        driver.fail_at = {driver.num_calls}
        cache.start_mapper()
        sequence.expect(sequence.limit + 50)
        until(lambda: not threads())
        with pytest.raises(DriverError, match="told to fail"):
            use()
        cache.start_mapper()
        until(lambda: sequence.limit >= 50)
        cache.stop_mapper()
        assert not threads()


def test_what_it_failed_with_is_raised_by_stop_and_by_close_which_closes(driver):
    for stop in (KVCache.stop_mapper, KVCache.close):
        pool = Pool("cpu", 64 * PAGE_BYTES, driver=driver)
        cache = KVCache(LAYOUT, pool, slots=1, max_tokens=256)
        sequence = cache.open()
        driver.fail_at = {driver.num_calls}
        cache.start_mapper()
        sequence.expect(100)
        until(lambda: not threads())
        with pytest.raises(DriverError, match="told to fail"):
            stop(cache)
        assert cache.closed == (stop is KVCache.close)
        cache.stop_mapper()
        cache.close()
        pool.close()


def test_stopping_is_idempotent_and_it_starts_again(cache):
    cache.stop_mapper()
    cache.start_mapper()
    with pytest.raises(ValueError, match=r"runs already; stop_mapper\(\) ends it"):
        cache.start_mapper()
    cache.stop_mapper()
    cache.stop_mapper()
    with pytest.raises(ValueError, match="lookahead_tokens=0: the mapper maps at least 1"):
        cache.start_mapper(lookahead_tokens=0)
    cache.start_mapper(lookahead_tokens=1)
    assert len(threads()) == 1


def test_a_closed_cache_starts_none(driver):
    pool = Pool("cpu", 4 * PAGE_BYTES, driver=driver)
    cache = KVCache(LAYOUT, pool, slots=1, max_tokens=8)
    cache.start_mapper()
    cache.close()
    assert not threads()
    with pytest.raises(Closed):
        cache.start_mapper()
    pool.close()


def test_work_is_called_until_it_returns_false_and_again_when_woken():
    answers, calls, done = iter([True, True, False, True, False]), [], threading.Event()

    def work():
        calls.append(answer := next(answers, False))
        done.set()
        return answer

    thread = MapperThread(work, name="vmmkv-mapper-test")
    thread.wake()
    until(lambda: len(calls) >= 3)
    assert calls[:3] == [True, True, False]
    thread.wake()
    until(lambda: len(calls) >= 5)
    thread.stop()
    thread.stop()
    assert done.is_set()
