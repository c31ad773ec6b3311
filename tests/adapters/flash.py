"""Stand-ins for packages that run on a GPU alone: FlashAttention 2, 3 and 4, and FlashInfer.

A stand-in has the signatures of the real functions, as declared in flash_attn/flash_attn_interface.py of 2.7,
hopper/flash_attn_interface.py, flash_attn/cute/interface.py and flashinfer/prefill.py of 0.2, and asks for what they ask for.
What it computes is a kernel's to say: `in_torch` is what they document; `aten_flash_2` is torch's own build of
FlashAttention-2's kernels, on a GPU.
"""

import inspect
import itertools
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import modeling_flash_attention_utils as flash_utils

from vmmkv_kernels import reference

SIGNATURES = {
    "flash_attn": {
        "flash_attn_func": (
            "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
            "deterministic=False, return_attn_probs=False"
        ),
        "flash_attn_varlen_func": (
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, "
            "causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
            "return_attn_probs=False, block_table=None"
        ),
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
            "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
            "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
            "return_softmax_lse=False"
        ),
    },
    "flash_attn_interface": {
        "flash_attn_func": (
            "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
            "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
            "sm_margin=0, return_attn_probs=False"
        ),
        "flash_attn_varlen_func": (
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, "
            "softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
            "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
            "sm_margin=0, return_attn_probs=False"
        ),
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
            "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
            "max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, "
            "causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
            "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False"
        ),
    },
    "flash_attn.cute": {
        "flash_attn_func": (
            "q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, "
            "num_splits=1, pack_gqa=None, deterministic=False, mask_mod=None, return_lse=False"
        ),
        "flash_attn_varlen_func": (
            "q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, "
            "seqused_k=None, page_table=None, softmax_scale=None, causal=False, window_size=(None, None), "
            "learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, "
            "aux_tensors=None, return_lse=False"
        ),
    },
    "flashinfer": {
        "single_prefill_with_kv_cache": (
            "q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None, "
            "causal=False, kv_layout='NHD', pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, "
            "window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None, backend='auto', return_lse=False"
        ),
    },
}
"""The parameters of each function of each package."""

VERSIONS = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}

SCORING = ("softmax_scale", "causal", "window_size", "softcap")
BOUNDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")

Arguments = dict[str, Any]
Kernel = Callable[[Arguments], torch.Tensor]


class Package(ModuleType):
    """A package without code; `calls` has the name and the arguments of each call."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, name: str, kernel: Kernel, check: Callable[[inspect.BoundArguments], None]
    ) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.calls: list[tuple[str, Arguments]] = []
        self._kernel, self._check = kernel, check
        for function, parameters in SIGNATURES[name].items():
            setattr(self, function, self._function(function, inspect.signature(eval(f"lambda {parameters}: None"))))
        monkeypatch.setitem(sys.modules, name, self)

    def _function(self, name: str, signature: inspect.Signature) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            self._check(bound)
            bound.apply_defaults()
            self.calls.append((name, bound.arguments))
            out = self._kernel(bound.arguments)
            return (out, None) if self.__name__ == VERSIONS[4] else out  # the second is the log of the sums, or None

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call


def by_sequence(q_NHD: torch.Tensor, starts: list[int], rows: Any, **scoring: Any) -> torch.Tensor:
    """Causal attention of packed queries, the last tokens of each sequence, over its K and V, as all packages document it."""
    outs = [
        reference.attend(q_NHD[start:end], k_TKD, v_TKD, torch.arange(len(k_TKD) - (end - start), len(k_TKD)), **scoring)
        for (start, end), (k_TKD, v_TKD) in zip(itertools.pairwise(starts), rows, strict=True)
    ]
    return torch.cat(outs).to(q_NHD.dtype)


def in_torch(given: Arguments) -> torch.Tensor:
    """What `flash_attn_func` and `flash_attn_varlen_func` document, for causal attention."""
    q, k, v = given["q"], given["k"], given["v"]
    left = given["window_size"][0]
    window = None if left in (None, -1) else left + 1
    scoring = {"scale": given["softmax_scale"], "window": window, "softcap": given["softcap"] or None}
    if given.get("cu_seqlens_q") is None:
        num_queries = q.shape[1]
        assert given["causal"] or num_queries == 1
        starts = list(range(0, len(q) * num_queries + 1, num_queries))
        return by_sequence(q.flatten(0, 1), starts, zip(k, v, strict=True), **scoring).view(q.shape)
    lengths = given["cu_seqlens_k"].diff().tolist()
    rows = zip(torch.split(k, lengths), torch.split(v, lengths), strict=True)
    return by_sequence(q, given["cu_seqlens_q"].tolist(), rows, **scoring)


def aten_flash_2(given: Arguments) -> torch.Tensor:
    """The kernels of FlashAttention-2 that torch was built with: half precision, on a GPU."""
    assert not given["softcap"], "torch's build has none"
    q, k, v = given["q"], given["k"], given["v"]
    lengths: tuple[Any, ...] = (None, None, q.shape[1], k.shape[1])
    if given.get("cu_seqlens_q") is not None:
        lengths = tuple(given[name] for name in BOUNDS)
    left, right = (None if each is None or each < 0 else each for each in given["window_size"])
    options = {"scale": given["softmax_scale"], "window_size_left": left, "window_size_right": right}
    out, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, given["causal"], False, **options)
    return out


def _check(bound: inspect.BoundArguments) -> None:
    """Has a call by transformers what the packages ask for?"""
    given = bound.arguments
    assert "k_cache" not in given, "transformers calls it for its own paged cache alone"
    for name in given.keys() - {"q", "k", "v", *SCORING, *BOUNDS}:
        assert given[name] == bound.signature.parameters[name].default, f"{name} is {given[name]}"
    q, k, v = given["q"], given["k"], given["v"]
    is_packed = "cu_seqlens_q" in given
    assert q.dim() == k.dim() == v.dim() == (3 if is_packed else 4) and k.shape == v.shape and q.shape[-1] == k.shape[-1]
    assert q.dtype == k.dtype == v.dtype and q.shape[-2] % k.shape[-2] == 0 and (is_packed or len(q) == len(k))
    for each in (q, k, v):
        assert each.stride(-1) == 1, "elements of a head adjoin"
        strides = [stride * each.itemsize for stride, size in zip(each.stride(), each.shape, strict=True) if size > 1]
        assert not any(stride % 16 for stride in strides[:-1]), "the tensor memory accelerator takes strides of 16 bytes"
    if is_packed:
        for states, name in ((q, "q"), (k, "k")):
            starts, most = given[f"cu_seqlens_{name}"], given[f"max_seqlen_{name}"]
            assert starts.dtype == torch.int32 and starts.is_contiguous() and type(most) is int
            assert starts[0] == 0 and starts[-1] == len(states) and starts.diff().max() <= most
        assert len(given["cu_seqlens_q"]) == len(given["cu_seqlens_k"])


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


def install(monkeypatch: pytest.MonkeyPatch, version: int, kernel: Kernel = in_torch) -> Package:
    """Have a stand-in for this version in the place of its package, until `monkeypatch` undoes it.

    In transformers nothing is replaced but its answers to whether the package is there and on which devices it runs.
    """
    package = Package(monkeypatch, VERSIONS[version], kernel, _check)
    if version == 2:
        monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", BertPadding("flash_attn.bert_padding"))
        monkeypatch.setattr(flash_utils, "is_flash_attn_2_available", lambda: True)
    elif version == 4:
        monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    facts = flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[version]
    monkeypatch.setitem(facts, "general_availability_check", lambda: True)
    monkeypatch.setitem(facts, "supported_devices", ((lambda: True, "cpu"),))
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)  # it keeps the functions that it imported last
    return package
