"""Each example runs as a script, on a GPU where there is one and else on the CPU, and is short."""

import subprocess
import sys
from pathlib import Path

import pytest

SAYS = {
    "chat": ("Paris", "22 of them computed", "asked again: the same answer"),
    "custom_kernel": (
        "step 0: right over [33, 133, 233] tokens",
        "strides passed",
        "64-bit slot offsets passed",
        "past the guard passed",
    ),
    "minimal_engine": ("342 tokens for 12 requests in", "preemptions"),
    "tree_of_thoughts": (
        "3 nodes in 10 MiB; without sharing 18 MiB",
        "depth 3: 12 nodes in",
        "without sharing 72 MiB",
        "best of 12 leaves",
    ),
    "two_models": (
        "of 48 MiB are left",
        "still there: the newest chat, 250 tokens, without a copy",
        "refused, and nothing has changed",
    ),
}
"""What each example is there to show. Blanks are counted as one."""

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
QUICK = "two_models"
"""Run by default; the others nightly."""
SCRIPTS = [path for path in EXAMPLES if "def main()" in path.read_text()]


def test_all_but_the_model_that_they_share_are_scripts() -> None:
    assert {path.stem for path in EXAMPLES} - {path.stem for path in SCRIPTS} == {"tiny"}
    assert {path.stem for path in SCRIPTS} == SAYS.keys()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_read_in_one_sitting(path: Path) -> None:
    most_lines = {"minimal_engine": 100}.get(path.stem, 119)  # which is what it says of itself
    assert len(path.read_text().splitlines()) <= most_lines


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=() if path.stem == QUICK else pytest.mark.nightly) for path in SCRIPTS],
)
def test_an_example_runs_and_says_what_it_saw(path: Path, tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert child.returncode == 0, child.stderr
    said = " ".join(child.stdout.split())
    for sentence in SAYS[path.stem]:
        assert sentence in said, said
