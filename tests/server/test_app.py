"""Laws of the API, as OpenAI's own client and plain HTTP see it."""

import asyncio
import inspect
import itertools
import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import openai
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from tests.server.fake_engine import FAIL_SEED, READY, SILENT_SEED
from tests.server.support import Running, asking, eventually, running_server
from tests.server.tiny import byte_tokenizer, token_ids
from vmmkv.server.http.schemas import MAX_VARIABLE_CHARS, RESERVED
from vmmkv.server.protocol import Generate

HELLO: Any = [{"role": "user", "content": "hello"}]


def answering(text: str) -> Callable[[Generate], list[int]]:
    ids = token_ids(text)
    return lambda _: ids


def sent(server: Running) -> Generate:
    requests = [message for message in server.engine.received if isinstance(message, Generate)]
    assert len(requests) == 1
    return requests[0]


def post(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    """With everything beyond ASCII escaped: httpx's own JSON is UTF-8, which has no lone surrogates."""
    return server.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def refused(server: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The error of a request that is refused with 400 and never reaches the engine."""
    response = post(server, path, {"model": "tiny", **body})
    assert response.status_code == 400, response.text
    assert not any(isinstance(message, Generate) for message in server.engine.received)
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


class TestChat:
    def test_the_reply_is_the_engines_text(self, server: Running) -> None:
        server.engine.answer = answering("Grüße, €!")
        reply = server.openai.chat.completions.create(model="tiny", messages=HELLO)
        assert reply.choices[0].message.content == "Grüße, €!"
        assert reply.choices[0].finish_reason == "stop"
        assert reply.id.startswith("chatcmpl-")
        assert reply.object == "chat.completion"
        assert reply.model == "tiny"

    def test_the_prompt_is_the_models_template(self, server: Running) -> None:
        messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        server.openai.chat.completions.create(model="tiny", messages=messages)
        wanted = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert sent(server).prompt == token_ids(wanted)

    def test_it_may_go_on_as_long_as_it_fits(self, server: Running) -> None:
        server.openai.chat.completions.create(model="tiny", messages=HELLO)
        request = sent(server)
        assert request.params.max_tokens == READY.max_tokens - len(request.prompt)

    @pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
    def test_length_ends_it(self, server: Running, name: str) -> None:
        server.engine.answer = answering("abcdefgh")
        reply = server.openai.chat.completions.create(model="tiny", messages=HELLO, **{name: 3})
        assert reply.choices[0].message.content == "abc"
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 3
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + 3

    def test_a_stream_has_a_role_then_text_then_a_reason(self, server: Running) -> None:
        server.engine.answer = answering("Grüße")
        chunks = list(server.openai.chat.completions.create(model="tiny", messages=HELLO, stream=True))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Grüße"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert len({chunk.id for chunk in chunks}) == 1
        assert all(chunk.usage is None for chunk in chunks)

    def test_a_stream_counts_tokens_when_asked(self, server: Running) -> None:
        server.engine.answer = answering("abc")
        options = {"include_usage": True}
        *_, last = server.openai.chat.completions.create(model="tiny", messages=HELLO, stream=True, stream_options=options)
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 3
        assert last.usage.prompt_tokens == len(sent(server).prompt)

    def test_every_chunk_counts_tokens_when_asked(self, server: Running) -> None:
        server.engine.answer = answering("abc")
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        chat = server.openai.chat.completions.create(model="tiny", messages=HELLO, stream=True, stream_options=options)
        text = server.openai.completions.create(model="tiny", prompt="hello", stream=True, stream_options=options)
        for stream in (chat, text):
            usages: list[Any] = [chunk.usage for chunk in stream]
            assert None not in usages
            counts = [usage.completion_tokens for usage in usages]
            assert counts == sorted(counts)
            assert counts[-1] == 3
            assert len({usage.prompt_tokens for usage in usages}) == 1

    def test_usage_so_far_is_only_for_who_asks_for_the_usage(self, server: Running) -> None:
        options = {"continuous_usage_stats": True}
        error = refused(server, "/v1/completions", {"prompt": "a", "stream": True, "stream_options": options})
        assert error["param"] == "stream_options"
        options = {"continuous_usage_stats": False}
        stream = server.openai.completions.create(model="tiny", prompt="a", stream=True, stream_options=options)  # type: ignore[call-overload]
        assert all(chunk.usage is None for chunk in stream)

    def test_text_is_streamed_as_it_comes(self, server: Running) -> None:
        ids, num_steps = token_ids("abcd"), itertools.count(1)
        seen, in_time = threading.Event(), list[bool]()

        def answer(_: Generate) -> list[int]:
            if next(num_steps) > 1:  # the second step is made when the first one's text has been read
                in_time.append(seen.wait(10))
            return ids

        server.engine.answer = answer
        for chunk in server.openai.chat.completions.create(model="tiny", messages=HELLO, stream=True):
            if chunk.choices[0].delta.content:
                seen.set()
        assert in_time and all(in_time)

    def test_a_template_that_refuses_is_a_400_with_its_words(self, server: Running) -> None:
        error = refused(server, "/v1/chat/completions", {"messages": [{"role": "assistant", "content": "hi"}]})
        assert "a conversation starts with the user" in error["message"]
        assert error["param"] == "messages"

    @pytest.mark.parametrize(
        ("template", "said"),
        [
            ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
            ("{{ messages[0]['content'] + 1 }}", "TypeError: can only concatenate str"),
            ("{{ no_such_thing.name }}", "UndefinedError: 'no_such_thing' is undefined"),
            ("{% if %}", "TemplateSyntaxError"),
            ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__' of 'str' object is unsafe"),
            ("{{ messages.append(1) }}", "SecurityError"),
            ("{{ raise_exception.__globals__['os'] }}", "SecurityError"),
        ],
    )
    def test_a_template_that_fails_or_reaches_out_of_its_sandbox_is_a_400_that_says_how(
        self, server: Running, template: str, said: str
    ) -> None:
        assert server.service.tokenizer is not None
        server.service.tokenizer._tokenizer.chat_template = template
        error = refused(server, "/v1/chat/completions", {"messages": HELLO})
        assert f"template fails on this conversation: {said}" in error["message"] and error["param"] == "messages"

    def test_a_template_has_the_variables_of_a_request_and_those_of_no_other(self, server: Running) -> None:
        assert server.service.tokenizer is not None
        server.service.tokenizer._tokenizer.chat_template = "{{ enable_thinking | default('unset') }} {{ name }}"
        for variables, wanted in (({"enable_thinking": False, "name": "x"}, "False x"), ({}, "unset "), (None, "unset ")):
            body = {"model": "tiny", "messages": HELLO, "chat_template_kwargs": variables}
            assert server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == wanted
            there = server.http.post("/tokenize", json=body).json()["tokens"]
            assert there == token_ids(wanted)

    @pytest.mark.parametrize("name", sorted(RESERVED))
    def test_what_the_renderer_sets_is_no_variable(self, server: Running, name: str) -> None:
        error = refused(server, "/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {name: "{{ 1 }}"}})
        assert error["param"] == f"chat_template_kwargs.{name}"

    def test_all_that_the_renderer_sets_is_known(self) -> None:
        own = {
            name
            for function in (PreTrainedTokenizerFast.apply_chat_template, render_jinja_template)
            for name in inspect.signature(function).parameters
        }
        assert own | {"messages", *PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES} <= RESERVED

    def test_a_model_without_a_template_says_what_to_use(self, server: Running) -> None:
        assert server.service.tokenizer is not None
        server.service.tokenizer._tokenizer.chat_template = None
        error = refused(server, "/v1/chat/completions", {"messages": HELLO})
        assert "/v1/completions" in error["message"]

    def test_the_user_may_be_named(self, server: Running) -> None:
        reply = server.openai.chat.completions.create(model="tiny", messages=HELLO, user="somebody")
        assert reply.choices[0].message.content


class TestCompletions:
    @pytest.mark.parametrize(
        ("prompt", "wanted"),
        [
            ("one", [token_ids("one")]),
            (["one", "two"], [token_ids("one"), token_ids("two")]),
            ([1, 2, 3], [[1, 2, 3]]),
            ([[1, 2], [3]], [[1, 2], [3]]),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_each_prompt_is_a_choice(self, server: Running, prompt: Any, wanted: list[list[int]], stream: bool) -> None:
        texts = dict.fromkeys(range(len(wanted)), "")
        create = server.openai.completions.create
        chunks = list(create(model="tiny", prompt=prompt, stream=True)) if stream else [create(model="tiny", prompt=prompt)]
        for chunk in chunks:
            assert chunk.id.startswith("cmpl-")
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        # The fake engine answers with the prompt.
        decode = byte_tokenizer().backend_tokenizer.decode
        assert texts == {index: decode(ids) for index, ids in enumerate(wanted)}
        assert [message.prompt for message in server.engine.received if isinstance(message, Generate)] == wanted

    def test_sixteen_tokens_unless_asked_otherwise(self, server: Running) -> None:
        server.engine.endless = True
        reply = server.openai.completions.create(model="tiny", prompt="ab")
        assert reply.choices[0].text == "ab" * 8
        assert reply.choices[0].finish_reason == "length"

    def test_the_default_shrinks_to_what_fits(self, server: Running) -> None:
        server.openai.completions.create(model="tiny", prompt=[1] * (READY.max_tokens - 3))
        assert sent(server).params.max_tokens == 3

    def test_parameters_reach_the_engine(self, server: Running) -> None:
        extra = {"ignore_eos": True, "stop_token_ids": [7, 8]}
        server.openai.completions.create(
            model="tiny", prompt="a", max_tokens=5, temperature=0, top_p=0.5, seed=42, extra_body=extra
        )
        request = sent(server)
        assert (request.params.max_tokens, request.params.temperature, request.params.top_p, request.params.seed) == (
            5,
            0.0,
            0.5,
            42,
        )
        assert (request.params.ignore_eos, request.params.stop_token_ids) == (True, (7, 8))

    def test_defaults_are_openais_and_the_seed_is_random(self, server: Running) -> None:
        for _ in range(2):
            server.openai.completions.create(model="tiny", prompt="a", temperature=None, top_p=None, seed=None)
        first, second = (message for message in server.engine.received if isinstance(message, Generate))
        assert (first.params.temperature, first.params.top_p) == (1.0, 1.0)
        assert first.params.seed != second.params.seed

    @pytest.mark.parametrize("seed", [-1, -(1 << 63), (1 << 63) - 1])
    def test_every_seed_that_openai_allows_is_taken(self, server: Running, seed: int) -> None:
        server.openai.completions.create(model="tiny", prompt="a", seed=seed)
        assert 0 <= sent(server).params.seed < 1 << 63

    @pytest.mark.parametrize("seed", [42, -1, None])
    def test_equal_prompts_have_seeds_of_their_own(self, server: Running, seed: int | None) -> None:
        server.openai.completions.create(model="tiny", prompt=["a"] * 128, seed=seed)
        seeds = [message.params.seed for message in server.engine.received if isinstance(message, Generate)]
        assert len(set(seeds)) == 128
        assert all(0 <= each < 1 << 63 for each in seeds)
        if seed is not None:
            server.openai.completions.create(model="tiny", prompt="a", seed=seed)
            alone = server.engine.received[-1]
            assert isinstance(alone, Generate)
            assert alone.params.seed == seeds[0]

    def test_values_that_ask_for_nothing_are_taken(self, server: Running) -> None:
        body = {
            "n": 1,
            "logprobs": None,
            "echo": False,
            "best_of": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "suffix": None,
        }
        assert server.http.post("/v1/completions", json={"model": "tiny", "prompt": "a", **body}).status_code == 200

    @pytest.mark.parametrize("prompt", ["hello there " * 100_000, ["hello there " * 300] * 128])
    def test_a_large_prompt_does_not_hold_up_others(
        self, server: Running, prompt: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are answered while tokens are made of it: not so on the event loop, or in a thread that keeps Python's lock."""
        tokenizer, encoded, answered = server.service.tokenizer, list[tuple[float, float]](), list[tuple[float, float]]()
        assert tokenizer is not None
        encode = tokenizer.encode

        def timed(prompt: Any, **options: bool) -> list[int]:
            began_s = time.monotonic()
            ids = encode(prompt, **options)
            encoded.append((began_s, time.monotonic()))
            return ids

        monkeypatch.setattr(tokenizer, "encode", timed)
        with server.http as http, server.http as other:
            body = {"model": "tiny", "prompt": prompt}
            large = threading.Thread(target=http.post, args=("/v1/completions",), kwargs={"json": body})
            ticking = asyncio.run_coroutine_threadsafe(longest_turn_s(large), server.loop)
            large.start()
            while large.is_alive():
                began_s = time.monotonic()
                assert other.get("/health").status_code == 200
                answered.append((began_s, time.monotonic()))
            large.join()
        assert max(ended_s - began_s for began_s, ended_s in answered) < 0.7
        assert any(encoded[0][0] < began_s and ended_s < encoded[-1][1] for began_s, ended_s in answered)
        assert ticking.result(20) < 0.25, "0.01 is usual"


async def longest_turn_s(until: threading.Thread) -> float:
    """Of the event loop's processor time, what others took at once: a busy machine does not lengthen it."""
    longest_s = 0.0
    while until.ident is None or until.is_alive():
        began_s = time.thread_time()
        await asyncio.sleep(0.002)
        longest_s = max(longest_s, time.thread_time() - began_s)
    return longest_s


class TestStop:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("stop", "shown"), [("STOP", "go on "), (["never", "n ST", "OP"], "go o"), (["€"], "go on STOP "), (["ST€P"], None)]
    )
    def test_text_ends_before_the_stop_string(self, server: Running, stop: Any, shown: str | None, stream: bool) -> None:
        text = "go on STOP € and on"
        server.engine.answer = answering(text)
        body = {"model": "tiny", "prompt": "a", "stop": stop, "max_tokens": 100}
        if stream:
            chunks = list(server.openai.completions.create(**body, stream=True))
        else:
            chunks = [server.openai.completions.create(**body)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == (text if shown is None else shown)
        assert chunks[-1].choices[0].finish_reason == "stop"

    def test_the_engine_is_told_and_later_tokens_are_not_counted(self, server: Running) -> None:
        server.engine.answer, server.engine.endless, server.engine.step_s = answering("ab. "), True, 0.002
        reply = server.openai.completions.create(model="tiny", prompt="a", stop=["."], max_tokens=200)
        assert reply.choices[0].text == "ab"
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 3
        assert eventually(lambda: server.engine.aborted() == {sent(server).request_id})

    def test_no_stop_string_ends_an_answer_before_it_has_min_tokens(self, server: Running) -> None:
        server.engine.answer = answering("a.b.c.d")
        extra = {"min_tokens": 3}
        reply = server.openai.completions.create(model="tiny", prompt="a", stop=".", max_tokens=7, extra_body=extra)
        assert reply.choices[0].text == "a.b" and sent(server).params.min_tokens == 3

    def test_one_choice_stops_and_the_other_goes_on(self, server: Running) -> None:
        server.engine.answer = lambda request: request.prompt
        reply = server.openai.completions.create(model="tiny", prompt=["a.b", "cde"], stop=".")
        assert [choice.text for choice in reply.choices] == ["a", "cde"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("param", "value"),
        [
            ("n", 0),
            ("n", 129),
            ("n", 1.5),
            ("cache_salt", ""),
            ("cache_salt", 5),
            ("cache_salt", "\ud800"),
            ("use_beam_search", 1),
            ("beam_width", 2),
            ("length_penalty", 0.5),
            ("logprobs", -1),
            ("logprobs", 21),
            ("logprobs", True),
            ("top_logprobs", 2),
            ("echo", "yes"),
            ("min_tokens", -1),
            ("min_tokens", 17),  # max_tokens is 16 if nobody says otherwise
            ("min_tokens", 1.0),
            ("response_format", {"type": "xml"}),
            ("timeout", 0),
            ("timeout", 1e9),
            ("timeout", "soon"),
            ("stop", "a" * 1025),
            ("cache_salt", "a" * 1025),
            ("user", "a" * 1025),
            ("suffix", "end"),
            ("logit_bias", {"five": 1}),
            ("logit_bias", {"-5": 1}),
            ("logit_bias", {"5": 100.5}),
            ("logit_bias", {"5": "1"}),
            ("logit_bias", {"258": 1}),
            ("logit_bias", [5]),
            ("logit_bias", {str(token_id): 1 for token_id in range(1025)}),
            ("presence_penalty", 2.5),
            ("frequency_penalty", -2.5),
            ("repetition_penalty", 0),
            ("repetition_penalty", 101),
            ("top_k", -2),
            ("top_k", 1.0),
            ("min_p", 1.5),
            ("min_p", -0.1),
            ("priority", 0.5),
            ("priority", 1 << 31),
            ("user", 7),
            ("made_up", 1),
            ("temperature", -0.1),
            ("temperature", 2.1),
            ("temperature", "hot"),
            ("top_p", 0),
            ("top_p", 1.5),
            ("max_tokens", 0),
            ("max_tokens", -1),
            ("max_tokens", 1.5),
            ("max_tokens", True),
            ("stop", ["a"] * 5),
            ("stop", ""),
            ("stop", 3),
            ("stream", "yes"),
            ("seed", 1 << 63),
            ("stream_options", {"include_usage": True}),
            ("prompt", ""),
            ("prompt", []),
            ("prompt", [[]]),
            ("prompt", ["ok", ""]),
            ("prompt", [1, "two"]),
            ("prompt", [-1]),
            ("prompt", [258]),
            ("prompt", None),
            ("prompt", ["a"] * 129),
            ("prompt", [[1]] * 129),
            ("stop", "\ud800"),
            ("stop_token_ids", [10**30]),
            ("stop_token_ids", [-1]),
            ("stop_token_ids", [258]),
            ("stop_token_ids", [1] * 65),
        ],
    )
    def test_the_parameter_is_named(self, server: Running, param: str, value: Any) -> None:
        error = refused(server, "/v1/completions", {"prompt": "a", param: value})
        assert error["param"] is not None
        assert error["param"].split(".")[0] == param
        assert param in error["message"]

    @pytest.mark.parametrize(
        ("path", "body", "said"),
        [
            (
                "completions",
                {"logit_bias": {"five": 1}},
                """its keys must be token ids, as in {"50256": -100}, and 'five' is none.""",
            ),
            ("completions", {"stop": 5}, "Invalid stop: it must be a string, or a list of 4 at most."),
            ("completions", {"stop": list("abcde")}, "Invalid stop: it may have 4 items at most, and has 5."),
            ("chat/completions", {"messages": []}, "Invalid messages: it must have 1 item at least, and has 0."),
            ("chat/completions", {"messages": "hello"}, "Invalid messages: it must be a list."),
            ("chat/completions", {"messages": ["hello"]}, "Invalid messages.0: it must be a JSON object."),
            ("completions", {"logit_bias": 5}, "Invalid logit_bias: it must be a JSON object."),
            ("completions", {"temperature": -1}, "Invalid temperature: Input should be greater than or equal to 0."),
            (
                "completions",
                {"response_format": "json_object"},
                'Invalid response_format: it must be an object whose type is "text", "json_object" or "json_schema", as in '
                '{"type": "json_object"}.',
            ),
            ("completions", {"stop_token_ids": [1, 300]}, "300 is not a token id of this model: they go from 0 to 257."),
            (
                "chat/completions",
                {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
                'only parts of the form {"type": "text", "text": "..."} are served.',
            ),
        ],
    )
    def test_it_says_what_would_work(self, server: Running, path: str, body: dict[str, Any], said: str) -> None:
        given = body if "messages" in body else {"prompt": "a", **body}
        assert refused(server, f"/v1/{path}", given)["message"].endswith(said)

    @pytest.mark.parametrize(
        ("param", "value"),
        [
            ("tools", [{"type": "function", "function": {"name": "f"}}]),
            ("tool_choice", "auto"),
            ("logprobs", 2),
            ("top_logprobs", 2),
            ("logit_bias.5", {"5": 101}),
            ("n", 129),
            ("best_of", 2),
            ("cache_salt", ""),
            ("beam_width", 2),
            ("chat_template", "{{ 1 }}"),
            ("max_completion_tokens", 0),
            ("messages", []),
            ("messages.0.role", [{"role": "tool", "content": "x"}]),
            ("messages.0.content", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            ("messages.0.content", [{"role": "user"}]),
            ("chat_template_kwargs", "enable_thinking"),
            ("chat_template_kwargs", {str(number): 1 for number in range(17)}),
            ("chat_template_kwargs", {"a b": 1}),
            ("chat_template_kwargs", {"a" * 65: 1}),
        ],
    )
    def test_the_parameter_of_a_chat_is_named(self, server: Running, param: str, value: Any) -> None:
        error = refused(server, "/v1/chat/completions", {"messages": HELLO, param.split(".")[0]: value})
        assert error["param"] == param

    @pytest.mark.parametrize("value", [[], {}, math.nan, "x" * (MAX_VARIABLE_CHARS + 1)])
    def test_a_variable_of_a_template_is_one_small_value(self, server: Running, value: Any) -> None:
        error = refused(server, "/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"a": value}})
        assert error["param"] == "chat_template_kwargs.a" and str(MAX_VARIABLE_CHARS) in error["message"]

    def test_two_limits_of_one_meaning_are_refused(self, server: Running) -> None:
        error = refused(server, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4})
        assert error["param"] == "max_tokens"

    def test_what_can_never_fit_is_refused_with_the_numbers(self, server: Running) -> None:
        error = refused(server, "/v1/completions", {"prompt": [1] * 200, "max_tokens": 100})
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "max_tokens"
        for number in ("300", "200", "100", "256", "56", "156"):
            assert number in error["message"]

    def test_a_prompt_that_leaves_no_room_is_refused(self, server: Running) -> None:
        error = refused(server, "/v1/completions", {"prompt": [1] * 256})
        assert error["param"] == "prompt"
        assert "255" in error["message"]

    @pytest.mark.parametrize("prompt", ["\ud800", "a" * 5000 + "\udfff", ["ok", "\ud800"]])
    def test_half_of_a_surrogate_pair_is_no_text(self, server: Running, prompt: Any) -> None:
        error = refused(server, "/v1/completions", {"prompt": prompt})
        assert error["param"] == "prompt"
        assert "surrogate" in error["message"]
        assert post(server, "/v1/completions", {"model": "\ud800", "prompt": "a"}).status_code == 404

    def test_half_of_a_surrogate_pair_is_no_content(self, server: Running) -> None:
        error = refused(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]})
        assert error["param"] == "messages"
        assert "U+D800" in error["message"]

    def test_no_path_of_the_server_is_told(self) -> None:
        with running_server(ready=msgspec.structs.replace(READY, model="/home/me/models/tiny")) as server:
            error = refused(server, "/v1/completions", {"prompt": [1] * 256})
            assert "/home" not in error["message"]
            assert "the most that tiny takes here" in error["message"]

    def test_an_empty_body_is_said_to_be_none(self, server: Running) -> None:
        response = server.http.post("/v1/completions", headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        assert "must be a JSON object" in response.json()["error"]["message"]

    def test_what_the_pool_can_never_hold_is_refused_with_the_budget(self) -> None:
        with running_server(ready=msgspec.structs.replace(READY, pool_tokens=64)) as server:
            error = refused(server, "/v1/completions", {"prompt": [1] * 60, "max_tokens": 5})
            assert "64.0 MiB" in error["message"]
            assert "lower max_tokens to 4" in error["message"]
            assert server.openai.completions.create(model="tiny", prompt=[1] * 60, max_tokens=4).choices

    def test_another_model_is_not_found(self, server: Running) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            server.openai.completions.create(model="gpt-5", prompt="a")
        assert caught.value.code == "model_not_found"
        assert "'tiny'" in str(caught.value)

    def test_every_error_has_openais_form(self, server: Running) -> None:
        http = server.http
        for response, status in (
            (http.get("/v2"), 404),
            (http.get("/v1/completions"), 405),
            (http.get("/v1/models/other"), 404),
            (http.post("/v1/completions", content="{", headers={"Content-Type": "application/json"}), 400),
            (http.post("/v1/completions", content='{"model": "tiny"}', headers={"Content-Type": "text/plain"}), 400),
            (http.post("/v1/completions", json=[1]), 400),
            (http.post("/v1/completions", json={"model": "tiny"}), 400),
        ):
            assert response.status_code == status, response.text
            assert response.json()["error"].keys() == {"message", "type", "param", "code"}

    def test_nan_is_no_temperature(self, server: Running) -> None:
        content = json.dumps({"model": "tiny", "prompt": "a", "temperature": math.nan})
        response = server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400


class TestFailure:
    def test_a_failed_request_is_a_500_and_others_go_on(self, server: Running) -> None:
        with pytest.raises(openai.InternalServerError, match="told to fail"):
            server.openai.completions.create(model="tiny", prompt="a", seed=FAIL_SEED)
        assert server.openai.completions.create(model="tiny", prompt="a").choices[0].text == "a"

    def test_a_failed_stream_ends_with_an_error_event(self, server: Running) -> None:
        stream = server.openai.completions.create(model="tiny", prompt="a", seed=FAIL_SEED, stream=True)
        with pytest.raises(openai.APIError, match="told to fail"):
            list(stream)

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_bug_is_a_500_without_the_servers_insides(self, server: Running, stream: bool) -> None:
        server.engine.answer = lambda _: [1 << 40]  # no tokenizer takes it
        body = {"model": "tiny", "prompt": "a", "stream": stream}
        response = server.http.post("/v1/completions", json=body)
        assert response.status_code == (200 if stream else 500)
        text = response.text.partition("\n")[0].removeprefix("data: ")
        assert "OverflowError" in json.loads(text)["error"]["message"]

    def test_a_request_cut_short_by_the_engines_death_is_a_503(self, server: Running) -> None:
        got: list[httpx.Response] = []
        body = {"model": "tiny", "prompt": "a", "seed": SILENT_SEED}
        waiting = threading.Thread(target=lambda: got.append(server.http.post("/v1/completions", json=body)))
        waiting.start()
        stream = iter(server.openai.chat.completions.create(model="tiny", messages=HELLO, seed=SILENT_SEED, stream=True))
        next(stream)
        assert eventually(lambda: len(server.engine.received) == 2)
        server.engine_dies("The engine process ended with exit code 3.")
        waiting.join(20)
        assert got[0].status_code == 503
        assert "exit code 3" in got[0].json()["error"]["message"]
        with pytest.raises(openai.APIError, match="exit code 3"):
            next(stream)

    def test_after_the_engines_death_health_says_why(self, server: Running) -> None:
        assert server.http.get("/health").json() == {"status": "ok", "reason": None}
        server.engine_dies("exit code 3")
        health = server.http.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "dead", "reason": "exit code 3"}
        late = server.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert late.status_code == 503
        assert "Retry-After" in late.headers
        assert server.http.get("/metrics").status_code == 200

    def test_while_loading_everything_answers(self) -> None:
        with running_server(start_engine=False) as server:
            health = server.http.get("/health")
            assert health.status_code == 503
            assert health.json()["status"] == "loading"
            assert server.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"}).status_code == 503
            assert "vmmkv_engine_ready 0.0" in server.http.get("/metrics").text
            assert [model.id for model in server.openai.models.list()] == ["tiny"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_when_the_client_goes_away_the_engine_is_told(self, fresh: Running, stream: bool) -> None:
        body = {"model": "tiny", "prompt": "a", "seed": SILENT_SEED, "stream": stream}
        with asking(fresh, "/v1/completions", body):
            assert eventually(lambda: bool(fresh.engine.received))
        assert eventually(lambda: fresh.engine.aborted() == {sent(fresh).request_id})
        assert eventually(lambda: 'vmmkv_requests_total{outcome="aborted"} 1.0' in fresh.http.get("/metrics").text)

    def test_when_the_client_goes_away_in_the_middle_of_a_stream_the_engine_is_told(self, server: Running) -> None:
        server.engine.endless, server.engine.step_s = True, 0.02
        stream = server.openai.completions.create(model="tiny", prompt="a", max_tokens=200, stream=True)
        next(iter(stream))
        stream.close()
        assert eventually(lambda: server.engine.aborted() == {sent(server).request_id})


class TestModelsAndMetrics:
    def test_the_model_is_listed_and_found(self, server: Running) -> None:
        assert [model.id for model in server.openai.models.list()] == ["tiny"]
        assert server.openai.models.retrieve("tiny").owned_by == "vmmkv"

    def test_metrics_show_the_engines_snapshot(self, fresh: Running) -> None:
        fresh.openai.completions.create(model="tiny", prompt="abc")
        wanted = {
            "vmmkv_engine_ready 1.0",
            "vmmkv_requests_running 0.0",
            "vmmkv_requests_waiting 0.0",
            "vmmkv_kv_mapped_bytes 0.0",
            "vmmkv_kv_budget_bytes 6.7108864e+07",
            "vmmkv_kv_tokens 0.0",
            "vmmkv_stalls_total 2.0",
            "vmmkv_stall_seconds_total 0.0015",
            'vmmkv_driver_calls_total{call="map"} 4.0',
            "vmmkv_preemptions_total 0.0",
            "vmmkv_prompt_tokens_total 0.0",
            "vmmkv_generation_tokens_total 3.0",
            "vmmkv_prefix_hit_tokens_total 5.0",
            "vmmkv_prefix_pages 6.0",
            "vmmkv_request_duration_seconds_count 1.0",
            "vmmkv_time_to_first_token_seconds_count 1.0",
            'vmmkv_requests_total{outcome="finished"} 1.0',
        }
        # The engine's last account of itself comes behind its last token.
        eventually(lambda: wanted <= set(fresh.http.get("/metrics").text.splitlines()))
        assert not wanted - set(fresh.http.get("/metrics").text.splitlines())
