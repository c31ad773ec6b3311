"""What the engine has promised, computed from rows; and its figures beside those of vLLM, which were measured elsewhere."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.baselines import COMMON_PREFILL
from bench.kernels.bars import Bar
from bench.report import Report
from bench.rows import Row
from bench.serve import JUMPS_GAIN, MASKS_COST, SERVED, SUITE, SYSTEM
from bench.table import figure
from bench.timing import middle


class Promise(NamedTuple):
    """Of one workload and metric: what vLLM does, and what is wanted here."""

    part: str
    metric: str
    vllm: float | None
    bar: float | None


_RATE: Final = "throughput"

PROMISES: Final[Mapping[str, Sequence[Promise]]] = {
    "llama-3.1-8b": (
        Promise("mixed", _RATE, 9_880, 10_400),
        Promise("single", _RATE, 200, 244),
        Promise("first", "first token", 207, 207),
        Promise("long", "total", 12.8, 12.8),
        Promise("shared cold", "total", 1.72, 1.72),
        Promise("shared warm", "total", 1.30, 1.30),
    ),
    "qwen3-0.6b": (
        Promise("mixed", _RATE, 24_050, 28_900),
        Promise("single", _RATE, 570, 910),
        Promise("first", "first token", 32, 32),
        Promise("shared cold", "total", 0.91, 0.91),
        Promise("shared warm", "total", 0.87, 0.87),
    ),
}
"""By shape. vLLM 0.25.1 (FlashAttention-3, compiled, CUDA graphs, prefix caching, 256 sequences), on one H200."""

_MOST_GAP: Final = 2.0
_MOST_GROWTH: Final = 1.1
"""The host's time at the long context over that at the short one: not more than two runs differ by."""

_PAGED: Final = "paged 16"
_LEAST_OF_PAGED: Final = 0.99
"""Of its throughput, whatever the workload and the rate."""

_LEAST_OVER_HTTP: Final = 0.95
"""Of the throughput of the engine without it."""
_MOST_BY_MASKS: Final = 1.03
_LEAST_BY_JUMPS: Final = 1.5
"""A request's time with what is forced sampled, over that with it skipped: where that is half of each answer or more."""

Figures = Mapping[tuple[str, str], Row]
"""Rows by shape and part, and by metric."""


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """All of them, in the issue's order. Of shapes that there are no rows of, none."""
    found = _by_name(rows)
    for shape in _shapes(rows):
        for promise in PROMISES.get(shape, ()):
            if promise.bar is None:
                continue
            row = found.get((f"{shape} {promise.part}", promise.metric))
            unit = {_RATE: "tok/s", "first token": "ms", "total": "s"}[promise.metric]
            yield Bar(
                text=f"{shape}, {promise.part}, {unit}",
                bound=promise.bar,
                figures={} if row is None else {"median": middle(row.summary)},
                at_least=promise.metric == _RATE,
            )
        gaps = {
            row.workload.partition(": ")[2].partition(",")[0]: row.summary.p50
            for row in rows
            if row.workload.startswith(f"{shape} breakdown:") and row.metric == "gap between steps"
        }
        yield Bar(text=f"{shape}, gap between decode steps, %", bound=_MOST_GAP, figures=gaps, at_least=False)
        yield Bar(
            text=f"{shape}, host time a step at a long context against a short one",
            bound=_MOST_GROWTH,
            figures=_growth(found, shape),
            at_least=False,
        )
        for part in ("closed", "rates"):
            yield Bar(
                text=f"{shape}, {part}: throughput over that of {_PAGED}",
                bound=_LEAST_OF_PAGED,
                figures=_over_paged(rows, f"{shape} {part}: "),
            )
        over_http = _over_http(rows, f"{shape} http: ")
        yield Bar(text=f"{shape}, http: throughput over that without", bound=_LEAST_OVER_HTTP, figures=over_http)
        masks = _ratios(rows, f"{shape} grammar: masks, ", MASKS_COST)
        yield Bar(text=f"{shape}, grammar: time per token over free text", bound=_MOST_BY_MASKS, figures=masks, at_least=False)
        jumps = _ratios(rows, f"{shape} grammar: jumps, ", JUMPS_GAIN)
        yield Bar(text=f"{shape}, grammar: times as fast where half is forced", bound=_LEAST_BY_JUMPS, figures=jumps)


def print_tables(report: Report) -> None:
    """All rows of a run, then its figures beside vLLM's, then the promises kept or not."""
    report.print_tables(SUITE)
    rows = [row for row in report.rows if row.suite == SUITE]
    if table := _against_vllm(rows):
        report.say(
            "\nserve: against vLLM 0.25.1, measured elsewhere on the same kind of GPU (one H200), not by this run; "
            "share: of the roofline bound"
        )
        report.console.print(table)
    promised = list(bars(rows))
    if any(bar.figures for bar in promised):
        report.say("\nserve: bars" + ("; quick: figures are noise" if report.file.provenance.quick else ""))
        for bar in promised:
            report.say(bar.line())


def _against_vllm(rows: Sequence[Row]) -> Table | None:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("workload", "metric"):
        table.add_column(heading)
    for heading in ("vmmkv", "bound", "share", "vLLM 0.25.1, elsewhere", "times as fast"):
        table.add_column(heading, justify="right")
    found = _by_name(rows)
    for shape in _shapes(rows):
        for promise in PROMISES.get(shape, ()):
            row = found.get((f"{shape} {promise.part}", promise.metric))
            if row is None or promise.vllm is None:
                continue
            ours, is_rate = middle(row.summary), promise.metric == _RATE
            bound = "" if row.bound is None else figure(row.bound)
            share = "" if row.bound is None else f"{100 * (ours / row.bound if is_rate else row.bound / ours):.0f} %"
            faster = ours / promise.vllm if is_rate else promise.vllm / ours
            metric = f"{promise.metric}, {row.unit}"
            table.add_row(f"{shape} {promise.part}", metric, figure(ours), bound, share, figure(promise.vllm), f"{faster:.2f}")
    return table if table.row_count else None


def _over_paged(rows: Sequence[Row], prefix: str) -> dict[str, float]:
    """vmmkv's throughput over that of blocks, by the workload without its sizes: `chat`, or `8 requests/s, Poisson`.

    Of vmmkv with the prefill kernel that blocks have too, where it was measured: else two kernels would be compared.
    """
    medians = {
        (row.workload, row.system): middle(row.summary)
        for row in rows
        if row.workload.startswith(prefix) and row.metric == _RATE
    }
    return {
        _short(workload.removeprefix(prefix)): medians.get((workload, COMMON_PREFILL), ours) / medians[workload, _PAGED]
        for (workload, system), ours in medians.items()
        if system == SYSTEM and (workload, _PAGED) in medians
    }


def _over_http(rows: Sequence[Row], prefix: str) -> dict[str, float]:
    """Of the same requests, by how many there are."""
    medians = {
        (row.workload, row.system): middle(row.summary)
        for row in rows
        if row.workload.startswith(prefix) and row.metric == _RATE
    }
    return {
        workload.removeprefix(prefix).partition(" of ")[0]: ours / medians[workload, SYSTEM]
        for (workload, system), ours in medians.items()
        if system == SERVED and (workload, SYSTEM) in medians
    }


def _ratios(rows: Sequence[Row], prefix: str, metric: str) -> dict[str, float]:
    """The medians, by how many requests ran at once."""
    return {
        row.workload.removeprefix(prefix).partition(":")[0]: row.summary.p50
        for row in rows
        if row.workload.startswith(prefix) and row.metric == metric
    }


def _short(workload: str) -> str:
    return workload.partition(": ")[0] if ": " in workload else workload.partition(", ")[2]


def _growth(found: Figures, shape: str) -> dict[str, float]:
    """The medians' ratio, by the two contexts."""
    hosts = {
        int(name.rpartition(" ")[2]): row.summary.p50
        for (name, metric), row in found.items()
        if name.startswith(f"{shape} host ") and metric == "host"
    }
    if len(hosts) < 2:
        return {}
    short, long = min(hosts), max(hosts)
    return {f"{long} over {short}": hosts[long] / hosts[short]}


def _shapes(rows: Sequence[Row]) -> list[str]:
    """That there are rows of, without the tiny ones: in order."""
    present = {row.workload.partition(" ")[0] for row in rows}
    return [shape for shape in PROMISES if shape in present]


def _by_name(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    return {(row.workload.partition(":")[0], row.metric): row for row in rows}
