"""What the README tells people to do is done here."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vmmkv.config import read_environment
from vmmkv.server.models import KNOWN_MODELS, model_dir

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_library_example_runs_and_is_right() -> None:
    _, first, loop, given, shared, quantised = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (promised,) = re.findall(r"waste_bytes\)\s+# (\d+)", first)
    (hits,) = re.findall(r"hit_tokens\)\s+# (.*)$", shared, re.MULTILINE)
    for example, output in ((first, promised), (loop, ""), (given, "True"), (shared, hits), (quantised, "")):
        run = subprocess.run([sys.executable, "-W", "error", "-c", example], cwd=ROOT, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip() == output


def test_the_offline_example_runs_and_is_right() -> None:
    if not model_dir(KNOWN_MODELS["smollm2-135m"], read_environment().cache_dir).is_dir():
        pytest.skip("smollm2-135m is not here: run `vmmkv fetch smollm2-135m`")
    offline, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (promised,) = re.findall(r"outputs\[0\]\.text\)  # (.*)", offline)
    run = subprocess.run([sys.executable, "-c", offline], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [promised, "The capital of Italy is Rome."]


def test_the_plan_example_says_what_the_readme_says() -> None:
    (command,) = re.findall(r"^\$ vmmkv (plan .*)$", README, re.MULTILINE)
    run = subprocess.run([sys.executable, "-m", "vmmkv", *shlex.split(command)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "327,680" in run.stdout


@pytest.mark.parametrize(
    "document", ["README.md", "ARCHITECTURE.md", "docs/performance.md", "bench/README.md", "kernels/README.md"]
)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / document).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("target", ["serve", "test", "check", "bench", "docs"])
def test_make_targets_exist_and_are_explained(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert f'"make {target} ' in makefile
