"""Tools with a real server and the official client: SmolLM2, whose template knows no tools, calls what it must."""

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.end_to_end.small import ServerProcess, server_process
from vmmkv_server.models import resolve

MODEL = "smollm2-135m"
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "server" / "tools.md"
PARAMETERS: Any = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Brest", "Lyon", "Nîmes"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
    },
    "set_alarm": {"type": "object", "properties": {"at": {"type": "string", "format": "time"}}, "required": ["at"]},
    "get_time": {"type": "object", "properties": {}},
}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in PARAMETERS.items()]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    resolve(MODEL)
    with server_process(tmp_path_factory.mktemp("tools") / "log", MODEL, "--kv-budget", "256MiB") as one:
        yield one


def calls_of(served: ServerProcess, *, stream: bool, **options: Any) -> tuple[list[tuple[str, str]], str]:
    """The calls of an answer, and the reason of its end."""
    messages: Any = [{"role": "user", "content": "How is the weather in Lyon for two days?"}]
    asked: Any = {"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": 100, "parallel_tool_calls": False}
    completions = served.openai().chat.completions
    if not stream:
        (choice,) = completions.create(**(asked | options)).choices
        return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls], choice.finish_reason
    with completions.stream(**(asked | options)) as events:
        (choice,) = events.get_final_completion().choices
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls], choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", *PARAMETERS])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 5))])
def test_an_answer_that_must_call_has_arguments_that_validate(
    served: ServerProcess, choice: str, stream: bool, seed: int
) -> None:
    named = {"type": "function", "function": {"name": choice}}
    options: Any = {"tool_choice": choice if choice == "required" else named, "seed": seed, "temperature": 1.0}
    ((name, arguments),), reason = calls_of(served, stream=stream, **options)
    assert name in PARAMETERS and choice in ("required", name)
    jsonschema_rs.validate(PARAMETERS[name], json.loads(arguments))
    assert reason == "tool_calls"


def test_the_example_of_the_guide_runs(served: ServerProcess) -> None:
    (example,) = re.findall(r"```py\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert "http://127.0.0.1:8000" in example
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example.replace("http://127.0.0.1:8000", served.url), {"__name__": "example"})
    call, text = printed.getvalue().split("\n", 1)
    assert call == 'get_weather {"city": "Lyon"}' and text.strip()
