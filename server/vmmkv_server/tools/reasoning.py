"""Reasoning: text that a model writes before its answer, between two markers such as `<think>` and `</think>`.

Markers are found in the chat template. Where a prompt leaves the model, its text tells: within them, behind them, or before.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Self

PARSERS: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "ernie45", "glm45", "olmo3", "qwen3", "step3"), ("<think>", "</think>")),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
"""Markers by the name of vLLM's parser."""


class Place(enum.Enum):
    """The place in a turn at which the model begins to write."""

    BEFORE = "before"
    """Before the reasoning: the model may write its first marker itself."""
    WITHIN = "within"
    """Within the reasoning: the prompt ends with its first marker."""
    BEHIND = "behind"
    """Behind the reasoning, or there is none."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The texts around a model's reasoning."""

    begin: str
    end: str

    @classmethod
    def found_in(cls, template: str) -> Self | None:
        """The markers that a chat template has; None if it has none."""
        return next((cls(*each) for each in dict.fromkeys(PARSERS.values()) if each[1] in template), None)

    def place(self, prompt: str) -> Place:
        """The place at which a prompt ends."""
        tail = prompt.rstrip()
        if tail.endswith(self.begin):
            return Place.WITHIN
        return Place.BEHIND if tail.endswith(self.end) else Place.BEFORE

    def opening(self, render: Callable[[Mapping[str, bool]], str]) -> str:
        """The text with which the model begins to reason by itself; empty if it does not.

        If it does, its template opens and closes the reasoning in the prompt when told that the model shall not think. `render`
        gives a prompt of a conversation by variables of the template.
        """
        open_prompt, closed = render({}), render({"enable_thinking": False})
        if (self.place(open_prompt), self.place(closed)) != (Place.BEFORE, Place.BEHIND):
            return ""
        # Templates may tell the model in the user's turn too, so only the ends are compared.
        before, begin, behind = closed.rpartition(self.begin)
        space, of_both = (text[len(text.rstrip()) :] for text in (before, open_prompt))
        is_empty = behind.strip() == self.end and bool(begin)
        return space.removeprefix(of_both) + begin if is_empty and space.startswith(of_both) else ""


class ReasoningReader:
    """Splits the text of an answer behind its reasoning. White space around the reasoning is left out."""

    def __init__(self, markers: Markers, place: Place) -> None:
        self._markers = markers
        self._is_open = place is Place.WITHIN
        self._stage = _Stage.BEHIND if place is Place.BEHIND else _Stage.START
        self._held = ""
        self._has_text = False
        """Has any text of the reasoning come?"""
        self._has_ended = False

    @property
    def is_open(self) -> bool | None:
        """Has the reasoning not ended yet? None if none has begun."""
        return False if self._has_ended else self._is_open or None

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning, and the text behind it, in the next text of an answer. Together they do not depend on its pieces."""
        if self._stage is _Stage.BEHIND:
            return "", text
        self._held += text
        if self._stage is _Stage.START:
            self._pass_start()
        reasoning = self._reasoning() if self._stage is _Stage.WITHIN else ""
        if self._stage is _Stage.ENDED:
            self._held = self._held.lstrip()
            self._stage = _Stage.BEHIND if self._held else _Stage.ENDED
        behind = ""
        if self._stage is _Stage.BEHIND:
            behind, self._held = self._held, ""
        return reasoning, behind

    def finish(self) -> tuple[str, str]:
        """The rest, at the end of the answer."""
        rest, self._held = self._held, ""
        if not self._is_open:
            return "", rest
        return rest.rstrip() if self._has_text else rest.strip(), ""

    def _pass_start(self) -> None:
        """Leave out the first marker. A model may write it although the prompt ends with it."""
        first, begin = self._held.lstrip(), self._markers.begin
        if first.startswith(begin):
            self._held, self._is_open = first[len(begin) :], True
        elif begin.startswith(first):
            return
        self._stage = _Stage.WITHIN if self._is_open else _Stage.BEHIND

    def _reasoning(self) -> str:
        text = self._held if self._has_text else self._held.lstrip()
        reasoning, is_ended, behind = text.partition(self._markers.end)
        if is_ended:
            self._stage, self._is_open, self._held = _Stage.ENDED, False, behind
            self._has_ended = True
            return reasoning.rstrip()
        end = self._markers.end
        held = next(start for start in range(max(0, len(text) - len(end)), len(text) + 1) if end.startswith(text[start:]))
        shown = text[:held].rstrip()
        self._held, self._has_text = text[len(shown) :], self._has_text or bool(shown)
        return shown


class _Stage(enum.Enum):
    START = enum.auto()
    """The first marker may come."""
    WITHIN = enum.auto()
    ENDED = enum.auto()
    """White space behind the reasoning may come."""
    BEHIND = enum.auto()
