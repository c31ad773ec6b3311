"""Decode attention: one new query for each sequence, over contiguous slots.

Split-KV in two launches, after Flash-Decoding (Dao et al., 2023). A sequence's rows are cut into *chunks*; a *unit* is
one chunk under one kv head. A fixed grid of programs walks all units: each program reads the lengths on the device,
sums up the chunks of all sequences, and takes every P-th unit, so that a skewed batch balances, the host knows no
length, and one captured graph serves all lengths. A unit leaves a normalised partial output and its log-sum-exp in the
workspace; the second launch merges the partials of each sequence in their order. Where chunks begin follows from the
sequence's own length alone, so its result is bit for bit the same in any batch.

Legend: B sequences, S slots, T rows of a slot, H query heads, K kv heads, G = H / K, D head dim, C chunks.
Prefixes: p_ pointer, i_ index, m_ mask. Logarithms are to base 2 throughout: log2(e) is folded into the scale.
"""

import functools
import math

import torch
import triton
import triton.language as tl

from vmmkv.kernels import checks
from vmmkv.kernels.tiling import tiling

MAX_SEQUENCES = 4096
"""Every program sums up the chunks of all sequences in its registers."""

MAX_GROUP = 64
MAX_HEAD_DIM = 256

_LOG2_E = math.log2(math.e)
_NO_WINDOW = 2**31 - 1
_INTERPRETED_PROGRAMS = 4


@triton.jit
def _span(i_b, m_b, p_lengths, p_slots, p_limits, num_slots, num_rows, window, HAS_LIMIT: tl.constexpr):
    """Slot, first row and end row that sequence `i_b` attends to; an empty span where nothing may be read."""
    slot = tl.load(p_slots + i_b, mask=m_b, other=-1).to(tl.int64)
    length = tl.maximum(tl.load(p_lengths + i_b, mask=m_b, other=0), 0)
    m_slot = (slot >= 0) & (slot < num_slots)
    end = tl.where(m_slot, tl.minimum(length, num_rows), 0)
    if HAS_LIMIT:
        end = tl.minimum(end, tl.load(p_limits + slot, mask=m_slot, other=0))
    start = tl.maximum(length - window, 0)
    return slot, start.to(tl.int32), tl.maximum(end, start).to(tl.int32)


@triton.jit
def _chunk_size(rows, CHUNK_ROWS: tl.constexpr, MAX_CHUNKS: tl.constexpr):
    """Rows of each chunk (the last may have fewer) of a sequence of that many rows; see Tiling."""
    return CHUNK_ROWS * tl.maximum(tl.cdiv(rows, CHUNK_ROWS * MAX_CHUNKS), 1)


@triton.jit
def _load_tile(p_tile, stride_t, rows_left, TILE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TAIL: tl.constexpr):
    """[TILE, D_PAD] at a 64-bit base with 32-bit offsets. Rows at and past `rows_left` are not loaded, but zero."""
    i_t = tl.arange(0, TILE)[:, None]
    i_d = tl.arange(0, D_PAD)[None, :]
    pointers = p_tile + (i_t * stride_t + i_d)
    if TAIL:
        return tl.load(pointers, mask=(i_t < rows_left) & (i_d < D), other=0.0)
    elif D < D_PAD:
        return tl.load(pointers, mask=i_d < D, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _attend_tile(
    q, acc, peak, total, p_k, p_v, stride_kt, stride_vt, rows_left, scale_log2, softcap,
    TILE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax (Milakov & Gimelshein, 2018) over TILE rows."""
    k = _load_tile(p_k, stride_kt, rows_left, TILE, D, D_PAD, TAIL)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if HAS_SOFTCAP:
        # The launcher folded 2 / softcap into scale_log2 and log2(e) into softcap: tanh(x) = 1 - 2 / (exp(2 x) + 1).
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if TAIL:
        scores = tl.where((tl.arange(0, TILE) < rows_left)[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    rescale = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores - new_peak[:, None])
    v = _load_tile(p_v, stride_vt, rows_left, TILE, D, D_PAD, TAIL)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_peak, total * rescale + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["num_sequences", "num_slots", "num_rows", "window"])
def _attend_chunks(
    p_q, p_k, p_v, p_lengths, p_slots, p_limits, p_workspace,
    scale_log2, softcap, window, num_sequences, num_slots, num_rows,
    stride_qb, stride_qh, stride_ks, stride_kt, stride_kk, stride_vs, stride_vt, stride_vk,
    K: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, B_PAD: tl.constexpr,
    TILE: tl.constexpr, CHUNK_ROWS: tl.constexpr, MAX_CHUNKS: tl.constexpr,
    HAS_LIMIT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Program p of P: the units p, p + P, p + 2P, ... of all sequences, each into its place in the workspace.

    Neighbouring programs take the kv heads of one chunk, which are neighbours in memory.
    """
    i_b = tl.arange(0, B_PAD)
    m_b = i_b < num_sequences
    _, starts, ends = _span(i_b, m_b, p_lengths, p_slots, p_limits, num_slots, num_rows, window, HAS_LIMIT)
    nums_chunks = tl.cdiv(ends - starts, _chunk_size(ends - starts, CHUNK_ROWS, MAX_CHUNKS))
    chunk_ends = tl.cumsum(nums_chunks, 0)
    num_units = tl.sum(nums_chunks, 0) * K

    i_g = tl.arange(0, G_PAD)
    i_d = tl.arange(0, D_PAD)
    m_gd = (i_g < G)[:, None] & (i_d < D)[None, :]
    p_lse = p_workspace + tl.cast(num_sequences, tl.int64) * (MAX_CHUNKS * K * G * D)

    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        i_kv = tl.cast(unit % K, tl.int64)
        i_chunk = unit // K
        before = chunk_ends <= i_chunk
        b = tl.sum(before.to(tl.int32), 0)
        c = i_chunk - tl.max(tl.where(before, chunk_ends, 0), 0)
        slot, start, end = _span(b, True, p_lengths, p_slots, p_limits, num_slots, num_rows, window, HAS_LIMIT)
        chunk_size = _chunk_size(end - start, CHUNK_ROWS, MAX_CHUNKS)
        row = start + c * chunk_size
        rows_left = tl.minimum(chunk_size, end - row)

        b_64 = tl.cast(b, tl.int64)
        i_h = i_kv * G + i_g
        q = tl.load(p_q + b_64 * stride_qb + (i_h * stride_qh)[:, None] + i_d[None, :], mask=m_gd, other=0.0)
        row_64 = tl.cast(row, tl.int64)
        p_k_tile = p_k + slot * stride_ks + row_64 * stride_kt + i_kv * stride_kk
        p_v_tile = p_v + slot * stride_vs + row_64 * stride_vt + i_kv * stride_vk

        acc = tl.zeros([G_PAD, D_PAD], tl.float32)
        peak = tl.full([G_PAD], float("-inf"), tl.float32)
        total = tl.zeros([G_PAD], tl.float32)
        for _i_tile in range(0, rows_left // TILE):
            acc, peak, total = _attend_tile(
                q, acc, peak, total, p_k_tile, p_v_tile, stride_kt, stride_vt, TILE, scale_log2, softcap,
                TILE, D, D_PAD, HAS_SOFTCAP, False,
            )  # fmt: skip
            p_k_tile += TILE * stride_kt
            p_v_tile += TILE * stride_vt
        tail = rows_left % TILE
        if tail > 0:
            acc, peak, total = _attend_tile(
                q, acc, peak, total, p_k_tile, p_v_tile, stride_kt, stride_vt, tail, scale_log2, softcap,
                TILE, D, D_PAD, HAS_SOFTCAP, True,
            )  # fmt: skip

        i_partial = (b_64 * MAX_CHUNKS + c) * (K * G) + i_h
        tl.store(p_workspace + (i_partial * D)[:, None] + i_d[None, :], acc / total[:, None], mask=m_gd)
        tl.store(p_lse + i_partial, peak + tl.log2(total), mask=i_g < G)


@triton.jit(do_not_specialize=["num_slots", "num_rows", "window"])
def _merge_chunks(
    p_out, p_lengths, p_slots, p_limits, p_workspace, window, num_slots, num_rows, stride_ob, stride_oh,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    CHUNK_ROWS: tl.constexpr, MAX_CHUNKS: tl.constexpr, STEP: tl.constexpr, HAS_LIMIT: tl.constexpr,
):  # fmt: skip
    """Program (b, h): the partials of one query head, weighted by their log-sum-exp, in the order of the chunks."""
    b = tl.cast(tl.program_id(0), tl.int64)
    h = tl.program_id(1)
    _, start, end = _span(b, True, p_lengths, p_slots, p_limits, num_slots, num_rows, window, HAS_LIMIT)
    num_chunks = tl.cdiv(end - start, _chunk_size(end - start, CHUNK_ROWS, MAX_CHUNKS))
    p_partials = p_workspace + (b * MAX_CHUNKS * H + h) * D
    p_lse = p_workspace + tl.cast(tl.num_programs(0), tl.int64) * (MAX_CHUNKS * H * D) + (b * MAX_CHUNKS * H + h)

    i_all = tl.arange(0, MAX_CHUNKS)
    lse = tl.load(p_lse + i_all * H, mask=i_all < num_chunks, other=float("-inf"))
    # With no chunks the peak would be -inf, and -inf - -inf is NaN.
    peak = tl.where(num_chunks > 0, tl.max(lse, 0), 0.0)
    total = tl.where(num_chunks > 0, tl.sum(tl.exp2(lse - peak), 0), 1.0)

    i_d = tl.arange(0, D_PAD)
    acc = tl.zeros([D_PAD], tl.float32)
    for first in range(0, num_chunks, STEP):
        i_c = first + tl.arange(0, STEP)
        m_c = i_c < num_chunks
        weights = tl.exp2(tl.load(p_lse + i_c * H, mask=m_c, other=float("-inf")) - peak)
        mask = m_c[:, None] & (i_d < D)[None, :]
        partials = tl.load(p_partials + (i_c * (H * D))[:, None] + i_d[None, :], mask=mask, other=0.0)
        acc += tl.sum(weights[:, None] * partials, 0)
    p_row = p_out + b * stride_ob + tl.cast(h, tl.int64) * stride_oh
    tl.store(p_row + i_d, (acc / total).to(p_out.dtype.element_ty), mask=i_d < D)


def workspace_elements(num_sequences: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """float32 elements that `decode` needs as its workspace, whatever the lengths; `itemsize` is that of q, k and v."""
    max_chunks = tiling(num_heads, num_kv_heads, head_dim, itemsize).max_chunks
    return num_sequences * max_chunks * num_heads * (head_dim + 1)


@functools.cache
def _num_programs(device: torch.device, programs_per_sm: int) -> int:
    if device.type == "cpu":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * programs_per_sm


def decode(
    q_BHD: torch.Tensor,
    k_STKD: torch.Tensor,
    v_STKD: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    *,
    limit_S: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one new query of each sequence to the rows of its slot. Returns [B, H, D] of q's dtype (`out` if given).

    Sequence b attends to the rows [max(0, lengths_B[b] - window), lengths_B[b]) of slot slots_B[b]; the length counts the
    new token's own row, appended before. No other row is loaded. A length of 0, or a slot outside [0, S), gives zeros. With
    `limit_S` rows at and past limit_S[slot] are not loaded either, nor ever those past T: a sequence that has passed its
    limit idles, and what comes out for it is to be dropped.

    q_BHD: fp16, bf16 or fp32. k_STKD, v_STKD: of the same dtype, views of all slots as `cache.k(layer)` gives them.
    lengths_B, slots_B: int32 or int64 on the device. limit_S: int32 on the device, one a slot. scale: 1 / sqrt(D) if None.
    softcap: scores become softcap * tanh(score / softcap). workspace: float32, at least `workspace_elements(...)`, not shared
    by launches that may overlap; if None it comes from torch's allocator, which is right under graph capture as well.

    Cost: two launches, no synchronisation; safe while a graph is captured, and the graph serves every length.
    Raises: ValueError naming the argument.
    """
    device = q_BHD.device
    checks.runnable("q_BHD", device)
    num_slots, num_rows, num_kv_heads, head_dim = checks.arena(k_STKD, v_STKD, device)
    if q_BHD.dim() != 3:
        checks.refuse("q_BHD", f"of shape {tuple(q_BHD.shape)}", "3 dimensions: [sequences, query heads, head dim]")
    num_sequences, num_heads, _ = q_BHD.shape
    shape = (num_sequences, num_heads, head_dim)
    checks.vectors("q_BHD", q_BHD, shape, k_STKD.dtype, device)
    _check_heads(num_sequences, num_heads, num_kv_heads, head_dim)
    checks.index("lengths_B", lengths_B, num_sequences, device)
    checks.index("slots_B", slots_B, num_sequences, device)
    if limit_S is not None:
        checks.limits("limit_S", limit_S, num_slots, device)
    if window is not None and window < 1:
        checks.refuse("window", window, "at least 1, or None to attend to all rows")
    if softcap is not None and not softcap > 0.0:
        checks.refuse("softcap", softcap, "a positive number, or None for no cap")
    itemsize = q_BHD.element_size()
    cut = tiling(num_heads, num_kv_heads, head_dim, itemsize)
    checks.tile_offsets("k_STKD", k_STKD, cut.tile_rows)
    checks.tile_offsets("v_STKD", v_STKD, cut.tile_rows)
    num_partials = workspace_elements(num_sequences, num_heads, num_kv_heads, head_dim, itemsize)
    if out is None:
        out = torch.empty(shape, dtype=q_BHD.dtype, device=device)
    else:
        checks.vectors("out", out, shape, q_BHD.dtype, device)
    if workspace is None:
        workspace = torch.empty(num_partials, dtype=torch.float32, device=device)
    else:
        checks.workspace("workspace", workspace, num_partials, device)
    if num_sequences == 0:
        return out

    scale_log2 = (head_dim**-0.5 if scale is None else scale) * _LOG2_E
    if softcap is not None:
        scale_log2 *= 2.0 / softcap
    rows_seen = min(window or _NO_WINDOW, _NO_WINDOW)
    most_units = num_sequences * num_kv_heads * cut.max_chunks
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    with checks.on_device(device):
        _attend_chunks[(min(_num_programs(device, cut.programs_per_sm), most_units),)](
            q_BHD, k_STKD, v_STKD, lengths_B, slots_B, limit_S, workspace,
            scale_log2, (softcap or 0.0) * _LOG2_E, rows_seen, num_sequences, num_slots, num_rows,
            q_BHD.stride(0), q_BHD.stride(1),
            k_STKD.stride(0), k_STKD.stride(1), k_STKD.stride(2), v_STKD.stride(0), v_STKD.stride(1), v_STKD.stride(2),
            K=num_kv_heads, G=num_heads // num_kv_heads, G_PAD=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
            D=head_dim, D_PAD=padded_dim, B_PAD=max(16, triton.next_power_of_2(num_sequences)),
            TILE=cut.tile_rows, CHUNK_ROWS=cut.chunk_rows, MAX_CHUNKS=cut.max_chunks,
            HAS_LIMIT=limit_S is not None, HAS_SOFTCAP=softcap is not None,
            num_warps=cut.num_warps, num_stages=cut.num_stages,
        )  # fmt: skip
        _merge_chunks[(num_sequences, num_heads)](
            out, lengths_B, slots_B, limit_S, workspace, rows_seen, num_slots, num_rows, out.stride(0), out.stride(1),
            H=num_heads, D=head_dim, D_PAD=padded_dim,
            CHUNK_ROWS=cut.chunk_rows, MAX_CHUNKS=cut.max_chunks, STEP=16, HAS_LIMIT=limit_S is not None,
            num_warps=4,
        )  # fmt: skip
    return out


def _check_heads(num_sequences: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_sequences > MAX_SEQUENCES:
        checks.refuse("q_BHD", f"of {num_sequences} sequences", f"at most {MAX_SEQUENCES} a launch")
    if num_heads % num_kv_heads or not 0 < num_heads <= MAX_GROUP * num_kv_heads:
        wanted = f"a multiple of the {num_kv_heads} kv heads of k_STKD, at most {MAX_GROUP} times as many"
        checks.refuse("q_BHD", f"of {num_heads} query heads", wanted)
    if head_dim > MAX_HEAD_DIM:
        checks.refuse("q_BHD", f"of head dim {head_dim}", f"at most {MAX_HEAD_DIM}")
