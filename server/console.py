"""What is shown while something takes long: the engine's start, and many prompts."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import IO, Any, Final, NoReturn, Self, TypeVar

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from structlog.typing import EventDict, Processor

from vmmkv.server.protocol import Loading

# -------- progress

_SHOWN_S: Final = 0.2
"""How often the figures of a bar are new: often enough to look alive, and no burden on a step of a millisecond."""


class LoadingProgress:
    """The engine's start: on a terminal a bar for each stage, elsewhere a line for each that has ended, such as in a log."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._task: TaskID | None = None
        self._stage: str | None = None
        self._began_s = 0.0

    def show(self, loading: Loading) -> None:
        """The engine is at this stage now; those before are over."""
        if loading.stage == self._stage:
            return
        self._end_stage()
        self._stage, self._began_s = loading.stage, time.perf_counter()
        if self.console.is_terminal:
            self._progress.start()
            # How long a stage takes is not known, so that its bar moves to and fro until it is over.
            self._task = self._progress.add_task(loading.stage, total=None)

    def close(self, *, done: bool) -> None:
        """`done` if the engine is ready: else the stage it was at is left as one that has not ended. Idempotent."""
        if done:
            self._end_stage()
        self._stage = None
        if self._task is not None:
            self._progress.stop()
            self._task = None

    def _end_stage(self) -> None:
        if self._stage is None:
            return
        if self._task is not None:
            self._progress.update(self._task, total=1, completed=1)
            self._progress.stop_task(self._task)
        else:
            took_s = time.perf_counter() - self._began_s
            self.console.print(f"{self._stage}: {took_s:.1f} s", highlight=False, markup=False)


class GenerationProgress:
    """Requests that are done, of all, and tokens a second. Nothing is shown unless `shown`."""

    def __init__(self, num_requests: int, *, shown: bool) -> None:
        columns = (
            TextColumn("generating"),
            BarColumn(),
            TextColumn("{task.completed:,} of {task.total:,} requests"),
            TextColumn("{task.fields[rates]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not shown, auto_refresh=False)
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
        """How far it is. Costs next to nothing unless some time has passed since the last one."""
        now_s = time.perf_counter()
        if not self._shown or (now_s - self._shown_s < _SHOWN_S and not at_end):
            return
        self._shown_s = now_s
        took_s = max(1e-9, now_s - self._began_s)
        rates = f"{num_prompt_tokens / took_s:,.0f} tok/s in, {num_new_tokens / took_s:,.0f} tok/s out"
        self._progress.update(self._task, completed=num_done, rates=rates)
        self._progress.refresh()


# -------- interrupt
# Ctrl-C in the middle of work that must not stop anywhere.


class DeferredInterrupt:
    """Within the `with` block a Ctrl-C waits for the next `check`, which raises KeyboardInterrupt; a second one does not wait.

    That is so in the main thread, where Python's signal handlers run; in others nothing changes.
    """

    def __init__(self) -> None:
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._came = False

    def __enter__(self) -> Self:
        handler = signal.getsignal(signal.SIGINT)
        # One that is ignored, or that ends the process at once, stays so.
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._previous = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            if error is None:
                self.check()

    def check(self) -> None:
        """Do what the Ctrl-C was for, if one came: call the handler that was there before, by default Python's own.

        Raises: KeyboardInterrupt, from that handler.
        """
        if self._came:
            self._came = False
            assert self._previous is not None
            self._previous(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            assert self._previous is not None
            self._previous(number, frame)
        self._came = True


# -------- ending
# The end of a process, without the interpreter's last look at a million objects: that takes seconds, and frees nothing.

T = TypeVar("T")


def end(code: int) -> NoReturn:
    """End this process now; what was written and logged is on its way. Its children and files are its caller's business."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # whoever read it is gone
            code = code or 1
    os._exit(code)


async def in_daemon(function: Callable[[], T]) -> T:
    """As asyncio.to_thread, in a thread that nobody waits for at the end: asyncio.run waits for all of its own."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(value)  # type: ignore[arg-type]  # it is the function's

    def work() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = function(), None
        except BaseException as error:
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, *outcome)

    threading.Thread(target=work, daemon=True).start()
    return await ended


# -------- logs
# How both processes log: lines for people, or an object of JSON a line for machines; what libraries log, too.
#
# All goes through `logging`: values that belong to a message are its `extra`. What is logged while a request is served
# has its id.

_SHARED: Final[tuple[Processor, ...]] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def configure_logging(level: str, log_format: str, file: IO[str] | None = None) -> None:
    """Once for each process: levels and formats as in ServeConfig, to stderr by default."""
    file = file or sys.stderr
    if log_format == "json":
        render: list[Processor] = [_drop_colours, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback
        render = [_drop_colours, structlog.dev.ConsoleRenderer(colors=file.isatty(), exception_formatter=plain, pad_event_to=0)]
    handler = logging.StreamHandler(file)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_SHARED, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _drop_colours(_: object, __: str, event: EventDict) -> EventDict:
    """uvicorn says some things twice, the second time in colour."""
    event.pop("color_message", None)
    return event


def bind_request(request_id: str) -> None:
    """From now on what this task logs, and what it starts, has the id."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


class LogLines:
    """A file whose lines are logged: for what prints to a console, where each line is to be an object of JSON."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._begun = ""

    def write(self, text: str) -> int:
        """Log the lines that are complete."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            self._logger.info("%s", line.rstrip())
        return len(text)

    def flush(self) -> None:
        """Nothing: a line that is not complete waits for its end."""
