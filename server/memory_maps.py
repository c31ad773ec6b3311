"""The live memory map as clients have it: asked of the engine at most every `FRESH_S`, however many look.

A prefix that several slots map has a number, from 0, which stays its own while any two of them do.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from vmmkv.server.protocol import AskMap, MemoryMap, Message

FRESH_S: Final = 0.25
"""A map that is younger is given again."""

Run: TypeAlias = tuple[int, int, int, str, int, int | None]
"""Group of layers, first page, pages, state, slots that map it, number of the prefix (None: the slot's own)."""
_Key: TypeAlias = tuple[int, int, int]
"""Group, page, handle: where a run begins. Two slots have a prefix in common at the same pages."""


class MapUnavailable(Exception):
    """There is nobody who could say what is mapped."""


class MemoryMaps:
    """The maps of one engine. `send` takes what is to be sent to it."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._last: dict[str, Any] | None = None
        self._taken_s = 0.0
        self._coming: asyncio.Future[dict[str, Any]] | None = None
        self._prefixes: dict[_Key, int] = {}
        self._dead: str | None = None

    async def get(self, *, within_s: float = 10.0) -> dict[str, Any]:
        """A map of now, or of a moment ago. Raises: MapUnavailable."""
        if self._dead is not None:
            raise MapUnavailable(self._dead)
        if self._last is not None and time.monotonic() - self._taken_s < FRESH_S:
            return self._last
        if self._coming is None:
            self._coming = asyncio.get_running_loop().create_future()
            self._coming.add_done_callback(_looked_at)
            self._send(AskMap())
        try:
            # Not wait_for, which before Python 3.12 loses the cancellation of who goes away just as the map comes. Shielded:
            # who goes away takes nothing from the others who wait.
            async with asyncio.timeout(within_s):
                return await asyncio.shield(self._coming)
        except TimeoutError:
            raise MapUnavailable(f"The engine has sent no map in {within_s:g} s; it may be in a long step.") from None

    def take(self, message: MemoryMap) -> None:
        """The engine has sent one."""
        self._last, self._taken_s = self._drawn(message), time.monotonic()
        if self._coming is not None and not self._coming.done():
            self._coming.set_result(self._last)
        self._coming = None

    def fail(self, reason: str) -> None:
        """No more come."""
        self._dead = reason
        if self._coming is not None and not self._coming.done():
            self._coming.set_exception(MapUnavailable(reason))
        self._coming = None

    def _drawn(self, message: MemoryMap) -> dict[str, Any]:
        shared: Counter[_Key] = Counter(
            (group, run.page, run.handle)
            for each in message.slots
            for group, runs in enumerate(each.groups)
            for run in runs
            if run.num_holders > 1
        )
        self._number({key: count for key, count in shared.items() if count > 1})
        slots = []
        for each in message.slots:
            runs: list[Run] = []
            for group, own in enumerate(each.groups):
                for page, num_pages, state, _, handle in own:
                    key = (group, page, handle)
                    prefix = self._prefixes.get(key)
                    runs.append((group, page, num_pages, state.value, 1 if prefix is None else shared[key], prefix))
            name = message.requests.get(each.slot)
            slots.append(
                {"slot": each.slot, "state": each.state.name.lower(), "tokens": each.num_tokens, "request": name, "runs": runs}
            )
        return {
            "num_slots": message.num_slots,
            "slot_pages": message.slot_pages,
            "took_us": round(message.took_us),
            "slots": slots,
        }

    def _number(self, shared: dict[_Key, int]) -> None:
        """Keep the numbers of prefixes that are still there, and give new ones the least that are free."""
        kept = {key: number for key, number in self._prefixes.items() if key in shared}
        taken, number = set(kept.values()), 0
        for key in sorted(shared.keys() - kept.keys()):
            while number in taken:
                number += 1
            kept[key] = number
            taken.add(number)
        self._prefixes = kept


def _looked_at(future: "asyncio.Future[dict[str, Any]]") -> None:
    """Nobody need wait for it any more when it fails."""
    if not future.cancelled():
        future.exception()
