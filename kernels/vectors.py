"""Inside append: what becomes of a vector, the D elements of one head of one token: normed, rotated, quantised, stored.

A tile of vectors is two tiles of their halves, elements j and j + D / 2, so that neither the rotation nor int4 moves an
element between threads. Prefixes: p_ pointer, i_ index, m_ mask.
"""

import triton
import triton.language as tl

from vmmkv.kernels.quantise import TOKEN_SCALE_MAX, TOKEN_SCALE_MIN

_SCALE_MIN = tl.constexpr(TOKEN_SCALE_MIN)
_SCALE_MAX = tl.constexpr(TOKEN_SCALE_MAX)
_LINE_BYTES = tl.constexpr(128)


@triton.jit
def prefetch(p_first, BYTES: tl.constexpr):
    """Ask for the lines of `BYTES` bytes in L2, before they are loaded. Not in the interpreter.

    Safe before `gdc_wait`, where a load is not: all writes meet in L2, so that no stale line can be kept there.
    """
    num_lines: tl.constexpr = (BYTES + _LINE_BYTES - 1) // _LINE_BYTES
    i_line = tl.minimum(tl.arange(0, triton.next_power_of_2(num_lines)), num_lines - 1)
    addresses = p_first.to(tl.int64) + i_line * _LINE_BYTES
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def normalise(low, high, p_weight, i_d, eps, HALF: tl.constexpr):
    """RMS norm of each vector (Zhang and Sennrich, 2019), rounded to the weight's dtype before and after the weight."""
    dtype: tl.constexpr = p_weight.dtype.element_ty
    factor = tl.rsqrt(tl.sum(low * low + high * high, 1) / (2 * HALF) + eps)[:, None]
    weight_low = tl.load(p_weight + i_d, mask=i_d < HALF, other=0.0).to(tl.float32)
    weight_high = tl.load(p_weight + HALF + i_d, mask=i_d < HALF, other=0.0).to(tl.float32)
    low = (low * factor).to(dtype).to(tl.float32) * weight_low
    high = (high * factor).to(dtype).to(tl.float32) * weight_high
    return low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)


@triton.jit
def rotate(low, high, cos, sin):
    """Rotate the plane of elements j and j + D / 2 by angle j (Su et al., 2021, in the halves of GPT-NeoX and Llama)."""
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _payload(x, KIND: tl.constexpr, CAST: tl.constexpr):
    """A scaled and clamped float32 as the payload's bits in an integer: its byte in fp8 and int8, its nibble in int4."""
    if KIND == "fp8":
        if CAST:
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            bits = x.to(tl.int32, bitcast=True)
            magnitude = bits & 0x7FFFFFFF
            # Round to the third bit of the mantissa, then the exponent's bias goes from 127 to 7.
            normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
            # Below 2**-6 the step is 2**-9, which is also the step of floats in [2**14, 2**15): the sum rounds.
            steps = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
            return tl.where(magnitude < 0x3C800000, steps, normal) | ((bits >> 24) & 0x80)
    else:
        # The step of floats in [2**23, 2**24) is 1: the sum rounds to nearest even, and its low bits are the integer.
        bits = (x + 12582912.0).to(tl.int32, bitcast=True)
        return bits if KIND == "int8" else (bits + 8) & 15


@triton.jit
def store_vectors(
    p_row, p_scale, m_v, mask, low, high, i_d, i_h, stride_h,
    HALF: tl.constexpr, KIND: tl.constexpr, QMAX: tl.constexpr, TOKEN_SCALE: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Two halves of vectors to [vectors] pointers to their rows; `p_scale` points to a scale each, to write or to read."""
    pointers = (p_row + i_h * stride_h)[:, None] + i_d
    if KIND is None:
        dtype: tl.constexpr = p_row.dtype.element_ty
        tl.store(pointers, low.to(dtype), mask=mask)
        tl.store(pointers + HALF, high.to(dtype), mask=mask)
    else:
        if TOKEN_SCALE:
            amax = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
            wanted = tl.minimum(tl.maximum(tl.div_rn(amax, QMAX), _SCALE_MIN), _SCALE_MAX)
            nearest = wanted.to(tl.float16)
            bits_up = (nearest.to(tl.float32) < wanted).to(tl.int16)
            scale = (nearest.to(tl.int16, bitcast=True) + bits_up).to(tl.float16, bitcast=True)
            tl.store(p_scale, scale, mask=m_v)
        else:
            scale = tl.load(p_scale)
        reciprocal = tl.div_rn(1.0, scale.to(tl.float32))[:, None]
        low = _payload(tl.minimum(tl.maximum(low * reciprocal, -QMAX), QMAX), KIND, CAST)
        high = _payload(tl.minimum(tl.maximum(high * reciprocal, -QMAX), QMAX), KIND, CAST)
        if KIND == "int4":
            tl.store(pointers, (low | (high << 4)).to(tl.uint8), mask=mask)
        else:
            tl.store(pointers, low.to(tl.uint8), mask=mask)
            tl.store(pointers + HALF, high.to(tl.uint8), mask=mask)
