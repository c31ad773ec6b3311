"""`vmmkv serve` in processes of its own, and clients in others: what is measured is what a user has."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self, cast
from urllib.request import Request, urlopen

from bench.streams import Streamed
from bench.timing import WrongNumbers

_START_S: Final = 300.0
_STOP_S: Final = 60.0
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
        environment = {**os.environ, "VMMKV_ADMIN_KEY": self._admin_key}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            self.url = self._wait()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def forget(self) -> None:
        """Empty the prefix cache."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._admin_key}"}
        with urlopen(Request(f"{self.url}/kv/reset", b"{}", headers), timeout=60):
            pass

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


class Clients:
    """Processes that ask together. Use them in a `with` block."""

    def __init__(self, count: int) -> None:
        root = Path(__file__).parents[2]
        command = [sys.executable, "-m", "bench.streams"]
        pipe = subprocess.PIPE
        self._processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root) for _ in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, url: str, bodies: Sequence[dict[str, Any]]) -> list[Streamed]:
        """All at once, each process every so many-th of them. Raises: WrongNumbers if a process ends."""
        count = len(self._processes)
        for number in range(count):
            self._tell(number, json.dumps({"url": url, "bodies": bodies[number::count]}))
        for number in range(count):
            self._hear(number)
        for number in range(count):
            self._tell(number, "go")
        streamed: list[Streamed | None] = [None] * len(bodies)
        for number in range(count):
            streamed[number::count] = json.loads(self._hear(number))
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
        pipe.write(f"{line}\n")
        pipe.flush()

    def _hear(self, number: int) -> str:
        pipe = self._processes[number].stdout
        assert pipe is not None
        if not (line := pipe.readline()):
            raise WrongNumbers("a process of clients has ended; what it said stands above")
        return line
