"""The null page: slot 0 of every arena is mapped, read-only and zero, and never has a sequence."""

import pytest
import torch

from tests.laws.driver_laws import assert_faulted, run_child
from vmmkv import Closed, DriverError, KVCache, KVLayout, OutOfPages, Pool, RowsUnmapped
from vmmkv.memory.address_space import wrap
from vmmkv.testing.fake_driver import FakeDriver, LawBroken
from vmmkv.units import PAGE_BYTES

# Two groups of 64 KiB a row, 32 tokens a page; layers 1 and 3 see the last 40 tokens.
LAYOUT = KVLayout.uniform(layers=4, kv_heads=8, head_dim=512, dtype=torch.float32, windows=[None, 40, None, 40])
CPU = torch.device("cpu")
NUM_PAGES = 8


@pytest.fixture
def pool(driver):
    with Pool("cpu", NUM_PAGES * PAGE_BYTES, driver=driver) as pool:
        yield pool
    assert (driver.live_handles, driver.live_mappings, driver.used_bytes) == (0, 0, 0)


@pytest.fixture
def cache(pool):
    with new_cache(pool) as cache:
        yield cache


def new_cache(pool):
    return KVCache(LAYOUT, pool, slots=2, max_tokens=256)


def bases(cache):
    """Where each arena begins: row 0 of slot 0 of the first layer's first plane."""
    return [cache.k(group.layers[0]).data_ptr() for group in cache.layout.groups]


def stands(driver, cache):
    """Can every tensor over all slots be given to a launcher, and is it the null page that it begins with?"""
    pointers = (view(layer).data_ptr() for layer in cache.layout.group_of for view in (cache.k, cache.v))
    return all(driver.is_read_only(pointer, 1) for pointer in pointers)


def test_a_launcher_finds_zeroes_at_every_view_whatever_happens_to_sequences(cache, driver, pool):
    sequence, other = cache.open(), cache.open(tenant="other")
    assert (sequence.slot, other.slot) == (1, 2)

    def windows():
        sequence.advance(100)
        sequence.advance_start(1)

    for act in (
        lambda: sequence.grow(100),
        windows,
        cache.map_ahead,
        other.close,
        lambda: cache.adopt(sequence.park()).close(),
        lambda: cache.open(tenant="other").grow(32),
        lambda: pool.resize(2 * PAGE_BYTES),
        lambda: cache.map_ahead(lookahead_tokens=100),
    ):
        act()
        assert stands(driver, cache)
        assert (cache.limit[0].item(), cache.limits[0], cache.lengths[0]) == (0, 0, 0)
        cache.check()
    assert not any(wrap(base, PAGE_BYTES, CPU).any() for base in bases(cache))


@pytest.mark.parametrize("creates_zeroed", [True, False])
def test_one_page_is_zeroed_once_and_serves_all_groups_of_all_caches(creates_zeroed):
    driver = FakeDriver(creates_zeroed=creates_zeroed)
    with Pool("cpu", NUM_PAGES * PAGE_BYTES, driver=driver) as pool:
        pool.drop(pool.acquire(1)[0])
        assert pool.null_page.handle is None, "made before a cache needs it"
        with new_cache(pool) as one:
            calls = driver.calls.copy()
            with new_cache(pool) as two:
                assert dict(driver.calls - calls) == {"reserve": 2, "fence": 1, "map": 2, "set_access": 2}
                assert driver.calls["zero"] == (not creates_zeroed)
                assert driver.mappings_of(pool.null_page.handle) == driver.live_mappings == 4
                assert stands(driver, one) and stands(driver, two)
            assert driver.mappings_of(pool.null_page.handle) == driver.live_mappings == 2
            assert stands(driver, one)
    assert (driver.live_handles, driver.live_mappings) == (0, 0)


def test_a_write_to_it_faults(cache, driver):
    (base, _) = bases(cache)
    with pytest.raises(LawBroken, match="not all mapped"):
        driver.launch([(base, base + 1)])
    child = run_child(
        CPU,
        """
from vmmkv import KVCache, KVLayout, Pool
layout = KVLayout.uniform(layers=4, kv_heads=8, head_dim=512, dtype=torch.float32, windows=[None, 40, None, 40])
cache = KVCache(layout, Pool("cpu", 8 * PAGE_BYTES, driver=driver), slots=2, max_tokens=256)
sequence = cache.open()
sequence.grow(1)
cache.k(3)[sequence.slot, 0] = 1  # where a sequence is, the same write is right
assert not cache.k(3)[0, 0].any().item()
print("before", flush=True)
cache.k(3)[0, 0] = 1
print("after", flush=True)
""",
    )
    assert_faulted(CPU, child)


def test_it_is_beyond_the_budget(cache, pool, driver):
    stats = cache.stats()
    assert (stats.pool_created_bytes, stats.pool_held_bytes, stats.mapped_bytes) == (0, 0, 0)
    sequence = cache.open()
    sequence.grow(NUM_PAGES * 16)  # of two groups
    assert cache.stats().mapped_bytes == pool.budget_bytes == pool.stats().created_bytes
    assert driver.used_bytes == (NUM_PAGES + 1) * PAGE_BYTES
    with pytest.raises(OutOfPages, match=r"2 pages .* 0 are free and 0 can be evicted"):
        sequence.grow(NUM_PAGES * 16 + 1)


def test_its_slot_cannot_be_advanced(cache):
    sequence = cache.open()
    sequence.grow(32)
    for slots in ([0], [sequence.slot, 0]):
        with pytest.raises(RowsUnmapped, match="no sequence runs in slot 0: it is null"):
            cache.advance(slots)


def test_it_goes_from_a_closed_cache_once_no_launch_may_read_it_and_with_the_pool(driver):
    pool = Pool("cpu", NUM_PAGES * PAGE_BYTES, driver=driver)
    closing, cache = new_cache(pool), new_cache(pool)
    sequence = cache.open()
    sequence.grow(1)
    base = sequence.k(0).data_ptr()
    launch = driver.launch([(base, base + 1)])  # which may read slot 0 of both
    gone = bases(closing)
    closing.close()
    assert launch.finished
    assert not any(driver.is_read_only(base, 1) for base in gone)
    closing.close()
    cache.close()
    assert (driver.live_mappings, driver.mappings_of(pool.null_page.handle)) == (0, 0)
    pool.close()
    pool.close()
    assert (driver.live_handles, pool.null_page.handle) == (0, None)
    with pytest.raises(Closed):
        new_cache(pool)


# failures


def fresh(failing=()):
    """A driver whose memory is not zero when made, so that a first cache makes every call there is; and a pool over it."""
    driver = FakeDriver(fail_at=set(failing))
    return driver, Pool("cpu", NUM_PAGES * PAGE_BYTES, driver=driver)


def close(cache):
    """The last cache of a pool, and the pool."""
    cache.close()
    cache.pool.close()


FIRST_CALLS = {"reserve": 2, "fence": 1, "create": 1, "map": 2, "set_access": 3, "zero": 1}
"""What a pool's first cache of two groups costs."""
CLOSING_CALLS = {"fence": 1, "unmap": 2, "release": 1}
NUM_FIRST_CALLS, NUM_CLOSING_CALLS = sum(FIRST_CALLS.values()), sum(CLOSING_CALLS.values())


def test_the_calls_are_those_that_are_failed_below():
    driver, pool = fresh()
    cache = new_cache(pool)
    assert dict(driver.calls) == FIRST_CALLS
    before = driver.calls.copy()
    close(cache)
    assert dict(driver.calls - before) == CLOSING_CALLS
    assert driver.num_calls == NUM_FIRST_CALLS + NUM_CLOSING_CALLS


@pytest.mark.parametrize("number", range(NUM_FIRST_CALLS))
def test_a_first_cache_that_fails_leaves_at_most_the_page_and_is_made_at_the_next_attempt(number):
    driver, pool = fresh([number])
    with pytest.raises(DriverError, match="told to fail"):
        new_cache(pool)
    pool.check()
    assert driver.live_mappings == 0
    assert driver.live_handles == (pool.null_page.handle is not None) == driver.used_bytes // PAGE_BYTES
    assert (pool.created_bytes, pool.held_bytes) == (0, 0)
    with new_cache(pool) as cache:
        assert stands(driver, cache)
        cache.open().grow(100)
        cache.check()
        assert driver.calls["create"] - 8 == driver.calls["zero"] - 8 == 1, "the page was made or zeroed twice"
    pool.close()
    assert (driver.live_handles, driver.live_mappings, driver.used_bytes) == (0, 0, 0)


@pytest.mark.parametrize("number", range(NUM_FIRST_CALLS))
@pytest.mark.parametrize("later", [1, 2, 3])
def test_what_could_not_be_undone_goes_with_the_pool(number, later):
    driver, pool = fresh([number, number + later])
    caches = []
    for _ in range(3):
        try:
            caches.append(new_cache(pool))
        except DriverError as error:
            assert error.code == "FAKE_INJECTED"
    assert len(caches) >= 1
    for cache in caches:
        assert stands(driver, cache)
        cache.check()
        cache.close()
    pool.close()
    assert (driver.live_handles, driver.live_mappings, driver.used_bytes) == (0, 0, 0)


@pytest.mark.parametrize("number", range(NUM_CLOSING_CALLS))
def test_a_close_that_fails_is_finished_by_the_next(number):
    driver, pool = fresh()
    cache = new_cache(pool)
    driver.fail_at = {driver.num_calls + number}
    with pytest.raises(DriverError, match="told to fail"):
        close(cache)
    assert pool.closed is False
    close(cache)
    assert driver.calls["unmap"] == 2
    assert (driver.live_handles, driver.live_mappings, driver.used_bytes) == (0, 0, 0)
