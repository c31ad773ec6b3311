"""vmmkv's kernels as an attention implementation of transformers, by the name "vmmkv": importing this module registers it.

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="vmmkv")       or
    model.set_attn_implementation("vmmkv")

It attends over the keys and values of any cache, in place. Causal attention, with or without a sliding window, goes to vmmkv's
kernels. The rest goes to transformers' own "sdpa", with the mask that it takes:

    masks           padding within the batch; patterns that are neither causal nor a sliding window
    training        gradients, dropout
    shapes, types   heads over 256, or no multiple of 16 bytes; keys wider than values; more than 64 query heads to a kv head;
                    other types than float32, float16 and bfloat16
    places          a CPU, but for Triton's interpreter

sdpa has no attention sinks: gpt-oss and others attend by their own eager function. `declined` counts all such calls by reason.
The first call for a reason warns with DeclinedWarning: `warnings.simplefilter("error", DeclinedWarning)` makes it an error.
Calls that sdpa cannot do either are refused: soft caps under a mask, sinks of other models, and tokens that a model chooses by
an index (DeepSeek-V3.2). Such a model makes the masks for its choice for "eager" and "sdpa" alone.

Once a pass and kind of mask, the mask function checks for padding, as transformers' own does. On a GPU it waits for the device,
unless there is no attention_mask.

Legend: B sequences, N queries of each, T tokens, H query heads, K kv heads, D head dim.
"""

import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from vmmkv.adapters.transformers import registry
from vmmkv.model_config import WITH_SINKS
from vmmkv.unmodified import INERT_ARGUMENTS

__all__ = ["NAME", "DeclinedWarning", "attention", "declined", "mask"]

NAME: Final = "vmmkv"

WINDOW: Final = "_vmmkv_window"
"""Attribute of a mask that is a sliding window and nothing else: the window. A changed mask is a tensor without it."""

PLACE: Final = "_vmmkv_place"
"""Attribute of keys that a cache with a policy gives: the cache's number, and the layer."""

declined: Final[Counter[str]] = Counter()
"""Calls of one layer that went to transformers' own functions, by the reason."""


class DeclinedWarning(UserWarning):
    """A layer's attention went to one of transformers' own functions, since vmmkv's kernels lack what it needs."""


# what a model calls


class Scoring(NamedTuple):
    """Options by which scores are made of queries and keys. Layers of a pass differ in these and in shapes alone."""

    scale: float | None
    window: int | None
    softcap: float | None


CHOOSING_ARGUMENTS: Final = ("indices", "block_indices")
"""Arguments that choose the tokens, or blocks of them, that each query sees. sdpa would ignore them."""

_EVERYTHING: Final = 0
"""The window of a causal mask without one."""


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, which the model calls: queries [B, H, N, D] over keys and values [B, K, T, D], to [B, N, H, D].

    With None for a mask each query sees its own token and what is before it, but for what the layer's window has passed: the
    queries are the last tokens. `mask` below says when there is one. Raises: NotImplementedError.
    """
    if chosen := [name for name in CHOOSING_ARGUMENTS if kwargs.get(name) is not None]:
        raise NotImplementedError(
            f"this model chooses tokens by itself ({', '.join(chosen)} given to attention), and vmmkv's kernels know nothing "
            f'of it: model.set_attn_implementation("sdpa"), for which it makes masks of them'
        )
    options: dict[str, Any] = {"dropout": dropout, "scaling": scaling}
    if s_aux is not None or sinks is not None:
        # By either name: gpt-oss and most others have the one, Inkling-2 the other.
        options |= {"sinks": sinks} if s_aux is None else {"s_aux": s_aux}
        out = _attend_with_sinks(module, query, key, value, attention_mask, sliding_window, **kwargs, **options)
        _decline("attention sinks", softcap, goes_to="eager attention")
        return out, None
    pending = key if isinstance(key, PendingRows) else None
    keys = key if pending is None else pending.k_BKND
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = causal and query.shape[2] <= keys.shape[2]
    others = [name for name, given in kwargs.items() if given is not None and name not in INERT_ARGUMENTS]
    needs_gradients = torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or value.requires_grad)
    reason = _first_of(
        (dropout > 0.0, "dropout"),
        (needs_gradients, "gradients"),
        (others, f"{', '.join(sorted(others))} given to attention"),
        (query.shape[2] > 1 and not causal and attention_mask is None, "attention that is not causal"),
    )
    if pending is not None:
        pending.check(getattr(module, "layer_idx", pending.layer), reason)
        rows = pending.k_BKND, pending.v_BKND, attention_mask, pending.cache, pending.layer, pending.num_past
        return torch.ops.vmmkv.append_attend(query, *rows, scaling, sliding_window, softcap), None
    if (place := getattr(key, PLACE, None)) is not None:
        number, layer = place
        scoring = Scoring(scaling, sliding_window, softcap)
        return _attend_observed(number, layer, reason, query, key, value, attention_mask, scoring), None
    if reason is None:
        attend_here = torch.ops.vmmkv.attend if torch.compiler.is_compiling() else attend_causally
        return attend_here(query, key, value, attention_mask, scaling, sliding_window, softcap), None
    _decline(reason, softcap)
    if causal and attention_mask is None:
        attention_mask = _mask_for_sdpa(query, key, sliding_window)
    return _by_sdpa(query, key, value, attention_mask, is_causal=causal, **kwargs, **options), None


def _first_of(*reasons: tuple[Any, str]) -> str | None:
    """The sentence of the first reason to decline a call that holds; None if none does."""
    for holds, sentence in reasons:  # a loop, which torch.compile unrolls
        if holds:
            return sentence
    return None


def _attend_observed(
    number: int,
    layer: int,
    reason: str | None,
    q_BHND: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
) -> Tensor:
    """Attention over the keys of the PolicyCache of this number, [B, N, H, D]. Raises: NotImplementedError."""
    if reason is not None:
        raise NotImplementedError(
            f"{reason}: a PolicyCache needs attention by vmmkv, to see the queries. Call the model without it, or take a "
            f"VmmCache"
        )
    cache = registry.cache(number)
    q_BHND = cache.turned(layer, q_BHND)
    out_BNHD = attend_causally(q_BHND, k_BKTD, v_BKTD, mask, *scoring)
    is_plain = mask is None or hasattr(mask, WINDOW)
    cache.attended(layer, q_BHND, k_BKTD, scoring.scale, scoring.softcap, is_plain=is_plain)
    return out_BNHD


def mask(*, allow_is_causal_skip: bool = True, **given: Any) -> Tensor | None:
    """The mask that `attention` needs, or None. The model calls this once a pass for each kind of mask.

    None for causal masks without padding, if the queries are the last tokens and no window cuts a key off. A mask of a window
    alone carries the window as an attribute, so that the kernels need not read its numbers.
    """
    window = _plain_window(**given) if allow_is_causal_skip else None
    if window is not None and (window == _EVERYTHING or window >= given["kv_length"]):
        return None
    made: Tensor | None = sdpa_mask(**given, allow_is_causal_skip=False)
    if window is not None and made is not None and not torch.compiler.is_compiling():
        setattr(made, WINDOW, window)
    return made


def _plain_window(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> int | None:
    """Window of a causal mask for the last tokens without padding; None for any other mask.

    `_EVERYTHING` if there is no window.
    """
    in_graph = torch.compiler.is_compiling()
    window = _window_in_graph(mask_function, local_size, config) if in_graph else _window_of(mask_function)
    # Some caches have a tensor: on a GPU it would be waited for, and in a graph it cannot be read.
    is_known = not isinstance(q_offset, Tensor) or (q_offset.device.type == "cpu" and not in_graph)
    are_last = is_known and bool(q_offset + q_length == kv_offset + kv_length)
    if window is None or not are_last:
        return None
    if attention_mask is not None:
        if in_graph:
            return None  # it cannot be looked at, and counts as padded
        columns = attention_mask[:, kv_offset : kv_offset + kv_length]
        if columns.shape[1] < kv_length or not bool(columns.all()):
            return None
    return window


_BOTH_CODE: Final[CodeType] = sliding_window_causal_mask_function(1).__code__
_WINDOW_CODE: Final[CodeType] = sliding_window_overlay(1).__code__


def _window_of(mask_function: Callable[..., Any]) -> int | None:
    """The window of a mask that is causal and otherwise a sliding window, _EVERYTHING if it is causal only, None if neither.

    transformers composes masks of closures, and which ones says the pattern. One that is not known is another pattern.
    """
    if mask_function is causal_mask_function:
        return _EVERYTHING
    match _captured(mask_function, _BOTH_CODE):
        case {"mask_functions": (overlay, also)} if also is causal_mask_function:
            window = _captured(overlay, _WINDOW_CODE).get("sliding_window")
            return window if isinstance(window, int) and window > 0 else None
    return None


def _window_in_graph(mask_function: Callable[..., Any], local_size: int | None, config: Any) -> int | None:
    """`_window_of` in a graph, which cannot look into closures: what else has a `local_size` is attention by chunks."""
    if local_size is None:
        return _EVERYTHING if mask_function is causal_mask_function else None
    return local_size if getattr(config, "attention_chunk_size", None) is None else None


def _captured(function: Callable[..., Any], code: CodeType) -> dict[str, Any]:
    """Captured values of a closure of this code, by name; empty for another function."""
    if getattr(function, "__code__", None) is not code:
        return {}
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


def _decline(reason: str, softcap: float | None, *, goes_to: str = "sdpa") -> None:
    """Count a call that goes elsewhere, and warn of the first. Raises: NotImplementedError for a soft cap, which sdpa lacks."""
    if softcap is not None:
        raise NotImplementedError(
            f"this model caps its scores, which sdpa does not, and vmmkv's kernels decline: {reason}. "
            f'model.set_attn_implementation("eager") has it'
        )
    declined[reason] += 1
    if declined[reason] == 1:
        warnings.warn(f"attention by transformers' {goes_to}: {reason}", DeclinedWarning, stacklevel=3)


# causal attention by vmmkv's kernels
#
#     past and new tokens   | p | p | p | p | n | n |     queries are the last tokens; each sees itself and tokens before it,
#     queries                               | q | q |     or the last `window` of these
#
# A step without a graph is bound by the host. So a plan is made once a pass for all layers of one window.

_MOST_PLANS: Final = 64
"""A pass makes one for each window and shape among its layers; those of other passes are kept as long as there is room."""

_INT32_END: Final = 2**31

_TALLEST_TILE: Final = 256
"""Rows of the kernels' largest tile: offsets within one have 32 bits."""


class AttentionPlan(NamedTuple):
    """Arguments of vmmkv's kernels for the layers of one shape and window in a pass."""

    options: Any
    """`checks.AttentionOptions`, for a decode step."""
    even_queries: bool
    """Can loads of 16 bytes read the queries as they are?"""
    lengths_B: Tensor
    slots_B: Tensor
    query_starts: Tensor | None
    """First query of each sequence, if sequences have more than one query."""


def attend_causally(
    q_BHND: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    mask: Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[B, N, H, D] by the kernels if they can, else by sdpa. A mask counts, unless it says by `WINDOW` that it is a window."""
    reason = "a mask: padding, or another pattern than causal"
    if mask is None or (window := getattr(mask, WINDOW, None)) is not None:
        if window is not None and window >= k_BKTD.shape[2]:
            window = None
        scoring = Scoring(scale, window, softcap)
        plan = plan_of(q_BHND, k_BKTD, v_BKTD, scoring)
        if isinstance(plan, AttentionPlan):
            return _attend_by_plan(plan, q_BHND, k_BKTD, v_BKTD, scoring)
        reason = plan
    _decline(reason, softcap)
    if mask is None:
        mask = _mask_for_sdpa(q_BHND, k_BKTD, window)
    return _by_sdpa(q_BHND, k_BKTD, v_BKTD, mask, is_causal=True, scaling=scale)


def _by_sdpa(q_BHND: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, mask: Tensor | None, *, is_causal: bool, **options: Any) -> Tensor:
    """[B, N, H, D] by transformers' attention over SDPA, whatever attributes the model's own module has."""
    layer = SimpleNamespace(num_key_value_groups=q_BHND.shape[1] // k_BKTD.shape[1], is_causal=is_causal)
    out_BNHD: Tensor = sdpa_attention_forward(layer, q_BHND, k_BKTD, v_BKTD, mask, **options)[0]
    return out_BNHD


def _attend_by_plan(plan: AttentionPlan, q_BHND: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scoring: Scoring) -> Tensor:
    """[B, N, H, D]. Cost: two launches for one query of each sequence, three or four for more; no synchronisation."""
    num_sequences, num_heads, num_queries, head_dim = q_BHND.shape
    k_BTKD, v_BTKD = k_BKTD.transpose(1, 2), v_BKTD.transpose(1, 2)
    if plan.query_starts is None:
        from vmmkv_kernels.attention.decode import attend_singles
        from vmmkv_kernels.attention.kv_memory import LayerKV

        memory = LayerKV(k=k_BTKD, v=v_BTKD, k_scale=None, v_scale=None, tables_SC=None, kind=None, head_dim=head_dim)
        q_BHD = q_BHND.select(2, 0)
        if not plan.even_queries:
            q_BHD = q_BHD.clone(memory_format=torch.contiguous_format)
        out_BHD = torch.empty((num_sequences, num_heads, head_dim), dtype=q_BHD.dtype, device=q_BHD.device)
        attend_singles(q_BHD, memory, plan.lengths_B, plan.slots_B, None, None, plan.options, out_BHD, None)
        return out_BHD.unsqueeze(1)
    from vmmkv_kernels.attention.prefill import prefill

    q_BNHD = q_BHND.transpose(1, 2)
    if not plan.even_queries:
        q_BNHD = q_BNHD.clone(memory_format=torch.contiguous_format)
    q_NHD = q_BNHD.reshape(-1, num_heads, head_dim)
    out_NHD = prefill(q_NHD, k_BTKD, v_BTKD, plan.query_starts, plan.lengths_B, plan.slots_B, **scoring._asdict())
    return out_NHD.view(num_sequences, num_queries, num_heads, head_dim)


plans: dict[tuple[Any, ...], AttentionPlan | str] = {}
"""Plan of a call, or the reason to decline it, by all that it depends on: an entry for each pass, shape and window."""


def plan_of(q_BHND: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scoring: Scoring) -> AttentionPlan | str:
    """The plan of a call, or the reason why vmmkv's kernels decline it.

    Cost: for the first layer of a pass up to three small launches; else a look-up on the host.
    """
    device = q_BHND.device
    if is_capturing(device):  # what a graph makes has its numbers when that is replayed, and its memory as long as that lives
        return _plan(q_BHND, k_BKTD, v_BKTD, scoring)
    key = (
        q_BHND.shape, q_BHND.stride(), q_BHND.dtype, device, _stream_of(device),
        k_BKTD.shape, k_BKTD.stride(), k_BKTD.dtype, k_BKTD.device,
        v_BKTD.shape, v_BKTD.stride(), v_BKTD.dtype, v_BKTD.device, scoring,
        (q_BHND.data_ptr() | k_BKTD.data_ptr() | v_BKTD.data_ptr()) % 16,
    )  # fmt: skip
    plan = plans.get(key)
    if plan is None:
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        plan = plans[key] = _plan(q_BHND, k_BKTD, v_BKTD, scoring)
    return plan


def _plan(q_BHND: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scoring: Scoring) -> AttentionPlan | str:
    obstacle = _obstacle(q_BHND, k_BKTD, v_BKTD, scoring)
    if obstacle is not None:
        return obstacle
    from vmmkv_kernels import checks
    from vmmkv_kernels.attention.kv_memory import kv_memory

    kv_memory(k_BKTD.transpose(1, 2), v_BKTD.transpose(1, 2), None, None, None, q_BHND.dtype, q_BHND.device)
    num_sequences, _, num_queries, head_dim = q_BHND.shape
    integers: dict[str, Any] = {"dtype": torch.int32, "device": q_BHND.device}
    return AttentionPlan(
        options=checks.attention_options(*scoring, head_dim),
        even_queries=_is_even(q_BHND),
        lengths_B=torch.full((num_sequences,), k_BKTD.shape[2], **integers),
        slots_B=torch.arange(num_sequences, **integers),
        query_starts=None if num_queries == 1 else torch.arange(0, num_sequences * num_queries + 1, num_queries, **integers),
    )


def _obstacle(q_BHND: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scoring: Scoring) -> str | None:
    """The first reason for which vmmkv's kernels decline a call: its machine, types or shapes. None if they take it."""
    try:
        from vmmkv_kernels import checks
        from vmmkv_kernels.attention import MAX_HEAD_DIM
        from vmmkv_kernels.attention.kv_memory import MAX_GROUP, MAX_SEQUENCES
    except ImportError:
        return "Triton is not installed"
    device, dtype = q_BHND.device, q_BHND.dtype
    wanted = "cpu" if checks.INTERPRETED else "cuda"
    alike = device == k_BKTD.device == v_BKTD.device and dtype == k_BKTD.dtype == v_BKTD.dtype
    (num_sequences, num_heads, _, head_dim), num_kv_heads = q_BHND.shape, k_BKTD.shape[1]
    head_dims = f"heads of {head_dim} in queries, {k_BKTD.shape[3]} in keys and {v_BKTD.shape[3]} in values"
    is_even = head_dim % (checks.ALIGNMENT_BYTES // dtype.itemsize) == 0 and _is_even(k_BKTD) and _is_even(v_BKTD)
    row_stride = max(k_BKTD.stride(2), v_BKTD.stride(2))
    return _first_of(
        (device.type != wanted, f"tensors on {device.type}, where vmmkv's kernels do not run in this process"),
        (not alike, "queries, keys and values of different types or devices"),
        (dtype not in checks.FLOAT_DTYPES, f"tensors of {dtype}"),
        (checks.INTERPRETED and dtype == torch.bfloat16, "bfloat16, which Triton's interpreter computes wrongly"),
        (k_BKTD.shape != v_BKTD.shape or k_BKTD.shape[3] != head_dim, head_dims),
        (head_dim > MAX_HEAD_DIM, f"heads of {head_dim}, over {MAX_HEAD_DIM}"),
        (
            num_heads % num_kv_heads or num_heads > MAX_GROUP * num_kv_heads,
            f"{num_heads} query heads over {num_kv_heads} kv heads",
        ),
        (
            num_sequences != k_BKTD.shape[0] or num_sequences > MAX_SEQUENCES,
            f"a batch of {num_sequences} queries over {k_BKTD.shape[0]} sequences, of at most {MAX_SEQUENCES}",
        ),
        (not is_even, f"heads of {head_dim}, or strides, that are no multiples of 16 bytes"),
        (row_stride * _TALLEST_TILE >= _INT32_END, f"rows {k_BKTD.stride(2)} elements apart"),
        (scoring.scale is not None and not scoring.scale > 0.0, f"a scale of {scoring.scale}"),
        (scoring.softcap is not None and not scoring.softcap > 0.0, f"a soft cap of {scoring.softcap}"),
    )


def _is_even(states: Tensor) -> bool:
    """Can loads of 16 bytes read the tensor?"""
    multiple = 16 // states.element_size()
    strides = states.stride()
    return (
        strides[-1] == 1
        and not any(stride % multiple and size > 1 for stride, size in zip(strides[:-1], states.shape[:-1], strict=True))
        and states.data_ptr() % 16 == 0
    )


def is_capturing(device: torch.device) -> bool:
    """Is the current stream captured into a graph? Tensors made then belong to the graph alone."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stream_of(device: torch.device) -> int:
    """Number of the current stream; 0 on a CPU. Another stream might read a tensor before this one has written it."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


# masks for transformers' own functions


def _mask_for_sdpa(q_BHND: Tensor, k_BKTD: Tensor, window: int | None) -> Tensor | None:
    """The mask for causal attention by transformers' sdpa. Without one it takes the queries for the first tokens."""
    num_queries, num_tokens = q_BHND.shape[2], k_BKTD.shape[2]
    reaches = window is None or num_tokens <= window
    if reaches and num_queries in (1, num_tokens):
        return None
    return causal_mask(q_BHND.device, num_queries, num_tokens, None if reaches else window)


def causal_mask(device: torch.device, num_queries: int, num_tokens: int, window: int | None) -> Tensor:
    """Mask [1, 1, N, T] of the last queries: does the query see the token?"""
    if is_capturing(device):
        return _causal_mask.__wrapped__(device, 0, num_queries, num_tokens, window)
    return _causal_mask(device, _stream_of(device), num_queries, num_tokens, window)


@functools.lru_cache(maxsize=2)
def _causal_mask(device: torch.device, stream: int, num_queries: int, num_tokens: int, window: int | None) -> Tensor:
    """A mask, kept for the next layers; a hybrid model has two."""
    i_token = torch.arange(num_tokens, device=device)
    i_query = i_token[num_tokens - num_queries :, None]
    seen = i_token <= i_query
    return (seen if window is None else seen & (i_token > i_query - window))[None, None]


# attention sinks: logits of each head that take part in its softmax and belong to no token
#
# Neither vmmkv's kernels nor sdpa have them; the model's own eager function does. It is called for the models WITH_SINKS, whose
# attention is usual but for the sinks. Others make masks for "eager" by its name, or append rows that are no tokens to their
# keys, and would get a wrong mask here.


def _attend_with_sinks(
    module: torch.nn.Module,
    q_BHND: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    mask: Tensor | None,
    window: int | None,
    **options: Any,
) -> Tensor:
    """[B, N, H, D] by the eager function of the model that `module` is a layer of; without a mask causally, in the window.

    Raises: NotImplementedError for a model that is not among WITH_SINKS.
    """
    kind = getattr(getattr(module, "config", None), "model_type", None)
    eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    if kind not in WITH_SINKS or eager is None:
        raise NotImplementedError(
            f"this model's layers ({type(module).__name__}) have attention sinks, which neither vmmkv's kernels nor sdpa have, "
            f'and its own function may want other masks than are made for these: model.set_attn_implementation("eager")'
        )
    num_queries, num_tokens = q_BHND.shape[2], k_BKTD.shape[2]
    if mask is None and (num_queries > 1 or (window is not None and window < num_tokens)):
        mask = causal_mask(q_BHND.device, num_queries, num_tokens, window)
    if mask is not None and mask.dtype == torch.bool:
        dtype = q_BHND.dtype
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
    out_BNHD: Tensor = eager(module, q_BHND, k_BKTD, v_BKTD, mask, **options)[0]
    return out_BNHD


# compiled models: in each layer one opaque operation, which appends and attends
#
#     eager       cache.update -> views of all tokens      attention -> out
#     compiled    cache.update -> PendingRows              torch.ops.vmmkv.append_attend(q, k, v, cache, layer) -> out
#
# Views of the cache cannot be values of a graph: a compiler owns the memory of an operation's results, and may reuse it. So a
# graph has the new rows, the number of the cache and the output of attention, but no length. When it runs, the operation does
# on the host what the eager model does there: the first layer of a pass maps memory, the last counts tokens. A layer's output
# needs that of the layer before it, which keeps the order. Operations of one graph do not see that the cache has changed, so a
# graph has one pass, and a second one in it is refused.


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Rows that an operation in a graph appends. They stand for a layer's keys while the graph is made."""

    k_BKND: Tensor
    v_BKND: Tensor
    cache: int
    layer: int
    num_past: int
    """Number of tokens in the cache when the graph began; positions and mask were made by it."""

    def check(self, layer: int, obstacle: str | None) -> None:
        """Can this layer append and attend in a graph? `obstacle`: what is asked for besides causal attention."""
        if layer != self.layer:
            raise NotImplementedError(
                "a layer that reads what another one keeps is not compiled over a VmmCache with this attention: "
                'model.set_attn_implementation("sdpa")'
            )
        if obstacle is not None:
            raise NotImplementedError(
                f"{obstacle}: not compiled over a VmmCache with this attention. Leave the model uncompiled, or "
                f'model.set_attn_implementation("sdpa")'
            )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(  # not NotImplementedError: a compiler asks for what there may not be
            f"this model takes .{name} of the keys that the cache has, before it attends to them: not compiled over a VmmCache "
            f'with this attention. Leave the model uncompiled, or model.set_attn_implementation("sdpa")'
        )


def _attend(q: Any, k: Any, v: Any, mask: Any, scale: Any, window: Any, softcap: Any) -> Tensor:
    return attend_causally(q, k, v, mask, scale, window, softcap).contiguous()


def _append_attend(q: Any, k: Any, v: Any, mask: Any, number: int, layer: int, num_past: int, *scoring: Any) -> Tensor:
    return _attend(q, *registry.cache(number).append(k, v, layer, num_past), mask, *scoring)


def _like(q_BHND: Tensor, _: Tensor, v_BKTD: Tensor, *__: Any) -> Tensor:
    num_sequences, num_heads, num_queries, _dim = q_BHND.shape
    return q_BHND.new_empty((num_sequences, num_queries, num_heads, v_BKTD.shape[3]))


def _define(operation: str, place: str, implementation: Callable[..., Tensor]) -> None:
    """Define an operation, without `custom_op`: its checks of every call take as long on the host as a launch."""
    arguments = f"Tensor q, Tensor k, Tensor v, Tensor? mask, {place}float? scale, SymInt? window, float? softcap"
    # The operation may ask the host for the number of tokens, which a captured graph would not do again.
    torch.library.define(operation, f"({arguments}) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
    torch.library.impl(operation, "default", implementation)
    torch.library.register_fake(operation, _like)


_define("vmmkv::attend", "", _attend)  # over the keys and values of another cache
_define("vmmkv::append_attend", "SymInt cache, int layer, SymInt num_past, ", _append_attend)
# Its rows are wanted even if what it returns is not: a prompt may be computed for the cache alone.
torch.fx.node.has_side_effect(torch.ops.vmmkv.append_attend.default)

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
