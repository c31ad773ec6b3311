"""Other libraries over vmmkv's memory. Import each module by its own name; it needs the library that it is for.

attention       attention by torch, FlashAttention and FlashInfer over a cache's views
vllm            vLLM's KV connector over tiers
transformers    VmmCache: a Cache for `model.generate(past_key_values=...)`, and vmmkv's kernels as its attention
"""
