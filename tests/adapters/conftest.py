"""A pool that keeps the laws over real memory, and a real model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vmmkv import GIB, Pool
from vmmkv.driver.host import HostDriver
from vmmkv.server.models import resolve
from vmmkv.testing.fake_driver import FakeDriver


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct; fetched if it is not here yet."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than they bring in models this small, many times more on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


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
