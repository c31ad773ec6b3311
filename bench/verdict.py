"""Of two rows of one metric: which is better, and do they differ by more than noise?

**The rule.** Two rows differ if their intervals from p20 to p80 have no point in common and their medians differ by more than
2 %. If either has fewer than 5 samples, its percentiles say little of its spread: then by more than 5 %. It is a rule for
reading, not a test of significance: samples of one run share what that run was given, so neighbouring runs differ by more than
the intervals say.
"""

from typing import Final

from bench.rows import FAILED
from bench.timing import Summary, middle

_LEAST_CHANGE: Final = 0.02
_LEAST_CHANGE_OF_FEW: Final = 0.05
_FEW: Final = 5

_HIGHER: Final = frozenset({"GB/s", "MiB/s", "TFLOP/s", "tok/s", "x"})
_LOWER: Final = frozenset(
    {"us", "ms", "s", "steps", "calls", "/request", "/turn", "bytes", "bytes/token", "B", "KiB", "MiB", "GiB", "runs"}
)
_BY_METRIC: Final[tuple[tuple[str, bool | None], ...]] = (
    # What is offered, not what is achieved; how much was done in all; whose memory it is.
    ("rate", None),
    ("maps", None),
    ("pumped", None),
    ("given back", None),
    ("held", None),
    ("lead of the mapper", None),
    ("rows of a sequence", None),
    ("parked", None),
    ("goodput", True),
    ("kept to the target", True),
    ("longest context", True),
    ("same tokens", True),
    ("running at once", True),
    ("admitted sequences", True),
    ("most of the budget", True),
    ("gave way", False),
    ("prompt tokens attached", True),
    ("same answers", True),
    ("steps saved", True),
    ("time per token over", False),
    ("waste", False),
    ("of it", False),
    ("outputs off by", False),
    ("first tokens off", False),
    ("logits off", False),
    ("perplexity", False),
    ("attention output error", False),
    ("gaps", False),
    (FAILED, False),
)
"""By how a metric begins, where its unit does not say it, or says it wrongly."""


_DIFFERENCES: Final = ("above exact", "off by", "over static")
"""What stands in the names of metrics that are what something has over, or is off from, something else."""


def is_difference(metric: str) -> bool:
    """Is it a difference? Of two of them a ratio says nothing: each may be next to 0."""
    return any(words in metric for words in _DIFFERENCES)


def higher_is_better(metric: str, unit: str) -> bool | None:
    """By the metric's name or else by its unit; None if neither is good or bad, or that is not known."""
    for start, higher in _BY_METRIC:
        if metric.startswith(start):
            return higher
    return True if unit in _HIGHER else False if unit in _LOWER else None


def change(before: Summary, after: Summary) -> float | None:
    """By which share the median has changed; None from 0 to something else."""
    old, new = middle(before), middle(after)
    if old == new:
        return 0.0
    return (new - old) / abs(old) if old else None


def differ(one: Summary, other: Summary) -> bool:
    """By more than noise, by the rule above. From 0, every change is a large one."""
    share = change(one, other)
    least = _LEAST_CHANGE_OF_FEW if min(one.n, other.n) < _FEW else _LEAST_CHANGE
    return (one.p80 < other.p20 or other.p80 < one.p20) and (share is None or abs(share) > least)
