"""`python -m bench compare A B`: two sets of rows, and what has changed from the first to the second beyond noise.

A and B are files of rows, or folders of them; FILE@COMMIT takes the rows of one commit alone. Of rows of the same thing the
newest of each side stands, and a full row before a quick one. The rule for noise is that of bench/verdict.py. Rows of two
devices, and quick rows, are not judged. Of two samples the p50 shown is their mean.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.arguments import Parser
from bench.recorded import Key, Recorded, newest, read
from bench.report import console
from bench.rows import FAILED, origin_of
from bench.table import figure
from bench.timing import middle
from bench.verdict import change, differ, higher_is_better, is_difference

_WORSE, _BETTER, _OTHER, _NOISE, _UNJUDGED = "worse", "better", "other", "noise", "not judged"
_ORDER: Final = (_WORSE, _BETTER, _OTHER, _NOISE, _UNJUDGED)
"""What is real first, and what is lost before what is won."""
_REAL: Final = (_WORSE, _BETTER, _OTHER)

_LOG_COLUMNS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same row of both sides."""

    before: Recorded
    after: Recorded

    @property
    def change(self) -> float | None:
        """Share by which the median has changed; None from 0 to something else."""
        return change(self.before.row.summary, self.after.row.summary)

    @property
    def verdict(self) -> str:
        """One of _ORDER."""
        sides = (self.before, self.after)
        if any(side.provenance.quick for side in sides) or len({side.provenance.device for side in sides}) > 1:
            return _UNJUDGED
        before, after = self.before.row, self.after.row
        if not differ(before.summary, after.summary):
            return _NOISE
        higher = higher_is_better(after.metric, after.unit)
        if higher is None:
            return _OTHER
        return _BETTER if (middle(after.summary) > middle(before.summary)) == higher else _WORSE


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rows of both sides in the order of their verdicts, and those of one side alone."""

    pairs: tuple[Pair, ...]
    only_before: tuple[Recorded, ...]
    only_after: tuple[Recorded, ...]

    @property
    def losses(self) -> int:
        """What is worse, and what has failed on the second side and had not on the first."""
        failed = sum(one.row.metric == FAILED for one in self.only_after)
        return failed + sum(pair.verdict == _WORSE for pair in self.pairs)


def main(arguments: Sequence[str]) -> int:
    """Print the comparison; 0, or with --fail-on-loss 1 if anything has lost; 2 if there is nothing to compare."""
    parser = Parser(prog="python -m bench compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="A", help="a file of rows, a folder of them, or either with @COMMIT behind it")
    parser.add_argument("after", metavar="B", help="the same: what A is compared with")
    parser.add_argument(
        "--fail-on-loss", action="store_true", help="exit with 1 if anything is worse beyond noise, or has failed"
    )
    parser.add_argument("--all", action="store_true", help="also rows that differ by noise, or are not judged")
    options = parser.parse_args(arguments)
    try:
        comparison = compare(_read(options.before), _read(options.after))
    except ValueError as error:
        parser.refuse(str(error))
    out = console(_LOG_COLUMNS)
    for line in lines(comparison):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    if not comparison.pairs:
        parser.refuse("nothing to compare: no row has the same suite, workload, system and metric on both sides")
    shown = [pair for pair in comparison.pairs if options.all or pair.verdict in _REAL]
    if shown:
        out.print(_table(shown))
    out.print(_summary(comparison, len(shown)), highlight=False, markup=False, soft_wrap=True)
    return 1 if options.fail_on_loss and comparison.losses else 0


def compare(before: Sequence[Recorded], after: Sequence[Recorded]) -> Comparison:
    """What is on both sides, by suite, workload, system and metric, the newest of each."""
    sides: list[dict[Key, Recorded]] = [_by_key(rows) for rows in (before, after)]
    first, second = sides
    pairs = [Pair(before=first[key], after=second[key]) for key in first if key in second]
    return Comparison(
        pairs=tuple(sorted(pairs, key=_order)),
        only_before=tuple(one for key, one in first.items() if key not in second),
        only_after=tuple(one for key, one in second.items() if key not in first),
    )


def lines(comparison: Comparison) -> Iterator[str]:
    """What there is to say before the table: first what stands on either side."""
    for name, side in (("A", "before"), ("B", "after")):
        origins = Counter(
            f"{provenance.device}, {origin_of(provenance.commit, provenance.date)}"
            for provenance in (getattr(pair, side).provenance for pair in comparison.pairs)
        )
        if origins:
            yield f"{name}: " + "; ".join(f"{count} rows of {origin}" for origin, count in origins.most_common())
    devices = [sorted({getattr(pair, side).provenance.device for pair in comparison.pairs}) for side in ("before", "after")]
    if devices[0] != devices[1]:
        yield f"WARNING: devices differ: {', '.join(devices[0])} against {', '.join(devices[1])}; such rows are not judged"
    if any(side.provenance.quick for pair in comparison.pairs for side in (pair.before, pair.after)):
        yield "WARNING: some rows are of --quick, whose figures are noise; they are not judged"
    for one in comparison.only_after:
        if one.row.metric == FAILED:
            yield f"FAILED in B, not in A: {one.row.suite}: {one.row.workload}"
    for pair in comparison.pairs:
        if pair.after.row.metric == FAILED:
            yield f"FAILED in both: {pair.after.row.suite}: {pair.after.row.workload}"
    for name, alone in (("A", comparison.only_before), ("B", comparison.only_after)):
        if alone:
            suites = Counter(one.row.suite for one in alone)
            yield f"{len(alone)} rows only in {name}: " + ", ".join(f"{count} of {suite}" for suite, count in suites.items())


def _summary(comparison: Comparison, num_shown: int) -> str:
    """The last line: what one looks for where a table is long."""
    counts = Counter(pair.verdict for pair in comparison.pairs)
    said = f"{len(comparison.pairs)} rows on both sides: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in _ORDER)
    hidden = len(comparison.pairs) - num_shown
    return f"{said}; {hidden} not shown: --all shows them" if hidden else said


def _read(source: str) -> list[Recorded]:
    """The rows of PATH or PATH@COMMIT. Lines that are none are named on stderr."""
    path, at, commit = source.rpartition("@")
    whole = not at or Path(source).exists()
    reading = read([Path(source if whole else path)], None if whole else commit)
    if reading.notice:
        print(reading.notice, file=sys.stderr)
    return list(reading.rows)


def _by_key(rows: Sequence[Recorded]) -> dict[Key, Recorded]:
    """A full row stands before a quick one, and of several devices the newest: who wants another names a file or a commit."""
    ascending = sorted(newest(rows), key=lambda one: (not one.provenance.quick, one.provenance.date))
    return {one.key: one for one in ascending}


def _order(pair: Pair) -> tuple[int, float]:
    share = pair.change
    return _ORDER.index(pair.verdict), -abs(float("inf") if share is None else share)


def _change(pair: Pair) -> str:
    """A share; of what is a difference itself, the difference of both."""
    before, after = pair.before.row, pair.after.row
    if is_difference(before.metric):
        return f"{middle(after.summary) - middle(before.summary):+.3g}"
    return "from 0" if pair.change is None else f"{100 * pair.change:+.1f} %"


def _table(pairs: Sequence[Pair]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("", "suite", "workload", "system", "metric"):
        table.add_column(heading, overflow="fold")
    for heading in ("A p50", "p20..p80", "n", "B p50", "p20..p80", "n", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    for pair in pairs:
        row = pair.before.row
        sides = [
            text
            for summary in (row.summary, pair.after.row.summary)
            for text in (figure(middle(summary)), f"{figure(summary.p20)}..{figure(summary.p80)}", str(summary.n))
        ]
        table.add_row(pair.verdict, row.suite, row.workload, row.system, row.metric, *sides, _change(pair), row.unit)
    return table
