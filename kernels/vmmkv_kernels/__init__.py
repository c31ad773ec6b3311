"""Triton kernels over tensors, with their references in plain torch. They know nothing of caches.

Read `reference.py` first: each kernel is held to what stands there. Then `attention/kv_memory.py`: how a kernel finds a row.
"""
