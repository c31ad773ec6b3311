"""Systems side by side: the same requests, model, memory and limits.

closed     all requests there at once, as fast as each system is
outside    the same beside transformers
rates      requests arrive at random: how long each waits, and how many are served well, by how many there are
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np
import torch

from bench import workloads
from bench.baselines.backend import systems_on
from bench.harness import Settings, WrongNumbers
from bench.suites.serve.context import Context
from bench.suites.serve.models import ServedModel, Weights, requests_s
from bench.suites.serve.systems import (
    OUTSIDE,
    EngineSystem,
    LogProbs,
    Options,
    ServedRun,
    share_off,
    share_same,
    take_turns,
)
from bench.workloads import Workload
from vmmkv.units import GIB, MIB, format_bytes

NO_SHARING: Final = "none"
_IDS: Final = 10_001
_CHECKED_TOKENS: Final = 4
"""Of each answer that is held against the first system's."""


def limits_of(settings: Settings) -> Options:
    """The same for all systems."""
    if settings.small:
        return {"kv_budget_bytes": 16 * MIB, "max_tokens": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    return {"kv_budget_bytes": 16 * GIB, "max_tokens": 4096, "max_num_seqs": 256}


_CLOSED: Final[Sequence[tuple[Callable[..., Workload], dict[str, Any], dict[str, Any]]]] = (
    (workloads.uniform, {"count": 6, "prompt": (10, 100), "out": (10, 40)}, {"count": 128}),
    (workloads.chat, {"count": 6, "scale": 0.04}, {"count": 96}),
    (workloads.long_documents, {"count": 3, "scale": 0.04}, {"count": 48, "scale": 0.3}),
    (
        workloads.shared_prefix,
        {"count": 6, "prefix_tokens": 256, "own": (8, 16), "out": (8, 16)},
        {"count": 128, "prefix_tokens": 2048},
    ),
    (workloads.multi_turn, {"count": 2, "turns": 2, "new": (20, 40), "out": (10, 20), "think_s": 0.05}, {"count": 32}),
    (workloads.skewed, {"count": 6, "short": (10, 40), "long": (300, 400), "out": (8, 30)}, {"count": 128}),
    (workloads.ragged, {"count": 6, "prompt": (10, 100), "mean_out": 20}, {"count": 128}),
)
"""Each with its sizes on a CPU, which say only that everything works, and on a GPU, scaled to what fits."""


def workloads_of(model: ServedModel, settings: Settings, part: str) -> dict[str, Workload]:
    """What a part asks, by names: workloads' own, or rates."""
    small, seed = settings.small, settings.seed
    common: dict[str, Any] = {
        "seed": seed,
        "vocabulary": min(_IDS, model.vocabulary),
        "max_tokens": limits_of(settings)["max_tokens"],
    }
    if part == "rates":
        rates, duration_s, least = ([4.0, 8.0], 1.0, 4) if small else ([1.0, 2.0, 4.0, 8.0, 16.0], 12.0, 24)
        chats = workloads.chat(**common, count=8, scale=0.04) if small else workloads.chat(**common, count=256)

        def arriving(rate: float) -> Workload:
            count = min(len(chats.asks), max(least, round(rate * duration_s)))
            first = Workload(name=chats.name, text=chats.text, asks=chats.asks[:count])
            return workloads.arriving(first, rate, seed=seed)

        return {f"{rate:g}": arriving(rate) for rate in rates}
    asked = []
    for make, little, much in _CLOSED[:2] if part == "outside" else _CLOSED:
        few = {"count": 32} if part == "outside" else {}  # some systems outside take minutes
        asked.append(make(**common, **(little if small else much | few)))
    return {workload.name: workload for workload in asked}


def run(context: Context, part: str) -> None:
    """All systems of a part under each of its workloads, as far as they are wanted."""
    settings, limits = context.settings, limits_of(context.settings)
    asked = {case: each for case, each in workloads_of(context.model, settings, part).items() if settings.wants_case(case)}
    if not asked:
        return
    names = ["vmmkv", OUTSIDE] if part == "outside" else systems_on(settings.device, settings.fa3)
    with opened(context, limits, names) as systems:
        for case, workload in asked.items():
            text = f", {case} requests/s, Poisson" if part == "rates" else f": {workload.text}"
            name = context.name(part, f"{workload.name}{text}, {format_bytes(limits['kv_budget_bytes'])} of rows")
            with context.recorder.guarded(name):
                for system, runs in _measured(context, name, systems, workload).items():
                    if part == "rates":
                        _add_open(context, name, system, runs)
                    else:
                        _add_closed(context, name, system, workload, runs)
                    _add_latencies(context, name, system, runs)


@contextmanager
def opened(context: Context, limits: Options, names: Iterable[str]) -> Iterator[list[Any]]:
    """All systems, beside each other, over the same weights. A kept engine takes all memory, and is closed.

    `NO_SHARING` is vmmkv without a prefix cache, `OUTSIDE` transformers; others are of the baselines.
    """
    context.close()
    with ExitStack() as stack:
        weights = Weights(context.model, context.settings.device, context.settings.seed)
        stack.callback(weights.close)
        stack.enter_context(torch.inference_mode())
        systems: list[Any] = []
        stack.callback(systems.clear)
        for name in names:
            context.recorder.note(f"{context.model.name}: {name} starts")
            if name == OUTSIDE:
                from bench.suites.serve.peers import StaticBatches  # not above: it imports transformers

                systems.append(StaticBatches(weights, limits))
            elif name == NO_SHARING:
                systems.append(EngineSystem("vmmkv", weights, {**limits, "prefix_cache": False}))
            else:
                systems.append(EngineSystem(name, weights, limits))
            stack.callback(systems[-1].close)
        del weights
        yield systems
    context.close()  # collects: what captured graphs and weights keep is not free before


def _measured(context: Context, name: str, systems: Sequence[Any], workload: Workload) -> dict[str, list[ServedRun]]:
    """The runs of each system. All are checked before any has rows. Raises: WrongNumbers."""
    recorder, strict = context.recorder, not context.settings.on_gpu
    offs = checked(context, systems, workload, 2 if context.settings.small else 4)
    (runs,) = take_turns(recorder, systems, [[workload]] * context.settings.repeat, [name])
    first = runs[systems[0].name][0]
    sames = {
        system: share_same(of_system if strict else of_system[:1], first, strict=strict) for system, of_system in runs.items()
    }
    for system, off in offs.items():
        recorder.figure(name, system, f"first tokens off those of {systems[0].name} by", "% of other prompts'", 100 * off)
        recorder.figure(name, system, f"same answers as {systems[0].name}", "%", 100 * sames[system], len(workload.asks))
    return runs


def checked(context: Context, systems: Sequence[Any], workload: Workload, count: int) -> dict[str, float]:
    """By how much log-probabilities are off the first system's, as a share of what other prompts change.

    They are those of the first tokens of some answers, of which all but one are decoded, as far as these tokens are the same.
    """
    prompts = [ask.prompt for ask in workload.asks[:count]]
    rng = np.random.default_rng((context.settings.seed, 7))
    others = [rng.integers(0, context.model.vocabulary, len(prompt), dtype=np.int32) for prompt in prompts]
    first, *compared = systems
    begins, changed = first.begins(prompts, _CHECKED_TOKENS), first.likeliest(others)
    offs: dict[str, float] = {}
    for system in compared:
        pairs: list[tuple[LogProbs, LogProbs]] = [
            (of_first[place], of_other[place])
            for (tokens, of_first), (other_tokens, of_other) in zip(
                begins, system.begins(prompts, _CHECKED_TOKENS), strict=True
            )
            for place in range(_CHECKED_TOKENS)
            if tokens[:place] == other_tokens[:place]
        ]
        if len(pairs) <= len(prompts):
            raise WrongNumbers(f"{system.name} answers with other tokens than {first.name}")
        wanted, given = zip(*pairs, strict=True)
        # What other prompts change is seen at first tokens.
        shifts = [changed[index % len(changed)] for index in range(len(pairs))]
        offs[system.name] = share_off(wanted, given, shifts, first.dtype, f"first tokens of {system.name}")
    return offs


def _add_closed(context: Context, name: str, system: str, workload: Workload, runs: Sequence[ServedRun]) -> None:
    """How long all took. What several requests share is computed once, which the bound does not know: it has none then."""
    lengths, outs = [len(ask.prompt) for ask in workload.asks], [ask.num_out for ask in workload.asks]
    shares = workload.name in ("shared prefix", "multi turn")
    bound_s = None if shares else requests_s(context.model, lengths, outs)
    add = context.recorder.samples
    add(name, system, "throughput", "tok/s", [sum(outs) / run.seconds for run in runs], bound_s and sum(outs) / bound_s)
    add(name, system, "total", "s", [run.seconds for run in runs], bound_s)


def _add_open(context: Context, name: str, system: str, runs: Sequence[ServedRun]) -> None:
    """What was served until the last request came: what is served after that, with none coming any more, is no rate.

    A good request keeps to a target, as in DistServe (Zhong et al., OSDI 2024): from its arrival to its first token, and for
    each token behind it, on average.
    """
    target_s, per_token_s = (5.0, 0.5) if context.settings.small else (1.0, 0.05)
    add, last_s = context.recorder.samples, [max(each.arrival_s for each in run.served) for run in runs]
    context.recorder.figure(name, system, "rate", "requests/s", len(runs[0].served) / last_s[0], len(runs[0].served))
    tokens, good = [], []
    for run, until_s in zip(runs, last_s, strict=True):
        tokens.append(sum(int(np.searchsorted(each.token_s, until_s, side="right")) for each in run.served) / until_s)
        kept = [each for each in run.served if each.first_s <= target_s and (each.per_token_s or 0.0) <= per_token_s]
        good.append(len(kept) / until_s)
    add(name, system, "throughput", "tok/s", tokens)
    add(name, system, "goodput", "requests/s", good)


def _add_latencies(context: Context, name: str, system: str, runs: Sequence[ServedRun]) -> None:
    served = [each for run in runs for each in run.served]
    samples = {
        "first token": [each.first_s for each in served],
        "time per output token": [each.per_token_s for each in served if each.per_token_s is not None],
    }
    for metric, seconds in samples.items():
        context.recorder.samples(name, system, metric, "ms", [1e3 * each for each in seconds])
