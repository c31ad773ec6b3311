"""Laws of `echo` with `logprobs`: how likely a prompt is, over the wire."""

import asyncio
from typing import Any

import pytest

from tests.server.fake_engine import READY
from tests.server.support import Running, eventually
from tests.server.tiny import token_ids
from vmmkv.server.http import generation
from vmmkv.server.http.generation import MAX_PROMPT_LOGPROBS
from vmmkv.server.protocol import Generate, PromptLogprobs

PROMPT = "a€bc"
"""Of six tokens, three of which are one character."""
ASKED: Any = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 1, "temperature": 0}


def ask(server: Running, **body: Any) -> dict[str, Any]:
    response = server.http.post("/v1/completions", json=ASKED | body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def refused(server: Running, **body: Any) -> dict[str, Any]:
    response = server.http.post("/v1/completions", json=ASKED | body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def joined(server: Running, **body: Any) -> list[dict[str, Any]]:
    """The choices of a stream, their chunks put together."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in server.openai.completions.create(**(ASKED | body), stream=True):
        for each in chunk.choices:
            news = each.model_dump()
            if (choice := choices.get(each.index)) is None:
                choices[each.index] = news
                continue
            choice["text"] += news["text"]
            choice["finish_reason"] = news["finish_reason"]
            for name, values in (news["logprobs"] or {}).items():
                choice["logprobs"][name] += values
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize("prompt", [PROMPT, token_ids(PROMPT)])
def test_the_prompts_tokens_come_before_the_answers(server: Running, prompt: Any) -> None:
    server.engine.answer = lambda _: token_ids("xyz")
    (choice,) = ask(server, prompt=prompt, max_tokens=2)["choices"]
    ids = token_ids(PROMPT)
    assert (choice["text"], choice["finish_reason"]) == (PROMPT + "xy", "length")
    logprobs = choice["logprobs"]
    assert set(map(len, logprobs.values())) == {8}
    assert logprobs["token_logprobs"] == [None, *(-token / 8 for token in ids[1:]), -1.0, -1.0]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2, 3, 4, 5], "a character is there when its last byte is"
    assert "".join(logprobs["tokens"][-4:]) == "bcxy" and logprobs["tokens"][1].startswith("bytes:")
    assert logprobs["top_logprobs"][0] is None
    likely = {server.service.tokenizer.texts.text_of(0): -2.0}  # type: ignore[union-attr]
    assert logprobs["top_logprobs"][5:7] == [likely | {"c": -ids[5] / 8}, likely | {"x": -1.0}]


@pytest.mark.parametrize("count", [0, 5])
def test_nothing_need_come_behind_the_prompt(server: Running, count: int) -> None:
    reply = ask(server, max_tokens=0, logprobs=count, prompt=[PROMPT, "z"])
    first, second = reply["choices"]
    assert (first["text"], first["finish_reason"]) == (PROMPT, "length")
    assert len(first["logprobs"]["tokens"]) == 6
    assert [len(each) for each in first["logprobs"]["top_logprobs"][1:]] == [1 + count] * 5
    assert second["logprobs"] == {"text_offset": [0], "token_logprobs": [None], "tokens": ["z"], "top_logprobs": [None]}
    assert reply["usage"]["completion_tokens"] == 0 and reply["usage"]["prompt_tokens"] == 7
    sent = server.engine.received[-1]
    assert isinstance(sent, Generate)
    assert (sent.params.max_tokens, sent.params.prompt_logprobs) == (0, count)


@pytest.mark.parametrize("body", [{"max_tokens": 0}, {"max_tokens": 3}, {"max_tokens": 3, "n": 2, "prompt": ["ab", "cdef"]}])
def test_a_stream_says_the_same_and_the_prompt_in_its_first_chunk(server: Running, body: dict[str, Any]) -> None:
    firsts: dict[int, Any] = {}
    for chunk in server.openai.completions.create(**(ASKED | body), stream=True):
        for choice in chunk.choices:
            firsts.setdefault(choice.index, choice)
    prompts = [prompt for prompt in body.get("prompt", [PROMPT]) for _ in range(body.get("n", 1))]
    assert len(firsts) == len(prompts)
    for index, prompt in enumerate(prompts):
        assert firsts[index].text.startswith(prompt)
        assert len(firsts[index].logprobs.tokens) >= len(token_ids(prompt))
    assert joined(server, **body) == ask(server, **body)["choices"]


def test_stop_strings_are_looked_for_in_the_answer_alone(server: Running) -> None:
    server.engine.answer = lambda _: token_ids("xbyz")
    (choice,) = ask(server, stop=["b"])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT + "x", "stop")
    assert choice["logprobs"]["text_offset"][-2:] == [4, 5]


def test_a_prompt_can_take_all_that_there_is(server: Running) -> None:
    ids = [97] * READY.max_tokens
    (choice,) = ask(server, prompt=ids, max_tokens=0)["choices"]
    assert len(choice["logprobs"]["tokens"]) == READY.max_tokens
    error = refused(server, prompt=[*ids, 97], max_tokens=0)
    assert error["param"] == "prompt" and f"shorten the prompt to {READY.max_tokens} tokens" in error["message"]


def test_without_logprobs_the_engine_is_not_asked(server: Running) -> None:
    for body in ({"logprobs": None}, {"echo": False}):
        ask(server, **body)
        sent = server.engine.received[-1]
        assert isinstance(sent, Generate) and sent.params.prompt_logprobs is None


@pytest.mark.parametrize("body", [{"echo": False}, {"logprobs": None}, {"structured_outputs": {"regex": "a"}}])
def test_an_answer_of_nothing_is_refused_where_nothing_is_said_of_the_prompt(server: Running, body: dict[str, Any]) -> None:
    error = refused(server, max_tokens=0, **body)
    assert error["param"].rstrip(".") == "max_tokens" and "max_tokens=0" in error["message"]


def test_beams_say_nothing_of_a_prompt(server: Running) -> None:
    assert refused(server, use_beam_search=True)["param"] == "logprobs"


@pytest.mark.parametrize("count", [1, 20])
def test_too_many_are_refused_with_what_would_work(server: Running, count: int) -> None:
    most = MAX_PROMPT_LOGPROBS // (4 + count) // 128
    error = refused(server, prompt=[[97] * (most + 1)] * 128, logprobs=count, max_tokens=1)
    assert error["param"] == "logprobs" and str(MAX_PROMPT_LOGPROBS) in error["message"]
    assert len(ask(server, prompt=[[97] * most] * 128, logprobs=count, max_tokens=0)["choices"]) == 128


@pytest.mark.parametrize("stream", [False, True])
def test_those_of_a_long_prompt_are_unpacked_in_a_thread(
    server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    at_work: list[int] = []

    def unpacked(message: PromptLogprobs) -> Any:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        at_work.append(1)
        return real(message)

    real = generation.unpacked
    monkeypatch.setattr(generation, "unpacked", unpacked)
    body: Any = {"prompt": [97] * 200, "logprobs": 5, "max_tokens": 1}
    (choice,) = joined(server, **body) if stream else ask(server, **body)["choices"]
    assert len(choice["logprobs"]["tokens"]) == 201 and set(at_work) == {1}


def test_who_goes_away_in_its_prompt_leaves_nothing(server: Running) -> None:
    server.engine.step_s, server.engine.endless = 0.02, True
    stream = server.openai.completions.create(**ASKED, max_tokens=200, stream=True)
    next(iter(stream))
    stream.close()
    assert eventually(lambda: len(server.engine.aborted()) == 1)
    assert eventually(lambda: server.service.queue.num_sequences == 0)
