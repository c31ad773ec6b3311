"""Questions and figures of a suite in the report: `QUESTIONS` that its rows answer, `FIGURES` that are drawn of them.

A suite declares both beside what it measures; `bench.report` has the answers and the charts.
"""

from typing import Final, NamedTuple

PAGED: Final = "paged *"
"""The best of the engines over block tables."""
NAMED: Final = r"(?P<group>[^:]+):"
"""A pattern of workloads that are called by what stands before the colon."""


class Question(NamedTuple):
    """A metric of vmmkv's against another system's, over all workloads of a suite that have both."""

    text: str
    metric: str
    other: str
    """A pattern of the shell's. Of several systems that it matches, the best one of each workload is compared with."""
    ours: str = "vmmkv"
    part: str = ""
    """How workloads begin, behind the model's name."""

    def is_of(self, workload: str) -> bool:
        """Whether it is asked of a workload."""
        return not self.part or f" {self.part}: " in workload

    @property
    def against(self) -> str:
        """The other system, in words."""
        return f"the best of {self.other}" if "*" in self.other else self.other


class Drawing(NamedTuple):
    """A figure: bars, or lines by a number. A panel for each metric, a bar or a line for each system at each workload."""

    slug: str
    title: str
    metrics: tuple[str, ...] = ()
    """Empty: all that are times; each is drawn like a workload, or if these are drawn, like a system."""
    workload: str = ""
    """A pattern that workloads match. What it captures as `group` or `x` names the bars or is the number, as `panel` and
    `series` it stands for the metric and the system, as `by` it splits the rows into figures."""
    x_label: str = ""
    """Name of the horizontal axis of lines."""
