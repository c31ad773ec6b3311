"""Turning of rotary keys in place, after a compaction has moved their rows to the front.

Legend: L layers, T rows, K kv heads, D head dim, R = D / 2 angles. Prefixes: p_ pointer, i_ index, m_ mask.
"""

import torch
import triton
import triton.language as tl

from vmmkv_kernels import checks


@triton.jit
def _turn(
    p_keys, p_cos, p_sin, stride_l, stride_t, stride_k,
    K: tl.constexpr, R: tl.constexpr, K_PAD: tl.constexpr, R_PAD: tl.constexpr,
):  # fmt: skip
    """Turn the heads of a row in one layer."""
    i_t = tl.program_id(0).to(tl.int64)
    p_row = p_keys + i_t * stride_t + tl.program_id(1).to(tl.int64) * stride_l
    i_k, i_r = tl.arange(0, K_PAD), tl.arange(0, R_PAD)
    m_r = i_r < R
    m_kr = (i_k < K)[:, None] & m_r[None, :]
    cos = tl.load(p_cos + i_t * R + i_r, mask=m_r, other=0.0)[None, :]
    sin = tl.load(p_sin + i_t * R + i_r, mask=m_r, other=0.0)[None, :]
    p_low = p_row + (i_k * stride_k)[:, None] + i_r[None, :]
    low = tl.load(p_low, mask=m_kr, other=0.0).to(tl.float32)
    high = tl.load(p_low + R, mask=m_kr, other=0.0).to(tl.float32)
    tl.store(p_low, (low * cos + high * sin).to(p_keys.dtype.element_ty), mask=m_kr)
    tl.store(p_low + R, (high * cos - low * sin).to(p_keys.dtype.element_ty), mask=m_kr)


def turn(keys_LTKD: torch.Tensor, back_T: torch.Tensor, inv_freq_R: torch.Tensor) -> None:
    """Turn the keys of each row back by so many positions, in all layers and in place. See `vmmkv_kernels.reference.turn`.

    - keys_LTKD: float16, bfloat16 or float32, its last dimension contiguous.
    - back_T: integers, on the device. inv_freq_R: float32, the model's angle for one position.

    Cost: one launch, and a few of torch for cosines and sines [T, R]; no synchronisation.
    Raises: ValueError naming the argument.
    """
    device = keys_LTKD.device
    checks.runnable("keys_LTKD", device)
    checks.floats("keys_LTKD", keys_LTKD.dtype)
    num_layers, num_rows, num_heads, head_dim = keys_LTKD.shape
    checks.index("back_T", back_T, num_rows, device)
    checks.exactly("inv_freq_R", inv_freq_R, torch.float32, (head_dim // 2,), device)
    if keys_LTKD.stride(3) != 1:
        checks.refuse("keys_LTKD", f"of strides {keys_LTKD.stride()}", "a contiguous last dimension")
    angles_TR = back_T.float()[:, None] * inv_freq_R
    if keys_LTKD.numel():
        with checks.on_device(device):
            _turn[(num_rows, num_layers)](
                keys_LTKD, angles_TR.cos(), angles_TR.sin(), *keys_LTKD.stride()[:3],
                K=num_heads, R=head_dim // 2, K_PAD=triton.next_power_of_2(num_heads),
                R_PAD=triton.next_power_of_2(head_dim // 2), num_warps=2,
            )  # fmt: skip
