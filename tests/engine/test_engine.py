"""Requests come, wait, run, fail and leave; memory follows them, and each is answered once."""

import gc
import itertools
import re
import time
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.engine.conftest import MakeHarness, prompt_of, tiny_model, windowed
from vmmkv import MIB, BudgetError, DriverError, KVLayout, Pool
from vmmkv_server import LLM
from vmmkv_server.engine import kv_backend, loading
from vmmkv_server.engine.engine import Engine
from vmmkv_server.engine.errors import EngineDied
from vmmkv_server.engine.request import RequestTable
from vmmkv_server.engine.step import Readback
from vmmkv_server.protocol import Abort, Snapshot
from vmmkv_server.statistics import AnswerStatistics

REFUSED = Mock(side_effect=DriverError("not now", call="map", code="TEST"))
"""A driver's call that fails."""


def test_memory_follows_the_tokens_and_comes_back(harness: MakeHarness) -> None:
    one = harness(step_tokens=4096)
    one.ask("a", prompt_of(4000), 4)
    one.engine.step()
    assert one.cache.stats().mapped_bytes == 2 * 2**21
    assert one.cache.stats().num_tokens == 4000
    one.run()
    last = [message for message in one.sent if isinstance(message, Snapshot)][-1]
    assert (last.scheduler.requests_running, last.scheduler.requests_waiting) == (0, 0)
    assert (last.memory.kv_mapped_bytes, last.memory.kv_pending_reclaim_bytes) == (0, 0)
    assert last.answers == AnswerStatistics(prompt_tokens=4000, generation_tokens=4)


def test_of_many_at_once_the_first_begin_before_all_have_memory(harness: MakeHarness) -> None:
    one = harness(slots=40)
    for index in range(40):
        one.ask(str(index), prompt_of(5, index), 8)
    running = []
    for _ in range(3):
        one.engine.step()
        running.append(one.engine.num_running)
    assert running == [16, 32, 40]
    one.run()
    for index in range(40):
        assert one.tokens(str(index)) == one.expected(prompt_of(5, index), 8)


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("part", ["forward", "wait"])
def test_a_step_that_fails_ends_its_requests_only(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, part: str, lookahead: int
) -> None:
    """As it is launched, or as it is read."""
    one = harness(slots=2, lookahead=lookahead, step_tokens=8)
    for index, name in enumerate("abcd"):
        one.ask(name, prompt_of(5 + index), 12)
    owner: Any = one.runner if part == "forward" else Readback
    real, calls = getattr(owner, part), itertools.count(1)

    def failing(*args: Any) -> Any:
        if next(calls) == 5:
            raise RuntimeError("out of luck")
        return real(*args)

    monkeypatch.setattr(owner, part, failing)
    one.run()
    assert one.failures().keys() == {"a", "b"} and "out of luck" in one.failures()["a"]
    for index, name in enumerate("abcd"):
        wanted = one.expected(prompt_of(5 + index), 12)
        assert one.tokens(name) == (wanted if name in "cd" else wanted[: len(one.tokens(name))])
        assert one.finish_reasons(name).count("length") == (name in "cd")


def test_a_driver_that_fails_does_not_end_the_engine(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    one = harness()
    one.ask("a", prompt_of(5))
    with monkeypatch.context() as patch:
        patch.setattr(one.pool.driver, "map", REFUSED)
        one.run()
    assert one.failures().keys() == {"a"}
    assert one.said(prompt_of(5)) == one.expected(prompt_of(5))


def test_finish_reasons(harness: MakeHarness) -> None:
    one = harness()
    free = one.expected(prompt_of(5), 8)
    stop = next(token for token in free if free.index(token) > 1)
    ended = harness(eos_ids=frozenset([stop]))
    ended.ask("eos", prompt_of(5), logprobs=0)
    ended.ask("ignored", prompt_of(5), ignore_eos=True)
    ended.ask("stop id", prompt_of(5), ignore_eos=True, stop_token_ids=[stop])
    ended.run()
    before = free[: free.index(stop)]
    assert ended.tokens("eos") == before and ended.finish_reasons("eos")[-1] == "stop"
    assert ended.tokens("ignored") == free and ended.finish_reasons("ignored")[-1] == "length"
    assert ended.tokens("stop id") == before and ended.finish_reasons("stop id")[-1] == "stop"
    assert all(reason is None for reason in ended.finish_reasons("eos")[:-1])
    assert len(ended.logprobs("eos")) == len(before) + 1, "the end token has one, though it is not sent"


@pytest.mark.parametrize("after", [0, 5])
def test_logits_that_are_no_numbers_fail_their_request_alone(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    one = harness()
    one.ask("good", prompt_of(5))
    one.ask("bad", prompt_of(6))
    one.step(after)
    if after:
        bad = one.engine.scheduler.find("bad")
        assert bad is not None
        one.poison(bad.memory, 5)
    else:
        forward = one.runner.model.forward

        def spoiling(ids_N: Any, step: Any, last_B: Any) -> Any:
            logits_BV = forward(ids_N, step, last_B)
            if step.query_starts is not None:
                logits_BV[step.query_starts.diff() == 6] = float("nan")
            return logits_BV

        monkeypatch.setattr(one.runner.model, "forward", spoiling)
    one.run()
    assert one.failures().keys() == {"bad"} and "not numbers" in one.failures()["bad"]
    assert one.tokens("good") == one.expected(prompt_of(5))
    assert one.tokens("bad") == one.expected(prompt_of(6))[:after], "of the steps before, and NOT_A_NUMBER is no token"


def test_a_lost_context_ends_the_engine_before_the_device_is_touched_again(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = harness()
    one.ask("a", prompt_of(5))
    lost = Mock(side_effect=RuntimeError("an illegal memory access was encountered"))
    with monkeypatch.context() as patch:
        patch.setattr(one.runner, "forward", lost)
        patch.setattr(one.memory, "device", torch.device("cuda"))
        patch.setattr(one.runner, "settle", lost)
        patch.setattr(one.engine.scheduler, "finish", lost)
        with pytest.raises(EngineDied, match="context is lost: an illegal"):
            one.engine.step()


def test_a_failure_to_map_ahead_fails_no_request(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    one = harness()
    with monkeypatch.context() as patch:
        patch.setattr(one.cache, "map_ahead", REFUSED)
        assert one.said(prompt_of(5)) == one.expected(prompt_of(5))


def test_log_probabilities_are_the_models_own_and_only_if_asked(harness: MakeHarness) -> None:
    one = harness(step_tokens=6)
    one.ask("greedy", prompt_of(9), 5, logprobs=0)
    one.ask("beside", prompt_of(4), 5)
    one.ask("sampled", prompt_of(7, 1), 5, temperature=0.7, top_p=0.8, seed=3, logprobs=0)
    one.run()
    assert one.logprobs("beside") == []
    for name, prompt in (("greedy", prompt_of(9)), ("sampled", prompt_of(7, 1))):
        tokens = one.tokens(name)
        with torch.inference_mode(), one.by_transformers():
            logits_TV = one.model(torch.tensor([prompt + tokens])).logits[0]
        all_TV = torch.log_softmax(logits_TV[len(prompt) - 1 : -1], dim=-1)
        wanted = [float(row[token]) for row, token in zip(all_TV, tokens, strict=True)]
        assert one.logprobs(name) == pytest.approx(wanted, abs=1e-5)


PENALTIES = {"frequency_penalty": 1.5, "presence_penalty": 0.5}


def test_one_that_cannot_begin_changes_no_other_of_its_step(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, dict[str, Any]] = {
        "plain": {"temperature": 1.0, "seed": 3},
        "bad": PENALTIES,
        "last": {"temperature": 0.7, "top_k": 5, "seed": 4},
        "scored": {"logprobs": 2},
    }
    one = harness(slots=6, ours=True)
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    for index, (name, options) in enumerate(asked.items()):
        one.ask(name, prompt_of(10, index), 12, **options)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "pad", full)  # so the state of penalties grows
        one.run()
    assert one.failures().keys() == {"bad"}
    for index, (name, options) in enumerate(asked.items()):
        if name != "bad":
            assert one.tokens(name) == harness(slots=6, ours=True).said(prompt_of(10, index), 12, **options)


@pytest.mark.parametrize("share", [False, True])
def test_there_are_slots_for_as_many_again_as_may_run(harness: MakeHarness, share: bool) -> None:
    """The device still reads the slots of ended requests when the next ones begin."""
    one = harness(slots=3, ours=True, share=share, max_sequences=3, open_memory=kv_backend.SlotBackend.open, max_tokens=64)
    assert one.cache.num_slots >= 6
    for index in range(9):
        one.ask(str(index), prompt_of(10, index), 6)
    one.run()
    assert one.failures() == {} and all(len(one.tokens(str(index))) == 6 for index in range(9))


def test_windows_slide_before_any_preemption(harness: MakeHarness) -> None:
    one = harness(windowed(), slots=4, ours=True, budget_pages=5, step_tokens=300)
    one.ask("a", prompt_of(120), 200)
    one.ask("b", prompt_of(125, 1), 200)
    one.run()
    assert one.engine.scheduler.counts.preemptions == 0


def test_a_token_that_the_device_had_no_room_for_is_no_answer(harness: MakeHarness) -> None:
    one = harness(slots=4, ours=True, lookahead=0)
    one.ask("a", prompt_of(12, 1), 10)
    one.step()
    one.cache.limit[next(iter(one.engine.scheduler.running)).memory.slot] = 12  # as if a raise of it had been lost
    one.engine.step()
    assert min(one.tokens("a")) >= 0 and one.failures().keys() == {"a"}


def test_idle_time_is_no_steps_time(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    one = harness(ours=True)
    one.ask("a", prompt_of(12), 3)
    one.run()
    now_s = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: now_s() + 3600)
    one.ask("b", prompt_of(13, 1), 3)
    one.run()
    assert one.engine.step_us < 60e6, "of the hour some has come in"


@pytest.mark.parametrize("is_idle", [False, True])
def test_work_in_slack_for_which_the_device_waited_gets_less_time(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, is_idle: bool
) -> None:
    """Else steps last as long as that work, which then may last longer still."""
    monkeypatch.setattr(Engine, "is_idle", lambda engine: is_idle)
    one = harness(ours=True)
    one.ask("a", prompt_of(12), 3)
    one.engine.step_us = 1e9
    one.step()
    assert (one.engine.step_us < 0.6e9) == is_idle


def test_a_short_common_prefix_is_not_waited_for(harness: MakeHarness) -> None:
    one = harness(ours=True, share=True, step_tokens=256)
    for index in range(8):
        one.ask(str(index), [1, 2, 3, *prompt_of(20, index + 1)], 4)
    one.step()
    assert len(one.engine.scheduler.running) == 8


def test_a_load_that_fails_gives_its_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while its error is kept."""
    tiny_model().save_pretrained(tmp_path)
    pools, runners = [], []
    make = kv_backend.Pool

    def made(*args: Any, **options: Any) -> Any:
        pools.append(make(*args, **options))
        return pools[-1]

    monkeypatch.setattr(kv_backend, "Pool", made)

    def refuse(runner: Any, *_: Any) -> None:
        runners.append(weakref.ref(runner))
        raise ValueError("it cannot be served") from cause(runner)

    def cause(runner: Any) -> OSError:
        try:
            raise OSError(f"{runner} is kept by this frame")
        except OSError as error:
            return error

    monkeypatch.setattr(loading.Runner, "sample", refuse)
    with pytest.raises(ValueError, match="cannot be served") as failed:
        LLM(str(tmp_path), device="cpu")
    assert [pool.closed for pool in pools] == [True]
    gc.collect()
    assert [runner() for runner in runners] == [None] and failed.tb is not None


def test_more_sequences_than_there_are_addresses_for_are_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(max_position_embeddings=2**30).save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "load_weights", Mock(side_effect=AssertionError("weights are read")))
    with pytest.raises(ValueError, match=r"lower max_num_seqs from 4096 to ([0-9]+), or max_tokens to ([0-9]+)") as refused:
        LLM(str(tmp_path), device="cpu", max_num_seqs=4096)
    for fits in (int(number) for number in re.findall(r" to ([0-9]+)", str(refused.value))):
        options = {"max_num_seqs": fits} if fits < 4096 else {"max_num_seqs": 4096, "max_tokens": fits}
        with pytest.raises(AssertionError, match="weights are read"):
            LLM(str(tmp_path), device="cpu", **options)
    with pytest.raises(ValueError, match=r"here: lower max_num_seqs from 1099511627776 to [1-9]\d*$"):  # of no length
        LLM(str(tmp_path), device="cpu", max_num_seqs=2**40)


def test_a_close_that_failed_can_be_called_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model().save_pretrained(tmp_path)
    engine = LLM(str(tmp_path), device="cpu", load_format="dummy")
    engine.generate([[1, 2, 3]])
    pool = engine.loaded.memory.cache.pool
    with monkeypatch.context() as patch:
        patch.setattr(pool.driver, "unmap", REFUSED)
        with pytest.raises(DriverError):
            engine.close()
    engine.close()
    assert pool.closed


@pytest.mark.parametrize("beam_width", [0, 3])
def test_a_request_whose_memory_cannot_be_given_back_can_be_ended_again(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, beam_width: int
) -> None:
    one = harness(share=True, ours=True)
    one.ask("a", prompt_of(40), 20, beam_width=beam_width)
    one.ask("b", prompt_of(30, 1), 20)
    one.step(4)
    end = Abort(request_id="a")
    with monkeypatch.context() as patch:
        patch.setattr(one.memory, "park", REFUSED)
        with pytest.raises(DriverError):
            one.engine.receive(end)
    assert one.engine.num_running == 2
    one.engine.receive(end)
    one.run()
    assert one.tokens("b") == one.expected(prompt_of(30, 1), 20)


@pytest.mark.parametrize(("num_slots", "max_tokens"), [(2**24, 2**31), (2**40, 2**31)])
def test_more_token_ids_than_the_host_has_room_for_name_the_options(num_slots: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"[0-9.]+ \w+ of the host's memory.* lower max_num_seqs or max_tokens"):
        RequestTable(num_slots, max_tokens)


def test_an_undo_that_fails_does_not_hide_why_the_memory_could_not_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Pool.close

    def close_badly(self: Pool) -> None:
        close(self)
        raise DriverError("the undo's", call="unmap", code="X")

    layout = KVLayout.uniform(layers=2, kv_heads=2, head_dim=32, dtype=torch.float32)
    config = kv_backend.BackendConfig(
        layout=layout, device=torch.device("cpu"), max_sequences=2, max_tokens=512, step_tokens=64, shares_prefixes=True,
        budget_bytes=8 * MIB,
    )  # fmt: skip
    monkeypatch.setattr(kv_backend.SlotBackend, "__init__", Mock(side_effect=BudgetError("the first error")))
    monkeypatch.setattr(Pool, "close", close_badly)
    with pytest.raises(BudgetError, match="the first error"):
        kv_backend.SlotBackend.open(config)
