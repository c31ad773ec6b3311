"""What has finished, kept beside the rows, so that a run which was cut short can go on where it was (`--resume`)."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.rows import Provenance, append_line
from bench.settings import Settings

MARKS: Final = "finished.jsonl"
"""The file's name in the folder of the rows."""

_UNKNOWN: Final = ("unknown", "-changed")
"""How a commit ends that does not say what was measured."""


class Marks:
    """The pieces of suites that have finished in a folder, without a failure: a JSON line each, written when one is over."""

    def __init__(self, folder: Path, provenance: Provenance) -> None:
        self._path, self._provenance = folder / MARKS, provenance

    @property
    def refusal(self) -> str | None:
        """Why nothing can be skipped; None if it can."""
        if self._provenance.commit.endswith(_UNKNOWN):
            return (
                f"nothing is skipped: the commit is {self._provenance.commit}, which does not say what was measured; "
                "commit what has changed, or name it by --commit"
            )
        return None

    def finished(self, piece: str, settings: Settings) -> str | None:
        """When this piece finished, of the same commit on the same device by the same options; None if it did not."""
        if self.refusal:
            return None
        wanted = self._record(piece, settings)
        dates = [mark["date"] for mark in read_marks(self._path) if wanted.items() <= mark.items()]
        return dates[-1] if dates else None

    def add(self, piece: str, settings: Settings) -> None:
        """This piece has finished."""
        append_line(self._path, self._record(piece, settings) | {"date": datetime.now(UTC).isoformat(timespec="seconds")})

    def _record(self, piece: str, settings: Settings) -> dict[str, object]:
        provenance = self._provenance
        return {
            "piece": piece,
            "commit": provenance.commit,
            "device": provenance.device,
            "seed": provenance.seed,
            "quick": provenance.quick,
            "options": _options(settings),
        }


def read_marks(path: Path) -> Iterator[Mapping[str, Any]]:
    """Those in a file, which need not be there. A line that was cut off is of a piece that cannot be known to have finished."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            mark = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(mark, dict) and {"piece", "device", "quick", "date"} <= mark.keys():
            yield mark


def _options(settings: Settings) -> dict[str, object]:
    """As JSON has them: lists for tuples, shapes by their names."""
    given: dict[str, object] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name == "shapes":
            value = [shape.name for shape in value]
        elif field.name == "shape":
            value = value.name
        elif isinstance(value, tuple):
            value = list(value)
        elif not isinstance(value, str | int | float | None):
            value = str(value)  # the device, and a path
        given[field.name] = value
    return given
