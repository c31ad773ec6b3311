"""Strings of a schema as patterns that give valid JSON, whatever the grammar compiler makes of lengths and formats.

xgrammar 0.2.8 lets raw control characters into strings of a limited length, and seconds of 60 and leading zeros into formats;
a quote, a backslash or a control character in a pattern would stand in the JSON unescaped; and of a group that may be missing,
as in `(x[0-9]+)?`, it lets the end come without the beginning. The corpus of tests/grammar found these.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

_DAY: Final = "(0[1-9]|1[0-9]|2[0-8])"
_LEAP_YEAR: Final = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE: Final = (
    f"([0-9]{{4}}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-{_DAY})|{_LEAP_YEAR}-02-29)"
)
_HOURS: Final = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOURS}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOURS})"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL: Final = "[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"

FORMATS: Final[Mapping[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "email": rf"[a-z0-9_+-]{{1,32}}(\.[a-z0-9_+-]{{1,16}})?@({_LABEL}\.){{1,3}}[a-z]{{2,10}}",
}
"""Of RFC 3339, 4122 and 2673, and common addresses."""

_CHARACTER: Final = r'[^"\\\x00-\x1f]'
"""Of a JSON string, without those that are escaped. A class that says what it has, instead of what it has not, takes a thousand
times as long to make a mask of.
"""

_PART: Final = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\(.)|(.)", re.DOTALL)


def check_pattern(pattern: str) -> None:
    """Raises: ValueError if it asks for characters that JSON would have to escape."""
    in_class = is_negated = False
    parts = list(_PART.finditer(pattern))
    for index, part in enumerate(parts):
        plain, escaped, number = part[4], part[3], part[1] or part[2]
        if plain == "[" and not in_class:
            in_class, is_negated = True, index + 1 < len(parts) and parts[index + 1][4] == "^"
        elif plain == "]" and in_class:
            in_class = False
        character = chr(int(number, 16)) if number else escaped or plain
        is_control = character < " " or (escaped is not None and escaped in "nrtfv0c")
        if (is_control and not (in_class and is_negated)) or (character in '"\\' and not in_class):
            raise ValueError(f"pattern {pattern!r} asks for {part[0]!r}, which JSON escapes: this is not served")


def as_pattern(node: Mapping[str, Any]) -> str | None:
    """What stands for the pattern, the lengths or the format of a string; None if it has none of them."""
    if (form := node.get("format")) is not None:
        return _groups_counted(f"^({FORMATS[form]})$")
    if "minLength" in node or "maxLength" in node:
        return f"^{_CHARACTER}{{{node.get('minLength', 0)},{node.get('maxLength', '')}}}$"
    return None if "pattern" not in node else _groups_counted(node["pattern"])


def _groups_counted(pattern: str) -> str:
    """`(...)?` as `(...){0,1}`, which says the same."""
    in_class, before, written = False, "", []
    for part in _PART.finditer(pattern):
        plain = part[4]
        is_group = plain == "?" and before == ")" and not in_class
        written.append("{0,1}" if is_group else part[0])
        in_class = plain == "[" or (in_class and plain != "]")
        before = plain or ""
    return "".join(written)
