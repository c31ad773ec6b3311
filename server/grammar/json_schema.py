"""Which JSON schemas are served: those whose every keyword the grammar keeps. Others are refused by name, never half obeyed."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from vmmkv.server.grammar.json_strings import FORMATS, as_pattern, check_pattern

MAX_DEPTH: Final = 64
"""Of values within values."""
MAX_NODES: Final = 4096
"""Values in all, of which a schema is made."""
MAX_COUNT: Final = 4096
"""Of a minimum or maximum of items, characters or properties: each is a copy of a rule."""

_ANNOTATIONS: Final = frozenset(
    ("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
)
_OF_ANY: Final = frozenset(["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"])
_OF_TYPE: Final[Mapping[str, frozenset[str]]] = {
    "object": frozenset(["properties", "required", "additionalProperties"]),
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems"]),
    "string": frozenset(["minLength", "maxLength", "pattern", "format"]),
    "integer": frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    "number": frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    "boolean": frozenset(),
    "null": frozenset(),
}
_SERVED: Final = frozenset[str]().union(_OF_ANY, *_OF_TYPE.values())
_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength")
_SCHEMAS_BY_NAME: Final = ("properties", "$defs", "definitions")
_LISTS_OF_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS: Final = ("items", "additionalProperties")


_FITS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def served(schema: Any) -> Any:
    """A schema that says the same in what the grammar compiler keeps. Raises: ValueError, as `check_schema`."""
    check_schema(schema)
    return _rewritten(schema)


def _rewritten(node: Any) -> Any:
    """Its strings as patterns; it is known to be a schema, and not deep."""
    if not isinstance(node, dict):
        return node
    new = {key: value for key, value in node.items() if key not in _ANNOTATIONS}
    if (pattern := as_pattern(node)) is not None:
        new = {key: value for key, value in new.items() if key not in ("format", "minLength", "maxLength")}
        new["pattern"] = pattern
    for name in _SCHEMAS_BY_NAME:
        if name in new:
            new[name] = {key: _rewritten(value) for key, value in new[name].items()}
    for name in _LISTS_OF_SCHEMAS:
        if name in new:
            new[name] = [_rewritten(value) for value in new[name]]
    for name in _SCHEMAS:
        if name in new:
            new[name] = _rewritten(new[name])
    return new


def check_schema(schema: Any) -> None:
    """Raises: ValueError naming the place and what is wrong, or not served."""
    _check_size(schema)
    waiting = [("", schema)]
    while waiting:
        place, node = waiting.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise ValueError(f"{place or 'the schema'} is no schema: wanted an object, true or false")
        _check_node(place, node)
        waiting.extend(_below(place, node))


def _check_size(schema: Any) -> None:
    """Without recursion: how deep it goes is what is to be found out."""
    waiting, num_nodes = [(schema, 1)], 0
    while waiting:
        node, depth = waiting.pop()
        num_nodes += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        if num_nodes > MAX_NODES:
            raise ValueError(f"it is made of more than {MAX_NODES} values")
        parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        waiting.extend((part, depth + 1) for part in parts)


def _check_node(place: str, node: Mapping[str, Any]) -> None:
    where = place or "the schema"
    unserved = sorted(node.keys() - _SERVED - _ANNOTATIONS)
    if unserved:
        raise ValueError(f"{where} has {', '.join(unserved)}, which this server does not enforce; leave it out")
    if "$ref" in node:
        ref = node["$ref"]
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise ValueError(f"{where} has $ref {ref!r}; only references within the schema are served, as #/$defs/name")
        _alone(where, node, "$ref", allowed=frozenset({"$defs", "definitions"}))
        return
    for name in ("const", "enum", "anyOf", "oneOf", "allOf"):
        if name in node:
            # Beside these the grammar would not look at other keywords; a type that says the same again does no harm.
            _alone(where, node, name, allowed=frozenset({"$defs", "definitions", "type"}))
    if "oneOf" in node:
        raise ValueError(f"{where} has oneOf, of which this server would enforce anyOf; write that, if they exclude each other")
    if len(node.get("allOf", ())) > 1:
        raise ValueError(f"{where} has allOf of several schemas, which this server does not enforce; write one that says all")
    _check_type(where, node)
    for name in _COUNTS:
        if name in node and not (_FITS["integer"](node[name]) and 0 <= node[name] <= MAX_COUNT):
            raise ValueError(f"{where} has {name} {node[name]!r}; from 0 to {MAX_COUNT} is served")
    _check_string(where, node)
    _check_object(where, node)


def _check_string(where: str, node: Mapping[str, Any]) -> None:
    if (form := node.get("format")) is not None and form not in FORMATS:
        raise ValueError(f"{where} has format {form!r}; served are {', '.join(FORMATS)}")
    if (pattern := node.get("pattern")) is not None:
        if not isinstance(pattern, str):
            raise ValueError(f"{where} has a pattern that is no text")
        check_pattern(pattern)
    both = sorted(node.keys() & {"format", "pattern", "minLength", "maxLength"})
    if len(both) > 1 and ("format" in node or "pattern" in node):
        raise ValueError(f"{where} has {' and '.join(both)}, of which this server would enforce one; write one pattern")


def _check_object(where: str, node: Mapping[str, Any]) -> None:
    properties, required = node.get("properties"), node.get("required", [])
    if properties is not None and node.get("additionalProperties", False) is not False:
        # A key can be written in two ways, and the second "a" of an object is the one that counts.
        raise ValueError(f"{where} has properties beside additionalProperties; leave those out, or send false")
    if not isinstance(required, list):
        raise ValueError(f"{where} has required that is no list")
    if missing := [name for name in required if not isinstance(name, str) or name not in (properties or {})]:
        raise ValueError(f"{where} has required {missing[0]!r}, which is not in its properties")


def _check_type(where: str, node: Mapping[str, Any]) -> None:
    """A keyword of one type says nothing of the others: without the type, the grammar would guess it."""
    given = node.get("type")
    types = given if isinstance(given, list) else [] if given is None else [given]
    if strange := [one for one in types if not isinstance(one, str) or one not in _OF_TYPE]:
        raise ValueError(f"{where} has type {strange[0]!r}; there are {', '.join(_OF_TYPE)}")
    typed = frozenset[str]().union(*_OF_TYPE.values())
    mine = frozenset[str]().union(*(_OF_TYPE[one] for one in types))
    stray = sorted((node.keys() & typed) - mine)
    if stray:
        owner = next(name for name, keywords in _OF_TYPE.items() if stray[0] in keywords)
        raise ValueError(f'{where} has {stray[0]} without "type": "{owner}"; say which type it is')
    values = node.get("enum", [node["const"]] if "const" in node else [])
    if types and (strays := [value for value in values if not any(_FITS[one](value) for one in types)]):
        raise ValueError(f"{where} has the value {strays[0]!r}, which is not of its type")
    if isinstance(given, list) and len(given) > 1 and mine & node.keys():
        raise ValueError(f"{where} has several types and {sorted(mine & node.keys())[0]}; write anyOf, a schema for each type")


def _alone(where: str, node: Mapping[str, Any], name: str, *, allowed: frozenset[str]) -> None:
    beside = sorted(node.keys() - _ANNOTATIONS - allowed - {name})
    if beside:
        raise ValueError(f"{where} has {beside[0]} beside {name}, which this server does not enforce together")


def _below(place: str, node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _SCHEMAS_BY_NAME:
        if name in node:
            if not isinstance(node[name], dict):
                raise ValueError(f"{place or 'the schema'} has {name} that is no object")
            yield from ((f"{place}/{name}/{key}", value) for key, value in node[name].items())
    for name in _LISTS_OF_SCHEMAS:
        if name in node:
            if not isinstance(node[name], list) or not node[name]:
                raise ValueError(f"{place or 'the schema'} has {name} that is no list of schemas")
            yield from ((f"{place}/{name}/{index}", value) for index, value in enumerate(node[name]))
    yield from ((f"{place}/{name}", node[name]) for name in _SCHEMAS if name in node)
