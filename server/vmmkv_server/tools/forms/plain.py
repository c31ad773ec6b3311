"""Calls as plain JSON, for models whose chat template knows no tools: a system text tells them of the form.

{"name": "get_weather", "arguments": {"city": "Brest"}}
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vmmkv_server.tools.calls import Toolset
from vmmkv_server.tools.form import Objects


@dataclass(frozen=True, kw_only=True)
class PlainJson(Objects):
    """The form. Conversations with tools in them are made ones that the template knows."""

    name: str = "json"
    is_first: bool = True
    needs_arguments: bool = True
    has_system: bool = True
    """Does the template know system turns? Else the text about the tools leads the first user turn."""

    def system_text(self, toolset: Toolset) -> str:
        """The tools, and how they are called."""
        each = "\n".join(json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in toolset.tools)
        return (
            "You may call functions to get what you need for your answer. These are the functions, each as a JSON object with"
            f" the JSON schema of its parameters:\n{each}\n\n"
            "To call a function, answer with one JSON object and nothing else, no text and no code block around it:\n"
            '{"name": "the name of the function", "arguments": {its arguments}}\n'
            + ("To call several functions, write one such object on each line.\n" if toolset.most_calls is None else "")
            + f"The results come with the next message. {_may_answer(toolset)}"
        )

    def conversation(self, messages: Sequence[Mapping[str, Any]], toolset: Toolset | None) -> list[dict[str, Any]]:
        """The messages without tools: calls and results are written as text, and the tools are told of at the begin.

        Arguments of calls are JSON texts. Results become user turns; those that follow each other, and the user turn
        behind them, are one, since templates often want turns to alternate.
        """
        turns: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        is_behind_result = False
        for message in messages:
            turn = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
            is_result = message["role"] == "tool"
            text = message.get("content") or ""
            if calls := message.get("tool_calls"):
                names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
                functions = [call["function"] for call in calls]
                written = self.text([(each["name"], each.get("arguments") or "{}") for each in functions])
                text = f"{text}\n{written}" if text else written
            elif is_result:
                name = message.get("name") or names.get(message.get("tool_call_id", ""))
                text = f"Result of {name}:\n{text}" if name else f"Result:\n{text}"
                turn = {"role": "user"}
            if is_behind_result and turn["role"] == "user":
                turns[-1]["content"] += f"\n\n{text}"
            else:
                turns.append({**turn, "content": text})
            is_behind_result = is_result
        return turns if toolset is None else self._told(turns, self.system_text(toolset))

    def _told(self, turns: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
        """The turns with a text at their begin."""
        role = "system" if self.has_system else "user"
        if turns and turns[0]["role"] == role:
            first, *others = turns
            both = (first["content"], text) if self.has_system else (text, first["content"])
            return [{**first, "content": "\n\n".join(part for part in both if part)}, *others]
        return [{"role": role, "content": text}, *turns]


def _may_answer(toolset: Toolset) -> str:
    """The sentence that tells the model what else than a call it may answer."""
    if toolset.choice == "required":
        return f"Now answer with a call{f' of {toolset.named}' if toolset.named else ''}, and no text."
    return f"If no function helps, answer {'in plain text' if toolset.text_schema is None else 'without a call'}."
