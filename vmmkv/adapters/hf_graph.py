"""What a compiled model has of a VmmCache: in each layer one operation, which appends and attends, and which nobody looks into.

    eager       cache.update -> views of all tokens      attention -> out
    compiled    cache.update -> NewRows                  torch.ops.vmmkv.append_attend(q, k, v, cache, layer) -> out

Views of the cache are no values of a graph: a compiler takes what an operation returns for memory of its own, which it may
give to others. So a graph has the new rows, the number of the cache, and what attention computes; it has no length. When it
runs, the operation does on the host what the eager model does there: the first layer of a pass has memory mapped, the last
one counts its tokens. A layer's output needs that of the layer before it, so the order is that of the model. What has changed
the cache is not seen by what is behind it in the same graph: so a graph has one pass, and a second one in it is refused.

Legend: B sequences, N queries of each, T tokens, H query heads, K kv heads, D head dim.
"""

import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from vmmkv.adapters.hf_attend import attend_causally

if TYPE_CHECKING:
    from vmmkv.adapters.hf import VmmCache

_APPEND_ATTEND = "vmmkv::append_attend"
_ATTEND = "vmmkv::attend"  # `attend_causally` in a graph, over the keys and values of another cache

_caches: "weakref.WeakValueDictionary[int, VmmCache]" = weakref.WeakValueDictionary()
_numbers = itertools.count(2)  # a graph takes 0 and 1 for constants


def enter(cache: "VmmCache") -> int:
    """The number of a cache, by which a graph has it as long as it lives."""
    number = next(_numbers)
    _caches[number] = cache
    return number


@dataclass(frozen=True, slots=True)
class NewRows:
    """In the place of a layer's keys, while a graph is made: what `append_and_attend` is to do for them."""

    k_BKND: torch.Tensor
    v_BKND: torch.Tensor
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
    q_BHND: torch.Tensor,
    rows: NewRows,
    mask: torch.Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    obstacle: str | None,
) -> torch.Tensor:
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
    out: torch.Tensor = torch.ops.vmmkv.append_attend(
        q_BHND, rows.k_BKND, rows.v_BKND, mask, rows.cache, rows.layer, rows.num_past, scale, window, softcap
    )
    return out


def _attend(q: Any, k: Any, v: Any, mask: Any, scale: Any, window: Any, softcap: Any) -> torch.Tensor:
    return attend_causally(q, k, v, mask, scale, window, softcap).contiguous()


def _append_attend(
    q: Any, k: Any, v: Any, mask: Any, number: int, layer: int, num_past: int, scale: Any, window: Any, softcap: Any
) -> torch.Tensor:
    return _attend(q, *_caches[number].append(k, v, layer, num_past), mask, scale, window, softcap)


def _like(q_BHND: torch.Tensor, v_BKTD: torch.Tensor) -> torch.Tensor:
    num_sequences, num_heads, num_queries, _ = q_BHND.shape
    return q_BHND.new_empty((num_sequences, num_queries, num_heads, v_BKTD.shape[3]))


# Not by `custom_op`, whose checks of every call take as long on the host as a launch. Both may ask the host for what a captured
# graph would not ask again: how many tokens there are.
_TAGS = (torch.Tag.cudagraph_unsafe,)

torch.library.define(
    _ATTEND,
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, float? scale, SymInt? window, float? softcap) -> Tensor",
    tags=_TAGS,
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
