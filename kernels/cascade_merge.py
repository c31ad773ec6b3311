"""Cascade's last launch: the parts of a prefix merged with what a sequence attends to alone. See cascade.py.

Legend: B sequences, H query heads, D head dim. Prefixes: p_ pointer, i_ index, m_ mask. Logarithms are to base 2.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv.kernels.cascade_groups import first_part, later_part, only, problems, share_of
from vmmkv.kernels.lanes import EMPTY_PEAK


@triton.jit(do_not_specialize=["num_groups", "num_sequences", "num_slots", "num_rows", "num_lanes"])
def merge_groups(
    p_out, p_lse, p_parts, p_part_lse, p_group_starts, p_leaders, p_prefix_rows, p_limits, p_lengths, p_slots,
    num_groups, num_sequences, num_slots, num_rows, num_lanes, stride_ob, stride_oh,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr, GROUPS_PAD: tl.constexpr,
    SHARERS: tl.constexpr, TILE: tl.constexpr, LEAST_TILES: tl.constexpr, UNROLL: tl.constexpr,
    HAS_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, run of HEADS heads): what `decode` left in the output, then the parts in the order of their tiles."""
    b = tl.program_id(0)
    starts, ends, _, _, nums_steps, nums_tiles = problems(
        p_group_starts, p_leaders, p_prefix_rows, p_limits, num_groups, num_sequences, num_slots, num_rows,
        GROUPS_PAD, SHARERS, TILE, HAS_LIMIT,
    )  # fmt: skip
    share = share_of(tl.sum(nums_tiles, 0), num_lanes, LEAST_TILES)
    m_one = (starts <= b) & (b < ends)
    num_steps = only(nums_steps, m_one)
    i_sequence = b - only(starts, m_one)
    problem_start = only(tl.cumsum(nums_tiles, 0) - nums_tiles, m_one) + i_sequence // SHARERS * num_steps
    first_lane = problem_start // share
    num_parts = tl.cdiv(problem_start + num_steps, share) - first_lane
    slot = tl.load(p_slots + b)
    is_idle = (slot < 0) | (slot >= num_slots) | (tl.load(p_lengths + b) <= 0)
    if PDL:
        # Before any return: what comes next may wait for this launch alone.
        gdc_wait()
        gdc_launch_dependents()
    if is_idle | (num_steps == 0):
        return

    i_h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i_d = tl.arange(0, D_PAD)
    m_h = i_h < H
    m_hd = m_h[:, None] & (i_d < D)[None, :]
    p_row = p_out + tl.cast(b, tl.int64) * stride_ob + (i_h * stride_oh)[:, None] + i_d[None, :]
    out = tl.load(p_row, mask=m_hd, other=0.0).to(tl.float32)
    lse = tl.load(p_lse + tl.cast(b, tl.int64) * H + i_h, mask=m_h, other=0.0)
    # A sequence may have no row of its own.
    peak = tl.maximum(lse, EMPTY_PEAK)
    total = tl.exp2(lse - peak)
    for first in range(0, num_parts, UNROLL):
        # All loads of a step are under way before the first is used.
        parts = ()
        for i_unrolled in tl.static_range(UNROLL):
            i_part = first + i_unrolled
            later = later_part(first_lane + i_part, i_sequence % SHARERS, num_sequences, H, SHARERS)
            i_row = tl.where(i_part == 0, first_part(b, H), later) + i_h
            m_part = i_h < tl.where(i_part < num_parts, H, 0)
            part = tl.load(p_parts + (i_row * D)[:, None] + i_d[None, :], mask=m_part[:, None] & (i_d < D)[None, :], other=0.0)
            part_lse = tl.load(p_part_lse + i_row, mask=m_part, other=float("-inf"))
            parts = parts + ((part, part_lse),)  # type: ignore[assignment]  # noqa: RUF005 (Triton knows no starred tuples)
        for i_unrolled in tl.static_range(UNROLL):
            part, part_lse = parts[i_unrolled]
            new_peak = tl.maximum(peak, part_lse)
            rescale = tl.exp2(peak - new_peak)
            weight = tl.exp2(part_lse - new_peak)
            out = out * rescale[:, None] + part * weight[:, None]
            total = total * rescale + weight
            peak = new_peak
    tl.store(p_row, (out / total[:, None]).to(p_out.dtype.element_ty), mask=m_hd)
