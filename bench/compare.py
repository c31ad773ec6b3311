"""`python -m bench compare OLD NEW`: two sets of rows by median and spread.

OLD and NEW are files of rows, or folders of them; PATH@COMMIT takes the rows of one commit. Of rows of the same thing the
newest of each side counts.

    worse, better    the medians differ by more than --limit (2 %), and the intervals from p20 to p80 do not overlap
    unclear          the medians differ by more than that, and the intervals overlap, or neither direction is better
    alike            the medians differ by no more than that

Rows of two devices, and --quick rows, cannot be compared. The median of two samples is their mean.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.cli import Parser
from bench.harness import console, table
from bench.rows import FAILED, Recorded, figure, newest, read

LIMIT: Final = 0.02
"""The share by which medians may differ, unless --limit names another."""
_WORSE, _BETTER, _UNCLEAR, _ALIKE = "worse", "better", "unclear", "alike"
_ORDER: Final = (_WORSE, _BETTER, _UNCLEAR, _ALIKE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same row of both sides. `change` is the share by which the median has grown; None from 0 to something else."""

    old: Recorded
    new: Recorded
    limit: float

    @property
    def change(self) -> float | None:
        """By the medians."""
        old, new = self.old.row.summary.median, self.new.row.summary.median
        return 0.0 if old == new else (new - old) / abs(old) if old else None

    @property
    def verdict(self) -> str:
        """One of `_ORDER`."""
        change, row = self.change, self.new.row
        if change is not None and abs(change) <= self.limit:
            return _ALIKE
        if row.higher_is_better is None or row.summary.overlaps(self.old.row.summary):
            return _UNCLEAR
        grew = row.summary.median > self.old.row.summary.median
        return _BETTER if grew == row.higher_is_better else _WORSE


def compare(old: Sequence[Recorded], new: Sequence[Recorded], limit: float) -> list[Pair]:
    """The rows that both sides have, the worst first. Raises: ValueError if there are none, or devices differ."""
    olds, news = ({one.key: one for one in newest(side) if not one.provenance.quick} for side in (old, new))
    pairs = [Pair(old=olds[key], new=news[key], limit=limit) for key in olds if key in news]
    if not pairs:
        raise ValueError("no row that is not quick has the same suite, workload, system and metric on both sides")
    devices = [", ".join(sorted({getattr(pair, side).provenance.device for pair in pairs})) for side in ("old", "new")]
    if devices[0] != devices[1]:
        raise ValueError(f"devices differ: {devices[0]} against {devices[1]}; compare rows of one device")
    return sorted(pairs, key=lambda pair: (_ORDER.index(pair.verdict), -abs(pair.change or float("inf"))))


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 with --fail-on-loss if anything is worse, or failed in NEW alone; 2 if nothing can be compared."""
    parser = Parser(prog="python -m bench compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD", help="a file of rows, a folder of them, or either with @COMMIT behind it")
    parser.add_argument("new", metavar="NEW", help="the same")
    parser.add_argument(
        "--limit", type=float, default=100 * LIMIT, metavar="PERCENT", help="differences that count; default: 2"
    )
    parser.add_argument("--fail-on-loss", action="store_true", help="exit with 1 if anything is worse, or has failed")
    options = parser.parse_args(arguments)
    try:
        old, new = _read(options.old), _read(options.new)
        pairs = compare(old, new, options.limit / 100)
    except ValueError as error:
        parser.refuse(str(error))
    out = console(200)
    for name, side in (("OLD", "old"), ("NEW", "new")):
        origins = Counter(getattr(pair, side).provenance.origin for pair in pairs)
        out.print(f"{name}: " + "; ".join(f"{count} rows of {origin}" for origin, count in origins.items()), highlight=False)
    if shown := [pair for pair in pairs if pair.verdict != _ALIKE]:
        sides = ("old p50", "p20..p80", "n", "new p50", "p20..p80", "n", "change")
        out.print(table(("", "suite", "workload", "system", "metric"), sides, map(_cells, shown)))
    known = {one.key for one in old}
    failed = [one.row.workload for one in new if one.row.metric == FAILED and one.key not in known]
    for workload in failed:
        out.print(f"FAILED in NEW alone: {workload}", highlight=False, markup=False)
    counts = Counter(pair.verdict for pair in pairs)
    alone = [len({one.key for one in side}) - len(pairs) for side in (old, new)]
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _ORDER)
    out.print(f"{len(pairs)} rows on both sides: {verdicts}; {alone[0]} only in OLD, {alone[1]} only in NEW", highlight=False)
    return 1 if options.fail_on_loss and (failed or counts[_WORSE]) else 0


def _read(source: str) -> list[Recorded]:
    """The rows of PATH or PATH@COMMIT."""
    path, at, commit = source.rpartition("@")
    whole = not at or Path(source).exists()
    return read([Path(source if whole else path)], None if whole else commit)


def _cells(pair: Pair) -> list[str]:
    row = pair.new.row
    sides = [
        text
        for summary in (pair.old.row.summary, row.summary)
        for text in (figure(summary.median), f"{figure(summary.p20)}..{figure(summary.p80)}", str(summary.n))
    ]
    change = "from 0" if pair.change is None else f"{100 * pair.change:+.1f} %"
    return [pair.verdict, row.suite, row.workload, row.system, row.metric, *sides, change, row.unit]
