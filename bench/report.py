"""Where rows go: to a file as they come, to a table at the end; and progress meanwhile."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.rows import Row, RowFile

_LOG_COLUMNS: Final = 128


class Report:
    """Takes the rows of one run."""

    def __init__(self, file: RowFile, console: Console | None = None) -> None:
        self.file = file
        self.rows: list[Row] = []
        # Eighty columns, what rich takes where there is no terminal, would break the tables of a log.
        self.console = console or Console(width=None if sys.stdout.isatty() else _LOG_COLUMNS)

    def add(self, *rows: Row) -> None:
        """Keep rows, and write them through."""
        for row in rows:
            self.rows.append(row)
            self.file.append(row)

    def say(self, text: str) -> None:
        """A line for the reader."""
        self.console.print(text, highlight=False, markup=False)

    @contextmanager
    def progress(self, suite: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar of `total` steps; call what it gives with the name of each step as it begins."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # A thread that repaints would take Python's lock in the middle of what is measured: repaint between steps only.
        with Progress(*columns, console=self.console, auto_refresh=False, transient=True) as bar:
            task = bar.add_task(suite, total=total)
            begun = 0

            def begin(name: str) -> None:
                nonlocal begun
                bar.update(task, description=f"{suite}: {name}", completed=begun)
                bar.refresh()
                begun += 1

            yield begin

    def print_tables(self, suite: str) -> None:
        """All rows of a suite, a table for each workload."""
        rows = [row for row in self.rows if row.suite == suite]
        provenance = self.file.provenance
        for workload in dict.fromkeys(row.workload for row in rows):
            self.say(f"\n{suite}: {workload} ({provenance.device}, driver {provenance.driver})")
            self.console.print(_table([row for row in rows if row.workload == workload]))


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("system", "metric"):
        table.add_column(heading)
    for heading in ("p20", "p50", "p80", "p99", "n", "bound", "unit"):
        table.add_column(heading, justify="left" if heading == "unit" else "right", no_wrap=True)
    for row in rows:
        summary = row.summary
        figures = [_figure(value) for value in (summary.p20, summary.p50, summary.p80, summary.p99)]
        bound = "" if row.bound is None else _figure(row.bound)
        table.add_row(row.system, row.metric, *figures, str(summary.n), bound, row.unit)
    return table


def _figure(value: float) -> str:
    """Three significant digits, and all of a larger number's whole part."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
