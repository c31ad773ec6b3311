"""The numbers of the running requests, as arrays over the slots, so that a step over 256 of them is a few numpy calls.

    tokens of a request   | prompt ................ | generated ........ | on their way |
                          |<- confirmed ---------------------------->|                       rows computed, as read back
                          |<- rows launched: cache.lengths ------------------------->|
                          |<- known ---------------------------------->|                     the host has them
                          |<- coming ----------------------------------------------->|  <= end

Once a step has sampled for it, a request's last token is on the device, and `coming` is one more than its launched rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vmmkv.units import format_bytes

if TYPE_CHECKING:
    from vmmkv.server.engine.requests import Request

Slots = npt.NDArray[np.int64]
TokenIds = npt.NDArray[np.int32]


class Ledger:
    """Who runs in which slot, with which tokens. Slot 0 is nobody's.

    Raises: ValueError if the host has no addresses for so many tokens, naming the options that ask for less.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.tokens_ST: TokenIds = _room_for(1 + num_slots, max_tokens)
        self.requests: list[Request | None] = [None] * (1 + num_slots)
        self.known = np.zeros(1 + num_slots, np.int64)
        """Tokens that the host has."""
        self.coming = np.zeros(1 + num_slots, np.int64)
        """And those that launched steps will give."""
        self.confirmed = np.zeros(1 + num_slots, np.int64)
        """Rows that were attached, or computed by steps that have been read back."""
        self.ends = np.zeros(1 + num_slots, np.int64)
        """Tokens with which a request is done. The last one is never written: nothing attends to it."""
        self.epochs = np.zeros(1 + num_slots, np.int64)
        """How often somebody came or went: what a step gives for another epoch is nobody's."""
        self.ignores_eos = np.zeros(1 + num_slots, np.bool_)
        self.has_stops = np.zeros(1 + num_slots, np.bool_)
        """Are there tokens that end this request alone?"""
        self.constrained = np.zeros(1 + num_slots, np.bool_)
        """Does its answer follow a grammar?"""
        self.num_constrained = 0
        """How many do."""

    def enter(self, request: "Request", slot: int, num_rows: int) -> None:
        """A request runs in a slot that has the first rows of its tokens."""
        tokens = request.saved
        self.requests[slot] = request
        self.tokens_ST[slot, : len(tokens)] = tokens
        self.known[slot] = self.coming[slot] = len(tokens)
        self.confirmed[slot] = num_rows
        self.ends[slot] = request.max_tokens
        self.epochs[slot] += 1
        self.ignores_eos[slot] = request.ask.ignore_eos
        self.has_stops[slot] = bool(request.ask.stop_token_ids)
        self.constrained[slot] = request.matcher is not None
        self.num_constrained += request.matcher is not None

    def leave(self, slot: int) -> TokenIds:
        """It does not run any more; its tokens, as a copy."""
        tokens = self.tokens_ST[slot, : self.known[slot]].copy()
        self.requests[slot] = None
        self.epochs[slot] += 1
        self.num_constrained -= int(self.constrained[slot])
        self.constrained[slot] = False
        self.known[slot] = self.coming[slot] = self.confirmed[slot] = self.ends[slot] = 0
        return tokens

    def tokens(self, slot: int, end: int | None = None) -> TokenIds:
        """The known tokens in a slot, or the first of them: a view."""
        return self.tokens_ST[slot, : self.known[slot] if end is None else end]

    def take(self, slots: Slots, tokens: TokenIds) -> None:
        """A further token of each."""
        self.tokens_ST[slots, self.known[slots]] = tokens
        self.known[slots] += 1

    def take_forced(self, slot: int, tokens: Sequence[int]) -> None:
        """Several further tokens of one, which no step has sampled: the host alone has them."""
        first = int(self.known[slot])
        self.tokens_ST[slot, first : first + len(tokens)] = tokens
        self.known[slot] = self.coming[slot] = first + len(tokens)


def _room_for(num_slots: int, max_tokens: int) -> TokenIds:
    """Pages of it come as they are written."""
    try:
        return np.zeros((num_slots, max_tokens), np.int32)
    except (MemoryError, ValueError) as error:  # ValueError: more than an array can have
        size_bytes = num_slots * max_tokens * np.dtype(np.int32).itemsize
        raise ValueError(
            f"the token ids of {num_slots} slots of {max_tokens} tokens would take {format_bytes(size_bytes)} of the host's "
            "memory, and there is not so much; lower max_num_seqs or max_tokens"
        ) from error
