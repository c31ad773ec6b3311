"""ElasticBlockPool: vLLM's BlockPool over ElasticBlocks: it maps blocks before it hands them out.

Free blocks that have memory, and are to keep it, stand in vLLM's free queue; no others do. Of blocks that vLLM wants, those
come first that are free and cache nothing, then new memory, and then those that cache a prefix.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from vllm.v1.core.block_pool import BlockPool

from vmmkv.adapters.vllm.elastic.kept import KeptBlock
from vmmkv.adapters.vllm.elastic.memory import ElasticBlocks

log = logging.getLogger("vllm.vmmkv")


class ElasticBlockPool(BlockPool):  # type: ignore[misc]
    """The pool of an engine's only KV cache. `memory.lock` is held in each call, and by the engine in each step."""

    def __init__(self, memory: ElasticBlocks, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        assert len(self.blocks) == memory.num_blocks, "the scheduler and the worker have the same blocks"
        self.memory: Final = memory
        self._counts_all = False
        """Is every block that is not in use free, mapped or not?"""
        self.on_short: Callable[[int, bool], None] = lambda num_blocks, is_running: None
        """Called with the number of blocks that are missing, before vLLM is told so; are they for a running request?"""
        self.on_evicting: Callable[[], None] = lambda: None
        """Called when prefixes are to be evicted for want of memory."""
        self.on_cached: Callable[[int, bytes, int], None] = lambda block, hash_, depth: None
        """Called with a block that caches a prefix from now on, vLLM's hash, and the number of blocks up to its end."""
        self.on_dropped: Callable[[int], None] = lambda block: None
        """Called with a block that is to cache nothing from now on, before it can be handed out."""
        for block in self.blocks[1:]:
            if not memory.may_hand_out(block.block_id):
                self.free_block_queue.remove(block)
        memory.take([self.null_block.block_id])

    def prepare(self, num_blocks: int, num_found: int = 0, *, is_running: bool = True) -> None:
        """Map memory for blocks that are wanted next, as far as the budget and the device let.

        `num_found`: free blocks that cache what is wanted, and will be taken besides. `is_running`: for a request that runs?
        """
        with self.memory.lock:
            if self._grow(num_blocks):
                return
            missing = num_blocks + num_found - self.free_block_queue.num_free_blocks
            if missing > 0:
                self.on_short(missing, is_running)
                self._grow(num_blocks)
            else:
                self.on_evicting()

    def adopt(self, numbers: Iterable[int], kept: Iterable[KeptBlock]) -> None:
        """Take in free blocks of groups that were mapped with what an earlier engine has left; `kept` ones cache a prefix.

        Of these the ends of prefixes are handed out first.
        """
        with self.memory.lock:
            cached = {each.block: each for each in kept}
            added = [each for each in numbers if each not in cached and self.memory.group_of(each)]
            self.free_block_queue.prepend_n([self.blocks[each] for each in added])
            for each in sorted(cached.values(), key=lambda each: -each.depth):
                block = self.blocks[each.block]
                if not self.memory.group_of(each.block):
                    self.free_block_queue.remove(block)  # those of group 0 are there from the beginning
                self._insert_block_hash(each.hash, block, num_tokens=each.depth * self.hash_block_size)
                self.free_block_queue.append(block)

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Hand out blocks that have memory. Raises: ValueError if there are too few. See BlockPool."""
        with self.memory.lock:
            self.prepare(num_blocks)
            blocks: list[Any] = super().get_new_blocks(num_blocks)
            self.memory.take([block.block_id for block in blocks])
            return blocks

    def touch(self, blocks: Sequence[Any]) -> None:
        """Take cached blocks out of the queue. See BlockPool."""
        with self.memory.lock:
            free = {block.block_id for block in blocks if block.ref_cnt == 0 and not block.is_null}
            super().touch(blocks)
            self.memory.take(free)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Put blocks back into the queue, except those that are to lose their memory. See BlockPool."""
        with self.memory.lock:
            ordered = list(ordered_blocks)
            super().free_blocks(ordered)
            free = {block.block_id: block for block in ordered if block.ref_cnt == 0 and not block.is_null}
            self.memory.give(free)
            if self.memory.is_leaving:
                self._withdraw(block for number, block in free.items() if not self.memory.may_hand_out(number))

    def get_num_free_blocks(self) -> int:
        """Count the blocks that can be handed out under the budget. See BlockPool."""
        with self.memory.lock:
            if self._counts_all:
                return sum(block.ref_cnt == 0 for block in self.blocks[1:])
            return int(self.free_block_queue.num_free_blocks) + self.memory.num_growable

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache if no block is in use, which BlockPool concludes from the number of free ones."""
        with self.memory.lock:
            self._counts_all = True
            try:
                is_reset = bool(super().reset_prefix_cache())
                for block in self.blocks if is_reset else ():
                    self.on_dropped(block.block_id)
                return is_reset
            finally:
                self._counts_all = False

    def settle(self) -> None:
        """Bring the memory nearer to its budget: withdraw blocks that are to go, or take them back, and unmap what can go."""
        with self.memory.lock:
            leaving, back = self.memory.settle(self._num_cached)
            for group in leaving:
                self._withdraw(block for block in self._blocks_of(group) if block.ref_cnt == 0)
            for group in back:
                self.free_block_queue.prepend_n([block for block in self._blocks_of(group) if block.ref_cnt == 0])
            if self.memory.is_leaving:
                self.memory.reclaim()

    def _insert_block_hash(self, block_hash_with_group_id: Any, block: Any, num_tokens: int | None) -> None:
        super()._insert_block_hash(block_hash_with_group_id, block, num_tokens=num_tokens)
        if block.block_hash == block_hash_with_group_id and num_tokens:
            self.on_cached(block.block_id, bytes(block_hash_with_group_id), num_tokens // self.hash_block_size)

    def _remove_cached_block_hashes(self, block: Any) -> list[Any]:
        self.on_dropped(block.block_id)
        return super()._remove_cached_block_hashes(block)  # type: ignore[no-any-return]

    def _blocks_of(self, group: int) -> list[Any]:
        numbers = self.memory.blocks_in(group)
        return self.blocks[numbers.start : numbers.stop]  # type: ignore[no-any-return]

    def _num_cached(self, group: int) -> int:
        return sum(block.block_hash is not None for block in self._blocks_of(group))

    def _num_fresh(self, most: int) -> int:
        """Blocks that are free and cache nothing, up to `most`: they stand first in the queue."""
        block, count = self.free_block_queue.fake_free_list_head.next_free_block, 0
        while count < most and block is not self.free_block_queue.fake_free_list_tail and block.block_hash is None:
            block, count = block.next_free_block, count + 1
        return count

    def _grow(self, num_blocks: int) -> bool:
        """Map memory until so many free blocks cache nothing. Are there so many?"""
        missing = num_blocks - self._num_fresh(num_blocks)
        if missing > 0:
            added = self.memory.grow(missing)
            self.free_block_queue.prepend_n([self.blocks[number] for number in added])
            missing -= len(added)
        return missing <= 0

    def _withdraw(self, blocks: Iterable[Any]) -> None:
        """Take free blocks out of the queue, and the prefixes that they cache out of the cache."""
        for block in blocks:
            self.free_block_queue.remove(block)
            self._maybe_evict_cached_block(block)
