"""Other ways of keeping K and V under the same engine, model and kernels: what vmmkv is compared with.

slots      slots that are numbers, and static slots: the longest request's rows for each
paged      blocks of 16 rows under tables: allocation, attention over them, prefixes in whole blocks
backend    each of them as the engine's memory (read first)
"""

from typing import Final

COMMON_PREFILL: Final = "vmmkv, prefill of blocks"
"""vmmkv without the prefill kernel that blocks have no twin of."""
