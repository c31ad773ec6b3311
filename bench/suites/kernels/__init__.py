"""What the kernels cost on a GPU: attention over each kind of memory, by each system; append; copy.

    memories     batches, formats of rows, and where rows lie
    attention    what reads them, checked against the reference, and the parts that attend
    copies       append, and copies inside a GPU

Workloads are three words: shape, part, case, as in `llama-3.1-8b decode 64x8K`. Systems are named *what, over which memory*. On
a CPU decode and prefill run by the reference and torch's SDPA, and the other parts are absent.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from bench.harness import Recorder, Settings
from bench.suites.kernels import attention, copies
from bench.suites.kernels.measure import Measurer
from bench.suites.kernels.memories import SKEWED, TWIN, Case, uniform
from vmmkv.units import KIB

PARTS: Final = ("decode", "prefill", "shared", "quantised", "append", "copy")

_DECODE: Final = (
    *(uniform(1, 1 * KIB), uniform(1, 8 * KIB), uniform(1, 128 * KIB), uniform(16, 4 * KIB), uniform(64, 8 * KIB)),
    *(uniform(256, 2 * KIB), uniform(8, 64 * KIB), SKEWED, TWIN),
)
_MIXED: Final = Case(
    name="mixed",
    lengths=(2048, 8192, 3000, 129, *range(1024, 1024 + 60 * 37, 37)),
    counts=(2048, 1024, 777, 129, *(1,) * 60),
)
"""Four chunks of several lengths beside sixty rows that decode."""
_PREFILL: Final = (
    Case(name="8192", lengths=(8192,), counts=(8192,)),
    Case(name="2048-of-32768", lengths=(32768,), counts=(2048,)),
    _MIXED,
)
_QUICK_DECODE: Final = (uniform(1, 1 * KIB), uniform(16, 1 * KIB))
_QUICK_PREFILL: Final = (
    Case(name="512", lengths=(512,), counts=(512,)),
    Case(name="mixed", lengths=(300, 700), counts=(40, 1)),
)
_CPU: Final = {
    "decode": (Case(name="2x96", lengths=(96, 96)), Case(name="skewed", lengths=(1, 17, 128, 63))),
    "prefill": (
        Case(name="64", lengths=(64,), counts=(64,)),
        Case(name="mixed", lengths=(48, 64, 7), counts=(5, 64, 1)),
    ),
}
_ONCE: Final = ("quantised", "copy", "shared")
"""Parts that are measured for the first shape only: their question is not one of shapes."""


def cases(settings: Settings, part: str) -> Sequence[Case]:
    """All that this machine can run of a part."""
    if not settings.on_gpu:
        return _CPU.get(part, ())
    quick: dict[str, Sequence[Case]] = {
        "decode": _QUICK_DECODE,
        "prefill": _QUICK_PREFILL,
        "shared": _QUICK_DECODE[1:],
        "quantised": _QUICK_DECODE[1:],
        "append": (replace(uniform(16, 32), name="16"),),
        "copy": (copies.pages(64),),
    }
    full: dict[str, Sequence[Case]] = {
        "decode": _DECODE,
        "prefill": _PREFILL,
        "shared": (uniform(128, 4 * KIB),),
        "quantised": (uniform(64, 8 * KIB), uniform(16, 4 * KIB)),
        # By tokens appended: at the end of a sequence, of each of 256, and as a whole one.
        "append": tuple(replace(uniform(*size), name=name) for name, size in copies.APPENDS.items()),
        "copy": (copies.pages(1024),),
    }
    return (quick if settings.quick else full)[part]


def check(settings: Settings) -> None:
    """Raises: ValueError for a case that there is not, naming those that there are."""
    names = {part: [case.name for case in cases(settings, part)] for part in PARTS if settings.wants(part)}
    if unknown := [case for case in settings.cases if not any(case in of_part for of_part in names.values())]:
        where = "on a CPU" if not settings.on_gpu else "with --quick" if settings.quick else "without --quick"
        there_are = "; ".join(f"{part} has {', '.join(of_part) or 'none'}" for part, of_part in names.items())
        raise ValueError(f"no case {', '.join(unknown)} {where}: {there_are}")


def absent(settings: Settings) -> dict[str, str]:
    """Systems that are left out, and why."""
    if not settings.on_gpu:
        return {attention.FA3: "its kernels do not run on a CPU"}
    return {} if settings.fa3 else {attention.FA3: "--fa3 names no library of it"}


def run(recorder: Recorder) -> None:
    """Every part for every shape. What fails, or gives wrong outputs, is not timed."""
    settings = recorder.settings
    shapes = settings.shapes or (settings.shape,)
    run_part: dict[str, Callable[[Measurer, Case], None]] = {
        "decode": attention.run_decode,
        "prefill": attention.run_prefill,
        "shared": attention.run_shared,
        "quantised": attention.run_quantised,
        "append": copies.run_append,
        "copy": copies.run_copy,
    }
    if settings.fa3 is not None:
        attention.load_fa3(settings.fa3)
    steps = [
        (shape, part, case)
        for shape in shapes
        for part in PARTS
        if settings.wants(part) and (shape is shapes[0] or part not in _ONCE)
        for case in cases(settings, part)
        if not settings.cases or case.name in settings.cases
    ]
    for shape, part, case in recorder.track(steps, lambda step: f"{step[0].name} {step[1]} {step[2].name}"):
        measurer = Measurer(recorder, shape, f"{shape.name} {part} {case.name}")
        run_part[part](measurer, case)
