"""Prefill attention on Hopper: plain bf16 slots with heads of 128, without window or softcap. See prefill_hopper_loop.py.

Descriptors: K and V have two each. One is the slots as they are, for whole tiles. The other ends where the tile's sequence
does, wherever that is, so that rows past it are neither read, as their pages may be unmapped, nor left as they are, as 0 * NaN
is NaN: of 2**30 virtual rows the tile takes the last. Where these are is corrected by two more dimensions: a step of the one is
2**34 - a row, of which 2**30 steps wrap around all 2**64 elements (Triton's ragged descriptors do the same), and a step of the
other is a row.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vmmkv.kernels.memory import KVMemory
from vmmkv.kernels.prefill_hopper_loop import GROUP_TOKENS, HEAD_DIM, RAGGED_ROWS, TILE, TOKENS, load_part, multiply_part

_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit(do_not_specialize=["num_sequences", "num_queries", "num_tiles", "num_slots", "num_rows", "num_work"])
def prefill_kernel(
    desc_q, desc_k, desc_v, desc_k_end, desc_v_end, p_out, p_starts, p_lengths, p_slots, p_limits, p_taken,
    scale_log2, num_sequences, num_queries, num_tiles, num_slots, num_rows, num_work,
    stride_qh, stride_kk, stride_vk, stride_on, stride_oh,
    H: gl.constexpr, G: gl.constexpr, B_PAD: gl.constexpr, HAS_LIMIT: gl.constexpr,
    Q_STAGES: gl.constexpr, STAGES: gl.constexpr, ORDER: gl.constexpr, TURNS: gl.constexpr, WIDE_STORES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Each program takes pieces until none is left: a tile of 128 queries of a sequence under one query head each."""
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [Q_STAGES * 2, GROUP_TOKENS, HEAD_DIM], desc_q.layout)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, HEAD_DIM], desc_q.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, HEAD_DIM], desc_q.layout)
    notes = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Ready when the bytes have come, and queries when their note has too; free when both groups have said so.
    q_bars = _barriers(Q_STAGES, 2), _barriers(Q_STAGES, 2)
    k_bars = _barriers(STAGES, 1), _barriers(STAGES, 2)
    v_bars = _barriers(STAGES, 1), _barriers(STAGES, 2)
    turn_0, turn_1 = _barriers(1, 1).index(0), _barriers(1, 1).index(0)
    descs = desc_q, desc_k, desc_v, desc_k_end, desc_v_end
    batch = p_starts, p_lengths, p_slots, p_limits, num_sequences, num_queries, num_tiles, num_slots, num_rows
    gl.warp_specialize(
        [
            (multiply_part, (
                p_out, notes, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, (turn_0, turn_1), scale_log2, stride_on, stride_oh,
                0, Q_STAGES, STAGES, TURNS, WIDE_STORES,
            )),
            (multiply_part, (
                p_out, notes, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, (turn_1, turn_0), scale_log2, stride_on, stride_oh,
                1, Q_STAGES, STAGES, TURNS, WIDE_STORES,
            )),
            (load_part, (
                descs, batch, notes, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, p_taken, stride_qh, stride_kk, stride_vk,
                num_work, H, G, B_PAD, HAS_LIMIT, Q_STAGES, STAGES, ORDER,
            )),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip
