"""The engine's greedy tokens are those of transformers' own generate with DynamicCache, in float32."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.engine.conftest import VOCABULARY, Harness, prompt_of, tiny_model
from vmmkv.server.engine.models.transformers import UnmodifiedModel

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


def test_eight_prompts_at_once_on_smollm2(smollm2: Path, harness: Callable[..., Harness]) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # so that all run to the end
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    one = harness(model)
    prompts = {
        question: tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)[
            "input_ids"
        ]
        for question in QUESTIONS
    }
    assert len({len(prompt) for prompt in prompts.values()}) >= 6, "lengths should differ"
    for question, prompt in prompts.items():
        one.ask(question, prompt, 24)
    one.run()
    assert {question: one.tokens(question) for question in prompts} == {
        question: one.expected(prompt, 24) for question, prompt in prompts.items()
    }


@pytest.mark.parametrize("step_tokens", [7, 64, 4096])
def test_whatever_the_size_of_a_step(harness: Callable[..., Harness], step_tokens: int) -> None:
    one = harness(step_tokens=step_tokens)
    prompts = {str(length): prompt_of(length, length) for length in (1, 2, 63, 130)}
    for name, prompt in prompts.items():
        one.ask(name, prompt)
    one.run()
    for name, prompt in prompts.items():
        assert one.tokens(name) == one.expected(prompt), name


def test_across_page_borders(harness: Callable[..., Harness]) -> None:
    one = harness(step_tokens=4096)
    prompt = prompt_of(2040)  # a page holds 2,048 rows
    one.ask("long", prompt, 16)
    one.run()
    assert one.tokens("long") == one.expected(prompt, 16)


def test_joining_and_leaving_changes_nobody(harness: Callable[..., Harness]) -> None:
    one = harness(slots=3)
    prompts = [prompt_of(5 + 7 * index, index) for index in range(7)]
    for index, prompt in enumerate(prompts):
        one.ask(str(index), prompt, 3 + 4 * index)
        one.engine.step()
    one.run()
    for index, prompt in enumerate(prompts):
        assert one.tokens(str(index)) == one.expected(prompt, 3 + 4 * index)


def test_sliding_window(harness: Callable[..., Harness]) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, sliding_window=16,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    one = harness(MistralForCausalLM(config).eval(), step_tokens=40)
    prompts = {str(length): prompt_of(length, length) for length in (3, 15, 16, 17, 100)}
    for name, prompt in prompts.items():
        one.ask(name, prompt, 20)
    one.run()
    for name, prompt in prompts.items():
        assert one.tokens(name) == one.expected(prompt, 20), name


def test_another_family_of_models(harness: Callable[..., Harness]) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=1, head_dim=80, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    one = harness(Qwen3ForCausalLM(config).eval())
    prompts = [prompt_of(length, length) for length in (4, 33)]
    for index, prompt in enumerate(prompts):
        one.ask(str(index), prompt)
    one.run()
    for index, prompt in enumerate(prompts):
        assert one.tokens(str(index)) == one.expected(prompt)


def test_a_long_prompt_under_a_window_is_attended_to_in_blocks(harness: Callable[..., Harness]) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, sliding_window=300,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    one = harness(MistralForCausalLM(config).eval(), step_tokens=700)
    prompt = prompt_of(1500)
    one.ask("long", prompt, 8)
    one.run()
    assert one.tokens("long") == one.expected(prompt, 8)
    assert one.cache.stats().mapped_bytes == 0


def test_models_that_attend_otherwise_are_refused(harness: Callable[..., Harness]) -> None:
    one = harness(tiny_model())
    model = one.runner.model
    assert isinstance(model, UnmodifiedModel)
    tensor = torch.zeros(1, 4, 1, 32)
    with pytest.raises(ValueError, match="softcap"):
        model.attend(torch.nn.Module(), tensor, tensor, tensor, None, softcap=50.0)
    one.ask("a", prompt_of(5), 1)
    one.run()
    model.check()
    model._calls[0] += 1  # as if a layer had attended twice
    with pytest.raises(ValueError, match=r"layers \[0\] .* \[2\] times"):
        model.check()


def test_models_of_one_process_run_side_by_side(harness: Callable[..., Harness]) -> None:
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


def test_models_with_an_attention_of_their_own_are_refused(harness: Callable[..., Harness]) -> None:
    config = GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_layers=2, num_heads=2, attention_types=[[["global"], 2]],
        max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with pytest.raises(ValueError, match="GPTNeoForCausalLM has an attention of its own"):
        harness(GPTNeoForCausalLM(config).eval())
