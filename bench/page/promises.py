"""What the issues have promised, computed from rows by each suite; and throughput over that of blocks, with intervals."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.baselines import COMMON_PREFILL
from bench.hf.bars import bars as hf_bars
from bench.kernels.bars import Bar
from bench.kernels.bars import bars as kernel_bars
from bench.prefix.bars import bars as prefix_bars
from bench.rows import Row
from bench.serve import SYSTEM
from bench.serve.bars import bars as serve_bars
from bench.timing import middle
from bench.waste.bars import bars as waste_bars

_PAGED: Final = "paged 16"
_THROUGHPUT: Final = "throughput"
_LEAST: Final = 0.99
"""Of the throughput over blocks, whatever the workload and the rate: the issue of the benchmarks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The throughput of one way to serve over that of blocks, and the least and the most that the intervals allow."""

    workload: str
    system: str
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Kept by the medians or not; and whether the intervals leave that open."""
        said = "kept" if self.ratio >= _LEAST else "not kept"
        return f"{said}, within noise" if self.low < _LEAST <= self.high else said


def promises(suite: str, rows: Sequence[Row]) -> list[Bar]:
    """Those of a suite; none if nothing of any of them was measured."""
    found = list(_BARS[suite](rows)) if suite in _BARS else []
    return found if any(bar.figures for bar in found) else []


def over_blocks(rows: Sequence[Row]) -> list[Ratio]:
    """Of every workload that was served over both. Between p20 and p80 of either side: from the worst to the best."""
    found = {(row.workload, row.system): row.summary for row in rows if row.suite == "serve" and row.metric == _THROUGHPUT}
    ratios = []
    for (workload, system), ours in found.items():
        paged = found.get((workload, _PAGED))
        if system in (SYSTEM, COMMON_PREFILL) and paged is not None and paged.p20 > 0:
            ratios.append(
                Ratio(
                    workload=workload,
                    system=system,
                    ratio=middle(ours) / middle(paged),
                    low=ours.p20 / paged.p80,
                    high=ours.p80 / paged.p20,
                )
            )
    return ratios


def _of_kernels(rows: Sequence[Row]) -> Iterator[Bar]:
    return kernel_bars({(row.workload, row.system, row.metric): row.summary.p50 for row in rows})


def _of_prefix(rows: Sequence[Row]) -> Iterator[Bar]:
    keyed = {(row.workload, row.system, row.metric): row.summary for row in rows}
    return prefix_bars({key: s.p50 for key, s in keyed.items()}, {key: s.p99 for key, s in keyed.items()})


_BARS: Final[Mapping[str, Callable[[Sequence[Row]], Iterator[Bar]]]] = {
    "waste": waste_bars,
    "kernels": _of_kernels,
    "prefix": _of_prefix,
    "serve": serve_bars,
    "hf": hf_bars,
}
