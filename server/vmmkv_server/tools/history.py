"""Earlier calls and their results in a conversation, as the model's chat template takes them.

Clients send OpenAI's JSON: calls in `tool_calls` of an assistant's turn, with their arguments as the text of JSON, and each
result in a turn of role `tool`. Templates differ in what they read of it, so one conversation is rendered in each style, and
the first that shows all of it is used.
"""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any, Final, Self

from vmmkv_server.chats import Turn
from vmmkv_server.tokenizer import PromptError, check_messages

_SHORT_ID_CHARS: Final = 9
_NAMES, _VALUES, _RESULTS = ("first_probe", "second_probe"), ("one_value", "two_value"), ("one_result", "two_result")


def has_calls(turns: Sequence[Turn]) -> bool:
    """Are there calls or results in a conversation, or assistant's turns without content?

    Raises: PromptError for what is no conversation, or no call.
    """
    is_list = isinstance(turns, Sequence) and not isinstance(turns, str | bytes)
    check_messages(list(map(_with_content, turns)) if is_list else turns)
    found = False
    for index, turn in enumerate(turns):
        if turn["role"] in ("assistant", "tool"):
            calls = turn.get("tool_calls") or []
            if not isinstance(calls, Sequence) or not all(map(_is_call, calls)):
                wanted = 'a list of {"id": ..., "function": {"name": ..., "arguments": the text of a JSON object}}'
                raise PromptError(f"the tool_calls of message {index} are {shortened(calls)}; wanted {wanted}")
            found = found or bool(calls) or turn["role"] == "tool" or turn.get("content") is None
    return found


def _with_content(turn: Any) -> Any:
    """A turn of the assistant's or of a tool's may lack its content."""
    match turn:
        case {"role": "assistant" | "tool"}:
            return turn if turn.get("content") is not None else {**turn, "content": ""}
    return turn


def _is_call(call: Any) -> bool:
    match call:
        case {"function": {"name": str(), **rest}}:
            return isinstance(rest.get("arguments"), str | Mapping | None) and isinstance(call.get("id"), str | None)
    return False


@dataclass(frozen=True, slots=True)
class HistoryStyle:
    """A style of turns with calls and results, for templates that show them."""

    content: str | None
    """Content of a turn that has calls and no text."""
    has_text_arguments: bool
    """Are arguments the text of JSON? Else they are objects."""
    has_short_ids: bool
    """Do ids have nine letters and digits, as Mistral's templates want?"""
    is_single: bool
    """Has a turn one call at most? Several become turns of their own, each followed by its result."""

    @classmethod
    def of(cls, render: Callable[[Sequence[Turn]], str]) -> Self | None:
        """The style of a template, of which `render` gives the text; None if it shows no calls or results in any."""
        for choices in itertools.product((False, True), (False, True), (False, True), ("", None)):
            is_single, has_short_ids, has_text_arguments, content = choices
            style = cls(content, has_text_arguments, has_short_ids, is_single)
            try:
                text = render(style.turns(_PROBE))
            except PromptError:
                continue
            if all(part in text for part in (*_NAMES, *_VALUES, *_RESULTS)) and '\\"probe_key' not in text:
                return style
        return None

    def turns(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """A conversation in this style."""
        calls = [call for turn in turns for call in turn.get("tool_calls") or ()]
        names = {call["id"]: call["function"]["name"] for call in calls if call.get("id")}
        styled = [self._turn(turn, names) for turn in turns]
        return list(self._one_by_one(styled)) if self.is_single else styled

    def _turn(self, turn: Turn, names: Mapping[str, str]) -> dict[str, Any]:
        """`names`: those of the called functions, by the ids of calls."""
        styled = dict(turn)
        if calls := turn.get("tool_calls"):
            styled["tool_calls"] = [self._call(call) for call in calls]
            styled["content"] = turn.get("content") or self.content
        elif turn.get("content") is None:
            styled["content"] = ""
        if turn.get("role") == "tool":
            call_id = str(turn.get("tool_call_id") or "")
            if call_id in names:
                styled.setdefault("name", names[call_id])
            styled["tool_call_id"] = _short(call_id) if self.has_short_ids else call_id
        return styled

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        name, arguments = call["function"]["name"], arguments_of(call)
        written = json.dumps(arguments, ensure_ascii=False) if self.has_text_arguments else arguments
        call_id = call.get("id") or ""
        return {
            "id": _short(call_id) if self.has_short_ids else call_id,
            "type": "function",
            "function": {"name": name, "arguments": written},
        }

    def _one_by_one(self, turns: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Turns with one call each, and behind each the result that has its id."""
        waiting = list(turns)
        while waiting:
            turn = waiting.pop(0)
            calls = turn.get("tool_calls") or ()
            if len(calls) < 2:
                yield turn
                continue
            for index, call in enumerate(calls):
                yield turn | {"tool_calls": [call], "content": self.content if index else turn["content"]}
                results = itertools.takewhile(lambda place: waiting[place]["role"] == "tool", range(len(waiting)))
                place = next((place for place in results if waiting[place].get("tool_call_id") == call["id"]), None)
                if place is not None:
                    yield waiting.pop(place)


def with_text_arguments(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """A conversation whose calls have their arguments as the text of JSON."""
    return HistoryStyle(content="", has_text_arguments=True, has_short_ids=False, is_single=False).turns(turns)


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call as an object. Text that is none, of a call that was cut off, is its only argument."""
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return dict(arguments) if isinstance(arguments, Mapping) else {"arguments": arguments}


def _short(call_id: str) -> str:
    is_short = len(call_id) == _SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum()
    return call_id if is_short else hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:_SHORT_ID_CHARS]


_PROBE: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": "ask"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"probe-{name}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps({"probe_key": value})},
            }
            for name, value in zip(_NAMES, _VALUES, strict=True)
        ],
    },
    *(
        {"role": "tool", "tool_call_id": f"probe-{name}", "name": name, "content": result}
        for name, result in zip(_NAMES, _RESULTS, strict=True)
    ),
]
