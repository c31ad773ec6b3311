"""What of JSON schema is served, and how the rest is refused: by its place and keyword."""

import json
import re
from typing import Any

import jsonschema_rs
import pytest

from bench.suites.serve.schemas import SCHEMAS
from vmmkv.server.structured_output.schema import FORMATS, Grammar, GrammarRefused, of_choices, of_object, of_schema


def nested(depth: int) -> Any:
    value: Any = {"type": "null"}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (7, "the schema is no schema"),
        ({"type": "strange"}, "type 'strange'"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "/properties/a has not"),
        ({"type": "array", "items": {"anyOf": [{"if": {}}]}}, "/items/anyOf/0 has if"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "number", "multipleOf": 2}, "multipleOf"),
        ({"oneOf": [{"type": "null"}]}, "oneOf"),
        ({"allOf": [True, True]}, "allOf of several"),
        ({"minLength": 3}, 'without "type": "string"'),
        ({"type": ["string", "null"], "minLength": 3}, "several types"),
        ({"anyOf": [True], "enum": [1]}, "which this server does not enforce together"),
        ({"type": "string", "format": "color"}, "date"),
        ({"type": "string", "format": "date", "maxLength": 3}, "write one pattern"),
        ({"type": "string", "pattern": 7}, "no text"),
        ({"type": "string", "pattern": 'a"b'}, "JSON escapes"),
        ({"type": "string", "pattern": r"a\nb"}, "JSON escapes"),
        ({"type": "object", "required": ["z"]}, "required 'z'"),
        ({"type": "object", "required": "z"}, "no list"),
        (
            {"type": "object", "properties": {"a": True}, "additionalProperties": {"type": "null"}},
            "beside additionalProperties",
        ),
        ({"type": "integer", "enum": ["a"]}, "'a', which is not of its type"),
        ({"$ref": "https://example.org/x"}, "within the schema"),
        ({"$ref": "#/$defs/x", "type": "null"}, "type beside $ref"),
        ({"anyOf": []}, "no list of schemas"),
        ({"$defs": []}, "no object"),
        ({"type": "object", "properties": 7, "required": ["a"]}, "no object"),
        ({"allOf": 7}, "no list of schemas"),
        ({"type": "null", "enum": 7}, "enum that is no list"),
        ({"type": "string", "format": []}, "format []"),
        ({"type": "string", "pattern": None}, "no text"),
        (nested(3_000), "64 levels"),
        ({"enum": list(range(5000))}, "4096 values"),
        ({"const": "x" * 70000}, "65536"),
        ({"type": "string", "maxLength": 100000}, "4096"),
        ({"type": "array", "minItems": True}, "minItems True"),
        ({"const": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_a_schema_that_is_not_enforced_is_refused_by_place_and_keyword(schema: Any, said: str) -> None:
    with pytest.raises(GrammarRefused, match=re.escape(said)):
        of_schema(schema)


@pytest.mark.parametrize(("choices", "said"), [([], "1 to 1024"), ([""], "none of them empty"), (["a"] * 1025, "has 1025")])
def test_choices_are_one_to_1024_texts(choices: list[str], said: str) -> None:
    with pytest.raises(GrammarRefused, match=said):
        of_choices(choices)


def test_a_grammar_has_a_source() -> None:
    with pytest.raises(GrammarRefused, match="empty"):
        Grammar("regex", "")


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_rewritten_schema_allows_no_value_that_the_given_one_refuses(name: str) -> None:
    given, served = SCHEMAS[name], json.loads(of_schema(SCHEMAS[name]).source)
    values = [None, True, -1, 0, 5, 10, 0.5, "", "a", "ab", 'q"', "2024-02-30", "2024-02-29", [], [1], ["a"], {}, {"a": 1}]
    for value in values:
        if jsonschema_rs.is_valid(served, value):
            assert jsonschema_rs.is_valid(given, value, validate_formats=True), value


@pytest.mark.parametrize("extra", [{"id": "x"}, {"example": {"not": {}}}, {"x-order": 1}, {"nullable": True}, {"then": False}])
def test_keywords_that_no_vocabulary_defines_change_nothing(extra: dict[str, Any]) -> None:
    plain = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    assert of_schema(plain | extra) == of_schema(plain)
    assert of_schema({"allOf": [plain]} | extra) == of_schema({"allOf": [plain]})


@pytest.mark.parametrize("further", [True, {}])
@pytest.mark.parametrize("schema", [{"type": "object"}, {"type": "object", "properties": {"a": {"type": "boolean"}}}])
def test_an_open_object_means_the_same_whether_it_says_so_or_not(schema: Any, further: Any) -> None:
    assert of_schema(schema | {"additionalProperties": further}) == of_schema(schema)


def test_strings_become_patterns_and_annotations_go() -> None:
    schema = {"title": "t", "type": "object", "properties": {"a": {"type": "string", "minLength": 2, "description": "d"}}}
    assert json.loads(of_schema(schema).source) == {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": r'^[^"\\\x00-\x1f]{2,}$'}},
    }
    assert json.loads(of_object().source) == {"type": "object"}
    optional = json.loads(of_schema({"type": "string", "pattern": r"^(a)?[)]?\)?$"}).source)
    assert optional["pattern"] == r"^(a){0,1}[)]?\)?$", "xgrammar 0.2.8 lets the end of a group come without its beginning"


@pytest.mark.parametrize(
    ("form", "valid", "wrong"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("time", "23:59:59Z", "23:59:60Z"),
        ("date-time", "2024-12-31T00:00:00+01:00", "2024-12-32T00:00:00Z"),
        ("uuid", "12345678-1234-1234-1234-123456789abc", "12345678-1234-1234-1234-123456789ab"),
        ("ipv4", "192.168.0.1", "192.168.00.1"),
        ("email", "a.b@example.org", "a@b"),
    ],
)
def test_formats_are_patterns_of_valid_values(form: str, valid: str, wrong: str) -> None:
    assert re.fullmatch(FORMATS[form], valid) and not re.fullmatch(FORMATS[form], wrong)
