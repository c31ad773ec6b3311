"""The HTTP process's side of the socket to the engine.

    EngineClient ── one PAIR socket, bound here ── engine
      └── Answers, one for each HTTP request: a queue that the receiving task fills

Everything that ends a request (`Answers.close`, `Answers.abort`) is synchronous, so that it also works in a task that
is being cancelled because its client has gone away.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import msgspec
import zmq
import zmq.asyncio

from vmmkv.server.protocol import (
    Abort,
    Beams,
    Failed,
    FromEngine,
    Generate,
    Loading,
    Ready,
    Shutdown,
    Snapshot,
    Tokens,
    decode_from_engine,
    encode,
)

log = logging.getLogger(__name__)

LAST_WORDS_S = 0.05
"""How long ZeroMQ's own thread gets to read what a dead engine left in the socket."""


class EngineNotReady(Exception):
    """The engine is still loading."""


class EngineDead(Exception):
    """The engine has ended, or what it says cannot be read; it does not come back."""


class RequestFailed(Exception):
    """The engine failed on this request; others go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """The engine is gone."""

    reason: str


Phase: TypeAlias = Loading | Ready | Dead
"""What the engine is doing. It goes forward only: Loading, Ready, Dead."""


class Answers:
    """What the engine says about some requests that belong together: iterate for their `Tokens` or `Beams`, to the end of all.

    Leaving the `with` block aborts those that are not finished.
    Raises, from the iteration: RequestFailed, EngineDead.
    """

    def __init__(self, client: "EngineClient", request_ids: Sequence[str]) -> None:
        self._client = client
        self._unfinished = set(request_ids)
        self._queue: asyncio.Queue[Tokens | Beams | Exception] = asyncio.Queue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Tokens | Beams:
        while self._unfinished:
            message = await self._queue.get()
            if isinstance(message, Exception):
                raise message
            # What was queued before its request was aborted is of no use to anybody.
            if message.request_id in self._unfinished:
                if _is_last(message):
                    self._unfinished.discard(message.request_id)
                return message
        raise StopAsyncIteration

    def put(self, message: Tokens | Beams | Exception) -> None:
        """From the receiving task: news of one of these requests."""
        self._queue.put_nowait(message)

    def abort(self, request_id: str) -> None:
        """End one request here and in the engine; nothing if it has ended already. Never blocks."""
        if request_id in self._unfinished:
            self._unfinished.discard(request_id)
            self._client.abort(request_id)

    def close(self) -> None:
        """Abort whatever is not finished. Idempotent, never blocks."""
        for request_id in tuple(self._unfinished):
            self.abort(request_id)


def _is_last(message: Tokens | Beams) -> bool:
    return isinstance(message, Beams) or message.finish_reason is not None


class EngineClient:
    """One engine, reached over the ZeroMQ PAIR socket that this side binds at `address` (`ipc://...`).

    Make, use and close it within one event loop. `on_loading` is called with each step of the engine's start.
    """

    def __init__(self, address: str, *, on_loading: Callable[[Loading], None] | None = None) -> None:
        self.address = address
        self.phase: Phase = Loading(stage="starting the engine", done=0, total=1)
        self.snapshot: Snapshot | None = None
        """The engine's last account of itself."""
        self.was_ready = False
        """Has the engine ever been ready? One that still loads does not read its socket."""
        self._on_loading = on_loading
        self._answers: dict[str, Answers] = {}
        self._settled = asyncio.Event()
        self._receiving: asyncio.Task[None] | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None

    def start(self) -> None:
        """Bind the socket and begin to listen. Raises zmq.ZMQError if the address cannot be bound."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # No limit on what is queued: a limit would block this event loop, or drop a request, when the engine is slow.
        self._socket.set_hwm(0)
        self._socket.bind(self.address)
        self._receiving = asyncio.create_task(self._receive(self._socket), name="engine-receive")

    async def settled(self) -> Phase:
        """Wait until the engine is ready or dead, and say which."""
        await self._settled.wait()
        return self.phase

    def require_ready(self) -> Ready:
        """The engine's limits. Raises: EngineNotReady while it loads, EngineDead."""
        match self.phase:
            case Ready() as ready:
                return ready
            case Loading(stage=stage, done=done, total=total):
                raise EngineNotReady(f"The engine is loading ({stage}, {done} of {total}); try again in a while.")
            case Dead(reason=reason):
                raise EngineDead(reason)

    def submit(self, requests: Sequence[Generate]) -> Answers:
        """Send requests to the engine. Their answers come through one iterator, which is to be closed.

        Raises: EngineNotReady, EngineDead, or what a request that cannot be encoded raises; then nothing was sent.
        """
        self.require_ready()
        encoded = [encode(request) for request in requests]
        answers = Answers(self, [request.request_id for request in requests])
        for request in requests:
            assert request.request_id not in self._answers, f"request id {request.request_id} is in use"
            self._answers[request.request_id] = answers
        for data in encoded:
            self._send(data)
        return answers

    def abort(self, request_id: str) -> None:
        """Forget a request and have the engine stop it; nothing if it has ended."""
        if self._answers.pop(request_id, None) is not None and isinstance(self.phase, Ready):
            self._send(encode(Abort(request_id=request_id)))

    def fail(self, reason: str) -> None:
        """The engine is dead: everybody who waits for it gets EngineDead with this reason. Only the first one counts."""
        if isinstance(self.phase, Dead):
            return
        self.phase = Dead(reason=reason)
        self._settled.set()
        for answers in set(self._answers.values()):
            answers.put(EngineDead(reason))
        self._answers.clear()

    async def engine_ended(self, reason: str) -> None:
        """The engine's process is gone: take what it said last from the socket, then `fail`."""
        await asyncio.sleep(LAST_WORDS_S)
        self.fail(reason)

    def shutdown(self) -> None:
        """Ask the engine to finish. Its process may take a while to end."""
        self._send(encode(Shutdown()))

    async def close(self) -> None:
        """Stop listening; who still waits gets EngineDead. Idempotent."""
        self.fail("The server is shutting down.")
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
            self._receiving = None
        if self._socket is not None and self._context is not None:
            # The linger lets a Shutdown that was just sent reach an engine that lives, and waits for no dead one.
            self._socket.close(linger=100)
            self._socket = None
            self._context.term()

    def _send(self, data: bytes) -> None:
        """Send at once or not at all; when there is nobody at the other end, who watches the process will say so."""
        if self._socket is None:
            return
        sent = self._socket.send(data, zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future)  # it has been tried when the call returns, without an await
        if (error := sent.exception()) is not None:
            log.warning("A message could not be sent to the engine: %s", error)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        # One wake-up of the event loop takes all that a step of the engine sent, not one message each.
        shadow: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        try:
            while True:
                data = await socket.recv()
                with contextlib.suppress(zmq.Again):
                    while True:
                        self._handle(decode_from_engine(data))
                        data = shadow.recv(zmq.NOBLOCK)
        except msgspec.DecodeError as error:
            self.fail(f"The engine sent what cannot be read: {error}.")
        except Exception as error:  # nobody awaits this task: it has to tell those who wait for it
            log.exception("Receiving from the engine failed.")
            self.fail(f"Receiving from the engine failed ({type(error).__name__}); the server's log has the details.")

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Tokens(request_id=request_id) | Beams(request_id=request_id):
                answers = self._answers.get(request_id)
                if _is_last(message):
                    self._answers.pop(request_id, None)
                if answers is not None:
                    answers.put(message)
            case Failed(request_id=request_id, message=text):
                if (answers := self._answers.pop(request_id, None)) is not None:
                    answers.put(RequestFailed(text))
            case Snapshot():
                self.snapshot = message
            case Loading():
                if isinstance(self.phase, Loading):
                    self.phase = message
                    if self._on_loading is not None:
                        self._on_loading(message)
            case Ready():
                self.was_ready = True
                if isinstance(self.phase, Loading):
                    self.phase = message
                    self._settled.set()
