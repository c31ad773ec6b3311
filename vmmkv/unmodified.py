"""Models of transformers that run by their own code over kept rows: what the adapters and the engine know of them.

With the rope types `longrope` (Phi-3.5, Phi-4-mini) and `dynamic`, transformers takes the frequencies of a pass from its
largest position. So the numbers of a short sequence change beside a long one. Keys that were kept when a sequence was short do
not fit its queries when it is long. `settle_rotary` decides once, by the longest sequence that there can be.
"""

import functools
from typing import Any, Final

import torch

INERT_ARGUMENTS: Final = frozenset(
    {"cache_position", "output_attentions", "output_hidden_states", "output_router_logits", "position_ids", "use_cache"}
)
"""Arguments of attention that do not change what is attended to. An adapter gives a call with another one to sdpa; the engine
refuses it.
"""


def settle_rotary(model: torch.nn.Module, max_tokens: int) -> bool:
    """Have a model of transformers compute rotary frequencies as for a sequence of `max_tokens` tokens, in every pass.

    With `longrope` these are the long factors if `max_tokens` is over `original_max_position_embeddings`, else the short ones.
    No sequence may be longer. Keys computed for one number do not fit those for another. The last call counts.

    Returns whether frequencies of the model depend on lengths; if not, nothing is changed.
    Cost: one more position in each pass.
    """
    settled = [module for module in model.modules() if _depends_on_length(getattr(module, "rope_type", None))]
    for module in settled:
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            setattr(module, name, 0)  # how far earlier passes have stretched dynamic ones
        forward: Any = module.forward  # that of its class, or a hook's, as accelerate sets it
        if isinstance(forward, functools.partial) and forward.func is _beside_the_last:
            forward = forward.args[0]  # settled before
        module.forward = functools.partial(_beside_the_last, forward, max_tokens - 1)
    return bool(settled)


def _depends_on_length(kind: Any) -> bool:
    """Is a rope type, or one of a dictionary by layers, among those that transformers updates in a pass?"""
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind) for kind in kinds)


def _beside_the_last(
    forward: Any, last: int, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    """Cosines and sines of positions [..., N], as `forward` gives them when position `last` is among them."""
    beside = torch.cat((position_ids, position_ids.new_full((*position_ids.shape[:-1], 1), last)), dim=-1)
    given = forward(x, beside, *args, **kwargs)
    return tuple(table[..., :-1, :] for table in given)
