"""Changes to logits before they are sampled from, in place: penalties and biases; token masks. One launch each.

Bit i of a mask's word w is token 32 * w + i, as in xgrammar's bitmasks.

Legend: B rows of the batch, G masks, W words of a mask, V vocabulary, S slots, R rows of state. Prefixes: p_ pointer, i_ index,
m_ mask.
"""

import torch
import triton
import triton.language as tl

from vmmkv.units import ceil_div
from vmmkv_kernels import checks

_TILE = 2048


@triton.jit(do_not_specialize=["num_slots", "num_state_rows"])
def _apply_penalties(
    p_logits, p_slots, p_state_rows, p_repetition, p_frequency, p_presence, p_counts, p_prompt, p_bias,
    num_slots, num_state_rows, num_tokens, stride, TILE: tl.constexpr,
):  # fmt: skip
    """Program (t, b): tile t of row b."""
    b = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + b).to(tl.int64)
    m_slot = (slot >= 0) & (slot < num_slots)
    i_state = tl.load(p_state_rows + slot, mask=m_slot, other=0).to(tl.int64)
    if (i_state > 0) & (i_state < num_state_rows):
        repetition = tl.load(p_repetition + slot)
        frequency = tl.load(p_frequency + slot)
        presence = tl.load(p_presence + slot)
        i_v = tl.program_id(0) * TILE + tl.arange(0, TILE)
        m_v = i_v < num_tokens
        i_seen = i_state * num_tokens + i_v
        logits = tl.load(p_logits + b * stride + i_v, mask=m_v, other=0.0).to(tl.float32)
        counts = tl.load(p_counts + i_seen, mask=m_v, other=0)
        in_prompt = tl.load(p_prompt + i_seen, mask=m_v, other=0)
        repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
        logits = tl.where((counts > 0) | (in_prompt != 0), repeated, logits)
        logits = logits - counts.to(tl.float32) * frequency
        logits = logits - tl.where(counts > 0, presence, 0.0)
        if p_bias is not None:
            logits += tl.load(p_bias + i_seen, mask=m_v, other=0.0)
        tl.store(p_logits + b * stride + i_v, logits.to(p_logits.dtype.element_ty), mask=m_v)


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
    """Apply the penalties and biases of slot slots_B[b] to the logits of row b, in place. In float32, rounded once.

    Row state_row_S[slot] of the state is the slot's. State row 0 means none, and leaves the logits as they are. In this order:

    1. Logits of tokens in the prompt (prompt_RV, uint8) or generated before (counts_RV, int32) are divided by the repetition
       penalty, or multiplied if they are negative (Keskar et al., 2019).
    2. frequency_S times the count, and presence_S for any count, are subtracted (as OpenAI defines them).
    3. bias_RV (float32) is added.

    logits_BV: fp16, bf16 or fp32; elements contiguous. slots_B: int32 or int64. state_row_S: int32; penalties: float32.

    Cost: one launch, no allocation, no synchronisation; safe while a graph is captured. Rows without state read nothing.
    Raises: ValueError naming the argument.
    """
    device = logits_BV.device
    num_rows, num_tokens = checks.logits(logits_BV)
    checks.index("slots_B", slots_B, num_rows, device)
    num_slots, state = state_row_S.shape[0], (counts_RV.shape[0], num_tokens)
    checks.exactly("state_row_S", state_row_S, torch.int32, (num_slots,), device)
    checks.exactly("repetition_S", repetition_S, torch.float32, (num_slots,), device)
    checks.exactly("frequency_S", frequency_S, torch.float32, (num_slots,), device)
    checks.exactly("presence_S", presence_S, torch.float32, (num_slots,), device)
    checks.exactly("counts_RV", counts_RV, torch.int32, state, device)
    checks.exactly("prompt_RV", prompt_RV, torch.uint8, state, device)
    if bias_RV is not None:
        checks.exactly("bias_RV", bias_RV, torch.float32, state, device)
    if num_rows == 0:
        return
    with checks.on_device(device):
        _apply_penalties[(triton.cdiv(num_tokens, _TILE), num_rows)](
            logits_BV, slots_B, state_row_S, repetition_S, frequency_S, presence_S, counts_RV, prompt_RV, bias_RV,
            num_slots, state[0], num_tokens, logits_BV.stride(0), TILE=_TILE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


_TILE_WORDS = 64


@triton.jit(do_not_specialize=["num_rows"])
def _apply_token_mask(p_logits, p_rows, p_words, num_rows, num_tokens, num_words, stride, TILE_WORDS: tl.constexpr):
    """Program (t, g): tile t of mask g."""
    g = tl.program_id(1).to(tl.int64)
    i_row = tl.load(p_rows + g).to(tl.int64)
    if (i_row >= 0) & (i_row < num_rows):
        i_word = tl.program_id(0) * TILE_WORDS + tl.arange(0, TILE_WORDS)
        words = tl.load(p_words + g * num_words + i_word, mask=i_word < num_words, other=-1)
        i_bit = tl.arange(0, 32)
        m_forbidden = ((words[:, None] >> i_bit[None, :]) & 1) == 0
        i_token = i_word[:, None] * 32 + i_bit[None, :]
        forbidden = tl.full((TILE_WORDS, 32), float("-inf"), p_logits.dtype.element_ty)
        tl.store(p_logits + i_row * stride + i_token, forbidden, mask=m_forbidden & (i_token < num_tokens))


def apply_token_mask(logits_BV: torch.Tensor, rows_G: torch.Tensor, words_GW: torch.Tensor) -> None:
    """Set the logits of row rows_G[g] to -inf, in place, of all tokens whose bit in words_GW[g] is 0.

    Allowed logits stay as they are, and are not read. A mask whose row does not exist, such as -1, is skipped.

    logits_BV: fp16, bf16 or fp32; elements contiguous. rows_G: int32 or int64, no row twice. words_GW: contiguous int32 with
    W = ceil(V / 32) or more.

    Cost: one launch, no allocation, no synchronisation; safe while a graph is captured. Bytes: the masks, and the logits that
    are written.
    Raises: ValueError naming the argument.
    """
    device = logits_BV.device
    num_rows, num_tokens = checks.logits(logits_BV)
    num_masks = rows_G.shape[0] if rows_G.dim() else 0
    checks.index("rows_G", rows_G, num_masks, device)
    least = ceil_div(num_tokens, 32)
    fits = words_GW.dim() == 2 and words_GW.shape[0] == num_masks and words_GW.shape[1] >= least
    if words_GW.dtype != torch.int32 or words_GW.device != device or not fits or not words_GW.is_contiguous():
        given = f"{words_GW.dtype} of shape {tuple(words_GW.shape)} on {words_GW.device}"
        checks.refuse("words_GW", given, f"contiguous torch.int32 of shape ({num_masks}, {least}) on {device}")
    if num_masks == 0:
        return
    with checks.on_device(device):
        _apply_token_mask[(ceil_div(least, _TILE_WORDS), num_masks)](
            logits_BV, rows_G, words_GW, num_rows, num_tokens, words_GW.shape[1], logits_BV.stride(0),
            TILE_WORDS=_TILE_WORDS, num_warps=4,
        )  # fmt: skip
