"""transformers over the memory of vmmkv: a Cache for its models, and attention in them by vmmkv's kernels.

cache       VmmCache, for `model.generate(past_key_values=...)`; read this first
policy      PolicyCache, which drops rows by a policy
batch       rows of a batch: which are equal prompts, which sequence each goes on from, where their keys and values lie
calls       did the model's call that wrote a pass return?
saved       a batch in a file
registry    numbers of caches, for graphs and keys
attention   the attention implementation "vmmkv", eager and compiled; importing this package registers it
"""

from vmmkv.adapters.transformers.attention import DeclinedWarning, declined
from vmmkv.adapters.transformers.cache import VmmCache
from vmmkv.adapters.transformers.policy import PolicyCache
from vmmkv.unmodified import settle_rotary

__all__ = ["DeclinedWarning", "PolicyCache", "VmmCache", "declined", "settle_rotary"]
