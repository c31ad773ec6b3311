"""The engine process: the model, its KV cache, and the loop that steps them. It has one thread and no other busy one.

__main__   the process: loads, connects, runs the loop, and ends it
core       one step: admit, plan, forward, sample, answer
requests   what is known of one request
scheduler  who runs, how many tokens each gets, who gives way when pages run out
loading    model, dtype, layout and budget from a configuration
runner     an unmodified transformers model over the cache
attention  what its attention layers call instead of their own
sampler    logits to token ids
beams      which beams of a search go on, and which have ended
beam_group the sequences of a search: forks of the prompt, rows copied as beams are reordered
"""
