"""Calls as markup of keys and values: GLM 4.5 to 5."""

from typing import Final

from vmmkv_server.tools.form import CallForm
from vmmkv_server.tools.markup import Markup

GLM45: Final[CallForm] = Markup(
    name="glm45",
    trigger="<tool_call>",
    behind_name="\n",
    before_key="<arg_key>",
    behind_key="</arg_key>\n<arg_value>",
    closing="</arg_value>",
    last="</tool_call>",
)
"""`<tool_call>name`, and a line for each key and value."""
GLM47: Final[CallForm] = Markup(
    name="glm47",
    trigger="<tool_call>",
    behind_name="",
    before_key="<arg_key>",
    behind_key="</arg_key><arg_value>",
    closing="</arg_value>",
    behind_value="",
    last="</tool_call>",
    between="",
)
"""The same without line breaks."""
