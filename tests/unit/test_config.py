"""The environment: one reader, which rejects what it does not know."""

from pathlib import Path

import pytest

from vmmkv.config import read_environment


def test_defaults_follow_the_xdg_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert read_environment({}) == Path("/home/me/.cache/vmmkv")
    assert read_environment({"XDG_CACHE_HOME": "/var/cache"}) == Path("/var/cache/vmmkv")
    assert read_environment({"XDG_CACHE_HOME": "relative"}) == Path("/home/me/.cache/vmmkv")


def test_own_variables_win_and_empty_ones_count_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path = read_environment({"VMMKV_CACHE_DIR": "~/models", "XDG_CACHE_HOME": "/var/cache"})
    assert path == Path("/home/me/models")
    assert read_environment({"VMMKV_CACHE_DIR": ""}) == read_environment({})


def test_an_unknown_variable_is_an_error_that_names_the_nearest_or_all() -> None:
    with pytest.raises(ValueError, match=r"variable VMMKV_CACHEDIR; did you mean VMMKV_CACHE_DIR\?"):
        read_environment({"VMMKV_CACHEDIR": "/x", "HOME": "/root"})
    with pytest.raises(ValueError, match="variable VMMKV_Z; vmmkv knows VMMKV_CACHE_DIR"):
        read_environment({"VMMKV_Z": "/x"})


def test_a_variable_that_is_read_elsewhere_is_ignored() -> None:
    assert read_environment({"VMMKV_PORT": "x"}, others=["VMMKV_PORT"]) == read_environment({})
    with pytest.raises(ValueError, match=r"VMMKV_PROT; did you mean VMMKV_PORT\?"):
        read_environment({"VMMKV_PROT": "1"}, others=["VMMKV_PORT"])


def test_a_value_that_cannot_be_used_is_an_error_that_says_what_can() -> None:
    with pytest.raises(ValueError, match=r"VMMKV_CACHE_DIR.*here.*absolute"):
        read_environment({"VMMKV_CACHE_DIR": "here"})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VMMKV_CACHE_DIR", str(tmp_path))
    assert read_environment() == tmp_path
