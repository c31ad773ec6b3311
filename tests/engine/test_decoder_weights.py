"""Weights: what save_pretrained wrote is what is there, under whichever split; what does not fit is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.decoder_models import FAMILIES, model_of
from vmmkv.server.engine.models.decoder import DecoderConfig, Unsupported, empty
from vmmkv.server.engine.models.weights import WeightsMismatch, load, random

CPU = torch.device("cpu")


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
    loaded = load(tmp_path, config, CPU, torch.float32).named(config)
    assert loaded.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(loaded[name], tensor), name


def test_parts_of_a_fused_matrix_lie_one_behind_the_other(tmp_path: Path) -> None:
    config = saved(tmp_path, "llama, all biases")
    weights = load(tmp_path, config, CPU, torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.1."
    qkv_CE = torch.cat([stored[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"])
    gate_up_G = torch.cat([stored[f"{prefix}mlp.{name}_proj.bias"] for name in ("gate", "up")])
    assert torch.equal(weights.layers[1].qkv_CE, qkv_CE) and weights.layers[1].qkv_CE.is_contiguous()
    assert weights.layers[1].gate_up_bias_G is not None
    assert torch.equal(weights.layers[1].gate_up_bias_G, gate_up_G)


def test_weights_become_the_type_that_is_wanted(tmp_path: Path) -> None:
    config = saved(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name, tensor in load(tmp_path, config, CPU, torch.bfloat16).named(config).items():
        assert torch.equal(tensor, stored[name].bfloat16()), name


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    config = saved(tmp_path, "qwen2, tied")
    weights = load(tmp_path, config, CPU, torch.float32)
    assert weights.head_VE is weights.embedding_VE


def test_tied_weights_that_were_saved_twice_or_under_the_other_name_are_one_tensor(tmp_path: Path) -> None:
    config = saved(tmp_path, "qwen2, tied")
    embedding_VE = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, lm_head__weight=embedding_VE.clone())
    for _ in range(2):
        weights = load(tmp_path, config, CPU, torch.float32)
        assert weights.head_VE is weights.embedding_VE
        assert torch.equal(weights.embedding_VE, embedding_VE)
        change(tmp_path, model__embed_tokens__weight=None)


def test_of_weights_that_are_tied_by_name_only_the_tensors_are_believed(tmp_path: Path) -> None:
    config = saved(tmp_path, "qwen2, tied")
    head_VE = torch.randn(config.vocab_size, config.hidden_size)
    change(tmp_path, lm_head__weight=head_VE)
    assert torch.equal(load(tmp_path, config, CPU, torch.float32).head_VE, head_VE)


def test_angles_of_older_checkpoints_are_passed_over(tmp_path: Path) -> None:
    config = saved(tmp_path)
    change(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load(tmp_path, config, CPU, torch.float32)


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
        load(tmp_path, config, CPU, torch.float32)
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
        load(tmp_path, config, CPU, torch.float32)


def test_a_directory_without_safetensors_is_for_transformers(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(Unsupported, match=r"neither model.safetensors nor model.safetensors.index.json"):
        load(tmp_path, DecoderConfig.of(FAMILIES["llama"]()), CPU, torch.float32)


def test_a_missing_shard_is_an_oserror_that_names_it(tmp_path: Path) -> None:
    config = saved(tmp_path, shard_size="60KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    gone = index["weight_map"]["model.norm.weight"]
    (tmp_path / gone).unlink()
    with pytest.raises(OSError, match=gone):
        load(tmp_path, config, CPU, torch.float32)


def test_a_file_that_is_cut_off_is_an_error_that_names_it(tmp_path: Path) -> None:
    config = saved(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model.safetensors is no whole safetensors file"):
        load(tmp_path, config, CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_are_as_transformers_begins(family: str, dtype: torch.dtype) -> None:
    config = DecoderConfig.of(FAMILIES[family]())
    once, again, other = (random(config, CPU, dtype, seed).named(config) for seed in (1, 1, 2))
    for name, tensor in once.items():
        assert tensor.dtype == dtype and torch.equal(tensor, again[name])
        if name.endswith("norm.weight"):
            assert bool((tensor == 1).all()), name
        else:
            assert not torch.equal(tensor, other[name]), name
    embedding = once["model.embed_tokens.weight"].float()
    assert abs(embedding.mean()) < 1e-3 and abs(embedding.std() - config.initializer_range) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_has_a_name(family: str) -> None:
    """Nothing is left as it was when memory was taken."""
    config = DecoderConfig.of(FAMILIES[family]())
    weights = empty(config, CPU, torch.float32)
    tensors = {id(tensor): tensor for tensor in (weights.embedding_VE, weights.norm_E, weights.head_VE)}
    for layer in weights.layers:
        fields = (getattr(layer, name) for name in layer.__slots__)
        tensors |= {id(tensor): tensor for tensor in fields if tensor is not None}
    for tensor in tensors.values():
        tensor.fill_(torch.nan)
    for place in weights.named(config).values():
        place.fill_(0.0)
    assert not any(bool(tensor.isnan().any()) for tensor in tensors.values())
