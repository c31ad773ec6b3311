"""Options of `vmmkv serve`: each is a flag, a variable and a key of a file, in this order."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from vmmkv.cli import serve
from vmmkv.cli.main import main
from vmmkv.server.config import (
    OPTIONS,
    VARIABLES,
    FrontConfig,
    Option,
    ServeConfig,
    _option,
    make_configs,
    read_file,
    with_flags,
)
from vmmkv.units import GIB, MIB

launch = pytest.importorskip("vmmkv.server.launch")

OTHERS: dict[str, tuple[Any, ...]] = {
    "model": ("./a", "./b", "./c"),
    "host": ("::1", "0.0.0.0", "::"),
    "port": (1, 2, 3),
    "device": ("cpu", "cuda", "cuda:1"),
    "dtype": ("float32", "float16", "bfloat16"),
    "kv_budget_bytes": ("1GiB", "2GiB", "3GiB"),
    "max_tokens": (11, 12, 13),
    "max_num_seqs": (21, 22, 23),
    "max_num_batched_tokens": (1024, 1025, 1026),
    "prefix_cache": (False, True, False),
    "model_impl": ("vmmkv", "transformers", "vmmkv"),
    "load_format": ("dummy", "auto", "dummy"),
    "seed": (1, 2, 3),
    "log_level": ("debug", "warning", "error"),
    "log_format": ("json", "console", "json"),
    "max_queued_requests": (31, 32, 33),
    "max_queued_tokens": (41, 42, 43),
    "max_body_bytes": ("1GiB", "2GiB", "3GiB"),
    "request_timeout_s": (1.5, 2.5, 3.5),
    "drain_timeout_s": (4.5, 5.5, 6.5),
    "stuck_after_s": (7.5, 8.5, 9.5),
}
"""Of each option what a flag, a variable and a file say here."""


Configs = tuple[ServeConfig, FrontConfig]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Configs]:
    configs: list[Configs] = []
    monkeypatch.setattr(launch, "run", lambda config, front: configs.append((config, front)) or 0)
    return configs


def configs_of(**values: Any) -> Configs:
    """Both, with these values in the one that has them."""
    fields = [field.name for field in dataclasses.fields(ServeConfig)]
    of_engine = {name: value for name, value in values.items() if name in fields}
    return ServeConfig(**of_engine), FrontConfig(**{name: values[name] for name in values.keys() - of_engine.keys()})


def toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


def as_flags(option: Option, value: Any) -> list[str]:
    if option.kind is bool:
        return [serve.flags(option)[0 if value else 1]]
    return [option.flag, str(value)]


def expected(option: Option, value: Any) -> Any:
    return int(value.removesuffix("GiB")) * GIB if option.is_size else value


def test_there_is_an_option_for_every_field_with_words_and_no_other() -> None:
    fields = [field.name for config in (ServeConfig, FrontConfig) for field in dataclasses.fields(config)]
    assert [one.field for one in OPTIONS] == fields
    assert sorted(serve.HELP) == sorted(fields)


@pytest.mark.parametrize("option", [one for one in OPTIONS if one.field in OTHERS], ids=lambda one: one.name)
@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)))
def test_a_flag_goes_before_a_variable_that_before_the_file_that_before_the_default(
    option: Option,
    given: tuple[bool, bool, bool],
    launched: list[Configs],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    file = tmp_path / "serve.toml"
    in_flag, in_variable, in_file = OTHERS[option.field]
    file.write_text(f"{option.name} = {toml(in_file)}\n" if given[2] else "")
    if given[1]:
        monkeypatch.setenv(option.variable, str(in_variable))
    assert main(["serve", "--config", str(file), *(as_flags(option, in_flag) if given[0] else [])]) == 0
    wins = next((value for value, is_given in zip(OTHERS[option.field], given, strict=True) if is_given), None)
    assert launched == [configs_of(**({} if wins is None else {option.field: expected(option, wins)}))]


def test_the_file_itself_can_come_from_the_environment(
    launched: list[Configs], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "serve.toml").write_text('port = 9\nkv_budget = 4194304\nlog_level = "DEBUG"\n')
    monkeypatch.setenv("VMMKV_CONFIG", str(tmp_path / "serve.toml"))
    assert main(["serve"]) == 0
    assert launched == [configs_of(port=9, kv_budget_bytes=4 * MIB, log_level="debug")]


def test_an_empty_variable_counts_as_absent(launched: list[Configs], monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.setenv(option.variable, "")
    assert main(["serve"]) == 0
    assert launched == [configs_of()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_seqs = 7", "unknown key max_seqs; did you mean max_num_seqs?"),
        ("max-num-seqs = 7", "unknown key max-num-seqs; did you mean max_num_seqs?"),
        ("zzz = 1", "unknown key zzz; the keys are model, host, port"),
        ("[serve]\nport = 1", "unknown key serve"),
        ("kv_budget_bytes = 4", "did you mean kv_budget?"),
        ('port = "8000"', "port is '8000'; wanted a whole number"),
        ("port = true", "port is True; wanted a whole number"),
        ("prefix_cache = 1", "prefix_cache is 1; wanted true or false"),
        ("model = 7", "model is 7; wanted a text"),
        ("kv_budget = 1.5", 'kv_budget is 1.5; wanted a size, such as "4GiB"'),
        ('kv_budget = "lots"', "not a size"),
        ("port = 70000", "--port 70000"),
        ("port =", "is not TOML"),
        ("max_num_batched_tokens = 8\nmax_num_seqs = 9", "--max-num-batched-tokens is from"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_that_names_the_file(
    text: str, message: str, launched: list[Configs], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    assert main(["serve", "--config", str(file)]) == 1
    error = capsys.readouterr().err
    assert message in error and str(file) in error
    assert error.count("\n") == 1
    assert launched == []


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("max_tokens=9 is more than this model's positions", "--max-tokens 9 is more than this model's positions"),
        ("device='cuda:9': torch sees 1", "--device 'cuda:9': torch sees 1"),
        ("lower max_num_seqs or max_tokens.", "lower --max-num-seqs or --max-tokens."),
        ("kv_budget_bytes of 4 GiB", "--kv-budget of 4 GiB"),
        ("no model in my_max_tokens/max_tokens/seed=7", "no model in my_max_tokens/max_tokens/seed=7"),
        ("max_tokens_per_model", "max_tokens_per_model"),
        ("a device, a seed, a port", "a device, a seed, a port"),
    ],
)
def test_what_the_engine_says_of_its_options_has_their_flags_on_the_command_line(said: str, shown: str) -> None:
    assert with_flags(said) == shown


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ServeConfig) if field.name != "prefix_cache"])
def test_an_option_that_cannot_be_is_an_argument_in_python_and_a_flag_on_the_command_line(field: str) -> None:
    (option,) = (one for one in OPTIONS if one.field == field)
    wrong: Any = "" if isinstance(option.default, str) else -1
    with pytest.raises(ValueError) as raised:
        ServeConfig(**{field: wrong})
    said = str(raised.value)
    assert said.startswith(field) and "--" not in said
    with pytest.raises(ValueError) as raised:
        make_configs({field: wrong}, {}, None)
    shown = str(raised.value)
    assert shown.startswith(f"{option.flag} ") and f"{field}=" not in shown


def test_a_file_that_is_not_there_is_one_line(launched: list[Configs], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", "/nowhere/serve.toml"]) == 1
    assert "/nowhere/serve.toml cannot be read: No such file" in capsys.readouterr().err


def test_a_wrong_value_of_the_environment_names_its_variable(
    launched: list[Configs], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VMMKV_KV_BUDGET", "lots")
    assert main(["serve"]) == 1
    assert "--kv-budget is from VMMKV_KV_BUDGET" in capsys.readouterr().err
    assert main(["serve", "--kv-budget", "few"]) == 1
    assert "VMMKV_KV_BUDGET" not in capsys.readouterr().err
    monkeypatch.setenv("VMMKV_KV_BUDGET", "1GiB")
    monkeypatch.setenv("VMMKV_PORT", "70000")
    assert main(["serve"]) == 1
    error = capsys.readouterr().err
    assert "--port is from VMMKV_PORT" in error and "VMMKV_KV_BUDGET" not in error


@pytest.mark.parametrize("columns", ["80", "200"])
def test_help_says_where_an_option_can_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "A flag goes before a variable, that before the file" in shown
    for option in OPTIONS:
        assert option.flag in shown and option.variable in shown


def test_a_new_field_of_any_kind_is_an_option() -> None:
    @dataclasses.dataclass
    class Later:
        deadline_s: float | None = None
        pool_bytes: int = 7
        keys: tuple[str, ...] = ()

    deadline, size, keys = (
        _option(field, kind)
        for field, kind in zip(dataclasses.fields(Later), [float | None, int, tuple[str, ...]], strict=True)
    )
    assert (deadline.flag, deadline.variable, deadline.of_file(3)) == ("--deadline", "VMMKV_DEADLINE", 3.0)
    assert (size.flag, size.value("2MiB"), size.default) == ("--pool", 2 * MIB, 7)
    assert keys.value(["a", "b"]) == ("a", "b") and keys.of_file(["a"]) == keys.of_file("a") == ["a"]
    with pytest.raises(ValueError, match="wanted a list of texts"):
        keys.of_file(["a", 1])
    with pytest.raises(TypeError, match="options are"):
        _option(dataclasses.fields(Later)[0], dict[str, str])


def test_reading_and_merging_need_no_command_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("port = 9\nseed = 3\n")
    assert read_file(file) == {"port": 9, "seed": 3}
    assert make_configs({"seed": 4}, {}, file) == configs_of(port=9, seed=4)
    assert len(set(VARIABLES)) == len(VARIABLES)
