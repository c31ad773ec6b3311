"""What it costs to give memory back, and to take it again, while sequences decode on.

Sequences that decode on are *residents*. *Guests* come with a prompt and end: theirs is the memory that goes and comes.

    breaths      one pool: shrink to half its budget, grow again, guests come; by what is kept of ended guests, and by when
                 memory moves: at once, in front of a step, or in slack, while the device works
    handovers    two caches that are busy in turn, on one pool, and on two pools of half the budget each

A guest writes its mark into every row of its first and last layer. All rows are read again when all are written, and in
parked slots after memory was given back.
"""

import enum
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.harness import SHAPES, Recorder, Settings, Shape, WrongNumbers, now_us
from bench.rows import summarize
from bench.suites.append import SLACK_SHARE, StepWork, open_work
from bench.suites.driver_calls import TimedDriver
from vmmkv import KVCache, KVLayout, OutOfPages, Pool, PrefixCache, Sequence
from vmmkv.driver import open_driver
from vmmkv.units import GIB, MIB, PAGE_BYTES, format_bytes

_OTHERS_BYTES: Final = 64 * MIB
"""By how much a GPU's free memory differs for reasons of others; in tests/gpu it was never more."""
_MARKS: Final = 251
"""Marks are whole numbers from 1 to this, which every dtype of K and V holds exactly."""
_VOCABULARY: Final = 100_000

Samples = dict[str, list[float]]


class Kept(enum.Enum):
    """What is kept of a guest at its end."""

    NOTHING = "free"
    """Its memory is unmapped, and free in the pool."""
    SLOT = "parked"
    """Its slot as it was, to be adopted."""
    PREFIX = "in a prefix tree"
    """Its prompt, in a prefix tree; its slot is unmapped."""


class Way(enum.Enum):
    """When memory is given back and taken again."""

    AT_ONCE = "vmmkv, at once"
    """One resize; and each guest's prompt grows in front of a step, one a step."""
    IN_SLACK = "vmmkv, in slack"
    """While the device works: a resize by one page after the other, and the guests' prompts."""


def run(recorder: Recorder) -> None:
    """Breaths, then handovers. Raises: WrongNumbers if memory did not go where it should, or a row was lost."""
    cases: list[tuple[Kept, Way] | bool] = [*((kept, way) for kept in Kept for way in Way), True, False]
    for case in recorder.track(cases):
        if isinstance(case, tuple):
            _measure_breaths(recorder, *case)
        else:
            _measure_handovers(recorder, shared=case)


# residents and guests


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
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
    residents: SequenceOf[Residents], *, in_front: Callable[[], None] = _nothing, beside: Callable[[], None] = _nothing
) -> Step:
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
    return Step(step_us=ended_us - began_us, slack_us=ended_us - launched_us, stalled=any(stalled), late=late)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A sequence, its prompt, and the mark that it writes."""

    sequence: Sequence
    tokens: npt.NDArray[np.int32]
    mark: int


class Guests:
    """The guests of one cache, which all end in the same way. `salt` tells the marks of two caches apart: 0 or 1."""

    def __init__(self, cache: KVCache, shape: Shape, kept: Kept, rng: np.random.Generator, *, salt: int = 0) -> None:
        self.cache = cache
        self._layers, self._kept, self._rng = {0, shape.layers - 1}, kept, rng
        self._prefix = PrefixCache(cache) if kept is Kept.PREFIX else None
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
            elif self._kept is Kept.SLOT:
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


def draw_prompts(rng: np.random.Generator, layout: KVLayout, num_pages: int, fewest_pages: int, most_pages: int) -> list[int]:
    """Lengths of prompts that need exactly so many pages together; the last has what is left."""
    lengths = []
    while num_pages > 0:
        pages = min(num_pages, int(rng.integers(fewest_pages, most_pages, endpoint=True)))
        lengths.append(layout.tokens_in(pages))
        num_pages -= layout.pages_for(lengths[-1])
    return lengths


# breaths

_BREATH_METRICS: Final[Mapping[str, tuple[str, str]]] = {
    "resize": ("resize", "us"),
    "resize_driver": ("resize, in the driver", "us"),
    "given": ("given back", "MiB"),
    "given_device": ("given back, says the device", "MiB"),
    "back": ("until back", "us"),
    "first": ("first page", "us"),
    "all": ("until all are in", "us"),
    "grow": ("grow", "us"),
    "grow_driver": ("grow, in the driver", "us"),
    "speed": ("mapped", "MiB/s"),
    "steps": ("steps", "steps"),
    "step": ("step", "us"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaths:
    """A pool that shrinks and grows. Residents have `start_tokens` to `end_tokens` meanwhile."""

    sequences: int
    repeats: int
    calm_steps: int
    start_tokens: int
    end_tokens: int
    fewest_pages: int
    """Of a guest's prompt."""
    most_pages: int

    @classmethod
    def of(cls, settings: Settings) -> "Breaths":
        """Gigabytes on a GPU, megabytes on a CPU: mapping a page there costs a memset."""
        quick = settings.quick
        if settings.on_gpu:
            sequences, repeats, calm_steps = (8, 2, 4) if quick else (32, 12, 16)
            tokens, pages = (1024, 1536), (16, 128)
        else:
            sequences, repeats, calm_steps = (4, 2, 2) if quick else (4, 8, 8)
            tokens, pages = (150, 250), (1, 20)
        return cls(
            sequences=settings.sequences or sequences,
            repeats=repeats,
            calm_steps=calm_steps,
            start_tokens=tokens[0],
            end_tokens=tokens[1],
            fewest_pages=pages[0],
            most_pages=pages[1],
        )

    def half_pages(self, layout: KVLayout) -> int:
        """Half the budget: all that the residents will ever hold."""
        return self.sequences * layout.pages_for(self.end_tokens)


class Breath:
    """One cache, whose guests' memory goes and comes. `samples` is by phase and metric, `calls` the driver's by phase."""

    def __init__(
        self, driver: TimedDriver, cache: KVCache, residents: Residents, guests: Guests, half_bytes: int, way: Way
    ) -> None:
        self.samples: dict[str, Samples] = defaultdict(lambda: defaultdict(list))
        self.calls: dict[str, list[Counter[str]]] = defaultdict(list)
        self._driver, self._cache, self._pool = driver, cache, cache.pool
        self._residents, self._guests, self._way = residents, guests, way
        self._half_bytes = half_bytes
        self._slack_us = 0.0
        """Of what runs beside a step; known after the first calm steps."""

    def calm(self, num_steps: int) -> None:
        """Steps beside which nothing is given or taken."""
        steps = [self._step("calm", beside=self._map_ahead) for _ in range(num_steps)]
        self._slack_us = SLACK_SHARE * summarize([step.slack_us for step in steps]).p50

    def shrink(self) -> None:
        """To half the budget, until the device has the memory. Raises: WrongNumbers if it has not got what was given."""
        samples, calls, pool = self.samples["shrink"], Counter(self._driver.calls), self._pool
        created_bytes, taken_bytes, asked_us = pool.created_bytes, self._taken_bytes(), now_us()
        noise_bytes = 0 if self._cache.device.type == "cpu" else _OTHERS_BYTES
        back_us: float | None = None

        def give_back() -> None:
            nonlocal back_us
            began_us = now_us()
            self._map_ahead()
            while pool.budget_bytes > self._half_bytes:
                least = self._half_bytes if self._way is Way.AT_ONCE else pool.created_bytes - PAGE_BYTES
                with self._timed(samples, "resize"):
                    pool.resize(max(self._half_bytes, least))
                if now_us() - began_us > self._slack_us:
                    break
            arrived_bytes = taken_bytes - self._taken_bytes()
            if pool.budget_bytes == self._half_bytes and arrived_bytes >= created_bytes - pool.created_bytes - noise_bytes:
                back_us = now_us() - asked_us

        steps = 0
        while back_us is None:
            self._step("shrink", beside=give_back)
            steps += 1
        given_bytes = created_bytes - pool.created_bytes
        if given_bytes <= 0 or pool.created_bytes > self._half_bytes:
            left = f"{format_bytes(pool.created_bytes)} of {format_bytes(created_bytes)} are left"
            raise WrongNumbers(f"{left} where {format_bytes(self._half_bytes)} were wanted")
        samples["back"].append(back_us)
        samples["steps"].append(steps)
        samples["given"].append(given_bytes / MIB)
        samples["given_device"].append((taken_bytes - self._taken_bytes()) / MIB)
        self.calls["shrink"].append(self._driver.calls - calls)

    def regrow(self, prompts: SequenceOf[int]) -> None:
        """To the whole budget, until a guest for each prompt has its memory; then they end."""
        samples, calls = self.samples["regrow"], Counter(self._driver.calls)
        before, asked_us = len(samples["step"]), now_us()
        with self._timed(samples, "resize"):
            self._pool.resize(2 * self._half_bytes)
        guests: list[Guest] = []

        def admit() -> None:
            guests.append(self._guests.open(prompts[len(guests)]))
            with self._timed(samples, "grow"):
                guests[-1].sequence.grow(len(guests[-1].tokens))
            if len(guests) == 1:
                samples["first"].append(now_us() - asked_us)

        def admit_in_slack() -> None:
            began_us = now_us()
            self._map_ahead()
            while len(guests) < len(prompts):
                admit()
                if now_us() - began_us > self._slack_us:
                    break

        grown = len(samples["grow"])
        while len(guests) < len(prompts):
            if self._way is Way.AT_ONCE:
                self._step("regrow", in_front=admit, beside=self._map_ahead)
            else:
                self._step("regrow", beside=admit_in_slack)
        samples["all"].append(now_us() - asked_us)
        samples["steps"].append(len(samples["step"]) - before)
        mapped_bytes = sum(map(self._cache.layout.pages_for, prompts)) * PAGE_BYTES
        samples["speed"].append(mapped_bytes / MIB / (sum(samples["grow"][grown:]) / 1e6))
        self.calls["regrow"].append(self._driver.calls - calls)
        for guest in guests:
            guest.sequence.advance(len(guest.tokens))
        self._guests.write_and_check(guests)
        self.check()
        # Guests end and are kept; of those before nothing is, and only that memory is created.
        self._guests.forget()
        self._residents.rewind()
        self._cache.drain()
        self._pool.resize(self._pool.held_bytes)
        self._pool.resize(2 * self._half_bytes)
        self._guests.end(guests)
        self._cache.drain()

    def check(self) -> None:
        """The laws hold, and residents and parked guests have their rows. Raises: WrongNumbers."""
        self._residents.check()
        self._guests.check_parked()

    def _step(self, phase: str, **at: Callable[[], None]) -> Step:
        step = run_step([self._residents], **at)
        for name, value in (("step", step.step_us), ("stalled", step.stalled), ("late", step.late)):
            self.samples[phase][name].append(value)
        return step

    def _map_ahead(self) -> None:
        self._cache.map_ahead(self._slack_us, lookahead_tokens=self._cache.lookahead_tokens(self._slack_us))

    def _taken_bytes(self) -> int:
        """Memory taken of the device, as the device says: by all processes on a GPU, by this driver on the host."""
        free_bytes, total_bytes = self._driver.memory()
        if self._cache.device.type == "cpu":
            return os.fstat(self._driver._file.fd).st_blocks * 512
        return int(total_bytes - free_bytes)

    @contextmanager
    def _timed(self, samples: Samples, metric: str) -> Iterator[None]:
        """A sample of the whole time, and one of the driver's share."""
        driver_us, began_us = self._driver.spent_us, now_us()
        yield
        samples[metric].append(now_us() - began_us)
        samples[f"{metric}_driver"].append(self._driver.spent_us - driver_us)


def _measure_breaths(recorder: Recorder, kept: Kept, way: Way) -> None:
    settings = recorder.settings
    sizes, layout, rng = Breaths.of(settings), settings.shape.layout, np.random.default_rng(settings.seed)
    half_pages = sizes.half_pages(layout)
    # Residents, guests, and guests of the time before, parked or not yet unmapped. They are addresses only.
    slots = sizes.sequences + 2 * (2 + half_pages // sizes.fewest_pages)
    max_tokens = max(sizes.end_tokens, layout.tokens_in(sizes.most_pages))
    driver = TimedDriver(open_driver(settings.device))
    with (
        Pool(settings.device, half_pages * PAGE_BYTES, driver=driver.as_driver()) as pool,
        KVCache(layout, pool, slots=slots, max_tokens=max_tokens) as cache,
    ):
        work = open_work(cache, replace(settings, work="attention"), sizes.sequences)  # rows that are not written prove nothing
        residents = Residents(cache, work, sizes.sequences, sizes.start_tokens, sizes.end_tokens, ahead=False)
        guests = Guests(cache, settings.shape, kept, rng)
        breath = Breath(driver, cache, residents, guests, half_pages * PAGE_BYTES, way)
        for number in range(1 + sizes.repeats):
            breath.calm(sizes.calm_steps)
            if number:
                breath.shrink()
                breath.check()
            # The first guest has one page: how soon it comes is measured.
            pages = half_pages - layout.pages_for(1)
            breath.regrow([1, *draw_prompts(rng, layout, pages, sizes.fewest_pages, sizes.most_pages)])
            if not number:  # the first memory of all was never given back
                breath.samples.clear()
                breath.calls.clear()
    half, full = format_bytes(half_pages * PAGE_BYTES), format_bytes(2 * half_pages * PAGE_BYTES)
    beside = f"memory {kept.value}, {sizes.sequences} sequences decode on"
    for phase, names in {"shrink": f"shrink: {full} to {half}", "regrow": f"regrow: {half} to {full}"}.items():
        workload, samples = f"{names}, {beside}", breath.samples[phase]
        for name, (metric, unit) in _BREATH_METRICS.items():
            recorder.samples(workload, way.value, metric, unit, samples[name])
        recorder.samples(workload, way.value, "step, undisturbed", "us", breath.samples["calm"]["step"])
        for name in ("stalled", "late"):
            recorder.figure(workload, way.value, name, "steps", sum(samples[name]), len(samples[name]))
        _add_calls(recorder, workload, way.value, breath.calls[phase])


def _add_calls(recorder: Recorder, workload: str, system: str, calls: list[Counter[str]]) -> None:
    """For each call of the driver a row: how often in a phase."""
    for name in sorted(set().union(*calls)):
        recorder.samples(workload, system, f"driver calls: {name}", "calls", [each[name] for each in calls])


# handovers

_MOMENTS: Final = {"at first": 0.0, "half-way": 0.5, "at last": 1.0}
"""Of a phase, at which it is told what each cache holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handovers:
    """Two caches on one budget. The guests of a phase need all of the budget that no resident holds."""

    shapes: tuple[Shape, Shape]
    sequences: int
    """Residents of each cache."""
    phases: int
    held_steps: int
    """Steps at the end of a phase in which nothing is asked for."""
    budget_bytes: int
    start_tokens: int
    fewest_pages: int
    most_pages: int

    @classmethod
    def of(cls, settings: Settings) -> "Handovers":
        """By the device, and whether it may take minutes."""
        names = ("llama-3.1-8b", "qwen3-0.6b") if settings.on_gpu else ("wide", "smollm2-135m")
        budget_bytes = (4 * GIB if settings.quick else 16 * GIB) if settings.on_gpu else 96 * MIB
        return cls(
            shapes=(SHAPES[names[0]], SHAPES[names[1]]),
            sequences=8 if settings.on_gpu else 2,
            phases=4 if settings.quick else 10,
            held_steps=4 if settings.on_gpu else 2,
            budget_bytes=budget_bytes,
            start_tokens=256 if settings.on_gpu else 8,
            fewest_pages=16 if settings.on_gpu else 2,
            most_pages=192 if settings.on_gpu else 20,
        )

    @property
    def most_guests(self) -> int:
        """In one phase: none but the last has fewer pages than the fewest."""
        return 1 + self.budget_bytes // PAGE_BYTES // self.fewest_pages

    @property
    def end_tokens(self) -> int:
        """Of a resident at the end of a phase: at most one guest comes a step."""
        return self.start_tokens + self.most_guests + self.held_steps


@dataclass(slots=True)
class Side:
    """One of the two caches, and samples of its busy phases."""

    shape: Shape
    cache: KVCache
    residents: Residents
    guests: Guests
    samples: Samples = field(default_factory=lambda: defaultdict(list))
    calls: list[Counter[str]] = field(default_factory=list)

    @property
    def held_bytes(self) -> int:
        """Of the pool, by this cache alone."""
        stats = self.cache.stats()
        return stats.mapped_bytes + stats.pending_reclaim_bytes

    @property
    def resident_bytes(self) -> int:
        """Of these, what residents hold: it cannot be handed over."""
        stats = self.cache.stats()
        return stats.mapped_bytes - stats.parked_bytes


def _measure_handovers(recorder: Recorder, *, shared: bool) -> None:
    settings, sizes = recorder.settings, Handovers.of(recorder.settings)
    driver = TimedDriver(open_driver(settings.device))
    rng = np.random.default_rng(settings.seed)
    with ExitStack() as stack:
        sides: list[Side] = []
        pools = [
            stack.enter_context(Pool(settings.device, sizes.budget_bytes // (2 - shared), driver=driver.as_driver()))
            for _ in range(2 - shared)
        ]
        for salt, (shape, pool) in enumerate(zip(sizes.shapes, (pools[0], pools[-1]), strict=True)):
            max_tokens = max(sizes.end_tokens, shape.layout.tokens_in(sizes.most_pages))
            slots = sizes.sequences + 2 * sizes.most_guests
            cache = stack.enter_context(KVCache(shape.layout, pool, slots=slots, max_tokens=max_tokens))
            work = open_work(cache, replace(settings, work="attention", shape=shape), sizes.sequences)
            residents = Residents(cache, work, sizes.sequences, sizes.start_tokens, sizes.end_tokens, ahead=True)
            sides.append(Side(shape, cache, residents, Guests(cache, shape, Kept.SLOT, rng, salt=salt)))
        slack_us = 0.0
        for index in range(sizes.phases):
            if index == len(sides):  # until now neither had memory that could be handed over
                for side in sides:
                    side.samples.clear()
                    side.calls.clear()
            slack_us = _hand_over(sizes, driver, sides[index % 2], sides[1 - index % 2], slack_us, rng)
    system = "vmmkv, one pool" if shared else "vmmkv, a pool of half for each"
    for side, other in (sides, sides[::-1]):
        names = f"{side.shape.name} asks while {other.shape.name}'s memory is parked"
        _add_handover_rows(recorder, f"two caches: {format_bytes(sizes.budget_bytes)}, {names}", system, side, other.shape.name)


def _hand_over(
    sizes: Handovers, driver: TimedDriver, busy: Side, other: Side, slack_us: float, rng: np.random.Generator
) -> float:
    """One phase: guests of the busy side come, one a step, until no page is left that could be given up, and park.

    The next phase's slack. Raises: WrongNumbers if a guest finds no memory, or a check fails.
    """
    samples, pool, residents = busy.samples, busy.cache.pool, [busy.residents, other.residents]
    free_pages = (pool.budget_bytes - pool.used_bytes) // PAGE_BYTES
    prompts = draw_prompts(rng, busy.cache.layout, free_pages, sizes.fewest_pages, sizes.most_pages)
    guests: list[Guest] = []

    def admit() -> None:
        guests.append(guest := busy.guests.open(prompts[len(guests)]))
        driver_us, began_us = driver.spent_us, now_us()
        try:
            guest.sequence.grow(len(guest.tokens))
        except OutOfPages as error:
            raise WrongNumbers(f"a guest of {busy.shape.name} finds no memory though the sum fits: {error}") from error
        samples["grow"].append(now_us() - began_us)
        samples["grow_driver"].append(driver.spent_us - driver_us)
        guest.sequence.advance(len(guest.tokens))

    def unmap() -> None:
        """Unmap what waits for it, so that the next guest's grow need not."""
        for side in (busy, other):
            side.cache.map_ahead(slack_us / 2, lookahead_tokens=0)

    mapped_pages, asked_us, before = busy.cache.stats().mapped_pages, now_us(), len(samples["grow"])
    held, calls = [(busy.held_bytes, other.held_bytes)], Counter(driver.calls)
    for _ in prompts:
        samples["step"].append(run_step(residents, in_front=admit, beside=unmap).step_us)
        held.append((busy.held_bytes, other.held_bytes))
    grow_us = samples["grow"][before:]
    samples["first"].append(grow_us[0])
    samples["all"].append(now_us() - asked_us)
    mapped_bytes = (busy.cache.stats().mapped_pages - mapped_pages) * PAGE_BYTES
    samples["speed"].append(mapped_bytes / MIB / (sum(grow_us) / 1e6))
    busy.calls.append(driver.calls - calls)
    for moment, share in _MOMENTS.items():
        own_bytes, others_bytes = held[round(share * (len(held) - 1))]
        samples[f"held, {moment}"].append(own_bytes / MIB)
        samples[f"held by the other, {moment}"].append(others_bytes / MIB)
    samples["most"].append(100 * busy.held_bytes / sizes.budget_bytes)
    samples["possible"].append(100 * (1 - other.resident_bytes / sizes.budget_bytes))

    steps = [run_step(residents, beside=unmap) for _ in range(sizes.held_steps)]
    samples["undisturbed"].extend(step.step_us for step in steps)
    busy.guests.write_and_check(guests)
    for side in (busy, other):
        side.residents.check()
        side.guests.check_parked()
    busy.guests.end(guests)
    for each in residents:
        each.rewind()
        each.check()
    return SLACK_SHARE * summarize([step.slack_us for step in steps]).p50


def _add_handover_rows(recorder: Recorder, workload: str, system: str, side: Side, other: str) -> None:
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
        recorder.samples(workload, system, metric, unit, side.samples[name])
    possible = summarize(side.samples["possible"]).p50
    recorder.samples(workload, system, "most of the budget", "%", side.samples["most"], possible)
    _add_calls(recorder, workload, system, side.calls)
