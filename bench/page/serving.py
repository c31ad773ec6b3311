"""What is drawn of `serve`: its workloads against their bounds, closed loops by system, what is done and takes by the rate."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from bench.page.charts import SeriesByNumber, bars, lines
from bench.page.drawing import Figure, slug_of
from bench.rows import Row
from bench.timing import Summary
from bench.verdict import higher_is_better

_RATE: Final = re.compile(r"(?P<model>.+?) rates: (?P<workload>.+), (?P<rate>[\d.]+) requests/s(?P<kind>, .+)?$")
"""A workload at a rate, and what kind of arrivals they are."""
_THROUGHPUT, _GOODPUT, _FIRST = "throughput", "goodput", "first token"
_PER_TOKEN, _GAP = "time per output token", "inter-token latency"
_LATENCIES: Final = (_FIRST, _PER_TOKEN, _GAP)
_OF_RATES: Final = {
    "done": (_THROUGHPUT, _GOODPUT),
    "latency": _LATENCIES,
    # What decides, in one figure: README.md shows it.
    "all": (_GOODPUT, _FIRST, _PER_TOKEN),
}
"""Figures by how their names end, and the metrics that each has a panel of."""
_OFFERED: Final = "rate"
"""The metric that says how many requests a second have come: of a few the Poisson process has more or fewer than its mean."""
_LOOP: Final = re.compile(r"(?P<model>.+?) (?P<part>closed|outside|http|grammar): (?P<workload>.+)$")
_LOOPS: Final = {
    "closed": "all requests at once",
    "outside": "all requests at once, beside what serves without the engine",
    "http": "all requests at once, over HTTP and without",
    "grammar": "answers by a grammar, and free text",
}


def serving_figures(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    """All that there are rows of."""
    yield from _shares(rows, name)
    yield from _loops(rows, name)
    yield from _rates(rows, name)


def _shares(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    """Of what has a bound, how much of it is reached."""
    found: dict[str, Summary] = {}
    for row in rows:
        higher = higher_is_better(row.metric, row.unit)
        if not _is_plain(row) or not row.bound or higher is None or not row.summary.p20 or row.metric == "total":
            continue  # the total says what the throughput says
        part = row.workload.partition(":")[0] + (f" ({row.workload.partition(': ')[2]})" if " step:" in row.workload else "")
        ends = [100 * (value / row.bound if higher else row.bound / value) for value in (row.summary.p20, row.summary.p80)]
        middle = 100 * (row.summary.p50 / row.bound if higher else row.bound / row.summary.p50)
        label = f"{part}, {row.metric}"
        found[label] = Summary(p20=min(ends), p50=middle, p80=max(ends), p99=max(ends), n=row.summary.n)
    if not found:  # on a CPU
        rates = {row.workload.partition(":")[0]: row.summary for row in rows if row.metric == "throughput" and _is_plain(row)}
        if rates:
            yield bars(f"{name}-throughput", "Answers' tokens a second", "tok/s", {"": {"vmmkv": rates}})
    else:
        title = "How much of the bound is reached"
        if any(summary.p50 > 100 for summary in found.values()):
            title += ", which knows of no prefix that is read once for many"
        yield bars(f"{name}-bounds", title, "% of the bound", {"": {"vmmkv": found}})


def _arriving(match: re.Match[str]) -> str:
    """The workload without its rate."""
    return f"{match['workload']}{match['kind'] or ''}"


def _is_plain(row: Row) -> bool:
    """Of our engine alone, and not compared with others?"""
    return not _LOOP.match(row.workload) and not _RATE.match(row.workload)


def _loops(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    """All requests there at once, by system."""
    matched = [(row, match) for row in rows if (match := _LOOP.match(row.workload))]
    for model, part in dict.fromkeys((match["model"], match["part"]) for _, match in matched):
        by_metric: dict[str, dict[str, dict[str, Summary]]] = defaultdict(lambda: defaultdict(dict))
        bounds: dict[str, float] = {}
        for row, match in matched:
            if (match["model"], match["part"]) == (model, part):
                workload = match["workload"].partition(":")[0]
                by_metric[row.metric][row.system][workload] = row.summary
                if row.metric == _THROUGHPUT and row.bound:
                    bounds[workload] = row.bound
        for unit, metrics in (("tok/s", (_THROUGHPUT,)), ("ms", _LATENCIES)):
            if panels := {metric: by_metric[metric] for metric in metrics if metric in by_metric}:
                title = f"{model}, {_LOOPS[part]}: {', '.join(panels)}"
                slug, late = f"{name}-{part}-{slug_of(model)}-{slug_of(unit)}", unit == "ms"
                yield bars(slug, title, unit, panels, log=late, bounds=None if late else bounds, tails=late)


def _rates(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    """Requests that arrive, by the rate at which they have."""
    matched = [(row, match) for row in rows if (match := _RATE.match(row.workload))]
    offered = {row.workload: row.summary.p50 for row, _ in matched if row.metric == _OFFERED}
    for model, workload in dict.fromkeys((match["model"], _arriving(match)) for _, match in matched):
        by_metric: dict[tuple[str, str], dict[str, dict[float, Summary]]] = defaultdict(lambda: defaultdict(dict))
        for row, match in matched:
            if (match["model"], _arriving(match)) == (model, workload):
                rate = offered.get(row.workload, float(match["rate"]))
                by_metric[row.metric, row.unit][row.system][rate] = row.summary
        for kind, metrics in _OF_RATES.items():
            found = {metric: key for key in by_metric if (metric := key[0]) in metrics}
            panels: dict[tuple[str, str], SeriesByNumber] = {
                found[metric]: by_metric[found[metric]] for metric in metrics if metric in found
            }
            if panels:
                yield lines(
                    f"{name}-rates-{slug_of(f'{model} {workload}')}-{kind}",
                    f"{model}, {workload}: {', '.join(metric for metric, _ in panels)}",
                    panels,
                    "requests/s offered",
                    log_x=True,
                    log_y=_LATENCIES,
                    tails=_LATENCIES,
                    diagonal=[_GOODPUT] if _GOODPUT in found else [],
                )
