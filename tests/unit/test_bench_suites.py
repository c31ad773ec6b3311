"""Each suite runs in seconds on a CPU, checks before it times, and writes rows of what it is about."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from bench.cli import load
from bench.harness import SHAPES, Settings, Shape, WrongNumbers
from bench.rows import FAILED, Row
from bench.suites import append, collectives, memory_efficiency, prefix, products, resize, tiers, transformers
from bench.suites.kernels import Queries, memories
from bench.suites.kernels.memories import Case, Format, open_memory, rows_of
from bench.suites.prefix import host
from bench.suites.serve.context import Context
from bench.suites.serve.systems import Served, ServedRun
from bench.workloads import Ask, Workload
from tests.unit import fake_vllm
from tests.unit.test_bench_rows import SETTINGS, recorder_in
from vmmkv.memory.address_space import wrap
from vmmkv.tiers import HostTier, Transfer
from vmmkv.units import GIB
from vmmkv_server.engine.collectives import Collectives


def measured(folder: Path, suite: str, *parts: str, settings: Settings = SETTINGS) -> list[Row]:
    settings = replace(settings, parts=parts, steps=12, sequences=3, repeat=1)
    recorder = recorder_in(folder, suite, settings)
    load(suite).run(recorder)
    assert not recorder.failed
    return recorder.rows


def found(rows: list[Row], metric: str) -> dict[tuple[str, str], float]:
    return {(row.workload.partition(":")[0], row.system): row.summary.median for row in rows if row.metric == metric}


@pytest.mark.nightly
def test_every_driver_call_is_timed_alone_and_beside_a_thread(tmp_path: Path) -> None:
    rows = measured(tmp_path, "driver_calls")
    for workload in ("2.0 MiB handle, alone", "32.0 MiB handle, beside a busy thread"):
        calls = {row.metric for row in rows if row.workload == workload}
        assert {"reserve", "create", "map", "set_access", "unmap", "release", "fence", "memory", "export_fd"} <= calls


@pytest.mark.nightly
def test_static_slots_never_wait_and_growth_in_front_does(tmp_path: Path) -> None:
    rows = measured(tmp_path, "append")
    stalled = found(rows, "stalled")
    assert stalled["3 sequences, coming and going", "static"] == 0 < stalled["3 sequences, coming and going", "off"]
    assert {system for _, system in stalled} == {"static", "off", "slack", "adopted"}
    assert found(rows, "step, over static")["3 sequences, all cross together", "static"] == 0


def test_a_row_that_was_not_appended_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmmkv_kernels.reference.append", lambda *arguments: None)
    with pytest.raises(WrongNumbers, match="are not what was appended there"):
        append.run(recorder_in(tmp_path))


def test_products_by_rows_and_one_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [row.workload.split()[-2] for row in measured(tmp_path, "products") if row.metric == "time"]
    assert numbers == ["1", "8", "16", "32", "64", "128", "256"]
    monkeypatch.setattr(products, "linear", lambda x_MK, weight_NK: x_MK @ (1.02 * weight_NK.T))
    recorder = recorder_in(tmp_path, "products")
    products.run(recorder)
    assert {row.metric for row in recorder.rows} == {FAILED}


@pytest.mark.nightly
def test_memory_that_is_given_back_arrives_and_comes_again(tmp_path: Path) -> None:
    rows = measured(tmp_path, "resize")
    given, device = found(rows, "given back"), found(rows, "given back, says the device")
    assert given
    assert given == device
    assert len([row for row in rows if row.metric == "most of the budget"]) == 4


def test_a_guest_whose_rows_are_anothers_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        resize.Side, "admit", lambda *given, real=resize.Side.admit: real(*given)._replace(mark=float("nan"))
    )  # a mark that is never read as it was written
    with pytest.raises(WrongNumbers, match="not what its guest wrote"):
        resize.run(recorder_in(tmp_path, "resize"))


def test_vmmkv_wastes_little_more_than_blocks_and_static_slots_most(tmp_path: Path) -> None:
    rows = measured(tmp_path, "memory_efficiency")
    waste, admitted = found(rows, memory_efficiency.WASTE), found(rows, memory_efficiency.ADMITTED)
    for (workload, system), value in waste.items():
        if system == "vmmkv":
            assert value < waste[workload, "static 4096"]
            assert admitted[workload, "vmmkv"] >= 0.9 * admitted[workload, "paged 16"]
            assert admitted[workload, "vmmkv"] >= admitted[workload, "static 4096"]
        row = next(row for row in rows if row.metric == "waste" and row.system == system and row.workload.startswith(workload))
        assert row.bound is None or row.summary.p80 >= 0.5 * row.bound


def test_a_miscounting_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = memory_efficiency.OccupancySizes.of(SETTINGS)
    shape = SHAPES["qwen3-0.6b"]
    asks = tuple(Ask(prompt=np.zeros(100, np.int32), num_out=50) for _ in range(4))
    system = memory_efficiency.CountedSystem("paged 16", shape, sizes)
    real = type(system.cache).stats
    monkeypatch.setattr(type(system.cache), "stats", lambda self: halved(real(self)))
    with pytest.raises(WrongNumbers, match="paged 16 counts"):
        memory_efficiency.Simulation(system, Workload(name="w", text="", asks=asks), shape, sizes, 0).run()


def halved(stats: object) -> object:
    return replace(stats, mapped_bytes=stats.mapped_bytes // 2)  # type: ignore[type-var, attr-defined]


def test_attention_is_checked_against_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "release_memory", lambda device: None)  # to collect takes a second each time
    narrow = Shape(name="narrow", layers=2, heads=4, kv_heads=2, head_dim=64, dtype=torch.float32, weight_bytes=0)
    rows = measured(tmp_path, "kernels", settings=replace(SETTINGS, shape=narrow))
    assert {row.workload for row in rows} == {
        f"narrow {case}" for case in ("decode 2x96", "decode skewed", "prefill 64", "prefill mixed")
    }
    over = ("malloc", "vmmkv, all layers a page", "paged 16", "paged 128", "malloc, again")
    assert {row.system for row in rows} >= {f"reference, {memory}" for memory in over}
    case = Case(name="2x96", lengths=(96, 96))
    memory = open_memory("tensor", case, 1, Format(shape=SHAPES["wide"]), torch.device("cpu"))
    batch = Queries(case, 1, memory, seed=0)
    wrong = [torch.zeros_like(batch.q_NHD) for _ in memory.layers]
    with pytest.raises(WrongNumbers, match="off by 1"):
        batch.check(wrong)
    memory.close()


@pytest.mark.parametrize("kind", ["vmmkv-aliased", "paged-shared"])
def test_sequences_of_a_shared_memory_have_the_same_rows(kind: str) -> None:
    case = Case(name="3x96", lengths=(96, 96, 96))
    memory = open_memory(kind, case, 1, Format(shape=SHAPES["wide"]), torch.device("cpu"))
    first, *others = [rows_of(memory, 0, index, 96) for index in range(3)]
    assert all(torch.equal(one, other) for rows in others for one, other in zip(first, rows, strict=True))
    memory.close()


def test_shared_prefixes_are_attached_warm_and_not_without_a_cache(tmp_path: Path) -> None:
    rows = measured(tmp_path, "prefix", "requests")
    attached = found(rows, "prompt tokens attached")
    warm = "tiny llama-3.1-8b 3 requests of 1200 + 12 tokens, 4 out, warm"
    assert attached[warm, "vmmkv"] > 95
    assert attached[warm, "paged 16"] > 95
    assert attached[warm, "none"] == 0
    assert {system for _, system in found(rows, "total")} == {"vmmkv", "paged 16", "paged 128", "none"}


def test_attaching_by_each_way_and_the_tree_are_timed(tmp_path: Path) -> None:
    rows = measured(tmp_path, "prefix", "attach", "tree")
    assert {system for _, system in found(rows, "in the driver")} == {"alias", "adopt"}
    assert ("a tree of 1,000 nodes", "radix tree") in found(rows, "match, next turn")


def test_what_the_host_does_between_steps_is_timed_by_size(tmp_path: Path) -> None:
    rows = measured(tmp_path, "prefix", "host")
    for text in ("running requests", "tokens of each waiting prompt", "parked slots", "tokens that a tier has"):
        timed, grown = (
            {row.metric.removeprefix("growth, ") for row in rows if text in row.workload and row.unit == unit}
            for unit in ("us", "x")
        )
        assert timed == grown != set()


@pytest.mark.nightly
def test_a_tree_that_forgets_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_pieces", lambda start, end: [])
    real = host.RadixTree.match
    monkeypatch.setattr(host.RadixTree, "match", lambda self, namespace, tokens: real(self, namespace, tokens[:-200]))
    recorder = recorder_in(tmp_path, "prefix", replace(SETTINGS, parts=("tree",)))
    prefix.run(recorder)
    assert recorder.failed


@pytest.mark.nightly
def test_sums_and_broadcasts_over_ranks_are_checked_and_timed(tmp_path: Path) -> None:
    settings = replace(SETTINGS, tensor_parallel_sizes=(3,))
    rows = measured(tmp_path, "collectives", settings=settings)
    assert {row.workload for row in rows} >= {"3 ranks: sum of 8 KiB", "3 ranks: broadcast of 0.25 KiB"}
    assert {row.system for row in rows} == {"gloo"}


def test_a_sum_that_is_none_is_seen() -> None:
    alone = Collectives(0, 2)
    with pytest.raises(WrongNumbers, match="sum by none of 4"):
        collectives._check(alone, SETTINGS.device, collectives.Way("sum", "none", 4096, lambda tensor: tensor))


def test_tiers_give_back_what_they_were_given(tmp_path: Path) -> None:
    rows = measured(tmp_path, "tiers", "bandwidth")
    assert {system for _, system in found(rows, "load")} >= {"one copy", "host tier", "disk tier"}


@pytest.mark.nightly
def test_another_answer_over_a_tier_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorder_in(tmp_path, "tiers", SETTINGS)
    engine = SimpleNamespace(snapshot=SimpleNamespace(preemptions=0, fetches={}, resumed_tokens={}))
    monkeypatch.setattr(tiers, "_engine", lambda *_: nullcontext(engine))
    answers = iter([[1, 2], [1, 2], [1, 3]])

    def serve(_: object) -> list[ServedRun]:
        return [ServedRun([Served(prompt_tokens=1, tokens=next(answers), token_s=[0.1, 0.2])], 0.2)]

    systems = {"none": ("no tier", {}), "host": ("host tier", {"host": 1}), "disk": ("disk tier", {"disk": 1})}
    context, anything = Context(recorder, SHAPES["wide"]), cast(Any, None)
    tiers._compare(context, "working_set", anything, anything, systems, serve)
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


def test_all_caches_of_transformers_decode_the_same(tmp_path: Path) -> None:
    rows = measured(tmp_path, "transformers", "decode")
    assert {system for _, system in found(rows, "time per token")} == set(transformers.SYSTEMS)
    assert list(transformers.absent(SETTINGS)) == ["memory", "mixed"]


def test_logits_and_rows_of_another_token_are_seen() -> None:
    expected, logits = transformers.Expected(torch.float32), torch.randn(2, 8)
    expected.check("first", 0, logits)
    with pytest.raises(WrongNumbers, match="logits are off by"):
        expected.check("other", 0, logits + 0.1 * torch.randn(2, 8))
