"""Other libraries over the memory of vmmkv. Each module is imported by its own name, with the library that it is for.

attention       attention by torch, FlashAttention and FlashInfer over a cache's views
transformers    VmmCache: a Cache for `model.generate(past_key_values=...)`, and vmmkv's kernels as its attention
"""
