"""Plain torch: what the kernels compute. Slow, obvious, and the truth of the tests.

Attention is float32. With `dtype` the same arithmetic is done in that type instead: the error of *that* against float32 is the
yardstick for a kernel's own error (the rule of FlashAttention's tests: at most twice as large). Attention takes plain K and V;
of quantised ones, `quantise.dequantise(payload, scale)` gives them. A sequence is the rows [0, length) of its slot. Rows at and
past the length are never touched, since nothing may be mapped there.

Sampling gives the tokens of the kernels one for one, and is what an engine on a CPU runs:

    logits ──> / temperature ──> top-k ──> top-p of what top-k left ──> min-p ──> one token

A filter keeps the tokens at or above a threshold, and so all tokens that are equally likely:

    top-k   the k likeliest, and those as likely as the last of them
    top-p   tokens before which, in order of probability, less than p of what top-k left has come; the likeliest always
    min-p   logits of at least the largest + temperature * log(min_p): probabilities of at least min_p times the largest

The token is the largest sum of logits / temperature and Gumbel noise among the tokens kept; `sampling/noise.py` has the
arithmetic. It depends on the row's logits, parameters, seed and position, and on nothing else.

Legend: B sequences, N tokens, S slots, T rows of a slot, H query heads, K kv heads, D head dim, W payload width in elements, R
= D / 2 angles, E elements or bytes of a row, G columns of gate and up, M copies, V vocabulary; in sampling R rows that are
drawn or rows of state, G masks, W words of a mask.
"""

import math
from typing import Any, Final

import torch

from vmmkv_kernels.quantise import kind_of, quantise
from vmmkv_kernels.sampling import noise

NOT_A_NUMBER: Final = -1
"""The token of a row with a NaN among its logits."""

COLDEST: Final = 1e-5
"""Lowest temperature that is not greedy: divided by a lower one, logits leave float32."""

LEAST_NORMAL: Final = 2.0**-126
"""Smallest normal float32. A min-p below it keeps every token."""

_QUERIES: Final = 128
"""Most queries that are scored at once, in column sums: more are slower, since each is scored over the rows of the last one."""

MOST_WEIGHTS: Final = 2**26
"""Most weights of these queries: one for each query, row and head takes 4 bytes, several times over."""

_ROWS: Final = 8
"""Most rows drawn at once: the random words of a row take 8 bytes a token, several times over."""


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
    v_THD = v_TKD.to(dtype).repeat_interleave(q_NHD.shape[1] // v_TKD.shape[1], dim=1)
    return torch.einsum("hnt,thd->nhd", _weights(q_NHD, k_TKD, positions_N, scale, window, softcap, dtype), v_THD)


def _weights(
    q_NHD: torch.Tensor,
    k_TKD: torch.Tensor,
    positions_N: torch.Tensor,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[H, N, T] by which `attend` adds up values."""
    k_THD = k_TKD.to(dtype).repeat_interleave(q_NHD.shape[1] // k_TKD.shape[1], dim=1)
    scores_HNT = torch.einsum("nhd,thd->hnt", q_NHD.to(dtype), k_THD) * (q_NHD.shape[2] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores_HNT = softcap * torch.tanh(scores_HNT / softcap)
    rows_T = torch.arange(len(k_TKD), device=q_NHD.device)
    seen_NT = rows_T[None, :] <= positions_N[:, None]
    if window is not None:
        seen_NT &= rows_T[None, :] > positions_N[:, None] - window
    weights_HNT = torch.softmax(scores_HNT.masked_fill(~seen_NT, -math.inf), dim=-1)
    return weights_HNT.masked_fill(~seen_NT.any(dim=-1)[:, None], 0.0)


def prefill(
    q_NHD: torch.Tensor,
    k_STKD: torch.Tensor,
    v_STKD: torch.Tensor,
    counts_B: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> torch.Tensor:
    """Attention of the last `counts_B[b]` tokens of each sequence, packed one sequence after the other in `q_NHD`.

    Lengths count the queries' own rows, which are in the slot already; a count of 1 is decode. Options as for `attend`.
    Returns [N, H, D] of `dtype`.
    """
    out_NHD = torch.zeros(q_NHD.shape, dtype=dtype, device=q_NHD.device)
    start = 0
    for count, length, slot in zip(counts_B.tolist(), lengths_B.tolist(), slots_B.tolist(), strict=True):
        positions_N = torch.arange(length - count, length, device=q_NHD.device)
        rows = k_STKD[slot, :length], v_STKD[slot, :length]
        out_NHD[start : start + count] = attend(q_NHD[start : start + count], *rows, positions_N, dtype=dtype, **options)
        start += count
    return out_NHD


def decode(
    q_BHD: torch.Tensor,
    k_STKD: torch.Tensor,
    v_STKD: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Attention of one new query for each sequence, at position length - 1. Options as `attend`. Returns [B, H, D]."""
    return prefill(q_BHD, k_STKD, v_STKD, torch.ones_like(lengths_B), lengths_B, slots_B, **options)


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
    """Attention of the last tokens of each sequence to each row of its slot: see `attention.column_sums.column_sums`.

    `lse_LNH` is not needed, and changes nothing.
    """
    if out is None:
        out = torch.zeros(len(q_LNHD), len(lengths_B), k_LSTKD.shape[2], device=q_LNHD.device)
    starts = query_starts.tolist()
    for b, (start, end, length, slot) in enumerate(zip(starts, starts[1:], lengths_B.tolist(), slots_B.tolist(), strict=False)):
        num_queries = max(1, min(_QUERIES, MOST_WEIGHTS // (q_LNHD.shape[2] * max(1, length))))
        for first in range(start, end, num_queries):
            last = min(first + num_queries, end)
            num_rows = length - end + last  # that these queries see
            positions_N = torch.arange(num_rows - last + first, num_rows, device=out.device)
            for q_NHD, k_STKD, sums_BC in zip(q_LNHD, k_LSTKD, out, strict=True):
                rows = q_NHD[first:last], k_STKD[slot, :num_rows], positions_N
                sums_T = _weights(*rows, scale, None, softcap, torch.float32).sum(dim=(0, 1))
                sums_BC[b, :num_rows] += sums_T[: sums_BC.shape[1]]
    return out


def rotate(x_NHD: torch.Tensor, positions_N: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """Rotate elements j and j + D / 2 of each vector by angle j of its position. Returns float32.

    A vector whose position the tables do not have stays as it is.
    """
    known_N = (positions_N >= 0) & (positions_N < cos_TR.shape[0])
    rows_N = positions_N.long().where(known_N, 0)
    cos_N1R, sin_N1R = cos_TR[rows_N].unsqueeze(1), sin_TR[rows_N].unsqueeze(1)
    low_NHR, high_NHR = x_NHD.float().chunk(2, dim=-1)
    turned_NHD = torch.cat([low_NHR * cos_N1R - high_NHR * sin_N1R, high_NHR * cos_N1R + low_NHR * sin_N1R], dim=-1)
    return turned_NHD.where(known_N[:, None, None], x_NHD.float())


def turn(keys_TKD: torch.Tensor, back_T: torch.Tensor, inv_freq_R: torch.Tensor) -> torch.Tensor:
    """Rotary keys turned back by so many positions each, as if their tokens had stood there; in the keys' dtype.

    Elements j and j + D / 2 of a head are turned together, as in Llama. `inv_freq_R`: the model's angle for one position.
    """
    angles_T1R = back_T.to(keys_TKD.device, torch.float32)[:, None, None] * inv_freq_R.float()
    cos_T1R, sin_T1R = angles_T1R.cos(), angles_T1R.sin()
    low_TKR, high_TKR = keys_TKD.float().chunk(2, dim=-1)
    turned_TKD = torch.cat([low_TKR * cos_T1R + high_TKR * sin_T1R, high_TKR * cos_T1R - low_TKR * sin_T1R], dim=-1)
    return turned_TKD.to(keys_TKD.dtype)


def rms_norm(x_NE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension, rounded to x's dtype before and after the weight. Returns x's shape and dtype."""
    x32_NE = x_NE.float()
    normed_NE = x32_NE * torch.rsqrt(x32_NE.square().mean(dim=-1, keepdim=True) + eps)
    return normed_NE.to(x_NE.dtype) * weight_E


def silu_mul(gate_up_NG: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of the columns, rounded to their dtype, times the second half. Returns [N, G / 2]."""
    gate_NF, up_NF = gate_up_NG.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_NF.float()).to(gate_up_NG.dtype) * up_NF


def append(
    k_NKD: torch.Tensor,
    v_NKD: torch.Tensor,
    k_STKW: torch.Tensor,
    v_STKW: torch.Tensor,
    slots_N: torch.Tensor,
    rows_N: torch.Tensor,
    limit_S: torch.Tensor,
    *,
    positions_N: torch.Tensor | None = None,
    q_NHD: torch.Tensor | None = None,
    cos_TR: torch.Tensor | None = None,
    sin_TR: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> None:
    """Write token n's K and V at [slots_N[n], rows_N[n]] if 0 <= row < limit_S[slot]; else nowhere.

    With norms the heads of K are normed first, and those of q in place. With angles K is rotated then, and q in place, by
    positions_N, or else by rows_N; a token whose position has no angle is not written, and its query stays as it is. A
    quantised view comes with scales: token scales (3 dimensions) are written too, head scales are used.
    """
    num_slots, num_rows = k_STKW.shape[:2]
    kind = kind_of(k_STKW.dtype)
    positions_N = rows_N if positions_N is None else positions_N
    if k_norm_D is not None:
        k_NKD = rms_norm(k_NKD, k_norm_D, norm_eps)
    changed_NHD = q_NHD if q_NHD is None or q_norm_D is None else rms_norm(q_NHD, q_norm_D, norm_eps)
    if cos_TR is not None and sin_TR is not None:
        known_N = (positions_N >= 0) & (positions_N < cos_TR.shape[0])
        rows_N = rows_N.where(known_N, -1)
        k_NKD = rotate(k_NKD, positions_N, cos_TR, sin_TR)
        if q_NHD is not None and changed_NHD is not None:
            rotated_NHD = rotate(changed_NHD, positions_N, cos_TR, sin_TR).to(q_NHD.dtype)
            changed_NHD = rotated_NHD.where(known_N[:, None, None], q_NHD)
    if q_NHD is not None and changed_NHD is not None:
        q_NHD.copy_(changed_NHD)
    limits = limit_S.tolist()
    for n, (slot, row) in enumerate(zip(slots_N.tolist(), rows_N.tolist(), strict=True)):
        if not (0 <= slot < num_slots and 0 <= row < min(limits[slot], num_rows)):
            continue
        for new_KD, view_STKW, scale in ((k_NKD[n], k_STKW, k_scale), (v_NKD[n], v_STKW, v_scale)):
            if kind is None or scale is None:
                view_STKW[slot, row] = new_KD.to(view_STKW.dtype)
            elif scale.dim() == 1:
                view_STKW[slot, row] = quantise(new_KD, kind, scale)[0]
            else:
                view_STKW[slot, row], scale[slot, row] = quantise(new_KD, kind)


def sample(
    logits_BV: torch.Tensor,
    slots_B: torch.Tensor,
    positions_B: torch.Tensor,
    *,
    temperature_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
    seed_S: torch.Tensor,
) -> torch.Tensor:
    """[B] int32 token ids: of row b with the parameters of slot slots_B[b], behind positions_B[b] tokens.

    Below a temperature of COLDEST it is the argmax. Parameters as in `sampling.sample.sample`.
    """
    tokens_B = argmax(logits_BV)
    slots_B = slots_B.long()
    for rows_R in (temperature_S[slots_B] >= COLDEST).nonzero()[:, 0].split(_ROWS):
        slots_R, logits_RV = slots_B[rows_R], logits_BV[rows_R].float()
        inverse_R1 = (1.0 / temperature_S[slots_R])[:, None]
        words_RV = noise.words(seed_S[slots_R], positions_B[rows_R], logits_BV.shape[1])
        sums_RV = logits_RV * inverse_R1 + noise.gumbel(words_RV)
        least_R1 = least_kept(logits_RV, temperature_S[slots_R], top_k_S[slots_R], top_p_S[slots_R], min_p_S[slots_R])[:, None]
        drawn_R = sums_RV.masked_fill(logits_RV < least_R1, -torch.inf).argmax(dim=-1)
        tokens_B[rows_R] = torch.where(tokens_B[rows_R] == NOT_A_NUMBER, NOT_A_NUMBER, drawn_R).int()
    return tokens_B


def argmax(logits_BV: torch.Tensor) -> torch.Tensor:
    """[B] int32: the lowest id of the largest logit, or NOT_A_NUMBER."""
    return logits_BV.argmax(dim=-1).masked_fill(logits_BV.isnan().any(dim=-1), NOT_A_NUMBER).int()


def least_kept(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> torch.Tensor:
    """[R] float32: the smallest logit that top-k, top-p and min-p keep, of float32 logits."""
    num_tokens = logits_RV.shape[1]
    peak_R = logits_RV.amax(dim=-1)
    shares_R = noise.log(min_p_R.clamp(min=LEAST_NORMAL))
    least_R = torch.where(min_p_R >= LEAST_NORMAL, peak_R + temperature_R * shares_R, -torch.inf)
    filtered = ((top_k_R > 0) & (top_k_R < num_tokens)) | (top_p_R < 1.0)
    rows = filtered.nonzero()[:, 0]
    if not len(rows):
        return least_R
    sorted_FV = logits_RV[rows].sort(dim=-1, descending=True).values
    top_k_F1 = torch.where(top_k_R[rows] > 0, top_k_R[rows], num_tokens).clamp(max=num_tokens).long()[:, None]
    kth_F1 = sorted_FV.gather(1, top_k_F1 - 1)
    weights_FV = noise.weights(sorted_FV, sorted_FV[:, :1], (1.0 / temperature_R[rows])[:, None])
    sums_FV = weights_FV.masked_fill(sorted_FV < kth_F1, 0).cumsum(dim=-1)
    # The first of equal logits has the fewest before it: if it is kept they all are, being at least the smallest kept.
    top_p_F1 = top_p_R[rows].double()[:, None]
    kept_FV = ((sums_FV - weights_FV).double() < top_p_F1 * sums_FV[:, -1:].double()) | (top_p_F1 >= 1.0)
    kept_FV = (kept_FV & (sorted_FV >= kth_F1)) | (sorted_FV == sorted_FV[:, :1])
    last_F1 = (kept_FV.sum(dim=-1, keepdim=True) - 1).clamp(min=0)  # none is kept of a row with NaN
    least_R[rows] = torch.maximum(least_R[rows], sorted_FV.gather(1, last_F1)[:, 0])
    return least_R


def apply_penalties(
    logits_BV: torch.Tensor,
    slots_B: torch.Tensor,
    *,
    state_row_S: torch.Tensor,
    repetition_S: torch.Tensor,
    frequency_S: torch.Tensor,
    presence_S: torch.Tensor,
    counts_RV: torch.Tensor,
    prompt_RV: torch.Tensor,
    bias_RV: torch.Tensor | None,
) -> None:
    """Penalties and biases, in place: see `sampling.logits.apply_penalties`."""
    state_rows_B = state_row_S[slots_B.long()].long()
    rows_A = (state_rows_B > 0).nonzero()[:, 0]
    state_A, slots_A = state_rows_B[rows_A], slots_B.long()[rows_A]
    repetition_A1, frequency_A1, presence_A1 = (each[slots_A][:, None] for each in (repetition_S, frequency_S, presence_S))
    logits_AV, counts_AV = logits_BV[rows_A].float(), counts_RV[state_A]
    seen_AV = (counts_AV > 0) | (prompt_RV[state_A] != 0)
    repeated_AV = torch.where(logits_AV > 0, logits_AV / repetition_A1, logits_AV * repetition_A1)
    logits_AV = torch.where(seen_AV, repeated_AV, logits_AV)
    logits_AV = logits_AV - counts_AV.float() * frequency_A1
    logits_AV = logits_AV - torch.where(counts_AV > 0, presence_A1, 0.0)
    if bias_RV is not None:
        logits_AV = logits_AV + bias_RV[state_A]
    logits_BV[rows_A] = logits_AV.to(logits_BV.dtype)


def apply_token_mask(logits_BV: torch.Tensor, rows_G: torch.Tensor, words_GW: torch.Tensor) -> None:
    """Set the tokens that a mask forbids to -inf, in place: see `sampling.logits.apply_token_mask`."""
    masks_N = (rows_G >= 0).nonzero()[:, 0]
    rows_N = rows_G[masks_N].long()
    # Bit i of a word is bit i % 8 of its byte i // 8 on little-endian machines, which all supported ones are.
    bytes_NE1 = words_GW[masks_N].view(torch.uint8)[:, :, None]
    bits_NV = (bytes_NE1 >> torch.arange(8, dtype=torch.uint8, device=words_GW.device)) & 1
    may_NV = bits_NV.flatten(1)[:, : logits_BV.shape[1]] != 0
    logits_BV[rows_N] = logits_BV[rows_N].masked_fill(~may_NV, -torch.inf)
