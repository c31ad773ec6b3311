"""A row: one metric of one system under one workload, with all that is needed to measure it again. JSON Lines."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

import torch

import vmmkv
from bench.timing import Summary, exact

PACKAGES: Final = {"torch": "torch", "triton": "triton", "cuda_bindings": "cuda-bindings"}
"""By the name in a row, the distribution whose version it is."""

FAILED: Final = "failed"
"""The metric of a row of what has failed and so has no other: of 1 run, in the unit `runs`."""


_COMMIT_DIGITS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where and on what rows were measured."""

    device: str
    """The GPU's name, or the CPU's model."""
    driver: str
    """The version of NVIDIA's driver, or of the kernel."""
    versions: Mapping[str, str]
    commit: str
    seed: int
    quick: bool
    date: str
    """UTC, when the run began."""

    @classmethod
    def collect(cls, device: torch.device, *, seed: int, quick: bool, commit: str | None = None) -> "Provenance":
        """Ask the machine; `commit` where it has no repository to ask."""
        on_gpu = device.type == "cuda"
        return cls(
            device=torch.cuda.get_device_name(device) if on_gpu else _cpu_model(),
            driver=_nvidia_driver() if on_gpu else f"Linux {platform.release()}",
            versions={name: _version(package) for name, package in PACKAGES.items()}
            | {"vmmkv": vmmkv.__version__, "python": platform.python_version()},
            commit=commit or _commit(),
            seed=seed,
            quick=quick,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table. `bound` is the best that the hardware allows, in the same unit, where that is known."""

    suite: str
    workload: str
    system: str
    metric: str
    unit: str
    summary: Summary
    bound: float | None = None

    @classmethod
    def failed(cls, suite: str, workload: str, system: str) -> "Row":
        """What says that there is no other."""
        return cls(suite=suite, workload=workload, system=system, metric=FAILED, unit="runs", summary=exact(1, 1))

    def as_dict(self, provenance: Provenance) -> dict[str, object]:
        """Flat, in the order in which one reads it."""
        row: dict[str, object] = {name: getattr(self, name) for name in ("suite", "workload", "system", "metric", "unit")}
        row |= {name: _rounded(value) for name, value in asdict(self.summary).items()}
        return row | {"bound": _rounded(self.bound)} | asdict(provenance)


def make_folder(folder: Path) -> None:
    """A folder that can be written to, with those above it. Raises: ValueError if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise ValueError(f"{folder} cannot be written to: {reason}; name one that can") from error


def short_commit(commit: str) -> str:
    """Twelve digits of it, and whether files had changed since."""
    digits, changed, _ = commit.partition("-changed")
    return digits[:_COMMIT_DIGITS] + changed


def origin_of(commit: str, date: str) -> str:
    """As it stands under a figure."""
    return f"commit {short_commit(commit)} of {date[: len('2026-01-01')]}"


class RowFile:
    """Appends rows to `<folder>/<suite>.jsonl`. What is there stays: rows of other machines and commits, rows that lose."""

    def __init__(self, folder: Path, provenance: Provenance) -> None:
        self.folder = folder
        self.provenance = provenance
        make_folder(folder)

    def append(self, row: Row) -> None:
        """Write it through at once, so that a run which is cut short keeps what it measured."""
        append_line(self.folder / f"{row.suite}.jsonl", row.as_dict(self.provenance))


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """A record at the end of a file of JSON lines. A line that a killed run left half written does not swallow it."""
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            cut = file.read(1) != b"\n"
        else:
            cut = False
        file.write((b"\n" if cut else b"") + json.dumps(record).encode() + b"\n")


def _rounded(value: float | int | None) -> float | int | None:
    """Six significant digits: more is noise, and makes lines that nobody reads."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _cpu_model() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _nvidia_driver() -> str:
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", _text(Path("/proc/driver/nvidia/version")))
    if match:
        return match[1]
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0] or "unknown"


def _commit() -> str:
    """The commit of this checkout, marked if files that git knows have changed since; "unknown" where there is no git."""
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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
