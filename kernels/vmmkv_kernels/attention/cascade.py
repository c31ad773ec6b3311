"""Cascade attention for decode: sequences that share a prefix attend to it once, as rows of one problem.

After Hydragen (Juravsky et al., 2024) and FlashInfer (Ye et al., 2024). The sequences that share a prefix stand side by side in
the batch, as a *group*. The prefix is one range of rows, in the slot of the group's *leader*. Attending to it is a matrix
product with up to 128 queries on one side, spread over the whole device (`attend_groups`). `decode` attends to the rest of each
sequence, from a first row on. Both come with their log-sum-exp, by which `merge_groups` merges them. Groups are read on the
device: one captured graph serves every grouping of a batch.

    groups      |               0               | 1 |         2         | ...
    problems    |     0     |     1     |   2   | 0 |    0    |    1    |        SHARERS sequences each, or what is left
    tiles       |0 1 2 3 4 5|0 1 2 3 4 5|0 1 ...| 0 |0 1 2 3 4|0 1 2 3 4|        of the group's prefix, for each problem again
    splits      |    0    |    1    |    2    |    3    |    4    | ...

A *problem* is a run of a group's sequences whose queries, of one kv head, are the rows of one dot. The tiles of all problems,
one behind the other, are divided into equal *splits*. A *part* is the sum of one split's tiles of one problem. The part that
begins a problem is stored by its sequences. A split has at most one other part, its first, which is stored by the split. So the
merging launch finds parts from the same few numbers.

Legend: B sequences, S slots, T rows of a slot, C columns of a block table, H query heads, K kv heads, D head dim, G groups (and
G1 = G + 1); in kernels also G = H / K. Prefixes: p_ pointer, i_ index, m_ mask. Logarithms are to base 2: log2(e) is folded
into the scale.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv.units import round_up
from vmmkv_kernels import checks
from vmmkv_kernels.attention.decode import attend_singles
from vmmkv_kernels.attention.decode import workspace_elements as decode_elements
from vmmkv_kernels.attention.kv_memory import blocks_of, descriptor, kv_memory, load_tile, row_pointers, values_of
from vmmkv_kernels.attention.split_kv import EMPTY_PEAK, divisor_of, resident_splits
from vmmkv_kernels.quantise import Kind, kind_of

MAX_GROUPS = 4096
"""Most groups of a launch: every program sums up the tiles of all groups in its registers."""

_ALIGNMENT_ELEMENTS = 32
"""Alignment of the parts of a workspace, 128 bytes, in float32 elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeTiling:
    """Tile sizes of a launch. They depend on head counts, head dim and dtype, never on the batch."""

    queries: int = 128
    """Rows of a problem's dot: sequences times query heads of a kv head."""
    tile_rows: int = 64
    """Rows of the prefix in one step of the loop."""
    least_tiles: int = 1
    """Fewest tiles of a split, since each part has to be written and merged."""
    num_warps: int = 8
    num_stages: int = 3
    programs_per_sm: int = 1
    """Programs that are resident together: one that starts late ends late."""
    merged_elements: int = 1024
    """Elements of the output in a program of the last launch."""
    merged_parts: int = 4
    """Parts that the last launch loads together."""


@functools.cache
def cascade_tiling(group: int, head_dim: int, itemsize: int, kind: Kind | None) -> CascadeTiling:
    """The tiling of a shape with `group` query heads a kv head.

    Two groups of four warps multiply 128 queries together. The tile leaves registers for scores, weights and output, and shared
    memory for its stages; quantised tiles, which pass through registers, are as in prefill. float32 is multiplied without
    tensor cores.
    """
    wide = head_dim > 128
    if itemsize == 4:
        return CascadeTiling(queries=max(32, triton.next_power_of_2(group)), tile_rows=16, num_stages=2)
    if kind is not None:
        return CascadeTiling(queries=64 if wide else 128, tile_rows=32 if wide or kind == "int4" else 64, num_stages=2)
    return CascadeTiling(num_stages=2) if wide else CascadeTiling()


@triton.jit
def problems(
    p_group_starts, p_leaders, p_prefix_rows, p_limits, num_groups, num_sequences, num_slots, num_rows,
    GROUPS_PAD: tl.constexpr, SHARERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Columns of each group: first and end sequence, leader, rows of the prefix, their tiles, tiles of all its problems.

    A group without sequences, or whose leader is no slot, has no rows and no tiles. From L2: see `span_inputs`.
    """
    i_group = tl.arange(0, GROUPS_PAD)
    m_group = i_group < num_groups
    starts = tl.load(p_group_starts + i_group, mask=m_group, other=0, cache_modifier=".cg")
    ends = tl.load(p_group_starts + i_group + 1, mask=m_group, other=0, cache_modifier=".cg")
    starts = tl.minimum(tl.maximum(starts, 0), num_sequences)
    ends = tl.maximum(tl.minimum(ends, num_sequences), starts)
    leaders = tl.load(p_leaders + i_group, mask=m_group, other=-1, cache_modifier=".cg")
    m_group = (ends > starts) & (leaders >= 0) & (leaders < num_slots)
    rows = tl.minimum(tl.load(p_prefix_rows + i_group, mask=m_group, other=0, cache_modifier=".cg"), num_rows)
    if p_limits is not None:
        rows = tl.minimum(rows, tl.load(p_limits + leaders, mask=m_group, other=0, cache_modifier=".cg"))
    rows = tl.maximum(rows, 0)
    steps = tl.cdiv(rows, TILE)
    return starts, ends, leaders, rows, steps, tl.cdiv(ends - starts, SHARERS) * steps


@triton.jit
def only(values, m_one):
    """Value at the place where the mask is on; 0 if it is on nowhere."""
    return tl.sum(tl.where(m_one, values, 0), 0)


@triton.jit
def share_of(num_tiles, num_splits, LEAST_TILES: tl.constexpr):
    """Tiles of each split (the last ones may have fewer, or none)."""
    return tl.maximum(tl.cdiv(num_tiles, num_splits), LEAST_TILES)


@triton.jit
def later_part(split, i_sharer, num_sequences, num_heads, SHARERS: tl.constexpr):
    """Index of the first head of the problem's sequence `i_sharer` in the part with which this split continues a problem.

    The parts that begin problems come first, one for each sequence.
    """
    return (tl.cast(split, tl.int64) * SHARERS + i_sharer + num_sequences) * num_heads


@triton.jit
def _load(
    p, i_s, row, i_kv, skip, stride_s, stride_t,
    TILE: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[TILE, W_PAD]: the rows from `row` on of one kv head of a slot, of which the first `skip` are to be masked.

    i_s: the slot; over blocks the block of each row, or with TMA of all.
    """
    if TMA:
        return p.load([i_s.to(tl.int32), i_kv, row if BLOCK == 0 else row % BLOCK, 0]).reshape(TILE, W_PAD)
    else:
        p_rows = row_pointers(p, i_s, row, stride_s, stride_t, TILE, BLOCK)
        return load_tile(p_rows, tl.arange(0, TILE) >= skip, W, W_PAD)


@triton.jit(do_not_specialize=["num_groups", "num_sequences", "num_slots", "num_rows"])
def attend_groups(
    p_q, p_k, p_v, p_k_scale, p_v_scale, p_tables, p_group_starts, p_leaders, p_prefix_rows, p_limits, p_parts, p_part_lse,
    scale_log2, softcap, num_groups, num_sequences, num_slots, num_rows,
    stride_qb, stride_qh, stride_table, stride_ks, stride_kt, stride_kk, stride_vs, stride_vt, stride_vk,
    stride_kss, stride_kst, stride_vss, stride_vst, stride_scale,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
    KIND: tl.constexpr, SCALE: tl.constexpr, QMAX: tl.constexpr, GROUPS_PAD: tl.constexpr,
    QUERIES: tl.constexpr, SHARERS: tl.constexpr, TILE: tl.constexpr, LEAST_TILES: tl.constexpr, STAGES: tl.constexpr,
    BLOCK: tl.constexpr, TMA: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """First launch. Program (split, kv head): the tiles of that split, a part of every problem that it comes by.

    Neighbouring programs take the kv heads of the same rows, which are neighbours in memory. Where a few problems share a
    prefix, their splits are at the same place in it, and read it from memory once.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    H: tl.constexpr = K * G
    MOVES: tl.constexpr = not (TMA and BLOCK > 0)
    i_kv = tl.program_id(0) % K
    split = tl.program_id(0) // K
    starts, ends, leaders, prefixes, nums_steps, nums_tiles = problems(
        p_group_starts, p_leaders, p_prefix_rows, p_limits, num_groups, num_sequences, num_slots, num_rows,
        GROUPS_PAD, SHARERS, TILE,
    )  # fmt: skip
    tile_ends = tl.cumsum(nums_tiles, 0)
    num_tiles = tl.sum(nums_tiles, 0)
    share = share_of(num_tiles, tl.num_programs(0) // K, LEAST_TILES)
    i_tile = split * share
    split_end = tl.minimum(i_tile + share, num_tiles)

    i_group = tl.arange(0, GROUPS_PAD)
    i_query = tl.arange(0, QUERIES)
    i_sharer = i_query // G
    i_pad = tl.arange(0, D_PAD)  # the halves of an int4 head are padded each for itself
    i_d = i_pad // W_PAD * W + i_pad % W_PAD
    m_d = i_pad % W_PAD < W
    i_t = tl.arange(0, TILE)
    i_h = i_kv * G + i_query % G
    if SCALE == "token":
        p_k_scale += i_kv * stride_scale
        p_v_scale += i_kv * stride_scale
    elif SCALE == "head":
        scale_log2 *= tl.load(p_k_scale + i_kv)
    factor = 1.0 if HAS_SOFTCAP else scale_log2
    if not TMA:
        p_k += tl.cast(i_kv, tl.int64) * stride_kk
        p_v += tl.cast(i_kv, tl.int64) * stride_vk

    while i_tile < split_end:
        m_one = i_group == tl.sum((tile_ends <= i_tile).to(tl.int32), 0)
        num_steps = only(nums_steps, m_one)
        slot = only(leaders, m_one).to(tl.int64)
        num_prefix = only(prefixes, m_one)
        i_problem = (i_tile - only(tile_ends - nums_tiles, m_one)) // num_steps
        problem_start = only(tile_ends - nums_tiles, m_one) + i_problem * num_steps
        problem_end = tl.minimum(problem_start + num_steps, split_end)
        b = only(starts, m_one) + i_problem * SHARERS
        num_sharers = tl.minimum(only(ends, m_one) - b, SHARERS)
        m_query = i_sharer < num_sharers
        p_query = p_q + tl.cast(b, tl.int64) * stride_qb + (i_sharer * stride_qb + i_h * stride_qh)[:, None] + i_d[None, :]
        q = tl.load(p_query, mask=m_query[:, None] & m_d[None, :], other=0.0)

        # The online softmax (Milakov & Gimelshein, 2018), first over the tiles that are whole and need no mask.
        acc = tl.zeros([QUERIES, D_PAD], tl.float32)
        peak = tl.full([QUERIES], EMPTY_PEAK, tl.float32)
        # Each over every eighth row: the part of a query that one thread holds, so that threads exchange nothing before the
        # end.
        totals = tl.zeros([QUERIES, 8], tl.float32)
        whole_end = tl.minimum(problem_start + num_prefix // TILE, problem_end)
        for part in tl.static_range(2):
            part_begin = i_tile if part == 0 else tl.maximum(whole_end, i_tile)
            part_end = whole_end if part == 0 else problem_end
            for step in tl.range(part_begin - problem_start, part_end - problem_start, num_stages=STAGES if part == 0 else 1):
                # The last tile is moved back to end with the prefix: what it shares with the one before is masked. In a block
                # it stays, and what is behind the prefix is masked.
                row = num_prefix - TILE if part == 1 and MOVES else step * TILE
                skip = (step + 1) * TILE - num_prefix if part == 1 else 0
                m_t = i_t >= skip if MOVES else i_t < TILE - skip
                i_s = slot if BLOCK == 0 else blocks_of(p_tables + slot * stride_table, row, m_t, TILE, BLOCK, TMA)
                k = _load(p_k, i_s, row, i_kv, skip, stride_ks, stride_kt, TILE, BLOCK, W, W_PAD, TMA)
                scores = tl.dot(q, tl.trans(values_of(k, q.dtype, KIND, TILE, D_PAD)), input_precision="ieee")
                if SCALE == "token":
                    p_scales = row_pointers(p_k_scale, i_s, row, stride_kss, stride_kst, TILE, BLOCK)
                    scores *= tl.load(p_scales, mask=m_t, other=0.0).to(tl.float32)[None, :]
                if HAS_SOFTCAP:
                    # The launcher folded 2 / softcap into scale_log2, log2(e) into softcap: tanh(x) = 1 - 2 / (exp(2 x) + 1).
                    scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * scale_log2) + 1.0))
                if part == 1:
                    scores = tl.where(m_t[None, :], scores, float("-inf"))
                new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
                weights = tl.exp2(scores * factor - new_peak[:, None])
                rescale = tl.exp2(peak - new_peak)
                peak = new_peak
                totals = totals * rescale[:, None] + tl.sum(tl.reshape(weights, [QUERIES, TILE // 8, 8]), 1)
                if SCALE == "token":
                    # Times QMAX, by which the output is divided: float16 then holds a weight times a small scale.
                    p_scales = row_pointers(p_v_scale, i_s, row, stride_vss, stride_vst, TILE, BLOCK)
                    weights *= tl.load(p_scales, mask=m_t, other=0.0).to(tl.float32)[None, :] * QMAX
                v = _load(p_v, i_s, row, i_kv, skip, stride_vs, stride_vt, TILE, BLOCK, W, W_PAD, TMA)
                v = values_of(v, q.dtype, KIND, TILE, D_PAD)
                if part == 1 and not MOVES:
                    v = tl.where(m_t[:, None], v, 0.0)  # what is behind the prefix may be NaN, and 0 * NaN is
                acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision="ieee")

        total = tl.sum(totals, 1)
        if i_tile == problem_start:
            i_part = tl.cast(b + i_sharer, tl.int64) * H + i_h
        else:
            i_part = later_part(split, i_sharer, num_sequences, H, SHARERS) + i_h
        p_part = p_parts + (i_part * D)[:, None] + i_d[None, :]
        divisor = divisor_of(total, i_kv, p_v_scale, QMAX, SCALE)
        tl.store(p_part, acc / divisor[:, None], mask=m_query[:, None] & m_d[None, :])
        tl.store(p_part_lse + i_part, peak + tl.log2(total), mask=m_query)
        i_tile = problem_end


@triton.jit(do_not_specialize=["num_groups", "num_sequences", "num_slots", "num_rows", "num_splits"])
def merge_groups(
    p_out, p_lse, p_parts, p_part_lse, p_group_starts, p_leaders, p_prefix_rows, p_limits, p_lengths, p_slots,
    num_groups, num_sequences, num_slots, num_rows, num_splits, stride_ob, stride_oh,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr, GROUPS_PAD: tl.constexpr,
    SHARERS: tl.constexpr, TILE: tl.constexpr, LEAST_TILES: tl.constexpr, UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Last launch. Program (b, run of HEADS heads): the output of `decode` merged with the parts, tile by tile in order."""
    b = tl.program_id(0)
    starts, ends, _, _, nums_steps, nums_tiles = problems(
        p_group_starts, p_leaders, p_prefix_rows, p_limits, num_groups, num_sequences, num_slots, num_rows,
        GROUPS_PAD, SHARERS, TILE,
    )  # fmt: skip
    share = share_of(tl.sum(nums_tiles, 0), num_splits, LEAST_TILES)
    m_one = (starts <= b) & (b < ends)
    num_steps = only(nums_steps, m_one)
    i_sequence = b - only(starts, m_one)
    problem_start = only(tl.cumsum(nums_tiles, 0) - nums_tiles, m_one) + i_sequence // SHARERS * num_steps
    first_split = problem_start // share
    num_parts = tl.cdiv(problem_start + num_steps, share) - first_split
    slot = tl.load(p_slots + b, cache_modifier=".cg")
    is_idle = (slot < 0) | (slot >= num_slots) | (tl.load(p_lengths + b, cache_modifier=".cg") <= 0)
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
            later = later_part(first_split + i_part, i_sequence % SHARERS, num_sequences, H, SHARERS)
            i_row = tl.where(i_part == 0, tl.cast(b, tl.int64) * H, later) + i_h
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


@dataclass(frozen=True, slots=True)
class Parts:
    """Memory of the first launch's results: an output and a log-sum-exp, in float32, for each query head of each part.

    There is one part for every sequence, and one for the sequences of a problem in every split.
    """

    cut: CascadeTiling
    sharers: int
    """Sequences of a problem."""
    num_splits: int
    count: int
    elements: int

    @classmethod
    def of(cls, q_BHD: torch.Tensor, num_kv_heads: int, kind: Kind | None) -> "Parts":
        """Number of parts that is enough for queries like these, whatever the groups."""
        num_sequences, num_heads, head_dim = q_BHD.shape
        group = num_heads // num_kv_heads
        cut = cascade_tiling(group, head_dim, q_BHD.element_size(), kind)
        sharers = cut.queries // group
        num_splits = resident_splits(q_BHD.device, num_kv_heads, cut.programs_per_sm)
        count = (num_sequences + num_splits * sharers) * num_heads
        return cls(cut, sharers, num_splits, count, round_up(count * (head_dim + 1), _ALIGNMENT_ELEMENTS))


def workspace_elements(q_BHD: torch.Tensor, k: torch.Tensor, *, tables_SC: torch.Tensor | None = None) -> int:
    """float32 elements of the workspace of `cascade` for tensors like these, whatever the lengths and groups.

    k: the views of all slots, or with `tables_SC` of all blocks.
    """
    num_lse = round_up(q_BHD.shape[0] * q_BHD.shape[1], _ALIGNMENT_ELEMENTS)
    return Parts.of(q_BHD, k.shape[2], kind_of(k.dtype)).elements + num_lse + decode_elements(q_BHD, k, tables_SC=tables_SC)


def firsts_of(group_starts_G1: torch.Tensor, prefix_rows_G: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """[B] int32 on the device: the rows of each sequence that belong to its group's prefix; 0 for a sequence in no group.

    Cost: a few small launches, no synchronisation; safe while a graph is captured.
    """
    i_B = torch.arange(num_sequences, dtype=torch.int32, device=group_starts_G1.device)
    num_groups = prefix_rows_G.shape[0]
    if num_groups == 0:
        return torch.zeros_like(i_B)
    i_group_B = torch.searchsorted(group_starts_G1, i_B, right=True) - 1
    is_grouped_B = (i_group_B >= 0) & (i_group_B < num_groups)
    return prefix_rows_G[i_group_B.clamp(0, num_groups - 1)].where(is_grouped_B, 0)


def cascade(
    q_BHD: torch.Tensor,
    k_STKW: torch.Tensor,
    v_STKW: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    group_starts_G1: torch.Tensor,
    leaders_G: torch.Tensor,
    prefix_rows_G: torch.Tensor,
    *,
    query_starts: torch.Tensor | None = None,
    tables_SC: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    firsts_B: torch.Tensor | None = None,
    limit_S: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one new query of each sequence to the rows [0, lengths_B[b]), as `decode` does, but once to a shared prefix.

    Group g is the sequences [group_starts_G1[g], group_starts_G1[g + 1]) of the batch. Their first prefix_rows_G[g] rows are
    the same, and no sequence has fewer. They attend to those rows in slot leaders_G[g], and to the others in their own slots.
    There the rows of the prefix must be mapped and finite nevertheless (see `attend_singles`). The leader need not be one
    of them. A group without sequences or rows is left out. A sequence in no group attends as in `decode`. A length of 0, or a
    slot outside [0, S), gives zeros.

    Rows at and past a limit are not loaded. The output is to be dropped where the leader is outside [0, S), where a sequence
    has passed its slot's limit, and where a prefix has passed its leader's.

    With `query_starts`, as in `prefill`, q_BHD has the queries of sequences that have any number of them. Those of one query
    attend, and the rows of the others are left as they are in `out`. Sequences in groups come first, with one query each.

    With `tables_SC` K and V are blocks, as in `decode`, with the bits of slots where it has them. A prefix is read
    through its leader's table alone.

    - q_BHD, k_STKW, v_STKW: of one dtype, or K and V quantised, with `k_scale` and `v_scale` as in `decode`.
    - group_starts_G1 (not descending), leaders_G, prefix_rows_G: int32 on the device.
    - firsts_B: the result of `firsts_of`; an engine computes it once for all layers.
    - workspace: float32, at least `workspace_elements(...)` of B queries, not shared by launches that may overlap; from
      torch's allocator if None.
    - The others are as for `decode`.

    The result is that of `decode` within rounding. Its bits are the same on every run, but depend on batch and groups.

    Cost: four launches (some more without `firsts_B`), no synchronisation; safe while a graph is captured, and the graph serves
    all lengths and groups.
    Raises: ValueError naming the argument.
    """
    device = q_BHD.device
    checks.runnable("q_BHD", device)
    memory = kv_memory(k_STKW, v_STKW, k_scale, v_scale, tables_SC, q_BHD.dtype, device)
    options = checks.attention_options(scale, None, softcap, memory.head_dim)
    memory.check_queries("q_BHD", q_BHD, "sequences")
    num_sequences, num_heads, head_dim = q_BHD.shape
    out = checks.output(out, q_BHD.shape, q_BHD.dtype, device)
    if query_starts is not None:
        num_sequences = lengths_B.shape[0] if lengths_B.dim() == 1 else 0
        checks.index("query_starts", query_starts, num_sequences + 1, device, (torch.int32,))
    num_kv_heads = memory.num_kv_heads
    group = memory.check_heads("q_BHD", num_heads)
    memory.check_sequences("q_BHD", num_sequences, lengths_B, slots_B, limit_S)
    num_groups = prefix_rows_G.shape[0] if prefix_rows_G.dim() == 1 else 0
    if num_groups > MAX_GROUPS:
        checks.refuse("prefix_rows_G", f"of {num_groups} groups", f"at most {MAX_GROUPS} a launch")
    checks.index("prefix_rows_G", prefix_rows_G, num_groups, device, (torch.int32,))
    checks.index("leaders_G", leaders_G, num_groups, device, (torch.int32,))
    checks.index("group_starts_G1", group_starts_G1, num_groups + 1, device, (torch.int32,))
    if firsts_B is None:
        firsts_B = firsts_of(group_starts_G1, prefix_rows_G, num_sequences)
    checks.index("firsts_B", firsts_B, num_sequences, device)
    if num_sequences == 0 or len(q_BHD) == 0:
        return out
    one_each_BHD = q_BHD[:1].expand(num_sequences, -1, -1)  # for its shape
    parts = Parts.of(one_each_BHD, num_kv_heads, memory.kind)
    cut = parts.cut
    memory.check_tile_offsets(cut.tile_rows)
    workspace = checks.workspace(workspace, workspace_elements(one_each_BHD, k_STKW, tables_SC=tables_SC), device).view(-1)

    num_lse = num_sequences * num_heads
    p_parts, p_part_lse, rest = workspace, workspace[parts.count * head_dim :], workspace[parts.elements :]
    lse_BH, rest = rest[:num_lse].view(num_sequences, num_heads), rest[round_up(num_lse, _ALIGNMENT_ELEMENTS) :]
    groups = (group_starts_G1, leaders_G, prefix_rows_G, limit_S)
    sizes = (num_groups, min(num_sequences, len(q_BHD)), memory.num_slots, memory.num_rows)
    width = memory.k.shape[3]
    common: dict[str, Any] = {
        "D": head_dim, "D_PAD": checks.padded(head_dim), "SHARERS": parts.sharers, "GROUPS_PAD": checks.padded(num_groups),
        "TILE": cut.tile_rows, "LEAST_TILES": cut.least_tiles, **checks.overlap(device),
    }  # fmt: skip
    k, v = memory.k, memory.v
    by_tma = memory.kind is None and memory.fits_tma(cut.tile_rows)
    if by_tma:
        # As [S, K, T, D], in which a box is a tile as it is: the tensor cores read it from where it was loaded to.
        box = [1, 1, cut.tile_rows, checks.padded(head_dim)]
        k, v = (
            descriptor(plane, [plane.shape[i] for i in (0, 2, 1, 3)], [plane.stride(i) for i in (0, 2, 1, 3)], box)
            for plane in (k, v)
        )
    # A table's entries are loaded a stage before the rows that they name, as in `decode`.
    num_stages = 2 * cut.num_stages - 1 if memory.block else cut.num_stages
    with checks.on_device(device):
        attend_groups[(parts.num_splits * num_kv_heads,)](
            q_BHD, k, v, memory.k_scale, memory.v_scale, tables_SC, *groups, p_parts, p_part_lse,
            options.scale_log2, options.softcap_log2, *sizes,
            q_BHD.stride(0), q_BHD.stride(1), memory.stride_table if memory.block else None, *memory.strides,
            K=num_kv_heads, G=group, W=width, W_PAD=checks.padded(head_dim) * width // head_dim,
            KIND=memory.kind or "", SCALE=memory.scale, QMAX=memory.qmax,
            QUERIES=cut.queries, STAGES=num_stages, BLOCK=memory.block, TMA=by_tma,
            HAS_SOFTCAP=options.softcap_log2 > 0.0, num_warps=cut.num_warps, num_stages=num_stages, **common,
        )  # fmt: skip
    # Settled: the first launch has waited for what was launched before it.
    attend_singles(q_BHD, memory, lengths_B, slots_B, query_starts, limit_S, options, out, rest, firsts_B, lse_BH, settled=True)
    heads = min(triton.next_power_of_2(num_heads), max(1, cut.merged_elements // common["D_PAD"]))
    with checks.on_device(device):
        merge_groups[(num_sequences, triton.cdiv(num_heads, heads))](
            out, lse_BH, p_parts, p_part_lse, *groups, lengths_B, slots_B, *sizes, parts.num_splits,
            out.stride(0), out.stride(1), H=num_heads, HEADS=heads, UNROLL=cut.merged_parts, num_warps=4, **common,
        )  # fmt: skip
    return out
