"""Laws of the options of `vmmkv serve` that the HTTP process alone is told."""

import dataclasses
import os
from pathlib import Path

import pytest

from vmmkv.cli.main import main
from vmmkv.server import launch
from vmmkv.server.config import FrontConfig
from vmmkv.units import MIB

ONE, TWO, ADMIN = "a-key-of-one", "a-key-of-two", "the-key-of-the-administrator"


@pytest.fixture
def fronts(monkeypatch: pytest.MonkeyPatch) -> list[FrontConfig]:
    """What the launcher is called with, in place of launching."""
    given: list[FrontConfig] = []
    monkeypatch.setattr(launch, "run", lambda config, front: given.append(front) or 3)
    return given


def test_without_options_the_defaults_are_those_of_the_config(fronts: list[FrontConfig]) -> None:
    assert main(["serve"]) == 3
    assert fronts == [FrontConfig()]


def test_every_option_reaches_its_field(fronts: list[FrontConfig], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{ONE}\n{TWO}\n")
    (tmp_path / "admin").write_text(f"{ADMIN}\n")
    options = f"--api-key {ONE} --api-key-file {tmp_path}/keys --admin-key-file {tmp_path}/admin"
    options += " --max-queued-requests 0 --max-queued-tokens 5 --max-body-size 1MiB --request-timeout 2.5 --drain-timeout 0"
    options += " --allowed-host a.example --allowed-host b.example"
    assert main(["serve", *options.split(), "--stuck-after", "7"]) == 3
    assert fronts == [
        FrontConfig(
            api_keys=(ONE, TWO),
            admin_key=ADMIN,
            allowed_hosts=("a.example", "b.example"),
            max_queued_requests=0,
            max_queued_tokens=5,
            max_body_bytes=MIB,
            request_timeout_s=2.5,
            drain_timeout_s=0,
            stuck_after_s=7,
        )
    ]
    changed = dataclasses.asdict(fronts[0])
    defaults = dataclasses.asdict(FrontConfig())
    assert [name for name, value in defaults.items() if changed[name] == value] == ["api_key_file", "admin_key_file"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--api-key short", "--api-key has a key of 5 characters"),
        ("--api-key-file ./none", "--api-key-file none cannot be read"),
        (f"--api-key {ONE} --admin-key {ONE}", "--admin-key is one of the API keys"),
        ("--max-queued-requests -1", "at least 0"),
        ("--max-body-size 1B", "--max-body-size is 1 B"),
        ("--request-timeout 0", "--request-timeout 0: wanted a number of seconds above 0"),
        ("--drain-timeout nan", "--drain-timeout nan"),
    ],
)
def test_a_wrong_option_is_one_line_that_says_what_is_right(
    options: str, message: str, fronts: list[FrontConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *options.split()]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert fronts == []


@pytest.mark.parametrize("wrong", ["letmein", "two words of it", "schlüssel"])
def test_a_key_in_a_file_that_cannot_be_used_is_told_by_its_line(
    wrong: str, fronts: list[FrontConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text(f"# ours\n\n{ONE}\n {wrong}\n", encoding="utf-8")
    for option in ("--api-key-file", "--admin-key-file"):
        assert main(["serve", option, f"{tmp_path}/keys"]) == 1
        said = capsys.readouterr().err
        assert f"{option} {tmp_path}/keys, line 4, has a key of {len(wrong)} characters" in said
        assert "8 or more" in said and wrong not in said
    assert fronts == []


@pytest.mark.parametrize("text", ["api_key = 12345678", 'api_key = ["ok", 12345678]', "admin_key = 12345678"])
def test_a_key_of_a_wrong_type_is_in_no_message(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "serve.toml").write_text(text)
    assert main(["serve", "--config", f"{tmp_path}/serve.toml"]) == 1
    said = capsys.readouterr().err
    assert "_key is something else; wanted a" in said and "12345678" not in said


def test_keys_of_the_environment_are_used_and_not_left_there_for_other_processes(
    fronts: list[FrontConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMMKV_API_KEY", ONE)
    monkeypatch.setenv("VMMKV_ADMIN_KEY", ADMIN)
    assert main(["serve"]) == 3
    assert (fronts[0].api_keys, fronts[0].admin_key) == ((ONE,), ADMIN)
    assert not any(key in os.environ.values() for key in (ONE, ADMIN))
