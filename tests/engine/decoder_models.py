"""Small random models of each family that the decoder knows, as transformers has them."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

VOCABULARY = 199
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


def small(kind: type[hf.PreTrainedConfig], **changes: Any) -> Any:
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    return kind(**(options | changes))


FAMILIES: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "llama": lambda: small(hf.LlamaConfig),
    "llama, wide heads, tied": lambda: small(hf.LlamaConfig, head_dim=48, tie_word_embeddings=True),
    "llama, all biases": lambda: small(hf.LlamaConfig, attention_bias=True, mlp_bias=True),
    "llama 3 scaling": lambda: small(hf.LlamaConfig, rope_parameters=dict(LLAMA3)),
    "linear scaling": lambda: small(hf.LlamaConfig, rope_parameters=dict(LINEAR)),
    "mistral, window of 7": lambda: small(hf.MistralConfig, head_dim=32, sliding_window=7),
    "mistral, no window": lambda: small(hf.MistralConfig, sliding_window=None),
    "qwen2, tied": lambda: small(hf.Qwen2Config, tie_word_embeddings=True),
    "qwen2, a window from layer 1 on, yarn": lambda: small(
        hf.Qwen2Config, use_sliding_window=True, sliding_window=9, max_window_layers=1, rope_parameters=dict(YARN)
    ),
    "qwen3": lambda: small(hf.Qwen3Config, head_dim=32, num_key_value_heads=1),
    "qwen3, tied, attention biases": lambda: small(hf.Qwen3Config, head_dim=16, tie_word_embeddings=True, attention_bias=True),
}


def model_of(config: hf.PreTrainedConfig, seed: int = 0) -> hf.PreTrainedModel:
    """A model whose every tensor counts: biases and norms are random too."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
            else:
                tensor.normal_(0.0, 0.1)
    return model
