"""vmmkv: every sequence's KV cache at one contiguous range of addresses, with physical memory mapped on demand.

    from vmmkv import KVCache, KVLayout, Pool

Importing this starts no CUDA context, no thread and no logging.
"""

from vmmkv.cache import KVCache
from vmmkv.driver.base import Driver
from vmmkv.errors import (
    BudgetError,
    Closed,
    DriverError,
    DriverUnavailable,
    Evicted,
    ForkedProcess,
    LayoutError,
    OutOfPages,
    OutOfSlots,
    RowsUnmapped,
    SequenceTooLong,
    VmmkvError,
)
from vmmkv.kv_type import KVType
from vmmkv.layout import Group, KVLayout, Plane
from vmmkv.pool import Pool, PoolStats
from vmmkv.prefix import PrefixCache, PrefixStats
from vmmkv.prefix_costs import Rung
from vmmkv.prefix_ladder import Attached
from vmmkv.sequence import Parked, Sequence
from vmmkv.stats import CacheStats
from vmmkv.units import GIB, KIB, MIB, PAGE_BYTES, TIB

__version__ = "0.1.0"

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "PAGE_BYTES",
    "TIB",
    "Attached",
    "BudgetError",
    "CacheStats",
    "Closed",
    "Driver",
    "DriverError",
    "DriverUnavailable",
    "Evicted",
    "ForkedProcess",
    "Group",
    "KVCache",
    "KVLayout",
    "KVType",
    "LayoutError",
    "OutOfPages",
    "OutOfSlots",
    "Parked",
    "Plane",
    "Pool",
    "PoolStats",
    "PrefixCache",
    "PrefixStats",
    "RowsUnmapped",
    "Rung",
    "Sequence",
    "SequenceTooLong",
    "VmmkvError",
]
