"""Until an answer has `min_tokens`, what would end it cannot be sampled; else it is the answer that it was."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.engine.conftest import VOCABULARY, Harness, MakeHarness, prompt_of

PROMPT = prompt_of(30)
SAMPLED = {"temperature": 1.2, "seed": 5}


def ends_of(harness: MakeHarness, count: int = 3, **options: Any) -> tuple[list[int], frozenset[int]]:
    """What is answered when nothing ends it, and some tokens that come early in it."""
    tokens = harness().said(PROMPT, 24, **options)
    return tokens, frozenset(tokens[1 : 1 + count])


def greedy(one: Harness, prompt: list[int], count: int, withheld: frozenset[int], min_tokens: int) -> list[int]:
    """By transformers, with its own attention: the likeliest tokens, of all but the withheld ones at first; up to an end."""
    answer: list[int] = []
    with torch.inference_mode(), one.by_transformers():
        while len(answer) < count:
            logits_V = one.model(torch.tensor([prompt + answer])).logits[0, -1]
            if len(answer) < min_tokens:
                logits_V[list(withheld)] = -torch.inf
            token = int(logits_V.argmax())
            if token in withheld:
                break
            answer.append(token)
    return answer


@pytest.mark.parametrize(("ours", "lookahead"), [(False, 0), (True, 2)])
@pytest.mark.parametrize("min_tokens", [1, 9])
def test_no_end_comes_before_and_all_else_stays(harness: MakeHarness, ours: bool, lookahead: int, min_tokens: int) -> None:
    _, ends = ends_of(harness)
    one = harness(ours=ours, lookahead=lookahead, eos_ids=ends, step_tokens=16)
    expected = greedy(one, PROMPT, 20, ends, min_tokens)
    assert len(expected) >= min_tokens
    assert one.said(PROMPT, 20, min_tokens=min_tokens) == expected
    one.ask("beside", PROMPT, 20, min_tokens=min_tokens)
    one.ask("penalised", PROMPT, 20, frequency_penalty=1.0, logit_bias={7: 2.0})
    one.ask("none", PROMPT, 20)
    one.ask("sampled", PROMPT, 20, min_tokens=20, **SAMPLED)
    one.run()
    assert one.tokens("beside") == expected
    assert one.tokens("none") == greedy(one, PROMPT, 20, ends, 0), "without min_tokens it ends as before"
    assert len(one.tokens("sampled")) == 20 and not ends & set(one.tokens("sampled"))


@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_an_answer_without_ends_is_the_same(harness: MakeHarness, options: dict[str, Any]) -> None:
    tokens, _ = ends_of(harness, **options)
    strangers = sorted(set(range(VOCABULARY)) - set(tokens))[:40]
    one = harness(ours=True, eos_ids=frozenset(strangers[:10]))
    assert one.said(PROMPT, 24, min_tokens=24, stop_token_ids=strangers[10:], **options) == tokens
    assert one.finish_reasons("alone")[-1] == "length"


@pytest.mark.parametrize("way", ["eos", "stop_token_ids", "ignore_eos", "bias"])
def test_every_kind_of_end_is_withheld(harness: MakeHarness, way: str) -> None:
    _, ends = ends_of(harness)
    one = harness(ours=True, eos_ids=ends if way != "stop_token_ids" else frozenset())
    options: dict[str, Any] = {
        "eos": {}, "stop_token_ids": {"stop_token_ids": sorted(ends)}, "ignore_eos": {"ignore_eos": True},
        "bias": {"logit_bias": dict.fromkeys(ends, 100.0)},
    }  # fmt: skip
    tokens = one.said(PROMPT, 12, min_tokens=8, **options[way])
    assert len(tokens) >= 8 and not ends & set(tokens[:8])
    if way == "bias":
        assert len(tokens) == 8 and one.finish_reasons("alone")[-1] == "stop", "it is forced as soon as it may come"


def test_a_slot_forgets_the_suppressed_ids_of_its_last_request(harness: MakeHarness) -> None:
    biased = {"logit_bias": {VOCABULARY - 1: -1.0}}  # whose logits are changed at each step
    tokens, ends = ends_of(harness, **biased)
    one = harness(slots=1, ours=True)
    one.ask("first", PROMPT, 12, min_tokens=12, stop_token_ids=sorted(ends))
    one.ask("second", PROMPT, 12, **biased)
    one.ask("third", PROMPT, 12, min_tokens=3, stop_token_ids=[VOCABULARY - 1, *range(40, 50)])
    one.run()
    assert len(one.tokens("third")) >= 3
    assert one.tokens("second") == tokens[:12] != one.tokens("first")


def test_a_batch_that_has_what_it_asked_for_decodes_as_any(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only steps that withhold something copy their logits."""
    one = harness(ours=True, lookahead=2)
    adjust = Mock(wraps=one.runner.sampler.adjust)
    monkeypatch.setattr(one.runner.sampler, "adjust", adjust)
    tokens = one.said(PROMPT, 40, min_tokens=10, stop_token_ids=[VOCABULARY - 1], ignore_eos=True)
    assert len(tokens) == 40 and adjust.call_count == 10
