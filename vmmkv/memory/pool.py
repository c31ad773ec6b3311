"""The pool: every extent of a device's budget, free or held, shared by the caches that take it.

    created = free + held <= budget        (law 1; in bytes, over all size classes)
    held = used + kept                     (kept: retiring, parked or in a prefix tree, and to be had under pressure)

The pool alone creates and releases handles. When it has too few pages for somebody it asks its caches, in this
order: for what has retired, for what any of them used least recently of all it keeps (a parked slot, a leaf of a prefix
tree), and at last it waits for a fence. A parked slot whose work is still running is no sooner free than what retires
already: it is only taken if that is too little.
"""

import contextlib
import os
import threading
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch

from vmmkv.arguments import whole
from vmmkv.driver import open_driver
from vmmkv.driver.base import Access, Driver, Handle
from vmmkv.errors import BudgetError, Closed, DriverError, ForkedProcess, OutOfDeviceMemory, OutOfPages
from vmmkv.units import PAGE_BYTES, ceil_div, counted, format_bytes

# -------- extents
# Extents, the handles that a pool lends; for whom they are; and what a pool asks of those that it lends them to.
#
# extent.holders = mappings, live or retiring, + other holders        (0: free in its pool)
# extent.users  <= those of them that nobody can be asked to give up    (0: free, retiring, or kept as cache)

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

    def unevictable_bytes(self) -> int:
        """Bytes that no running sequence uses, and that no pressure can evict."""
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


# -------- pad
# The pad: one page of zeroes that stands, read-only, under row 0 (and its guard) of every arena of a pool.
#
# A view of a whole arena begins at slot 0, and its `data_ptr` must be mapped though most of the view is not: Triton's
# launcher asks the driver about every pointer argument and refuses one that it does not know ("cannot be accessed from
# Triton (cpu tensor?)"). So no sequence ever runs in slot 0, and the pad is mapped there; rows that only fill up a batch
# point to it. Whoever writes to it faults.


class Pad:
    """One page of a pool, beyond its budget, and the addresses where it is mapped. Made when the first cache needs it."""

    def __init__(self, driver: Driver) -> None:
        self.handle: Handle | None = None
        self._driver = driver
        self._is_zero = driver.creates_zeroed
        self._addresses: list[int] = []

    def map(self, address: int) -> None:
        """Put the page there, read-only. On failure it is not there, or goes with `close`.

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
                driver.settle()
                self._is_zero = True
            driver.set_access(address, PAGE_BYTES, Access.READ)
        except BaseException:
            with contextlib.suppress(DriverError):
                self.unmap(address)
            raise

    def unmap(self, address: int) -> None:
        """Take it away again, once no launch reads it. Cost: an unmap."""
        self._driver.unmap(address, PAGE_BYTES)
        self._addresses.remove(address)

    def close(self) -> None:
        """Unmap it wherever it still is, and release it. Idempotent."""
        for address in list(self._addresses):
            self.unmap(address)
        if self.handle is not None:
            self._driver.release(self.handle)
            self.handle = None


# -------- process lock
# The lock of a pool: re-entrant, and of one process.
#
# fork() copies a lock in the state that it is in, and of all threads only the one that forked: a lock that another held
# would be waited for in the child for ever. So a child never gets as far as the lock.


class ProcessLock:
    """A re-entrant lock that raises ForkedProcess in a child made by fork(). Used by `with`."""

    __slots__ = ("_lock", "_pid")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def check_process(self) -> None:
        """Raises ForkedProcess in a child. Cost: under 0.1 us."""
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"this pool and its caches belong to process {self._pid}, and this is {os.getpid()}, a child made by fork(), "
                "which has none of their memory; make a pool in the child, or start it with spawn or forkserver",
                call="lock",
                code="EPERM",
            )

    def __enter__(self) -> None:
        self.check_process()
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


# -------- pool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """A pool at one moment, in bytes, and its driver's successful calls by name."""

    budget_bytes: int
    created_bytes: int
    held_bytes: int
    used_bytes: int
    """Of what is held: by running sequences, once however many share it."""
    free_bytes: int
    driver_calls: dict[str, int]


class Pool:
    """Physical memory for KV caches, up to a budget, on one device.

    `device` is anything torch takes: "cpu" is host virtual memory, "cuda:0" a GPU's. Nothing is created until it is
    needed; what is freed stays created, for whoever comes next, until `resize` or `close` gives it back to the device.
    One page more than the budget is the pool's own: the pad (see `vmmkv.memory.pool`).

    Raises: BudgetError for a budget below one page; DriverUnavailable, of the kind that says what is missing. In a child
    made by fork() every operation of the pool and of its caches raises ForkedProcess.
    """

    def __init__(self, device: str | torch.device, budget_bytes: int, *, driver: Driver | None = None) -> None:
        budget_bytes = _checked_budget(budget_bytes)
        self.driver: Final = open_driver(device) if driver is None else driver
        self.device: Final = self.driver.device
        self.lock: Final = ProcessLock()
        """Taken by every operation of the pool and of its caches: the driver is called by one thread at a time, of one
        process."""
        self.budget_bytes = budget_bytes
        self.created_bytes = 0
        self.held_bytes = 0
        self.used_bytes = 0
        """Held by somebody who cannot be asked to give it up."""
        self.closed = False
        self.pad: Final = Pad(self.driver)
        self._free: dict[int, list[Extent]] = {num_pages: [] for num_pages in SIZE_CLASSES}
        self._caches: list[Reclaimable] = []
        self._clock = 0

    # extents

    @property
    def free_bytes(self) -> int:
        """Bytes created and held by nobody."""
        return self.created_bytes - self.held_bytes

    def acquire(self, count: int, num_pages: int = 1, *, wait: bool = True) -> list[Extent]:
        """`count` extents of `num_pages` each, with the caller as their one holder and user; all of them or none.

        Takes free extents first, newest first, then creates, then reclaims from the caches.
        Cost: one create for each extent that is not free, or an unmap for each page reclaimed: no more than are missing.
        Blocks on a fence only if `wait` is set and nothing else is left; without it, nothing that running work may still
        touch is reclaimed.
        Raises: OutOfPages, naming pages wanted, free and evictable; DriverError. Either leaves the pool as it was,
        but for parked slots that were evicted to make room.
        """
        return self.acquire_mixed({num_pages: count}, wait=wait)[num_pages]

    def acquire_mixed(self, counts: Mapping[int, int], *, wait: bool = True) -> dict[int, list[Extent]]:
        """The same for several size classes at once: `counts` by pages of an extent. All of them or none."""
        with self.lock:
            self.check_open()
            self._check_feasible(counts, wait=wait)
            reused: list[Extent] = []
            created: list[Extent] = []
            try:
                for num_pages, count in counts.items():
                    wanted = len(reused) + len(created) + count
                    while missing := wanted - len(reused) - len(created):
                        self._take(num_pages, missing, reused, created, wait=wait)
            except BaseException:
                for extent in reversed(reused):
                    self._put_back(extent)
                for extent in reversed(created):
                    self._put_back(extent)
                    with contextlib.suppress(DriverError):  # then it stays free, which is within the budget too
                        self._destroy_newest(extent.num_pages)
                raise
            return {
                num_pages: [extent for extent in (*reused, *created) if extent.num_pages == num_pages] for num_pages in counts
            }

    def check_room(self, num_pages: int, remedy: str, *, later_pages: int = 0) -> None:
        """Could so many pages be had, perhaps when running work is done? Takes none.

        `remedy` is what works besides a larger budget; `later_pages` more will be asked for, and are named with the others.
        Raises: OutOfPages.
        """
        with self.lock:
            free, evictable = self.spare_pages, self.kept_pages
            if num_pages > free + evictable:
                wanted = num_pages + later_pages
                least_bytes = self.budget_bytes + (wanted - free - evictable) * PAGE_BYTES
                raise OutOfPages(
                    f"{_needed(wanted)} needed, {free} are free and {evictable} can be evicted; resize() the budget to at "
                    f"least {least_bytes} bytes ({format_bytes(least_bytes)}), {remedy}"
                )

    def hold(self, *extents: Extent) -> None:
        """One more holder of each; they are held already."""
        with self.lock:
            for extent in extents:
                assert extent.holders > 0, "a free extent is acquired, not held"
                extent.holders += 1

    def use(self, *extents: Extent) -> None:
        """One more of the holders of each uses it: it cannot be had under pressure."""
        with self.lock:
            for extent in extents:
                assert extent.holders > extent.users, "only a holder uses an extent"
                extent.users += 1
                if extent.users == 1:
                    self.used_bytes += extent.size_bytes

    def unuse(self, *extents: Extent) -> None:
        """One user of each fewer; it goes on holding."""
        with self.lock:
            for extent in extents:
                assert extent.users > 0, "an extent was given up more often than used"
                extent.users -= 1
                if extent.users == 0:
                    self.used_bytes -= extent.size_bytes

    def drop(self, extent: Extent) -> None:
        """One holder fewer, who does not use it, or is the last one; that frees it. No driver call."""
        with self.lock:
            assert extent.holders > 0, "an extent was dropped more often than held"
            if extent.holders == 1:
                self._put_back(extent)
            else:
                extent.holders -= 1

    # the budget

    def resize(self, budget_bytes: int) -> None:
        """Give memory back to the device while running, or take more from now on.

        Shrinking releases free extents, after unmapping what has retired and evicting parked slots, oldest first, as
        far as is needed.
        Cost: a release for each extent given back; may block on the fences of retirements.
        Raises: BudgetError, naming the least that works now, and then nothing has changed.
        """
        with self.lock:
            self.check_open()
            budget_bytes = _checked_budget(budget_bytes)
            if budget_bytes < self.used_bytes:
                raise BudgetError(
                    f"budget_bytes={format_bytes(budget_bytes)} is less than the {format_bytes(self.used_bytes)} that running "
                    f"sequences hold; close or park some, or ask for at least {self.used_bytes} bytes"
                )
            least_bytes = self.used_bytes + sum(cache.unevictable_bytes() for cache in self._caches)
            if budget_bytes < least_bytes:
                raise BudgetError(
                    f"budget_bytes={format_bytes(budget_bytes)} is less than the {format_bytes(least_bytes)} that running "
                    f"sequences have or share, or that is pinned; close or unpin some, or ask for at least {least_bytes} bytes"
                )
            while self.created_bytes > budget_bytes:
                excess_pages = ceil_div(self.created_bytes - budget_bytes, PAGE_BYTES)
                shrunk = self._destroy_any_free() or self._reclaim(excess_pages, wait=True)
                assert shrunk, "more is held than is used, pinned or on the way to either"
            self.budget_bytes = budget_bytes

    def close(self) -> None:
        """Close the caches of this pool that are still open, then release every handle. Idempotent.

        Cost: as `KVCache.close` for each cache; a release for each handle.
        Raises: DriverError, and then it can be called again; what the thread of a cache's mapper failed with.
        """
        while not self._close_if_unused():
            with contextlib.ExitStack() as closing:  # all of them, whether or not one fails
                for cache in list(self._caches):
                    closing.callback(cache.close_all)

    def _close_if_unused(self) -> bool:
        with self.lock:
            if self.closed:
                return True
            if self._caches:
                return False
            while self._destroy_any_free():
                pass
            assert not self.created_bytes, "no cache is open, and yet extents are held"
            self.pad.close()
            self.closed = True
            return True

    def stats(self) -> PoolStats:
        """The pool at this moment."""
        with self.lock:
            return PoolStats(
                budget_bytes=self.budget_bytes,
                created_bytes=self.created_bytes,
                held_bytes=self.held_bytes,
                used_bytes=self.used_bytes,
                free_bytes=self.free_bytes,
                driver_calls=dict(self.driver.calls),
            )

    # caches

    def attach(self, cache: Reclaimable) -> None:
        """A cache takes this pool."""
        with self.lock:
            self.check_open()
            self._caches.append(cache)

    def detach(self, cache: Reclaimable) -> None:
        """A cache is closed and holds nothing any more."""
        with self.lock:
            self._caches.remove(cache)

    def tick(self) -> int:
        """The next moment of the pool's clock, by which slots of all its caches are ordered."""
        self._clock += 1
        return self._clock

    # laws

    def check(self) -> None:
        """Recount law 1 from what the caches hold."""
        with self.lock:
            held = sum((cache.holders() for cache in self._caches), Counter[Extent]())
            free = [extent for extents in self._free.values() for extent in extents]
            assert all(extent.holders == count for extent, count in held.items()), "an extent's holders are miscounted"
            assert all(extent.holders == 0 for extent in free), "a free extent has a holder"
            assert len(set(free)) == len(free), "an extent is free twice"
            used = sum((cache.users() for cache in self._caches), Counter[Extent]())
            assert all(extent.users == used[extent] for extent in held), "an extent's users are miscounted"
            assert self.used_bytes == sum(extent.size_bytes for extent in used), "used bytes are miscounted"
            assert self.held_bytes == sum(extent.size_bytes for extent in held), "held bytes are miscounted"
            assert self.free_bytes == sum(extent.size_bytes for extent in free), "free bytes are miscounted"
            assert self.created_bytes <= self.budget_bytes, "the budget is exceeded"
            calls = self.driver.calls
            pads = self.pad.handle is not None
            assert pads + len(free) + len(held) <= calls["create"] + calls["import_fd"] - calls["release"], "a handle was lost"

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and (self.created_bytes or self.pad.handle is not None):
            warnings.warn(f"a Pool holding {format_bytes(self.created_bytes)} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        if self.closed:
            return f"<Pool on {self.device}, closed>"
        free, budget = format_bytes(self.budget_bytes - self.held_bytes), format_bytes(self.budget_bytes)
        return f"<Pool on {self.device}: {counted(len(self._caches), 'cache')}, {free} of {budget} free>"

    # within

    def check_open(self) -> None:
        """Raises Closed after `close`."""
        if self.closed:
            raise Closed("this pool is closed")

    @property
    def spare_pages(self) -> int:
        """Pages that can be acquired without taking any from a cache."""
        return (self.budget_bytes - self.held_bytes) // PAGE_BYTES

    def _room_bytes(self) -> int:
        return self.budget_bytes - self.created_bytes

    @property
    def kept_pages(self) -> int:
        """Pages that can be had from the caches, though perhaps only when running work is done."""
        return (self.held_bytes - self.used_bytes) // PAGE_BYTES

    def _idle_pages(self, enough: int) -> int:
        num_pages = 0
        for cache in self._caches:
            if num_pages < enough:
                num_pages += cache.idle_pages(enough - num_pages)
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
                f"be evicted; {evictable - at_once} are still retiring or parked behind running work: wait for it"
            )
        self.check_room(wanted, "close or park sequences, or ask for fewer tokens")

    def _take(self, num_pages: int, missing: int, reused: list[Extent], created: list[Extent], *, wait: bool) -> None:
        """One of the missing extents into one of the lists, or one step towards it."""
        size_bytes = num_pages * PAGE_BYTES
        if self._free[num_pages]:
            extent = self._free[num_pages].pop()
            reused.append(extent)
        elif self._room_bytes() >= size_bytes:
            try:
                handle = self.driver.create(size_bytes)
            except OutOfDeviceMemory as error:
                if self._destroy_any_free() or self._reclaim(missing * num_pages, wait=wait):
                    return
                raise OutOfPages(
                    f"the device has no memory left below this pool's budget of {format_bytes(self.budget_bytes)} "
                    f"({format_bytes(self.created_bytes)} created): {error}; lower budget_bytes or free device memory"
                ) from error
            extent = Extent(handle, num_pages, zeroed=self.driver.creates_zeroed)
            self.created_bytes += size_bytes
            created.append(extent)
        elif self._destroy_any_free() or self._reclaim(missing * num_pages, wait=wait):
            return
        else:
            retiring = sum(cache.retiring_pages() for cache in self._caches)
            raise OutOfPages(
                f"an extent of {num_pages} pages does not fit: {format_bytes(self.budget_bytes - self.held_bytes)} of the "
                f"budget are not held; of {self.kept_pages} pages kept, {retiring} are retiring, the others pinned or in need; "
                f"raise budget_bytes by at least {format_bytes(size_bytes)}, unpin something, or wait for what retires"
            )
        extent.holders = extent.users = 1
        self.held_bytes += size_bytes
        self.used_bytes += size_bytes

    def _put_back(self, extent: Extent) -> None:
        if extent.users:
            self.used_bytes -= extent.size_bytes
        extent.holders = extent.users = 0
        self.held_bytes -= extent.size_bytes
        self._free[extent.num_pages].append(extent)

    def _destroy_newest(self, num_pages: int) -> None:
        """Give the newest free extent of a class back to the device; if that fails it stays free, and is not lost."""
        extent = self._free[num_pages][-1]
        self.driver.release(extent.handle)
        self._free[num_pages].pop()
        self.created_bytes -= extent.size_bytes

    def _destroy_any_free(self) -> bool:
        """Give one free extent back, of the smallest class that has one."""
        for num_pages in SIZE_CLASSES:
            if self._free[num_pages]:
                self._destroy_newest(num_pages)
                return True
        return False

    def _reclaim(self, num_pages: int, *, wait: bool) -> bool:
        """One step towards `num_pages` more free ones: False when there is none left to take."""
        num_unmapped = 0
        for cache in self._caches:
            num_unmapped += cache.collect(num_pages - num_unmapped)
            if num_unmapped >= num_pages:
                break
        if num_unmapped:
            return True
        kept = [(oldest, cache) for cache in self._caches if (oldest := cache.oldest_evictable()) is not None]
        evictable = [(oldest, cache) for oldest, cache in kept if wait or oldest.idle]
        if evictable:
            oldest, cache = min(evictable, key=lambda entry: entry[0].stamp)
            if oldest.idle or sum(cache.retiring_pages() for cache in self._caches) < num_pages:
                cache.evict_oldest()
                return True
        return wait and any(cache.wait_for_retired() for cache in self._caches)


def _needed(num_pages: int) -> str:
    return f"{counted(num_pages, 'page')} ({format_bytes(num_pages * PAGE_BYTES)}) {'is' if num_pages == 1 else 'are'}"


def _checked_budget(budget_bytes: int) -> int:
    budget_bytes = whole("budget_bytes", budget_bytes)
    if budget_bytes < PAGE_BYTES:
        raise BudgetError(
            f"budget_bytes={budget_bytes} is below one page; the least is {PAGE_BYTES} ({format_bytes(PAGE_BYTES)})"
        )
    return budget_bytes
