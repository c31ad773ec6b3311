"""Sequence: one contiguous range of addresses with memory mapped on demand, for one sequence's keys and values."""

import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from vmmkv import saved
from vmmkv.arguments import instance, whole, wholes
from vmmkv.errors import OutOfPages, SequenceTooLong
from vmmkv.layout import SCALES
from vmmkv.lifetime import Closing, Unique
from vmmkv.memory import sharing
from vmmkv.memory.sharing import num_unmoved
from vmmkv.memory.slots import LiveSlot, ParkedSlot, Positions, Slots, cut_positions
from vmmkv.units import counted


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
        """The scales of quantised values, each after that of its keys."""
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

    __slots__ = ("_rows", "live", "max_tokens", "slot", "tenant")

    def __init__(self, live: LiveSlot) -> None:
        self.live: Final = live
        """Internal: the slot that it runs in, with all that this knows."""
        self.slot: Final = live.slot
        self.max_tokens: Final = live.max_tokens
        self.tenant: Final = live.tenant
        self._rows: dict[int, tuple[tuple[int, int], torch.Tensor, int]] = {}
        """Rows [start, limit) of the last view and their address, by group."""

    @property
    def closed(self) -> bool:
        """Has the sequence ended, by `close`, `park` or with its cache?"""
        return self.live.closed

    @property
    def length(self) -> int:
        """Tokens written: rows in use."""
        return self.live.length

    @property
    def position(self) -> int:
        """Tokens seen, which is the position of the next one: `length`, and the tokens that `compact` dropped."""
        length, known = self.length, self.live.positions
        return length if known is None else int(known[-1]) + length + 1 - len(known)

    def positions(self) -> npt.NDArray[np.int64]:
        """The position of each row's token: [length], ascending. Cost: grows with the length; no driver call."""
        return _positions(self.live.positions, self.length)[:-1]

    @property
    def limit(self) -> int:
        """Tokens that the mapped memory has room for, at most `max_tokens`; the device sees it as `cache.limit[slot]`."""
        return self.live.limit

    def start(self, group: int = 0) -> int:
        """The first row still kept in a group: 0 unless `advance_start` was called."""
        return int(self.live.slots.table.starts[self._check_group(group), self.slot])

    def grow(self, num_tokens: int) -> None:
        """Map memory so that this sequence can hold `num_tokens` tokens (rows, after `compact`) in all.

        `length` stays, and `limit` may pass `num_tokens`, to the end of a page. A smaller number changes nothing: `truncate`
        gives memory back. New rows may hold old bytes of the same tenant. On a GPU, work on the current stream may use
        them at once.

        On failure nothing of this sequence has changed. Cached prefixes and parked slots may be gone, and new memory stays free
        in the pool.
        Cost: one map and one access call for each missing extent. If the pool has none free of this tenant, also a create, or a
        zero of one that was another tenant's. No driver call and no lock if enough is mapped. Blocks only if the pool must wait
        for a reclaim, or the lock is taken.
        Raises: ValueError for a negative number; SequenceTooLong; OutOfPages, naming the pages wanted, free and evictable;
        DriverError; GraphCapture.
        """
        self.live.check_live()
        num_tokens = whole("num_tokens", num_tokens)
        if num_tokens < 0:
            raise ValueError(f"num_tokens={num_tokens}: it cannot be negative")
        if num_tokens > self.max_tokens:
            raise SequenceTooLong(
                f"the sequence in slot {self.slot} cannot have {counted(num_tokens, 'token')}: it was opened with "
                f"max_tokens={self.max_tokens}"
            )
        slots = self.live.slots
        if num_tokens <= slots.table.limits[self.slot]:
            return
        began_ns = time.perf_counter_ns()
        with slots.pool.lock:
            self.live.check_live()  # it may have been closed while this waited for the lock
            slots.check_capture()
            try:
                slots.memory.grow(self.slot, num_tokens)
            except OutOfPages as error:
                raise OutOfPages(f"sequence in slot {self.slot} cannot grow to {num_tokens} tokens: {error}") from None
            if slots.table.lengths[self.slot]:  # a new sequence with an attached prefix counts too
                slots.blocked_steps += 1
                slots.blocked_us += (time.perf_counter_ns() - began_ns) / 1e3

    def advance(self, num_tokens: int = 1) -> None:
        """Count `num_tokens` more rows as written: the caller or its kernels write them. No driver call.

        Raises: RowsUnmapped if that passes `limit`: grow first.
        """
        self.live.check_live()
        self.live.slots.table.advance(self.slot, num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens only, and reclaim the pages wholly past them and the guard.

        Cost: one fence if any page is reclaimed; no map or unmap, and no wait. If another sequence or the prefix tree
        holds the page that the cut leaves partly filled: as `own_from`.
        Raises: ValueError for more than `length`; RowsUnmapped if a window has moved past what would be needed; GraphCapture.
        """
        slots = self.live.slots
        with slots.pool.lock:
            num_tokens = self._own_from(num_tokens)
            slots.memory.reclaim_from(self.slot, num_tokens)
            slots.keeper.forget(self.slot, num_tokens)
            slots.table.lengths[self.slot] = num_tokens
            self.live.positions = cut_positions(self.live.positions, num_tokens)
            slots.memory.assert_owned(self.slot)

    def compact(self, keep: npt.ArrayLike | torch.Tensor) -> None:
        """Keep some rows only: they move to the front in their order, and extents wholly past them and the guard are reclaimed.

        `keep`: a mask [length] of bools, or the numbers of at least one row in ascending order; a tensor of any device, an
        array or a list. Rows are dropped in all layers and heads. `position` stays as it is, and `limit` falls. Keys keep the
        rotation that they were written with. What was inserted into a prefix tree stays there; nothing more is inserted.
        Extents are never split: up to 30 MiB stay after the last row if that lies in one of 32 MiB.

        Cost: reads `keep`, which waits for the device; for each group and each 32 MiB of rows that move a gather and a copy,
        launched on the caller's current stream; a fence if any page is reclaimed. No map or unmap, but that pages which others
        hold, too, are exchanged first: as `own_from`. Temporary memory of at most 32 MiB. None if all rows are kept.
        Raises: ValueError for what names no rows, and for a layout with windows, which count rows; OutOfPages, DriverError,
        GraphCapture.
        """
        slots = self.live.slots
        with slots.pool.lock:
            self.live.check_live()
            slots.check_capture()
            if any(group.window is not None for group in slots.layout.groups):
                raise ValueError("this layout has windows, which count rows: only full attention can have rows dropped")
            rows = self.rows_to_keep(keep)
            if len(rows) == self.length:
                return
            first = num_unmoved(rows)
            positions = _positions(self.live.positions, self.length)
            sharing.own_from(slots.memory, self.slot, first, len(rows))
            sharing.compact(slots.memory, self.slot, rows, first)
            slots.keeper.forget(self.slot, first)
            slots.table.lengths[self.slot] = len(rows)
            self.live.positions = np.append(positions[rows], positions[-1])
            slots.memory.assert_owned(self.slot)

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
        with self.live.slots.pool.lock:
            self._own_from(num_tokens)

    def _own_from(self, num_tokens: int) -> int:
        num_tokens, slots = self._check_kept(num_tokens), self.live.slots
        slots.check_windows(self.slot, num_tokens)
        slots.check_capture()
        sharing.own_from(slots.memory, self.slot, num_tokens, num_tokens)
        return num_tokens

    def advance_start(self, group: int, start_token: int | None = None) -> None:
        """Give back a windowed group's rows before `start_token`, by default all that the next token cannot see.

        Cost: one fence if any page is reclaimed. Does not block.
        Raises: ValueError if the group has no window, or the next token still sees some of the rows; GraphCapture.
        """
        slots = self.live.slots
        with slots.pool.lock:
            group = self._check_group(group)
            layout_group = slots.layout.groups[group]
            if layout_group.window is None:
                raise ValueError(f"group {group} has no window: all its rows are needed")
            current = int(slots.table.starts[group, self.slot])
            unseen = slots.layout.start_for(layout_group, int(slots.table.lengths[self.slot]))
            latest = max(unseen, current)
            start_token = latest if start_token is None else whole("start_token", start_token)
            if not current <= start_token <= latest:
                raise ValueError(
                    f"start_token={start_token} in group {group} of slot {self.slot}: it is {current} now, and with a window "
                    f"of {layout_group.window} the next token sees rows from {unseen} on"
                )
            slots.check_capture()
            slots.memory.reclaim_before(self.slot, group, start_token)

    def view(self, layer: int, plane: str) -> torch.Tensor:
        """A plane of a layer over the rows [start, limit): [limit - start, heads, dim], to read and to write in place.

        Its storage ends with the last mapped row, so torch itself refuses to go past it. Take a new view after `grow`,
        `truncate` or `advance_start`; the addresses stay the same. Drop it before `close` or `park`: touching unmapped
        addresses ends the process, or loses the CUDA context. What torch saves, pickles, deep-copies or sends of it is the
        storage, which has all layers: clone() it first. `share_memory_` makes a copy of it, with a warning.
        Cost: 3 us; no driver call, no copy.
        Raises: LayoutError for a layer or plane that the layout does not have.
        """
        self.live.check_live()
        slots = self.live.slots
        table, arena = slots.table, slots.memory.arena_of(layer)
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
        slots = self.live.slots
        with slots.pool.lock:
            num_tokens = self._check_kept(self.length if num_tokens is None else num_tokens)
            if num_tokens:
                slots.check_windows(self.slot, num_tokens)
            slots.check_capture()
            return slots.park(self.live, num_tokens)

    def save(self, path: str | os.PathLike[str], *, fingerprint: str = "") -> None:
        """Write the sequence's rows to a file, for `KVCache.restore`. The file is there whole or, after a failure, as before.

        It is written beside `path`, as `NAME.xxxxxxxx.new`. Such files that killed processes have left there are removed.
        `fingerprint` tells models apart whose layouts are alike. The tokens are the caller's to keep. Only the file's owner may
        read it.
        Cost: blocks while the rows are copied and written.
        Raises: OSError; ValueError for no tokens; DriverError, GraphCapture.
        """
        self.live.check_live()
        saved.save(self.live, Path(path), fingerprint)

    def close(self) -> None:
        """End the sequence. Its pages are free once all work launched so far is done. Idempotent.

        Cost: one fence. Does not block. Raises: GraphCapture.
        """
        self.live.close()

    def __repr__(self) -> str:
        return repr(self.live)

    def _check_group(self, group: int) -> int:
        self.live.check_live()
        group = whole("group", group)
        num_groups = len(self.live.slots.layout.groups)
        if not 0 <= group < num_groups:
            raise ValueError(f"group={group}: this cache has groups 0 to {num_groups - 1}")
        return group

    def _check_kept(self, num_tokens: int) -> int:
        num_tokens = whole("num_tokens", num_tokens)
        if not 0 <= num_tokens <= self.length:
            raise ValueError(f"num_tokens={num_tokens}: the sequence in slot {self.slot} has {self.length} tokens to keep")
        return num_tokens


def live_slot(sequence: Sequence, slots: Slots) -> LiveSlot:
    """The slot of a sequence that runs in one of these. Raises: TypeError for what is none; Closed if it has ended, or is
    another cache's."""
    instance("sequence", sequence, Sequence, "a Sequence of this cache")
    slots.check_running(sequence.live)
    return sequence.live


def _positions(known: Positions, num_tokens: int) -> npt.NDArray[np.int64]:
    """Positions of the first `num_tokens` rows, then the next one: these follow one another where they are not known."""
    if known is None:
        return np.arange(num_tokens + 1)
    return np.append(known[: num_tokens + 1], known[-1] + 1 + np.arange(num_tokens + 1 - len(known)))
