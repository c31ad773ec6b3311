"""Which attention a transformers model has while a test asks another one for the truth."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attending_by(model: Any, name: str) -> Iterator[None]:
    """`model` attends by transformers' function of this name, and as before afterwards."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
