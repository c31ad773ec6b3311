"""What a conformance suite found: a line for each check."""

from dataclasses import dataclass
from typing import Literal

from vmmkv.errors import VmmkvError

Status = Literal["passed", "failed", "crashed", "skipped"]
"""crashed: the process did not survive it. skipped: the check does not apply, and `detail` says why."""


class ConformanceError(VmmkvError, AssertionError):
    """A kernel is not right on vmmkv memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one check went."""

    check: str
    status: Status
    detail: str = ""
    """Why, if it has not passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How all checks of a kernel went. `str` of it is a table."""

    kernel: str
    subject: str
    """Its form and guard, and on what it was tested."""
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Has nothing failed or crashed? What was skipped has not."""
        return not self._wrong()

    def raise_if_failed(self) -> None:
        """Raises: ConformanceError with the lines of the checks that failed or crashed."""
        if wrong := self._wrong():
            raise ConformanceError("\n".join([f"{self.kernel} ({self.subject}) is not right:", *self._lines(wrong)]))

    def __str__(self) -> str:
        return "\n".join([f"{self.kernel} ({self.subject})", *self._lines(self.results)])

    def _wrong(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.status in ("failed", "crashed"))

    def _lines(self, results: tuple[Result, ...]) -> list[str]:
        width = max((len(result.check) for result in self.results), default=0)
        return [f"  {result.check:{width}}  {result.status:7}  {result.detail}".rstrip() for result in results]


def markdown(reports: list[Report]) -> str:
    """A table with a row for each kernel and a column for each check; below it, why something has not passed."""
    checks = list(dict.fromkeys(result.check for report in reports for result in report.results))
    lines = [_row(["kernel", *checks]), _row(["---"] * (1 + len(checks)))]
    kernels_by_note: dict[str, list[str]] = {}
    for report in reports:
        by_check = {result.check: result for result in report.results}
        lines.append(_row([report.kernel, *(by_check[check].status if check in by_check else "" for check in checks)]))
        for result in report.results:
            if result.status != "passed":
                note = f"{result.check} {result.status}: {result.detail}"
                kernels_by_note.setdefault(note, []).append(report.kernel)
    notes = [f"- {note} ({'; '.join(kernels)})" for note, kernels in kernels_by_note.items()]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
