"""The engine on a GPU: greedy tokens are those of transformers on the same GPU, and memory comes back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.conftest import VOCABULARY, Harness, harness, prompt_of, tiny_model, wide_rows
from tests.engine.test_identity import asked_of
from tests.engine.test_transformers import RIGHT, assert_tokens_are_those_of_transformers
from vmmkv.units import MIB
from vmmkv_server import LLM, SamplingParams

__all__ = ["harness"]

DEVICE = "cuda:0"


@pytest.mark.parametrize("harness", ["exact"], indirect=True)  # a real model has ties that one rounding of a row decides
def test_eight_prompts_at_once_on_smollm2(smollm2: Path, harness: Callable[..., Harness]) -> None:
    model, prompts = asked_of(smollm2)
    one = harness(model, device=DEVICE)
    one.serve(prompts, 64)
    one.assert_expected(prompts, 64)


@pytest.mark.parametrize("name", RIGHT)
def test_unmodified_models(tmp_path: Path, name: str) -> None:
    assert_tokens_are_those_of_transformers(RIGHT[name](), tmp_path, DEVICE)


@pytest.mark.parametrize("step_tokens", [7, 4096])
def test_small_model(harness: Callable[..., Harness], step_tokens: int) -> None:
    one = harness(device=DEVICE, step_tokens=step_tokens)
    prompts = {str(length): prompt_of(length, length) for length in (1, 2, 63, 130, 2040)}
    one.serve(prompts, 20)
    one.assert_expected(prompts, 20)


def test_shared_prefixes_give_the_same_tokens(harness: Callable[..., Harness]) -> None:
    one = harness(device=DEVICE, share=True, step_tokens=4096)
    shared = prompt_of(3000)
    prompts = {str(own): [*shared[: 3000 - 177 * own], *prompt_of(5, own)] for own in range(8)}
    for _ in range(2):
        one.serve(prompts, 20)
        for name, prompt in prompts.items():
            assert one.tokens(name)[-20:] == one.expected(prompt, 20), name
    assert one.prefix is not None
    hits = one.prefix.stats().attached
    assert hits["alias"] > 0
    assert hits["adopt"] > 0


def test_no_end_comes_before_min_tokens(harness: Callable[..., Harness]) -> None:
    """Steps that withhold something, and then graphs again."""
    stops = list(range(0, VOCABULARY, 2))
    one = harness(device=DEVICE, ours=True, capture=True)
    for index in range(3):
        options = {"min_tokens": 10 * (1 + index), "stop_token_ids": stops, "temperature": 1.0, "seed": index}
        one.ask(str(index), prompt_of(20, index), 60, **options)
    one.ask("plain", prompt_of(20), 60)
    one.run()
    for index in range(3):
        tokens = one.tokens(str(index))
        assert 10 * (1 + index) <= len(tokens) < 60 and not set(stops) & set(tokens)
    assert one.tokens("plain") == one.expected(prompt_of(20), 60)


def test_llama_8b_attention_shapes(harness: Callable[..., Harness]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=8192,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    one = harness(LlamaForCausalLM(config).eval(), device=DEVICE, step_tokens=1024, budget_pages=256)
    prompts = {str(length): prompt_of(length, length) for length in (17, 1000, 3000)}
    one.serve(prompts, 20)
    one.assert_expected(prompts, 20)


def test_the_newest_is_preempted_and_computed_again(harness: Callable[..., Harness]) -> None:
    one = harness(tiny_model(), device=DEVICE, budget_pages=2, step_tokens=8192)
    prompts = {"a": prompt_of(2030, 1), "b": prompt_of(2030, 2)}
    one.serve(prompts, 40)
    assert one.engine.scheduler.counts.preemptions >= 1
    one.assert_expected(prompts, 40)


def test_what_steps_take_is_kept_from_the_budget(tmp_path: Path) -> None:
    """An engine without a budget takes what is left for rows: the longest steps and the graphs have their memory by then."""
    sizes: dict[str, Any] = {"vocab_size": 128_000, "intermediate_size": 28_672, "num_hidden_layers": 1}
    wide_rows(**sizes).to(torch.bfloat16).save_pretrained(tmp_path)
    others_bytes = torch.cuda.memory_allocated(DEVICE)
    with LLM(tmp_path, device=DEVICE, max_num_seqs=32) as one:
        kept_bytes, live_bytes = torch.cuda.memory_reserved(DEVICE), torch.cuda.memory_allocated(DEVICE) - others_bytes
        assert live_bytes < 128 * MIB, "the logits of 32 rows take 8 MiB, by 30 graphs"
        prompts = [prompt_of(count) for count in (8000, 5000, 3000)]
        for completion in one.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)):
            assert completion.outputs[0].finish_reason == "length"
        step_bytes = 8192 * 28_672 * 3 * 2
        assert torch.cuda.memory_reserved(DEVICE) - kept_bytes < step_bytes // 4
