"""The linear layers of a decode step: few rows of x, so that the time is that of reading the weights.

A program has a few rows of the weight and walks all of their columns. One row of x is multiplied without tensor cores, from
registers (`multiply_in_registers`); more rows on tensor cores, from shared memory (`multiply_by_dots`). The kernel also does
what surrounds a linear layer in a decoder: the RMS norm before it, its bias, the residual stream or the gate's activation
behind it. That saves launches, each of which would read and write a few KiB and cost as much as megabytes of weights.

The norm's factor, 1 / rms(x), is one for each row. It is applied to the sums, so that no program waits for it. Only float16 on
tensor cores is normed first, since x times the norm's weight may pass 65504. Either is at most as far from the truth as norm,
rounding and linear layer one after the other.

Everything that a linear layer reads is constant, but x and the residual. With programmatic dependent launch a program loads its
first weights while the kernel before it still runs, and brings those that follow into L2; only then does it wait.

Legend: M rows of x, N outputs (rows of the weight; of the gate alone, where it is gated), K inputs (columns of both). Prefixes:
p_ pointer, i_ index, m_ mask.
"""

import functools
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv.units import MIB, ceil_div
from vmmkv_kernels import checks

MAX_ROWS = 8
"""Most rows: with more, arithmetic begins to count, and a general matrix product is as good."""

_LINE_BYTES = 128

_LARGE_BYTES: Final = 64 * MIB
_SMALL_BYTES: Final = 16 * MIB
"""Sizes of a weight: above the first its loads fill the pipeline for long, below the second they are over before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTiling:
    """Tile sizes of a launch. The sums of a row of x, and their order, depend on no other row."""

    dots: bool
    """Multiply on tensor cores, from shared memory; else from registers."""
    tile_n: int
    """Rows of the weight in a program; if gated, of gate and of up each."""
    tile_k: int
    """Columns in one step."""
    num_warps: int = 4
    depth: int = 2
    """Steps whose loads are under way ahead: in registers without dots, in shared memory with them."""
    splits: int = 1
    """Parts of a step's columns, each the dot of one warp; only with dots, and then 1 or `num_warps`."""
    prefetch_lines: int = 0
    """Lines of L2 of each row of the weight, behind those loaded early, brought there before the kernel waits."""
    max_registers: int | None = None
    """Registers of a thread; None leaves it to the compiler, which takes as many as it finds loads to begin early."""

    def __post_init__(self) -> None:
        assert self.splits in (1, self.num_warps), "a batch of dots is dealt to warps"
        assert not self.dots or self.tile_n >= 16, "the fewest rows of the first operand"
        assert self.dots or self.splits == 1, "registers are summed up over all warps anyway"


def padded_rows(num_rows: int, dots: bool) -> int:
    """Rows of x in a program: with dots 8 at least, as a tensor core takes them."""
    padded: int = triton.next_power_of_2(num_rows)
    return max(8 if dots else 1, padded)


@functools.cache
def linear_tiling(num_rows: int, num_outputs: int, num_columns: int, itemsize: int, gated: bool) -> LinearTiling:
    """The tiling of a shape; `num_outputs` is N of the result.

    One row is bound by memory, so it needs no tensor cores: the weights go from memory to registers and stay there. More rows
    would be bound by arithmetic. float32 has no tensor cores here.
    """
    if num_rows == 1 or itemsize == 4:
        return _in_registers(num_rows, num_outputs, num_columns, itemsize, gated)
    return _on_tensor_cores(num_rows, num_outputs, num_columns, gated)


def _in_registers(num_rows: int, num_outputs: int, num_columns: int, itemsize: int, gated: bool) -> LinearTiling:
    """The tiling from registers. tile_k: 16 bytes a thread, so that a program's threads are side by side along a row.

    Measured on an H200 with one row, bf16, in a captured chain: many programs of few rows with many steps under way stream
    large weights best. Small weights are over before that pays, and gain from larger programs.
    """
    tile_k = min(2048 // itemsize, max(16, triton.next_power_of_2(num_columns)))
    if num_rows == 1 and itemsize == 2:
        weight_bytes = num_outputs * num_columns * itemsize * (2 if gated else 1)
        if gated and weight_bytes >= _LARGE_BYTES:
            return LinearTiling(dots=False, tile_n=1, tile_k=tile_k, depth=4)
        if num_columns >= 8192:
            return LinearTiling(dots=False, tile_n=2, tile_k=2 * tile_k, depth=3)
        if num_columns <= 1024 and weight_bytes < _LARGE_BYTES:
            return LinearTiling(dots=False, tile_n=4, tile_k=min(tile_k, 512), num_warps=2)
        if weight_bytes < _SMALL_BYTES:
            return LinearTiling(dots=False, tile_n=4, tile_k=tile_k, depth=3)
        if weight_bytes >= 4 * _LARGE_BYTES:
            return LinearTiling(dots=False, tile_n=2, tile_k=tile_k, depth=4)
        if weight_bytes < 3 * _SMALL_BYTES:
            return LinearTiling(dots=False, tile_n=4, tile_k=tile_k, max_registers=96)
        return LinearTiling(dots=False, tile_n=4, tile_k=tile_k, depth=3, max_registers=128)
    tile_n = max(1, 8192 // (tile_k * itemsize * (2 if gated else 1) * padded_rows(num_rows, False)))
    while tile_n > 1 and ceil_div(num_outputs, tile_n) < 512:
        tile_n //= 2
    return LinearTiling(dots=False, tile_n=tile_n, tile_k=tile_k)


def _on_tensor_cores(num_rows: int, num_outputs: int, num_columns: int, gated: bool) -> LinearTiling:
    """tile_n: 16, which deals most layers evenly to 132 SMs; more where x, which every program reads, would weigh as much as
    they.

    tile_k: 512 columns, of which each of 4 warps has 128. depth: three steps of 16 KiB; a layer of two steps gains from both at
    once.
    """
    tile_n = 16 if num_rows <= 8 or num_outputs < 16384 or gated else 32
    tile_k = min(512, max(64, triton.next_power_of_2(num_columns)))
    depth = 4 if num_columns <= 1024 and not gated and num_outputs < 65536 and num_rows <= 8 else 3
    return LinearTiling(dots=True, tile_n=tile_n, tile_k=tile_k, depth=depth, splits=4, prefetch_lines=16)


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
    """Bring lines of 128 bytes (`LINE` elements) of each row into L2, from column `FIRST` on."""
    if LINES > 0 and FIRST < K:
        i_k = tl.minimum(FIRST + tl.arange(0, LINES) * LINE, K - 1)
        addresses = (p_rows[:, None] + i_k[None, :]).to(tl.int64)
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_bias(p_bias, i_n, N, GATED: tl.constexpr):
    """The bias in float32 of outputs `i_n`, and of the second half; zeros where there is no bias."""
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


@triton.jit
def _load_columns(p_rows, STEP: tl.constexpr, TILE_K: tl.constexpr, K: tl.constexpr, POLICY: tl.constexpr):
    """[rows, TILE_K]: the columns of one step."""
    i_k = STEP * TILE_K + tl.arange(0, TILE_K)[None, :]
    if (STEP + 1) * TILE_K <= K:
        return tl.load(p_rows[:, None] + i_k, eviction_policy=POLICY)
    else:
        return tl.load(p_rows[:, None] + i_k, mask=i_k < K, other=0.0, eviction_policy=POLICY)


@triton.jit
def _load_weight_step(
    p_rows, p_rows_up, p_norm, STEP: tl.constexpr, TILE_K: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """One step of the weight, of its second half, and of the norm's weight. The first two are read once."""
    w = _load_columns(p_rows, STEP, TILE_K, K, "evict_first")
    w_up = _load_columns(p_rows_up, STEP, TILE_K, K, "evict_first") if GATED else w
    if p_norm is None:
        return w, w_up, w
    else:
        return w, w_up, _load_columns(p_norm + tl.arange(0, 1), STEP, TILE_K, K, "")


@triton.jit
def _load_x(
    p_x, num_rows, stride_x, INDEX: tl.constexpr, ROWS: tl.constexpr, TILE_K: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """[1, TILE_K]: step INDEX // ROWS of row INDEX % ROWS of x. Rows past the last are the last again, from L1."""
    i_m = tl.minimum(INDEX % ROWS, num_rows - 1).to(tl.int64)
    return _load_columns(p_x + i_m * stride_x + tl.arange(0, 1), INDEX // ROWS, TILE_K, K, "evict_last")


@triton.jit
def _output_row(p_out, stride_o, i_n, m: tl.constexpr, num_outputs, num_rows):
    """Pointers to outputs of row m, and the mask of those that exist."""
    return p_out + m * tl.cast(stride_o, tl.int64) + i_n, (i_n < num_outputs) & (tl.full(i_n.shape, m, tl.int32) < num_rows)


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def multiply_in_registers(
    p_x, p_w, p_norm, p_bias, p_out, eps, num_rows, num_outputs, stride_x, stride_w, stride_o,
    K: tl.constexpr, M_PAD: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, DEPTH: tl.constexpr,
    LINES: tl.constexpr, LINE: tl.constexpr, VECTOR: tl.constexpr,
    GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: outputs [p, p + 1) * TILE_N of all rows of x. All its steps are unrolled, the loads DEPTH steps ahead."""
    STEPS: tl.constexpr = (K + TILE_K - 1) // TILE_K
    EARLY: tl.constexpr = DEPTH if DEPTH < STEPS else STEPS
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    i_n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    p_rows, p_rows_up = weight_rows(p_w, stride_w, i_n, num_outputs, GATED, VECTOR)
    weights = (_load_weight_step(p_rows, p_rows_up, p_norm, 0, TILE_K, K, GATED),)
    for i in tl.static_range(1, EARLY):
        tiles = _load_weight_step(p_rows, p_rows_up, p_norm, i, TILE_K, K, GATED)
        weights = weights + (tiles,)  # type: ignore[assignment]  # noqa: RUF005 (Triton knows no starred tuples)
    prefetch(p_rows, EARLY * TILE_K, LINES, LINE, K)
    if GATED:
        prefetch(p_rows_up, EARLY * TILE_K, LINES, LINE, K)
    bias, bias_up = load_bias(p_bias, i_n, num_outputs, GATED)
    if PDL:
        # Whatever comes next waits for the end of this launch, however early it is there.
        gdc_launch_dependents()
        gdc_wait()

    inputs = (_load_x(p_x, num_rows, stride_x, 0, M_PAD, TILE_K, K),)
    for j in tl.static_range(1, EARLY * M_PAD):
        inputs = inputs + (_load_x(p_x, num_rows, stride_x, j, M_PAD, TILE_K, K),)  # type: ignore[assignment]  # noqa: RUF005
    residuals = (bias,)
    if HAS_RESIDUAL:
        for m in tl.static_range(M_PAD):
            p_outs, mask = _output_row(p_out, stride_o, i_n, m, num_outputs, num_rows)
            residuals = residuals + (tl.load(p_outs, mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005

    # The sums of each row before a step: of step i and row m, the tuple at i * M_PAD + m. All of it is unrolled.
    zeros = tl.zeros([TILE_N, TILE_K], tl.float32)
    sums = ((zeros, zeros, tl.zeros([1, TILE_K], tl.float32)),)
    for _ in tl.static_range(1, M_PAD):
        sums = sums + (sums[0],)  # type: ignore[assignment]  # noqa: RUF005
    for i in tl.static_range(STEPS):
        if i + EARLY < STEPS:
            tiles = _load_weight_step(p_rows, p_rows_up, p_norm, i + EARLY, TILE_K, K, GATED)
            weights = weights + (tiles,)  # type: ignore[assignment]  # noqa: RUF005
            for m in tl.static_range(M_PAD):
                x = _load_x(p_x, num_rows, stride_x, (i + EARLY) * M_PAD + m, M_PAD, TILE_K, K)
                inputs = inputs + (x,)  # type: ignore[assignment]  # noqa: RUF005
        w, w_up, norm = weights[i]
        for m in tl.static_range(M_PAD):
            acc, acc_up, squares = sums[i * M_PAD + m]
            x = inputs[i * M_PAD + m].to(tl.float32)
            if p_norm is not None:
                squares += x * x
                x *= norm.to(tl.float32)
            acc += x * w.to(tl.float32)
            if GATED:
                acc_up += x * w_up.to(tl.float32)
            sums = sums + ((acc, acc_up, squares),)  # type: ignore[assignment]  # noqa: RUF005

    for m in tl.static_range(M_PAD):
        acc, acc_up, squares = sums[STEPS * M_PAD + m]
        total = tl.sum(acc, 1)
        total_up = tl.sum(acc_up, 1) if GATED else total
        if p_norm is not None:
            # The row's own factor comes last: the sums need not wait for it.
            factor = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)
            total, total_up = total * factor, total_up * factor
        residual = residuals[1 + m] if HAS_RESIDUAL else bias
        p_outs, mask = _output_row(p_out, stride_o, i_n, m, num_outputs, num_rows)
        tl.store(p_outs, finish(total + bias, total_up + bias_up, residual, DTYPE, GATED, HAS_RESIDUAL), mask=mask)


@triton.jit
def _load_tile(p_rows, i_k, k, K: tl.constexpr, TILE_K: tl.constexpr):
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
        w = _load_tile(p_w_tile, i_k_w, k, K, TILE_K)
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
            acc_up = tl.dot(_load_tile(p_up_tile, i_k_w, k, K, TILE_K), x, acc_up, input_precision="ieee")

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


def linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    bias_N: torch.Tensor | None = None,
    norm_weight_K: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    residual_MN: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias of at most MAX_ROWS rows. Returns [M, N] of x's dtype: `residual_MN`, or `out`, if given.

    With `norm_weight_K` x is RMS-normed first: x / sqrt(mean(x^2) + norm_eps) * weight. With `residual_MN` the result is added
    to it in place. With `gated` the weight (and bias) has 2N rows, those of the gate and then those of up: silu(gate) * up.
    Sums are float32. The layer's result is rounded before it is activated or added.

    A row's result depends on no other row. The kernel that multiplies it depends on the number of rows, which may change
    rounding. The same call gives the same bits each time.

    x_MK, weight_NK: fp16, bf16 or fp32, of 16-byte strides, as are all others. x may be a strided view, but not overlap the
    output.

    The weight, the bias and the norm's weight are constants: with programmatic dependent launch they are read before the kernel
    launched just before has ended. If that kernel writes them, synchronise before the first call.

    Cost: one launch, no synchronisation; safe while a graph is captured.
    Raises: ValueError naming the argument.
    """
    device, dtype = x_MK.device, x_MK.dtype
    checks.runnable("x_MK", device)
    if dtype not in checks.FLOAT_DTYPES:
        checks.refuse("x_MK", f"of {dtype}", "float16, bfloat16 or float32")
    if x_MK.dim() != 2 or x_MK.shape[1] == 0:
        checks.refuse("x_MK", f"of shape {tuple(x_MK.shape)}", "2 dimensions: [rows, inputs], of 1 input or more")
    num_rows, num_inputs = x_MK.shape
    if num_rows > MAX_ROWS:
        checks.refuse("x_MK", f"of {num_rows} rows", f"at most {MAX_ROWS}; torch.nn.functional.linear takes more")
    checks.aligned("x_MK", x_MK)
    if weight_NK.dim() != 2:
        checks.refuse("weight_NK", f"of shape {tuple(weight_NK.shape)}", "2 dimensions: [outputs, inputs]")
    num_weight_rows = weight_NK.shape[0]
    if gated and num_weight_rows % 2:
        checks.refuse("weight_NK", f"of {num_weight_rows} rows", "an even number: those of the gate and as many of up")
    num_outputs = num_weight_rows // 2 if gated else num_weight_rows
    checks.vectors("weight_NK", weight_NK, (num_weight_rows, num_inputs), dtype, device)
    if bias_N is not None:
        checks.vectors("bias_N", bias_N, (num_weight_rows,), dtype, device)
    if norm_weight_K is not None:
        checks.vectors("norm_weight_K", norm_weight_K, (num_inputs,), dtype, device)
        if not norm_eps >= 0.0:
            checks.refuse("norm_eps", norm_eps, "0 or more")
    if residual_MN is None:
        out = checks.output(out, (num_rows, num_outputs), dtype, device)
    else:
        if gated or out is not None:
            checks.refuse("residual_MN", f"given with {'gated' if gated else 'out'}", "one of them: the residual is the output")
        checks.vectors("residual_MN", residual_MN, (num_rows, num_outputs), dtype, device)
        out = residual_MN
    if num_rows == 0 or num_outputs == 0:
        return out

    itemsize = x_MK.element_size()
    cut = linear_tiling(num_rows, num_outputs, num_inputs, itemsize, gated)
    overlaps = checks.launches_dependents(device)
    vector = checks.ALIGNMENT_BYTES // itemsize
    options: dict[str, Any] = {
        "K": num_inputs, "M_PAD": padded_rows(num_rows, cut.dots), "TILE_N": cut.tile_n, "TILE_K": cut.tile_k,
        "LINES": cut.prefetch_lines if overlaps else 0, "LINE": _LINE_BYTES // itemsize, "VECTOR": vector,
        "GATED": gated, "HAS_RESIDUAL": residual_MN is not None, "num_warps": cut.num_warps,
        **checks.overlap_options(overlaps),
    }  # fmt: skip
    options |= {"SPLITS": cut.splits, "num_stages": cut.depth} if cut.dots else {"DEPTH": cut.depth}
    if cut.max_registers is not None and not checks.INTERPRETED:
        options["maxnreg"] = cut.max_registers
    kernel = multiply_by_dots if cut.dots else multiply_in_registers
    with checks.on_device(device):
        kernel[(ceil_div(num_outputs, cut.tile_n),)](
            x_MK, weight_NK, norm_weight_K, bias_N, out, norm_eps, num_rows, num_outputs,
            x_MK.stride(0), weight_NK.stride(0) // vector, out.stride(0), **options,
        )  # fmt: skip
    return out
