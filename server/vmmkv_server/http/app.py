"""The HTTP application: OpenAI's completions and chat completions, tokenizing, health, metrics, the page.

    request ── Origins ── Guard ── route ── check ── tokenise ── submit ── JSON, or a stream of events

`generation.Service` is the state that the routes share. The app starts nothing; `launch` does.
"""

import functools
from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST

from vmmkv import __version__
from vmmkv_server.engine_client import EngineClient, RequestFailed
from vmmkv_server.http import errors, generation, page, responses, responses_api, schemas
from vmmkv_server.http.errors import ApiError, ErrorBody
from vmmkv_server.http.generation import Service
from vmmkv_server.http.limits import AdmissionQueue, Guard, Origins, RequestState
from vmmkv_server.protocol import Forget, Manage, Managed, Resize, Sleep, WakeUp


def create_app(service: Service) -> FastAPI:
    """The application over one service."""
    app = FastAPI(title="vmmkv", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False, responses=_ERRORS)
    # Made once: it takes a tenth of a second of the event loop.
    app.openapi = functools.cache(lambda: _document(app, service.model))  # type: ignore[method-assign]
    # For the document alone: keys are checked in Guard.
    needs_key = [Depends(HTTPBearer(scheme_name="key", auto_error=False))] if service.queue.needs_key else []

    @app.get("/health", response_model=responses.Health, responses={503: {"model": responses.Health}})
    async def health() -> JSONResponse:
        """200 when requests are taken, else 503 with the reason."""
        state = service.health()
        return JSONResponse(state.model_dump(), status_code=200 if state.status == "ok" else 503)

    routers = (
        _generation_routes(service),
        responses_api.routes(service),
        _server_routes(service),
        page.routes(service),
        _admin_routes(service.engine, service.queue),
    )
    for router in routers:
        app.include_router(router, dependencies=needs_key)
    errors.install(app, [route for router in (app, *routers) for route in router.routes])
    refused = service.metrics.refused
    app.add_middleware(
        Guard, queue=service.queue, hosts=service.hosts, on_refused=lambda status: refused.labels(str(status)).inc()
    )
    # Outside of all others: a browser asks with neither key nor body, and shows an error only to a page that may read it.
    app.add_middleware(Origins, allowed=service.config.allowed_origins, hosts=service.hosts)
    return app


def _generation_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", response_model=responses.Completion, responses=_STREAMED)
    async def completions(request: Request, body: schemas.CompletionRequest) -> Response:
        """Continue each prompt; each has `n` choices of the answer."""
        return await generation.answer(service, request, body, responses.CompletionForm)

    @router.post("/v1/chat/completions", response_model=responses.ChatCompletion, responses=_STREAMED)
    async def chat_completions(request: Request, body: schemas.ChatRequest) -> Response:
        """The assistant's next turn."""
        return await generation.answer(service, request, body, responses.ChatForm)

    @router.post("/v1/completions/render", response_model=list[responses.RenderedRequest])
    async def render_completions(request: Request, body: schemas.CompletionRequest) -> Response:
        """Each prompt as token ids, with its sampling parameters: what the engine would get."""
        return await generation.render(service, request, body, responses.CompletionForm)

    @router.post("/v1/chat/completions/render", response_model=responses.RenderedRequest)
    async def render_chat(request: Request, body: schemas.ChatRequest) -> Response:
        """The conversation as token ids, with its sampling parameters: what the engine would get."""
        return await generation.render(service, request, body, responses.ChatForm)

    @router.post("/tokenize", response_model=responses.Tokens)
    async def tokenize(request: Request, body: schemas.TokenizeRequest) -> Response:
        """The token ids of a text."""
        return await generation.tokenize(service, request, body)

    @router.post("/detokenize")
    async def detokenize(request: Request, body: schemas.DetokenizeRequest) -> responses.DetokenizedText:
        """The text of token ids, special tokens among it."""
        return await generation.detokenize(service, request, body)

    return router


def _server_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/version")
    async def version() -> responses.Version:
        """Version of the package."""
        return responses.Version(version=__version__)

    @router.get("/server_info")
    async def server_info() -> responses.ServerInfo:
        """Description of the served model, under vLLM's names."""
        return responses.ServerInfo.of(service.engine.require_ready(), service.model)

    @router.get("/kv_event_sources")
    async def kv_event_sources() -> dict[str, responses.KVEventSource]:
        """Addresses of KV events by data-parallel rank; empty if they are off."""
        source = service.engine.require_ready().kv_events
        return {} if source is None else {"0": responses.KVEventSource.model_validate(source, from_attributes=True)}

    sees_all = [Depends(service.queue.require_sees_all)]

    @router.get("/metrics", response_class=Response, responses=_METRICS, dependencies=sees_all)
    async def metrics() -> Response:
        """Metrics for Prometheus; answers in every state."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/models")
    async def models() -> responses.ModelList:
        """The one model."""
        return responses.ModelList(data=[service.describe()])

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> responses.ModelCard:
        """The one model, by its name."""
        service.check_name(name)
        return service.describe()

    return router


def _admin_routes(engine: EngineClient, queue: AdmissionQueue) -> APIRouter:
    router = APIRouter(dependencies=[Depends(_require_administrator)])

    @router.post("/kv/reset")
    async def reset(body: schemas.ResetRequest) -> responses.KVMemory:
        """Forget every prefix that no running request uses."""
        return await manage(Forget())

    @router.post("/kv/resize")
    async def resize(body: schemas.ResizeRequest) -> responses.KVMemory:
        """Give KV memory back to the device, or take more, while requests run."""
        try:
            return await manage(Resize(budget_bytes=body.budget_bytes))
        except RequestFailed as error:
            raise ApiError(400, str(error), param="budget_bytes", code="invalid_value") from error

    @router.post("/sleep")
    async def sleep(level: int = 1) -> responses.KVMemory:
        """Give all KV memory back to the device, once the requests in flight have ended; weights stay. New requests get 503."""
        if level != 1:
            raise errors.invalid("level", f"{level}; weights stay where they are here, which is level 1")
        engine.require_ready()
        if not await queue.sleep():
            raise ApiError(409, "The server was woken up before the requests in flight had ended.", code="woken_up")
        try:
            return await manage(Sleep())
        except RequestFailed as error:
            queue.is_asleep = False
            raise ApiError(409, str(error), code="cannot_sleep") from error

    @router.post("/wake_up")
    async def wake_up() -> responses.KVMemory:
        """Take KV memory again, as requests need it."""
        queue.is_asleep = False  # the engine reads what comes from now on behind this
        try:
            return await manage(WakeUp())
        except RequestFailed as error:
            queue.is_asleep = True
            raise ApiError(409, str(error), code="cannot_wake_up") from error

    async def manage(message: Manage) -> responses.KVMemory:
        done: Managed = await engine.manage(message)
        return responses.KVMemory.model_validate(done, from_attributes=True)

    return router


async def _require_administrator(request: Request) -> None:
    state: RequestState = request.state.request
    if not state.caller.is_admin:
        raise errors.not_the_administrator()


# The OpenAPI document.

_ABOUT: Final = "OpenAI's API over one model. Every error has the form of ErrorBody, and every answer an X-Request-Id."
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be answered."},
    "5XX": {"model": ErrorBody, "description": "The server cannot answer."},
}
_METRICS: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_STREAMED: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {"text/event-stream": {}}}}
"""Events have no schema in OpenAPI 3.1."""


def _document(app: FastAPI, model: str) -> dict[str, Any]:
    """The OpenAPI document, with the one model that a body may name."""
    whole: dict[str, Any] = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
    for schema in whole["components"]["schemas"].values():
        if schema["title"].endswith("Request") and "model" in schema["properties"]:
            schema["properties"]["model"] = {"enum": [model, None], "title": "Model"}
    return whole
