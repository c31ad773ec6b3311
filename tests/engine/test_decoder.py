"""The decoder is transformers' model, tensor by tensor: small random ones of each family, in float32 on a CPU."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.engine.conftest import decoder_of
from tests.engine.decoder_models import FAMILIES, LINEAR, LLAMA3, VOCABULARY, YARN, model_of, small
from vmmkv import MIB, KVCache, KVLayout, Pool
from vmmkv_server.engine.attention import AttentionMetadata, CachedAttention, KVRows
from vmmkv_server.engine.models.checkpoint import WeightsMismatch
from vmmkv_server.engine.models.decoder import Decoder, DecoderConfig, Stream, Unsupported, empty, head_part, joined
from vmmkv_server.engine.models.shard import Shard
from vmmkv_server.engine.models.weights import load, random

CPU = torch.device("cpu")


def ids_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


class Steps:
    """A decoder over a cache: each step is some more tokens of each of its sequences, which stand side by side."""

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        layout = KVLayout.uniform(
            layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim, windows=list(config.windows),
            dtype=decoder.weights.norm_E.dtype,
        )  # fmt: skip
        self.pool = Pool("cpu", 64 * MIB)
        cache = KVCache(layout, self.pool, slots=2, max_tokens=512)
        windows = {layer: window for layer, window in enumerate(config.windows) if window is not None}
        self.attention = CachedAttention(KVRows(cache), rope=config.rope.tables(512, CPU), windows=windows)
        self.decoder, self.sequences = decoder, [cache.open(), cache.open()]

    def __call__(self, ids_N: torch.Tensor, counts: list[int], last_B: torch.Tensor | None = None) -> torch.Tensor:
        """`counts` are the tokens of each sequence. Returns hidden states, as the decoder."""
        runs = [(sequence, count) for sequence, count in zip(self.sequences, counts, strict=True) if count]
        rows = [torch.arange(sequence.length, sequence.length + count) for sequence, count in runs]
        for sequence, count in runs:
            sequence.grow(sequence.length + count)
            sequence.advance(count)
        slots_B, counts_B = torch.tensor([sequence.slot for sequence, _ in runs]), torch.tensor([count for _, count in runs])
        step = AttentionMetadata(
            slots_N=slots_B.repeat_interleave(counts_B), rows_N=torch.cat(rows), slots_B=slots_B,
            lengths_B=torch.tensor([sequence.length for sequence, _ in runs]),
            query_starts=torch.cat([torch.zeros(1, dtype=torch.int64), counts_B.cumsum(0)]),
        )  # fmt: skip
        self.attention.begin(step)
        return self.decoder.forward(ids_N, self.attention, last_B)


@pytest.fixture
def steps_of() -> Iterator[Callable[[Decoder], Steps]]:
    """Makes steps, and closes their memory after the test."""
    made: list[Steps] = []

    def make(decoder: Decoder) -> Steps:
        made.append(Steps(decoder))
        return made[-1]

    yield make
    for one in made:
        one.pool.close()


MakeSteps = Callable[[Decoder], Steps]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_layer_gives_what_transformers_gives(family: str, steps_of: MakeSteps) -> None:
    model = model_of(FAMILIES[family]())
    decoder = decoder_of(model)
    ids_N = ids_of(40)
    theirs = model(ids_N[None], output_hidden_states=True)
    for depth in range(decoder.config.num_layers + 1):
        cut = Decoder(decoder.config, replace(decoder.weights, layers=decoder.weights.layers[:depth]))
        last = depth == decoder.config.num_layers
        wanted = theirs.hidden_states[depth][0] if last else model.model.norm(theirs.hidden_states[depth][0])
        hidden_NE = steps_of(cut)(ids_N, [40, 0])
        # Normed rows have a root mean square of 1, and sums are in another order: 1e-5 is 84 epsilons of float32.
        torch.testing.assert_close(hidden_NE, wanted, rtol=0, atol=1e-5, msg=lambda text, at=depth: f"layer {at}: {text}")
    torch.testing.assert_close(decoder.logits(hidden_NE), theirs.logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_half_precision_is_as_close_as_transformers_is(family: str, steps_of: MakeSteps) -> None:
    """At most twice the error that transformers' own bfloat16 has against its float32."""
    exact = model_of(FAMILIES[family]())
    ids_N = ids_of(40)
    truth_NV = exact(ids_N[None]).logits[0]
    model = exact.bfloat16()
    decoder = decoder_of(model)
    logits_NV = decoder.logits(steps_of(decoder)(ids_N, [40, 0]))
    assert logits_NV.dtype == torch.bfloat16
    their_error = (model(ids_N[None]).logits[0].float() - truth_NV).pow(2).mean().sqrt()
    our_error = (logits_NV.float() - truth_NV).pow(2).mean().sqrt()
    assert our_error <= 2 * their_error


@torch.no_grad()
def test_only_the_rows_asked_for_are_returned(steps_of: MakeSteps) -> None:
    decoder = decoder_of(model_of(FAMILIES["llama"]()))
    ids_N = ids_of(30)
    all_NE = steps_of(decoder)(ids_N, [10, 20])
    some_BE = steps_of(decoder)(ids_N.int(), [10, 20], torch.tensor([9, 29], dtype=torch.int32))
    torch.testing.assert_close(some_BE, all_NE[[9, 29]], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU its own tests run the kernels")
@pytest.mark.parametrize(
    ("kind", "options"), [(LlamaConfig, {"attention_bias": True, "mlp_bias": True}), (Qwen3Config, {"head_dim": 16})]
)
@torch.no_grad()
def test_the_kernels_give_what_torch_gives(kind: type[PreTrainedConfig], options: dict[str, Any], steps_of: MakeSteps) -> None:
    """Twenty tokens, of which two are kept in the last layer; seventeen; one: as the kernels do many and few."""
    config = small(kind, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, **options)
    model = model_of(config)
    by_torch, by_kernels = decoder_of(model), decoder_of(model, by_kernels=True)
    theirs, ours = steps_of(by_torch), steps_of(by_kernels)
    last_B: torch.Tensor | None
    for counts, last_B in (([8, 12], torch.tensor([7, 19])), ([0, 17], None), ([1, 0], None)):
        ids_N = ids_of(sum(counts))
        wanted_BE, hidden_BE = theirs(ids_N, counts, last_B), ours(ids_N, counts, last_B)
        torch.testing.assert_close(hidden_BE, wanted_BE, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(by_kernels.logits(hidden_BE), by_torch.logits(wanted_BE), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on GPUs tests/gpu/test_ranks_cuda.py has it")
@pytest.mark.parametrize("num_tokens", [1, 20])
@torch.no_grad()
def test_what_two_ranks_add_by_kernels_is_the_whole_and_the_stream_counts_once(num_tokens: int) -> None:
    from vmmkv_server.engine.models import kernel_ops

    x_NE, inputs_NI, weight_EI = torch.randn(num_tokens, 32), torch.randn(num_tokens, 48), torch.randn(32, 48)
    bias_E, norm_E = torch.randn(32), torch.ones(32)
    whole = Stream(x_NE.clone(), 1e-5)
    whole.add(inputs_NI, weight_EI, bias_E)
    parts: list[torch.Tensor] = []

    def sum_all(part: torch.Tensor) -> torch.Tensor:
        """The last rank's call has all parts."""
        parts.append(part.clone())
        return part.copy_(torch.stack(parts).sum(0))

    for rank in (1, 0):
        ranks: Any = Mock(rank=rank, sum=sum_all, symmetric=None)
        own = slice(24 * rank, 24 * rank + 24)
        bias = torch.zeros(32) if rank else bias_E  # as Shard has it
        stream = kernel_ops.stream(x_NE.clone(), 1e-5, ranks)
        stream.add(inputs_NI[:, own].contiguous(), weight_EI[:, own].contiguous(), bias)
        normed_NE = stream.normed(norm_E)
    torch.testing.assert_close(normed_NE, whole.normed(norm_E), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 9])
def test_logits_of_all_ranks_are_joined_to_those_of_all_tokens(num_ranks: int) -> None:
    for size in (1, 7, 258, 1000, 49_152):
        whole_BV = torch.arange(3 * size).view(3, size)
        parts = [whole_BV.narrow(1, *head_part(rank, num_ranks, size)) for rank in range(num_ranks)]
        assert torch.equal(joined(torch.stack(parts), size), whole_BV)


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, LINEAR, YARN | {"attention_factor": 1.5}])
def test_angles_are_those_of_transformers_bit_for_bit(scaling: dict[str, Any] | None) -> None:
    config = small(LlamaConfig, head_dim=48, rope_parameters=None if scaling is None else dict(scaling))
    cos_TR, sin_TR = DecoderConfig.of(config).rope.tables(512, CPU)
    cos_1TD, sin_1TD = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(512)[None])
    assert torch.equal(cos_TR, cos_1TD[0, :, :24]) and torch.equal(sin_TR, sin_1TD[0, :, :24])
    assert torch.equal(cos_TR, cos_1TD[0, :, 24:]) and torch.equal(sin_TR, sin_1TD[0, :, 24:])


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
def test_parameter_bytes_are_those_of_the_real_models(shape: dict[str, Any], num_params: int) -> None:
    config = DecoderConfig.of(AutoConfig.for_model(**shape))
    weights = empty(config, torch.device("meta"), torch.bfloat16).named(config)
    assert sum(weight.nbytes for weight in weights.values()) == 2 * num_params


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


def saved(directory: Path, family: str = "llama", shard_size: str = "5GB") -> DecoderConfig:
    model = model_of(FAMILIES[family]())
    model.save_pretrained(directory, max_shard_size=shard_size)
    return DecoderConfig.of(model.config)


def change(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a single file; dots are written as two underscores."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_saved_is_loaded(tmp_path: Path, family: str, shard_size: str) -> None:
    config = saved(tmp_path, family, shard_size)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_size == "60KB")
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load(tmp_path, Shard(config), CPU, dtype).named(config)
        assert loaded.keys() == stored.keys()
        for name, tensor in stored.items():
            assert torch.equal(loaded[name], tensor.to(dtype)), name


def test_tied_weights_that_were_saved_twice_or_under_the_other_name_are_one_tensor(tmp_path: Path) -> None:
    config = saved(tmp_path, "qwen2, tied")
    embedding_VE = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, lm_head__weight=embedding_VE.clone())
    for _ in range(2):
        weights = load(tmp_path, Shard(config), CPU, torch.float32)
        assert weights.head_WE.data_ptr() == weights.embedding_VE.data_ptr()
        assert torch.equal(weights.embedding_VE, embedding_VE)
        change(tmp_path, model__embed_tokens__weight=None)


def test_of_weights_that_are_tied_by_name_only_the_tensors_are_believed(tmp_path: Path) -> None:
    config = saved(tmp_path, "qwen2, tied")
    head_VE = torch.randn(config.vocab_size, config.hidden_size)
    change(tmp_path, lm_head__weight=head_VE)
    assert torch.equal(load(tmp_path, Shard(config), CPU, torch.float32).head_WE, head_VE)


def test_angles_of_older_checkpoints_are_passed_over(tmp_path: Path) -> None:
    config = saved(tmp_path)
    change(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load(tmp_path, Shard(config), CPU, torch.float32)


def test_a_misfit_names_every_kind_of_tensor(tmp_path: Path) -> None:
    config = saved(tmp_path)
    change(
        tmp_path,
        model__norm__weight=None,
        model__layers__0__self_attn__q_proj__bias=torch.ones(64),
        model__layers__1__mlp__up_proj__weight=torch.ones(96, 32),
        model__layers__2__mlp__up_proj__weight=torch.ones(96, 64).to(torch.float8_e4m3fn),
    )
    with pytest.raises(WeightsMismatch) as caught:
        load(tmp_path, Shard(config), CPU, torch.float32)
    text = str(caught.value)
    assert str(tmp_path) in text
    assert "missing: model.norm.weight; " in text
    assert "unexpected: model.layers.0.self_attn.q_proj.bias; " in text
    assert "of another shape: model.layers.1.mlp.up_proj.weight is (96, 32), wanted (96, 64); " in text
    assert "no plain float: model.layers.2.mlp.up_proj.weight is F8_E4M3" in text


def test_of_many_misfits_a_few_are_named(tmp_path: Path) -> None:
    saved(tmp_path)
    config = DecoderConfig.of(FAMILIES["llama, all biases"]())
    with pytest.raises(WeightsMismatch, match=r"missing: (model\S+, ){3}model\S+ and 17 more$"):
        load(tmp_path, Shard(config), CPU, torch.float32)


def test_a_directory_without_safetensors_is_for_transformers(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(Unsupported, match=r"neither model.safetensors nor model.safetensors.index.json"):
        load(tmp_path, Shard(DecoderConfig.of(FAMILIES["llama"]())), CPU, torch.float32)


def test_a_missing_or_cut_off_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    config = saved(tmp_path, shard_size="60KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    path = tmp_path / index["weight_map"]["model.norm.weight"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{path.name} is no whole safetensors file"):
        load(tmp_path, Shard(config), CPU, torch.float32)
    path.unlink()
    with pytest.raises(OSError, match=path.name):
        load(tmp_path, Shard(config), CPU, torch.float32)


@pytest.mark.parametrize("content", ["[" * 5000, "{", "[1]", "{}", '{"weight_map": {"lm_head.weight": 1}}'])
def test_a_damaged_index_of_weights_is_named(content: str, tmp_path: Path) -> None:
    config = saved(tmp_path, shard_size="60KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model.safetensors.index.json (is|holds) .*; copy or download it again"):
        load(tmp_path, Shard(config), CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama, all biases", "qwen3, tied, attention biases"])
def test_random_weights_are_as_transformers_begins(family: str, dtype: torch.dtype) -> None:
    config = DecoderConfig.of(FAMILIES[family]())
    once, again, other = (random(Shard(config), CPU, dtype, seed).named(config) for seed in (1, 1, 2))
    for name, tensor in once.items():
        assert tensor.dtype == dtype and torch.equal(tensor, again[name])
        if name.endswith("norm.weight"):
            assert bool((tensor == 1).all()), name
        else:
            assert not torch.equal(tensor, other[name]), name
    embedding = once["model.embed_tokens.weight"].float()
    assert abs(embedding.mean()) < 1e-3 and abs(embedding.std() - config.initializer_range) < 1e-3
