"""`python -m bench report`: rows as one HTML page that needs neither network nor scripts; with --docs also in the documents.

    rows ── newest of each ──> answers: vmmkv against another system, over all workloads ──> losses
                          └──> sections: of each suite figures, and a table of all rows ──> report.html.j2

Figures are by matplotlib, as SVG within the page. Their ink is `currentColor`, the page's own; what carries data has mid tones,
whose contrast to black and to white is 3 to 1 at least.
"""

import io
import re
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

import jinja2
import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench import tables
from bench.baselines import COMMON_PREFILL
from bench.cli import OUT, SUITES, Parser
from bench.rows import FAILED, GPU, Recorded, Row, Summary, exact, figure, make_folder, newest, read

PAGE: Final = "report.html"
_HERE: Final = Path(__file__).parent

DOCS: Final[Mapping[str, str]] = {
    "against-vllm": "against-vllm",
    "perplexity-along-a-text": "streaming-perplexity",
    "sequences-that-fit": "memory-efficiency-admitted",
    "serve-rates": "serve-rates-llama-3-1-8b-rates-chat",
}
"""Figures that README.md and the documents show: by their names there, how the page's are called behind the device."""


# answers


class Question(NamedTuple):
    """A metric of vmmkv's against another system's, over all workloads of a suite that have both."""

    text: str
    suite: str
    metric: str
    other: str
    """A pattern of the shell's. Of several systems that it matches, the best one of each workload is compared with."""
    ours: str = "vmmkv"
    part: str = ""
    """How workloads begin, behind the model's name."""

    @property
    def against(self) -> str:
        """The other system, in words."""
        return f"the best of {self.other}" if "*" in self.other else self.other


_PAGED: Final = "paged *"
QUESTIONS: Final = (
    *(
        Question(text, "serve", "throughput", other, part=part)
        for other in (_PAGED, "static 4096", "transformers *")
        for part, text in (("closed", "Serving, all requests at once"), ("rates", "Serving, at rates"), ("outside", "Serving"))
    ),
    *(
        Question(text, "serve", metric, "vLLM")
        for metric, text in (
            ("throughput", "As users open them"),
            ("first token", "As users open them, a long prompt's first token"),
            ("first tokens", "As users open them, first tokens"),
        )
    ),
    Question("Over two GPUs", "serve", "throughput", "vmmkv", ours="vmmkv, TP 2"),
    Question("Over two GPUs, a long prompt's first token", "serve", "first token", "vmmkv", ours="vmmkv, TP 2"),
    Question("Goodput at rates", "serve", "goodput", _PAGED, part="rates"),
    Question("First tokens at rates", "serve", "first token", _PAGED, part="rates"),
    Question("What HTTP costs", "serve", "throughput", "vmmkv", ours="vmmkv serve"),
    *(
        Question(text, "serve", metric, "vmmkv, all rows", f"vmmkv, {policy}-2048", "policies")
        for metric, text in (("throughput", "Keeping 2,048 rows"), ("KV memory at peak", "Keeping 2,048 rows, memory"))
        for policy in ("snapkv", "h2o", "streaming_llm")
    ),
    Question("Requests that share a prefix", "prefix", "total", _PAGED),
    Question("Memory of shared prefixes", "prefix", "memory, held", _PAGED),
    Question("Blocks of 16, by the same kernels", "serve", "throughput", "paged 16", COMMON_PREFILL, "closed"),
    Question("Blocks of 16, by the same kernels, and a shared prefix", "prefix", "total", "paged 16", COMMON_PREFILL),
    *(
        Question(text, "memory_efficiency", f"{metric}, averaged", other)
        for metric, text in (("waste", "Memory that holds no row"), ("admitted sequences", "Sequences that fit"))
        for other in (_PAGED, "static 4096")
    ),
    *(
        Question(text, "kernels", "layer", other, ours=f"{kernel}, vmmkv, all layers a page")
        for kernel, text in (("decode", "Decode attention"), ("prefill", "Prefill attention"))
        for other in (f"{kernel}, cudaMalloc", "*, paged *[0-9]")  # not those whose sequences share all rows
    ),
    *(
        Question(f"{text}, {ours}", "tiers", metric, other, ours)
        for text, metric, other, systems in (
            ("Conversations beyond the device's memory", "throughput", "no tier", ("host tier", "host and disk tiers")),
            ("A known prompt's first token", "first token", "computed", ("device", "host tier", "disk tier")),
            ("Decoding", "throughput", "alone", ("beside loads", "beside stores", "beside both")),
            ("Preemption", "throughput", "recompute", ("swap",)),
            ("Behind an engine that was killed, first token", "first token", "warm", ("restarted",)),
            ("Loads", "load", "one copy", ("host tier",)),
        )
        for ours in systems
    ),
    *(
        Question("In transformers, eager", "transformers", "time per token", f"transformers {other}", ours="vmmkv VmmCache")
        for other in ("DynamicCache", "StaticCache")
    ),
)


class Comparison(NamedTuple):
    """Ratios by workload, such that more than 1 is better. `losses`: workloads in which vmmkv is worse, the worst first."""

    question: Question
    ratios: Mapping[str, float]
    losses: Sequence[tuple[str, float, Row, Row]]

    @property
    def median(self) -> float:
        """Over the workloads."""
        return statistics.median(self.ratios.values())


def answers(rows: Sequence[Row]) -> list[Comparison]:
    """Of all questions that there are rows of both sides of."""
    by_workload: defaultdict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:  # vLLM's rows have its version behind the name
        by_workload[row.suite, row.metric, row.workload][re.sub("^vLLM .*", "vLLM", row.system)] = row
    given = []
    for question in QUESTIONS:
        ratios, losses = {}, []
        for (*subject, workload), systems in by_workload.items():
            ours, other = systems.get(question.ours), _best_of(systems, question.other)
            is_asked = subject == [question.suite, question.metric] and (not question.part or f" {question.part}: " in workload)
            if is_asked and ours and other and ours.summary.median > 0:
                ratio = ours.summary.median / other.summary.median
                ratios[workload] = ratio if ours.higher_is_better else 1 / ratio
                if ratios[workload] < 1 and not ours.summary.overlaps(other.summary):
                    losses.append((workload, ratios[workload], ours, other))
        if ratios:
            given.append(Comparison(question, ratios, sorted(losses, key=lambda loss: loss[1])))
    return given


def _best_of(systems: Mapping[str, Row], pattern: str) -> Row | None:
    """Of the systems whose names match, the best; None if none does."""
    rows = [row for name, row in systems.items() if fnmatchcase(name, pattern) and row.summary.median > 0]
    return max(rows, key=lambda row: row.summary.median if row.higher_is_better else -row.summary.median, default=None)


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
_PLAIN: Final = FuncFormatter(lambda value, _: f"{value:,.10g}")

Panels = defaultdict[Any, defaultdict[str, dict[Any, Summary]]]
"""By panel (a heading and a unit), series, and the group or number that was measured at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawing; `alt` says what it shows. The numbers are in the section's table."""

    name: str
    title: str
    alt: str
    canvas: Canvas

    def svg(self) -> str:
        """Within a page: its ids are no other figure's."""
        file = io.StringIO()
        with matplotlib.rc_context(_STYLE):
            self.canvas.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        text = file.getvalue()
        text = text[text.index("<svg") :].replace(_INK, "currentColor")
        text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", text)
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        start, end = text.split(">", 1)
        start = re.sub(r' (width|height)="[^"]*"', "", start)
        label = f'<svg role="img" aria-label="{escape(self.alt)}" '
        return f"{start.replace('<svg ', label, 1)}>{end}"

    def save(self, path: Path) -> None:
        """As PNG."""
        with matplotlib.rc_context(_STYLE):
            self.canvas.savefig(path, format="png", facecolor="white")


def bars(name: str, title: str, panels: Panels) -> Figure:
    """Panels side by side: in each a bar for each series in each group. Bars are medians, whiskers from p20 to p80."""
    groups = list(dict.fromkeys(group for series in panels.values() for of_series in series.values() for group in of_series))
    colours = _colours(panels)
    pitch = len(colours) + 0.8
    height_in = 0.9 + _BAR_IN * len(groups) * pitch + 0.2 * -(-len(colours) // _LEGEND_COLUMNS)
    with matplotlib.rc_context(_STYLE):
        canvas = Canvas(figsize=(8.6, height_in), layout="constrained")
        axes = canvas.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, ((heading, unit), series) in zip(axes, panels.items(), strict=True):
            medians = [summary.median for of_series in series.values() for summary in of_series.values()]
            log = bool(medians) and 0 < _LEAST_FOR_LOG * min(medians) <= max(medians)
            for index, (one, colour) in enumerate(colours.items()):
                for group, summary in series.get(one, {}).items():
                    y = groups.index(group) * pitch + index - (len(colours) - 1) / 2
                    axis.barh([y], [summary.median], height=0.86, color=colour, log=log)
                    if summary.p20 < summary.p80:
                        whisker = [[summary.median - summary.p20], [summary.p80 - summary.median]]
                        axis.errorbar([summary.median], [y], xerr=whisker, fmt="none", ecolor=_INK, elinewidth=0.8, capsize=1.5)
                    end = (max(summary.p80, summary.median), y)
                    axis.annotate(figure(summary.median), end, (4, 0), textcoords="offset points", va="center", fontsize=7.5)
            low, high = axis.get_xlim()
            axis.set_xlim(low, high * (3.5 if log else 1.12))
            axis.xaxis.set_major_formatter(_PLAIN)
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.grid(axis="y", visible=False)
            if unit == "x":
                axis.axvline(1, color=_INK, lw=0.8)
            axis.set(title=heading, xlabel=unit + (", logarithmic" if log else ""))
        axes[0].set_yticks([index * pitch for index in range(len(groups))], groups)
        axes[0].set_ylim((len(groups) - 1) * pitch + len(colours) / 2 + 0.4, -len(colours) / 2 - 0.4)
        if len(colours) > 1:
            handles = [Patch(color=colour, label=one) for one, colour in colours.items()]
            canvas.legend(handles=handles, loc="outside upper left", ncols=min(_LEGEND_COLUMNS, len(colours)))
    alt = f"{title}: bars of {', '.join(colours)} at {', '.join(groups)}, in {unit}. The table below has the numbers."
    return Figure(name=name, title=title, alt=alt, canvas=canvas)


def lines(name: str, title: str, panels: Panels, x_label: str) -> Figure:
    """Panels side by side, by heading and unit, both axes logarithmic: medians as lines, p20 to p80 as bands."""
    colours = _colours(panels)
    with matplotlib.rc_context(_STYLE):
        canvas = Canvas(figsize=(8.6, 3.4 + 0.2 * -(-len(colours) // _LEGEND_COLUMNS)), layout="constrained")
        axes = canvas.subplots(1, len(panels), squeeze=False)[0]
        for axis, ((heading, unit), series) in zip(axes, panels.items(), strict=True):
            for index, (one, colour) in enumerate(colours.items()):
                by_x = dict(sorted(series.get(one, {}).items()))
                medians, marker = [summary.median for summary in by_x.values()], _MARKERS[index % len(_MARKERS)]
                axis.plot(list(by_x), medians, color=colour, marker=marker, markersize=max(3.0, 8.0 - 1.4 * index), label=one)
                spread = ([summary.p20 for summary in by_x.values()], [summary.p80 for summary in by_x.values()])
                axis.fill_between(list(by_x), *spread, color=colour, alpha=0.18, lw=0)
            axis.set(title=heading, xlabel=x_label, ylabel=unit, xscale="log", yscale="log")
            for scale in (axis.xaxis, axis.yaxis):
                scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
                scale.set_major_formatter(_PLAIN)
                scale.set_minor_formatter(NullFormatter())
        handles, labels = axes[0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside upper left", ncols=min(_LEGEND_COLUMNS, len(colours)))
    shown = "; ".join(f"{heading} in {unit}" for heading, unit in panels)
    alt = f"{title}: {shown}, against {x_label}, for {', '.join(colours)}. The table below has the numbers."
    return Figure(name=name, title=title, alt=alt, canvas=canvas)


def _colours(panels: Panels) -> dict[str, str]:
    """By series. The systems of many figures have the same colour in all of them."""
    names = list(dict.fromkeys(one for series in panels.values() for one in series))
    kept = {next((name for name in names if name.startswith(start)), ""): _COLOURS[i] for i, start in enumerate(_KEPT)}
    left = [colour for colour in _COLOURS if colour not in [kept.get(name) for name in names]]
    others = [name for name in names if name not in kept]
    return {name: kept[name] if name in kept else left[others.index(name) % len(left)] for name in names}


# figures by suite


class Drawing(NamedTuple):
    """A figure: bars, or lines by a number. A panel for each metric, a bar or a line for each system at each workload."""

    suite: str
    slug: str
    title: str
    metrics: tuple[str, ...] = ()
    """Empty: all that are times; each is drawn like a workload, or if these are drawn, like a system."""
    workload: str = ""
    """A pattern that workloads match. What it captures as `group` or `x` names the bars or is the number, as `panel` and
    `series` it stands for the metric and the system, as `by` it splits the rows into figures."""
    x_label: str = ""
    """Of lines."""


_SHARED: Final = r".*?requests of (?P<group>\d+) \+.*?(?P<state>, (?:cold|warm))"
_NAMED: Final = r"(?P<group>[^:]+):"
_OF_USERS: Final = r"(?P<by>[^:]+?) (?P<group>mixed|single|long|shared cold|shared warm|shared again|sampled|full):"
_RATES: Final = r"(?P<by>.+ rates: .+), (?P<x>[\d.]+) requests/s, Poisson"
_LATENCIES: Final = ("first token", "time per output token")
_DRAWINGS: Final = (
    Drawing("driver_calls", "calls", "What each call of the driver takes", (), r"(?P<panel>.+?), (?P<series>.+)"),
    Drawing("append", "step", "What growing adds to a decode step", ("step, over static", "step")),
    Drawing("resize", "shrink", "Giving memory back", ("resize", "until back"), "shrink"),
    Drawing("resize", "regrow", "Taking memory again", ("first page", "until all are in"), "regrow"),
    Drawing("resize", "two-caches", "Memory handed over", ("first grow", "until all are in"), "two"),
    Drawing("memory_efficiency", "waste", "Memory held for running sequences that is no row", ("waste",), _NAMED),
    Drawing("memory_efficiency", "admitted", "Sequences that run at once in the same memory", ("admitted sequences",), _NAMED),
    Drawing("kernels", "decode", "Decode attention, by memory", ("bandwidth",), r"(?P<by>\S+) decode (?P<group>.+)"),
    Drawing("kernels", "prefill", "Prefill attention, by memory", ("throughput",), r"(?P<by>\S+) prefill (?P<group>.+)"),
    Drawing("prefix", "total", "Requests that share a prefix: time until the last answer", ("total",), _SHARED),
    Drawing("prefix", "memory", "Requests that share a prefix: memory that is held", ("memory, held",), _SHARED),
    Drawing(
        *("prefix", "attach", "Attaching a prefix", ("in the driver", "until the device is done")),
        *(r"attach (?P<x>\d+) tokens$", "tokens"),
    ),
    Drawing("prefix", "tree", "The radix tree alone", (), r"(?P<panel>a tree) of (?P<x>[\d,]+) nodes$", "nodes"),
    *(
        Drawing("serve", f"{part}-{slug}", f"{what}: {', '.join(metrics)}", metrics, rf"(?P<by>.+?) {part}: (?P<group>[^:]+)")
        for part, what in (
            ("closed", "All requests at once"),
            ("outside", "Beside transformers"),
            ("http", "Over HTTP and without"),
            ("grammar", "Answers by a grammar"),
        )
        for slug, metrics in (("throughput", ("throughput",)), ("latency", _LATENCIES))
    ),
    Drawing("serve", "users-throughput", "As users open them: throughput", ("throughput",), _OF_USERS),
    Drawing("serve", "users-latency", "As users open them: first tokens", ("first tokens",), _OF_USERS),
    *(
        Drawing("serve", f"policies-{slug}", f"Keeping some of the rows: {metric}", (metric,), r"(?P<group>.+) policies: ")
        for slug, metric in (("throughput", "throughput"), ("memory", "KV memory at peak"), ("fit", "sequences that fit"))
    ),
    Drawing("serve", "rates", "goodput and latency", ("goodput", *_LATENCIES), _RATES, "requests/s offered"),
    *(
        Drawing("collectives", what, f"{what}s over ranks", (what,), rf"(?P<panel>.+): {what} of (?P<x>[\d.]+) KiB", "KiB")
        for what in ("sum", "gather", "broadcast")
    ),
    Drawing("tiers", "bandwidth", "Stores and loads", ("store", "load"), r"(?P<group>.+)"),
    Drawing(
        "tiers", "conversations", "Conversations beyond the device's memory", ("throughput",), r"(?P<group>.+) working_set"
    ),
    Drawing(
        *("tiers", "first", "First token of a prompt: computed, or known to the device or a tier", ("first token",)),
        *(r"(?P<panel>.+) first: (?P<x>\d+) tokens in", "tokens"),
    ),
    Drawing("transformers", "decode", "A decode step over each cache", ("time per token",), r".+? decode: (?P<group>.+)"),
    Drawing("transformers", "admitted", "Requests that fit at once", ("admitted sequences",)),
    Drawing("quality", "losses", "What quantised K and V lose", ("perplexity above exact", "attention output error")),
    Drawing(
        *("streaming", "perplexity", "Along a text of 4 times the trained length", ("perplexity",)),
        *(r".+: \d+ to (?P<x>\d+) tokens", "tokens read"),
    ),
)


def figures(suite: str, rows: Sequence[Row], prefix: str) -> Iterator[Figure]:
    """Those of one suite on one device; names begin with `prefix`. What there are no rows of is not drawn."""
    rows = [row for row in rows if row.system != GPU and row.metric != FAILED]
    offered = {row.workload: row.summary.p50 for row in rows if row.metric == "rate"}  # the number, where it was measured
    for spec in (spec for spec in _DRAWINGS if spec.suite == suite):
        by_part: defaultdict[str, Panels] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
        for metric in spec.metrics or (None,):
            for row in rows:
                match = re.match(spec.workload, row.workload)
                if not match or (row.unit != "us" if metric is None else row.metric != metric):
                    continue
                if spec.x_label and row.summary.median <= 0:  # its axes are logarithmic
                    continue
                found = match.groupdict()
                if spec.x_label:
                    place: Any = offered.get(row.workload) or float(found["x"].replace(",", ""))
                else:
                    group = row.metric if metric is None else found.get("group", row.workload)
                    place = textwrap.fill(group + found.get("state", ""), 34)
                series = found.get("series", row.metric if metric is None else row.system)
                by_part[found.get("by", "")][found.get("panel", metric), row.unit][series][place] = row.summary
        for part, panels in by_part.items():
            name = "-".join(filter(None, (prefix, _slug(suite), spec.slug, _slug(part))))
            title = f"{part}: {spec.title}" if part else spec.title
            yield lines(name, title, panels, spec.x_label) if spec.x_label else bars(name, title, panels)


def against_vllm(rows: Sequence[Recorded]) -> Figure:
    """How many times as fast as vLLM, by workload and model."""
    panels: Panels = defaultdict(lambda: defaultdict(dict))
    for model, name in tables.MODELS.items():
        table = tables.TABLES[f"vllm-{model}"]
        for label, line in table.lines.items():
            _, theirs, ours = tables.measured(table.columns, line, rows).values()
            what = textwrap.fill(label.rpartition(", ")[0], 34)
            panels["times as fast as vLLM 0.25.1, on one H200", "x"][name][what] = exact(tables.better(ours, theirs), 1)
    return bars("against-vllm", "Against vLLM", panels)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


# the page


def main(arguments: Sequence[str]) -> int:
    """Write the page; its path is printed."""
    parser = Parser(
        prog="python -m bench report",
        description="One HTML page of rows, which needs no network. Of rows of the same thing the newest counts.",
    )
    default = OUT if any(OUT.glob("*.jsonl")) else _HERE / "results"
    parser.add_argument(
        "rows", nargs="*", type=Path, metavar="ROWS", help="files or folders; default: bench/out, or without rows bench/results"
    )
    parser.add_argument("--out", type=Path, default=OUT / "report", metavar="DIR", help="default: bench/out/report")
    parser.add_argument("--docs", type=Path, metavar="CHECKOUT", help="also the figures and tables of the documents there: .")
    options = parser.parse_args(arguments)
    try:
        page = write(options.rows or [default], options.out, options.docs)
    except ValueError as error:
        parser.refuse(str(error))
    print(page)
    return 0


def write(sources: Sequence[Path], out: Path, docs: Path | None = None) -> Path:
    """The page of these rows in the folder `out`, and the figures and tables of the documents in the checkout `docs`.

    Raises: ValueError for what cannot be read or written to, saying what would work.
    """
    rows = read(sources)
    recorded = newest(rows)
    make_folder(out)
    order = {suite: number for number, suite in enumerate(SUITES)}
    groups: defaultdict[tuple[str, str, bool], list[Recorded]] = defaultdict(list)
    for one in sorted(recorded, key=lambda one: order.get(one.row.suite, len(order))):
        groups[one.row.suite, one.provenance.device, one.provenance.quick].append(one)
    sections: list[dict[str, Any]] = [
        {
            "suite": suite,
            "question": SUITES.get(suite, ""),
            "device": device,
            "quick": quick,
            "origins": dict.fromkeys(one.provenance.origin for one in rows),
            "figures": [*figures(suite, [one.row for one in rows], _slug(device) + ("-quick" if quick else ""))],
            "rows": [one.row for one in rows],
        }
        for (suite, device, quick), rows in groups.items()
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"figure": figure, "safe_markup": Markup}
    full = [one.row for one in recorded if not one.provenance.quick]
    html = environment.get_template("report.html.j2").render(
        style=(_HERE / "report.css").read_text(encoding="utf-8"),
        num_rows=f"{len(recorded):,}",
        sources=", ".join(source.name for source in sources),
        answers=answers(full or [one.row for one in recorded]),
        num_quick=len(recorded) - len(full),
        failed=[one for one in recorded if one.row.metric == FAILED],
        sections=sections,
        runs=_runs(recorded),
    )
    if docs is not None:
        make_folder(docs / "docs" / "figures")
        drawn = [against_vllm(rows), *(each for section in sections for each in section["figures"])]
        for name, ending in DOCS.items():
            chosen = next((each for each in drawn if each.name.endswith(ending)), None)
            if chosen is not None:
                chosen.save(docs / "docs" / "figures" / f"{name}.png")
            print(f"{name}: {chosen.title if chosen else f'not written, since there are no rows of *-{ending}'}")
        tables.write(docs, rows)
    page = out / PAGE
    page.write_text(html, encoding="utf-8")
    return page


def _runs(recorded: Sequence[Recorded]) -> list[dict[str, str]]:
    """Where and from what rows were measured, newest first."""
    runs: defaultdict[Any, list[Recorded]] = defaultdict(list)
    for one in recorded:
        made = one.provenance
        runs[made.date, made.commit, made.device, made.seed, made.quick].append(one)
    return [
        {
            "date (UTC)": date,
            "suites": ", ".join(dict.fromkeys(one.row.suite for one in of_run)),
            "device": f"{device}, driver {of_run[0].provenance.driver}",
            "commit": commit,
            "seed": str(seed),
            "quick": "yes" if quick else "no",
            "versions": ", ".join(f"{name} {version}" for name, version in of_run[0].provenance.versions.items()),
        }
        for (date, commit, device, seed, quick), of_run in sorted(runs.items(), reverse=True)
    ]
