"""The suite `driver_calls`: each call is timed in each setting."""

from pathlib import Path

import pytest

from tests.unit.recorded import measured


@pytest.mark.nightly
def test_every_driver_call_is_timed_alone_and_beside_a_thread(tmp_path: Path) -> None:
    rows = measured(tmp_path, "driver_calls")
    for workload in ("2.0 MiB handle, alone", "32.0 MiB handle, beside a busy thread"):
        calls = {row.metric for row in rows if row.workload == workload}
        assert {"reserve", "create", "map", "set_access", "unmap", "release", "fence", "memory", "export_fd"} <= calls
