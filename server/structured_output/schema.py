"""Grammars that are served: what a request may ask for, and which JSON schemas are enforced completely.

A schema is served if xgrammar enforces every keyword of it. Any other is refused, naming the keyword and its place: an answer
that half obeys a schema is worse than none. Strings are rewritten as patterns that give valid JSON.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final, Literal, TypeAlias

GrammarKind: TypeAlias = Literal["json", "regex", "choice", "ebnf"]

MAX_SOURCE_CHARS: Final = 1 << 16
MAX_CHOICES: Final = 1024
MAX_DEPTH: Final = 64
"""Of values within values of a schema."""
MAX_NODES: Final = 4096
"""Values in a schema."""
MAX_COUNT: Final = 4096
"""Of a minimum or maximum of items or characters: each is a copy of a rule."""


class GrammarRefused(ValueError):
    """A grammar that is invalid, not served, too large, or too slow."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar within the limits of size. Whether it is valid, its compilation tells."""

    kind: GrammarKind
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
    _check_size(schema)
    return Grammar("json", json.dumps(_served(schema, ""), ensure_ascii=False, separators=(",", ":")))


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
            return of_schema(value)
        case "regex":
            return Grammar("regex", value)
        case "choice":
            return of_choices(value)
        case _:
            assert kind == "grammar", kind
            return Grammar("ebnf", value)


def of_choices(choices: Sequence[str]) -> Grammar:
    """One of several texts. Raises: GrammarRefused."""
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise GrammarRefused(f"it must be 1 to {MAX_CHOICES} texts, none of them empty, and has {len(choices)}")
    return Grammar("choice", json.dumps(list(choices), ensure_ascii=False))


# Which keywords are served, and together with which others.

_UNSERVED: Final = frozenset(
    [
        "$dynamicRef",
        "$recursiveRef",
        "not",
        "if",
        "dependentSchemas",
        "dependentRequired",
        "dependencies",
        "contains",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "uniqueItems",
        "additionalItems",
        "unevaluatedItems",
        "unevaluatedProperties",
        "multipleOf",
        "divisibleBy",
        "disallow",
        "extends",
    ]
)
"""Constraints of any draft. All other keywords are annotations: those that no vocabulary defines, and those that constrain
nothing alone, as `then`.
"""
_OF_ANY: Final = frozenset(["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"])
_BOUNDS: Final = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
_OF_TYPE: Final[Mapping[str, frozenset[str]]] = {
    "object": frozenset(["properties", "required", "additionalProperties"]),
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems"]),
    "string": frozenset(["minLength", "maxLength", "pattern", "format"]),
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "boolean": frozenset(),
    "null": frozenset(),
}
_OF_ANY_TYPE: Final = frozenset[str]().union(*_OF_TYPE.values())
SERVED: Final = _OF_ANY | _OF_ANY_TYPE
_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength")
_DEFINITIONS: Final = frozenset(["$defs", "definitions"])
_SCHEMAS_BY_NAME: Final = frozenset(["properties", "$defs", "definitions"])
_LISTS_OF_SCHEMAS: Final = frozenset(["anyOf", "oneOf", "allOf", "prefixItems"])
_SCHEMAS: Final = frozenset(["items", "additionalProperties"])
_LISTS: Final = frozenset(["enum", "required"])
_PYTHON_TYPES: Final[Mapping[str, Any]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "null": NoneType,
}


def _is_of_type(value: Any, name: str) -> bool:
    return isinstance(value, _PYTHON_TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _is_open(node: Mapping[str, Any]) -> bool:
    """Whether an object's schema allows any further properties: true and {} say the same as no additionalProperties."""
    further = node.get("additionalProperties", True)
    return further is True or further == {}


def _check_size(schema: Any) -> None:
    """Without recursion, since the depth is not known yet."""
    waiting, num_nodes = [(schema, 1)], 0
    while waiting:
        node, depth = waiting.pop()
        num_nodes += 1
        if depth > MAX_DEPTH:
            raise GrammarRefused(f"it is nested more than {MAX_DEPTH} levels deep")
        if num_nodes > MAX_NODES:
            raise GrammarRefused(f"it is made of more than {MAX_NODES} values")
        parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        waiting.extend((part, depth + 1) for part in parts)


def _served(node: Any, place: str) -> Any:
    """The schema at a place, checked, without annotations, its strings as patterns."""
    if isinstance(node, bool):
        return node
    where = place or "the schema"
    if not isinstance(node, dict):
        raise GrammarRefused(f"{where} is no schema: wanted an object, true or false")
    _check_keywords(where, node)
    served = {keyword: value for keyword, value in node.items() if keyword in SERVED}
    if _is_open(node):
        served.pop("additionalProperties", None)
    if (pattern := _as_pattern(node)) is not None:
        served = {keyword: value for keyword, value in served.items() if keyword not in ("format", "minLength", "maxLength")}
        served["pattern"] = pattern
    for keyword, value in served.items():
        inner = f"{place}/{keyword}"
        if keyword in _SCHEMAS_BY_NAME:
            served[keyword] = {name: _served(part, f"{inner}/{name}") for name, part in value.items()}
        elif keyword in _LISTS_OF_SCHEMAS:
            served[keyword] = [_served(part, f"{inner}/{index}") for index, part in enumerate(value)]
        elif keyword in _SCHEMAS:
            served[keyword] = _served(value, inner)
    return served


def _check_keywords(where: str, node: Mapping[str, Any]) -> None:
    if unserved := sorted(node.keys() & _UNSERVED):
        raise GrammarRefused(f"{where} has {', '.join(unserved)}, which this server does not enforce; leave it out")
    for keyword, value in node.items():
        if keyword in _SCHEMAS_BY_NAME and not isinstance(value, dict):
            raise GrammarRefused(f"{where} has {keyword} that is no object")
        if keyword in _LISTS_OF_SCHEMAS and not (isinstance(value, list) and value):
            raise GrammarRefused(f"{where} has {keyword} that is no list of schemas")
        if keyword in _LISTS and not isinstance(value, list):
            raise GrammarRefused(f"{where} has {keyword} that is no list")
        if keyword in _COUNTS and not (_is_of_type(value, "integer") and 0 <= value <= MAX_COUNT):
            raise GrammarRefused(f"{where} has {keyword} {value!r}; from 0 to {MAX_COUNT} is served")
    if "$ref" in node:
        ref = node["$ref"]
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise GrammarRefused(f"{where} has $ref {ref!r}; only references within the schema are served, as #/$defs/name")
    for name in ("$ref", "const", "enum", "anyOf", "oneOf", "allOf"):
        # Beside these xgrammar looks at no other keyword. A type that says the same again does no harm, but for $ref.
        beside = _DEFINITIONS | {name} | ({"type"} if name != "$ref" else set())
        if name in node and (others := sorted((node.keys() & SERVED) - beside)):
            raise GrammarRefused(f"{where} has {others[0]} beside {name}, which this server does not enforce together")
    if "oneOf" in node:
        raise GrammarRefused(
            f"{where} has oneOf, of which this server would enforce anyOf; write that, if they exclude each other"
        )
    if len(node.get("allOf", ())) > 1:
        raise GrammarRefused(
            f"{where} has allOf of several schemas, which this server does not enforce; write one that says all"
        )
    _check_type(where, node)
    _check_string(where, node)
    properties = node.get("properties", {})
    if "properties" in node and not _is_open(node) and node["additionalProperties"] is not False:
        # JSON has several ways to write a key, and of two equal keys the second one counts.
        raise GrammarRefused(f"{where} has properties beside additionalProperties; leave those out, or send true or false")
    if missing := [name for name in node.get("required", ()) if not isinstance(name, str) or name not in properties]:
        raise GrammarRefused(f"{where} has required {missing[0]!r}, which is not in its properties")


def _check_type(where: str, node: Mapping[str, Any]) -> None:
    """A keyword of one type says nothing of other types: without the type, xgrammar would guess it."""
    given = node.get("type")
    types = given if isinstance(given, list) else [] if given is None else [given]
    if unknown := [one for one in types if not isinstance(one, str) or one not in _OF_TYPE]:
        raise GrammarRefused(f"{where} has type {unknown[0]!r}; there are {', '.join(_OF_TYPE)}")
    keywords = frozenset[str]().union(*(_OF_TYPE[one] for one in types))
    if strays := sorted((node.keys() & _OF_ANY_TYPE) - keywords):
        owner = next(name for name, owned in _OF_TYPE.items() if strays[0] in owned)
        raise GrammarRefused(f'{where} has {strays[0]} without "type": "{owner}"; say which type it is')
    values = node.get("enum", [node["const"]] if "const" in node else [])
    if types and (wrong := [value for value in values if not any(_is_of_type(value, one) for one in types)]):
        raise GrammarRefused(f"{where} has the value {wrong[0]!r}, which is not of its type")
    if len(types) > 1 and (several := sorted(keywords & node.keys())):
        raise GrammarRefused(f"{where} has several types and {several[0]}; write anyOf, a schema for each type")


def _check_string(where: str, node: Mapping[str, Any]) -> None:
    if (form := node.get("format")) is not None and (not isinstance(form, str) or form not in FORMATS):
        raise GrammarRefused(f"{where} has format {form!r}; served are {', '.join(FORMATS)}")
    if "pattern" in node:
        if not isinstance(node["pattern"], str):
            raise GrammarRefused(f"{where} has a pattern that is no text")
        _check_pattern(node["pattern"])
    both = sorted(node.keys() & {"format", "pattern", "minLength", "maxLength"})
    if len(both) > 1 and ("format" in node or "pattern" in node):
        raise GrammarRefused(f"{where} has {' and '.join(both)}, of which this server would enforce one; write one pattern")


# Strings as patterns.
#
# xgrammar 0.2.8 lets raw control characters into strings of a limited length, and seconds of 60 and leading zeros into formats.
# A quote, a backslash or a control character of a pattern would stand in the JSON unescaped. Of a group that may be missing, as
# in `(x[0-9]+)?`, it lets the end come without the beginning.

_DAY: Final = "(0[1-9]|1[0-9]|2[0-8])"
_LEAP_YEAR: Final = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE: Final = (
    f"([0-9]{{4}}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-{_DAY})|{_LEAP_YEAR}-02-29)"
)
_HOURS: Final = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOURS}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOURS})"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL: Final = "[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"

FORMATS: Final[Mapping[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "email": rf"[a-z0-9_+-]{{1,32}}(\.[a-z0-9_+-]{{1,16}})?@({_LABEL}\.){{1,3}}[a-z]{{2,10}}",
}
"""Of RFC 3339, 4122 and 2673, and common addresses."""

_CHARACTER: Final = r'[^"\\\x00-\x1f]'
"""Of a JSON string, without those that are escaped. The same class without `^` takes a thousand times as long to mask."""

_PART: Final = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\(.)|(.)", re.DOTALL)


def _check_pattern(pattern: str) -> None:
    """Raises: GrammarRefused if it asks for characters that JSON would have to escape."""
    in_class = is_negated = False
    parts = list(_PART.finditer(pattern))
    for index, part in enumerate(parts):
        plain, escaped, number = part[4], part[3], part[1] or part[2]
        if plain == "[" and not in_class:
            in_class, is_negated = True, index + 1 < len(parts) and parts[index + 1][4] == "^"
        elif plain == "]" and in_class:
            in_class = False
        character = chr(int(number, 16)) if number else escaped or plain
        is_control = character < " " or (escaped is not None and escaped in "nrtfv0c")
        if (is_control and not (in_class and is_negated)) or (character in '"\\' and not in_class):
            raise GrammarRefused(f"pattern {pattern!r} asks for {part[0]!r}, which JSON escapes: this is not served")


def _as_pattern(node: Mapping[str, Any]) -> str | None:
    """The pattern for the format, lengths or pattern of a string; None if it has none of them."""
    if (form := node.get("format")) is not None:
        return _groups_counted(f"^({FORMATS[form]})$")
    if "minLength" in node or "maxLength" in node:
        return f"^{_CHARACTER}{{{node.get('minLength', 0)},{node.get('maxLength', '')}}}$"
    return None if "pattern" not in node else _groups_counted(node["pattern"])


def _groups_counted(pattern: str) -> str:
    """`(...)?` as `(...){0,1}`, which means the same."""
    in_class, before, written = False, "", []
    for part in _PART.finditer(pattern):
        plain = part[4]
        is_group = plain == "?" and before == ")" and not in_class
        written.append("{0,1}" if is_group else part[0])
        in_class = plain == "[" or (in_class and plain != "]")
        before = plain or ""
    return "".join(written)
