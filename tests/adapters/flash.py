"""The packages of FlashAttention 2, 3 and 4 as transformers calls them, for machines that have none of them.

A stand-in has the names and the signatures of the real functions (flash_attn/flash_attn_interface.py of 2.7,
hopper/flash_attn_interface.py, flash_attn/cute/interface.py), and asks for what they ask for. What it computes is a kernel's to
say: `in_torch` is what they document, in float32; `aten_flash_2` is torch's own build of FlashAttention-2's kernels, on a GPU.

Legend: B sequences, T queries of each, S rows of each, N queries and M rows of all, H query heads, K kv heads, D head dim.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import modeling_flash_attention_utils as flash_utils

VERSIONS = (2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a call weighs what it sees."""

    scale: float | None
    causal: bool
    window: tuple[int | None, int | None]
    """Rows before and behind a query's own that it sees; None or -1: all."""
    softcap: float
    sink_H: torch.Tensor | None = None


@dataclass(frozen=True)
class Bounds:
    """Where each sequence begins and ends in a flattened batch, as int32 on the device, and the longest of them."""

    of_queries: torch.Tensor
    of_rows: torch.Tensor
    most_queries: int
    most_rows: int


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Scoring, Bounds | None], torch.Tensor]
"""From q, k, v to what is attended to: [B, T, H, D] over [B, S, K, D]; with bounds [N, H, D] over [M, K, D]."""


def in_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, bounds: Bounds | None) -> torch.Tensor:
    """What the packages document: causal and window are aligned at the last query and the last row."""
    if bounds is None:
        return torch.stack([_one(*each, scoring) for each in zip(q, k, v, strict=True)]).to(q.dtype)
    lengths = [starts.diff().tolist() for starts in (bounds.of_queries, bounds.of_rows, bounds.of_rows)]
    parts = (states.split(each) for states, each in zip((q, k, v), lengths, strict=True))
    return torch.cat([_one(*each, scoring) for each in zip(*parts, strict=True)]).to(q.dtype)


def _one(q_THD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    (num_queries, heads, dim), (num_rows, kv_heads, _) = q_THD.shape, k_SKD.shape
    k_SHD, v_SHD = (each.float().repeat_interleave(heads // kv_heads, dim=1) for each in (k_SKD, v_SKD))
    scores_HTS = torch.einsum("thd,shd->hts", q_THD.float(), k_SHD) * (scoring.scale or dim**-0.5)
    if scoring.softcap:
        scores_HTS = scoring.softcap * torch.tanh(scores_HTS / scoring.softcap)
    left, right = (num_rows if each is None or each < 0 else each for each in scoring.window)
    own_T1 = torch.arange(num_rows - num_queries, num_rows, device=q_THD.device)[:, None]
    row_S = torch.arange(num_rows, device=q_THD.device)
    seen_TS = (row_S >= own_T1 - left) & (row_S <= own_T1 + (0 if scoring.causal else right))
    scores_HTS = scores_HTS.masked_fill(~seen_TS, -torch.inf)
    if scoring.sink_H is not None:
        sinks_HT1 = scoring.sink_H.float()[:, None, None].expand(-1, num_queries, 1)
        scores_HTS = torch.cat([scores_HTS, sinks_HT1], dim=2)
    weights_HTS = scores_HTS.softmax(dim=2)[:, :, :num_rows].nan_to_num(0.0)  # a query that sees nothing gives zeros
    return torch.einsum("hts,shd->thd", weights_HTS, v_SHD)


def aten_flash_2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, bounds: Bounds | None) -> torch.Tensor:
    """The kernels of FlashAttention-2 that torch was built with: half precision, on a GPU."""
    assert not scoring.softcap and scoring.sink_H is None, "torch's build has neither"
    lengths: tuple[Any, ...] = (None, None, q.shape[1], k.shape[1])
    if bounds is not None:
        lengths = (bounds.of_queries, bounds.of_rows, bounds.most_queries, bounds.most_rows)
    left, right = (None if each is None or each < 0 else each for each in scoring.window)
    options = {"scale": scoring.scale, "window_size_left": left, "window_size_right": right}
    out, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, scoring.causal, False, **options)
    return out


class Flash(ModuleType):
    """A package; `calls` has the name of each function that was called, and where the storage of its k begins."""

    def __init__(self, name: str, kernel: Kernel) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.calls: list[tuple[str, int]] = []
        self._kernel = kernel

    def _attend(
        self, name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, bounds: Any
    ) -> torch.Tensor:
        self.calls.append((name, k.untyped_storage().data_ptr()))
        num_dims = 4 if bounds is None else 3
        assert q.dim() == k.dim() == v.dim() == num_dims and k.shape == v.shape and q.shape[-1] == k.shape[-1]
        assert q.dtype == k.dtype == v.dtype and q.shape[-2] % k.shape[-2] == 0
        for each in (q, k, v):
            assert each.stride(-1) == 1, "elements of a head adjoin"
            strides = [stride * each.itemsize for stride, size in zip(each.stride(), each.shape, strict=True) if size > 1]
            assert not any(stride % 16 for stride in strides[:-1]), "the tensor memory accelerator takes strides of 16 bytes"
        if bounds is None:
            assert q.shape[0] == k.shape[0]
            return self._kernel(q, k, v, scoring, None)
        bounds = Bounds(*bounds)
        for starts, states, most in ((bounds.of_queries, q, bounds.most_queries), (bounds.of_rows, k, bounds.most_rows)):
            assert starts.dtype == torch.int32 and starts.is_contiguous() and type(most) is int
            assert starts[0] == 0 and starts[-1] == len(states) and starts.diff().max() <= most
        assert len(bounds.of_queries) == len(bounds.of_rows)
        return self._kernel(q, k, v, scoring, bounds)


class Flash2(Flash):
    def flash_attn_func(
        self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        assert not (dropout_p or alibi_slopes or return_attn_probs)
        scoring = Scoring(scale=softmax_scale, causal=causal, window=window_size, softcap=softcap)
        return self._attend("flash_attn_func", q, k, v, scoring, None)

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        assert not (dropout_p or alibi_slopes or return_attn_probs) and block_table is None
        scoring = Scoring(scale=softmax_scale, causal=causal, window=window_size, softcap=softcap)
        bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return self._attend("flash_attn_varlen_func", q, k, v, scoring, bounds)

    def flash_attn_with_kvcache(self, *_, **__):
        raise AssertionError("transformers calls it for its own paged cache alone")


class Flash3(Flash):
    def flash_attn_func(
        self, q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
        return_attn_probs=False,
    ):  # fmt: skip
        assert qv is q_descale is k_descale is v_descale is None and not (attention_chunk or return_attn_probs)
        scoring = Scoring(scale=softmax_scale, causal=causal, window=window_size, softcap=softcap)
        return self._attend("flash_attn_func", q, k, v, scoring, None)

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
        attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        assert seqused_q is seqused_k is qv is q_descale is k_descale is v_descale is None
        assert not (attention_chunk or return_attn_probs)
        scoring = Scoring(scale=softmax_scale, causal=causal, window=window_size, softcap=softcap)
        bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return self._attend("flash_attn_varlen_func", q, k, v, scoring, bounds)

    flash_attn_with_kvcache = Flash2.flash_attn_with_kvcache


class Flash4(Flash):
    """Gives a pair: the second is the log of the sums, or None."""

    def flash_attn_func(
        self, q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
        num_splits=1, pack_gqa=None, deterministic=False, mask_mod=None, return_lse=False,
    ):  # fmt: skip
        assert mask_mod is None and not return_lse
        scoring = Scoring(scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, sink_H=learnable_sink)
        return self._attend("flash_attn_func", q, k, v, scoring, None), None

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None,
        seqused_k=None, page_table=None, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None,
        softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, aux_tensors=None, return_lse=False,
    ):  # fmt: skip
        assert seqused_q is seqused_k is page_table is score_mod is aux_tensors is None and not return_lse
        scoring = Scoring(scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, sink_H=learnable_sink)
        bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return self._attend("flash_attn_varlen_func", q, k, v, scoring, bounds), None


class BertPadding(ModuleType):
    """flash_attn.bert_padding, which comes with FlashAttention-2 alone."""

    @staticmethod
    def unpad_input(hidden_states, attention_mask, unused_mask=None):
        assert unused_mask is None
        lengths_B = attention_mask.sum(dim=1, dtype=torch.int32)
        indices_N = attention_mask.flatten().nonzero().flatten()
        starts = torch.cat([lengths_B.new_zeros(1), lengths_B.cumsum(0, dtype=torch.int32)])
        return hidden_states.flatten(0, 1)[indices_N], indices_N, starts, int(lengths_B.max()), lengths_B

    @staticmethod
    def pad_input(hidden_states, indices, batch, seqlen):
        out = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
        out[indices] = hidden_states
        return out.unflatten(0, (batch, seqlen))


def install(monkeypatch: pytest.MonkeyPatch, version: int, kernel: Kernel = in_torch) -> Flash:
    """Have a stand-in for this version in the place of its package, until `monkeypatch` undoes it.

    In transformers nothing is replaced but its answers to whether the package is there and on which devices it runs.
    """
    if version == 2:
        package: Flash = Flash2("flash_attn", kernel)
        modules = {"flash_attn": package, "flash_attn.bert_padding": BertPadding("flash_attn.bert_padding")}
        monkeypatch.setattr(flash_utils, "is_flash_attn_2_available", lambda: True)
    elif version == 3:
        package = Flash3("flash_attn_interface", kernel)
        modules = {"flash_attn_interface": package}
    else:
        package = Flash4("flash_attn.cute", kernel)
        modules = {"flash_attn": ModuleType("flash_attn"), "flash_attn.cute": package}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    facts = flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[version]
    monkeypatch.setitem(facts, "general_availability_check", lambda: True)
    monkeypatch.setitem(facts, "supported_devices", ((lambda: True, "cpu"),))
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)  # it keeps the functions that it imported last
    return package
