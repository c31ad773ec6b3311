"""BlockMover: records between a Store and the blocks of another engine.

A block of tokens lies in one run of memory, or in some for each layer. On a GPU many runs go through a piece of memory in which
they are one: a launch and some copies for many blocks, instead of dozens of copies for each. A record has whole blocks, so that
it is a multiple of 4 KiB and of about 2 MiB, in which disks and links are fast. Records are moved in batches.
"""

import itertools
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch

from vmmkv.adapters.vllm.schedule import RecordBlocks, StepPlan
from vmmkv.driver.base import Driver, Fence
from vmmkv.tiers import Get, Put, Store
from vmmkv.tiers.mover import Run
from vmmkv.tiers.record import ALIGNMENT_BYTES, RECORD_BYTES

BATCH_BYTES: Final = 32 << 20
"""Bytes of records that are moved together. On a GPU whose layers lie apart, twice as much memory is taken for their way."""

PUT_TIMEOUT_S: Final = 30.0
"""Time after which what a tier has no room for is not stored there: a thread polls as long as something waits."""

_IDLE_S: Final = 0.01
"""Time without a step after which the engine is idle."""

_PAUSE_S: Final = 0.0005
"""Pause between two looks at copies while the engine is idle."""

_LEAST_US: Final = 100.0
_MOST_US: Final = 1000.0
"""Bounds of the time in a step for records: a tenth of the time from step to step."""

_MOST_LOADING_US: Final = 10_000.0
"""Most time in a step while requests wait for what is loaded: up to half of the time from step to step."""

_WITHOUT_FORWARD_S: Final = 0.02
"""Most time in a step that computes nothing, since its requests are being loaded: there is nothing else to do."""

_LOOK_S: Final = 0.0001
"""Time between two looks at copies meanwhile."""


def of_rank(key: bytes, rank: int) -> bytes:
    """The key of a rank's part of a record, below 65,536 of them."""
    if not rank:
        return key
    return key[:-2] + bytes(one ^ other for one, other in zip(key[-2:], rank.to_bytes(2, "big"), strict=True))


def blocks_of_record(block_bytes: int) -> int:
    """The number of blocks in a record: as many as fit into 2 MiB, or the least that are a multiple of 4 KiB."""
    least = ALIGNMENT_BYTES // math.gcd(block_bytes, ALIGNMENT_BYTES)
    return max(1, RECORD_BYTES // (block_bytes * least)) * least


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of memory that each block has in a tensor, all of one size."""

    addresses: tuple[int, ...]
    """Addresses of block 0's."""
    stride: int
    """Distance from one block's run to that of the next block, in bytes."""
    size_bytes: int


class BlockMemory:
    """Memory of an engine's blocks: the runs of each, in the order of its tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor], num_blocks: int) -> None:
        """The tensors have `num_blocks` in one of their dimensions. Raises: ValueError for one that has not."""
        self.tensors: Final = list(tensors)
        """Tensors with the blocks, kept as long as their addresses are."""
        self._runs = [_runs_of(tensor, num_blocks) for tensor in tensors]
        self.block_bytes: Final = sum(runs.size_bytes * len(runs.addresses) for runs in self._runs)
        self._pieces = _Pieces.of(self._runs, tensors[0].device) if len(self.spans(0)) > 1 else None

    def spans(self, block: int) -> list[tuple[int, int]]:
        """Address and size of each run of a block; runs that lie side by side are one."""
        spans: list[tuple[int, int]] = []
        for runs in self._runs:
            for address in runs.addresses:
                start = address + block * runs.stride
                if spans and sum(spans[-1]) == start:
                    spans[-1] = spans[-1][0], spans[-1][1] + runs.size_bytes
                else:
                    spans.append((start, runs.size_bytes))
        return spans

    def copy(self, blocks: Sequence[int], driver: Driver, runs: Sequence[Run], *, is_load: bool) -> None:
        """Launch copies as `Buffer.copy`, of blocks one behind the other; -1 for one that is not loaded, or not there.

        Copies of one direction are launched on one stream, always the same.
        """
        if self._pieces is not None:
            self._pieces.copy(blocks, driver, runs, is_load=is_load)
            return
        for run in runs:
            address = run.address
            for block in blocks[run.offset_bytes // self.block_bytes :][: run.size_bytes // self.block_bytes]:
                for place, size_bytes in self.spans(block) if block >= 0 else ():
                    target, source = (place, address) if is_load else (address, place)
                    driver.copy(target, source, size_bytes)
                    address += size_bytes
                address += self.block_bytes if block < 0 else 0


class _Pieces:
    """Memory on the device that has blocks in one piece, on their way to the host or from there."""

    def __init__(self, addresses: list[int], strides: list[int], run_bytes: int, device: torch.device) -> None:
        from vmmkv_kernels.gather import gather_blocks, scatter_blocks  # by Triton, which is missing where vLLM has no GPU

        self._gather, self._scatter = gather_blocks, scatter_blocks
        self._runs = torch.tensor(addresses, device=device), torch.tensor(strides, device=device)
        self._block_bytes = run_bytes * len(addresses)
        most = max(BATCH_BYTES // self._block_bytes, blocks_of_record(self._block_bytes))
        self._pieces = torch.empty(2, most, len(addresses), run_bytes // 8, dtype=torch.int64, device=device)
        """Pieces of stores and of loads. Copies of a direction are in one stream, so that each finds its piece free."""
        self._blocks = torch.full((2, most), -1, device=device)
        for is_load, launch in enumerate((gather_blocks, scatter_blocks)):  # compiled now, for the addresses of its own
            launch(*self._runs, self._blocks[is_load, :1], self._pieces[is_load, :1])

    @classmethod
    def of(cls, runs: Sequence[_Runs], device: torch.device) -> Self | None:
        """Pieces for blocks of these runs; None where copies of each run serve: on a host, or for runs of odd sizes."""
        sizes = [*{each.size_bytes for each in runs}]
        addresses = [address for each in runs for address in each.addresses]
        strides = [each.stride for each in runs for _ in each.addresses]
        is_odd = len(sizes) > 1 or any(number % 16 for number in (*sizes, *addresses, *strides))
        return None if device.type != "cuda" or is_odd else cls(addresses, strides, sizes[0], device)

    def copy(self, blocks: Sequence[int], driver: Driver, runs: Sequence[Run], *, is_load: bool) -> None:
        """Launch copies of blocks. See BlockMemory.copy."""
        moved = [-1] * len(blocks)
        for run in runs:
            places = slice(run.offset_bytes // self._block_bytes, (run.offset_bytes + run.size_bytes) // self._block_bytes)
            moved[places] = blocks[places]
        numbers, piece = self._blocks[int(is_load), : len(blocks)], self._pieces[int(is_load), : len(blocks)]
        given = torch.tensor(moved)
        driver.copy(numbers.data_ptr(), given.data_ptr(), given.nbytes)  # read when this returns, since it is not pinned
        if not is_load:
            self._gather(*self._runs, numbers, piece)
        for run in runs:
            ends = piece.data_ptr() + run.offset_bytes, run.address
            target, source = ends if is_load else reversed(ends)
            driver.copy(target, source, run.size_bytes)
        if is_load:
            self._scatter(*self._runs, numbers, piece)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of records as a `Buffer`; -1 for one that is not loaded, since the device has it."""

    memory: BlockMemory
    blocks: Sequence[int]

    @property
    def size_bytes(self) -> int:
        return self.memory.block_bytes * len(self.blocks)

    def copy(self, driver: Driver, runs: Sequence[Run], *, is_load: bool) -> None:
        self.memory.copy(self.blocks, driver, runs, is_load=is_load)


def _runs_of(tensor: torch.Tensor, num_blocks: int) -> _Runs:
    """The runs of each block in a tensor."""
    if num_blocks not in tensor.shape:
        raise ValueError(f"a KV cache of shape {tuple(tensor.shape)} has no dimension of {num_blocks} blocks")
    dimension = tensor.shape.index(num_blocks)
    block = tensor.select(dimension, 0)
    outer = sorted((stride, count) for stride, count in zip(block.stride(), block.shape, strict=True) if count > 1)
    run = 1
    while outer and outer[0][0] == run:
        run *= outer.pop(0)[1]
    size = tensor.element_size()
    offsets = [sum(place) for place in itertools.product(*(range(0, stride * count, stride) for stride, count in outer))]
    first = block.data_ptr()
    return _Runs(tuple(first + offset * size for offset in sorted(offsets)), tensor.stride(dimension) * size, run * size)


class IdlePoller:
    """A thread that polls a store while the engine takes no steps. Beside them it would wait for Python's lock at each call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stepped_s = 0.0
        self._is_awake, self._is_ended = threading.Event(), False
        self._thread = threading.Thread(target=self._poll, name="vmmkv-poll", daemon=True)
        self._thread.start()

    def stepped(self) -> None:
        """The engine has taken a step, which has left something to do."""
        self._stepped_s = time.monotonic()
        self._is_awake.set()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._is_ended = True
        self._is_awake.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._is_ended:
            self._is_awake.wait()
            self._is_awake.clear()
            is_busy = True
            while is_busy and not self._is_ended:
                left_s = self._stepped_s + _IDLE_S - time.monotonic()
                time.sleep(max(left_s, _PAUSE_S))
                is_busy = left_s > 0 or self._store.poll(_MOST_US)


class BlockMover:
    """Moves records between a store and an engine's blocks, within the engine's steps and in their thread.

    Work for records is done while the device computes a step that was launched.
    """

    def __init__(self, store: Store, memory: BlockMemory, rank: int = 0) -> None:
        """`rank`: of the engine's ranks, each of which has a part of each record."""
        self.counts: Final = Counter[str]()
        """Records that failed to load, and that were given up, since their blocks were written before they were read."""
        self._store, self._memory, self._rank = store, memory, rank
        self._loads: dict[str, list[tuple[Get, list[int]]]] = {}
        self._puts = defaultdict[int, list[Put]](list)
        """Puts of each block that may be read still: requests share blocks."""
        self._most_puts = 4096
        self._free: Fence | None = None
        """Fence behind what was launched before the step, which may use blocks that it loads; the step does not."""
        self._last_s = 0.0
        self.is_busy = False
        """Was something under way at the end of the last step, or was a tier still writing?"""

    def before_step(self, plan: StepPlan) -> None:
        """Let the step that is launched next write its blocks: give up stores of them, and wait for copies under way."""
        reading = {put for block in plan.written for put in self._puts.pop(block, ()) if not put.done}
        for put in reading:
            put.give_up()
            self.counts["given_up"] += put.num_missing
        while any(not put.done for put in reading):
            self._store.poll(_MOST_US)
        self._free = self._store.fence() if plan.loads else None

    def begin(self, plan: StepPlan) -> None:
        """Begin the loads of a plan."""
        for name, records, timeout_s in plan.loads:
            self._loads[name] = []
            for keys, blocks in self._batches(records):
                get = self._store.get(keys, _Blocks(self._memory, blocks), timeout_s=timeout_s, free=self._free)
                self._loads[name].append((get, blocks))

    def after_step(self, plan: StepPlan) -> None:
        """Begin the stores of a plan, behind the step that was launched."""
        written = self._store.fence() if plan.stores else None
        for keys, blocks in self._batches([*dict(plan.stores).items()]):
            put = self._store.put(keys, _Blocks(self._memory, blocks), timeout_s=PUT_TIMEOUT_S, written=written)
            for block in blocks:
                if block >= 0:
                    self._puts[block].append(put)
        if len(self._puts) > self._most_puts:
            left = {block: [put for put in puts if not put.done] for block, puts in self._puts.items()}
            self._puts = defaultdict(list, {block: puts for block, puts in left.items() if puts})
            self._most_puts = max(4096, 2 * len(self._puts))

    def go_on(self, *, computes: bool) -> None:
        """Go on with what is under way, at the end of each step. `computes`: the device is busy with the step."""
        now_s = time.monotonic()
        step_us = 1e6 * (now_s - self._last_s)
        self._last_s = now_s
        share_us = min(step_us / 2, _MOST_LOADING_US) if self._loads else min(step_us / 10, _MOST_US)
        if not self._store.is_idle:
            self._store.poll(max(share_us, _LEAST_US))
        while not computes and self._loads and not self._has_loaded:
            if time.monotonic() - now_s > _WITHOUT_FORWARD_S:
                break
            time.sleep(_LOOK_S)
            self._store.poll(_MOST_US)
        self.is_busy = not (self._store.is_idle and self._store.is_kept)

    @property
    def _has_loaded(self) -> bool:
        """Has a load ended?"""
        return any(all(get.done for get, _ in loads) for loads in self._loads.values())

    def ended_loads(self) -> tuple[set[str], dict[str, set[int]]]:
        """Requests whose loads have ended, and of those that have failed the blocks that could not be loaded."""
        ended, failed = set[str](), defaultdict[str, set[int]](set)
        for name, loads in list(self._loads.items()):
            if all(get.done for get, _ in loads):
                del self._loads[name]
                ended.add(name)
                for get, blocks in loads:
                    if not get.found:
                        self.counts["failed"] += get.num_missing
                        failed[name].update(block for block in blocks if block >= 0)
        return ended, failed

    def _batches(self, records: Sequence[RecordBlocks]) -> Iterator[tuple[list[bytes], list[int]]]:
        """Keys and blocks of some records at a time."""
        count = max(1, BATCH_BYTES // self._store.record_bytes)
        for start in range(0, len(records), count):
            some = records[start : start + count]
            yield [of_rank(key, self._rank) for key, _ in some], [block for _, blocks in some for block in blocks]
