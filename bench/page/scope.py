"""What each suite does not show: the text of bench/README.md, where it is written, and written once."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

README: Final = Path(__file__).parents[1] / "README.md"

_SECTION: Final = re.compile(r"^## Scope\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_ITEM: Final = re.compile(r"^- \*\*(?P<names>[^*]+?)\.?\*\*(?P<text>.*?)(?=^- \*\*|\Z)", re.MULTILINE | re.DOTALL)
EVERY: Final = "All"
"""Stands before what is to be said of all suites."""


def scopes(readme: str | None = None) -> Mapping[str, str]:
    """By suite, the items `- **suite.** text` under the heading Scope; `- **one, two.** text` is said of both.

    Raises: ValueError if there are none: the page would then claim more than it can.
    """
    text = README.read_text(encoding="utf-8") if readme is None else readme
    section = _SECTION.search(text)
    items = _ITEM.finditer(section[1]) if section else ()
    found = {
        name.strip(): " ".join(item["text"].split())
        for item in items
        for name in item["names"].replace(" and ", ",").split(",")
    }
    if not found:
        raise ValueError(f"{README}: no item `- **suite.** text` under a heading `## Scope`")
    return found
