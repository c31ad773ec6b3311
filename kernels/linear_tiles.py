"""Inside the kernels of linear.py: what comes early, and what is done with a sum. See linear.py.

What a linear layer reads are constants, but for x and the residual. So a program that is launched while the kernel before it
still runs loads its first weights at once, and asks for those that follow to be brought into L2; only then does it wait.

Legend: M rows of x, N rows of the weight, K columns of both. Prefixes: p_ pointer, i_ index, m_ mask.
"""

import triton
import triton.language as tl


@triton.jit
def weight_rows(p_w, stride_w, i_n, N, GATED: tl.constexpr, VECTOR: tl.constexpr):
    """Pointers to rows `i_n` of the weight, and to the same of its second half. Rows past the last are the last.

    `stride_w` counts 16 bytes: so the compiler knows that rows begin on 16 bytes, whatever the stride.
    """
    stride = tl.cast(stride_w, tl.int64) * VECTOR
    p_rows = p_w + tl.minimum(i_n, N - 1) * stride
    if GATED:
        return p_rows, p_rows + N * stride
    else:
        return p_rows, p_rows


@triton.jit
def prefetch(p_rows, FIRST: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, K: tl.constexpr):
    """Have lines of 128 bytes (`LINE` elements) of each row brought into L2, from column `FIRST` on."""
    if LINES > 0 and FIRST < K:
        i_k = tl.minimum(FIRST + tl.arange(0, LINES) * LINE, K - 1)
        addresses = (p_rows[:, None] + i_k[None, :]).to(tl.int64)
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_bias(p_bias, i_n, N, GATED: tl.constexpr):
    """float32 of outputs `i_n`, and of the same of the second half; zeros where there is no bias."""
    if p_bias is None:
        zeros = tl.zeros(i_n.shape, tl.float32)
        return zeros, zeros
    else:
        bias = tl.load(p_bias + i_n, mask=i_n < N, other=0.0).to(tl.float32)
        if GATED:
            return bias, tl.load(p_bias + N + i_n, mask=i_n < N, other=0.0).to(tl.float32)
        else:
            return bias, bias


@triton.jit
def finish(total, total_up, residual, DTYPE: tl.constexpr, GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """The output of float32 sums, rounded wherever transformers rounds: after the layer, after silu, after the product."""
    out = total.to(DTYPE)
    if GATED:
        gate = out.to(tl.float32)
        act = (gate / (1.0 + tl.exp(-gate))).to(DTYPE)
        out = (act.to(tl.float32) * total_up.to(DTYPE).to(tl.float32)).to(DTYPE)
    if HAS_RESIDUAL:
        out = (residual.to(tl.float32) + out.to(tl.float32)).to(DTYPE)
    return out
