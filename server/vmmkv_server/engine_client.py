"""The HTTP process's side of the engine: its process, its socket, and a watchdog.

    EngineClient ── one PAIR socket, bound here ── engine
      └── Answers, one for each HTTP request

What ends a request (`Answers.close`, `Answers.abort`) is synchronous, so it also works in a task that is being cancelled.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self, TypeAlias

import msgspec
import zmq
import zmq.asyncio

from vmmkv.lifetime import Closing
from vmmkv_server.console import die_with_parent
from vmmkv_server.latencies import QUEUE_BOUNDS_S, REQUEST_BOUNDS_S, TOKEN_BOUNDS_S, Times
from vmmkv_server.protocol import (
    LOST,
    Abort,
    AskMap,
    Beams,
    Compacted,
    Failed,
    FromEngine,
    Generate,
    LoadFailed,
    Loading,
    Manage,
    Managed,
    MemoryMap,
    Message,
    Output,
    Outputs,
    PromptLogprobs,
    Ready,
    Shutdown,
    Snapshot,
    decode_from_engine,
    encode,
)
from vmmkv_server.statistics import Metric

log = logging.getLogger(__name__)

LAST_WORDS_S: Final = 0.05
"""Time for ZeroMQ's thread to read what a dead engine left in the socket."""
FRESH_S: Final = 0.25
"""A younger memory map is given again."""
ENGINE_COMMAND: Final = (sys.executable, "-P", "-m", "vmmkv_server.engine")
STOP_S: Final = 1.0
"""Time for an engine to end after Shutdown, and again after SIGTERM. A long step is not waited for."""

News: TypeAlias = Output | PromptLogprobs | Beams
"""One message of the engine about one request."""


class EngineNotReady(Exception):
    """The engine is still loading."""


class EngineDead(Exception):
    """The engine has ended, or sends what cannot be read; it does not come back."""


class RequestFailed(Exception):
    """The engine failed on this request; others go on."""


class MapUnavailable(Exception):
    """The engine sends no memory map."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """The engine is gone."""

    reason: str


Phase: TypeAlias = Loading | Ready | Dead
"""The engine's state. It goes forward only."""


class Answers(Closing):
    """Async iterator over what the engine says of a group of requests, until all have ended.

    Each turn gives all news since the last one, in order. With `at_end` only ends wake the iterator, so that an answer that is
    sent whole costs one turn of the event loop. Leaving the `with` block aborts unfinished requests.

    Raises, from the iteration: RequestFailed, EngineDead.
    """

    def __init__(self, client: "EngineClient", request_ids: Sequence[str], *, arrived_s: float, at_end: bool = False) -> None:
        self.first_s: float | None = None
        """Time of the first news, by time.perf_counter."""
        self.num_tokens = 0
        """Tokens received so far, read by the iteration or not."""
        self.cached: dict[str, Counter[str]] = {}
        """Prompt tokens of each request found in the prefix cache, if any, by where they were."""
        self.compacted: dict[str, Compacted] = {}
        """Last compaction of each request that has had one."""
        self._arrived_s = arrived_s
        self._last_s = 0.0
        self._client = client
        self._unfinished = set(request_ids)
        self._at_end = at_end
        self._arrived: list[News] = []
        self._error: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[News]:
        while self._unfinished:
            if self._arrived:
                arrived, self._arrived = self._arrived, []
                news = [each for each in arrived if each.request_id in self._unfinished]  # others were aborted
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

    def put(self, news: News, now_s: float) -> None:
        """Add news of one of these requests; the news of one message have one `now_s`."""
        self._arrived.append(news)
        if not isinstance(news, PromptLogprobs):
            if isinstance(news, Output):
                self.num_tokens += len(news.token_ids)
            else:
                self.num_tokens += sum(len(beam.token_ids) for beam in news.beams)
            if news.cached:
                self.cached[news.request_id] = Counter(dict(news.cached))
            if self.first_s is None:
                self.first_s = now_s
                self._client.first_token_times.observe(now_s - self._arrived_s)
            elif now_s != self._last_s:
                self._client.token_times.observe(now_s - self._last_s)
            self._last_s = now_s
        if _is_last(news) or not self._at_end:
            self._wake()

    def fail(self, error: Exception) -> None:
        """Have the iteration raise this after what came before. Only the first error counts."""
        if self._error is None:
            self._error = error
            self._wake()

    def abort(self, request_id: str) -> None:
        """End one request here and in the engine, unless it has ended. Never blocks."""
        if request_id in self._unfinished:
            self._unfinished.discard(request_id)
            self._client.abort(request_id)

    def close(self) -> None:
        """Abort unfinished requests. Idempotent, never blocks."""
        for request_id in tuple(self._unfinished):
            self.abort(request_id)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def _is_last(news: News) -> bool:
    return isinstance(news, Beams) or (isinstance(news, Output) and news.finish_reason is not None)


class EngineClient:
    """One engine, reached over the ZeroMQ PAIR socket that is bound at `address` (`ipc://...`).

    Make, use and close it within one event loop. `on_loading` is called at each step of the engine's start.
    """

    def __init__(self, address: str, *, on_loading: Callable[[Loading], None] = lambda _: None) -> None:
        self.address = address
        self.phase: Phase = Loading(stage="starting the engine", done=0, total=1)
        self.dead = asyncio.Event()
        """Event that is set with the phase Dead."""
        self.was_ready = False
        """Has the engine been ready? It reads its socket only from then on, not while it loads."""
        self.cannot_start: str | None = None
        """Reason that the engine gave for not starting, if it gave one."""
        self.snapshot: Snapshot | None = None
        self.snapshot_s = 0.0
        """Arrival of the last snapshot, by time.monotonic."""
        self.feature_metrics: Mapping[str, Metric] = {}
        """Metrics of the engine's features, by name. An engine that has died keeps them, as it keeps its last snapshot."""
        self.maps = MemoryMaps(self.send)
        self.first_token_times = Times(
            "time_to_first_token", "Time from a request's arrival to its first token.", REQUEST_BOUNDS_S
        )
        self.token_times = Times("inter_token_latency", "Time between tokens of a request.", TOKEN_BOUNDS_S)
        self.queue_times = Times("request_queue_time", "Time in the engine's queue.", QUEUE_BOUNDS_S)
        self.waiting_tokens = 0
        """Prompt tokens of requests without an answer yet."""
        self.on_begun: Callable[[int], None] = lambda _: None
        """Function that is called with the tokens of a prompt when its answer begins."""
        self._waiting: dict[str, int] = {}
        """Prompt tokens of each request without an answer yet."""
        self._silent_since_s: float | None = None
        """Time of the engine's last step, or of the work that it got since; by time.monotonic. None while it has no work."""
        self._on_loading = on_loading
        self._answers: dict[str, Answers] = {}
        self._managing: deque[asyncio.Future[Managed]] = deque()
        self._settled = asyncio.Event()
        self._receiving: asyncio.Task[None] | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None

    def start(self) -> None:
        """Bind the socket and listen. Raises: zmq.ZMQError if the address cannot be bound."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # No limit on the queue: it would block this event loop, or drop a request, when the engine is slow.
        self._socket.set_hwm(0)
        self._socket.bind(self.address)
        self._receiving = asyncio.create_task(self._receive(self._socket), name="engine-receive")

    async def settled(self) -> Phase:
        """Wait until the engine is ready or dead."""
        await self._settled.wait()
        return self.phase

    def require_ready(self) -> Ready:
        """The engine's limits. Raises: EngineNotReady, EngineDead."""
        match self.phase:
            case Ready() as ready:
                return ready
            case Loading(stage=stage, done=done, total=total):
                raise EngineNotReady(f"The engine is loading ({stage}, {done} of {total}); try again in a while.")
            case Dead(reason=reason):
                raise EngineDead(reason)

    def silent_s(self) -> float:
        """Time for which the engine has had work and made no step; 0 without work."""
        if self._silent_since_s is None or not isinstance(self.phase, Ready):
            return 0.0
        return time.monotonic() - self._silent_since_s

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._answers)

    def submit(self, requests: Sequence[Generate], *, arrived_s: float | None = None, at_end: bool = False) -> Answers:
        """Send requests to the engine. Close the Answers; `at_end` is explained there.

        The time to the first token counts from `arrived_s`, of time.perf_counter; from now by default.
        Raises: EngineNotReady, EngineDead, or the encoder's error; then nothing was sent.
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
            self._give_work(data)
        return answers

    async def manage(self, message: Manage) -> Managed:
        """Have the engine do this between two steps. Raises: EngineNotReady, EngineDead; RequestFailed with its reason."""
        self.require_ready()
        done: asyncio.Future[Managed] = asyncio.get_running_loop().create_future()
        self._managing.append(done)
        self.send(message)
        managed = await done
        if managed.error is not None:
            raise RequestFailed(managed.error)
        return managed

    def abort(self, request_id: str) -> None:
        """Forget a request and have the engine stop it, unless it has ended."""
        self._leave_queue(request_id)
        if self._answers.pop(request_id, None) is not None and isinstance(self.phase, Ready):
            self._give_work(encode(Abort(request_id=request_id)))

    def fail(self, reason: str) -> None:
        """Declare the engine dead: all that wait for it get EngineDead. Only the first reason counts."""
        if isinstance(self.phase, Dead):
            return
        self.phase = Dead(reason=reason)
        self._settled.set()
        self.dead.set()
        self.maps.fail(reason)
        for answers in set(self._answers.values()):
            answers.fail(EngineDead(reason))
        for done in self._managing:
            if not done.done():  # else its caller was cancelled
                done.set_exception(EngineDead(reason))
        self._answers.clear()
        self._waiting.clear()
        self._managing.clear()
        self.waiting_tokens = 0

    async def engine_ended(self, reason: str) -> None:
        """Read the rest of the socket after the engine's process has ended, then `fail`."""
        await asyncio.sleep(LAST_WORDS_S)
        self.fail(reason)

    def shutdown(self) -> None:
        """Ask the engine to finish."""
        self.send(Shutdown())

    async def close(self) -> None:
        """Stop listening, and fail unfinished requests. Idempotent."""
        self.fail("The server is shutting down.")
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
            self._receiving = None
        if self._socket is not None and self._context is not None:
            self._socket.close(linger=100)  # time for a Shutdown to reach a living engine
            self._socket = None
            self._context.term()

    def _give_work(self, data: bytes) -> None:
        """Send a message that the engine answers with a step at least."""
        if self._silent_since_s is None:
            self._silent_since_s = time.monotonic()
        self.send(data)

    def send(self, message: Message | bytes) -> None:
        """Send at once or not at all; if there is no engine, its process's end says so."""
        if self._socket is None:
            return
        sent = self._socket.send(message if isinstance(message, bytes) else encode(message), zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future)  # complete when the call returns
        if (error := sent.exception()) is not None:
            log.warning("A message could not be sent to the engine: %s", error)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        # One turn of the event loop takes all messages of a step.
        shadow: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        try:
            while True:
                data = await socket.recv()
                with contextlib.suppress(zmq.Again):
                    while True:
                        self.handle(decode_from_engine(data))
                        data = shadow.recv(zmq.NOBLOCK)
        except msgspec.DecodeError as error:
            self.fail(f"The engine sent what cannot be read: {error}.")
        except Exception as error:  # this task is not awaited
            log.exception("Receiving from the engine failed.")
            self.fail(f"Receiving from the engine failed ({type(error).__name__}); the server's log has the details.")

    def handle(self, message: FromEngine) -> None:
        """Take a message of the engine: its answers go to the requests, its state to `phase` and `snapshot`."""
        match message:
            case Outputs(outputs=outputs):
                now_s = time.perf_counter()
                for output in outputs:
                    self._deliver(output, now_s)
            case PromptLogprobs() | Beams():
                self._deliver(message, time.perf_counter())
            case Compacted(request_id=request_id):
                if request_id in self._answers:
                    self._answers[request_id].compacted[request_id] = message
            case Failed(request_id=request_id, message=text):
                self._leave_queue(request_id)
                if (answers := self._answers.pop(request_id, None)) is not None:
                    answers.fail(RequestFailed(text))
            case MemoryMap():
                self.maps.take(message)
            case Managed(budget_bytes=budget_bytes, pool_tokens=pool_tokens):
                if isinstance(self.phase, Ready):
                    limits = dataclasses.replace(self.phase.limits, budget_bytes=budget_bytes, pool_tokens=pool_tokens)
                    self.phase = msgspec.structs.replace(self.phase, limits=limits)
                if not (done := self._managing.popleft()).done():
                    done.set_result(message)
            case LoadFailed(reason=reason):
                self.cannot_start = reason
            case Loading() if isinstance(self.phase, Loading):
                self.phase = message
                self._on_loading(message)
            case Ready():
                self.was_ready = True
                self.feature_metrics = message.feature_metrics
                if isinstance(self.phase, Loading):
                    self.phase = message
                    self._settled.set()
        made_a_step = isinstance(message, Outputs | PromptLogprobs | Beams | Failed)
        if isinstance(message, Snapshot):
            made_a_step = self.snapshot is None or _has_moved(self.snapshot, message)
            self.snapshot, self.snapshot_s = message, time.monotonic()
        if made_a_step:
            self._silent_since_s = time.monotonic() if self._answers else None

    def _deliver(self, news: News, now_s: float) -> None:
        if news.request_id in self._waiting:
            self.on_begun(self._leave_queue(news.request_id))
        find = self._answers.pop if _is_last(news) else self._answers.get
        if (answers := find(news.request_id, None)) is not None:
            answers.put(news, now_s)
        if not isinstance(news, PromptLogprobs) and news.queued_us:
            self.queue_times.observe(news.queued_us / 1e6)

    def _leave_queue(self, request_id: str) -> int:
        """Count a request as begun or ended. Returns the tokens of its prompt, 0 if it was not waiting."""
        num_tokens = self._waiting.pop(request_id, 0)
        self.waiting_tokens -= num_tokens
        return num_tokens


def _has_moved(before: Snapshot, now: Snapshot) -> bool:
    """Has the engine computed anything in between, or is it idle? A beam search shows only in `kv_tokens` before its end."""
    is_idle = not now.scheduler.requests_running and not now.scheduler.requests_waiting
    return is_idle or before.answers != now.answers or before.memory.kv_tokens != now.memory.kv_tokens


# Memory maps.

Run: TypeAlias = tuple[int, int, int, str, int, int | None]
"""Group of layers, first page, pages, state, slots that map it, number of the prefix (None: the slot's own)."""
_Key: TypeAlias = tuple[int, int, int]
"""Group, page, handle: where a run begins."""


class MemoryMaps:
    """The live memory map as clients get it, asked of the engine at most every FRESH_S. `send` sends to the engine.

    A prefix that several slots map has a number from 0 on, which it keeps while at least two of them map it.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._last: dict[str, Any] | None = None
        self._taken_s = 0.0
        self._coming: asyncio.Future[dict[str, Any]] | None = None
        self._prefixes: dict[_Key, int] = {}
        self._dead: str | None = None

    async def get(self, *, within_s: float = 10.0) -> dict[str, Any]:
        """The map of now, or of FRESH_S ago. Raises: MapUnavailable."""
        if self._dead is not None:
            raise MapUnavailable(self._dead)
        if self._last is not None and time.monotonic() - self._taken_s < FRESH_S:
            return self._last
        if self._coming is None:
            self._coming = asyncio.get_running_loop().create_future()
            # Retrieve the exception, since all that wait may be gone.
            self._coming.add_done_callback(lambda coming: coming.cancelled() or coming.exception())
            self._send(AskMap())
        try:
            # Not wait_for, which before Python 3.12 can lose a cancellation. Shielded, since others wait too.
            async with asyncio.timeout(within_s):
                return await asyncio.shield(self._coming)
        except TimeoutError:
            raise MapUnavailable(f"The engine has sent no map in {within_s:g} s; it may be in a long step.") from None

    def take(self, message: MemoryMap) -> None:
        """Take the engine's answer."""
        self._last, self._taken_s = self._drawn(message), time.monotonic()
        if self._coming is not None and not self._coming.done():
            self._coming.set_result(self._last)
        self._coming = None

    def fail(self, reason: str) -> None:
        """Refuse all from now on."""
        self._dead = reason
        if self._coming is not None and not self._coming.done():
            self._coming.set_exception(MapUnavailable(reason))
        self._coming = None

    def _drawn(self, message: MemoryMap) -> dict[str, Any]:
        holders: Counter[_Key] = Counter(
            (group, run.page, run.handle)
            for each in message.slots
            for group, runs in enumerate(each.groups)
            for run in runs
            if run.num_holders > 1
        )
        self._number_prefixes({key for key, count in holders.items() if count > 1})
        slots = []
        for each in message.slots:
            runs: list[Run] = []
            for group, own in enumerate(each.groups):
                for page, num_pages, state, _, handle in own:
                    prefix = self._prefixes.get(key := (group, page, handle))
                    runs.append((group, page, num_pages, state.value, 1 if prefix is None else holders[key], prefix))
            name = message.requests.get(each.slot)
            slots.append(
                {"slot": each.slot, "state": each.state.name.lower(), "tokens": each.num_tokens, "request": name, "runs": runs}
            )
        took_us = round(message.took_us)
        return {"num_slots": message.num_slots, "slot_pages": message.slot_pages, "took_us": took_us, "slots": slots}

    def _number_prefixes(self, shared: set[_Key]) -> None:
        """Keep the numbers of prefixes that are still shared, and give new ones the lowest free numbers."""
        kept = {key: number for key, number in self._prefixes.items() if key in shared}
        new = sorted(shared - kept.keys())
        free = sorted(set(range(len(shared))) - set(kept.values()))
        self._prefixes = kept | dict(zip(new, free, strict=False))


# The engine's process.


class EngineProcess:
    """The engine as a child process, in a process group of its own: Ctrl-C reaches it only through this process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], *, socket: str, config: str) -> Self:
        """Start `command` with the address of the socket, and the configuration as JSON in its input. Raises: OSError."""
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ  # OpenMP's spinning threads slow a busy CPU tenfold
        process = await asyncio.create_subprocess_exec(
            *command, "--socket", socket, stdin=PIPE, process_group=0, preexec_fn=die_with_parent(), env=environment
        )
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(config.encode())  # not an argument, which all users of this machine see
        process.stdin.close()
        return cls(process)

    async def ended(self) -> str:
        """Wait for its end, and say how it ended: the error itself may hold paths, which clients do not get."""
        code = await self._process.wait()
        if code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}" + (": a GPU or another rank is lost, the log says why" if code == LOST else "")

    async def stop(self, ask: Callable[[], None] | None) -> None:
        """End it: by `ask` if given, then by SIGTERM, then by SIGKILL. Idempotent."""
        for step in (ask, self._process.terminate):
            if step is None or self._process.returncode is not None:
                continue
            step()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_S)
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class Watchdog:
    """Reports an engine that has work and makes no step for `after_s`: a kernel that hangs ends nothing by itself.

    `silent_s` gives the time since the last step.
    """

    def __init__(self, silent_s: Callable[[], float], after_s: float) -> None:
        self.after_s = after_s
        self._silent_s = silent_s

    def complaint(self) -> str | None:
        """The report; None if the engine makes steps."""
        if (silent_s := self._silent_s()) < self.after_s:
            return None
        return f"The engine has work and has made no step for {silent_s:.0f} s; its device may hang."

    async def watch(self) -> None:
        """Log the beginning and the end of each silence, until cancelled."""
        was_stuck = False
        while True:
            await asyncio.sleep(min(1.0, self.after_s / 4))
            complaint = self.complaint()
            if complaint is not None and not was_stuck:
                log.error("%s /health says so, until it goes on or the process is ended.", complaint)
            elif complaint is None and was_stuck:
                log.warning("The engine makes steps again.")
            was_stuck = complaint is not None
