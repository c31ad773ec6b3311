"""Stores that tests start: a Redis server, and a Mooncake master with a client that lends it memory."""

import contextlib
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


def free_port() -> int:
    """A port that stays free until it is listened at: below those that the system gives to connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def until(done: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, "it never comes true"
        time.sleep(2e-3)


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


class RedisServer:
    """`redis-server` in memory alone, on a port of its own. It keeps that when it is started again."""

    def __init__(self, *options: str) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed; on Debian: apt install redis-server")
        pytest.importorskip("redis")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._options = options
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--loglevel", "warning"]
        self._process = subprocess.Popen([*command, *self._options], stdout=subprocess.DEVNULL)
        until(lambda: answers(self.port))

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def client(self) -> Any:
        return importlib.import_module("redis").Redis.from_url(self.url)

    def empty(self) -> None:
        self.client().flushall()

    def put(self, name: str, value: bytes) -> None:
        self.client().set(name, value)

    def has(self, name: str) -> bool:
        return bool(self.client().exists(name))


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    server = RedisServer(*options)
    try:
        yield server
    finally:
        server.kill()


class MooncakeStore:
    """`mooncake_master`, and a `mooncake_client` with 256 MiB."""

    def __init__(self) -> None:
        pytest.importorskip("mooncake.store", exc_type=ImportError)
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.submodule_search_locations
        self._programs = Path(spec.submodule_search_locations[0])
        self.port, self._metrics_port, self._client_port = free_port(), free_port(), free_port()
        self.url = f"mooncake://127.0.0.1:{self.port}"
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self.start_master()
            self._start(
                "mooncake_client", master_server_address=f"127.0.0.1:{self.port}", metadata_server="P2PHANDSHAKE",
                host="127.0.0.1", port=self._client_port, global_segment_size="256 MB", protocol="tcp",
            )  # fmt: skip
            until(lambda: answers(self._client_port))
        except BaseException:
            self.kill()
            raise

    def start_master(self) -> None:
        self._start(
            "mooncake_master", rpc_address="127.0.0.1", rpc_port=self.port, metrics_port=self._metrics_port,
            default_kv_lease_ttl=100,
        )  # fmt: skip
        until(lambda: answers(self.port))

    def _start(self, program: str, **options: object) -> None:
        path = self._programs / program
        path.chmod(0o755)
        command = [str(path), *(f"--{name}={value}" for name, value in options.items())]
        self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def client(self) -> Any:
        client = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 128 << 20, "tcp", "", f"127.0.0.1:{self.port}") == 0
        return client

    def put(self, name: str, value: bytes) -> None:
        client = self.client()
        assert client.put(name, value) == 0
        client.close()

    def has(self, name: str) -> bool:
        client = self.client()
        has: bool = client.is_exist(name) == 1
        client.close()
        return has

    def empty(self) -> None:
        client = self.client()
        client.remove_all(force=True)
        client.close()

    def kill_master(self) -> None:
        for process in self._processes:
            if os.path.basename(process.args[0]) == "mooncake_master":  # type: ignore[index]
                process.kill()
                process.wait()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def mooncake_store() -> Iterator[MooncakeStore]:
    store = MooncakeStore()
    try:
        yield store
    finally:
        store.kill()


class Clock:
    """A clock that stores are given: it stands still until it is told to go on."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def pass_for(self, seconds: float) -> None:
        self.now_s += seconds
