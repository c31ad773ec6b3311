"""The parts of an answer, from its text as it comes: reasoning, then text and calls."""

from vmmkv_server.tools.calls import Content, Part, Reasoning
from vmmkv_server.tools.reading import CallReader
from vmmkv_server.tools.reasoning import ReasoningReader


class PartReader:
    """Reads one answer: `feed` it the text as it comes, then `finish`. The parts do not depend on the pieces of the text."""

    def __init__(self, reasoning: ReasoningReader | None = None, calls: CallReader | None = None, *, prefix: str = "") -> None:
        """`prefix`: text that the calls begin with and that the answer lacks, since the prompt has it."""
        self._reasoning = reasoning
        self._calls = calls
        self._prefix = prefix

    @property
    def has_whole_calls(self) -> bool:
        """Has the answer calls so far, all of them whole?"""
        return self._calls is not None and self._calls.has_whole_calls

    @property
    def is_reasoning(self) -> bool | None:
        """Has the reasoning of the answer not ended yet? None if none has begun."""
        return None if self._reasoning is None else self._reasoning.is_open

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        if self._reasoning is None:
            return self._read(text)
        reasoning, behind = self._reasoning.feed(text)
        return [*([Reasoning(reasoning)] if reasoning else []), *(self._read(behind) if behind else [])]

    def finish(self) -> list[Part]:
        """The rest, at the end of the answer."""
        parts = list[Part]()
        if self._reasoning is not None:
            reasoning, behind = self._reasoning.finish()
            parts += [*([Reasoning(reasoning)] if reasoning else []), *(self._read(behind) if behind else [])]
        if self._calls is not None:
            parts += self._calls.finish()
        return parts

    def _read(self, text: str) -> list[Part]:
        if self._calls is None:
            return [Content(text)] if text else []
        text, self._prefix = self._prefix + text, ""
        return self._calls.feed(text)
