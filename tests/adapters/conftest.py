"""A pool that keeps the laws over real memory."""

from collections.abc import Iterator

import pytest

from vmmkv import GIB, Pool
from vmmkv.driver.host import HostDriver
from vmmkv.testing.fake_driver import FakeDriver


@pytest.fixture
def pool() -> Iterator[Pool]:
    """Real memory, with the laws kept over it: nothing is left in it, and nothing pending reclaim was touched."""
    below = HostDriver()
    driver = FakeDriver(over=below)
    pool = Pool("cpu", GIB, driver=driver)
    yield pool
    assert pool.held_bytes == 0, "a cache was not closed"
    pool.close()
    assert (driver.live_handles, driver.live_mappings) == (0, 0)
    below.close()
