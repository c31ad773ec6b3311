from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.server.support import Running, running_server
from vmmkv.server.protocol import Ready


class _Shared:
    """A server that tests use one after another; another takes its place when a test has ended it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._running: Running | None = None

    def get(self) -> Running:
        one = self._running
        if one is None or not isinstance(one.client.phase, Ready) or one.service.queue.drained_by_s is not None:
            self.close()
            one = self._running = self._stack.enter_context(running_server())
        one.reset()
        return one

    def close(self) -> None:
        self._stack.close()
        self._running = None


@pytest.fixture(scope="session")
def _shared() -> Iterator[_Shared]:
    shared = _Shared()
    yield shared
    shared.close()


@pytest.fixture
def server(_shared: _Shared) -> Running:
    """A server that other tests have used too; its counters go on."""
    return _shared.get()


@pytest.fixture
def fresh() -> Iterator[Running]:
    """A server of this test alone."""
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def _listening() -> Iterator[Running]:
    with running_server(sockets=True) as running:
        yield running


@pytest.fixture
def listening(_listening: Running) -> Running:
    """A server behind sockets, which other tests of the module have used too."""
    _listening.reset()
    return _listening
