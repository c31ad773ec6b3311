"""`python -m bench table ROWS.jsonl`: the kernels' rows as the tables of docs/performance.md, and the promises kept or not.

Also the table that a run of quality ends with.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.arguments import Parser
from bench.gpu_clocks import GPU
from bench.kernels.attending import AGAIN
from bench.kernels.bars import Key, bars
from bench.recorded import read
from bench.report import Report
from bench.rows import FAILED

_METRICS: Final = {
    "decode": ("layer", "bandwidth"),
    "prefill": ("layer", "throughput"),
    "quantised": ("layer", "speed-up"),
    "append": ("layer", "moved"),
    "copy": ("pass", "moved"),
}
"""By part: what stands in a cell, and what behind it in brackets."""

_SYSTEMS_DOWN: Final = ("quantised", "append", "copy")
"""Parts of many systems and few cases: systems are rows there, and cases columns."""


def main(arguments: Sequence[str]) -> int:
    """Print the tables."""
    parser = Parser(prog="python -m bench table", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "rows", type=Path, nargs="+", metavar="ROWS", help="files or folders of rows, such as bench/out/kernels.jsonl"
    )
    options = parser.parse_args(arguments)
    try:
        rows = read_rows(options.rows)
    except ValueError as error:
        parser.refuse(str(error))
    print("\n".join(lines(rows)))
    return 0


def read_rows(paths: Sequence[Path]) -> dict[Key, dict[str, Any]]:
    """The rows of the kernels suite by what they are of. Of two of the same, the later one: a part was measured again.

    Raises: ValueError where there are none, saying what would work.
    """
    reading = read(paths)
    if reading.notice:
        print(reading.notice, file=sys.stderr)
    rows = _keyed(one.row.as_dict(one.provenance) for one in reading.rows)
    if not rows:
        suites = ", ".join(dict.fromkeys(one.row.suite for one in reading.rows))
        raise ValueError(
            f"no row of the suite kernels in {', '.join(map(str, paths))}, only of {suites}; "
            "`python -m bench kernels` writes some to bench/out/kernels.jsonl"
        )
    return rows


def print_tables(report: Report) -> None:
    """The same of a run that has just been made."""
    rows = _keyed(row.as_dict(report.file.provenance) for row in report.rows)
    if rows:
        print("\n".join(lines(rows)))


def print_quality(report: Report) -> None:
    """The rows of a run of quality, one line a KV type."""
    of_suite = [row for row in report.rows if row.suite == "quality" and row.system != GPU]
    for row in of_suite:
        if row.metric == FAILED:
            report.say(f"quality: FAILED: {row.workload}")
    rows = [row for row in of_suite if row.metric != FAILED]
    for workload in dict.fromkeys(row.workload for row in rows):
        summaries = {(row.system, row.metric): row.summary for row in rows if row.workload == workload}
        table = Table(box=SIMPLE_HEAD)
        table.add_column("K and V", no_wrap=True)
        for heading in ("row bytes", "perplexity", "above exact", "output error\np50 / p99"):
            table.add_column(heading, justify="right", no_wrap=True)
        for system in dict.fromkeys(system for system, _ in summaries):
            above, error = (summaries.get((system, metric)) for metric in ("perplexity above exact", "attention output error"))
            table.add_row(
                system,
                f"{summaries[system, 'row'].p50:,.0f}",
                f"{summaries[system, 'perplexity'].p50:.2f}",
                f"{above.p50:+.2f} %" if above else "",
                f"{figure(error.p50)} / {figure(error.p99)} %" if error else "",
            )
        quick = "; quick: figures are noise" if report.file.provenance.quick else ""
        report.say(f"\nquality: {workload}{quick}")
        report.console.print(table)


def _keyed(rows: Iterable[dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    """Of kernels alone, and not of the GPU that they ran on."""
    of_kernels = (row for row in rows if row["suite"] == "kernels" and row["system"] != GPU)
    return {(row["workload"], row["system"], row["metric"]): row for row in of_kernels}


def lines(rows: Mapping[Key, dict[str, Any]]) -> Iterator[str]:
    """Markdown: what was measured where, what failed, a table for each shape and part, then the checklist."""
    yield f"{_provenance(rows)}\n"
    yield from (f"- FAILED: {workload}" for workload, _, metric in rows if metric == FAILED)
    rows = {key: row for key, row in rows.items() if key[2] != FAILED}
    workloads = _workloads(rows)
    for shape, part in dict.fromkeys((shape, part) for shape, part, _ in workloads):
        cases = [case for its_shape, its_part, case in workloads if (its_shape, its_part) == (shape, part)]
        yield f"### {shape}, {part}\n"
        yield from _table(rows, shape, part, cases)
        yield ""
    medians = {key: float(row["p50"]) for key, row in rows.items()}
    promised = list(bars(medians))
    if any(bar.figures for bar in promised):
        yield "### Bars\n"
        yield from (bar.line() for bar in promised)
    # Only a GPU's rows have bounds; a CPU's times say nothing of a drift.
    drifts = [medians[key] / first for key, first in _measured_again(medians) if rows[key]["bound"] is not None]
    if drifts:
        span = f"{min(drifts):.3f} to {max(drifts):.3f}"
        yield f"\nMeasured again at the end of a case, the first memory took {span} times as long."


def _provenance(rows: Mapping[Key, dict[str, Any]]) -> str:
    """The devices and commits of the rows: usually one of each."""
    names = dict.fromkeys(
        f"{row['device']}, commit {row['commit']}{'; quick: figures are noise' if row['quick'] else ''}"
        for row in rows.values()
    )
    return " | ".join(names)


def _measured_again(medians: Mapping[Key, float]) -> Iterator[tuple[Key, float]]:
    """Keys of times that were measured again, and what was measured first."""
    for workload, system, metric in medians:
        first = (workload, system.removesuffix(AGAIN), metric)
        if metric == "layer" and system.endswith(AGAIN) and first in medians:
            yield (workload, system, metric), medians[first]


def _workloads(rows: Mapping[Key, dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Shape, part and case of each, in the order in which they were measured."""
    names = dict.fromkeys(workload for workload, _, _ in rows)
    split = [name.split(" ", 2) for name in names]
    return [(shape, part, case) for shape, part, case in split]


def _table(rows: Mapping[Key, dict[str, Any]], shape: str, part: str, cases: Sequence[str]) -> Iterator[str]:
    metric, behind = _METRICS[part]
    names = {case: f"{shape} {part} {case}" for case in cases}
    systems = list(
        dict.fromkeys(system for workload, system, _ in rows if workload in names.values() and not system.endswith(AGAIN))
    )
    floors = {case: _floor(rows, names[case], metric) for case in cases}

    def cell(case: str, system: str) -> str:
        row, other = (rows.get((names[case], system, name)) for name in (metric, behind))
        if row is None:
            return "-"
        return figure(row["p50"]) + (f" ({figure(other['p50'])})" if other else "")

    unit = next((row["unit"] for (workload, _, name), row in rows.items() if name == behind and workload in names.values()), "")
    corner = f"us a {metric}" + (f" ({unit})" if unit else "")
    if part in _SYSTEMS_DOWN:
        yield from _markdown([corner, *cases], ([system, *(cell(case, system) for case in cases)] for system in systems))
    else:
        # A CPU has no floors.
        has_floors = any(floors.values())
        body = (
            [case, *([floors[case] or "-"] if has_floors else []), *(cell(case, system) for system in systems)]
            for case in cases
        )
        yield from _markdown([corner, *(["floor"] if has_floors else []), *systems], body)


def _floor(rows: Mapping[Key, dict[str, Any]], workload: str, metric: str) -> str | None:
    bounds = (row["bound"] for (name, _, its_metric), row in rows.items() if (name, its_metric) == (workload, metric))
    return next((figure(bound) for bound in bounds if bound is not None), None)


def _markdown(head: Sequence[str], body: Iterator[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for cells in body:
        yield f"| {' | '.join(cells)} |"


def figure(value: float) -> str:
    """Three significant digits, and all of a larger number's whole part."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
