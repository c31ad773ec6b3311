"""The HTTP process's side of the socket to the engine.

    EngineClient ── one PAIR socket, bound here ── engine
      └── Answers, one for each HTTP request: a list that the receiving task fills

Everything that ends a request (`Answers.close`, `Answers.abort`) is synchronous, so that it also works in a task that
is being cancelled because its client has gone away.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias

import msgspec
import zmq
import zmq.asyncio

from vmmkv.server.metrics import OF_QUEUE, OF_REQUESTS, OF_TOKENS, Times
from vmmkv.server.protocol import (
    Abort,
    AskMap,
    Beams,
    CannotStart,
    Failed,
    Forget,
    FromEngine,
    Generate,
    Loading,
    Managed,
    MemoryMap,
    Message,
    Output,
    Outputs,
    PromptLogprobs,
    Ready,
    Resize,
    Shutdown,
    Snapshot,
    decode_from_engine,
    encode,
)

# -------- memory maps
# The live memory map as clients have it: asked of the engine at most every `FRESH_S`, however many look.
#
# A prefix that several slots map has a number, from 0, which stays its own while any two of them do.

FRESH_S: Final = 0.25
"""A map that is younger is given again."""

Run: TypeAlias = tuple[int, int, int, str, int, int | None]
"""Group of layers, first page, pages, state, slots that map it, number of the prefix (None: the slot's own)."""
_Key: TypeAlias = tuple[int, int, int]
"""Group, page, handle: where a run begins. Two slots have a prefix in common at the same pages."""


class MapUnavailable(Exception):
    """There is nobody who could say what is mapped."""


class MemoryMaps:
    """The maps of one engine. `send` takes what is to be sent to it."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._last: dict[str, Any] | None = None
        self._taken_s = 0.0
        self._coming: asyncio.Future[dict[str, Any]] | None = None
        self._prefixes: dict[_Key, int] = {}
        self._dead: str | None = None

    async def get(self, *, within_s: float = 10.0) -> dict[str, Any]:
        """A map of now, or of a moment ago. Raises: MapUnavailable."""
        if self._dead is not None:
            raise MapUnavailable(self._dead)
        if self._last is not None and time.monotonic() - self._taken_s < FRESH_S:
            return self._last
        if self._coming is None:
            self._coming = asyncio.get_running_loop().create_future()
            self._coming.add_done_callback(_looked_at)
            self._send(AskMap())
        try:
            # Not wait_for, which before Python 3.12 loses the cancellation of who goes away just as the map comes. Shielded:
            # who goes away takes nothing from the others who wait.
            async with asyncio.timeout(within_s):
                return await asyncio.shield(self._coming)
        except TimeoutError:
            raise MapUnavailable(f"The engine has sent no map in {within_s:g} s; it may be in a long step.") from None

    def take(self, message: MemoryMap) -> None:
        """The engine has sent one."""
        self._last, self._taken_s = self._drawn(message), time.monotonic()
        if self._coming is not None and not self._coming.done():
            self._coming.set_result(self._last)
        self._coming = None

    def fail(self, reason: str) -> None:
        """No more come."""
        self._dead = reason
        if self._coming is not None and not self._coming.done():
            self._coming.set_exception(MapUnavailable(reason))
        self._coming = None

    def _drawn(self, message: MemoryMap) -> dict[str, Any]:
        shared: Counter[_Key] = Counter(
            (group, run.page, run.handle)
            for each in message.slots
            for group, runs in enumerate(each.groups)
            for run in runs
            if run.num_holders > 1
        )
        self._number({key: count for key, count in shared.items() if count > 1})
        slots = []
        for each in message.slots:
            runs: list[Run] = []
            for group, own in enumerate(each.groups):
                for page, num_pages, state, _, handle in own:
                    key = (group, page, handle)
                    prefix = self._prefixes.get(key)
                    runs.append((group, page, num_pages, state.value, 1 if prefix is None else shared[key], prefix))
            name = message.requests.get(each.slot)
            slots.append(
                {"slot": each.slot, "state": each.state.name.lower(), "tokens": each.num_tokens, "request": name, "runs": runs}
            )
        return {
            "num_slots": message.num_slots,
            "slot_pages": message.slot_pages,
            "took_us": round(message.took_us),
            "slots": slots,
        }

    def _number(self, shared: dict[_Key, int]) -> None:
        """Keep the numbers of prefixes that are still there, and give new ones the least that are free."""
        kept = {key: number for key, number in self._prefixes.items() if key in shared}
        taken, number = set(kept.values()), 0
        for key in sorted(shared.keys() - kept.keys()):
            while number in taken:
                number += 1
            kept[key] = number
            taken.add(number)
        self._prefixes = kept


def _looked_at(future: "asyncio.Future[dict[str, Any]]") -> None:
    """Nobody need wait for it any more when it fails."""
    if not future.cancelled():
        future.exception()


# -------- client

log = logging.getLogger(__name__)

LAST_WORDS_S = 0.05
"""How long ZeroMQ's own thread gets to read what a dead engine left in the socket."""


News: TypeAlias = Output | PromptLogprobs | Beams
"""Of one request."""


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
    """What the engine says about some requests that belong together: iterate for it, to the end of all.

    Each turn gives all that has come since the last one, in order: a step may bring news of several of these requests, and
    who is slow finds those of several steps, and catches up.

    With `at_end` whoever iterates is woken by ends alone, and finds then what came before: an answer that is sent whole
    costs the event loop one turn, not one for each token.

    Leaving the `with` block aborts those that are not finished.
    Raises, from the iteration: RequestFailed, EngineDead.
    """

    def __init__(self, client: "EngineClient", request_ids: Sequence[str], *, arrived_s: float, at_end: bool = False) -> None:
        self.first_s: float | None = None
        """When the first news came, of time.perf_counter."""
        self.num_tokens = 0
        """That have come, whether anybody has looked at them or not."""
        self.cached_tokens: dict[str, int] = {}
        """By request, what the prefix cache had of its prompt, if anything."""
        self._arrived_s = arrived_s
        self._last_s = 0.0
        self._client = client
        self._unfinished = set(request_ids)
        self._at_end = at_end
        self._arrived: list[News] = []
        self._error: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[News]:
        while self._unfinished:
            if self._arrived:
                arrived, self._arrived = self._arrived, []
                # What had come before its request was aborted is of no use to anybody.
                news = [each for each in arrived if each.request_id in self._unfinished]
                self._unfinished.difference_update(each.request_id for each in news if _is_last(each))
                if news:
                    return news
            elif self._error is not None:
                raise self._error
            else:
                self._waiting = asyncio.get_running_loop().create_future()
                try:
                    await self._waiting
                finally:
                    self._waiting = None
        raise StopAsyncIteration

    def put(self, news: Output | Beams, now_s: float, *, num_tokens: int, is_last: bool) -> None:
        """From the receiving task: news of one of these requests. All that one message brings comes at one time."""
        self.num_tokens += num_tokens
        if news.cached_tokens:
            self.cached_tokens[news.request_id] = news.cached_tokens
        if self.first_s is None:
            self.first_s = now_s
            self._client.first_token_times.observe(now_s - self._arrived_s)
        elif now_s != self._last_s:
            self._client.token_times.observe(now_s - self._last_s)
        self._last_s = now_s
        self._arrived.append(news)
        if is_last or not self._at_end:
            self._wake()

    def put_prompt(self, news: PromptLogprobs) -> None:
        """From the receiving task: what is said of a prompt, before any token of its answer."""
        self._arrived.append(news)
        if not self._at_end:
            self._wake()

    def fail(self, error: Exception) -> None:
        """From the receiving task: nothing more comes. The iteration raises this, after what came before."""
        if self._error is None:
            self._error = error
            self._wake()

    def abort(self, request_id: str) -> None:
        """End one request here and in the engine; nothing if it has ended already. Never blocks."""
        if request_id in self._unfinished:
            self._unfinished.discard(request_id)
            self._client.abort(request_id)

    def close(self) -> None:
        """Abort whatever is not finished. Idempotent, never blocks."""
        for request_id in tuple(self._unfinished):
            self.abort(request_id)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def _ignore(_: int) -> None:
    pass


def _has_moved(before: Snapshot, now: Snapshot) -> bool:
    """Has the engine computed anything in between, or nothing left to do? One that only turns round says so too."""
    is_idle = not now.running and not now.waiting
    # A search says nothing before its end, but has other tokens after each step.
    return is_idle or any(
        getattr(before, name) != getattr(now, name) for name in ("prompt_tokens", "generated_tokens", "kv_tokens")
    )


def _is_last(news: News) -> bool:
    return isinstance(news, Beams) or (isinstance(news, Output) and news.finish_reason is not None)


class EngineClient:
    """One engine, reached over the ZeroMQ PAIR socket that this side binds at `address` (`ipc://...`).

    Make, use and close it within one event loop. `on_loading` is called with each step of the engine's start.
    """

    def __init__(self, address: str, *, on_loading: Callable[[Loading], None] | None = None) -> None:
        self.address = address
        self.phase: Phase = Loading(stage="starting the engine", done=0, total=1)
        self.snapshot: Snapshot | None = None
        """The engine's last account of itself."""
        self.snapshot_s = 0.0
        """When it came, of time.monotonic."""
        self.was_ready = False
        """Has the engine ever been ready? One that still loads does not read its socket."""
        self.cannot_start: str | None = None
        """Why the engine could not start, if it said so."""
        self.maps = MemoryMaps(lambda message: self._send(encode(message)))
        """What is mapped where, for whoever asks."""
        self.first_token_times = Times("time_to_first_token", "From the request to its first token.", OF_REQUESTS)
        self.token_times = Times("inter_token_latency", "Between a request's news and the next.", OF_TOKENS)
        self.queue_times = Times("request_queue_time", "From a request's arrival in the engine to its start.", OF_QUEUE)
        self.waiting_tokens = 0
        """Of the prompts of requests that have no answer yet."""
        self.on_begun: Callable[[int], None] = _ignore
        """Called with the tokens of a prompt when its answer begins."""
        self._waiting: dict[str, int] = {}
        """Requests without an answer yet, and the tokens of their prompts."""
        self._owed_since_s: float | None = None
        """Since when the engine has said nothing of what it has to do, of time.monotonic; None if that is nothing."""
        self._on_loading = on_loading
        self._answers: dict[str, Answers] = {}
        self._managing: deque[asyncio.Future[Managed]] = deque()
        self._settled = asyncio.Event()
        self.dead = asyncio.Event()
        """Set with the phase Dead, for whoever waits for something else meanwhile."""
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

    def silent_s(self) -> float:
        """For how long the engine has had something to do and made no step; 0 if it has nothing to do."""
        if self._owed_since_s is None or not isinstance(self.phase, Ready):
            return 0.0
        return time.monotonic() - self._owed_since_s

    def submit(self, requests: Sequence[Generate], *, arrived_s: float | None = None, at_end: bool = False) -> Answers:
        """Send requests to the engine. Their answers come through one iterator, which is to be closed; `at_end`: see there.

        The time to the first token counts from `arrived_s`, of time.perf_counter; from now if it is not given.
        Raises: EngineNotReady, EngineDead, or what a request that cannot be encoded raises; then nothing was sent.
        """
        self.require_ready()
        encoded = [encode(request) for request in requests]
        arrived_s = time.perf_counter() if arrived_s is None else arrived_s
        answers = Answers(self, [request.request_id for request in requests], arrived_s=arrived_s, at_end=at_end)
        for request in requests:
            assert request.request_id not in self._answers, f"request id {request.request_id} is in use"
            self._answers[request.request_id] = answers
            self._waiting[request.request_id] = len(request.prompt)
            self.waiting_tokens += len(request.prompt)
        for data in encoded:
            self._ask(data)
        return answers

    async def manage(self, message: Forget | Resize) -> Managed:
        """Have the engine do something between two steps. Raises: EngineNotReady, EngineDead; RequestFailed with its reason."""
        self.require_ready()
        done: asyncio.Future[Managed] = asyncio.get_running_loop().create_future()
        self._managing.append(done)
        self._send(encode(message))
        managed = await done
        if managed.error is not None:
            raise RequestFailed(managed.error)
        return managed

    def abort(self, request_id: str) -> None:
        """Forget a request and have the engine stop it; nothing if it has ended."""
        self._leaves_queue(request_id)
        if self._answers.pop(request_id, None) is not None and isinstance(self.phase, Ready):
            self._ask(encode(Abort(request_id=request_id)))

    def fail(self, reason: str) -> None:
        """The engine is dead: everybody who waits for it gets EngineDead with this reason. Only the first one counts."""
        if isinstance(self.phase, Dead):
            return
        self.phase = Dead(reason=reason)
        self._settled.set()
        self.dead.set()
        self.maps.fail(reason)
        for answers in set(self._answers.values()):
            answers.fail(EngineDead(reason))
        self._answers.clear()
        self._waiting.clear()
        self.waiting_tokens = 0
        for done in self._managing:
            if not done.done():  # else whoever waited was cancelled
                done.set_exception(EngineDead(reason))
        self._managing.clear()

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

    def _ask(self, data: bytes) -> None:
        """Send what the engine answers with a step, at the least."""
        if self._owed_since_s is None:
            self._owed_since_s = time.monotonic()
        self._send(data)

    def _leaves_queue(self, request_id: str) -> int | None:
        """The tokens of its prompt, if it had no answer yet."""
        num_tokens = self._waiting.pop(request_id, None)
        if num_tokens is not None:
            self.waiting_tokens -= num_tokens
        return num_tokens

    def _began(self, request_id: str) -> None:
        if (num_tokens := self._leaves_queue(request_id)) is not None:
            self.on_begun(num_tokens)

    def _made_a_step(self) -> None:
        self._owed_since_s = time.monotonic() if self._answers else None

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
            case Outputs(outputs=outputs):
                now_s = time.perf_counter()
                for output in outputs:
                    if output.request_id in self._waiting:
                        self._began(output.request_id)
                    is_last = output.finish_reason is not None
                    find = self._answers.pop if is_last else self._answers.get
                    if (answers := find(output.request_id, None)) is not None:
                        answers.put(output, now_s, num_tokens=len(output.token_ids), is_last=is_last)
                    if output.queued_us:
                        self.queue_times.observe(output.queued_us / 1e6)
                self._made_a_step()
            case PromptLogprobs(request_id=request_id):
                self._began(request_id)
                if (answers := self._answers.get(request_id)) is not None:
                    answers.put_prompt(message)
                self._made_a_step()
            case Beams(request_id=request_id, beams=beams, queued_us=queued_us):
                self._began(request_id)
                if (answers := self._answers.pop(request_id, None)) is not None:
                    num_tokens = sum(len(beam.token_ids) for beam in beams)
                    answers.put(message, time.perf_counter(), num_tokens=num_tokens, is_last=True)
                self.queue_times.observe(queued_us / 1e6)
                self._made_a_step()
            case Failed(request_id=request_id, message=text):
                self._leaves_queue(request_id)
                if (answers := self._answers.pop(request_id, None)) is not None:
                    answers.fail(RequestFailed(text))
                self._made_a_step()
            case Snapshot():
                if self.snapshot is None or _has_moved(self.snapshot, message):
                    self._made_a_step()
                self.snapshot, self.snapshot_s = message, time.monotonic()
            case MemoryMap():
                self.maps.take(message)
            case Managed(budget_bytes=budget_bytes, pool_tokens=pool_tokens):
                if isinstance(self.phase, Ready):
                    self.phase = msgspec.structs.replace(self.phase, budget_bytes=budget_bytes, pool_tokens=pool_tokens)
                if not (done := self._managing.popleft()).done():
                    done.set_result(message)
            case Loading():
                if isinstance(self.phase, Loading):
                    self.phase = message
                    if self._on_loading is not None:
                        self._on_loading(message)
            case CannotStart(reason=reason):
                self.cannot_start = reason
            case Ready():
                self.was_ready = True
                if isinstance(self.phase, Loading):
                    self.phase = message
                    self._settled.set()


# -------- engine process
# The engine as a child process: started, watched, and stopped.

ENGINE_COMMAND: Final = (sys.executable, "-m", "vmmkv.server.engine")
STOP_S: Final = 1.0
"""How long an engine that was asked to finish may take; one that was sent SIGTERM gets as long again. One in a long step is not
waited for: nobody wants what it computes, and the kernel frees what it has.
"""
_PR_SET_PDEATHSIG: Final = 1
_ENVIRONMENT: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
"""What the engine finds if nobody says otherwise: OpenMP threads that spin as they wait make a busy CPU ten times slower."""


class EngineProcess:
    """One engine process. It is in a process group of its own, so that Ctrl-C reaches it only through us, in order."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], *, socket: str, config: str) -> Self:
        """Start `command` with the socket's address to connect to and the configuration as JSON. Raises: OSError."""
        arguments = (*command, "--socket", socket, "--config", config)
        return cls(
            await asyncio.create_subprocess_exec(
                *arguments, stdin=DEVNULL, process_group=0, preexec_fn=die_with_parent(), env=_ENVIRONMENT | os.environ
            )
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def ended(self) -> str:
        """Wait until it ends, and say how, in words."""
        code = await self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def stop(self, ask: Callable[[], None] | None) -> None:
        """End it: `ask` it, if there is a way, then SIGTERM, then SIGKILL. Idempotent."""
        for step in (ask, self._process.terminate):
            if step is None or self._process.returncode is not None:
                continue
            step()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S)
            except TimeoutError:
                continue
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def die_with_parent() -> Callable[[], None]:
    """For a child, before it becomes another program: have the kernel end it if this process ends, however that happens.

    Without this an engine whose parent was killed would keep the GPU's memory. Strictly it is the thread that ends: start the
    child in one that lasts.
    """
    libc, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


# -------- watchdog
# Whether the engine makes steps while it has work: a kernel that hangs ends nothing by itself, and nobody would be told.
#
# The HTTP process sees it from outside: it has asked, and for a while there has been no answer of any kind.


class Watchdog:
    """Says that an engine is stuck once it has been silent for `after_s`, and that it goes on when it does.

    `silent_s` is for how long the engine has had work and made no step.
    """

    def __init__(self, silent_s: Callable[[], float], after_s: float) -> None:
        self.after_s = after_s
        self._silent_s = silent_s

    def complaint(self) -> str | None:
        """What is wrong; None if nothing is."""
        silent_s = self._silent_s()
        if silent_s < self.after_s:
            return None
        return f"The engine has work and has made no step for {silent_s:.0f} s; its device may hang."

    async def watch(self) -> None:
        """Log it when it begins and when it ends. Runs until it is cancelled."""
        was_stuck = False
        while True:
            await asyncio.sleep(min(1.0, self.after_s / 4))
            complaint = self.complaint()
            if complaint is not None and not was_stuck:
                log.error("%s /health says so, until it goes on or the process is ended.", complaint)
            elif complaint is None and was_stuck:
                log.warning("The engine makes steps again.")
            was_stuck = complaint is not None
