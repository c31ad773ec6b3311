"""What the attention layers of an unmodified transformers model call: append to the slots, attend to them in place.

A step is a batch of runs of tokens, one run for each sequence, side by side in one row of the model's input. The model
computes everything but attention on all of them at once; here each run meets its own sequence's memory.

Legend: N tokens of the step, B sequences, H query heads, K key-value heads, D head dimension, T rows, S slots.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from vmmkv import MIB, KVCache

_SCORES_BYTES: Final = 64 * MIB
"""Of the float32 scores, heads * queries * rows, that are held at once under an arbitrary mask; torch makes some copies."""

NAME: Final = "vmmkv"
"""Of the attention implementation, as `attn_implementation=NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One sequence's tokens in a step: rows [start, start + count) of its slot, computed from input columns [column, ...)."""

    slot: int
    start: int
    count: int
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward pass: the runs, and the same as tensors on the device."""

    runs: tuple[Run, ...]
    slots_N: torch.Tensor
    """int64: the slot of each token."""
    positions_N: torch.Tensor
    """int64: its row there."""
    decode: "DecodeRows | None"
    """The runs of one token, for a kernel that takes them all at once; None where there is no such kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """The runs of one token each, on the device."""

    columns_B: torch.Tensor
    slots_B: torch.Tensor
    """int32"""
    lengths_B: torch.Tensor
    """int32: rows to attend to, the new token's own among them."""


class UnsupportedModel(ValueError):
    """The model's attention does something that this server cannot do."""


class SlotAttention:
    """The attention of one engine: set `step`, then run the model.

    Registered under one name for the whole process, as transformers has it: the last one made is the one in use.
    """

    def __init__(self, cache: KVCache) -> None:
        self.step: Step | None = None
        self._limit = cache.limit
        self._views = {layer: (cache.k(layer), cache.v(layer)) for layer in cache.layout.group_of}
        self._on_gpu = cache.device.type == "cuda"
        self._calls: Counter[int] = Counter()
        AttentionInterface.register(NAME, self.attend)
        AttentionMaskInterface.register(NAME, _no_mask)

    def begin(self, step: Step) -> None:
        """The next forward pass is this step's."""
        self.step = step
        self._calls.clear()

    def check(self) -> None:
        """Did every layer attend here, once, in the last forward pass? Raises UnsupportedModel.

        A layer that attends by itself sees all runs of a step as one sequence; one that attends twice overwrites its rows.
        """
        others = {layer: self._calls[layer] for layer in self._views if self._calls[layer] != 1}
        if others:
            raise UnsupportedModel(
                f"layers {sorted(others)} of this model called the attention function {sorted(set(others.values()))} times "
                f"in a forward pass, not once: this model cannot be served from a KV cache of rows"
            )

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """The signature of transformers: query [1, H, N, D], key and value [1, K, N, D]; gives [1, N, H, D]."""
        refused = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
        if refused or query.shape[0] != 1:
            raise UnsupportedModel(
                f"{type(module).__name__} asks for {', '.join(refused) or 'a padded batch'}, which vmmkv does not do yet"
            )
        step, layer = self.step, module.layer_idx
        assert step is not None and isinstance(layer, int)
        self._calls[layer] += 1
        k_STKD, v_STKD = self._views[layer]
        q_NHD, k_NKD, v_NKD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        self._append(k_NKD, v_NKD, k_STKD, v_STKD, step)
        out_NHD = q_NHD.new_empty(q_NHD.shape[0], q_NHD.shape[1], v_STKD.shape[-1])
        if step.decode is not None:
            from vmmkv.kernels.decode import decode

            rows = step.decode
            out_NHD[rows.columns_B] = decode(
                q_NHD[rows.columns_B], k_STKD, v_STKD, rows.lengths_B, rows.slots_B, scale=scaling, window=sliding_window
            )
        for run in step.runs:
            if run.count > 1 or step.decode is None:
                columns = slice(run.column, run.column + run.count)
                end = run.start + run.count
                first = 0 if sliding_window is None else max(0, run.start + 1 - sliding_window)
                out_NHD[columns] = _attend_run(
                    q_NHD[columns], k_STKD[run.slot, first:end], v_STKD[run.slot, first:end], scaling, sliding_window
                )
        return out_NHD[None], None

    def _append(self, k_NKD: torch.Tensor, v_NKD: torch.Tensor, k_STKD: torch.Tensor, v_STKD: torch.Tensor, step: Step) -> None:
        if self._on_gpu:
            from vmmkv.kernels.append import append

            append(k_NKD, v_NKD, k_STKD, v_STKD, step.slots_N, step.positions_N, self._limit)
        else:
            k_STKD[step.slots_N, step.positions_N] = k_NKD
            v_STKD[step.slots_N, step.positions_N] = v_NKD


def _attend_run(
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


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Instead of transformers' mask: who sees what is known from the runs."""
