"""The dense decoders of the Llama line, from one configuration: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3.

`DecoderConfig.of` reads a configuration of transformers, and refuses every field whose effect is not known here: such a model
runs by transformers' own code. `DecoderWeights` are the tensors; q, k and v are one matrix, gate and up another. `Decoder` is
the forward pass, by vmmkv's kernels on a GPU and by plain torch elsewhere. `DecoderModel` runs it over a cache.

Legend: N tokens of a step, B rows asked for, E hidden, H query heads, K kv heads, D head dim, R = D / 2 angles, T positions,
V vocabulary, W its part on a rank, F MLP width; C = (H + 2 K) D and G = 2 F are rows of fused matrices, I inputs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F

from vmmkv.units import ceil_div
from vmmkv_server.engine.attention import AttentionMetadata, CachedAttention, KVRows, RotaryKeys
from vmmkv_server.engine.collectives import Collectives
from vmmkv_server.engine.models.torch_ops import Stream

SCALED: Final = ("linear", "llama3", "yarn")
"""Kinds of scaling whose frequencies do not depend on the length of a sequence. transformers' own functions compute them."""

_CAUSAL_LM: Final[Mapping[str, str]] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The architectures known here, by `model_type`."""

_READ: Final = {
    "model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "rope_parameters",
    "max_position_embeddings", "initializer_range",
}  # fmt: skip
"""Fields that `DecoderConfig.of` reads for every family."""

_READ_BY_FAMILY: Final[Mapping[str, set[str]]] = {
    "llama": {"attention_bias", "mlp_bias"},
    "mistral": {"sliding_window"},
    "qwen2": {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"},
    "qwen3": {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "attention_bias"},
}
"""Fields that only some families read. `layer_types` says already what `use_sliding_window` does."""

_ONLY: Final[Mapping[str, tuple[object, ...]]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1.0, None),
    "is_causal": (True, None),
    "is_encoder_decoder": (False,),
}
"""Fields that change the computation, and the values by which they do not."""

_INERT: Final = {
    "transformers_version", "dtype", "torch_dtype", "id2label", "label2id", "num_labels", "problem_type",
    "output_hidden_states", "output_attentions", "return_dict", "use_cache", "chunk_size_feed_forward",
    "attention_dropout", "tokenizer_class", "is_llama_config", "max_sequence_length", "transformers.js_config",
    "unsloth_fixed", "unsloth_version",
}  # fmt: skip
"""Fields that change nothing in inference: of training, of other heads, of other programs."""

MULTIPLE: Final = 8
"""Sizes of matrices and heads are multiples of it: the kernels load 16 bytes of bfloat16 at once."""

_INERT_ENDS: Final = ("_token_id", "_token_ids")


class Unsupported(ValueError):
    """The decoder does not compute this model; the text says why. transformers' own code may run it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frequencies:
    """The frequencies of a rotary position embedding (Su et al., 2021), as transformers computes them."""

    frequencies_R: tuple[float, ...] = field(repr=False)
    """Radians from one position to the next: float32 numbers."""
    scale: float
    """Factor of all cosines and sines: yarn's attention factor, else 1."""

    @classmethod
    def of(cls, config: Any, head_dim: int) -> "Frequencies":
        """Read the `rope_parameters` of a transformers configuration. Raises Unsupported."""
        parameters = config.rope_parameters
        kind = parameters.get("rope_type")
        if kind == "default":
            # As in each model's own file: transformers has no function for it.
            exponents_R = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            frequencies_R, scale = 1.0 / parameters["rope_theta"] ** exponents_R, 1.0
        elif kind in SCALED:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frequencies_R, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        else:
            raise Unsupported(f"rope_parameters are {parameters}; known are the types default, {', '.join(SCALED)}")
        rotated = 2 * len(frequencies_R)
        if rotated != head_dim or parameters.get("partial_rotary_factor") not in (None, 1.0):
            raise Unsupported(f"rope_parameters are {parameters}, which rotate a part of each head and not all {head_dim}")
        return cls(frequencies_R=tuple(frequencies_R.tolist()), scale=scale)

    def tables(self, num_positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, R] of positions [0, num_positions), float32, times `scale`."""
        positions_T = torch.arange(num_positions, dtype=torch.float32, device=device)
        angles_TR = positions_T[:, None] * torch.tensor(self.frequencies_R, dtype=torch.float32, device=device)
        return angles_TR.cos() * self.scale, angles_TR.sin() * self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder of pre-normed layers: rotary attention with grouped heads, then a gated MLP with SiLU."""

    model_type: str
    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm of each query's and key's head, before the rotation."""
    tied: bool
    """Is the output matrix the embedding?"""
    head_first: int = 0
    """First token id of the output matrix: other ranks have other tokens."""
    head_size: int
    """Number of tokens of the output matrix."""
    windows: tuple[int | None, ...]
    """Most rows that a token attends to in each layer, its own included; None for all."""
    rope: Frequencies
    initializer_range: float
    """Standard deviation of random weights."""

    @classmethod
    def of(cls, config: Any) -> "DecoderConfig":
        """Read a configuration of transformers, such as `AutoConfig.from_pretrained` gives. Raises Unsupported.

        It must be the whole model's: that of a part, such as a `text_config`, does not tell of the others.
        """
        _refuse_unknown(config)
        family = config.model_type
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention_bias = bool(getattr(config, "attention_bias", False))
        sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size, "head_dim": head_dim}
        for name, size in sizes.items():
            if size % MULTIPLE:
                raise Unsupported(f"{name} is {size}; wanted a multiple of {MULTIPLE}")
        return cls(
            model_type=family,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            mlp_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            norm_eps=config.rms_norm_eps,
            qkv_bias=attention_bias or family == "qwen2",
            out_bias=attention_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=family == "qwen3",
            tied=config.tie_word_embeddings,
            head_size=config.vocab_size,
            windows=_windows(config),
            rope=Frequencies.of(config, head_dim),
            initializer_range=config.initializer_range,
        )


def _refuse_unknown(config: Any) -> None:
    """Raise Unsupported unless every field of the configuration is one that is known."""
    family, architectures = config.model_type, getattr(config, "architectures", None)
    if family not in _CAUSAL_LM:
        raise Unsupported(f"model_type is {family!r}; known are {', '.join(_CAUSAL_LM)}")
    if architectures not in (None, [], [_CAUSAL_LM[family]]):
        raise Unsupported(f"architectures is {architectures}; wanted {_CAUSAL_LM[family]}")
    read = _READ | _READ_BY_FAMILY[family]
    for name, value in config.to_dict().items():
        if name in _ONLY:
            if value not in _ONLY[name]:
                raise Unsupported(f"{name} is {value!r}; wanted {_ONLY[name][0]!r}")
        elif name not in read and name not in _INERT and not name.startswith("_") and not name.endswith(_INERT_ENDS) and value:
            raise Unsupported(f"{name} is {value!r}, and what that means for a {family} model is not known here")


def _windows(config: Any) -> tuple[int | None, ...]:
    layers: int = config.num_hidden_layers
    if config.model_type == "llama":
        return (None,) * layers
    if config.model_type == "mistral":
        return (config.sliding_window,) * layers
    kinds = config.layer_types
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise Unsupported(f"layer_types is {kinds}; wanted full_attention or sliding_attention for each of {layers} layers")
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one layer. Matrices are [rows out, columns in], as torch's linear has them."""

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
class DecoderWeights:
    """All of a decoder's tensors, of one dtype on one device."""

    embedding_VE: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm_E: torch.Tensor
    head_WE: torch.Tensor
    """Output matrix of W tokens: all, or a rank's part. Rows of the embedding if they are tied."""

    def named(self, config: DecoderConfig) -> dict[str, torch.Tensor]:
        """Views of the tensors, and of the parts of fused ones, by the names that transformers saves them under."""
        places = {"model.embed_tokens.weight": self.embedding_VE, "model.norm.weight": self.norm_E}
        if not config.tied:
            places["lm_head.weight"] = self.head_WE
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


def empty(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
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
    return DecoderWeights(
        embedding_VE=embedding_VE,
        layers=tuple(layer() for _ in range(config.num_layers)),
        norm_E=tensor(hidden),
        head_WE=embedding_VE.narrow(0, config.head_first, config.head_size)
        if config.tied
        else tensor(config.head_size, hidden),
    )


class Decoder:
    """A decoder of one configuration, on the device of its weights.

    It never waits for the device, nor depends on values there, so it can be captured in a CUDA graph.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        *,
        by_kernels: bool | None = None,
        ranks: Collectives | None = None,
    ) -> None:
        """`by_kernels`: with vmmkv's kernels, as on a GPU; else with torch. With `ranks`, the weights are one rank's part."""
        self.config = config
        self.weights = weights
        self._ranks = ranks
        self._stream: Callable[[torch.Tensor, float, Collectives | None], Stream] = Stream
        self._linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear
        if weights.norm_E.is_cuda if by_kernels is None else by_kernels:
            from vmmkv_server.engine.models import kernel_ops  # not above: it imports triton

            self._stream, self._linear = kernel_ops.stream, kernel_ops.linear

    def forward(
        self, ids_N: torch.Tensor, attention: Callable[..., torch.Tensor], last_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The final, normed hidden states of the tokens at indices `last_B`, [B, E]; of all without.

        `attention` is called once in each layer, as `CachedAttention`, with q, k and v as strided views of one tensor.
        `ids_N` and `last_B` are int32 or int64.
        """
        config, weights = self.config, self.weights
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        stream = self._stream(F.embedding(ids_N, weights.embedding_VE), config.norm_eps, self._ranks)
        for index, layer in enumerate(weights.layers):
            qkv_NC = stream.project(layer.attention_norm_E, layer.qkv_CE, layer.qkv_bias_C)
            q_NHD, k_NKD, v_NKD = torch.split(qkv_NC.view(len(qkv_NC), -1, config.head_dim), heads, dim=1)
            attended_NHD = attention(
                index, q_NHD, k_NKD, v_NKD, q_norm=layer.q_norm_D, k_norm=layer.k_norm_D, norm_eps=config.norm_eps
            )
            if last_B is not None and layer is weights.layers[-1]:
                # No token looks at another from here on: in a prefill only the rows asked for need the rest of this layer.
                attended_NHD, stream = attended_NHD.index_select(0, last_B), stream.keep(last_B)
            stream.add(attended_NHD.flatten(1), layer.out_EI, layer.out_bias_E)
            gated_NF = stream.gate(layer.mlp_norm_E, layer.gate_up_GE, layer.gate_up_bias_G)
            stream.add(gated_NF, layer.down_EF, layer.down_bias_E)
        return stream.normed(weights.norm_E)

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor:
        """Logits [B, V], in the weights' dtype. With ranks all must call this."""
        logits_BW = self._linear(hidden_BE, self.weights.head_WE)
        return logits_BW if self._ranks is None else joined(self._ranks.gather(logits_BW), self.config.vocab_size)


def head_part(rank: int, num_ranks: int, vocab_size: int) -> tuple[int, int]:
    """The first token of a rank's part of the logits, and how many: the same on all, so the last parts may overlap."""
    size = min(vocab_size, ceil_div(vocab_size, MULTIPLE * num_ranks) * MULTIPLE)
    return min(rank * size, vocab_size - size), size


def joined(logits_RBW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The logits [B, V] of all tokens, of the parts that R ranks have. One launch."""
    num_ranks, _, size = logits_RBW.shape
    known = [min(size, rank * size - head_part(rank, num_ranks, vocab_size)[0]) for rank in range(num_ranks)]
    return torch.cat([part[:, first:] for part, first in zip(logits_RBW, known, strict=True)], dim=1)


class DecoderModel:
    """An EngineModel: a decoder over the rows of a cache."""

    implementation: Final = "vmmkv"
    capturable: Final = True
    has_states: Final = True

    def __init__(self, decoder: Decoder, rows: KVRows) -> None:
        config = decoder.config
        windows = {layer: window for layer, window in enumerate(config.windows) if window is not None}
        self._decoder = decoder
        self._rows = rows
        self._attention = CachedAttention(rows, rope=config.rope.tables(rows.max_tokens, rows.limit.device), windows=windows)
        self.vocabulary_size: Final = config.vocab_size

    def forward(self, ids_N: torch.Tensor, step: AttentionMetadata, last_B: torch.Tensor | None) -> torch.Tensor:
        """Append and attend to a step's tokens. Returns logits [B, V] behind those at `last_B`."""
        self._attention.begin(step)
        return self._decoder.logits(self._decoder.forward(ids_N, self._attention, last_B))

    def states(self, ids_N: torch.Tensor, step: AttentionMetadata, rows_W: torch.Tensor | None) -> torch.Tensor:
        """Append and attend to a step's tokens. Returns the final, normed hidden states [W, E]."""
        self._attention.begin(step)
        return self._decoder.forward(ids_N, self._attention, rows_W)

    def logits(self, states_WE: torch.Tensor) -> torch.Tensor:
        """Logits [W, V] of the result of the last `states`, or of some of its rows."""
        return self._decoder.logits(states_WE)

    @property
    def keys(self) -> RotaryKeys:
        """The keys of all layers."""
        config = self._decoder.config
        inv_freq_R = torch.tensor(config.rope.frequencies_R, dtype=torch.float32, device=self._rows.limit.device)
        return RotaryKeys(self._rows, inv_freq_R, config.num_heads, self._decoder.weights.norm_E.dtype)

    def check(self) -> None:
        """Check nothing: a decoder can be served."""
