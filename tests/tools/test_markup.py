"""Arguments in markup: texts as they are, and all else as JSON, which the tool's schema tells apart."""

import json
import math
from typing import Any

import jsonschema_rs
import pytest

from tests.structured_output.walks import allows, of_source
from tests.tools.streams import read, told, tool, toolset
from vmmkv_server.structured_output.schema import GrammarRefused
from vmmkv_server.tools.forms.deepseek import DEEPSEEK_V32
from vmmkv_server.tools.forms.glm import GLM47
from vmmkv_server.tools.forms.qwen3_coder import QWEN3_CODER, SEED_OSS

TEXT, WHOLE, ALL = {"type": "string"}, {"type": "integer"}, True
OR_NULL = {"anyOf": [TEXT, {"type": "null"}]}
LIST = {"type": "array", "items": TEXT}


def argument(text: str, schema: Any, **more: Any) -> Any:
    """The argument that is read of a text."""
    tools = toolset(tools=(tool("f", x=schema, **more),))
    ((_, arguments),) = told(read(SEED_OSS, [SEED_OSS.text([("f", json.dumps({"x": text}))])], tools))
    return json.loads(arguments)["x"]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (TEXT, "12", "12"),
        (TEXT, " [1] ", " [1] "),
        (TEXT, '"a"', '"a"'),
        ({"enum": ["1", "null"]}, "null", "null"),
        ({"type": "string", "maxLength": 3}, "true", "true"),
        (WHOLE, " 12\n", 12),
        (WHOLE, "a dozen", "a dozen"),
        ({"type": "number"}, "-1.5E+2", -150.0),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "null"}, "None", None),
        (LIST, '["a", "</parameter>"]', ["a", "</parameter>"]),
        (LIST, "['a', None]", ["a", None]),
        (LIST, "[1, {1}]", "[1, {1}]"),
        ({"type": "object"}, '{"a": {"b": [1]}}', {"a": {"b": [1]}}),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        (OR_NULL, "null", None),
        (OR_NULL, "None", "None"),
        (OR_NULL, "12", "12"),
        (OR_NULL, "nullify", "nullify"),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "12.5", "12.5"),
        ({"type": ["string", "integer"], "maximum": 9}, "12", "12"),
        ({"anyOf": [TEXT, LIST]}, '["a"]', ["a"]),
        ({"anyOf": [TEXT, LIST]}, "[1]", "[1]"),
        ({"anyOf": [TEXT, LIST]}, '["a"] and more', '["a"] and more'),
        ({"enum": ["a", 1, None]}, "1", 1),
        ({"$ref": "#/properties/y"}, "12", 12),
        ({"type": ["string", "integer"]}, "1e999", math.inf),
        (LIST, r"['\ud800']", r"['\ud800']"),
        (ALL, "12", 12),
        (ALL, "twelve", "twelve"),
        ({"type": "strange"}, "[12]", [12]),
    ],
)
def test_a_value_is_a_text_unless_the_schema_allows_its_json(schema: Any, text: str, value: Any) -> None:
    assert argument(text, schema, y=WHOLE) == value


def test_a_number_that_python_cannot_read_is_none_the_less_json() -> None:
    for schema in ({"type": ["string", "integer"]}, ALL):
        text = SEED_OSS.text([("f", json.dumps({"x": "1" * 5000}))])
        assert told(read(SEED_OSS, [text], toolset(tools=(tool("f", x=schema),)))) == [("f", f'{{"x": {"1" * 5000}}}')]


def test_an_argument_that_the_schema_does_not_name_is_read_as_it_looks() -> None:
    text = SEED_OSS.text([("f", '{"a": "1", "b": "one"}')])
    assert told(read(SEED_OSS, [text], toolset(tools=(tool("f"),)))) == [("f", '{"a": 1, "b": "one"}')]


def test_markup_that_marks_texts_needs_no_schema() -> None:
    text = DEEPSEEK_V32.text([("f", '{"a": "1", "b": 1, "c": ["</｜DSML｜parameter>"]}')])
    assert told(read(DEEPSEEK_V32, [text], toolset(tools=(tool("f"),)))) == [
        ("f", '{"a": "1", "b": 1, "c": ["</｜DSML｜parameter>"]}')
    ]


def test_line_breaks_around_a_value_are_no_part_of_it() -> None:
    for value in ("", "\n", "a\n", "\n\na\n\n"):
        written = QWEN3_CODER.text([("f", json.dumps({"x": value}))])
        ((_, arguments),) = told(read(QWEN3_CODER, [written], toolset(tools=(tool("f", x=TEXT),))))
        assert json.loads(arguments) == {"x": value}
        grammar = QWEN3_CODER.grammar(toolset(tools=(tool("f", x=TEXT),), choice="required"))
        assert allows(of_source(grammar.source), written)


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (TEXT, ["", "a", "\n", "<", "</", "</arg_valu", "é 🌊", '"\\'], ["</arg_value>"]),
        (WHOLE, ["1", "-20"], ["a", "", "1.5", '"1"']),
        ({"enum": ["a", "</arg_value>", 1]}, ["a", "1"], ["</arg_value>", '"a"', "b"]),
        ({"type": "string", "pattern": "^[a<]{2,3}$"}, ["aa"], ["a<", "a", "aaaa"]),
        ({"type": "string", "minLength": 1, "maxLength": 2}, ["a", '"\n'], ["", "abc"]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29"]),
        (OR_NULL, ["null", "a"], []),
        (LIST, ['["a", "</arg_value>"]', "[]"], ["a", "[1]", "[a]"]),
    ],
)
def test_the_grammar_of_a_value_allows_what_validates(schema: Any, allowed: list[str], refused: list[str]) -> None:
    tools = toolset(tools=(tool("f", "x", x=schema),), choice="required")
    grammar = of_source(GLM47.grammar(tools).source)

    def written(value: str) -> str:
        return GLM47.text([("f", json.dumps({"x": value}))])

    assert [value for value in (*allowed, *refused) if allows(grammar, written(value))] == allowed
    for value in allowed:
        ((_, arguments),) = told(read(GLM47, [written(value)], tools))
        assert jsonschema_rs.validator_for(dict(tools.tools[0].parameters)).is_valid(json.loads(arguments))


def test_properties_come_in_the_order_of_the_schema_and_optional_ones_may_lack() -> None:
    tools = toolset(tools=(tool("f", "b", a=WHOLE, b=WHOLE, c=WHOLE),), choice="required")
    grammar = of_source(GLM47.grammar(tools).source)
    for keys, is_allowed in (("b", True), ("ab", True), ("abc", True), ("bc", True), ("ac", False), ("ba", False), ("", False)):
        assert allows(grammar, GLM47.text([("f", json.dumps(dict.fromkeys(keys, 1)))])) == is_allowed


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"anyOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]}, "alternatives"),
        ({"type": "object", "minProperties": 1, "properties": {"a": WHOLE}}, "minProperties 1"),
        ({"type": "object", "properties": {"a</arg_key><arg_value>b": WHOLE}}, "cannot write"),
        ({"type": "object", "properties": {"a": {"const": "</arg_value>"}}, "required": ["a"]}, "cannot write"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "^<$"}}}, "pattern"),
    ],
)
def test_what_markup_cannot_write_is_refused(parameters: dict[str, Any], reason: str) -> None:
    one = tool("f")
    with pytest.raises(GrammarRefused, match=reason):
        GLM47.grammar(toolset(tools=(type(one)(name="f", parameters=parameters),), choice="required"))
