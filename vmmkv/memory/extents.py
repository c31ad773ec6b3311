"""Extents: the handles of a pool, in size classes, and where they come from.

extent.holders = mappings, live or pending reclaim, + tree nodes, + loads  (0: free in its pool)
extent.users  <= holders: running sequences, acquisitions, loads           (0: free, pinned or evictable)
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from vmmkv.driver.base import Driver, Handle
from vmmkv.units import PAGE_BYTES

SIZE_CLASSES: Final = (16, 4, 1)
"""Pages in a handle, each a multiple of the next: 16 (32 MiB) and 4 for prompts that fill them; 1 for tokens that come one by
one, and where prompts part. A handle costs the same whatever its size."""


def largest_at(page: int, end_page: int) -> int:
    """Pages of the largest extent that can stand at a page, a multiple of its size, and ends by `end_page`; 1 if none does."""
    return next((size for size in SIZE_CLASSES if page % size == 0 and page + size <= end_page), 1)


@dataclass(frozen=True, slots=True)
class Tenant:
    """The last writer of an extent. Memory that passes between two different tenants is zeroed in between (law 7)."""

    cache: int
    """Number of the cache in its process."""
    phase: Hashable
    """Key of the rows' format. If two agree, old bytes are finite numbers under a new row: the group, and the row's phase if
    types mix.
    """
    name: Hashable


@dataclass(eq=False, slots=True)
class Extent:
    """One handle of a size class. Identity is what counts: two extents are never equal."""

    handle: Handle
    num_pages: int
    holders: int = 0
    users: int = 0
    """Mappings under running sequences, and acquisitions that are not mapped yet. The pool takes no used extent."""
    zeroed: bool = False
    """Are all its bytes zero? False once it is mapped for a tenant."""
    tenant: Tenant | None = None
    """Last writer; None if it was never written, or by a load, or by another process."""
    serial: int = 0
    """Number of the handle in the holder process; 0 without a holder."""
    imported: bool = True
    """False while it is only with the process that owns it, and has no handle: see `Pool.import_extents`."""
    sealed: bool = False
    """Does the holder's log name it? Then it is not written, and when nothing holds it, it leaves the pool."""
    lent: bool = False
    """May another engine have it mapped? Then it is never written, and leaves the pool when nothing holds it."""

    @property
    def shared(self) -> bool:
        """Has the extent more than one holder, here or in another engine? Then it is never written (law 3)."""
        return self.lent or self.holders > 1

    @property
    def leaves(self) -> bool:
        """Does the extent leave its pool when nothing holds it, instead of being free for others?"""
        return self.sealed or self.lent or not self.imported

    @property
    def size_bytes(self) -> int:
        """Bytes of the handle."""
        return self.num_pages * PAGE_BYTES

    def must_be_zeroed_for(self, tenant: Tenant) -> bool:
        """May the extent's bytes be another tenant's, or undefined?"""
        return not self.zeroed and self.tenant != tenant


class Owner(Protocol):
    """Another process that owns handles of a pool's extents: a holder process."""

    @property
    def path(self) -> Path:
        """Path of its socket."""

    @property
    def budget_bytes(self) -> int:
        """Most bytes that it may own."""

    @property
    def has_prefixes(self) -> bool:
        """Does it keep the prefixes of a cache of this process?"""

    def is_gone(self) -> bool:
        """Has it ended?"""


class ExtentSource:
    """Source of the handles of a pool's extents. This is the device; `vmmkv.holder.source` overrides it.

    The caller holds the pool's lock.
    """

    holder: Owner | None = None
    """The process that owns what is created; None if this one does."""
    lender: Owner | None = None
    """The process that owns what another engine lends; None without."""
    borrowed_bytes = 0
    """Bytes of extents here that are another engine's."""

    def __init__(self, driver: Driver) -> None:
        self._driver: Final = driver

    def check_budget(self, budget_bytes: int) -> None:
        """Check that the source may give so much. Raises: BudgetError. A device says at `create` what it lacks."""

    def create(self, num_pages: int) -> Extent | None:
        """A new extent that nothing holds; None if the source has just ended.

        Cost: a create. Raises: DriverError, of the kinds OutOfDeviceMemory and OutOfDescriptors.
        """
        return Extent(self._driver.create(num_pages * PAGE_BYTES), num_pages, zeroed=self._driver.creates_zeroed)

    def import_handles(self, extents: Sequence[Extent]) -> None:
        """Import extents that are not here yet, as far as their owner has them. Raises: OutOfDescriptors, DriverError."""

    def release(self, extent: Extent) -> None:
        """Give up an extent that nothing holds. Cost: a release. Raises: DriverError, and then its handle is still there."""
        if extent.imported:
            self._driver.release(extent.handle)

    def text_if_ended(self) -> str | None:
        """Cause for which nothing can be created any more, and the way out; None while something can."""
        return None

    def check(self, extents: Sequence[Extent]) -> None:
        """Check that these are all extents that were created; AssertionError if not."""

    def close(self) -> None:
        """End what is open to other processes. Idempotent."""
