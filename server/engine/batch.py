"""What a step computes, as the model and its attention see it.

Legend: N tokens of the step, B sequences, each with one run of tokens side by side, G groups of sharers.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One sequence's tokens in a step: rows [start, start + count) of its slot, computed from input columns [column, ...)."""

    slot: int
    start: int
    count: int
    column: int

    @property
    def end(self) -> int:
        """Rows that the sequence has behind the step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Which rows of a decode step share a prefix with the ones beside them; int32, on the device.

    Group g is rows [starts[g], starts[g + 1]) of the batch; they all attend to rows [0, num_rows[g]) of slot leaders[g] as one
    problem, and each to the rows of its own slot from `firsts_B` on. Unused groups have no rows.
    """

    starts_G1: torch.Tensor
    leaders_G: torch.Tensor
    num_rows_G: torch.Tensor
    firsts_B: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Where the tokens of a step are written, and what they attend to. A slot of 0 is nobody's: it pads."""

    slots_N: torch.Tensor
    """int32: the slot of each token."""
    positions_N: torch.Tensor
    """int32: its row there."""
    slots_B: torch.Tensor
    """int32"""
    lengths_B: torch.Tensor
    """int32: rows to attend to, the new ones among them."""
    query_starts: torch.Tensor | None
    """[B + 1] int32: where each run begins; None if every sequence has one token (and N is B)."""
    runs: tuple[Run, ...] | None
    """The same on the host, for attention that is called run by run; None where the device alone knows the lengths."""
    shared: SharedPrefixes | None = None
    """Of a decode step on a GPU; None if nobody shares, or it would not be faster."""
