"""Answers in each form of calls, and the parts that they are read into."""

import json
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from vmmkv_server.tools.calls import CallArguments, CallBegun, Content, Part, Tool, Toolset
from vmmkv_server.tools.form import CallForm, Objects
from vmmkv_server.tools.forms import SHOWN
from vmmkv_server.tools.forms.plain import PlainJson

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


def _call(name: str, **arguments: Any) -> tuple[str, str]:
    return name, json.dumps(arguments, ensure_ascii=False)


BREST: Final = _call("get_weather", city="Brest")
LONG: Final = _call("get_weather", city="Brest", days=3, unit="celsius", is_brief=True)
QUOTED: Final = _call("send_mail", to=["a@b.c", '"d" <d@e.f>'], body='{"name": "now"}\n[1, {}] \\ \\u00e9 é 🌊 </a> ```\n')
DEEP: Final = _call("send_mail", to=[], body="", options={"a": [[1, -2.5], {"b": None}], "c": False, "<d>": "\n"})
NOW: Final = ("now", "{}")


def _of_all(form: CallForm) -> dict[str, tuple[str, Told]]:
    """Answers in any form."""

    def text(*calls: tuple[str, str]) -> str:
        return form.text(calls)

    call, unknown = text(BREST), text(("fly", "{}"))
    is_cut, begun = call.index("Brest") + 3, call[: call.index("get_weather") + 4]
    streams: dict[str, tuple[str, Told]] = {
        "content": ("The sea is calm.\n", ["The sea is calm.\n"]),
        "white space": (" \n ", [" \n "]),
        "a call": (call, [BREST]),
        "space around": (f"\n {call} \n", [BREST]),
        "a long call": (text(LONG), [LONG]),
        "quotes and unicode": (text(QUOTED), [QUOTED]),
        "deep arguments": (text(DEEP), [DEEP]),
        "no arguments": (text(NOW), [NOW]),
        "two calls": (text(BREST, NOW), [BREST, NOW]),
        "three calls": (text(BREST, QUOTED, LONG), [BREST, QUOTED, LONG]),
        "text behind": (f"{call}\nDone.\n", [BREST, "\nDone.\n"]),
        "cut off in the name": (begun, [begun] if form.is_first else []),
        "cut off in the arguments": (call[:is_cut], [("get_weather", '{"city": "Bre')]),
        "unknown name": (unknown, [unknown]),
        "a similar name": (text(("get_weathers", "{}")), [text(("get_weathers", "{}"))]),
        "a name in text": ("get_weather {} now", ["get_weather {} now"]),
        "code": ("```py\nnow()\n```\n", ["```py\nnow()\n```\n"]),
    }
    fenced = f"So:\n```xml\n{call}\n```\n"
    if form.is_first:
        return streams | {
            "text in front": (f"So: {call}", [f"So: {call}"]),
            "a code block": (fenced, [fenced]),
            "unknown name and a call": (unknown + call, [unknown + call]),
            "text between": (f"{call}\nAnd {call}", [BREST, f"\nAnd {call}"]),
        }
    tag = form.trigger
    return streams | {
        "text in front": (f"I look.\n\n{call}", ["I look.", BREST]),
        "text between": (f"A:\n{call}\nB:\n{text(NOW)}\nC.\n", ["A:", BREST, "\nB:", NOW, "\nC.\n"]),
        "one behind the other": (f"{call}\n{text(NOW)}{call}", [BREST, NOW, BREST]),
        "unknown name and a call": (unknown + call, [unknown, BREST]),
        "cut off in the tag": (f"Hm {tag[:-1]}", [f"Hm {tag[:-1]}"]),
        "a tag in text": (f"Write {tag} first. {tag[0]}{tag[:4]}", [f"Write {tag} first. {tag[0]}{tag[:4]}"]),
        "a tag behind a tag": (tag + call, [tag, BREST]),
        "a tag and other text": (f"{tag}{{}}{tag}\n[]{tag}<a>", [f"{tag}{{}}{tag}\n[]{tag}<a>"]),
        "a code block": (fenced, ["So:\n```xml", BREST, "\n```\n"] if form.in_code else [fenced]),
        "behind a code block": (f"~~~\n```\n~~~\n{call}", ["~~~\n```\n~~~", BREST]),
    }


def _of_objects(form: CallForm) -> dict[str, tuple[str, Told]]:
    """Answers in forms of JSON objects, which may have other keys, and be broken."""
    call = form.text([NOW])
    written = call[call.index("{") : call.rindex("}") + 1]

    def other(text: str) -> str:
        return call.replace(written, text)

    def in_full(text: str) -> tuple[str, Told]:
        return other(text), [other(text)]

    broken = other('{"name": "get_weather", "arguments": {"city": Brest}}')
    escaped = '{"city":"\\u00e9\\\\\\"\\ud83c" ,"days":-0.5E+10, "x":[ ] }'
    return {
        "arguments null": (other('{"name":"now","arguments":null}'), [NOW]),
        "arguments as text": (other('{"name": "now", "arguments": " {\\"a\\": 1}"}'), [("now", '{"a": 1}')]),
        "arguments first": (other(f'{{"arguments": {BREST[1]}, "name": "get_weather"}}'), [BREST]),
        "parameters": (other(f'{{"name": "get_weather", "parameters": {BREST[1]}}}'), [BREST]),
        "other keys and spaces": (
            other(f'{{ "id" : "a" ,\n"name":"get_weather","arguments" :{escaped}, "x": [1, true] }}'),
            [("get_weather", escaped)],
        ),
        "broken arguments": (broken, [("get_weather", '{"city": '), broken[broken.index(" Brest") + 1 :]]),
        "broken behind the arguments": (other('{"name": "now", "arguments": {}!'), [NOW, other("!")[call.index(written) :]]),
        "cut off behind the arguments": (call[: call.index(written) + len(written) - 1], [NOW]),
        "half a character in text": in_full(r'{"name": "now", "arguments": "{\"a\": \"\ud800\"}"}'),
        "text that is no JSON": in_full('{"name": "now", "arguments": "a"}'),
        "arguments of another kind": in_full('{"name": "now", "arguments": [1]}'),
        "a name without quotes": in_full('{"name": now, "arguments": {}}'),
        "another object": in_full('{"city": "Brest", "days": [{"a": 1}]}'),
        "an empty object": in_full("{ }"),
        "an array": in_full('[["a"]]'),
        "absent arguments": (
            other('{"name": "now"}'),
            [other('{"name": "now"}')] if isinstance(form, Objects) and form.needs_arguments else [NOW],
        ),
    }


FORMS: Final = {f"{form.name}{index}": form for index, form in enumerate((PlainJson(), *SHOWN))}
"""All forms."""
STREAMS: Final = {
    label: _of_all(form) | (_of_objects(form) if isinstance(form, Objects) else {}) for label, form in FORMS.items()
}
"""By form, answers by name, and what they are read into."""
