"""The HTTP server over a fake engine, its app in a thread of this process, reached by ASGI or by sockets."""

import asyncio
import contextlib
import json
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from tests.server.fake_engine import READY, FakeEngine, with_features
from tests.server.tiny import byte_tokenizer, token_ids
from vmmkv_server.config import ServeConfig
from vmmkv_server.engine_client import Answers, EngineClient
from vmmkv_server.http import edge
from vmmkv_server.http.app import create_app
from vmmkv_server.http.generation import Service
from vmmkv_server.launch import uvicorn_options
from vmmkv_server.protocol import Abort, Generate, Ready
from vmmkv_server.tokenizer import Tokenizer

WAIT_S = 90.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]
App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class AppTransport(httpx.BaseTransport):
    """Requests of a synchronous client to an app in another thread's event loop, with answers as they are sent."""

    def __init__(self, app: App, loop: asyncio.AbstractEventLoop) -> None:
        self._app, self._loop = app, loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        exchange = _Exchange(self._app, self._loop, request)
        start = exchange.next()
        assert start is not None, "the app answered nothing"
        return httpx.Response(start["status"], headers=start["headers"], stream=exchange)


class _Exchange(httpx.SyncByteStream):
    """One request and its answer. Closed before its end, the client has gone away."""

    def __init__(self, app: App, loop: asyncio.AbstractEventLoop, request: httpx.Request) -> None:
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._gone = asyncio.Event()
        self._loop = loop
        url = request.url
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method, "scheme": url.scheme,
            "path": url.path, "raw_path": url.raw_path.partition(b"?")[0], "query_string": url.query, "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "client": ("127.0.0.1", 1), "server": (url.host, url.port or 80),
        }  # fmt: skip
        asyncio.run_coroutine_threadsafe(self._run(app, scope, request.read()), loop)

    async def _run(self, app: App, scope: dict[str, Any], body: bytes) -> None:
        bodies = [body]

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            self._messages.put(message)

        try:
            await app(scope, receive, send)
        finally:
            self._messages.put(None)

    def next(self) -> dict[str, Any] | None:
        """The next message of the answer; None at its end."""
        return self._messages.get(timeout=WAIT_S)

    def __iter__(self) -> Iterator[bytes]:
        while (message := self.next()) is not None:
            yield message.get("body", b"")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._gone.set)


@dataclass
class Running:
    """A server that runs, and what a test holds of it."""

    engine: FakeEngine
    client: EngineClient
    service: Service
    loop: asyncio.AbstractEventLoop
    app: Any
    has_sockets: bool
    url: str = "http://localhost"
    """Of sockets, or only for show."""

    @property
    def http(self) -> httpx.Client:
        transport = None if self.has_sockets else AppTransport(self.app, self.loop)
        return httpx.Client(base_url=self.url, timeout=60, transport=transport)

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=self.http)

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.service.tokenizer is not None
        return self.service.tokenizer

    @property
    def generates(self) -> list[Generate]:
        """What the engine was asked."""
        return [message for message in self.engine.received if isinstance(message, Generate)]

    @property
    def sent(self) -> Generate:
        (request,) = self.generates
        return request

    def answers(self, text: str) -> None:
        """From now on."""
        ids = token_ids(text)
        self.engine.answer = lambda _: ids

    def never_ends(self, step_s: float = 0.02) -> None:
        """Answers go on up to max_tokens, a token each step."""
        self.engine.endless, self.engine.step_s = True, step_s

    def shows(self, chat_template: Any) -> None:
        """The tokenizer's template, from now on."""
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = chat_template
        self.service.tokenizer = Tokenizer(tokenizer)

    def post(self, path: str, body: dict[str, Any], key: str | None = None) -> httpx.Response:
        """With everything beyond ASCII escaped: httpx's own JSON is UTF-8, which has no lone surrogates."""
        headers = {"Content-Type": "application/json"} | ({} if key is None else bearer(key))
        return self.http.post(path, content=json.dumps(body), headers=headers)

    def complete(self, key: str | None = None, **body: Any) -> httpx.Response:
        return self.post(COMPLETIONS, {"model": "tiny", "prompt": "a", **body}, key)

    def chat(self, **body: Any) -> httpx.Response:
        return self.post(CHAT, {"model": "tiny", "messages": HELLO, **body})

    def refuses(self, path: str, **body: Any) -> dict[str, Any]:
        """The error of a request that is refused with 400 and never reaches the engine."""
        asked = {"model": "tiny", **({"messages": HELLO} if path == CHAT else {"prompt": "a"}), **body}
        response, num_before = self.post(path, asked), len(self.generates)
        assert response.status_code == 400, response.text
        assert len(self.generates) == num_before
        error: dict[str, Any] = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        return error

    def engine_dies(self, reason: str) -> None:
        asyncio.run_coroutine_threadsafe(self.client.engine_ended(reason), self.loop).result(WAIT_S)

    def reset(self) -> None:
        """As a new one, but for counters: nothing runs, and the engine answers as at first."""
        idle = eventually(lambda: not self.service.queue.num_sequences and not self.client.num_unfinished)
        assert idle, "a request is left"
        mark = Abort(request_id="mark")  # behind all that is on its way to the engine
        self.loop.call_soon_threadsafe(self.client.send, mark)
        assert eventually(lambda: mark in self.engine.received)
        self.engine.reset()
        self.service.tokenizer = Tokenizer(byte_tokenizer())


@contextlib.contextmanager
def running_server(
    *, ready: Ready = READY, start_engine: bool = True, front: ServeConfig | None = None, sockets: bool = False,
    hosts: list[str] | None = None,
) -> Iterator[Running]:  # fmt: skip
    """Start all of it, and stop all of it; nothing is left of either. With `sockets` uvicorn serves it."""
    with tempfile.TemporaryDirectory(prefix="vmmkv-test-") as directory:
        engine = FakeEngine(f"ipc://{directory}/engine", ready=with_features(ready))
        running: Future[Running] = Future()
        stop = asyncio.Event()

        async def serve() -> None:
            client = EngineClient(f"ipc://{directory}/engine")
            client.start()
            service = Service(client, "tiny", front, hosts)
            service.tokenizer = Tokenizer(byte_tokenizer())
            one = Running(engine, client, service, asyncio.get_running_loop(), create_app(service), sockets)
            async with contextlib.AsyncExitStack() as closing:
                closing.push_async_callback(client.close)
                closing.push_async_callback(service.grammars.close)
                if start_engine:
                    engine.start()
                    await client.settled()
                if sockets:
                    listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
                    one.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                    options = uvicorn_options(ready.limits.max_sequences + service.config.max_queued_requests)
                    options |= {"lifespan": "off", "log_level": "warning", "timeout_graceful_shutdown": 1}
                    server = uvicorn.Server(uvicorn.Config(create_app(service), **options))
                    edge.install(server.config)
                    serving = asyncio.create_task(server.serve(sockets=[listener]))
                    closing.push_async_callback(asyncio.wait, [serving])
                    closing.callback(setattr, server, "should_exit", True)
                running.set_result(one)
                await stop.wait()

        def run() -> None:
            try:
                asyncio.run(serve())
            except BaseException as error:
                if running.done():
                    raise
                running.set_exception(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        one = running.result(WAIT_S)
        try:
            yield one
        finally:
            one.loop.call_soon_threadsafe(stop.set)
            thread.join(WAIT_S)
            if start_engine:
                engine.stop()


@contextlib.contextmanager
def asking(server: Running | str, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A request whose client waits until the end of the block, answered or not, and then goes away without a word."""
    content = json.dumps(body).encode()
    if isinstance(server, Running) and not server.has_sockets:
        request = httpx.Request(
            "POST", f"http://localhost{path}", content=content, headers={"Content-Type": "application/json"}
        )
        exchange = _Exchange(server.app, server.loop, request)
        try:
            yield
        finally:
            exchange.close()
        return
    url = httpx.URL(server.url if isinstance(server, Running) else server)
    head = "HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.host, url.port or 80), timeout=60) as connection:
        connection.sendall(f"POST {path} {head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield


def without_deadlines(server: Running, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on no answer is late before the function that is returned is called: then all are."""
    timers, call_later = list[Any](), server.loop.call_later

    def held(delay_s: float, callback: Any, *given: Any, **options: Any) -> asyncio.TimerHandle:
        is_deadline = getattr(callback, "__func__", None) is Answers.fail
        timers.extend([(callback, *given)] * is_deadline)
        return call_later(3600 if is_deadline else delay_s, callback, *given, **options)

    monkeypatch.setattr(server.loop, "call_later", held)
    return lambda: [server.loop.call_soon_threadsafe(*timer) for timer in timers] and None


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def texts_of(reply: Any) -> dict[int, str]:
    """The text of each choice of a client's reply, whole or streamed."""
    texts: dict[int, str] = {}
    for chunk in [reply] if hasattr(reply, "choices") else reply:
        for choice in chunk.choices:
            if hasattr(choice, "text"):
                text = choice.text
            else:
                text = (choice.delta if hasattr(choice, "delta") else choice.message).content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
    return texts


def eventually(condition: Callable[[], bool], *, within_s: float = 60.0) -> bool:
    """Whether the condition comes true in time: other threads and processes are as fast as the machine lets them be."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
