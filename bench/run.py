"""The command line: `python -m bench run|report|compare|table`; `python -m bench SUITE...` is short for `run --suite SUITE...`.

Each suite also runs by itself, as `python -m bench.append`.
"""

import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final

import torch

from bench import cli, suites
from bench.failures import add_failed
from bench.marks import Marks
from bench.report import Report
from bench.rows import FAILED, Provenance, RowFile
from bench.settings import Settings
from bench.suites import ALL, SUITES
from bench.timing import warm_clock

__all__ = ["ALL", "SUITES", "main", "run"]

_COMMANDS: Final = {"table": "bench.table", "report": "bench.page", "compare": "bench.compare"}
"""Modules whose `main` is told what comes behind."""


def main(arguments: Sequence[str] | None = None) -> int:
    """What the command line says. The exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command, behind = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in _COMMANDS:
        command_main: Callable[[Sequence[str]], int] = import_module(_COMMANDS[command]).main
        return command_main(behind)
    if command in ("-h", "--help"):
        cli.print_help()
        return 0
    if command == "run":
        return run(cli.parse(behind, short=False))
    return run(cli.parse(arguments, short=True))


def run(options: cli.Options) -> int:
    """Run suites, piece by piece; 1 if any of them failed. Those behind a failed one still run."""
    settings = options.settings
    torch.manual_seed(settings.seed)
    provenance = Provenance.collect(settings.device, seed=settings.seed, quick=settings.quick, commit=options.commit)
    report = Report(RowFile(options.out, provenance))
    marks = Marks(options.out, provenance)
    if options.resume and marks.refusal:
        report.say(f"--resume: {marks.refusal}")
    warm_clock(settings.device)
    pieces = [(name, piece, of_piece) for name in options.suites for piece, of_piece in suites.pieces(name, settings).items()]
    failed: list[str] = []
    for index, (name, piece, of_piece) in enumerate(pieces, 1):
        report.remark(f"[{index}/{len(pieces)}] {piece}")
        if options.resume and (when := marks.finished(piece, of_piece)):
            report.say(f"skipped: {piece} finished at {when}")
            continue
        began_s = time.monotonic()
        if _succeeds(name, piece, of_piece, report):
            marks.add(piece, of_piece)
        else:
            failed.append(piece)
        report.remark(f"[{index}/{len(pieces)}] {piece}: {time.monotonic() - began_s:.1f} s")
    for name in options.suites:
        if any(row.suite == name for row in report.rows):
            suites.print_tables(name, report)
    report.say(f"{len(report.rows)} rows appended under {options.out}; bench/README.md says what they do and do not show")
    if failed:
        report.say(f"FAILED: {', '.join(failed)}; see the tracebacks above, and the rows `{FAILED}`")
    return 1 if failed else 0


def _succeeds(name: str, piece: str, settings: Settings, report: Report) -> bool:
    """Run a piece of a suite. What it has written a row `failed` of has failed, whether it raised or not."""
    num_before = len(report.rows)
    try:
        suites.load(name).run(settings, report)
    except Exception as error:
        add_failed(report, name, piece, error)
        return False
    return all(row.metric != FAILED for row in report.rows[num_before:])
