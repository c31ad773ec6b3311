"""Attention over the rows of a cache: append a step's keys and values in place, and attend to whole sequences.

On a GPU vmmkv's kernels read lengths from the device, so that a captured step serves every length. On a CPU torch's own
attention goes over the rows of one sequence at a time. Rows may be quantised: a token attends to its own as it is kept, too.

Legend: N tokens of the step, B sequences, whose tokens stand side by side, G prefix groups, H query heads, K key-value heads,
D head dimension, T rows, R angles, S slots, L layers.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from vmmkv import MIB
from vmmkv.layout import SCALES, KVLayout
from vmmkv_kernels import reference
from vmmkv_kernels.quantise import dequantise, kind_of, quantise
from vmmkv_server.engine.ranking import Ranking

SCORES_BYTES: Final = 64 * MIB
"""Float32 scores, heads * queries * rows, that are held at once under an arbitrary mask; torch makes some copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """The prefix groups of the rows that decode; int32, on the device.

    Group g is rows [starts[g], starts[g + 1]) of the batch. They all attend to rows [0, num_rows[g]) of slot leaders[g] as one
    problem, and each to the rows of its own slot from `firsts_B` on. Unused groups have no rows.
    """

    starts_G1: torch.Tensor
    leaders_G: torch.Tensor
    num_rows_G: torch.Tensor
    firsts_B: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Places of a step's tokens, and the rows that they attend to. All int32; padding is in slot 0, the null slot."""

    slots_N: torch.Tensor
    """The slot of each token."""
    rows_N: torch.Tensor
    """The row of each token in its slot."""
    slots_B: torch.Tensor
    lengths_B: torch.Tensor
    """Rows to attend to, the new ones included."""
    query_starts: torch.Tensor | None
    """[B + 1] first token of each sequence, and the end of the last; None if every sequence has one token (and N is B)."""
    positions_N: torch.Tensor | None = None
    """Position by which each token is rotated; None for its row."""
    shared: SharedPrefixes | None = None
    """Prefixes that sequences of the step share; only on a GPU, None without prefix groups."""
    ranking: Ranking | None = None
    """Ranking to which these layers add what the queries attend to; None in a step without ranked queries."""
    queries_LBHD: torch.Tensor | None = None
    """Queries that each layer leaves here, to be ranked by behind the step; None where they are not wanted."""


class RotaryParams(NamedTuple):
    """Preparation of queries and keys before they are used: each head is normed where there are weights [D], then rotated."""

    q_NHD: torch.Tensor
    q_out_NHD: torch.Tensor
    """Output of the prepared queries: `q_NHD` itself, or another tensor."""
    cos_TR: torch.Tensor
    """float32, by position, for elements j and j + D / 2."""
    sin_TR: torch.Tensor
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    norm_eps: float


class SlotPlanes(Protocol):
    """Planes of all slots of a cache, by layer. `KVCache` is one."""

    @property
    def layout(self) -> KVLayout:
        """Layers, and the bytes of a row."""

    @property
    def max_tokens(self) -> int:
        """Rows of a slot."""

    @property
    def limit(self) -> torch.Tensor:
        """[1 + S] rows that may be written, int32, on the device."""

    def k(self, layer: int) -> torch.Tensor:
        """[1 + S, T, K, D], or blocks of rows: [P, U, K, D]."""

    def v(self, layer: int) -> torch.Tensor:
        """Values, in the same shape as `k`."""

    def k_scale(self, layer: int) -> torch.Tensor:
        """[1 + S, T, K] scales of quantised keys."""

    def v_scale(self, layer: int) -> torch.Tensor:
        """[1 + S, T, K] scales of quantised values."""


class KVRows:
    """K and V rows of every layer of a cache: append to them and attend to them.

    `append`, `decode`, `prefill` and `cascade` launch kernels on the current stream of a GPU. `write` and `read` serve torch's
    attention on a CPU.
    """

    def __init__(self, cache: SlotPlanes, *, tables_SC: torch.Tensor | None = None) -> None:
        """`cache`: planes of slots; with `tables_SC` of blocks, which the tables give to slots (`vmmkv_kernels.attention`)."""
        self.layout: Final = cache.layout
        self.max_tokens: Final = cache.max_tokens
        self.limit: Final = cache.limit
        self.on_gpu: Final = cache.limit.is_cuda
        self.views: Final = {layer: (cache.k(layer), cache.v(layer)) for layer in self.layout.group_of}
        self.scales: Final[dict[int, dict[str, Any]]] = {
            layer: {"k_scale": cache.k_scale(layer), "v_scale": cache.v_scale(layer)}
            for layer, group in self.layout.group_of.items()
            if SCALES in self.layout.groups[group].plane_offsets
        }
        """Scales of quantised K and V by layer, under the kernels' names for them; float16 [S, T, K] each."""
        self.tables_SC: Final = tables_SC

    def append(
        self, layer: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor, step: AttentionMetadata, rotary: RotaryParams | None
    ) -> None:
        """Write new rows. Rows at and past their slot's limit, and those of the null slot, are dropped."""
        from vmmkv_kernels.attention.append import append

        places = *self.views[layer], step.slots_N, step.rows_N, self.limit
        options = ({} if rotary is None else rotary._asdict()) | self.scales.get(layer, {})
        append(k_NKD, v_NKD, *places, positions_N=step.positions_N, tables_SC=self.tables_SC, **options)

    def decode(
        self, layer: int, q_BHD: torch.Tensor, step: AttentionMetadata, *, scale: float | None, window: int | None,
        softcap: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend from one query of each sequence. Returns [B, H, D]."""
        from vmmkv_kernels.attention.decode import decode

        rows = *self.views[layer], step.lengths_B, step.slots_B
        # Settled: the model has embedded the step's tokens since.
        return decode(
            q_BHD, *rows, tables_SC=self.tables_SC, scale=scale, window=window, softcap=softcap, settled=True,
            **self.scales.get(layer, {}),
        )  # fmt: skip

    def prefill(
        self, layer: int, q_NHD: torch.Tensor, step: AttentionMetadata, *, scale: float | None, window: int | None,
        softcap: float | None = None, out_NHD: torch.Tensor | None = None, lse_NH: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend from the last queries of each sequence. Returns [N, H, D]: `out_NHD`, where `cascade` gave it.

        `lse_NH`: receives log-sum-exps of the queries, as in the kernel.
        """
        from vmmkv_kernels.attention.prefill import prefill

        assert step.query_starts is not None, "a decode step"
        rows = *self.views[layer], step.query_starts, step.lengths_B, step.slots_B
        return prefill(
            q_NHD, *rows, tables_SC=self.tables_SC, scale=scale, window=window, softcap=softcap, out=out_NHD, lse_NH=lse_NH,
            skips_singles=out_NHD is not None, **self.scales.get(layer, {}),
        )  # fmt: skip

    def cascade(
        self, layer: int, q_BHD: torch.Tensor, step: AttentionMetadata, shared: SharedPrefixes, *, scale: float | None,
        softcap: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend as `decode`, with one pass over each shared prefix. Beside chunks it writes the rows that decode alone."""
        from vmmkv_kernels.attention.cascade import cascade

        return cascade(
            q_BHD, *self.views[layer], step.lengths_B, step.slots_B, group_starts_G1=shared.starts_G1,
            leaders_G=shared.leaders_G, prefix_rows_G=shared.num_rows_G, firsts_B=shared.firsts_B,
            query_starts=step.query_starts, tables_SC=self.tables_SC, scale=scale, softcap=softcap,
            **self.scales.get(layer, {}),
        )  # fmt: skip

    def write(self, layer: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor, step: AttentionMetadata) -> None:
        """Write rows as `append`, but rows that are rotated already."""
        may_write_N = step.rows_N < self.limit[step.slots_N]
        places = step.slots_N[may_write_N], step.rows_N[may_write_N]
        scales = self.scales.get(layer, {}).values() or (None, None)
        for rows_STKW, scale_STK, values_NKD in zip(self.views[layer], scales, (k_NKD, v_NKD), strict=True):
            values_NKD = values_NKD[may_write_N]
            if scale_STK is not None:
                kind = kind_of(rows_STKW.dtype)
                assert kind is not None, "rows with scales are quantised"
                values_NKD, scale_STK[places] = quantise(values_NKD, kind)
            rows_STKW[places] = values_NKD

    def read(self, layer: int, slot: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of rows [first, end): [T, K, D] each. Views; of quantised ones float32 copies."""
        k_TKW, v_TKW = (rows_STKW[slot, first:end] for rows_STKW in self.views[layer])
        if layer not in self.scales:
            return k_TKW, v_TKW
        k_scale_TK, v_scale_TK = (scale_STK[slot, first:end] for scale_STK in self.scales[layer].values())
        return dequantise(k_TKW, k_scale_TK), dequantise(v_TKW, v_scale_TK)

    @property
    def k_LSTKD(self) -> torch.Tensor:
        """K of all layers as one view; of layers that are alike."""
        views = [k_STKD for k_STKD, _ in self.views.values()]
        first, layer_stride = views[0], views[-1].storage_offset() - views[0].storage_offset()
        strides = (layer_stride // max(1, len(views) - 1), *first.stride())
        k_LSTKD: torch.Tensor = first.as_strided((len(views), *first.shape), strides, first.storage_offset())
        return k_LSTKD


class RotaryKeys:
    """The keys of all layers of a model that rotates them by known angles.

    They can be ranked, by the queries of a step, and turned where a compaction has moved their rows.
    """

    def __init__(self, rows: KVRows, inv_freq_R: torch.Tensor, num_heads: int, dtype: torch.dtype) -> None:
        """inv_freq_R: float32, the angle for one position. num_heads, dtype: of queries."""
        self.k_LSTKD: Final = rows.k_LSTKD
        """Keys of the kept rows; the payload of quantised ones."""
        self.are_quantised: Final = bool(rows.scales)
        self._rows = rows
        self._inv_freq_R = inv_freq_R
        self._num_heads, self._dtype = num_heads, dtype

    def new_queries(self, count: int) -> torch.Tensor:
        """Tensor [L, B, H, D] for so many queries of each layer, as `AttentionMetadata.queries_LBHD`."""
        shape = len(self.k_LSTKD), count, self._num_heads, 2 * len(self._inv_freq_R)
        return self._inv_freq_R.new_zeros(shape, dtype=self._dtype)

    def rank(self, ranking: Ranking, queries_LBHD: torch.Tensor) -> None:
        """Add what these queries attend to in all layers. Cost: as Ranking.add, of quantised keys for each layer."""
        if not self.are_quantised:
            ranking.add(queries_LBHD, self.k_LSTKD, None)
        else:
            for q_BHD, k_STKW, scales in zip(queries_LBHD, self.k_LSTKD, self._rows.scales.values(), strict=True):
                ranking.add(q_BHD[None], k_STKW[None], None, scales["k_scale"])

    def turn(self, slot: int, first: int, back_T: torch.Tensor) -> None:
        """Turn the keys of rows [first, first + T) of a slot back by so many positions each. Quantised ones are rounded anew.

        Cost: a few launches; for quantised keys some 30 for each layer.
        """
        moved = slot, slice(first, first + len(back_T))
        keys_LTKD = self.k_LSTKD[:, *moved]
        if self.are_quantised:
            for layer, payload_TKW in zip(self._rows.scales, keys_LTKD, strict=True):
                kind, scale_TK = kind_of(payload_TKW.dtype), self._rows.scales[layer]["k_scale"][moved]
                assert kind is not None, "rows with scales are quantised"
                turned_TKD = reference.turn(dequantise(payload_TKW, scale_TK), back_T, self._inv_freq_R)
                for kept, new in zip((payload_TKW, scale_TK), quantise(turned_TKD, kind), strict=True):
                    kept.copy_(new)
        elif keys_LTKD.is_cuda:
            from vmmkv_kernels.attention.turn import turn

            turn(keys_LTKD, back_T, self._inv_freq_R)
        else:
            for keys_TKD in keys_LTKD:
                keys_TKD.copy_(reference.turn(keys_TKD, back_T, self._inv_freq_R))


class CachedAttention:
    """Attention that a model calls in each of its layers, between `begin` of a step and the next.

    `rope` is the float32 cosines and sines [T, R] that rotate queries and keys; None for a model that rotates them itself.
    `windows` has the layers that attend to their last rows only, with their number: rows before them are unmapped.
    """

    def __init__(
        self, rows: KVRows, *, rope: tuple[torch.Tensor, torch.Tensor] | None = None, windows: Mapping[int, int]
    ) -> None:
        self._rows = rows
        self._rope = rope
        self._windows = windows
        self._step: AttentionMetadata | None = None

    def begin(self, step: AttentionMetadata) -> None:
        """The next calls belong to this step."""
        self._step = step

    def __call__(
        self,
        layer: int,
        q_NHD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        *,
        appends: bool = True,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        norm_eps: float = 0.0,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Norm each head where weights [D] are given, rotate, append to the step's sequences, attend there. Returns [N, H, D].

        appends: False for another layer that attends to the rows of `layer`, which has appended them in this step.
        softcap: scores become softcap * tanh(score / softcap); with one, queries are not ranked.
        q_NHD, k_NKD, v_NKD may be strided, and q_NHD may be changed in place. Queues launches, and waits for nothing.
        """
        step, rows, window, lse_NH = self._step, self._rows, self._windows.get(layer), None
        assert step is not None, "no step has begun"
        rotary = None
        if self._rope is not None:
            q_out_NHD = q_NHD if step.queries_LBHD is None else step.queries_LBHD[layer]
            rotary = RotaryParams(q_NHD, q_out_NHD, *self._rope, q_norm_D=q_norm, k_norm_D=k_norm, norm_eps=norm_eps)
        if rows.on_gpu:
            if appends:
                rows.append(layer, k_NKD, v_NKD, step, rotary)
            q_NHD = q_NHD if rotary is None else rotary.q_out_NHD
            out_NHD = None
            if step.shared is not None and window is None:
                out_NHD = rows.cascade(layer, q_NHD, step, step.shared, scale=scale, softcap=softcap)
            if step.query_starts is not None:
                lse_NH = None if step.ranking is None else q_NHD.new_empty(q_NHD.shape[:2], dtype=torch.float32)
                out_NHD = rows.prefill(
                    layer, q_NHD, step, scale=scale, window=window, softcap=softcap, out_NHD=out_NHD, lse_NH=lse_NH
                )
            elif out_NHD is None:
                out_NHD = rows.decode(layer, q_NHD, step, scale=scale, window=window, softcap=softcap)
        else:
            if rotary is not None:
                q_NHD, k_NKD = norm_and_rotate(rotary, k_NKD, step.rows_N if step.positions_N is None else step.positions_N)
                if step.queries_LBHD is not None:
                    step.queries_LBHD[layer] = q_NHD
            if appends:
                rows.write(layer, k_NKD, v_NKD, step)
            out_NHD = q_NHD.new_empty(q_NHD.shape[0], q_NHD.shape[1], v_NKD.shape[-1])
            starts = range(len(q_NHD) + 1) if step.query_starts is None else step.query_starts.tolist()
            sequences = zip(step.slots_B.tolist(), step.lengths_B.tolist(), itertools.pairwise(starts), strict=True)
            for slot, length, (begin, end) in sequences:
                first = 0 if window is None else max(0, length - (end - begin) + 1 - window)
                k_TKD, v_TKD = rows.read(layer, slot, first, length)
                out_NHD[begin:end] = attend(q_NHD[begin:end].to(k_TKD.dtype), k_TKD, v_TKD, scale, window, softcap)
        if step.ranking is not None:
            assert softcap is None, "scores are ranked as they are"
            k_scale = rows.scales.get(layer, {}).get("k_scale")
            step.ranking.add(q_NHD[None], rows.views[layer][0][None], scale, k_scale, lse_NH)
        return out_NHD


def norm_and_rotate(rotary: RotaryParams, k_NKD: torch.Tensor, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, normed and rotated."""
    q_NHD = rotary.q_NHD
    if rotary.q_norm_D is not None and rotary.k_norm_D is not None:
        q_NHD = rms_norm(q_NHD, rotary.q_norm_D, rotary.norm_eps)
        k_NKD = rms_norm(k_NKD, rotary.k_norm_D, rotary.norm_eps)
    cos_N1R, sin_N1R = (table[positions_N, None].to(q_NHD.dtype) for table in (rotary.cos_TR, rotary.sin_TR))
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


def attend(
    q_NHD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, scale: float | None, window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of one sequence's last tokens to its rows, by torch. The last query sees the last row."""
    num_queries, num_rows = q_NHD.shape[0], k_TKD.shape[0]
    most = max(1, SCORES_BYTES // (4 * q_NHD.shape[1] * num_rows))
    if softcap is not None:  # which torch's own function lacks
        positions_N = torch.arange(num_rows - num_queries, num_rows)
        parts = zip(torch.split(q_NHD, most), torch.split(positions_N, most), strict=True)
        options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        outs = [reference.attend(q_PHD, k_TKD, v_TKD, positions_P, **options) for q_PHD, positions_P in parts]
        return torch.cat(outs).to(q_NHD.dtype)
    mask_NT: torch.Tensor | None = None
    is_causal = num_queries == num_rows > 1
    if num_rows > (window or num_rows) or (num_queries > 1 and not is_causal):
        # Each query sees its own row, and the rows before it that its window reaches.
        offset, is_causal = num_rows - num_queries, False
        mask_NT = torch.ones(num_queries, num_rows, dtype=torch.bool).tril(offset).triu(offset - (window or num_rows) + 1)
    at_once = num_queries if mask_NT is None else most
    k_1KTD, v_1KTD = (tensor.transpose(0, 1)[None] for tensor in (k_TKD, v_TKD))
    outs = [
        F.scaled_dot_product_attention(
            q_NHD[first : first + at_once].transpose(0, 1)[None], k_1KTD, v_1KTD,
            attn_mask=None if mask_NT is None else mask_NT[first : first + at_once],
            is_causal=is_causal, scale=scale, enable_gqa=True,
        )[0].transpose(0, 1)
        for first in range(0, num_queries, at_once)
    ]  # fmt: skip
    return torch.cat(outs) if len(outs) > 1 else outs[0]
