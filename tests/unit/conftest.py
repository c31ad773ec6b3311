"""What several of these tests begin with."""

from collections.abc import Iterator

import pytest

from vmmkv import Pool
from vmmkv.driver.host import HostDriver
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.tier import Tier
from vmmkv.units import PAGE_BYTES


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """Real memory, and the laws kept over it."""
    below = HostDriver()
    yield FakeDriver(over=below)
    below.close()


@pytest.fixture
def pool_pages() -> int:
    """The budget of `pool`."""
    return 32


@pytest.fixture
def pool(driver: FakeDriver, pool_pages: int) -> Iterator[Pool]:
    """Leaves nothing in the driver."""
    pool = Pool("cpu", pool_pages * PAGE_BYTES, driver=driver)
    yield pool
    pool.close()
    assert (driver.live_handles, driver.live_mappings, driver.live_reservations) == (0, 0, 0)


@pytest.fixture
def host() -> Iterator[Tier]:
    from vmmkv import HostTier

    tier = HostTier(64 * PAGE_BYTES)
    yield tier
    tier.close()
