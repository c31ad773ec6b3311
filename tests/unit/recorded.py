"""A suite in a test: quick, on the CPU, its rows in a folder."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import cli, report
from bench.harness import SHAPES, Recorder, Settings
from bench.rows import Provenance, Row, RowFile
from bench.suites import Suite, load

SETTINGS = Settings(device=torch.device("cpu"), shape=SHAPES["wide"], quick=True)


def provenance(date: str = "2026-01-01", *, device: str = "H200", quick: bool = False, commit: str = "abc") -> Provenance:
    return Provenance(device=device, driver="1", versions={}, commit=commit, seed=0, quick=quick, date=date)


def recorder_in(folder: Path, suite: str = "append", settings: Settings = SETTINGS) -> Recorder:
    return Recorder(suite, settings, RowFile(folder, provenance(quick=True)))


def register(monkeypatch: pytest.MonkeyPatch, **modules: object) -> None:
    """Let there be these suites, and no others."""
    for module in (cli, report):
        monkeypatch.setattr(module, "SUITES", {name: Suite(f"what {name} measures") for name in modules})
        monkeypatch.setattr(module, "load", modules.__getitem__)


def measured(folder: Path, suite: str, *parts: str, settings: Settings = SETTINGS) -> list[Row]:
    settings = replace(settings, parts=parts, steps=12, sequences=3, repeat=1)
    recorder = recorder_in(folder, suite, settings)
    load(suite).run(recorder)
    assert not recorder.failed
    return recorder.rows


def found(rows: list[Row], metric: str) -> dict[tuple[str, str], float]:
    return {(row.workload.partition(":")[0], row.system): row.summary.median for row in rows if row.metric == metric}
