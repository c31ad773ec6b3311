"""No kernel touches a row past the length or the limit, or before the window."""

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.kernels.guarded import STRAYS

ROOT = Path(__file__).parents[2]


def release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


pytestmark = pytest.mark.skipif(
    release("triton") < (3, 7) and release("numpy") >= (2, 4), reason="the interpreter of triton 3.6 breaks with numpy 2.4"
)


def run_guarded(what: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.kernels.guarded", what]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=ROOT)


@pytest.fixture(scope="module")
def signals() -> dict[str, str]:
    """How each stray access ended."""
    child = run_guarded("strays")
    assert child.returncode == 0, child.stderr
    return dict(line.split() for line in child.stdout.splitlines())


@pytest.mark.parametrize("what", ["within", pytest.param("within-wide", marks=pytest.mark.nightly)])
def test_kernels_stay_within_mapped_memory(what: str) -> None:
    child = run_guarded(what)
    assert child.returncode == 0, child.stderr
    assert child.stdout == "done\n"


@pytest.mark.parametrize("what", STRAYS)
def test_the_guard_sees_a_stray_access(what: str, signals: dict[str, str]) -> None:
    assert signals[what] == str(int(signal.SIGSEGV))
