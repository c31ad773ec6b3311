"""Figures by matplotlib, as SVG for the page, legible on light and on dark, and as PNG: their style, and how they are kept.

In the SVG the ink (text, axes, grid) is `currentColor`, the page's own. What carries data has mid tones, whose contrast to
black and to white is 3 to 1 at least.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure as Canvas

from bench.timing import Summary

INK: Final = "#010203"
"""Stands for the page's own colour, and is as good as black in a PNG."""

COLOURS: Final = ("#3d84d6", "#d4732a", "#2f9a5b", "#9a6bd1", "#c9508a", "#8a8f3c", "#3a9aa6", "#c2574b", "#7d858c", "#a9852f")
_WIDTH_IN: Final = 8.6
_STYLE: Final[Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.dpi": 144,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.alpha": 0.18,
    "grid.color": INK,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "savefig.facecolor": "none",
    # Text stays text: it can be read out, searched, and set in the reader's own font.
    "svg.fonttype": "none",
    "svg.hashsalt": "vmmkv",
    "text.color": INK,
    # A name with a dollar in it is no formula.
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawing. `alt` says what it shows to who does not see it; the numbers are in the section's table."""

    name: str
    title: str
    alt: str
    caption: str
    svg: str
    png: bytes
    summaries: tuple[Summary, ...] = ()
    """What is drawn: the very ones of the rows, by which one finds where these are of."""


@contextmanager
def drawing(height_in: float, num_panels: int = 1, *, share_y: bool = False) -> Iterator[tuple[Any, Sequence[Any]]]:
    """A figure and its panels side by side, in the style of all."""
    with matplotlib.rc_context(_STYLE):
        figure = Canvas(figsize=(_WIDTH_IN, height_in), layout="constrained")
        yield figure, figure.subplots(1, num_panels, squeeze=False, sharey=share_y)[0]


def finished(figure: Any, name: str, title: str, alt: str, caption: str, summaries: tuple[Summary, ...] = ()) -> Figure:
    """What has been drawn, in both forms."""
    svg, png = io.StringIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", facecolor="white")
    return Figure(
        name=name,
        title=title,
        alt=alt,
        caption=caption,
        svg=_inline(svg.getvalue(), name),
        png=png.getvalue(),
        summaries=summaries,
    )


def slug_of(text: str) -> str:
    """For the names of files, and ids."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _inline(svg: str, name: str) -> str:
    """For the page: the page's ink, its width, ids that no other figure has, and no words for who hears the page read out."""
    svg = svg[svg.index("<svg") :]
    svg = svg.replace(INK, "currentColor")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    start, end = svg.split(">", 1)
    return re.sub(r' (width|height)="[^"]*"', "", start) + ">" + end
