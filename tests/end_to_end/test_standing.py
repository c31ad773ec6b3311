"""What a server must bear that is left running: keys, floods, an administrator, a signal."""

import asyncio
import collections
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.end_to_end.small import ADMIN, ONE, TWO, ServerProcess, server_process, small_model, small_server, until

pytestmark = pytest.mark.nightly

NAME = "model"
NUM_RUNNING, NUM_QUEUED = 4, 4
CAPACITY = NUM_RUNNING + NUM_QUEUED
ENDLESS: Any = {"ignore_eos": True}


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("standing") / NAME
    directory.mkdir()
    keys = directory / "keys"
    keys.write_text(f"{ONE}\n{TWO}\n")
    options = ["--api-key-file", str(keys), "--admin-key", ADMIN, "--max-num-seqs", str(NUM_RUNNING)]
    options += ["--max-queued-requests", str(NUM_QUEUED), "--drain-timeout", "60"]
    with small_server(directory, *options) as server:
        yield server


def test_who_has_no_key_is_told_so_and_the_engine_never_sees_one(standing: ServerProcess) -> None:
    with pytest.raises(openai.AuthenticationError):
        standing.openai("another-key").models.list()
    assert [model.id for model in standing.openai(TWO).models.list()] == [NAME]
    assert httpx.get(f"{standing.url}/health").json() == {"status": "ok", "reason": None}
    _, engine = standing.pids()
    for part in ("cmdline", "environ"):
        data = Path(f"/proc/{engine}/{part}").read_bytes()
        assert not any(key.encode() in data for key in (ONE, TWO, ADMIN))


def test_keys_do_not_see_what_others_have_asked(standing: ServerProcess) -> None:
    def cached(key: str, **extra: Any) -> int:
        usage = standing.openai(key).completions.create(model=NAME, prompt="a" * 700, max_tokens=2, extra_body=extra).usage
        assert usage is not None and usage.prompt_tokens_details is not None  # type: ignore[attr-defined]
        count: int = usage.prompt_tokens_details.cached_tokens  # type: ignore[attr-defined]
        return count

    assert cached(ONE) == 0
    assert cached(ONE) > 600
    assert cached(TWO) == 0
    assert cached(ONE, cache_salt="s") == 0
    assert cached(TWO, cache_salt="s") == 0
    assert cached(TWO) > 600


def test_ten_times_too_many_are_each_answered_and_memory_does_not_grow_with_them(standing: ServerProcess) -> None:
    def flood() -> collections.Counter[int]:
        answers: collections.Counter[int] = collections.Counter()

        async def ask(client: httpx.AsyncClient, index: int) -> None:
            body = {"model": NAME, "prompt": f"{index} " * 100, "max_tokens": 100, **ENDLESS}
            answer = await client.post("/v1/completions", json=body)
            answers[answer.status_code] += 1
            if answer.status_code == 429:
                assert 1 <= int(answer.headers["Retry-After"]) <= 60
            else:
                assert answer.json()["usage"]["completion_tokens"] == 100

        async def all_at_once() -> None:
            headers, limits = {"Authorization": f"Bearer {ONE}"}, httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=standing.url, timeout=120, headers=headers, limits=limits) as client:
                await asyncio.gather(*(ask(client, index) for index in range(10 * CAPACITY)))

        asyncio.run(all_at_once())
        return answers

    flood()
    before_bytes = standing.resident_bytes()
    for _ in range(3):
        answers = flood()
        assert sum(answers.values()) == 10 * CAPACITY and answers.keys() == {200, 429}
        assert answers[200] >= CAPACITY
    assert standing.resident_bytes() - before_bytes < 32 << 20
    until(standing.is_empty)


def test_a_client_that_comes_again_when_it_is_told_to_is_answered(standing: ServerProcess) -> None:
    """OpenAI's own, which knows Retry-After."""
    made: list[int] = []

    def ask() -> None:
        answer = standing.openai(max_retries=10).completions.create(
            model=NAME, prompt="a", max_tokens=100, extra_body={**ENDLESS}, timeout=120
        )
        assert answer.usage is not None
        made.append(answer.usage.completion_tokens)

    threads = [threading.Thread(target=ask) for _ in range(3 * CAPACITY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert made == [100] * len(threads)


def test_the_administrator_empties_the_cache_and_changes_the_budget_while_it_serves(standing: ServerProcess) -> None:
    ask = standing.openai().completions.create
    ask(model=NAME, prompt="b" * 900, max_tokens=2)
    until(standing.is_empty)
    assert standing.metric("kv_cached_bytes") > 0
    assert standing.http(ONE).post("/kv/reset", json={}).status_code == 403
    forgotten = standing.http(ADMIN).post("/kv/reset", json={}).json()
    assert forgotten["freed_bytes"] > 0
    until(lambda: standing.metric("kv_cached_bytes") == 0)
    usage: Any = ask(model=NAME, prompt="b" * 900, max_tokens=2).usage
    assert usage.prompt_tokens_details.cached_tokens == 0

    def resize(budget_bytes: int) -> httpx.Response:
        return standing.http(ADMIN).post("/kv/resize", json={"budget_bytes": budget_bytes})

    stream = standing.openai().completions.create(model=NAME, prompt="c", max_tokens=900, stream=True, extra_body=ENDLESS)
    texts = iter(stream)
    next(texts)
    for budget_bytes in (16 << 20, 128 << 20, 64 << 20):
        answer = resize(budget_bytes)
        assert answer.json()["budget_bytes"] == budget_bytes, answer.text
        until(lambda wanted=budget_bytes: standing.metric("kv_budget_bytes") == wanted)  # type: ignore[misc]
        assert standing.metric("kv_created_bytes") <= budget_bytes
    assert sum(1 for _ in texts) > 0
    for budget_bytes in (1, 1 << 60):
        refused = resize(budget_bytes)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "budget_bytes"), refused.text
    assert standing.metric("kv_budget_bytes") == 64 << 20


def test_asleep_it_has_given_all_memory_back_and_awake_it_answers_as_before(standing: ServerProcess) -> None:
    def answer() -> str:
        return standing.openai().completions.create(model=NAME, prompt="d" * 900, max_tokens=20, temperature=0).choices[0].text

    before = answer()
    texts = iter(standing.openai().completions.create(model=NAME, prompt="e", max_tokens=900, stream=True, extra_body=ENDLESS))
    next(texts)
    assert standing.http(ADMIN).post("/sleep", timeout=120).json()["freed_bytes"] > 0
    assert [chunk.choices[0].finish_reason for chunk in texts][-1] == "length", "it was waited for"
    until(lambda: standing.metric("asleep") == 1 and standing.metric("kv_created_bytes") == 0)
    with pytest.raises(openai.InternalServerError, match="POST /wake_up"):
        answer()
    assert standing.http(ADMIN).post("/wake_up").status_code == 200
    assert answer() == before
    until(lambda: standing.metric("asleep") == 0)


def test_a_signal_lets_those_who_run_finish(standing: ServerProcess) -> None:
    """The last that is asked of this server."""
    stream = iter(standing.openai().completions.create(model=NAME, prompt="a", max_tokens=900, stream=True, extra_body=ENDLESS))
    next(stream)
    standing.process.send_signal(signal.SIGTERM)
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    assert standing.process.wait(120) == 0


def test_what_an_engine_had_on_a_disk_when_it_was_killed_another_server_hits(tmp_path: Path) -> None:
    directory = small_model(tmp_path / NAME, num_attention_heads=16, num_key_value_heads=16, head_dim=128)  # 64 tokens a page
    options = ("--load-format", "dummy", "--kv-budget", "64MiB", "--kv-disk", str(tmp_path / "kv"), "--kv-disk-budget", "64MiB")

    def ask(server: ServerProcess) -> tuple[str, Any]:
        body = {"model": NAME, "prompt": "a" * 700, "max_tokens": 8, "temperature": 0, **ENDLESS}
        answer = server.http().post("/v1/completions", json=body).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]

    with server_process(tmp_path / "log", directory, *options) as server:
        text, details = ask(server)
        assert details == {"cached_tokens": 0}
        until(lambda: server.metric('tier_held_bytes{tier="disk"}') >= 10 << 21)
        os.kill(server.pids()[1], signal.SIGKILL)
        assert server.process.wait(60) == 1
    with server_process(tmp_path / "log", directory, *options) as server:
        assert ask(server) == (text, {"cached_tokens": 640, "cached_tokens_details": {"disk": 640}})
