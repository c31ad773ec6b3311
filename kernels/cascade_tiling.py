"""How cascade cuts a shape into problems, tiles and lanes."""

import functools
from dataclasses import dataclass

import triton


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeTiling:
    """How a launch is cut; it depends on head counts, head size and dtype, never on the batch."""

    queries: int = 128
    """Rows of a problem's dot: sequences times query heads of a kv head."""
    tile_rows: int = 64
    """Rows of the prefix in one step of the loop."""
    least_tiles: int = 1
    """Of a lane: a part costs what it takes to write it and to merge it."""
    num_warps: int = 8
    num_stages: int = 3
    programs_per_sm: int = 1
    """As many as are resident together: a program that starts late ends late."""
    merged_elements: int = 1024
    """Of the output, in a program of the last launch."""
    merged_parts: int = 4
    """That are loaded together there."""


@functools.cache
def cascade_tiling(group: int, head_dim: int, itemsize: int) -> CascadeTiling:
    """The tiling of a shape with so many query heads a kv head.

    128 queries are what two groups of four warps multiply together; the tile leaves the registers enough for scores, weights
    and output, and shared memory enough for its stages. float32 is multiplied without tensor cores.
    """
    if itemsize == 4:
        return CascadeTiling(queries=max(32, triton.next_power_of_2(group)), tile_rows=16, num_stages=2)
    return CascadeTiling(num_stages=2) if head_dim > 128 else CascadeTiling()
