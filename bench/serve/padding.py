"""A real tokenizer with as many tokens as a model has logits: random weights name any of them, and text is made of all."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any, Final

SOURCE: Final = "smollm2-135m"
"""The model whose tokenizer is taken, where no file is named."""

_DIGITS: Final = 8
_SEED: Final = 0
_LONGEST: Final = 12
"""Characters of a token that others are made of: two together are as long as the long words of large vocabularies."""


def tokenizer_file(named: Path | None) -> Path:
    """The tokenizer.json that was named, or SOURCE's. Nothing is fetched: what measures does not wait for a network.

    Raises: ValueError if there is no such file, naming what would work.
    """
    if named is not None:
        if not named.is_file():
            raise ValueError(f"--tokenizer {named} is no file; name a tokenizer.json, such as that of {SOURCE}")
        return named
    from vmmkv.config import read_environment
    from vmmkv.server.config import VARIABLES
    from vmmkv.server.models import KNOWN_MODELS, manifest_problem, model_dir  # the other suites need no server

    directory = model_dir(KNOWN_MODELS[SOURCE], read_environment(others=VARIABLES).cache_dir)
    problem = manifest_problem(directory, KNOWN_MODELS[SOURCE]) if directory.is_dir() else "it is not there"
    if problem is not None:
        raise ValueError(
            f"a tokenizer is needed, and that of {SOURCE} cannot be taken from {directory}: {problem}; bring it by "
            f"`vmmkv fetch {SOURCE}`, or name a tokenizer.json by --tokenizer FILE"
        )
    return directory / "tokenizer.json"


def digest_of(path: Path) -> str:
    """What tells a tokenizer from others: texts by two of them are not the same work."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]


def vocabulary_of(path: Path) -> int:
    """Its token ids. Raises: ValueError if it is none that can be padded."""
    return len(_vocabulary(_read(path), path))


def padded(path: Path, size: int) -> str:
    """The text of a tokenizer.json with `size` tokens: those that are added are two others', one behind the other.

    No merge makes them, so texts become the tokens that they became before. Raises: ValueError if it has more than `size`.
    """
    tokenizer = _read(path)
    vocabulary = _vocabulary(tokenizer, path)
    if len(vocabulary) > size:
        raise ValueError(f"{path} has {len(vocabulary)} tokens, and the model only {size}; name a smaller one")
    marks = {token["content"] for token in tokenizer.get("added_tokens") or ()}
    parts = sorted(token for token in vocabulary if token not in marks and len(token) <= _LONGEST)
    draws = random.Random(_SEED)
    while len(vocabulary) < size:
        vocabulary.setdefault(draws.choice(parts) + draws.choice(parts), len(vocabulary))
    return json.dumps(tokenizer, ensure_ascii=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}; by --tokenizer FILE name a tokenizer.json") from error
    return tokenizer if isinstance(tokenizer, dict) else {}


def _vocabulary(tokenizer: dict[str, Any], path: Path) -> dict[str, int]:
    """The one in it, to be read and added to."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) and model.get("type") == "BPE" else None
    ids = {each for each in vocabulary.values() if isinstance(each, int)} if isinstance(vocabulary, dict) else None
    if not isinstance(vocabulary, dict) or ids != set(range(len(vocabulary))):
        raise ValueError(
            f"{path} cannot be padded: wanted a tokenizer of byte pairs (BPE) whose ids have no gaps, such as that "
            f"of {SOURCE}; name one by --tokenizer FILE"
        )
    return vocabulary
