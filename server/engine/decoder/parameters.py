"""The tensors of a decoder: what is multiplied with the same input is one matrix, whose parts transformers names one by one.

Legend: V vocabulary, E hidden, H query heads, K kv heads, D head dim, F MLP width; C = (H + 2 K) D and G = 2 F are rows of
fused matrices.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vmmkv.server.engine.decoder.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Matrices are [rows out, columns in], as torch's linear has them."""

    attention_norm_E: torch.Tensor
    qkv_CE: torch.Tensor
    """Rows of q, of k, of v."""
    qkv_bias_C: torch.Tensor | None
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    out_EI: torch.Tensor
    """I = H D"""
    out_bias_E: torch.Tensor | None
    mlp_norm_E: torch.Tensor
    gate_up_GE: torch.Tensor
    """Rows of gate, then of up."""
    gate_up_bias_G: torch.Tensor | None
    down_EF: torch.Tensor
    down_bias_E: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All of a decoder's tensors, of one dtype on one device."""

    embedding_VE: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm_E: torch.Tensor
    head_VE: torch.Tensor
    """The embedding itself if they are tied."""

    def named(self, config: DecoderConfig) -> dict[str, torch.Tensor]:
        """Views of the tensors, and of the parts of fused ones, by the names that transformers saves them under."""
        places = {"model.embed_tokens.weight": self.embedding_VE, "model.norm.weight": self.norm_E}
        if self.head_VE is not self.embedding_VE:
            places["lm_head.weight"] = self.head_VE
        for index, layer in enumerate(self.layers):
            places |= {f"model.layers.{index}.{name}": place for name, place in _named_in(layer, config) if place is not None}
        return places


def _named_in(layer: LayerWeights, config: DecoderConfig) -> Iterator[tuple[str, torch.Tensor | None]]:
    yield "input_layernorm.weight", layer.attention_norm_E
    yield "self_attn.q_norm.weight", layer.q_norm_D
    yield "self_attn.k_norm.weight", layer.k_norm_D
    yield "self_attn.o_proj.weight", layer.out_EI
    yield "self_attn.o_proj.bias", layer.out_bias_E
    yield "post_attention_layernorm.weight", layer.mlp_norm_E
    yield "mlp.down_proj.weight", layer.down_EF
    yield "mlp.down_proj.bias", layer.down_bias_E
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for kind, qkv, gate_up in (
        ("weight", layer.qkv_CE, layer.gate_up_GE),
        ("bias", layer.qkv_bias_C, layer.gate_up_bias_G),
    ):
        if qkv is not None:
            for name, part in zip("qkv", torch.split(qkv, [q_rows, kv_rows, kv_rows]), strict=True):
                yield f"self_attn.{name}_proj.{kind}", part
        if gate_up is not None:
            for name, part in zip(("gate", "up"), gate_up.chunk(2), strict=True):
                yield f"mlp.{name}_proj.{kind}", part


def empty(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> Weights:
    """The tensors of such a decoder, not filled yet. On the device `meta` they take no memory."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    hidden, mlp = config.hidden_size, config.mlp_size
    q_rows = config.num_heads * config.head_dim
    qkv_rows = q_rows + 2 * config.num_kv_heads * config.head_dim

    def layer() -> LayerWeights:
        return LayerWeights(
            attention_norm_E=tensor(hidden),
            qkv_CE=tensor(qkv_rows, hidden),
            qkv_bias_C=tensor(qkv_rows) if config.qkv_bias else None,
            q_norm_D=tensor(config.head_dim) if config.qk_norm else None,
            k_norm_D=tensor(config.head_dim) if config.qk_norm else None,
            out_EI=tensor(hidden, q_rows),
            out_bias_E=tensor(hidden) if config.out_bias else None,
            mlp_norm_E=tensor(hidden),
            gate_up_GE=tensor(2 * mlp, hidden),
            gate_up_bias_G=tensor(2 * mlp) if config.mlp_bias else None,
            down_EF=tensor(hidden, mlp),
            down_bias_E=tensor(hidden) if config.mlp_bias else None,
        )

    embedding_VE = tensor(config.vocab_size, hidden)
    return Weights(
        embedding_VE=embedding_VE,
        layers=tuple(layer() for _ in range(config.num_layers)),
        norm_E=tensor(hidden),
        head_VE=embedding_VE if config.tied else tensor(config.vocab_size, hidden),
    )


def param_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights."""
    return sum(place.nbytes for place in empty(config, torch.device("meta"), dtype).named(config).values())


def step_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of weights that a decode step reads, whatever its batch: all but an embedding that is no output matrix too.

    Of that it reads one row a token, which is not counted.
    """
    embedding_bytes = config.vocab_size * config.hidden_size * dtype.itemsize
    return param_bytes(config, dtype) - (0 if config.tied else embedding_bytes)
