"""Can a model be served? The reasons against it that its configuration tells, without weights.

The engine refuses a model by them before it reads weights, and `vmmkv plan` prints them.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from vmmkv.arguments import json_object
from vmmkv.errors import LayoutError, VmmkvError
from vmmkv.model_config import Attention, ModelConfig, beside_rows, described, read
from vmmkv_kernels.attention import MAX_HEAD_DIM
from vmmkv_server.engine.errors import EngineDied
from vmmkv_server.models import UnsupportedModel, check_form, from_directory

INSTEAD: Final = "use a checkpoint in bfloat16, float16 or float32, or in FP8 by blocks (quant_method fp8)"
"""Advice on what works in place of a quantised checkpoint."""

_MEMORY_IS_FULL: Final = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Words of torch's errors for want of memory that have no type of their own: of a CPU, and of cuBLAS."""


@contextlib.contextmanager
def refusing(what: str, instead: str | None = None) -> Iterator[None]:
    """Within it, errors of transformers become UnsupportedModel: what cannot be served, the cause, and what would work.

    Errors of files, of the driver, of memory, and of other ranks are raised as they are.
    """
    works = "" if instead is None else f"; {instead}"
    try:
        yield
    except UnsupportedModel as error:
        raise type(error)(f"{what} cannot be served: {error}") from error
    except (VmmkvError, EngineDied, OSError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if any(words in str(error) for words in _MEMORY_IS_FULL):
            raise MemoryError(str(error)) from error
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UnsupportedModel(f"{what} cannot be served: {cause}{works}") from error


def check_directory(directory: Path) -> None:
    """Check by the configuration in a directory that the engine runs the model on a GPU. Raises: VmmkvError, OSError."""
    check_form(directory)
    hf_config = read_config(directory)
    check_servable(directory, hf_config, on_gpu=True)
    end_tokens(directory, hf_config)


def check_servable(directory: Path, hf_config: Any, *, on_gpu: bool) -> None:
    """Check by the configuration of a directory that the engine runs its model. Raises: UnsupportedModel."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    text_config = hf_config.get_text_config()
    check_layers(read_model(text_config), on_gpu=on_gpu)
    method = quantised_by(directory, hf_config)
    if method not in (None, "bitsandbytes", *AUTO_QUANTIZATION_CONFIG_MAPPING):
        raise UnsupportedModel(
            f"the weights in {directory} are quantised ({method}), and neither vmmkv nor transformers unpacks these; {INSTEAD}"
        )
    unserved = f"a model of type {hf_config.model_type} cannot be served"
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{unserved}: transformers has no decoder of text of this type")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    if not model_class._supports_attention_backend:  # the model calls no attention function by its name
        raise UnsupportedModel(f"{model_class.__name__} has an attention of its own, which cannot use vmmkv's cache")
    if (reason := _unknown_rope(text_config)) is not None:
        raise UnsupportedModel(f"{unserved}: {reason}")


def check_layers(model: ModelConfig, *, on_gpu: bool) -> None:
    """Check that the engine runs all that a model's layers keep. Raises: UnsupportedModel. Needs no transformers."""
    others = beside_rows(model.layers)
    for layer, parts in enumerate(model.layers) if on_gpu else ():
        for part in parts:
            if isinstance(part, Attention):
                if part.key_dim != part.value_dim:
                    name = f"keys of {part.key_dim} elements and values of {part.value_dim} (kernels on a GPU take one size)"
                    others.setdefault(name, []).append(layer)
                if part.key_dim > MAX_HEAD_DIM:
                    name = f"heads of {part.key_dim} elements (kernels on a GPU take up to {MAX_HEAD_DIM})"
                    others.setdefault(name, []).append(layer)
    if found := "; ".join(filter(None, [described(others), "attention sinks" * model.has_sinks])):
        raise UnsupportedModel(f"a model of type {model.family} cannot be served: it has {found}")


def _unknown_rope(text_config: Any) -> str | None:
    """A rope_type for which transformers has no function, in words. None if it has them all."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    said = getattr(text_config, "rope_parameters", None)
    parts = [said, *said.values()] if isinstance(said, dict) else []
    for kind in (part["rope_type"] for part in parts if isinstance(part, dict) and "rope_type" in part):
        if kind not in ("default", *ROPE_INIT_FUNCTIONS):
            return f"rope_type in its config.json is {kind!r}; transformers has default, {', '.join(ROPE_INIT_FUNCTIONS)}"
    return None


def quantised_by(directory: Path, config: Any) -> str | None:
    """The method by which the weights of a checkpoint are quantised, as it says itself; None if it does not."""
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if said := getattr(part, name, None):
                return _method(said)
    beside = directory / "hf_quant_config.json"  # of modelopt, whose older checkpoints say nothing in config.json
    return _method(json_object(beside)) if beside.is_file() else None


def _method(said: Any) -> str:
    fields = said if isinstance(said, dict) else said.to_dict()
    if fields.get("load_in_4bit") or fields.get("load_in_8bit"):
        return "bitsandbytes"
    named = (fields.get("quant_method"), (fields.get("producer") or {}).get("name"), fields.get("quant_algo"))
    return str(next((name for name in named if name), "by no method that is named"))


def read_config(directory: Path) -> Any:
    """transformers' configuration of the model in a directory. Raises: UnsupportedModel, OSError."""
    import transformers

    with refusing(f"the model in {directory}"):
        return from_directory(transformers.AutoConfig, directory)


def read_model(hf_config: Any) -> ModelConfig:
    """Layers of a model and the state that they keep, by its configuration. Raises: UnsupportedModel."""
    try:
        return read(hf_config)
    except LayoutError as error:
        raise UnsupportedModel(f"a model of type {hf_config.model_type} cannot be served: {error}") from error


def end_tokens(directory: Path, hf_config: Any) -> frozenset[int]:
    """The tokens that end an answer: by the model's own generation configuration, or if it has none, by its configuration.

    Raises: ValueError naming the file if it is damaged, and its key if that holds no token ids; OSError.
    """
    import transformers

    path = directory / "generation_config.json"
    if path.is_file():
        ends = json_object(path).get("eos_token_id")
    else:
        path = directory / "config.json"
        ends = transformers.GenerationConfig.from_model_config(hf_config).eos_token_id
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(token_id) is int for token_id in listed):
        raise UnsupportedModel(f"eos_token_id in {path} is {ends!r}; wanted a token id, a list of them, or null")
    return frozenset(listed)
