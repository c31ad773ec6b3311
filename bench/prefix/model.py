"""A dense decoder with random weights: what stands around the cache in every system, the same for all.

    tokens ── embed ──> x ──┬─ norm, QKV, append with rope, attend, out ─┬─ norm, SwiGLU ─┬──> norm, logits, argmax
                            └────────────────── + ───────────────────────┴────── + ───────┘

Its weights are random, so its words mean nothing; but a row of the cache that is wrong shows in what it says. Where rows lie is
the business of an Addressing.

Legend: N new tokens, B sequences, H query heads, K kv heads, C = 2 * K, D head dim, E hidden size, F width of the MLP, V words,
R = D / 2 angles, T positions.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import linear, rms_norm, silu

from bench.prefix.addressing import Addressing, NewRows
from bench.prefix.sizes import Decoder
from bench.settings import Shape

_EPSILON: Final = 1e-5
_SHARPNESS: Final = 3.0
"""How widely attention's scores spread. At 1, as random weights have them, thousands of keys average out to nothing, and no
wrong prefix would show in the outputs."""


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv_OE: torch.Tensor
    """The rows of all query heads, of K and of V: O = (H + 2 * K) * D."""
    out_EA: torch.Tensor
    """A = H * D."""
    gate_up_2FE: torch.Tensor
    down_EF: torch.Tensor


class Model:
    """Weights on a device, and a forward pass over new tokens. Keeps no sequence.

    Cost: the weights' bytes, made on the device: 16 GB and about a second for Llama-3.1-8B on an H200.
    """

    def __init__(self, shape: Shape, sizes: Decoder, device: torch.device, *, max_tokens: int, seed: int) -> None:
        self.shape: Final = shape
        self.sizes: Final = sizes
        self.device: Final = device
        self.max_tokens: Final = max_tokens
        self._generator = torch.Generator(device).manual_seed(seed)
        hidden, width = sizes.hidden, shape.heads * shape.head_dim
        # Each of the 2 * layers terms adds a fraction, so that the sum stays about as large as one.
        share = (2 * shape.layers) ** -0.5
        self._embedding_VE = self._random(sizes.vocabulary, hidden, scale=1.0)
        self._layers = [
            _Layer(
                qkv_OE=self._random(width + 2 * shape.kv_heads * shape.head_dim, hidden, scale=hidden**-0.5),
                out_EA=self._random(hidden, width, scale=share * width**-0.5),
                gate_up_2FE=self._random(2 * sizes.mlp, hidden, scale=hidden**-0.5),
                down_EF=self._random(hidden, sizes.mlp, scale=share * sizes.mlp**-0.5),
            )
            for _ in range(shape.layers)
        ]
        for layer in self._layers:
            layer.qkv_OE[:width].mul_(_SHARPNESS)
        self._words_VE = self._random(sizes.vocabulary, hidden, scale=hidden**-0.5)
        rates_R = sizes.rope_base ** -(torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
        angles_TR = torch.arange(max_tokens, device=device)[:, None] * rates_R
        self._cos_TR, self._sin_TR = angles_TR.cos(), angles_TR.sin()

    def forward(
        self, tokens_N: torch.Tensor, rows: NewRows, addressing: Addressing, last_B: torch.Tensor | None
    ) -> torch.Tensor:
        """Write the rows of new tokens and attend; [B, E] normed outputs of the tokens `last_B` (all, if None).

        Every launch is queued on the current stream; nothing waits. Safe under graph capture.
        """
        shape = self.shape
        x_NE = self._embedding_VE[tokens_N]
        for index, layer in enumerate(self._layers):
            qkv_NOD = linear(_normed(x_NE), layer.qkv_OE).view(len(x_NE), -1, shape.head_dim)
            q_NHD, kv_NCD = qkv_NOD[:, : shape.heads], qkv_NOD[:, shape.heads :]
            k_NKD, v_NKD = kv_NCD[:, : shape.kv_heads], kv_NCD[:, shape.kv_heads :]
            addressing.append(index, q_NHD, k_NKD, v_NKD, rows, self._cos_TR, self._sin_TR)
            x_NE = x_NE + linear(addressing.attend(index, q_NHD, rows).flatten(1), layer.out_EA)
            gate_NF, up_NF = linear(_normed(x_NE), layer.gate_up_2FE).chunk(2, dim=-1)
            x_NE = x_NE + linear(silu(gate_NF) * up_NF, layer.down_EF)
        return _normed(x_NE if last_B is None else x_NE[last_B])

    def next_words(self, outputs_BE: torch.Tensor) -> torch.Tensor:
        """[B] int64: the likeliest word behind each."""
        return linear(outputs_BE, self._words_VE).argmax(dim=-1)

    def _random(self, rows: int, columns: int, *, scale: float) -> torch.Tensor:
        weights = torch.empty(rows, columns, dtype=self.shape.dtype, device=self.device)
        return weights.normal_(0.0, scale, generator=self._generator)


def _normed(x_NE: torch.Tensor) -> torch.Tensor:
    """RMSNorm; its weights would be ones."""
    return rms_norm(x_NE, (x_NE.shape[-1],), eps=_EPSILON)
