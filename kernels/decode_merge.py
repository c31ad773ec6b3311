"""Decode's second launch: the partials of each sequence, merged in their order. See decode.py and lanes.py.

Legend: H query heads, K kv heads, G = H / K, D head dim. Prefixes: p_ pointer, i_ index, m_ mask.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv.kernels.lanes import (
    EMPTY_PEAK,
    chunk_tiles_of,
    divisor_of,
    is_single,
    lane_tiles_of,
    leaf_bits_of,
    merge,
    output_row,
    span,
    weights_of,
)


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
    sequence_start, num_tiles, chunk_size, lane_size, bits, h, i_d, H: tl.constexpr, D: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Chunks of which several lanes may have a part: the first one's partial, merged with the leaves kept apart."""
    chunk_starts = sequence_start + i_chunk * chunk_size
    chunk_ends = tl.minimum(chunk_starts + chunk_size, sequence_start + num_tiles)
    # The lane with the chunk's first leaf has its head; the leaves from the next lane's begin on are apart.
    lanes = (tl.minimum(chunk_starts + (1 << bits), chunk_ends) - 1) // lane_size + 1
    apart = sequence_start + (((lanes * lane_size - sequence_start) >> bits) << bits)
    nums_apart = tl.where(m_chunk & (lanes * lane_size < chunk_ends), ((chunk_ends - apart - 1) >> bits) + 1, 0)
    acc, peak, total = _load_partial(p_workspace, p_peaks, p_totals, (chunks_before + i_chunk) * H + h, m_chunk, i_d, D)
    for first in range(0, tl.max(nums_apart, 0), UNROLL):
        # All loads of a step are under way before the first is used.
        parts = ()
        for i_unrolled in tl.static_range(UNROLL):
            i_apart = first + i_unrolled
            leaves = apart + (i_apart << bits)
            # A lane numbers the leaves that it keeps apart from its begin.
            lanes = (tl.minimum(leaves + (1 << bits), chunk_ends) - 1) // lane_size
            begins = sequence_start + (((lanes * lane_size - sequence_start) >> bits) << bits)
            i_partial = (tiles_before + lanes * max_apart + ((leaves - begins) >> bits)) * H + h
            part = _load_partial(p_workspace, p_peaks, p_totals, i_partial, i_apart < nums_apart, i_d, D)
            parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005 (Triton knows no starred tuples)
        for i_unrolled in tl.static_range(UNROLL):
            acc_next, peak_next, total_next = parts[i_unrolled]  # type: ignore[var-annotated]
            peak, weight, weight_next = weights_of(peak, peak_next)
            acc = merge(acc, weight[:, None], acc_next, weight_next[:, None])
            total = merge(total, weight, total_next, weight_next)
    return acc, peak, total


@triton.jit(
    do_not_specialize=[
        "num_sequences",
        "num_queries",
        "num_slots",
        "num_rows",
        "num_lanes",
        "max_chunks",
        "max_apart",
        "window",
    ]
)
def merge_partials(
    p_out, p_lse, p_lengths, p_slots, p_limits, p_query_starts, p_firsts, p_v_scale, p_workspace,
    window, num_sequences, num_queries, num_slots, num_rows, num_lanes, max_chunks, max_apart, stride_ob, stride_oh,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, B_PAD: tl.constexpr,
    TILE: tl.constexpr, CHUNK_TILES: tl.constexpr, SHORT_TILES: tl.constexpr,
    STEP: tl.constexpr, UNROLL: tl.constexpr, QMAX: tl.constexpr, SCALE: tl.constexpr,
    HAS_LIMIT: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_FIRSTS: tl.constexpr, HAS_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (j, h): one query head of the sequences j, j + num_programs, ... of those that are to be merged.

    Those of a chunk in the order of its tiles, then the chunks. Where sequences are short nearly none is to be merged, and
    programs that only find that out would take as long as some hundred rows.
    """
    h = tl.program_id(1)
    i_b = tl.arange(0, B_PAD)
    _, starts, ends = span(
        i_b, i_b < num_sequences, p_lengths, p_slots, p_limits, p_query_starts, p_firsts, num_queries, num_slots, num_rows,
        window, HAS_LIMIT, HAS_STARTS, HAS_FIRSTS,
    )  # fmt: skip
    nums_tiles = tl.cdiv(ends - starts, TILE)
    tile_ends = tl.cumsum(nums_tiles, 0)
    lane_size = lane_tiles_of(tl.sum(nums_tiles, 0), num_lanes)
    # The first launch wrote the output of who has one chunk, whose first leaf and last tile one lane has.
    last_tiles = tile_ends - nums_tiles + tl.minimum(1 << leaf_bits_of(nums_tiles, SHORT_TILES), nums_tiles) - 1
    is_one_chunk = (nums_tiles > 0) & (nums_tiles <= chunk_tiles_of(nums_tiles, max_chunks, CHUNK_TILES))
    is_written = is_one_chunk & (last_tiles // lane_size == (tile_ends - 1) // lane_size)
    m_merged = (i_b < num_sequences) & (is_written == 0)
    if HAS_STARTS:
        queries = tl.load(p_query_starts + i_b, mask=m_merged, other=0)
        next_queries = tl.load(p_query_starts + i_b + 1, mask=m_merged, other=0)
        m_merged = m_merged & is_single(queries, next_queries, num_queries)
    ranks = tl.cumsum(m_merged.to(tl.int32), 0)
    num_merged = tl.sum(m_merged.to(tl.int32), 0)
    if PDL:
        # Before any return: what comes next may wait for this launch alone.
        gdc_wait()
        gdc_launch_dependents()
    num_entries = tl.cast(num_sequences, tl.int64) * max_chunks + num_lanes * max_apart
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
                sequence_start, num_tiles, chunk_size, lane_size, bits, h, i_d, H, D, UNROLL,
            )  # fmt: skip
            new_peak = tl.maximum(out_peak, tl.max(peak, 0))
            weights = tl.exp2(peak - new_peak)
            rescale = tl.exp2(out_peak - new_peak)
            out = out * rescale + tl.sum(acc * weights[:, None], 0)
            out_total = out_total * rescale + tl.sum(total * weights, 0)
            out_peak = new_peak
        p_row = output_row(p_out, b, p_query_starts, stride_ob, HAS_STARTS) + tl.cast(h, tl.int64) * stride_oh + i_d
        out /= tl.where(num_tiles > 0, divisor_of(out_total, h // G, p_v_scale, QMAX, SCALE), 1.0)
        tl.store(p_row, out.to(p_out.dtype.element_ty), mask=i_d < D)
        if HAS_LSE:
            lse = out_peak + tl.log2(tl.where(num_tiles > 0, out_total, 1.0))
            tl.store(p_lse + tl.cast(b, tl.int64) * H + h, tl.where(num_tiles > 0, lse, float("-inf")))
