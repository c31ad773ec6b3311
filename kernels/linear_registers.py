"""The linear layer of one row or few without tensor cores: weights from memory to registers. See linear.py.

Legend: M rows of x, N rows of the weight, K columns of both. Prefixes: p_ pointer, i_ index, m_ mask.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv.kernels.linear_tiles import finish, load_bias, prefetch, weight_rows


@triton.jit
def _load(p_rows, STEP: tl.constexpr, TILE_K: tl.constexpr, K: tl.constexpr, POLICY: tl.constexpr):
    """[rows, TILE_K]: the columns of one step."""
    i_k = STEP * TILE_K + tl.arange(0, TILE_K)[None, :]
    if (STEP + 1) * TILE_K <= K:
        return tl.load(p_rows[:, None] + i_k, eviction_policy=POLICY)
    else:
        return tl.load(p_rows[:, None] + i_k, mask=i_k < K, other=0.0, eviction_policy=POLICY)


@triton.jit
def _load_weights(
    p_rows, p_rows_up, p_norm, STEP: tl.constexpr, TILE_K: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """One step of the weight, of its second half, and of the norm's weight; the first two are read once."""
    w = _load(p_rows, STEP, TILE_K, K, "evict_first")
    w_up = _load(p_rows_up, STEP, TILE_K, K, "evict_first") if GATED else w
    if p_norm is None:
        return w, w_up, w
    else:
        return w, w_up, _load(p_norm + tl.arange(0, 1), STEP, TILE_K, K, "")


@triton.jit
def _load_x(
    p_x, num_rows, stride_x, INDEX: tl.constexpr, ROWS: tl.constexpr, TILE_K: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """[1, TILE_K]: step INDEX // ROWS of row INDEX % ROWS of x. Rows past the last are the last again, which L1 has."""
    i_m = tl.minimum(INDEX % ROWS, num_rows - 1).to(tl.int64)
    return _load(p_x + i_m * stride_x + tl.arange(0, 1), INDEX // ROWS, TILE_K, K, "evict_last")


@triton.jit
def _outputs(p_out, stride_o, i_n, m: tl.constexpr, num_outputs, num_rows):
    """Pointers to outputs of row m, and which of them there are."""
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
    weights = (_load_weights(p_rows, p_rows_up, p_norm, 0, TILE_K, K, GATED),)
    for i in tl.static_range(1, EARLY):
        tiles = _load_weights(p_rows, p_rows_up, p_norm, i, TILE_K, K, GATED)
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
            p_outs, mask = _outputs(p_out, stride_o, i_n, m, num_outputs, num_rows)
            residuals = residuals + (tl.load(p_outs, mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005

    # What each row has summed up before a step: of step i and row m, the tuple at i * M_PAD + m. All of it is unrolled.
    zeros = tl.zeros([TILE_N, TILE_K], tl.float32)
    sums = ((zeros, zeros, tl.zeros([1, TILE_K], tl.float32)),)
    for _ in tl.static_range(1, M_PAD):
        sums = sums + (sums[0],)  # type: ignore[assignment]  # noqa: RUF005
    for i in tl.static_range(STEPS):
        if i + EARLY < STEPS:
            tiles = _load_weights(p_rows, p_rows_up, p_norm, i + EARLY, TILE_K, K, GATED)
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
        p_outs, mask = _outputs(p_out, stride_o, i_n, m, num_outputs, num_rows)
        tl.store(p_outs, finish(total + bias, total_up + bias_up, residual, DTYPE, GATED, HAS_RESIDUAL), mask=mask)
