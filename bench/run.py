"""The command line: `python -m bench run|report|compare|table`; `python -m bench SUITE...` is short for `run --suite SUITE...`.

Each suite also runs by itself, as `python -m bench.append`.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Final

import torch

from bench import cli, suites
from bench.failures import add_failed
from bench.gpu_clocks import watched
from bench.marks import Marks
from bench.report import Report
from bench.rows import FAILED, Provenance, Row, RowFile
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
        with _sigterm_as_ctrl_c():
            return _main(arguments)
    except KeyboardInterrupt as interrupt:
        print(f"stopped by {_who(interrupt)}", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM, as `timeout` sends it, ends a run as Ctrl-C does: what it has started is ended too."""
    if threading.current_thread() is not threading.main_thread():  # no other may have a handler
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        # `timeout` sends a second one, to the group, which would break off the ending.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _who(interrupt: KeyboardInterrupt) -> str:
    return str(interrupt) or "Ctrl-C"


def _main(arguments: Sequence[str]) -> int:
    command, behind = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in _COMMANDS:
        try:
            command_main: Callable[[Sequence[str]], int] = import_module(_COMMANDS[command]).main
        except ModuleNotFoundError as error:
            print(f"python -m bench {command}: no package {error.name}; `pip install -e '.[bench]'` brings it", file=sys.stderr)
            return 1
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
    """Run suites, piece by piece; 1 if any of them failed. Those behind a failed one still run.

    Ctrl-C or SIGTERM ends it, with tables.
    """
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
        interrupted = None
    except KeyboardInterrupt as interrupt:
        interrupted = _who(interrupt)
    for name in options.suites:
        if any(row.suite == name for row in report.rows):
            suites.print_tables(name, report)
    report.say(f"{len(report.rows)} rows appended under {options.out}; bench/README.md says what they do and do not show")
    if failed:
        report.say(f"FAILED: {', '.join(failed)}; see the tracebacks above, and the rows `{FAILED}`")
    if interrupted:
        how = f"with --resume {marks.refusal}" if marks.refusal else "continue with --resume"
        report.say(f"stopped by {interrupted}; {how}")
        return INTERRUPTED
    return 1 if failed else 0


def _run_pieces(options: cli.Options, report: Report, marks: Marks, failed: list[str]) -> None:
    """All of them; the names of those that fail are added to `failed`."""
    for name in options.suites:
        for what, why in suites.absent(name, options.settings).items():
            report.say(f"absent: {name} {what}: {why}")
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
    clocks: list[Row] = []
    try:
        with watched(settings.device, name, piece) as clocks:
            suites.load(name).run(settings, report)
    except Exception as error:
        add_failed(report, name, piece, error)
        return False
    report.add(*clocks)
    return all(row.metric != FAILED for row in report.rows[num_before:])
