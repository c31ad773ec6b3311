"""Grammars that are served: what a request may ask for.

A JSON schema is served if a grammar follows every constraint of it. Any other is refused, naming the keyword and its place: an
answer that half obeys a schema is worse than none.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from vmmkv_server.structured_output.json_schema import SchemaRefused, grammar_of

GrammarKind: TypeAlias = Literal["json", "regex", "choice", "ebnf"]

MAX_SOURCE_CHARS: Final = 1 << 16
MAX_CHOICES: Final = 1024
MAX_WRITTEN_CHARS: Final = 1 << 20
"""Most characters of the grammar that a JSON schema becomes."""


class GrammarRefused(ValueError):
    """A grammar that is invalid, not served, too large, or too slow."""

    def __init__(self, reason: str, *, param: str = "") -> None:
        super().__init__(reason)
        self.param = param
        """The parameter at fault; empty for the one that the grammar is of."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar within the limits of size. Whether it is valid, its compilation tells."""

    kind: GrammarKind
    source: str
    """A regular expression that the whole answer matches; a JSON list of texts; GBNF with a rule `root`, also for a schema."""

    def __post_init__(self) -> None:
        most, what = (MAX_WRITTEN_CHARS, "as a grammar it") if self.kind == "json" else (MAX_SOURCE_CHARS, "it")
        if len(self.source) > most:
            raise GrammarRefused(f"{what} has {len(self.source)} characters and may have {most}")
        if not self.source:
            raise GrammarRefused("it is empty")
        if re.search("[\ud800-\udfff]", self.source):
            raise GrammarRefused("it holds half of a surrogate pair, which is no character; send valid Unicode")


def of_schema(schema: dict[str, Any] | bool) -> Grammar:
    """JSON that a schema allows. Raises: GrammarRefused, naming the place and what is not served there.

    Cost: a millisecond for most schemas, seconds for one at the limits. All of it holds Python's lock.
    """
    try:
        return Grammar("json", grammar_of(schema))
    except SchemaRefused as error:
        raise GrammarRefused(str(error)) from error


@functools.cache
def of_object() -> Grammar:
    """Any JSON object."""
    return of_schema({"type": "object"})


def of_structured_outputs(asked: Mapping[str, Any]) -> Grammar:
    """The grammar of vLLM's `structured_outputs`, of which SamplingParams or pydantic has checked key and type.

    Raises: GrammarRefused.
    """
    ((kind, value),) = asked.items()
    match kind:
        case "json":
            return of_schema(_parsed(value) if isinstance(value, str) else value)
        case "json_object":
            return of_object()
        case "regex":
            return Grammar("regex", value)
        case "choice":
            return of_choices(value)
        case _:
            assert kind == "grammar", kind
            return Grammar("ebnf", value)


def _parsed(text: str) -> Any:
    """A JSON schema that is given as its text. Raises: GrammarRefused."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(f"it is a text, and not the JSON of a schema ({error}): send the schema as an object") from error
    if not isinstance(schema, dict | bool):
        raise GrammarRefused("it is the JSON of a value that is no schema: send an object")
    return schema


def of_choices(choices: Sequence[str]) -> Grammar:
    """One of several texts. Raises: GrammarRefused."""
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise GrammarRefused(f"it must be 1 to {MAX_CHOICES} texts, none of them empty, and has {len(choices)}")
    return Grammar("choice", json.dumps(list(choices), ensure_ascii=False))
