"""The suite `append`: who waits, and a row that is not there is seen."""

from pathlib import Path

import pytest

from bench.harness import WrongNumbers
from bench.suites import append
from tests.unit.recorded import found, measured, recorder_in


@pytest.mark.nightly
def test_static_slots_never_wait_and_growth_in_front_does(tmp_path: Path) -> None:
    rows = measured(tmp_path, "append")
    stalled = found(rows, "stalled")
    assert stalled["3 sequences, coming and going", "static"] == 0 < stalled["3 sequences, coming and going", "off"]
    assert {system for _, system in stalled} == {"static", "off", "slack", "adopted"}
    assert found(rows, "step, over static")["3 sequences, all cross together", "static"] == 0


def test_a_row_that_was_not_appended_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmmkv_kernels.reference.append", lambda *arguments: None)
    with pytest.raises(WrongNumbers, match="are not what was appended there"):
        append.run(recorder_in(tmp_path))
