"""Extents, the handles that a pool lends; for whom they are; and what a pool asks of those that it lends them to.

extent.holders = mappings, live or retiring, + other holders        (0: free in its pool)
extent.users  <= those of them that nobody can be asked to give up    (0: free, retiring, or kept as cache)
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from vmmkv.driver.base import Handle
from vmmkv.units import PAGE_BYTES

LARGE_PAGES: Final = 16

SIZE_CLASSES: Final = (1, LARGE_PAGES)
"""Pages in a handle: 1 for tokens that come one by one, and where prompts part; 16 (32 MiB) for prompts that fill them, since a
handle costs the same whatever its size."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who wrote an extent last: memory that passes between two different tenants is zeroed in between (law 7)."""

    cache: int
    """Which cache of the process."""
    phase: Hashable
    """What must agree for old bytes to be finite numbers under a new row: the group, and the row's phase if types mix."""
    name: Hashable


@dataclass(eq=False, slots=True)
class Extent:
    """One handle of a size class. Identity is what counts: two extents are never equal."""

    handle: Handle
    num_pages: int
    holders: int = 0
    users: int = 0
    """Mappings under running sequences, pins, and whoever has acquired it and not yet mapped it."""
    zeroed: bool = False
    """Nothing but zeroes, since it was created or zeroed. False once it is mapped for a tenant."""
    tenant: Tenant | None = None
    """Who wrote it last; None for nobody."""

    @property
    def shared(self) -> bool:
        """Has it more than one holder? Then nobody writes to it (law 3)."""
        return self.holders > 1

    @property
    def size_bytes(self) -> int:
        """Bytes of the handle."""
        return self.num_pages * PAGE_BYTES

    def must_be_zeroed_for(self, tenant: Tenant) -> bool:
        """May its bytes be somebody else's, or undefined?"""
        return not self.zeroed and self.tenant != tenant


class Evictable(NamedTuple):
    """What a cache can do without first: a parked slot, or a leaf of a prefix tree."""

    stamp: int
    """The pool's clock when it was parked, or last used."""
    idle: bool
    """Is all work done that may touch it? Then its pages are free at once."""


class Reclaimable(Protocol):
    """What a pool asks of each of its caches when pages run short. All calls come with the pool's lock held."""

    def retiring_pages(self) -> int:
        """Pages that will be free when their fences have passed."""
        ...

    def idle_pages(self, enough: int) -> int:
        """Pages that are retiring or kept as cache and that no running work may touch; counted no further than `enough`."""
        ...

    def oldest_evictable(self) -> Evictable | None:
        """What was used least recently of all that is kept as cache, if anything is."""
        ...

    def evict_oldest(self) -> None:
        """Give that up: its mappings retire, what is not mapped is free at once."""
        ...

    def collect(self, num_pages: int) -> int:
        """Unmap what has retired and whose fence has passed, until `num_pages` are; how many were. Never blocks."""
        ...

    def wait_for_retired(self) -> bool:
        """Block until the oldest retirement's fence has passed; False if there is none."""
        ...

    def close_all(self) -> None:
        """Close the cache, unmap everything and detach it from its pool. Called without the lock. Idempotent."""
        ...

    def holders(self) -> Counter[Extent]:
        """Recounted from scratch: how often this cache holds each extent."""
        ...

    def users(self) -> Counter[Extent]:
        """Recounted from scratch: how many of these holders use it."""
        ...
