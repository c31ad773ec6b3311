"""Calls behind a special token: Mistral's models."""

from dataclasses import dataclass
from typing import Final

from vmmkv_server.tools.form import CallForm, Named, Objects
from vmmkv_server.tools.reading import CallReader, Waiting

TAG: Final = "[TOOL_CALLS]"


@dataclass(frozen=True, kw_only=True)
class _Named(Named):
    def separate(self, reader: CallReader) -> Waiting[None]:
        if (yield from reader.has("[CALL_ID]")):
            yield from reader.word()
        yield from super().separate(reader)


NAMED: Final[CallForm] = _Named(
    name="mistral",
    trigger=TAG,
    separator="[ARGS]",
    between="",
    prefix=TAG,
    optional=("[CALL_ID]",),
    in_code=True,
)
"""`[TOOL_CALLS]name[ARGS]{...}` for each call, of newer tokenizers, perhaps with an id in front of `[ARGS]`."""
ARRAY: Final[CallForm] = Objects(name="mistral", trigger=TAG, open="[", between=", ", close="]", prefix=TAG, in_code=True)
"""`[TOOL_CALLS]`, a JSON array of calls."""
SPACED: Final[CallForm] = Objects(name="mistral", trigger=TAG, open=" [", between=", ", close="]", prefix=TAG, in_code=True)
"""The same with a space, of older tokenizers."""
