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
def span_inputs(
    i_b, m_b, slot, p_lengths, p_limits, p_query_starts, p_firsts, num_slots,
    HAS_LIMIT: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_FIRSTS: tl.constexpr,
):  # fmt: skip
    """What `span_of` needs of sequence `i_b` in this slot: loads alone, which nobody waits for until it is called."""
    length = tl.load(p_lengths + i_b, mask=m_b, other=0)
    limit, first, query, next_query = 0, 0, 0, 0
    if HAS_LIMIT:
        limit = tl.load(p_limits + slot, mask=m_b & (slot >= 0) & (slot < num_slots), other=0)
    if HAS_FIRSTS:
        first = tl.load(p_firsts + i_b, mask=m_b, other=0)
    if HAS_STARTS:
        query = tl.load(p_query_starts + i_b, mask=m_b, other=0)
        next_query = tl.load(p_query_starts + i_b + 1, mask=m_b, other=0)
    return length, limit, first, query, next_query


@triton.jit
def span_of(
    slot, length, limit, first, query, next_query, num_queries, num_slots, num_rows, window,
    HAS_LIMIT: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_FIRSTS: tl.constexpr,
):  # fmt: skip
    """First row and end row that a sequence attends to; an empty span where nothing may be read."""
    length = tl.maximum(length, 0)
    m_slot = (slot >= 0) & (slot < num_slots)
    if HAS_STARTS:
        m_slot = m_slot & is_single(query, next_query, num_queries)
    end = tl.where(m_slot, tl.minimum(length, num_rows), 0)
    if HAS_LIMIT:
        end = tl.minimum(end, limit)
    start = tl.maximum(length - window, 0)
    # Rows before a window may not be mapped, and the last tile is moved back: a shortened window has none.
    end = tl.where((start > 0) & (end < length), 0, end)
    if HAS_FIRSTS:
        # Rows before this one are the sequence's own, and may be touched like those of the tile before.
        start = tl.maximum(start, tl.minimum(first, length))
    return start.to(tl.int32), tl.maximum(end, start).to(tl.int32)


@triton.jit
def span(
    i_b, m_b, p_lengths, p_slots, p_limits, p_query_starts, p_firsts, num_queries, num_slots, num_rows, window,
    HAS_LIMIT: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_FIRSTS: tl.constexpr,
):  # fmt: skip
    """Slot, first row and end row of sequence `i_b`."""
    slot = tl.load(p_slots + i_b, mask=m_b, other=-1).to(tl.int64)
    length, limit, first, query, next_query = span_inputs(
        i_b, m_b, slot, p_lengths, p_limits, p_query_starts, p_firsts, num_slots, HAS_LIMIT, HAS_STARTS, HAS_FIRSTS
    )
    start, end = span_of(
        slot, length, limit, first, query, next_query, num_queries, num_slots, num_rows, window,
        HAS_LIMIT, HAS_STARTS, HAS_FIRSTS,
    )  # fmt: skip
    return slot, start, end


@triton.jit
def is_single(query, next_query, num_queries):
    """Has the sequence whose queries these bound exactly one in this call, one that there is?"""
    return (next_query - query == 1) & (query >= 0) & (query < num_queries)


@triton.jit
def chunk_tiles_of(num_tiles, max_chunks, CHUNK_TILES: tl.constexpr):
    """Tiles of each chunk (the last may have fewer) of a sequence of so many tiles; see Tiling."""
    return CHUNK_TILES * tl.maximum(tl.cdiv(num_tiles, CHUNK_TILES * max_chunks), 1)


@triton.jit
def leaf_bits_of(num_tiles, SHORT_TILES: tl.constexpr):
    """A leaf has 2 to the power of this tiles: one in sequences of up to SHORT_TILES, two up to twice as many, then four."""
    return (num_tiles > SHORT_TILES).to(tl.int32) + (num_tiles > 2 * SHORT_TILES).to(tl.int32)


@triton.jit
def _bounds(a, b, c, d, a_more, b_more, c_more, d_more):
    return tl.maximum(a, a_more), tl.minimum(b, b_more), tl.maximum(c, c_more), tl.minimum(d, d_more)


@triton.jit
def lane_begins(i_tile, i_next, tile_ends, SHORT_TILES: tl.constexpr):
    """The tiles at which two lanes begin whose shares begin at `i_tile` and `i_next`: a leaf is whose who has its last tile."""
    before, before_next = tile_ends <= i_tile, tile_ends <= i_next
    start, end, start_next, end_next = tl.reduce(
        (
            tl.where(before, tile_ends, 0), tl.where(before, 2147483647, tile_ends),
            tl.where(before_next, tile_ends, 0), tl.where(before_next, 2147483647, tile_ends),
        ), 0, _bounds,
    )  # fmt: skip
    bits, bits_next = leaf_bits_of(end - start, SHORT_TILES), leaf_bits_of(end_next - start_next, SHORT_TILES)
    return start + (((i_tile - start) >> bits) << bits), start_next + (((i_next - start_next) >> bits_next) << bits_next)


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
def _sums(a, b, c, d, e, a_more, b_more, c_more, d_more, e_more):
    return a + a_more, b + b_more, c + c_more, d + d_more, e + e_more


@triton.jit
def sequence_of(i_tile, tile_ends, nums_tiles, slots, starts, ends, TILE: tl.constexpr):
    """Of the sequence that has this tile: its index, where its tiles start and end, its slot and its rows.

    Past the last tile it is sequence 0, of no rows. One reduction for all, and no load: it is before the first rows.
    """
    tile_starts = tile_ends - nums_tiles
    m_one = (tile_starts <= i_tile) & (i_tile < tile_ends)
    i_b = tl.arange(0, tile_ends.shape[0])
    b, sequence_start, slot, start, end = tl.reduce(
        (
            tl.where(m_one, i_b, 0), tl.where(m_one, tile_starts, 0), tl.where(m_one, slots, 0),
            tl.where(m_one, starts, 0), tl.where(m_one, ends, 0),
        ), 0, _sums,
    )  # fmt: skip
    return b, sequence_start, sequence_start + tl.cdiv(end - start, TILE), slot, start, end


@triton.jit
def sequence_at(
    i_tile, tile_ends, p_lengths, p_slots, p_limits, p_query_starts, p_firsts, num_queries, num_slots, num_rows, window,
    TILE: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_FIRSTS: tl.constexpr,
):  # fmt: skip
    """`sequence_of` by loads, which holds no span of every sequence in registers."""
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
