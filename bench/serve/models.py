"""The models that are served: their configurations, and what a step of them reads and computes at least.

Weights are random, so that a configuration is all that a directory needs; prompts are token ids.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.serve.padding import padded, vocabulary_of

Config = Mapping[str, str | int | float | bool | list[str] | dict[str, str | float] | None]
"""What a config.json holds."""

ITEM_BYTES: Final = 2
"""Of weights, K and V, in bfloat16: bounds are of a GPU."""

_COMMON: Final[Config] = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "attention_bias": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "dtype": "bfloat16",
    # Without it transformers takes a large vocabulary for one of an old Mistral's, and warns of its tokenizer.
    "transformers_version": "5.17.0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A dense decoder, by its configuration."""

    name: str
    config: Config
    tokenizer: Path | None = None
    """A tokenizer.json, for who wants texts; None for who can do with token ids."""

    def with_tokenizer(self, tokenizer: Path) -> "ServedModel":
        """The same, with texts. A tiny model has as many tokens as the tokenizer, for more it is padded."""
        size = max(self.vocabulary, vocabulary_of(tokenizer))
        return replace(self, config={**self.config, "vocab_size": size}, tokenizer=tokenizer)

    @property
    def vocabulary(self) -> int:
        """Token ids."""
        return self._count("vocab_size")

    @property
    def reach(self) -> int:
        """Tokens of the longest sequence."""
        return self._count("max_position_embeddings")

    @property
    def layers(self) -> int:
        """Of the decoder."""
        return self._count("num_hidden_layers")

    @property
    def attention_width(self) -> int:
        """Elements of all query heads together."""
        return self._count("num_attention_heads") * self._count("head_dim")

    @property
    def kv_width(self) -> int:
        """Elements of all key heads together, or of all value heads."""
        return self._count("num_key_value_heads") * self._count("head_dim")

    @property
    def row_bytes(self) -> int:
        """K and V of a token in all layers."""
        return 2 * self.layers * self.kv_width * ITEM_BYTES

    @property
    def layer_parameters(self) -> int:
        """Weights that multiply each token, in all layers: query, key, value and output, gate, up and down."""
        hidden, mlp = self._count("hidden_size"), self._count("intermediate_size")
        return self.layers * hidden * (2 * self.attention_width + 2 * self.kv_width + 3 * mlp)

    @property
    def head_parameters(self) -> int:
        """Weights that make logits, for tokens behind which one is wanted."""
        return self.vocabulary * self._count("hidden_size")

    @property
    def step_weight_bytes(self) -> int:
        """Weights that a decode step reads. The embedding is not among them, unless the head is tied to it."""
        return (self.layer_parameters + self.head_parameters) * ITEM_BYTES

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """One with a config.json, and the tokenizer if there is one, until the `with` block ends."""
        with TemporaryDirectory(prefix="vmmkv-bench-") as folder:
            texts = {"config.json": json.dumps(self.config)}
            if self.tokenizer is not None:
                texts["tokenizer.json"] = padded(self.tokenizer, self.vocabulary)
                texts["tokenizer_config.json"] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
            for name, text in texts.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            yield Path(folder)

    def _count(self, key: str) -> int:
        value = self.config[key]
        assert isinstance(value, int), f"{key}={value!r} of {self.name} is no number of things"
        return value


def _llama(name: str, **config: str | int | float | bool) -> ServedModel:
    own: Config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "mlp_bias": False}
    return ServedModel(name=name, config={**_COMMON, **own, **config, **_rope(config["rope_theta"])})


def _qwen3(name: str, **config: str | int | float | bool) -> ServedModel:
    own: Config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6}
    return ServedModel(name=name, config={**_COMMON, **own, **config, **_rope(config["rope_theta"])})


def _rope(theta: str | float) -> Config:
    """As transformers 5 has it, beside the `rope_theta` of those before."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": float(theta)}}


_MODELS: Final = (
    _llama(
        "llama-3.1-8b",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_theta=500_000.0,
        tie_word_embeddings=False,
        bos_token_id=128000,
        eos_token_id=128001,
    ),
    _qwen3(
        "qwen3-0.6b",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_id=151645,
    ),
    _llama(
        "smollm2-135m",
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    ),
)
MODELS: Final = {model.name: model for model in _MODELS}

_TINY: Final[Config] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What is computed in no time, in rows of 2 KiB in float32. With smaller weights layers so narrow would do next to nothing."""


def model_of(shape_name: str, *, tiny: bool) -> ServedModel:
    """The model of a shape; or of its family, so small that a CPU serves it. A shape that is no model's is Llama's."""
    model = MODELS.get(shape_name, _MODELS[0])
    return ServedModel(name=f"tiny {model.name}", config={**model.config, **_TINY}) if tiny else model
