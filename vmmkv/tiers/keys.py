"""Keys of records: hashes over everything that must agree for bytes to be the same.

    tokens    |................|................|....|      of a prompt
    rows      |. . . . . .|. . . . . .|. . . . .|. . |      of one group of layers; they straddle pages
    records   |     0     |     1     |     2   |
    keys           key 0       key 1       key 2            each hashes all tokens up to the last row in its record

Equal keys mean equal bytes, in whatever extents or blocks the rows were laid: records side by side come back in one extent.
"""

import copy
import hashlib
import heapq
import itertools
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from fractions import Fraction
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from vmmkv.arguments import checked_name, whole, wholes
from vmmkv.layout import KVLayout
from vmmkv.tiers.record import KEY_BYTES
from vmmkv.units import PAGE_BYTES, ceil_div

_VERSION: Final = b"vmmkv records 1"


class KeyChain:
    """Keys of the records that the tokens of a prompt fill, `every` tokens each.

        chain = KeyChain("my-model@1", every=16).of(prompt)
        store.lookup(chain.keys())

    `identity` must differ between models whose bytes differ: weights, KV type, layout of a block, rank among several GPUs.
    Keys are the same in every process. They are hashed when they are asked for; a chain that has `grown` hashes none twice.
    """

    def __init__(self, identity: str | bytes, *, every: int) -> None:
        if whole("every", every) < 1:
            raise ValueError(f"every={every}: a record has the rows of 1 token at least, such as 16")
        self._begin((Fraction(every),), hashlib.blake2b(repr((identity, every)).encode(), digest_size=KEY_BYTES).digest())

    def _begin(self, every: tuple[Fraction, ...], identity: bytes) -> None:
        self.namespace: Hashable = None
        self.tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.in_order: list[bytes] = []
        """The keys that are hashed by now, in the order of the last tokens of their records."""
        self.by_group: list[list[bytes]] = [[] for _ in every]
        """Hashed keys by group and record; an empty one of a record that was skipped."""
        self._every = [(each.numerator, each.denominator) for each in every]
        self._identity = _VERSION + identity
        self._name = b""
        """Hash of the namespace."""
        self._beside: Callable[[int], bytes] = _nothing
        self._state = hashlib.blake2b(digest_size=KEY_BYTES)
        """Hash state after `_num_hashed` tokens."""
        self._num_hashed = 0
        self._ends: Iterator[tuple[int, int, int]] | None = None
        """End, group and record of each record that is not hashed yet, in order."""

    def of(self, tokens: npt.ArrayLike, namespace: Hashable = None, beside: Callable[[int], bytes] | None = None) -> Self:
        """The chain of some tokens. `namespace` separates equal tokens that must not be shared, by tenant, salt or adapter.

        `beside` gives what the first so many tokens stand for beside their ids, such as images, as bytes that the key of a
        record takes in. Of tokens that stand for nothing else these are none.

        Raises: ValueError for a namespace that other processes may spell otherwise, or tokens that are no ids; TypeError.
        """
        name = repr(checked_name("namespace", namespace)).encode()
        chain = self._with(tokens, [], [[] for _ in self.by_group])
        chain.namespace, chain._name = namespace, hashlib.blake2b(name, digest_size=KEY_BYTES).digest()
        chain._state, chain._num_hashed, chain._beside = chain._start(), 0, beside or _nothing
        return chain

    def grown(self, tokens: npt.ArrayLike) -> Self | None:
        """The chain of more tokens, with the keys that are hashed by now; None if they do not begin with these."""
        chain = self._with(tokens, self.in_order.copy(), [keys.copy() for keys in self.by_group])
        chain._state = self._state.copy()
        return chain if self.is_start_of(chain.tokens) else None

    def keys(self) -> list[bytes]:
        """The keys of all whole records, in order. Cost: some 2.5 us for each that is not hashed yet."""
        self.hash_some(None)
        return self.in_order

    def is_start_of(self, tokens: npt.NDArray[np.int32]) -> bool:
        """Do these tokens begin with the chain's?"""
        return np.array_equal(self.tokens, tokens[: len(self.tokens)])

    def skip(self, nums_records: Sequence[int]) -> None:
        """The keys of so many first records of each group are not wanted. None is hashed yet."""
        self.by_group = [[b""] * num_records for num_records in nums_records]

    def hash_some(self, num_records: int | None) -> list[tuple[int, int]]:
        """Hash the keys of so many more records, or of all; group and record of each. Cost: some 2.5 us for each."""
        if self._ends is None:
            self._ends = heapq.merge(*map(self._ends_of, range(len(self.by_group))))
        places: list[tuple[int, int]] = []
        for end, index, record in itertools.islice(self._ends, num_records):
            self._state.update(self.tokens[self._num_hashed : end].data)
            self._num_hashed = end
            self.in_order.append(self._digest(self._state.copy(), index, record))
            self.by_group[index].append(self.in_order[-1])
            places.append((index, record))
        return places

    def key(self, index: int, record: int) -> bytes:
        """The key of one record of a group. Cost: 1 us for each 1,000 tokens."""
        state = self._start()
        state.update(self.tokens[: self.end(index, record)].data)
        return self._digest(state, index, record)

    def end(self, index: int, record: int) -> int:
        """Number of tokens that must be known for a record of a group to be."""
        tokens, records = self._every[index]
        return ceil_div((record + 1) * tokens, records)

    def _with(self, tokens: npt.ArrayLike, in_order: list[bytes], by_group: list[list[bytes]]) -> Self:
        chain = copy.copy(self)
        given = tokens if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 else wholes("tokens", tokens)
        is_frozen = isinstance(given, np.ndarray) and not given.flags.writeable  # else its owner may write another prompt there
        chain.tokens = np.ascontiguousarray(given, np.int32) if is_frozen else np.array(given, np.int32)
        if given.ndim != 1 or (given.dtype != np.int32 and not np.array_equal(given, chain.tokens)):
            raise ValueError(f"tokens={tokens!r}: give one dimension of ids below 2**31, as the tokenizer does")
        chain.in_order, chain.by_group, chain._ends = in_order, by_group, None
        return chain

    def _start(self) -> hashlib.blake2b:
        return hashlib.blake2b(self._identity + self._name, digest_size=KEY_BYTES)

    def _digest(self, tokens: hashlib.blake2b, index: int, record: int) -> bytes:
        tokens.update(self._beside(self.end(index, record)))
        tokens.update(struct.pack("<qq", index, record))  # it tells how many bytes are tokens, so that no others give the same
        return tokens.digest()

    def _ends_of(self, index: int) -> Iterator[tuple[int, int, int]]:
        tokens, records = self._every[index]
        for record in range(len(self.by_group[index]), len(self.tokens) * records // tokens):
            yield self.end(index, record), index, record


class PageKeys(KeyChain):
    """Keys of the pages that the rows of a prompt fill in a cache: each record is a page of one group.

    `fingerprint` tells models apart whose layouts are alike: weights, rotary settings, static scales.
    """

    def __init__(self, layout: KVLayout, fingerprint: str) -> None:
        self.layout: Final = layout
        self._begin(tuple(Fraction(PAGE_BYTES, group.row_bytes) for group in layout.groups), layout.identity(fingerprint))


def _nothing(num_tokens: int) -> bytes:
    return b""
