"""`python -m bench report`: rows as one HTML page that needs neither network nor scripts; with --docs also in the documents.

    rows ── newest of each ──> answers: vmmkv against another system, over all workloads ──> losses
     │                    └──> sections: of each suite figures, and a table of all rows ──> report.html.j2
     └── last of each commit ──> trends: what the answers are made of, from commit to commit

Figures are by matplotlib, as SVG within the page. Their ink is `currentColor`, the page's own; what carries data has mid tones,
whose contrast to black and to white is 3 to 1 at least.
"""

import io
import re
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from bench.cli import OUT, Parser
from bench.compare import LIMIT, Pair
from bench.figures import Question
from bench.rows import FAILED, GPU, Recorded, Row, Summary, exact, figure, make_folder, newest, read
from bench.suites import SUITES, load

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
    """Answers to all questions of the rows' suites of which both sides have rows."""
    by_workload: defaultdict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:  # vLLM's rows have its version behind the name
        by_workload[row.suite, row.metric, row.workload][re.sub("^vLLM .*", "vLLM", row.system)] = row
    given = []
    for suite, question in _questions(rows):
        ratios, losses = {}, []
        for (*subject, workload), systems in by_workload.items():
            ours, other = systems.get(question.ours), _best_of(systems, question.other)
            is_asked = subject == [suite, question.metric] and question.is_of(workload)
            if is_asked and ours and other and ours.summary.median > 0:
                ratio = ours.summary.median / other.summary.median
                ratios[workload] = ratio if ours.higher_is_better else 1 / ratio
                if ratios[workload] < 1 and not ours.summary.overlaps(other.summary):
                    losses.append((workload, ratios[workload], ours, other))
        if ratios:
            given.append(Comparison(question, ratios, sorted(losses, key=lambda loss: loss[1])))
    return given


def _questions(rows: Iterable[Row]) -> list[tuple[str, Question]]:
    """All that suites ask of these rows."""
    return [
        (suite, question) for suite in dict.fromkeys(row.suite for row in rows) for question in _declared(suite, "QUESTIONS")
    ]


def _declared(suite: str, what: str) -> Sequence[Any]:
    """What a suite says of its rows; nothing of a suite that is not there any more."""
    return getattr(load(suite), what, ()) if suite in SUITES else ()


def _best_of(systems: Mapping[str, Row], pattern: str) -> Row | None:
    """Of the systems whose names match, the best; None if none does."""
    rows = [row for name, row in systems.items() if fnmatchcase(name, pattern) and row.summary.median > 0]
    return max(rows, key=lambda row: row.summary.median if row.higher_is_better else -row.summary.median, default=None)


# trends


class Trend(NamedTuple):
    """A figure of vmmkv by commit: the last row of each, by date, and how the newest compares with the one before."""

    rows: Sequence[Recorded]
    last: Pair

    def svg(self) -> Markup:
        """A line through the medians."""
        values = [one.row.summary.median for one in self.rows]
        low, span = min(values), max(values) - min(values) or 1.0
        places = [(4 + 112 * n / (len(values) - 1), 20 - 16 * (value - low) / span) for n, value in enumerate(values)]
        line, (x, y) = " ".join(f"{x:.1f},{y:.1f}" for x, y in places), places[-1]
        said = "; ".join(f"{figure(value)}, {one.provenance.origin}" for value, one in zip(values, self.rows, strict=True))
        drawn = f'<polyline points="{line}" fill="none" stroke="currentColor"/><circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
        return Markup(f'<svg class="trend" viewBox="0 0 120 24" role="img"><title>{escape(said)}</title>{drawn}</svg>')


def trends(rows: Sequence[Recorded]) -> dict[tuple[str, str, bool], list[Trend]]:
    """By suite, device, and whether rows are quick: what questions ask of vmmkv, where two commits have it or more."""
    asked = _questions(one.row for one in rows)
    commits: defaultdict[Any, dict[str, Recorded]] = defaultdict(dict)
    for one in sorted(rows, key=lambda one: one.provenance.date):
        row, made = one.row, one.provenance
        if any(
            (row.suite, row.metric, row.system) == (suite, question.metric, question.ours) and question.is_of(row.workload)
            for suite, question in asked
        ):
            of_commits = commits[one.key, made.device, made.quick]
            of_commits.pop(made.commit, None)  # to the end: a commit stands where it was measured last
            of_commits[made.commit] = one
    found: defaultdict[tuple[str, str, bool], list[Trend]] = defaultdict(list)
    for (key, device, quick), of_commits in commits.items():
        if len(of_commits) > 1:
            points = list(of_commits.values())
            found[key[0], device, quick].append(Trend(points, Pair(old=points[-2], new=points[-1], limit=LIMIT)))
    return dict(found)


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


def figures(suite: str, rows: Sequence[Row], prefix: str) -> Iterator[Figure]:
    """Those of one suite on one device; names begin with `prefix`. What there are no rows of is not drawn."""
    rows = [row for row in rows if row.system != GPU and row.metric != FAILED]
    offered = {row.workload: row.summary.p50 for row in rows if row.metric == "rate"}  # the number, where it was measured
    for spec in _declared(suite, "FIGURES"):
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
            "question": SUITES[suite].text if suite in SUITES else "",
            "device": device,
            "quick": quick,
            "days": sorted(dict.fromkeys(pick(one.provenance.date[:10] for one in rows) for pick in (min, max))),
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
        trends=trends(rows),
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
