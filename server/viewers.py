"""What those who look at the page are sent: the server's state and the map of memory, as server-sent events.

    one ticker ── state, every TICK_S ──────────────┐
    one mapper ── map, as often as it is new ───────┴──> the last of each ──> each viewer, as fast as it reads

Nothing is done while nobody looks. Who reads slowly misses what was in between, and keeps nobody waiting.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec

from vmmkv.server.client import EngineClient
from vmmkv.server.latency import Times
from vmmkv.server.memory_maps import MapUnavailable
from vmmkv.server.metrics import Metrics
from vmmkv.server.protocol import Ready, Snapshot
from vmmkv.server.rates import Rates

TICK_S: Final = 0.5
WINDOW_S: Final = 2.0
"""Rates are those of so long."""
MAX_VIEWERS: Final = 64
MAX_REQUESTS: Final = 50
"""Of those in flight so many are told, the oldest first."""


class TooManyViewers(Exception):
    """There is a limit, and it is reached."""


class Viewers:
    """All who look at one server. `health` gives what /health answers, `model` what clients call it."""

    def __init__(self, engine: EngineClient, metrics: Metrics, health: Callable[[], Any], model: str) -> None:
        self._engine = engine
        self._metrics = metrics
        self._health = health
        self._model = model
        self._last: dict[str, str] = {}
        """By kind, the event that came last."""
        self._news: set[asyncio.Event] = set()
        """One for each viewer."""
        self._closed = False
        self._snapshots: deque[tuple[float, Snapshot]] = deque(maxlen=1 + round(WINDOW_S / TICK_S))
        self._totals: dict[str, deque[tuple[int, float]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def watch(self) -> AsyncIterator[str]:
        """Events until the server stops. Raises: TooManyViewers."""
        if len(self._news) >= MAX_VIEWERS:
            raise TooManyViewers(f"{MAX_VIEWERS} are looking already, and no more are served; close a page.")
        return self._events()

    def close(self) -> None:
        """The server stops: every stream ends."""
        self._closed = True
        for news in self._news:
            news.set()

    async def _events(self) -> AsyncIterator[str]:
        news, sent = asyncio.Event(), dict[str, str]()
        self._news.add(news)
        try:
            if len(self._news) == 1:
                self._tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._map())]
            while not self._closed:
                news.clear()
                for kind, event in self._last.copy().items():
                    if sent.get(kind) != event:
                        sent[kind] = event
                        yield event
                # A comment now and then finds out who has gone.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(15):
                        await news.wait()
                    continue
                yield ": still here\n\n"
        finally:
            self._news.discard(news)
            if not self._news:
                for task in self._tasks:
                    task.cancel()
                self._tasks, self._last = [], {}
                self._snapshots.clear()
                self._totals.clear()

    def _tell(self, kind: str, data: Any) -> None:
        event = f"event: {kind}\ndata: {msgspec.json.encode(data).decode()}\n\n"
        if self._last.get(kind) != event:
            self._last[kind] = event
            for news in self._news:
                news.set()

    async def _tick(self) -> None:
        while True:
            self._tell("state", self._state())
            await asyncio.sleep(TICK_S)

    async def _map(self) -> None:
        while True:
            if isinstance(self._engine.phase, Ready):
                with contextlib.suppress(MapUnavailable):
                    found = await self._engine.maps.get()
                    self._tell("map", {name: value for name, value in found.items() if name != "took_us"})
            await asyncio.sleep(TICK_S)

    def _state(self) -> dict[str, Any]:
        health, ready = self._health(), self._engine.phase
        now_s = time.perf_counter()
        flights = sorted(self._metrics.in_flight, key=lambda each: each.arrived_s)
        return {
            "model": self._model,
            "health": health.model_dump(),
            "device": ready.device if isinstance(ready, Ready) else None,
            "max_tokens": min(ready.max_tokens, ready.pool_tokens) if isinstance(ready, Ready) else None,
            "memory": memory_of(self._engine.snapshot),
            "rates": self._rates(),
            "first_token_s": self._recent("first", self._engine.first_token_times),
            "token_s": self._recent("token", self._engine.token_times),
            "num_requests": len(flights),
            "requests": [each.describe(now_s) for each in flights[:MAX_REQUESTS]],
        }

    def _rates(self) -> Rates | None:
        new = self._engine.snapshot
        if new is None:
            return None
        # When it came, if it is new: an engine that is idle, or in a long step, has done nothing more until now.
        is_new = not self._snapshots or self._snapshots[-1][1] is not new
        self._snapshots.append((self._engine.snapshot_s if is_new else time.monotonic(), new))
        (first_s, first), (last_s, _) = self._snapshots[0], self._snapshots[-1]
        return Rates.between(first, new, last_s - first_s) if first is not new else Rates.between(new, new, TICK_S)

    def _recent(self, name: str, times: Times) -> float | None:
        """The mean of those that came within the window; None if none did."""
        seen = self._totals.setdefault(name, deque(maxlen=1 + round(WINDOW_S / TICK_S)))
        seen.append(times.totals())
        count, sum_s = seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1]
        return sum_s / count if count else None


def memory_of(snapshot: Snapshot | None) -> dict[str, int] | None:
    """Physical memory by what it is for, and how many run and wait."""
    if snapshot is None:
        return None
    return {
        "budget_bytes": snapshot.kv_budget_bytes,
        "created_bytes": snapshot.kv_created_bytes,
        "used_bytes": snapshot.kv_used_bytes,
        "mapped_bytes": snapshot.kv_mapped_bytes,
        "cached_bytes": snapshot.kv_cached_bytes,
        "retiring_bytes": snapshot.kv_retiring_bytes,
        "free_bytes": snapshot.kv_free_bytes,
        "tokens": snapshot.kv_tokens,
        "running": snapshot.running,
        "waiting": snapshot.waiting,
    }
