"""What the layers of published models keep, read of their configurations and by hand; what is not known is refused by name."""

import contextlib
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vmmkv.errors import LayoutError
from vmmkv.model_config import (
    Attention,
    Compressed,
    IndexKeys,
    Latent,
    ModelConfig,
    State,
    beside_rows,
    described,
    read,
    shared_rows,
)

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "model_configs.json").read_text(encoding="utf-8")
)
"""The fields that matter of published configurations, by the model's name."""

KV = 2 * 2
"""Bytes of K and V, an element of each, in bfloat16."""

BY_HAND: dict[str, tuple[int, dict[int, int], int]] = {
    # bytes that a token adds for good; bytes of a row of each window; bytes of a sequence
    "LiquidAI/LFM2-1.2B": (6 * 8 * 64 * KV, {}, 10 * 2048 * 2 * 2),
    "MiniMaxAI/MiniMax-M2.5": (62 * 8 * 128 * KV, {}, 0),
    "MiniMaxAI/MiniMax-M3": (60 * 4 * 128 * KV + 57 * 128 * 2, {}, 0),
    "Qwen/Qwen3-30B-A3B": (48 * 4 * 128 * KV, {}, 0),
    "Qwen/Qwen3-30B-A3B-FP8": (48 * 4 * 128 * KV, {}, 0),
    "Qwen/Qwen3-Next-80B-A3B": (12 * 2 * 256 * KV, {}, 36 * (32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 3 * 2)),
    "Qwen/Qwen3-VL-2B-Instruct": (28 * 8 * 128 * KV, {}, 0),
    "Qwen/Qwen3.5-27B": (16 * 4 * 256 * KV, {}, 48 * (48 * 128 * 128 * 4 + (2 * 16 + 48) * 128 * 3 * 2)),
    "Qwen/Qwen3.5-35B-A3B": (10 * 2 * 256 * KV, {}, 30 * (32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 3 * 2)),
    "XiaomiMiMo/MiMo-V2-Flash": (9 * 4 * (192 + 128) * 2, {128: 39 * 8 * (192 + 128) * 2}, 0),
    "ai21labs/Jamba-1.5-Mini": (4 * 8 * 128 * KV, {}, 28 * (8192 * 16 * 4 + 8192 * 3 * 2)),
    "deepseek-ai/DeepSeek-V3": (61 * 576 * 2, {}, 0),
    "deepseek-ai/DeepSeek-V3.2": (61 * (576 * 2 + 128 + 4), {}, 0),
    # 21 layers keep a row of 512 and an index key of 128 for each 4 tokens, 20 a row of 512 for each 128
    "deepseek-ai/DeepSeek-V4-Flash": (
        21 * (512 + 128) * 2 // 4 + 20 * 512 * 2 // 128,
        {128: 43 * 512 * 2},
        21 * 2 * 8 * 2 * (512 + 128) * 4 + 20 * 2 * 128 * 512 * 4,
    ),
    "google/gemma-3-27b-it": (10 * 16 * 128 * KV, {1024: 52 * 16 * 128 * KV}, 0),
    "google/gemma-3n-E4B": (4 * 2 * 256 * KV, {512: 16 * 2 * 256 * KV}, 0),
    "google/gemma-4-26B-A4B": (5 * 2 * 512 * KV, {1024: 25 * 8 * 256 * KV}, 0),
    "google/recurrentgemma-9b": (0, {2048: 12 * 256 * KV}, 26 * (4096 * 4 + 4096 * 3 * 2)),
    "ibm-ai-platform/bamba-9b": (3 * 8 * 128 * KV, {}, 29 * (128 * 64 * 128 * 4 + (8192 + 2 * 128) * 3 * 2)),
    "ibm-granite/granite-4.0-h-small": (4 * 8 * 128 * KV, {}, 36 * (128 * 64 * 128 * 4 + (8192 + 2 * 128) * 3 * 2)),
    "meta-llama/Llama-3.2-11B-Vision": (32 * 8 * 128 * KV, {}, 0),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (12 * 8 * 128 * KV, {8192: 36 * 8 * 128 * KV}, 0),
    "moonshotai/Kimi-K2-Instruct": (61 * 576 * 2, {}, 0),
    "moonshotai/Kimi-K3": (24 * 576 * 2, {}, 69 * (96 * 128 * 128 * 4 + 3 * 96 * 128 * 3 * 2)),
    "nvidia/Llama-3.1-70B-Instruct-FP8": (80 * 8 * 128 * KV, {}, 0),
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": (49 * 8 * 128 * KV, {}, 0),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        6 * 2 * 128 * KV,
        {},
        23 * (64 * 64 * 128 * 4 + (4096 + 2 * 8 * 128) * 3 * 2),
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": (
        8 * 2 * 128 * KV,
        {},
        40 * (128 * 64 * 128 * 4 + (8192 + 2 * 8 * 128) * 3 * 2),
    ),
    "nvidia/Nemotron-H-56B-Base-8K": (10 * 8 * 128 * KV, {}, 54 * (256 * 64 * 256 * 4 + (16384 + 2 * 8 * 256) * 3 * 2)),
    "openai/gpt-oss-20b": (12 * 8 * 64 * KV, {128: 12 * 8 * 64 * KV}, 0),
    # transformers' default is 8 groups
    "state-spaces/mamba2-2.7b": (0, {}, 64 * (80 * 64 * 128 * 4 + (5120 + 2 * 8 * 128) * 3 * 2)),
    "stepfun-ai/Step-3.7-Flash-FP8": (12 * 8 * 128 * KV, {512: 33 * 8 * 128 * KV}, 0),
    "tiiuae/Falcon-H1-7B": (44 * 2 * 128 * KV, {}, 44 * (24 * 128 * 256 * 4 + (3072 + 2 * 256) * 3 * 2)),
    "tiiuae/falcon-7b": (32 * 1 * 64 * KV, {}, 0),
    "zai-org/GLM-4.7-Flash": (47 * 576 * 2, {}, 0),
    "zai-org/GLM-5": (78 * (576 * 2 + 128 + 4), {}, 0),
}


def sizes(model: ModelConfig) -> tuple[float, dict[int, int], int]:
    """What a token adds for good, a row of each window or chunk, and a sequence, in bytes of bfloat16."""
    growing, state, windowed = 0.0, 0, Counter[int]()
    for part in (part for parts in model.layers for part in parts):
        match part:
            case Attention():
                size_bytes = part.heads * (part.key_dim + part.value_dim) * 2
                if last := part.window or part.chunk:
                    windowed[last] += size_bytes
                else:
                    growing += size_bytes
            case Latent(window=None):
                growing += part.dim * 2
            case Latent(window=int(window)):
                windowed[window] += part.dim * 2
            case IndexKeys():
                growing += part.dim + 4 * -(-part.dim // 128) if part.scaled else part.dim * 2
            case Compressed():
                growing += part.dim * 2 / part.num_tokens
            case State():
                state += part.size_bytes(2)
    return growing, dict(windowed), state


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_keep_what_they_keep_by_hand(name: str) -> None:
    assert sizes(read(PUBLISHED[name])) == BY_HAND[name]


def decoder(family: str | None = None, layers: int = 4, heads: int = 8, hidden: int = 512, **fields: Any) -> dict[str, Any]:
    """The dict of a decoder with heads of 64."""
    named = {} if family is None else {"model_type": family}
    return {**named, "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden, **fields}


def own_class(*sizes: int, family: str = "fog", **fields: Any) -> SimpleNamespace:
    """A configuration object of a class that is not transformers'."""
    return SimpleNamespace(**decoder(family, *sizes, **fields))


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
OTHER_NAMES: dict[str, tuple[Any, tuple[float, dict[int, int], int]]] = {
    "dbrx": (
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "attn_config": {"kv_n_heads": 8}},
        (40 * 8 * 128 * KV, {}, 0),
    ),
    "falcon, 40B": (
        decoder("falcon", 60, 128, 8192, num_kv_heads=8, new_decoder_architecture=True, multi_query=True),
        (60 * 8 * 64 * KV, {}, 0),
    ),
    "gpt_bigcode": ({"model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 40}, (40 * 128 * KV, {}, 0)),
    "mpt": ({"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32}, (32 * 4096 * KV, {}, 0)),
    "bloom": ({"model_type": "bloom", "n_layer": 70, "n_head": 112, "hidden_size": 14336}, (70 * 14336 * KV, {}, 0)),
    "gptj": ({"model_type": "gptj", "n_layer": 28, "n_head": 16, "n_embd": 4096}, (28 * 4096 * KV, {}, 0)),
    "rwkv": ({"model_type": "rwkv", "num_hidden_layers": 24, "hidden_size": 1024}, (0, {}, 24 * (3 * 1024 * 4 + 2 * 1024 * 2))),
    "longcat_flash, two attentions a layer": (
        {"model_type": "longcat_flash", "num_layers": 14, "num_attention_heads": 64, "hidden_size": 6144, **LATENT},
        (28 * 576 * 2, {}, 0),
    ),
    "minimax_text_01": (
        decoder("minimax_text_01", 8, 64, 6144, num_key_value_heads=8, head_dim=128, attn_type_list=[0] * 7 + [1]),
        (8 * 128 * KV, {}, 7 * 64 * 128 * 128 * 4),
    ),
    "zamba2": (
        decoder(
            "zamba2", 3, 32, 3584, n_mamba_heads=112, mamba_d_state=64, mamba_ngroups=2,
            layers_block_type=["mamba", "hybrid", "mamba"],
        ),
        (32 * 224 * KV, {}, 3 * (112 * 64 * 64 * 4 + (7168 + 2 * 2 * 64) * 3 * 2)),
    ),
    "qwen2_vl, older files of one part": (
        decoder("qwen2_vl", 28, 28, 3584, num_key_value_heads=4, sliding_window=32768, use_sliding_window=False),
        (28 * 4 * 128 * KV, {}, 0),
    ),
    "internvl_chat, a decoder under llm_config": (
        {"model_type": "internvl_chat", "llm_config": decoder("internlm2", num_key_value_heads=2)},
        (4 * 2 * 64 * KV, {}, 0),
    ),
    "kimi_vl, a decoder of a type that transformers calls otherwise": (
        {"model_type": "kimi_vl", "text_config": decoder("kimi_k2", 27, 16, 2048, **LATENT)},
        (27 * 576 * 2, {}, 0),
    ),
    "step3p7, more query heads in windows": (
        {
            "model_type": "step3p7",
            "text_config": decoder(
                "step3p5", 4, 64, 4096, num_attention_groups=8, head_dim=128, sliding_window=512,
                layer_types=["full_attention", "sliding_attention"] * 2, attention_other_setting={"num_attention_heads": 96},
            ),
        },
        (2 * 8 * 128 * KV, {512: 2 * 8 * 128 * KV}, 0),
    ),
    "a class of one's own, and plain": (own_class(kv_channels=32, num_key_value_heads=2), (4 * 2 * 32 * KV, {}, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_files_with_names_of_their_own_are_read(name: str) -> None:
    config, by_hand = OTHER_NAMES[name]
    assert sizes(read(config)) == by_hand


REFUSED: dict[str, tuple[Any, str]] = {
    "no decoder": (SimpleNamespace(), "has no num_hidden_layers"),
    "an encoder and a decoder": ({"model_type": "t5"}, r"\(t5\) is an encoder and a decoder"),
    "an encoder": (decoder("bert"), "is an encoder"),
    "a number of layers": (decoder("cohere2", 10**9), "at most 65536"),
    "a kind of layer": (own_class(layer_types=["full_attention", "mist"] * 2), "has layers of type mist; known are"),
    "fewer kinds than layers": (own_class(layer_types=["full_attention"]), "has 4 layers, and says a kind for 1"),
    "a state of unknown size": (own_class(layer_types=["mamba"] * 4), "what a state of this type of model takes"),
    "a state, by its field": (own_class(mamba_d_state=16), "by mamba_d_state, which is not known"),
    "a state, by its type": (own_class(family="rwkv5", head_size=64), "of a type that keeps states"),
    "a window of no size": (own_class(layer_types=["sliding_attention"] * 4), "has no sliding_window"),
    "a window of some layers": (own_class(sliding_window=9), "does not say by layer_types"),
    "an indexer": (own_class(index_head_dim=128), "by index_head_dim"),
    "kv heads by another name": (own_class(num_attention_groups=1), "by num_attention_groups"),
    "kv heads by layer": (own_class(family="deci", num_key_value_heads_per_layer=[4] * 4), "by num_key_value_heads_per_layer"),
    "heads of all queries, by another attention": (
        {"model_type": "mpt", "attn_config": {"attn_type": "multiquery_attention"}},
        "attn_type 'multiquery_attention'",
    ),
    "rows shared between layers": (
        own_class(family="hunyuan", use_cla=True, cla_share_factor=2),
        "by cla_share_factor, use_cla",
    ),
    "a field of another type of model": (decoder("llama", full_attention_interval=4), "by full_attention_interval"),
    "kv heads without an effect": (decoder("gemma4_text", num_global_key_value_heads=2), "by num_global_key_value_heads"),
    "no number": (own_class(num_key_value_heads="two"), "num_key_value_heads='two' is not a whole number"),
    "no list": (own_class(layer_types=5), "layer_types=5, which is no list"),
    "layers that all read others": (own_class(num_kv_shared_layers=4), "has 4 layers, of which 4 read the rows of others"),
    "a negative number of layers": (own_class(-4), "num_hidden_layers=-4; wanted is at least 1"),
    "negative heads": (own_class(num_key_value_heads=-2), "has num_key_value_heads=-2; wanted is at least 1"),
    "a negative size": (own_class(num_key_value_heads=2, head_dim=-64), "has head_dim=-64; wanted"),
    "a negative rank": (own_class(kv_lora_rank=-1), "has kv_lora_rank=-1; wanted"),
    "negative rows of others": (own_class(num_kv_shared_layers=-1), "has num_kv_shared_layers=-1; wanted"),
    "a negative pattern": (
        own_class(sliding_window=9, sliding_window_pattern=-2),
        "has sliding_window_pattern=-2; wanted",
    ),
    "a layer that it does not have": (
        own_class(cross_attention_layers=[-1]),
        "has 4 layers, and cross_.* says -1 of them",
    ),
    "a window of a block": (
        decoder(
            "nemotron-nas",
            1,
            block_configs=[{"attention": {"n_heads_in_group": 1, "window_length": -1}, "ffn": {}}],
        ),
        "window_length of layer 0=-1; wanted is at least 1",
    ),
    "an indexer of each layer": (
        own_class(layer_types=["deepseek_sparse_attention"] * 4, index_head_dim=128, indexer_types=["full"] * 3),
        "does not say by indexer_types whether layer 3 has",
    ),
    "rows that are compressed": (
        own_class(1, layer_types=["compressed_sparse_attention"], head_dim=64, index_head_dim=64, compress_rates={"fog": 4}),
        "does not say by compress_rates how many tokens a row of compressed_sparse_attention",
    ),
    "a type of a state": (decoder("qwen3_next", mamba_ssm_dtype="float64"), "mamba_ssm_dtype='float64'; known are float32"),
    "a block without attention": (decoder("nemotron-nas", 1, block_configs=[{"ffn": {}}]), "what the attention of layer 0 is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(LayoutError, match=message):
        read(config)


def test_layers_that_read_others_rows_name_the_last_of_their_kind() -> None:
    """Gemma 3n: of 35 layers the last 15 read layer 18's rows in a window, or layer 19's of all tokens."""
    layers = read(PUBLISHED["google/gemma-3n-E4B"]).layers
    shared = shared_rows(layers)
    assert list(shared) == list(range(20, 35))
    assert {layer: owner for layer, owner in shared.items() if owner == 19} == {24: 19, 29: 19, 34: 19}
    assert set(shared.values()) == {18, 19}


def test_what_is_beside_rows_is_said_by_runs_of_layers() -> None:
    layers = read(PUBLISHED["ai21labs/Jamba-1.5-Mini"]).layers
    assert described(beside_rows(layers)) == "a state (Mamba) in layers 0 to 3, 5 to 11, 13 to 19, 21 to 27, 29 to 31"
    assert beside_rows(read(PUBLISHED["google/gemma-3n-E4B"]).layers) == {}


def test_without_transformers_files_that_say_all_are_read_and_others_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert sizes(read(PUBLISHED["nvidia/Llama-3.1-70B-Instruct-FP8"])) == BY_HAND["nvidia/Llama-3.1-70B-Instruct-FP8"]
    assert sizes(read(PUBLISHED["deepseek-ai/DeepSeek-V3"])) == BY_HAND["deepseek-ai/DeepSeek-V3"]
    for name in ("Qwen/Qwen3-Next-80B-A3B", "google/gemma-3-27b-it", "tiiuae/Falcon-H1-7B"):
        with pytest.raises(LayoutError, match=r"model_type=.* is not known here: .*transformers.* is not installed"):
            read(PUBLISHED[name])


LEFT_OUT = [
    ("google/gemma-3-27b-it", "num_key_value_heads"),
    ("ibm-granite/granite-4.0-h-small", "num_key_value_heads"),
    ("XiaomiMiMo/MiMo-V2-Flash", "hybrid_layer_pattern"),
    ("deepseek-ai/DeepSeek-V4-Flash", "compress_ratios"),
    ("meta-llama/Llama-3.2-11B-Vision", "cross_attention_layers"),
]
"""Fields that decide what layers keep, and for which the class of the type has a default."""


def assert_read_as_loaded(config: dict[str, Any], directory: Path) -> None:
    """A file is refused, or it is read as the configuration that transformers loads from it."""
    hf = pytest.importorskip("transformers")
    try:
        layers = read(config).layers
    except LayoutError:
        return
    (directory / "config.json").write_text(json.dumps(config))
    assert layers == read(hf.AutoConfig.from_pretrained(directory, local_files_only=True)).layers


@pytest.mark.parametrize(("name", "field"), LEFT_OUT)
def test_a_field_that_is_left_out_is_that_of_the_loaded_configuration(name: str, field: str, tmp_path: Path) -> None:
    config = PUBLISHED[name]
    inner = {key: value for key, value in config.get("text_config", config).items() if key != field}
    assert_read_as_loaded({**config, "text_config": inner} if "text_config" in config else inner, tmp_path)


@pytest.mark.nightly
def test_a_file_of_a_type_alone_is_read_as_the_configuration_that_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every type of transformers, with the defaults of its class in place of all fields; some classes would ask a hub."""
    hf = pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for family in hf.CONFIG_MAPPING:
        assert_read_as_loaded({"model_type": family}, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_field_of_any_other_value_is_read_or_refused(name: str) -> None:
    config = PUBLISHED[name]
    inner = config.get("text_config", config)
    for field, value in itertools.product(inner, (None, 0, -1, 3, 2.5, True, "fog", [], ["fog"], [0, 1], {}, {"fog": 1})):
        changed = {**inner, field: value}
        with contextlib.suppress(LayoutError):
            read({**config, "text_config": changed} if inner is not config else changed)


def test_a_field_that_its_class_cannot_compute_is_refused_by_name() -> None:
    config = pytest.importorskip("transformers").JambaConfig(num_hidden_layers=4)
    config.attn_layer_period = 0
    with pytest.raises(LayoutError, match=r"\(jamba\) does not say layer_types?: ZeroDivisionError"):
        read(config)


def test_a_layer_that_keeps_two_parts_of_a_kind_is_named_once() -> None:
    layers = [(Compressed(8, 4), Compressed(8, 128)), (Latent(16),), (Compressed(8, 4),)]
    assert described(beside_rows(layers)) == "compressed rows in layers 0, 2; latents (kv_lora_rank) in layer 1"


@pytest.mark.parametrize("model_type", ["foo", "32", -1, None, [], True])
def test_a_file_of_a_type_that_is_not_known_is_refused_by_name(model_type: Any) -> None:
    message = "has no model_type" if model_type is None else f"has model_type={re.escape(repr(model_type))}, which is not known"
    with pytest.raises(LayoutError, match=message):
        read({**PUBLISHED["Qwen/Qwen3-30B-A3B"], "model_type": model_type})


def test_heads_of_keys_are_not_guessed_of_a_file_read_by_its_fields() -> None:
    with pytest.raises(LayoutError, match="has no num_key_value_heads, and how many"):
        read(decoder("internlm2"))


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"]
)
@pytest.mark.parametrize("value", [0, False, "", []])
@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "nvidia/Llama-3.1-70B-Instruct-FP8", "zai-org/GLM-4.7-Flash"])
def test_a_size_of_zero_is_not_taken_for_absent(name: str, value: Any, field: str) -> None:
    with pytest.raises(LayoutError, match=rf"has {field}={re.escape(repr(value))}; leave it out"):
        read({**PUBLISHED[name], field: value})


@pytest.mark.parametrize("field", ["sliding_window", "kv_lora_rank", "attention_chunk_size"])
def test_a_zero_of_a_class_of_ones_own_is_refused(field: str) -> None:
    kinds = {"attention_chunk_size": ["chunked_attention"] * 4}.get(field)
    with pytest.raises(LayoutError, match=f"has {field}=0; wanted is at least 1"):
        read(own_class(**{field: 0, "layer_types": kinds}))


@pytest.mark.parametrize(
    ("name", "field", "change", "message"),
    [
        ("nvidia/Nemotron-H-56B-Base-8K", "hybrid_override_pattern", lambda said: said[:10], "has 118 layers, and says a kind"),
        ("nvidia/Nemotron-H-56B-Base-8K", "hybrid_override_pattern", lambda said: None, "nemotron_h"),
        ("nvidia/Nemotron-H-56B-Base-8K", "hybrid_override_pattern", lambda said: "", "hybrid_override_pattern=''"),
        ("openai/gpt-oss-20b", "layer_types", lambda said: said[:10], "layer_types"),
        ("ibm-ai-platform/bamba-9b", "attn_layer_indices", lambda said: [*said, 99], "attn_layer_indices says 99"),
        ("LiquidAI/LFM2-1.2B", "full_attn_idxs", lambda said: [*said, 99], "full_attn_idxs says 99"),
        ("XiaomiMiMo/MiMo-V2-Flash", "hybrid_layer_pattern", lambda said: said[:10], "has 48 layers, and says a kind for 10"),
        ("XiaomiMiMo/MiMo-V2-Flash", "hybrid_layer_pattern", lambda said: [7, *said[1:]], "has 7 in hybrid_layer_pattern"),
        ("Qwen/Qwen3.5-27B", "full_attention_interval", lambda said: 0, "has full_attention_interval=0"),
    ],
)
def test_a_pattern_that_does_not_fit_the_layers_is_refused(
    name: str, field: str, change: Callable[[Any], Any], message: str
) -> None:
    pytest.importorskip("transformers")
    config = PUBLISHED[name]
    inner = config.get("text_config", config)
    changed = {**inner, field: change(inner[field])}
    with pytest.raises(LayoutError, match=message):
        read({**config, "text_config": changed} if inner is not config else changed)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "hybrid_override_pattern"),
        ("ibm-ai-platform/bamba-9b", "attn_layer_indices"),
        ("ibm-granite/granite-4.0-h-small", "layer_types"),
    ],
)
def test_a_missing_pattern_is_not_filled_in_by_a_default(name: str, field: str) -> None:
    pytest.importorskip("transformers")
    config = {key: value for key, value in PUBLISHED[name].items() if key not in (field, "layers_block_type")}
    with pytest.raises(LayoutError, match=r"does not say which of its layers attend|and says a kind for"):
        read(config)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bf16", "", -1, [1], "int8"])
def test_a_type_of_weights_that_is_none_is_refused_by_its_key(key: str, value: Any) -> None:
    for name in ("Qwen/Qwen3-30B-A3B", "nvidia/Llama-3.1-70B-Instruct-FP8"):
        config = {field: said for field, said in PUBLISHED[name].items() if field not in ("dtype", "torch_dtype")}
        with pytest.raises(LayoutError, match=rf" {key}={re.escape(repr(value))}; wanted is float32, float16, bfloat16"):
            read({**config, key: value})
