"""What it costs to give memory back, and to take it again, while sequences decode on.

Sequences that decode on are *residents*, whose memory is mapped in advance. *Guests* come with a prompt and are parked at its
end: theirs is the memory that goes and comes.

    one pool      shrink to what residents hold, grow again, guests come; at once, in front of a step, or in slack, while the
                  device works
    two caches    busy in turn, on one pool, and on two pools of half the budget each

A guest writes its mark into every row of its first and last layer. All rows are read again when all are written, and in
parked slots after memory was given back.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import numpy as np

from bench.decode_step import SLACK_SHARE, open_work
from bench.figures import Drawing
from bench.harness import SHAPES, Recorder, Settings, Shape, WrongNumbers, now_us
from bench.rows import summarize
from vmmkv import KVCache, KVLayout, OutOfPages, Pool, Sequence
from vmmkv.units import GIB, MIB, PAGE_BYTES, format_bytes

FIGURES: Final = (
    Drawing("shrink", "Giving memory back", ("resize", "until back"), "shrink"),
    Drawing("regrow", "Taking memory again", ("first page", "until all are in"), "regrow"),
    Drawing("two-caches", "Memory handed over", ("first grow", "until all are in"), "two"),
)

_OTHERS_BYTES: Final = 64 * MIB
"""By how much a GPU's free memory differs for reasons of others; in tests/gpu it was never more."""
_MARKS: Final = 251
"""Marks are whole numbers from 1 to this, which every dtype of K and V holds exactly."""

AT_ONCE, IN_SLACK = "vmmkv, at once", "vmmkv, in slack"
"""One resize, and a guest's prompt in front of each step; or both while the device works, a resize by one page at a time."""

Samples = defaultdict[str, list[float]]


def run(recorder: Recorder) -> None:
    """Raises: WrongNumbers if memory did not go where it should, or a row was lost."""
    for system in recorder.track((AT_ONCE, IN_SLACK, "vmmkv, one pool", "vmmkv, a pool of half for each")):
        (_measure_one_pool if system in (AT_ONCE, IN_SLACK) else _measure_two_caches)(recorder, system)


# residents and guests


class Guest(NamedTuple):
    """A sequence, its rows, and the mark that it writes."""

    sequence: Sequence
    num_tokens: int
    mark: int


class ResidentPlan(NamedTuple):
    """`num_sequences` decode from `start_tokens` on, at most to `end_tokens`, and are rewound to the start."""

    num_sequences: int
    start_tokens: int
    end_tokens: int


class Side:
    """The residents and guests of one cache. `salt` tells the marks of two caches apart: 0 or 1."""

    def __init__(self, cache: KVCache, residents: ResidentPlan, settings: Settings, shape: Shape, salt: int = 0) -> None:
        self.cache, self.shape = cache, shape
        self.work = open_work(cache, settings, residents.num_sequences, shape)
        self._layers, self._planned, self._next_mark = {0, shape.layers - 1}, residents, salt
        self._parked: dict[Hashable, Guest] = {}
        """By the stamp of its slot."""
        # Not all of one length: they would cross their pages together.
        first, count = residents.start_tokens, residents.num_sequences
        starts = [first - index * first // (2 * count) for index in range(count)]
        self._residents = [(cache.open(max_tokens=residents.end_tokens), start) for start in starts]
        for sequence, start in self._residents:
            sequence.grow(residents.end_tokens)
            sequence.advance(start)
        self._slots_B = np.array([sequence.slot for sequence, _ in self._residents], dtype=np.int64)
        cache.pool.driver.synchronize()

    def launch(self) -> None:
        """One decode step of all residents. Raises: WrongNumbers if they are at their end."""
        if int(self.cache.lengths[self._slots_B].max()) >= self._planned.end_tokens:
            raise WrongNumbers(f"residents have reached {self._planned.end_tokens} tokens, and memory has not arrived yet")
        self.work.launch(self._slots_B, self.cache.lengths[self._slots_B])
        self.cache.advance(self._slots_B)

    def rewind(self) -> None:
        """All residents at their starts again."""
        for sequence, start in self._residents:
            sequence.truncate(start)
            sequence.grow(self._planned.end_tokens)

    def check(self) -> None:
        """The laws hold, and rows of residents and parked guests are what was written. Raises: WrongNumbers."""
        try:
            self.cache.check()
        except AssertionError as error:
            raise WrongNumbers(f"a law is broken: {error}") from error
        for sequence, start in self._residents:
            self.work.check(sequence.slot, start, sequence.length)
        for parked in self.cache.parked():
            guest = self._parked[parked.stamp]
            self._check_rows(parked.slot, guest._replace(num_tokens=parked.length))

    def admit(self, num_tokens: int) -> Guest:
        """A guest with its memory. Raises: WrongNumbers if there is none, though the sum fits."""
        self._next_mark += 2
        sequence = self.cache.open(max_tokens=num_tokens)
        try:
            sequence.grow(num_tokens)
        except OutOfPages as error:
            raise WrongNumbers(f"a guest of {self.shape.name} finds no memory though the sum fits: {error}") from error
        sequence.advance(num_tokens)
        return Guest(sequence, num_tokens, 1 + self._next_mark % _MARKS)

    def write_and_check(self, guests: SequenceOf[Guest]) -> None:
        """All write their marks, and then have them; so do residents and parked guests. Raises: WrongNumbers."""
        for guest in guests:
            for layer in self._layers:
                self.cache.k(layer)[guest.sequence.slot, : guest.num_tokens].fill_(guest.mark)
        for guest in guests:
            self._check_rows(guest.sequence.slot, guest)
        self.check()

    def park(self, guests: SequenceOf[Guest]) -> None:
        """They are over, the eldest first."""
        for guest in guests:
            self._parked[guest.sequence.park().stamp] = guest

    def _check_rows(self, slot: int, guest: Guest) -> None:
        for layer in self._layers:
            if not (self.cache.k(layer)[slot, : guest.num_tokens] == guest.mark).all():
                rows = f"rows [0, {guest.num_tokens}) of slot {slot} in layer {layer}"
                raise WrongNumbers(f"{rows} are not what its guest wrote")


def take_step(
    samples: Samples,
    sides: SequenceOf[Side],
    *,
    in_front: Callable[[], object] = lambda: None,
    beside: Callable[[], object] = lambda: None,
) -> None:
    """One decode step. The device idles during `in_front`, and works during `beside`.

    `slack` is from the launch until the device was done, or the host came to wait for it: then the step is `late`.
    """
    began_us = now_us()
    in_front()
    for side in sides:
        side.launch()
    launched_us = now_us()
    beside()
    late = all(side.work.done() for side in sides)
    for side in sides:
        side.work.wait()
    ended_us = now_us()
    for name, value in (("step", ended_us - began_us), ("slack", ended_us - launched_us), ("late", late)):
        samples[name].append(value)


def draw_prompts(rng: np.random.Generator, layout: KVLayout, num_pages: int, of_each: tuple[int, int]) -> list[int]:
    """Lengths of prompts that need exactly so many pages together, each from and to `of_each`; the last has what is left."""
    lengths = []
    while num_pages > 0:
        pages = min(num_pages, int(rng.integers(*of_each, endpoint=True)))
        lengths.append(layout.tokens_in(pages))
        num_pages -= layout.pages_for(lengths[-1])
    return lengths


# one pool

_METRICS: Final = {
    "resize": "us",
    "given back": "MiB",
    "given back, says the device": "MiB",
    "until back": "us",
    "first page": "us",
    "until all are in": "us",
    "steps": "steps",
    "step": "us",
}
"""With their units, in the order of the table; each phase has some."""


class OnePool:
    """One cache, whose guests' memory goes and comes; gigabytes on a GPU, megabytes on a CPU.

    Residents, of 1,024 to 1,536 tokens or fewer, hold half the budget. `samples` is by phase and metric.
    """

    def __init__(self, settings: Settings, way: str, stack: ExitStack) -> None:
        gpu, quick, layout = settings.on_gpu, settings.quick, settings.shape.layout
        self.num_residents: Final = settings.sequences or ((8 if quick else 32) if gpu else 4)
        self._num_calm_steps: Final = (4 if quick else 16) if gpu else (2 if quick else 8)
        self._prompt_pages: Final = (16, 128) if gpu else (1, 20)
        residents = ResidentPlan(self.num_residents, *((1024, 1536) if gpu else (150, 250)))
        self._half_pages: Final = residents.num_sequences * layout.pages_for(residents.end_tokens)
        self.half_bytes: Final = self._half_pages * PAGE_BYTES
        # Residents, guests, and guests of the time before, parked or not yet unmapped. They are addresses only.
        slots = self.num_residents + 2 * (2 + self._half_pages // self._prompt_pages[0])
        max_tokens = max(residents.end_tokens, layout.tokens_in(self._prompt_pages[1]))
        self._rng = np.random.default_rng(settings.seed)
        self._pool = stack.enter_context(Pool(settings.device, 2 * self.half_bytes))
        self._cache = stack.enter_context(KVCache(layout, self._pool, slots=slots, max_tokens=max_tokens))
        self._side = Side(self._cache, residents, settings, settings.shape)
        self._way = way
        self._slack_us = 0.0
        """Of what runs beside a step; known after the first calm steps."""
        self.samples: defaultdict[str, Samples] = defaultdict(lambda: defaultdict(list))

    def calm(self) -> None:
        """Steps beside which nothing is given or taken."""
        samples = self.samples["calm"]
        for _ in range(self._num_calm_steps):
            take_step(samples, [self._side])
        self._slack_us = SLACK_SHARE * summarize(samples["slack"][-self._num_calm_steps :]).p50

    def shrink(self) -> None:
        """To half the budget, until the device has the memory. Raises: WrongNumbers if it has not got what was given."""
        samples, pool = self.samples["shrink"], self._pool
        created_bytes, taken_bytes, asked_us = pool.created_bytes, self._taken_bytes(), now_us()
        noise_bytes = 0 if self._cache.device.type == "cpu" else _OTHERS_BYTES
        before, times_back = len(samples["step"]), len(samples["until back"])

        def give_back() -> None:
            began_us = now_us()
            while pool.budget_bytes > self.half_bytes:
                least = self.half_bytes if self._way == AT_ONCE else pool.created_bytes - PAGE_BYTES
                self._resize(samples, max(self.half_bytes, least))
                if now_us() - began_us > self._slack_us:
                    break
            arrived_bytes = taken_bytes - self._taken_bytes()
            if pool.budget_bytes == self.half_bytes and arrived_bytes >= created_bytes - pool.created_bytes - noise_bytes:
                samples["until back"].append(now_us() - asked_us)

        while len(samples["until back"]) == times_back:
            take_step(samples, [self._side], beside=give_back)
        given_bytes = created_bytes - pool.created_bytes
        if given_bytes <= 0 or pool.created_bytes > self.half_bytes:
            left = f"{format_bytes(pool.created_bytes)} of {format_bytes(created_bytes)} are left"
            raise WrongNumbers(f"{left} where {format_bytes(self.half_bytes)} were wanted")
        samples["steps"].append(len(samples["step"]) - before)
        samples["given back"].append(given_bytes / MIB)
        samples["given back, says the device"].append((taken_bytes - self._taken_bytes()) / MIB)
        self._side.check()

    def regrow(self) -> None:
        """To the whole budget, until guests have all of its memory; then they are parked, and residents rewound."""
        samples, layout, side = self.samples["regrow"], self._cache.layout, self._side
        # The first guest has one page: how soon it comes is measured.
        prompts = [1, *draw_prompts(self._rng, layout, self._half_pages - layout.pages_for(1), self._prompt_pages)]
        before, asked_us = len(samples["step"]), now_us()
        self._resize(samples, 2 * self.half_bytes)
        guests: list[Guest] = []

        def admit() -> None:
            began_us = now_us()
            while len(guests) < len(prompts):
                guests.append(side.admit(prompts[len(guests)]))
                if len(guests) == 1:
                    samples["first page"].append(now_us() - asked_us)
                if self._way == AT_ONCE or now_us() - began_us > self._slack_us:
                    break

        while len(guests) < len(prompts):
            take_step(samples, [side], **{"in_front" if self._way == AT_ONCE else "beside": admit})
        samples["until all are in"].append(now_us() - asked_us)
        samples["steps"].append(len(samples["step"]) - before)
        side.write_and_check(guests)
        side.rewind()
        side.park(guests)
        self._cache.drain()

    def _resize(self, samples: Samples, budget_bytes: int) -> None:
        began_us = now_us()
        self._pool.resize(budget_bytes)
        samples["resize"].append(now_us() - began_us)

    def _taken_bytes(self) -> int:
        """Memory taken of the device, as the device says: by all processes on a GPU, by this driver on the host."""
        driver: Any = self._pool.driver
        if self._cache.device.type == "cpu":
            return os.fstat(driver.file.fd).st_blocks * 512
        free_bytes, total_bytes = driver.memory()
        return int(total_bytes - free_bytes)


def _measure_one_pool(recorder: Recorder, way: str) -> None:
    quick = recorder.settings.quick
    with ExitStack() as stack:
        measured = OnePool(recorder.settings, way, stack)
        measured.calm()
        measured.regrow()
        measured.samples.clear()  # the first memory of all was never given back
        for _ in range(2 if quick else 12 if recorder.settings.on_gpu else 8):
            measured.calm()
            measured.shrink()
            measured.regrow()
    half, full = format_bytes(measured.half_bytes), format_bytes(2 * measured.half_bytes)
    for phase, text in {"shrink": f"shrink: {full} to {half}", "regrow": f"regrow: {half} to {full}"}.items():
        workload = f"{text}, memory parked, {measured.num_residents} sequences decode on"
        samples = measured.samples[phase]
        for metric, unit in _METRICS.items():
            recorder.samples(workload, way, metric, unit, samples[metric])
        recorder.samples(workload, way, "step, undisturbed", "us", measured.samples["calm"]["step"])
        recorder.figure(workload, way, "late", "steps", sum(samples["late"]), len(samples["late"]))


# two caches


def _measure_two_caches(recorder: Recorder, system: str) -> None:
    """In each phase the guests of one side need all of the budget that no resident holds; they are parked at its end."""
    settings, gpu = recorder.settings, recorder.settings.on_gpu
    names = ("llama-3.1-8b", "qwen3-0.6b") if gpu else ("wide", "smollm2-135m")
    budget_bytes = (4 * GIB if settings.quick else 16 * GIB) if gpu else 96 * MIB
    num_residents, start_tokens, prompt_pages = (8, 256, (16, 192)) if gpu else (2, 8, (2, 20))
    rng = np.random.default_rng(settings.seed)
    num_pools = 1 if system == "vmmkv, one pool" else 2
    with ExitStack() as stack:
        opened = [stack.enter_context(Pool(settings.device, budget_bytes // num_pools)) for _ in range(num_pools)]
        sides = []
        for salt, (name, pool) in enumerate(zip(names, (opened[0], opened[-1]), strict=True)):
            # No guest but the last has fewer pages than the fewest, and at most one comes a step.
            most_guests = 1 + pool.budget_bytes // PAGE_BYTES // prompt_pages[0]
            residents = ResidentPlan(num_residents, start_tokens, start_tokens + most_guests)
            layout, slots = SHAPES[name].layout, num_residents + 2 * most_guests
            max_tokens = max(residents.end_tokens, layout.tokens_in(prompt_pages[1]))
            cache = stack.enter_context(KVCache(layout, pool, slots=slots, max_tokens=max_tokens))
            sides.append((Side(cache, residents, settings, SHAPES[name], salt), Samples(list)))
        for phase in range(4 if settings.quick else 10):
            (busy, samples), (other, _) = sides[phase % 2], sides[1 - phase % 2]
            if phase == len(sides):  # until now neither had memory that could be handed over
                for _, of_side in sides:
                    of_side.clear()
            free_pages = (busy.cache.pool.budget_bytes - busy.cache.pool.used_bytes) // PAGE_BYTES
            _hand_over(busy, other, samples, draw_prompts(rng, busy.cache.layout, free_pages, prompt_pages), budget_bytes)
    for (side, samples), (other, _) in (sides, sides[::-1]):
        asks = f"{side.shape.name} asks while {other.shape.name}'s memory is parked"
        workload = f"two caches: {format_bytes(budget_bytes)}, {asks}"
        for metric, unit in {"first grow": "us", "until all are in": "us", "step": "us", "most of the budget": "%"}.items():
            recorder.samples(workload, system, metric, unit, samples[metric])


def _hand_over(busy: Side, other: Side, samples: Samples, prompts: SequenceOf[int], budget_bytes: int) -> None:
    """One phase: guests of the busy side come, one a step, until no page is left that could be given up, and are parked.

    Raises: WrongNumbers if a guest finds no memory, or a check fails.
    """
    guests: list[Guest] = []

    def admit() -> None:
        began_us = now_us()
        guests.append(busy.admit(prompts[len(guests)]))
        if len(guests) == 1:
            samples["first grow"].append(now_us() - began_us)

    asked_us = now_us()
    for _ in prompts:
        take_step(samples, [busy, other], in_front=admit)
    samples["until all are in"].append(now_us() - asked_us)
    stats = busy.cache.stats()
    samples["most of the budget"].append(100 * (stats.mapped_bytes + stats.pending_reclaim_bytes) / budget_bytes)
    busy.write_and_check(guests)
    other.check()
    busy.park(guests)
    for side in (busy, other):
        side.rewind()
        side.cache.drain()  # so that the next guest's growth need not
        side.check()
