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
    """The engine's start as progress bars, one for each stage; on what is no terminal, as they stand at the end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed} of {task.total}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._tasks: dict[str, TaskID] = {}

    def show(self, loading: Loading) -> None:
        """Bring the stage's bar to where the engine is."""
        if not self._tasks:
            self._progress.start()
        if loading.stage not in self._tasks:
            self._tasks[loading.stage] = self._progress.add_task(loading.stage, total=loading.total)
        self._progress.update(self._tasks[loading.stage], completed=loading.done, total=loading.total)

    def close(self) -> None:
        """Leave the bars as they stand. Idempotent."""
        self._progress.stop()


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
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
