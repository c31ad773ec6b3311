"""Small random models of each family that the decoder knows, as transformers has them, and attention in plain torch."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from vmmkv.server.engine.models.decoder import DecoderConfig

VOCABULARY = 199
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


def small(kind: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    return kind(**(options | changes))


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: small(LlamaConfig),
    "llama, wide heads, tied": lambda: small(LlamaConfig, head_dim=48, tie_word_embeddings=True),
    "llama, all biases": lambda: small(LlamaConfig, attention_bias=True, mlp_bias=True),
    "llama 3 scaling": lambda: small(LlamaConfig, rope_parameters=dict(LLAMA3)),
    "linear scaling": lambda: small(LlamaConfig, rope_parameters=dict(LINEAR)),
    "mistral, window of 7": lambda: small(MistralConfig, head_dim=32, sliding_window=7),
    "mistral, no window": lambda: small(MistralConfig, sliding_window=None),
    "qwen2, tied": lambda: small(Qwen2Config, tie_word_embeddings=True),
    "qwen2, a window from layer 1 on, yarn": lambda: small(
        Qwen2Config, use_sliding_window=True, sliding_window=9, max_window_layers=1, rope_parameters=dict(YARN)
    ),
    "qwen3": lambda: small(Qwen3Config, head_dim=32, num_key_value_heads=1),
    "qwen3, tied, attention biases": lambda: small(Qwen3Config, head_dim=16, tie_word_embeddings=True, attention_bias=True),
}


def model_of(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model whose every tensor counts: biases and norms are random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
            else:
                tensor.normal_(0.0, 0.1)
    return model


class PlainAttention:
    """KV attention in plain torch, over lists: what transformers' own eager attention computes, in its order.

    The tokens of a step are runs of sequences side by side, in the order of `runs`: (sequence, number of tokens).
    """

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self.runs: list[tuple[str, int]] = []
        self.rows: dict[tuple[int, str], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        self.cos_TR, self.sin_TR = config.rope.tables(config.max_positions, torch.device("cpu"))

    def __call__(
        self,
        layer: int,
        q_NHD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        *,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> torch.Tensor:
        if q_norm is not None and k_norm is not None:
            q_NHD, k_NKD = _normed(q_NHD, q_norm, norm_eps), _normed(k_NKD, k_norm, norm_eps)
        outs, column = [], 0
        for sequence, count in self.runs:
            rows = self.rows[layer, sequence]
            part = slice(column, column + count)
            q_nHD = self._rotated(q_NHD[part], len(rows))
            rows += zip(self._rotated(k_NKD[part], len(rows)), v_NKD[part], strict=True)
            outs.append(self._attend(q_nHD, rows, self.config.windows[layer]))
            column += count
        return torch.cat(outs)

    def _rotated(self, x_NHD: torch.Tensor, start: int) -> torch.Tensor:
        positions = slice(start, start + len(x_NHD))
        cos_N1D, sin_N1D = (table[positions, None].repeat(1, 1, 2).to(x_NHD.dtype) for table in (self.cos_TR, self.sin_TR))
        low, high = x_NHD.chunk(2, dim=-1)
        return x_NHD * cos_N1D + torch.cat((-high, low), dim=-1) * sin_N1D

    def _attend(self, q_NHD: torch.Tensor, rows: list[tuple[torch.Tensor, torch.Tensor]], window: int | None) -> torch.Tensor:
        group = self.config.num_heads // self.config.num_kv_heads
        k_HTD, v_HTD = (torch.stack(side).transpose(0, 1).repeat_interleave(group, 0) for side in zip(*rows, strict=True))
        scores_HNT = q_NHD.transpose(0, 1) @ k_HTD.transpose(1, 2) * self.config.head_dim**-0.5
        query_N1 = torch.arange(len(rows) - len(q_NHD), len(rows))[:, None]
        row_T = torch.arange(len(rows))
        hidden_NT = (row_T > query_N1) | (row_T <= query_N1 - (window or len(rows)))
        scores_HNT = scores_HNT.masked_fill(hidden_NT, torch.finfo(scores_HNT.dtype).min)
        return (torch.softmax(scores_HNT, -1, dtype=torch.float32).to(q_NHD.dtype) @ v_HTD).transpose(0, 1)


def _normed(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight_D * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
