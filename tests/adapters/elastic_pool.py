"""python elastic_pool.py SEED: vLLM's own pool of blocks over elastic memory, under random use. Needs vLLM, and no model.

Blocks that are handed out are written: without memory that would end the process.
"""

import random
import sys
from types import SimpleNamespace

from vmmkv.adapters.vllm.elastic.memory import ElasticBlocks, aligned
from vmmkv.adapters.vllm.elastic.pool import ElasticBlockPool
from vmmkv.driver import open_driver
from vmmkv.units import PAGE_BYTES

STRIDES = ([PAGE_BYTES // 8], [PAGE_BYTES // 4, PAGE_BYTES // 2], [PAGE_BYTES])


def walk(chance: random.Random) -> None:
    strides, num_blocks = chance.choice(STRIDES), chance.randint(2, 60)
    runs = aligned(num_blocks, strides)
    memory = ElasticBlocks(open_driver("cpu"), runs, num_blocks)
    pool = ElasticBlockPool(memory, num_blocks, enable_caching=True, hash_block_size=16)
    tensor, requests, hashes = memory.tensor(), list[list](), 0
    for _ in range(300):
        action = chance.random()
        if action < 0.4:
            wanted = chance.randint(1, 12)
            pool.prepare(wanted)
            if wanted <= pool.get_num_free_blocks():
                requests.append(blocks := pool.get_new_blocks(wanted))
                for block in blocks:
                    for run in runs:
                        tensor[run.offset_bytes + block.block_id * run.stride_bytes :][: run.stride_bytes] = 1
                    if chance.random() < 0.5:
                        hashes += 1
                        request = SimpleNamespace(block_hashes=[hashes.to_bytes(32, "big")])
                        pool.cache_full_blocks(request, [block], 0, 1, block_size=16, kv_cache_group_id=0)
        elif action < 0.65 and requests:
            pool.free_blocks(reversed(requests.pop(chance.randrange(len(requests)))))
        elif action < 0.75:
            cached = [block for block in pool.blocks if block.block_hash is not None]
            found = chance.sample(cached, min(len(cached), chance.randint(1, 4)))
            pool.touch(found)
            requests.append(found)
        elif action < 0.85:
            memory.set_budget(chance.randint(1, memory.num_groups) * memory.group_bytes)
        else:
            pool.settle()
        used = {block.block_id for blocks in requests for block in blocks}
        queued = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
        mapped = {block for block in range(1, num_blocks) if memory.may_hand_out(block)}
        assert queued == mapped - used and len(queued) == pool.free_block_queue.num_free_blocks
        assert all(block.block_id in used or memory.may_hand_out(block.block_id) for block in pool.blocks if block.block_hash)
        assert sum(memory.num_in_use(group) for group in range(memory.num_groups)) == len(used) + 1
        assert pool.get_num_free_blocks() <= num_blocks - 1 - len(used)
    assert pool.reset_prefix_cache() is not bool([block for blocks in requests for block in blocks])
    for blocks in requests:
        pool.free_blocks(blocks)
    pool.settle()
    assert memory.state().mapped_bytes <= memory.state().budget_bytes and pool.reset_prefix_cache()
    memory.close()


if __name__ == "__main__":
    for seed in range(int(sys.argv[1]), int(sys.argv[1]) + 60):
        walk(random.Random(seed))
    print("60 walks")
