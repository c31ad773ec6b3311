"""The pool: every extent of a device's budget, free or held, shared by the caches that take it.

    created = free + held <= budget        (law 1; in bytes, over all size classes)
    held = used + pinned + evictable       (evictable: pending reclaim, parked, or in a prefix tree alone)

Only the pool has handles created and released, by its source: the device, or a holder process. When it runs short it takes
pages from its caches in this order: reclaimed memory whose fence has passed; the least recently used parked slot or leaf of a
prefix tree; and at last it waits for a fence. A parked slot whose work still runs is no sooner free than memory that is pending
reclaim: it is evicted only if that is too little.
"""

import contextlib
import itertools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from vmmkv.arguments import whole
from vmmkv.driver import open_driver
from vmmkv.driver.base import ADDRESS_SPACE_BYTES, Access, Driver, Handle
from vmmkv.errors import BudgetError, Closed, DriverError, GraphCapture, OutOfDescriptors, OutOfDeviceMemory, OutOfPages
from vmmkv.lifetime import Closing, Unique
from vmmkv.memory.extents import SIZE_CLASSES, Extent, ExtentSource, Owner
from vmmkv.memory.transaction import TransactionLock
from vmmkv.units import PAGE_BYTES, ceil_div, counted, format_bytes

_MOST_IDLE: Final = 1 / 32
"""Share of the budget up to which free extents of other size classes stay, and idle memory is evicted instead.

To give a free one back and create it anew takes two calls, and zeroes.
"""


class Evictable(NamedTuple):
    """The least recently used parked slot of a cache, or leaf of its prefix tree."""

    stamp: int
    """The pool's clock when it was parked, or last used."""
    idle: bool
    """Is all work done that may touch it? Then its pages are free at once."""
    evict: Callable[[], None]
    """Evict it: its mapped pages are reclaimed, the others are free at once."""


class Reclaimer:
    """Memory that can be given back: a cache's slots, or its prefix tree. This one has none. The pool's lock is held."""

    @property
    def pending_pages(self) -> int:
        """Pages that wait for a fence, to be unmapped."""
        return 0

    def idle_pages(self, enough: int) -> int:
        """Pages that can be evicted and that no running work may touch; counted no further than `enough`."""
        return 0

    def unevictable_bytes(self) -> int:
        """Bytes that no running sequence uses, and that are not evicted either."""
        return 0

    def pinned_extents(self) -> set[Extent]:
        """Unused extents that pins keep."""
        return set()

    def oldest_evictable(self) -> Evictable | None:
        """The candidate for eviction that it used least recently; None for none."""
        return None

    def collect(self, budget_us: float = float("inf"), max_pages: float = float("inf")) -> int:
        """Unmap reclaimed memory whose fence has passed; the pages. Never blocks."""
        return 0

    def wait_for_reclaim(self) -> bool:
        """Block until the oldest fence of reclaimed memory has passed; False if there is none."""
        return False

    def holders(self) -> Counter[Extent]:
        """Holds of each extent, recounted from scratch."""
        return Counter()

    def users(self) -> Counter[Extent]:
        """Uses of each extent, recounted from scratch."""
        return Counter()


class NullPage:
    """One page of zeroes, mapped read-only under slot 0 of every arena of a pool; beyond the budget.

    A view of a whole arena begins at slot 0, and its `data_ptr` must be mapped though most of the view is not: Triton's
    launcher asks the driver about every pointer argument and refuses one that it does not know ("cannot be accessed from
    Triton (cpu tensor?)"). So no sequence ever runs in slot 0, and padding rows of a batch point to it. A write to it faults.
    """

    def __init__(self, driver: Driver) -> None:
        self.handle: Handle | None = None
        self._driver = driver
        self._is_zero = driver.creates_zeroed
        self._addresses: list[int] = []

    def map(self, address: int) -> None:
        """Map the null page at an address, read-only. On failure it is not there, or goes with `close`.

        Cost: a map and an access call; the first time a create, a zero and another access call.
        """
        driver = self._driver
        if self.handle is None:
            self.handle = driver.create(PAGE_BYTES)
        driver.map(address, self.handle, PAGE_BYTES)
        self._addresses.append(address)
        try:
            if not self._is_zero:
                driver.set_access(address, PAGE_BYTES, Access.READ_WRITE)
                driver.zero(address, PAGE_BYTES)
                driver.synchronize()
                self._is_zero = True
            driver.set_access(address, PAGE_BYTES, Access.READ)
        except BaseException:
            with contextlib.suppress(DriverError):
                self.unmap(address, address + PAGE_BYTES)
            raise

    def unmap(self, start: int, end: int) -> None:
        """Unmap the null page in the addresses [start, end), once no launch reads it. Cost: an unmap each. Idempotent."""
        for address in [address for address in self._addresses if start <= address < end]:
            self._driver.unmap(address, PAGE_BYTES)
            self._addresses.remove(address)

    def close(self) -> None:
        """Unmap the null page wherever it still is, and release it. Idempotent."""
        self.unmap(0, ADDRESS_SPACE_BYTES)
        if self.handle is not None:
            self._driver.release(self.handle)
            self.handle = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """A pool at one moment, in bytes, and its driver's successful calls by name."""

    budget_bytes: int
    created_bytes: int
    held_bytes: int
    used_bytes: int
    """Bytes held by running sequences, once however many share them."""
    free_bytes: int
    driver_calls: dict[str, int]


class Pool(Closing, Unique):
    """Physical memory for KV caches on one device, up to `budget_bytes`. Several caches can share it.

    `device` is anything torch takes: "cuda:0" for a GPU's memory, "cpu" for host memory. Memory is allocated when it is
    needed. Freed memory stays with the pool for later use, until `resize` or `close` gives it back to the device. The pool
    takes one page (2 MiB) beyond the budget: the null page.

    With `holder`, the socket of a `vmmkv hold`, that process owns the memory, and prefixes outlive this one: see
    `PrefixCache`, which must be made before sequences grow. Allocating then takes a round trip more. If the holder ends, the
    memory allocated so far stays usable, and there is no more.

    With `lender`, the socket of another engine's holder, the `PrefixCache` borrows prefixes that the other engine has sealed:
    their memory is mapped here too, read-only, and counts in both budgets.

    Close it, or use it in a `with` block, after the work that uses it has been launched.

    Raises: BudgetError for a budget below one page, beyond all addresses of a process, or above the holder's;
    HolderUnavailable; DriverUnavailable, of the kind that says what is missing.
    In a child made by fork() every operation of the pool and of its caches raises ForkedProcess.
    """

    def __init__(
        self,
        device: str | torch.device,
        budget_bytes: int,
        *,
        driver: Driver | None = None,
        holder: str | os.PathLike[str] | None = None,
        lender: str | os.PathLike[str] | None = None,
    ) -> None:
        budget_bytes = _checked_budget(budget_bytes)
        self.driver: Final = open_driver(device) if driver is None else driver
        self.device: Final = self.driver.device
        self.lock: Final = TransactionLock()
        """Taken by every operation of the pool and of its caches: one thread at a time calls the driver."""
        self.source: Final = _open_source(self.driver, budget_bytes, holder, lender)
        """Internal: where its extents come from."""
        self.budget_bytes = budget_bytes
        self.created_bytes = 0
        self.held_bytes = 0
        self._used_bytes = 0
        self.closed = False
        self.null_page: Final = NullPage(self.driver)
        self._free: dict[int, list[Extent]] = {num_pages: [] for num_pages in SIZE_CLASSES}
        self.caches: list[Closing] = []
        """Internal: the slots of open caches."""
        self.reclaimers: list[Reclaimer] = []
        """Internal: what can give memory back, of open caches."""
        self._clock = 0

    # extents

    @property
    def holder(self) -> Owner | None:
        """The process that owns this pool's memory; None if this one does."""
        return self.source.holder

    @property
    def lender(self) -> Owner | None:
        """The process that owns the memory of an engine whose prefixes this one borrows; None without."""
        return self.source.lender

    @property
    def borrowed_bytes(self) -> int:
        """Bytes that are created and are another engine's memory."""
        return self.source.borrowed_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes held by running sequences, and so not evictable. Raises: ForkedProcess in a child."""
        self.lock.check_process()
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes created and not held."""
        return self.created_bytes - self.held_bytes

    def acquire(self, count: int, num_pages: int = 1, *, wait: bool = True) -> list[Extent]:
        """`count` extents of `num_pages` each, with the caller as their one holder and user; all of them or none.

        Takes free extents first, newest first, then creates, then reclaims from the caches, or gives free ones of other classes
        back. The caller holds the lock.
        Cost: one create for each extent that is not free, or an unmap for each page reclaimed: no more than are missing.
        Blocks on a fence only if `wait` is set and nothing else is left; without it, nothing that running work may still
        touch is reclaimed.
        Raises: OutOfPages, naming pages wanted, free and evictable; DriverError. Either leaves the pool as it was,
        but for parked slots that were evicted to make room.
        """
        return self.acquire_mixed({num_pages: whole("count", count)}, wait=wait)[num_pages]

    def acquire_mixed(self, counts: Mapping[int, int], *, wait: bool = True) -> dict[int, list[Extent]]:
        """Acquire extents of several size classes at once: `counts` by pages of an extent. All of them or none."""
        self.check_open()
        self._check_feasible(counts, wait=wait)
        taken: dict[int, list[Extent]] = {num_pages: [] for num_pages in counts}
        created: set[Extent] = set()
        try:
            for num_pages, extents in taken.items():
                while missing := counts[num_pages] - len(extents):
                    self._take(num_pages, missing, extents, created, wait=wait)
        except BaseException:
            for extent in reversed([extent for extents in taken.values() for extent in extents]):
                self._put_back(extent)
                if extent in created:
                    with contextlib.suppress(DriverError):  # then it stays free, which is within the budget too
                        self._destroy_newest(extent.num_pages)
            raise
        return taken

    def check_room(self, num_pages: int, remedy: str, *, later_pages: int = 0) -> None:
        """Could so many pages be had, perhaps when running work is done? Takes none.

        `remedy` is what works besides a larger budget; `later_pages` more will be asked for, and are named with the others.
        Raises: OutOfPages.
        """
        free, evictable = self.spare_pages, self.kept_pages
        if num_pages > free + evictable:
            wanted = num_pages + later_pages
            least_bytes = self.budget_bytes + (wanted - free - evictable) * PAGE_BYTES
            raise OutOfPages(
                f"{_needed(wanted)} needed, {free} are free and {evictable} can be evicted{self._about_pins()}; resize() the "
                f"budget to at least {least_bytes} bytes ({format_bytes(least_bytes)}), {remedy}"
            )

    def hold(self, *extents: Extent) -> None:
        """One more holder of each; they are held already."""
        for extent in extents:
            assert extent.holders > 0, "a free extent is acquired, not held"
            extent.holders += 1

    def use(self, *extents: Extent) -> None:
        """Add a user, one of its holders, to each extent: a used extent is not evicted."""
        for extent in extents:
            assert extent.holders > extent.users, "only a holder uses an extent"
            extent.users += 1
            if extent.users == 1:
                self._used_bytes += extent.size_bytes

    def unuse(self, *extents: Extent) -> None:
        """Take a user from each extent; the user goes on holding it."""
        for extent in extents:
            assert extent.users > 0, "an extent was given up more often than used"
            extent.users -= 1
            if extent.users == 0:
                self._used_bytes -= extent.size_bytes

    def drop(self, extent: Extent) -> None:
        """Take a holder from an extent, which does not use it, or is the last one; that frees it. No driver call."""
        assert extent.holders > 0, "an extent was dropped more often than held"
        if extent.holders == 1:
            self._put_back(extent)
        else:
            extent.holders -= 1

    # the budget

    def resize(self, budget_bytes: int) -> None:
        """Give memory back to the device while running, or take more from now on.

        Shrinking releases free extents, after unmapping reclaimed memory and evicting parked slots, oldest first, as
        far as is needed. With 0 all goes back but the null page, until the next call; addresses stay.
        Cost: a release for each extent given back; may block on the fences of reclaimed memory.
        Raises: BudgetError, naming the least that works now, and then nothing has changed.
        """
        with self.lock:
            self.check_open()
            self.check_capture()
            budget_bytes = _checked_budget(budget_bytes, may_be_zero=True)
            self.source.check_budget(budget_bytes)
            least_bytes = self._used_bytes + sum(each.unevictable_bytes() for each in self.reclaimers)
            if budget_bytes < least_bytes:
                raise BudgetError(
                    f"budget_bytes={format_bytes(budget_bytes)} is less than the {format_bytes(least_bytes)} that running "
                    f"sequences hold or share, that tiers load into, or that is pinned; close, park or unpin some, give "
                    f"fetches up, or ask for at least {least_bytes} bytes"
                )
            self.shrink_to(budget_bytes)
            self.budget_bytes = budget_bytes

    def shrink_to(self, budget_bytes: int) -> None:
        """Internal: give back and evict until no more is created. The caller holds the lock."""
        while self.created_bytes > budget_bytes:
            excess_pages = ceil_div(self.created_bytes - budget_bytes, PAGE_BYTES)
            shrunk = self._destroy_any_free() or self._reclaim(excess_pages, wait=True)
            assert shrunk, "more is held than is used, pinned or on the way to either"

    def close(self) -> None:
        """Close the caches of this pool that are still open, then release every handle. Idempotent.

        Cost: as `KVCache.close` for each cache; a release for each handle.
        Raises: DriverError, and then it can be called again; GraphCapture.
        """
        while not self._close_if_unused():
            with contextlib.ExitStack() as closing:  # all of them, whether or not one fails
                for cache in list(self.caches):
                    closing.callback(cache.close)

    def _close_if_unused(self) -> bool:
        with self.lock:
            if self.closed:
                return True
            if self.caches:
                return False
            self.check_capture()
            while self._destroy_any_free():
                pass
            assert not self.created_bytes, "no cache is open, and yet extents are held"
            self.null_page.close()
            self.source.close()
            self.closed = True
            return True

    def stats(self) -> PoolStats:
        """The pool at this moment."""
        with self.lock:
            return PoolStats(
                budget_bytes=self.budget_bytes,
                created_bytes=self.created_bytes,
                held_bytes=self.held_bytes,
                used_bytes=self._used_bytes,
                free_bytes=self.free_bytes,
                driver_calls=dict(self.driver.calls),
            )

    def tick(self) -> int:
        """The next moment of the pool's clock, by which slots of all its caches are ordered."""
        self._clock += 1
        return self._clock

    # laws

    def check(self) -> None:
        """Recount law 1 from what the caches hold; AssertionError says how it is broken."""
        with self.lock:
            held = sum((each.holders() for each in self.reclaimers), Counter[Extent]())
            free = [extent for extents in self._free.values() for extent in extents]
            assert all(extent.holders == count for extent, count in held.items()), "an extent's holders are miscounted"
            assert all(extent.holders == 0 for extent in free), "a free extent has a holder"
            assert len(set(free)) == len(free), "an extent is free twice"
            used = sum((each.users() for each in self.reclaimers), Counter[Extent]())
            assert all(extent.users == used[extent] for extent in held), "an extent's users are miscounted"
            assert self._used_bytes == sum(extent.size_bytes for extent in used), "used bytes are miscounted"
            assert self.held_bytes == sum(extent.size_bytes for extent in held), "held bytes are miscounted"
            assert self.free_bytes == sum(extent.size_bytes for extent in free), "free bytes are miscounted"
            assert self.created_bytes <= self.budget_bytes, "the budget is exceeded"
            calls = self.driver.calls
            null_pages = self.null_page.handle is not None
            handles = calls["create"] + calls["import_fd"] - calls["release"]
            known = [extent for extent in (*free, *held) if extent.imported]
            assert null_pages + len(known) <= handles, "a handle was lost"
            assert not any(extent.leaves for extent in free), "a free extent is sealed, lent, or not here"
            self.source.check([*free, *held])

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and (self.created_bytes or self.null_page.handle is not None):
            warnings.warn(f"a Pool holding {format_bytes(self.created_bytes)} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        if self.closed:
            return f"<Pool on {self.device}, closed>"
        free, budget = format_bytes(self.budget_bytes - self.held_bytes), format_bytes(self.budget_bytes)
        return f"<Pool on {self.device}: {counted(len(self.caches), 'cache')}, {free} of {budget} free>"

    # Internal interface, for the caches: the caller holds the lock.

    def take_in(self, extent: Extent) -> None:
        """Count an extent that was created elsewhere, and is held once. The budget may be passed, until `shrink_to`."""
        self.created_bytes += extent.size_bytes
        self.held_bytes += extent.size_bytes

    def extents(self) -> set[Extent]:
        """Created extents, all of them, recounted from scratch."""
        return {*itertools.chain(*self._free.values(), *(each.holders() for each in self.reclaimers))}

    def import_extents(self, extents: Sequence[Extent]) -> list[Extent]:
        """Import extents that are not here yet; those that their owner does not have, or has in another size, are returned.

        Cost: a round trip for each 128, and an import for each.
        Raises: OutOfPages, if the process may open no more files; DriverError. Those imported before stay.
        """
        missing = [extent for extent in extents if not extent.imported]
        while missing:
            try:
                self.source.import_handles(missing)
                break
            except OutOfDescriptors as error:
                if not self._destroy_any_free():
                    raise OutOfPages(str(error)) from error
        return [extent for extent in missing if not extent.imported]

    def make_room(self, num_pages: int, room_pages: int) -> bool:
        """Give free extents back and evict what is idle, until `num_pages` may be borrowed; False if that is too little.

        Nothing is evicted if fewer pages than either number are free or evictable.
        """
        if max(num_pages, room_pages) > self.spare_pages + self.kept_pages:
            return False
        while (excess_bytes := self.created_bytes + num_pages * PAGE_BYTES - self.budget_bytes) > 0:
            if not (self._destroy_any_free() or self._reclaim(ceil_div(excess_bytes, PAGE_BYTES), wait=False)):
                return False
        return True

    def check_open(self) -> None:
        """Check that the pool is open. Raises: Closed after `close`."""
        if self.closed:
            raise Closed("this pool is closed")

    def check_capture(self, streams: Sequence[torch.Stream] = ()) -> None:
        """Check that neither the caller's current stream nor any of `streams` is being captured. Cost: 1 us on CUDA.

        Raises: GraphCapture.
        """
        if self.driver.is_capturing(streams):
            raise GraphCapture(
                "a CUDA graph is being captured, and memory can be neither mapped nor reclaimed: nothing has changed; "
                "grow before the capture begins, and truncate, park or close when it has ended"
            )

    @property
    def spare_pages(self) -> int:
        """Pages that can be acquired without taking any from a cache."""
        return (self.budget_bytes - self.held_bytes) // PAGE_BYTES

    def _pending_pages(self) -> int:
        return sum(each.pending_pages for each in self.reclaimers)

    @property
    def kept_pages(self) -> int:
        """Evictable pages, though some perhaps only when running work is done. Cost: grows with what is pinned."""
        return (self.held_bytes - self._used_bytes) // PAGE_BYTES - self._pinned_pages()

    def _pinned_pages(self) -> int:
        return sum(extent.num_pages for extent in self._pinned_extents())

    def _pinned_extents(self) -> Iterator[Extent]:
        return itertools.chain.from_iterable(each.pinned_extents() for each in self.reclaimers)

    def _about_pins(self) -> str:
        """The part of a message about missing pages that names the pages that pins keep."""
        num_pages = self._pinned_pages()
        return f"; pins keep {counted(num_pages, 'page')}, which unpin() would free" if num_pages else ""

    def _idle_pages(self, enough: int) -> int:
        num_pages = 0
        for each in self.reclaimers:
            if num_pages < enough:
                num_pages += each.idle_pages(enough - num_pages)
        return num_pages

    def _check_feasible(self, counts: Mapping[int, int], *, wait: bool) -> None:
        """Refuse before anything is evicted for nothing."""
        for num_pages, count in counts.items():
            if count < 0 or num_pages not in SIZE_CLASSES:
                raise ValueError(f"{count} extents of {num_pages} pages: the count is at least 0, the pages are {SIZE_CLASSES}")
        wanted, free = sum(num_pages * count for num_pages, count in counts.items()), self.spare_pages
        if wanted <= free:
            return
        evictable = self.kept_pages
        if not wait and free + (at_once := self._idle_pages(wanted - free)) < wanted <= free + evictable:
            raise OutOfPages(
                f"{_needed(wanted)} needed at once, {free} are free and {at_once} can "
                f"be evicted; {evictable - at_once} are pending reclaim or parked behind running work: wait for it"
            )
        self.check_room(wanted, "close or park sequences, or ask for fewer tokens")

    def _take(self, num_pages: int, missing: int, taken: list[Extent], created: set[Extent], *, wait: bool) -> None:
        """Take one of the missing extents, free or created, or go one step towards it."""
        size_bytes = num_pages * PAGE_BYTES
        if self._free[num_pages]:
            extent = self._free[num_pages].pop()
        elif (text := self.source.text_if_ended()) is not None:
            self._reclaim_what_is_here(num_pages, missing, text, wait=wait)
            return
        elif self.created_bytes + size_bytes <= self.budget_bytes:
            try:
                new = self.source.create(num_pages)
            except (OutOfDeviceMemory, OutOfDescriptors) as error:
                if self._destroy_any_free() or self._reclaim(missing * num_pages, wait=wait):
                    return
                raise OutOfPages(
                    f"there is no memory left below this pool's budget of {format_bytes(self.budget_bytes)} "
                    f"({format_bytes(self.created_bytes)} created): {error}{self._about_pins()}; lower budget_bytes "
                    "or close sequences"
                ) from error
            if new is None:
                return
            extent = new
            self.created_bytes += size_bytes
            created.add(extent)
        elif self._give_way(missing * num_pages, wait=wait):
            return
        else:
            raise OutOfPages(
                f"an extent of {num_pages} pages does not fit: {format_bytes(self.budget_bytes - self.held_bytes)} of the "
                f"budget are not held; of {self.kept_pages} evictable pages {self._pending_pages()} are pending reclaim, the "
                f"others in need{self._about_pins()}; raise budget_bytes by at least {format_bytes(size_bytes)}, or wait for "
                f"running work"
            )
        extent.holders = extent.users = 1
        self.held_bytes += size_bytes
        self._used_bytes += size_bytes
        taken.append(extent)

    def _reclaim_what_is_here(self, num_pages: int, missing: int, text_if_ended: str, *, wait: bool) -> None:
        """One step towards `missing` more free extents of a class, when the source has ended: only evicted ones come.

        Raises: OutOfPages, before anything is evicted for nothing.
        """
        kept = {extent for each in self.reclaimers for extent in each.holders()}.difference(self._pinned_extents())
        evictable = sum(extent.num_pages == num_pages for extent in kept if extent.imported and not extent.users)
        if evictable < missing or not self._reclaim(missing * num_pages, wait=wait):
            raise OutOfPages(
                f"{counted(missing, 'extent')} of {counted(num_pages, 'page')} needed, {evictable} can be evicted, and "
                f"{text_if_ended}{self._about_pins()}"
            )

    def _put_back(self, extent: Extent) -> None:
        if extent.users:
            self._used_bytes -= extent.size_bytes
        extent.holders = extent.users = 0
        self.held_bytes -= extent.size_bytes
        if extent.leaves:
            self.created_bytes -= extent.size_bytes
            self.source.release(extent)
        else:
            self._free[extent.num_pages].append(extent)

    def _destroy_newest(self, num_pages: int) -> None:
        """Give the newest free extent of a class back to the device; if that fails it stays free, and is not lost."""
        extent = self._free[num_pages][-1]
        self.source.release(extent)
        self._free[num_pages].pop()
        self.created_bytes -= extent.size_bytes

    def _destroy_any_free(self) -> bool:
        """Give one free extent back, of the smallest class that has one."""
        for num_pages in reversed(SIZE_CLASSES):
            if self._free[num_pages]:
                self._destroy_newest(num_pages)
                return True
        return False

    def _give_way(self, num_pages: int, *, wait: bool) -> bool:
        """One step towards `num_pages` of a class that has none free, within what is created."""
        if self.free_bytes <= _MOST_IDLE * self.budget_bytes and self._reclaim(num_pages, wait=False):
            return True
        return self._destroy_any_free() or self._reclaim(num_pages, wait=wait)

    def _reclaim(self, num_pages: int, *, wait: bool) -> bool:
        """One step towards `num_pages` more free ones: False when there is none left to take."""
        num_unmapped = 0
        for each in self.reclaimers:
            if num_unmapped < num_pages:
                num_unmapped += each.collect(max_pages=num_pages - num_unmapped)
        if num_unmapped:
            return True
        kept = [oldest for each in self.reclaimers if (oldest := each.oldest_evictable()) is not None]
        oldest = min((each for each in kept if wait or each.idle), key=lambda each: each.stamp, default=None)
        if oldest is not None and (oldest.idle or self._pending_pages() < num_pages):
            oldest.evict()
            return True
        return wait and any(each.wait_for_reclaim() for each in self.reclaimers)


def _open_source(
    driver: Driver, budget_bytes: int, holder: str | os.PathLike[str] | None, lender: str | os.PathLike[str] | None
) -> ExtentSource:
    if holder is None and lender is None:
        return ExtentSource(driver)
    from vmmkv.holder.source import open_source

    return open_source(driver, budget_bytes, holder=holder, lender=lender)


def _needed(num_pages: int) -> str:
    return f"{counted(num_pages, 'page')} ({format_bytes(num_pages * PAGE_BYTES)}) {'is' if num_pages == 1 else 'are'}"


def _checked_budget(budget_bytes: int, *, may_be_zero: bool = False) -> int:
    budget_bytes = whole("budget_bytes", budget_bytes)
    if budget_bytes < PAGE_BYTES and (budget_bytes or not may_be_zero):
        raise BudgetError(
            f"budget_bytes={budget_bytes} is below one page; the least is {PAGE_BYTES} ({format_bytes(PAGE_BYTES)})"
        )
    if budget_bytes > ADDRESS_SPACE_BYTES:
        raise BudgetError(
            f"budget_bytes={budget_bytes} is more than the {format_bytes(ADDRESS_SPACE_BYTES)} that a process has addresses for"
        )
    return budget_bytes
