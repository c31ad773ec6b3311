"""`python -m bench compare`: what is real comes first, noise is none of it, and nothing is judged that cannot be compared."""

import re
from pathlib import Path

import pytest
import torch

from bench import run
from bench.report import Report
from bench.rows import Provenance, Row, RowFile
from bench.timing import Summary, exact, summarize
from bench.verdict import change, differ, higher_is_better


def spread(middle: float, half: float, n: int = 50) -> Summary:
    return Summary(p20=middle - half, p50=middle, p80=middle + half, p99=middle + 2 * half, n=n)


def write(
    folder: Path,
    *rows: Row,
    commit: str = "abc",
    device: str = "GPU",
    quick: bool = False,
    date: str = "2026-01-01T00:00:00+00:00",
) -> str:
    collected = Provenance.collect(torch.device("cpu"), seed=0, quick=quick, commit=commit)
    provenance = Provenance(
        device=device, driver="1", versions=collected.versions, commit=commit, seed=0, quick=quick, date=date
    )
    Report(RowFile(folder, provenance)).add(*rows)
    return str(folder)


def row(system: str, summary: Summary, metric: str = "step", unit: str = "us") -> Row:
    return Row(suite="append", workload="w", system=system, metric=metric, unit=unit, summary=summary)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who runs the tests in several processes gives each a narrow console."""
    monkeypatch.setenv("COLUMNS", "200")


def verdicts(printed: str) -> list[tuple[str, str]]:
    """The table's lines: verdict and system."""
    return re.findall(r"^ +(worse|better|other|noise|not judged) +append +w +(\w+)", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("one", "other", "real"),
    [
        (spread(100, 5), spread(120, 5), True),
        (spread(100, 5), spread(108, 5), False),  # the intervals meet
        (spread(100, 0.1), spread(101.5, 0.1), False),  # below 2 %
        (spread(100, 0.1), spread(103, 0.1), True),
        (spread(100, 0.1, n=2), spread(103, 0.1), False),  # of two samples
        (spread(100, 0.1, n=2), spread(106, 0.1), True),
        (exact(0, 9), exact(1, 9), True),
        (exact(0, 9), exact(0, 9), False),
        (exact(-100, 9), exact(-110, 9), True),
    ],
)
def test_a_change_is_real_beyond_the_intervals_and_the_least_share_either_way(one: Summary, other: Summary, real: bool) -> None:
    assert differ(one, other) is real
    assert differ(other, one) is real


def test_a_change_is_a_share_of_what_was_and_none_from_nothing() -> None:
    assert change(exact(-10, 1), exact(-5, 1)) == 0.5
    assert change(exact(0, 1), exact(5, 1)) is None
    assert change(exact(0, 1), exact(0, 1)) == 0


def test_time_and_memory_are_better_when_less_rates_when_more_and_some_are_neither() -> None:
    assert higher_is_better("first token", "ms") is False
    assert higher_is_better("memory, held", "GiB") is False
    assert higher_is_better("throughput", "tok/s") is True
    assert higher_is_better("goodput", "requests/s") is True
    assert higher_is_better("rate", "requests/s") is None
    assert higher_is_better("waste, averaged", "%") is False
    assert higher_is_better("by alias", "%") is None


def test_real_changes_come_first_by_their_size_and_losses_before_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write(
        tmp_path / "a",
        row("noisy", spread(100, 20)),
        row("slower", spread(100, 1)),
        row("faster", spread(100, 1)),
        row("slowest", spread(100, 1)),
        row("gone", spread(1, 0)),
        row("neither", spread(100, 1), "pumped", "pages/step"),
    )
    after = write(
        tmp_path / "b",
        row("noisy", spread(110, 20)),
        row("slower", spread(110, 1)),
        row("faster", spread(50, 1)),
        row("slowest", spread(200, 1)),
        row("neither", spread(200, 1), "pumped", "pages/step"),
        commit="def",
    )
    assert run.main(["compare", before, after]) == 0
    printed = capsys.readouterr().out
    real = [("worse", "slowest"), ("worse", "slower"), ("better", "faster"), ("other", "neither")]
    assert verdicts(printed) == real
    assert "+100.0 %" in printed
    summary = "5 rows on both sides: 2 worse, 1 better, 1 other, 1 noise, 0 not judged"
    assert printed.splitlines()[-1] == f"{summary}; 1 not shown: --all shows them"
    assert run.main(["compare", before, after, "--all"]) == 0
    everything = capsys.readouterr().out
    assert verdicts(everything) == [*real, ("noise", "noisy")]
    assert everything.splitlines()[-1] == summary
    assert "1 rows only in A: 1 of append" in printed
    assert "only in B" not in printed


def test_only_fail_on_loss_makes_a_loss_a_failure(tmp_path: Path) -> None:
    fast = write(tmp_path / "a", row("s", spread(100, 1)))
    slow = write(tmp_path / "b", row("s", spread(200, 1)))
    assert run.main(["compare", fast, slow]) == 0
    assert run.main(["compare", fast, slow, "--fail-on-loss"]) == 1
    assert run.main(["compare", slow, fast, "--fail-on-loss"]) == 0


def test_what_has_failed_since_is_a_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write(tmp_path / "a", row("s", spread(100, 1)))
    failed = write(tmp_path / "b", row("s", spread(100, 1)), Row.failed("append", "w", "vmmkv"))
    assert run.main(["compare", whole, failed, "--fail-on-loss"]) == 1
    assert "FAILED in B, not in A: append: w" in capsys.readouterr().out
    assert run.main(["compare", failed, failed, "--fail-on-loss"]) == 0
    assert "FAILED in both: append: w" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "quick", "warning"), [("other", False, "devices differ: GPU against other"), ("GPU", True, "of --quick")]
)
def test_rows_of_two_devices_and_quick_ones_are_shown_and_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str, quick: bool, warning: str
) -> None:
    before = write(tmp_path / "a", row("s", spread(100, 1)))
    after = write(tmp_path / "b", row("s", spread(200, 1)), device=device, quick=quick)
    assert run.main(["compare", before, after, "--fail-on-loss", "--all"]) == 0
    printed = capsys.readouterr().out
    assert warning in printed
    assert verdicts(printed) == [("not judged", "s")]


def test_a_commit_behind_the_file_selects_its_rows_and_else_the_newest_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, row("s", spread(100, 1)), commit="aaa1")
    write(tmp_path, row("s", spread(200, 1)), commit="bbb2", date="2026-01-02T00:00:00+00:00")
    path = str(tmp_path / "append.jsonl")
    assert run.main(["compare", f"{path}@aaa", f"{path}@bbb"]) == 0
    assert verdicts(capsys.readouterr().out) == [("worse", "s")]
    assert run.main(["compare", "--all", path, f"{path}@bbb"]) == 0
    assert verdicts(capsys.readouterr().out) == [("noise", "s")]
    for wrong, complaint in (("ccc", "no row of commit ccc"), ("", "no commit stands behind the @")):
        with pytest.raises(SystemExit, match="2"):
            run.main(["compare", f"{path}@{wrong}", path])
        printed = capsys.readouterr().err
        assert complaint in printed
        assert "there are aaa1, bbb2" in printed


def test_what_stands_on_either_side_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "a", row("s", spread(100, 1)), row("t", spread(100, 1)), commit="aaa1")
    write(tmp_path / "a", row("t", spread(100, 1)), commit="ccc3", date="2026-01-03T00:00:00+00:00")
    new = write(
        tmp_path / "b", row("s", spread(200, 1)), row("t", spread(100, 1)), commit="bbb2", date="2026-02-02T00:00:00+00:00"
    )
    assert run.main(["compare", old, new]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == "A: 1 rows of GPU, commit aaa1 of 2026-01-01; 1 rows of GPU, commit ccc3 of 2026-01-03"
    assert second == "B: 2 rows of GPU, commit bbb2 of 2026-02-02"


def test_what_has_nothing_in_common_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write(tmp_path / "a", row("s", spread(100, 1)))
    after = write(tmp_path / "b", row("t", spread(100, 1)))
    for options in ([], ["--fail-on-loss"]):
        with pytest.raises(SystemExit, match="2"):
            run.main(["compare", before, after, *options])
        assert "nothing to compare" in capsys.readouterr().err


def test_a_quick_row_takes_the_place_of_no_full_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write(tmp_path / "a", row("s", spread(100, 1)))
    after = write(tmp_path / "b", row("s", spread(200, 1)))
    write(tmp_path / "b", row("s", spread(100, 1)), quick=True, date="2026-01-02T00:00:00+00:00")
    assert run.main(["compare", before, after]) == 0
    assert verdicts(capsys.readouterr().out) == [("worse", "s")]


def test_of_two_samples_the_mean_is_shown_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write(tmp_path / "a", row("s", summarize([100.0, 110.0])))
    after = write(tmp_path / "b", row("s", summarize([120.0, 310.0])))
    assert run.main(["compare", before, after]) == 0
    assert re.search(r" 105 +100\.\.110 +2 +215 +120\.\.310 +2 +\+104\.8 %", capsys.readouterr().out)


def test_what_is_a_difference_itself_has_no_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write(tmp_path / "a", row("s", spread(0.5, 0), "perplexity above exact", "%"))
    after = write(tmp_path / "b", row("s", spread(133, 0), "perplexity above exact", "%"))
    assert run.main(["compare", before, after]) == 0
    printed = capsys.readouterr().out
    assert re.search(r" \+132 +% *$", printed, re.MULTILINE)
    assert verdicts(printed) == [("worse", "s")]


def test_the_table_is_as_wide_as_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write(tmp_path / "a", row("s " + "word " * 30, spread(100, 1)))
    after = write(tmp_path / "b", row("s " + "word " * 30, spread(200, 1)))
    widths = []
    for columns in ("120", "150"):
        monkeypatch.setenv("COLUMNS", columns)
        assert run.main(["compare", before, after]) == 0
        widths.append(max(map(len, capsys.readouterr().out.splitlines())))
    assert widths == [120, 150]


def test_a_line_that_is_no_row_is_named_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "append.jsonl"
    write(tmp_path, row("s", spread(100, 1)))
    with path.open("a") as file:
        file.write("not a row\n")
    write(tmp_path, row("t", spread(100, 1)))
    assert run.main(["compare", str(path), str(path)]) == 0
    assert f"{path}:2: not a row; 1 line is left out" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compare", "table", "report"])
def test_every_command_says_alike_what_a_wrong_file_is(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tmp_path / "words.txt"
    words.write_text("no row\nand none\n")
    broken = write(tmp_path / "rows", row("s", spread(100, 1)))
    (Path(broken) / "append.jsonl").write_text((Path(broken) / "append.jsonl").read_text().replace("100", '"100"'))
    for path, complaint in (
        (words, f"{words}:1: not a row; rows are lines of JSON"),
        (tmp_path / "nowhere", "no such file or folder"),
        (broken, "append.jsonl:1: no row: its p50 should be numbers"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run.main([command, str(path), *([str(path)] if command == "compare" else [])])
        printed = capsys.readouterr().err
        assert complaint in printed
        assert printed.startswith(f"python -m bench {command}: ") and printed.count("\n") == 1
