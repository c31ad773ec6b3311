"""Small random models of every family give transformers' own tokens: by our decoder, and by its own code over our cache."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedConfig,
)

from tests.engine.conftest import Harness, prompt_of
from tests.engine.decoder_models import FAMILIES, model_of, small
from vmmkv import KVCache, KVLayout, Pool
from vmmkv.server.config import ServeConfig
from vmmkv.server.engine import scheduler
from vmmkv.server.engine.attention import SlotRows
from vmmkv.server.engine.loading import ModelSource, load
from vmmkv.server.engine.models.decoder import DecoderModel
from vmmkv.server.engine.models.transformers import UnmodifiedModel
from vmmkv.server.protocol import Failed, Generate, Message, Outputs

SMOLLM2 = {
    "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip
"""The shape of SmolLM2-135M, an eighth as wide."""

MODELS: dict[str, Callable[[], PreTrainedConfig]] = FAMILIES | {
    "smollm2": lambda: small(LlamaConfig, **SMOLLM2),
    "mistral, window of 16": lambda: small(MistralConfig, head_dim=32, sliding_window=16),
}
LENGTHS = (1, 2, 15, 16, 17, 63, 130)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "transformers"])
@pytest.mark.parametrize("step_tokens", [11, 4096])
@pytest.mark.parametrize("family", MODELS)
def test_tokens_are_those_of_transformers(harness: Callable[..., Harness], family: str, step_tokens: int, ours: bool) -> None:
    one = harness(model_of(MODELS[family]()), ours=ours, step_tokens=step_tokens)
    assert isinstance(one.runner.model, DecoderModel if ours else UnmodifiedModel)
    prompts = {str(length): prompt_of(length, length) for length in LENGTHS}
    for name, prompt in prompts.items():
        one.ask(name, prompt, 20)
    one.run()
    for name, prompt in prompts.items():
        assert one.tokens(name) == one.expected(prompt, 20), name
    assert len({tuple(one.tokens(name)) for name in prompts}) == len(prompts), "it does not say the same to all"


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "transformers"])
@pytest.mark.parametrize("family", ["llama 3 scaling", "mistral, window of 16", "qwen3"])
def test_and_with_what_is_shared(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch, family: str, ours: bool
) -> None:
    monkeypatch.setattr(scheduler, "_MIN_AWAITED", 2)  # so that so little is waited for
    one = harness(model_of(MODELS[family]()), ours=ours, step_tokens=50, share=True)
    shared = prompt_of(120)
    for index in range(4):
        one.ask(str(index), [*shared, *prompt_of(3 + index, index)], 20)
    one.run()
    for index in range(4):
        assert one.tokens(str(index)) == one.expected([*shared, *prompt_of(3 + index, index)], 20)
    assert sum(output.cached_tokens for output in one.outputs()) >= 3 * len(shared) - 3


OURS = ["llama", "llama 3 scaling", "mistral, window of 16", "qwen2, tied", "qwen3", "smollm2"]

OTHERS: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "gemma": (lambda: small(GemmaConfig, head_dim=16), "model_type is 'gemma'"),
    "gpt-neox": (lambda: small(GPTNeoXConfig, num_key_value_heads=4), "model_type is 'gpt_neox'"),
    "phi": (lambda: small(PhiConfig), "model_type is 'phi'"),
    "llama with another activation": (lambda: small(LlamaConfig, hidden_act="gelu"), "hidden_act is 'gelu'"),
    "llama of odd heads": (lambda: small(LlamaConfig, head_dim=20), "head_dim is 20"),
}


def source_of(config: PreTrainedConfig, directory: Path, **options: Any) -> ModelSource:
    """As the engine process finds it: of a directory with nothing but a configuration."""
    config.save_pretrained(directory)
    settings = ServeConfig(model=str(directory), load_format="dummy", device="cpu", **options)
    return ModelSource(settings, torch.device("cpu"), torch.float32)


def implementation(source: ModelSource) -> str:
    pool = Pool("cpu", 8 * 2**21)
    cache = KVCache(KVLayout.from_config(source.text_config, torch.float32), pool, slots=2, max_tokens=64)
    try:
        return source.over(cache, SlotRows(cache)).implementation
    finally:
        cache.close()
        pool.close()


@pytest.mark.parametrize("family", OURS)
def test_our_decoder_runs_what_it_knows(tmp_path: Path, family: str) -> None:
    assert implementation(source_of(MODELS[family](), tmp_path)) == "vmmkv"
    assert implementation(source_of(MODELS[family](), tmp_path, model_impl="vmmkv")) == "vmmkv"
    assert implementation(source_of(MODELS[family](), tmp_path, model_impl="transformers")) == "transformers"


@pytest.mark.parametrize("name", OTHERS)
def test_transformers_runs_the_others_and_it_is_said_why(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    make, reason = OTHERS[name]
    with caplog.at_level(logging.INFO, "vmmkv"):
        source = source_of(make(), tmp_path)
    assert implementation(source) == "transformers"
    assert "transformers' own code" in caplog.text and reason in caplog.text
    with pytest.raises(ValueError, match=r"model_impl='vmmkv' cannot run .* use 'auto'") as raised:
        source_of(make(), tmp_path, model_impl="vmmkv")
    assert reason in str(raised.value)


@pytest.mark.parametrize("name", [*OURS, "gemma", "gpt-neox", "phi"])
def test_an_engine_over_a_directory_says_which_it_is_and_answers(tmp_path: Path, name: str) -> None:
    config = OTHERS[name][0]() if name in OTHERS else MODELS[name]()
    config.save_pretrained(tmp_path)
    sent: list[Message] = []
    settings = ServeConfig(
        model=str(tmp_path), load_format="dummy", device="cpu", max_num_seqs=4, max_tokens=128, kv_budget_bytes=32 * 2**21
    )
    loaded = load(settings, sent.append)
    assert loaded.ready.implementation == ("transformers" if name in OTHERS else "vmmkv")
    engine = loaded.engine
    for index in range(6):
        request = Generate(request_id=str(index), prompt=prompt_of(9 + index), max_new_tokens=5, ignore_eos=True)
        engine.receive(request)
    while engine.has_work:
        engine.step()
    engine.cache.check()
    assert not [message for message in sent if isinstance(message, Failed)]
    outputs = [output for message in sent if isinstance(message, Outputs) for output in message.outputs]
    assert sum(len(output.token_ids) for output in outputs) == 6 * 5
    pool = engine.cache.pool
    engine.cache.close()
    pool.close()


def test_a_model_that_nobody_can_run_is_refused(tmp_path: Path) -> None:
    config = small(Gemma2Config, head_dim=16, attn_logit_softcapping=50.0)
    config.save_pretrained(tmp_path)
    settings = ServeConfig(model=str(tmp_path), load_format="dummy", device="cpu", max_num_seqs=4, max_tokens=128)
    with pytest.raises(ValueError, match="softcap"):
        load(dataclasses.replace(settings, kv_budget_bytes=32 * 2**21), lambda message: None)


def test_the_engines_attention_takes_nobody_elses_name() -> None:
    """transformers keeps such functions by name, for the whole process."""
    from vmmkv.adapters.transformers import attention
    from vmmkv.server.engine.models import transformers

    assert transformers.NAME != attention.NAME
