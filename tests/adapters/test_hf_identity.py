"""Token for token what transformers' own cache gives, in every way to generate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tests.adapters.hf_models import assert_same, deepseek, gemma3, gemma4, generated, llama, mistral, prompts, wide_llama
from vmmkv import Pool
from vmmkv.adapters.transformers import VmmCache

MODELS = {
    "grouped": llama,
    "multi-head": lambda: llama(num_key_value_heads=4),
    "multi-query": lambda: llama(num_key_value_heads=1),
    "pages of 32 tokens": wide_llama,
    "sliding": lambda: mistral(16),
    "sliding and full, head size 256": lambda: gemma3(16),
}

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "four beams": {"num_beams": 4},
    "three answers": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "chunks, then beams": {"prefill_chunk_size": 7, "num_beams": 3},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_are_those_of_transformers_own_cache(model: Any, pool: Pool, way: str) -> None:
    inputs = prompts(45)
    inputs["input_ids"][:, 20:40] = inputs["input_ids"][:, :20]  # so that prompt lookup finds something
    assert_same(model, pool, inputs, **WAYS[way])


def test_eight_prompts_padded_on_the_left(model: Any, pool: Pool) -> None:
    assert_same(model, pool, prompts(45, 3, 17, 40, 1, 29, 44, 8))


def test_beams_of_several_padded_prompts(model: Any, pool: Pool) -> None:
    assert_same(model, pool, prompts(37, 12, 25), num_beams=4, num_return_sequences=2)


@pytest.mark.parametrize("make", [deepseek, lambda: gemma4(16)], ids=["keys wider than values", "head sizes by window"])
def test_layers_of_other_shapes(pool: Pool, make: Any) -> None:
    model = make()
    assert_same(model, pool, prompts(40, 23))
    assert_same(model, pool, prompts(40), num_beams=3)


@pytest.mark.parametrize("name", ["grouped", "sliding and full, head size 256"])
def test_three_thousand_tokens_in_chunks(pool: Pool, name: str) -> None:
    assert_same(MODELS[name](), pool, prompts(3000), prefill_chunk_size=512, max_new_tokens=8)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_attention_reads_the_strided_views(pool: Pool, attention: str) -> None:
    for make in (llama, lambda: gemma3(16)):
        model = make()
        model.set_attn_implementation(attention)
        assert_same(model, pool, prompts(33, 20))


def test_half_precision_keeps_its_type(pool: Pool) -> None:
    assert_same(llama().to(torch.bfloat16), pool, prompts(33, 20))


def test_a_chat_goes_on_from_the_rows_of_the_last_turn(model: Any, pool: Pool) -> None:
    ours, own = VmmCache(model.config, pool), DynamicCache(config=model.config)
    with ours:
        ids = prompts(20)["input_ids"]
        for turn in range(3):
            mask = torch.ones_like(ids)
            answers = [generated(model, cache, {"input_ids": ids, "attention_mask": mask}) for cache in (ours, own)]
            assert answers[0] == answers[1]
            assert ours.get_seq_length() == own.get_seq_length() == len(answers[0][0]) - 1
            ids = torch.cat([torch.tensor(answers[0]), prompts(9, seed=turn)["input_ids"]], dim=1)
        ours.check()


def test_a_draft_models_tokens_are_taken_back(pool: Pool) -> None:
    draft = llama(num_hidden_layers=1)
    assert_same(gemma3(16), pool, prompts(30), assistant_model=draft)


def test_smollm2_in_every_way(smollm2: Path, pool: Pool) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    texts = ["The colours of the rainbow are red, orange,", "Once upon a time"]
    inputs = dict(tokenizer(texts, return_tensors="pt", padding=True))
    options = {"pad_token_id": tokenizer.pad_token_id, "max_new_tokens": 12}
    assert_same(model, pool, inputs, **options)
    assert_same(model, pool, inputs, num_beams=3, **options)
    first = {name: tensor[:1] for name, tensor in inputs.items()}
    assert_same(model, pool, first, prompt_lookup_num_tokens=3, **options)
    few = options | {"max_new_tokens": 6}
    for way in ({"num_beams": 4}, {"do_sample": True}, {"do_sample": True, "num_return_sequences": 3}):
        assert_same(model, pool, inputs, **few, **way)
    texts += [
        "Hello",
        "Water boils at",
        "She counted one, two, three,",
        "In",
        "The capital of France is",
        "A, B, C, D, E, F, G,",
    ]
    assert_same(model, pool, dict(tokenizer(texts, return_tensors="pt", padding=True)), **few)
