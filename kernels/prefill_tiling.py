"""How prefill cuts a shape into programs and steps."""

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiling:
    """How a launch is cut; it depends on head size and dtypes, never on the batch."""

    tokens: int = 128
    """Queries in a program's tile."""
    tile_rows: int = 64
    """Keys in one step of the loop."""
    num_warps: int = 8
    num_stages: int = 3


@functools.cache
def prefill_tiling(head_dim: int, itemsize: int, kind: str) -> PrefillTiling:
    """The tiling of a shape; slots and blocks have the same `tile_rows`, and so the same bits.

    128 queries are what two groups of four warps multiply together; their keys are as many as leave the registers enough for
    scores, weights and output, and shared memory enough for three stages: fewer for wide heads and for quantised ones, which
    pass through registers. float32 is multiplied without tensor cores.
    """
    wide = head_dim > 128
    if itemsize == 4:
        return PrefillTiling(tokens=32, tile_rows=16, num_stages=2)
    if kind:
        return PrefillTiling(tokens=64 if wide else 128, tile_rows=32 if wide or kind == "int4" else 64, num_stages=2)
    return PrefillTiling(num_stages=2) if wide else PrefillTiling()
