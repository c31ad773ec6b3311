"""Prefixes over blocks: the same radix tree as vmmkv's. Whole blocks are shared; the rest of a match is computed again."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from bench.baselines.blocks import BLOCK_ROWS
from bench.baselines.paged import PagedCache, PagedSequence
from vmmkv.prefix import PrefixStats
from vmmkv.prefix.radix_tree import Match, Node, Piece
from vmmkv.server.engine.kv_backend import TokenIds


@dataclass(frozen=True, slots=True)
class AttachedBlocks:
    """See engine.kv.Attached."""

    sequence: PagedSequence
    num_tokens: int


class PagedPrefixes:
    """See engine.kv.Prefixes."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._tree = cache.blocks.tree
        self._counts: Counter[str] = Counter()

    def match(self, tokens: TokenIds, *, namespace: Hashable = None) -> int:
        """Rows of whole blocks."""
        return len(_whole(self._tree.match(namespace, tokens[:-1]))) * BLOCK_ROWS

    def attach(self, tokens: TokenIds, *, namespace: Hashable = None, max_tokens: int | None = None) -> AttachedBlocks:
        """See Prefixes.attach. Cost: an upload if anything is known."""
        match = self._tree.match(namespace, tokens[:-1])
        blocks = _whole(match)
        num_tokens = len(blocks) * BLOCK_ROWS
        sequence = self._cache.open(max_tokens=max_tokens, tenant=namespace)
        try:
            if blocks:
                node = self._node_to(match, num_tokens)
                self._tree.touch(node)
                self._tree.lock(node)
                self._cache.locked[sequence.slot] = node
                self._cache.attach(sequence, blocks)
        except BaseException:
            sequence.close()
            raise
        self._counts["blocks" if blocks else "compute"] += 1
        self._counts["hit"] += num_tokens
        self._counts["missed"] += len(tokens) - num_tokens
        return AttachedBlocks(sequence, num_tokens)

    def _node_to(self, match: Match[int], num_tokens: int) -> Node[int]:
        """The node whose path ends there: what lies below is not used, and can be evicted."""
        node = next(node for node in match.path if node.end >= num_tokens)
        return node if node.end == num_tokens else self._tree.split(node, num_tokens)

    def insert(self, sequence: PagedSequence, tokens: TokenIds) -> None:
        """See Prefixes.insert."""
        count = len(tokens) // BLOCK_ROWS
        if not count:
            return
        blocks = self._cache.host_tables_SC[sequence.slot, :count].tolist()
        pieces = [Piece(BLOCK_ROWS * (index + 1), block) for index, block in enumerate(blocks)]
        inserted = self._tree.insert(sequence.namespace, tokens[: count * BLOCK_ROWS], pieces)
        known = {piece.end_token for piece in inserted.duplicates}
        self._cache.blocks.hold([piece.value for piece in pieces if piece.end_token not in known])
        before = self._cache.locked.pop(sequence.slot, None)
        self._tree.lock(inserted.node)
        if before is not None:
            self._tree.unlock(before)
        self._cache.locked[sequence.slot] = inserted.node

    def park(self, sequence: PagedSequence, tokens: TokenIds) -> None:
        """See Prefixes.park: a table is worth nothing without its sequence, and its full blocks are the tree's."""
        self.release(sequence, tokens)

    def release(self, sequence: PagedSequence, tokens: TokenIds) -> None:
        """See Prefixes.release."""
        self.insert(sequence, tokens)
        sequence.close()

    def free_slots(self, count: int) -> None:
        """No ended sequence keeps its slot."""

    def evict(self) -> int:
        """Forget all that no running sequence uses; the blocks that became free."""
        before = self._cache.blocks.num_held
        while self._cache.blocks.evict_oldest():
            pass
        return before - self._cache.blocks.num_held

    def stats(self) -> PrefixStats:
        """In the words of a tree over pages. Cost: a walk over the tree."""
        counts, blocks = self._counts, self._cache.blocks
        num_held = sum(len(node.pieces) for node in self._tree.nodes())
        return PrefixStats(
            num_nodes=self._tree.num_nodes,
            num_tokens=self._tree.num_tokens,
            held_bytes=num_held * self._cache.block_bytes,
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
