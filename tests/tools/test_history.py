"""Earlier calls in conversations: each template gets them in the style that it shows."""

import json
import re
from typing import Any

import pytest

from tests.server.tiny import byte_tokenizer
from tests.tools.templates import PLAIN
from vmmkv_server.tokenizer import PromptError, Tokenizer
from vmmkv_server.tools.calls import Tool, Toolset
from vmmkv_server.tools.chat_format import ToolChatFormat
from vmmkv_server.tools.history import HistoryStyle

HEAD = "{% if tools %}{{ tools }}{% endif %}{% for message in messages %}[{{ message.role }}]"
CALLS = "{% for call in message.tool_calls or [] %}"
TAIL = "{% endfor %}{% endfor %}"
OBJECTS = HEAD + "{{ message.content }}" + CALLS + "{{ call.function | tojson }}" + TAIL
ITEMS = (
    HEAD + "{{ message.content }}" + CALLS + "{{ call.function.name }}{% for key, value in call.function.arguments.items() %}"
)
ITEMS += "<{{ key }}>{{ value }}{% endfor %}" + TAIL
TEXTS = HEAD + "{{ message.content or '' }}" + CALLS + "{{ call.function.name + ' ' + call.function.arguments }}" + TAIL
ABSENT = HEAD + "{% if message.content is none %}" + CALLS + "{{ call.function | tojson }}{% endfor %}"
ABSENT += "{% else %}{{ message.content }}{% endif %}{% endfor %}"
SHORT = HEAD + "{{ message.content }}{% if message.role == 'tool' and message.tool_call_id | length != 9 %}"
SHORT += (
    "{{ raise_exception('ids have 9 characters') }}{% endif %}" + CALLS + "{{ call.function | tojson }}{{ call.id }}" + TAIL
)
SINGLE = HEAD + "{{ message.content }}{% if message.tool_calls and message.tool_calls | length != 1 %}"
SINGLE += "{{ raise_exception('one call at once') }}{% endif %}" + CALLS + "{{ call.function | tojson }}" + TAIL
BLIND = HEAD + "{{ message.content }}{% endfor %}"
STRICT = BLIND.replace("[{{", "{% if message.role == 'tool' %}{{ raise_exception('no') }}{% endif %}[{{")

CONVERSATION: Any = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"call-{city}", "type": "function", "function": {"name": "rain", "arguments": json.dumps({"city": city})}}
            for city in ("Brest", "Lyon")
        ],
    },
    {"role": "tool", "tool_call_id": "call-Brest", "content": "heavy"},
    {"role": "tool", "tool_call_id": "call-Lyon", "content": "none"},
]


def shown(template: Any, conversation: Any = CONVERSATION, *tools: Tool) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    made = Tokenizer(tokenizer)
    return made.text_of(
        ToolChatFormat(made).encode(conversation, toolset=Toolset(tools=tools) if tools else None).token_ids,
        skip_special_tokens=False,
    )


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (OBJECTS, '{"name": "rain", "arguments": {"city": "Brest"}}'),
        (ITEMS, "rain<city>Brest"),
        (TEXTS, 'rain {"city": "Brest"}'),
        (ABSENT, '{"name": "rain", "arguments": {"city": "Brest"}}'),
        (SHORT, '{"name": "rain", "arguments": {"city": "Brest"}}'),
        (SINGLE, '{"name": "rain", "arguments": {"city": "Brest"}}'),
        (BLIND, '{"name": "rain", "arguments": {"city": "Brest"}}'),
        (STRICT, '{"name": "rain", "arguments": {"city": "Brest"}}'),
    ],
)
def test_every_template_shows_calls_and_results(template: str, wanted: str) -> None:
    text = shown(template)
    assert wanted in text and wanted.replace("Brest", "Lyon") in text
    assert text.index("Brest") < text.index("heavy") < text.index("none") and "None" not in text


def test_calls_that_come_one_by_one_are_followed_by_their_results() -> None:
    text = shown(SINGLE)
    assert text.index("heavy") < text.index("Lyon") and text.count("[assistant]") == 2


def test_ids_that_are_short_already_stay() -> None:
    conversation = json.loads(json.dumps(CONVERSATION).replace("call-Brest", "abcDEF123"))
    assert "abcDEF123" in shown(SHORT, conversation) and "call-Lyon" not in shown(SHORT, conversation)


@pytest.mark.parametrize("calls", ["rain", [{}], [{"function": {"name": 5}}], [{"function": {"name": "f", "arguments": 5}}], 5])
def test_what_is_no_call_is_refused_with_its_place(calls: Any) -> None:
    with pytest.raises(PromptError, match="the tool_calls of message 1 are"):
        shown(OBJECTS, [CONVERSATION[0], {"role": "assistant", "content": "", "tool_calls": calls}])


@pytest.mark.parametrize(
    ("conversation", "said"),
    [
        ([5], "message 0 is 5"),
        (["hello"], "message 0 is 'hello'"),
        ([{"content": "hello"}], "message 0 has no role"),
        ([{"role": "user"}], "message 0 has no content"),
        ([{"role": "user", "content": 5}], "the content of message 0 is 5"),
        ([CONVERSATION[0], {"role": "tool", "content": ["heavy"]}], "the content of message 1 is"),
        ("hello", "'hello' is not a list of messages"),
        (5, "5 is not a list of messages"),
    ],
)
@pytest.mark.parametrize("tools", [(), (Tool(name="rain"),)])
def test_what_is_no_message_is_refused_with_its_place(conversation: Any, said: str, tools: tuple[Tool, ...]) -> None:
    for template in (BLIND, PLAIN):
        with pytest.raises(PromptError, match=re.escape(said)):
            shown(template, conversation, *tools)


def test_the_style_is_that_of_the_template_for_tools() -> None:
    both = {"default": BLIND, "tool_use": TEXTS}
    assert 'rain {"city": "Brest"}' in shown(both, CONVERSATION, Tool(name="rain"))
    assert 'rain {"city": "Brest"}' not in shown(both)


def test_a_template_that_shows_nothing_has_no_style() -> None:
    assert HistoryStyle.of(lambda turns: "") is None
