"""The two ends of a decode step that needs nothing from the host: `begin_step` and `end_step`.

    begin_step ── ids, rows, positions, ends ──> the model ──> sampled tokens ── end_step ──> tokens, lengths, the host's copy

Legend: B rows of the batch, S slots. Slot 0 is the null slot, of padding rows. Prefixes: p_ pointer, i_ index, m_ mask.
"""

import torch
import triton
import triton.language as tl

from vmmkv_kernels import checks

IDLE = -2
"""The token of a row that did not advance: one of the null slot, or without room."""

_ROWS = 256
"""Rows of a program."""


@triton.jit
def _begin(
    p_slots, p_tokens, p_lengths, p_shifts, p_ids, p_rows, p_positions, p_ends, num_rows, ROWS: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_b = i_b < num_rows
    slot = tl.load(p_slots + i_b, mask=m_b, other=0).to(tl.int64)
    m_slot = m_b & (slot > 0)
    token = tl.load(p_tokens + slot, mask=m_slot, other=0)
    length = tl.load(p_lengths + slot, mask=m_slot, other=0)
    shift = tl.load(p_shifts + slot, mask=m_slot, other=0)
    tl.store(p_ids + i_b, token, mask=m_b)
    tl.store(p_rows + i_b, length, mask=m_b)
    tl.store(p_positions + i_b, length + shift, mask=m_b)
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
    shifts_S: torch.Tensor,
    ids_B: torch.Tensor,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
    ends_B: torch.Tensor,
) -> None:
    """Write the step's inputs: `ids_B` the slots' tokens, `rows_B` where they go, `ends_B` their lengths after the step.

    `positions_B` are the rows plus `shifts_S`. All int32, on one device. A row of slot 0 has 0 in each.
    Cost: one launch; safe under capture. Raises: ValueError naming the argument.
    """
    inputs = {"ids_B": ids_B, "rows_B": rows_B, "positions_B": positions_B, "ends_B": ends_B}
    _check(slots_B=slots_B, tokens_S=tokens_S, lengths_S=lengths_S, shifts_S=shifts_S, **inputs)
    num_rows = slots_B.shape[0]
    with checks.on_device(slots_B.device):
        _begin[(triton.cdiv(num_rows, _ROWS),)](
            slots_B, tokens_S, lengths_S, shifts_S, *inputs.values(), num_rows, ROWS=_ROWS, **checks.overlap(slots_B.device)
        )


def end_step(
    slots_B: torch.Tensor,
    sampled_B: torch.Tensor,
    ends_B: torch.Tensor,
    limit_S: torch.Tensor,
    tokens_S: torch.Tensor,
    lengths_S: torch.Tensor,
    out_B: torch.Tensor,
) -> None:
    """Advance each row's slot to its sampled token and `ends_B` rows, if its limit allows. `out_B` has the tokens for the host.

    A row that may not advance, or is of slot 0, leaves its slot as it is and gives IDLE. A sampled token below 0 is a code for
    the host: the slot gets token 0. No slot but 0 is in two rows. All int32, on one device.
    Cost: one launch; safe under capture. Raises: ValueError naming the argument.
    """
    slots = {"tokens_S": tokens_S, "lengths_S": lengths_S, "limit_S": limit_S}
    _check(slots_B=slots_B, **slots, sampled_B=sampled_B, ends_B=ends_B, out_B=out_B)
    num_rows = slots_B.shape[0]
    with checks.on_device(slots_B.device):
        _end[(triton.cdiv(num_rows, _ROWS),)](
            slots_B, sampled_B, ends_B, limit_S, tokens_S, lengths_S, out_B, num_rows, IDLE=IDLE, ROWS=_ROWS,
            **checks.overlap(slots_B.device),
        )  # fmt: skip


def _check(*, slots_B: torch.Tensor, tokens_S: torch.Tensor, **others: torch.Tensor) -> None:
    """Refuse anything but int32 on one device: a name that ends in B has the rows of `slots_B`, others those of `tokens_S`."""
    checks.runnable("slots_B", slots_B.device)
    for name, tensor in {"slots_B": slots_B, "tokens_S": tokens_S, **others}.items():
        shape = (slots_B if name.endswith("B") else tokens_S).shape[:1]
        checks.exactly(name, tensor, torch.int32, shape, slots_B.device)
