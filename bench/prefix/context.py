"""What the parts of the suite share: settings, sizes, one model, rows, and what to do when something fails."""

import functools
import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from bench.baselines.blocks import BLOCK_ROWS
from bench.prefix.contiguous import Sharing, Vmmkv
from bench.prefix.model import Model
from bench.prefix.naming import named
from bench.prefix.paged import Paged
from bench.prefix.sizes import Sizes, decoder_of
from bench.prefix.systems import TokenIds
from bench.report import Report
from bench.rows import Row
from bench.settings import Settings, Shape
from bench.timing import Summary, exact, summarize
from vmmkv.memory.pool import LARGE_PAGES
from vmmkv.units import ceil_div

SUITE: Final = "prefix"


class Context:
    """One run of the suite, for one shape."""

    def __init__(self, settings: Settings, report: Report) -> None:
        self.settings, self.report = settings, report
        self.sizes: Final = Sizes.of(settings)
        self.failures: list[Exception] = []

    @property
    def shape(self) -> Shape:
        """The model's."""
        return self.settings.shape

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.settings.device

    @functools.cached_property
    def model(self) -> Model:
        """Made when it is first asked for, and for all parts."""
        sizes = self.sizes
        longest = max(max(sizes.prefixes) + sizes.own + sizes.out, sizes.turns * (sizes.turn_tokens[1] + sizes.turn_out))
        return Model(self.shape, decoder_of(self.shape), self.device, max_tokens=longest + 1, seed=self.settings.seed)

    def tokens(self, count: int, *seed: int) -> TokenIds:
        """Random token ids; of the same seeds the same."""
        rng = np.random.default_rng((self.settings.seed, *seed))
        return rng.integers(0, decoder_of(self.shape).vocabulary, count, dtype=np.int32)

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """What fails in here is said and kept, and the suite goes on, unless the GPU's context is lost."""
        try:
            yield
        except Exception as error:
            self.report.say(f"absent: {what}: {type(error).__name__}: {error}")
            error.add_note(what)
            error.__context__ = error.__cause__ = None
            # A traceback keeps the frames, and these keep the memory that the next system needs.
            self.failures.append(error.with_traceback(None))
            self.synchronize()  # raises again if the context is lost
        finally:
            if self.settings.on_gpu:
                _release_memory()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.settings.on_gpu:
            torch.cuda.synchronize(self.device)

    # systems

    def open_vmmkv(
        self, sharing: Sharing, *, slots: int, max_tokens: int, num_pages: int, warm: Mapping[int, int] = MappingProxyType({})
    ) -> Vmmkv:
        """A cache and a pool of its own."""
        return Vmmkv(self.shape, self.device, sharing, slots=slots, max_tokens=max_tokens, num_pages=num_pages, warm=warm)

    def open_paged(self, *, slots: int, max_tokens: int, num_tokens: int) -> Paged:
        """Blocks for so many tokens in all, and one more for each slot, which need not be full."""
        num_blocks = ceil_div(num_tokens, BLOCK_ROWS) + slots
        return Paged(self.shape, self.device, num_blocks=num_blocks, slots=slots, max_tokens=max_tokens)

    def pages_for(self, num_tokens: int) -> int:
        """Of one sequence."""
        return self.shape.layout.pages_for(num_tokens)

    def extents_for(self, num_tokens: int, count: int) -> Counter[int]:
        """Of `count` sequences that are laid at once, by pages of an extent."""
        num_large, num_single = divmod(self.pages_for(num_tokens), LARGE_PAGES)
        return Counter({LARGE_PAGES: count * num_large, 1: count * num_single})

    # rows

    def named(self, text: str) -> str:
        """A workload's name, which says the shape."""
        return named(self.shape.name, text)

    def add(
        self, workload: str, system: str, metric: str, unit: str, samples: Sequence[float], bound: float | None = None
    ) -> None:
        """A row of samples; none if there are none."""
        if len(samples):
            self._add(workload, system, metric, unit, summarize(samples), bound)

    def add_figure(self, workload: str, system: str, metric: str, unit: str, figure: float, count: int = 1) -> None:
        """A row of one figure over `count` things."""
        self._add(workload, system, metric, unit, exact(figure, count), None)

    def _add(self, workload: str, system: str, metric: str, unit: str, summary: Summary, bound: float | None) -> None:
        names = {"suite": SUITE, "workload": workload, "system": system, "metric": metric, "unit": unit}
        self.report.add(Row(**names, summary=summary, bound=bound if self.settings.on_gpu else None))


def _release_memory() -> None:
    """What torch's allocator keeps is not free for the driver's own calls."""
    gc.collect()
    torch.cuda.empty_cache()
