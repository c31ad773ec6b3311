"""What a prefix cache knows: a tree of nodes that hold extents, and which slots have their rows.

    running   a sequence that was attached: its confirmed tokens end at a node, which is locked
    kept      a parked slot: its rows end at a node, and it goes leaf by leaf with the tree
    resident  of a node: a slot, running or kept, that has all rows of the path up to the node's end
    passed    extents of windowed groups that everybody who runs on their path has left behind: the node stays, they may go

This is the occupancy's `Keeper`: what the pool is to be given under pressure is found here. Every call comes with the pool's
lock held.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from vmmkv.cache import Occupancy, ParkedSlot
from vmmkv.layout import Group, KVLayout
from vmmkv.memory.pool import LARGE_PAGES, Evictable, Extent
from vmmkv.memory.sharing import Pages
from vmmkv.memory.slot_memory import SlotMemory
from vmmkv.prefix.radix_tree import Match, Node, Piece, RadixTree, Tokens
from vmmkv.units import PAGE_BYTES, ceil_div

# -------- prefix plan
# What of a match can be attached, and from where: extents to alias, bytes to copy, slots to adopt.
#
#     rows      0 .............................. m | m + 1 ...       m tokens are matched
#     extents   |  a  |  a  |  a  |     t     |                      a: all its rows are matched, and it is aliased
#                                 ^ copied ^  m * row_bytes          t: it holds the rest, which is copied from it
#
# An extent under bytes [a, b) of a slot is usable by a match of `ceil(b / row_bytes)` tokens: its piece's `end_token`. Rows
# straddle pages: the rest is seldom empty. It is copied from a slot that has the rows (a *resident*), or from the extent that
# holds them, which the tree may have without any slot; if neither is there, fewer tokens are attached.


class Placed(NamedTuple):
    """An extent that the tree holds, and the page of a slot under which it stands. Its piece's group is the cache's."""

    page: int
    extent: Extent
    first_token: int = 0
    """Rows before it may not be there: whoever had the extent began in it, for its window needed no more."""

    @property
    def end_page(self) -> int:
        """Behind its last page."""
        return self.page + self.extent.num_pages


_ByPage: TypeAlias = list[dict[int, list[Piece[Placed]]]]
"""Of each group, the pieces on a path by the page at which they begin."""


class _Known(NamedTuple):
    """What the tree has of some rows: see Plan."""

    pages: tuple[Pages, ...]
    tails: tuple[Placed | None, ...]
    reach: int


class Plan:
    """How the first `num_tokens` of a match can be had without computing them. Good until the tree changes.

    What the tree has of the rows is looked up when it is first asked for: who adopts a slot needs none of it.
    """

    def __init__(self, num_tokens: int, resident: int | None, look_up: Callable[[], _Known]) -> None:
        self.num_tokens: Final = num_tokens
        self.resident: Final = resident
        """A slot, live or parked, that has all these rows; None if there is none."""
        self._look_up = look_up

    @property
    def pages(self) -> tuple[Pages, ...]:
        """Of each group: what is aliased, by page."""
        return self._known.pages

    @property
    def tails(self) -> tuple[Placed | None, ...]:
        """Of each group: the extent from which the rest can be copied; None if there is no rest, or only a resident has it."""
        return self._known.tails

    @property
    def reach(self) -> int:
        """For how many of the tokens these are enough, without a resident."""
        return self._known.reach

    @property
    def num_handles(self) -> int:
        """Extents to be aliased."""
        return sum(map(len, self.pages))

    @functools.cached_property
    def _known(self) -> _Known:
        return self._look_up()


def end_token(group: Group, end_page: int) -> int:
    """How many tokens must match for pages up to there to be shareable."""
    return ceil_div(end_page * PAGE_BYTES, group.row_bytes)


def plan(memory: SlotMemory, layout: KVLayout, match: Match[Placed]) -> Plan | None:
    """The most tokens of a match that can be attached, and how; None if there are none."""
    num_tokens, deepest = match.num_tokens, match.deepest
    if deepest is None:
        return None
    by_page = functools.cache(functools.partial(_by_page, memory, match.path))
    while num_tokens > 0:
        starts = [layout.start_for(group, num_tokens) for group in layout.groups]
        resident = _resident(memory, next(node for node in match.path if node.end >= num_tokens), starts)
        found = Plan(num_tokens, resident, functools.partial(_look_up, memory, by_page, deepest, num_tokens, starts))
        if resident is not None or found.reach == num_tokens:
            return found
        ends = (node.end for node in match.path if found.reach < node.end < num_tokens and node.has_residents)
        num_tokens = max(ends, default=found.reach)
    return None


def _look_up(
    memory: SlotMemory, by_page: Callable[[], _ByPage], deepest: Node[Placed], num_tokens: int, starts: list[int]
) -> _Known:
    known = by_page()
    pages: list[Pages] = []
    tails: list[Placed | None] = []
    reach = num_tokens
    for index, (arena, start) in enumerate(zip(memory.arenas, starts, strict=True)):
        group = arena.group
        aliased, page = _cover(known[index], group, start, num_tokens)
        tail = None
        if page * PAGE_BYTES < num_tokens * group.row_bytes:
            tail = _holder_of(known[index], deepest, index, page, start)
            if tail is None:
                reach = min(reach, page * PAGE_BYTES // group.row_bytes)
        pages.append(aliased)
        tails.append(tail)
    return _Known(tuple(pages), tuple(tails), reach)


def uncovered(pieces: list[Piece[Placed]], match: Match[Placed]) -> list[Piece[Placed]]:
    """Without those whose rows the tree has in a larger extent already."""
    if not pieces:
        return pieces
    larger = [
        (piece.group, piece.value)
        for node in match.path
        if node.end >= pieces[0].end_token
        for piece in node.pieces
        if piece.value.extent.num_pages > 1 and piece.end_token <= match.num_tokens
    ]

    def is_covered(piece: Piece[Placed]) -> bool:
        value = piece.value
        return any(
            group == piece.group
            and placed.page <= value.page
            and value.end_page <= placed.end_page
            and placed.extent.num_pages > value.extent.num_pages
            for group, placed in larger
        )

    return [piece for piece in pieces if not is_covered(piece)] if larger else pieces


def _by_page(memory: SlotMemory, path: list[Node[Placed]]) -> _ByPage:
    known: _ByPage = [{} for _ in memory.arenas]
    for node in path:
        for piece in node.pieces:
            known[piece.group].setdefault(piece.value.page, []).append(piece)
    return known


def _cover(known: dict[int, list[Piece[Placed]]], group: Group, start: int, num_tokens: int) -> tuple[dict[int, Extent], int]:
    """A run of extents from the first needed page on, the largest first, all rows of which are matched; and where it ends."""
    page = start * group.row_bytes // PAGE_BYTES
    run: dict[int, Extent] = {}
    while usable := [
        piece.value.extent
        for piece in known.get(page, ())
        if piece.end_token <= num_tokens and piece.value.first_token <= start
    ]:
        largest = usable[0] if len(usable) == 1 else max(usable, key=lambda extent: extent.num_pages)
        run[page] = largest
        page += largest.num_pages
    return run, page


def _holder_of(
    known: dict[int, list[Piece[Placed]]], deepest: Node[Placed], index: int, page: int, start: int
) -> Placed | None:
    """Whatever holds the rows of a page that are matched: on the path, or below, where all branches have the same."""
    for first in (page, page // LARGE_PAGES * LARGE_PAGES):
        for piece in known.get(first, ()):
            if piece.value.end_page > page and piece.value.first_token <= start:
                return piece.value
    for piece in _below(deepest):
        value = piece.value
        if piece.group == index and value.page <= page < value.end_page and value.first_token <= start:
            return value
    return None


def _below(node: Node[Placed]) -> Iterator[Piece[Placed]]:
    """The pieces of one branch below a node, as far down as they can hold rows from before its end."""
    end = node.end
    while node.children:
        node = next(iter(node.children.values()))
        yield from node.pieces
        if node.pieces and node.start > end:
            return


def _resident(memory: SlotMemory, deepest: Node[Placed], starts: list[int]) -> int | None:
    if not deepest.has_residents:
        return None
    for slot in deepest.residents:
        assert isinstance(slot, int)
        if all(memory.table.starts[index, slot] <= start for index, start in enumerate(starts)):
            return slot
    return None


# -------- prefix nodes


@dataclass(eq=False, slots=True)
class Running:
    """What the tree knows of a sequence that runs."""

    namespace: Hashable
    node: Node[Placed] | None
    """Where its confirmed tokens end in the tree, locked; None for none."""
    num_tokens: int
    """Of those."""


@dataclass(eq=False, slots=True)
class Counts:
    """What came into the tree and went, and what it holds."""

    held_bytes: int = 0
    inserted_pages: int = 0
    duplicate_pages: int = 0
    evicted_pages: int = 0


class PrefixNodes:
    """The nodes of one cache, and the slots that it shares them with."""

    def __init__(self, layout: KVLayout, occupancy: Occupancy) -> None:
        self.tree: RadixTree[Placed] = RadixTree(occupancy.pool.tick)
        self.running: dict[int, Running] = {}
        """By slot."""
        self.kept: dict[int, Node[Placed]] = {}
        """Where the rows of a parked slot end in the tree, by slot."""
        self.source: int | None = None
        """The parked slot that is being copied from: it is not evicted."""
        self.counts = Counts()
        self._layout = layout
        self._windowed = {index for index, group in enumerate(layout.groups) if group.window is not None}
        self._occupancy = occupancy
        self._memory = occupancy.memory
        self._pool = occupancy.pool

    # what is known

    def known_path(self, slot: int, tokens: Tokens) -> Match[Placed]:
        """What the tree has of tokens that begin as those which were inserted for a slot. Raises: ValueError if they do not."""
        running = self.running[slot]
        match = self.tree.match(running.namespace, tokens)
        if running.node is not None and (running.node not in match.path or match.num_tokens < running.num_tokens):
            raise ValueError(f"slot {slot}: other tokens were inserted for its first {running.num_tokens} rows")
        return match

    def extend(self, slot: int, tokens: Tokens, *, is_known: bool = False) -> None:
        """Rows of a running sequence are confirmed up to the end of these tokens; `is_known`: the tree has all its extents."""
        running, num_tokens, tree, counts = self.running[slot], len(tokens), self.tree, self.counts
        match = self.known_path(slot, tokens)
        pieces = [] if is_known else self._pieces_of(slot, running.num_tokens, num_tokens)
        pieces = uncovered(pieces, match)
        inserted = tree.insert(running.namespace, tokens, pieces)
        path = inserted.node.path()
        returned = {piece.value.extent for piece in inserted.duplicates}
        for piece in pieces:
            extent = piece.value.extent
            if extent not in returned:
                self._pool.hold(extent)
                counts.held_bytes += extent.size_bytes
                counts.inserted_pages += extent.num_pages
            elif not extent.shared:
                counts.duplicate_pages += extent.num_pages
        tree.lock(inserted.node)
        if running.node is not None:
            tree.unlock(running.node)
        for node in path:
            node.residents.add(slot)
        running.node, running.num_tokens = inserted.node, num_tokens

    def _pieces_of(self, slot: int, after: int, num_tokens: int) -> list[Piece[Placed]]:
        """The extents of a slot that are shareable with `num_tokens` tokens and were not with `after`."""
        pieces = []
        for index, arena in enumerate(self._memory.arenas):
            span, group, start = arena.spans[slot], arena.group, int(self._memory.table.starts[index, slot])
            first = max(span.first_page, after * group.row_bytes // PAGE_BYTES)
            for mapping in span.live_from(span.border_before(first)):
                last = end_token(group, mapping.end_page)
                if last > num_tokens:
                    break
                if last > after:
                    first_token = start if mapping.page * PAGE_BYTES < start * group.row_bytes else 0
                    pieces.append(Piece(last, Placed(mapping.page, mapping.extent, first_token), index))
        return sorted(pieces, key=lambda piece: (piece.end_token, piece.group))

    def is_free_past(self, slot: int, num_tokens: int) -> bool:
        """Does what a parked slot has past some tokens live there alone, so that it may go?"""
        below: Node[Placed] | None = None
        for node in reversed(self.kept[slot].path()):
            if node.end <= num_tokens:
                break
            if (
                node.locks
                or node.pinned_until is not None
                or node.residents != {slot}
                or any(child is not below for child in node.children.values())
            ):
                return False
            below = node
        return True

    # what the occupancy asks of its keeper; the pool's lock is held

    def keeps(self, slot: int) -> bool:
        """Is this parked slot evicted with the tree's leaves, and not by itself?"""
        return slot in self.kept

    def is_pinned(self, slot: int) -> bool:
        """Has a parked slot rows that somebody wants to keep?"""
        node = self.kept.get(slot)
        now = time.monotonic()
        return node is not None and any((each.pinned_until or 0.0) > now for each in node.path())

    def holders(self) -> Counter[Extent]:
        """How often the tree holds each extent."""
        return Counter(piece.value.extent for node in self.tree.nodes() for piece in node.pieces)

    def idle_pages(self, enough: int) -> int:
        """Pages that evicting leaves would free at once; counted no further than `enough`."""
        num_pages = 0
        for node in self.tree.evictable():
            if num_pages >= enough or not self._is_idle(node):
                break
            # One holder is the tree; each parked slot that maps it is another, and goes with the leaf.
            num_pages += sum(
                piece.value.extent.num_pages
                for piece in node.pieces
                if piece.value.extent.holders <= 1 + len(node.residents if node.has_residents else ())
                and not piece.value.extent.users
            )
        return num_pages

    def oldest(self) -> Evictable | None:
        """The leaf that was used least recently, if any may go; else what windows have passed on the way to those that may not;
        else a parked slot that ends further up."""
        node = self.tree.oldest_evictable()
        if node is not None:
            return Evictable(node.stamp, self._is_idle(node))
        node = self._oldest_passed()
        if node is not None:
            return Evictable(node.stamp, True)
        parked = self._oldest_kept()
        return None if parked is None else Evictable(parked.stamp, parked.fence.done())

    def _oldest_kept(self) -> ParkedSlot | None:
        """A parked slot whose node is locked or pinned, or has others below: it can have pages that are its alone."""
        return next((each for slot, each in self._occupancy.parked.items() if slot in self.kept and slot != self.source), None)

    def _oldest_passed(self) -> Node[Placed] | None:
        """The node used least recently that has passed extents and is not pinned, nor on the way to one that is.

        Asked when no leaf may go: all nodes that there are then lead to running sequences, or are pinned.
        """
        if not self._windowed or not self._pool.kept_pages:
            return None
        now = time.monotonic()
        pinned = {each for node in self.tree.nodes() if (node.pinned_until or 0.0) > now for each in node.path()}
        nodes = (node for node in self.tree.nodes() if node not in pinned and self._passed(node))
        return min(nodes, key=lambda node: node.stamp, default=None)

    def _passed(self, node: Node[Placed]) -> list[Piece[Placed]]:
        """Its pieces of windowed groups that nobody has mapped. What still retires is one of them when it is unmapped."""
        return [piece for piece in node.pieces if piece.group in self._windowed and piece.value.extent.holders == 1]

    def _is_idle(self, node: Node[Placed]) -> bool:
        if not node.has_residents:
            return True
        return all(self._occupancy.parked[slot].fence.done() for slot in node.residents if slot in self.kept)

    def evict_oldest(self) -> None:
        """Drop that leaf, or that slot; parked slots that end there are cut, or given up with their last node."""
        leaf = self.tree.oldest_evictable()
        if leaf is None:
            self._evict_locked()
            return
        parent = leaf.parent
        residents = [slot for slot in leaf.residents if isinstance(slot, int)] if leaf.has_residents else []
        start = leaf.start
        self._drop(self.tree.remove(leaf))
        for slot in residents:
            assert slot in self.kept, "a leaf is evicted in which a sequence runs"
            if start and parent is not None:
                self.kept[slot] = parent
                self._occupancy.cut_parked(slot, start)
            else:
                del self.kept[slot]
                self._occupancy.evict(self._occupancy.parked[slot])
        if start and parent is not None:
            self._tidy(parent)

    def _evict_locked(self) -> None:
        node = self._oldest_passed()
        if node is not None:
            passed = self._passed(node)
            extents = {piece.value.extent for piece in passed}
            self.tree.replace(node, [piece for piece in node.pieces if piece.value.extent not in extents])
            self._drop(passed)
            return
        parked = self._oldest_kept()
        assert parked is not None, "nothing is evictable"
        self._occupancy.evict(parked)

    def clear(self) -> None:
        """Evict everything, pinned or not; no sequence runs any more."""
        for node in self.tree.nodes():
            if node.pinned_until is not None:
                self.tree.pin(node, None)
        while self.tree.oldest_evictable() is not None:
            self.evict_oldest()

    def forget(self, slot: int, num_tokens: int) -> None:
        """The rows of a slot past `num_tokens` are gone, or about to be written."""
        if slot in self.kept or slot in self.running:
            self.shorten(slot, num_tokens)

    def leave(self, slot: int) -> None:
        """Whoever had the slot does not any more, with all its rows."""
        self.forget(slot, 0)
        self.kept.pop(slot, None)
        self.running.pop(slot, None)

    def check(self) -> None:
        """The tree is whole; its residents are the slots that it knows, and hold what they should."""
        self.tree.check()
        known: dict[int, Node[Placed]] = dict(self.kept)
        known.update({slot: running.node for slot, running in self.running.items() if running.node is not None})
        residents: Counter[Hashable] = Counter()
        for node in self.tree.nodes():
            residents.update(node.residents if node.has_residents else ())
            for piece in node.pieces:
                group = self._layout.groups[piece.group]
                assert piece.end_token == end_token(group, piece.value.end_page), "a piece ends elsewhere than its extent"
        held_bytes = sum(extent.size_bytes * count for extent, count in self.holders().items())
        assert held_bytes == self.counts.held_bytes, "held bytes are miscounted"
        assert residents == Counter({slot: len(node.path()) for slot, node in known.items()}), "residents are miscounted"
        locks = Counter(running.node for running in self.running.values() if running.node is not None)
        assert all(node.locks == locks[node] for node in self.tree.nodes()), "locks are miscounted"
        assert self.kept.keys() <= self._occupancy.parked.keys(), "a kept slot is not parked"
        for slot, node in self.kept.items():
            assert self._occupancy.parked[slot].length == node.end, f"slot {slot} ends elsewhere than its node"

    # within

    def shorten(self, slot: int, num_tokens: int, *, discard: bool = False) -> None:
        """A slot is no resident past `num_tokens`; with `discard` the nodes past it go, which are its alone."""
        running = self.running.get(slot)
        last = running.node if running is not None else self.kept[slot]
        if last is None or last.end <= num_tokens:
            return
        left = [node for node in reversed(last.path()) if node.end > num_tokens]
        top = left[-1]
        if top.start < num_tokens:
            stays: Node[Placed] | None = self.tree.split(top, num_tokens)
        else:
            stays = top.parent if num_tokens else None
        for node in left:
            node.residents.discard(slot)
        if running is not None:
            self._relock(running, last, stays)
        elif stays is not None:
            self.kept[slot] = stays
        for node in left:
            if discard:
                self._drop(self.tree.remove(node))
            else:
                self._tidy(node)

    def _relock(self, running: Running, old: Node[Placed], new: Node[Placed] | None) -> None:
        if new is not None:
            self.tree.lock(new)
        self.tree.unlock(old)
        running.node = new
        running.num_tokens = new.end if new is not None else 0

    def _tidy(self, node: Node[Placed]) -> None:
        """A leaf whose rows no slot has keeps no more tokens than its extents; nothing, if it has none. And so its parent."""
        while node.parent is not None and node.is_leaf and not node.locks and not node.has_residents:
            parent = node.parent
            last = max((piece.end_token for piece in node.pieces), default=node.start)
            if last > node.start:
                if last < node.end:
                    self._drop(self.tree.trim(node, last))
                return
            self._drop(self.tree.remove(node))
            node = parent

    def _drop(self, pieces: list[Piece[Placed]]) -> None:
        for piece in pieces:
            self.counts.evicted_pages += piece.value.extent.num_pages
            self.counts.held_bytes -= piece.value.extent.size_bytes
            self._pool.drop(piece.value.extent)
