"""The HTTP server over a fake engine, in threads of the test's process, on a free port."""

import asyncio
import contextlib
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn

from tests.server.fake_engine import READY, FakeEngine
from tests.server.tiny import byte_tokenizer
from vmmkv.server.config import FrontConfig
from vmmkv.server.engine_client import EngineClient
from vmmkv.server.http.app import Service, create_app
from vmmkv.server.launch import uvicorn_options
from vmmkv.server.protocol import Ready
from vmmkv.server.tokenizer import Tokenizer


@dataclass
class Running:
    """A server that runs, and what a test holds of it."""

    url: str
    engine: FakeEngine
    client: EngineClient
    service: Service
    loop: asyncio.AbstractEventLoop

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20)

    def engine_dies(self, reason: str) -> None:
        asyncio.run_coroutine_threadsafe(self.client.engine_ended(reason), self.loop).result(10)


@contextlib.contextmanager
def running_server(
    *,
    ready: Ready = READY,
    start_engine: bool = True,
    front: FrontConfig | None = None,
    send_buffer_bytes: int | None = None,
) -> Iterator[Running]:
    """Start all of it, and stop all of it; nothing is left of either. The kernel holds so much of an answer for a client."""
    with tempfile.TemporaryDirectory(prefix="vmmkv-test-") as directory, socket.create_server(("127.0.0.1", 0)) as listener:
        if send_buffer_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)  # connections have it from there
        address = f"ipc://{directory}/engine"
        engine = FakeEngine(address, ready=ready)
        started = threading.Event()
        running: list[Running] = []
        servers: list[uvicorn.Server] = []

        async def serve() -> None:
            client = EngineClient(address)
            client.start()
            service = Service(client, "tiny", front)
            service.tokenizer = Tokenizer(byte_tokenizer())
            options = uvicorn_options(ready.max_sequences + service.front.max_queued_requests)
            server = uvicorn.Server(uvicorn.Config(create_app(service), lifespan="off", log_level="warning", **options))
            servers.append(server)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            running.append(Running(url, engine, client, service, asyncio.get_running_loop()))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            if start_engine:
                engine.start()
                await client.settled()
            started.set()
            await serving
            await client.close()

        thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        thread.start()
        assert started.wait(20), "the server did not start"
        try:
            yield running[0]
        finally:
            servers[0].should_exit = True
            thread.join(20)
            if start_engine:
                engine.stop()


@contextlib.contextmanager
def asking(url: str, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A request whose client waits until the end of the block, answered or not, and then goes away without a word."""
    server, content = httpx.URL(url), json.dumps(body).encode()
    head = "HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((server.host, server.port or 80), timeout=20) as connection:
        connection.sendall(f"POST {path} {head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield


def eventually(condition: Callable[[], bool], *, within_s: float = 5.0) -> bool:
    """Whether the condition comes true in time.

    What another thread or process does after it has answered is waited for like this: how soon is up to the machine.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
