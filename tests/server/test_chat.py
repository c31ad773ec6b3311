"""`vmmkv chat` as a user runs it: a process, with lines for it to read, against a server."""

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.fake_engine import ready_with
from tests.server.support import Running, eventually, running_server
from tests.server.tiny import TEMPLATE
from vmmkv.cli import printable
from vmmkv.cli.main import main
from vmmkv_server.protocol import Generate

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def chatting(*arguments: str, **environment: str) -> "Iterator[subprocess.Popen[str]]":
    with subprocess.Popen(
        [sys.executable, "-m", "vmmkv", "chat", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def listening() -> Iterator[Running]:
    """A server that has room for the answers that are asked for by default."""
    with running_server(ready=ready_with(model_tokens=1024), sockets=True) as running:
        yield running


def prompts(listening: Running) -> list[str]:
    """What the engine was asked, as text."""
    return [listening.tokenizer.text_of(each.prompt, skip_special_tokens=False) for each in listening.generates]


def test_a_conversation_has_a_history_until_it_is_reset(listening: Running) -> None:
    listening.answers("well [said]")
    with chatting("--url", f"{listening.url}/v1/", "--system", "Be brief.") as chat:
        out, err = chat.communicate("one\n\n/what\ntwo\n/reset\nthree\n/exit\nfour\n", timeout=60)
    assert (chat.returncode, err) == (0, "there is no /what; there are /reset and /exit\n")
    assert out.startswith("tiny at ")
    assert out.count("> well [said]\n") == 3 and "forgotten" in out
    one, two, three = prompts(listening)
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert one == f"{system}<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert two == f"{one}well [said]<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert three == one.replace("one", "three")


def test_reasoning_is_shown_and_is_no_part_of_the_conversation(listening: Running) -> None:
    template = f"{TEMPLATE}{{# </think> #}}"
    listening.shows(template)
    listening.answers("<think>\nHm.\n</think>\n\nwell")
    with chatting("--url", listening.url) as chat:
        out, err = chat.communicate("one\ntwo\n", timeout=60)
    assert out.count("> Hm.\nwell\n") == 2 and err == ""
    assert "well" in prompts(listening)[1] and "Hm." not in prompts(listening)[1]


def test_answers_are_the_likeliest_and_512_tokens_at_most_unless_said(listening: Running) -> None:
    listening.answers("well")
    options = ["--temperature", "0.5", "--top-p", "0.25", "--max-tokens", "3", "--seed", "7"]
    for arguments in (options, []):
        with chatting("--url", listening.url, *arguments) as chat:
            assert chat.communicate("one\n", timeout=60)[1] == ""
    given, default = (message for message in listening.engine.received if isinstance(message, Generate))
    assert (given.params.temperature, given.params.top_p, given.params.max_tokens, given.params.seed) == (0.5, 0.25, 3, 7)
    assert (default.params.temperature, default.params.top_p, default.params.max_tokens) == (0.0, 1.0, 512)


def test_an_answer_that_its_limit_cut_says_so(listening: Running) -> None:
    listening.answers("well")
    for arguments, shown in ((["--max-tokens", "3"], "> wel\n(cut at 3 tokens; --max-tokens)\n"), ([], "> well\n> ")):
        with chatting("--url", listening.url, *arguments) as chat:
            assert shown in chat.communicate("one\n", timeout=60)[0]


@pytest.mark.parametrize(
    "wrong", [("--temperature", "2.5"), ("--temperature", "-1"), ("--top-p", "1.5"), ("--top-p", "0"), ("--max-tokens", "0")]
)
def test_what_no_server_takes_is_wrong_usage(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.fixture
def patient() -> Iterator[Running]:
    """A server whose endless answers outlast any test."""
    with running_server(ready=ready_with(model_tokens=1 << 20, pool_tokens=1 << 20), sockets=True) as running:
        yield running


def test_ctrl_c_stops_the_answer_and_not_the_program(patient: Running) -> None:
    server = patient
    server.answers("la ")
    server.never_ends()
    with chatting("--url", server.url) as chat:
        assert chat.stdin is not None and chat.stdout is not None
        chat.stdin.write("sing\n")
        chat.stdin.flush()
        assert chat.stdout.readline().startswith("tiny at ")
        assert eventually(lambda: bool(prompts(server)))
        assert chat.stdout.read(8) == "> la la "
        chat.send_signal(signal.SIGINT)
        assert eventually(lambda: len(server.engine.aborted()) == 1), "the server goes on"
        server.engine.endless = False
        out, err = chat.communicate("again\n", timeout=60)
    assert (chat.returncode, err) == (0, "")
    assert " [stopped]\n> la \n> " in out
    assert "<|im_start|>assistant\nla la" in prompts(server)[1], "what it had said is part of the conversation"


def test_without_a_server_it_says_how_to_start_one() -> None:
    with chatting("--url", "http://127.0.0.1:9") as chat:
        _, err = chat.communicate("", timeout=60)
    assert chat.returncode == 1
    assert err.startswith("vmmkv chat: no server answers at http://127.0.0.1:9") and err.count("\n") == 1
    assert "start one with `vmmkv serve`, or name another with --url" in err


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", ""])
def test_what_is_no_address_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", f"--url={url}"]) == 1
    assert "write it as http://" in capsys.readouterr().err


def test_an_error_in_the_conversation_leaves_it_where_it_was(listening: Running) -> None:
    listening.answers("yes")
    with chatting("--url", listening.url) as chat:
        out, err = chat.communicate(f"{'long ' * 300}\nshort\n", timeout=60)
    assert chat.returncode == 0
    assert "1024" in err and "(status 400)" in err
    assert out.count("> yes\n") == 1
    assert "long" not in prompts(listening)[0]


class Guarded(http.server.BaseHTTPRequestHandler):
    """A server that shows the key it was sent, and says no more than `answer` to a question."""

    answer = (400, json.dumps({"error": {"message": "said \x1b[2J"}}).encode())

    def do_GET(self) -> None:
        key = self.headers.get("Authorization", "")
        models: Any = {"data": [{"id": key} if key != "Bearer nameless" else {}]}
        self.reply(200 if key else 401, json.dumps(models if key else {"error": {"message": "no \x1b[2Jkey"}}).encode())

    def do_POST(self) -> None:
        self.reply(*self.answer)

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def guarded() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_key_is_sent_and_what_a_server_says_cannot_move_the_cursor(guarded: str) -> None:
    with chatting(VMMKV_URL=guarded, VMMKV_API_KEY="from-outside\n") as chat:
        out, err = chat.communicate("hi\n", timeout=60)
    assert out.startswith("Bearer from-outside at ") and chat.returncode == 0
    assert "said [2J" in err and "\x1b" not in err


def test_a_key_that_is_needed_is_asked_for(guarded: str) -> None:
    with chatting("--url", guarded) as chat:
        _, err = chat.communicate("", timeout=60)
    assert chat.returncode == 1 and "no [2Jkey (status 401); give its key with --api-key or VMMKV_API_KEY" in err


@pytest.mark.parametrize("key", ["two\nlines", "mon-clé", "a b"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--api-key", key]) == 1
    err = capsys.readouterr().err
    assert "--api-key has spaces" in err and key not in err


def test_line_separators_of_unicode_do_not_cut_an_answer(listening: Running) -> None:
    listening.answers("one\u2028two\u0085")
    with chatting("--url", listening.url) as chat:
        _, err = chat.communicate("hi\nand?\n", timeout=60)
    assert err == "" and "one\u2028two\u0085" in prompts(listening)[1]


@pytest.mark.parametrize("answer", [b'data: {"choices": [{"delta": {"content": "half"}}]}\n\n', b""], ids=["half", "nothing"])
def test_an_answer_without_its_end_is_an_error(monkeypatch: pytest.MonkeyPatch, guarded: str, answer: bytes) -> None:
    monkeypatch.setattr(Guarded, "answer", (200, answer))
    with chatting("--url", guarded, "--api-key", "a-key") as chat:
        _, err = chat.communicate("hi\n", timeout=60)
    assert "the answer has no end: the server went away" in err and chat.returncode == 0


def test_an_address_or_an_answer_that_makes_no_sense_is_one_line(guarded: str, capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("http://localhost:abc", guarded):
        assert main(["chat", f"--url={url}", "--api-key", "nameless"]) == 1
        assert "cannot be used, or names no model" in capsys.readouterr().err


def test_what_a_model_says_cannot_move_the_cursor() -> None:
    assert printable("a\x1b[2Jb\rc\td\né\u202e") == "a[2Jbc\td\né"
