"""The parts `waste` and `admitted`: rows of what the simulation has shown. It runs once for both.

Waste is what is held for running sequences beyond the rows that they have, over these rows. Its bound is what pages or blocks
of this size cannot avoid: of each sequence's last one the part that no row fills yet, on average over all lengths. That of
admitted sequences is the budget over the rows that one has on average.
"""

from collections.abc import Callable
from typing import Final

from bench.settings import Shape
from bench.waste.context import Context
from bench.waste.loop import Outcome

WASTE: Final = "waste, averaged"
ADMITTED: Final = "admitted sequences, averaged"
"""Over time; the same without that word are the samples."""


def num_steps(context: Context) -> int:
    """Of the part's progress."""
    return len(context.runs)


def run_waste(context: Context, begin: Callable[[str], None]) -> None:
    """What is held over what is needed."""
    _each(context, begin, "waste", _add_waste)


def run_admitted(context: Context, begin: Callable[[str], None]) -> None:
    """How many run at once in the same budget."""
    _each(context, begin, "admitted", _add_admitted)


def _each(
    context: Context, begin: Callable[[str], None], part: str, add: Callable[[Context, Shape, str, Outcome], None]
) -> None:
    for shape, workload in context.runs:
        begin(f"{part}, {shape.name}, {workload.name}")
        for outcome in context.outcomes(shape, workload):
            add(context, shape, context.name(shape, workload), outcome)


def _add_waste(context: Context, shape: Shape, name: str, outcome: Outcome) -> None:
    samples, system = outcome.samples, outcome.system
    needed = sum(sample.needed_bytes for sample in samples)
    unfilled = 100 * outcome.unfilled_bytes * sum(sample.num_sequences for sample in samples) / needed
    bound = unfilled or None
    wasted = 100 * sum(sample.wasted_bytes for sample in samples) / needed
    context.add_figure(name, system, WASTE, "%", wasted, len(samples), bound)
    context.add(name, system, "waste", "%", [100 * each.wasted_bytes / each.needed_bytes for each in samples], bound)
    last = [100 * (each.laid_bytes - each.needed_bytes) / each.needed_bytes for each in samples]
    context.add(name, system, "of it, not filled yet", "%", last, bound)
    if any(each.lookahead_tokens for each in samples):
        ahead = [100 * (each.held.rows_bytes - each.laid_bytes) / each.needed_bytes for each in samples]
        context.add(name, system, "of it, mapped ahead", "%", ahead)
        context.add(name, system, "lead of the mapper", "tokens", [each.lookahead_tokens for each in samples])
    if any(each.held.tables_bytes for each in samples):
        tables = [100 * each.held.tables_bytes / each.needed_bytes for each in samples]
        context.add(name, system, "of it, tables", "%", tables)
    if any(each.held.kept_bytes for each in samples):
        budget_bytes = context.sizes.budget_bytes
        kept = [100 * each.held.kept_bytes / budget_bytes for each in samples]
        context.add(name, system, "parked", "% of the budget", kept)


def _add_admitted(context: Context, shape: Shape, name: str, outcome: Outcome) -> None:
    samples, system = outcome.samples, outcome.system
    total = sum(sample.num_sequences for sample in samples)
    mean_bytes = sum(sample.needed_bytes for sample in samples) / total
    bound = context.sizes.budget_bytes / mean_bytes
    context.add_figure(name, system, ADMITTED, "sequences", total / len(samples), len(samples), bound)
    context.add(name, system, "admitted sequences", "sequences", [each.num_sequences for each in samples], bound)
    most = max(each.num_sequences for each in samples)
    context.add_figure(name, system, "admitted sequences, the most", "sequences", most, len(samples))
    context.add_figure(name, system, "rows of a sequence, averaged", "tokens", mean_bytes / shape.layout.row_bytes, total)
    context.add_figure(name, system, "gave way, while others ended", "times", outcome.num_gave_way, outcome.num_ended)
