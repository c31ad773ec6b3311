"""`vmmkv plan`: the known values, the table, the errors."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.systems.models import MODELS
from vmmkv.cli.main import main
from vmmkv.units import GIB, PAGE_BYTES
from vmmkv_server.config import EngineConfig
from vmmkv_server.models import KNOWN_CONFIGS, KNOWN_MODELS, ModelUnavailable, UnsupportedModel, resolve

LARGE = ["--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--kv-cache-dtype"]

Plan = Callable[..., Any]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """The JSON of a plan in 8 GiB, unless the arguments say otherwise."""

    def plan(*arguments: str) -> Any:
        assert main(["plan", "--memory", "8GiB", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return plan


@pytest.fixture
def table(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The same as text."""

    def table(*arguments: str) -> str:
        assert main(["plan", "--memory", "8GiB", *arguments]) == 0
        return capsys.readouterr().out

    return table


def write_config(directory: Path, **config: Any) -> str:
    base = {
        "model_type": "llama",
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 1024,
    }
    (directory / "config.json").write_text(json.dumps({**base, **config}))
    return str(directory)


def test_the_known_values_of_80_layers(plan: Plan, table: Callable[..., str]) -> None:
    arguments = [*LARGE, "fp16", "--memory", "320GiB", "--lengths", "4096,100000"]
    given = plan(*arguments)
    of_4096, of_100000 = given["lengths"]
    assert given["row_bytes"] == 327_680
    assert of_4096["token_bytes"] == 1_342_177_280
    assert of_4096["num_sequences"] == 256
    assert of_4096["num_pages"] * PAGE_BYTES * 256 == 320 * GIB
    assert of_100000["token_bytes"] == 32_768_000_000
    assert given["longest_sequence_tokens"] == 320 * GIB // 327_680
    text = table(*arguments)
    for part in ("327,680 bytes (320.0 KiB) in float16", "6.4 in 2.0 MiB", "163,840 pages"):
        assert part in text
    row = next(line for line in text.splitlines() if line.strip().startswith("4,096"))
    assert row.split() == ["4,096", "1.2", "GiB", "640", "256", "0.0%", "10", "95.9%"]


def test_a_length_of_which_none_fits_has_no_waste(table: Callable[..., str]) -> None:
    row = table(*LARGE, "fp16", "--memory", "1GiB", "--lengths", "4096").splitlines()[-1]
    assert row.split() == ["4,096", "1.2", "GiB", "640", "0", "-", "0", "-"]


def test_waste_is_below_a_page_for_each_sequence_and_group(plan: Plan, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    model = write_config(tmp_path, num_hidden_layers=4, layer_types=kinds, sliding_window=512)
    given = plan("--model", model, "--lengths", "1,100,1000,10000", "--kv-cache-dtype", "bf16")
    assert given["groups"] == 2
    for row in given["lengths"]:
        wasted_bytes = row["waste_fraction"] * row["num_pages"] * PAGE_BYTES
        assert 0 <= wasted_bytes < 3 * PAGE_BYTES  # one page at each end of a group, and the full group starts on a page
        assert row["num_sequences"] == 4096 // row["num_pages"]


def test_ranks_share_heads_and_fill_up_what_does_not_divide(plan: Plan) -> None:
    def rows(model: str) -> list[int]:
        return [plan("--model", model, "--tensor-parallel-size", str(count))["row_bytes"] for count in (1, 2, 4, 8)]

    assert rows("llama-3.1-8b") == [131_072, 65_536, 32_768, 16_384], "of 8 heads: 8, 4, 2 and 1"
    assert rows("smollm2-135m") == [23_040, 15_360, 7_680, 7_680], "of 3 heads: 3, 2, 1 and 1"


def test_a_plan_over_ranks_says_so_and_has_no_disk(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "llama-3.1-8b", "--memory", "4GiB", "--tensor-parallel-size", "2"]
    assert main(arguments) == 0 and "on each of 2 GPUs" in capsys.readouterr().out
    assert plan("--model", "llama-3.1-8b", "--tensor-parallel-size", "2")["tensor_parallel_size"] == 2
    assert main([*arguments, "--disk-budget", "10GiB"]) == 1
    assert "--disk-budget" in capsys.readouterr().err


def test_a_model_directory_gives_geometry_dtype_and_limit(plan: Plan, tmp_path: Path) -> None:
    model = write_config(tmp_path, dtype="bfloat16", max_position_embeddings=40_960, sliding_window=512)
    given = plan("--model", model)
    assert (given["row_bytes"], given["kv_cache_dtype"], given["max_tokens"]) == (114_688, "bfloat16", 40_960)
    assert given["longest_sequence_tokens"] == 40_960, "a window does not lengthen what the model can have"
    assert [row["num_tokens"] for row in given["lengths"]] == [1024, 4096, 32768]
    assert plan("--model", f"{model}/config.json") == given


def test_models_that_can_be_fetched_or_are_measured_are_planned_by_name(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert KNOWN_CONFIGS.keys() == KNOWN_MODELS.keys() | MODELS.keys()
    for name, served in MODELS.items():
        (tmp_path / "config.json").write_text(json.dumps(served.config))
        assert plan("--model", name, "--kv-cache-dtype", "bf16") == plan("--model", ".", "--kv-cache-dtype", "bf16")
    Path("smollm2-135m").mkdir()
    write_config(Path("smollm2-135m"), num_hidden_layers=7)
    assert plan("--model", "smollm2-135m")["layers"] == 7, "a directory goes before a model of its name"


def test_the_decoder_of_a_model_of_several_inputs_is_planned(plan: Plan, tmp_path: Path) -> None:
    text = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 256,
        "torch_dtype": "float32",
        "model_type": "llama",
    }
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}, "text_config": text}))
    given = plan("--model", str(tmp_path))
    assert (given["row_bytes"], given["kv_cache_dtype"], given["kv_scale"]) == (2 * 2 * 256 * 4, "float32", None)


@pytest.mark.parametrize(
    ("options", "row_bytes"),
    [
        (["fp8", "--kv-scale", "head"], 327_680 // 2),
        (["fp8"], 327_680 // 2 + 80 * 32),
        (["int8", "--kv-scale", "token"], 327_680 // 2 + 80 * 32),
        (["int4"], 327_680 // 4 + 80 * 32),
    ],
)
def test_quantised_rows_are_a_part_and_their_scales(
    options: list[str], row_bytes: int, plan: Plan, table: Callable[..., str]
) -> None:
    given = plan(*LARGE, *options, "--memory", "80GiB", "--lengths", "4096")
    assert given["row_bytes"] == row_bytes
    assert (given["kv_cache_dtype"], given["kv_scale"]) == (options[0], options[2] if len(options) > 1 else "token")
    assert given["lengths"][0]["token_bytes"] == 4096 * row_bytes
    assert f"in {options[0]}, scales by {given['kv_scale']}" in table(*LARGE, *options)


def test_a_guard_takes_pages_but_is_no_waste(plan: Plan) -> None:
    arguments = [*LARGE, "fp16", "--memory", "80GiB", "--lengths", "4096"]
    plain, guarded = (plan(*arguments, "--guard-tokens", number)["lengths"][0] for number in ("0", "128"))
    assert guarded["num_pages"] == plain["num_pages"] + 20  # 128 rows of 320 KiB are 40 MiB
    assert guarded["waste_fraction"] == 0
    assert guarded["num_sequences"] < plain["num_sequences"]


def test_a_window_bounds_what_a_sequence_takes(plan: Plan) -> None:
    given = plan(*LARGE, "fp16", "--window", "4096", "--lengths", "8192,100000")
    assert given["longest_sequence_tokens"] is None
    assert given["lengths"][0]["token_bytes"] == given["lengths"][1]["token_bytes"] == 4095 * 327_680


@pytest.mark.parametrize("model", [["--model", "llama-3.1-8b"], [*LARGE, "fp16"]])
def test_lengths_are_planned_up_to_max_tokens(model: list[str], plan: Plan, table: Callable[..., str]) -> None:
    given = plan(*model, "--max-tokens", "10")
    assert [row["num_tokens"] for row in given["lengths"]] == [10]
    assert given["lengths"][0]["num_sequences_reserved"] == 8 * GIB // (10 * given["row_bytes"])
    assert given["lengths_beyond_max_tokens"] == [1024, 4096, 32_768]
    assert table(*model, "--max-tokens", "10").endswith(
        "1,024 and 4,096 and 32,768: more than --max-tokens; 10 tokens planned instead\n"
    )
    assert [row["num_tokens"] for row in plan(*model, "--max-tokens", "2048")["lengths"]] == [1024, 2048]


def test_no_length_is_planned_that_the_model_cannot_have(plan: Plan, table: Callable[..., str]) -> None:
    of_model = ["--model", "smollm2-135m", "--memory", "1GiB"]
    given = plan(*of_model)
    assert given["longest_sequence_tokens"] == given["model_tokens"] == given["max_tokens"] == 8192
    assert [row["num_tokens"] for row in given["lengths"]] == [1024, 4096, 8192]
    assert given["lengths_beyond_max_tokens"] == [32_768]
    text = table(*of_model)
    assert "longest sequence  8,192 tokens, the most that the model can have\n" in text
    assert text.endswith("32,768: more than the model can have; 8,192 tokens planned instead\n")
    scarce = plan(*of_model[:-1], "64MiB", "--lengths", "8192")
    assert scarce["longest_sequence_tokens"] == 32 * PAGE_BYTES // scarce["row_bytes"] < 8192
    assert (scarce["lengths"][0]["num_sequences"], scarce["lengths_beyond_max_tokens"]) == (0, [])


def published(name: str, directory: Path) -> str:
    configs = json.loads((Path(__file__).parents[1] / "fixtures" / "model_configs.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(configs[name]))
    return str(directory)


def test_states_are_counted_beside_rows_and_said_not_to_run(plan: Plan, table: Callable[..., str], tmp_path: Path) -> None:
    """Qwen3-Next: 12 layers of 48 keep rows, and 36 a state of 2 MiB and a convolution's inputs."""
    arguments = ["--model", published("Qwen/Qwen3-Next-80B-A3B", tmp_path), "--kv-cache-dtype", "bf16"]
    given = plan(*arguments, "--lengths", "1024,100000")
    state_pages = -(-given["state_bytes"] // PAGE_BYTES)
    assert (given["layers"], given["row_bytes"], given["state_bytes"]) == (48, 24_576, 77_266_944)
    for row in given["lengths"]:
        assert row["num_pages"] == state_pages + row["num_tokens"] * 24_576 // PAGE_BYTES + bool(row["num_tokens"] % 1024)
    refused = "a model of type qwen3_next cannot be served: it has a state (gated delta rule) in layers 0 to 2, 4 to 6,"
    assert given["not_run"].startswith(refused)
    text = table(*arguments)
    assert "state             77,266,944 bytes (73.7 MiB) of a sequence: gated delta rule in 36 layers\n" in text
    assert text.splitlines()[-1] == f"vmmkv serve refuses this model: {given['not_run']}"


@pytest.mark.parametrize(
    ("name", "not_run"),
    [
        (
            "XiaomiMiMo/MiMo-V2-Flash",
            "keys of 192 elements and values of 128 (kernels on a GPU take one size) in layers 0 to 47; attention sinks",
        ),
        ("openai/gpt-oss-20b", "attention sinks"),
        (
            "google/gemma-4-26B-A4B",
            "heads of 512 elements (kernels on a GPU take up to 256) in layers 5, 11, 17, 23, 29",
        ),
        ("Qwen/Qwen3-30B-A3B", None),
    ],
)
def test_layers_that_the_engine_does_not_run_on_a_gpu_are_named(
    name: str, not_run: str | None, plan: Plan, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    said = plan("--model", published(name, tmp_path))["not_run"]
    assert said is None if not_run is None else re.search(f"cannot be served: it has {re.escape(not_run)}$", said)


MODELOPT = {"quantization": {"quant_algo": "FP8"}, "producer": {"name": "modelopt"}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"model_type": "deepseek_v2"}, "cannot be served: it has latents (kv_lora_rank) in layers 0, 1"),
    "an attention of its own": ({"model_type": "falcon"}, "FalconForCausalLM has an attention of its own"),
    "another one": ({"model_type": "mpt", "expansion_ratio": 4}, "MptForCausalLM has an attention of its own"),
    "no decoder of text": ({"model_type": "qwen2_vl_text"}, "cannot be served: transformers has no decoder of text of this"),
    "weights by an unknown method": ({"quantization_config": MODELOPT}, "are quantised (modelopt), and neither vmmkv nor"),
    "a rotation of an unknown kind": ({"rope_parameters": {"rope_type": "foo"}}, "rope_type in its config.json is 'foo'; tran"),
    "a part of no form": ({"quantization_config": "awq"}, "is 'awq'; wanted an object such as"),
    "end tokens that are none": ({"eos_token_id": "x"}, "Field 'eos_token_id' with value 'x' doesn't match any type"),
    "code of its own": ({"model_type": "internlm2", "auto_map": {"AutoConfig": "own.Own"}}, "needs code of its own (auto_map"),
    "a type of another name": ({"model_type": "kimi_k2"}, "but Transformers does not recognize this architecture"),
}


@pytest.mark.parametrize("name", [*REFUSED, None])
def test_a_plan_says_why_the_engine_refuses_a_model_in_the_same_words(name: str | None, plan: Plan, tmp_path: Path) -> None:
    """The engine refuses before it reads weights: there are none here."""
    pytest.importorskip("transformers")
    from vmmkv_server.engine.loading import ModelSource

    fields, reason = REFUSED[name] if name else ({}, "has no *.safetensors file")
    usual = KNOWN_CONFIGS["llama-3.1-8b"] | {"head_dim": None, "num_hidden_layers": 2}
    given = {key: value for key, value in (usual | fields).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises((UnsupportedModel, ModelUnavailable), match=re.escape(reason)) as refused:
        resolve(str(tmp_path), weights=name is None, tokenizer=False)
        ModelSource(EngineConfig(model=str(tmp_path)), torch.device("cpu"), torch.bfloat16)
    assert plan("--model", str(tmp_path))["not_run"] == (str(refused.value) if name else None)


@pytest.mark.parametrize(
    ("file", "fields", "reason"),
    [
        ("hf_quant_config.json", MODELOPT, "are quantised (modelopt), and neither"),
        ("hf_quant_config.json", ["fp8"], "hf_quant_config.json holds no JSON object but a list"),
        ("generation_config.json", {"eos_token_id": "x"}, "is 'x'; wanted a token id, a list of them, or null"),
    ],
)
def test_files_beside_the_configuration_are_read_for_a_plan(
    file: str, fields: Any, reason: str, plan: Plan, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / file).write_text(json.dumps(fields))
    model = write_config(tmp_path, model_type="llama")
    for given in (model, str(tmp_path / "config.json")):
        assert reason in plan("--model", given)["not_run"]


def test_layers_that_keep_nothing_are_told_from_the_others(plan: Plan, table: Callable[..., str], tmp_path: Path) -> None:
    """Nemotron 3 Nano: of 52 layers 23 keep a state and 6 rows; 23 are experts."""
    model = published("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", tmp_path)
    given = plan("--model", model)
    assert (given["layers"], given["model_layers"]) == (29, 52)
    assert "layers            29 of 52 keep something, in one group\n" in table("--model", model)


def test_a_model_of_states_alone_holds_any_length(plan: Plan, table: Callable[..., str], tmp_path: Path) -> None:
    model = published("state-spaces/mamba2-2.7b", tmp_path)
    given = plan("--model", model)
    assert (given["row_bytes"], given["tokens_per_page"], given["longest_sequence_tokens"]) == (0, None, None)
    assert {row["num_sequences"] for row in given["lengths"]} == {8 * GIB // PAGE_BYTES // 82}
    assert "any length" in table("--model", model)


@pytest.mark.parametrize(
    ("name", "row_bytes", "growing_bytes"),
    [
        ("deepseek-ai/DeepSeek-V3", 70_272, 70_272),
        ("deepseek-ai/DeepSeek-V3.2", 78_336, 78_336),  # 78,324, padded
        ("deepseek-ai/DeepSeek-V4-Flash", 6_912 + 44_032, 6_912),  # 6,880, padded
        ("MiniMaxAI/MiniMax-M3", 137_472, 137_472),
        ("google/gemma-4-26B-A4B", 225_280, 20_480),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 196_608, 49_152),
        ("google/recurrentgemma-9b", 12_288, 0),
    ],
)
def test_latents_index_keys_windows_and_chunks_are_counted(
    name: str, row_bytes: int, growing_bytes: int, plan: Plan, tmp_path: Path
) -> None:
    given = plan("--model", published(name, tmp_path), "--kv-cache-dtype", "bf16", "--memory", "80GiB")
    assert (given["row_bytes"], given["growing_bytes"]) == (row_bytes, growing_bytes)
    assert given["not_run"]


def test_ranks_share_states_and_each_keeps_the_latents(plan: Plan, tmp_path: Path) -> None:
    def of_8(name: str) -> tuple[int, int]:
        given = plan("--model", published(name, tmp_path), "--tensor-parallel-size", "8")
        return given["row_bytes"], given["state_bytes"]

    assert of_8("deepseek-ai/DeepSeek-V3") == (70_272, 0)
    assert of_8("tiiuae/Falcon-H1-7B") == (44 * 1 * 128 * 4, 139_358_208 // 8)


TIERS = ["--host-budget", "256GiB", "--disk-budget", "2TiB"]


@pytest.mark.parametrize(("model", "rate", "break_even"), [("llama-3.1-8b", 41_000, 5.4), ("qwen3-0.6b", 280_000, 32.1)])
def test_a_tier_pays_above_the_bandwidth_at_which_computing_is_as_fast(
    model: str, rate: int, break_even: float, plan: Plan, table: Callable[..., str]
) -> None:
    arguments = ["--model", model, "--prefill-rate", str(rate), *TIERS, "--lengths", "32768,1024"]
    given = plan(*arguments)
    host, disk, computed = given["sources"]
    assert host["held_tokens"] == 256 * GIB // given["row_bytes"] == disk["held_tokens"] // 8
    assert computed["gb_per_s"] == pytest.approx(break_even, rel=0.01)
    for tier in (host, disk):
        assert (tier["seconds"][0] < computed["seconds"][0]) == (tier["gb_per_s"] > computed["gb_per_s"])
        assert tier["seconds"][0] == pytest.approx(32 * tier["seconds"][1]) == pytest.approx(32_768 / tier["tokens_per_s"])
    assert table(*arguments).splitlines()[-1].split()[:4] == ["computed", "-", f"{break_even}", f"{rate:,}"]


def test_of_windows_only_the_rows_that_are_needed_are_loaded(plan: Plan) -> None:
    full, windowed = (plan(*LARGE, "fp16", *TIERS, *window)["sources"][0] for window in ([], ["--window", "1024"]))
    assert windowed["seconds"] == [pytest.approx(full["seconds"][0], rel=0.01)] * 3
    assert plan(*LARGE, "fp16")["sources"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "smollm2-135m", "--host-budget", "8"], "--host-budget 8 has no unit"),
        (["--model", "smollm2-135m", *TIERS, "--bandwidths", "50"], "GB/s of the host and of the disk, such as 50,5"),
        (["--model", "smollm2-135m", *TIERS, "--bandwidths", "50,0"], "--bandwidths '50,0'"),
        (["--model", "smollm2-135m", *TIERS, "--prefill-rate", "-1"], "--prefill-rate -1: tokens a second are more than 0"),
        ([], "--layers, --kv-heads, --head-dim missing"),
        (["--model", "/nowhere"], "--model takes smollm2-135m, llama-3.1-8b, qwen3-0.6b, or a dir"),
        (["--model", "/nowhere", "--layers", "2"], "leave one out"),
        ([*LARGE, "fp16", "--memory", "80"], "--memory 80 has no unit, and as bytes it is less than a page: write 80GiB"),
        ([*LARGE, "fp16", "--memory", "80KB"], "at least 2.0 MiB"),
        ([*LARGE, "fp16", "--memory", "eighty"], "not a size"),
        ([*LARGE, "fp16", "--lengths", "1,x"], "list of lengths"),
        ([*LARGE, "fp16", "--lengths", "0"], "list of lengths"),
        ([*LARGE, "fp16", "--max-tokens", "-1"], "--max-tokens -1: it must be at least 1"),
        ([*LARGE, "fp16", "--max-tokens", "0"], "--max-tokens 0: it must be at least 1"),
        ([*LARGE, "fp16", "--tensor-parallel-size", "0"], "--tensor-parallel-size 0: it must be at least 1"),
        (["--model", "smollm2-135m", "--tensor-parallel-size", "10"], "size 10: this model has 9 attention heads to share"),
        ([*LARGE, "fp16", "--guard-tokens", "-1"], "--guard-tokens -1: it must be at least 0"),
        ([*LARGE, "int3"], "--kv-cache-dtype 'int3' is not known; use auto or one of fp8, int8, int4"),
        ([*LARGE, "fp16", "--kv-scale", "head"], "fp16 has no scales; add --kv-cache-dtype fp8 or int8 or int4"),
        ([*LARGE, "int8", "--kv-scale", "head"], "use --kv-scale token, or --kv-cache-dtype fp8"),
        ([*LARGE, "fp8", "--kv-scale", "row"], "--kv-scale 'row' is not known; use token or head"),
        (["--model", "smollm2-135m", "--max-tokens", "8193"], "--max-tokens 8193 is more than this model's positions reach"),
        (["--layers", "0", *LARGE[2:], "fp16"], "at least 1"),
        (["--layers", "1000000000", *LARGE[2:], "fp16"], "at most 65536"),
        (["--layers", "1000000000", *LARGE[2:], "fp16", "--window", "64"], "at most 65536"),
        (["--layers", "80", "--kv-heads", "8192", "--head-dim", "128"], "more than a page"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_is_right(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--memory", "80GiB", *arguments]) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.startswith("vmmkv plan: ") and shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[1]",
        "[" * 100_000,
        "{}",
        '{"num_hidden_layers": 1000000000, "num_attention_heads": 1}',
        '{"model_type": "gpt2", "n_layer": "two"}',
        '{"model_type": "xlstm", "num_blocks": 2}',
        '{"model_type": "t5"}',
        '{"num_hidden_layers": 2, "num_attention_heads": 4, "layer_types": ["mlp", "mlp"]}',
    ],
)
def test_a_broken_configuration_is_one_line(content: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main(["plan", "--model", str(tmp_path), "--memory", "1GiB"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float64"])
def test_a_type_of_weights_that_kv_cannot_have_asks_for_the_option(
    dtype: str, plan: Plan, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = write_config(tmp_path, torch_dtype=dtype)
    assert main(["plan", "--model", model, "--memory", "1GiB"]) == 1
    assert f"config.json has dtype (torch_dtype) '{dtype}'" in (said := capsys.readouterr().err)
    assert "give --kv-cache-dtype bf16" in said
    assert plan("--model", model, "--kv-cache-dtype", "bf16")["kv_cache_dtype"] == "bfloat16"


@pytest.mark.parametrize(("model_type", "kv_heads"), [("gpt2", 4), ("gpt_bigcode", 1), ("ctrl", 4)])
def test_a_model_whose_configuration_has_names_of_its_own_is_planned(
    model_type: str, kv_heads: int, plan: Plan, tmp_path: Path
) -> None:
    config = {"model_type": model_type, "n_layer": 2, "n_head": 4, "n_embd": 256, "n_positions": 512, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = plan("--model", str(tmp_path))
    assert (given["layers"], given["kv_cache_dtype"], given["max_tokens"]) == (2, "float16", 512)
    assert given["row_bytes"] == 2 * 2 * kv_heads * 64 * 2


def test_a_model_of_a_known_name_is_planned_without_transformers() -> None:
    arguments = ["plan", "--model", "qwen3-0.6b", "--memory", "1GiB"]
    code = f"import sys; from vmmkv.cli.main import main; main({arguments!r}); sys.exit('transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_names_that_only_transformers_knows_are_asked_for_where_it_is_not_installed(
    capsys: pytest.CaptureFixture[str], plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 256}))
    assert main(["plan", "--model", str(tmp_path), "--memory", "1GiB"]) == 1
    assert "pip install '.[hf]', or give --layers, --kv-heads and --head-dim" in capsys.readouterr().err
    given = plan("--model", write_config(tmp_path, model_type="internlm2"))
    assert (given["model_tokens"], given["not_run"]) == (None, None)
    latents = write_config(tmp_path, model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64)
    assert "cannot be served: it has latents (kv_lora_rank) in layers 0 to 27" in plan("--model", latents)["not_run"]
