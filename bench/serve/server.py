"""`vmmkv serve` in processes of its own, and clients in others: what is measured is what a user has."""

import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Final, Self, cast
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from bench.streams import Streamed
from bench.timing import WrongNumbers
from vmmkv.config import KNOWN_VARIABLES, PREFIX
from vmmkv.server.engine_client import die_with_parent

_START_S: Final = 300.0
_STOP_S: Final = 60.0
_FORGET_S: Final = 60.0
_SAID_BYTES: Final = 4096
"""Of the end of what the server has said: what goes with a failure."""
_READ_BYTES: Final = 1 << 20
_ANNOUNCED: Final = re.compile(r"at (http://\S+)/v1")


class Server:
    """A server on a port of its own, of this machine alone. Use it in a `with` block."""

    def __init__(self, model: Path, *options: str) -> None:
        """`model` is a directory; it gets random weights. Raises: WrongNumbers, with what it has said, if it does not start."""
        self.name = model.name
        self._folder = TemporaryDirectory(prefix="vmmkv-bench-")
        self._log = Path(self._folder.name) / "log"
        self._admin_key = secrets.token_hex(16)
        command = [sys.executable, "-m", "vmmkv", "serve", "--model", str(model), "--load-format", "dummy"]
        command += ["--port", "0", *options]
        environment = _environment() | {"VMMKV_ADMIN_KEY": self._admin_key}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, preexec_fn=die_with_parent()
            )
        try:
            self.url = self._wait()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """What has failed in the block is told what the server said last: its log goes with it."""
        if error is not None:
            said = self._log.read_bytes()[-_SAID_BYTES:].decode(errors="replace")
            error.add_note(f"what vmmkv serve said last:\n{said or '(nothing)'}")
        self.close()

    def forget(self) -> None:
        """Empty the prefix cache. Raises: WrongNumbers if the server refuses, or cannot be reached."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._admin_key}"}
        request = Request(f"{self.url}/kv/reset", b"{}", headers)
        try:
            with build_opener(ProxyHandler({})).open(request, timeout=_FORGET_S):  # a proxy does not know this machine's ports
                pass
        except HTTPError as error:
            said = error.read().decode(errors="replace")
            raise WrongNumbers(f"/kv/reset: status {error.code}: {said[:500]}") from error
        except OSError as error:  # URLError is one, and so is who hangs up or is late
            raise WrongNumbers(f"/kv/reset: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End it, with its engine. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    def _wait(self) -> str:
        deadline_s = time.monotonic() + _START_S
        while (match := _ANNOUNCED.search(text := self._log.read_text(errors="replace"))) is None:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise WrongNumbers(f"vmmkv serve does not start:\n{text}")
            time.sleep(0.1)
        return match[1]


def _environment() -> dict[str, str]:
    """This process's, but for what would set options of `vmmkv serve`: the engine in this process reads none of them."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) or name in KNOWN_VARIABLES}


class Clients:
    """Processes that ask together. Use them in a `with` block."""

    def __init__(self, count: int) -> None:
        root = Path(__file__).parents[2]
        command = [sys.executable, "-m", "bench.streams"]
        pipe = subprocess.PIPE
        self._processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=root) for _ in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, url: str, bodies: Sequence[dict[str, Any]], limit_s: float) -> list[Streamed]:
        """All at once, each process every so many-th of them.

        Raises: WrongNumbers if a process ends, or not all have ended after `limit_s`; nothing can be asked after that.
        """
        count = len(self._processes)
        deadline_s = time.monotonic() + limit_s
        for number in range(count):
            self._tell(number, json.dumps({"url": url, "bodies": bodies[number::count]}))
        for number in range(count):
            self._hear(number, deadline_s)
        for number in range(count):
            self._tell(number, "go")
        streamed: list[Streamed | None] = [None] * len(bodies)
        for number in range(count):
            streamed[number::count] = json.loads(self._hear(number, deadline_s))
        return cast(list[Streamed], streamed)

    def close(self) -> None:
        """End them. Idempotent."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _tell(self, number: int, line: str) -> None:
        pipe = self._processes[number].stdin
        assert pipe is not None
        pipe.write(f"{line}\n".encode())
        pipe.flush()

    def _hear(self, number: int, deadline_s: float) -> bytes:
        """A line: the only one that it says until it is told something."""
        pipe = self._processes[number].stdout
        assert pipe is not None
        line = bytearray()
        while not line.endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise WrongNumbers("the streams have not ended in their time")
            if not (part := os.read(pipe.fileno(), _READ_BYTES)):
                raise WrongNumbers("a process of clients has ended; what it said stands above")
            line += part
        return bytes(line)
