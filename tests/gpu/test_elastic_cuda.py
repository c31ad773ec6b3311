"""Blocks that come and go under a running device: fences, graphs that are replayed over them, and zeroes."""

import pytest
import torch

from vmmkv.adapters.vllm.elastic.memory import ElasticBlocks, aligned
from vmmkv.units import PAGE_BYTES

NUM_BLOCKS = 64
LAYOUTS = {"layers side by side": [PAGE_BYTES], "layers apart": [PAGE_BYTES // 8] * 4}


@pytest.fixture(params=LAYOUTS)
def runs(request):
    return aligned(NUM_BLOCKS, LAYOUTS[request.param])


@pytest.fixture
def memory(runs, driver):
    memory = ElasticBlocks(driver, runs, NUM_BLOCKS)
    memory.take([0])
    memory.streams.add(torch.cuda.current_stream())
    yield memory
    torch.cuda.synchronize()
    memory.close()


@pytest.fixture
def layers(memory, runs):
    """Each layer's blocks: int8 [block, bytes]."""
    tensor = memory.tensor()
    return [tensor[run.offset_bytes :][: NUM_BLOCKS * run.stride_bytes].view(NUM_BLOCKS, run.stride_bytes) for run in runs]


def trim(memory):
    """Give up all groups but the null block's, waiting for nothing; return how often it took."""
    memory.set_budget(memory.group_bytes)
    memory.settle()
    tries = 1
    while memory.is_leaving:
        memory.reclaim()
        tries += 1
    memory.set_budget(memory.reserved_bytes)
    return tries


def test_memory_that_comes_is_zeroed_before_the_next_kernel(memory, layers):
    for _ in range(5):
        added = memory.grow(NUM_BLOCKS)
        for layer in layers:
            assert layer[added].count_nonzero() == 0
            layer[added] = 7
        trim(memory)


def test_memory_goes_behind_the_kernels_that_were_launched(memory, layers):
    added = memory.grow(NUM_BLOCKS)
    memory.take(added)
    blocks = torch.tensor(added, device="cuda")  # made here: an index of the host's is waited for
    square = torch.randn(8192, 8192, device="cuda")
    for layer in layers:  # a kernel that is loaded waits for those that run
        layer.index_fill_(0, blocks, 2)
        layer.index_select(0, blocks).sum(dtype=torch.int64)
    for _ in range(20):  # some 0.4 s
        square = square @ square
    for layer in layers:
        layer.index_fill_(0, blocks, 3)
    totals = [layer.index_select(0, blocks).sum(dtype=torch.int64) for layer in layers]
    memory.give(added)
    assert trim(memory) > 2, "the kernels were waited for"
    for layer, total in zip(layers, totals, strict=True):
        assert total == 3 * len(added) * layer.shape[1]


def test_a_graph_is_replayed_over_a_group_that_was_trimmed_and_regrown(memory, layers):
    chosen = torch.zeros(4, dtype=torch.int64, device="cuda")
    total = torch.zeros((), dtype=torch.int64, device="cuda")

    def step():
        for layer in layers:
            rows = layer[chosen]
            layer.index_copy_(0, chosen, rows + 1)
            total.add_(rows.sum(dtype=torch.int64))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    memory.streams.add(stream)
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            step()
        row_bytes = sum(layer.shape[1] for layer in layers)
        for _ in range(3):
            added = memory.grow(NUM_BLOCKS)
            memory.take(added)
            chosen.copy_(torch.tensor(added[-4:], device="cuda"))
            total.zero_()
            for _ in range(4):
                graph.replay()
            memory.give(added)
            trim(memory)
            assert total == 4 * row_bytes * (0 + 1 + 2 + 3)


def test_warm_ups_write_anywhere_and_leave_nothing(memory, layers):
    with memory.scratch():
        memory.tensor().fill_(1)
    added = memory.grow(NUM_BLOCKS)
    assert all(layer[added].count_nonzero() == 0 for layer in layers)


def test_a_device_that_is_full_gives_fewer_blocks(driver):
    free_bytes = driver.memory().free_bytes
    other = driver.create((free_bytes - 64 * PAGE_BYTES) // PAGE_BYTES * PAGE_BYTES)
    memory = ElasticBlocks(driver, aligned(4096, [PAGE_BYTES]), 4096)
    added = memory.grow(4095)
    assert 0 < len(added) < 4095 and memory.failure is not None and memory.num_growable == 0
    memory.close()
    driver.release(other)
