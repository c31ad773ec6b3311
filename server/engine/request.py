"""What the engine knows of one request."""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from vmmkv.server.engine.kv_backend import KVSequence
from vmmkv.server.engine.prompt_logprobs import ScoredRows
from vmmkv.server.protocol import Generate
from vmmkv.units import format_bytes

if TYPE_CHECKING:
    from vmmkv.server.engine.beams import BeamGroup
    from vmmkv.server.structured_output.matcher import Matcher


# -------- ledger
# The numbers of the running requests, as arrays over the slots, so that a step over 256 of them is a few numpy calls.
#
#     tokens of a request   | prompt ................ | generated ........ | on their way |
#                           |<- confirmed ---------------------------->|                       rows computed, as read back
#                           |<- rows launched: cache.lengths ------------------------->|
#                           |<- known ---------------------------------->|                     the host has them
#                           |<- coming ----------------------------------------------->|  <= end
#
# Once a step has sampled for it, a request's last token is on the device, and `coming` is one more than its launched rows.

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


# -------- requests


class Strand(Protocol):
    """The tokens of one sequence of memory, of which a step computes the next few: a request's own, or those of a beam."""

    @property
    def request(self) -> "Request":
        """Whose it is."""
        ...

    @property
    def memory(self) -> KVSequence:
        """The sequence."""
        ...

    @property
    def num_left(self) -> int:
        """Tokens that the host knows, and no step has been launched for."""
        ...

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest tokens are wanted after its last one; 0 if one is sampled."""
        ...

    def next_tokens(self, count: int) -> TokenIds:
        """The first `count` of those left."""
        ...


@dataclass(eq=False, slots=True)
class Request:
    """A request, waiting or running. Its tokens outlive its memory: a preempted one is computed again from them.

    While it runs its numbers are in the ledger.
    """

    ask: Generate
    stop_ids: frozenset[int]
    """Tokens that end it: its own, and the model's if it does not ignore them."""
    prompt: TokenIds = field(init=False)
    saved: TokenIds = field(init=False)
    """All its tokens, up to when it ran last."""
    withheld: frozenset[int] = frozenset()
    """Tokens that it may not have before its `min_tokens`."""
    sequence: KVSequence | None = None
    """Its memory, while it runs."""
    ledger: Ledger | None = None
    """Where it runs."""
    num_cached: int = 0
    """Tokens of its prompt that it was given from the prefix cache when it was admitted first: what its client is told."""
    arrived_s: float = field(default_factory=time.perf_counter)
    queued_us: int = 0
    """How long it waited before it began for the first time."""
    num_scored: int = 0
    """Rows of its prompt whose next token's log-probability its client has, if it asks for those."""
    num_answered: int = 0
    """Tokens that its client has."""
    num_admitted: int = 0
    """How often it has begun: more than once if it gave way."""
    num_overtaken: int = 0
    """By others that waited less, and whose prefix was known."""
    num_tokens_stuck: int | None = None
    """The tokens that it had when it last gave way though it ran alone; with no more of them it can never fit."""
    decodes: bool = False
    """Has a step been launched that samples for it? Then its last token is on the device."""
    max_others: int | None = None
    """How many others may run when it begins again. None: any number, unless it gave way as a search, which does not know how
    much memory it will take: then one that ran beside it, or displaced it, must have ended."""
    beams: "BeamGroup | None" = None
    """Its search, while it runs; None if it samples."""
    matcher: "Matcher | None" = None
    """Where it stands in its grammar, of all tokens that the host knows; None without one."""
    may_jump: bool = False
    """May what its grammar forces be appended without being sampled?"""
    grammar_s: float = 0.0
    """Of the loop's time, what its grammar has taken."""

    def __post_init__(self) -> None:
        self.prompt = self.saved = np.array(self.ask.prompt, dtype=np.int32)

    @property
    def namespace(self) -> Hashable:
        """Requests of different ones share nothing; the model and its KV type are the engine's, the same for all."""
        return self.ask.cache_salt

    @property
    def max_tokens(self) -> int:
        """The most tokens it may ever have. The last one is never written: nothing attends to it."""
        return len(self.prompt) + self.ask.max_new_tokens

    @property
    def num_slots(self) -> int:
        """Slots that it takes while it runs: one for each beam, from the start."""
        return max(1, self.ask.beam_width)

    @property
    def memory(self) -> KVSequence:
        """Its sequence; only of a running request."""
        assert self.sequence is not None, "a waiting request has no memory"
        return self.sequence

    @property
    def tokens(self) -> TokenIds:
        """All that the host knows of it."""
        return self.saved if self.ledger is None else self.ledger.tokens(self.memory.slot)

    @property
    def confirmed_tokens(self) -> TokenIds:
        """Of its rows that have been read back; only of a running request."""
        assert self.ledger is not None, "a waiting request has no rows"
        slot = self.memory.slot
        return self.ledger.tokens(slot, int(self.ledger.confirmed[slot]))

    @property
    def num_generated(self) -> int:
        """Tokens that were sampled for it, and are known."""
        return len(self.tokens) - len(self.prompt)

    @property
    def is_prefilling(self) -> bool:
        """Has it rows of its prompt that are not confirmed? Only of a running request."""
        assert self.ledger is not None, "a waiting request computes nothing"
        return int(self.ledger.confirmed[self.memory.slot]) < len(self.prompt)

    @property
    def attachable(self) -> TokenIds:
        """Those of its tokens whose rows, but for the last, others may have computed for it.

        Not rows whose next token is still to be scored: their logits are gone.
        """
        is_scored = self.ask.num_prompt_logprobs is None or self.num_scored >= len(self.prompt) - 1
        return self.tokens if is_scored else self.tokens[: self.num_scored + 1]

    def scored(self, start: int, end: int) -> ScoredRows | None:
        """What is to be scored of its rows [start, end)."""
        first, end = max(start, self.num_scored), min(end, len(self.prompt) - 1)
        if self.ask.num_prompt_logprobs is None or first >= end:
            return None
        return ScoredRows(first, self.prompt[first + 1 : end + 1], self.ask.num_prompt_logprobs)

    @property
    def strands(self) -> Sequence[Strand]:
        """What can be computed of it: its own tokens, or when the prompt is, those of its live beams."""
        return [self] if self.beams is None else self.beams.strands

    def begin_with(self, forced: Sequence[int]) -> None:
        """The first tokens of its answer are known before it begins; they are computed with the prompt."""
        assert self.num_admitted == 0, "it has begun"
        self.saved = np.concatenate([self.prompt, np.array(forced, np.int32)])

    def enter(self, ledger: Ledger, sequence: KVSequence, num_rows: int) -> None:
        """It runs from now on, in a sequence that has its first rows."""
        self.sequence, self.ledger, self.decodes = sequence, ledger, False
        if not self.num_admitted:
            self.queued_us = max(1, int((time.perf_counter() - self.arrived_s) * 1e6))
        self.num_admitted += 1
        ledger.enter(self, sequence.slot, num_rows)

    def leave(self) -> None:
        """It runs no longer; what becomes of the sequence is its owner's business."""
        assert self.ledger is not None, "it does not run"
        self.saved = self.ledger.leave(self.memory.slot)
        self.sequence = self.ledger = None

    # as a strand

    @property
    def request(self) -> "Request":
        """See Strand."""
        return self

    @property
    def num_left(self) -> int:
        """See Strand."""
        return 0 if self.decodes else len(self.tokens) - self.memory.length

    @property
    def num_candidates(self) -> int:
        """See Strand."""
        return 0 if self.beams is None else self.beams.search.num_candidates

    def next_tokens(self, count: int) -> TokenIds:
        """See Strand."""
        first = self.memory.length
        return self.tokens[first : first + count]
