"""Forms of calls, one module for each, and the one that a chat template shows.

A form is found by what a template does, never by its words: a conversation with a call is rendered, and the form is the one
whose reader finds that call in the text. A template that renders the same without tools knows none, and gets plain JSON.

Read `hermes` first.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, Final

from vmmkv_server.tools.calls import CallArguments, CallBegun, Content, Tool, Toolset
from vmmkv_server.tools.form import CallForm
from vmmkv_server.tools.forms.arrays import APRIEL, GRANITE, JAMBA, PHI4_MINI
from vmmkv_server.tools.forms.deepseek import DEEPSEEK_V3, DEEPSEEK_V4, DEEPSEEK_V31, DEEPSEEK_V32
from vmmkv_server.tools.forms.glm import GLM45, GLM47
from vmmkv_server.tools.forms.hermes import HERMES
from vmmkv_server.tools.forms.llama import LLAMA3_JSON
from vmmkv_server.tools.forms.minimax import MINIMAX, MINIMAX_M2
from vmmkv_server.tools.forms.mistral import ARRAY, NAMED, SPACED
from vmmkv_server.tools.forms.plain import PlainJson
from vmmkv_server.tools.forms.qwen3_coder import QWEN3_CODER, SEED_OSS

SHOWN: Final[tuple[CallForm, ...]] = (
    *(HERMES, LLAMA3_JSON, ARRAY, SPACED, NAMED, QWEN3_CODER, SEED_OSS),
    *(GLM45, GLM47, DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, DEEPSEEK_V4),
    *(MINIMAX, MINIMAX_M2, JAMBA, APRIEL, GRANITE, PHI4_MINI),
)
"""Forms that templates show."""
NAMES: Final = tuple(dict.fromkeys(form.name for form in (*SHOWN, PlainJson())))


@functools.lru_cache(maxsize=8)
def form_of(template: str | None) -> CallForm | None:
    """The form that a chat template shows. None if it is unknown, or there is no template.

    Cost: the template is rendered some ten times, and the result is kept.
    """
    if template is None:
        return None
    rendering = _Rendering(template)
    plain, told = rendering.text([_ASKED]), rendering.text([_ASKED], tools=True)
    if told is None:
        return None
    if plain == told:
        system = rendering.text([{"role": "system", "content": _SYSTEM_TEXT}, _ASKED])
        return PlainJson(has_system=system is not None and _SYSTEM_TEXT in system)
    for answer in rendering.calls():
        found = [form for form in SHOWN if _has_call(form, answer)]
        exact = [form for form in found if _writes(form) in answer]
        found = exact or [form for form in found if not form.is_first]  # without a tag, the keys are all that tells
        if found:
            return found[0] if len({form.name for form in found}) == 1 else None
    return None


def form_named(name: str, template: str | None) -> CallForm:
    """The form of a name: the template's own if it has that name. Raises: ValueError, telling the names."""
    own = form_of(template)
    for form in (*([] if own is None else [own]), *SHOWN, PlainJson()):
        if form.name == name:
            return form
    raise ValueError(f"tool_call_parser={name!r} is not known; use one of {', '.join(('auto', *NAMES))}")


_NAME: Final = "find_harbour"
_ID: Final = "call56789"
"""Mistral's templates want nine characters."""
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


_OPEN_TAG: Final = re.compile(r"[<\[][^<>\[\]\s]*\Z")
"""The begin of a tag, at the end of a text."""


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

    def calls(self) -> Iterator[str]:
        """The text behind a prompt, in conversations where the prompt is answered by a call.

        Templates differ in how they want it: with arguments as an object or as text, and with or without content.
        """
        prompt = self.text([_ASKED], tools=True) or ""
        result = {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": "In the west."}
        for arguments, content, turns in product((_ARGUMENTS, json.dumps(_ARGUMENTS)), ("", None), ([result], [])):
            call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
            answer = {"role": "assistant", "content": content, "tool_calls": [call]}
            text = self.text([_ASKED, answer, *turns], tools=True, prompt=False)
            if text is not None:
                pairs = enumerate(zip(prompt, text, strict=False))
                common = prompt[: next((index for index, (one, other) in pairs if one != other), len(prompt))]
                yield text[len(_OPEN_TAG.sub("", common)) :]


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


def _writes(form: CallForm) -> str:
    """The call as the form writes it, up to the value of the argument: forms differ there, if only in white space."""
    text = form.text([(_NAME, json.dumps(_ARGUMENTS))])
    return text[: text.index(_ARGUMENTS["port"])]


def _read(arguments: str) -> Mapping[str, Any] | None:
    try:
        return dict(json.loads(arguments))
    except ValueError:
        return None
