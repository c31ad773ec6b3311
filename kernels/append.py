"""Append: write new tokens' K and V into their slots, in place, in one launch.

Legend: N new tokens, S slots, T rows of a slot, K kv heads, D head dim.
"""

import torch
import triton
import triton.language as tl

from vmmkv.kernels import checks
from vmmkv.units import ceil_div

_PROGRAM_ELEMENTS = 2048
"""Elements of K that one program of 4 warps moves: two 16-byte loads a thread in 16-bit types."""


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "num_rows"])
def _append(
    p_k_new, p_v_new, p_k, p_v, p_slots, p_positions, p_limits,
    num_tokens, num_slots, num_rows,
    stride_kn, stride_kh, stride_vn, stride_vh,
    stride_ks, stride_kt, stride_kk, stride_vs, stride_vt, stride_vk,
    K: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Program (n, e): tokens [n, n + 1) * TOKENS, elements [e, e + 1) * ELEMENTS of the K * D of each."""
    i_n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    m_n = i_n < num_tokens
    slot = tl.load(p_slots + i_n, mask=m_n, other=-1).to(tl.int64)
    position = tl.load(p_positions + i_n, mask=m_n, other=-1).to(tl.int64)
    limit = tl.load(p_limits + slot, mask=(slot >= 0) & (slot < num_slots), other=0)
    m_row = (position >= 0) & (position < tl.minimum(limit, num_rows))

    i_e = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    i_h = (i_e // D).to(tl.int64)
    i_d = i_e % D
    mask = m_row[:, None] & (i_e < K * D)[None, :]
    n_64 = i_n.to(tl.int64)

    k_new = tl.load(p_k_new + (n_64 * stride_kn)[:, None] + (i_h * stride_kh + i_d)[None, :], mask=mask)
    v_new = tl.load(p_v_new + (n_64 * stride_vn)[:, None] + (i_h * stride_vh + i_d)[None, :], mask=mask)
    o_k = (slot * stride_ks + position * stride_kt)[:, None] + (i_h * stride_kk + i_d)[None, :]
    o_v = (slot * stride_vs + position * stride_vt)[:, None] + (i_h * stride_vk + i_d)[None, :]
    tl.store(p_k + o_k, k_new, mask=mask)
    tl.store(p_v + o_v, v_new, mask=mask)


def append(
    k_NKD: torch.Tensor,
    v_NKD: torch.Tensor,
    k_STKD: torch.Tensor,
    v_STKD: torch.Tensor,
    slots_N: torch.Tensor,
    positions_N: torch.Tensor,
    limit_S: torch.Tensor,
) -> None:
    """Write token n's K and V at `[slots_N[n], positions_N[n]]` of the arena views, where its limit allows it.

    A token is written if its slot is in [0, S) and 0 <= position < min(limit_S[slot], T). Any other token is
    written nowhere, and its address is not touched. No two tokens of one call may have the same slot and position.

    k_NKD, v_NKD: new rows, of the arena's dtype. k_STKD, v_STKD: views of all slots, of any strides; fp16, bf16 or
    fp32. slots_N, positions_N: int32 or int64 on the device. limit_S: int32 on the device, one a slot.

    Cost: one launch, no allocation, no synchronisation; safe while a graph is captured.
    Raises: ValueError naming the argument.
    """
    device = k_NKD.device
    checks.runnable("k_NKD", device)
    num_slots, num_rows, num_kv_heads, head_dim = checks.arena(k_STKD, v_STKD, device)
    num_tokens = k_NKD.shape[0] if k_NKD.dim() == 3 else 0
    shape = (num_tokens, num_kv_heads, head_dim)
    checks.vectors("k_NKD", k_NKD, shape, k_STKD.dtype, device)
    checks.vectors("v_NKD", v_NKD, shape, k_STKD.dtype, device)
    checks.index("slots_N", slots_N, num_tokens, device)
    checks.index("positions_N", positions_N, num_tokens, device)
    checks.limits("limit_S", limit_S, num_slots, device)
    if num_tokens == 0:
        return
    elements = min(triton.next_power_of_2(num_kv_heads * head_dim), _PROGRAM_ELEMENTS)
    tokens = _PROGRAM_ELEMENTS // elements
    grid = (ceil_div(num_tokens, tokens), ceil_div(num_kv_heads * head_dim, elements))
    with checks.on_device(device):
        _append[grid](
            k_NKD, v_NKD, k_STKD, v_STKD, slots_N, positions_N, limit_S,
            num_tokens, num_slots, num_rows,
            k_NKD.stride(0), k_NKD.stride(1), v_NKD.stride(0), v_NKD.stride(1),
            k_STKD.stride(0), k_STKD.stride(1), k_STKD.stride(2), v_STKD.stride(0), v_STKD.stride(1), v_STKD.stride(2),
            K=num_kv_heads, D=head_dim, TOKENS=tokens, ELEMENTS=elements, num_warps=4,
        )  # fmt: skip
