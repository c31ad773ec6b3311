"""How decode cuts a shape into tiles, chunks and lanes."""

import functools
from dataclasses import dataclass

import triton

from vmmkv.kernels.lanes import MAX_LEAF_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How one shape is cut; it depends on head counts, head size and dtypes, never on the batch."""

    tile_rows: int
    """Rows in one step of the inner loop."""
    chunk_tiles: int
    """Tiles whose leaves are merged one after the other (lanes.py); a lane that has all of a chunk leaves one partial of it."""
    short_tiles: int
    """Tiles of a sequence up to which a leaf is one tile (lanes.py)."""
    max_chunks: int = 16
    """A sequence of more has chunks of twice, three times, ... as many tiles, which bounds the workspace."""
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    """Of a thread; None leaves it to the compiler."""
    programs_per_sm: int = 1
    """As many as are resident together: a program that starts late ends late."""
    query_with_tiles: bool = False
    """Load the query as early as each tile, and not when a sequence's first tile is there; never beside quantised tiles."""

    def __post_init__(self) -> None:
        assert self.chunk_tiles % (1 << MAX_LEAF_BITS) == 0, "a leaf would lie in two chunks"


@functools.cache
def tiling(num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int, payload_bytes: int) -> Tiling:
    """The tiling of a shape. `itemsize` is that of the query, `payload_bytes` those of a head's K in a row.

    tile_rows: 32 KiB of K in the query's dtype: two tiles of K and V each, and an SM's shared memory has room for one program.
    Quantised K and V are bound by what dequantising costs, and want more programs instead. In float32, whose dots run
    without tensor cores: 16 rows and 8 warps, since more spills registers.
    chunk_tiles: 8192 rows. short_tiles: as many leaves as occupy the SMs with one sequence, and no more to merge than that.
    query_with_tiles: where it is small beside a tile; what is bound by registers or instructions would gain nothing.
    """
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    exact = itemsize == 4
    tile_rows = 16 if exact else min(256, max(16, 32768 // (padded_dim * itemsize)))
    is_quantised = payload_bytes < head_dim * itemsize and not exact
    group_elements = (num_heads // num_kv_heads) * padded_dim
    is_wide = group_elements > 8192 or (is_quantised and group_elements == 8192)
    return Tiling(
        tile_rows=tile_rows,
        chunk_tiles=8192 // tile_rows,
        short_tiles=16 if num_kv_heads >= 8 else 32,
        num_warps=8 if exact or is_wide else 4,
        num_stages=2 if is_quantised or (is_wide and not exact) else 3,
        max_registers=168 if is_quantised and not is_wide else None,
        programs_per_sm=3 if is_quantised and not is_wide else 1,
        query_with_tiles=group_elements <= 2048 and not exact,
    )
