"""What the benchmarks' issue has promised of memory, computed from rows; and the tables of a run."""

from collections.abc import Iterator, Sequence
from typing import Final

from bench.baselines.blocks import BLOCK_ROWS
from bench.kernels.bars import Bar
from bench.report import Report
from bench.rows import Row
from bench.waste.context import SUITE
from bench.waste.measures import ADMITTED, WASTE
from bench.waste.sizes import MAX_TOKENS

SHAPE: Final = "llama-3.1-8b"
"""Whose pages have 16 tokens."""

_MOST_WASTE: Final = 4.0
_LEAST_OF_PAGED: Final = 0.98
_TIMES_STATIC: Final = 3.0


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """All of them, in the issue's order."""
    medians = {
        (_short(row.workload), row.system, row.metric): row.summary.p50 for row in rows if row.workload.startswith(f"{SHAPE} ")
    }
    names = list(dict.fromkeys(name for name, _, _ in medians))
    waste = medians.get(("chat", "vmmkv", WASTE))
    yield Bar(
        text="waste at chat's lengths, what is mapped ahead too, averaged over time, %",
        bound=_MOST_WASTE,
        figures={} if waste is None else {"chat": waste},
        at_least=False,
    )

    def against(other: str) -> dict[str, float]:
        pairs = {name: (medians.get((name, "vmmkv", ADMITTED)), medians.get((name, other, ADMITTED))) for name in names}
        return {name: ours / theirs for name, (ours, theirs) in pairs.items() if ours is not None and theirs}

    yield Bar(
        text=f"sequences at once in the same budget, against blocks of {BLOCK_ROWS}",
        bound=_LEAST_OF_PAGED,
        figures=against(f"paged {BLOCK_ROWS}"),
    )
    yield Bar(
        text=f"sequences at once in the same budget, against {MAX_TOKENS} rows for each",
        bound=_TIMES_STATIC,
        figures=against(f"static {MAX_TOKENS}"),
    )


def print_tables(report: Report) -> None:
    """All rows of a run, then the promises, kept or not."""
    report.print_tables(SUITE)
    promised = list(bars([row for row in report.rows if row.suite == SUITE]))
    if any(bar.figures for bar in promised):
        report.say("\nwaste: bars" + ("; quick: figures are noise" if report.file.provenance.quick else ""))
        for bar in promised:
            report.say(bar.line())


def _short(workload: str) -> str:
    """The workload's name of "shape name: sizes, budget"."""
    return workload.partition(" ")[2].partition(":")[0]
