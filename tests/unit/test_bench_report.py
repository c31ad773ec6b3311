"""The report: one page of rows with answers first, figures that are legible on any ground, and the documents' figures."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import tables
from bench.figures import Drawing, Question
from bench.report import DOCS, answers, main, trends, write
from bench.rows import Row, RowFile, Summary, exact, read
from tests.unit.recorded import provenance, register

RESULTS = Path(__file__).parents[2] / "bench" / "results"


QUESTIONS = (
    Question("All at once", "throughput", "paged *", part="closed"),
    Question("First tokens", "first token", "paged *", part="rates"),
)
FIGURES = (
    Drawing("closed", "All at once", ("throughput",), "(?P<by>.+?) closed: (?P<group>.+)"),
    Drawing("rates", "At rates", ("first token",), r"(?P<by>.+), (?P<x>\d+) requests/s, Poisson", "requests/s"),
)


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be one suite."""
    register(monkeypatch, speed=SimpleNamespace(QUESTIONS=QUESTIONS, FIGURES=FIGURES))


def row(system: str, p50: float, *, workload: str = "m closed: chat", metric: str = "throughput", unit: str = "tok/s") -> Row:
    summary = Summary(p20=0.99 * p50, p50=p50, p80=1.01 * p50, p99=p50, n=5)
    return Row(suite="speed", workload=workload, system=system, metric=metric, unit=unit, summary=summary)


@pytest.mark.usefixtures("speed")
def test_an_answer_counts_workloads_and_lists_losses_beyond_the_spread() -> None:
    rows = [row("vmmkv", 200), row("paged 16", 100)]
    rows += [row(system, p50, workload="m closed: uniform") for system, p50 in (("vmmkv", 90), ("paged 16", 100))]
    rows += [row(system, p50, workload="m closed: ragged") for system, p50 in (("vmmkv", 99), ("paged 16", 100))]
    (answer,) = answers(rows)
    assert (answer.question.against, sorted(answer.ratios.values())) == ("the best of paged *", [0.9, 0.99, 2.0])
    assert [(workload, ratio) for workload, ratio, _, _ in answer.losses] == [("m closed: uniform", 0.9)]


@pytest.mark.usefixtures("speed")
def test_of_several_block_tables_the_best_of_each_workload_is_compared() -> None:
    rows = [row(*each) for each in (("vmmkv", 90), ("paged 16", 50), ("paged 16, FA3", 100), ("paged 128", 75))]
    rows += [row(*each, workload="m closed: ragged") for each in (("vmmkv", 90), ("paged 16", 50), ("paged 128", 75))]
    (answer,) = answers(rows)
    assert answer.ratios == {"m closed: chat": 0.9, "m closed: ragged": 1.2}
    assert [other.system for _, _, _, other in answer.losses] == ["paged 16, FA3"]


@pytest.mark.usefixtures("speed")
def test_less_is_better_for_times() -> None:
    rows = [
        row(system, p50, metric="first token", unit="ms", workload="m rates: chat, 8 requests/s, Poisson")
        for system, p50 in (("vmmkv", 50), ("paged 16", 100))
    ]
    (answer,) = answers(rows)
    assert answer.median == 2.0


@pytest.mark.usefixtures("speed")
def test_the_page_needs_nothing_else_and_names_what_failed(tmp_path: Path) -> None:
    file = RowFile(tmp_path, provenance(quick=True))
    for each in (row("vmmkv", 200), row("paged 16", 100), row("vmmkv", 1, metric="first token", unit="ms")):
        file.append(each)
    file.append(Row(suite="gone", workload="a <b>", system="-", metric="failed", unit="runs", summary=exact(1, 1)))
    page = write([tmp_path], tmp_path / "out").read_text()
    assert page.index('id="answers"') < page.index('id="losses"') < page.index('id="section-1"')
    assert "1 failed" in page
    assert "gone: a &lt;b&gt;" in page
    assert "Quick rows." in page
    assert not re.search(r'(?:src|href)="(?!#|figures/|data:)', page)
    assert "<script" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "#010203" not in page
    for figure in re.findall(r'href="(figures/[^"]+)"', page):
        assert (tmp_path / "out" / figure).is_file()


@pytest.mark.nightly
def test_the_committed_rows_make_the_documents_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in tables.DOCUMENTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("<!-- rows: growing -->\n<!-- end of rows -->\n")
    assert main([str(RESULTS), "--out", str(tmp_path / "out"), "--docs", str(tmp_path)]) == 0
    assert {path.stem for path in (tmp_path / "docs" / "figures").iterdir()} == set(DOCS)
    assert "| ahead, while the device works |" in (tmp_path / "README.md").read_text()
    assert "not written" not in capsys.readouterr().out


@pytest.mark.usefixtures("speed")
def test_a_figure_moves_from_commit_to_commit_by_the_last_row_of_each(tmp_path: Path) -> None:
    days = {"aaa": (100, "2026-01-01"), "bbb": (50, "2026-01-02"), "ccc": (200, "2026-01-03")}
    for commit, (p50, date) in days.items():
        RowFile(tmp_path, provenance(date, commit=commit)).append(row("vmmkv", p50))
    RowFile(tmp_path, provenance("2026-01-04", commit="aaa")).append(row("vmmkv", 160))
    rows = read([tmp_path])
    ((trend,),) = trends(rows).values()
    assert [(one.provenance.commit, one.row.summary.p50) for one in trend.rows] == [("bbb", 50), ("ccc", 200), ("aaa", 160)]
    assert (trend.last.verdict, trend.last.old.provenance.commit) == ("worse", "ccc")
    page = write([tmp_path], tmp_path / "out").read_text()
    assert page.index('id="trends"') < page.index(
        "50, commit bbb of 2026-01-02; 200, commit ccc of 2026-01-03; 160, commit aaa"
    )


@pytest.mark.usefixtures("speed")
def test_what_has_one_commit_or_no_question_has_no_trend(tmp_path: Path) -> None:
    for commit in ("aaa", "bbb"):
        RowFile(tmp_path, provenance(commit=commit)).append(row("paged 16", 100))
    RowFile(tmp_path, provenance()).append(row("vmmkv", 100))
    assert trends(read([tmp_path])) == {}
    assert 'id="trends"' not in write([tmp_path], tmp_path / "out").read_text()
