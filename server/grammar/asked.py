"""What an answer must be, as it was asked for: a grammar's kind and its source."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from vmmkv.server.grammar.json_schema import served

Kind: TypeAlias = Literal["json", "regex", "choice", "ebnf"]

MAX_SOURCE_CHARS: Final = 1 << 16
MAX_CHOICES: Final = 1024


class GrammarRefused(ValueError):
    """A grammar that is wrong, too large, or takes too long: for whoever asked."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that is small enough and of a kind that is served; whether it is one, its compilation says."""

    kind: Kind
    source: str
    """A JSON schema; a regular expression that the whole answer matches; a JSON list of texts; GBNF with a rule `root`."""

    def __post_init__(self) -> None:
        if len(self.source) > MAX_SOURCE_CHARS:
            raise GrammarRefused(f"it has {len(self.source)} characters and may have {MAX_SOURCE_CHARS}")
        if not self.source:
            raise GrammarRefused("it is empty")
        if re.search("[\ud800-\udfff]", self.source):
            raise GrammarRefused("it holds half of a surrogate pair, which is no character; send valid Unicode")


def of_schema(schema: dict[str, Any] | bool) -> Grammar:
    """JSON that a schema allows. Raises: GrammarRefused, naming the place and what is not served there."""
    try:
        kept = served(schema)
    except ValueError as error:
        raise GrammarRefused(str(error)) from error
    return Grammar("json", json.dumps(kept, ensure_ascii=False, separators=(",", ":")))


def of_object() -> Grammar:
    """Any JSON object."""
    return of_schema({"type": "object"})


def of_choices(choices: Sequence[str]) -> Grammar:
    """One of several texts. Raises: GrammarRefused."""
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise GrammarRefused(f"it must be 1 to {MAX_CHOICES} texts, none of them empty, and has {len(choices)}")
    return Grammar("choice", json.dumps(list(choices), ensure_ascii=False))
