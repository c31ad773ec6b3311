"""Other ways of keeping K and V under the same engine, scheduler and model: what vmmkv is compared with.

slots      slots that are numbers, and static slots: the longest request's rows for each
paged      blocks under tables: allocation, attention over them, prefixes in whole blocks
fa3        FlashAttention-3, over blocks and over slots
backend    each of them as the engine's memory (read first)
"""

from typing import Final

PAGED_FA3: Final = "paged 16, FA3"
"""Blocks as vLLM has them by default, under the kernels that vLLM calls on Hopper."""
COMMON_PREFILL: Final = "vmmkv, prefill of blocks"
"""vmmkv without the prefill kernel that blocks of 16 have no twin of: from `paged 16` it differs by addressing alone."""
