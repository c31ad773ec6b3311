"""What HTTP costs, measured: the clients, the tokenizer that all of it needs, what is refused as wrong, and the bars."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer

from bench import run
from bench.rows import Row
from bench.serve.bars import bars
from bench.serve.engine import Answers
from bench.serve.over_http import _checked
from bench.serve.padding import padded, tokenizer_file, vocabulary_of
from bench.serve.requests import Workload
from bench.serve.server import Clients
from bench.streams import Streamed, read
from bench.timing import WrongNumbers, summarize
from tests.server.support import Running, running_server
from tests.server.tiny import byte_tokenizer, token_ids
from vmmkv.server.tokenizer import Tokenizer

ENDED = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
TEXTS = [
    f'data: {{"choices": [{{"text": "{text}", "finish_reason": {reason}}}]}}\n\n'
    for text, reason in (("a", "null"), ("b", '"length"'))
]
STREAM = "".join(TEXTS).encode() + ENDED + b"data: [DONE]\n\n"


# the clients


def test_a_stream_is_its_text_its_end_and_its_usage() -> None:
    streamed = read(STREAM, 200, 1.0, 2.0, 3.0)
    assert (streamed["text"], streamed["finish_reason"], streamed["chunks"], streamed["error"]) == ("ab", "length", 2, None)
    assert (streamed["prompt_tokens"], streamed["completion_tokens"]) == (3, 2)
    assert (streamed["begun_s"], streamed["first_s"], streamed["ended_s"]) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("data", "status", "error"),
    [
        (STREAM.removesuffix(b"data: [DONE]\n\n"), 200, "no end"),
        (STREAM.replace(ENDED, b""), 200, "no end"),
        (b"", 200, "no end"),
        (b'data: {"error": {"message": "the engine died"}}\n\ndata: [DONE]\n\n', 200, "the engine died"),
        (b'{"error": "too many"}', 429, "429.*too many"),
    ],
)
def test_a_stream_that_is_not_whole_has_failed(data: bytes, status: int, error: str) -> None:
    assert re.search(error, read(data, status, 0.0, 0.0, 0.0)["error"] or "")


def test_processes_ask_together_and_answers_come_in_order() -> None:
    with running_server() as server, Clients(2) as clients:
        for _ in range(2):
            check_order(server, clients)


def check_order(server: Running, clients: Clients) -> None:
    common = {"model": "tiny", "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    prompts = ["one", "two", "three", "four", "five"]
    streamed = clients.ask(f"{server.url}/v1/completions", [{**common, "prompt": prompt} for prompt in prompts])
    assert [each["text"] for each in streamed] == prompts, "the fake engine says its prompt"
    assert all(each["begun_s"] <= each["first_s"] <= each["ended_s"] for each in streamed)
    (refused,) = clients.ask(f"{server.url}/v1/completions", [{**common, "prompt": "a", "max_tokens": 0}])
    assert "status 400" in (refused["error"] or "")


# the tokenizer


def test_a_padded_tokenizer_has_a_text_for_every_token_and_makes_the_same_tokens_of_a_text() -> None:
    path = tokenizer_file(None)
    plain, many = RustTokenizer.from_file(str(path)), RustTokenizer.from_str(padded(path, 60_000))
    assert vocabulary_of(path) == 49_152
    assert many.get_vocab_size() == 60_000
    text = 'He said "naïve": {"a_rather_long_key": 12}, and went.'
    assert many.encode(text).ids == plain.encode(text).ids
    assert many.decode(plain.encode(text).ids) == text
    assert all(many.decode([token]) for token in range(49_152, 60_000, 97))
    assert padded(path, 60_000) == padded(path, 60_000)


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model only 1000"):
        padded(tokenizer_file(None), 1000)
    with pytest.raises(ValueError, match=r"--tokenizer .* is no file"):
        tokenizer_file(tmp_path / "nothing.json")


# what is wrong

TEXT, PROMPT = "an answer", [1, 2, 3]


def checked(stream: Streamed, *, on_gpu: bool = False) -> float:
    said: list[str] = []
    context: Any = SimpleNamespace(
        settings=SimpleNamespace(on_gpu=on_gpu), report=SimpleNamespace(say=said.append), model=SimpleNamespace(name="tiny")
    )
    tokens = token_ids(TEXT)
    workload = Workload(name="mixed", text="", prompts=[PROMPT], outs=[len(tokens)], bound_s=1.0)
    offline = Answers(tokens=[tokens], seconds=1.0, first_s=[0.1], cached_tokens=0, likeliest=[])
    return _checked(context, workload, Tokenizer(byte_tokenizer()), [offline], [[stream]])


GOOD = Streamed(
    begun_s=0.0, first_s=0.1, ended_s=0.2, text=TEXT, finish_reason="length", prompt_tokens=len(PROMPT),
    completion_tokens=len(TEXT), chunks=9, error=None,
)  # fmt: skip


def test_the_same_texts_and_counts_are_right() -> None:
    assert checked(GOOD) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [{"text": "another"}, {"completion_tokens": 8}, {"prompt_tokens": 4}, {"finish_reason": "stop"}, {"error": "status 429"}],
)
def test_other_texts_or_counts_are_wrong(wrong: dict[str, Any]) -> None:
    with pytest.raises(WrongNumbers):
        checked({**GOOD, **wrong})  # type: ignore[typeddict-item]


def test_on_a_gpu_rounding_may_change_a_text_but_no_count() -> None:
    assert checked({**GOOD, "text": "another"}, on_gpu=True) == 0.0
    with pytest.raises(WrongNumbers):
        checked({**GOOD, "completion_tokens": 8}, on_gpu=True)


# bars


def row(workload: str, system: str, metric: str, unit: str, *samples: float) -> Row:
    return Row(suite="serve", workload=workload, system=system, metric=metric, unit=unit, summary=summarize(samples))


def test_bars_hold_what_http_and_grammars_cost() -> None:
    http = row("qwen3-0.6b http: 256 requests of 100..1024 tokens in, as many out", "vmmkv", "throughput", "tok/s", 100, 102)
    rows = [
        http,
        dataclasses.replace(http, system="vmmkv serve", summary=summarize([95, 97])),
        row("qwen3-0.6b grammar: masks, 1 at once: 68 answers", "masks", "time per token over free text", "x", 1.02),
        row("qwen3-0.6b grammar: masks, 64 at once: 272 answers", "masks", "time per token over free text", "x", 1.05),
        row("qwen3-0.6b grammar: jumps, 1 at once: 20 answers", "jump-forward", "times as fast a request", "x", 2.0),
    ]
    held = {bar.text.partition(", ")[2]: (bar.holds, dict(bar.figures)) for bar in bars(rows)}
    assert held["http: throughput over that without"] == (True, {"256 requests": pytest.approx(96 / 101)})
    assert held["grammar: time per token over free text"] == (False, {"1 at once": 1.02, "64 at once": 1.05})
    assert held["grammar: times as fast where half is forced"] == (True, {"1 at once": 2.0})


# a run


def test_a_quick_run_over_http_says_what_the_engine_says(tmp_path: Path) -> None:
    options = ("--parts", "http", "--repeat", "1", "--commit", "abc123")
    assert run.main(("serve", "--quick", "--device", "cpu", "--out", str(tmp_path), *options)) == 0
    rows = [json.loads(line) for line in (tmp_path / "serve.jsonl").read_text().splitlines()]
    found = {(row["system"], row["metric"]): row["p50"] for row in rows}
    assert {system for system, metric in found if metric == "throughput"} == {"vmmkv", "vmmkv serve"}
    assert found["vmmkv serve", "same answers as vmmkv"] == 100
    assert {row["workload"].partition(":")[0] for row in rows} == {"tiny llama-3.1-8b http"}
