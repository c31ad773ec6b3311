"""How large everything is, and for which models."""

from dataclasses import dataclass
from typing import Final

from bench.settings import SHAPES, Settings, Shape
from vmmkv.units import GIB

MAX_TOKENS: Final = 4096
"""Of a sequence, prompt and answer: what a static cache lays for each."""

WATERMARK: Final = 0.01
"""The share of the budget that a newcomer leaves free, so that those who run can grow for a while: what vLLM keeps."""

SLACK_SHARE: Final = 0.5
"""Of a step's time in which the engine pumps (vmmkv.server does by this share)."""

_MEASURED: Final = ("llama-3.1-8b", "qwen3-0.6b")


def shapes_of(settings: Settings) -> tuple[Shape, ...]:
    """The models: the one that was named, or else both.

    A CPU's usual shape, `wide`, is no model but one layer of large rows, with which other suites cross pages in few steps: here
    it stands for nothing having been named.
    """
    named = settings.shape
    if settings.shapes or named.name == "wide":
        return tuple(SHAPES[name] for name in _MEASURED)
    return (named,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """All sizes of a run."""

    budget_bytes: int
    """For K and V, of every system."""
    slots: int
    """That vmmkv and the block tables have: more than ever fill the budget, so that memory decides and not they."""
    asks: int
    """Requests of a workload; they come round again until it is over."""
    warm_steps: int
    """Not measured: until those who all began at once have ended, and come and go at all times."""
    steps: int
    """Measured."""
    every: int
    """Steps from one sample to the next."""
    map_pages: int
    """The budget of the memory map: so few that one sees each."""
    map_running: int
    """Its sequences at once."""
    map_prefixes: tuple[int, int]
    """Tokens that the prompts of either of two groups share."""
    map_steps: int
    """Until the moment that it shows, at the least."""

    @classmethod
    def of(cls, settings: Settings) -> "Sizes":
        """Those of the whole suite, or `--quick`'s, which say only that everything works."""
        if settings.quick:
            return cls(
                budget_bytes=3 * GIB,
                slots=512,
                asks=64,
                warm_steps=30,
                steps=60,
                every=4,
                map_pages=64,
                map_running=4,
                map_prefixes=(90, 40),
                map_steps=60,
            )
        return cls(
            budget_bytes=40 * GIB,
            slots=4096,
            asks=1024,
            warm_steps=1000,
            steps=1000,
            every=8,
            map_pages=256,
            map_running=10,
            map_prefixes=(400, 250),
            map_steps=200,
        )
