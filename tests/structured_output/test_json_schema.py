"""The law of schemas: a grammar allows no value that the schema refuses. And which values it allows where others would not."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
import xgrammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.schemas import SCHEMAS
from tests.structured_output.walks import allows, answer, of_source
from vmmkv_server.structured_output.schema import GrammarRefused, of_schema
from vmmkv_server.structured_output.text import FORMATS, MAX_REPETITIONS, fit, lengths, matches, read


def compiled(schema: Any) -> xgrammar.CompiledGrammar:
    return of_source(of_schema(schema).source)


def assert_law(schema: Any, num_answers: int = 12) -> None:
    try:
        grammar = compiled(schema)
    except GrammarRefused:
        return
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    for seed in range(num_answers):
        text = answer(grammar, seed)
        if text is not None:
            assert validator.is_valid(json.loads(text)), f"{text} of {json.dumps(schema)}"


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_grammar_allows_no_value_that_the_schema_refuses(name: str) -> None:
    assert_law(SCHEMAS[name])


NAMES = st.sampled_from(["a", "b", "ab", 'q"', "é"])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-30, 30),
    st.sampled_from([0.5, 1.0, -2.25]),
    st.sampled_from(["", "a", "ab", 'b"', "\n"]),
)
PATTERNS = st.sampled_from(["^a", "b$", "^[ab]{1,3}$", "a|b", "^(a|b)*$", "^$", "[^a]", "^\\S+$", "^a?b?$", "^(x[0-9]+)?y"])


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    bounds = {"minimum": st.integers(-20, 20), "exclusiveMaximum": st.sampled_from([-3.5, 0, 7, 12.25])}
    named = st.dictionaries(NAMES, inner, max_size=3)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(
            ["string", "integer", "number", "object", "array", "null", "boolean", ["string", "null"], ["object", "integer"]]
        ),
        "enum": st.lists(SCALARS, min_size=1, max_size=4),
        "const": SCALARS,
        "properties": named,
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": st.one_of(st.booleans(), inner),
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "propertyNames": inner,
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(0, 2),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=1), max_size=1),
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "minItems": st.integers(0, 3),
        "maxItems": st.integers(0, 3),
        "minLength": st.integers(0, 3),
        "maxLength": st.integers(0, 4),
        "pattern": PATTERNS,
        "format": st.sampled_from([*FORMATS, "color", "int32"]),
        "multipleOf": st.sampled_from([1, 2, 3, 0.1, 0.01]),
        "anyOf": st.lists(inner, min_size=1, max_size=3),
        "oneOf": st.lists(inner, min_size=1, max_size=3),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "not": inner,
        "x-order": st.just(1),
        **bounds,
    }
    return st.lists(st.sampled_from(sorted(keywords)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: keywords[name] for name in names})
    )


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(schemas(schemas(st.one_of(st.booleans(), schemas(st.booleans())))))
def test_no_random_schema_is_broken(schema: Any) -> None:
    assert_law(schema, 4)


@pytest.mark.nightly
@settings(deadline=None, max_examples=20_000, suppress_health_check=list(HealthCheck))
@given(schemas(schemas(schemas(st.one_of(st.booleans(), schemas(st.booleans()))))))
def test_no_random_schema_is_broken_in_many(schema: Any) -> None:
    assert_law(schema, 6)


def tagged(tag: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": tag, **more}, "required": ["kind"]}


@pytest.mark.parametrize(
    "alternatives",
    [
        [tagged({"const": "cat"}), tagged({"const": "dog"})],
        [tagged({"enum": ["a", "b"]}), tagged({"const": "c"}), {"type": "null"}],
        [tagged(tagged({"const": 1})), tagged(tagged({"const": 2}))],
        [{"type": "string"}, {"type": "integer"}, {"type": "array"}],
        [{"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}],
        [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}],
        [{"type": "string", "enum": ["a"]}, {"type": "string", "pattern": "^b"}],
        [{"required": ["a"], "properties": {"a": True}}, {"required": ["b"], "properties": {"b": True}}],
    ],
)
def test_alternatives_that_exclude_each_other_are_served(alternatives: list[Any]) -> None:
    assert_law({"oneOf": alternatives})
    assert_law({"oneOf": alternatives, "discriminator": {"propertyName": "kind"}})
    compiled({"oneOf": alternatives})


def test_an_object_of_exactly_one_of_two_properties_has_one() -> None:
    schema = {
        "type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    }  # fmt: skip
    grammar = compiled(schema)
    assert allows(grammar, '{"a":null}') and allows(grammar, '{"b":null}')
    assert not allows(grammar, '{"a":null,"b":null}') and not allows(grammar, "{}")


STRINGS = ['say "hi"', "C:\\x", "two\nlines", "tab\t", "é", "\U0001f600", ""]


@pytest.mark.parametrize("bounds", [{}, {"maxLength": 10}, {"maxLength": 9, "minLength": 0}, {"pattern": r"^[\s\S]*$"}])
def test_strings_with_bounds_hold_what_others_hold(bounds: dict[str, Any]) -> None:
    grammar = compiled({"type": "string", **bounds})
    assert all(allows(grammar, json.dumps(text, ensure_ascii=False)) for text in STRINGS)


def test_a_length_counts_characters_however_they_are_written() -> None:
    grammar = compiled({"type": "string", "minLength": 2, "maxLength": 3})
    for text in ('"\\n"', '"é"', '"\U0001f600"', '"abcd"', '"\\n\\n\\n\\n"', '"\\ud83d\\ude00"'):
        assert not allows(grammar, text), text
    for text in ('"\\n\\""', '"éé"', '"\U0001f600\U0001f600\U0001f600"'):
        assert allows(grammar, text), text


@pytest.mark.parametrize(
    ("minimum", "maximum"),
    [(0, 33), (0, 48), (7, 255), (100, 300), (290, 300), (150, 150), (200, None), (0, 4096), (4096, 9999)],
)
def test_a_long_string_has_the_lengths_that_it_may_have(minimum: int, maximum: int | None) -> None:
    bounds = {"minLength": minimum} | ({} if maximum is None else {"maxLength": maximum})
    grammar, most = compiled({"type": "string", **bounds}), math.inf if maximum is None else min(maximum, MAX_REPETITIONS)
    near = {minimum, 16, 32, 48, 64, *([] if maximum is None else [most, most - 16, most - 32]), 4096}
    for length in sorted({max(0, length + more) for length in map(int, near) for more in (-1, 0, 1)}):
        for text in ("a" * length, "\n" * length, ' é"' * (length // 3) + "\\" * (length % 3)):
            assert allows(grammar, json.dumps(text, ensure_ascii=False)) == (minimum <= length <= most), (length, text[:3])


@pytest.mark.parametrize(
    ("pattern", "held", "refused"),
    [
        ("^.{30,60}x$", ["." * 30 + "x", '"' * 60 + "x", "x" * 61], ["x" * 30, "x" * 62, "." * 31]),
        ("^[^a]{0,70}(a.{40,})?$", ["b" * 70, "b" * 70 + "a" * 41, "a" * 41], ["b" * 71, "a" * 40]),
        ("^a", ["a", "ab"], ["ba", ""]),
        ("b", ["b", "abc", "b\n"], ["a", ""]),
        ("a$", ["a", "ba"], ["ab"]),
        ("^a|b$", ["ax", "xb"], ["xa"]),
        ("(^a$|^b$)", ["a", "b"], ["ab"]),
        ("^.*$", ["", 'say "hi"', "C:\\x"], ["a\nb", "a\u2028"]),
        (r'^"\\$', ['"\\'], ['"']),
        (r"^\n$", ["\n"], ["n"]),
        (r"^\x41\u{1F600}\ud83d\ude00$", ["A\U0001f600\U0001f600"], ["A"]),
        (r"^[^\w\s]$", ["-", "é"], ["a", " ", "\ufeff"]),
        (r"^[\]a-c\-]+$", ["]-b"], ["d"]),
        ("^(x[0-9]+)?y$", ["y", "x12y"], ["1y", "xy"]),
        ("^a{2}(b|cd){1,2}$", ["aab", "aacdb"], ["aa", "ab"]),
        ("^{.*}$", ["{}", "{a}"], ["}"]),
        ("^(?:a|(?<n>b))$", ["a", "b"], ["n"]),
        ("^((|a)b|x{0}){1,2}$", ["b", "abb", ""], ["a"]),
    ],
)
def test_patterns_are_those_of_ecma(pattern: str, held: list[str], refused: list[str]) -> None:
    grammar = compiled({"type": "string", "pattern": pattern})
    assert all(allows(grammar, json.dumps(text, ensure_ascii=False)) for text in held)
    assert not any(allows(grammar, json.dumps(text, ensure_ascii=False)) for text in refused)
    assert all(matches(read(pattern), text) for text in held)
    assert not any(matches(read(pattern), text) for text in refused)


def test_lengths_and_a_pattern_hold_together_where_one_repetition_can_give_way() -> None:
    fitted = fit(read("^[a-z][a-z0-9]*$"), 3, 5)
    assert fitted is not None and lengths(fitted) == (3, 5)
    assert fit(read("^ab$"), 3, 5) is None and fit(read("^a+$"), 0, 5) is not None
    grammar = compiled({"type": "string", "pattern": "^[a-z][a-z0-9]*$", "minLength": 2, "maxLength": 4})
    assert [text for text in ("a", "ab", "abcd", "abcde") if allows(grammar, f'"{text}"')] == ["ab", "abcd"]


@pytest.mark.parametrize(
    ("ref", "definitions"),
    [
        ("#/$defs/a~1b", {"$defs": {"a/b": {"type": "null"}}}),
        ("#/$defs/a~0b", {"$defs": {"a~b": {"type": "null"}}}),
        ("#/$defs/a%20b%25", {"$defs": {"a b%": {"type": "null"}}}),
        ("#/$defs/a%22b", {"$defs": {'a"b': {"type": "null"}}}),
        ("#/anyOf/1", {"anyOf": [True, {"type": "null"}]}),
        ("#/x-mine/here/0", {"x-mine": {"here": [{"type": "null"}]}}),
        ("#/properties/b/additionalProperties", {"properties": {"b": {"additionalProperties": {"type": "null"}}}}),
        ("#name", {"$defs": {"x": {"$anchor": "name", "type": "null"}}}),
        ("https://example.org/s#/$defs/x", {"$id": "https://example.org/s", "$defs": {"x": {"type": "null"}}}),
        ("https://example.org/t", {"$defs": {"x": {"$id": "https://example.org/t", "type": "null"}}}),
    ],
)  # fmt: skip
def test_a_reference_finds_what_it_names(ref: str, definitions: dict[str, Any]) -> None:
    grammar = compiled({"type": "array", "items": {"$ref": ref}, "minItems": 1, **definitions})
    assert allows(grammar, "[null]") and not allows(grammar, "[1]")


def test_a_reference_that_drafts_read_differently_is_refused() -> None:
    inner = {"$id": "https://example.org/inner", "$defs": {"x": {"type": "null"}}, "properties": {"a": {"$ref": "#/$defs/x"}}}
    with pytest.raises(GrammarRefused, match="within a schema with an id"):
        of_schema({"$defs": {"x": {"type": "string"}}, "properties": {"b": inner}})


def test_an_open_objects_further_properties_are_those_of_its_reference() -> None:
    schema = {"$defs": {"open": {"type": "object", "additionalProperties": True}}, "$ref": "#/$defs/open/additionalProperties"}
    assert allows(compiled(schema), '[{"a":1}]')


@pytest.mark.parametrize("number", [12345678901234567890, -(1 << 70), 10**40 + 1, 1e300, 0.1, -1.5e-9, 1e22])
def test_numbers_keep_their_digits(number: float) -> None:
    written = json.dumps(number)
    for schema in ({"const": number}, {"enum": [number, "x"]}, {"enum": [[number]]}):
        texts = [written, f"[{written}]"]
        assert any(allows(compiled(schema), text) for text in texts)
    assert not allows(compiled({"const": number}), json.dumps(float(number) * 2))
    if isinstance(number, int):
        grammar = compiled({"type": "integer", "minimum": number, "maximum": number + 1})
        assert [allows(grammar, str(number + more)) for more in (-1, 0, 1, 2)] == [False, True, True, False]
        grammar = compiled({"type": "integer", "exclusiveMinimum": number, "exclusiveMaximum": number + 2})
        assert [allows(grammar, str(number + more)) for more in (0, 1, 2)] == [False, True, False]


def test_multiples_are_exact() -> None:
    grammar = compiled({"type": "integer", "multipleOf": 7, "minimum": 10**20, "maximum": 10**20 + 20})
    assert [more for more in range(21) if allows(grammar, str(10**20 + more))] == [
        m for m in range(21) if (10**20 + m) % 7 == 0
    ]
    grammar = compiled({"type": "number", "multipleOf": 0.01, "minimum": 0})
    assert allows(grammar, "19.99") and not allows(grammar, "19.999")


def test_numeric_formats_are_bounds_and_unknown_ones_say_nothing() -> None:
    grammar = compiled({"type": "integer", "format": "int32"})
    assert allows(grammar, str(2**31 - 1)) and not allows(grammar, str(2**31))
    assert allows(compiled({"type": "number", "format": "double"}), "1.5")
    assert allows(compiled({"type": "string", "format": "colour"}), '"any"')


def patterned(pattern: str, others: Any) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {pattern: True}, "additionalProperties": others}


@pytest.mark.parametrize(
    ("schema", "held", "refused"),
    [
        # `required` allows all that is no object, and `not` of it none of that.
        ({"not": {"required": ["a"]}}, ["{}"], ['"x"', "1", "[]", '{"a":1}']),
        ({"type": ["object", "string"], "not": {"required": ["a", "b"]}}, ["{}"], ['"x"']),
        ({"enum": ["x", {}], "not": {"required": ["a"]}}, ["{}"], ['"x"']),
        ({"type": ["object", "string"], "not": {"type": "object", "required": ["a"]}}, ["{}", '"x"'], ['{"a":1}']),
        ({"type": ["object", "string"], "dependentRequired": {"a": ["b"]}}, ["{}", '"x"'], ['{"a":1}']),
        # A key of one pattern is a further one where only another pattern is.
        ({"allOf": [patterned("^a", False), patterned("^b", False)]}, ["{}"], ['{"a":1}', '{"b":1}']),
        ({"allOf": [patterned("^a", True), patterned("^b", {"type": "integer"})]}, ["{}"], ['{"a":"x"}']),
        # No array or object is so short and so long.
        ({"anyOf": [{"type": "null"}, {"type": "array", "prefixItems": [True, False], "minItems": 2}]}, ["null"], ["[1]"]),
        ({"anyOf": [{"type": "null"}, {"required": ["a", "b"], "maxProperties": 1}]}, ["null"], ['{"a":1,"b":1}']),
        # True is neither 1 nor a list.
        ({"enum": [["boolean", 1], 1, None], "allOf": [{"enum": [True, None]}]}, ["null"], ['["boolean",1]', "1"]),
    ],
)
def test_values_that_are_easily_taken_for_others_are_not(schema: Any, held: list[str], refused: list[str]) -> None:
    grammar, validator = compiled(schema), jsonschema_rs.validator_for(schema)
    for text in held:
        assert validator.is_valid(json.loads(text)) and allows(grammar, text), text
    for text in refused:
        assert not validator.is_valid(json.loads(text)) and not allows(grammar, text), text


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("^a{,3}$", "write {0,3}"),
        ("^a{12345678901}$", "4096 are served"),
        ("^[^]]$", "a set is empty"),
        ("^[]]$", "a set is empty"),
        ("^a**$", "repeats a repetition"),
        ("^a{2}{3}$", "repeats a repetition"),
        ("a" + "*" * 4000, "repeats a repetition"),
    ],
)
def test_patterns_that_dialects_read_differently_are_refused(pattern: str, why: str) -> None:
    with pytest.raises(GrammarRefused, match=re.escape(why)):
        of_schema({"type": "string", "pattern": pattern})


@pytest.mark.parametrize(
    "schema",
    [
        lambda count: {"type": "string", "pattern": f"^a{{{count}}}$"},
        lambda count: {"type": "string", "minLength": count},
        lambda count: {"type": "array", "items": {"type": "null"}, "minItems": count},
    ],
)
def test_characters_items_and_parts_of_patterns_may_be_repeated_equally_often(schema: Callable[[int], Any]) -> None:
    assert of_schema(schema(MAX_REPETITIONS))
    with pytest.raises(GrammarRefused, match=str(MAX_REPETITIONS)):
        of_schema(schema(MAX_REPETITIONS + 1))


def chain(length: int, link: Callable[[dict[str, str]], Any]) -> dict[str, Any]:
    """Definitions, each of which is linked to the next."""
    links = {f"a{index}": link({"$ref": f"#/$defs/a{index + 1}"}) for index in range(length)}
    return {"$defs": {**links, f"a{length}": {"type": "integer"}}}


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
def test_a_small_schema_that_doubles_at_each_reference_is_refused(keyword: str) -> None:
    schema = {"oneOf": [{"enum": ["x"]}, {"$ref": "#/$defs/a0"}], **chain(40, lambda ref: {keyword: [ref, ref]})}
    with pytest.raises(GrammarRefused, match=r"steps|may hold together"):
        of_schema(schema)


def test_a_long_chain_of_references_is_refused() -> None:
    with pytest.raises(GrammarRefused, match="nested too deep"):
        of_schema({"$ref": "#/$defs/a0", **chain(1500, lambda ref: ref)})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "enum": ["a" * 200_000], "pattern": "(a{0,40}b?){0,4000}c"},
        {
            "properties": {f"p{index}": True for index in range(1000)},
            "patternProperties": {f"^({index}|a{{0,50}}b)$": True for index in range(1000)},
        },
    ],
)
def test_texts_that_take_long_to_compare_with_patterns_are_refused(schema: Any) -> None:
    with pytest.raises(GrammarRefused, match="take too long to compare"):
        of_schema(schema)


def test_a_union_of_many_tagged_objects_is_served() -> None:
    compiled({"oneOf": [tagged({"const": f"kind {index}"}, more={"type": "string"}) for index in range(100)]})


def test_further_properties_differ_from_those_that_are_named() -> None:
    schema = {"type": "object", "properties": {"ab": {"type": "null"}}, "additionalProperties": {"type": "integer"}}
    grammar = compiled(schema)
    for text in ('{"ab":null}', '{"ab":null,"a":1}', '{"abc":1}', '{"x":1,"":2}', "{}"):
        assert allows(grammar, text), text
    for text in ('{"ab":1}', '{"ab":null,"ab":1}', '{"\\u0061b":1}', '{"x":null}'):
        assert not allows(grammar, text), text


def test_keywords_of_one_type_mean_that_type() -> None:
    assert not allows(compiled({"properties": {"a": True}}), "1")
    assert allows(compiled({"minLength": 1, "minimum": 3}), '"a"') and allows(compiled({"minLength": 1, "minimum": 3}), "3")


@pytest.mark.parametrize("bounds", [{"minLength": 1}, {"maxLength": 999}, {"pattern": r"^\S{1,60}$"}, {"pattern": "^a"}])
def test_a_repeated_character_that_may_be_escaped_is_no_group(bounds: dict[str, Any]) -> None:
    """xgrammar 0.2.8 would try every token of several characters at each step of `([^"\\\\] | "\\\\" [n])*`."""
    source = of_schema({"type": "string", **bounds}).source
    assert not re.search(r"\)[*+{]", source)


def test_equal_schemas_have_one_rule() -> None:
    def pair() -> dict[str, Any]:
        return {"type": "array", "items": {"type": "array", "items": {"enum": ["v0", "v1"]}, "minItems": 2}}

    one = of_schema({"type": "object", "properties": {"a": pair()}, "required": ["a"]}).source
    many = of_schema(
        {"type": "object", "properties": {"a": pair(), "b": pair(), "c": pair()}, "required": ["a", "b", "c"]}
    ).source
    assert len(many.splitlines()) == len(one.splitlines())
    assert many.count('"\\U00000022v0\\U00000022"') == 1


def test_what_is_not_required_is_an_object() -> None:
    grammar = compiled({"not": {"required": ["a"]}, "properties": {"a": True, "b": True}})
    assert allows(grammar, '{"b":1}') and not allows(grammar, '{"a":1}')
    grammar = compiled({"not": {"required": ["a", "b"]}, "enum": [None, {}, {"a": 1}, {"a": 1, "b": 2}]})
    assert [text for text in ("null", "{}", '{"a":1}', '{"a":1,"b":2}') if allows(grammar, text)] == ["{}", '{"a":1}']
    grammar = compiled({"dependentRequired": {"a": ["b"]}, "enum": [None, {"a": 1}, {"b": 1}]})
    assert [text for text in ("null", '{"a":1}', '{"b":1}') if allows(grammar, text)] == ["null", '{"b":1}']
