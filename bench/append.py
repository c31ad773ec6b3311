"""What growing costs a decode loop in steady state, by how memory comes: see decode_loop.Mode.

Claims to be proved or refuted on a GPU: with the mapper pumped in slack, or slots adopted, no step of 256 sequences waits
for a driver call, and the bookkeeping of a step costs under 100 us of Python.
"""

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from bench.decode_loop import DecodeLoop, Mode, Request
from bench.report import Report
from bench.rows import Row
from bench.settings import Settings
from bench.step_work import open_work
from bench.timed_driver import TimedDriver
from bench.timing import exact, summarize
from vmmkv import KVCache, Pool
from vmmkv.driver import open_driver
from vmmkv.units import PAGE_BYTES

SUITE: Final = "append"

_TIMES: Final = {
    "step": "us",
    "launch": "us",
    "bookkeeping": "us",
    "stall": "us",
    "turnover": "us",
    "pump": "us",
    "pump_python": "us",
    "pumped": "pages/step",
    "admission": "steps",
}
"""The loop's samples that have a distribution, with their units, in the order of the table."""
_COUNTS: Final = {"stalled": "steps", "late": "steps"}
_SLACK_SHARE: Final = 0.75
"""How much of the device's working time is given to the pump. The rest is for the last page, which is not cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large and how long; `fewest` and `most` tokens of a prompt, and of an output."""

    sequences: int
    steps: int
    warm_steps: int
    fewest: int
    most: int

    @property
    def max_tokens(self) -> int:
        """The longest prompt with the longest output."""
        return 2 * self.most

    @property
    def slots(self) -> int:
        """A quarter more than run at once: a closed slot is free only when its fence has passed. They are addresses only."""
        return self.sequences + max(4, self.sequences // 4)

    @classmethod
    def of(cls, settings: Settings) -> "Sizes":
        """On a CPU few and short sequences, since the reference attends slowly."""
        sequences = settings.sequences or (256 if settings.on_gpu else 8)
        steps = settings.steps or (40 if settings.quick else 400 if settings.on_gpu else 200)
        if settings.on_gpu:
            return cls(sequences=sequences, steps=steps, warm_steps=16 if settings.quick else 64, fewest=64, most=512)
        return cls(sequences=sequences, steps=steps, warm_steps=8, fewest=16, most=64)


def run(settings: Settings, report: Report) -> None:
    """Every mode under each workload. Raises WrongNumbers if a row that was appended is not there."""
    sizes = Sizes.of(settings)
    driver = TimedDriver(open_driver(settings.device))
    pages = sizes.slots * settings.shape.layout.pages_for(sizes.max_tokens)
    pool = Pool(settings.device, pages * PAGE_BYTES, driver=driver.as_driver())
    workloads: dict[str, tuple[bool, list[Mode]]] = {
        # A sequence that neither ends nor begins has no slot to hand on, so there is nothing to adopt.
        f"{sizes.sequences} sequences, all cross together": (True, [mode for mode in Mode if mode is not Mode.ADOPTED]),
        f"{sizes.sequences} sequences, coming and going": (False, list(Mode)),
    }
    try:
        with report.progress(SUITE, sum(len(modes) for _, modes in workloads.values())) as begin:
            for workload, (together, modes) in workloads.items():
                static: DecodeLoop | None = None
                for mode in modes:
                    begin(f"{workload}, {mode.value}")
                    loop = _measure(settings, sizes, pool, driver, mode, together, static)
                    static = static or loop
                    report.add(*_rows(loop, static, workload))
                    _judge(report, loop, workload)
    finally:
        pool.close()


def _measure(
    settings: Settings, sizes: Sizes, pool: Pool, driver: TimedDriver, mode: Mode, together: bool, static: DecodeLoop | None
) -> DecodeLoop:
    rng = np.random.default_rng(settings.seed)  # the same requests in every mode
    with KVCache(settings.shape.layout, pool, slots=sizes.slots, max_tokens=sizes.max_tokens) as cache:
        if mode is Mode.STATIC:
            _map_everything(cache, sizes)
        work = open_work(cache, settings, sizes.sequences)
        requests = _requests(rng, sizes)
        loop = DecodeLoop(cache, driver, work, mode, requests, sizes.sequences)
        if static is not None:
            loop.pump_budget_us = _SLACK_SHARE * summarize(static.samples["slack"]).p50
        for row in range(sizes.sequences):
            if together:
                loop.begin(Request(prompt_tokens=sizes.most, end_tokens=sizes.max_tokens), row, sizes.most)
            else:
                request = next(requests)
                loop.begin(request, row, int(rng.integers(request.prompt_tokens, request.end_tokens)))
        pool.driver.synchronize()
        gc.collect()
        num_steps = sizes.warm_steps + sizes.steps
        if together:
            num_steps = min(num_steps, sizes.most - 1)  # so that none ends
        for step in range(num_steps):
            if step == sizes.warm_steps:
                loop.samples.clear()
            loop.step()
        loop.check()
    return loop


def _requests(rng: np.random.Generator, sizes: Sizes) -> Iterator[Request]:
    while True:
        prompt, output = (int(count) for count in rng.integers(sizes.fewest, sizes.most, size=2, endpoint=True))
        yield Request(prompt_tokens=prompt, end_tokens=prompt + output)


def _map_everything(cache: KVCache, sizes: Sizes) -> None:
    sequences = [cache.open() for _ in range(sizes.sequences)]
    for sequence in sequences:
        sequence.grow(sizes.max_tokens)
    for sequence in sequences:
        sequence.park(0)


def _rows(loop: DecodeLoop, static: DecodeLoop, workload: str) -> Iterator[Row]:
    mode, num_steps = loop.mode.value, len(loop.samples["step"])
    for metric, unit in _TIMES.items():
        if samples := loop.samples[metric]:
            summary = summarize(samples)
            yield Row(suite=SUITE, workload=workload, system=mode, metric=metric, unit=unit, summary=summary)
            if metric == "step":
                more_us = summary.p50 - summarize(static.samples["step"]).p50
                over = exact(more_us, num_steps)
                yield Row(suite=SUITE, workload=workload, system=mode, metric="step, over static", unit=unit, summary=over)
    for metric, unit in _COUNTS.items():
        count = exact(sum(loop.samples[metric]), num_steps)
        yield Row(suite=SUITE, workload=workload, system=mode, metric=metric, unit=unit, summary=count)


def _judge(report: Report, loop: DecodeLoop, workload: str) -> None:
    """Do the claims hold here? They are about a GPU: on a CPU nothing runs beside the pump."""
    if not loop.mode.pumps or loop.cache.device.type != "cuda":
        return
    stalled, late = (int(sum(loop.samples[metric])) for metric in _COUNTS)
    bookkeeping = summarize(loop.samples["bookkeeping"])
    report.say(
        f"{workload}, {loop.mode.value}: of {len(loop.samples['step'])} steps {stalled} waited for a driver call in the "
        f"foreground (claim: 0), {late} found the device idle after the pump (claim: 0); bookkeeping took "
        f"{bookkeeping.p50:.0f} us a step, p99 {bookkeeping.p99:.0f} us (claim: < 100)"
    )


if __name__ == "__main__":
    from bench.run import main

    sys.exit(main([SUITE, *sys.argv[1:]]))
