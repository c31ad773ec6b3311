"""What a row holds: K and V as a model computes them, or quantised, with scales for each token and head in either place.

scales by layer   | layer 0: k, v, scales | layer 1: k, v, scales | ...
scales at the end | layer 0: k, v | layer 1: k, v | ... | layer 0: scales | layer 1: ...
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from bench.settings import Shape
from vmmkv import Group, KVLayout, Plane
from vmmkv.layout import SCALES, KVType

Place = Literal["layer", "end"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """Rows of a model's shape. `quantised` None: K and V in the shape's own dtype. `scales_at`: where scales of tokens are."""

    shape: Shape
    quantised: KVType | None = None
    scales_at: Place = "end"

    @property
    def name(self) -> str:
        """As rows name it."""
        if self.quantised is None:
            return str(self.shape.dtype).removeprefix("torch.")
        place = "" if self.quantised.scale == "head" else " by layer" if self.scales_at == "layer" else " at the end"
        return f"{self.quantised.kind} {self.quantised.scale} scales{place}"

    @property
    def planes(self) -> tuple[Plane, ...]:
        """k and v; and their scales, if these are in the row."""
        shape, quantised = self.shape, self.quantised
        dtype = shape.dtype if quantised is None else quantised.dtype
        width = shape.head_dim if quantised is None else quantised.width(shape.head_dim)
        payloads = tuple(Plane(name=name, heads=shape.kv_heads, dim=width, dtype=dtype) for name in ("k", "v"))
        if quantised is None or quantised.scale == "head":
            return payloads
        trailing = self.scales_at == "end"
        return (*payloads, Plane(name=SCALES, heads=shape.kv_heads, dim=2, dtype=torch.float16, trailing=trailing))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, without padding: what reading it costs at least."""
        return sum(plane.size_bytes for plane in self.planes)

    @property
    def usual_scale(self) -> float:
        """By which random payloads have a deviation of about 1."""
        return 1.0 if self.quantised is None else {"fp8": 1.0, "int8": 1 / 73, "int4": 1 / 4.3}[self.quantised.kind]

    def layout(self, layers_per_row: int) -> KVLayout:
        """Groups of so many layers (the last may have fewer)."""
        layers = range(self.shape.layers)
        rows = [tuple(layers[first : first + layers_per_row]) for first in range(0, len(layers), layers_per_row)]
        return KVLayout(groups=tuple(Group(layers=row, planes=self.planes) for row in rows))

    @cached_property
    def whole_rows(self) -> Group:
        """All layers of a token in one row."""
        return self.layout(self.shape.layers).groups[0]
