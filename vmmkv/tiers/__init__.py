"""Tiers: where rows go that leave the device, and come back from.

tier     the protocol and its records; read this first
record   the size of records, and their checksums
keys     KeyChain: the keys of records, what must agree for bytes to be the same
host     HostTier: pinned memory
disk     DiskTier: one file of slots, found again after a restart
shared   RedisTier, MooncakeTier: stores that engines on several machines share
saved    rows of running sequences: in a file (Sequence.save, KVCache.restore), in host memory (VmmCache.offload)

`vmmkv.prefix.transfers` copies between the device and tiers.
"""

from vmmkv.tiers.disk import DiskTier
from vmmkv.tiers.host import HostTier
from vmmkv.tiers.keys import KeyChain
from vmmkv.tiers.shared import MooncakeTier, RedisTier, open_store
from vmmkv.tiers.tier import Refusal, Tier, TierStats, Transfer

__all__ = [
    "DiskTier",
    "HostTier",
    "KeyChain",
    "MooncakeTier",
    "RedisTier",
    "Refusal",
    "Tier",
    "TierStats",
    "Transfer",
    "open_store",
]
