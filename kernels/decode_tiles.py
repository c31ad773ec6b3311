"""Decode's first launch: the tiles of all sequences, summed up lane by lane, into partials. See decode.py and lanes.py.

Legend: H query heads, K kv heads, G = H / K, W payload width. Prefixes: p_ pointer, i_ index, m_ mask. Logarithms are to
base 2 throughout: log2(e) is folded into the scale.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv.kernels.lanes import (
    EMPTY_PEAK,
    chunk_tiles_of,
    divisor_of,
    lane_begins,
    lane_tiles_of,
    leaf_bits_of,
    merge,
    output_row,
    sequence_at,
    sequence_of,
    span,
    span_inputs,
    span_of,
    weights_of,
)
from vmmkv.kernels.tiles import blocks_of, dequantise, dequantise_nibbles, load_tile, row_pointers, unpack, unpack_nibbles


@triton.jit
def _load_query(p_q, i_q, stride_qb, stride_qh, i_h, i_w, m_gw, W: tl.constexpr, HALVES: tl.constexpr):
    """[G_PAD, W_PAD] twice: the queries of one kv head; in int4 the two halves of the head, else the same."""
    p_query = p_q + tl.cast(i_q, tl.int64) * stride_qb + (i_h * stride_qh)[:, None] + i_w[None, :]
    q = tl.load(p_query, mask=m_gw, other=0.0)
    if HALVES == 2:
        return q, tl.load(p_query + W, mask=m_gw, other=0.0)
    else:
        return q, q


@triton.jit
def _scores(q, q_high, k, scale_log2, KIND: tl.constexpr, PACKED: tl.constexpr):
    """[G_PAD, TILE]: the queries against a tile of K, whose payload is dequantised to their type."""
    if KIND == "int4":
        if PACKED:
            k_low, k_high = unpack_nibbles(k, q.dtype, False)
        else:
            k_low, k_high = dequantise_nibbles(k, q.dtype)
        scores = tl.dot(q, tl.trans(k_low), input_precision="ieee")
        return tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee") * scale_log2
    else:
        k = unpack(k, q.dtype, KIND, False) if PACKED else dequantise(k, q.dtype, KIND)
        return tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2


@triton.jit
def _outputs(weights, v, DTYPE: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr):
    """[G_PAD, W_PAD] twice: the weighted rows of a tile of V; in int4 the two halves of the head, else the same."""
    if KIND == "int4":
        if PACKED:
            v_low, v_high = unpack_nibbles(v, DTYPE, True)
        else:
            v_low, v_high = dequantise_nibbles(v, DTYPE)
        weights = weights.to(DTYPE)
        return tl.dot(weights, v_low, input_precision="ieee"), tl.dot(weights, v_high, input_precision="ieee")
    else:
        v = unpack(v, DTYPE, KIND, True) if PACKED else dequantise(v, DTYPE, KIND)
        acc = tl.dot(weights.to(DTYPE), v, input_precision="ieee")
        return acc, acc


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
    HAS_LIMIT: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_FIRSTS: tl.constexpr, HAS_LSE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (lane, kv head): the tiles of that lane, its partials into the workspace.

    Neighbouring programs take the kv heads of the same rows, which are neighbours in memory. One loop goes over all tiles
    of the lane, whosever they are, so that the loads of the next ones are always under way, those of the next sequence's
    bounds and query with them.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    HALVES: tl.constexpr = 2 if KIND == "int4" else 1
    H: tl.constexpr = K * G
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    i_kv = tl.program_id(0) % K
    lane = tl.program_id(0) // K
    num_lanes = tl.num_programs(0) // K
    i_b = tl.arange(0, B_PAD)
    slots, starts, ends = span(
        i_b, i_b < num_sequences, p_lengths, p_slots, p_limits, p_query_starts, p_firsts, num_queries, num_slots, num_rows,
        window, HAS_LIMIT, HAS_STARTS, HAS_FIRSTS,
    )  # fmt: skip
    nums_tiles = tl.cdiv(ends - starts, TILE)
    tile_ends = tl.cumsum(nums_tiles, 0)
    num_tiles = tl.sum(nums_tiles, 0)
    lane_size = lane_tiles_of(num_tiles, num_lanes)
    lane_start, lane_end = lane_begins(
        tl.minimum(lane * lane_size, num_tiles), tl.minimum((lane + 1) * lane_size, num_tiles), tile_ends, SHORT_TILES
    )

    i_g = tl.arange(0, G_PAD)
    i_w = tl.arange(0, W_PAD)
    i_t = tl.arange(0, TILE)
    i_h = tl.cast(i_kv, tl.int64) * G + i_g
    m_gw = (i_g < G)[:, None] & (i_w < W)[None, :]
    num_chunks = tl.cast(num_sequences, tl.int64) * max_chunks
    num_partials = num_chunks + num_lanes * max_apart
    p_peaks = p_workspace + num_partials * (H * W * HALVES)
    p_totals = p_peaks + num_partials * H
    # Of the sequence that the loop is at.
    b, sequence_start, sequence_end, slot, start, end = sequence_of(
        lane_start, tile_ends, nums_tiles, slots, starts, ends, TILE
    )
    bits = leaf_bits_of(sequence_end - sequence_start, SHORT_TILES)
    chunk_size = chunk_tiles_of(sequence_end - sequence_start, max_chunks, CHUNK_TILES)
    if SCALE == "token":
        p_k_scale += i_kv * stride_scale
        p_v_scale += i_kv * stride_scale
    if SCALE == "head":
        scale_log2 *= tl.load(p_k_scale + i_kv)

    i_q = tl.load(p_query_starts + b) if HAS_STARTS else b
    if not QUERY_WITH_TILES:
        # A lane without tiles has no sequence either.
        m_query = (i_g < tl.where(lane_start < lane_end, G, 0))[:, None] & (i_w < W)[None, :]
        q, q_high = _load_query(p_q, i_q, stride_qb, stride_qh, i_h, i_w, m_query, W, HALVES)
    # Of sequence b + 1, and the slot of b + 2, since a limit is a slot's: loaded at least a tile before they are needed.
    next_slot = tl.load(p_slots + b + 1, mask=b + 1 < num_sequences, other=-1)
    later_slot = tl.load(p_slots + b + 2, mask=b + 2 < num_sequences, other=-1)
    length, limit, first, query, next_query = span_inputs(
        b + 1, b + 1 < num_sequences, next_slot, p_lengths, p_limits, p_query_starts, p_firsts, num_slots,
        HAS_LIMIT, HAS_STARTS, HAS_FIRSTS,
    )  # fmt: skip
    acc = tl.zeros([G_PAD, W_PAD], tl.float32)
    acc_high = acc
    peak = tl.full([G_PAD], EMPTY_PEAK, tl.float32)
    total = tl.zeros([G_PAD], tl.float32)
    leaf, leaf_high, leaf_peak, leaf_total = acc, acc, peak, total
    for i_tile in range(lane_start, lane_end):
        if i_tile >= sequence_end:
            b += 1
            i_q = query if HAS_STARTS else b
            sequence_start = sequence_end
            slot = next_slot.to(tl.int64)
            next_slot = later_slot
            start, end = span_of(
                slot, length, limit, first, query, next_query, num_queries, num_slots, num_rows, window,
                HAS_LIMIT, HAS_STARTS, HAS_FIRSTS,
            )  # fmt: skip
            if end <= start:
                # It has no rows: on to the next that has some.
                b, sequence_start, sequence_end, slot, start, end = sequence_at(
                    i_tile, tile_ends, p_lengths, p_slots, p_limits, p_query_starts, p_firsts, num_queries, num_slots,
                    num_rows, window, TILE, HAS_LIMIT, HAS_STARTS, HAS_FIRSTS,
                )  # fmt: skip
                next_slot = tl.load(p_slots + b + 1, mask=b + 1 < num_sequences, other=-1)
                i_q = tl.load(p_query_starts + b) if HAS_STARTS else b
            sequence_end = sequence_start + tl.cdiv(end - start, TILE)
            bits = leaf_bits_of(sequence_end - sequence_start, SHORT_TILES)
            chunk_size = chunk_tiles_of(sequence_end - sequence_start, max_chunks, CHUNK_TILES)
        # With every tile: the sequence may have no other, and a load under a condition would be waited for at its end.
        length, limit, first, query, next_query = span_inputs(
            b + 1, b + 1 < num_sequences, next_slot, p_lengths, p_limits, p_query_starts, p_firsts, num_slots,
            HAS_LIMIT, HAS_STARTS, HAS_FIRSTS,
        )  # fmt: skip
        later_slot = tl.load(p_slots + b + 2, mask=b + 2 < num_sequences, other=-1)
        # The last tile is moved back to end with the sequence: what it shares with the one before is masked.
        row = start + (i_tile - sequence_start) * TILE
        skip = tl.maximum(row + TILE - end, 0)
        row -= skip
        m_t = i_t >= skip

        if QUERY_WITH_TILES:
            # Under way with the tile. The rows from G on are of the next kv head, or zeros, and of no consequence.
            q = p_q.load([tl.cast(i_q, tl.int32), i_kv * G, 0]).reshape(G_PAD, W_PAD)
            q_high = q
        elif i_tile == sequence_start:
            # Apart from the look-up above, which is needed for the loads to come and so is done long before.
            q, q_high = _load_query(p_q, i_q, stride_qb, stride_qh, i_h, i_w, m_gw, W, HALVES)
        i_s = slot if BLOCK == 0 else blocks_of(p_tables + slot * stride_table, row, m_t, TILE, BLOCK)
        if TMA:
            k = p_k.load([slot.to(tl.int32), row, i_kv, 0]).reshape(TILE, W_PAD)
        else:
            p_rows = row_pointers(p_k + tl.cast(i_kv, tl.int64) * stride_kk, i_s, row, stride_ks, stride_kt, TILE, BLOCK)
            k = load_tile(p_rows, m_t, W, W_PAD)
        scores = _scores(q, q_high, k, scale_log2, KIND, PACKED)
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
            scores *= k_scales[None, :]
        if HAS_SOFTCAP:
            # The launcher folded 2 / softcap into scale_log2 and log2(e) into softcap: tanh(x) = 1 - 2 / (exp(2 x) + 1).
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        scores = tl.where(m_t[None, :], scores, float("-inf"))
        tile_peak = tl.maximum(tl.max(scores, 1), EMPTY_PEAK)
        weights = tl.exp2(scores - tile_peak[:, None])
        tile_total = tl.sum(weights, 1)
        if SCALE == "token":
            # A scale is a row's largest value over QMAX; by the value itself the weights stay in the range of float16.
            weights *= v_scales[None, :] * QMAX
        if TMA:
            v = p_v.load([slot.to(tl.int32), row, i_kv, 0]).reshape(TILE, W_PAD)
        else:
            p_rows = row_pointers(p_v + tl.cast(i_kv, tl.int64) * stride_vk, i_s, row, stride_vs, stride_vt, TILE, BLOCK)
            v = load_tile(p_rows, m_t, W, W_PAD)
        tile_acc, tile_high = _outputs(weights, v, DTYPE, KIND, PACKED)

        leaf_peak, weight, tile_weight = weights_of(leaf_peak, tile_peak)
        leaf = merge(leaf, weight[:, None], tile_acc, tile_weight[:, None])
        if HALVES == 2:
            leaf_high = merge(leaf_high, weight[:, None], tile_high, tile_weight[:, None])
        leaf_total = merge(leaf_total, weight, tile_total, tile_weight)

        tile = i_tile - sequence_start
        if (i_tile + 1 == sequence_end) | (((tile + 1) >> bits) << bits == tile + 1):
            peak, weight, leaf_weight = weights_of(peak, leaf_peak)
            acc = merge(acc, weight[:, None], leaf, leaf_weight[:, None])
            if HALVES == 2:
                acc_high = merge(acc_high, weight[:, None], leaf_high, leaf_weight[:, None])
            total = merge(total, weight, leaf_total, leaf_weight)
            leaf = tl.zeros([G_PAD, W_PAD], tl.float32)
            leaf_high = leaf
            leaf_peak = tl.full([G_PAD], EMPTY_PEAK, tl.float32)
            leaf_total = tl.zeros([G_PAD], tl.float32)

            chunk = tile // chunk_size
            is_apart = sequence_start + chunk * chunk_size < lane_start
            chunk_end = tl.minimum(sequence_start + (chunk + 1) * chunk_size, tl.minimum(sequence_end, lane_end))
            if is_apart | (i_tile + 1 == chunk_end):
                if (not is_apart) & (i_tile + 1 == sequence_end) & (chunk == 0):
                    # The lane has all of the sequence: there is nothing to merge.
                    p_row = output_row(p_out, b, p_query_starts, stride_ob, HAS_STARTS)
                    p_row += (i_h * stride_oh)[:, None] + i_w[None, :]
                    divisor = divisor_of(total, i_kv, p_v_scale, QMAX, SCALE)[:, None]
                    tl.store(p_row, (acc / divisor).to(DTYPE), mask=m_gw)
                    if HALVES == 2:
                        tl.store(p_row + W, (acc_high / divisor).to(DTYPE), mask=m_gw)
                    if HAS_LSE:
                        tl.store(p_lse + tl.cast(b, tl.int64) * H + i_h, peak + tl.log2(total), mask=i_g < G)
                else:
                    i_partial = tl.cast(b, tl.int64) * max_chunks + chunk
                    if is_apart:
                        i_partial = num_chunks + lane * max_apart + ((i_tile - lane_start) >> bits)
                    i_partial = i_partial * H + i_h
                    p_acc = p_workspace + (i_partial * (W * HALVES))[:, None] + i_w[None, :]
                    tl.store(p_acc, acc, mask=m_gw)
                    if HALVES == 2:
                        tl.store(p_acc + W, acc_high, mask=m_gw)
                    tl.store(p_peaks + i_partial, peak, mask=i_g < G)
                    tl.store(p_totals + i_partial, total, mask=i_g < G)
                acc = tl.zeros([G_PAD, W_PAD], tl.float32)
                acc_high = acc
                peak = tl.full([G_PAD], EMPTY_PEAK, tl.float32)
                total = tl.zeros([G_PAD], tl.float32)
