"""Whose shape a row is of: its workload begins with the shape's name, unless it is the one that everything is promised of."""

from typing import Final

from bench.settings import SHAPES

PROMISED: Final = "llama-3.1-8b"
"""Nothing else is held against what was promised."""


def named(shape: str, text: str) -> str:
    """A workload's name."""
    return text if shape == PROMISED else f"{shape} {text}"


def shape_of(workload: str) -> str:
    """The shape of a workload that `named` has named."""
    first = workload.partition(" ")[0]
    return first if first in SHAPES else PROMISED


def without_shape(workload: str) -> str:
    """What `named` was given."""
    return workload.removeprefix(f"{shape_of(workload)} ")
