"""What growing costs a decode loop in steady state, by how memory comes to a sequence: see `MODES`.

    ┌ critical: the device idles ────────────────────────┐┌ slack: the device works ──────────────────┐
    which rows are short of memory | grow them | launch   || advance | turn over | map ahead, admit | wait
                                     └ a stalled step

A newcomer's prompt counts as written when its memory is mapped: prefill has no part in this.

Legend: B rows of the batch (-1 in slots_B: empty).
"""

import gc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from bench.decode_step import SLACK_SHARE, Indices, StepWork, open_work
from bench.figures import Drawing, Question
from bench.harness import Recorder, Settings, now_us
from bench.rows import summarize
from vmmkv import KVCache, Pool, Sequence
from vmmkv.units import PAGE_BYTES

QUESTIONS: Final = (Question("A step that grows, against memory mapped in advance", "step", "static", ours="slack"),)
FIGURES: Final = (Drawing("step", "What growing adds to a decode step", ("step, over static", "step")),)

_TIMES: Final = {"step": "us", "pump": "us", "pumped": "pages/step"}
"""Samples of the loop that have a distribution, with their units, in the order of the table. To map ahead is to pump."""

STATIC, OFF, SLACK, ADOPTED = MODES = ("static", "off", "slack", "adopted")
"""How memory comes to a sequence: every slot is mapped to its end in advance, the reference; in the foreground, when a row is
missing; ahead, while the step's work runs; and so that an ended sequence's slot stays mapped too, for a newcomer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthSizes:
    """`fewest` and `most` tokens are of a prompt, and of an output."""

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
        """A quarter more than run at once: a closed slot is free when its fence has passed. They are addresses only."""
        return self.sequences + max(4, self.sequences // 4)

    @classmethod
    def of(cls, settings: Settings) -> "GrowthSizes":
        """On a CPU few and short sequences: the reference attends slowly."""
        sequences = settings.sequences or (256 if settings.on_gpu else 8)
        steps = settings.steps or (40 if settings.quick else 400 if settings.on_gpu else 200)
        if settings.on_gpu:
            return cls(sequences=sequences, steps=steps, warm_steps=16 if settings.quick else 64, fewest=64, most=512)
        return cls(sequences=sequences, steps=steps, warm_steps=8, fewest=16, most=64)


def run(recorder: Recorder) -> None:
    """Every mode under each workload. Raises: WrongNumbers if a row that was appended is not there."""
    settings = recorder.settings
    sizes = GrowthSizes.of(settings)
    pages = sizes.slots * settings.shape.layout.pages_for(sizes.max_tokens)
    # A sequence that neither ends nor begins has no slot to hand on.
    cases = [
        (f"{sizes.sequences} sequences, {how}", together, mode)
        for how, together in (("all cross together", True), ("coming and going", False))
        for mode in MODES
        if not (together and mode == ADOPTED)
    ]
    with Pool(settings.device, pages * PAGE_BYTES) as pool:
        static_us: dict[str, float] = {}
        for workload, together, mode in recorder.track(cases, lambda case: f"{case[0]}, {case[2]}"):
            samples = _measure(settings, sizes, pool, mode, together, static_us.get("slack", 0.0))
            if mode == STATIC:  # the first of each workload
                static_us = {metric: summarize(samples[metric]).p50 for metric in ("step", "slack")}
            for metric, unit in _TIMES.items():
                recorder.samples(workload, mode, metric, unit, samples[metric])
                if metric == "step":
                    more_us = summarize(samples["step"]).p50 - static_us["step"]
                    recorder.figure(workload, mode, "step, over static", unit, more_us, len(samples["step"]))
            recorder.figure(workload, mode, "stalled", "steps", sum(samples["stalled"]), len(samples["step"]))


def _measure(
    settings: Settings, sizes: GrowthSizes, pool: Pool, mode: str, together: bool, static_slack_us: float
) -> dict[str, list[float]]:
    """The samples of a loop. `static_slack_us` is what the static mode leaves beside a step; it maps nothing itself."""
    rng = np.random.default_rng(settings.seed)  # the same requests in every mode
    with KVCache(settings.shape.layout, pool, slots=sizes.slots, max_tokens=sizes.max_tokens) as cache:
        if mode == STATIC:
            sequences = [cache.open() for _ in range(sizes.sequences)]
            for sequence in sequences:
                sequence.grow(sizes.max_tokens)
            for sequence in sequences:
                sequence.park(0)
        work = open_work(cache, settings, sizes.sequences)
        requests = _requests(rng, sizes)
        loop = DecodeLoop(cache, work, mode, requests, sizes.sequences, SLACK_SHARE * static_slack_us)
        for row in range(sizes.sequences):
            request = Lengths(prompt_tokens=sizes.most, end_tokens=sizes.max_tokens) if together else next(requests)
            length = sizes.most if together else int(rng.integers(request.prompt_tokens, request.end_tokens))
            loop.join(row, cache.open(max_tokens=request.end_tokens), request, length)
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
    return loop.samples


class Lengths(NamedTuple):
    """A sequence to come: it joins the batch with `prompt_tokens` written and leaves it with `end_tokens`."""

    prompt_tokens: int
    end_tokens: int


def _requests(rng: np.random.Generator, sizes: GrowthSizes) -> Iterator[Lengths]:
    while True:
        prompt, output = (int(count) for count in rng.integers(sizes.fewest, sizes.most, size=2, endpoint=True))
        yield Lengths(prompt_tokens=prompt, end_tokens=prompt + output)


class DecodeLoop:
    """An engine's decode loop with nothing in it but memory. `samples` has a list for each metric."""

    def __init__(
        self, cache: KVCache, work: "StepWork", mode: str, requests: Iterator[Lengths], num_rows: int, slack_us: float
    ) -> None:
        self._mode, self._maps_ahead = mode, mode in (SLACK, ADOPTED)
        self.samples: dict[str, list[float]] = defaultdict(list)
        self._slack_us = slack_us
        """How long memory is mapped beside a step."""
        self._cache, self._work, self._requests = cache, work, requests
        self._sequences: dict[int, Sequence] = {}  # by row
        self._joined: dict[int, int] = {}  # by row, the length with which it began: what lies behind was decoded here
        self._waiting: dict[int, tuple[Sequence, Lengths]] = {}  # by row: newcomers without memory
        self._ended: list[int] = []
        # One entry a row: a step is a few numpy calls whatever the number of sequences.
        self._slots_B = np.full(num_rows, -1, dtype=np.int64)
        self._ends_B = np.zeros(num_rows, dtype=np.int64)

    def join(self, row: int, sequence: Sequence, request: Lengths, length: int) -> None:
        """A sequence decodes from so many tokens on, with memory for the next."""
        sequence.grow(min(length + 1, request.end_tokens))
        sequence.advance(length)
        self._sequences[row], self._joined[row] = sequence, length
        self._slots_B[row], self._ends_B[row] = sequence.slot, request.end_tokens

    def step(self) -> None:
        """One decode step of all rows."""
        cache = self._cache
        began_us = now_us()
        rows = np.flatnonzero(self._slots_B >= 0)
        slots = self._slots_B[rows]
        lengths = cache.lengths[slots]
        lengths_B = np.zeros_like(self._slots_B)
        lengths_B[rows] = lengths
        self.samples["stalled"].append(self._grow(rows[lengths >= cache.limits[slots]]))
        self._work.launch(self._slots_B, lengths_B)
        cache.advance(slots)
        self._turn_over()
        slack_us = now_us()
        if self._mode != OFF:
            self._map_ahead()
        self._work.wait()
        waited_us = now_us()
        over = rows[cache.lengths[slots] >= self._ends_B[rows]]
        self._ended = over.tolist()
        self._slots_B[over] = -1
        self.samples["slack"].append(waited_us - slack_us)
        self.samples["step"].append(now_us() - began_us)

    def check(self) -> None:
        """The library's laws hold, and every row that a running sequence decoded is in memory. Raises: WrongNumbers."""
        self._cache.check()
        for row in np.flatnonzero(self._slots_B >= 0).tolist():
            sequence = self._sequences[row]
            self._work.check(sequence.slot, self._joined[row], sequence.length)

    def _grow(self, short: Indices) -> bool:
        """In the foreground: sequences without a row to write, and newcomers if nothing is mapped ahead."""
        for row in short.tolist():
            sequence = self._sequences[row]
            sequence.grow(sequence.length + 1)
        admits = self._mode == OFF and bool(self._waiting)
        for row in list(self._waiting) if admits else ():
            self._admit(row)
        return admits or len(short) > 0

    def _turn_over(self) -> None:
        """Ended sequences are closed or parked, and their successors opened."""
        for row in self._ended:
            sequence = self._sequences.pop(row)
            if self._mode in (STATIC, ADOPTED):
                sequence.park(0)
            else:
                sequence.close()
            request = next(self._requests)
            self._waiting[row] = self._cache.open(max_tokens=request.end_tokens), request

    def _map_ahead(self) -> None:
        """Memory for the steps to come, then for newcomers, while there is slack."""
        began_us = now_us()
        if self._maps_ahead:
            pages = self._cache.map_ahead(self._slack_us, lookahead_tokens=self._cache.lookahead_tokens(self._slack_us))
            self.samples["pumped"].append(pages)
        for row in list(self._waiting):
            if self._maps_ahead and now_us() - began_us > self._slack_us:
                break
            self._admit(row)
        if self._maps_ahead:
            self.samples["pump"].append(now_us() - began_us)

    def _admit(self, row: int) -> None:
        sequence, request = self._waiting.pop(row)
        self.join(row, sequence, request, request.prompt_tokens)
