"""What stands before every route: a name for the request, whose it is, and how large it may be.

    headers ── X-Request-Id ── Host ── key ── room in the queue ── body, up to its limit ──> the route

Nothing of a body is read before its sender is known to have a key and a place. A body is read whole, so that one that is too
large, or too slow, is answered as such whatever the route does with it.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import logging
import math
import re
import secrets
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vmmkv.server.config import FrontConfig
from vmmkv.server.console import bind_request
from vmmkv.server.engine_client import EngineClient
from vmmkv.server.hosts import Hosts
from vmmkv.server.http import errors
from vmmkv.server.http.errors import ApiError
from vmmkv.server.protocol import Ready
from vmmkv.server.stalls import Stalls
from vmmkv.units import counted, format_bytes

# -------- keys
# Who asks: API keys told apart in constant time, and a prefix namespace for each, which nobody can guess.


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whose request it is."""

    name: str
    """For logs; not the key."""
    is_admin: bool = False
    digest: bytes = field(default=b"", repr=False)
    """Of the key, under the server's secret; empty for who has none."""


ANYBODY: Final = Caller(name="anybody")


class Keys:
    """The keys of a server. Its secret is as old as the process, and so are the prefixes that it keeps apart."""

    def __init__(self, api_keys: Iterable[str] = (), admin_key: str | None = None) -> None:
        self._secret = secrets.token_bytes(32)
        self._callers = [
            Caller(name=f"key {number}", digest=self._digest(key.encode())) for number, key in enumerate(api_keys, start=1)
        ]
        self.are_required = bool(self._callers)
        """Whether who has no key is turned away."""
        self.are_several = len(self._callers) > 1
        """Whether one may have to leave something to another; the administrator's does not count."""
        if admin_key is not None:
            self._callers.append(Caller(name="the administrator", is_admin=True, digest=self._digest(admin_key.encode())))

    def identify(self, authorization: bytes | None) -> Caller | None:
        """Whose Authorization header this is; None if nobody's, and nobody unknown may ask.

        `Bearer KEY`; or Basic with the key as password, so that a browser can ask for it: but not for the administrator's,
        for a browser sends it by itself again, whoever wrote the page that makes it.
        """
        scheme, key = _credentials(authorization)
        caller = self._find(key) if key else None
        if caller is not None and not (caller.is_admin and scheme == b"basic"):
            return caller
        return None if self.are_required else ANYBODY

    def sees_all(self, caller: Caller) -> bool:
        """May this caller see what all are doing? Where several keys are, only the administrator."""
        return caller.is_admin or not self.are_several

    def namespace(self, caller: Caller, salt: str | None) -> str | None:
        """What prompts must have in common, beside their tokens, to share what is known of them.

        Without keys it is the salt itself. With keys it is a code over key and salt: who has another key cannot name it, and
        so cannot find out by the time that an answer takes what others have asked.
        """
        if not caller.digest:
            return salt
        return self._digest(caller.digest, b"" if salt is None else b"+" + salt.encode()).hex()

    def _find(self, key: bytes) -> Caller | None:
        """Looks at every key, whichever is the right one, and at digests of one length."""
        digest, found = self._digest(key), None
        for caller in self._callers:
            if hmac.compare_digest(caller.digest, digest):
                found = caller
        return found

    def _digest(self, *parts: bytes) -> bytes:
        # Only the last part has a length that the caller chooses.
        return hmac.digest(self._secret, b"".join(parts), hashlib.sha256)


def _credentials(authorization: bytes | None) -> tuple[bytes, bytes]:
    scheme, _, value = (authorization or b"").partition(b" ")
    scheme, value = scheme.lower(), value.strip()
    if scheme == b"bearer":
        return scheme, value
    if scheme == b"basic":
        try:
            return scheme, base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return scheme, b""
    return scheme, b""


# -------- intake
# How much is let in: a queue with an end, by sequences and by tokens, and a share for each key.
#
#     enter ── tokenise ── reserve ── submit ── ... ── close
#       │ sequences          │ tokens of prompts that wait; tokens in flight of the key
#
# Who does not fit is told when to come again, by how fast others have come through of late.

WINDOW_S: Final = 30
"""What counts as of late."""
MOST_RETRY_S: Final = 60
"""OpenAI's client takes no longer one for serious."""


class Rate:
    """How much comes through in a second, over the last WINDOW_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._amounts: deque[list[float]] = deque()
        """Of each second that had any: when it began, and how much."""

    def add(self, amount: float) -> None:
        """So much came through now."""
        second = math.floor(self._clock())
        if self._amounts and self._amounts[-1][0] == second:
            self._amounts[-1][1] += amount
        else:
            self._amounts.append([second, amount])
        self._forget()

    def seconds_for(self, amount: float) -> int:
        """How long so much will take, in whole seconds from 1 to MOST_RETRY_S; WINDOW_S if nothing came through of late."""
        self._forget()
        total = sum(amount for _, amount in self._amounts)
        if not total:
            return WINDOW_S
        span_s = max(1.0, self._clock() - self._amounts[0][0])
        return min(MOST_RETRY_S, max(1, math.ceil(amount * span_s / total)))

    def _forget(self) -> None:
        while self._amounts and self._amounts[0][0] < self._clock() - WINDOW_S:
            self._amounts.popleft()


class Intake:
    """What is in flight of one server. `engine` says how many sequences run at once, and which prompts wait."""

    def __init__(self, engine: EngineClient, config: FrontConfig) -> None:
        self.num_sequences = 0
        """In flight: tokenised, waiting or running."""
        self._engine = engine
        self._config = config
        self._tokens_of: Counter[Caller] = Counter()
        self._ended = Rate()
        self._begun = Rate()
        self._given_back = Rate()
        engine.on_begun = self._begun.add

    def check_room(self, num_sequences: int = 1) -> None:
        """Raises: ApiError (429) if so many more are too many. Who comes when nothing is in flight is let in, however many."""
        phase = self._engine.phase
        limit = self._config.max_queued_requests + (phase.max_sequences if isinstance(phase, Ready) else 0)
        excess = self.num_sequences + num_sequences - limit
        if self.num_sequences and excess > 0:
            raise errors.too_many(
                f"The queue is full: {counted(self.num_sequences, 'sequence')} in flight, this request is for "
                f"{num_sequences} more, "
                f"and {limit} is the most.",
                of="requests",
                retry_after_s=self._ended.seconds_for(excess),
            )

    def enter(self, caller: Caller, num_sequences: int) -> "Ticket":
        """Let a request in, to be tokenised; close the ticket whatever happens. Raises: as `check_room`."""
        self.check_room(num_sequences)
        return Ticket(self, caller, num_sequences)

    def key_limit(self, caller: Caller) -> int | None:
        """Tokens that the requests of this caller may have in flight; None for any number."""
        return None if caller.is_admin else self._config.max_tokens_per_key

    def reserve(self, caller: Caller, num_prompt: int, num_tokens: int) -> None:
        """See `Ticket.reserve`."""
        waiting, most = self._engine.waiting_tokens, self._config.max_queued_tokens
        if waiting and waiting + num_prompt > most:
            raise errors.too_many(
                f"The queue is full: prompts of {waiting} tokens wait, those of this request have {num_prompt}, and {most} is "
                "the most.",
                of="tokens",
                retry_after_s=self._begun.seconds_for(waiting + num_prompt - most),
            )
        limit, own = self.key_limit(caller), self._tokens_of[caller]
        if limit is not None and own + num_tokens > limit:
            raise errors.too_many(
                f"This key has {counted(own, 'token')} in flight, this request can come to {num_tokens}, and {limit} "
                "is the most for a key: wait for its other requests, or lower max_tokens.",
                of="tokens",
                retry_after_s=self._given_back.seconds_for(own + num_tokens - limit),
            )
        self._tokens_of[caller] += num_tokens

    def give_back(self, caller: Caller, num_sequences: int, num_tokens: int) -> None:
        """See `Ticket.close`."""
        self.num_sequences -= num_sequences
        if num_tokens:  # else it was turned away
            self._ended.add(num_sequences)
            self._given_back.add(num_tokens)
        self._tokens_of[caller] -= num_tokens
        if not self._tokens_of[caller]:
            del self._tokens_of[caller]


class Ticket:
    """A request's place."""

    def __init__(self, intake: Intake, caller: Caller, num_sequences: int) -> None:
        self.caller = caller
        self._intake = intake
        self._num_sequences = num_sequences
        self._num_tokens = 0
        self._is_open = True
        intake.num_sequences += num_sequences

    def reserve(self, num_prompt: int, num_tokens: int) -> None:
        """Its prompts have `num_prompt` tokens, once for each sequence, and it can come to `num_tokens` with its answers.

        Raises: ApiError (429) if too many tokens wait, or the key has too many in flight.
        """
        self._intake.reserve(self.caller, num_prompt, num_tokens)
        self._num_tokens = num_tokens

    def close(self) -> None:
        """The request has ended. Idempotent, never blocks."""
        if self._is_open:
            self._is_open = False
            self._intake.give_back(self.caller, self._num_sequences, self._num_tokens)


# -------- request id
# The name of a request, by which its client and the log speak of the same one: `X-Request-Id`.

HEADER: Final = b"x-request-id"
_GIVEN: Final = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
"""What a client may choose: nothing that could end a header or a log line."""

current: Final[ContextVar[str]] = ContextVar("request_id", default="-")
"""Of the request that this task works on; `-` outside of one."""


def choose(given: bytes | None) -> str:
    """The client's own, if it can be one, else a new one."""
    return given.decode() if given is not None and _GIVEN.fullmatch(given) else f"req-{uuid.uuid4().hex}"


# -------- guard

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
        name = choose(headers.get(HEADER))
        token = current.set(name)
        bind_request(name)
        has_started = False

        async def send_named(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._count(scope, message["status"])
                message["headers"] = [*message.get("headers", ()), (HEADER, name.encode())]
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
            await errors.unexpected(error).response()(scope, receive, send_named)
        finally:
            self._held_bytes -= body.num_bytes
            current.reset(token)

    async def _pass(self, scope: Scope, headers: dict[bytes, bytes], body: "_Body", receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        self._check_headers(scope)
        if not self._hosts.allow(headers.get(b"host")):
            raise errors.foreign_host(headers[b"host"])
        if path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            caller = self._keys.identify(headers.get(b"authorization"))
            if caller is None:
                raise errors.no_key()
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
            raise errors.too_many("Other requests hold all the memory there is for bodies.", of="requests", retry_after_s=1)

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
