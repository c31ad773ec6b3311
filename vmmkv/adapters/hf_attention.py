"""vmmkv's kernels as an attention implementation of transformers, by the name "vmmkv": importing this module registers it.

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="vmmkv")       or
    model.set_attn_implementation("vmmkv")

It attends over what any cache returns, in place. Causal attention in which nothing is masked but what comes later, or what a
sliding window has passed, goes to vmmkv's kernels. The rest goes to transformers' own "sdpa", with the mask that it takes:

    masks           padding within the batch; patterns that are neither causal nor a sliding window
    training        gradients, dropout
    shapes, types   heads over 256, or no multiple of 16 bytes; keys wider than values; more than 64 query heads to a kv head;
                    other types than float32, float16 and bfloat16
    places          a CPU, but for Triton's interpreter

Attention sinks sdpa does not have: gpt-oss and others (see hf_eager) attend by their own eager function. `declined` counts all
such calls by their reason, and each reason is a DeclinedWarning once: with `warnings.simplefilter("error", DeclinedWarning)`
the first is an error. What sdpa does not have either is refused: soft caps under a mask, sinks of other models, and tokens that
a model has chosen by itself (DeepSeek-V3.2's index), which it would put into the masks of "eager" and "sdpa" alone.

The mask function looks whether anything is padded once a pass and kind of mask, as transformers' own does: on a GPU it waits
for the device, unless there is no attention_mask.

Legend: B sequences, N queries of each, T tokens, H query heads, K kv heads, D head dim.
"""

from collections.abc import Callable
from types import CodeType
from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from vmmkv.adapters import hf_graph
from vmmkv.adapters.hf_attend import WINDOW, DeclinedWarning, attend_by_sdpa, attend_causally, decline, declined, mask_for_sdpa
from vmmkv.adapters.hf_eager import attend_with_sinks

__all__ = ["NAME", "DeclinedWarning", "attention", "declined", "mask"]

NAME: Final = "vmmkv"

_IGNORED: Final = frozenset(
    {"cache_position", "output_attentions", "output_hidden_states", "output_router_logits", "position_ids", "use_cache"}
)
"""Arguments that say nothing about what is attended to. Others than these, and those that are understood, go to sdpa."""

_CHOSEN: Final = ("indices", "block_indices")
"""Which tokens, or blocks of them, each query sees. sdpa would ignore them."""


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
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
    rows = key if isinstance(key, hf_graph.NewRows) else None
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
        return hf_graph.append_and_attend(module, query, rows, attention_mask, scaling, sliding_window, softcap, reason), None
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
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """What a model calls once a pass for each kind of mask: sdpa's, or None where `attention` needs none.

    None for causal masks without padding, of queries that are the last of the keys, if no window cuts any of them off. A mask
    of a window alone says so, for those who find it whole: then its numbers are not read.
    """
    in_graph = torch.compiler.is_compiling()
    window = _window_in_graph(mask_function, local_size, config) if in_graph else _window_of(mask_function)
    are_last = _is_known(q_offset) and bool(q_offset + q_length == kv_offset + kv_length)
    plain = allow_is_causal_skip and window is not None and are_last and not _is_padded(attention_mask, kv_offset, kv_length)
    if plain and window is not None and (window == _EVERYTHING or window >= kv_length):
        return None
    made: torch.Tensor | None = sdpa_mask(
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


def _is_known(offset: int | torch.Tensor) -> bool:
    """Is it on the host? Some caches have a tensor: on a GPU it would be waited for, and in a graph it cannot be read."""
    return not isinstance(offset, torch.Tensor) or (offset.device.type == "cpu" and not torch.compiler.is_compiling())


def _is_padded(attention_mask: torch.Tensor | None, kv_offset: int | torch.Tensor, kv_length: int) -> bool:
    """Is any of these keys not to be seen? In a graph it cannot be looked at, and counts as padded."""
    if attention_mask is None:
        return False
    if torch.compiler.is_compiling():
        return True
    columns = attention_mask[:, kv_offset : kv_offset + kv_length]
    return columns.shape[1] < kv_length or not bool(columns.all())
