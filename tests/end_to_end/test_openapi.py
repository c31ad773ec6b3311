"""schemathesis asks a real server whatever its own OpenAPI document allows, and much that it does not."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import pytest

from tests.end_to_end.small import ADMIN, ONE, small_server, until

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method,allow_header_conformance,ignored_auth"
)
"""All that a server without objects to look up can fail, but that whatever fits the document be taken: a document cannot say
that a parameter is only for some value of another, or how many tokens a text has."""

COMMAND = (sys.executable, "-m", "schemathesis.cli", "run", "--header", f"Authorization: Bearer {ADMIN}", "--checks", CHECKS,
           "--request-timeout", "150", "--max-response-time", "120", "--continue-on-failure", "--no-shrink")  # fmt: skip
EVERYTHING = ("--exclude-path", "/kv/resize", "--exclude-path", "/sleep")
"""Asleep, it would answer 503 alone."""
ANSWERS = ("--mode", "positive", "--phases", "fuzzing", "--include-path-regex", "^/v1/c")
"""What the engine is to work on, for most of everything is refused before."""
RESIZE = ("--include-path", "/kv/resize")
"""Behind all others: in a budget of a page, to which this resizes sooner or later, they would wait for one another."""


@pytest.mark.nightly
def test_nothing_asked_is_a_5xx_or_hangs_and_the_pool_is_empty_afterwards(tmp_path: Path) -> None:
    """Ten minutes in `make nightly`, with several clients."""
    is_nightly = hypothesis.settings.get_current_profile_name() == "nightly"
    seconds, num_clients = (300, 4) if is_nightly else (10, 1)
    directory = tmp_path / "model"
    directory.mkdir()
    with small_server(directory, "--api-key", ONE, "--admin-key", ADMIN, "--max-num-seqs", "8") as server:

        def finished() -> float:
            return server.metric('requests_total{outcome="finished"}')

        def ask(options: tuple[str, ...], seed: int) -> None:
            """In processes: threads that make examples at once meet a fault of CPython 3.11's parser."""
            command = [*COMMAND, *options, "--max-time", str(seconds), f"{server.url}/openapi.json"]
            command += [] if is_nightly else ["--seed", str(seed)]

            def client(number: int) -> "subprocess.CompletedProcess[str]":
                folder = tmp_path / f"client-{number}"
                folder.mkdir(exist_ok=True)
                return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds + 120)

            with ThreadPoolExecutor(num_clients) as clients:
                for ran in clients.map(client, range(num_clients)):
                    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]

        budget = int(server.metric("kv_budget_bytes"))
        ask(EVERYTHING, 1)
        ask(ANSWERS, 1)
        for seed in (2, 3, 4, 5):  # a busy machine asks less in its seconds
            if finished() <= 10:
                ask(ANSWERS, seed)
        ask(RESIZE, 1)
        assert server.http(ADMIN).post("/kv/resize", json={"budget_bytes": budget}).status_code == 200
        until(server.is_empty)
        assert finished() > 10, "hardly anything reached the engine"
        assert server.http(ADMIN).post("/kv/reset", json={}).status_code == 200
        until(lambda: server.metric("kv_free_bytes") == server.metric("kv_created_bytes"))
        assert server.openai().completions.create(model="model", prompt="a", max_tokens=2).choices
