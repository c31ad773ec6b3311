"""The null page: slot 0 of every arena is mapped, read-only and zero, and never has a sequence.

That it stays so whatever happens to sequences is an invariant of the machines in tests/laws.
"""

import pytest
import torch

from tests.laws.driver_laws import assert_faulted, run_child
from tests.unit.support import WINDOWED, Calls
from vmmkv import Closed, DriverError, KVCache, Pool
from vmmkv.testing.fake_driver import FakeDriver, LawBroken
from vmmkv.units import PAGE_BYTES

FIRST_CALLS = {"reserve": 1, "fence": 1, "create": 1, "map": 2, "set_access": 3, "zero": 1}
"""What a pool's first cache of two groups costs, where memory is not zero when made."""
CLOSING_CALLS = {"fence": 1, "unmap": 2, "release": 1}
"""What closing it costs, and the pool."""


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
def pool(driver):
    yield (pool := Pool("cpu", 8 * PAGE_BYTES, driver=driver))
    pool.close()
    assert (driver.live_handles, driver.live_mappings, driver.used_bytes) == (0, 0, 0)


def new_cache(pool):
    return KVCache(WINDOWED, pool, slots=2, max_tokens=256)


def stands(driver, cache):
    """Can every tensor over all slots be given to a launcher, and is it the null page that it begins with?"""
    pointers = (view(layer).data_ptr() for layer in cache.layout.group_of for view in (cache.k, cache.v))
    return all(driver.is_read_only(pointer, 1) for pointer in pointers)


def test_one_page_is_zeroed_once_and_serves_all_groups_of_all_caches(pool, driver):
    pool.drop(pool.acquire(1)[0])
    assert pool.null_page.handle is None, "made before a cache needs it"
    calls = Calls(driver)
    with new_cache(pool) as one:
        assert calls.made() == FIRST_CALLS
        calls = Calls(driver)
        with new_cache(pool) as two:
            assert calls.made() == {"reserve": 1, "fence": 1, "map": 2, "set_access": 2}
            assert driver.mappings_of(pool.null_page.handle) == driver.live_mappings == 4
            assert stands(driver, one) and stands(driver, two)
        assert driver.mappings_of(pool.null_page.handle) == driver.live_mappings == 2
        assert stands(driver, one)


def test_where_memory_is_zero_when_made_it_is_not_zeroed():
    driver = FakeDriver(creates_zeroed=True)
    with Pool("cpu", 8 * PAGE_BYTES, driver=driver) as pool, new_cache(pool):
        assert driver.calls["zero"] == 0


def test_a_write_to_it_faults(pool, driver):
    with new_cache(pool) as cache, pytest.raises(LawBroken, match="not all mapped"):
        driver.launch([(cache.k(0).data_ptr(), cache.k(0).data_ptr() + 1)])
    child = run_child(
        torch.device("cpu"),
        """
from tests.unit.support import WINDOWED
from vmmkv import KVCache, Pool
cache = KVCache(WINDOWED, Pool("cpu", 8 * PAGE_BYTES, driver=driver), slots=2, max_tokens=256)
sequence = cache.open()
sequence.grow(1)
cache.k(3)[sequence.slot, 0] = 1  # where a sequence is, the same write is right
assert not cache.k(3)[0, 0].any().item()
print("before", flush=True)
cache.k(3)[0, 0] = 1
print("after", flush=True)
""",
    )
    assert_faulted(torch.device("cpu"), child)


def test_it_goes_from_a_closed_cache_once_no_launch_may_read_it_and_with_the_pool(pool, driver):
    closing, cache = new_cache(pool), new_cache(pool)
    sequence = cache.open()
    sequence.grow(1)
    base, gone = sequence.k(0).data_ptr(), closing.k(0).data_ptr()
    launch = driver.launch([(base, base + 1)])  # which may read slot 0 of both
    closing.close()
    assert launch.finished
    assert not driver.is_read_only(gone, 1)
    cache.close()
    assert (driver.live_mappings, driver.mappings_of(pool.null_page.handle)) == (0, 0)
    pool.close()
    assert (driver.live_handles, pool.null_page.handle) == (0, None)
    with pytest.raises(Closed):
        new_cache(pool)


@pytest.mark.parametrize("number", range(sum(FIRST_CALLS.values())))
@pytest.mark.parametrize("later", [0, 1, 2, 3])
def test_a_first_cache_can_fail_at_any_call_and_the_undoing_too(pool, driver, number, later):
    driver.fail_at = {number, number + later}
    with pytest.raises(DriverError, match="told to fail"):
        new_cache(pool)
    pool.check()
    assert (pool.created_bytes, pool.held_bytes) == (0, 0)
    if not later:
        assert driver.live_mappings == 0
        assert driver.live_handles == (pool.null_page.handle is not None) == driver.used_bytes // PAGE_BYTES
    caches = []
    while len(caches) < 2:
        try:
            caches.append(new_cache(pool))
        except DriverError as error:
            assert later and error.code == "FAKE_INJECTED"
    caches[0].open().grow(100)
    for cache in caches:
        assert stands(driver, cache)
        cache.check()
        cache.close()
    assert driver.calls["create"] - 8 == driver.calls["zero"] - 2 == 1, "the page was made or zeroed twice; others run by run"
