"""Charts of percentiles: horizontal bars by group and series, and lines against a number."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.page.drawing import COLOURS, INK, Figure, drawing, finished
from bench.table import figure as written
from bench.timing import Summary, middle

_MARKERS: Final = "osD^vP*Xhd"
_BAR_IN: Final = 0.19
_GAP: Final = 0.8
"""Between groups of bars, in bars."""
_LEGEND_COLUMNS: Final = 3
_LEGEND_LINE_IN: Final = 0.2

_WHISKER_STYLE: Final[Any] = {"fmt": "none", "ecolor": INK, "elinewidth": 0.8, "capsize": 1.5}

_SHORT: Final = 30
"""A logarithmic axis from a number to less than so many times it."""

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
) -> Figure:
    """Panels side by side, by their headings: in each a bar for each series in each group. All share their groups.

    Bars are medians, whiskers go from p20 to p80, a dashed line across a group is its bound.
    """
    groups = list(dict.fromkeys(group for series in panels.values() for of_series in series.values() for group in of_series))
    names = list(dict.fromkeys(one for series in panels.values() for one in series))
    pitch = len(names) + _GAP
    with drawing(0.9 + _BAR_IN * len(groups) * pitch + _legend_in(names), len(panels), share_y=True) as (figure, axes):
        for axis, (heading, series) in zip(axes, panels.items(), strict=True):
            _draw_bars(axis, groups, names, series, log=log)
            for group, bound in (bounds or {}).items():
                if group in groups:
                    centre, half = groups.index(group) * pitch, len(names) / 2
                    axis.plot([bound, bound], [centre - half, centre + half], color=INK, linewidth=1.2, linestyle="--")
            _make_room(axis, log=log)
            axis.set(title=heading, xlabel=unit + (", logarithmic" if log else ""))
        axes[0].set_yticks([index * pitch for index in range(len(groups))], groups)
        axes[0].set_ylim((len(groups) - 1) * pitch + len(names) / 2 + 0.4, -len(names) / 2 - 0.4)
        if len(names) > 1:
            handles = [Patch(color=colour, label=one) for one, colour in _colours(names).items()]
            figure.legend(handles=handles, loc="outside upper left", ncols=min(_LEGEND_COLUMNS, len(names)))
        alt = f"{title}: bars of {', '.join(names)} at {', '.join(groups)}, in {unit}. The table below has the numbers."
        marks = "bars: medians; whiskers: p20 to p80" if _has_spread(panels.values()) else "bars: single figures"
        marks += "; dashed: the bound" if bounds else ""
        return finished(figure, name, title, alt, f"{marks}; {_samples(panels.values())}.")


def lines(
    name: str,
    title: str,
    panels: Mapping[tuple[str, str], SeriesByNumber],
    x_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    tails: bool = False,
) -> Figure:
    """Panels side by side, by heading and unit: medians as lines, p20 to p80 as bands, and with `tails` p99 as dotted lines.

    Where all were measured at one number there are no lines to draw: points with whiskers, and with `tails` p99 as a dash.
    """
    numbers = {number for series in panels.values() for by_number in series.values() for number in by_number}
    is_line, has_spread = len(numbers) > 1, _has_spread(panels.values())
    names = list(dict.fromkeys(one for series in panels.values() for one in series))
    with drawing(3.4 + _legend_in(names), len(panels)) as (figure, axes):
        for axis, ((heading, unit), series) in zip(axes, panels.items(), strict=True):
            (_draw_lines if is_line else _draw_points)(axis, names, series, tails=tails)
            axis.set(title=heading, xlabel=x_label, ylabel=unit)
            if log_x and is_line:
                _make_log(axis, "x")
            if log_y and is_line:
                _make_log(axis, "y")
            else:
                axis.set_ylim(bottom=0)
        handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        columns = min(_LEGEND_COLUMNS, len(names))
        figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=columns)
        shown = "; ".join(f"{heading} in {unit}" for heading, unit in panels)
        alt = f"{title}: {shown}, against {x_label}, for {', '.join(names)}. The table below has the numbers."
        line, band, tail = ("lines", "bands", "dotted") if is_line else ("points", "whiskers", "dashes")
        marks = f"{line}: medians; {band}: p20 to p80" if has_spread else f"{line}: single figures"
        marks += f"; {tail}: p99" if tails else ""
        return finished(figure, name, title, alt, f"{marks}; {_samples(panels.values())}.")


def _draw_bars(axis: Any, groups: Sequence[str], names: Sequence[str], series: Series, *, log: bool) -> None:
    if log:
        axis.set_xscale("log")
    positive = [s.p20 for of_series in series.values() for s in of_series.values() if s.p20 > 0]
    # Nothing is at 0 on a logarithmic axis: its number stands where the axis begins.
    least = min(positive, default=1.0) if log else 0.0
    for index, (one, colour) in enumerate(_colours(names).items()):
        at = series.get(one, {})
        ys = [groups.index(group) * (len(names) + _GAP) + index - (len(names) - 1) / 2 for group in at]
        axis.barh(ys, [middle(s) for s in at.values()], height=0.86, color=colour)
        spread = [(y, s) for y, s in zip(ys, at.values(), strict=True) if s.p20 < s.p80]
        if spread:
            medians = [middle(s) for _, s in spread]
            axis.errorbar(medians, [y for y, _ in spread], xerr=_whiskers([s for _, s in spread]), **_WHISKER_STYLE)
        for y, s in zip(ys, at.values(), strict=True):
            end = (max(s.p80, s.p50, least), y)
            axis.annotate(written(middle(s)), end, (4, 0), textcoords="offset points", va="center", fontsize=7.5)
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)


def _draw_lines(axis: Any, names: Sequence[str], series: SeriesByNumber, *, tails: bool) -> None:
    for index, (one, colour) in enumerate(_colours(names).items()):
        by_x = dict(sorted(series.get(one, {}).items()))
        xs, marker = list(by_x), _MARKERS[index % len(_MARKERS)]
        if not xs:
            continue
        axis.plot(xs, [middle(s) for s in by_x.values()], color=colour, marker=marker, markersize=4.5, label=one)
        if tails:
            axis.plot(xs, [s.p99 for s in by_x.values()], color=colour, linestyle=":", linewidth=1.2)
        low, high = [s.p20 for s in by_x.values()], [s.p80 for s in by_x.values()]
        axis.fill_between(xs, low, high, color=colour, alpha=0.18, lw=0)


def _draw_points(axis: Any, names: Sequence[str], series: SeriesByNumber, *, tails: bool) -> None:
    """What was measured at one number: the systems beside each other, around it."""
    for index, (one, colour) in enumerate(_colours(names).items()):
        for number, s in series.get(one, {}).items():
            marker = _MARKERS[index % len(_MARKERS)]
            axis.plot([index], [middle(s)], color=colour, marker=marker, markersize=6, linestyle="none", label=one)
            if s.p20 < s.p80:
                axis.errorbar([index], [middle(s)], yerr=_whiskers([s]), **_WHISKER_STYLE)
            if tails:
                axis.plot([index], [s.p99], color=colour, marker="_", markersize=10, linestyle="none")
            axis.set_xticks([(len(names) - 1) / 2], [f"{number:,.10g}"])
    axis.set_xlim(-1, len(names))


def _whiskers(summaries: Sequence[Summary]) -> list[list[float]]:
    """From p20 to p80, as distances from what is drawn."""
    return [[middle(s) - s.p20 for s in summaries], [s.p80 - middle(s) for s in summaries]]


def _has_spread(panels: Iterable[Series | SeriesByNumber]) -> bool:
    return any(s.p20 < s.p80 for series in panels for of_series in series.values() for s in of_series.values())


def _make_room(axis: Any, *, log: bool) -> None:
    """For the numbers behind the bars."""
    low, high = axis.get_xlim()
    axis.set_xlim(low, high * (3.5 if log else 1.12))
    if log:
        _make_log(axis, "x")


def _make_log(axis: Any, name: str) -> None:
    """A logarithmic axis whose numbers are written out; on a short one more of them than the powers of ten."""
    getattr(axis, f"set_{name}scale")("log")
    low, high = getattr(axis, f"get_{name}lim")()
    scale = getattr(axis, f"{name}axis")
    scale.set_major_locator(LogLocator(subs=(1, 2, 5) if high < _SHORT * low else (1,)))
    scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    scale.set_minor_formatter(NullFormatter())


def _colours(names: Sequence[str]) -> dict[str, str]:
    """vmmkv and blocks have the same colours in all figures where there is one of each; others what is left, in order."""
    found: dict[str, str] = {}
    for start, colour in zip(("vmmkv", "paged"), COLOURS, strict=False):
        if one := next((name for name in names if name.startswith(start)), None):
            found[one] = colour
    left = [colour for colour in COLOURS if colour not in found.values()]
    others = [name for name in names if name not in found]
    found |= {name: left[index % len(left)] for index, name in enumerate(others)}
    return {name: found[name] for name in names}


def _legend_in(names: Sequence[str]) -> float:
    """The height of a legend."""
    return _LEGEND_LINE_IN * -(-len(names) // _LEGEND_COLUMNS)


def _samples(panels: Iterable[Series | SeriesByNumber]) -> str:
    counts = sorted({summary.n for series in panels for of_series in series.values() for summary in of_series.values()})
    return f"n = {counts[0]:,}" + (f" to {counts[-1]:,}" if len(counts) > 1 else "")
