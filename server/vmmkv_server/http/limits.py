"""Admission: the caller of a request, its size, and whether there is room for it.

    headers ── X-Request-Id ── host ── key ── room in the queue ── body, up to its limit ──> the route      (Guard)
    place ── tokenise ── check_tokens ── engine ── ... ── its end                                    (AdmissionQueue)

No byte of a body is read before its sender has shown a key and there is room. A body is read whole, so that one that is too
large, or too slow, is answered as such.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import math
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vmmkv.units import counted, format_bytes
from vmmkv_server.config import ServeConfig
from vmmkv_server.engine_client import EngineClient
from vmmkv_server.http import errors
from vmmkv_server.http.errors import ApiError
from vmmkv_server.logs import bind_request
from vmmkv_server.protocol import Ready

log = logging.getLogger(__name__)

MAX_HEADER_BYTES: Final = 16 << 10
"""Names and values of all of a request's headers, and its path; uvicorn takes four times as much, and no more."""
MAX_BODIES: Final = 16
"""Limit of all bodies that are held together, as a multiple of the largest body."""
BODY_S: Final = 60.0
"""Longest time for a client to send a body."""
WINDOW_S: Final = 30
"""Time over which rates are taken."""
MOST_RETRY_S: Final = 60
"""The longest Retry-After that OpenAI's client follows."""

GENERATION_PATHS: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
"""Routes whose requests are refused before their bodies are read where the queue is full."""
OPEN_PATHS: Final = frozenset({"/health", "/"})
"""Routes without a key: monitors have none, and the page has no data in it."""
OPEN_FOLDER: Final = "/page/"
COUNTED_PATHS: Final = frozenset({"/tokenize", "/detokenize", "/kv/reset", "/kv/resize", "/sleep", "/wake_up"})
"""Refusals are counted in /metrics on these and under /v1/."""

_REQUEST_ID: Final = b"x-request-id"
_GIVEN_ID: Final = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
"""Request ids that a client may choose: nothing that could end a header or a log line."""

current_id: Final[ContextVar[str]] = ContextVar("request_id", default="-")
"""The id of the request that this task works on."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key, or any client where no key is needed."""

    digest: bytes = field(default=b"", repr=False)
    """A hash of the key; empty without a key."""
    is_admin: bool = False


ANONYMOUS: Final = Caller()


class Throughput:
    """Rate of what is finished in a second, over the last WINDOW_S: it says when to try again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._amounts: defaultdict[int, float] = defaultdict(float)
        """Amounts by second, the oldest first; none for seconds without any."""

    def add(self, amount: float) -> None:
        """Add an amount that was finished now."""
        self._amounts[math.floor(self._clock())] += amount
        self._forget()

    def seconds_for(self, amount: float) -> int:
        """Time for an amount, in whole seconds from 1 to MOST_RETRY_S; WINDOW_S if nothing was finished of late."""
        self._forget()
        if not (total := sum(self._amounts.values())):
            return WINDOW_S
        span_s = max(1.0, self._clock() - next(iter(self._amounts)))
        return min(MOST_RETRY_S, max(1, math.ceil(amount * span_s / total)))

    def _forget(self) -> None:
        while self._amounts and (oldest := next(iter(self._amounts))) < self._clock() - WINDOW_S:
            del self._amounts[oldest]


class AdmissionQueue:
    """Keys, and bounds on requests in flight, on waiting prompts and on the bytes of bodies.

    Keys are compared in constant time.
    """

    def __init__(self, engine: EngineClient, config: ServeConfig) -> None:
        self.num_sequences = 0
        """Sequences in flight: tokenised, waiting or running."""
        self.held_bytes = 0
        """Bytes of all bodies, from their first byte to the end of their answers."""
        self.drained_by_s: float | None = None
        """End of the drain, by time.monotonic; None without one."""
        self.is_asleep = False
        """Is the engine's KV memory given back, or to be when the requests in flight have ended?"""
        self._engine = engine
        self._config = config
        self._ended = Throughput()
        self._begun = Throughput()
        engine.on_begun = self._begun.add
        self._callers = [Caller(_hashed(key.encode())) for key in config.api_keys]
        self.needs_key = bool(config.api_keys)
        if config.admin_key is not None:
            self._callers.append(Caller(_hashed(config.admin_key.encode()), is_admin=True))

    # Keys.

    def identify(self, authorization: bytes | None) -> Caller | None:
        """The caller of an Authorization header; None if a key is needed and this is none.

        `Bearer KEY`; or Basic with the key as password, which a browser can ask for. Basic is not for the administrator's
        key: a browser repeats it by itself, whichever page makes the request.
        """
        scheme, _, key = (authorization or b"").partition(b" ")
        scheme, key = scheme.lower(), key.strip()
        if scheme == b"basic":
            try:
                key = base64.b64decode(key, validate=True).partition(b":")[2]
            except binascii.Error:
                key = b""
        digest, found = _hashed(key), None
        for caller in self._callers:  # all of them, so that the time taken says nothing
            if hmac.compare_digest(caller.digest, digest):
                found = caller
        if found is not None and (scheme == b"bearer" or (scheme == b"basic" and not found.is_admin)):
            return found
        return None if self.needs_key else ANONYMOUS

    def sees_all(self, caller: Caller) -> bool:
        """May this caller see the requests of all, and go before them? With several keys only the administrator may."""
        return caller.is_admin or len(self._config.api_keys) <= 1

    async def require_sees_all(self, request: Request) -> None:
        """A dependency of routes that show the requests of all callers. Raises: ApiError (403)."""
        if not self.sees_all(request.state.request.caller):
            raise errors.not_the_administrator()

    def namespace(self, caller: Caller, salt: str | None) -> str | None:
        """The prefix namespace of a request: of its key and salt, or without a key of the salt alone.

        It is the same in every process, since tiers outlive this one. It tells nothing of the key, and no other key or salt
        has the same.
        """
        if not caller.digest:
            return None if salt is None else f"salt:{salt}"
        message = b"" if salt is None else b"+" + salt.encode()
        return f"key:{hmac.digest(caller.digest, message, hashlib.sha256).hex()}"

    # The queue.

    async def drain(self) -> bool:
        """Take no more requests, and wait for those in flight, up to the drain timeout. Have they all ended?"""
        self.drained_by_s = time.monotonic() + self._config.drain_timeout_s
        while self.num_sequences and time.monotonic() < self.drained_by_s:
            await asyncio.sleep(0.02)
        return not self.num_sequences

    async def sleep(self) -> bool:
        """Take no more requests until `is_asleep` is taken back, and wait for those in flight. False if it was meanwhile."""
        self.is_asleep = True
        while self.num_sequences and self.is_asleep:
            await asyncio.sleep(0.02)
        return self.is_asleep

    def check_room(self, num_sequences: int = 1) -> None:
        """Raises: ApiError, 503 while draining or asleep, 429 if so many more are too many. One is always let in alone."""
        if self.drained_by_s is not None:
            left_s = max(1, math.ceil(self.drained_by_s - time.monotonic()))
            raise errors.unavailable("The server is shutting down.", retry_after_s=left_s)
        if self.is_asleep:
            message = "The server sleeps: its KV memory is given back until the administrator sends POST /wake_up."
            raise errors.unavailable(message, retry_after_s=MOST_RETRY_S)
        phase = self._engine.phase
        limit = self._config.max_queued_requests + (phase.limits.max_sequences if isinstance(phase, Ready) else 0)
        excess = self.num_sequences + num_sequences - limit
        if self.num_sequences and excess > 0:
            raise errors.too_many(
                f"The queue is full: {counted(self.num_sequences, 'sequence')} in flight, this request is for "
                f"{num_sequences} more, and {limit} is the most.",
                of="requests",
                retry_after_s=self._ended.seconds_for(excess),
            )

    @contextlib.contextmanager
    def place(self, num_sequences: int) -> Iterator[Callable[[int], None]]:
        """A request's place in the queue, until the block ends. Yields `check_tokens`, to call when it is tokenised.

        Raises: as `check_room`.
        """
        self.check_room(num_sequences)
        was_served = False

        def check_tokens(num_prompt_tokens: int) -> None:
            """Raises: ApiError (429) if so many more tokens of prompts are too many to wait. One request is always let in."""
            nonlocal was_served
            waiting, most = self._engine.waiting_tokens, self._config.max_queued_tokens
            if waiting and waiting + num_prompt_tokens > most:
                raise errors.too_many(
                    f"The queue is full: prompts of {waiting} tokens wait, those of this request have {num_prompt_tokens}, "
                    f"and {most} is the most.",
                    of="tokens",
                    retry_after_s=self._begun.seconds_for(waiting + num_prompt_tokens - most),
                )
            was_served = True

        self.num_sequences += num_sequences
        try:
            yield check_tokens
        finally:
            self.num_sequences -= num_sequences
            if was_served:
                self._ended.add(num_sequences)

    def check_body(self, size_bytes: int, *, held_bytes: int) -> None:
        """Raises: ApiError if a body of this size, of which `held_bytes` are here, is too large, or all together are."""
        most = self._config.max_body_bytes
        if size_bytes > most:
            message = f"The body is larger than {format_bytes(most)}, the most that is taken here."
            # Closed, because the client may go on sending for hours.
            raise ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
        if self.held_bytes - held_bytes + size_bytes > MAX_BODIES * most:
            raise errors.too_many("Other requests hold all the memory there is for bodies.", of="requests", retry_after_s=1)


def _hashed(key: bytes) -> bytes:
    return hmac.digest(b"vmmkv API key", key, hashlib.sha256)


def check_host(host: str, hosts: Collection[str] | None) -> None:
    """Raises: ApiError (400) for a Host header that says neither an address, nor a name of `hosts` or under localhost.

    None for `hosts` allows any.
    """
    if hosts is None:
        return
    with contextlib.suppress(ValueError):  # of what is no host, or of a name that is no address
        name = urlsplit(f"//{host}").hostname or ""
        if name in hosts or name.endswith(".localhost") or ipaddress.ip_address(name):
            return
    message = f"This server does not answer to the host {host!r}: use its address, or start it with --allowed-host."
    raise ApiError(400, message, code="unknown_host")


@dataclass(slots=True)
class RequestState:
    """State of a request that routes find in the `state` of its scope."""

    caller: Caller
    at_end: contextlib.ExitStack
    """Stack that is closed when the answer is sent, or cannot be."""
    has_begun: bool = False
    """Is its request with the engine? How that ends is counted elsewhere."""


class Guard:
    """ASGI middleware before every route, which sees a path without slashes at its end.

    `on_refused` is called with the status of each refusal on the counted paths.
    `hosts`: as of `check_host`.
    """

    def __init__(
        self, app: ASGIApp, *, queue: AdmissionQueue, hosts: Collection[str] | None, on_refused: Callable[[int], None]
    ) -> None:
        self._app = app
        self._queue = queue
        self._hosts = hosts
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A redirect would lose the body of a POST.
        scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        headers = dict(scope["headers"])
        given = headers.get(_REQUEST_ID, b"")
        name = given.decode() if _GIVEN_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        token = current_id.set(name)
        bind_request(name)
        has_started = False

        async def send_named(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._count(scope, message["status"])
                message["headers"] = [*message.get("headers", ()), (_REQUEST_ID, name.encode())]
            await send(message)

        try:
            await self._pass(scope, headers, receive, send_named)
        except ClientDisconnect:
            pass  # before its body was complete
        except Exception as error:
            if not isinstance(error, ApiError):
                if has_started:
                    raise
                log.exception("request %s failed", name)
            await errors.from_exception(error).response()(scope, receive, send_named)
        finally:
            current_id.reset(token)

    async def _pass(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        size_bytes = len(scope["raw_path"]) + len(scope["query_string"])
        size_bytes += sum(len(name) + len(value) for name, value in scope["headers"])
        if size_bytes > MAX_HEADER_BYTES:
            message = f"The headers have {size_bytes} bytes; {MAX_HEADER_BYTES} is the most."
            raise ApiError(431, message, code="headers_too_large")
        check_host(headers.get(b"host", b"").decode("latin-1"), self._hosts)
        is_open = path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
        caller = ANONYMOUS if is_open else self._queue.identify(headers.get(b"authorization"))
        if caller is None:
            message = "This server wants an API key that it knows: send 'Authorization: Bearer KEY'."
            # Two headers, told apart by case until they are sent in one: Chromium reads only the first scheme of each.
            wanted = {"WWW-Authenticate": "Bearer", "www-authenticate": 'Basic realm="vmmkv"'}
            raise ApiError(401, message, code="invalid_api_key", headers=wanted)
        if path in GENERATION_PATHS and scope["method"] == "POST":
            self._queue.check_room()
        with contextlib.ExitStack() as at_end:
            if b"content-length" in headers or b"transfer-encoding" in headers:
                self._queue.check_body(int(headers.get(b"content-length", b"0")), held_bytes=0)
                receive = await self._read_body(scope, receive, at_end)
            scope.setdefault("state", {})["request"] = RequestState(caller, at_end)
            await self._app(scope, receive, send)

    async def _read_body(self, scope: Scope, receive: Receive, at_end: contextlib.ExitStack) -> Receive:
        """Read all of a body, counted in the queue until the end; returns what the route receives."""
        data, num_bytes = bytearray(), 0

        def release() -> None:  # it outlives the body, which it must not keep
            self._queue.held_bytes -= num_bytes

        at_end.callback(release)
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in Request(scope, receive).stream():
                    self._queue.check_body(len(data) + len(chunk), held_bytes=len(data))
                    data += chunk
                    num_bytes += len(chunk)
                    self._queue.held_bytes += len(chunk)
        except TimeoutError as error:
            raise errors.too_late(f"The body did not come within {BODY_S:g} s.", {"Connection": "close"}) from error
        return _with_body(bytes(data), receive)

    def _count(self, scope: Scope, status: int) -> None:
        is_counted = scope["path"].startswith("/v1/") or scope["path"] in COUNTED_PATHS
        state = scope.get("state", {}).get("request")
        if is_counted and status >= 400 and status != 499 and not (state is not None and state.has_begun):
            self._on_refused(status)


def _with_body(body: bytes, receive: Receive) -> Receive:
    """The body at once, then whatever `receive` gives."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return whole.pop() if whole else await receive()

    return receive_again


class Origins(CORSMiddleware):
    """CORS. A browser that asks for a page of an origin which is not allowed is told what would allow it, and the log once.

    `hosts` as of `Guard`, which sees no such question.
    """

    def __init__(self, app: ASGIApp, *, allowed: Sequence[str], hosts: Collection[str] | None) -> None:
        super().__init__(
            app,
            allow_origins=allowed,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_credentials=False,  # pages send a key themselves; a browser adds nothing of its own
            allow_private_network=True,  # the origin is named, wherever the server is
            expose_headers=["X-Request-Id", "Retry-After"] if allowed else [],
        )
        self._hosts = hosts
        self._has_told = False

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a browser that asks whether a page may send its request."""
        try:
            check_host(request_headers.get("host", ""), self._hosts)
            self._check_origin(request_headers["origin"])
            if (method := request_headers["access-control-request-method"]) not in self.allow_methods:
                message = f"Pages of other origins may send {' and '.join(self.allow_methods)} to this server, not {method!r}."
                raise ApiError(400, message, code="unknown_method")
        except ApiError as error:
            return error.response({"Vary": "Origin"})
        return super().preflight_response(request_headers)

    def _check_origin(self, origin: str) -> None:
        if self.is_allowed_origin(origin):
            return
        allowed = f"; allowed are {', '.join(self.allow_origins)}" if self.allow_origins else ""
        message = (
            f"Pages of the origin {origin!r} may not use this server from a browser{allowed}: start it with --allowed-origin "
            "and that origin."
        )
        if not self._has_told:
            self._has_told = True
            log.warning(message)
        raise ApiError(400, message, code="unknown_origin")
