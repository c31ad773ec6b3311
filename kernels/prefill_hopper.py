"""Prefill attention on Hopper: plain bf16 slots with heads of 128, without window or softcap. See prefill_hopper_loop.py.

Descriptors: K and V have two each. One is the slots as they are, for whole tiles. The other ends where the tile's sequence
does, wherever that is, so that rows past it are neither read, as their pages may be unmapped, nor left as they are, as 0 * NaN
is NaN: of 2**30 virtual rows the tile takes the last. Where these are is corrected by two more dimensions: a step of the one is
2**34 - a row, of which 2**30 steps wrap around all 2**64 elements (Triton's ragged descriptors do the same), and a step of the
other is a row.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vmmkv.kernels import checks
from vmmkv.kernels.memory import KVMemory
from vmmkv.kernels.prefill_hopper_loop import (
    GROUP_TOKENS,
    HEAD_DIM,
    Q_STAGES,
    RAGGED_ROWS,
    STAGES,
    TILE,
    TOKENS,
    load_part,
    multiply_part,
)

_ENDLESS = 0x7FFF0000  # steps of the two dimensions that place the virtual rows
_WRAP = 2**34  # elements: 2**30 steps of so many are a whole number of times around
_MAX_STRIDE_BYTES = 2**40
_MAX_COLUMNS = 2**31
_NO_WINDOW = 2**31 - 1
_REGISTERS = gl.constexpr(240)  # of a thread that multiplies; with those of the loading warp all that there are
_LOAD_REGISTERS = gl.constexpr(24)


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
    H: gl.constexpr, G: gl.constexpr, HAS_LIMIT: gl.constexpr,
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
                p_out, notes, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, (turn_0, turn_1), scale_log2,
                stride_on, stride_oh, 0,
            )),
            (multiply_part, (
                p_out, notes, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, (turn_1, turn_0), scale_log2,
                stride_on, stride_oh, 1,
            )),
            (load_part, (
                descs, batch, notes, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, p_taken, stride_qh, stride_kk, stride_vk,
                num_work, H, G, HAS_LIMIT,
            )),
        ],
        [4, 1], [_REGISTERS, _LOAD_REGISTERS],
    )  # fmt: skip


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def applies(q_NHD: torch.Tensor, memory: KVMemory, options: checks.AttentionOptions) -> bool:
    """Is this what the kernel is for, on a device of compute capability 9.0?

    It depends on the memory and on what the queries are, never on batch or lengths: so that a query's bits do not either.
    """
    is_plain = memory.kind is None and not memory.block and q_NHD.dtype == torch.bfloat16 and memory.head_dim == HEAD_DIM.value
    is_open = options.softcap_log2 == 0.0 and options.rows_seen == _NO_WINDOW
    return is_plain and is_open and memory.num_rows < RAGGED_ROWS.value and all(map(_fits, (q_NHD, memory.k, memory.v)))


def _fits(x: torch.Tensor) -> bool:
    """Can a descriptor take these strides? Heads are columns, counted in 32 bits; the last two dimensions are [heads, D]."""
    strides = (stride for size, stride in zip(x.shape[:-2], x.stride()[:-2], strict=True) if size > 1)
    return _width(x) < _MAX_COLUMNS and all(2 * stride < _MAX_STRIDE_BYTES for stride in strides)


def _head_stride(x: torch.Tensor) -> int:
    """Columns from one head to the next. Torch leaves any number where there is one head."""
    return x.stride(-2) if x.shape[-2] > 1 else 0


def _width(x: torch.Tensor) -> int:
    """Columns of a row with all its heads."""
    return (x.shape[-2] - 1) * _head_stride(x) + int(HEAD_DIM.value)


def _descriptor(base: torch.Tensor, shape: list[int], strides: list[int], box: list[int]) -> TensorDescriptor:
    return TensorDescriptor(base, shape, strides, box, gl.NVMMASharedLayout(128, 16, len(box)))


def _rows_descriptor(q_NHD: torch.Tensor) -> TensorDescriptor:
    """Queries: rows of all heads, in boxes of one group's rows of a head."""
    row = q_NHD.stride(0) if q_NHD.shape[0] > 1 else checks.ALIGNMENT_BYTES
    return _descriptor(q_NHD, [q_NHD.shape[0], _width(q_NHD)], [row, 1], [GROUP_TOKENS.value, HEAD_DIM.value])


def _plane_descriptors(x_STKD: torch.Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """K or V of all slots, in boxes of a tile of a head: the slots as they are, and to end anywhere. See the top.

    The stride of a dimension of size 1, which is never followed, is made what a descriptor takes.
    """
    slots, num_rows, _, _ = x_STKD.shape
    slot = x_STKD.stride(0) if slots > 1 else checks.ALIGNMENT_BYTES
    row = x_STKD.stride(1) if num_rows > 1 else checks.ALIGNMENT_BYTES
    width, box = _width(x_STKD), [TILE.value, HEAD_DIM.value]
    whole = _descriptor(x_STKD, [slots, num_rows, width], [slot, row, 1], [1, *box])
    shape = [slots, _ENDLESS, _ENDLESS, RAGGED_ROWS.value, width]
    return whole, _descriptor(x_STKD, shape, [slot, _WRAP - row, row, row, 1], [1, 1, 1, *box])


def launch_prefill_hopper(
    q_NHD: torch.Tensor,
    memory: KVMemory,
    query_starts: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    limit_S: torch.Tensor | None,
    options: checks.AttentionOptions,
    out_NHD: torch.Tensor,
) -> None:
    """`launch_prefill` where `applies`, of checked arguments, into `out_NHD`; not the sequences of one query.

    Cost: two launches, one of which zeroes the count of the pieces that are taken. Safe while a graph is captured: the count is
    then the graph's own, and zeroed on every replay.
    """
    device = q_NHD.device
    num_sequences = lengths_B.shape[0]
    num_queries, num_heads, _ = q_NHD.shape
    num_tiles = num_queries // TOKENS.value + num_sequences
    num_work = num_tiles * num_heads
    desc_k, desc_k_end = _plane_descriptors(memory.k)
    desc_v, desc_v_end = _plane_descriptors(memory.v)
    with checks.on_device(device):
        prefill_kernel[(min(num_work, _num_multiprocessors(device)),)](
            _rows_descriptor(q_NHD), desc_k, desc_v, desc_k_end, desc_v_end, out_NHD,
            query_starts, lengths_B, slots_B, limit_S, torch.zeros(1, dtype=torch.int32, device=device),
            options.scale_log2, num_sequences, num_queries, num_tiles, memory.num_slots, memory.num_rows, num_work,
            _head_stride(q_NHD), _head_stride(memory.k), _head_stride(memory.v), out_NHD.stride(0), out_NHD.stride(1),
            H=num_heads, G=num_heads // memory.num_kv_heads, HAS_LIMIT=limit_S is not None, num_warps=4,
        )  # fmt: skip
