"""Attention by other libraries over a cache's views: torch SDPA, FlexAttention, FlashAttention-2 and 3, FlashInfer.

Two forms, which vmmkv's own kernels have as well, and `vmmkv.testing.conformance` tests:

    decode(q_BHD, k_STKD, v_STKD, lengths_B, slots_B)                     one new query for each sequence
    prefill(q_NHD, k_STKD, v_STKD, query_starts, lengths_B, slots_B)      the last queries of each, packed, causal

The views are `cache.k(layer)` and `cache.v(layer)`. `slots_B` are the sequences' slots. `lengths_B` includes the queries' own
rows, which are written before. In `prefill` sequence b has the queries [query_starts[b], query_starts[b + 1]), the last of its
tokens. All three are int32 on the device. The result has the queries' shape and dtype.

| function | guard_tokens of the cache | waits for the device, so that no graph can capture it |
|---|---|---|
| sdpa_*, flex_*, flashinfer_* | 0: each call is given the rows of one sequence | yes: reads lengths and slots |
| flash_2_decode | 0: it loads under a predicate | no |
| flash_2_prefill | 0 | yes: reads the starts |
| flash_3_* | flash_3_guard_tokens(head_dim, dtype): it loads whole tiles by TMA | no |

FlashAttention-3 multiplies the guard's rows by zero, so they must be finite. They are, since vmmkv zeroes pages before first
use, unless a model wrote NaN there before the sequence was truncated.

A library is imported on the first call of its function, and so are the parts of torch that import its compiler. A library that
is not installed raises LibraryMissing.

Legend: B sequences, N queries, S slots, T rows of a slot, H query heads, K kv heads, D head dim.
"""

import functools
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vmmkv.errors import VmmkvError

_INT32_END: Final = 2**31

_FLASH_3_TILES: Final = {
    2: {64: 192, 96: 144, 128: 176, 192: 128, 256: 80},
    1: {64: 160, 96: 128, 128: 224, 192: 160, 256: 128},
}
"""Rows of a KV tile of FlashAttention-3 on Hopper, causal or not, by bytes of an element and the largest head dim that has it:
`tile_size_fwd_sm90` of hopper/tile_size.h in the FlashAttention repository."""


class LibraryMissing(VmmkvError, ImportError):
    """The library that an attention function calls is not installed, or lacks the function."""


def flash_3_guard_tokens(head_dim: int, dtype: torch.dtype) -> int:
    """The `guard_tokens` that a cache needs for FlashAttention-3: a KV tile, since it loads whole tiles.

    176 for bf16 with heads of 128, 224 for fp8. Raises: ValueError for heads or dtypes that it does not have.
    """
    tiles = _FLASH_3_TILES.get(dtype.itemsize, {})
    for largest, tile in tiles.items():
        if 0 < head_dim <= largest:
            return tile
    raise ValueError(
        f"FlashAttention-3 has no kernel for heads of {head_dim} in {dtype}; it has heads of up to 256 in float16, bfloat16 "
        f"and float8_e4m3fn"
    )


# torch


def sdpa_decode(q_BHD: Tensor, k_STKD: Tensor, v_STKD: Tensor, lengths_B: Tensor, slots_B: Tensor) -> Tensor:
    """torch SDPA, a call for each sequence."""
    return sdpa_prefill(q_BHD, k_STKD, v_STKD, _singles(q_BHD), lengths_B, slots_B)


def sdpa_decode_grouped(q_BHD: Tensor, k_STKD: Tensor, v_STKD: Tensor, lengths_B: Tensor, slots_B: Tensor) -> Tensor:
    """torch SDPA, a call for each run of sequences of one length whose slots adjoin: their views are one strided tensor.

    `cache.open_batch` gives such slots. Cost: as `sdpa_decode`, and the queries of a group are gathered.
    """
    out_BHD = torch.empty_like(q_BHD)
    for length, first, members in _runs(lengths_B.tolist(), slots_B.tolist()):
        rows = slice(first, first + len(members)), slice(length)
        out_BHD[members] = _sdpa(q_BHD[members, None], k_STKD[rows], v_STKD[rows])[:, 0]
    return out_BHD


def sdpa_prefill(
    q_NHD: Tensor, k_STKD: Tensor, v_STKD: Tensor, query_starts: Tensor, lengths_B: Tensor, slots_B: Tensor
) -> Tensor:
    """torch SDPA, a call for each sequence."""

    def attend(q_1NHD: Tensor, k_1TKD: Tensor, v_1TKD: Tensor) -> Tensor:
        count, length = q_1NHD.shape[1], k_1TKD.shape[1]
        if count == 1:
            return _sdpa(q_1NHD, k_1TKD, v_1TKD)
        from torch.nn.attention.bias import causal_lower_right

        return _sdpa(q_1NHD, k_1TKD, v_1TKD, causal_lower_right(count, length))

    return _by_sequence(attend, q_NHD, k_STKD, v_STKD, query_starts, lengths_B, slots_B)


def flex_decode(q_BHD: Tensor, k_STKD: Tensor, v_STKD: Tensor, lengths_B: Tensor, slots_B: Tensor) -> Tensor:
    """torch FlexAttention, a call for each sequence; else as `flex_prefill`."""
    return flex_prefill(q_BHD, k_STKD, v_STKD, _singles(q_BHD), lengths_B, slots_B)


def flex_prefill(
    q_NHD: Tensor, k_STKD: Tensor, v_STKD: Tensor, query_starts: Tensor, lengths_B: Tensor, slots_B: Tensor
) -> Tensor:
    """torch FlexAttention, a call for each sequence; compiled when it is first called on a GPU.

    One call for the whole batch, by a block mask over the flattened slots, would load whole blocks of rows past each length.

    Raises: ValueError on a GPU for rows 2**31 elements and more behind a sequence's first. There torch's kernel for few queries
    does not compile, and the other one touches memory that is not the sequence's (torch 2.11).
    """
    from torch.nn.attention.flex_attention import create_block_mask

    device = q_NHD.device
    flex = _flex(device.type)

    def attend(q_1NHD: Tensor, k_1TKD: Tensor, v_1TKD: Tensor) -> Tensor:
        count, length = q_1NHD.shape[1], k_1TKD.shape[1]
        if device.type == "cuda" and length * (stride := max(k_1TKD.stride(1), v_1TKD.stride(1))) >= _INT32_END:
            raise ValueError(
                f"{length} rows {stride} elements apart reach past 2**31 elements, where torch's flex_attention is wrong on a "
                f"GPU; sdpa_decode and sdpa_prefill take them, and so do vmmkv's own kernels"
            )
        mask = None
        if count > 1:
            before = torch.tensor(length - count, device=device)  # a tensor, so that another number is no other kernel
            mask = create_block_mask(
                lambda batch, head, i_query, i_row: i_row <= i_query + before, None, None, count, length, device=device
            )
        qkv = (each.transpose(1, 2) for each in (q_1NHD, k_1TKD, v_1TKD))
        return flex(*qkv, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return _by_sequence(attend, q_NHD, k_STKD, v_STKD, query_starts, lengths_B, slots_B)


# FlashAttention


def flash_2_decode(
    q_BHD: Tensor, k_STKD: Tensor, v_STKD: Tensor, lengths_B: Tensor, slots_B: Tensor, *, max_length: int | None = None
) -> Tensor:
    """FlashAttention-2's `flash_attn_with_kvcache`, with slots as `cache_batch_idx`.

    `max_length`: no sequence is longer. The kernel splits its work by this bound, the whole slot by default. Safe under graph
    capture, if `max_length` stays true.
    """
    views = k_STKD[:, :max_length], v_STKD[:, :max_length]
    return _flash_in_slots("flash_attn", q_BHD[:, None], *views, lengths_B, slots_B)[:, 0]


def flash_2_prefill(
    q_NHD: Tensor, k_STKD: Tensor, v_STKD: Tensor, query_starts: Tensor, lengths_B: Tensor, slots_B: Tensor
) -> Tensor:
    """FlashAttention-2, a call for each sequence: its variable-length function takes no lengths apart from sequence starts."""
    out_NHD = torch.zeros_like(q_NHD)
    for b, (start, end) in enumerate(itertools.pairwise(query_starts.tolist())):
        if end > start:
            where = lengths_B[b : b + 1], slots_B[b : b + 1]
            out_NHD[start:end] = _flash_in_slots("flash_attn", q_NHD[None, start:end], k_STKD, v_STKD, *where)[0]
    return out_NHD


def flash_3_decode(
    q_BHD: Tensor, k_STKD: Tensor, v_STKD: Tensor, lengths_B: Tensor, slots_B: Tensor, *, max_length: int | None = None
) -> Tensor:
    """FlashAttention-3's `flash_attn_with_kvcache`, with slots as `cache_batch_idx`; else as `flash_2_decode`."""
    views = k_STKD[:, :max_length], v_STKD[:, :max_length]
    return _flash_in_slots("flash_attn_interface", q_BHD[:, None], *views, lengths_B, slots_B)[:, 0]


def flash_3_prefill(
    q_NHD: Tensor, k_STKD: Tensor, v_STKD: Tensor, query_starts: Tensor, lengths_B: Tensor, slots_B: Tensor
) -> Tensor:
    """FlashAttention-3's `flash_attn_with_kvcache`, with slots as `cache_batch_idx` and packed queries."""
    packed = {"cu_seqlens_q": query_starts, "max_seqlen_q": len(q_NHD)}
    return _flash_in_slots("flash_attn_interface", q_NHD, k_STKD, v_STKD, lengths_B, slots_B, **packed)


def _flash_in_slots(
    module: str, q: Tensor, k_STKD: Tensor, v_STKD: Tensor, lengths_B: Tensor, slots_B: Tensor, **packed: Any
) -> Tensor:
    attend = _library(module, "flash_attn_with_kvcache")
    out: Tensor = attend(q, k_STKD, v_STKD, cache_seqlens=lengths_B, cache_batch_idx=slots_B, causal=True, **packed)
    return out


def flash_3_varlen(
    q_NHD: Tensor, k_STKD: Tensor, v_STKD: Tensor, query_starts: Tensor, lengths_B: Tensor, slots_B: Tensor
) -> Tensor:
    """FlashAttention-3's `flash_attn_varlen_func` over the flattened slots: a sequence begins at row `slot * T`.

    Cost: a few small launches more. Raises: ValueError for views that are not of whole slots, or of 2**31 rows.
    """
    attend = _library("flash_attn_interface", "flash_attn_varlen_func")
    num_slots, slot_tokens = k_STKD.shape[:2]
    if num_slots * slot_tokens >= _INT32_END:
        raise ValueError(
            f"{num_slots} slots of {slot_tokens} rows are {num_slots * slot_tokens} rows, and starts are int32; "
            f"flash_3_prefill takes slots by number"
        )
    if any(view.stride(0) != slot_tokens * view.stride(1) for view in (k_STKD, v_STKD)):
        raise ValueError("the views are to be of whole slots, as cache.k(layer) gives them: cut, they cannot be flattened")
    # A sequence ends by its length alone; the last entry belongs to none.
    starts = torch.nn.functional.pad(slots_B * slot_tokens, (0, 1))
    rows = k_STKD.flatten(0, 1), v_STKD.flatten(0, 1)
    out_NHD: Tensor = attend(q_NHD, *rows, query_starts, starts, len(q_NHD), slot_tokens, seqused_k=lengths_B, causal=True)
    return out_NHD


# FlashInfer


def flashinfer_decode(q_BHD: Tensor, k_STKD: Tensor, v_STKD: Tensor, lengths_B: Tensor, slots_B: Tensor) -> Tensor:
    """FlashInfer, a call for each sequence: its batched functions want a table of blocks. Else as `flashinfer_prefill`."""
    return flashinfer_prefill(q_BHD, k_STKD, v_STKD, _singles(q_BHD), lengths_B, slots_B)


def flashinfer_prefill(
    q_NHD: Tensor, k_STKD: Tensor, v_STKD: Tensor, query_starts: Tensor, lengths_B: Tensor, slots_B: Tensor
) -> Tensor:
    """FlashInfer's `single_prefill_with_kv_cache`, a call for each sequence; it takes K and V strided, its decode does not."""
    single_prefill = _library("flashinfer", "single_prefill_with_kv_cache")

    def attend(*qkv: Tensor) -> Any:
        return single_prefill(*(each[0] for each in qkv), causal=True, kv_layout="NHD", backend="fa2")[None]

    return _by_sequence(attend, q_NHD, k_STKD, v_STKD, query_starts, lengths_B, slots_B)


# within


def _library(module: str, function: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        remedy = "install" if isinstance(error, ImportError) else "update"
        package = {"flash_attn_interface": "FlashAttention-3 (the folder hopper/ of its repository)"}.get(module, module)
        raise LibraryMissing(
            f"{module}.{function} cannot be had ({error}): {remedy} {package}, or use sdpa_decode and sdpa_prefill, which need "
            f"torch alone"
        ) from error
    return found


def _sdpa(q_BNHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, bias: Tensor | None = None) -> Tensor:
    q_BHND, k_BKTD, v_BKTD = (tensor.transpose(1, 2) for tensor in (q_BNHD, k_BTKD, v_BTKD))
    return scaled_dot_product_attention(q_BHND, k_BKTD, v_BKTD, attn_mask=bias, enable_gqa=True).transpose(1, 2)


@functools.cache
def _flex(device_type: str) -> Callable[..., Tensor]:
    """FlexAttention, compiled on a GPU alone; on a CPU it runs, and is tested, without a compiler."""
    from torch.nn.attention.flex_attention import flex_attention

    attend: Callable[..., Tensor] = flex_attention
    if device_type == "cpu":
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # which a CPU has no need of
        return attend
    return torch.compile(attend, dynamic=True)


def _singles(q_BHD: Tensor) -> Tensor:
    """The `query_starts` of one query for each sequence, on the host."""
    return torch.arange(len(q_BHD) + 1)


def _by_sequence(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q_NHD: Tensor,
    k_STKD: Tensor,
    v_STKD: Tensor,
    query_starts: Tensor,
    lengths_B: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """`attend` called for each sequence that has any query, with its queries [1, N, H, D] and its rows [1, T, K, D]."""
    out_NHD = torch.zeros_like(q_NHD)
    spans = itertools.pairwise(query_starts.tolist())
    for (start, end), length, slot in zip(spans, lengths_B.tolist(), slots_B.tolist(), strict=True):
        if end > start:
            rows = slice(slot, slot + 1), slice(length)
            out_NHD[start:end] = attend(q_NHD[None, start:end], k_STKD[rows], v_STKD[rows])[0]
    return out_NHD


def _runs(lengths: list[int], slots: list[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Length, first slot and members, in the order of their slots, of each run of adjoining slots with one length."""
    in_order = enumerate(sorted(zip(lengths, slots, range(len(slots)), strict=True)))
    for (length, _), run in itertools.groupby(in_order, key=lambda item: (item[1][0], item[1][1] - item[0])):
        members = [member for _, member in run]
        yield length, members[0][1], [b for *_, b in members]
