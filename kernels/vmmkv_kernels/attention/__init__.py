"""Attention over a KV cache, and the writing of new K and V into it.

Offers `decode.decode`, `prefill.prefill`, `cascade.cascade` and `append.append`, over contiguous slots or (with `tables_SC`)
over blocks. Read `kv_memory` first: how a kernel finds a row. Then `decode`, and `split_kv` for how it spreads work over the
device.
"""

from typing import Final

MAX_HEAD_DIM: Final = 256
"""Elements of a head of K and V, which have as many as each other. It is here for those that ask without Triton."""
