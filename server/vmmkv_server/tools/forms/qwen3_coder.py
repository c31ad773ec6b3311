"""Calls as markup: Qwen3-Coder and Qwen 3.5, Nemotron 3, Step 3.5, and Seed-OSS by other tags."""

from typing import Final

from vmmkv_server.tools.form import CallForm
from vmmkv_server.tools.markup import Markup

QWEN3_CODER: Final[CallForm] = Markup(
    name="qwen3_coder",
    trigger="<tool_call>",
    begin="\n<function=",
    behind_name=">\n",
    before_key="<parameter=",
    behind_key=">\n",
    closing="</parameter>",
    last="</function>",
    end="\n</tool_call>",
)
"""`<tool_call>`, `<function=name>`, `<parameter=key>` and lines of its value."""
SEED_OSS: Final[CallForm] = Markup(
    name="seed_oss",
    trigger="<seed:tool_call>",
    begin="\n<function=",
    behind_name=">\n",
    before_key="<parameter=",
    behind_key=">",
    closing="</parameter>",
    last="</function>",
    end="\n</seed:tool_call>",
)
"""The same with a prefix, and values within their line."""
