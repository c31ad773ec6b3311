"""The decoder is transformers' model, tensor by tensor: small random ones of each family, in float32 on a CPU."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.engine.decoder_models import FAMILIES, LINEAR, LLAMA3, VOCABULARY, YARN, PlainAttention, model_of, small
from vmmkv import KVLayout
from vmmkv.server.engine.models.decoder import Decoder, DecoderConfig, Unsupported, empty, param_bytes, step_bytes
from vmmkv.server.engine.models.weights import load

CPU = torch.device("cpu")


def decoder_of(model: PreTrainedModel, **options: Any) -> Decoder:
    """The same tensors, without a way through files."""
    config = DecoderConfig.of(model.config)
    weights = empty(config, CPU, model.dtype)
    tensors = model.state_dict()
    for name, place in weights.named(config).items():
        place.copy_(tensors[name])
    return Decoder(config, weights, **options)


def ids_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_layer_gives_what_transformers_gives(family: str) -> None:
    model = model_of(FAMILIES[family]())
    decoder = decoder_of(model)
    ids_N = ids_of(40)
    theirs = model(ids_N[None], output_hidden_states=True)
    for depth in range(decoder.config.num_layers + 1):
        attention = PlainAttention(decoder.config)
        attention.runs = [("a", len(ids_N))]
        cut = Decoder(decoder.config, replace(decoder.weights, layers=decoder.weights.layers[:depth]))
        last = depth == decoder.config.num_layers
        wanted = theirs.hidden_states[depth][0] if last else model.model.norm(theirs.hidden_states[depth][0])
        hidden_NE = cut.forward(ids_N, attention)
        torch.testing.assert_close(hidden_NE, wanted, rtol=1e-5, atol=2e-6, msg=lambda text, at=depth: f"layer {at}: {text}")
    torch.testing.assert_close(decoder.logits(hidden_NE), theirs.logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_prefill_in_chunks_then_decode_gives_the_same_tokens(family: str) -> None:
    """Two sequences side by side, the second of which begins when the first is half done."""
    model = model_of(FAMILIES[family]())
    decoder = decoder_of(model)
    attention = PlainAttention(decoder.config)
    prompts = {"a": ids_of(21, 1), "b": ids_of(13, 2)}
    attention.runs = [("a", 15)]
    decoder.forward(prompts["a"][:15], attention, torch.tensor([14]))
    attention.runs = [("b", 13), ("a", 6)]
    hidden_BE = decoder.forward(torch.cat([prompts["b"], prompts["a"][15:]]), attention, torch.tensor([12, 18]))
    attention.runs = [("b", 1), ("a", 1)]
    answers = []
    for _ in range(12):
        ids_B = decoder.logits(hidden_BE).argmax(-1)
        answers.append(ids_B)
        hidden_BE = decoder.forward(ids_B.int(), attention)
    ours = dict(zip("ba", torch.stack(answers, dim=1).tolist(), strict=True))
    for name, prompt in prompts.items():
        theirs = model.generate(prompt[None], attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, do_sample=False)
        assert ours[name] == theirs[0, len(prompt) :].tolist(), name


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_half_precision_is_as_close_as_transformers_is(family: str) -> None:
    """At most twice the error that transformers' own bfloat16 has against its float32."""
    exact = model_of(FAMILIES[family]())
    ids_N = ids_of(40)
    truth_NV = exact(ids_N[None]).logits[0]
    model = exact.bfloat16()
    decoder = decoder_of(model)
    attention = PlainAttention(decoder.config)
    attention.runs = [("a", len(ids_N))]
    logits_NV = decoder.logits(decoder.forward(ids_N, attention))
    assert logits_NV.dtype == torch.bfloat16
    their_error = (model(ids_N[None]).logits[0].float() - truth_NV).pow(2).mean().sqrt()
    our_error = (logits_NV.float() - truth_NV).pow(2).mean().sqrt()
    assert our_error <= 2 * their_error


@torch.no_grad()
def test_only_the_rows_asked_for_are_returned() -> None:
    decoder = decoder_of(model_of(FAMILIES["llama"]()))
    ids_N = ids_of(30)
    attention = PlainAttention(decoder.config)
    attention.runs = [("a", 10), ("b", 20)]
    all_NE = decoder.forward(ids_N, attention)
    attention.rows.clear()
    some_BE = decoder.forward(ids_N.int(), attention, torch.tensor([9, 29], dtype=torch.int32))
    torch.testing.assert_close(some_BE, all_NE[[9, 29]], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU its own tests run the kernels")
@pytest.mark.parametrize(
    ("kind", "options"), [(LlamaConfig, {"attention_bias": True, "mlp_bias": True}), (Qwen3Config, {"head_dim": 16})]
)
@torch.no_grad()
def test_the_kernels_give_what_torch_gives(kind: type[PreTrainedConfig], options: dict[str, Any]) -> None:
    """Twenty tokens, of which two are kept in the last layer; seventeen; one: as the kernels do many and few."""
    from vmmkv.server.engine.models.kernel_ops import KernelOps

    config = small(kind, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, **options)
    model = model_of(config)
    by_torch, by_kernels = decoder_of(model), decoder_of(model, ops=KernelOps())
    theirs, ours = PlainAttention(by_torch.config), PlainAttention(by_torch.config)
    last_B: torch.Tensor | None
    for runs, last_B in (([("a", 8), ("b", 12)], torch.tensor([7, 19])), ([("b", 17)], None), ([("a", 1)], None)):
        ids_N = ids_of(sum(count for _, count in runs))
        theirs.runs = ours.runs = runs
        wanted_BE = by_torch.forward(ids_N, theirs, last_B)
        hidden_BE = by_kernels.forward(ids_N, ours, last_B)
        torch.testing.assert_close(hidden_BE, wanted_BE, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(by_kernels.logits(hidden_BE), by_torch.logits(wanted_BE), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_smollm2_gives_the_logits_of_transformers(smollm2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    config = DecoderConfig.of(model.config)
    decoder = Decoder(config, load(smollm2, config, CPU, torch.float32))
    ids_N = torch.arange(1000, 1064)
    attention = PlainAttention(config)
    attention.runs = [("a", len(ids_N))]
    ours, theirs = decoder.logits(decoder.forward(ids_N, attention)), model(ids_N[None]).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, LINEAR, YARN | {"attention_factor": 1.5}])
def test_angles_are_those_of_transformers_bit_for_bit(scaling: dict[str, Any] | None) -> None:
    config = small(LlamaConfig, head_dim=48, rope_parameters=None if scaling is None else dict(scaling))
    cos_TR, sin_TR = DecoderConfig.of(config).rope.tables(512, CPU)
    cos_1TD, sin_1TD = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(512)[None])
    assert torch.equal(cos_TR, cos_1TD[0, :, :24]) and torch.equal(sin_TR, sin_1TD[0, :, :24])
    assert torch.equal(cos_TR, cos_1TD[0, :, 24:]) and torch.equal(sin_TR, sin_1TD[0, :, 24:])


def test_windows_are_by_layer() -> None:
    assert DecoderConfig.of(small(LlamaConfig)).windows == (None, None, None)
    assert DecoderConfig.of(small(MistralConfig, sliding_window=7)).windows == (7, 7, 7)
    assert DecoderConfig.of(small(Qwen2Config, sliding_window=7)).windows == (None, None, None)
    qwen3 = small(Qwen3Config, use_sliding_window=True, sliding_window=7, max_window_layers=2)
    assert DecoderConfig.of(qwen3).windows == (None, None, 7)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_has_the_same_windows(family: str) -> None:
    config = FAMILIES[family]()
    layout = KVLayout.from_config(config, torch.float32)
    windows = tuple(layout.groups[layout.group_of[layer]].window for layer in range(config.num_hidden_layers))
    assert windows == DecoderConfig.of(config).windows


LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
QWEN3_600M = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(("shape", "num_params"), [(LLAMA_8B, 8_030_261_248), (QWEN3_600M, 596_049_920)])
def test_bytes_are_those_of_the_real_models(shape: dict[str, Any], num_params: int) -> None:
    config = DecoderConfig.of(AutoConfig.for_model(**shape))
    assert param_bytes(config, torch.bfloat16) == 2 * num_params
    unread = 0 if config.tied else config.vocab_size * config.hidden_size
    assert step_bytes(config, torch.bfloat16) == 2 * (num_params - unread)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"intermediate_size": 100}, "intermediate_size is 100; wanted a multiple of 8"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; wanted 'silu'"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2; wanted 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}}, "a part of each head"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "known are the types default, linear",
        ),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping is 30.0, and what that means .* not known"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "wanted LlamaForCausalLM"),
    ],
)
def test_what_would_change_the_computation_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        DecoderConfig.of(small(LlamaConfig, **changes))


@pytest.mark.parametrize("model_type", ["gemma2", "mixtral", "phi3", "gpt2", "qwen3_moe", "olmo2", "cohere", "granite"])
def test_other_architectures_are_refused(model_type: str) -> None:
    with pytest.raises(Unsupported, match=f"model_type is '{model_type}'; known are llama, mistral, qwen2, qwen3"):
        DecoderConfig.of(AutoConfig.for_model(model_type))


def test_what_changes_nothing_is_accepted() -> None:
    told = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}, "unk_token_id": 0}
    assert DecoderConfig.of(small(LlamaConfig, **told)) == DecoderConfig.of(small(LlamaConfig))
