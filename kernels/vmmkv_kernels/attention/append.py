"""Append: norm, rotate, quantise and write new tokens' K and V into their slots, in place, in one launch.

A *vector* is one head of one token. A tile of vectors is two tiles of their halves, elements j and j + D / 2, so that neither
the rotation nor int4 moves an element between threads.

Legend: N new tokens, S slots, T rows of a slot, P blocks, U rows of a block, C columns of a block table, H query heads, K kv
heads, D head dim, W payload width in elements, R = D / 2 angles. Prefixes: p_ pointer, i_ index, m_ mask.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv.units import ceil_div
from vmmkv_kernels import checks
from vmmkv_kernels.attention.kv_memory import kv_memory
from vmmkv_kernels.norm import prefetch
from vmmkv_kernels.quantise import TOKEN_SCALE_MAX, TOKEN_SCALE_MIN

_PROGRAM_BYTES = 4096
"""Bytes of K in a program that only copies: two 16-byte loads for each of its 128 threads."""

_HALF_BYTES = 2048
"""Bytes of one half of K's vectors in a program that computes: one 16-byte load a thread, four with V and the other halves."""

_SCALE_MIN = tl.constexpr(TOKEN_SCALE_MIN)
_SCALE_MAX = tl.constexpr(TOKEN_SCALE_MAX)


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
def _load_halves(p_vector, mask, HALF: tl.constexpr):
    """[vectors, HALF_PAD] twice, in float32."""
    low = tl.load(p_vector, mask=mask, other=0.0).to(tl.float32)
    return low, tl.load(p_vector + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rotate(low, high, p_cos, p_sin, position, m_angle, i_d, stride_cos, stride_sin, HALF: tl.constexpr):
    """Rotate the plane of elements j and j + D / 2 by angle j (Su et al., 2021, in the halves of GPT-NeoX and Llama)."""
    mask = m_angle[:, None] & (i_d < HALF)
    cos = tl.load(p_cos + (position * stride_cos)[:, None] + i_d, mask=mask, other=0.0)
    sin = tl.load(p_sin + (position * stride_sin)[:, None] + i_d, mask=mask, other=0.0)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _payload(x, KIND: tl.constexpr, CAST: tl.constexpr):
    """The payload's bits of a scaled and clamped float32, as an integer: a byte in fp8 and int8, a nibble in int4."""
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
    """Quantise and store two halves of vectors at [vectors] pointers to rows. Token scales are written, head scales read."""
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


@triton.jit
def _rows(i_n, m_n, p_slots, p_rows, p_limits, p_tables, num_slots, num_rows, num_blocks, stride_table, BLOCK: tl.constexpr):
    """Destination of tokens `i_n`: index of the slot or block, row in it, and whether it is written at all."""
    slot = tl.load(p_slots + i_n, mask=m_n, other=-1).to(tl.int64)
    row = tl.load(p_rows + i_n, mask=m_n, other=-1).to(tl.int64)
    limit = tl.load(p_limits + slot, mask=(slot >= 0) & (slot < num_slots), other=0)
    m_row = (row >= 0) & (row < tl.minimum(limit, num_rows))
    if BLOCK == 0:
        return slot, row, m_row
    else:
        block = tl.load(p_tables + slot * stride_table + row // BLOCK, mask=m_row, other=-1).to(tl.int64)
        return block, row % BLOCK, m_row & (block >= 0) & (block < num_blocks)


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "num_rows", "num_blocks"])
def _write(
    p_k_new, p_v_new, p_k, p_v, p_slots, p_rows, p_limits, p_tables,
    num_tokens, num_slots, num_rows, num_blocks,
    stride_kn, stride_kh, stride_vn, stride_vh,
    stride_ks, stride_kt, stride_kk, stride_vs, stride_vt, stride_vk, stride_table,
    K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, ELEMENTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy alone. Program (n, e): tokens [n, n + 1) * TOKENS, elements [e, e + 1) * ELEMENTS of the K * D of each."""
    if PDL:
        # Attention looks up its batch meanwhile. The wait is before any load: the kernel before may have written the slots.
        gdc_launch_dependents()
        gdc_wait()
    i_n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    m_n = i_n < num_tokens
    i_e = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    m_e = (i_e < K * D)[None, :]
    i_h = (i_e // D).to(tl.int64)
    i_d = i_e % D
    n_64 = i_n.to(tl.int64)
    # Loaded before it is known which tokens are written, so that the loads do not wait for the slots' limits.
    mask = m_n[:, None] & m_e
    k_new = tl.load(p_k_new + (n_64 * stride_kn)[:, None] + (i_h * stride_kh + i_d)[None, :], mask=mask)
    v_new = tl.load(p_v_new + (n_64 * stride_vn)[:, None] + (i_h * stride_vh + i_d)[None, :], mask=mask)

    i_s, i_t, m_row = _rows(i_n, m_n, p_slots, p_rows, p_limits, p_tables, num_slots, num_rows, num_blocks, stride_table, BLOCK)
    mask = m_row[:, None] & m_e
    tl.store(p_k + (i_s * stride_ks + i_t * stride_kt)[:, None] + (i_h * stride_kk + i_d)[None, :], k_new, mask=mask)
    tl.store(p_v + (i_s * stride_vs + i_t * stride_vt)[:, None] + (i_h * stride_vk + i_d)[None, :], v_new, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "num_rows", "num_blocks", "num_angles", "num_kv_programs"])
def _rotate_and_write(
    p_k_new, p_v_new, p_q, p_q_out, p_k, p_v, p_k_scale, p_v_scale, p_q_norm, p_k_norm, p_cos, p_sin, p_positions,
    p_slots, p_rows, p_limits, p_tables,
    norm_eps, num_tokens, num_slots, num_rows, num_blocks, num_angles, num_kv_programs,
    stride_kn, stride_kh, stride_vn, stride_vh, stride_qn, stride_qh, stride_on, stride_oh,
    stride_ks, stride_kt, stride_kk, stride_vs, stride_vt, stride_vk, stride_table, stride_cos, stride_sin,
    scale_stride_ks, scale_stride_kt, scale_stride_vs, scale_stride_vt, scale_stride_h,
    K: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK: tl.constexpr,
    VECTORS: tl.constexpr, KIND: tl.constexpr, QMAX: tl.constexpr, TOKEN_SCALE: tl.constexpr,
    CAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: vectors [p, p + 1) * VECTORS of K and V. Programs from `num_kv_programs` on take vectors of q instead."""
    i_d = tl.arange(0, HALF_PAD)[None, :]
    i_p = tl.program_id(0)
    if PDL:
        if p_k_norm is not None and i_p == 0:
            prefetch(p_k_norm, 2 * HALF * p_k_norm.dtype.element_ty.primitive_bitwidth // 8)
        if p_q_norm is not None and i_p == num_kv_programs:
            prefetch(p_q_norm, 2 * HALF * p_q_norm.dtype.element_ty.primitive_bitwidth // 8)
        # Attention looks up its batch meanwhile. The wait is before any load: the kernel before may have written the slots.
        gdc_launch_dependents()
        gdc_wait()
    if p_q is not None and i_p >= num_kv_programs:
        i_v = (i_p - num_kv_programs) * VECTORS + tl.arange(0, VECTORS)
        m_n = i_v < num_tokens * H
        i_n = i_v // H
        p_vector = (p_q + i_n.to(tl.int64) * stride_qn + (i_v % H).to(tl.int64) * stride_qh)[:, None] + i_d
        mask = m_n[:, None] & (i_d < HALF)
        low, high = _load_halves(p_vector, mask, HALF)
        if p_q_norm is not None:
            low, high = normalise(low, high, p_q_norm, i_d, norm_eps, HALF)
        if p_cos is not None:
            position = tl.load(p_positions + i_n, mask=m_n, other=-1).to(tl.int64)
            m_angle = (position >= 0) & (position < num_angles)
            low, high = rotate(low, high, p_cos, p_sin, position, m_angle, i_d, stride_cos, stride_sin, HALF)
            mask = m_angle[:, None] & (i_d < HALF)
        p_out = (p_q_out + i_n.to(tl.int64) * stride_on + (i_v % H).to(tl.int64) * stride_oh)[:, None] + i_d
        tl.store(p_out, low.to(p_q.dtype.element_ty), mask=mask)
        tl.store(p_out + HALF, high.to(p_q.dtype.element_ty), mask=mask)
    else:
        i_v = i_p * VECTORS + tl.arange(0, VECTORS)
        m_n = i_v < num_tokens * K
        i_n = i_v // K
        i_h = (i_v % K).to(tl.int64)
        n_64 = i_n.to(tl.int64)
        mask = m_n[:, None] & (i_d < HALF)
        p_k_vector = (p_k_new + n_64 * stride_kn + i_h * stride_kh)[:, None] + i_d
        p_v_vector = (p_v_new + n_64 * stride_vn + i_h * stride_vh)[:, None] + i_d
        k_low, k_high = _load_halves(p_k_vector, mask, HALF)
        v_low, v_high = _load_halves(p_v_vector, mask, HALF)
        if p_cos is not None:
            position = tl.load(p_positions + i_n, mask=m_n, other=-1).to(tl.int64)
        i_s, i_t, m_row = _rows(
            i_n, m_n, p_slots, p_rows, p_limits, p_tables, num_slots, num_rows, num_blocks, stride_table, BLOCK
        )
        if p_k_norm is not None:
            k_low, k_high = normalise(k_low, k_high, p_k_norm, i_d, norm_eps, HALF)
        if p_cos is not None:
            # Masked by the position alone, so that these loads do not wait for the limits either.
            m_angle = (position >= 0) & (position < num_angles)
            k_low, k_high = rotate(k_low, k_high, p_cos, p_sin, position, m_angle, i_d, stride_cos, stride_sin, HALF)
            m_row &= m_angle
        mask = m_row[:, None] & (i_d < HALF)
        p_k_row, p_v_row = p_k + i_s * stride_ks + i_t * stride_kt, p_v + i_s * stride_vs + i_t * stride_vt
        if TOKEN_SCALE:
            p_k_scales = p_k_scale + i_s * scale_stride_ks + i_t * scale_stride_kt + i_h * scale_stride_h
            p_v_scales = p_v_scale + i_s * scale_stride_vs + i_t * scale_stride_vt + i_h * scale_stride_h
        elif KIND is not None:
            p_k_scales, p_v_scales = p_k_scale + i_h, p_v_scale + i_h
        else:
            p_k_scales, p_v_scales = None, None
        store_vectors(p_k_row, p_k_scales, m_row, mask, k_low, k_high, i_d, i_h, stride_kk, HALF, KIND, QMAX, TOKEN_SCALE, CAST)
        store_vectors(p_v_row, p_v_scales, m_row, mask, v_low, v_high, i_d, i_h, stride_vk, HALF, KIND, QMAX, TOKEN_SCALE, CAST)


@functools.cache
def casts_to_fp8(device: torch.device) -> bool:
    """Has the device an instruction that rounds to e4m3? Bit arithmetic gives the same elsewhere."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


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
    tables_SC: torch.Tensor | None = None,
    q_NHD: torch.Tensor | None = None,
    q_out_NHD: torch.Tensor | None = None,
    cos_TR: torch.Tensor | None = None,
    sin_TR: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> None:
    """Write token n's K and V at `[slots_N[n], rows_N[n]]` of the arena views, where its limit allows it.

    A token is written if its slot is in [0, S) and 0 <= row < min(limit_S[slot], T), and with rope, if the tables have its
    position. Any other token is written nowhere, and its address is not touched. No two tokens of one call may have the same
    slot and row.

    With `tables_SC` K and V are blocks [P, U, K, W], as in `decode`, and the bytes those of slots. A token whose table entry is
    not in [0, P) is written nowhere either.

    With `q_norm_D` or `k_norm_D` each head of q or of K is RMS-normed, as Qwen3 does: by 1 / sqrt(mean of squares +
    norm_eps) in float32, rounded to the vectors' dtype, times the weight, rounded again.

    With `cos_TR` and `sin_TR` K is rotated then: elements j and j + D / 2 by the angle of their position, which is that of
    `positions_N`, or else the row. `q_NHD` is rotated as well, whether or not its token is written. What becomes of it is
    written to `q_out_NHD`, in place without; for a query whose position the tables do not have nothing is written. Arithmetic
    is float32.

    Views of a quantised payload (see quantise.py) are quantised into, with `k_scale` and `v_scale`. Token scales, float16 [S,
    T, K] (over blocks [P, U, K]), are computed and written beside the payload. Head scales, positive float32 [K] for fp8, are
    read.

    - k_NKD, v_NKD, q_NHD, q_out_NHD: new vectors in fp16, bf16 or fp32, finite.
    - k_STKW, v_STKW: views of all slots, of any strides; of k_NKD's dtype or a payload's.
    - slots_N, rows_N, positions_N: int32 or int64 on the device. limit_S: int32, one a slot. tables_SC: int32, rows contiguous.
    - cos_TR, sin_TR: float32, by position. q_norm_D, k_norm_D: contiguous, of the vectors' dtype.

    Cost: one launch, no allocation, no synchronisation; safe while a graph is captured. Compute capability 9 makes it ready
    while the kernel before it still runs.
    Raises: ValueError naming the argument.
    """
    device = k_NKD.device
    checks.runnable("k_NKD", device)
    checks.floats("k_NKD", k_NKD.dtype)
    memory = kv_memory(k_STKW, v_STKW, k_scale, v_scale, tables_SC, k_NKD.dtype, device)
    num_kv_heads, head_dim = memory.num_kv_heads, memory.head_dim
    num_tokens = k_NKD.shape[0] if k_NKD.dim() == 3 else 0
    shape = (num_tokens, num_kv_heads, head_dim)
    checks.vectors("k_NKD", k_NKD, shape, k_NKD.dtype, device)
    checks.vectors("v_NKD", v_NKD, shape, k_NKD.dtype, device)
    checks.index("slots_N", slots_N, num_tokens, device)
    checks.index("rows_N", rows_N, num_tokens, device)
    positions_N = rows_N if positions_N is None else positions_N
    checks.index("positions_N", positions_N, num_tokens, device)
    checks.limits(limit_S, memory.num_slots, device)
    num_angles = _check_angles(cos_TR, sin_TR, head_dim, device)
    num_heads = 0
    if q_NHD is not None:
        if num_angles is None and q_norm_D is None:
            wanted = "both, since rotation is all that happens to a query here, but for a norm by q_norm_D"
            checks.refuse("q_NHD", "given without cos_TR and sin_TR", wanted)
        if q_NHD.dim() != 3:
            checks.refuse("q_NHD", f"of shape {tuple(q_NHD.shape)}", "3 dimensions: [tokens, query heads, head dim]")
        num_heads = q_NHD.shape[1]
        q_out_NHD = q_NHD if q_out_NHD is None else q_out_NHD
        for name, q in (("q_NHD", q_NHD), ("q_out_NHD", q_out_NHD)):
            checks.vectors(name, q, (num_tokens, num_heads, head_dim), k_NKD.dtype, device)
    elif q_norm_D is not None:
        checks.refuse("q_norm_D", "given without q_NHD", "both: it is the weight of the queries' norm")
    for name, weight_D in (("q_norm_D", q_norm_D), ("k_norm_D", k_norm_D)):
        if weight_D is not None:
            checks.norm(name, weight_D, "norm_eps", norm_eps, head_dim, k_NKD.dtype, device)
    is_plain = num_angles is None and memory.kind is None and q_norm_D is None and k_norm_D is None
    if head_dim % 2 and not is_plain:
        checks.refuse("k_NKD", f"of head dim {head_dim}", "an even one to norm, to rotate or to quantise")
    if num_tokens == 0:
        return
    itemsize = k_NKD.element_size()
    indices = (slots_N, rows_N, limit_S, tables_SC)
    sizes = (num_tokens, memory.num_slots, memory.num_rows, memory.k.shape[0])
    overlap = checks.overlap(device)
    if is_plain:
        most = _PROGRAM_BYTES // itemsize
        elements = min(triton.next_power_of_2(num_kv_heads * head_dim), most)
        tokens = most // elements
        with checks.on_device(device):
            _write[(ceil_div(num_tokens, tokens), ceil_div(num_kv_heads * head_dim, elements))](
                k_NKD, v_NKD, memory.k, memory.v, *indices, *sizes,
                *k_NKD.stride()[:2], *v_NKD.stride()[:2], *memory.strides[:6], memory.stride_table,
                K=num_kv_heads, D=head_dim, BLOCK=memory.block, TOKENS=tokens, ELEMENTS=elements, num_warps=4, **overlap,
            )  # fmt: skip
        return
    half_pad = triton.next_power_of_2(head_dim // 2)
    vectors = max(1, _HALF_BYTES // (half_pad * itemsize))
    num_kv_programs = ceil_div(num_tokens * num_kv_heads, vectors)
    num_programs = num_kv_programs + ceil_div(num_tokens * num_heads, vectors)
    with checks.on_device(device):
        _rotate_and_write[(num_programs,)](
            k_NKD, v_NKD, q_NHD, q_out_NHD, memory.k, memory.v, memory.k_scale, memory.v_scale, q_norm_D, k_norm_D,
            cos_TR, sin_TR, positions_N, *indices, float(norm_eps), *sizes, num_angles or 0, num_kv_programs,
            *k_NKD.stride()[:2], *v_NKD.stride()[:2],
            *(stride for q in (q_NHD, q_out_NHD) for stride in ((0, 0) if q is None else q.stride()[:2])),
            *memory.strides[:6], memory.stride_table,
            0 if cos_TR is None else cos_TR.stride(0), 0 if sin_TR is None else sin_TR.stride(0), *memory.strides[6:],
            K=num_kv_heads, H=num_heads, HALF=head_dim // 2, HALF_PAD=half_pad, BLOCK=memory.block,
            VECTORS=vectors, KIND=memory.kind, QMAX=memory.qmax, TOKEN_SCALE=memory.scale == "token",
            CAST=casts_to_fp8(device), num_warps=4,
            # A fused multiply-add would round a rotation otherwise than the reference does.
            enable_fp_fusion=False, **overlap,
        )  # fmt: skip


def _check_angles(cos_TR: torch.Tensor | None, sin_TR: torch.Tensor | None, head_dim: int, device: torch.device) -> int | None:
    """The number of positions that the tables of a rotary embedding have; None without tables."""
    if cos_TR is None or sin_TR is None:
        if cos_TR is not None or sin_TR is not None:
            checks.refuse("cos_TR" if cos_TR is None else "sin_TR", "missing", "both cosines and sines, or neither")
        return None
    if cos_TR.dim() != 2:
        checks.refuse("cos_TR", f"of shape {tuple(cos_TR.shape)}", "2 dimensions: [positions, head dim / 2]")
    shape = (cos_TR.shape[0], head_dim // 2)
    if cos_TR.shape[1] == head_dim:
        wanted = f"{shape}: one angle for elements j and j + D / 2; transformers' tables have each twice, take [:, :{shape[1]}]"
        checks.refuse("cos_TR", f"of shape {tuple(cos_TR.shape)}", wanted)
    checks.vectors("cos_TR", cos_TR, shape, torch.float32, device)
    checks.vectors("sin_TR", sin_TR, shape, torch.float32, device)
    return shape[0]
