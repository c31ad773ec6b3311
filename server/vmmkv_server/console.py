"""Terminal and process: progress, Ctrl-C, and how processes end. Imports the library's own dependencies alone."""

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from vmmkv_server.protocol import Loading

_REFRESH_S: Final = 0.2
_PR_SET_PDEATHSIG: Final = 1  # from <sys/prctl.h>


class LoadingProgress:
    """The engine's start: a bar for each stage on a terminal, elsewhere a line for each finished stage."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console)
        self._task: TaskID | None = None
        self._stage: str | None = None
        self._began_s = 0.0

    def show(self, loading: "Loading") -> None:
        """Show this stage as running, and those before as finished."""
        if loading.stage == self._stage:
            return
        self._finish_stage()
        self._stage, self._began_s = loading.stage, time.perf_counter()
        if self.console.is_terminal:
            self._progress.start()
            self._task = self._progress.add_task(loading.stage, total=None)  # its duration is unknown

    def close(self, *, done: bool) -> None:
        """End the display; with `done` the last stage is shown as finished. Idempotent."""
        if done:
            self._finish_stage()
        self._stage = None
        if self._task is not None:
            self._progress.stop()
            self._task = None

    def _finish_stage(self) -> None:
        if self._task is not None:
            self._progress.update(self._task, total=1, completed=1)
            self._progress.stop_task(self._task)
        elif self._stage is not None:
            took_s = time.perf_counter() - self._began_s
            self.console.print(f"{self._stage}: {took_s:.1f} s", highlight=False, markup=False)


class GenerationProgress:
    """A bar of finished requests, with tokens per second; a context manager. Shows nothing unless `shown`."""

    def __init__(self, num_requests: int, *, shown: bool) -> None:
        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            TextColumn("{task.completed:,} of {task.total:,} requests"),
            TextColumn("{task.fields[rates]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=num_requests, rates="")
        self._shown = shown
        self._began_s = self._shown_s = time.perf_counter()

    def __enter__(self) -> Self:
        if self._shown:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._shown:  # else rich may print an empty line
            self._progress.stop()

    def update(self, num_done: int, num_prompt_tokens: int, num_new_tokens: int, *, at_end: bool = False) -> None:
        """Show these counts, at most every 0.2 s but for the end."""
        now_s = time.perf_counter()
        if not self._shown or (now_s - self._shown_s < _REFRESH_S and not at_end):
            return
        self._shown_s = now_s
        took_s = max(1e-9, now_s - self._began_s)
        rates = f"{num_prompt_tokens / took_s:,.0f} tok/s in, {num_new_tokens / took_s:,.0f} tok/s out"
        self._progress.update(self._task, completed=num_done, rates=rates)
        self._progress.refresh()


_DEFERRED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
"""Signals whose handlers often raise, as of the lock of a pool."""


class DeferredInterrupt:
    """A block in which handlers of signals wait for the next `check`, or for the block's end. A second Ctrl-C does not wait.

    Works in the main thread, where Python runs signal handlers; elsewhere it does nothing.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: dict[int, None] = {}

    def __enter__(self) -> Self:
        for number in _DEFERRED if threading.current_thread() is threading.main_thread() else ():
            handler = signal.getsignal(number)
            if callable(handler):  # SIG_IGN and SIG_DFL are not, and stay
                self._previous[number] = handler
                signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if error is not None:
            self._came.pop(signal.SIGINT, None)
        self.check()

    def check(self) -> None:
        """Call the handlers of signals that came. Raises: KeyboardInterrupt, from Python's own handler of Ctrl-C."""
        while self._came:
            number, _ = self._came.popitem()
            self._previous[number](number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self._came:
            self._previous[number](number, frame)
        self._came[number] = None


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn`, or what a fork calls first: the kernel kills the child when the thread that starts it ends, however that
    happens.

    An engine that outlived its parent would keep the GPU's memory, and a compiler of a grammar a core.
    """
    libc, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)

    return prepare


def end(code: int) -> NoReturn:
    """Flush logs and streams, and end this process without the interpreter's cleanup, which takes seconds."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # its reader is gone
            code = code or 1
    os._exit(code)
