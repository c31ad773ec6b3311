"""The one reader of a model's configuration: what each of its layers keeps of the tokens that it has seen.

`read` takes a configuration of transformers, or the dict of a config.json, and gives a `ModelConfig`: for each layer the parts
that it keeps. `KVLayout.from_config`, `VmmCache`, the engine and `vmmkv plan` all go by it.

    Attention       keys and values by token, of all tokens, of a window or of a chunk
    SharedRows      none of its own: it reads those of another layer
    Latent          one vector by token, which stands for the keys and values of all heads
    IndexKeys       keys by which an indexer chooses the tokens to attend to
    Compressed      one vector for several tokens
    CrossAttention  keys and values of another input, such as an image
    State           bytes of a sequence that every token overwrites: a recurrent state, the last inputs of a convolution

A dict is read by transformers' own class, which knows the defaults of its type; one of a few other types by its fields. A type,
a kind of layer or a field that is not known here is refused by name. An object of a class that is not transformers' is read by
its fields.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

from vmmkv.arguments import check_num_layers, whole
from vmmkv.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Attention:
    """Keys and values of each token: `heads` vectors of `key_dim` and of `value_dim` elements."""

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Last tokens that the layer attends to; None for all."""
    chunk: int | None = None
    """Tokens of a chunk, if the layer attends only within the chunk that a token is in."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """A layer without rows of its own: it attends to those of layer `layer`."""

    layer: int


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: a vector of `dim` elements for each token."""

    dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """A key of `dim` elements for each token. `scaled`: kept as float8 with a float32 scale for each 128 elements."""

    dim: int
    scaled: bool


@dataclass(frozen=True, slots=True)
class Compressed:
    """A vector of `dim` elements for each `num_tokens` tokens."""

    dim: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Keys and values of another input than the tokens: `heads` of `dim` each."""

    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class State:
    """State of a recurrent layer, whose size does not depend on the length. `kind`: its name in sentences."""

    kind: str
    num_elements: int
    """Elements of the recurrent state."""
    dtype: str
    """Type of the recurrent state, by its name in torch."""
    num_conv_elements: int = 0
    """Inputs of a convolution that its next output needs, in the type of K and V."""

    def size_bytes(self, kv_itemsize: int) -> int:
        """Bytes for a sequence, where an element of K and V has `kv_itemsize` bytes."""
        return self.num_elements * _ITEMSIZES[self.dtype] + self.num_conv_elements * kv_itemsize


Part: TypeAlias = Attention | SharedRows | Latent | IndexKeys | Compressed | CrossAttention | State

_WEIGHT_TYPES: Final = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2")
"""Types of weights by their names in torch, as files name them."""

_ITEMSIZES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A configuration as far as vmmkv reads it: of the text decoder, for a model of several kinds of input."""

    family: str | None
    """The `model_type`."""
    layers: tuple[tuple[Part, ...], ...]
    """Parts that each layer keeps; none for a layer without attention and state."""
    num_heads: int
    """Attention heads of queries, of the layer that has the fewest; the most that ranks can share."""
    max_tokens: int | None
    """The longest sequence that the model was made for; None if the file does not say."""
    dtype: str | None
    """Type of the weights, by its name in torch."""
    has_sinks: bool = False
    """Has attention sinks, which are no tokens?"""


def read(config: Any) -> ModelConfig:
    """Read the configuration of transformers, an object such as `model.config`, or the dict of a config.json.

    Cost: a dict of most types imports transformers, seconds once.
    Raises: LayoutError, naming the type, the kind of layer or the field that is not known.
    """
    dtype = _weight_dtype(config) if isinstance(config, Mapping) else None
    fields = _Fields.of(config)
    if fields.flag("is_encoder_decoder"):
        fields.refuse("is an encoder and a decoder, whose cross-attention keeps rows of the source too; only decoders are read")
    if fields.family in _ENCODERS and not fields.flag("is_decoder"):
        fields.refuse("is an encoder, which keeps nothing of the tokens; with is_decoder it is read as a decoder")
    layers = _layers(fields)
    fields.check_all_read()
    if not isinstance(config, Mapping):
        dtype = fields.get("torch_dtype" if fields.own.get("torch_dtype") is not None else "dtype")
    return ModelConfig(
        family=fields.family,
        layers=layers,
        num_heads=min(filter(None, (fields.whole("num_attention_heads", layer) for layer in range(len(layers)))), default=1),
        max_tokens=next((value for name in _MAX_TOKENS if (value := fields.whole(name, least=-1) or 0) > 0), None),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        has_sinks=fields.family in WITH_SINKS,
    )


def _weight_dtype(config: Mapping[str, Any]) -> str | None:
    """Type of the weights by a file; a model of several kinds of input may say it once for all of them.

    Raises: LayoutError for what is no name of a type, naming the key: transformers would end in an error of its own.
    """
    inner = _nested(config)
    dtype = _weight_dtype(inner) if inner is not config else None
    for key in ("torch_dtype", "dtype"):
        name = config.get(key)
        if isinstance(name, str):
            name = name.removeprefix("torch.")
        if name is not None and name not in _WEIGHT_TYPES:
            raise LayoutError(f"the configuration has {key}={name!r}; wanted is {', '.join(_WEIGHT_TYPES)}, or no {key}")
        dtype = dtype or name
    return dtype


def shared_rows(layers: Sequence[Sequence[Part]]) -> dict[int, int]:
    """Layers that read another layer's rows, with that layer."""
    return {layer: part.layer for layer, parts in enumerate(layers) for part in parts if isinstance(part, SharedRows)}


def beside_rows(layers: Iterable[Sequence[Part]]) -> dict[str, list[int]]:
    """Layers that keep more than keys and values of all tokens or of a window, by the name of that in sentences."""
    others: dict[str, list[int]] = {}
    for layer, parts in enumerate(layers):
        for name in dict.fromkeys(filter(None, map(_name_beside_rows, parts))):
            others.setdefault(name, []).append(layer)
    return others


def _name_beside_rows(part: Part) -> str:
    match part:
        case Attention(chunk=None) | SharedRows():
            return ""
        case Attention(chunk=chunk):
            return f"keys and values of chunks of {chunk} tokens"
        case Latent():
            return "latents (kv_lora_rank)" if part.window is None else "one vector for keys and values"
        case IndexKeys():
            return "index keys"
        case Compressed():
            return "compressed rows"
        case CrossAttention():
            return "keys and values of another input (cross-attention)"
        case State():
            return f"a state ({part.kind})"


def described(others: Mapping[str, Sequence[int]]) -> str:
    """The result of `beside_rows` as words: `latents (kv_lora_rank) in layers 0 to 3, 5`."""
    return "; ".join(
        f"{name} in {'layer' if len(layers) == 1 else 'layers'} {_runs(layers)}" for name, layers in others.items()
    )


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers as words, runs of three or more by their ends."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(words)


# the fields of a configuration


_NESTED: Final = ("text_config", "llm_config", "language_config")
"""Fields with the configuration of the text decoder of a model of several kinds of input."""

_MAX_TOKENS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
"""Fields with the longest sequence; 0 or -1 of a model without one."""

_ALIASES: Final[Mapping[str, str]] = {
    "deepseek_v3_2": "deepseek_v32",
    "kimi_k2": "deepseek_v3",
    "minimax_m1": "minimax",
    "minimax_m3": "minimax_m3_vl_text",
    "minimax_text_01": "minimax",
}
"""Types of published files, by the type of transformers that has the same layers."""

_AS_WRITTEN: Final[Mapping[str, tuple[str, ...]]] = {
    "llama": ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "max_position_embeddings"),
    "qwen3": ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
}
"""Types whose files say all that is kept, if they have these fields and no window: transformers is not imported for them."""

_BY_FIELDS: Final = _AS_WRITTEN.keys() | {
    "deepseek_v2", "deepseek_v3", "internlm2", "internlm3", "mistral", "mixtral", "nemotron-nas", "orion", "qwen2", "qwen3_moe",
}  # fmt: skip
"""Types whose files are read by their fields, where transformers has no class for them or is not installed."""

_SIZES: Final = frozenset({
    "head_dim", "hidden_size", "n_embd", "n_head", "n_layer", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "num_kv_heads",
})  # fmt: skip
"""Sizes of every layer. 0, false or an empty text would be taken for absent here or in a class of transformers."""

_NEED_KINDS: Final = frozenset({"bamba", "granitemoehybrid", "nemotron_h"})
"""Types of which each model has a pattern of its own, while its class fills in one for a file without."""

_ENCODERS: Final = frozenset({
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""Types that are decoders only if their file says `is_decoder`."""

WITH_SINKS: Final = frozenset({"flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"})
"""Types whose attention is usual but for sinks, of transformers 5.17 to 5.23."""

_KINDS_OF_LAYERS: Final = frozenset({
    "attn_layer_indices", "attn_layer_offset", "attn_layer_period", "attn_layers", "attn_type_list", "block_types",
    "full_attention_interval", "full_attn_idxs", "hybrid_layer_pattern", "hybrid_override_pattern", "layer_types",
    "layers_block_type", "linear_attn_config", "sliding_window_pattern",
})  # fmt: skip
"""Fields that name a kind for each layer: where one is read, the others say the same."""

_LAYERS_BY_NUMBER: Final = ("attn_layer_indices", "cross_attention_layers", "full_attn_idxs")
"""Fields with the numbers of the layers of one kind."""

_TELLING: Final = _KINDS_OF_LAYERS | {
    "attention_chunk_size", "attention_window_size", "block_configs", "cla_share_factor", "compress_rates",
    "compress_ratios", "conv_L_cache", "cross_attention_layers", "global_head_dim", "index_head_dim", "index_kpool",
    "indexer_head_dim", "indexer_types", "kv_lora_rank", "kv_reuse_group", "layer_group_size", "linear_head_dim",
    "linear_num_heads", "linear_num_key_heads", "linear_num_value_heads", "lru_width", "mamba_d_conv", "mamba_d_state",
    "mamba_n_heads", "mamba_num_heads", "multi_query", "multi_query_attention", "multi_query_group_num", "n_mamba_heads",
    "num_global_key_value_heads", "num_key_value_heads_per_layer", "num_kv_heads", "num_kv_shared_layers",
    "sliding_window", "sparse_attention_config", "sparse_config", "ssm_cfg", "ssm_state_size", "swa_head_dim",
    "swa_num_key_value_heads", "swa_v_head_dim", "use_cla",
}  # fmt: skip
"""Fields by which layers keep something else than keys and values of all heads: one that is not read is refused."""

_NUM_KV_NAMES: Final = frozenset({
    "kv_heads", "kv_n_heads", "n_head_kv", "n_heads_kv", "n_kv_heads", "num_attention_groups", "num_key_value_groups",
    "num_query_groups",
})  # fmt: skip
"""Other names of num_key_value_heads, or of what it follows from, in files of types that transformers does not know."""

_RECURRENT_NAMES: Final = re.compile("hybrid|hyena|lightning|linear|mamba|retnet|rwkv|ssm|xlstm")
"""Parts of the names of recurrent types: their layers keep states, whatever fields they have."""


_READ_BY_CLASS: Final[Mapping[str, tuple[str, ...]]] = {
    "deepseek_v4": ("compress_ratios",),
    "gemma4_text": ("global_head_dim",),
    "gemma4_unified_text": ("global_head_dim",),
    "minimax_m3_vl_text": ("sparse_attention_config",),
}
"""Fields of these that transformers' class of a type turns into others, which are read."""


_OF_DECODER: Final[Mapping[str, tuple[str, ...]]] = {
    "num_hidden_layers": ("decoder_layers", "num_decoder_layers"),
    "num_attention_heads": ("decoder_attention_heads", "num_decoder_attention_heads"),
}
"""Fields of the decoder in types that have an encoder too: the general name is the encoder's then."""


class _Fields:
    """The fields of a text decoder's configuration, an object or a dict, and the names of those that were read."""

    def __init__(self, config: Any, family: str | None, written: Mapping[str, Any] | None = None) -> None:
        """`written`: the dict that `config` was read from, if it is an object made from one."""
        self._config = config
        self._written = written or {}
        self.family = family if isinstance(family, str) else None
        self._was_read: set[str] = set()

    @classmethod
    def of(cls, config: Any) -> _Fields:
        """Fields of the text decoder. Raises: LayoutError if transformers' class of its type cannot read it."""
        if not isinstance(config, Mapping):
            nested = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else _nested(config)
            return cls(nested, getattr(nested, "model_type", None))
        own = config
        while (inner := _nested(own)) is not own:
            own = inner
        for name in sorted(_SIZES | _KINDS_OF_LAYERS):
            if (value := own.get(name)) is not None and not value:
                raise LayoutError(f"the configuration has {name}={value!r}; leave it out for the default of its model_type")
        outer, family = config.get("model_type"), own.get("model_type")
        if config.get("is_encoder_decoder"):
            return cls(config, outer)
        family = _ALIASES.get(family, family) if isinstance(family, str) else None
        as_written = _AS_WRITTEN.get(family or "")
        if as_written and all(own.get(name) for name in as_written) and not own.get("sliding_window"):
            return cls(own, family)
        if isinstance(outer, str) and (read := _by_transformers(outer, config, own)) is not None:
            return cls(read, read.model_type, own)
        if family is not None and (read := _by_transformers(family, own, own)) is not None:
            return cls(read, read.model_type, own)
        fields = cls(own, family)
        if not (family in _BY_FIELDS or _is_of_transformers(family)):
            named = own.get("model_type")
            fields.refuse(
                "has no model_type; wanted is the type of its decoder, such as llama"
                if named is None
                else f"has model_type={named!r}, which is not known here: give KVLayout(groups=...) what each layer keeps, or "
                "vmmkv plan --layers, --kv-heads and --head-dim"
            )
        return fields

    def get(self, name: str, layer: int | None = None) -> Any:
        """The value of a field, None if there is none; of one layer, where transformers keeps a configuration for each."""
        for own in _OF_DECODER.get(name, ()):
            if (value := self.get(own, layer)) is not None:
                return value
        config = self._config
        if isinstance(config, Mapping):
            value = config.get(name)
        else:
            if getattr(config, "is_heterogeneous", False):
                if layer is not None:
                    config = config.per_layer_config[layer]
                elif name in config.per_layer_attributes:
                    self.refuse(f"has {name} by layer, and what that means there is not known here")
            try:
                value = getattr(config, name, None)
            except Exception as error:  # some are computed from others
                self.refuse(f"does not say {name}: {type(error).__name__}: {error}")
        if value is not None:
            self._was_read.add(name)
        return value

    def whole(self, name: str, layer: int | None = None, *, least: int = 1) -> int | None:
        """The value of a field as an int, None if there is none. Raises: LayoutError for anything else, or for less.

        A class of transformers may take 0 or False for absent: what the file says is checked too.
        """
        value = self.get(name, layer)
        for each in (self._written.get(name), value):
            if each is not None:
                self.checked(name, each, least=least)
        return None if value is None else self.checked(name, value, least=least)

    def flag(self, name: str) -> bool | None:
        """The value of a field that is true or false, None if there is none. Raises: LayoutError for anything else."""
        value = self.get(name)
        if not isinstance(value, bool | None):
            self.refuse(f"has {name}={value!r}; wanted is true or false")
        return value

    def checked(self, name: str, value: Any, *, least: int) -> int:
        """A value as an int. Raises: LayoutError, naming it, for anything else, or for less."""
        number = whole(name, value, error=LayoutError)
        if number < least:
            self.refuse(f"has {name}={number}; wanted is at least {least}")
        return number

    def need(self, *names: str, layer: int | None = None) -> int:
        """The first of these fields that is there. Raises: LayoutError naming them."""
        for name in names:
            if (value := self.whole(name, layer)) is not None:
                return value
        self.refuse(f"has no {' or '.join(names)}: is it that of a decoder?")

    def listed(self, name: str) -> list[Any]:
        """The values of a field that is a list, none if there is none. Raises: LayoutError for anything else."""
        values = self.get(name)
        for each in (self._written.get(name), values):
            if not isinstance(each, list | tuple | None):
                self.refuse(f"has {name}={each!r}, which is no list")
        return list(values or ())

    def switches(self, name: str) -> list[bool]:
        """The values of a field that is a list of 0 and 1, none if there is none. Raises: LayoutError for anything else."""
        values = self.listed(name)
        if odd := [value for value in values if value not in (0, 1)]:
            self.refuse(f"has {odd[0]!r} in {name}; wanted is 0 or 1 for each layer")
        return [bool(value) for value in values]

    def check_kinds_are_said(self) -> None:
        """Check that a file names the kinds of its layers, if its type has no default for them. Raises: LayoutError."""
        if self.family in _NEED_KINDS and self._written and not _KINDS_OF_LAYERS & self._written.keys():
            self.refuse("does not say which of its layers attend: layer_types, or the pattern of its type, is missing")

    def refuse(self, reason: str) -> NoReturn:
        """Raise LayoutError."""
        of_family = f" ({self.family})" if self.family else ""
        hint = ""
        if self.family and isinstance(self._config, Mapping) and not has_transformers():
            hint = (
                "; transformers, which knows more of its fields, is not installed: pip install '.[hf]', or give --layers, "
                "--kv-heads and --head-dim"
            )
        raise LayoutError(f"the configuration{of_family} {reason}{hint}")

    @property
    def own(self) -> Mapping[str, Any]:
        """The fields by name, without what a class computes from others."""
        return self._config if isinstance(self._config, Mapping) else vars(self._config)

    @property
    def is_file(self) -> bool:
        """Are these the fields of a file alone, without defaults of a class?"""
        return isinstance(self._config, Mapping)

    @property
    def of_transformers(self) -> bool:
        """Has a class of transformers filled in the fields that the file leaves out?"""
        return type(self._config).__module__.startswith("transformers.models.")

    def check_all_read(self) -> None:
        """Check that all fields were read that say what layers keep. Raises: LayoutError."""
        if self._was_read & _KINDS_OF_LAYERS:
            self._was_read |= _KINDS_OF_LAYERS
        known = self._was_read.union(_READ_BY_CLASS.get(self.family or "", ()))
        if self.flag("use_sliding_window") is False or "layer_types" in self._was_read:
            known.add("sliding_window")
        if self.of_transformers and "layer_types" in self._was_read:
            known |= {"attention_chunk_size", "index_head_dim", "indexer_types"}  # those of kinds that no layer has
        if self.flag("attention_k_eq_v"):
            known.add("num_global_key_value_heads")
        own = self.own
        telling = _TELLING
        if not self.of_transformers:
            if _RECURRENT_NAMES.search(self.family or ""):
                self.refuse("is of a type that keeps states, and which is not known here")
            if "num_key_value_heads" not in self._was_read:
                telling = telling | _NUM_KV_NAMES
        unread = [name for name in sorted(telling - known) if self._written.get(name) or own.get(name)]
        if unread:
            self.refuse(
                f"says what its layers keep by {', '.join(unread)}, which is not known here; give KVLayout(groups=...) what "
                f"each layer keeps, or vmmkv plan --layers, --kv-heads and --head-dim"
            )


def has_transformers() -> bool:
    """Is transformers installed?"""
    return importlib.util.find_spec("transformers") is not None


def _is_of_transformers(family: str | None) -> bool:
    """Has transformers a class for this type? False if it is not installed."""
    if family is None or not has_transformers():
        return False
    from transformers import CONFIG_MAPPING

    return family in CONFIG_MAPPING


def _nested(config: Any) -> Any:
    """The text decoder's part of a configuration of several kinds of input; itself, if it has none."""
    if isinstance(config, Mapping):
        return next((config[name] for name in _NESTED if isinstance(config.get(name), Mapping)), config)
    return next((getattr(config, name) for name in _NESTED if getattr(config, name, None) is not None), config)


def _by_transformers(family: str, config: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """The text decoder's configuration as transformers' class of this type reads it.

    None for a type that transformers does not know, and for a file without the parts that its class has: the class would fill
    in a decoder of its own. `own`: the fields of the decoder in the file.
    Raises: LayoutError if the class cannot read it.
    """
    if not _is_of_transformers(family):
        return None
    from transformers import CONFIG_MAPPING

    check_num_layers(own.get("num_hidden_layers"))
    try:
        known = CONFIG_MAPPING[family].from_dict({**config, "model_type": family})
        read = known.get_text_config(decoder=True)
    except Exception as error:  # each of its classes has errors of its own
        reason = " ".join(str(error).split())
        raise LayoutError(f"transformers cannot read it as the configuration of a {family}: {reason}") from error
    num_layers = own.get("num_hidden_layers")
    if read is not known and own is config:  # a file of one part, and a class of several
        given = {
            name: own[name]
            for name in ("num_hidden_layers", "num_attention_heads", "layer_types", "hidden_size")
            if name in own
        }
        if any(getattr(read, name, None) != value for name, value in given.items()):
            return None
    if num_layers is not None and (made := getattr(read, "num_hidden_layers", num_layers)) != num_layers:
        by = ", ".join(sorted(name for name in _KINDS_OF_LAYERS if own.get(name))) or "its type's default, not its own pattern"
        raise LayoutError(f"the configuration ({family}) has {num_layers} layers, and says a kind for {made} by {by}")
    return read


# the layers


def _layers(fields: _Fields) -> tuple[tuple[Part, ...], ...]:
    if fields.get("block_configs") is not None:
        return _of_blocks(fields)
    num_layers = 2 * fields.need("num_layers") if fields.family == "longcat_flash" else fields.need("num_hidden_layers")
    check_num_layers(num_layers)
    fields.check_kinds_are_said()
    kinds = _kinds(fields, num_layers)
    if len(kinds) != num_layers:
        fields.refuse(f"has {num_layers} layers, and says a kind for {len(kinds)}")
    if unknown := sorted({str(kind) for kind in kinds if kind not in _PARTS}):
        fields.refuse(f"has layers of type {', '.join(unknown)}; known are {', '.join(_PARTS)}")
    num_own = num_layers - (fields.whole("num_kv_shared_layers", least=0) or 0)
    if not 0 < num_own <= num_layers:
        fields.refuse(f"has {num_layers} layers, of which {num_layers - num_own} read the rows of others")
    for name in _LAYERS_BY_NUMBER:
        numbers = fields.listed(name)
        if odd := [layer for layer in numbers if type(layer) is not int or not 0 <= layer < num_layers]:
            fields.refuse(f"has {num_layers} layers, and {name} says {odd[0]!r} of them")
    crossing = fields.listed("cross_attention_layers")
    layers: list[tuple[Part, ...]] = []
    for layer, kind in enumerate(kinds):
        if layer >= num_own:
            if kind not in kinds[:num_own]:
                fields.refuse(f"has layer {layer} read the rows of another of type {kind}, and there is none")
            layers.append((SharedRows(num_own - 1 - kinds[num_own - 1 :: -1].index(kind)),))
        elif layer in crossing:
            rows = _attention(fields, layer)
            layers.append((CrossAttention(rows.heads, rows.key_dim),))
        else:
            layers.append(tuple(_PARTS[kind](fields, layer)))
    return tuple(layers)


def _kinds(fields: _Fields, num_layers: int) -> list[str]:
    """The kind of each layer, by the names of transformers."""
    if fields.family == "mimo_v2_flash" and (pattern := fields.switches("hybrid_layer_pattern")):
        fields.get("attention_chunk_size")  # the window once more
        return ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    if fields.family == "recurrent_gemma":
        blocks = [str(kind) for kind in fields.listed("block_types")] or ["recurrent", "recurrent", "attention"]
        fields.get("attention_window_size")  # transformers calls it sliding_window too
        kinds = {"recurrent": "linear_attention", "attention": "sliding_attention"}
        return [kinds.get(blocks[layer % len(blocks)], blocks[layer % len(blocks)]) for layer in range(num_layers)]
    if fields.family == "rwkv":
        return ["linear_attention"] * num_layers
    if fields.family == "minimax" and (pattern := fields.switches("attn_type_list")):
        return ["full_attention" if full else "linear_attention" for full in pattern]
    if fields.get("layer_types") is not None:
        return [_OTHER_NAMES.get(str(kind), str(kind)) for kind in fields.listed("layer_types")]
    if fields.flag("use_sliding_window") is not False and fields.whole("sliding_window") is not None:
        pattern = fields.get("sliding_window_pattern")
        if isinstance(pattern, int) and (every := fields.whole("sliding_window_pattern")) is not None:
            return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]
        if not (fields.of_transformers or fields.family is None):
            fields.refuse("does not say by layer_types which layers have its sliding_window")
        return ["sliding_attention"] * num_layers
    if fields.of_transformers and fields.whole("attention_chunk_size") is not None:
        return ["chunked_attention"] * num_layers
    return ["full_attention"] * num_layers


_OTHER_NAMES: Final[Mapping[str, str]] = {"attention": "full_attention", "mamba": "linear_attention"}
"""Kinds of layers in older files, by their names in transformers."""


def _of_blocks(fields: _Fields) -> tuple[tuple[Part, ...], ...]:
    """The layers of a model whose file describes each: `block_configs` (Nemotron-NAS)."""
    blocks = fields.listed("block_configs")
    layers: list[tuple[Part, ...]] = []
    heads = fields.need("num_attention_heads")
    head_dim = fields.whole("head_dim") or fields.need("hidden_size") // heads
    if len(blocks) != fields.need("num_hidden_layers"):
        fields.refuse(f"has {fields.need('num_hidden_layers')} layers, and block_configs are {len(blocks)}")
    for layer, block in enumerate(blocks):
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            fields.refuse(f"does not say by block_configs what the attention of layer {layer} is")
        if odd := [name for name in ("num_sink_tokens", "sparsify", "unshifted_sink") if attention.get(name)]:
            fields.refuse(f"says by {', '.join(odd)} of block_configs what layer {layer} keeps, which is not known here")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            layers.append(())
        else:
            sharing = attention.get("n_heads_in_group")
            if not isinstance(sharing, int) or not 1 <= sharing <= heads:
                fields.refuse(f"has n_heads_in_group={sharing!r} in layer {layer} of block_configs, of {heads} heads")
            num_kv, window = heads // sharing, attention.get("window_length")
            window = None if window is None else fields.checked(f"window_length of layer {layer}", window, least=1)
            layers.append((Attention(num_kv, head_dim, head_dim, window=window),))
    return tuple(layers)


# the parts of a layer


def _attention(fields: _Fields, layer: int, window: int | None = None, chunk: int | None = None) -> Attention:
    heads = fields.need("num_attention_heads", layer=layer)
    prefix = "swa_" if window is not None and fields.family == "mimo_v2_flash" else ""
    dim = fields.whole(f"{prefix}head_dim", layer) or fields.whole("kv_channels", layer) or fields.whole("dim_head")
    dim = dim or fields.need("hidden_size", layer=layer) // heads
    read_num_kv = _NUM_KV_HEADS.get(fields.family or "")
    num_kv = None if read_num_kv is None else read_num_kv(fields)
    num_kv = num_kv or fields.whole(f"{prefix}num_key_value_heads", layer)
    if num_kv is None and fields.is_file:
        fields.refuse("has no num_key_value_heads, and how many heads of keys its type has by default is not known here")
    num_kv = num_kv or heads
    return Attention(num_kv, dim, fields.whole(f"{prefix}v_head_dim", layer) or dim, window, chunk)


def _of_falcon(fields: _Fields) -> int | None:
    num_kv, multi_query = fields.whole("num_kv_heads"), fields.flag("multi_query")
    if fields.flag("new_decoder_architecture"):
        return num_kv
    return 1 if multi_query else None


def _of_mpt(fields: _Fields) -> None:
    attention = fields.get("attn_config")
    kind = attention.get("attn_type") if isinstance(attention, Mapping) else getattr(attention, "attn_type", None)
    if kind not in (None, "multihead_attention"):
        fields.refuse(f"has attn_type {kind!r} in attn_config, which is not known here")


_NUM_KV_HEADS: Final[Mapping[str, Callable[[_Fields], int | None]]] = {
    "falcon": _of_falcon,
    "gpt_bigcode": lambda fields: 1 if fields.flag("multi_query") else None,
    "mpt": _of_mpt,
}
"""KV heads of types that have no num_key_value_heads; None for one of each query head."""


def _full(fields: _Fields, layer: int) -> Iterable[Part]:
    if rank := fields.whole("kv_lora_rank"):
        return (Latent(rank + (fields.whole("qk_rope_head_dim", least=0) or 0)),)
    return (_attention(fields, layer),)


def _windowed(fields: _Fields, layer: int) -> Iterable[Part]:
    window = fields.need("sliding_window", layer=layer)
    if fields.family == "deepseek_v4":
        return (Latent(fields.need("head_dim"), window),)
    if rank := fields.whole("kv_lora_rank"):
        return (Latent(rank + (fields.whole("qk_rope_head_dim", least=0) or 0), window),)
    return (_attention(fields, layer, window=window),)


def _chunked(fields: _Fields, layer: int) -> Iterable[Part]:
    return (_attention(fields, layer, chunk=fields.need("attention_chunk_size")),)


def _indexed(fields: _Fields, layer: int) -> Iterable[Part]:
    """Attention to the tokens that an indexer chooses; a layer may go by the choice of the one before."""
    kinds = fields.listed("indexer_types")
    if kinds and layer >= len(kinds):
        fields.refuse(f"does not say by indexer_types whether layer {layer} has an indexer of its own")
    yield from _full(fields, layer)
    if not kinds or kinds[layer] == "full":
        yield IndexKeys(fields.need("index_head_dim"), scaled=True)


def _block_sparse(fields: _Fields, layer: int) -> Iterable[Part]:
    return *_full(fields, layer), IndexKeys(fields.need("index_head_dim"), scaled=False)


def _compressed(fields: _Fields, layer: int, kind: str) -> Iterable[Part]:
    """DeepSeek-V4: a window, compressed rows behind it, and the inputs of the next of these."""
    dim, index_dim = fields.need("head_dim"), fields.need("index_head_dim")
    rates = fields.get("compress_rates")
    num_tokens = rates.get(kind) if isinstance(rates, Mapping) else None
    if type(num_tokens) is not int or num_tokens < 1:
        fields.refuse(f"does not say by compress_rates how many tokens a row of {kind} is for")
    yield Latent(dim, fields.need("sliding_window"))
    yield Compressed(dim, num_tokens)
    overlap, dims = 1, [dim]
    if kind == "compressed_sparse_attention":  # its indexer has compressed keys too, and both overlap
        yield Compressed(index_dim, num_tokens)
        overlap, dims = 2, [dim, index_dim]
    inputs = sum(2 * overlap * num_tokens * overlap * each for each in dims)
    yield State("inputs of a compressor", inputs, "float32")


def _state(fields: _Fields, layer: int) -> Iterable[Part]:
    read_state = _STATES.get(fields.family or "")
    if read_state is None:
        fields.refuse("has layers that keep a state, and what a state of this type of model takes is not known here")
    return (read_state(fields),)


def _state_dtype(fields: _Fields, name: str) -> str:
    """The type of a recurrent state, float32 if the field is not there."""
    given = fields.get(name)
    dtype = "float32" if given is None else str(given).removeprefix("torch.")
    if dtype not in _ITEMSIZES:
        fields.refuse(f"has {name}={dtype!r}; known are {', '.join(_ITEMSIZES)}")
    return dtype


def _gated_delta(fields: _Fields) -> State:
    keys = fields.need("linear_num_key_heads") * fields.need("linear_key_head_dim")
    num_heads, dim = fields.need("linear_num_value_heads"), fields.need("linear_value_head_dim")
    inputs = (2 * keys + num_heads * dim) * (fields.need("linear_conv_kernel_dim") - 1)
    state = num_heads * fields.need("linear_key_head_dim") * dim
    return State("gated delta rule", state, _state_dtype(fields, "mamba_ssm_dtype"), inputs)


def _delta_attention(fields: _Fields) -> State:
    num_heads, dim = fields.need("linear_num_heads"), fields.need("linear_head_dim")
    inputs = 3 * num_heads * dim * (fields.need("linear_conv_kernel_dim") - 1)
    return State("Kimi delta attention", num_heads * dim * dim, "float32", inputs)


def _mamba_2(fields: _Fields) -> State:
    num_heads = fields.need("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    dim = fields.need("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    size = fields.need("mamba_d_state", "ssm_state_size", "state_size")
    groups = fields.need("mamba_n_groups", "mamba_ngroups", "n_groups")
    kernel = fields.need("mamba_d_conv", "conv_kernel")
    inputs = (num_heads * dim + 2 * groups * size) * (kernel - 1)
    return State("Mamba-2", num_heads * dim * size, _state_dtype(fields, "mamba_ssm_cache_dtype"), inputs)


def _mamba_1(fields: _Fields) -> State:
    fields.get("n_mamba_heads")  # which share the width
    width = fields.whole("intermediate_size") if fields.family in ("mamba", "falcon_mamba") else None
    width = width or fields.need("mamba_expand") * fields.need("hidden_size")
    kernel = fields.need("mamba_d_conv", "conv_kernel")
    return State("Mamba", width * fields.need("mamba_d_state", "state_size"), "float32", width * (kernel - 1))


def _short_convolution(fields: _Fields) -> State:
    return State("short convolution", 0, "float32", fields.need("hidden_size") * (fields.need("conv_L_cache") - 1))


def _lightning(fields: _Fields) -> State:
    num_heads = fields.need("num_attention_heads")
    dim = fields.whole("head_dim") or fields.need("hidden_size") // num_heads
    return State("lightning attention", num_heads * dim * dim, "float32")


def _recurrent(fields: _Fields) -> State:
    width = fields.need("lru_width")
    return State("RG-LRU", width, "float32", width * (fields.need("conv1d_width") - 1))


def _rwkv(fields: _Fields) -> State:
    width = fields.need("attention_hidden_size", "hidden_size")
    return State("RWKV", 3 * width, "float32", 2 * fields.need("hidden_size"))


_STATES: Final[Mapping[str, Callable[[_Fields], State]]] = {
    "bamba": _mamba_2,
    "falcon_h1": _mamba_2,
    "falcon_mamba": _mamba_1,
    "granitemoehybrid": _mamba_2,
    "jamba": _mamba_1,
    "kimi_linear": _delta_attention,
    "lfm2": _short_convolution,
    "lfm2_moe": _short_convolution,
    "mamba": _mamba_1,
    "mamba2": _mamba_2,
    "minimax": _lightning,
    "nemotron_h": _mamba_2,
    "olmo_hybrid": _gated_delta,
    "qwen3_5_moe_text": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_next": _gated_delta,
    "recurrent_gemma": _recurrent,
    "rwkv": _rwkv,
    "zamba": _mamba_1,
    "zamba2": _mamba_2,
}
"""State of a layer, by type of model. A convolution keeps the inputs of its kernel but the newest."""

_PARTS: Final[Mapping[str, Callable[[_Fields, int], Iterable[Part]]]] = {
    "full_attention": _full,
    "sliding_attention": _windowed,
    "chunked_attention": _chunked,
    "deepseek_sparse_attention": _indexed,
    "minimax_m3_sparse": _block_sparse,
    "compressed_sparse_attention": lambda fields, layer: _compressed(fields, layer, "compressed_sparse_attention"),
    "heavily_compressed_attention": lambda fields, layer: _compressed(fields, layer, "heavily_compressed_attention"),
    "linear_attention": _state,
    "conv": _state,
    "hybrid": lambda fields, layer: (*_full(fields, layer), *_state(fields, layer)),
    "moe": lambda fields, layer: (),
    "mlp": lambda fields, layer: (),
}
"""Parts that a layer keeps, by its kind."""
