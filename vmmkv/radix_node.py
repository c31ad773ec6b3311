"""What a radix tree over token ids is made of: nodes, the pieces that they hold, and token ids packed as bytes.

    tokens        a b c d e f g h            pieces       end_token 4, 8 and 10 of the path a..j
                  ^       ^       ^
    node          |start  |       |end       [start, end) of the path: the edge is what the parent's lacks
    its parent  --|end    |
    its pieces            4       8          start < end_token <= end, so that whoever matches 4 tokens may use the first

An edge is four bytes a token in one `bytes`: compared by memcmp and in place, 33 bytes of overhead, and read-only. A split
copies both halves instead of sharing one buffer: a node that outlives the rest of its path then keeps no more than its own.
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

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
