"""Shrinking and regrowing, by what the memory is that goes, and by when it goes: the rows."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from bench.elastic.breath import Breath, Phase, Way
from bench.elastic.guests import Guests, Kept
from bench.elastic.running import Running
from bench.elastic.sizes import Breaths, prompts
from bench.report import Report
from bench.rows import Row
from bench.settings import Settings
from bench.step_work import open_work
from bench.timed_driver import TimedDriver
from bench.timing import exact, summarize
from vmmkv import KVCache, Pool
from vmmkv.driver import open_driver
from vmmkv.units import PAGE_BYTES, format_bytes

_METRICS: Final = {
    "resize": ("resize", "us"),
    "resize_driver": ("resize, in the driver", "us"),
    "given": ("given back", "MiB"),
    "given_device": ("given back, says the device", "MiB"),
    "back": ("until back", "us"),
    "first": ("first page", "us"),
    "all": ("until all are in", "us"),
    "grow": ("grow", "us"),
    "grow_driver": ("grow, in the driver", "us"),
    "pump": ("pump", "us"),
    "pump_driver": ("pump, in the driver", "us"),
    "speed": ("mapped", "MiB/s"),
    "steps": ("steps", "steps"),
    "step": ("step", "us"),
}
"""By a phase's sample, the metric and its unit, in the order of the table."""
_COUNTS: Final = ("stalled", "late")


def num_steps() -> int:
    """Of the progress bar."""
    return len(Kept) * len(Way)


def measure(settings: Settings, report: Report, begin: Callable[[str], None], *, suite: str) -> None:
    """Each kind of kept memory, each way. Raises WrongNumbers."""
    sizes = Breaths.of(settings)
    half = format_bytes(sizes.half_pages(settings.shape.layout) * PAGE_BYTES)
    full = format_bytes(2 * sizes.half_pages(settings.shape.layout) * PAGE_BYTES)
    for kept in Kept:
        for way in Way:
            begin(f"memory {kept.value}, {way.value}")
            breath = _breathe(settings, sizes, kept, way)
            beside = f"memory {kept.value}, {sizes.sequences} sequences decode on"
            for phase, workload in {
                "shrink": f"shrink: {full} to {half}, {beside}",
                "regrow": f"regrow: {half} to {full}, {beside}",
            }.items():
                report.add(*_rows(suite, workload, way.value, breath.phases[phase], breath.phases["calm"]))


def _breathe(settings: Settings, sizes: Breaths, kept: Kept, way: Way) -> Breath:
    rng = np.random.default_rng(settings.seed)  # the same guests each way
    layout, half_pages = settings.shape.layout, sizes.half_pages(settings.shape.layout)
    device_driver = open_driver(settings.device)
    driver = TimedDriver(device_driver)
    with (
        Pool(settings.device, half_pages * PAGE_BYTES, driver=driver.as_driver()) as pool,
        KVCache(layout, pool, slots=sizes.slots(layout), max_tokens=sizes.max_tokens(layout)) as cache,
    ):
        work = open_work(cache, replace(settings, work="attention"), sizes.sequences)  # rows that are not written prove nothing
        running = Running(cache, work, sizes.sequences, sizes.start_tokens, sizes.end_tokens, ahead=False)
        guests = Guests(cache, settings.shape, kept, rng)
        breath = Breath(driver, device_driver, cache, running, guests, half_pages * PAGE_BYTES, way)

        def regrow() -> None:
            # The first has a page: how soon that comes is measured.
            lengths = [1, *prompts(rng, layout, half_pages - layout.pages_for(1), sizes.fewest_pages, sizes.most_pages)]
            come = breath.regrow(lengths)
            guests.write(come)
            guests.check(come)
            breath.check()
            breath.begin_again(come)

        breath.calm(sizes.calm_steps)
        regrow()
        breath.phases.clear()  # the first memory of all was never given back
        for _ in range(sizes.repeats):
            breath.calm(sizes.calm_steps)
            breath.shrink()
            breath.check()
            regrow()
    return breath


def _rows(suite: str, workload: str, system: str, phase: Phase, calm: Phase) -> Iterator[Row]:
    for name, (metric, unit) in _METRICS.items():
        if samples := phase.samples[name]:
            yield Row(suite=suite, workload=workload, system=system, metric=metric, unit=unit, summary=summarize(samples))
    undisturbed = summarize(calm.samples["step"])
    yield Row(suite=suite, workload=workload, system=system, metric="step, undisturbed", unit="us", summary=undisturbed)
    for name in _COUNTS:
        count = exact(sum(phase.samples[name]), len(phase.samples[name]))
        yield Row(suite=suite, workload=workload, system=system, metric=name, unit="steps", summary=count)
    yield from call_rows(suite, workload, system, phase.calls)


def call_rows(suite: str, workload: str, system: str, calls: list[Counter[str]]) -> Iterator[Row]:
    """For each call of the driver a row: how often in a phase."""
    for name in sorted(set().union(*calls)):
        summary = summarize([each[name] for each in calls])
        yield Row(suite=suite, workload=workload, system=system, metric=f"driver calls: {name}", unit="calls", summary=summary)
