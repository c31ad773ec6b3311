"""What the parts with texts need, and whether it is here: said before a run begins, and not when their turn comes."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from bench.serve.padding import tokenizer_file, vocabulary_of
from bench.settings import Settings

_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "http": ("fastapi", "httpx", "msgspec", "structlog", "tokenizers", "uvicorn", "zmq"),
    "grammar": ("tokenizers", "xgrammar"),
}
"""By part, beside what all parts need."""

NEEDY: Final = tuple(_MODULES)
"""The parts that may have to be left out."""


def lacking(part: str, settings: Settings) -> str | None:
    """Why one of NEEDY cannot run, and what would help; None if it can. Nothing is imported, and nothing fetched."""
    if missing := [name for name in _MODULES[part] if find_spec(name) is None]:
        modules = f"the module{'s'[: len(missing) > 1]} {', '.join(missing)}"
        return f"{modules} cannot be imported; the extras server and bench of vmmkv bring them"
    try:
        vocabulary_of(tokenizer_file(settings.tokenizer))
    except ValueError as error:
        return str(error)
    return None
