"""The suite `collectives`: sums and broadcasts over ranks, checked and timed."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness import WrongNumbers
from bench.suites import collectives
from tests.unit.recorded import SETTINGS, measured
from vmmkv_server.engine.collectives import Collectives


@pytest.mark.nightly
def test_sums_and_broadcasts_over_ranks_are_checked_and_timed(tmp_path: Path) -> None:
    settings = replace(SETTINGS, tensor_parallel_sizes=(3,))
    rows = measured(tmp_path, "collectives", settings=settings)
    assert {row.workload for row in rows} >= {"3 ranks: sum of 8 KiB", "3 ranks: broadcast of 0.25 KiB"}
    assert {row.system for row in rows} == {"gloo"}


def test_a_sum_that_is_none_is_seen() -> None:
    alone = Collectives(0, 2)
    with pytest.raises(WrongNumbers, match="sum by none of 4"):
        collectives.check_way(alone, SETTINGS.device, collectives.Way("sum", "none", 4096, lambda tensor: tensor))
