"""An engine's decode loop with nothing in it but memory: who may write a row, who must grow, who ends, who comes.

    ┌ critical: the device idles ──────────────────┐┌ slack: the device works ────────────────────┐
    who ended | who has no row | grow them | launch || advance | turn over | pump | let newcomers in | wait
                                 └ a stall: the step waits for driver calls

A newcomer's prompt is taken as written when its memory is there: prefill is no part of this.
"""

import enum
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.step_work import Indices, StepWork
from bench.timed_driver import TimedDriver
from bench.timing import now_us
from vmmkv import KVCache, Sequence


class Mode(enum.Enum):
    """How memory comes to a sequence, and what becomes of it at its end."""

    STATIC = "static"
    """Every slot is mapped to its end in advance, and stays so: what the others are held against."""
    OFF = "off"
    """Mapped in the foreground, when a row is missing."""
    SLACK = "slack"
    """`map_ahead` on the same thread while the step's work is queued."""
    ADOPTED = "adopted"
    """As slack, and who ends leaves its slot mapped, to be taken by who comes."""

    @property
    def parks(self) -> bool:
        """Are slots handed on with what is mapped there?"""
        return self in (Mode.STATIC, Mode.ADOPTED)

    @property
    def pumps(self) -> bool:
        """Does the loop pump?"""
        return self in (Mode.SLACK, Mode.ADOPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A sequence to come: it joins the batch with `prompt_tokens` written and leaves it with `end_tokens`."""

    prompt_tokens: int
    end_tokens: int


class DecodeLoop:
    """Runs steps and keeps, for each, what every part of it took. `samples` has a list for each metric."""

    def __init__(
        self, cache: KVCache, driver: TimedDriver, work: StepWork, mode: Mode, requests: Iterator[Request], num_rows: int
    ) -> None:
        self.cache, self.driver, self.work, self.mode = cache, driver, work, mode
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.pump_budget_us = 0.0
        self._requests = requests
        self._sequences: dict[int, Sequence] = {}  # by row
        self._joined: dict[int, int] = {}  # by row, the length with which it began: what lies behind was decoded here
        self._waiting: dict[int, tuple[Sequence, Request, int]] = {}  # by row: newcomers without memory, and since which step
        self._ended: list[int] = []
        self._step = 0
        # One entry a row, so that a step is a few numpy calls whatever the number of sequences.
        self._slots_B = np.full(num_rows, -1, dtype=np.int64)
        self._ends_B = np.zeros(num_rows, dtype=np.int64)

    def begin(self, request: Request, row: int, length: int) -> None:
        """A sequence that has run for a while: `length` tokens, with memory for the next."""
        sequence = self.cache.open(max_tokens=request.end_tokens)
        sequence.grow(min(length + 1, request.end_tokens))
        self._join(row, sequence, request, length)

    def step(self) -> None:
        """One decode step of all rows."""
        began_us = now_us()
        rows = np.flatnonzero(self._slots_B >= 0)
        slots = self._slots_B[rows]
        lengths = self.cache.lengths[slots]
        short = rows[lengths >= self.cache.limits[slots]]
        lengths_B = np.zeros_like(self._slots_B)
        lengths_B[rows] = lengths
        decided_us = now_us()
        stalled = self._grow(short)
        grown_us = now_us()
        self.work.launch(self._slots_B, lengths_B)
        launched_us = now_us()

        self.cache.advance(slots)
        advanced_us = now_us()
        if self._ended:
            self._turn_over()
            self.samples["turnover"].append(now_us() - advanced_us)
        slack_us = now_us()
        self._pump()
        if self._waiting and self.mode is not Mode.OFF:
            self._let_in()
        late = self.work.done()
        self.work.wait()

        waited_us = now_us()
        over = rows[self.cache.lengths[slots] >= self._ends_B[rows]]
        self._ended = over.tolist()
        self._slots_B[over] = -1
        ended_us = now_us()
        self._step += 1
        self.samples["bookkeeping"].append(decided_us - began_us + advanced_us - launched_us + ended_us - waited_us)
        self.samples["slack"].append(waited_us - slack_us)
        self.samples["launch"].append(launched_us - grown_us)
        self.samples["stalled"].append(stalled)
        if stalled:
            self.samples["stall"].append(grown_us - decided_us)
        self.samples["late"].append(late)
        self.samples["step"].append(ended_us - began_us)

    def check(self) -> None:
        """The library's laws hold, and every row that a running sequence decoded is in memory. Raises WrongNumbers."""
        self.cache.check()
        for row in np.flatnonzero(self._slots_B >= 0).tolist():
            sequence = self._sequences[row]
            self.work.check(sequence.slot, self._joined[row], sequence.length)

    def _grow(self, short: Indices) -> bool:
        """In the foreground, whoever has no row to write, and newcomers if nothing is mapped behind the scenes."""
        for row in short.tolist():
            sequence = self._sequences[row]
            sequence.grow(sequence.length + 1)
        stalled = len(short) > 0
        if self._waiting and self.mode is Mode.OFF:
            for sequence, request, _ in self._waiting.values():
                sequence.grow(request.prompt_tokens + 1)
            stalled = True
            self._let_in()
        return stalled

    def _turn_over(self) -> None:
        for row in self._ended:
            sequence = self._sequences.pop(row)
            if self.mode.parks:
                sequence.park(0)
            else:
                sequence.close()
            request = next(self._requests)
            newcomer = self.cache.open(max_tokens=request.end_tokens)
            if self.mode is not Mode.OFF:
                newcomer.grow(request.prompt_tokens + 1)
            self._waiting[row] = newcomer, request, self._step
        self._ended = []

    def _pump(self) -> None:
        if not self.mode.pumps:
            return
        began_us, before_us = now_us(), self.driver.spent_us
        pages = self.cache.map_ahead(self.pump_budget_us, lookahead_tokens=self.cache.lookahead_tokens(self.pump_budget_us))
        total_us, driver_us = now_us() - began_us, self.driver.spent_us - before_us
        self.samples["pump"].append(total_us)
        self.samples["pump_python"].append(total_us - driver_us)
        self.samples["pumped"].append(pages)

    def _let_in(self) -> None:
        for row, (sequence, request, since) in list(self._waiting.items()):
            if sequence.limit > request.prompt_tokens:
                del self._waiting[row]
                sequence.advance(request.prompt_tokens)
                self._join(row, sequence, request, None)
                self.samples["admission"].append(self._step - since)

    def _join(self, row: int, sequence: Sequence, request: Request, length: int | None) -> None:
        if length is not None:
            sequence.advance(length)
        self._sequences[row] = sequence
        self._joined[row] = sequence.length
        self._slots_B[row] = sequence.slot
        self._ends_B[row] = request.end_tokens
