"""How much fits into a budget: the longest context of a batch, and sequences whose lengths are mixed.

Whether something fits is found by trying: every pass must find room for its rows, and what torch's allocator and the pool have
taken from the device together must be no more than the budget.
"""

import itertools
from collections.abc import Callable
from typing import Any, Final

import torch

from bench import workloads
from bench.hf.caches import SYSTEMS, Memory, memory_of
from bench.hf.context import Context
from bench.hf.meter import Meter, meter_of
from bench.hf.rows import Rows, plan_of
from bench.timing import WrongNumbers
from vmmkv.errors import OutOfPages
from vmmkv.units import format_bytes

LONGEST: Final = "longest context"
ADMITTED: Final = "admitted sequences"

_NO_ROOM: Final = (OutOfPages, torch.OutOfMemoryError)

_FINEST: Final = 1024

_WORKLOAD_TOKENS: Final = 4096
"""The most that a request of `chat` has where its lengths are those that were published."""
_NUM_REQUESTS: Final = 1024
"""They come round again."""
_VOCABULARY: Final = 32_000
"""Of prompts that nobody reads."""


def num_longest_steps(context: Context) -> int:
    """Each system with each batch."""
    return len(SYSTEMS) * len(context.sizes.longest_batches)


def run_longest(context: Context, begin: Callable[[str], None]) -> None:
    """The longest context of each system, for each batch."""
    sizes, seed = context.sizes, context.settings.seed
    for batch in sizes.longest_batches:
        rows = Rows(context.rows_of, context.device, batch=batch, pass_tokens=sizes.fill_tokens, seed=seed)
        workload = f"{context.rows_of.name} longest: a batch of {batch} in {format_bytes(sizes.longest_budget_bytes)}"
        for system in SYSTEMS:
            begin(f"{workload}, {system}")
            with context.guarded(f"{workload}, {system}"):
                most = sizes.longest_budget_bytes // rows.token_bytes
                longest = longest_that(lambda num_tokens: _holds(context, system, rows, num_tokens), most)  # noqa: B023
                context.add_figure(workload, system, LONGEST, "tokens", longest, most)


def longest_that(holds: Callable[[int], bool], most: int) -> int:
    """The most tokens, `most` or fewer, that are held: from `most` down in growing steps, then by halving the last of them.

    To within 1 / 1024 of `most`. It is taken that whatever is fewer than what is held would be held too.
    """
    least_step = max(1, most // _FINEST)
    too_many, held, step = most + least_step, most, least_step
    while held and not holds(held):
        too_many, step = held, 2 * step
        held = max(0, too_many - step)
    while held + least_step < too_many:
        middle = (held + too_many) // 2
        held, too_many = (middle, too_many) if holds(middle) else (held, middle)
    return held


def _holds(context: Context, system: str, rows: Rows, num_tokens: int) -> bool:
    """Raises: WrongNumbers if all was written and something else is read."""
    sizes = context.sizes
    plan = plan_of(num_tokens, chunk_tokens=sizes.fill_tokens, steps=sizes.single_tokens)
    with memory_of(system, context.config_of(context.rows_of), context.device, sizes.longest_budget_bytes) as memory:
        cache = memory.open(rows.batch, num_tokens)
        with meter_of(context.device, sizes.longest_budget_bytes) as meter:
            held = _write(rows, cache, plan, 0, meter, memory, sizes.longest_budget_bytes)
        if held:
            rows.check(cache, plan)
    return held


def _write(rows: Rows, cache: Any, plan: list[int], first: int, meter: Meter, memory: Memory, budget_bytes: int) -> bool:
    """Is there room for these passes?"""
    try:
        rows.write(cache, plan, first=first)
    except _NO_ROOM:
        return False
    return meter.taken_bytes + memory.own_bytes <= budget_bytes


def num_mixed_steps(context: Context) -> int:
    """Each system."""
    return len(SYSTEMS)


def run_mixed(context: Context, begin: Callable[[str], None]) -> None:
    """How many requests each system holds at once, taken in one order until one does not fit. Each has a cache of its own."""
    sizes, seed = context.sizes, context.settings.seed
    max_tokens = sizes.mixed_max_tokens
    chat = workloads.chat(
        seed=seed,
        vocabulary=_VOCABULARY,
        count=_NUM_REQUESTS,
        max_tokens=max_tokens,
        scale=min(1.0, max_tokens / _WORKLOAD_TOKENS),
    )
    requests = [(len(ask.prompt), ask.num_out) for ask in chat.asks]
    rows = Rows(context.rows_of, context.device, batch=1, pass_tokens=max_tokens, seed=seed)
    workload = f"{context.rows_of.name} mixed: {chat.text}, in {format_bytes(sizes.mixed_budget_bytes)}"
    sums = itertools.accumulate(rows.token_bytes * (prompt + out) for prompt, out in itertools.cycle(requests))
    most = sum(1 for _ in itertools.takewhile(lambda sum_bytes: sum_bytes <= sizes.mixed_budget_bytes, sums))
    for system in SYSTEMS:
        begin(f"{workload}, {system}")
        with context.guarded(f"{workload}, {system}"):
            admitted = _admitted(context, system, rows, requests)
            if admitted > most:
                raise WrongNumbers(
                    f"{admitted} sequences were admitted, and the budget has rows for {most}: some memory was not counted"
                )
            context.add_figure(workload, system, ADMITTED, "sequences", admitted, most)


def _admitted(context: Context, system: str, rows: Rows, requests: list[tuple[int, int]]) -> int:
    """Raises: WrongNumbers if what was written for one of them is something else in the end."""
    sizes = context.sizes
    running: list[tuple[Any, list[int], int]] = []
    with memory_of(system, context.config_of(context.rows_of), context.device, sizes.mixed_budget_bytes) as memory:
        with meter_of(context.device, sizes.mixed_budget_bytes) as meter:
            first = 0
            for prompt, out in itertools.cycle(requests):
                plan = [prompt, *plan_of(out, chunk_tokens=sizes.mixed_pass_tokens, steps=0)]
                cache = memory.open(1, sizes.mixed_max_tokens)
                if not _write(rows, cache, plan, first, meter, memory, sizes.mixed_budget_bytes):
                    break
                running.append((cache, plan, first))
                first += len(plan)
        for cache, plan, first in running:
            rows.check(cache, plan, first=first)
    return len(running)
