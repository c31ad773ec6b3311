"""Attention over the rows of a cache: append a step's keys and values in place, and attend to whole sequences.

On a GPU it is our kernels, which read lengths from the device, so that a captured step serves every length; on a CPU torch's
own attention, run by run, on the rows of each sequence.

Legend: N tokens of the step, B sequences, H query heads, K key-value heads, D head dimension, T rows, R angles.
"""

from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from vmmkv import MIB
from vmmkv.server.engine.batch import Batch
from vmmkv.server.engine.rows import Rope, Rows, Turning

_SCORES_BYTES: Final = 64 * MIB
"""Of the float32 scores, heads * queries * rows, that are held at once under an arbitrary mask; torch makes some copies."""


class CachedAttention:
    """What a model calls in each of its layers, between `begin` of a step and the next.

    `rope` rotates queries and keys; None for a model that has done so by itself. `windows` has the layers that attend to their
    last so many rows only: those of the layout, for rows before them are unmapped.
    """

    def __init__(self, rows: Rows, *, rope: Rope | None = None, windows: Mapping[int, int] | None = None) -> None:
        self._rows = rows
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
    ) -> torch.Tensor:
        """Norm each head where weights [D] are given, rotate, append to the step's sequences, attend there. Returns [N, H, D].

        q_NHD, k_NKD, v_NKD may be strided, and q_NHD may be changed in place. Queues launches, and waits for nothing.
        """
        batch = self._batch
        assert batch is not None, "no step has begun"
        window = self._windows.get(layer)
        turning = None
        if self._rope is not None:
            turning = Turning(q_NHD=q_NHD, rope=self._rope, q_norm_D=q_norm, k_norm_D=k_norm, norm_eps=norm_eps)
        if self._rows.on_gpu:
            self._rows.append(layer, k_NKD, v_NKD, batch.slots_N, batch.positions_N, turning)
            return self._on_gpu(batch, layer, q_NHD, scale, window)
        if turning is not None:
            q_NHD, k_NKD = turned(turning, k_NKD, batch.positions_N)
        self._rows.write(layer, k_NKD, v_NKD, batch.slots_N, batch.positions_N)
        assert batch.runs is not None, "attention on a CPU goes run by run"
        out_NHD = q_NHD.new_empty(q_NHD.shape[0], q_NHD.shape[1], v_NKD.shape[-1])
        for run in batch.runs:
            columns = slice(run.column, run.column + run.count)
            first = 0 if window is None else max(0, run.start + 1 - window)
            k_TKD, v_TKD = self._rows.read(layer, run.slot, first, run.end)
            out_NHD[columns] = attend_run(q_NHD[columns], k_TKD, v_TKD, scale, window)
        return out_NHD

    def _on_gpu(self, batch: Batch, layer: int, q_NHD: torch.Tensor, scale: float | None, window: int | None) -> torch.Tensor:
        rows, slots_B, lengths_B = self._rows, batch.slots_B, batch.lengths_B
        if batch.query_starts is not None:
            return rows.prefill(layer, q_NHD, batch.query_starts, lengths_B, slots_B, scale=scale, window=window)
        if batch.shared is not None and window is None:
            return rows.cascade(layer, q_NHD, lengths_B, slots_B, batch.shared, scale=scale)
        return rows.decode(layer, q_NHD, lengths_B, slots_B, scale=scale, window=window)


def turned(turning: Turning, k_NKD: torch.Tensor, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, normed and rotated."""
    q_NHD = turning.q_NHD
    if turning.q_norm_D is not None and turning.k_norm_D is not None:
        q_NHD = rms_norm(q_NHD, turning.q_norm_D, turning.norm_eps)
        k_NKD = rms_norm(k_NKD, turning.k_norm_D, turning.norm_eps)
    cos_N1R, sin_N1R = (table[positions_N, None].to(q_NHD.dtype) for table in (turning.rope.cos_TR, turning.rope.sin_TR))
    return rotate(q_NHD, cos_N1R, sin_N1R), rotate(k_NKD, cos_N1R, sin_N1R)


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
