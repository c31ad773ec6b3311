"""Laws of the forms of calls: their readers, their grammars, and the templates that show them."""

import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import numpy as np
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from bench.schemas import SCHEMAS
from tests.server.tiny import byte_tokenizer
from tests.server.tiny import token_ids as byte_ids
from tests.structured_output.gates import vocabulary as byte_vocabulary
from tests.structured_output.walks import allows, answer, of_source
from tests.tools.streams import BREST, FORMS, NOW, STREAMS, TEXT, TOOLS, Told, read, told, tool, toolset
from tests.tools.templates import PLAIN
from vmmkv_server.structured_output.compiler import Compilation
from vmmkv_server.structured_output.gate import GateSearch
from vmmkv_server.structured_output.matcher import Matcher, Vocabulary
from vmmkv_server.structured_output.schema import Grammar, GrammarRefused
from vmmkv_server.tokenizer import Tokenizer
from vmmkv_server.tools.calls import CallArguments, CallBegun, Tool, Toolset
from vmmkv_server.tools.chat_format import ToolChatFormat
from vmmkv_server.tools.form import CallForm
from vmmkv_server.tools.forms import form_named
from vmmkv_server.tools.markup import Markup
from vmmkv_server.tools.reading import merged

each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def cuts(text: str) -> Iterator[list[str]]:
    """The text as it is, each cut in two, and single characters."""
    yield [text]
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    yield list(text)


@pytest.mark.parametrize("name", STREAMS)
def test_an_answer_is_read_into_its_parts_however_it_is_cut(name: str) -> None:
    for case, (text, expected) in STREAMS[name].items():
        for pieces in cuts(text):
            assert told(read(FORMS[name], pieces)) == expected, (case, pieces)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_the_parts_are_the_same_for_any_text_and_cuts(data: st.DataObject) -> None:
    """Of pieces of answers in a row, which make texts that nobody would write."""
    name = data.draw(st.sampled_from(sorted(STREAMS)))
    texts = [text for text, _ in STREAMS[name].values()]
    pieces = []
    for text in data.draw(st.lists(st.sampled_from(texts), min_size=1, max_size=4)):
        low, high = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        pieces.append(text[low:high])
    whole = "".join(pieces)
    places = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=20)))
    cut = [whole[low:high] for low, high in zip([0, *places], [*places, len(whole)], strict=True)]
    form = FORMS[name]
    assert told(read(form, cut)) == told(read(form, [whole])) == told(merged(read(form, list(whole))))


@each_form
def test_arguments_stream_as_they_come(form: CallForm) -> None:
    """A call is told of by its name, and its texts by pieces: no piece waits for the end of the call."""
    text = form.text([BREST])
    city = text.index("Brest")
    reader = form.reader(toolset())
    parts = [part for letter in text[: city + 3] for part in reader.feed(letter)]
    assert parts[0] == CallBegun(0, "get_weather")
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == '{"city": "Bre'


@each_form
def test_an_answer_that_must_call_shows_no_text_wherever_it_is_cut_off(form: CallForm) -> None:
    asked = toolset(choice="required")
    text = form.text([BREST, NOW])
    for size in range(len(form.prefix), len(text) + 1):
        reader = form.reader(asked)
        parts = told([*reader.feed(text[:size]), *reader.finish()])
        assert all(isinstance(part, tuple) for part in parts), text[:size]
        is_whole = [json.loads(arguments) is not None for _, arguments in parts if arguments.endswith("}")]
        assert not reader.has_whole_calls or len(is_whole) == len(parts)
    assert parts == [BREST, NOW] and reader.has_whole_calls


@each_form
def test_a_call_shows_no_text_wherever_it_is_cut_off_behind_its_trigger(form: CallForm) -> None:
    text = form.text([BREST])
    certain = len(form.trigger) if form.trigger and not form.is_first else text.index("Brest")
    for size in range(certain, len(text) + 1):
        assert all(isinstance(part, tuple) for part in told(read(form, [text[:size]]))), text[:size]


@each_form
def test_a_call_is_whole_with_all_of_its_text_and_not_before(form: CallForm) -> None:
    """A stop string may be found behind any letter of it."""
    end = len(form.begin) + len(form.written(*BREST)) + len(form.text([BREST]).split(form.begin + form.written(*BREST))[0])
    text = form.text([BREST])
    for size in range(len(text) + 1):
        reader = form.reader(toolset())
        reader.feed(text[:size])
        reader.finish()
        assert reader.has_whole_calls == (size >= len(text[:end].rstrip())), text[:size]


@each_form
def test_a_call_that_is_broken_is_not_whole(form: CallForm) -> None:
    text = form.text([BREST])
    broken = text[: text.index(form.last.strip())] + "?" if isinstance(form, Markup) else text[: text.index("Brest")] + "\n"
    reader = form.reader(toolset())
    reader.feed(f"{broken}{text}")
    reader.finish()
    assert not reader.has_whole_calls


@each_form
def test_an_answer_has_no_more_calls_than_it_may(form: CallForm) -> None:
    first, *others = told(read(form, [form.text([BREST, NOW])], toolset(is_parallel=False)))
    assert first == BREST and all(isinstance(other, str) for other in others) and others


@each_form
@pytest.mark.parametrize("num_pieces", [1, 1 << 14])
def test_a_long_argument_is_read_in_time_that_grows_with_its_length(form: CallForm, num_pieces: int) -> None:
    """A megabyte in thousands of pieces: to look at all of it again at each piece would take hours."""
    text = form.text([BREST])
    begin, end = text.split("Brest", 1)
    body = "a<[{`é\n"
    piece = (body if isinstance(form, Markup) else json.dumps(body, ensure_ascii=False)[1:-1]) * ((1 << 17) // num_pieces)
    ((_, arguments),) = told(merged(read(form, [begin, *[piece] * num_pieces, end])))
    assert len(json.loads(arguments)["city"]) == 7 << 17


@each_form
@pytest.mark.parametrize("num_pieces", [1, 1 << 14])
def test_a_text_full_of_begun_calls_is_read_in_time_that_grows_with_its_length(form: CallForm, num_pieces: int) -> None:
    """Each call is broken in another place: to read the rest again behind each would take hours."""
    call = form.text([BREST])
    begun = "".join(call[:size] for size in range(1, call.index("Brest"), 3)).replace("\n", " ")
    piece = begun * ((1 << 17) // len(begun))
    whole = piece * (4 if num_pieces == 1 else 1)
    size = -(-len(whole) // num_pieces)
    parts = told(merged(read(form, [whole[at : at + size] for at in range(0, len(whole), size)])))
    assert isinstance(parts[0], str)


# Grammars.


def walk(form: CallForm, grammar: xgrammar.CompiledGrammar, seed: int) -> str | None:
    """A random answer under a grammar of the form."""
    return answer(grammar, seed, tag=form.closing.encode() if isinstance(form, Markup) else b"", max_steps=3000)


def assert_walks_are_calls(form: CallForm, tools: tuple[Tool, ...], seeds: int, **changes: Any) -> int:
    """Random answers under the grammar of `required` are calls that validate, and nothing else. Returns their number."""
    asked = toolset(tools=tools, choice="required", **changes)
    grammar = of_source(form.grammar(asked).source)
    found = 0
    for seed in range(seeds):
        text = walk(form, grammar, seed)
        if text is None:
            continue
        parts = told(read(form, [form.prefix, text], asked))
        assert_calls_validate(asked, parts)
        found += len(parts)
    return found


def assert_calls_validate(asked: Toolset, parts: Told) -> None:
    """An answer is calls alone, no more than asked, and their arguments follow the tools' schemas."""
    assert parts and (asked.most_calls is None or len(parts) <= asked.most_calls)
    for part in parts:
        assert isinstance(part, tuple), parts
        (one,) = [one for one in asked.callable_tools if one.name == part[0]]
        assert jsonschema_rs.validator_for(dict(one.parameters)).is_valid(json.loads(part[1])), part


@each_form
def test_answers_under_a_grammar_are_calls_that_validate(form: CallForm) -> None:
    assert assert_walks_are_calls(form, TOOLS, 12) > 6
    assert assert_walks_are_calls(form, TOOLS, 6, is_parallel=False) > 3
    assert assert_walks_are_calls(form, TOOLS, 6, named="now") == 6


@each_form
def test_the_grammar_of_auto_begins_with_a_trigger(form: CallForm) -> None:
    triggers = form.triggers(toolset())
    grammar = of_source(form.grammar(toolset()).source)
    for seed in range(6):
        text = walk(form, grammar, seed)
        assert text is None or any(text.startswith(trigger) for trigger in triggers)


@pytest.mark.parametrize("name", STREAMS)
def test_a_grammar_begins_where_the_reader_finds_a_call(name: str) -> None:
    """Also beside code blocks, where most forms have none."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PLAIN
    form, words = FORMS[name], byte_vocabulary()
    prompt = ToolChatFormat(Tokenizer(tokenizer), call_parser=form.name).encode(
        [{"role": "user", "content": "Rain?"}], toolset=toolset()
    )
    gate = msgspec.structs.replace(prompt.gate, triggers=form.triggers(toolset()))  # forms of one name differ in white space
    for case in ("a call", "content", "text in front", "text between", "code", "a code block", "behind a code block"):
        text, expected = STREAMS[name].get(case, ("", []))
        search, tokens, found = GateSearch(gate, words), list[int](), False
        for token in byte_ids(text):
            tokens.append(token)
            is_wanted = search.completing[token // 32] >> token % 32 & 1
            found = found or bool(is_wanted and search.found(tokens))
        assert found == any(isinstance(part, tuple) for part in expected), case


@each_form
def test_text_of_a_schema_is_an_answer_beside_calls(form: CallForm) -> None:
    asked = toolset(text_schema={"type": "object", "properties": {"port": {"enum": ["Brest"]}}, "required": ["port"]})
    if form.prefix:
        with pytest.raises(GrammarRefused, match="this model begins calls with a special token"):
            form.grammar(asked)
        return
    grammar = of_source(form.grammar(asked).source)
    assert allows(grammar, '{"port": "Brest"}') and allows(grammar, form.text([BREST]))
    assert not allows(grammar, "Brest") and not allows(grammar, '{"port": "Lyon"}')


@each_form
def test_text_of_a_schema_has_no_effect_where_the_answer_must_call_but_is_read(form: CallForm) -> None:
    for named in (None, "now"):
        asked = functools.partial(toolset, choice="required", named=named)
        assert form.grammar(asked(text_schema={"const": "a"})) == form.grammar(asked())
        with pytest.raises(GrammarRefused, match="strange") as refused:
            form.grammar(asked(text_schema={"type": "strange"}))
        assert refused.value.param == "response_format.json_schema.schema"


@each_form
def test_a_schema_that_is_not_served_is_refused_by_its_tool(form: CallForm) -> None:
    tools = (TOOLS[0], tool("bad", a={"type": "array", "uniqueItems": True}))
    with pytest.raises(GrammarRefused, match="/properties/a has uniqueItems") as caught:
        form.grammar(toolset(tools=tools))
    assert caught.value.param == "tools.1.function.parameters"
    form.grammar(toolset(tools=tools, choice="required", named="get_weather"))


@each_form
@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}, "required": []}])
def test_a_tool_without_properties_has_no_arguments(form: CallForm, parameters: Any) -> None:
    asked = Toolset.of([{"type": "function", "function": {"name": "now", "parameters": parameters}}], "required")
    assert asked is not None
    grammar = of_source(form.grammar(asked).source)
    calls = [form.text([("now", arguments)]).removeprefix(form.prefix) for arguments in ("{}", '{"a": 1}')]
    assert [allows(grammar, call) for call in calls] == [True, False]


def test_arguments_of_any_names_are_for_a_schema_that_says_so() -> None:
    for parameters in ({"type": "object", "additionalProperties": True}, {"required": ["a"]}):
        tools = (Tool(name="f", parameters=parameters),)
        grammar = of_source(form_named("json", None).grammar(toolset(tools=tools, choice="required")).source)
        assert allows(grammar, '{"name": "f", "arguments": {"a": 1}}')


def test_schemas_of_several_tools_share_their_rules() -> None:
    """Each has its own definitions, by one name."""

    def one(name: str, kind: str) -> Tool:
        parameters = {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/a"}, "b": {"type": "string"}},
            "required": ["a"],
            "$defs": {"a": {"type": kind}},
        }
        return Tool(name=name, parameters=parameters)

    form = form_named("json", None)
    grammar: Grammar = form.grammar(toolset(tools=(one("f", "integer"), one("g", "boolean")), choice="required"))
    compiled = of_source(grammar.source)
    assert allows(compiled, '{"name": "f", "arguments": {"a": 1, "b": "x"}}')
    assert allows(compiled, '{"name": "g", "arguments": {"a": true}}')
    assert not allows(compiled, '{"name": "g", "arguments": {"a": 1}}')
    same = form.grammar(toolset(tools=(one("f", "integer"), one("g", "integer")), choice="required"))
    assert len(same.source.splitlines()) < len(grammar.source.splitlines())


def _of_suites(name: str, *required: str, **properties: Any) -> Tool:
    one = tool(name, *required, **properties)
    return Tool(name=name, description=one.description, parameters={**one.parameters, "additionalProperties": False})


LIKE_SUITES = (
    _of_suites(
        "book",
        "guests",
        guests={"type": "array", "items": {"type": "object", "properties": {"name": TEXT, "age": {"type": "integer"}}}},
        rate={"type": "number", "format": "float", "description": "In euros.", "default": 5.0},
        room={"type": "string", "enum": ["single", "double"], "default": "single"},
        dates={"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 2, "maxItems": 2},
        notes={"anyOf": [TEXT, {"type": "null"}], "default": None},
        payment={"type": "object", "properties": {"card": {"type": "string", "pattern": "^[0-9]{4}$"}}, "required": ["card"]},
        tags={"type": "array"},
        anything={"description": "Of any type."},
    ),
    Tool(
        name="tree",
        parameters={
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"root": {"$ref": "#/$defs/Node"}, "kind": {"const": "b-tree"}},
            "required": ["root", "kind"],
            "$defs": {
                "Node": {
                    "type": "object",
                    "properties": {"left": {"$ref": "#/$defs/Node"}, "value": {"type": ["integer", "string"]}},
                }
            },
        },
    ),
    Tool(name="ping", parameters={"type": "object"}),
    Tool(name="pong", parameters={}),
)
"""Tools of the kinds that public suites have, as clients send them: nested, optional, with references, or no properties."""


@each_form
def test_tools_as_public_suites_have_them_are_served(form: CallForm) -> None:
    assert assert_walks_are_calls(form, LIKE_SUITES, 8) > 3


@each_form
@pytest.mark.parametrize("kind", ["dict", "float", "tuple", "any"])
def test_a_type_that_json_schema_lacks_is_refused_by_its_name(form: CallForm, kind: str) -> None:
    with pytest.raises(GrammarRefused, match=f"/properties/a has type '{kind}'; there are array, boolean,"):
        form.grammar(toolset(tools=(tool("f", a={"type": kind}),)))


@functools.cache
def vocabulary(model_dir: Path) -> Vocabulary:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return Vocabulary.load(model_dir, len(tokenizer), [int(tokenizer.eos_token_id)])


@pytest.mark.nightly
@each_form
def test_answers_of_a_model_s_tokens_are_calls_that_validate(form: CallForm, smollm2: Path) -> None:
    """Of random tokens, as an engine masks them."""
    words, draws = vocabulary(smollm2), random.Random(0)
    for tools in (TOOLS, LIKE_SUITES):
        asked, num_ended = toolset(tools=tools, choice="required"), 0
        grammar = form.grammar(asked)
        compiled = words.read(Compilation(words).compile(grammar.kind, grammar.source))
        for _ in range(40):
            matcher, tokens = Matcher(compiled, words), list[int]()
            while len(tokens) < 300 and words.info.stop_token_ids[0] not in tokens:
                may = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[: words.size])
                tokens.append(int(draws.choice(may)))
                assert matcher.accept(tokens[-1])
            parts = told(read(form, [form.prefix, words.rust.decode(tokens)], asked))
            assert all(isinstance(part, tuple) for part in parts[:-1])
            if words.info.stop_token_ids[0] in tokens:
                assert_calls_validate(asked, parts)
                num_ended += 1
        assert num_ended


@pytest.mark.nightly
@each_form
@pytest.mark.parametrize("case", SCHEMAS)
def test_answers_of_many_schemas_validate(form: CallForm, case: str) -> None:
    value = SCHEMAS[case]
    definitions = {name: value[name] for name in ("$defs", "definitions") if name in value}  # `#` is the tool's schema
    both = (tool("f", "value", value=value), tool("g", value=value))
    tools = (*(Tool(name=one.name, parameters=definitions | one.parameters) for one in both), TOOLS[2])
    assert_walks_are_calls(form, tools, 12)
