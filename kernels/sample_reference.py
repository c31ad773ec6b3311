"""Sampling in plain torch: the truth of `sample.py`, token for token, and what an engine on a CPU runs.

    logits ──> / temperature ──> top-k ──> top-p of what top-k left ──> min-p ──> one token

A filter keeps the tokens at or above a threshold, and so all of those that are equally likely:

    top-k   the k likeliest, and those as likely as the last of them
    top-p   tokens before which, in order of probability, less than p of what top-k left has come; the likeliest always
    min-p   logits of at least the largest + temperature * log(min_p): probabilities of at least min_p times the largest

What is kept is drawn from by adding Gumbel noise to logits / temperature and taking the largest sum; see `noise.py` for the
arithmetic. A row's token depends on its logits, its parameters, its seed and its position, and on nothing else.

Legend: B rows of the batch, R of them that are drawn, V vocabulary, S slots.
"""

from typing import Final

import torch

from vmmkv.kernels import noise

NOT_A_NUMBER: Final = -1
"""In place of a token for a row with a NaN among its logits."""

COLDEST: Final = 1e-5
"""Temperatures below are greedy: divided by them, logits leave float32."""

LEAST_NORMAL: Final = 2.0**-126
"""Of float32. A min-p below it keeps every token."""

_ROWS: Final = 8
"""Drawn at once: the random words of a row take 8 bytes a token, several times over."""


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

    Where the temperature is below COLDEST the likeliest, the lowest id of them. Parameters as in `sample.sample`.
    """
    tokens_B = likeliest(logits_BV)
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


def likeliest(logits_BV: torch.Tensor) -> torch.Tensor:
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
    # Of equal logits the first has the fewest before it: if it is kept they all are, being at least the smallest kept.
    top_p_F1 = top_p_R[rows].double()[:, None]
    kept_FV = ((sums_FV - weights_FV).double() < top_p_F1 * sums_FV[:, -1:].double()) | (top_p_F1 >= 1.0)
    kept_FV = (kept_FV & (sorted_FV >= kth_F1)) | (sorted_FV == sorted_FV[:, :1])
    last_F1 = (kept_FV.sum(dim=-1, keepdim=True) - 1).clamp(min=0)  # none is kept of a row with NaN
    least_R[rows] = torch.maximum(least_R[rows], sorted_FV.gather(1, last_F1)[:, 0])
    return least_R


def adjust(
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
    """Penalties and biases, in place: see `adjust.adjust`."""
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


def forbid(logits_BV: torch.Tensor, rows_G: torch.Tensor, words_GW: torch.Tensor) -> None:
    """What a grammar does not allow, in place: see `token_mask.forbid`."""
    masks_N = (rows_G >= 0).nonzero()[:, 0]
    rows_N = rows_G[masks_N].long()
    # Bit i of a word is, on little-endian machines, as all are that this runs on, bit i % 8 of its byte i // 8.
    bytes_NE1 = words_GW[masks_N].view(torch.uint8)[:, :, None]
    bits_NV = (bytes_NE1 >> torch.arange(8, dtype=torch.uint8, device=words_GW.device)) & 1
    may_NV = bits_NV.flatten(1)[:, : logits_BV.shape[1]] != 0
    logits_BV[rows_N] = logits_BV[rows_N].masked_fill(~may_NV, -torch.inf)
