"""KVCache: one contiguous range of addresses for each sequence, with memory mapped on demand.

    pool = Pool("cuda:0", budget_bytes=8 * GIB)
    cache = KVCache(layout, pool, slots=256, max_tokens=32768)
    sequence = cache.open()
    sequence.grow(1000)                       # maps pages under the slot
    sequence.k(layer)[:1000] = keys           # a plain tensor: any kernel, any write
    sequence.advance(1000)

States of a slot, which is the unit that sequences occupy:

    free ──open──> live ──park──> parked ──adopt, open──> live
     ^              │               │
     │            close           evict
     └──unmapped── closing <────────┘

Every operation takes the pool's lock, so caches may share a pool and threads may share a cache. In every step the calls that
can fail come first: a failure leaves the slots as they were.
"""

import contextlib
import functools
import itertools
import operator
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.arguments import instance, label, whole, wholes
from vmmkv.driver.base import Fence, retried
from vmmkv.errors import BudgetError, Closed, DriverError, Evicted, OutOfPages, OutOfSlots, RowsUnmapped, SequenceTooLong
from vmmkv.layout import SCALES, KVLayout
from vmmkv.lifetime import Closing, Unique
from vmmkv.memory import sharing
from vmmkv.memory.memory_map import slot_maps
from vmmkv.memory.pool import Evictable, Extent, Pool
from vmmkv.memory.slot_memory import SlotMemory
from vmmkv.memory.states import SlotMap, SlotState
from vmmkv.units import PAGE_BYTES, ceil_div, counted, format_bytes

_Positions: TypeAlias = npt.NDArray[np.int64] | None
"""Of the rows that were there after a compaction, and of the row behind them. None: of each row it is its number."""


def _positions(known: _Positions, num_tokens: int) -> npt.NDArray[np.int64]:
    """Of the first `num_tokens` rows, and of the row behind them: these follow one another where they are not known."""
    if known is None:
        return np.arange(num_tokens + 1)
    return np.append(known[: num_tokens + 1], known[-1] + 1 + np.arange(num_tokens + 1 - len(known)))


def num_unmoved(rows: npt.NDArray[np.int64]) -> int:
    """How many of these rows stay where they are in a compaction to them."""
    return int((rows == np.arange(len(rows))).sum())  # no row moves back, so that all behind one that moves do too


def _cut(known: _Positions, num_tokens: int) -> _Positions:
    """Of a sequence that is cut. One without tokens begins anew."""
    return known[: num_tokens + 1] if known is not None and num_tokens else None


@dataclass(eq=False, slots=True)
class ParkedSlot(Unique):
    """A slot whose sequence has ended and whose memory stays mapped, until it is adopted or evicted."""

    slot: int
    length: int
    """Rows [0, length) may be adopted. 0 is a blank slot: the tenant's next sequence takes its memory."""
    tenant: Hashable
    stamp: int
    """The pool's clock when it was parked."""
    positions: "_Positions"
    """Of its rows, if they were compacted."""
    fence: Fence
    """Behind all work that may still touch it. Whatever reads it since then renews the fence."""
    num_pages: int
    """Mapped under it, over all groups."""

    def __repr__(self) -> str:
        return f"<ParkedSlot in slot {self.slot}: {counted(self.length, 'token')} in {counted(self.num_pages, 'page')}>"


class Planes(ABC):
    """The planes of a layer by name, over what `view` gives: the rows of a sequence, or of all slots."""

    __slots__ = ()

    @abstractmethod
    def view(self, layer: int, plane: str) -> torch.Tensor:
        """One plane of a layer."""

    def k(self, layer: int) -> torch.Tensor:
        """Keys of a layer: `view(layer, "k")`."""
        return self.view(layer, "k")

    def v(self, layer: int) -> torch.Tensor:
        """Values of a layer: `view(layer, "v")`."""
        return self.view(layer, "v")

    def k_scale(self, layer: int) -> torch.Tensor:
        """The scales of quantised keys, kept in the rows: without the last dimension of `view`, and strided by 2."""
        return self.view(layer, SCALES)[..., 0]

    def v_scale(self, layer: int) -> torch.Tensor:
        """The scales of quantised values, each behind that of its keys."""
        return self.view(layer, SCALES)[..., 1]


class Sequence(Planes, Closing, Unique):
    """One sequence's K and V: a range of addresses, and the memory mapped there. Made by `KVCache.open`, `adopt` or `fork`.

        sequence.grow(100)              map memory for 100 tokens
        sequence.k(layer)[:100] = ...   write rows: views of shape [limit, heads, dim]
        sequence.advance(100)           count them as written

    `length` tokens are written; rows [length, limit) are mapped and may be written next. Addresses never change
    while the sequence lives (law 6). Every method raises Closed after `close` or `park`.

    A row holds a token. After `compact`, which drops rows, `length`, `limit` and `max_tokens` count rows, and `position`
    counts the tokens seen.
    """

    __slots__ = ("_rows", "cache", "closed", "known_positions", "max_tokens", "slot", "tenant")

    def __init__(self, cache: "KVCache", slot: int, max_tokens: int, tenant: Hashable) -> None:
        self.cache = cache
        self._rows: dict[int, tuple[tuple[int, int], torch.Tensor, int]] = {}
        """Of each group the rows [start, limit) of the last view, and their address."""
        self.slot = slot
        self.max_tokens = max_tokens
        self.tenant = tenant
        self.closed = False
        self.known_positions: _Positions = None
        """Internal: see `positions`."""

    @property
    def length(self) -> int:
        """Tokens written: rows in use."""
        self._check_live()
        return int(self.cache.table.lengths[self.slot])

    @property
    def position(self) -> int:
        """Tokens seen, which is the position of the next one: `length`, and the tokens that `compact` dropped."""
        length, known = self.length, self.known_positions
        return length if known is None else int(known[-1]) + length + 1 - len(known)

    def positions(self) -> npt.NDArray[np.int64]:
        """The position of each row's token: [length], ascending. Cost: grows with the length; no driver call."""
        return _positions(self.known_positions, self.length)[:-1]

    @property
    def limit(self) -> int:
        """Tokens that the mapped memory has room for, at most `max_tokens`; the device sees it as `cache.limit[slot]`."""
        self._check_live()
        return int(self.cache.table.limits[self.slot])

    def start(self, group: int = 0) -> int:
        """The first row still kept in a group: 0 unless `advance_start` was called."""
        return int(self.cache.table.starts[self._check_group(group), self.slot])

    def grow(self, num_tokens: int) -> None:
        """Map memory so that this sequence can hold `num_tokens` tokens in all.

        On failure the sequence, its mappings and the budget are as before, but parked slots may have been evicted to make
        room.

        Cost: one map and one access call for each missing extent, and a create or a zero where no page of this tenant is
        free. No driver call and no lock if enough is mapped. Blocks only if the pool must wait for a reclaim, or the lock is
        taken.
        Raises: SequenceTooLong; OutOfPages, naming the pages wanted, free and evictable; DriverError; GraphCapture.
        """
        self._check_live()
        num_tokens = whole("num_tokens", num_tokens)
        if num_tokens < 0:
            raise ValueError(f"num_tokens={num_tokens}: it cannot be negative")
        if num_tokens > self.max_tokens:
            raise SequenceTooLong(
                f"the sequence in slot {self.slot} cannot have {counted(num_tokens, 'token')}: it was opened with "
                f"max_tokens={self.max_tokens}"
            )
        cache = self.cache
        if num_tokens <= cache.table.limits[self.slot]:
            return
        began_ns = time.perf_counter_ns()
        with cache.pool.lock:
            self._check_live()
            cache.check_capture()
            try:
                cache.memory.grow(self.slot, num_tokens)
            except OutOfPages as error:
                raise OutOfPages(f"sequence in slot {self.slot} cannot grow to {num_tokens} tokens: {error}") from None
            if cache.table.lengths[self.slot]:
                cache.blocked_steps += 1
                cache.blocked_us += (time.perf_counter_ns() - began_ns) / 1e3

    def advance(self, num_tokens: int = 1) -> None:
        """Count `num_tokens` more rows as written: the caller or its kernels write them. No driver call.

        Raises: RowsUnmapped if that passes `limit`: grow first.
        """
        self._check_live()
        self.cache.advance(self.slot, num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens only, and reclaim the pages wholly past them and the guard.

        Cost: one fence if any page is reclaimed; no map or unmap, and no wait. If another sequence or the prefix tree
        holds the page that the cut leaves partly filled: as `own_from`.
        Raises: ValueError for more than `length`; RowsUnmapped if a window has moved past what would be needed; GraphCapture.
        """
        cache = self.cache
        with cache.pool.lock:
            num_tokens = self._own_from(num_tokens)
            cache.memory.reclaim_from(self.slot, num_tokens)
            cache.forget_rows(self.slot, num_tokens)
            cache.table.lengths[self.slot] = num_tokens
            self.known_positions = _cut(self.known_positions, num_tokens)
            cache.memory.assert_owned(self.slot)

    def compact(self, keep: npt.ArrayLike | torch.Tensor) -> None:
        """Keep some rows only: they move to the front in their order, and extents wholly past them and the guard are reclaimed.

        `keep`: a mask [length] of bools, or the numbers of at least one row in ascending order; a tensor of any device, an
        array or a list. Rows are dropped in all layers and heads. `position` stays as it is, and `limit` falls. Keys keep the
        rotation that they were written with. What was inserted into a prefix tree stays there; nothing more is inserted.
        Extents are never split: up to 30 MiB stay behind the last row if that lies in one of 32 MiB.

        Cost: reads `keep`, which waits for the device; for each group and each 32 MiB of rows that move a gather and a copy,
        launched on the caller's current stream; a fence if any page is reclaimed. No map or unmap, but that pages which others
        hold, too, are exchanged first: as `own_from`. Temporary memory of at most 32 MiB. None if all rows are kept.
        Raises: ValueError for what names no rows, and for a layout with windows, which count rows; OutOfPages, DriverError,
        GraphCapture.
        """
        cache = self.cache
        with cache.pool.lock:
            self._check_live()
            cache.check_capture()
            if any(group.window is not None for group in cache.layout.groups):
                raise ValueError("this layout has windows, which count rows: only full attention can have rows dropped")
            rows = self.rows_to_keep(keep)
            if len(rows) == self.length:
                return
            first = num_unmoved(rows)
            positions = _positions(self.known_positions, self.length)
            sharing.own_from(cache.memory, self.slot, first, len(rows))
            sharing.compact(cache.memory, self.slot, rows, first)
            cache.forget_rows(self.slot, first)
            cache.table.lengths[self.slot] = len(rows)
            self.known_positions = np.append(positions[rows], positions[-1])
            cache.memory.assert_owned(self.slot)

    def rows_to_keep(self, keep: npt.ArrayLike | torch.Tensor) -> npt.NDArray[np.int64]:
        """Internal: the numbers of the rows that `keep` names. See `compact`."""
        given = keep.detach().cpu().numpy() if isinstance(keep, torch.Tensor) else np.asarray(keep)
        length = self.length
        if given.dtype == np.bool_:
            if given.shape != (length,):
                raise ValueError(f"keep: a mask of shape {given.shape}; the sequence in slot {self.slot} has {length} rows")
            rows = np.flatnonzero(given)
        else:
            rows = wholes("keep", given)
            if rows.ndim != 1 or (rows[:-1] >= rows[1:]).any() or not ((rows >= 0) & (rows < length)).all():
                raise ValueError(
                    f"keep={keep!r}: give the numbers of rows in ascending order, each once, of {length} that the sequence in "
                    f"slot {self.slot} has; or a mask of them"
                )
        if not len(rows):
            raise ValueError("keep names no row; truncate(0) takes back all tokens, and close() ends the sequence")
        return rows

    def own_from(self, num_tokens: int) -> None:
        """Exchange shared pages that hold rows from `num_tokens` on, as far as `truncate(num_tokens)` keeps them.

        The first step of `truncate`, and the only one that can find no page. To cut several sequences all or none, call this
        for each of them first.
        Cost: none if the pages are not shared; else, for each extent, an unmap, a map of each of its pages and two copies, and
        it waits for all work launched so far. On failure all tokens are as before.
        Raises: as truncate; OutOfPages, DriverError.
        """
        with self.cache.pool.lock:
            self._own_from(num_tokens)

    def _own_from(self, num_tokens: int) -> int:
        num_tokens = self._check_kept(num_tokens)
        self.cache.check_windows(self.slot, num_tokens)
        self.cache.check_capture()
        sharing.own_from(self.cache.memory, self.slot, num_tokens, num_tokens)
        return num_tokens

    def advance_start(self, group: int, start_token: int | None = None) -> None:
        """Give back a windowed group's rows before `start_token`, by default all that the next token cannot see.

        Cost: one fence if any page is reclaimed. Does not block.
        Raises: ValueError if the group has no window, or the next token still sees some of the rows; GraphCapture.
        """
        cache = self.cache
        with cache.pool.lock:
            group = self._check_group(group)
            layout_group = cache.layout.groups[group]
            if layout_group.window is None:
                raise ValueError(f"group {group} has no window: all its rows are needed")
            current = int(cache.table.starts[group, self.slot])
            unseen = cache.layout.start_for(layout_group, int(cache.table.lengths[self.slot]))
            latest = max(unseen, current)
            start_token = latest if start_token is None else whole("start_token", start_token)
            if not current <= start_token <= latest:
                raise ValueError(
                    f"start_token={start_token} in group {group} of slot {self.slot}: it is {current} now, and with a window "
                    f"of {layout_group.window} the next token sees rows from {unseen} on"
                )
            cache.check_capture()
            cache.memory.reclaim_before(self.slot, group, start_token)

    def view(self, layer: int, plane: str) -> torch.Tensor:
        """A plane of a layer over the rows [start, limit): [limit - start, heads, dim], to read and to write in place.

        Its storage ends with the last mapped row, so torch itself refuses to go past it. Take a new view after `grow`,
        `truncate` or `advance_start`; the addresses stay the same. Drop it before `close` or `park`: touching unmapped
        addresses ends the process, or loses the CUDA context. What torch saves, pickles, deep-copies or sends of it is the
        storage, which has all layers: clone() it first. `share_memory_` makes a copy of it, with a warning.
        Cost: 3 us; no driver call, no copy.
        Raises: LayoutError for a layer or plane that the layout does not have.
        """
        self._check_live()
        table = self.cache.table
        arena = self.cache.memory.arena_of(layer)
        bounds = int(table.starts[arena.index, self.slot]), int(table.limits[self.slot])
        known = self._rows.get(arena.index)
        if known is None or known[0] != bounds or known[1].data_ptr() != known[2]:  # share_memory_ moves a storage
            rows = arena.rows(self.slot, *bounds)
            known = self._rows[arena.index] = bounds, rows, rows.data_ptr()
        return arena.view_rows(known[1], layer, plane)

    def park(self, num_tokens: int | None = None) -> ParkedSlot:
        """End the sequence and keep its memory mapped, with its first `num_tokens` (all by default) to be adopted.

        Parked slots are evicted, the oldest first, when the pool runs short. 0 tokens makes a blank slot, which the
        next `open` of this tenant takes without a driver call.
        Cost: one fence.
        """
        cache = self.cache
        with cache.pool.lock:
            num_tokens = self._check_kept(self.length if num_tokens is None else num_tokens)
            if num_tokens:
                cache.check_windows(self.slot, num_tokens)
            cache.check_capture()
            return cache.park_sequence(self, num_tokens)

    def save(self, path: str | os.PathLike[str], *, fingerprint: str = "") -> None:
        """Write the sequence's rows to a file, for `KVCache.restore`. The file is there whole or, after a failure, as before.

        It is written beside `path`, as `NAME.xxxxxxxx.new`. Such files that killed processes have left there are removed.
        `fingerprint` tells models apart whose layouts are alike. The tokens are the caller's to keep. Only the file's owner may
        read it.
        Cost: blocks while the rows are copied and written.
        Raises: OSError; ValueError for no tokens; DriverError, GraphCapture.
        """
        from vmmkv.tiers import saved

        self._check_live()
        saved.save(self, Path(path), fingerprint)

    def close(self) -> None:
        """End the sequence. Its pages are free once all work launched so far is done. Idempotent.

        Cost: one fence. Does not block. Raises: GraphCapture.
        """
        with self.cache.pool.lock:
            if not self.closed:
                self.cache.check_capture()
                self.cache.end_sequence(self)

    def __repr__(self) -> str:
        if self.closed:
            return f"<Sequence in slot {self.slot}, closed>"
        return f"<Sequence in slot {self.slot}: {counted(self.length, 'token')}, room for {self.limit} of {self.max_tokens}>"

    def _check_live(self) -> None:
        self.cache.pool.lock.check_process()
        if self.closed:
            raise Closed(f"the sequence in slot {self.slot} was closed or parked; open or adopt another")

    def _check_group(self, group: int) -> int:
        self._check_live()
        group = whole("group", group)
        if not 0 <= group < len(self.cache.layout.groups):
            raise ValueError(f"group={group}: this cache has groups 0 to {len(self.cache.layout.groups) - 1}")
        return group

    def _check_kept(self, num_tokens: int) -> int:
        num_tokens = whole("num_tokens", num_tokens)
        if not 0 <= num_tokens <= self.length:
            raise ValueError(f"num_tokens={num_tokens}: the sequence in slot {self.slot} has {self.length} tokens to keep")
        return num_tokens


class RowKeeper:
    """Keeper of rows of ended sequences for others to attach. This one keeps none; the prefix tree overrides every method."""

    def has(self, slot: int) -> bool:
        """Does it keep a parked slot, and say when that is evicted?"""
        return False

    def is_pinned(self, slot: int) -> bool:
        """Has a parked slot pinned rows?"""
        return False

    def park_pinned(self, sequence: Sequence) -> bool:
        """Park a running sequence with the pinned rows that no other slot has; False, and it runs, if there are none."""
        return False

    def forget(self, slot: int, num_tokens: int) -> None:
        """The rows of a slot past `num_tokens` are gone, or about to be written."""

    def leave(self, slot: int) -> None:
        """A slot's sequence has ended, or its parked rows are gone."""

    def idle_pages(self, enough: int) -> int:
        """Pages that it could free at once; counted no further than `enough`."""
        return 0

    def unevictable_bytes(self) -> int:
        """Bytes that no running sequence uses, and that it does not evict."""
        return 0

    def pinned_extents(self) -> set[Extent]:
        """Unused extents that pins keep."""
        return set()

    def oldest(self) -> Evictable | None:
        """The candidate for eviction that it used least recently; None for none."""
        return None

    def poll(self) -> None:
        """Go on with what waits for a fence that has passed. Never blocks."""

    def unsealed(self) -> Fence | None:
        """The fence that it waits for longest; None for none."""
        return None

    def holders(self) -> Counter[Extent]:
        """Recounted: how often it holds each extent."""
        return Counter()

    def loading(self) -> Counter[Extent]:
        """The extents that it loads into, which are used."""
        return Counter()

    def clear(self) -> list[Fence]:
        """Evict everything; no sequence runs. When these fences have passed `finish_copies` is called."""
        return []

    def finish_copies(self) -> None:
        """Give back what copies that have ended took."""

    def check(self) -> None:
        """Recount everything; AssertionError says what is broken."""


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
    """What the rows of the tokens written need, of running sequences."""
    guard_bytes: int
    """Mapped past the tokens for kernels that read whole tiles."""
    waste_bytes: int
    """Mapped for running sequences beyond tokens and guard: unfilled pages and pages mapped ahead."""
    pool_created_bytes: int
    pool_held_bytes: int
    pool_used_bytes: int
    """Held by running sequences of all caches, a shared page counted once. The rest of what is held can be evicted."""
    pool_free_bytes: int
    pool_budget_bytes: int
    num_tokens: int
    """Tokens of running sequences."""
    num_sequences: int
    num_parked: int
    num_slots: int
    blocked_steps: int
    """Growths of a sequence that had tokens already and lacked memory: the caller waited for the driver or the lock."""
    blocked_us: float
    """How long they waited in all, from the call on."""
    mapped_pages: int
    """Pages mapped in the cache's life."""
    mapped_ahead_pages: int
    """Of these, mapped by `map_ahead`."""
    adopted_slots: int
    """Slots handed on with their mappings, which cost no driver call."""
    driver_calls: dict[str, int]
    """Successful calls by name, of the whole pool."""


class KVCache(Planes, Closing, Unique):
    """Keys and values of up to `slots` sequences of up to `max_tokens` tokens each, in memory of `pool`.

    Addresses are reserved at once, and cost no memory; memory is mapped as sequences grow. `slots` counts running and parked
    sequences. `guard_tokens` rows past the length are kept mapped for kernels that load whole tiles: 176 for
    FlashAttention-3, 0 for kernels with masked loads.

    Close it, or use it in a `with` block; closing the pool closes it too. If a signal handler raises just as `open`, `adopt` or
    `fork` returns, as Ctrl-C does, the new sequence runs until the cache is closed.

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
        self.closed = False
        """Has it been closed, by `close` or with its pool? Only `close` can be called then."""
        self.sequences: dict[int, Sequence] = {}
        """Internal: the running sequences by slot."""
        self.parked_slots: dict[int, ParkedSlot] = {}
        """Internal: the parked slots, the oldest first."""
        self.loose_slots: dict[int, ParkedSlot] = {}
        """Internal: those of them that the prefix tree does not keep, in the same order."""
        self._parked_of: dict[tuple[Hashable, bool], dict[int, ParkedSlot]] = {}
        """The parked slots by tenant, the blank ones apart, in the same order."""
        self.prefix = RowKeeper()
        """Internal: the prefix tree that shares this cache's slots and extents, or nothing."""
        self.blocked_steps = 0
        self.blocked_us = 0.0
        self._mapped_ahead_pages = 0
        self._adopted_slots = 0
        self._attached = False
        with pool.lock:
            pool.check_open()
            pool.check_capture()
            self.memory: Final = SlotMemory(layout, pool, slots=slots, max_tokens=max_tokens, guard_tokens=guard_tokens)
            """Internal: what is mapped under the slots."""
            self.table: Final = self.memory.table
            """Internal: state and token counts of each slot."""
            self.num_slots: Final = slots
            """Slots that sequences can have, taken or not: they are numbered from 1."""
            self.limit: Final = self.memory.limit
            """[1 + slots] int32 on the device: rows below it may be written; 0 where no sequence runs."""
            self.limits: Final = _read_only(self.table.limits)
            """[1 + slots] what `limit` holds on the device; read-only."""
            self.lengths: Final = _read_only(self.table.lengths)
            """[1 + slots] tokens written, by slot; read-only."""
            pool.caches.append(self)
            self._attached = True

    # sequences

    @property
    def slot_pages(self) -> list[int]:
        """Pages of addresses that each slot has, by group of layers."""
        return [arena.slot_bytes // PAGE_BYTES for arena in self.memory.arenas]

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
        with self.pool.lock:
            return self.open_any(self.check_end(max_tokens), label("tenant", tenant))

    def open_batch(self, count: int, *, max_tokens: int | None = None, tenant: Hashable = None) -> list[Sequence]:
        """`count` new sequences in adjacent slots, so that `cache.k(layer)[first:first + count]` is their batch.

        Cost and errors: as `open`.
        """
        count = whole("count", count)
        if count < 1:
            raise ValueError(f"count={count}: a batch has at least 1 sequence")
        with self.pool.lock:
            end, tenant = self.check_end(max_tokens), label("tenant", tenant)
            first = self.clear_run(count)
            return [self._open_at(slot, end, tenant) for slot in range(first, first + count)]

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
        with self.pool.lock:
            end = self.check_end(max_tokens)
            self._check_parked(parked)
            num_tokens = parked.length if num_tokens is None else whole("num_tokens", num_tokens)
            if parked.tenant != label("tenant", tenant):
                raise ValueError(f"slot {parked.slot} was parked by another tenant")
            if not 0 <= num_tokens <= parked.length:
                raise ValueError(f"num_tokens={num_tokens}: slot {parked.slot} was parked with {parked.length} tokens")
            if num_tokens > end:
                raise SequenceTooLong(f"{num_tokens} parked tokens are adopted by a sequence of max_tokens={end}")
            if num_tokens:
                self.check_windows(parked.slot, num_tokens)
            self.check_capture()
            return self.take_over(parked, num_tokens, end)

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
        with self.pool.lock:
            end = self._check_fork([sequence], max_tokens)
            available = self.num_slots - len(self.sequences)
            if count > available:
                raise OutOfSlots(f"{count} slots are wanted and {available} of {self.num_slots} run no sequence; close some")
            return self._fork_all(((sequence, self.clear_run(1)) for _ in range(count)), end)

    def fork_batch(self, sequences: Iterable[Sequence], *, max_tokens: int | None = None) -> list[Sequence]:
        """A fork of each of these running sequences, in this order and in adjacent slots; one may be named several times.

        So a batch as of `open_batch` grows, shrinks or changes its order; the caller closes what it no longer needs.
        Cost and errors: as `fork`; ValueError for none.
        """
        with self.pool.lock:
            parents = list(sequences)
            if not parents:
                raise ValueError("a batch has at least 1 sequence, and none was named to fork")
            end = self._check_fork(parents, max_tokens)
            first = self.clear_run(len(parents))
            return self._fork_all([(parent, slot) for slot, parent in enumerate(parents, first)], end)

    def copy_rows(self, pairs: Iterable[tuple[Sequence, Sequence]], first: int, end: int) -> None:
        """Of each pair (source, target) the target takes rows [first, end) of the source, and then has `end` tokens.

        A beam search does this when one beam goes on from another: rows that both have already stay where they are. No
        sequence is a target twice, or target and source. In a windowed group the target keeps the rows that both still have.
        Cost: a copy for each pair and group, launched on the caller's current stream (about 10 us each on a GPU until they
        are larger than some MiB, where copying in one kernel would take 1 us for 2 MiB); no driver call. All or none.
        Raises: RowsUnmapped if a target has no memory for `end` tokens, or a window has moved past what its next token needs;
        ValueError if a sequence has too few tokens, or shares a page that would be written (truncate and grow it first).
        """
        first, end = whole("first", first), whole("end", end)
        with self.pool.lock:
            self.check_open()
            pairs = list(pairs)
            for sequence in itertools.chain.from_iterable(pairs):
                self.check_running(sequence)
            targets = {target.slot for _, target in pairs}
            if len(targets) < len(pairs) or any(source.slot in targets for source, _ in pairs):
                raise ValueError("a sequence is a target twice, or target and source: the order of the copies would matter")
            for source, target in pairs:
                for sequence in (source, target):
                    self.check_windows(sequence.slot, end)
                sharing.check_copy(self.memory, source.slot, target.slot, first, end)
            if self.memory.streams:
                self.check_capture()
            with self.memory.copying():
                for source, target in pairs:
                    self.forget_rows(target.slot, first)
                    sharing.copy_rows(self.memory, source.slot, target.slot, first, end)
                    target.known_positions = _cut(source.known_positions, end)

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
        from vmmkv.tiers import saved

        return saved.restore(self, Path(path), fingerprint, max_tokens=max_tokens, tenant=label("tenant", tenant))

    def parked(self) -> list[ParkedSlot]:
        """The parked slots, the oldest first."""
        with self.pool.lock:
            return list(self.parked_slots.values())

    def evict(self, parked: ParkedSlot) -> None:
        """Reclaim a parked slot's memory. Raises Evicted if that has happened, or it was adopted. No driver call."""
        with self.pool.lock:
            self._check_parked(parked)
            self.evict_parked(parked)

    def advance(self, slots: npt.ArrayLike, num_tokens: npt.ArrayLike = 1) -> None:
        """`num_tokens` (one number, or one for each) more rows have been written in each of these slots; those of a slot that
        is named twice add up.

        Cost: a few numpy calls whatever the number of slots; no driver call. It takes no lock, for only the owner of a
        sequence writes its length.
        Raises: RowsUnmapped, naming the first slot that would pass its limit; ValueError for a negative number or a slot
        that does not exist; TypeError for anything but whole numbers. Then none has advanced.
        """
        self.check_open()
        indices, counts = np.atleast_1d(wholes("slots", slots)), wholes("num_tokens", num_tokens)
        lengths, limits = self.table.lengths, self.table.limits
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self.table):
            raise self._no_such_slot(next(int(slot) for slot in indices if not 0 <= slot < len(self.table)))
        if counts.min(initial=0) < 0:
            raise ValueError(f"num_tokens={num_tokens!r}: at least 0; see Sequence.truncate")
        sums = lengths.copy()  # so that an interrupt, or a refusal, finds every length as it was
        np.add.at(sums, indices, counts)
        advanced = sums.take(indices)
        wrong = advanced > limits.take(indices)
        if wrong.any():
            slot = int(indices[wrong][0])
            if self.table.states[slot] != SlotState.LIVE:
                raise RowsUnmapped(f"no sequence runs in slot {slot}: it is {self.table.state(slot).name.lower()}")
            raise RowsUnmapped(
                f"slot {slot} has {counted(int(lengths[slot]), 'token')} and memory for {limits[slot]}: "
                f"it cannot advance to {sums[slot]}; grow first"
            )
        lengths[indices] = advanced

    # views

    def view(self, layer: int, plane: str) -> torch.Tensor:
        """A plane of a layer over the whole arena: [1 + slots, slot_tokens, heads, dim], strided; for batched kernels.

        Slot 0 is the null slot: its first page is always mapped, read-only and zero. Kernels and launchers that look at the
        tensor's own address find memory there, and padding rows of a batch point to it. Most of the rest is not mapped:
        a kernel must load rows below each sequence's length only (plus the guard). Strides pass 2**31 elements. The view
        is valid until the cache is closed. To save, pickle, deep-copy or share it, or a part of it, raises ViewNotCloned:
        clone() the rows that there are. Cost: about 4 us; no driver call, no copy, no touch.
        """
        self.check_open()
        return self.memory.arena_of(layer).view(layer, plane)

    # ahead of need, and behind

    def lookahead_tokens(self, step_us: float) -> int:
        """How many tokens ahead memory must be mapped so that no step of one token waits, if `map_ahead` has `step_us` in each.

        Enough even if every sequence crosses a page at once, by the measured cost of mapping one.
        """
        pages_due = len(self.sequences) * len(self.layout.groups)
        return 1 + ceil_div(int(pages_due * self.memory.mapper.map_us), max(1, int(step_us)))

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
            self.check_open()
            self.check_capture()
            began_ns = time.perf_counter_ns()
            num_pages = self.memory.map_ahead(budget_us, lookahead_tokens)
            self._mapped_ahead_pages += num_pages
            left_us = budget_us - (time.perf_counter_ns() - began_ns) / 1e3
            if num_pages and left_us < self.memory.mapper.unmap_us:
                return num_pages
            return num_pages + self.collect(left_us)

    def drain(self) -> None:
        """Unmap all reclaimed memory, and seal what a holder process keeps, waiting for fences: for when nothing else is to do.

        Cost: one unmap for each page. Blocks until the work that touches them is done, but without the lock.
        Raises: DriverError, GraphCapture.
        """
        self.check_open()
        self._drain()

    def record_stream(self, stream: torch.Stream) -> None:
        """Work on this stream touches the cache too.

        Reclaimed memory waits for it, and zeroes and limits are ordered before it, as for the stream that is current
        when the cache is called. The caller must order work on any other stream.
        Raises: ValueError for another device's; GraphCapture.
        """
        self.check_open()
        if not hasattr(stream, "device"):
            raise TypeError(f"stream={stream!r} is a {type(stream).__name__}; give a torch.Stream, such as torch.cuda.Stream()")
        with self.pool.lock:
            self.check_open()
            if stream.device != self.device:
                raise ValueError(f"a stream of {stream.device} cannot be recorded by a cache on {self.device}")
            self.check_capture()
            if stream not in self.memory.streams:
                self.memory.streams.append(stream)
                self.memory.order()

    # the whole

    def stats(self) -> CacheStats:
        """The cache at this moment. Cost: some tens of microseconds; no driver call."""
        with self.pool.lock:
            table, memory, pool = self.table, self.memory, self.pool
            parked_pages = sum(parked.num_pages for parked in self.parked_slots.values())
            live_pages = sum(memory.num_pages(slot) for slot in self.sequences)
            token_bytes = guard_bytes = 0
            for span in itertools.chain.from_iterable(map(memory.spans, self.sequences)):
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
                num_sequences=len(self.sequences),
                num_parked=len(self.parked_slots),
                num_slots=self.num_slots,
                blocked_steps=self.blocked_steps,
                blocked_us=self.blocked_us,
                mapped_pages=memory.mapped_pages,
                mapped_ahead_pages=self._mapped_ahead_pages,
                adopted_slots=self._adopted_slots,
                driver_calls=dict(pool.driver.calls),
            )

    def taken_slots(self) -> list[int]:
        """The slots that are not free, in order: those under which something can be mapped."""
        with self.pool.lock:
            self.check_open()
            return (1 + np.flatnonzero(self.table.states[1:] != SlotState.FREE)).tolist()

    def slot_maps(self, slots: Iterable[int]) -> list[SlotMap]:
        """What is mapped under each of these slots, and for what: see `vmmkv.memory.states`.

        Cost: some 3 us for each slot, and 0.1 us for each extent mapped there; no driver call.
        Raises: ValueError for a number that is no slot of sequences.
        """
        slots = list(slots)
        if unknown := [slot for slot in slots if not 1 <= slot <= self.num_slots]:
            raise self._no_such_slot(unknown[0])
        with self.pool.lock:
            self.check_open()
            return slot_maps(self.memory, {slot: parked.length for slot, parked in self.parked_slots.items()}, slots)

    def close(self) -> None:
        """End all sequences, wait for the work that touches them, unmap everything. Idempotent.

        Drop all views before: a later cache of the same size may be given the addresses.
        Cost: an unmap for each page. Blocks on the fences, but without the lock.
        Raises: DriverError, and then it can be called again; GraphCapture.
        """
        self.pool.lock.check_process()
        with self.pool.lock:
            if not self._attached:
                return
            self.check_capture()
            for sequence in list(self.sequences.values()):
                self.end_sequence(sequence)
            for parked in list(self.parked_slots.values()):
                self.evict_parked(parked)
            fences = [self.memory.fence(), *self.prefix.clear()]
            self.closed = True  # nothing is launched, opened or grown here while the lock is not held
        for fence in fences:
            fence.wait()
        self._drain()
        with self.pool.lock:
            if self._attached:
                self.prefix.finish_copies()
                self.memory.close()
                self.pool.caches.remove(self)
                self._attached = False

    def check(self) -> None:
        """Recount the laws from scratch, for this cache and its pool; AssertionError says which is broken."""
        with self.pool.lock:
            self.memory.check()
            assert sorted(self.sequences) == self.table.where(SlotState.LIVE), "a live slot has no sequence"
            assert sorted(self.parked_slots) == self.table.where(SlotState.PARKED), "a parked slot is not listed"
            parked_slots = self.parked_slots.values()
            assert list(parked_slots) == sorted(parked_slots, key=_stamp), "parked slots are out of order"
            loose = [parked for parked in parked_slots if not self.prefix.has(parked.slot)]
            assert list(self.loose_slots.values()) == loose, "the slots that no prefix tree keeps are miscounted"
            assert sum(map(len, self._parked_of.values())) == len(parked_slots), "a parked slot is of two tenants, or of none"
            for (tenant, is_blank), found in self._parked_of.items():
                wanted = [parked for parked in parked_slots if (parked.tenant, not parked.length) == (tenant, is_blank)]
                assert list(found.values()) == wanted != [], f"the parked slots of {tenant!r} are miscounted"
            for slot, parked in self.parked_slots.items():
                assert parked.num_pages == self.memory.num_pages(slot), f"parked slot {slot} has lost or gained pages"
            self.prefix.check()
        self.pool.check()

    def __del__(self) -> None:
        if getattr(self, "_attached", False):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        if not self._attached:
            return f"<KVCache on {self.device}, closed>"
        sequences = counted(len(self.sequences), "sequence")
        return f"<KVCache on {self.device}: {sequences} in {counted(self.num_slots, 'slot')}>"

    # Internal interface, for Sequence and vmmkv.prefix: the caller holds the pool's lock.

    def open_any(self, end: int, tenant: Hashable) -> Sequence:
        """A new sequence in a blank parked slot of the tenant, a free slot, or one that is made free: see `open`."""
        chosen = next(reversed(self._parked_of.get((tenant, True), {}).values()), None)
        if chosen is None and not self.table.num(SlotState.FREE):
            chosen = next(self.unpinned(self._parked_of.get((tenant, False), {}).values()), None)
        if chosen is not None:
            self.check_capture()
            return self.take_over(chosen, 0, end)
        return self._open_at(self.clear_run(1), end, tenant)

    def take_over(self, parked: ParkedSlot, num_tokens: int, end: int) -> Sequence:
        """A parked slot becomes live with what is mapped there, and its first rows if `num_tokens` is not 0."""
        slot = parked.slot
        self.prefix.leave(slot)
        self._unlist(parked)  # so that making room for it does not evict it
        try:
            parked.fence.order(self.memory.streams)
            sharing.cut_shared(self.memory, slot, num_tokens, parked.fence)
            sharing.own_from(self.memory, slot, num_tokens, num_tokens)
            committed = self.memory.committed(slot, from_first=not num_tokens)
            self.memory.raise_limits({slot: min(committed, end)})
        except BaseException:
            self.memory.unuse(slot)
            parked.length = min(parked.length, self.memory.committed(slot))  # what was cut by now does not come back
            parked.num_pages = self.memory.num_pages(slot)
            self._list(parked)
            with contextlib.suppress(DriverError):  # else the device is lost, and nothing is read or unmapped any more
                parked.fence = self.memory.fence()
            raise
        if not num_tokens:
            self.memory.reclaim_all(slot, parked.fence, only_cut=True)
        self.memory.use(slot)
        self._adopted_slots += 1
        sequence = self._open_at(slot, end, parked.tenant)
        sequence.known_positions = _cut(parked.positions, num_tokens)
        self.table.lengths[slot] = num_tokens
        self.memory.assert_owned(slot)
        return sequence

    def open_with(
        self,
        slot: int,
        end: int,
        tenant: Hashable,
        num_tokens: int,
        pages: Seq[sharing.Pages],
        copy_bytes: sharing.CopyBytes,
    ) -> Sequence:
        """A new sequence in a free slot that has `num_tokens` tokens already: see `sharing.take`.

        The slot's starts are set before, and are 0 again if this fails.
        """
        sequence = self._open_at(slot, end, tenant)
        try:
            self.fill(slot, num_tokens, pages, copy_bytes)
        except BaseException:
            if not self.memory.num_pages(slot):  # no driver call, so that this cannot fail too
                self._clear_slot(sequence, SlotState.CLOSING)
                self._free_if_bare(slot)
            raise
        return sequence

    def fill(
        self,
        slot: int,
        num_tokens: int,
        pages: Seq[sharing.Pages],
        copy_bytes: sharing.CopyBytes,
        large_ends: Seq[int | None] | None = None,
    ) -> None:
        """Give a running sequence without any row its first rows: see `sharing.take`.

        Its starts are set before, and are 0 again if this fails.
        """
        try:
            sharing.take(self.memory, slot, num_tokens, pages, copy_bytes, large_ends)
        except BaseException:
            if self.memory.num_pages(slot):
                self.memory.reclaim_all(slot, self.memory.lower_limit(slot, 0))
            self.table.begin(slot, 0)
            raise
        self.table.lengths[slot] = num_tokens
        self.memory.assert_owned(slot)

    def vacate(self, slot: int, fence: Fence) -> None:
        """Reclaim all memory of a running sequence, which keeps its slot and cannot grow; its limit is 0 behind the fence."""
        self.forget_rows(slot, 0)
        self.table.lengths[slot] = self.table.ends[slot] = 0
        self.memory.reclaim_all(slot, fence)

    def make_bare(self, slot: int) -> None:
        """Wait until what was reclaimed under a slot is unmapped. Raises: DriverError."""
        while not self.memory.is_bare(slot):
            waited = self.wait_for_reclaim()
            assert waited, f"what is mapped under slot {slot} was not reclaimed"
            self.collect()

    def park_sequence(self, sequence: Sequence, num_tokens: int) -> ParkedSlot:
        """End a sequence and keep its memory, with its first `num_tokens` to be adopted."""
        slot = sequence.slot
        fence = self.memory.lower_limit(slot, 0)
        self._clear_slot(sequence, SlotState.PARKED)
        self.prefix.leave(slot)
        self.memory.unuse(slot)
        num_pages = self.memory.num_pages(slot)
        positions = _cut(sequence.known_positions, num_tokens)
        parked = ParkedSlot(slot, num_tokens, sequence.tenant, self.pool.tick(), positions, fence, num_pages)
        self._list(parked)
        return parked

    def park_bare(self, slot: int, tenant: Hashable, starts: Seq[int], stamp: int) -> ParkedSlot:
        """A free slot, parked without rows and with that stamp; it will keep those from `starts` on. Cost: a fence."""
        parked = ParkedSlot(slot, 0, tenant, stamp, None, self.memory.fence(), 0)
        self.memory.tenants[slot] = tenant
        self.table.states[slot] = SlotState.PARKED
        self.table.begin(slot, starts)
        self._list(parked)
        return parked

    @contextlib.contextmanager
    def mapping_under(self, parked: ParkedSlot) -> Iterator[None]:
        """Map more under a parked slot, and set its length, within: making room does not evict it. Cost: a fence."""
        self._unlist(parked)
        try:
            yield
        finally:
            self.memory.unuse(parked.slot)
            parked.num_pages = self.memory.num_pages(parked.slot)
            self._list(parked)
            parked.fence = retried(self.memory.fence)  # copies may have been launched

    def end_sequence(self, sequence: Sequence) -> None:
        """End a sequence and reclaim its memory, or park its slot with rows that are pinned and in no other.

        Cost: the limit's write, which gives the fence, or a fence.
        """
        if self.prefix.park_pinned(sequence):
            return
        slot = sequence.slot
        fence = self.memory.lower_limit(slot, 0)
        self._clear_slot(sequence, SlotState.CLOSING)
        self.prefix.leave(slot)
        self.memory.reclaim_all(slot, fence)
        self._free_if_bare(slot)

    def evict_parked(self, parked: ParkedSlot) -> None:
        """Reclaim a parked slot's memory. No driver call."""
        slot = parked.slot
        self._unlist(parked)
        self.prefix.leave(slot)
        self.table.clear(slot, SlotState.CLOSING)
        self.memory.reclaim_all(slot, parked.fence)
        self._free_if_bare(slot)

    def cut_parked(self, slot: int, num_tokens: int) -> None:
        """A parked slot keeps its first `num_tokens` only. No driver call."""
        parked = self.parked_slots[slot]
        self.memory.reclaim_run(slot, self.memory.cut_ends(slot, num_tokens), parked.fence)
        parked.length, parked.num_pages = num_tokens, self.memory.num_pages(slot)

    def clear_run(self, count: int) -> int:
        """The first of `count` adjacent free slots; if need be, parked and closing ones are made free."""
        first = self.table.run_of(count, SlotState.FREE)
        if first is not None:
            return first
        self.check_capture()
        if self.collect():
            first = self.table.run_of(count, SlotState.FREE)
        if first is None:
            first = self._run_to_clear(count)
        run = range(first, first + count)
        for slot in run:
            if slot in self.parked_slots:
                self.evict_parked(self.parked_slots[slot])
        for slot in run:
            self.make_bare(slot)
        return first

    def _run_to_clear(self, count: int) -> int:
        """The first of `count` adjacent slots that run no sequence, without pinned ones if possible; one: the oldest parked."""
        if count == 1 and (parked := next(self.unpinned(self.parked_slots.values()), None)) is not None:
            return parked.slot
        pinned = [slot for slot in self.parked_slots if self.is_pinned(slot)]
        states = SlotState.FREE, SlotState.PARKED, SlotState.CLOSING
        for spared in (pinned, pinned[1:], ()):
            first = self.table.run_of(count, *states, without=spared)
            if first is not None:
                return first
        raise OutOfSlots(
            f"{'a slot is' if count == 1 else f'{count} adjacent slots are'} wanted; {len(self.sequences)} of "
            f"{self.num_slots} run sequences; close some, or make the cache with more slots"
        )

    def is_pinned(self, slot: int) -> bool:
        """Does the prefix cache keep this parked slot before others?"""
        return self.prefix.is_pinned(slot)

    def can_spare_pinned(self) -> bool:
        """Is there another slot than pinned ones for one more sequence?"""
        can_clear = self.table.num(SlotState.FREE, SlotState.CLOSING) > 0
        return can_clear or next(self.unpinned(self.parked_slots.values()), None) is not None

    def unpinned(self, parked_slots: Iterable[ParkedSlot]) -> Iterator[ParkedSlot]:
        """Those without pinned rows, in the same order. Cost: grows with the pinned ones that come first."""
        return (parked for parked in parked_slots if not self.is_pinned(parked.slot))

    def forget_rows(self, slot: int, num_tokens: int) -> None:
        """The rows of a slot past `num_tokens` are gone, or about to be written."""
        self.prefix.forget(slot, num_tokens)

    def check_windows(self, slot: int, num_tokens: int) -> None:
        """Does the slot keep all rows that a sequence of so many tokens needs for its next one? Raises RowsUnmapped if not."""
        for index, group in enumerate(self.layout.groups):
            start, needed = int(self.table.starts[index, slot]), self.layout.start_for(group, num_tokens)
            if start > needed:
                raise RowsUnmapped(
                    f"with {num_tokens} tokens the window of group {index} begins at row {needed}, and rows before {start} "
                    f"are gone; call advance_start later, or recompute"
                )

    def check_open(self) -> None:
        """Raises Closed, or ForkedProcess in a child."""
        self.pool.lock.check_process()
        if self.closed:
            raise Closed("this cache is closed")

    def check_end(self, max_tokens: int | None) -> int:
        """Where a new sequence ends, by default where the slots do. Raises: SequenceTooLong, ValueError, Closed."""
        self.check_open()
        end = self.max_tokens if max_tokens is None else whole("max_tokens", max_tokens)
        if end < 1:
            raise ValueError(f"max_tokens={end}: a sequence has at least 1")
        if end > self.max_tokens:
            raise SequenceTooLong(f"max_tokens={end} is more than this cache's slots have addresses for, {self.max_tokens}")
        return end

    def check_running(self, sequence: Sequence) -> None:
        """Raises TypeError for what is no sequence, Closed for one that has ended or is another cache's."""
        instance("sequence", sequence, Sequence, "a Sequence of this cache")
        if self.sequences.get(sequence.slot) is not sequence:
            raise Closed(f"{sequence!r} is no running sequence of this cache")

    def check_capture(self) -> None:
        """Raises GraphCapture if work on the current stream or a recorded one is being captured. See Pool.check_capture."""
        self.pool.check_capture(self.memory.streams)

    # Internal interface, for the pool: it holds its lock.

    @property
    def pending_pages(self) -> int:
        """Pages that wait for a fence, to be unmapped."""
        return self.memory.mapper.pending_pages

    def idle_pages(self, enough: int) -> int:
        """Pages that can be evicted and that no running work may touch; counted no further than `enough`."""
        num_pages = self.memory.mapper.passed_pages()
        for parked in self.loose_slots.values():
            if num_pages >= enough:
                return num_pages
            if not parked.fence.done():  # the oldest goes first
                break
            num_pages += self.memory.idle_pages(parked.slot)
        return num_pages + self.prefix.idle_pages(enough - num_pages)

    def unevictable_bytes(self) -> int:
        """Bytes that no running sequence uses, and that the prefix tree does not evict either."""
        return self.prefix.unevictable_bytes()

    def pinned_extents(self) -> set[Extent]:
        """Unused extents that pins keep in the prefix tree. Cost: grows with what is pinned."""
        return self.prefix.pinned_extents()

    def oldest_evictable(self) -> Evictable | None:
        """The least recently used parked slot, or leaf of the prefix tree, and how to evict it."""
        parked, leaf = next(iter(self.loose_slots.values()), None), self.prefix.oldest()
        if parked is None or (leaf is not None and leaf.stamp < parked.stamp):
            return leaf
        return Evictable(parked.stamp, parked.fence.done(), lambda: self.evict_parked(parked))

    def collect(self, budget_us: float = float("inf"), max_pages: float = float("inf")) -> int:
        """Unmap reclaimed memory whose fence has passed, as far as time and `max_pages` allow; the pages. Never blocks."""
        self.prefix.poll()
        try:
            return self.memory.mapper.collect(budget_us, max_pages)
        finally:
            emptied = self.memory.mapper.emptied_slots
            while emptied:
                if self.table.states[slot := emptied.pop()] == SlotState.CLOSING:
                    self._free_if_bare(slot)

    def wait_for_reclaim(self) -> bool:
        """Block until the oldest fence of reclaimed memory has passed; False if there is none."""
        fence = self.memory.mapper.oldest_fence()
        if fence is not None:
            fence.wait()
        return fence is not None

    def holders(self) -> Counter[Extent]:
        """Recounted from scratch: how often this cache and its prefix tree hold each extent."""
        return self.memory.holders() + self.prefix.holders()

    def users(self) -> Counter[Extent]:
        """Recounted from scratch: how many of these are uses."""
        return self.memory.users() + self.prefix.loading()

    # within

    def _open_at(self, slot: int, end: int, tenant: Hashable) -> Sequence:
        sequence = Sequence(self, slot, end, tenant)
        self.sequences[slot] = sequence
        self.memory.tenants[slot] = tenant
        self.table.states[slot] = SlotState.LIVE
        self.table.ends[slot] = end
        return sequence

    def _clear_slot(self, sequence: Sequence, state: SlotState) -> None:
        self.table.clear(sequence.slot, state)
        del self.sequences[sequence.slot]
        sequence.closed = True

    def _list(self, parked: ParkedSlot) -> None:
        """Add a parked slot to all lists that it is in, by its stamp."""
        of_tenant = self._parked_of.setdefault((parked.tenant, not parked.length), {})
        for listed in (self.parked_slots, self.loose_slots, of_tenant):
            newest = next(reversed(listed.values()), parked)
            listed[parked.slot] = parked
            if newest.stamp > parked.stamp:
                in_order = sorted(listed.values(), key=_stamp)
                listed.clear()
                listed.update((each.slot, each) for each in in_order)

    def _unlist(self, parked: ParkedSlot) -> None:
        of_tenant = self._parked_of[parked.tenant, not parked.length]
        del self.parked_slots[parked.slot], of_tenant[parked.slot]
        self.loose_slots.pop(parked.slot, None)
        if not of_tenant:
            del self._parked_of[parked.tenant, not parked.length]

    def _free_if_bare(self, slot: int) -> None:
        if self.memory.is_bare(slot):
            self.table.clear(slot, SlotState.FREE)

    def _fork_all(self, pairs: Iterable[tuple[Sequence, int]], end: int) -> list[Sequence]:
        """Forks of these sequences in these free slots; all or none."""
        forks: list[Sequence] = []
        try:
            for parent, slot in pairs:
                pages = sharing.shareable(self.memory, parent.slot, parent.length)
                self.table.begin(slot, self.table.starts[:, parent.slot], self.table.firsts[:, parent.slot])
                copy_bytes = functools.partial(sharing.copy_slot_bytes, self.memory, parent.slot)
                forks.append(self.open_with(slot, end, parent.tenant, parent.length, pages, copy_bytes))
                forks[-1].known_positions = parent.known_positions
        except BaseException:
            for fork in forks:
                retried(functools.partial(self.end_sequence, fork))
            raise
        return forks

    def _no_such_slot(self, slot: int) -> ValueError:
        return ValueError(f"there is no slot {slot}: this cache has slots 1 to {self.num_slots}")

    def _drain(self) -> None:
        while True:
            with self.pool.lock:
                self.check_capture()
                self.collect()
                fence = self.memory.mapper.oldest_fence()
                if fence is None:
                    fence = self.prefix.unsealed()
            if fence is None:
                return
            fence.wait()

    def _check_fork(self, sequences: list[Sequence], max_tokens: int | None) -> int:
        """Where their forks end."""
        end = self.check_end(max_tokens)
        for sequence in sequences:
            self.check_running(sequence)
            if sequence.length > end:
                raise SequenceTooLong(f"{sequence.length} tokens are forked to sequences of max_tokens={end}")
        self.check_capture()
        return end

    def _check_parked(self, parked: ParkedSlot) -> None:
        instance("parked", parked, ParkedSlot, "a ParkedSlot, as Sequence.park returns it")
        if self.parked_slots.get(parked.slot) is not parked:
            raise Evicted(f"slot {parked.slot} is parked no longer: it was evicted or adopted; open a new sequence")


_stamp = operator.attrgetter("stamp")

_Number = TypeVar("_Number", bound=np.generic)


def _read_only(array: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    view = array.view()
    view.flags.writeable = False
    return view
