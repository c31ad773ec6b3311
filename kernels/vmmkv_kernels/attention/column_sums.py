"""Column sums of attention's weights: how much the last queries of each sequence attend to each row, over all heads.

Eviction scores rows by them (H2O, Zhang et al., 2023; SnapKV, Li et al., 2024; TOVA, Oren et al., 2024). Two launches:

1. `log_sum_exp` reduces the scores of each query, unless `prefill` has left its log-sum-exps.
2. `_column_sums` then has a weight by one product and one exponential. A program owns a tile of rows and walks the queries that
   see it, head by head: nothing is added up between programs, and the sums have the same bits on every run.

All layers may go in one launch. Each has sums of its own then, for the same reason.

Legend: P parts of the rows, L layers, B sequences, N queries, S slots, T rows of a slot, C columns of the sums, H query heads,
K kv heads, D head dim, G = H / K. Prefixes: p_ pointer, i_ index, m_ mask. Logarithms are to base 2: log2(e) is folded into the
scale.
"""

import math

import torch
import triton
import triton.language as tl

from vmmkv.units import ceil_div
from vmmkv_kernels import checks
from vmmkv_kernels.attention.kv_memory import kv_memory

PART_ROWS = 2048
"""Rows that a program of the log-sum-exp walks at most where queries are few, as in split-KV decode."""

_FEW_PROGRAMS = 512
"""Fewest programs that fill a GPU: an H200 has 132 multiprocessors."""


@triton.jit
def _scores(q, k, scale_log2, softcap, HAS_SOFTCAP: tl.constexpr):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if HAS_SOFTCAP:
        # The launcher folded 2 / softcap into scale_log2 and log2(e) into softcap: tanh(x) = 1 - 2 / (exp(2 x) + 1).
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    return scores


@triton.jit(do_not_specialize=["num_queries", "num_slots", "num_columns"])
def _column_sums(
    p_q, p_k, p_lse, p_out, p_starts, p_lengths, p_slots,
    scale_log2, softcap, num_queries, num_slots, num_columns,
    stride_ql, stride_qn, stride_qh, stride_kl, stride_ks, stride_kt, stride_kk,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """TILE columns of a sequence in a layer. A row of a product is one query under one head; its G heads are neighbours."""
    b = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * TILE
    start = tl.load(p_starts + b)
    count = tl.minimum(tl.load(p_starts + b + 1), num_queries) - start
    slot = tl.load(p_slots + b).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(p_lengths + b), 0), 2147483647).to(tl.int32)
    m_slot = (slot >= 0) & (slot < num_slots) & (start >= 0)
    end = tl.where(m_slot, tl.minimum(length, num_columns), 0)
    if first >= end:
        return

    i_t = first + tl.arange(0, TILE)
    i_d = tl.arange(0, D_PAD)
    m_t = i_t < end
    p_tile = p_k + layer * stride_kl + slot * stride_ks + tl.cast(first, tl.int64) * stride_kt
    p_rows = p_tile + (tl.arange(0, TILE) * stride_kt)[:, None]
    position = length - tl.load(p_starts + b + 1) + start  # of the first query
    begin = tl.maximum(first - position, 0) * G // QUERIES * QUERIES  # the first that sees a row of the tile
    p_queries = p_q + layer * stride_ql + tl.cast(start, tl.int64) * stride_qn
    p_lses = p_lse + (layer * num_queries + start) * (K * G)
    sums = tl.zeros([TILE], tl.float32)
    for i_kv in range(K):
        p_heads_k = p_rows + tl.cast(i_kv, tl.int64) * stride_kk + i_d[None, :]
        k = tl.load(p_heads_k, mask=m_t[:, None] & (i_d < D)[None, :], other=0.0)
        for i_first in range(begin, count * G, QUERIES):
            i_query = i_first + tl.arange(0, QUERIES)
            i_n, i_h, m_n = i_query // G, i_kv * G + i_query % G, i_query < count * G
            p_heads = p_queries + i_n.to(tl.int64) * stride_qn + i_h * stride_qh
            q = tl.load(p_heads[:, None] + i_d[None, :], mask=m_n[:, None] & (i_d < D)[None, :], other=0.0)
            lse = tl.load(p_lses + i_n.to(tl.int64) * (K * G) + i_h, mask=m_n, other=0.0)
            scores = _scores(q, k, scale_log2, softcap, HAS_SOFTCAP) - lse[:, None]
            m_seen = m_n[:, None] & m_t[None, :] & (i_t[None, :] <= (position + i_n)[:, None])
            sums += tl.sum(tl.exp2(tl.where(m_seen, scores, float("-inf"))), 0)
    p_sums = p_out + (layer * tl.num_programs(1) + b) * num_columns + i_t
    tl.store(p_sums, tl.load(p_sums, mask=m_t, other=0.0) + sums, mask=m_t)


@triton.jit(do_not_specialize=["num_queries", "num_slots", "num_rows", "part_rows", "num_blocks"])
def log_sum_exp(
    p_q, p_k, p_lse, p_starts, p_lengths, p_slots,
    scale_log2, softcap, num_queries, num_slots, num_rows, part_rows, num_blocks,
    stride_ql, stride_qn, stride_qh, stride_kl, stride_ks, stride_kt, stride_kk,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """QUERIES rows of a product, as of `_column_sums`, of a sequence under a kv head of a layer, over a part of its rows."""
    part = tl.program_id(0) // num_blocks
    first_query = tl.program_id(0) % num_blocks * QUERIES
    b = tl.program_id(1)
    i_kv = tl.program_id(2) % K
    layer = (tl.program_id(2) // K).to(tl.int64)
    start = tl.load(p_starts + b)
    count = tl.minimum(tl.load(p_starts + b + 1), num_queries) - start
    slot = tl.load(p_slots + b).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(p_lengths + b), 0), 2147483647).to(tl.int32)
    begin = part * part_rows
    end = tl.minimum(tl.minimum(length, num_rows), begin + part_rows)
    i_query = first_query + tl.arange(0, QUERIES)
    if (first_query >= count * G) | (begin >= end) | (slot < 0) | (slot >= num_slots) | (start < 0):
        return
    i_n, i_h, m_n = i_query // G, i_kv * G + i_query % G, i_query < count * G
    i_d = tl.arange(0, D_PAD)
    p_heads = p_q + layer * stride_ql + (start.to(tl.int64) + i_n) * stride_qn + i_h * stride_qh
    q = tl.load(p_heads[:, None] + i_d[None, :], mask=m_n[:, None] & (i_d < D)[None, :], other=0.0)
    position = length - count + i_n
    highest = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    p_rows = p_k + layer * stride_kl + slot * stride_ks + tl.cast(i_kv, tl.int64) * stride_kk
    for first in range(begin, end, TILE):
        i_t = first + tl.arange(0, TILE)
        m_t = i_t < end
        p_tile = p_rows + tl.cast(first, tl.int64) * stride_kt + (tl.arange(0, TILE) * stride_kt)[:, None] + i_d[None, :]
        k = tl.load(p_tile, mask=m_t[:, None] & (i_d < D)[None, :], other=0.0)
        scores = _scores(q, k, scale_log2, softcap, HAS_SOFTCAP)
        scores = tl.where(m_t[None, :] & (i_t[None, :] <= position[:, None]), scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(scores - higher[:, None]), 1)
        highest = higher
    num_layers = tl.num_programs(2) // K
    p_own = p_lse + ((part * num_layers + layer) * num_queries + start + i_n) * (K * G) + i_h
    tl.store(p_own, highest + tl.log2(tl.maximum(total, 1e-30)), mask=m_n)  # a query may see no row of the part


def column_sums(
    q_LNHD: torch.Tensor,
    k_LSTKD: torch.Tensor,
    query_starts: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    lse_LNH: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add to `out` how much the last tokens of each sequence attend to each of its rows, over all heads. Returns [L, B, C].

    Queries, lengths and slots are as for `prefill`, causal, the same in all layers; K is plain. So in a layer the sums of a
    sequence add up to its queries times the heads.

    - q_LNHD, k_LSTKD: of some layers, or of one: `q_NHD[None]`, `k_STKD[None]`.
    - out: contiguous float32 [L, B, C]; zeros of as many columns as a slot has rows if None. Columns at and past a length stay
      as they are, and the rows past the last column get no sums.
    - scale: positive, 1 / sqrt(D) if None. softcap: scores become softcap * tanh(score / softcap).
    - lse_LNH: contiguous float32: what `prefill` gave as `lse_NH` for these queries, in each layer. Computed anew if None.

    Cost: two launches, or one with `lse_LNH`; each multiplies all queries with all rows. Without `lse_LNH`, few queries take a
    few launches of torch more, since rows are then walked in parts. No synchronisation; safe while a graph is captured, and the
    graph serves all counts and lengths.
    Raises: ValueError naming the argument.
    """
    device = q_LNHD.device
    checks.runnable("q_LNHD", device)
    if q_LNHD.dim() != 4 or not len(q_LNHD):
        checks.refuse("q_LNHD", f"of shape {tuple(q_LNHD.shape)}", "4 dimensions: [layers, queries, query heads, head dim]")
    if k_LSTKD.dim() != 5 or len(k_LSTKD) != len(q_LNHD):
        wanted = f"5 dimensions: [{len(q_LNHD)} layers, as the queries have, slots, rows, kv heads, head dim]"
        checks.refuse("k_LSTKD", f"of shape {tuple(k_LSTKD.shape)}", wanted)
    if k_LSTKD.dtype not in checks.FLOAT_DTYPES:
        checks.refuse("k_LSTKD", f"of {k_LSTKD.dtype}", "float16, bfloat16 or float32: quantised rows are not ranked")
    memory = kv_memory(k_LSTKD[0], k_LSTKD[0], None, None, None, q_LNHD.dtype, device)
    options = checks.attention_options(scale, None, softcap, memory.head_dim)
    memory.check_queries("q_LNHD", q_LNHD[0], "queries")
    checks.aligned("q_LNHD", q_LNHD)
    checks.aligned("k_LSTKD", k_LSTKD)
    num_layers, num_queries, num_heads, head_dim = q_LNHD.shape
    group = memory.check_heads("q_LNHD", num_heads)
    num_sequences = lengths_B.shape[0] if lengths_B.dim() == 1 else 0
    memory.check_sequences("lengths_B", num_sequences, lengths_B, slots_B, None)
    checks.index("query_starts", query_starts, num_sequences + 1, device, (torch.int32,))
    num_rows = memory.num_rows
    if out is None:
        out = torch.zeros(num_layers, num_sequences, num_rows, dtype=torch.float32, device=device)
    num_columns = out.shape[2] if out.dim() == 3 else 0
    checks.exactly("out", out, torch.float32, (num_layers, num_sequences, min(num_columns, num_rows)), device)
    is_narrow = q_LNHD.element_size() == 2 and head_dim <= 128
    queries, tile, num_stages = (64, 128, 3) if is_narrow else (32, 32, 2)  # 64 rows a tile took 22.1 ms for 15.5 on an H200
    memory.check_tile_offsets(tile)
    if lse_LNH is not None:
        checks.exactly("lse_LNH", lse_LNH, torch.float32, (num_layers, num_queries, num_heads), device)
    if not num_queries or not out.numel():
        return out

    where = query_starts, lengths_B, slots_B
    strides = *q_LNHD.stride()[:3], k_LSTKD.stride(0) if num_layers > 1 else 0, *memory.strides[:3]  # any others compile anew
    constants = {
        "K": memory.num_kv_heads, "G": group, "D": head_dim, "D_PAD": checks.padded(head_dim), "QUERIES": queries, "TILE": tile,
        "HAS_SOFTCAP": softcap is not None, "num_warps": 4, "num_stages": num_stages,
    }  # fmt: skip
    with checks.on_device(device):
        if lse_LNH is None:
            num_blocks = ceil_div(num_queries * group, queries)
            is_parted = num_blocks * num_sequences * num_layers * memory.num_kv_heads < _FEW_PROGRAMS
            part_rows = PART_ROWS if is_parted else num_rows
            num_parts = ceil_div(num_rows, part_rows)
            shape = (num_parts, num_layers, num_queries, num_heads)
            lse_PLNH = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
            log_sum_exp[(num_blocks * num_parts, num_sequences, num_layers * memory.num_kv_heads)](
                q_LNHD, memory.k, lse_PLNH, *where, options.scale_log2, options.softcap_log2,
                num_queries, memory.num_slots, num_rows, part_rows, num_blocks, *strides, **constants,
            )  # fmt: skip
            lse_LNH = lse_PLNH[0] if num_parts == 1 else torch.logsumexp(lse_PLNH * math.log(2.0), 0) / math.log(2.0)
        _column_sums[(ceil_div(num_columns, tile), num_sequences, num_layers)](
            q_LNHD, memory.k, lse_LNH, out, *where, options.scale_log2, options.softcap_log2,
            num_queries, memory.num_slots, num_columns, *strides, **constants,
        )  # fmt: skip
    return out
