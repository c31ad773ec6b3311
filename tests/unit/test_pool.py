"""The pool: budget, size classes, who gives way to whom, and what it says when nobody can."""

import gc

import pytest
import torch

from vmmkv import BudgetError, Closed, DriverError, KVCache, KVLayout, OutOfPages, Pool
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import MIB, PAGE_BYTES

# 512 KiB a row: 4 tokens a page.
LAYOUT = KVLayout.uniform(layers=4, kv_heads=8, head_dim=2048, dtype=torch.float32)
TOKENS_PER_PAGE = 4
PAD = 1
"""A page of the pool's own, beyond its budget."""


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
def pool(driver):
    pool = Pool("cpu", 20 * PAGE_BYTES, driver=driver)
    yield pool
    pool.closed = True  # it need not be: what tests acquire themselves is on a fake device


CACHES = []


@pytest.fixture(autouse=True)
def close_caches():
    yield
    while CACHES:
        CACHES.pop().close()


def new_cache(pool, slots=4):
    CACHES.append(KVCache(LAYOUT, pool, slots=slots, max_tokens=32))
    return CACHES[-1]


def opened(cache, num_pages, **options):
    sequence = cache.open(**options)
    sequence.grow(num_pages * TOKENS_PER_PAGE)
    sequence.advance()  # else it would be blank when parked
    return sequence


def launch_over(driver, cache, sequence):
    base = cache.k(0)[sequence.slot].data_ptr()
    return driver.launch([(base, base + 1)])


def counts(pool):
    stats = pool.stats()
    return tuple(size // PAGE_BYTES for size in (stats.created_bytes, stats.held_bytes, stats.free_bytes))


def test_the_layout_has_the_geometry_these_tests_count_with():
    assert LAYOUT.row_bytes * TOKENS_PER_PAGE == PAGE_BYTES


def test_extents_come_in_two_size_classes_and_are_used_again(pool, driver):
    small, large = pool.acquire(2), pool.acquire(1, 16)
    assert counts(pool) == (18, 18, 0)
    for extent in (*small, *large):
        pool.drop(extent)
    assert counts(pool) == (18, 0, 18)
    assert set(pool.acquire(2)) == set(small)
    assert pool.acquire(1, 16) == large
    assert driver.calls["create"] == 3


def test_a_free_extent_of_another_class_gives_way(pool, driver):
    pool.drop(pool.acquire(1, 16)[0])
    pool.acquire(5)
    assert counts(pool) == (5, 5, 0)
    assert driver.calls["release"] == 1


def test_only_the_two_classes_exist(pool):
    with pytest.raises(ValueError, match=r"the pages are \(1, 16\)"):
        pool.acquire(1, 2)
    with pytest.raises(ValueError, match="the count is at least 0"):
        pool.acquire(-1)


def test_holders_are_counted_and_the_last_frees(pool):
    (extent,) = pool.acquire(1)
    pool.hold(extent)
    pool.drop(extent)
    assert counts(pool) == (1, 1, 0)
    pool.drop(extent)
    assert counts(pool) == (1, 0, 1)


def test_an_extent_is_never_freed_twice_nor_held_when_free(pool):
    (extent,) = pool.acquire(1)
    pool.drop(extent)
    with pytest.raises(AssertionError, match="dropped more often than held"):
        pool.drop(extent)
    with pytest.raises(AssertionError, match="acquired, not held"):
        pool.hold(extent)


def test_more_than_the_budget_is_refused_with_what_would_work(pool):
    pool.acquire(18)
    with pytest.raises(
        OutOfPages,
        match=rf"3 pages \(6\.0 MiB\) are needed, 2 are free and 0 can be evicted.* {21 * PAGE_BYTES} bytes \(42\.0 MiB\)",
    ):
        pool.acquire(3)
    assert counts(pool) == (18, 18, 0)
    pool.resize(21 * PAGE_BYTES)
    pool.acquire(3)


def test_an_acquire_that_fails_midway_leaves_nothing_behind(pool, driver):
    pool.drop(pool.acquire(1)[0])
    driver.fail_at = {driver.num_calls + 2}
    with pytest.raises(DriverError):
        pool.acquire(4)
    assert counts(pool) == (1, 0, 1)
    driver.fail_at = {driver.num_calls + 2, driver.num_calls + 3}
    with pytest.raises(DriverError):
        pool.acquire(4)  # the second created extent cannot be released either: it stays free
    assert counts(pool) == (2, 0, 2)


@pytest.mark.parametrize("budget_bytes", [0, -1, PAGE_BYTES - 1])
def test_a_budget_below_a_page_is_refused(budget_bytes, pool, driver):
    with pytest.raises(BudgetError, match=rf"the least is {PAGE_BYTES} \(2\.0 MiB\)"):
        Pool("cpu", budget_bytes, driver=driver)
    with pytest.raises(BudgetError, match="below one page"):
        pool.resize(budget_bytes)
    assert pool.budget_bytes == 20 * PAGE_BYTES


def test_resize_gives_free_memory_back_and_takes_it_again(pool, driver):
    cache = new_cache(pool)
    sequence = opened(cache, 3)
    opened(cache, 8).close()
    cache.map_ahead()
    assert counts(pool) == (11, 3, 8)
    pool.resize(4 * PAGE_BYTES)
    assert counts(pool) == (4, 3, 1)
    assert driver.used_bytes == (4 + PAD) * PAGE_BYTES
    pool.resize(20 * PAGE_BYTES)
    sequence.grow(32)
    assert counts(pool) == (8, 8, 0)


def test_resize_evicts_the_oldest_parked_as_far_as_needed(pool):
    cache = new_cache(pool)
    parked = [opened(cache, 3).park() for _ in range(3)]
    pool.resize(5 * PAGE_BYTES)
    assert cache.parked() == parked[2:]
    assert counts(pool) == (3, 3, 0) or counts(pool)[0] <= 5


def test_resize_below_what_runs_is_refused_and_nothing_changes(pool):
    cache = new_cache(pool)
    opened(cache, 4)
    parked = opened(cache, 2).park()
    with pytest.raises(BudgetError, match=rf"8\.0 MiB that running sequences hold.*at least {4 * PAGE_BYTES} bytes"):
        pool.resize(3 * PAGE_BYTES)
    assert cache.parked() == [parked]
    assert (pool.budget_bytes, counts(pool)) == (20 * PAGE_BYTES, (6, 6, 0))
    pool.resize(4 * PAGE_BYTES)
    assert counts(pool) == (4, 4, 0)


def test_the_least_recently_parked_slot_of_any_cache_goes_first(pool):
    one, two = new_cache(pool), new_cache(pool)
    first, second, third = opened(two, 6).park(), opened(one, 6).park(), opened(two, 6).park()
    opened(one, 4)
    assert (one.parked(), two.parked()) == ([second], [third])
    assert first not in two.parked()
    opened(two, 8, tenant="other")
    assert (one.parked(), two.parked()) == ([], [third])


def test_a_cache_gives_way_to_another_but_a_running_sequence_does_not(pool):
    one, two = new_cache(pool), new_cache(pool)
    opened(one, 8)
    opened(one, 8).park()
    opened(two, 8)
    sequence = two.open()
    with pytest.raises(OutOfPages, match=r"5 pages .* 0 are free and 4 can be evicted"):
        sequence.grow(5 * TOKENS_PER_PAGE)


def test_nothing_is_evicted_for_what_can_never_fit(pool):
    cache = new_cache(pool, slots=5)
    parked = opened(cache, 8).park()
    for _ in range(2):
        opened(cache, 6)
    with pytest.raises(OutOfPages):
        pool.acquire(9)
    assert cache.parked() == [parked]


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
    assert len(cache.parked()) == 1, "what retires is enough: no parked slot had to go"
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


def test_a_device_with_less_memory_than_the_budget_first_gives_what_is_free_then_says_so(driver):
    driver.memory_bytes = (5 + PAD) * PAGE_BYTES
    pool = Pool("cpu", 20 * PAGE_BYTES, driver=driver)
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
    cache.close()
    pool.close()


def test_a_pool_says_what_of_its_budget_is_free(pool):
    assert repr(pool) == "<Pool on cpu: 0 caches, 40.0 MiB of 40.0 MiB free>"
    sequence = opened(new_cache(pool), 3)
    assert repr(pool) == "<Pool on cpu: 1 cache, 34.0 MiB of 40.0 MiB free>"
    sequence.close()
    CACHES.pop().close()
    pool.close()
    assert repr(pool) == "<Pool on cpu, closed>"


def test_close_gives_everything_back_and_is_idempotent(pool, driver):
    cache = new_cache(pool)
    opened(cache, 3)
    cache.close()
    pool.close()
    pool.close()
    assert (driver.live_handles, driver.used_bytes) == (0, 0)
    for use in (lambda: pool.acquire(1), lambda: pool.resize(4 * MIB), lambda: new_cache(pool)):
        with pytest.raises(Closed, match="this pool is closed"):
            use()


def test_a_pool_closes_with_its_block(driver):
    with Pool("cpu", 4 * PAGE_BYTES, driver=driver) as pool:
        pool.drop(pool.acquire(1)[0])
    assert pool.closed
    assert driver.live_handles == 0


def test_a_pool_closes_the_caches_that_are_still_open(pool, driver):
    one, two = new_cache(pool), new_cache(pool)
    sequence = opened(one, 3)
    launch = launch_over(driver, one, sequence)
    opened(two, 2).park()
    pool.close()
    assert (one.closed, two.closed, sequence.closed, launch.finished) == (True, True, True, True)
    assert (driver.live_handles, driver.live_mappings, driver.used_bytes) == (0, 0, 0)
    with pytest.raises(Closed, match="this cache is closed"):
        one.open()


def test_a_block_that_fails_raises_what_it_failed_with_though_a_cache_is_open(driver):
    with pytest.raises(RuntimeError, match="mine"), Pool("cpu", 4 * PAGE_BYTES, driver=driver) as pool:
        opened(KVCache(LAYOUT, pool, slots=1, max_tokens=8), 1)
        raise RuntimeError("mine")
    assert pool.closed
    assert driver.live_handles == 0


@pytest.mark.filterwarnings("ignore:.*was not closed:ResourceWarning")
def test_a_cache_that_was_forgotten_is_closed_with_its_pool(driver):
    pool = Pool("cpu", 4 * PAGE_BYTES, driver=driver)
    cache = KVCache(LAYOUT, pool, slots=1, max_tokens=8)
    opened(cache, 1)
    del cache
    gc.collect()
    pool.close()
    assert driver.live_handles == 0


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


def test_no_more_is_unmapped_than_is_wanted(pool, driver):
    one, two = new_cache(pool), new_cache(pool)
    opened(one, 8).close()
    opened(two, 8).close()
    opened(one, 4)
    before = driver.calls["unmap"]
    sequence = opened(two, 1)
    assert driver.calls["unmap"] - before == 1
    sequence.grow(4 * TOKENS_PER_PAGE)
    assert driver.calls["unmap"] - before == 4
    one.check()
    two.check()


@pytest.mark.parametrize("budget_bytes", [5242880.0, "5242880", None])
def test_a_budget_is_a_whole_number_of_bytes(budget_bytes, pool, driver):
    for use in (pool.resize, lambda size: Pool("cpu", size, driver=driver)):
        with pytest.raises(TypeError, match=r"budget_bytes=.* is not a whole number; give an int"):
            use(budget_bytes)


def test_a_pool_that_was_forgotten_says_so(driver):
    pool = Pool("cpu", 4 * PAGE_BYTES, driver=driver)
    pool.acquire(1)
    with pytest.warns(ResourceWarning, match=r"holding 2\.0 MiB was not closed"):
        del pool
        gc.collect()


@pytest.mark.parametrize("device", ["gpu", "CPU", "cuda:x", "mps", None])
def test_a_device_that_there_is_not_is_answered_with_those_that_there_are(device):
    with pytest.raises(ValueError, match="choose 'cpu'"):
        Pool(device, 2 * PAGE_BYTES)


def test_a_text_for_a_size_is_answered_with_a_number_of_bytes():
    with pytest.raises(TypeError, match=r"budget_bytes='64MiB' is not a whole number; give an int, such as 64 \* vmmkv.MIB"):
        Pool("cpu", "64MiB")


def test_a_budget_beyond_all_addresses_is_refused():
    with pytest.raises(BudgetError, match=r"more than the 128.0 TiB that a process has addresses for"):
        Pool("cpu", 10**21)


def test_the_host_is_one_device():
    Pool("cpu:0", PAGE_BYTES).close()
    with pytest.raises(ValueError, match="there is no driver for 'cpu:1'"):
        Pool("cpu:1", PAGE_BYTES)
