"""Prefill and decode apart on GPUs: an engine reads rows in another one's memory, on the same GPU or over NVLink."""

import multiprocessing
import random
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import tiny_model
from tests.engine.test_apart import GREEDY, PROMPT, prefill_engine
from tests.gpu.test_holder_cuda import holder, path
from tests.server.tiny import byte_tokenizer
from tests.unit.holder_engines import LONG, Engine, Process, busy_engine, start, start_holder, until, write, wrong_rows
from vmmkv import MIB
from vmmkv_server import LLM

__all__ = ["holder", "path"]


@pytest.fixture
def owner(path: Path, holder: Process, gpu: torch.device) -> Iterator[Process]:
    process = start(path, device=str(gpu))
    process.ask("serve", LONG)
    process.ask("settle")
    yield process
    process.kill()


@pytest.fixture(params=[0, 1])
def device(request: pytest.FixtureRequest, gpu: torch.device) -> torch.device:
    """Of the borrower: the owner's, or a second one."""
    if request.param and torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    other = torch.device("cuda", (gpu.index or 0) + request.param)
    if request.param and not torch.cuda.can_device_access_peer(other, gpu):
        pytest.skip("the second GPU cannot read the first one's memory")
    return other


@pytest.fixture
def borrower(path: Path, owner: Process, device: torch.device) -> Iterator[Engine]:
    with torch.cuda.device(device):
        engine = Engine(path, device=str(device), borrows=True)
        yield engine
        engine.settle()
        engine.cache.check()
        engine.close()


def test_borrowed_rows_are_right_and_take_no_memory_and_no_copy(borrower):
    copies, copy = [], borrower.pool.driver.copy
    borrower.pool.driver.copy = lambda *arguments, **options: copies.append(1) or copy(*arguments, **options)
    assert borrower.prefix.borrow([*LONG[:320], 1]).num_tokens == 320
    sequence = borrower.prefix.attach([*LONG[:320], 1]).sequence
    calls = borrower.pool.driver.calls
    assert calls["create"] == 1 and calls["import_fd"] > 0, "the null page is its own"
    assert not copies
    assert not wrong_rows(sequence, None, LONG, 320)
    sequence.close()


def test_rows_stay_right_while_their_owner_evicts_writes_others_and_is_killed_in_a_kernel(path, owner, borrower, gpu):
    borrower.prefix.borrow([*LONG, 1])
    attached = borrower.prefix.attach([*LONG, 1])
    sequence, num_tokens = attached.sequence, attached.num_tokens
    assert num_tokens >= 320
    owner.ask("give_up")
    for seed in range(4):
        owner.ask("serve", [seed] * 100, "red")
    assert not wrong_rows(sequence, None, LONG, num_tokens)
    owner.ask("spin")
    owner.kill()
    assert not wrong_rows(sequence, None, LONG, num_tokens)
    write(sequence, None, [*LONG, 1, 2], num_tokens)
    assert not wrong_rows(sequence, None, [*LONG, 1, 2], len(LONG) + 2)
    following = start(path, device=str(gpu))
    following.ask("serve", [9] * 100)
    following.ask("settle")
    assert borrower.serve([*[9] * 100, 1]) == (96, 0)
    assert not wrong_rows(sequence, None, LONG, num_tokens)
    sequence.close()
    following.kill()


def test_an_owner_gets_its_memory_back_when_a_borrower_is_killed_in_a_kernel(path, owner, gpu, device):
    borrower = start(path, device=str(device), borrows=True)
    assert borrower.ask("serve", [*LONG, 1])[0] >= 320
    borrower.ask("spin")
    owner.ask("give_up")
    full = [5] * 480
    assert "OutOfPages" in owner.ask("serve", full), "30 pages of 48, of which the borrower has 20"
    borrower.kill()
    until(lambda: owner.ask("serve", full) == (0, 0))
    assert owner.ask("check") is None


def test_a_write_to_borrowed_rows_is_an_error(path, owner, device):
    assert "CUDA error" in Process(write_borrowed, path, str(device)).get()


def write_borrowed(path: Path, pipe: Connection, device: str) -> None:
    engine = Engine(path, device=device, borrows=True)
    engine.prefix.borrow([*LONG, 1])
    sequence = engine.prefix.attach([*LONG, 1]).sequence
    try:
        sequence.k(0)[:1] = 1.0
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        pipe.send(str(error))
    else:
        pipe.send("written")


def test_engines_killed_under_load_leave_each_other_right_rows(path, holder, gpu, device):
    draw, busy = random.Random(0), {}
    for number in range(8):
        for borrows, where in ((False, gpu), (True, device)):
            if borrows not in busy:
                busy[borrows] = Process(busy_engine, path, number, 600.0, False, str(where), borrows)
                busy[borrows].get()
                assert busy[borrows].get() == "sealed"
        time.sleep(draw.uniform(0.2, 1.0))
        for process in busy.values():
            assert not process.pipe.poll(), process.pipe.recv()
        busy.pop(bool(draw.getrandbits(1))).kill()
    for process in busy.values():
        process.kill()


def test_tokens_behind_a_prefill_engine_are_one_engines(tmp_path, path, gpu, device):
    tiny_model(vocab_size=258).save_pretrained(tmp_path / "tiny")
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "kv_budget_bytes": 64 * MIB, "dtype": "float32"}
    holder = start_holder(path, str(gpu))
    pipe, theirs = multiprocessing.Pipe()
    arguments = tmp_path / "tiny", path, theirs, {**options, "device": str(gpu)}
    prefill = multiprocessing.get_context("spawn").Process(target=prefill_engine, args=arguments, daemon=True)
    prefill.start()
    theirs.close()
    assert pipe.recv() == "ready"
    pipe.send(PROMPT)
    assert pipe.recv() == "ready"
    with LLM(tmp_path / "tiny", device=str(device), **options) as one:
        one.generate([PROMPT[:4096]], GREEDY)
        (expected,) = one.generate([PROMPT], GREEDY)  # over rows that were there, as the other one's will be
    with LLM(tmp_path / "tiny", device=str(device), kv_lender=path, **options) as one:
        (output,) = one.generate([PROMPT], GREEDY)
        assert output.cached_tokens == 4096
        prefill.kill()
        (again,) = one.generate([PROMPT[:-7]], GREEDY)
        assert again.cached_tokens >= 4096
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    holder.kill()
