"""The public cache: sequences over slots of one contiguous range of addresses each, with memory mapped on demand.

    pool = Pool("cuda:0", budget_bytes=8 * GIB)
    cache = KVCache(layout, pool, slots=256, max_tokens=32768)
    sequence = cache.open()
    sequence.grow(1000)                       # maps pages under the slot
    sequence.k(layer)[:1000] = keys           # a plain tensor: any kernel, any write
    sequence.advance(1000)

Sharing a pool, several caches take its lock for every operation, so driver calls come from one thread at a time.
"""

import functools
import warnings
from collections.abc import Hashable, Iterable
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from vmmkv import sharing
from vmmkv.arguments import whole
from vmmkv.errors import BudgetError, Closed, Evicted, OutOfSlots, SequenceTooLong
from vmmkv.layout import SCALES, KVLayout
from vmmkv.mapper_thread import MapperThread
from vmmkv.memory import SlotMemory
from vmmkv.memory_map import SlotMap, slot_maps
from vmmkv.occupancy import Occupancy
from vmmkv.pool import Pool
from vmmkv.sequence import ParkedSlot, Sequence
from vmmkv.slots import SlotState
from vmmkv.stats import CacheStats, snapshot
from vmmkv.units import PAGE_BYTES, ceil_div, counted, format_bytes

_THREAD_BUDGET_US = 200.0
"""For how long the mapper's thread keeps the pool's lock: a few pages."""


class KVCache:
    """Keys and values of up to `slots` sequences of up to `max_tokens` tokens each.

    `guard_tokens` rows past the committed ones are kept mapped for kernels that load whole tiles (FlashAttention-3:
    176; 0 for predicated kernels). Addresses are reserved at once, memory only as sequences grow.

    Raises: ValueError; BudgetError if the pool cannot hold a page for each group; DriverError.
    Cost: a reserve, a map and an access call for each group, and waiting for the caller's current stream.
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
        with pool.lock:
            pool.check_open()
            self._memory = SlotMemory(layout, pool, slots=slots, max_tokens=max_tokens, guard_tokens=guard_tokens)
            self._table = self._memory.table
            self._lengths, self._limits = _read_only(self._table.lengths), _read_only(self._table.limits)
            self._occupancy = Occupancy(layout, pool, self._memory)
            self._occupancy.attach()

    @property
    def closed(self) -> bool:
        """Has it been closed, by `close` or with its pool? Nothing but `close` can be called any more."""
        return self._occupancy.closed

    # sequences

    @property
    def num_slots(self) -> int:
        """Slots that sequences can have, taken or not: they are numbered from 1."""
        return self._table.num_slots

    @property
    def slot_pages(self) -> list[int]:
        """Pages of addresses that each slot has, by group of layers."""
        return [arena.slot_bytes // PAGE_BYTES for arena in self._memory.arenas]

    @property
    def limit(self) -> torch.Tensor:
        """[1 + slots] int32 on the device: rows below it may be written; 0 where no sequence runs."""
        return self._memory.limit

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[1 + slots] tokens written, by slot; read-only."""
        return self._lengths

    @property
    def limits(self) -> npt.NDArray[np.int32]:
        """[1 + slots] what `limit` holds on the device; read-only."""
        return self._limits

    def open(self, *, max_tokens: int | None = None, tenant: Hashable = None) -> Sequence:
        """A new sequence in a free slot, with `max_tokens` (the cache's by default) as its end.

        A blank parked slot of the same tenant is taken first, with what is mapped there.
        Memory that another tenant wrote is zeroed before this one sees it (law 7).

        Cost: no driver call if a slot is free, but the limit's write if it is blank. If none is, the tenant's oldest
        parked slot is taken over like a blank one, or another's is evicted and its fence waited for.
        Raises: OutOfSlots; DriverError, after which parked slots may have been evicted; SequenceTooLong if `max_tokens`
        is more than the cache's.
        """
        with self.pool.lock:
            end = self._check_end(max_tokens)
            parked = self._open_over(tenant)
            if parked is not None:
                return self._occupancy.take_over(parked, 0, end)
            return self._occupancy.open_at(self._occupancy.clear_run(1), end, tenant)

    def open_batch(self, count: int, *, max_tokens: int | None = None, tenant: Hashable = None) -> list[Sequence]:
        """`count` new sequences in adjacent slots, so that `cache.k(layer)[first:first + count]` is their batch.

        Cost and errors: as `open`.
        """
        count = whole("count", count)
        if count < 1:
            raise ValueError(f"count={count}: a batch has at least 1 sequence")
        with self.pool.lock:
            end = self._check_end(max_tokens)
            first = self._occupancy.clear_run(count)
            return [self._occupancy.open_at(slot, end, tenant) for slot in range(first, first + count)]

    def adopt(
        self, parked: ParkedSlot, num_tokens: int | None = None, *, max_tokens: int | None = None, tenant: Hashable = None
    ) -> Sequence:
        """A new sequence in a parked slot, whose first `num_tokens` rows (all by default) are its own already.

        Cost: no driver call but the limit's write; where these rows end within a page that others hold too, as they can if
        there were more before, that page is exchanged for one of its own (see Sequence.truncate).
        Raises: Evicted if it was taken back or adopted meanwhile; ValueError for another tenant's, or more rows than
        were parked; RowsUnmapped if a window has moved past what `num_tokens` needs; SequenceTooLong; where a page is exchanged
        OutOfPages and DriverError, and the slot stays parked.
        """
        with self.pool.lock:
            end = self._check_end(max_tokens)
            self._check_parked(parked)
            num_tokens = parked.length if num_tokens is None else whole("num_tokens", num_tokens)
            if parked.tenant != tenant:
                raise ValueError(f"slot {parked.slot} was parked by another tenant")
            if not 0 <= num_tokens <= parked.length:
                raise ValueError(f"num_tokens={num_tokens}: slot {parked.slot} was parked with {parked.length} tokens")
            if num_tokens > end:
                raise SequenceTooLong(f"{num_tokens} parked tokens are adopted by a sequence of max_tokens={end}")
            if num_tokens:
                self._occupancy.check_windows(parked.slot, num_tokens)
            return self._occupancy.take_over(parked, num_tokens, end)

    def fork(self, sequence: Sequence, count: int = 1, *, max_tokens: int | None = None) -> list[Sequence]:
        """`count` new sequences that have all tokens of a running one, as vLLM's forked block tables do.

        Extents that are full are shared, and their rows to be read only: nothing makes a copy when one is written. The last,
        partial page is copied, so that each goes its own way from there; to go back further, truncate first.
        Cost: for each new sequence and group a map and an access call for each full extent, the same and a copy for the
        partial page. All or none. Raises: OutOfSlots, OutOfPages, SequenceTooLong, DriverError.
        """
        count = whole("count", count)
        if count < 1:
            raise ValueError(f"count={count}: a fork makes at least 1 sequence")
        with self.pool.lock:
            end = self._check_end(max_tokens)
            self._check_fork(sequence, end)
            available = self._table.num_slots - len(self._occupancy.sequences)
            if count > available:
                raise OutOfSlots(
                    f"{count} slots are wanted and {available} of {self._table.num_slots} run no sequence; close some"
                )
            return self._fork_all(((sequence, self._occupancy.clear_run(1)) for _ in range(count)), end)

    def fork_batch(self, sequences: Iterable[Sequence], *, max_tokens: int | None = None) -> list[Sequence]:
        """A fork of each of these running sequences, in this order and in adjacent slots; one may be named several times.

        So a batch grows, shrinks or changes its order: the forks are a batch as those of `open_batch` are, and the sequences
        that it has left are closed by the caller.
        Cost and errors: as `fork`; ValueError for none.
        """
        with self.pool.lock:
            end = self._check_end(max_tokens)
            parents = list(sequences)
            if not parents:
                raise ValueError("a batch has at least 1 sequence, and none was named to fork")
            for parent in parents:
                self._check_fork(parent, end)
            first = self._occupancy.clear_run(len(parents))
            return self._fork_all([(parent, slot) for slot, parent in enumerate(parents, first)], end)

    def copy_rows(self, pairs: Iterable[tuple[Sequence, Sequence]], first: int, end: int) -> None:
        """Of each pair (source, target) the target takes rows [first, end) of the source, and then has `end` tokens.

        What a beam search does when one beam goes on from another: the rows that both have already stay where they are. No
        sequence is a target twice, or target and source. In a windowed group the target keeps the rows that both still have.
        Cost: a copy for each pair and group, launched on the caller's current stream (about 10 us each on a GPU until they
        are larger than some MiB, where copying in one kernel would take 1 us for 2 MiB); no driver call. All or none.
        Raises: RowsUnmapped if a target has no memory for `end` tokens, or a window has moved past what its next token needs;
        ValueError if a sequence has too few tokens, or others hold a page that would be written (truncate and grow it first).
        """
        first, end = whole("first", first), whole("end", end)
        with self.pool.lock:
            self._check_open()
            pairs = list(pairs)
            targets = {target.slot for _, target in pairs}
            if len(targets) < len(pairs) or any(source.slot in targets for source, _ in pairs):
                raise ValueError("a sequence is a target twice, or target and source: the order of the copies would matter")
            for source, target in pairs:
                for sequence in (source, target):
                    self._check_running(sequence)
                    self._occupancy.check_windows(sequence.slot, end)
                sharing.check_copy(self._memory, source.slot, target.slot, first, end)
            with self._memory.copying():
                for source, target in pairs:
                    self._occupancy.forget(target.slot, first)
                    sharing.copy_rows(self._memory, source.slot, target.slot, first, end)

    def parked(self) -> list[ParkedSlot]:
        """The parked slots, the oldest first."""
        with self.pool.lock:
            return list(self._occupancy.parked.values())

    def evict(self, parked: ParkedSlot) -> None:
        """Retire a parked slot's mappings. Raises Evicted if that has happened, or it was adopted. No driver call."""
        with self.pool.lock:
            self._check_parked(parked)
            self._occupancy.evict(parked)

    def advance(self, slots: npt.ArrayLike, num_tokens: npt.ArrayLike = 1) -> None:
        """`num_tokens` (one number, or one for each) more rows have been written in each of these different slots.

        Cost: a few numpy calls whatever the number of slots; no lock, no driver call.
        Raises: RowsUnmapped, naming the first slot that would pass its limit; ValueError for a negative number or a slot
        that there is not; TypeError for what is no whole number; then none has advanced.
        """
        self._check_open()
        self._occupancy.advance(slots, num_tokens)

    # views

    def k(self, layer: int) -> torch.Tensor:
        """Keys of a layer over all slots: `view(layer, "k")`."""
        return self.view(layer, "k")

    def v(self, layer: int) -> torch.Tensor:
        """Values of a layer over all slots: `view(layer, "v")`."""
        return self.view(layer, "v")

    def k_scale(self, layer: int) -> torch.Tensor:
        """The scales of quantised keys, kept in the rows: [1 + slots, slot_tokens, heads], strided by 2."""
        return self.view(layer, SCALES)[..., 0]

    def v_scale(self, layer: int) -> torch.Tensor:
        """The scales of quantised values, each behind that of its keys."""
        return self.view(layer, SCALES)[..., 1]

    def view(self, layer: int, plane: str) -> torch.Tensor:
        """A plane of a layer over the whole arena: [1 + slots, slot_tokens, heads, dim], strided; for batched kernels.

        A plane without a dim, as scales have none, gives [1 + slots, slot_tokens, heads].

        Slot 0 is the pad: its first page is always mapped, read-only and zero, so that kernels and launchers that look at
        the tensor's own address find memory there, and rows that only fill up a batch have a slot to point to. Most of
        the rest is not mapped: a kernel must load rows below each sequence's length only (plus the guard). Strides pass
        2**31 elements. It stays valid for the cache's life. Cost: about 4 us; no driver call, no copy, no touch.
        """
        self._check_open()
        return self._memory.arena_of(layer).view(layer, plane)

    # ahead of need, and behind

    def lookahead_tokens(self, step_us: float) -> int:
        """How many tokens ahead memory should be mapped so that no step waits, if the mapper has `step_us` in each.

        One token a step. If every sequence crosses a page at once, the mapper needs `pages due * measured cost`; it must
        have begun that many steps before.
        """
        pages_due = len(self._occupancy.sequences) * len(self.layout.groups)
        return 1 + ceil_div(int(pages_due * self._memory.mapper.map_us), max(1, int(step_us)))

    def map_ahead(self, budget_us: float = float("inf"), *, lookahead_tokens: int = 1) -> int:
        """Do the mapper's work for about `budget_us`: call it while launched work is still queued on the device.

        First it maps for sequences that have less memory than their next token needs, then than `lookahead_tokens` more do,
        then than they `expect`: each time the most urgent first, and never past their end. A sequence that finds too few
        pages for one of these gets none for it, and the others theirs. Then it unmaps what has retired and whose fence
        has passed.

        Cost: map and access, or unmap, for each page; the number of pages is returned. At least one page if there is
        any to do, however small the budget. Never waits for a fence, nor takes a parked slot that running work may touch.
        Not under graph capture.
        Raises: DriverError; what was done before it stays done. ValueError for a negative budget or lead.
        """
        lookahead_tokens = whole("lookahead_tokens", lookahead_tokens)
        if not budget_us >= 0:  # nor is it NaN
            raise ValueError(f"budget_us={budget_us}: time to spend is at least 0; leave it out for no limit")
        if lookahead_tokens < 0:
            raise ValueError(f"lookahead_tokens={lookahead_tokens}: how far memory is mapped ahead is at least 0")
        with self.pool.lock:
            self._check_open()
            return self._occupancy.map_ahead(budget_us, lookahead_tokens, settle=False)

    def drain(self) -> None:
        """Unmap everything that retires, waiting for its fences: for when there is nothing else to do.

        Cost: one unmap for each page; blocks until the work that touches them is done, but not the other users of the
        pool. Raises: DriverError.
        """
        self._check_open()
        self._occupancy.drain()

    def start_mapper(self, lookahead_tokens: int | None = None) -> None:
        """Pump in a thread, for users with no loop of their own. A graph capture then needs capture_error_mode="thread_local".

        `lookahead_tokens` is by default as many as a page holds. A DriverError of the thread is raised by `stop_mapper`, or
        by the next `grow` that lacks memory or `start_mapper`, once; then another can be started.
        """
        with self.pool.lock:
            self._check_open()
            self._occupancy.check_thread()
            if self._occupancy.thread is not None:
                raise ValueError("the mapper's thread runs already; stop_mapper() ends it")
            if lookahead_tokens is None:
                lookahead_tokens = max(1, *(group.tokens_under(1) for group in self.layout.groups))
            lookahead_tokens = whole("lookahead_tokens", lookahead_tokens)
            if lookahead_tokens < 1:
                raise ValueError(f"lookahead_tokens={lookahead_tokens}: the mapper maps at least 1 token ahead")
            name = f"vmmkv-mapper-{self._memory.number}"
            self._occupancy.thread = MapperThread(functools.partial(self._pump_some, lookahead_tokens), name=name)

    def stop_mapper(self) -> None:
        """End the thread. Idempotent. Raises what the thread failed with, if it did."""
        self.pool.lock.check_process()
        self._occupancy.stop_thread()

    def record_stream(self, stream: torch.Stream) -> None:
        """Work on this stream touches the cache too.

        Retirements wait for it, and what is zeroed or limited is ordered before it, as for the stream that is current
        when the cache is called. Work on streams that are neither must be ordered by whoever launches it.
        Raises: ValueError for another device's.
        """
        with self.pool.lock:
            self._check_open()
            if stream.device != self.device:
                raise ValueError(f"a stream of {stream.device} cannot be recorded by a cache on {self.device}")
            if stream not in self._memory.streams:
                self._memory.streams.append(stream)
                self._memory.order()

    # the whole

    def stats(self) -> CacheStats:
        """The cache at this moment. Cost: some tens of microseconds; no driver call."""
        with self.pool.lock:
            return snapshot(self._memory, self._occupancy)

    def taken_slots(self) -> list[int]:
        """The slots that are not free, in order: those under which something can be mapped."""
        with self.pool.lock:
            self._check_open()
            return (1 + np.flatnonzero(self._table.states[1:] != SlotState.FREE)).tolist()

    def slot_maps(self, slots: Iterable[int]) -> list[SlotMap]:
        """What is mapped under each of these slots, and for what: see `vmmkv.memory_map`.

        Cost: some 3 us for each slot, and 0.1 us for each extent mapped there; no driver call.
        Raises: ValueError for what is no slot of sequences.
        """
        slots = list(slots)
        unknown = [slot for slot in slots if not 1 <= slot <= self._table.num_slots]
        if unknown:
            raise ValueError(f"there is no slot {unknown[0]}: this cache has slots 1 to {self._table.num_slots}")
        with self.pool.lock:
            self._check_open()
            return slot_maps(self._memory, self._occupancy, slots)

    def close(self) -> None:
        """End all sequences, wait for the work that touches them, unmap everything. Idempotent.

        The addresses stay reserved until the process ends, so that a stale view faults (law 6).
        Cost: an unmap for each page; blocks on the fences, but not the other users of the pool.
        Raises: DriverError, and then it can be called again; what the mapper's thread failed with, and then it is closed.
        """
        self._occupancy.close_all()

    def __enter__(self) -> "KVCache":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        occupancy = getattr(self, "_occupancy", None)  # there is none if it could not be made
        if occupancy is not None and occupancy.attached:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        if not self._occupancy.attached:
            return f"<KVCache on {self.device}, closed>"
        sequences = counted(len(self._occupancy.sequences), "sequence")
        return f"<KVCache on {self.device}: {sequences} in {counted(self._table.num_slots, 'slot')}>"

    def check(self) -> None:
        """Recount the laws from scratch, for this cache and its pool; AssertionError says which is broken."""
        with self.pool.lock:
            self._memory.check()
            self._occupancy.check()
            self.pool.check()

    # within

    def _pump_some(self, lookahead_tokens: int) -> bool:
        """The thread's unit of work, made visible before anybody is told. Is there more to do?"""
        with self.pool.lock:
            return self._occupancy.map_ahead(_THREAD_BUDGET_US, lookahead_tokens, settle=True) > 0

    def _open_over(self, tenant: Hashable) -> ParkedSlot | None:
        """The parked slot that the next sequence of a tenant takes: the newest blank one, or the oldest if no slot is free."""
        parked = [parked for parked in self._occupancy.parked.values() if parked.tenant == tenant]
        blank = [each for each in parked if not each.length]
        if blank:
            return blank[-1]
        return parked[0] if parked and not self._table.where(SlotState.FREE) else None

    def _fork_all(self, pairs: Iterable[tuple[Sequence, int]], end: int) -> list[Sequence]:
        """Forks of these sequences in these free slots; all or none."""
        forks: list[Sequence] = []
        try:
            for parent, slot in pairs:
                forks.append(self._occupancy.fork(parent, slot, end))
        except BaseException:
            for fork in forks:
                fork.close()
            raise
        return forks

    def _check_fork(self, sequence: Sequence, end: int) -> None:
        self._check_running(sequence)
        if sequence.length > end:
            raise SequenceTooLong(f"{sequence.length} tokens are forked to sequences of max_tokens={end}")

    def _check_running(self, sequence: Sequence) -> None:
        if self._occupancy.sequences.get(sequence.slot) is not sequence:
            raise Closed(f"{sequence!r} is no running sequence of this cache")

    def _check_parked(self, parked: ParkedSlot) -> None:
        if self._occupancy.parked.get(parked.slot) is not parked:
            raise Evicted(f"slot {parked.slot} is parked no longer: it was evicted or adopted; open a new sequence")

    def _check_open(self) -> None:
        self.pool.lock.check_process()
        if self.closed:
            raise Closed("this cache is closed")

    def _check_end(self, max_tokens: int | None) -> int:
        self._check_open()
        end = self.max_tokens if max_tokens is None else whole("max_tokens", max_tokens)
        if end < 1:
            raise ValueError(f"max_tokens={end}: a sequence has at least 1")
        if end > self.max_tokens:
            raise SequenceTooLong(f"max_tokens={end} is more than this cache's slots have addresses for, {self.max_tokens}")
        return end


_Number = TypeVar("_Number", bound=np.generic)


def _read_only(array: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    view = array.view()
    view.flags.writeable = False
    return view
