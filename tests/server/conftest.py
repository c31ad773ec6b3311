from collections.abc import Iterator

import pytest

from tests.server.support import Running, running_server


@pytest.fixture
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running
