"""The forward pass of a dense decoder.

Legend: N tokens of a step, B rows asked for, E hidden, H query heads, K kv heads, D head dim, V vocabulary.
"""

from typing import Final, Protocol

import torch
import torch.nn.functional as F

from vmmkv.server.engine.attention import Batch, CachedAttention, KVRows, Rope
from vmmkv.server.engine.kv_backend import EngineCache
from vmmkv.server.engine.models.config import DecoderConfig
from vmmkv.server.engine.models.weights import Weights

# -------- ops
# The few operations that a decoder is made of, on its residual stream; here in plain torch, as transformers does them.
#
# Legend: N tokens of a step, B rows that are kept, E hidden, G outputs, F = G / 2 gated ones, I inputs, V vocabulary.


class Stream(Protocol):
    """The residual stream of one forward pass, [N, E]. What is read from it is normed first, what is written is added."""

    def project(self, norm_E: torch.Tensor, weight_GE: torch.Tensor, bias_G: torch.Tensor | None) -> torch.Tensor:
        """The linear map [N, G] of the normed stream."""

    def gate(self, norm_E: torch.Tensor, weight_GE: torch.Tensor, bias_G: torch.Tensor | None) -> torch.Tensor:
        """The same, with rows of gate, then of up: silu(gate) * up, [N, F]."""

    def add(self, x_NI: torch.Tensor, weight_EI: torch.Tensor, bias_E: torch.Tensor | None) -> None:
        """Add the linear map of `x_NI`."""

    def keep(self, rows_B: torch.Tensor) -> "Stream":
        """The stream of these rows alone; this one is not used any more. Not between `add` and the next `project` or `gate`."""

    def normed(self, norm_E: torch.Tensor) -> torch.Tensor:
        """The normed stream [N, E]."""


class Ops(Protocol):
    """How one device does it."""

    def stream(self, x_NE: torch.Tensor, norm_eps: float) -> Stream:
        """A residual stream that begins as `x_NE`, which belongs to it from now on and may be written."""

    def linear(self, x_BE: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
        """[B, V]"""


def ops_for(device: torch.device) -> Ops:
    """vmmkv's kernels on a GPU, plain torch elsewhere."""
    if device.type != "cuda":
        return TorchOps()
    from vmmkv.server.engine.models.kernel_ops import KernelOps  # not above: it imports triton

    return KernelOps()


class TorchOps:
    """Plain torch, with the roundings of transformers and in its order."""

    def stream(self, x_NE: torch.Tensor, norm_eps: float) -> Stream:
        """A stream whose tensors are replaced, never written."""
        return _TorchStream(x_NE, norm_eps)

    def linear(self, x_BE: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
        """torch's own."""
        return F.linear(x_BE, weight_VE)


class _TorchStream:
    def __init__(self, x_NE: torch.Tensor, norm_eps: float) -> None:
        self._x_NE = x_NE
        self._norm_eps = norm_eps

    def project(self, norm_E: torch.Tensor, weight_GE: torch.Tensor, bias_G: torch.Tensor | None) -> torch.Tensor:
        return F.linear(self.normed(norm_E), weight_GE, bias_G)

    def gate(self, norm_E: torch.Tensor, weight_GE: torch.Tensor, bias_G: torch.Tensor | None) -> torch.Tensor:
        gate_NF, up_NF = self.project(norm_E, weight_GE, bias_G).chunk(2, dim=-1)
        return F.silu(gate_NF) * up_NF

    def add(self, x_NI: torch.Tensor, weight_EI: torch.Tensor, bias_E: torch.Tensor | None) -> None:
        self._x_NE = self._x_NE + F.linear(x_NI, weight_EI, bias_E)

    def keep(self, rows_B: torch.Tensor) -> Stream:
        return _TorchStream(self._x_NE.index_select(0, rows_B), self._norm_eps)

    def normed(self, norm_E: torch.Tensor) -> torch.Tensor:
        wide_NE = self._x_NE.float()
        wide_NE = wide_NE * torch.rsqrt(wide_NE.pow(2).mean(-1, keepdim=True) + self._norm_eps)
        return norm_E * wide_NE.to(self._x_NE.dtype)


# -------- decoder


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


# -------- decoder model
# The config-driven decoder over the rows of a cache.


class DecoderModel:
    """A decoder whose keys and values are a cache's. Several can live in one process."""

    implementation: Final = "vmmkv"
    capturable: Final = True
    has_states: Final = True

    def __init__(self, decoder: Decoder, cache: EngineCache, rows: KVRows) -> None:
        config = decoder.config
        cos_TR, sin_TR = config.rope.tables(cache.max_tokens, cache.device)
        windows = {layer: window for layer, window in enumerate(config.windows) if window is not None}
        self._decoder = decoder
        self._attention = CachedAttention(rows, rope=Rope(cos_TR, sin_TR), windows=windows)
        self.vocabulary_size: Final = config.vocab_size

    def forward(self, ids_N: torch.Tensor, batch: Batch, last_B: torch.Tensor | None) -> torch.Tensor:
        """Append and attend to a step's tokens; [B, V] logits behind those at `last_B` (all, if None)."""
        self._attention.begin(batch)
        return self._decoder.logits(self._decoder.forward(ids_N, self._attention, last_B))

    def states(self, ids_N: torch.Tensor, batch: Batch, rows_W: torch.Tensor) -> torch.Tensor:
        """See Model: the final, normed hidden states."""
        self._attention.begin(batch)
        return self._decoder.forward(ids_N, self._attention, rows_W)

    def logits(self, states_WE: torch.Tensor) -> torch.Tensor:
        """See Model."""
        return self._decoder.logits(states_WE)

    def check(self) -> None:
        """It is known to be one that can be served."""
