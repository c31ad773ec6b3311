"""Prefixes of another engine on this host: what it has sealed joins this tree when a prompt has it. No byte is copied.

    the other's tree ──seal──> log ──> find ──> this tree, without handles ──attach──> imported, mapped read-only
                                                  │
                                                  └── evicted ──> given back to the holder

Both budgets count a borrowed extent: the holder's until the last engine has given it back, this pool's while the tree has it.
The caller holds the pool's lock.
"""

import logging
from collections import defaultdict
from collections.abc import Hashable
from typing import Final

import numpy as np
import numpy.typing as npt

from vmmkv.errors import LogDamaged
from vmmkv.holder.log import LogContents, Sealed
from vmmkv.holder.sealed import SealedPrefixes, add_sealed, check_seal
from vmmkv.holder.source import LenderSource
from vmmkv.layout import KVLayout
from vmmkv.memory.pool import Pool
from vmmkv.prefix.index import Placed, PrefixIndex
from vmmkv.prefix.radix_tree import Match, piece_place

log = logging.getLogger(__name__)


class BorrowedPrefixes:
    """The log of another engine, by prefix, and what of it is in a tree."""

    def __init__(self, index: PrefixIndex, layout: KVLayout, pool: Pool, identity: bytes) -> None:
        assert isinstance(pool.source, LenderSource), "without a lender there is nothing to borrow"
        self._index = index
        self._layout = layout
        self._pool = pool
        self._source: Final = pool.source
        self._lender: Final = pool.source.lender
        self._identity = identity
        self._refused = b""
        """Last identity of the log that differs from this engine's: its warning is logged once."""
        self._version: tuple[int, int] | None = None
        self._contents = LogContents()
        self._behind: defaultdict[tuple[int | bytes, bytes], list[int]] = defaultdict(list)
        """Places of seals by their parent's, or for those without one the namespace, and their tokens."""
        self._lengths: defaultdict[int | bytes, set[int]] = defaultdict(set)
        """Lengths of the tokens of the seals in `_behind`, in bytes, by parent."""

    def borrow(self, namespace: Hashable, tokens: npt.NDArray[np.int32], known: int, room_pages: int) -> tuple[int, int]:
        """Take what the other engine has of some tokens past the first `known` into the tree.

        Returns how many tokens both then have, 0 if it has no more; and the bytes taken, 0 without room for all.
        Cost: host work by what was sealed since the last call, and by the pages of the tokens; what evicting takes.
        """
        if self._lender.is_gone() or not self.follow():
            return 0, 0
        match, groups = self._index.tree.match(namespace, tokens), self._layout.groups
        pieces = (piece for node in match.path for piece in node.pieces if piece.end_token <= match.num_tokens)
        taken = {piece_place(piece) for piece in pieces if not piece.value.first_token}
        seals = [seal for seal in self.seals_of(namespace, tokens.tobytes()) if seal.end_token > known]
        seals = [seal for seal in seals if (seal.end_token, seal.group) not in taken]
        ends = [0] * len(groups)
        for end, group in taken | {(seal.end_token, seal.group) for seal in seals}:
            ends[group] = max(ends[group], end)
        num_tokens = min(*ends, len(tokens) - 1)
        firsts = [group.page_of(self._layout.start_for(group, num_tokens)) for group in groups]
        seals = [seal for seal in seals if seal.page + seal.num_pages > firsts[seal.group]]  # in the windows
        if not seals or num_tokens <= known:
            return 0, 0
        if not self._make_room(match, sum(seal.num_pages for seal in seals), room_pages):
            return num_tokens, 0
        borrowed = {self._source.borrow(seal.serial, seal.num_pages): seal for seal in seals}
        add_sealed(self._index, self._pool, namespace, tokens, borrowed)
        return num_tokens, sum(extent.size_bytes for extent in borrowed)

    def _make_room(self, match: Match[Placed], num_pages: int, room_pages: int) -> bool:
        """Make room, but not by evicting what matches."""
        tree = self._index.tree
        if match.path:
            tree.lock(match.path[-1])
        try:
            return self._pool.make_room(num_pages, room_pages)
        finally:
            if match.path:
                tree.unlock(match.path[-1])

    def follow(self) -> bool:
        """Read on in the log. False if it is of another layout or model."""
        version = None
        while version != self._lender.log.version:
            version = self._lender.log.version
            if version != self._version:
                self._version, self._contents = version, LogContents()
                self._behind.clear()
                self._lengths.clear()
            try:
                new = self._lender.log.read_on(self._contents)
                if self._contents.identity == self._identity:
                    for place in new:
                        check_seal(self._contents.seals[place], self._layout)
            except LogDamaged as error:
                self._version = None  # from the start, next time
                if version == self._lender.log.version:
                    self._lender.say_damaged(error)
                    return False
                continue
            for place in new:
                seal = self._contents.seals[place]
                parent = seal.namespace if seal.parent is None else seal.parent
                self._behind[parent, seal.tokens].append(place)
                self._lengths[parent].add(len(seal.tokens))
        identity = self._contents.identity
        if identity and identity not in (self._identity, self._refused):
            self._refused = identity
            log.warning(
                "starting cold: the engine of the holder at %s has another layout, dtype, model or fingerprint, and nothing is "
                "borrowed from it",
                self._lender.path,
            )
        return identity == self._identity

    def seals_of(self, namespace: Hashable, packed: bytes) -> list[Sealed]:
        """The live seals of some tokens."""
        seals, live = self._contents.seals, self._contents.live
        found: list[Sealed] = []
        ends: list[tuple[int | bytes, int]] = [(repr(namespace).encode(), 0)]
        while ends:
            parent, start = ends.pop()
            for num_bytes in self._lengths.get(parent, ()):
                for place in self._behind.get((parent, packed[start : start + num_bytes]), ()):
                    if start + num_bytes <= len(packed):
                        ends.append((place, start + num_bytes))
                        if live.get(seals[place].serial) == place:
                            found.append(seals[place])
        return found


def follow(index: PrefixIndex, layout: KVLayout, pool: Pool, identity: bytes) -> BorrowedPrefixes | None:
    """Have a prefix tree take what its pool's holder process has kept, and keep there what is inserted.

    Returns what the pool's lender lends; None without a lender.
    """
    if pool.holder is not None:
        SealedPrefixes(index, layout, pool, identity).restore()
    return None if pool.lender is None else BorrowedPrefixes(index, layout, pool, identity)
