"""From a trace of kernels to what a decode step is made of: multiplying, attending, other kernels, and nothing at all.

    kernels   |== a ==|   |== b =====|
                               |== c =========|        c waits in its beginning for b: programmatic dependent launch
    of a step |== a ==|...|== b =====|== c ===|...     ... a gap

An instant belongs to the kernel that has run longest; so launching early moves no time from one kernel to another.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bench.timing import WrongNumbers

STEP_BEGINS: Final = "_begin"
"""The first kernel of each decode step, by its name: see kernels/step.py."""

_KINDS: Final = (
    ("attention", re.compile(r"attend|merge_|_prefill|flash|fmha|attention|sdpa")),
    ("GEMM", re.compile(r"multiply_by_dots|multiply_in_registers|gemm|gemv|nvjet|cutlass|xmma|splitk|cublas", re.IGNORECASE)),
)
OTHER: Final = "other kernels"
KINDS: Final = (*(kind for kind, _ in _KINDS), OTHER)


class Kernel(NamedTuple):
    """One that has run."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Of one step, from its first kernel's beginning to that of the next step."""

    total_us: float
    by_kind_us: dict[str, float]
    between_us: float
    """From its last kernel's end to the next step's first kernel."""
    num_kernels: int

    @property
    def gaps_us(self) -> float:
        """All time in which no kernel runs."""
        return max(0.0, self.total_us - sum(self.by_kind_us.values()))


def kind_of(name: str) -> str:
    """One of KINDS, by the kernel's name."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), OTHER)


def steps_of(kernels: Iterable[Kernel]) -> list[StepTimes]:
    """All steps that are wholly in a trace. Raises WrongNumbers if there is none, or they do not have the same kernels."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start_us)
    begins = [index for index, kernel in enumerate(ordered) if kernel.name == STEP_BEGINS]
    if len(begins) < 2:
        raise WrongNumbers(f"{len(ordered)} kernels were seen, and {len(begins)} beginnings of steps: there is no whole one")
    own_us = _exclusive_us(ordered)
    steps = []
    for begin, end in itertools.pairwise(begins):
        by_kind = dict.fromkeys(KINDS, 0.0)
        for kernel, us in zip(ordered[begin:end], own_us[begin:end], strict=True):
            by_kind[kind_of(kernel.name)] += us
        last_us, next_us = max(kernel.end_us for kernel in ordered[begin:end]), ordered[end].start_us
        steps.append(
            StepTimes(
                total_us=next_us - ordered[begin].start_us,
                by_kind_us=by_kind,
                between_us=max(0.0, next_us - last_us),
                num_kernels=end - begin,
            )
        )
    counts = {each.num_kernels for each in steps}
    if max(counts) > 2 * min(counts):
        raise WrongNumbers(f"the steps of the trace have from {min(counts)} to {max(counts)} kernels: it is not steady")
    return steps


def _exclusive_us(ordered: Sequence[Kernel]) -> list[float]:
    """Of each kernel, the time after those that began before it had ended."""
    busy_until_us = float("-inf")
    own_us = []
    for kernel in ordered:
        own_us.append(max(0.0, kernel.end_us - max(kernel.start_us, busy_until_us)))
        busy_until_us = max(busy_until_us, kernel.end_us)
    return own_us
