"""The serve suite: models and bounds, rows of a quick run, refusals of what is wrong, times from inside, and the bars."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import run
from bench.rows import Row
from bench.serve import PARTS, roofline
from bench.serve.bars import PROMISES, bars
from bench.serve.checks import Alone, distance, share_of_same
from bench.serve.clock import Hosted, Read, Steps
from bench.serve.engine import Answers
from bench.serve.kernel_times import OTHER, STEP_BEGINS, Kernel, kind_of, steps_of
from bench.serve.models import MODELS, model_of
from bench.serve.requests import Requests
from bench.serve.sizes import Sizes
from bench.settings import SHAPES, Settings
from bench.timing import WrongNumbers, exact, middle, summarize
from vmmkv import Attached, PrefixCache
from vmmkv.server import Completion, Engine

ROOT = Path(__file__).parents[2]
LLAMA, QWEN = MODELS["llama-3.1-8b"], MODELS["qwen3-0.6b"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "serve.jsonl").read_text().splitlines()]


def quick(folder: Path, *options: str) -> int:
    return run.main(("serve", "--quick", "--device", "cpu", "--out", str(folder), "--commit", "abc123", *options))


# models and bounds


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_rows_and_the_weights_of_its_shape(name: str) -> None:
    model, shape = MODELS[name], SHAPES[name]
    assert model.row_bytes == shape.layout.row_bytes
    norms_and_embedding = shape.weight_bytes - model.step_weight_bytes
    assert 0 <= norms_and_embedding < 1.01 * model.head_parameters * 2
    assert model.head_parameters % model.vocabulary == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tiny", [False, True])
def test_the_decoder_knows_every_model(name: str, tiny: bool) -> None:
    from transformers import AutoConfig

    from vmmkv.server.engine.models.decoder import DecoderConfig

    with model_of(name, tiny=tiny).directory() as folder:
        config = DecoderConfig.of(AutoConfig.from_pretrained(folder))
    assert config.vocab_size == model_of(name, tiny=tiny).vocabulary
    assert not folder.exists()


@pytest.mark.parametrize(
    ("model", "name", "wanted_s"),
    [
        *((LLAMA, name, seconds) for name, seconds in (("mixed", 10.6), ("single", 0.88), ("first", 0.18), ("long", 11.0))),
        *((QWEN, name, seconds) for name, seconds in (("mixed", 3.8), ("single", 0.08), ("first", 0.021), ("long", 3.5))),
    ],
)
def test_bounds_are_those_of_the_design(model: Any, name: str, wanted_s: float) -> None:
    requests = Requests(model, Sizes.of(model, small=False), seed=0)
    assert getattr(requests, name)().bound_s == pytest.approx(wanted_s, rel=0.06)


@pytest.mark.parametrize(("model", "cold_s", "warm_s"), [(LLAMA, 1.66, 1.58), (QWEN, 0.94, 0.93)])
def test_a_known_prefix_is_not_computed_in_the_bound(model: Any, cold_s: float, warm_s: float) -> None:
    requests = Requests(model, Sizes.of(model, small=False), seed=0)
    cold, warm = (requests.shared(known=known) for known in (False, True))
    assert (cold.bound_s, warm.bound_s) == (pytest.approx(cold_s, rel=0.01), pytest.approx(warm_s, rel=0.01))
    assert cold.prompts[0][:4096] == warm.prompts[3][:4096]
    assert cold.prompts[0][4096:] != warm.prompts[0][4096:]


def test_the_byte_limit_of_a_step_is_that_of_the_design() -> None:
    assert 1e3 * roofline.read_s(LLAMA, 0) == pytest.approx(3.34, abs=0.01)


def test_the_mixed_workload_is_the_one_that_vllm_was_measured_with() -> None:
    workload = Requests(LLAMA, Sizes.of(LLAMA, small=False), seed=0).mixed()
    assert len(workload.prompts) == 256
    assert workload.num_out == pytest.approx(9_880 * 14.2, rel=0.004)
    assert workload.num_out == pytest.approx(24_050 * 5.83, rel=0.002)


@pytest.mark.parametrize("step_tokens", [8192, 4096])
def test_steady_steps_have_their_context_before_the_first_has_ended(step_tokens: int) -> None:
    sizes = Sizes.of(LLAMA, small=False)
    for batch in sizes.batches:
        prompts, out = Requests(LLAMA, sizes, seed=0).steady(batch, sizes.context, sizes.window, step_tokens)
        length = len(prompts[0])
        first_is_ahead_by = batch * length // step_tokens + 1
        last_in_the_middle = sizes.context - first_is_ahead_by // 2 + sizes.window // 2
        assert last_in_the_middle + first_is_ahead_by < length + out
        assert length + first_is_ahead_by // 2 < sizes.context - sizes.window // 2 + first_is_ahead_by
    with pytest.raises(ValueError, match="raise --max-num-batched-tokens"):
        Requests(LLAMA, sizes, seed=0).steady(256, 1024, 96, 256)


# a run


def test_parts_repeats_and_other_models_are_taken_from_the_command_line(tmp_path: Path) -> None:
    options = ("--parts", "single", "--repeat", "3", "--model-shape", "qwen3-0.6b", "--max-num-batched-tokens", "32")
    assert quick(tmp_path, *options) == 0
    rows = rows_of(tmp_path)
    assert {row["workload"].partition(":")[0] for row in rows} == {"tiny qwen3-0.6b single"}
    assert {row["n"] for row in rows if row["metric"] == "total"} == {3}


def test_a_request_that_is_answered_short_has_a_row_that_says_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Engine.generate

    def short(self: Engine, prompts: Any, *arguments: Any, **options: Any) -> list[Completion]:
        completions = honest(self, prompts, *arguments, **options)
        if len(completions) > 1:
            completions[1].outputs[0].token_ids.pop()
        return completions

    monkeypatch.setattr(Engine, "generate", short)
    assert quick(tmp_path, "--parts", "mixed", "single") == 1
    rows = rows_of(tmp_path)
    assert [row["metric"] for row in rows if " mixed:" in row["workload"]] == ["failed"]
    assert any(row["metric"] == "total" for row in rows if " single:" in row["workload"]), "the others go on"


def test_a_wrong_prefix_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache that says that it has a prefix, and has not."""
    honest = PrefixCache.attach

    def lie(self: PrefixCache, *arguments: Any, **options: Any) -> Attached:
        attached = honest(self, *arguments, **options)
        for layer in self.cache.layout.group_of if attached.num_tokens else ():
            for plane in (self.cache.k(layer), self.cache.v(layer)):
                plane[attached.sequence.slot, : attached.num_tokens] = 0
        return attached

    monkeypatch.setattr(PrefixCache, "attach", lie)
    assert quick(tmp_path, "--parts", "shared") == 1
    assert [row["metric"] for row in rows_of(tmp_path)] == ["failed"]
    assert "than it has alone" in capsys.readouterr().out


def test_an_engine_that_breaks_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = Engine.generate, 0

    def once(self: Engine, *arguments: Any, **options: Any) -> list[Completion]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("this Engine is broken")
        return honest(self, *arguments, **options)

    monkeypatch.setattr(Engine, "generate", once)
    assert quick(tmp_path, "--parts", "single", "first") == 1
    assert {(row["workload"].split()[2], row["metric"]) for row in rows_of(tmp_path)} >= {
        ("single:", "failed"),
        ("first:", "first token"),
    }


def test_what_cannot_be_measured_is_refused_before_anything_is(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, complaint in (
        (["serve", "--parts", "mixt"], f"no part mixt; serve has {', '.join(PARTS)}"),
        (["serve", "prefix", "--parts", "mixed"], "serve and prefix have different ones; name one suite"),
        (["serve", "--repeat", "0"], "--repeat 0: at least 1"),
        (["serve", "--cases", "64x8K"], "--cases is of kernels, which is not wanted here"),
        (
            ["serve", "--parts", "closed", "single", "--cases", "chat"],
            "serve's part single has none; closed, rates, bursts, outside",
        ),
        (["serve", "--quick", "--parts", "rates", "bursts", "--cases", "8", "9"], "no case 9: rates has 4, 8; bursts has 8"),
        (["serve", "append", "--fa3", __file__], "--fa3 is of kernels, which is not wanted here"),
        (["serve", "--quick", "--max-num-batched-tokens", "15"], "15 is less than the 16 sequences"),
        (["append", "--device", "cuda:64"], "--device cuda:64: torch sees"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run.main(arguments)
        assert complaint in capsys.readouterr().err


# checks


def answers(*tokens: list[int], likeliest: list[dict[int, float]] | None = None) -> Answers:
    return Answers(tokens=list(tokens), seconds=1.0, first_s=[], cached_tokens=0, likeliest=likeliest or [])


def test_answers_of_two_runs_are_the_same_or_counted() -> None:
    runs = [answers([1, 2], [3]), answers([1, 2], [3])]
    assert share_of_same(runs, strict=True) == 1
    runs.append(answers([1, 2], [4]))
    assert share_of_same(runs, strict=False) == 0.5
    with pytest.raises(WrongNumbers, match="1 of 2 requests have other tokens"):
        share_of_same(runs, strict=True)


def test_log_probabilities_are_compared_where_both_have_them() -> None:
    right = {token: -0.1 * token for token in range(20)}
    alone = Alone(sampled=[3], likeliest=[right], shift=0.2, tolerance=0.15)
    near = {token + 2: value - 0.2 + 0.02 for token, value in right.items()}
    assert alone.check(answers(likeliest=[near])) == pytest.approx(0.1)
    with pytest.raises(WrongNumbers, match=r"off by 25 % of what another prompt would change, at most 15 %"):
        alone.check(answers(likeliest=[{token: value + 0.05 for token, value in right.items()}]))
    with pytest.raises(WrongNumbers, match="off by nan"):
        alone.check(answers(likeliest=[dict.fromkeys(right, float("nan"))]))
    with pytest.raises(WrongNumbers, match="request 3 has other likeliest"):
        alone.check(answers(likeliest=[{token + 11: value for token, value in right.items()}]))
    assert distance([{1: 0.0}], [{2: 0.0}]) == float("inf")


# times from inside


def test_only_steps_between_steps_alike_are_timed() -> None:
    decode = [Read(100.0 * number, 2, 2 * (10 + number), False) for number in range(6)]
    steps = Steps(reads=[*decode[:3], decode[3]._replace(has_chunks=True), *decode[4:], Read(600.0, 1, 16, False)])
    assert steps.between_us(2, range(11, 16)) == [(100.0, 11.0), (100.0, 12.0), (100.0, 15.0)]
    assert steps.between_us(2, range(12, 15)) == [(100.0, 12.0)]
    hosted = Steps(hosted=[Hosted(2, True, 9, 0), Hosted(2, False, 7, 1), Hosted(1, False, 5, 0)])
    assert hosted.host_us(2) == [Hosted(2, False, 7, 1)]


def test_an_instant_belongs_to_the_kernel_that_has_run_longest() -> None:
    one = [
        Kernel(STEP_BEGINS, 0, 2),
        Kernel("multiply_in_registers", 1, 10),  # waits for 1 us in its beginning
        Kernel("attend_tiles", 12, 20),
        Kernel("_rms_norm", 14, 19),  # all of it behind another
        Kernel("nvjet_tst_128x64", 20, 29),
    ]
    kernels = [kernel._replace(start_us=kernel.start_us + at, end_us=kernel.end_us + at) for at in (0, 30) for kernel in one]
    kernels.append(Kernel(STEP_BEGINS, 60, 62))
    first, second = steps_of(reversed(kernels))
    assert first == second
    assert first.total_us == 30
    assert first.by_kind_us == {"attention": 8, "GEMM": 8 + 9, OTHER: 2}
    assert first.gaps_us == pytest.approx(3)
    assert first.between_us == 1
    assert first.num_kernels == 5


def test_a_trace_without_whole_steps_is_refused() -> None:
    with pytest.raises(WrongNumbers, match="no whole one"):
        steps_of([Kernel(STEP_BEGINS, 0, 1)])
    kernels = [Kernel(STEP_BEGINS, 0, 1), Kernel(STEP_BEGINS, 5, 6), *(Kernel("append", at, at + 1) for at in range(6, 12))]
    with pytest.raises(WrongNumbers, match="not steady"):
        steps_of([*kernels, Kernel(STEP_BEGINS, 20, 21)])


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        ("step", STEP_BEGINS, OTHER),
        ("linear_registers", "multiply_in_registers", "GEMM"),
        ("linear_dots", "multiply_by_dots", "GEMM"),
        ("decode_tiles", "attend_tiles", "attention"),
        ("decode_merge", "merge_partials", "attention"),
        ("cascade_tiles", "attend_groups", "attention"),
        ("cascade_merge", "merge_groups", "attention"),
        ("prefill", "_prefill", "attention"),
        ("append", "_rotate_and_write", OTHER),
        ("norm", "_rms_norm", OTHER),
    ],
)
def test_our_kernels_have_the_names_by_which_they_are_told_apart(module: str, name: str, kind: str) -> None:
    source = (ROOT / "kernels" / f"{module}.py").read_text()
    assert re.search(rf"@triton\.jit[^@]*?\ndef {name}\(", source), f"kernels/{module}.py has no kernel {name}"
    assert kind_of(name) == kind


def test_kernels_of_libraries_are_told_apart() -> None:
    for name in ("nvjet_tst_192x192_64x4_2x1", "cublasLt::splitKreduce_kernel", "sm90_xmma_gemm_bf16", "gemv2T_kernel_val"):
        assert kind_of(name) == "GEMM"
    assert kind_of("void at::native::vectorized_elementwise_kernel<4>") == OTHER


# bars


def row(workload: str, metric: str, unit: str, *samples: float, bound: float | None = None) -> Row:
    summary = summarize(samples)
    return Row(suite="serve", workload=workload, system="vmmkv", metric=metric, unit=unit, summary=summary, bound=bound)


def pair(workload: str, ours: float, paged: float) -> list[Row]:
    one = row(workload, "throughput", "tok/s", ours)
    return [one, dataclasses.replace(one, system="paged 16", summary=summarize([paged]))]


def test_bars_follow_from_rows() -> None:
    shape = "llama-3.1-8b"
    rows = [
        row(f"{shape} mixed: 256 requests", "throughput", "tok/s", 10_300, 10_600),
        row(f"{shape} first: 8192 tokens", "first token", "ms", 207.5, 207.9),
        row(f"{shape} shared warm: 128 requests", "total", "s", 1.2, 1.3),
        row(f"{shape} breakdown: batch 1, context 1024", "gap between steps", "% of the step", 1.9),
        row(f"{shape} breakdown: batch 64, context 1024", "gap between steps", "% of the step", 2.1),
        row(f"{shape} host 256: batch 16, context 256", "host", "us", 100),
        row(f"{shape} host 8192: batch 16, context 8192", "host", "us", 105),
        *pair(f"{shape} rates: chat, 2 requests/s, Poisson", 100, 100),
        *pair(f"{shape} rates: chat, 4 requests/s, Poisson", 98, 100),
        *pair(f"{shape} closed: chat: 192 requests", 110, 100),
        row(f"{shape} closed: uniform: 256 requests", "throughput", "tok/s", 110),
    ]
    held = {bar.text.partition(", ")[2]: (bar.holds, dict(bar.figures)) for bar in bars(rows)}
    assert held["mixed, tok/s"] == (True, {"median": 10_450})
    assert held["first, ms"][0] is False
    assert held["shared warm, s"] == (True, {"median": 1.25})
    assert held["shared cold, s"] == (False, {})
    assert held["gap between decode steps, %"] == (False, {"batch 1": 1.9, "batch 64": 2.1})
    assert held["host time a step at a long context against a short one"] == (True, {"8192 over 256": 1.05})
    assert held["rates: throughput over that of paged 16"] == (
        False,
        {"2 requests/s, Poisson": 1.0, "4 requests/s, Poisson": 0.98},
    )
    assert held["closed: throughput over that of paged 16"] == (True, {"chat": 1.1})
    assert not list(bars([row("tiny llama-3.1-8b mixed: 10 requests", "throughput", "tok/s", 1.0)]))


def test_the_table_says_that_vllms_figures_are_from_elsewhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from bench.report import Report
    from bench.rows import Provenance, RowFile
    from bench.serve.bars import print_tables

    provenance = Provenance.collect(torch.device("cpu"), seed=0, quick=False, commit="abc123")
    report = Report(RowFile(tmp_path, provenance))
    report.add(row("qwen3-0.6b mixed: 256 requests", "throughput", "tok/s", 30_000, bound=37_000))
    print_tables(report)
    printed = capsys.readouterr().out
    assert "measured elsewhere" in printed
    assert re.search(r"30,000\s+37,000\s+81 %\s+24,050\s+1\.25", printed)
    assert "- [x] qwen3-0.6b, mixed, tok/s (>= 28,900): median 30,000" in printed
    assert len(rows_of(tmp_path)) == 1, "vLLM's figures are no rows"


def test_the_middle_of_two_is_their_mean() -> None:
    assert middle(summarize([1.0, 3.0])) == 2
    assert middle(summarize([1.0, 2.0, 9.0])) == 2
    assert middle(exact(4.0, 2)) == 4


def test_by_default_a_gpu_measures_the_shapes_of_which_something_is_promised() -> None:
    from bench.serve import _passes

    settings = Settings(
        device=torch.device("cuda:0"), shape=SHAPES["llama-3.1-8b"], shapes=tuple(SHAPES[name] for name in MODELS)
    )
    passes = [(shape.name, names) for shape, names in _passes(settings)]
    assert {name for name, _ in passes} == set(PROMISES)
    assert [name for name, names in passes if "long" in names] == ["llama-3.1-8b"], "nothing is promised of the other's"
    in_order = [part for _, names in passes for part in names]
    assert in_order[-2:] == ["breakdown", "breakdown"], "the profiler slows what is timed behind it"
    assert "breakdown" not in in_order[:-2]
