"""Other libraries over the memory of vmmkv. Each module is imported by its own name, with the library that it is for.

attention          attention by torch, FlashAttention and FlashInfer over a cache's views
hf                 VmmCache: a Cache of transformers, for `model.generate(past_key_values=...)`
    hf_layers      which layers a configuration has, and what transformers asks of each
    hf_batch       one batch through its forward passes
    hf_rows        its rows for the layers of one window, in adjacent slots
    hf_planes      what torch writes and reads of these, for all layers at once
    hf_lineage     which sequence each row of the batch goes on from, and what any two have in common
    hf_twins       which rows of a batch are the same prompt
    hf_attention   the attention implementation "vmmkv" of transformers: its masks, and what goes to sdpa instead
    hf_attend      causal attention by vmmkv's kernels over the keys and values of any cache
    hf_eager       attention sinks, by a model's own function
    hf_graph       a compiled model's operations
"""
