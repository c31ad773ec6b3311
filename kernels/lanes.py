"""Who sums up what in decode: tiles in leaves, leaves in chunks, all of a batch in lanes. For use inside kernels.

    rows of a sequence   start                                                                                end
    tiles                |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |  8  |  9  | 10  | 11  | 12  | 13  |14|
    leaves               |           0           |           1           |           2           |     3     ...|
    chunks               |                       0                       |                       1           ...|
    lanes                ... of the batch: 7 -->         |               8                 |       9 -->      ...

A *leaf* is summed up by one lane, tile after tile: a lane's share is a number of tiles, and a leaf is whose who has its last
one. A *chunk* is merged leaf after leaf: the lane that has its first leaf merges what follows as far as it goes; a lane
that begins inside a chunk keeps that chunk's leaves apart. Where leaves and chunks begin, and in which order they are
merged, follows from the sequence's own length; where lanes begin changes who does it, and no bit of what comes out.

Prefixes: p_ pointer, i_ index, m_ mask.
"""

import triton
import triton.language as tl

MAX_LEAF_BITS = 2
"""A leaf has at most 2 to the power of this tiles."""
EMPTY_PEAK = tl.constexpr(-1e30)
"""The peak of no scores: finite, so that merging nothing with nothing gives no NaN."""


@triton.jit
def span(
    i_b, m_b, p_lengths, p_slots, p_limits, p_query_starts, p_firsts, num_queries, num_slots, num_rows, window,
    HAS_LIMIT: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_FIRSTS: tl.constexpr,
):  # fmt: skip
    """Slot, first row and end row that sequence `i_b` attends to; an empty span where nothing may be read."""
    slot = tl.load(p_slots + i_b, mask=m_b, other=-1).to(tl.int64)
    length = tl.maximum(tl.load(p_lengths + i_b, mask=m_b, other=0), 0)
    m_slot = (slot >= 0) & (slot < num_slots)
    if HAS_STARTS:
        m_slot = m_slot & is_single(i_b, m_b, p_query_starts, num_queries)
    end = tl.where(m_slot, tl.minimum(length, num_rows), 0)
    if HAS_LIMIT:
        end = tl.minimum(end, tl.load(p_limits + slot, mask=m_slot, other=0))
    start = tl.maximum(length - window, 0)
    # Rows before a window may not be mapped, and the last tile is moved back: a shortened window has none.
    end = tl.where((start > 0) & (end < length), 0, end)
    if HAS_FIRSTS:
        # Rows before this one are the sequence's own, and may be touched like those of the tile before.
        start = tl.maximum(start, tl.minimum(tl.load(p_firsts + i_b, mask=m_b, other=0), length))
    return slot, start.to(tl.int32), tl.maximum(end, start).to(tl.int32)


@triton.jit
def is_single(i_b, m_b, p_query_starts, num_queries):
    """Has the sequence exactly one query in this call, one that there is?"""
    first = tl.load(p_query_starts + i_b, mask=m_b, other=0)
    count = tl.load(p_query_starts + i_b + 1, mask=m_b, other=0) - first
    return (count == 1) & (first >= 0) & (first < num_queries)


@triton.jit
def chunk_tiles_of(num_tiles, max_chunks, CHUNK_TILES: tl.constexpr):
    """Tiles of each chunk (the last may have fewer) of a sequence of so many tiles; see Tiling."""
    return CHUNK_TILES * tl.maximum(tl.cdiv(num_tiles, CHUNK_TILES * max_chunks), 1)


@triton.jit
def leaf_bits_of(num_tiles, SHORT_TILES: tl.constexpr):
    """A leaf has 2 to the power of this tiles: one in sequences of up to SHORT_TILES, two up to twice as many, then four."""
    return (num_tiles > SHORT_TILES).to(tl.int32) + (num_tiles > 2 * SHORT_TILES).to(tl.int32)


@triton.jit
def lane_begin(i_tile, tile_ends, SHORT_TILES: tl.constexpr):
    """The tile at which the lane begins whose share begins at `i_tile`: a leaf is whose who has its last tile."""
    before = tile_ends <= i_tile
    sequence_start = tl.max(tl.where(before, tile_ends, 0), 0)
    sequence_end = tl.min(tl.where(before, 2147483647, tile_ends), 0)
    bits = leaf_bits_of(sequence_end - sequence_start, SHORT_TILES)
    return sequence_start + (((i_tile - sequence_start) >> bits) << bits)


@triton.jit
def lane_tiles_of(num_tiles, num_lanes):
    """Tiles of each lane (the last ones may have fewer) of a batch of so many tiles."""
    return tl.maximum(tl.cdiv(num_tiles, num_lanes), 1)


@triton.jit
def weights_of(peak, peak_next):
    """The peak of two sums together, and what each of them weighs then."""
    new_peak = tl.maximum(peak, peak_next)
    return new_peak, tl.exp2(peak - new_peak), tl.exp2(peak_next - new_peak)


@triton.jit
def merge(x, weight, x_next, weight_next):
    """Two sums over different rows as one. Spelt out to the last operation, since two kernels must round alike."""
    return tl.fma(x, weight, x_next * weight_next)


@triton.jit
def sequence_at(
    i_tile, tile_ends, p_lengths, p_slots, p_limits, p_query_starts, p_firsts, num_queries, num_slots, num_rows, window,
    TILE: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_FIRSTS: tl.constexpr,
):  # fmt: skip
    """Of the sequence that has this tile: its index, where its tiles start and end, and its span of rows.

    Past the last tile it is a sequence of no rows.
    """
    before = tile_ends <= i_tile
    b = tl.sum(before.to(tl.int32), 0)
    sequence_start = tl.max(tl.where(before, tile_ends, 0), 0)
    is_one = b < before.shape[0]
    slot, start, end = span(
        b, is_one, p_lengths, p_slots, p_limits, p_query_starts, p_firsts, num_queries, num_slots, num_rows, window,
        HAS_LIMIT, HAS_STARTS, HAS_FIRSTS,
    )  # fmt: skip
    return b, sequence_start, sequence_start + tl.cdiv(end - start, TILE), slot, start, end


@triton.jit
def output_row(p_out, b, p_query_starts, stride_ob, HAS_STARTS: tl.constexpr):
    """Where the sequence's output starts."""
    if HAS_STARTS:
        return p_out + tl.load(p_query_starts + b).to(tl.int64) * stride_ob
    else:
        return p_out + tl.cast(b, tl.int64) * stride_ob


@triton.jit
def divisor_of(total, i_kv, p_v_scale, QMAX: tl.constexpr, SCALE: tl.constexpr):
    """What the merged output is to be divided by: the total of the weights, and what V's scales leave to be undone."""
    if SCALE == "token":
        return total * QMAX
    elif SCALE == "head":
        return total / tl.load(p_v_scale + i_kv)
    else:
        return total
