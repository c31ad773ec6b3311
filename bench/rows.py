"""A row: one metric of one system under one workload, with all that is needed to measure it again. JSON Lines.

    suite, workload, system, metric, unit | p20 p50 p80 p99 n | bound | device, driver, versions, commit, seed, quick, date

`RowFile` appends rows; `read` gives them back, of several files and folders.
"""

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

import numpy as np
import torch

import vmmkv

PACKAGES: Final = {"torch": "torch", "triton": "triton", "cuda_bindings": "cuda-bindings"}
"""By the name in a row, the distribution whose version it is."""

_ASK_DRIVER: Final = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")

FAILED: Final = "failed"
"""The metric of a workload that failed: 1 of the unit `runs`. Such a workload has no other rows."""

GPU: Final = "GPU"
"""The system of rows about the GPU itself: clocks, power, temperature."""

_HIGHER: Final = frozenset({"GB/s", "MiB/s", "TFLOP/s", "tok/s", "x", "requests/s"})
_LOWER: Final = frozenset({
    "us", "ms", "s", "ns/token", "steps", "calls", "/request", "/turn", "runs",
    "bytes", "bytes/token", "B", "KiB", "MiB", "GiB",
})  # fmt: skip
_BY_METRIC: Final[Mapping[str, bool | None]] = {
    "rate": None,  # what was offered
    "given back": None,
    "held": None,
    "memory, held": False,
    "same answers": True,
    "admitted sequences": True,
    "most of the budget": True,
    "prompt tokens attached": True,
    "preempted": False,
    "time per token over": False,
    "waste": False,
    "of it": False,
    "first tokens off": False,
    "perplexity": False,
    "attention output error": False,
    "gap": False,
    "growth": False,
}
"""By how a metric begins, where its unit does not say which direction is better, or says it wrongly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Percentiles of `n` samples. A single figure has the same number four times."""

    p20: float
    p50: float
    p80: float
    p99: float
    n: int

    @property
    def median(self) -> float:
        """The p50; of two samples their mean."""
        return (self.p20 + self.p80) / 2 if self.n == 2 else self.p50

    def overlaps(self, other: "Summary") -> bool:
        """Whether the intervals from p20 to p80 have a point in common."""
        return self.p20 <= other.p80 and other.p20 <= self.p80


def summarize(samples: Sequence[float]) -> Summary:
    """Percentiles without interpolation: each is a sample that was seen. Raises: ValueError if there is none."""
    if not len(samples):
        raise ValueError("there are no samples to summarize")
    p20, p50, p80, p99 = np.percentile(np.asarray(samples, dtype=np.float64), (20, 50, 80, 99), method="inverted_cdf")
    return Summary(p20=float(p20), p50=float(p50), p80=float(p80), p99=float(p99), n=len(samples))


def exact(value: float, n: int) -> Summary:
    """A single figure over `n` things."""
    return Summary(p20=value, p50=value, p80=value, p99=value, n=n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where and from what rows were measured."""

    device: str
    """The GPU's name, or the CPU's model."""
    driver: str
    """The version of NVIDIA's driver, or of the operating system's kernel."""
    versions: Mapping[str, str]
    commit: str
    seed: int
    quick: bool
    date: str
    """UTC, when the run began."""

    @classmethod
    def collect(cls, device: torch.device, *, seed: int, quick: bool, commit: str | None = None) -> "Provenance":
        """Ask the machine. `commit` is for a checkout without a repository."""
        on_gpu = device.type == "cuda"
        return cls(
            device=torch.cuda.get_device_name(device) if on_gpu else _cpu_model(),
            driver=_output(*_ASK_DRIVER).partition("\n")[0] or "unknown" if on_gpu else f"Linux {platform.release()}",
            versions={name: _version(package) for name, package in PACKAGES.items()}
            | {"vmmkv": vmmkv.__version__, "python": platform.python_version()},
            commit=commit or _commit(),
            seed=seed,
            quick=quick,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    @property
    def origin(self) -> str:
        """Commit and day, as they stand under a figure."""
        digits, changed, _ = self.commit.partition("-changed")
        return f"commit {digits[:12]}{changed} of {self.date[:10]}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table. `bound` is the best that the hardware allows, in the same unit, where that is known."""

    suite: str
    workload: str
    system: str
    metric: str
    unit: str
    summary: Summary
    bound: float | None = None

    @property
    def higher_is_better(self) -> bool | None:
        """By the metric's name, else by its unit. None if neither direction is better."""
        for start, higher in _BY_METRIC.items():
            if self.metric.startswith(start):
                return higher
        return True if self.unit in _HIGHER else False if self.unit in _LOWER else None

    def as_dict(self, provenance: Provenance) -> dict[str, object]:
        """Flat, in reading order."""
        row: dict[str, object] = {name: getattr(self, name) for name in _NAMES}
        row |= {name: _rounded(value) for name, value in asdict(self.summary).items()}
        return row | {"bound": _rounded(self.bound)} | asdict(provenance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A row as it came back from a file."""

    row: Row
    provenance: Provenance

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What it is a row of: suite, workload, system, metric."""
        return self.row.suite, self.row.workload, self.row.system, self.row.metric


_NAMES: Final = ("suite", "workload", "system", "metric", "unit")
_PERCENTILES: Final = tuple(field.name for field in fields(Summary))
_PROVENANCE: Final = tuple(field.name for field in fields(Provenance))


class RowFile:
    """Appends rows to `<folder>/<suite>.jsonl`. What is there stays: rows of other machines and commits, rows that lose."""

    def __init__(self, folder: Path, provenance: Provenance) -> None:
        self.folder = folder
        self.provenance = provenance
        make_folder(folder)

    def append(self, row: Row) -> None:
        """Write it through at once: a run that is cut short keeps what it measured."""
        with (self.folder / f"{row.suite}.jsonl").open("ab+") as file:
            # A line that a killed run left half written must not swallow this one.
            cut = False
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                cut = file.read(1) != b"\n"
            file.write((b"\n" if cut else b"") + json.dumps(row.as_dict(self.provenance)).encode() + b"\n")


def make_folder(folder: Path) -> None:
    """A folder that can be written to, with its parents. Raises: ValueError if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise ValueError(f"{folder} cannot be written to: {reason}; name one that can") from error


def read(sources: Sequence[Path], commit: str | None = None) -> list[Recorded]:
    """The rows of files, and of all `*.jsonl` in folders; with `commit`, those of commits that begin so.

    Raises: ValueError for a missing file, a line that is no row, or no rows at all, naming what would work.
    """
    rows: list[Recorded] = []
    for source in sources:
        if not source.exists():
            raise ValueError(f"{source}: no such file or folder; `python -m bench SUITE` writes rows to bench/out")
        for path in sorted(source.glob("*.jsonl")) if source.is_dir() else [source]:
            rows += _read_file(path)
    there_are = ", ".join(dict.fromkeys(one.provenance.commit[:12] for one in rows)) or "none"
    names = ", ".join(map(str, sources))
    if commit is not None:
        rows = [one for one in rows if commit and one.provenance.commit.startswith(commit)]
        if not rows:
            raise ValueError(f"no row of commit {commit!r} in {names}; there are {there_are}")
    if not rows:
        raise ValueError(f"no row in {names}; `python -m bench SUITE` writes some to bench/out")
    return rows


def newest(rows: Iterable[Recorded]) -> list[Recorded]:
    """Of rows of the same thing on the same device, quick or not, the one measured last; in the order of `rows`."""
    last: dict[tuple[object, ...], Recorded] = {}
    for one in rows:
        name = (one.key, one.provenance.device, one.provenance.quick)
        if name not in last or last[name].provenance.date <= one.provenance.date:
            last[name] = one
    return list(last.values())


def figure(value: float) -> str:
    """Three significant digits, and all of a larger number's whole part."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _read_file(path: Path) -> Iterator[Recorded]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _recorded(line, f"{path}:{number}: not a row")


def _recorded(line: str, where: str) -> Recorded:
    try:
        record = json.loads(line)
        parts = [{name: record[name] for name in names} for names in (_NAMES, _PERCENTILES, _PROVENANCE)]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: a killed run may have cut it; remove the line") from error
    row = Row(**parts[0], summary=Summary(**parts[1]), bound=record.get("bound"))
    return Recorded(row=row, provenance=Provenance(**parts[2]))


def _rounded(value: float | int | None) -> float | int | None:
    """Six significant digits: the rest is noise."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _cpu_model() -> str:
    with suppress(OSError):
        if match := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE):
            return match[1].strip()
    return platform.machine()


def _commit() -> str:
    """The commit of this checkout, with `-changed` if tracked files differ from it; "unknown" without git."""
    root = str(Path(__file__).parent)
    commit = _output("git", "-C", root, "rev-parse", "HEAD").strip()
    if not commit:
        return "unknown"
    changed = _output("git", "-C", root, "status", "--porcelain", "--untracked-files=no").strip()
    return f"{commit}-changed" if changed else commit


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
