"""How much of the memory that is held holds no row, and how many sequences fit: vmmkv, blocks under a table, static slots.

Continuous batching without a model. The caches are the real ones; vmmkv's driver has addresses and no memory.

    rows for the next token | all sequences advance | newcomers while they fit | map ahead | sample | ended sequences go

A step takes as long as reading the weights and all rows at 4.5 TB/s. Requests never run out. A newcomer's prompt is computed in
one step, then it gets one row in each; how long it will be is not known. It is admitted while it leaves a hundredth of the
budget free, as in vLLM. If a running sequence finds no memory the newest is preempted: it goes to the head of the queue, and is
computed again with its answer so far. No two prompts begin alike. All figures are counts: of the same seed they are the same.

The part `map` writes memory_map.json: what lies under each slot at one moment, after requests with shared prefixes.
"""

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from bench import workloads
from bench.baselines.paged import BLOCK_ROWS, PagedCache
from bench.baselines.slots import StaticCache
from bench.harness import HBM_BYTES_PER_S, SHAPES, Recorder, Settings, Shape, WrongNumbers
from bench.workloads import Ask, Workload
from vmmkv import KVCache, KVLayout, Pool, PrefixCache
from vmmkv.errors import OutOfPages
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import GIB, MIB, PAGE_BYTES, ceil_div, format_bytes

PARTS: Final = ("occupancy", "map")
MAP: Final = "memory_map.json"
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
    map_pages: int = 256
    """The budget of the memory map, so small that each page is seen."""
    map_running: int = 10
    map_steps: int = 200

    @property
    def map_prefixes(self) -> tuple[int, int]:
        """Tokens that the prompts of either of two groups share."""
        return (400, 250) if self.map_pages > 64 else (90, 40)

    @classmethod
    def of(cls, settings: Settings) -> "OccupancySizes":
        """The whole suite's, or `--quick`'s."""
        if settings.quick:
            return cls(3 * GIB, 512, asks=64, warm_steps=30, steps=60, every=4, map_pages=64, map_running=4, map_steps=60)
        return cls(40 * GIB, 4096)


def run(recorder: Recorder) -> None:
    """Every model under each workload, by each system; then the map."""
    settings, sizes = recorder.settings, OccupancySizes.of(recorder.settings)
    # A CPU's usual shape is no model: here it stands for none having been named.
    named = not settings.shapes and settings.shape.name != "wide"
    shapes = (settings.shape,) if named else tuple(SHAPES[name] for name in _MODELS)
    if settings.wants("occupancy"):
        common: Any = {"seed": settings.seed, "vocabulary": _VOCABULARY, "count": sizes.asks, "max_tokens": MAX_TOKENS}
        cases = [(shape, make(**common), open_) for shape in shapes for make in _WORKLOADS for open_ in SYSTEMS]
        for shape, workload, open_ in recorder.track(cases, lambda case: f"{case[0].name} {case[1].name}"):
            name = f"{shape.name} {workload.name}: {workload.text}, {format_bytes(sizes.budget_bytes)}"
            with recorder.guarded(name):
                _add_rows(recorder, name, shape, sizes, simulate(open_(shape, sizes), workload, shape, sizes, settings.seed))
    if settings.wants("map"):
        with recorder.guarded(f"{shapes[0].name} map"):
            found = draw_map(shapes[0], sizes, settings.seed)
            made_by = {name: getattr(recorder.file.provenance, name) for name in ("commit", "date")}
            (recorder.file.folder / MAP).write_text(json.dumps(made_by | found, separators=(",", ":")), encoding="utf-8")
            name = f"{shapes[0].name} map: {found['workload']}"
            recorder.figure(name, "vmmkv", "memory, used", "MiB", found["used_pages"] * PAGE_BYTES / MIB)


# systems


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A cache of a fixed budget, and its arithmetic. A cache of counted blocks has rows of fewer bytes: `scale` times."""

    name: str
    cache: Any
    """See vmmkv.server.engine: the engine's memory."""
    unit_rows: float
    """Rows of the smallest piece of memory: of a page, a block, a slot."""
    unfilled_rows: float
    """Rows that the last piece of a sequence of any length has free, on average; 0 of static slots, whose waste is all that."""
    scale: float = 1.0
    table_bytes: int = 0
    """Of a sequence's block table."""
    close: Callable[[], None]

    def laid_bytes(self, rows: "np.ndarray[Any, Any]", row_bytes: int) -> float:
        """What sequences of so many rows hold if nothing is mapped ahead: by arithmetic, not by the allocator."""
        return float(np.ceil(rows / self.unit_rows).sum() * self.unit_rows * row_bytes)


_COUNTED: Final = KVLayout.uniform(layers=1, kv_heads=1, head_dim=1, dtype=torch.float16)
"""Rows of 4 bytes: baselines take all memory at once, and here nothing is written to it."""


def _open_vmmkv(shape: Shape, sizes: OccupancySizes) -> System:
    driver = FakeDriver(memory_bytes=sizes.budget_bytes + 16 * MIB)  # the null page is beyond the budget
    pool = Pool("cpu", sizes.budget_bytes, driver=driver)
    row_bytes = shape.layout.row_bytes

    def close() -> None:
        used_bytes = pool.used_bytes
        pool.close()
        if used_bytes or pool.created_bytes:
            raise WrongNumbers(f"vmmkv: {used_bytes} bytes were used by no sequence, {pool.created_bytes} are left")

    return System(
        name="vmmkv",
        cache=KVCache(shape.layout, pool, slots=sizes.slots, max_tokens=MAX_TOKENS),
        unit_rows=PAGE_BYTES / row_bytes,
        # What lies behind the last row is a multiple of what rows and pages have in common, each as likely.
        unfilled_rows=(PAGE_BYTES - gcd(PAGE_BYTES, row_bytes)) / 2 / row_bytes,
        close=close,
    )


def _open_paged(shape: Shape, sizes: OccupancySizes) -> System:
    row_bytes = shape.layout.row_bytes
    num_blocks = sizes.budget_bytes // (BLOCK_ROWS * row_bytes)
    cache = PagedCache(_COUNTED, torch.device("cpu"), num_blocks=num_blocks, slots=sizes.slots, max_tokens=MAX_TOKENS)
    return System(
        name=f"paged {BLOCK_ROWS}",
        cache=cache,
        unit_rows=BLOCK_ROWS,
        unfilled_rows=(BLOCK_ROWS - 1) / 2,
        scale=row_bytes / _COUNTED.row_bytes,
        table_bytes=4 * ceil_div(MAX_TOKENS, BLOCK_ROWS),
        close=cache.close,
    )


def _open_static(shape: Shape, sizes: OccupancySizes) -> System:
    row_bytes = shape.layout.row_bytes
    cache = StaticCache(
        _COUNTED, torch.device("cpu"), slots=sizes.budget_bytes // (MAX_TOKENS * row_bytes), max_tokens=MAX_TOKENS
    )
    return System(
        name=f"static {MAX_TOKENS}",
        cache=cache,
        unit_rows=MAX_TOKENS,
        unfilled_rows=0.0,
        scale=row_bytes / _COUNTED.row_bytes,
        close=cache.close,
    )


SYSTEMS: Final[tuple[Callable[[Shape, OccupancySizes], System], ...]] = (_open_vmmkv, _open_paged, _open_static)


# the simulation


class Request(NamedTuple):
    """What is to be computed: so many tokens in one step, which gives the first of `num_out`."""

    num_prompt: int
    num_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One moment, in bytes: of rows, of whole pieces of memory under them, of all that is held for running sequences."""

    num_sequences: int
    needed_bytes: float
    laid_bytes: float
    held_bytes: float
    tables_bytes: float
    parked_bytes: float
    lookahead_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run has shown."""

    system: System
    samples: list[Sample]
    num_ended: int
    num_preempted: int


class Simulation:
    """Steps of one system under one workload."""

    def __init__(self, system: System, workload: Workload, shape: Shape, budget_bytes: int, seed: int) -> None:
        self.num_ended = self.num_preempted = 0
        self._system, self._cache, self._shape = system, system.cache, shape
        self._row_bytes = shape.layout.row_bytes
        self._most_bytes = budget_bytes * (1 - WATERMARK if system.unfilled_rows else 1.0)  # static slots do not grow
        self._requests: Iterator[Request] = itertools.cycle(Request(len(ask.prompt), ask.num_out) for ask in workload.asks)
        self._first: deque[Request] = deque()
        """Before all others: preempted requests, and the one that did not fit."""
        self._rng = np.random.default_rng(seed)
        self._sequences: dict[int, Any] = {}
        """By slot, in the order of their coming."""
        self._left: dict[int, int] = {}
        """By slot, tokens still to come."""
        self._lookahead_tokens = 0

    def step(self) -> None:
        """One step. Raises: OutOfPages if a sequence does not fit alone; AssertionError if a law is broken."""
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
        if self._system.name == "vmmkv":
            step_us = (self._shape.weight_bytes + self._num_rows() * self._row_bytes) / HBM_BYTES_PER_S * 1e6
            # As KVCache.lookahead_tokens, which measures what mapping a page costs over this driver.
            self._lookahead_tokens = 1 + ceil_div(int(len(self._sequences) * PAGE_US), max(1, int(SLACK_SHARE * step_us)))
        cache.map_ahead(float("inf"), lookahead_tokens=self._lookahead_tokens or 1)
        if self._rng.random() < _CHECKED_SHARE:
            cache.check()

    def sample(self) -> Sample:
        """Behind a step. Raises: WrongNumbers if the cache's account is not that of the rows."""
        stats, scale, slots = self._cache.stats(), self._system.scale, self._slots()
        needed_bytes = self._num_rows() * self._row_bytes
        laid_bytes = self._system.laid_bytes(self._cache.lengths[slots], self._row_bytes)
        held_bytes = (stats.mapped_bytes - stats.parked_bytes) * scale
        if stats.token_bytes * scale != needed_bytes or not needed_bytes <= laid_bytes <= held_bytes:
            counted = f"{stats.token_bytes * scale} bytes of rows, {held_bytes} held"
            raise WrongNumbers(f"{self._system.name} counts {counted}; {needed_bytes} are needed, {laid_bytes} laid")
        return Sample(
            num_sequences=len(slots),
            needed_bytes=needed_bytes,
            laid_bytes=laid_bytes,
            held_bytes=held_bytes,
            tables_bytes=len(slots) * self._system.table_bytes,
            parked_bytes=stats.parked_bytes * scale,
            lookahead_tokens=self._lookahead_tokens,
        )

    def end_answered(self) -> None:
        """Sequences that have all of their answer go. vmmkv parks them, as the engine does."""
        for slot in [slot for slot, left in self._left.items() if not left]:
            self._end(slot)
            self.num_ended += 1

    def close(self) -> None:
        """End all sequences, and check that nothing is held for any. Raises: WrongNumbers, AssertionError."""
        for slot in list(self._sequences):
            self._end(slot)
        self._cache.check()
        self._system.close()

    def _slots(self) -> "np.ndarray[Any, Any]":
        return np.fromiter(self._sequences, np.int64, len(self._sequences))

    def _num_rows(self) -> int:
        return int(self._cache.lengths[self._slots()].sum())

    def _preempt(self) -> None:
        """The newest goes, and comes back first. What it was about to write is a token of its prompt then."""
        newest = next(reversed(self._sequences))
        self._first.appendleft(Request(self._sequences[newest].length + 1, self._left[newest]))
        self._end(newest)
        self.num_preempted += 1

    def _admit(self) -> None:
        used_bytes = self._cache.stats().pool_used_bytes * self._system.scale
        while True:
            request = self._first.popleft() if self._first else next(self._requests)
            used_bytes += self._system.laid_bytes(np.array([request.num_prompt]), self._row_bytes)
            if used_bytes > self._most_bytes:
                self._first.appendleft(request)
                return
            sequence = self._cache.open()
            sequence.grow(request.num_prompt)
            sequence.advance(request.num_prompt)
            self._sequences[sequence.slot] = sequence
            self._left[sequence.slot] = request.num_out - 1

    def _end(self, slot: int) -> None:
        sequence = self._sequences.pop(slot)
        del self._left[slot]
        if self._system.name == "vmmkv":
            sequence.park()
        else:
            sequence.close()


def simulate(system: System, workload: Workload, shape: Shape, sizes: OccupancySizes, seed: int) -> Outcome:
    """Steps until sequences come and go at all times, then those that are measured. Raises: WrongNumbers, AssertionError."""
    simulation = Simulation(system, workload, shape, sizes.budget_bytes, seed)
    samples = []
    for number in range(-sizes.warm_steps, sizes.steps):
        if not number:
            simulation.num_ended = simulation.num_preempted = 0
        simulation.step()
        if number >= 0 and not number % sizes.every:
            samples.append(simulation.sample())
        simulation.end_answered()
    outcome = Outcome(system=system, samples=samples, num_ended=simulation.num_ended, num_preempted=simulation.num_preempted)
    simulation.close()
    return outcome


def _add_rows(recorder: Recorder, name: str, shape: Shape, sizes: OccupancySizes, outcome: Outcome) -> None:
    """Waste is over the rows' bytes. Its bound is what the last page or block of each sequence has free on average."""
    samples, system, row_bytes = outcome.samples, outcome.system.name, shape.layout.row_bytes
    needed = sum(each.needed_bytes for each in samples)
    num_sequences = sum(each.num_sequences for each in samples)
    unfilled = 100 * outcome.system.unfilled_rows * row_bytes * num_sequences / needed or None
    wasted = [each.held_bytes + each.tables_bytes - each.needed_bytes for each in samples]
    recorder.figure(name, system, WASTE, "%", 100 * sum(wasted) / needed, len(samples), unfilled)

    def add(metric: str, bytes_of: Callable[[Sample], float], bound: float | None = None) -> None:
        figures = [100 * bytes_of(each) / each.needed_bytes for each in samples]
        if any(figures):
            recorder.samples(name, system, metric, "%", figures, bound)

    add("waste", lambda each: each.held_bytes + each.tables_bytes - each.needed_bytes, unfilled)
    add("of it, not filled yet", lambda each: each.laid_bytes - each.needed_bytes, unfilled)
    add("of it, mapped ahead", lambda each: each.held_bytes - each.laid_bytes)
    add("of it, tables", lambda each: each.tables_bytes)
    if system == "vmmkv":
        recorder.samples(name, system, "lookahead", "tokens", [each.lookahead_tokens for each in samples])
        parked = [100 * each.parked_bytes / sizes.budget_bytes for each in samples]
        recorder.samples(name, system, "parked", "% of the budget", parked)
    bound = sizes.budget_bytes * num_sequences / needed
    recorder.figure(name, system, ADMITTED, "sequences", num_sequences / len(samples), len(samples), bound)
    recorder.samples(name, system, "admitted sequences", "sequences", [each.num_sequences for each in samples], bound)
    recorder.figure(name, system, "rows of a sequence, averaged", "tokens", needed / num_sequences / row_bytes, num_sequences)
    recorder.figure(name, system, "preempted, while others ended", "times", outcome.num_preempted, outcome.num_ended)


# the map


def draw_map(shape: Shape, sizes: OccupancySizes, seed: int) -> dict[str, Any]:
    """Serve requests of two groups that share a prefix, and of none, until one has just ended; then look at all slots.

    Rows are copied where prompts part, so there is memory behind the addresses: the host's.
    """
    rng, asks = np.random.default_rng(seed), _mixed_asks(sizes, seed)
    running: dict[int, tuple[Any, Ask]] = {}
    with (
        Pool("cpu", sizes.map_pages * PAGE_BYTES) as pool,
        KVCache(shape.layout, pool, slots=sizes.map_running + 6, max_tokens=1024) as cache,
    ):
        prefix = PrefixCache(cache)
        for step in itertools.count(1):
            cache.map_ahead(lookahead_tokens=1 + ceil_div(int(len(running) * PAGE_US), 1800))
            ended = [slot for slot, (sequence, ask) in running.items() if sequence.length == len(ask.prompt) + ask.num_out - 1]
            for sequence, _ in running.values():
                sequence.grow(sequence.length + 1)
                sequence.advance()
            for slot in ended:  # what it answered was never computed: tokens at random, for the tree
                sequence, ask = running.pop(slot)
                answer = rng.integers(0, _VOCABULARY, sequence.length - len(ask.prompt), dtype=np.int32)
                prefix.park(sequence, np.concatenate((ask.prompt, answer)))
            if len(running) < sizes.map_running:
                ask = next(asks)
                attached = prefix.attach(ask.prompt, max_tokens=len(ask.prompt) + ask.num_out)
                attached.sequence.grow(len(ask.prompt))
                attached.sequence.advance(len(ask.prompt) - attached.num_tokens)
                prefix.insert(attached.sequence, ask.prompt)
                running[attached.sequence.slot] = attached.sequence, ask
            prefix.free_slots(1)
            if step >= sizes.map_steps and ended:
                break
        cache.check()
        slots = [
            {
                "slot": found.slot,
                "state": found.state.name.lower(),
                "rows": found.num_tokens,
                "runs": [[one.page, one.num_pages, one.state.value, one.num_holders] for one in found.groups[0]],
            }
            for found in cache.slot_maps(cache.taken_slots())
        ]
        pages = {f"{name}_pages": getattr(pool, f"{name}_bytes") // PAGE_BYTES for name in ("budget", "held", "used")}
    shared = " or ".join(map(str, sizes.map_prefixes))
    text = f"{sizes.map_running} at once, of which {shared} tokens are shared, or none"
    found = {"shape": shape.name, "workload": text, "step": step, "page_bytes": PAGE_BYTES, "slots": slots}
    return {**found, "row_bytes": shape.layout.row_bytes, **pages}


def _mixed_asks(sizes: OccupancySizes, seed: int) -> Iterator[Ask]:
    count = sizes.map_steps + sizes.map_running + 512
    common: Any = {"vocabulary": _VOCABULARY, "count": count, "max_tokens": 1024}
    pools = [
        workloads.shared_prefix(seed=seed + group, prefix_tokens=prefix, own=(8, 80), out=(16, 80), **common)
        for group, prefix in enumerate(sizes.map_prefixes)
    ]
    pools.append(workloads.uniform(seed=seed, prompt=(16, 160), out=(16, 80), **common))
    which = np.random.default_rng(seed).choice(3, count, p=(0.45, 0.35, 0.2)).tolist()
    return (pools[group].asks[index] for index, group in enumerate(which))
