"""What of JSON schema is served, and how the rest is refused: by its place and keyword."""

import re
from typing import Any

import pytest

from vmmkv_server.structured_output.schema import Grammar, GrammarRefused, of_choices, of_schema
from vmmkv_server.structured_output.text import FORMATS


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
        ({"type": "object", "properties": {"a": {"not": {"minimum": 2}}}}, "/properties/a/not"),
        ({"type": "array", "items": {"anyOf": [{"if": {}}]}}, "/items/anyOf/0 has if"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": True}, "contains"),
        ({"type": "number", "multipleOf": 2}, "multipleOf"),
        ({"type": "number", "multipleOf": 0}, "above 0"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "/oneOf has alternatives that may hold together"),
        ({"type": "string", "format": "regex"}, "served are date"),
        ({"type": "string", "format": "date", "pattern": "a"}, "write one pattern"),
        ({"type": "string", "pattern": 7}, "no text"),
        ({"type": "string", "pattern": "(?=a)"}, "lookahead is not served"),
        ({"type": "string", "pattern": r"(a)\1"}, r"\1 is not served"),
        ({"type": "string", "pattern": "[a"}, "not closed"),
        ({"type": "object", "required": "z"}, "no list"),
        ({"type": "object", "required": ["z"], "additionalProperties": False}, "allows no value"),
        ({"type": "integer", "enum": ["a"]}, "allows no value"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "allows no value"),
        ({"type": "array", "prefixItems": [False], "minItems": 1}, "allows no value"),
        (
            {"type": "array", "prefixItems": [True, {"type": "array", "items": False, "minItems": 1}], "minItems": 2},
            "allows no",
        ),
        ({"$ref": "https://example.org/x"}, "within the schema"),
        ({"$ref": "#/$defs/x"}, "nothing there"),
        ({"$ref": "#"}, "refers to itself"),
        ({"anyOf": [{"$ref": "#"}, True]}, "nothing else"),
        ({"anyOf": []}, "no list of schemas"),
        ({"dependentSchemas": []}, "no object"),
        ({"type": "object", "properties": 7, "required": ["a"]}, "no object"),
        ({"allOf": 7}, "no list of schemas"),
        ({"type": "null", "enum": 7}, "enum that is no list"),
        ({"type": "string", "format": []}, "format []"),
        ({"type": "string", "pattern": None}, "no text"),
        ({"allOf": [{"properties": {"a": True}}, {"unevaluatedProperties": False}]}, "unevaluatedProperties beside other"),
        (nested(3_000), "64 levels"),
        ({"enum": list(range(5000))}, "4096 values"),
        ({"const": "&" * 200_000}, "1048576"),
        ({"type": "string", "minLength": 100000}, "4096"),
        (
            {"properties": {"a": {"pattern": "^(a|.{0,200}){2}$"}}},
            "/properties/a has a pattern that is not served: it counts 200",
        ),
        ({"type": "array", "minItems": True}, "minItems True"),
        ({"const": "\ud800"}, "half of a surrogate pair"),
        ({"const": float("inf")}, "JSON does not have"),
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


@pytest.mark.parametrize(
    "extra",
    [
        {"id": "x"},
        {"example": {"not": {}}},
        {"x-order": 1},
        {"nullable": True},
        {"then": False},
        {"$defs": {"unused": {"contains": 7}}},
    ],
)
def test_keywords_that_no_vocabulary_defines_change_nothing(extra: dict[str, Any]) -> None:
    plain = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    assert of_schema(plain | extra) == of_schema(plain)
    assert of_schema({"allOf": [plain]} | extra) == of_schema({"allOf": [plain]})


@pytest.mark.parametrize("further", [True, {}])
@pytest.mark.parametrize("schema", [{"type": "object"}, {"type": "object", "properties": {"a": {"type": "boolean"}}}])
def test_an_open_object_means_the_same_whether_it_says_so_or_not(schema: Any, further: Any) -> None:
    assert of_schema(schema | {"additionalProperties": further}) == of_schema(schema)


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
