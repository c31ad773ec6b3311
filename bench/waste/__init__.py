"""What memory is held over what is needed: vmmkv's own allocator, blocks under a table, and rows laid for the longest sequence.

sizes       how large everything is        memories    what is compared; blocks and static     slots    vmmkv
loop        continuous batching            context     what parts share, a run of each         measures rows of it
memory_map  one moment, to be drawn        bars        what was promised

No model and no device: it is the allocators that run, over addresses without memory (`memory_map`: over the host's).
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from bench.report import Report
from bench.settings import Settings
from bench.timing import now_us
from bench.waste import measures, memory_map
from bench.waste.context import Context


class Part(NamedTuple):
    """A part of the suite: how many steps its progress has, and what runs it."""

    num_steps: Callable[[Context], int]
    run: Callable[[Context, Callable[[str], None]], None]


PARTS: Final = {
    "waste": Part(measures.num_steps, measures.run_waste),
    "admitted": Part(measures.num_steps, measures.run_admitted),
    "map": Part(memory_map.num_steps, memory_map.run),
}


def check(settings: Settings) -> None:
    """Raises: ValueError for a part that there is not, naming those that there are."""
    if unknown := [part for part in settings.parts if part not in PARTS]:
        raise ValueError(f"no part {', '.join(unknown)}; waste has {', '.join(PARTS)}")


def run(settings: Settings, report: Report) -> None:
    """Every part that is wanted. What fails, or is miscounted, is not reported, and raised at the end.

    Raises: ExceptionGroup of WrongNumbers and whatever else a system raised; ValueError for a part that there is not.
    """
    check(settings)
    context = Context(settings, report)
    parts = {name: part for name, part in PARTS.items() if name in (settings.parts or PARTS)}
    with report.progress("waste", sum(part.num_steps(context) for part in parts.values())) as begin:
        for name, part in parts.items():
            began_us = now_us()
            part.run(context, begin)
            report.say(f"{name}: {(now_us() - began_us) / 1e6:.1f} s")
    if context.failures:
        raise ExceptionGroup(f"{len(context.failures)} measurements are absent", context.failures)
