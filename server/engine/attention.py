"""Attention over the cache's slots: append a step's keys and values in place, and attend to whole slots.

On a GPU it is our kernels, which read lengths from the device, so that a captured step serves every length; on a CPU torch's
own attention, run by run, on the contiguous view of each slot.

Legend: N tokens of the step, B sequences, H query heads, K key-value heads, D head dimension, T rows, S slots, R angles.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from vmmkv import MIB, KVCache
from vmmkv.server.engine.batch import Batch

_SCORES_BYTES: Final = 64 * MIB
"""Of the float32 scores, heads * queries * rows, that are held at once under an arbitrary mask; torch makes some copies."""


@dataclass(frozen=True, slots=True)
class Rope:
    """float32 cosines and sines by position, for elements j and j + D / 2: [T, R]."""

    cos_TR: torch.Tensor
    sin_TR: torch.Tensor


class SlotAttention:
    """What a model calls in each of its layers, between `begin` of a step and the next.

    `rope` rotates queries and keys; None for a model that has done so by itself. `windows` has the layers that attend to their
    last so many rows only.
    """

    def __init__(self, cache: KVCache, *, rope: Rope | None = None, windows: Mapping[int, int] | None = None) -> None:
        self.on_gpu: Final = cache.device.type == "cuda"
        self._limit = cache.limit
        self._views = {layer: (cache.k(layer), cache.v(layer)) for layer in cache.layout.group_of}
        self._rope = rope
        self._windows = dict(windows or {})
        self._batch: Batch | None = None

    def begin(self, batch: Batch) -> None:
        """What is called from now on is this step's."""
        self._batch = batch

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
        scale: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Norm each head where weights [D] are given, rotate, append to the step's slots, attend there. Returns [N, H, D].

        q_NHD, k_NKD, v_NKD may be strided, and q_NHD may be changed in place. `window` is the layer's own, if none was given
        at the start. Queues launches, and waits for nothing.
        """
        assert self._batch is not None, "no step has begun"
        batch, (k_STKD, v_STKD) = self._batch, self._views[layer]
        window = self._windows.get(layer, window)
        if self.on_gpu:
            return self._on_gpu(batch, q_NHD, k_NKD, v_NKD, k_STKD, v_STKD, q_norm, k_norm, norm_eps, scale, window)
        if q_norm is not None and k_norm is not None:
            q_NHD, k_NKD = rms_norm(q_NHD, q_norm, norm_eps), rms_norm(k_NKD, k_norm, norm_eps)
        if self._rope is not None:
            cos_N1R, sin_N1R = (
                table[batch.positions_N, None].to(q_NHD.dtype) for table in (self._rope.cos_TR, self._rope.sin_TR)
            )
            q_NHD, k_NKD = rotate(q_NHD, cos_N1R, sin_N1R), rotate(k_NKD, cos_N1R, sin_N1R)
        may_write_N = batch.positions_N < self._limit[batch.slots_N]
        slots_N, positions_N = batch.slots_N[may_write_N], batch.positions_N[may_write_N]
        k_STKD[slots_N, positions_N] = k_NKD[may_write_N]
        v_STKD[slots_N, positions_N] = v_NKD[may_write_N]
        assert batch.runs is not None, "attention on a CPU goes run by run"
        out_NHD = q_NHD.new_empty(q_NHD.shape[0], q_NHD.shape[1], v_STKD.shape[-1])
        for run in batch.runs:
            columns = slice(run.column, run.column + run.count)
            first = 0 if window is None else max(0, run.start + 1 - window)
            out_NHD[columns] = attend_run(
                q_NHD[columns], k_STKD[run.slot, first : run.end], v_STKD[run.slot, first : run.end], scale, window
            )
        return out_NHD

    def _on_gpu(
        self,
        batch: Batch,
        q_NHD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        k_STKD: torch.Tensor,
        v_STKD: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        norm_eps: float,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        from vmmkv.kernels.append import append
        from vmmkv.kernels.cascade import cascade
        from vmmkv.kernels.decode import decode
        from vmmkv.kernels.prefill import prefill

        if self._rope is None:
            append(k_NKD, v_NKD, k_STKD, v_STKD, batch.slots_N, batch.positions_N, self._limit)
        else:
            append(
                k_NKD, v_NKD, k_STKD, v_STKD, batch.slots_N, batch.positions_N, self._limit,
                q_NHD=q_NHD, cos_TR=self._rope.cos_TR, sin_TR=self._rope.sin_TR,
                q_norm_D=q_norm, k_norm_D=k_norm, norm_eps=norm_eps,
            )  # fmt: skip
        if batch.query_starts is not None:
            return prefill(
                q_NHD, k_STKD, v_STKD, batch.query_starts, batch.lengths_B, batch.slots_B, scale=scale, window=window
            )
        if batch.shared is not None and window is None:
            shared = batch.shared
            return cascade(
                q_NHD, k_STKD, v_STKD, batch.lengths_B, batch.slots_B, group_starts_G1=shared.starts_G1,
                leaders_G=shared.leaders_G, prefix_rows_G=shared.num_rows_G, firsts_B=shared.firsts_B, scale=scale,
            )  # fmt: skip
        return decode(q_NHD, k_STKD, v_STKD, batch.lengths_B, batch.slots_B, scale=scale, window=window)


def rms_norm(x: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, rounded as transformers does."""
    x_32 = x.float()
    x_32 = x_32 * torch.rsqrt(x_32.square().mean(-1, keepdim=True) + eps)
    return weight_E * x_32.to(x.dtype)


def rotate(x_NHD: torch.Tensor, cos_N1R: torch.Tensor, sin_N1R: torch.Tensor) -> torch.Tensor:
    """Rotate the plane of elements j and j + D / 2 by angle j (Su et al., 2021, in the halves of GPT-NeoX and Llama)."""
    low, high = x_NHD.chunk(2, dim=-1)
    return torch.cat((low * cos_N1R - high * sin_N1R, high * cos_N1R + low * sin_N1R), dim=-1)


def attend_run(
    q_NHD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, scale: float | None, window: int | None
) -> torch.Tensor:
    """One run against its rows: torch's own attention on the contiguous view; the last query sees the last row."""
    num_queries, num_rows = q_NHD.shape[0], k_TKD.shape[0]
    mask: torch.Tensor | None = None
    is_causal = num_queries == num_rows > 1
    if window is not None and num_rows > window:
        mask, is_causal = _windowed(num_queries, num_rows, window, q_NHD.device), False
    elif not is_causal and num_queries > 1:
        if q_NHD.is_cuda and q_NHD.dtype in (torch.float16, torch.bfloat16):
            mask = causal_lower_right(num_queries, num_rows)  # flash attention knows this one; it takes no other mask
        else:
            mask = _windowed(num_queries, num_rows, num_rows, q_NHD.device)
    queries_at_once = max(1, _SCORES_BYTES // (4 * q_NHD.shape[1] * num_rows))
    if type(mask) is torch.Tensor and num_queries > queries_at_once:
        blocks = zip(torch.split(q_NHD, queries_at_once), torch.split(mask, queries_at_once), strict=True)
        return torch.cat([_sdpa(q, k_TKD, v_TKD, block, is_causal=False, scale=scale) for q, block in blocks])
    return _sdpa(q_NHD, k_TKD, v_TKD, mask, is_causal=is_causal, scale=scale)


def _sdpa(
    q_NHD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    q_HND, k_KTD, v_KTD = (tensor.transpose(0, 1)[None] for tensor in (q_NHD, k_TKD, v_TKD))
    out = F.scaled_dot_product_attention(q_HND, k_KTD, v_KTD, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _windowed(num_queries: int, num_rows: int, window: int, device: torch.device) -> torch.Tensor:
    """[queries, rows] bool: each query sees its own row and the `window - 1` before it."""
    offset = num_rows - num_queries
    causal = torch.ones(num_queries, num_rows, dtype=torch.bool, device=device).tril(offset)
    return causal.triu(offset - window + 1)
