"""Cascade's first launch: every prefix once, for all the queries that share it, in parts. See cascade.py and cascade_groups.py.

Legend: H query heads, K kv heads, G = H / K, D head dim. Prefixes: p_ pointer, i_ index, m_ mask. Logarithms are to base 2
throughout: log2(e) is folded into the scale.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv.kernels.cascade_groups import first_part, later_part, only, problems, share_of
from vmmkv.kernels.lanes import EMPTY_PEAK
from vmmkv.kernels.tiles import blocks_of, load_tile, row_pointers


@triton.jit
def _load(
    p, i_s, row, i_kv, skip, stride_s, stride_t,
    TILE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[TILE, D_PAD]: the rows from `row` on of one kv head of a slot, of which the first `skip` are to be masked.

    i_s: the slot; over blocks the block of each row.
    """
    if TMA:
        return p.load([i_s.to(tl.int32), i_kv, row, 0]).reshape(TILE, D_PAD)
    else:
        p_rows = row_pointers(p, i_s, row, stride_s, stride_t, TILE, BLOCK)
        return load_tile(p_rows, tl.arange(0, TILE) >= skip, D, D_PAD)


@triton.jit(do_not_specialize=["num_groups", "num_sequences", "num_slots", "num_rows"])
def attend_groups(
    p_q, p_k, p_v, p_tables, p_group_starts, p_leaders, p_prefix_rows, p_limits, p_parts, p_part_lse,
    scale_log2, softcap, num_groups, num_sequences, num_slots, num_rows,
    stride_qb, stride_qh, stride_table, stride_ks, stride_kt, stride_kk, stride_vs, stride_vt, stride_vk,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, GROUPS_PAD: tl.constexpr,
    QUERIES: tl.constexpr, SHARERS: tl.constexpr, TILE: tl.constexpr, LEAST_TILES: tl.constexpr, STAGES: tl.constexpr,
    BLOCK: tl.constexpr, TMA: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (lane, kv head): the tiles of that lane, a part of every problem that it comes by.

    Neighbouring programs take the kv heads of the same rows, which are neighbours in memory; and where a few problems share a
    prefix, the lanes are as far into it as one another, and read it from memory once.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    H: tl.constexpr = K * G
    i_kv = tl.program_id(0) % K
    lane = tl.program_id(0) // K
    starts, ends, leaders, prefixes, nums_steps, nums_tiles = problems(
        p_group_starts, p_leaders, p_prefix_rows, p_limits, num_groups, num_sequences, num_slots, num_rows,
        GROUPS_PAD, SHARERS, TILE, HAS_LIMIT,
    )  # fmt: skip
    tile_ends = tl.cumsum(nums_tiles, 0)
    num_tiles = tl.sum(nums_tiles, 0)
    share = share_of(num_tiles, tl.num_programs(0) // K, LEAST_TILES)
    i_tile = lane * share
    lane_end = tl.minimum(i_tile + share, num_tiles)

    i_group = tl.arange(0, GROUPS_PAD)
    i_query = tl.arange(0, QUERIES)
    i_sharer = i_query // G
    i_d = tl.arange(0, D_PAD)
    i_t = tl.arange(0, TILE)
    i_h = i_kv * G + i_query % G
    factor = 1.0 if HAS_SOFTCAP else scale_log2
    if not TMA:
        p_k += tl.cast(i_kv, tl.int64) * stride_kk
        p_v += tl.cast(i_kv, tl.int64) * stride_vk

    while i_tile < lane_end:
        m_one = i_group == tl.sum((tile_ends <= i_tile).to(tl.int32), 0)
        num_steps = only(nums_steps, m_one)
        slot = only(leaders, m_one).to(tl.int64)
        num_prefix = only(prefixes, m_one)
        i_problem = (i_tile - only(tile_ends - nums_tiles, m_one)) // num_steps
        problem_start = only(tile_ends - nums_tiles, m_one) + i_problem * num_steps
        problem_end = tl.minimum(problem_start + num_steps, lane_end)
        b = only(starts, m_one) + i_problem * SHARERS
        num_sharers = tl.minimum(only(ends, m_one) - b, SHARERS)
        m_query = i_sharer < num_sharers
        p_query = p_q + tl.cast(b, tl.int64) * stride_qb + (i_sharer * stride_qb + i_h * stride_qh)[:, None] + i_d[None, :]
        q = tl.load(p_query, mask=m_query[:, None] & (i_d < D)[None, :], other=0.0)

        # The online softmax (Milakov & Gimelshein, 2018), first over the tiles that are whole and need no mask.
        acc = tl.zeros([QUERIES, D_PAD], tl.float32)
        peak = tl.full([QUERIES], EMPTY_PEAK, tl.float32)
        # Each over every eighth row: what a thread holds of a query, so that no other is asked before the end.
        totals = tl.zeros([QUERIES, 8], tl.float32)
        whole_end = tl.minimum(problem_start + num_prefix // TILE, problem_end)
        for part in tl.static_range(2):
            part_begin = i_tile if part == 0 else tl.maximum(whole_end, i_tile)
            part_end = whole_end if part == 0 else problem_end
            for step in tl.range(part_begin - problem_start, part_end - problem_start, num_stages=STAGES if part == 0 else 1):
                # The last tile is moved back to end with the prefix: what it shares with the one before is masked.
                row = step * TILE if part == 0 else num_prefix - TILE
                skip = 0 if part == 0 else (step + 1) * TILE - num_prefix
                i_s = slot if BLOCK == 0 else blocks_of(p_tables + slot * stride_table, row, i_t >= skip, TILE, BLOCK)
                k = _load(p_k, i_s, row, i_kv, skip, stride_ks, stride_kt, TILE, BLOCK, D, D_PAD, TMA)
                scores = tl.dot(q, tl.trans(k), input_precision="ieee")
                if HAS_SOFTCAP:
                    # The launcher folded 2 / softcap into scale_log2, log2(e) into softcap: tanh(x) = 1 - 2 / (exp(2 x) + 1).
                    scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * scale_log2) + 1.0))
                if part == 1:
                    scores = tl.where((i_t >= skip)[None, :], scores, float("-inf"))
                new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
                weights = tl.exp2(scores * factor - new_peak[:, None])
                rescale = tl.exp2(peak - new_peak)
                peak = new_peak
                totals = totals * rescale[:, None] + tl.sum(tl.reshape(weights, [QUERIES, TILE // 8, 8]), 1)
                v = _load(p_v, i_s, row, i_kv, skip, stride_vs, stride_vt, TILE, BLOCK, D, D_PAD, TMA)
                acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision="ieee")

        total = tl.sum(totals, 1)
        if i_tile == problem_start:
            i_part = first_part(b + i_sharer, H) + i_h
        else:
            i_part = later_part(lane, i_sharer, num_sequences, H, SHARERS) + i_h
        p_part = p_parts + (i_part * D)[:, None] + i_d[None, :]
        tl.store(p_part, acc / total[:, None], mask=m_query[:, None] & (i_d < D)[None, :])
        tl.store(p_part_lse + i_part, peak + tl.log2(total), mask=m_query)
        i_tile = problem_end
