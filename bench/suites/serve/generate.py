"""Engines as users have them: all requests at once, from the call of `generate` until the last answer.

mixed     many requests of many lengths
single    one request
first     the first token of a long prompt
long      several long prompts, which go on for a while
shared    many that share their beginning, which is not known (cold); others, when it is (warm); and these again
sampled   the requests of mixed, by temperature and top-p
full      the requests of mixed, where other prompts' prefixes have filled the memory
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from bench.harness import Settings
from bench.suites.serve.context import Context
from bench.suites.serve.models import ServedModel, requests_s
from bench.suites.serve.systems import LogProbs, ServedRun, UserEngine, share_off, share_same
from bench.workloads import Ask, TokenIds, Workload, at_once

if TYPE_CHECKING:
    from bench.suites.serve.peers import Vllm

_IDS: Final = 10_001
"""Token ids of prompts are below it, whatever the model."""
_MOST_TOKENS: Final = 65_536
"""That are computed alone, of all prompts of a workload: some seconds of a large model."""
_LIKE_MIXED: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "sampled": ("temperature 0.8, top-p 0.95", {"sampling": {"temperature": 0.8, "top_p": 0.95}}),
    "full": ("the prefix cache full of other prompts", {"over_full_cache": True}),
}
"""Parts that have the requests of mixed: what they add to its text, and to its stage."""
_FILLING_TOKENS: Final = 4096
"""Of each prompt that fills the prefix cache: most of its rows are in whole extents, and attention is not most of the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A workload with its bound. Its answers must change if all but the last `own_tokens` of each prompt are others."""

    workload: Workload
    bound_s: float
    """On one GPU."""
    own_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """By the parameters' names. Empty: greedy."""
    over_full_cache: bool = False
    """Before each run the prefix cache is filled with other prompts, which is not timed."""

    @property
    def num_out(self) -> int:
        """Tokens of all answers."""
        return sum(ask.num_out for ask in self.workload.asks)


def random_tokens(model: ServedModel, seed: int, count: int, *names: int) -> TokenIds:
    """Random ids; of the same names the same."""
    ids = random.Random(f"{seed}/{'/'.join(map(str, names))}").choices(range(min(_IDS, model.vocabulary)), k=count)
    return np.array(ids, np.int32)


def behind_others(model: ServedModel, seed: int, prompts: Sequence[TokenIds], own_tokens: int) -> list[TokenIds]:
    """Prompts with the last tokens of these, behind other ones."""
    lengths = [len(prompt) - own_tokens for prompt in prompts]
    begins = [random_tokens(model, seed, length, 11, number) for number, length in enumerate(lengths)]
    return [np.concatenate((begin, prompt[-own_tokens:])) for begin, prompt in zip(begins, prompts, strict=True)]


def stages(model: ServedModel, settings: Settings, part: str) -> list[Stage]:
    """The workloads of a part, each behind the other; of the same seed the same."""
    small, seed = settings.small, settings.seed

    def stage(name: str, text: str, asks: Iterable[tuple[TokenIds, int]], own_tokens: int = 16, **shared: Any) -> Stage:
        of_workload = tuple(Ask(prompt=prompt, num_out=out) for prompt, out in asks)
        bound_s = requests_s(model, [len(ask.prompt) for ask in of_workload], [ask.num_out for ask in of_workload], **shared)
        return Stage(workload=Workload(name=name, text=text, asks=of_workload), bound_s=bound_s, own_tokens=own_tokens)

    if part in _LIKE_MIXED:
        how, options = _LIKE_MIXED[part]
        (mixed,) = stages(model, settings, "mixed")
        return [replace(mixed, workload=replace(mixed.workload, name=part, text=f"{mixed.workload.text}, {how}"), **options)]
    if part == "mixed":  # a prompt's length, its tokens, its answer's length, and so on: lengths in and out are drawn alike
        count, shortest, longest = (10, 8, 40) if small else (256, 100, 1024)
        draws, most = random.Random(seed), min(_IDS, model.vocabulary) - 1
        asks = []
        for _ in range(count):
            prompt = np.array([draws.randint(0, most) for _ in range(draws.randint(shortest, longest))], np.int32)
            asks.append((prompt, draws.randint(shortest, longest)))
        text = f"{count} requests of {shortest}..{longest} tokens in, as many out"
        return [stage(part, text, asks, shortest // 2)]
    if part == "single":
        length, out = (64, 12) if small else (1024, 256)
        return [stage(part, f"{length} tokens in, {out} out", [(random_tokens(model, seed, length, 1), out)])]
    if part == "first":
        length = 700 if small else min(8192, model.reach - 1)
        return [stage(part, f"{length} tokens in, 1 out", [(random_tokens(model, seed, length, 2), 1)])]
    if part == "long":
        count, length, out = (2, 900, 6) if small else (8, min(32768, model.reach - 256), 256)
        asks = [(random_tokens(model, seed, length, 3, index), out) for index in range(count)]
        return [stage(part, f"{count} requests of {length} tokens in, {out} out", asks)]
    count, shared, own, out = (4, 1100, 16, 6) if small else (128, 4096, 128, 64)
    text = f"{count} requests of {shared} shared tokens and {own} own in, {out} out"
    prefix = random_tokens(model, seed, shared, 4)
    cold, warm = (
        [(np.concatenate((prefix, random_tokens(model, seed, own, name, index))), out) for index in range(count)]
        for name in (5, 6)
    )
    return [
        stage("shared cold", text, cold, own, shared=shared),
        stage("shared warm", text, warm, own, shared=shared, known=True),
        stage("shared again", text, warm, own, shared=shared + own, known=True),
    ]


def filling(model: ServedModel, settings: Settings, num_tokens: int) -> Workload:
    """Prompts of more than so many tokens together, which nothing else begins with, and one token out of each."""
    length = min(_FILLING_TOKENS, model.reach // 2)
    prompts = [random_tokens(model, settings.seed, length, 8, index) for index in range(num_tokens // length + 1)]
    return at_once(prompts, 1, name="filling", text=f"{len(prompts)} requests of {length} tokens in, 1 out")


def run(context: Context, part: str) -> None:
    """The stages of a part by the engine."""
    engine: UserEngine = context.engine(UserEngine, context.model, context.settings, context.num_ranks)
    of_part = stages(context.model, context.settings, part)
    if part not in context.alone:  # by the engine of the fewest ranks, which those of more are held against
        context.alone[part] = computed_alone(context, engine, of_part)
    measure(context, engine, of_part, context.alone[part])


Alone = tuple[list[LogProbs], list[LogProbs]]
"""Of some requests of a stage, each computed alone: the likeliest first tokens; and those behind another beginning."""


def computed_alone(context: Context, engine: UserEngine, of_part: Sequence[Stage]) -> list[Alone]:
    """What `timed_runs` holds first tokens against."""
    found = []
    for stage in of_part:
        asks = stage.workload.asks
        longest = max(len(ask.prompt) for ask in asks)
        count = min(2 if context.settings.small else 4, len(asks), max(1, _MOST_TOKENS // longest))
        prompts = [ask.prompt for ask in asks[:count]]
        others = behind_others(context.model, context.settings.seed, prompts, stage.own_tokens)
        found.append((engine.likeliest(prompts), engine.likeliest(others)))
    return found


def measure(context: Context, engine: "UserEngine | Vllm", of_part: Sequence[Stage], wanted: Sequence[Alone]) -> None:
    """Check all stages of a part, then write their rows."""
    names = [context.name(stage.workload.name, stage.workload.text) for stage in of_part]
    with context.recorder.guarded(names[0], engine.name):
        for stage, name, measured in zip(of_part, names, timed_runs(context, engine, of_part, wanted), strict=True):
            _add_rows(context, engine.name, stage, name, measured)


class Measured(NamedTuple):
    """Of one stage: its runs, of which the first is not timed; how far first tokens are off; the share of same answers."""

    runs: list[ServedRun]
    off: float
    same: float


def timed_runs(
    context: Context, engine: "UserEngine | Vllm", of_part: Sequence[Stage], wanted: Sequence[Alone]
) -> list[Measured]:
    """`1 + repeat` runs of all stages: of each run the first from an empty prefix cache, each other from what is left.

    First tokens are held against those of some requests alone. The bound is a share of how far they move when all but the
    prompt's own tokens are replaced. Raises: WrongNumbers.
    """
    settings, note = context.settings, context.recorder.note
    runs: list[list[ServedRun]] = [[] for _ in of_part]
    offs = []
    for number in range(1 + settings.repeat):
        for place, stage in enumerate(of_part):
            if stage.over_full_cache:
                others = filling(context.model, settings, engine.num_kv_tokens)
                note(f"{stage.workload.name}, {engine.name}, {others.text}")
                engine.run(others)
            note(f"{stage.workload.name}, {engine.name}, run {number} of {settings.repeat}")
            # Log-probabilities are asked for in the first run, which is not timed.
            num_scored = 0 if number else len(wanted[place][0])
            keep = place > 0 or stage.over_full_cache
            runs[place].append(engine.run(stage.workload, num_scored=num_scored, keep=keep, **stage.sampling))
            if not number:
                right, moved = wanted[place]
                what = "first tokens, against requests alone,"
                offs.append(share_off(right, runs[place][0].likeliest, moved, engine.dtype, what))
    return [
        Measured(of_stage, off, share_same(of_stage, of_stage[0], strict=not settings.on_gpu))
        for of_stage, off in zip(runs, offs, strict=True)
    ]


def _add_rows(context: Context, system: str, stage: Stage, name: str, measured: Measured) -> None:
    recorder, timed, bound_s = context.recorder, measured.runs[1:], stage.bound_s / context.num_ranks
    if stage.workload.name == "first":
        recorder.samples(name, system, "first token", "ms", [1e3 * run.seconds for run in timed], 1e3 * bound_s)
    else:
        rates = [stage.num_out / run.seconds for run in timed]
        recorder.samples(name, system, "total", "s", [run.seconds for run in timed], bound_s)
        recorder.samples(name, system, "throughput", "tok/s", rates, stage.num_out / bound_s)
        recorder.samples(name, system, "first tokens", "ms", [1e3 * each.first_s for run in timed for each in run.served])
    attached = [100 * run.cached_tokens / run.prompt_tokens for run in timed]
    recorder.samples(name, system, "prompt tokens attached", "%", attached)
    recorder.samples(name, system, "step broadcast", "ms", [1e3 * each for run in timed for each in run.broadcasts_s])
    recorder.figure(name, system, "first tokens off by", "% of another prompt's", 100 * measured.off)
    recorder.figure(name, system, "same answers in all runs", "%", 100 * measured.same, len(stage.workload.asks))
