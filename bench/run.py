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
from bench.suites import ALL, GROUPS, SUITES
from bench.timing import warm_clock

__all__ = ["ALL", "SUITES", "main", "run"]

_COMMANDS: Final = {"table": "bench.table", "report": "bench.page", "compare": "bench.compare"}
"""Modules whose `main` is told what comes behind."""

INTERRUPTED: Final = 130
"""The exit status of what Ctrl-C has ended, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """What the command line says. The exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED


def _main(arguments: Sequence[str]) -> int:
    command, behind = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in _COMMANDS:
        command_main: Callable[[Sequence[str]], int] = import_module(_COMMANDS[command]).main
        return command_main(behind)
    if command in ("-h", "--help"):
        cli.print_help()
        return 0
    if command == "run":
        return run(cli.parse(behind, short=False))
    if not command.startswith("-") and command not in SUITES and command not in GROUPS:
        cli.refuse_command(command)
    return run(cli.parse(arguments, short=True))


def run(options: cli.Options) -> int:
    """Run suites, piece by piece; 1 if any of them failed. Those behind a failed one still run; Ctrl-C ends it, with tables."""
    settings = options.settings
    torch.manual_seed(settings.seed)
    provenance = Provenance.collect(settings.device, seed=settings.seed, quick=settings.quick, commit=options.commit)
    report = Report(RowFile(options.out, provenance))
    marks = Marks(options.out, provenance)
    if options.resume and marks.refusal:
        report.say(f"--resume: {marks.refusal}")
    failed: list[str] = []
    try:
        warm_clock(settings.device)
        _run_pieces(options, report, marks, failed)
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    for name in options.suites:
        if any(row.suite == name for row in report.rows):
            suites.print_tables(name, report)
    report.say(f"{len(report.rows)} rows appended under {options.out}; bench/README.md says what they do and do not show")
    if failed:
        report.say(f"FAILED: {', '.join(failed)}; see the tracebacks above, and the rows `{FAILED}`")
    if interrupted:
        how = f"with --resume {marks.refusal}" if marks.refusal else "continue with --resume"
        report.say(f"stopped by Ctrl-C; {how}")
        return INTERRUPTED
    return 1 if failed else 0


def _run_pieces(options: cli.Options, report: Report, marks: Marks, failed: list[str]) -> None:
    """All of them; the names of those that fail are added to `failed`."""
    pieces = [
        (name, piece, of_piece) for name in options.suites for piece, of_piece in suites.pieces(name, options.settings).items()
    ]
    finished = {piece: marks.finished(piece, of_piece) for _, piece, of_piece in pieces} if options.resume else {}
    if options.resume and not marks.refusal and not any(finished.values()):
        report.say(f"--resume: nothing of this has finished in {options.out} by the same commit, device, seed and options")
    for index, (name, piece, of_piece) in enumerate(pieces, 1):
        report.remark(f"[{index}/{len(pieces)}] {piece}")
        if when := finished.get(piece):
            report.say(f"skipped: {piece} finished at {when}")
            continue
        began_s = time.monotonic()
        if _succeeds(name, piece, of_piece, report):
            marks.add(piece, of_piece)
        else:
            failed.append(piece)
        report.remark(f"[{index}/{len(pieces)}] {piece}: {time.monotonic() - began_s:.1f} s")


def _succeeds(name: str, piece: str, settings: Settings, report: Report) -> bool:
    """Run a piece of a suite. What it has written a row `failed` of has failed, whether it raised or not."""
    num_before = len(report.rows)
    try:
        suites.load(name).run(settings, report)
    except Exception as error:
        add_failed(report, name, piece, error)
        return False
    return all(row.metric != FAILED for row in report.rows[num_before:])
