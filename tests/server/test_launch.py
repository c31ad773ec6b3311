"""Laws of starting and stopping the two processes, with real ones and real signals."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import openai
import pytest

from tests.server import fake_engine
from tests.server.fake_engine import SILENT_SEED
from tests.server.support import eventually
from tests.server.tiny import byte_tokenizer
from vmmkv.cli.main import main
from vmmkv_server.config import ServeConfig
from vmmkv_server.launch import CannotStart, run
from vmmkv_server.protocol import LOST

ROOT = Path(__file__).parents[2]
SERVE = """\
import json, sys
from vmmkv_server.console import end
from vmmkv_server.config import EngineConfig, ServeConfig
from vmmkv_server.launch import CannotStart, run
engine, front, command = map(json.loads, sys.argv[1:])
try:
    end(run(ServeConfig(engine=EngineConfig(**engine), port=0, **front), engine_command=command))
except CannotStart as error:
    sys.exit(str(error))
"""


class Served:
    """A server in a process, with the fake engine in another."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def log(self) -> str:
        self._reader.join(0 if self.process.poll() is None else 60)
        return "".join(self.lines)

    def url(self) -> str:
        """Where it serves; waits until it does."""
        assert eventually(lambda: "KV budget" in self.log() or self.process.poll() is not None, within_s=120), self.log()
        match = re.search(r"serves (\S+) .* at (http://\S+)/v1", self.log())
        assert match is not None, self.log()
        return match[2]

    def is_quiet(self) -> bool:
        """Whether the log holds no traceback and no report of a leak."""
        return not re.search("Traceback|nanobind|leaked", self.log())

    def ends(self) -> int:
        return self.process.wait(120)

    def engine_pid(self) -> int:
        """The server's child; waits until it is there. Before it others come and go: triton's import runs ldconfig."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")

        engines: list[int] = []

        def is_there() -> bool:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pids = map(int, children.read_text().split())
                engines[:] = [pid for pid in pids if b"--socket" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            return engines != []

        assert eventually(is_there, within_s=120)
        (pid,) = engines
        return pid


def in_flight(url: str) -> int:
    """Requests that a server says it works on."""
    with httpx.stream("GET", f"{url}/events", timeout=60) as response:
        state = next(line.removeprefix("data: ") for line in response.iter_lines() if '"num_requests"' in line)
        return int(json.loads(state)["num_requests"])


def is_draining(url: str) -> bool:
    return str(httpx.get(f"{url}/health", timeout=60).json()["status"]) == "draining"


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    byte_tokenizer().save_pretrained(path)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").touch()
    return path


@contextmanager
def serving(
    model_dir: Path, *engine_arguments: str, front: dict[str, Any] | None = None, before: str = "", **settings: Any
) -> Iterator[Served]:
    config = json.dumps({"model": str(model_dir), **settings})
    engine = json.dumps([sys.executable, "-m", fake_engine.__name__, *engine_arguments])
    with subprocess.Popen(
        [sys.executable, "-c", before + SERVE, config, json.dumps(front or {}), engine],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        served = Served(process)
        try:
            yield served
        finally:
            process.kill()


@pytest.fixture(scope="module")
def standing(model_dir: Path) -> Iterator[Served]:
    with serving(model_dir, front={"drain_timeout_s": 600}) as served:
        yield served


@contextmanager
def silent_request(url: str) -> Iterator[list[httpx.Response]]:
    """A request that the engine never answers, in flight; the list gets its response, at the latest at the end."""
    got: list[httpx.Response] = []
    body = {"model": "tiny", "prompt": "a", "seed": SILENT_SEED}
    waiting = Thread(target=lambda: got.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60)))
    waiting.start()
    assert eventually(lambda: in_flight(url) == 1)
    yield got
    waiting.join(60)


def test_it_serves_until_a_signal_and_leaves_nothing_behind(model_dir: Path) -> None:
    with serving(model_dir, front={"host": "0.0.0.0"}) as served:
        url, engine = served.url().replace("0.0.0.0", "127.0.0.1"), served.engine_pid()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.completions.create(model="tiny", prompt="hello").choices[0].text == "hello"
        warning, stage, serves, page, budget = served.log().splitlines()
        assert "listens beyond this machine and has no keys" in warning
        assert re.fullmatch(r"weights: [\d.]+ s", stage), "without a terminal each finished stage is a line"
        assert re.fullmatch(r"page: http://0\.0\.0\.0:\d+/", page)
        assert serves.startswith("vmmkv serves") and budget.startswith("KV budget")
        served.process.send_signal(signal.SIGTERM)
        assert served.ends() == 0
        assert not alive(engine)
        assert served.is_quiet(), served.log()


def test_a_server_that_is_killed_leaves_no_process_and_no_file(model_dir: Path, tmp_path: Path) -> None:
    with serving(model_dir, before=f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n") as served:
        served.url()
        engine = served.engine_pid()
        served.process.kill()
        served.ends()
        assert eventually(lambda: not alive(engine))
        assert list(tmp_path.glob("vmmkv-*")) == []


@pytest.mark.nightly
def test_requests_in_flight_at_a_signal_get_the_drain_timeout_and_streams_end(model_dir: Path) -> None:
    with serving(model_dir, front={"drain_timeout_s": 1}) as served:
        url = served.url()
        with silent_request(url) as got, httpx.stream("GET", f"{url}/events", timeout=60) as events:
            lines = events.iter_lines()
            assert next(lines) == "event: state"
            served.process.send_signal(signal.SIGTERM)
            for _ in lines:  # to its end, which is no error
                pass
        assert got[0].status_code == 503
        assert served.ends() == 0
        assert served.is_quiet(), served.log()


@pytest.mark.nightly
def test_without_descriptors_it_says_so_once_and_serves_again_when_there_are(standing: Served) -> None:
    url, pid = httpx.URL(standing.url()), standing.process.pid
    limit = len(list(Path(f"/proc/{pid}/fd").iterdir())) + 3
    usual = resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with contextlib.ExitStack() as closing:
        for _ in range(10):
            closing.enter_context(socket.create_connection((url.host, url.port or 0), timeout=60))
        assert eventually(lambda: "no connection can be accepted" in standing.log()), standing.log()
        time.sleep(2.5)  # it tries again every second
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    assert standing.log().count("accept") == 1, standing.log()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)


def test_a_second_signal_answers_requests_in_flight_at_once(standing: Served) -> None:
    """The last of this server."""
    url = standing.url()
    with silent_request(url) as got:
        standing.process.send_signal(signal.SIGINT)
        assert eventually(lambda: is_draining(url))
        assert httpx.get(f"{url}/health", timeout=60).json()["reason"] == "still in flight: 1 sequence"
        refused = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "a"}, timeout=60)
        assert refused.status_code == 503
        standing.process.send_signal(signal.SIGTERM)
    assert got[0].status_code == 503
    assert "shutting down" in got[0].json()["error"]["message"]
    assert standing.ends() == 0


@pytest.mark.nightly
def test_neither_a_client_that_reads_nothing_nor_a_deaf_engine_delays_a_drain(model_dir: Path) -> None:
    with serving(model_dir, "--deaf", "--endless", front={"drain_timeout_s": 1}) as served:
        url = httpx.URL(served.url())
        body = json.dumps({"model": "tiny", "prompt": "a" * 90, "max_tokens": 160, "n": 32, "stream": True, "logprobs": 0})
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((url.host, url.port or 0))
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}"
            client.sendall(f"{head}\r\n\r\n{body}".encode())
            assert client.recv(15) == b"HTTP/1.1 200 OK"
            served.process.send_signal(signal.SIGTERM)
            assert served.ends() == 0
        assert "Traceback" not in served.log(), served.log()


def test_a_signal_while_the_model_loads_ends_both_processes(model_dir: Path) -> None:
    slow = """
import sys, time
from vmmkv_server import launch
launch.Tokenizer.load = lambda path: (print("it loads", file=sys.stderr, flush=True), time.sleep(600))
"""
    with serving(model_dir, "--loading-s", "600", before=slow) as served:
        engine = served.engine_pid()
        assert eventually(lambda: "it loads" in served.log(), within_s=120)
        served.process.send_signal(signal.SIGINT)
        assert served.ends() == 0
        assert not alive(engine)
        assert served.is_quiet(), served.log()


@pytest.mark.nightly
def test_a_stuck_engine_is_logged_and_a_dead_one_ends_the_server_with_an_error(model_dir: Path) -> None:
    with serving(model_dir, front={"stuck_after_s": 0.5}) as served:
        url = served.url()
        with silent_request(url) as got:
            assert eventually(lambda: "has made no step" in served.log())
            os.kill(served.engine_pid(), signal.SIGKILL)
        assert got[0].status_code == 503
        assert "signal SIGKILL" in got[0].json()["error"]["message"]
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")
        assert served.ends() == 1
        assert "signal SIGKILL" in served.log()


@pytest.mark.parametrize(("code", "said"), [(7, "exit code 7."), (LOST, f"exit code {LOST}: a GPU or another rank is lost")])
def test_an_engine_that_does_not_start_ends_the_server_at_once(model_dir: Path, code: int, said: str) -> None:
    with serving(model_dir, "--exit-at-start", str(code)) as served:
        assert served.ends() == 1
        assert said in served.log()
        assert served.is_quiet(), served.log()


@pytest.mark.parametrize("log_format", ["console", pytest.param("json", marks=pytest.mark.nightly)])
def test_why_an_engine_cannot_start_is_one_error_that_names_flags(model_dir: Path, log_format: str) -> None:
    with serving(model_dir, "--cannot-start", "max_tokens=9 is too many; lower max_tokens", log_format=log_format) as served:
        assert served.ends() == 1
        *_, line = lines = [line for line in served.log().splitlines() if not line.startswith("weights")]
        said = "--max-tokens 9 is too many; lower --max-tokens"
        if log_format == "console":
            assert lines == [said]
        else:
            assert (json.loads(line)["event"], json.loads(line)["level"]) == (said, "error")


@pytest.mark.nightly
def test_a_tokenizer_that_cannot_be_loaded_ends_the_server(model_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text((model_dir / name).read_text())
    (tmp_path / "tokenizer.json").write_text("{")
    with serving(tmp_path, "--loading-s", "600") as served:
        assert eventually(lambda: "tokenizer" in served.log(), within_s=120)
        assert served.ends() == 1  # an engine that loads is not asked to finish
        (line,) = served.log().splitlines()
        assert line.startswith(f"the tokenizer in {tmp_path} cannot be loaded: ")


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example", "no-such-host.invalid"])
def test_a_host_that_cannot_be_is_an_error_that_names_the_flag(host: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "nowhere", "--host", host]) == 1
    told = capfd.readouterr().err
    assert told.startswith(f"vmmkv serve: cannot listen on --host {host} --port 8000: ")
    assert told.endswith("; use 127.0.0.1 for this machine alone\n")


def test_a_taken_port_is_an_error_of_the_command_before_the_model_is_resolved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(tmp_path), "--port", str(port)]) == 1
    assert capfd.readouterr().err == (
        f"vmmkv serve: cannot listen on --host 127.0.0.1 --port {port}: Address already in use; "
        "use another --port, or --port 0 for any that is free\n"
    )


def test_an_address_that_is_not_here_is_said_with_one_that_is() -> None:
    with pytest.raises(CannotStart, match=r"--host 192\.0\.2\.1 --port 0: .*; use 127\.0\.0\.1 for this machine alone"):
        run(ServeConfig(host="192.0.2.1", port=0))
