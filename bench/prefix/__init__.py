"""What sharing prefixes costs and saves: vmmkv by each method and by its chooser, blocks under a table, no sharing.

sizes       how large everything is          model       a decoder with random weights     addressing   where its rows lie
systems     what a loop asks of memory       contiguous  vmmkv                             paged        blocks
loop        one serving loop for all         filling     rows without a model              context      what parts share
naming      whose shape a row is of          bars        what was promised
requests, attention, chat, attaching, and bench/radix: the parts
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from bench import radix
from bench.prefix import attaching, attention, chat, requests
from bench.prefix.context import Context
from bench.report import Report
from bench.settings import Settings
from bench.timing import now_us


class Part(NamedTuple):
    """A part of the suite: how many steps its progress has, and what runs it."""

    num_steps: Callable[[Context], int]
    run: Callable[[Context, Callable[[str], None]], None]


def _run_tree(context: Context, begin: Callable[[str], None]) -> None:
    """The tree alone, on the host."""
    for row in radix.measure(context.settings, begin):
        context.report.add(row)


PARTS: Final = {
    "requests": Part(requests.num_steps, requests.run),
    "attention": Part(attention.num_steps, attention.run),
    "chat": Part(chat.num_steps, chat.run),
    "attach": Part(attaching.num_steps, attaching.run),
    "tree": Part(lambda context: radix.num_steps(context.settings), _run_tree),
}


def check(settings: Settings) -> None:
    """Raises: ValueError for a part that there is not, naming those that there are."""
    if unknown := [part for part in settings.parts if part not in PARTS]:
        raise ValueError(f"no part {', '.join(unknown)}; prefix has {', '.join(PARTS)}")


def run(settings: Settings, report: Report) -> None:
    """Every part that is wanted. What fails, or gives wrong outputs, is not reported, and raised at the end.

    Raises: ExceptionGroup of WrongNumbers and whatever else a system raised; ValueError for a part that there is not.
    """
    check(settings)
    context = Context(settings, report)
    parts = {name: part for name, part in PARTS.items() if name in (settings.parts or PARTS)}
    with report.progress("prefix", sum(part.num_steps(context) for part in parts.values())) as begin:
        for name, part in parts.items():
            began_us = now_us()
            part.run(context, begin)
            report.say(f"{name}: {(now_us() - began_us) / 1e6:.1f} s")
    if context.failures:
        raise ExceptionGroup(f"{len(context.failures)} measurements are absent", context.failures)
