"""What is drawn of each suite. Whatever there are no rows of is not drawn; names are taken from the rows."""

import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from bench.kernels.attending import AGAIN
from bench.page.charts import Series, SeriesByNumber, bars, lines
from bench.page.drawing import Figure, slug_of
from bench.page.serving import serving_figures
from bench.prefix.naming import PROMISED, shape_of, without_shape
from bench.rows import Row
from bench.timing import Summary

_LABEL_CHARACTERS: Final = 34

_HF_DECODE: Final = re.compile(r"(?P<model>.+?) decode: (?P<tokens>\d+) tokens, batch (?P<batch>\d+)")
_HF_BY_CONTEXT: Final = {"time per token": "time per token", "peak memory beyond the weights": "most memory beyond the weights"}
"""What is drawn against the context, and how it is headed."""

_TREE: Final = re.compile(r"a tree of ([\d,]+) nodes")

Namer = Callable[[Row], str | None]
"""How a row is called in a figure; None if it is not in it."""


def figures(suite: str, rows: Sequence[Row], prefix: str) -> list[Figure]:
    """Those of one suite on one device; names begin with `prefix`."""
    draw = _BY_SUITE.get(suite)
    return list(draw(rows, f"{prefix}-{slug_of(suite)}")) if draw else []


def gathered(rows: Sequence[Row], metric: str, series: Namer, group: Namer) -> Series:
    """The summaries of a metric, by series and group."""
    found: dict[str, dict[str, Summary]] = defaultdict(dict)
    for row in rows:
        one, at = series(row), group(row)
        if row.metric == metric and one is not None and at is not None:
            found[one][at] = row.summary
    return found


def _system(row: Row) -> str:
    return row.system


def _workload(row: Row) -> str:
    """In lines that fit beside a figure."""
    return textwrap.fill(row.workload, _LABEL_CHARACTERS)


def _apart(workloads: Sequence[str]) -> tuple[Namer, str]:
    """What tells workloads apart, for their bars, and what they have in common, for the title."""
    parts = [re.split(r", |: ", workload) for workload in workloads]
    common = [part for part in (parts[0] if parts else []) if all(part in others for others in parts)]
    if len(set(workloads)) < 2:
        return _workload, ""

    def name(row: Row) -> str:
        own = [part for part in re.split(r", |: ", row.workload) if part not in common]
        return textwrap.fill(", ".join(own), _LABEL_CHARACTERS)

    return name, ", ".join(common[1:])


def _driver_calls(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    """A panel for each size of handle, of the first system: the others differ from it by a flag."""
    system = rows[0].system if rows else None
    panels: dict[str, dict[str, dict[str, Summary]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        handle, _, condition = row.workload.partition(", ")
        if row.system == system:
            panels[handle][condition][row.metric] = row.summary
    if panels:
        yield bars(f"{name}-calls", f"What each call of the driver takes ({system})", "us", panels, log=True)


def _append(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    for metric, slug, title in (
        ("step, over static", "over-static", "What growing adds to a decode step, over memory that is all mapped"),
        ("step", "step", "A decode step that grows"),
    ):
        if series := gathered(rows, metric, _workload, _system):
            yield bars(f"{name}-{slug}", title, "us", {"": series})


def _elastic(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    """How long it takes, and what the sequences that decode on feel of it."""
    for start, title, metrics in (
        ("shrink", "Giving memory back", ("resize", "until back")),
        ("regrow", "Taking memory again", ("first page", "until all are in")),
        ("two caches", "Memory that one cache hands to another", ("first grow", "until all are in")),
    ):
        of_phase = [row for row in rows if row.workload.startswith(start)]
        group, common = _apart([row.workload for row in of_phase])
        title = f"{title}: {common}" if common else title
        slug = f"{name}-{slug_of(start)}"
        if panels := _by_metric(of_phase, metrics, _system, group):
            yield bars(slug, title, "us", panels, log=True)
        if panels := _by_metric(of_phase, ("step", "step, undisturbed"), _system, group):
            yield bars(f"{slug}-step", f"{title}. A decode step meanwhile", "us", panels, tails=True)


def _waste(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    """Of what is wasted the whole; its parts are in the table."""
    for metric, unit, title in (
        ("waste", "% of the rows' bytes", "Memory that is held for running sequences and is no row"),
        ("admitted sequences", "sequences", "Sequences that run at once in the same memory"),
    ):
        if series := gathered(rows, metric, _system, lambda row: row.workload.partition(":")[0]):
            yield bars(f"{name}-{slug_of(metric)}", title, unit, {"": series}, log=metric == "waste")


def _kernels(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    """Our kernels over each memory, and what the memory could give; other systems are in the table."""
    metrics = {"decode": ("bandwidth", "GB/s"), "prefill": ("throughput", "TFLOP/s")}
    for shape in dict.fromkeys(row.workload.partition(" ")[0] for row in rows):
        for part, (metric, unit) in metrics.items():
            start = f"{shape} {part} "
            of_part = [row for row in rows if row.workload.startswith(start) and row.metric == metric]
            ours = next((row.system.partition(", ")[0] for row in of_part), "")
            series: dict[str, dict[str, Summary]] = defaultdict(dict)
            bounds: dict[str, float] = {}
            for row in of_part:
                kernel, _, memory = row.system.partition(", ")
                if kernel == ours and not row.system.endswith(AGAIN):
                    series[memory][row.workload.removeprefix(start)] = row.summary
                    if row.bound is not None:
                        bounds[row.workload.removeprefix(start)] = row.bound
            if series:
                title = f"{shape}: {part} by our kernel ({ours}), by the memory that it reads"
                yield bars(f"{name}-{part}-{slug_of(shape)}", title, unit, {"": series}, bounds=bounds)


def _prefix(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    by_shape: dict[str, list[Row]] = defaultdict(list)
    trees = [row for row in rows if _TREE.fullmatch(row.workload)]
    for row in (row for row in rows if row not in trees):
        by_shape[shape_of(row.workload)].append(replace(row, workload=without_shape(row.workload)))
    for shape, of_shape in by_shape.items():
        of_another = shape != PROMISED and len(by_shape) > 1
        yield from _prefix_of(of_shape, f"{name}-{slug_of(shape)}" if of_another else name, "" if shape == PROMISED else shape)
    yield from _by_nodes(trees, name)


def _prefix_of(rows: Sequence[Row], name: str, shape: str) -> Iterator[Figure]:
    requests = [row for row in rows if " requests of " in row.workload]
    for metric, unit, title in (
        ("total", "s", "Requests that share a prefix: time until the last answer"),
        ("memory, held", "GiB", "Requests that share a prefix: memory that they and the tree hold, at most"),
    ):
        panels = {}
        for state in ("cold", "warm"):
            of_state = [row for row in requests if row.workload.endswith(state)]
            if series := gathered(of_state, metric, _system, _shared_tokens):
                panels[f"{metric}, {state}"] = series
        if panels:
            yield bars(f"{name}-{slug_of(metric)}", _of(shape, title), unit, panels)
    yield from _by_size(rows, name, shape)
    if attention := gathered(rows, "attention", _system, _workload):
        yield bars(f"{name}-attention", _of(shape, "Attention over a shared prefix"), "ms", {"": attention})


def _of(shape: str, title: str) -> str:
    return f"{shape}: {title}" if shape else title


def _by_size(rows: Sequence[Row], name: str, shape: str) -> Iterator[Figure]:
    """Attaching, by the prefix's tokens."""
    attach: dict[tuple[str, str], dict[str, dict[float, Summary]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row.unit == "us" and (match := re.fullmatch(r"attach (\d+) tokens", row.workload)):
            attach[row.metric, row.unit][row.system][int(match[1])] = row.summary
    if attach:
        title = _of(shape, "Attaching a prefix, by each method")
        yield lines(f"{name}-attach", title, attach, "tokens", log_x=True, log_y=[metric for metric, _ in attach])


def _by_nodes(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    """The tree's calls: no shape has anything to do with them."""
    tree: dict[str, dict[float, Summary]] = defaultdict(dict)
    for row in rows:
        if row.unit == "us" and (match := _TREE.fullmatch(row.workload)):
            tree[row.metric][int(match[1].replace(",", ""))] = row.summary
    if tree:
        of_tree: dict[tuple[str, str], SeriesByNumber] = {("a call", "us"): tree}
        yield lines(f"{name}-tree", "The radix tree alone", of_tree, "nodes", log_x=True, log_y=["a call"])


def _hf(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    """Steps and memory by context, a figure for each model and batch; what a cache takes at its peak; what fits."""
    found: dict[tuple[str, str], dict[tuple[str, str], dict[str, dict[float, Summary]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    for row in rows:
        match = _HF_DECODE.match(row.workload)
        if match and row.metric in _HF_BY_CONTEXT:
            panel = (_HF_BY_CONTEXT[row.metric], row.unit)
            found[match["model"], match["batch"]][panel][row.system][int(match["tokens"])] = row.summary
    several = len(found) > 1
    for (model, batch), of_model in found.items():
        panels = {key: of_model[key] for heading in _HF_BY_CONTEXT.values() for key in of_model if key[0] == heading}
        title = f"{model}, batch {batch}: a decode step over each cache of transformers, and the most memory that it holds"
        slug = f"{name}-decode" + (f"-{slug_of(f'{model} {batch}')}" if several else "")
        yield lines(slug, title, panels, "tokens", log_x=True)
    for metric, slug, unit, title in (
        ("waste at the peak", "waste", "% of the rows' bytes", "What a cache takes at its peak, over what its rows need"),
        ("longest context", "longest", "tokens", "The longest context that fits"),
        ("admitted sequences", "admitted", "sequences", "Sequences of mixed lengths that fit at once"),
    ):
        if series := gathered(rows, metric, _system, _workload):
            yield bars(f"{name}-{slug}", title, unit, {"": series})


def _quality(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    if panels := _by_metric(rows, ("perplexity above exact", "attention output error"), _workload, _system):
        yield bars(f"{name}-losses", "What quantised K and V lose", "%", panels)


def _by_metric(rows: Sequence[Row], metrics: Sequence[str], series: Namer, group: Namer) -> dict[str, Series]:
    """A panel for each metric that there are rows of."""
    return {metric: found for metric in metrics if (found := gathered(rows, metric, series, group))}


def _shared_tokens(row: Row) -> str | None:
    match = re.search(r" requests of (\d+) \+", row.workload)
    return f"{int(match[1]):,} shared" if match else None


_BY_SUITE: Final[Mapping[str, Callable[[Sequence[Row], str], Iterator[Figure]]]] = {
    "driver_calls": _driver_calls,
    "append": _append,
    "elastic": _elastic,
    "waste": _waste,
    "kernels": _kernels,
    "prefix": _prefix,
    "serve": serving_figures,
    "hf": _hf,
    "quality": _quality,
}
