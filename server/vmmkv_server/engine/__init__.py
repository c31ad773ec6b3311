"""The engine: the model, its KV cache, and the loop that steps them. One thread; no HTTP.

engine          the loop: schedule, launch, read an earlier step back, answer. Read this first
scheduler       which requests run, how many tokens each computes in a step, which are preempted
decode_set      the slots that decode, and the counts that spare a step a look at each
request         a request, its part of a step, and the numpy table of the requests that run
runner          launches steps on the device, as CUDA graphs on a GPU, and reads their results back
sampler         logits to tokens: penalties, biases, `min_tokens`, temperature, top-k, top-p, min-p
attention       append a step's keys and values, attend to whole sequences
kv_backend      the KV memory of an engine: the protocols, and the implementation over a vmmkv pool
prefix_groups   requests in a batch that share a prefix, for cascade attention
beams           beam search                                           prompt_logprobs  log-probabilities of prompts
ranks           rank 0's side of tensor parallelism                  worker          what the other ranks do
loading         from a configuration to an engine                     models/    the models
administration  what an operator asks of a running engine             __main__   the engine's process
"""
