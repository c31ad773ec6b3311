"""The house's docstrings as Markdown: `Cost:` and `Raises:` begin paragraphs, and powers are no bold type."""

import re
from typing import Any

import griffe

_LABEL = re.compile(r"(?<!\n)\n(?=(?:Cost|Raises|Cost and Raises|Cost and errors|Legend):)")
_BEGUN = re.compile(r"^(Cost|Raises|Cost and Raises|Cost and errors|Legend):", re.MULTILINE)
_SENTENCE = re.compile(r"(?<=[.)]) (Raises|Cost)(?=:? )")

_POWER = re.compile(r"(`[^`]*`)|(?<=\w)\*\*(?=\w)")
"""Outside of code, which is kept as it is."""


def as_markdown(text: str) -> str:
    """A docstring, so that a reader of the site finds costs and errors as quickly as one of the source."""
    text = _LABEL.sub("\n\n", text)
    text = _SENTENCE.sub(r"\n\n\1", text)
    text = _BEGUN.sub(r"**\1:**", text)
    return _POWER.sub(lambda found: found[1] or r"\*\*", text)


class Prose(griffe.Extension):
    """Applies it to every object."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Once for each, when its module is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
