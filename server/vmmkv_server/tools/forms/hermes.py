"""Calls as JSON between tags: Hermes, Qwen 2.5 and 3, and many that were trained by their data."""

from typing import Final

from vmmkv_server.tools.form import CallForm, Objects

HERMES: Final[CallForm] = Objects(name="hermes", trigger="<tool_call>", begin="\n", end="\n</tool_call>")
"""`<tool_call>`, a line of JSON, `</tool_call>`."""
