"""Weights of a decoder: from the safetensors of a directory by the names of transformers, or at random."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open

from vmmkv_server.engine.models.checkpoint import FLOATS, INDEX, SINGLE, Stored, headers, refuse_misfits
from vmmkv_server.engine.models.decoder import DecoderConfig, DecoderWeights, Unsupported, empty
from vmmkv_server.engine.models.shard import Shard

_EMBEDDING: Final = "model.embed_tokens.weight"

_HEAD: Final = "lm_head.weight"


def load(directory: Path, shard: Shard, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """Read `model.safetensors`, or the shards of `model.safetensors.index.json`, straight into the fused tensors of a rank.

    All names and shapes are checked before any memory is taken; the host holds one tensor at a time beside the page cache.
    Raises: Unsupported without such files; WeightsMismatch, naming the tensors; ValueError for a file that is cut off; OSError.
    """
    stored = headers(directory)
    if not stored:
        raise Unsupported(f"{directory} has neither {SINGLE} nor {INDEX}; transformers' save_pretrained writes them")
    if shard.whole.tied and _HEAD in stored:
        shard = replace(shard, whole=_settle_tie(shard.whole, stored))
    _check(directory, stored, empty(shard.whole, torch.device("meta"), dtype).named(shard.whole))
    weights = empty(shard.own, device, dtype)
    places = weights.named(shard.own)
    for path in sorted({tensor.path for tensor in stored.values()}):
        with safe_open(path, framework="pt") as file:
            for name, tensor in stored.items():
                if tensor.path == path and name in places:
                    shard.copy(name, places[name], file.get_tensor(tensor.name))
    return weights


def random(shard: Shard, device: torch.device, dtype: torch.dtype, seed: int) -> DecoderWeights:
    """Normal numbers of standard deviation `initializer_range`, made on the device; norms are ones. For benchmarks.

    They do not depend on the number of ranks: each rank makes all, and keeps its part.
    """
    weights = empty(shard.own, device, dtype)
    places = weights.named(shard.own)
    generator = torch.Generator(device).manual_seed(seed)
    for name, whole in empty(shard.whole, torch.device("meta"), dtype).named(shard.whole).items():
        place = places.get(name)
        if name.endswith("norm.weight"):
            places[name].fill_(1.0)
            continue
        is_whole = place is not None and place.shape == whole.shape
        made = place if is_whole and place is not None else torch.empty(whole.shape, device=device, dtype=dtype)
        made.normal_(0.0, shard.whole.initializer_range, generator=generator)
        if place is not None and place is not made:
            shard.copy(name, place, made)
    return weights


def _settle_tie(config: DecoderConfig, stored: dict[str, Stored]) -> DecoderConfig:
    """A tied model has an output matrix of its own: do as transformers, and believe the tensors.

    If the embedding is another, they are not tied; else the one serves as both, whichever name it has.
    """
    if _EMBEDDING in stored and not torch.equal(stored[_EMBEDDING].read(), stored[_HEAD].read()):
        return replace(config, tied=False)
    stored.setdefault(_EMBEDDING, stored.pop(_HEAD))
    return config


def _check(directory: Path, stored: Mapping[str, Stored], wanted: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsMismatch, naming what is missing, unexpected, or of another shape or type."""
    both = sorted(stored.keys() & wanted.keys())
    shapes = {name: tuple(wanted[name].shape) for name in both}
    refuse_misfits(
        directory,
        {
            "missing": sorted(wanted.keys() - stored.keys()),
            "unexpected": sorted(stored.keys() - wanted.keys()),
            "of another shape": [
                f"{name} is {stored[name].shape}, wanted {shapes[name]}" for name in both if stored[name].shape != shapes[name]
            ],
            "of a type that is no plain float": [
                f"{name} is {stored[name].dtype}" for name in both if stored[name].dtype not in FLOATS
            ],
        },
    )
