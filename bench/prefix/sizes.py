"""How large everything is: the model that a shape's cache belongs to, the requests, the conversations, the prefixes."""

from dataclasses import dataclass
from typing import Final

from bench.settings import Settings, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """What a dense decoder has beside the heads that its cache sees."""

    hidden: int
    mlp: int
    vocabulary: int
    rope_base: float


_DECODERS: Final = {
    "llama-3.1-8b": Decoder(hidden=4096, mlp=14336, vocabulary=128256, rope_base=500_000.0),
    "qwen3-0.6b": Decoder(hidden=1024, mlp=3072, vocabulary=151936, rope_base=1_000_000.0),
    "smollm2-135m": Decoder(hidden=576, mlp=1536, vocabulary=49152, rope_base=100_000.0),
    "wide": Decoder(hidden=64, mlp=128, vocabulary=1024, rope_base=10_000.0),
}


def decoder_of(shape: Shape) -> Decoder:
    """By the shape's name. Raises ValueError for one whose model is not known."""
    if shape.name not in _DECODERS:
        raise ValueError(f"model shape {shape.name}: its model is not known; there are {', '.join(_DECODERS)}")
    return _DECODERS[shape.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """All sizes of a run, in tokens and numbers of things."""

    requests: int
    """That share one prefix, all there at once."""
    prefixes: tuple[int, ...]
    """Lengths of the shared prefix, a workload each."""
    own: int
    out: int
    token_budget: int
    """New tokens that a step computes at most."""
    rounds: int
    """Fresh starts of a system on each prefix: a cold run and the warm ones each."""
    warm_runs: int
    decode_prefix: int
    """Shared by all sequences whose attention is measured."""
    conversations: int
    turns: int
    turn_tokens: tuple[int, int]
    """The fewest and the most of what a user says."""
    turn_out: int
    attach_prefixes: tuple[int, ...]
    attach_seconds: float
    """For how long each length of prefix is attached by each method."""

    @classmethod
    def of(cls, settings: Settings) -> "Sizes":
        """On a CPU, a prefix of a few pages of the wide shape, and one below a page."""
        if settings.on_gpu and not settings.quick:
            return cls(
                requests=settings.sequences or 128,
                prefixes=(4096, 200, 1000, 4000),
                own=128,
                out=64,
                token_budget=8192,
                rounds=2,
                warm_runs=2,
                decode_prefix=4096,
                conversations=20,
                turns=10,
                turn_tokens=(50, 200),
                turn_out=64,
                attach_prefixes=(1024, 4096, 16384, 65536, 131072),
                attach_seconds=0.7,
            )
        small = not settings.on_gpu and settings.quick
        return cls(
            requests=settings.sequences or (4 if small else 8),
            prefixes=(100, 20) if small else (200, 100, 20),
            own=12,
            out=4,
            token_budget=256,
            rounds=1,
            warm_runs=1,
            decode_prefix=96,
            conversations=2 if small else 4,
            turns=3 if small else 4,
            turn_tokens=(8, 24),
            turn_out=3,
            attach_prefixes=(64, 1024) if small else (64, 1024, 4096),
            attach_seconds=0.02,
        )
