"""The tensors of a decoder: what is multiplied with the same input is one matrix, whose parts transformers names one by one.

Legend: V vocabulary, E hidden, H query heads, K kv heads, D head dim, F MLP width; C = (H + 2 K) D and G = 2 F are rows of
fused matrices.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from vmmkv.server.engine.models.config import DecoderConfig, Unsupported, WeightsMismatch

# -------- parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Matrices are [rows out, columns in], as torch's linear has them."""

    attention_norm_E: torch.Tensor
    qkv_CE: torch.Tensor
    """Rows of q, of k, of v."""
    qkv_bias_C: torch.Tensor | None
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    out_EI: torch.Tensor
    """I = H D"""
    out_bias_E: torch.Tensor | None
    mlp_norm_E: torch.Tensor
    gate_up_GE: torch.Tensor
    """Rows of gate, then of up."""
    gate_up_bias_G: torch.Tensor | None
    down_EF: torch.Tensor
    down_bias_E: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All of a decoder's tensors, of one dtype on one device."""

    embedding_VE: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm_E: torch.Tensor
    head_VE: torch.Tensor
    """The embedding itself if they are tied."""

    def named(self, config: DecoderConfig) -> dict[str, torch.Tensor]:
        """Views of the tensors, and of the parts of fused ones, by the names that transformers saves them under."""
        places = {"model.embed_tokens.weight": self.embedding_VE, "model.norm.weight": self.norm_E}
        if self.head_VE is not self.embedding_VE:
            places["lm_head.weight"] = self.head_VE
        for index, layer in enumerate(self.layers):
            places |= {f"model.layers.{index}.{name}": place for name, place in _named_in(layer, config) if place is not None}
        return places


def _named_in(layer: LayerWeights, config: DecoderConfig) -> Iterator[tuple[str, torch.Tensor | None]]:
    yield "input_layernorm.weight", layer.attention_norm_E
    yield "self_attn.q_norm.weight", layer.q_norm_D
    yield "self_attn.k_norm.weight", layer.k_norm_D
    yield "self_attn.o_proj.weight", layer.out_EI
    yield "self_attn.o_proj.bias", layer.out_bias_E
    yield "post_attention_layernorm.weight", layer.mlp_norm_E
    yield "mlp.down_proj.weight", layer.down_EF
    yield "mlp.down_proj.bias", layer.down_bias_E
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for kind, qkv, gate_up in (
        ("weight", layer.qkv_CE, layer.gate_up_GE),
        ("bias", layer.qkv_bias_C, layer.gate_up_bias_G),
    ):
        if qkv is not None:
            for name, part in zip("qkv", torch.split(qkv, [q_rows, kv_rows, kv_rows]), strict=True):
                yield f"self_attn.{name}_proj.{kind}", part
        if gate_up is not None:
            for name, part in zip(("gate", "up"), gate_up.chunk(2), strict=True):
                yield f"mlp.{name}_proj.{kind}", part


def empty(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> Weights:
    """The tensors of such a decoder, not filled yet. On the device `meta` they take no memory."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    hidden, mlp = config.hidden_size, config.mlp_size
    q_rows = config.num_heads * config.head_dim
    qkv_rows = q_rows + 2 * config.num_kv_heads * config.head_dim

    def layer() -> LayerWeights:
        return LayerWeights(
            attention_norm_E=tensor(hidden),
            qkv_CE=tensor(qkv_rows, hidden),
            qkv_bias_C=tensor(qkv_rows) if config.qkv_bias else None,
            q_norm_D=tensor(config.head_dim) if config.qk_norm else None,
            k_norm_D=tensor(config.head_dim) if config.qk_norm else None,
            out_EI=tensor(hidden, q_rows),
            out_bias_E=tensor(hidden) if config.out_bias else None,
            mlp_norm_E=tensor(hidden),
            gate_up_GE=tensor(2 * mlp, hidden),
            gate_up_bias_G=tensor(2 * mlp) if config.mlp_bias else None,
            down_EF=tensor(hidden, mlp),
            down_bias_E=tensor(hidden) if config.mlp_bias else None,
        )

    embedding_VE = tensor(config.vocab_size, hidden)
    return Weights(
        embedding_VE=embedding_VE,
        layers=tuple(layer() for _ in range(config.num_layers)),
        norm_E=tensor(hidden),
        head_VE=embedding_VE if config.tied else tensor(config.vocab_size, hidden),
    )


def param_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights."""
    return sum(place.nbytes for place in empty(config, torch.device("meta"), dtype).named(config).values())


def step_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of weights that a decode step reads, whatever its batch: all but an embedding that is no output matrix too.

    Of that it reads one row a token, which is not counted.
    """
    embedding_bytes = config.vocab_size * config.hidden_size * dtype.itemsize
    return param_bytes(config, dtype) - (0 if config.tied else embedding_bytes)


# -------- weights
# Weights: from the safetensors of a directory by the names of transformers, or at random.

_FLOATS: Final = ("F64", "F32", "F16", "BF16")
"""What safetensors calls the types that weights may have. Others are quantised, and need more than a copy."""

_COMPUTED: Final = ".rotary_emb.inv_freq"
"""Older checkpoints have these, which follow from the configuration; nobody reads them any more."""

_NAMED: Final = 4
"""Tensors that an error names of each kind: where one layer's are missing all layers' are."""

_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file, not read yet."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> torch.Tensor:
        with safe_open(self.path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(self.name)
        return tensor


def load(directory: Path, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> Weights:
    """Read `model.safetensors`, or the shards of `model.safetensors.index.json`, straight into the fused tensors.

    All names and shapes are checked before any memory is taken; the host holds one tensor at a time beside the page cache.
    Raises: Unsupported without such files; WeightsMismatch, naming the tensors; ValueError for a file that is cut off; OSError.
    """
    stored = _headers(directory)
    if config.tied and _HEAD in stored:
        config = _settle_tie(config, stored)
    _check(directory, stored, empty(config, torch.device("meta"), dtype).named(config))
    weights = empty(config, device, dtype)
    places = weights.named(config)
    for path in sorted({tensor.path for tensor in stored.values()}):
        with safe_open(path, framework="pt") as file:
            for name, tensor in stored.items():
                if tensor.path == path:
                    places[name].copy_(file.get_tensor(tensor.name))
    return weights


def random(config: DecoderConfig, device: torch.device, dtype: torch.dtype, seed: int) -> Weights:
    """Normal numbers of standard deviation `initializer_range`, made on the device; norms are ones. For benchmarks."""
    weights = empty(config, device, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for name, place in weights.named(config).items():
        if name.endswith("norm.weight"):
            place.fill_(1.0)
        else:
            place.normal_(0.0, config.initializer_range, generator=generator)
    return weights


def _headers(directory: Path) -> dict[str, _Stored]:
    """What tensors the directory has, by name; none is read."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        paths = [single]
    elif index.is_file():
        paths = [directory / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]
    else:
        raise Unsupported(f"{directory} has neither {single.name} nor {index.name}; transformers' save_pretrained writes them")
    stored: dict[str, _Stored] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    header = file.get_slice(name)
                    stored[name] = _Stored(path, name, tuple(header.get_shape()), header.get_dtype())
        except SafetensorError as error:
            raise ValueError(f"{path} is no whole safetensors file: {error}; copy or download it again") from error
    return {name: tensor for name, tensor in stored.items() if not name.endswith(_COMPUTED)}


def _settle_tie(config: DecoderConfig, stored: dict[str, _Stored]) -> DecoderConfig:
    """A tied model has an output matrix of its own: do as transformers, and believe the tensors.

    If the embedding is another, they are not tied; else the one serves as both, whichever name it has.
    """
    if _EMBEDDING in stored and not torch.equal(stored[_EMBEDDING].read(), stored[_HEAD].read()):
        return replace(config, tied=False)
    head = stored.pop(_HEAD)
    stored.setdefault(_EMBEDDING, head)
    return config


def _check(directory: Path, stored: Mapping[str, _Stored], wanted: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsMismatch, naming what is missing, unexpected, or of another shape or type."""
    both = sorted(stored.keys() & wanted.keys())
    shapes = {name: tuple(wanted[name].shape) for name in both}
    problems = {
        "missing": sorted(wanted.keys() - stored.keys()),
        "unexpected": sorted(stored.keys() - wanted.keys()),
        "of another shape": [
            f"{name} is {stored[name].shape}, wanted {shapes[name]}" for name in both if stored[name].shape != shapes[name]
        ],
        "of a type that is no plain float": [
            f"{name} is {stored[name].dtype}" for name in both if stored[name].dtype not in _FLOATS
        ],
    }
    found = "; ".join(f"{what}: {_some(names)}" for what, names in problems.items() if names)
    if found:
        raise WeightsMismatch(f"the tensors in {directory} are not those of the model in its config.json. {found}")


def _some(names: list[str]) -> str:
    """The first few of them, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
