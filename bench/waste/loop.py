"""Continuous batching with nothing in it but memory, the same for every system: who comes, who gets a row, who goes.

    room for the next rows | launch ── newcomers while they fit ── pump | sample | who has ended goes

A step takes as long as reading the weights and all rows at 4.5 TB/s (`bench.step_work`). Requests never run out. Whoever comes
has its prompt computed in one step, and then gets one row in each; nobody knows when it will end. A newcomer is let in while it
leaves a hundredth of the budget free. If a running sequence finds no memory the newest gives way: it goes to the head of the
queue, and is computed again with what it had answered.
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from bench.settings import Shape
from bench.step_work import HBM_BYTES_PER_S
from bench.timing import WrongNumbers
from bench.waste.memories import Held, Indices, Memory
from bench.waste.sizes import WATERMARK, Sizes
from bench.workloads import Workload
from vmmkv.errors import OutOfPages

_CHECKED_SHARE: Final = 0.005
"""Of all steps, drawn at random: in these everything is recounted from scratch."""


class Request(NamedTuple):
    """What is to be computed of one: so many tokens in one step, which gives the first of the answer's."""

    num_prompt: int
    num_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One moment, when the device works and what could be done meanwhile has been done."""

    num_sequences: int
    needed_bytes: int
    """By the rows that are written."""
    laid_bytes: int
    """What these take in whole pages, blocks or slots, without anything ahead."""
    held: Held
    lookahead_tokens: int
    """With which memory is mapped ahead: what vmmkv chooses, 0 of systems that do not."""

    @property
    def wasted_bytes(self) -> int:
        """Held for running sequences, tables and what is mapped ahead too, and not by a row."""
        return self.held.rows_bytes + self.held.tables_bytes - self.needed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run has shown."""

    system: str
    samples: tuple[Sample, ...]
    unfilled_bytes: float
    """A sequence's part of `laid_bytes` that no row can be blamed for, on average (`Memory.unfilled_bytes`)."""
    num_ended: int
    """Sequences, in the steps that were measured."""
    num_gave_way: int


class Loop:
    """Runs steps of one system under one workload."""

    def __init__(self, memory: Memory, workload: Workload, shape: Shape, budget_bytes: int, *, seed: int) -> None:
        self.memory = memory
        self.num_ended = self.num_gave_way = 0
        self._shape = shape
        self._row_bytes = shape.layout.row_bytes
        self._spare_bytes = int(WATERMARK * budget_bytes)
        self._coming: Iterator[Request] = itertools.cycle(Request(len(ask.prompt), ask.num_out) for ask in workload.asks)
        self._first: deque[Request] = deque()
        """Before all others: those who gave way, and who was refused."""
        self._rng = np.random.default_rng(seed)
        # By slot. A sequence runs if it has rows.
        self._rows = np.zeros(1 + memory.num_slots, np.int64)
        self._left = np.zeros(1 + memory.num_slots, np.int64)
        """Tokens still to come."""
        self._joined = np.zeros(1 + memory.num_slots, np.int64)
        """The order in which they came."""
        self._clock = itertools.count(1)

    @property
    def running(self) -> Indices:
        """The slots of sequences that run."""
        return np.flatnonzero(self._rows)

    def step(self) -> None:
        """One step. Raises: WrongNumbers; OutOfPages if a sequence does not fit alone."""
        self._make_room()
        slots = self.running
        self.memory.launch(slots)
        self._rows[slots] += 1
        self._left[slots] -= 1
        self._let_in()
        self.memory.idle((self._shape.weight_bytes + self._needed_bytes()) / HBM_BYTES_PER_S * 1e6)
        if self._rng.random() < _CHECKED_SHARE:
            self.check()

    def sample(self) -> Sample:
        """Behind a step. Raises: WrongNumbers if less is held than the rows need."""
        slots = self.running
        sample = Sample(
            num_sequences=len(slots),
            needed_bytes=self._needed_bytes(),
            laid_bytes=self.memory.laid_bytes(self._rows[slots]),
            held=self.memory.held(),
            lookahead_tokens=self.memory.lookahead_tokens,
        )
        if not sample.needed_bytes <= sample.laid_bytes <= sample.held.rows_bytes:
            raise WrongNumbers(f"{self.memory.name} holds {sample.held.rows_bytes} bytes, and {sample.laid_bytes} are laid")
        return sample

    def end_answered(self) -> None:
        """Whoever has all of its answer goes."""
        slots = self.running
        for slot in slots[self._left[slots] == 0].tolist():
            self._end(slot)
            self.num_ended += 1

    def check(self) -> None:
        """Recount. Raises: WrongNumbers, AssertionError."""
        slots = self.running
        self.memory.check(slots, self._rows[slots])

    def close(self) -> None:
        """Check, end everybody, check again that nothing is held."""
        self.check()
        for slot in self.running.tolist():
            self._end(slot)
        self.check()
        self.memory.close()

    def _needed_bytes(self) -> int:
        return int(self._rows.sum()) * self._row_bytes

    def _make_room(self) -> None:
        for slot in self.memory.lacking(self.running).tolist():
            while self._rows[slot]:
                try:
                    self.memory.reserve(slot)
                    break
                except OutOfPages:
                    if len(self.running) == 1:
                        raise
                    self._give_way()

    def _give_way(self) -> None:
        """The newest goes, and comes back first. What it was about to write is a token of its prompt then."""
        slots = self.running
        newest = int(slots[self._joined[slots].argmax()])
        self._first.appendleft(Request(int(self._rows[newest]) + 1, int(self._left[newest])))
        self._end(newest)
        self.num_gave_way += 1

    def _let_in(self) -> None:
        while True:
            request = self._first.popleft() if self._first else next(self._coming)
            if not self.memory.fits(request.num_prompt, self._spare_bytes):
                self._first.appendleft(request)
                return
            slot = self.memory.begin(request.num_prompt)
            self._rows[slot], self._left[slot] = request.num_prompt, request.num_out - 1
            self._joined[slot] = next(self._clock)

    def _end(self, slot: int) -> None:
        self.memory.end(slot)
        self._rows[slot] = self._left[slot] = 0


def simulate(memory: Memory, workload: Workload, shape: Shape, sizes: Sizes, *, seed: int) -> Outcome:
    """Steps until sequences come and go at all times, then those that are measured. The memory is closed whatever happens.

    Raises: WrongNumbers, AssertionError if anything is miscounted.
    """
    loop = Loop(memory, workload, shape, sizes.budget_bytes, seed=seed)
    try:
        samples = []
        for number in range(-sizes.warm_steps, sizes.steps):
            if not number:
                loop.num_ended = loop.num_gave_way = 0
            loop.step()
            if number >= 0 and not number % sizes.every:
                samples.append(loop.sample())
            loop.end_answered()
        outcome = Outcome(
            system=memory.name,
            samples=tuple(samples),
            unfilled_bytes=memory.unfilled_bytes,
            num_ended=loop.num_ended,
            num_gave_way=loop.num_gave_way,
        )
    except BaseException:
        with contextlib.suppress(WrongNumbers):  # of course something is held still
            memory.close()
        raise
    loop.close()
    return outcome
