"""Rows as they come back from their files: for the page, and to compare two sets of them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from bench.marks import MARKS, read_marks
from bench.rows import FAILED, Provenance, Row
from bench.timing import Summary

_PERCENTILES: Final = tuple(field.name for field in fields(Summary))
_NAMES: Final = ("suite", "workload", "system", "metric", "unit")
_PROVENANCE: Final = tuple(field.name for field in fields(Provenance))

Key = tuple[str, str, str, str]
"""Suite, workload, system, metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A row, and where and on what it was measured."""

    row: Row
    provenance: Provenance

    @property
    def key(self) -> Key:
        """What it is a row of."""
        return self.row.suite, self.row.workload, self.row.system, self.row.metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was in some files: rows in their order, and the names of lines that a killed run has cut off."""

    rows: tuple[Recorded, ...]
    cut: tuple[str, ...]


def read(sources: Sequence[Path], commit: str | None = None) -> Reading:
    """The rows of files, and of all `*.jsonl` in folders; with `commit`, those of commits that begin so.

    Raises: ValueError for what is not there, is no row or leaves no rows, naming it and what would work.
    """
    rows: list[Recorded] = []
    cut: list[str] = []
    paths = [path for source in sources for path in _files(source)]
    for path in paths:
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                # A run that is killed leaves the half of a line, and the next one begins a new line behind it.
                cut.append(f"{path}:{number}")
                continue
            rows.append(_recorded(record, f"{path}:{number}"))
    if commit is not None:
        commits = dict.fromkeys(one.provenance.commit for one in rows)
        rows = [one for one in rows if one.provenance.commit.startswith(commit)]
        if not rows:
            there_are = ", ".join(commits) or "none at all"
            raise ValueError(f"no row of commit {commit} in {_joined(sources)}; there are {there_are}")
    if not rows:
        raise ValueError(f"no row in {_joined(sources)}; `python -m bench run` writes some to bench/out")
    return Reading(rows=tuple(rows), cut=tuple(cut))


def newest(rows: Iterable[Recorded]) -> list[Recorded]:
    """Of rows of the same thing on the same device, quick or not, the one that was measured last; in the order of `rows`."""
    last: dict[tuple[Key, str, bool], Recorded] = {}
    for one in rows:
        name = (one.key, one.provenance.device, one.provenance.quick)
        if name not in last or last[name].provenance.date <= one.provenance.date:
            last[name] = one
    return list(last.values())


def standing(rows: Sequence[Recorded], marks: Iterable[Mapping[str, Any]] = ()) -> list[Recorded]:
    """The newest rows, without failures that are mended: what failed has rows of a later run, or its piece has finished since.

    `marks` are those of bench/marks.py: what failed as a whole suite, or a part of one, is named as they name pieces.
    """
    measured: dict[tuple[str, str, str, bool], str] = {}
    finished: dict[tuple[str, str, bool], str] = {}
    for mark in marks:
        finished[mark["piece"], mark["device"], mark["quick"]] = mark["date"]
    for one in rows:
        if one.row.metric != FAILED:
            # An exception's note is a workload, or a workload and a system.
            for name in (one.row.workload, f"{one.row.workload}: {one.row.system}"):
                key = (one.row.suite, name, one.provenance.device, one.provenance.quick)
                measured[key] = max(measured.get(key, ""), one.provenance.date)

    def stands(one: Recorded) -> bool:
        where = (one.row.workload, one.provenance.device, one.provenance.quick)
        since = max(measured.get((one.row.suite, *where), ""), finished.get(where, ""))
        return one.row.metric != FAILED or one.provenance.date >= since

    return [one for one in newest(rows) if stands(one)]


def marks_beside(sources: Sequence[Path]) -> list[Mapping[str, Any]]:
    """Those in the folders that are read, or of the files that are."""
    folders = dict.fromkeys(source if source.is_dir() else source.parent for source in sources)
    return [mark for folder in folders for mark in read_marks(folder / MARKS)]


def _files(source: Path) -> Iterator[Path]:
    if source.is_dir():
        yield from sorted(path for path in source.glob("*.jsonl") if path.name != MARKS)
    elif not source.is_file():
        raise ValueError(f"{source}: no such file or folder; `python -m bench run` writes rows to bench/out")
    elif source.name != MARKS:
        yield source


def _recorded(record: Any, where: str) -> Recorded:
    wanted = (*_NAMES, *_PERCENTILES, *_PROVENANCE)
    absent = [name for name in wanted if name not in record] if isinstance(record, dict) else wanted
    if absent:
        raise ValueError(f"{where}: no row: it has no {', '.join(absent)}; rows are those that `python -m bench run` writes")
    return Recorded(
        row=Row(
            **{name: record[name] for name in _NAMES},
            summary=Summary(**{name: record[name] for name in _PERCENTILES}),
            bound=record.get("bound"),
        ),
        provenance=Provenance(**{name: record[name] for name in _PROVENANCE}),
    )


def _joined(sources: Sequence[Path]) -> str:
    return ", ".join(map(str, sources))
