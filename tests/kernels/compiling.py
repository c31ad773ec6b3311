"""A child process that compiles kernels for an H200 without one: see compiled.py."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_PREAMBLE = """
import torch
from tests.kernels.compiled import META, Model, empty, pretend_to_have_a_gpu
from vmmkv.kernels import activation, norm
from vmmkv.kernels.attention import append
pretend_to_have_a_gpu()
"""


def assert_compiles(statements: str, cache: Path) -> None:
    """Run statements whose launches compile their kernels, for tensors without memory, into a cache of their own."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", f"{_PREAMBLE}{statements}\nprint('done')"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert child.returncode == 0, child.stderr
    assert child.stdout == "done\n"
