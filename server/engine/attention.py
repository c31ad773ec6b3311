"""Attention over the rows of a cache: append a step's keys and values in place, and attend to whole sequences.

On a GPU vmmkv's kernels read lengths from the device, so that a captured step serves every length. On a CPU torch's own
attention goes run by run over the rows of each sequence.

Legend: N tokens of the step, B sequences, each with one run of tokens side by side, G prefix groups, H query heads, K key-value
heads, D head dimension, T rows, R angles, S slots.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from vmmkv import MIB

_SCORES_BYTES: Final = 64 * MIB
"""Float32 scores, heads * queries * rows, that are held at once under an arbitrary mask; torch makes some copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One sequence's tokens in a step: rows [start, start + count) of its slot, computed from input columns [column, ...)."""

    slot: int
    start: int
    count: int
    column: int

    @property
    def end(self) -> int:
        """Rows of the sequence behind the step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """The prefix groups of a decode step; int32, on the device.

    Group g is rows [starts[g], starts[g + 1]) of the batch. They all attend to rows [0, num_rows[g]) of slot leaders[g] as one
    problem, and each to the rows of its own slot from `firsts_B` on. Unused groups have no rows.
    """

    starts_G1: torch.Tensor
    leaders_G: torch.Tensor
    num_rows_G: torch.Tensor
    firsts_B: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Where the tokens of a step are written, and what they attend to. Padding is in slot 0, the null slot."""

    slots_N: torch.Tensor
    """int32: the slot of each token."""
    positions_N: torch.Tensor
    """int32: its row there."""
    slots_B: torch.Tensor
    """int32"""
    lengths_B: torch.Tensor
    """int32: rows to attend to, the new ones included."""
    query_starts: torch.Tensor | None
    """[B + 1] int32: where each run begins; None if every sequence has one token (and N is B)."""
    runs: tuple[Run, ...] | None
    """The same on the host, for a CPU; None where only the device knows the lengths."""
    shared: SharedPrefixes | None = None
    """Of a decode step on a GPU; None without prefix groups."""


@dataclass(frozen=True, slots=True)
class Rope:
    """float32 cosines and sines by position, for elements j and j + D / 2: [T, R]."""

    cos_TR: torch.Tensor
    sin_TR: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryParams:
    """What is done to queries and keys before they are used: each head is normed where there are weights [D], then rotated."""

    q_NHD: torch.Tensor
    """Changed in place."""
    rope: Rope
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    norm_eps: float


class KVRows(Protocol):
    """K and V rows of every layer, wherever they lie: append to them and attend to them.

    On a GPU these launch kernels on the current stream. On a CPU `write` and `read` give torch's attention the rows as tensors.
    """

    @property
    def on_gpu(self) -> bool:
        """Are the rows on a GPU?"""

    def append(self, layer: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor, batch: Batch, rotary: RotaryParams | None) -> None:
        """GPU: write new rows. Rows at and past their slot's limit, and those of the null slot, are dropped."""

    def decode(self, layer: int, q_BHD: torch.Tensor, batch: Batch, *, scale: float | None, window: int | None) -> torch.Tensor:
        """GPU: one query of each sequence. Returns [B, H, D]."""

    def prefill(
        self, layer: int, q_NHD: torch.Tensor, batch: Batch, *, scale: float | None, window: int | None
    ) -> torch.Tensor:
        """GPU: the last queries of each sequence. Returns [N, H, D]."""

    def cascade(
        self, layer: int, q_BHD: torch.Tensor, batch: Batch, shared: SharedPrefixes, *, scale: float | None
    ) -> torch.Tensor:
        """GPU: as `decode`, and to shared prefixes once."""

    def write(self, layer: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor, batch: Batch) -> None:
        """CPU: as `append`, of rows that are rotated already."""

    def read(self, layer: int, slot: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """CPU: K and V of rows [first, end): [T, K, D] each."""


class SlotRows:
    """Rows at contiguous addresses: the strided views of a cache, which any kernel can read. See KVRows.

    `cache` has `layout`, `device`, `limit` [1 + S], and `k(layer)` and `v(layer)` [1 + S, T, K, D], as `KVCache` has. With
    `tables_SC` they are blocks: row t of slot s is at `[tables_SC[s, t // U], t % U]`; `write` and `read` are the subclass's.
    """

    def __init__(self, cache: Any, *, tables_SC: torch.Tensor | None = None) -> None:
        self.on_gpu: Final[bool] = cache.device.type == "cuda"
        self._limit: torch.Tensor = cache.limit
        self._tables_SC = tables_SC
        self.views: Final = {layer: (cache.k(layer), cache.v(layer)) for layer in cache.layout.group_of}

    def append(self, layer: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor, batch: Batch, rotary: RotaryParams | None) -> None:
        """See KVRows.append."""
        from vmmkv.kernels.attention.append import append

        places = *self.views[layer], batch.slots_N, batch.positions_N, self._limit
        if rotary is None:
            append(k_NKD, v_NKD, *places, tables_SC=self._tables_SC)
        else:
            append(
                k_NKD, v_NKD, *places, tables_SC=self._tables_SC,
                q_NHD=rotary.q_NHD, cos_TR=rotary.rope.cos_TR, sin_TR=rotary.rope.sin_TR,
                q_norm_D=rotary.q_norm_D, k_norm_D=rotary.k_norm_D, norm_eps=rotary.norm_eps,
            )  # fmt: skip

    def decode(self, layer: int, q_BHD: torch.Tensor, batch: Batch, *, scale: float | None, window: int | None) -> torch.Tensor:
        """See KVRows.decode."""
        from vmmkv.kernels.attention.decode import decode

        rows = *self.views[layer], batch.lengths_B, batch.slots_B
        return decode(q_BHD, *rows, tables_SC=self._tables_SC, scale=scale, window=window)

    def prefill(
        self, layer: int, q_NHD: torch.Tensor, batch: Batch, *, scale: float | None, window: int | None
    ) -> torch.Tensor:
        """See KVRows.prefill."""
        from vmmkv.kernels.attention.prefill import prefill

        assert batch.query_starts is not None, "a decode step"
        runs = *self.views[layer], batch.query_starts, batch.lengths_B, batch.slots_B
        return prefill(q_NHD, *runs, tables_SC=self._tables_SC, scale=scale, window=window)

    def cascade(
        self, layer: int, q_BHD: torch.Tensor, batch: Batch, shared: SharedPrefixes, *, scale: float | None
    ) -> torch.Tensor:
        """See KVRows.cascade."""
        from vmmkv.kernels.attention.cascade import cascade

        return cascade(
            q_BHD, *self.views[layer], batch.lengths_B, batch.slots_B, tables_SC=self._tables_SC,
            group_starts_G1=shared.starts_G1, leaders_G=shared.leaders_G, prefix_rows_G=shared.num_rows_G,
            firsts_B=shared.firsts_B, scale=scale,
        )  # fmt: skip

    def write(self, layer: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor, batch: Batch) -> None:
        """See KVRows.write."""
        may_write_N = batch.positions_N < self._limit[batch.slots_N]
        slots_N, positions_N = batch.slots_N[may_write_N], batch.positions_N[may_write_N]
        for rows_STKD, values_NKD in zip(self.views[layer], (k_NKD, v_NKD), strict=True):
            rows_STKD[slots_N, positions_N] = values_NKD[may_write_N]

    def read(self, layer: int, slot: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVRows.read. Views."""
        k_STKD, v_STKD = self.views[layer]
        return k_STKD[slot, first:end], v_STKD[slot, first:end]


class CachedAttention:
    """Attention that a model calls in each of its layers, between `begin` of a step and the next.

    `rope` rotates queries and keys; None for a model that rotates them itself. `windows` has the layers that attend to their
    last rows only, with their number, as the layout has: rows before them are unmapped.
    """

    def __init__(self, rows: KVRows, *, rope: Rope | None = None, windows: Mapping[int, int] | None = None) -> None:
        self._rows = rows
        self._rope = rope
        self._windows = dict(windows or {})
        self._batch: Batch | None = None

    def begin(self, batch: Batch) -> None:
        """The next calls belong to this step."""
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
        batch, rows, window = self._batch, self._rows, self._windows.get(layer)
        assert batch is not None, "no step has begun"
        rotary = None
        if self._rope is not None:
            rotary = RotaryParams(q_NHD=q_NHD, rope=self._rope, q_norm_D=q_norm, k_norm_D=k_norm, norm_eps=norm_eps)
        if rows.on_gpu:
            rows.append(layer, k_NKD, v_NKD, batch, rotary)
            if batch.query_starts is not None:
                return rows.prefill(layer, q_NHD, batch, scale=scale, window=window)
            if batch.shared is not None and window is None:
                return rows.cascade(layer, q_NHD, batch, batch.shared, scale=scale)
            return rows.decode(layer, q_NHD, batch, scale=scale, window=window)
        if rotary is not None:
            q_NHD, k_NKD = norm_and_rotate(rotary, k_NKD, batch.positions_N)
        rows.write(layer, k_NKD, v_NKD, batch)
        assert batch.runs is not None, "attention on a CPU goes run by run"
        out_NHD = q_NHD.new_empty(q_NHD.shape[0], q_NHD.shape[1], v_NKD.shape[-1])
        for run in batch.runs:
            columns = slice(run.column, run.column + run.count)
            first = 0 if window is None else max(0, run.start + 1 - window)
            k_TKD, v_TKD = rows.read(layer, run.slot, first, run.end)
            out_NHD[columns] = attend_run(q_NHD[columns], k_TKD, v_TKD, scale, window)
        return out_NHD


def norm_and_rotate(rotary: RotaryParams, k_NKD: torch.Tensor, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, normed and rotated."""
    q_NHD = rotary.q_NHD
    if rotary.q_norm_D is not None and rotary.k_norm_D is not None:
        q_NHD = rms_norm(q_NHD, rotary.q_norm_D, rotary.norm_eps)
        k_NKD = rms_norm(k_NKD, rotary.k_norm_D, rotary.norm_eps)
    cos_N1R, sin_N1R = (table[positions_N, None].to(q_NHD.dtype) for table in (rotary.rope.cos_TR, rotary.rope.sin_TR))
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
    """One run against its rows: torch's own attention on the contiguous view. The last query sees the last row."""
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
