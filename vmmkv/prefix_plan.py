"""What of a match can be attached, and from where: extents to alias, bytes to copy, slots to adopt.

    rows      0 .............................. m | m + 1 ...       m tokens are matched
    extents   |  a  |  a  |  a  |     t     |                      a: all its rows are matched, and it is aliased
                                ^ copied ^  m * row_bytes          t: it holds the rest, which is copied from it

An extent under bytes [a, b) of a slot is usable by whoever matches `ceil(b / row_bytes)` tokens: its piece's `end_token`. Rows
straddle pages, so the rest is seldom empty. It is copied from a slot that has the rows (a *resident*), or from the extent that
holds them, which the tree may have without any slot; if neither is there, fewer tokens are attached.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

from vmmkv.extents import LARGE_PAGES, Extent
from vmmkv.layout import Group, KVLayout
from vmmkv.memory import SlotMemory
from vmmkv.radix import Match, Node, Piece
from vmmkv.sharing import Pages
from vmmkv.units import PAGE_BYTES, ceil_div


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
