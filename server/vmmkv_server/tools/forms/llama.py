"""Calls as plain JSON that is the whole answer: Llama 3.1 to 3.3."""

from dataclasses import dataclass
from typing import Final

from vmmkv_server.tools.form import CallForm, Objects
from vmmkv_server.tools.reading import CallReader, Waiting

PYTHON_TAG: Final = "<|python_tag|>"


@dataclass(frozen=True, kw_only=True)
class _Llama(Objects):
    def read(self, reader: CallReader) -> Waiting[None]:
        yield from reader.space()
        yield from reader.has(PYTHON_TAG)
        yield from super().read(reader)


LLAMA3_JSON: Final[CallForm] = _Llama(
    name="llama3_json", key="parameters", needs_arguments=True, between="; ", is_first=True, optional=(PYTHON_TAG,)
)
"""`{"name": ..., "parameters": {...}}`, perhaps behind a tag, and further ones behind `; `."""
