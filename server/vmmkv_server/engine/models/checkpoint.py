"""The tensors of a model's directory: their names and types, and whether their numbers are its weights.

A quantised checkpoint has codes in place of weights, and scales to unpack them with. Codes read as weights are noise. So codes
that nothing here can unpack are refused before a weight is read. FP8 by blocks is unpacked by transformers. That library fills
missing tensors with random numbers, and passes over those that its model lacks: both are refused here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from vmmkv.arguments import json_object
from vmmkv_server.engine.servable import INSTEAD, quantised_by
from vmmkv_server.models import UnsupportedModel, from_directory

FLOATS: Final = ("F64", "F32", "F16", "BF16")
"""Names in safetensors of the types that weights may have. Others are codes, and need more than a copy."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_COMPUTED: Final = (".rotary_emb.inv_freq", ".masked_bias")
"""Older checkpoints have these tensors, which follow from the configuration or from the code."""

_BY_BLOCKS: Final = ("fp8", "mxfp8")
"""Methods whose weights transformers unpacks by a scale for each block, on any device and without another library."""

_NAMED: Final = 4
"""Tensors that an error names of each kind: where one layer's are missing all layers' are."""


class WeightsMismatch(UnsupportedModel):
    """The tensors of a directory are not those of the model that its configuration describes."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, not read yet."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> torch.Tensor:
        """The tensor, in memory of the host."""
        with safe_open(self.path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(self.name)
        return tensor


def headers(directory: Path) -> dict[str, Stored]:
    """The tensors of a directory by name; none is read. Empty if it has neither of the files that transformers saves.

    Raises: ValueError for a file that is cut off; OSError.
    """
    if (directory / SINGLE).is_file():
        paths = [directory / SINGLE]
    elif (directory / INDEX).is_file():
        names = _weight_map(directory / INDEX).values()
        paths = [directory / name for name in sorted(set(names))]
    else:
        return {}
    stored: dict[str, Stored] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    header = file.get_slice(name)
                    stored[name] = Stored(path, name, tuple(header.get_shape()), header.get_dtype())
        except SafetensorError as error:
            raise ValueError(f"{path} is no whole safetensors file: {error}; copy or download it again") from error
    return {name: tensor for name, tensor in stored.items() if not name.endswith(_COMPUTED)}


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index that transformers saves. Raises: ValueError naming the index; OSError."""
    files = json_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{index} is damaged: it has no weight_map of tensors to files; copy or download it again")
    return files


def refuse_made_codes(directory: Path, config: Any) -> None:
    """Raise UnsupportedModel if random weights were made for a quantised checkpoint, as plain numbers."""
    if (method := quantised_by(directory, config)) is not None:
        raise UnsupportedModel(
            f"load_format='dummy' makes plain weights, and those of {directory} are quantised ({method}): they would be of "
            "another size and speed; take quantization_config out of its config.json to measure the model unquantised"
        )


def refuse_codes(directory: Path, config: Any) -> None:
    """Raise UnsupportedModel if a checkpoint has codes in place of weights which nothing here can unpack.

    It goes by the types of the tensors; `check_servable` has refused unknown methods.
    """
    method = quantised_by(directory, config)
    if method not in (None, *_BY_BLOCKS):
        return  # transformers unpacks them, or says what it lacks
    stored = headers(directory)
    codes = [
        f"{name} is {tensor.dtype}"
        for name, tensor in stored.items()
        if _is_code(tensor) and not (method and _has_scale(name, stored))
    ]
    if codes:
        reason = (
            "config.json does not say by which method"
            if method is None
            else "no scales by blocks (weight_scale_inv) are beside them"
        )
        raise UnsupportedModel(
            f"tensors in {directory} are of a type that is no plain float, and {reason}: {_some(codes)}; {INSTEAD}"
        )


def _is_code(tensor: Stored) -> bool:
    """Has a tensor codes: small floats, or integers in place of a weight? Masks and positions are integers too."""
    return tensor.dtype not in FLOATS and (tensor.dtype.startswith(("F8", "F4")) or tensor.name.endswith("weight"))


def _has_scale(name: str, stored: Mapping[str, Stored]) -> bool:
    """Has a tensor of codes by blocks its scales beside it, or is it scales itself?"""
    is_scale = name.endswith(("_scale_inv", ".scale"))
    return is_scale or f"{name}_scale_inv" in stored or f"{name.removesuffix('weight')}scale" in stored


def load_by_transformers(directory: Path, config: Any, dtype: torch.dtype) -> Any:
    """A model of transformers with the weights of a directory, in memory of the host. FP8 by blocks is unpacked to `dtype`.

    Raises: WeightsMismatch, naming tensors that are missing, of another shape, or not of the model; else as transformers does.
    """
    from transformers import AutoModelForCausalLM

    if quantised_by(directory, config) in _BY_BLOCKS:
        for part in (config, config.get_text_config()):
            if said := getattr(part, "quantization_config", None):
                said["dequantize"] = True  # else on a GPU transformers fetches kernels from a hub
    options = {"config": config, "dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = from_directory(AutoModelForCausalLM, directory, **options)
    refuse_misfits(
        directory,
        {
            "missing": sorted(info["missing_keys"]),
            "unexpected": sorted(name for name in info["unexpected_keys"] if _counts(name, model)),
            "of another shape": [
                f"{name} is {tuple(given)}, wanted {tuple(wanted)}" for name, given, wanted in sorted(info["mismatched_keys"])
            ],
        },
    )
    return model


def _counts(name: str, model: Any) -> bool:
    """Would a tensor that a model did not take change its results?

    It would in a module or a layer that the model has: a bias, a norm, a scale. It would not in another part, such as a vision
    tower or a layer that predicts further tokens, nor in place of a buffer that is computed.
    """
    return not name.endswith(_COMPUTED) and any(_is_of(root, name.split(".")) for root in (model, model.base_model))


def _is_of(root: torch.nn.Module, path: Sequence[str]) -> bool:
    module, in_layer = root, False
    for part in path[:-1]:
        child = module._modules.get(part)
        if child is None:
            return in_layer
        in_layer = in_layer or isinstance(module, torch.nn.ModuleList)
        module = child
    return path[-1] not in module._buffers


def refuse_misfits(directory: Path, problems: Mapping[str, Sequence[str]]) -> None:
    """Refuse tensors with problems, given as texts with the tensors' names. Raises: WeightsMismatch."""
    found = "; ".join(f"{what}: {_some(names)}" for what, names in problems.items() if names)
    if found:
        raise WeightsMismatch(f"the tensors in {directory} are not those of the model in its config.json. {found}")


def _some(names: Sequence[str]) -> str:
    """The first few names as text, and the number of the others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
