"""RMS norm of rows, with the residual added on the way, in one launch.

Legend: N rows (tokens), E elements of a row (hidden size). Prefixes: p_ pointer, i_ index, m_ mask.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv_kernels import checks

MAX_WIDTH = 16_384
"""Most elements of a row, which one program keeps in its registers."""

_MAX_WARPS = 16
_LINE_BYTES = tl.constexpr(128)


@triton.jit
def prefetch(p_first, BYTES: tl.constexpr):
    """Bring `BYTES` bytes into L2 before they are loaded. Not in the interpreter.

    Safe before `gdc_wait`, where a load is not: all writes meet in L2, so it holds no stale line.
    """
    num_lines: tl.constexpr = (BYTES + _LINE_BYTES - 1) // _LINE_BYTES
    i_line = tl.minimum(tl.arange(0, triton.next_power_of_2(num_lines)), num_lines - 1)
    addresses = p_first.to(tl.int64) + i_line * _LINE_BYTES
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _rms_norm(
    p_x, p_residual, p_weight, p_out, eps, stride_x, stride_residual, stride_out,
    E: tl.constexpr, E_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program n: row n."""
    i_n = tl.program_id(0).to(tl.int64)
    i_e = tl.arange(0, E_PAD)
    m_e = i_e < E
    dtype: tl.constexpr = p_x.dtype.element_ty
    if PDL:
        if i_n == 0:
            prefetch(p_weight, E * dtype.primitive_bitwidth // 8)
        gdc_wait()
        gdc_launch_dependents()
    weight = tl.load(p_weight + i_e, mask=m_e, other=0.0).to(tl.float32)
    x = tl.load(p_x + i_n * stride_x + i_e, mask=m_e, other=0.0)
    if p_residual is not None:
        p_row = p_residual + i_n * stride_residual + i_e
        x = (tl.load(p_row, mask=m_e, other=0.0).to(tl.float32) + x.to(tl.float32)).to(dtype)
        tl.store(p_row, x, mask=m_e)
    x = x.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / E + eps)).to(dtype)
    tl.store(p_out + i_n * stride_out + i_e, (normed.to(tl.float32) * weight).to(dtype), mask=m_e)


def rms_norm(
    x_NE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    *,
    residual_NE: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMS norm of each row (Zhang and Sennrich, 2019). Returns [N, E] of x's dtype (`out` if given).

    Rounded as in transformers: `x * rsqrt(mean(x^2) + eps)` in float32, rounded to x's dtype, times the weight, rounded again.
    With `residual_NE` x is first added to it, in place; the norm is of the rounded sum, and x stays as it is.

    x_NE, residual_NE, out: fp16, bf16 or fp32, rows of any stride of whole 16 bytes; `out` may be x_NE itself, else no two
    of them overlap. weight_E: contiguous, of x's dtype. E is at most MAX_WIDTH.

    Cost: one launch, no synchronisation; allocates `out` if None is given; safe while a graph is captured. Compute
    capability 9 makes it ready while the kernel before it still runs.
    Raises: ValueError naming the argument.
    """
    device, dtype = x_NE.device, x_NE.dtype
    num_rows, width = checks.matrix("x_NE", x_NE, "[tokens, hidden size]")
    if not 0 < width <= MAX_WIDTH:
        checks.refuse("x_NE", f"of rows of {width} elements", f"1 to {MAX_WIDTH}, which one program keeps in registers")
    checks.norm("weight_E", weight_E, "eps", eps, width, dtype, device)
    if residual_NE is not None:
        checks.vectors("residual_NE", residual_NE, (num_rows, width), dtype, device)
    out = checks.output(out, (num_rows, width), dtype, device)
    if num_rows == 0:
        return out
    padded = triton.next_power_of_2(width)
    # One 16-byte load of each tensor a thread, as far as there are threads: a decode step's row is all latency.
    num_warps = max(1, min(_MAX_WARPS, padded * x_NE.element_size() // (32 * checks.ALIGNMENT_BYTES)))
    with checks.on_device(device):
        _rms_norm[(num_rows,)](
            x_NE, residual_NE, weight_E, out, float(eps),
            x_NE.stride(0), 0 if residual_NE is None else residual_NE.stride(0), out.stride(0),
            E=width, E_PAD=padded, num_warps=num_warps, **checks.overlap(device),
        )  # fmt: skip
    return out
