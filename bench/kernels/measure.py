"""The measuring loop: prepare, run, check, capture, replay for a while, report; and go on when something of it fails."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from bench.report import Report
from bench.rows import Row
from bench.settings import Settings, Shape
from bench.timing import exact, summarize, time_for

SUITE: Final = "kernels"

_SECONDS: Final = 0.2
"""For how long a system is replayed in one row."""
_SECONDS_QUICK: Final = 0.02


class Inapplicable(Exception):
    """This system cannot be asked to do this. No failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A quantity of a pass that took so long: `amount / us` if `rate`, else `us / amount`. `bound` is an H200's best."""

    name: str
    unit: str
    amount: float
    rate: bool
    bound: float | None = None

    def of(self, time_us: float) -> float:
        """Its value."""
        return self.amount / time_us if self.rate else time_us / self.amount


class Measurer:
    """Measures the systems of one shape, one after the other."""

    def __init__(self, settings: Settings, report: Report, shape: Shape) -> None:
        self.settings, self.shape, self._report = settings, shape, report
        self.failures: list[Exception] = []

    def workload(self, part: str, case: str) -> str:
        """How rows name it: the shape, the part of the suite and the case, each one word."""
        return f"{self.shape.name} {part} {case}"

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """What fails in here is said and kept, and the suite goes on, unless the GPU's context is lost."""
        try:
            yield
        except Inapplicable:
            pass
        except Exception as error:
            self._report.say(f"absent: {what}: {type(error).__name__}: {error}")
            error.add_note(what)
            error.__context__ = error.__cause__ = None
            # A traceback keeps the frames, and these keep the memory that the next system needs.
            self.failures.append(error.with_traceback(None))
            if self.settings.on_gpu:
                torch.cuda.synchronize(self.settings.device)  # raises again if the context is lost

    def measure(
        self, workload: str, system: str, prepare: Callable[[], Callable[[], object]], metrics: Sequence[Metric]
    ) -> float | None:
        """Rows of a system. `prepare` runs what it gives once, and checks it. Returns the median in us, None if it failed."""
        median_us = None
        with self.guarded(f"{workload}: {system}"):
            seconds = _SECONDS_QUICK if self.settings.quick else _SECONDS
            times_us = time_for(prepare(), self.settings.device, seconds)
            for metric in metrics:
                summary = summarize([metric.of(time_us) for time_us in times_us])
                bound = metric.bound if self.settings.on_gpu else None  # the bound is an H200's
                self._report.add(
                    Row(
                        suite=SUITE,
                        workload=workload,
                        system=system,
                        metric=metric.name,
                        unit=metric.unit,
                        summary=summary,
                        bound=bound,
                    )
                )
            median_us = summarize(times_us).p50
        return median_us

    def add_ratio(self, workload: str, system: str, metric: str, ratio: float) -> None:
        """A row of a figure computed from two medians."""
        summary = exact(ratio, 1)
        self._report.add(Row(suite=SUITE, workload=workload, system=system, metric=metric, unit="x", summary=summary))
