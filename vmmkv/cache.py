"""KVCache: one contiguous range of addresses for each sequence, with memory mapped on demand.

    pool = Pool("cuda:0", budget_bytes=8 * GIB)
    cache = KVCache(layout, pool, slots=256, max_tokens=32768)
    sequence = cache.open()
    sequence.grow(1000)                       # maps pages under the slot
    sequence.k(layer)[:1000] = keys           # a plain tensor: any kernel, any write
    sequence.advance(1000)

Every operation takes the pool's lock, so caches may share a pool and threads may share a cache. A failure leaves the cache as
it was. The states of a slot, which is the unit that sequences occupy, are drawn in `vmmkv.memory.slots`.
"""

import functools
import itertools
import os
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from vmmkv import saved
from vmmkv.arguments import checked_name, instance, whole
from vmmkv.errors import BudgetError, Evicted, OutOfSlots, SequenceTooLong
from vmmkv.layout import KVLayout
from vmmkv.lifetime import Closing, Unique
from vmmkv.memory import sharing
from vmmkv.memory.memory_map import slot_maps
from vmmkv.memory.pool import Pool
from vmmkv.memory.slots import LiveSlot, ParkedSlot, Slots, all_or_none, cut_positions
from vmmkv.memory.states import SlotMap, SlotState
from vmmkv.sequence import Planes, Sequence, live_slot
from vmmkv.units import PAGE_BYTES, ceil_div, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """A cache at one moment.

    mapped = tokens + guard + waste + parked;  held = mapped + pending reclaim (of this cache's share of the pool)
    """

    reserved_bytes: int
    """Addresses, which cost nothing."""
    mapped_bytes: int
    """Memory under live and parked slots."""
    pending_reclaim_bytes: int
    """Memory that waits for a fence before it is unmapped."""
    parked_bytes: int
    """Memory under parked slots, which can be adopted and is evicted under pressure."""
    token_bytes: int
    """Bytes of the rows of written tokens, over all running sequences."""
    guard_bytes: int
    """Memory mapped past the tokens, for kernels that read whole tiles."""
    waste_bytes: int
    """Memory mapped for running sequences beyond tokens and guard: unfilled pages and pages mapped ahead."""
    pool_created_bytes: int
    pool_held_bytes: int
    pool_used_bytes: int
    """Bytes held by running sequences of all caches, a shared page counted once. Other held memory can be evicted."""
    pool_free_bytes: int
    pool_budget_bytes: int
    num_tokens: int
    """Tokens of running sequences."""
    num_sequences: int
    num_parked: int
    num_slots: int
    blocked_steps: int
    """Growths of a sequence that had rows already and lacked memory: the caller waited for the driver or the lock.

    A step of several sequences can count several times. A sequence that begins with an attached prefix counts too.
    """
    blocked_us: float
    """Time that the growths in `blocked_steps` took in all, from the call on."""
    mapped_pages: int
    """Pages mapped in the cache's life."""
    mapped_ahead_pages: int
    """Pages that `map_ahead` mapped, of `mapped_pages`."""
    adopted_slots: int
    """Slots handed on with their mappings, which cost no driver call."""
    driver_calls: dict[str, int]
    """Successful calls by name, of the whole pool."""


class KVCache(Planes, Closing, Unique):
    """Keys and values of up to `slots` sequences of up to `max_tokens` tokens each, in memory of `pool`.

    Addresses are reserved at once, and cost no memory; memory is mapped as sequences grow. `slots` counts running and parked
    sequences. `guard_tokens` rows past the length are kept mapped for kernels that load whole tiles: 176 for
    FlashAttention-3, 0 for kernels with masked loads.

    Close it, or use it in a `with` block; closing the pool closes it too. If a signal handler raises while `open`, `adopt`,
    `fork` or `restore` runs, as Ctrl-C does, the new sequences end; of a slot that was adopted the rows are gone then.

    Raises: ValueError; BudgetError if the pool cannot hold a page for each group; DriverError, of the kind OutOfAddresses for
    more slots of that length than there are addresses for; GraphCapture.
    Cost: a reserve, and for each group a map and an access call; waiting for the caller's current stream.
    """

    def __init__(self, layout: KVLayout, pool: Pool, *, slots: int, max_tokens: int, guard_tokens: int = 0) -> None:
        slots, max_tokens = whole("slots", slots), whole("max_tokens", max_tokens)
        guard_tokens = whole("guard_tokens", guard_tokens)
        if not isinstance(layout, KVLayout) or not isinstance(pool, Pool):
            raise TypeError(f"KVCache(layout, pool, ...) takes a KVLayout and a Pool, not {type(layout)} and {type(pool)}")
        if slots < 1 or max_tokens < 1 or guard_tokens < 0:
            raise ValueError(
                f"slots={slots}, max_tokens={max_tokens}, guard_tokens={guard_tokens}: slots and max_tokens must be at "
                f"least 1, guard_tokens at least 0"
            )
        if max_tokens + guard_tokens >= 2**31:
            raise ValueError(
                f"max_tokens={max_tokens} with its guard must stay below 2**31, for limits are int32 on the device"
            )
        if pool.budget_bytes < len(layout.groups) * PAGE_BYTES:
            raise BudgetError(
                f"a pool of {format_bytes(pool.budget_bytes)} cannot hold a page for each of {len(layout.groups)} groups; "
                f"the least is {format_bytes(len(layout.groups) * PAGE_BYTES)}"
            )
        self.layout: Final = layout
        self.pool: Final = pool
        self.device: Final = pool.device
        self.max_tokens: Final = max_tokens
        self.guard_tokens: Final = guard_tokens
        self.num_slots: Final = slots
        """Slots that sequences can have, taken or not: they are numbered from 1."""
        self._mapped_ahead_pages = 0
        self.slots: Final = Slots(layout, pool, num_slots=slots, max_tokens=max_tokens, guard_tokens=guard_tokens)
        """Internal: what occupies each slot, for `vmmkv.prefix` too."""
        self.limit: Final = self.slots.memory.limit
        """[1 + slots] int32 on the device: rows below it may be written; 0 where no sequence runs."""
        self.limits: Final = _read_only(self.slots.table.limits)
        """[1 + slots] what `limit` holds on the device; read-only."""
        self.lengths: Final = _read_only(self.slots.table.lengths)
        """[1 + slots] tokens written, by slot; read-only."""

    @property
    def closed(self) -> bool:
        """Is the cache closed, by `close` or with its pool? Only `close` can be called then."""
        return self.slots.closed

    @property
    def sequences(self) -> dict[int, Sequence]:
        """Internal: the running sequences by slot, as new objects."""
        return {slot: Sequence(live) for slot, live in self.slots.live_slots.items()}

    # sequences

    @property
    def slot_pages(self) -> list[int]:
        """Pages of addresses that each slot has, by group of layers."""
        return [arena.slot_bytes // PAGE_BYTES for arena in self.slots.memory.arenas]

    def open(self, *, max_tokens: int | None = None, tenant: Hashable = None) -> Sequence:
        """A new, empty sequence of at most `max_tokens` tokens (the cache's by default), in a free slot.

        A blank parked slot of the same tenant is taken first, with what is mapped there.
        Memory that another tenant wrote is zeroed before this one sees it (law 7). A tenant is named by text, bytes, an
        integer, None, or a tuple of these.

        Cost: no driver call if a slot is free, but the limit's write if it is blank. If none is, the tenant's oldest
        parked slot is taken over like a blank one, or another's is evicted and its fence waited for.
        Raises: OutOfSlots; DriverError, after which parked slots may have been evicted; SequenceTooLong if `max_tokens`
        is more than the cache's; GraphCapture.
        """
        with all_or_none() as begun, self.pool.lock:
            begun.append(self.slots.open(self.slots.check_end(max_tokens), checked_name("tenant", tenant)))
            return Sequence(begun[0])

    def open_batch(self, count: int, *, max_tokens: int | None = None, tenant: Hashable = None) -> list[Sequence]:
        """`count` new sequences in adjacent slots, so that `cache.k(layer)[first:first + count]` is their batch.

        Cost and errors: as `open`.
        """
        count = whole("count", count)
        if count < 1:
            raise ValueError(f"count={count}: a batch has at least 1 sequence")
        with all_or_none() as begun, self.pool.lock:
            end, tenant = self.slots.check_end(max_tokens), checked_name("tenant", tenant)
            first = self.slots.clear_run(count)
            begun += [self.slots.open_at(slot, end, tenant) for slot in range(first, first + count)]
            return [*map(Sequence, begun)]

    def adopt(
        self, parked: ParkedSlot, num_tokens: int | None = None, *, max_tokens: int | None = None, tenant: Hashable = None
    ) -> Sequence:
        """A new sequence in a parked slot, whose first `num_tokens` rows (all by default) are its own already.

        Cost: no driver call but the limit's write. If these rows end within a page that other sequences or the prefix tree
        hold, that page is exchanged for one of its own (see Sequence.truncate).
        Raises: Evicted if the slot was evicted or adopted meanwhile; ValueError for another tenant's, or more rows than
        were parked; RowsUnmapped if a window has moved past what `num_tokens` needs; SequenceTooLong; GraphCapture. Where a
        page is exchanged OutOfPages and DriverError, and the slot stays parked.
        """
        with all_or_none() as begun, self.pool.lock:
            end = self.slots.check_end(max_tokens)
            self._check_parked(parked)
            num_tokens = parked.length if num_tokens is None else whole("num_tokens", num_tokens)
            if parked.tenant != checked_name("tenant", tenant):
                raise ValueError(f"slot {parked.slot} was parked by another tenant")
            if not 0 <= num_tokens <= parked.length:
                raise ValueError(f"num_tokens={num_tokens}: slot {parked.slot} was parked with {parked.length} tokens")
            if num_tokens > end:
                raise SequenceTooLong(f"{num_tokens} parked tokens are adopted by a sequence of max_tokens={end}")
            if num_tokens:
                self.slots.check_windows(parked.slot, num_tokens)
            self.slots.check_capture()
            begun.append(self.slots.adopt(parked, num_tokens, end))
            return Sequence(begun[0])

    def fork(self, sequence: Sequence, count: int = 1, *, max_tokens: int | None = None) -> list[Sequence]:
        """`count` new sequences that have all tokens of a running one, as vLLM's forked block tables do.

        Full extents are shared, and their rows are read-only: nothing copies them on a write. The last, partial page is
        copied. To write further back, truncate first.
        Cost: for each new sequence and group a map and an access call for each full extent, the same and a copy for the
        partial page. All or none. Raises: OutOfSlots, OutOfPages, SequenceTooLong, DriverError, GraphCapture.
        """
        count = whole("count", count)
        if count < 1:
            raise ValueError(f"count={count}: a fork makes at least 1 sequence")
        with all_or_none() as begun, self.pool.lock:
            end, (parent,) = self._check_fork([sequence], max_tokens)
            available = self.num_slots - len(self.slots.live_slots)
            if count > available:
                raise OutOfSlots(f"{count} slots are wanted and {available} of {self.num_slots} run no sequence; close some")
            for _ in range(count):
                begun.append(self._fork(parent, self.slots.clear_run(1), end))
            return [*map(Sequence, begun)]

    def fork_batch(self, sequences: Iterable[Sequence], *, max_tokens: int | None = None) -> list[Sequence]:
        """A fork of each of these running sequences, in this order and in adjacent slots; one may be named several times.

        So a batch as of `open_batch` grows, shrinks or changes its order; the caller closes what it no longer needs.
        Cost and errors: as `fork`; ValueError for none.
        """
        with all_or_none() as begun, self.pool.lock:
            end, parents = self._check_fork(sequences, max_tokens)
            if not parents:
                raise ValueError("a batch has at least 1 sequence, and none was named to fork")
            for slot, parent in enumerate(parents, self.slots.clear_run(len(parents))):
                begun.append(self._fork(parent, slot, end))
            return [*map(Sequence, begun)]

    def copy_rows(self, pairs: Iterable[tuple[Sequence, Sequence]], first: int, end: int) -> None:
        """Copy rows [first, end) of the source to the target of each pair (source, target), which then has `end` tokens.

        A beam search does this when one beam goes on from another: rows that both have already stay where they are. No
        sequence is a target twice, or target and source. In a windowed group the target keeps the rows that both still have.
        Cost: a copy for each pair and group, launched on the caller's current stream (about 10 us each on a GPU until they
        are larger than some MiB, where copying in one kernel would take 1 us for 2 MiB); no driver call. All or none.
        Raises: RowsUnmapped if a target has no memory for `end` tokens, or a window has moved past what its next token needs;
        ValueError if a sequence has too few tokens, or shares a page that would be written (truncate and grow it first).
        """
        first, end = whole("first", first), whole("end", end)
        with self.pool.lock:
            slots, memory = self.slots, self.slots.memory
            slots.check_open()
            copies = [(live_slot(source, slots), live_slot(target, slots)) for source, target in pairs]
            targets = {target.slot for _, target in copies}
            if len(targets) < len(copies) or any(source.slot in targets for source, _ in copies):
                raise ValueError("a sequence is a target twice, or target and source: the order of the copies would matter")
            for source, target in copies:
                for live in (source, target):
                    slots.check_windows(live.slot, end)
                sharing.check_copy(memory, source.slot, target.slot, first, end)
            if memory.streams:
                slots.check_capture()
            with memory.copying():
                for source, target in copies:
                    slots.keeper.forget(target.slot, first)
                    sharing.copy_rows(memory, source.slot, target.slot, first, end)
                    target.positions = cut_positions(source.positions, end)

    def restore(
        self,
        path: str | os.PathLike[str],
        *,
        fingerprint: str = "",
        max_tokens: int | None = None,
        tenant: Hashable = None,
    ) -> Sequence:
        """A new sequence with the rows that `Sequence.save` wrote; the file stays.

        Cost: as `open` and `grow`; blocks while the rows are read and copied, but without the lock.
        Raises: as these; OSError; ValueError if the file is damaged, or of another layout or fingerprint. All or nothing.
        """
        tenant = checked_name("tenant", tenant)
        with all_or_none() as begun:
            saved.restore(self.slots, Path(path), fingerprint, begun, max_tokens=max_tokens, tenant=tenant)
            return Sequence(begun[0])

    def parked(self) -> list[ParkedSlot]:
        """The parked slots, the oldest first."""
        with self.pool.lock:
            return list(self.slots.parked_slots.values())

    def evict(self, parked: ParkedSlot) -> None:
        """Reclaim a parked slot's memory. Raises Evicted if that has happened, or it was adopted. No driver call."""
        with self.pool.lock:
            self._check_parked(parked)
            self.slots.evict(parked)

    def advance(self, slots: npt.ArrayLike, num_tokens: npt.ArrayLike = 1) -> None:
        """`num_tokens` (one number, or one for each) more rows have been written in each of these slots; those of a slot that
        is named twice add up.

        Cost: a few numpy calls whatever the number of slots; no driver call. It takes no lock, for only the owner of a
        sequence writes its length.
        Raises: RowsUnmapped, naming the first slot that would pass its limit; ValueError for a negative number or a slot
        that does not exist; TypeError for anything but whole numbers. Then none has advanced.
        """
        self.slots.check_open()
        self.slots.table.advance(slots, num_tokens)

    # views

    def view(self, layer: int, plane: str) -> torch.Tensor:
        """A plane of a layer over the whole arena: [1 + slots, slot_tokens, heads, dim], strided; for batched kernels.

        Slot 0 is the null slot: its first page is always mapped, read-only and zero. Kernels and launchers that look at the
        tensor's own address find memory there, and padding rows of a batch point to it. Most of the rest is not mapped:
        a kernel must load rows below each sequence's length only (plus the guard). Strides pass 2**31 elements. The view
        is valid until the cache is closed. To save, pickle, deep-copy or share it, or a part of it, raises ViewNotCloned:
        clone() the rows that there are. Cost: about 4 us; no driver call, no copy, no touch.
        """
        self.slots.check_open()
        return self.slots.memory.arena_of(layer).view(layer, plane)

    # ahead of need, and behind

    def lookahead_tokens(self, step_us: float) -> int:
        """The lookahead with which no step of one token waits for memory, if `map_ahead` has `step_us` in each step.

        Enough even if every sequence crosses a page at once, by the measured cost of mapping one.
        """
        pages_due = len(self.slots.live_slots) * len(self.layout.groups)
        return 1 + ceil_div(int(pages_due * self.slots.memory.mapper.map_us), max(1, int(step_us)))

    def map_ahead(self, budget_us: float = float("inf"), *, lookahead_tokens: int = 1) -> int:
        """Map and unmap pages for about `budget_us`: call it while launched work is still queued on the device.

        First it maps for sequences that have less memory than their next token needs, then than `lookahead_tokens` more
        need: each time the most urgent first, and never past their end. A sequence that finds too few pages is skipped.
        Then it unmaps reclaimed memory whose fence has passed.

        Cost: map and access, or unmap, for each page; the number of pages is returned. At least one page if there is
        any to do, however small the budget. Never waits for a fence, nor evicts a parked slot that running work may touch.
        Raises: DriverError, and the work before it stays done; GraphCapture; ValueError for a negative budget or lookahead.
        """
        lookahead_tokens = whole("lookahead_tokens", lookahead_tokens)
        if not budget_us >= 0:  # nor is it NaN
            raise ValueError(f"budget_us={budget_us}: time to spend is at least 0; leave it out for no limit")
        if lookahead_tokens < 0:
            raise ValueError(f"lookahead_tokens={lookahead_tokens}: how far memory is mapped ahead is at least 0")
        with self.pool.lock:
            self.slots.check_open()
            self.slots.check_capture()
            began_ns = time.perf_counter_ns()
            num_pages = self.slots.memory.map_ahead(budget_us, lookahead_tokens)
            self._mapped_ahead_pages += num_pages
            left_us = budget_us - (time.perf_counter_ns() - began_ns) / 1e3
            if num_pages and left_us < self.slots.memory.mapper.unmap_us:
                return num_pages
            return num_pages + self.slots.collect(left_us)

    def drain(self) -> None:
        """Unmap all reclaimed memory, and seal what a holder process keeps, waiting for fences: for when nothing else is to do.

        Cost: one unmap for each page. Blocks until the work that touches them is done, but without the lock.
        Raises: DriverError, GraphCapture.
        """
        self.slots.check_open()
        self.slots.drain()

    def record_stream(self, stream: torch.Stream) -> None:
        """Work on this stream touches the cache too.

        Reclaimed memory waits for it, and zeroes and limits are ordered before it, as for the stream that is current
        when the cache is called. The caller must order work on any other stream.
        Raises: ValueError for another device's; GraphCapture.
        """
        self.slots.check_open()
        if not hasattr(stream, "device"):
            raise TypeError(f"stream={stream!r} is a {type(stream).__name__}; give a torch.Stream, such as torch.cuda.Stream()")
        with self.pool.lock:
            self.slots.check_open()
            if stream.device != self.device:
                raise ValueError(f"a stream of {stream.device} cannot be recorded by a cache on {self.device}")
            self.slots.check_capture()
            if stream not in self.slots.memory.streams:
                self.slots.memory.streams.append(stream)
                self.slots.memory.order()

    # the whole

    def stats(self) -> CacheStats:
        """The cache at this moment. Cost: some tens of microseconds; no driver call."""
        with self.pool.lock:
            slots, table, memory, pool = self.slots, self.slots.table, self.slots.memory, self.pool
            parked_pages = sum(parked.num_pages for parked in slots.parked_slots.values())
            live_pages = sum(memory.num_pages(slot) for slot in slots.live_slots)
            token_bytes = guard_bytes = 0
            for span in itertools.chain.from_iterable(map(memory.spans, slots.live_slots)):
                row_bytes = span.group.row_bytes
                length_bytes = int(table.lengths[span.slot]) * row_bytes
                token_bytes += length_bytes - memory.start(span) * row_bytes
                room_bytes = max(0, span.end_page * PAGE_BYTES - length_bytes)
                guard_bytes += min(memory.guard_tokens * row_bytes, room_bytes)
            return CacheStats(
                reserved_bytes=sum(arena.reserved_bytes for arena in memory.arenas),
                mapped_bytes=(live_pages + parked_pages) * PAGE_BYTES,
                pending_reclaim_bytes=memory.mapper.pending_pages * PAGE_BYTES,
                parked_bytes=parked_pages * PAGE_BYTES,
                token_bytes=token_bytes,
                guard_bytes=guard_bytes,
                waste_bytes=live_pages * PAGE_BYTES - token_bytes - guard_bytes,
                pool_created_bytes=pool.created_bytes,
                pool_held_bytes=pool.held_bytes,
                pool_used_bytes=pool.used_bytes,
                pool_free_bytes=pool.free_bytes,
                pool_budget_bytes=pool.budget_bytes,
                num_tokens=int(table.lengths.sum()),
                num_sequences=len(slots.live_slots),
                num_parked=len(slots.parked_slots),
                num_slots=self.num_slots,
                blocked_steps=slots.blocked_steps,
                blocked_us=slots.blocked_us,
                mapped_pages=memory.mapped_pages,
                mapped_ahead_pages=self._mapped_ahead_pages,
                adopted_slots=slots.num_taken_over,
                driver_calls=dict(pool.driver.calls),
            )

    def taken_slots(self) -> list[int]:
        """The slots that are not free, in order: those under which something can be mapped."""
        with self.pool.lock:
            self.slots.check_open()
            return (1 + np.flatnonzero(self.slots.table.states[1:] != SlotState.FREE)).tolist()

    def slot_maps(self, slots: Iterable[int]) -> list[SlotMap]:
        """The runs of mapped memory under each of these slots, with their purpose: see `vmmkv.memory.states`.

        Cost: some 3 us for each slot, and 0.1 us for each extent mapped there; no driver call.
        Raises: ValueError for a number that is no slot of sequences.
        """
        slots = list(slots)
        if unknown := [slot for slot in slots if not 1 <= slot <= self.num_slots]:
            raise self.slots.table.no_such_slot(unknown[0])
        with self.pool.lock:
            self.slots.check_open()
            parked = {slot: parked.length for slot, parked in self.slots.parked_slots.items()}
            return slot_maps(self.slots.memory, parked, slots)

    def close(self) -> None:
        """End all sequences, wait for the work that touches them, unmap everything. Idempotent.

        Drop all views before: a later cache of the same size may be given the addresses.
        Cost: an unmap for each page. Blocks on the fences, but without the lock.
        Raises: DriverError, and then it can be called again; GraphCapture.
        """
        self.slots.close()

    def check(self) -> None:
        """Recount the laws from scratch, for this cache and its pool; AssertionError says which is broken."""
        self.slots.check()

    def __repr__(self) -> str:
        return repr(self.slots)

    # within

    def _fork(self, parent: LiveSlot, slot: int, end: int) -> LiveSlot:
        """A fork of a sequence, in a free slot."""
        slots, memory = self.slots, self.slots.memory
        pages = sharing.shareable(memory, parent.slot, parent.length)
        slots.table.begin(slot, slots.table.starts[:, parent.slot], slots.table.firsts[:, parent.slot])
        copy_bytes = functools.partial(sharing.copy_slot_bytes, memory, parent.slot)
        fork = slots.open_with(slot, end, parent.tenant, parent.length, pages, copy_bytes)
        fork.positions = parent.positions
        return fork

    def _check_fork(self, sequences: Iterable[Sequence], max_tokens: int | None) -> tuple[int, list[LiveSlot]]:
        """Check that these sequences can be forked; returns the end of the forks, and the sequences' slots."""
        end = self.slots.check_end(max_tokens)
        parents = [live_slot(sequence, self.slots) for sequence in sequences]
        for parent in parents:
            if parent.length > end:
                raise SequenceTooLong(f"{parent.length} tokens are forked to sequences of max_tokens={end}")
        self.slots.check_capture()
        return end, parents

    def _check_parked(self, parked: ParkedSlot) -> None:
        instance("parked", parked, ParkedSlot, "a ParkedSlot, as Sequence.park returns it")
        if self.slots.parked_slots.get(parked.slot) is not parked:
            raise Evicted(f"slot {parked.slot} is parked no longer: it was evicted or adopted; open a new sequence")


_Number = TypeVar("_Number", bound=np.generic)


def _read_only(array: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    view = array.view()
    view.flags.writeable = False
    return view
