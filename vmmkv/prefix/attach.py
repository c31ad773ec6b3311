"""Attaching a new sequence to the rows of a known prefix.

    adopt      a parked slot has all matched rows and becomes the sequence's slot: no map or unmap
    alias      the extents that hold only matched rows are mapped under a free slot, and the rest is copied
    compute    nothing is attached

The rule is fixed. Adopt a slot whose rows past the match are no more than the matched rows, and fit in `MOST_LOST_PAGES`;
else alias; else compute. A slot that keeps pinned rows, or whose rows past the match are shared or in use, is passed over.
Where many slots have the match, `MOST_LOOKED_AT` of them are looked at, in turn.

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

from vmmkv.driver.base import retried
from vmmkv.errors import OutOfPages
from vmmkv.layout import Group
from vmmkv.memory.extents import SIZE_CLASSES, Extent
from vmmkv.memory.sharing import Pages, Windows, copy_slot_bytes
from vmmkv.memory.slot_memory import SlotMemory
from vmmkv.memory.slots import ParkedSlot, Slots
from vmmkv.prefix.index import MOST_LOOKED_AT, Placed, PrefixIndex, pieces_below
from vmmkv.prefix.radix_tree import Match, Node, Piece, Tokens
from vmmkv.sequence import Sequence
from vmmkv.units import PAGE_BYTES

MOST_LOST_PAGES: Final = SIZE_CLASSES[0]
"""Adopting a slot overwrites its rows past the match. A slot with more of them is left alone, and one with more of them than
are matched, so that a new conversation with the same system prompt does not overwrite another."""


class AttachMethod(enum.Enum):
    """Way in which a sequence got its first tokens."""

    ADOPT = "adopt"
    """The sequence took over a parked slot that had the rows."""
    ALIAS = "alias"
    """Extents of the tree are mapped under its slot; the rows in the last, partly matched extent are copied."""
    COMPUTE = "compute"
    """The sequence has no rows: all tokens are to be computed."""


@dataclass(frozen=True, slots=True)
class Attached:
    """A new sequence, and how it got its first tokens."""

    sequence: Sequence
    num_tokens: int
    """Rows [0, num_tokens) hold the first tokens of the prompt; the others are to be computed."""
    method: AttachMethod
    num_aliased: int = 0
    """Extents that it shares. 0 by `ALIAS` if less than one extent was known: then all rows are copied."""


class Extents(NamedTuple):
    """The extents of the tree that hold matched rows."""

    aliased: tuple[Pages, ...]
    """Extents to alias, by group, and by page of the slot."""
    tails: tuple[Placed | None, ...]
    """The extent that holds the rest, by group; None if there is no rest, or only a resident has it."""
    firsts: tuple[int, ...]
    """The first row that is really there, by group. See `SlotTable.firsts`."""
    num_tokens: int
    """Tokens for which extents alone are enough, without a resident."""


class Hit:
    """The known first `num_tokens` of a prompt, and the places of their rows. Valid until the tree changes.

    Extents are looked up on first use: adopting a slot needs none.
    """

    def __init__(self, memory: SlotMemory, windows: Windows, path: list[Node[Placed]], num_tokens: int, starts: list[int]):
        self.path: Final = path
        """Path of the whole match: a node after these rows can have a page that they end in."""
        self.num_tokens: Final = num_tokens
        self.node: Final = next(node for node in path if node.end >= num_tokens)
        """Node that has the last of these tokens."""
        self.starts: Final = starts
        """The first row that the next token sees, by group."""
        self._memory = memory
        self._windows = windows
        self.resident: Final = next(filter(self.is_in, self.node.residents), None)
        """A slot, live or parked, that has all these rows; None if there is none."""

    def is_in(self, slot: int) -> bool:
        """Has a resident of a node still the rows which the next token sees?"""
        all_starts = self._memory.table.starts
        return all(all_starts[group, slot] <= start for group, start in enumerate(self.starts))

    @functools.cached_property
    def extents(self) -> Extents:
        """Extents of the tree that hold these rows."""
        aliased: list[Pages] = []
        tails: list[Placed | None] = []
        firsts: list[int] = []
        num_tokens = self.num_tokens
        for index, (arena, start) in enumerate(zip(self._memory.arenas, self.starts, strict=True)):
            by_page: _ByPage = {}
            for piece in itertools.chain.from_iterable(node.pieces for node in self.path):
                if piece.group == index:
                    by_page.setdefault(piece.value.page, []).append(piece)
            run, page = _run_of_extents(by_page, arena.group, start, self.num_tokens)
            tail: Placed | None = None
            first = start
            if run:
                first = run[0].first_token
            elif self.resident is not None:
                first = int(self._memory.table.firsts[index, self.resident])
            if page * PAGE_BYTES < self.num_tokens * arena.group.row_bytes:
                tail = _extent_over(page, start, by_page, self.node, index)
                if tail is None:
                    num_tokens = min(num_tokens, arena.group.tokens_under(page))
                elif not run and self.resident is None:
                    first = tail.first_token
            aliased.append({placed.page: placed.extent for placed in run})
            tails.append(tail)
            firsts.append(first)
        return Extents(tuple(aliased), tuple(tails), tuple(firsts), num_tokens)

    def all_extents(self) -> Iterator[Extent]:
        """Extents that are mapped to attach the hit."""
        yield from itertools.chain.from_iterable(pages.values() for pages in self.extents.aliased)
        yield from (tail.extent for tail in self.extents.tails if tail is not None)

    def copy(self, group: int, first_byte: int, size_bytes: int, target: int) -> None:
        """Copy bytes of the hit's rows to an address, as sharing.CopyBytes: from the resident, or the extent that has them."""
        if self.resident is not None:
            copy_slot_bytes(self._memory, self.resident, group, first_byte, size_bytes, target)
        else:
            tail = self.extents.tails[group]
            assert tail is not None, "rows are missing and nothing has them"
            self._windows.copy(tail.extent, first_byte - tail.page * PAGE_BYTES, size_bytes, target)


class Attacher:
    """Attaches sequences of one cache to what its index has. The caller holds the pool's lock."""

    def __init__(self, slots: Slots, index: PrefixIndex) -> None:
        self._slots = slots
        self._memory = slots.memory
        self._index = index
        self.windows = Windows(self._memory)
        """Windows through which extents are read that no slot has."""
        self._row_bytes = slots.layout.row_bytes

    def attach(self, tokens: Tokens, namespace: Hashable, *, method: AttachMethod | None, end: int) -> Attached:
        """Attach by the rule, or by `method` if that is possible. See `PrefixCache.attach`, also for errors."""
        attached: Attached | None = None
        # A match can hold pages that attaching it needs; without it they can be evicted, and all rows are computed.
        with contextlib.suppress(OutOfPages):
            hit = None if method is AttachMethod.COMPUTE else self.find(namespace, tokens)
            if hit is not None:
                parked = None if method is AttachMethod.ALIAS else self._adoptable(hit, is_forced=method is not None)
                if parked is not None:
                    attached = self._adopt(parked, hit.num_tokens, end)
                elif method is not AttachMethod.ADOPT:
                    attached = self._alias(namespace, tokens, end)
        return attached or Attached(Sequence(self._slots.open(end, namespace)), 0, AttachMethod.COMPUTE)

    def find(self, namespace: Hashable, tokens: Tokens) -> Hit | None:
        """The most tokens of a prompt that can be attached, all but the last at most. Changes nothing."""
        return self.hit(self._index.tree.match(namespace, tokens), len(tokens) - 1)

    def hit(self, match: Match[Placed], most: int) -> Hit | None:
        """The part of a match that can be attached, `most` tokens at most; None if there is none."""
        num_tokens = min(match.num_tokens, most)
        while num_tokens > 0:
            starts = [self._slots.layout.start_for(group, num_tokens) for group in self._slots.layout.groups]
            hit = Hit(self._memory, self.windows, match.path, num_tokens, starts)
            if hit.resident is not None or hit.extents.num_tokens == num_tokens:
                return hit
            fewer = hit.extents.num_tokens
            ends = (node.end for node in match.path if fewer < node.end < num_tokens and node.residents)
            num_tokens = max(ends, default=fewer)
        return None

    def _adoptable(self, hit: Hit, *, is_forced: bool) -> ParkedSlot | None:
        """A parked slot with these rows that may be overwritten past them; None if there is none.

        It is the shortest of all residents if `is_forced`, else of `MOST_LOOKED_AT` of them, which are others at each call.
        """
        most_lost = (
            self._slots.max_tokens if is_forced else min(MOST_LOST_PAGES * PAGE_BYTES // self._row_bytes, hit.num_tokens)
        )
        parked_slots, parked_at = self._slots.parked_slots, self._index.parked_at
        node = hit.node
        if node.end > hit.num_tokens and len(node.residents) > 1:
            return None  # rows past the match are in use
        residents = node.some_residents(len(node.residents) if is_forced else MOST_LOOKED_AT)
        parked = [parked_slots[slot] for slot in residents if slot in parked_at]
        parked = [each for each in parked if each.length - hit.num_tokens <= most_lost]
        # Nearly always the first can be adopted.
        parked.sort(key=lambda each: (each.length, -each.stamp))
        index, spares = self._index, self._slots.can_spare_pinned()
        fits = (each for each in parked if hit.is_in(each.slot) and index.is_free_past(each.slot, hit.num_tokens))
        return next((each for each in fits if not (spares and index.keeps_pinned(each.slot))), None)

    def _adopt(self, parked: ParkedSlot, num_tokens: int, end: int) -> Attached:
        """The nodes past the match are removed, for their rows will be overwritten. Their extents are the slot's alone."""
        slot, index = parked.slot, self._index
        index.shorten(slot, num_tokens, discard=True)
        parked.length = num_tokens
        node = index.parked_at.pop(slot)
        index.tree.lock(node)  # making room must not evict what is being adopted
        try:
            live = self._slots.adopt(parked, num_tokens, end)
        except BaseException:
            index.keep(slot, node)
            raise
        finally:
            index.tree.unlock(node)
        return Attached(Sequence(live), num_tokens, AttachMethod.ADOPT)

    def _alias(self, namespace: Hashable, tokens: Tokens, end: int) -> Attached | None:
        """Attach a match to a free slot; None if the match was evicted while one was made free."""
        slots, memory, index = self._slots, self._memory, self._index
        slot = slots.clear_run(1)
        hit = self.find(namespace, tokens)
        while hit is not None and not index.import_extents(hit.all_extents()):
            hit = self.find(namespace, tokens)
        if hit is None:
            return None
        aliased = hit.extents.aliased
        memory.table.begin(slot, hit.starts, hit.extents.firsts)
        with self.reading(hit):
            live = slots.open_with(slot, end, namespace, hit.num_tokens, aliased, hit.copy)
            if hit.resident in slots.parked_slots:
                try:
                    slots.parked_slots[hit.resident].fence = memory.fence()
                except BaseException:
                    retried(lambda: slots.end(live))
                    raise
        return Attached(Sequence(live), hit.num_tokens, AttachMethod.ALIAS, num_aliased=sum(map(len, aliased)))

    @contextlib.contextmanager
    def reading(self, hit: Hit) -> Iterator[None]:
        """Making room evicts nothing of a hit within: neither a slot with these rows, nor extents of nodes below."""
        index, pool, node = self._index, self._slots.pool, hit.node
        tails = [tail.extent for tail in hit.extents.tails if tail is not None]
        index.tree.lock(node)
        pool.hold(*tails)
        index.source = hit.resident
        try:
            yield
        finally:
            index.source = None
            index.tree.unlock(node)
            for extent in tails:
                pool.drop(extent)


_ByPage: TypeAlias = dict[int, list[Piece[Placed]]]
"""The pieces of one group on a path, by the first page of their extent."""


def _run_of_extents(by_page: _ByPage, group: Group, start: int, num_tokens: int) -> tuple[list[Placed], int]:
    """Adjoining extents that hold only matched rows, from the first needed page on, the largest first; and where they end."""
    page = group.page_of(start)
    run: list[Placed] = []
    while usable := [
        piece.value for piece in by_page.get(page, ()) if piece.end_token <= num_tokens and piece.value.first_token <= start
    ]:
        run.append(max(usable, key=lambda placed: placed.extent.num_pages))
        page = run[-1].end_page
    return run, page


def _extent_over(page: int, start: int, by_page: _ByPage, node: Node[Placed], group: int) -> Placed | None:
    """An extent with the matched rows of a page: on the path, or below the node that they end in."""
    on_path = (piece for size in SIZE_CLASSES for piece in by_page.get(page // size * size, ()))
    below = (piece for _, piece in pieces_below(node, group))
    return next((piece.value for piece in itertools.chain(on_path, below) if piece.value.has(page, start)), None)
