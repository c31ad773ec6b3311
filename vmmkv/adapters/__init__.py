"""Other libraries over vmmkv's memory. Import each module by its own name; it needs the library that it is for.

attention       attention by torch, FlashAttention and FlashInfer over a cache's views
vllm            vLLM's KV connector over tiers
sglang          a storage backend of SGLang's HiCache over tiers
tier_options    the tiers of both, by the words of `vmmkv serve`
transformers    VmmCache: a Cache for `model.generate(past_key_values=...)`, and vmmkv's kernels as its attention
"""
