"""Grammars for engines with a tiny model, whose tokens are bytes."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.conftest import Harness, tiny_model
from tests.server.tiny import byte_tokenizer, token_ids
from vmmkv_server.engine import runner
from vmmkv_server.structured_output.compiler import Compilation
from vmmkv_server.structured_output.matcher import Vocabulary
from vmmkv_server.structured_output.schema import Grammar, of_schema

SIZE = 263
"""Of the model's logits: more than the tokenizer has."""
BIAS = dict.fromkeys(token_ids('"]}'), 4.0)
"""So that strings and lists of a model that knows nothing end."""


@functools.cache
def vocabulary() -> Vocabulary:
    tokenizer = byte_tokenizer()
    return Vocabulary(tokenizer, SIZE, [int(tokenizer.eos_token_id)])


@functools.cache
def compiled(grammar: Grammar) -> bytes:
    return Compilation(vocabulary()).compile(grammar.kind, grammar.source)


def of(schema: Any) -> bytes:
    return compiled(of_schema(schema))


def following(harness: Callable[..., Harness], model: Any = None, **options: Any) -> Harness:
    """An engine that follows grammars."""
    model = tiny_model(vocab_size=SIZE) if model is None else model
    eos_ids = frozenset([int(byte_tokenizer().eos_token_id)])
    return harness(model, eos_ids=eos_ids, vocabulary=vocabulary, **{"ours": True, **options})


def text(one: Harness, name: str) -> str:
    return str(vocabulary().rust.decode(one.tokens(name)))


def assert_logprobs_are_the_models_own(one: Harness, name: str, prompt: list[int], within: float) -> None:
    """Of the tokens that were answered, by transformers, with no grammar."""
    ids = torch.tensor([[*prompt, *one.tokens(name)]], device=one.cache.device)
    with one.by_transformers(), torch.no_grad():
        own_TV = torch.log_softmax(one.model(ids).logits[0, len(prompt) - 1 : -1].float(), dim=-1)
    own_T = own_TV.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
    ours = one.logprobs(name)[: len(own_T)]
    assert len(ours) == len(own_T) > 0
    assert max(abs(a - b) for a, b in zip(ours, own_T, strict=True)) < within


def masked_in_place(one: Harness, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each mask of a decode step from now on: is it applied to the very logits that the forward half has written?"""
    in_place: list[bool] = []
    written: list[torch.Tensor] = []
    forward, apply_masks = one.runner.forward, runner.apply_masks

    def remembered(*arguments: Any) -> runner.Forwarded:
        step = forward(*arguments)
        written[:] = [step.logits_RV]
        return step

    def looked_at(logits_BV: torch.Tensor, *arguments: Any) -> None:
        in_place.append(bool(written) and logits_BV.data_ptr() == written[0].data_ptr())
        apply_masks(logits_BV, *arguments)

    monkeypatch.setattr(one.runner, "forward", remembered)
    monkeypatch.setattr(runner, "apply_masks", looked_at)
    return in_place


def assert_free_and_bound_answers_are_right(one: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without penalties and log-probabilities: masks are applied in place, and only to the rows that follow a grammar."""
    in_place = masked_in_place(one, monkeypatch)
    for seed in range(3):
        one.ask(f"bound {seed}", token_ids("?"), 60, grammar=compiled(Grammar("regex", "[ab]{20}")), temperature=1.0, seed=seed)
    one.ask("free", token_ids("free"), 60, ignore_eos=True)
    one.run()
    assert one.failures() == {}
    assert all(re.fullmatch("[ab]{20}", text(one, f"bound {seed}").removesuffix("<|im_end|>")) for seed in range(3))
    assert one.tokens("free") == one.expected(token_ids("free"), 60)
    assert sum(in_place) >= 15
