"""Rows can be read again, and two sets of them compared; the command line refuses in one line what it cannot do."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.cli import main
from bench.compare import compare
from bench.compare import main as compare_main
from bench.harness import Recorder, Settings, WrongNumbers
from bench.rows import FAILED, Provenance, Recorded, Row, RowFile, Summary, exact, newest, read, summarize
from tests.unit.recorded import provenance, recorder_in, register


def recorded(
    p50: float, *, metric: str = "total", unit: str = "s", spread: float = 0.0, made: Provenance | None = None, n: int = 9
) -> Recorded:
    summary = Summary(p20=p50 - spread, p50=p50, p80=p50 + spread, p99=p50 + spread, n=n)
    row = Row(suite="prefix", workload="w", system="vmmkv", metric=metric, unit=unit, summary=summary)
    return Recorded(row=row, provenance=made or provenance())


def test_percentiles_are_samples_and_the_median_of_two_is_their_mean() -> None:
    summary = summarize([5, 1, 4, 2, 3])
    assert (summary.p20, summary.p50, summary.p80, summary.p99, summary.n) == (1, 3, 4, 5, 5)
    assert summarize([1, 2]).median == 1.5
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    file = RowFile(tmp_path, provenance())
    row = Row(suite="kernels", workload="w", system="s", metric="layer", unit="us", summary=summarize([1.5, 2.5]), bound=1.0)
    (tmp_path / "kernels.jsonl").write_text('{"cut')
    file.append(row)
    (tmp_path / "kernels.jsonl").write_text((tmp_path / "kernels.jsonl").read_text().partition("\n")[2])
    assert [one.row for one in read([tmp_path])] == [row]
    assert read([tmp_path], "ab")[0].provenance == file.provenance


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"suite": "x"', r"rows\.jsonl:1: not a row.*remove the line"),
        ('{"suite": "x"}', r"rows\.jsonl:1: not a row.*remove the line"),
        ("", "no row in"),
    ],
)
def test_what_is_no_row_is_refused_by_file_and_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ValueError, match=said):
        read([tmp_path / "rows.jsonl"])
    with pytest.raises(ValueError, match="no such file or folder"):
        read([tmp_path / "absent"])


def test_of_rows_of_the_same_thing_the_newest_of_a_device_counts() -> None:
    old, new = recorded(1, made=provenance("2026-01-01")), recorded(2, made=provenance("2026-01-02"))
    elsewhere = recorded(3, made=provenance(device="CPU"))
    assert newest([old, new, elsewhere]) == [new, elsewhere]


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (recorded(1.0), recorded(1.019), "alike"),
        (recorded(1.0), recorded(1.03), "worse"),
        (recorded(1.0), recorded(0.97), "better"),
        (recorded(1.0, spread=0.1), recorded(1.03), "unclear"),
        (recorded(1.0, metric="throughput", unit="tok/s"), recorded(1.03, metric="throughput", unit="tok/s"), "better"),
        (recorded(1.0, metric="rate", unit="requests/s"), recorded(2.0, metric="rate", unit="requests/s"), "unclear"),
        (recorded(0.0), recorded(1.0), "worse"),
    ],
)
def test_a_median_is_worse_by_more_than_the_limit_and_the_spread(old: Recorded, new: Recorded, verdict: str) -> None:
    (pair,) = compare([old], [new], 0.02)
    assert pair.verdict == verdict


def test_rows_of_two_devices_and_quick_rows_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="devices differ: H200 against CPU"):
        compare([recorded(1)], [recorded(1, made=provenance(device="CPU"))], 0.02)
    with pytest.raises(ValueError, match="no row that is not quick"):
        compare([recorded(1)], [recorded(1, made=provenance(quick=True))], 0.02)


def test_compare_names_what_is_worse_and_exits_with_1_if_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "prefix.jsonl"
    for p50, commit in ((1.0, "aaa"), (1.5, "bbb")):
        RowFile(tmp_path, provenance(commit=commit)).append(recorded(p50).row)
    sides = [f"{path}@aaa", f"{path}@bbb"]
    assert compare_main(sides) == 0
    printed = capsys.readouterr().out
    assert re.search(r"worse\s+prefix\s+w\s+vmmkv\s+total.*\+50\.0 %", printed)
    assert "1 rows on both sides: 1 worse, 0 better, 0 unclear, 0 alike" in printed
    assert compare_main([*sides, "--fail-on-loss"]) == 1
    assert compare_main([*reversed(sides), "--fail-on-loss"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "no suite or command nothing; suites: whole, divided, all; commands: report, compare"),
        (["whole", "--device", "tpu"], "no such device; there are cpu, cuda"),
        (["whole", "--steps", "0"], "argument --steps: 0 is less than 1"),
        (["whole", "--parts", "decode"], "--parts: whole have none"),
        (["divided", "--parts", "x"], "no part x; divided has decode"),
        (["divided", "--cases", "9x9"], "no case 9x9: decode has 2x96, skewed"),
        (["divided", "--repeat", "3"], "it is repeated 3 times"),
        (["compare", "absent", "absent"], "absent: no such file or folder"),
        (["report", "absent"], "absent: no such file or folder"),
        (["whole", "--frob"], "unrecognized arguments: --frob"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(settings: Settings) -> None:
        if settings.repeat == 3:
            raise ValueError("it is repeated 3 times")

    cases = {"decode": ["2x96", "skewed"]}
    divided = SimpleNamespace(PARTS=("decode",), cases_of=lambda settings: cases, check=check)
    register(monkeypatch, whole=SimpleNamespace(), divided=divided)
    where = (
        [] if arguments[0] in ("compare", "report") or "--device" in arguments else ["--device", "cpu", "--out", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as ended:
        main([*arguments, *where])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["--help"], ["whole", "--help"], ["compare", "--help"]])
def test_help_says_what_there_is(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(arguments) == 0
    except SystemExit as ended:
        assert ended.code == 0
    assert "usage: " in capsys.readouterr().out


def test_a_failed_suite_has_a_row_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(recorder: Recorder) -> None:
        if recorder.suite == "one":
            with recorder.guarded("one workload", "a system"):
                raise WrongNumbers("two and two are five")
            raise OSError("no disk")
        recorder.figure("w", "s", "m", "us", 1.0)

    register(monkeypatch, one=SimpleNamespace(run=run), other=SimpleNamespace(run=run))
    assert main(["one", "other", "--device", "cpu", "--out", str(tmp_path)]) == 1
    failed = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert [(row["workload"], row["system"], row["metric"]) for row in failed] == [
        ("one workload", "a system", FAILED),
        ("one", "-", FAILED),
    ]
    assert (tmp_path / "other.jsonl").exists()
    printed = capsys.readouterr().out
    assert "two and two are five" in printed
    assert "FAILED: one workload; one" in printed


def test_what_was_measured_before_an_interruption_is_kept_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(recorder: Recorder) -> None:
        recorder.figure("w", "s", "m", "us", 12.5)
        raise KeyboardInterrupt

    register(monkeypatch, one=SimpleNamespace(run=run))
    with pytest.raises(KeyboardInterrupt):
        main(["one", "--device", "cpu", "--out", str(tmp_path)])
    assert "12.5" in capsys.readouterr().out
    assert len(read([tmp_path])) == 1


def test_bounds_of_times_are_left_out_on_a_cpu(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    recorder.figure("w", "s", "m", "us", 1.0, bound=2.0)
    recorder.figure("w", "s", "held", "GiB", 1.0, bound=2.0)
    assert [row.bound for row in recorder.rows] == [None, 2.0]
    assert recorder.rows[0].summary == exact(1.0, 1)
