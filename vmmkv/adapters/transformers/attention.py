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
Refused is what sdpa lacks too: soft caps under a mask, sinks of other models, and tokens that a model has chosen by itself
(DeepSeek-V3.2's index), which it puts into the masks of "eager" and "sdpa" alone.

Once a pass and kind of mask, the mask function checks for padding, as transformers' own does. On a GPU it waits for the device,
unless there is no attention_mask.

Legend: B sequences, N queries of each, T tokens, H query heads, K kv heads, D head dim.
"""

import functools
import itertools
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

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

if TYPE_CHECKING:
    from vmmkv.adapters.transformers.cache import VmmCache


# causal attention by vmmkv's kernels
#
#     past and new tokens   | p | p | p | p | n | n |     queries are the last tokens; each sees itself and tokens before it,
#     queries                               | q | q |     or the last `window` of these
#
# A step without a graph is bound by the host. So a plan is made once a pass for all layers of one window: whether the kernels
# can do it, and the few numbers that they read on the device.

_MOST_PLANS: Final = 64
"""A pass makes one for each window and shape among its layers; those of other passes are kept as long as there is room."""

_INT32_END: Final = 2**31

_TALLEST_TILE: Final = 256
"""Rows of the kernels' largest tile: offsets within one have 32 bits."""


WINDOW: Final = "_vmmkv_window"
"""Attribute of a mask that is a sliding window and nothing else: the window. A changed mask is a tensor without it."""

declined: Final[Counter[str]] = Counter()
"""Calls of one layer that went to transformers' own functions, by the reason."""


class DeclinedWarning(UserWarning):
    """A layer's attention went to one of transformers' own functions, since vmmkv's kernels lack what it needs."""


class Scoring(NamedTuple):
    """How scores are made of a query times a key. Besides shapes, layers of a pass differ in nothing else."""

    scale: float | None
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the layers of one shape and window attend in a pass."""

    obstacle: str | None
    """Why vmmkv's kernels cannot do it; None if they can, and then the others are there."""
    options: Any = None
    """`checks.AttentionOptions`, for a decode step."""
    even_queries: bool = False
    """Can loads of 16 bytes follow them as they are?"""
    lengths_B: Tensor | None = None
    slots_B: Tensor | None = None
    query_starts: Tensor | None = None
    """For more than one query."""


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
    num_tokens = k_BKTD.shape[2]
    if mask is not None:
        window = getattr(mask, WINDOW, None)
        if window is None:
            decline("a mask: padding, or another pattern than causal", softcap)
            return attend_by_sdpa(q_BHND, k_BKTD, v_BKTD, scale, None, mask=mask)
    if window is not None and window >= num_tokens:
        window = None
    scoring = Scoring(scale, window, softcap)
    plan = plan_of(q_BHND, k_BKTD, v_BKTD, scoring)
    if plan.obstacle is None:
        return attend(plan, q_BHND, k_BKTD, v_BKTD, scoring)
    decline(plan.obstacle, softcap)
    return attend_by_sdpa(q_BHND, k_BKTD, v_BKTD, scale, window, mask=mask)


_plans: dict[tuple[Any, ...], Plan] = {}


def plan_of(q_BHND: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scoring: Scoring) -> Plan:
    """The plan of a call. Cost: for the first layer of a pass up to three small launches; else a look-up on the host."""
    device = q_BHND.device
    if _is_capturing(device):  # what a graph makes has its numbers when that is replayed, and its memory as long as that lives
        return _plan(q_BHND, k_BKTD, v_BKTD, scoring)
    # A tensor that one stream writes may be read by another before it is written.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (
        q_BHND.shape, q_BHND.stride(), q_BHND.dtype, device, stream,
        k_BKTD.shape, k_BKTD.stride(), k_BKTD.dtype, k_BKTD.device,
        v_BKTD.shape, v_BKTD.stride(), v_BKTD.dtype, v_BKTD.device, scoring,
        (q_BHND.data_ptr() | k_BKTD.data_ptr() | v_BKTD.data_ptr()) % 16,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(q_BHND, k_BKTD, v_BKTD, scoring)
    return plan


def attend(plan: Plan, q_BHND: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scoring: Scoring) -> Tensor:
    """[B, N, H, D] by vmmkv's kernels, for tensors whose plan has no obstacle.

    Cost: two launches for one query of each sequence, three or four for more; no synchronisation.
    """
    assert plan.lengths_B is not None and plan.slots_B is not None, "there is no obstacle"
    num_sequences, num_heads, num_queries, head_dim = q_BHND.shape
    k_BTKD, v_BTKD = k_BKTD.transpose(1, 2), v_BKTD.transpose(1, 2)
    if num_queries == 1:
        from vmmkv.kernels.attention.decode import attend_singles
        from vmmkv.kernels.attention.kv_memory import KVMemory

        memory = KVMemory(k=k_BTKD, v=v_BTKD, k_scale=None, v_scale=None, tables_SC=None, kind=None, head_dim=head_dim)
        q_BHD = q_BHND.select(2, 0)
        if not plan.even_queries:
            q_BHD = _even(q_BHD)
        out_BHD = torch.empty((num_sequences, num_heads, head_dim), dtype=q_BHD.dtype, device=q_BHD.device)
        attend_singles(q_BHD, memory, plan.lengths_B, plan.slots_B, None, None, plan.options, out_BHD, None)
        return out_BHD.unsqueeze(1)
    from vmmkv.kernels.attention.prefill import prefill

    assert plan.query_starts is not None, "there are several queries"
    q_NHD = _even(q_BHND.transpose(1, 2).reshape(-1, num_heads, head_dim))
    out_NHD = prefill(q_NHD, k_BTKD, v_BTKD, plan.query_starts, plan.lengths_B, plan.slots_B, **scoring._asdict())
    return out_NHD.view(num_sequences, num_queries, num_heads, head_dim)


def attend_by_sdpa(
    q_BHND: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    scale: float | None,
    window: int | None,
    *,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """[B, N, H, D] by transformers' own sdpa function, with `mask`; if that is None, with what causal attention takes."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if mask is None:
        mask = mask_for_sdpa(q_BHND, k_BKTD, window)
    layer = SimpleNamespace(num_key_value_groups=q_BHND.shape[1] // k_BKTD.shape[1], is_causal=True)
    out_BNHD: Tensor = sdpa_attention_forward(layer, q_BHND, k_BKTD, v_BKTD, mask, dropout=dropout, scaling=scale)[0]
    return out_BNHD


def mask_for_sdpa(q_BHND: Tensor, k_BKTD: Tensor, window: int | None) -> Tensor | None:
    """What transformers' sdpa function needs for causal attention. With None it takes the queries for the first tokens."""
    num_queries, num_tokens = q_BHND.shape[2], k_BKTD.shape[2]
    reaches = window is None or num_tokens <= window
    if reaches and num_queries in (1, num_tokens):
        return None
    return causal_mask(q_BHND.device, num_queries, num_tokens, None if reaches else window)


def causal_mask(device: torch.device, num_queries: int, num_tokens: int, window: int | None) -> Tensor:
    """[1, 1, N, T]: does the query, of the last ones, see the token?"""
    if _is_capturing(device):
        return _causal_mask.__wrapped__(device, 0, num_queries, num_tokens, window)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _causal_mask(device, stream, num_queries, num_tokens, window)


def decline(reason: str, softcap: float | None, *, goes_to: str = "sdpa") -> None:
    """Count a call that goes elsewhere, and warn of the first. Raises: NotImplementedError for a soft cap, which sdpa lacks."""
    if softcap is not None:
        raise NotImplementedError(
            f"this model caps its scores, which sdpa does not, and vmmkv's kernels decline: {reason}. "
            f'model.set_attn_implementation("eager") has it'
        )
    declined[reason] += 1
    if declined[reason] == 1:
        warnings.warn(f"attention by transformers' {goes_to}: {reason}", DeclinedWarning, stacklevel=3)


# within


def _plan(q_BHND: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scoring: Scoring) -> Plan:
    obstacle = _obstacle(q_BHND, k_BKTD, v_BKTD, scoring.scale, scoring.softcap)
    if obstacle is not None:
        return Plan(obstacle=obstacle)
    from vmmkv.kernels import checks
    from vmmkv.kernels.attention.kv_memory import kv_memory

    kv_memory(k_BKTD.transpose(1, 2), v_BKTD.transpose(1, 2), None, None, None, q_BHND.dtype, q_BHND.device)
    num_sequences, _, num_queries, head_dim = q_BHND.shape
    device, starts = q_BHND.device, None
    if num_queries > 1:
        starts = torch.arange(0, num_sequences * num_queries + 1, num_queries, dtype=torch.int32, device=device)
    return Plan(
        obstacle=None,
        options=checks.attention_options(*scoring, head_dim),
        even_queries=_is_even(q_BHND),
        lengths_B=torch.full((num_sequences,), k_BKTD.shape[2], dtype=torch.int32, device=device),
        slots_B=torch.arange(num_sequences, dtype=torch.int32, device=device),
        query_starts=starts,
    )


def _obstacle(q_BHND: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float | None, softcap: float | None) -> str | None:
    """What vmmkv's kernels do not have: of the machine, of the types, of the shapes."""
    try:
        from vmmkv.kernels import checks
        from vmmkv.kernels.attention.decode import MAX_GROUP, MAX_HEAD_DIM, MAX_SEQUENCES
    except ImportError:
        return "Triton is not installed"
    device, dtype = q_BHND.device, q_BHND.dtype
    if device.type != ("cpu" if checks.INTERPRETED else "cuda"):
        return f"tensors on {device.type}, where vmmkv's kernels do not run in this process"
    if not (device == k_BKTD.device == v_BKTD.device and dtype == k_BKTD.dtype == v_BKTD.dtype):
        return "queries, keys and values of different types or devices"
    if dtype not in checks.FLOAT_DTYPES:
        return f"tensors of {dtype}"
    if checks.INTERPRETED and dtype == torch.bfloat16:
        return "bfloat16, which Triton's interpreter computes wrongly"
    (num_sequences, num_heads, _, head_dim), num_kv_heads = q_BHND.shape, k_BKTD.shape[1]
    if k_BKTD.shape != v_BKTD.shape or k_BKTD.shape[3] != head_dim:
        return f"heads of {head_dim} in queries, {k_BKTD.shape[3]} in keys and {v_BKTD.shape[3]} in values"
    if head_dim > MAX_HEAD_DIM:
        return f"heads of {head_dim}, over {MAX_HEAD_DIM}"
    if num_heads % num_kv_heads or num_heads > MAX_GROUP * num_kv_heads:
        return f"{num_heads} query heads over {num_kv_heads} kv heads"
    if num_sequences != k_BKTD.shape[0] or num_sequences > MAX_SEQUENCES:
        return f"a batch of {num_sequences} queries over {k_BKTD.shape[0]} sequences, of at most {MAX_SEQUENCES}"
    multiple = checks.ALIGNMENT_BYTES // dtype.itemsize
    if head_dim % multiple or not (_is_even(k_BKTD) and _is_even(v_BKTD)):
        return f"heads of {head_dim}, or strides, that are no multiples of 16 bytes"
    if k_BKTD.stride(2) * _TALLEST_TILE >= _INT32_END or v_BKTD.stride(2) * _TALLEST_TILE >= _INT32_END:
        return f"rows {k_BKTD.stride(2)} elements apart"
    if scale is not None and not scale > 0.0:
        return f"a scale of {scale}"
    if softcap is not None and not softcap > 0.0:
        return f"a soft cap of {softcap}"
    return None


def _is_even(states: Tensor) -> bool:
    """Can loads of 16 bytes follow it?"""
    multiple = 16 // states.element_size()
    strides = states.stride()
    return (
        strides[-1] == 1
        and not any(stride % multiple and size > 1 for stride, size in zip(strides[:-1], states.shape[:-1], strict=True))
        and states.data_ptr() % 16 == 0
    )


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _even(q_NHD: Tensor) -> Tensor:
    """The same, copied if loads of 16 bytes cannot follow it."""
    return q_NHD if _is_even(q_NHD) else q_NHD.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=2)
def _causal_mask(device: torch.device, stream: int, num_queries: int, num_tokens: int, window: int | None) -> Tensor:
    """Kept for the layers behind; a hybrid model has two."""
    i_token = torch.arange(num_tokens, device=device)
    i_query = i_token[num_tokens - num_queries :, None]
    seen = i_token <= i_query
    return (seen if window is None else seen & (i_token > i_query - window))[None, None]


# attention sinks: logits of each head that take part in its softmax and belong to no token
#
# Neither vmmkv's kernels nor sdpa have them; the model's own eager function does. It is called for models whose attention is
# usual but for the sinks, which were looked at one by one. Others make masks for "eager" by its name, or append rows to their
# keys that are no tokens, and would get a wrong mask here.

WITH_SINKS: Final = frozenset({"flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"})
"""By `model_type`, of transformers 5.17 to 5.23."""


def attend_with_sinks(
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
#     compiled    cache.update -> NewRows                  torch.ops.vmmkv.append_attend(q, k, v, cache, layer) -> out
#
# Views of the cache cannot be values of a graph: a compiler owns the memory of an operation's results, and may reuse it. So a
# graph has the new rows, the number of the cache and the output of attention, but no length. When it runs, the operation does
# on the host what the eager model does there: the first layer of a pass maps memory, the last counts tokens. A layer's output
# needs that of the layer before it, which keeps the order. Operations of one graph do not see that the cache has changed, so a
# graph has one pass, and a second one in it is refused.

_APPEND_ATTEND = "vmmkv::append_attend"
_ATTEND = "vmmkv::attend"  # `attend_causally` in a graph, over the keys and values of another cache

_caches: "weakref.WeakValueDictionary[int, VmmCache]" = weakref.WeakValueDictionary()
_numbers = itertools.count(2)  # a graph takes 0 and 1 for constants


def enter(cache: "VmmCache") -> int:
    """Number a cache: a graph refers to it by number."""
    number = next(_numbers)
    _caches[number] = cache
    return number


@dataclass(frozen=True, slots=True)
class NewRows:
    """Takes the place of a layer's keys while a graph is made: the arguments of `append_and_attend`."""

    k_BKND: Tensor
    v_BKND: Tensor
    cache: int
    layer: int
    num_past: int
    """The tokens that the cache had when the graph began, by which the positions and the mask were made."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(  # not NotImplementedError: a compiler asks for what there may not be
            f"this model takes .{name} of the keys that the cache has, before it attends to them: not compiled over a VmmCache "
            f'with this attention. Leave the model uncompiled, or model.set_attn_implementation("sdpa")'
        )


def append_and_attend(
    module: Any,
    q_BHND: Tensor,
    rows: NewRows,
    mask: Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    obstacle: str | None,
) -> Tensor:
    """[B, N, H, D]: a layer appends its rows and attends to all that it has.

    Raises: NotImplementedError, if there is an obstacle: what is asked for besides causal attention.
    """
    if obstacle is not None:
        raise NotImplementedError(
            f"{obstacle}: not compiled over a VmmCache with this attention. Leave the model uncompiled, or "
            f'model.set_attn_implementation("sdpa")'
        )
    if getattr(module, "layer_idx", rows.layer) != rows.layer:
        raise NotImplementedError(
            "a layer that reads what another one keeps is not compiled over a VmmCache with this attention: "
            'model.set_attn_implementation("sdpa")'
        )
    out: Tensor = torch.ops.vmmkv.append_attend(
        q_BHND, rows.k_BKND, rows.v_BKND, mask, rows.cache, rows.layer, rows.num_past, scale, window, softcap
    )
    return out


def _attend(q: Any, k: Any, v: Any, mask: Any, scale: Any, window: Any, softcap: Any) -> Tensor:
    return attend_causally(q, k, v, mask, scale, window, softcap).contiguous()


def _append_attend(
    q: Any, k: Any, v: Any, mask: Any, number: int, layer: int, num_past: int, scale: Any, window: Any, softcap: Any
) -> Tensor:
    return _attend(q, *_caches[number].append(k, v, layer, num_past), mask, scale, window, softcap)


def _like(q_BHND: Tensor, v_BKTD: Tensor) -> Tensor:
    num_sequences, num_heads, num_queries, _ = q_BHND.shape
    return q_BHND.new_empty((num_sequences, num_queries, num_heads, v_BKTD.shape[3]))


# Not by `custom_op`, whose checks of every call take as long on the host as a launch. Both may ask the host for what a captured
# graph would not ask again: how many tokens there are.
_TAGS = (torch.Tag.cudagraph_unsafe,)

torch.library.define(
    _ATTEND, "(Tensor q, Tensor k, Tensor v, Tensor? mask, float? scale, SymInt? window, float? softcap) -> Tensor", tags=_TAGS
)
torch.library.impl(_ATTEND, "default", _attend)
torch.library.register_fake(_ATTEND, lambda q, k, v, *_: _like(q, v))
torch.library.define(
    _APPEND_ATTEND,
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, SymInt cache, int layer, SymInt num_past, float? scale, SymInt? window,"
    " float? softcap) -> Tensor",
    tags=_TAGS,
)
torch.library.impl(_APPEND_ATTEND, "default", _append_attend)
# Its rows are wanted even if what it returns is not: a prompt may be computed for the cache alone.
torch.fx.node.has_side_effect(torch.ops.vmmkv.append_attend.default)
torch.library.register_fake(_APPEND_ATTEND, lambda q, k, v, *_: _like(q, v))


# the implementation

__all__ = ["NAME", "DeclinedWarning", "attention", "declined", "mask"]

NAME: Final = "vmmkv"

_IGNORED: Final = frozenset(
    {"cache_position", "output_attentions", "output_hidden_states", "output_router_logits", "position_ids", "use_cache"}
)
"""Arguments that do not change what is attended to. A call with an argument that is unknown here goes to sdpa."""

_CHOSEN: Final = ("indices", "block_indices")
"""Which tokens, or blocks of them, each query sees. sdpa would ignore them."""


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
    """What a model calls in each layer: queries [B, H, N, D] over keys and values [B, K, T, D], to [B, N, H, D].

    With None for a mask each query sees its own token and what is before it, but for what the layer's window has passed: the
    queries are the last tokens. `mask` below says when there is one. Raises: NotImplementedError.
    """
    if chosen := [name for name in _CHOSEN if kwargs.get(name) is not None]:
        raise NotImplementedError(
            f"this model chooses tokens by itself ({', '.join(chosen)} given to attention), and vmmkv's kernels know nothing "
            f'of it: model.set_attn_implementation("sdpa"), for which it makes masks of them'
        )
    if s_aux is not None or sinks is not None:
        # By either name: gpt-oss and most others have the one, Inkling-2 the other.
        own = {"sinks": sinks} if s_aux is None else {"s_aux": s_aux}
        options = kwargs | own | {"dropout": dropout, "scaling": scaling}
        out = attend_with_sinks(module, query, key, value, attention_mask, sliding_window, **options)
        decline("attention sinks", softcap, goes_to="eager attention")
        return out, None
    rows = key if isinstance(key, NewRows) else None
    new_or_all = key if rows is None else rows.k_BKND
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = causal and query.shape[2] <= new_or_all.shape[2]
    others = [name for name, given in kwargs.items() if given is not None and name not in _IGNORED]
    reason = None
    if dropout > 0.0:
        reason = "dropout"
    elif torch.is_grad_enabled() and (query.requires_grad or new_or_all.requires_grad or value.requires_grad):
        reason = "gradients"
    elif others:
        reason = f"{', '.join(sorted(others))} given to attention"
    elif query.shape[2] > 1 and not causal and attention_mask is None:
        reason = "attention that is not causal"
    if rows is not None:
        return append_and_attend(module, query, rows, attention_mask, scaling, sliding_window, softcap, reason), None
    if reason is None:
        attend_here = torch.ops.vmmkv.attend if torch.compiler.is_compiling() else attend_causally
        return attend_here(query, key, value, attention_mask, scaling, sliding_window, softcap), None
    decline(reason, softcap)
    if causal and attention_mask is None:
        if not others:
            return attend_by_sdpa(query, key, value, scaling, sliding_window, dropout=dropout), None
        attention_mask = mask_for_sdpa(query, key, sliding_window)
    options = kwargs | {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
    out = sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0]
    return out, None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """What a model calls once a pass for each kind of mask: sdpa's, or None where `attention` needs none.

    None for causal masks without padding, if the queries are the last tokens and no window cuts a key off. A mask of a window
    alone carries the window as an attribute, so that the kernels need not read its numbers.
    """
    in_graph = torch.compiler.is_compiling()
    window = _window_in_graph(mask_function, local_size, config) if in_graph else _window_of(mask_function)
    are_last = _is_known(q_offset) and bool(q_offset + q_length == kv_offset + kv_length)
    plain = allow_is_causal_skip and window is not None and are_last and not _is_padded(attention_mask, kv_offset, kv_length)
    if plain and window is not None and (window == _EVERYTHING or window >= kv_length):
        return None
    made: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        config=config,
        **kwargs,
    )
    if plain and made is not None and not in_graph:
        setattr(made, WINDOW, window)
    return made


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)


# within

_EVERYTHING: Final = 0
"""Of a causal mask: there is no window."""

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
    """What a closure of this code has captured; nothing of another."""
    if getattr(function, "__code__", None) is not code:
        return {}
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


def _is_known(offset: int | Tensor) -> bool:
    """Is it on the host? Some caches have a tensor: on a GPU it would be waited for, and in a graph it cannot be read."""
    return not isinstance(offset, Tensor) or (offset.device.type == "cpu" and not torch.compiler.is_compiling())


def _is_padded(attention_mask: Tensor | None, kv_offset: int | Tensor, kv_length: int) -> bool:
    """Is any of these keys not to be seen? In a graph it cannot be looked at, and counts as padded."""
    if attention_mask is None:
        return False
    if torch.compiler.is_compiling():
        return True
    columns = attention_mask[:, kv_offset : kv_offset + kv_length]
    return columns.shape[1] < kv_length or not bool(columns.all())
