"""What the issue of the transformers cache has promised, computed from rows; and the tables of a run.

Steps are those of a VmmCache with the attention that comes with it, against what transformers does by itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from bench.hf.caches import ATTENDING, DYNAMIC, STATIC, VMMKV
from bench.hf.context import SUITE
from bench.hf.decode import COMPILED, STEP, workload_of
from bench.hf.fitting import ADMITTED, LONGEST
from bench.hf.memory import PEAK, TAKEN
from bench.kernels.bars import Bar
from bench.report import Report
from bench.rows import Row

SHAPE: Final = "llama-3.1-8b"

_PROMISED: Final = workload_of(SHAPE, 8, 32768)
"""Where a step's time is promised."""


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """All of them, in the issue's order."""
    ours = [row for row in rows if row.workload.startswith(f"{SHAPE} ")]
    medians = {(row.workload, row.system, row.metric): row.summary.p50 for row in ours}
    workloads = list(dict.fromkeys(row.workload for row in ours))

    def pairs(metric: str, one: str, other: str) -> Mapping[str, tuple[float, float]]:
        found = {each: (medians.get((each, one, metric)), medians.get((each, other, metric))) for each in workloads}
        return {_short(each): (a, b) for each, (a, b) in found.items() if a is not None and b is not None}

    def ratios(metric: str, over: str, under: str) -> dict[str, float]:
        return {name: a / b for name, (a, b) in pairs(metric, over, under).items() if b}

    yield Bar(
        text="peak memory over what the rows need",
        bound=1.05,
        figures={
            f"{_short(row.workload)}{', from the device' * (row.metric == TAKEN)}": row.summary.p50 / row.bound
            for row in ours
            if row.system == VMMKV and row.metric in (PEAK, TAKEN) and row.bound
        },
        at_least=False,
    )
    chosen = VMMKV + ATTENDING
    faster = ratios(STEP, DYNAMIC, chosen)
    yield Bar(
        text="time per token at 32K tokens and batch 8, times as good as DynamicCache's",
        bound=1.5,
        figures={name: figure for name, figure in faster.items() if name == _short(_PROMISED)},
    )
    slower = ratios(STEP, chosen, STATIC)
    slower |= {name + COMPILED: figure for name, figure in ratios(STEP, chosen + COMPILED, STATIC + COMPILED).items()}
    yield Bar(text="time per token against StaticCache's", bound=1.0, figures=slower, at_least=False)
    yield Bar(
        text="tokens by which the longest context is longer than DynamicCache's",
        bound=1,
        figures={name: a - b for name, (a, b) in pairs(LONGEST, VMMKV, DYNAMIC).items()},
    )
    yield Bar(
        text="longest context against a StaticCache of just that size", bound=0.98, figures=ratios(LONGEST, VMMKV, STATIC)
    )
    yield Bar(
        text="sequences of mixed lengths by which there are more than with StaticCache",
        bound=1,
        figures={name: a - b for name, (a, b) in pairs(ADMITTED, VMMKV, STATIC).items()},
    )


def print_tables(report: Report) -> None:
    """All rows of a run, then the promises, kept or not."""
    report.print_tables(SUITE)
    promised = list(bars([row for row in report.rows if row.suite == SUITE]))
    if any(bar.figures for bar in promised):
        report.say("\nhf: bars" + ("; quick: figures are noise" if report.file.provenance.quick else ""))
        for bar in promised:
            report.say(bar.line())


def _short(workload: str) -> str:
    """What is behind the shape's name."""
    return workload.partition(" ")[2].partition(",")[0]
