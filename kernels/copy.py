"""Copy: many pieces of device memory in one launch, for forks, prefix copies and moved pages.

A call for each 2 MiB is bound by launches. Here the copies are cut into *pieces*, and a fixed grid of programs divides
the pieces evenly: each program sums up the pieces of all copies on the device, finds where its share begins and walks on
from there. So the host knows no size, and one captured graph serves whatever its index tensors say when it is replayed.

Legend: M copies, S slots, T rows of a slot, E bytes of a row.
Prefixes: p_ pointer, i_ index, m_ mask.
"""

import functools

import torch
import triton
import triton.language as tl

from vmmkv.kernels import checks
from vmmkv.units import ceil_div

MAX_COPIES = 4096
"""Every program sums up the pieces of all copies in its registers."""

_PIECE_BYTES = 16384
"""Four 16-byte loads in flight for each of a program's 256 threads."""
_NUM_WARPS = 8
_PROGRAMS_PER_SM = 4
_INTERPRETED_PROGRAMS = 3

_WORD_BYTES = tl.constexpr(4)


@triton.jit
def _copy_of(
    i_m, m_m, p_memory, p_sources, p_targets, p_starts, p_ends, num_slots, num_rows, stride_s, size_bytes,
    ROW_BYTES: tl.constexpr,
):  # fmt: skip
    """Source address, target address and bytes of copies `i_m`: 0 bytes where nothing is to be copied.

    With ROW_BYTES, sources and targets are slots of `p_memory`, and the bytes are those of the rows [start, end). With 0
    they are addresses.
    """
    source = tl.load(p_sources + i_m, mask=m_m, other=-1).to(tl.int64)
    target = tl.load(p_targets + i_m, mask=m_m, other=-1).to(tl.int64)
    if ROW_BYTES == 0:
        return source, target, tl.where((source > 0) & (target > 0), size_bytes, 0)
    else:
        start = tl.maximum(tl.load(p_starts + i_m, mask=m_m, other=0).to(tl.int64), 0)
        end = tl.minimum(tl.load(p_ends + i_m, mask=m_m, other=0).to(tl.int64), num_rows)
        m_slot = (source >= 0) & (source < num_slots) & (target >= 0) & (target < num_slots)
        first_byte = p_memory.to(tl.int64) + start * ROW_BYTES
        copied_bytes = tl.where(m_slot, tl.maximum(end - start, 0), 0) * ROW_BYTES
        return first_byte + source * stride_s, first_byte + target * stride_s, copied_bytes


@triton.jit(do_not_specialize=["num_copies", "num_slots", "num_rows", "size_bytes"])
def _copy(
    p_memory, p_sources, p_targets, p_starts, p_ends, num_copies, num_slots, num_rows, stride_s, size_bytes,
    ROW_BYTES: tl.constexpr, M_PAD: tl.constexpr, PIECE_BYTES: tl.constexpr,
):  # fmt: skip
    """Program p of P: the pieces [total * p / P, total * (p + 1) / P) of all copies."""
    i_m = tl.arange(0, M_PAD)
    _, _, sizes = _copy_of(
        i_m, i_m < num_copies, p_memory, p_sources, p_targets, p_starts, p_ends, num_slots, num_rows, stride_s, size_bytes,
        ROW_BYTES,
    )  # fmt: skip
    nums_pieces = tl.cdiv(sizes, PIECE_BYTES).to(tl.int32)
    piece_ends = tl.cumsum(nums_pieces, 0)
    total = tl.sum(nums_pieces, 0).to(tl.int64)
    next_piece = (total * tl.program_id(0) // tl.num_programs(0)).to(tl.int32)
    end_piece = (total * (tl.program_id(0) + 1) // tl.num_programs(0)).to(tl.int32)
    before = piece_ends <= next_piece
    m = tl.sum(before.to(tl.int32), 0)
    # The pieces of copy m that precede this program's share.
    skipped = next_piece - tl.max(tl.where(before, piece_ends, 0), 0)

    i_word = tl.arange(0, PIECE_BYTES // _WORD_BYTES)
    while next_piece < end_piece:
        source, target, size = _copy_of(
            m, True, p_memory, p_sources, p_targets, p_starts, p_ends, num_slots, num_rows, stride_s, size_bytes, ROW_BYTES
        )
        taken = tl.minimum(tl.cdiv(size, PIECE_BYTES).to(tl.int32) - skipped, end_piece - next_piece)
        for i_piece in range(skipped, skipped + taken):
            offset = tl.cast(i_piece, tl.int64) * PIECE_BYTES
            words_left = tl.multiple_of((tl.minimum(size - offset, PIECE_BYTES) // _WORD_BYTES).to(tl.int32), 4)
            p_from = tl.multiple_of((source + offset).to(tl.pointer_type(tl.int32)), 16)
            p_to = tl.multiple_of((target + offset).to(tl.pointer_type(tl.int32)), 16)
            mask = i_word < words_left
            tl.store(p_to + i_word, tl.load(p_from + i_word, mask=mask), mask=mask)
        next_piece += taken
        m += 1
        skipped = 0


@functools.cache
def _num_programs(device: torch.device) -> int:
    if device.type == "cpu":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_SM


def copy_rows(
    rows_STE: torch.Tensor,
    source_slots_M: torch.Tensor,
    target_slots_M: torch.Tensor,
    starts_M: torch.Tensor,
    ends_M: torch.Tensor,
) -> None:
    """Copy the rows [starts_M[m], ends_M[m]) of slot source_slots_M[m] to the same rows of slot target_slots_M[m].

    Rows outside [0, T), empty or reversed ranges, and slots outside [0, S) copy nothing and touch nothing. What one copy
    writes, no other copy of the call may read or write.

    rows_STE: uint8 view of an arena; the rows of a slot follow one another, of a multiple of 16 bytes each; slots are any
    multiple of 16 bytes apart. The indices: int32 or int64 on the device, at most 4096.

    Cost: one launch, no allocation, no synchronisation; safe while a graph is captured, and the graph serves every range.
    Raises: ValueError naming the argument.
    """
    device = rows_STE.device
    checks.runnable("rows_STE", device)
    if rows_STE.dtype != torch.uint8 or rows_STE.dim() != 3:
        given = f"{rows_STE.dtype} of shape {tuple(rows_STE.shape)}"
        checks.refuse("rows_STE", given, "uint8 of 3 dimensions: [slots, rows, bytes of a row]")
    num_slots, num_rows, row_bytes = rows_STE.shape
    if row_bytes % checks.ALIGNMENT_BYTES or row_bytes >= checks.INT32_END:
        checks.refuse("rows_STE", f"of rows of {row_bytes} bytes", f"a multiple of {checks.ALIGNMENT_BYTES} below 2**31")
    checks.aligned("rows_STE", rows_STE)
    if num_rows > 1 and rows_STE.stride(1) != row_bytes:
        given = f"strided by {rows_STE.stride(1)} bytes from row to row"
        checks.refuse("rows_STE", given, f"{row_bytes}: the rows one after the other")
    num_copies = _num_copies("source_slots_M", source_slots_M)
    indices = (source_slots_M, target_slots_M, starts_M, ends_M)
    for name, tensor in zip(("source_slots_M", "target_slots_M", "starts_M", "ends_M"), indices, strict=True):
        checks.index(name, tensor, num_copies, device)
    if num_copies > 0 and rows_STE.numel() > 0:
        with checks.on_device(device):
            _copy[(_num_programs(device),)](
                rows_STE, *indices, num_copies, num_slots, num_rows, rows_STE.stride(0), 0,
                ROW_BYTES=row_bytes, M_PAD=checks.padded(num_copies), PIECE_BYTES=_PIECE_BYTES, num_warps=_NUM_WARPS,
            )  # fmt: skip


def copy_extents(sources_M: torch.Tensor, targets_M: torch.Tensor, size_bytes: int) -> None:
    """Copy `size_bytes` from each address of `sources_M` to the address in `targets_M`, as for whole pages.

    An address of 0 on either side copies nothing, so that a captured graph may leave some of its copies unused. What one
    copy writes, no other copy of the call may read or write.

    sources_M, targets_M: int64 on the device, at most 4096 multiples of 16: addresses that this device can read and write.
    Nothing checks them. size_bytes: a multiple of 16.

    Cost: one launch, no allocation, no synchronisation; safe while a graph is captured, with `size_bytes` as it was.
    Raises: ValueError naming the argument.
    """
    device = sources_M.device
    checks.runnable("sources_M", device)
    num_copies = _num_copies("sources_M", sources_M)
    checks.index("sources_M", sources_M, num_copies, device, (torch.int64,))
    checks.index("targets_M", targets_M, num_copies, device, (torch.int64,))
    if size_bytes < 0 or size_bytes % checks.ALIGNMENT_BYTES:
        checks.refuse("size_bytes", size_bytes, f"a multiple of {checks.ALIGNMENT_BYTES}")
    if num_copies > 0 and size_bytes > 0:
        num_programs = min(_num_programs(device), num_copies * ceil_div(size_bytes, _PIECE_BYTES))
        with checks.on_device(device):
            _copy[(num_programs,)](
                None, sources_M, targets_M, None, None, num_copies, 0, 0, 0, size_bytes,
                ROW_BYTES=0, M_PAD=checks.padded(num_copies), PIECE_BYTES=_PIECE_BYTES, num_warps=_NUM_WARPS,
            )  # fmt: skip


def _num_copies(argument: str, tensor: torch.Tensor) -> int:
    num_copies = tensor.shape[0] if tensor.dim() == 1 else 0
    if num_copies > MAX_COPIES:
        checks.refuse(argument, f"of {num_copies} copies", f"at most {MAX_COPIES} a launch")
    return num_copies
