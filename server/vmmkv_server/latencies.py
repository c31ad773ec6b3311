"""Histograms of times."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from prometheus_client.core import HistogramMetricFamily

REQUEST_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
QUEUE_BOUNDS_S: Final = (0.001, *REQUEST_BOUNDS_S)
TOKEN_BOUNDS_S: Final = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0),
)


class Times:
    """A histogram without a lock, for one thread: `observe` takes a third of a microsecond, and runs for every token."""

    def __init__(self, name: str, help_text: str, bounds_s: Sequence[float]) -> None:
        """`name` is without prefix and unit."""
        self._name = f"{name}_seconds"
        self._help = help_text
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, time_s: float) -> None:
        """Add one time."""
        self._counts[bisect_left(self._bounds_s, time_s)] += 1
        self._sum_s += time_s

    def totals(self) -> tuple[int, float]:
        """Number of times, and their sum in seconds."""
        return sum(self._counts), self._sum_s

    def family(self, prefix: str = "vmmkv_", **labels: str) -> HistogramMetricFamily:
        """The histogram for Prometheus, with cumulative buckets."""
        family = HistogramMetricFamily(prefix + self._name, self._help, labels=tuple(labels))
        buckets, below = [], 0
        for bound, count in zip((*map(str, self._bounds_s), "+Inf"), self._counts, strict=True):
            below += count
            buckets.append((bound, below))
        family.add_metric(tuple(labels.values()), buckets, self._sum_s)
        return family
