"""Passive data of slots and of what is mapped under them. No torch: the server's front process reads it.

pages   0    1    2    3    4    5    6    7
      | live, 3 holders  | live, 1 | ahead |        two live runs, since others hold the first, and one that is mapped ahead
"""

import enum
from typing import NamedTuple


class SlotState(enum.IntEnum):
    """free -> live -> (parked -> live)* -> closing -> free."""

    FREE = 0
    """A slot under which nothing is mapped."""
    LIVE = 1
    """A slot of a running sequence."""
    PARKED = 2
    """A slot without a sequence, still mapped, to be adopted or evicted."""
    CLOSING = 3
    """A slot without a sequence, whose mappings are pending reclaim."""
    NULL = 4
    """Slot 0, always: it has the null page, and never a sequence."""


class RunState(enum.StrEnum):
    """Purpose of mapped memory."""

    LIVE = "live"
    """Memory in which a running sequence has rows."""
    AHEAD = "ahead"
    """Memory past the rows of a running sequence: mapped before it is needed."""
    PARKED = "parked"
    """Memory under a parked slot."""
    PENDING_RECLAIM = "pending"
    """Memory that is unmapped when its fence has passed."""


class MappedRun(NamedTuple):
    """Extents side by side that are alike: of one state, with as many holders, as many of which use them."""

    page: int
    """The first page, counted from the slot's first address."""
    num_pages: int
    state: RunState
    num_holders: int
    """Holders of each of its extents: mappings under this slot and others, and the prefix tree."""
    handle: int
    """Handle of its first extent. Runs of several slots that begin with the same handle are the same memory."""


class SlotMap(NamedTuple):
    """A slot at one moment."""

    slot: int
    state: SlotState
    num_tokens: int
    """Tokens of its sequence, or parked."""
    groups: list[list[MappedRun]]
    """Runs by group of layers, in the order of addresses; memory that is pending reclaim comes last."""
