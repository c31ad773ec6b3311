"""How decode cuts a shape into tiles, chunks and programs.

Legend: G query heads of a kv head, D head dim.
"""

import functools
from dataclasses import dataclass

import triton

from vmmkv.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How one shape is cut; it depends on head counts, head size and dtype, never on the batch.

    A sequence of up to `chunk_rows * max_chunks` rows has chunks of `chunk_rows`; a longer one has chunks of the least
    multiple of it that leaves no more than `max_chunks`, which bounds the workspace whatever the length.
    """

    tile_rows: int
    """Rows in one step of the inner loop."""
    chunk_rows: int
    max_chunks: int
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    """At most as many as are resident together: a program that starts late ends late."""


@functools.cache
def tiling(num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> Tiling:
    """The tiling of a shape.

    tile_rows: 16 KiB of K, so that two programs with three stages of K and V each fit an SM's shared memory; in float32,
    whose dots run without tensor cores, 16 rows and 8 warps, since more spills registers.
    chunk_rows: 256 for up to 4 query heads a kv head and more in proportion, since a unit's partials (4 D G bytes) should
    stay near 2 % of its rows. max_chunks: enough units to fill a GPU with a single long sequence.
    """
    group = num_heads // num_kv_heads
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    exact = itemsize == 4
    return Tiling(
        tile_rows=16 if exact else min(128, max(16, 16384 // (padded_dim * itemsize))),
        chunk_rows=256 * triton.next_power_of_2(ceil_div(group, 4)),
        max_chunks=max(64, triton.next_power_of_2(ceil_div(256, num_kv_heads))),
        num_warps=8 if exact or group * padded_dim > 8192 else 4,
    )
