"""Calls as a JSON array behind a tag: Granite, Jamba, Apriel, Hunyuan, Phi 4 mini."""

from typing import Final

from vmmkv_server.tools.form import CallForm, Objects

GRANITE: Final[CallForm] = Objects(name="granite", trigger="<|tool_call|>", open="[", between=", ", close="]", in_code=True)
JAMBA: Final[CallForm] = Objects(
    name="jamba", trigger="<tool_calls>", open="[\n    ", between=",\n    ", close="\n]</tool_calls>"
)
APRIEL: Final[CallForm] = Objects(name="jamba", trigger="<tool_calls>", open="[", between=", ", close="]</tool_calls>")
"""The same in one line."""
PHI4_MINI: Final[CallForm] = Objects(name="phi4_mini", trigger="functools[", open="", between=", ", close="]")
