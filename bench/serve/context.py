"""What the parts of the suite share: the model, its engine, rows, and what to do when something fails."""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from bench.report import Report
from bench.rows import Row
from bench.serve import SUITE, SYSTEM
from bench.serve.engine import ServedEngine
from bench.serve.models import model_of
from bench.serve.requests import Requests
from bench.serve.sizes import Sizes
from bench.settings import Settings, Shape
from bench.timing import WrongNumbers, exact, now_us, summarize

_ANY: Final = "-"
"""The system of what failed: which one it was says the message."""


class Context:
    """One run of the suite, for one shape. The engine is opened when it is first asked for, and anew after it has failed."""

    def __init__(self, settings: Settings, report: Report, shape: Shape) -> None:
        self.settings, self.report = settings, report
        small = settings.quick or not settings.on_gpu
        self.model: Final = model_of(shape.name, tiny=small)
        self.sizes: Final = Sizes.of(self.model, small=small)
        self.requests: Final = Requests(self.model, self.sizes, settings.seed)
        self.failures: list[Exception] = []
        self._engine: ServedEngine | None = None
        self._began_us = now_us()

    @property
    def engine(self) -> ServedEngine:
        """One for all parts."""
        if self._engine is None:
            self.progress("the engine starts")
            self._engine = ServedEngine(self.model, self.settings, self.sizes)
            self.progress(f"the engine is there ({self._engine.implementation})")
        return self._engine

    def close(self) -> None:
        """Give the engine's memory back."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        if self.settings.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()

    def progress(self, text: str) -> None:
        """A line on stderr: a run takes minutes, and what reads it may be no terminal."""
        print(f"serve: {(now_us() - self._began_us) / 1e6:6.1f} s  {self.model.name}, {text}", file=sys.stderr, flush=True)

    def name(self, part: str, text: str) -> str:
        """A row's workload."""
        return f"{self.model.name} {part}: {text}"

    @contextmanager
    def guarded(self, workload: str) -> Iterator[None]:
        """What fails in here is said and kept, and has a row that says so, unless the GPU's context is lost."""
        try:
            yield
        except Exception as error:
            self.report.say(f"failed: {workload}: {type(error).__name__}: {error}")
            self.report.add(Row.failed(SUITE, workload, _ANY))
            # The first note names the row (bench/failures.py); others, such as a server's log, stay behind it.
            error.__notes__ = [workload, *getattr(error, "__notes__", ())]
            error.__context__ = error.__cause__ = None
            # A traceback keeps the frames, and these keep the memory that the next engine needs.
            self.failures.append(error.with_traceback(None))
            if not isinstance(error, WrongNumbers):
                self._discard()

    def random_tokens(self, count: int, *seed: int) -> npt.NDArray[np.int32]:
        """Token ids for a prompt that nobody asked for."""
        rng = np.random.default_rng((self.settings.seed, *seed))
        return rng.integers(0, self.model.vocabulary, count, dtype=np.int32)

    def add(
        self,
        workload: str,
        metric: str,
        unit: str,
        samples: Sequence[float],
        bound: float | None = None,
        *,
        system: str = SYSTEM,
    ) -> None:
        """A row of samples; none if there are none."""
        if not len(samples):
            return
        self.report.add(
            Row(
                suite=SUITE,
                workload=workload,
                system=system,
                metric=metric,
                unit=unit,
                summary=summarize(samples),
                bound=bound if self.settings.on_gpu else None,
            )
        )

    def add_figure(self, workload: str, metric: str, unit: str, figure: float, count: int = 1, *, system: str = SYSTEM) -> None:
        """A row of one figure over `count` things."""
        self.report.add(
            Row(suite=SUITE, workload=workload, system=system, metric=metric, unit=unit, summary=exact(figure, count))
        )

    def _discard(self) -> None:
        """An engine that has failed is not trusted with the next part."""
        try:
            self.close()
        except Exception as error:
            self.report.say(f"the engine could not be closed: {type(error).__name__}: {error}")
            self.close()
        if self.settings.on_gpu:
            torch.cuda.synchronize(self.settings.device)  # raises if the context is lost
