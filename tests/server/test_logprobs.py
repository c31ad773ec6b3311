"""How likely tokens were: those of the answer, and with `echo` those of the prompt; whole and in streams."""

import asyncio
from typing import Any

import pytest

from tests.server.fake_engine import READY
from tests.server.support import CHAT, COMPLETIONS, HELLO, Running
from tests.server.tiny import token_ids
from vmmkv_server.http.generation import MAX_PROMPT_LOGPROBS
from vmmkv_server.protocol import PromptLogprobs

EURO = token_ids("€")
LISTS = ("tokens", "token_logprobs", "text_offset", "top_logprobs")


class TestCompletions:
    def test_each_token_has_its_own_and_those_of_the_likeliest(self, server: Running) -> None:
        server.answers("a€b")
        server.engine.logprob = lambda _, place: -0.5 - place
        server.engine.likeliest = lambda request, place: [(token_ids("x")[0], -0.1), (EURO[0], -0.2)][: request.params.logprobs]
        choice = server.openai.completions.create(model="tiny", prompt="q", logprobs=2).choices[0]
        assert choice.text == "a€b" and choice.logprobs is not None and choice.logprobs.top_logprobs is not None
        assert choice.logprobs.tokens == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
        assert choice.logprobs.token_logprobs == [-0.5, -1.5, -2.5, -3.5, -4.5]
        assert choice.logprobs.text_offset == [0, 1, 1, 1, 2]
        likeliest = {"x": -0.1, "bytes:\\xe2": -0.2}
        assert choice.logprobs.top_logprobs[:2] == [likeliest | {"a": -0.5}, likeliest | {"bytes:\\xe2": -1.5}]
        assert server.sent.params.logprobs == 2

    def test_with_a_count_of_0_there_are_those_chosen_and_without_one_none(self, server: Running) -> None:
        server.answers("ab")
        (choice,) = server.complete(logprobs=0).json()["choices"]
        assert choice["logprobs"]["top_logprobs"] == [{"a": -1.0}, {"b": -1.0}]
        (choice,) = server.complete().json()["choices"]
        assert choice["logprobs"] is None
        assert [request.params.logprobs for request in server.generates] == [0, None]

    @pytest.mark.parametrize("stop", [None, "STOP"])
    def test_chunks_together_are_the_whole(self, server: Running, stop: str | None) -> None:
        server.answers("a€b STOP it")
        create, body = server.openai.completions.create, {"model": "tiny", "prompt": "q", "logprobs": 1, "max_tokens": 50}
        whole = create(**body, stop=stop).choices[0]
        chunks = [chunk.choices[0] for chunk in create(**body, stop=stop, stream=True)]
        assert "".join(chunk.text for chunk in chunks) == whole.text == ("a€b STOP it" if stop is None else "a€b ")
        for name in LISTS:
            parts = [getattr(chunk.logprobs, name) for chunk in chunks]
            assert [each for part in parts for each in part] == getattr(whole.logprobs, name)

    @pytest.mark.parametrize("logprob", [float("-inf"), float("nan"), -1e6])
    def test_what_json_cannot_say_is_very_unlikely(self, server: Running, logprob: float) -> None:
        server.engine.logprob = lambda _, place: logprob
        (choice,) = server.complete(prompt="ab", logprobs=0).json()["choices"]
        assert choice["logprobs"]["token_logprobs"] == [-9999.0, -9999.0]


class TestChats:
    def test_each_token_has_its_own_bytes_and_those_of_the_likeliest(self, server: Running) -> None:
        server.answers("é!")
        server.engine.logprob = lambda _, place: -0.5 - place
        server.engine.likeliest = lambda request, place: [(token_ids("x")[0], -0.1), (256, -0.2)]
        content = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
        assert [(each["token"], each["logprob"], each["bytes"]) for each in content] == [
            ("bytes:\\xc3", -0.5, [0xC3]),
            ("bytes:\\xa9", -1.5, [0xA9]),
            ("!", -2.5, [0x21]),
        ]
        for each in content:
            likely = [(top["token"], top["logprob"], bytes(top["bytes"])) for top in each["top_logprobs"]]
            assert likely == [("x", -0.1, b"x"), ("<|im_start|>", -0.2, b"<|im_start|>")]

    @pytest.mark.parametrize("options", [{}, {"logprobs": False, "top_logprobs": 0}, {"logprobs": True}])
    def test_without_a_count_there_are_those_chosen_alone(self, server: Running, options: dict[str, Any]) -> None:
        (choice,) = server.chat(max_tokens=3, **options).json()["choices"]
        if options.get("logprobs"):
            assert [each["top_logprobs"] for each in choice["logprobs"]["content"]] == [[], [], []]
        else:
            assert choice["logprobs"] is None and server.sent.params.logprobs is None

    def test_chunks_together_are_the_whole(self, server: Running) -> None:
        server.answers("Grüße, €!")
        body: dict[str, Any] = {"model": "tiny", "messages": HELLO, "logprobs": True, "top_logprobs": 3}
        whole = server.openai.chat.completions.create(**body).choices[0].logprobs
        chunks = [chunk.choices[0] for chunk in server.openai.chat.completions.create(**body, stream=True)]
        assert chunks[0].logprobs is None, "it has the role"
        assert [each for chunk in chunks[1:] for each in chunk.logprobs.content] == whole.content  # type: ignore[union-attr]


PROMPT = "a€bc"
"""Of six tokens, three of which are one character."""
ECHO: Any = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 1, "temperature": 0}


def echoed(server: Running, **body: Any) -> list[dict[str, Any]]:
    reply = server.complete(**(ECHO | body))
    assert reply.status_code == 200, reply.text
    choices: list[dict[str, Any]] = reply.json()["choices"]
    return choices


def streamed(server: Running, **body: Any) -> list[dict[str, Any]]:
    """The choices of a stream, their chunks put together; the first chunk has the whole prompt."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in server.openai.completions.create(**(ECHO | body), stream=True):
        for each in chunk.choices:
            news = each.model_dump()
            if (choice := choices.get(each.index)) is None:
                choices[each.index] = news
                assert len(news["logprobs"]["tokens"]) >= len(server.generates[each.index].prompt)
                continue
            choice["text"] += news["text"]
            choice["finish_reason"] = news["finish_reason"]
            for name in LISTS:
                choice["logprobs"][name] += news["logprobs"][name]
    return [choices[index] for index in sorted(choices)]


class TestEcho:
    @pytest.mark.parametrize("prompt", [PROMPT, token_ids(PROMPT)])
    def test_the_prompts_tokens_come_before_the_answers(self, server: Running, prompt: Any) -> None:
        server.answers("xyz")
        (choice,), ids = echoed(server, prompt=prompt, max_tokens=2), token_ids(PROMPT)
        assert (choice["text"], choice["finish_reason"]) == (PROMPT + "xy", "length")
        logprobs = choice["logprobs"]
        assert set(map(len, logprobs.values())) == {8}
        assert logprobs["token_logprobs"] == [None, *(-token / 8 for token in ids[1:]), -1.0, -1.0]
        assert logprobs["text_offset"] == [0, 1, 1, 1, 2, 3, 4, 5], "a character is there when its last byte is"
        assert "".join(logprobs["tokens"][-4:]) == "bcxy" and logprobs["tokens"][1].startswith("bytes:")
        likely = {server.tokenizer.texts.text_of(0): -2.0}
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][5:7] == [likely | {"c": -ids[5] / 8}, likely | {"x": -1.0}]

    @pytest.mark.parametrize("count", [0, 5])
    def test_nothing_need_come_behind_the_prompt(self, server: Running, count: int) -> None:
        first, second = echoed(server, max_tokens=0, logprobs=count, prompt=[PROMPT, "z"])
        assert (first["text"], first["finish_reason"]) == (PROMPT, "length")
        assert [len(each) for each in first["logprobs"]["top_logprobs"][1:]] == [1 + count] * 5
        assert second["logprobs"] == {"text_offset": [0], "token_logprobs": [None], "tokens": ["z"], "top_logprobs": [None]}
        assert [(each.params.max_tokens, each.params.prompt_logprobs) for each in server.generates] == [(0, count)] * 2

    @pytest.mark.parametrize(
        "body", [{"max_tokens": 0}, {"max_tokens": 3}, {"max_tokens": 3, "n": 2, "prompt": ["ab", "cdef"]}]
    )
    def test_a_stream_has_the_same_and_the_prompt_in_its_first_chunk(self, server: Running, body: dict[str, Any]) -> None:
        assert streamed(server, **body) == echoed(server, **body)

    def test_stop_strings_are_looked_for_in_the_answer_alone(self, server: Running) -> None:
        server.answers("xbyz")
        (choice,) = echoed(server, stop=["b"])
        assert (choice["text"], choice["finish_reason"]) == (PROMPT + "x", "stop")
        assert choice["logprobs"]["text_offset"][-2:] == [4, 5]

    def test_a_prompt_can_take_all_tokens_there_are(self, server: Running) -> None:
        ids = [97] * READY.limits.max_tokens
        (choice,) = echoed(server, prompt=ids, max_tokens=0)
        assert len(choice["logprobs"]["tokens"]) == READY.limits.max_tokens
        error = server.refuses(COMPLETIONS, **ECHO | {"prompt": [*ids, 97], "max_tokens": 0})
        assert error["param"] == "prompt" and f"shorten the prompt to {READY.limits.max_tokens} tokens" in error["message"]

    @pytest.mark.parametrize("body", [{"logprobs": None}, {"echo": False}])
    def test_without_either_the_engine_is_not_asked_and_a_token_is_needed(self, server: Running, body: dict[str, Any]) -> None:
        echoed(server, **body)
        assert server.sent.params.prompt_logprobs is None
        assert server.refuses(COMPLETIONS, **ECHO | body | {"max_tokens": 0})["param"] == "max_tokens"

    def test_a_grammar_needs_a_token_and_beams_score_no_prompt(self, server: Running) -> None:
        error = server.refuses(COMPLETIONS, **ECHO, max_tokens=0, structured_outputs={"regex": "a"})
        assert error["param"] == "max_tokens" and "max_tokens=0" in error["message"]
        assert server.refuses(COMPLETIONS, **ECHO, use_beam_search=True)["param"] == "logprobs"

    @pytest.mark.parametrize("count", [1, 20])
    def test_too_many_are_refused_with_what_would_work(self, server: Running, count: int) -> None:
        most = MAX_PROMPT_LOGPROBS // (4 + count) // 128
        options = {"logprobs": count, "max_tokens": 0}
        error = server.refuses(COMPLETIONS, **ECHO | options | {"prompt": [[97] * (most + 1)] * 128})
        assert error["param"] == "logprobs" and str(MAX_PROMPT_LOGPROBS) in error["message"]
        assert len(echoed(server, prompt=[[97] * most] * 128, **options)) == 128

    @pytest.mark.parametrize("stream", [False, True])
    def test_those_of_a_long_prompt_are_unpacked_in_a_thread(
        self, server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        real, on_loop = PromptLogprobs.unpacked, list[bool]()

        def unpacked(message: PromptLogprobs) -> Any:
            on_loop.append(asyncio._get_running_loop() is not None)
            return real(message)

        monkeypatch.setattr(PromptLogprobs, "unpacked", unpacked)
        (choice,) = (streamed if stream else echoed)(server, prompt=[97] * 200, logprobs=5, max_tokens=1)
        assert len(choice["logprobs"]["tokens"]) == 201 and on_loop and not any(on_loop)


def test_a_chat_echoes_nothing(server: Running) -> None:
    assert server.refuses(CHAT, echo=True)["param"] == "echo"
