"""Requests of an operator to a running engine: a map of its memory, another budget, no cached prefixes, a sleep.

    ask ── work, work, work ... ── send                 a slice of a map: slots, until SLICE_US have passed

A step waits for at most a slice and one slot. While there is work, maps take at most `1 / REST` of the time.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from vmmkv import KVCache, VmmkvError
from vmmkv.memory.states import SlotMap
from vmmkv.units import format_bytes
from vmmkv_server.engine.kv_backend import SlotBackend
from vmmkv_server.engine.loading import Loaded
from vmmkv_server.protocol import Forget, FromEngine, Manage, Managed, MemoryMap, Resize, Sleep

log = logging.getLogger(__name__)

SLICE_US: Final = 250.0
"""Time for a map between two steps."""

STORE_S: Final = 30.0
"""Time for tiers to take what is cached before it goes."""

REST: Final = 100.0
"""While there is work, the next map waits this many times as long as the last one took."""

_AT_ONCE: Final = 16
"""The most slots that are read before the clock is. A slot with a thousand extents takes 100 us."""


def manage(loaded: Loaded, message: Manage) -> Managed:
    """Do it between two steps, and answer with what there is then. A refusal changes nothing.

    Cost: a release for each page that goes back to the device; may wait for the steps in flight, and to sleep also for tiers.
    """
    engine, memory, error = loaded.engine, loaded.memory, None
    assert isinstance(memory, SlotBackend), "a baseline has no operator"
    before = memory.stats()
    try:
        if isinstance(message, Forget):
            engine.forget()
        elif isinstance(message, Resize):
            memory.resize(message.budget_bytes)
            log.info("KV cache: %s from now on, %s tokens in all", format_bytes(memory.budget_bytes), memory.num_tokens)
        elif isinstance(message, Sleep):
            engine.drain()
            engine.store_all(STORE_S)
            engine.settle()
            memory.sleep()
            log.info("KV cache: given back until the server is woken up")
        else:
            memory.wake_up()
            log.info("KV cache: %s again", format_bytes(memory.budget_bytes))
        if not isinstance(message, Forget):
            engine.budget_changed()
    except VmmkvError as failure:
        error = str(failure)
    after = memory.stats()
    return Managed(
        error=error,
        freed_bytes=max(
            0, before.pool_held_bytes - after.pool_held_bytes, before.pool_created_bytes - after.pool_created_bytes
        ),
        budget_bytes=memory.budget_bytes,
        pool_tokens=memory.num_tokens,
    )


class MapMaker:
    """Answers `AskMap`. `request_in` names the request in a slot. Without a cache the map is empty."""

    def __init__(
        self, cache: KVCache | None, request_in: Callable[[int], str | None], send: Callable[[FromEngine], None]
    ) -> None:
        self._cache = cache
        self._request_in = request_in
        self._send = send
        self._is_wanted = False
        self._left: list[int] | None = None
        """Slots still to be read, in order; None if no map is being made."""
        self._slots: list[SlotMap] = []
        self._requests: dict[int, str] = {}
        self._took_us = 0.0
        self._slot_us = 0.0
        """The longest time that a slot of this map took; 0 before the first."""
        self._rest_until_s = 0.0

    def ask(self) -> None:
        """A map is wanted."""
        self._is_wanted = True

    def work(self, budget_us: float) -> None:
        """Go on with a wanted map for about `budget_us`, and send it when it is done. Infinite: without a pause."""
        if not self._is_wanted:
            return
        began_s = time.perf_counter()
        if self._left is None:
            if began_s < self._rest_until_s and budget_us < float("inf"):
                return
            self._left = [] if self._cache is None else self._cache.taken_slots()
            self._slots, self._requests, self._took_us, self._slot_us = [], {}, 0.0, 0.0
        until_s, some_began_s = began_s + budget_us / 1e6, began_s
        while self._left and self._cache is not None:
            left_us = (until_s - some_began_s) * 1e6
            count = max(1, int(min(_AT_ONCE, left_us / self._slot_us))) if self._slot_us else 1
            some, self._left = self._left[:count], self._left[count:]
            for found in self._cache.slot_maps(some):
                if any(found.groups):
                    self._slots.append(found)
                if (name := self._request_in(found.slot)) is not None:
                    self._requests[found.slot] = name
            now_s = time.perf_counter()
            self._slot_us = max(self._slot_us, (now_s - some_began_s) * 1e6 / len(some))
            some_began_s = now_s
            if now_s >= until_s:  # checked last: each slice makes progress
                break
        self._took_us += (time.perf_counter() - began_s) * 1e6
        if not self._left:
            self._finish()

    def _finish(self) -> None:
        cache, began_s = self._cache, time.perf_counter()
        self._left, self._is_wanted = None, False
        num_slots, slot_pages = (0, []) if cache is None else (cache.num_slots, cache.slot_pages)
        self._send(
            MemoryMap(
                num_slots=num_slots, slot_pages=slot_pages, slots=self._slots, requests=self._requests, took_us=self._took_us
            )
        )
        now_s = time.perf_counter()
        self._took_us += (now_s - began_s) * 1e6
        self._rest_until_s = now_s + self._took_us * REST / 1e6
