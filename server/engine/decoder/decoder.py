"""The forward pass of a dense decoder.

Legend: N tokens of a step, B rows asked for, E hidden, H query heads, K kv heads, D head dim, V vocabulary.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from vmmkv.server.engine.decoder.config import DecoderConfig
from vmmkv.server.engine.decoder.ops import Ops, ops_for
from vmmkv.server.engine.decoder.parameters import Weights


class KVAttention(Protocol):
    """What a decoder calls in each layer, once, in order: it knows where the tokens are, their angles and their windows."""

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
        """Norm each head of q and k if there are norms [D], rotate them, append k and v, attend. Returns [N, H, D].

        q, k and v are strided views of one tensor, which may be changed in place.
        """


class Decoder:
    """A decoder of one configuration, whose weights say where it runs.

    Nothing in it waits for the device or depends on what is there, so that it can be captured in a CUDA graph.
    """

    def __init__(self, config: DecoderConfig, weights: Weights, ops: Ops | None = None) -> None:
        self.config = config
        self.weights = weights
        self._ops = ops_for(weights.norm_E.device) if ops is None else ops

    def forward(self, ids_N: torch.Tensor, attention: KVAttention, last_B: torch.Tensor | None = None) -> torch.Tensor:
        """The final, normed hidden states of the tokens at indices `last_B`, [B, E]; of all without.

        `ids_N` and `last_B` are int32 or int64.
        """
        config, weights = self.config, self.weights
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        stream = self._ops.stream(F.embedding(ids_N, weights.embedding_VE), config.norm_eps)
        for index, layer in enumerate(weights.layers):
            qkv_NC = stream.project(layer.attention_norm_E, layer.qkv_CE, layer.qkv_bias_C)
            q_NHD, k_NKD, v_NKD = torch.split(qkv_NC.view(len(qkv_NC), -1, config.head_dim), heads, dim=1)
            attended_NHD = attention(
                index, q_NHD, k_NKD, v_NKD, q_norm=layer.q_norm_D, k_norm=layer.k_norm_D, norm_eps=config.norm_eps
            )
            if last_B is not None and layer is weights.layers[-1]:
                # From here on no token looks at another: in a prefill the rest of this layer is for those asked for alone.
                attended_NHD, stream = attended_NHD.index_select(0, last_B), stream.keep(last_B)
            stream.add(attended_NHD.flatten(1), layer.out_EI, layer.out_bias_E)
            gated_NF = stream.gate(layer.mlp_norm_E, layer.gate_up_GE, layer.gate_up_bias_G)
            stream.add(gated_NF, layer.down_EF, layer.down_bias_E)
        return stream.normed(weights.norm_E)

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor:
        """[B, V], in the weights' dtype."""
        return self._ops.linear(hidden_BE, self.weights.head_VE)
