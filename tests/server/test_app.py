"""Laws of answers over HTTP, as OpenAI's own client sees them: text, streams, choices, beams, usage, failures."""

import asyncio
import inspect
import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from tests.server.fake_engine import FAIL_SEED, READY, SILENT_SEED, ready_with
from tests.server.support import CHAT, COMPLETIONS, HELLO, Running, asking, eventually, running_server, texts_of
from tests.server.tiny import byte_tokenizer, token_ids
from vmmkv_server.http.generation import off_loop
from vmmkv_server.http.schemas import RESERVED
from vmmkv_server.protocol import Beam, Generate
from vmmkv_server.sampling_params import SamplingParams
from vmmkv_server.tokenizer import Tokenizer

SEED_RANGE = 1 << 63
decode = byte_tokenizer().backend_tokenizer.decode


def asked(path: str, **options: Any) -> dict[str, Any]:
    return {"model": "tiny", **({"messages": HELLO} if path == CHAT else {"prompt": "a"}), **options}


def of_seed(request: Generate) -> list[int]:
    """An answer that depends on the prompt's first token and on the seed, as a sampled one does."""
    return [request.prompt[0], *token_ids(str(request.params.seed % 1000))]  # type: ignore[operator]


def listed(*texts: str) -> Callable[[Generate], list[int]]:
    """An answer for each seed from 0 on."""
    return lambda request: token_ids(texts[request.params.seed or 0])


class TestChat:
    def test_a_reply_is_the_engines_text_in_openais_form(self, server: Running) -> None:
        server.answers("Grüße, €!")
        reply = server.openai.chat.completions.create(model="tiny", messages=HELLO, user="someone")
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("Grüße, €!", "stop")
        assert (reply.id[:9], reply.object, reply.model) == ("chatcmpl-", "chat.completion", "tiny")
        assert server.sent.params.max_tokens == READY.limits.max_tokens - len(server.sent.prompt), "as long as it fits"

    def test_the_prompt_is_the_models_template(self, server: Running) -> None:
        messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        assert server.chat(messages=messages).status_code == 200
        wanted = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert server.sent.prompt == token_ids(wanted)

    def test_a_developer_turn_behind_the_system_turn_is_a_part_of_it(self, server: Running) -> None:
        messages = [{"role": "system", "content": "be kind"}, {"role": "developer", "content": "be brief"}, *HELLO]
        assert server.chat(messages=messages).status_code == 200
        start = "<|im_start|>system\nbe kind\n\nbe brief<|im_end|>\n<|im_start|>user\n"
        assert server.sent.prompt[: len(token_ids(start))] == token_ids(start)

    @pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
    def test_length_ends_it(self, server: Running, name: str) -> None:
        server.answers("abcdefgh")
        reply = server.chat(**{name: 3}).json()
        assert (reply["choices"][0]["message"]["content"], reply["choices"][0]["finish_reason"]) == ("abc", "length")
        assert (reply["usage"]["completion_tokens"], reply["usage"]["prompt_tokens"]) == (3, len(server.sent.prompt))

    def test_each_choice_of_a_stream_has_a_role_then_text_then_a_reason(self, server: Running) -> None:
        server.engine.answer = listed("Grüße", "one", "two")
        chunks = list(server.openai.chat.completions.create(model="tiny", messages=HELLO, n=3, seed=0, stream=True))
        assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks)
        for index, text in enumerate(("Grüße", "one", "two")):
            own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
            assert own[0].delta.role == "assistant" and "".join(choice.delta.content or "" for choice in own) == text
            assert [choice.finish_reason for choice in own if choice.finish_reason] == [own[-1].finish_reason] == ["stop"]

    def test_text_is_streamed_as_it_comes(self, server: Running) -> None:
        ids, num_steps = token_ids("abcd"), itertools.count(1)
        seen, in_time = threading.Event(), list[bool]()

        def answer(_: Generate) -> list[int]:
            if next(num_steps) > 1:  # the second step is made when the first one's text has been read
                in_time.append(seen.wait(60))
            return ids

        server.engine.answer = answer
        for chunk in server.openai.chat.completions.create(model="tiny", messages=HELLO, stream=True):
            if chunk.choices[0].delta.content:
                seen.set()
        assert in_time and all(in_time)

    @pytest.mark.parametrize(
        ("template", "said"),
        [
            ("{{ raise_exception('not so') }}", "template refuses this conversation: not so"),
            ("{{ 1 / 0 }}", "fails on this conversation: ZeroDivisionError: division by zero"),
            ("{{ no_such_thing.name }}", "UndefinedError: 'no_such_thing' is undefined"),
            ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__' of 'str' object is unsafe"),
            ("{{ messages.append(1) }}", "SecurityError"),
            ("{{ raise_exception.__globals__['os'] }}", "SecurityError"),
            (None, "/v1/completions"),
        ],
    )
    def test_a_template_that_fails_or_leaves_its_sandbox_is_a_400(self, server: Running, template: Any, said: str) -> None:
        server.shows(template)
        error = server.refuses(CHAT)
        assert said in error["message"] and error["param"] == "messages"

    def test_a_template_that_is_no_program_is_an_error_of_the_server(self, server: Running) -> None:
        server.shows("{% if %}")
        for stream in (False, True):
            reply = server.chat(stream=stream)
            assert reply.status_code == 500 and reply.json()["error"]["type"] == "server_error"
            assert "chat template cannot be compiled (line 1: " in reply.json()["error"]["message"]
        assert server.complete().status_code == 200

    def test_a_template_that_is_no_program_is_warned_of_at_start(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        byte_tokenizer().save_pretrained(tmp_path)
        (tmp_path / "chat_template.jinja").write_text("{% for x in %}")
        assert Tokenizer.load(tmp_path).encode("a")
        (record,) = caplog.records
        assert f"({tmp_path}/chat_template.jinja): chats are refused" in record.getMessage()

    def test_what_a_message_has_beside_its_text_is_shown_if_the_template_shows_it(self, server: Running) -> None:
        extras = {"id": "m1", "name": "me", "annotations": [{"a": 1}], "reasoning_content": "so", "content": [
            {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}},
        ]}  # fmt: skip
        for messages in (HELLO, [HELLO[0] | extras], [HELLO[0] | {"reasoning_content": None, "tool_calls": []}]):
            assert server.chat(messages=messages).status_code == 200
        assert len({tuple(request.prompt) for request in server.generates}) == 1
        server.shows("{{ messages[0].reasoning_content }} {{ 'id' in messages[0] }}")
        for message, wanted in ((extras, "so True"), ({"id": None}, " False")):
            ids = server.post("/tokenize", {"messages": [HELLO[0] | message]}).json()["tokens"]
            assert ids == token_ids(wanted)

    def test_a_template_has_the_variables_of_its_request_alone(self, server: Running) -> None:
        server.shows("{{ enable_thinking | default('unset') }} {{ name }}")
        for variables, wanted in (({"enable_thinking": False, "name": "x"}, "False x"), ({}, "unset "), (None, "unset ")):
            reply = server.chat(chat_template_kwargs=variables).json()
            assert reply["choices"][0]["message"]["content"] == wanted
            there = server.post("/tokenize", {"messages": HELLO, "chat_template_kwargs": variables}).json()
            assert there["tokens"] == token_ids(wanted)

    def test_all_that_the_renderer_sets_is_reserved(self, server: Running) -> None:
        functions = (PreTrainedTokenizerFast.apply_chat_template, render_jinja_template)
        own = {name for function in functions for name in inspect.signature(function).parameters}
        assert own | {"messages", *PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES} <= RESERVED
        for name in RESERVED:
            assert server.refuses(CHAT, chat_template_kwargs={name: "{{ 1 }}"})["param"] == f"chat_template_kwargs.{name}"


class TestCompletions:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("prompt", ["one", ["one", "two"], [1, 2, 3], [[1, 2], [3]]])
    def test_each_prompt_is_a_choice(self, server: Running, prompt: Any, stream: bool) -> None:
        reply = server.openai.completions.create(model="tiny", prompt=prompt, stream=stream)
        several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        wanted = [token_ids(each) if isinstance(each, str) else each for each in several]
        assert texts_of(reply) == {index: decode(ids) for index, ids in enumerate(wanted)}, "this engine echoes"
        assert [request.prompt for request in server.generates] == wanted

    def test_sixteen_tokens_or_what_fits_unless_asked_otherwise(self, server: Running) -> None:
        server.never_ends(step_s=0)
        (choice,) = server.complete(prompt="ab").json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("ab" * 8, "length")
        server.complete(prompt=[1] * (READY.limits.max_tokens - 3))
        assert server.generates[1].params.max_tokens == 3

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_all_sampling_parameters_reach_the_engine(self, server: Running, path: str) -> None:
        options = {
            "max_tokens": 9, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.25, "presence_penalty": -2,
            "frequency_penalty": 1.5, "repetition_penalty": 1.25, "seed": 42, "ignore_eos": True, "min_tokens": 2, "n": 1,
            "stop_token_ids": [7, 8], "logit_bias": {"5": -100, "257": 0.5}, "kv_policy": {"type": "tova", "budget": 99},
        }  # fmt: skip
        assert server.post(path, asked(path, **options, priority=-3)).status_code == 200
        changed = {"stop_token_ids": (7, 8), "logit_bias": {5: -100.0, 257: 0.5}}
        assert {name: getattr(server.sent.params, name) for name in options} == options | changed
        assert server.sent.priority == -3

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_what_is_absent_null_or_neutral_asks_for_nothing(self, server: Running, path: str) -> None:
        plain = SamplingParams(seed=0, max_tokens=9)
        names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
                 "logit_bias", "logprobs", "n", "seed", "min_tokens", "beam_width")  # fmt: skip
        neutral = {"top_k": -1, "n": 1, "presence_penalty": 0, "use_beam_search": False, "length_penalty": 1, "stop": None}
        for options in ({}, dict.fromkeys(names), neutral):
            assert server.post(path, asked(path, max_tokens=9, **options)).status_code == 200
        sent = [msgspec.structs.replace(each, request_id="", prompt=[]).params for each in server.generates]
        assert len({params.seed for params in sent}) == 3, "seeds are random"
        for params in sent:
            assert all(getattr(params, name) == getattr(plain, name) for name in names if name != "seed")

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    @pytest.mark.parametrize(
        "extra",
        [
            {"metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y", "service_tier": "flex", "user": "z"},
            {"prompt_cache_retention": "24h", "spaces_between_special_tokens": False, "vllm_xargs": {}, "bad_words": []},
            {"store": False, "skip_special_tokens": True, "include_stop_str_in_output": False},
            {"no_stop_trim": False, "return_hidden_states": False, "ignore_eos": False, "logprobs": None},
            {"return_token_ids": False, "return_tokens_as_token_ids": False, "truncate_prompt_tokens": None, "echo": False},
            {"include_reasoning": True, "separate_reasoning": True, "stream_reasoning": True, "continue_final_message": False},
            {
                "messages": HELLO,
                "add_special_tokens": False,
                "add_generation_prompt": True,
                "documents": [],
                "verbosity": "medium",
            },
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
            {"tools": [], "functions": None},
            {"suffix": "", "best_of": 1, "add_special_tokens": True, "prompt_embeds": None},
            {"suffix": None, "best_of": 1.0},
        ],
    )
    def test_parameters_that_change_nothing_are_taken(self, server: Running, path: str, extra: dict[str, Any]) -> None:
        if ("suffix" in extra and path == CHAT) or (
            extra.keys() & {"tools", "messages", "include_reasoning"} and path == COMPLETIONS
        ):
            return
        answer = server.post(path, asked(path, **extra))
        assert answer.status_code == 200, answer.text

    @pytest.mark.parametrize("prompt", ["hello there " * 100_000, ["hello there " * 300] * 128])
    def test_a_large_prompt_does_not_hold_up_others(self, prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are answered while tokens are made of it."""
        with running_server(ready=ready_with(model_tokens=1 << 17, pool_tokens=1 << 17)) as server:
            encode, answered = server.tokenizer.encode, list[int]()

            def watched(prompt: Any, **options: Any) -> list[int]:
                answered.append(server.http.get("/health").status_code)  # on the event loop it would wait for itself
                return encode(prompt, **options)

            monkeypatch.setattr(server.tokenizer, "encode", watched)
            large = threading.Thread(target=server.complete, kwargs={"prompt": prompt})
            ticking = asyncio.run_coroutine_threadsafe(longest_turn_s(large), server.loop)
            large.start()
            large.join()
            assert answered and set(answered) == {200}
            assert ticking.result(60) < 0.25, "0.01 is usual"


def test_large_work_is_done_one_after_the_other_and_the_rest_at_once() -> None:
    """A tokenizer takes hundreds of bytes for each character."""
    running, together, all_run = list[int](), list[int](), threading.Barrier(4)

    def large() -> None:
        running.append(1)
        together.append(len(running))
        all_run.wait(60)
        running.pop()

    async def ask() -> None:
        large_ones = [asyncio.ensure_future(off_loop((1 << 20) + 1, large, inline=0)) for _ in range(2)]
        await asyncio.gather(*(off_loop(1 << 20, lambda: all_run.wait(60), inline=0) for _ in range(3)))
        await asyncio.gather(*(off_loop(1 << 20, lambda: all_run.wait(60), inline=0) for _ in range(3)))
        await asyncio.gather(*large_ones)

    asyncio.run(ask())
    assert together == [1, 1]


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
        ("stop", "shown"),
        [
            ("STOP", "go on "),
            (["never", "n ST", "OP"], "go o"),
            (["€"], "go on STOP "),
            (["ST€P"], None),
            (["\nclass", "\ndef", "\n#", "\nif", "\nprint", "<|im_end|>", "STOP"], "go on "),
        ],
    )
    def test_text_ends_before_the_stop_string(self, server: Running, stop: Any, shown: str | None, stream: bool) -> None:
        text = "go on STOP € and on"
        server.answers(text)
        reply = server.openai.completions.create(model="tiny", prompt="a", stop=stop, max_tokens=100, stream=stream)
        chunks = list(reply) if stream else [reply]
        assert texts_of(chunks)[0] == (text if shown is None else shown)
        assert chunks[-1].choices[0].finish_reason == "stop"

    def test_the_engine_is_told_and_later_tokens_are_not_counted(self, server: Running) -> None:
        server.answers("ab. ")
        server.never_ends(step_s=0.002)
        reply = server.complete(stop=["."], max_tokens=200).json()
        assert (reply["choices"][0]["text"], reply["usage"]["completion_tokens"]) == ("ab", 3)
        assert eventually(lambda: server.engine.aborted() == {server.sent.request_id})

    def test_no_stop_string_ends_an_answer_before_it_has_min_tokens(self, server: Running) -> None:
        server.answers("a.b.c.d")
        assert server.complete(stop=".", max_tokens=7, min_tokens=3).json()["choices"][0]["text"] == "a.b"

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_choice_that_stops_ends_no_other_however_many_steps_come_at_once(self, server: Running, stream: bool) -> None:
        server.engine.answer = lambda request: token_ids("abcdefghij" * 20 if request.params.seed else "abc.def")
        create = server.openai.completions.create
        reply = create(model="tiny", prompt="q", n=8, seed=0, max_tokens=150, stop=".", stream=stream)
        assert texts_of(reply) == {0: "abc"} | dict.fromkeys(range(1, 8), "abcdefghij" * 15)


class TestChoices:
    def test_n_choices_are_those_of_n_requests_with_the_seeds_that_follow(self, server: Running) -> None:
        server.engine.answer = of_seed
        choices = texts_of(server.openai.chat.completions.create(model="tiny", messages=HELLO, n=4, seed=42))
        alone = [server.chat(seed=42 + index).json()["choices"][0]["message"]["content"] for index in range(4)]
        assert list(choices.values()) == alone and len(set(alone)) == 4

    @pytest.mark.parametrize("seed", [-2, -SEED_RANGE, SEED_RANGE - 2, 7])
    def test_seeds_wrap_at_the_end_of_their_range(self, server: Running, seed: int) -> None:
        server.complete(n=4, seed=seed)
        assert [request.params.seed for request in server.generates] == [(seed + index) % SEED_RANGE for index in range(4)]

    @pytest.mark.parametrize("seed", [42, -1, None])
    def test_equal_prompts_have_seeds_of_their_own_from_the_requests_on(self, server: Running, seed: int | None) -> None:
        server.complete(prompt=["a"] * 64, n=2, seed=seed)
        seeds = [request.params.seed for request in server.generates]
        assert len(set(seeds)) == 128 and all(0 <= each < SEED_RANGE for each in seeds if each is not None)
        if seed is not None:
            server.complete(seed=seed)
            assert server.generates[-1].params.seed == seeds[0]

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("prompt", [["one", "two"], [token_ids("one"), token_ids("two")]])
    def test_echo_begins_each_choice_with_its_prompt(self, server: Running, stream: bool, prompt: Any) -> None:
        server.answers(" and more")
        reply = server.openai.completions.create(model="tiny", prompt=prompt, echo=True, n=2, stream=stream)
        wanted = [f"{text} and more" for text in ("one", "one", "two", "two")]
        assert texts_of(reply) == dict(enumerate(wanted))


class TestBeams:
    def search(self, server: Running, **body: Any) -> Any:
        return server.complete(use_beam_search=True, **body).json()

    def test_the_choices_are_the_best_beams_in_order_and_all_are_counted(self, server: Running) -> None:
        reply = self.search(server, prompt=["abcd", "efgh"], n=2, beam_width=3)
        assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [
            *enumerate(["abcd", "bcd", "efgh", "fgh"])
        ]
        # 4 + 3 + 2 tokens of each prompt's three beams.
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (8, 18)

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_one_request_a_prompt_says_what_to_search(self, server: Running, path: str) -> None:
        neutral = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "presence_penalty": 0, "logit_bias": {}}
        search = {"use_beam_search": True, "beam_width": 3, "length_penalty": 2, "stop_token_ids": [9], "max_tokens": 7}
        assert server.post(path, asked(path, temperature=0, priority=5, **search, **neutral)).status_code == 200
        params = server.sent.params
        assert (params.beam_width, params.length_penalty, params.temperature, server.sent.priority) == (3, 2.0, 0.0, 5)
        assert (params.max_tokens, params.stop_token_ids) == (7, (9,))

    def test_n_is_the_width_unless_one_is_given_and_all_slots_may_be_taken(self, server: Running) -> None:
        assert len(self.search(server, n=READY.limits.max_sequences, prompt="abcd")["choices"]) == READY.limits.max_sequences
        assert server.sent.params.beam_width == READY.limits.max_sequences
        error = server.refuses(COMPLETIONS, n=READY.limits.max_sequences + 1, use_beam_search=True)
        assert error["param"] == "n" and f"lower n to {READY.limits.max_sequences}" in error["message"]

    def test_a_beam_says_why_it_ended_and_a_stop_string_cuts_it(self, server: Running) -> None:
        server.engine.search = lambda _: [
            Beam(token_ids=token_ids("ab"), score=-1.0, finish_reason="length"),
            Beam(token_ids=[], score=-2.0, finish_reason="stop"),
            Beam(token_ids=token_ids("c.d"), score=-2.0, finish_reason="length"),
        ]
        choices = self.search(server, n=3, stop=".")["choices"]
        wanted = [("ab", "length"), ("", "stop"), ("c", "stop")]
        assert [(choice["text"], choice["finish_reason"]) for choice in choices] == wanted

    def test_too_few_answers_are_an_error_that_says_so(self, server: Running) -> None:
        server.engine.search = lambda _: [Beam(token_ids=[1], score=-1.0, finish_reason="stop")]
        response = server.complete(n=2, use_beam_search=True)
        assert response.status_code == 500 and "found 1 answers for n=2" in response.json()["error"]["message"]


class TestUsage:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("chat", [False, True])
    @pytest.mark.parametrize("cached", [0, 3])
    def test_it_counts_tokens_and_what_was_cached(self, server: Running, stream: bool, chat: bool, cached: int) -> None:
        server.engine.cached = lambda _: cached
        client, options = server.openai, {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        if chat:
            reply: Any = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3, **options)  # type: ignore[call-overload]
        else:
            reply = client.completions.create(model="tiny", prompt="abcdef", max_tokens=3, **options)  # type: ignore[call-overload]
        last = list(reply)[-1] if stream else reply
        assert not stream or last.choices == []
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(server.sent.prompt), 3)
        assert last.usage.total_tokens == last.usage.prompt_tokens + 3
        assert last.usage.prompt_tokens_details.cached_tokens == cached

    def test_it_says_what_came_from_tiers_of_each_prompt(self, server: Running) -> None:
        server.engine.cached = lambda request: (("device", 1), ("host", len(request.prompt) - 1))
        details = server.complete(prompt=["abcde", "bc"], n=2).json()["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": 5 + 2, "cached_tokens_details": {"device": 1 + 1, "host": 4 + 1}}

    def test_it_says_what_a_kv_policy_dropped_of_all_choices(self, server: Running) -> None:
        policy = {"type": "streaming_llm", "window": 2, "sinks": 0}
        usage = server.complete(prompt="abcde", n=2, max_tokens=3, kv_policy=policy).json()["usage"]
        assert usage["kv_rows"] == {"kept": 2 * 2, "dropped": 2 * (5 + 2 - 2)}
        assert "kv_rows" not in server.complete(prompt="abcde").json()["usage"]

    @pytest.mark.parametrize("chat", [False, True])
    def test_every_chunk_counts_tokens_when_asked(self, server: Running, chat: bool) -> None:
        server.answers("abc")
        options: Any = {"model": "tiny", "stream": True}
        options["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        create: Any = server.openai.chat.completions.create if chat else server.openai.completions.create
        usages = [chunk.usage for chunk in create(**options, **({"messages": HELLO} if chat else {"prompt": "a"}))]
        counts = [usage.completion_tokens for usage in usages]
        assert counts == sorted(counts) and counts[-1] == 3
        assert len({usage.prompt_tokens for usage in usages}) == 1

    @pytest.mark.parametrize("extra", [{}, {"use_beam_search": True}])
    def test_each_prompt_counts_once_by_its_first_choice(self, server: Running, extra: dict[str, Any]) -> None:
        first: set[int] = set()

        def cached(request: Generate) -> int:
            token = request.prompt[0]
            if token in first:
                return 100  # the others hit what the first computed
            first.add(token)
            return len(request.prompt) - 1

        server.engine.cached = cached
        usage = server.complete(prompt=["abcde", "bc"], n=3, echo=True, **extra).json()["usage"]
        assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (7, {"cached_tokens": 4 + 1})


class TestFailure:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_failed_request_is_a_500_or_an_event_and_others_go_on(self, server: Running, stream: bool) -> None:
        with pytest.raises(openai.APIError if stream else openai.InternalServerError, match="told to fail"):
            list(server.openai.completions.create(model="tiny", prompt="a", seed=FAIL_SEED, stream=stream))
        assert server.complete().json()["choices"][0]["text"] == "a"

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_bug_is_a_500_without_the_servers_insides(self, server: Running, stream: bool) -> None:
        server.engine.answer = lambda _: [1 << 40]  # no tokenizer takes it
        response = server.complete(stream=stream)
        assert response.status_code == (200 if stream else 500)
        text = response.text.partition("\n")[0].removeprefix("data: ")
        assert "OverflowError" in json.loads(text)["error"]["message"]

    def test_a_request_cut_short_by_the_engines_death_is_a_503_and_health_says_why(self, server: Running) -> None:
        got: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: got.append(server.complete(seed=SILENT_SEED)))
        waiting.start()
        stream = iter(server.openai.chat.completions.create(model="tiny", messages=HELLO, seed=SILENT_SEED, stream=True))
        next(stream)
        assert eventually(lambda: len(server.engine.received) == 2)
        assert server.http.get("/health").json() == {"status": "ok", "reason": None}
        server.engine_dies("exit code 3")
        waiting.join(60)
        late = server.complete()
        assert [each.status_code for each in (got[0], late, server.http.get("/health"))] == [503] * 3
        assert "exit code 3" in got[0].json()["error"]["message"] and "Retry-After" in late.headers
        with pytest.raises(openai.APIError, match="exit code 3"):
            next(stream)
        assert server.http.get("/health").json() == {"status": "dead", "reason": "exit code 3"}
        assert server.http.get("/metrics").status_code == 200

    def test_while_loading_everything_answers(self) -> None:
        with running_server(start_engine=False) as server:
            health = server.http.get("/health")
            assert (health.status_code, health.json()["status"], server.complete().status_code) == (503, "loading", 503)
            assert "vmmkv_engine_ready 0.0" in server.http.get("/metrics").text
            assert [model.id for model in server.openai.models.list()] == ["tiny"]

    @pytest.mark.parametrize("body", [{"stream": False}, {"stream": True}, {"stream": True, "echo": True, "logprobs": 1}])
    def test_when_the_client_goes_away_all_choices_are_aborted(self, fresh: Running, body: dict[str, Any]) -> None:
        fresh.never_ends()
        with asking(fresh, COMPLETIONS, {"model": "tiny", "prompt": "ab", "n": 3, "max_tokens": 200, **body}):
            assert eventually(lambda: fresh.client.first_token_times.totals()[0] == 1)
        assert eventually(lambda: fresh.engine.aborted() == {request.request_id for request in fresh.generates})
        assert len(fresh.generates) == 3 and eventually(lambda: fresh.service.queue.num_sequences == 0)
        assert 'vmmkv_requests_total{outcome="aborted"} 1.0' in fresh.http.get("/metrics").text
