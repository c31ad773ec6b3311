"""`python -m bench report`: rows as one HTML page that needs neither network nor scripts, and its figures as PNG files.

    rows ── newest of each ──> answers: vmmkv against another system, over all workloads ──> losses
                          └──> sections: of each suite figures, and a table of all rows ──> report.html.j2

Figures are by matplotlib, as SVG within the page. Their ink is `currentColor`, the page's own; what carries data has mid tones,
whose contrast to black and to white is 3 to 1 at least.
"""

import io
import json
import re
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2
import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.cli import OUT, SUITES, Parser
from bench.rows import FAILED, GPU, Recorded, Row, Summary, figure, make_folder, newest, read
from vmmkv.units import MIB

PAGE: Final = "report.html"
_HERE: Final = Path(__file__).parent
_MAP: Final = "memory_map.json"

DOCS: Final[Mapping[str, str]] = {
    "sequences-that-fit": "memory-efficiency-admitted",
    "shared-prefix": "prefix-total",
    "serve-rates": "serve-rates-llama-3-1-8b-chat-poisson",
    "memory-map-slots": "memory-map",
}
"""Figures that README.md and the documents show: by their names there, how the page's are called behind the device."""


# answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A metric of vmmkv's against another system's, over all workloads of a suite that have both."""

    text: str
    suite: str
    metric: str
    ours: str
    other: str
    workload: str = ""
    """How workloads begin, behind the model's name."""


QUESTIONS: Final = (
    *(
        Question(text=text, suite="serve", metric="throughput", ours="vmmkv", other=other, workload=part)
        for other in ("paged 16", "static 4096", "transformers continuous batching", "vLLM")
        for part, text in (("closed", "Serving, all requests at once"), ("rates", "Serving, at rates"), ("outside", "Serving"))
    ),
    Question(text="Goodput at rates", suite="serve", metric="goodput", ours="vmmkv", other="paged 16", workload="rates"),
    Question(
        text="First tokens at rates", suite="serve", metric="first token", ours="vmmkv", other="paged 16", workload="rates"
    ),
    Question(text="What HTTP costs", suite="serve", metric="throughput", ours="vmmkv serve", other="vmmkv"),
    Question(text="Requests that share a prefix", suite="prefix", metric="total", ours="vmmkv", other="paged 16"),
    Question(text="Memory of shared prefixes", suite="prefix", metric="memory, held", ours="vmmkv", other="paged 16"),
    *(
        Question(text=text, suite="memory_efficiency", metric=f"{metric}, averaged", ours="vmmkv", other=other)
        for metric, text in (("waste", "Memory that holds no row"), ("admitted sequences", "Sequences that fit"))
        for other in ("paged 16", "static 4096")
    ),
    *(
        Question(
            text=text, suite="kernels", metric="layer", ours=f"{kernel}, vmmkv, all layers a page", other=f"{kernel}, {other}"
        )
        for kernel, text in (("decode", "Decode attention"), ("prefill", "Prefill attention"))
        for other in ("cudaMalloc", "paged 16")
    ),
    *(
        Question(text=text, suite="transformers", metric=metric, ours="vmmkv VmmCache", other=f"transformers {other}")
        for metric, text in (("time per token", "In transformers, eager"), ("longest context", "Longest context"))
        for other in ("DynamicCache", "StaticCache")
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Ratios are such that more than 1 is better. `losses`: workloads in which vmmkv is worse, the worst first."""

    question: Question
    ratios: Mapping[str, float]
    losses: tuple[tuple[str, float, Row, Row], ...]

    @property
    def median(self) -> float:
        """Over the workloads."""
        return statistics.median(self.ratios.values())


def answers(rows: Sequence[Row]) -> list[Answer]:
    """Of all questions that there are rows of both sides of."""
    found = {(row.suite, row.workload, row.metric, row.system): row for row in rows}
    given = []
    for question in QUESTIONS:
        ratios, losses = {}, []
        for (suite, workload, metric, system), ours in found.items():
            if (suite, metric, system) != (question.suite, question.metric, question.ours):
                continue
            others = [
                row
                for (its_suite, its_workload, its_metric, its_system), row in found.items()
                if (its_suite, its_workload, its_metric) == (suite, workload, metric)
                and (its_system == question.other or (question.other == "vLLM" and its_system.startswith("vLLM ")))
            ]
            part = f" {question.workload}: " if question.workload else ""
            if not others or part not in workload or not min(ours.summary.median, others[0].summary.median) > 0:
                continue
            ratio = ours.summary.median / others[0].summary.median
            ratios[workload] = ratio if ours.higher_is_better else 1 / ratio
            if ratios[workload] < 1 and not ours.summary.overlaps(others[0].summary):
                losses.append((workload, ratios[workload], ours, others[0]))
        if ratios:
            losses.sort(key=lambda loss: loss[1])
            given.append(Answer(question=question, ratios=ratios, losses=tuple(losses)))
    return given


# charts

_INK: Final = "#010203"
"""Stands for the page's own colour, and is as good as black in a PNG."""
_COLOURS: Final = ("#3d84d6", "#d4732a", "#2f9a5b", "#9a6bd1", "#c9508a", "#8a8f3c", "#3a9aa6", "#c2574b", "#7d858c", "#a9852f")
_KEPT: Final = ("vmmkv", "paged", "static")
"""How the names of systems begin that have the first colours in all figures."""
_MARKERS: Final = "osD^vP*Xhd"
_STYLE: Final[Any] = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "grid.color", "text.color", "xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("axes.facecolor", "savefig.facecolor", "svg.fonttype"), "none"),  # text stays text
    **dict.fromkeys(("axes.spines.right", "axes.spines.top", "legend.frameon", "text.parse_math"), False),
    **{"axes.axisbelow": True, "axes.grid": True, "axes.titlelocation": "left", "axes.titlesize": 10, "figure.dpi": 144},
    **{"font.family": "DejaVu Sans", "font.size": 9, "grid.alpha": 0.18, "legend.fontsize": 8.5, "svg.hashsalt": "vmmkv"},
}
_BAR_IN: Final = 0.19
_LEGEND_COLUMNS: Final = 3
_LEAST_FOR_LOG: Final = 10
"""Times the least number that the largest is before an axis is logarithmic."""

Series = Mapping[str, Mapping[str, Summary]]
"""By series, and by the group that it was measured in."""
SeriesByNumber = Mapping[str, Mapping[float, Summary]]
"""By series, and by the number that it was measured at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawing; `alt` says what it shows. The numbers are in the section's table."""

    name: str
    title: str
    alt: str
    caption: str
    svg: str
    png: bytes


def bars(name: str, title: str, unit: str, panels: Mapping[str, Series]) -> Figure:
    """Panels side by side: in each a bar for each series in each group. Bars are medians, whiskers from p20 to p80."""
    groups = list(dict.fromkeys(group for series in panels.values() for of_series in series.values() for group in of_series))
    names = list(dict.fromkeys(one for series in panels.values() for one in series))
    pitch = len(names) + 0.8
    height_in = 0.9 + _BAR_IN * len(groups) * pitch + 0.2 * -(-len(names) // _LEGEND_COLUMNS)
    with matplotlib.rc_context(_STYLE):
        canvas = Canvas(figsize=(8.6, height_in), layout="constrained")
        axes = canvas.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, (heading, series) in zip(axes, panels.items(), strict=True):
            medians = [summary.median for of_series in series.values() for summary in of_series.values()]
            log = bool(medians) and 0 < _LEAST_FOR_LOG * min(medians) <= max(medians)
            for index, (one, colour) in enumerate(_colours(names).items()):
                for group, summary in series.get(one, {}).items():
                    y = groups.index(group) * pitch + index - (len(names) - 1) / 2
                    axis.barh([y], [summary.median], height=0.86, color=colour, log=log)
                    if summary.p20 < summary.p80:
                        whisker = [[summary.median - summary.p20], [summary.p80 - summary.median]]
                        axis.errorbar([summary.median], [y], xerr=whisker, fmt="none", ecolor=_INK, elinewidth=0.8, capsize=1.5)
                    end = max(summary.p80, summary.median)
                    axis.annotate(
                        figure(summary.median), (end, y), (4, 0), textcoords="offset points", va="center", fontsize=7.5
                    )
            low, high = axis.get_xlim()
            axis.set_xlim(low, high * (3.5 if log else 1.12))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.grid(axis="y", visible=False)
            axis.set(title=heading, xlabel=unit + (", logarithmic" if log else ""))
        axes[0].set_yticks([index * pitch for index in range(len(groups))], groups)
        axes[0].set_ylim((len(groups) - 1) * pitch + len(names) / 2 + 0.4, -len(names) / 2 - 0.4)
        if len(names) > 1:
            handles = [Patch(color=colour, label=one) for one, colour in _colours(names).items()]
            canvas.legend(handles=handles, loc="outside upper left", ncols=min(_LEGEND_COLUMNS, len(names)))
        alt = f"{title}: bars of {', '.join(names)} at {', '.join(groups)}, in {unit}. The table below has the numbers."
        return _finished(canvas, name, title, alt, "Bars: medians; whiskers: p20 to p80.")


def lines(name: str, title: str, panels: Mapping[tuple[str, str], SeriesByNumber], x_label: str) -> Figure:
    """Panels side by side, by heading and unit, both axes logarithmic: medians as lines, p20 to p80 as bands."""
    names = list(dict.fromkeys(one for series in panels.values() for one in series))
    with matplotlib.rc_context(_STYLE):
        canvas = Canvas(figsize=(8.6, 3.4 + 0.2 * -(-len(names) // _LEGEND_COLUMNS)), layout="constrained")
        axes = canvas.subplots(1, len(panels), squeeze=False)[0]
        for axis, ((heading, unit), series) in zip(axes, panels.items(), strict=True):
            for index, (one, colour) in enumerate(_colours(names).items()):
                by_x = dict(sorted(series.get(one, {}).items()))
                medians, marker = [summary.median for summary in by_x.values()], _MARKERS[index % len(_MARKERS)]
                axis.plot(list(by_x), medians, color=colour, marker=marker, markersize=max(3.0, 8.0 - 1.4 * index), label=one)
                spread = ([summary.p20 for summary in by_x.values()], [summary.p80 for summary in by_x.values()])
                axis.fill_between(list(by_x), *spread, color=colour, alpha=0.18, lw=0)
            axis.set(title=heading, xlabel=x_label, ylabel=unit, xscale="log", yscale="log")
            for scale in (axis.xaxis, axis.yaxis):
                scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
                scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
                scale.set_minor_formatter(NullFormatter())
        handles, labels = axes[0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside upper left", ncols=min(_LEGEND_COLUMNS, len(names)))
        shown = "; ".join(f"{heading} in {unit}" for heading, unit in panels)
        alt = f"{title}: {shown}, against {x_label}, for {', '.join(names)}. The table below has the numbers."
        return _finished(canvas, name, title, alt, "Lines: medians; bands: p20 to p80.")


def _colours(names: Sequence[str]) -> dict[str, str]:
    """By name. The systems of many figures have the same colour in all of them."""
    found: dict[str, str] = {}
    for start, colour in zip(_KEPT, _COLOURS, strict=False):
        one = next((name for name in names if name.startswith(start)), None)
        if one is not None and found.keys().isdisjoint([one]):
            found[one] = colour
    left = [colour for colour in _COLOURS if colour not in found.values()]
    others = [name for name in names if name not in found]
    found |= {name: left[index % len(left)] for index, name in enumerate(others)}
    return {name: found[name] for name in names}


def _finished(canvas: Canvas, name: str, title: str, alt: str, caption: str) -> Figure:
    svg, png = io.StringIO(), io.BytesIO()
    canvas.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    canvas.savefig(png, format="png", facecolor="white")
    text = svg.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    for pattern, start in ((r'\bid="', 'id="'), (r"url\(#", "url(#"), (r'href="#', 'href="#')):  # ids that no other figure has
        text = re.sub(pattern, f"{start}{name}-", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    start, end = text.split(">", 1)
    start = re.sub(r' (width|height)="[^"]*"', "", start).replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1)
    return Figure(name=name, title=title, alt=alt, caption=caption, svg=f"{start}>{end}", png=png.getvalue())


# figures by suite


def _gathered(
    rows: Sequence[Row], metric: str, series: Callable[[Row], str], group: Callable[[Row], str]
) -> dict[str, dict[str, Summary]]:
    found: dict[str, dict[str, Summary]] = defaultdict(dict)
    for row in rows:
        if row.metric == metric:
            found[series(row)][group(row)] = row.summary
    return found


def _system(row: Row) -> str:
    return row.system


def _workload(row: Row) -> str:
    """In lines that fit beside a figure."""
    return textwrap.fill(row.workload, 34)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


@dataclass(frozen=True, slots=True)
class Bars:
    """A figure of bars: a panel for each metric, a bar for each system at each workload."""

    suite: str
    slug: str
    title: str
    metrics: tuple[str, ...]
    workload: str = ""
    """A pattern that workloads match. What it captures as `group` names the bars, as `by` it splits the rows into figures."""


_SHARED: Final = r".*?requests of (?P<group>\d+) \+.*?(?P<state>, (?:cold|warm))"
_NAMED: Final = r"(?P<group>[^:]+):"
_BARS: Final = (
    Bars("append", "step", "What growing adds to a decode step", ("step, over static", "step")),
    Bars("resize", "shrink", "Giving memory back", ("resize", "until back"), "shrink"),
    Bars("resize", "regrow", "Taking memory again", ("first page", "until all are in"), "regrow"),
    Bars("resize", "two-caches", "Memory handed over", ("first grow", "until all are in"), "two"),
    Bars("memory_efficiency", "waste", "Memory held for running sequences that is no row", ("waste",), _NAMED),
    Bars("memory_efficiency", "admitted", "Sequences that run at once in the same memory", ("admitted sequences",), _NAMED),
    Bars("kernels", "decode", "Decode attention, by memory", ("bandwidth",), r"(?P<by>\S+) decode (?P<group>.+)"),
    Bars("kernels", "prefill", "Prefill attention, by memory", ("throughput",), r"(?P<by>\S+) prefill (?P<group>.+)"),
    Bars("prefix", "total", "Requests that share a prefix: time until the last answer", ("total",), _SHARED),
    Bars("prefix", "memory", "Requests that share a prefix: memory that is held", ("memory, held",), _SHARED),
    *(
        Bars("serve", f"{part}-{slug}", f"{what}: {', '.join(metrics)}", metrics, rf"(?P<by>.+?) {part}: (?P<group>[^:]+)")
        for part, what in (
            ("closed", "All requests at once"),
            ("outside", "Beside systems outside the engine"),
            ("http", "Over HTTP and without"),
            ("grammar", "Answers by a grammar"),
        )
        for slug, metrics in (("throughput", ("throughput",)), ("latency", ("first token", "time per output token")))
    ),
    Bars("transformers", "decode", "A decode step over each cache", ("time per token",), r".+? decode: (?P<group>.+)"),
    Bars("transformers", "longest", "The longest context that fits", ("longest context",)),
    Bars("transformers", "admitted", "Requests that fit at once", ("admitted sequences",)),
    Bars("quality", "losses", "What quantised K and V lose", ("perplexity above exact", "attention output error")),
)


def figures(suite: str, rows: Sequence[Row], prefix: str) -> Iterator[Figure]:
    """Those of one suite on one device; names begin with `prefix`. What there are no rows of is not drawn."""
    rows = [row for row in rows if row.system != GPU and row.metric != FAILED]
    name = f"{prefix}-{_slug(suite)}"
    for spec in (spec for spec in _BARS if spec.suite == suite):
        matched = [(row, match) for row in rows if (match := re.match(spec.workload, row.workload))]
        parts = dict.fromkeys(match.groupdict().get("by", "") for _, match in matched)
        for part in parts:
            of_part = {id(row): match for row, match in matched if match.groupdict().get("by", "") == part}

            def group(row: Row, of_part: Mapping[int, re.Match[str]] = of_part) -> str:
                found = of_part[id(row)].groupdict()
                return textwrap.fill(found["group"] + found.get("state", ""), 34) if "group" in found else _workload(row)

            chosen = [row for row in rows if id(row) in of_part]
            panels = {metric: found for metric in spec.metrics if (found := _gathered(chosen, metric, _system, group))}
            if panels:
                unit = next(row.unit for row in chosen if row.metric in panels)
                title = f"{part}: {spec.title}" if part and len(parts) > 1 else spec.title
                yield bars("-".join(filter(None, (name, spec.slug, _slug(part)))), title, unit, panels)
    yield from _OTHERS.get(suite, _nothing)(rows, name)


def _driver_calls(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    """A panel for each size of handle, of the first system: the others differ from it by a flag."""
    panels: dict[str, dict[str, dict[str, Summary]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        handle, _, condition = row.workload.partition(", ")
        if row.system == rows[0].system:
            panels[handle][condition][row.metric] = row.summary
    if panels:
        yield bars(f"{name}-calls", f"What each call of the driver takes ({rows[0].system})", "us", panels)


def _attach_and_tree(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    for pattern, slug, title, x_label in (
        (r"attach (\d+) tokens", "attach", "Attaching a prefix", "tokens"),
        (r"a tree of ([\d,]+) nodes", "tree", "The radix tree alone", "nodes"),
    ):
        panels: dict[tuple[str, str], dict[str, dict[float, Summary]]] = defaultdict(lambda: defaultdict(dict))
        for row in rows:
            if row.unit == "us" and (match := re.fullmatch(pattern, row.workload)):
                heading, series = ("a call", row.metric) if slug == "tree" else (row.metric, row.system)
                panels[heading, row.unit][series][int(match[1].replace(",", ""))] = row.summary
        if panels:
            yield lines(f"{name}-{slug}", title, panels, x_label)


def _rates(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    """Requests that arrive, by the rate at which they have."""
    pattern = re.compile(r"(?P<model>.+?) rates: (?P<workload>.+), [\d.]+ requests/s, (?P<kind>.+)$")
    matched = [(row, match) for row in rows if (match := pattern.match(row.workload))]
    offered = {row.workload: row.summary.p50 for row, _ in matched if row.metric == "rate"}
    for of_figure in dict.fromkeys(match.groups() for _, match in matched):
        panels: dict[tuple[str, str], dict[str, dict[float, Summary]]] = defaultdict(lambda: defaultdict(dict))
        for metric in ("goodput", "first token", "time per output token"):
            for row, match in matched:
                if match.groups() == of_figure and row.metric == metric and row.workload in offered and row.summary.median > 0:
                    panels[metric, row.unit][row.system][offered[row.workload]] = row.summary
        if panels:
            title = f"{of_figure[0]}, {of_figure[1]}, {of_figure[2]}: {', '.join(heading for heading, _ in panels)}"
            yield lines(f"{name}-rates-{_slug(' '.join(of_figure))}", title, panels, "requests/s offered")


def _nothing(rows: Sequence[Row], name: str) -> Iterator[Figure]:
    return iter(())


_OTHERS: Final[Mapping[str, Callable[[Sequence[Row], str], Iterator[Figure]]]] = {
    "driver_calls": _driver_calls,
    "prefix": _attach_and_tree,
    "serve": _rates,
}

_STATES: Final[Mapping[str, tuple[str, str]]] = {
    "live": ("rows of running sequences", _COLOURS[0]),
    "ahead": ("mapped ahead", _COLOURS[6]),
    "parked": ("parked, to be adopted or evicted", _COLOURS[3]),
}
"""Of the memory map: by state, what it is and its colour. Other states wait to be unmapped."""


def memory_map(record: Mapping[str, Any]) -> Figure:
    """Slots across, addresses up: what lies under each slot at one moment, by the suite `memory_efficiency`."""
    page_mib, slots = record["page_bytes"] / MIB, record["slots"]
    present: dict[str, None] = {}
    with matplotlib.rc_context(_STYLE):
        canvas = Canvas(figsize=(8.6, 4.6), layout="constrained")
        axis: Any = canvas.subplots()
        for column, slot in enumerate(slots):
            for page, num_pages, state, num_holders in slot["runs"]:
                present[state] = None
                colour = _STATES.get(state, ("", _COLOURS[8]))[1]
                shared = {"hatch": "////"} if num_holders > 1 else {}
                style = {"width": 0.84, "color": colour, "edgecolor": _INK, "linewidth": 0.4, **shared}
                axis.bar([column], [num_pages * page_mib], bottom=[page * page_mib], **style)
            if slot["state"] == "live":
                end_mib = slot["rows"] * record["row_bytes"] / MIB
                axis.plot([column - 0.47, column + 0.47], [end_mib, end_mib], color=_INK, linewidth=1.8)
        axis.set_xticks(range(len(slots)), [slot["slot"] for slot in slots], fontsize=7)
        axis.set(ylabel="addresses of a slot, MiB", xlabel="slots")
        axis.grid(axis="x", visible=False)
        texts = {state: _STATES.get(state, ("about to be unmapped", _COLOURS[8])) for state in present}
        handles = [Patch(facecolor=colour, edgecolor=_INK, label=text) for text, colour in texts.values()]
        handles.append(Patch(facecolor="none", edgecolor=_INK, hatch="////", label="held by more than one"))
        canvas.legend(handles=handles, loc="outside upper left", ncols=2)
        moment = f"{record['workload']}, {record['shape']}, behind {record['step']} decode steps"
        said = f"Of {record['budget_pages']} pages {record['held_pages']} are held, {record['used_pages']} by running sequences"
        title = "Memory map: extents under the addresses of slots"
        caption = f"{moment}. {said}. Thick lines: where rows end. Commit {record['commit'][:12]} of {record['date'][:10]}."
        return _finished(canvas, "memory-map", title, f"{title}, {moment}. {said}.", caption)


# the page


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The rows of one suite on one device."""

    suite: str
    question: str
    device: str
    quick: bool
    origins: tuple[str, ...]
    figures: tuple[Figure, ...]
    tables: Mapping[str, Sequence[Row]]
    """Rows by workload."""


def main(arguments: Sequence[str]) -> int:
    """Write the page; its path is printed."""
    parser = Parser(
        prog="python -m bench report",
        description="One HTML page of rows, which needs no network, and its figures as PNG files. Of rows of the same thing "
        "the newest counts.",
    )
    default = OUT if any(OUT.glob("*.jsonl")) else _HERE / "results"
    parser.add_argument(
        "rows", nargs="*", type=Path, metavar="ROWS", help="files or folders; default: bench/out, or without rows bench/results"
    )
    parser.add_argument("--out", type=Path, default=OUT / "report", metavar="DIR", help="default: bench/out/report")
    parser.add_argument(
        "--docs",
        type=Path,
        metavar="DIR",
        help="also the figures that the documents show, under their names there: docs/figures",
    )
    options = parser.parse_args(arguments)
    try:
        page = write(options.rows or [default], options.out, options.docs)
    except ValueError as error:
        parser.refuse(str(error))
    print(page)
    return 0


def write(sources: Sequence[Path], out: Path, docs: Path | None = None) -> Path:
    """The page of these rows in the folder `out`, and in `docs` the documents' figures.

    Raises: ValueError for what cannot be read or written to, saying what would work.
    """
    recorded = newest(read(sources))
    for folder in (out / "figures", docs):
        if folder is not None:
            make_folder(folder)
    found = [_section(suite, device, quick, recorded) for suite, device, quick in _groups(recorded)]
    folders = dict.fromkeys(source if source.is_dir() else source.parent for source in sources)
    maps = [memory_map(json.loads((folder / _MAP).read_text("utf-8"))) for folder in folders if (folder / _MAP).is_file()]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"figure": figure, "svg": Markup}
    full = [one.row for one in recorded if not one.provenance.quick]
    html = environment.get_template("report.html.j2").render(
        style=(_HERE / "report.css").read_text(encoding="utf-8"),
        num_rows=f"{len(recorded):,}",
        sources=", ".join(source.name for source in sources),
        answers=answers(full or [one.row for one in recorded]),
        num_quick=len(recorded) - len(full),
        failed=[one for one in recorded if one.row.metric == FAILED],
        sections=found,
        maps=maps,
        runs=_runs(recorded),
    )
    all_figures = [*(drawn for section in found for drawn in section.figures), *maps]
    for drawn in all_figures:
        (out / "figures" / f"{drawn.name}.png").write_bytes(drawn.png)
    for name, ending in DOCS.items() if docs is not None else ():
        chosen = next((drawn for drawn in all_figures if drawn.name.endswith(ending)), None)
        if chosen is not None:
            assert docs is not None
            (docs / f"{name}.png").write_bytes(chosen.png)
        print(f"{name}: {chosen.title if chosen else f'not written, since there are no rows of *-{ending}'}")
    page = out / PAGE
    page.write_text(html, encoding="utf-8")
    return page


def _groups(recorded: Sequence[Recorded]) -> list[tuple[str, str, bool]]:
    """Suites in their order, each on each device, quick or not."""
    order = list(SUITES)
    found = dict.fromkeys((one.row.suite, one.provenance.device, one.provenance.quick) for one in recorded)
    return sorted(found, key=lambda group: order.index(group[0]) if group[0] in order else len(order))


def _section(suite: str, device: str, quick: bool, recorded: Sequence[Recorded]) -> Section:
    ours = [one for one in recorded if (one.row.suite, one.provenance.device, one.provenance.quick) == (suite, device, quick)]
    rows = [one.row for one in ours]
    tables: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        tables[row.workload].append(row)
    return Section(
        suite=suite,
        question=SUITES.get(suite, ""),
        device=device,
        quick=quick,
        origins=tuple(dict.fromkeys(one.provenance.origin for one in ours)),
        figures=tuple(figures(suite, rows, _slug(device) + ("-quick" if quick else ""))),
        tables=tables,
    )


def _runs(recorded: Sequence[Recorded]) -> list[dict[str, str]]:
    """Where and from what rows were measured, newest first."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for one in recorded:
        made = one.provenance
        versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
        key = (made.date, made.commit, made.device, str(made.seed), str(made.quick))
        run = found.setdefault(
            key,
            {
                "date (UTC)": made.date,
                "suites": "",
                "device": f"{made.device}, driver {made.driver}",
                "commit": made.commit,
                "seed": str(made.seed),
                "quick": "yes" if made.quick else "no",
                "versions": versions,
            },
        )
        run["suites"] = ", ".join(dict.fromkeys([*filter(None, run["suites"].split(", ")), one.row.suite]))
    return [found[key] for key in sorted(found, reverse=True)]
