"""Prefill and decode apart: an engine answers over the rows that another one has computed. Two processes, real memory."""

import itertools
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import tiny_model
from tests.engine.test_llm import OPTIONS, expected
from tests.server.tiny import byte_tokenizer
from vmmkv import MIB
from vmmkv.driver import open_driver
from vmmkv.holder.process import Holder
from vmmkv_server import LLM, SamplingParams

PROMPT = [token % 251 for token in range(4500)]
"""Two pages of 2,048 tokens, and a rest."""
ONE = SamplingParams(temperature=0.0, max_tokens=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    """Of a holder."""
    path = tmp_path / "kv.sock"
    thread = threading.Thread(target=(holder := Holder(path, 64 * MIB, open_driver("cpu"), print)).run)
    thread.start()
    yield path
    holder.stop()
    thread.join()
    holder.close()


def prefill_engine(directory: Path, socket: Path, pipe: Connection, options: dict[str, Any]) -> None:
    """Computes prompts until it is killed."""
    with LLM(directory, **{**options, "kv_budget_bytes": None, "kv_holder": socket}) as one:
        while True:
            pipe.send("ready")
            one.generate([pipe.recv()], ONE)


@pytest.fixture
def prefill(request: pytest.FixtureRequest, directory: Path, socket: Path) -> Iterator[Callable[..., None]]:
    """Computes a prompt in another process, with options of its own; with `kill` it ends that one."""
    pipe, theirs = multiprocessing.Pipe()
    arguments = directory, socket, theirs, OPTIONS | getattr(request, "param", {})
    process = multiprocessing.get_context("spawn").Process(target=prefill_engine, args=arguments, daemon=True)
    process.start()
    theirs.close()
    assert pipe.recv() == "ready"

    def compute(prompt: list[int] | None = None, *, kill: bool = False) -> None:
        if prompt is not None:
            pipe.send(prompt)
            assert pipe.recv() == "ready"
        if kill:
            process.kill()
            process.join()

    yield compute
    process.kill()
    process.join()


def test_tokens_behind_a_prefill_engine_are_one_engines_also_when_it_is_killed(
    directory: Path, socket: Path, prefill: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [PROMPT, PROMPT[::-1]]
    for prompt in prompts:
        prefill(prompt)
    with LLM(directory, **{**OPTIONS, "kv_lender": socket}) as one:
        engine = one.loaded.engine
        outputs = one.generate([prompts[0], prompts[0] + [7]], GREEDY)
        assert one.snapshot is not None
        assert one.snapshot.scheduler.hit_tokens == {"lender": 4096, "device": 4500}, "it is borrowed once"
        num_steps, step = itertools.count(), engine.step

        def step_and_kill() -> None:
            if next(num_steps) == 4:
                prefill(kill=True)
            step()

        monkeypatch.setattr(engine, "step", step_and_kill)
        outputs += one.generate([prompts[1]], GREEDY)
        assert next(num_steps) > 5
        outputs += one.generate([prompts[1] + [8]], GREEDY)
        for output, prompt in zip(outputs, [prompts[0], prompts[0] + [7], prompts[1], prompts[1] + [8]], strict=True):
            assert output.outputs[0].token_ids == expected(directory, prompt)
            assert output.cached_tokens >= 4096
        engine.memory.cache.check()


@pytest.mark.nightly
def test_a_request_waits_for_room_to_borrow_rather_than_compute(
    directory: Path, socket: Path, prefill: Callable[..., None]
) -> None:
    prefill(PROMPT)
    with LLM(directory, **{**OPTIONS, "kv_budget_bytes": 8 * MIB, "kv_lender": socket}) as one:
        outputs = one.generate([[1, 2, 3], PROMPT], GREEDY)
        assert one.snapshot is not None
        assert one.snapshot.scheduler.hit_tokens["lender"] == 4096, "there was room for its three pages, and none besides"
    assert [output.outputs[0].token_ids for output in outputs] == [expected(directory, each) for each in ([1, 2, 3], PROMPT)]


@pytest.mark.nightly
def test_an_engine_of_other_weights_computes_its_prompts_and_says_so(
    socket: Path, prefill: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefill(PROMPT)
    tiny_model(seed=5, vocab_size=258).save_pretrained(tmp_path / "other")
    byte_tokenizer().save_pretrained(tmp_path / "other")
    with LLM(tmp_path / "other", **{**OPTIONS, "kv_lender": socket}) as one:
        (output,) = one.generate([PROMPT], GREEDY)
    assert (output.cached_tokens, output.outputs[0].token_ids) == (0, expected(tmp_path / "other", PROMPT))
    assert "starting cold: the engine of the holder" in caplog.text


@pytest.mark.nightly
@pytest.mark.parametrize("prefill", [{"kv_cache_dtype": "int8"}], indirect=True)
def test_quantised_rows_are_borrowed_as_they_are_and_only_by_engines_that_quantise_so(
    directory: Path, socket: Path, prefill: Callable[..., None]
) -> None:
    prompt = [token % 251 for token in range(6000)]  # a page of 5,461 tokens, and a rest
    prefill(prompt)
    found = []
    for options in ({"kv_lender": socket}, {}):
        with LLM(directory, **OPTIONS, kv_cache_dtype="int8", **options) as one:
            found += one.generate([prompt], GREEDY)
    borrowed, computed = found
    assert (borrowed.cached_tokens, computed.cached_tokens) == (5461, 0)
    assert borrowed.outputs[0].token_ids == computed.outputs[0].token_ids
    with LLM(directory, **OPTIONS, kv_cache_dtype="fp8", kv_lender=socket) as other:
        assert other.generate([prompt], GREEDY)[0].cached_tokens == 0
