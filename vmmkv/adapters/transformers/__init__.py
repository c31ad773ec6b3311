"""transformers over the memory of vmmkv: a Cache for its models, and attention in them by vmmkv's kernels.

cache       VmmCache, for `model.generate(past_key_values=...)`; read this first
batch       one batch through its forward passes: where its rows lie, which rows are the same prompt, what is copied
attention   the attention implementation "vmmkv", eager and compiled; importing this package registers it
"""

from vmmkv.adapters.transformers.attention import DeclinedWarning, declined
from vmmkv.adapters.transformers.cache import VmmCache

__all__ = ["DeclinedWarning", "VmmCache", "declined"]
