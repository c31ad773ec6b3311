"""The routes of those who look: the page, the stream that feeds it, and the map of memory.

The page is files of this package, with no data in them: it asks for data as any client does. Its policy lets it load and reach
nothing but this server, and run no script that is not a file.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from vmmkv.server.engine_client import EngineClient, EngineDead, EngineNotReady, MapUnavailable
from vmmkv.server.http import errors
from vmmkv.server.http.limits import CALLER, Keys
from vmmkv.server.metrics import Metrics, Rates, Times
from vmmkv.server.protocol import Ready, Snapshot
from vmmkv.units import PAGE_BYTES

# -------- viewers
# What those who look at the page are sent: the server's state and the map of memory, as server-sent events.
#
#     one ticker ── state, every TICK_S ──────────────┐
#     one mapper ── map, as often as it is new ───────┴──> the last of each ──> each viewer, as fast as it reads
#
# Nothing is done while nobody looks. Who reads slowly misses what was in between, and keeps nobody waiting.

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


# -------- seeing

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def _files() -> dict[str, tuple[bytes, str]]:
    """All of the page, by name: so a name that is asked for is never a path."""
    found = {}
    for entry in resources.files(__name__).iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix in _TYPES:
            found[entry.name] = (entry.read_bytes(), _TYPES[suffix])
    return found


FILES: Final = _files()

router = APIRouter()


def install(app: FastAPI, engine: EngineClient, viewers: Viewers, keys: Keys) -> None:
    """Add the routes. What all are doing is shown to whom `keys` says."""
    app.state.engine, app.state.viewers, app.state.keys = engine, viewers, keys
    app.include_router(router)


async def may_see(request: Request) -> None:
    """For what all are doing together. Raises: ApiError (403)."""
    keys: Keys = request.app.state.keys
    if not keys.sees_all(getattr(request.state, CALLER)):
        raise errors.not_the_administrator()


@router.get("/", include_in_schema=False)
async def index() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def file(name: str) -> Response:
    """A file of the page."""
    if name not in FILES:
        raise errors.ApiError(404, f"There is no {name!r} here.", type="invalid_request_error", code="not_found")
    return _file(name)


def _file(name: str) -> Response:
    content, media_type = FILES[name]
    return Response(content, media_type=media_type, headers=HEADERS)


@router.get("/kv", dependencies=[Depends(may_see)])
async def kv(request: Request) -> Response:
    """The live memory map: what is mapped under each slot, and what memory is for."""
    engine: EngineClient = request.app.state.engine
    try:
        engine.require_ready()
        found: dict[str, Any] = await engine.maps.get()
    except (EngineNotReady, EngineDead, MapUnavailable) as error:
        raise errors.unavailable(str(error)) from error
    told = {"page_bytes": PAGE_BYTES, "memory": memory_of(engine.snapshot), **found}
    return Response(msgspec.json.encode(told), media_type="application/json")


@router.get("/events", include_in_schema=False, dependencies=[Depends(may_see)])
async def events(request: Request) -> Response:
    """State and map for as long as somebody looks, as server-sent events."""
    viewers: Viewers = request.app.state.viewers
    try:
        stream = viewers.watch()
    except TooManyViewers as error:
        raise errors.unavailable(str(error)) from error
    return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
