"""What failed leaves a row that says so: who reads the rows alone must not take what is absent for what was not asked."""

import traceback
from collections.abc import Iterator

from bench.report import Report
from bench.rows import FAILED, Row

EVERY_SYSTEM = "all systems"
"""The system of a row about what ended a whole suite or a part of it."""
SEE_WORKLOAD = "-"
"""The system of a row whose workload is an exception's note, which names both."""


def add_failed(report: Report, suite: str, piece: str, error: Exception) -> None:
    """Print what went wrong, and add a row `failed` for each exception in it.

    Its workload is the exception's first note, which suites leave by `add_note(what)`; without one it is the `piece` of the
    suite that was running. What the suite has written a row `failed` of itself has no second one.
    """
    report.say(f"\n{piece} failed:\n{''.join(traceback.format_exception(error))}")
    written = {row.workload for row in report.rows if row.suite == suite and row.metric == FAILED}
    for note in _notes(error):
        workload = note or piece
        if workload not in written:
            written.add(workload)
            report.add(Row.failed(suite, workload, SEE_WORKLOAD if note else EVERY_SYSTEM))


def _notes(error: BaseException) -> Iterator[str | None]:
    """Of each exception in the groups its first note, or that of the innermost group that has one."""
    note = next(iter(getattr(error, "__notes__", ())), None)
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from (of_inner or note for of_inner in _notes(inner))
    else:
        yield note
