"""How a new sequence gets the rows of a known prefix.

    adopt      a parked slot has all matched rows and becomes the sequence's slot: no driver call
    alias      the extents that hold only matched rows are mapped under a free slot, and the rest is copied
    compute    nothing is attached

The rule is fixed: adopt if that loses no more than `MOST_LOST_PAGES` past the match, else alias, else compute.

    rows      0 .............................. m | m + 1 ...       m tokens are matched
    extents   |  a  |  a  |  a  |     t     |                      a: all its rows are matched; it is aliased
                                ^ copied ^  m * row_bytes          t: it holds the rest, which is copied

Rows straddle pages, so a rest is left as a rule. It is copied from a slot that has the rows (a *resident* of the node), or from
the extent that holds them. If neither is there, fewer tokens are attached.
"""

import contextlib
import enum
import functools
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from vmmkv.cache import KVCache, ParkedSlot, Sequence
from vmmkv.errors import OutOfPages
from vmmkv.layout import Group
from vmmkv.memory.pool import LARGE_PAGES, Extent
from vmmkv.memory.sharing import Pages, SlotRows, Windows
from vmmkv.memory.slot_memory import SlotMemory
from vmmkv.prefix.index import Placed, PrefixIndex
from vmmkv.prefix.radix_tree import Node, Piece, Tokens
from vmmkv.units import PAGE_BYTES

MOST_LOST_PAGES: Final = LARGE_PAGES
"""Adopting a slot overwrites its rows past the match. A slot with more of them is left alone, so that a new conversation
with the same system prompt does not overwrite a long one."""


class AttachMethod(enum.Enum):
    """How a sequence got its first tokens."""

    ADOPT = "adopt"
    """It took over a parked slot that had the rows."""
    ALIAS = "alias"
    """Extents of the tree are mapped under its slot; the rows in the last, partly matched extent are copied."""
    COMPUTE = "compute"
    """It has none: all of them are to be computed."""


@dataclass(frozen=True, slots=True)
class Attached:
    """A new sequence, and how it got its first tokens."""

    sequence: Sequence
    num_tokens: int
    """Rows [0, num_tokens) hold the first tokens of the prompt; the others are to be computed."""
    method: AttachMethod
    num_aliased: int = 0
    """Extents that it shares. 0 by `ALIAS` if less than one extent was known: then all rows are copied."""


class Sources(NamedTuple):
    """Where matched rows are found besides resident slots."""

    pages: tuple[Pages, ...]
    """For each group: the extents to alias, by page of the slot."""
    tails: tuple[Placed | None, ...]
    """For each group: the extent that holds the rest; None if there is no rest, or only a resident has it."""
    reach: int
    """Tokens for which extents alone are enough, without a resident."""


_ByPage: TypeAlias = list[dict[int, list[Piece[Placed]]]]
"""For each group: the pieces on a path, by the first page of their extent."""


class Plan:
    """Where the first `num_tokens` of a match can be had. Valid until the tree changes.

    Extents are looked up on first use: adopting a slot needs none.
    """

    def __init__(self, memory: SlotMemory, path: list[Node[Placed]], num_tokens: int, starts: list[int]) -> None:
        self.path: Final = path
        self.num_tokens: Final = num_tokens
        self.starts: Final = starts
        """For each group: the first row that the next token sees."""
        self._memory = memory
        node = next(node for node in path if node.end >= num_tokens)
        self.resident: Final = next(iter(self.slots_with_rows(node)), None)
        """A slot, live or parked, that has all these rows; None if there is none."""

    def slots_with_rows(self, node: Node[Placed]) -> Iterator[int]:
        """Residents of a node that still have the rows which the next token sees."""
        all_starts = self._memory.table.starts
        for slot in node.residents if node.has_residents else ():
            if all(all_starts[group, slot] <= start for group, start in enumerate(self.starts)):
                yield slot

    @functools.cached_property
    def sources(self) -> Sources:
        """The extents of the tree that hold these rows."""
        by_page = _by_page(self.path, len(self.starts))
        pages: list[Pages] = []
        tails: list[Placed | None] = []
        reach = self.num_tokens
        for index, (arena, start) in enumerate(zip(self._memory.arenas, self.starts, strict=True)):
            aliased, page = _run_of_extents(by_page[index], arena.group, start, self.num_tokens)
            tail = None
            if page * PAGE_BYTES < self.num_tokens * arena.group.row_bytes:
                tail = _extent_over(page, start, by_page[index], self.path[-1], index)
                if tail is None:
                    reach = min(reach, page * PAGE_BYTES // arena.group.row_bytes)
            pages.append(aliased)
            tails.append(tail)
        return Sources(tuple(pages), tuple(tails), reach)


class Attacher:
    """Attaches sequences of one cache to what its index has. The caller holds the pool's lock."""

    def __init__(self, cache: KVCache, index: PrefixIndex) -> None:
        self._cache = cache
        self._memory = cache.memory
        self._index = index
        self._windows = Windows(self._memory)
        self._row_bytes = sum(group.row_bytes for group in cache.layout.groups)

    def attach(self, tokens: Tokens, namespace: Hashable, *, method: AttachMethod | None, end: int) -> Attached:
        """By the rule, or by `method` if that is possible. See `PrefixCache.attach`, also for errors."""
        attached: Attached | None = None
        # A match can hold pages that attaching it needs; without it they can be evicted, and all rows are computed.
        with contextlib.suppress(OutOfPages):
            plan = None if method is AttachMethod.COMPUTE else self.plan(namespace, tokens)
            if plan is not None:
                parked = None if method is AttachMethod.ALIAS else self._adoptable(plan, is_forced=method is not None)
                if parked is not None:
                    attached = self._adopt(parked, plan.num_tokens, end)
                elif method is not AttachMethod.ADOPT:
                    attached = self._alias(namespace, tokens, end)
        if attached is None:
            attached = Attached(self._cache.open_any(end, namespace), 0, AttachMethod.COMPUTE)
        return attached

    def plan(self, namespace: Hashable, tokens: Tokens) -> Plan | None:
        """The most tokens of a prompt that can be attached, all but the last at most. Changes nothing."""
        match = self._index.tree.match(namespace, tokens[: len(tokens) - 1])
        num_tokens = match.num_tokens
        while num_tokens > 0:
            starts = [self._cache.layout.start_for(group, num_tokens) for group in self._cache.layout.groups]
            plan = Plan(self._memory, match.path, num_tokens, starts)
            if plan.resident is not None or plan.sources.reach == num_tokens:
                return plan
            reach = plan.sources.reach
            ends = (node.end for node in match.path if reach < node.end < num_tokens and node.has_residents)
            num_tokens = max(ends, default=reach)
        return None

    def _adoptable(self, plan: Plan, *, is_forced: bool) -> ParkedSlot | None:
        """The shortest parked slot with these rows that may be overwritten past them; None if there is none."""
        most_tokens = self._cache.max_tokens if is_forced else MOST_LOST_PAGES * PAGE_BYTES // self._row_bytes
        fitting = [
            self._cache.parked_slots[slot]
            for slot in plan.slots_with_rows(plan.path[-1])
            if slot in self._index.parked_at
            and self._cache.parked_slots[slot].length - plan.num_tokens <= most_tokens
            and self._index.is_free_past(slot, plan.num_tokens)
        ]
        return min(fitting, key=lambda parked: (parked.length, -parked.stamp), default=None)

    def _adopt(self, parked: ParkedSlot, num_tokens: int, end: int) -> Attached:
        """The nodes past the match are removed, for their rows will be overwritten. Their extents are the slot's alone."""
        slot, index = parked.slot, self._index
        index.shorten(slot, num_tokens, discard=True)
        parked.length = num_tokens
        node = index.parked_at.pop(slot)
        index.tree.lock(node)  # making room must not evict what is being adopted
        try:
            sequence = self._cache.take_over(parked, num_tokens, end)
        except BaseException:
            index.parked_at[slot] = node
            raise
        finally:
            index.tree.unlock(node)
        return Attached(sequence, num_tokens, AttachMethod.ADOPT)

    def _alias(self, namespace: Hashable, tokens: Tokens, end: int) -> Attached | None:
        """Into a free slot; None if the match was evicted while one was made free."""
        cache, memory, index, pool = self._cache, self._memory, self._index, self._cache.pool
        slot = cache.clear_run(1)
        plan = self.plan(namespace, tokens)
        if plan is None:
            return None
        node, pages = plan.path[-1], plan.sources.pages
        memory.table.starts[:, slot] = plan.starts
        tails = [tail.extent for tail in plan.sources.tails if tail is not None]
        # Making room must not evict what is about to be read: neither a slot with these rows, nor extents of nodes below.
        index.tree.lock(node)
        pool.hold(*tails)
        index.source = plan.resident
        try:
            rest = _Rest(memory, self._windows, plan)
            sequence = cache.open_with(slot, end, namespace, plan.num_tokens, pages, rest)
            if plan.resident in cache.parked_slots:
                try:
                    cache.parked_slots[plan.resident].fence = memory.fence()
                except BaseException:
                    cache.end_sequence(sequence)
                    raise
        finally:
            index.source = None
            index.tree.unlock(node)
            for extent in tails:
                pool.drop(extent)
        return Attached(sequence, plan.num_tokens, AttachMethod.ALIAS, num_aliased=sum(map(len, pages)))


@dataclass(frozen=True, slots=True)
class _Rest:
    """Copies the rows of a plan that are not aliased, from a resident's slot or an extent of the tree."""

    memory: SlotMemory
    windows: Windows
    plan: Plan

    def copy(self, group: int, first_byte: int, size_bytes: int, target: int) -> None:
        """See sharing.Source."""
        if self.plan.resident is not None:
            SlotRows(self.memory, self.plan.resident).copy(group, first_byte, size_bytes, target)
        else:
            tail = self.plan.sources.tails[group]
            assert tail is not None, "rows are missing and nothing has them"
            self.windows.copy(tail.extent, first_byte - tail.page * PAGE_BYTES, size_bytes, target)


def _by_page(path: list[Node[Placed]], num_groups: int) -> _ByPage:
    known: _ByPage = [{} for _ in range(num_groups)]
    for node in path:
        for piece in node.pieces:
            known[piece.group].setdefault(piece.value.page, []).append(piece)
    return known


def _run_of_extents(
    by_page: dict[int, list[Piece[Placed]]], group: Group, start: int, num_tokens: int
) -> tuple[dict[int, Extent], int]:
    """Adjoining extents that hold only matched rows, from the first needed page on, the largest first; and where they end."""
    page = start * group.row_bytes // PAGE_BYTES
    run: dict[int, Extent] = {}
    while usable := [
        piece.value.extent
        for piece in by_page.get(page, ())
        if piece.end_token <= num_tokens and piece.value.first_token <= start
    ]:
        run[page] = max(usable, key=lambda extent: extent.num_pages)
        page += run[page].num_pages
    return run, page


def _extent_over(
    page: int, start: int, by_page: dict[int, list[Piece[Placed]]], deepest: Node[Placed], group: int
) -> Placed | None:
    """An extent with the matched rows of a page: on the path, or below its end, where all branches have the same rows."""
    on_path = (piece for first in (page, page // LARGE_PAGES * LARGE_PAGES) for piece in by_page.get(first, ()))
    for piece in itertools.chain(on_path, _pieces_below(deepest, group)):
        placed = piece.value
        if placed.page <= page < placed.end_page and placed.first_token <= start:
            return placed
    return None


def _pieces_below(node: Node[Placed], group: int) -> Iterator[Piece[Placed]]:
    """The pieces of one branch below a node, as far down as they can hold rows from before its end."""
    end = node.end
    while node.children:
        node = next(iter(node.children.values()))
        yield from (piece for piece in node.pieces if piece.group == group)
        if node.pieces and node.start > end:
            return
