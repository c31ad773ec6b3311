"""`vmmkv serve`: start the engine process and the HTTP server, and end both.

run ── listen ── resolve the model ── start the engine ── bind its socket ── uvicorn

The engine cannot start: its reason is raised as CannotStart, the error of the command.
The engine ends: /health and requests get 503 for a while, then exit code 1.
SIGINT or SIGTERM: requests in flight get the drain timeout, new ones 503; the rest fail, then exit code 0.
"""

import asyncio
import contextlib
import dataclasses
import errno
import gc
import ipaddress
import logging
import resource
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Final, cast

import msgspec
import uvicorn
import zmq
from rich.console import Console

from vmmkv.errors import VmmkvError
from vmmkv.units import counted, format_bytes
from vmmkv_server.config import ServeConfig, with_flags
from vmmkv_server.console import LoadingProgress
from vmmkv_server.engine_client import ENGINE_COMMAND, EngineClient, EngineProcess
from vmmkv_server.http import edge
from vmmkv_server.http.app import create_app
from vmmkv_server.http.generation import Service
from vmmkv_server.http.limits import MAX_HEADER_BYTES
from vmmkv_server.logs import LogLines, configure_logging
from vmmkv_server.metrics import log_rates
from vmmkv_server.models import KNOWN_MODELS, resolve
from vmmkv_server.protocol import Ready
from vmmkv_server.tokenizer import Tokenizer

log = logging.getLogger(__name__)

GRACE_S: Final = 1
"""Time to send errors to clients whose requests are cut off when the server stops."""
LAST_ANSWERS_S: Final = 3.0
"""Time that /health and requests are answered with 503 after the engine has died."""
SPARE_CONNECTIONS: Final = 4096
"""Connections beyond those of requests in flight."""
BACKLOG: Final = 2048
"""Connections that the kernel holds until they are accepted."""
ACCEPTS_AT_ONCE: Final = 64
"""Connections accepted in one turn of the event loop, and failed attempts when no descriptors are left."""


class CannotStart(VmmkvError):
    """The address cannot be used, or the model cannot be served."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end this process before the engine is stopped."""

    def __init__(self, config: uvicorn.Config, before_shutdown: Callable[[], None]) -> None:
        super().__init__(config)
        self._before_shutdown = before_shutdown

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with the kernel's queue of full length."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the endless streams, and wait for the others."""
        self._before_shutdown()
        await super().shutdown(sockets)


def uvicorn_options(num_in_flight: int) -> dict[str, Any]:
    """Options of uvicorn for so many sequences in flight. httptools, its default parser, has no limit on headers."""
    return {
        "http": "h11",
        "h11_max_incomplete_event_size": 4 * MAX_HEADER_BYTES,
        "limit_concurrency": num_in_flight + SPARE_CONNECTIONS,
        "backlog": ACCEPTS_AT_ONCE,  # also the kernel's, until `_Server.startup`
    }


def run(config: ServeConfig, *, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serve until SIGINT or SIGTERM, or until the engine dies. Returns the exit code: 0, or 1 after a line in the log.

    Blocks; for the main thread. `engine_command` is for tests.
    Raises: ModelUnavailable, CannotStart. Where logs are JSON, these are logged, and 1 is returned.
    """
    configure_logging(config.engine.log_level, config.engine.log_format)
    try:
        return _serve(config, engine_command)
    except VmmkvError as error:
        if config.engine.log_format != "json":
            raise
        log.error("%s", error)
        return 1


def _serve(config: ServeConfig, engine_command: Sequence[str]) -> int:
    listener = _listen(config.host, config.port)
    if not config.api_keys and not _is_loopback(listener):
        log.warning(
            "Anyone who reaches %s port %d may use this server: it listens beyond this machine and has no keys; "
            "add --api-key-file, or --host 127.0.0.1.",
            *listener.getsockname()[:2],
        )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each client takes a descriptor
    # Only this user can open the directory: the engine's socket in it has no other protection.
    is_short = len(tempfile.gettempdir()) + len("/vmmkv-xxxxxxxx/engine") <= zmq.IPC_PATH_MAX_LEN
    private = tempfile.TemporaryDirectory(prefix="vmmkv-", dir=None if is_short else "/tmp")
    with listener, private as directory:
        model_dir = resolve(config.engine.model, weights=config.engine.load_format != "dummy")
        name = _served_name(config.engine.model)
        config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, model=str(model_dir)))
        return asyncio.run(_Launch(config, name, listener, Path(directory)).serve(engine_command))


class _Launch:
    """One run of the server: `config.engine.model` is a directory, `name` the model's name in requests.

    `directory` is for the engine's socket; it goes when the engine has connected.
    """

    def __init__(self, config: ServeConfig, name: str, listener: socket.socket, directory: Path) -> None:
        self._config = config.engine
        self._directory = directory
        self._listener = listener
        as_json = config.engine.log_format == "json"
        console = Console(file=cast(IO[str], LogLines(log)), width=1000) if as_json else Console(stderr=True)
        self._progress = LoadingProgress(console)
        self._client = EngineClient(f"ipc://{directory}/engine", on_loading=self._progress.show)
        hosts = answered_hosts(config, here=_is_loopback(listener))
        self._service = Service(self._client, name, config, hosts=hosts)
        debug = config.engine.log_level == "debug"
        self._server = _Server(
            uvicorn.Config(
                create_app(self._service),
                lifespan="off",
                log_config=None,
                log_level="info" if debug else "warning",
                access_log=debug,  # else a scraper's lines would bury the others
                timeout_graceful_shutdown=GRACE_S,
                **uvicorn_options(config.engine.max_num_seqs + config.max_queued_requests),
            ),
            self._service.stop,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._reports: set[asyncio.Task[None]] = set()
        """Tasks that log the engine's state, until they have ended."""
        self._stopping = False
        self._exit_code = 0
        self._cannot_start: str | None = None

    async def serve(self, engine_command: Sequence[str]) -> int:
        loop = asyncio.get_running_loop()
        edge.install(self._server.config)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        # Before ZeroMQ's threads exist, since it forks; the engine's connect waits for our bind.
        engine = await EngineProcess.start(
            engine_command, socket=self._client.address, config=msgspec.json.encode(self._config).decode()
        )
        try:
            self._client.start()
            self._reports = set(map(asyncio.create_task, (log_rates(self._client), self._service.watchdog.watch())))
            self._tasks = set(map(asyncio.create_task, (self._watch(engine), self._load())))
            await self._server.serve(sockets=[self._listener])
        finally:
            self._stopping = True
            for task in self._tasks | self._reports:
                task.cancel()
            self._progress.close(done=False)
            # Frozen objects outlive the interpreter's last collection, and C++ libraries report each as a leak.
            gc.unfreeze()
            await engine.stop(self._client.shutdown if self._client.was_ready else None)
            await self._client.close()
            await self._service.grammars.close()
        if self._cannot_start is not None:
            raise CannotStart(self._cannot_start)
        return self._exit_code

    def _stop(self) -> None:
        """Handle a signal: drain; on the second one stop at once."""
        if self._stopping:
            self._client.fail("The server is shutting down.")
            self._server.should_exit = self._server.force_exit = True
            return
        self._stopping = True
        self._tasks.add(asyncio.create_task(self._drain()))
        timeout_s = self._service.config.drain_timeout_s
        self._progress.console.print(
            f"stopping: requests in flight get up to {timeout_s:g} s; once more (Ctrl-C) stops at once", highlight=False
        )

    async def _drain(self) -> None:
        """Refuse new requests with 503, until those in flight have ended or the drain timeout is over."""
        if not await self._service.queue.drain():
            self._client.fail("The server is shutting down.")
        self._server.should_exit = True

    async def _watch(self, engine: EngineProcess) -> None:
        """Wait for the engine process to end by itself. Then answer with 503 for a while, and end this process."""
        reason = f"The engine process ended with {await engine.ended()}."
        for report in self._reports:
            report.cancel()
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

    def _find_format(self) -> None:
        """Find the format of the model's chats, which takes a while. Raises: ValueError for a parser that is unknown."""
        if (remark := self._service.chat_format.remark) is not None:
            log.warning("%s: %s", self._service.model, remark)

    async def _load(self) -> None:
        """Load the tokenizer while the engine loads the model, and announce the server when both are done."""
        try:
            loop, path = asyncio.get_running_loop(), Path(self._config.model)
            # In an executor of its own, for which neither asyncio.run waits after a signal, nor the command's `os._exit`.
            executor = ThreadPoolExecutor(1)
            self._service.tokenizer = await loop.run_in_executor(executor, Tokenizer.load, path)
            await loop.run_in_executor(executor, self._find_format)
        except Exception as error:
            self._cannot_start = with_flags(str(error))
            self._client.fail("The tokenizer cannot be loaded.")  # clients get no paths
            self._server.should_exit = True
            return
        ready = await self._client.settled()
        self._progress.close(done=isinstance(ready, Ready))
        # Imported objects stay: spare the garbage collector a million of them.
        gc.collect()
        gc.freeze()
        if isinstance(ready, Ready):
            shutil.rmtree(self._directory)  # the engine has connected, and a server that is killed would leave it
            text = _announcement(ready, self._service.model, self._listener)
            self._progress.console.print(text, highlight=False, soft_wrap=True)


def _announcement(ready: Ready, model: str, listener: socket.socket) -> str:
    limits, kv_dtype = ready.limits, ready.kv_cache_dtype
    host, port = listener.getsockname()[:2]
    host = f"\\[{host}]" if ":" in host else host
    ranks, each = (f" on {ready.num_ranks} ranks", " each") if ready.num_ranks > 1 else ("", "")
    return (
        f"vmmkv serves {model} ({ready.dtype} on {ready.device}{ranks}, {ready.implementation} implementation) at http://{host}:{port}/v1\n"
        f"page: http://{host}:{port}/\n"
        f"KV budget {format_bytes(limits.budget_bytes)}{each} in {kv_dtype}: {counted(limits.pool_tokens, 'token', ',')}, "
        f"shared by up to {counted(limits.max_sequences, 'sequence')} of up to {counted(limits.max_tokens, 'token', ',')} each"
        + (f"\nrequests without a kv_policy have {limits.kv_policy}" if limits.kv_policy else "")
    )


def _served_name(model: str) -> str:
    """The model's name in requests: the last part of a directory, else the name as given."""
    path = Path(model).expanduser()
    return path.resolve().name if model not in KNOWN_MODELS and path.exists() else model


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. It comes first, so that a taken port shows before minutes of loading. Raises: CannotStart."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:  # the latter for a name that no host can have
        code = error.errno if isinstance(error, OSError) else None
        remedy = ""
        if isinstance(error, (socket.gaierror, UnicodeError)):
            remedy = "; use 127.0.0.1 for this machine alone"
        elif code == errno.EADDRNOTAVAIL:
            remedy = "; use 127.0.0.1 for this machine alone, or 0.0.0.0 for all its networks"
        elif code in (errno.EADDRINUSE, errno.EACCES):
            remedy = "; use another --port, or --port 0 for any that is free"
        reason = str(error.strerror if isinstance(error, OSError) else error).partition(" (while ")[0]  # the address again
        raise CannotStart(f"cannot listen on --host {host} --port {port}: {reason}{remedy}") from error


def answered_hosts(config: ServeConfig, *, here: bool) -> frozenset[str] | None:
    """Names in the Host header that are answered, besides addresses; None for any.

    By DNS rebinding a page of another site can reach a server on this machine through its browser, under a name that points
    to 127.0.0.1. So a server that listens `here` alone answers to its own names, and so does any server with allowed hosts.
    """
    if not here and not config.allowed_hosts:
        return None
    return frozenset(map(str.lower, (*config.allowed_hosts, config.host, "localhost")))


def _is_loopback(listener: socket.socket) -> bool:
    """Can only this machine reach the listener?"""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback
