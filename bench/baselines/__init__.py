"""Other ways of keeping K and V, in the same engine, with the same model and kernels: what vmmkv is compared with.

paged      blocks of 16 rows under a table: allocation, attention over them, prefixes in whole blocks
static     the longest request's rows for each slot
slots      per-slot lengths and limits, which both share
backend    each of them as the engine's memory (read first)
"""

from typing import Final

COMMON_PREFILL: Final = "vmmkv, prefill of blocks"
"""vmmkv without the prefill kernel that blocks have no twin of."""
