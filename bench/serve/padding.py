"""A real tokenizer with as many tokens as a model has logits: random weights name any of them, and text is made of all."""

import json
import random
from pathlib import Path
from typing import Any, Final

SOURCE: Final = "smollm2-135m"
"""The model whose tokenizer is taken, where no file is named."""

_SEED: Final = 0
_LONGEST: Final = 12
"""Characters of a token that others are made of: two together are as long as the long words of large vocabularies."""


def tokenizer_file(named: Path | None) -> Path:
    """The tokenizer.json that was named, or SOURCE's, which is fetched if it is not here yet.

    Raises: ModelUnavailable; ValueError if there is no such file.
    """
    if named is None:
        from vmmkv.server.models import resolve  # the other suites need no server

        return resolve(SOURCE) / "tokenizer.json"
    if not named.is_file():
        raise ValueError(f"--tokenizer {named} is no file; name a tokenizer.json, such as that of {SOURCE}")
    return named


def vocabulary_of(path: Path) -> int:
    """Its token ids."""
    return len(_model(json.loads(path.read_text(encoding="utf-8")))["vocab"])


def padded(path: Path, size: int) -> str:
    """The text of a tokenizer.json with `size` tokens: those that are added are two others', one behind the other.

    No merge makes them, so texts become the tokens that they became before. Raises: ValueError if it has more than `size`.
    """
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = _model(tokenizer)["vocab"]
    if len(vocabulary) > size:
        raise ValueError(f"{path} has {len(vocabulary)} tokens, and the model only {size}; name a smaller one")
    marks = {token["content"] for token in tokenizer["added_tokens"]}
    parts = sorted(token for token in vocabulary if token not in marks and len(token) <= _LONGEST)
    draws = random.Random(_SEED)
    while len(vocabulary) < size:
        vocabulary.setdefault(draws.choice(parts) + draws.choice(parts), len(vocabulary))
    return json.dumps(tokenizer, ensure_ascii=False)


def _model(tokenizer: dict[str, Any]) -> dict[str, Any]:
    model: dict[str, Any] = tokenizer["model"]
    if model["type"] != "BPE" or set(model["vocab"].values()) != set(range(len(model["vocab"]))):
        raise ValueError(f"wanted a tokenizer of byte pairs whose ids have no gaps, such as that of {SOURCE}")
    return model
