"""How tokens are chosen, and how likely they were: from the request to the engine, and back into the answer."""

import json
from typing import Any

import pytest

from tests.server.support import Running
from tests.server.test_app import HELLO, answering, post, refused, sent
from tests.server.test_choices import all_sent
from tests.server.tiny import token_ids
from vmmkv.server.sampling_params import SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EURO = token_ids("€")


def body_for(path: str, **options: Any) -> dict[str, Any]:
    return {"model": "tiny", **({"messages": HELLO} if path == CHAT else {"prompt": "a"}), **options}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
class TestParameters:
    def test_all_of_them_reach_the_engine(self, server: Running, path: str) -> None:
        options = {
            "top_k": 7,
            "min_p": 0.25,
            "presence_penalty": -2,
            "frequency_penalty": 1.5,
            "repetition_penalty": 1.25,
            "logit_bias": {"5": -100, "257": 0.5},
            "priority": -3,
        }
        assert post(server, path, body_for(path, **options)).status_code == 200
        request = sent(server)
        assert request.params.logit_bias == {5: -100.0, 257: 0.5}
        assert {
            name: getattr(request if name == "priority" else request.params, name) for name in options if name != "logit_bias"
        } == {name: value for name, value in options.items() if name != "logit_bias"}

    @pytest.mark.parametrize("empty", [{}, None])
    def test_what_is_absent_or_null_asks_for_nothing(self, server: Running, path: str, empty: Any) -> None:
        names = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs")
        options = {} if empty == {} else dict.fromkeys(names)
        assert post(server, path, body_for(path, **options)).status_code == 200
        request = sent(server)
        plain = SamplingParams()
        for name in (*names[:-1], "logprobs"):
            assert getattr(request.params, name) == getattr(plain, name)

    def test_both_of_vllms_ways_to_say_all_tokens_are_taken(self, server: Running, path: str) -> None:
        for top_k in (0, -1):
            assert post(server, path, body_for(path, top_k=top_k)).status_code == 200
        assert [request.params.top_k for request in all_sent(server)] == [0, 0]

    @pytest.mark.parametrize("length_penalty", [1e308, -1e308])
    def test_a_length_penalty_beyond_floats_reaches_no_engine(self, server: Running, path: str, length_penalty: float) -> None:
        error = refused(server, path, body_for(path, use_beam_search=True, length_penalty=length_penalty))
        assert error["param"] == "length_penalty" and "10" in error["message"]

    def test_a_beam_search_takes_what_says_nothing(self, server: Running, path: str) -> None:
        neutral = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "presence_penalty": 0, "logit_bias": {}}
        body = body_for(path, use_beam_search=True, n=2, priority=5, **neutral)
        response = post(server, path, body)
        assert response.status_code == 200, response.text
        assert sent(server).priority == 5


class TestCompletionLogprobs:
    def test_each_token_has_its_own_and_those_of_the_likeliest(self, server: Running) -> None:
        server.engine.answer = answering("a€b")
        server.engine.logprob = lambda _, place: -0.5 - place
        server.engine.likeliest = lambda request, place: [(token_ids("x")[0], -0.1), (EURO[0], -0.2)][: request.params.logprobs]
        choice = server.openai.completions.create(model="tiny", prompt="q", logprobs=2).choices[0]
        assert choice.text == "a€b"
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
        assert choice.logprobs.token_logprobs == [-0.5, -1.5, -2.5, -3.5, -4.5]
        assert choice.logprobs.text_offset == [0, 1, 1, 1, 2]
        likeliest = {"x": -0.1, "bytes:\\xe2": -0.2}
        assert choice.logprobs.top_logprobs is not None
        assert choice.logprobs.top_logprobs[0] == likeliest | {"a": -0.5}
        assert choice.logprobs.top_logprobs[1] == likeliest | {"bytes:\\xe2": -1.5}
        request = sent(server)
        assert request.params.logprobs == 2

    def test_of_none_of_the_likeliest_there_are_those_chosen(self, server: Running) -> None:
        server.engine.answer = answering("ab")
        choice = server.openai.completions.create(model="tiny", prompt="q", logprobs=0).choices[0]
        assert choice.logprobs is not None
        assert choice.logprobs.top_logprobs == [{"a": -1.0}, {"b": -1.0}]
        assert sent(server).params.logprobs == 0

    def test_who_asks_for_none_gets_none(self, server: Running) -> None:
        assert server.openai.completions.create(model="tiny", prompt="q").choices[0].logprobs is None
        assert sent(server).params.logprobs is None

    def test_chunks_together_are_the_whole(self, server: Running) -> None:
        server.engine.answer = answering("a€b STOP it")
        body = {"model": "tiny", "prompt": "q", "logprobs": 1, "max_tokens": 50}
        for stop in (None, "STOP"):
            whole = server.openai.completions.create(**body, stop=stop).choices[0]
            chunks = [chunk.choices[0] for chunk in server.openai.completions.create(**body, stop=stop, stream=True)]
            assert "".join(chunk.text for chunk in chunks) == whole.text == ("a€b STOP it" if stop is None else "a€b ")
            assert whole.logprobs is not None
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                parts = [getattr(chunk.logprobs, name) for chunk in chunks]
                assert [each for part in parts for each in part] == getattr(whole.logprobs, name)

    @pytest.mark.parametrize("logprob", [float("-inf"), float("nan"), -1e6])
    def test_what_json_cannot_say_is_very_unlikely(self, server: Running, logprob: float) -> None:
        server.engine.logprob = lambda _, place: logprob
        response = post(server, COMPLETIONS, {"model": "tiny", "prompt": "ab", "logprobs": 0})
        assert json.loads(response.text)["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0, -9999.0]


class TestChatLogprobs:
    def test_each_token_has_its_own_bytes_and_those_of_the_likeliest(self, server: Running) -> None:
        server.engine.answer = answering("é!")
        server.engine.logprob = lambda _, place: -0.5 - place
        server.engine.likeliest = lambda request, place: [(token_ids("x")[0], -0.1), (256, -0.2)]
        create = server.openai.chat.completions.create
        (choice,) = create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2).choices
        assert choice.logprobs is not None and choice.logprobs.content is not None
        content = choice.logprobs.content
        assert [(each.token, each.logprob, each.bytes) for each in content] == [
            ("bytes:\\xc3", -0.5, [0xC3]),
            ("bytes:\\xa9", -1.5, [0xA9]),
            ("!", -2.5, [0x21]),
        ]
        for each in content:
            likely = [(top.token, top.logprob, bytes(top.bytes or [])) for top in each.top_logprobs]
            assert likely == [("x", -0.1, b"x"), ("<|im_start|>", -0.2, b"<|im_start|>")]

    def test_without_a_count_there_are_those_chosen_alone(self, server: Running) -> None:
        (choice,) = server.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3, logprobs=True).choices
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [each.top_logprobs for each in choice.logprobs.content] == [[], [], []]

    @pytest.mark.parametrize("options", [{}, {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}])
    def test_who_asks_for_none_gets_none(self, server: Running, options: dict[str, Any]) -> None:
        response = post(server, CHAT, body_for(CHAT, **options))
        assert response.json()["choices"][0]["logprobs"] is None
        assert sent(server).params.logprobs is None

    def test_a_count_needs_the_log_probabilities(self, server: Running) -> None:
        error = refused(server, CHAT, {"messages": HELLO, "top_logprobs": 2})
        assert error["param"] == "top_logprobs" and "logprobs=true" in error["message"]

    def test_chunks_together_are_the_whole(self, server: Running) -> None:
        server.engine.answer = answering("Grüße, €!")
        body: dict[str, Any] = {"model": "tiny", "messages": HELLO, "logprobs": True, "top_logprobs": 3}
        whole = server.openai.chat.completions.create(**body).choices[0].logprobs
        chunks = [chunk.choices[0] for chunk in server.openai.chat.completions.create(**body, stream=True)]
        assert chunks[0].logprobs is None  # the role
        parts = [each for chunk in chunks[1:] if chunk.logprobs is not None for each in chunk.logprobs.content or []]
        assert whole is not None
        assert parts == whole.content


def test_the_models_list_says_whose_code_computes_it(server: Running) -> None:
    (model,) = server.http.get("/v1/models").json()["data"]
    assert model["implementation"] == "vmmkv"


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_slow_catches_up_and_misses_nothing(server: Running, stream: bool) -> None:
    """Steps of no time at all: news of many come together, for one of which a stop string is in the midst."""
    server.engine.answer = lambda request: token_ids("abcdefghij" * 20 if request.params.seed else "abc.def")
    body: dict[str, Any] = {"model": "tiny", "prompt": "q", "n": 8, "seed": 0, "max_tokens": 150, "stop": ".", "stream": stream}
    texts, reasons = dict.fromkeys(range(8), ""), {}
    got = server.openai.completions.create(**body)
    for chunk in got if stream else [got]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == {0: "abc"} | dict.fromkeys(range(1, 8), "abcdefghij" * 15)
    assert reasons == {0: "stop"} | dict.fromkeys(range(1, 8), "length")
