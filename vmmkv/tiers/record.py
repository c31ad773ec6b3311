"""The keys of records: hashes over everything that must agree for bytes to be the same.

    tokens    |................|................|....|      of a prompt
    rows      |. . . . . .|. . . . . .|. . . . .|. . |      of one group of layers; they straddle pages
    pages     |     0     |     1     |     2   |
    keys           key 0       key 1       key 2            each hashes all tokens up to the last row in its page

A record is a page of 2 MiB of one group: opaque bytes, of all layers of the group, with their scales. Equal keys mean equal
bytes, in whatever extents the rows were laid: one of n pages is stored as n records, and records side by side come back in one.
"""

import hashlib
import heapq
import itertools
import struct
import zlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from vmmkv.layout import KVLayout
from vmmkv.units import PAGE_BYTES, ceil_div

RECORD_BYTES: Final = PAGE_BYTES
KEY_BYTES: Final = 32

_VERSION: Final = b"vmmkv records 1"


class Keys:
    """The keys of one layout and one model: no record of another is ever found.

    `fingerprint` tells models apart whose layouts are alike: weights, rotary settings, static scales.
    """

    def __init__(self, layout: KVLayout, fingerprint: str) -> None:
        self.layout: Final = layout
        self.identity: Final = layout.identity(fingerprint)
        """Of layout and model."""

    def of(self, namespace: Hashable, tokens: npt.NDArray[np.int32]) -> "KeyChain":
        """The pages of some tokens. The namespace is checked by `vmmkv.arguments.label`: every process spells it alike."""
        name = hashlib.blake2b(repr(namespace).encode(), digest_size=KEY_BYTES).digest()
        return KeyChain(self.layout, _VERSION + self.identity + name, namespace, tokens)


class KeyChain:
    """The keys of the pages that the rows of some tokens fill. They are hashed piece by piece."""

    def __init__(self, layout: KVLayout, identity: bytes, namespace: Hashable, tokens: npt.NDArray[np.int32]) -> None:
        self.namespace: Final = namespace
        self.tokens: Final = tokens
        self.layout: Final = layout
        self.in_order: list[bytes] = []
        """The keys that are hashed by now, in the order of the last tokens of their pages."""
        self.by_group: list[list[bytes]] = [[] for _ in layout.groups]
        """The same by group and page; an empty one of a page that was skipped."""
        self._identity = identity
        self._state = hashlib.blake2b(identity, digest_size=KEY_BYTES)
        """After `_num_hashed` tokens."""
        self._num_hashed = 0
        self._ends: Iterator[tuple[int, int, int]] | None = None
        """Of the pages that are not hashed yet, in order: end, group, page."""

    def is_start_of(self, tokens: npt.NDArray[np.int32]) -> bool:
        """Do these tokens begin with the chain's?"""
        return np.array_equal(self.tokens, tokens[: len(self.tokens)])

    def grown(self, tokens: npt.NDArray[np.int32]) -> "KeyChain | None":
        """The chain of more tokens, with the keys that are hashed by now; None if they do not begin with these."""
        if not self.is_start_of(tokens):
            return None
        chain = KeyChain(self.layout, self._identity, self.namespace, tokens)
        chain.in_order, chain.by_group = self.in_order.copy(), [keys.copy() for keys in self.by_group]
        chain._state, chain._num_hashed = self._state.copy(), self._num_hashed
        return chain

    def skip(self, nums_pages: Sequence[int]) -> None:
        """The keys of so many first pages of each group are not wanted. None is hashed yet."""
        self.by_group = [[b""] * num_pages for num_pages in nums_pages]

    def hash_some(self, num_pages: int | None) -> list[tuple[int, int]]:
        """Hash the keys of so many more pages, or of all; group and page of each. Cost: some 2.5 us for each."""
        if self._ends is None:
            self._ends = heapq.merge(*map(self._ends_of, range(len(self.by_group))))
        places: list[tuple[int, int]] = []
        for end, index, page in itertools.islice(self._ends, num_pages):
            self._state.update(self.tokens[self._num_hashed : end].data)
            self._num_hashed = end
            self.in_order.append(_digest(self._state.copy(), index, page))
            self.by_group[index].append(self.in_order[-1])
            places.append((index, page))
        return places

    def key(self, index: int, page: int) -> bytes:
        """The key of one page of a group. Cost: 1 us for each 1,000 tokens."""
        state = hashlib.blake2b(self._identity, digest_size=KEY_BYTES)
        state.update(self.tokens[: self.end(index, page)].data)
        return _digest(state, index, page)

    def end(self, index: int, page: int) -> int:
        """How many tokens must be known for a page of a group to be."""
        return ceil_div((page + 1) * PAGE_BYTES, self.layout.groups[index].row_bytes)

    def _ends_of(self, index: int) -> Iterator[tuple[int, int, int]]:
        num_pages = len(self.tokens) * self.layout.groups[index].row_bytes // PAGE_BYTES
        for page in range(len(self.by_group[index]), num_pages):
            yield self.end(index, page), index, page


def _digest(tokens: hashlib.blake2b, index: int, page: int) -> bytes:
    tokens.update(struct.pack("<qq", index, page))  # of one length, so that no other tokens give the same bytes
    return tokens.digest()


def checksum_of(key: bytes, record: memoryview) -> int:
    """Checksum of a record and its key: another record in its place has another one."""
    return zlib.crc32(record, zlib.crc32(key))
