"""Prefill attention: many new queries of each sequence, causal, over contiguous slots or over blocks.

FlashAttention-2's loop (Dao, 2023): a program owns a tile of queries of one sequence, and walks the keys that they see with an
online softmax. Queries start anywhere in their sequence (a chunk). The sequences of a launch have any counts and lengths: the
device reads them, so one captured graph serves all. Sequences of one query go through decode's launches. On Hopper plain bf16
slots, and blocks of whole tiles, with heads of 128 have a kernel of their own: see prefill_hopper.py.

Legend: B sequences, N queries, S slots, T rows of a slot, H query heads, K kv heads, G = H / K, D head dim, W payload width (D,
or D / 2 bytes), P blocks, U rows of a block, C columns of a block table. Prefixes: p_ pointer, i_ index, m_ mask. Logarithms
are to base 2: log2(e) is folded into the scale.
"""

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
import triton
import triton.language as tl

from vmmkv_kernels import checks
from vmmkv_kernels.attention.decode import attend_singles
from vmmkv_kernels.attention.kv_memory import LayerKV, kv_memory, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiling:
    """Tile sizes of a launch. They depend on head dim and dtypes, never on the batch."""

    tokens: int = 128
    """Queries in a program's tile."""
    tile_rows: int = 64
    """Keys in one step of the loop."""
    num_warps: int = 8
    num_stages: int = 3


@functools.cache
def prefill_tiling(head_dim: int, itemsize: int, kind: str) -> PrefillTiling:
    """The tiling of a shape; slots and blocks have the same `tile_rows`, and so the same bits.

    Two groups of four warps multiply 128 queries together. The number of keys leaves registers for scores, weights and output,
    and shared memory for three stages. It is smaller for wide heads, and for quantised ones, which pass through registers.
    float32 is multiplied without tensor cores.
    """
    wide = head_dim > 128
    if itemsize == 4:
        return PrefillTiling(tokens=32, tile_rows=16, num_stages=2)
    if kind:
        return PrefillTiling(tokens=64 if wide else 128, tile_rows=32 if wide or kind == "int4" else 64, num_stages=2)
    return PrefillTiling(num_stages=2) if wide else PrefillTiling()


@triton.jit
def _load_rows(
    p_base, p_table, slot, stride_s, stride_t, row, first, end,
    TILE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, W: tl.constexpr = 0, W_PAD: tl.constexpr = 0,
):  # fmt: skip
    """The rows from `row` on: [TILE, W_PAD], or [TILE] if W is 0. With MASKED those outside [first, end) are zero."""
    i_t = row + tl.arange(0, TILE)
    m_t = ((i_t >= first) & (i_t < end)) if MASKED else tl.full([TILE], True, tl.int1)
    if BLOCK == 0:
        p_rows = p_base + slot * stride_s + tl.cast(row, tl.int64) * stride_t + tl.arange(0, TILE) * stride_t
    else:
        blocks = tl.load(p_table + i_t // BLOCK, mask=m_t, other=0)
        p_rows = p_base + blocks.to(tl.int64) * stride_s + i_t % BLOCK * stride_t
    if W == 0:
        return tl.load(p_rows, mask=m_t, other=0.0)
    else:
        i_w = tl.arange(0, W_PAD)[None, :]
        m_tw = m_t[:, None] if W == W_PAD else m_t[:, None] & (i_w < W)
        return tl.load(p_rows[:, None] + i_w, mask=m_tw, other=0)


@triton.jit
def _uniform(x):
    """The same number, by a reduction: the compiler then knows that all threads have it, which it does not of a loaded value.

    It computes a loop's addresses and counters once for a warp, which saves a tenth of its instructions.
    """
    return tl.max(x + tl.zeros([32], tl.int32), 0)


@triton.jit(do_not_specialize=["num_sequences", "num_queries", "num_tiles", "num_slots", "num_rows", "window"])
def _prefill(
    p_q, p_k, p_v, p_k_scale, p_v_scale, p_out, p_lse, p_starts, p_lengths, p_slots, p_limits, p_tables,
    scale_log2, softcap, window, num_sequences, num_queries, num_tiles, num_slots, num_rows,
    stride_qn, stride_qh, stride_ks, stride_kt, stride_kk, stride_vs, stride_vt, stride_vk,
    stride_kss, stride_kst, stride_vss, stride_vst, stride_scale, stride_on, stride_oh, stride_table,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, D_PAD: tl.constexpr, W_PAD: tl.constexpr,
    B_PAD: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, SCALE: tl.constexpr, QMAX: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of TOKENS queries of a sequence, under one query head.

    Sequence b has the tiles from query_starts[b] // TOKENS + b on: at least as many as it needs, found without a prefix sum.
    Programs without queries end at once. Late tiles see the most keys and start first. Neighbouring programs take the heads of
    one tile, which share their keys in L2.
    """
    i_tile = num_tiles - 1 - tl.program_id(0) // H
    i_head = tl.program_id(0) % H
    i_b = tl.arange(0, B_PAD)
    starts = tl.load(p_starts + i_b, mask=i_b < num_sequences, other=0)
    b = tl.sum(((starts // TOKENS + i_b <= i_tile) & (i_b < num_sequences)).to(tl.int32), 0) - 1
    if b < 0:
        return
    start = tl.load(p_starts + b)
    count = tl.load(p_starts + b + 1) - start
    length = tl.load(p_lengths + b)
    slot = tl.load(p_slots + b).to(tl.int64)
    i_first = (i_tile - (start // TOKENS + b)) * TOKENS
    # A single query is decode's, and a start below 0 is no sequence's.
    if (i_first >= count) | (count == 1) | (start < 0):
        return
    count = tl.minimum(count, num_queries - start)
    m_slot = (slot >= 0) & (slot < num_slots)
    length = tl.minimum(tl.maximum(length, 0), 2147483647).to(tl.int32)
    end = tl.where(m_slot, tl.minimum(length, num_rows), 0)
    if p_limits is not None:
        end = tl.minimum(end, tl.load(p_limits + slot, mask=m_slot, other=0))
    slot = tl.where(m_slot, slot, 0)

    i_token = tl.arange(0, TOKENS)
    i_pad = tl.arange(0, D_PAD)  # the halves of an int4 head are padded each for itself
    i_d = i_pad // W_PAD * W + i_pad % W_PAD
    m_md = (i_token < count - i_first)[:, None] & (i_pad % W_PAD < W)[None, :]
    base_64 = tl.cast(start + i_first, tl.int64)
    p_q_tile = p_q + base_64 * stride_qn + tl.cast(i_head, tl.int64) * stride_qh
    q = tl.load(p_q_tile + (i_token * stride_qn)[:, None] + i_d[None, :], mask=m_md, other=0.0)

    position = length - count + i_first
    newest_seen = tl.minimum(position + i_token, end - 1)
    stop = tl.maximum(position + tl.minimum(TOKENS, count - i_first), 0)
    end = _uniform(tl.maximum(tl.minimum(end, stop), 0))
    # Tiles of keys start at multiples of TILE whatever the queries are, so that a query rounds the same in any chunk.
    full_end = _uniform(tl.minimum(tl.maximum(position + 1, 0), end) // TILE * TILE)
    first, begin, full_begin = 0, 0, 0
    if HAS_WINDOW:
        oldest_seen = tl.maximum(position + i_token + 1, 0) - window
        first = tl.maximum(tl.maximum(position + 1, 0) - window, 0)
        begin = _uniform(first // TILE * TILE)
        full_begin = _uniform(tl.cdiv(tl.minimum(tl.maximum(stop - window, 0), end), TILE) * TILE)
        full_end = tl.maximum(full_end, full_begin)

    i_kv = tl.cast(i_head // G, tl.int64)
    p_k += i_kv * stride_kk
    p_v += i_kv * stride_vk
    p_table = p_tables
    if BLOCK > 0:
        p_table += slot * stride_table
    if SCALE == "token":
        p_k_scale += i_kv * stride_scale
        p_v_scale += i_kv * stride_scale
    elif SCALE == "head":
        scale_log2 *= tl.load(p_k_scale + i_kv)

    # The online softmax (Milakov & Gimelshein, 2018) in three parts: keys that a window cuts, keys that all queries see, and
    # keys that the diagonal cuts. A query that sees nothing of a tile stays exactly as it was.
    acc = tl.zeros([TOKENS, D_PAD], tl.float32)
    peak = tl.full([TOKENS], float("-inf"), tl.float32)
    # Each over every eighth key: the part of a row that one thread holds, so that threads exchange nothing before the end.
    totals = tl.zeros([TOKENS, 8], tl.float32)
    factor = 1.0 if HAS_SOFTCAP else scale_log2
    for part in tl.static_range(0 if HAS_WINDOW else 1, 3):
        part_begin = begin if part == 0 else (full_begin if part == 1 else full_end)
        part_end = full_begin if part == 0 else (full_end if part == 1 else end)
        for row in tl.range(part_begin, part_end, TILE, num_stages=STAGES):
            k = _load_rows(p_k, p_table, slot, stride_ks, stride_kt, row, first, end, TILE, BLOCK, part != 1, W, W_PAD)
            scores = tl.dot(q, tl.trans(values_of(k, q.dtype, KIND, TILE, D_PAD)), input_precision="ieee")
            if SCALE == "token":
                k_scale = _load_rows(p_k_scale, p_table, slot, stride_kss, stride_kst, row, first, end, TILE, BLOCK, part != 1)
                scores *= k_scale.to(tl.float32)[None, :]
            if HAS_SOFTCAP:
                # The launcher folded 2 / softcap into scale_log2, log2(e) into softcap: tanh(x) = 1 - 2 / (exp(2 x) + 1).
                scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * scale_log2) + 1.0))
            if part != 1:
                i_t = row + tl.arange(0, TILE)[None, :]
                m_seen = i_t <= newest_seen[:, None]
                if HAS_WINDOW:
                    m_seen &= i_t >= oldest_seen[:, None]
                scores = tl.where(m_seen, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
            # Before the first row that it sees a query's peak is -inf, and -inf - -inf is NaN.
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) if part != 1 else new_peak
            weights = tl.exp2(scores * factor - shift[:, None])
            rescale, peak = tl.exp2(peak - shift), new_peak
            totals = totals * rescale[:, None] + tl.sum(tl.reshape(weights, [TOKENS, TILE // 8, 8]), 1)
            if SCALE == "token":
                v_scale = _load_rows(p_v_scale, p_table, slot, stride_vss, stride_vst, row, first, end, TILE, BLOCK, part != 1)
                # Times QMAX, by which the output is divided: float16 then holds a weight times a small scale.
                weights *= (v_scale.to(tl.float32) * QMAX)[None, :]
            v = _load_rows(p_v, p_table, slot, stride_vs, stride_vt, row, first, end, TILE, BLOCK, part != 1, W, W_PAD)
            v = values_of(v, q.dtype, KIND, TILE, D_PAD)
            acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision="ieee")

    total = tl.sum(totals, 1)
    # A query that sees nothing gives zeros.
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    if SCALE == "token":
        share /= QMAX
    elif SCALE == "head":
        share *= tl.load(p_v_scale + i_kv)
    p_out_tile = p_out + base_64 * stride_on + tl.cast(i_head, tl.int64) * stride_oh
    p_out_md = p_out_tile + (i_token * stride_on)[:, None] + i_d[None, :]
    tl.store(p_out_md, (acc * share[:, None]).to(p_out.dtype.element_ty), mask=m_md)
    if p_lse is not None:
        tl.store(p_lse + (base_64 + i_token) * H + i_head, peak + tl.log2(total), mask=i_token < count - i_first)


def prefill(
    q_NHD: torch.Tensor,
    k_STKW: torch.Tensor,
    v_STKW: torch.Tensor,
    query_starts: torch.Tensor,
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
    skips_singles: bool = False,
    out: torch.Tensor | None = None,
    lse_NH: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from the last tokens of each sequence to the rows of its slot, causally. Returns [N, H, D] (`out` if given).

    Sequence b has the queries [query_starts[b], query_starts[b + 1]) of `q_NHD`, any number of them, at the positions that end
    with lengths_B[b] - 1. Lengths count the queries' own rows, appended before. The query at position p attends to the rows
    [max(0, p + 1 - window), p + 1) of slot slots_B[b]. No other row is loaded, nor any at or past limit_S[slot] or T: the
    output of queries there is to be dropped. A slot outside [0, S) gives zeros. Queries past query_starts[B] have no sequence,
    and no output.

    With `tables_SC` K and V are blocks, as in `decode`: bit for bit the same, but where slots have the kernel for Hopper and
    blocks are not of a multiple of 128 rows.

    - query_starts: int32 [B + 1] on the device, from 0 and not descending.
    - scale: positive, 1 / sqrt(D) if None.
    - skips_singles: leave the rows of sequences of one query as they are in `out`, for `cascade` has attended to them.
    - lse_NH: contiguous float32. Receives log2(sum(exp(score))) over the scaled and capped scores of each query and head, -inf
      where there are none. Rows of sequences of one query stay as they are. No bit of the output depends on it.
    - workspace: that of `decode` for B queries.
    - The others are as for `decode`.

    Cost: three launches, or four with the kernel for Hopper; no synchronisation; safe while a graph is captured, and the graph
    serves all counts and lengths. The device finds the sequences of one query. Decode's two launches attend to them, spread
    over the whole device, with the bits of `decode`.
    Raises: ValueError naming the argument.
    """
    checks.runnable("q_NHD", q_NHD.device)
    memory = kv_memory(k_STKW, v_STKW, k_scale, v_scale, tables_SC, q_NHD.dtype, q_NHD.device)
    options = checks.attention_options(scale, window, softcap, memory.head_dim)
    batch = (query_starts, lengths_B, slots_B, limit_S)
    return launch_prefill(q_NHD, memory, *batch, options, out, workspace, lse_NH, skips_singles=skips_singles)


@functools.cache
def hopper_kernels(device: torch.device) -> ModuleType | None:
    """prefill_hopper.py where the device is a Hopper. It is imported only there: Gluon is no part of the interpreter."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    from vmmkv_kernels.attention import prefill_hopper

    return prefill_hopper


def launch_prefill(
    q_NHD: torch.Tensor,
    memory: LayerKV,
    query_starts: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    limit_S: torch.Tensor | None,
    options: checks.AttentionOptions,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
    lse_NH: torch.Tensor | None = None,
    *,
    skips_singles: bool = False,
    cut: PrefillTiling | None = None,
) -> torch.Tensor:
    """`prefill` over memory and options that are checked already. With `cut` the kernel of this file runs, on Hopper too."""
    device = q_NHD.device
    memory.check_queries("q_NHD", q_NHD, "queries")
    num_queries, num_heads, head_dim = q_NHD.shape
    num_sequences = lengths_B.shape[0] if lengths_B.dim() == 1 else 0
    group = memory.check_heads("q_NHD", num_heads)
    memory.check_sequences("lengths_B", num_sequences, lengths_B, slots_B, limit_S)
    checks.index("query_starts", query_starts, num_sequences + 1, device, (torch.int32,))
    out = checks.output(out, q_NHD.shape, q_NHD.dtype, device)
    if lse_NH is not None:
        checks.exactly("lse_NH", lse_NH, torch.float32, (num_queries, num_heads), device)
    if num_queries == 0 or num_sequences == 0:
        return out

    hopper = hopper_kernels(device) if cut is None else None
    cut = cut or prefill_tiling(head_dim, q_NHD.element_size(), memory.kind or "")
    memory.check_tile_offsets(cut.tile_rows)
    num_tiles = num_queries // cut.tokens + num_sequences
    width = memory.k.shape[3]
    width_padded = max(16 if memory.kind != "int4" else 8, triton.next_power_of_2(width))
    if not skips_singles:
        attend_singles(q_NHD, memory, lengths_B, slots_B, query_starts, limit_S, options, out, workspace)
    if hopper is not None and hopper.applies(q_NHD, memory, options):
        hopper.launch_prefill_hopper(q_NHD, memory, query_starts, lengths_B, slots_B, limit_S, options, out, lse_NH)
        return out
    # Over blocks the pipeline has two loads, one after the other, where it has one in slots.
    num_stages = 2 * cut.num_stages - 1 if memory.block else cut.num_stages
    with checks.on_device(device):
        _prefill[(num_tiles * num_heads,)](
            q_NHD, memory.k, memory.v, memory.k_scale, memory.v_scale, out, lse_NH,
            query_starts, lengths_B, slots_B, limit_S, memory.tables_SC,
            options.scale_log2, options.softcap_log2, options.rows_seen,
            num_sequences, num_queries, num_tiles, memory.num_slots, memory.num_rows,
            q_NHD.stride(0), q_NHD.stride(1), *memory.strides, out.stride(0), out.stride(1), memory.stride_table,
            H=num_heads, G=group, D=head_dim, W=width,
            D_PAD=width_padded * (head_dim // width), W_PAD=width_padded,
            B_PAD=checks.padded(num_sequences), TOKENS=cut.tokens, TILE=cut.tile_rows,
            BLOCK=memory.block, KIND=memory.kind or "", SCALE=memory.scale, QMAX=memory.qmax,
            HAS_WINDOW=options.rows_seen < checks.NO_WINDOW, HAS_SOFTCAP=options.softcap_log2 > 0.0, STAGES=num_stages,
            num_warps=cut.num_warps, num_stages=num_stages,
        )  # fmt: skip
    return out
