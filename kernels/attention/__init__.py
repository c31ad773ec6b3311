"""Attention over a KV cache, and the writing of new K and V into it.

Offers `decode.decode`, `prefill.prefill`, `cascade.cascade` and `append.append`, over contiguous slots or (with `tables_SC`)
over blocks. Read `kv_memory` first: how a kernel finds a row. Then `decode`, and `split_kv` for how it spreads work over the
device.
"""
