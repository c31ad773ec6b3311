"""The memory under the slots: what is mapped for each, how far each may be written, what the device knows of it.

Slots and token counts, no sequences. The caller holds the pool's lock.
"""

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Mapping as ReadOnlyDict

import torch

from vmmkv.driver.base import Fence, retried
from vmmkv.errors import DriverError, LayoutError, OutOfPages
from vmmkv.layout import KVLayout
from vmmkv.memory.address_space import Arena, Mapping, SlotTable, Span, arena_bytes, check_addresses
from vmmkv.memory.extents import Extent, Tenant
from vmmkv.memory.mapper import Growth, Mapper, Target
from vmmkv.memory.pool import Pool
from vmmkv.memory.states import SlotState
from vmmkv.units import PAGE_BYTES, ceil_div

_numbers = itertools.count()


class SlotMemory:
    """The arenas of a cache, one for each group, and the mappings under every slot.

    `limit` is a device tensor, [1 + slots] int32: rows below it may be written; 0 where no sequence runs.
    """

    def __init__(self, layout: KVLayout, pool: Pool, *, slots: int, max_tokens: int, guard_tokens: int) -> None:
        self.number = next(_numbers)
        self.pool = pool
        self.guard_tokens = guard_tokens
        self.mapper = Mapper(pool)
        self.streams: list[torch.Stream] = []
        self.mapped_pages = 0
        self._group_of = layout.group_of
        self._reserved: list[tuple[int, int]] = []
        """Address and size of each reservation. They last until the cache is closed, so that a stale view of an ended sequence
        faults (law 6)."""
        self.arenas: list[Arena] = []
        self.windows: Arena | None = None
        """Addresses of no slot, where extents can be mapped too: see `vmmkv.memory.sharing.Windows`."""
        self._written: dict[int, Fence] = {}
        """Fence behind the last write of a limit that waited for running work, by slot, if it may be on its way still."""
        try:
            max_rows = max_tokens + guard_tokens
            try:
                address = self.reserve(arena_bytes(layout.groups, slots, max_rows))
            except DriverError:
                check_addresses(pool.driver, layout.groups, slots=slots, max_tokens=max_tokens, guard_tokens=guard_tokens)
                raise
            for index, group in enumerate(layout.groups):
                arena = Arena(pool.driver, address, index, group, slots=slots, max_rows=max_rows)
                self.arenas.append(arena)
                address += arena.reserved_bytes
            self.table = SlotTable(slots, len(layout.groups))
            self.tenants: list[Hashable] = [None] * len(self.table)
            """Of the sequence in a slot, or of the last one."""
            self.limit = torch.zeros(len(self.table), dtype=torch.int32, device=pool.device)
            pool.driver.fence().wait()  # those zeroes are on the caller's stream, later limits are written on another
            for arena in self.arenas:
                for page in range(arena.group.pages_between(0, 1 + guard_tokens)):
                    pool.null_page.map(arena.address + page * PAGE_BYTES)
        except BaseException:
            with contextlib.suppress(DriverError):  # then the null pages go when the pool is closed
                retried(self.close)
            raise

    def close(self) -> None:
        """Give the addresses back, when nothing reads this cache any more. Cost: an unmap for each null page. Idempotent."""
        for arena in self._all_arenas():
            self.pool.null_page.unmap(arena.address, arena.address + arena.reserved_bytes)
        while self._reserved:
            self.pool.driver.give_back(*self._reserved.pop())

    def reserve(self, size_bytes: int) -> int:
        """Addresses that are given back when this is closed. Cost: one reserve, about 4 us on CUDA whatever the size."""
        address = self.pool.driver.reserve(size_bytes)
        self._reserved.append((address, size_bytes))
        return address

    # questions

    def fence(self) -> Fence:
        """A fence behind all work launched so far that may touch the slots."""
        return self.pool.driver.fence(self.streams)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copies launched within, on the caller's current stream, come behind what recorded streams still write, and before
        whatever is launched there next. Cost: two fences; none if no stream is recorded."""
        if self.streams:
            self.fence().order()
        yield
        if self.streams:
            retried(lambda: self.fence().order(self.streams))  # the copies cannot be taken back

    def arena_of(self, layer: int) -> Arena:
        """The arena of a layer's group. Raises LayoutError naming the layers there are."""
        group = self._group_of.get(layer)
        if group is None:
            raise LayoutError(f"no layer {layer} in this cache; it has {sorted(self._group_of)}")
        return self.arenas[group]

    def spans(self, slot: int) -> list[Span]:
        """A slot's span in each arena."""
        return [arena.spans[slot] for arena in self.arenas]

    def start(self, span: Span) -> int:
        """The first row that a slot keeps in a group."""
        return int(self.table.starts[span.index, span.slot])

    def num_pages(self, slot: int) -> int:
        """Pages live under a slot, over all groups."""
        return sum(span.num_live_pages for span in self.spans(slot))

    def is_bare(self, slot: int) -> bool:
        """Is nothing at all mapped under it?"""
        return not any(span.mappings for span in self.spans(slot))

    def committed(self, slot: int, *, from_first: bool = False) -> int:
        """Tokens whose rows, and the guard behind them, lie under live mappings in every group.

        `from_first`: counting only groups that are still mapped from their first page on, as a new sequence needs them.
        """
        return self._tokens_under([0 if from_first and span.first_page else span.end_page for span in self.spans(slot)])

    def end_pages(self, num_tokens: int) -> list[int]:
        """The ends of the live pages of a slot, by group, with which it holds that many tokens and the guard."""
        rows = num_tokens + self.guard_tokens
        return [ceil_div(rows * arena.group.row_bytes, PAGE_BYTES) for arena in self.arenas]

    def missing_pages(self, slot: int, num_tokens: int) -> int:
        """Pages that a sequence there still needs to hold that many tokens, those among them that it would revive."""
        ends = zip(self.end_pages(num_tokens), self.spans(slot), strict=True)
        return sum(max(0, end - span.end_page) for end, span in ends)

    def holders(self) -> Counter[Extent]:
        """Number of mappings of each extent here."""
        return Counter(mapping.extent for mapping in self._all_mappings())

    def use(self, slot: int) -> None:
        """A sequence runs there: what is mapped cannot be evicted."""
        for span in self.spans(slot):
            self.mapper.use(*span.live())

    def unuse(self, slot: int) -> None:
        """Count the mappings under a slot as uses no longer, so that they can be evicted: no sequence runs there."""
        for span in self.spans(slot):
            self.mapper.unuse(*span.live())

    def users(self) -> Counter[Extent]:
        """Number of mappings of each extent here that are uses."""
        return Counter(mapping.extent for mapping in self._all_mappings() if mapping.used)

    def _all_mappings(self) -> Iterator[Mapping]:
        return (mapping for arena in self._all_arenas() for span in arena.spans for mapping in span.mappings.values())

    def _all_arenas(self) -> list[Arena]:
        return self.arenas if self.windows is None else [*self.arenas, self.windows]

    def idle_pages(self, slot: int) -> int:
        """Live pages of a parked slot which have no other holder."""
        return sum(
            mapping.extent.num_pages for span in self.spans(slot) for mapping in span.live() if not mapping.extent.shared
        )

    # growing

    def grow(self, slot: int, num_tokens: int) -> None:
        """Map what is missing for `num_tokens` tokens. On failure all is as before. Raises: OutOfPages, DriverError."""
        self.publish([self._stage(slot, self.end_pages(num_tokens), self.filled_ends(num_tokens), wait=True)])
        self.assert_owned(slot)

    def map_ahead(self, budget_us: float, lookahead_tokens: int) -> int:
        """Map pages ahead of use, most urgent slot first, until the time budget is spent; the number of pages.

        A slot for which no page is free is skipped.
        """
        began_ns = time.perf_counter_ns()
        num_pages = 0
        for wanted in self.table.wanted_ahead(lookahead_tokens):
            growths: list[Growth] = []
            try:
                for slot, target in zip(*self.table.short_of(wanted), strict=True):
                    affordable = self.mapper.pages_within(budget_us - (time.perf_counter_ns() - began_ns) / 1e3)
                    if num_pages and not affordable:
                        break
                    ends = self._share(slot, self.end_pages(int(target)), max(1, affordable))
                    with contextlib.suppress(OutOfPages):  # a sequence that needs it now grows, and its caller is told
                        growths.append(self._stage(int(slot), ends, [0] * len(ends), wait=False))
                        num_pages += growths[-1].num_mapped
            finally:
                self.publish(growths)
        return num_pages

    def _share(self, slot: int, end_pages: list[int], num_pages: int) -> list[int]:
        """Ends with at most `num_pages` of the missing pages, each given to the group that then is furthest behind."""
        ends = [span.end_page for span in self.spans(slot)]
        if sum(max(0, wanted - end) for wanted, end in zip(end_pages, ends, strict=True)) <= num_pages:
            return end_pages
        for _ in range(num_pages):
            behind = [index for index, end in enumerate(ends) if end < end_pages[index]]
            ends[min(behind, key=lambda index: self.arenas[index].group.tokens_under(ends[index]))] += 1
        return ends

    def tenant_in(self, span: Span) -> Callable[[int], Tenant]:
        """The tenant of each page of a span."""
        group, name = span.group, self.tenants[span.slot]
        if group.mixes_dtypes:
            return lambda page: Tenant(self.number, (span.index, page * PAGE_BYTES % group.row_bytes), name)
        same = Tenant(self.number, group.planes[0].dtype, name)
        return lambda page: same

    def filled_ends(self, num_tokens: int) -> list[int]:
        """The ends up to which a slot takes large extents, by group: behind the last page that so many tokens fill.

        0 with a window: it gives rows back page by page, and a later prompt shares extents that hold these rows and no others.
        """
        return [0 if arena.group.window is not None else arena.group.page_of(num_tokens) for arena in self.arenas]

    def _stage(self, slot: int, end_pages: list[int], large_ends: list[int], *, wait: bool) -> Growth:
        targets = [
            Target(span, end, self.tenant_in(span), large_end_page=large_end)
            for span, end, large_end in zip(self.spans(slot), end_pages, large_ends, strict=True)
            if end > span.end_page
        ]
        return self.mapper.stage(targets, wait=wait)

    def publish(self, growths: list[Growth]) -> None:
        """Tell the device the new limits, then let the growths be live; all of them or none."""
        if not growths:
            return
        ends = {target.span: target.end_page for growth in growths for target in growth.targets}
        committed = {
            slot: self._tokens_under([max(span.end_page, ends.get(span, 0)) for span in self.spans(slot)])
            for slot in sorted({span.slot for span in ends})
        }
        try:
            self.raise_limits({slot: min(tokens, int(self.table.ends[slot])) for slot, tokens in committed.items()})
        except BaseException:
            for growth in reversed(growths):
                growth.rollback()
            raise
        for growth in growths:
            growth.commit()
            self.mapped_pages += growth.num_mapped
        for slot, tokens in committed.items():
            self.table.committed[slot] = tokens

    def order(self) -> None:
        """Order later launches, on the caller's current stream or a recorded one, behind zeroes and limits."""
        self.pool.driver.order(self.streams)

    def raise_limits(self, limits: ReadOnlyDict[int, int]) -> None:
        """Higher limits of some slots, for the device and then for the host.

        The host sees a limit last, for it is read without the lock, and rows below it may be written at once.
        Cost: a write or two, not blocking, if any limit differs. On failure nothing changes.
        """
        raised = {slot: limit for slot, limit in limits.items() if limit != self.table.limits[slot]}
        behind = {slot: fence for slot in raised if (fence := self._on_its_way(slot)) is not None}
        at_once = {slot: limit for slot, limit in raised.items() if slot not in behind}
        try:
            if at_once:
                self.pool.driver.write(self.limit, at_once)
            self.order()
            if behind:
                for fence in behind.values():
                    fence.order(self.streams)
                self._write_behind({slot: raised[slot] for slot in behind})
        except BaseException:
            with contextlib.suppress(DriverError):
                before = {slot: int(self.table.limits[slot]) for slot in at_once}
                retried(lambda: self.pool.driver.write(self.limit, before))
            raise
        for slot, limit in raised.items():
            self.table.limits[slot] = limit

    def lower_limit(self, slot: int, limit: int) -> Fence:
        """A lower limit of a slot; the fence behind which no launch goes by the old one, nor touches rows past the new one.

        Work launched later sees it. Work launched before does not, for it may still have to write or read the rows: the
        limit is written behind it, on every known stream.
        Cost: a fence, or a write if the limit differs; not blocking. On failure nothing changes.
        """
        if (written := self._on_its_way(slot)) is not None:
            written.order(self.streams)  # it may be on a stream that is not known
        if limit == self.table.limits[slot]:
            self._written[slot] = fence = self.fence()  # a raise comes behind what was launched by this limit
            return fence
        self.order()  # a raise of it may be on its way
        fence = self._write_behind({slot: limit})
        self.table.limits[slot] = limit
        return fence

    def _write_behind(self, limits: ReadOnlyDict[int, int]) -> Fence:
        """Write limits behind running work. A later write of these slots must come behind the fence, until it has passed.

        If that fails, some of them may have been written: then the old limits are written behind it.
        """
        driver = self.pool.driver
        try:
            fence = driver.write_behind(self.limit, limits, self.streams)
        except BaseException:
            with contextlib.suppress(DriverError):
                before = {slot: int(self.table.limits[slot]) for slot in limits}
                fence = retried(lambda: driver.write_behind(self.limit, before, self.streams))
                self._written.update(dict.fromkeys(limits, fence))
            raise
        self._written.update(dict.fromkeys(limits, fence))
        return fence

    def _on_its_way(self, slot: int) -> Fence | None:
        fence = self._written.get(slot)
        if fence is not None and fence.done():
            del self._written[slot]
            return None
        return fence

    # shrinking; none of these calls the driver's map or unmap

    def reclaim_from(self, slot: int, num_tokens: int) -> None:
        """Reclaim the pages wholly past `num_tokens` tokens and the guard, in every group. Cost: a fence, if there are any."""
        ends = self.cut_ends(slot, num_tokens)
        if ends != [span.end_page for span in self.spans(slot)]:
            fence = self.lower_limit(slot, min(self._tokens_under(ends), int(self.table.ends[slot])))
            self.reclaim_run(slot, ends, fence)

    def cut_ends(self, slot: int, num_tokens: int) -> list[int]:
        """The ends of the live pages of a slot that is cut to so many tokens, by group, always at a border of extents."""
        return [span.live_border(end) for span, end in zip(self.spans(slot), self.end_pages(num_tokens), strict=True)]

    def reclaim_before(self, slot: int, group: int, start_token: int) -> None:
        """Reclaim the pages of one group that lie wholly before a row. Cost: a fence, if there are any."""
        span = self.arenas[group].spans[slot]
        first = span.border_before(min(span.group.page_of(start_token), span.end_page))
        if first > span.first_page:
            fence = self.fence()
            self.mapper.reclaim([mapping for mapping in span.live() if mapping.page < first], fence)
            span.first_page = first
        self.table.starts[group, slot] = start_token

    def reclaim_run(self, slot: int, ends: list[int], fence: Fence) -> None:
        """Reclaim what a slot has from these borders of extents on."""
        for span, end in zip(self.spans(slot), ends, strict=True):
            self.mapper.reclaim(span.live_from(end), fence)
            span.end_page = end
        self.table.committed[slot] = self._tokens_under(ends)

    def reclaim_all(self, slot: int, fence: Fence, *, only_cut: bool = False) -> None:
        """Reclaim everything under a slot, as if it was never used.

        `only_cut`: in the groups alone that have lost their first pages, which a new sequence needs first.
        """
        for span in self.spans(slot):
            if span.first_page or not only_cut:
                self.mapper.reclaim(span.live(), fence)
                span.first_page = span.end_page = 0
        self.table.begin(slot, 0)
        self.table.committed[slot] = self.committed(slot)

    # laws

    def assert_owned(self, slot: int) -> None:
        """Law 3, before the next append: no extent behind a running sequence's tokens has another holder."""
        assert not self.is_shared_from(slot, int(self.table.lengths[slot])), (
            f"slot {slot} would write to a shared extent (law 3)"
        )

    def is_shared_from(self, slot: int, num_tokens: int) -> bool:
        """Has anything that is mapped for the rows of a slot from `num_tokens` on another holder?"""
        return any(mapping.extent.shared for span in self.spans(slot) for mapping in span.live_rows_from(num_tokens))

    def check(self) -> None:
        """Recount the mappings and the numbers of every slot."""
        for slot in range(len(self.table)):
            self._check_slot(slot)
        self.mapper.check()

    def _check_slot(self, slot: int) -> None:
        table, state = self.table, self.table.state(slot)
        for span in self.spans(slot):
            live = dict.fromkeys(span.live())
            assert not live or next(reversed(live)).end_page == span.end_page, f"slot {slot} ends within an extent"
            for mapping in span.mappings.values():
                assert (mapping in live) == (mapping.fence is None) != self.mapper.is_pending(mapping), (
                    "a mapping is neither live nor pending reclaim"
                )
                assert mapping.used == (mapping in live and state is SlotState.LIVE), "a mapping is used that is not, or is not"
            first_byte = self.start(span) * span.group.row_bytes
            assert span.first_page * PAGE_BYTES <= first_byte, f"slot {slot} keeps rows that are unmapped"
        assert (table.firsts[:, slot] <= table.starts[:, slot]).all(), f"slot {slot} keeps rows that it never had"
        assert table.committed[slot] == self.committed(slot), f"slot {slot}'s committed tokens are miscounted"
        if state is SlotState.LIVE:
            self.assert_owned(slot)
            assert table.limits[slot] == min(table.committed[slot], table.ends[slot]), f"slot {slot} has a wrong limit"
            assert table.starts[:, slot].max() <= max(table.lengths[slot], 0) <= table.limits[slot], (
                f"slot {slot} passes its limit"
            )
        else:
            assert not (table.limits[slot] or table.lengths[slot] or table.ends[slot]), (
                f"slot {slot} has no sequence and yet a limit"
            )
        is_bare = self.is_bare(slot)
        assert (state is SlotState.FREE) <= is_bare, f"slot {slot} is free and something is mapped"
        if state is SlotState.CLOSING and is_bare:
            assert slot in self.mapper.emptied_slots, f"slot {slot} is bare and would never be free"

    def _tokens_under(self, end_pages: list[int]) -> int:
        rows = (arena.group.tokens_under(end) for arena, end in zip(self.arenas, end_pages, strict=True))
        return max(0, min(rows) - self.guard_tokens)
