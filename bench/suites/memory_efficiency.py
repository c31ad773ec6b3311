"""How much of the memory that is held holds no row, and how many sequences fit: vmmkv, blocks under a table, static slots.

Continuous batching without a model. The caches are the real ones; vmmkv's driver has addresses and no memory.

    rows for the next token | all sequences advance | newcomers while they fit | map ahead | sample | ended sequences go

A step takes as long as reading the weights and all rows at 4.5 TB/s. Requests never run out. A newcomer's prompt is computed in
one step, then it gets one row in each; how long it will be is not known. It is admitted while it leaves a hundredth of the
budget free, as in vLLM. If a running sequence finds no memory the newest is preempted: it goes to the head of the queue, and is
computed again with its answer so far. No two prompts begin alike. All figures are counts: of the same seed they are the same.
"""

import itertools
from collections import deque
from dataclasses import dataclass
from math import gcd
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bench import workloads
from bench.baselines.paged import PagedCache
from bench.figures import NAMED, PAGED, Drawing, Question
from bench.harness import HBM_BYTES_PER_S, SHAPES, Recorder, Settings, Shape, WrongNumbers
from bench.workloads import Workload
from vmmkv import KVCache, KVLayout, Pool
from vmmkv.errors import OutOfPages
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import GIB, MIB, PAGE_BYTES, ceil_div, format_bytes

QUESTIONS: Final = tuple(
    Question(text, f"{metric}, averaged", other)
    for metric, text in (("waste", "Memory that holds no row"), ("admitted sequences", "Sequences that fit"))
    for other in (PAGED, "static 4096")
)
FIGURES: Final = (
    Drawing("waste", "Memory held for running sequences that is no row", ("waste",), NAMED),
    Drawing("admitted", "Sequences that run at once in the same memory", ("admitted sequences",), NAMED),
)

MAX_TOKENS: Final = 4096
"""Of a sequence, prompt and answer: the rows of a static slot."""
WATERMARK: Final = 0.01
"""The share of the budget that a newcomer leaves free, for sequences that grow."""
SLACK_SHARE: Final = 0.5
"""The share of a step in which the engine maps ahead."""
PAGE_US: Final = 75.0
"""What mapping a page costs on an H200, with the Python (docs/performance.md): it decides how far ahead vmmkv maps."""
WASTE: Final = "waste, averaged"
ADMITTED: Final = "admitted sequences, averaged"

_VOCABULARY: Final = 32_000
_MODELS: Final = ("llama-3.1-8b", "qwen3-0.6b")
_WORKLOADS: Final = (workloads.uniform, workloads.chat, workloads.long_documents, workloads.skewed, workloads.ragged)
Rows = npt.NDArray[np.int64]

_CHECKED_SHARE: Final = 0.005
"""Of all steps, drawn at random: in these everything is recounted."""


@dataclass(frozen=True, slots=True)
class OccupancySizes:
    """`slots` are more than ever fill the budget. `warm_steps` pass until sequences come and go at all times."""

    budget_bytes: int
    slots: int
    asks: int = 1024
    warm_steps: int = 1000
    steps: int = 1000
    every: int = 8
    """Steps from one sample to the next."""

    @classmethod
    def of(cls, settings: Settings) -> "OccupancySizes":
        """The whole suite's, or `--quick`'s."""
        if settings.quick:
            return cls(3 * GIB, 512, asks=64, warm_steps=30, steps=60, every=4)
        return cls(40 * GIB, 4096)


def run(recorder: Recorder) -> None:
    """Every model under each workload, by each system."""
    settings, sizes = recorder.settings, OccupancySizes.of(recorder.settings)
    # A CPU's usual shape is no model: here it stands for none having been named.
    named = not settings.shapes and settings.shape.name != "wide"
    shapes = (settings.shape,) if named else tuple(SHAPES[name] for name in _MODELS)
    common: Any = {"seed": settings.seed, "vocabulary": _VOCABULARY, "count": sizes.asks, "max_tokens": MAX_TOKENS}
    cases = [(shape, make(**common), system) for shape in shapes for make in _WORKLOADS for system in SYSTEMS]
    for shape, workload, system in recorder.track(cases, lambda case: f"{case[0].name} {case[1].name}"):
        name = f"{shape.name} {workload.name}: {workload.text}, {format_bytes(sizes.budget_bytes)}"
        with recorder.guarded(name):
            simulation = Simulation(CountedSystem(system, shape, sizes), workload, shape, sizes, settings.seed)
            simulation.run()
            _add_rows(recorder, name, sizes.budget_bytes, simulation)


# systems

_COUNTED: Final = KVLayout.uniform(layers=1, kv_heads=1, head_dim=1, dtype=torch.float16)
"""Rows of 4 bytes: baselines take all memory at once, and here nothing is written to it."""
_CPU: Final = torch.device("cpu")


class CountedSystem:
    """One of SYSTEMS: a cache of a fixed budget, and its arithmetic.

    `unit_rows`: of its smallest piece of memory, a page, a block or a slot. `unfilled_rows`: those that are free, on average,
    in a sequence's last piece; 0 for static slots, where they would be all of the waste. `table_bytes`: of a sequence's block
    table. A baseline's rows have fewer bytes than they stand for: `scale` times.
    """

    def __init__(self, name: str, shape: Shape, sizes: OccupancySizes) -> None:
        self.name: Final = name
        self.row_bytes = row_bytes = shape.layout.row_bytes
        self.cache: Any
        """As `vmmkv.KVCache`."""
        self.table_bytes = 0
        if name == SYSTEMS[0]:
            driver = FakeDriver(memory_bytes=sizes.budget_bytes + 16 * MIB)  # the null page is beyond the budget
            pool = Pool("cpu", sizes.budget_bytes, driver=driver)
            self.cache = KVCache(shape.layout, pool, slots=sizes.slots, max_tokens=MAX_TOKENS)
            self.unit_rows = PAGE_BYTES / row_bytes
            # What lies behind the last row is a multiple of what rows and pages have in common, each as likely.
            self.unfilled_rows = (PAGE_BYTES - gcd(PAGE_BYTES, row_bytes)) / 2 / row_bytes
        else:
            block_rows = _BLOCKS[name]
            num_blocks = sizes.budget_bytes // (block_rows * row_bytes)
            self.cache = PagedCache(
                _COUNTED, _CPU, num_blocks=num_blocks, block_rows=block_rows, slots=sizes.slots, max_tokens=MAX_TOKENS
            )
            is_static = block_rows == MAX_TOKENS
            self.unit_rows, self.unfilled_rows = float(block_rows), 0.0 if is_static else (block_rows - 1) / 2
            self.table_bytes = 0 if is_static else 4 * ceil_div(MAX_TOKENS, block_rows)
        self.scale: Final = row_bytes / float(self.cache.layout.row_bytes)

    def laid_bytes(self, rows: Rows) -> float:
        """What sequences of so many rows hold if nothing is mapped ahead: by arithmetic, not by the allocator."""
        return float(np.ceil(rows / self.unit_rows).sum() * self.unit_rows * self.row_bytes)

    def close(self) -> None:
        """Raises: WrongNumbers if vmmkv's pool holds anything for no sequence."""
        self.cache.close()
        if self.name == "vmmkv":
            pool = self.cache.pool
            used_bytes = pool.used_bytes
            pool.close()
            if used_bytes or pool.created_bytes:
                raise WrongNumbers(f"vmmkv: {used_bytes} bytes were used by no sequence, {pool.created_bytes} are left")


_BLOCKS: Final = {"paged 16": 16, "paged 128": 128, f"static {MAX_TOKENS}": MAX_TOKENS}
"""Rows of a block. A static slot counts as a block of all rows, without a table."""
SYSTEMS: Final = ("vmmkv", *_BLOCKS)


# the simulation


class Demand(NamedTuple):
    """What is to be computed: so many tokens in one step, which gives the first of `num_out`."""

    num_prompt: int
    num_out: int


class Occupied(NamedTuple):
    """One moment, in bytes: of rows, of whole pieces of memory under them, of all that is held for running sequences."""

    num_sequences: int
    needed_bytes: float
    laid_bytes: float
    held_bytes: float
    tables_bytes: float


class Simulation:
    """Steps of one system under one workload."""

    def __init__(self, system: CountedSystem, workload: Workload, shape: Shape, sizes: OccupancySizes, seed: int) -> None:
        self.samples: list[Occupied] = []
        self.system: Final = system
        self._cache, self._sizes, self._weight_bytes = system.cache, sizes, shape.weight_bytes
        # Static slots do not grow.
        self._most_bytes = sizes.budget_bytes * (1 - WATERMARK if system.unfilled_rows else 1.0)
        self._demands = itertools.cycle(Demand(len(ask.prompt), ask.num_out) for ask in workload.asks)
        self._first: deque[Demand] = deque()
        """Before all others: preempted ones, and the one that did not fit."""
        self._rng = np.random.default_rng(seed)
        self._sequences: dict[int, Any] = {}
        """By slot, in the order of their coming."""
        self._left: dict[int, int] = {}
        """By slot, tokens still to come."""

    def run(self) -> None:
        """Until sequences come and go at all times, then `steps` that are measured. Raises: WrongNumbers, AssertionError."""
        for number in range(-self._sizes.warm_steps, self._sizes.steps):
            self._step()
            if number >= 0 and not number % self._sizes.every:
                self.samples.append(self._sample())
            for slot in [slot for slot, left in self._left.items() if not left]:
                self._end(slot)
        for slot in list(self._sequences):
            self._end(slot)
        self._cache.check()
        self.system.close()

    def _step(self) -> None:
        """Raises: OutOfPages if a sequence does not fit alone; AssertionError if a law is broken."""
        cache, slots = self._cache, self._slots()
        for slot in slots[cache.lengths[slots] >= cache.limits[slots]].tolist():
            while slot in self._sequences:
                try:
                    self._sequences[slot].grow(self._sequences[slot].length + 1)
                    break
                except OutOfPages:
                    if len(self._sequences) == 1:
                        raise
                    self._preempt()
        cache.advance(self._slots())
        for slot in self._sequences:
            self._left[slot] -= 1
        self._admit()
        step_us = (self._weight_bytes + self._needed_bytes()) / HBM_BYTES_PER_S * 1e6
        # As KVCache.lookahead_tokens, which measures what mapping a page costs over this driver. Blocks cost nothing to get.
        page_us = PAGE_US if self.system.name == "vmmkv" else 0.0
        lookahead_tokens = 1 + ceil_div(int(len(self._sequences) * page_us), max(1, int(SLACK_SHARE * step_us)))
        cache.map_ahead(float("inf"), lookahead_tokens=lookahead_tokens)
        if self._rng.random() < _CHECKED_SHARE:
            cache.check()

    def _sample(self) -> Occupied:
        """Behind a step. Raises: WrongNumbers if the cache's account is not that of the rows."""
        stats, scale, slots = self._cache.stats(), self.system.scale, self._slots()
        needed_bytes, laid_bytes = self._needed_bytes(), self.system.laid_bytes(self._cache.lengths[slots])
        held_bytes = (stats.mapped_bytes - stats.parked_bytes) * scale
        if stats.token_bytes * scale != needed_bytes or not needed_bytes <= laid_bytes <= held_bytes:
            counted = f"{stats.token_bytes * scale} bytes of rows, {held_bytes} held"
            raise WrongNumbers(f"{self.system.name} counts {counted}; {needed_bytes} are needed, {laid_bytes} laid")
        return Occupied(len(slots), needed_bytes, laid_bytes, held_bytes, len(slots) * self.system.table_bytes)

    def _slots(self) -> Rows:
        return np.fromiter(self._sequences, np.int64, len(self._sequences))

    def _needed_bytes(self) -> int:
        return int(self._cache.lengths[self._slots()].sum()) * self.system.row_bytes

    def _preempt(self) -> None:
        """The newest goes, and comes back first. What it was about to write is a token of its prompt then."""
        newest = next(reversed(self._sequences))
        self._first.appendleft(Demand(self._sequences[newest].length + 1, self._left[newest]))
        self._end(newest)

    def _admit(self) -> None:
        used_bytes = self._cache.stats().pool_used_bytes * self.system.scale
        while True:
            demand = self._first.popleft() if self._first else next(self._demands)
            used_bytes += self.system.laid_bytes(np.array([demand.num_prompt]))
            if used_bytes > self._most_bytes:
                self._first.appendleft(demand)
                return
            sequence = self._cache.open()
            sequence.grow(demand.num_prompt)
            sequence.advance(demand.num_prompt)
            self._sequences[sequence.slot] = sequence
            self._left[sequence.slot] = demand.num_out - 1

    def _end(self, slot: int) -> None:
        """vmmkv parks ended sequences, as the engine does."""
        sequence = self._sequences.pop(slot)
        del self._left[slot]
        if self.system.name == "vmmkv":
            sequence.park()
        else:
            sequence.close()


def _add_rows(recorder: Recorder, name: str, budget_bytes: int, simulation: Simulation) -> None:
    """Waste is over the rows' bytes. Its bound is what the last page or block of each sequence has free on average."""
    samples, system, row_bytes = simulation.samples, simulation.system.name, simulation.system.row_bytes
    needed = sum(each.needed_bytes for each in samples)
    num_sequences = sum(each.num_sequences for each in samples)
    unfilled = 100 * simulation.system.unfilled_rows * row_bytes * num_sequences / needed or None
    wasted = [each.held_bytes + each.tables_bytes - each.needed_bytes for each in samples]
    recorder.figure(name, system, WASTE, "%", 100 * sum(wasted) / needed, len(samples), unfilled)
    for metric, amounts, bound in (
        ("waste", wasted, unfilled),
        ("of it, not filled yet", [each.laid_bytes - each.needed_bytes for each in samples], unfilled),
        ("of it, mapped ahead", [each.held_bytes - each.laid_bytes for each in samples], None),
        ("of it, tables", [each.tables_bytes for each in samples], None),
    ):
        if any(amounts):
            shares = [100 * amount / each.needed_bytes for amount, each in zip(amounts, samples, strict=True)]
            recorder.samples(name, system, metric, "%", shares, bound)
    bound = budget_bytes * num_sequences / needed
    recorder.figure(name, system, ADMITTED, "sequences", num_sequences / len(samples), len(samples), bound)
    recorder.samples(name, system, "admitted sequences", "sequences", [each.num_sequences for each in samples], bound)
