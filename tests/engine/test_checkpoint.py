"""Laws of checkpoints: the weights that were saved are served, all of them; codes that are no weights are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from tests.engine.decoder_models import model_of, small
from vmmkv import MIB
from vmmkv.errors import VmmkvError
from vmmkv_server import LLM, SamplingParams, UnsupportedModel
from vmmkv_server.engine.servable import end_tokens, read_config

PROMPT = [5, 6, 7, 8]
KINDS: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "vmmkv": lambda: small(hf.Qwen3Config, head_dim=16),
    "transformers": lambda: small(
        hf.Qwen3MoeConfig, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1
    ),
}
"""By the code that runs them."""
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}

POPULAR = ("awq", "gptq", "compressed-tensors", "bitsandbytes", "torchao", "quark", "nvfp4", "mxfp4", "fp8")

Tensors = dict[str, torch.Tensor]


def saved(directory: Path, config: hf.PreTrainedConfig) -> hf.PreTrainedModel:
    model = model_of(config)
    model.save_pretrained(directory)
    return model


def change(directory: Path, how: Callable[[Tensors], Tensors], **fields: Any) -> None:
    """Change the tensors of a directory, and fields of its config.json."""
    save_file(how(load_file(directory / "model.safetensors")), directory / "model.safetensors", {"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def coded(
    tensors: Tensors, scale_name: str = "_scale", block: int | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> Tensors:
    """Matrices of layers as codes, with a scale for each, or for each square block, unless the name of scales is empty."""
    out = {}
    for name, tensor in tensors.items():
        out[name] = tensor.contiguous()
        if name.endswith("proj.weight"):
            rows, columns = tensor.shape
            side = block or max(rows, columns)
            blocks = tensor.reshape(max(1, rows // side), min(rows, side), max(1, columns // side), min(columns, side))
            scales = (
                blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(dtype).max
                if dtype.is_floating_point
                else blocks.amax((1, 3), keepdim=True) / 127
            )
            out[name] = (blocks / scales).reshape(rows, columns).to(dtype)
            if scale_name:
                out[name + scale_name] = scales[:, 0, :, 0].contiguous() if block else scales.amax()
    return out


def answer(directory: Path, **options: Any) -> tuple[str, list[int]]:
    with LLM(directory, **{"device": "cpu", "max_num_seqs": 2, "max_tokens": 64, "kv_budget_bytes": 64 * MIB} | options) as one:
        (completion,) = one.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        return one.ready.implementation, completion.outputs[0].token_ids


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(UnsupportedModel) as raised:
        answer(directory, **options)
    return str(raised.value)


def expected(model: hf.PreTrainedModel) -> list[int]:
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"quantization_config": MODELOPT}, r"are quantised (modelopt), and neither vmmkv nor transformers unpacks these"),
        ({"quantization_config": {"quant_algo": "FP8"}}, "are quantised (FP8), and neither"),
        ({"quantization_config": {"bits": 4}}, "are quantised (by no method that is named), and neither"),
        ({"compression_config": {"quant_method": "of tomorrow"}}, "are quantised (of tomorrow), and neither"),
        ({}, "proj.weight is F8_E4M3"),
    ],
)
def test_codes_that_nothing_unpacks_are_refused(tmp_path: Path, kind: str, said: dict[str, Any], reason: str) -> None:
    saved(tmp_path, KINDS[kind]())
    change(tmp_path, coded, **said)
    text = refusal(tmp_path)
    assert reason in text and text.endswith(
        "use a checkpoint in bfloat16, float16 or float32, or in FP8 by blocks (quant_method fp8)"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8], ids=str)
def test_codes_are_refused_by_their_type_though_nothing_says_so(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    saved(tmp_path, KINDS[kind]())
    change(tmp_path, lambda tensors: coded(tensors, "", dtype=dtype))
    assert "of a type that is no plain float, and config.json does not say by which method: model.layers.0" in refusal(tmp_path)


def test_a_file_of_modelopt_beside_the_configuration_is_read(tmp_path: Path) -> None:
    saved(tmp_path, KINDS["vmmkv"]())
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert "are quantised (modelopt)" in refusal(tmp_path)


@pytest.mark.parametrize(
    "method",
    [*POPULAR, *(pytest.param(name, marks=pytest.mark.nightly) for name in AUTO_QUANTIZER_MAPPING if name not in POPULAR)],
)
def test_a_method_of_transformers_is_right_or_refused_in_a_sentence(tmp_path: Path, method: str) -> None:
    """The weights are plain: a method that unpacks nothing leaves them as they are."""
    right = expected(saved(tmp_path, small(hf.LlamaConfig)))
    said: dict[str, Any] = {"quant_method": method, "bits": 4} | ({"load_in_4bit": True} if method == "bitsandbytes" else {})
    change(tmp_path, dict, quantization_config=said)
    try:
        assert answer(tmp_path) == ("transformers", right)
    except UnsupportedModel as error:
        name = method.split("_")[0]
        assert f"a model of type llama, quantised by {name}" in str(error) and "cannot be served: " in str(error)
        assert "\n" not in str(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [None, 16])
def test_fp8_by_blocks_is_unpacked(tmp_path: Path, kind: str, block: int | None) -> None:
    model = saved(tmp_path, KINDS[kind]())
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block] if block else None}
    change(tmp_path, lambda tensors: coded(tensors, "_scale_inv", block), quantization_config=fp8)
    stored = load_file(tmp_path / "model.safetensors")
    plain = {}
    for name, tensor in stored.items():
        if (scales := stored.get(f"{name}_scale_inv")) is not None:
            grid = scales if block is None else scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
            tensor = tensor.float() * grid
        if not name.endswith("_scale_inv"):
            plain[name] = tensor
    unpacked = tmp_path / "unpacked"
    model.save_pretrained(unpacked)
    change(unpacked, lambda _: plain)
    assert answer(tmp_path) == ("transformers", answer(unpacked, model_impl="transformers")[1])
    change(tmp_path, lambda tensors: {name: tensor for name, tensor in tensors.items() if "scale" not in name})
    assert "no scales by blocks (weight_scale_inv) are beside them: model.layers.0" in refusal(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["fp8", "modelopt", "awq"])
def test_random_weights_are_not_those_of_a_quantised_model(tmp_path: Path, kind: str, method: str) -> None:
    KINDS[kind]().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": method}}))
    text = refusal(tmp_path, load_format="dummy")
    assert text.startswith("load_format='dummy' makes plain weights") and f"are quantised ({method})" in text
    assert "take quantization_config out of its config.json" in text


LAYER = "model.layers.1."
MISFITS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "a layer's matrices": (
        lambda tensors: {name: tensor for name, tensor in tensors.items() if f"{LAYER}self_attn" not in name},
        f"missing: {LAYER}self_attn.k_norm.weight, {LAYER}self_attn.k_proj.weight, ",
    ),
    "the head": (
        lambda tensors: {name: tensor for name, tensor in tensors.items() if "lm_head" not in name},
        "missing: lm_head.weight",
    ),
    "another shape": (
        lambda tensors: tensors | {f"{LAYER}self_attn.q_proj.weight": torch.ones(32, 64)},
        f"of another shape: {LAYER}self_attn.q_proj.weight is (32, 64), wanted (64, 64)",
    ),
    "a bias": (
        lambda tensors: tensors | {f"{LAYER}self_attn.q_proj.bias": torch.ones(64)},
        f"unexpected: {LAYER}self_attn.q_proj.bias",
    ),
    "a norm of a layer": (
        lambda tensors: tensors | {f"{LAYER}post_norm.weight": torch.ones(64)},
        f"unexpected: {LAYER}post_norm.weight",
    ),
    "scales": (
        lambda tensors: tensors | {f"{LAYER}self_attn.q_proj.weight_scale": torch.tensor(0.1)},
        f"unexpected: {LAYER}self_attn.q_proj.weight_scale",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_are_not_the_models_are_refused_by_name(tmp_path: Path, kind: str, name: str) -> None:
    how, reason = MISFITS[name]
    saved(tmp_path, KINDS[kind]())
    change(tmp_path, how)
    assert f"the tensors in {tmp_path} are not those of the model in its config.json. {reason}" in refusal(tmp_path)


def test_tensors_of_parts_that_the_model_lacks_are_passed_over(tmp_path: Path) -> None:
    model = saved(tmp_path, KINDS["transformers"]())
    parts = ("vision_tower.layers.0.proj.weight", "model.layers.3.mtp.weight", "mtp.norm.weight", "model.pooler.dense.bias",
             "model.layers.0.self_attn.rotary_emb.inv_freq")  # fmt: skip
    change(tmp_path, lambda tensors: tensors | {name: torch.ones(8) for name in parts})
    assert answer(tmp_path) == ("transformers", expected(model))


def test_buffers_that_are_computed_may_be_stored(tmp_path: Path) -> None:
    """Old checkpoints of GPT-2 have the causal mask of each layer, what it masks with, and names without the model's prefix."""
    model = saved(tmp_path, hf.GPT2Config(vocab_size=199, n_embd=64, n_layer=2, n_head=4, n_positions=128, eos_token_id=None))
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 128, 128).tril().bool() for layer in range(2)}
    masks |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}
    change(tmp_path, lambda tensors: {name.removeprefix("transformer."): t for name, t in tensors.items()} | masks)
    assert answer(tmp_path) == ("transformers", expected(model))


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("generation_config.json", "{", r"generation_config\.json is not JSON: "),
        ("generation_config.json", "[1]", r"generation_config\.json holds no JSON object but a list"),
        ("generation_config.json", '{"eos_token_id": "x"}', r"eos_token_id in .*generation_config\.json is .x.; wanted a"),
        ("generation_config.json", '{"eos_token_id": [1, true]}', r"eos_token_id in .*generation_config\.json is \[1, True\]"),
        ("config.json", {"quantization_config": "awq"}, r"quantization_config in .*config\.json is 'awq'; wanted an object"),
        ("config.json", {"quantization_config": []}, r"quantization_config in .*config\.json is \[\]; wanted an object"),
        ("config.json", {"rope_parameters": {"rope_type": "foo"}}, r"rope_type in its config\.json is 'foo'; transformers has"),
        ("tokenizer.json", "{", r"the tokenizer in .* cannot be loaded: "),
    ],
)  # fmt: skip
def test_a_broken_file_is_refused_by_its_name_and_what_is_wrong(tmp_path: Path, file: str, text: Any, said: str) -> None:
    saved(tmp_path, KINDS["vmmkv"]())
    path = tmp_path / file
    path.write_text(text if isinstance(text, str) else json.dumps(json.loads(path.read_text()) | text))
    with pytest.raises(VmmkvError, match=said):
        answer(tmp_path)


def test_end_tokens_are_those_of_the_generation_configuration_if_it_is_there(tmp_path: Path) -> None:
    saved(tmp_path, KINDS["vmmkv"]())
    path, config = tmp_path / "generation_config.json", read_config(tmp_path)
    config.eos_token_id = 3
    for text, wanted in (('{"eos_token_id": [4, 5]}', {4, 5}), ('{"eos_token_id": 6}', {6}), ("{}", set())):
        path.write_text(text)
        assert end_tokens(tmp_path, config) == wanted
    path.unlink()
    assert end_tokens(tmp_path, config) == {3}


def test_an_adapter_is_said_to_be_one(tmp_path: Path) -> None:
    saved(tmp_path, KINDS["vmmkv"]())
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert answer(tmp_path), "whole weights beside it"
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    with pytest.raises(VmmkvError, match=r"is an adapter .*merge it into its base model"):
        answer(tmp_path)


def test_code_that_is_passed_over_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, KINDS["vmmkv"]())
    change(tmp_path, lambda tensors: tensors, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    assert answer(tmp_path)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "code of its own (modeling_own.Own), which is not run" in said and "as the qwen3 that transformers knows" in said
