"""`vmmkv serve` as a user runs it: a real process, a real model, the official client."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jsonschema_rs
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.suites.serve.schemas import SCHEMAS
from vmmkv.server.models import resolve

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


class Served:
    """A server process and its clients."""

    def __init__(self, log: Path) -> None:
        self.url = ""
        self.log = log
        command = [sys.executable, "-m", "vmmkv", "serve", "--model", MODEL, "--port", "0", "--device", "cpu"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def wait(self) -> None:
        """Until it serves, and has said where."""

        def serves() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            match = re.search(r"at (http://\S+)/v1", self.log.read_text())
            self.url = match[1] if match else ""
            return bool(match)

        _until(serves, seconds=200)
        assert httpx.get(f"{self.url}/health", timeout=60).status_code == 200

    def metric(self, name: str) -> float:
        """One number of /metrics."""
        match = re.search(rf"^{name} (\S+)$", httpx.get(f"{self.url}/metrics", timeout=60).text, re.MULTILINE)
        assert match is not None, name
        return float(match[1])

    def answer(self, question: str, max_tokens: int = 24) -> str:
        """A greedy answer."""
        messages = [{"role": "user", "content": question}]
        answer = self.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=max_tokens, temperature=0)  # type: ignore[arg-type]
        return answer.choices[0].message.content or ""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    resolve(MODEL)
    one = Served(tmp_path_factory.mktemp("serve") / "log")
    try:
        one.wait()
        yield one
    finally:
        one.process.send_signal(signal.SIGTERM)
        try:
            code = one.process.wait(60)
        finally:
            one.process.kill()
    assert code == 0, one.log.read_text()
    assert not re.search("Traceback|nanobind|leaked|[0-9] of [0-9]", one.log.read_text()), one.log.read_text()
    for stage in ("loading weights", "preparing the cache", "warming up"):
        assert re.search(rf"^{stage}: [0-9.]+ s$", one.log.read_text(), re.MULTILINE), one.log.read_text()


def test_it_answers_in_sensible_english(served: Served) -> None:
    assert "Paris" in served.answer("What is the capital of France?")


def test_eight_at_once_are_those_of_transformers(served: Served) -> None:
    directory = resolve(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def expected(question: str) -> str:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    with ThreadPoolExecutor(len(QUESTIONS)) as clients:
        answers = list(clients.map(served.answer, QUESTIONS))
    assert answers == [expected(question) for question in QUESTIONS]


def test_streaming_gives_the_same_text(served: Served) -> None:
    messages = [{"role": "user", "content": "Name three colours."}]
    chunks = served.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, temperature=0, stream=True)  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == served.answer("Name three colours.")


def test_tokens_come_with_their_log_probabilities(served: Served) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = served.openai.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL, messages=messages, max_tokens=24, temperature=0, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
    for each in choice.logprobs.content:
        assert each.top_logprobs[0].token == each.token
        assert each.top_logprobs[0].logprob == pytest.approx(each.logprob)


def test_a_prompt_is_as_likely_as_transformers_says_and_needs_no_answer(served: Served) -> None:
    """As lm-evaluation-harness asks: token ids, and nothing behind them."""
    directory = resolve(MODEL)
    text = "The capital of France is Paris. The capital of Italy is Rome."
    ids = AutoTokenizer.from_pretrained(directory)(text).input_ids
    for _ in range(2):
        options = {"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
        (choice,) = served.openai.completions.create(model=MODEL, **options).choices  # type: ignore[call-overload]
    assert (choice.text, choice.finish_reason, choice.logprobs.text_offset[1]) == (text, "length", len("The"))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logprobs_NV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logprobs_NV[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert choice.logprobs.token_logprobs == [None, *(pytest.approx(each, abs=1e-3) for each in expected)]
    assert max(choice.logprobs.top_logprobs[5].values()) == pytest.approx(float(logprobs_NV[4].max()), abs=1e-3)


def test_an_answer_does_not_end_before_min_tokens(served: Served) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    options = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 60}
    least = {"min_tokens": 50}
    short = served.openai.chat.completions.create(**options)  # type: ignore[call-overload]
    long = served.openai.chat.completions.create(**options, extra_body=least)  # type: ignore[call-overload]
    assert short.usage.completion_tokens < 50 <= long.usage.completion_tokens
    assert long.choices[0].message.content.startswith(short.choices[0].message.content)


def test_a_bias_forces_a_token(served: Served) -> None:
    token = AutoTokenizer.from_pretrained(resolve(MODEL)).encode(" sea")[0]
    answer = served.openai.completions.create(
        model=MODEL, prompt="I see the", max_tokens=3, temperature=0, logit_bias={str(token): 100}
    )
    assert answer.choices[0].text == " sea sea sea"


def test_penalties_end_repetition(served: Served) -> None:
    def repetitions(penalty: float) -> int:
        answer = served.openai.completions.create(
            model=MODEL, prompt="one one one one one one", max_tokens=16, temperature=0, frequency_penalty=penalty
        )
        return answer.choices[0].text.count("many")

    assert repetitions(2) < repetitions(0)


def test_the_implementation_is_said(served: Served) -> None:
    (model,) = httpx.get(f"{served.url}/v1/models").json()["data"]
    assert model["implementation"] in ("vmmkv", "transformers")
    assert f"{model['implementation']} implementation" in served.log.read_text()


def test_mapped_bytes_follow_the_tokens_and_come_back(served: Served) -> None:
    mapped = "vmmkv_kv_mapped_bytes"
    _until(lambda: served.metric(mapped) == 0)
    stream = served.openai.completions.create(
        model=MODEL, prompt="word " * 300, max_tokens=200, stream=True, temperature=0, extra_body={"ignore_eos": True}
    )
    first = next(iter(stream))
    assert first.choices
    seen = [0.0]
    _until(lambda: seen.append(served.metric(mapped)) or seen[-1] >= 4 * 2**21)  # 300 prompt tokens at 91 a page
    _until(lambda: served.metric(mapped) > seen[-1])  # and more as it goes on
    for _ in stream:
        pass
    _until(lambda: served.metric(mapped) == 0)
    given_back = served.metric("vmmkv_kv_free_bytes") + served.metric("vmmkv_kv_cached_bytes")
    assert given_back == served.metric("vmmkv_kv_created_bytes")


def test_the_second_to_ask_waits_for_its_last_token_only(served: Served) -> None:
    prompt = "A prompt that both send, word by word. " * 40

    def ask(**options: object) -> tuple[int, int, list[str]]:
        answer = served.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=8, **options)  # type: ignore[call-overload]
        details = answer.usage.prompt_tokens_details
        return details.cached_tokens, answer.usage.prompt_tokens, [choice.text for choice in answer.choices]

    first, again = ask(temperature=0), ask(temperature=0)
    assert first[0] == 0
    assert again == (first[1] - 1, first[1], first[2])
    assert ask(temperature=0, extra_body={"cache_salt": "somebody else's"})[0] == 0
    four = ask(n=4, seed=10)[2]
    assert four == [ask(seed=10 + index)[2][0] for index in range(4)]
    beams = ask(n=2, extra_body={"use_beam_search": True, "beam_width": 3})[2]
    assert len(set(beams)) == 2


def test_a_client_that_leaves_gives_its_memory_back(served: Served) -> None:
    stream = served.openai.completions.create(
        model=MODEL, prompt="a", max_tokens=5000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    _until(lambda: served.metric("vmmkv_requests_running") == 0 and served.metric("vmmkv_kv_mapped_bytes") == 0)


def test_what_can_never_fit_is_refused_with_400(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="8192"):
        served.openai.completions.create(model=MODEL, prompt="a", max_tokens=9000)


def test_the_engine_killed_means_503_and_an_exit_code(tmp_path: Path) -> None:
    one = Served(tmp_path / "log")
    try:
        one.wait()
        children = subprocess.run(["pgrep", "-P", str(one.process.pid)], capture_output=True, text=True, check=True)
        engine = int(children.stdout.split()[0])
        with ThreadPoolExecutor(1) as client:
            asked = client.submit(one.answer, "Tell me a long story.", 2000)
            _until(lambda: one.metric("vmmkv_requests_running") == 1)
            os.kill(engine, signal.SIGKILL)
            with pytest.raises(openai.InternalServerError):
                asked.result(60)
        assert one.process.wait(60) == 1
    finally:
        one.process.kill()


def _until(condition: object, seconds: float = 30.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_follow_a_schema_at_temperature_1_whoever_runs_beside_them(served: Served, stream: bool) -> None:
    names = ("three keys", "address", "receipt", "unicode enum", "steps")

    def ask(number: int) -> str:
        name = names[number % len(names)]
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[name]}}
        reply = served.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"An example of {name}, as JSON."}], max_tokens=300,
            temperature=1, seed=number, stream=stream, response_format=form,  # type: ignore[call-overload]
        )  # fmt: skip
        if not stream:
            return str(reply.choices[0].message.content)
        return "".join(chunk.choices[0].delta.content or "" for chunk in reply)

    with ThreadPoolExecutor(9) as clients:
        free = [clients.submit(served.answer, question) for question in QUESTIONS[:2]]
        answers = list(clients.map(ask, range(2 * len(names))))
        assert "Paris" in free[0].result()
    for number, answer in enumerate(answers):
        assert jsonschema_rs.is_valid(SCHEMAS[names[number % len(names)]], json.loads(answer)), answer
