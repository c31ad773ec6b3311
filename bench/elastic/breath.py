"""A pool that shrinks to half its budget and grows again, while sequences decode on.

full ── shrink: resize to half ──> half ── regrow: resize to all, guests come ──> full ── guests end, and are kept ─┐
  └──────────────────────────────────────────────────────────────────────────────────────────────────────────────────┘
"""

import enum
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.elastic.guests import Guest, Guests
from bench.elastic.running import Running, Step, check_laws, run_step
from bench.elastic.sizes import SLACK_SHARE
from bench.timed_driver import TimedDriver
from bench.timing import WrongNumbers, now_us, summarize
from vmmkv import KVCache, Pool
from vmmkv.driver import Driver
from vmmkv.driver.host import HostDriver
from vmmkv.units import MIB, PAGE_BYTES, format_bytes

_OTHERS_BYTES = 64 * MIB
"""By how much a GPU's free memory can differ for reasons that are not ours; in tests/gpu it was never more."""


class Way(enum.Enum):
    """When memory is given back and taken again."""

    AT_ONCE = "vmmkv, at once"
    """One resize; and each guest's prompt grows in front of a step, one a step."""
    IN_SLACK = "vmmkv, in slack"
    """While the device works: a resize by a page after the other; and all guests' prompts by `map_ahead`."""


class Phase:
    """What one kind of phase took, over all breaths: `samples` by metric; `calls` of the driver by name, those of the sequences
    that decode on among them."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.calls: list[Counter[str]] = []

    def add(self, step: Step) -> None:
        """One more step."""
        self.samples["step"].append(step.step_us)
        self.samples["stalled"].append(step.stalled)
        self.samples["late"].append(step.late)


class _Arrivals:
    """Guests for some prompts, and how far they have come."""

    def __init__(self, opener: Guests, prompts: Sequence[int]) -> None:
        self.guests: list[Guest] = []
        self.first_us: float | None = None
        """When the first of them was seen to have a page."""
        self.spent_us = 0.0
        """On mapping."""
        self._opener, self._prompts = opener, prompts

    @property
    def are_in(self) -> bool:
        """Has everyone memory for its whole prompt?"""
        return len(self.guests) == len(self._prompts) and all(guest.is_in for guest in self.guests)

    @property
    def mapped_bytes(self) -> int:
        """Under all of them together."""
        layout = self._opener.cache.layout
        return sum(layout.pages_for(len(guest.tokens)) for guest in self.guests) * PAGE_BYTES

    def grow_next(self) -> None:
        """One more, with its memory."""
        self.guests.append(self._opener.open(self._prompts[len(self.guests)]))
        self.guests[-1].sequence.grow(len(self.guests[-1].tokens))

    def grow_within(self, budget_us: float) -> None:
        """Open all of them, and map some pages for those that lack memory, until the time is spent."""
        if not self.guests:
            self.guests = [self._opener.open(num_tokens) for num_tokens in self._prompts]
        began_us = now_us()
        for guest in self.guests:
            while guest.sequence.limit < len(guest.tokens):
                if now_us() - began_us > budget_us:
                    return
                guest.sequence.grow(min(len(guest.tokens), guest.sequence.limit + 1))

    def count(self, spent_us: float) -> None:
        """Somebody may have got memory, in that time."""
        self.spent_us += spent_us
        if self.first_us is None and any(guest.sequence.limit for guest in self.guests):
            self.first_us = now_us()


class Breath:
    """One cache, whose guests' memory goes and comes. `phases` has what was measured: calm, shrink and regrow."""

    def __init__(
        self,
        driver: TimedDriver,
        device_driver: Driver,
        cache: KVCache,
        running: Running,
        guests: Guests,
        half_bytes: int,
        way: Way,
    ) -> None:
        self.driver, self.cache, self.running, self.guests, self.way = driver, cache, running, guests, way
        self.pool: Pool = cache.pool
        self.half_bytes, self.full_bytes = half_bytes, 2 * half_bytes
        self.phases: dict[str, Phase] = defaultdict(Phase)
        self._device_driver = device_driver
        self._budget_us = 0.0
        """Of what runs beside a step; known after the first calm steps."""

    def calm(self, num_steps: int) -> None:
        """Steps beside which nothing is given or taken."""
        slack_us = []
        for _ in range(num_steps):
            step = run_step([self.running], beside=self._pump)
            self.phases["calm"].add(step)
            slack_us.append(step.slack_us)
        self._budget_us = SLACK_SHARE * summarize(slack_us).p50

    def shrink(self) -> None:
        """To half the budget, until the device has the memory. Raises WrongNumbers if it has not got what was given."""
        phase, calls = self.phases["shrink"], Counter(self.driver.calls)
        created_bytes, taken_bytes, asked_us = self.pool.created_bytes, self._taken_bytes(), now_us()
        back_us: float | None = None

        def give_back() -> None:
            nonlocal back_us
            began_us = now_us()
            self._pump()
            while self.pool.budget_bytes > self.half_bytes:
                least = self.half_bytes if self.way is Way.AT_ONCE else self.pool.created_bytes - PAGE_BYTES
                with self._timed(phase, "resize"):
                    self.pool.resize(max(self.half_bytes, least))
                if now_us() - began_us > self._budget_us:
                    break
            if self.pool.budget_bytes == self.half_bytes and self._is_back(created_bytes, taken_bytes):
                back_us = now_us() - asked_us

        steps = 0
        while back_us is None:
            phase.add(run_step([self.running], beside=give_back))
            steps += 1
        given_bytes = created_bytes - self.pool.created_bytes
        if given_bytes <= 0 or self.pool.created_bytes > self.half_bytes:
            raise WrongNumbers(
                f"{format_bytes(created_bytes)} were created, {format_bytes(self.pool.created_bytes)} are, and "
                f"{format_bytes(self.half_bytes)} were to be left"
            )
        phase.samples["back"].append(back_us)
        phase.samples["steps"].append(steps)
        phase.samples["given"].append(given_bytes / MIB)
        phase.samples["given_device"].append((taken_bytes - self._taken_bytes()) / MIB)
        phase.calls.append(self.driver.calls - calls)

    def regrow(self, prompts: Sequence[int]) -> list[Guest]:
        """To the whole budget, until a guest for each prompt has its memory."""
        phase, calls = self.phases["regrow"], Counter(self.driver.calls)
        before, asked_us = len(phase.samples["step"]), now_us()
        with self._timed(phase, "resize"):
            self.pool.resize(self.full_bytes)
        arrivals = _Arrivals(self.guests, prompts)

        def in_front() -> None:
            with self._timed(phase, "grow"):
                arrivals.grow_next()
            arrivals.count(phase.samples["grow"][-1])

        def beside() -> None:
            with self._timed(phase, "pump"):
                self._pump()
                arrivals.grow_within(self._budget_us)
            arrivals.count(phase.samples["pump"][-1])

        while not arrivals.are_in:
            if self.way is Way.AT_ONCE:
                phase.add(run_step([self.running], in_front=in_front, beside=self._pump))
            else:
                phase.add(run_step([self.running], beside=beside))
        assert arrivals.first_us is not None, "all guests are in, and the first was never seen"
        phase.samples["first"].append(arrivals.first_us - asked_us)
        phase.samples["all"].append(now_us() - asked_us)
        phase.samples["steps"].append(len(phase.samples["step"]) - before)
        phase.samples["speed"].append(arrivals.mapped_bytes / MIB / (arrivals.spent_us / 1e6))
        phase.calls.append(self.driver.calls - calls)
        for guest in arrivals.guests:
            guest.sequence.advance(len(guest.tokens))
        return arrivals.guests

    def check(self) -> None:
        """The laws hold, and running sequences and parked guests have their rows. Raises WrongNumbers."""
        check_laws(self.cache)
        self.running.check()
        self.guests.check_parked()

    def begin_again(self, guests: Sequence[Guest]) -> None:
        """Guests end and are kept, older ones are forgotten, whoever decodes is at its start; only that is created."""
        self.guests.forget()
        self.running.rewind()
        self.cache.drain()
        self.pool.resize(self.pool.held_bytes)
        self.pool.resize(self.full_bytes)
        self.guests.end(guests)
        self.cache.drain()

    def _pump(self) -> None:
        self.cache.map_ahead(self._budget_us, lookahead_tokens=self.cache.lookahead_tokens(self._budget_us))

    def _taken_bytes(self) -> int:
        """What is taken of the device, as the device says: by everybody on a GPU, by this driver on the host."""
        if isinstance(self._device_driver, HostDriver):
            return os.fstat(self._device_driver._file.fd).st_blocks * 512
        free_bytes, total_bytes = self._device_driver.memory()
        return total_bytes - free_bytes

    def _is_back(self, created_bytes: int, taken_bytes: int) -> bool:
        wanted_bytes = created_bytes - self.pool.created_bytes
        noise_bytes = 0 if self.cache.device.type == "cpu" else _OTHERS_BYTES
        return taken_bytes - self._taken_bytes() >= wanted_bytes - noise_bytes

    @contextmanager
    def _timed(self, phase: Phase, metric: str) -> Iterator[None]:
        """A sample of what takes how long, and one of how much of that is the driver's."""
        driver_us, began_us = self.driver.spent_us, now_us()
        yield
        phase.samples[metric].append(now_us() - began_us)
        phase.samples[f"{metric}_driver"].append(self.driver.spent_us - driver_us)
