"""The suite `prefix`: what is attached, and what the host does."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.suites import prefix
from bench.suites.prefix import host
from tests.unit.recorded import SETTINGS, found, measured, recorder_in


def test_shared_prefixes_are_attached_warm_and_not_without_a_cache(tmp_path: Path) -> None:
    rows = measured(tmp_path, "prefix", "requests")
    attached = found(rows, "prompt tokens attached")
    warm = "tiny llama-3.1-8b 3 requests of 1200 + 12 tokens, 4 out, warm"
    assert attached[warm, "vmmkv"] > 95
    assert attached[warm, "paged 16"] > 95
    assert attached[warm, "none"] == 0
    assert {system for _, system in found(rows, "total")} == {"vmmkv", "paged 16", "paged 128", "none"}


def test_attaching_by_each_way_and_the_tree_are_timed(tmp_path: Path) -> None:
    rows = measured(tmp_path, "prefix", "attach", "tree")
    assert {system for _, system in found(rows, "in the driver")} == {"alias", "adopt"}
    assert ("a tree of 1,000 nodes", "radix tree") in found(rows, "match, next turn")


def test_what_the_host_does_between_steps_is_timed_by_size(tmp_path: Path) -> None:
    rows = measured(tmp_path, "prefix", "host")
    for text in ("running requests", "tokens of each waiting prompt", "parked slots", "tokens that a tier has"):
        timed, grown = (
            {row.metric.removeprefix("growth, ") for row in rows if text in row.workload and row.unit == unit}
            for unit in ("us", "x")
        )
        assert timed == grown != set()


@pytest.mark.nightly
def test_a_tree_that_forgets_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "pieces_of", lambda start, end: [])
    real = host.RadixTree.match
    monkeypatch.setattr(host.RadixTree, "match", lambda self, namespace, tokens: real(self, namespace, tokens[:-200]))
    recorder = recorder_in(tmp_path, "prefix", replace(SETTINGS, parts=("tree",)))
    prefix.run(recorder)
    assert recorder.failed
