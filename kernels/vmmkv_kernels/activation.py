"""The activation of a gated MLP: SiLU of the gate, times up, from one fused projection, in one launch.

Legend: N rows (tokens), F width of the MLP, G = 2 F. Prefixes: p_ pointer, i_ index, m_ mask.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv.units import ceil_div
from vmmkv_kernels import checks

_PROGRAM_BYTES = 4096
"""Bytes of the gate in a program: two 16-byte loads for each of its 128 threads, and two of up."""

_MAX_WARPS = 4


@triton.jit
def _silu_mul(
    p_gate_up, p_out, stride_in, stride_out,
    F: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: columns [p % PROGRAMS, p % PROGRAMS + 1) * COLUMNS of row p // PROGRAMS."""
    i_n = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    i_f = tl.program_id(0) % PROGRAMS * COLUMNS + tl.arange(0, COLUMNS)
    m_f = i_f < F
    dtype: tl.constexpr = p_out.dtype.element_ty
    p_gate = p_gate_up + i_n * stride_in + i_f
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(p_gate, mask=m_f, other=0.0).to(tl.float32)
    up = tl.load(p_gate + F, mask=m_f, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(p_out + i_n * stride_out + i_f, (activated * up).to(dtype), mask=m_f)


def silu_mul(gate_up_NG: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(gate) * up`: the gate is the first F columns, up the others. Returns [N, F] of their dtype (`out` if given).

    Rounded as in transformers: SiLU (Elfwing et al., 2018) in float32, rounded to the dtype, times up, rounded again.

    gate_up_NG, out: fp16, bf16 or fp32, rows of any stride of whole 16 bytes; they do not overlap.

    Cost: one launch, no synchronisation; allocates `out` if None is given; safe while a graph is captured. Compute
    capability 9 makes it ready while the kernel before it still runs.
    Raises: ValueError naming the argument.
    """
    device, dtype = gate_up_NG.device, gate_up_NG.dtype
    num_rows, num_columns = checks.matrix("gate_up_NG", gate_up_NG, "[tokens, 2 * MLP width]")
    if num_columns == 0 or num_columns % 2:
        checks.refuse("gate_up_NG", f"of {num_columns} columns", "an even number of them: the gate's, then as many of up")
    width = num_columns // 2
    columns = min(triton.next_power_of_2(width), _PROGRAM_BYTES // gate_up_NG.element_size())
    programs = ceil_div(width, columns)
    if num_rows * programs >= checks.INT32_END:
        checks.refuse("gate_up_NG", f"of {num_rows} rows", f"fewer than {ceil_div(checks.INT32_END, programs)} of this width")
    out = checks.output(out, (num_rows, width), dtype, device)
    if num_rows == 0:
        return out
    num_warps = max(1, min(_MAX_WARPS, columns * gate_up_NG.element_size() // (32 * checks.ALIGNMENT_BYTES)))
    with checks.on_device(device):
        _silu_mul[(num_rows * programs,)](
            gate_up_NG, out, gate_up_NG.stride(0), out.stride(0),
            F=width, COLUMNS=columns, PROGRAMS=programs, num_warps=num_warps, **checks.overlap(device),
        )  # fmt: skip
    return out
