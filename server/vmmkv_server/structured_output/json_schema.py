"""JSON schemas as grammars that allow no value which the schema refuses.

    schema ── closure ──> goal: parts that a value must satisfy together ── kinds ──> its kinds of values ── rules ──> GBNF

A *goal* is a set of places of the schema: `$ref` and `allOf` add to it, `anyOf` and `oneOf` make a goal for each alternative.
Each goal becomes one rule, so a schema that refers to itself ends. Where no rule would be exact, the grammar allows fewer
values, and docs/guides/server/api.md lists these cases. Where it would allow none, or needless few, the schema is refused,
naming the place.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import NoneType
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import unquote

from vmmkv_server.structured_output import text
from vmmkv_server.structured_output.numerals import MAX_DIGITS, Interval, integer_rule, number_rule
from vmmkv_server.structured_output.text import FORMATS, MAX_REPETITIONS, UNSERVED_FORMATS, PatternRefused, quoted

MAX_DEPTH: Final = 64
"""Most levels of values within values of a schema."""
MAX_NODES: Final = 4096
"""Most values in a schema."""
MAX_GOALS: Final = 4096
"""Most rules that the goals of a schema become."""
MAX_STEPS: Final = 100_000
"""Schemas that are read for goals and compared with others. References make more of them than a schema has values."""
MAX_PLACES: Final = 500_000
"""Most places in texts of a schema from which parts of its patterns are tried."""
MAX_MULTIPLES: Final = 1024
"""Most multiples of a `multipleOf` between bounds: they are listed."""
MAX_OTHER_KEYS: Final = 256
"""Characters of keys that further keys must differ from: each is a rule."""


class SchemaRefused(ValueError):
    """A schema that is invalid, not served, or too large."""


_UNSERVED: Final = frozenset(
    ["$dynamicRef", "$recursiveRef", "if", "contains", "divisibleBy", "disallow", "extends"]
)  # fmt: skip
"""Constraints of any draft that no grammar follows. Keywords that none defines are annotations, and those that constrain
nothing alone, as `then`.
"""
_OF_TYPE: Final[Mapping[str, frozenset[str]]] = {
    "object": frozenset(
        ["properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
         "maxProperties", "unevaluatedProperties"]
    ),
    "array": frozenset(
        ["items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"]
    ),
    "string": frozenset(["minLength", "maxLength", "pattern", "contentEncoding"]),
    "number": frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]),
    "boolean": frozenset(),
    "null": frozenset(),
}  # fmt: skip
"""Types, and the keywords that say something of their values alone."""
_TYPES: Final = frozenset(["integer", *_OF_TYPE])
_DIRECT: Final = frozenset(["type", "enum", "const", "format"]).union(*_OF_TYPE.values())
"""Keywords of a value's own, without those that name other schemas for it."""
SERVED: Final = (_DIRECT - {"uniqueItems", "unevaluatedItems", "unevaluatedProperties"}) | {
    "anyOf", "oneOf", "allOf", "not", "$ref", "dependentRequired", "dependentSchemas", "dependencies",
}  # fmt: skip
"""Constraints that grammars follow. Of the three, only what says nothing."""
_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_LISTS: Final = ("enum", "required")
_BY_NAME: Final = ("properties", "patternProperties", "dependentSchemas", "dependentRequired", "dependencies")
_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_INTEGER_FORMATS: Final = {
    "int8": (-(1 << 7), (1 << 7) - 1), "int16": (-(1 << 15), (1 << 15) - 1), "int32": (-(1 << 31), (1 << 31) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1), "uint8": (0, (1 << 8) - 1), "uint16": (0, (1 << 16) - 1),
    "uint32": (0, (1 << 32) - 1), "uint64": (0, (1 << 64) - 1),
}  # fmt: skip
"""OpenAPI's, and those like them."""


class _Node(NamedTuple):
    """A schema within the schema, equal to itself alone."""

    value: dict[str, Any]
    place: str

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Node) and self.value is other.value


class _Part(NamedTuple):
    """A condition on a value: a node's own keywords; one of its `anyOf` or `oneOf`; or the lack of a property."""

    node: _Node | None
    union: str = ""
    absent: str | None = None


Goal: TypeAlias = tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Values:
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Text:
    pattern: text.Node | None
    minimum: int
    maximum: int | None
    place: str = ""


@dataclass(frozen=True, slots=True)
class _Number:
    is_integer: bool
    interval: Interval
    num_decimals: int | None
    """At most, and no exponent; any if None."""


@dataclass(frozen=True, slots=True)
class _Array:
    prefix: tuple[Goal, ...]
    items: Goal | None
    """Goal of the items behind the prefix. None if there can be none."""
    minimum: int
    maximum: int | None


@dataclass(frozen=True, slots=True)
class _Object:
    properties: dict[str, Goal]
    required: frozenset[str]
    keys: "_Keys | None"
    """Further properties. None if there are none."""
    minimum: int
    maximum: int | None
    place: str


@dataclass(frozen=True, slots=True)
class _Keys:
    """Further properties of an object: the keys' patterns, or a goal for them, and the values' goal."""

    patterns: tuple[text.Node, ...]
    names: Goal | None
    values: Goal
    others: frozenset[str]
    """Names that they differ from."""


_Kind: TypeAlias = _Values | _Text | _Number | _Array | _Object
_PYTHON_TYPES: Final[Mapping[str, Any]] = {
    "object": dict, "array": list, "string": str, "number": int | float, "boolean": bool, "null": NoneType,
}  # fmt: skip


def type_of(value: Any) -> str:
    """The type of a JSON value; a number without a fraction is an integer."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return next(name for name, kind in _PYTHON_TYPES.items() if isinstance(value, kind) and name != "number")


def _key(value: Any) -> Any:
    """Equal for equal JSON values: 1 is 1.0, and not true."""
    if isinstance(value, dict):
        return frozenset((name, _key(part)) for name, part in value.items())
    if isinstance(value, list):
        return tuple(map(_key, value))
    return Fraction(value) if isinstance(value, float) else (bool, value) if isinstance(value, bool) else value


def grammar_of(schema: dict[str, Any] | bool) -> str:
    """GBNF with a rule `root`, of JSON without spaces. Raises: SchemaRefused, naming the place and what is not served there."""
    rules = SchemaRules()
    return rules.written(rules.of(schema))


class Property(NamedTuple):
    """A named property of an object."""

    name: str
    is_required: bool
    value: str
    """The name of a rule of its values, with what follows them."""


class SchemaRules:
    """Rules of a grammar that has values of JSON schemas in it. Schemas share the rules that they have in common.

    `rule` and `add` make those around the values. Names are small letters, perhaps with a number behind them.
    """

    def __init__(self, *, comma: str = ",", colon: str = ":") -> None:
        """`comma` and `colon` are the separators of JSON, perhaps with a space behind them."""
        self.comma, self.colon = comma, colon
        self._by_name: dict[str, str] = {}
        self._by_body: dict[str, str] = {}
        self._num_names = 0
        self.strings = text.Rules(self.rule, self.add)

    def of(self, schema: Any, *, is_object: bool = False) -> str:
        """The name of the rule of a schema's values, or of its objects alone.

        Raises: SchemaRefused, naming the place and what is not served there.
        """
        _check_size(schema)
        try:
            return _Grammar(schema, self).name(is_object=is_object)
        except RecursionError:
            raise SchemaRefused("its references, alternatives or patterns are nested too deep") from None

    def properties(self, schema: Any, tag: str, end: str, begins: tuple[str, str] = ("", "")) -> list[Property]:
        """The named properties of a schema's objects, whose values are to be written one by one, as markup.

        Texts are written as they are, all else as JSON. `tag` or `end` follow them, as in `text.Rules.markup`; `begins` stand
        in front of a text and of JSON.
        Raises: SchemaRefused, naming the place and what is not served there.
        """
        _check_size(schema)
        try:
            return _Grammar(schema, self).properties(tag, end, begins)
        except RecursionError:
            raise SchemaRefused("its references, alternatives or patterns are nested too deep") from None

    def rule(self, name: str, body: str) -> str:
        """The name of a rule with this body, which may be there."""
        if body not in self._by_body:
            self._by_body[body] = self.add(self.unused(name), body)
        return self._by_body[body]

    def add(self, name: str, body: str) -> str:
        """Add a rule that may name itself; it may be there."""
        assert self._by_name.get(name, body) == body, f"two rules are named {name}"
        self._by_name[name] = body
        return name

    def unused(self, name: str) -> str:
        """A name for another rule, with a number."""
        self._num_names += 1
        return f"{name}{self._num_names}"

    def written(self, root: str) -> str:
        """GBNF of all rules that the rule `root` needs, with its body."""
        rules = _merged(_needed({"root": root} | self._by_name))
        return "\n".join(f"{name} ::= {body}" for name, body in rules.items())


_HALF: Final = re.compile("[\ud800-\udfff]")


def _check_size(schema: Any) -> None:
    """Without recursion, since the depth is not known yet."""
    waiting, num_nodes = [(schema, 1)], 0
    while waiting:
        node, depth = waiting.pop()
        num_nodes += 1
        if depth > MAX_DEPTH:
            raise SchemaRefused(f"it is nested more than {MAX_DEPTH} levels deep")
        if num_nodes > MAX_NODES:
            raise SchemaRefused(f"it is made of more than {MAX_NODES} values")
        if isinstance(node, float) and not math.isfinite(node):
            raise SchemaRefused("it holds a number that JSON does not have")
        if any(map(_HALF.search, node if isinstance(node, dict) else [node] if isinstance(node, str) else ())):
            raise SchemaRefused("it holds half of a surrogate pair, which is no character; send valid Unicode")
        parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        waiting.extend((part, depth + 1) for part in parts)


class _Schema:
    """A schema's document: its nodes, checked, and what references in it refer to."""

    def __init__(self, root: Any) -> None:
        self.root = root
        written = root.get("$schema") if isinstance(root, dict) else None
        draft = re.search(r"draft-0?([0-9]+)", written) if isinstance(written, str) else None
        self.draft = int(draft[1]) if draft else 2020 if not isinstance(written, str) or "2019" not in written else 2019
        self._checked: set[int] = set()
        self._made: list[dict[str, Any]] = []
        """Nodes that no document has, kept so that no other gets their identity."""
        self._bases: dict[int, dict[str, Any]] = {}
        """By dict, the nearest one around it, or itself, that has a URI of its own. Not the root."""
        self._by_name: dict[str, list[dict[str, Any]]] = {}
        """Dicts with an anchor or a URI."""
        self._find_names(root)

    def _find_names(self, root: Any) -> None:
        waiting: list[tuple[Any, dict[str, Any] | None]] = [(root, None)]
        while waiting:
            value, base = waiting.pop()
            if isinstance(value, dict):
                for keyword in ("$id", "id", "$anchor", "$dynamicAnchor"):
                    name = value.get(keyword)
                    if isinstance(name, str):
                        is_anchor = "nchor" in keyword
                        self._by_name.setdefault(f"#{name}" if is_anchor else name.removesuffix("#"), []).append(value)
                        if not is_anchor and not name.startswith("#") and value is not root:
                            base = value
                if base is not None:
                    self._bases[id(value)] = base
                waiting.extend((part, base) for part in value.values())
            elif isinstance(value, list):
                waiting.extend((part, base) for part in value)

    def made(self, value: dict[str, Any], place: str) -> _Node:
        self._made.append(value)
        return _Node(value, place)

    def node(self, value: Any, place: str) -> _Node | bool:
        """A schema at a place, checked; True for one that allows all, False for none."""
        if isinstance(value, bool):
            return value
        where = place or "the schema"
        if not isinstance(value, dict):
            raise SchemaRefused(f"{where} is no schema: wanted an object, true or false")
        if id(value) not in self._checked:
            _check_keywords(where, value)
            if self.draft == 7 and "contentMediaType" in value:
                raise SchemaRefused(f"{where} has contentMediaType, which this server does not enforce; leave it out")
            self._checked.add(id(value))
        return _Node(value, place)

    def referred(self, node: _Node) -> tuple[Any, str]:
        """The target of a node's `$ref`, and its place."""
        where, ref = node.place or "the schema", node.value["$ref"]
        if not isinstance(ref, str):
            raise SchemaRefused(f"{where} has $ref {ref!r}; wanted a text, as #/$defs/name")
        name, _, fragment = ref.partition("#")
        own = [self.root.get(keyword) for keyword in ("$id", "id")]
        base = self._bases.get(id(node.value))
        if name and name not in [one.removesuffix("#") for one in own if isinstance(one, str)]:
            found = self._by_name.get(name, [])
            if len(found) != 1 or (fragment and not fragment.startswith("/")):
                raise SchemaRefused(f"{where} has $ref {ref!r}; only references within the schema are served, as #/$defs/name")
            return self._at(found[0], fragment, ref, where), ref
        if fragment and not fragment.startswith("/"):
            found = self._by_name.get(f"#{fragment}", [])
            if len(found) != 1:
                raise SchemaRefused(f"{where} has $ref {ref!r}, and {len(found)} schemas have that anchor; write #/$defs/name")
            return found[0], f"#{fragment}"
        if base is not None and not name:
            # With a URI of its own, `#` is that part of the schema in some drafts, and the whole in others.
            try:
                inner = self._at(base, fragment, ref, where)
            except SchemaRefused:
                inner = None
            if inner is not None and inner is not self._at_or_none(fragment):
                raise SchemaRefused(f"{where} has $ref {ref!r} within a schema with an id; leave the id out")
        return self._at(self.root, fragment, ref, where), unquote(fragment)

    def _at_or_none(self, fragment: str) -> Any:
        try:
            return self._at(self.root, fragment, "", "")
        except SchemaRefused:
            return None

    def _at(self, value: Any, fragment: str, ref: str, where: str) -> Any:
        for step in unquote(fragment).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
                value = value[int(step)]
            else:
                raise SchemaRefused(f"{where} has $ref {ref!r}, and the schema has nothing there")
        return value


def _check_keywords(where: str, node: Mapping[str, Any]) -> None:
    if unserved := sorted(node.keys() & _UNSERVED):
        raise SchemaRefused(f"{where} has {', '.join(unserved)}, which this server does not enforce; leave it out")
    for keyword in node.keys() & {*_BY_NAME}:
        if not isinstance(node[keyword], dict):
            raise SchemaRefused(f"{where} has {keyword} that is no object")
    for keyword in node.keys() & {*_SCHEMAS}:
        if not isinstance(node[keyword], list) or not node[keyword]:
            raise SchemaRefused(f"{where} has {keyword} that is no list of schemas")
    for keyword in node.keys() & {*_LISTS}:
        if not isinstance(node[keyword], list):
            raise SchemaRefused(f"{where} has {keyword} that is no list")
    for keyword in node.keys() & {*_COUNTS}:
        value = node[keyword]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise SchemaRefused(f"{where} has {keyword} {value!r}; wanted a number from 0")
        if value > MAX_REPETITIONS and keyword in ("minItems", "minLength"):
            raise SchemaRefused(f"{where} has {keyword} {value!r}; from 0 to {MAX_REPETITIONS} is served")
    for keyword in node.keys() & _OF_TYPE["number"]:
        value = node[keyword]
        if not isinstance(value, int | float) or (isinstance(value, bool) and not keyword.startswith("exclusive")):
            raise SchemaRefused(f"{where} has {keyword} {value!r}; wanted a number")
    if "multipleOf" in node and node["multipleOf"] <= 0:
        raise SchemaRefused(f"{where} has multipleOf {node['multipleOf']!r}; wanted a number above 0")
    given = node.get("type", [])
    for one in given if isinstance(given, list) else [given]:
        if not isinstance(one, str) or one not in _TYPES:
            raise SchemaRefused(f"{where} has type {one!r}; there are {', '.join(sorted(_TYPES))}")
    for name in node.get("required", ()):
        if not isinstance(name, str):
            raise SchemaRefused(f"{where} has required {name!r}, which is no text")
    if not isinstance(node.get("pattern", ""), str):
        raise SchemaRefused(f"{where} has a pattern that is no text")
    if not isinstance(node.get("format", ""), str):
        raise SchemaRefused(f"{where} has format {node['format']!r}, which is no text")


class _Empty(Exception):
    """No value satisfies a goal."""


def holds(value: Any, schema: Any, root: Any) -> bool | None:
    """Does a schema within a schema, the root, allow a value? None if that is not known."""
    try:
        return _Validator(root).holds(value, schema, "")
    except (SchemaRefused, RecursionError):
        return None


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """The types of the values that a schema within a schema, the root, allows; perhaps more. Numbers are `number`."""
    try:
        reader = _Reader(root)
        goal = reader.closure((schema, ""))
        kinds = [] if goal is None else reader.kinds(goal)
    except (SchemaRefused, RecursionError):
        return frozenset(_OF_TYPE)
    found = {name for kind in kinds for name in _types_of_kind(kind)}
    return frozenset(found or _OF_TYPE)


def _types_of_kind(kind: "_Kind") -> Iterator[str]:
    if isinstance(kind, _Values):
        yield from ("number" if (name := type_of(value)) == "integer" else name for value in kind.values)
    else:
        yield {_Text: "string", _Array: "array", _Object: "object", _Number: "number"}[type(kind)]


class _Validator:
    """Validator of values that are there by a schema, which counts the steps that reading the schema takes."""

    def __init__(self, root: Any) -> None:
        self.schema = _Schema(root)
        self._num_steps = self._num_places = 0

    def _count(self, num_steps: int = 1) -> None:
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise SchemaRefused(
                f"it takes more than {MAX_STEPS} steps to read, by its references or alternatives; make it simpler"
            )

    def _matches(self, pattern: text.Node, value: str) -> bool:
        return text.matches(pattern, value, self._count_places)

    def _count_places(self, num_places: int) -> None:
        self._num_places += num_places
        if self._num_places > MAX_PLACES:
            raise SchemaRefused("its names or values take too long to compare with its patterns; make them fewer or shorter")

    def holds(self, value: Any, schema: Any, place: str, depth: int = 0) -> bool | None:
        """Does a schema allow a value? None if that is not known."""
        node = self.schema.node(schema, place)
        if isinstance(node, bool):
            return node
        self._count()
        if depth > 2 * MAX_DEPTH:
            return None
        said = node.value
        if "$ref" in said:
            target = self.holds(value, *self.schema.referred(node), depth + 1)
            beside = self._holds_beside(value, said, place, depth)
            return target if beside or target is False else None
        return self._holds_beside(value, said, place, depth)

    def _holds_beside(self, value: Any, said: dict[str, Any], place: str, depth: int) -> bool | None:
        found: list[bool | None] = [self.holds_directly(value, said, place, depth)]
        for index, part in enumerate(said.get("allOf", ())):
            found.append(self.holds(value, part, f"{place}/allOf/{index}", depth + 1))
        for keyword in ("anyOf", "oneOf"):
            if keyword in said:
                each = [
                    self.holds(value, part, f"{place}/{keyword}/{index}", depth + 1) for index, part in enumerate(said[keyword])
                ]
                if keyword == "oneOf":
                    found.append(None if None in each else each.count(True) == 1)
                else:
                    found.append(True if True in each else None if None in each else False)
        if "not" in said:
            inner = self.holds(value, said["not"], f"{place}/not", depth + 1)
            found.append(None if inner is None else not inner)
        if said.keys() & {"dependentSchemas", "dependentRequired", "dependencies"} and isinstance(value, dict):
            found.append(None)
        return False if False in found else None if None in found else True

    def holds_directly(self, value: Any, said: dict[str, Any], place: str, depth: int) -> bool | None:
        """The same of a node's own keywords."""
        found: list[bool | None] = []
        kind = type_of(value)
        if "type" in said:
            types = said["type"] if isinstance(said["type"], list) else [said["type"]]
            is_right = kind in types or (kind == "integer" and "number" in types)
            # Draft 4 calls 1.0 no integer.
            found.append(
                None if is_right and isinstance(value, float) and kind == "integer" and "number" not in types else is_right
            )
        if "enum" in said:
            found.append(_key(value) in [_key(one) for one in said["enum"]])
        if "const" in said:
            is_equal = _key(value) == _key(said["const"])
            found.append(is_equal if is_equal or self.schema.draft > 4 else None)
        if kind == "string":
            found.append(said.get("minLength", 0) <= len(value) <= said.get("maxLength", math.inf))
            if "pattern" in said:
                found.append(self._matches(self.pattern(said["pattern"], place), value))
            if (form := said.get("format")) in FORMATS:
                found.append(True if self._matches(text.of_format(form), value) else None)
            elif form in UNSERVED_FORMATS or "contentEncoding" in said:
                found.append(None)
        elif kind in ("integer", "number"):
            found.append(_interval(said).has(_exact(value)))
            if "multipleOf" in said:
                found.append((_exact(value) / _exact(said["multipleOf"])).denominator == 1)
        elif kind == "array":
            found += self._holds_items(value, said, place, depth)
        elif kind == "object":
            found += self._holds_properties(value, said, place, depth)
        return False if False in found else None if None in found else True

    def _holds_items(self, value: list[Any], said: dict[str, Any], place: str, depth: int) -> Iterator[bool | None]:
        yield said.get("minItems", 0) <= len(value) <= said.get("maxItems", math.inf)
        if said.get("uniqueItems"):
            yield len({_key(item) for item in value}) == len(value)
        if "unevaluatedItems" in said:
            yield None
        prefix, rest = _items(said)
        for index, item in enumerate(value):
            yield self.holds(item, prefix[index] if index < len(prefix) else rest, f"{place}/items", depth + 1)

    def _holds_properties(self, value: dict[str, Any], said: dict[str, Any], place: str, depth: int) -> Iterator[bool | None]:
        yield said.get("minProperties", 0) <= len(value) <= said.get("maxProperties", math.inf)
        yield value.keys() >= set(said.get("required", ()))
        if "unevaluatedProperties" in said:
            yield None
        for name, part in value.items():
            for schema, inner in self._of_name(name, said, place):
                yield self.holds(part, schema, inner, depth + 1)
            if "propertyNames" in said:
                yield self.holds(name, said["propertyNames"], f"{place}/propertyNames", depth + 1)

    def _of_name(self, name: str, said: dict[str, Any], place: str) -> list[tuple[Any, str]]:
        """The schemas that a node has for a property, with their places."""
        found = []
        if name in said.get("properties", {}):
            found.append((said["properties"][name], f"{place}/properties/{name}"))
        for pattern, schema in said.get("patternProperties", {}).items():
            if self._matches(self.pattern(pattern, place), name):
                found.append((schema, f"{place}/patternProperties/{pattern}"))
        if not found and (keyword := _further_keyword(said)) is not None:
            found.append((said[keyword], f"{place}/{keyword}"))
        return found

    def pattern(self, pattern: str, place: str) -> text.Node:
        """Raises: SchemaRefused."""
        try:
            return text.read(pattern)
        except PatternRefused as error:
            raise SchemaRefused(f"{place or 'the schema'} has pattern {pattern!r}: {error}") from error


class _Reader(_Validator):
    """Reader of goals of a schema: the values that satisfy them."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._kinds: dict[frozenset[_Part], list[_Kind]] = {}
        self._branches: dict[frozenset[_Part], list[Goal]] = {}
        self._working: set[frozenset[_Part]] = set()
        self._string = self.schema.made({"type": "string"}, "").value
        self._any_object = self.schema.made({"type": "object"}, "").value

    def closure(self, *schemas: tuple[Any, str], parts: Goal = ()) -> Goal | None:
        """The goal of values that satisfy all these schemas, each with its place, and parts. None if there is none."""
        found = dict.fromkeys(parts)
        for value, place in schemas:
            if not self._add(value, place, found, frozenset()):
                return None
        for part in found if len(found) > 1 else ():
            if part.node is not None:
                _refuse_unevaluated(part.node)
        return tuple(found)

    def _add(self, value: Any, place: str, found: dict[_Part, None], within: frozenset[int]) -> bool:
        self._count()
        node = self.schema.node(value, place)
        if isinstance(node, bool):
            return node
        keywords, where = node.value, node.place or "the schema"
        if id(value) in within:
            raise SchemaRefused(f"{where} refers to itself and nothing else")
        within |= {id(value)}
        if keywords.keys() & _DIRECT:
            found[_Part(node)] = None
        if keywords.keys() & _APPLICATORS:
            _refuse_unevaluated(node)
        if "$ref" in keywords and not self._add(*self.schema.referred(node), found, within):
            return False
        for index, part in enumerate(keywords.get("allOf", ())):
            if not self._add(part, f"{place}/allOf/{index}", found, within):
                return False
        found |= dict.fromkeys(_Part(node, keyword) for keyword in ("anyOf", "oneOf") if keyword in keywords)
        for keyword in ("dependentSchemas", "dependentRequired", "dependencies"):
            for name, wanted in keywords.get(keyword, {}).items():
                then = {"required": wanted} if isinstance(wanted, list) else wanted
                if then is True:
                    continue
                made = {"anyOf": [{"not": _having(name)}, {"required": [name], "allOf": [then]}]}
                if not self._add(
                    self.schema.made(made, f"{place}/{keyword}/{name}").value, f"{place}/{keyword}/{name}", found, within
                ):
                    return False
        return "not" not in keywords or self._add_not(keywords["not"], f"{place}/not", found, within)

    def _add_not(self, value: Any, place: str, found: dict[_Part, None], within: frozenset[int]) -> bool:
        node = self.schema.node(value, place)
        if isinstance(node, bool):
            return not node
        said = node.value.keys() & (_DIRECT | {"$ref", "allOf", "anyOf", "oneOf", "not", *_BY_NAME})
        if not said:
            return False
        if said == {"anyOf"}:
            return all(
                self._add_not(part, f"{place}/anyOf/{index}", found, within) for index, part in enumerate(node.value["anyOf"])
            )
        if said <= {"required", "type"} and node.value.get("type", "object") == "object" and node.value.get("required"):
            names = node.value["required"]
            if "type" not in said:  # `required` allows all that is no object
                found[_Part(_Node(self._any_object, place))] = None
            if len(names) == 1:
                found[_Part(None, absent=names[0])] = None
                return True
            made = {"anyOf": [{"not": _having(name)} for name in names]}
            return self._add(self.schema.made(made, place).value, place, found, within)
        if said == {"type"}:
            given = node.value["type"]
            refused = {given} if isinstance(given, str) else set(given)
            if "integer" in refused and "number" not in refused:
                raise SchemaRefused(f"{place} is of integers alone, which this server does not enforce")
            left = sorted(_OF_TYPE.keys() - refused)
            return self._add(self.schema.made({"type": left}, place).value, place, found, within)
        raise SchemaRefused(f"{place} is not served: it may have required or type alone; leave it out")

    def kinds(self, goal: Goal) -> list[_Kind]:
        """The kinds of values that satisfy a goal, as far as they themselves tell. None of them for an empty one."""
        key = frozenset(goal)
        if key not in self._kinds:
            if key in self._working:
                raise SchemaRefused("one of its alternatives refers to them and nothing else")
            if len(self._working) > MAX_DEPTH:
                raise SchemaRefused(f"its alternatives have alternatives more than {MAX_DEPTH} levels deep")
            self._working.add(key)
            if any(part.union for part in goal):
                self._kinds[key] = [kind for branch in self.branches(goal) for kind in self.kinds(branch)]
            else:
                self._kinds[key] = list(self._direct_kinds(goal))
            self._working.discard(key)
            if len(self._kinds) > MAX_GOALS:
                raise SchemaRefused(f"its alternatives make more than {MAX_GOALS} rules; make it simpler")
        return self._kinds[key]

    def branches(self, goal: Goal) -> list[Goal]:
        """The goals of the alternatives of the first `anyOf` or `oneOf` of a goal."""
        key = frozenset(goal)
        if key in self._branches:
            return self._branches[key]
        part = next(part for part in goal if part.union)
        assert part.node is not None, "it is a union of a node"
        rest = tuple(other for other in goal if other != part)
        place = f"{part.node.place}/{part.union}"
        schemas = part.node.value[part.union]
        found = []
        for index, schema in enumerate(schemas):
            branch = self.closure((schema, f"{place}/{index}"), parts=rest)
            if branch is None or not self.kinds(branch):
                continue
            if part.union == "oneOf":
                for other_index, other in enumerate(schemas):
                    if other_index != index and branch is not None:
                        branch = self._apart(branch, other, f"{place}/{other_index}")
                if branch is None:
                    raise SchemaRefused(
                        f"{place} has alternatives that may hold together; write anyOf, or give each a property that is"
                        " required, with another const"
                    )
            found.append(branch)
        self._branches[key] = found
        return found

    def _apart(self, goal: Goal, other: Any, place: str) -> Goal | None:
        """A goal without the values that another schema allows. None if it finds none."""
        if self._excludes(goal, other, place, 0):
            return goal
        for name in self._required(other, place, 0):
            without = self.closure(parts=(*goal, _Part(None, absent=name)))
            if without is not None and self.kinds(without) and self._excludes(without, other, place, 0):
                return without
        return None

    def _required(self, schema: Any, place: str, depth: int) -> list[str]:
        """Properties without which a schema allows no object."""
        node = self.schema.node(schema, place)
        if isinstance(node, bool) or depth > MAX_DEPTH:
            return []
        found = list(node.value.get("required", ()))
        if "$ref" in node.value:
            return self._required(*self.schema.referred(node), depth + 1)
        for index, part in enumerate(node.value.get("allOf", ())):
            found += self._required(part, f"{place}/allOf/{index}", depth + 1)
        return found

    # Does a schema refuse all values of a goal?

    def _excludes(self, goal: Goal, schema: Any, place: str, depth: int) -> bool:
        return depth < 8 and all(self._excludes_kind(kind, schema, place, depth) for kind in self.kinds(goal))

    def _excludes_kind(self, kind: _Kind, schema: Any, place: str, depth: int) -> bool:
        self._count()
        node = self.schema.node(schema, place)
        if isinstance(node, bool):
            return not node
        said = node.value
        if isinstance(kind, _Values) and kind.values:
            return all(self.holds(value, schema, place, depth + 1) is False for value in kind.values)
        if depth > 16 or kind == _Values(()):
            return False
        if "$ref" in said:
            return self._excludes_kind(kind, *self.schema.referred(node), depth + 1)
        name = {_Text: "string", _Array: "array", _Object: "object"}.get(type(kind), "number")
        types = said.get("type", sorted(_TYPES))
        if name not in types and not (name == "number" and "integer" in types):
            return True
        if "enum" in said and not any(type_of(value) == name or name == "number" for value in said["enum"]):
            return True
        if "const" in said and self.schema.draft > 4 and type_of(said["const"]) not in (name, "integer"):
            return True
        if isinstance(kind, _Text):
            const = said.get("enum", [said["const"]] if "const" in said and self.schema.draft > 4 else None)
            if const is not None and not any(isinstance(value, str) and self._may_be(kind, value) for value in const):
                return True
            shorter = kind.maximum is not None and kind.maximum < said.get("minLength", 0)
            if shorter or kind.minimum > said.get("maxLength", math.inf):
                return True
        if isinstance(kind, _Number) and kind.interval.is_apart(_interval(said)):
            return True
        if isinstance(kind, _Array):
            if (kind.maximum is not None and kind.maximum < said.get("minItems", 0)) or kind.minimum > said.get(
                "maxItems", math.inf
            ):
                return True
            items = said.get("prefixItems", said.get("items"))
            if kind.minimum and items is not None and (not isinstance(items, list) or items):
                first = kind.prefix[0] if kind.prefix else kind.items
                other = items[0] if isinstance(items, list) else items
                if first is not None and self._excludes(first, other, f"{place}/items", depth + 1):
                    return True
        if isinstance(kind, _Object) and self._excludes_object(kind, said, place, depth):
            return True
        if any(
            self._excludes_kind(kind, part, f"{place}/allOf/{index}", depth + 1)
            for index, part in enumerate(said.get("allOf", ()))
        ):
            return True
        return any(
            keyword in said
            and all(
                self._excludes_kind(kind, part, f"{place}/{keyword}/{index}", depth + 1)
                for index, part in enumerate(said[keyword])
            )
            for keyword in ("anyOf", "oneOf")
        )

    def _excludes_object(self, kind: _Object, said: dict[str, Any], place: str, depth: int) -> bool:
        properties = said.get("properties", {})
        if kind.keys is None and not kind.properties.keys() >= set(said.get("required", ())):
            return True
        if (
            said.get("additionalProperties") is False
            and not said.get("patternProperties")
            and kind.required - properties.keys()
        ):
            return True
        return any(
            self._excludes(kind.properties[name], properties[name], f"{place}/properties/{name}", depth + 1)
            for name in sorted(kind.required & properties.keys() & kind.properties.keys())
        )

    def _may_be(self, kind: _Text, value: str) -> bool:
        fits = kind.minimum <= len(value) and (kind.maximum is None or len(value) <= kind.maximum)
        return fits and (kind.pattern is None or self._matches(kind.pattern, value))

    # The kinds of values of a goal without `anyOf` and `oneOf`.

    def _direct_kinds(self, goal: Goal) -> Iterator[_Kind]:
        nodes = [part.node for part in goal if part.node is not None]
        self._count(len(nodes))
        if (lister := next((node for node in nodes if node.value.keys() & {"enum", "const"}), None)) is not None:
            listed = lister.value.get("enum", [lister.value.get("const")])
            unique = {_key(value): value for value in listed}
            absent = {part.absent for part in goal if part.absent is not None}
            values = tuple(
                value
                for value in unique.values()
                if all(self.holds_directly(value, node.value, node.place, 0) for node in nodes)
                and not (isinstance(value, dict) and absent & value.keys())
            )
            if values:
                yield _Values(values)
            return
        for name in self._types(nodes):
            try:
                if name == "string":
                    yield self._text(nodes)
                elif name in ("number", "integer"):
                    yield self._number(nodes, is_integer=name == "integer")
                elif name == "array":
                    yield self._array(nodes)
                elif name == "object":
                    yield self._object(nodes, {part.absent for part in goal if part.absent is not None})
                else:
                    yield _Values((None,) if name == "null" else (True, False))
            except _Empty:
                pass

    @staticmethod
    def _types(nodes: list[_Node]) -> list[str]:
        """A keyword of one type says nothing of others, but means that type where none is given."""
        given = [node.value["type"] for node in nodes if "type" in node.value]
        if not given:
            keywords = frozenset[str]().union(*(node.value.keys() for node in nodes))
            formats = [node.value["format"] for node in nodes if "format" in node.value]
            found = [name for name, owned in _OF_TYPE.items() if owned & keywords]
            if any(form in FORMATS or form in UNSERVED_FORMATS for form in formats) and "string" not in found:
                found.append("string")
            if any(form in _INTEGER_FORMATS for form in formats) and "number" not in found:
                found.append("number")
            return found or list(_OF_TYPE)
        lists = [one if isinstance(one, list) else [one] for one in given]
        found = []
        for name in lists[0] if len(lists) == 1 else _TYPES_IN_ORDER:
            if name == "integer":
                is_allowed = all({"integer", "number"} & set(one) for one in lists)
                # Of those that allow all numbers: no second rule for the whole ones.
                is_allowed = is_allowed and not all("number" in one for one in lists)
            else:
                is_allowed = all(name in one for one in lists)
            if is_allowed and name not in found:
                found.append(name)
        return found

    def _text(self, nodes: list[_Node]) -> _Text:
        minimum, maximum = _counts(nodes, "Length")
        patterns: dict[text.Node, str] = {}
        for node in nodes:
            form = node.value.get("format")
            if form in UNSERVED_FORMATS:
                raise SchemaRefused(f"{node.place or 'the schema'} has format {form!r}; served are {', '.join(FORMATS)}")
            if form in FORMATS:
                patterns[text.of_format(form)] = f"format {form}"
            if node.value.get("contentEncoding") == "base64":
                patterns[text.of_format("base64")] = "contentEncoding base64"
            if "pattern" in node.value:
                patterns[self.pattern(node.value["pattern"], node.place)] = f"pattern {node.value['pattern']!r}"
        if not patterns:
            return _Text(None, minimum, maximum, nodes[-1].place if nodes else "")
        if len(patterns) > 1:
            place = nodes[-1].place or "the schema"
            raise SchemaRefused(f"{place} has {' and '.join(patterns.values())}; write one pattern that says both")
        (pattern,) = patterns
        fitted = text.fit(pattern, minimum, math.inf if maximum is None else maximum)
        if fitted is None:
            low, high = text.lengths(pattern)
            if high < minimum or (maximum is not None and low > maximum):
                raise _Empty
            place = nodes[-1].place or "the schema"
            raise SchemaRefused(
                f"{place} has {patterns[pattern]} with minLength or maxLength; write one pattern that says both"
            )
        return _Text(fitted, *((minimum, maximum) if fitted == text.ANYTHING else (0, None)), nodes[-1].place)

    @staticmethod
    def _number(nodes: list[_Node], *, is_integer: bool) -> _Kind:
        interval, num_decimals, multiples = Interval(), None, []
        for node in nodes:
            interval = interval.within(_interval(node.value))
            bounds = _INTEGER_FORMATS.get(node.value.get("format", ""))
            if bounds is not None:
                is_integer = True
                interval = interval.within(Interval(low=Fraction(bounds[0]), high=Fraction(bounds[1])))
            if "multipleOf" in node.value:
                multiples.append(_exact(node.value["multipleOf"]))
        for multiple in multiples:
            if multiple.denominator == 1:
                is_integer = True
            elif (
                multiple.numerator == 1
                and (digits := len(str(multiple.denominator)) - 1)
                and 10**digits == multiple.denominator
            ):
                num_decimals = digits if num_decimals is None else min(digits, num_decimals)
            else:
                is_integer = None  # type: ignore[assignment]
        where = (nodes[-1].place if nodes else "") or "the schema"
        wanted = [multiple for multiple in multiples if multiple != 1]
        if is_integer is None or (is_integer and wanted):
            step = Fraction(math.lcm(*(one.numerator for one in multiples)), math.gcd(*(one.denominator for one in multiples)))
            if is_integer:
                step = Fraction(math.lcm(step.numerator, step.denominator), step.denominator)
            if (
                interval.low is None
                or interval.high is None
                or (interval.high - interval.low) / step > MAX_MULTIPLES
                or step.denominator != 1
            ):
                raise SchemaRefused(
                    f"{where} has multipleOf {multiples[0]}, which is served for whole numbers with a minimum and a maximum"
                    f" and at most {MAX_MULTIPLES} multiples, and for 0.1, 0.01 and so on"
                )
            first = math.ceil(interval.low / step)
            last = math.floor(interval.high / step)
            found = [number * step for number in range(first, last + 1)]
            values = tuple(int(value) for value in found if value.denominator == 1 and interval.has(value))
            if not values:
                raise _Empty
            return _Values(values)
        if is_integer:
            interval = interval.of_integers()
        if interval.is_empty:
            raise _Empty
        return _Number(is_integer, interval, num_decimals)

    def _array(self, nodes: list[_Node]) -> _Array:
        minimum, maximum = _counts(nodes, "Items")
        for node in nodes:
            where = node.place or "the schema"
            if node.value.get("uniqueItems") and (maximum is None or maximum > 1):
                raise SchemaRefused(f"{where} has uniqueItems, which this server does not enforce; leave it out")
            if "prefixItems" in node.value and self.schema.draft < 2020:
                raise SchemaRefused(f"{where} has prefixItems, which its $schema does not know; write items")
        read = [_items(node.value) for node in nodes]
        prefix: list[Goal] = []
        for index in range(min(max((len(one) for one, _ in read), default=0), MAX_REPETITIONS if maximum is None else maximum)):
            parts = [
                (one[index] if index < len(one) else rest, f"{node.place}/items/{index}")
                for node, (one, rest) in zip(nodes, read, strict=True)
            ]
            goal = self.closure(*parts)
            if goal is None:
                maximum = index
                break
            prefix.append(goal)
        if maximum is not None and maximum < minimum:
            raise _Empty
        items = self.closure(*((rest, f"{node.place}/items") for node, (_, rest) in zip(nodes, read, strict=True)))
        if maximum is not None and maximum < minimum:
            raise _Empty
        return _Array(tuple(prefix), items, minimum, maximum)

    def _object(self, nodes: list[_Node], absent: set[str]) -> _Object:
        minimum, maximum = _counts(nodes, "Properties")
        required = {name for node in nodes for name in node.value.get("required", ())}
        if required & absent or (maximum is not None and maximum < len(required)):
            raise _Empty
        declared = dict.fromkeys(name for node in nodes for name in node.value.get("properties", {}))
        properties: dict[str, Goal] = {}
        for name in (*declared, *sorted(required - declared.keys())):
            self._count(len(nodes))
            parts = [part for node in nodes for part in self._of_name(name, node.value, node.place)]
            is_named = all(
                self.holds(name, node.value.get("propertyNames", True), f"{node.place}/propertyNames") for node in nodes
            )
            goal = self.closure(*parts) if is_named and name not in absent else None
            if goal is not None:
                properties[name] = goal
            elif name in required:
                raise _Empty
        keys = None if absent or required - declared.keys() else self._further(nodes)
        return _Object(properties, frozenset(required), keys, minimum, maximum, nodes[-1].place if nodes else "")

    def _further(self, nodes: list[_Node]) -> _Keys | None:
        """Properties that are not named. None if an object has only named ones: it does unless it says what the others are."""
        patterns: dict[str, list[tuple[Any, str]]] = {}
        others: list[tuple[Any, str]] = []
        for node in nodes:
            said = node.value
            for pattern, schema in said.get("patternProperties", {}).items():
                patterns.setdefault(pattern, []).append((schema, f"{node.place}/patternProperties/{pattern}"))
            if (keyword := _further_keyword(said)) is not None:
                others.append((said[keyword], f"{node.place}/{keyword}"))
        names = [
            (node.value["propertyNames"], f"{node.place}/propertyNames") for node in nodes if "propertyNames" in node.value
        ]
        declared = {name for node in nodes for name in node.value.get("properties", {})}
        if patterns:
            # A key may match several patterns, so its value satisfies all their schemas.
            # A schema that lacks one of the patterns may call its keys further ones.
            is_mixed = any(
                _further_keyword(node.value) is not None
                and not node.value.get("patternProperties", {}).keys() >= patterns.keys()
                for node in nodes
            )
            if declared or names or is_mixed:
                return None
            values = self.closure(*(part for each in patterns.values() for part in each))
            if values is None:
                return None
            return _Keys(tuple(self.pattern(pattern, nodes[-1].place) for pattern in patterns), None, values, frozenset())
        if declared and (names or all(schema is True or schema == {} for schema, _ in others)):
            return None
        values = self.closure(*others)
        key = self.closure((self._string, ""), *names) if names else None
        if values is None or (names and key is None):
            return None
        return _Keys((), key, values, frozenset(declared))


_TYPES_IN_ORDER: Final = ("object", "array", "string", "number", "integer", "boolean", "null")


def _having(name: str) -> dict[str, Any]:
    """The schema of objects that have a property."""
    return {"type": "object", "required": [name]}


_APPLICATORS: Final = frozenset(["$ref", "allOf", "anyOf", "oneOf", "not", "dependentSchemas", "dependencies"])


def _refuse_unevaluated(node: _Node) -> None:
    """Beside other schemas, they speak of what those say."""
    for keyword in ("unevaluatedProperties", "unevaluatedItems"):
        if node.value.get(keyword, True) not in (True, {}):
            where = node.place or "the schema"
            raise SchemaRefused(f"{where} has {keyword} beside other schemas, which this server does not enforce")


def _items(said: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The schemas of an array's first items, and that of all others."""
    others = said.get("unevaluatedItems", True)
    if isinstance(said.get("items"), list):
        return said["items"], said.get("additionalItems", others)
    return said.get("prefixItems", []), said.get("items", others)


def _further_keyword(said: Mapping[str, Any]) -> str | None:
    """The keyword for properties that a schema does not name."""
    return next((keyword for keyword in ("additionalProperties", "unevaluatedProperties") if keyword in said), None)


def _exact(number: float) -> Fraction:
    """As it is written in decimal."""
    if isinstance(number, int) and abs(number) >= 10**MAX_DIGITS:
        raise SchemaRefused(f"a bound has more than {MAX_DIGITS} digits")
    return Fraction(Decimal(repr(number)))


def _interval(said: Mapping[str, Any]) -> Interval:
    found = Interval()
    for bound, is_low in (("minimum", True), ("maximum", False)):
        exclusive = said.get("exclusiveMinimum" if is_low else "exclusiveMaximum")
        for value, is_open in (
            (said.get(bound), exclusive is True),  # as draft 4 says it
            (None if isinstance(exclusive, bool) else exclusive, True),
        ):
            if value is not None:
                number = _exact(value)
                other = Interval(low=number, has_low=not is_open) if is_low else Interval(high=number, has_high=not is_open)
                found = found.within(other)
    return found


def _counts(nodes: list[_Node], of: str) -> tuple[int, int | None]:
    low = max((int(node.value.get(f"min{of}", 0)) for node in nodes), default=0)
    high = min((int(node.value[f"max{of}"]) for node in nodes if f"max{of}" in node.value), default=None)
    if high is not None and high < low:
        raise _Empty
    return low, high


class _Grammar(_Reader):
    """The rules of a schema's goals."""

    def __init__(self, root: Any, rules: SchemaRules) -> None:
        super().__init__(root)
        self._goals: dict[frozenset[_Part], Goal] = {}
        self._names: dict[frozenset[_Part], str] = {}
        self._possible: set[frozenset[_Part]] = set()
        """Goals that some value satisfies."""
        self._rules = rules
        self._comma, self._colon = f'"{rules.comma}"', f'"{rules.colon}"'

    def name(self, *, is_object: bool) -> str:
        """The name of the root's rule."""
        root = self._prepared(is_object=is_object)
        for key, name in self._names.items():
            self._rules.add(name, self._body(self._goals[key]))
        return self._name(root)

    def properties(self, tag: str, end: str, begins: tuple[str, str]) -> list[Property]:
        """The named properties of the root's objects, with markup for their values."""
        kinds = [kind for kind in self.kinds(self._prepared(is_object=True)) if self._is_possible(kind)]
        kind = kinds[0] if len(kinds) == 1 else None
        if not isinstance(kind, _Object):
            raise SchemaRefused("it has alternatives or listed values, and must be one object with properties")
        if kind.minimum > len(kind.required):
            raise SchemaRefused(f"it has minProperties {kind.minimum}; name them with required")
        properties = [(name, goal) for name, goal in kind.properties.items() if self._has(goal)]
        if kind.maximum is not None and kind.maximum < len(properties):
            properties = [(name, goal) for name, goal in properties if name in kind.required]
        found = [Property(name, name in kind.required, self._markup(goal, tag, end, begins)) for name, goal in properties]
        for key, name in self._names.items():
            self._rules.add(name, self._body(self._goals[key]))
        return found

    def _prepared(self, *, is_object: bool) -> Goal:
        """The root's goal; all goals within have names."""
        given = self.schema.root
        is_right = not is_object or (isinstance(given, dict) and given.get("type") == "object")
        root = self.closure((given, ""), *([] if is_right else [(self._any_object, "")]))
        if root is not None:
            self._find(root)
            self._find_possible()
        if root is None or frozenset(root) not in self._possible:
            raise SchemaRefused("it allows no value that is known here to fit")
        for key in self._goals:
            if key in self._possible:
                self._names[key] = self._rules.unused("v")
        return root

    def _markup(self, goal: Goal, tag: str, end: str, begins: tuple[str, str]) -> str:
        """The name of a rule of a goal's values as markup."""
        text_begin, json_begin = map(quoted, begins)
        ways: list[str] = []
        for kind in self.kinds(goal):
            if isinstance(kind, _Text):
                try:
                    ways.append(f"{text_begin} {self._rules.strings.markup(_pattern(kind), tag, end)}")
                except PatternRefused as error:
                    raise SchemaRefused(f"{kind.place or 'the schema'} has a pattern that is not served: {error}") from error
            elif isinstance(kind, _Values):
                texts = [value for value in kind.values if isinstance(value, str) and tag not in value]
                ways += [f"{text_begin} {quoted(value + end)}" for value in texts]
                others = tuple(value for value in kind.values if not isinstance(value, str))
                ways += [f"{json_begin} ({self._way(_Values(others))}) {quoted(end)}"] if others else []
            elif self._is_possible(kind):
                ways.append(f"{json_begin} {self._way(kind)} {quoted(end)}")
        if not ways:
            raise SchemaRefused(f"a property allows nothing but texts with {tag}, which this form cannot write")
        return self._rules.rule("value", " | ".join(ways))

    def _find(self, root: Goal) -> None:
        """All goals that the root's values have within."""
        waiting = [root]
        while waiting:
            goal = waiting.pop()
            key = frozenset(goal)
            if key in self._goals:
                continue
            self._goals[key] = goal
            if len(self._goals) > MAX_GOALS:
                raise SchemaRefused(f"it makes more than {MAX_GOALS} rules; make it simpler")
            if any(part.union for part in goal):
                waiting += self.branches(goal)
            else:
                for kind in self.kinds(goal):
                    waiting += _inner(kind)

    def _find_possible(self) -> None:
        """Without what can have no end: a value that needs one like itself within."""
        users: dict[frozenset[_Part], list[frozenset[_Part]]] = {}
        for key, goal in self._goals.items():
            inner = (
                self.branches(goal)
                if any(part.union for part in goal)
                else [g for kind in self.kinds(goal) for g in _inner(kind)]
            )
            for one in inner:
                users.setdefault(frozenset(one), []).append(key)
        waiting = list(self._goals)
        while waiting:
            key = waiting.pop()
            if key in self._possible:
                continue
            goal = self._goals[key]
            if any(part.union for part in goal):
                is_possible = any(frozenset(branch) in self._possible for branch in self.branches(goal))
            else:
                is_possible = any(self._is_possible(kind) for kind in self.kinds(goal))
            if is_possible:
                self._possible.add(key)
                waiting += users.get(key, [])

    def _has(self, goal: Goal | None) -> bool:
        return goal is not None and frozenset(goal) in self._possible

    def _is_possible(self, kind: _Kind) -> bool:
        if isinstance(kind, _Array):
            needed = kind.prefix[: kind.minimum]
            return all(map(self._has, needed)) and (kind.minimum <= len(kind.prefix) or self._has(kind.items))
        if isinstance(kind, _Object):
            if not all(self._has(kind.properties[name]) for name in kind.required):
                return False
            others = kind.keys is not None and self._has(kind.keys.values)
            num_known = sum(map(self._has, kind.properties.values()))
            return kind.minimum <= num_known or others
        return not isinstance(kind, _Values) or bool(kind.values)

    def _body(self, goal: Goal) -> str:
        if any(part.union for part in goal):
            names = dict.fromkeys(self._name(branch) for branch in self.branches(goal) if self._has(branch))
            return " | ".join(names)
        ways = [self._way(kind) for kind in self.kinds(goal) if self._is_possible(kind)]
        return " | ".join(ways)

    def _name(self, goal: Goal) -> str:
        return self._names[frozenset(goal)]

    def _way(self, kind: _Kind) -> str:
        if isinstance(kind, _Values):
            return " | ".join(
                quoted(json.dumps(value, ensure_ascii=False, separators=(self._rules.comma, self._rules.colon)))
                for value in kind.values
            )
        if isinstance(kind, _Text):
            return self._string_way(kind)
        if isinstance(kind, _Number):
            if kind.is_integer:
                return self._rules.rule("integer", integer_rule(kind.interval))
            found = number_rule(kind.interval, kind.num_decimals)
            if found is None:
                raise SchemaRefused("its bounds leave only numbers with more digits than are served")
            return self._rules.rule("number", found)
        return self._array_way(kind) if isinstance(kind, _Array) else self._object_way(kind)

    def _string_way(self, kind: _Text) -> str:
        try:
            return self._rules.rule("string", self._rules.strings.string(_pattern(kind)))
        except PatternRefused as error:
            what = "a length" if kind.pattern is None else "a pattern"
            raise SchemaRefused(f"{kind.place or 'the schema'} has {what} that is not served: {error}") from error

    def _array_way(self, kind: _Array) -> str:
        prefix = list(kind.prefix)
        maximum = kind.maximum
        for index, goal in enumerate(prefix):
            if not self._has(goal):
                prefix, maximum = prefix[:index], index
                break
        if not self._has(kind.items):
            maximum = len(prefix) if maximum is None else min(maximum, len(prefix))
        prefix = prefix[:maximum]
        rest = ""
        if maximum is None or maximum > len(prefix):
            assert kind.items is not None, "there is no maximum without them"
            item = self._name(kind.items)
            least = max(0, kind.minimum - len(prefix))
            most = None if maximum is None else min(maximum, MAX_REPETITIONS) - len(prefix)
            if prefix:
                rest = _repeated(f"{self._comma} {item}", least, most)
            else:
                more = _repeated(f"{self._comma} {item}", max(0, least - 1), None if most is None else most - 1)
                rest = f"{item} {more}".rstrip()
                rest = rest if least else f"({rest})?"
        for index in reversed(range(len(prefix))):
            comma = f"{self._comma} " if index else ""
            rest = f"{comma}{self._name(prefix[index])} {rest}".rstrip()
            if index >= kind.minimum:
                rest = self._rules.rule("items", f'{rest} | ""')
        return self._rules.rule("array", f'"[" {rest} "]"')

    def _object_way(self, kind: _Object) -> str:
        properties = [(name, goal) for name, goal in kind.properties.items() if self._has(goal)]
        keys = kind.keys if kind.keys is not None and self._has(kind.keys.values) else None
        if keys is not None and keys.names is not None and not self._has(keys.names):
            keys = None
        required = set(kind.required)
        where = kind.place or "the schema"
        if kind.minimum > max(len(required), 1 if properties or keys is not None else 0):
            raise SchemaRefused(f"{where} has minProperties {kind.minimum}; name them with required")
        is_one = kind.maximum is not None and kind.maximum < len(properties) + (keys is not None)
        if kind.maximum is not None and keys is not None and properties:
            raise SchemaRefused(f"{where} has maxProperties beside additionalProperties; write false for those")
        if is_one and keys is None:
            if kind.maximum == len(required):
                properties = [(name, goal) for name, goal in properties if name in required]
            elif kind.maximum != 1:
                raise SchemaRefused(
                    f"{where} has maxProperties {kind.maximum} of {len(properties)} properties, of which 1 is served"
                )
        pairs = [
            (name in required, f"{quoted(json.dumps(name, ensure_ascii=False) + self._rules.colon)} {self._name(goal)}")
            for name, goal in properties
        ]
        more = ""
        if keys is not None:
            pair = self._rules.rule("pair", f"{self._key_way(keys)} {self._colon} {self._name(keys.values)}")
            most = None if kind.maximum is None else min(kind.maximum, MAX_REPETITIONS)
            more = _repeated(f"{self._comma} {pair}", 0, most)
            if not pairs:
                behind_first = _repeated(f"{self._comma} {pair}", 0, None if most is None else most - 1)
                first = f"{pair} {behind_first}".rstrip()
                first = first if kind.minimum else f"({first})?"
                return self._rules.rule("object", f'"{{" {first if most != 0 else ""} "}}"')
        if kind.maximum == 1 and not required and pairs and keys is None:
            ways = [pair for _, pair in pairs] + ([] if kind.minimum else ['""'])
            return self._rules.rule("object", f'"{{" ({" | ".join(ways)}) "}}"')
        if not pairs:
            return self._rules.rule("object", '"{}"')
        begins = next((index for index, (is_required, _) in enumerate(pairs) if is_required), None)
        # Behind the first pair all begin with a comma, and end with the object: a rule that ends takes longer to mask.
        behind = [""] * len(pairs)
        rest = f'{more} "}}"'.lstrip()
        for index in reversed(range(0 if begins is None else begins, len(pairs))):
            behind[index] = rest
            is_required, pair = pairs[index]
            rest = (
                f"{self._comma} {pair} {rest}"
                if is_required
                else self._rules.rule("more", f"{self._comma} {pair} {rest} | {rest}")
            )
        if begins is not None:
            rest = f"{pairs[begins][1]} {behind[begins]}"
            for _, pair in reversed(pairs[:begins]):
                rest = self._rules.rule("first", f"{pair} {self._comma} {rest} | {rest}")
            return self._rules.rule("object", f'"{{" {rest}')
        ways = [f"{pair} {behind[index]}" for index, (_, pair) in enumerate(pairs)]
        if keys is not None:
            pair = self._rules.rule("pair", f"{self._key_way(keys)} {self._colon} {self._name(keys.values)}")
            ways.append(f'{pair} {more} "}}"')
        if not kind.minimum:
            ways.append('"}"')
        return self._rules.rule("object", " | ".join(f'"{{" {way}' for way in ways))

    def _key_way(self, keys: _Keys) -> str:
        if keys.patterns:
            ways = [self._string_way(_Text(pattern, 0, None)) for pattern in keys.patterns]
            return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"
        if keys.others:
            return self._rules.rule("key", rf'"\"" {self._other_than(sorted(keys.others))}')
        return self._name(keys.names) if keys.names is not None else self._string_way(_Text(None, 0, None))

    def _other_than(self, names: list[str]) -> str:
        """The rest of a key that is none of these names, with the quote behind it, and without escapes."""
        if sum(map(len, names)) > MAX_OTHER_KEYS:
            raise SchemaRefused(
                f"additionalProperties is served beside names of up to {MAX_OTHER_KEYS} characters in all; send false"
            )
        self._rules.add("plain", rf'"\"" | {text.UNESCAPED} plain')
        by_first: dict[str, list[str]] = {}
        for name in names:
            by_first.setdefault(name[:1], []).append(name[1:])
        ways = [] if "" in by_first else [r'"\""']
        excluded = "".join(f"\\U{ord(first):08x}" for first in by_first if first)
        ways.append(rf'[^"\\\x00-\x1f{excluded}] plain')
        ways += [
            f"{quoted(first)} {self._other_than(rest)}" for first, rest in by_first.items() if first and text.is_plain(first)
        ]
        return self._rules.rule("key", " | ".join(ways))


def _pattern(kind: _Text) -> text.Node:
    """The pattern of a string. Lengths beside a pattern are in the pattern."""
    if kind.pattern is None or kind.pattern == text.ANYTHING:
        return text.Repeat(text.ANY, kind.minimum, kind.maximum)
    return kind.pattern


_WORD: Final = re.compile(r'\[(?:[^\]\\]|\\.)*\]|"(?:[^"\\]|\\.)*"|[a-z]+[0-9]*')
"""A word of GBNF: a set of characters, a text, or a name."""
_NAME: Final = re.compile("[a-z]+[0-9]*")


def _needed(rules: dict[str, str]) -> dict[str, str]:
    """The rules that the root needs."""
    found, waiting = {"root"}, ["root"]
    while waiting:
        words = {word for word in _WORD.findall(rules[waiting.pop()]) if word in rules}
        waiting += words - found
        found |= words
    return {name: body for name, body in rules.items() if name in found}


def _merged(rules: dict[str, str]) -> dict[str, str]:
    """The same rules without those that say what another does: each takes time to compile."""
    while True:
        first: dict[str, str] = {}
        same: dict[str, str] = {}
        for name, body in rules.items():
            if name == "root":
                continue
            if _NAME.fullmatch(body):
                same[name] = body
            elif (other := first.setdefault(body, name)) != name:
                same[name] = other
        if not same:
            return rules

        def kept(word: re.Match[str], same: dict[str, str] = same) -> str:
            name = word[0]
            while name in same:
                name = same[name]
            return name

        rules = {name: _WORD.sub(kept, body) for name, body in rules.items() if name not in same}


def _inner(kind: _Kind) -> list[Goal]:
    """The goals of the values within."""
    if isinstance(kind, _Array):
        return [*kind.prefix, *([] if kind.items is None else [kind.items])]
    if isinstance(kind, _Object):
        keys = [] if kind.keys is None else [kind.keys.values, *([] if kind.keys.names is None else [kind.keys.names])]
        return [*kind.properties.values(), *keys]
    return []


def _repeated(element: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    return f"({element}){{{least},{'' if most is None else most}}}" if (least, most) != (0, None) else f"({element})*"
