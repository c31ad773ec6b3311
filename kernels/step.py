"""The two ends of a decode step that needs nothing from the host: where each sequence stands, and moving it on.

    begin_step ── ids, positions, lengths ──> the model ──> sampled tokens ── end_step ──> tokens, lengths, what the host reads

Legend: B rows of the batch, S slots. Slot 0 is nobody's, and pads. Prefixes: p_ pointer, i_ index, m_ mask.
"""

import torch
import triton
import triton.language as tl

from vmmkv.kernels import checks

IDLE = -2
"""In place of a token, for a row that had no room for one, or was nobody's: it did not move."""

_ROWS = 256
"""Rows of a program."""


@triton.jit
def _begin(p_slots, p_tokens, p_lengths, p_ids, p_positions, p_ends, num_rows, ROWS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_b = i_b < num_rows
    slot = tl.load(p_slots + i_b, mask=m_b, other=0).to(tl.int64)
    m_slot = m_b & (slot > 0)
    token = tl.load(p_tokens + slot, mask=m_slot, other=0)
    length = tl.load(p_lengths + slot, mask=m_slot, other=0)
    tl.store(p_ids + i_b, token, mask=m_b)
    tl.store(p_positions + i_b, length, mask=m_b)
    tl.store(p_ends + i_b, tl.where(m_slot, length + 1, 0), mask=m_b)


@triton.jit
def _end(
    p_slots, p_sampled, p_ends, p_limits, p_tokens, p_lengths, p_out, num_rows, IDLE: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_b = i_b < num_rows
    slot = tl.load(p_slots + i_b, mask=m_b, other=0).to(tl.int64)
    m_slot = m_b & (slot > 0)
    end = tl.load(p_ends + i_b, mask=m_b, other=0)
    limit = tl.load(p_limits + slot, mask=m_slot, other=0)
    token = tl.load(p_sampled + i_b, mask=m_b, other=0)
    moves = m_slot & (end <= limit)
    tl.store(p_tokens + slot, tl.maximum(token, 0), mask=moves)
    tl.store(p_lengths + slot, end, mask=moves)
    tl.store(p_out + i_b, tl.where(moves, token, IDLE), mask=m_b)


def begin_step(
    slots_B: torch.Tensor,
    tokens_S: torch.Tensor,
    lengths_S: torch.Tensor,
    ids_B: torch.Tensor,
    positions_B: torch.Tensor,
    ends_B: torch.Tensor,
) -> None:
    """What the step's rows compute: `ids_B` the slots' tokens, `positions_B` their rows, `ends_B` the rows that they have then.

    All int32, on one device. A row of slot 0 has token 0, position 0 and end 0. Cost: one launch; safe under capture.
    Raises: ValueError naming the argument.
    """
    num_rows, _ = _check(slots_B, tokens_S, lengths_S)
    for name, tensor in (("ids_B", ids_B), ("positions_B", positions_B), ("ends_B", ends_B)):
        _int32(name, tensor, num_rows, slots_B.device)
    pdl = checks.launches_dependents(slots_B.device)
    with checks.on_device(slots_B.device):
        _begin[(triton.cdiv(num_rows, _ROWS),)](
            slots_B, tokens_S, lengths_S, ids_B, positions_B, ends_B, num_rows, ROWS=_ROWS, PDL=pdl,
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip


def end_step(
    slots_B: torch.Tensor,
    sampled_B: torch.Tensor,
    ends_B: torch.Tensor,
    limit_S: torch.Tensor,
    tokens_S: torch.Tensor,
    lengths_S: torch.Tensor,
    out_B: torch.Tensor,
) -> None:
    """Each row's slot has its sampled token next, and `ends_B` rows, if its limit allows them; `out_B` is for the host to read.

    A row that may not move keeps its slot as it is and gives IDLE; so does one of slot 0. A sampled token below 0 says
    something to the host; the slot gets token 0 then. No slot but 0 stands in two rows. All int32, on one device.
    Cost: one launch; safe under capture. Raises: ValueError naming the argument.
    """
    num_rows, num_slots = _check(slots_B, tokens_S, lengths_S)
    for name, tensor in (("sampled_B", sampled_B), ("ends_B", ends_B), ("out_B", out_B)):
        _int32(name, tensor, num_rows, slots_B.device)
    _int32("limit_S", limit_S, num_slots, slots_B.device)
    pdl = checks.launches_dependents(slots_B.device)
    with checks.on_device(slots_B.device):
        _end[(triton.cdiv(num_rows, _ROWS),)](
            slots_B, sampled_B, ends_B, limit_S, tokens_S, lengths_S, out_B, num_rows, IDLE=IDLE, ROWS=_ROWS, PDL=pdl,
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip


def _check(slots_B: torch.Tensor, tokens_S: torch.Tensor, lengths_S: torch.Tensor) -> tuple[int, int]:
    checks.runnable("slots_B", slots_B.device)
    num_rows, num_slots = slots_B.shape[0], tokens_S.shape[0]
    _int32("slots_B", slots_B, num_rows, slots_B.device)
    _int32("tokens_S", tokens_S, num_slots, slots_B.device)
    _int32("lengths_S", lengths_S, num_slots, slots_B.device)
    return num_rows, num_slots


def _int32(name: str, tensor: torch.Tensor, size: int, device: torch.device) -> None:
    if tensor.dtype != torch.int32 or tensor.shape != (size,) or tensor.device != device or not tensor.is_contiguous():
        checks.refuse(name, f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}", f"int32 [{size}] on {device}")
