"""Blocks of another engine, stored in tiers and loaded again, on a GPU: layers side by side, and layers apart."""

import pytest
import torch

from vmmkv import KeyChain
from vmmkv.adapters.vllm.blocks import BlockMemory, BlockMover
from vmmkv.adapters.vllm.schedule import PlannedLoad, StepPlan
from vmmkv.tiers import HostTier, Store

NUM_BLOCKS, LAYERS = 6, 4

LAYOUTS = {
    "layers side by side": lambda: [torch.empty(NUM_BLOCKS, LAYERS, 2, 16, 4, 64, dtype=torch.bfloat16, device="cuda")],
    "layers apart": lambda: [torch.empty(NUM_BLOCKS, 2, 16, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)],
    "keys and values apart": lambda: [
        torch.empty(2, NUM_BLOCKS, 16, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)
    ],
    "layers of two sizes": lambda: [
        torch.empty(NUM_BLOCKS, 16, width, dtype=torch.float16, device="cuda") for width in (128, 256, 128)
    ],
}


def blocks_of(tensor):
    return tensor.movedim(tensor.shape.index(NUM_BLOCKS), 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_stored_from_some_blocks_is_loaded_into_others_and_no_more(layout):
    tensors = LAYOUTS[layout]()
    for tensor in tensors:
        tensor.normal_()
    memory = BlockMemory(tensors, NUM_BLOCKS)
    tier = HostTier(64 << 20, record_bytes=2 * memory.block_bytes)
    keys = KeyChain("model", every=1).of([1, 2]).keys()
    before = [blocks_of(tensor).clone() for tensor in tensors]
    with Store([tier], "cuda") as store:
        mover = BlockMover(store, memory)
        mover.after_step(StepPlan(stores=[(keys[1], [2, 3])]))
        assert store.flush(10)
        mover.after_step(StepPlan(stores=[(keys[0], [0, 5]), (keys[1], [2, 3])]))  # of which it has one
        assert store.flush(10)
        for tensor in tensors:
            blocks_of(tensor)[[1, 4]] = 0
        mover.begin(StepPlan(loads=[PlannedLoad("request", [(keys[0], [4, -1]), (keys[1], [-1, 1])], 9.0)]))
        assert store.flush(10)
        assert mover.ended_loads() == ({"request"}, {})
    tier.close()
    for tensor, old in zip(tensors, before, strict=True):
        old[4], old[1] = old[0], old[3]
        assert torch.equal(blocks_of(tensor), old)


@pytest.mark.parametrize("words", [2, 1030, 4096])
def test_blocks_are_gathered_and_scattered(words):
    from vmmkv_kernels.gather import gather_blocks, scatter_blocks

    tensors = [torch.randint(1 << 60, (2, 7, words), device="cuda") for _ in range(3)]
    runs = torch.tensor([half.data_ptr() for tensor in tensors for half in tensor], device="cuda")
    strides, piece = torch.full_like(runs, 8 * words), torch.zeros(3, 6, words, dtype=torch.int64, device="cuda")
    gather_blocks(runs, strides, torch.tensor([3, -1, 6], device="cuda"), piece)
    assert torch.equal(piece[0], torch.cat([tensor[:, 3] for tensor in tensors])) and not piece[1].any()
    scatter_blocks(runs, strides, torch.tensor([1, -1, 0], device="cuda"), piece)
    assert all(torch.equal(tensor[:, [1, 0]], tensor[:, [3, 6]]) for tensor in tensors)
