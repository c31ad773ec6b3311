"""Work that waits for its turn, with a share for each of those who ask: who asks for much waits for himself.

begin ── a place in the owner's own line ── the lines take turns ──> at most `at_once` at work ── end
"""

import asyncio
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")


class QueueFull(Exception):
    """Too much waits: try again in a while."""


class ShareFull(QueueFull):
    """Too much of one owner's waits; others are still let in."""


class Turns:
    """Of one kind of work, `of`, of which `at_once` are done at once, and `most`, if not all that come, wait or are done.

    With `shared` one owner has at most a quarter of the places, and not all of what is done at once where that is several.
    Use within one event loop.
    """

    def __init__(self, of: str, *, at_once: int, shared: bool, most: float = math.inf) -> None:
        self.most_each = max(1, math.floor(most / 4)) if shared and most < math.inf else most
        self._of = of
        self._most = most
        self._free = at_once
        self._at_once_each = max(1, at_once - 1) if shared else at_once
        self._here: Counter[Hashable] = Counter()
        """Of each owner, waiting or at work."""
        self._at_work: Counter[Hashable] = Counter()
        self._lines: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()
        """Whose turn is next stands first. Nobody waits who could be at work."""

    async def begin(self, owner: Hashable) -> None:
        """Wait for a turn, which `end` gives back. Raises: ShareFull, QueueFull."""
        if self._here[owner] >= self.most_each < self._most:
            raise ShareFull(f"{self._here[owner]} {self._of} of this key wait already, and no more may.")
        if self._here.total() >= self._most:
            raise QueueFull(f"{self._most} {self._of} wait already.")
        self._here[owner] += 1
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append(place)
        self._call_next()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.end(owner)
            else:
                self._leave(self._here, owner)  # its place in the line is skipped
            raise

    def end(self, owner: Hashable) -> None:
        """The work is done."""
        self._free += 1
        self._leave(self._at_work, owner)
        self._leave(self._here, owner)
        self._call_next()

    async def in_thread(self, owner: Hashable, work: Callable[[], T]) -> T:
        """Work that is done in a thread; who goes away meanwhile keeps the turn until it is done. Raises: as `begin`."""
        await self.begin(owner)
        working = asyncio.create_task(asyncio.to_thread(work))

        def ended(_: "asyncio.Task[T]") -> None:
            self.end(owner)
            if not working.cancelled():
                working.exception()  # has been looked at, also where nobody waits any more

        working.add_done_callback(ended)
        return await asyncio.shield(working)

    def _call_next(self) -> None:
        for owner in list(self._lines):
            if not self._free:
                return
            if self._at_work[owner] >= self._at_once_each:
                continue
            line = self._lines.pop(owner)
            while line and line[0].cancelled():
                line.popleft()
            if line:
                line.popleft().set_result(None)
                self._free -= 1
                self._at_work[owner] += 1
            if line:
                self._lines[owner] = line

    def _leave(self, count: Counter[Hashable], owner: Hashable) -> None:
        count[owner] -= 1
        if not count[owner]:
            del count[owner]
