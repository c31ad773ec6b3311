"""Histograms of times that cost a third of a microsecond to add to: one is added to for every token of every request."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from prometheus_client.core import HistogramMetricFamily

OF_REQUESTS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
OF_TOKENS: Final = (
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)
OF_QUEUE: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Times:
    """How often times fell between which bounds. For one thread: it has no lock, as prometheus_client's own has."""

    def __init__(self, name: str, help_text: str, bounds_s: Sequence[float]) -> None:
        """`name` without prefix and unit."""
        self._name = f"vmmkv_{name}_seconds"
        self._help = help_text
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, time_s: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds_s, time_s)] += 1
        self._sum_s += time_s

    def totals(self) -> tuple[int, float]:
        """How many, and their sum."""
        return sum(self._counts), self._sum_s

    def family(self) -> HistogramMetricFamily:
        """As Prometheus has it: each bucket counts those below too."""
        family = HistogramMetricFamily(self._name, self._help)
        buckets, below = [], 0
        for bound, count in zip((*map(str, self._bounds_s), "+Inf"), self._counts, strict=True):
            below += count
            buckets.append((bound, below))
        family.add_metric((), buckets, self._sum_s)
        return family
