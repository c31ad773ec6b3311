"""Prefixes shared between sequences, under contiguous addresses.

cache        PrefixCache: match, attach, insert, park, pin, evict; read this first
attach       how a new sequence gets the rows of a known prefix: by a parked slot, by alias or by copy
index        which extents and slots hold the rows of which tokens, and what is evicted first
transfers    copies to and from tiers
fetch_search what to load of a prompt, and from which tiers
radix_tree   the tree over token ids; it knows nothing of memory
"""

from vmmkv.prefix.attach import Attached, AttachMethod
from vmmkv.prefix.cache import Borrowed, PrefixCache, PrefixStats
from vmmkv.prefix.fetch_search import Fetch
from vmmkv.prefix.transfers import PrefixListener

__all__ = ["AttachMethod", "Attached", "Borrowed", "Fetch", "PrefixCache", "PrefixListener", "PrefixStats"]
