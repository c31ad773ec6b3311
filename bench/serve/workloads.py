"""The workloads of bench/README.md: all requests at once, from the call until the last answer."""

from bench.serve.checks import Alone, share_of_same
from bench.serve.context import Context
from bench.serve.engine import Answers
from bench.serve.requests import Workload


def mixed(context: Context) -> None:
    """Many requests of many lengths."""
    _measure(context, [context.requests.mixed()])


def single(context: Context) -> None:
    """One request."""
    _measure(context, [context.requests.single()])


def first(context: Context) -> None:
    """The first token of a long prompt."""
    _measure(context, [context.requests.first()])


def long(context: Context) -> None:
    """Several prompts that are long, and go on for a while."""
    _measure(context, [context.requests.long()])


def shared(context: Context) -> None:
    """Many that share their beginning, which nobody knows; and others, when it is known."""
    _measure(context, [context.requests.shared(known=known) for known in (False, True)])


def _measure(context: Context, stages: list[Workload]) -> None:
    """Check, then time `repeat` runs of all stages: the first from an empty prefix cache, each other from what is left."""
    names = [context.name(stage.name, stage.text) for stage in stages]
    with context.guarded(names[0]):
        engine = context.engine
        alone: list[Alone | None] = []
        for stage in stages:
            context.progress(f"{stage.name}, checks")
            is_alone = len(stage.prompts) == 1
            alone.append(None if is_alone else Alone.of(engine, stage, context.requests, context.sizes.sampled))
        runs: list[list[Answers]] = [[] for _ in stages]
        for number in range(1 + context.settings.repeat):
            engine.forget()
            for stage, reference, of_stage in zip(stages, alone, runs, strict=True):
                what = f"run {number} of {context.settings.repeat}" if number else "first run, not timed"
                context.progress(f"{stage.name}, {what}")
                # The sample's log-probabilities are asked for in the run that is not timed.
                scored = reference.sampled if reference is not None and not number else ()
                of_stage.append(engine.ask(stage.prompts, stage.outs, scored=scored))
        # All stages are checked before any has rows.
        offs = [
            None if reference is None else reference.check(of_stage[0]) for reference, of_stage in zip(alone, runs, strict=True)
        ]
        sames = [share_of_same(of_stage, strict=not context.settings.on_gpu) for of_stage in runs]
        for stage, name, off, same, of_stage in zip(stages, names, offs, sames, runs, strict=True):
            _say(context, stage, off, same)
            _add_rows(context, stage, name, off, same, of_stage[1:])


def _say(context: Context, stage: Workload, off: float | None, same: float) -> None:
    """What has been checked."""
    said = [f"{len(stage.prompts)} answered with exactly {stage.num_out:,} tokens in each run"]
    said.append(f"{100 * same:.4g} % of the answers the same in all runs")
    if off is not None:
        said.append(f"first tokens as those of requests alone, but for {100 * off:.2g} % of what another prompt changes")
    context.report.say(f"checked: {context.model.name} {stage.name}: {'; '.join(said)}")


def _add_rows(context: Context, stage: Workload, name: str, off: float | None, same: float, timed: list[Answers]) -> None:
    seconds = [answers.seconds for answers in timed]
    count = len(stage.prompts)
    if stage.name == "first":
        context.add(name, "first token", "ms", [1e3 * each for each in seconds], 1e3 * stage.bound_s)
    else:
        context.add(name, "total", "s", seconds, stage.bound_s)
        context.add(name, "throughput", "tok/s", [stage.num_out / each for each in seconds], stage.num_out / stage.bound_s)
        context.add(name, "first tokens", "ms", [1e3 * first_s for answers in timed for first_s in answers.first_s])
    if count > 1:
        num_prompt = sum(map(len, stage.prompts))
        attached = [100 * answers.cached_tokens / num_prompt for answers in timed]
        context.add(name, "prompt tokens attached", "%", attached)
        if off is not None:
            context.add_figure(name, "first tokens off by", "% of another prompt's", 100 * off)
    context.add_figure(name, "same answers in all runs", "%", 100 * same, count)
