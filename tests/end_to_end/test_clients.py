"""Public clients and agents before the server: the first example with tools that each documents, with a small model.

A script for each client lies in clients/, beside what its environment is made of. Steps fail by the model or by the server:
which one, a script says by its client's exceptions, and a proxy by what was asked and answered.
"""

import contextlib
import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from tests.end_to_end.small import server_process

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "clients"
MODEL = "smollm2-135m"
COPY = 'Say exactly this:\n{"name": "get_weather", "arguments": {"city": "Paris"}}'

pytestmark = pytest.mark.nightly


# What is asked and answered.


@dataclass
class Exchange:
    """A chat request with its answer."""

    asked: dict[str, Any]
    status: int
    text: str

    def deltas(self) -> Iterator[dict[str, Any]]:
        """The choices of a stream's events."""
        events = [line.removeprefix("data: ") for line in self.text.splitlines() if line]
        assert events[-1] == "[DONE]", self.text
        for event in events[:-1]:
            yield from json.loads(event)["choices"]

    def answer(self) -> tuple[list[dict[str, Any]], str | None]:
        """The calls, and the reason of the end."""
        if not self.asked.get("stream"):
            (choice,) = json.loads(self.text)["choices"]
            return choice["message"].get("tool_calls") or [], choice["finish_reason"]
        calls: list[dict[str, Any]] = []
        reason = None
        for choice in self.deltas():
            reason = choice["finish_reason"] or reason
            for delta in choice["delta"].get("tool_calls") or []:
                if delta["index"] == len(calls):
                    assert delta["id"] and delta["type"] == "function" and delta["function"]["name"], delta
                    calls.append({"id": delta["id"], "function": dict(delta["function"])})
                else:
                    assert delta["index"] == len(calls) - 1 and not delta.get("id") and not delta["function"].get("name"), delta
                    calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
        return calls, reason

    def faults(self) -> Iterator[str]:
        """Faults of the answer: it is not as the request wants it, however small the model is."""
        if self.status != 200:
            yield f"status {self.status}: {self.text}"
            return
        tools = {tool["function"]["name"]: tool["function"] for tool in self.asked.get("tools") or []}
        choice = self.asked.get("tool_choice") or "auto"
        calls, reason = self.answer()
        if (bool(calls) != (reason == "tool_calls") and reason != "length") or reason is None:
            yield f"{len(calls)} calls, but the reason of the end is {reason}"
        if choice not in ("auto", "none") and not calls and reason != "length":
            yield f"no call, though the choice is {choice}"
        if len(calls) > (0 if choice == "none" else 1 if self.asked.get("parallel_tool_calls") is False else len(calls)):
            yield f"too many calls: {calls}"
        if len({call["id"] for call in calls}) < len(calls):
            yield f"calls of one name: {calls}"
        for call in calls if reason != "length" else calls[:-1]:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if name not in tools or (isinstance(choice, dict) and name != choice["function"]["name"]):
                yield f"a call of {name}"
            elif not jsonschema_rs.is_valid(tools[name].get("parameters") or {}, json.loads(arguments)):
                yield f"arguments of {name} that do not validate: {arguments}"


@dataclass
class Proxy:
    """Proxy between a client and the server that remembers each exchange."""

    url: str
    target: str
    exchanges: list[Exchange] = field(default_factory=list)


@contextlib.contextmanager
def proxy_of(target: str) -> Iterator[Proxy]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self.forward(b"")

        def do_POST(self) -> None:
            self.forward(self.rfile.read(int(self.headers["Content-Length"])))

        def forward(self, body: bytes) -> None:
            headers = {"Content-Type": "application/json"} if body else {}
            with httpx.stream(self.command, target + self.path, content=body, headers=headers, timeout=300) as answer:
                self.send_response(answer.status_code)
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.end_headers()
                text = b""
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # some read no further than they need
                    for piece in answer.iter_raw():
                        text += piece
                        self.wfile.write(piece)
                        self.wfile.flush()
            if body:
                proxy.exchanges.append(Exchange(json.loads(body), answer.status_code, text.decode()))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        proxy = Proxy(f"http://127.0.0.1:{server.server_port}", target)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def proxy(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    log = tmp_path_factory.mktemp("clients") / "log"
    with server_process(log, MODEL, "--kv-budget", "256MiB") as server, proxy_of(server.url) as proxy:
        yield proxy


# Clients.

PYTHON = {
    "agents": [
        "haystack_agent",
        "inspect_agent",
        "langchain_agent",
        "openai_agents",
        "openai_python",
        "pydantic_ai_agent",
        "smolagents_agent",
    ],
    "structured": ["dspy_modules", "instructor_models", "litellm_completion", "llama_index_agent"],
}
"""Scripts by environment."""
NODE = ["ai_sdk", "openai_node"]


def environment(proxy: Proxy, folder: Path) -> dict[str, str]:
    """Variables of a client: it finds the server, and no other."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "OPENAI_BASE_URL": f"{proxy.url}/v1",
        "OPENAI_API_BASE": f"{proxy.url}/v1",
        "OPENAI_API_KEY": "any",
        "MODEL": MODEL,
        "COPY": COPY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def program_of(name: str, program: str) -> Path:
    """A program of an environment of clients."""
    path = ROOT / ".venv" / f"clients-{name}" / program
    if not path.exists():
        pytest.skip(f"{path.relative_to(ROOT)} is not there; make nightly installs it")
    return path


def run(proxy: Proxy, command: list[str | Path], folder: Path) -> str:
    """A client's output. The server has done what was asked of it, or the test fails."""
    proxy.exchanges.clear()
    ended = subprocess.run(
        command, cwd=folder, env=environment(proxy, folder), capture_output=True, text=True, timeout=600, check=False
    )
    faults = [fault for each in proxy.exchanges for fault in each.faults()]
    reports = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"client"')]
    for each in reports:
        outcome = "served" if each["ok"] else "weak model" if each["weak"] else "FAILED"
        print(f"{each['client']} {each['version']}: {each['step']}: {outcome} {each['why'][:200]}")
    assert not faults, faults
    assert ended.returncode == 0 and proxy.exchanges, ended.stderr
    assert not [each for each in reports if not each["ok"] and not each["weak"]]
    return ended.stdout


@pytest.mark.parametrize(("name", "script"), [(name, script) for name, scripts in PYTHON.items() for script in scripts])
def test_a_client_of_python_is_served(name: str, script: str, proxy: Proxy, tmp_path: Path) -> None:
    assert '{"client"' in run(proxy, [program_of(name, "bin/python"), SCRIPTS / f"{script}.py"], tmp_path)


@pytest.mark.parametrize("script", NODE)
def test_a_client_of_node_is_served(script: str, proxy: Proxy, tmp_path: Path) -> None:
    """In a folder with the packages, where Node looks for them."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    (tmp_path / "node_modules").symlink_to(program_of("node", "node_modules"))
    for each in (script, "steps"):
        shutil.copy(SCRIPTS / f"{each}.mjs", tmp_path)
    assert '{"client"' in run(proxy, [node, f"{script}.mjs"], tmp_path)


def test_aider_is_served_whatever_becomes_of_the_file(proxy: Proxy, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello')\n")
    settings = [{"name": f"openai/{MODEL}", "edit_format": "whole", "extra_params": {"max_tokens": 24}}]
    (tmp_path / ".aider.model.settings.yml").write_text(json.dumps(settings))
    quiet = [
        "--no-git",
        "--yes-always",
        "--no-check-update",
        "--no-show-release-notes",
        "--no-analytics",
        "--map-tokens=0",
        "--exit",
    ]
    aider = [program_of("aider", "bin/aider"), "--model", f"openai/{MODEL}", *quiet]
    output = run(proxy, [*aider, "--message", "Print bye too.", "hello.py"], tmp_path)
    assert f"openai/{MODEL}" in output and "litellm." not in output, output
