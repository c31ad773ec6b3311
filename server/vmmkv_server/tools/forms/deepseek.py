"""Calls between special tokens: DeepSeek's V3 and R1, and V3.1; and markup of its own: V3.2 and V4."""

from typing import Final

from vmmkv_server.tools.form import CallForm, Named
from vmmkv_server.tools.markup import Markup

_OPEN: Final = "<｜tool▁calls▁begin｜>"
_CLOSE: Final = "<｜tool▁calls▁end｜>"
_BEGIN: Final = "<｜tool▁call▁begin｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_END: Final = "<｜tool▁call▁end｜>"

DEEPSEEK_V3: Final[CallForm] = Named(
    name="deepseek_v3",
    trigger=_OPEN,
    open="",
    begin=f"{_BEGIN}function{_SEPARATOR}",
    separator="\n```json\n",
    end=f"\n```{_END}",
    close=_CLOSE,
    in_code=True,
)
"""The name, and a block of JSON."""
DEEPSEEK_V31: Final[CallForm] = Named(
    name="deepseek_v31",
    trigger=_OPEN,
    open="",
    begin=_BEGIN,
    separator=_SEPARATOR,
    end=_END,
    between="",
    close=_CLOSE,
    in_code=True,
)
"""The name, a token, and JSON."""


def _dsml(name: str, section: str) -> CallForm:
    return Markup(
        name=name,
        trigger=f"<｜DSML｜{section}>",
        open="\n",
        begin='<｜DSML｜invoke name="',
        behind_name='">\n',
        before_key='<｜DSML｜parameter name="',
        behind_key='"',
        kinds=(' string="true">', ' string="false">'),
        closing="</｜DSML｜parameter>",
        last="</｜DSML｜invoke>",
        close=f"\n</｜DSML｜{section}>",
    )


DEEPSEEK_V32: Final = _dsml("deepseek_v32", "function_calls")
DEEPSEEK_V4: Final = _dsml("deepseek_v4", "tool_calls")
"""Markup that tells texts from JSON."""
