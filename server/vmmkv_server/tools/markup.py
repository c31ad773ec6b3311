"""Calls as markup: a tag for each argument, texts as they are, all else as JSON."""

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from vmmkv_server.structured_output.json_schema import SchemaRefused, SchemaRules, holds, types_of
from vmmkv_server.structured_output.text import quoted
from vmmkv_server.tools.calls import Tool
from vmmkv_server.tools.form import CallForm, arguments_schema
from vmmkv_server.tools.json_text import JsonText, NotJson
from vmmkv_server.tools.reading import CallReader, NoCall, Waiting


@dataclass(frozen=True, kw_only=True)
class Markup(CallForm):
    """Calls as markup.

        name behind_name (before_key KEY behind_key kind VALUE closing behind_value)* last

    A text is any without the closing tag. Where there is a line break behind the key, one in front of the closing tag is no
    part of the value.
    """

    behind_name: str
    before_key: str
    behind_key: str
    kinds: tuple[str, str] = ("", "")
    """Texts that tell a text from JSON. Empty if the tool's schema tells."""
    closing: str
    behind_value: str = "\n"
    last: str

    @property
    def _has_lines(self) -> bool:
        return self.behind_key.endswith("\n")

    @property
    def _closed(self) -> str:
        """Text behind a value."""
        return ("\n" if self._has_lines else "") + self.closing

    def head(self, tool: Tool) -> str:
        """The begin of a tool's call, with its name."""
        return tool.name + self.behind_name

    def written(self, name: str, arguments: str) -> str:
        """A call, with the JSON of its arguments."""
        given: dict[str, Any] = json.loads(arguments)
        of_text, of_json = self.kinds
        values = {
            key: of_text + value if isinstance(value, str) else of_json + json.dumps(value, ensure_ascii=False)
            for key, value in given.items()
        }
        each = "".join(
            f"{self.before_key}{key}{self.behind_key}{value}{self._closed}{self.behind_value}" for key, value in values.items()
        )
        return f"{name}{self.behind_name}{each}{self.last}"

    def call(self, rules: SchemaRules, tool: Tool) -> str:
        """GBNF of a tool's calls. Raises: SchemaRefused."""
        rest = quoted(self.last)
        for one in reversed(rules.properties(arguments_schema(tool), self.closing, self._closed, self.kinds)):
            if self.behind_key.split()[0] in one.name or one.name != one.name.strip():
                raise SchemaRefused(f"it names a property {one.name!r}, which this form of calls cannot write")
            key = quoted(f"{self.before_key}{one.name}{self.behind_key}")
            pair = f"{key} {one.value} {quoted(self.behind_value)}"
            rest = f"{pair} {rest}" if one.is_required else rules.rule("more", f"{pair} {rest} | {rest}")
        return f"{quoted(self.head(tool))} {rest}"

    def read(self, reader: CallReader) -> Waiting[None]:
        """Read a call. Raises: NoCall, EndOfAnswer."""
        yield from reader.space()
        name = yield from reader.word()
        yield from reader.mark(self.behind_name)
        if name not in reader.tools:
            raise NoCall
        last, before_key = self.last.strip(), self.before_key.strip()
        yield from reader.space()
        found = yield from reader.expect(before_key, last)
        reader.begin(name)
        parameters = reader.tools[name].parameters
        reader.argue("{")
        is_further = False
        while found == before_key:
            pieces: list[str] = []
            behind_key, *others = self.behind_key.split()
            yield from reader.until([behind_key], pieces.append)
            yield from reader.mark(" ".join(others))
            key = "".join(pieces).strip()
            reader.argue(f"{', ' if is_further else ''}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._value(reader, _schema_of(key, parameters), parameters)
            is_further = True
            yield from reader.space()
            found = yield from reader.expect(before_key, last)
        reader.argue("}")

    def _value(self, reader: CallReader, schema: Any, root: Mapping[str, Any]) -> Waiting[None]:
        if self._has_lines:
            yield from reader.has("\n")
        of_text, of_json = self.kinds
        if of_text != of_json:
            kind = yield from reader.expect(of_text, of_json)
            types = _TEXT if kind == of_text else _ALL - _TEXT
        else:
            types = types_of(schema, root)
        if types == _TEXT:
            reader.argue('"')
            text = _Text(lambda piece: reader.argue(json.dumps(piece, ensure_ascii=False)[1:-1]), has_lines=self._has_lines)
            yield from reader.until([self.closing], text.feed)
            reader.argue('"')
            return
        pieces: list[str] = []
        # A text within JSON may have the closing tag in it.
        closed_json = self._closed_json(reader, pieces.append)
        is_json = (yield from reader.peek()) in "[{" and (yield from reader.attempt(closed_json, is_value=True))
        if not is_json:
            pieces.clear()
            yield from reader.until([self.closing], _Text(pieces.append, has_lines=self._has_lines).feed)
        reader.argue(_json_of("".join(pieces), types, schema, root))

    def _closed_json(self, reader: CallReader, sink: Callable[[str], Any]) -> Waiting[None]:
        yield from reader.json(sink)
        yield from reader.mark(self.closing)


class _Text:
    """A text in pieces, without the line break at its end."""

    def __init__(self, sink: Callable[[str], Any], *, has_lines: bool) -> None:
        self._sink = sink
        self._has_lines = has_lines
        self._held = ""

    def feed(self, piece: str) -> None:
        if not piece:
            return
        piece = self._held + piece
        self._held = "\n" if self._has_lines and piece.endswith("\n") else ""
        self._sink(piece.removesuffix(self._held) if self._held else piece)


def _schema_of(key: str, parameters: Mapping[str, Any]) -> Any:
    """The schema of an argument; one that allows all if none is known."""
    properties = parameters.get("properties")
    return properties.get(key, True) if isinstance(properties, Mapping) else True


_TEXT: Final = frozenset({"string"})
_TYPES: Final = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
"""Types of JSON values by their first character; of numbers there are many."""
_ALL: Final = frozenset({*_TYPES.values(), "number"})


def _json_of(text: str, types: frozenset[str], schema: Any, root: Mapping[str, Any]) -> str:
    """The JSON of a value that was written as it is: of a text, unless it is JSON that the schema allows."""
    written = text.strip()
    if "string" not in types:
        return written if _is_json(written) else json.dumps(_of_python(text), ensure_ascii=False)
    if _is_json(written) and _type_of(written) in types - {"string"}:
        try:
            is_allowed = holds(json.loads(written), schema, root)
        except (RecursionError, ValueError, OverflowError):  # Python reads no integers of 5000 digits, and 1e999 as infinity
            is_allowed = None
        if is_allowed is not False:
            return written
    return json.dumps(text, ensure_ascii=False)


def _of_python(text: str) -> Any:
    """The value of a Python literal, which some templates show and models write; the text itself if it is none."""
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # without half of a surrogate pair
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value


def _type_of(written: str) -> str:
    return _TYPES.get(written[0], "number")


def _is_json(text: str) -> bool:
    value = JsonText()
    try:
        return value.feed(text) == len(text) and value.finish()
    except NotJson:
        return False
