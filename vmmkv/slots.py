"""The numbers of every slot, as arrays over the slots, so that a step over 256 sequences is a few numpy calls."""

import enum
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt


class SlotState(enum.IntEnum):
    """free -> live -> (parked -> live)* -> closing -> free."""

    FREE = 0
    """Nothing is mapped under it."""
    LIVE = 1
    """A running sequence's."""
    PARKED = 2
    """No sequence's; still mapped, to be adopted or evicted."""
    CLOSING = 3
    """No sequence's; its mappings are retiring."""
    PAD = 4
    """Slot 0, always: no sequence's, ever (see `vmmkv.pad`)."""


class SlotTable:
    """State and token counts of each slot, the pad among them. A slot that is not live has length, end, expected and limit 0.

        start <= length <= limit = min(committed, end)

    Choices of slots depend on the states alone, so that all ranks of a group choose alike.
    """

    def __init__(self, num_slots: int, num_groups: int) -> None:
        self.num_slots = num_slots
        """Slots that sequences can have: 1 to num_slots."""
        num_rows = 1 + num_slots
        self.states = np.zeros(num_rows, dtype=np.int8)
        self.states[0] = SlotState.PAD
        self.lengths = np.zeros(num_rows, dtype=np.int64)
        """Tokens written."""
        self.committed = np.zeros(num_rows, dtype=np.int64)
        """Tokens whose rows lie wholly under live mappings in every group, less the guard."""
        self.ends = np.zeros(num_rows, dtype=np.int64)
        """The most tokens that the sequence may ever have."""
        self.expected = np.zeros(num_rows, dtype=np.int64)
        """Tokens that the sequence said it will have soon."""
        self.starts = np.zeros((num_groups, num_rows), dtype=np.int64)
        """The first row still kept, in each group."""
        self.limits = np.zeros(num_rows, dtype=np.int32)
        """What the device's limit tensor holds."""

    def __len__(self) -> int:
        return len(self.states)

    def state(self, slot: int) -> SlotState:
        """What a slot is taken by."""
        return SlotState(int(self.states[slot]))

    def clear(self, slot: int, state: SlotState) -> None:
        """The slot has no sequence any more."""
        self.states[slot] = state
        self.lengths[slot] = self.ends[slot] = self.expected[slot] = 0

    def where(self, state: SlotState) -> list[int]:
        """The slots in that state, in order."""
        return [int(slot) for slot in np.flatnonzero(self.states == state)]

    def run_of(self, count: int, *states: SlotState) -> int | None:
        """The first of the lowest `count` adjacent slots that all are in one of these states, or None."""
        suitable = np.isin(self.states, states)
        if count > len(suitable):
            return None
        sums = np.concatenate(([0], np.cumsum(suitable)))
        starts = np.flatnonzero(sums[count:] - sums[:-count] == count)
        return int(starts[0]) if len(starts) else None

    def wanted_ahead(self, lookahead_tokens: int) -> Iterator[npt.NDArray[np.int64]]:
        """Tokens that each slot should have memory for, what presses most first.

        The next token of whoever runs; the lead of all; and what is expected, however much it is, when nobody lacks the
        others.
        """
        yield np.where(self.lengths > 0, self.lengths + min(1, lookahead_tokens), 0)
        yield self.lengths + lookahead_tokens
        yield self.expected

    def short_of(self, wanted: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Live slots with less memory than `wanted` tokens need, most urgent first, and what each should have.

        A slot's deadline is the number of tokens until it stands still: committed - length. A sequence that has no
        tokens yet keeps nobody waiting: it comes last.
        """
        targets = np.minimum(wanted, self.ends)
        short = np.flatnonzero((self.committed < targets) & (self.states == SlotState.LIVE))
        deadlines, are_new = (self.committed - self.lengths)[short], self.lengths[short] == 0
        short = short[np.lexsort((deadlines, are_new))]
        return short, targets[short]
