"""`vmmkv serve` as a real process over a real engine on the CPU; and a random model so small that it starts in seconds."""

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
from transformers import LlamaConfig

from tests.engine.decoder_models import small
from tests.server.tiny import byte_tokenizer

ONE, TWO, ADMIN = "a-key-of-one", "a-key-of-two", "the-key-of-the-administrator"


def small_model(directory: Path, **changes: Any) -> Path:
    """A decoder with the shape of Llama's and the bytes as its tokens; its weights are made when it is loaded."""
    options: dict[str, Any] = {"vocab_size": 258, "num_hidden_layers": 2, "max_position_embeddings": 1024, "eos_token_id": 257}
    small(LlamaConfig, architectures=["LlamaForCausalLM"], **(options | changes)).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


class ServerProcess:
    """The process and its clients."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process = process
        self.log = log
        self.url = ""

    def wait(self) -> None:
        """Until it serves, and has said where."""

        def serves() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            match = re.search(r"at (http://\S+)/v1", self.log.read_text())
            self.url = match[1] if match else ""
            return bool(match)

        until(serves, within_s=200)

    def openai(self, key: str = ONE, *, max_retries: int = 0) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=max_retries, timeout=120)

    def http(self, key: str = ONE) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)

    def metric(self, name: str) -> float:
        match = re.search(rf"^vmmkv_{name} (\S+)$", self.http(ADMIN).get("/metrics").text, re.MULTILINE)
        assert match is not None, name
        return float(match[1])

    def is_empty(self) -> bool:
        """Whether nothing runs, waits or has memory, but for what is cached."""
        names = ("requests_running", "requests_waiting", "kv_mapped_bytes", "kv_pending_reclaim_bytes", "kv_tokens")
        return not any(self.metric(name) for name in names)

    def pids(self) -> tuple[int, int]:
        """Of the HTTP process and of the engine's."""
        own = self.process.pid
        (engine,) = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return own, int(engine)

    def resident_bytes(self) -> int:
        """Memory of both."""
        statuses = [Path(f"/proc/{pid}/status").read_text() for pid in self.pids()]
        return sum(int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10 for status in statuses)  # type: ignore[index]


@contextlib.contextmanager
def server_process(log: Path, model: str | Path, *options: str) -> Iterator[ServerProcess]:
    """Serves until the end of the block, then must end by SIGTERM with 0. If it ends with 0 it has complained of nothing."""
    command = [sys.executable, "-m", "vmmkv", "serve", "--model", str(model), "--port", "0", "--device", "cpu", *options]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            server = ServerProcess(process, log)
            server.wait()
            yield server
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(120) == 0, log.read_text()
            if process.returncode == 0:
                assert not re.search("Traceback|nanobind|leaked", log.read_text()), log.read_text()
        finally:
            process.kill()


def small_server(directory: Path, *options: str) -> contextlib.AbstractContextManager[ServerProcess]:
    """A server of the small model."""
    options = ("--load-format", "dummy", "--kv-budget", "64MiB", *options)
    return server_process(directory / "log", small_model(directory), *options)


def until(condition: Callable[[], bool], *, within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)
