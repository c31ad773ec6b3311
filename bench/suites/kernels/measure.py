"""The measuring loop: prepare, run once, check, capture, replay for a while, report."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from bench.harness import Recorder, Shape, time_for
from bench.rows import summarize

_SECONDS: Final = 0.2
"""For how long a system is replayed in one row."""
_SECONDS_QUICK: Final = 0.02


class Inapplicable(Exception):
    """This system cannot do this. No failure."""


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
    """Measures systems under one workload, one after the other."""

    def __init__(self, recorder: Recorder, shape: Shape, workload: str) -> None:
        self.recorder, self.settings = recorder, recorder.settings
        self.shape, self.workload = shape, workload

    def measure(self, system: str, prepare: Callable[[], Callable[[], object]], metrics: Sequence[Metric]) -> float | None:
        """Rows of a system. `prepare` runs what it gives once, and checks it. The median in us; None if it failed."""
        with self.recorder.guarded(self.workload, system), suppress(Inapplicable):
            seconds = _SECONDS_QUICK if self.settings.quick else _SECONDS
            times_us = time_for(prepare(), self.settings.device, seconds)
            for metric in metrics:
                figures = [metric.of(time_us) for time_us in times_us]
                self.recorder.samples(self.workload, system, metric.name, metric.unit, figures, metric.bound)
            return summarize(times_us).p50
        return None
