"""ElasticBlocks: addresses for all blocks of a KV cache, and memory for as many as a budget lets.

Nothing of vLLM is imported. A *run* is what one layer, or all layers side by side, keep of each block, at one stride. A *group*
is a number of blocks whose bytes are whole pages in each run. Memory comes and goes by groups:

    mapped   its blocks may be handed out
    leaving  it is to go: no block of it may be handed out any more; those in use are waited for
    fenced   none is in use; its memory goes when the work that was launched before has ended
    absent   nothing is mapped there

    absent ──grow──> mapped ──settle──> leaving ──reclaim──> fenced ──reclaim──> absent
                       ^─────────────────settle────────────────┘

Group 0 has vLLM's null block, and always stays.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import gcd, lcm
from typing import Final, NamedTuple, Protocol

import torch

from vmmkv.driver.base import Access, Driver, Fence, Handle, retried
from vmmkv.errors import BudgetError, DriverError
from vmmkv.memory.address_space import wrap
from vmmkv.units import MIB, PAGE_BYTES, ceil_div, format_bytes, round_up

_SCRATCH_BYTES: Final = 32 * MIB
_GROUP_BYTES, _LEAST_GROUPS = 16 * MIB, 1024
"""A group has so many bytes at least, unless a cache would have fewer groups: driver calls cost time by handle, not by byte."""
_RETRY_S: Final = 0.1
"""Time in which memory that the device did not give is not asked for again."""


class Run(NamedTuple):
    """Bytes of all blocks, side by side: block b has [offset_bytes + b * stride_bytes, + stride_bytes)."""

    offset_bytes: int
    stride_bytes: int


@dataclass(slots=True)
class _Part:
    """Memory of a group in one run."""

    address: int
    size_bytes: int
    handle: Handle
    is_mapped: bool = False


class HandleSource(Protocol):
    """Source of the memory of groups: the driver, or another process that owns it."""

    @property
    def creates_zeroed(self) -> bool:
        """Is new memory zeroed?"""

    def create(self, size_bytes: int) -> Handle:
        """A new handle. Raises: DriverError."""

    def release(self, handle: Handle) -> None:
        """Give a handle up. Raises: DriverError, and then it is still there."""


class State(NamedTuple):
    """Bytes of an ElasticBlocks."""

    budget_bytes: int
    mapped_bytes: int
    used_bytes: int
    """Bytes of groups with a block in use; 0 if that is the null block alone."""
    reserved_bytes: int


def blocks_of_group(strides_bytes: Iterable[int], num_blocks: int) -> int:
    """Blocks of a group: whole pages in runs of these strides, of 16 MiB together, or less for a cache below 16 GiB."""
    strides_bytes = list(strides_bytes)
    blocks = lcm(*(PAGE_BYTES // gcd(PAGE_BYTES, stride_bytes) for stride_bytes in strides_bytes))
    block_bytes = sum(strides_bytes)
    wanted_bytes = min(_GROUP_BYTES, num_blocks * block_bytes // _LEAST_GROUPS)
    while 2 * blocks * block_bytes <= wanted_bytes:
        blocks *= 2
    return blocks


def bytes_of_groups(num_needed: int, runs: Iterable[Run], num_blocks: int) -> int:
    """Bytes of as many whole groups as have so many blocks, of a cache of `num_blocks`."""
    strides_bytes = [run.stride_bytes for run in runs]
    return round_up(num_needed, blocks_of_group(strides_bytes, num_blocks)) * sum(strides_bytes)


class ElasticBlocks:
    """The memory of `num_blocks` blocks, under addresses that never change. Not thread-safe: callers hold `lock`.

    `runs` begin at whole pages, and do not overlap up to the last whole group. At first only group 0 is mapped.
    Raises: BudgetError for a budget below one group, DriverError.
    """

    def __init__(
        self,
        driver: Driver,
        runs: Sequence[Run],
        num_blocks: int,
        *,
        budget_bytes: int | None = None,
        source: HandleSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert num_blocks > 0 and all(run.offset_bytes % PAGE_BYTES == 0 for run in runs)
        self.lock: Final = threading.RLock()
        self.num_blocks: Final = num_blocks
        self.group_blocks: Final = blocks_of_group((run.stride_bytes for run in runs), num_blocks)
        self.group_bytes: Final = self.group_blocks * sum(run.stride_bytes for run in runs)
        self.num_groups: Final = ceil_div(num_blocks, self.group_blocks)
        self.reserved_bytes: Final = bytes_of_groups(num_blocks, runs, num_blocks)
        self.size_bytes: Final = max(run.offset_bytes + self.num_groups * self.group_blocks * run.stride_bytes for run in runs)
        self.streams: set[torch.Stream] = set()
        """Streams whose work touches blocks, beside the caller's."""
        self.device: Final = driver.device
        self._runs: Final = tuple(runs)
        self._driver, self._source, self._clock = driver, source or driver, clock
        self.on_unmapped: Callable[[int], None] = lambda group: None
        """Called with a group whose memory is about to go."""
        self._budget_groups = self.num_groups if budget_bytes is None else self._groups_of(budget_bytes)
        self._address = driver.reserve(self.size_bytes)
        self._parts: dict[int, list[_Part]] = {}
        """Parts of each group that has memory, one of each run; fewer while the group is unmapped."""
        self._leaving: dict[int, Fence | None] = {}
        self._num_used = [0] * self.num_groups
        self._groups_used = self._blocks_used = 0
        self._used_at = [0] * self.num_groups
        """Number of the last call that gave a block of the group back."""
        self._gives = 0
        self._settled: tuple[int, int] | None = None
        """Groups above the budget, and `_gives`, at the last call of `settle`; None if the budget has changed."""
        self._lowest_absent = 1
        """No group below is absent."""
        self._retry_s = 0.0
        self.failure: DriverError | None = None
        """Why the device gave no memory, the last time that it was asked."""
        self._is_closed = False
        try:
            self._map(0)
        except BaseException:
            driver.give_back(self._address, self.size_bytes)
            raise
        driver.synchronize()  # before any stream is known

    # what there is

    def tensor(self) -> torch.Tensor:
        """All addresses as int8 [size_bytes]. What is not mapped faults."""
        return wrap(self._address, self.size_bytes, self._driver.device).view(torch.int8)

    def state(self) -> State:
        """Count bytes. Any thread may ask."""
        used = self._groups_used if self._blocks_used > 1 else 0
        return State(*(groups * self.group_bytes for groups in (self._budget_groups, len(self._parts), used, self.num_groups)))

    def group_of(self, block: int) -> int:
        """The group of a block."""
        return block // self.group_blocks

    def blocks_in(self, group: int) -> range:
        """The blocks of a group; the null block too."""
        start = group * self.group_blocks
        return range(start, min(start + self.group_blocks, self.num_blocks))

    def may_hand_out(self, block: int) -> bool:
        """Is a block mapped, and to stay so?"""
        group = self.group_of(block)
        return group in self._parts and group not in self._leaving

    def num_in_use(self, group: int) -> int:
        """Blocks of a group that are in use."""
        return self._num_used[group]

    @property
    def num_growable(self) -> int:
        """Number of blocks that `grow` could add now."""
        if self.failure is not None and self._clock() < self._retry_s:
            return 0
        groups = min(self._budget_groups, self.num_groups) - len(self._parts)
        if groups <= 0:
            return 0
        # The last group may be a part, and is mapped last: without it, groups are whole.
        return min(groups * self.group_blocks, self.num_blocks - len(self._parts) * self.group_blocks)

    # blocks

    def take(self, blocks: Iterable[int]) -> None:
        """Note that blocks are in use."""
        for block in blocks:
            group = block // self.group_blocks
            assert group in self._parts and group not in self._leaving, f"block {block} is handed out without memory"
            self._groups_used += not self._num_used[group]
            self._num_used[group] += 1
            self._blocks_used += 1

    def give(self, blocks: Iterable[int]) -> None:
        """Note that blocks are in use no more. Work that was launched may still touch them."""
        self._gives += 1
        for block in blocks:
            group = block // self.group_blocks
            self._num_used[group] -= 1
            self._groups_used -= not self._num_used[group]
            self._blocks_used -= 1
            self._used_at[group] = self._gives
            assert self._num_used[group] >= 0, f"block {block} is given back twice"

    # memory

    def fence(self) -> Fence:
        """A fence behind all work that was launched."""
        return self._driver.fence(tuple(self.streams))

    def grow(self, num_blocks: int) -> list[int]:
        """Map groups, lowest first, until they have so many blocks; return these, fewer if the budget or the device ends.

        The caller's stream and `streams` come behind the zeroes. Cost: three driver calls and a memset for each run of a
        group; does not block. Not under graph capture.
        """
        added: list[int] = []
        while len(added) < num_blocks and self.num_growable:
            group = self._next_absent()
            try:
                self._map(group)
            except DriverError as error:
                self.failure, self._retry_s = error, self._clock() + _RETRY_S
                break
            self.failure = None
            added += self.blocks_in(group)
        if added:
            self._driver.order(tuple(self.streams))
        return added

    def handles_of(self, group: int) -> list[Handle]:
        """The handles of a mapped group, one for each run."""
        return [part.handle for part in self._parts[group]]

    def adopt(self, groups: Mapping[int, Sequence[Handle]]) -> list[int]:
        """Map handles that an earlier engine has written, one for each run of absent groups or group 0; return their blocks.

        Cost: two driver calls for each handle; for group 0 it waits for launched work.
        Raises: DriverError; the handles of groups that are not mapped by then are released.
        """
        left = dict(groups)
        try:
            while left:
                group, handles = next(iter(left.items()))
                del left[group]
                if group in self._parts:
                    self.fence().wait()
                    self._unmap(group)
                self._map(group, handles)
        finally:
            for handles in left.values():
                for handle in handles:
                    retried(partial(self._source.release, handle))
        return [block for group in groups for block in self.blocks_in(group)]

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget; `settle` and `reclaim` act on it. Raises: BudgetError below one group."""
        self._budget_groups, self._settled = self._groups_of(budget_bytes), None

    def settle(self, worth: Callable[[int], object] = lambda group: ()) -> tuple[list[int], list[int]]:
        """Let as many groups leave as are above the budget, and no more; return those that begin to, and those that stay on.

        Groups without blocks in use leave first; among them those with the least `worth`, and then those used least recently.
        One that waits for its blocks stays when another one can go instead.
        Cost: reads each group, if there are more than the budget and blocks were given back since the last call.
        """
        surplus = max(0, len(self._parts) - self._budget_groups)
        now = surplus, self._gives
        if not (surplus or self._leaving) or now == self._settled:
            return [], []
        self._settled = now
        whole = [group for group in self._leaving if self._is_whole(group)]
        going = [group for group in self._leaving if group not in whole or not self._num_used[group]]
        waiting = sorted((group for group in whole if self._num_used[group]), key=self._num_used.__getitem__)
        staying = [group for group in self._parts if group and group not in self._leaving]
        staying.sort(key=lambda group: (self._num_used[group], worth(group), self._used_at[group]))
        missing = surplus - len(going)
        leave = [group for group in staying[: max(0, missing)] if not self._num_used[group]]
        missing -= len(leave)
        back = waiting[max(0, missing) :]
        missing -= len(waiting) - len(back)
        leave += staying[len(leave) : len(leave) + max(0, missing)]
        if missing < 0:
            back += [group for group in going if group in whole][missing:]
        for group in back:
            del self._leaving[group]
        self._leaving |= dict.fromkeys(leave)
        return leave, back

    def reclaim(self, *, wait: bool = False) -> int:
        """Unmap leaving groups of which no block is in use, and which no launched work can touch; return how many bytes.

        With `wait`, work that was launched is waited for. What the driver refuses is tried again by the next call.
        Cost: a fence for all groups that are new to it, two driver calls for each run of a group.
        """
        before = len(self._parts)
        try:
            fresh = [group for group, fence in self._leaving.items() if fence is None and not self._num_used[group]]
            if fresh:
                self._leaving |= dict.fromkeys(fresh, self.fence())
            for group, fence in list(self._leaving.items()):
                if fence is None:
                    continue
                if wait:
                    fence.wait()
                if fence.done():
                    self._unmap(group)
                    del self._leaving[group]
        except DriverError as error:
            self.failure = error
        return (before - len(self._parts)) * self.group_bytes

    @property
    def is_leaving(self) -> bool:
        """Are there groups that are to go?"""
        return bool(self._leaving)

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Map one piece of memory under all that is absent, for what writes anywhere before blocks are handed out.

        Cost: three driver calls for each 32 MiB of addresses.
        """
        handles: dict[int, Handle] = {}
        mapped: list[tuple[int, int]] = []
        try:
            for start, end in self._absent_spans():
                while start < end:
                    size = _SCRATCH_BYTES if end - start >= _SCRATCH_BYTES else PAGE_BYTES
                    if size not in handles:
                        handles[size] = self._driver.create(size)
                    self._driver.map(start, handles[size], size)
                    mapped.append((start, size))
                    self._driver.set_access(start, size, Access.READ_WRITE)
                    start += size
            yield
        finally:
            if mapped:
                self.fence().wait()
            for address, size in mapped:
                retried(partial(self._driver.unmap, address, size))
            for handle in handles.values():
                retried(partial(self._driver.release, handle))

    def close(self) -> None:
        """Wait for launched work, and give all memory and addresses back. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.fence().wait()
        for group in list(self._parts):
            self._unmap(group)
        self._leaving.clear()
        self._driver.give_back(self._address, self.size_bytes)

    def _groups_of(self, budget_bytes: int) -> int:
        if budget_bytes < self.group_bytes:
            raise BudgetError(
                f"a budget of {format_bytes(budget_bytes)} is below {format_bytes(self.group_bytes)}, the memory of the "
                f"{self.group_blocks} blocks that are mapped together"
            )
        return min(budget_bytes // self.group_bytes, self.num_groups)

    def _next_absent(self) -> int:
        while self._lowest_absent in self._parts:
            self._lowest_absent += 1
        return self._lowest_absent

    def _places(self, group: int) -> Iterator[tuple[int, int]]:
        """Address and size of a group's part of each run."""
        for run in self._runs:
            size_bytes = self.group_blocks * run.stride_bytes
            yield self._address + run.offset_bytes + group * size_bytes, size_bytes

    def _absent_spans(self) -> Iterator[tuple[int, int]]:
        for run in self._runs:
            size_bytes = self.group_blocks * run.stride_bytes
            start = self._address + run.offset_bytes
            for group in range(self.num_groups + 1):
                if group == self.num_groups or group in self._parts:
                    end = self._address + run.offset_bytes + group * size_bytes
                    if start < end:
                        yield start, end
                    start = end + size_bytes

    def _is_whole(self, group: int) -> bool:
        """Has a group all its memory? One of which an unmapping failed does not."""
        parts = self._parts[group]
        return len(parts) == len(self._runs) and all(part.is_mapped for part in parts)

    def _map(self, group: int, handles: Sequence[Handle] = ()) -> None:
        """Put zeroed memory under a group, or these handles, one for each run. On failure nothing has changed, but they go."""
        places = [*self._places(group)]
        parts = [_Part(*place, handle) for place, handle in zip(places, handles, strict=False)]
        try:
            for index, (address, size) in enumerate(places):
                if not handles:
                    parts.append(_Part(address, size, self._source.create(size)))
                self._driver.map(address, parts[index].handle, size)
                parts[index].is_mapped = True
                self._driver.set_access(address, size, Access.READ_WRITE)
            if not handles and not self._source.creates_zeroed:
                for part in parts:
                    self._driver.zero(part.address, part.size_bytes)
        except BaseException:
            retried(self._driver.synchronize)
            self._take_away(parts)
            raise
        self._parts[group] = parts

    def _unmap(self, group: int) -> None:
        """Take the memory away from under a group, whose fence has passed. If it fails, the next call goes on."""
        self.on_unmapped(group)
        self._take_away(self._parts[group])
        del self._parts[group]
        self._lowest_absent = min(self._lowest_absent, group)
        self.failure = None

    def _take_away(self, parts: list["_Part"]) -> None:
        while parts:
            part = parts[-1]
            if part.is_mapped:
                retried(partial(self._driver.unmap, part.address, part.size_bytes))
                part.is_mapped = False
            retried(partial(self._source.release, part.handle))
            parts.pop()


def aligned(num_blocks: int, strides_bytes: Sequence[int]) -> list[Run]:
    """Runs of these strides one behind the other, each with whole groups."""
    blocks = blocks_of_group(strides_bytes, num_blocks)
    runs, at = [], 0
    for stride_bytes in strides_bytes:
        runs.append(Run(at, stride_bytes))
        at += round_up(num_blocks, blocks) * stride_bytes
    return runs
