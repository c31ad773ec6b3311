"""Conversations with tools for a template that knows none."""

from typing import Any

from tests.tools.streams import BREST, read, told, toolset
from vmmkv_server.tools.forms.plain import PlainJson

CALL = {"id": "a", "type": "function", "function": {"name": BREST[0], "arguments": BREST[1]}}
USER = {"role": "user", "content": "Rain?"}
HISTORY: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "Rain."},
    {"role": "tool", "tool_call_id": "b", "content": "Wind."},
    {"role": "user", "content": "Thanks."},
]


def test_a_call_in_the_history_is_written_as_it_is_read() -> None:
    _, answer, *_ = PlainJson().conversation(HISTORY, None)
    assert told(read(PlainJson(), [answer["content"]])) == [BREST]


def test_turns_alternate_and_have_a_role_and_a_text() -> None:
    turns = PlainJson().conversation(HISTORY, None)
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert turns[2] == {"role": "user", "content": "Result of get_weather:\nRain.\n\nResult:\nWind.\n\nThanks."}
    assert all(turn.keys() == {"role", "content"} for turn in turns)


def test_the_tools_are_told_of_at_the_begin() -> None:
    text = PlainJson().system_text(toolset())
    assert all(name in text for name in ("get_weather", "send_mail", "now"))
    for changes, said in (
        ({}, "answer in plain text."),
        ({"text_schema": {"type": "object"}}, "answer without a call."),
        ({"choice": "required"}, "Now answer with a call, and no text."),
        ({"choice": "required", "named": "now"}, "Now answer with a call of now, and no text."),
    ):
        told_of = PlainJson().system_text(toolset(**changes))
        assert told_of.endswith(said) and ("plain text" in told_of) == (not changes)
    system = {"role": "system", "content": "Be brief."}
    assert PlainJson().conversation([USER], toolset()) == [{"role": "system", "content": text}, USER]
    assert PlainJson().conversation([system, USER], toolset())[0]["content"] == f"Be brief.\n\n{text}"
    assert PlainJson(has_system=False).conversation([USER], toolset()) == [{"role": "user", "content": f"{text}\n\nRain?"}]


def test_a_text_beside_calls_stays() -> None:
    message = {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]}
    (turn,) = PlainJson().conversation([message], None)
    assert turn["content"].startswith("I look.\n") and turn["content"].count(BREST[0]) == 2
