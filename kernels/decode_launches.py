"""What decode's two launches are given besides tensors and strides. It follows from shapes, types and options alone.

A step that no graph has captured is bound by the host, which would work all of this out again for each layer of a model.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton

from vmmkv.kernels import checks
from vmmkv.kernels.lanes import MAX_LEAF_BITS
from vmmkv.kernels.quantise import QMAX, Kind
from vmmkv.kernels.tiling import Tiling
from vmmkv.units import ceil_div

_MOST_KEPT = 1024
"""A batch of each size has launches of its own; over tensors that grow with their tokens, so has every step."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """What the first launch leaves for the second: a partial for each chunk, and for each tile that is kept apart."""

    max_chunks: int
    """Of a sequence."""
    max_apart: int
    """Tiles of a lane."""
    num_partials: int

    @classmethod
    def of(cls, cut: Tiling, num_sequences: int, num_rows: int, num_lanes: int) -> "Workspace":
        """Enough for any lengths of so many sequences in slots of so many rows."""
        most_tiles = ceil_div(num_rows, cut.tile_rows)
        max_chunks = max(1, min(cut.max_chunks, ceil_div(most_tiles, cut.chunk_tiles)))
        largest_chunk = cut.chunk_tiles * ceil_div(most_tiles, cut.chunk_tiles * max_chunks)
        max_apart = max(2 * cut.short_tiles, ceil_div(largest_chunk, 1 << MAX_LEAF_BITS))
        return cls(max_chunks, max_apart, num_sequences * max_chunks + num_lanes * max_apart)

    def elements(self, num_heads: int, head_dim: int) -> int:
        """Output, peak and total of every query head."""
        return self.num_partials * num_heads * (head_dim + 2)


class Call(NamedTuple):
    """All that the launches follow from; see decode.py for what the names of its tensors mean."""

    cut: Tiling
    num_lanes: int
    num_sequences: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    width: int
    """Of a payload, in elements as they are stored."""
    num_rows: int
    """Of a slot."""
    block: int
    kind: Kind | None
    scale: str
    has_paired_scales: bool
    is_exact: bool
    """Are the queries float32?"""
    by_tma: bool
    overlaps: bool
    """Does the second launch begin while the first one runs, and wait inside?"""
    has_softcap: bool
    has_limit: bool
    has_starts: bool
    has_firsts: bool
    has_lse: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """How both kernels are launched."""

    space: Workspace
    elements: int
    """float32 that the workspace has."""
    rows_box: list[int]
    """One tile of one kv head of one slot, for the tensor memory accelerator."""
    query_box: list[int] | None
    """The queries of a kv head, padded by the next one's; None if they are not loaded with the tiles."""
    tiles_grid: tuple[int]
    tiles: dict[str, Any]
    """Constants and resources of the first kernel."""
    merge_grid: tuple[int, int]
    merge: dict[str, Any]
    """Those of the second."""


@functools.lru_cache(maxsize=_MOST_KEPT)
def launches_of(call: Call) -> Launches:
    """Of a call whose shapes have been checked."""
    cut, group = call.cut, call.num_heads // call.num_kv_heads
    space = Workspace.of(cut, call.num_sequences, call.num_rows, call.num_lanes)
    common: dict[str, Any] = {
        "B_PAD": _padded(call.num_sequences), "G": group, "TILE": cut.tile_rows, "CHUNK_TILES": cut.chunk_tiles,
        "SHORT_TILES": cut.short_tiles, "QMAX": 1.0 if call.kind is None else QMAX[call.kind], "SCALE": call.scale,
        "HAS_LIMIT": call.has_limit, "HAS_STARTS": call.has_starts, "HAS_FIRSTS": call.has_firsts, "HAS_LSE": call.has_lse,
        "PDL": call.overlaps,
    }  # fmt: skip
    if call.overlaps:
        common["launch_pdl"] = True
    # A table's entries are loaded a stage before the rows that they name: Triton makes two stages of each.
    num_stages = 2 * cut.num_stages - 1 if call.block else cut.num_stages
    resources: dict[str, Any] = {"num_warps": cut.num_warps, "num_stages": num_stages}
    if cut.max_registers is not None and not checks.INTERPRETED:
        resources["maxnreg"] = cut.max_registers
    query_with_tiles = call.by_tma and cut.query_with_tiles and call.kind is None
    rows_of_partials = min(16, triton.next_power_of_2(space.max_chunks))
    return Launches(
        space=space,
        elements=space.elements(call.num_heads, call.head_dim),
        rows_box=[1, cut.tile_rows, 1, _padded(call.width)],
        query_box=[1, _padded(group), _padded(call.head_dim)] if query_with_tiles else None,
        tiles_grid=(call.num_lanes * call.num_kv_heads,),
        tiles={
            "K": call.num_kv_heads, "G_PAD": _padded(group), "W": call.width, "W_PAD": _padded(call.width),
            "BLOCK": call.block, "TMA": call.by_tma,
            "PACKED": call.kind is not None and not checks.INTERPRETED and not call.is_exact,
            "PAIRED": call.has_paired_scales, "KIND": call.kind or "", "HAS_SOFTCAP": call.has_softcap,
            "QUERY_WITH_TILES": query_with_tiles, **resources, **common,
        },
        # A border between lanes lies in at most one sequence.
        merge_grid=(min(call.num_sequences, call.num_lanes), call.num_heads),
        merge={
            "H": call.num_heads, "D": call.head_dim, "D_PAD": _padded(call.head_dim),
            "STEP": rows_of_partials, "UNROLL": 15 if rows_of_partials <= 2 else 8,
            "num_warps": max(1, min(4, rows_of_partials // 2)), **common,
        },
    )  # fmt: skip


def _padded(size: int) -> int:
    """As a tensor core's tile has it: a power of two, 16 or more."""
    return max(16, int(triton.next_power_of_2(size)))
