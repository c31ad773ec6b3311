"""The routes of those who look: the page, the stream that feeds it, and the map of memory.

The page is files of this package, with no data in them: it asks for data as any client does. Its policy lets it load and reach
nothing but this server, and run no script that is not a file.
"""

from importlib import resources
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from vmmkv.server import api_errors
from vmmkv.server.client import EngineClient, EngineDead, EngineNotReady
from vmmkv.server.guard import CALLER
from vmmkv.server.keys import Keys
from vmmkv.server.memory_maps import MapUnavailable
from vmmkv.server.viewers import TooManyViewers, Viewers, memory_of
from vmmkv.units import PAGE_BYTES

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
    for entry in resources.files("vmmkv.server").joinpath("page").iterdir():
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
        raise api_errors.not_the_administrator()


@router.get("/", include_in_schema=False)
async def index() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def file(name: str) -> Response:
    """A file of the page."""
    if name not in FILES:
        raise api_errors.ApiError(404, f"There is no {name!r} here.", type="invalid_request_error", code="not_found")
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
        raise api_errors.unavailable(str(error)) from error
    told = {"page_bytes": PAGE_BYTES, "memory": memory_of(engine.snapshot), **found}
    return Response(msgspec.json.encode(told), media_type="application/json")


@router.get("/events", include_in_schema=False, dependencies=[Depends(may_see)])
async def events(request: Request) -> Response:
    """State and map for as long as somebody looks, as server-sent events."""
    viewers: Viewers = request.app.state.viewers
    try:
        stream = viewers.watch()
    except TooManyViewers as error:
        raise api_errors.unavailable(str(error)) from error
    return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
