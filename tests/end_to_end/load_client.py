"""GuideLLM, a load client that knows nothing of vmmkv, against `vmmkv serve` with a real model: `make load` runs it.

It streams over both routes with `ignore_eos`, and reads the counts of tokens from each stream's own `usage`: no request may
fail, every answer has exactly the tokens that were asked for, the server has counted as many, and where prompts begin alike
the client has heard of `cached_tokens`. Its tables are printed; `load_client.txt` is what one run printed.
"""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

from tests.end_to_end.small import server_process
from vmmkv_server.models import resolve

MODEL: Final = "smollm2-135m"
NUM_REQUESTS: Final = 24
AT_ONCE: Final = 4
PROMPT_TOKENS, ANSWER_TOKENS, SHARED_TOKENS = 32, 16, 64
CLIENT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of the client asks."""

    name: str
    route: str
    shared_tokens: int = 0
    """At the start of all prompts."""


LOADS: Final = (
    Load("chat", "/v1/chat/completions"),
    Load("completions", "/v1/completions"),
    Load("completions that begin alike", "/v1/completions", SHARED_TOKENS),
)


def main() -> int:
    """The exit status: 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", type=Path, required=True, help="its command, in an environment of its own")
    guidellm: Path = parser.parse_args().guidellm
    tokenizer = resolve(MODEL)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder, server_process(Path(folder) / "log", MODEL) as server:
        url = server.url
        client = subprocess.run([str(guidellm), "--version"], capture_output=True, text=True, check=True).stdout.strip()
        print(f"{client}; vmmkv {version('vmmkv')}, torch {version('torch')}, Python {platform.python_version()}")
        print(f"vmmkv serve --model {MODEL} --port 0 --device cpu; {os.cpu_count()} processors")
        for load in LOADS:
            before = counted(url)
            requests, tables = run(guidellm, url, load, tokenizer, Path(folder))
            after = counted(url)
            found = checked(load, requests, {name: after[name] - before[name] for name in after})
            wrong += found
            said = "; ".join(found) or f"{NUM_REQUESTS} requests answered, counts of tokens as asked for and as the server's"
            command = shlex.join(arguments(load, "http://127.0.0.1:PORT", MODEL))
            print(f"\n== {load.name} ({load.route}): {said}\nguidellm {command}\n\n{tables}", flush=True)
    print(f"{len(wrong)} things are wrong" if wrong else "all is right")
    return 1 if wrong else 0


def run(guidellm: Path, url: str, load: Load, tokenizer: Path, folder: Path) -> tuple[dict[str, Any], str]:
    """What the client has recorded, and the tables that it prints. It needs no network but the server's."""
    out = folder / f"{load.name}.json"
    command = [str(guidellm), *arguments(load, url, str(tokenizer))]
    command += ["--disable-progress", "--output", "kind=console", "--output", f"kind=json,path={out}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "160"}
    environment.pop("PYTHONPATH", None)  # a checkout's packages are not the client's
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CLIENT_S, cwd=folder, check=False)
    if done.returncode != 0 or not out.is_file():
        raise SystemExit(f"guidellm has ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    printed = done.stdout[done.stdout.rindex("Run Summary Info") :]
    tables = [line for line in printed.splitlines() if line.startswith("|") or "Statistics" in line]
    return benchmark["requests"], "\n".join(tables)


def arguments(load: Load, url: str, tokenizer: str) -> list[str]:
    """What the client is told."""
    data: dict[str, Any] = {"kind": "synthetic_text", "prompt_tokens": PROMPT_TOKENS, "output_tokens": ANSWER_TOKENS}
    if load.shared_tokens:
        data["prefix_buckets"] = [{"bucket_weight": 100, "prefix_count": 1, "prefix_tokens": load.shared_tokens}]
    options = {
        "backend": {"kind": "openai_http", "target": url, "model": MODEL, "request_format": load.route},
        "profile": {"kind": "concurrent", "streams": AT_ONCE},
        "constraint": {"kind": "max_requests", "count": NUM_REQUESTS},
        "tokenizer": {"kind": "huggingface_auto", "model": tokenizer},
        "data": data,
    }
    return ["run", *(word for name, value in options.items() for word in (f"--{name}", json.dumps(value)))]


def checked(load: Load, requests: dict[str, Any], by_server: dict[str, float]) -> list[str]:
    """What is wrong, in words."""
    wrong: list[str] = []
    for state in ("errored", "incomplete"):
        wrong += sorted({f"{state}: {each['info']['error']}" for each in requests[state]})
    answered = requests["successful"]
    if len(answered) != NUM_REQUESTS:
        wrong.append(f"{len(answered)} requests of {NUM_REQUESTS} were answered")
    given = [each["output_metrics"]["text_tokens"] for each in answered]
    if set(given) != {ANSWER_TOKENS}:
        wrong.append(f"answers of {sorted(set(given))} tokens, not {ANSWER_TOKENS}")
    asked = [each["input_metrics"]["text_tokens"] for each in answered]
    if min(asked, default=0) < PROMPT_TOKENS + load.shared_tokens:
        wrong.append(f"prompts of {min(asked, default=0)} tokens, not at least {PROMPT_TOKENS + load.shared_tokens}")
    cached = [each["input_metrics"]["cached_tokens"] for each in answered]
    if None in cached:
        wrong.append("usage.prompt_tokens_details.cached_tokens has not come")
    most = max((each or 0 for each in cached), default=0)
    if load.shared_tokens and most < load.shared_tokens // 2:
        wrong.append(f"prompts share {load.shared_tokens} tokens, and no more than {most} were cached")
    by_client = {
        "generation_tokens": sum(given),
        "prompt_tokens": sum(asked) - sum(each or 0 for each in cached),
        "prefix_hit_tokens": sum(each or 0 for each in cached),
    }
    for name, count in by_client.items():
        if by_server[name] != count:
            wrong.append(f"{name}: {count} says the client, {by_server[name]:g} the server")
    return wrong


def counted(url: str) -> dict[str, float]:
    """The idle server's own counts since its start: they follow its engine by half a second at most."""
    time.sleep(1.0)
    with urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    found = {}
    for name in ("generation_tokens", "prompt_tokens", "prefix_hit_tokens"):
        match = re.search(rf"^vmmkv_{name}_total (\S+)$", text, re.MULTILINE)
        if match is None:
            raise SystemExit(f"/metrics has no vmmkv_{name}_total")
        found[name] = float(match[1])
    return found


if __name__ == "__main__":
    sys.exit(main())
