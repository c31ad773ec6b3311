"""The engine: the model, its KV cache, and the loop that steps them. One thread; no HTTP.

engine          the loop: schedule, launch, read an earlier step back, answer. Read this first
scheduler       which requests run, how many tokens each computes in a step, which are preempted
waiting         the requests that wait, and the order in which they are admitted
request         a request, the numpy table of those that run, and the set of slots that decode
step            passive data of a step: its chunks, and its results
answers         what the results of a step mean: rows are confirmed, tokens sent, requests end
feature         the socket of features: what the loop asks of them and tells them
features/       scores of prompts, beams, grammars, fetches, compaction, prefix groups
runner          launches steps on the device, as CUDA graphs on a GPU, and reads their results back
sampler         logits to tokens: penalties, biases, `min_tokens`, temperature, top-k, top-p, min-p
attention       append a step's keys and values, attend to whole sequences
kv_backend      the KV memory of an engine: the protocols, and the implementation over a vmmkv pool
tiers           the tiers that a configuration asks for
group_tensors   the groups of rows that share a prefix, as attention reads them
ranking         sums of what queries attend to, by which rows are ranked
kv_events       what the prefix tree and tiers gain and lose, published for routers
ranks           rank 0's side of tensor parallelism                  worker          what the other ranks do
loading         from a configuration to an engine                     models/    the models
administration  what an operator asks of a running engine             __main__   the engine's process
"""
