"""The index of a prefix cache: a tree of nodes that hold extents, and the slots that have their rows.

    running    a sequence that was attached: its confirmed tokens end at a node, which is locked
    parked_at  where the rows of a parked slot end; the slot is evicted leaf by leaf with the tree
    resident   of a node: a slot, running or parked, that has all rows of the path up to the node's end
    passed     extents of windowed groups that no slot maps any more: they can be evicted though their node cannot

The caller holds the pool's lock.
"""

import functools
import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Iterator
from typing import Final, NamedTuple

from vmmkv.driver.base import Fence
from vmmkv.layout import Group
from vmmkv.memory.extents import Extent
from vmmkv.memory.pool import Evictable, Reclaimer
from vmmkv.memory.slots import LiveSlot, ParkedSlot, RowKeeper, Slots
from vmmkv.prefix.radix_tree import Match, Node, Piece, RadixTree, Tokens, piece_place
from vmmkv.units import PAGE_BYTES, ceil_div

MOST_LOOKED_AT: Final = 64
"""Nodes and residents of a node among which one is looked for that has some rows. A system prompt can have thousands."""


class Placed(NamedTuple):
    """An extent that the tree holds, and the page of a slot under which it stands. Its piece names the group."""

    page: int
    extent: Extent
    first_token: int = 0
    """The rows before it are missing: the slot that the extent comes from began within it, for its window needed no more."""

    @property
    def end_page(self) -> int:
        """The page behind the last one."""
        return self.page + self.extent.num_pages

    def has(self, page: int, first_row: int) -> bool:
        """Has the extent this page of the slot, and the row `first_row` if that is on its first pages?"""
        return self.page <= page < self.end_page and self.first_token <= first_row


def end_token(group: Group, end_page: int) -> int:
    """Number of tokens that must match so that pages up to there can be shared."""
    return ceil_div(end_page * PAGE_BYTES, group.row_bytes)


class IndexFollower:
    """Observer of a prefix tree that copies or seals its extents. Methods do nothing unless overridden."""

    waits_for_writes = False
    """Does the follower want the fence behind the work that wrote what is added?"""

    def added(self, namespace: Hashable, tokens: Tokens, pieces: list[Piece[Placed]], written: Fence | None) -> None:
        """The tree holds these extents on the path of these tokens; they are written once `written` has passed, or already."""

    def extended(self, namespace: Hashable, tokens: Tokens, slot: int, extents: list[Extent]) -> None:
        """The rows of the sequence in a slot are confirmed up to the end of these tokens, with new extents."""

    def dropped(self, extent: Extent) -> None:
        """The tree is about to let go of an extent. It may be written when this returns."""

    def left(self, slot: int) -> None:
        """The sequence in a slot has ended."""

    def look(self) -> None:
        """Go on with what waits for a fence that has passed. Never blocks."""

    def unwritten(self) -> Fence | None:
        """The fence that this waits for longest, to seal what is behind it; None for none."""
        return None

    def held(self) -> Counter[Extent]:
        """The extents that it holds and uses beside the tree."""
        return Counter()

    def locks(self) -> Counter[Node[Placed]]:
        """Locks that the follower holds, counted by node."""
        return Counter()

    def give_up(self) -> list[Fence]:
        """Give up all copies, before everything is evicted. Returns the fences of those under way; then `finish` is called."""
        return []

    def finish(self) -> None:
        """Give back the memory behind copies that have ended."""

    def check(self) -> None:
        """Recount; AssertionError says what is broken."""


class PrefixIndex(RowKeeper, Reclaimer):
    """The prefix tree of one cache, and the slots that share its extents. The slots ask it what to evict."""

    def __init__(self, slots: Slots) -> None:
        self.tree: RadixTree[Placed] = RadixTree(slots.pool.tick)
        self.running: dict[int, Node[Placed] | None] = {}
        """Node at which the confirmed tokens of a running sequence end, by slot; it is locked. None for no tokens."""
        self.parked_at: dict[int, Node[Placed]] = {}
        """Node at which the rows of a parked slot end, by slot."""
        self.followers: list[IndexFollower] = []
        """Transfers to tiers, and what outlives this process."""
        self.restored: list[Node[Placed]] = []
        """Leaves that an earlier process left, the last used ones last, until `RestoredPrefixes` has parked them."""
        self.source: int | None = None
        """The parked slot that rows are being copied from: it is not evicted."""
        self.held_bytes = 0
        self.inserted_pages = 0
        self.duplicate_pages = 0
        self.evicted_pages = 0
        self._layout = slots.layout
        self._windowed = {index for index, group in enumerate(slots.layout.groups) if group.window is not None}
        self._slots = slots
        self._memory = slots.memory
        self._pool = slots.pool

    # what is known

    def num_inserted(self, slot: int) -> int:
        """Number of a running sequence's tokens that are in the tree."""
        node = self.running[slot]
        return 0 if node is None else node.end

    def known_path(self, slot: int, tokens: Tokens) -> Match[Placed]:
        """The match of tokens that begin with those inserted for a slot. Raises: ValueError if they do not."""
        node = self.running[slot]
        match = self.tree.match(self._memory.tenants[slot], tokens)
        if node is not None and (node not in match.path or match.num_tokens < node.end):
            raise ValueError(f"slot {slot}: other tokens were inserted for its first {node.end} rows")
        return match

    def extend(self, slot: int, tokens: Tokens, *, is_known: bool = False, is_written: bool = False) -> None:
        """Rows of a running sequence are confirmed up to the end of these tokens.

        `is_known`: the tree has all its extents; `is_written`: the device has ended the work that wrote these rows.
        """
        match = self.known_path(slot, tokens)
        pieces = [] if is_known else _uncovered(self._pieces_of(slot, self.num_inserted(slot), len(tokens)), match)
        wants_fence = pieces and not is_written and any(follower.waits_for_writes for follower in self.followers)
        written = self._memory.fence() if wants_fence else None
        end = self.add(self._memory.tenants[slot], tokens, pieces, written)
        for node in end.path():
            node.add_resident(slot)
        self._move_lock(slot, end)
        for follower in self.followers if pieces else ():
            follower.extended(self._memory.tenants[slot], tokens, slot, [piece.value.extent for piece in pieces])

    def add(
        self, namespace: Hashable, tokens: Tokens, pieces: list[Piece[Placed]], written: Fence | None = None
    ) -> Node[Placed]:
        """Hold extents for some tokens, but those whose place is taken by one with as many rows; the node where the tokens end.

        They are sealed once `written` has passed; None: they are written.
        """
        inserted = self.tree.insert(namespace, tokens, pieces)
        duplicates = [self._with_fewer_rows(piece, inserted.node) for piece in inserted.duplicates]
        returned = {piece.value.extent for piece in duplicates}
        for piece in pieces:
            extent = piece.value.extent
            if extent not in returned:
                self._pool.hold(extent)
                self.held_bytes += extent.size_bytes
                self.inserted_pages += extent.num_pages
            elif not extent.shared:
                self.duplicate_pages += extent.num_pages
        self._drop([held for piece, held in zip(inserted.duplicates, duplicates, strict=True) if held is not piece])
        for follower in self.followers if pieces else ():
            follower.added(namespace, tokens, [piece for piece in pieces if piece.value.extent not in returned], written)
        for node in inserted.node.path() if pieces else ():
            self._keep_last_rows(node)
        return inserted.node

    def _with_fewer_rows(self, piece: Piece[Placed], node: Node[Placed]) -> Piece[Placed]:
        """The piece with fewer rows: this one or that in its place on the path to a node. The tree then holds the other."""
        while piece.end_token <= node.start:
            node = node.parent or node
        held = node.pieces[bisect_left(node.pieces, piece_place(piece), key=piece_place)]
        if piece.value.extent is held.value.extent or piece.value.first_token >= held.value.first_token:
            return piece
        self.tree.replace(node, [piece if each is held else each for each in node.pieces])
        return held

    def _pieces_of(self, slot: int, after: int, num_tokens: int) -> list[Piece[Placed]]:
        """The extents of a slot that can be shared with `num_tokens` tokens and could not with `after`."""
        pieces = []
        for index, arena in enumerate(self._memory.arenas):
            span, group, first_row = arena.spans[slot], arena.group, int(self._memory.table.firsts[index, slot])
            first = max(span.first_page, group.page_of(after))
            for mapping in span.live_from(span.border_before(first)):
                last = end_token(group, mapping.end_page)
                if last > num_tokens:
                    break
                if last > after:
                    first_token = first_row if mapping.page * PAGE_BYTES < first_row * group.row_bytes else 0
                    pieces.append(Piece(last, Placed(mapping.page, mapping.extent, first_token), index))
        return sorted(pieces, key=piece_place)

    # what outlives the process

    def import_extents(self, extents: Iterable[Extent]) -> bool:
        """Import what an earlier process left, so that it can be mapped. False if rows were lost; then they are in no tree.

        Cost, errors: as `Pool.import_extents`.
        """
        lost = self._pool.import_extents(list(extents))
        if lost:
            self._discard(lost)
        return not lost

    def _discard(self, lost: Container[Extent]) -> None:
        """Remove extents that no slot has and whose rows are gone."""
        for node in list(self.tree.nodes()):
            gone = [piece for piece in node.pieces if piece.value.extent in lost]
            if gone:
                self.tree.replace(node, [piece for piece in node.pieces if piece.value.extent not in lost])
                self._drop(gone)
                self._tidy(node)
        for pin in self.tree.pins():
            self._keep_last_rows(pin.node)

    def is_free_past(self, slot: int, num_tokens: int) -> bool:
        """Is a parked slot the only user of its rows past some tokens, so that they may be overwritten?"""
        below: Node[Placed] | None = None
        for node in reversed(self.parked_at[slot].path()):
            if node.end <= num_tokens:
                break
            if (
                node.locks
                or self.tree.is_pinned(node)
                or len(node.residents) > 1
                or any(child is not below for child in node.children.values())
            ):
                return False
            below = node
        return True

    # pins

    def pin(self, namespace: Hashable, tokens: Tokens, until: float) -> int:
        """Keep the known prefix of some tokens, and the extents that have its last rows; its length. See RadixTree.pin."""
        node = self.tree.pin(namespace, tokens, until)
        if node is None:
            return 0
        self._keep_last_rows(node)
        return node.end

    def _keep_last_rows(self, node: Node[Placed]) -> None:
        """Let pins of tokens that end at a node keep the extents, too, that the last of these rows share with nodes below.

        One of each group is kept.
        """
        pins = self.tree.pins_ending_at(node)
        for index, page, first_row in self._last_pages_below(node) if pins else ():
            having = [each for each in pieces_below(node, index) if each[1].value.has(page, first_row)]
            if having:
                below, piece = max(having, key=lambda each: len(each[0].pins & pins))
                if piece.end_token < below.end:
                    below = self.tree.split(below, piece.end_token)
                self.tree.keep(below, pins)

    def _last_pages_below(self, node: Node[Placed]) -> Iterator[tuple[int, int, int]]:
        """Groups whose last rows before the end of a node are in no extent of its path: the page, and the first row needed."""
        path = node.path()
        for index, group in enumerate(self._layout.groups):
            first_row = self._layout.start_for(group, node.end)
            ends = (piece.value.end_page for each in path for piece in each.pieces if piece.group == index)
            page = max(ends, default=group.page_of(first_row))
            if page * PAGE_BYTES < node.end * group.row_bytes:
                yield index, page, first_row

    def _check_pins(self) -> None:
        """An extent below that has the last rows of pinned tokens is kept."""
        for pin in self.tree.pins():
            for index, page, first_row in self._last_pages_below(pin.node):
                if any(piece.value.has(page, first_row) for _, piece in pieces_below(pin.node, index)):
                    pieces = (piece for node in pin.nodes for piece in node.pieces if piece.group == index)
                    assert any(piece.value.has(page, first_row) for piece in pieces), f"{pin.node}: its last rows can go"

    def _pinned(self) -> set[Node[Placed]]:
        """Nodes that pins keep, and those on the way to them. Cost: grows with what is pinned."""
        return _with_ancestors(node for pin in self.tree.pins() for node in pin.nodes)

    def pinned_extents(self) -> set[Extent]:
        """Unused extents that pins keep. Cost: grows with what is pinned."""
        return {piece.value.extent for node in self._pinned() for piece in node.pieces if not piece.value.extent.users}

    # what the slots ask

    def poll(self) -> None:
        """Seal what waits for a fence that has passed. Never blocks."""
        for follower in self.followers:
            follower.look()

    def unsealed(self) -> Fence | None:
        """The fence that what was inserted first waits for, to be sealed; None if all is sealed that can be."""
        return next(filter(None, (follower.unwritten() for follower in self.followers)), None)

    def has(self, slot: int) -> bool:
        """Is a parked slot evicted with the tree?"""
        return slot in self.parked_at

    def is_pinned(self, slot: int) -> bool:
        """Has a parked slot pinned rows?"""
        node = self.parked_at.get(slot)
        return node is not None and any(map(self.tree.is_pinned, node.path()))

    def holders(self) -> Counter[Extent]:
        """Recounted: how often the tree holds each extent, or a load into it."""
        return Counter(piece.value.extent for node in self.tree.nodes() for piece in node.pieces) + self.users()

    def used_pages(self, namespace: Hashable, tokens: Tokens) -> int:
        """Pages in use that a sequence of these tokens needs too: it maps them without taking any."""
        match = self.tree.match(namespace, tokens)
        firsts = [group.page_of(self._layout.start_for(group, len(tokens))) for group in self._layout.groups]
        return sum(
            piece.value.extent.num_pages
            for node in match.path
            for piece in node.pieces
            if piece.value.extent.users and piece.end_token <= match.num_tokens and piece.value.end_page > firsts[piece.group]
        )

    def users(self) -> Counter[Extent]:
        """The extents that tiers are being loaded into, which are used."""
        return sum((follower.held() for follower in self.followers), Counter[Extent]())

    def unevictable_bytes(self) -> int:
        """Bytes of unused extents that no pressure can evict: those on the way to locked and pinned nodes. Walks the tree."""
        locked = _with_ancestors(node for node in self.tree.nodes() if node.locks)
        pieces = (piece for node in locked for piece in node.pieces if piece.group not in self._windowed)
        extents = self.pinned_extents().union(piece.value.extent for piece in pieces if not piece.value.extent.users)
        return sum(extent.size_bytes for extent in extents)

    def idle_pages(self, enough: int) -> int:
        """Pages that evicting leaves would free at once; counted no further than `enough`."""
        num_pages = 0
        for node in self.tree.eviction.each():
            if num_pages >= enough or not self._is_idle(node):
                break
            # One holder is the tree; each parked slot that maps it is another, and goes with the leaf.
            num_pages += sum(
                piece.value.extent.num_pages
                for piece in node.pieces
                if piece.value.extent.holders <= 1 + len(node.residents) and not piece.value.extent.users
            )
        return num_pages

    def oldest_evictable(self) -> Evictable | None:
        """The least recently used leaf, with the rows in it of parked slots.

        If no leaf can be evicted: what a window has passed on the way to one; else a parked slot that ends further up.
        """
        if (leaf := self.tree.eviction.oldest()) is not None:
            return Evictable(leaf.stamp, self._is_idle(leaf), functools.partial(self.evict_leaf, leaf))
        if (node := self._oldest_passed()) is not None:
            return Evictable(node.stamp, True, functools.partial(self._evict_passed, node))
        if (parked := self._oldest_parked()) is not None:
            return Evictable(parked.stamp, parked.fence.done(), functools.partial(self._slots.evict, parked))
        return None

    def evict_leaf(self, leaf: Node[Placed]) -> None:
        """Remove a leaf; parked slots that have its rows are cut where it began."""
        parent, start = leaf.parent, leaf.start
        self._remove(leaf)
        for slot in leaf.residents:
            assert slot in self.parked_at, "a leaf is evicted in which a sequence runs"
            if start and parent is not None:
                self.parked_at[slot] = parent
                self._slots.cut(slot, start)
            else:
                del self.parked_at[slot]
                self._slots.evict(self._slots.parked_slots[slot])
        if start and parent is not None:
            self._tidy(parent)

    def _evict_passed(self, node: Node[Placed]) -> None:
        passed = self._passed(node)
        self.tree.replace(node, [piece for piece in node.pieces if piece not in passed])
        self._drop(passed)

    def _oldest_parked(self) -> ParkedSlot | None:
        """A parked slot whose node is locked, pinned or no leaf: pages may be its alone. Pinned ones come last."""
        parked_slots = self._slots.parked_slots.items()
        kept, again = itertools.tee(each for slot, each in parked_slots if slot in self.parked_at and slot != self.source)
        return next(self._slots.unpinned(kept), next(again, None))

    def _oldest_passed(self) -> Node[Placed] | None:
        """The least recently used node with passed extents that is not on the way to a pinned one.

        Called when no leaf can be evicted: then all nodes lead to running sequences, or are pinned.
        """
        if not self._windowed or not self._pool.kept_pages:
            return None
        pinned = self._pinned()
        nodes = (node for node in self.tree.nodes() if node not in pinned and self._passed(node))
        return min(nodes, key=lambda node: node.stamp, default=None)

    def _passed(self, node: Node[Placed]) -> list[Piece[Placed]]:
        """Pieces of windowed groups whose extent only the tree holds: no mapping is live or pending reclaim."""
        return [piece for piece in node.pieces if piece.group in self._windowed and piece.value.extent.holders == 1]

    def _is_idle(self, node: Node[Placed]) -> bool:
        return all(self._slots.parked_slots[slot].fence.done() for slot in node.residents if slot in self.parked_at)

    def clear(self) -> list[Fence]:
        """Evict everything, pinned or not, and give up stores and loads; no sequence runs. A holder keeps what is sealed.

        The fences of the copies to and from tiers: when they have passed call `close`.
        """
        fences = [fence for follower in list(self.followers) for fence in follower.give_up()]
        self.tree.unpin_all()
        while (leaf := self.tree.eviction.oldest()) is not None:
            self.evict_leaf(leaf)
        return fences

    def close(self) -> None:
        """Give back the memory of tiers behind copies that have ended."""
        for follower in self.followers:
            follower.finish()
        self._pool.reclaimers.remove(self)

    def park(self, live: LiveSlot) -> ParkedSlot:
        """End a running sequence and keep its slot, with the rows that were inserted. There are some."""
        slot, node = live.slot, self.running.pop(live.slot)  # else parking would take its rows for gone
        assert node is not None, "nothing was inserted"
        try:
            parked = self._slots.park(live, node.end)
        except BaseException:
            self.running[slot] = node
            raise
        self.tree.unlock(node)
        self.keep(slot, node)
        return parked

    def park_pinned(self, live: LiveSlot) -> bool:
        """Park a running sequence with the pinned rows that no other slot has; False, and it runs, if there are none."""
        slot, last = live.slot, self.running.get(live.slot)
        nodes = () if last is None else reversed(last.path())
        kept = next((node for node in nodes if self._keeps(slot, node, node.residents)), None)
        if kept is None:
            return False
        parked = self.park(live)
        parked.positions = None  # rows that a compaction has moved are behind those inserted
        self.shorten(slot, kept.end)
        self._slots.cut(slot, kept.end)
        return True

    def keeps_pinned(self, slot: int) -> bool:
        """Has a parked slot pinned rows that no other parked slot has?"""
        path = self.parked_at[slot].path()
        return any(self._keeps(slot, node, filter(self.parked_at.__contains__, node.residents)) for node in path)

    def _keeps(self, slot: int, node: Node[Placed], residents: Iterable[int]) -> bool:
        """Is a node pinned, and this the only one of these residents that has the rows which a prompt behind it sees?"""
        if not self.tree.is_pinned(node):
            return False
        starts = [self._layout.start_for(group, node.end) for group in self._layout.groups]
        having = (each for each in residents if (self._memory.table.starts[:, each] <= starts).all())
        return next(having, None) == slot and next(having, None) is None

    def keep(self, slot: int, node: Node[Placed]) -> None:
        """A parked slot's rows end at a node: it is evicted with the tree's leaves, not by itself."""
        self.parked_at[slot] = node
        del self._slots.loose_slots[slot]

    def forget(self, slot: int, num_tokens: int) -> None:
        """The rows of a slot past `num_tokens` are gone, or about to be written."""
        if slot in self.parked_at or slot in self.running:
            self.shorten(slot, num_tokens)

    def leave(self, slot: int) -> None:
        """A slot's sequence has ended, or its parked rows are gone."""
        self.forget(slot, 0)
        self.parked_at.pop(slot, None)
        self.running.pop(slot, None)
        for follower in self.followers:
            follower.left(slot)

    def check(self) -> None:
        """Recount everything; AssertionError says what is broken."""
        self.tree.check()
        running = {slot: node for slot, node in self.running.items() if node is not None}
        known = self.parked_at | running
        residents: Counter[int] = Counter()
        for node in self.tree.nodes():
            residents.update(node.residents.keys())
            for piece in node.pieces:
                group = self._layout.groups[piece.group]
                assert piece.end_token == end_token(group, piece.value.end_page), "a piece ends elsewhere than its extent"
        held_bytes = sum(extent.size_bytes * count for extent, count in (self.holders() - self.users()).items())
        assert held_bytes == self.held_bytes, "held bytes are miscounted"
        assert residents == Counter({slot: len(node.path()) for slot, node in known.items()}), "residents are miscounted"
        locks = sum((follower.locks() for follower in self.followers), Counter(running.values()))
        assert all(node.locks == locks[node] for node in self.tree.nodes()), "locks are miscounted"
        assert self.parked_at.keys() <= self._slots.parked_slots.keys(), "a slot of the tree is not parked"
        for slot, node in self.parked_at.items():
            assert self._slots.parked_slots[slot].length == node.end, f"slot {slot} ends elsewhere than its node"
        self._check_pins()
        for follower in self.followers:
            follower.check()

    # within

    def shorten(self, slot: int, num_tokens: int, *, discard: bool = False) -> None:
        """A slot is no resident past `num_tokens`; with `discard` the nodes past it, which are its alone, are removed."""
        last = self.running[slot] if slot in self.running else self.parked_at[slot]
        if last is None or last.end <= num_tokens:
            return
        left = [node for node in reversed(last.path()) if node.end > num_tokens]
        top = left[-1]
        if top.start < num_tokens:
            stays: Node[Placed] | None = self.tree.split(top, num_tokens)
        else:
            stays = top.parent if num_tokens else None
        for node in left:
            node.remove_resident(slot)
        if slot in self.running:
            self._move_lock(slot, stays)
        elif stays is not None:
            self.parked_at[slot] = stays
        for node in left:
            if discard:
                self._remove(node)
            else:
                self._tidy(node)

    def _move_lock(self, slot: int, node: Node[Placed] | None) -> None:
        if node is not None:
            self.tree.lock(node)
        if (before := self.running[slot]) is not None:
            self.tree.unlock(before)
        self.running[slot] = node

    def _tidy(self, node: Node[Placed]) -> None:
        """Cut a leaf without residents back to where its extents end, remove it if it has none, and go on with its parent."""
        while node.parent is not None and node.is_leaf and not node.locks and not node.residents:
            last = node.pieces[-1].end_token if node.pieces else node.start
            if last == node.end:
                return
            if last > node.start:
                self.tree.split(node, last)
            parent = node.parent
            self._remove(node)
            node = parent

    def _remove(self, leaf: Node[Placed]) -> None:
        """Remove a leaf from the tree, and drop its extents. Its pins keep what its parent has."""
        parent = leaf.parent
        assert parent is not None, "a leaf is in the tree"
        self._drop(self.tree.remove(leaf))
        self._keep_last_rows(parent)

    def _drop(self, pieces: list[Piece[Placed]]) -> None:
        for piece in pieces:
            self.evicted_pages += piece.value.extent.num_pages
            self.held_bytes -= piece.value.extent.size_bytes
            for follower in self.followers:
                follower.dropped(piece.value.extent)
            self._pool.drop(piece.value.extent)


def pieces_below(node: Node[Placed], group: int) -> Iterator[tuple[Node[Placed], Piece[Placed]]]:
    """The pieces below a node that can hold rows from before its end, each with its node; of `MOST_LOOKED_AT` nodes at most."""
    end, rest = node.end, [*itertools.islice(node.children.values(), MOST_LOOKED_AT)]
    for _ in range(MOST_LOOKED_AT):
        if not rest:
            return
        node = rest.pop()
        yield from ((node, piece) for piece in node.pieces if piece.group == group)
        if not (node.pieces and node.start > end):
            rest += itertools.islice(node.children.values(), MOST_LOOKED_AT)


def _with_ancestors(nodes: Iterable[Node[Placed]]) -> set[Node[Placed]]:
    found: set[Node[Placed]] = set()
    for node in nodes:
        above: Node[Placed] | None = node
        while above is not None and above.parent is not None and above not in found:
            found.add(above)
            above = above.parent
    return found


def _uncovered(pieces: list[Piece[Placed]], match: Match[Placed]) -> list[Piece[Placed]]:
    """Pieces without those whose rows the tree has in a larger extent already."""
    larger = [
        (piece.group, piece.value)
        for node in match.path
        if pieces and node.end >= pieces[0].end_token
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
