"""A corpus of schemas by name, tried by tests and measured by `serve`: nested, enums, arrays, numbers, unicode."""

from typing import Any, Final


def _object(required: bool = True, /, **properties: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": sorted(properties)} if required else schema


def _array(items: Any, **limits: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


_SHORT: Final = {"type": "string", "maxLength": 8}
_BOOLEAN: Final = {"type": "boolean"}
_DIGIT: Final = {"type": "integer", "minimum": 0, "maximum": 9}

SCHEMAS: Final[dict[str, Any]] = {
    # single values
    "null": {"type": "null"},
    "boolean": _BOOLEAN,
    "integer": {"type": "integer", "minimum": -5, "maximum": 5},
    "integer above": {"type": "integer", "minimum": 10, "maximum": 19},
    "integer between": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100},
    "large integer": {"type": "integer", "minimum": 1000000, "maximum": 2000000},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "negative number": {"type": "number", "minimum": -10, "maximum": -1},
    "number above": {"type": "number", "exclusiveMinimum": 0, "maximum": 1000},
    "empty string": {"type": "string", "maxLength": 0},
    "short string": _SHORT,
    "string of a length": {"type": "string", "minLength": 3, "maxLength": 3},
    "nullable": {"type": ["string", "null"]},
    "constant": {"const": "yes"},
    "constant object": {"const": {"a": [1, 2, {"b": None}], "c": 1.5}},
    "constant with quotes": {"const": 'say "no"\n\t\\ and more'},
    # enums
    "enum": {"enum": ["red", "green", "blue"]},
    "enum of all kinds": {"enum": [1, "1", None, True, 2.5, [1], {"a": 1}]},
    "enum of prefixes": {"enum": ["a", "ab", "abc", "abcd"]},
    "typed enum": {"type": "string", "enum": ["north", "south"]},
    "enum of one": {"enum": ["only"]},
    "enum of numbers": {"enum": [1, 10, 100, 1000, -1]},
    # unicode
    "unicode constant": {"const": "Grüße, 世界 🌍"},
    "unicode enum": {"enum": ["é", "è", "ê", "日本", "日曜", "🙂", "🙃"]},
    "unicode keys": _object(**{"naïve": _BOOLEAN, "日本語": _DIGIT, "emoji 🎉": _SHORT}),
    "escaped keys": _object(**{'with "quotes"': _BOOLEAN, "with\\backslash": _DIGIT, "with\nnewline": _BOOLEAN}),
    "unicode pattern": {"type": "string", "pattern": "^[äöü]{1,4}$"},
    # patterns and formats
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
    "pattern of choices": {"type": "string", "pattern": "^(cat|dog|bird)s?$"},
    "phone": {"type": "string", "pattern": "^\\+[1-9][0-9]{4,10}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date and time": {"type": "string", "format": "date-time"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "array of dates": _array({"type": "string", "format": "date"}, minItems=1, maxItems=2),
    "uuid": {"type": "string", "format": "uuid"},
    "email": {"type": "string", "format": "email"},
    # arrays
    "array": _array(_DIGIT, maxItems=5),
    "array of a length": _array(_DIGIT, minItems=3, maxItems=3),
    "empty array": _array(_DIGIT, maxItems=0),
    "array of at least": _array(_BOOLEAN, minItems=2, maxItems=6),
    "array of arrays": _array(_array(_DIGIT, maxItems=3), maxItems=3),
    "array of objects": _array(_object(x=_DIGIT, y=_DIGIT), minItems=1, maxItems=3),
    "array of enums": _array({"enum": ["a", "b", "c"]}, minItems=1, maxItems=4),
    "tuple": {"type": "array", "prefixItems": [_SHORT, _DIGIT, _BOOLEAN], "items": False, "minItems": 3},
    "array of either": _array({"anyOf": [_DIGIT, _BOOLEAN, {"type": "null"}]}, maxItems=4),
    # objects
    "empty object": _object(),
    "one key": _object(name=_SHORT),
    "three keys": _object(name=_SHORT, age={"type": "integer", "minimum": 0, "maximum": 150}, admin=_BOOLEAN),
    "optional keys": _object(False, a=_DIGIT, b=_BOOLEAN, c=_SHORT),
    "some required": {**_object(False, a=_DIGIT, b=_BOOLEAN, c=_SHORT), "required": ["b"]},
    "long keys": _object(**{f"a_rather_long_key_of_number_{index}": _DIGIT for index in range(6)}),
    "keys that begin alike": _object(**{"item": _DIGIT, "items": _DIGIT, "item_count": _DIGIT}),
    "map": {"type": "object", "additionalProperties": _DIGIT},
    "keys with defaults": {
        "title": "Settings", "description": "of a lamp", "type": "object", "required": ["on", "level"],
        "properties": {"on": {"type": "boolean", "default": True}, "level": {**_DIGIT, "examples": [3]}},
        "additionalProperties": False,
    },
    # nested
    "address": _object(
        name=_SHORT,
        address=_object(street=_SHORT, zip={"type": "string", "pattern": "^[0-9]{5}$"}, country={"enum": ["DE", "FR", "US"]}),
    ),
    "four deep": _object(a=_object(b=_object(c=_object(d=_DIGIT)))),
    "either of two": {"anyOf": [_object(kind={"const": "circle"}, r=_DIGIT), _object(kind={"const": "square"}, side=_DIGIT)]},
    "nullable object": {"anyOf": [_object(id=_DIGIT), {"type": "null"}]},
    "all of one": {"allOf": [_object(a=_DIGIT)]},
    "reference": {
        "$defs": {"point": _object(x=_DIGIT, y=_DIGIT)},
        **_object(**{"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}),
    },
    "tree": {
        "$defs": {
            "leaf": {"enum": ["leaf"]},
            "node": _object(left={"anyOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/node"}]}, value=_DIGIT),
        },
        "$ref": "#/$defs/node",
    },
    "list of a schema of its own": {
        "definitions": {"tag": {"enum": ["x", "y"]}},
        **_object(tags=_array({"$ref": "#/definitions/tag"}, maxItems=3)),
    },
    # as clients ask
    "tool call": _object(
        name={"enum": ["get_weather", "get_time"]},
        arguments=_object(city=_SHORT, unit={"enum": ["celsius", "fahrenheit"]}),
    ),
    "classification": _object(
        label={"enum": ["positive", "neutral", "negative"]}, confidence={"type": "number", "minimum": 0, "maximum": 1}
    ),
    "extraction": _object(
        people=_array(_object(name=_SHORT, role={"enum": ["author", "editor"]}), maxItems=2),
        year={"type": "integer", "minimum": 1900, "maximum": 2100},
        isbn={"type": ["string", "null"]},
    ),
    "receipt": _object(
        items=_array(_object(sku={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"}, count=_DIGIT), minItems=1, maxItems=3),
        total={"type": "number", "minimum": 0, "maximum": 9999},
        paid=_BOOLEAN,
    ),
    "steps": _object(steps=_array(_object(thought=_SHORT, result=_SHORT), minItems=1, maxItems=3), answer=_SHORT),
}  # fmt: skip
