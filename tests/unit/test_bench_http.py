"""What HTTP costs, measured: the clients, the tokenizer that all of it needs, what is refused as wrong, and the bars."""

import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as RustTokenizer

from bench import run
from bench.rows import Row
from bench.serve import JUMPS_GAIN, MASKS_COST, PARTS, absent
from bench.serve.bars import bars
from bench.serve.engine import Answers
from bench.serve.over_http import _check_streams, _checked
from bench.serve.padding import SOURCE, padded, tokenizer_file, vocabulary_of
from bench.serve.requests import Workload, begins_alike
from bench.serve.server import Clients, Server
from bench.settings import SHAPES, Settings
from bench.streams import Streamed, read
from bench.timing import WrongNumbers, summarize
from tests.server.support import Running, running_server
from tests.server.tiny import byte_tokenizer, token_ids
from vmmkv.server.models import resolve
from vmmkv.server.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
PYTHON = sys.executable

USAGE = b'{"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}'
ENDED = b'data: {"choices": [], "usage": ' + USAGE + b"}\n\n"
TEXTS = [
    f'data: {{"choices": [{{"text": "{text}", "finish_reason": {reason}}}]}}\n\n'
    for text, reason in (("a", "null"), ("b", '"length"'))
]
STREAM = "".join(TEXTS).encode() + ENDED + b"data: [DONE]\n\n"


@pytest.fixture(autouse=True, scope="module")
def source() -> None:
    """The model whose tokenizer is taken is here: a run fetches nothing."""
    resolve(SOURCE)


# the clients


def test_a_stream_is_its_text_its_end_and_its_usage() -> None:
    streamed = read(STREAM, 200, 1.0, 2.0, 3.0)
    assert (streamed["text"], streamed["finish_reason"], streamed["chunks"], streamed["error"]) == ("ab", "length", 2, None)
    assert (streamed["prompt_tokens"], streamed["cached_tokens"], streamed["completion_tokens"]) == (3, 1, 2)
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
    streamed = clients.ask(f"{server.url}/v1/completions", [{**common, "prompt": prompt} for prompt in prompts], LIMIT_S)
    assert [each["text"] for each in streamed] == prompts, "the fake engine says its prompt"
    assert all(each["begun_s"] <= each["first_s"] <= each["ended_s"] for each in streamed)
    (refused,) = clients.ask(f"{server.url}/v1/completions", [{**common, "prompt": "a", "max_tokens": 0}], LIMIT_S)
    assert "status 400" in (refused["error"] or "")


def test_streams_that_do_not_end_are_waited_for_no_longer_than_their_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, Clients(1) as clients:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began_s = time.monotonic()
        with pytest.raises(WrongNumbers, match="not ended in their time"):
            clients.ask(url, [{}], 1.0)
        assert time.monotonic() - began_s < 10


# the server


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """In place of `vmmkv serve` a script that says its variables and its address; there a server that knows /kv/reset."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200 if self.headers["Authorization"] != "Bearer wrong" else 403)
            self.end_headers()
            self.wfile.write(b"so it is")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\nenv | grep ^VMMKV_\necho $$ > {tmp_path}/pid\necho it is at {url}/v1\nexec sleep 100\n")
        script.chmod(0o700)
        monkeypatch.setattr("bench.serve.server.sys.executable", str(script))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield url
        server.shutdown()
        thread.join()


def test_what_fails_in_the_block_is_told_what_the_server_said(played: str, tmp_path: Path) -> None:
    with pytest.raises(WrongNumbers) as raised, Server(tmp_path):
        raise WrongNumbers("request 3 failed")
    (note,) = raised.value.__notes__
    assert note.startswith("what vmmkv serve said last:") and note.endswith(f"it is at {played}/v1\n")


def test_no_variable_sets_an_option_of_the_server_that_the_engine_here_does_not_have(
    played: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMMKV_MAX_NUM_SEQS", "1")
    monkeypatch.setenv("VMMKV_CACHE_DIR", str(tmp_path))
    with Server(tmp_path) as server:
        said = re.findall(r"^(VMMKV_\w+)=", server._log.read_text(), re.MULTILINE)
    assert sorted(said) == ["VMMKV_ADMIN_KEY", "VMMKV_CACHE_DIR"]


def test_to_forget_takes_no_proxy_and_is_refused_in_words(played: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with Server(tmp_path) as server:
        server.forget()
        server._admin_key = "wrong"
        with pytest.raises(WrongNumbers, match="/kv/reset: status 403: so it is"):
            server.forget()
        server.url = "http://127.0.0.1:9"
        with pytest.raises(WrongNumbers, match="/kv/reset: URLError"):
            server.forget()


OWNER = """
import os, signal, sys
from pathlib import Path
from bench.serve import server
server.sys.executable = sys.argv[1]
with server.Server(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_ends_with_who_started_it_however_that_ends(played: str, tmp_path: Path) -> None:
    done = subprocess.run([PYTHON, "-c", OWNER, str(tmp_path / "python")], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    deadline_s = time.monotonic() + 10
    while is_running(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < deadline_s, "it goes on"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """A zombie is not: whoever it is left to has not waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


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


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"model": {"vocab": {"a": 0}}}', "cannot be padded: wanted a tokenizer of byte pairs"),
        ('{"model": {"type": "Unigram", "vocab": [["a", -1.0]]}}', "cannot be padded"),
        ('{"model": {"type": "BPE", "vocab": [["a", -1.0]]}}', "cannot be padded"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0, "b": 2}}}', "cannot be padded"),
        ('{"model": {"type": "BPE", "vocab": {"a": []}}}', "cannot be padded"),
        ("[]", "cannot be padded"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused_in_words(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{complaint}.*--tokenizer FILE"):
        vocabulary_of(path)


# what is lacking


def refused(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="2"):
        run.main(("serve", "--quick", "--device", "cpu", *arguments))
    return capsys.readouterr().err


def test_what_a_part_lacks_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "tokenizer.json"
    wrong.write_text("{}")
    assert "cannot be padded" in refused("--tokenizer", str(wrong), capsys=capsys), "it was meant for a part"
    with monkeypatch.context() as patch:
        patch.setattr("bench.serve.needs.find_spec", lambda name: None if name == "xgrammar" else name)
        assert "part grammar cannot run: the module xgrammar cannot" in refused("--parts", "http", "grammar", capsys=capsys)
        assert set(absent(quick_settings())) == {"grammar"}
    with monkeypatch.context() as patch:
        patch.setenv("VMMKV_CACHE_DIR", str(tmp_path))
        assert "name a tokenizer.json by --tokenizer FILE" in refused("--parts", "http", capsys=capsys)
    assert absent(quick_settings()) == {}


def test_by_default_parts_that_lack_something_are_absent_and_nothing_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr("bench.serve.needs.find_spec", lambda name: None)
    monkeypatch.setattr("bench.serve.run", lambda settings, report: ran.extend(settings.parts))
    assert run.main(("serve", "--quick", "--device", "cpu", "--out", str(tmp_path))) == 0
    assert set(ran) == set(PARTS) - {"http", "grammar"}
    printed = capsys.readouterr().out
    assert all(f"absent: serve {part}: the modules " in printed for part in ("http", "grammar"))


def quick_settings() -> Settings:
    return Settings(device=torch.device("cpu"), shape=SHAPES["wide"], quick=True)


# what is wrong

TEXT, PROMPT = "an answer", [1, 2, 3]


def checked(stream: Streamed, *, on_gpu: bool = False, same_offline: float = 1.0) -> float:
    said: list[str] = []
    context: Any = SimpleNamespace(
        settings=SimpleNamespace(on_gpu=on_gpu), report=SimpleNamespace(say=said.append), model=SimpleNamespace(name="tiny")
    )
    tokens = token_ids(TEXT)
    workload = Workload(name="mixed", text="", prompts=[PROMPT], outs=[len(tokens)], bound_s=1.0)
    offline = Answers(tokens=[tokens], seconds=1.0, first_s=[0.1], cached_tokens=0, likeliest=[])
    _check_streams(workload, [stream])
    return _checked(context, workload, Tokenizer(byte_tokenizer()), offline, same_offline, [[stream]])


GOOD = Streamed(
    begun_s=0.0, first_s=0.1, ended_s=0.2, text=TEXT, finish_reason="length", prompt_tokens=len(PROMPT), cached_tokens=0,
    completion_tokens=len(TEXT), chunks=9, error=None,
)  # fmt: skip


def test_the_same_texts_and_counts_are_right() -> None:
    assert checked(GOOD) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"text": "another"},
        {"completion_tokens": 8},
        {"prompt_tokens": 4},
        {"finish_reason": "stop"},
        {"error": "status 429"},
        {"cached_tokens": 1},
    ],
)
def test_other_texts_or_counts_are_wrong(wrong: dict[str, Any]) -> None:
    with pytest.raises(WrongNumbers):
        checked({**GOOD, **wrong})  # type: ignore[typeddict-item]


def test_on_a_gpu_rounding_may_change_a_text_but_no_count() -> None:
    assert checked({**GOOD, "text": "an apple"}, on_gpu=True) == 0.0
    with pytest.raises(WrongNumbers, match="only 0 % of the texts over HTTP begin"):
        checked({**GOOD, "text": "another"}, on_gpu=True)
    assert checked({**GOOD, "text": "another"}, on_gpu=True, same_offline=0.0) == 0.0, "nothing is known where runs differ"
    with pytest.raises(WrongNumbers):
        checked({**GOOD, "completion_tokens": 8}, on_gpu=True)


def test_prompts_have_in_common_how_they_begin_and_no_more() -> None:
    assert begins_alike([[1, 2, 3], [4, 2, 3], [5]]) == 0
    assert begins_alike([[1, 2, 3], [9], [1, 2, 4, 5], [1, 7]]) == 2 + 0 + 2 + 1
    assert begins_alike([[1, 2], [1, 2]]) == 4


# bars


def row(workload: str, system: str, metric: str, unit: str, *samples: float) -> Row:
    return Row(suite="serve", workload=workload, system=system, metric=metric, unit=unit, summary=summarize(samples))


def test_bars_hold_what_http_and_grammars_cost() -> None:
    http = row("qwen3-0.6b http: 256 requests of 100..1024 tokens in, as many out", "vmmkv", "throughput", "tok/s", 100, 102)
    rows = [
        http,
        dataclasses.replace(http, system="vmmkv serve", summary=summarize([95, 97])),
        row("qwen3-0.6b grammar: masks, 1 at once: 68 answers", "masks", MASKS_COST, "x", 0.9, 1.02, 9.0),
        row("qwen3-0.6b grammar: masks, 64 at once: 272 answers", "masks", MASKS_COST, "x", 1.05),
        row("qwen3-0.6b grammar: jumps, 1 at once: 20 answers", "jump-forward", JUMPS_GAIN, "x", 2.0),
    ]
    held = {bar.text.partition(", ")[2]: (bar.holds, dict(bar.figures)) for bar in bars(rows)}
    assert held["http: throughput over that without"] == (True, {"256 requests": pytest.approx(96 / 101)})
    assert held["grammar: time per token over free text"] == (False, {"1 at once": 1.02, "64 at once": 1.05})
    assert held["grammar: times as fast where half is forced"] == (True, {"1 at once": 2.0})


# a run


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "serve.jsonl").read_text().splitlines()]


def test_the_engines_own_rows_stay_if_the_server_fails_which_has_the_same_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*options: object) -> None:
        error = WrongNumbers("status 429")
        error.add_note("its log")
        raise error

    monkeypatch.setattr("bench.serve.over_http.Server", fail)
    options = ("--parts", "http", "--repeat", "1", "--commit", "abc123")
    assert run.main(("serve", "--quick", "--device", "cpu", "--out", str(tmp_path), *options)) == 1
    rows = rows_of(tmp_path)
    assert [row["system"] for row in rows if row["metric"] == "failed"] == ["-"]
    assert {row["system"] for row in rows if row["metric"] == "throughput"} == {"vmmkv"}
    assert len({row["workload"] for row in rows}) == 1
    assert "its log" in capsys.readouterr().out
