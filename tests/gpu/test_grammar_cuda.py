"""Answers by a grammar on a GPU: whole and valid, the same without jumps, and no other request touched."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from bench.schemas import SCHEMAS
from tests.engine.conftest import Harness, harness, prompt_of, tiny_model
from tests.server.tiny import token_ids
from tests.structured_output import gates
from tests.structured_output.grammars import (
    BIAS,
    assert_free_and_bound_answers_are_right,
    assert_logprobs_are_the_models_own,
    following,
    of,
    text,
)
from vmmkv_server.engine.features import grammars

__all__ = ["harness"]

DEVICE = "cuda:0"


@pytest.mark.parametrize("lookahead", [0, 2])
def test_every_answer_to_the_corpus_is_whole_at_temperature_1(harness: Callable[..., Harness], lookahead: int) -> None:
    one = following(harness, device=DEVICE, capture=True, slots=64, lookahead=lookahead)
    for index, (name, schema) in enumerate(SCHEMAS.items()):
        one.ask(name, token_ids(name), 1000, grammar=of(schema), temperature=1.0, seed=index, logit_bias=BIAS)
    one.run()
    assert one.failures() == {}
    for name in SCHEMAS:
        assert one.finish_reasons(name)[-1] == "stop", name
        json.loads(text(one, name))


def test_greedy_answers_are_the_same_with_what_is_forced_skipped(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, steps = [], []
    for jumps in (True, False):
        if not jumps:
            monkeypatch.setattr(grammars, "may_jump", lambda request: False)
        one = following(harness, device=DEVICE, capture=True, slots=8)
        for name in ("long keys", "tool call", "classification", "four deep", "constant", "address"):
            one.ask(name, token_ids(name), 300, grammar=of(SCHEMAS[name]), logit_bias=BIAS)
        one.run()
        assert one.failures() == {}
        answers.append({name: one.tokens(name) for name in SCHEMAS})
        steps.append(one.engine.num_steps)
    assert answers[0] == answers[1]
    assert steps[0] < steps[1]


@pytest.mark.parametrize("capture", [False, True])
def test_masks_in_the_logits_of_a_graph_touch_no_other_row(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch, capture: bool
) -> None:
    assert_free_and_bound_answers_are_right(following(harness, device=DEVICE, capture=capture, slots=6), monkeypatch)


def test_neighbours_of_a_grammar_are_as_alone_and_logprobs_are_the_models_own(
    harness: Callable[..., Harness],
) -> None:
    one = following(harness, device=DEVICE, capture=True, slots=6)
    one.ask("bound", token_ids("free"), 60, grammar=of(SCHEMAS["address"]), temperature=1.0, seed=1)
    one.ask("scored", token_ids("free"), 60, grammar=of(SCHEMAS["address"]), temperature=1.0, seed=2, logprobs=0)
    one.ask("free", token_ids("free"), 60, ignore_eos=True)
    one.run()
    assert one.tokens("free") == one.expected(token_ids("free"), 60)
    assert_logprobs_are_the_models_own(one, "scored", token_ids("free"), within=2e-3)


def sampled_by_graphs(one: Harness, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step from now on in which rows decode beside a prompt, and some are not greedy: is its token half a graph?"""
    by_graphs: list[bool] = []
    runner = one.runner
    forward, sample = runner.forward, runner.sample
    is_mixed = False

    def launched(step: Any) -> Any:
        nonlocal is_mixed
        is_mixed = len(step.slots) > 0 and len(step.chunks) > 0
        return forward(step)

    def sampled(forwarded: Any, masks: Any) -> Any:
        if is_mixed and not runner.sampler.is_greedy[forwarded.slots].all():
            by_graphs.append(forwarded.graph is not None)
        return sample(forwarded, masks)

    monkeypatch.setattr(runner, "forward", launched)
    monkeypatch.setattr(runner, "sample", sampled)
    monkeypatch.setattr(runner.mixed, "launch_s", float("inf"))  # a graph is never the slower one, whatever this machine takes
    return by_graphs


@pytest.mark.parametrize("bound", [False, True])
def test_mixed_steps_that_sample_by_graphs_give_the_tokens_of_those_that_do_not(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch, bound: bool
) -> None:
    said = []
    for capture in (True, False):
        one = following(harness, device=DEVICE, capture=capture, slots=8, step_tokens=64)
        by_graphs = sampled_by_graphs(one, monkeypatch)
        for index in range(6):  # the later ones are prompts of several chunks, beside those that decode
            options = ({"temperature": 1.0}, {"temperature": 0.7, "top_k": 40}, {"temperature": 1.3, "top_p": 0.8, "top_k": 90})
            grammar = {"grammar": of(SCHEMAS["address"])} if bound and index % 2 == 0 else {}
            one.ask(str(index), prompt_of(10 + 60 * index, index), 40, seed=index, **options[index % 3], **grammar)
            one.step()
        one.run()
        assert one.failures() == {}
        assert len(by_graphs) > 5 and set(by_graphs) == {capture}
        said.append({str(index): one.tokens(str(index)) for index in range(6)})
    assert said[0] == said[1]


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_grammar_begins_within_an_answer_where_its_gate_says(harness: Callable[..., Harness], lookahead: int) -> None:
    """Steps that were launched ahead have sampled what comes next without its masks."""
    options = {"eos_ids": frozenset([257]), "vocabulary": gates.vocabulary, "ours": True, "slots": 16}
    one = harness(tiny_model(vocab_size=gates.SIZE), device=DEVICE, capture=True, lookahead=lookahead, **options)
    gates.ask_all(one)
    for name, (gate, source, _) in gates.ASKED.items():
        gates.assert_follows(one, name, gate, gates.vocabulary(), gates.compiled(source))
