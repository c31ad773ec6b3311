"""A small decoder with random weights for the examples. Its keys and values lie in a KVCache.

Legend: N tokens of the batch, E width, H query heads, K kv heads, D head dim.
"""

import itertools

import torch
from torch.nn.functional import rms_norm, silu

from vmmkv import KVCache, KVLayout
from vmmkv.adapters.attention import sdpa_prefill

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 128, 4, 2, 32, 256


class TinyModel:
    """A Llama in small: norms, rotary positions, grouped queries, gated MLP. Tokens are bytes."""

    layout = KVLayout.uniform(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)

    def __init__(self, device: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator) * rows**-0.5).to(device)

        self.device = torch.device(device)
        self.embedding = 3 * weight(VOCABULARY, WIDTH)
        sizes = {
            "qkv": (WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
            "out": (HEADS * HEAD_DIM, WIDTH),
            "up": (WIDTH, 4 * WIDTH),
            "down": (2 * WIDTH, WIDTH),
        }
        self.layers = [{name: weight(*size) for name, size in sizes.items()} for _ in range(LAYERS)]
        self.head = weight(WIDTH, VOCABULARY)
        self.angles = 10_000.0 ** (-torch.arange(HEAD_DIM // 2, device=device) / (HEAD_DIM // 2))

    def forward(self, cache: KVCache, slots: list[int], new_tokens: list[list[int]]) -> torch.Tensor:
        """Append new tokens to each sequence, whose memory is mapped. Returns the logits of each sequence's last token."""
        counts = [len(tokens) for tokens in new_tokens]
        before = [int(cache.lengths[slot]) for slot in slots]
        positions_N = torch.cat([torch.arange(start, start + count) for start, count in zip(before, counts, strict=True)])
        slots_N = torch.tensor(slots).repeat_interleave(torch.tensor(counts)).to(self.device)
        ids_N, positions_N = torch.tensor(list(itertools.chain(*new_tokens))).to(self.device), positions_N.to(self.device)
        lengths = [start + count for start, count in zip(before, counts, strict=True)]
        starts = torch.tensor([0, *counts]).cumsum(0)
        where = (tensor.int().to(self.device) for tensor in (starts, torch.tensor(lengths), torch.tensor(slots)))
        query_starts, lengths_B, slots_B = where

        x_NE = self.embedding[ids_N]
        for layer, weights in enumerate(self.layers):
            heads = (rms_norm(x_NE, (WIDTH,)) @ weights["qkv"]).unflatten(1, (-1, HEAD_DIM))
            q_NHD, k_NKD, v_NKD = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            keys, values = cache.k(layer), cache.v(layer)
            keys[slots_N, positions_N] = self._rotated(k_NKD, positions_N)  # rows of plain tensors, wherever they are
            values[slots_N, positions_N] = v_NKD
            q_NHD = self._rotated(q_NHD, positions_N)
            x_NE = x_NE + sdpa_prefill(q_NHD, keys, values, query_starts, lengths_B, slots_B).flatten(1) @ weights["out"]
            gate, up = (rms_norm(x_NE, (WIDTH,)) @ weights["up"]).chunk(2, dim=1)
            x_NE = x_NE + (silu(gate) * up) @ weights["down"]
        cache.advance(slots, counts)
        return rms_norm(x_NE[starts[1:] - 1], (WIDTH,)) @ self.head

    def _rotated(self, x_NHD: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        turns = (positions_N[:, None] * self.angles)[:, None]
        low, high = x_NHD.chunk(2, dim=-1)
        return torch.cat([low * turns.cos() - high * turns.sin(), high * turns.cos() + low * turns.sin()], dim=-1)
