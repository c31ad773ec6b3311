"""The pool: budget, size classes, what is evicted first, and what it says when nothing can be."""

import gc
import re

import pytest
import torch

from tests.unit.support import launch_over
from vmmkv import BudgetError, Closed, DriverError, KVCache, KVLayout, OutOfPages, Pool
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import MIB, PAGE_BYTES

# 512 KiB a row: 4 tokens a page.
LAYOUT = KVLayout.uniform(layers=4, kv_heads=8, head_dim=2048, dtype=torch.float32)
TOKENS_PER_PAGE = 4
NULL_PAGES = 1
"""A page of the pool's own, beyond its budget."""


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
def pool(driver):
    pool = Pool("cpu", 20 * PAGE_BYTES, driver=driver)
    yield pool
    for cache in list(pool.caches):
        cache.close()
    pool.closed = True  # it need not be: what tests acquire themselves is on a fake device


def new_cache(pool, slots=4):
    return KVCache(LAYOUT, pool, slots=slots, max_tokens=32)


def opened(cache, num_pages, **options):
    sequence = cache.open(**options)
    sequence.grow(num_pages * TOKENS_PER_PAGE)
    sequence.advance()  # else it would be blank when parked
    return sequence


def counts(pool):
    stats = pool.stats()
    return tuple(size // PAGE_BYTES for size in (stats.created_bytes, stats.held_bytes, stats.free_bytes))


# what is refused


@pytest.mark.parametrize(
    ("error", "message", "budget_bytes"),
    [
        *[(BudgetError, f"below one page; the least is {PAGE_BYTES} (2.0 MiB)", size) for size in (-1, PAGE_BYTES - 1)],
        (BudgetError, "more than the 128.0 TiB that a process has addresses for", 10**21),
        (TypeError, "budget_bytes=5242880.0 is not a whole number; give an int", 5242880.0),
        (TypeError, "budget_bytes='64MiB' is not a whole number; give an int, such as 64 * vmmkv.MIB", "64MiB"),
        (TypeError, "budget_bytes=None is not a whole number", None),
    ],
)
def test_what_is_no_budget_is_refused(error, message, budget_bytes, pool, driver):
    for use in (pool.resize, lambda size: Pool("cpu", size, driver=driver)):
        with pytest.raises(error, match=re.escape(message)):
            use(budget_bytes)
    assert pool.budget_bytes == 20 * PAGE_BYTES
    with pytest.raises(BudgetError, match="below one page"):
        Pool("cpu", 0, driver=driver)


@pytest.mark.parametrize("device", ["gpu", "CPU", "cuda:x", "mps", "cpu:1", None])
def test_a_device_that_there_is_not_is_answered_with_those_that_there_are(device):
    with pytest.raises(ValueError, match="choose 'cpu'"):
        Pool(device, 2 * PAGE_BYTES)
    Pool("cpu:0", PAGE_BYTES).close()


# extents


def test_extents_come_in_size_classes_and_are_used_again(pool, driver):
    small, large = pool.acquire(2), pool.acquire(1, 16)
    assert counts(pool) == (18, 18, 0)
    for extent in (*small, *large):
        pool.drop(extent)
    assert counts(pool) == (18, 0, 18)
    assert set(pool.acquire(2)) == set(small)
    assert pool.acquire(1, 16) == large
    assert driver.calls["create"] == 3
    for extent in (*small, *large):
        pool.drop(extent)
    pool.acquire(5)  # the large one gives way
    assert counts(pool) == (5, 5, 0)
    assert driver.calls["release"] == 1
    with pytest.raises(ValueError, match=r"the pages are \(16, 4, 1\)"):
        pool.acquire(1, 2)
    with pytest.raises(ValueError, match="the count is at least 0"):
        pool.acquire(-1)


def test_the_last_holder_frees_an_extent_once(pool):
    (extent,) = pool.acquire(1)
    pool.hold(extent)
    pool.drop(extent)
    assert counts(pool) == (1, 1, 0)
    pool.drop(extent)
    assert counts(pool) == (1, 0, 1)
    with pytest.raises(AssertionError, match="dropped more often than held"):
        pool.drop(extent)
    with pytest.raises(AssertionError, match="acquired, not held"):
        pool.hold(extent)


# resizing


def test_resize_evicts_the_oldest_parked_as_far_as_needed_or_nothing(pool):
    cache = new_cache(pool)
    opened(cache, 4)
    parked = [opened(cache, 2).park() for _ in range(3)]
    with pytest.raises(BudgetError, match=rf"8\.0 MiB that running sequences hold.*at least {4 * PAGE_BYTES} bytes"):
        pool.resize(3 * PAGE_BYTES)
    assert cache.parked() == parked
    assert (pool.budget_bytes, counts(pool)) == (20 * PAGE_BYTES, (10, 10, 0))
    pool.resize(6 * PAGE_BYTES)
    assert cache.parked() == parked[2:]
    pool.resize(4 * PAGE_BYTES)
    assert counts(pool) == (4, 4, 0)


def test_a_budget_of_nothing_gives_all_back_but_addresses_until_there_is_another(pool, driver):
    cache = new_cache(pool)
    addresses = cache.k(0).data_ptr()
    sequence = opened(cache, 2)
    with pytest.raises(BudgetError, match="at least"):
        pool.resize(0)
    sequence.park()
    pool.resize(0)
    assert counts(pool) == (0, 0, 0)
    assert driver.live_handles == 1, "the null page"
    with pytest.raises(OutOfPages):
        opened(cache, 1)
    pool.resize(20 * PAGE_BYTES)
    assert cache.k(0).data_ptr() == addresses
    opened(cache, 2)
    cache.check()


# eviction


def test_the_least_recently_parked_slot_of_any_cache_goes_first(pool):
    one, two = new_cache(pool), new_cache(pool)
    first, second, third = opened(two, 6).park(), opened(one, 6).park(), opened(two, 6).park()
    opened(one, 4)
    assert (one.parked(), two.parked()) == ([second], [third])
    assert first not in two.parked()
    opened(two, 8, tenant="other")
    assert (one.parked(), two.parked()) == ([], [third])


def test_nothing_is_evicted_for_what_can_never_fit(pool):
    one, two = new_cache(pool), new_cache(pool)
    parked = opened(one, 8).park()
    running = [opened(two, 6), opened(two, 5)]
    with pytest.raises(OutOfPages, match=r"11 pages .* 1 are free and 8 can be evicted"):
        pool.acquire(11)
    assert one.parked() == [parked]
    running[1].grow(8 * TOKENS_PER_PAGE)
    assert one.parked() == []


def test_a_fence_is_waited_for_only_when_nothing_else_is_left(pool, driver):
    cache = new_cache(pool)
    busy = opened(cache, 8)
    launch = launch_over(driver, cache, busy)
    opened(cache, 8).park()  # behind the launch
    busy.close()
    pool.acquire(4)  # created, within the budget
    assert not launch.finished
    with pytest.raises(OutOfPages, match="pending reclaim"):
        pool.acquire(1, wait=False)
    assert len(cache.parked()) == 1, "what is pending is enough: no parked slot had to go"
    pool.acquire(1)
    assert launch.finished
    assert len(cache.parked()) == 1


def test_a_parked_slot_whose_work_is_done_goes_before_a_fence_is_waited_for(pool, driver):
    cache = new_cache(pool)
    opened(cache, 8).park()  # before the launch
    busy = opened(cache, 8)
    launch = launch_over(driver, cache, busy)
    busy.close()
    pool.acquire(8)
    assert not launch.finished
    assert cache.parked() == []


def test_a_device_with_less_memory_than_the_budget_gives_what_is_free_then_says_so(driver):
    driver.memory_bytes = (5 + NULL_PAGES) * PAGE_BYTES
    with Pool("cpu", 20 * PAGE_BYTES, driver=driver) as pool:
        cache = new_cache(pool)
        parked = opened(cache, 3).park()
        sequence = opened(cache, 3)
        sequence.grow(5 * TOKENS_PER_PAGE)  # evicts
        assert parked not in cache.parked()
        with pytest.raises(
            OutOfPages,
            match=r"no memory left below this pool's budget of 40\.0 MiB \(10\.0 MiB created\).*lower budget",
        ):
            sequence.grow(7 * TOKENS_PER_PAGE)
        assert sequence.limit == 5 * TOKENS_PER_PAGE
        cache.check()


def test_a_little_free_memory_of_other_classes_stays_while_there_is_some_to_evict(pool, driver):
    pool.resize(64 * PAGE_BYTES)
    cache = new_cache(pool, slots=20)
    for _ in range(7):
        opened(cache, 8).park()
    single = pool.acquire(8)
    for extent in single[:2]:
        pool.drop(extent)
    assert counts(pool) == (64, 62, 2)
    pool.acquire(1, 4)
    assert (driver.calls["release"], len(cache.parked())) == (0, 6)
    pool.drop(single[2])
    pool.acquire(2, 4)
    assert driver.calls["release"] == 1, "what is more than a thirty-second part of the budget"


def test_no_more_is_unmapped_than_is_wanted(pool, driver):
    one, two = new_cache(pool), new_cache(pool)
    opened(one, 8).close()
    opened(two, 8).close()
    opened(one, 4)
    before = driver.calls["unmap"]
    sequence = opened(two, 1)
    assert driver.calls["unmap"] - before == 1, "of four pages"
    sequence.grow(4 * TOKENS_PER_PAGE)
    assert driver.calls["unmap"] - before == 1
    sequence.grow(5 * TOKENS_PER_PAGE)
    assert driver.calls["unmap"] - before == 2


# its end


def test_close_gives_everything_back_and_is_idempotent(pool, driver):
    assert repr(pool) == "<Pool on cpu: 0 caches, 40.0 MiB of 40.0 MiB free>"
    cache = new_cache(pool)
    opened(cache, 3)
    assert repr(pool) == "<Pool on cpu: 1 cache, 34.0 MiB of 40.0 MiB free>"
    cache.close()
    pool.close()
    pool.close()
    assert (driver.live_handles, driver.used_bytes, repr(pool)) == (0, 0, "<Pool on cpu, closed>")
    for use in (lambda: pool.acquire(1), lambda: pool.resize(4 * MIB), lambda: new_cache(pool)):
        with pytest.raises(Closed, match="this pool is closed"):
            use()


def test_a_pool_closes_the_caches_that_are_still_open(driver):
    with pytest.raises(RuntimeError, match="mine"), Pool("cpu", 20 * PAGE_BYTES, driver=driver) as pool:
        one, two = new_cache(pool), new_cache(pool)
        sequence = opened(one, 3)
        launch = launch_over(driver, one, sequence)
        opened(two, 2).park()
        raise RuntimeError("mine")
    assert (pool.closed, one.closed, two.closed, sequence.closed, launch.finished) == (True,) * 5
    assert (driver.live_handles, driver.live_mappings, driver.used_bytes) == (0, 0, 0)
    with pytest.raises(Closed, match="this cache is closed"):
        one.open()


def test_a_pool_that_failed_to_close_has_closed_what_it_could_and_can_be_closed_again(pool, driver):
    one, two = new_cache(pool), new_cache(pool)
    opened(one, 2)
    opened(two, 2)
    driver.fail_at = {driver.num_calls}
    with pytest.raises(DriverError, match="told to fail"):
        pool.close()
    assert sorted([one.closed, two.closed]) == [False, True]
    pool.close()
    assert one.closed and two.closed
    assert driver.live_handles == 0


@pytest.mark.filterwarnings("ignore:.*Cache.*was not closed:ResourceWarning")
def test_what_was_forgotten_is_closed_with_its_pool_or_says_so(driver):
    pool = Pool("cpu", 4 * PAGE_BYTES, driver=driver)
    opened(KVCache(LAYOUT, pool, slots=1, max_tokens=8), 1)
    gc.collect()
    pool.close()
    assert driver.live_handles == 0
    pool = Pool("cpu", 4 * PAGE_BYTES, driver=driver)
    pool.acquire(1)
    with pytest.warns(ResourceWarning, match=r"holding 2\.0 MiB was not closed"):
        del pool
        gc.collect()
