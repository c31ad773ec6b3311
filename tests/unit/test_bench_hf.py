"""The hf suite: caches of transformers under one loop, no report of what is wrong, meters that count, and the bars."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import run
from bench.hf import PARTS, caches, check, decode, fitting, memory
from bench.hf.agreement import Expected, Judge
from bench.hf.bars import bars
from bench.hf.caches import ATTENDING, DYNAMIC, STATIC, SYSTEMS, VMMKV
from bench.hf.context import Context
from bench.hf.meter import meter_of
from bench.hf.rows import Rows, plan_of
from bench.hf.sizes import Sizes
from bench.report import Report
from bench.rows import Provenance, Row, RowFile
from bench.serve.models import ServedModel, model_of
from bench.settings import SHAPES, Settings
from bench.timing import WrongNumbers, exact
from vmmkv.units import MIB

CPU = torch.device("cpu")
QUICK = Settings(device=CPU, shape=SHAPES["llama-3.1-8b"], quick=True)
LLAMA = model_of("llama-3.1-8b", tiny=False)
SMALL = ServedModel(name="small", config={**LLAMA.config, "num_hidden_layers": 3})
"""Rows of 12 KiB."""


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    provenance = Provenance.collect(CPU, seed=0, quick=True, commit="abc123")
    with torch.no_grad():
        yield Context(QUICK, Report(RowFile(tmp_path, provenance)))


def rows_of(*, batch: int = 2, seed: int = 3) -> Rows:
    return Rows(SMALL, CPU, batch=batch, pass_tokens=16, seed=seed)


# what is wrong


class Forgetful:
    """A memory whose caches lose the first token's keys of every pass of the last layer."""

    own_bytes = 0

    def __init__(self, config: Any) -> None:
        self._config = config

    def open(self, num_sequences: int, max_tokens: int) -> Any:
        from transformers import DynamicCache

        last = self._config.num_hidden_layers - 1

        class Cache(DynamicCache):  # type: ignore[misc]
            def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any) -> Any:
                if layer_idx == last:
                    key_states = key_states.clone()
                    key_states[:, :, 0] = 0
                return super().update(key_states, value_states, layer_idx)

        return Cache(config=self._config)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of VmmCache."""
    real = caches.memory_of

    @contextmanager
    def memory_of(system: str, config: Any, device: torch.device, budget_bytes: int) -> Iterator[Any]:
        if system == VMMKV:
            yield Forgetful(config)
        else:
            with real(system, config, device, budget_bytes) as found:
                yield found

    for module in (decode, memory, fitting):
        monkeypatch.setattr(module, "memory_of", memory_of)


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("part", PARTS)
def test_a_cache_that_loses_keys_has_no_rows(context: Context, part: str) -> None:
    PARTS[part].run(context, lambda name: None)
    assert context.failures and all(type(error) is WrongNumbers for error in context.failures)
    assert all(VMMKV in note for error in context.failures for note in error.__notes__)
    assert {row.system for row in context.report.rows} == {DYNAMIC, STATIC}


@pytest.mark.filterwarnings("ignore:attention by transformers' sdpa")
def test_attention_that_fails_leaves_the_rows_of_what_ran_before(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the last that runs, and the first system's figures are those that all others are held against."""
    monkeypatch.setattr(Settings, "on_gpu", property(lambda settings: True))  # on a CPU its kernels decline every layer
    decode.run(context, lambda name: None)
    assert all(type(error) is WrongNumbers and ATTENDING in error.__notes__[0] for error in context.failures)
    assert len(context.failures) == 2 * len(context.sizes.contexts)
    assert {row.system for row in context.report.rows} == set(SYSTEMS)


def test_compiled_steps_are_the_last_and_leave_what_was_measured_before(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    first, *_ = context.sizes.contexts
    context.sizes = replace(context.sizes, compiled=(first,))  # type: ignore[misc]
    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    decode.run(context, lambda name: None)
    names = {error.__notes__[0].partition(", batch 1, ")[2] for error in context.failures}
    assert names == {STATIC + decode.COMPILED, VMMKV + ATTENDING + decode.COMPILED}
    steps = {(row.workload, row.system): row.summary.n for row in context.report.rows if row.metric == decode.STEP}
    assert {system for _, system in steps} == set(SYSTEMS)
    of_first = decode.workload_of(context.decoder.name, 1, first)
    assert steps[of_first, DYNAMIC] == 2 * steps[of_first, VMMKV], "as many as others take by two ways"


def test_on_a_gpu_vmmkvs_attention_is_measured_eagerly_before_it_is_compiled(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "on_gpu", property(lambda settings: True))
    context.sizes = replace(context.sizes, compiled=(64,))  # type: ignore[misc]
    ways = decode._ways(context, torch.nn.Identity(), VMMKV, 64)
    assert [(way.name, way.again) for way in ways] == [
        (VMMKV, False),
        (VMMKV + ATTENDING, True),
        (VMMKV + ATTENDING + decode.COMPILED, False),
    ]


def test_a_run_with_a_wrong_cache_fails_and_says_of_whom(
    forgetful: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(("hf", "--parts", "decode", "--quick", "--device", "cpu", "--out", str(tmp_path))) == 1
    assert f"{VMMKV}: WrongNumbers" in capsys.readouterr().out


def test_logits_and_tokens_are_held_against_the_first_systems() -> None:
    right_BV = torch.tensor([[1.0, 1.0 + 5e-4, 0.0]])
    expected = Expected()
    of_first = Judge(expected, torch.float32, first=True)
    of_first.take(right_BV)
    of_first.judge("first")
    for wrong_BV, complaint in (
        (torch.tensor([[1.0, 1.1, 0.0]]), "logits are off by"),
        (torch.tensor([[1.0, float("nan"), 0.0]]), "logits are off by nan"),
        (torch.tensor([[1.0 + 6e-4, 1.0 + 5e-4, 0.0]]), "0 % of the tokens"),
    ):
        judge = Judge(expected, torch.float32, first=False)
        judge.take(wrong_BV)
        with pytest.raises(WrongNumbers, match=complaint):
            judge.judge("other")
    judge = Judge(expected, torch.float32, first=False)
    judge.take(right_BV.clone())
    judge.judge("other")
    assert judge.off == {"other": [0.0]} and judge.share_same("other") == 1
    assert judge.next_ids().tolist() == [[1]]


@pytest.mark.parametrize(("layer", "plane"), [(0, "keys"), (0, "values"), (2, "keys"), (2, "values")])
@pytest.mark.parametrize(("dtype", "wrong"), [(torch.float32, 1.01), (torch.bfloat16, -1.0), (torch.bfloat16, float("nan"))])
def test_one_wrong_row_among_all_is_found(layer: int, plane: str, dtype: torch.dtype, wrong: float) -> None:
    def cache_of() -> Any:
        generator = torch.Generator().manual_seed(0)
        size = (2, 2, 50, 8)
        layers = [{name: torch.randn(size, generator=generator) for name in ("keys", "values")} for _ in range(3)]
        return SimpleNamespace(layers=[SimpleNamespace(**each) for each in layers])

    expected, cache = Expected(), cache_of()
    Judge(expected, dtype, first=True).judge_rows(cache_of(), 48)
    judge = Judge(expected, dtype, first=False)
    judge.judge_rows(cache, 48)
    with pytest.raises(WrongNumbers, match="47 tokens were written"):
        judge.judge_rows(cache, 47)
    rows = getattr(cache.layers[layer], plane)
    rows[1, 0, 49] *= wrong  # behind the last token
    judge.judge_rows(cache, 48)
    rows[1, 0, 17] *= wrong
    with pytest.raises(WrongNumbers, match=f"{plane[0].upper()} of layer {layer}: a row is off"):
        judge.judge_rows(cache, 48)


@pytest.mark.parametrize("system", SYSTEMS)
def test_rows_are_read_as_they_were_written_and_no_others(context: Context, system: str) -> None:
    plan = plan_of(40, chunk_tokens=16, steps=3)
    assert plan == [16, 16, 5, 1, 1, 1]
    with caches.memory_of(system, context.config_of(SMALL), CPU, 64 * MIB) as of_system:
        cache = of_system.open(2, 40)
        rows_of().write(cache, plan)
        rows_of().check(cache, plan)
        for wrong in (lambda: rows_of(seed=4).check(cache, plan), lambda: rows_of().check(cache, [15, 17, *plan[2:]])):
            with pytest.raises(WrongNumbers, match="K of layer 0"):
                wrong()
        of_layers = [cache.layers[layer].keys[:, :, :40] for layer in range(3)]
        assert not any(torch.equal(of_layers[one], of_layers[other]) for one, other in ((0, 1), (0, 2), (1, 2)))


# counting


def test_the_meter_counts_what_is_new_while_it_lives_and_refuses_what_is_over_the_limit() -> None:
    old = torch.zeros(1024)
    with meter_of(CPU) as meter:
        old.add_(1)
        part = old[:10]
        assert (meter.live_bytes, meter.peak_bytes) == (0, 0)
        new = torch.cat([old, part])
        seen = new[5:]
        del new
        gc.collect()
        assert meter.live_bytes == meter.peak_bytes == 4 * 1034, "a view keeps it"
        del seen
        gc.collect()
        assert (meter.live_bytes, meter.peak_bytes) == (0, 4 * 1034)
        meter.restart()
        assert meter.peak_bytes == 0
    with meter_of(CPU, 4096) as meter, pytest.raises(torch.OutOfMemoryError, match=r"4\.0 KiB"):
        torch.cat([old, old[:1]])
    assert torch.cat([old, old]).numel() == 2048, "nothing is refused any more"


class Counted:
    """What torch's allocator says of a GPU that there is not."""

    def __init__(self) -> None:
        self.figures = {"memory_allocated": 30, "max_memory_allocated": 30, "memory_reserved": 40, "max_memory_reserved": 40}
        self.shares: list[float] = []
        """Of the device's memory that torch may have, as they were set."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """In place of torch's."""
    counted = Counted()
    for name in counted.figures:
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: counted.figures[name])
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 1000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: counted.shares.append(share))
    return counted


def test_a_gpus_meter_counts_from_where_it_began_and_limits_what_comes_on_top(counted: Counted) -> None:
    with meter_of(torch.device("cuda", 0), 60) as meter:
        counted.figures |= {"memory_allocated": 35, "max_memory_allocated": 70, "max_memory_reserved": 90}
        assert (meter.live_bytes, meter.peak_bytes, meter.taken_bytes) == (5, 40, 50)
        assert counted.shares == [0.1]
    assert counted.shares == [0.1, 1.0]


def test_a_gpus_meter_does_not_say_what_was_taken_where_some_of_it_was_kept_for_nobody(counted: Counted) -> None:
    """As CUDA graphs leave it: new tensors would come to lie where nothing is taken from the device."""
    counted.figures |= {"memory_reserved": 30 + 96 * MIB, "max_memory_reserved": 40 + 96 * MIB}
    with meter_of(torch.device("cuda", 0)) as meter:
        assert meter.taken_bytes == 10, "the rest of a segment may be kept"
    counted.figures["memory_reserved"] += MIB
    with meter_of(torch.device("cuda", 0)) as meter:
        assert meter.peak_bytes == 0, "what is in tensors does not depend on what is kept"
        with pytest.raises(WrongNumbers, match=r"kept 97\.0 MiB .* over 96\.0 MiB.*--parts memory longest mixed"):
            _ = meter.taken_bytes


def test_what_is_compiled_runs_behind_all_that_counts_memory() -> None:
    assert [*PARTS][-1] == "decode"


def test_more_sequences_than_there_are_rows_for_are_no_figure(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_admitted", lambda *_: 10_000)
    fitting.run_mixed(context, lambda name: None)
    assert not context.report.rows
    assert [type(error) for error in context.failures] == [WrongNumbers] * len(SYSTEMS)
    assert "10000 sequences were admitted, and the budget has rows for" in str(context.failures[0])


@pytest.mark.parametrize("most", [1, 100, 5000])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.97, 1.0])
def test_the_longest_is_found_to_a_thousandth(most: int, share: float) -> None:
    held, tries = int(most * share), []

    def holds(num_tokens: int) -> bool:
        tries.append(num_tokens)
        return num_tokens <= held

    found = fitting.longest_that(holds, most)
    assert held - most // 1024 <= found <= held and len(tries) <= 24
    assert found == most if share == 1 else found < most


def test_a_statics_longest_context_is_that_of_the_budget(context: Context) -> None:
    sizes = replace(context.sizes, longest_budget_bytes=16 * MIB)
    context.sizes = sizes  # type: ignore[misc]
    fitting.run_longest(context, lambda name: None)
    longest = {row.system: (row.summary.p50, row.bound) for row in context.report.rows}
    assert longest[STATIC] == (127, 128), "a few bytes are its length"
    assert not context.failures


# promises


def test_bars_compare_what_was_promised() -> None:
    step, longest, mixed = decode.workload_of("llama-3.1-8b", 8, 32768), "llama-3.1-8b longest: b", "llama-3.1-8b mixed: c"
    given = [
        (step, DYNAMIC, decode.STEP, 45.0, None),
        (step, STATIC, decode.STEP, 30.0, None),
        (step, STATIC + decode.COMPILED, decode.STEP, 20.0, None),
        (step, VMMKV, decode.STEP, 99.0, None),
        (step, VMMKV + ATTENDING, decode.STEP, 25.0, None),
        (step, VMMKV + ATTENDING + decode.COMPILED, decode.STEP, 24.0, None),
        (decode.workload_of("tiny llama-3.1-8b", 8, 32768), VMMKV + ATTENDING, decode.STEP, 1.0, None),
        ("llama-3.1-8b memory: a", VMMKV, memory.PEAK, 10.2, 10.0),
        ("llama-3.1-8b memory: a", VMMKV, memory.TAKEN, 10.6, 10.0),
        ("llama-3.1-8b memory: a", DYNAMIC, memory.PEAK, 20.0, 10.0),
        (longest, DYNAMIC, fitting.LONGEST, 90.0, 100.0),
        (longest, STATIC, fitting.LONGEST, 100.0, 100.0),
        (longest, VMMKV, fitting.LONGEST, 99.0, 100.0),
        (mixed, STATIC, fitting.ADMITTED, 5.0, 9.0),
        (mixed, VMMKV, fitting.ADMITTED, 5.0, 9.0),
    ]
    rows = [
        Row(suite="hf", workload=workload, system=system, metric=metric, unit="", summary=exact(figure, 1), bound=bound)
        for workload, system, metric, figure, bound in given
    ]
    found = list(bars(rows))
    assert [bar.holds for bar in found] == [False, True, False, True, True, False]
    assert [list(bar.figures.values()) for bar in found] == [
        pytest.approx([1.02, 1.06]),
        pytest.approx([1.8]),
        pytest.approx([25 / 30, 1.2]),
        [9.0],
        [0.99],
        [0.0],
    ]
    assert not any(bar.holds or bar.figures for bar in bars([])), "what is not measured is not kept"


def test_a_part_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no part nothing; hf has memory, longest, mixed, decode"):
        check(replace(QUICK, parts=("nothing",)))


def test_a_gpus_sizes_are_those_of_the_promise() -> None:
    sizes = Sizes.of(replace(QUICK, device=torch.device("cuda"), quick=False))
    assert (sizes.batch, max(sizes.contexts), sizes.compiled) == (8, 32768, (32768,))
    assert max(sizes.contexts) in sizes.memory_contexts
