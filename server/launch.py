"""`vmmkv serve`: the engine process, the HTTP server in this one, and the end of both.

run ── listen ── resolve the model ── start the engine ── bind its socket ── uvicorn
                                            │                                   │
             it cannot start: its reason is raised, the error of the command
             the engine ends: /health says 503, requests are answered, then exit 1
             SIGINT, SIGTERM: requests in flight get the drain timeout, new ones 503; the rest an error, then exit 0
"""

import asyncio
import contextlib
import dataclasses
import errno
import gc
import ipaddress
import logging
import math
import resource
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

import msgspec
import uvicorn
import zmq
from rich.console import Console
from uvicorn.protocols.http.h11_impl import H11Protocol

from vmmkv.errors import VmmkvError
from vmmkv.server.config import FrontConfig, ServeConfig, with_flags
from vmmkv.server.console import LoadingProgress, LogLines, configure_logging, in_daemon
from vmmkv.server.engine_client import ENGINE_COMMAND, EngineClient, EngineProcess
from vmmkv.server.http.app import Service, create_app
from vmmkv.server.http.limits import MAX_HEADER_BYTES
from vmmkv.server.metrics import tell
from vmmkv.server.models import KNOWN_MODELS, resolve
from vmmkv.server.protocol import Ready
from vmmkv.server.tokenizer import Tokenizer
from vmmkv.units import counted, format_bytes

log = logging.getLogger(__name__)

GRACE_S: Final = 1
"""How long errors may take to be sent to clients whose answers were not in time, when the server stops."""
LAST_ANSWERS_S: Final = 3.0
"""How long /health and requests are answered with 503 after the engine has died, before this process ends too."""
SPARE_CONNECTIONS: Final = 4096
"""Connections beyond those of requests in flight."""
BACKLOG: Final = 2048
"""Connections that the kernel holds until they are accepted."""
ACCEPTS_AT_ONCE: Final = 64
"""Connections accepted in one turn of the event loop; so often it tries again at once when there are no descriptors left."""
PROBE_S: Final = 1.0
"""How often a client that has ended its side is asked whether it still reads."""


class HalfCloseProtocol(H11Protocol):
    """uvicorn's protocol, which also answers a client that ends its side of the connection after its request.

    A client that is gone ends its side too, and TCP tells them apart only by what happens to bytes that are sent. So until the
    answer begins an interim response (100, which clients skip) is sent now and then; a dead connection ends by it.
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
        """See asyncio.Protocol."""
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)

    def _probe(self) -> None:
        if self.cycle.response_started or self.transport.is_closing():
            return
        if self.scope["http_version"] == "1.1":  # 1.0 has no interim responses
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe_timer = self.loop.call_later(PROBE_S, self._probe)


def uvicorn_options(num_in_flight: int) -> dict[str, Any]:
    """For so many sequences in flight at most. httptools, which uvicorn would take, has no limit on headers."""
    return {
        "http": HalfCloseProtocol,
        "h11_max_incomplete_event_size": 4 * MAX_HEADER_BYTES,
        "limit_concurrency": num_in_flight + SPARE_CONNECTIONS,
        "backlog": ACCEPTS_AT_ONCE,  # also the kernel's, until `_Server.startup` has set that
    }


def log_once_without_descriptors(loop: asyncio.AbstractEventLoop) -> None:
    """Log one line when connections cannot be accepted for want of descriptors, instead of a traceback for each try.

    asyncio tries again after a second, and reports each of its tries to the loop's exception handler.
    """
    last_s = -math.inf

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last_s
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            loop.default_exception_handler(context)
            return
        if loop.time() - last_s > 10:  # else the same shortage
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            log.error("no connection can be accepted: %s (limit %d); trying again every second", error.strerror, limit)
        last_s = loop.time()

    loop.set_exception_handler(handle)


class CannotStart(VmmkvError):
    """The address cannot be had, or the model cannot be served: the message is then the engine's own, or the tokenizer's."""


def run(config: ServeConfig, front: FrontConfig | None = None, *, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serve until SIGINT or SIGTERM, or until the engine dies. Returns the process's exit code: 0, or 1 with a log line.

    Blocks; to be called in the main thread. `front` is what the engine's process is not told. `engine_command` is for tests.
    Raises: ModelUnavailable if there is no such model; CannotStart. Where logs are JSON these are a line of it too, and 1.
    """
    configure_logging(config.log_level, config.log_format)
    try:
        return _serve(config, front or FrontConfig(), engine_command)
    except VmmkvError as error:
        if config.log_format != "json":
            raise
        log.error("%s", error)
        return 1


def _serve(config: ServeConfig, front: FrontConfig, engine_command: Sequence[str]) -> int:
    listener = _listen(config.host, config.port)
    if not front.api_keys and not _is_here(listener):
        log.warning(
            "Whoever reaches %s port %d may use this server: it listens beyond this machine and has no keys; "
            "add --api-key-file, or --host 127.0.0.1.",
            *listener.getsockname()[:2],
        )
    _raise_file_limit()
    with listener, _private_directory() as directory:
        model_dir = resolve(config.model, weights=config.load_format != "dummy")
        service_name = served_name(config.model)
        config = dataclasses.replace(config, model=str(model_dir))
        launch = _Launch(config, front, service_name, listener, f"ipc://{directory}/engine")
        return asyncio.run(launch.serve(engine_command))


def served_name(model: str) -> str:
    """The name that requests use: of a directory its last part, else the name as given."""
    path = Path(model).expanduser()
    return path.resolve().name if model not in KNOWN_MODELS and path.exists() else model


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which would end this process before the engine is stopped."""

    def __init__(self, config: uvicorn.Config, before_end: Callable[[], None]) -> None:
        super().__init__(config)
        self._before_end = before_end

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with the kernel's queue as long as it should be."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams that would never end, and wait for the others."""
        self._before_end()
        await super().shutdown(sockets)


class _Launch:
    """One run of the server: `config.model` is a directory here, `name` what clients call it."""

    def __init__(self, config: ServeConfig, front: FrontConfig, name: str, listener: socket.socket, address: str) -> None:
        self._config = config
        self._listener = listener
        console = Console(stderr=True)
        if config.log_format == "json":
            console = Console(file=cast(IO[str], LogLines(log)), width=1000)
        self._progress = LoadingProgress(console)
        self._client = EngineClient(address, on_loading=self._progress.show)
        self._service = Service(self._client, name, front, hosts=answered_hosts(front, config.host, here=_is_here(listener)))
        self._server = _Server(
            uvicorn.Config(
                create_app(self._service),
                lifespan="off",
                log_config=None,
                # A scraper asks every few seconds: its lines would bury the others.
                log_level="info" if config.log_level.lower() == "debug" else "warning",
                access_log=config.log_level.lower() == "debug",
                timeout_graceful_shutdown=GRACE_S,
                **uvicorn_options(config.max_num_seqs + front.max_queued_requests),
            ),
            self._service.dashboard.close,
        )
        self._draining: asyncio.Task[None] | None = None
        self._stopping = False
        self._exit_code = 0
        self._cannot_start: str | None = None

    async def serve(self, engine_command: Sequence[str]) -> int:
        loop = asyncio.get_running_loop()
        log_once_without_descriptors(loop)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        # Before ZeroMQ's threads are there, for it forks; the engine's connect waits for our bind.
        engine = await EngineProcess.start(
            engine_command, socket=self._client.address, config=msgspec.json.encode(self._config).decode()
        )
        tasks: list[asyncio.Task[None]] = []
        try:
            self._client.start()
            tasks = [
                asyncio.create_task(self._watch(engine)),
                asyncio.create_task(self._load()),
                asyncio.create_task(tell(self._client)),
                asyncio.create_task(self._service.watchdog.watch()),
            ]
            await self._server.serve(sockets=[self._listener])
        finally:
            self._stopping = True
            for task in tasks:
                task.cancel()
            self._progress.close(done=False)
            # Frozen objects outlive the interpreter's last collection, and libraries with C++ in them list each as a leak.
            gc.unfreeze()
            await engine.stop(self._client.shutdown if self._client.was_ready else None)
            await self._client.close()
            await self._service.grammars.close()
        if self._cannot_start is not None:
            raise CannotStart(self._cannot_start)
        return self._exit_code

    def _stop(self) -> None:
        """A signal came: finish what is in flight for a while; the second time, at once."""
        if self._stopping:
            self._client.fail("The server is shutting down.")
            self._server.should_exit = self._server.force_exit = True
            return
        self._stopping = True
        self._draining = asyncio.create_task(self._drain())
        timeout_s = self._service.front.drain_timeout_s
        say = f"stopping: requests in flight get up to {timeout_s:g} s; once more (Ctrl-C) stops at once"
        self._progress.console.print(say, highlight=False)

    async def _drain(self) -> None:
        """Answer new requests, and whoever asks for the health, with 503, until those in flight have ended or may no more."""
        if not await self._service.queue.drain():
            self._client.fail("The server is shutting down.")
        self._server.should_exit = True

    async def _watch(self, engine: EngineProcess) -> None:
        """When the engine's process ends unasked: say so to everybody for a while, then end this one."""
        reason = f"The engine process ended with {await engine.ended()}."
        if self._stopping:
            self._client.fail(reason)
            return
        was_ready = isinstance(self._client.phase, Ready)
        await self._client.engine_ended(reason)
        if self._cannot_start is None and self._client.cannot_start is not None:
            self._cannot_start = with_flags(self._client.cannot_start)
        if self._cannot_start is None:
            log.error("%s", reason)
            self._exit_code = 1
        await asyncio.sleep(LAST_ANSWERS_S if was_ready else 0)
        self._server.should_exit = True

    async def _load(self) -> None:
        """Load the tokenizer while the engine loads the model, and say when both are done."""
        try:
            self._service.tokenizer = await in_daemon(lambda: Tokenizer.load(Path(self._config.model)))
        except Exception as error:  # a broken file makes transformers raise almost anything
            self._cannot_start = f"the tokenizer in {self._config.model} cannot be loaded: {error}"
            self._client.fail("The tokenizer cannot be loaded.")  # clients are told this much, and no path
            self._server.should_exit = True
            return
        ready = await self._client.settled()
        self._progress.close(done=isinstance(ready, Ready))
        # What was imported stays: the garbage collector need not look at a million objects again and again.
        gc.collect()
        gc.freeze()
        if isinstance(ready, Ready):
            say = _announcement(ready, self._service.model, self._listener)
            self._progress.console.print(say, highlight=False, soft_wrap=True)


def _announcement(ready: Ready, model: str, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = f"\\[{host}]" if ":" in host else host
    return (
        f"vmmkv serves {model} ({ready.dtype} on {ready.device}, {ready.implementation} implementation) at http://{host}:{port}/v1\n"
        f"KV budget {format_bytes(ready.budget_bytes)}: {counted(ready.pool_tokens, 'token', ',')}; "
        f"{counted(ready.max_sequences, 'sequence')} of up to {counted(min(ready.max_tokens, ready.pool_tokens), 'token', ',')}"
    )


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, opened before all else: a port that is taken shows before minutes of fetching and loading.

    Raises: CannotStart.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:  # a name that no host can have is the latter
        code = error.errno if isinstance(error, OSError) else None
        remedy = "use 127.0.0.1 for this machine alone" if isinstance(error, (socket.gaierror, UnicodeError)) else ""
        if code == errno.EADDRNOTAVAIL:
            remedy = "use 127.0.0.1 for this machine alone, or 0.0.0.0 for all its networks"
        elif code in (errno.EADDRINUSE, errno.EACCES):
            remedy = "use another --port, or --port 0 for any that is free"
        reason = str(error.strerror if isinstance(error, OSError) else error).partition(" (while ")[0]  # the address once more
        raise CannotStart(
            "; ".join(filter(None, [f"cannot listen on --host {host} --port {port}: {reason}", remedy]))
        ) from error


def answered_hosts(front: FrontConfig, host: str, *, here: bool) -> list[str] | None:
    """Names in the Host header that are answered; None for any.

    A page of another site can reach a server on this machine through a browser here, by a name that its owner points at
    127.0.0.1 (DNS rebinding). So a server that listens `here` alone answers to its own names, and so does any server once
    names are given.
    """
    if not here and not front.allowed_hosts:
        return None
    return [*front.allowed_hosts, host, "localhost", "*.localhost", "127.0.0.1", "[::1]"]


def _is_here(listener: socket.socket) -> bool:
    """Can only this machine reach it?"""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _raise_file_limit() -> None:
    """Each client takes a file descriptor, and the usual limit is from days when a thousand were many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _private_directory() -> Iterator[Path]:
    """A directory of this user alone: the engine's socket has no other lock."""
    longest = len(tempfile.gettempdir()) + len("/vmmkv-xxxxxxxx/engine")
    parent = None if longest <= zmq.IPC_PATH_MAX_LEN else "/tmp"
    with tempfile.TemporaryDirectory(prefix="vmmkv-", dir=parent) as path:
        yield Path(path)
