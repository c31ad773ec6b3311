"""The suite `tiers`: what tiers give back, and one that lies is seen."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bench.harness import SHAPES
from bench.report import answers, figures
from bench.rows import FAILED, Row, exact
from bench.suites import tiers
from bench.systems import Context
from bench.systems.runs import Served, ServedRun
from tests.unit import fake_vllm
from tests.unit.recorded import SETTINGS, found, measured, recorder_in
from vmmkv.memory.address_space import wrap
from vmmkv.tiers import HostTier, Transfer
from vmmkv.units import GIB
from vmmkv_server.statistics import SchedulerStatistics


def test_tiers_give_back_what_they_were_given(tmp_path: Path) -> None:
    rows = measured(tmp_path, "tiers", "bandwidth")
    assert {system for _, system in found(rows, "load")} >= {"one copy", "host tier", "disk tier"}


@pytest.mark.nightly
def test_another_answer_over_a_tier_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorder_in(tmp_path, "tiers", SETTINGS)
    engine = SimpleNamespace(snapshot=SimpleNamespace(scheduler=SchedulerStatistics(), features={"fetches": {}}))
    monkeypatch.setattr(tiers, "engine_over", lambda *_: nullcontext(engine))
    answers = iter([[1, 2], [1, 2], [1, 3]])

    def serve(_: object) -> list[ServedRun]:
        return [ServedRun([Served(prompt_tokens=1, tokens=next(answers), token_s=[0.1, 0.2])], 0.2)]

    systems = {"none": ("no tier", {}), "host": ("host tier", {"host": 1}), "disk": ("disk tier", {"disk": 1})}
    context, anything = Context(recorder, SHAPES["wide"]), cast(Any, None)
    tiers.compare_tiers(context, "working_set", anything, anything, systems, serve)
    assert found(recorder.rows, "same answers as the first system") == {("working_set", "host tier"): 100}
    assert [(row.system, row.metric) for row in recorder.rows][-1] == ("disk tier", FAILED)


@pytest.mark.nightly  # the machine's pace decides what is loaded
def test_an_engine_answers_the_same_from_tiers_and_holds_more_conversations(tmp_path: Path) -> None:
    rows = measured(tmp_path, "tiers", "first", "beside", "working_set", "swap")
    attached = found(rows, "prompt tokens attached")
    for tier in ("host tier", "disk tier", "disk tier, loaded", "redis tier, loaded"):
        assert attached["tiny llama-3.1-8b first", tier] > 90
    working_set = "tiny llama-3.1-8b working_set"
    assert attached[working_set, "no tier"] < 20 < attached[working_set, "host tier"]
    same = found(rows, "same answers as the first system")
    assert len(same) == 3 and set(same.values()) == {100}
    for turn in (1, 2):
        alone = found(rows, f"first tokens as computed alone, turn {turn}")
        assert alone == {(working_set, system): 100 for system in ("no tier", "host tier", "host and disk tiers")}
    assert all(count > 0 for (workload, _), count in found(rows, "preempted").items() if "swap" in workload)
    beside = {
        row.system: row.metric for row in rows if row.unit == "GB/s" and " beside" in row.workload and row.summary.p20 > 0
    }
    assert beside.keys() == {"beside loads", "beside stores", "beside both"}


@pytest.mark.nightly
def test_vllm_serves_the_working_set_with_its_own_offloading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules, opened = fake_vllm.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(tiers, "lacks_vllm", lambda settings: None)
    recorder = recorder_in(tmp_path, "tiers", replace(SETTINGS, parts=("working_set",), cases=("vllm",)))
    tiers.run(recorder)
    (llm,) = opened
    assert llm.kv_offloading_size * GIB == pytest.approx(4 * llm.kv_cache_memory_bytes, rel=0.2)
    assert {row.system for row in recorder.rows} == {"vLLM 0.25.1, offloading to the host"}
    assert {row.metric for row in recorder.rows} >= {"throughput", "first token"}


@pytest.mark.nightly
def test_an_engine_behind_one_that_was_killed_answers_from_its_rows(tmp_path: Path) -> None:
    rows = measured(tmp_path, "tiers", "restart")
    attached = found(rows, "prompt tokens attached")
    assert attached["tiny llama-3.1-8b restart", "computed"] == 0
    assert attached["tiny llama-3.1-8b restart", "restarted"] > 90
    assert {system for _, system in found(rows, "first token of the first prompt")} == {"computed", "restarted"}


@pytest.mark.nightly
def test_rows_of_a_tier_that_lies_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostTier, "finished", lies)
    recorder = recorder_in(tmp_path, "tiers", replace(SETTINGS, parts=("bandwidth",), cases=("host",)))
    tiers.run(recorder)
    assert recorder.failed


def lies(tier: HostTier, transfer: Transfer, real: Callable[..., None] = HostTier.finished) -> None:
    if transfer.is_store:
        wrap(transfer.address, 1, torch.device("cpu")).bitwise_not_()
    real(tier, transfer)


def test_first_tokens_are_drawn_by_length_and_source_and_held_against_computing() -> None:
    rows = [
        Row("tiers", f"m first: {tokens} tokens in, 1 out", system, "first token", "ms", exact(p50 * tokens, 1))
        for system, p50 in (("computed", 4), ("device", 1), ("host tier", 2))
        for tokens in (4096, 8192)
    ]
    assert {(each.question.ours, each.median) for each in answers(rows)} == {("device", 4), ("host tier", 2)}
    (drawn,) = figures("tiers", rows, "h200")
    assert "m in ms, against tokens, for computed, device, host tier" in drawn.alt
