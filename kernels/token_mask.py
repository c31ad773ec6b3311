"""What a grammar does not allow, out of the logits, in one launch.

Bit i of a mask's word w is token 32 * w + i, as in xgrammar's bitmasks. Legend: B rows of the batch, G of them that follow a
grammar, V vocabulary, W words of a mask. Prefixes: p_ pointer, i_ index, m_ mask.
"""

import torch
import triton
import triton.language as tl

from vmmkv.kernels import checks
from vmmkv.units import ceil_div

_TILE_WORDS = 64


@triton.jit(do_not_specialize=["num_rows"])
def _forbid(p_logits, p_rows, p_words, num_rows, num_tokens, num_words, stride, TILE_WORDS: tl.constexpr):
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


def forbid(logits_BV: torch.Tensor, rows_G: torch.Tensor, words_GW: torch.Tensor) -> None:
    """Set the logits of row rows_G[g] to -inf, in place, of all tokens whose bit in words_GW[g] is 0.

    Allowed logits stay as they are, and are not read. The mask of a row that there is not, -1 for one, is
    passed over.

    logits_BV: fp16, bf16 or fp32; elements contiguous. rows_G: int32 or int64, no row twice. words_GW: contiguous int32 with
    W = ceil(V / 32) or more.

    Cost: one launch, no allocation, no synchronisation; safe while a graph is captured. Bytes: the masks, and the logits that
    are written. Raises: ValueError naming the argument.
    """
    device = logits_BV.device
    num_rows, num_tokens = checks.logits("logits_BV", logits_BV)
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
        _forbid[(ceil_div(least, _TILE_WORDS), num_masks)](
            logits_BV, rows_G, words_GW, num_rows, num_tokens, words_GW.shape[1], logits_BV.stride(0),
            TILE_WORDS=_TILE_WORDS, num_warps=4,
        )  # fmt: skip
