"""How large and how long: on a GPU of gigabytes, on a CPU of megabytes, since mapping a page there costs a memset."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from bench.settings import SHAPES, Settings, Shape
from vmmkv import KVLayout
from vmmkv.units import GIB, MIB, PAGE_BYTES

SLACK_SHARE: Final = 0.75
"""How much of the device's working time is given to what runs beside it; the rest is for its last call, not cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaths:
    """A pool that shrinks and grows. `start_tokens` to `end_tokens` is what the sequences that decode on have meanwhile."""

    sequences: int
    repeats: int
    calm_steps: int
    start_tokens: int
    end_tokens: int
    fewest_pages: int
    """Of a guest's prompt."""
    most_pages: int

    @classmethod
    def of(cls, settings: Settings) -> "Breaths":
        """By the device, and whether it is to take seconds."""
        if settings.on_gpu:
            sequences, repeats = (8, 2) if settings.quick else (32, 12)
            sizes = cls(
                sequences=sequences,
                repeats=repeats,
                calm_steps=4 if settings.quick else 16,
                start_tokens=1024,
                end_tokens=1536,
                fewest_pages=16,
                most_pages=128,
            )
        else:
            sizes = cls(
                sequences=4,
                repeats=2 if settings.quick else 8,
                calm_steps=2 if settings.quick else 8,
                start_tokens=150,
                end_tokens=250,
                fewest_pages=1,
                most_pages=20,
            )
        return sizes if settings.sequences is None else replace(sizes, sequences=settings.sequences)

    def half_pages(self, layout: KVLayout) -> int:
        """Half the budget: all that the sequences which decode on will ever hold."""
        return self.sequences * layout.pages_for(self.end_tokens)

    def slots(self, layout: KVLayout) -> int:
        """Running sequences, guests, and guests of the time before, which are parked or retiring. They are addresses only."""
        return self.sequences + 2 * (2 + self.half_pages(layout) // self.fewest_pages)

    def max_tokens(self, layout: KVLayout) -> int:
        """The longest of all sequences."""
        return max(self.end_tokens, layout.tokens_in(self.most_pages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Handovers:
    """Two caches on one budget; `sequences` of each decode on in both phases."""

    shapes: tuple[Shape, Shape]
    sequences: int
    phases: int
    held_steps: int
    """Steps at the end of a phase in which nobody asks for anything."""
    budget_bytes: int
    start_tokens: int
    fewest_pages: int
    most_pages: int

    @classmethod
    def of(cls, settings: Settings) -> "Handovers":
        """By the device, and whether it is to take seconds."""
        if settings.on_gpu:
            return cls(
                shapes=(SHAPES["llama-3.1-8b"], SHAPES["qwen3-0.6b"]),
                sequences=8,
                phases=4 if settings.quick else 10,
                held_steps=4,
                budget_bytes=4 * GIB if settings.quick else 16 * GIB,
                start_tokens=256,
                fewest_pages=16,
                most_pages=192,
            )
        return cls(
            shapes=(SHAPES["wide"], SHAPES["smollm2-135m"]),
            sequences=2,
            phases=4 if settings.quick else 10,
            held_steps=2,
            budget_bytes=96 * MIB,
            start_tokens=8,
            fewest_pages=2,
            most_pages=20,
        )

    @property
    def most_guests(self) -> int:
        """In one phase: none but the last has fewer pages than the fewest."""
        return 1 + self.budget_bytes // PAGE_BYTES // self.fewest_pages

    @property
    def end_tokens(self) -> int:
        """What a sequence that decodes on can have at the end of a phase: a guest comes at most each step."""
        return self.start_tokens + self.most_guests + self.held_steps

    @property
    def slots(self) -> int:
        """As Breaths.slots."""
        return self.sequences + 2 * self.most_guests

    def max_tokens(self, layout: KVLayout) -> int:
        """The longest of all sequences."""
        return max(self.end_tokens, layout.tokens_in(self.most_pages))


def prompts(rng: np.random.Generator, layout: KVLayout, num_pages: int, fewest_pages: int, most_pages: int) -> list[int]:
    """Prompts' lengths in tokens, drawn until they need exactly so many pages together; the last is what is left."""
    lengths = []
    while num_pages > 0:
        pages = min(num_pages, int(rng.integers(fewest_pages, most_pages, endpoint=True)))
        lengths.append(layout.tokens_in(pages))
        num_pages -= layout.pages_for(lengths[-1])
    return lengths
