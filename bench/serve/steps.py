"""Decode steps against the byte limit, and what they cost the host whatever the context."""

from bench.serve import roofline
from bench.serve.clock import Steps, timed
from bench.serve.context import Context
from bench.timing import WrongNumbers, summarize


def step(context: Context) -> None:
    """Steps of every batch at one context; then the host's part at a short and at a long one."""
    sizes = context.sizes
    for batch in sizes.batches:
        workload = context.name("step", f"batch {batch}, context {sizes.context}")
        with context.guarded(workload):
            _add_steps(context, workload, batch, run(context, batch, sizes.context, "step"))
    for rows in sizes.host_contexts:
        workload = context.name(f"host {rows}", f"batch {sizes.host_batch}, context {rows}")
        with context.guarded(workload):
            _add_host(context, workload, sizes.host_batch, run(context, sizes.host_batch, rows, "host"))


def run(context: Context, batch: int, rows: int, part: str) -> list[Steps]:
    """As many timed runs as the settings want, behind one that is held against them and whose steps are left out.

    Raises: WrongNumbers if an answer is incomplete, or on a CPU another one than before.
    """
    engine = context.engine
    prompts, out = context.requests.steady(batch, rows, context.sizes.window, engine.step_tokens)
    outs = [out] * batch
    context.progress(f"{part}, batch {batch}, context {rows}: first run, not timed")
    engine.forget()
    wanted = engine.ask(prompts, outs)
    found = []
    for number in range(context.settings.repeat):
        context.progress(f"{part}, batch {batch}, context {rows}: run {number + 1} of {context.settings.repeat}")
        engine.forget()
        with timed(engine.core) as steps:
            given = engine.ask(prompts, outs)
        if given.tokens != wanted.tokens and not context.settings.on_gpu:
            raise WrongNumbers("the tokens are not those of the run before")
        found.append(steps)
    return found


def _add_steps(context: Context, workload: str, batch: int, runs: list[Steps]) -> None:
    rows, window = context.sizes.context, context.sizes.window
    between = range(rows - window // 2, rows + window // 2)
    found = [each for steps in runs for each in steps.between_us(batch, between)]
    if not found:
        raise WrongNumbers(f"no two steps one behind the other had all {batch} sequences at about {rows} rows")
    mean = summarize([mean for _, mean in found]).p50
    limit_us = 1e6 * roofline.read_s(context.model, int(batch * mean))
    context.add(workload, "step", "us", [us for us, _ in found], limit_us)
    _add_host(context, workload, batch, runs)


def _add_host(context: Context, workload: str, batch: int, runs: list[Steps]) -> None:
    hosted = [each for steps in runs for each in steps.host_us(batch)]
    if not hosted:
        raise WrongNumbers(f"no step had all {batch} sequences, and no prompts beside them")
    context.add(workload, "host", "us", [each.host_us for each in hosted])
    context.add(workload, "host, pump", "us", [each.pump_us for each in hosted])
