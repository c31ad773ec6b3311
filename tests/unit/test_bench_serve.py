"""The serve suite: requests come when they may, systems are checked, and what cannot be measured is said."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.harness import SHAPES, Recorder, Settings, WrongNumbers
from bench.rows import Row
from bench.suites import serve
from bench.suites.serve import outside, over_http, steps
from bench.suites.serve.generate import filling
from bench.suites.serve.models import MODELS, decode_s, model_of, padded, requests_s, vocabulary_of
from bench.suites.serve.steps import KernelSpan, steps_of
from bench.suites.serve.systems import Served, ServedRun, Turns, UserEngine, alike, share_off, share_same, take_turns
from bench.workloads import Ask, Workload
from tests.unit import fake_vllm
from tests.unit.test_bench_rows import SETTINGS, recorder_in


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
    for module in (serve, outside):
        monkeypatch.setattr(module, "lacks_vllm", lambda settings: None)
    return opened


def ask(num_prompt: int, num_out: int, **when: float) -> Ask:
    return Ask(prompt=np.arange(num_prompt, dtype=np.int32), num_out=num_out, **when)  # type: ignore[arg-type]


def test_a_follower_comes_when_its_turn_before_has_ended_with_that_ones_answer_in_its_prompt() -> None:
    turns = Turns([ask(2, 2), ask(6, 1, after=0, think_s=0.5), ask(3, 1, arrival_s=2.0)])
    assert turns.arrived(0.0) == [0]
    turns.served[0].tokens, turns.served[0].token_s = [70, 71], [0.5, 1.0]
    turns.end(0)
    assert turns.next_s == 1.5
    assert turns.arrived(1.5) == [1]
    assert turns.prompts[1] == [0, 1, 70, 71, 4, 5]
    assert turns.arrived(5.0) == [2]
    turns.served[1].tokens = [1, 2]
    with pytest.raises(WrongNumbers, match="2 tokens of 1"):
        turns.end(1)


def test_log_probabilities_that_are_off_or_of_other_tokens_are_refused() -> None:
    right, other = [{1: -1.0, 2: -2.0}], [{1: -3.0, 2: -0.5}]
    assert share_off(right, [{1: -1.0, 2: -2.0}], other, torch.float32, "x") == 0
    with pytest.raises(WrongNumbers, match="off by"):
        share_off(right, [{1: -1.1, 2: -2.0}], other, torch.float32, "x")
    with pytest.raises(WrongNumbers, match="other likeliest tokens"):
        share_off(right, [{8: -1.0, 9: -2.0}], other, torch.float32, "x")
    with pytest.raises(WrongNumbers, match="change nothing"):
        share_off(right, right, right, torch.float32, "x")
    assert alike({1: 0.0}, {1: 0.0, 2: 0.0, 3: 0.0})


def test_other_answers_are_a_share_or_an_error() -> None:
    wanted = ServedRun([Served(tokens=[1]), Served(tokens=[2])], 1.0)
    other = ServedRun([Served(tokens=[1]), Served(tokens=[3])], 1.0)
    assert share_same([wanted, other], wanted, strict=False) == 0.5
    with pytest.raises(WrongNumbers, match=r"1 of 2 requests have other tokens in another run: \[1\]"):
        share_same([other], wanted, strict=True)


def test_systems_take_turns_forward_and_backward_and_later_workloads_keep_the_cache(tmp_path: Path) -> None:
    order: list[tuple[str, str, bool]] = []

    class System:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, workload: Workload, *, keep: bool = False) -> ServedRun:
            order.append((self.name, workload.name, keep))
            return ServedRun([], 1.0)

    cold, warm = (Workload(name=name, text="", asks=()) for name in ("cold", "warm"))

    def leaves_out(system: str, round_: int, place: int) -> bool:
        return (system, round_, place) == ("b", 1, 1)

    by_place = take_turns(
        recorder_in(tmp_path), [System("a"), System("b")], [[cold, warm]] * 2, ["c", "w"], leaves_out=leaves_out
    )
    assert [name for name, workload, _ in order if workload == "cold"] == ["a", "b", "b", "a"]
    assert all(keep == (workload == "warm") for _, workload, keep in order)
    assert [{name: len(of) for name, of in runs.items()} for runs in by_place] == [{"a": 2, "b": 2}, {"a": 2, "b": 1}]


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


def test_a_cache_is_full_before_requests_are_served_over_a_full_cache() -> None:
    model = model_of("wide", tiny=True)
    engine = UserEngine(model, SETTINGS)
    try:
        engine.run(filling(model, SETTINGS, engine.num_kv_tokens))
        snapshot = engine._engine.snapshot
        assert snapshot is not None
        assert snapshot.kv_cached_bytes == snapshot.kv_budget_bytes
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


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["http", "grammar"])
def test_texts_are_measured_where_a_tokenizer_is_here(part: str, tmp_path: Path) -> None:
    if part in serve.absent(SETTINGS):
        pytest.skip(serve.absent(SETTINGS)[part])
    rows = measured(tmp_path, part)
    systems = {"http": {"vmmkv", "vmmkv serve"}, "grammar": {"free text", "masks", "jump-forward"}}[part]
    assert {row.system for row in rows if row.metric == "throughput"} == systems


def test_decode_steps_have_whole_batches(tmp_path: Path) -> None:
    rows = measured(tmp_path, "step")
    assert {row.workload.partition(": ")[2] for row in rows} == {
        f"batch {batch}, context {rows}" for batch, rows in ((1, 64), (4, 64), (2, 512))
    }
    assert all(row.summary.n >= 12 for row in rows)


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


def test_bounds_follow_from_bytes_and_operations() -> None:
    llama = MODELS["llama-3.1-8b"]
    assert llama.row_bytes == 131072
    assert 2 * llama.step_parameters == pytest.approx(15.0e9, rel=0.01)
    assert decode_s(llama, 1, 1000) == pytest.approx((2 * llama.step_parameters + 1000 * 131072) / 4.5e12)
    cold, warm = (requests_s(llama, [5000] * 2, [2, 2], shared=4000, known=known) for known in (False, True))
    assert warm < cold < requests_s(llama, [5000] * 2, [2, 2])


def test_a_tokenizer_is_padded_to_a_models_tokens_without_new_merges(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": []}))
    tokenizer = json.loads(padded(path, 6))
    assert sorted(tokenizer["model"]["vocab"].values()) == list(range(6))
    assert tokenizer["model"]["merges"] == []
    assert vocabulary_of(path) == 2
    with pytest.raises(ValueError, match="name a smaller one"):
        padded(path, 1)
    with pytest.raises(ValueError, match="cannot be padded"):
        path.write_text("{}")
        vocabulary_of(path)


def stream(*events: object) -> bytes:
    return b"".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode() for event in events)


def test_a_stream_is_read_to_its_usage_and_a_broken_one_says_what_is_wrong() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    chunks = [{"choices": [{"text": text}]} for text in "ab"]
    told = over_http.parse(stream(*chunks, {"choices": [], "usage": usage}, "[DONE]"), 200)
    assert (told.text, told.prompt_tokens, told.cached_tokens, told.completion_tokens) == ("ab", 3, 1, 2)
    assert over_http.parse(stream(*chunks), 200).error == "the stream has no end"
    assert over_http.parse(b"no", 500).error == "status 500: no"
    assert "boom" in over_http.parse(stream({"error": "boom"}, "[DONE]"), 200).error


def test_a_missing_tokenizer_is_said_before_anything_runs(tmp_path: Path) -> None:
    settings = Settings(device=SETTINGS.device, shape=SHAPES["wide"], parts=("http",), tokenizer=tmp_path / "no.json")
    with pytest.raises(ValueError, match=r"serve's part http cannot run: --tokenizer .*no\.json is no file"):
        serve.check(settings)
