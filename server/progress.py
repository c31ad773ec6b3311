"""What is shown while something takes long: the engine's start, and many prompts."""

import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vmmkv.server.protocol import Loading

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
