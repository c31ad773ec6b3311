"""The page at `/`, the stream of events that feeds it, and the live memory map.

    one ticker ── state, every TICK_S ───────────┐
    one mapper ── map, as often as it changes ───┴──> the last of each ──> each viewer, as fast as it reads

The page is the files of this folder, with no data in them: it asks for data as any client does. Its policy lets it load
nothing but this server's files. Nothing runs while there is no viewer.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Depends, Response
from fastapi.responses import StreamingResponse

from vmmkv.units import PAGE_BYTES
from vmmkv_server.engine_client import MapUnavailable
from vmmkv_server.http import errors
from vmmkv_server.http.generation import Service
from vmmkv_server.latencies import Times
from vmmkv_server.metrics import Rates
from vmmkv_server.protocol import Ready, Snapshot

TICK_S: Final = 0.5
WINDOW_S: Final = 2.0
"""Rates are taken over so long."""
MAX_VIEWERS: Final = 64
MAX_REQUESTS: Final = 50
"""Requests in flight that are listed, the oldest first."""
_WINDOW_TICKS: Final = 1 + round(WINDOW_S / TICK_S)
_ALIVE_S: Final = 15
"""A comment so often finds out which viewers have gone."""

_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


FILES: Final[dict[str, tuple[bytes, str]]] = {
    entry.name: (entry.read_bytes(), _TYPES[suffix])
    for entry in resources.files(__name__).iterdir()
    if (suffix := "." + entry.name.rpartition(".")[2]) in _TYPES
}
"""Content and type of the page's files by name: a name that is asked for is never a path."""


class Dashboard:
    """The state of one server for all viewers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._engine = service.engine
        self._last: dict[str, str] = {}
        """The last event of each kind."""
        self._news: set[asyncio.Event] = set()
        """One for each viewer."""
        self._closed = False
        self._snapshots: deque[tuple[float, Snapshot]] = deque(maxlen=_WINDOW_TICKS)
        self._totals: dict[str, deque[tuple[int, float]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def watch(self) -> AsyncIterator[str]:
        """Server-sent events until the server stops. Raises: ApiError (503) if there are too many viewers."""
        if len(self._news) >= MAX_VIEWERS:
            raise errors.unavailable(f"{MAX_VIEWERS} are looking already, and no more are served; close a page.")
        return self._events()

    def close(self) -> None:
        """End every stream."""
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
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ALIVE_S):
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
        phase, now_s = self._engine.phase, time.perf_counter()
        ready = phase if isinstance(phase, Ready) else None
        flights = sorted(self._service.in_flight, key=lambda each: each.arrived_s)
        return {
            "model": self._service.model,
            "health": self._service.health().model_dump(),
            "device": ready and ready.device,
            "max_tokens": ready and ready.limits.max_tokens,
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
        # At its own time, if it is new: an idle engine, or one in a long step, has done nothing more until now.
        is_new = not self._snapshots or self._snapshots[-1][1] is not new
        self._snapshots.append((self._engine.snapshot_s if is_new else time.monotonic(), new))
        (first_s, first), (last_s, _) = self._snapshots[0], self._snapshots[-1]
        return Rates.between(first, new, last_s - first_s)

    def _recent(self, name: str, times: Times) -> float | None:
        """The mean of the times within the window; None without any."""
        seen = self._totals.setdefault(name, deque(maxlen=_WINDOW_TICKS))
        seen.append(times.totals())
        count, sum_s = seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1]
        return sum_s / count if count else None


def memory_of(snapshot: Snapshot | None) -> dict[str, Any] | None:
    """Physical memory by use, what each tier holds and has given, and how many sequences run and wait."""
    if snapshot is None:
        return None
    numbers, scheduler = snapshot.memory.values() | snapshot.features, snapshot.scheduler
    memory = {name.removeprefix("kv_"): number for name, number in numbers.items() if name.startswith("kv_")}
    tiers = {
        name: {
            "held": tier.held_bytes,
            "budget": tier.budget_bytes,
            "loaded": tier.loaded_bytes,
            "hit_tokens": scheduler.hit_tokens.get(name, 0),
        }
        for name, tier in snapshot.tiers.items()
    }
    return memory | {"tiers": tiers, "running": scheduler.requests_running, "waiting": scheduler.requests_waiting}


def routes(service: Service) -> APIRouter:
    """The page, its stream, and the memory map. The stream ends when the server stops."""
    router, dashboard, engine = APIRouter(), Dashboard(service), service.engine
    service.at_stop.append(dashboard.close)
    sees_all = [Depends(service.queue.require_sees_all)]

    @router.get("/", include_in_schema=False)
    async def index() -> Response:
        return await file("index.html")

    @router.get("/page/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in FILES:
            raise errors.ApiError(404, f"There is no {name!r} here.", code="not_found")
        content, media_type = FILES[name]
        return Response(content, media_type=media_type, headers=_HEADERS)

    @router.get("/kv", dependencies=sees_all)
    async def kv() -> Response:
        """The live memory map: what is mapped under each slot, and the uses of memory."""
        engine.require_ready()
        found: dict[str, Any] = await engine.maps.get()
        told = {"page_bytes": PAGE_BYTES, "memory": memory_of(engine.snapshot), **found}
        return Response(msgspec.json.encode(told), media_type="application/json")

    @router.get("/events", include_in_schema=False, dependencies=sees_all)
    async def events() -> Response:
        stream = dashboard.watch()
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    return router
