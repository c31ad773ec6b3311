"""Decode attention: one new query for each sequence, over contiguous slots or over blocks.

Split-KV in two launches, after Flash-Decoding (Dao et al., 2023) and Stream-K (Osama et al., 2023). Each sequence's rows are
cut into *tiles*. The tiles of all sequences, one behind the other, are divided into equal *splits*. A split is one program for
each kv head, so every program has the same work whatever the lengths are. The host reads no length, and one captured graph
serves all.

1. `attend_tiles` sums up the tiles. It writes the output of a sequence that lies in one split, and leaves partials of the
   others.
2. `merge_partials` merges those.

What is summed up with what, and in which order, follows from a sequence's own length (split_kv.py). So its result is the same
bit for bit in any batch and on any number of programs.

Legend: B sequences, N queries, S slots, T rows of a slot, H query heads, K kv heads, G = H / K, D head dim, W payload width (D;
quantised, pairs of bytes: D / 2, of int4 D / 4), P blocks, U rows of a block, C columns of a block table. Prefixes: p_ pointer,
i_ index, m_ mask. Logarithms are to base 2: log2(e) is folded into the scale.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv.units import ceil_div
from vmmkv_kernels import checks
from vmmkv_kernels.attention.kv_memory import (
    LayerKV,
    blocks_of,
    descriptor,
    element_of,
    in_pairs,
    kv_memory,
    load_tile,
    parts_of,
    row_pointers,
)
from vmmkv_kernels.attention.split_kv import (
    EMPTY_PEAK,
    MAX_LEAF_BITS,
    chunk_tiles_of,
    divisor_of,
    is_single,
    leaf_bits_of,
    merge,
    output_row,
    resident_splits,
    sequence_at,
    sequence_of,
    span,
    span_inputs,
    span_of,
    split_begins,
    split_tiles_of,
    weights_of,
)
from vmmkv_kernels.quantise import QMAX, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Tile sizes of a shape. They depend on head counts, head dim and dtypes, never on the batch."""

    tile_rows: int
    """Rows in one step of the inner loop."""
    chunk_tiles: int
    """Tiles of a chunk (split_kv.py). A split that has all of a chunk leaves one partial of it."""
    short_tiles: int
    """Tiles of a sequence up to which a leaf is one tile (split_kv.py)."""
    max_chunks: int = 16
    """Most chunks of a sequence. A longer one has chunks of twice, three times, ... as many tiles."""
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    """Most registers of a thread; None leaves it to the compiler."""
    programs_per_sm: int = 1
    """Programs that are resident together: one that starts late ends late."""
    query_with_tiles: bool = False
    """Load the query with every tile, by TMA, instead of with a sequence's first tile; never beside quantised tiles."""

    def __post_init__(self) -> None:
        assert self.chunk_tiles % (1 << MAX_LEAF_BITS) == 0, "a leaf would lie in two chunks"


@functools.cache
def tiling(num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int, payload_bytes: int) -> Tiling:
    """The tiling of a shape. `itemsize` is that of the query, `payload_bytes` those of one head's K in a row.

    - tile_rows: 32 KiB of K in the query's dtype. Two tiles of K and of V fill an SM's shared memory with one program. float32
      has dots without tensor cores: 16 rows and 8 warps, since more spills registers.
    - Quantised K and V are bound by instructions and by what warps wait for each other. So programs are small and many: as few
      warps as have the output in their registers, 12 of them on an SM. Where K has a byte for each element, shared memory has
      room for that many programs if each has one tile; the others compute while it waits.
    - chunk_tiles: 8192 rows. short_tiles: enough leaves for one sequence to occupy the SMs, and no more to merge.
    - query_with_tiles: where the query is small beside a tile. Launches bound by registers or instructions gain nothing.
    """
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    exact = itemsize == 4
    tile_rows = 16 if exact else min(256, max(16, 32768 // (padded_dim * itemsize)))
    short_tiles = 16 if num_kv_heads >= 8 else 32
    group = num_heads // num_kv_heads
    if payload_bytes < head_dim * itemsize and not exact:
        num_warps = min(8, max(1, _padded_group(group, is_quantised=True) * padded_dim // 512))
        return Tiling(
            tile_rows=128, chunk_tiles=64, short_tiles=short_tiles, num_warps=num_warps,
            num_stages=2 if payload_bytes < head_dim else 1,
            max_registers=168 if num_warps < 8 else None, programs_per_sm=12 // num_warps,
        )  # fmt: skip
    is_wide = group * padded_dim > 8192
    return Tiling(
        tile_rows=tile_rows,
        chunk_tiles=8192 // tile_rows,
        short_tiles=short_tiles,
        num_warps=8 if exact or is_wide else 4,
        num_stages=2 if is_wide and not exact else 3,
        query_with_tiles=group * padded_dim <= 2048 and not exact,
    )


def _padded_group(group: int, *, is_quantised: bool) -> int:
    """G_PAD: the rows of the queries in a tensor core's tile, its columns if transposed; see `_dot`."""
    return max(8, triton.next_power_of_2(group)) if is_quantised else checks.padded(group)


_MAX_KEPT_LAUNCHES = 1024
"""Most launches that are kept. There is one for each batch size; with tensors that grow with their tokens, for each step."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory between the launches: a partial for each chunk, and for each leaf that is kept apart."""

    max_chunks: int
    """Chunks of a sequence."""
    max_apart: int
    """Leaves that a split keeps apart."""
    elements: int
    """Number of float32 elements: output, peak and total of every query head of each partial."""

    @classmethod
    def of(cls, cut: Tiling, num_splits: int, num_sequences: int, num_heads: int, head_dim: int, num_rows: int) -> "Workspace":
        """The workspace that is enough for any lengths of the sequences."""
        most_tiles = ceil_div(num_rows, cut.tile_rows)
        max_chunks = max(1, min(cut.max_chunks, ceil_div(most_tiles, cut.chunk_tiles)))
        largest_chunk = cut.chunk_tiles * ceil_div(most_tiles, cut.chunk_tiles * max_chunks)
        max_apart = max(2 * cut.short_tiles, ceil_div(largest_chunk, 1 << MAX_LEAF_BITS))
        num_partials = num_sequences * max_chunks + num_splits * max_apart
        return cls(max_chunks, max_apart, num_partials * num_heads * (head_dim + 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """Grids and constants of both launches."""

    space: Workspace
    rows_box: list[int]
    """TMA box: one tile of one kv head of one slot."""
    query_box: list[int] | None
    """TMA box: the queries of a kv head, padded by those of the next; None if they are not loaded with the tiles."""
    tiles_grid: tuple[int]
    tiles: dict[str, Any]
    merge_grid: tuple[int, int]
    merge: dict[str, Any]


@functools.lru_cache(maxsize=_MAX_KEPT_LAUNCHES)
def launches_of(
    cut: Tiling, num_splits: int, num_sequences: int, num_heads: int, num_kv_heads: int, head_dim: int, width: int,
    num_rows: int, block: int, kind: Kind | None, scale: str, has_paired_scales: bool, is_exact: bool, by_tma: bool,
    overlaps: bool, has_softcap: bool, settled: bool,
) -> Launches:  # fmt: skip
    """Launch options of both kernels, besides tensors and strides, for checked shapes.

    width: elements of a payload as they are loaded. is_exact: the queries are float32. overlaps: the device has programmatic
    dependent launch, so a kernel is made ready while the one before it still runs, and waits inside. settled: see `decode`.

    Cached: a step outside a graph is bound by the host, which would work this out again for each layer of a model.
    """
    group = num_heads // num_kv_heads
    space = Workspace.of(cut, num_splits, num_sequences, num_heads, head_dim, num_rows)
    common: dict[str, Any] = {
        "B_PAD": checks.padded(num_sequences), "G": group, "TILE": cut.tile_rows, "CHUNK_TILES": cut.chunk_tiles,
        "SHORT_TILES": cut.short_tiles, "QMAX": 1.0 if kind is None else QMAX[kind], "SCALE": scale,
        **checks.overlap_options(overlaps),
    }  # fmt: skip
    # A table's entries are loaded a stage before the rows that they name: Triton makes two stages of each.
    num_stages = 2 * cut.num_stages - 1 if block else cut.num_stages
    resources: dict[str, Any] = {"num_warps": cut.num_warps, "num_stages": num_stages}
    if cut.max_registers is not None and not checks.INTERPRETED:
        resources["maxnreg"] = cut.max_registers
    query_with_tiles = by_tma and cut.query_with_tiles and kind is None
    rows_of_partials = min(16, triton.next_power_of_2(space.max_chunks))
    return Launches(
        space=space,
        rows_box=[1, cut.tile_rows, 1, checks.padded(width)],
        query_box=[1, checks.padded(group), checks.padded(head_dim)] if query_with_tiles else None,
        tiles_grid=(num_splits * num_kv_heads,),
        tiles={
            "K": num_kv_heads, "G_PAD": _padded_group(group, is_quantised=kind is not None), "W": width,
            "W_PAD": checks.padded(width), "BLOCK": block, "TMA": by_tma,
            "PACKED": kind is not None and not checks.INTERPRETED and not is_exact,
            "PAIRED": has_paired_scales, "KIND": kind or "", "HAS_SOFTCAP": has_softcap,
            "QUERY_WITH_TILES": query_with_tiles, "SETTLED": settled, **resources, **common,
        },
        # A border between splits lies in at most one sequence, so there are no more to merge.
        merge_grid=(min(num_sequences, num_splits), num_heads),
        merge={
            "H": num_heads, "D": head_dim, "D_PAD": checks.padded(head_dim), "STEP": rows_of_partials,
            "UNROLL": 15 if rows_of_partials <= 2 else 8, "num_warps": max(1, min(4, rows_of_partials // 2)), **common,
        },
    )  # fmt: skip


@triton.jit
def _load_query(
    p_q, i_q, stride_qb, stride_qh, i_h, i_w, m_gw, W: tl.constexpr, PARTS: tl.constexpr, KIND: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """The queries of one kv head as [G_PAD, W_PAD] for each part of K, in DOT, and the factor by which they are too small."""
    p_query = p_q + tl.cast(i_q, tl.int64) * stride_qb + (i_h * stride_qh)[:, None]
    parts = ()
    for i in tl.static_range(PARTS):
        part = tl.load(p_query + element_of(i_w, i, W, KIND)[None, :], mask=m_gw, other=0.0)
        parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005 (Triton knows no starred tuples)
    factor = 1.0
    if p_q.dtype.element_ty != DOT:
        # By a power of two into the range of float16: the largest becomes 1 to 2.
        amax = tl.cast(0.0, tl.float32)
        for i in tl.static_range(PARTS):
            amax = tl.maximum(amax, tl.max(tl.abs(parts[i].to(tl.float32))))
        exponent = amax.to(tl.int32, bitcast=True) & 0x7F800000
        factor = exponent.to(tl.float32, bitcast=True)
        inverse = tl.maximum(0x7F000000 - exponent, 0x00800000).to(tl.float32, bitcast=True)
        scaled = ()
        for i in tl.static_range(PARTS):
            scaled = scaled + ((parts[i].to(tl.float32) * inverse).to(DOT),)  # type: ignore[assignment]  # noqa: RUF005
        return scaled, factor
    else:
        return parts, factor


@triton.jit
def _no_rows(G_PAD: tl.constexpr, W_PAD: tl.constexpr, PARTS: tl.constexpr):
    """The sum over no rows: each query's output in parts, peak and total."""
    acc = ()
    for _ in tl.static_range(PARTS):
        acc = acc + (tl.zeros([G_PAD, W_PAD], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return acc, tl.full([G_PAD], EMPTY_PEAK, tl.float32), tl.zeros([G_PAD], tl.float32)


@triton.jit
def _merge_sums(peak, acc, total, peak_next, acc_next, total_next):
    """Two sums over different rows as one; outputs are in parts."""
    peak, weight, weight_next = weights_of(peak, peak_next)
    merged = ()
    for i in tl.static_range(len(acc)):
        part = merge(acc[i], weight[:, None], acc_next[i], weight_next[:, None])
        merged = merged + (part,)  # type: ignore[assignment]  # noqa: RUF005
    return peak, merged, merge(total, weight, total_next, weight_next)


@triton.jit
def _dot(a, b, acc, TRANSPOSED: tl.constexpr):
    """acc + a @ b. TRANSPOSED: as b.T @ a.T, in which `a` has 8 rows of a tensor core's tile instead of 16."""
    if TRANSPOSED:
        return tl.trans(tl.dot(tl.trans(b), tl.trans(a), tl.trans(acc), input_precision="ieee"))
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _scores(q, k, TILE: tl.constexpr, DOT: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr):
    """[G_PAD, TILE]: the parts of the queries against a tile of K, before any scale."""
    parts = parts_of(k, DOT, KIND, PACKED)
    scores = tl.zeros([q[0].shape[0], TILE], tl.float32)
    for i in tl.static_range(len(parts)):
        scores = _dot(q[i], tl.trans(parts[i]), scores, KIND != "")
    return scores


@triton.jit
def _add_outputs(acc, weight, weights, v, DOT: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr):
    """[G_PAD, W_PAD] for each part: `acc` times `weight`, and the weighted rows of a tile of V."""
    parts = parts_of(v, DOT, KIND, PACKED)
    weights = weights.to(DOT)
    outputs = ()
    for i in tl.static_range(len(parts)):
        part = _dot(weights, parts[i], acc[i] * weight[:, None], KIND != "")
        outputs = outputs + (part,)  # type: ignore[assignment]  # noqa: RUF005
    return outputs


@triton.jit(do_not_specialize=["num_sequences", "num_queries", "num_slots", "num_rows", "max_chunks", "max_apart", "window"])
def attend_tiles(
    p_q, p_k, p_v, p_k_scale, p_v_scale, p_tables, p_lengths, p_slots, p_limits, p_query_starts, p_firsts, p_out, p_lse,
    p_workspace,
    scale_log2, softcap, window, num_sequences, num_queries, num_slots, num_rows, max_chunks, max_apart,
    stride_qb, stride_qh, stride_ob, stride_oh, stride_table,
    stride_ks, stride_kt, stride_kk, stride_vs, stride_vt, stride_vk, stride_kss, stride_kst, stride_vss, stride_vst,
    stride_scale,
    K: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, B_PAD: tl.constexpr,
    TILE: tl.constexpr, CHUNK_TILES: tl.constexpr, SHORT_TILES: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr,
    QMAX: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr, PACKED: tl.constexpr, PAIRED: tl.constexpr,
    QUERY_WITH_TILES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, SETTLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """First launch. Program (split, kv head): the tiles of that split, its partials into the workspace.

    Neighbouring programs take the kv heads of the same rows, which are neighbours in memory. One loop goes over all tiles of
    the split, across sequences. So the loads of the next tile, of the next sequence's bounds and of its query are always under
    way.
    """
    if PDL and not SETTLED:
        gdc_wait()
    PARTS: tl.constexpr = 1 if KIND == "" else (4 if KIND == "int4" else 2)
    H: tl.constexpr = K * G
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    DOT: tl.constexpr = tl.float16 if PACKED else DTYPE
    i_kv = tl.program_id(0) % K
    split = tl.program_id(0) // K
    num_splits = tl.num_programs(0) // K
    i_b = tl.arange(0, B_PAD)
    batch = (p_lengths, p_slots, p_limits, p_query_starts, p_firsts, num_queries, num_slots, num_rows, window)
    slots, starts, ends = span(i_b, i_b < num_sequences, batch)
    nums_tiles = tl.cdiv(ends - starts, TILE)
    tile_ends = tl.cumsum(nums_tiles, 0)
    num_tiles = tl.sum(nums_tiles, 0)
    split_size = split_tiles_of(num_tiles, num_splits)
    split_start, split_end = split_begins(
        tl.minimum(split * split_size, num_tiles), tl.minimum((split + 1) * split_size, num_tiles), tile_ends, SHORT_TILES
    )

    i_g = tl.arange(0, G_PAD)
    i_w = tl.arange(0, W_PAD)
    i_t = tl.arange(0, TILE)
    i_h = tl.cast(i_kv, tl.int64) * G + i_g
    m_gw = (i_g < G)[:, None] & (i_w < W)[None, :]
    num_chunks = tl.cast(num_sequences, tl.int64) * max_chunks
    num_partials = num_chunks + num_splits * max_apart
    p_peaks = p_workspace + num_partials * (H * W * PARTS)
    p_totals = p_peaks + num_partials * H
    # State of the sequence that the loop is at.
    b, sequence_start, sequence_end, slot, start, end = sequence_of(
        split_start, tile_ends, nums_tiles, slots, starts, ends, TILE
    )
    bits = leaf_bits_of(sequence_end - sequence_start, SHORT_TILES)
    chunk_size = chunk_tiles_of(sequence_end - sequence_start, max_chunks, CHUNK_TILES)
    i_q = tl.load(p_query_starts + b, cache_modifier=".cg") if p_query_starts is not None else b
    # State of sequence b + 1, and the slot of b + 2, since a limit is a slot's: loaded at least a tile before they are needed.
    next_slot = tl.load(p_slots + b + 1, mask=b + 1 < num_sequences, other=-1, cache_modifier=".cg")
    later_slot = tl.load(p_slots + b + 2, mask=b + 2 < num_sequences, other=-1, cache_modifier=".cg")
    length, limit, first, query, next_query = span_inputs(b + 1, b + 1 < num_sequences, next_slot, batch)
    if PDL:
        # Only now, if the numbers of the batch are settled: q and the last rows are what the kernel before writes.
        gdc_wait()
        gdc_launch_dependents()

    if SCALE == "token":
        p_k_scale += i_kv * stride_scale
        p_v_scale += i_kv * stride_scale
    if SCALE == "head":
        scale_log2 *= tl.load(p_k_scale + i_kv)
    if not QUERY_WITH_TILES:
        # A split without tiles has no sequence either.
        m_query = (i_g < tl.where(split_start < split_end, G, 0))[:, None] & (i_w < W)[None, :]
        q, q_factor = _load_query(p_q, i_q, stride_qb, stride_qh, i_h, i_w, m_query, W, PARTS, KIND, DOT)
    acc, peak, total = _no_rows(G_PAD, W_PAD, PARTS)
    leaf, leaf_peak, leaf_total = acc, peak, total
    for i_tile in range(split_start, split_end):
        if i_tile >= sequence_end:
            b += 1
            i_q = query if p_query_starts is not None else b
            sequence_start = sequence_end
            slot = next_slot.to(tl.int64)
            next_slot = later_slot
            start, end = span_of(slot, length, limit, first, query, next_query, batch)
            if end <= start:
                # The sequence has no rows: on to the next that has some.
                b, sequence_start, sequence_end, slot, start, end = sequence_at(i_tile, tile_ends, batch, TILE)
                next_slot = tl.load(p_slots + b + 1, mask=b + 1 < num_sequences, other=-1)
                i_q = tl.load(p_query_starts + b) if p_query_starts is not None else b
            sequence_end = sequence_start + tl.cdiv(end - start, TILE)
            bits = leaf_bits_of(sequence_end - sequence_start, SHORT_TILES)
            chunk_size = chunk_tiles_of(sequence_end - sequence_start, max_chunks, CHUNK_TILES)
        # With every tile: the sequence may have no other, and a load under a condition would be waited for at its end.
        length, limit, first, query, next_query = span_inputs(b + 1, b + 1 < num_sequences, next_slot, batch)
        later_slot = tl.load(p_slots + b + 2, mask=b + 2 < num_sequences, other=-1)
        row = start + (i_tile - sequence_start) * TILE
        skip = tl.maximum(row + TILE - end, 0)
        if TMA and BLOCK > 0:
            m_t = i_t < TILE - skip
        else:
            # The last tile is moved back to end with the sequence: what it shares with the one before is masked.
            row -= skip
            m_t = i_t >= skip

        if QUERY_WITH_TILES:
            # Under way with the tile. The rows from G on are of the next kv head, or zeros, and of no consequence.
            q, q_factor = (p_q.load([tl.cast(i_q, tl.int32), i_kv * G, 0]).reshape(G_PAD, W_PAD),), 1.0
        elif i_tile == sequence_start:
            # Apart from the look-up above: that one is needed for the loads to come, and so is done long before.
            q, q_factor = _load_query(p_q, i_q, stride_qb, stride_qh, i_h, i_w, m_gw, W, PARTS, KIND, DOT)
        i_s = slot if BLOCK == 0 else blocks_of(p_tables + slot * stride_table, row, m_t, TILE, BLOCK, TMA)
        row_in = row if BLOCK == 0 else row % BLOCK
        if TMA:
            k = p_k.load([i_s.to(tl.int32), row_in, i_kv, 0]).reshape(TILE, W_PAD)
        else:
            p_rows = row_pointers(p_k + tl.cast(i_kv, tl.int64) * stride_kk, i_s, row, stride_ks, stride_kt, TILE, BLOCK)
            k = load_tile(p_rows, m_t, W, W_PAD)
        scores = _scores(q, k, TILE, DOT, KIND, PACKED)
        if SCALE == "token":
            p_scales = row_pointers(p_k_scale, i_s, row, stride_kss, stride_kst, TILE, BLOCK)
            if PAIRED:
                # One load for both, which is wide enough to be under way with the tile.
                pairs = tl.load(p_scales.to(tl.pointer_type(tl.uint32)), mask=m_t, other=0)
                k_scales = (pairs & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
                v_scales = (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            else:
                k_scales = tl.load(p_scales, mask=m_t, other=0.0).to(tl.float32)
                p_scales = row_pointers(p_v_scale, i_s, row, stride_vss, stride_vst, TILE, BLOCK)
                v_scales = tl.load(p_scales, mask=m_t, other=0.0).to(tl.float32)
            scores *= (k_scales * (scale_log2 * q_factor))[None, :]
        else:
            scores *= scale_log2 * q_factor
        if HAS_SOFTCAP:
            # The launcher folded 2 / softcap into scale_log2 and log2(e) into softcap: tanh(x) = 1 - 2 / (exp(2 x) + 1).
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        scores = tl.where(m_t[None, :], scores, float("-inf"))
        new_peak = tl.maximum(leaf_peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        leaf_weight = tl.exp2(leaf_peak - new_peak)
        leaf_total = tl.fma(leaf_total, leaf_weight, tl.sum(weights, 1))
        leaf_peak = new_peak
        if SCALE == "token":
            # A scale is a row's largest value over QMAX; by the value itself the weights stay in the range of float16.
            if DOT != DTYPE:
                v_scales = tl.minimum(v_scales, 65504.0 / QMAX)  # larger values, which only a wider type has, saturate
            weights *= (v_scales * QMAX)[None, :]
        if TMA:
            v = p_v.load([i_s.to(tl.int32), row_in, i_kv, 0]).reshape(TILE, W_PAD)
            if BLOCK > 0 and (KIND == "" or KIND == "fp8"):
                v = tl.where(m_t[:, None], v, 0)  # what is behind the sequence may be NaN, and 0 * NaN is
        else:
            p_rows = row_pointers(p_v + tl.cast(i_kv, tl.int64) * stride_vk, i_s, row, stride_vs, stride_vt, TILE, BLOCK)
            v = load_tile(p_rows, m_t, W, W_PAD)
        leaf = _add_outputs(leaf, leaf_weight, weights, v, DOT, KIND, PACKED)

        tile = i_tile - sequence_start
        if (i_tile + 1 == sequence_end) | (((tile + 1) >> bits) << bits == tile + 1):
            peak, acc, total = _merge_sums(peak, acc, total, leaf_peak, leaf, leaf_total)
            leaf, leaf_peak, leaf_total = _no_rows(G_PAD, W_PAD, PARTS)

            chunk = tile // chunk_size
            is_apart = sequence_start + chunk * chunk_size < split_start
            chunk_end = tl.minimum(sequence_start + (chunk + 1) * chunk_size, tl.minimum(sequence_end, split_end))
            if is_apart | (i_tile + 1 == chunk_end):
                if (not is_apart) & (i_tile + 1 == sequence_end) & (chunk == 0):
                    # The split has the whole sequence: there is nothing to merge.
                    p_row = output_row(p_out, b, p_query_starts, stride_ob)
                    p_row += (i_h * stride_oh)[:, None]
                    divisor = divisor_of(total, i_kv, p_v_scale, QMAX, SCALE)[:, None]
                    for i in tl.static_range(PARTS):
                        tl.store(p_row + element_of(i_w, i, W, KIND)[None, :], (acc[i] / divisor).to(DTYPE), mask=m_gw)
                    if p_lse is not None:
                        tl.store(p_lse + tl.cast(b, tl.int64) * H + i_h, peak + tl.log2(total), mask=i_g < G)
                else:
                    i_partial = tl.cast(b, tl.int64) * max_chunks + chunk
                    if is_apart:
                        i_partial = num_chunks + split * max_apart + ((i_tile - split_start) >> bits)
                    i_partial = i_partial * H + i_h
                    p_acc = p_workspace + (i_partial * (W * PARTS))[:, None]
                    for i in tl.static_range(PARTS):
                        tl.store(p_acc + element_of(i_w, i, W, KIND)[None, :], acc[i], mask=m_gw)
                    tl.store(p_peaks + i_partial, peak, mask=i_g < G)
                    tl.store(p_totals + i_partial, total, mask=i_g < G)
                acc, peak, total = _no_rows(G_PAD, W_PAD, PARTS)


@triton.jit
def _load_partial(p_workspace, p_peaks, p_totals, i_partial, m_partial, i_d, D: tl.constexpr):
    """Partials of one query head, one for each of `i_partial`; of no rows where the mask is off."""
    mask = m_partial[:, None] & (i_d < D)[None, :]
    acc = tl.load(p_workspace + (i_partial * D)[:, None] + i_d[None, :], mask=mask, other=0.0)
    peak = tl.load(p_peaks + i_partial, mask=m_partial, other=EMPTY_PEAK)
    return acc, peak, tl.load(p_totals + i_partial, mask=m_partial, other=0.0)


@triton.jit
def _load_chunk(
    p_workspace, p_peaks, p_totals, i_chunk, m_chunk, chunks_before, tiles_before, max_apart,
    sequence_start, num_tiles, chunk_size, split_size, bits, h, i_d, H: tl.constexpr, D: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Chunks that may span several splits: the first split's partial, merged with the leaves that later ones kept apart."""
    chunk_starts = sequence_start + i_chunk * chunk_size
    chunk_ends = tl.minimum(chunk_starts + chunk_size, sequence_start + num_tiles)
    # The split with the chunk's first leaf has its head; the leaves from the next split's begin on are apart.
    splits = (tl.minimum(chunk_starts + (1 << bits), chunk_ends) - 1) // split_size + 1
    apart = sequence_start + (((splits * split_size - sequence_start) >> bits) << bits)
    nums_apart = tl.where(m_chunk & (splits * split_size < chunk_ends), ((chunk_ends - apart - 1) >> bits) + 1, 0)
    acc, peak, total = _load_partial(p_workspace, p_peaks, p_totals, (chunks_before + i_chunk) * H + h, m_chunk, i_d, D)
    for first in range(0, tl.max(nums_apart, 0), UNROLL):
        # All loads of a step are under way before the first is used.
        parts = ()
        for i_unrolled in tl.static_range(UNROLL):
            i_apart = first + i_unrolled
            leaves = apart + (i_apart << bits)
            # A split numbers the leaves that it keeps apart from its begin.
            splits = (tl.minimum(leaves + (1 << bits), chunk_ends) - 1) // split_size
            begins = sequence_start + (((splits * split_size - sequence_start) >> bits) << bits)
            i_partial = (tiles_before + splits * max_apart + ((leaves - begins) >> bits)) * H + h
            part = _load_partial(p_workspace, p_peaks, p_totals, i_partial, i_apart < nums_apart, i_d, D)
            parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005 (Triton knows no starred tuples)
        for i_unrolled in tl.static_range(UNROLL):
            acc_next, peak_next, total_next = parts[i_unrolled]  # type: ignore[var-annotated]
            peak, merged, total = _merge_sums(peak, (acc,), total, peak_next, (acc_next,), total_next)
            acc = merged[0]
    return acc, peak, total


@triton.jit(do_not_specialize=[
    "num_sequences", "num_queries", "num_slots", "num_rows", "num_splits", "max_chunks", "max_apart", "window",
])  # fmt: skip
def merge_partials(
    p_out, p_lse, p_lengths, p_slots, p_limits, p_query_starts, p_firsts, p_v_scale, p_workspace,
    window, num_sequences, num_queries, num_slots, num_rows, num_splits, max_chunks, max_apart, stride_ob, stride_oh,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, B_PAD: tl.constexpr,
    TILE: tl.constexpr, CHUNK_TILES: tl.constexpr, SHORT_TILES: tl.constexpr,
    STEP: tl.constexpr, UNROLL: tl.constexpr, QMAX: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Second launch. Program (j, h): one query head of the sequences j, j + num_programs, ... of those that are to be merged.

    Leaves of a chunk are merged in the order of their tiles, then the chunks. There is no program for each sequence: where
    sequences are short nearly none is to be merged, and finding that out costs as much as a hundred rows.
    """
    h = tl.program_id(1)
    i_b = tl.arange(0, B_PAD)
    batch = (p_lengths, p_slots, p_limits, p_query_starts, p_firsts, num_queries, num_slots, num_rows, window)
    _, starts, ends = span(i_b, i_b < num_sequences, batch)
    nums_tiles = tl.cdiv(ends - starts, TILE)
    tile_ends = tl.cumsum(nums_tiles, 0)
    split_size = split_tiles_of(tl.sum(nums_tiles, 0), num_splits)
    # The first launch wrote the output of sequences of one chunk, whose first leaf and last tile lie in one split.
    last_tiles = tile_ends - nums_tiles + tl.minimum(1 << leaf_bits_of(nums_tiles, SHORT_TILES), nums_tiles) - 1
    is_one_chunk = (nums_tiles > 0) & (nums_tiles <= chunk_tiles_of(nums_tiles, max_chunks, CHUNK_TILES))
    is_written = is_one_chunk & (last_tiles // split_size == (tile_ends - 1) // split_size)
    m_merged = (i_b < num_sequences) & (is_written == 0)
    if p_query_starts is not None:
        queries = tl.load(p_query_starts + i_b, mask=m_merged, other=0, cache_modifier=".cg")
        next_queries = tl.load(p_query_starts + i_b + 1, mask=m_merged, other=0, cache_modifier=".cg")
        m_merged = m_merged & is_single(queries, next_queries, num_queries)
    ranks = tl.cumsum(m_merged.to(tl.int32), 0)
    num_merged = tl.sum(m_merged.to(tl.int32), 0)
    if PDL:
        # Before any return: what comes next may wait for this launch alone.
        gdc_wait()
        gdc_launch_dependents()
    num_entries = tl.cast(num_sequences, tl.int64) * max_chunks + num_splits * max_apart
    p_peaks = p_workspace + num_entries * (H * D)
    p_totals = p_peaks + num_entries * H
    i_d = tl.arange(0, D_PAD)
    tiles_before = tl.cast(num_sequences, tl.int64) * max_chunks

    for i_merged in range(tl.program_id(0), num_merged, tl.num_programs(0)):
        b = tl.sum((ranks <= i_merged).to(tl.int32), 0)
        sequence_start = tl.sum(tl.where(i_b < b, nums_tiles, 0), 0)
        num_tiles = tl.sum(tl.where(i_b == b, nums_tiles, 0), 0)
        chunk_size = chunk_tiles_of(num_tiles, max_chunks, CHUNK_TILES)
        chunks_before = tl.cast(b, tl.int64) * max_chunks
        num_chunks = tl.cdiv(num_tiles, chunk_size)
        bits = leaf_bits_of(num_tiles, SHORT_TILES)
        out = tl.zeros([D_PAD], tl.float32)
        out_peak = EMPTY_PEAK
        out_total = 0.0
        for first in range(0, num_chunks, STEP):
            i_chunk = first + tl.arange(0, STEP)
            m_chunk = i_chunk < num_chunks
            acc, peak, total = _load_chunk(
                p_workspace, p_peaks, p_totals, i_chunk, m_chunk, chunks_before, tiles_before, max_apart,
                sequence_start, num_tiles, chunk_size, split_size, bits, h, i_d, H, D, UNROLL,
            )  # fmt: skip
            new_peak = tl.maximum(out_peak, tl.max(peak, 0))
            weights = tl.exp2(peak - new_peak)
            rescale = tl.exp2(out_peak - new_peak)
            out = out * rescale + tl.sum(acc * weights[:, None], 0)
            out_total = out_total * rescale + tl.sum(total * weights, 0)
            out_peak = new_peak
        p_row = output_row(p_out, b, p_query_starts, stride_ob) + tl.cast(h, tl.int64) * stride_oh + i_d
        out /= tl.where(num_tiles > 0, divisor_of(out_total, h // G, p_v_scale, QMAX, SCALE), 1.0)
        tl.store(p_row, out.to(p_out.dtype.element_ty), mask=i_d < D)
        if p_lse is not None:
            lse = out_peak + tl.log2(tl.where(num_tiles > 0, out_total, 1.0))
            tl.store(p_lse + tl.cast(b, tl.int64) * H + h, tl.where(num_tiles > 0, lse, float("-inf")))


def workspace_elements(q_BHD: torch.Tensor, k: torch.Tensor, *, tables_SC: torch.Tensor | None = None) -> int:
    """float32 elements of the workspace of `decode` for tensors like these, whatever the lengths.

    k: the views of all slots, or with `tables_SC` of all blocks, on the device that they will be used on.
    """
    num_sequences, num_heads, head_dim = q_BHD.shape
    cut = tiling(num_heads, k.shape[2], head_dim, q_BHD.element_size(), k.shape[3] * k.element_size())
    num_rows = k.shape[1] if tables_SC is None else tables_SC.shape[1] * k.shape[1]
    splits = resident_splits(q_BHD.device, k.shape[2], cut.programs_per_sm)
    return Workspace.of(cut, splits, num_sequences, num_heads, head_dim, num_rows).elements


def decode(
    q_BHD: torch.Tensor,
    k_STKW: torch.Tensor,
    v_STKW: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    *,
    tables_SC: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    limit_S: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    settled: bool = False,
) -> torch.Tensor:
    """Attend from one new query of each sequence to the rows of its slot. Returns [B, H, D] of q's dtype (`out` if given).

    Sequence b attends to the rows [max(0, lengths_B[b] - window), lengths_B[b]) of slot slots_B[b]. The length counts the new
    token's own row, appended before. No other row is loaded, nor any at or past limit_S[slot] or T. A length of 0, or a slot
    outside [0, S), gives zeros. The output of a sequence that has passed its limit is to be dropped.

    With `tables_SC` K and V are blocks [P, U, K, W]: row t of slot s is at [tables_SC[s, t // U], t % U], and T is C * U. The
    bits are those of slots. Table entries of rows that are not read are never loaded. Where U is a multiple of 128, whole tiles
    of a block are loaded by TMA, and rows that are not the sequence's are masked: its last tile then rounds otherwise.

    - q_BHD: fp16, bf16 or fp32.
    - k_STKW, v_STKW: views of all slots as `cache.k(layer)` gives them, of q's dtype, or quantised (see quantise.py).
    - k_scale, v_scale: of quantised K and V: float16 [S, T, K] (over blocks [P, U, K]), or for fp8 also float32 [K].
    - lengths_B, slots_B: int32 or int64 on the device. limit_S: int32, one a slot. tables_SC: int32, rows contiguous.
    - scale: 1 / sqrt(D) if None. softcap: scores become softcap * tanh(score / softcap).
    - workspace: float32, at least `workspace_elements(...)`, not shared by launches that may overlap. If None it comes from
      torch's allocator, which is right under graph capture as well.
    - settled: at least one kernel or copy without programmatic dependent launch lies between this call and what wrote lengths,
      slots and limits. They are then looked up while the kernel launched just before, such as `append`, still runs.

    Cost: two launches, no synchronisation; safe while a graph is captured, and the graph serves every length.
    Raises: ValueError naming the argument.
    """
    device = q_BHD.device
    checks.runnable("q_BHD", device)
    memory = kv_memory(k_STKW, v_STKW, k_scale, v_scale, tables_SC, q_BHD.dtype, device)
    options = checks.attention_options(scale, window, softcap, memory.head_dim)
    memory.check_queries("q_BHD", q_BHD, "sequences")
    num_sequences = q_BHD.shape[0]
    memory.check_sequences("q_BHD", num_sequences, lengths_B, slots_B, limit_S)
    out = checks.output(out, q_BHD.shape, q_BHD.dtype, device)
    if num_sequences > 0:
        rows = memory, lengths_B, slots_B, None, limit_S
        attend_singles(q_BHD, *rows, options, out, workspace, settled=settled)
    return out


def attend_singles(
    q_NHD: torch.Tensor,
    memory: LayerKV,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    query_starts: torch.Tensor | None,
    limit_S: torch.Tensor | None,
    options: checks.AttentionOptions,
    out_NHD: torch.Tensor,
    workspace: torch.Tensor | None,
    firsts_B: torch.Tensor | None = None,
    lse_BH: torch.Tensor | None = None,
    *,
    settled: bool = False,
) -> None:
    """Launch both kernels with checked arguments. With `query_starts` (B + 1), for the sequences of one query in `q_NHD`.

    With `firsts_B` sequence b skips the rows before firsts_B[b], clamped to [0, length]. Up to a tile of them may be touched:
    they must be mapped and finite, payloads of fp8 as well. `lse_BH` (a row for each sequence, not for each query) receives
    log2(sum(exp(score))) over the scaled and capped scores, -inf where there are no rows. By it the output merges with that of
    other rows.
    """
    device, num_heads, head_dim = q_NHD.device, q_NHD.shape[1], memory.head_dim
    num_sequences, num_kv_heads, num_rows, block = lengths_B.shape[0], memory.num_kv_heads, memory.num_rows, memory.block
    memory.check_heads("q_BHD", num_heads)
    cut = tiling(num_heads, num_kv_heads, head_dim, q_NHD.element_size(), memory.payload_bytes)
    memory.check_tile_offsets(cut.tile_rows)
    splits = resident_splits(device, num_kv_heads, cut.programs_per_sm)
    # Rows before a window may be unmapped, and the last tile is moved back: a window narrower than a tile is read by pointers.
    # Tiles that are to lie in one block each begin at row 0.
    begins_at_0 = firsts_B is None and options.rows_seen == checks.NO_WINDOW
    may_tma = begins_at_0 if block else options.rows_seen >= cut.tile_rows
    by_tma = may_tma and memory.fits_tma(cut.tile_rows)
    k, v, strides = memory.k, memory.v, memory.strides
    if memory.kind is not None:
        # Two bytes each: a GPU transposes 16 bits on their way to tensor cores, but not 8.
        k, v = in_pairs(k), in_pairs(v)
        strides = (*k.stride()[:3], *v.stride()[:3], *strides[6:])
    launches = launches_of(
        cut, splits, num_sequences, num_heads, num_kv_heads, head_dim, k.shape[3], num_rows, block, memory.kind,
        memory.scale, memory.has_paired_scales, q_NHD.dtype == torch.float32, by_tma, checks.launches_dependents(device),
        options.softcap_log2 > 0.0, settled,
    )  # fmt: skip
    q, space = q_NHD, launches.space
    workspace = checks.workspace(workspace, space.elements, device)
    with checks.on_device(device):
        attend_tiles[launches.tiles_grid](
            q if launches.query_box is None else descriptor(q, q.shape, q.stride(), launches.query_box),
            descriptor(k, k.shape, k.stride(), launches.rows_box) if by_tma else k,
            descriptor(v, v.shape, v.stride(), launches.rows_box) if by_tma else v,
            memory.k_scale, memory.v_scale, memory.tables_SC,
            lengths_B, slots_B, limit_S, query_starts, firsts_B, out_NHD, lse_BH, workspace,
            options.scale_log2, options.softcap_log2, options.rows_seen, num_sequences, q.shape[0],
            memory.num_slots, num_rows, space.max_chunks, space.max_apart,
            q.stride(0), q.stride(1), out_NHD.stride(0), out_NHD.stride(1), memory.stride_table, *strides,
            **launches.tiles,
        )  # fmt: skip
        merge_partials[launches.merge_grid](
            out_NHD, lse_BH, lengths_B, slots_B, limit_S, query_starts, firsts_B, memory.v_scale, workspace,
            options.rows_seen, num_sequences, q.shape[0], memory.num_slots, num_rows, splits,
            space.max_chunks, space.max_apart, out_NHD.stride(0), out_NHD.stride(1), **launches.merge,
        )  # fmt: skip
