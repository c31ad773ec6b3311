"""Sums over the GPUs of a host, added to a residual and normed on the way, in one launch.

    rank 0   x ──┬─ words ─────────────┐        a word is 8 bytes: 4 of x, and the number of the sum
                 └──> x + words ──> sum │
    rank 1   x ──┬─ words ──────────┐  │        all ranks add up in the order of ranks, and have the same bits
                 └──> x + words <───│──┘
                          └─────────┘

GPUs write 8 aligned bytes as one, so a rank that finds the right number has the data too, and nothing waits for a fence (the
protocol LL of NCCL). The place of a word is written again two sums later. By then it was read: a rank begins its next sum when
the last one has ended, and the sender has waited for the words of that next sum.

Legend: N rows, E elements of a row, W words of a row, R ranks. Prefixes: p_ pointer, i_ index, m_ mask.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv_kernels import checks
from vmmkv_kernels.norm import MAX_WIDTH

MAX_ROWS = 1024
"""Most rows of one sum, one a program. Programs begin in order on all ranks, so none waits for one that cannot begin."""
_MAX_THREADS = 1 << 17
"""Most threads of one sum: half of an H200's."""
_DATA_BYTES = 4
"""Bytes of data among the 8 of a word."""
_MAX_WARPS = 16


@triton.jit
def _values(words, DTYPE: tl.constexpr):
    """The elements in float32 of words whose lower halves have them."""
    data = words.to(tl.int32)
    if DTYPE.primitive_bitwidth == 32:
        return data.to(DTYPE, bitcast=True).to(tl.float32)
    else:
        low, high = data.to(tl.int16).to(DTYPE, bitcast=True), (data >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        return tl.interleave(low, high).to(tl.float32)


@triton.jit
def _sum_and_norm(
    p_data, p_x, p_residual, p_weight, eps, p_regions, p_counts, p_ended, stride_residual, num_words,
    RANK: tl.constexpr, R: tl.constexpr, E: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program n: row n. `p_data`: x as int32. `num_words`: of one rank's part of a region."""
    i_n = tl.program_id(0).to(tl.int64)
    i_w = tl.arange(0, W_PAD)
    m_w = i_w < W
    dtype: tl.constexpr = p_x.dtype.element_ty
    p_region = tl.multiple_of(tl.load(p_regions + RANK).to(tl.pointer_type(tl.int64)), 16)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    number = tl.load(p_counts + i_n) + 1
    first = (number & 1).to(tl.int64) * R * num_words + i_n * W
    own = tl.load(p_data + i_n * W + i_w, mask=m_w, other=0).to(tl.int64) & 0xFFFFFFFF
    numbered = own | (number.to(tl.int64) << 32)
    for i in tl.static_range(1, R):
        p_peer = tl.multiple_of(tl.load(p_regions + (RANK + i) % R).to(tl.pointer_type(tl.int64)), 16)
        tl.store(p_peer + first + RANK * num_words + i_w, numbered, mask=m_w)
    i_e = tl.arange(0, W_PAD * E // W)
    m_e = i_e < E
    total = tl.zeros([W_PAD * E // W], dtype=tl.float32)
    for r in tl.static_range(R):
        words = own
        if r != RANK:
            p_words = p_region + first + r * num_words + i_w
            num_late = W
            while num_late > 0:
                words = tl.load(p_words, mask=m_w, other=0, volatile=True)
                is_late = m_w & ((words >> 32).to(tl.int32) != number) & (tl.load(p_ended, volatile=True) == 0)
                num_late = tl.sum(is_late.to(tl.int32), 0)
        total += _values(words, dtype)
    if p_residual is None:
        tl.store(p_x + i_n * E + i_e, total.to(dtype), mask=m_e)
    else:
        weight = tl.load(p_weight + i_e, mask=m_e, other=0.0).to(tl.float32)
        p_row = p_residual + i_n * stride_residual + i_e
        x = (tl.load(p_row, mask=m_e, other=0.0).to(tl.float32) + total).to(dtype)
        tl.store(p_row, x, mask=m_e)
        x = x.to(tl.float32)
        normed = (x * tl.rsqrt(tl.sum(x * x, 0) / E + eps)).to(dtype)
        tl.store(p_x + i_n * E + i_e, (normed.to(tl.float32) * weight).to(dtype), mask=m_e)
    tl.store(p_counts + i_n, number)


class Region(NamedTuple):
    """Memory of one rank into which all write. All of it is zero before the first sum."""

    rank: int
    addresses_R: torch.Tensor
    """[R] int64, here: where each rank's memory is mapped on this device."""
    counts_N: torch.Tensor
    """[MAX_ROWS] int32: sums of each row so far."""
    ended_1: torch.Tensor
    """[1] int32. If it is not 0, nothing waits any more, and sums mean nothing."""
    part_words: int
    """Words that one rank may write in a sum."""

    @classmethod
    def open(
        cls, rank: int, num_ranks: int, size_bytes: int, map_all: Callable[[int], Sequence[int]], device: torch.device
    ) -> "Region":
        """Open memory for sums of `size_bytes` at most. `map_all` maps so many zeroed words and returns addresses by rank."""
        part_words = size_bytes // _DATA_BYTES // 16 * 16  # so that stores are of 16 bytes
        addresses_R = torch.tensor(map_all(2 * num_ranks * part_words), dtype=torch.int64, device=device)
        counts_N = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        return cls(rank, addresses_R, counts_N, torch.zeros(1, dtype=torch.int32, device=device), part_words)

    def fits(self, x: torch.Tensor) -> bool:
        """Does a tensor fit into the region? All ranks say the same of the same shape and dtype."""
        width, row_bytes = x.shape[-1], x.shape[-1] * x.element_size()
        return (
            x.dtype in (torch.bfloat16, torch.float16, torch.float32)
            and 0 < width <= MAX_WIDTH
            and not row_bytes % checks.ALIGNMENT_BYTES
            and 0 < x.numel() <= MAX_ROWS * width
            and x.numel() // width * 32 * _num_warps(row_bytes) <= _MAX_THREADS
            and x.nbytes <= self.part_words * _DATA_BYTES
        )


def _num_warps(row_bytes: int) -> int:
    return max(1, min(_MAX_WARPS, int(triton.next_power_of_2(row_bytes)) // 512))  # four words a thread


def sum_ranks(
    x_NE: torch.Tensor,
    region: Region,
    *,
    residual_NE: torch.Tensor | None = None,
    weight_E: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Sum a tensor over all ranks, in place: the same bits on each. Returns it.

    With `residual_NE` the sum is added to that, in place, and x becomes its RMS norm, see `rms_norm`. What is added up is not
    rounded before. All ranks launch the same sums, of the same widths of rows, in the same order. Blocks on the device, not on
    the host, until all have.

    x_NE: contiguous, and such that `region.fits` it. residual_NE: of its shape and dtype. weight_E: contiguous.

    Cost: one launch; each rank writes twice x's bytes to each other one. Safe while a graph is captured.
    Raises: ValueError naming the argument.
    """
    device, dtype, width = x_NE.device, x_NE.dtype, x_NE.shape[-1]
    if not region.fits(x_NE) or not x_NE.is_contiguous():
        checks.refuse("x_NE", f"{tuple(x_NE.shape)} of {dtype}", "a contiguous tensor that fits the region")
    if residual_NE is not None:
        checks.vectors("residual_NE", residual_NE, (x_NE.numel() // width, width), dtype, device)
        if weight_E is None:
            checks.refuse("weight_E", "None", "the norm's weight, with a residual")
        checks.norm("weight_E", weight_E, "eps", eps, width, dtype, device)
    row_bytes = width * x_NE.element_size()
    num_words = row_bytes // _DATA_BYTES
    with checks.on_device(device):
        _sum_and_norm[(x_NE.numel() // width,)](
            x_NE.view(torch.int32), x_NE, residual_NE, weight_E, float(eps),
            region.addresses_R, region.counts_N, region.ended_1,
            0 if residual_NE is None else residual_NE.stride(0), region.part_words,
            RANK=region.rank, R=len(region.addresses_R), E=width, W=num_words, W_PAD=triton.next_power_of_2(num_words),
            num_warps=_num_warps(row_bytes), **checks.overlap(device),
        )  # fmt: skip
    return x_NE
