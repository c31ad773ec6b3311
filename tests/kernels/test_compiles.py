"""The compiler takes what the interpreter takes: every kernel, for a GPU that is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("what", ["frontend", pytest.param("binary", marks=[pytest.mark.nightly, pytest.mark.timeout(1200)])])
def test_kernels_compile_for_a_gpu_that_is_not_there(what: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.compiled", what]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, cwd=ROOT)
    assert child.returncode == 0, child.stderr
    assert child.stdout == "done\n"
