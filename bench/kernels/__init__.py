"""What the kernels cost on a GPU: attention over each kind of memory, by each system; append; copy.

cases     batches by their lengths          formats   what a row holds         fill      random rows, fast
memories  where rows lie                    batch     queries, and the check   systems   what reads them (fa3: one of them)
measure   prepare, check, time, report      attention, attending, appending, copying: the parts of the suite
bars      what the project has promised, computed from rows
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from bench.kernels import appending, attending, copying, fa3
from bench.kernels.measure import Measurer
from bench.report import Report
from bench.settings import Settings

PARTS: Final[dict[str, Callable[[Measurer], None]]] = {
    "decode": attending.run_decode,
    "prefill": attending.run_prefill,
    "quantised": attending.run_quantised,
    "append": appending.run,
    "copy": copying.run,
}

_ONCE: Final = ("quantised", "copy")
"""Parts that are measured for the first shape only: their question is not one of shapes."""


def run(settings: Settings, report: Report) -> None:
    """Every part for every shape. What fails, or gives wrong outputs, is not timed, and raised at the end.

    Raises: ExceptionGroup of WrongNumbers and whatever else a system raised; ValueError for a part that there is not.
    """
    if unknown := [part for part in settings.parts if part not in PARTS]:
        raise ValueError(f"no part {', '.join(unknown)}; kernels has {', '.join(PARTS)}")
    failures: list[Exception] = []
    if settings.fa3 is not None:
        try:
            fa3.load(settings.fa3)
        except (OSError, RuntimeError) as error:
            report.say(f"absent: FlashAttention-3: {error}")
            failures.append(error)
            settings = replace(settings, fa3=None)
    elif settings.on_gpu:
        report.say("absent: FlashAttention-3, whose library --fa3 names")
    shapes = settings.kernel_shapes
    steps = [
        (shape, part)
        for shape in shapes
        for part in PARTS
        if (not settings.parts or part in settings.parts) and (shape is shapes[0] or part not in _ONCE)
    ]
    with report.progress("kernels", len(steps)) as begin:
        for shape, part in steps:
            begin(f"{shape.name}, {part}")
            measurer = Measurer(settings, report, shape)
            PARTS[part](measurer)
            failures += measurer.failures
    if failures:
        raise ExceptionGroup(f"{len(failures)} measurements are absent", failures)
