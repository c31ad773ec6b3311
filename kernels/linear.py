"""The linear layers of a decode step: few rows of x, so that reading the weights is all that takes time.

A program has a few rows of the weight and walks all of their columns. One row of x is multiplied without tensor cores
(linear_registers.py), more on them (linear_dots.py). What surrounds a linear layer in a decoder is done on the way: the RMS
norm before it, its bias, the residual stream or the gate's activation behind it. That saves launches, each of which would
read and write a few KiB and cost as much as megabytes of weights.

The norm's factor, 1 / rms(x), is one for each row: it is applied to the sums, so that no program waits for it. Only float16 on
tensor cores is normed first, since x times the norm's weight may pass 65504. Either is at most as far from the truth as
norm, rounding, and linear layer one after the other.

With programmatic dependent launch a program loads its first weights while the kernel before it still runs.

Legend: M rows of x, N outputs, K inputs.
"""

from typing import Any

import torch
import triton

from vmmkv.kernels import checks
from vmmkv.kernels.linear_dots import multiply_by_dots
from vmmkv.kernels.linear_registers import multiply_in_registers
from vmmkv.kernels.linear_tiling import LinearTiling, linear_tiling, padded_rows
from vmmkv.units import ceil_div

MAX_ROWS = 8
"""With more, arithmetic begins to count, and a general matrix product is as good."""

_LINE_BYTES = 128


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
    Sums are float32; the layer's result is rounded before it is activated or added.

    A row's result depends on no other row, but which kernel has multiplied it does on their number: by rounding. The same call
    gives the same bits each time.

    x_MK, weight_NK: fp16, bf16 or fp32, of 16-byte strides, as are all others; x may be a strided view, but not overlap
    what is written.

    The weight, the bias and the norm's weight are constants: with programmatic dependent launch they are read before the
    kernel launched just before has ended. If that one writes them, synchronise before the first call.

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
    checks.vectors("x_MK", x_MK, (num_rows, num_inputs), dtype, device)
    num_outputs = _outputs(weight_NK, gated)
    num_weight_rows = 2 * num_outputs if gated else num_outputs
    checks.vectors("weight_NK", weight_NK, (num_weight_rows, num_inputs), dtype, device)
    if bias_N is not None:
        checks.vectors("bias_N", bias_N, (num_weight_rows,), dtype, device)
    if norm_weight_K is not None:
        checks.vectors("norm_weight_K", norm_weight_K, (num_inputs,), dtype, device)
        if not norm_eps >= 0.0:
            checks.refuse("norm_eps", norm_eps, "0 or more")
    if residual_MN is not None:
        if gated or out is not None:
            checks.refuse("residual_MN", f"given with {'gated' if gated else 'out'}", "one of them: the residual is the output")
        checks.vectors("residual_MN", residual_MN, (num_rows, num_outputs), dtype, device)
        target = residual_MN
    elif out is not None:
        checks.vectors("out", out, (num_rows, num_outputs), dtype, device)
        target = out
    else:
        target = torch.empty((num_rows, num_outputs), dtype=dtype, device=device)
    if num_rows > 0 and num_outputs > 0:
        cut = linear_tiling(num_rows, num_outputs, num_inputs, x_MK.element_size(), gated)
        _launch(x_MK, weight_NK, bias_N, norm_weight_K, norm_eps, target, residual_MN is not None, gated, cut)
    return target


def _outputs(weight_NK: torch.Tensor, gated: bool) -> int:
    """Rows of the result's kind: half of the weight's if it is gated."""
    if weight_NK.dim() != 2:
        checks.refuse("weight_NK", f"of shape {tuple(weight_NK.shape)}", "2 dimensions: [outputs, inputs]")
    if gated and weight_NK.shape[0] % 2:
        checks.refuse("weight_NK", f"of {weight_NK.shape[0]} rows", "an even number: those of the gate and as many of up")
    return weight_NK.shape[0] // 2 if gated else weight_NK.shape[0]


def _launch(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None,
    norm_eps: float,
    target_MN: torch.Tensor,
    has_residual: bool,
    gated: bool,
    cut: LinearTiling,
) -> None:
    """The one launch, of checked arguments."""
    (num_rows, num_outputs), itemsize = target_MN.shape, x_MK.element_size()
    overlaps = checks.launches_dependents(x_MK.device)
    vector = checks.ALIGNMENT_BYTES // itemsize
    options: dict[str, Any] = {
        "K": x_MK.shape[1], "M_PAD": padded_rows(num_rows, cut.dots), "TILE_N": cut.tile_n, "TILE_K": cut.tile_k,
        "LINES": _lines(cut.prefetch_bytes) if overlaps else 0, "LINE": _LINE_BYTES // itemsize, "VECTOR": vector,
        "GATED": gated, "HAS_RESIDUAL": has_residual, "PDL": overlaps, "num_warps": cut.num_warps,
    }  # fmt: skip
    if cut.dots:
        options |= {"SPLITS": cut.splits, "num_stages": cut.depth}
    else:
        options |= {"DEPTH": cut.depth}
    if overlaps:
        options["launch_pdl"] = True
    if cut.max_registers is not None and not checks.INTERPRETED:
        options["maxnreg"] = cut.max_registers
    kernel = multiply_by_dots if cut.dots else multiply_in_registers
    with checks.on_device(x_MK.device):
        kernel[(ceil_div(num_outputs, cut.tile_n),)](
            x_MK, weight_NK, norm_weight_K, bias_N, target_MN, norm_eps, num_rows, num_outputs,
            x_MK.stride(0), weight_NK.stride(0) // vector, target_MN.stride(0), **options,
        )  # fmt: skip


def _lines(prefetch_bytes: int) -> int:
    """Lines of L2, a power of two."""
    return triton.next_power_of_2(ceil_div(prefetch_bytes, _LINE_BYTES)) if prefetch_bytes else 0
