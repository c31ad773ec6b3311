"""A VmmCache in transformers against the caches that transformers has: time, memory, how long and how many sequences can be.

sizes       how large everything is        caches    what is compared          rows      rows without a model
memory      the peak of a cache            fitting   the longest context, and sequences of mixed lengths
decode      the model, token by token      meter     what torch's memory held  context   what parts share
bars        what was promised
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from bench.hf import decode, fitting, memory
from bench.hf.context import SUITE, Context
from bench.report import Report
from bench.settings import Settings
from bench.timing import now_us


class Part(NamedTuple):
    """A part of the suite: how many steps its progress has, and what runs it."""

    num_steps: Callable[[Context], int]
    run: Callable[[Context, Callable[[str], None]], None]


PARTS: Final = {
    "memory": Part(memory.num_steps, memory.run),
    "longest": Part(fitting.num_longest_steps, fitting.run_longest),
    "mixed": Part(fitting.num_mixed_steps, fitting.run_mixed),
    "decode": Part(decode.num_steps, decode.run),
}
"""In the order in which they run: what `decode` compiles leaves memory with torch in which a meter sees nothing."""


def check(settings: Settings) -> None:
    """Raises: ValueError for a part that there is not, naming those that there are."""
    if unknown := [part for part in settings.parts if part not in PARTS]:
        raise ValueError(f"no part {', '.join(unknown)}; {SUITE} has {', '.join(PARTS)}")


def run(settings: Settings, report: Report) -> None:
    """Every part that is wanted. What fails, or gives wrong numbers, is not reported, and raised at the end.

    Raises: ExceptionGroup of WrongNumbers and whatever else a cache raised; ValueError for a part that there is not.
    """
    check(settings)
    context = Context(settings, report)
    parts = {name: part for name, part in PARTS.items() if name in (settings.parts or PARTS)}
    with report.progress(SUITE, sum(part.num_steps(context) for part in parts.values())) as begin, torch.no_grad():
        for name, part in parts.items():
            began_us = now_us()
            part.run(context, begin)
            report.say(f"{name}: {(now_us() - began_us) / 1e6:.1f} s")
    if context.failures:
        raise ExceptionGroup(f"{len(context.failures)} measurements are absent", context.failures)
