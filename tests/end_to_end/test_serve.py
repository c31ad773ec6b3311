"""`vmmkv serve` as a user runs it: a real process, a real model, the official client."""

import functools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema_rs
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.schemas import SCHEMAS
from tests.end_to_end.small import ServerProcess, server_process, until
from vmmkv_server.models import resolve

MODEL = "smollm2-135m"
QUESTIONS = (
    "What is the capital of France?",
    "Hi",
    "Name three colours.",
    "Why is the sky blue? " * 20,
    "2 + 2 =",
    "Who are you?",
    "Write a haiku about the sea.",
    "List the first ten prime numbers, one on each line, with a comment.",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    resolve(MODEL)
    with server_process(tmp_path_factory.mktemp("serve") / "log", MODEL, "--max-num-batched-tokens", "256") as one:
        assert one.http().get("/health").status_code == 200
        yield one
    log = one.log.read_text()
    assert not re.search("[0-9] of [0-9]", log), log
    for stage in ("loading weights", "preparing the cache", "warming up"):
        assert re.search(rf"^{stage}: [0-9.]+ s$", log, re.MULTILINE), log


def answer(served: ServerProcess, question: str, max_tokens: int = 24, **options: Any) -> Any:
    """A greedy one, unless asked otherwise."""
    messages: Any = [{"role": "user", "content": question}]
    options = {"temperature": 0, **options}
    return served.openai().chat.completions.create(model=MODEL, messages=messages, max_tokens=max_tokens, **options)


def text(served: ServerProcess, question: str, max_tokens: int = 24) -> str:
    return answer(served, question, max_tokens).choices[0].message.content or ""


def complete(served: ServerProcess, prompt: Any, max_tokens: int, **options: Any) -> Any:
    return served.openai().completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens, **options)


def test_eight_at_once_are_those_of_transformers(served: ServerProcess) -> None:
    directory = resolve(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def expected(question: str) -> str:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    with ThreadPoolExecutor(len(QUESTIONS)) as clients:
        answers = list(clients.map(functools.partial(text, served, max_tokens=12), QUESTIONS))
    assert answers == [expected(question) for question in QUESTIONS]


def test_tokens_come_with_their_log_probabilities(served: ServerProcess) -> None:
    (choice,) = answer(served, "What is the capital of France?", logprobs=True, top_logprobs=3).choices
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
    for each in choice.logprobs.content:
        assert each.top_logprobs[0].token == each.token
        assert each.top_logprobs[0].logprob == pytest.approx(each.logprob)


def test_a_prompt_is_as_likely_as_transformers_says_and_needs_no_answer(served: ServerProcess) -> None:
    """As lm-evaluation-harness asks: token ids, and nothing behind them."""
    directory = resolve(MODEL)
    prompt = "The capital of France is Paris. The capital of Italy is Rome."
    ids = AutoTokenizer.from_pretrained(directory)(prompt).input_ids
    for _ in range(2):
        (choice,) = complete(served, [ids], 0, echo=True, logprobs=1, temperature=0).choices
    assert (choice.text, choice.finish_reason, choice.logprobs.text_offset[1]) == (prompt, "length", len("The"))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logprobs_NV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logprobs_NV[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert choice.logprobs.token_logprobs == [None, *(pytest.approx(each, abs=1e-3) for each in expected)]
    assert max(choice.logprobs.top_logprobs[5].values()) == pytest.approx(float(logprobs_NV[4].max()), abs=1e-3)


def test_the_implementation_is_said(served: ServerProcess) -> None:
    (model,) = httpx.get(f"{served.url}/v1/models").json()["data"]
    assert model["implementation"] in ("vmmkv", "transformers")
    assert f"{model['implementation']} implementation" in served.log.read_text()


def test_mapped_bytes_follow_the_tokens_and_come_back(served: ServerProcess) -> None:
    mapped = "kv_mapped_bytes"
    until(lambda: served.metric(mapped) == 0)
    stream = complete(served, "word " * 300, 5000, stream=True, temperature=0, extra_body={"ignore_eos": True})
    assert next(iter(stream)).choices
    until(lambda: served.metric(mapped) >= 4 * 2**21)  # 300 prompt tokens at 91 a page
    seen = served.metric(mapped)
    until(lambda: served.metric(mapped) > seen)  # and more as it goes on
    stream.close()
    until(lambda: served.metric(mapped) == 0)
    given_back = served.metric("kv_free_bytes") + served.metric("kv_cached_bytes")
    assert given_back == served.metric("kv_created_bytes")


@pytest.mark.nightly
def test_the_second_to_ask_waits_for_its_last_token_only(served: ServerProcess) -> None:
    prompt = "A prompt that both send, word by word. " * 15

    def ask(**options: object) -> tuple[int, int, list[str]]:
        reply = complete(served, prompt, 8, **options)
        cached_tokens = reply.usage.prompt_tokens_details.cached_tokens
        return cached_tokens, reply.usage.prompt_tokens, [choice.text for choice in reply.choices]

    first, again = ask(temperature=0), ask(temperature=0)
    assert first[0] == 0
    assert again == (first[1] - 1, first[1], first[2])
    assert ask(temperature=0, extra_body={"cache_salt": "another's"})[0] == 0
    four = ask(n=4, seed=10)[2]
    assert four == [ask(seed=10 + index)[2][0] for index in range(4)]
    beams = ask(n=2, extra_body={"use_beam_search": True, "beam_width": 3})[2]
    assert len(set(beams)) == 2


@pytest.mark.nightly
@pytest.mark.parametrize("stream", [True, False])
def test_answers_follow_a_schema_at_temperature_1_whoever_runs_beside_them(served: ServerProcess, stream: bool) -> None:
    names = ("three keys", "address", "receipt", "unicode enum", "steps")

    def ask(number: int) -> str:
        name = names[number]
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[name]}}
        options = {"temperature": 1, "seed": number, "stream": stream, "response_format": form}
        reply = answer(served, f"An example of {name}, as JSON.", 300, **options)
        if not stream:
            return str(reply.choices[0].message.content)
        return "".join(chunk.choices[0].delta.content or "" for chunk in reply)

    with ThreadPoolExecutor(7) as clients:
        free = [clients.submit(text, served, question) for question in QUESTIONS[:2]]
        answers = list(clients.map(ask, range(len(names))))
        assert "Paris" in free[0].result()
    for number, found in enumerate(answers):
        assert jsonschema_rs.is_valid(SCHEMAS[names[number]], json.loads(found)), found
