"""The suite `memory_efficiency`: waste and what fits, and a wrong count is seen."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.harness import SHAPES, WrongNumbers
from bench.suites import memory_efficiency
from bench.workloads import Ask, Workload
from tests.unit.recorded import SETTINGS, found, measured


def test_vmmkv_wastes_little_more_than_blocks_and_static_slots_most(tmp_path: Path) -> None:
    rows = measured(tmp_path, "memory_efficiency")
    waste, admitted = found(rows, memory_efficiency.WASTE), found(rows, memory_efficiency.ADMITTED)
    for (workload, system), value in waste.items():
        if system == "vmmkv":
            assert value < waste[workload, "static 4096"]
            assert admitted[workload, "vmmkv"] >= 0.9 * admitted[workload, "paged 16"]
            assert admitted[workload, "vmmkv"] >= admitted[workload, "static 4096"]
        row = next(row for row in rows if row.metric == "waste" and row.system == system and row.workload.startswith(workload))
        assert row.bound is None or row.summary.p80 >= 0.5 * row.bound


def test_a_miscounting_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = memory_efficiency.OccupancySizes.of(SETTINGS)
    shape = SHAPES["qwen3-0.6b"]
    asks = tuple(Ask(prompt=np.zeros(100, np.int32), num_out=50) for _ in range(4))
    system = memory_efficiency.CountedSystem("paged 16", shape, sizes)
    real = type(system.cache).stats
    monkeypatch.setattr(type(system.cache), "stats", lambda self: halved(real(self)))
    with pytest.raises(WrongNumbers, match="paged 16 counts"):
        memory_efficiency.Simulation(system, Workload(name="w", text="", asks=asks), shape, sizes, 0).run()


def halved(stats: object) -> object:
    return replace(stats, mapped_bytes=stats.mapped_bytes // 2)  # type: ignore[type-var, attr-defined]
