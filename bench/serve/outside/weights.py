"""The engine's weights as a model of transformers: the same memory, under the names that transformers has for its parts.

Weights of the same seed would be others, since transformers draws its own in another order; and there is room for one copy.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from bench.serve.system import Models
from vmmkv import KVLayout
from vmmkv.server.engine.models.decoder import DecoderConfig, Unsupported


@contextmanager
def no_grad() -> Iterator[None]:
    """Not inference mode: tensors made in it cannot be written outside, and transformers writes from threads of its own."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def ours(models: Models) -> tuple[DecoderConfig, dict[str, torch.Tensor]]:
    """The engine's decoder, and its weights by transformers' names. Raises: Unsupported if the engine runs another's code."""
    decoder = models.source._decoder
    if decoder is None:
        raise Unsupported(f"{models.model.name} runs by transformers' own code in the engine: there are no weights to share")
    return decoder.config, decoder.weights.named(decoder.config)


@no_grad()
def as_transformers(models: Models) -> Any:
    """A model whose parameters are views of the decoder's tensors, fused ones among them. It costs no memory.

    Raises: Unsupported, as `ours`, or if transformers' model has other tensors.
    """
    _, weights = ours(models)
    config = AutoConfig.from_pretrained(models.config.model, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=models.source.dtype)
    unknown = model.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    model.tie_weights()  # what is missing is a head that is the embedding, or found below
    rotary = model.model.rotary_emb  # its angles are in no state_dict: they follow from the configuration
    model.model.rotary_emb = type(rotary)(config=config).to(models.device)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if differing := [*unknown, *(name for name, tensor in tensors.items() if tensor.is_meta)]:
        raise Unsupported(f"transformers' {config.model_type} has other tensors than the decoder: {', '.join(differing[:4])}")
    # The configuration's end tokens would end answers. Token 0 stands where a batch has nothing.
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.requires_grad_(False).eval()


def row_bytes(model: Any) -> int:
    """K and V of a token in all layers."""
    return KVLayout.from_config(model.config, model.dtype).row_bytes


def release(device: torch.device) -> None:
    """Give what nobody holds any more back to a GPU: what runs next may not be torch, or want it in other pieces."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
