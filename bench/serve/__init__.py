"""The engine under load, through `vmmkv.server.Engine`: what its workloads take, and where a decode step's time goes.

bench/README.md defines the workloads, and says how vLLM was run on them.

models     the models, by configuration      roofline    the least time that an H200 needs
sizes      how large everything is           requests    prompts, and what is asked
engine     the engine, timed from outside    clock       its steps, timed from inside
checks     before anything is timed          context     what parts share
workloads, steps, breakdown (kernel_times): the parts    bars    what was promised, and vLLM's figures

Parts that compare systems, all over the same weights and with the same limits:

compared   closed, rates, bursts, outside: who serves how fast        compared_sizes   what is asked, of which limits
system     the engine over one kind of memory        outside/         what serves without it
drive      requests put to it when they arrive       turns            who may be served when

Parts with texts, by a real tokenizer over random weights (padding):

over_http  http: the same requests over HTTP and without          server    `vmmkv serve` and its clients, in processes
grammar    grammar: masks, and what is forced skipped or sampled  scripted  an engine that says a script
schemas    what the answers follow                                needs     what these parts lack here
"""

from dataclasses import replace
from importlib import import_module
from typing import Final

from bench.report import Report
from bench.serve.models import model_of
from bench.serve.needs import NEEDY, lacking
from bench.serve.sizes import Sizes
from bench.settings import Settings, Shape
from bench.timing import now_us

SUITE: Final = "serve"

SYSTEM: Final = "vmmkv"
"""Of all rows but those of what it is compared with."""

SERVED: Final = "vmmkv serve"
"""The same engine behind HTTP."""

FREE: Final = "free text"
"""The engine's answers without a grammar, beside those with one."""

MASKS_COST: Final = f"time per token over {FREE}, by request"
JUMPS_GAIN: Final = "times as fast, by request"
"""Ratios of one request's times, a sample a request. One of totals is made by whoever was late."""

PARTS: Final = {
    "mixed": "workloads",
    "single": "workloads",
    "first": "workloads",
    "long": "workloads",
    "shared": "workloads",
    "closed": "compared",
    "rates": "compared",
    "bursts": "compared",
    "outside": "compared",
    "http": "over_http",
    "grammar": "grammar",
    "step": "steps",
    "breakdown": "breakdown",
}
"""The module where each is a function of that name. It is loaded when the suite runs: the other suites need no server."""

_COMPARED: Final = "compared"
"""The module whose parts have cases."""

_ALONE: Final = (_COMPARED, "over_http", "grammar")
"""Modules whose parts have engines of their own: each is a piece of a run."""

_LAST: Final = "breakdown"

_BY_DEFAULT: Final = ("llama-3.1-8b", "qwen3-0.6b")
"""Shapes that are measured on a GPU if none is named: those that something is promised of."""

_LONG: Final = ("llama-3.1-8b", "wide")
"""Shapes whose `long` part is measured without being asked for: that is promised of the first only."""


def check(settings: Settings) -> None:
    """Raises: ValueError for a part that there is not, naming those that there are; for one that was asked for, by its name or
    by a tokenizer for it, and lacks something; for cases that its parts have not; or for steps of too few tokens.
    """
    if unknown := [part for part in settings.parts if part not in PARTS]:
        raise ValueError(f"no part {', '.join(unknown)}; serve has {', '.join(PARTS)}")
    for part in NEEDY:
        asked = part in settings.parts or (settings.tokenizer is not None and not settings.parts)
        if asked and (why := lacking(part, settings)):
            raise ValueError(f"serve's part {part} cannot run: {why}")
    _check_cases(settings)
    small = settings.quick or not settings.on_gpu
    for shape in _shapes(settings):
        num_sequences = Sizes.of(model_of(shape.name, tiny=small), small=small).max_num_seqs
        step_tokens = settings.max_num_batched_tokens
        if step_tokens is not None and step_tokens < num_sequences:
            raise ValueError(
                f"--max-num-batched-tokens {step_tokens} is less than the {num_sequences} sequences that run at once, each of "
                f"which needs one token a step; raise it to {num_sequences} at least"
            )


def _check_cases(settings: Settings) -> None:
    """Cases are of the parts that were named. Where none was, they are another suite's."""
    if not (settings.cases and settings.parts):
        return
    if others := [part for part in settings.parts if PARTS[part] != _COMPARED]:
        some = ", ".join(part for part, module in PARTS.items() if module == _COMPARED)
        raise ValueError(f"--cases: serve's part {', '.join(others)} has none; {some} have some, and are then named alone")
    names = {part: _case_names(settings, _shapes(settings)[0], part) for part in settings.parts}
    if unknown := [case for case in settings.cases if not any(case in of_part for of_part in names.values())]:
        there_are = "; ".join(f"{part} has {', '.join(of_part)}" for part, of_part in names.items())
        raise ValueError(f"no case {', '.join(unknown)}: {there_are}")


def _case_names(settings: Settings, shape: Shape, part: str) -> list[str]:
    from bench.serve.compared_sizes import sizes_of

    return sizes_of(settings, model_of(shape.name, tiny=settings.quick or not settings.on_gpu)).case_names(part)


def absent(settings: Settings) -> dict[str, str]:
    """Parts that are left out because they lack something here, and why. Where parts were named, only those without the cases
    that were named too: see check.
    """
    if settings.parts:
        named = set(settings.cases)
        parts = settings.parts if named else ()
        without = [part for part in parts if named.isdisjoint(_case_names(settings, _shapes(settings)[0], part))]
        return dict.fromkeys(without, "it has none of these cases")
    return {part: why for part in NEEDY if (why := lacking(part, settings))}


def pieces(settings: Settings) -> dict[str, Settings]:
    """What runs by itself, and what a run can be resumed at: of each shape the parts of one engine, and each comparison.

    The profiler slows what comes later: its part goes last, of all shapes.
    """
    groups: dict[tuple[Shape, str], list[str]] = {}
    cases: dict[tuple[Shape, str], tuple[str, ...]] = {}
    for shape in _shapes(settings):
        for name in _parts(settings, shape):
            alone = PARTS[name] in _ALONE or name == _LAST
            group = shape, name if alone else "engine"
            if settings.cases and settings.parts:
                own = _case_names(settings, shape, name)
                cases[group] = tuple(case for case in own if case in settings.cases)
                if not cases[group]:
                    continue
            groups.setdefault(group, []).append(name)
    last_last = sorted(groups.items(), key=lambda item: item[1] == [_LAST])
    return {
        f"{shape.name} {group}": replace(
            settings, shape=shape, shapes=(), parts=tuple(names), cases=cases.get((shape, group), ())
        )
        for (shape, group), names in last_last
    }


def run(settings: Settings, report: Report) -> None:
    """Every part for every shape. What fails has a row `failed`, and is raised at the end.

    It has no other, but for `http`: the engine's own have been checked before the server starts.

    Raises: ExceptionGroup of WrongNumbers and whatever else the engine raised; ValueError for a part that there is not.
    """
    from bench.serve.context import Context

    check(settings)
    failures: list[Exception] = []
    for shape, names in _passes(settings):
        context = Context(settings, report, shape)
        try:
            for name in names:
                began_us = now_us()
                getattr(import_module(f"bench.serve.{PARTS[name]}"), name)(context)
                report.say(f"{context.model.name} {name}: {(now_us() - began_us) / 1e6:.1f} s")
        finally:
            context.close()
        failures += context.failures
    if failures:
        raise ExceptionGroup(f"{len(failures)} workloads have failed", failures)


def _passes(settings: Settings) -> list[tuple[Shape, list[str]]]:
    """Shapes, and parts with one engine of each. The profiler slows what comes later: its part goes last, of all shapes."""
    *others, last = [(shape, _parts(settings, shape)) for shape in _shapes(settings)]
    first = [(shape, [name for name in names if name != _LAST]) for shape, names in others]
    again = [(shape, [_LAST]) for shape, names in others if _LAST in names]
    return [(shape, names) for shape, names in (*first, last, *again) if names]


def _shapes(settings: Settings) -> list[Shape]:
    if settings.shapes:
        return [shape for shape in settings.shapes if shape.name in _BY_DEFAULT]
    return [settings.shape]


def _parts(settings: Settings, shape: Shape) -> list[str]:
    if settings.parts:
        return [name for name in PARTS if name in settings.parts]
    small = settings.quick or not settings.on_gpu
    left_out = [*([] if shape.name in _LONG else ["long"]), *([] if small else ["outside"]), *absent(settings)]
    return [name for name in PARTS if name not in left_out]
