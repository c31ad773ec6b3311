"""What the kernels cost on a GPU: attention over each kind of memory, by each system; append; copy.

cases     batches by their lengths          formats   what a row holds         fill      random rows, fast
memories  where rows lie                    batch     queries, and the check   systems   what reads them (fa3, from_flashinfer)
measure   prepare, check, time, report      attention, attending, appending, copying: the parts of the suite
bars      what the project has promised, computed from rows
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from bench.kernels import appending, attending, copying, fa3, from_flashinfer
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

_CASE_NAMES: Final[dict[str, Callable[[Settings], Iterable[str]]]] = {
    "decode": lambda settings: (case.name for case in attending.decode_cases(settings)),
    "prefill": lambda settings: (case.name for case in attending.prefill_cases(settings)),
    "quantised": lambda settings: (case.name for case in attending.quantised_cases(settings)),
    "append": appending.cases_by_name,
    "copy": copying.pages_by_name,
}

_ONCE: Final = ("quantised", "copy")
"""Parts that are measured for the first shape only: their question is not one of shapes."""


def case_names(settings: Settings) -> dict[str, list[str]]:
    """By part, of the parts that are wanted, the cases that this machine can run: none of some parts on a CPU."""
    return {part: list(names(settings)) for part, names in _CASE_NAMES.items() if part in (settings.parts or PARTS)}


def check(settings: Settings) -> None:
    """Raises: ValueError for a part or a case that there is not, naming those that there are."""
    if unknown := [part for part in settings.parts if part not in PARTS]:
        raise ValueError(f"no part {', '.join(unknown)}; kernels has {', '.join(PARTS)}")
    names = case_names(settings)
    if unknown := [case for case in settings.cases if not any(case in of_part for of_part in names.values())]:
        where = "on a CPU" if not settings.on_gpu else "with --quick" if settings.quick else "without --quick"
        there_are = "; ".join(f"{part} has {', '.join(of_part) or 'none'}" for part, of_part in names.items())
        raise ValueError(f"no case {', '.join(unknown)} {where}: {there_are}")


def absent(settings: Settings) -> dict[str, str]:
    """Systems that are left out, and why."""
    if not settings.on_gpu:
        return dict.fromkeys((fa3.NAME, from_flashinfer.NAME), "its kernels do not run on a CPU")
    reasons = {}
    if settings.fa3 is None:
        reasons[fa3.NAME] = "--fa3 names no library of it"
    if not from_flashinfer.is_installed():
        reasons[from_flashinfer.NAME] = "the package flashinfer (flashinfer-python) is not installed"
    return reasons


def run(settings: Settings, report: Report) -> None:
    """Every part for every shape. What fails, or gives wrong outputs, is not timed, and raised at the end.

    Raises: ExceptionGroup of WrongNumbers and whatever else a system raised; ValueError for a part or case that there is not.
    """
    check(settings)
    names = case_names(settings)
    if without := [part for part, of_part in names.items() if not of_part]:
        report.say(f"absent: {', '.join(without)}: they time the Triton kernels, which do not run on a CPU")
    failures: list[Exception] = []
    if settings.fa3 is not None:
        try:
            fa3.load(settings.fa3)
        except (OSError, RuntimeError) as error:
            report.say(f"absent: {fa3.NAME}: {error}")
            failures.append(error)
            settings = replace(settings, fa3=None)
    shapes = settings.kernel_shapes
    steps = [
        (shape, part)
        for shape in shapes
        for part, of_part in names.items()
        if of_part and (shape is shapes[0] or part not in _ONCE)
    ]
    with report.progress("kernels", len(steps)) as begin:
        for shape, part in steps:
            begin(f"{shape.name}, {part}")
            measurer = Measurer(settings, report, shape)
            PARTS[part](measurer)
            failures += measurer.failures
    if failures:
        raise ExceptionGroup(f"{len(failures)} measurements are absent", failures)
