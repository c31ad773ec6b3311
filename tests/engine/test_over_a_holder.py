"""Engines whose memory a holder process owns: the next one is warm, and one whose holder is gone serves with what it has."""

import dataclasses
import shutil
import threading
from pathlib import Path

import pytest

from tests.engine.conftest import Harness, MakeHarness, prompt_of, wide_rows
from tests.engine.test_llm import GREEDY, OPTIONS, answers, expected
from tests.server.fake_engine import READY
from tests.unit.holder_engines import Process, start_holder
from vmmkv import MIB
from vmmkv.driver import open_driver
from vmmkv.errors import HolderUnavailable
from vmmkv.holder.process import Holder
from vmmkv_server import LLM
from vmmkv_server.engine import loading
from vmmkv_server.engine.administration import manage
from vmmkv_server.engine.kv_backend import SlotBackend
from vmmkv_server.engine.loading import Loaded
from vmmkv_server.protocol import Sleep, Snapshot, WakeUp


def over_a_holder(harness: MakeHarness, path: Path) -> tuple[Process, Harness]:
    """A holder, and an engine whose memory it owns."""
    return start_holder(path), harness(
        wide_rows(), ours=True, share=True, max_tokens=1024, budget_pages=40,
        open_memory=lambda config: SlotBackend.open(dataclasses.replace(config, holder=str(path))),
    )  # fmt: skip


def test_an_engine_whose_holder_is_gone_says_so_and_serves_with_what_it_has(harness: MakeHarness, tmp_path: Path) -> None:
    holder, one = over_a_holder(harness, tmp_path / "kv.sock")
    prompts = [prompt_of(400, seed) for seed in range(5)]
    for prompt in prompts[:2]:
        one.said(prompt)
    assert one.engine.holder_is_gone is False
    created_bytes = one.pool.created_bytes
    holder.kill()
    for prompt in prompts * 2:
        assert one.said(prompt) == one.expected(prompt)
    one.engine.report()
    last = one.sent[-1]
    assert isinstance(last, Snapshot) and last.memory.holder_up is False
    assert one.pool.created_bytes == created_bytes and not one.failures()
    refused = manage(Loaded(one.engine, READY, one.memory), Sleep())
    assert "start a holder, and then this server anew" in str(refused.error)
    assert one.said(prompts[0]) == one.expected(prompts[0])
    one.cache.check()


def test_an_engine_whose_holder_went_while_it_slept_stays_asleep(harness: MakeHarness, tmp_path: Path) -> None:
    holder, one = over_a_holder(harness, tmp_path / "kv.sock")
    loaded = Loaded(one.engine, READY, one.memory)
    assert manage(loaded, Sleep()).error is None
    holder.kill()
    assert "start a holder, and then this server anew" in str(manage(loaded, WakeUp()).error)
    assert one.pool.budget_bytes == 0


def test_a_holder_makes_the_next_engine_warm_and_changes_no_token(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv.sock"
    holder = threading.Thread(target=(held := Holder(path, 64 * MIB, open_driver("cpu"), print)).run)
    holder.start()
    options = {**OPTIONS, "kv_budget_bytes": None, "kv_holder": path}
    prompt = [token % 251 for token in range(4500)]  # two pages of 2,048 tokens, and a rest
    with LLM(directory, **options) as one:
        first = one.generate([prompt], GREEDY)
        assert one.snapshot is not None
        assert one.snapshot.memory.kv_budget_bytes == 64 * MIB, "all that the holder may own"
    monkeypatch.setattr(loading, "PREPARE_S", 0.0)
    with LLM(directory, **options) as one:
        second = one.generate([prompt], GREEDY)
        assert one.loaded.memory.cache.stats().adopted_slots == 0
    monkeypatch.undo()
    with LLM(directory, **options) as one:
        third = one.generate([prompt], GREEDY)
        assert one.loaded.memory.cache.stats().adopted_slots == 1
    assert answers(first) == answers(second) == answers(third) == [expected(directory, prompt)]
    assert [output.cached_tokens for (output,) in (first, second, third)] == [0, 4096, 4096]
    held.stop()
    holder.join()
    held.close()


@pytest.mark.parametrize("option", ["kv_holder", "kv_lender"])
def test_a_holder_that_is_not_there_is_said_before_weights_are_read(directory: Path, tmp_path: Path, option: str) -> None:
    broken = shutil.copytree(directory, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    path = tmp_path / "kv.sock"
    with pytest.raises(HolderUnavailable, match=f"no holder answers at {path}: .*start one: vmmkv hold --socket {path}"):
        LLM(broken, device="cpu", **{option: path})
