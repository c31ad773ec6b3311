"""Charts of percentiles: horizontal bars by group and series, and lines against a number."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from bench.page.colours import colours
from bench.page.drawing import INK, Figure, drawing, finished
from bench.table import figure as written
from bench.timing import Summary, middle

_MARKERS: Final = "osD^vP*Xhd"
_BAR_IN: Final = 0.19
_GAP: Final = 0.8
"""Between groups of bars, in bars."""
_LEGEND_COLUMNS: Final = 3
_LEGEND_LINE_IN: Final = 0.2


def _plain(value: float, _: float | None = None) -> str:
    """A number written out, as they are in the tables."""
    return f"{value:,.10g}"


_WHISKER_STYLE: Final[Any] = {"fmt": "none", "ecolor": INK, "elinewidth": 0.8, "capsize": 1.5}

_SHORT: Final = 30
"""A logarithmic axis from a number to less than so many times it."""
_LEAST_FOR_LOG: Final = 10
"""Times the least bar that the largest is before a logarithmic axis is used: on it the bars' lengths say little."""
_MOST_OF_BARS: Final = 2.5
"""Times the largest bar that a bound may be and still be drawn: farther away it would leave no bar to be seen."""
_MOST_TICKS: Final = 7
_LABEL_SHARE: Final = 0.07
"""Of an axis, about as wide as a number behind a bar."""
_CHARACTER_SHARE: Final = 0.012
"""Of the axis of a figure of one panel, about as wide as a character of a tick."""
_ROOM: Final = 1.04
"""Above the highest point, whose marker would be cut."""
_LARGEST_MARKER, _MARKER_STEP, _LEAST_MARKER = 8.0, 1.4, 3.0
_WIDEST_LINE, _LINE_STEP, _LEAST_LINE = 2.8, 0.5, 1.1
"""Of lines that lie on one another the first is the widest, so that all of them are seen."""

Series = Mapping[str, Mapping[str, Summary]]
"""By series, and by the group that it was measured in."""
SeriesByNumber = Mapping[str, Mapping[float, Summary]]
"""By series, and by the number that it was measured at."""


def bars(
    name: str,
    title: str,
    unit: str,
    panels: Mapping[str, Series],
    *,
    log: bool = False,
    bounds: Mapping[str, float] | None = None,
    tails: bool = False,
) -> Figure:
    """Panels side by side, by their headings: in each a bar for each series in each group. All share their groups.

    Bars are medians, whiskers go from p20 to p80, with `tails` a dot is at p99, a dashed line across a group is its bound.
    A panel whose bars are all alike within a factor of ten has no logarithmic axis, even with `log`.
    """
    groups = list(dict.fromkeys(group for series in panels.values() for of_series in series.values() for group in of_series))
    names = list(dict.fromkeys(one for series in panels.values() for one in series))
    pitch = len(names) + _GAP
    longest = max((s.p80 for series in panels.values() for at in series.values() for s in at.values()), default=0.0)
    near = {group: bound for group, bound in (bounds or {}).items() if bound <= _MOST_OF_BARS * longest}
    far = [bound for group, bound in (bounds or {}).items() if group not in near]
    with drawing(0.9 + _BAR_IN * len(groups) * pitch + _legend_in(names), len(panels), share_y=True) as (figure, axes):
        for axis, (heading, series) in zip(axes, panels.items(), strict=True):
            is_log = log and _spans(series) >= _LEAST_FOR_LOG
            _draw_bars(axis, groups, names, series, near, log=is_log, tails=tails)
            for group, bound in near.items():
                if group in groups:
                    centre, half = groups.index(group) * pitch, len(names) / 2
                    axis.plot([bound, bound], [centre - half, centre + half], color=INK, linewidth=1.2, linestyle="--")
            _make_room(axis, log=is_log, num_ticks=_MOST_TICKS // len(panels) + 2)
            axis.set(title=heading, xlabel=unit + (", logarithmic" if is_log else ""))
        axes[0].set_yticks([index * pitch for index in range(len(groups))], groups)
        axes[0].set_ylim((len(groups) - 1) * pitch + len(names) / 2 + 0.4, -len(names) / 2 - 0.4)
        if len(names) > 1:
            handles = [Patch(color=colour, label=one) for one, colour in colours(names).items()]
            figure.legend(handles=handles, loc="outside upper left", ncols=min(_LEGEND_COLUMNS, len(names)))
        alt = f"{title}: bars of {', '.join(names)} at {', '.join(groups)}, in {unit}. The table below has the numbers."
        marks = "bars: medians; whiskers: p20 to p80" if _has_spread(panels.values()) else "bars: single figures"
        marks += "; dots: p99; numbers: medians" if tails else ""
        marks += "; dashed: the bound" if near else ""
        marks += f"; off the axis: bounds from {written(min(far))}" if far else ""
        return finished(figure, name, title, alt, f"{marks}; {_samples(panels.values())}.", _summaries(panels.values()))


def lines(
    name: str,
    title: str,
    panels: Mapping[tuple[str, str], SeriesByNumber],
    x_label: str,
    *,
    log_x: bool = False,
    log_y: Collection[str] = (),
    tails: Collection[str] = (),
    diagonal: Collection[str] = (),
) -> Figure:
    """Panels side by side, by heading and unit: medians as lines, p20 to p80 as bands.

    Named by their headings are panels with a logarithmic axis, with p99 as dotted lines, and with a dashed line where both
    axes have the same number. Where all were measured at one number there are no lines to draw: points with whiskers, and p99
    as a dash.
    """
    numbers = {number for series in panels.values() for by_number in series.values() for number in by_number}
    is_line, has_spread = len(numbers) > 1, _has_spread(panels.values())
    names = list(dict.fromkeys(one for series in panels.values() for one in series))
    with drawing(3.4 + _legend_in(names), len(panels)) as (figure, axes):
        for axis, ((heading, unit), series) in zip(axes, panels.items(), strict=True):
            (_draw_lines if is_line else _draw_points)(axis, names, series, tails=heading in tails)
            axis.set(title=heading, xlabel=x_label, ylabel=unit)
            if log_x and is_line:
                _make_log(axis, "x")
            if is_line and len(numbers) <= _MOST_TICKS:
                _tick(axis, numbers, len(panels))
            if heading in diagonal and is_line:
                ends = sorted(numbers)
                axis.plot(ends, ends, color=INK, linewidth=1.0, linestyle="--", zorder=1)
            if heading in log_y and is_line:
                _make_log(axis, "y")
            else:
                axis.set_ylim(0, axis.get_ylim()[1] * _ROOM)
                axis.yaxis.set_major_formatter(FuncFormatter(_plain))
        handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        columns = min(_LEGEND_COLUMNS, len(names))
        figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=columns)
        shown = "; ".join(f"{heading} in {unit}" for heading, unit in panels)
        alt = f"{title}: {shown}, against {x_label}, for {', '.join(names)}. The table below has the numbers."
        line, band, tail = ("lines", "bands", "dotted") if is_line else ("points", "whiskers", "dashes")
        marks = f"{line}: medians; {band}: p20 to p80" if has_spread else f"{line}: single figures"
        marks += f"; {tail}: p99" if any(heading in tails for heading, _ in panels) else ""
        marks += f"; dashed: as much as is offered ({', '.join(diagonal)})" if diagonal and is_line else ""
        return finished(figure, name, title, alt, f"{marks}; {_samples(panels.values())}.", _summaries(panels.values()))


def _draw_bars(
    axis: Any,
    groups: Sequence[str],
    names: Sequence[str],
    series: Series,
    bounds: Mapping[str, float],
    *,
    log: bool,
    tails: bool,
) -> None:
    if log:
        axis.set_xscale("log")
    positive = [s.p20 for of_series in series.values() for s in of_series.values() if s.p20 > 0]
    # Nothing is at 0 on a logarithmic axis: its number stands where the axis begins.
    least = min(positive, default=1.0) if log else 0.0
    label_width = _LABEL_SHARE * max([*positive, *bounds.values()], default=1.0)
    for index, (one, colour) in enumerate(colours(names).items()):
        at = series.get(one, {})
        ys = [groups.index(group) * (len(names) + _GAP) + index - (len(names) - 1) / 2 for group in at]
        axis.barh(ys, [middle(s) for s in at.values()], height=0.86, color=colour)
        spread = [(y, s) for y, s in zip(ys, at.values(), strict=True) if s.p20 < s.p80]
        if spread:
            medians = [middle(s) for _, s in spread]
            axis.errorbar(medians, [y for y, _ in spread], xerr=_whiskers([s for _, s in spread]), **_WHISKER_STYLE)
        for y, (group, s) in zip(ys, at.items(), strict=True):
            if tails and s.p99 > s.p80:
                axis.plot([s.p99], [y], marker="o", markersize=3, color=colour, markeredgecolor=INK, markeredgewidth=0.6)
            end = max(s.p99 if tails else s.p80, s.p50, least)
            # A bound just behind the bar would cross its number out.
            if not log and 0 <= bounds.get(group, -1.0) - end < label_width:
                end = bounds[group]
            axis.annotate(written(middle(s)), (end, y), (4, 0), textcoords="offset points", va="center", fontsize=7.5)
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)


def _draw_lines(axis: Any, names: Sequence[str], series: SeriesByNumber, *, tails: bool) -> None:
    for index, (one, colour) in enumerate(colours(names).items()):
        by_x = dict(sorted(series.get(one, {}).items()))
        xs, marker = list(by_x), _MARKERS[index % len(_MARKERS)]
        if not xs:
            continue
        size = max(_LARGEST_MARKER - _MARKER_STEP * index, _LEAST_MARKER)
        width = max(_WIDEST_LINE - _LINE_STEP * index, _LEAST_LINE)
        medians = [middle(s) for s in by_x.values()]
        axis.plot(xs, medians, color=colour, marker=marker, markersize=size, linewidth=width, label=one)
        if tails:
            axis.plot(xs, [s.p99 for s in by_x.values()], color=colour, linestyle=":", linewidth=1.2)
        low, high = [s.p20 for s in by_x.values()], [s.p80 for s in by_x.values()]
        axis.fill_between(xs, low, high, color=colour, alpha=0.18, lw=0)


def _draw_points(axis: Any, names: Sequence[str], series: SeriesByNumber, *, tails: bool) -> None:
    """What was measured at one number: the systems beside each other, around it."""
    for index, (one, colour) in enumerate(colours(names).items()):
        for number, s in series.get(one, {}).items():
            marker = _MARKERS[index % len(_MARKERS)]
            axis.plot([index], [middle(s)], color=colour, marker=marker, markersize=6, linestyle="none", label=one)
            if s.p20 < s.p80:
                axis.errorbar([index], [middle(s)], yerr=_whiskers([s]), **_WHISKER_STYLE)
            if tails:
                axis.plot([index], [s.p99], color=colour, marker="_", markersize=10, linestyle="none")
            axis.set_xticks([(len(names) - 1) / 2], [written(number)])
    axis.set_xlim(-1, len(names))


def _whiskers(summaries: Sequence[Summary]) -> list[list[float]]:
    """From p20 to p80, as distances from what is drawn."""
    return [[middle(s) - s.p20 for s in summaries], [s.p80 - middle(s) for s in summaries]]


def _has_spread(panels: Iterable[Series | SeriesByNumber]) -> bool:
    return any(s.p20 < s.p80 for series in panels for of_series in series.values() for s in of_series.values())


def _make_room(axis: Any, *, log: bool, num_ticks: int) -> None:
    """For the numbers behind the bars."""
    low, high = axis.get_xlim()
    # A bar begins at a power of ten: where the least of them ends it would have no length.
    axis.set_xlim(10 ** math.floor(math.log10(low)) if log else low, high * (3.5 if log else 1.12))
    if log:
        _make_log(axis, "x")
    else:
        axis.xaxis.set_major_locator(MaxNLocator(num_ticks, steps=(1, 2, 2.5, 5, 10)))
        axis.xaxis.set_major_formatter(FuncFormatter(_plain))


def _spans(series: Series) -> float:
    """How many times the least of a panel's medians the largest is; without end if one of them is 0."""
    medians = [middle(s) for of_series in series.values() for s in of_series.values()]
    return max(medians) / min(medians) if medians and min(medians) > 0 else math.inf


def _tick(axis: Any, numbers: Collection[float], num_panels: int) -> None:
    """At what was measured, and at nothing else; of numbers that would be written over one another at the larger."""
    place = math.log if axis.get_xscale() == "log" else float
    least, *_, largest = sorted(numbers)
    kept: list[float] = []
    for number in sorted(numbers, reverse=True):
        share = (place(kept[-1]) - place(number)) / (place(largest) - place(least)) if kept else 1.0
        if share > _CHARACTER_SHARE * num_panels * len(written(number)):
            kept.append(number)
    axis.xaxis.set_major_locator(FixedLocator(kept[::-1]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value)))


def _make_log(axis: Any, name: str) -> None:
    """A logarithmic axis whose numbers are written out; on a short one more of them than the powers of ten."""
    getattr(axis, f"set_{name}scale")("log")
    low, high = getattr(axis, f"get_{name}lim")()
    scale = getattr(axis, f"{name}axis")
    scale.set_major_locator(LogLocator(subs=(1, 2, 5) if high < _SHORT * low else (1,)))
    scale.set_major_formatter(FuncFormatter(_plain))
    scale.set_minor_formatter(NullFormatter())


def _legend_in(names: Sequence[str]) -> float:
    """The height of a legend."""
    return _LEGEND_LINE_IN * -(-len(names) // _LEGEND_COLUMNS)


def _summaries(panels: Iterable[Series | SeriesByNumber]) -> tuple[Summary, ...]:
    return tuple(summary for series in panels for of_series in series.values() for summary in of_series.values())


def _samples(panels: Iterable[Series | SeriesByNumber]) -> str:
    counts = sorted({summary.n for summary in _summaries(panels)})
    return f"n = {counts[0]:,}" + (f" to {counts[-1]:,}" if len(counts) > 1 else "")
