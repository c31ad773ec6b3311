"""Causal attention by vmmkv's kernels over what a Cache of transformers returned: any strided keys and values, of any cache.

    past and new tokens   | p | p | p | p | n | n |     the queries are the last tokens; each sees itself and what is before it,
    queries                               | q | q |     or the last `window` of these

A step that no graph has captured is bound by the host. So what is known of a pass, which all layers of one window share, is
found out once: whether the kernels can do it, and the few numbers that they read on the device.

Legend: B sequences, N queries of each, T tokens, H query heads, K kv heads, D head dim.
"""

import functools
import warnings
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch

_MOST_PLANS: Final = 64
"""A pass makes one for each window and shape among its layers; those of other passes are kept as long as there is room."""

_INT32_END: Final = 2**31

_TALLEST_TILE: Final = 256
"""Rows of the kernels' largest tile: offsets within one have 32 bits."""


WINDOW: Final = "_vmmkv_window"
"""Of a mask that is a sliding window and nothing else: the window. Whoever changes the mask gets a tensor without it."""

declined: Final[Counter[str]] = Counter()
"""Calls of one layer that went to transformers' own functions, by the reason."""


class DeclinedWarning(UserWarning):
    """A layer's attention went to one of transformers' own functions, as vmmkv's kernels do not have what it takes."""


class Scoring(NamedTuple):
    """What becomes of a query times a key: all that the layers of a pass may differ in, but for their shapes."""

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
    lengths_B: torch.Tensor | None = None
    slots_B: torch.Tensor | None = None
    query_starts: torch.Tensor | None = None
    """For more than one query."""


def attend_causally(
    q_BHND: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
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


def plan_of(q_BHND: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, scoring: Scoring) -> Plan:
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


def attend(plan: Plan, q_BHND: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, scoring: Scoring) -> torch.Tensor:
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
    q_BHND: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    scale: float | None,
    window: int | None,
    *,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """[B, N, H, D] by transformers' own sdpa function, with `mask`; if that is None, with what causal attention takes."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if mask is None:
        mask = mask_for_sdpa(q_BHND, k_BKTD, window)
    layer = SimpleNamespace(num_key_value_groups=q_BHND.shape[1] // k_BKTD.shape[1], is_causal=True)
    out_BNHD: torch.Tensor = sdpa_attention_forward(layer, q_BHND, k_BKTD, v_BKTD, mask, dropout=dropout, scaling=scale)[0]
    return out_BNHD


def mask_for_sdpa(q_BHND: torch.Tensor, k_BKTD: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """What transformers' sdpa function needs for causal attention. With None it takes the queries for the first tokens."""
    num_queries, num_tokens = q_BHND.shape[2], k_BKTD.shape[2]
    reaches = window is None or num_tokens <= window
    if reaches and num_queries in (1, num_tokens):
        return None
    return causal_mask(q_BHND.device, num_queries, num_tokens, None if reaches else window)


def causal_mask(device: torch.device, num_queries: int, num_tokens: int, window: int | None) -> torch.Tensor:
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


def _plan(q_BHND: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, scoring: Scoring) -> Plan:
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


def _obstacle(
    q_BHND: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, scale: float | None, softcap: float | None
) -> str | None:
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


def _is_even(states: torch.Tensor) -> bool:
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


def _even(q_NHD: torch.Tensor) -> torch.Tensor:
    """The same, copied if loads of 16 bytes cannot follow it."""
    return q_NHD if _is_even(q_NHD) else q_NHD.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=2)
def _causal_mask(device: torch.device, stream: int, num_queries: int, num_tokens: int, window: int | None) -> torch.Tensor:
    """Kept for the layers behind; a hybrid model has two."""
    i_token = torch.arange(num_tokens, device=device)
    i_query = i_token[num_tokens - num_queries :, None]
    seen = i_token <= i_query
    return (seen if window is None else seen & (i_token > i_query - window))[None, None]
