"""Prefill and decode apart: an engine answers over the rows that another one has computed. Two processes, real memory."""

import multiprocessing
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.engine.conftest import tiny_model
from tests.engine.test_llm import OPTIONS, expected
from tests.server.tiny import byte_tokenizer
from vmmkv import MIB
from vmmkv.driver import open_driver
from vmmkv.holder.process import Holder
from vmmkv.server import LLM, SamplingParams

PROMPT = [token % 251 for token in range(4500)]
"""Two pages of 2,048 tokens, and a rest."""
ONE = SamplingParams(temperature=0.0, max_tokens=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(vocab_size=258).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


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


def prefill_engine(directory: Path, socket: Path, pipe: Connection) -> None:
    """Computes prompts until it is killed."""
    with LLM(directory, **{**OPTIONS, "kv_budget_bytes": None, "kv_holder": socket}) as one:
        while True:
            pipe.send("ready")
            one.generate([pipe.recv()], ONE)


def test_it(directory: Path, socket: Path) -> None:
    pipe, theirs = multiprocessing.Pipe()
    prefill = multiprocessing.get_context("spawn").Process(target=prefill_engine, args=(directory, socket, theirs), daemon=True)
    prefill.start()
    assert pipe.recv() == "ready"
    pipe.send(PROMPT)
    assert pipe.recv() == "ready"
    with LLM(directory, **{**OPTIONS, "kv_lender": socket}) as one:
        (output,) = one.generate([PROMPT], GREEDY)
        print(output.cached_tokens, one.snapshot)
        assert output.outputs[0].token_ids == expected(directory, PROMPT)
        assert output.cached_tokens == 4096
        one._open().engine.cache.check()
    prefill.kill()
