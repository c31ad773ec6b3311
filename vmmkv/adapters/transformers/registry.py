"""The numbers by which compiled graphs, and keys on their way to attention, refer to a cache."""

import itertools
import weakref
from typing import Protocol

from torch import Tensor


class AttendedCache(Protocol):
    """The methods of a VmmCache that attention calls; see there for shapes and errors."""

    def append(self, k_BKTD: Tensor, v_BKTD: Tensor, layer: int, num_past: int | None = None) -> tuple[Tensor, Tensor]:
        """New rows, where a graph runs that `num_past` tokens went before."""

    def turned(self, layer: int, new_BHTD: Tensor) -> Tensor:
        """Queries of new tokens at the rows that they see."""

    def attended(
        self, layer: int, q_BHND: Tensor, k_BKTD: Tensor, scale: float | None, softcap: float | None, *, is_plain: bool
    ) -> None:
        """A layer has attended, which the cache's policy sees."""


_caches: weakref.WeakValueDictionary[int, AttendedCache] = weakref.WeakValueDictionary()
_numbers = itertools.count(2)  # a graph takes 0 and 1 for constants


def enter(cache: AttendedCache) -> int:
    """Number a cache. The number keeps no cache alive."""
    number = next(_numbers)
    _caches[number] = cache
    return number


def cache(number: int) -> AttendedCache:
    """The cache of a number."""
    return _caches[number]
