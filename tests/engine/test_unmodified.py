"""Of transformers' causal models as they are: those that the engine runs give that library's tokens, the others are refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    DogeConfig,
    LlamaConfig,
    MixtralConfig,
    MoshiConfig,
    OlmoeConfig,
    PhimoeConfig,
    PreTrainedConfig,
)

from tests.engine.conftest import prompt_of
from tests.engine.decoder_models import model_of, small
from vmmkv import MIB
from vmmkv.server import Engine, SamplingParams

EXPERTS: dict[str, Any] = {"num_hidden_layers": 2, "num_experts_per_tok": 2}
"""Of models that choose some of their experts for each token."""

RIGHT: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: small(MixtralConfig, num_local_experts=4, **EXPERTS),
    "olmoe": lambda: small(OlmoeConfig, num_experts=4, **EXPERTS),
    "bert, a decoder": lambda: small(BertConfig, num_key_value_heads=4, is_decoder=True),
    "phimoe, a window in its mask alone": lambda: small(PhimoeConfig, num_local_experts=4, sliding_window=16, **EXPERTS),
}
REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "bert, an encoder": (
        lambda: small(BertConfig, num_key_value_heads=4),
        "asks for attention to later tokens too (is it an encoder?)",
    ),
    "doge, biases in its mask": (lambda: small(DogeConfig), "DogeAttention asks for a mask of its own"),
    "llama, made an encoder": (lambda: small(LlamaConfig, is_causal=False), "asks for attention to later tokens too"),
    "moshi, a window for one attention only": (
        lambda: small(MoshiConfig, head_dim=16, ffn_dim=96, num_hidden_layers=2, sliding_window=16),
        "MoshiAttention attends to all rows in layer 0, where the configuration says the last 16 rows",
    ),
}
LENGTHS = (1, 7, 50)
NUM_NEW = 12


@contextmanager
def engine_of(directory: Path, **options: Any) -> Iterator[Engine]:
    with Engine(
        directory, **{"device": "cpu", "max_num_seqs": 4, "max_tokens": 128, "kv_budget_bytes": 64 * MIB} | options
    ) as one:
        yield one


@pytest.mark.parametrize("name", RIGHT)
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = model_of(RIGHT[name]())
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    prompts = [prompt_of(length, length) for length in LENGTHS]
    with engine_of(tmp_path) as engine:
        assert engine.ready.implementation == "transformers"
        completions = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NUM_NEW))
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False)
        assert completion.outputs[0].token_ids == expected[0, len(prompt) :].tolist(), len(prompt)


def test_a_window_in_the_mask_alone_gives_back_the_rows_before_it(tmp_path: Path) -> None:
    """Rows of 16 KiB, so that pages are passed within the test: what read from row 0 met memory that was no longer mapped."""
    config = small(
        PhimoeConfig, hidden_size=512, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16,
        num_local_experts=2, sliding_window=16,
    )  # fmt: skip
    model = model_of(config)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    prompt = prompt_of(290)
    with engine_of(tmp_path, max_tokens=400, max_num_batched_tokens=32) as engine:
        (completion,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=NUM_NEW))
    ids = torch.tensor([prompt])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False)
    assert completion.outputs[0].token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", REFUSED)
def test_the_others_are_refused_and_it_is_said_why(tmp_path: Path, name: str) -> None:
    make, reason = REFUSED[name]
    make().save_pretrained(tmp_path)
    with pytest.raises(ValueError) as raised, engine_of(tmp_path, load_format="dummy"):
        pass
    assert reason in str(raised.value)
