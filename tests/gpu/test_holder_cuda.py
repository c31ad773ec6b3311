"""A holder of a GPU's memory: what `tests/unit/test_holder.py` proves of the host's, where kernels may still run."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.holder_engines import Engine, Process, busy_engine, start, start_holder

PROMPT = [7 * token % 251 for token in range(100)]
LONG = [3] * 330
"""More than a large extent."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.sock"


@pytest.fixture
def holder(path: Path, gpu: torch.device) -> Iterator[Process]:
    process = start_holder(path, str(gpu))
    yield process
    process.kill()


def test_prefixes_outlive_an_engine_that_is_killed_in_the_midst_of_a_kernel(path, holder, gpu):
    first = start(path, device=str(gpu))
    assert first.ask("serve", PROMPT) == (0, 0)
    assert first.ask("serve", LONG, "red") == (0, 0)
    first.ask("settle")
    assert first.ask("check") is None
    first.ask("spin")
    first.kill()
    for _ in range(2):  # handles can be exported to one engine after the other
        engine = start(path, device=str(gpu))
        assert engine.ask("check") is None
        assert engine.ask("serve", [*PROMPT, 1]) == (96, 0)
        assert engine.ask("serve", [*LONG, 1], "red") == (320, 0)
        assert engine.ask("check") is None
        engine.kill()


def test_no_byte_of_an_earlier_engine_reaches_another_tenant(path, holder, gpu):
    first = start(path, device=str(gpu))
    first.ask("serve", PROMPT, "red")
    first.ask("settle")
    first.kill()
    engine = Engine(path, device=str(gpu), pages=16)
    assert engine.serve([*PROMPT, 1], "red") == (96, 0)
    engine.prefix.evict()
    with engine.cache.open(tenant="green") as sequence:
        sequence.grow(15 * 16)
        assert not any(sequence.view(layer, plane).any() for layer in range(4) for plane in "kv")
    engine.close()


def test_engines_killed_under_load_leave_right_rows(path, holder, gpu):
    draw, warm = random.Random(0), []
    for seed in range(20):
        engine = Process(busy_engine, path, seed, 60, False, str(gpu))
        warm.append(engine.get())
        assert not engine.pipe.poll(draw.uniform(0.2, 1.0)), engine.pipe.recv()
        engine.kill()
    assert all(warm[1:])


def test_an_engine_whose_holder_is_killed_keeps_what_it_has(path, gpu):
    for seed in range(20):
        holder = start_holder(path, str(gpu))
        engine = Process(busy_engine, path, seed, 1.0, False, str(gpu))
        assert engine.get() == 0
        holder.kill()
        assert engine.get() in ("gone", "served on")
        engine.kill()
