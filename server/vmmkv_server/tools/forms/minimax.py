"""Calls of MiniMax's models: M1 writes lines of JSON, M2 markup."""

from typing import Final

from vmmkv_server.tools.form import CallForm, Objects
from vmmkv_server.tools.markup import Markup

MINIMAX: Final[CallForm] = Objects(name="minimax", trigger="<tool_calls>", open="\n", close="\n</tool_calls>")
"""`<tool_calls>`, and a line of JSON for each call."""
MINIMAX_M2: Final[CallForm] = Markup(
    name="minimax_m2",
    trigger="<minimax:tool_call>",
    open="\n",
    begin='<invoke name="',
    behind_name='">\n',
    before_key='<parameter name="',
    behind_key='">',
    closing="</parameter>",
    last="</invoke>",
    close="\n</minimax:tool_call>",
)
"""`<minimax:tool_call>`, and an `<invoke>` for each call."""
