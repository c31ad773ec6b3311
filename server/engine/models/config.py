"""What a dense decoder is: the numbers and switches that its computation depends on, and no more.

What is not known to leave the computation as it is here is refused, so that such a model runs as transformers wrote it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

# -------- errors
# Why a model is not computed here.


class Unsupported(ValueError):
    """This model is none that the decoder computes; the text says why. transformers' own code may run it."""


class WeightsMismatch(ValueError):
    """The tensors of a directory are not those of the model that its configuration describes."""


# -------- rope
# Rotary position embedding (Su et al., 2021) with the frequencies that transformers computes.
#
# Legend: T positions, R = D / 2 angles: angle j turns elements j and j + D / 2 of a head.

SCALED: Final = ("linear", "llama3", "yarn")
"""Kinds of scaling whose frequencies do not depend on how long a sequence is; transformers' own functions compute them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frequencies:
    """How fast each angle of a head turns: what a model's rotary embedding is, whatever the position."""

    kind: str
    frequencies_R: tuple[float, ...] = field(repr=False)
    """Radians from one position to the next: float32 numbers."""
    scale: float
    """Of all cosines and sines: yarn's attention factor, else 1."""

    @classmethod
    def of(cls, config: Any, head_dim: int) -> "Frequencies":
        """Read the `rope_parameters` of a transformers configuration. Raises Unsupported."""
        parameters = config.rope_parameters
        kind = parameters.get("rope_type")
        if kind == "default":
            # As in each model's own file: transformers has no function for it.
            exponents_R = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            frequencies_R, scale = 1.0 / parameters["rope_theta"] ** exponents_R, 1.0
        elif kind in SCALED:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frequencies_R, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        else:
            raise Unsupported(f"rope_parameters are {parameters}; known are the types default, {', '.join(SCALED)}")
        rotated = 2 * len(frequencies_R)
        if rotated != head_dim or parameters.get("partial_rotary_factor") not in (None, 1.0):
            raise Unsupported(f"rope_parameters are {parameters}, which rotate a part of each head and not all {head_dim}")
        return cls(kind=kind, frequencies_R=tuple(frequencies_R.tolist()), scale=scale)

    def tables(self, num_positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, R] of positions [0, num_positions), float32, times `scale`."""
        positions_T = torch.arange(num_positions, dtype=torch.float32, device=device)
        angles_TR = positions_T[:, None] * torch.tensor(self.frequencies_R, dtype=torch.float32, device=device)
        return angles_TR.cos() * self.scale, angles_TR.sin() * self.scale


# -------- config

_CAUSAL_LM: Final[Mapping[str, str]] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The architectures known here, by `model_type`."""

_READ: Final = {
    "model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "rope_parameters",
    "max_position_embeddings", "initializer_range",
}  # fmt: skip
"""Fields that `DecoderConfig.of` reads for every family."""

_READ_BY_FAMILY: Final[Mapping[str, set[str]]] = {
    "llama": {"attention_bias", "mlp_bias"},
    "mistral": {"sliding_window"},
    "qwen2": {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"},
    "qwen3": {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "attention_bias"},
}
"""And those that only some models of transformers read. What `use_sliding_window` says is in `layer_types` already."""

_ONLY: Final[Mapping[str, tuple[object, ...]]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1.0, None),
    "is_causal": (True, None),
    "is_encoder_decoder": (False,),
}
"""Fields that change the computation, and the values by which they do not."""

_INERT: Final = {
    "transformers_version", "dtype", "torch_dtype", "id2label", "label2id", "num_labels", "problem_type",
    "output_hidden_states", "output_attentions", "return_dict", "use_cache", "chunk_size_feed_forward",
    "attention_dropout", "tokenizer_class", "is_llama_config", "max_sequence_length", "transformers.js_config",
    "unsloth_fixed", "unsloth_version",
}  # fmt: skip
"""Fields that change nothing in inference: of training, of other heads, of other programs."""

_MULTIPLE: Final = 8
"""Of the sizes of matrices and heads: 16 bytes of bfloat16, which the kernels load at once."""

_INERT_ENDS: Final = ("_token_id", "_token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder of pre-normed layers: rotary attention with grouped heads, then a gated MLP with SiLU."""

    model_type: str
    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm of each query's and key's head, before the rotation."""
    tied: bool
    """Is the output matrix the embedding?"""
    windows: tuple[int | None, ...]
    """By layer: rows that a token attends to at most, its own included; None for all."""
    rope: Frequencies
    max_positions: int
    initializer_range: float
    """Standard deviation of random weights."""

    @classmethod
    def of(cls, config: Any) -> "DecoderConfig":
        """Read a configuration of transformers, such as `AutoConfig.from_pretrained` gives. Raises Unsupported.

        It must be the whole model's: that of a part, such as a `text_config`, does not tell of the others.
        """
        _refuse_unknown(config)
        family = config.model_type
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention_bias = bool(getattr(config, "attention_bias", False))
        sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size, "head_dim": head_dim}
        for name, size in sizes.items():
            if size % _MULTIPLE:
                raise Unsupported(f"{name} is {size}; wanted a multiple of {_MULTIPLE}")
        return cls(
            model_type=family,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            mlp_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            norm_eps=config.rms_norm_eps,
            qkv_bias=attention_bias or family == "qwen2",
            out_bias=attention_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=family == "qwen3",
            tied=config.tie_word_embeddings,
            windows=_windows(config),
            rope=Frequencies.of(config, head_dim),
            max_positions=config.max_position_embeddings,
            initializer_range=config.initializer_range,
        )


def _refuse_unknown(config: Any) -> None:
    """Raise Unsupported unless every field of the configuration is one that is known."""
    family, architectures = config.model_type, getattr(config, "architectures", None)
    if family not in _CAUSAL_LM:
        raise Unsupported(f"model_type is {family!r}; known are {', '.join(_CAUSAL_LM)}")
    if architectures not in (None, [], [_CAUSAL_LM[family]]):
        raise Unsupported(f"architectures is {architectures}; wanted {_CAUSAL_LM[family]}")
    read = _READ | _READ_BY_FAMILY[family]
    for name, value in config.to_dict().items():
        if name in _ONLY:
            if value not in _ONLY[name]:
                raise Unsupported(f"{name} is {value!r}; wanted {_ONLY[name][0]!r}")
        elif name not in read and name not in _INERT and not name.startswith("_") and not name.endswith(_INERT_ENDS) and value:
            raise Unsupported(f"{name} is {value!r}, and what that means for a {family} model is not known here")


def _windows(config: Any) -> tuple[int | None, ...]:
    layers: int = config.num_hidden_layers
    if config.model_type == "llama":
        return (None,) * layers
    if config.model_type == "mistral":
        return (config.sliding_window,) * layers
    kinds = config.layer_types
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise Unsupported(f"layer_types is {kinds}; wanted full_attention or sliding_attention for each of {layers} layers")
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)
