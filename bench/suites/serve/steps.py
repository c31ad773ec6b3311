"""Decode steps: against the time to read weights, K and V once, and from the profiler what they are made of.

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
from bench.suites.serve import Context
from bench.suites.serve.generate import random_tokens
from bench.suites.serve.models import Weights, read_s
from bench.suites.serve.systems import EngineLimits, EngineSystem
from vmmkv.units import ceil_div

_SYSTEM: Final = "vmmkv"
_APART: Final = 16
"""Prompts are up to so many tokens shorter than each other, as many as a page of Llama-3.1-8B has: their pages end one after
the other, as those of requests that came at any time do."""
_SETTLING: Final = 8
"""Decode steps before the profiler is started."""
_PROFILED: Final = 20
_COPIES: Final = ("Memcpy", "Memset")
"""What the profiler calls what is no kernel. While nothing else is done, they are in the gaps."""
_STEP_BEGINS: Final = "_begin"
"""The first kernel of each decode step, by its name: see kernels/step.py."""
_OTHER: Final = "other kernels"
_KINDS: Final = (
    ("attention", re.compile(r"attend|merge_|prefill|flash|fmha|attention|sdpa")),
    ("GEMM", re.compile(r"multiply_by_dots|multiply_in_registers|gemm|gemv|nvjet|cutlass|xmma|splitk|cublas", re.IGNORECASE)),
    (_OTHER, re.compile("")),
)


def run(context: Context, part: str) -> None:
    """Decode steps, timed or profiled."""
    if part == "breakdown" and not context.settings.on_gpu:
        context.recorder.say("absent: breakdown: there are no kernels to trace on a CPU")
        return
    (_time_steps if part == "step" else _break_down)(context, context.engine(_open, context))


def _open(context: Context) -> EngineSystem:
    """The engine's loop over vmmkv, with its own choice of memory: it takes all of a GPU."""
    settings = context.settings
    with closing(Weights(context.model, settings.device, settings.seed)) as weights:
        return EngineSystem(_SYSTEM, weights, EngineLimits.of(settings))


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


def _break_down(context: Context, engine: EngineSystem) -> None:
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
            recorder.samples(name, _SYSTEM, "step, profiled", "us", [each.total_us for each in steps])
            recorder.samples(name, _SYSTEM, "kernels", "/step", [each.num_kernels for each in steps])
            shares = {kind: [each.by_kind_us[kind] for each in steps] for kind, _ in _KINDS}
            shares |= {"gaps": [each.gaps_us for each in steps], "gap between steps": [each.between_us for each in steps]}
            for metric, parts_us in shares.items():
                of_step = [100 * us / each.total_us for us, each in zip(parts_us, steps, strict=True)]
                recorder.samples(name, _SYSTEM, metric, "% of the step", of_step)


@torch.inference_mode()
def _steady_us(context: Context, engine: EngineSystem, batch: int, rows: int, window: int) -> Iterator[float]:
    """Microseconds from step to step while all of a batch decode, at least `window` of them around `rows` rows each.

    The first of many prompts begins to decode while the last are computed: all answers have steps to spare.
    Raises: ValueError if prompts take too many steps; WrongNumbers if too few steps had the whole batch.
    """
    spare = max(window // 2, ceil_div(batch * rows, engine.step_tokens))
    length = rows - window // 2 - spare
    if length < _APART:
        raise ValueError(
            f"{batch} prompts of about {rows} tokens take {spare} steps of {engine.step_tokens} tokens: by then the first has "
            "left the context; raise --max-num-batched-tokens"
        )
    seed = context.settings.seed
    draws = random.Random(seed)
    engine.forget()
    for index in range(batch):
        prompt = random_tokens(context.model, seed, length - draws.randrange(_APART), 7, batch, rows, index)
        engine.add(index, prompt, window + 2 * spare)
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
    by_kind_us: dict[str, float]
    between_us: float
    """From its last kernel's end to the next step's first kernel."""
    num_kernels: int

    @property
    def gaps_us(self) -> float:
        """All time in which no kernel runs."""
        return max(0.0, self.total_us - sum(self.by_kind_us.values()))


def _trace(context: Context, engine: EngineSystem, batch: int, rows: int) -> list[KernelSpan]:
    context.recorder.note(f"breakdown, batch {batch}")
    profiler = profile(activities=[ProfilerActivity.CUDA])
    steps = _steady_us(context, engine, batch, rows, _SETTLING + 2 * _PROFILED)
    for number, _ in enumerate(steps):
        if number == _SETTLING:
            profiler.start()
        elif number == _SETTLING + _PROFILED:
            profiler.stop()
    return [
        KernelSpan(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()  # type: ignore[no-untyped-call]
        if event.device_type.name == "CUDA" and not event.is_user_annotation and not event.name.startswith(_COPIES)
    ]


def kind_of(name: str) -> str:
    """The kind of a kernel, by its name."""
    return next(kind for kind, pattern in _KINDS if pattern.search(name))


def steps_of(kernels: Iterable[KernelSpan]) -> list[StepTimes]:
    """All steps that are wholly in a trace. Raises: WrongNumbers if there is none, or they do not have the same kernels."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start_us)
    begins = [index for index, kernel in enumerate(ordered) if kernel.name == _STEP_BEGINS]
    if len(begins) < 2:
        raise WrongNumbers(f"{len(ordered)} kernels were seen, and {len(begins)} beginnings of steps: there is no whole one")
    steps = []
    busy_until_us = max((kernel.end_us for kernel in ordered[: begins[0]]), default=float("-inf"))
    for begin, end in itertools.pairwise(begins):
        by_kind = {kind: 0.0 for kind, _ in _KINDS}
        for kernel in ordered[begin:end]:  # a kernel's own time is that after those that began before it had ended
            by_kind[kind_of(kernel.name)] += max(0.0, kernel.end_us - max(kernel.start_us, busy_until_us))
            busy_until_us = max(busy_until_us, kernel.end_us)
        last_us, next_us = max(kernel.end_us for kernel in ordered[begin:end]), ordered[end].start_us
        steps.append(StepTimes(next_us - ordered[begin].start_us, by_kind, max(0.0, next_us - last_us), end - begin))
    counts = {each.num_kernels for each in steps}
    if max(counts) > 2 * min(counts):
        raise WrongNumbers(f"the steps of the trace have from {min(counts)} to {max(counts)} kernels: it is not steady")
    return steps
