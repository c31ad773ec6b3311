"""The part `chat`: conversations of many turns. Each turn's prompt is all that was said before, and what the user says now.

All conversations take their turn together, in no order, and all have ended it before the next begins.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np

from bench.prefix.context import Context
from bench.prefix.contiguous import Sharing, Vmmkv
from bench.prefix.loop import Loop, Outcome, Request
from bench.prefix.paged import Paged
from bench.timing import WrongNumbers

_SYSTEMS: Final = (None, Sharing.CHOOSER)
"""Blocks first."""


def workload(context: Context) -> str:
    """How rows name it."""
    return context.named(f"chat: {context.sizes.conversations} conversations of {context.sizes.turns} turns")


def num_steps(context: Context) -> int:
    """How often `begin` is told."""
    return len(_SYSTEMS)


def run(context: Context, begin: Callable[[str], None]) -> None:
    """Both addressings. On a CPU they must say the same."""
    said: list[list[list[int]]] = []
    for sharing in _SYSTEMS:
        name = sharing.value if sharing else "paged"
        begin(f"chat, {name}")
        with context.guarded(f"{workload(context)}: {name}"):
            system = _open(context, sharing)
            try:
                outcomes = _talk(context, system)
            finally:
                system.close()
            said.append([words for outcome in outcomes for words in outcome.words])
            if not context.settings.on_gpu and said[-1] != said[0]:
                raise WrongNumbers("the conversations are not those over blocks")
            _add_rows(context, system.name, outcomes)


def _open(context: Context, sharing: Sharing | None) -> Vmmkv | Paged:
    sizes = context.sizes
    longest = sizes.turns * (sizes.turn_tokens[1] + sizes.turn_out)
    slots = sizes.conversations + 4
    if sharing is None:
        return context.open_paged(slots=slots, max_tokens=longest, num_tokens=slots * longest)
    num_pages = slots * context.pages_for(longest)
    return context.open_vmmkv(sharing, slots=slots, max_tokens=longest, num_pages=num_pages, warm={1: num_pages // 2})


def _talk(context: Context, system: Vmmkv | Paged) -> list[Outcome]:
    """An outcome for each turn of all conversations."""
    sizes = context.sizes
    rng = np.random.default_rng(context.settings.seed)
    loop = Loop(context.model, system, token_budget=sizes.token_budget, most_sequences=sizes.conversations)
    histories = [np.zeros(0, np.int32) for _ in range(sizes.conversations)]
    outcomes = []
    for turn in range(sizes.turns):
        order = rng.permutation(sizes.conversations)
        for index in order:
            asked = context.tokens(int(rng.integers(*sizes.turn_tokens, endpoint=True)), 3, turn, int(index))
            histories[index] = np.concatenate([histories[index], asked])
        outcome = loop.run([Request(prompt=histories[index], out=sizes.turn_out) for index in order])
        for index, words in zip(order, outcome.words, strict=True):
            histories[index] = np.concatenate([histories[index], np.asarray(words, np.int32)])
        outcomes.append(outcome)
    return outcomes


def _add_rows(context: Context, system: str, outcomes: list[Outcome]) -> None:
    name, sizes = workload(context), context.sizes
    later = outcomes[1:]
    num_later = len(later) * sizes.conversations
    context.add(name, system, "turn of all", "ms", [outcome.total_us / 1e3 for outcome in later])
    context.add(name, system, "first token", "ms", [us / 1e3 for outcome in later for us in outcome.first_us])
    hit = 100 * sum(outcome.hit_tokens for outcome in later) / sum(outcome.prompt_tokens for outcome in later)
    context.add_figure(name, system, "prompt tokens attached", "%", hit, num_later)
    methods = sum((outcome.methods for outcome in later), Counter[str]())
    for method, count in sorted(methods.items()):
        context.add_figure(name, system, f"by {method}", "%", 100 * count / num_later, num_later)
    context.add(name, system, "driver calls", "/turn", [outcome.calls.total() / sizes.conversations for outcome in later])
    if any(outcome.calls for outcome in later):
        context.add(name, system, "attach, in the driver", "us", [us for outcome in later for us in outcome.attach_us])
    context.add_figure(name, system, "memory, held", "GiB", max(outcome.held_bytes for outcome in outcomes) / 2**30)
