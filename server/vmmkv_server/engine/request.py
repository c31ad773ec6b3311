"""A request, and the table of those that run: numpy arrays over the slots, so that a step over 256 of them is a few calls.

    tokens of a request   | prompt ................ | generated ........ | in flight ... |
                          |<- num_confirmed ------------------------->|                      rows computed, as read back
                          |<- rows launched: cache.lengths, and num_dropped ------->|
                          |<- num_known ------------------------------>|                     tokens that the host has
                          |<- num_coming ------------------------------------------->|  <= max_tokens

Once a step has sampled for it, a request's last token is on the device, and `num_coming` is one more than its launched rows.
"""

import enum
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from vmmkv.prefix import Borrowed, Fetch
from vmmkv.units import format_bytes
from vmmkv_server.engine.kv_backend import KVSequence, Slots, TokenIds
from vmmkv_server.engine.ranking import KeptRows, Ranked
from vmmkv_server.engine.step import Logprobs, Readback, ScoredRows
from vmmkv_server.protocol import DEVICE, Beam, FinishReason, Generate, Output
from vmmkv_server.structured_output.matcher import Matcher

_NO_END: Final = np.iinfo(np.int64).max

_GOLDEN: Final = 0x9E3779B97F4A7C15
"""An odd number of 64 bits: seeds that clients count up are far from its multiples."""


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()
    """It has no memory: it has not begun, or was preempted."""
    PREFILLING = enum.auto()
    """The host has the next tokens to compute: the prompt's, those that a grammar forces, or those of its beams."""
    DECODING = enum.auto()
    """The next token to compute is on the device: a step has been launched that samples it."""
    FINISHED = enum.auto()


class LiveBeams(Protocol):
    """The sequences of a request that runs in several, one for each beam."""

    @property
    def sequences(self) -> Sequence[KVSequence]:
        """Sequences of the live beams."""

    def pending(self) -> "list[Chunk]":
        """Chunks of them that can be computed now."""

    def take(self, sequence: KVSequence, candidates: Sequence[tuple[int, float]]) -> list[Beam] | None:
        """The candidates behind one of them; the best answers once the search is done."""

    def arrange(self) -> None:
        """Fork and close sequences as the last candidates ask. If it fails it can be called again. Raises: OutOfPages."""

    def close(self) -> None:
        """Give all of them back but the request's own."""


@dataclass(eq=False, slots=True)
class Request:
    """A request, from its arrival to its end. Its tokens outlive its memory: a preempted one comes back by them."""

    ask: Generate
    stop_ids: frozenset[int]
    """Tokens that end it: its own, and the model's unless it ignores them."""
    suppressed_ids: frozenset[int] = frozenset()
    """Tokens that are masked until `min_tokens` have been generated."""
    kept: KeptRows | None = None
    """What its `kv_policy` leaves of its rows; None for all of them."""
    status: Status = Status.WAITING
    prompt: TokenIds = field(init=False)
    saved: TokenIds = field(init=False)
    """All its tokens, as of when it ran last."""
    sequence: KVSequence | None = None
    """Its memory, while it runs."""
    table: "RequestTable | None" = None
    """Holds its tokens and counts, while it runs."""
    cached: tuple[tuple[str, int], ...] = ()
    """Tokens of its prompt that the prefix cache had when it began, by where they were: see `Output.cached`."""
    num_fetches: int = 0
    """How often it has waited for tiers since it arrived or was preempted."""
    unfetched: str = "unknown"
    """Why nothing was fetched for it when it last asked, if so: see `Fetches.counts`."""
    declined: set[str] = field(default_factory=set)
    """Tiers that take longer to load from than computing, as was found since then."""
    fetched: list[Fetch | Borrowed] = field(default_factory=list)
    """Those of these fetches that were done, and what was borrowed."""
    arrived_s: float = field(default_factory=time.perf_counter)
    queued_us: int = 0
    """How long it waited before it began for the first time."""
    num_scored: int = 0
    """Rows of its prompt whose next token's log-probability has been sent."""
    num_answered: int = 0
    """Tokens that have been sent."""
    num_admitted: int = 0
    """How often it has begun: more than once if it was preempted."""
    num_lost: int = 0
    """Rows that had been read back when it was last preempted."""
    place: int = 0
    """Its place in order of arrival while it waits (below 0 once preempted), in order of admission while it runs."""
    num_overtaken: int = 0
    """Later requests that began before it, because more of their prompts was cached."""
    lookup: Callable[[], int] | None = None
    """How many of its tokens are cached; of a waiting request, once that has been asked."""
    awaited: "Request | None" = None
    """A running request that computes some of its prompt, while it waits."""
    num_awaited: int = 0
    """Tokens that both prompts begin with."""
    num_tokens_stuck: int | None = None
    """Tokens it had when it was last preempted while running alone. If it has no more by then, it can never fit."""
    max_others: int | None = None
    """How many others may run when it begins again; None for any number.

    Set for a preempted beam search, whose need of memory is not known: one that ran beside it must have ended first.
    """
    beams: LiveBeams | None = None
    """Its beam search, while it runs."""
    matcher: Matcher | None = None
    """The state of its grammar behind all tokens that the host knows."""
    may_jump: bool = False
    """May tokens that its grammar forces be appended without being sampled?"""
    grammar_s: float = 0.0
    """Time of the loop that its grammar has taken."""

    def __post_init__(self) -> None:
        self.prompt = self.saved = np.array(self.ask.prompt, dtype=np.int32)

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
    def num_dropped(self) -> int:
        """Tokens whose rows its `kv_policy` has dropped."""
        return 0 if self.kept is None else self.kept.num_dropped

    @property
    def shares_rows(self) -> bool:
        """May the prefix cache have its rows? Not if its `kv_policy` says so, or a compaction found no page for own ones."""
        return self.kept is None or (self.kept.eviction.share_prompt and self.num_tokens_stuck is None)

    @property
    def num_first_rows(self) -> int:
        """Rows that it needs to begin, or to begin again."""
        return len(self.tokens) if self.kept is None else self.kept.first(len(self.tokens))

    @property
    def most_rows(self) -> int:
        """The most rows that it may have at once."""
        return self.max_tokens if self.kept is None else self.kept.eviction.most_rows(len(self.prompt), self.max_tokens)

    @property
    def min_length(self) -> int:
        """Rows, the prompt's included, that must be there before one of `suppressed_ids` may come; 0 if any may come."""
        if not (self.ask.params.min_tokens and self.suppressed_ids):
            return 0
        return max(0, len(self.prompt) + self.ask.params.min_tokens - self.num_dropped)

    @property
    def seed(self) -> int:
        """Of its random numbers, which also depend on the number of rows: another one behind each compaction."""
        return ((self.ask.params.seed or 0) + _GOLDEN * self.num_dropped) & (2**64 - 1)

    @property
    def num_slots(self) -> int:
        """Slots that it takes while it runs: one for each beam, from the start."""
        return max(1, self.ask.params.beam_width)

    @property
    def memory(self) -> KVSequence:
        """Its sequence; only of a running request."""
        assert self.sequence is not None, "a waiting request has no memory"
        return self.sequence

    @property
    def tokens(self) -> TokenIds:
        """All its tokens that the host knows."""
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
        """The tokens whose rows, but for the last, may be taken from the prefix cache.

        Rows whose next token is still to be scored may not: cached rows have no logits. Nor may those whose queries others are
        ranked by, and rows behind the prompt that were not dropped.
        """
        tokens = self.tokens
        if self.kept is not None:
            tokens = self.prompt[: self.kept.num_attachable + 1 if self.num_tokens_stuck is None else 1]
        is_scored = self.ask.params.prompt_logprobs is None or self.num_scored >= len(self.prompt) - 1
        return tokens if is_scored else tokens[: self.num_scored + 1]

    def sources_of(self, num_cached: int) -> Counter[str]:
        """Cached tokens by where they were when it came: those of a fetch in proportion to the bytes from each tier."""
        sources: Counter[str] = Counter()
        counted = 0
        for fetch in self.fetched:
            start, end = max(counted, fetch.known_tokens), min(num_cached, fetch.num_tokens)
            if start < end:
                for name, size_bytes in fetch.loaded_bytes.items():
                    sources[name] += (end - start) * size_bytes // fetch.loaded_bytes.total()
                counted = end
        sources[DEVICE] = num_cached - sources.total()
        return +sources

    def scored_rows(self, start: int, end: int) -> ScoredRows | None:
        """Which of its rows [start, end) need the log-probability of their next token."""
        first, end = max(start, self.num_scored), min(end, len(self.prompt) - 1)
        if self.ask.params.prompt_logprobs is None or first >= end:
            return None
        return ScoredRows(first, self.prompt[first + 1 : end + 1], self.ask.params.prompt_logprobs)

    def pending(self) -> "list[Chunk]":
        """All that can be computed of it now from tokens that the host has: its own, or those of its live beams."""
        if self.beams is not None:
            return self.beams.pending()
        return [self.own_chunk()] if self.status is Status.PREFILLING else []

    @property
    def sequences(self) -> Sequence[KVSequence]:
        """Its own sequence, or those of its live beams; only of a running request."""
        return [self.memory] if self.beams is None else self.beams.sequences

    def own_chunk(self, num_candidates: int = 0) -> "Chunk":
        """Its own tokens for which no step has been launched."""
        start = self.memory.length
        chunk = Chunk(self, self.memory, start, self.tokens[start + self.num_dropped :], num_candidates=num_candidates)
        room = None if self.kept is None else self.kept.room(start)
        return chunk if room is None else chunk.first(room)

    def begin_with(self, forced: Sequence[int]) -> None:
        """Set the first tokens of its answer before it begins; they are computed with the prompt."""
        assert self.num_admitted == 0, "it has begun"
        self.saved = np.concatenate([self.prompt, np.array(forced, np.int32)])

    def enter(self, table: "RequestTable", sequence: KVSequence, num_rows: int) -> None:
        """It runs from now on, in a sequence that has its first rows."""
        self.sequence, self.table, self.status = sequence, table, Status.PREFILLING
        self.lookup = self.awaited = None
        self.num_fetches, self.unfetched, self.declined, self.fetched = 0, "unknown", set(), []
        if not self.num_admitted:
            self.queued_us = max(1, int((time.perf_counter() - self.arrived_s) * 1e6))
        self.num_admitted += 1
        table.enter(self, sequence.slot, num_rows)

    def leave(self, status: Status) -> None:
        """It runs no longer; the caller gives the sequence back."""
        assert self.table is not None, "it does not run"
        self.saved = self.table.leave(self.memory.slot)
        self.sequence = self.table = None
        self.status = status
        if self.kept is not None:
            self.kept = self.kept.anew()

    def output(
        self, tokens: tuple[int, ...] = (), reason: FinishReason | None = None, logprobs: Logprobs | None = None
    ) -> Output:
        """The message with its next tokens; they count as sent."""
        is_first = not self.num_answered
        self.num_answered += len(tokens)
        return Output(
            request_id=self.ask.request_id,
            token_ids=tokens,
            finish_reason=reason,
            cached=self.cached if is_first else (),
            queued_us=self.queued_us if is_first else 0,
            logprobs=() if logprobs is None else (logprobs.chosen,),
            top_logprobs=(tuple(logprobs.likeliest),) if logprobs is not None and logprobs.likeliest else (),
        )


@dataclass(eq=False, slots=True)
class Chunk:
    """The next tokens of one sequence in a step, known to the host: part of a prompt, or the last token of a beam."""

    request: Request
    sequence: KVSequence
    start: int
    """Rows that the sequence has."""
    tokens: TokenIds
    is_last: bool = True
    """Is a token, or are candidates, wanted behind it?"""
    num_candidates: int = 0
    """How many of the likeliest next tokens a beam search wants; 0 if one is sampled."""
    of_beam: bool = False
    """Is it the last token of a beam, not part of the request's own tokens?"""
    is_answered: bool = True
    """Does what is sampled behind it count? Not if a grammar has forced other tokens since."""
    num_admitted: int = field(init=False)
    """Of the request, when the chunk was made."""

    def __post_init__(self) -> None:
        self.num_admitted = self.request.num_admitted

    @property
    def slot(self) -> int:
        """The slot of its sequence."""
        return self.sequence.slot

    @property
    def end(self) -> int:
        """Rows that the sequence has behind it."""
        return self.start + len(self.tokens)

    @property
    def is_live(self) -> bool:
        """Does its request still run, without having been preempted in between?"""
        return self.request.is_running and self.request.num_admitted == self.num_admitted

    @property
    def is_sampled(self) -> bool:
        """Is the request's next token sampled behind it?"""
        return self.is_last and not self.num_candidates and self.request.ask.params.max_tokens > 0

    def first(self, count: int) -> "Chunk":
        """Its first `count` tokens, or all if there are no more."""
        if len(self.tokens) <= count:
            return self
        return Chunk(self.request, self.sequence, self.start, self.tokens[:count], is_last=False, of_beam=self.of_beam)


@dataclass(eq=False, slots=True)
class Step:
    """A step: the scheduler makes it, the runner launches it, the engine reads its results back."""

    slots: Slots
    """Slots that compute the one token that is on the device. Their results come first."""
    ends: Slots
    """Rows of these slots behind the step."""
    epochs: Slots
    """Of these slots, at the launch."""
    chunks: list[Chunk]
    """Tokens that the host knows."""
    ranked: list[Ranked] = field(default_factory=list)
    """Sequences of it with queries that their rows are ranked by."""
    readback: Readback | None = None
    """Once all of it is launched."""
    launched_s: float = 0.0
    """When its launch began, of time.perf_counter."""


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
        """Those, and the ones that launched steps will sample."""
        self.num_confirmed = np.zeros(1 + num_slots, np.int64)
        """Rows that were attached, or computed by steps that have been read back."""
        self.num_inserted = np.zeros(1 + num_slots, np.int64)
        """Of them, those that the prefix cache has by `attach` or `insert`."""
        self.max_tokens = np.zeros(1 + num_slots, np.int64)
        """Tokens with which a request is done. The last one is never written: nothing attends to it."""
        self.ends = np.full(1 + num_slots, _NO_END, np.int64)
        """Rows with which a request is compacted next."""
        self.num_keeping = 0
        """Requests with a `kv_policy`."""
        self.epochs = np.zeros(1 + num_slots, np.int64)
        """Counts the requests that entered or left: results of a step for another epoch are dropped."""
        self.places = np.zeros(1 + num_slots, np.int64)
        """The requests' `place`."""
        self.ignores_eos = np.zeros(1 + num_slots, np.bool_)
        self.has_stops = np.zeros(1 + num_slots, np.bool_)
        """Has this request `stop_token_ids` of its own?"""
        self.constrained = np.zeros(1 + num_slots, np.bool_)
        """Does the answer follow a grammar?"""
        self.num_constrained = 0

    def enter(self, request: Request, slot: int, num_rows: int) -> None:
        """A request runs in a slot that has the first rows of its tokens."""
        tokens = request.saved
        self.requests[slot] = request
        self.tokens_ST[slot, : len(tokens)] = tokens
        self.num_known[slot] = self.num_coming[slot] = len(tokens)
        self.num_confirmed[slot] = self.num_inserted[slot] = num_rows
        self.max_tokens[slot] = request.max_tokens
        self.set_end(request, slot)
        self.num_keeping += request.kept is not None
        self.epochs[slot] += 1
        self.places[slot] = request.place
        self.ignores_eos[slot] = request.ask.params.ignore_eos
        self.has_stops[slot] = bool(request.ask.params.stop_token_ids)
        self.constrained[slot] = request.matcher is not None
        self.num_constrained += request.matcher is not None

    def leave(self, slot: int) -> TokenIds:
        """The request in this slot does not run any more; a copy of its tokens."""
        tokens, request = self.tokens_ST[slot, : self.num_known[slot]].copy(), self.requests[slot]
        self.num_keeping -= request is not None and request.kept is not None
        self.requests[slot], self.ends[slot] = None, _NO_END
        self.epochs[slot] += 1
        self.num_constrained -= int(self.constrained[slot])
        self.constrained[slot] = False
        for counts in (self.num_known, self.num_coming, self.num_confirmed, self.num_inserted, self.max_tokens):
            counts[slot] = 0
        return tokens

    def set_end(self, request: Request, slot: int) -> None:
        """A request begins, or was compacted."""
        end = None if request.kept is None else request.kept.end
        self.ends[slot] = _NO_END if end is None else end

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
