"""Rows as they come back from their files: for the page, and to compare two sets of them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from bench.marks import MARKS, read_marks
from bench.rows import FAILED, Provenance, Row, short_commit
from bench.timing import Summary

_PERCENTILES: Final = tuple(field.name for field in fields(Summary))
_NAMES: Final = ("suite", "workload", "system", "metric", "unit")
_MOST_NAMED: Final = 5
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
    """What was in some files: rows in their order, and by file and number the lines that are none."""

    rows: tuple[Recorded, ...]
    cut: tuple[str, ...]

    @property
    def notice(self) -> str | None:
        """What to tell the reader of the lines that are left out, in one line; None if there are none."""
        if not self.cut:
            return None
        more = ", ..." if len(self.cut) > _MOST_NAMED else ""
        lines = "1 line is" if len(self.cut) == 1 else f"{len(self.cut):,} lines are"
        return f"{', '.join(self.cut[:_MOST_NAMED])}{more}: not a row; {lines} left out"


def read(sources: Sequence[Path], commit: str | None = None) -> Reading:
    """The rows of files, and of all `*.jsonl` in folders; with `commit`, those of commits that begin so.

    Raises: ValueError for what is not there, is no row or leaves no rows, naming it and what would work.
    """
    rows: list[Recorded] = []
    cut: list[str] = []
    for source in sources:
        for path in _files(source):
            found, left_out = _read_file(path)
            # In a folder it may be what a killed run has left of its first row.
            if left_out and not found and path == source:
                raise ValueError(f"{left_out[0]}: not a row; rows are lines of JSON that `python -m bench run` writes")
            rows += found
            cut += left_out
    if commit is not None:
        commits = dict.fromkeys(short_commit(one.provenance.commit) for one in rows)
        rows = [one for one in rows if commit and one.provenance.commit.startswith(commit)]
        if not rows:
            there_are = ", ".join(commits) or "none at all"
            asked = f"no row of commit {commit} in" if commit else "no commit stands behind the @ of"
            raise ValueError(f"{asked} {_joined(sources)}; there are {there_are}")
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


def _read_file(path: Path) -> tuple[list[Recorded], list[str]]:
    """Rows, and the places of lines that are no JSON: what a killed run has cut off, and what something else has spoiled."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    rows: list[Recorded] = []
    cut: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            cut.append(f"{path}:{number}")
            continue
        rows.append(_recorded(record, f"{path}:{number}"))
    return rows, cut


def _recorded(record: Any, where: str) -> Recorded:
    wanted = (*_NAMES, *_PERCENTILES, *_PROVENANCE)
    absent = [name for name in wanted if name not in record] if isinstance(record, dict) else wanted
    if absent:
        names = ", ".join(absent[:_MOST_NAMED]) + (", ..." if len(absent) > _MOST_NAMED else "")
        raise ValueError(f"{where}: no row: it has no {names}; rows are those that `python -m bench run` writes")
    not_numbers = [name for name in _PERCENTILES if not isinstance(record[name], int | float)]
    if not_numbers:
        raise ValueError(f"{where}: no row: its {', '.join(not_numbers)} should be numbers; mend the line, or remove it")
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
