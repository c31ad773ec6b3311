"""Attention sinks: logits of each head that take part in its softmax and belong to no token. vmmkv's kernels have none, nor has
sdpa; the model's own eager function has.

It is called for models whose attention is the usual one but for the sinks, which were looked at one by one: others make masks
for "eager" by its name, or append what is no token to their keys, and would be given the wrong mask here.

Legend: B sequences, N queries of each, T tokens, H query heads, K kv heads, D head dim.
"""

import sys
from typing import Any, Final

import torch

from vmmkv.adapters.hf_attend import causal_mask

WITH_SINKS: Final = frozenset({"flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"})
"""By `model_type`, of transformers 5.17 to 5.23."""


def attend_with_sinks(
    module: torch.nn.Module,
    q_BHND: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    mask: torch.Tensor | None,
    window: int | None,
    **options: Any,
) -> torch.Tensor:
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
    out_BNHD: torch.Tensor = eager(module, q_BHND, k_BKTD, v_BKTD, mask, **options)[0]
    return out_BNHD
