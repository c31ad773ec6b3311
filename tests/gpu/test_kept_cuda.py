"""Blocks of an ElasticBlocks in a GPU's memory that a holder owns: the next engine of the same model finds their bytes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.holder_engines import start_holder
from vmmkv.adapters.vllm.elastic.kept import KeptBlocks, Shape
from vmmkv.adapters.vllm.elastic.memory import ElasticBlocks, Run, aligned
from vmmkv.driver import open_driver
from vmmkv.holder import HolderClient
from vmmkv.units import PAGE_BYTES

NUM_BLOCKS = 12


@pytest.fixture
def path(tmp_path: Path, gpu: torch.device) -> Iterator[Path]:
    process = start_holder(tmp_path / "kv.sock", str(gpu))
    yield tmp_path / "kv.sock"
    process.kill()


class Engine:
    """An engine with blocks in these runs."""

    def __init__(self, path: Path, gpu: torch.device, runs: list[Run], identity: bytes) -> None:
        driver = open_driver(gpu)
        self.kept = KeptBlocks(driver, HolderClient(path, driver.device), identity)
        self.kept.find(Shape.of(runs, NUM_BLOCKS), NUM_BLOCKS * PAGE_BYTES)
        self.memory = ElasticBlocks(driver, runs, NUM_BLOCKS, source=self.kept)
        _, self.found = self.kept.restore(self.memory)
        self.runs = [
            self.memory.tensor()[run.offset_bytes : run.offset_bytes + NUM_BLOCKS * run.stride_bytes].view(NUM_BLOCKS, -1)
            for run in runs
        ]

    def end(self, *, kill: bool) -> None:
        """A killed engine says nothing to the holder but that its connection is closed."""
        if not kill:
            self.kept.seal_all()
            self.memory.close()
        self.kept.close()


@pytest.mark.parametrize("kill", [True, False])
@pytest.mark.parametrize("runs", [[Run(0, PAGE_BYTES)], aligned(NUM_BLOCKS, [PAGE_BYTES // 4, PAGE_BYTES // 2])])
def test_blocks_outlive_their_engine_with_their_bytes(path: Path, gpu: torch.device, runs: list[Run], kill: bool) -> None:
    first = Engine(path, gpu, runs, b"model")
    first.memory.grow(NUM_BLOCKS)
    for block in range(1, NUM_BLOCKS):
        for run in first.runs:
            run[block].fill_(block)
        first.kept.cached(block, bytes([block]) * 36, depth=block)
    first.kept.seal_written()
    torch.cuda.synchronize(gpu)
    first.kept.dropped(5)
    first.kept.seal_written()
    first.end(kill=kill)

    second = Engine(path, gpu, runs, b"model")
    assert sorted(each.block for each in second.found) == [block for block in range(1, NUM_BLOCKS) if block != 5]
    for each in second.found:
        assert each.hash == bytes([each.block]) * 36 and each.depth == each.block
        assert all(bool((run[each.block] == each.block).all()) for run in second.runs)
    second.end(kill=kill)
    third = Engine(path, gpu, runs, b"another model")
    assert not third.found
    third.end(kill=False)
