"""Code blocks of Markdown: what stands in one is an example, where a gate's triggers and readers of calls may not count."""

import re
from typing import Final

_MAX_FENCE_CHARS: Final = 64
_FENCE: Final = re.compile(" {0,3}(`{3,}(?!.*`)|~{3,})")


class CodeBlocks:
    """Fenced code blocks in a text that comes in pieces."""

    def __init__(self) -> None:
        self._fence = ""
        """The fence of the open block, at the begin of the last line."""
        self._line = ""
        """The begin of the last line, which tells whether it is a fence."""
        self._has_tick = False
        """Is there a backtick in the rest of the last line?"""

    def feed(self, text: str) -> None:
        """Append text."""
        *lines, rest = text.split("\n")
        for line in lines:
            self._append(line)
            self._fence = self._behind_line()
            self._line, self._has_tick = "", False
        self._append(rest)

    @property
    def is_open(self) -> bool:
        """Is the end of the text in a code block?"""
        return bool(self._behind_line())

    def _append(self, text: str) -> None:
        size = _MAX_FENCE_CHARS - len(self._line)
        self._line += text[:size]
        self._has_tick = self._has_tick or "`" in text[size:]

    def _behind_line(self) -> str:
        found = _FENCE.match(self._line)
        if found is None or (self._has_tick and found[1][0] == "`"):
            return self._fence
        if not self._fence:
            return found[1]
        return "" if found[1].startswith(self._fence) else self._fence
