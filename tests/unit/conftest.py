"""What several of these tests begin with."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.holder_engines import Engine, Process, start_holder
from vmmkv import HostTier, Pool
from vmmkv.driver.host import HostDriver
from vmmkv.testing.fake_driver import FakeDriver
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
    assert (driver.live_handles, driver.live_mappings, driver._reserved) == (0, 0, [])


@pytest.fixture
def host() -> Iterator[HostTier]:
    tier = HostTier(64 * PAGE_BYTES)
    yield tier
    tier.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The socket of `holder`."""
    return tmp_path / "kv.sock"


@pytest.fixture
def holder(path: Path) -> Iterator[Process]:
    """Of handles in host memory."""
    process = start_holder(path)
    yield process
    process.kill()


@pytest.fixture
def opened(path: Path, holder: Process) -> Iterator[Callable[..., Engine]]:
    """An engine in the test's own process. Its books are right when the test ends, and it leaves nothing in its driver."""
    engines: list[Engine] = []

    def opened(**options: Any) -> Engine:
        engines.append(Engine(path, driver=FakeDriver(over=HostDriver()), **options))
        return engines[-1]

    yield opened
    for engine in engines:
        engine.cache.check()
        engine.close()
        assert (engine.pool.driver.live_handles, engine.pool.driver.live_mappings) == (0, 0)
