"""The page's sections: of each the question, what failed, figures, tables, what is absent, and what it does not show."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.kernels.bars import Bar
from bench.page.drawing import Figure, slug_of
from bench.page.figures import figures
from bench.page.lines import Line, absent, lines
from bench.page.promises import Ratio, over_blocks, promises
from bench.prefix.naming import without_shape
from bench.recorded import Recorded
from bench.rows import FAILED, Provenance, origin_of
from bench.suites import SUITES


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """A section before there are rows: what it asks, of which suites, and the systems that these can compare."""

    name: str
    title: str
    question: str
    suites: tuple[str, ...]
    systems: tuple[str, ...] = ()
    """How their names begin, or what stands in them."""


HEADINGS: Final = (
    Heading(
        name="alloc",
        title="Allocation",
        question="What do the driver's calls cost, and what does a cache that grows and shrinks cost a decode loop?",
        suites=("driver_calls", "append", "elastic"),
    ),
    Heading(
        name="waste",
        title="Waste",
        question="How much of the memory that is held holds no token, and how many sequences fit?",
        suites=("waste",),
        systems=("vmmkv", "paged", "static"),
    ),
    Heading(
        name="kernels",
        title="Kernels",
        question="What do attention, append and copy cost over mapped memory, against plain memory and blocks?",
        suites=("kernels",),
        systems=("vmmkv", "paged", "cudaMalloc", "SDPA flash", "SDPA cuDNN", "FA3"),
    ),
    Heading(
        name="prefix",
        title="Prefix",
        question="What does sharing a prefix cost, in time and in memory, and what does it save?",
        suites=("prefix",),
        systems=("none", "vmmkv adopt", "vmmkv alias", "vmmkv compute", "vmmkv chooser", "paged"),
    ),
    Heading(
        name="serve",
        title="Serving",
        question="How fast does the whole engine serve, and how long does who asks wait?",
        suites=("serve",),
        systems=("vmmkv", "paged", "static", "transformers"),
    ),
    Heading(
        name="hf",
        title="In transformers",
        question="What does a VmmCache cost and save in transformers, against the caches that it has?",
        suites=("hf",),
        systems=("vmmkv VmmCache", "DynamicCache", "StaticCache"),
    ),
    Heading(
        name="quality",
        title="Quality",
        question="What do quantised K and V cost a model?",
        suites=("quality",),
        systems=("fp8", "int8", "int4"),
    ),
)
"""In the page's order. A suite that is in none of them gets a section of its own name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rows of one suite on one device, quick or not."""

    suite: str
    device: str
    quick: bool
    date: str
    """Of the newest row."""
    origins: tuple[tuple[str, int], ...]
    """Commit and day of the rows, newest first, and how many are of it."""
    failed: tuple[Recorded, ...]
    figures: tuple[Figure, ...]
    tables: Mapping[str, Mapping[str, list[Line]]]
    """By part, and by workload."""
    measured: Mapping[str, str]
    """By workload its commit and day, where these are not those of all."""
    origin_of_figure: Mapping[str, Sequence[str]]
    promises: tuple[Bar, ...]
    over_blocks: tuple[Ratio, ...]
    num_rows: int
    missing: tuple[tuple[str, list[str]], ...]

    def origin(self, figure: Figure) -> str:
        """What stands under a figure: device, commit and day of its rows; of figures that are computed from rows, of all."""
        named = self.origin_of_figure.get(figure.name) or [origin for origin, _ in self.origins]
        return f"{self.device}, {'; '.join(named)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """All of it."""

    heading: Heading
    groups: tuple[Group, ...]
    without_rows: tuple[str, ...]
    unseen: tuple[str, ...]
    """Systems that the suites can compare and that have no row."""
    scopes: tuple[tuple[str, str], ...]

    @property
    def num_failed(self) -> int:
        """Rows that say so."""
        return sum(len(group.failed) for group in self.groups)


def sections(rows: Sequence[Recorded], scopes: Mapping[str, str]) -> list[Section]:
    """All of the page, of rows of which the newest stand."""
    strangers = dict.fromkeys(one.row.suite for one in rows if one.row.suite not in SUITES)
    others = tuple(Heading(name=suite, title=suite, question="", suites=(suite,)) for suite in strangers)
    return [_section(heading, rows, scopes) for heading in (*HEADINGS, *others)]


def runs(rows: Sequence[Recorded]) -> list[tuple[Provenance, str]]:
    """Where and on what rows were measured, newest first, each with the suites of that run."""
    found: dict[tuple[object, ...], tuple[Provenance, dict[str, None]]] = {}
    for one in rows:
        provenance = one.provenance
        key = (provenance.date, provenance.commit, provenance.device, provenance.seed, provenance.quick)
        found.setdefault(key, (provenance, {}))[1][one.row.suite] = None
    by_date = sorted(found.values(), key=lambda run: run[0].date, reverse=True)
    return [(provenance, ", ".join(suites)) for provenance, suites in by_date]


def _section(heading: Heading, rows: Sequence[Recorded], scopes: Mapping[str, str]) -> Section:
    of_section = [one for one in rows if one.row.suite in heading.suites]
    groups = []
    for suite in heading.suites:
        of_suite = [one for one in of_section if one.row.suite == suite]
        for device, quick in dict.fromkeys((one.provenance.device, one.provenance.quick) for one in of_suite):
            alike = [one for one in of_suite if (one.provenance.device, one.provenance.quick) == (device, quick)]
            groups.append(_group(suite, device, quick, alike))
    measured = {one.row.system for one in of_section if one.row.metric != FAILED}
    present = {suite for suite in heading.suites if any(one.row.suite == suite for one in of_section)}
    return Section(
        heading=heading,
        groups=tuple(groups),
        without_rows=tuple(suite for suite in heading.suites if suite not in present),
        unseen=tuple(name for name in heading.systems if not any(name in system for system in measured)) if present else (),
        scopes=tuple((suite, scopes[suite]) for suite in heading.suites if suite in present and suite in scopes),
    )


def _origins(recorded: Sequence[Recorded]) -> tuple[tuple[str, int], ...]:
    by_date = sorted(recorded, key=lambda one: one.provenance.date, reverse=True)
    return tuple(Counter(_origin(one) for one in by_date).items())


def _origin(one: Recorded) -> str:
    return origin_of(one.provenance.commit, one.provenance.date)


def _group(suite: str, device: str, quick: bool, recorded: Sequence[Recorded]) -> Group:
    rows = [one.row for one in recorded]
    measured = [row for row in rows if row.metric != FAILED]
    by_workload = lines(rows)
    parts = {workload: _part(suite, workload) for workload in by_workload}
    prefix = slug_of(device) + ("-quick" if quick else "")
    origins = _origins([one for one in recorded if one.row.metric != FAILED] or recorded)
    drawn = tuple(figures(suite, measured, prefix))
    known = {id(one.row.summary): _origin(one) for one in recorded}
    by_name: dict[str, list[Recorded]] = defaultdict(list)
    for one in recorded:
        by_name[one.row.workload].append(one)
    return Group(
        suite=suite,
        device=device,
        quick=quick,
        date=max(one.provenance.date for one in recorded),
        origins=origins,
        failed=tuple(one for one in recorded if one.row.metric == FAILED),
        figures=drawn,
        origin_of_figure={
            figure.name: list(dict.fromkeys(known[id(each)] for each in figure.summaries if id(each) in known))
            for figure in drawn
        },
        tables={
            part: {workload: of_workload for workload, of_workload in by_workload.items() if parts[workload] == part}
            for part in dict.fromkeys(parts.values())
        },
        measured={
            name: "; ".join(origin for origin, _ in _origins(of_name)) for name, of_name in by_name.items() if len(origins) > 1
        },
        promises=tuple(promises(suite, measured)),
        over_blocks=tuple(over_blocks(measured)),
        num_rows=len(measured),
        missing=tuple(absent(rows, parts)),
    )


def _part(suite: str, workload: str) -> str:
    """What a workload is a part of, by how its suite names workloads; workloads of one part are compared with one another."""
    if suite == "kernels":
        return " ".join(workload.split(" ")[:2])
    if suite in ("serve", "hf"):
        return workload.partition(":")[0]
    if suite == "prefix":
        match = re.search(r" (requests) of |^(attention|chat|attach|a tree)", without_shape(workload))
        return (match[1] or match[2]) if match else workload
    return ""
