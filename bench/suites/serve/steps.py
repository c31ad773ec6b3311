"""Steps: decode steps against the time to read weights, K and V once, and from the profiler what all steps are made of.

    kernels   |== a ==|   |== b =====|
                               |== c =========|        c waits in its beginning for b: programmatic dependent launch
    of a step |== a ==|...|== b =====|== c ===|...     ... a gap

An instant belongs to the kernel that has run longest; so launching early moves no time from one kernel to another.
"""

import itertools
import random
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Final, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from bench.harness import WrongNumbers
from bench.suites.serve.users import stages
from bench.systems import Context
from bench.systems.engine import EngineSystem, of_users, params_of
from bench.systems.models import Weights, prefill_s, read_s
from vmmkv.units import ceil_div
from vmmkv_server.engine.loading import STEP_TOKENS

_SYSTEM: Final = "vmmkv"
_APART: Final = 16
"""Prompts are up to so many tokens shorter than each other, as many as a page of Llama-3.1-8B has: their pages end one after
the other, as those of requests that came at any time do."""
_SETTLING: Final = 8
"""Decode steps before the profiler is started."""
_PROFILED: Final = 20
_COPIES: Final = ("Memcpy", "Memset")
"""What the profiler calls what is no kernel. While nothing else is done, they are in the gaps."""
_DECODE_BEGINS: Final = "_begin"
"""The first kernel of a decode step, by its name; a mixed step has none of it. See kernels/vmmkv_kernels/step.py."""
_STEP_ENDS: Final = "_end"
"""The last kernel of each step."""
_OTHER: Final = "other kernels"
_KINDS: Final = (
    ("attention", re.compile(r"attend|merge_|prefill|flash|fmha|attention|sdpa")),
    ("GEMM", re.compile(r"multiply_by_dots|multiply_in_registers|gemm|gemv|nvjet|cutlass|xmma|splitk|cublas", re.IGNORECASE)),
    (_OTHER, re.compile("")),
)


def run(context: Context, part: str) -> None:
    """Steps, timed or profiled."""
    if part == "step":
        _time_steps(context, context.engine(_open, context))
    elif context.settings.on_gpu:
        _break_down_decoding(context, context.engine(_open, context))
        _break_down_mixed(context, context.engine(_open, context))
    else:
        context.recorder.say("absent: breakdown: there are no kernels to trace on a CPU")


def _open(context: Context) -> EngineSystem:
    """The engine's loop over vmmkv, with its own choice of memory: it takes all of a GPU."""
    settings = context.settings
    with closing(Weights(context.model, settings)) as weights:
        return EngineSystem(weights, of_users(settings))


def _time_steps(context: Context, engine: EngineSystem) -> None:
    """Steps of every batch at one context, and of one batch at a short and a long one."""
    small = context.settings.small
    cases = [(1, 64), (4, 64), (2, 512)] if small else [(1, 1024), (64, 1024), (256, 1024), (16, 256), (16, 8192)]
    window = 12 if small else 96
    for batch, rows in cases:
        name = context.name("step", f"batch {batch}, context {rows}")
        with context.recorder.guarded(name, _SYSTEM):
            times_us: list[float] = []
            for number in range(1 + context.settings.repeat):
                context.recorder.note(f"{name}, run {number} of {context.settings.repeat}")
                took_us = list(_steady_us(context, engine, batch, rows, window))
                if number:
                    times_us += took_us[-window:]
            limit_us = 1e6 * read_s(context.model, batch * rows)
            context.recorder.samples(name, _SYSTEM, "step", "us", times_us, limit_us)


def _break_down_decoding(context: Context, engine: EngineSystem) -> None:
    """For every batch, at one context: the time of each kind of kernel, and of none.

    The profiler is started and stopped while steps are under way: on CUDA 13 a session without kernels was seen to leave all
    later ones without any. What it has hooked into the driver stays there, and slows what is timed later.
    """
    recorder = context.recorder
    rows = 64 if context.settings.small else 1024
    for batch in (1, 4) if context.settings.small else (1, 64, 256):
        name = context.name("breakdown", f"batch {batch}, context {rows}")
        with recorder.guarded(name, _SYSTEM):
            steps = steps_of(_trace(context, engine, batch, rows))
            steps = steps[1:-1] or steps  # the profiler's beginning and end disturb the steps beside them
            counts = {each.num_kernels for each in steps}
            if max(counts) > 2 * min(counts):
                raise WrongNumbers(f"the steps of the trace have from {min(counts)} to {max(counts)} kernels: it is not steady")
            recorder.samples(name, _SYSTEM, "step, profiled", "us", [each.total_us for each in steps])
            recorder.samples(name, _SYSTEM, "kernels", "/step", [each.num_kernels for each in steps])
            for metric in steps[0].parts_us:
                of_step = [100 * each.parts_us[metric] / each.total_us for each in steps]
                recorder.samples(name, _SYSTEM, metric, "% of the step", of_step)


def _break_down_mixed(context: Context, engine: EngineSystem) -> None:
    """The requests of the part `mixed`, from the first to the last step: seconds by kind of step and of kernel."""
    (stage,), recorder, model = stages(context.model, context.settings, "mixed"), context.recorder, context.model
    name = context.name("breakdown", stage.workload.text)
    with recorder.guarded(name, _SYSTEM):
        engine.run(stage.workload)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            engine.run(stage.workload)
        steps = steps_of(_kernels_of(profiler))
        mixed_s = sum(prefill_s(model, 0, len(ask.prompt)) for ask in stage.workload.asks)
        bounds = {("mixed", "total"): mixed_s, ("decode", "total"): stage.bound_s - mixed_s}
        for kind in ("mixed", "decode"):
            of_kind = [each for each in steps if each.is_mixed == (kind == "mixed")]
            parts_s = {part: 1e-6 * sum(each.parts_us[part] for each in of_kind) for part in steps[0].parts_us}
            bounds[kind, "GEMM"] = mixed_s if kind == "mixed" else len(of_kind) * read_s(model, 0)
            for part, seconds in {"total": 1e-6 * sum(each.total_us for each in of_kind), **parts_s}.items():
                recorder.figure(name, _SYSTEM, f"{kind} steps: {part}", "s", seconds, len(of_kind), bounds.get((kind, part)))


@torch.inference_mode()
def _steady_us(context: Context, engine: EngineSystem, batch: int, rows: int, window: int) -> Iterator[float]:
    """Microseconds from step to step while all of a batch decode, at least `window` of them around `rows` rows each.

    The first of many prompts begins to decode while the last are computed: all answers have steps to spare.
    Raises: WrongNumbers if too few steps had the whole batch.
    """
    spare = max(window // 2, ceil_div(batch * rows, STEP_TOKENS[context.settings.device.type]))
    length = rows - window // 2 - spare
    assert length >= _APART, "the first has left the context when the last prompt is computed"
    seed = context.settings.seed
    draws = random.Random(seed)
    engine.forget()
    for index in range(batch):
        prompt = context.model.tokens(seed, length - draws.randrange(_APART), 7, batch, rows, index)
        engine.add(index, prompt.tolist(), params_of(window + 2 * spare))
    num_steady, before_s = 0, None
    try:
        while engine.loop.has_work:
            engine.loop.step()
            now_s = time.perf_counter()
            outputs = sum(len(each.token_ids) for each in engine.outputs())
            if outputs == batch and before_s is not None:
                num_steady += 1
                yield 1e6 * (now_s - before_s)
            before_s = now_s if outputs == batch else None
    finally:
        engine.abort(batch)
    if num_steady < window:
        raise WrongNumbers(f"only {num_steady} steps had all {batch} sequences, of {window} that are wanted")


class KernelSpan(NamedTuple):
    """One that has run."""

    name: str
    start_us: float
    end_us: float


class StepTimes(NamedTuple):
    """Of one step, from its first kernel's beginning to that of the next step."""

    total_us: float
    parts_us: dict[str, float]
    """By kind of kernel; `gaps`, in which no kernel runs; and of these `gap between steps`, behind the last kernel."""
    num_kernels: int
    is_mixed: bool


def _trace(context: Context, engine: EngineSystem, batch: int, rows: int) -> list[KernelSpan]:
    context.recorder.note(f"breakdown, batch {batch}")
    profiler = profile(activities=[ProfilerActivity.CUDA])
    steps = _steady_us(context, engine, batch, rows, _SETTLING + 2 * _PROFILED)
    for number, _ in enumerate(steps):
        if number == _SETTLING:
            profiler.start()
        elif number == _SETTLING + _PROFILED:
            profiler.stop()
    return _kernels_of(profiler)


def _kernels_of(profiler: profile) -> list[KernelSpan]:
    return [
        KernelSpan(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()  # type: ignore[no-untyped-call]
        if event.device_type.name == "CUDA" and not event.is_user_annotation and not event.name.startswith(_COPIES)
    ]


def kind_of(name: str) -> str:
    """The kind of a kernel, by its name."""
    return next(kind for kind, pattern in _KINDS if pattern.search(name))


def steps_of(kernels: Iterable[KernelSpan]) -> list[StepTimes]:
    """The steps of a trace; its beginning may cut the first. Raises: WrongNumbers if there is none."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start_us)
    ends = [index for index, kernel in enumerate(ordered, 1) if kernel.name == _STEP_ENDS]
    if not ends:
        raise WrongNumbers(f"{len(ordered)} kernels were seen, and no end of a step")
    steps = []
    busy_until_us = float("-inf")
    for begin, end in itertools.pairwise([0, *ends]):
        parts_us = {kind: 0.0 for kind, _ in _KINDS}
        for kernel in ordered[begin:end]:  # a kernel's own time is that after those that began before it had ended
            parts_us[kind_of(kernel.name)] += max(0.0, kernel.end_us - max(kernel.start_us, busy_until_us))
            busy_until_us = max(busy_until_us, kernel.end_us)
        next_us = ordered[end].start_us if end < len(ordered) else busy_until_us
        total_us = next_us - ordered[begin].start_us
        parts_us["gaps"] = max(0.0, total_us - sum(parts_us.values()))
        parts_us["gap between steps"] = max(0.0, next_us - busy_until_us)
        is_mixed = all(kernel.name != _DECODE_BEGINS for kernel in ordered[begin:end])
        steps.append(StepTimes(total_us, parts_us, end - begin, is_mixed))
    return steps
