"""What a decode step is made of, from the profiler: steps in the middle of a long decode.

The profiler is started and stopped while steps are under way, and never over nothing: on CUDA 13 a session without kernels
was seen to leave all later ones without any. What it has hooked into the driver stays there, and slows what is timed later.
"""

from typing import Final

from torch.profiler import ProfilerActivity, profile

from bench.serve.clock import timed
from bench.serve.context import Context
from bench.serve.kernel_times import KINDS, Kernel, StepTimes, steps_of
from bench.timing import WrongNumbers
from vmmkv.server.engine.scheduler import Plan

_SETTLING: Final = 8
"""Decode steps before the profiler is started."""

_COPIES: Final = ("Memcpy", "Memset")
"""What the profiler calls what is no kernel. While nothing else is done, they are in the gaps."""


def breakdown(context: Context) -> None:
    """For every batch, at one context. Absent on a CPU, which has no kernels to trace."""
    if not context.settings.on_gpu:
        context.report.say("absent: breakdown: there are no kernels to trace on a CPU")
        return
    sizes = context.sizes
    for batch in sizes.batches:
        workload = context.name("breakdown", f"batch {batch}, context {sizes.context}")
        with context.guarded(workload):
            context.progress(f"breakdown, batch {batch}")
            _add_rows(context, workload, steps_of(_trace(context, batch)))


def _trace(context: Context, batch: int) -> list[Kernel]:
    sizes, engine = context.sizes, context.engine
    prompts, out = context.requests.steady(batch, sizes.context, sizes.window, engine.step_tokens)
    profiler = profile(activities=[ProfilerActivity.CUDA])
    num_seen, is_on = 0, False

    def on_step(plan: Plan) -> None:
        nonlocal num_seen, is_on
        if plan.chunks or len(plan.decoding) != batch:
            return
        num_seen += 1
        if num_seen == _SETTLING:
            profiler.start()
            is_on = True
        elif num_seen == _SETTLING + sizes.profiled:
            profiler.stop()
            is_on = False

    engine.forget()
    try:
        with timed(engine.core, on_step):
            engine.ask(prompts, [out] * batch)
    finally:
        if is_on:
            profiler.stop()
    if num_seen < _SETTLING + sizes.profiled:
        raise WrongNumbers(f"only {num_seen} steps had all {batch} sequences: too few to be traced")
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()  # type: ignore[no-untyped-call]
        if event.device_type.name == "CUDA" and not event.is_user_annotation and not event.name.startswith(_COPIES)
    ]


def _add_rows(context: Context, workload: str, steps: list[StepTimes]) -> None:
    # The profiler's beginning and end disturb the steps beside them.
    steps = steps[1:-1] or steps
    context.add(workload, "step, profiled", "us", [each.total_us for each in steps])
    context.add(workload, "kernels", "/step", [each.num_kernels for each in steps])
    for kind in KINDS:
        context.add(workload, kind, "% of the step", [100 * each.by_kind_us[kind] / each.total_us for each in steps])
    context.add(workload, "gaps", "% of the step", [100 * each.gaps_us / each.total_us for each in steps])
    between = [100 * each.between_us / each.total_us for each in steps]
    context.add(workload, "gap between steps", "% of the step", between)
