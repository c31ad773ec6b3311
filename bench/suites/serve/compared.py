"""Systems side by side: the same requests, model, memory and limits.

closed     all requests there at once, as fast as each system is
outside    the same beside transformers
rates      requests arrive at random: how long each waits, and how many are served well, by how many there are
policies   long prompts all at once, by requests that keep some of their rows, and by requests that keep all

`policies` has memory for three quarters of the requests with all rows, and one engine for all cases. What scores and
compactions cost is seen twice:

- of the prompt: one request alone, until its second token, which comes behind the compaction. StreamingLLM has no scores.
- as requests decode: what steps in which all of them do take beyond their median, by compaction. In most of these steps none is
  ranked or compacted. The share of decode follows for the number of rows between two compactions that is the default.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from bench import workloads
from bench.harness import Settings
from bench.systems import MEMORIES, TRANSFORMERS, Context
from bench.systems.engine import EngineSystem, Options, Said
from bench.systems.models import ServedModel, Weights, requests_s
from bench.systems.runs import ServedRun, SharedSystem, checked, share_off, share_same, take_turns
from bench.workloads import TokenIds, Workload, at_once
from vmmkv.units import GIB, MIB, PAGE_BYTES, format_bytes
from vmmkv_server.kv_policy import Eviction
from vmmkv_server.protocol import Compacted, FromEngine

SYSTEMS_OF: Final = {"closed": MEMORIES, "rates": MEMORIES, "outside": ("vmmkv", TRANSFORMERS)}
"""What each part compares; the first is what the others are held against."""


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
        "vocabulary": model.prompt_ids,
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
    with context.beside(limits, SYSTEMS_OF[part]) as systems:
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


def _measured(context: Context, name: str, systems: Sequence[SharedSystem], workload: Workload) -> dict[str, list[ServedRun]]:
    """The runs of each system. All are checked before any has rows. Raises: WrongNumbers."""
    recorder, strict = context.recorder, not context.settings.on_gpu
    offs = checked(systems, workload, 2 if context.settings.small else 4, context.model, context.settings.seed)
    (runs,) = take_turns(recorder, systems, [[workload]] * context.settings.repeat, [name])
    first = runs[systems[0].name][0]
    sames = {
        system: share_same(of_system if strict else of_system[:1], first, strict=strict) for system, of_system in runs.items()
    }
    for system, off in offs.items():
        recorder.figure(name, system, f"first tokens off those of {systems[0].name} by", "% of other prompts'", 100 * off)
        recorder.figure(name, system, f"same answers as {systems[0].name}", "%", 100 * sames[system], len(workload.asks))
    return runs


def _add_closed(context: Context, name: str, system: str, workload: Workload, runs: Sequence[ServedRun]) -> None:
    """How long all took. What several requests share is computed once, which the bound does not know: it has none then."""
    lengths, outs = [len(ask.prompt) for ask in workload.asks], [ask.num_out for ask in workload.asks]
    shares = workload.name in ("shared prefix", "multi turn")
    bound_s = None if shares else requests_s(context.model, lengths, outs)
    context.recorder.rates(name, system, sum(outs), [run.seconds for run in runs], bound_s)


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


# requests that keep some of their rows

ALL: Final = "none"
"""The case of requests that keep all rows."""
_REQUESTS: Final = 32
_RUNS_ALONE: Final = 3
"""Of one request by each policy: what is looked for is a hundredth of a run."""
_OWN_TOKENS: Final = 16
"""At the end of each prompt: answers must change if all tokens before these are others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySizes:
    """Sizes of the workload of `policies`."""

    num_requests: int
    prompt: int
    out: int
    budgets: tuple[int, int]
    every: int
    """Rows behind the budget at which policies compact again."""

    @classmethod
    def of(cls, settings: Settings, model: ServedModel) -> "PolicySizes":
        """`--sequences` requests. Small prompts take two pages, and one when they are compacted."""
        if settings.small:
            return cls(num_requests=settings.sequences or 4, prompt=1100, out=40, budgets=(64, 32), every=8)
        prompt = min(32_768, model.reach - 256)
        return cls(num_requests=settings.sequences or _REQUESTS, prompt=prompt, out=256, budgets=(4096, 2048), every=128)

    @property
    def policies(self) -> dict[str, Mapping[str, Any] | None]:
        """By case; None keeps all rows."""
        found: dict[str, Mapping[str, Any] | None] = {ALL: None}
        for budget in self.budgets:
            found[f"snapkv-{budget}"] = {"type": "snapkv", "budget": budget}
            found[f"h2o-{budget}"] = {"type": "h2o", "budget": budget, "recent": budget // 2, "every": self.every}
            found[f"streaming_llm-{budget}"] = {"type": "streaming_llm", "window": budget - 4, "every": self.every}
        return found


class Moment(NamedTuple):
    """Behind one step of the engine."""

    at_s: float
    num_compactions: int
    """So far."""
    used_bytes: int
    """Of running requests."""
    num_running: int
    num_tokens: int
    """That came."""
    is_whole: bool
    """Have all requests their first tokens, and has none ended?"""


class WatchedEngine(EngineSystem):
    """The engine, whose steps are watched."""

    _num_compactions = _num_asked = 0

    def run(self, workload: Workload, **options: Any) -> ServedRun:
        """See EngineSystem."""
        self.moments: list[Moment] = []
        self._num_asked, self._begun, self._has_ended = len(workload.asks), set[int](), False
        self.beside = self._watch
        return super().run(workload, **options)

    def _hear(self, message: FromEngine) -> None:
        self._num_compactions += isinstance(message, Compacted)
        super()._hear(message)

    def _watch(self, said: list[Said]) -> None:
        self._begun.update(index for index, tokens, _ in said if tokens)
        self._has_ended |= any(has_ended for *_, has_ended in said)
        used_bytes, num_tokens = self.loaded.memory.stats().pool_used_bytes, sum(len(tokens) for _, tokens, _ in said)
        is_whole = len(self._begun) == self._num_asked and not self._has_ended
        counts = self._num_compactions, used_bytes, self.loop.num_running, num_tokens
        self.moments.append(Moment(time.perf_counter(), *counts, is_whole))


def run_policies(context: Context, part: str) -> None:
    """The cases that are wanted."""
    settings, model, recorder = context.settings, context.model, context.recorder
    sizes = PolicySizes.of(settings, model)
    cases = {case: policy for case, policy in sizes.policies.items() if settings.wants_case(case)}
    if not cases:
        return
    prompts = [model.tokens(settings.seed, sizes.prompt, 10, index) for index in range(sizes.num_requests)]
    workload = at_once(prompts, sizes.out)
    context.close()
    with closing(Weights(model, settings)) as weights:
        layout = weights.source.layout
        whole_bytes = layout.pages_for(sizes.prompt + sizes.out) * PAGE_BYTES
        budget_bytes = max(1, sizes.num_requests * 3 // 4) * whole_bytes
        limits = {"kv_budget_bytes": budget_bytes, "max_tokens": sizes.prompt + sizes.out, "max_num_seqs": sizes.num_requests}
        text = f"{len(prompts)} requests of {sizes.prompt} tokens in, {sizes.out} out, {format_bytes(budget_bytes)} of rows"
        name = context.name(part, text)
        recorder.note(f"{model.name}: the engine starts")
        with closing(WatchedEngine(weights, limits)) as engine:
            scored = sorted({0, len(prompts) - 1})  # the last one's prompt is computed beside requests that are compacted
            compared = [prompts[index] for index in scored]
            others = model.behind_others(settings.seed, compared, _OWN_TOKENS)
            recorder.note("requests alone")
            alone, moved = ([engine.likeliest([each])[0] for each in some] for some in (compared, others))
            prefills_s = _prefills(context, engine, {ALL: None} | cases, prompts[0])
            for case, policy in cases.items():
                with recorder.guarded(name, _system(case)):
                    recorder.note(f"{case}, {text}")
                    served = engine.run(workload, scored=scored, kv_policy=policy)
                    what = "first tokens, against requests alone,"
                    off = share_off(alone, served.likeliest, moved, engine.dtype, what)
                    recorder.figure(name, _system(case), "first tokens off by", "% of another prompt's", 100 * off)
                    _add_prefills(context, case, sizes, prefills_s)
                    _add_kept(context, name, case, policy, served, engine.moments, budget_bytes, whole_bytes)
    context.close()


def _system(case: str) -> str:
    return "vmmkv, all rows" if case == ALL else f"vmmkv, {case}"


def _prefills(
    context: Context, engine: WatchedEngine, cases: Mapping[str, Mapping[str, Any] | None], prompt: TokenIds
) -> dict[str, list[float]]:
    """Seconds of one request alone until its second token, by case. Cases take turns; the first round is not timed."""
    one, seconds = at_once([prompt], 2), {case: list[float]() for case in cases}
    for number in range(1 + _RUNS_ALONE):
        context.recorder.note(f"one request alone by each policy, run {number} of {_RUNS_ALONE}")
        for case, policy in cases.items():
            run = engine.run(one, kv_policy=policy)
            if number:
                seconds[case].append(run.seconds)
    return seconds


def _add_prefills(context: Context, case: str, sizes: PolicySizes, prefills_s: Mapping[str, list[float]]) -> None:
    """What ranking and compacting one prompt adds to computing it."""
    name = context.name("policies", f"1 request of {sizes.prompt} tokens in, 2 out")
    context.recorder.samples(name, _system(case), "total", "ms", [1e3 * each for each in prefills_s[case]])
    if case != ALL:
        full_s = median(prefills_s[ALL])
        shares = [100 * (each / full_s - 1) for each in prefills_s[case]]
        context.recorder.samples(name, _system(case), "scores and compaction, of prefill", "%", shares)


def _add_kept(
    context: Context, name: str, case: str, policy: Mapping[str, Any] | None, served: ServedRun, moments: Sequence[Moment],
    budget_bytes: int, whole_bytes: int,
) -> None:  # fmt: skip
    """Full attention has all requests at once only if they fit: else some wait, or are preempted."""
    recorder, model, system = context.recorder, context.model, _system(case)
    lengths, outs = [each.prompt_tokens for each in served.served], [len(each.tokens) for each in served.served]
    bound_s = requests_s(model, lengths, outs) if case == ALL else None
    recorder.rates(name, system, sum(outs), [served.seconds], bound_s)
    recorder.samples(name, system, "first tokens", "ms", [1e3 * each.first_s for each in served.served])
    peak = max(moments, key=lambda moment: moment.used_bytes)
    recorder.figure(name, system, "KV memory at peak", "GiB", peak.used_bytes / GIB)
    recorder.figure(name, system, "running at once", "requests", max(moment.num_running for moment in moments))
    whole = [moment for moment in moments if moment.is_whole]
    fitting = budget_bytes // whole_bytes
    if len(whole) > 1 and case != ALL:  # one of them whole, as its prompt is computed
        fitting = 1 + (budget_bytes - whole_bytes) * len(lengths) // whole[-1].used_bytes
    recorder.figure(name, system, "sequences that fit", "", fitting)
    if len(whole) < 2:
        return
    # The last prompt is compacted behind the first of these.
    recorder.figure(name, system, "KV memory, all decoding", "GiB", whole[-1].used_bytes / GIB)
    steps_s = np.diff([moment.at_s for moment in whole])
    rate = sum(moment.num_tokens for moment in whole[1:]) / float(steps_s.sum())
    recorder.figure(name, system, "throughput, all decoding", "tok/s", rate, len(steps_s))
    if policy is None or (num_compactions := whole[-1].num_compactions - whole[0].num_compactions) < len(lengths) // 2:
        return  # of SnapKV none; of a short answer too few to tell
    step_s = float(np.median(steps_s))
    cost_s = (float(steps_s.sum()) - len(steps_s) * step_s) / num_compactions
    recorder.figure(name, system, "one compaction, beyond the median step", "ms", 1e3 * cost_s, num_compactions)
    by_default = Eviction.of({option: value for option, value in policy.items() if option != "every"})
    assert by_default is not None and by_default.every is not None, "it compacts as requests decode"
    share = 100 * len(lengths) * cost_s / (by_default.every * step_s)
    recorder.figure(
        name, system, f"scores and compaction every {by_default.every} rows, of decode", "%", share, num_compactions
    )
