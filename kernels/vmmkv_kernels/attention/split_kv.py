"""Split of a batch's rows among the programs of decode, and merging of their sums. For use inside kernels.

    rows of a sequence   start                                                                                end
    tiles                |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |  8  |  9  | 10  | 11  | 12  | 13  |14|
    leaves               |           0           |           1           |           2           |     3     ...|
    chunks               |                       0                       |                       1           ...|
    splits               ... of the batch: 7 -->         |               8                 |       9 -->      ...

- A *tile* is the rows of one step of the loop.
- A *leaf* is 1, 2 or 4 tiles. One split sums it up, tile after tile: the split that has its last tile.
- A *chunk* is a run of leaves that are merged in order. The split that has its first leaf merges what follows, as far as it
  goes. A split that begins inside a chunk keeps the leaves of that chunk apart.
- A *split* is a run of tiles of all sequences, one behind the other; all splits have equally many.

Leaves, chunks and the order of merging follow from the sequence's own length. Where splits begin depends on the batch. It
decides which program does the work, and changes no bit of the result.

Prefixes: p_ pointer, i_ index, m_ mask. `batch` is the tuple (p_lengths, p_slots, p_limits, p_query_starts, p_firsts,
num_queries, num_slots, num_rows, window), whose limits, query starts and first rows may be None.
"""

import functools

import torch
import triton
import triton.language as tl

MAX_LEAF_BITS = 2
"""A leaf has at most 2 to the power of this tiles."""
EMPTY_PEAK = tl.constexpr(-1e30)
"""The peak of no scores: finite, so that merging nothing with nothing gives no NaN."""

_INTERPRETED_SPLITS = 4


@functools.cache
def resident_splits(device: torch.device, num_kv_heads: int, programs_per_sm: int) -> int:
    """Number of splits that are resident together; a split is one program for each kv head."""
    if device.type == "cpu":
        return _INTERPRETED_SPLITS
    resident = torch.cuda.get_device_properties(device).multi_processor_count * programs_per_sm
    return max(1, resident // num_kv_heads)


@triton.jit
def span_inputs(i_b, m_b, slot, batch):
    """The numbers that `span_of` needs of sequence `i_b` in this slot. Loads alone, so that they overlap with other work.

    From L2 (`.cg`), as everything that may be looked up before `gdc_wait`: L1 may still have what an earlier step looked up.
    """
    p_lengths, _, p_limits, p_query_starts, p_firsts, _, num_slots, _, _ = batch
    length = tl.load(p_lengths + i_b, mask=m_b, other=0, cache_modifier=".cg")
    limit, first, query, next_query = 0, 0, 0, 0
    if p_limits is not None:
        limit = tl.load(p_limits + slot, mask=m_b & (slot >= 0) & (slot < num_slots), other=0, cache_modifier=".cg")
    if p_firsts is not None:
        first = tl.load(p_firsts + i_b, mask=m_b, other=0, cache_modifier=".cg")
    if p_query_starts is not None:
        query = tl.load(p_query_starts + i_b, mask=m_b, other=0, cache_modifier=".cg")
        next_query = tl.load(p_query_starts + i_b + 1, mask=m_b, other=0, cache_modifier=".cg")
    return length, limit, first, query, next_query


@triton.jit
def span_of(slot, length, limit, first, query, next_query, batch):
    """First row and end row that a sequence attends to; an empty span where nothing may be read."""
    _, _, p_limits, p_query_starts, p_firsts, num_queries, num_slots, num_rows, window = batch
    length = tl.maximum(length, 0)
    m_slot = (slot >= 0) & (slot < num_slots)
    if p_query_starts is not None:
        m_slot = m_slot & is_single(query, next_query, num_queries)
    end = tl.where(m_slot, tl.minimum(length, num_rows), 0)
    if p_limits is not None:
        end = tl.minimum(end, limit)
    start = tl.maximum(length - window, 0)
    # The last tile is moved back, and rows before a window may be unmapped: a window cut short by a limit has no rows.
    end = tl.where((start > 0) & (end < length), 0, end)
    if p_firsts is not None:
        # Rows before this one are the sequence's own, and may be touched like those of the tile before.
        start = tl.maximum(start, tl.minimum(first, length))
    return start.to(tl.int32), tl.maximum(end, start).to(tl.int32)


@triton.jit
def span(i_b, m_b, batch):
    """Slot, first row and end row of sequence `i_b`."""
    slot = tl.load(batch[1] + i_b, mask=m_b, other=-1, cache_modifier=".cg").to(tl.int64)
    length, limit, first, query, next_query = span_inputs(i_b, m_b, slot, batch)
    start, end = span_of(slot, length, limit, first, query, next_query, batch)
    return slot, start, end


@triton.jit
def is_single(query, next_query, num_queries):
    """Do these bounds give the sequence exactly one query, which exists?"""
    return (next_query - query == 1) & (query >= 0) & (query < num_queries)


@triton.jit
def chunk_tiles_of(num_tiles, max_chunks, CHUNK_TILES: tl.constexpr):
    """Tiles of each chunk of a sequence of `num_tiles` (the last chunk may have fewer); see Tiling."""
    return CHUNK_TILES * tl.maximum(tl.cdiv(num_tiles, CHUNK_TILES * max_chunks), 1)


@triton.jit
def leaf_bits_of(num_tiles, SHORT_TILES: tl.constexpr):
    """Log2 of a leaf's tiles: one in sequences of up to SHORT_TILES, two up to twice as many, then four."""
    return (num_tiles > SHORT_TILES).to(tl.int32) + (num_tiles > 2 * SHORT_TILES).to(tl.int32)


@triton.jit
def _bounds(a, b, c, d, a_more, b_more, c_more, d_more):
    return tl.maximum(a, a_more), tl.minimum(b, b_more), tl.maximum(c, c_more), tl.minimum(d, d_more)


@triton.jit
def split_begins(i_tile, i_next, tile_ends, SHORT_TILES: tl.constexpr):
    """The tiles at which two splits begin whose shares begin at `i_tile` and `i_next`: back to the first tile of the leaf."""
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
def split_tiles_of(num_tiles, num_splits):
    """Tiles of each split of a batch of `num_tiles` (the last splits may have fewer)."""
    return tl.maximum(tl.cdiv(num_tiles, num_splits), 1)


@triton.jit
def weights_of(peak, peak_next):
    """The peak of two sums together, and the weight of each of them under it."""
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
    """Index, first and end tile, slot and rows of the sequence that has this tile.

    Past the last tile it is sequence 0, of no rows. One reduction and no load, since it comes before the first rows.
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
def sequence_at(i_tile, tile_ends, batch, TILE: tl.constexpr):
    """`sequence_of` by loads, which keeps no span of every sequence in registers."""
    before = tile_ends <= i_tile
    b = tl.sum(before.to(tl.int32), 0)
    sequence_start = tl.max(tl.where(before, tile_ends, 0), 0)
    slot, start, end = span(b, b < before.shape[0], batch)
    return b, sequence_start, sequence_start + tl.cdiv(end - start, TILE), slot, start, end


@triton.jit
def output_row(p_out, b, p_query_starts, stride_ob):
    """Pointer to the start of the sequence's output."""
    if p_query_starts is not None:
        return p_out + tl.load(p_query_starts + b).to(tl.int64) * stride_ob
    else:
        return p_out + tl.cast(b, tl.int64) * stride_ob


@triton.jit
def divisor_of(total, i_kv, p_v_scale, QMAX: tl.constexpr, SCALE: tl.constexpr):
    """The divisor of the merged output: the total of the weights, and the part of V's scales that is still to be undone."""
    if SCALE == "token":
        return total * QMAX
    elif SCALE == "head":
        return total / tl.load(p_v_scale + i_kv)
    else:
        return total
