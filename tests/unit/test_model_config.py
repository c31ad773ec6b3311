"""What the layers of published models keep, read of their configurations and by hand; what is not known is refused by name."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vmmkv.model_config import (
    Attention,
    Compressed,
    IndexKeys,
    Latent,
    ModelConfig,
    State,
    read,
)

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "model_configs.json").read_text(encoding="utf-8")
)
"""The fields that matter of published configurations, by the model's name."""

KV = 2 * 2
"""Bytes of K and V, an element of each, in bfloat16."""

BY_HAND: dict[str, tuple[int, dict[int, int], int]] = {
    # bytes that a token adds for good; bytes of a row of each window; bytes of a sequence
    "LiquidAI/LFM2-1.2B": (6 * 8 * 64 * KV, {}, 10 * 2048 * 2 * 2),
    "MiniMaxAI/MiniMax-M2.5": (62 * 8 * 128 * KV, {}, 0),
    "MiniMaxAI/MiniMax-M3": (60 * 4 * 128 * KV + 57 * 128 * 2, {}, 0),
    "Qwen/Qwen3-30B-A3B": (48 * 4 * 128 * KV, {}, 0),
    "Qwen/Qwen3-30B-A3B-FP8": (48 * 4 * 128 * KV, {}, 0),
    "Qwen/Qwen3-Next-80B-A3B": (12 * 2 * 256 * KV, {}, 36 * (32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 3 * 2)),
    "Qwen/Qwen3-VL-2B-Instruct": (28 * 8 * 128 * KV, {}, 0),
    "Qwen/Qwen3.5-27B": (16 * 4 * 256 * KV, {}, 48 * (48 * 128 * 128 * 4 + (2 * 16 + 48) * 128 * 3 * 2)),
    "Qwen/Qwen3.5-35B-A3B": (10 * 2 * 256 * KV, {}, 30 * (32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 3 * 2)),
    "XiaomiMiMo/MiMo-V2-Flash": (9 * 4 * (192 + 128) * 2, {128: 39 * 8 * (192 + 128) * 2}, 0),
    "ai21labs/Jamba-1.5-Mini": (4 * 8 * 128 * KV, {}, 28 * (8192 * 16 * 4 + 8192 * 3 * 2)),
    "deepseek-ai/DeepSeek-V3": (61 * 576 * 2, {}, 0),
    "deepseek-ai/DeepSeek-V3.2": (61 * (576 * 2 + 128 + 4), {}, 0),
    # 21 layers keep a row of 512 and an index key of 128 for each 4 tokens, 20 a row of 512 for each 128
    "deepseek-ai/DeepSeek-V4-Flash": (
        21 * (512 + 128) * 2 // 4 + 20 * 512 * 2 // 128,
        {128: 43 * 512 * 2},
        21 * 2 * 8 * 2 * (512 + 128) * 4 + 20 * 2 * 128 * 512 * 4,
    ),
    "google/gemma-3-27b-it": (10 * 16 * 128 * KV, {1024: 52 * 16 * 128 * KV}, 0),
    "google/gemma-3n-E4B": (4 * 2 * 256 * KV, {512: 16 * 2 * 256 * KV}, 0),
    "google/gemma-4-26B-A4B": (5 * 2 * 512 * KV, {1024: 25 * 8 * 256 * KV}, 0),
    "google/recurrentgemma-9b": (0, {2048: 12 * 256 * KV}, 26 * (4096 * 4 + 4096 * 3 * 2)),
    "ibm-ai-platform/bamba-9b": (3 * 8 * 128 * KV, {}, 29 * (128 * 64 * 128 * 4 + (8192 + 2 * 128) * 3 * 2)),
    "ibm-granite/granite-4.0-h-small": (4 * 8 * 128 * KV, {}, 36 * (128 * 64 * 128 * 4 + (8192 + 2 * 128) * 3 * 2)),
    "meta-llama/Llama-3.2-11B-Vision": (32 * 8 * 128 * KV, {}, 0),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (12 * 8 * 128 * KV, {8192: 36 * 8 * 128 * KV}, 0),
    "moonshotai/Kimi-K2-Instruct": (61 * 576 * 2, {}, 0),
    "moonshotai/Kimi-K3": (24 * 576 * 2, {}, 69 * (96 * 128 * 128 * 4 + 3 * 96 * 128 * 3 * 2)),
    "nvidia/Llama-3.1-70B-Instruct-FP8": (80 * 8 * 128 * KV, {}, 0),
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": (49 * 8 * 128 * KV, {}, 0),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        6 * 2 * 128 * KV,
        {},
        23 * (64 * 64 * 128 * 4 + (4096 + 2 * 8 * 128) * 3 * 2),
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": (
        8 * 2 * 128 * KV,
        {},
        40 * (128 * 64 * 128 * 4 + (8192 + 2 * 8 * 128) * 3 * 2),
    ),
    "nvidia/Nemotron-H-56B-Base-8K": (10 * 8 * 128 * KV, {}, 54 * (256 * 64 * 256 * 4 + (16384 + 2 * 8 * 256) * 3 * 2)),
    "openai/gpt-oss-20b": (12 * 8 * 64 * KV, {128: 12 * 8 * 64 * KV}, 0),
    # transformers' default is 8 groups
    "state-spaces/mamba2-2.7b": (0, {}, 64 * (80 * 64 * 128 * 4 + (5120 + 2 * 8 * 128) * 3 * 2)),
    "stepfun-ai/Step-3.7-Flash-FP8": (12 * 8 * 128 * KV, {512: 33 * 8 * 128 * KV}, 0),
    "tiiuae/Falcon-H1-7B": (44 * 2 * 128 * KV, {}, 44 * (24 * 128 * 256 * 4 + (3072 + 2 * 256) * 3 * 2)),
    "tiiuae/falcon-7b": (32 * 1 * 64 * KV, {}, 0),
    "zai-org/GLM-4.7-Flash": (47 * 576 * 2, {}, 0),
    "zai-org/GLM-5": (78 * (576 * 2 + 128 + 4), {}, 0),
}


def sizes(model: ModelConfig) -> tuple[float, dict[int, int], int]:
    """What a token adds for good, a row of each window or chunk, and a sequence, in bytes of bfloat16."""
    growing, state, windowed = 0.0, 0, Counter[int]()
    for part in (part for parts in model.layers for part in parts):
        match part:
            case Attention():
                size_bytes = part.heads * (part.key_dim + part.value_dim) * 2
                if last := part.window or part.chunk:
                    windowed[last] += size_bytes
                else:
                    growing += size_bytes
            case Latent(window=None):
                growing += part.dim * 2
            case Latent(window=int(window)):
                windowed[window] += part.dim * 2
            case IndexKeys():
                growing += part.dim + 4 * -(-part.dim // 128) if part.scaled else part.dim * 2
            case Compressed():
                growing += part.dim * 2 / part.num_tokens
            case State():
                state += part.size_bytes(2)
    return growing, dict(windowed), state


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_keep_what_they_keep_by_hand(name: str) -> None:
    assert sizes(read(PUBLISHED[name])) == BY_HAND[name]
