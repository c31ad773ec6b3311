"""The engine on a GPU: greedy tokens are those of transformers on the same GPU, and memory comes back."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.engine.conftest import VOCABULARY, Harness, harness, prompt_of, smollm2, tiny_model
from tests.engine.test_identity import QUESTIONS

__all__ = ["harness", "smollm2"]

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def test_eight_prompts_at_once_on_smollm2(smollm2: Path, harness: Callable[..., Harness]) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    one = harness(model, device=DEVICE)
    prompts = {}
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompts[question] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        one.ask(question, prompts[question], 64)
    one.run()
    assert {question: one.tokens(question) for question in prompts} == {
        question: one.expected(prompt, 64) for question, prompt in prompts.items()
    }


@pytest.mark.parametrize("step_tokens", [7, 4096])
def test_small_model(harness: Callable[..., Harness], step_tokens: int) -> None:
    one = harness(device=DEVICE, step_tokens=step_tokens)
    prompts = {str(length): prompt_of(length, length) for length in (1, 2, 63, 130, 2040)}
    for name, prompt in prompts.items():
        one.ask(name, prompt, 20)
    one.run()
    for name, prompt in prompts.items():
        assert one.tokens(name) == one.expected(prompt, 20), name


def test_llama_8b_attention_shapes(harness: Callable[..., Harness]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=8192,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    one = harness(LlamaForCausalLM(config).eval(), device=DEVICE, step_tokens=1024, budget_pages=256)
    prompts = {str(length): prompt_of(length, length) for length in (17, 1000, 3000)}
    for name, prompt in prompts.items():
        one.ask(name, prompt, 20)
    one.run()
    for name, prompt in prompts.items():
        assert one.tokens(name) == one.expected(prompt, 20), name


def test_the_newest_gives_way_and_is_computed_again(harness: Callable[..., Harness]) -> None:
    one = harness(tiny_model(), device=DEVICE, budget_pages=2, step_tokens=8192)
    prompts = {"a": prompt_of(2030, 1), "b": prompt_of(2030, 2)}
    for name, prompt in prompts.items():
        one.ask(name, prompt, 40)
    one.run()
    assert one.engine._scheduler.num_preempted >= 1
    for name, prompt in prompts.items():
        assert one.tokens(name) == one.expected(prompt, 40), name
