"""What stands before every route: a name for the request, whose it is, and how large it may be.

    headers ── X-Request-Id ── Host ── key ── room in the queue ── body, up to its limit ──> the route

Nothing of a body is read before its sender is known to have a key and a place. A body is read whole, so that one that is too
large, or too slow, is answered as such whatever the route does with it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vmmkv.server import api_errors, logs, request_id
from vmmkv.server.api_errors import ApiError
from vmmkv.server.hosts import Hosts
from vmmkv.server.keys import Keys
from vmmkv.server.stalls import Stalls
from vmmkv.units import format_bytes

log = logging.getLogger(__name__)

MAX_HEADER_BYTES: Final = 16 << 10
"""Names and values of all of a request's headers, and its path; uvicorn takes four times as much, and no more."""
MAX_BODIES: Final = 16
"""All bodies that are held together are not more than so many of the largest."""
BODY_S: Final = 60.0
"""How long a client may take to send a body."""
OPEN_PATHS: Final = frozenset({"/health", "/"})
"""Whoever watches the server has no key, and the page has no data: it asks for it, with the key that is typed there."""
OPEN_FOLDER: Final = "/page/"
"""Of that page's files."""
COUNTED_FOLDER: Final = "/v1/"
COUNTED_PATHS: Final = frozenset({"/tokenize", "/detokenize", "/kv/reset", "/kv/resize"})
"""What asks something of the model or the engine. Who looks at the server, or for what it never had, was refused no answer."""
CLIENT_LEFT: Final = 499
"""Nobody refused what its own client gave up."""

CALLER: Final = "caller"
"""Where the routes find whose request it is, in `request.state`."""
AT_END: Final = "at_end"
"""And an ExitStack that is closed when the answer is sent, or cannot be."""
HAS_BEGUN: Final = "has_begun"
"""Set there by a route whose request is with the engine: how that ends is counted elsewhere."""


class Guard:
    """An ASGI middleware. `check_room` raises ApiError where a request to one of `queued_paths` would have no place.

    `on_refused` is called with the status of each answer that is an error, under COUNTED_FOLDER and to COUNTED_PATHS, unless
    its request had begun or its client went away.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        max_body_bytes: int,
        queued_paths: frozenset[str],
        check_room: Callable[[], None],
        on_refused: Callable[[int], None],
        hosts: Hosts | None = None,
        stalls: Stalls | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = hosts or Hosts()
        self._max_body_bytes = max_body_bytes
        self._queued_paths = queued_paths
        self._check_room = check_room
        self._on_refused = on_refused
        self._stalls = stalls or Stalls()
        self._held_bytes = 0
        """Of all bodies, from their first byte to the end of their answers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with what is wrong."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        name = request_id.choose(headers.get(request_id.HEADER))
        token = request_id.current.set(name)
        logs.bind_request(name)
        has_started = False

        async def send_named(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._count(scope, message["status"])
                message["headers"] = [*message.get("headers", ()), (request_id.HEADER, name.encode())]
            answering.since_s = loop.time()
            await send(message)
            answering.since_s = None

        body, loop = _Body(self), asyncio.get_running_loop()
        try:
            with self._stalls.watched() as answering:
                await self._pass(scope, headers, body, receive, send_named)
        except ApiError as error:
            await error.response()(scope, receive, send_named)
        except _ClientLeft:
            pass
        except Exception as error:
            if has_started:
                raise
            log.exception("request %s failed", name)
            await api_errors.unexpected(error).response()(scope, receive, send_named)
        finally:
            self._held_bytes -= body.num_bytes
            request_id.current.reset(token)

    async def _pass(self, scope: Scope, headers: dict[bytes, bytes], body: "_Body", receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        self._check_headers(scope)
        if not self._hosts.allow(headers.get(b"host")):
            raise api_errors.foreign_host(headers[b"host"])
        if path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            caller = self._keys.identify(headers.get(b"authorization"))
            if caller is None:
                raise api_errors.no_key()
            scope.setdefault("state", {})[CALLER] = caller
        if path in self._queued_paths and scope["method"] == "POST":
            self._check_room()
        if b"content-length" in headers or b"transfer-encoding" in headers:
            self._check_body(int(headers.get(b"content-length", b"0")), held_bytes=0)
            receive = await body.read(receive)
        with contextlib.ExitStack() as at_end:
            scope.setdefault("state", {})[AT_END] = at_end
            await self._app(scope, receive, send)

    def _count(self, scope: Scope, status: int) -> None:
        is_counted = scope["path"].startswith(COUNTED_FOLDER) or scope["path"] in COUNTED_PATHS
        if is_counted and status >= 400 and status != CLIENT_LEFT and HAS_BEGUN not in scope.get("state", ()):
            self._on_refused(status)

    def _check_headers(self, scope: Scope) -> None:
        size_bytes = len(scope["raw_path"]) + len(scope["query_string"])
        size_bytes += sum(len(name) + len(value) for name, value in scope["headers"])
        if size_bytes > MAX_HEADER_BYTES:
            message = f"The headers have {size_bytes} bytes; {MAX_HEADER_BYTES} is the most."
            raise ApiError(431, message, type="invalid_request_error", code="headers_too_large")

    def _check_body(self, size_bytes: int, *, held_bytes: int) -> None:
        """May a body be so large, of which so much is here? Raises: ApiError; for one that is too large by itself the
        connection is closed too, for its client may go on sending for hours."""
        if size_bytes > self._max_body_bytes:
            message = f"The body is larger than {format_bytes(self._max_body_bytes)}, the most that is taken here."
            raise ApiError(413, message, type="invalid_request_error", code="body_too_large", headers={"Connection": "close"})
        if self._held_bytes - held_bytes + size_bytes > MAX_BODIES * self._max_body_bytes:
            raise api_errors.too_many("Other requests hold all the memory there is for bodies.", of="requests", retry_after_s=1)

    def hold(self, body: "_Body", num_bytes: int) -> None:
        """So many more bytes of a body are here. Raises: ApiError if they are too many."""
        self._check_body(body.num_bytes + num_bytes, held_bytes=body.num_bytes)
        body.num_bytes += num_bytes
        self._held_bytes += num_bytes


class _ClientLeft(Exception):
    """Nobody is there to be answered."""


class _Body:
    """What has come of a body."""

    def __init__(self, guard: Guard) -> None:
        self.num_bytes = 0
        self._guard = guard

    async def read(self, receive: Receive) -> Receive:
        """Take all of it, and give what the route receives: the body at once, then whatever comes."""
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientLeft
                    chunk: bytes = message.get("body", b"")
                    self._guard.hold(self, len(chunk))
                    data += chunk
                    if not message.get("more_body", False):
                        break
        except TimeoutError as error:
            message_text = f"The body did not come within {BODY_S:g} s."
            headers = {"Connection": "close"}
            raise ApiError(408, message_text, type="timeout", code="request_timeout", headers=headers) from error
        whole: list[Message] = [{"type": "http.request", "body": bytes(data), "more_body": False}]

        async def receive_again() -> Message:
            return whole.pop() if whole else await receive()

        return receive_again
