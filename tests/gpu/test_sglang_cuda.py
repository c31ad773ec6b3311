"""SGLang's own engine with HiCache over vmmkv's disk tier: a second engine finds what the first one has computed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.sglang_engine import SHARED_TOKENS
from tests.sources import ROOT, SOURCE_ROOTS


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_a_second_engine_of_sglang_answers_out_of_the_disk_tier(tmp_path: Path) -> None:
    first, second = (answers_of(tmp_path) for _ in range(2))
    assert [each["tokens"] for each in second] == [each["tokens"] for each in first]
    assert first[0]["cached"] == 0
    assert second[0]["cached"] >= SHARED_TOKENS


def answers_of(folder: Path) -> list[dict[str, object]]:
    """Answers of an engine in a process of its own."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "adapters" / "sglang_engine.py", str(folder), "qwen3-0.6b"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, SOURCE_ROOTS), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert done.returncode == 0 and found, done.stdout[-6000:]
    print(found[0])
    return list(json.loads(found[0].removeprefix("ANSWERS ")))
