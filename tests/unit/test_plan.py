"""`vmmkv plan`: the known values, the table, the errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.suites.serve.models import MODELS
from vmmkv.cli.main import main
from vmmkv.cli.plan import KNOWN_CONFIGS
from vmmkv.server.models import KNOWN_MODELS
from vmmkv.units import GIB, PAGE_BYTES

LARGE = ["plan", "--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--kv-dtype", "fp16"]


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def write_config(directory: Path, **config: Any) -> str:
    base = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 1024}
    (directory / "config.json").write_text(json.dumps({**base, **config}))
    return str(directory)


def test_the_known_values_of_80_layers(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, *LARGE, "--memory", "320GiB", "--lengths", "4096,100000")
    of_4096, of_100000 = plan["lengths"]
    assert plan["row_bytes"] == 327_680
    assert of_4096["token_bytes"] == 1_342_177_280
    assert of_4096["num_sequences"] == 256
    assert of_4096["num_pages"] * PAGE_BYTES * 256 == 320 * GIB
    assert of_100000["token_bytes"] == 32_768_000_000
    assert plan["longest_sequence_tokens"] == 320 * GIB // 327_680


def test_the_table_says_what_the_numbers_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LARGE, "--memory", "320GiB", "--lengths", "4096,100000"]) == 0
    table = capsys.readouterr().out
    assert "327,680 bytes (320.0 KiB) in float16" in table
    assert "6.4 in 2.0 MiB" in table
    assert "163,840 pages" in table
    row = next(line for line in table.splitlines() if line.strip().startswith("4,096"))
    assert row.split() == ["4,096", "1.2", "GiB", "640", "256", "0.0%", "10", "95.9%"]


def test_waste_is_below_a_page_for_each_sequence_and_group(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = write_config(
        tmp_path, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=512
    )
    plan = plan_json(
        capsys, "plan", "--model", model, "--memory", "4GiB", "--lengths", "1,100,1000,10000", "--kv-dtype", "bf16"
    )
    assert plan["groups"] == 2
    for row in plan["lengths"]:
        wasted_bytes = row["waste_fraction"] * row["num_pages"] * PAGE_BYTES
        assert 0 <= wasted_bytes < 3 * PAGE_BYTES  # one page at each end of a group, and the full group starts on a page
        assert row["num_sequences"] == 2048 // row["num_pages"]


def test_a_model_directory_gives_geometry_dtype_and_limit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = write_config(tmp_path, dtype="bfloat16", max_position_embeddings=40_960)
    plan = plan_json(capsys, "plan", "--model", model, "--memory", "8GiB")
    assert (plan["row_bytes"], plan["kv_dtype"], plan["max_tokens"]) == (114_688, "bfloat16", 40_960)
    assert [row["num_tokens"] for row in plan["lengths"]] == [1024, 4096, 32768]
    assert plan_json(capsys, "plan", "--model", f"{model}/config.json", "--memory", "8GiB") == plan


def test_models_that_can_be_fetched_or_are_measured_are_planned_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert KNOWN_CONFIGS.keys() == KNOWN_MODELS.keys() | MODELS.keys()
    for name, served in MODELS.items():
        (tmp_path / "config.json").write_text(json.dumps(served.config))
        by_name = plan_json(capsys, "plan", "--model", name, "--memory", "8GiB", "--kv-dtype", "bf16")
        assert by_name == plan_json(capsys, "plan", "--model", ".", "--memory", "8GiB", "--kv-dtype", "bf16")


def test_a_directory_goes_before_a_model_of_its_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2-135m").mkdir()
    write_config(Path("smollm2-135m"), num_hidden_layers=7)
    assert plan_json(capsys, "plan", "--model", "smollm2-135m", "--memory", "8GiB")["layers"] == 7


def test_the_decoder_of_a_model_of_several_inputs_is_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}, "text_config": text}))
    plan = plan_json(capsys, "plan", "--model", str(tmp_path), "--memory", "1GiB")
    assert (plan["row_bytes"], plan["kv_dtype"]) == (2 * 2 * 256 * 4, "float32")


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
    options: list[str], row_bytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_json(capsys, *LARGE[:-1], *options, "--memory", "80GiB", "--lengths", "4096")
    assert plan["row_bytes"] == row_bytes
    assert (plan["kv_dtype"], plan["kv_scale"]) == (options[0], options[2] if len(options) > 1 else "token")
    assert plan["lengths"][0]["token_bytes"] == 4096 * row_bytes
    assert main([*LARGE[:-1], *options, "--memory", "80GiB"]) == 0
    assert f"in {options[0]}, scales by {plan['kv_scale']}" in capsys.readouterr().out


def test_what_is_not_quantised_has_no_scales(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = write_config(tmp_path, dtype="float32")
    plan = plan_json(capsys, "plan", "--model", model, "--kv-dtype", "auto", "--memory", "8GiB")
    assert (plan["kv_dtype"], plan["kv_scale"]) == ("float32", None)
    assert plan_json(capsys, "plan", "--model", model, "--memory", "8GiB") == plan
    quantised = plan_json(capsys, "plan", "--model", model, "--memory", "8GiB", "--kv-dtype", "int4")
    assert quantised["row_bytes"] == 28 * 2 * 8 * (64 + 2)


def test_a_guard_takes_pages_but_is_no_waste(capsys: pytest.CaptureFixture[str]) -> None:
    plain = plan_json(capsys, *LARGE, "--memory", "80GiB", "--lengths", "4096")["lengths"][0]
    guarded = plan_json(capsys, *LARGE, "--memory", "80GiB", "--lengths", "4096", "--guard-tokens", "128")["lengths"][0]
    assert guarded["num_pages"] == plain["num_pages"] + 20  # 128 rows of 320 KiB are 40 MiB
    assert guarded["waste_fraction"] == 0
    assert guarded["num_sequences"] < plain["num_sequences"]


def test_a_window_bounds_what_a_sequence_takes(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, *LARGE, "--memory", "80GiB", "--window", "4096", "--lengths", "8192,100000")
    assert plan["longest_sequence_tokens"] is None
    assert plan["lengths"][0]["token_bytes"] == plan["lengths"][1]["token_bytes"] == 4095 * 327_680


def test_a_length_beyond_the_maximum_cannot_be_reserved(capsys: pytest.CaptureFixture[str]) -> None:
    row = plan_json(capsys, *LARGE, "--memory", "80GiB", "--max-tokens", "4096", "--lengths", "8192")["lengths"][0]
    assert row["num_sequences_reserved"] is None
    assert main([*LARGE, "--memory", "80GiB", "--max-tokens", "4096", "--lengths", "8192"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("-")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--memory", "80GiB"], "--layers, --kv-heads, --head-dim missing"),
        (
            ["plan", "--memory", "80GiB", "--model", "/nowhere"],
            "--model takes smollm2-135m, llama-3.1-8b, qwen3-0.6b, or a dir",
        ),
        (["plan", "--memory", "80GiB", "--model", "/nowhere", "--layers", "2"], "leave one out"),
        ([*LARGE, "--memory", "80"], "at least 2.0 MiB"),
        ([*LARGE, "--memory", "eighty"], "not a size"),
        ([*LARGE, "--memory", "80GiB", "--lengths", "1,x"], "list of lengths"),
        ([*LARGE, "--memory", "80GiB", "--lengths", "0"], "list of lengths"),
        ([*LARGE, "--memory", "80GiB", "--max-tokens", "-1"], "--max-tokens -1: it must be at least 1"),
        ([*LARGE, "--memory", "80GiB", "--max-tokens", "0"], "--max-tokens 0: it must be at least 1"),
        ([*LARGE, "--memory", "80GiB", "--guard-tokens", "-1"], "--guard-tokens -1: it must be at least 0"),
        ([*LARGE[:-1], "int3", "--memory", "80GiB"], "--kv-dtype 'int3' is not known; use auto or one of fp8, int8, int4"),
        ([*LARGE, "--memory", "80GiB", "--kv-scale", "head"], "fp16 has no scales; add --kv-dtype fp8 or int8 or int4"),
        ([*LARGE[:-1], "int8", "--memory", "80GiB", "--kv-scale", "head"], "use --kv-scale token, or --kv-dtype fp8"),
        ([*LARGE[:-1], "fp8", "--memory", "80GiB", "--kv-scale", "row"], "--kv-scale 'row' is not known; use token or head"),
        (
            ["plan", "--model", "smollm2-135m", "--memory", "1GiB", "--max-tokens", "8193"],
            "--max-tokens 8193 is more than this model's positions reach, 8192",
        ),
        (["plan", "--layers", "0", "--kv-heads", "8", "--head-dim", "128", "--memory", "1GiB"], "at least 1"),
        (["plan", "--layers", "1000000000", "--kv-heads", "8", "--head-dim", "128", "--memory", "1GiB"], "at most 65536"),
        ([*LARGE[:1], "--layers", "1000000000", *LARGE[3:], "--window", "64", "--memory", "1GiB"], "at most 65536"),
        (["plan", "--layers", "80", "--kv-heads", "64", "--head-dim", "256", "--memory", "1GiB"], "more than a page"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_is_right(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.startswith("vmmkv plan: ")
    assert shown.out == ""


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[1]",
        "{}",
        '{"num_hidden_layers": 1000000000, "num_attention_heads": 1}',
        '{"model_type": "gpt2", "n_layer": "two"}',
        '{"model_type": "mamba", "num_hidden_layers": 2}',
    ],
)
def test_a_broken_configuration_is_one_line(content: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main(["plan", "--model", str(tmp_path), "--memory", "1GiB"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("model_type", "kv_heads"), [("gpt2", 4), ("gpt_bigcode", 1), ("ctrl", 4)])
def test_a_model_whose_configuration_has_names_of_its_own_is_planned(
    model_type: str, kv_heads: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {"model_type": model_type, "n_layer": 2, "n_head": 4, "n_embd": 256, "n_positions": 512, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_json(capsys, "plan", "--model", str(tmp_path), "--memory", "1GiB")
    assert (plan["layers"], plan["kv_dtype"], plan["max_tokens"]) == (2, "float16", 512)
    assert plan["row_bytes"] == 2 * 2 * kv_heads * 64 * 2


def test_a_configuration_with_the_usual_names_is_planned_without_transformers(tmp_path: Path) -> None:
    model = write_config(tmp_path, model_type="qwen3", max_position_embeddings=40_960)
    code = f"import sys; from vmmkv.cli.main import main; main({['plan', '--model', model, '--memory', '1GiB']!r})"
    run = subprocess.run(
        [sys.executable, "-c", f"{code}; sys.exit('transformers' in sys.modules)"], capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_no_length_is_planned_that_the_model_cannot_have(capsys: pytest.CaptureFixture[str]) -> None:
    of_model = ["plan", "--model", "smollm2-135m", "--memory", "1GiB"]
    plan = plan_json(capsys, *of_model)
    assert plan["longest_sequence_tokens"] == plan["model_tokens"] == plan["max_tokens"] == 8192
    assert [row["num_tokens"] for row in plan["lengths"]] == [1024, 4096, 8192]
    assert plan["lengths_beyond_model"] == [32_768]
    assert main(of_model) == 0
    table = capsys.readouterr().out
    assert "longest sequence  8,192 tokens, the most that the model can have\n" in table
    assert table.endswith("32,768: more than the model can have; 8,192 tokens are planned instead\n")
    scarce = plan_json(capsys, *of_model[:-1], "64MiB", "--lengths", "8192")
    assert scarce["longest_sequence_tokens"] == 32 * PAGE_BYTES // scarce["row_bytes"] < 8192
    assert (scarce["lengths"][0]["num_sequences"], scarce["lengths_beyond_model"]) == (0, [])


def test_windows_do_not_lengthen_what_the_model_can_have(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = write_config(tmp_path, sliding_window=512, max_position_embeddings=40_960)
    assert plan_json(capsys, "plan", "--model", model, "--memory", "8GiB")["longest_sequence_tokens"] == 40_960


def test_names_that_only_transformers_knows_are_asked_for_where_it_is_not_installed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 256}))
    assert main(["plan", "--model", str(tmp_path), "--memory", "1GiB"]) == 1
    assert "pip install '.[hf]', or give --layers, --kv-heads and --head-dim" in capsys.readouterr().err
    model = write_config(tmp_path, model_type="gpt_neox")
    assert plan_json(capsys, "plan", "--model", model, "--memory", "1GiB")["model_tokens"] is None
