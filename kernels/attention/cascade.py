"""Cascade attention for decode: sequences that share a prefix attend to it once, as rows of one problem.

After Hydragen (Juravsky et al., 2024) and FlashInfer (Ye et al., 2024). The sharers of a prefix stand side by side in the
batch, as a *group*. A prefix is one range of rows, in the slot of the group's *leader*, so that attending to it is a plain
matrix product with up to 128 queries on one side, spread over the whole device as decode is (cascade_prefix.py). To what each
sequence has for itself `decode` attends, from a first row on. Both come with their log-sum-exp, by which they are merged.
All of it is read on the device: one captured graph serves every grouping of a batch.

Legend: B sequences, S slots, T rows of a slot, H query heads, K kv heads, D head dim, G groups (and G1 = G + 1).
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from vmmkv.kernels import checks
from vmmkv.kernels.attention.decode import MAX_DESCRIPTOR_STRIDE_BYTES, MAX_GROUP, MAX_HEAD_DIM, MAX_SEQUENCES, launch_decode
from vmmkv.kernels.attention.decode import workspace_elements as decode_elements
from vmmkv.kernels.attention.kv_memory import KVMemory, blocks_of, kv_memory, load_tile, row_pointers
from vmmkv.kernels.attention.split_kv import EMPTY_PEAK
from vmmkv.units import round_up

# -------- cascade groups
# Who shares a prefix with whom, and which lane attends to what of it. For use inside kernels; see cascade.py.
#
#     groups      |               0               | 1 |         2         | ...
#     problems    |     0     |     1     |   2   | 0 |    0    |    1    |        SHARERS sequences each, or what is left
#     tiles       |0 1 2 3 4 5|0 1 2 3 4 5|0 1 ...| 0 |0 1 2 3 4|0 1 2 3 4|        of the group's prefix, for each problem again
#     lanes       |    0    |    1    |    2    |    3    |    4    | ...
#
# A *problem* is a run of a group's sequences whose queries, of one kv head, are the rows of one dot. The tiles of all problems,
# one behind the other, are dealt to the lanes in equal runs, and what a lane sums up of a problem is a *part* of it. The part
# that begins a problem is kept where its sequences are. Of the others a lane has at most one, its first, which is kept where
# the lane is. So whoever merges them tells from the same few numbers where they are.
#
# Prefixes: p_ pointer, i_ index, m_ mask.


@triton.jit
def problems(
    p_group_starts, p_leaders, p_prefix_rows, p_limits, num_groups, num_sequences, num_slots, num_rows,
    GROUPS_PAD: tl.constexpr, SHARERS: tl.constexpr, TILE: tl.constexpr, HAS_LIMIT: tl.constexpr,
):  # fmt: skip
    """Of each group: its first sequence and where they end, leader, rows of the prefix, tiles of those, tiles of all problems.

    A group without sequences, or whose leader is no slot, has no rows and no tiles.
    """
    i_group = tl.arange(0, GROUPS_PAD)
    m_group = i_group < num_groups
    starts = tl.load(p_group_starts + i_group, mask=m_group, other=0)
    ends = tl.load(p_group_starts + i_group + 1, mask=m_group, other=0)
    starts = tl.minimum(tl.maximum(starts, 0), num_sequences)
    ends = tl.maximum(tl.minimum(ends, num_sequences), starts)
    leaders = tl.load(p_leaders + i_group, mask=m_group, other=-1)
    m_group = (ends > starts) & (leaders >= 0) & (leaders < num_slots)
    rows = tl.minimum(tl.load(p_prefix_rows + i_group, mask=m_group, other=0), num_rows)
    if HAS_LIMIT:
        rows = tl.minimum(rows, tl.load(p_limits + leaders, mask=m_group, other=0))
    rows = tl.maximum(rows, 0)
    steps = tl.cdiv(rows, TILE)
    return starts, ends, leaders, rows, steps, tl.cdiv(ends - starts, SHARERS) * steps


@triton.jit
def only(values, m_one):
    """The value where the mask is on; 0 if it is nowhere."""
    return tl.sum(tl.where(m_one, values, 0), 0)


@triton.jit
def share_of(num_tiles, num_lanes, LEAST_TILES: tl.constexpr):
    """Tiles of each lane (the last ones may have fewer, or none)."""
    return tl.maximum(tl.cdiv(num_tiles, num_lanes), LEAST_TILES)


@triton.jit
def first_part(b, num_heads):
    """Where the heads of a sequence begin in the parts that begin problems."""
    return tl.cast(b, tl.int64) * num_heads


@triton.jit
def later_part(lane, i_sharer, num_sequences, num_heads, SHARERS: tl.constexpr):
    """Where the heads of the problem's sequence `i_sharer` begin in the part that this lane continues."""
    return (tl.cast(lane, tl.int64) * SHARERS + i_sharer + num_sequences) * num_heads


# -------- cascade tiling
# How cascade cuts a shape into problems, tiles and lanes.


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeTiling:
    """How a launch is cut; it depends on head counts, head size and dtype, never on the batch."""

    queries: int = 128
    """Rows of a problem's dot: sequences times query heads of a kv head."""
    tile_rows: int = 64
    """Rows of the prefix in one step of the loop."""
    least_tiles: int = 1
    """Of a lane: a part costs what it takes to write it and to merge it."""
    num_warps: int = 8
    num_stages: int = 3
    programs_per_sm: int = 1
    """As many as are resident together: a program that starts late ends late."""
    merged_elements: int = 1024
    """Of the output, in a program of the last launch."""
    merged_parts: int = 4
    """That are loaded together there."""


@functools.cache
def cascade_tiling(group: int, head_dim: int, itemsize: int) -> CascadeTiling:
    """The tiling of a shape with so many query heads a kv head.

    128 queries are what two groups of four warps multiply together; the tile leaves the registers enough for scores, weights
    and output, and shared memory enough for its stages. float32 is multiplied without tensor cores.
    """
    if itemsize == 4:
        return CascadeTiling(queries=max(32, triton.next_power_of_2(group)), tile_rows=16, num_stages=2)
    return CascadeTiling(num_stages=2) if head_dim > 128 else CascadeTiling()


# -------- cascade tiles
# Cascade's first launch: every prefix once, for all the queries that share it, in parts. See cascade.py and cascade_groups.py.
#
# Legend: H query heads, K kv heads, G = H / K, D head dim. Prefixes: p_ pointer, i_ index, m_ mask. Logarithms are to base 2
# throughout: log2(e) is folded into the scale.


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


# -------- cascade merge
# Cascade's last launch: the parts of a prefix merged with what a sequence attends to alone. See cascade.py.
#
# Legend: B sequences, H query heads, D head dim. Prefixes: p_ pointer, i_ index, m_ mask. Logarithms are to base 2.


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


# -------- cascade prefix
# The prefixes of a batch: attention to each of them once, in parts, and the parts merged with a suffix. See cascade.py.
#
# Legend: B sequences, S slots, T rows of a slot, C columns of a block table, H query heads, K kv heads, D head dim,
# G groups (and G1 = G + 1).

MAX_GROUPS = 4096
"""Every program sums up the tiles of all groups in its registers."""

ALIGNMENT_ELEMENTS = 32
"""What a workspace is divided into begins at multiples of 128 bytes."""

_INTERPRETED_LANES = 3


@functools.cache
def _num_lanes(device: torch.device, num_kv_heads: int, programs_per_sm: int) -> int:
    """As many lanes as are resident together; a lane is a program for each kv head."""
    if device.type == "cpu":
        return _INTERPRETED_LANES
    resident = torch.cuda.get_device_properties(device).multi_processor_count * programs_per_sm
    return max(1, resident // num_kv_heads)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the first launch leaves for the last, as outputs and log-sum-exps of query heads, in float32.

    There is one for every head of every sequence, and again for those of a problem in every lane (cascade_groups.py).
    """

    cut: CascadeTiling
    sharers: int
    """Sequences of a problem."""
    num_lanes: int
    num_heads: int
    head_dim: int
    count: int

    @classmethod
    def of(cls, q_BHD: torch.Tensor, num_kv_heads: int) -> "Parts":
        """Of queries like these."""
        num_sequences, num_heads, head_dim = q_BHD.shape
        group = num_heads // num_kv_heads
        cut = cascade_tiling(group, head_dim, q_BHD.element_size())
        sharers = cut.queries // group
        num_lanes = _num_lanes(q_BHD.device, num_kv_heads, cut.programs_per_sm)
        return cls(cut, sharers, num_lanes, num_heads, head_dim, (num_sequences + num_lanes * sharers) * num_heads)

    @property
    def elements(self) -> int:
        """Of all, whatever the groups."""
        return round_up(self.count * (self.head_dim + 1), ALIGNMENT_ELEMENTS)

    def split(self, elements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs, and log-sum-exps."""
        return elements, elements[self.count * self.head_dim :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Who shares which rows, checked, for two launches that have to agree on it."""

    memory: KVMemory
    starts_G1: torch.Tensor
    leaders_G: torch.Tensor
    rows_G: torch.Tensor
    limit_S: torch.Tensor | None
    num_sequences: int
    parts: Parts

    @classmethod
    def of(
        cls,
        q_BHD: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tables_SC: torch.Tensor | None,
        group_starts_G1: torch.Tensor,
        leaders_G: torch.Tensor,
        prefix_rows_G: torch.Tensor,
        limit_S: torch.Tensor | None,
    ) -> "Prefixes":
        """Check the arguments of `cascade` or `paged_cascade`. Raises ValueError naming the argument."""
        device = q_BHD.device
        suffix = "STKD" if tables_SC is None else "PUKD"
        checks.runnable("q_BHD", device)
        if k.dtype not in checks.FLOAT_DTYPES:
            wanted = "float16, bfloat16 or float32: of quantised K and V prefixes are not shared yet, which `decode` reads"
            checks.refuse(f"k_{suffix}", f"of {k.dtype}", wanted)
        memory = kv_memory(k, v, None, None, tables_SC, q_BHD.dtype, device)
        if q_BHD.dim() != 3:
            checks.refuse("q_BHD", f"of shape {tuple(q_BHD.shape)}", "3 dimensions: [sequences, query heads, head dim]")
        num_sequences, num_heads, head_dim = q_BHD.shape
        memory.check_head_dim("q_BHD", head_dim)
        checks.vectors("q_BHD", q_BHD, (num_sequences, num_heads, head_dim), q_BHD.dtype, device)
        checks.heads("q_BHD", num_heads, memory.num_kv_heads, MAX_GROUP, head_dim, MAX_HEAD_DIM)
        if num_sequences > MAX_SEQUENCES:
            checks.refuse("q_BHD", f"of {num_sequences} sequences", f"at most {MAX_SEQUENCES} a launch")
        num_groups = prefix_rows_G.shape[0] if prefix_rows_G.dim() == 1 else 0
        if num_groups > MAX_GROUPS:
            checks.refuse("prefix_rows_G", f"of {num_groups} groups", f"at most {MAX_GROUPS} a launch")
        _check_groups("prefix_rows_G", prefix_rows_G, num_groups, device)
        _check_groups("leaders_G", leaders_G, num_groups, device)
        _check_groups("group_starts_G1", group_starts_G1, num_groups + 1, device)
        if limit_S is not None:
            checks.limits("limit_S", limit_S, memory.num_slots, device)
        parts = Parts.of(q_BHD, memory.num_kv_heads)
        checks.tile_offsets(f"k_{suffix}", memory.k, memory.block or parts.cut.tile_rows)
        checks.tile_offsets(f"v_{suffix}", memory.v, memory.block or parts.cut.tile_rows)
        return cls(
            memory=memory,
            starts_G1=group_starts_G1,
            leaders_G=leaders_G,
            rows_G=prefix_rows_G,
            limit_S=limit_S,
            num_sequences=num_sequences,
            parts=parts,
        )

    def attend(self, q_BHD: torch.Tensor, options: checks.AttentionOptions, elements: torch.Tensor) -> None:
        """Write the parts into so many `elements`. One launch."""
        memory, parts, cut = self.memory, self.parts, self.parts.cut
        by_tma = _can_describe(memory)
        # A table's entries are loaded a stage before the rows that they name, as in `decode`.
        num_stages = 2 * cut.num_stages - 1 if memory.block else cut.num_stages
        p_parts, p_lse = parts.split(elements)
        with checks.on_device(q_BHD.device):
            attend_groups[(parts.num_lanes * memory.num_kv_heads,)](
                q_BHD, _descriptor(memory.k, cut.tile_rows) if by_tma else memory.k,
                _descriptor(memory.v, cut.tile_rows) if by_tma else memory.v, memory.tables_SC,
                self.starts_G1, self.leaders_G, self.rows_G, self.limit_S, p_parts, p_lse,
                options.scale_log2, options.softcap_log2, self.rows_G.shape[0], self.num_sequences,
                memory.num_slots, memory.num_rows, q_BHD.stride(0), q_BHD.stride(1),
                memory.stride_table if memory.block else None, *memory.strides[:6],
                K=memory.num_kv_heads, G=parts.num_heads // memory.num_kv_heads, QUERIES=cut.queries, STAGES=num_stages,
                BLOCK=memory.block, TMA=by_tma, HAS_SOFTCAP=options.softcap_log2 > 0.0, num_warps=cut.num_warps,
                num_stages=num_stages, **self._common(q_BHD.device),
            )  # fmt: skip

    def merge(
        self,
        out_BHD: torch.Tensor,
        lse_BH: torch.Tensor,
        lengths_B: torch.Tensor,
        slots_B: torch.Tensor,
        elements: torch.Tensor,
    ) -> None:
        """Merge the parts into what `decode` has made of the suffixes, in place. One launch."""
        memory, parts = self.memory, self.parts
        padded_dim = max(16, triton.next_power_of_2(parts.head_dim))
        heads = min(triton.next_power_of_2(parts.num_heads), max(1, parts.cut.merged_elements // padded_dim))
        p_parts, p_lse = parts.split(elements)
        with checks.on_device(out_BHD.device):
            merge_groups[(self.num_sequences, triton.cdiv(parts.num_heads, heads))](
                out_BHD, lse_BH, p_parts, p_lse, self.starts_G1, self.leaders_G, self.rows_G, self.limit_S, lengths_B, slots_B,
                self.rows_G.shape[0], self.num_sequences, memory.num_slots, memory.num_rows, parts.num_lanes,
                out_BHD.stride(0), out_BHD.stride(1),
                H=parts.num_heads, HEADS=heads, UNROLL=parts.cut.merged_parts, num_warps=4, **self._common(out_BHD.device),
            )  # fmt: skip

    def _common(self, device: torch.device) -> dict[str, Any]:
        """What both kernels are compiled for."""
        parts = self.parts
        return {
            "D": parts.head_dim, "D_PAD": max(16, triton.next_power_of_2(parts.head_dim)), "SHARERS": parts.sharers,
            "GROUPS_PAD": max(16, triton.next_power_of_2(self.rows_G.shape[0])), "TILE": parts.cut.tile_rows,
            "LEAST_TILES": parts.cut.least_tiles, "HAS_LIMIT": self.limit_S is not None, **checks.overlap(device),
        }  # fmt: skip


def _check_groups(argument: str, tensor: torch.Tensor, count: int, device: torch.device) -> None:
    checks.index(argument, tensor, count, device)
    if tensor.dtype != torch.int32:
        checks.refuse(argument, f"of {tensor.dtype}", "int32")


def _descriptor(plane: torch.Tensor, tile_rows: int) -> TensorDescriptor:
    """A plane of all slots for the tensor memory accelerator, as [S, K, T, D], in boxes of one tile of one kv head of one slot.

    In that order a box is a tile as it is, which the tensor cores then read from where it was loaded to.
    """
    unfollowed = checks.ALIGNMENT_BYTES  # the strides of dimensions of size 1 are made what a descriptor takes
    strides = [stride if size > 1 else unfollowed for size, stride in zip(plane.shape, plane.stride(), strict=True)]
    slots, rows, kv_heads, head_dim = plane.shape
    box = [1, 1, tile_rows, max(16, triton.next_power_of_2(head_dim))]
    return TensorDescriptor(plane, [slots, kv_heads, rows, head_dim], [strides[0], strides[2], strides[1], 1], box)


def _can_describe(memory: KVMemory) -> bool:
    """Can the tensor memory accelerator load the tiles? A prefix's last one is moved back, to end with it, see `decode`.

    Blocks are read by pointers.
    """
    widest_bytes = max(*memory.k.stride(), *memory.v.stride()) * memory.k.element_size()
    return not memory.block and widest_bytes < MAX_DESCRIPTOR_STRIDE_BYTES and checks.has_tma(memory.k.device)


# -------- cascade


def cascade(
    q_BHD: torch.Tensor,
    k_STKD: torch.Tensor,
    v_STKD: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    group_starts_G1: torch.Tensor,
    leaders_G: torch.Tensor,
    prefix_rows_G: torch.Tensor,
    *,
    firsts_B: torch.Tensor | None = None,
    limit_S: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one new query of each sequence to the rows [0, lengths_B[b]), as `decode` does, but once to a shared prefix.

    Group g is the sequences [group_starts_G1[g], group_starts_G1[g + 1]) of the batch, whose first prefix_rows_G[g] rows are
    the same; no sequence has fewer. They attend to those in slot leaders_G[g], and to the others in their own slots, where
    those of the prefix are to be mapped and finite nevertheless (see `firsts_B` of `decode`). The leader need not be one of
    them. A group without sequences or rows is left out, and who is in no group attends as in `decode`. A length of 0, or a slot
    outside [0, S), gives zeros. What comes out is to be dropped if the leader is outside [0, S), or if, with `limit_S`, a
    sequence has passed the limit of its own slot, or its prefix that of the leader's: rows at and past a limit are not loaded.

    q_BHD, k_STKD, v_STKD: of one dtype; quantised K and V are refused. group_starts_G1 (not descending), leaders_G,
    prefix_rows_G: int32 on the device. firsts_B: what `firsts_of` gives; an engine computes it once for all layers.
    workspace: float32, at least `workspace_elements(...)`, not shared by launches that may overlap; if None it comes from
    torch's allocator. The others are as for `decode`.

    The result is that of `decode` within rounding. Its bits are the same on every run, but depend on batch and groups.

    Cost: four launches (some more without `firsts_B`), no synchronisation; safe while a graph is captured, and the graph
    serves all lengths and groups.
    Raises: ValueError naming the argument.
    """
    prefixes = Prefixes.of(q_BHD, k_STKD, v_STKD, None, group_starts_G1, leaders_G, prefix_rows_G, limit_S)
    options = checks.attention_options(scale, None, softcap, prefixes.memory.head_dim)
    return launch_cascade(q_BHD, prefixes, lengths_B, slots_B, firsts_B, options, out, workspace)


def launch_cascade(
    q_BHD: torch.Tensor,
    prefixes: Prefixes,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    firsts_B: torch.Tensor | None,
    options: checks.AttentionOptions,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> torch.Tensor:
    """`cascade` over the memory that the prefixes are in."""
    memory = prefixes.memory
    num_sequences, num_heads, _ = q_BHD.shape
    elements = workspace_elements(q_BHD, memory.k, tables_SC=memory.tables_SC)
    if workspace is None:
        workspace = torch.empty(elements, dtype=torch.float32, device=q_BHD.device)
    else:
        checks.workspace("workspace", workspace, elements, q_BHD.device)
    if firsts_B is None:
        firsts_B = firsts_of(prefixes.starts_G1, prefixes.rows_G, num_sequences)
    workspace = workspace.view(-1)
    num_lse = num_sequences * num_heads
    parts, rest = workspace[: prefixes.parts.elements], workspace[prefixes.parts.elements :]
    lse_BH, rest = rest[:num_lse].view(num_sequences, num_heads), rest[round_up(num_lse, ALIGNMENT_ELEMENTS) :]

    if num_sequences > 0:
        prefixes.attend(q_BHD, options, parts)
    out = launch_decode(q_BHD, memory, lengths_B, slots_B, prefixes.limit_S, options, out, rest, firsts_B, lse_BH)
    if num_sequences > 0:
        prefixes.merge(out, lse_BH, lengths_B, slots_B, parts)
    return out


def workspace_elements(q_BHD: torch.Tensor, k: torch.Tensor, *, tables_SC: torch.Tensor | None = None) -> int:
    """float32 elements that `cascade` needs as its workspace for tensors like these, whatever the lengths and groups.

    k: the views of all slots, or of all blocks with `tables_SC`.
    """
    num_lse = round_up(q_BHD.shape[0] * q_BHD.shape[1], ALIGNMENT_ELEMENTS)
    return Parts.of(q_BHD, k.shape[2]).elements + num_lse + decode_elements(q_BHD, k, tables_SC=tables_SC)


def firsts_of(group_starts_G1: torch.Tensor, prefix_rows_G: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """[B] int32 on the device: how many rows of each sequence are of its group's prefix; 0 for who is in no group.

    Cost: a few small launches, no synchronisation; safe while a graph is captured.
    """
    i_B = torch.arange(num_sequences, dtype=torch.int32, device=group_starts_G1.device)
    num_groups = prefix_rows_G.shape[0]
    if num_groups == 0:
        return torch.zeros_like(i_B)
    i_group_B = torch.searchsorted(group_starts_G1, i_B, right=True) - 1
    is_grouped_B = (i_group_B >= 0) & (i_group_B < num_groups)
    return prefix_rows_G[i_group_B.clamp(0, num_groups - 1)].where(is_grouped_B, 0)
