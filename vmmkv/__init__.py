"""KV-cache memory for LLM inference: one contiguous range of addresses a sequence, physical memory mapped on demand.

    KVLayout     the shape of K and V of one token
    Pool         physical memory on a device, up to a budget
    KVCache      addresses for sequences, over a pool: opens, forks and adopts them
    Sequence     grow, write rows, advance; truncate, park or close
    PrefixCache  shares equal prompt prefixes between sequences
    HostTier, DiskTier   where a PrefixCache keeps rows that leave the device

Importing this starts no CUDA context, no thread and no logging; torch is imported with the first name that needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vmmkv.errors import (
    BudgetError,
    Closed,
    DriverError,
    DriverUnavailable,
    Evicted,
    ForkedProcess,
    GraphCapture,
    HolderUnavailable,
    LayoutError,
    LogDamaged,
    OutOfPages,
    OutOfSlots,
    Reentered,
    RowsUnmapped,
    SequenceTooLong,
    TierUnavailable,
    ViewNotCloned,
    VmmkvError,
)
from vmmkv.units import GIB, KIB, MIB, PAGE_BYTES, TIB

if TYPE_CHECKING:
    from vmmkv.cache import CacheStats, KVCache
    from vmmkv.driver.base import Driver
    from vmmkv.layout import Group, KVLayout, KVType, Plane
    from vmmkv.memory.pool import Pool, PoolStats
    from vmmkv.memory.slots import ParkedSlot
    from vmmkv.prefix import Attached, AttachMethod, Fetch, PrefixCache, PrefixStats
    from vmmkv.sequence import Sequence
    from vmmkv.tier import Tier, TierStats
    from vmmkv.tiers import DiskTier, HostTier, KeyChain, Store

__version__ = "0.1.0"

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "PAGE_BYTES",
    "TIB",
    "AttachMethod",
    "Attached",
    "BudgetError",
    "CacheStats",
    "Closed",
    "DiskTier",
    "Driver",
    "DriverError",
    "DriverUnavailable",
    "Evicted",
    "Fetch",
    "ForkedProcess",
    "GraphCapture",
    "Group",
    "HolderUnavailable",
    "HostTier",
    "KVCache",
    "KVLayout",
    "KVType",
    "KeyChain",
    "LayoutError",
    "LogDamaged",
    "OutOfPages",
    "OutOfSlots",
    "ParkedSlot",
    "Plane",
    "Pool",
    "PoolStats",
    "PrefixCache",
    "PrefixStats",
    "Reentered",
    "RowsUnmapped",
    "Sequence",
    "SequenceTooLong",
    "Store",
    "Tier",
    "TierStats",
    "TierUnavailable",
    "ViewNotCloned",
    "VmmkvError",
]

_LAZY = {  # by module: what needs torch
    "cache": ("CacheStats", "KVCache"),
    "driver.base": ("Driver",),
    "layout": ("Group", "KVLayout", "KVType", "Plane"),
    "memory.pool": ("Pool", "PoolStats"),
    "memory.slots": ("ParkedSlot",),
    "prefix": ("AttachMethod", "Attached", "Fetch", "PrefixCache", "PrefixStats"),
    "sequence": ("Sequence",),
    "tier": ("Tier", "TierStats"),
    "tiers": ("DiskTier", "HostTier", "KeyChain", "Store"),
}
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names}


if not TYPE_CHECKING:  # to a type checker every name would be one of the package's

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
