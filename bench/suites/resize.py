"""What it costs to give memory back, and to take it again, while sequences decode on.

Sequences that decode on are *residents*. *Guests* come with a prompt and end: theirs is the memory that goes and comes.

    one pool      shrink to half its budget, grow again, guests come; by what is kept of ended guests, and by when memory moves:
                  at once, in front of a step, or in slack, while the device works
    two caches    busy in turn, on one pool, and on two pools of half the budget each

A guest writes its mark into every row of its first and last layer. All rows are read again when all are written, and in
parked slots after memory was given back.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.harness import SHAPES, Recorder, Settings, Shape, WrongNumbers, now_us
from bench.rows import summarize
from bench.suites.append import SLACK_SHARE, StepWork, open_work
from vmmkv import KVCache, KVLayout, OutOfPages, Pool, PrefixCache, Sequence
from vmmkv.units import GIB, MIB, PAGE_BYTES, format_bytes

_OTHERS_BYTES: Final = 64 * MIB
"""By how much a GPU's free memory differs for reasons of others; in tests/gpu it was never more."""
_MARKS: Final = 251
"""Marks are whole numbers from 1 to this, which every dtype of K and V holds exactly."""
_VOCABULARY: Final = 100_000

FREE, PARKED, IN_TREE = "free", "parked", "in a prefix tree"
"""What is kept of a guest at its end: nothing; its slot, to be adopted; its prompt, while its slot is unmapped."""
AT_ONCE, IN_SLACK = "vmmkv, at once", "vmmkv, in slack"
"""One resize, and a guest's prompt in front of each step; or both while the device works, a resize by one page at a time."""

Samples = defaultdict[str, list[float]]


def run(recorder: Recorder) -> None:
    """Raises: WrongNumbers if memory did not go where it should, or a row was lost."""
    cases: list[tuple[str, str] | bool] = [
        *((kept, way) for kept in (FREE, PARKED, IN_TREE) for way in (AT_ONCE, IN_SLACK)),
        True,
        False,
    ]
    for case in recorder.track(cases):
        if isinstance(case, tuple):
            _measure_one_pool(recorder, *case)
        else:
            _measure_two_caches(recorder, shared=case)


# residents and guests


class StepTaken(NamedTuple):
    """What one step took. `slack_us` is from the launch until the device was done, or the host came to wait for it."""

    step_us: float
    slack_us: float
    stalled: bool
    """Whether memory was mapped for a resident in front of the launch."""
    late: bool
    """Whether the device was done before the host came to wait for it."""


class Residents:
    """Sequences of one cache that decode from `start_tokens` on, at most to `end_tokens`, and are rewound to the start.

    `ahead`: all that they will ever need is mapped at once, so that what they hold is a constant.
    """

    def __init__(
        self, cache: KVCache, work: StepWork, num_sequences: int, start_tokens: int, end_tokens: int, *, ahead: bool
    ) -> None:
        self.cache, self.work = cache, work
        self._end_tokens, self._ahead = end_tokens, ahead
        self._sequences = [cache.open(max_tokens=end_tokens) for _ in range(num_sequences)]
        # Not all of one length: they would cross their pages together.
        self._starts = [start_tokens - index * start_tokens // (2 * num_sequences) for index in range(num_sequences)]
        for sequence, start in zip(self._sequences, self._starts, strict=True):
            sequence.grow(end_tokens if ahead else start + 1)
            sequence.advance(start)
        self._slots_B = np.array([sequence.slot for sequence in self._sequences], dtype=np.int64)
        cache.pool.driver.synchronize()

    def make_room(self) -> bool:
        """Map a row for those without one, in the foreground. Whether there were any."""
        if int(self.cache.lengths[self._slots_B].max()) >= self._end_tokens:
            raise WrongNumbers(f"residents have reached their end, {self._end_tokens} tokens, and memory has not arrived yet")
        short = [sequence for sequence in self._sequences if sequence.length >= sequence.limit]
        for sequence in short:
            sequence.grow(sequence.length + 1)
        return bool(short)

    def launch(self) -> None:
        """One decode step of all of them."""
        self.work.launch(self._slots_B, self.cache.lengths[self._slots_B])
        self.cache.advance(self._slots_B)

    def rewind(self) -> None:
        """All at their starts again."""
        for sequence, start in zip(self._sequences, self._starts, strict=True):
            sequence.truncate(start)
            if self._ahead:
                sequence.grow(self._end_tokens)

    def check(self) -> None:
        """Is every row decoded since the start what was appended? Do the laws hold? Raises: WrongNumbers."""
        try:
            self.cache.check()
        except AssertionError as error:
            raise WrongNumbers(f"a law is broken: {error}") from error
        for sequence, start in zip(self._sequences, self._starts, strict=True):
            self.work.check(sequence.slot, start, sequence.length)


def _nothing() -> None:
    pass


def run_step(
    residents: SequenceOf[Residents], *, in_front: Callable[[], Any] = _nothing, beside: Callable[[], Any] = _nothing
) -> StepTaken:
    """One decode step. The device idles during `in_front`, and works during `beside`."""
    began_us = now_us()
    stalled = [each.make_room() for each in residents]
    in_front()
    for each in residents:
        each.launch()
    launched_us = now_us()
    beside()
    late = all(each.work.done() for each in residents)
    for each in residents:
        each.work.wait()
    ended_us = now_us()
    return StepTaken(ended_us - began_us, ended_us - launched_us, any(stalled), late)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A sequence, its prompt, and the mark that it writes."""

    sequence: Sequence
    tokens: npt.NDArray[np.int32]
    mark: int


class Guests:
    """The guests of one cache, which all end in the same way. `salt` tells the marks of two caches apart: 0 or 1."""

    def __init__(self, cache: KVCache, shape: Shape, kept: str, rng: np.random.Generator, *, salt: int = 0) -> None:
        self.cache = cache
        self._layers, self._kept, self._rng = {0, shape.layers - 1}, kept, rng
        self._prefix = PrefixCache(cache) if kept == IN_TREE else None
        self._next_mark = salt
        self._parked: dict[Hashable, tuple[int, int]] = {}
        """By the stamp of a parked slot, its rows and their mark."""

    def open(self, num_tokens: int) -> Guest:
        """A guest without memory, whose tokens no other has."""
        tokens = self._rng.integers(_VOCABULARY, size=num_tokens, dtype=np.int32)
        if self._prefix is None:
            sequence = self.cache.open(max_tokens=num_tokens)
        else:
            sequence = self._prefix.attach(tokens, max_tokens=num_tokens).sequence
        self._next_mark += 2
        return Guest(sequence=sequence, tokens=tokens, mark=1 + self._next_mark % _MARKS)

    def write_and_check(self, guests: SequenceOf[Guest]) -> None:
        """All write their marks, and then have them. Raises: WrongNumbers."""
        for guest in guests:
            for layer in self._layers:
                self.cache.k(layer)[guest.sequence.slot, : len(guest.tokens)].fill_(guest.mark)
        for guest in guests:
            self._check_rows(guest.sequence.slot, len(guest.tokens), guest.mark)

    def check_parked(self) -> None:
        """Parked slots that are left have what their guests wrote. Raises: WrongNumbers."""
        for parked in self.cache.parked():
            self._check_rows(parked.slot, *self._parked[parked.stamp])

    def end(self, guests: Iterable[Guest]) -> None:
        """They are over, the eldest first."""
        for guest in guests:
            if self._prefix is not None:
                self._prefix.release(guest.sequence, guest.tokens)
            elif self._kept == PARKED:
                parked = guest.sequence.park()
                self._parked[parked.stamp] = parked.length, guest.mark
            else:
                guest.sequence.close()

    def forget(self) -> None:
        """Nothing is kept of ended guests."""
        for parked in self.cache.parked():
            self.cache.evict(parked)
        if self._prefix is not None:
            self._prefix.evict()
        self._parked.clear()
        self.cache.drain()

    def _check_rows(self, slot: int, num_tokens: int, mark: int) -> None:
        for layer in self._layers:
            if not (self.cache.k(layer)[slot, :num_tokens] == mark).all():
                raise WrongNumbers(f"rows [0, {num_tokens}) of slot {slot} in layer {layer} are not what its guest wrote")


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
    "grow": "us",
    "mapped": "MiB/s",
    "steps": "steps",
    "step": "us",
}
"""With their units, in the order of the table; each phase has some."""


class OnePool:
    """One cache, whose guests' memory goes and comes; gigabytes on a GPU, megabytes on a CPU. Half the budget is all that
    residents, of 1,024 to 1,536 tokens or fewer, will ever hold. `samples` is by phase and metric."""

    def __init__(self, settings: Settings, kept: str, way: str, stack: ExitStack) -> None:
        gpu, quick, layout = settings.on_gpu, settings.quick, settings.shape.layout
        self.num_sequences: Final = settings.sequences or ((8 if quick else 32) if gpu else 4)
        self.num_calm_steps: Final = (4 if quick else 16) if gpu else (2 if quick else 8)
        self._prompt_pages: Final = (16, 128) if gpu else (1, 20)
        start_tokens, end_tokens = (1024, 1536) if gpu else (150, 250)
        self._half_pages: Final = self.num_sequences * layout.pages_for(end_tokens)
        self.half_bytes: Final = self._half_pages * PAGE_BYTES
        # Residents, guests, and guests of the time before, parked or not yet unmapped. They are addresses only.
        slots = self.num_sequences + 2 * (2 + self._half_pages // self._prompt_pages[0])
        max_tokens = max(end_tokens, layout.tokens_in(self._prompt_pages[1]))
        self._rng = np.random.default_rng(settings.seed)
        self._pool = stack.enter_context(Pool(settings.device, self.half_bytes))
        self._cache = stack.enter_context(KVCache(layout, self._pool, slots=slots, max_tokens=max_tokens))
        work = open_work(self._cache, settings, self.num_sequences)
        self._residents = Residents(self._cache, work, self.num_sequences, start_tokens, end_tokens, ahead=False)
        self._guests = Guests(self._cache, settings.shape, kept, self._rng)
        self._way = way
        self._slack_us = 0.0
        """Of what runs beside a step; known after the first calm steps."""
        self.samples: defaultdict[str, Samples] = defaultdict(lambda: defaultdict(list))

    def calm(self) -> None:
        """Steps beside which nothing is given or taken."""
        steps = [self._step("calm", beside=self._map_ahead) for _ in range(self.num_calm_steps)]
        self._slack_us = SLACK_SHARE * summarize([step.slack_us for step in steps]).p50

    def shrink(self) -> None:
        """To half the budget, until the device has the memory. Raises: WrongNumbers if it has not got what was given."""
        samples, pool = self.samples["shrink"], self._pool
        created_bytes, taken_bytes, asked_us = pool.created_bytes, self._taken_bytes(), now_us()
        noise_bytes = 0 if self._cache.device.type == "cpu" else _OTHERS_BYTES
        back_us: float | None = None

        def give_back() -> None:
            nonlocal back_us
            began_us = now_us()
            self._map_ahead()
            while pool.budget_bytes > self.half_bytes:
                least = self.half_bytes if self._way == AT_ONCE else pool.created_bytes - PAGE_BYTES
                self._resize(samples, max(self.half_bytes, least))
                if now_us() - began_us > self._slack_us:
                    break
            arrived_bytes = taken_bytes - self._taken_bytes()
            if pool.budget_bytes == self.half_bytes and arrived_bytes >= created_bytes - pool.created_bytes - noise_bytes:
                back_us = now_us() - asked_us

        steps = 0
        while back_us is None:
            self._step("shrink", beside=give_back)
            steps += 1
        given_bytes = created_bytes - pool.created_bytes
        if given_bytes <= 0 or pool.created_bytes > self.half_bytes:
            left = f"{format_bytes(pool.created_bytes)} of {format_bytes(created_bytes)} are left"
            raise WrongNumbers(f"{left} where {format_bytes(self.half_bytes)} were wanted")
        samples["until back"].append(back_us)
        samples["steps"].append(steps)
        samples["given back"].append(given_bytes / MIB)
        samples["given back, says the device"].append((taken_bytes - self._taken_bytes()) / MIB)
        self.check()

    def regrow(self) -> None:
        """To the whole budget, until guests have all of its memory; then they end."""
        samples, layout = self.samples["regrow"], self._cache.layout
        # The first guest has one page: how soon it comes is measured.
        prompts = [1, *draw_prompts(self._rng, layout, self._half_pages - layout.pages_for(1), self._prompt_pages)]
        before, asked_us = len(samples["step"]), now_us()
        self._resize(samples, 2 * self.half_bytes)
        guests: list[Guest] = []

        def admit() -> None:
            guests.append(self._guests.open(prompts[len(guests)]))
            began_us = now_us()
            guests[-1].sequence.grow(len(guests[-1].tokens))
            samples["grow"].append(now_us() - began_us)
            if len(guests) == 1:
                samples["first page"].append(now_us() - asked_us)

        def admit_in_slack() -> None:
            began_us = now_us()
            self._map_ahead()
            while len(guests) < len(prompts):
                admit()
                if now_us() - began_us > self._slack_us:
                    break

        grown = len(samples["grow"])
        while len(guests) < len(prompts):
            if self._way == AT_ONCE:
                self._step("regrow", in_front=admit, beside=self._map_ahead)
            else:
                self._step("regrow", beside=admit_in_slack)
        samples["until all are in"].append(now_us() - asked_us)
        samples["steps"].append(len(samples["step"]) - before)
        mapped_bytes = sum(map(layout.pages_for, prompts)) * PAGE_BYTES
        samples["mapped"].append(mapped_bytes / MIB / (sum(samples["grow"][grown:]) / 1e6))
        for guest in guests:
            guest.sequence.advance(len(guest.tokens))
        self._guests.write_and_check(guests)
        self.check()
        # Guests end and are kept; of those before nothing is, and only that memory is created.
        self._guests.forget()
        self._residents.rewind()
        self._cache.drain()
        self._pool.resize(self._pool.held_bytes)
        self._pool.resize(2 * self.half_bytes)
        self._guests.end(guests)
        self._cache.drain()

    def check(self) -> None:
        """The laws hold, and residents and parked guests have their rows. Raises: WrongNumbers."""
        self._residents.check()
        self._guests.check_parked()

    def _step(self, phase: str, **at: Callable[[], None]) -> StepTaken:
        step = run_step([self._residents], **at)
        for name, value in (("step", step.step_us), ("stalled", step.stalled), ("late", step.late)):
            self.samples[phase][name].append(value)
        return step

    def _map_ahead(self) -> None:
        self._cache.map_ahead(self._slack_us, lookahead_tokens=self._cache.lookahead_tokens(self._slack_us))

    def _resize(self, samples: Samples, budget_bytes: int) -> None:
        began_us = now_us()
        self._pool.resize(budget_bytes)
        samples["resize"].append(now_us() - began_us)

    def _taken_bytes(self) -> int:
        """Memory taken of the device, as the device says: by all processes on a GPU, by this driver on the host."""
        driver: Any = self._pool.driver
        if self._cache.device.type == "cpu":
            return os.fstat(driver._file.fd).st_blocks * 512
        free_bytes, total_bytes = driver.memory()
        return int(total_bytes - free_bytes)


def _measure_one_pool(recorder: Recorder, kept: str, way: str) -> None:
    settings = recorder.settings
    repeats = (2 if settings.quick else 12) if settings.on_gpu else (2 if settings.quick else 8)
    with ExitStack() as stack:
        measured = OnePool(settings, kept, way, stack)
        measured.calm()
        measured.regrow()
        measured.samples.clear()  # the first memory of all was never given back
        for _ in range(repeats):
            measured.calm()
            measured.shrink()
            measured.regrow()
    half, full = format_bytes(measured.half_bytes), format_bytes(2 * measured.half_bytes)
    for phase, text in {"shrink": f"shrink: {full} to {half}", "regrow": f"regrow: {half} to {full}"}.items():
        workload = f"{text}, memory {kept}, {measured.num_sequences} sequences decode on"
        samples = measured.samples[phase]
        for metric, unit in _METRICS.items():
            recorder.samples(workload, way, metric, unit, samples[metric])
        recorder.samples(workload, way, "step, undisturbed", "us", measured.samples["calm"]["step"])
        for metric in ("stalled", "late"):
            recorder.figure(workload, way, metric, "steps", sum(samples[metric]), len(samples[metric]))


# two caches


class Side:
    """One of two caches on one budget, and samples of its busy phases. It keeps ended guests in parked slots."""

    def __init__(self, settings: Settings, shape: Shape, pool: Pool, rng: np.random.Generator, salt: int) -> None:
        gpu = settings.on_gpu
        self.shape, self.samples = shape, Samples(list)
        self.prompt_pages = (16, 192) if gpu else (2, 20)
        self.num_held_steps = 4 if gpu else 2
        """At the end of a phase, in which nothing is asked for."""
        num_sequences, start_tokens = (8, 256) if gpu else (2, 8)
        # No guest but the last has fewer pages than the fewest, and at most one comes a step.
        most_guests = 1 + pool.budget_bytes // PAGE_BYTES // self.prompt_pages[0]
        end_tokens = start_tokens + most_guests + self.num_held_steps
        max_tokens = max(end_tokens, shape.layout.tokens_in(self.prompt_pages[1]))
        self.cache = KVCache(shape.layout, pool, slots=num_sequences + 2 * most_guests, max_tokens=max_tokens)
        work = open_work(self.cache, settings, num_sequences, shape)
        self.residents = Residents(self.cache, work, num_sequences, start_tokens, end_tokens, ahead=True)
        self.guests = Guests(self.cache, shape, PARKED, rng, salt=salt)

    def check(self) -> None:
        """Residents and parked guests have their rows. Raises: WrongNumbers."""
        self.residents.check()
        self.guests.check_parked()


def _measure_two_caches(recorder: Recorder, *, shared: bool) -> None:
    """The guests of a phase need all of the budget that no resident holds."""
    settings = recorder.settings
    names = ("llama-3.1-8b", "qwen3-0.6b") if settings.on_gpu else ("wide", "smollm2-135m")
    budget_bytes = (4 * GIB if settings.quick else 16 * GIB) if settings.on_gpu else 96 * MIB
    rng = np.random.default_rng(settings.seed)
    with ExitStack() as stack:
        num_pools = 1 if shared else 2
        pools = [stack.enter_context(Pool(settings.device, budget_bytes // num_pools)) for _ in range(num_pools)]
        sides = []
        for salt, (name, pool) in enumerate(zip(names, (pools[0], pools[-1]), strict=True)):
            sides.append(Side(settings, SHAPES[name], pool, rng, salt))
            stack.enter_context(sides[-1].cache)
        slack_us = 0.0
        for phase in range(4 if settings.quick else 10):
            if phase == len(sides):  # until now neither had memory that could be handed over
                for side in sides:
                    side.samples.clear()
            slack_us = _hand_over(sides[phase % 2], sides[1 - phase % 2], slack_us, budget_bytes, rng)
    system = "vmmkv, one pool" if shared else "vmmkv, a pool of half for each"
    for side, other in (sides, sides[::-1]):
        workload = (
            f"two caches: {format_bytes(budget_bytes)}, {side.shape.name} asks while {other.shape.name}'s memory is parked"
        )
        units = {"first grow": "us", "grow": "us", "until all are in": "us", "mapped": "MiB/s", "step": "us"}
        for metric, unit in {**units, "step, undisturbed": "us"}.items():
            recorder.samples(workload, system, metric, unit, side.samples[metric])
        possible = summarize(side.samples["possible"]).p50
        recorder.samples(workload, system, "most of the budget", "%", side.samples["most"], possible)


def _hand_over(busy: Side, other: Side, slack_us: float, budget_bytes: int, rng: np.random.Generator) -> float:
    """One phase: guests of the busy side come, one a step, until no page is left that could be given up, and park.

    The next phase's slack. Raises: WrongNumbers if a guest finds no memory, or a check fails.
    """
    samples, pool, residents = busy.samples, busy.cache.pool, [busy.residents, other.residents]
    free_pages = (pool.budget_bytes - pool.used_bytes) // PAGE_BYTES
    prompts = draw_prompts(rng, busy.cache.layout, free_pages, busy.prompt_pages)
    guests: list[Guest] = []

    def admit() -> None:
        guests.append(guest := busy.guests.open(prompts[len(guests)]))
        began_us = now_us()
        try:
            guest.sequence.grow(len(guest.tokens))
        except OutOfPages as error:
            raise WrongNumbers(f"a guest of {busy.shape.name} finds no memory though the sum fits: {error}") from error
        samples["grow"].append(now_us() - began_us)
        guest.sequence.advance(len(guest.tokens))

    def unmap() -> None:
        """Unmap what waits for it, so that the next guest's grow need not."""
        for side in (busy, other):
            side.cache.map_ahead(slack_us / 2, lookahead_tokens=0)

    mapped_pages, asked_us, before = busy.cache.stats().mapped_pages, now_us(), len(samples["grow"])
    for _ in prompts:
        samples["step"].append(run_step(residents, in_front=admit, beside=unmap).step_us)
    grow_us = samples["grow"][before:]
    samples["first grow"].append(grow_us[0])
    samples["until all are in"].append(now_us() - asked_us)
    stats, others = busy.cache.stats(), other.cache.stats()
    samples["mapped"].append((stats.mapped_pages - mapped_pages) * PAGE_BYTES / MIB / (sum(grow_us) / 1e6))
    samples["most"].append(100 * (stats.mapped_bytes + stats.pending_reclaim_bytes) / budget_bytes)
    samples["possible"].append(100 * (1 - (others.mapped_bytes - others.parked_bytes) / budget_bytes))

    steps = [run_step(residents, beside=unmap) for _ in range(busy.num_held_steps)]
    samples["step, undisturbed"].extend(step.step_us for step in steps)
    busy.guests.write_and_check(guests)
    busy.check()
    other.check()
    busy.guests.end(guests)
    for each in residents:
        each.rewind()
        each.check()
    return SLACK_SHARE * summarize([step.slack_us for step in steps]).p50
