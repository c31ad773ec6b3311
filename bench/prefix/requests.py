"""The part `requests`: many requests that share a prefix, cold and warm, through every system.

Cold, nobody knows the prefix: the first request computes it, and the others are admitted when they can share it. Warm, other
requests come with the same prefix. A system begins a round with nothing but memory; systems take turns, round by round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from bench.prefix.context import Context
from bench.prefix.contiguous import Sharing, Vmmkv
from bench.prefix.loop import Loop, Outcome, Request
from bench.prefix.paged import Paged
from bench.timing import WrongNumbers
from vmmkv.units import GIB

COLD: Final = "cold"
WARM: Final = "warm"
_TOLERANCE: Final = 0.1
"""How far the outputs behind the prompts may be off, as a share of their length, in 16 bits: prompts are cut otherwise, and so
matrices are multiplied in other orders. With a wrong prefix they are off by several times that, which is checked."""
_HEADROOM: Final = 1.15
"""Of the budget over what sequences with rows of their own need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A system, for how many rounds it runs (None: all) and how many warm runs each has (None: as many as others)."""

    sharing: Sharing | None
    """None for blocks."""
    rounds: int | None = None
    warm_runs: int | None = None
    first_only: bool = False
    """Does it run on the first length of prefix only?"""

    @property
    def shows_cold(self) -> bool:
        """Before anybody has ended nothing can be adopted."""
        return self.sharing is not Sharing.ADOPT


_ENTRIES: Final = (
    _Entry(sharing=Sharing.NONE, rounds=1, warm_runs=0, first_only=True),  # nothing is ever warm
    _Entry(sharing=None),
    _Entry(sharing=Sharing.CHOOSER),
    _Entry(sharing=Sharing.ALIAS),
    _Entry(sharing=Sharing.ADOPT),
    _Entry(sharing=Sharing.COMPUTE, rounds=1, warm_runs=0, first_only=True),  # as long as cold
)
"""The first to run is what the others' outputs are held against: the first, where it runs, else the second."""


_Known = dict[tuple[int, int], Outcome]
"""By round and run of it, the first system's outcome: what others' outputs should be."""


def workload(context: Context, prefix_tokens: int, state: str) -> str:
    """How rows name it."""
    sizes = context.sizes
    return context.named(f"{sizes.requests} requests of {prefix_tokens} + {sizes.own} tokens, {sizes.out} out, {state}")


def run(context: Context, begin: Callable[[str], None]) -> None:
    """Every length of prefix. `begin` is told of each system and round."""
    for number, prefix_tokens in enumerate(context.sizes.prefixes):
        _run_prefix(context, begin, prefix_tokens, _plan(context, number))


def num_steps(context: Context) -> int:
    """How often `begin` is told."""
    return sum(len(_plan(context, number)) for number in range(len(context.sizes.prefixes)))


def _plan(context: Context, number: int) -> list[tuple[int, _Entry]]:
    """Which systems run on a length of prefix, in their order, each with the number of its round."""
    return [
        (round_, entry)
        for round_ in range(context.sizes.rounds)
        for entry in _ENTRIES
        if round_ < (entry.rounds or context.sizes.rounds) and not (number and entry.first_only)
    ]


def _run_prefix(
    context: Context, begin: Callable[[str], None], prefix_tokens: int, entries: Sequence[tuple[int, _Entry]]
) -> None:
    known: _Known = {}
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    for round_, entry in entries:
        name = entry.sharing.value if entry.sharing else "paged"
        begin(f"{prefix_tokens} tokens shared, {name}")
        with context.guarded(f"{workload(context, prefix_tokens, COLD)}: {name}"):
            system = _open(context, entry, prefix_tokens)
            try:
                for state, outcome in _measure(context, entry, system, prefix_tokens, round_, known):
                    outcomes.setdefault((state, system.name), []).append(outcome)
            finally:
                system.close()
    for state in (COLD, WARM):
        for (its_state, system_name), of_system in outcomes.items():
            if its_state == state:
                _add_rows(context, workload(context, prefix_tokens, state), system_name, of_system)


def _open(context: Context, entry: _Entry, prefix_tokens: int) -> Vmmkv | Paged:
    sizes = context.sizes
    own = sizes.own + sizes.out
    longest, slots = prefix_tokens + own, 2 * sizes.requests + 8
    if entry.sharing is None:
        num_tokens = prefix_tokens + (1 + sizes.warm_runs) * sizes.requests * own
        return context.open_paged(slots=slots, max_tokens=longest, num_tokens=num_tokens)
    private_pages = sizes.requests * context.pages_for(longest)
    shared = context.extents_for(prefix_tokens, 2) + context.extents_for(own, sizes.requests)
    shared_pages = sum(num_pages * count for num_pages, count in shared.items())
    return context.open_vmmkv(
        entry.sharing,
        slots=slots,
        max_tokens=longest,
        num_pages=int(_HEADROOM * private_pages) + shared_pages,
        warm=context.extents_for(longest, sizes.requests) if entry.sharing.is_private else shared,
    )


def _requests(context: Context, prefix_tokens: int, round_: int, number: int) -> list[Request]:
    """Of a run: the round's prefix, and other tokens in each run."""
    sizes = context.sizes
    prefix = context.tokens(prefix_tokens, prefix_tokens, round_)
    own = [context.tokens(sizes.own, prefix_tokens, round_, number, index) for index in range(sizes.requests)]
    return [Request(prompt=np.concatenate([prefix, tokens]), out=sizes.out) for tokens in own]


def _measure(
    context: Context, entry: _Entry, system: Vmmkv | Paged, prefix_tokens: int, round_: int, known: _Known
) -> list[tuple[str, Outcome]]:
    sizes = context.sizes
    loop = Loop(context.model, system, token_budget=sizes.token_budget, most_sequences=sizes.requests)
    measured: list[tuple[str, Outcome]] = []
    for number in range(1 + (sizes.warm_runs if entry.warm_runs is None else entry.warm_runs)):
        requests = _requests(context, prefix_tokens, round_, number)
        is_cold = number == 0
        if isinstance(system, Vmmkv):
            system.forces = not (is_cold and system.sharing is Sharing.ADOPT)
        shares = entry.sharing is not Sharing.NONE
        context.synchronize()
        outcome = loop.run(requests, first_alone=is_cold and shares)
        _check(context, known, (round_, number), outcome)
        if not shares:
            _check_that_it_shows(context, loop, requests[1], outcome)
        if not is_cold or entry.shows_cold:
            measured.append((COLD if is_cold else WARM, outcome))
    return measured


def _check(context: Context, known: _Known, key: tuple[int, int], outcome: Outcome) -> None:
    """Held against the first system that has run the same requests."""
    wanted = known.setdefault(key, outcome)
    if not context.settings.on_gpu and outcome.words != wanted.words:
        raise WrongNumbers("the tokens are not those of a system that shares nothing")
    errors = [_error(outcome.outputs[index], wanted.outputs[index]) for index in wanted.outputs]
    outcome.error = max(errors)
    if not outcome.error <= _TOLERANCE:  # NaN is not
        raise WrongNumbers(f"outputs behind the prompts are off by up to {outcome.error:.3g} of their length")


def _check_that_it_shows(context: Context, loop: Loop, request: Request, right: Outcome) -> None:
    """Would a wrong prefix have been seen? One request again, with other tokens before its own."""
    own = request.prompt[-context.sizes.own :]
    other = context.tokens(len(request.prompt) - len(own), 1)
    wrong = loop.run([Request(prompt=np.concatenate([other, own]), out=1)])
    error = _error(wrong.outputs[0], right.outputs[1])
    if not error > 2 * _TOLERANCE:
        raise WrongNumbers(f"a wrong prefix moves the outputs by {error:.3g} of their length only: it would not be seen")


def _error(given_E: torch.Tensor, wanted_E: torch.Tensor) -> float:
    return float((given_E.float() - wanted_E.float()).norm() / wanted_E.float().norm())


def _add_rows(context: Context, name: str, system: str, outcomes: Sequence[Outcome]) -> None:
    context.add(name, system, "total", "s", [outcome.total_us / 1e6 for outcome in outcomes])
    context.add(name, system, "first token", "ms", [us / 1e3 for outcome in outcomes for us in outcome.first_us])
    # Of the first round's first run: later ones keep what earlier ones have left.
    context.add_figure(name, system, "memory, held", "GiB", outcomes[0].held_bytes / GIB)
    context.add_figure(name, system, "memory, in use", "GiB", outcomes[0].used_bytes / GIB)
    context.add(name, system, "outputs off by", "%", [100 * outcome.error for outcome in outcomes])
    num_requests = sum(len(outcome.first_us) for outcome in outcomes)
    if any(outcome.calls for outcome in outcomes):
        context.add(name, system, "attach, in the driver", "us", [us for outcome in outcomes for us in outcome.attach_us])
        num_calls = sum(outcome.calls.total() for outcome in outcomes)
        context.add_figure(name, system, "driver calls", "/request", num_calls / num_requests, num_requests)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in outcomes)
    hit = 100 * sum(outcome.hit_tokens for outcome in outcomes) / prompt_tokens
    context.add_figure(name, system, "prompt tokens attached", "%", hit, num_requests)
    for method in sorted({method for outcome in outcomes for method in outcome.methods}):
        share = 100 * sum(outcome.methods[method] for outcome in outcomes) / num_requests
        context.add_figure(name, system, f"by {method}", "%", share, num_requests)
