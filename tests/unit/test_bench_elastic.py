"""The elastic suite: it has its rows, and reports nothing of memory that did not go where it was said to."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import elastic
from bench.elastic import breathing, two_caches
from bench.elastic.breath import Way
from bench.elastic.guests import Guests, Kept
from bench.elastic.sizes import Breaths, Handovers, prompts
from bench.elastic.two_caches import Split
from bench.report import Report
from bench.rows import Provenance, Row, RowFile
from bench.settings import SHAPES, Settings
from bench.timing import WrongNumbers
from vmmkv import Pool
from vmmkv.driver.host import HostDriver

CPU = torch.device("cpu")
QUICK = Settings(device=CPU, shape=SHAPES["wide"], quick=True)
GPU = Settings(device=torch.device("cuda", 0), shape=SHAPES["llama-3.1-8b"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(RowFile(tmp_path, Provenance.collect(CPU, seed=0, quick=True, commit="abc123")))


def table(rows: list[Row], beginning: str, system: str) -> dict[str, Row]:
    """The rows of one system, by their metrics, under the one workload that begins so."""
    found = [row for row in rows if row.workload.startswith(beginning) and row.system == system]
    assert len({row.workload for row in found}) == 1
    return {row.metric: row for row in found}


def nobody(name: str) -> None:
    """Is told what begins."""


def test_every_memory_goes_and_comes_back_by_every_way(report: Report) -> None:
    elastic.run(QUICK, report)
    rows = report.rows
    names = [(row.workload, row.system, row.metric) for row in rows]
    assert len(set(names)) == len(names), "two rows have one name"
    assert {row.suite for row in rows} == {"elastic"}
    workloads = list(dict.fromkeys(row.workload for row in rows))
    assert len(workloads) == 2 * len(Kept) + 2
    for kept in Kept:
        for way in Way:
            shrunk = table(rows, f"shrink: 128.0 MiB to 64.0 MiB, memory {kept.value}", way.value)
            assert shrunk["given back"].summary.p20 > 0
            assert shrunk["given back"].summary == shrunk["given back, says the device"].summary
            assert shrunk["driver calls: release"].summary.p20 > 0
            assert ("driver calls: unmap" in shrunk) == (kept is Kept.PARKED)
            grown = table(rows, f"regrow: 64.0 MiB to 128.0 MiB, memory {kept.value}", way.value)
            assert grown["driver calls: create"].summary.p20 > 0
            assert grown["first page"].summary.p50 <= grown["until all are in"].summary.p50
            assert ("grow" in grown) == (way is Way.AT_ONCE) != ("pump" in grown)
        at_once, in_slack = (table(rows, f"shrink: 128.0 MiB to 64.0 MiB, memory {kept.value}", way.value) for way in Way)
        assert at_once["steps"].summary.p99 == 1
        assert in_slack["resize"].summary.n > at_once["resize"].summary.n
    check_handovers(rows)


def check_handovers(rows: list[Row]) -> None:
    sizes = Handovers.of(QUICK)
    first, second = (shape.name for shape in sizes.shapes)
    for asks, other in ((first, second), (second, first)):
        shared, halves = (table(rows, f"two caches: 96.0 MiB, {asks} asks", split.value) for split in Split)
        most = shared["most of the budget"]
        assert most.bound is not None
        assert most.summary.p20 == pytest.approx(most.bound), "a page that nobody needed was not to be had"
        assert halves["most of the budget"].summary.p99 == 50
        for moments in (shared, halves):
            assert moments["held, at first"].summary.p50 <= moments["held, at last"].summary.p50
        assert shared[f"held by {other}, at last"].summary.p50 < shared[f"held by {other}, at first"].summary.p50
        assert halves[f"held by {other}, at last"].summary.p50 == 48
        assert shared["driver calls: unmap"].summary.p20 > 0


Break = Callable[[pytest.MonkeyPatch], None]


def append_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("vmmkv.kernels.reference.append", lambda *arguments: None)


def write_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Guests, "write", lambda *arguments: None)


def release_nothing(patch: pytest.MonkeyPatch) -> None:
    """The driver says that it has, and keeps the memory."""

    def release(driver: Any, handle: int) -> None:
        driver.calls["release"] += 1

    patch.setattr(HostDriver, "release", release)


def miscount(patch: pytest.MonkeyPatch) -> None:
    def check(pool: Pool) -> None:
        raise AssertionError("held bytes are miscounted")

    patch.setattr(Pool, "check", check)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (append_nothing, "are not what was appended there"),
        (write_nothing, "are not what its guest wrote"),
        (release_nothing, "has not arrived yet"),
        (miscount, "a law is broken: held bytes are miscounted"),
    ],
)
def test_a_breath_that_is_wrong_is_not_reported(
    report: Report, monkeypatch: pytest.MonkeyPatch, broken: Break, complaint: str
) -> None:
    broken(monkeypatch)
    with pytest.raises(WrongNumbers, match=complaint):
        breathing.measure(QUICK, report, nobody, suite="elastic")
    assert report.rows == []


def reclaim_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pool, "_reclaim", lambda *arguments, wait: False)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (append_nothing, "are not what was appended there"),
        (write_nothing, "are not what its guest wrote"),
        (reclaim_nothing, "finds no memory though the sum fits the budget"),
        (miscount, "a law is broken: held bytes are miscounted"),
    ],
)
def test_a_handover_that_is_wrong_is_not_reported(
    report: Report, monkeypatch: pytest.MonkeyPatch, broken: Break, complaint: str
) -> None:
    broken(monkeypatch)
    with pytest.raises(WrongNumbers, match=complaint):
        two_caches.measure(QUICK, report, nobody, suite="elastic")
    assert report.rows == []


@given(seed=st.integers(0, 1000), num_pages=st.integers(0, 300), shape=st.sampled_from(sorted(SHAPES)))
def test_prompts_need_exactly_the_pages_that_there_are(seed: int, num_pages: int, shape: str) -> None:
    layout = SHAPES[shape].layout
    lengths = prompts(np.random.default_rng(seed), layout, num_pages, 2, 20)
    assert sum(layout.pages_for(length) for length in lengths) == num_pages
    assert all(2 <= layout.pages_for(length) <= 20 for length in lengths[:-1])


@pytest.mark.parametrize("settings", [QUICK, GPU], ids=["cpu", "gpu"])
def test_there_are_slots_and_addresses_for_the_most_guests(settings: Settings) -> None:
    breaths, handovers = Breaths.of(settings), Handovers.of(settings)
    layout = settings.shape.layout
    half_pages = breaths.half_pages(layout)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = prompts(rng, layout, half_pages, breaths.fewest_pages, breaths.most_pages)
        assert breaths.slots(layout) >= breaths.sequences + 2 * (1 + len(lengths))
        assert max(lengths) <= breaths.max_tokens(layout)
        for shape in handovers.shapes:
            num_pages = handovers.budget_bytes // (2 << 20)
            lengths = prompts(rng, shape.layout, num_pages, handovers.fewest_pages, handovers.most_pages)
            assert len(lengths) <= handovers.most_guests
            assert max(lengths) <= handovers.max_tokens(shape.layout)
            assert handovers.end_tokens >= handovers.start_tokens + len(lengths) + handovers.held_steps
