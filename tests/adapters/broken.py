"""Attention functions that are wrong, each in one way that a kernel is; at the top of a module, for a child process."""

import os
import time

import torch

from vmmkv.adapters.attention import sdpa_decode
from vmmkv.memory.address_space import wrap
from vmmkv.units import round_up
from vmmkv_kernels import reference
from vmmkv_kernels.attention.decode import decode

TILE = 16


def _attend_rows(q_HD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, length: int) -> torch.Tensor:
    return reference.attend(q_HD[None], k_TKD, v_TKD, torch.tensor([length - 1]), dtype=q_HD.dtype)[0]


def _wrapped(view_STKD: torch.Tensor, slot: int, length: int, *, in_slots: bool) -> torch.Tensor:
    """The rows of a slot, each found by an offset of 32 bits."""
    slot_stride, row_stride = view_STKD.stride()[:2]
    last = slot * slot_stride if in_slots else (length - 1) * row_stride
    if last < 2**31:
        return view_STKD[slot, :length]
    offset = (last + 2**31) % 2**32 - 2**31 + (0 if in_slots else slot * slot_stride)
    stray = wrap(view_STKD.data_ptr() + offset * view_STKD.itemsize, 64, torch.device("cpu"))
    return view_STKD[slot, :length] + stray.sum()


def int32_offsets(*tensors: torch.Tensor, in_slots: bool) -> torch.Tensor:
    """Offsets of slots, or else of rows, have 32 bits."""
    q_BHD, k_STKD, v_STKD, lengths_B, slots_B = tensors
    for slot, length in zip(slots_B.tolist(), lengths_B.tolist(), strict=True):
        _wrapped(k_STKD, slot, length, in_slots=in_slots)
    return sdpa_decode(q_BHD, k_STKD, v_STKD, lengths_B, slots_B)


def ignores_slots(q_BHD, k_STKD, v_STKD, lengths_B, slots_B):
    return sdpa_decode(q_BHD, k_STKD, v_STKD, lengths_B, torch.arange(1, len(slots_B) + 1))


def reads_a_row_past(q_BHD, k_STKD, v_STKD, lengths_B, slots_B):
    return sdpa_decode(q_BHD, k_STKD, v_STKD, lengths_B + 1, slots_B)


def flattens_by_view(q_BHD, k_STKD, v_STKD, lengths_B, slots_B):
    return sdpa_decode(q_BHD, k_STKD.view(-1).view(k_STKD.shape), v_STKD, lengths_B, slots_B)


def takes_rows_for_contiguous(q_BHD, k_STKD, v_STKD, lengths_B, slots_B):
    num_heads, head_dim = k_STKD.shape[2:]
    strides = k_STKD.stride(0), num_heads * head_dim, head_dim, 1
    views = (view.as_strided(view.shape, strides, view.storage_offset()) for view in (k_STKD, v_STKD))
    return sdpa_decode(q_BHD, *views, lengths_B, slots_B)


def loads_whole_tiles(q_BHD, k_STKD, v_STKD, lengths_B, slots_B):
    """As by TMA: the weights of rows past the length are zero, and what is there is multiplied by them."""
    out_BHD = torch.empty_like(q_BHD)
    for b, (slot, length) in enumerate(zip(slots_B.tolist(), lengths_B.tolist(), strict=True)):
        end = round_up(length, TILE)
        out_BHD[b] = _attend_rows(q_BHD[b], k_STKD[slot, :end], v_STKD[slot, :end], length)
    return out_BHD


def takes_zeros_for_padding(q_BHD, k_STKD, v_STKD, lengths_B, slots_B):
    """Rows of zeros are masked, and others are not, wherever the sequence ends."""
    out_BHD = torch.empty_like(q_BHD)
    for b, (slot, length) in enumerate(zip(slots_B.tolist(), lengths_B.tolist(), strict=True)):
        k_TKD, v_TKD = (view[slot, : round_up(length, TILE)] for view in (k_STKD, v_STKD))
        used_T = k_TKD.flatten(1).ne(0).any(1)
        out_BHD[b] = _attend_rows(q_BHD[b], k_TKD[used_T], v_TKD[used_T], int(used_T.sum()))
    return out_BHD


def scales_keys_in_place(q_BHD, k_STKD, v_STKD, lengths_B, slots_B):
    """For all sequences first, and back again, exactly: which is right if no two share a row."""
    where = list(zip(slots_B.tolist(), lengths_B.tolist(), strict=True))
    for slot, length in where:
        k_STKD[slot, :length] /= 8
    out_BHD = sdpa_decode(8 * q_BHD, k_STKD, v_STKD, lengths_B, slots_B)
    for slot, length in where:
        k_STKD[slot, :length] *= 8
    return out_BHD


def rotates_keys_in_place(*tensors: torch.Tensor) -> torch.Tensor:
    out_BHD = sdpa_decode(*tensors)
    tensors[1][int(tensors[4][0]), 0] *= 2
    return out_BHD


_LENGTHS: dict[tuple[int, int], torch.Tensor] = {}


def keeps_the_first_lengths(q_BHD, k_STKD, v_STKD, lengths_B, slots_B):
    """As a plan made once, or a grid that the host has chosen by the lengths."""
    lengths_B = _LENGTHS.setdefault((k_STKD.data_ptr(), len(lengths_B)), lengths_B.clone())
    return sdpa_decode(q_BHD, k_STKD, v_STKD, lengths_B, slots_B)


def sees_one_page(q_BHD, k_STKD, v_STKD, lengths_B, slots_B):
    """As if what follows the first 2 MiB by address were another allocation."""
    page_rows = 2**21 // (k_STKD.stride(1) * k_STKD.itemsize)
    return sdpa_decode(q_BHD, k_STKD, v_STKD, lengths_B.clamp(max=page_rows), slots_B)


def returns_float64(*tensors: torch.Tensor) -> torch.Tensor:
    return sdpa_decode(*tensors).double()


def returns_nothing(*tensors: torch.Tensor) -> None:
    sdpa_decode(*tensors)


def says(*tensors: torch.Tensor, message: str) -> torch.Tensor:
    raise RuntimeError(message)


def writes_past_the_length(*tensors: torch.Tensor) -> torch.Tensor:
    """As one that stores whole tiles."""
    _, k_STKD, _, lengths_B, slots_B = tensors
    for slot, length in zip(slots_B.tolist(), lengths_B.tolist(), strict=True):
        if length % 64:  # where pages end
            k_STKD[slot, length] = 0
    return sdpa_decode(*tensors)


def writes_to_the_next_layer(*tensors: torch.Tensor) -> torch.Tensor:
    """Behind V of its own, which is right."""
    _, _, v_STKD, _, slots_B = tensors
    width = v_STKD.shape[2] * v_STKD.shape[3]
    start = v_STKD.storage_offset() + int(slots_B[0]) * v_STKD.stride(0) + width
    v_STKD.as_strided((width,), (1,), start).fill_(7)
    return sdpa_decode(*tensors)


def on_a_stream_of_its_own(*tensors: torch.Tensor, waits: bool, is_waited_for: bool) -> torch.Tensor:
    """Right if it waits for the current stream, and is waited for."""
    q_BHD, k_STKD, v_STKD, lengths_B, slots_B = tensors
    current, own = torch.cuda.current_stream(), torch.cuda.Stream()
    if waits:
        own.wait_stream(current)
    out_BHD = torch.empty_like(q_BHD)
    with torch.cuda.stream(own):
        if not is_waited_for:
            torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]  # as a longer kernel
        out_BHD.copy_(decode(q_BHD, k_STKD, v_STKD, lengths_B, slots_B))
    if is_waited_for:
        current.wait_stream(own)
    return out_BHD


def hangs(*tensors: torch.Tensor) -> torch.Tensor:
    time.sleep(600)
    return tensors[0]


def exits(*tensors: torch.Tensor) -> torch.Tensor:
    os._exit(7)


def sees_all_queries_as_last(*tensors: torch.Tensor) -> torch.Tensor:
    """Prefill without a causal mask."""
    q_NHD, k_STKD, v_STKD, query_starts, lengths_B, slots_B = tensors
    counts_B = query_starts.diff()
    return sdpa_decode(q_NHD, k_STKD, v_STKD, lengths_B.repeat_interleave(counts_B), slots_B.repeat_interleave(counts_B))
