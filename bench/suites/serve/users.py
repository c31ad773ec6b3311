"""Engines as users have them: all requests at once, from the call of `generate` until the last answer.

mixed      many requests of many lengths
single     one request
first      the first token of a long prompt
long       several long prompts, which go on for a while
shared     many that share their beginning, which is not known (cold); others, when it is (warm); and these again
sampled    the requests of mixed, by temperature and top-p
full       the requests of mixed, where other prompts' prefixes have filled the memory

And the requests of mixed elsewhere:

quantised  over K and V of each type in the same memory, for which that of exact K and V is nearly enough; and twice as many
http       by `vmmkv serve` over HTTP, all of them streams, beside the engine in this process: what HTTP costs
replicas   twice as many for each replica, as texts over HTTP: by one server, and by one on each GPU behind vllm-router
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
import torch

from bench.harness import Settings, WrongNumbers
from bench.systems import VLLM, Context, vmmkv
from bench.systems.engine import UserEngine, of_users
from bench.systems.models import ServedModel, digest_of, requests_s, tokenizer_file
from bench.systems.over_http import AskAll, Streamed, Times, body_of, clients, routed, times_of, vmmkv_serve
from bench.systems.runs import LogProbs, ServedRun, UsersSystem, share_off, share_same
from bench.workloads import Ask, TokenIds, Workload, at_once
from vmmkv.layout import KV_KINDS
from vmmkv.units import GIB
from vmmkv_server.tokenizer import Tokenizer

GENERATED: Final = ("mixed", "single", "first", "long", "shared", "sampled", "full")
"""Parts that every system serves which users open."""
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
        draws, most = random.Random(seed), model.prompt_ids - 1
        asks = []
        for _ in range(count):
            prompt = np.array([draws.randint(0, most) for _ in range(draws.randint(shortest, longest))], np.int32)
            asks.append((prompt, draws.randint(shortest, longest)))
        text = f"{count} requests of {shortest}..{longest} tokens in, as many out"
        return [stage(part, text, asks, shortest // 2)]
    if part == "single":
        length, out = (64, 12) if small else (1024, 256)
        return [stage(part, f"{length} tokens in, {out} out", [(model.tokens(seed, length, 1), out)])]
    if part == "first":
        length = 700 if small else min(8192, model.reach - 1)
        return [stage(part, f"{length} tokens in, 1 out", [(model.tokens(seed, length, 2), 1)])]
    if part == "long":
        count, length, out = (2, 900, 6) if small else (8, min(32768, model.reach - 256), 256)
        asks = [(model.tokens(seed, length, 3, index), out) for index in range(count)]
        return [stage(part, f"{count} requests of {length} tokens in, {out} out", asks)]
    count, shared, own, out = (4, 1100, 16, 6) if small else (128, 4096, 128, 64)
    text = f"{count} requests of {shared} shared tokens and {own} own in, {out} out"
    prefix = model.tokens(seed, shared, 4)
    cold, warm = (
        [(np.concatenate((prefix, model.tokens(seed, own, name, index))), out) for index in range(count)] for name in (5, 6)
    )
    return [
        stage("shared cold", text, cold, own, shared=shared),
        stage("shared warm", text, warm, own, shared=shared, known=True),
        stage("shared again", text, warm, own, shared=shared + own, known=True),
    ]


def filling(model: ServedModel, settings: Settings, num_tokens: int) -> Workload:
    """Prompts of more than so many tokens together, which nothing else begins with, and one token out of each."""
    length = min(_FILLING_TOKENS, model.reach // 2)
    prompts = [model.tokens(settings.seed, length, 8, index) for index in range(num_tokens // length + 1)]
    return at_once(prompts, 1, name="filling", text=f"{len(prompts)} requests of {length} tokens in, 1 out")


def run(context: Context, part: str) -> None:
    """The stages of a part by the engine, or by what else users open."""
    model, settings = context.model, context.settings
    # Each takes all memory, and a process opens vLLM once: before that vmmkv has computed what all its parts need.
    ours, parts = (vmmkv(), parts_of_vllm(settings)) if context.users is VLLM else (context.users, [part])
    if missing := [each for each in parts if each not in context.alone]:
        engine: UsersSystem = context.engine(ours.open, model, settings)
        for each in missing:
            context.alone[each] = computed_alone(context, engine, stages(model, settings, each))
    measure(context, context.engine(context.users.open, model, settings), stages(model, settings, part), context.alone[part])


def parts_of_vllm(settings: Settings) -> list[str]:
    """The parts that vLLM serves, if `outside` is wanted: those that `--cases` names, else those of `--parts`, else all."""
    named = settings.cases or settings.parts
    return [part for part in GENERATED if part in named] or ([] if settings.cases else list(GENERATED))


Alone = tuple[list[LogProbs], list[LogProbs]]
"""Of some requests of a stage, each computed alone: the likeliest first tokens; and those behind another beginning."""


def computed_alone(context: Context, engine: UsersSystem, of_part: Sequence[Stage]) -> list[Alone]:
    """What `timed_runs` holds first tokens against."""
    found = []
    for stage in of_part:
        asks = stage.workload.asks
        longest = max(len(ask.prompt) for ask in asks)
        count = min(2 if context.settings.small else 4, len(asks), max(1, _MOST_TOKENS // longest))
        prompts = [ask.prompt for ask in asks[:count]]
        others = context.model.behind_others(context.settings.seed, prompts, stage.own_tokens)
        found.append((engine.likeliest(prompts), engine.likeliest(others)))
    return found


def measure(context: Context, engine: UsersSystem, of_part: Sequence[Stage], wanted: Sequence[Alone]) -> None:
    """Check all stages of a part, then write their rows."""
    names = [context.name(stage.workload.name, stage.workload.text) for stage in of_part]
    with context.recorder.guarded(names[0], engine.name):
        for stage, name, measured in zip(of_part, names, timed_runs(context, engine, of_part, wanted), strict=True):
            _add_stage(context, engine.name, stage, name, measured)


class Measured(NamedTuple):
    """Of one stage: its runs, of which the first is not timed; how far first tokens are off; the share of same answers."""

    runs: list[ServedRun]
    off: float
    same: float


def timed_runs(context: Context, engine: UsersSystem, of_part: Sequence[Stage], wanted: Sequence[Alone]) -> list[Measured]:
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


def _add_stage(context: Context, system: str, stage: Stage, name: str, measured: Measured) -> None:
    recorder, timed, bound_s = context.recorder, measured.runs[1:], stage.bound_s / context.users.num_ranks
    if stage.workload.name == "first":
        recorder.samples(name, system, "first token", "ms", [1e3 * run.seconds for run in timed], 1e3 * bound_s)
    else:
        recorder.rates(name, system, stage.num_out, [run.seconds for run in timed], bound_s)
        recorder.samples(name, system, "first tokens", "ms", [1e3 * each.first_s for run in timed for each in run.served])
    attached = [100 * run.cached_tokens / run.prompt_tokens for run in timed]
    recorder.samples(name, system, "prompt tokens attached", "%", attached)
    recorder.samples(name, system, "step broadcast", "ms", [1e3 * each for run in timed for each in run.broadcasts_s])
    recorder.figure(name, system, "first tokens off by", "% of another prompt's", 100 * measured.off)
    recorder.figure(name, system, "same answers in all runs", "%", 100 * measured.same, len(stage.workload.asks))


# the requests of mixed over quantised K and V

_BUDGET_BYTES: Final = 24 * GIB
"""On a GPU: 233 of the requests of mixed at full length, in Llama-3.1-8B's bfloat16."""
_TIMES: Final = 2
"""So many more requests at once than mixed has."""


def run_quantised(context: Context, part: str) -> None:
    """Both workloads by an engine of each type; `--cases` chooses types."""
    settings, limits = context.settings, of_users(context.settings)
    limits = {"kv_budget_bytes": limits["kv_budget_bytes"] or _BUDGET_BYTES, "max_num_seqs": _TIMES * limits["max_num_seqs"]}
    (few,) = stages(context.model, settings, "mixed")
    lengths = [len(ask.prompt) + ask.num_out for ask in few.workload.asks]
    context.close()
    for kv_cache_dtype in filter(settings.wants_case, ("auto", *KV_KINDS)):
        with closing(UserEngine(context.model, settings, kv_cache_dtype=kv_cache_dtype, **limits)) as engine:
            for stage in (few, _times(context, few, _TIMES)):
                name = context.name(part, stage.workload.text)
                stage = replace(stage, workload=replace(stage.workload, name=part))
                measure(context, engine, [stage], computed_alone(context, engine, [stage]))
                fitting = engine.num_kv_tokens * len(lengths) / sum(lengths)
                context.recorder.figure(name, engine.name, "sequences that fit", "", fitting)


def _times(context: Context, few: Stage, count: int) -> Stage:
    """The requests of a stage `count` times, with other tokens each time."""
    settings = context.settings
    more = [stages(context.model, replace(settings, seed=settings.seed + number), "mixed")[0] for number in range(count)]
    asks = tuple(ask for stage in more for ask in stage.workload.asks)
    text = f"{count} x {few.workload.text}"
    bound_s = requests_s(context.model, [len(ask.prompt) for ask in asks], [ask.num_out for ask in asks])
    return replace(few, workload=replace(few.workload, text=text, asks=asks), bound_s=bound_s)


# over HTTP

_SERVE: Final = "vmmkv serve"
_LATEST: Final = 10
_LEAST_LIMIT_S: Final = 120.0
"""Streams that take longer than so many of the runs without HTTP, and than so long, will not end."""
_BEGINNING: Final = 4
"""Tokens of an answer that are looked for at the beginning of its text. Over HTTP requests come one after the other, and so in
other batches, whose rounding on a GPU may part a long answer from the one without HTTP: both are right."""
_LEAST_ALIKE: Final = 0.5
"""Of the share of answers that are the same in all runs without HTTP, what has to begin alike over HTTP; and by replicas."""


def run_http(context: Context, part: str) -> None:
    """Many requests of many lengths, over HTTP and without."""
    recorder, settings = context.recorder, context.settings
    with context.with_texts() as directory:
        (stage,) = stages(context.model, settings, "mixed")
        name = context.name(part, f"{stage.workload.text}, tokenizer {digest_of(tokenizer_file(settings.tokenizer))}")
        with recorder.guarded(name, _SERVE):
            with closing(UserEngine(context.model, settings)) as engine:
                (alone,) = timed_runs(context, engine, [stage], computed_alone(context, engine, [stage]))
            context.close()
            timed = [(run.seconds, [each.first_s for each in run.served]) for run in alone.runs[1:]]
            _add_timed(context, name, UserEngine.name, timed, stage.num_out, stage.bound_s)
            limit_s = max(_LEAST_LIMIT_S, _LATEST * max(run.seconds for run in alone.runs))
            recorder.note("vmmkv serve starts")
            with clients(settings) as ask_all, vmmkv_serve(directory, settings) as server:
                served = _over_http(context, server, directory.name, ask_all, stage, limit_s)
            share = _check_texts(Tokenizer.load(directory), stage, alone, served, strict=not settings.on_gpu)
            _add_timed(context, name, _SERVE, map(times_of, served[1:]), stage.num_out, stage.bound_s)
            count = len(stage.workload.asks)
            recorder.figure(name, _SERVE, f"same answers as {UserEngine.name}", "%", 100 * share, count)


def _over_http(
    context: Context, server: httpx.Client, model: str, ask_all: AskAll, stage: Stage, limit_s: float
) -> list[list[Streamed]]:
    """A run that is not timed, and those that are. Raises: WrongNumbers if a request has failed, or has other counts."""
    asks = stage.workload.asks
    bodies = [body_of(model, ask.prompt.tolist(), ask) for ask in asks]
    runs = []
    for number in range(1 + context.settings.repeat):
        context.recorder.note(f"http: run {number} of {context.settings.repeat}")
        server.post("/kv/reset", json={}).raise_for_status()
        runs.append(ask_all(str(server.base_url.join("/v1/completions")), bodies, limit_s))
        if [stream.prompt_tokens for stream in runs[-1]] != [len(ask.prompt) for ask in asks]:
            raise WrongNumbers("prompts have other numbers of tokens over HTTP")
        if (cached := sum(stream.cached_tokens for stream in runs[-1])) > len(asks):  # what they have in common by chance
            raise WrongNumbers(f"{cached:,} tokens of prompts were in the emptied prefix cache")
    return runs


def _check_texts(
    tokenizer: Tokenizer, stage: Stage, alone: Measured, served: Sequence[Sequence[Streamed]], *, strict: bool
) -> float:
    """The share of texts that are those of the tokens of the engine in this process; on a CPU (`strict`) all must be.

    Raises: WrongNumbers if fewer are, or on a GPU if too few begin as they do.
    """
    texts, beginnings = [], []
    for ask, each in zip(stage.workload.asks, alone.runs[0].served, strict=True):
        detokenizer = tokenizer.detokenizer((), ask.prompt.tolist())
        texts.append(detokenizer.feed(each.tokens[:-1]) + detokenizer.finish(each.tokens[-1:]))
        beginnings.append(tokenizer.detokenizer((), ask.prompt.tolist()).feed(each.tokens[:_BEGINNING]))
    given = [[stream.text for stream in run] for run in served]
    count = len(texts) * len(given)
    share = sum(text == whole for run in given for text, whole in zip(run, texts, strict=True)) / count
    alike = sum(text.startswith(begin) for run in given for text, begin in zip(run, beginnings, strict=True)) / count
    if strict and share < 1:
        raise WrongNumbers(f"{100 * (1 - share):.3g} % of the texts over HTTP are not those of the engine's own tokens")
    if alike < _LEAST_ALIKE * alone.same:
        raise WrongNumbers(
            f"only {100 * alike:.3g} % of the texts over HTTP begin as those of the engine's own tokens, of which "
            f"{100 * alone.same:.3g} % are the same in all runs without HTTP"
        )
    return share


def _add_timed(
    context: Context, name: str, system: str, timed: Iterable[Times], num_out: int, bound_s: float | None = None
) -> None:
    """Rows of runs of `num_out` tokens each."""
    runs_s, firsts_s = zip(*timed, strict=True)
    context.recorder.rates(name, system, num_out, runs_s, bound_s)
    context.recorder.samples(name, system, "first token", "ms", [1e3 * each for of_run in firsts_s for each in of_run])


# by replicas

_ROUTED_LIMIT_S: Final = 600.0
_WARM_REQUESTS: Final = 32
"""Before those that are timed; their answers are compared."""
_COMPARED: Final = 8
"""Characters of an answer that are compared."""


def run_replicas(context: Context, part: str) -> None:
    """By one replica, and by one on each GPU. Batches differ, and with them roundings: not all answers begin alike."""
    settings, recorder, first = context.settings, context.recorder, list[Streamed]()
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if settings.on_gpu else ["cpu", "cpu"]
    with context.with_texts() as directory, clients(settings) as ask_all:
        (mixed,) = stages(context.model, settings, "mixed")
        name = context.name(part, f"{_TIMES} x {mixed.workload.text}, for each replica")
        for count in dict.fromkeys((1, len(devices))):
            stage, system = _times(context, mixed, _TIMES * count), f"vmmkv, replicas: {count}"
            recorder.note(f"{name}, {system}")
            with recorder.guarded(name, system), routed(directory, devices[:count], settings) as url:
                few = _asked(directory, url, ask_all, mixed.workload.asks[:_WARM_REQUESTS], 0)
                first = few if count == 1 else first
                alike = [a.text[:_COMPARED] == b.text[:_COMPARED] for a, b in zip(first, few, strict=True)]
                if (share := sum(alike) / len(alike)) < _LEAST_ALIKE:
                    raise WrongNumbers(f"only {100 * share:.3g} % of the answers begin as by one replica")
                recorder.figure(name, system, "answers that begin as by one", "%", 100 * share, len(alike))
                numbers = range(1, 1 + settings.repeat)
                served = [_asked(directory, url, ask_all, stage.workload.asks, number) for number in numbers]
                _add_timed(context, name, system, map(times_of, served), stage.num_out)


def _asked(directory: Path, url: str, ask_all: AskAll, asks: Sequence[Ask], number: int) -> list[Streamed]:
    """All requests at once; of the same number the same prompts. Raises: WrongNumbers for one that failed or is too short."""
    tokenizer, draws = Tokenizer.load(directory), random.Random(number)
    bodies = []
    for ask in asks:
        detokenizer = tokenizer.detokenizer(())
        text = detokenizer.feed([draws.randrange(1000, 40_000) for _ in ask.prompt]) + detokenizer.finish([])
        bodies.append(body_of(directory.name, text, ask))
    return ask_all(f"{url}/v1/completions", bodies, _ROUTED_LIMIT_S)
