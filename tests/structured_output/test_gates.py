"""Answers whose grammar begins within them: free before, by the grammar from its first text on, and the same however many steps
are in flight.
"""

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.engine.conftest import Harness, tiny_model, wide_rows, windowed
from tests.server.tiny import token_ids
from tests.structured_output.gates import (
    ASKED,
    GATES,
    GRAMMARS,
    PARTS,
    SIZE,
    Answers,
    Replay,
    ask,
    ask_all,
    assert_follows,
    compiled,
    part,
    vocabulary,
)
from tests.structured_output.grammars import assert_logprobs_are_the_models_own
from vmmkv_server.engine.features.grammars import Grammars
from vmmkv_server.protocol import Compacted, Gate, Generate, decode_to_engine, encode
from vmmkv_server.sampling_params import SamplingParams
from vmmkv_server.structured_output.compiler import Compilation
from vmmkv_server.structured_output.gate import GateSearch
from vmmkv_server.structured_output.matcher import CallThreads, Matcher, Vocabulary
from vmmkv_server.structured_output.text import quoted


@pytest.fixture
def engine(harness: Callable[..., Harness]) -> Iterator[Callable[..., Harness]]:
    def make(model: Any = None, **options: Any) -> Harness:
        model = tiny_model(vocab_size=SIZE) if model is None else model
        usual = {"eos_ids": frozenset([257]), "vocabulary": vocabulary, "ours": True, "slots": 16}
        return harness(model, **usual | options)

    yield make


@pytest.fixture
def at_once(request: pytest.FixtureRequest) -> Answers:
    """The answers where each step is read before the next, over rows of the kind that `harness` has."""
    return answers_at_once(request.node.callspec.params["harness"])


@functools.cache
def answers_at_once(kind: str) -> Answers:
    usual: Any = {"eos_ids": frozenset([257]), "vocabulary": vocabulary, "ours": True, "slots": 16, "lookahead": 0}
    one = Harness(tiny_model(vocab_size=SIZE), kv_kind=None if kind == "exact" else kind, **usual)
    try:
        return ask_all(one)
    finally:
        one.close()


# where grammars begin


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_a_search_finds_what_comparing_the_whole_answer_finds(gate: Gate) -> None:
    words, num_found = vocabulary(), 0
    ids = [*map(part, PARTS[:-1] if gate.in_code else PARTS), *token_ids("<a>b! ")]
    for seed in range(60):
        draws = random.Random(seed)
        search, replay, tokens = GateSearch(gate, words), Replay(gate, words.token_bytes), list[int]()
        while len(tokens) < 60:
            tokens.append(draws.choice(ids))
            word = search.completing[tokens[-1] // 32]
            found = search.found(tokens) if word >> tokens[-1] % 32 & 1 else []
            assert found == replay.found(tokens[-1]), tokens
            num_found += bool(found)
            if found and not gate.triggers:
                break
            if found and draws.random() < 0.3:
                search.restart(len(tokens))
                replay.restart(len(replay.text) - len(found[0]))
    assert num_found > 5


def test_a_trigger_in_a_code_block_begins_no_grammar_if_it_may_not() -> None:
    """As readers of calls take it: a model that shows a call has not made one."""
    words = vocabulary()
    text = "So:\n```xml\n<a>\n```\n<a>b\n~~~\n<a>"
    ends = [end for end in range(len(text) + 1) if text[:end].endswith("<a>")]
    for in_code, wanted in ((True, ends), (False, ends[1:2])):
        search, tokens = GateSearch(Gate(triggers=("<a>",), repeats=True, in_code=in_code), words), list[int]()
        found = []
        for token in token_ids(text):
            tokens.append(token)
            if search.completing[token // 32] >> token % 32 & 1 and search.found(tokens):
                found.append(len(tokens))
        assert found == wanted
    search, tokens = GateSearch(Gate(triggers=("<a>",), repeats=True, in_code=False), words), token_ids("<a>")
    assert search.found(tokens)
    tokens += token_ids("\n```\n!")  # what the grammar writes is no text of the answer
    search.restart(len(tokens))
    assert search.found(tokens + token_ids("<a>"))


def test_few_tokens_may_complete_a_text(smollm2: Path) -> None:
    words = real(smollm2)
    for triggers in (("<tool_call>",), ('{"name": "get_weather"', '{"name": "search"'), ("</think>",)):
        mask = words.completing(tuple(trigger.encode() for trigger in triggers))
        may = {*np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()}
        whole = [trigger.encode() for trigger in triggers]
        ends = tuple(trigger[start:] for trigger in whole for start in range(len(trigger)))
        must = {
            index
            for index, token in enumerate(words.token_bytes)
            if token.startswith(ends) or any(trigger in token for trigger in whole)
        }
        assert must <= may and len(may - must) < 20 and len(may) < words.size / 4


def test_a_gate_has_texts_to_look_for_and_a_grammar() -> None:
    for wrong in ({}, {"triggers": ("a", "")}, {"behind": "a", "repeats": True}, {"behind": "a", "is_first": True}):
        with pytest.raises(ValueError, match="a gate"):
            Gate(**wrong)
    params = SamplingParams()
    with pytest.raises(AssertionError, match="for a grammar"):
        Generate(request_id="a", prompt=[1], params=params, gate=GATES["once"])
    whole = Generate(request_id="a", prompt=[1], params=params, grammar=b"{}", gate=GATES["behind"])
    assert decode_to_engine(encode(whole)) == whole
    assert msgspec.structs.replace(whole, grammar=b"", gate=None).gate is None


# answers


def test_answers_are_free_until_their_grammar_begins_and_follow_it(at_once: Answers, engine: Callable[..., Harness]) -> None:
    one, free, begun = engine(lookahead=0), engine(lookahead=0), Counter[str]()
    assert ask_all(one) == at_once
    for name, (*_, seed) in ASKED.items():
        ask(free, name, seed)
    free.run()
    for name, (gate, source, _) in ASKED.items():
        num_free, num_begun = assert_follows(one, name, gate, vocabulary(), compiled(source))
        assert one.tokens(name)[:num_free] == free.tokens(name)[:num_free], name
        begun[name.rsplit(" ", 2)[0]] += num_begun
    assert all(begun[gate] for gate in GATES) and begun["again"] > 8, begun


@pytest.mark.parametrize(
    "options",
    [
        {"lookahead": 2},
        *(
            pytest.param(options, marks=pytest.mark.nightly)
            for options in ({"lookahead": 1}, {"share": True, "step_tokens": 18}, {"slots": 3, "share": True})
        ),
    ],
)
def test_answers_are_the_same_however_many_steps_are_in_flight(
    at_once: Answers, engine: Callable[..., Harness], options: dict[str, Any]
) -> None:
    assert ask_all(engine(**options)) == at_once


@pytest.mark.parametrize(
    "changes",
    [
        {"frequency_penalty": 1.0},
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ({"logprobs": 2}, {"stop_token_ids": token_ids("!")})),
    ],
)
def test_what_counts_every_token_counts_those_of_gated_answers(engine: Callable[..., Harness], changes: dict[str, Any]) -> None:
    answers = []
    for lookahead in (0, 2):
        one = engine(lookahead=lookahead)
        answers.append(ask_all(one, **changes))
        for name in ASKED:
            num_scored = len(one.tokens(name)) + (one.finish_reasons(name)[-1] == "stop")
            assert len(one.logprobs(name)) == (num_scored if "logprobs" in changes else 0)
    assert answers[0] == answers[1]


def test_tokens_of_gated_answers_have_the_log_probabilities_of_the_model(engine: Callable[..., Harness]) -> None:
    """Of its own distribution, whether a token was free, masked or forced."""
    one, prompt, names = engine(), token_ids("?"), [*ASKED][::3]
    for name in names:
        gate, source, seed = ASKED[name]
        ask(one, name, seed, grammar=compiled(source), gate=gate, logprobs=0)
    one.run()
    assert one.failures() == {}
    for name in names:
        assert assert_follows(one, name, ASKED[name][0], vocabulary(), compiled(ASKED[name][1]))
        assert_logprobs_are_the_models_own(one, name, prompt, within=1e-3)


@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_preempted_request_goes_on_where_it_was_free_or_by_its_grammar(engine: Callable[..., Harness], share: bool) -> None:
    """Those that find no page are preempted, wherever they are."""
    answers, names = list[Any](), [*ASKED][::2]
    for budget_pages in (64, 8):
        one = engine(wide_rows(vocab_size=SIZE), budget_pages=budget_pages, share=share, step_tokens=512)
        for name in names:
            gate, source, seed = ASKED[name]
            ask(one, name, seed, 60, "abcdefgh" * 7 + "?" * (seed % 3), grammar=compiled(source), gate=gate)
        one.run()
        assert one.failures() == {}
        assert bool(one.engine.scheduler.counts.preemptions) == (budget_pages == 8)
        answers.append({name: (one.tokens(name), one.finish_reasons(name)[-1]) for name in names})
    assert answers[0] == answers[1]


@pytest.mark.parametrize("count", [3, *(pytest.param(count, marks=pytest.mark.nightly) for count in (1, 2, 5, 8))])
def test_an_answer_that_is_cut_is_the_first_part_of_one_that_is_not(
    at_once: Answers, engine: Callable[..., Harness], count: int
) -> None:
    """In its text: where few tokens are left, one is sampled that would be forced. The last one may complete a trigger."""
    one = engine()
    for name, (gate, source, seed) in ASKED.items():
        ask(one, name, seed, count, grammar=compiled(source), gate=gate)
    one.run()
    for name, (tokens, reason) in at_once.items():
        cut, whole = (b"".join(vocabulary().token_bytes[token] for token in each) for each in (one.tokens(name), tokens))
        assert whole.startswith(cut)
        assert one.finish_reasons(name)[-1] == (reason if count > len(tokens) else "length")


def test_choices_of_one_prompt_begin_their_grammars_each_for_itself(engine: Callable[..., Harness]) -> None:
    one, gate, source = engine(share=True), GATES["again"], GRAMMARS["free"]
    for seed in range(12):
        ask(one, str(seed), seed, 60, "one prompt for all of them", grammar=compiled(source), gate=gate)
    one.run()
    names = [str(seed) for seed in range(12)]
    places = [assert_follows(one, name, gate, vocabulary(), compiled(source))[0] for name in names]
    assert len(set(places)) > 4


def test_free_answers_make_no_call_and_no_mask(engine: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the steps of answers without a grammar, all of which are launched ahead."""
    gate = Gate(behind="</think>", triggers=("<tool_call>", "[TOOL_CALLS]"), repeats=True)
    answers, calls = list[Any](), list[Any]()
    for asked in ({}, {"grammar": compiled(GRAMMARS["free"]), "gate": gate}):
        one = engine(slots=64)
        for seed in range(64):
            ask(one, str(seed), seed, 30, **asked)
        while len(one.engine.scheduler.running) < 64:
            one.step()
        with monkeypatch.context() as patch:
            patch.setattr(Grammars, "masks", lambda *given: calls.append(given))
            patch.setattr(Matcher, "__init__", lambda *given: calls.append(given))
            patch.setattr(CallThreads, "run", lambda threads, made, **options: calls.extend(made) or [])
            while len(one.engine.scheduler.running) == 64:
                one.step()
                assert len(one.engine.in_flight) == 2
            one.run()
        answers.append(([one.tokens(str(seed)) for seed in range(64)], one.engine.num_steps))
    assert not calls and answers[0] == answers[1]


def test_a_request_whose_window_has_moved_begins_again(engine: Callable[..., Harness]) -> None:
    """Rows that the token in question sees are gone, so that those behind cannot be taken back alone."""
    answers = []
    for lookahead in (0, 2):
        one = engine(windowed(vocab_size=SIZE), lookahead=lookahead, max_tokens=600)
        for seed in range(4):
            ask(one, str(seed), seed, 200, grammar=compiled(GRAMMARS["free"]), gate=GATES["again"])
        while one.engine.has_work:
            one.step()
            one.engine.scheduler.slide_windows()
        answers.append([one.tokens(str(seed)) for seed in range(4)])
        assert one.failures() == {} and bool(one.engine.scheduler.counts.preemptions) == bool(lookahead)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("harness", ["exact"], indirect=True)
@pytest.mark.parametrize(
    "policy",
    ["h2o:budget=20,recent=10,every=4", pytest.param("streaming_llm:window=20,every=3", marks=pytest.mark.nightly)],
)
def test_gated_answers_of_which_rows_are_dropped_are_the_same(engine: Callable[..., Harness], policy: str) -> None:
    answers = []
    for lookahead in (0, 2):
        one = engine(lookahead=lookahead)
        answers.append(ask_all(one, kv_policy=policy))
        assert any(isinstance(each, Compacted) for each in one.sent)
    assert answers[0] == answers[1]


# a tokenizer of a model


@functools.cache
def real(model_dir: Path) -> Vocabulary:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return Vocabulary.load(model_dir, len(tokenizer), [int(tokenizer.eos_token_id)])


def test_a_trigger_is_found_wherever_its_tokens_are_cut(smollm2: Path, engine: Callable[..., Harness]) -> None:
    """It is a part of what the free answer says, from any byte to any other."""
    words, model = real(smollm2), tiny_model(vocab_size=real(smollm2).size)
    eos_ids = frozenset(words.info.stop_token_ids)
    one = engine(model, vocabulary=lambda: words, eos_ids=eos_ids, slots=32)
    one.ask("free", words.rust.encode("Once").ids, 12)
    one.run()
    free = one.tokens("free")
    spelled = b"".join(words.token_bytes[token] for token in free)
    assert spelled.isascii()
    texts = {spelled[start : start + 2 + start % 7].decode() for start in range(8, 26, 3)}
    asked = {text: Gate(triggers=(text,), repeats=bool(len(text) % 2)) for text in texts}
    compilation = Compilation(words)
    sources = {text: f'root ::= {quoted(text)} [ -~]* "</>"' for text in texts}
    data = {text: compilation.compile("ebnf", source) for text, source in sources.items()}
    for text, gate in asked.items():
        one.ask(text, words.rust.encode("Once").ids, 24, grammar=data[text], gate=gate)
    one.run()
    assert one.failures() == {}
    for text, gate in asked.items():
        num_free, num_begun = assert_follows(one, text, gate, words, data[text])
        assert num_begun and one.tokens(text)[:num_free] == free[:num_free]
