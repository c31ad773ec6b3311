"""What `vmmkv serve`, or an `Engine` of this process, was asked to do: validated once and passed down."""

import re
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final

from vmmkv.config import LOG_LEVELS
from vmmkv.units import MIB, PAGE_BYTES, format_bytes

DEFAULT_MODEL: Final = "smollm2-135m"
DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
MODEL_IMPLS: Final = ("auto", "vmmkv", "transformers")
LOAD_FORMATS: Final = ("auto", "dummy")

LOG_FORMATS: Final = ("console", "json")

_TEXTS: Final = ("model", "host", "device", "dtype", "model_impl", "load_format", "log_level", "log_format")
_NUMBERS: Final = {
    "port": "a port's number",
    "kv_budget_bytes": "a number of bytes, such as 4 * vmmkv.GIB, or None",
    "max_tokens": "a number of tokens, or None",
    "max_num_seqs": "a number of sequences",
    "max_num_batched_tokens": "a number of tokens, or None",
    "seed": "an integer",
}
_MAY_BE_NONE: Final = ("kv_budget_bytes", "max_tokens", "max_num_batched_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The settings of one engine, and of the server before it. Picklable, so that it can be handed to the engine process.

    An option that is wrong is named as its field, which who calls from Python gave: `device='gpu'`. The command line has its
    flags in its place (`vmmkv.server.options.with_flags`).

    Raises: ValueError naming the option, what it was and what it may be.
    """

    model: str = DEFAULT_MODEL
    """A known name, a local directory or a hub name: see `vmmkv.server.models.resolve`."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free port."""
    device: str = "auto"
    """`auto` is the first GPU if there is one that works, else the CPU."""
    dtype: str = "auto"
    """Of weights, activations and KV; `auto` is float32 on the CPU and bfloat16 on a GPU."""
    kv_budget_bytes: int | None = None
    """Physical memory for the KV cache; None lets the engine choose from what is free."""
    max_tokens: int | None = None
    """The longest sequence, prompt and answer together; None is the model's own limit."""
    max_num_seqs: int = 256
    """Sequences that run at once; further requests wait."""
    max_num_batched_tokens: int | None = None
    """Tokens that one step computes at most, of prompts and answers together; None lets the engine choose for its device."""
    prefix_cache: bool = True
    """Whether prompts share the KV of what they have in common, with those that run and those that ran."""
    model_impl: str = "auto"
    """Whose code computes the model: `vmmkv` is the decoder driven by configuration, `transformers` that library's own,
    unmodified; `auto` is the first for models that it knows, else the second."""
    load_format: str = "auto"
    """`auto` reads the weights from safetensors; `dummy` makes random ones from config.json alone, to measure speed."""
    seed: int = 0
    """Of dummy weights, and of requests in this process that have none of their own."""
    log_level: str = "info"
    log_format: str = "console"
    """`console` logs lines for people, `json` an object a line."""

    def __post_init__(self) -> None:
        self._check_types()
        if not self.model:
            raise ValueError(f"model='' is empty; name a model such as {DEFAULT_MODEL}, or a directory")
        if not self.host:
            raise ValueError("host='' is empty; use 127.0.0.1 for this machine alone, or 0.0.0.0 for all its networks")
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port={self.port} is no port; use 1 to 65535, or 0 for any that is free")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device={self.device!r} is not known; use auto, cpu, cuda or cuda:0")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not known; use one of {', '.join(DTYPES)}")
        if self.kv_budget_bytes is not None and self.kv_budget_bytes < PAGE_BYTES:
            raise ValueError(
                f"kv_budget_bytes is {format_bytes(self.kv_budget_bytes)}, less than one page of {format_bytes(PAGE_BYTES)}; "
                f"a small model wants {format_bytes(256 * MIB)} or more"
            )
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ValueError(f"max_tokens={self.max_tokens}: a sequence needs at least 2, one of a prompt and one of an answer")
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs={self.max_num_seqs}: at least 1 sequence has to run")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: each "
                f"sequence needs one token a step; raise it to {self.max_num_seqs} or lower max_num_seqs to "
                f"{max(1, self.max_num_batched_tokens)}"
            )
        if self.model_impl not in MODEL_IMPLS:
            raise ValueError(f"model_impl={self.model_impl!r} is not known; use one of {', '.join(MODEL_IMPLS)}")
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format={self.load_format!r} is not known; use one of {', '.join(LOAD_FORMATS)}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed} is out of range; use 0 to 2**63 - 1")
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"log_level={self.log_level!r} is not known; use one of {', '.join(LOG_LEVELS)}")
        if self.log_format not in LOG_FORMATS:
            raise ValueError(f"log_format={self.log_format!r} is not known; use one of {', '.join(LOG_FORMATS)}")

    def _check_types(self) -> None:
        for name in _TEXTS:
            if not isinstance(text := getattr(self, name), str):
                raise ValueError(f"{name} is {text!r}; wanted a text")
        for name, wanted in _NUMBERS.items():
            value: Any = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise ValueError(f"{name} is {value!r}; wanted {wanted}")
            object.__setattr__(self, name, int(value))  # numpy's numbers do not go into JSON
        if not isinstance(self.prefix_cache, bool):
            raise ValueError(f"prefix_cache is {self.prefix_cache!r}; wanted True or False")
