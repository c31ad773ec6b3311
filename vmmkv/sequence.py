"""What a user holds of a slot: a running sequence, or a parked one."""

import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vmmkv import sharing
from vmmkv.arguments import whole
from vmmkv.driver.base import Fence
from vmmkv.errors import Closed, OutOfPages, SequenceTooLong
from vmmkv.layout import SCALES, KVLayout
from vmmkv.slots import SlotTable
from vmmkv.units import counted

if TYPE_CHECKING:
    from vmmkv.occupancy import Occupancy


@dataclass(eq=False, slots=True)
class ParkedSlot:
    """A slot whose sequence has ended and whose mappings stay, until it is adopted or evicted."""

    slot: int
    length: int
    """Rows [0, length) that may be adopted; 0 is a blank slot, whose memory anybody of the tenant may have."""
    tenant: Hashable
    stamp: int
    """The pool's clock when it was parked."""
    fence: Fence
    """Behind all work that may still touch it: whoever reads it since then renews this."""
    num_pages: int
    """Mapped under it, over all groups."""

    def __repr__(self) -> str:
        return f"<ParkedSlot in slot {self.slot}: {counted(self.length, 'token')} in {counted(self.num_pages, 'page')}>"


class Sequence:
    """One sequence's memory: a slot of addresses, and what is mapped there. Made by `KVCache.open` or `adopt`.

    `length` tokens are written; rows [length, limit) are mapped and may be written next. Addresses never change
    while the sequence lives (law 6). Every method raises Closed after `close` or `park`.
    """

    __slots__ = ("_occupancy", "_rows", "closed", "max_tokens", "slot", "tenant")

    def __init__(self, occupancy: "Occupancy", slot: int, max_tokens: int, tenant: Hashable) -> None:
        self._occupancy = occupancy
        self._rows: dict[int, tuple[tuple[int, int], torch.Tensor]] = {}
        self.slot = slot
        self.max_tokens = max_tokens
        self.tenant = tenant
        self.closed = False

    @property
    def length(self) -> int:
        """Tokens written."""
        return int(self._table.lengths[self.slot])

    @property
    def limit(self) -> int:
        """Tokens that the mapped memory has room for, at most `max_tokens`; the device sees it as `cache.limit[slot]`."""
        return int(self._table.limits[self.slot])

    def start(self, group: int = 0) -> int:
        """The first row still kept in a group: 0 unless `advance_start` was called."""
        group = self._check_group(group)
        return int(self._table.starts[group, self.slot])

    def grow(self, num_tokens: int) -> None:
        """Map memory so that this sequence can hold `num_tokens` tokens in all.

        On failure the sequence, its mappings and the budget are exactly as before, but that parked slots may have been
        evicted to make room.

        Cost: one map and one access call for each page that is missing (and a create or a zero where there is no free
        page of this tenant); none, nor the pool's lock, if enough is mapped. Blocks only if the pool must wait for a
        retirement, or the lock is taken. Not under graph capture.
        Raises: SequenceTooLong; OutOfPages, naming the pages wanted, free and evictable; DriverError.
        """
        num_tokens = self._check_reach(num_tokens)
        if num_tokens <= self.limit:
            return
        occupancy, began_ns = self._occupancy, time.perf_counter_ns()
        with occupancy.pool.lock:
            occupancy.check_thread()
            if num_tokens > self._table.committed[self.slot]:  # else the mapper was at it
                try:
                    occupancy.memory.grow(self.slot, num_tokens)
                except OutOfPages as error:
                    raise OutOfPages(f"sequence in slot {self.slot} cannot grow to {num_tokens} tokens: {error}") from None
            if self.length:
                occupancy.stalls += 1
                occupancy.stall_us += (time.perf_counter_ns() - began_ns) / 1e3

    def expect(self, num_tokens: int) -> None:
        """Say that `num_tokens` tokens in all are to come soon, so that the mapper has the memory ready. No driver call.

        Raises: SequenceTooLong.
        """
        table = self._table
        table.expected[self.slot] = self._check_reach(num_tokens)
        self._occupancy.wake()

    def advance(self, num_tokens: int = 1) -> None:
        """`num_tokens` more rows have been written. No driver call.

        Raises: RowsUnmapped if that passes `limit`: grow first.
        """
        self._check_live()
        self._occupancy.advance(self.slot, num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens only; pages wholly past them (and the guard) retire.

        Cost: one fence if any page retires; no map or unmap. Does not block.
        Raises: ValueError for more than `length`; RowsUnmapped if a window has moved past what would be needed.
        """
        with self._occupancy.pool.lock:
            table = self._table
            num_tokens = self._check_kept(num_tokens)
            self._occupancy.check_windows(self.slot, num_tokens)
            sharing.own_from(self._occupancy.memory, self.slot, num_tokens)
            self._occupancy.memory.retire_from(self.slot, num_tokens)
            self._occupancy.forget(self.slot, num_tokens)
            table.lengths[self.slot] = num_tokens
            table.expected[self.slot] = 0
            self._occupancy.memory.assert_owned(self.slot)

    def own_from(self, num_tokens: int) -> None:
        """Have pages of its own for the rows from `num_tokens` on, as far as `truncate(num_tokens)` keeps their pages.

        What `truncate` does first, and alone can find no page. So several sequences are cut all or none: who cuts them has
        each own its rows before the first is cut. A fork made in between shares again.
        Cost: none if nobody else holds those pages; else, for each, an unmap, a map and two copies, and it waits for all work
        launched so far. On failure all tokens are as before.
        Raises: as truncate; OutOfPages, DriverError.
        """
        with self._occupancy.pool.lock:
            num_tokens = self._check_kept(num_tokens)
            self._occupancy.check_windows(self.slot, num_tokens)
            sharing.own_from(self._occupancy.memory, self.slot, num_tokens)

    def advance_start(self, group: int, start_token: int | None = None) -> None:
        """Give back a windowed group's rows before `start_token`, by default all that the next token cannot see.

        Cost: one fence if any page retires. Does not block.
        Raises: ValueError if the group has no window, or rows would go that the next token still sees.
        """
        with self._occupancy.pool.lock:
            table = self._table
            group = self._check_group(group)
            layout_group = self._layout.groups[group]
            if layout_group.window is None:
                raise ValueError(f"group {group} has no window: all its rows are needed")
            current = int(table.starts[group, self.slot])
            unseen = self._layout.start_for(layout_group, int(table.lengths[self.slot]))
            latest = max(unseen, current)
            start_token = latest if start_token is None else whole("start_token", start_token)
            if not current <= start_token <= latest:
                raise ValueError(
                    f"start_token={start_token} in group {group} of slot {self.slot}: it is {current} now, and with a window "
                    f"of {layout_group.window} the next token sees rows from {unseen} on"
                )
            self._occupancy.memory.retire_before(self.slot, group, start_token)

    def k(self, layer: int) -> torch.Tensor:
        """Keys of a layer: `view(layer, "k")`. Not to be used once the sequence has ended."""
        return self.view(layer, "k")

    def v(self, layer: int) -> torch.Tensor:
        """Values of a layer: `view(layer, "v")`."""
        return self.view(layer, "v")

    def k_scale(self, layer: int) -> torch.Tensor:
        """The scales of quantised keys, kept in the rows: [limit - start, heads], strided by 2."""
        return self.view(layer, SCALES)[..., 0]

    def v_scale(self, layer: int) -> torch.Tensor:
        """The scales of quantised values, each behind that of its keys."""
        return self.view(layer, SCALES)[..., 1]

    def view(self, layer: int, plane: str) -> torch.Tensor:
        """A plane of a layer over the rows [start, limit): [limit - start, heads, dim], to read and to write in place.

        A plane without a dim, as scales have none, gives [limit - start, heads].

        Its storage ends with the last mapped row, so that torch itself refuses whatever goes past it. Take a new view
        after `grow`, `truncate` or `advance_start`; the addresses stay the same. Drop it before `close` or `park`: then others
        may have the memory, and when it is unmapped touching it ends the process, or loses the CUDA context.
        Cost: 3 us; no driver call, no copy.
        Raises: LayoutError for a layer or plane that there is not.
        """
        table = self._table
        arena = self._occupancy.memory.arena_of(layer)
        bounds = int(table.starts[arena.index, self.slot]), int(table.limits[self.slot])
        known = self._rows.get(arena.index)
        if known is None or known[0] != bounds:
            known = self._rows[arena.index] = bounds, arena.rows(self.slot, *bounds)
        return arena.view_rows(known[1], layer, plane)

    def park(self, num_tokens: int | None = None) -> ParkedSlot:
        """End the sequence and keep its memory mapped, with its first `num_tokens` (all by default) to be adopted.

        Parked slots are taken back, the oldest first, when the pool runs short. 0 tokens makes a blank slot, which the
        next `open` of this tenant takes without a driver call.
        Cost: one fence.
        """
        occupancy = self._occupancy
        with occupancy.pool.lock:
            num_tokens = int(self._table.lengths[self.slot]) if num_tokens is None else num_tokens
            num_tokens = self._check_kept(num_tokens)
            if num_tokens:
                self._occupancy.check_windows(self.slot, num_tokens)
            return occupancy.park(self, num_tokens)

    def close(self) -> None:
        """End the sequence; its pages retire and are free once all work launched so far is done. Idempotent.

        Cost: one fence. Does not block.
        """
        with self._occupancy.pool.lock:
            if not self.closed:
                self._occupancy.close(self)

    def __repr__(self) -> str:
        if self.closed:
            return f"<Sequence in slot {self.slot}, closed>"
        return f"<Sequence in slot {self.slot}: {counted(self.length, 'token')}, room for {self.limit} of {self.max_tokens}>"

    def __enter__(self) -> "Sequence":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _table(self) -> SlotTable:
        self._check_live()
        return self._occupancy.table

    @property
    def _layout(self) -> KVLayout:
        return self._occupancy.layout

    def _check_live(self) -> None:
        self._occupancy.pool.lock.check_process()
        if self.closed:
            raise Closed(f"the sequence in slot {self.slot} was closed or parked; open or adopt another")

    def _check_group(self, group: int) -> int:
        group = whole("group", group)
        if not 0 <= group < len(self._layout.groups):
            raise ValueError(f"group={group}: this cache has groups 0 to {len(self._layout.groups) - 1}")
        return group

    def _check_reach(self, num_tokens: int) -> int:
        self._check_live()
        num_tokens = whole("num_tokens", num_tokens)
        if num_tokens < 0:
            raise ValueError(f"num_tokens={num_tokens}: it cannot be negative")
        if num_tokens > self.max_tokens:
            raise SequenceTooLong(
                f"the sequence in slot {self.slot} cannot have {counted(num_tokens, 'token')}: it was opened with "
                f"max_tokens={self.max_tokens}"
            )
        return num_tokens

    def _check_kept(self, num_tokens: int) -> int:
        num_tokens = whole("num_tokens", num_tokens)
        length = int(self._table.lengths[self.slot])
        if not 0 <= num_tokens <= length:
            raise ValueError(f"num_tokens={num_tokens}: the sequence in slot {self.slot} has {length} tokens to keep")
        return num_tokens
