"""Answers in each form of calls, and the parts that they are read into."""

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from vmmkv_server.tools.calls import CallArguments, CallBegun, Content, Part, Tool, Toolset
from vmmkv_server.tools.form import CallForm

Told: TypeAlias = list[str | tuple[str, str]]
"""Content as texts, calls as name and arguments; in order."""


def tool(name: str, /, *required: str, **properties: Any) -> Tool:
    """A tool whose arguments are these properties; none means any text."""
    return Tool(
        name=name,
        description=f"To {name.replace('_', ' ')}.",
        parameters={"type": "object", "properties": properties, "required": list(required)},
    )


TEXT: Final = {"type": "string"}
TOOLS: Final = (
    tool(
        "get_weather",
        "city",
        city=TEXT,
        days={"type": "integer"},
        unit={"enum": ["celsius", "fahrenheit"]},
        is_brief={"type": "boolean"},
    ),
    tool("send_mail", "to", "body", to={"type": "array", "items": TEXT}, body=TEXT, options={"type": "object"}),
    tool("now"),
)


def toolset(**changes: Any) -> Toolset:
    return Toolset(**{"tools": TOOLS, **changes})


def read(form: CallForm, pieces: Iterable[str], tools: Toolset | None = None) -> list[Part]:
    """The parts of an answer that comes in pieces."""
    reader = form.reader(toolset() if tools is None else tools)
    return [part for piece in pieces for part in reader.feed(piece)] + reader.finish()


def told(parts: Iterable[Part]) -> Told:
    """The parts, where neighbours of one kind are one."""
    found: Told = []
    for part in parts:
        if isinstance(part, CallBegun):
            assert part.index == sum(isinstance(one, tuple) for one in found)
            found.append((part.name, ""))
        elif isinstance(part, CallArguments):
            name, before = found[-1]
            assert isinstance(found[-1], tuple) and part.text
            found[-1] = name, before + part.text
        else:
            assert isinstance(part, Content) and part.text
            if found and isinstance(found[-1], str):
                found[-1] += part.text
            else:
                found.append(part.text)
    return found


BREST: Final = ("get_weather", '{"city": "Brest"}')
LONG: Final = ("get_weather", '{"city": "Brest", "days": 3, "unit": "celsius", "is_brief": true}')
QUOTED: Final = ("send_mail", r'{"to": ["a@b.c", "\"d\" <d@e.f>"], "body": "{\"name\": \"now\"}\n[1, {}] \\ \u00e9 é 🌊"}')
DEEP: Final = ("send_mail", '{"to": [], "body": "", "options": {"a": [[1, -2.5e+3], {"b": null}], "c": false}}')
NOW: Final = ("now", "{}")


def _hermes(call: tuple[str, str]) -> str:
    return f'<tool_call>\n{{"name": "{call[0]}", "arguments": {call[1]}}}\n</tool_call>'


def _json(call: tuple[str, str]) -> str:
    return f'{{"name": "{call[0]}", "arguments": {call[1]}}}'


def _hermes_streams() -> dict[str, tuple[str, Told]]:
    call, bad = _hermes(BREST), '<tool_call>\n{"name": "get_weather"'
    fenced = f"So:\n```xml\n{call}\n```\n"
    return {
        "content": ("The sea is calm.\n", ["The sea is calm.\n"]),
        "white space": (" \n ", [" \n "]),
        "a call": (call, [BREST]),
        "a long call": (_hermes(LONG), [LONG]),
        "quotes and unicode": (_hermes(QUOTED), [QUOTED]),
        "deep arguments": (_hermes(DEEP), [DEEP]),
        "no arguments": (_hermes(NOW), [NOW]),
        "absent arguments": ('<tool_call>{"name": "now"}</tool_call>', [NOW]),
        "arguments null": ('<tool_call>{"name": "now", "arguments": null}</tool_call>', [NOW]),
        "arguments as text": ('<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', [("now", '{"a": 1}')]),
        "arguments first": ('<tool_call>{"arguments": {"city": "Brest"}, "name": "get_weather"}</tool_call>', [BREST]),
        "other keys and spaces": (
            '\n<tool_call> { "id" : "a" , "name":"get_weather","arguments" :{"city": "Brest"}, "x": [1] } </tool_call>\n',
            [BREST],
        ),
        "two calls": (f"{call}\n{_hermes(NOW)}", [BREST, NOW]),
        "two calls without space": (call + call, [BREST, BREST]),
        "text around": (f"I look.\n\n{call}\nThen:\n{_hermes(NOW)}\nDone.\n", ["I look.", BREST, "\nThen:", NOW, "\nDone.\n"]),
        "cut off in a tag": ("Hm <tool_ca", ["Hm <tool_ca"]),
        "cut off in the name": ('<tool_call>\n{"name": "get_wea', ['<tool_call>\n{"name": "get_wea']),
        "cut off in the arguments": (bad + ', "arguments": {"city": "Bre', [("get_weather", '{"city": "Bre')]),
        "cut off behind the arguments": (bad + ', "arguments": {"city": "Brest"}', [BREST]),
        "cut off in the end": (call[:-4], [BREST, "\n</tool_c"]),
        "no end": (call.removesuffix("\n</tool_call>") + "\n" + call, [BREST, BREST]),
        "unknown name": (_hermes(("fly", "{}")) + call, [_hermes(("fly", "{}")), BREST]),
        "broken JSON": (
            f'<tool_call>\n{{"name": get_weather}}\n</tool_call>\n{call}',
            ['<tool_call>\n{"name": get_weather}\n</tool_call>', BREST],
        ),
        "broken arguments": (bad + ', "arguments": {"city": Brest}}', [("get_weather", '{"city": '), "Brest}}"]),
        "arguments of another kind": (bad + ', "arguments": [1]}', [bad + ', "arguments": [1]}']),
        "a tag in text": ("Write <tool_call> first. <<tool_call", ["Write <tool_call> first. <<tool_call"]),
        "a tag behind a tag": (f"<tool_call>{call}", ["<tool_call>", BREST]),
        "a code block": (fenced, [fenced]),
        "behind a code block": (fenced + call, [fenced.rstrip(), BREST]),
    }


def _json_streams() -> dict[str, tuple[str, Told]]:
    call = _json(BREST)
    return {
        "content": ("The sea is calm.\n", ["The sea is calm.\n"]),
        "white space": (" \n ", [" \n "]),
        "a call": (call, [BREST]),
        "space around": (f"\n {call}\n", [BREST]),
        "a long call": (_json(LONG), [LONG]),
        "quotes and unicode": (_json(QUOTED), [QUOTED]),
        "deep arguments": (_json(DEEP), [DEEP]),
        "no arguments": (_json(NOW), [NOW]),
        "arguments null": ('{"name":"now","arguments":null}', [NOW]),
        "arguments as text": ('{"name": "now", "arguments": "{\\"a\\": 1}"}', [("now", '{"a": 1}')]),
        "a text that is no JSON": ('{"name": "now", "arguments": "a"}', ['{"name": "now", "arguments": "a"}']),
        "parameters": ('{"name": "get_weather", "parameters": {"city": "Brest"}}', [BREST]),
        "arguments first": ('{"arguments": {"city": "Brest"}, "name": "get_weather"}', [BREST]),
        "absent arguments": ('{"name": "now"}', ['{"name": "now"}']),
        "two calls": (f"{call}\n{_json(NOW)}", [BREST, NOW]),
        "two calls without space": (call + call, [BREST, BREST]),
        "text behind": (f"{call}\nDone. {call}", [BREST, f"\nDone. {call}"]),
        "text in front": (f"So: {call}", [f"So: {call}"]),
        "another object": ('{"name": "Anna", "age": 3}', ['{"name": "Anna", "age": 3}']),
        "an object with a tool's name": ('{"name": "now", "age": 3}', ['{"name": "now", "age": 3}']),
        "an empty object": ("{ }", ["{ }"]),
        "an array": ("[1]", ["[1]"]),
        "cut off in the name": ('{"name": "get_wea', ['{"name": "get_wea']),
        "cut off in the arguments": ('{"name": "get_weather", "arguments": {"city": "Bre', [("get_weather", '{"city": "Bre')]),
        "cut off behind the arguments": (call[:-1], [BREST]),
        "unknown name": (_json(("fly", "{}")) + call, [_json(("fly", "{}")) + call]),
        "broken arguments": (call.replace('"Brest"', "Brest"), [("get_weather", '{"city": '), "Brest}}"]),
        "a code block": (f"```json\n{call}\n```", [f"```json\n{call}\n```"]),
    }


STREAMS: Final = {"hermes": _hermes_streams(), "json": _json_streams()}
"""By form, answers by name, and what they are read into."""
