"""Systems side by side: the same requests, model, memory and limits. In a closed loop, and at rates at which requests arrive.

Each run forgets all prefixes first. The systems take turns, once forward and once backward for each repetition, so that a drift
of the machine is no system's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from bench.baselines.memory import systems_on
from bench.serve import SYSTEM, roofline
from bench.serve.checks import TOLERANCE, LogProbs, alike, check_off, distance
from bench.serve.compared_sizes import ComparedSizes, Target, sizes_of
from bench.serve.context import Context
from bench.serve.drive import Outcome
from bench.serve.outside import absent, outside_systems
from bench.serve.system import Begin, EngineSystem, Models, System
from bench.timing import WrongNumbers
from bench.workloads import Workload
from vmmkv.units import format_bytes

_BURSTINESS: Final = 4.0
"""The squared coefficient of variation of the gaps between arrivals; 1 is a Poisson process."""

_CHECKED_TOKENS: Final = 4
"""Of each answer that is held against the first system's."""


def closed(context: Context) -> None:
    """All requests there at once, as fast as each system is."""
    sizes = _sizes(context)
    with _opened(context, sizes, systems_on(context.settings.device)) as systems:
        _closed_loop(context, "closed", sizes, systems, sizes.closed)


def outside(context: Context) -> None:
    """The same beside what serves without the engine, some of which takes minutes for it: fewer requests on a GPU."""
    sizes = _sizes(context)
    for name, why in absent(context.settings.device).items():
        context.report.say(f"absent: {name}: {why}")
    with _opened(context, sizes, [SYSTEM], outside=True) as systems:
        _closed_loop(context, "outside", sizes, systems, sizes.outside)


def _closed_loop(
    context: Context, part: str, sizes: ComparedSizes, systems: Sequence[System], workloads: Sequence[Workload]
) -> None:
    budget = format_bytes(sizes.limits.budget_bytes)
    for workload in workloads:
        name = context.name(part, f"{workload.name}: {workload.text}, {budget} of rows")
        with context.guarded(name):
            for rows in _measured(context, name, systems, workload, sizes.sampled):
                rows.add_closed(workload)
                rows.add_latencies()
                rows.add_agreement()


def rates(context: Context) -> None:
    """Requests arrive at random: how long each waits, and how many are served as one would like, the more of them there are."""
    _open_loop(context, _sizes(context).rates, 1.0, "Poisson")


def bursts(context: Context) -> None:
    """The same, where they come in bursts: of gaps whose coefficient of variation is 2."""
    _open_loop(context, _sizes(context).bursts, _BURSTINESS, f"burstiness {_BURSTINESS:g}")


def _open_loop(context: Context, at_rates: Sequence[float], burstiness: float, kind: str) -> None:
    sizes = _sizes(context)
    with _opened(context, sizes, systems_on(context.settings.device)) as systems:
        for rate in at_rates:
            workload = sizes.arriving(rate, burstiness, context.settings.seed)
            name = context.name("rates", f"{workload.name}, {rate:g} requests/s, {kind}")
            with context.guarded(name):
                for rows in _measured(context, name, systems, workload, sizes.sampled):
                    rows.add_open(sizes.target)
                    rows.add_latencies()
                    rows.add_agreement()


def _sizes(context: Context) -> ComparedSizes:
    return sizes_of(context.settings, context.model).only(context.settings.cases)


@contextmanager
def _opened(
    context: Context, sizes: ComparedSizes, memories: Iterable[str], *, outside: bool = False
) -> Iterator[list[System]]:
    """All systems, beside each other, over the same weights. The suite's own engine takes all memory, and is closed."""
    context.close()
    with ExitStack() as opened:
        models = Models(context.model, context.settings.device, context.settings.seed)
        opened.callback(models.close)
        systems: list[System] = []
        opened.callback(systems.clear)
        with torch.inference_mode():
            for memory in memories:
                context.progress(f"{memory} starts")
                systems.append(EngineSystem(memory, models, sizes.limits))
                opened.callback(systems[-1].close)
            if outside:
                for system in outside_systems(models, sizes.limits):
                    systems.append(system)
                    opened.callback(system.close)
            del models
            yield systems
    context.close()  # collects: what captured graphs and weights keep is not free before


def _measured(context: Context, name: str, systems: Sequence[System], workload: Workload, count: int) -> "Iterator[_Rows]":
    """What each system did. All are checked before the first comes out. Raises: WrongNumbers."""
    offs = _checked(context, systems, workload, count)
    runs = _runs(context, systems, workload)
    first = systems[0].name
    sames = _same_answers(runs, first, strict=not context.settings.on_gpu)
    for system, outcomes in runs.items():
        agreement: dict[tuple[str, str], float] = {}
        if system != first:
            agreement[f"first tokens off those of {first} by", "% of other prompts'"] = offs[system]
            agreement[f"same answers as {first}", "%"] = sames[system]
        yield _Rows(context, name, system, outcomes, agreement)


def _checked(context: Context, systems: Sequence[System], workload: Workload, count: int) -> dict[str, float]:
    """By how much log-probabilities are off from the first system's, as a share of what other prompts would change.

    Of engines, those of the first tokens of an answer, of which all but one are decoded; of what serves without one, the first.
    Raises: WrongNumbers.
    """
    prompts = [ask.prompt for ask in workload.asks[:count]]
    others = [context.random_tokens(len(prompt), 7, index) for index, prompt in enumerate(prompts)]
    first = systems[0]
    assert isinstance(first, EngineSystem)
    begins = first.begins(prompts, _CHECKED_TOKENS)
    wanted = [begin.likeliest[0] for begin in begins]
    shift = min(1.0, distance(wanted, first.likeliest(others)))  # of flat distributions with nothing in common it is about 1
    offs: dict[str, float] = {}
    for system in systems[1:]:
        if isinstance(system, EngineSystem):
            pairs = list(_pairs(begins, system.begins(prompts, _CHECKED_TOKENS)))
            if len(pairs) <= len(prompts) or not all(alike(*pair) for pair in pairs):
                raise WrongNumbers(f"{system.name} has other likeliest tokens than {first.name}")
        else:
            pairs = list(zip(wanted, system.likeliest(prompts), strict=True))
        off = distance([one for one, _ in pairs], [other for _, other in pairs]) / shift
        check_off(off, TOLERANCE[first.dtype], f"first tokens of {system.name}")
        offs[system.name] = off
    return offs


def _pairs(some: Sequence[Begin], others: Sequence[Begin]) -> Iterator[tuple[LogProbs, LogProbs]]:
    """Of answers to the same prompts, what was likely at each token behind the same ones."""
    for one, other in zip(some, others, strict=True):
        for place in range(len(one.tokens)):
            if one.tokens[:place] == other.tokens[:place]:
                yield one.likeliest[place], other.likeliest[place]


def _runs(context: Context, systems: Sequence[System], workload: Workload) -> dict[str, list[Outcome]]:
    """Of each system, by its name, the timed runs."""
    runs: dict[str, list[Outcome]] = {system.name: [] for system in systems}
    for number in range(context.settings.repeat):
        for system in systems if number % 2 == 0 else reversed(systems):
            context.progress(f"{workload.name}, {system.name}, run {number + 1} of {context.settings.repeat}")
            runs[system.name].append(system.run(workload))
    return runs


def _same_answers(runs: Mapping[str, Sequence[Outcome]], first: str, *, strict: bool) -> dict[str, float]:
    """Of each system, the share of requests that its first run answers as the first run of the first system does.

    Raises: WrongNumbers if that is `strict` and not all have the same answer in all runs: on a CPU all is in float32, where who
    runs beside whom decides nothing.
    """
    wanted = [each.tokens for each in runs[first][0].served]
    shares: dict[str, float] = {}
    for system, outcomes in runs.items():
        given = [[each.tokens for each in outcome.served] for outcome in outcomes]
        differing = [[index for index, tokens in enumerate(wanted) if tokens != of_run[index]] for of_run in given]
        if strict and any(differing):
            raise WrongNumbers(f"{system} has other answers than {first} has in its first run, to requests {differing}, by run")
        shares[system] = 1 - len(differing[0]) / len(wanted)
    return shares


@dataclass(frozen=True, slots=True)
class _Rows:
    """What one system did with one workload, as rows."""

    context: Context
    workload: str
    system: str
    outcomes: Sequence[Outcome]
    """Of each run."""
    agreement: Mapping[tuple[str, str], float]
    """With the first system, by metric and unit, as shares; nothing of itself."""

    def add(self, metric: str, unit: str, samples: Sequence[float], bound: float | None = None) -> None:
        """A row of samples."""
        self.context.add(self.workload, metric, unit, samples, bound, system=self.system)

    def add_closed(self, workload: Workload) -> None:
        """How long all took. What several requests share is computed once, which the bound does not know: it has none then."""
        lengths, outs = [len(ask.prompt) for ask in workload.asks], [ask.num_out for ask in workload.asks]
        shares = workload.name in ("shared prefix", "multi turn")
        bound_s = None if shares else roofline.requests_s(self.context.model, lengths, outs)
        seconds, num_out = [outcome.seconds for outcome in self.outcomes], sum(outs)
        self.add("throughput", "tok/s", [num_out / each for each in seconds], bound_s and num_out / bound_s)
        self.add("total", "s", seconds, bound_s)
        self.add("running at once", "requests", [count for outcome in self.outcomes for count in outcome.running])

    def add_open(self, target: Target) -> None:
        """What was served in the time in which requests came, and how much of it as one would like.

        Until the last has come: what is served after that, with nobody coming any more, is no rate.
        """
        until_s = [max(each.arrival_s for each in outcome.served) for outcome in self.outcomes]
        count = len(self.outcomes[0].served)
        self.context.add_figure(self.workload, "rate", "requests/s", count / until_s[0], count, system=self.system)
        runs = list(zip(self.outcomes, until_s, strict=True))
        self.add("throughput", "tok/s", [_num_tokens(outcome, last_s) / last_s for outcome, last_s in runs])
        self.add("goodput", "requests/s", [_num_good(outcome, target) / last_s for outcome, last_s in runs])
        self.add("kept to the target", "%", [100 * _num_good(outcome, target) / count for outcome in self.outcomes])

    def add_latencies(self) -> None:
        """Of each request, and of each token behind a first one."""
        served = [each for outcome in self.outcomes for each in outcome.served]
        samples = {
            "first token": [each.first_s for each in served],
            "time per output token": [each.per_token_s for each in served if each.per_token_s is not None],
            "inter-token latency": [gap for each in served for gap in np.diff(each.token_s).tolist()],
        }
        for metric, seconds in samples.items():
            self.add(metric, "ms", [1e3 * each for each in seconds])

    def add_agreement(self) -> None:
        """Of first tokens' log-probabilities, and of whole answers."""
        count = len(self.outcomes[0].served)
        for (metric, unit), share in self.agreement.items():
            self.context.add_figure(self.workload, metric, unit, 100 * share, count, system=self.system)


def _num_tokens(outcome: Outcome, until_s: float) -> int:
    """That came by then."""
    return sum(int(np.searchsorted(each.token_s, until_s, side="right")) for each in outcome.served)


def _num_good(outcome: Outcome, target: Target) -> int:
    """Requests that kept to the target."""
    return sum(each.first_s <= target.first_s and (each.per_token_s or 0.0) <= target.per_token_s for each in outcome.served)
