"""Prefixes shared between sequences, under contiguous addresses.

cache        PrefixCache: match, attach, insert, park, pin, evict; read this first
attach       how a new sequence gets the rows of a known prefix: by a parked slot, by alias or by copy
index        which extents and slots hold the rows of which tokens, and what is evicted first
restored     what an earlier process left, parked ahead of use
tiered       what it knows of tiers; vmmkv.tiers.transfers copies to and from them
radix_tree   the tree over token ids; it knows nothing of memory
"""

from vmmkv.prefix.attach import Attached, AttachMethod
from vmmkv.prefix.cache import Borrowed, PrefixCache, PrefixStats
from vmmkv.prefix.tiered import Fetch, PathKeys, PrefixListener

__all__ = ["AttachMethod", "Attached", "Borrowed", "Fetch", "PathKeys", "PrefixCache", "PrefixListener", "PrefixStats"]
