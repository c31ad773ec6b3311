"""What the kernels cost on a GPU: attention over each kind of memory, by each system; append.

    memories     batches, formats of rows, and where rows lie
    attention    what reads them, checked against the reference, and the parts that attend
    appending    append, against torch's copy of the same bytes

Workloads are three words: shape, part, case, as in `llama-3.1-8b decode 64x8K`. Systems are named *what, over which memory*. On
a CPU decode and prefill run by the reference and torch's SDPA, and the other parts are absent.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Final

from bench.baselines import fa3
from bench.harness import Recorder, Settings, Shape, time_for
from bench.rows import summarize
from bench.suites.kernels.memories import SKEWED, TWIN, Case, uniform
from vmmkv.units import KIB

PARTS: Final = {**dict.fromkeys(("decode", "prefill", "shared", "quantised"), "attention"), "append": "appending"}
"""The module whose function `run_PART` measures each."""


def _chunk(name: str, length: int, count: int) -> Case:
    return Case(name=name, lengths=(length,), counts=(count,))


_SECONDS: Final = 0.2
"""For how long a system is replayed in one row."""
_SECONDS_QUICK: Final = 0.02
_MIXED: Final = Case(
    name="mixed",
    lengths=(2048, 8192, 3000, 129, *range(1024, 1024 + 60 * 37, 37)),
    counts=(2048, 1024, 777, 129, *(1,) * 60),
)
"""Four chunks of several lengths beside sixty rows that decode."""
_FULL: Final[Mapping[str, Sequence[Case]]] = {
    "decode": (
        *(uniform(1, 1 * KIB), uniform(1, 8 * KIB), uniform(1, 128 * KIB), uniform(16, 4 * KIB), uniform(64, 8 * KIB)),
        *(uniform(256, 2 * KIB), uniform(8, 64 * KIB), SKEWED, TWIN),
    ),
    "prefill": (_chunk("8192", 8192, 8192), _chunk("2048-of-32768", 32768, 2048), _MIXED),
    "shared": (uniform(128, 4 * KIB),),
    "quantised": (uniform(64, 8 * KIB), uniform(16, 4 * KIB)),
    # By tokens appended: at the end of a sequence, of each of 256, and as a whole one.
    "append": (
        replace(uniform(1, 1024), name="1"),
        replace(uniform(256, 64), name="256"),
        replace(uniform(1, 8192), name="8192"),
    ),
}
_QUICK: Final[Mapping[str, Sequence[Case]]] = {
    "decode": (uniform(1, 1 * KIB), uniform(16, 1 * KIB)),
    "prefill": (_chunk("512", 512, 512), Case(name="mixed", lengths=(300, 700), counts=(40, 1))),
    "shared": (uniform(16, 1 * KIB),),
    "quantised": (uniform(16, 1 * KIB),),
    "append": (replace(uniform(16, 32), name="16"),),
}
_CPU: Final[Mapping[str, Sequence[Case]]] = {
    "decode": (Case(name="2x96", lengths=(96, 96)), Case(name="skewed", lengths=(1, 17, 128, 63))),
    "prefill": (_chunk("64", 64, 64), Case(name="mixed", lengths=(48, 64, 7), counts=(5, 64, 1))),
}
_ONCE: Final = ("quantised", "shared")
"""Parts that are measured for the first shape only: their question is not one of shapes."""


def cases(settings: Settings, part: str) -> Sequence[Case]:
    """All that this machine can run of a part."""
    return (_CPU if not settings.on_gpu else _QUICK if settings.quick else _FULL).get(part, ())


def check(settings: Settings) -> None:
    """Raises: ValueError for a case that there is not, naming those that there are."""
    names = {part: [case.name for case in cases(settings, part)] for part in PARTS if settings.wants(part)}
    if unknown := [case for case in settings.cases if not any(case in of_part for of_part in names.values())]:
        where = "on a CPU" if not settings.on_gpu else "with --quick" if settings.quick else "without --quick"
        there_are = "; ".join(f"{part} has {', '.join(of_part) or 'none'}" for part, of_part in names.items())
        raise ValueError(f"no case {', '.join(unknown)} {where}: {there_are}")


def absent(settings: Settings) -> dict[str, str]:
    """Systems that are left out, and why."""
    why = fa3.why_absent(settings.fa3, settings.device)
    return {} if why is None else {fa3.NAME: why}


def run(recorder: Recorder) -> None:
    """Every part for every shape. What fails, or gives wrong outputs, is not timed."""
    settings = recorder.settings
    shapes = settings.shapes or (settings.shape,)
    fa3.load(settings.fa3, settings.device)
    steps = [
        (shape, part, case)
        for shape in shapes
        for part in PARTS
        if settings.wants(part) and (shape is shapes[0] or part not in _ONCE)
        for case in cases(settings, part)
        if not settings.cases or case.name in settings.cases
    ]
    for shape, part, case in recorder.track(steps, lambda step: f"{step[0].name} {step[1]} {step[2].name}"):
        measure = getattr(import_module(f"{__name__}.{PARTS[part]}"), f"run_{part}")
        measure(Measurer(recorder, shape, f"{shape.name} {part} {case.name}"), case)


# the measuring loop: prepare, run once, check, capture, replay for a while, report


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
