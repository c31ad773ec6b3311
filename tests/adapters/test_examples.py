"""Each example runs as a script, on a GPU where there is one and else on the CPU, and is short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SCRIPTS = [path for path in EXAMPLES if "def main()" in path.read_text()]


def test_all_but_the_model_that_they_share_are_scripts() -> None:
    assert {path.stem for path in EXAMPLES} - {path.stem for path in SCRIPTS} == {"tiny"}
    assert {path.stem for path in SCRIPTS} == {"chat", "custom_kernel", "minimal_engine", "tree_of_thoughts", "two_models"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 120


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs_and_says_what_it_saw(path: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.run([sys.executable, path], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip()
