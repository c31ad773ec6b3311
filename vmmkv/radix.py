"""A radix tree over token ids: which prefixes are known, what is held for them, and what goes first.

The idea is RadixAttention's (SGLang), but a node holds *pieces*: whatever the owner keeps for a run of tokens, each usable by
whoever matches up to its last token. The tree knows nothing of memory. Token ids are compared, never only hashed, and paths
of two namespaces never meet.

    namespace "red":    root --[sys prompt]--+--[question 1][answer 1]--[question 2] ...
                                             +--[question 3] ...

Costs do not depend on the number of nodes, but for the logarithm of the heap of leaves. One thread at a time.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import itemgetter, lt
from typing import Final, Generic, TypeVar

from vmmkv.radix_node import TOKEN_BYTES, Inserted, Match, Node, Piece, Root, Tokens, num_common, pack, piece_place
from vmmkv.radix_order import EvictionOrder

__all__ = ["Inserted", "Match", "Node", "Piece", "RadixTree", "Tokens"]

T = TypeVar("T")

_NODE_BYTES: Final = 380
_PIECE_BYTES: Final = 104
"""About what CPython takes for a node without its tokens, and for a piece without its value (`bench/radix.py` measures)."""

_end_token = itemgetter(0)


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
