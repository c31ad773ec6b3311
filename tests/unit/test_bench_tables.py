"""Tables of the documents: figures of one session, the best one bold, and no line without a row."""

from dataclasses import replace

import pytest

from bench.rows import Recorded, Row, exact
from bench.tables import Column, Line, Table, better, filled, losses, markdown
from tests.unit.recorded import provenance

COLUMNS = {"theirs": Column("vLLM"), "ours": Column("vmmkv", is_ours=True)}


def one(system: str, value: float, *, commit: str = "new", date: str = "2026-01-02", unit: str = "tok/s") -> Recorded:
    row = Row(suite="serve", workload="m mixed: 8", system=system, metric="speed", unit=unit, summary=exact(value, 1))
    return Recorded(row=row, provenance=replace(provenance(), commit=commit, date=date))


def lines(rows: list[Recorded], **options: object) -> list[str]:
    table = Table("what", COLUMNS, {"a": Line("serve", "m mixed: *", "speed")}, **options)  # type: ignore[arg-type]
    return markdown(table, rows).splitlines()[2:]


def test_figures_of_a_line_are_of_the_newest_session_that_has_them_all() -> None:
    old = [one("vLLM", 1, commit="old", date="2026-01-01"), one("vmmkv", 2, commit="old", date="2026-01-01")]
    assert lines([*old, one("vmmkv", 5)]) == ["| a | 1 | **2** |"]
    assert lines([*old, one("vmmkv", 5), one("vLLM", 7)]) == ["| a | **7** | 5 |"]


def test_a_later_row_of_a_session_counts_and_a_missing_one_is_empty() -> None:
    assert lines([one("vmmkv", 5, date="2026-01-03"), one("vmmkv", 4)]) == ["| a |  | 5 |"]


def test_the_best_figure_is_bold_by_the_direction_of_its_unit() -> None:
    assert lines([one("vLLM", 2, unit="s"), one("vmmkv", 1, unit="s")]) == ["| a | 2 | **1** |"]
    assert lines([one("vLLM", 2, unit="s"), one("vmmkv", 2, unit="s")]) == ["| a | **2** | **2** |"]


def test_a_ratio_above_one_is_better_in_either_direction() -> None:
    assert better(one("a", 4).row, one("b", 2).row) == better(one("a", 2, unit="s").row, one("b", 4, unit="s").row) == 2


@pytest.mark.parametrize("unit", ["tok/s", "s"])
def test_losses_are_the_figures_that_another_beats_the_worst_first(unit: str) -> None:
    table = Table("what", COLUMNS, {name: Line("serve", f"{name} *", "speed") for name in "abcd"})
    rows = []
    for name, ours, theirs in (("a", 3, 4), ("b", 4, 4), ("c", 5, 4), ("d", 2, 4)):
        if unit == "s":
            ours, theirs = 60 // ours, 60 // theirs
        for system, value in (("vmmkv", ours), ("vLLM", theirs)):
            made = one(system, value, unit=unit)
            rows.append(replace(made, row=replace(made.row, workload=f"{name} mixed")))
    again = Table("again", {"speed: ours": COLUMNS["ours"], "speed: theirs": COLUMNS["theirs"]}, {"a": table.lines["a"]})
    assert [line.split(" | ")[::3] for line in losses([table, again], rows).splitlines()[2:]] == [
        ["| what: d", "0.50 |"],
        ["| again: a; speed", "0.75 |"],
    ]


def test_a_line_without_a_row_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no row of Line.*m mixed"):
        lines([replace(one("vmmkv", 1), row=replace(one("vmmkv", 1).row, suite="other"))])


def test_text_without_marks_stays() -> None:
    assert filled("a\n\n| b |\n", []) == "a\n\n| b |\n"
