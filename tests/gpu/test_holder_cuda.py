"""A holder of a GPU's memory: what `tests/unit/test_holder.py` proves of the host's, where kernels may still run."""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.unit.holder_engines import LONG, PROMPT, PROMPTS, Engine, Process, busy_engine, start, start_holder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The socket of `holder`."""
    return tmp_path / "kv.sock"


@pytest.fixture
def holder(path: Path, gpu: torch.device) -> Iterator[Process]:
    """Of handles in the GPU's memory."""
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


def in_four_threads(kill_five: Callable[[int], None]) -> None:
    """Of 20 kills most of the time is that of processes which start; so four holders are there at once."""
    with ThreadPoolExecutor(4) as threads:
        for _ in threads.map(kill_five, range(4)):
            pass


def test_engines_killed_under_load_leave_right_rows(tmp_path, gpu):
    def kill_five(number):
        path, draw, warm = tmp_path / f"{number}.sock", random.Random(number), []
        holder = start_holder(path, str(gpu))
        try:
            for seed in range(5 * number, 5 * number + 5):
                engine = Process(busy_engine, path, seed, 60, False, str(gpu))
                warm.append(engine.get())
                assert engine.get() == "sealed"
                assert not engine.pipe.poll(draw.uniform(0.2, 1.0)), engine.pipe.recv()
                engine.kill()
            assert warm[0] == 0 and all(warm[1:]), "each one found what the one before had sealed"
            last = start(path, device=str(gpu), pages=40)
            assert last.ask("check") is None
            assert [last.ask("serve", tokens, "red")[1] for tokens in PROMPTS] == [0] * len(PROMPTS)
            assert last.ask("check") is None
            last.kill()
        finally:
            holder.kill()

    in_four_threads(kill_five)


def test_holders_killed_under_load_leave_an_engine_with_right_rows(tmp_path, gpu):
    def kill_five(number):
        for seed in range(5 * number, 5 * number + 5):
            path, draw = tmp_path / f"{seed}.sock", random.Random(seed)
            holder = start_holder(path, str(gpu))
            engine = Process(busy_engine, path, seed, 1.0, False, str(gpu))
            assert (engine.get(), engine.get()) == (0, "sealed")
            time.sleep(draw.uniform(0.1, 0.6))
            holder.kill()
            assert engine.get() == "served on", "no row was wrong, and the books are right"
            engine.kill()

    in_four_threads(kill_five)
