"""How large everything is: the model that decodes, and the caches that are filled without one."""

from dataclasses import dataclass

from bench.settings import Settings
from vmmkv.units import GIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """All sizes of a run, in tokens and numbers of things."""

    batch: int
    """Sequences that decode together."""
    contexts: tuple[int, ...]
    """Tokens of each when the decoding begins."""
    compiled: tuple[int, ...]
    """Contexts at which compiled steps are measured too: compiling takes a minute."""
    chunk_tokens: int
    """Of a prompt that one pass computes, for each sequence."""
    warm_steps: int
    """Not timed: torch compiles one, compiles the next for any length or records it, and replays the one behind."""
    steps: int
    fill_tokens: int
    """That one pass writes for each sequence where no model runs."""
    single_tokens: int
    """Of these then come one by one."""
    memory_batch: int
    memory_contexts: tuple[int, ...]
    longest_batches: tuple[int, ...]
    longest_budget_bytes: int
    mixed_budget_bytes: int
    mixed_max_tokens: int
    """Of a request, prompt and answer: what a StaticCache must be sized for, since no answer's length is known."""
    mixed_pass_tokens: int
    """Of an answer, written at once."""

    @classmethod
    def of(cls, settings: Settings) -> "Sizes":
        """Those of a GPU; or so few that a CPU is done in seconds.

        On one H200 `decode` takes some 200 s, of which prompts are 65 (those of 32768 tokens 16 to 23 each), steps 26, and the
        two compilations most of the rest; the other parts take 70 s together.
        """
        if settings.on_gpu and not settings.quick:
            return cls(
                batch=settings.sequences or 8,
                contexts=(1024, 8192, 32768),
                compiled=(32768,),
                chunk_tokens=2048,
                warm_steps=6,
                steps=settings.steps or 16,
                fill_tokens=4096,
                single_tokens=64,
                memory_batch=8,
                memory_contexts=(1024, 8192, 32768),
                longest_batches=(1, 8),
                longest_budget_bytes=8 * GIB,
                mixed_budget_bytes=4 * GIB,
                mixed_max_tokens=4096,
                mixed_pass_tokens=16,
            )
        small = settings.quick
        return cls(
            batch=settings.sequences or 1,
            contexts=(64, 256),
            compiled=(),
            chunk_tokens=48,
            warm_steps=2,
            steps=settings.steps or (8 if small else 32),
            fill_tokens=128,
            single_tokens=18,
            memory_batch=2,
            memory_contexts=(512,) if small else (512, 2048),
            longest_batches=(1,) if small else (1, 2),
            longest_budget_bytes=32 * MIB if small else 512 * MIB,
            mixed_budget_bytes=32 * MIB if small else 512 * MIB,
            mixed_max_tokens=64 if small else 1024,
            mixed_pass_tokens=16,
        )
