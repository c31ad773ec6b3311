"""Models that are served: configurations with random weights, the least time that they need, tokenizers; a real one and a text.

Bounds are an H200's: weights, K and V at 4.5 TB/s, operations in bfloat16 at 720 TFLOP/s, nothing overlapped. A step multiplies
for as long as its weights take to be read, or its operations to be done, whichever is longer; then each sequence reads all of
its K and V. An engine that reads a prefix once for many sequences can pass this bound.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch

from bench.harness import BF16_FLOPS, HBM_BYTES_PER_S, Settings
from bench.workloads import TokenIds
from vmmkv.config import read_environment
from vmmkv_server.config import VARIABLES, EngineConfig
from vmmkv_server.engine.loading import ModelSource, choose_dtype
from vmmkv_server.models import KNOWN_CONFIGS, KNOWN_MODELS, model_dir, resolve

Config = Mapping[str, Any]
"""What a config.json holds."""

ITEM_BYTES: Final = 2
"""Of weights, K and V, in bfloat16: bounds are of a GPU."""

_COMMON: Final[Config] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "dtype": "bfloat16",
    # Without it transformers takes a large vocabulary for one of an old Mistral's, and warns of its tokenizer.
    "transformers_version": "5.17.0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A dense decoder, by its configuration."""

    name: str
    config: Config
    tokenizer: Path | None = None
    """A tokenizer.json, where texts are wanted. None: prompts are token ids."""

    def with_tokenizer(self, tokenizer: Path) -> "ServedModel":
        """The same, with texts. A tiny model gets as many token ids as the tokenizer; for a larger one that is padded."""
        size = max(self.vocabulary, vocabulary_of(tokenizer))
        return replace(self, config={**self.config, "vocab_size": size}, tokenizer=tokenizer)

    @property
    def vocabulary(self) -> int:
        """Token ids."""
        return int(self.config["vocab_size"])

    @property
    def prompt_ids(self) -> int:
        """Token ids of prompts are below it, so that models with large vocabularies have the same prompts."""
        return min(10_001, self.vocabulary)

    def tokens(self, seed: int, count: int, *names: int) -> TokenIds:
        """Random token ids [count]; of the same seed and names the same."""
        ids = random.Random(f"{seed}/{'/'.join(map(str, names))}").choices(range(self.prompt_ids), k=count)
        return np.array(ids, np.int32)

    def behind_others(self, seed: int, prompts: Sequence[TokenIds], own_tokens: int) -> list[TokenIds]:
        """Prompts with the last tokens of these, behind other ones."""
        lengths = [len(prompt) - own_tokens for prompt in prompts]
        begins = [self.tokens(seed, length, 11, number) for number, length in enumerate(lengths)]
        return [np.concatenate((begin, prompt[-own_tokens:])) for begin, prompt in zip(begins, prompts, strict=True)]

    @property
    def reach(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.config["max_position_embeddings"])

    @property
    def layers(self) -> int:
        """Of the decoder."""
        return int(self.config["num_hidden_layers"])

    @property
    def attention_width(self) -> int:
        """Elements of all query heads together."""
        return int(self.config["num_attention_heads"] * self.config["head_dim"])

    @property
    def row_bytes(self) -> int:
        """K and V of a token in all layers."""
        return int(2 * self.layers * self.config["num_key_value_heads"] * self.config["head_dim"] * ITEM_BYTES)

    @property
    def layer_parameters(self) -> int:
        """Weights that multiply each token, in all layers: query, key, value and output, gate, up and down."""
        kv_width = self.config["num_key_value_heads"] * self.config["head_dim"]
        widths = 2 * self.attention_width + 2 * kv_width + 3 * self.config["intermediate_size"]
        return int(self.layers * self.config["hidden_size"] * widths)

    @property
    def step_parameters(self) -> int:
        """Weights that a decode step reads. The embedding is not among them, unless the head is tied to it."""
        return int(self.layer_parameters + self.vocabulary * self.config["hidden_size"])

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """One with a config.json, and the tokenizer if there is one, until the `with` block ends."""
        with TemporaryDirectory(prefix="vmmkv-bench-") as folder:
            texts = {"config.json": json.dumps(self.config)}
            if self.tokenizer is not None:
                texts["tokenizer.json"] = padded(self.tokenizer, self.vocabulary)
                texts["tokenizer_config.json"] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
            for name, text in texts.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            yield Path(folder)


_FAMILIES: Final[Mapping[str, Config]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "mlp_bias": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6},
}
_FIELDS: Final = (
    "hidden_size", "intermediate_size", "vocab_size", "rope_theta", "tie_word_embeddings", "bos_token_id", "eos_token_id",
)  # fmt: skip
_DENSE: Final = {  # family, and the fields above; layers and heads are those of `vmmkv plan`
    "llama-3.1-8b": ("llama", 4096, 14336, 128_256, 500_000.0, False, 128_000, 128_001),
    "qwen3-0.6b": ("qwen3", 1024, 3072, 151_936, 1_000_000.0, True, 151_643, 151_645),
    "smollm2-135m": ("llama", 576, 1536, 49_152, 100_000.0, True, 1, 2),
}


def _served(name: str, family: str, *values: Any) -> ServedModel:
    own = dict(zip(_FIELDS, values, strict=True))
    # As transformers 5 has it, beside the `rope_theta` of those before.
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": own["rope_theta"]}}
    return ServedModel(name=name, config={**_COMMON, **_FAMILIES[family], **KNOWN_CONFIGS[name], **own, **rope})


MODELS: Final = {name: _served(name, *fields) for name, fields in _DENSE.items()}

_TINY: Final[Config] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Rows of 2 KiB in float32. With smaller weights layers so narrow would change next to nothing."""


def model_of(shape_name: str, *, tiny: bool) -> ServedModel:
    """The model of a shape; or of its family, so small that a CPU serves it. A shape that is no model's is Llama's."""
    model = MODELS.get(shape_name, MODELS["llama-3.1-8b"])
    return ServedModel(name=f"tiny {model.name}", config={**model.config, **_TINY}) if tiny else model


class Weights:
    """The weights of a model, loaded once for several systems."""

    def __init__(self, model: ServedModel, settings: Settings) -> None:
        self.model: Final = model
        self.settings: Final = settings
        self.device: Final = settings.device
        self._stack = ExitStack()
        self.directory: Final = self._stack.enter_context(model.directory())
        self.config: Final = EngineConfig(
            model=str(self.directory), device=str(self.device), load_format="dummy", seed=settings.seed
        )
        self.source: Final = ModelSource(self.config, self.device, choose_dtype("auto", self.device))

    def close(self) -> None:
        """Forget the directory; the weights go with the last system."""
        self._stack.close()


# bounds


def prefill_s(model: ServedModel, start: int, end: int) -> float:
    """To compute the tokens [start, end) of one prompt, each attending to all before it."""
    num_seen = (end * (end + 1) - start * (start + 1)) // 2
    attention = 4 * model.attention_width * model.layers * num_seen
    return (2 * model.layer_parameters * (end - start) + attention) / BF16_FLOPS


def decode_s(model: ServedModel, num_sequences: int, num_rows: int) -> float:
    """To compute one token for each sequence, which have so many rows together."""
    multiply_s = 2 * model.step_parameters * num_sequences / BF16_FLOPS
    weights_s = model.step_parameters * ITEM_BYTES / HBM_BYTES_PER_S
    return max(weights_s, multiply_s) + num_rows * model.row_bytes / HBM_BYTES_PER_S


def read_s(model: ServedModel, num_rows: int) -> float:
    """To read the weights once, and so many rows of K and V: the byte limit of a decode step."""
    return (model.step_parameters * ITEM_BYTES + num_rows * model.row_bytes) / HBM_BYTES_PER_S


def requests_s(
    model: ServedModel, prompt_lengths: Sequence[int], outs: Sequence[int], *, shared: int = 0, known: bool = False
) -> float:
    """For requests that all arrive at once: every prompt, and then steps until the longest answer has ended.

    Prompts have their first `shared` tokens in common, which are computed once, or not at all if they are `known`. The first
    token of an answer comes of its prompt.
    """
    total_s = sum(prefill_s(model, shared, length) for length in prompt_lengths)
    if shared and not known:
        total_s += prefill_s(model, 0, shared)
    for step in range(1, max(outs)):
        rows = [length + step for length, out in zip(prompt_lengths, outs, strict=True) if out > step]
        total_s += decode_s(model, len(rows), sum(rows))
    return total_s


# a real model, and a text

REAL: Final = "smollm2-135m"
"""The model with weights of its own; its tokenizer is taken where no file is named."""
TEXT: Final = Path(__file__).parents[2] / "tests" / "texts" / "opticks.txt"
WINDOW_TOKENS: Final = 1024


def load_real(device: torch.device) -> Any:
    """REAL, in float32 on a CPU and bfloat16 on a GPU; fetched first if it is not here. Raises: ModelUnavailable."""
    # Loaded here: transformers takes seconds to import.
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve(REAL), dtype=choose_dtype("auto", device), local_files_only=True)
    return model.eval().to(device)


def windows_of_text(device: torch.device, count: int, num_tokens: int = WINDOW_TOKENS) -> list[torch.Tensor]:
    """int64 [num_tokens] each: the first tokens of the text, cut into windows."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(resolve(REAL) / "tokenizer.json"))
    tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids
    if len(tokens) < count * num_tokens:
        raise ValueError(f"{TEXT.name} has {len(tokens)} tokens, fewer than {count} windows of {num_tokens}")
    return list(torch.tensor(tokens[: count * num_tokens], device=device).view(count, num_tokens))


# tokenizers

_DIGITS: Final = 8
_SEED: Final = 0
_LONGEST: Final = 12
"""Characters of a token that others are made of: two together are as long as the long words of large vocabularies."""


def tokenizer_file(named: Path | None) -> Path:
    """The tokenizer.json that was named, or REAL's. Nothing is fetched: what measures does not wait for a network.

    Raises: ValueError if there is no such file, naming what would work.
    """
    path = named or model_dir(KNOWN_MODELS[REAL], read_environment(others=VARIABLES)) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"--tokenizer {path} is no file; name a tokenizer.json, or bring that of {REAL} by `vmmkv fetch {REAL}`"
        )
    return path


def digest_of(path: Path) -> str:
    """What tells a tokenizer from others: texts by two of them are not the same work."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]


def vocabulary_of(path: Path) -> int:
    """Its token ids. Raises: ValueError if it is none that can be padded."""
    return len(_read(path)[1])


def padded(path: Path, size: int) -> str:
    """The text of a tokenizer.json with `size` tokens: those that are added are two others', one behind the other.

    No merge makes them, so texts become the tokens that they became before. Raises: ValueError if it has more than `size`.
    """
    tokenizer, vocabulary = _read(path)
    if len(vocabulary) > size:
        raise ValueError(f"{path} has {len(vocabulary)} tokens, and the model only {size}; name a smaller one")
    marks = {token["content"] for token in tokenizer.get("added_tokens") or ()}
    parts = sorted(token for token in vocabulary if token not in marks and len(token) <= _LONGEST)
    draws = random.Random(_SEED)
    while len(vocabulary) < size:
        vocabulary.setdefault(draws.choice(parts) + draws.choice(parts), len(vocabulary))
    return json.dumps(tokenizer, ensure_ascii=False)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """A tokenizer, and the vocabulary in it, to be read and added to."""
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        if sorted(vocabulary.values()) == list(range(len(vocabulary))):
            return tokenizer, vocabulary
        error: Exception = ValueError("its ids have gaps")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as caught:
        error = caught
    wanted = f"wanted a tokenizer.json of byte pairs (BPE), such as that of {REAL}; name one by --tokenizer FILE"
    raise ValueError(f"{path} cannot be padded: {error!r}; {wanted}") from error
