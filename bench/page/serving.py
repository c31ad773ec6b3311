"""What is drawn of `serve`: its workloads against their bounds, a closed loop by system, what it does and takes by the rate."""

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
_OF_RATES: Final = {
    "done": ("throughput", "goodput"),
    "latency": ("first token", "time per output token", "inter-token latency"),
}
_CLOSED: Final = re.compile(r"(?P<model>.+?) closed: (?P<workload>.+)$")


def serving_figures(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    """All that there are rows of."""
    yield from _shares(rows, name)
    yield from _closed(rows, name)
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
        yield bars(
            f"{name}-bounds", "How much of what the hardware allows is reached", "% of the bound", {"": {"vmmkv": found}}
        )


def _arriving(match: re.Match[str]) -> str:
    """The workload without its rate."""
    return f"{match['workload']}{match['kind'] or ''}"


def _is_plain(row: Row) -> bool:
    """Of our engine alone, and not compared with others?"""
    return not _CLOSED.match(row.workload) and not _RATE.match(row.workload)


def _closed(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    """All requests there at once, by system."""
    matched = [(row, match) for row in rows if (match := _CLOSED.match(row.workload))]
    for model in dict.fromkeys(match["model"] for _, match in matched):
        by_metric: dict[str, dict[str, dict[str, Summary]]] = defaultdict(lambda: defaultdict(dict))
        bounds: dict[str, float] = {}
        for row, match in matched:
            if match["model"] == model:
                workload = match["workload"].partition(":")[0]
                by_metric[row.metric][row.system][workload] = row.summary
                if row.metric == "throughput" and row.bound:
                    bounds[workload] = row.bound
        for unit, metrics in (("tok/s", ("throughput",)), ("ms", ("first token", "time per output token"))):
            if panels := {metric: by_metric[metric] for metric in metrics if metric in by_metric}:
                title = f"{model}, all requests at once: {', '.join(panels)}"
                slug = f"{name}-closed-{slug_of(model)}-{slug_of(unit)}"
                yield bars(slug, title, unit, panels, bounds=bounds if unit == "tok/s" else None)


def _rates(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    """Requests that arrive, by the rate at which they do."""
    matched = [(row, match) for row in rows if (match := _RATE.match(row.workload))]
    for model, workload in dict.fromkeys((match["model"], _arriving(match)) for _, match in matched):
        by_metric: dict[tuple[str, str], dict[str, dict[float, Summary]]] = defaultdict(lambda: defaultdict(dict))
        for row, match in matched:
            if (match["model"], _arriving(match)) == (model, workload):
                by_metric[row.metric, row.unit][row.system][float(match["rate"])] = row.summary
        for kind, metrics in _OF_RATES.items():
            panels: dict[tuple[str, str], SeriesByNumber] = {key: by_metric[key] for key in by_metric if key[0] in metrics}
            if panels:
                title = f"{model}, {workload}: {', '.join(metric for metric, _ in panels)}"
                slug, late = f"{name}-rates-{slug_of(f'{model} {workload}')}-{kind}", kind == "latency"
                yield lines(slug, title, panels, "requests/s offered", log_y=late, tails=late)
