"""The HiCache storage through SGLang's own factory: pages of each layout come back in another process.

SGLang itself cannot be installed without a GPU. Its sources lie in a folder; sglang_process.py says what stands in for what.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT, SOURCE_ROOTS

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_pages_of_each_layout_come_back_by_sglangs_own_factory(version: str, tmp_path: Path) -> None:
    folder = ROOT / ".venv" / f"sglang-{version}"
    if not (folder / ".installed").exists():
        pytest.skip(f"the sources of sglang {version} are not here: run `make nightly`")
    for turn in ("store", "load"):
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name("sglang_process.py"), folder, tmp_path, turn],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*SOURCE_ROOTS, folder]))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        assert sum(line.startswith(f"{turn} ") for line in done.stdout.splitlines()) == 6, done.stdout
