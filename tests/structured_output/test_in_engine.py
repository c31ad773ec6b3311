"""Answers that follow a grammar: whole and valid whatever the model, the same without jumps, and no other request touched."""

import functools
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import jsonschema_rs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.schemas import SCHEMAS
from tests.engine.conftest import Harness, tiny_model
from tests.server.support import eventually
from tests.server.tiny import byte_tokenizer, token_ids
from tests.structured_output.grammars import (
    BIAS,
    SIZE,
    assert_free_and_bound_answers_are_right,
    assert_logprobs_are_the_models_own,
    compiled,
    following,
    of,
    text,
    vocabulary,
)
from vmmkv import MIB
from vmmkv_server import LLM
from vmmkv_server.engine.engine import Engine
from vmmkv_server.engine.features import grammars
from vmmkv_server.engine.features.grammars import ANSWER_S, MAX_ABANDONED, THREAD_S, Grammars
from vmmkv_server.engine.loading import Loaded
from vmmkv_server.engine.request import Request
from vmmkv_server.engine.uploads import TokenMasks, Uploads, apply_masks
from vmmkv_server.protocol import Abort, Compacted, Generate
from vmmkv_server.sampling_params import SamplingParams
from vmmkv_server.structured_output import compiler
from vmmkv_server.structured_output.compiler import Compilation
from vmmkv_server.structured_output.matcher import CALL_S, CallResult, CallThreads, Matcher, Vocabulary
from vmmkv_server.structured_output.schema import Grammar, of_choices, of_schema


@functools.cache
def model() -> Any:
    return tiny_model(vocab_size=SIZE)


@pytest.fixture
def engine(harness: Callable[..., Harness]) -> Iterator[Callable[..., Harness]]:
    def make(**options: Any) -> Harness:
        return following(harness, model(), **options)

    yield make


def of_engine(one: Harness) -> Grammars:
    return one.engine.features.of(Grammars)


def without_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "may_jump", lambda request: False)


@pytest.mark.parametrize(
    ("lookahead", "filters"), [(0, {}), (2, {}), (2, {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.01})]
)
def test_every_answer_to_the_corpus_is_valid_with_and_without_filters(
    engine: Callable[..., Harness], lookahead: int, filters: dict[str, Any]
) -> None:
    """Top-k, top-p and min-p are of the tokens that the grammar leaves."""
    assert len(SCHEMAS) >= 60
    one = engine(slots=16, lookahead=lookahead)
    for index, (name, schema) in enumerate(SCHEMAS.items()):
        options = {"temperature": 1.0, "seed": index, "logit_bias": BIAS} | filters
        one.ask(name, token_ids(name), 1000, grammar=of(schema), **options)
    one.run()
    assert one.failures() == {}
    for name, schema in SCHEMAS.items():
        assert one.finish_reasons(name)[-1] == "stop", name
        assert jsonschema_rs.is_valid(schema, json.loads(text(one, name)), validate_formats=True), (name, text(one, name))


def test_greedy_answers_are_the_same_with_and_without_jumps_which_take_fewer_steps(
    engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tokenizer that has one way to write a text, and so the same answer is the same tokens."""
    answers, steps = [], []
    for jump in (True, False):
        if not jump:
            without_jumps(monkeypatch)
        one = engine(slots=8)
        for name, schema in SCHEMAS.items():
            one.ask(name, token_ids(name), 300, grammar=of(schema), logit_bias=BIAS)
        one.run()
        assert one.failures() == {}
        answers.append({name: (one.tokens(name), one.finish_reasons(name)[-1]) for name in SCHEMAS})
        steps.append(one.engine.num_steps)
    assert answers[0] == answers[1] and steps[0] < steps[1], steps


def test_steps_of_others_alone_make_no_mask(engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    calls, before = [], set(threading.enumerate())
    monkeypatch.setattr(grammars.Grammars, "masks", lambda *arguments: calls.append(arguments))
    one = engine()
    one.ask("free", token_ids("free"), 20)
    one.run()
    assert not calls and not any(thread.name.startswith("grammar_") for thread in set(threading.enumerate()) - before)


def test_a_preempted_answer_goes_on_where_its_grammar_stands(engine: Callable[..., Harness]) -> None:
    schema = {"type": "array", "items": {"enum": ["a rather long text", "another text"]}, "minItems": 40, "maxItems": 40}
    one = engine(slots=4, budget_pages=2, step_tokens=4096)
    for name in "ab":
        one.ask(name, token_ids("x" * 1900), 1200, grammar=of(schema), temperature=1.0, seed=ord(name))
    one.run()
    assert one.engine.scheduler.counts.preemptions >= 1 and one.failures() == {}
    for name in "ab":
        assert jsonschema_rs.is_valid(schema, json.loads(text(one, name))), name


@pytest.mark.parametrize("harness", ["exact"], indirect=True)
@pytest.mark.parametrize("policy", ["streaming_llm:window=60,every=5", "h2o:budget=60,recent=20,every=7,positions=original"])
def test_an_answer_of_which_rows_are_dropped_follows_its_grammar(engine: Callable[..., Harness], policy: str) -> None:
    schema = {"type": "array", "items": {"enum": ["a rather long text", "another text"]}, "minItems": 9, "maxItems": 9}
    one = engine(slots=4)
    one.ask("free", token_ids("x" * 40), 50)
    for seed in range(3):
        one.ask(str(seed), token_ids("x" * 80), 300, grammar=of(schema), temperature=1.0, seed=seed, kv_policy=policy)
    one.run()
    assert one.tokens("free") == one.expected(token_ids("x" * 40), 50)
    for seed in range(3):
        assert jsonschema_rs.is_valid(schema, json.loads(text(one, str(seed))))
    assert any(isinstance(each, Compacted) for each in one.sent)


def test_an_answer_that_is_cut_is_as_long_as_was_allowed(engine: Callable[..., Harness]) -> None:
    one, whole = engine(slots=16), '"0123456789"'
    for count in range(1, 14):
        one.ask(str(count), token_ids("?"), count, grammar=of({"const": "0123456789"}))
    one.run()
    for count in range(1, 14):
        assert text(one, str(count)) == whole[:count]
        assert one.finish_reasons(str(count))[-1] == ("stop" if count > len(whole) else "length")


def test_log_probabilities_and_penalties_count_every_token(engine: Callable[..., Harness]) -> None:
    one = engine()
    one.ask("scored", token_ids("?"), 40, grammar=of({"const": "aaaa"}), logprobs=0)
    one.ask("penalised", token_ids("?"), 40, grammar=of({"const": "aaaa"}), frequency_penalty=2.0)
    one.run()
    assert text(one, "scored") == text(one, "penalised") == '"aaaa"'
    assert len(one.logprobs("scored")) == 7 and max(one.logprobs("scored")) < 0, "the end token has one too"


def test_choices_expressions_and_grammars_are_followed(engine: Callable[..., Harness]) -> None:
    one = engine()
    choices = ["yes", "no", 'a "quoted"\none', "日本"]
    expression, ebnf = Grammar("regex", "(19|20)[0-9]{2}-[01][0-9]"), Grammar("ebnf", 'root ::= "<" [a-c]{3} ">"')
    for name, grammar in {"choice": of_choices(choices), "regex": expression, "ebnf": ebnf}.items():
        one.ask(name, token_ids("?"), 40, grammar=compiled(grammar), seed=5, temperature=1.0)
    one.run()
    assert text(one, "choice") in choices
    assert re.fullmatch(expression.source, text(one, "regex")) and re.fullmatch("<[a-c]{3}>", text(one, "ebnf"))


def test_what_cannot_follow_a_grammar_is_refused(engine: Callable[..., Harness]) -> None:
    one = engine()
    one.ask("beams", token_ids("?"), 9, grammar=of(True), beam_width=2)
    one.ask("endless", token_ids("?"), 9, grammar=of(True), ignore_eos=True)
    one.ask("garbage", token_ids("?"), 9, grammar=b"{}")
    one.ask("good", token_ids("?"), 9, grammar=of({"const": 1}))
    one.run()
    assert one.failures().keys() == {"beams", "endless", "garbage"} and text(one, "good") == "1"


def test_a_client_that_goes_leaves_nothing(engine: Callable[..., Harness]) -> None:
    numbers = random.Random(1)
    one = engine(slots=3, share=True)
    for index in range(12):
        one.ask(str(index), token_ids("who is it"), 80, grammar=of(SCHEMAS["steps"]), temperature=1.0, seed=index)
    while one.engine.has_work:
        one.step()
        if numbers.random() < 0.3:
            one.engine.receive(Abort(request_id=str(numbers.randrange(12))))
    one.engine.settle()
    one.check_table()
    assert not one.engine.scheduler.table.constrained.any()
    assert one.cache.stats().num_sequences == 0 and one.failures() == {}


def test_masks_touch_no_row_without_a_grammar(engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_free_and_bound_answers_are_right(engine(slots=6), monkeypatch)


@pytest.mark.parametrize("is_biased", [False, True])
def test_log_probabilities_are_the_models_own(engine: Callable[..., Harness], is_biased: bool) -> None:
    one = engine(slots=3)
    for seed, name in enumerate(("bound", "scored")):
        options = {"logprobs": 0 if name == "scored" else None, "logit_bias": BIAS if is_biased else {}}
        one.ask(name, token_ids("?"), 40, grammar=of(SCHEMAS["address"]), temperature=1.0, seed=seed, **options)
    one.run()
    assert_logprobs_are_the_models_own(one, "scored", token_ids("?"), within=1e-3)


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (33, torch.bfloat16), (1000, torch.float32)])
def test_masks_forbid_tokens_and_leave_allowed_logits(size: int, dtype: torch.dtype) -> None:
    numbers = np.random.default_rng(size)
    logits = torch.from_numpy(numbers.standard_normal((5, size))).to(dtype)
    may = numbers.random((2, size)) < 0.5
    bits = np.zeros((2, 32 * -(-size // 32)), np.bool_)
    bits[:, :size] = may
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    expected = logits.clone()
    expected[[3, 1]] = expected[[3, 1]].masked_fill(torch.from_numpy(~may), -torch.inf)
    unused = np.zeros((1, words.shape[1]), np.int32)
    uploads = Uploads(torch.device("cpu"))
    masks = TokenMasks.of([3, -1, 1], words.shape[1], uploads)
    masks.words_GW.copy_(torch.from_numpy(np.concatenate([words[:1], unused, words[1:]])))
    apply_masks(logits, masks, uploads)
    assert torch.equal(logits, expected)


@pytest.mark.nightly
def test_a_real_tokenizer_gives_valid_answers_with_jumps_and_without(
    smollm2: Path, harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is forced is the same text. The model chooses behind other tokens of it, so that its choices may be others."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    reader = Vocabulary.load(smollm2, len(tokenizer), [int(tokenizer.eos_token_id)])
    smol = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    names = ("classification", "tool call", "four deep", "constant object", "unicode constant")
    answers, steps = [], []
    for jump in (True, False):
        if not jump:
            without_jumps(monkeypatch)
        options = {"eos_ids": frozenset([int(tokenizer.eos_token_id)]), "max_tokens": 1024, "slots": len(names)}
        one = harness(smol, ours=True, vocabulary=lambda: reader, **options)
        for name in names:
            question = [{"role": "user", "content": f"Give me an example of {name} as JSON."}]
            prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
            grammar = of_schema(SCHEMAS[name])
            one.ask(name, prompt, 200, grammar=Compilation(reader).compile(grammar.kind, grammar.source))
        one.run()
        assert one.failures() == {}
        texts = {name: reader.rust.decode(one.tokens(name)) for name in names}
        for name in names:
            assert one.finish_reasons(name)[-1] == "stop"
            assert jsonschema_rs.is_valid(SCHEMAS[name], json.loads(texts[name])), (name, texts[name])
        answers.append({name: json.loads(texts[name]) for name in names})
        steps.append(one.engine.num_steps)
    for name in ("constant object", "unicode constant"):
        assert answers[0][name] == answers[1][name] == SCHEMAS[name]["const"]
    assert 2 * steps[0] < steps[1], steps


def collect_matchers(monkeypatch: pytest.MonkeyPatch, request_id: str, found: list[Matcher]) -> None:
    """From now on `found` has the matchers of requests with this id."""
    real = Grammars.matcher_for

    def made(manager: Grammars, request: Request, compiled: Any) -> Matcher:
        matcher = real(manager, request, compiled)
        found.extend([matcher] if request.ask.request_id == request_id else [])
        return matcher

    monkeypatch.setattr(Grammars, "matcher_for", made)


class Broken(Exception):
    """What a matcher's own code fails with."""


@pytest.mark.parametrize(
    ("method", "jump", "num_tokens"),
    [
        *((method, True, 3) for method in ("accept", "mask", "force", "must_end")),
        *((method, False, 3) for method in ("accept", "mask")),
        ("force", True, 0),
    ],
)
def test_a_matcher_that_fails_ends_its_request_and_no_other(
    engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch, method: str, jump: bool, num_tokens: int
) -> None:
    if not jump:
        without_jumps(monkeypatch)
    real, bad = getattr(Matcher, method), list[Matcher]()

    def failing(matcher: Matcher, *arguments: Any) -> Any:
        if matcher in bad and matcher.num_tokens >= num_tokens:
            raise Broken("as it happens")
        return real(matcher, *arguments)

    monkeypatch.setattr(Matcher, method, failing)
    collect_matchers(monkeypatch, "bad", bad)
    one = engine(slots=4, share=True)
    # Those that end beside it are told, whatever comes of the rows behind theirs.
    for name in ("first", "bad", "last"):
        one.ask(name, token_ids("?"), 60, grammar=of(SCHEMAS["steps"]), temperature=1.0, seed=3, logit_bias=BIAS)
    one.ask("free", token_ids("free"), 60)
    one.run()
    assert one.failures().keys() == {"bad"} and "as it happens" in one.failures()["bad"]
    assert one.tokens("first") == one.tokens("last") != []
    assert all(one.finish_reasons(name)[-1] in ("stop", "length") for name in ("first", "last", "free"))


def test_a_grammar_that_takes_the_loops_time_ends_its_request(
    engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "TRIAL_TOKENS", 0)
    slow = Compilation(vocabulary()).compile("regex", "((a{0,60}){0,60}){0,10}")
    one = engine()
    one.ask("slow", token_ids("?"), 200, grammar=slow, logit_bias=dict.fromkeys(token_ids("a"), 50.0))
    one.ask("good", token_ids("?"), 60, grammar=of({"const": "0123"}))
    one.run()
    assert "too long to follow" in one.failures()["slow"] and text(one, "good") == '"0123"'
    assert len(one.tokens("slow")) < 20


@pytest.mark.parametrize("jumps", [True, False])
def test_a_token_that_ends_an_answer_ends_it_where_it_is_forced_too(
    engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch, jumps: bool
) -> None:
    if not jumps:
        without_jumps(monkeypatch)
    one = engine()
    one.ask("a", token_ids("?"), 40, grammar=of({"const": "0123456789"}), stop_token_ids=token_ids("5"))
    one.run()
    assert text(one, "a") == '"01234' and one.finish_reasons("a")[-1] == "stop"


def test_an_answer_that_begins_with_forced_tokens_has_its_queue_time(engine: Callable[..., Harness]) -> None:
    one = engine(slots=1)
    for name in "ab":
        one.ask(name, token_ids("?"), 40, grammar=of(SCHEMAS["long keys"]))
    one.run()
    for name in "ab":
        first, *others = one.outputs(name)
        assert len(first.token_ids) > 1 and first.queued_us > 0
        assert {each.queued_us for each in others} == {0}


def test_a_grammar_is_read_once_and_not_for_a_cancelled_request_alone(
    engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, go, read, real = engine(), threading.Event(), list[bytes](), Vocabulary.read
    asked, takes = list[Request](), Grammars.takes

    def slowly(words: Vocabulary, data: bytes) -> Any:
        read.append(data)
        assert go.wait(60), "it was not told to read"
        return real(words, data)

    monkeypatch.setattr(Vocabulary, "read", slowly)
    monkeypatch.setattr(Grammars, "takes", lambda self, request: asked.append(request) or takes(self, request))
    first, second, being_read = (of({"const": number}) for number in (1, 2, 3))
    for name, grammar in {"z": being_read, "a": first, "b": first, "c": second, "d": first}.items():
        one.ask(name, token_ids("?"), 9, grammar=grammar)
    assert len(asked) == 5 and all(request.ask.grammar == b"" for request in asked), "the thread alone keeps megabytes"
    for name in "bc":
        one.engine.receive(Abort(request_id=name))
    go.set()
    one.run()
    assert read == [being_read, first] and text(one, "a") == text(one, "d") == "1"
    one.ask("e", token_ids("?"), 9, grammar=second)
    one.ask("f", token_ids("?"), 9, grammar=first)
    one.run()
    assert read == [being_read, first, second] and (text(one, "e"), text(one, "f")) == ("2", "1")


def test_a_grammar_that_could_not_be_read_is_read_again(
    engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, grammar = engine(), of({"const": 1})
    with monkeypatch.context() as patch:
        patch.setattr(Vocabulary, "read", Mock(side_effect=MemoryError("as it happens")))
        one.ask("failed", token_ids("?"), 9, grammar=grammar)
        one.run()
    one.ask("good", token_ids("?"), 9, grammar=grammar)
    one.run()
    assert one.failures().keys() == {"failed"} and text(one, "good") == "1"


def read_from_now(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Grammars that are read, and not found ready."""
    read, real = list[bytes](), Vocabulary.read
    monkeypatch.setattr(Vocabulary, "read", lambda words, data: read.append(data) or real(words, data))
    return read


def test_grammars_beyond_the_limit_are_dropped_oldest_use_first(
    engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    some, read = [of({"const": number}) for number in (1, 2, 3)], read_from_now(monkeypatch)
    monkeypatch.setattr(grammars, "CACHE_BYTES", sum(map(len, some)) - 1)
    one = engine()
    for name, number in (("a", 0), ("b", 1), ("c", 0), ("d", 2), ("e", 0), ("f", 2), ("g", 1)):
        one.ask(name, token_ids("?"), 9, grammar=some[number])
        one.run()
        assert text(one, name) == str(number + 1)
    assert read == [some[0], some[1], some[2], some[1]]


def test_namespaces_share_no_grammar(engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    one, read = engine(), read_from_now(monkeypatch)
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one"), ("d", None)):
        one.ask(name, token_ids("?"), 9, grammar=of({"const": 1}), cache_salt=salt)
    one.run()
    assert len(read) == 3
    assert {text(one, name) for name in "abcd"} == {"1"}


def test_steps_are_read_outside_inference_mode(engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made of tensors while a sequence ends is not bound to the mode in which a model runs."""
    modes = []
    real = Engine.read

    def seen(core: Engine) -> None:
        modes.append(torch.is_inference_mode_enabled())
        real(core)

    monkeypatch.setattr(Engine, "read", seen)
    one = engine()
    one.ask("a", token_ids("?"), 40, grammar=of({"const": "0123"}), logprobs=0)
    one.run()
    assert modes and not any(modes)


def test_many_slow_choices_are_charged_together(engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be let go on for 0.2 s, and the loop would stand for all of them."""
    one, real = engine(slots=16), Matcher.mask
    watched: list[float] = []

    def slow(matcher: Matcher) -> Any:
        if not matcher.has_mask:
            until_s = time.thread_time() + 0.02
            while time.thread_time() < until_s:
                pass
            watched.append(0.02)
        return real(matcher)

    # No time passes but in the grammars: what else is done gives them nothing.
    monkeypatch.setattr(grammars, "time", SimpleNamespace(perf_counter=lambda: sum(watched), sleep=time.sleep))
    for index in range(16):
        one.ask(str(index), token_ids("?"), 60, grammar=of(SCHEMAS["steps"]), temperature=1.0, seed=index)
    one.ask("free", token_ids("free"), 30)
    monkeypatch.setattr(Matcher, "mask", slow)
    one.run()
    assert len(one.failures()) >= 15 and all("too long to follow" in reason for reason in one.failures().values())
    assert sum(watched) < 16 * ANSWER_S / 2 and one.tokens("free") and "free" not in one.failures()


@pytest.mark.parametrize(("took_s", "held_s", "charged_s"), [(0.03, 0.04, 0.04), (0.03, 0.12, 0.12), (0.03, 0.5, 0.12)])
def test_the_loop_is_charged_the_time_it_is_held_and_requests_their_threads(
    monkeypatch: pytest.MonkeyPatch, took_s: float, held_s: float, charged_s: float
) -> None:
    """Of four calls, each of `took_s` of its thread."""
    core, now_s, params = Mock(), time.perf_counter(), SamplingParams(max_tokens=9)
    monkeypatch.setattr(grammars, "time", SimpleNamespace(perf_counter=lambda: now_s))
    monkeypatch.setattr(Grammars, "matcher_for", Mock())
    reader = Grammars(core)

    def made(calls: list[Callable[[], Any]], **_: int) -> list[CallResult[Any]]:
        nonlocal now_s
        now_s += held_s
        return [CallResult([], None, took_s) for _ in calls]

    monkeypatch.setattr(reader.threads, "run", made)

    def begin(*names: str) -> None:
        core.scheduler.add.reset_mock()
        for name in names:
            assert reader.takes(Request(Generate(request_id=name, prompt=[1], params=params, grammar=b"one"), frozenset()))
        assert eventually(lambda: reader.poll() or not reader.is_working())
        assert core.scheduler.add.call_count == len(names)

    begin("a", "b", "c", "d")
    assert reader.balance_s == pytest.approx(ANSWER_S - charged_s)
    now_s += 1
    begin("e")
    assert reader.balance_s == pytest.approx(ANSWER_S - min(took_s, held_s)), "it is filled again, and no further"
    reader.close()


def test_tokens_are_followed_in_several_threads_where_the_last_ones_took_long(
    engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_jumps(monkeypatch)
    one, nums = engine(slots=8), list[int]()
    took_s = iter(each * THREAD_S / 8 for each in (8, 0.9, 2.1, 1.9, 0.0))
    for index in range(8):
        one.ask(str(index), token_ids("?"), 40, grammar=compiled(Grammar("regex", "[ab]{39}")))
    while not one.tokens("7"):
        one.step()

    def made(calls: list[Callable[[], int]], *, num_threads: int) -> list[CallResult[int]]:
        if not calls:
            return []
        nums.append(num_threads)
        each_s = next(took_s)
        return [CallResult(call(), None, each_s) for call in calls]

    with monkeypatch.context() as patch:
        patch.setattr(of_engine(one).threads, "run", made)
        one.step()
        nothing = np.zeros(0, np.int64)
        of_engine(one).sampled(nothing, nothing, nothing > 0)
        one.step(4)
    assert nums[1:] == [8, 1, 3, 2], "by what the tokens before took"
    one.run()


def test_a_step_is_launched_before_the_last_is_read_and_takes_one_trip_to_the_matchers(
    engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_jumps(monkeypatch)
    one, events = engine(slots=4), list[str]()

    def noted(owner: Any, name: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: events.append(name) or real(*args, **options))

    for name in "abcd":
        one.ask(name, token_ids("?"), 40, grammar=compiled(Grammar("regex", "[ab]{39}")))
    while len(one.tokens("d")) < 3:
        one.step()
    threads = of_engine(one).threads
    for owner, name in ((one.runner, "forward"), (one.engine, "read"), (threads, "run"), (one.runner, "sample")):
        noted(owner, name)
    for _ in range(10):
        one.step()
    assert events == ["forward", "read", "run", "sample"] * 10
    one.run()


def test_an_engine_that_is_closed_has_no_thread_for_grammars(engine: Callable[..., Harness]) -> None:
    def names() -> list[str]:
        ours = [thread.name for thread in threading.enumerate() if thread not in before]
        return [name for name in ours if name.startswith("grammar")]

    before = set(threading.enumerate())
    one = engine()
    one.ask("asks", token_ids("?"), 60, grammar=of(SCHEMAS["address"]), logit_bias=BIAS)
    one.run()
    assert {"grammar-calls", "grammar_0"} <= set(names())
    memory, nothing = Mock(), cast("Any", None)
    for _ in range(2):
        Loaded(one.engine, nothing, memory).close()
    assert eventually(lambda: not names()) and memory.close.called


def overrun(go: threading.Event) -> None:
    """Take more of a thread's time than a call may, and then wait: a thread that spins on would hold up all others."""
    until_s = time.thread_time() + 4 * CALL_S
    while time.thread_time() < until_s:
        pass
    go.wait()


def test_a_mask_that_takes_too_long_ends_its_request_and_no_other(
    engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "CallThreads", functools.partial(CallThreads, num_threads=3))
    monkeypatch.setattr(grammars, "THREAD_S", 1e-9)
    real, go, bad = Matcher.mask, threading.Event(), list[Matcher]()

    def masking(matcher: Matcher) -> Any:
        if matcher in bad and matcher.num_tokens >= 3:
            real(matcher)[:] = 0  # as it may be while it is worked on
            overrun(go)
        return real(matcher)

    monkeypatch.setattr(Matcher, "mask", masking)
    collect_matchers(monkeypatch, "5", bad)
    one = engine(slots=12)
    for index in range(12):
        one.ask(str(index), token_ids("?"), 60, grammar=of(SCHEMAS["steps"]), temperature=1.0, seed=3, logit_bias=BIAS)
    one.run()
    go.set()
    assert one.failures().keys() == {"5"} and "too long to follow" in one.failures()["5"]
    assert all(one.tokens(str(index)) == one.tokens("0") != [] for index in range(12) if index != 5)


def test_no_answer_begins_while_too_many_calls_are_abandoned(
    engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def endless(matcher: Matcher, at_most: int) -> list[int]:
        overrun(go)
        return []

    monkeypatch.setattr(Matcher, "force", endless)
    one = engine(slots=12)
    for index in range(12):
        one.ask(str(index), token_ids("?"), 60, grammar=of({"const": "0123"}))
    one.run()
    num_abandoned = of_engine(one).threads.num_abandoned
    go.set()
    assert num_abandoned == MAX_ABANDONED
    reasons = list(one.failures().values())
    assert len(reasons) == 12 and sum("try again later" in reason for reason in reasons) == 12 - MAX_ABANDONED


def test_an_answer_of_an_llm_follows_its_grammar(tmp_path: Path) -> None:
    tiny_model(vocab_size=SIZE, eos_token_id=SIZE - 1).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    asked: list[dict[str, Any]] = [{"regex": "[0-9]{3}"}, {"choice": ["left", "right"]}, {"json": {"type": "boolean"}}]
    params = [SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=each) for each in asked]
    with LLM(tmp_path, device="cpu", kv_budget_bytes=64 * MIB) as one:
        texts = [each.outputs[0].text for each in one.generate(["abc"] * 3, params)]
    for found, pattern in zip(texts, ("[0-9]{3}", "left|right", "true|false"), strict=True):
        assert re.fullmatch(pattern, found)
