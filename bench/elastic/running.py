"""Sequences that decode on, whatever goes on beside them, and the step in which they do.

┌ critical: the device idles ──────────────┐┌ slack: the device works ───┐
who has no row: grow | what waits in front | launch | what runs beside it | wait
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.step_work import StepWork
from bench.timing import WrongNumbers, now_us
from vmmkv import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step took."""

    step_us: float
    slack_us: float
    """From the launch until the device was done, or the host came to wait for it."""
    stalled: bool
    """Did a running sequence have no row, and was memory mapped for it in front of the launch?"""
    late: bool
    """Was the device done before the host came to wait for it?"""


class Running:
    """Sequences of one cache that decode from `start_tokens` on, at most to `end_tokens`, and are taken back to the start.

    `ahead`: all that they will ever need is mapped at once, so that what they hold is a constant. Their rows are what the
    work appends, and checked; prompts are taken as written.
    """

    def __init__(
        self, cache: KVCache, work: StepWork, num_sequences: int, start_tokens: int, end_tokens: int, *, ahead: bool
    ) -> None:
        self.cache, self.work = cache, work
        self._end_tokens, self._ahead = end_tokens, ahead
        self._sequences = [cache.open(max_tokens=end_tokens) for _ in range(num_sequences)]
        # Not all of one length, or they would cross their pages together.
        self._starts = [start_tokens - index * start_tokens // (2 * num_sequences) for index in range(num_sequences)]
        for sequence, start in zip(self._sequences, self._starts, strict=True):
            sequence.grow(end_tokens if ahead else start + 1)
            sequence.advance(start)
        self._slots_B = np.array([sequence.slot for sequence in self._sequences], dtype=np.int64)
        cache.pool.driver.synchronize()

    def make_room(self) -> bool:
        """Memory for whoever has no row to write, in the foreground; did anybody lack it?"""
        if int(self.cache.lengths[self._slots_B].max()) >= self._end_tokens:
            raise WrongNumbers(
                f"sequences have decoded to their end, {self._end_tokens} tokens, and memory that was given back or asked for "
                "has not arrived yet"
            )
        short = [sequence for sequence in self._sequences if sequence.length >= sequence.limit]
        for sequence in short:
            sequence.grow(sequence.length + 1)
        return bool(short)

    def launch(self) -> None:
        """One decode step of all of them."""
        self.work.launch(self._slots_B, self.cache.lengths[self._slots_B])
        self.cache.advance(self._slots_B)

    def rewind(self) -> None:
        """All at their starts again. What they do not need there is given up, unless it is to be mapped ahead."""
        for sequence, start in zip(self._sequences, self._starts, strict=True):
            sequence.truncate(start)
            if self._ahead:
                sequence.grow(self._end_tokens)

    def check(self) -> None:
        """Is every row that was decoded since the start what was appended? Raises WrongNumbers."""
        for sequence, start in zip(self._sequences, self._starts, strict=True):
            self.work.check(sequence.slot, start, sequence.length)


def nothing() -> None:
    """What runs beside a step, or in front of it, when nothing does."""


def run_step(
    runners: Sequence[Running], *, in_front: Callable[[], None] = nothing, beside: Callable[[], None] = nothing
) -> Step:
    """One step of all runners: `in_front` of its launch the device idles, `beside` is called while it works."""
    began_us = now_us()
    stalled = [runner.make_room() for runner in runners]
    in_front()
    for runner in runners:
        runner.launch()
    launched_us = now_us()
    beside()
    late = all(runner.work.done() for runner in runners)
    for runner in runners:
        runner.work.wait()
    ended_us = now_us()
    return Step(step_us=ended_us - began_us, slack_us=ended_us - launched_us, stalled=any(stalled), late=late)


def check_laws(*caches: KVCache) -> None:
    """Recount the laws of caches and their pools. Raises WrongNumbers for one that is broken."""
    for cache in caches:
        try:
            cache.check()
        except AssertionError as error:
            raise WrongNumbers(f"a law is broken: {error}") from error
