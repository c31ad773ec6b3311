"""Plain torch, float32: what the kernels must give. Slow, obvious, and the truth of the tests.

With `dtype` the same arithmetic is done in that type instead: the error of *that* against float32 is the yardstick for a
kernel's own error (the rule of FlashAttention's tests: at most twice as large).

Legend: B sequences, N tokens, S slots, T rows of a slot, H query heads, K kv heads, D head dim. A sequence is the rows
[0, length) of its slot. Rows at and past the length are never touched, since nothing may be mapped there.
"""

import math

import torch


def attend(
    q_NHD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    positions_N: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Causal attention of queries at `positions_N` over one sequence's T rows.

    The query at position p attends to the rows [max(0, p + 1 - window), p + 1). Query head h reads kv head
    h // (H / K). Scores are `softcap * tanh(scale * qk / softcap)`; `scale` defaults to 1 / sqrt(D). A query that
    attends to nothing gives zeros. Returns [N, H, D] of `dtype`.
    """
    num_queries, num_heads, head_dim = q_NHD.shape
    num_rows, num_kv_heads, _ = k_TKD.shape
    if num_rows == 0:
        return torch.zeros(num_queries, num_heads, head_dim, dtype=dtype, device=q_NHD.device)
    k_THD = k_TKD.to(dtype).repeat_interleave(num_heads // num_kv_heads, dim=1)
    v_THD = v_TKD.to(dtype).repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores_HNT = torch.einsum("nhd,thd->hnt", q_NHD.to(dtype), k_THD) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores_HNT = softcap * torch.tanh(scores_HNT / softcap)
    rows_T = torch.arange(num_rows, device=q_NHD.device)
    seen_NT = rows_T[None, :] <= positions_N[:, None]
    if window is not None:
        seen_NT &= rows_T[None, :] > positions_N[:, None] - window
    probabilities_HNT = torch.softmax(scores_HNT.masked_fill(~seen_NT, -math.inf), dim=-1)
    probabilities_HNT = probabilities_HNT.masked_fill(~seen_NT.any(dim=-1)[:, None], 0.0)
    return torch.einsum("hnt,thd->nhd", probabilities_HNT, v_THD)


def decode(
    q_BHD: torch.Tensor,
    k_STKD: torch.Tensor,
    v_STKD: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One new query for each sequence, at position length - 1. Returns [B, H, D] of `dtype`."""
    out_BHD = torch.zeros(q_BHD.shape, dtype=dtype, device=q_BHD.device)
    for b, (slot, length) in enumerate(zip(slots_B.tolist(), lengths_B.tolist(), strict=True)):
        out_BHD[b : b + 1] = attend(
            q_BHD[b : b + 1],
            k_STKD[slot, :length],
            v_STKD[slot, :length],
            lengths_B[b : b + 1] - 1,
            scale=scale,
            window=window,
            softcap=softcap,
            dtype=dtype,
        )
    return out_BHD


def prefill(
    q_NHD: torch.Tensor,
    k_STKD: torch.Tensor,
    v_STKD: torch.Tensor,
    counts_B: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The last `counts_B[b]` tokens of each sequence as queries, packed one sequence after the other in `q_NHD`.

    Lengths count the queries' own rows, which are in the slot already; a count of 1 is decode. Returns [N, H, D].
    """
    out_NHD = torch.zeros(q_NHD.shape, dtype=dtype, device=q_NHD.device)
    start = 0
    for count, length, slot in zip(counts_B.tolist(), lengths_B.tolist(), slots_B.tolist(), strict=True):
        out_NHD[start : start + count] = attend(
            q_NHD[start : start + count],
            k_STKD[slot, :length],
            v_STKD[slot, :length],
            torch.arange(length - count, length, device=q_NHD.device),
            scale=scale,
            window=window,
            softcap=softcap,
            dtype=dtype,
        )
        start += count
    return out_NHD


def append(
    k_NKD: torch.Tensor,
    v_NKD: torch.Tensor,
    k_STKD: torch.Tensor,
    v_STKD: torch.Tensor,
    slots_N: torch.Tensor,
    positions_N: torch.Tensor,
    limit_S: torch.Tensor,
) -> None:
    """Write token n's K and V at [slots_N[n], positions_N[n]] if 0 <= position < limit_S[slot]; else nowhere."""
    num_slots, num_rows = k_STKD.shape[:2]
    limits = limit_S.tolist()
    for n, (slot, position) in enumerate(zip(slots_N.tolist(), positions_N.tolist(), strict=True)):
        if 0 <= slot < num_slots and 0 <= position < min(limits[slot], num_rows):
            k_STKD[slot, position] = k_NKD[n]
            v_STKD[slot, position] = v_NKD[n]
