"""The benchmarks run, check before they time, and write rows that can be read again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import append, run
from bench.decode_loop import Mode
from bench.report import Report
from bench.rows import Provenance, RowFile
from bench.settings import SHAPES, Settings
from bench.timing import WrongNumbers, exact, summarize

FIELDS = (
    *("suite", "workload", "system", "metric", "unit", "p20", "p50", "p80", "p99", "n", "bound"),
    *("device", "driver", "versions", "commit", "seed", "quick", "date"),
)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Threads of torch's that spin would take the cores from what is measured."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows_of(folder: Path, suite: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{suite}.jsonl").read_text().splitlines()]


def measured(tmp_path: Path, suite: str, *options: str) -> list[dict[str, Any]]:
    """The rows of a quick run on the CPU, each found valid."""
    arguments = (suite, "--quick", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc123", "--seed", "7", *options)
    assert run.main(arguments) == 0
    rows = rows_of(tmp_path, suite)
    for row in rows:
        assert tuple(row) == FIELDS
        assert (row["suite"], row["commit"], row["seed"], row["quick"]) == (suite, "abc123", 7, True)
        assert row["n"] > 0
        assert row["p20"] <= row["p50"] <= row["p80"] <= row["p99"]
        assert set(row["versions"]) == {"torch", "triton", "cuda_bindings", "vmmkv", "python"}
    names = [(row["workload"], row["system"], row["metric"]) for row in rows]
    assert len(set(names)) == len(names), "two rows have one name"
    return rows


def test_driver_calls_are_timed_alone_and_beside_a_thread(tmp_path: Path) -> None:
    rows = measured(tmp_path, "driver_calls")
    calls = {"reserve", "create", "map", "set_access", "unmap", "release", "fence", "memory", "export_fd", "settle"}
    for handle in ("2.0 MiB", "32.0 MiB"):
        for condition in ("alone", "beside a busy thread"):
            timed = {row["metric"] for row in rows if row["workload"] == f"{handle} handle, {condition}"}
            assert calls <= timed


def test_append_runs_every_mode_and_the_bytes_are_there(tmp_path: Path) -> None:
    rows = measured(tmp_path, "append")
    coming = [row for row in rows if row["workload"].endswith("coming and going")]
    assert {row["system"] for row in coming} == {mode.value for mode in Mode}
    stalled = {row["system"]: row["p50"] for row in coming if row["metric"] == "stalled"}
    assert stalled["off"] > 0
    assert stalled["static"] == 0
    for mode in ("slack", "adopted"):
        assert any(row["metric"] == "pumped" and row["p99"] > 0 for row in coming if row["system"] == mode)


def test_append_takes_its_sizes_from_the_command_line(tmp_path: Path) -> None:
    rows = measured(tmp_path, "append", "--sequences", "3", "--steps", "12", "--work", "sleep")
    assert all(row["workload"].startswith("3 sequences") for row in rows)
    assert {row["n"] for row in rows if row["metric"] == "step"} == {12}


def test_append_refuses_to_report_rows_that_were_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmmkv.kernels.reference.append", lambda *arguments: None)
    with pytest.raises(WrongNumbers, match="are not what was appended there"):
        append.run(quick(), report_in(tmp_path))
    assert not (tmp_path / "append.jsonl").exists()


def test_a_suite_that_fails_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(settings: Settings, report: Report) -> None:
        raise WrongNumbers("two and two are five")

    monkeypatch.setattr(append, "run", fail)
    arguments = ("append", "kernels", "--quick", "--device", "cpu", "--out", str(tmp_path))
    assert run.main(arguments) == 1
    assert rows_of(tmp_path, "kernels")
    printed = capsys.readouterr().out
    assert "two and two are five" in printed
    assert "FAILED: append" in printed


def test_rows_are_appended_and_stay(tmp_path: Path) -> None:
    first = measured(tmp_path, "kernels", "--cases", "2x96")
    assert run.main(("kernels", "--cases", "2x96", "--quick", "--device", "cpu", "--out", str(tmp_path))) == 0
    rows = rows_of(tmp_path, "kernels")
    assert rows[: len(first)] == first
    assert len(rows) == 2 * len(first)


def test_without_a_suite_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([]) == 0
    printed = capsys.readouterr().out
    assert all(suite in printed for suite in run.SUITES)


@pytest.mark.parametrize(
    ("named", "wanted"),
    [(["all"], run.ALL), (["all", "quality"], tuple(run.SUITES)), (["quality", "append"], ("quality", "append"))],
)
def test_all_leaves_quality_out_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: list[str], wanted: tuple[str, ...]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(run, "_succeeds", lambda name, settings, report: ran.append(name) or True)
    assert run.main([*named, "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert tuple(ran) == wanted


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["apend"], "no suite apend; there are"),
        (["append", "--steps", "0"], "steps=0"),
        (["append", "--device", "nowhere"], "nowhere"),
        (["kernels", "--parts", "deocde"], "no part deocde; kernels has decode"),
        (["all", "--device", "cpu", "--cases", "64x8K"], "no case 64x8K on a CPU: decode has 2x96"),
        (["kernels", "--fa3", "nowhere.so"], "nowhere.so: no such file"),
    ],
)
def test_bad_arguments_are_refused_in_words(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(arguments)
    assert complaint in capsys.readouterr().err


def test_percentiles_are_samples() -> None:
    summary = summarize([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (summary.p20, summary.p50, summary.p80, summary.p99, summary.n) == (1.0, 3.0, 4.0, 5.0, 5)
    assert exact(3, 10).p99 == 3
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_the_shape_of_llama_has_the_rows_of_the_design() -> None:
    assert SHAPES["llama-3.1-8b"].layout.row_bytes == 128 * 1024
    assert SHAPES["smollm2-135m"].layout.row_bytes == 22.5 * 1024


def quick() -> Settings:
    return Settings(device=torch.device("cpu"), shape=SHAPES["wide"], quick=True)


def report_in(folder: Path) -> Report:
    return Report(RowFile(folder, Provenance.collect(torch.device("cpu"), seed=0, quick=True, commit="abc123")))
