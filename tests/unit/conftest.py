"""What several of these tests begin with."""

from collections.abc import Iterator

import pytest

from vmmkv.driver.host import HostDriver
from vmmkv.testing.fake_driver import FakeDriver


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """Real memory, and the laws kept over it."""
    below = HostDriver()
    yield FakeDriver(over=below)
    below.close()
