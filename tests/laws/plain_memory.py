"""KV memory and a device of plain data, for the scheduler: a page is a list of rows, and a row knows all tokens up to its own.

The memory keeps the laws of a `KVBackend` as far as a scheduler sees them: growth is refused when all pages are held, rows are
shared once they have been read back, in whole pages, and what is cached is evicted, the least recently used first. A slot is
given to another sequence as soon as it is free.

A token that is sampled depends on all before it, and on nothing else. So an answer is known before it is computed, and is
wrong if any row was missing, stale, computed twice or of another request.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
import torch

from vmmkv import PAGE_BYTES, DriverError, KVLayout, OutOfPages, OutOfSlots, RowsUnmapped
from vmmkv.cache import CacheStats
from vmmkv_server.engine.kv_backend import Slots, TokenIds
from vmmkv_server.engine.request import Request, RequestTable
from vmmkv_server.engine.step import Logprobs, Results, Step

LAYOUT = KVLayout.uniform(layers=1, kv_heads=64, head_dim=1024, dtype=torch.float32)
PAGE_ROWS = PAGE_BYTES // LAYOUT.row_bytes
VOCABULARY = 5


def num_pages(num_rows: int) -> int:
    """Pages of so many rows."""
    return -(-num_rows // PAGE_ROWS)


class Row(NamedTuple):
    """A computed row."""

    before: int
    """Digest of all tokens before it."""
    token: int

    @property
    def after(self) -> int:
        """Digest of all tokens up to its own."""
        return digest([self.token], self.before)


def digest(tokens: Iterable[int], before: int = 1) -> int:
    """A number that depends on each token and its place, behind those that gave another digest."""
    for token in tokens:
        before = (before * 7919 + token + 1) % 1_000_003
    return before


def sampled(before: int) -> int:
    """The token that follows those of a digest."""
    return before // 7 % VOCABULARY


def masked(token: int) -> int:
    """The token that is sampled in place of one by a mask."""
    return (token + 1) % VOCABULARY


@dataclass(eq=False)
class Page:
    """A page: its rows, and how many sequences have it. The cache may have it, too."""

    rows: list[Row | None] = field(default_factory=lambda: [None] * PAGE_ROWS)
    num_sequences: int = 0


class PlainSequence:
    """Rows of one sequence. See KVSequence."""

    def __init__(self, memory: "PlainMemory", slot: int, max_tokens: int, namespace: Hashable) -> None:
        self.memory, self.slot, self.max_tokens, self.namespace = memory, slot, max_tokens, namespace
        self.pages: list[Page] = []
        self.num_computed = self.num_read = 0
        """Rows that a launched step has computed, or others had; those of which the step has been read back."""
        self.num_dropped = self.num_cuts = 0
        self.closed = False

    @property
    def length(self) -> int:
        return int(self.memory.lengths[self.slot])

    def rows(self) -> list[Row]:
        """Those that are computed."""
        return [row for page in self.pages for row in page.rows][: self.num_computed]

    def grow(self, num_tokens: int) -> None:
        assert not self.closed and num_tokens <= self.max_tokens
        missing = num_pages(num_tokens) - len(self.pages)
        if missing > 0:
            self.memory.call(self)
            self.take(self.memory.new_pages(self, missing))
        self.memory.limits[self.slot] = min(len(self.pages) * PAGE_ROWS, self.max_tokens)

    def take(self, pages: list[Page]) -> None:
        for page in pages:
            page.num_sequences += 1
        self.pages += pages

    def give(self) -> None:
        for page in self.pages:
            page.num_sequences -= 1
        self.pages = []

    def advance(self, num_tokens: int = 1) -> None:
        self.memory.advance(np.array([self.slot]), num_tokens)

    def write(self, index: int, token: int) -> None:
        """Compute the next row, from all before it."""
        assert not self.closed and index == self.num_computed, "rows are computed once, in order"
        page = self.pages[index // PAGE_ROWS]  # else it is not mapped
        assert page.num_sequences == 1 and page not in self.memory.cached.values(), "a shared page is written"
        page.rows[index % PAGE_ROWS] = Row(self.rows()[-1].after if index else digest(()), token)
        self.num_computed += 1

    def sample(self) -> int:
        """The token that follows its rows, all of which are read for that."""
        rows = self.rows()
        assert all(row.after == behind.before for row, behind in itertools.pairwise(rows)), "rows of other tokens"
        assert self.num_dropped or rows[0].before == digest(())
        return sampled(rows[-1].after)

    def drop_but(self, num_kept: int) -> None:
        """Drop all rows but the last ones, which go to its first pages. Raises: OutOfPages; then nothing has changed."""
        assert num_kept < self.length == self.num_computed == self.num_read
        rows: list[Row | None] = [*self.rows()[-num_kept:]]
        own = [page for page in self.pages if page.num_sequences == 1 and page not in self.memory.cached.values()]
        own = own[: num_pages(num_kept)]
        own += self.memory.new_pages(self, num_pages(num_kept) - len(own))
        self.give()
        self.take(own)
        for index, page in enumerate(own):
            part = rows[index * PAGE_ROWS : (index + 1) * PAGE_ROWS]
            page.rows = part + [None] * (PAGE_ROWS - len(part))
        self.num_dropped += self.num_computed - num_kept
        self.num_computed = self.num_read = self.memory.lengths[self.slot] = num_kept
        self.memory.limits[self.slot] = min(len(own) * PAGE_ROWS, self.max_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Give back the pages behind the first rows. Raises: RowsUnmapped if the memory refuses to."""
        assert self.num_read <= num_tokens < self.length == self.num_computed
        if self.memory.refuses_cuts:
            raise RowsUnmapped("the window has moved")
        self.num_cuts += 1
        self.num_computed = self.memory.lengths[self.slot] = num_tokens
        for page in self.pages[num_pages(num_tokens) :]:
            page.num_sequences -= 1
        del self.pages[num_pages(num_tokens) :]
        self.memory.limits[self.slot] = min(len(self.pages) * PAGE_ROWS, self.max_tokens)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.memory.refused = None
            self.give()
            self.memory.lengths[self.slot] = self.memory.limits[self.slot] = 0
            del self.memory.sequences[self.slot]


class PlainMemory:
    """What a scheduler calls of a `KVBackend`."""

    layout = LAYOUT

    def __init__(self, *, budget_pages: int, num_slots: int, max_tokens: int, shares_prefixes: bool) -> None:
        self.budget_pages = budget_pages
        self.num_slots, self.max_tokens, self.shares_prefixes = num_slots, max_tokens, shares_prefixes
        self.lengths = np.zeros(1 + num_slots, np.int64)
        self.limits = np.zeros(1 + num_slots, np.int32)
        self.sequences: dict[int, PlainSequence] = {}
        self.cached: dict[tuple[Hashable, tuple[int, ...]], Page] = {}
        """By namespace and all tokens up to the page's end, the least recently used first."""
        self.counted: dict[tuple[Hashable, tuple[int, ...]], int] = {}
        """Cached rows of the prompts that were looked up, as of then."""
        self.refused: PlainSequence | None = None
        """The sequence that found no page in the last call."""
        self.fails_next = self.has_failed = self.refuses_cuts = False

    def call(self, sequence: PlainSequence | None = None) -> None:
        """A call of the driver, which may be to fail."""
        self.refused = None
        if self.fails_next:
            self.fails_next, self.has_failed = False, True
            raise DriverError("injected", call="map", code="INJECTED")

    # pages

    def used(self) -> set[Page]:
        """Pages of running sequences."""
        return {page for sequence in self.sequences.values() for page in sequence.pages}

    def new_pages(self, sequence: PlainSequence, count: int) -> list[Page]:
        """Free pages, after evicting if need be. Raises: OutOfPages; then nothing has changed."""
        if len(self.used()) + count > self.budget_pages:
            self.refused = sequence
            raise OutOfPages(f"{count} pages are wanted")
        self.evict_to(self.budget_pages - count)
        return [Page() for _ in range(count)]

    def evict_to(self, count: int) -> None:
        """Evict until no more pages are held."""
        for key in [key for key, page in self.cached.items() if not page.num_sequences]:
            if len(self.used() | set(self.cached.values())) <= count:
                return
            del self.cached[key]

    def resize(self, budget_pages: int) -> None:
        """As `Pool.resize`, but that it gives back as much as is not used."""
        self.budget_pages = max(budget_pages, len(self.used()))
        self.evict_to(self.budget_pages)

    def match(self, tokens: TokenIds, namespace: Hashable) -> list[Page]:
        """Cached pages of these tokens, but for the last; they count as used."""
        keys = []
        for end in range(PAGE_ROWS, len(tokens), PAGE_ROWS):
            if (key := (namespace, tuple(tokens[:end].tolist()))) not in self.cached:
                break
            keys.append(key)
        for key in reversed(keys):  # the last page is evicted first
            self.cached[key] = self.cached.pop(key)
        return [self.cached[key] for key in keys]

    # as of a KVBackend

    def begin(self) -> PlainSequence:
        return self.open(self.max_tokens, None)

    def open(self, max_tokens: int, namespace: Hashable) -> PlainSequence:
        self.call()
        free = [slot for slot in range(1, 1 + self.num_slots) if slot not in self.sequences]
        if not free:
            raise OutOfSlots("all slots run a sequence")
        self.sequences[free[0]] = PlainSequence(self, free[0], max_tokens, namespace)
        return self.sequences[free[0]]

    def attach(self, tokens: TokenIds, *, namespace: Hashable, max_tokens: int) -> tuple[PlainSequence, int]:
        sequence = self.open(max_tokens, namespace)
        sequence.take(self.match(tokens, namespace))
        num_rows = len(sequence.pages) * PAGE_ROWS
        sequence.num_computed = sequence.num_read = self.lengths[sequence.slot] = num_rows
        self.limits[sequence.slot] = min(num_rows, max_tokens)
        return sequence, num_rows

    def lookup(self, tokens: TokenIds, *, namespace: Hashable) -> Callable[[], int]:
        key = namespace, tuple(tokens.tolist())

        def count() -> int:
            self.counted[key] = len(self.match(tokens, namespace)) * PAGE_ROWS
            return self.counted[key]

        return count

    def advance(self, slots: Slots, num_tokens: int = 1) -> None:
        after = self.lengths[slots] + num_tokens
        if (after > self.limits[slots]).any():
            raise RowsUnmapped(f"{after} rows, limits {self.limits[slots]}")
        self.lengths[slots] = after

    def insert(self, sequence: PlainSequence, tokens: TokenIds) -> None:
        assert self.shares_prefixes and not sequence.num_dropped
        assert len(tokens) <= sequence.num_read, "rows are shared whose step has not been read back"
        assert tokens.tolist() == [row.token for row in sequence.rows()[: len(tokens)]]
        for index in reversed(range(len(tokens) // PAGE_ROWS)):
            key = sequence.namespace, tuple(tokens[: (index + 1) * PAGE_ROWS].tolist())
            self.cached[key] = self.cached.pop(key, sequence.pages[index])

    def park(self, sequence: PlainSequence, tokens: TokenIds) -> None:
        if self.shares_prefixes:
            self.insert(sequence, tokens)
        sequence.close()

    release = park

    def stats(self) -> CacheStats:
        sizes = {"pool_used_bytes": len(self.used()) * PAGE_BYTES, "pool_budget_bytes": self.budget_pages * PAGE_BYTES}
        return CacheStats(**dict.fromkeys((each.name for each in fields(CacheStats)), 0) | sizes)

    # laws

    def check(self, running: list[PlainSequence]) -> None:
        """These sequences run, and no others; every page is held as often as the tables say."""
        assert [each.slot for each in running] == [*{each.slot: each for each in running}], "a slot is used twice"
        assert {each.slot: each for each in running} == self.sequences, "a slot is leaked"
        held = Counter(page for sequence in running for page in sequence.pages)
        assert all(page.num_sequences == count for page, count in held.items())
        assert all(page.num_sequences == held[page] for page in self.cached.values())
        assert len({*held, *self.cached.values()}) <= self.budget_pages
        for sequence in running:
            assert sequence.num_read <= sequence.num_computed == sequence.length <= self.limits[sequence.slot]
        free = [slot for slot in range(1 + self.num_slots) if slot not in self.sequences]
        assert not self.lengths[free].any() and not self.limits[free].any()


@dataclass(eq=False)
class Flight:
    """A step in flight."""

    step: Step
    ends: list[tuple[PlainSequence, int, int]]
    """Sequences, their rows behind the step, and their cuts before: those of its slots, then those of its chunks."""
    results: Results | None = None
    """Results, once all of it is launched."""


class PlainSampler:
    """What a scheduler calls of a `Sampler`. Some requests cannot be sampled for."""

    def __init__(self) -> None:
        self.assigned: dict[int, Request] = {}
        self.refused: set[Request] = set()

    def assign(self, requests: list[Request]) -> None:
        if not self.refused.isdisjoint(requests):
            raise ValueError("it cannot be sampled for")
        self.assigned.update((request.memory.slot, request) for request in requests)

    def counts(self, slot: int) -> bool:
        return slot % 2 == 1

    def release(self, slot: int) -> None:
        self.assigned.pop(slot, None)


class PlainDevice:
    """Computes steps at once. What they give is known to the host when they are read back."""

    def __init__(self, memory: PlainMemory, table: RequestTable, sampler: PlainSampler) -> None:
        self._memory, self._table, self._sampler = memory, table, sampler
        self._tokens: dict[PlainSequence, int] = {}
        """Tokens that have been sampled last, and have no row yet."""

    def forward(self, step: Step) -> Flight:
        """The first half: rows."""
        flight = Flight(step, [])
        for slot, end in zip(step.slots.tolist(), step.ends.tolist(), strict=True):
            sequence = self._memory.sequences[slot]
            sequence.write(end - 1, self._tokens.pop(sequence))
            flight.ends.append((sequence, end, sequence.num_cuts))
        for chunk in step.chunks:
            for index, token in enumerate(chunk.tokens.tolist()):
                chunk.sequence.write(chunk.start + index, token)
            flight.ends.append((chunk.sequence, chunk.end, chunk.sequence.num_cuts))
        return flight

    def sample(self, flight: Flight) -> None:
        """The second half: tokens. What it gives for sequences that have ended in between means nothing."""
        tokens, candidates = [self._sampled(sequence) for sequence, *_ in flight.ends[: len(flight.step.slots)]], {}
        for row, chunk in flight.step.last_chunks():
            if chunk.num_candidates and not chunk.sequence.closed:
                candidates[row] = Logprobs(0.0, [(chunk.sequence.sample(), 0.0)])
            tokens.append(0 if chunk.num_candidates else self._sampled(chunk.sequence))
        flight.results = Results(np.array(tokens, np.int32), candidates)

    def _sampled(self, sequence: PlainSequence) -> int:
        if sequence.closed:
            return 0
        request = self._table.requests[sequence.slot]
        assert self._sampler.assigned.get(sequence.slot) is request, "the slot has the parameters of another request"
        token = sequence.sample()
        self._tokens[sequence] = masked(token) if self._table.constrained[sequence.slot] else token
        return self._tokens[sequence]

    def read(self, flight: Flight) -> Results:
        """The step is read back."""
        assert flight.results is not None
        for sequence, end, num_cuts in flight.ends:
            if sequence.num_cuts == num_cuts:
                sequence.num_read = end
        return flight.results
