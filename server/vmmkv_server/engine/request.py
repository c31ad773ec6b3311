"""A request, the table of those that run, and the set of those that decode.

The table is numpy arrays over the slots, so that a step over 256 of them is a few calls.

    tokens of a request   | prompt ................ | generated ........ | in flight ... |
                          |<- num_confirmed ------------------------->|                      rows computed, as read back
                          |<- rows launched: cache.lengths, and num_dropped ------->|
                          |<- num_known ------------------------------>|                     tokens that the host has
                          |<- num_coming ------------------------------------------->|  <= max_tokens

Once a step has sampled for it, a request's last token is on the device, and `num_coming` is one more than its launched rows.
"""

import enum
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from vmmkv.units import format_bytes
from vmmkv_server.engine.kv_backend import KVBackend, KVSequence, Slots, TokenIds
from vmmkv_server.protocol import Generate

NO_END: Final = np.iinfo(np.int64).max

_GOLDEN: Final = 0x9E3779B97F4A7C15
"""An odd number of 64 bits: seeds that clients count up are far from its multiples."""


class Status(enum.Enum):
    """Stage of a request."""

    WAITING = enum.auto()
    """Without memory: the request has not begun, or was preempted."""
    PREFILLING = enum.auto()
    """The host has the next tokens to compute: the prompt's, those that a grammar forces, or those of its beams."""
    DECODING = enum.auto()
    """The next token to compute is on the device: a step has been launched that samples it."""
    FINISHED = enum.auto()


class Shape(NamedTuple):
    """Memory that a request takes, and rows that it gives to the prefix cache, as of when it began to wait."""

    num_first_rows: int
    """Rows that it needs to begin, or to begin again."""
    most_rows: int
    """The most rows that it may have at once."""
    num_attachable: int
    """First tokens, the rows of which may be taken from the prefix cache, but for that of the last."""
    num_slots: int = 1
    """Slots that it takes while it runs."""
    shares_rows: bool = True
    """May the prefix cache have its rows?"""
    keeps_rows: bool = True
    """Does it keep all of its rows while it runs?"""
    samples: bool = True
    """Is its next token sampled, and appended to its own? Else it begins anew whenever it is preempted."""


@dataclass(eq=False, slots=True)
class Request:
    """A request, from its arrival to its end. Its tokens outlive its memory: a preempted one comes back by them."""

    ask: Generate
    stop_ids: frozenset[int]
    """Tokens that end it: its own, and the model's unless it ignores them."""
    suppressed_ids: frozenset[int] = frozenset()
    """Tokens that are masked until `min_tokens` have been generated."""
    status: Status = Status.WAITING
    prompt: TokenIds = field(init=False)
    saved: TokenIds = field(init=False)
    """Tokens of the request, as of when it ran last."""
    sequence: KVSequence | None = None
    """Sequence with its rows, while it runs."""
    table: "RequestTable | None" = None
    """Table that has its tokens and counts, while it runs."""
    cached: tuple[tuple[str, int], ...] = ()
    """Tokens of its prompt that the prefix cache had when it began, by where they were: see `Output.cached`."""
    arrived_s: float = field(default_factory=time.perf_counter)
    queued_us: int = 0
    """Wait before it began for the first time, in microseconds."""
    num_dropped: int = 0
    """Tokens whose rows are gone: its next token is that of row `length`, and token `length + num_dropped`."""
    num_answered: int = 0
    """Tokens that have been sent."""
    num_admitted: int = 0
    """Times that it has begun: more than one if it was preempted."""
    place: int = 0
    """Place in order of arrival while it waits (below 0 once preempted), in order of admission while it runs."""
    num_tokens_stuck: int | None = None
    """Tokens it had when it was last preempted while running alone. If it has no more by then, it can never fit."""
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = self.saved = np.array(self.ask.prompt, dtype=np.int32)
        self.shape = Shape(len(self.prompt), self.max_tokens, len(self.prompt))

    @property
    def namespace(self) -> Hashable:
        """Requests of different namespaces share no prefixes."""
        return self.ask.cache_salt

    @property
    def is_running(self) -> bool:
        """Has it memory?"""
        return self.sequence is not None

    @property
    def max_tokens(self) -> int:
        """The most tokens it may have. The last one is never written: nothing attends to it."""
        return len(self.prompt) + self.ask.params.max_tokens

    @property
    def min_length(self) -> int:
        """Rows, the prompt's included, that must be there before one of `suppressed_ids` may come; 0 if any may come."""
        if not (self.ask.params.min_tokens and self.suppressed_ids):
            return 0
        return max(0, len(self.prompt) + self.ask.params.min_tokens - self.num_dropped)

    @property
    def seed(self) -> int:
        """Seed of its random numbers, which also depend on the number of rows: another one after each compaction."""
        return ((self.ask.params.seed or 0) + _GOLDEN * self.num_dropped) & (2**64 - 1)

    @property
    def memory(self) -> KVSequence:
        """Sequence of a running request."""
        assert self.sequence is not None, "a waiting request has no memory"
        return self.sequence

    @property
    def tokens(self) -> TokenIds:
        """Tokens of the request that the host knows."""
        return self.saved if self.table is None else self.table.tokens(self.memory.slot)

    @property
    def confirmed_tokens(self) -> TokenIds:
        """The tokens of the rows that have been read back; only of a running request."""
        assert self.table is not None, "a waiting request has no rows"
        slot = self.memory.slot
        return self.table.tokens(slot, int(self.table.num_confirmed[slot]))

    @property
    def num_generated(self) -> int:
        """Generated tokens that the host knows."""
        return len(self.tokens) - len(self.prompt)

    @property
    def is_prompt_confirmed(self) -> bool:
        """Have all rows of its prompt been read back? Only of a running request."""
        assert self.table is not None, "a waiting request computes nothing"
        return int(self.table.num_confirmed[self.memory.slot]) >= len(self.prompt)

    @property
    def attachable(self) -> TokenIds:
        """The tokens whose rows, but for the last, may be taken from the prefix cache; only of a waiting request."""
        return self.saved[: self.shape.num_attachable]

    def begin_with(self, forced: Sequence[int]) -> None:
        """Set the first tokens of its answer before it begins; they are computed with the prompt."""
        assert self.num_admitted == 0, "it has begun"
        self.saved = np.concatenate([self.prompt, np.array(forced, np.int32)])

    def enter(self, table: "RequestTable", sequence: KVSequence, num_rows: int) -> None:
        """Begin to run, in a sequence that has the first rows."""
        self.sequence, self.table, self.status = sequence, table, Status.PREFILLING
        if not self.num_admitted:
            self.queued_us = max(1, int((time.perf_counter() - self.arrived_s) * 1e6))
        self.num_admitted += 1
        table.enter(self, sequence.slot, num_rows)

    def leave(self, status: Status) -> None:
        """Run no longer. The caller gives the sequence back."""
        assert self.table is not None, "it does not run"
        self.saved = self.table.leave(self.memory.slot)
        self.sequence = self.table = None
        self.status = status
        self.num_dropped = 0


class RequestTable:
    """Per-slot state of running requests, as numpy arrays. Slot 0 is the null slot.

    Raises: ValueError if the host has no memory for so many tokens, naming the options that ask for less.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        try:
            self.tokens_ST: TokenIds = np.zeros((1 + num_slots, max_tokens), np.int32)  # mapped by the host as it is written
        except (MemoryError, ValueError) as error:  # ValueError: more than an array can have
            size_bytes = (1 + num_slots) * max_tokens * np.dtype(np.int32).itemsize
            raise ValueError(
                f"the token ids of {1 + num_slots} slots of {max_tokens} tokens would take {format_bytes(size_bytes)} of the "
                "host's memory, and there is not so much; lower max_num_seqs or max_tokens"
            ) from error
        self.requests: list[Request | None] = [None] * (1 + num_slots)
        self.num_known = np.zeros(1 + num_slots, np.int64)
        """Tokens that the host has."""
        self.num_coming = np.zeros(1 + num_slots, np.int64)
        """Tokens that the host has, and those that launched steps will sample."""
        self.num_confirmed = np.zeros(1 + num_slots, np.int64)
        """Rows that were attached, or computed by steps that have been read back."""
        self.num_inserted = np.zeros(1 + num_slots, np.int64)
        """Confirmed rows that the prefix cache has, by `attach` or `insert`."""
        self.max_tokens = np.zeros(1 + num_slots, np.int64)
        """Tokens with which a request is done. The last one is never written: nothing attends to it."""
        self.ends = np.full(1 + num_slots, NO_END, np.int64)
        """Rows with which a request no longer decodes, until some of them are dropped."""
        self.epochs = np.zeros(1 + num_slots, np.int64)
        """Counts the requests that entered, left or were given other tokens: what steps of another epoch sample is dropped."""
        self.places = np.zeros(1 + num_slots, np.int64)
        """The requests' `place`."""
        self.ignores_eos = np.zeros(1 + num_slots, np.bool_)
        self.has_stops = np.zeros(1 + num_slots, np.bool_)
        """Has this request `stop_token_ids` of its own?"""
        self.constrained = np.zeros(1 + num_slots, np.bool_)
        """Does a feature say which tokens may come next? Then what a step has sampled may not count."""

    def enter(self, request: Request, slot: int, num_rows: int) -> None:
        """A request runs in a slot that has the first rows of its tokens."""
        tokens = request.saved
        self.requests[slot] = request
        self.tokens_ST[slot, : len(tokens)] = tokens
        self.num_known[slot] = self.num_coming[slot] = len(tokens)
        self.num_confirmed[slot] = self.num_inserted[slot] = num_rows
        self.max_tokens[slot] = request.max_tokens
        self.epochs[slot] += 1
        self.places[slot] = request.place
        self.ignores_eos[slot] = request.ask.params.ignore_eos
        self.has_stops[slot] = bool(request.ask.params.stop_token_ids)

    def leave(self, slot: int) -> TokenIds:
        """The request in this slot does not run any more; a copy of its tokens."""
        tokens = self.tokens_ST[slot, : self.num_known[slot]].copy()
        self.requests[slot], self.ends[slot] = None, NO_END
        self.epochs[slot] += 1
        self.constrained[slot] = False
        for counts in (self.num_known, self.num_coming, self.num_confirmed, self.num_inserted, self.max_tokens):
            counts[slot] = 0
        return tokens

    def tokens(self, slot: int, end: int | None = None) -> TokenIds:
        """The known tokens in a slot, or the first of them: a view."""
        return self.tokens_ST[slot, : self.num_known[slot] if end is None else end]

    def append(self, slots: Slots, tokens: TokenIds) -> None:
        """The next token of each slot is known."""
        self.tokens_ST[slots, self.num_known[slots]] = tokens
        self.num_known[slots] += 1

    def append_forced(self, slot: int, tokens: Sequence[int]) -> None:
        """The next tokens of one slot are known, and no step has sampled them."""
        first = int(self.num_known[slot])
        self.tokens_ST[slot, first : first + len(tokens)] = tokens
        self.num_known[slot] = self.num_coming[slot] = first + len(tokens)


class DecodeSet:
    """The slots whose next token is on the device, the oldest first, but for those of which the last token has been launched.

    A slot that is compacted next is not in it either.

    Two counts save most steps a look at each slot. For every slot of the set

        _num_roomy   <= limit - length                          rows that are mapped already
        _num_wanting <= max_tokens - num_coming, end - length   tokens that are wanted yet, rows before it is compacted

    Each launched step lowers both by one, as it does the right sides. A slot that joins lowers them to its own, one that leaves
    leaves them as they are. At 0 they are counted again.
    """

    def __init__(self, table: RequestTable, memory: KVBackend) -> None:
        self.slots: Slots = np.zeros(0, np.int64)
        """Never changed in place: steps have it."""
        self.epochs = self.slots
        """Epochs of the slots."""
        self._table: Final = table
        self._memory: Final = memory
        self._num_roomy = self._num_wanting = 0

    def join(self, slots: list[int]) -> None:
        """Add slots that decode from now on."""
        joined = np.append(self.slots, slots)
        self._set(joined[self._table.places[joined].argsort(kind="stable")])
        room = self._memory.limits[slots] - self._memory.lengths[slots]
        self._num_roomy = max(0, min(self._num_roomy, int(room.min())))
        self._num_wanting = min(self._num_wanting, int(self._wanted(np.array(slots)).min()))

    def leave(self, slot: int) -> None:
        """Remove a slot, if it decodes."""
        self._set(self.slots[self.slots != slot])

    def without_room(self) -> list[int]:
        """The slots that have no room for their next row."""
        if self._num_roomy or not self.slots.size:
            return []
        room = self._memory.limits.take(self.slots) - self._memory.lengths.take(self.slots)
        self._num_roomy = max(0, int(room.min()))
        found: list[int] = self.slots[room <= 0].tolist()
        return found

    def launched(self, sampled: list[int]) -> None:
        """A step of these slots has been launched, and their tables say so; the next one has the sampled slots too."""
        self._num_roomy = max(0, self._num_roomy - 1)
        self._num_wanting -= 1
        if sampled:
            self.join(sampled)
        if self._num_wanting <= 0 and self.slots.size:
            wanted = self._wanted(self.slots)
            if wanted.min() <= 0:
                self._set(self.slots[wanted > 0])
            self._num_wanting = int(wanted[wanted > 0].min(initial=np.iinfo(np.int64).max))

    def _wanted(self, slots: Slots) -> Slots:
        """Steps until each slot has its last token, or is compacted."""
        table = self._table
        num_tokens = table.max_tokens[slots] - table.num_coming[slots]
        num_rows = table.ends[slots] - self._memory.lengths[slots]
        wanted: Slots = np.minimum(num_tokens, num_rows)
        return wanted

    def _set(self, slots: Slots) -> None:
        self.slots, self.epochs = slots, self._table.epochs.take(slots)
