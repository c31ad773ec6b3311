from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from tests.server.fake_engine import ready_with
from tests.server.support import Running, running_server
from tests.server.tiny import byte_tokenizer
from vmmkv_server.protocol import Ready


class Servers:
    """Servers that tests use one after another, by their options; a new one takes the place of one that a test has ended."""

    def __init__(self) -> None:
        self._running: dict[Any, tuple[Running, ExitStack]] = {}

    def get(self, **options: Any) -> Running:
        key = tuple(options.items())
        if key in self._running:
            one, stack = self._running[key]
            if isinstance(one.client.phase, Ready) and one.service.queue.drained_by_s is None:
                one.reset()
                return one
            stack.close()
        stack = ExitStack()
        one = stack.enter_context(running_server(**options))
        self._running[key] = one, stack
        return one

    def close(self) -> None:
        for _, stack in self._running.values():
            stack.close()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture
def server(servers: Servers) -> Running:
    """A server that other tests have used too; its counters go on."""
    return servers.get()


@pytest.fixture
def listening(servers: Servers) -> Running:
    """The same behind sockets."""
    return servers.get(sockets=True)


@pytest.fixture
def fresh() -> Iterator[Running]:
    """A server of this test alone."""
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def _with_grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(directory)
    ends = [int(byte_tokenizer().eos_token_id)]
    ready = msgspec.structs.replace(ready_with(model_tokens=4096, pool_tokens=4096), model=str(directory), end_tokens=ends)
    with running_server(ready=ready) as running:
        yield running


@pytest.fixture
def with_grammars(_with_grammars: Running) -> Running:
    """A server whose model's tokenizer is there, so that grammars are compiled; of one module."""
    _with_grammars.reset()
    return _with_grammars
