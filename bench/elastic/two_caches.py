"""Two caches of different shapes that are busy in turn: on one pool, and on two pools of half the budget each.

    phase      0          1          2          3
    first   | guests   | parked   | guests   | parked   |     the guests of a phase need all of the budget
    second  |          | guests   | parked   | guests   |     that no running sequence holds

A guest comes each step, and its prompt is mapped in front of it, in the foreground: what is measured is what it takes to have
the other cache's memory handed over.
"""

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from bench.elastic.breathing import call_rows
from bench.elastic.guests import Guest, Guests, Kept
from bench.elastic.running import Running, check_laws, run_step
from bench.elastic.sizes import SLACK_SHARE, Handovers, prompts
from bench.report import Report
from bench.rows import Row
from bench.settings import Settings, Shape
from bench.step_work import open_work
from bench.timed_driver import TimedDriver
from bench.timing import WrongNumbers, now_us, summarize
from vmmkv import KVCache, OutOfPages, Pool
from vmmkv.driver import open_driver
from vmmkv.units import MIB, PAGE_BYTES, format_bytes


class Split(enum.Enum):
    """Whose the budget is."""

    SHARED = "vmmkv, one pool"
    HALVES = "vmmkv, a pool of half for each"


_MOMENTS: Final = {"at first": 0.0, "half-way": 0.5, "at last": 1.0}
"""Of a phase, at which it is told what each cache holds."""


@dataclass(slots=True)
class Side:
    """One of the two caches, and what its busy phases took: `samples` by metric, `calls` of the driver by name."""

    shape: Shape
    cache: KVCache
    running: Running
    guests: Guests
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    calls: list[Counter[str]] = field(default_factory=list)

    @property
    def held_bytes(self) -> int:
        """Of the pool, by this cache alone."""
        stats = self.cache.stats()
        return stats.mapped_bytes + stats.pending_reclaim_bytes

    @property
    def running_bytes(self) -> int:
        """Of these, under running sequences: nobody can ask for them."""
        stats = self.cache.stats()
        return stats.mapped_bytes - stats.parked_bytes


def num_steps() -> int:
    """Of the progress bar."""
    return len(Split)


def measure(settings: Settings, report: Report, begin: Callable[[str], None], *, suite: str) -> None:
    """Each way to split the budget. Raises WrongNumbers if somebody finds no memory though the sum fits, or a check fails."""
    sizes = Handovers.of(settings)
    for split in Split:
        begin(f"two caches, {split.value}")
        first, second = _take_turns(settings, sizes, split)
        for side, other in ((first, second), (second, first)):
            names = f"{side.shape.name} asks while {other.shape.name}'s memory is parked"
            workload = f"two caches: {format_bytes(sizes.budget_bytes)}, {names}"
            report.add(*_rows(suite, workload, split.value, side, other.shape.name))


def _take_turns(settings: Settings, sizes: Handovers, split: Split) -> tuple[Side, Side]:
    driver = TimedDriver(open_driver(settings.device))
    rng = np.random.default_rng(settings.seed)
    with ExitStack() as stack:
        num_pools = 1 if split is Split.SHARED else 2
        pools = [
            stack.enter_context(Pool(settings.device, sizes.budget_bytes // num_pools, driver=driver.as_driver()))
            for _ in range(num_pools)
        ]
        sides: list[Side] = []
        for salt, (shape, pool) in enumerate(zip(sizes.shapes, (pools[0], pools[-1]), strict=True)):
            max_tokens = sizes.max_tokens(shape.layout)
            cache = stack.enter_context(KVCache(shape.layout, pool, slots=sizes.slots, max_tokens=max_tokens))
            work = open_work(cache, replace(settings, work="attention", shape=shape), sizes.sequences)
            running = Running(cache, work, sizes.sequences, sizes.start_tokens, sizes.end_tokens, ahead=True)
            sides.append(Side(shape, cache, running, Guests(cache, shape, Kept.PARKED, rng, salt=salt)))
        budget_us = 0.0
        for index in range(sizes.phases):
            if index == len(sides):  # until now nobody had memory that could be handed over
                for side in sides:
                    side.samples.clear()
                    side.calls.clear()
            phase = Phase(sizes, driver, sides[index % 2], sides[1 - index % 2], budget_us)
            phase.let_guests_in(rng)
            budget_us = phase.hold()
            phase.end()
    return sides[0], sides[1]


class Phase:
    """One phase: guests of the busy side come, until no page is left that somebody could be asked to give up."""

    def __init__(self, sizes: Handovers, driver: TimedDriver, busy: Side, other: Side, budget_us: float) -> None:
        self._sizes, self._driver = sizes, driver
        self._busy, self._other = busy, other
        self._runners = [busy.running, other.running]
        self._pump_budget_us = budget_us
        self._coming: list[int] = []
        self._guests: list[Guest] = []
        self._last_in_us = 0.0

    def let_guests_in(self, rng: np.random.Generator) -> None:
        """One a step. Raises WrongNumbers if one of them finds no memory."""
        sizes, busy, samples, pool = self._sizes, self._busy, self._busy.samples, self._busy.cache.pool
        free_pages = (pool.budget_bytes - pool.used_bytes) // PAGE_BYTES
        self._coming = prompts(rng, busy.cache.layout, free_pages, sizes.fewest_pages, sizes.most_pages)
        mapped_pages, asked_us, before = busy.cache.stats().mapped_pages, now_us(), len(samples["grow"])
        held, calls = [(busy.held_bytes, self._other.held_bytes)], Counter(self._driver.calls)
        for _ in self._coming:
            samples["step"].append(run_step(self._runners, in_front=self._let_in, beside=self._pump).step_us)
            held.append((busy.held_bytes, self._other.held_bytes))
        grow_us = samples["grow"][before:]
        mapped_bytes = (busy.cache.stats().mapped_pages - mapped_pages) * PAGE_BYTES
        samples["first"].append(grow_us[0])
        samples["all"].append(self._last_in_us - asked_us)
        samples["speed"].append(mapped_bytes / MIB / (sum(grow_us) / 1e6))
        busy.calls.append(self._driver.calls - calls)
        for moment, share in _MOMENTS.items():
            mine_bytes, others_bytes = held[round(share * (len(held) - 1))]
            samples[f"held, {moment}"].append(mine_bytes / MIB)
            samples[f"held by the other, {moment}"].append(others_bytes / MIB)
        samples["most"].append(100 * busy.held_bytes / sizes.budget_bytes)
        samples["possible"].append(100 * (1 - self._other.running_bytes / sizes.budget_bytes))

    def hold(self) -> float:
        """Some steps in which nobody asks for anything; how long there may be pumped beside one, in us."""
        steps = [run_step(self._runners, beside=self._pump) for _ in range(self._sizes.held_steps)]
        self._busy.samples["undisturbed"].extend(step.step_us for step in steps)
        return SLACK_SHARE * summarize([step.slack_us for step in steps]).p50

    def end(self) -> None:
        """The guests park, if everybody has its rows and the laws hold. Raises WrongNumbers."""
        self._busy.guests.write(self._guests)
        self._busy.guests.check(self._guests)
        for side in (self._busy, self._other):
            side.running.check()
            side.guests.check_parked()
        check_laws(self._busy.cache, self._other.cache)
        self._busy.guests.end(self._guests)
        for runner in self._runners:
            runner.rewind()
        check_laws(self._busy.cache, self._other.cache)

    def _let_in(self) -> None:
        samples = self._busy.samples
        guest = self._busy.guests.open(self._coming[len(self._guests)])
        driver_us, began_us = self._driver.spent_us, now_us()
        try:
            guest.sequence.grow(len(guest.tokens))
        except OutOfPages as error:
            name = self._busy.shape.name
            raise WrongNumbers(f"a guest of {name} finds no memory though the sum fits the budget: {error}") from error
        self._last_in_us = now_us()
        samples["grow"].append(self._last_in_us - began_us)
        samples["grow_driver"].append(self._driver.spent_us - driver_us)
        guest.sequence.advance(len(guest.tokens))
        self._guests.append(guest)

    def _pump(self) -> None:
        """Nobody lacks memory: it unmaps what retires, which the next guest's grow need not do then."""
        for side in (self._busy, self._other):
            side.cache.map_ahead(self._pump_budget_us / 2, lookahead_tokens=0)


def _rows(suite: str, workload: str, system: str, side: Side, other: str) -> Iterator[Row]:
    metrics = {
        "first": ("first grow", "us"),
        "grow": ("grow", "us"),
        "grow_driver": ("grow, in the driver", "us"),
        "all": ("until all are in", "us"),
        "speed": ("mapped", "MiB/s"),
        **{f"held, {moment}": (f"held, {moment}", "MiB") for moment in _MOMENTS},
        **{f"held by the other, {moment}": (f"held by {other}, {moment}", "MiB") for moment in _MOMENTS},
        "step": ("step", "us"),
        "undisturbed": ("step, undisturbed", "us"),
    }
    for name, (metric, unit) in metrics.items():
        summary = summarize(side.samples[name])
        yield Row(suite=suite, workload=workload, system=system, metric=metric, unit=unit, summary=summary)
    most, possible = (summarize(side.samples[name]) for name in ("most", "possible"))
    yield Row(
        suite=suite, workload=workload, system=system, metric="most of the budget", unit="%", summary=most, bound=possible.p50
    )
    yield from call_rows(suite, workload, system, side.calls)
