"""The suite `resize`: memory goes and comes, and rows of others are seen."""

from pathlib import Path

import pytest

from bench.harness import WrongNumbers
from bench.suites import resize
from tests.unit.recorded import found, measured, recorder_in


@pytest.mark.nightly
def test_memory_that_is_given_back_arrives_and_comes_again(tmp_path: Path) -> None:
    rows = measured(tmp_path, "resize")
    given, device = found(rows, "given back"), found(rows, "given back, says the device")
    assert given
    assert given == device
    assert len([row for row in rows if row.metric == "most of the budget"]) == 4


def test_a_guest_whose_rows_are_anothers_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        resize.Side, "admit", lambda *given, real=resize.Side.admit: real(*given)._replace(mark=float("nan"))
    )  # a mark that is never read as it was written
    with pytest.raises(WrongNumbers, match="not what its guest wrote"):
        resize.run(recorder_in(tmp_path, "resize"))
