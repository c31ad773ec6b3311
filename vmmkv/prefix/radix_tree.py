"""A radix tree over token ids: which prefixes are known, what is held for them, and what goes first.

The idea is RadixAttention's (SGLang), but a node holds *pieces*: whatever the owner keeps for a run of tokens, each usable by
whoever matches up to its last token. The tree knows nothing of memory. Token ids are compared, never only hashed, and paths
of two namespaces never meet.

    namespace "red":    root --[sys prompt]--+--[question 1][answer 1]--[question 2] ...
                                             +--[question 3] ...

Costs do not depend on the number of nodes, but for the logarithm of the heap of leaves. One thread at a time.
"""

import itertools
import math
import sys
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from operator import itemgetter, lt
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

# -------- radix node
# What a radix tree over token ids is made of: nodes, the pieces that they hold, and token ids packed as bytes.
#
#     tokens        a b c d e f g h            pieces       end_token 4, 8 and 10 of the path a..j
#                   ^       ^       ^
#     node          |start  |       |end       [start, end) of the path: the edge is what the parent's lacks
#     its parent  --|end    |
#     its pieces            4       8          start < end_token <= end, so that whoever matches 4 tokens may use the first
#
# An edge is four bytes a token in one `bytes`: compared by memcmp and in place, 33 bytes of overhead, and read-only. A split
# copies both halves instead of sharing one buffer: a node that outlives the rest of its path then keeps no more than its own.

T = TypeVar("T")

Tokens: TypeAlias = Sequence[int] | npt.NDArray[Any]
"""Token ids in [0, 2**31): a list, a tuple, or an array of integers of one dimension. An int32 array is packed fastest."""

TOKEN_BYTES: Final = 4


class Piece(NamedTuple, Generic[T]):
    """What a node holds of the memory under its tokens."""

    end_token: int
    """Usable by whoever matches at least so many tokens of the path."""
    value: T
    """An extent and where it stands, a block of a block table, ..."""
    group: int = 0
    """Pieces of different groups may end at one token; of one group, one piece does."""


piece_place = itemgetter(0, 2)
"""What tells pieces of one path apart, and their order: end_token, then group."""

_end_token = itemgetter(0)


class Node(Generic[T]):
    """An edge and what hangs at its end. `RadixTree` alone changes it, but for `residents`, which are its owner's."""

    __slots__ = (
        "_residents",
        "below",
        "edge",
        "end",
        "locks",
        "num_hits",
        "parent",
        "pieces",
        "pinned_until",
        "queue",
        "stamp",
        "start",
    )

    def __init__(self, parent: "Node[T] | None", edge: bytes, start: int, stamp: int) -> None:
        self.edge = edge
        """The packed token ids."""
        self.start = start
        """Tokens of the path before the edge."""
        self.end = start + len(edge) // TOKEN_BYTES
        """Tokens of the path up to and with the edge."""
        self.parent = parent
        """None for the root of a namespace, and for a node that was removed."""
        self.below: dict[int, Node[T]] | Node[T] | None = None
        """The children by the first token of their edge; or the only child, for a dictionary takes 232 bytes; or None."""
        self.pieces: tuple[Piece[T], ...] = ()
        """In order of `piece_place`; start < end_token <= end."""
        self.locks = 0
        """Running sequences that use the path up to here. Above 0, it is not evicted; nor is an ancestor, for it is no leaf."""
        self.num_hits = 0
        """How often somebody ended here who had these tokens from here: for the owner to count."""
        self.stamp = stamp
        """When it was last used itself, or a descendant that has been removed since; of a leaf, when it was last used."""
        self.pinned_until: float | None = None
        """Seconds of the tree's `now` until which it is not evicted; inf for ever, None for not pinned."""
        self.queue = 0
        """Where `EvictionOrder` has it."""
        self._residents: set[Hashable] | None = None

    def __repr__(self) -> str:
        state = f", {self.locks} locks" * (self.locks > 0) + f", pinned until {self.pinned_until}" * bool(self.pinned_until)
        return f"<Node [{self.start}, {self.end}), {self.num_children} children, {len(self.pieces)} pieces{state}>"

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The token ids of the edge, read-only: `end - start` of them."""
        return np.frombuffer(self.edge, dtype=np.int32)

    @property
    def residents(self) -> set[Hashable]:
        """The slots whose rows hold this whole path up to `end`; the set is made when it is first asked for (216 bytes)."""
        if self._residents is None:
            self._residents = set()
        return self._residents

    @property
    def has_residents(self) -> bool:
        """Is there any? Makes no set."""
        return bool(self._residents)

    @property
    def is_leaf(self) -> bool:
        """Has it no children?"""
        return self.below is None

    @property
    def num_children(self) -> int:
        """How many nodes go on from its end."""
        below = self.below
        return 0 if below is None else 1 if isinstance(below, Node) else len(below)

    @property
    def children(self) -> Mapping[int, "Node[T]"]:
        """By the first token of their edge. O(1), and made for the occasion if there is none or one: ask `is_leaf` instead."""
        below = self.below
        return {} if below is None else {below.first_token: below} if isinstance(below, Node) else below

    @property
    def first_token(self) -> int:
        """Of the edge."""
        return int.from_bytes(self.edge[:TOKEN_BYTES], sys.byteorder)

    def path(self) -> list["Node[T]"]:
        """All nodes from below the root down to this one."""
        path: list[Node[T]] = []
        node = self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    def adopt(self, child: "Node[T]") -> None:
        """A node becomes a child, instead of the one with its first token if there is one."""
        child.parent = self
        token, below = child.first_token, self.below
        if isinstance(below, dict):
            below[token] = child
        elif below is None or below.first_token == token:
            self.below = child
        else:
            self.below = {below.first_token: below, token: child}

    def disown(self, child: "Node[T]") -> None:
        """A child is none any more."""
        child.parent = None
        if isinstance(self.below, dict):
            del self.below[child.first_token]
            if len(self.below) == 1:
                (self.below,) = self.below.values()
        else:
            self.below = None

    def cut(self, num_tokens: int) -> tuple[bytes, tuple[Piece[T], ...]]:
        """What the edge and the pieces have past `num_tokens` of the path goes from them and is returned."""
        at = (num_tokens - self.start) * TOKEN_BYTES
        num_pieces = bisect_right(self.pieces, num_tokens, key=_end_token)
        edge, pieces = self.edge[at:], self.pieces[num_pieces:]
        self.edge, self.pieces, self.end = self.edge[:at], self.pieces[:num_pieces], num_tokens
        return edge, pieces

    def split(self, num_tokens: int) -> "Node[T]":
        """Put a new node before this one for `[start, num_tokens)`, and return it. See `RadixTree.split`."""
        assert self.parent is not None
        upper: Node[T] = Node(self.parent, self.edge, self.start, self.stamp)
        upper.pieces = self.pieces
        self.parent.adopt(upper)  # while this node's first token still says in whose place
        self.edge, self.pieces = upper.cut(num_tokens)
        self.start = num_tokens
        upper.adopt(self)
        if self._residents:
            upper._residents = self._residents.copy()
        return upper

    def take(self, pieces: Sequence[Piece[T]]) -> list[Piece[T]]:
        """Add pieces, in order and within the edge; return those for whose place it has one already."""
        if not self.pieces or self.pieces[-1].end_token < pieces[0].end_token:
            self.pieces = (*self.pieces, *pieces)
            return []
        taken = set(map(piece_place, self.pieces))
        new = [piece for piece in pieces if piece_place(piece) not in taken]
        if not new:
            return list(pieces)
        self.pieces = tuple(sorted((*self.pieces, *new), key=piece_place))
        return [piece for piece in pieces if piece_place(piece) in taken]


class Root(Node[T]):
    """Of a namespace: no tokens, no pieces, and never alone."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(None, b"", 0, 0)
        self.namespace = namespace


class Match(NamedTuple, Generic[T]):
    """The longest known prefix of some tokens. Good until the tree changes."""

    path: list[Node[T]]
    """From below the root; all but the last are matched to their end."""
    num_tokens: int

    @property
    def deepest(self) -> Node[T] | None:
        """The last node of which a token is matched; None if none is."""
        return self.path[-1] if self.path else None

    @property
    def part(self) -> int:
        """Tokens of the deepest node's edge that are matched: from 1 to all of them; 0 if there is no such node."""
        return self.num_tokens - self.path[-1].start if self.path else 0

    @property
    def is_whole(self) -> bool:
        """Does the match end where a node does?"""
        return not self.path or self.num_tokens == self.path[-1].end


class Inserted(NamedTuple, Generic[T]):
    """What `RadixTree.insert` did."""

    node: Node[T]
    """It ends where the tokens do."""
    duplicates: list[Piece[T]]
    """The pieces that were not taken, since the path had one in their place: still the caller's."""


def pack(tokens: Tokens) -> bytes:
    """Token ids as the machine's int32, one behind the other. Raises ValueError for what is no token id."""
    try:
        ids = tokens if isinstance(tokens, np.ndarray) else np.asarray(array("i", tokens))
    except (OverflowError, TypeError) as error:
        raise ValueError(f"tokens: {error}; wanted integers in [0, 2**31)") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"tokens: an array {ids.shape} of {ids.dtype}; wanted one dimension of integers")
    # To look at an element is a quarter of the time that `min` takes for a short prompt.
    if len(ids) and (ids[ids.argmin()] < 0 or (ids.dtype != np.int32 and ids[ids.argmax()] >= 2**31)):
        raise ValueError(f"tokens: from {ids.min()} to {ids.max()}; wanted integers in [0, 2**31)")
    return ids.astype(np.int32, copy=False).tobytes()


def num_common(packed: bytes, at: int, edge: bytes) -> int:
    """How many tokens of an edge are those of `packed` from its token number `at` on, of which there is one at least."""
    num_tokens = min(len(packed) - at * TOKEN_BYTES, len(edge)) // TOKEN_BYTES
    differs = np.frombuffer(packed, np.int32, num_tokens, at * TOKEN_BYTES) != np.frombuffer(edge, np.int32, num_tokens)
    first = int(differs.argmax())
    return first if differs[first] else num_tokens


# -------- radix order
# In which order the leaves of a radix tree are evicted: least recently used first, none that is locked or pinned.
#
# Two heaps, and every leaf without locks has an entry in one of them:
#
#     recency     (stamp, tick, node)     one entry a node at most; its stamp is not above the node's
#     pins        (until, tick, node)     leaves that were found pinned, until the pin ends
#
# Entries are corrected when they come to the top, not when something happens to their node: using a node, the most frequent
# of all, then costs nothing here. What comes to the top and is used since goes back by its new stamp; what is no leaf, locked
# or removed goes, and comes again when it is a leaf without locks again; what is pinned waits in `pins`. A leaf that is
# pinned for ever is in neither heap.

_NOWHERE: Final = 0
_RECENCY: Final = 1
_PINS: Final = 2
_SLACK: Final = 64
"""Entries of no use, beyond twice those of use, before they are swept."""


class EvictionOrder(Generic[T]):
    """The leaves that may go, and when. `now` gives monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._recency: list[tuple[int, int, Node[T]]] = []
        self._pins: list[tuple[float, int, Node[T]]] = []
        self._most_recency = self._most_pins = _SLACK
        # Nodes cannot be compared: the tick decides between equal stamps, the older entry first.
        self._ticks = itertools.count()

    def add(self, node: Node[T]) -> None:
        """It is a leaf without locks, or its pin has changed. Does nothing if it has its entry. O(log n)."""
        if node.queue != _RECENCY and node.below is None and not node.locks:
            node.queue = _RECENCY
            heappush(self._recency, (node.stamp, next(self._ticks), node))
            if len(self._recency) > self._most_recency:
                self._sweep_recency()

    def drop(self, node: Node[T], num_nodes: int) -> None:
        """It was removed from the tree, which has `num_nodes` left. O(1) amortised."""
        if self._recency and self._recency[0][2] is node:
            heappop(self._recency)
        node.queue = _NOWHERE
        if len(self._recency) > 2 * num_nodes + _SLACK:
            self._sweep_recency()

    def oldest(self) -> Node[T] | None:
        """The least recently used leaf without a lock or a live pin; None if there is none.

        O(log n) for each use, lock, pin and removal since the last call.
        """
        self._end_pins()
        while self._recency:
            stamp, tick, node = self._recency[0]
            if self._is_out(node):
                heappop(self._recency)
                node.queue = _NOWHERE
            elif self._is_pinned(node):
                heappop(self._recency)
                self._wait_for_pin(node)
            elif node.stamp != stamp:
                heapreplace(self._recency, (node.stamp, tick, node))
            else:
                return node
        return None

    def each(self) -> Iterator[Node[T]]:
        """What `oldest` would give if each that it gave were removed: parents too, when all of their children are gone.

        Nothing may change meanwhile. O(k log k) for the first k, however many there are: a heap's smallest entries stand
        near its top, and its children are looked at when an entry has come.
        """
        self._end_pins()
        recency = self._recency
        ahead: list[tuple[int, int, int | None, Node[T]]] = [(*entry[:2], 0, entry[2]) for entry in recency[:1]]
        left: dict[Node[T], int] = {}  # children that a parent would still have
        while ahead:
            stamp, tick, index, node = heappop(ahead)
            if index is not None:
                for child in range(2 * index + 1, min(2 * index + 3, len(recency))):
                    child_stamp, child_tick, child_node = recency[child]
                    heappush(ahead, (child_stamp, child_tick, child, child_node))
                if self._is_out(node) or self._is_pinned(node):
                    continue
                if node.stamp != stamp:
                    heappush(ahead, (node.stamp, tick, None, node))
                    continue
            yield node
            parent = node.parent
            assert parent is not None
            left[parent] = left.get(parent, parent.num_children) - 1
            if not left[parent] and parent.parent is not None and not parent.locks and not self._is_pinned(parent):
                # By its own stamp or this last child's: where its own is the lower one, it is next by either.
                heappush(ahead, (parent.stamp, next(self._ticks), None, parent))

    def _is_out(self, node: Node[T]) -> bool:
        """Is it removed, no leaf, or locked?"""
        return node.parent is None or node.below is not None or node.locks > 0

    def _is_pinned(self, node: Node[T]) -> bool:
        return node.pinned_until is not None and node.pinned_until > self._now()

    def _wait_for_pin(self, node: Node[T]) -> None:
        node.queue = _NOWHERE
        assert node.pinned_until is not None
        if node.pinned_until < math.inf:
            node.queue = _PINS
            heappush(self._pins, (node.pinned_until, next(self._ticks), node))
            if len(self._pins) > self._most_pins:
                self._sweep_pins()

    def _end_pins(self) -> None:
        """Leaves whose pin has ended, or whose entry has, are looked at again."""
        if not self._pins:
            return
        now = self._now()
        while self._pins and self._pins[0][0] <= now:
            node = heappop(self._pins)[2]
            if node.queue == _PINS:
                node.queue = _NOWHERE
                self.add(node)

    def _sweep_recency(self) -> None:
        """A conversation leaves an entry for each turn, and its last turn alone is a leaf."""
        live: list[tuple[int, int, Node[T]]] = []
        for entry in self._recency:
            if self._is_out(entry[2]):
                entry[2].queue = _NOWHERE
            else:
                live.append(entry)
        heapify(live)
        self._recency = live
        self._most_recency = 2 * len(live) + _SLACK

    def _sweep_pins(self) -> None:
        """A pin that is changed often leaves an entry each time: keep the first to end for each node that waits."""
        first: dict[Node[T], tuple[float, int, Node[T]]] = {}
        for entry in sorted(self._pins):
            if entry[2].queue == _PINS:
                first.setdefault(entry[2], entry)
        self._pins = list(first.values())  # sorted, and so a heap
        self._most_pins = 2 * len(self._pins) + _SLACK

    def check(self, leaves: set[Node[T]]) -> None:
        """Every leaf has the entries that it should; AssertionError says which does not."""
        assert all(self._recency[(i - 1) // 2] <= self._recency[i] for i in range(1, len(self._recency))), "recency: no heap"
        entries = Counter(node for _, _, node in self._recency if node.parent is not None)
        waiting = {node for _, _, node in self._pins}
        for stamp, _, node in self._recency:
            assert stamp <= node.stamp, f"{node}: its entry is of {stamp}, later than its last use at {node.stamp}"
            assert node.parent is None or node.queue == _RECENCY, f"{node}: has an entry, and says that it has none"
        for node, count in entries.items():
            assert count == 1, f"{node}: {count} entries"
        for node in leaves:
            for_ever = node.pinned_until == math.inf and node.queue == _NOWHERE
            queued = node in entries or (node.queue == _PINS and node in waiting)
            assert node.locks or for_ever or queued, f"{node}: would never be evicted"


# -------- radix

__all__ = ["Inserted", "Match", "Node", "Piece", "RadixTree", "Tokens"]


_NODE_BYTES: Final = 380
_PIECE_BYTES: Final = 104
"""About what CPython takes for a node without its tokens, and for a piece without its value (`bench/radix.py` measures)."""


class RadixTree(Generic[T]):
    """Prefixes by namespace. `clock` numbers the uses and never falls; `now` gives the monotonic seconds that pins are in."""

    def __init__(self, clock: Callable[[], int], now: Callable[[], float] = time.monotonic) -> None:
        self.num_nodes = 0
        """Without the roots of the namespaces."""
        self.num_tokens = 0
        """On all edges: a token of a shared prefix counts once."""
        self.num_pieces = 0
        self._clock = clock
        self._roots: dict[Hashable, Root[T]] = {}
        self._order: EvictionOrder[T] = EvictionOrder(now)

    @property
    def size_bytes(self) -> int:
        """About the host memory that the tree takes, without what the values of its pieces take."""
        return self.num_nodes * _NODE_BYTES + self.num_tokens * TOKEN_BYTES + self.num_pieces * _PIECE_BYTES

    # finding

    def match(self, namespace: Hashable, tokens: Tokens) -> Match[T]:
        """The longest known prefix of `tokens`, in nodes. Changes nothing, not even when they were last used.

        Raises ValueError for what is no token id.
        """
        packed = pack(tokens)
        root = self._roots.get(namespace)
        return Match([], 0) if root is None else Match(*_walk(root, packed))

    def nodes(self) -> Iterator[Node[T]]:
        """All nodes, parents before their children."""
        rest: list[Node[T]] = [child for root in self._roots.values() for child in root.children.values()]
        while rest:
            node = rest.pop()
            rest += node.children.values()
            yield node

    # changing

    def insert(self, namespace: Hashable, tokens: Tokens, pieces: Sequence[Piece[T]] = ()) -> Inserted[T]:
        """Make `tokens` known, splitting and adding a node at most, and hold `pieces` for them; this is a use of the path.

        `pieces` are in order of end_token, then group, each place once. One whose place on the path is taken is not taken
        again, but handed back: two sequences computed the same tokens, and one copy is enough.

        Raises ValueError for no tokens, for what is no token id, and for pieces out of order or past the tokens; the tree
        is then as before.
        """
        packed = pack(tokens)
        num_tokens = len(packed) // TOKEN_BYTES
        if not num_tokens:
            raise ValueError("tokens: none; wanted at least one token id")
        _check_pieces(pieces, 0, num_tokens)
        root = self._roots.get(namespace) or self._roots.setdefault(namespace, Root(namespace))
        path, num_known = _walk(root, packed)
        if path and num_known < path[-1].end:
            path[-1] = self.split(path[-1], num_known)
        stamp = self._clock()
        if num_known < num_tokens:
            path.append(self._add_leaf(path[-1] if path else root, packed[num_known * TOKEN_BYTES :], stamp))
        path[-1].stamp = stamp
        return Inserted(path[-1], self._hand_out(path, pieces))

    def split(self, node: Node[T], num_tokens: int) -> Node[T]:
        """Cut an edge in two at `num_tokens` of the path; return the new upper half `[start, num_tokens)`.

        `node` stays itself as the lower half, with its children, locks and pin: they speak of the path up to its end.
        Pieces go to the half in which they end; residents of the whole are residents of both.
        Raises ValueError where there is nothing to cut.
        """
        if not node.start < num_tokens < node.end:
            raise ValueError(f"split at {num_tokens}: {node} can be split between {node.start} and {node.end}")
        assert node.parent is not None, f"{node} is in no tree"
        self.num_nodes += 1
        return node.split(num_tokens)

    def replace(self, node: Node[T], pieces: Sequence[Piece[T]]) -> list[Piece[T]]:
        """Hold these pieces at a node instead of those that it has, which are the caller's again.

        Raises ValueError for pieces out of order or not within the node; the tree is then as before.
        """
        _check_pieces(pieces, node.start, node.end)
        old, node.pieces = node.pieces, tuple(pieces)
        self.num_pieces += len(pieces) - len(old)
        return list(old)

    def remove(self, leaf: Node[T]) -> list[Piece[T]]:
        """A leaf goes, pinned or not; its pieces are the caller's again. Its parent may be a leaf then, as late in use.

        A namespace goes with its last node. Not for a leaf that is locked.
        """
        parent = leaf.parent
        assert parent is not None, f"{leaf} is in no tree"
        assert leaf.is_leaf, f"{leaf} is no leaf"
        assert not leaf.locks, f"{leaf} is in use"
        parent.disown(leaf)
        self.num_nodes -= 1
        self.num_tokens -= leaf.end - leaf.start
        self.num_pieces -= len(leaf.pieces)
        self._order.drop(leaf, self.num_nodes)
        if not isinstance(parent, Root):
            parent.stamp = max(parent.stamp, leaf.stamp)
            self._order.add(parent)
        elif parent.is_leaf:
            del self._roots[parent.namespace]
        pieces, leaf.pieces = leaf.pieces, ()
        return list(pieces)

    def trim(self, leaf: Node[T], num_tokens: int) -> list[Piece[T]]:
        """Shorten a leaf to end at `num_tokens` of the path; the pieces past it are the caller's again.

        Raises ValueError where that leaves none of its tokens, or more than it has. Not for a leaf that is locked.
        """
        if not leaf.start < num_tokens <= leaf.end:
            raise ValueError(f"trim to {num_tokens}: {leaf} can end after {leaf.start} and up to {leaf.end}")
        assert leaf.parent is not None, f"{leaf} is in no tree"
        assert leaf.is_leaf, f"{leaf} is no leaf"
        assert not leaf.locks, f"{leaf} is in use"
        self.num_tokens -= leaf.end - num_tokens
        pieces = leaf.cut(num_tokens)[1]
        self.num_pieces -= len(pieces)
        return list(pieces)

    # what goes first

    def touch(self, node: Node[T]) -> None:
        """The path up to a node is used now. O(1): a parent's stamp follows when its children go, before it can go itself."""
        node.stamp = self._clock()

    def lock(self, node: Node[T]) -> None:
        """A sequence that runs uses the path up to a node: neither it nor an ancestor is evicted until `unlock`."""
        assert node.parent is not None, f"{node} is in no tree"
        node.locks += 1

    def unlock(self, node: Node[T]) -> None:
        """Take one lock back."""
        assert node.locks > 0, f"{node} is not locked"
        node.locks -= 1
        self._order.add(node)

    def pin(self, node: Node[T], until: float | None) -> None:
        """Neither a node nor an ancestor is evicted until then (inf: ever; None: it is not pinned any more)."""
        assert node.parent is not None, f"{node} is in no tree"
        node.pinned_until = until
        self._order.add(node)

    def oldest_evictable(self) -> Node[T] | None:
        """The least recently used leaf with no lock and no live pin; None if there is none. O(log n) amortised."""
        return self._order.oldest()

    def evictable(self) -> Iterator[Node[T]]:
        """All that could go at once: what `oldest_evictable` would give in turn if each were removed, parents then too.

        The tree must not change meanwhile. O(k log k) for the first k.
        """
        return self._order.each()

    # the rest

    def check(self) -> None:
        """Recount everything; AssertionError says what is broken."""
        num_nodes = num_tokens = num_pieces = 0
        leaves: set[Node[T]] = set()
        for namespace, root in self._roots.items():
            assert root.namespace == namespace, f"{namespace!r}: its root is of {root.namespace!r}"
            assert not root.is_leaf, f"{namespace!r}: a root without children"
            assert not (root.pieces or root.edge or root.locks), f"{namespace!r}: its root holds something"
            _check_children(root)
        for node in self.nodes():
            num_nodes += 1
            num_tokens += node.end - node.start
            num_pieces += len(node.pieces)
            _check_children(node)
            assert 0 < node.end - node.start == len(node.edge) / TOKEN_BYTES, f"{node}: {len(node.edge)} bytes of tokens"
            assert node.locks >= 0, f"{node}: fewer than no locks"
            try:
                _check_pieces(node.pieces, node.start, node.end)
            except ValueError as error:
                raise AssertionError(f"{node}: {error}") from error
            if node.is_leaf:
                leaves.add(node)
        counted, kept = (num_nodes, num_tokens, num_pieces), (self.num_nodes, self.num_tokens, self.num_pieces)
        assert counted == kept, f"nodes, tokens, pieces: {counted} are there, {kept} are counted"
        self._order.check(leaves)

    def _add_leaf(self, parent: Node[T], edge: bytes, stamp: int) -> Node[T]:
        leaf: Node[T] = Node(parent, edge, parent.end, stamp)
        parent.adopt(leaf)
        self.num_nodes += 1
        self.num_tokens += leaf.end - leaf.start
        self._order.add(leaf)
        return leaf

    def _hand_out(self, path: list[Node[T]], pieces: Sequence[Piece[T]]) -> list[Piece[T]]:
        """Each piece to the node in which it ends; those that are there already are returned."""
        duplicates: list[Piece[T]] = []
        first = 0
        for node in path if pieces else ():
            last = bisect_right(pieces, node.end, lo=first, key=_end_token)
            if last > first:
                duplicates += node.take(pieces[first:last])
                first = last
        self.num_pieces += len(pieces) - len(duplicates)
        return duplicates


def _walk(root: Node[T], packed: bytes) -> tuple[list[Node[T]], int]:
    """The nodes along some tokens, the last one perhaps matched in part, and how many tokens are matched."""
    path: list[Node[T]] = []
    tokens = memoryview(packed).cast("i")
    num_tokens, at, node = len(tokens), 0, root
    while at < num_tokens and (below := node.below) is not None:
        child = below.get(tokens[at]) if isinstance(below, dict) else below
        if child is None:
            break
        if not packed.startswith(child.edge, at * TOKEN_BYTES):
            if common := num_common(packed, at, child.edge):
                path.append(child)
            return path, at + common
        path.append(child)
        at, node = child.end, child
    return path, at


def _check_pieces(pieces: Sequence[Piece[T]], start: int, end: int) -> None:
    if not pieces:
        return
    if not (start < pieces[0].end_token and pieces[-1].end_token <= end):
        ends = f"{pieces[0].end_token} to {pieces[-1].end_token}"
        raise ValueError(f"pieces: end at tokens {ends}; wanted after {start} and up to {end}")
    places = list(map(piece_place, pieces))
    if not all(map(lt, places, places[1:])):
        raise ValueError("pieces: out of order, or two for one place; wanted ascending by end_token, then group")


def _check_children(node: Node[T]) -> None:
    for token, child in node.children.items():
        assert child.parent is node, f"{child}: its parent is {child.parent}, and it hangs under {node}"
        assert child.start == node.end, f"{child}: begins at {child.start}, and {node} ends before {node.end}"
        assert int(child.tokens[0]) == token, f"{child}: begins with {child.tokens[0]}, and hangs under {token}"
