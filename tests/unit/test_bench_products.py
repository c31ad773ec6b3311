"""The suite `products`: checked before it is timed."""

from pathlib import Path

import pytest

from bench.rows import FAILED
from bench.suites import products
from tests.unit.recorded import measured, recorder_in


def test_products_by_rows_and_one_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [row.workload.split()[-2] for row in measured(tmp_path, "products") if row.metric == "time"]
    assert numbers == ["1", "8", "16", "32", "64", "128", "256"]
    monkeypatch.setattr(products, "linear", lambda x_MK, weight_NK: x_MK @ (1.02 * weight_NK.T))
    recorder = recorder_in(tmp_path, "products")
    products.run(recorder)
    assert {row.metric for row in recorder.rows} == {FAILED}
