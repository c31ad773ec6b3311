"""`python -m bench report`: rows as one page that needs nothing else, and its figures as PNG files beside it.

scope     what each suite does not show, from bench/README.md    drawing   matplotlib, on light and on dark
charts    bars and lines of percentiles                          figures   what is drawn of each suite (serving, memory_map)
lines     a table's lines, and what stands against what          sections  all of it, by section
colours   which series has which                                 of_readme the figures that README.md shows
promises  what the issues have promised, kept or not
page.html.j2, macros.html.j2, page.css: how it looks
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import jinja2
from markupsafe import Markup, escape

from bench.arguments import Parser
from bench.page.drawing import Figure
from bench.page.memory_map import MAP, map_figures
from bench.page.of_readme import copy_figures
from bench.page.scope import EVERY, scopes
from bench.page.sections import Section, runs, sections
from bench.recorded import marks_beside, read, standing
from bench.rows import FAILED, Provenance, make_folder, short_commit
from bench.suites import SUITES

_HERE: Final = Path(__file__).parent
_OUT: Final = _HERE.parent / "out"
_RESULTS: Final = _HERE.parent / "results"

PAGE: Final = "report.html"
FIGURES: Final = "figures"


def main(arguments: Sequence[str]) -> int:
    """Write the page; the path is printed."""
    parser = Parser(
        prog="python -m bench report",
        description="One HTML page of rows, which needs no network, and its figures as PNG files. Of rows of the same thing "
        "the newest stands.",
    )
    parser.add_argument(
        "rows",
        nargs="*",
        type=Path,
        metavar="ROWS",
        help="files or folders of rows; default: bench/out, or if that has none bench/results",
    )
    parser.add_argument("--out", type=Path, default=_OUT / "report", metavar="DIR", help="default: bench/out/report")
    parser.add_argument(
        "--docs",
        type=Path,
        metavar="DIR",
        help="also the figures that README.md shows, under their names there: docs/figures; those without full rows stay",
    )
    options = parser.parse_args(arguments)
    sources = options.rows or [_OUT if any(_OUT.glob("*.jsonl")) else _RESULTS]
    try:
        page = write(sources, options.out, options.docs)
    except ValueError as error:
        parser.refuse(str(error))
    print(page)
    return 0


def write(sources: Sequence[Path], out: Path, docs: Path | None = None) -> Path:
    """The page of these rows, in the folder `out`; in `docs` the figures of README.md.

    Raises: ValueError for what cannot be read or written to, saying what would work.
    """
    reading = read(sources)
    if reading.notice:
        print(reading.notice, file=sys.stderr)
    figures = out / FIGURES
    try:
        make_folder(figures)
    except ValueError as error:
        raise ValueError(f"--out {error}") from error
    if docs is not None:
        try:
            make_folder(docs)
        except ValueError as error:
            raise ValueError(f"--docs {error}") from error
    rows = standing(reading.rows, marks_beside(sources))
    of_suites = scopes()
    found = sections(rows, of_suites)
    maps = _maps(sources)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "number": _number,
        "versions": _versions,
        "picture": _picture,
        "prose": _prose,
        "capitalize_first": lambda text: text[:1].upper() + text[1:],
    }
    measured = runs(rows)
    html = environment.get_template("page.html.j2").render(
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        num_rows=f"{len(reading.rows):,}",
        sources=", ".join(source.name for source in sources),
        cut=reading.notice,
        quick=sum(one.provenance.quick for one in rows),
        failed=[one for one in rows if one.row.metric == FAILED],
        sections=found,
        maps=maps,
        scope=of_suites.get(EVERY, ""),
        runs=measured,
        devices=list(dict.fromkeys(f"{run.device}, driver {run.driver}" for run, _ in measured)),
        commits=list(dict.fromkeys(short_commit(run.commit) for run, _ in measured)),
        seeds=sorted({run.seed for run, _ in measured}),
        versions=list(dict.fromkeys(_versions(run) for run, _ in measured)),
        texts=SUITES,
    )
    for figure in _all_figures(found, maps):
        (figures / f"{figure.name}.png").write_bytes(figure.png)
    for line in () if docs is None else copy_figures(found, maps, docs):
        print(line)
    page = out / PAGE
    page.write_text(html, encoding="utf-8")
    return page


def _all_figures(found: Sequence[Section], maps: Sequence[Figure]) -> list[Figure]:
    return [figure for section in found for group in section.groups for figure in group.figures] + list(maps)


def _maps(sources: Sequence[Path]) -> list[Figure]:
    """Of the memory maps that lie beside the rows."""
    folders = dict.fromkeys(source if source.is_dir() else source.parent for source in sources)
    found = []
    for folder in folders:
        if (path := folder / MAP).is_file():
            found += map_figures(json.loads(path.read_text(encoding="utf-8")), str(path))
    return found


def _number(value: float) -> str:
    """Four digits, by which it is seen on which side of what was promised it is."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _versions(run: Provenance) -> str:
    return ", ".join(f"{name} {version}" for name, version in run.versions.items())


def _picture(svg: str, alt: str) -> Markup:
    """An inline SVG that is read out as one picture."""
    return Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1))


def _prose(text: str) -> Markup:
    """The little Markdown that the documents' sentences have: code, emphasis, links, whose targets are files and left out."""
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
    html = str(escape(text))
    html = re.sub(r"`([^`]+)`", r"<code>\1</code>", html)
    html = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", html)
    return Markup(re.sub(r"\*([^*]+)\*", r"<em>\1</em>", html))
