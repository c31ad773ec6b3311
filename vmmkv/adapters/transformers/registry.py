"""The numbers by which compiled graphs, and keys on their way to attention, refer to a cache."""

import itertools
import weakref

from torch import Tensor


class AttendedCache:
    """A cache, as attention calls it. Subclasses override `append`, and the other two if they observe queries.

    Legend: B rows of the batch; H heads of queries or keys; K kv heads; N queries; T tokens; D head dim.
    """

    def append(self, k_BKTD: Tensor, v_BKTD: Tensor, layer: int, num_past: int | None = None) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values of new tokens; returns those that the tokens see.

        `num_past`: the number of tokens before them that a graph was made for.
        """
        raise NotImplementedError

    def turned(self, layer: int, new_BHTD: Tensor) -> Tensor:
        """Queries or keys of new tokens, turned to the positions of the rows held. By default as they are."""
        return new_BHTD

    def attended(
        self, layer: int, q_BHND: Tensor, k_BKTD: Tensor, scale: float | None, softcap: float | None, *, is_plain: bool
    ) -> None:
        """Observe the queries with which a layer has attended to the keys. By default nothing is done.

        `is_plain`: there was no mask but the causal one, with or without a window.
        """


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
