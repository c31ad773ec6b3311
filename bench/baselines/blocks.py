"""Blocks of 16 rows with reference counts, and the radix tree over them: what vLLM and SGLang keep rows in."""

import itertools
from typing import Final

import numpy as np

from vmmkv.errors import OutOfPages
from vmmkv.prefix.radix_tree import RadixTree

BLOCK_ROWS: Final = 16
"""vLLM's default."""


class BlockPool:
    """Which block is whose: free, or held by tables and the tree. `num_refs[b]` is how many hold it."""

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
        """Blocks that somebody holds."""
        return len(self.num_refs) - len(self._free)

    def acquire(self, count: int) -> list[int]:
        """Blocks with one reference each. What was used least recently leaves the tree if too few are free.

        Raises: OutOfPages; then nothing has changed.
        """
        if len(self._free) < count:
            missing, could_go = count - len(self._free), 0
            for node in self.tree.evictable():
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
        """Have the leaf that was used least recently leave the tree; False if there is none that may."""
        leaf = self.tree.oldest_evictable()
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
            assert self.num_refs[block] > 0, f"block {block} is released and nobody holds it"
            self.num_refs[block] -= 1
            if not self.num_refs[block]:
                self._free.append(block)

    def check(self) -> None:
        """Recount: a block is free once, or held."""
        free = np.array(self._free, np.int64)
        assert len(np.unique(free)) == len(free), "a block is free twice"
        assert not self.num_refs[free].any() and np.count_nonzero(self.num_refs) == self.num_held
