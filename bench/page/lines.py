"""A table's lines: each row with its bound, and how it stands against the best of its workload and against blocks."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.rows import FAILED, Row
from bench.table import figure
from bench.timing import middle
from bench.verdict import differ, higher_is_better, is_difference

_OURS, _PAGED = "vmmkv", "paged"
_ALIKE: Final = "alike"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row as it is read. `against_paged` is empty where blocks do not stand beside it; `loses` if they are better."""

    row: Row
    p20: str
    p50: str
    p80: str
    p99: str
    bound: str
    against_best: str
    against_paged: str
    loses: bool


def lines(rows: Sequence[Row]) -> Mapping[str, list[Line]]:
    """By workload, in the order of the rows; without what failed."""
    found: dict[str, list[Line]] = defaultdict(list)
    compared: dict[tuple[str, str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        compared[row.workload, row.metric, row.unit][row.system] = row
    for row in rows:
        if row.metric == FAILED:
            continue
        of_systems = compared[row.workload, row.metric, row.unit]
        paged = _twin(row.system, of_systems)
        summary = row.summary
        found[row.workload].append(
            Line(
                row=row,
                p20=figure(summary.p20),
                p50=figure(middle(summary)),
                p80=figure(summary.p80),
                p99=figure(summary.p99),
                bound="" if row.bound is None else figure(row.bound),
                against_best=_against_best(row, list(of_systems.values())),
                against_paged="" if paged is None else _against(row, paged),
                loses=paged is not None and _is_worse(row, paged),
            )
        )
    return found


def _twin(system: str, systems: Mapping[str, Row]) -> Row | None:
    """What does the same over blocks: "decode, vmmkv, 1 layer a page" has "decode, paged 16" beside it."""
    words = system.split(", ")
    for index, word in enumerate(words):
        if word.split(" ")[0] == _OURS:
            start = ", ".join([*words[:index], _PAGED])
            return next((row for name, row in systems.items() if name.startswith(start)), None)
    return None


def _against_best(row: Row, others: Sequence[Row]) -> str:
    """How many times as bad as the best, of a difference only that; empty where nothing is compared, or is good or bad."""
    higher = higher_is_better(row.metric, row.unit)
    if len(others) < 2 or higher is None:
        return ""
    best = (max if higher else min)((other.summary for other in others), key=middle)
    ours, theirs = middle(row.summary), middle(best)
    if ours == theirs:
        return "best"
    if not differ(best, row.summary):
        return _ALIKE
    if is_difference(row.metric) or ours <= 0 or theirs <= 0:
        return "worse"
    return _times(ours, theirs, higher=higher) + " as bad"


def _against(row: Row, other: Row) -> str:
    """In words: better or worse, and how many times; the rule of bench/verdict.py."""
    higher = higher_is_better(row.metric, row.unit)
    if higher is None:
        return ""
    if not differ(other.summary, row.summary):
        return _ALIKE
    worse = _is_worse(row, other)
    ours, theirs = middle(row.summary), middle(other.summary)
    word = "worse" if worse else "better"
    if is_difference(row.metric) or ours <= 0 or theirs <= 0:
        return word
    times = _times(ours, theirs, higher=higher) if worse else _times(theirs, ours, higher=higher)
    return f"{times} {word}"


def _is_worse(row: Row, other: Row) -> bool:
    higher = higher_is_better(row.metric, row.unit)
    if higher is None or not differ(other.summary, row.summary):
        return False
    return (middle(row.summary) < middle(other.summary)) == higher


def _times(bad: float, good: float, *, higher: bool) -> str:
    return f"{(good / bad if higher else bad / good):.2f}×"


def absent(rows: Sequence[Row], parts: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Systems that have rows in a workload and none in another of the same part: each with the workloads it has none in.

    `parts` has the part of each workload.
    """
    measured = [row for row in rows if row.metric != FAILED]
    for part in dict.fromkeys(parts[row.workload] for row in measured):
        of_part = [row for row in measured if parts[row.workload] == part]
        workloads = list(dict.fromkeys(row.workload for row in of_part))
        for system in dict.fromkeys(row.system for row in of_part):
            has = {row.workload for row in of_part if row.system == system}
            if missing := [workload for workload in workloads if workload not in has]:
                yield system, missing
