"""The compiler takes what the interpreter takes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.compiled"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert child.returncode == 0, child.stderr
    assert child.stdout == "done\n"
