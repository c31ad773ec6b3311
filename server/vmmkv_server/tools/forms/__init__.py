"""Forms of calls, one module for each, and the one that a chat template shows.

A form is found by what a template does, never by its words: a conversation with a call is rendered, and the form is the one
whose reader finds that call in the text. A template that renders the same without tools knows none, and gets plain JSON.

Read `hermes` first.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from vmmkv_server.tools.calls import CallArguments, CallBegun, Content, Tool, Toolset
from vmmkv_server.tools.form import CallForm
from vmmkv_server.tools.forms.hermes import Hermes
from vmmkv_server.tools.forms.plain import PlainJson

SHOWN: Final[tuple[CallForm, ...]] = (Hermes(),)
"""Forms that templates show."""
NAMES: Final = tuple(dict.fromkeys(form.name for form in (*SHOWN, PlainJson())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A chat template's way with tools."""

    form: CallForm | None
    """None for one that is unknown."""
    are_arguments_text: bool = False
    """Does it want the arguments of earlier calls as JSON texts, and not as objects?"""


def form_of(template: str | None) -> CallForm | None:
    """The form that a chat template shows. None if it is unknown, or there is no template."""
    return shown_by(template).form


def form_named(name: str, template: str | None) -> CallForm:
    """The form of a name: the template's own if it has that name. Raises: ValueError, telling the names."""
    shown = shown_by(template).form
    if shown is not None and shown.name == name:
        return shown
    for form in (*SHOWN, PlainJson()):
        if form.name == name:
            return form
    raise ValueError(f"there is no form of calls named {name!r}; there are {', '.join(NAMES)}")


@functools.lru_cache(maxsize=8)
def shown_by(template: str | None) -> Shown:
    """The way of a template with tools. Cost: it is rendered some ten times, and the result is kept."""
    if template is None:
        return Shown(form=None)
    rendering = _Rendering(template)
    plain, told = rendering.text([_ASKED]), rendering.text([_ASKED], tools=True)
    if plain is None:
        return Shown(form=None)
    if plain == told:
        system = rendering.text([{"role": "system", "content": _SYSTEM_TEXT}, _ASKED])
        return Shown(form=PlainJson(has_system=system is not None and _SYSTEM_TEXT in system))
    for are_arguments_text in (False, True):
        for answer in rendering.calls(are_arguments_text=are_arguments_text):
            found = [form for form in SHOWN if _has_call(form, answer)]
            if found:
                return Shown(form=found[0] if len(found) == 1 else None, are_arguments_text=are_arguments_text)
    return Shown(form=None)


_NAME: Final = "find_harbour"
_ARGUMENTS: Final = {"port": "Brest 7731"}
_TOOL: Final = Tool(
    name=_NAME,
    description="Find a harbour.",
    parameters={
        "type": "object",
        "properties": {"port": {"type": "string", "description": "The name of the harbour."}},
        "required": ["port"],
    },
)
_ASKED: Final[dict[str, Any]] = {"role": "user", "content": "Where is it?"}
_SYSTEM_TEXT: Final = "Answer like the keeper of a lighthouse."


class _Rendering:
    """A chat template, and conversations as it renders them."""

    def __init__(self, template: str) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            self._template = _compile_jinja_template(template)
        except Exception:  # a template is a program
            self._template = None

    def text(self, messages: list[dict[str, Any]], *, tools: bool = False, prompt: bool = True) -> str | None:
        """The text of a conversation; None if the template refuses it."""
        if self._template is None:
            return None
        tokens = dict.fromkeys(["bos_token", "eos_token", "unk_token", "pad_token"], "")
        offered = [_TOOL.for_template()] if tools else None
        try:
            return str(self._template.render(messages=messages, tools=offered, add_generation_prompt=prompt, **tokens))
        except Exception:  # a template is a program
            return None

    def calls(self, *, are_arguments_text: bool) -> Iterator[str]:
        """The text behind a prompt in conversations where the prompt is answered by a call."""
        prompt = self.text([_ASKED], tools=True)
        arguments = json.dumps(_ARGUMENTS) if are_arguments_text else _ARGUMENTS
        call = {"id": "call56789", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        result: dict[str, Any] = {"role": "tool", "tool_call_id": "call56789", "name": _NAME, "content": "In the west."}
        for content in ("", None):
            answer: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [call]}
            for turns in ([answer, result], [answer]):
                text = self.text([_ASKED, *turns], tools=True, prompt=False)
                if text is not None and prompt is not None:
                    pairs = enumerate(zip(prompt, text, strict=False))
                    yield text[next((index for index, (one, other) in pairs if one != other), len(prompt)) :]


def _has_call(form: CallForm, answer: str) -> bool:
    """Does the form's reader find the one call, and nothing of it in the text around?"""
    toolset = Toolset(tools=(_TOOL,))
    reader = form.reader(toolset)
    parts = [*reader.feed(answer), *reader.finish()]
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
    content = "".join(part.text for part in parts if isinstance(part, Content))
    is_shown = any(trigger in answer for trigger in form.triggers(toolset))
    is_whole = names == [_NAME] and _ARGUMENTS["port"] not in content
    return is_shown and is_whole and _read(arguments) == _ARGUMENTS


def _read(arguments: str) -> Mapping[str, Any] | None:
    try:
        return dict(json.loads(arguments))
    except ValueError:
        return None
