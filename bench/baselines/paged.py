"""The block-table cache: blocks of 16 rows in one tensor, and a table on the device that says which are whose.

It gives the engine what `KVCache` gives it. Nothing is mapped; tables and limits go to the device when they change, which is at
block borders, ahead of need and for all sequences in one copy.

Legend: S slots, P blocks, U rows of a block, C columns of the tables, K kv heads, D head dim.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import numpy as np
import torch

from bench.baselines.blocks import BLOCK_ROWS, BlockPool
from bench.baselines.numbers import Planes, SlotNumbers, SlottedCache, planes_of
from vmmkv import KVLayout
from vmmkv.cache import CacheStats
from vmmkv.errors import OutOfPages
from vmmkv.prefix.radix_tree import Node
from vmmkv.units import ceil_div

NO_BLOCK: Final = -1
"""An entry of a table that stands for nothing: kernels write nowhere, and nobody reads it."""


class PagedSequence:
    """See engine.kv_backend.EngineCacheSequence."""

    def __init__(self, cache: "PagedCache", slot: int, max_tokens: int, namespace: Hashable) -> None:
        self._cache = cache
        self.slot = slot
        self.max_tokens: Final = max_tokens
        self.namespace: Final = namespace
        self.closed = False

    @property
    def length(self) -> int:
        """Rows launched."""
        return int(self._cache.lengths[self.slot])

    def grow(self, num_tokens: int) -> None:
        """Blocks for so many tokens. Raises: OutOfPages; then nothing has changed."""
        assert num_tokens <= self.max_tokens, f"a sequence of {self.max_tokens} tokens at most grows to {num_tokens}"
        if num_tokens > self._cache.limits[self.slot]:
            self._cache.reserve({self.slot: num_tokens})

    def advance(self, num_tokens: int = 1) -> None:
        """So many more rows are launched."""
        self._cache.advance(self.slot, num_tokens)

    def start(self, group: int = 0) -> int:
        """All rows are kept."""
        return 0

    def advance_start(self, group: int) -> None:
        """No group has a window."""
        raise AssertionError("a block-table cache has no windows")

    def close(self) -> None:
        """Its blocks are free, but for those that others hold. Work that is launched may still touch them: what comes after it
        on the stream comes after it. Idempotent."""
        if not self.closed:
            self.closed = True
            self._cache._close(self)


class PagedCache(SlottedCache):
    """See engine.kv_backend.EngineCache. Raises: ValueError for a layout with windows, several groups or quantised rows."""

    def __init__(self, layout: KVLayout, device: torch.device, *, num_blocks: int, slots: int, max_tokens: int) -> None:
        self.blocks: Final = BlockPool(num_blocks)
        super().__init__(layout, SlotNumbers(slots, device), max_tokens=max_tokens)
        self.block_bytes: Final = BLOCK_ROWS * layout.row_bytes
        self.planes: Final[Planes] = planes_of(layout, (num_blocks, BLOCK_ROWS), device)
        num_columns = ceil_div(max_tokens, BLOCK_ROWS)
        self.tables_SC: Final = torch.full((1 + slots, num_columns), NO_BLOCK, dtype=torch.int32, device=device)
        self.host_tables_SC: Final = np.full((1 + slots, num_columns), NO_BLOCK, np.int32)
        self.num_blocks_S: Final = np.zeros(1 + slots, np.int64)
        self._sequences: dict[int, PagedSequence] = {}
        self._ends = np.zeros(1 + slots, np.int64)
        """The most tokens of each sequence; 0 where none runs."""
        self.locked: Final[dict[int, Node[int]]] = {}
        """By slot, the node of the tree whose path its sequence uses."""
        self._num_stalls = self._num_pumped = self._num_taken = 0

    # what the engine asks

    def open(self, *, max_tokens: int | None = None, tenant: Hashable = None) -> PagedSequence:
        """A new sequence, without blocks. Memory of other tenants is not zeroed: block-table engines do not."""
        slot = self.numbers.take()
        sequence = PagedSequence(self, slot, max_tokens or self.max_tokens, tenant)
        self._sequences[slot], self._ends[slot] = sequence, sequence.max_tokens
        return sequence

    def lookahead_tokens(self, step_us: float) -> int:
        """A block costs nothing to get: for the next token is soon enough."""
        return 1

    def map_ahead(self, budget_us: float, *, lookahead_tokens: int) -> int:
        """Blocks for all sequences that soon need one, in one upload; none if they are not to be had for all."""
        wanted = np.minimum(self._ends, self.lengths + lookahead_tokens)
        short = np.flatnonzero(wanted > self.limits)
        if not len(short):
            return 0
        try:
            num_blocks = self._reserve(dict(zip(short.tolist(), wanted[short].tolist(), strict=True)))
        except OutOfPages:
            return 0  # who needs one will ask, and be told
        self._num_pumped += num_blocks
        return num_blocks

    def fork(self, sequence: PagedSequence, count: int = 1, *, max_tokens: int | None = None) -> list[PagedSequence]:
        """See EngineCache.fork: full blocks are shared, the last one is copied."""
        num_full, rest = divmod(sequence.length, BLOCK_ROWS)
        forks: list[PagedSequence] = []
        try:
            for _ in range(count):
                fork = self.open(max_tokens=max_tokens, tenant=sequence.namespace)
                forks.append(fork)
                self.attach(fork, self.host_tables_SC[sequence.slot, :num_full].tolist())
                fork.grow(sequence.length)
        except BaseException:
            for fork in forks:
                fork.close()
            raise
        if rest:
            self.copy_rows([(sequence, fork) for fork in forks], num_full * BLOCK_ROWS, sequence.length)
        return forks

    def copy_rows(self, pairs: Iterable[tuple[PagedSequence, PagedSequence]], first: int, end: int) -> None:
        """See EngineCache.copy_rows: the target's blocks there are its own."""
        positions = np.arange(first, end)
        for source, target in pairs:
            blocks = self.host_tables_SC[target.slot, positions // BLOCK_ROWS]
            assert (self.blocks.num_refs[blocks] == 1).all(), "a block that others hold too would be written"
            places = [
                self.host_tables_SC[each.slot, positions // BLOCK_ROWS] * BLOCK_ROWS + positions % BLOCK_ROWS
                for each in (source, target)
            ]
            from_T, to_T = (part.long() for part in self.numbers.uploads.pack(places))
            for planes in self.planes.values():
                for plane_PUKD in planes:
                    rows = plane_PUKD.flatten(0, 1)
                    rows[to_T] = rows[from_T]
            self.lengths[target.slot] = end

    def stats(self) -> CacheStats:
        """In the words of a cache of pages; a block is held like one."""
        live = list(self._sequences)
        num_tokens = int(self.lengths[live].sum())
        in_tables = [self.host_tables_SC[slot, : self.num_blocks_S[slot]] for slot in live]
        used = len(np.unique(np.concatenate(in_tables))) if live else 0
        held_bytes, block_bytes = self.blocks.num_held * self.block_bytes, self.block_bytes
        token_bytes = num_tokens * self.layout.row_bytes
        mapped_bytes = int(self.num_blocks_S[live].sum()) * block_bytes
        budget_bytes = self.blocks.num_blocks * block_bytes
        return CacheStats(
            reserved_bytes=budget_bytes,
            mapped_bytes=mapped_bytes,
            pending_reclaim_bytes=0,
            parked_bytes=0,
            token_bytes=token_bytes,
            guard_bytes=0,
            waste_bytes=mapped_bytes - token_bytes,
            pool_created_bytes=budget_bytes,
            pool_held_bytes=held_bytes,
            pool_used_bytes=used * block_bytes,
            pool_free_bytes=budget_bytes - held_bytes,
            pool_budget_bytes=budget_bytes,
            num_tokens=num_tokens,
            num_sequences=len(live),
            num_parked=0,
            num_slots=self.num_slots,
            blocked_steps=self._num_stalls,
            blocked_us=0.0,
            mapped_pages=self._num_taken,
            mapped_ahead_pages=self._num_pumped,
            adopted_slots=0,
            driver_calls={},
        )

    def check(self) -> None:
        """Recount who holds each block: tables, and pieces of the tree."""
        self.blocks.check()
        num_refs = np.zeros(self.blocks.num_blocks, np.int64)
        for slot in self._sequences:
            held = self.host_tables_SC[slot, : self.num_blocks_S[slot]]
            np.add.at(num_refs, held, 1)
            room = min(self._sequences[slot].max_tokens, int(self.num_blocks_S[slot]) * BLOCK_ROWS)
            assert self.lengths[slot] <= self.limits[slot] == room
            assert np.array_equal(held, self.tables_SC[slot, : len(held)].cpu().numpy())
            assert self.limit[slot].item() == self.limits[slot] or not self.limits[slot]
        for node in self.blocks.tree.nodes():
            np.add.at(num_refs, [piece.value for piece in node.pieces], 1)
        assert np.array_equal(num_refs, self.blocks.num_refs)
        self.blocks.tree.check()

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self.planes.clear()

    # blocks

    def reserve(self, num_tokens: dict[int, int]) -> None:
        """Blocks for so many tokens of each slot, whose sequences wait for it. Raises: OutOfPages; then nothing has changed."""
        self._num_stalls += sum(bool(self.lengths[slot]) for slot in num_tokens)
        self._reserve(num_tokens)

    def attach(self, sequence: PagedSequence, blocks: Sequence[int]) -> None:
        """A new sequence begins with full blocks that others hold too."""
        self.blocks.hold(list(blocks))
        self._extend({sequence.slot: list(blocks)})
        self.lengths[sequence.slot] = len(blocks) * BLOCK_ROWS

    def _reserve(self, num_tokens: dict[int, int]) -> int:
        missing = {slot: ceil_div(count, BLOCK_ROWS) - int(self.num_blocks_S[slot]) for slot, count in num_tokens.items()}
        blocks = iter(self.blocks.acquire(sum(missing.values())))
        self._extend({slot: [next(blocks) for _ in range(count)] for slot, count in missing.items()})
        return sum(missing.values())

    def _extend(self, blocks_by_slot: dict[int, list[int]]) -> None:
        """More blocks behind those that slots have, on the host, and on the device by one copy, in order on its stream."""
        num_columns = self.host_tables_SC.shape[1]
        places: list[int] = []
        values: list[int] = []
        limits: list[int] = []
        for slot, blocks in blocks_by_slot.items():
            first = int(self.num_blocks_S[slot])
            self.host_tables_SC[slot, first : first + len(blocks)] = blocks
            self.num_blocks_S[slot] += len(blocks)
            places += range(slot * num_columns + first, slot * num_columns + first + len(blocks))
            values += blocks
            limits.append(min(self._sequences[slot].max_tokens, (first + len(blocks)) * BLOCK_ROWS))
        slots = list(blocks_by_slot)
        self._num_taken += len(values)
        self.limits[slots] = limits
        places_N, values_N, slots_M, limits_M = self.numbers.uploads.pack([places, values, slots, limits])
        self.tables_SC.view(-1).index_copy_(0, places_N.long(), values_N)
        self.limit.index_copy_(0, slots_M.long(), limits_M)

    def _close(self, sequence: PagedSequence) -> None:
        slot = sequence.slot
        node = self.locked.pop(slot, None)
        if node is not None:
            self.blocks.tree.unlock(node)
        self.blocks.release(self.host_tables_SC[slot, : self.num_blocks_S[slot]].tolist())
        self.num_blocks_S[slot] = 0
        del self._sequences[slot]
        self._ends[slot] = 0
        self.numbers.give_back(slot)
