"""Other ways of keeping K and V, under the same engine, model and kernels as vmmkv: what it is compared with.

memory      opens each of them as the engine's memory        numbers          rows, limits and slots, whatever the memory
paged       blocks of 16 rows under a table                  block_rows       attention over them
blocks      whose a block is, and the radix tree             paged_prefixes   prefixes in whole blocks
static      the longest request's rows for each slot         common_prefill   vmmkv with the prefill kernel that blocks have
"""

from typing import Final

COMMON_PREFILL: Final = "vmmkv, prefill of blocks"
"""The name that rows have, of vmmkv without the prefill kernel that blocks have no twin of."""
