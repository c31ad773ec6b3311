"""Growths and reclaims: memory that is mapped and not yet live, and memory that is no longer live and not yet unmapped.

    acquire ──map, set_access, zero──> staged ──publish, commit──> live ──reclaim──> pending ──fence, unmap──> free
                                         │                           ^                 │
                                         └──rollback──> free         └───────revive────┘

Nothing here knows sequences: slot_memory and cache decide what grows and what is reclaimed.
"""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Mapping as ReadOnlyDict
from types import MappingProxyType
from typing import NamedTuple

import torch

from vmmkv.driver.base import Access, Driver, Fence
from vmmkv.errors import DriverError, OutOfPages
from vmmkv.memory.address_space import Mapping, Span
from vmmkv.memory.extents import SIZE_CLASSES, Extent, Tenant, largest_at
from vmmkv.memory.pool import Pool

_SMOOTHING = 0.1
"""Weight of the newest measurement in the running mean of what a call costs."""


class Target(NamedTuple):
    """A span that is to be live up to `end_page`, for a tenant (which may depend on the page)."""

    span: Span
    end_page: int
    tenant_of: Callable[[int], Tenant]
    given: ReadOnlyDict[int, Extent] = MappingProxyType({})
    """Extents that others hold, to be mapped too, by page; they are not written (law 3)."""
    large_end_page: int = 0
    """Page up to which new extents are as large as fits. A large one costs no more, and is shared whole or not at all."""

    def largest_at(self, page: int) -> int:
        """Pages of the largest new extent that can stand at a page, before what is given or mapped."""
        end = min(self.end_page, self.large_end_page, page + SIZE_CLASSES[0])
        taken = (each for each in range(page, end) if each in self.span.mappings or each in self.given)
        return largest_at(page, next(taken, end))


class _NeverLive:
    """The fence of mappings that no launch ever knew, and that may be inaccessible: behind their zeroes alone."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._is_over = False

    def done(self) -> bool:
        """Are the zeroes written? Waits for them, which wait for no kernel. False while the driver cannot say."""
        if not self._is_over:
            with contextlib.suppress(DriverError):
                self.wait()
        return self._is_over

    def wait(self) -> None:
        """Wait for all launched work. Raises: DriverError."""
        self._driver.synchronize()
        self._is_over = True

    def order(self, streams: Sequence[torch.Stream] = ()) -> None:
        """Order nothing: no launch reads or writes this memory."""


class Growth:
    """Memory that is mapped and not yet live. Exactly one of `commit` and `rollback` ends it."""

    def __init__(self, mapper: "Mapper", targets: Sequence[Target]) -> None:
        self.targets = targets
        self.num_mapped = 0
        """Pages."""
        self._mapper = mapper
        self._new: list[Mapping] = []
        self._revived: list[tuple[Mapping, Fence]] = []

    def commit(self) -> None:
        """Make the staged memory live."""
        for target in self.targets:
            target.span.end_page = max(target.span.end_page, target.end_page)

    def rollback(self) -> None:
        """Restore the state before the growth, as far as `Mapper.undo` can."""
        for mapping in reversed(self._new):
            self._mapper.undo(mapping)
        for mapping, fence in self._revived:
            self._mapper.reclaim([mapping], fence)

    def stage(self, *, wait: bool) -> None:
        """Revive, alias and map what is missing below the targets' ends. See Mapper.stage.

        What the pool may wait for is no part of the measured cost of a mapping.
        """
        missing: list[tuple[Target, int, int]] = []
        for target in self.targets:
            page = target.span.end_page
            while page < target.end_page:
                if page in target.given:
                    num_pages = target.given[page].num_pages
                    self._new.append(self._mapper.alias(target.span, page, target.given[page]))
                    self.num_mapped += num_pages
                elif (mapping := target.span.mappings.get(page)) is not None and self._revive(target, mapping, wait=wait):
                    num_pages = mapping.extent.num_pages
                else:
                    num_pages = target.largest_at(page)
                    missing.append((target, page, num_pages))
                page += num_pages
        counts = Counter(num_pages for _, _, num_pages in missing)
        began_ns = time.perf_counter_ns()
        unused = {size: deque(extents) for size, extents in self._mapper.pool.acquire_mixed(counts, wait=wait).items()}
        if wait:
            began_ns = time.perf_counter_ns()
        try:
            self._give([(self._map(target, page, unused[size]), target.tenant_of(page)) for target, page, size in missing])
            if missing:
                mapping_us = (time.perf_counter_ns() - began_ns) / 1e3 / len(missing)
                self._mapper.map_us += _SMOOTHING * (mapping_us - self._mapper.map_us)
        finally:
            for extents in unused.values():
                for extent in extents:
                    self._mapper.pool.drop(extent)

    def _revive(self, target: Target, mapping: Mapping, *, wait: bool) -> bool:
        """Make what is pending live again, if it ends in time and has no other holder; else unmap it.

        Before any extent is acquired, since making room could unmap it.
        """
        fence, extent = mapping.fence, mapping.extent
        assert fence is not None, "a live mapping stands past the end of its span"
        # A mapping that never was live may be inaccessible. An extent that others have come to hold is not written.
        if not isinstance(fence, _NeverLive) and not extent.shared and mapping.end_page <= target.end_page:
            self._mapper.revive(mapping)
            self._revived.append((mapping, fence))
            return True
        if not fence.done():
            if not wait:
                raise OutOfPages(
                    f"page {mapping.page} of slot {target.span.slot} is pending reclaim: its addresses are not free yet"
                )
            fence.wait()
        self._mapper.finish(mapping)
        return False

    def _map(self, target: Target, page: int, unused: deque[Extent]) -> Mapping:
        self._new.append(self._mapper.map(target.span, page, unused.popleft()))
        self.num_mapped += self._new[-1].extent.num_pages
        return self._new[-1]

    def _give(self, mappings: Sequence[tuple[Mapping, Tenant]]) -> None:
        """Give new memory to its tenants, zeroed where its bytes may be another's, before a limit lets the device write."""
        runs: list[tuple[int, int]] = []
        for mapping, tenant in mappings:
            if mapping.extent.must_be_zeroed_for(tenant):
                adjoins = runs and runs[-1][1] == mapping.address
                start = runs.pop()[0] if adjoins else mapping.address
                runs.append((start, mapping.address + mapping.extent.size_bytes))
        for start, end in runs:
            self._mapper.pool.driver.zero(start, end - start)
        for mapping, tenant in mappings:
            mapping.extent.tenant, mapping.extent.zeroed = tenant, False


class Mapper:
    """The mappings of one cache: what is staged, and what is pending reclaim. The caller holds the pool's lock."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.pending_pages = 0
        self.map_us = 100.0
        """Running mean of mapping one extent, driver and Python; the start is a guess on the high side."""
        self.unmap_us = 50.0
        """Running mean of unmapping one extent."""
        self.emptied_slots: set[int] = set()
        """Slots in which a group of layers has nothing mapped since its last reclaimed memory was unmapped. `Slots.collect`
        takes them from here."""
        self._pending: dict[Fence, dict[Mapping, None]] = {}
        """Mappings that are pending reclaim, by the fence they wait for, the oldest first."""

    def map(self, span: Span, page: int, extent: Extent) -> Mapping:
        """Map an extent that the caller holds and uses; both become the mapping's. It is not in the live run yet.

        Cost: one map and one access call. On failure the extent is let go, see `undo`. Raises: DriverError.
        """
        assert page not in span.mappings, "an extent is mapped where nothing stands"
        assert page % extent.num_pages == 0, "an extent stands at a multiple of its size"
        assert extent.imported, "what a holder process kept is imported before it is mapped"
        mapping = Mapping(span, page, extent, used=True)
        try:
            self.pool.driver.map(mapping.address, extent.handle, extent.size_bytes)
        except BaseException:
            self.let_go(mapping)
            raise
        span.mappings[page] = mapping
        try:
            access = Access.READ if extent.lent else Access.READ_WRITE
            self.pool.driver.set_access(mapping.address, extent.size_bytes, access)
        except BaseException:
            self.undo(mapping)
            raise
        return mapping

    def alias(self, span: Span, page: int, extent: Extent) -> Mapping:
        """Map an extent that others hold too. Cost, raises: as `map`."""
        self.pool.hold(extent)
        self.pool.use(extent)
        return self.map(span, page, extent)

    def undo(self, mapping: Mapping) -> None:
        """Unmap what no launch knows. If it cannot be unmapped now it is pending reclaim, so that nothing is lost."""
        never_live = _NeverLive(self.pool.driver)
        self.reclaim([mapping], never_live)
        with contextlib.suppress(DriverError):
            never_live.wait()  # zeroes may be on their way to it
            self.finish(mapping)

    def unmap(self, mapping: Mapping) -> None:
        """Unmap what no launch touches any more. Its hold on the extent, and its use, stay for `let_go`. Cost: one unmap."""
        self.pool.driver.unmap(mapping.address, mapping.extent.size_bytes)
        del mapping.span.mappings[mapping.page]

    def let_go(self, mapping: Mapping) -> None:
        """Let go of the extent of an unmapped mapping: one holder fewer, and one user if it was used."""
        self.unuse(mapping)
        self.pool.drop(mapping.extent)

    def use(self, *mappings: Mapping) -> None:
        """Count these mappings as uses by a running sequence. Idempotent."""
        self.pool.use(*[mapping.extent for mapping in mappings if not mapping.used])
        for mapping in mappings:
            mapping.used = True

    def unuse(self, *mappings: Mapping) -> None:
        """Count these mappings as uses no longer, so that their extents can be evicted. Idempotent."""
        self.pool.unuse(*[mapping.extent for mapping in mappings if mapping.used])
        for mapping in mappings:
            mapping.used = False

    # growing

    def stage(self, targets: Sequence[Target], *, wait: bool = True) -> Growth:
        """Map what is missing below the targets' ends; the caller publishes it, then commits.

        Pages that are pending reclaim there are revived without a driver call.
        Cost: a map and an access call for each missing extent, perhaps a zero for those side by side. On failure all is as
        before, but that extents created for it stay free in the pool.
        Raises: OutOfPages, DriverError.
        """
        growth = Growth(self, targets)
        try:
            growth.stage(wait=wait)
        except BaseException:
            growth.rollback()
            raise
        return growth

    def pages_within(self, budget_us: float) -> int:
        """Number of pages that can be mapped in that time. Pages past the spare ones must be unmapped elsewhere first."""
        spare = self.pool.spare_pages
        dear_us = budget_us - spare * self.map_us
        pages = budget_us / self.map_us if dear_us <= 0 else spare + dear_us / (self.map_us + self.unmap_us)
        return int(max(0.0, min(pages, 2.0**31)))

    # reclaiming

    def reclaim(self, mappings: Iterable[Mapping], fence: Fence) -> None:
        """Make these mappings pending reclaim: they are unmapped when the fence has passed. No driver call."""
        mappings = list(mappings)
        self.unuse(*mappings)
        for mapping in mappings:
            assert mapping.fence is None, "a mapping is reclaimed once"
            mapping.fence = fence
            self._pending.setdefault(fence, {})[mapping] = None
            self.pending_pages += mapping.extent.num_pages

    def revive(self, mapping: Mapping) -> None:
        """A pending mapping is live again, and is used."""
        self._forget(mapping)
        self.use(mapping)

    def finish(self, mapping: Mapping) -> None:
        """Unmap a pending mapping whose fence has passed. Cost: one unmap; if that fails it stays pending."""
        self.unmap(mapping)
        self._forget(mapping)
        self.let_go(mapping)
        if not mapping.span.mappings and mapping.span.index >= 0:  # else it is a window, of no slot
            self.emptied_slots.add(mapping.span.slot)

    def _forget(self, mapping: Mapping) -> None:
        fence = mapping.fence
        assert fence is not None, "a live mapping has no fence"
        batch = self._pending[fence]
        del batch[mapping]
        if not batch:
            del self._pending[fence]
        mapping.fence = None
        self.pending_pages -= mapping.extent.num_pages

    def passed_pages(self) -> int:
        """Pending pages whose fence has passed and which have no other holder."""
        passed = (mapping.extent for fence, batch in self._pending.items() if fence.done() for mapping in batch)
        return sum(extent.num_pages for extent in passed if not extent.shared)

    def collect(self, budget_us: float = float("inf"), max_pages: float = float("inf")) -> int:
        """Unmap pending mappings, oldest fence first, as far as fences, time and `max_pages` allow; the number of pages.

        A fence that has not passed does not hold up the next: the work of streams ends in any order.
        Cost: one unmap for each mapping. Never blocks. If an unmap fails, its mapping stays pending.
        """
        began_ns, num_pages, num_mappings = time.perf_counter_ns(), 0, 0
        for mapping in self._passed():
            elapsed_us = (time.perf_counter_ns() - began_ns) / 1e3
            if num_pages >= max_pages or (num_pages and elapsed_us + self.unmap_us > budget_us):
                break
            self.finish(mapping)
            num_pages += mapping.extent.num_pages
            num_mappings += 1
        if num_mappings:
            mapping_us = (time.perf_counter_ns() - began_ns) / 1e3 / num_mappings
            self.unmap_us += _SMOOTHING * (mapping_us - self.unmap_us)
        return num_pages

    def _passed(self) -> Iterator[Mapping]:
        """Pending mappings whose fence has passed; each must be finished before the next is asked for.

        From the last page of a reclaim to its first, which a growth would revive first.
        """
        for fence, batch in list(self._pending.items()):
            if fence.done():
                while batch:
                    yield next(reversed(batch))

    def oldest_fence(self) -> Fence | None:
        """The fence of the oldest reclaim; None if nothing is pending."""
        return next(iter(self._pending), None)

    # laws

    def check(self) -> None:
        """The queue is the pending mappings, no others, and they stand in their spans."""
        pending = [(fence, mapping) for fence, batch in self._pending.items() for mapping in batch]
        for fence, mapping in pending:
            assert mapping.fence is fence, "a mapping waits for another fence than its batch"
            assert mapping.span.mappings.get(mapping.page) is mapping, "a pending mapping does not stand in its span"
        assert self.pending_pages == sum(mapping.extent.num_pages for _, mapping in pending)

    def is_pending(self, mapping: Mapping) -> bool:
        """Is a mapping in the queue of those that are pending reclaim?"""
        return mapping.fence is not None and mapping in self._pending.get(mapping.fence, ())
