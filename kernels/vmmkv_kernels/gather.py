"""`gather_blocks` and `scatter_blocks`: blocks of KV that lie in many runs of memory, in one piece and back.

Engines that keep each layer's KV apart have a block in dozens of places. One launch brings many blocks together at the speed of
the device's memory, and one copy moves the piece between device and host at the speed of the link.

Legend: N blocks, R runs of a block, W words of 8 bytes in a run. Prefixes: p_ pointer, i_ index, m_ mask.
"""

import torch
import triton
import triton.language as tl

from vmmkv_kernels import checks

_WORDS = 1024
"""Words of a program."""


@triton.jit
def _copy(p_addresses, p_strides, p_blocks, p_piece, num_runs, num_words, IS_LOAD: tl.constexpr, WORDS: tl.constexpr):
    i_r, i_n = tl.program_id(0).to(tl.int64), tl.program_id(2)
    block = tl.load(p_blocks + i_n)
    if block >= 0:
        i_w = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
        m_w = i_w < num_words
        address = tl.load(p_addresses + i_r) + block * tl.load(p_strides + i_r)
        p_run = tl.multiple_of(address, 16).to(tl.pointer_type(tl.int64)) + i_w
        p_part = p_piece + (i_n * num_runs + i_r) * num_words + i_w
        if IS_LOAD:
            tl.store(p_run, tl.load(p_part, mask=m_w), mask=m_w)
        else:
            tl.store(p_part, tl.load(p_run, mask=m_w), mask=m_w)


def gather_blocks(addresses_R: torch.Tensor, strides_R: torch.Tensor, blocks_N: torch.Tensor, piece_NRW: torch.Tensor) -> None:
    """Copy blocks into a piece: run r of block b lies at `addresses_R[r] + b * strides_R[r]`; a negative block is left out.

    All are int64, contiguous and on one device. Addresses and strides are multiples of 16 bytes, and blocks are the engine's,
    which is not checked. Cost: one launch, which reads and writes the blocks once. Raises: ValueError naming the argument.
    """
    _launch(addresses_R, strides_R, blocks_N, piece_NRW, is_load=False)


def scatter_blocks(addresses_R: torch.Tensor, strides_R: torch.Tensor, blocks_N: torch.Tensor, piece_NRW: torch.Tensor) -> None:
    """Copy a piece into blocks, no two of which are the same: the reverse of `gather_blocks`, with its cost and errors."""
    _launch(addresses_R, strides_R, blocks_N, piece_NRW, is_load=True)


def _launch(
    addresses_R: torch.Tensor, strides_R: torch.Tensor, blocks_N: torch.Tensor, piece_NRW: torch.Tensor, *, is_load: bool
) -> None:
    device, num_runs = addresses_R.device, addresses_R.shape[0]
    num_blocks, num_words = blocks_N.shape[0], piece_NRW.shape[-1]
    checks.runnable("addresses_R", device)
    checks.exactly("addresses_R", addresses_R, torch.int64, (num_runs,), device)
    checks.exactly("strides_R", strides_R, torch.int64, (num_runs,), device)
    checks.exactly("blocks_N", blocks_N, torch.int64, (num_blocks,), device)
    checks.exactly("piece_NRW", piece_NRW, torch.int64, (num_blocks, num_runs, num_words), device)
    if num_words % 2:
        checks.refuse("piece_NRW", f"of {num_words} words a run", "an even number: 16 bytes are read at once")
    with checks.on_device(device):
        _copy[(num_runs, triton.cdiv(num_words, _WORDS), num_blocks)](
            addresses_R, strides_R, blocks_N, piece_NRW, num_runs, num_words, IS_LOAD=is_load, WORDS=_WORDS
        )
