"""Connections off the main road: clients that end their side, ask for a head alone, or do not read; and no descriptors left.

A server has all of it by `install`, and works without.
"""

import asyncio
import contextlib
import errno
import logging
import math
import resource
from typing import Any, Final, cast

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

SEND_S: Final = 60.0
"""Longest time for a client to read a piece of its answer, before it is taken to have gone away."""
PROBE_INTERVAL_S: Final = 1.0
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def install(config: uvicorn.Config) -> None:
    """Have a server that has not started treat its connections so. For its event loop, which runs."""
    config.app, config.http = Edge(cast(ASGIApp, config.app)), HalfCloseProtocol
    log_once_without_descriptors(asyncio.get_running_loop())


class Edge:
    """ASGI middleware around an application: answers HEAD as GET without its body, and gives up clients that do not read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_S):
                    await send(message)
            except TimeoutError:
                raise ClientDisconnect from None

        with contextlib.suppress(ClientDisconnect):
            answer = self._head if scope.get("method") == "HEAD" else self._app
            await answer(scope, receive, send_in_time)

    async def _head(self, scope: Scope, _: Receive, send: Send) -> None:
        """The headers that GET would get. A stream ends there."""
        ended, bodies = asyncio.Event(), [b""]

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                ended.set()

        async def receive_end() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await ended.wait()
            return {"type": "http.disconnect"}

        await self._app({**scope, "method": "GET"}, receive_end, send_head)


class HalfCloseProtocol(H11Protocol):
    """uvicorn's protocol, which also answers a client that ends its side of the connection after its request.

    A client that is gone ends its side too; only sending tells the two apart. Until the answer begins, an interim response
    (100, which clients skip) is sent every second; it ends a dead connection.
    """

    _probe_timer: asyncio.TimerHandle | None = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open while an answer is due."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False  # the connection closes behind the answer
        self._probe()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop probing a connection that is gone, as asyncio.Protocol.connection_lost."""
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)

    def _probe(self) -> None:
        if self.cycle.response_started or self.transport.is_closing():
            return
        if self.scope["http_version"] == "1.1":  # 1.0 has no interim responses
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe_timer = self.loop.call_later(PROBE_INTERVAL_S, self._probe)


def log_once_without_descriptors(loop: asyncio.AbstractEventLoop) -> None:
    """Log one line when connections cannot be accepted for want of descriptors.

    asyncio tries again every second, and reports each failure to the loop's exception handler.
    """
    last_s = -math.inf

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last_s
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_DESCRIPTORS:
            loop.default_exception_handler(context)
            return
        if loop.time() - last_s > 10:  # else the same shortage
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            log.error("no connection can be accepted: %s (limit %d); trying again every second", error.strerror, limit)
        last_s = loop.time()

    loop.set_exception_handler(handle)
