"""The engine as a user has it: all requests at once, from the call of `generate` until the last answer.

Workloads of random token ids; those of `mixed` are drawn as for the figures of vLLM in docs/performance.md.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bench.suites.serve import Context
from bench.suites.serve.models import ServedModel, requests_s
from bench.suites.serve.systems import Limits, LogProbs, Outcome, UserEngine, share_off, share_same
from bench.workloads import Ask, Workload

_IDS: Final = 10_001
"""Token ids of prompts are below it, whatever the model."""
_MOST_TOKENS: Final = 65_536
"""That are computed alone, of all prompts of a workload: some seconds of a large model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A workload with its bound. Its answers must change if all but the last `own_tokens` of each prompt are others."""

    workload: Workload
    bound_s: float
    own_tokens: int = 16

    @property
    def num_out(self) -> int:
        """Tokens of all answers."""
        return sum(ask.num_out for ask in self.workload.asks)


class Requests:
    """The workloads of one model; of the same seed the same."""

    def __init__(self, model: ServedModel, seed: int, *, small: bool) -> None:
        self._model, self._seed, self._small = model, seed, small
        self._ids = min(_IDS, model.vocabulary)

    def mixed(self) -> Stage:
        """Lengths in and out are drawn alike: a prompt's length, its tokens, its answer's length, and so on."""
        count, shortest, longest = (10, 8, 40) if self._small else (256, 100, 1024)
        draws = random.Random(self._seed)
        prompts, outs = [], []
        for _ in range(count):
            length = draws.randint(shortest, longest)
            prompts.append([draws.randint(0, self._ids - 1) for _ in range(length)])
            outs.append(draws.randint(shortest, longest))
        text = f"{count} requests of {shortest}..{longest} tokens in, as many out"
        return self._stage("mixed", text, prompts, outs, own_tokens=shortest // 2)

    def single(self) -> Stage:
        """One request."""
        length, out = (64, 12) if self._small else (1024, 256)
        return self._stage("single", f"{length} tokens in, {out} out", [self.tokens(length, 1)], [out])

    def first(self) -> Stage:
        """A long prompt, and one token."""
        length = 700 if self._small else min(8192, self._model.reach - 1)
        return self._stage("first", f"{length} tokens in, 1 out", [self.tokens(length, 2)], [1])

    def long(self) -> Stage:
        """Several prompts that are long, and go on for a while."""
        count, length, out = (2, 900, 6) if self._small else (8, min(32768, self._model.reach - 256), 256)
        prompts = [self.tokens(length, 3, index) for index in range(count)]
        return self._stage("long", f"{count} requests of {length} tokens in, {out} out", prompts, [out] * count)

    def shared(self, *, known: bool) -> Stage:
        """Prompts that begin alike. Of those whose beginning is known by then, the own tokens are others."""
        count, shared, own, out = (4, 1100, 16, 6) if self._small else (128, 4096, 128, 64)
        prefix = self.tokens(shared, 4)
        prompts = [prefix + self.tokens(own, 5 + known, index) for index in range(count)]
        text = f"{count} requests of {shared} shared tokens and {own} own in, {out} out"
        name = "shared warm" if known else "shared cold"
        return self._stage(name, text, prompts, [out] * count, shared=shared, known=known, own_tokens=own)

    def tokens(self, count: int, *names: int) -> list[int]:
        """Random ids; of the same names the same."""
        draws = random.Random(f"{self._seed}/{'/'.join(map(str, names))}")
        return draws.choices(range(self._ids), k=count)

    def _stage(
        self,
        name: str,
        text: str,
        prompts: list[list[int]],
        outs: list[int],
        *,
        shared: int = 0,
        known: bool = False,
        own_tokens: int = 16,
    ) -> Stage:
        asks = tuple(Ask(prompt=np.array(prompt, np.int32), num_out=out) for prompt, out in zip(prompts, outs, strict=True))
        bound_s = requests_s(self._model, list(map(len, prompts)), outs, shared=shared, known=known)
        return Stage(workload=Workload(name=name, text=text, asks=asks), bound_s=bound_s, own_tokens=own_tokens)


def requests_of(context: Context) -> Requests:
    """Those of a run."""
    return Requests(context.model, context.settings.seed, small=context.settings.small)


def user_engine(context: Context) -> UserEngine:
    """One for all these parts, with the engine's own choice of memory: it takes all of a GPU."""
    if "user" not in context.engines:
        context.close()
        context.recorder.note(f"{context.model.name}: the engine starts")
        limits = Limits(
            max_num_seqs=16 if context.settings.small else 256, max_num_batched_tokens=context.settings.max_num_batched_tokens
        )
        context.engines["user"] = UserEngine(context.model, context.settings, limits)
    engine: UserEngine = context.engines["user"]
    return engine


def mixed(context: Context) -> None:
    """Many requests of many lengths."""
    _measure(context, [requests_of(context).mixed()])


def single(context: Context) -> None:
    """One request."""
    _measure(context, [requests_of(context).single()])


def first(context: Context) -> None:
    """The first token of a long prompt."""
    _measure(context, [requests_of(context).first()])


def long(context: Context) -> None:
    """Several long prompts."""
    _measure(context, [requests_of(context).long()])


def shared(context: Context) -> None:
    """Many that share their beginning, which is not known; and others, when it is."""
    _measure(context, [requests_of(context).shared(known=known) for known in (False, True)])


def checked_alone(context: Context, engine: UserEngine, stage: Stage) -> tuple[list[int], list[LogProbs], list[LogProbs]]:
    """Some requests of a workload, their likeliest first tokens alone, and with other tokens before their own."""
    asks, own = stage.workload.asks, stage.own_tokens
    longest = max(len(ask.prompt) for ask in asks)
    sampled = range(min(2 if context.settings.small else 4, len(asks), max(1, _MOST_TOKENS // longest)))
    prompts = [asks[index].prompt for index in sampled]
    requests = requests_of(context)
    others = [
        np.array([*requests.tokens(len(prompt) - own, 6, index), *prompt[-own:]], np.int32)
        for index, prompt in enumerate(prompts)
    ]
    return list(sampled), engine.likeliest(prompts), engine.likeliest(others)


def _measure(context: Context, stages: Sequence[Stage]) -> None:
    """Check, then time `repeat` runs of all stages: the first from an empty prefix cache, each other from what is left."""
    recorder, settings = context.recorder, context.settings
    names = [context.name(stage.workload.name, stage.workload.text) for stage in stages]
    with recorder.guarded(names[0], UserEngine.name):
        engine = user_engine(context)
        alone = [checked_alone(context, engine, stage) if len(stage.workload.asks) > 1 else ([], [], []) for stage in stages]
        runs: list[list[Outcome]] = [[] for _ in stages]
        for number in range(1 + settings.repeat):
            for index, (stage, (sampled, _, _)) in enumerate(zip(stages, alone, strict=True)):
                recorder.note(f"{names[index]}, run {number} of {settings.repeat}")
                # Log-probabilities are asked for in the first run, which is not timed.
                scored = () if number else sampled
                runs[index].append(engine.run(stage.workload, scored=scored, keep=index > 0))
        # All stages are checked before any has rows.
        offs = [
            share_off(wanted, of_stage[0].likeliest, others, engine.dtype, "first tokens, against requests alone,")
            if wanted
            else None
            for (_, wanted, others), of_stage in zip(alone, runs, strict=True)
        ]
        sames = [share_same(of_stage, of_stage[0], strict=not settings.on_gpu) for of_stage in runs]
        for stage, name, off, same, of_stage in zip(stages, names, offs, sames, runs, strict=True):
            _add_rows(context, stage, name, off, same, of_stage[1:])


def _add_rows(context: Context, stage: Stage, name: str, off: float | None, same: float, timed: Sequence[Outcome]) -> None:
    recorder, system, asks = context.recorder, UserEngine.name, stage.workload.asks
    if stage.workload.name == "first":
        recorder.samples(name, system, "first token", "ms", [1e3 * run.seconds for run in timed], 1e3 * stage.bound_s)
    else:
        rates = [stage.num_out / run.seconds for run in timed]
        recorder.samples(name, system, "total", "s", [run.seconds for run in timed], stage.bound_s)
        recorder.samples(name, system, "throughput", "tok/s", rates, stage.num_out / stage.bound_s)
        recorder.samples(name, system, "first tokens", "ms", [1e3 * each.first_s for run in timed for each in run.served])
    if off is not None:
        attached = [100 * run.cached_tokens / run.prompt_tokens for run in timed]
        recorder.samples(name, system, "prompt tokens attached", "%", attached)
        recorder.figure(name, system, "first tokens off by", "% of another prompt's", 100 * off)
    recorder.figure(name, system, "same answers in all runs", "%", 100 * same, len(asks))
