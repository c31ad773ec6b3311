"""The linear layer of few rows on tensor cores: weights through shared memory. See linear.py.

Legend: M rows of x, N rows of the weight, K columns of both. Prefixes: p_ pointer, i_ index, m_ mask.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv.kernels.linear_tiles import finish, load_bias, prefetch, weight_rows


@triton.jit
def _load(p_rows, i_k, k, K: tl.constexpr, TILE_K: tl.constexpr):
    """[..., rows, columns] of the weight, from column `k` on."""
    if K % TILE_K == 0:
        return tl.load(p_rows + k, eviction_policy="evict_first")
    else:
        return tl.load(p_rows + k, mask=i_k + k < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _factors(p_x, i_m, m_m, stride_x, eps, K: tl.constexpr, M_PAD: tl.constexpr):
    """[M_PAD]: what the norm multiplies each row by."""
    WIDTH: tl.constexpr = 8192 // M_PAD
    squares = tl.zeros([M_PAD, WIDTH], tl.float32)
    p_rows = p_x + (i_m.to(tl.int64) * stride_x)[:, None]
    for first in range(0, K, WIDTH):
        i_k = first + tl.arange(0, WIDTH)[None, :]
        x = tl.load(p_rows + i_k, mask=m_m[:, None] & (i_k < K), other=0.0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def multiply_by_dots(
    p_x, p_w, p_norm, p_bias, p_out, eps, num_rows, num_outputs, stride_x, stride_w, stride_o,
    K: tl.constexpr, M_PAD: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, SPLITS: tl.constexpr,
    LINES: tl.constexpr, LINE: tl.constexpr, VECTOR: tl.constexpr,
    GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: outputs [p, p + 1) * TILE_N of all rows of x, which are the columns of the dots.

    With SPLITS the columns of a step are the parts of a batch of dots, which Triton deals to the warps: none then loads
    what another multiplies.
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    # In float16 what is not yet normed may not fit when it is multiplied by the norm's weight.
    NORM_FIRST: tl.constexpr = p_norm is not None and DTYPE.is_fp16()
    PART: tl.constexpr = TILE_K // SPLITS
    i_n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    p_rows, p_rows_up = weight_rows(p_w, stride_w, i_n, num_outputs, GATED, VECTOR)
    prefetch(p_rows, 0, LINES, LINE, K)
    if GATED:
        prefetch(p_rows_up, 0, LINES, LINE, K)
    bias, bias_up = load_bias(p_bias, i_n, num_outputs, GATED)
    if PDL:
        # Whatever comes next waits for the end of this launch, however early it is there.
        gdc_launch_dependents()
        gdc_wait()

    i_m = tl.arange(0, M_PAD)
    m_m = i_m < num_rows
    mask = (i_n < num_outputs)[:, None] & m_m[None, :]
    p_outs = p_out + (i_m.to(tl.int64) * stride_o)[None, :] + i_n[:, None]
    residual = bias[:, None]
    if HAS_RESIDUAL:
        residual = tl.load(p_outs, mask=mask, other=0.0)
    factor = tl.full([M_PAD], 1.0, tl.float32)
    if NORM_FIRST:
        factor = _factors(p_x, i_m, m_m, stride_x, eps, K, M_PAD)

    # The first operand is [TILE_N, columns] of the weight, the second [columns, M_PAD] of x; with SPLITS, batches of them.
    if SPLITS == 1:
        i_k_w = tl.arange(0, TILE_K)[None, :]
        i_k_x = tl.arange(0, TILE_K)[:, None]
        i_m_x, m_x, factor_x = i_m[None, :], m_m[None, :], factor[None, :]
        p_w_tile, p_up_tile = p_rows[:, None] + i_k_w, p_rows_up[:, None] + i_k_w
        acc = tl.zeros([TILE_N, M_PAD], tl.float32)
    else:
        i_part = (tl.arange(0, SPLITS) * PART)[:, None, None]
        i_k_w = i_part + tl.arange(0, PART)[None, None, :]
        i_k_x = i_part + tl.arange(0, PART)[None, :, None]
        i_m_x, m_x, factor_x = i_m[None, None, :], m_m[None, None, :], factor[None, None, :]
        p_w_tile, p_up_tile = p_rows[None, :, None] + i_k_w, p_rows_up[None, :, None] + i_k_w
        acc = tl.zeros([SPLITS, TILE_N, M_PAD], tl.float32)
    p_x_tile = p_x + i_m_x.to(tl.int64) * stride_x + i_k_x
    acc_up = acc
    squares = tl.zeros([TILE_K // VECTOR, M_PAD], tl.float32)
    for k in range(0, K, TILE_K):
        w = _load(p_w_tile, i_k_w, k, K, TILE_K)
        x = tl.load(p_x_tile + k, mask=m_x & (i_k_x + k < K), other=0.0)
        if p_norm is not None:
            norm = tl.load(p_norm + i_k_x + k, mask=i_k_x + k < K, other=0.0)
            if NORM_FIRST:
                x = (x.to(tl.float32) * factor_x).to(DTYPE) * norm
            else:
                x_32 = x.to(tl.float32)
                squares += tl.sum((x_32 * x_32).reshape(TILE_K // VECTOR, VECTOR, M_PAD), 1)
                x = (x_32 * norm.to(tl.float32)).to(DTYPE)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            acc_up = tl.dot(_load(p_up_tile, i_k_w, k, K, TILE_K), x, acc_up, input_precision="ieee")

    if SPLITS == 1:
        total, total_up = acc, acc_up
    else:
        total, total_up = tl.sum(acc, 0), tl.sum(acc_up, 0)
    if p_norm is not None and not NORM_FIRST:
        # The rows' own factor comes last: the sums need not wait for it.
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        total, total_up = total * factor[None, :], total_up * factor[None, :]
    out = finish(total + bias[:, None], total_up + bias_up[:, None], residual, DTYPE, GATED, HAS_RESIDUAL)
    tl.store(p_outs, out, mask=mask)
