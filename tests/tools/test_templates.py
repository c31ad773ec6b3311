"""The form of a chat template is found or unknown, and never another."""

import re
from typing import Any

import pytest

from tests.server.tiny import byte_tokenizer
from tests.tools.streams import BREST, told, toolset
from tests.tools.templates import CALLS_OF, PLAIN, STRANGE, template, written
from vmmkv_server.structured_output.schema import GrammarRefused
from vmmkv_server.tokenizer import Tokenizer
from vmmkv_server.tools.calls import Tool, Toolset
from vmmkv_server.tools.chat_format import MAX_GRAMMARS, ToolChatFormat
from vmmkv_server.tools.forms import NAMES, SHOWN, form_named, form_of
from vmmkv_server.tools.forms.plain import PlainJson


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, text, _ in CALLS_OF])
def test_a_call_as_a_template_writes_it_shows_the_form(name: str | None, text: str) -> None:
    form = form_of(template(written(text)))
    assert (None if form is None else form.name) == name


def test_every_form_has_a_template_that_shows_it() -> None:
    found = [form_of(template(written(text))) for _, text, _ in CALLS_OF]
    assert all(any(form is each for each in found) for form in SHOWN)


@pytest.mark.parametrize("name", STRANGE)
def test_a_template_that_shows_no_form_is_unknown(name: str) -> None:
    assert form_of(STRANGE[name]) is None


@pytest.mark.parametrize("arguments", ["arguments", "arguments | string", "arguments | tojson"])
def test_a_template_may_take_arguments_as_text_or_as_objects(arguments: str) -> None:
    """Of text, `tojson` writes a text of JSON; of objects, `string` writes Python."""
    begin = """{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function."""
    form = form_of(template(f"{begin}{arguments}) }}}}}}</tool_call>"))
    assert form is not None and form.name == "hermes"


@pytest.mark.parametrize("text", [text for name, text, _ in CALLS_OF if name])
def test_calls_are_read_whether_or_not_their_tags_are_special_tokens(text: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template(written(text))
    form = form_of(tokenizer.chat_template)
    assert form is not None
    call = form.text([BREST])
    tags = re.findall(r"</?[a-z:_]+>|<[|｜][^<>]+[|｜]>|\[[A-Z_]+\]", call)
    tokenizer.add_special_tokens({"additional_special_tokens": [*tags, "<|other|>"]})
    made = Tokenizer(tokenizer)
    prompt = ToolChatFormat(made).encode([{"role": "user", "content": "Rain?"}], toolset=toolset())
    detokenizer, reader = made.detokenizer((), kept=prompt.kept), prompt.reader()
    assert reader is not None and "<|other|>" not in prompt.kept
    parts = reader.feed(detokenizer.finish(tokenizer.encode(f"<|other|>{call}")))
    assert told([*parts, *reader.finish()]) == [BREST]


def test_no_text_is_kept_that_no_special_token_has() -> None:
    """Answers with such texts are decoded token by token."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "<think></think>" + template(written(CALLS_OF[0][1]))
    asked: Any = [{"role": "user", "content": "Rain?"}]
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    for special in ([], tags):
        tokenizer.add_special_tokens({"additional_special_tokens": special})
        made = ToolChatFormat(Tokenizer(tokenizer))
        assert sorted(made.encode(asked, toolset=toolset()).kept) == sorted(special)
        assert sorted(made.encode(asked).kept) == sorted(special[:2])


def test_a_form_can_be_named_and_an_unknown_name_tells_the_known_ones() -> None:
    for name in NAMES:
        assert form_named(name, None).name == name
    assert form_named("json", PLAIN) is form_of(PLAIN)
    with pytest.raises(ValueError, match="tool_call_parser='herms' is not known; use one of auto, hermes,"):
        form_named("herms", None)


def test_an_operator_learns_that_a_form_is_unknown_or_its_tools_unseen() -> None:
    tokenizer = byte_tokenizer()
    hermes = template(written(CALLS_OF[0][1]))
    for shown, parser, said in (
        *((PLAIN, "auto", None), (PLAIN, "json", None), (PLAIN, "hermes", "shows no tools"), (hermes, "hermes", None)),
        *((hermes, "glm45", None), (STRANGE["its own form"], "auto", "is not known"), (None, "hermes", None)),
    ):
        tokenizer.chat_template = shown
        remark = ToolChatFormat(Tokenizer(tokenizer), call_parser=parser).remark
        assert (remark is None) == (said is None) and (said or "") in (remark or ""), (shown, parser)


def test_plain_json_tells_of_tools_where_the_template_has_room_for_it() -> None:
    without_system = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    for text, has_system in ((PLAIN, True), (without_system, False)):
        form = form_of(text)
        assert isinstance(form, PlainJson) and form.has_system == has_system


def test_the_grammar_of_a_toolset_is_made_once() -> None:
    """Of equal contents: each request has objects of its own."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template(written(CALLS_OF[0][1]))
    made = ToolChatFormat(Tokenizer(tokenizer))

    def first(**changes: Any) -> Any:
        parameters = {"type": "object", "properties": {name: {"type": "string"} for name in changes.pop("names", "ab")}}
        return Toolset(tools=(Tool(name="f", parameters=parameters), Tool(name="g")), **changes)

    one = made.grammar(first())
    assert made.grammar(first()) is one
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    others: list[Any] = [
        *({"choice": "required"}, {"choice": "required", "named": "f"}, {"choice": "required", "named": "g"}),
        *({"is_parallel": False, "text_schema": schema}, {"names": "ba"}),
    ]
    sources = {made.grammar(first(**changes)).source for changes in others}
    assert len(sources) == len(others) and one.source not in sources
    assert all(made.grammar(first(**changes)) is made.grammar(first(**changes)) for changes in others)
    assert made.grammar(first(), "another tenant") is not one  # whose time would tell what this one asked
    assert made.grammar(first()) is one
    for number in range(MAX_GRAMMARS):
        made.grammar(first(names=[f"x{number}"]))
    assert made.grammar(first()) is not one


def test_a_toolset_that_is_refused_is_refused_again() -> None:
    made = ToolChatFormat(Tokenizer(byte_tokenizer()))
    unserved = Toolset(tools=(Tool(name="f", parameters={"type": "object", "not": {"type": "strange"}}),))
    for _ in range(2):
        with pytest.raises(GrammarRefused, match="strange") as refused:
            made.grammar(unserved)
        assert refused.value.param == "tools.0.function.parameters"
