"""Guests: sequences that come with a prompt and end, whose memory is what is given back, taken again, or handed over.

A prompt is taken as written when its memory is there. To see that the memory is everyone's own, each guest writes its mark
into every row, and all are read when all are written.
"""

import enum
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.settings import Shape
from bench.timing import WrongNumbers
from vmmkv import KVCache, PrefixCache, Sequence

_MARKS: Final = 251
"""Marks are whole numbers from 1 to this, which every dtype of K and V holds exactly."""
_VOCABULARY: Final = 100_000


class Kept(enum.Enum):
    """What becomes of a guest's memory at its end."""

    FREE = "free"
    """Unmapped, and free in the pool."""
    PARKED = "parked"
    """Under the slot as it was, to be adopted."""
    TREE = "in a prefix tree"
    """Unmapped, but for its last page held by the tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A sequence, the tokens that it comes with, and what it writes."""

    sequence: Sequence
    tokens: npt.NDArray[np.int32]
    mark: int

    @property
    def is_in(self) -> bool:
        """Is memory there for its whole prompt?"""
        return self.sequence.limit >= len(self.tokens)


class Guests:
    """The guests of one cache, who all end in the same way. `salt` tells the marks of two caches apart: 0 or 1."""

    def __init__(self, cache: KVCache, shape: Shape, kept: Kept, rng: np.random.Generator, *, salt: int = 0) -> None:
        self.cache = cache
        self._shape, self._kept, self._rng = shape, kept, rng
        self._prefix = PrefixCache(cache) if kept is Kept.TREE else None
        self._next_mark = salt
        self._parked: dict[Hashable, tuple[int, int]] = {}
        """By the stamp of a parked slot, its rows and their mark."""

    def open(self, num_tokens: int) -> Guest:
        """A new one, without memory; its tokens are nobody else's."""
        tokens = self._rng.integers(_VOCABULARY, size=num_tokens, dtype=np.int32)
        if self._prefix is None:
            sequence = self.cache.open(max_tokens=num_tokens)
        else:
            sequence = self._prefix.attach(tokens, max_tokens=num_tokens).sequence
        self._next_mark += 2
        return Guest(sequence=sequence, tokens=tokens, mark=1 + self._next_mark % _MARKS)

    def write(self, guests: Iterable[Guest]) -> None:
        """Each its mark, into every row of the first and the last layer."""
        for guest in guests:
            for layer in self._layers():
                self.cache.k(layer)[guest.sequence.slot, : len(guest.tokens)].fill_(guest.mark)

    def check(self, guests: Iterable[Guest]) -> None:
        """Is all of it there? Raises WrongNumbers."""
        for guest in guests:
            self._check_rows(guest.sequence.slot, len(guest.tokens), guest.mark)

    def check_parked(self) -> None:
        """Have the parked slots that are left what their guests wrote? Raises WrongNumbers."""
        for parked in self.cache.parked():
            self._check_rows(parked.slot, *self._parked[parked.stamp])

    def end(self, guests: Iterable[Guest]) -> None:
        """They are over, the eldest first."""
        for guest in guests:
            if self._prefix is not None:
                self._prefix.release(guest.sequence, guest.tokens)
            elif self._kept is Kept.PARKED:
                parked = guest.sequence.park()
                self._parked[parked.stamp] = parked.length, guest.mark
            else:
                guest.sequence.close()

    def forget(self) -> None:
        """Nothing is kept of any guest that has ended."""
        for parked in self.cache.parked():
            self.cache.evict(parked)
        if self._prefix is not None:
            self._prefix.evict()
        self._parked.clear()
        self.cache.drain()

    def _layers(self) -> set[int]:
        return {0, self._shape.layers - 1}

    def _check_rows(self, slot: int, num_tokens: int, mark: int) -> None:
        for layer in self._layers():
            if not (self.cache.k(layer)[slot, :num_tokens] == mark).all():
                raise WrongNumbers(f"rows [0, {num_tokens}) of slot {slot} in layer {layer} are not what its guest wrote")
