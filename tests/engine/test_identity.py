"""Tokens are those of transformers' generate, in float32, and depend on the request alone: not on batch, step or preemption."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.engine.conftest import Harness, MakeHarness, prompt_of, tiny_model, windowed
from vmmkv_kernels.quantise import Kind
from vmmkv_server.engine import attention
from vmmkv_server.engine.models.transformers import TransformersModel

QUESTIONS = (
    "What is the capital of France, and which river runs through it?",
    "Hi, how are you today?",
    "2 + 2 =",
    "Name three colours of the rainbow and say why you like each of them.",
    "Write a haiku about the sea.",
    "Explain virtual memory in one sentence. " * 12,
    "Tell me a story about a fox and a hen.",
    "List the first ten prime numbers, then their squares.",
)


def asked_of(smollm2: Path) -> tuple[Any, dict[str, list[int]]]:
    """The model, whose answers run to their end, and the questions as its chat template has them."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    chat = AutoTokenizer.from_pretrained(smollm2).apply_chat_template
    asked = ([{"role": "user", "content": question}] for question in QUESTIONS)
    return model, {each[0]["content"]: chat(each, add_generation_prompt=True)["input_ids"] for each in asked}


@pytest.mark.nightly
@pytest.mark.parametrize("harness", ["exact"], indirect=True)  # a real model has ties that one rounding of a row decides
def test_eight_prompts_at_once_on_smollm2(smollm2: Path, harness: MakeHarness) -> None:
    model, prompts = asked_of(smollm2)
    assert len({len(prompt) for prompt in prompts.values()}) >= 6, "lengths should differ"
    one = harness(model)
    one.serve(prompts, 24)
    one.assert_expected(prompts, 24)


def test_queries_under_a_mask_are_attended_to_in_blocks(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES_BYTES", 2**20)
    one = harness(windowed(), step_tokens=300, budget_pages=40)
    prompt = prompt_of(500)
    assert one.said(prompt, 8) == one.expected(prompt, 8)


def test_a_layer_that_attends_twice_is_refused(harness: MakeHarness) -> None:
    one = harness()
    model = one.runner.model
    assert isinstance(model, TransformersModel)
    one.said(prompt_of(5), 1)
    model.check()
    attention = one.model.model.layers[0].self_attn
    attend = attention.forward
    attention.forward = lambda *given, **how: (attend(*given, **how), attend(*given, **how))[1]
    one.ask("twice", prompt_of(5), 1)
    one.step()
    with pytest.raises(ValueError, match=r"layers \[0\] .* \[2\] times"):
        model.check()


def test_models_of_one_process_run_side_by_side(harness: MakeHarness) -> None:
    """transformers has one attention function of a name in a process."""
    several = [harness(tiny_model(seed), ours=seed == 2) for seed in range(3)]
    for one in several:
        one.ask("a", prompt_of(20), 10)
    while any(one.engine.has_work for one in several):
        for one in several:
            one.step()
    answers = [one.tokens("a") for one in several]
    assert answers == [one.expected(prompt_of(20), 10) for one in several]
    assert answers[0] != answers[1]


PROMPT = prompt_of(100)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0, "seed": 7},
    "hot, of the likeliest": {"temperature": 1.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 2**63 - 1},
    "penalised": {
        "temperature": 0.9, "seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4,
        "logit_bias": {3: 2.0, 5: -100.0},
    },
}  # fmt: skip


@functools.cache
def model() -> LlamaForCausalLM:
    """A row of 16 KiB: 128 tokens fill a page."""
    return tiny_model(hidden_size=32, num_attention_heads=16, num_key_value_heads=16, head_dim=64, max_position_embeddings=1024)


@functools.cache
def alone(sampling: str, ours: bool, kv_kind: Kind | None) -> list[int]:
    """In an engine of its own, each step read at once."""
    one = Harness(model(), kv_kind=kv_kind, ours=ours, lookahead=0, slots=1, step_tokens=1024)
    tokens = one.said(PROMPT, 60, **SAMPLING[sampling])
    one.close()
    return tokens


NIGHTLY = ((True, False), (False, True), (False, False))


@pytest.mark.parametrize(
    ("ours", "share"), [(True, True), *(pytest.param(*each, marks=pytest.mark.nightly) for each in NIGHTLY)]
)
def test_in_a_batch_of_64(harness: MakeHarness, share: bool, ours: bool) -> None:
    """Beside others of all kinds, some of whose prompts begin as that one's does."""
    one = harness(model(), ours=ours, share=share, slots=64, step_tokens=300, budget_pages=160)
    wanted = {name: alone(name, ours, one.kv_kind) for name in SAMPLING}
    for index in range(60):
        prompt = [*PROMPT[: index % 40], *prompt_of(1 + index % 23, index)]
        options = list(SAMPLING.values())[index % 4] | {"seed": 100 + index, "logprobs": 0 if index % 5 == 0 else None}
        one.ask(str(index), prompt, 50 + 7 * index % 60, **options)
    for name, options in SAMPLING.items():
        one.ask(name, PROMPT, 60, **options)
    most = 0
    while one.engine.has_work:
        one.step()
        most = max(most, len(one.engine.scheduler.running))
    assert most == 64 and one.engine.scheduler.counts.preemptions == 0
    assert {name: one.tokens(name) for name in SAMPLING} == wanted
