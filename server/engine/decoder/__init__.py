"""The dense decoders of the Llama line, from one configuration: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3.

config      what such a model is, read from transformers' configuration; Unsupported if it is anything else
rope        the angles of its rotary embedding, as transformers computes them
parameters  its tensors, q, k and v in one and gate and up in one, and what transformers calls their parts
weights     the tensors filled: from safetensors, or at random
decoder     the forward pass
ops         the few operations that it is made of, in plain torch
kernel_ops  the same by vmmkv's kernels; imported on a GPU only
errors      Unsupported, WeightsMismatch
"""

from vmmkv.server.engine.decoder.config import DecoderConfig
from vmmkv.server.engine.decoder.decoder import Decoder, KVAttention
from vmmkv.server.engine.decoder.errors import Unsupported, WeightsMismatch
from vmmkv.server.engine.decoder.parameters import Weights, param_bytes, step_bytes
from vmmkv.server.engine.decoder.weights import load, random

__all__ = [
    "Decoder",
    "DecoderConfig",
    "KVAttention",
    "Unsupported",
    "Weights",
    "WeightsMismatch",
    "load",
    "param_bytes",
    "random",
    "step_bytes",
]
