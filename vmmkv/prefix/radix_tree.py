"""A radix tree over token ids: which prefixes are known, what is held for them, and what is evicted first.

As in RadixAttention (SGLang), but a node holds *pieces*: values that the owner keeps for a run of tokens, each usable with a
match up to its last token. The tree knows nothing of memory. Token ids are compared, not hashed. Paths of two namespaces never
meet.

    namespace "red":    root --[sys prompt]--+--[question 1][answer 1]--[question 2] ...
                                             +--[question 3] ...

    tokens        a b c d e f g h            pieces       end_token 4, 8 and 10 of the path a..j
                  ^       ^       ^
    node          |start  |       |end       [start, end) of the path; the edge holds these tokens
    its parent  --|end    |
    its pieces            4       8          start < end_token <= end: a match of 4 tokens may use the first

Costs grow with the tokens of a call and the logarithm of the number of leaves. One thread at a time.
"""

import hashlib
import itertools
import math
import sys
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter, itemgetter, lt
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

Tokens: TypeAlias = Sequence[int] | npt.NDArray[Any]
"""Token ids in [0, 2**31): a list, a tuple, or an array of integers of one dimension. An int32 array is packed fastest."""

TOKEN_BYTES: Final = 4

_NO_SLOTS: Final[Mapping[int, None]] = MappingProxyType({})


class Piece(NamedTuple, Generic[T]):
    """Memory under some tokens of a node."""

    end_token: int
    """Tokens of the path that a match must have at least, for this to be usable."""
    value: T
    """An extent and where it stands, a block of a block table, ..."""
    group: int = 0
    """Pieces of different groups may end at one token; one group has one piece there."""


piece_place = itemgetter(0, 2)
"""Identifies a piece on its path, and orders them: end_token, then group."""

_end_token = itemgetter(0)
_start = attrgetter("start")


def pack(tokens: Tokens) -> bytes:
    """Token ids as native int32. Raises ValueError for anything else."""
    try:
        ids = tokens if isinstance(tokens, np.ndarray) else np.asarray(array("i", tokens))
    except (OverflowError, TypeError) as error:
        raise ValueError(f"tokens: {error}; wanted integers in [0, 2**31)") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"tokens: an array {ids.shape} of {ids.dtype}; wanted one dimension of integers")
    # For a short prompt argmin takes a quarter of the time of min.
    if len(ids) and (ids[ids.argmin()] < 0 or (ids.dtype != np.int32 and ids[ids.argmax()] >= 2**31)):
        raise ValueError(f"tokens: from {ids.min()} to {ids.max()}; wanted integers in [0, 2**31)")
    return ids.astype(np.int32, copy=False).tobytes()


# nodes


class Node(Generic[T]):
    """An edge and the children at its end. `RadixTree` alone changes it, except for `residents`, which are its owner's.

    An edge is one `bytes` with four bytes a token: memcmp compares it in place. A split copies both halves, so that a node
    which outlives the rest of its path keeps its own tokens only.
    """

    __slots__ = (
        "below", "edge", "end", "is_queued", "locks", "parent", "pieces", "pins", "residents", "stamp", "start"
    )  # fmt: skip

    def __init__(self, parent: "Node[T] | None", edge: bytes, start: int, stamp: int) -> None:
        self.edge = edge
        """The packed token ids."""
        self.start = start
        """Tokens of the path before the edge."""
        self.end = start + len(edge) // TOKEN_BYTES
        """Tokens of the path, those of the edge included."""
        self.parent = parent
        """Parent node; None for the root of a namespace, and for a node that was removed."""
        self.below: dict[int, Node[T]] | Node[T] | None = None
        """The children by the first token of their edge, or the only child (a dictionary takes 232 bytes), or None."""
        self.pieces: tuple[Piece[T], ...] = ()
        """Pieces in order of `piece_place`; start < end_token <= end."""
        self.locks = 0
        """Running sequences that use the path up to here. While there are any, neither it nor an ancestor is evicted."""
        self.stamp = stamp
        """The last use of the node itself, or of a descendant that has been removed since."""
        self.pins: frozenset[Pin[T]] = frozenset()
        """Pins that keep the node, some perhaps ended."""
        self.is_queued = False
        """Has the node an entry in the heap of `EvictionOrder`?"""
        self.residents: Mapping[int, None] = _NO_SLOTS
        """The slots whose rows hold the whole path up to `end`."""

    def __repr__(self) -> str:
        state = f", {self.locks} locks" * (self.locks > 0) + f", pinned until {self.pinned_until}" * bool(self.pinned_until)
        return f"<Node [{self.start}, {self.end}), {len(self.children)} children, {len(self.pieces)} pieces{state}>"

    @property
    def pinned_until(self) -> float | None:
        """Seconds of the tree's `now` until which it is not evicted; inf for ever, None for not pinned."""
        return max((pin.until for pin in self.pins), default=None)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The token ids of the edge, read-only."""
        return np.frombuffer(self.edge, dtype=np.int32)

    def add_resident(self, slot: int) -> None:
        """A slot holds the whole path. The dictionary is made for the first one (232 bytes)."""
        if isinstance(self.residents, dict):
            self.residents[slot] = None
        else:
            self.residents = {slot: None}

    def remove_resident(self, slot: int) -> None:
        """A slot that is a resident holds the path no longer."""
        assert isinstance(self.residents, dict)
        del self.residents[slot]

    def some_residents(self, count: int) -> list[int]:
        """Residents, at most `count` of them. If there are more, all come in turn from call to call."""
        slots = list(itertools.islice(self.residents, count))
        if len(slots) < len(self.residents):
            for slot in slots:
                self.remove_resident(slot)
                self.add_resident(slot)  # behind the others
        return slots

    @property
    def is_leaf(self) -> bool:
        """Has the node no children?"""
        return self.below is None

    @property
    def children(self) -> Mapping[int, "Node[T]"]:
        """Children by the first token of their edge. A new dictionary if there is none or one: `is_leaf` is quicker then."""
        below = self.below
        return {} if below is None else {below.first_token: below} if isinstance(below, Node) else below

    @property
    def first_token(self) -> int:
        """First token of the edge."""
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
        """Add a child, in place of the one with its first token if there is one."""
        child.parent = self
        token, below = child.first_token, self.below
        if isinstance(below, dict):
            below[token] = child
        elif below is None or below.first_token == token:
            self.below = child
        else:
            self.below = {below.first_token: below, token: child}

    def disown(self, child: "Node[T]") -> None:
        """Remove a child."""
        child.parent = None
        if isinstance(self.below, dict):
            del self.below[child.first_token]
            if len(self.below) == 1:
                (self.below,) = self.below.values()
        else:
            self.below = None

    def cut(self, num_tokens: int) -> tuple[bytes, tuple[Piece[T], ...]]:
        """Shorten the edge to end at `num_tokens` of the path; the rest of the edge, and the pieces past it."""
        at = (num_tokens - self.start) * TOKEN_BYTES
        num_pieces = bisect_right(self.pieces, num_tokens, key=_end_token)
        edge, pieces = self.edge[at:], self.pieces[num_pieces:]
        self.edge, self.pieces, self.end = self.edge[:at], self.pieces[:num_pieces], num_tokens
        return edge, pieces

    def take(self, pieces: Sequence[Piece[T]]) -> list[Piece[T]]:
        """Add pieces, in order and within the edge; those whose place is taken already are returned."""
        if not self.pieces or self.pieces[-1].end_token < pieces[0].end_token:
            self.pieces = (*self.pieces, *pieces)
            return []
        taken = set(map(piece_place, self.pieces))
        new = [piece for piece in pieces if piece_place(piece) not in taken]
        if new:
            self.pieces = tuple(sorted((*self.pieces, *new), key=piece_place))
        return [piece for piece in pieces if piece_place(piece) in taken]


class _Root(Node[T]):
    """The root of a namespace: no tokens, no pieces, and never without children."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(None, b"", 0, 0)
        self.namespace = namespace


class Pin(Generic[T]):
    """Pin of some tokens, which keeps the nodes of those that are known."""

    __slots__ = ("key", "node", "nodes", "until")

    def __init__(self, key: tuple[Hashable, bytes], node: Node[T], until: float) -> None:
        self.key = key
        """The namespace, and a digest of the tokens."""
        self.node = node
        """Node at which the known ones of these tokens end."""
        self.until = until
        """End of the pin, in seconds of the tree's `now`; inf: never."""
        self.nodes: dict[Node[T], None] = {}
        """Nodes that the pin keeps, with their paths: `node`, and others by `RadixTree.keep`."""


class Match(NamedTuple, Generic[T]):
    """The longest known prefix of some tokens. Valid until the tree changes."""

    path: list[Node[T]]
    """Nodes from below the root; all but the last are matched to their end."""
    num_tokens: int


class Inserted(NamedTuple, Generic[T]):
    """Result of `RadixTree.insert`."""

    node: Node[T]
    """Node that ends with the inserted tokens."""
    duplicates: list[Piece[T]]
    """The pieces that were not taken, since the path had one in their place: still the caller's."""


class Lookup(Generic[T]):
    """Tokens that are matched again and again: `RadixTree.resume` goes on from where the last match ended."""

    __slots__ = ("namespace", "num_known", "num_splits", "packed", "path")

    def __init__(self, namespace: Hashable, tokens: Tokens) -> None:
        """Raises: ValueError for anything but token ids."""
        self.namespace = namespace
        self.packed = pack(tokens)
        self.path: list[Node[T]] = []
        """Path of the last match. A node that is still in the tree still ends with the same tokens."""
        self.num_known = 0
        """Tokens that the last match knew."""
        self.num_splits = 0
        """Splits of the tree at the last match. A later split puts a node into the path."""


# the tree


class TreeListener(Protocol):
    """Listener that hears which tokens become known and which are forgotten. It must return at once, and not use the tree."""

    def stored(self, namespace: Hashable, edges: list[bytes]) -> None:
        """Hear that a leaf was added; `edges`: the packed tokens of its path, the leaf's last."""

    def removed(self, namespace: Hashable, edges: list[bytes]) -> None:
        """Hear that a leaf was removed; `edges`: its path as it was."""


class RadixTree(Generic[T]):
    """Prefixes by namespace. `clock` numbers the uses and never falls; `now` gives the monotonic seconds that pins are in."""

    def __init__(self, clock: Callable[[], int], now: Callable[[], float] = time.monotonic) -> None:
        self.num_nodes = 0
        """Nodes without the roots of the namespaces."""
        self.num_tokens = 0
        """Tokens on all edges: a token of a shared prefix counts once."""
        self._num_splits = 0
        self._clock = clock
        self._now = now
        self._listener: TreeListener | None = None
        self._roots: dict[Hashable, _Root[T]] = {}
        self._pins: dict[tuple[Hashable, bytes], Pin[T]] = {}
        self.eviction: Final[EvictionOrder[T]] = EvictionOrder(self.is_pinned, now)

    # finding

    def match(self, namespace: Hashable, tokens: Tokens) -> Match[T]:
        """The longest known prefix of `tokens`, in nodes. Changes nothing, and is no use of the path.

        Raises ValueError for anything but token ids.
        """
        packed = pack(tokens)
        root = self._roots.get(namespace)
        return Match([], 0) if root is None else Match(*_walk(root, packed))

    def resume(self, lookup: Lookup[T]) -> Match[T]:
        """The longest known prefix as of now. O(tokens that have become known since the last time), and after a split also
        O(nodes of the path)."""
        path, num_known = lookup.path, lookup.num_known
        while path and path[-1].parent is None:  # removed, children first
            path.pop()
            num_known = path[-1].end if path else 0
        node = path[-1] if path else self._roots.get(lookup.namespace)
        if node is None:
            lookup.num_known = 0
            return Match([], 0)
        if lookup.num_splits != self._num_splits:
            while node.parent is not None and node.start >= num_known:
                node = node.parent
            path = node.path()
        if num_known == node.end:
            below, num_known = _walk(node, lookup.packed)
            path += below
        lookup.path, lookup.num_known, lookup.num_splits = path, num_known, self._num_splits
        return Match(path, num_known)

    def namespace_of(self, node: Node[T]) -> Hashable:
        """The namespace that a node of this tree is in."""
        while node.parent is not None:
            node = node.parent
        assert isinstance(node, _Root), f"{node} is in no tree"
        return node.namespace

    def last_piece(self, lookup: Lookup[T], before: tuple[float, float]) -> Piece[T] | None:
        """The last piece whose `piece_place` is before this one, and that may be used with the longest known prefix.

        Cost: as `resume`, and O(log nodes) and O(log pieces).
        """
        path, num_tokens = self.resume(lookup)
        before = min(before, (num_tokens, math.inf))
        for index in reversed(range(bisect_left(path, before[0], key=_start))):
            pieces = path[index].pieces
            if num_pieces := bisect_left(pieces, before, key=piece_place):
                return pieces[num_pieces - 1]
        return None

    def nodes(self) -> Iterator[Node[T]]:
        """All nodes, parents before their children."""
        rest: list[Node[T]] = [child for root in self._roots.values() for child in root.children.values()]
        while rest:
            node = rest.pop()
            rest += node.children.values()
            yield node

    # changing

    def insert(self, namespace: Hashable, tokens: Tokens, pieces: Sequence[Piece[T]] = ()) -> Inserted[T]:
        """Make `tokens` known and hold `pieces` for them; this is a use of the path. At most one node is split and one added.

        `pieces` are in order of end_token, then group, each place once. A piece whose place on the path is taken is handed
        back: two sequences computed the same tokens, and one copy is enough.

        Raises ValueError for no tokens, for anything but token ids, and for pieces out of order or past the tokens; the tree
        is then as before.
        """
        packed = pack(tokens)
        num_tokens = len(packed) // TOKEN_BYTES
        if not num_tokens:
            raise ValueError("tokens: none; wanted at least one token id")
        _check_pieces(pieces, 0, num_tokens)
        root = self._roots.get(namespace) or self._roots.setdefault(namespace, _Root(namespace))
        path, num_known = _walk(root, packed)
        if path and num_known < path[-1].end:
            path[-1] = self.split(path[-1], num_known)
        stamp = self._clock()
        if num_known < num_tokens:
            path.append(self._add_leaf(path[-1] if path else root, packed[num_known * TOKEN_BYTES :], stamp))
            if self._listener is not None:
                self._listener.stored(namespace, [node.edge for node in path])
        path[-1].stamp = stamp
        return Inserted(path[-1], self._hand_out(path, pieces))

    def split(self, node: Node[T], num_tokens: int) -> Node[T]:
        """Cut an edge in two at `num_tokens` of the path; return the new upper half `[start, num_tokens)`.

        `node` becomes the lower half and keeps its children, locks and pins, which concern the path up to its end. Pieces go
        to the half in which they end. Both halves get the residents.
        Raises ValueError where there is nothing to cut.
        """
        if not node.start < num_tokens < node.end:
            raise ValueError(f"split at {num_tokens}: {node} can be split between {node.start} and {node.end}")
        assert node.parent is not None, f"{node} is in no tree"
        upper: Node[T] = Node(node.parent, node.edge, node.start, node.stamp)
        upper.pieces = node.pieces
        node.parent.adopt(upper)  # while the node's first token still names the place
        node.edge, node.pieces = upper.cut(num_tokens)
        node.start = num_tokens
        upper.adopt(node)
        if node.residents:
            upper.residents = dict(node.residents)
        self.num_nodes += 1
        self._num_splits += 1
        return upper

    def replace(self, node: Node[T], pieces: Sequence[Piece[T]]) -> list[Piece[T]]:
        """Hold these pieces at a node; those that it had are returned and are the caller's again.

        Raises ValueError for pieces out of order or not within the node; the tree is then as before.
        """
        _check_pieces(pieces, node.start, node.end)
        old, node.pieces = node.pieces, tuple(pieces)
        return list(old)

    def remove(self, leaf: Node[T]) -> list[Piece[T]]:
        """Remove an unlocked leaf, pinned or not; its pieces are the caller's again.

        Its parent may become a leaf, with the later stamp of the two. It gets the live pins of tokens that end at the leaf,
        which keep what is left of these. A namespace goes with its last node.
        """
        parent = leaf.parent
        assert parent is not None, f"{leaf} is in no tree"
        assert leaf.is_leaf, f"{leaf} is no leaf"
        assert not leaf.locks, f"{leaf} is in use"
        if self._listener is not None:
            self._listener.removed(self.namespace_of(leaf), [node.edge for node in leaf.path()])
        parent.disown(leaf)
        self.num_nodes -= 1
        self.num_tokens -= leaf.end - leaf.start
        self.eviction.drop(leaf, self.num_nodes)
        now, pins, leaf.pins = self._now(), leaf.pins, frozenset()
        for pin in pins:
            del pin.nodes[leaf]
            if pin.node is leaf and (pin.until <= now or isinstance(parent, _Root)):
                self._take_back(pin)
            elif pin.node is leaf:
                pin.node = parent
                self.keep(parent, {pin})
        if not isinstance(parent, _Root):
            parent.stamp = max(parent.stamp, leaf.stamp)
            self.eviction.add(parent)
        elif parent.is_leaf:
            del self._roots[parent.namespace]
        pieces, leaf.pieces = leaf.pieces, ()
        return list(pieces)

    # what is evicted first

    def touch(self, node: Node[T]) -> None:
        """Use the path up to a node. O(1): a parent gets its children's stamps when they are removed, before it can be."""
        node.stamp = self._clock()

    def lock(self, node: Node[T]) -> None:
        """Keep a node and its ancestors from being evicted until `unlock`: a running sequence uses the path."""
        assert node.parent is not None, f"{node} is in no tree"
        node.locks += 1

    def unlock(self, node: Node[T]) -> None:
        """Take one lock back."""
        assert node.locks > 0, f"{node} is not locked"
        node.locks -= 1
        self.eviction.add(node)

    def pin(self, namespace: Hashable, tokens: Tokens, until: float) -> Node[T] | None:
        """Keep the known prefix of some tokens from being evicted until then (inf: for ever), which is a use of it, too.

        The node where it ends; None if nothing is known. The pin is these tokens' own: others that begin alike have others. Of
        two for the same tokens the later end counts.
        Raises ValueError for anything but token ids.
        """
        key, num_tokens = (namespace, _digest(tokens)), self.match(namespace, tokens).num_tokens
        if not num_tokens:
            return None
        node, now = self.insert(namespace, tokens[:num_tokens]).node, self._now()
        pin = self._pins.get(key)
        if pin is not None and pin.until <= now:
            self._take_back(pin)
            pin = None
        if pin is None:
            pin = self._pins[key] = Pin(key, node, until)
        pin.node, pin.until = node, max(pin.until, until)
        self.keep(node, {pin})
        for each in node.pins:
            if each.until <= now:
                self._take_back(each)
        return node

    def keep(self, node: Node[T], pins: Set[Pin[T]]) -> None:
        """Let pins keep another node, below those at which their tokens end."""
        node.pins = node.pins.union(pins)
        for pin in pins:
            pin.nodes[node] = None

    def unpin(self, namespace: Hashable, tokens: Tokens) -> None:
        """Take back the pin of exactly these tokens, however many of them were known then. ValueError as `pin`."""
        if (pin := self._pins.get((namespace, _digest(tokens)))) is not None:
            self._take_back(pin)

    def unpin_all(self) -> None:
        """Take back every pin."""
        for pin in list(self._pins.values()):
            self._take_back(pin)

    def _take_back(self, pin: Pin[T]) -> None:
        del self._pins[pin.key]
        for node in pin.nodes:
            node.pins -= {pin}
            self.eviction.add(node)

    def pins(self) -> list[Pin[T]]:
        """The pins that have not ended. Cost: grows with all pins."""
        now = self._now()
        return [pin for pin in self._pins.values() if pin.until > now]

    def pins_ending_at(self, node: Node[T]) -> set[Pin[T]]:
        """The pins of tokens that end at a node, without those that have expired."""
        now = self._now() if node.pins else 0.0
        return {pin for pin in node.pins if pin.node is node and pin.until > now}

    def is_pinned(self, node: Node[T]) -> bool:
        """Has the node a pin that has not expired?"""
        return node.pinned_until is not None and node.pinned_until > self._now()

    # the rest

    def listen(self, listener: TreeListener) -> None:
        """Tell one listener which tokens become known and which are forgotten; at first all that are known."""
        for node in self.nodes():
            listener.stored(self.namespace_of(node), [each.edge for each in node.path()])
        self._listener = listener

    def check(self) -> None:
        """Recount everything; AssertionError says what is broken."""
        num_nodes = num_tokens = 0
        leaves: set[Node[T]] = set()
        for namespace, root in self._roots.items():
            assert root.namespace == namespace, f"{namespace!r}: its root is of {root.namespace!r}"
            assert not root.is_leaf, f"{namespace!r}: a root without children"
            assert not (root.pieces or root.edge or root.locks), f"{namespace!r}: its root holds something"
            _check_children(root)
        for node in self.nodes():
            num_nodes += 1
            num_tokens += node.end - node.start
            _check_children(node)
            assert 0 < node.end - node.start == len(node.edge) / TOKEN_BYTES, f"{node}: {len(node.edge)} bytes of tokens"
            assert node.locks >= 0, f"{node}: fewer than no locks"
            try:
                _check_pieces(node.pieces, node.start, node.end)
            except ValueError as error:
                raise AssertionError(f"{node}: {error}") from error
            if node.is_leaf:
                leaves.add(node)
            assert all(self._pins.get(pin.key) is pin and node in pin.nodes for pin in node.pins), f"{node}: a pin is unknown"
        for pin in self._pins.values():
            assert pin.node in pin.nodes, f"{pin.key}: a pin does not keep its tokens"
            assert all(pin in node.pins and node.parent is not None for node in pin.nodes), f"{pin.key}: a node is not kept"
        counted, kept = (num_nodes, num_tokens), (self.num_nodes, self.num_tokens)
        assert counted == kept, f"nodes, tokens: {counted} are there, {kept} are counted"
        self.eviction.check(leaves)

    def _add_leaf(self, parent: Node[T], edge: bytes, stamp: int) -> Node[T]:
        leaf: Node[T] = Node(parent, edge, parent.end, stamp)
        parent.adopt(leaf)
        self.num_nodes += 1
        self.num_tokens += leaf.end - leaf.start
        self.eviction.add(leaf)
        return leaf

    def _hand_out(self, path: list[Node[T]], pieces: Sequence[Piece[T]]) -> list[Piece[T]]:
        """Give each piece to the node in which it ends; the duplicates are returned."""
        duplicates: list[Piece[T]] = []
        first = 0
        for node in path if pieces else ():
            last = bisect_right(pieces, node.end, lo=first, key=_end_token)
            if last > first:
                duplicates += node.take(pieces[first:last])
                first = last
        return duplicates


def _walk(node: Node[T], packed: bytes) -> tuple[list[Node[T]], int]:
    """The nodes along some tokens, below one whose path they begin with, and how many tokens are matched.

    The last node may be matched in part.
    """
    path: list[Node[T]] = []
    tokens = memoryview(packed).cast("i")
    num_tokens, at = len(tokens), node.end
    while at < num_tokens and (below := node.below) is not None:
        child = below.get(tokens[at]) if isinstance(below, dict) else below
        if child is None or child.first_token != tokens[at]:
            break
        path.append(child)
        if not packed.startswith(child.edge, at * TOKEN_BYTES):
            return path, at + num_common(np.frombuffer(packed, np.int32, offset=at * TOKEN_BYTES), child.tokens)
        at, node = child.end, child
    return path, at


def num_common(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Length of the common prefix of two arrays of tokens."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _digest(tokens: Tokens) -> bytes:
    """Digest of token ids, which identifies them. Raises ValueError for anything else."""
    return hashlib.blake2b(pack(tokens), digest_size=16).digest()


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


# the order of eviction

SWEEP_SLACK: Final = 64
"""Useless entries, beyond twice the useful ones, before the heap is swept."""


class EvictionOrder(Generic[T]):
    """The leaves of a tree, least recently used first, without those locked or pinned.

    Each leaf without locks has one entry `(stamp, tick, node)` in a heap, or was found pinned and waits until the pin ends.
    An entry's stamp is not above its node's. An entry is corrected when it comes to the top, so that using a node, the most
    frequent operation, costs nothing here: a node used since is pushed again, a node locked, removed or no leaf is dropped,
    and added again when it becomes a leaf without locks.
    """

    def __init__(self, is_pinned: Callable[[Node[T]], bool], now: Callable[[], float]) -> None:
        self._is_pinned = is_pinned
        self._now = now
        self._heap: list[tuple[int, int, Node[T]]] = []
        self._most_entries = SWEEP_SLACK
        self._pinned: dict[Node[T], None] = {}
        """Leaves that were found pinned, in this order."""
        self._first_end = math.inf
        """Time before which no pin of these nodes ends."""
        # Nodes cannot be compared: the tick decides between equal stamps, the older entry first.
        self._ticks = itertools.count()

    @property
    def num_entries(self) -> int:
        """Entries that are kept, among them those of no use that wait to be swept."""
        return len(self._heap) + len(self._pinned)

    def add(self, node: Node[T]) -> None:
        """Add an entry for a leaf without locks, or one whose pin has changed, unless it has one. O(log n)."""
        if node.is_queued or _is_out(node):
            return
        self._pinned.pop(node, None)
        node.is_queued = True
        heappush(self._heap, (node.stamp, next(self._ticks), node))
        if len(self._heap) > self._most_entries:
            self._sweep()

    def drop(self, node: Node[T], num_nodes: int) -> None:
        """Forget a node that was removed from the tree, which has `num_nodes` left. O(1) amortised."""
        self._pinned.pop(node, None)
        if self._heap and self._heap[0][2] is node:
            heappop(self._heap)
        node.is_queued = False
        if len(self._heap) > 2 * num_nodes + SWEEP_SLACK:
            self._sweep()

    def oldest(self) -> Node[T] | None:
        """The least recently used leaf without a lock or a live pin; None if there is none.

        O(log n) for each use, lock, pin and removal since the last call.
        """
        self._end_pins()
        while self._heap:
            stamp, tick, node = self._heap[0]
            if _is_out(node) or self._is_pinned(node):
                heappop(self._heap)
                node.is_queued = False
                if not _is_out(node):
                    assert node.pinned_until is not None
                    self._pinned[node] = None
                    self._first_end = min(self._first_end, node.pinned_until)
            elif node.stamp != stamp:
                heapreplace(self._heap, (node.stamp, tick, node))
            else:
                return node
        return None

    def each(self) -> Iterator[Node[T]]:
        """Nodes in the order in which `oldest` gives them if each is removed, parents included. The tree must not change.

        O(k log k) for the first k: a heap's smallest entries are near its top, so that few entries are looked at.
        """
        self._end_pins()
        heap = self._heap
        ahead: list[tuple[int, int, int | None, Node[T]]] = [(*entry[:2], 0, entry[2]) for entry in heap[:1]]
        left: dict[Node[T], int] = {}  # children that a parent would still have
        while ahead:
            stamp, tick, index, node = heappop(ahead)
            if index is not None:
                for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                    child_stamp, child_tick, child_node = heap[child]
                    heappush(ahead, (child_stamp, child_tick, child, child_node))
                if _is_out(node) or self._is_pinned(node):
                    continue
                if node.stamp != stamp:
                    heappush(ahead, (node.stamp, tick, None, node))
                    continue
            yield node
            parent = node.parent
            assert parent is not None
            left[parent] = left.get(parent, len(parent.children)) - 1
            if not left[parent] and parent.parent is not None and not parent.locks and not self._is_pinned(parent):
                # Its stamp would be the later of its own and this child's; if its own is lower, it is next by either.
                heappush(ahead, (parent.stamp, next(self._ticks), None, parent))

    def _end_pins(self) -> None:
        """Add the leaves again whose pin has ended."""
        now = self._now() if self._pinned else -math.inf
        if now < self._first_end:
            return
        for node in [node for node in self._pinned if not self._is_pinned(node)]:
            del self._pinned[node]
            self.add(node)
        self._first_end = min((node.pinned_until for node in self._pinned if node.pinned_until is not None), default=math.inf)

    def _sweep(self) -> None:
        """A conversation leaves an entry for each turn, and only its last turn is a leaf."""
        live: list[tuple[int, int, Node[T]]] = []
        for entry in self._heap:
            if _is_out(entry[2]):
                entry[2].is_queued = False
            else:
                live.append(entry)
        heapify(live)
        self._heap = live
        self._most_entries = 2 * len(live) + SWEEP_SLACK

    def check(self, leaves: set[Node[T]]) -> None:
        """Check that every leaf has the entry that it should; AssertionError says which does not."""
        assert all(self._heap[(i - 1) // 2] <= self._heap[i] for i in range(1, len(self._heap))), "no heap"
        entries = Counter(node for _, _, node in self._heap if node.parent is not None)
        for stamp, _, node in self._heap:
            assert stamp <= node.stamp, f"{node}: its entry is of {stamp}, later than its last use at {node.stamp}"
            assert node.parent is None or node.is_queued, f"{node}: has an entry, and says that it has none"
        for node, count in entries.items():
            assert count == 1, f"{node}: {count} entries"
        for node in leaves:
            waits = node in self._pinned and node.pinned_until is not None and node.pinned_until >= self._first_end
            assert node.locks or node in entries or waits, f"{node}: would never be evicted"


def _is_out(node: Node[T]) -> bool:
    """Is the node removed, no leaf, or locked?"""
    return node.parent is None or node.below is not None or node.locks > 0
