"""Laws of the smaller routes, of echo, and of the names that requests have."""

import asyncio
import json
import logging
import re
from typing import Any

import pytest

import vmmkv
from tests.server.fake_engine import FAIL_SEED
from tests.server.support import Running
from tests.server.tiny import token_ids

SCORED: Any = {"model": "tiny", "echo": True, "logprobs": 1, "max_tokens": 0}
HELLO: Any = [{"role": "user", "content": "hello"}]


def test_the_version_is_the_packages(server: Running) -> None:
    assert server.http.get("/version").json() == {"version": vmmkv.__version__}


class TestTokens:
    @pytest.mark.parametrize("prompt", ["hello", "Grüße, €!", "a" * 10_000, ""])
    def test_a_text_becomes_tokens_and_again_a_text(self, server: Running, prompt: str) -> None:
        there = server.http.post("/tokenize", json={"model": "tiny", "prompt": prompt}).json()
        assert there["tokens"] == token_ids(prompt)
        assert (there["count"], there["max_model_len"], there["token_strs"]) == (len(there["tokens"]), 256, None)
        assert server.http.post("/detokenize", json={"tokens": there["tokens"]}).json() == {"prompt": prompt}

    def test_a_conversation_becomes_what_a_chat_would_send(self, server: Running) -> None:
        there = server.http.post("/tokenize", json={"messages": HELLO, "return_token_strs": True}).json()
        usage = server.openai.chat.completions.create(model="tiny", messages=HELLO).usage
        assert usage is not None and usage.prompt_tokens == there["count"]
        assert "".join(there["token_strs"]) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert server.http.post("/detokenize", json={"tokens": there["tokens"]}).json()["prompt"] == "".join(
            there["token_strs"]
        )

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
            ("/tokenize", {"prompt": "\ud800"}, "prompt"),
            ("/tokenize", {"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
            ("/tokenize", {"prompt": "a", "chat_template": "{{ 1 }}"}, "chat_template"),
            ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
            ("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
            ("/tokenize", {"messages": HELLO, "add_generation_prompt": False}, "add_generation_prompt"),
            ("/detokenize", {"tokens": [1, 258]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": [10**30]}, "tokens"),
            ("/detokenize", {"tokens": "abc"}, "tokens"),
            ("/detokenize", {}, "tokens"),
        ],
    )
    def test_what_cannot_be_is_a_400_with_its_name(self, server: Running, path: str, body: Any, param: str) -> None:
        refused = server.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert (refused.status_code, refused.json()["error"]["param"].split(".")[0]) == (400, param)

    @pytest.mark.parametrize(
        ("path", "body", "worker"),
        [
            ("/tokenize", {"messages": [{"role": "user", "content": ""}] * 500}, "encode_chat"),
            ("/tokenize", {"prompt": "a" * 5000, "return_token_strs": True}, "text_of"),
            ("/detokenize", {"tokens": [97] * 5000}, "_known"),
            ("/v1/completions", {"model": "tiny", "prompt": [[97] * 200] * 30, "max_tokens": 1, "echo": True}, "_known"),
            ("/v1/completions", {**SCORED, "prompt": [[97] * 200] * 30}, "text_of"),
        ],
    )
    def test_what_takes_long_is_not_done_on_the_event_loop(
        self, server: Running, path: str, body: Any, worker: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert server.service.tokenizer is not None
        owner = server.service.tokenizer.texts if worker == "text_of" else server.service.tokenizer
        work, on_loop = getattr(owner, worker), []

        def watched(*given: Any) -> Any:
            on_loop.append(asyncio._get_running_loop() is not None)
            return work(*given)

        monkeypatch.setattr(owner, worker, watched)
        assert server.http.post(path, json=body).status_code == 200
        assert on_loop and not any(on_loop)

    def test_another_model_is_not_found(self, server: Running) -> None:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert server.http.post(path, json={"model": "gpt-5", **body}).status_code == 404


class TestEcho:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("prompt", [["one", "two"], [token_ids("one"), token_ids("two")]])
    def test_each_choice_begins_with_its_prompt(self, server: Running, stream: bool, prompt: Any) -> None:
        answered = token_ids(" and more")
        server.engine.answer = lambda _: answered
        create = server.openai.completions.create
        options: Any = {"model": "tiny", "prompt": prompt, "echo": True, "n": 2}
        texts = [""] * 4
        for chunk in create(**options, stream=True) if stream else [create(**options)]:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [f"{text} and more" for text in ("one", "one", "two", "two")]

    def test_the_prompts_tokens_are_not_counted_twice(self, server: Running) -> None:
        usage = server.openai.completions.create(model="tiny", prompt="abc", echo=True).usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, 3)


class TestNames:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_request_keeps_the_name_that_its_client_gave_it(self, server: Running, stream: bool) -> None:
        body = {"model": "tiny", "prompt": "a", "stream": stream}
        assert (
            server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-1"}).headers["x-request-id"]
            == "mine-1"
        )

    @pytest.mark.parametrize("given", [None, "", "with space", "a" * 129, "<script>"])
    def test_else_it_gets_one_of_its_own(self, server: Running, given: str | None) -> None:
        headers = {} if given is None else {"X-Request-Id": given}
        names = {server.http.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)}
        assert len(names) == 2 and all(re.fullmatch(r"req-[0-9a-f]{32}", name) for name in names)

    def test_errors_have_it_too_and_so_has_the_log(self, server: Running, caplog: pytest.LogCaptureFixture) -> None:
        headers = {"X-Request-Id": "mine-2"}
        answers = [
            server.http.get("/nowhere", headers=headers),
            server.http.post("/v1/completions", json={}, headers=headers),
            server.http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "seed": FAIL_SEED}, headers=headers),
        ]
        server.engine.answer = lambda _: [1 << 40]  # no tokenizer takes it
        with caplog.at_level(logging.ERROR):
            answers += [
                server.http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "stream": stream}, headers=headers)
                for stream in (False, True)
            ]
        assert [answer.status_code for answer in answers] == [404, 400, 500, 500, 200]
        assert all(answer.headers["x-request-id"] == "mine-2" for answer in answers)
        assert caplog.text.count("request mine-2 failed") == 2
