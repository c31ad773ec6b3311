"""Tiers: where rows go that leave the device, and come back from. `Store` puts bytes of any engine there.

`vmmkv.tier` has the protocol and its records; read that first.

record        the size of records, and their checksums
keys          KeyChain: the keys of records, what must agree for bytes to be the same
store         Store: put and get records of an engine
mover         the queues and copies of a Store, and of a prefix cache
transfers     copies between the extents of a prefix tree and tiers
fetch_search  what to load of a prompt, and from which tiers
threaded      ThreadedTier: the base of a tier that blocks
host          HostTier: pinned memory
disk          DiskTier: one file of slots, found again after a restart, that several processes share
shared_slots  what these processes tell each other: changes, uses and locks of slots
answering     whether a store or a disk answers; one that does not is left alone
shared        SharedTier: the base of a tier over a store that engines on several machines share
contrib       RedisTier, MooncakeTier
"""

from vmmkv.tier import Refusal, Tier, TierStats, Transfer
from vmmkv.tiers.contrib.mooncake import MooncakeTier
from vmmkv.tiers.contrib.redis import RedisTier
from vmmkv.tiers.disk import DiskTier
from vmmkv.tiers.host import HostTier
from vmmkv.tiers.keys import KeyChain
from vmmkv.tiers.shared import open_store
from vmmkv.tiers.store import Get, Put, Store

__all__ = [
    "DiskTier",
    "Get",
    "HostTier",
    "KeyChain",
    "MooncakeTier",
    "Put",
    "RedisTier",
    "Refusal",
    "Store",
    "Tier",
    "TierStats",
    "Transfer",
    "open_store",
]
