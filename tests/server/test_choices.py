"""Several choices of one prompt, the best of several, beams, salts, and what was cached: from the request to the answer."""

from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest

from tests.server.fake_engine import READY
from tests.server.support import Running, eventually, running_server
from tests.server.test_app import HELLO, post, refused
from tests.server.tiny import byte_tokenizer, token_ids
from vmmkv.server.protocol import Abort, Beam, Generate

SEED_RANGE = 1 << 63


def all_sent(server: Running) -> list[Generate]:
    return [message for message in server.engine.received if isinstance(message, Generate)]


def of_seed(request: Generate) -> list[int]:
    """An answer that depends on the prompt's first token and on the seed, as a sampled one does."""
    return [request.prompt[0], *token_ids(str(request.params.seed % 1000))]


def listed(*texts: str) -> Callable[[Generate], list[int]]:
    """An answer for each seed from 0 on."""
    return lambda request: token_ids(texts[request.params.seed])


class TestN:
    def test_n_choices_are_those_of_n_requests_with_the_seeds_that_follow(self, server: Running) -> None:
        server.engine.answer = of_seed
        create = server.openai.chat.completions.create
        choices = create(model="tiny", messages=HELLO, n=4, seed=42).choices
        assert [choice.index for choice in choices] == [0, 1, 2, 3]
        alone = [create(model="tiny", messages=HELLO, seed=42 + index).choices[0] for index in range(4)]
        assert [choice.message.content for choice in choices] == [choice.message.content for choice in alone]
        assert len({choice.message.content for choice in choices}) == 4

    @pytest.mark.parametrize("seed", [-2, SEED_RANGE - 2, 7])
    def test_seeds_wrap_at_the_end_of_their_range(self, server: Running, seed: int) -> None:
        server.openai.completions.create(model="tiny", prompt="a", n=4, seed=seed)
        assert [request.params.seed for request in all_sent(server)] == [(seed + index) % SEED_RANGE for index in range(4)]

    def test_without_a_seed_they_are_random_and_differ(self, server: Running) -> None:
        for _ in range(2):
            server.openai.completions.create(model="tiny", prompt="a", n=3)
        assert len({request.params.seed for request in all_sent(server)}) == 6

    @pytest.mark.parametrize("stream", [False, True])
    def test_choices_of_a_prompt_stand_side_by_side(self, server: Running, stream: bool) -> None:
        server.engine.answer = of_seed
        body: dict[str, Any] = {"model": "tiny", "prompt": ["ab", "cd"], "n": 3, "seed": 5}
        create = server.openai.completions.create
        chunks = list(create(**body, stream=True)) if stream else [create(**body)]
        texts, reasons = dict.fromkeys(range(6), ""), {}
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason
        requests = all_sent(server)
        assert len({request.params.seed for request in requests}) == len({request.request_id for request in requests}) == 6
        assert [request.prompt for request in requests] == [token_ids("ab")] * 3 + [token_ids("cd")] * 3
        decode = byte_tokenizer().backend_tokenizer.decode
        assert texts == {index: decode(of_seed(request)) for index, request in enumerate(requests)}
        assert [text[0] for text in texts.values()] == list("aaaccc")
        assert reasons == dict.fromkeys(range(6), "stop")

    def test_each_choice_of_a_chats_stream_has_its_role_text_and_reason(self, server: Running) -> None:
        server.engine.answer = listed("zero", "one", "two")
        chunks = list(server.openai.chat.completions.create(model="tiny", messages=HELLO, n=3, seed=0, stream=True))
        for index, text in enumerate(("zero", "one", "two")):
            own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
            assert own[0].delta.role == "assistant"
            assert "".join(choice.delta.content or "" for choice in own) == text
            assert [choice.finish_reason for choice in own if choice.finish_reason] == ["stop"]
            assert own[-1].finish_reason == "stop"

    def test_one_choice_stops_and_the_others_go_on(self, server: Running) -> None:
        server.engine.answer = listed("a.b", "cde", "f.")
        reply = server.openai.completions.create(model="tiny", prompt="x", n=3, seed=0, stop=".")
        assert [choice.text for choice in reply.choices] == ["a", "cde", "f"]

    def test_greedy_choices_are_allowed(self, server: Running) -> None:
        reply = server.openai.completions.create(model="tiny", prompt="abc", n=2, temperature=0)
        assert [choice.text for choice in reply.choices] == ["abc", "abc"]
        assert not any(request.params.logprobs is not None for request in all_sent(server))

    def test_a_prompt_is_counted_once_and_all_its_choices(self, server: Running) -> None:
        server.engine.answer = listed("a", "bb", "ccc")
        usage = server.openai.completions.create(model="tiny", prompt="12345", n=3, seed=0).usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 6, 11)

    def test_when_the_client_goes_away_all_choices_are_aborted(self, server: Running) -> None:
        server.engine.endless, server.engine.step_s = True, 0.02
        stream = server.openai.completions.create(model="tiny", prompt="a", n=5, max_tokens=200, stream=True)
        next(iter(stream))
        stream.close()
        assert eventually(lambda: server.engine.aborted() == {request.request_id for request in all_sent(server)})
        assert sum(isinstance(message, Abort) for message in server.engine.received) == 5

    @pytest.mark.parametrize(
        ("body", "param", "would_work"),
        [
            ({"prompt": "a", "n": 129}, "n", 128),
            ({"prompt": ["a"] * 3, "n": 43}, "n", 42),
            ({"prompt": [[1]] * 100, "n": 2}, "n", 1),
            ({"prompt": ["a"] * 3, "use_beam_search": True, "beam_width": 43}, "beam_width", 42),
            ({"prompt": ["a"] * 3, "use_beam_search": True, "n": 43}, "n", 42),
        ],
    )
    def test_too_many_are_refused_with_what_would_work(
        self, server: Running, body: dict[str, Any], param: str, would_work: int
    ) -> None:
        error = refused(server, "/v1/completions", body)
        assert error["param"] == param
        assert f"lower {param} to {would_work} " in error["message"]
        if "use_beam_search" not in body:
            assert post(server, "/v1/completions", {"model": "tiny", **body, param: would_work}).status_code == 200


class TestBeams:
    def test_the_choices_are_the_best_beams_in_order(self, server: Running) -> None:
        body = {"model": "tiny", "prompt": ["abcd", "efgh"], "n": 2, "use_beam_search": True, "beam_width": 3}
        reply = post(server, "/v1/completions", body).json()
        assert [choice["text"] for choice in reply["choices"]] == ["abcd", "bcd", "efgh", "fgh"]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        # 4 + 3 + 2 tokens of each prompt's three beams.
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (8, 18)

    def test_one_request_a_prompt_says_what_to_search(self, server: Running) -> None:
        extra: dict[str, Any] = {"use_beam_search": True, "beam_width": 3, "length_penalty": 2, "stop_token_ids": [9]}
        server.openai.chat.completions.create(model="tiny", messages=HELLO, temperature=0, max_tokens=7, extra_body=extra)
        (request,) = all_sent(server)
        assert (request.params.beam_width, request.params.length_penalty, request.params.temperature) == (3, 2.0, 0.0)
        assert (request.params.max_tokens, request.params.stop_token_ids) == (7, (9,))

    def test_n_is_the_width_unless_one_is_given(self, server: Running) -> None:
        reply = server.openai.chat.completions.create(model="tiny", messages=HELLO, n=4, extra_body={"use_beam_search": True})
        assert [request.params.beam_width for request in all_sent(server)] == [4]
        assert len(reply.choices) == 4

    def test_a_beam_says_why_it_ended(self, server: Running) -> None:
        server.engine.search = lambda _: [
            Beam(token_ids=token_ids("ab"), score=-1.0, finish_reason="length"),
            Beam(token_ids=[], score=-2.0, finish_reason="stop"),
        ]
        body = {"model": "tiny", "prompt": "x", "n": 2, "use_beam_search": True}
        choices = post(server, "/v1/completions", body).json()["choices"]
        assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("ab", "length"), ("", "stop")]

    def test_a_stop_string_cuts_what_was_found(self, server: Running) -> None:
        body = {"model": "tiny", "prompt": "ab.cd", "n": 2, "use_beam_search": True, "stop": "."}
        choices = post(server, "/v1/completions", body).json()["choices"]
        assert [choice["text"] for choice in choices] == ["ab", "b"]

    def test_too_few_answers_are_an_error_that_says_so(self, server: Running) -> None:
        server.engine.search = lambda _: [Beam(token_ids=[1], score=-1.0, finish_reason="stop")]
        response = post(server, "/v1/completions", {"model": "tiny", "prompt": "x", "n": 2, "use_beam_search": True})
        assert response.status_code == 500
        assert "found 1 answers for n=2" in response.json()["error"]["message"]

    def test_without_beams_the_engine_is_told_of_none(self, server: Running) -> None:
        body = {"model": "tiny", "prompt": "a", "use_beam_search": False, "beam_width": None, "length_penalty": 1}
        assert post(server, "/v1/completions", body).status_code == 200
        assert [(request.params.beam_width, request.params.length_penalty) for request in all_sent(server)] == [(0, 1.0)]

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    @pytest.mark.parametrize(
        ("body", "param", "said"),
        [
            ({"temperature": 0.5}, "temperature", "send 0"),
            ({"stream": True}, "stream", "leave stream out"),
            ({"top_p": 0.5}, "top_p", "leave top_p out"),
            ({"top_k": 5}, "top_k", "leave top_k out"),
            ({"min_p": 0.5}, "min_p", "leave min_p out"),
            ({"presence_penalty": 1}, "presence_penalty", "leave presence_penalty out"),
            ({"frequency_penalty": 1}, "frequency_penalty", "leave frequency_penalty out"),
            ({"repetition_penalty": 2}, "repetition_penalty", "leave repetition_penalty out"),
            ({"logit_bias": {"5": 1}}, "logit_bias", "leave logit_bias out"),
            ({"logprobs": 1}, "logprobs", "leave logprobs out"),
            ({"n": 4, "beam_width": 2}, "n", "raise beam_width to 4 or lower n to 2"),
            ({"beam_width": 0}, "beam_width", "greater than or equal to 1"),
            ({"beam_width": READY.max_sequences + 1}, "beam_width", f"lower beam_width to {READY.max_sequences}"),
            ({"length_penalty": 11}, "length_penalty", "10"),
            ({"use_beam_search": False, "beam_width": 2}, "beam_width", "use_beam_search=true"),
            ({"min_tokens": 2}, "min_tokens", "or the beam search"),
            ({"use_beam_search": False, "length_penalty": 0}, "length_penalty", "use_beam_search=true"),
        ],
    )
    def test_what_no_search_can_do_is_refused(
        self, server: Running, path: str, body: dict[str, Any], param: str, said: str
    ) -> None:
        asked: dict[str, Any] = {"messages": HELLO} if "chat" in path else {"prompt": "a"}
        if "chat" in path and "logprobs" in body:
            body = {"logprobs": True}
        error = refused(server, path, {**asked, "use_beam_search": True, **body})
        assert error["param"] == param
        assert said in error["message"]


class TestCached:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("chat", [False, True])
    @pytest.mark.parametrize("cached", [0, 3])
    def test_usage_says_what_was_cached_and_never_null(self, server: Running, stream: bool, chat: bool, cached: int) -> None:
        server.engine.cached = lambda _: cached
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        client = server.openai
        if chat:
            reply = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=9, **options)
        else:
            reply = client.completions.create(model="tiny", prompt="abcdef", **options)
        usage = (list(reply)[-1] if stream else reply).usage
        assert usage.prompt_tokens_details.cached_tokens == cached

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
        body = {"model": "tiny", "prompt": ["abcde", "bc"], "n": 3, **extra}
        usage = post(server, "/v1/completions", body).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 4 + 1}
        assert usage["prompt_tokens"] == 7

    def test_a_salt_reaches_the_engine(self, server: Running) -> None:
        for salt in ("tenant ä", None):
            extra = {"cache_salt": salt}
            server.openai.completions.create(model="tiny", prompt="a", n=2, extra_body=extra)
            server.openai.chat.completions.create(model="tiny", messages=HELLO, extra_body=extra)
        assert [request.cache_salt for request in all_sent(server)] == ["tenant ä"] * 3 + [None] * 3


def test_a_search_may_have_all_the_slots_there_are() -> None:
    with running_server(ready=msgspec.structs.replace(READY, max_sequences=2)) as server:
        body = {"model": "tiny", "prompt": "abc", "use_beam_search": True, "beam_width": 2}
        assert post(server, "/v1/completions", body).status_code == 200
        with pytest.raises(openai.BadRequestError, match="lower n to 2") as caught:
            server.openai.completions.create(model="tiny", prompt="a", n=3, extra_body={"use_beam_search": True})
        assert caught.value.param == "n"
