"""The suite `serve`: every part is checked and timed, and what cannot be measured is said."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.cli import main
from bench.harness import SHAPES, Recorder, Settings, WrongNumbers
from bench.report import answers, figures
from bench.rows import Row, exact
from bench.suites import serve
from bench.suites.serve import steps
from bench.suites.serve.steps import KernelSpan, steps_of
from bench.suites.serve.users import GENERATED, filling, parts_of_vllm
from bench.systems.engine import UserEngine
from bench.systems.models import model_of
from tests.unit import fake_vllm
from tests.unit.recorded import SETTINGS, recorder_in


def recorded(folder: Path, *parts: str, cases: tuple[str, ...] = ()) -> Recorder:
    settings = Settings(device=SETTINGS.device, shape=SETTINGS.shape, quick=True, parts=parts, cases=cases, repeat=1)
    serve.check(settings)
    recorder = recorder_in(folder, "serve", settings)
    serve.run(recorder)
    return recorder


def measured(folder: Path, *parts: str, cases: tuple[str, ...] = ()) -> list[Row]:
    recorder = recorded(folder, *parts, cases=cases)
    assert not recorder.failed
    return recorder.rows


def fakes_vllm(monkeypatch: pytest.MonkeyPatch, off: float = 0.0) -> list[fake_vllm.LLM]:
    """The LLMs that will be opened."""
    modules, opened = fake_vllm.modules(off)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(serve, "lacks_vllm", lambda settings: None)
    return opened


def test_the_engine_as_a_user_has_it_is_checked_and_timed(tmp_path: Path) -> None:
    rows = measured(tmp_path, "mixed", "first", "shared")
    metrics = {(row.workload.partition(":")[0].removeprefix("tiny llama-3.1-8b "), row.metric) for row in rows}
    assert {("mixed", "throughput"), ("first", "first token"), ("shared again", "total")} <= metrics
    attached = {row.workload.partition(":")[0]: row.summary.p50 for row in rows if row.metric == "prompt tokens attached"}
    assert 90 < attached["tiny llama-3.1-8b shared warm"] < attached["tiny llama-3.1-8b shared again"]


@pytest.mark.nightly
def test_an_engine_over_two_ranks_is_held_against_one(tmp_path: Path) -> None:
    settings = replace(SETTINGS, parts=("single", "first"), tensor_parallel_sizes=(2, 1), repeat=1)
    serve.check(settings)
    recorder = recorder_in(tmp_path, "serve", settings)
    serve.run(recorder)
    assert not recorder.failed
    found = {(row.system, row.metric): row.summary for row in recorder.rows}
    assert {("vmmkv", "throughput"), ("vmmkv, TP 2", "throughput"), ("vmmkv, TP 2", "first token")} <= found.keys()
    assert found["vmmkv, TP 2", "step broadcast"].p50 > 0
    assert ("vmmkv", "step broadcast") not in found
    assert found["vmmkv", "first tokens off by"].p50 == 0.0
    assert 0 < found["vmmkv, TP 2", "first tokens off by"].p50 < 0.1, "sums in another order"


def test_ranks_are_refused_for_parts_that_have_none() -> None:
    with pytest.raises(ValueError, match="--tensor-parallel-size is of serve's parts mixed, single, first"):
        serve.check(replace(SETTINGS, parts=("closed",), tensor_parallel_sizes=(2,)))


@pytest.mark.parametrize(
    ("parts", "cases", "served"),
    [
        (("outside",), (), GENERATED),
        (("mixed", "full", "outside"), (), ("mixed", "full")),
        (("outside",), ("uniform", "single"), ("single",)),
        (("mixed", "outside"), ("mixed", "full"), ("mixed", "full")),
        (("outside",), ("uniform",), ()),
        (("closed", "outside"), (), GENERATED),
    ],
)
def test_vllm_serves_the_parts_that_are_named(parts: tuple[str, ...], cases: tuple[str, ...], served: tuple[str, ...]) -> None:
    assert tuple(parts_of_vllm(replace(SETTINGS, parts=parts, cases=cases))) == served


def test_a_cache_is_full_before_requests_are_served_over_a_full_cache() -> None:
    model = model_of("wide", tiny=True)
    engine = UserEngine(model, SETTINGS)
    try:
        engine.run(filling(model, SETTINGS, engine.num_kv_tokens))
        snapshot = engine.llm.snapshot
        assert snapshot is not None
        assert snapshot.memory.kv_cached_bytes == snapshot.memory.kv_budget_bytes
    finally:
        engine.close()


@pytest.mark.nightly
def test_vllm_serves_the_engines_workloads_over_the_engines_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = fakes_vllm(monkeypatch)
    rows = measured(tmp_path, "sampled", "outside", cases=("sampled", "full"))
    by_part = {
        part: {(row.system, row.workload, row.metric, row.unit) for row in rows if f" {part}: " in row.workload}
        for part in ("sampled", "full")
    }
    assert {system for system, *_ in by_part["full"]} == {"vLLM 0.25.1"}
    ours, others = ({row[1:] for row in by_part["sampled"] if row[0] == system} for system in ("vmmkv", "vLLM 0.25.1"))
    assert ours == others
    assert all(row.summary.p50 < 0.1 for row in rows if row.metric == "first tokens off by")
    (llm,) = opened
    assert sum(params.top_p == 0.95 for params in llm.llm_engine.params) == 2 * 10
    assert sum(llm.kept[:-10]) > llm.max_model_len  # those that fill the cache come before the ten of the last run


@pytest.mark.nightly
def test_vllm_with_other_log_probabilities_has_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes_vllm(monkeypatch, off=0.5)
    recorder = recorded(tmp_path, "outside", cases=("single",))
    assert [(row.system, row.metric) for row in recorder.rows] == [("vLLM 0.25.1", "failed")]


@pytest.mark.nightly
def test_types_of_the_kv_cache_are_measured_in_the_same_memory(tmp_path: Path) -> None:
    rows = measured(tmp_path, "quantised", cases=("auto", "int4"))
    fitting = {row.system: row.summary.p50 for row in rows if row.metric == "sequences that fit"}
    assert list(fitting) == ["vmmkv, float32 KV", "vmmkv, int4 KV"]
    assert fitting["vmmkv, int4 KV"] > 4 * fitting["vmmkv, float32 KV"]


@pytest.mark.nightly
def test_policies_are_measured_beside_full_attention_that_waits_for_memory(tmp_path: Path) -> None:
    cases = ("none", "snapkv-64", "h2o-32", "streaming_llm-32")
    rows = measured(tmp_path, "policies", cases=cases)
    told = {(row.system.removeprefix("vmmkv, "), row.metric): row.summary.p50 for row in rows}
    told |= {("none", metric): value for (system, metric), value in told.items() if system == "all rows"}
    at_once = {case: (told[case, "running at once"], told[case, "KV memory at peak"]) for case in cases}
    assert at_once["none"] == (3, 12 / 1024), "two pages each"
    for case in cases[1:]:
        assert at_once[case][0] == 4
        assert told[case, "KV memory, all decoding"] == 8 / 1024, "a page each"
        assert told[case, "sequences that fit"] == 5
        assert (case, "scores and compaction, of prefill") in told
        assert ((case, "scores and compaction every 128 rows, of decode") in told) == (case != "snapkv-64")


def test_cases_of_vllm_are_refused_where_it_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="serve's part outside cannot run mixed, full: "):
        recorded(tmp_path, "outside", cases=("mixed", "full"))


@pytest.mark.nightly
def test_systems_are_compared_in_closed_and_open_loops(tmp_path: Path) -> None:
    rows = measured(tmp_path, "closed", "rates", cases=("multi turn", "8"))
    systems = {row.system for row in rows if row.metric == "throughput"}
    assert systems == {"vmmkv", "paged 16", "paged 128", "static 512"}
    assert {row.metric for row in rows if "rates" in row.workload} >= {"goodput", "rate", "first token"}
    assert all(row.summary.p50 == 100 for row in rows if row.metric.startswith("same answers"))


@pytest.mark.nightly
def test_systems_outside_the_engine_give_its_answers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    rows = measured(tmp_path, "outside", cases=("uniform", "chat"))
    systems = {row.system for row in rows if row.metric == "throughput"}
    assert systems == {"vmmkv", "transformers StaticCache"}


def systems_of_texts(folder: Path, part: str) -> set[str]:
    """Systems with throughput in a part that needs a tokenizer; the test is skipped if there is none."""
    if part in serve.absent(SETTINGS):
        pytest.skip(serve.absent(SETTINGS)[part])
    return {row.system for row in measured(folder, part) if row.metric == "throughput"}


@pytest.mark.nightly
def test_texts_over_http_are_measured_beside_those_without(tmp_path: Path) -> None:
    assert systems_of_texts(tmp_path, "http") == {"vmmkv", "vmmkv serve"}


@pytest.mark.nightly
def test_answers_by_a_grammar_are_measured_beside_free_text(tmp_path: Path) -> None:
    assert systems_of_texts(tmp_path, "grammar") == {"free text", "masks", "jump-forward", "text before a call"}


def test_decode_steps_have_whole_batches(tmp_path: Path) -> None:
    rows = measured(tmp_path, "step")
    assert {row.workload.partition(": ")[2] for row in rows} == {
        f"batch {batch}, context {rows}" for batch, rows in ((1, 64), (4, 64), (2, 512))
    }
    assert all(row.summary.n >= 12 for row in rows)


def test_vllm_of_any_version_is_compared_in_each_workload_of_users() -> None:
    names = ("mixed", "shared warm", "full")
    rows = [speed(*each, f"m {name}: x") for name in names for each in (("vmmkv", 110), ("vLLM 0.25.1", 100))]
    (answer,) = answers(rows)
    assert (answer.question.other, list(answer.ratios.values())) == ("vLLM", [1.1] * len(names))
    (drawn,) = figures("serve", rows, "h200")
    assert all(name in drawn.alt for name in (*names, "vmmkv", "vLLM 0.25.1"))


def speed(system: str, p50: float, workload: str) -> Row:
    return Row("serve", workload, system, "throughput", "tok/s", exact(p50, 1))


def test_a_case_that_no_part_has_is_answered_by_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--device", "cpu", "--parts", "closed", "--cases", "x"])
    assert "no case x: closed has uniform, chat" in capsys.readouterr().err


def kernel(name: str, start_us: float, end_us: float) -> KernelSpan:
    return KernelSpan(name, start_us, end_us)


def test_an_instant_belongs_to_the_kernel_that_has_run_longest() -> None:
    step = [kernel("_begin", 0, 1), kernel("attend", 1, 5), kernel("gemm", 3, 8), kernel("_end", 9, 10)]
    again = [kernel(each.name, each.start_us + 12, each.end_us + 12) for each in step[1:]]
    decode, mixed = steps_of([*step, *again])
    gaps = {"gaps": 4, "gap between steps": 3}
    assert decode == (13, {"attention": 4, "GEMM": 3, "other kernels": 2, **gaps}, 4, False)
    assert mixed.is_mixed and mixed.total_us == 9 and mixed.parts_us["gap between steps"] == 0
    with pytest.raises(WrongNumbers, match="no end of a step"):
        steps_of(step[:-1])
    assert steps.kind_of("_prefill_hopper") == "attention"


def test_a_missing_tokenizer_is_said_before_anything_runs(tmp_path: Path) -> None:
    settings = Settings(device=SETTINGS.device, shape=SHAPES["wide"], parts=("http",), tokenizer=tmp_path / "no.json")
    with pytest.raises(ValueError, match=r"serve's part http cannot run: --tokenizer .*no\.json is no file"):
        serve.check(settings)
