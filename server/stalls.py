"""Clients that do not read: one that keeps its connection and takes nothing would keep its place for as long as it likes."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Final

from vmmkv.server.http import limits

log = logging.getLogger(__name__)

STALL_S: Final = 60.0
"""How long a piece of an answer may take to be taken."""


class Answering:
    """One request's way out. Set `since_s` (of the loop's time) while something is being sent, and None when it is sent."""

    __slots__ = ("name", "since_s", "stalled", "task")

    def __init__(self, task: "asyncio.Task[object]", name: str) -> None:
        self.task = task
        self.name = name
        self.since_s: float | None = None
        self.stalled = False


class Stalls:
    """Ends requests whose clients take nothing for `stall_s`. Costs nothing for each piece but to note the time."""

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._answering: set[Answering] = set()
        self._sweeping: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[Answering]:
        """Around one request, in its task, which is cancelled if it stalls; that ends with the block."""
        task = asyncio.current_task()
        assert task is not None, "requests are tasks"
        one = Answering(task, limits.current.get())
        self._answering.add(one)
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="stalls")
        try:
            yield one
        except asyncio.CancelledError:
            if not one.stalled:
                raise
            task.uncancel()
        finally:
            self._answering.discard(one)

    async def _sweep(self) -> None:
        """For as long as there are requests."""
        loop = asyncio.get_running_loop()
        while self._answering:
            await asyncio.sleep(self._stall_s / 4)
            before_s = loop.time() - self._stall_s
            for one in self._answering:
                if one.since_s is not None and one.since_s < before_s and not one.stalled:
                    log.warning("the client of request %s has read nothing for %g s: it is let go", one.name, self._stall_s)
                    one.stalled = True
                    one.task.cancel()
        self._sweeping = None
