"""Options of `vmmkv serve`: flags, variables and keys of the file become two validated configurations."""

import dataclasses
import os
import pickle
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from vmmkv.cli import serve
from vmmkv.cli.main import main
from vmmkv.units import GIB, MIB
from vmmkv_server.config import OPTIONS, EngineConfig, Option, ServeConfig, make_config, with_flags

launch = pytest.importorskip("vmmkv_server.launch")

VALUES: dict[str, tuple[Any, Any, Any]] = {
    **dict.fromkeys(("model", "kv_holder", "kv_lender"), ("./a", "./b", "./c")),
    **dict.fromkeys(("kv_budget_bytes", "max_body_bytes"), ("1GiB", "2GiB", "3GiB")),
    **dict.fromkeys(("port", "max_tokens", "max_num_seqs", "max_queued_requests", "max_queued_tokens", "seed"), (11, 12, 13)),
    **dict.fromkeys(("request_timeout_s", "drain_timeout_s", "stuck_after_s"), (1.5, 2.5, 3.5)),
    **dict.fromkeys(("api_keys", "admin_key"), ("key-in-flag", "key-in-variable", "key-in-file")),
    "host": ("::1", "0.0.0.0", "::"),
    "device": ("cpu", "cuda", "cuda:1"),
    "dtype": ("float32", "float16", "bfloat16"),
    "max_num_batched_tokens": (1024, 1025, 1026),
    "prefix_cache": (False, True, False),
    "model_impl": ("vmmkv", "transformers", "vmmkv"),
    "load_format": ("dummy", "auto", "dummy"),
    "log_level": ("debug", "warning", "error"),
    "log_format": ("json", "console", "json"),
    "allowed_hosts": ("a.example", "b.example", "c.example"),
    "allowed_origins": ("http://a.example", "https://b.example:8443", "*"),
}
"""What a flag, a variable and a file say here. The files of keys have a test of their own."""
KEYS = ("a-key-of-one", "a-key-of-two")
ADMIN = "the-key-of-the-administrator"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """The configurations that the launcher is called with, in place of launching."""
    configs: list[ServeConfig] = []
    monkeypatch.setattr(launch, "run", lambda config: configs.append(config) or 3)
    return configs


def of_python(option: Option, value: Any) -> Any:
    if option.is_size:
        return int(value.removesuffix("GiB")) * GIB
    return (value,) if option.kind == tuple[str, ...] else value


def flat(config: ServeConfig) -> dict[str, Any]:
    """The fields of both configurations."""
    fields = dataclasses.asdict(config)
    engine: dict[str, Any] = fields.pop("engine")
    return engine | fields


def of_toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


def config_of(field: str) -> type[EngineConfig] | type[ServeConfig]:
    """The configuration that has a field."""
    return EngineConfig if field in EngineConfig.__dataclass_fields__ else ServeConfig


def of_flag(option: Option, value: Any) -> list[str]:
    return [serve.flags(option)[0 if value else 1]] if option.kind is bool else [option.flag, str(value)]


@pytest.mark.parametrize("option", [one for one in OPTIONS if one.field in VALUES], ids=lambda one: one.name)
def test_a_flag_goes_before_a_variable_before_the_file_before_the_default(
    option: Option, launched: list[ServeConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_flag, in_variable, in_file = VALUES[option.field]
    file = tmp_path / "serve.toml"
    file.write_text(f"{option.name} = {of_toml(in_file)}\n")
    main(["serve"])
    main(["serve", "--config", str(file)])
    for flag in ([], of_flag(option, in_flag)):
        monkeypatch.setenv(option.variable, str(in_variable))  # keys are taken out of it
        main(["serve", "--config", str(file), *flag])
    got, defaults = list(map(flat, launched)), flat(ServeConfig())
    expected = [{}, *({option.field: of_python(option, value)} for value in (in_file, in_variable, in_flag))]
    assert got == [defaults | changed for changed in expected]


def test_the_file_itself_can_come_from_the_environment(
    launched: list[ServeConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "serve.toml").write_text('port = 9\nkv_budget = 4194304\nlog_level = "DEBUG"\nstuck_after = 3\n')
    monkeypatch.setenv("VMMKV_CONFIG", str(tmp_path / "serve.toml"))
    assert main(["serve"]) == 3
    assert launched == [
        ServeConfig(engine=EngineConfig(kv_budget_bytes=4 * MIB, log_level="debug"), port=9, stuck_after_s=3.0),
    ]


def test_an_empty_variable_counts_as_absent(launched: list[ServeConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.setenv(option.variable, "")
    assert main(["serve"]) == 3
    assert launched == [ServeConfig()]


def test_a_misspelt_variable_stops_the_server(
    launched: list[ServeConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VMMKV_LOGLEVEL", "debug")
    assert main(["serve"]) == 1
    assert "VMMKV_LOG_LEVEL" in capsys.readouterr().err
    assert launched == []


@pytest.mark.parametrize("text", ["true", "false", "FALSE", "0", "maybe"])
def test_a_switchs_variable_is_true_or_false(
    text: str, launched: list[ServeConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VMMKV_PREFIX_CACHE", text)
    if text == "maybe":
        assert main(["serve"]) == 2
        assert "use true or false" in capsys.readouterr().err
    else:
        assert main(["serve"]) == 3
        assert launched == [ServeConfig(engine=EngineConfig(prefix_cache=text == "true"))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--port 70000", "--port 70000"),
        ("--port -1", "1 to 65535"),
        ("--device gpu", "--device 'gpu' is not known; use auto, cpu, cuda or cuda:0"),
        ("--dtype int8", "--dtype 'int8' is not known; use one of auto, float32, bfloat16, float16"),
        ("--kv-budget 1MiB", "--kv-budget is 1.0 MiB, less than one page of 2.0 MiB"),
        ("--kv-budget lots", "--kv-budget: 'lots' is not a size"),
        ("--kv-events tcp://*:99999", "ports go up to 65535"),
        ("--kv-events 5557", "--kv-events '5557' is no endpoint of ZeroMQ; use tcp://*:5557"),
        ("--kv-events-replay tcp://*:5558", "are for the events of --kv-events: give that too"),
        ("--kv-events tcp://*:5557 --no-prefix-cache", "--kv-events tells of shared prefixes"),
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
        ("--api-key short", "--api-key has a key of 5 characters"),
        ("--api-key-file ./none", "--api-key-file none cannot be read"),
        (f"--api-key {KEYS[0]} --admin-key {KEYS[0]}", "--admin-key is one of the API keys"),
        ("--allowed-host http://a", "--allowed-host 'http://a' is no host's name"),
        ("--allowed-host a.example:80", "--allowed-host 'a.example:80' is no host's name"),
        *(
            (f"--allowed-origin {origin}", f"--allowed-origin '{origin}' is no origin")
            for origin in ("localhost:5173", "http://a/", "http://A.example", "null", "http://a.example/path", "https://*")
        ),
        ("--allowed-host=", "--allowed-host '' is no host's name"),
        ("--max-queued-requests -1", "--max-queued-requests -1: it must be at least 0"),
        ("--max-queued-tokens 0", "at least 1"),
        ("--max-body-size 1B", "--max-body-size is 1 B"),
        ("--request-timeout 0", "--request-timeout 0: wanted a number of seconds above 0"),
        ("--drain-timeout nan", "--drain-timeout nan"),
        ("--drain-timeout -1", "--drain-timeout -1"),
        ("--stuck-after nan", "--stuck-after nan"),
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
    ("text", "message"),
    [
        ("max_seqs = 7", "unknown key max_seqs; did you mean max_num_seqs?"),
        ("max-num-seqs = 7", "unknown key max-num-seqs; did you mean max_num_seqs?"),
        ("zzz = 1", "unknown key zzz; the keys are model, device, dtype"),
        ("[serve]\nport = 1", "unknown key serve"),
        ("kv_budget_bytes = 4", "did you mean kv_budget?"),
        ('port = "8000"', "--port is '8000'; wanted a port's number; --port is from"),
        ("port = true", "--port is True"),
        ("prefix_cache = 1", "--prefix-cache is 1; wanted True or False"),
        ("model = 7", "--model is 7; wanted a text"),
        ("kv_budget = true", "--kv-budget is True; wanted a size"),
        ("kv_budget = 4194304.7", "--kv-budget is 4194304.7; wanted a size"),
        ('kv_budget = "lots"', "--kv-budget: 'lots' is not a size"),
        ("api_key = 12345678", "--api-key is something else; wanted a list of texts"),
        ('api_key = ["ok", 12345678]', "--api-key is something else; wanted a list of texts"),
        ("admin_key = 12345678", "--admin-key is something else; wanted a text"),
        ('stuck_after = "3"', "--stuck-after is '3'; wanted a number"),
        ("port = 70000", "--port 70000"),
        ("port =", "is not TOML"),
        ("max_num_batched_tokens = 8\nmax_num_seqs = 9", "--max-num-batched-tokens is from"),
    ],
)
def test_a_wrong_value_in_a_file_is_one_line_that_names_the_file(
    text: str, message: str, launched: list[ServeConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    assert main(["serve", "--config", str(file)]) == 1
    error = capsys.readouterr().err
    assert message in error and str(file) in error and "12345678" not in error
    assert error.count("\n") == 1
    assert launched == []


def test_a_file_that_does_not_exist_is_one_line(launched: list[ServeConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", "/nowhere/serve.toml"]) == 1
    assert "/nowhere/serve.toml cannot be read: No such file" in capsys.readouterr().err


def test_a_wrong_value_of_the_environment_names_its_variable(
    launched: list[ServeConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("max_tokens=9 is more than this model's positions", "--max-tokens 9 is more than this model's positions"),
        ("device='cuda:9': torch sees 1", "--device 'cuda:9': torch sees 1"),
        ("lower max_num_seqs or max_tokens.", "lower --max-num-seqs or --max-tokens."),
        ("kv_budget_bytes of 4 GiB", "--kv-budget of 4 GiB"),
        ("no model in my_max_tokens/max_tokens/seed=7", "no model in my_max_tokens/max_tokens/seed=7"),
        ("leave prefix_cache=False out", "leave --no-prefix-cache out"),
        ("max_tokens_per_model", "max_tokens_per_model"),
        ("a device, a seed, this port is taken", "a device, a seed, this port is taken"),
    ],
)
def test_messages_of_the_engine_name_flags_on_the_command_line(said: str, shown: str) -> None:
    assert with_flags(said) == shown


@pytest.mark.parametrize("option", OPTIONS, ids=lambda one: one.name)
def test_a_wrong_option_is_an_argument_in_python_and_a_flag_on_the_command_line(option: Option) -> None:
    wrong: Any = "" if isinstance(option.default, str) else -1
    with pytest.raises(ValueError) as raised:
        config_of(option.field)(**{option.field: wrong})
    said = str(raised.value)
    assert said.startswith(option.field) and "--" not in said
    with pytest.raises(ValueError) as raised:
        make_config({option.field: wrong}, {}, None)
    shown = str(raised.value)
    assert shown.startswith(option.flag) and f"{option.field}=" not in shown


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
        config_of(name)(**{name: value})
    assert str(raised.value).startswith(f"{name} is {value!r}; {said}")


def test_options_of_llm_are_the_engines_with_paths_and_dtypes_beside_texts() -> None:
    llm, engine = get_type_hints(pytest.importorskip("vmmkv_server.llm").EngineOptions), get_type_hints(EngineConfig)
    of_servers = {"model", "kv_policy", "kv_events", "kv_events_replay", "kv_events_topic", "log_level", "log_format"}
    assert llm.keys() == engine.keys() - of_servers
    wider = {str | os.PathLike[str] | None: str | None, str | torch.dtype: str}
    assert {name: wider.get(kind, kind) for name, kind in llm.items()} == {name: engine[name] for name in llm}


def test_numbers_may_be_numpys() -> None:
    config = EngineConfig(max_num_seqs=np.int64(4), kv_budget_bytes=np.int64(64 * MIB))
    assert (type(config.max_num_seqs), type(config.kv_budget_bytes)) == (int, int)


def test_a_config_is_frozen_and_can_be_sent_to_another_process() -> None:
    config: Any = ServeConfig(port=1)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 2


def test_keys_come_from_repeated_flags_and_from_files(launched: list[ServeConfig], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"# ours\n\n{KEYS[0]}\n{KEYS[1]}\n")
    (tmp_path / "admin").write_text(f"{ADMIN}\n")
    options = f"--api-key {KEYS[0]} --api-key {KEYS[1]} --api-key-file {tmp_path}/keys --admin-key-file {tmp_path}/admin"
    main(["serve", *options.split(), "--drain-timeout", "0"])
    assert launched[0] == ServeConfig(api_keys=KEYS, admin_key=ADMIN, drain_timeout_s=0)


@pytest.mark.parametrize("wrong", ["letmein", "two words of it", "schlüssel"])
def test_a_key_in_a_file_that_cannot_be_used_is_named_by_its_line(
    wrong: str, launched: list[ServeConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text(f"# ours\n\n{KEYS[0]}\n {wrong}\n", encoding="utf-8")
    for option in ("--api-key-file", "--admin-key-file"):
        assert main(["serve", option, f"{tmp_path}/keys"]) == 1
        said = capsys.readouterr().err
        assert f"{option} {tmp_path}/keys, line 4, has a key of {len(wrong)} characters" in said
        assert "8 or more" in said and wrong not in said
    assert launched == []


@pytest.mark.parametrize(("content", "said"), [(b"# none\n", "has no key in it"), (b"a-key-\xff", "is not UTF-8")])
def test_a_file_that_has_no_keys_is_named(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_bytes(content)
    assert main(["serve", "--admin-key-file", f"{tmp_path}/keys"]) == 1
    assert f"--admin-key-file {tmp_path}/keys {said}" in capsys.readouterr().err


def test_keys_do_not_stay_in_the_environment(launched: list[ServeConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMMKV_API_KEY", KEYS[0])
    monkeypatch.setenv("VMMKV_ADMIN_KEY", ADMIN)
    assert main(["serve"]) == 3
    assert (launched[0].api_keys, launched[0].admin_key) == (KEYS[:1], ADMIN)
    assert not any(key in os.environ.values() for key in (KEYS[0], ADMIN))


@pytest.mark.parametrize("columns", ["80", "200"])
def test_help_has_every_option_with_its_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "A flag overrides a variable, and a variable overrides the file" in shown
    for option in OPTIONS:
        assert option.flag in shown and option.variable in shown


@pytest.mark.parametrize("command", [[], ["serve"], ["plan"], ["fetch"], ["chat"]])
def test_every_command_has_help_with_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    assert f"vmmkv {' '.join(command)}" in capsys.readouterr().out.partition("examples:")[2]


def test_the_version_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("vmmkv ")


def test_the_command_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    bare = "".join(capsys.readouterr())  # releases of typer differ in the stream
    assert main(["--help"]) == 0
    assert bare.strip() == capsys.readouterr().out.strip()


@pytest.mark.parametrize("arguments", [["play"], ["serve", "--port", "x"], ["plan"]])
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "Usage: vmmkv" in capsys.readouterr().err
