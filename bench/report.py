"""Where rows go: to a file as they come, to a table at the end; and progress meanwhile."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.rows import Row, RowFile
from bench.timing import middle

_LOG_COLUMNS: Final = 128

_LOG_EVERY_S: Final = 10.0
"""How often progress is a line in a log, where there is no terminal for a bar."""


def console(log_columns: int) -> Console:
    """On stdout. Where there is no terminal rich takes eighty columns, which break a log's tables; COLUMNS is heeded."""
    told = os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if told or sys.stdout.isatty() else log_columns)


class Report:
    """Takes the rows of one run."""

    def __init__(self, file: RowFile) -> None:
        self.file = file
        self.rows: list[Row] = []
        self.console = console(_LOG_COLUMNS)
        self._progress_console = Console(stderr=True)
        self._bar: Progress | None = None

    def add(self, *rows: Row) -> None:
        """Keep rows, and write them through."""
        for row in rows:
            self.rows.append(row)
            self.file.append(row)

    def say(self, text: str) -> None:
        """A line for the reader."""
        self._show_bar(False)
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._show_bar(True)

    def remark(self, text: str) -> None:
        """A line of progress, on stderr."""
        self._progress_console.print(text, highlight=False, markup=False)

    @contextmanager
    def progress(self, suite: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar of `total` steps on stderr, or a line now and then; call what it gives with each step's name as it begins."""
        if not self._progress_console.is_terminal:
            yield self._logged(suite, total)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # A thread that repaints would take Python's lock in the middle of what is measured: repaint between steps only.
        # Redirected, stdout would end on stderr, and not in the file that it may have been sent to.
        bar = Progress(
            *columns,
            console=self._progress_console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with bar:
            task = bar.add_task(suite, total=total)
            begun = 0

            def begin_in_bar(name: str) -> None:
                nonlocal begun
                bar.update(task, description=f"{suite}: {name}", completed=begun)
                bar.refresh()
                begun += 1

            self._bar = bar
            try:
                yield begin_in_bar
            finally:
                self._bar = None

    def _logged(self, suite: str, total: int) -> Callable[[str], None]:
        begun, last_s = 0, time.monotonic()

        def begin(name: str) -> None:
            nonlocal begun, last_s
            begun += 1
            if time.monotonic() - last_s >= _LOG_EVERY_S:
                last_s = time.monotonic()
                self.remark(f"{suite}: {begun}/{total} {name}")

        return begin

    def _show_bar(self, visible: bool) -> None:
        """Out of the way of what is printed: the bar is on stderr, and knows nothing of stdout."""
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.update(task, visible=visible)
            self._bar.refresh()

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
        figures = [_figure(value) for value in (summary.p20, middle(summary), summary.p80, summary.p99)]
        bound = "" if row.bound is None else _figure(row.bound)
        table.add_row(row.system, row.metric, *figures, str(summary.n), bound, row.unit)
    return table


def _figure(value: float) -> str:
    """Three significant digits, and all of a larger number's whole part."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
