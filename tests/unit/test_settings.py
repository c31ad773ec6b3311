"""`vmmkv serve`: from options to a validated ServeConfig, handed to the launcher."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from vmmkv.cli.main import main
from vmmkv.server.config import ServeConfig
from vmmkv.units import MIB

launch = pytest.importorskip("vmmkv.server.launch")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """What the launcher is called with, in place of launching."""
    configs: list[ServeConfig] = []
    monkeypatch.setattr(launch, "run", lambda config, front: configs.append(config) or 3)
    return configs


def test_without_options_the_defaults_are_those_of_the_config(launched: list[ServeConfig]) -> None:
    assert main(["serve"]) == 3
    assert launched == [ServeConfig()]
    assert (launched[0].host, launched[0].model) == ("127.0.0.1", "smollm2-135m")


def test_every_option_reaches_its_field(launched: list[ServeConfig]) -> None:
    options = "--model ./m --host 0.0.0.0 --port 0 --device cuda:1 --dtype float16 --kv-budget 512MiB --max-tokens 99"
    options += " --max-num-seqs 7 --max-num-batched-tokens 640 --model-impl transformers --load-format dummy --seed 5"
    main(["serve", *options.split(), "--no-prefix-cache", "--log-level", "debug", "--log-format", "json"])
    assert launched == [
        ServeConfig(
            model="./m",
            host="0.0.0.0",
            port=0,
            device="cuda:1",
            dtype="float16",
            kv_budget_bytes=512 * MIB,
            max_tokens=99,
            max_num_seqs=7,
            max_num_batched_tokens=640,
            prefix_cache=False,
            model_impl="transformers",
            load_format="dummy",
            seed=5,
            log_level="debug",
            log_format="json",
        )
    ]
    changed = dataclasses.asdict(launched[0])
    assert all(changed[name] != value for name, value in dataclasses.asdict(ServeConfig()).items())


def test_the_log_level_comes_from_the_environment_unless_it_is_given(
    launched: list[ServeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMMKV_LOG_LEVEL", "warning")
    main(["serve"])
    main(["serve", "--log-level", "error"])
    assert [config.log_level for config in launched] == ["warning", "error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--port 70000", "--port 70000"),
        ("--port -1", "1 to 65535"),
        ("--device gpu", "--device 'gpu' is not known; use auto, cpu, cuda or cuda:0"),
        ("--dtype int8", "auto, float32, bfloat16, float16"),
        ("--kv-budget 1MiB", "--kv-budget is 1.0 MiB, less than one page of 2.0 MiB"),
        ("--kv-budget lots", "not a size"),
        ("--max-tokens 1", "--max-tokens 1: a sequence needs at least 2"),
        ("--max-num-seqs 0", "at least 1"),
        ("--max-num-batched-tokens 255", "is less than --max-num-seqs 256: each"),
        ("--max-num-batched-tokens 255", "raise it to 256 or lower --max-num-seqs to 255"),
        ("--max-num-batched-tokens 0 --max-num-seqs 2", "raise it to 2 or lower --max-num-seqs to 1"),
        ("--model-impl torch", "auto, vmmkv, transformers"),
        ("--load-format gguf", "auto, dummy"),
        ("--seed -1", "0 to 2**63 - 1"),
        ("--log-level loud", "debug, info, warning, error"),
        ("--model=", "--model '' is empty"),
        ("--host=", "127.0.0.1"),
    ],
)
def test_a_wrong_option_is_one_line_that_says_what_is_right(
    options: str, message: str, launched: list[ServeConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *options.split()]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert launched == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kv_budget_bytes", "4GiB", "wanted a number of bytes, such as 4 * vmmkv.GIB, or None"),
        ("kv_budget_bytes", 4e9, "wanted a number of bytes"),
        ("max_num_seqs", "4", "wanted a number of sequences"),
        ("max_num_seqs", None, "wanted a number of sequences"),
        ("max_tokens", True, "wanted a number of tokens, or None"),
        ("seed", "x", "wanted an integer"),
        ("port", 80.0, "wanted a port's number"),
        ("prefix_cache", "no", "wanted True or False"),
        ("model", None, "wanted a text"),
        ("device", 0, "wanted a text"),
    ],
)
def test_an_option_of_a_wrong_type_is_named_with_what_is_wanted(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError) as raised:
        ServeConfig(**{name: value})
    assert str(raised.value).startswith(f"{name} is {value!r}; {said}")


def test_numbers_may_be_numpys() -> None:
    config = ServeConfig(max_num_seqs=np.int64(4), kv_budget_bytes=np.int64(64 * MIB))
    assert (type(config.max_num_seqs), type(config.kv_budget_bytes)) == (int, int)


def test_a_misspelt_variable_stops_the_server(
    launched: list[ServeConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VMMKV_LOGLEVEL", "debug")
    assert main(["serve"]) == 1
    assert "VMMKV_LOG_LEVEL" in capsys.readouterr().err
    assert launched == []


def test_a_config_is_frozen_and_can_be_sent_to_another_process() -> None:
    config: Any = ServeConfig(port=1)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 2


@pytest.mark.parametrize("command", [[], ["serve"], ["plan"], ["fetch"], ["chat"]])
def test_help_with_an_example_is_there_for_every_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    assert f"vmmkv {' '.join(command)}" in capsys.readouterr().out.partition("examples:")[2]


def test_the_version_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("vmmkv ")


def test_the_command_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    bare = "".join(capsys.readouterr())  # which of both streams has it, differs between releases of typer
    assert main(["--help"]) == 0
    assert bare.strip() == capsys.readouterr().out.strip()


@pytest.mark.parametrize("arguments", [["play"], ["serve", "--port", "x"], ["plan"]])
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "Usage: vmmkv" in capsys.readouterr().err
