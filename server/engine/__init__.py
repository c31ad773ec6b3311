"""The engine process: the model, its KV cache, and the loop that steps them. It has one thread and no other busy one.

__main__      the process: loads, connects, runs the loop, and ends it
core          the loop's body: plan, launch, pump, read an earlier step back, answer; with launched (a step under way) and
              refusals (who never starts)
loading       model, dtype and layout from a configuration, and an engine of them
administration  another budget, or no cached prefixes: what an administrator asks
memory        the KV memory of an engine, from its opening to its close: slots in a pool, or another kind
kv            what the engine wants of it              rows        how attention writes and reads its rows
snapshot      what is told of it from time to time     memory_map  what is mapped where, when somebody asks

requests      what is known of one request             ledger      the numbers of those that run, as arrays over slots
scheduler     who runs, how many tokens each gets, who gives way when pages run out
admission     which waiting request begins next      capacity    which can never fit
beams         which beams of a search go on            beam_group  their sequences: forks of the prompt, rows copied
sharers       who shares a prefix with whom in a batch

runner        launches steps: decode, and decode mixed with chunks of prompts
decode_steps  decode steps of every batch size as CUDA graphs    mixed_steps  steps with chunks of prompts beside them
step_state    where each sequence stands, on the device
uploads       what goes to the device                            readback    what comes back
batch         a step as the model sees it              model       what the engine wants of a model
decoder/      the dense decoders, from their configuration       decoder_model  one of them over the cache
unmodified    any other model, by transformers' own code
attention     what both call: append and attend

guided        answers by a grammar, in the loop; with constraints (reading grammars, calling matchers, masks)
sampler       logits to tokens, with sampling_state (parameters on the device), adjust (penalties, biases) and withheld
              (`min_tokens`)                           prompt_scores  how likely prompts are
"""
