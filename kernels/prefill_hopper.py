"""Prefill attention on Hopper: plain bf16 slots with heads of 128, without window or softcap. See prefill_hopper_loop.py.

Descriptors: K and V have two each. One is the slots as they are, for whole tiles. The other ends where the tile's sequence
does, wherever that is, so that rows past it are neither read, as their pages may be unmapped, nor left as they are, as 0 * NaN
is NaN: of 2**30 virtual rows the tile takes the last. Where these are is corrected by two more dimensions: a step of the one is
2**34 - a row, of which 2**30 steps wrap around all 2**64 elements (Triton's ragged descriptors do the same), and a step of the
other is a row.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vmmkv.kernels import checks
from vmmkv.kernels.memory import KVMemory
from vmmkv.kernels.prefill_hopper_loop import GROUP_TOKENS, HEAD_DIM, RAGGED_ROWS, TILE, TOKENS, load_part, multiply_part

_ENDLESS = 0x7FFF0000  # steps of the two dimensions that place the virtual rows
_WRAP = 2**34  # elements: 2**30 steps of so many are a whole number of times around
_MAX_STRIDE_BYTES = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperTiling:
    """How a launch is cut."""

    q_stages: int = 2
    """Tiles of queries in shared memory: with two the next piece is loaded while this one is worked at."""
    stages: int = 2
    """Tiles of K, and as many of V."""
    order: Literal["grid", "stride", "snake", "taken"] = "taken"
    """A program for each piece; or one a multiprocessor, which takes pieces in a fixed order or whichever is next."""
    turns: bool = True
    """Do the groups take turns at the tensor cores?"""
    wide_stores: bool = False
    """Are outputs exchanged between threads so that each stores 16 bytes?"""
    registers: int = 240


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
                p_out, notes, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, (turn_0, turn_1), scale_log2,
                stride_on, stride_oh, 0, Q_STAGES, STAGES, TURNS, WIDE_STORES,
            )),
            (multiply_part, (
                p_out, notes, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, (turn_1, turn_0), scale_log2,
                stride_on, stride_oh, 1, Q_STAGES, STAGES, TURNS, WIDE_STORES,
            )),
            (load_part, (
                descs, batch, notes, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, p_taken, stride_qh, stride_kk, stride_vk,
                num_work, H, G, B_PAD, HAS_LIMIT, Q_STAGES, STAGES, ORDER,
            )),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def applies(q_NHD: torch.Tensor, memory: KVMemory, options: checks.AttentionOptions) -> bool:
    """Is this what the kernel is for, on a device that it is for?"""
    plain = memory.kind is None and not memory.block and q_NHD.dtype == torch.bfloat16 and memory.head_dim == HEAD_DIM.value
    is_open = options.softcap_log2 == 0.0 and options.rows_seen >= memory.num_rows
    widest_bytes = 2 * max(*memory.k.stride(), *memory.v.stride())
    device = q_NHD.device
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return plain and is_open and is_hopper and widest_bytes < _MAX_STRIDE_BYTES


def _descriptor(base: torch.Tensor, shape: list[int], strides: list[int], box: list[int]) -> TensorDescriptor:
    return TensorDescriptor(base, shape, strides, box, gl.NVMMASharedLayout(128, 16, len(box)))


def _rows_descriptor(x_NHD: torch.Tensor) -> TensorDescriptor:
    """Queries: rows of all heads, in boxes of one group's rows of a head."""
    width = (x_NHD.shape[1] - 1) * x_NHD.stride(1) + HEAD_DIM.value
    row = x_NHD.stride(0) if x_NHD.shape[0] > 1 else checks.ALIGNMENT_BYTES
    return _descriptor(x_NHD, [x_NHD.shape[0], width], [row, 1], [GROUP_TOKENS.value, HEAD_DIM.value])


def _plane_descriptors(plane: torch.Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """K or V of all slots, in boxes of a tile of a head: the slots as they are, and to end anywhere. See the top.

    The stride of a dimension of size 1, which is never followed, is made what a descriptor takes.
    """
    slots, num_rows, heads, _ = plane.shape
    slot = plane.stride(0) if slots > 1 else checks.ALIGNMENT_BYTES
    row = plane.stride(1) if num_rows > 1 else checks.ALIGNMENT_BYTES
    width = (heads - 1) * plane.stride(2) + HEAD_DIM.value
    box = [TILE.value, HEAD_DIM.value]
    whole = _descriptor(plane, [slots, num_rows, width], [slot, row, 1], [1, *box])
    shape = [slots, _ENDLESS, _ENDLESS, RAGGED_ROWS.value, width]
    return whole, _descriptor(plane, shape, [slot, _WRAP - row, row, row, 1], [1, 1, 1, *box])


def launch_prefill_hopper(
    q_NHD: torch.Tensor,
    memory: KVMemory,
    query_starts: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    limit_S: torch.Tensor | None,
    options: checks.AttentionOptions,
    out_NHD: torch.Tensor,
    *,
    cut: HopperTiling,
    taken: torch.Tensor | None = None,
) -> None:
    """`launch_prefill` where `applies`, of checked arguments, into `out_NHD`; not the sequences of one query.

    taken: int32, one, 0 when the kernel starts, for the order "taken".
    """
    num_queries, num_heads, _ = q_NHD.shape
    num_tiles = num_queries // TOKENS.value + lengths_B.shape[0]
    num_work = num_tiles * num_heads
    programs = num_work if cut.order == "grid" else min(num_work, _num_multiprocessors(q_NHD.device))
    desc_k, desc_k_end = _plane_descriptors(memory.k)
    desc_v, desc_v_end = _plane_descriptors(memory.v)
    with checks.on_device(q_NHD.device):
        prefill_kernel[(programs,)](
            _rows_descriptor(q_NHD), desc_k, desc_v, desc_k_end, desc_v_end, out_NHD,
            query_starts, lengths_B, slots_B, limit_S, taken if cut.order == "taken" else None,
            options.scale_log2, lengths_B.shape[0], num_queries, num_tiles, memory.num_slots, memory.num_rows, num_work,
            q_NHD.stride(1), memory.k.stride(2), memory.v.stride(2), out_NHD.stride(0), out_NHD.stride(1),
            H=num_heads, G=num_heads // memory.num_kv_heads, B_PAD=max(32, triton.next_power_of_2(lengths_B.shape[0])),
            HAS_LIMIT=limit_S is not None, Q_STAGES=cut.q_stages, STAGES=cut.stages, ORDER=cut.order, TURNS=cut.turns,
            WIDE_STORES=cut.wide_stores, REGISTERS=cut.registers, num_warps=4,
        )  # fmt: skip
