"""The block-table cache: blocks of so many rows in one tensor, tables on the device, prefixes in whole blocks, as in vLLM.

Prefixes are in the radix tree of `vmmkv.PrefixCache`. Nothing is mapped: tables and limits go
to the device when they change, which is at block borders, ahead of need and for all sequences in one copy. Attention is by our
kernels under a block table, or by FlashAttention-3's; on a CPU, rows are gathered for torch's own.

Legend: N tokens of the step, B sequences, S slots, P blocks, U rows of a block, C columns of the tables, T rows, H query heads,
K kv heads, D head dim.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Final

import numpy as np
import torch

from bench.baselines import fa3
from bench.baselines.slots import BaselineCache, BaselineSequence
from vmmkv import KVLayout
from vmmkv.cache import CacheStats
from vmmkv.errors import OutOfPages
from vmmkv.prefix import PrefixStats
from vmmkv.prefix.radix_tree import Lookup, Match, Node, Piece, RadixTree
from vmmkv.units import ceil_div
from vmmkv_server.engine.attention import AttentionMetadata, KVRows
from vmmkv_server.engine.kv_backend import KVSequence, TokenIds

# blocks


class BlockPool:
    """Blocks with reference counts, and the radix tree over them. `num_refs[b]` counts tables and the tree."""

    def __init__(self, num_blocks: int) -> None:
        self.num_refs = np.zeros(num_blocks, np.int32)
        self.num_evicted = 0
        self.tree: RadixTree[int] = RadixTree(itertools.count().__next__)
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        """All there are."""
        return len(self.num_refs)

    @property
    def num_held(self) -> int:
        """Blocks that are not free."""
        return len(self.num_refs) - len(self._free)

    def acquire(self, count: int) -> list[int]:
        """Blocks with one reference each. Least recently used prefixes are evicted if too few are free.

        Raises: OutOfPages; then nothing has changed.
        """
        if len(self._free) < count:
            missing, could_go = count - len(self._free), 0
            for node in self.tree.eviction.each():
                could_go += sum(int(self.num_refs[piece.value]) == 1 for piece in node.pieces)
                if could_go >= missing:
                    break
            else:
                cached = f"{len(self._free)} are free and {could_go} can be evicted"
                raise OutOfPages(f"{count} blocks are needed, {cached}: all others are in use")
            while len(self._free) < count:
                self.evict_oldest()
        blocks = [self._free.pop() for _ in range(count)]
        self.num_refs[blocks] = 1
        return blocks

    def evict_oldest(self) -> bool:
        """Evict the least recently used leaf; False if there is none that may go."""
        leaf = self.tree.eviction.oldest()
        if leaf is None:
            return False
        blocks = [piece.value for piece in self.tree.remove(leaf)]
        self.num_evicted += len(blocks)
        self.release(blocks)
        return True

    def hold(self, blocks: list[int]) -> None:
        """One more reference to each."""
        self.num_refs[blocks] += 1

    def release(self, blocks: list[int]) -> None:
        """One fewer; those that have none left are free."""
        for block in blocks:
            assert self.num_refs[block] > 0, f"block {block} is released and is free"
            self.num_refs[block] -= 1
            if not self.num_refs[block]:
                self._free.append(block)

    def check(self) -> None:
        """Recount: a block is free once, or held."""
        free = np.array(self._free, np.int64)
        assert len(np.unique(free)) == len(free), "a block is free twice"
        assert not self.num_refs[free].any() and np.count_nonzero(self.num_refs) == self.num_held


# the cache

NO_BLOCK: Final = -1
"""An empty entry of a table: kernels neither read nor write there."""


class PagedCache(BaselineCache):
    """Blocks under tables. See KVBackend."""

    def __init__(
        self,
        layout: KVLayout,
        device: torch.device,
        *,
        num_blocks: int,
        block_rows: int,
        slots: int,
        max_tokens: int,
        shares_prefixes: bool = False,
        rows_over: "Callable[[PagedCache], BlockRows] | None" = None,
    ) -> None:
        super().__init__(layout, device, slots=slots, max_tokens=max_tokens, num_rows=(num_blocks, block_rows))
        self.blocks: Final = BlockPool(num_blocks)
        self.block_rows: Final = block_rows
        self.block_bytes: Final = block_rows * layout.row_bytes
        num_columns = ceil_div(max_tokens, block_rows)
        self.tables_SC: Final = torch.full((1 + slots, num_columns), NO_BLOCK, dtype=torch.int32, device=device)
        self.host_tables_SC: Final = np.full((1 + slots, num_columns), NO_BLOCK, np.int32)
        self.shares_prefixes = shares_prefixes
        self.num_tokens = num_blocks * block_rows
        self._locked: Final[dict[int, Node[int]]] = {}
        """By slot, the node of the tree whose path its sequence uses."""
        self._num_blocks_S: Final = np.zeros(1 + slots, np.int64)
        self._most_S: Final = np.zeros(1 + slots, np.int64)
        """The most tokens of each sequence; 0 where none runs."""
        self._num_blocked = self._num_ahead = self._num_taken = 0
        self._tree: Final = self.blocks.tree
        self._counts: Counter[str] = Counter()
        """Rows that were hit and missed, and attaches by how."""
        self.rows = (rows_over or BlockRows)(self)

    def open(self, *, max_tokens: int | None = None, tenant: Hashable = None) -> BaselineSequence:
        """A new sequence without blocks. Raises: OutOfSlots if all slots run one."""
        sequence = super().open(max_tokens=max_tokens, tenant=tenant)
        self._most_S[sequence.slot] = sequence.max_tokens
        return sequence

    def map_ahead(self, budget_us: float, *, lookahead_tokens: int = 1) -> None:
        """Get blocks for all sequences that soon need one, in one upload; none if they are too few."""
        wanted = np.minimum(self._most_S, self.lengths + lookahead_tokens)
        short = np.flatnonzero(wanted > self.limits)
        if len(short):
            with contextlib.suppress(OutOfPages):  # a sequence that needs one asks for it, and is refused then
                self._num_ahead += self._reserve(dict(zip(short.tolist(), wanted[short].tolist(), strict=True)))

    def stats(self) -> CacheStats:
        """See BaselineCache.stats; a block is held like a page."""
        live = list(self.sequences)
        in_tables = [self.host_tables_SC[slot, : self._num_blocks_S[slot]] for slot in live]
        num_used = len(np.unique(np.concatenate(in_tables))) if live else 0
        num_blocks = (self.blocks.num_blocks, self.blocks.num_held, num_used, int(self._num_blocks_S[live].sum()))
        return self.stats_of(
            *(count * self.block_bytes for count in num_blocks),
            blocked_steps=self._num_blocked,
            mapped_pages=self._num_taken,
            mapped_ahead_pages=self._num_ahead,
        )

    def check(self) -> None:
        """Recount the references of each block: tables, and pieces of the tree."""
        self.blocks.check()
        num_refs = np.zeros(self.blocks.num_blocks, np.int64)
        for slot in self.sequences:
            held = self.host_tables_SC[slot, : self._num_blocks_S[slot]]
            np.add.at(num_refs, held, 1)
            room = min(self.sequences[slot].max_tokens, int(self._num_blocks_S[slot]) * self.block_rows)
            assert self.lengths[slot] <= self.limits[slot] == room
            assert np.array_equal(held, self.tables_SC[slot, : len(held)].cpu().numpy())
            assert self.limit[slot].item() == self.limits[slot] or not self.limits[slot]
        for node in self.blocks.tree.nodes():
            np.add.at(num_refs, [piece.value for piece in node.pieces], 1)
        assert np.array_equal(num_refs, self.blocks.num_refs)
        self.blocks.tree.check()

    def reserve(self, slot: int, num_tokens: int) -> None:
        """See BaselineCache.reserve. A sequence with rows counts as one that waited."""
        self._num_blocked += bool(self.lengths[slot])
        self._reserve({slot: num_tokens})

    def end(self, sequence: BaselineSequence) -> None:
        """Free its slot, and its blocks but for those that others hold."""
        slot = sequence.slot
        node = self._locked.pop(slot, None)
        if node is not None:
            self.blocks.tree.unlock(node)
        self.blocks.release(self.host_tables_SC[slot, : self._num_blocks_S[slot]].tolist())
        self._num_blocks_S[slot] = self._most_S[slot] = 0
        super().end(sequence)

    def _reserve(self, num_tokens: dict[int, int]) -> int:
        missing = {slot: ceil_div(count, self.block_rows) - int(self._num_blocks_S[slot]) for slot, count in num_tokens.items()}
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
            first = int(self._num_blocks_S[slot])
            self.host_tables_SC[slot, first : first + len(blocks)] = blocks
            self._num_blocks_S[slot] += len(blocks)
            places += range(slot * num_columns + first, slot * num_columns + first + len(blocks))
            values += blocks
            limits.append(min(self.sequences[slot].max_tokens, (first + len(blocks)) * self.block_rows))
        slots = list(blocks_by_slot)
        self._num_taken += len(values)
        self.limits[slots] = limits
        places_N, values_N, slots_M, limits_M = self.uploads.pack([places, values, slots, limits])
        self.tables_SC.view(-1).index_copy_(0, places_N.long(), values_N)
        self.limit.index_copy_(0, slots_M.long(), limits_M)

    # prefixes

    def lookup(self, tokens: TokenIds, *, namespace: Hashable = None) -> Callable[[], int]:
        """Function that returns how many rows of whole blocks `attach` would find now."""
        lookup: Lookup[int] = Lookup(namespace, tokens[:-1])
        return lambda: len(_whole(self._tree.resume(lookup))) * self.block_rows

    def attach(
        self, tokens: TokenIds, *, namespace: Hashable = None, max_tokens: int | None = None
    ) -> tuple[BaselineSequence, int]:
        """Begin a sequence with cached blocks of these tokens. Cost: an upload if anything is known."""
        match = self._tree.match(namespace, tokens[:-1])
        blocks = _whole(match)
        num_tokens = len(blocks) * self.block_rows
        sequence = self.open(max_tokens=max_tokens, tenant=namespace)
        if blocks:
            node = self._locked[sequence.slot] = self._node_to(match, num_tokens)
            self._tree.touch(node)
            self._tree.lock(node)
            self.blocks.hold(blocks)
            self._extend({sequence.slot: blocks})
            self.lengths[sequence.slot] = num_tokens
        self._counts.update({"blocks" if blocks else "compute": 1, "hit": num_tokens, "missed": len(tokens) - num_tokens})
        return sequence, num_tokens

    def _node_to(self, match: Match[int], num_tokens: int) -> Node[int]:
        """The node whose path ends there: what lies below is not used, and can be evicted."""
        node = next(node for node in match.path if node.end >= num_tokens)
        return node if node.end == num_tokens else self._tree.split(node, num_tokens)

    def insert(self, sequence: KVSequence, tokens: TokenIds) -> None:
        """Share the first whole blocks of a sequence."""
        count = len(tokens) // self.block_rows if self.shares_prefixes else 0
        if not count:
            return
        blocks = self.host_tables_SC[sequence.slot, :count].tolist()
        pieces = [Piece(self.block_rows * (index + 1), block) for index, block in enumerate(blocks)]
        namespace = self.sequences[sequence.slot].namespace
        inserted = self._tree.insert(namespace, tokens[: count * self.block_rows], pieces)
        known = {piece.end_token for piece in inserted.duplicates}
        self.blocks.hold([piece.value for piece in pieces if piece.end_token not in known])
        before = self._locked.pop(sequence.slot, None)
        self._tree.lock(inserted.node)
        if before is not None:
            self._tree.unlock(before)
        self._locked[sequence.slot] = inserted.node

    def evict(self) -> None:
        """Evict all blocks that no running sequence uses."""
        while self.blocks.evict_oldest():
            pass

    def prefix_stats(self) -> PrefixStats | None:
        """Statistics in the words of a tree over pages. Cost: a walk over the tree."""
        if not self.shares_prefixes:
            return None
        counts, blocks = self._counts, self.blocks
        num_held = sum(len(node.pieces) for node in self._tree.nodes())
        return PrefixStats(
            num_nodes=self._tree.num_nodes,
            num_tokens=self._tree.num_tokens,
            held_bytes=num_held * self.block_bytes,
            attached={name: counts[name] for name in ("blocks", "compute")},
            attach_us={},
            hit_tokens=counts["hit"],
            missed_tokens=counts["missed"],
            inserted_pages=num_held + blocks.num_evicted,
            duplicate_pages=0,
            evicted_pages=blocks.num_evicted,
        )


def _whole(match: Match[int]) -> list[int]:
    """Blocks all of whose rows are matched."""
    return [piece.value for node in match.path for piece in node.pieces if piece.end_token <= match.num_tokens]


# attention


class BlockRows(KVRows):
    """Rows in blocks, by our kernels under a table. See engine.attention.KVRows."""

    def __init__(self, cache: PagedCache) -> None:
        super().__init__(cache, tables_SC=cache.tables_SC)
        self._cache = cache

    def write(self, layer: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor, step: AttentionMetadata) -> None:
        """See KVRows.write."""
        may_write_N = step.rows_N < self._cache.limit[step.slots_N]
        slots_N, rows_N = step.slots_N[may_write_N], step.rows_N[may_write_N]
        blocks_N = self._cache.tables_SC[slots_N, rows_N // self._cache.block_rows]
        for plane_PUKD, values_NKD in zip(self._cache.planes[layer], (k_NKD, v_NKD), strict=True):
            plane_PUKD[blocks_N, rows_N % self._cache.block_rows] = values_NKD[may_write_N]

    def read(self, layer: int, slot: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVRows.read. Copies."""
        first_block, end_block = first // self._cache.block_rows, ceil_div(end, self._cache.block_rows)
        blocks = torch.from_numpy(self._cache.host_tables_SC[slot, first_block:end_block]).long()
        rows = slice(first - first_block * self._cache.block_rows, end - first_block * self._cache.block_rows)
        k_TKD, v_TKD = (plane[blocks].flatten(0, 1)[rows] for plane in self._cache.planes[layer])
        return k_TKD, v_TKD


class FA3Rows(BlockRows):
    """Attention by FlashAttention-3. It knows no prefix groups: in steps with some, rows that decode have our `cascade`."""

    def __init__(self, cache: PagedCache) -> None:
        super().__init__(cache)
        self._singles = torch.arange(2 + cache.num_slots, dtype=torch.int32, device=cache.device)
        """Where the queries of sequences of one query begin."""
        self._planned: tuple[AttentionMetadata, fa3.Batch, torch.Tensor] | None = None
        """The last step, its batch, and how that is split: the same in all layers. A captured step has its own."""

    def decode(
        self, layer: int, q_BHD: torch.Tensor, step: AttentionMetadata, *, scale: float | None, window: int | None,
        softcap: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See KVRows.decode."""
        assert softcap is None, "the models of the benchmarks have none"
        return self._attend(layer, q_BHD, step, self._singles[: len(q_BHD) + 1], 1, scale, None)

    def prefill(
        self, layer: int, q_NHD: torch.Tensor, step: AttentionMetadata, *, scale: float | None, window: int | None,
        softcap: float | None = None, out_NHD: torch.Tensor | None = None, lse_NH: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See KVRows.prefill."""
        assert step.query_starts is not None and lse_NH is None and softcap is None, (
            "a decode step, or rows to rank, of which blocks have none"
        )
        return self._attend(layer, q_NHD, step, step.query_starts, len(q_NHD), scale, out_NHD)

    def _attend(
        self, layer: int, q_NHD: torch.Tensor, step: AttentionMetadata, starts: torch.Tensor, most: int, scale: float | None,
        out_NHD: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        k, v = self.views[layer]
        if self._planned is None or self._planned[0] is not step:
            if out_NHD is not None:  # `cascade` has attended from the first sequences, of one query each: here they have none
                num_singles = (starts.diff() == 1).int().cumprod(0).sum()
                starts = torch.maximum(starts, num_singles.int())
            batch = fa3.Batch(
                query_starts=starts, lengths_B=step.lengths_B, max_queries=most, max_rows=self._cache.max_tokens,
                tables_BC=self._cache.tables_SC.index_select(0, step.slots_B),
            )  # fmt: skip
            self._planned = step, batch, batch.plan(q_NHD, k.shape[2], k.shape[1])
        _, batch, planned = self._planned
        if out_NHD is None:
            out_NHD = torch.empty(q_NHD.shape, dtype=q_NHD.dtype, device=q_NHD.device)
        return batch.attend(q_NHD, k, v, planned, out_NHD, scale)
