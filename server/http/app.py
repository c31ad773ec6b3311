"""The routes: OpenAI's completions and chat completions, models, health and metrics."""

import asyncio
import contextlib
import functools
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field, model_validator
from starlette.types import Receive, Scope, Send

from vmmkv import __version__
from vmmkv.server.config import FrontConfig
from vmmkv.server.engine_client import Dead, EngineClient, EngineDead, EngineNotReady, RequestFailed, Watchdog
from vmmkv.server.hosts import Hosts
from vmmkv.server.http import errors, limits, page
from vmmkv.server.http.errors import ApiError, bad_request
from vmmkv.server.http.generation import (
    Candidate,
    Generation,
    GrammarService,
    TextDelta,
    check_min_tokens,
    check_priority,
    check_prompt_logprobs,
    check_token_ids,
    engine_requests,
    fit_beams,
    fit_key,
    fit_new_tokens,
)
from vmmkv.server.http.limits import AT_END, CALLER, HAS_BEGUN, Caller, Guard, Intake, Keys, Ticket
from vmmkv.server.http.page import Viewers
from vmmkv.server.http.responses import Answer, ChatAnswer, CompletionAnswer
from vmmkv.server.http.schemas import (
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    Completion,
    CompletionRequest,
    ErrorBody,
    GenerationRequest,
    Health,
    Model,
    ModelList,
    TemplateVariables,
    Unserved,
    Version,
    WireRequest,
    refusal,
)
from vmmkv.server.metrics import Metrics
from vmmkv.server.protocol import Forget, Loading, Managed, Ready, Resize
from vmmkv.server.stalls import Stalls
from vmmkv.server.tokenizer import INLINE_CHARS, Away, Echo, PromptError, Tokenizer
from vmmkv.server.turns import QueueFull, Turns
from vmmkv.units import counted

# -------- token routes
# /tokenize and /detokenize, as vLLM has them: what a prompt or a conversation is to the model, and back.

Require = Callable[[str | None], tuple[Ready, Tokenizer]]
"""The engine's limits and the tokenizer of a model, the one there is if None. Raises: ApiError."""
AwayFor = Callable[[Request], Away]
"""How what takes long is done for whoever sent a request."""


class TokenizeRequest(WireRequest):
    """POST /tokenize: one prompt, or one conversation in the model's chat template."""

    unserved: ClassVar[Unserved] = {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "chat_template": (),
        "tools": ([],),
        "mm_processor_kwargs": ({},),
    }
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: bool = True
    """Whether a prompt gets the model's own start token, as /v1/completions gives it one; templates write their own."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "send either prompt or messages")
        if self.chat_template_kwargs and self.messages is None:
            raise refusal("chat_template_kwargs", "chat_template_kwargs is only for messages")
        return self


class Tokens(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    """Tokens that one request can have, with its answer."""
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(WireRequest):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class Text(BaseModel):
    """The answer of /detokenize."""

    prompt: str


def token_routes(require: Require, away_for: AwayFor) -> APIRouter:
    """The two routes."""
    routes = APIRouter()

    @routes.post("/tokenize", response_model=Tokens)
    async def tokenize(request: Request, body: TokenizeRequest) -> Response:
        """The token ids of a text."""
        ready, tokenizer = require(body.model)
        away = away_for(request)
        try:
            if body.messages is not None:
                ids = await tokenizer.encode_chat(body.messages, body.chat_template_kwargs, away=away)
            else:
                assert body.prompt is not None
                (ids,) = await tokenizer.encode([body.prompt], add_special_tokens=body.add_special_tokens, away=away)
        except PromptError as error:
            param = "prompt" if body.messages is None else "messages"
            raise bad_request(f"Invalid {param}: {error}.", param=param, code="invalid_value") from error
        limit = min(ready.max_tokens, ready.pool_tokens)

        def answer() -> Response:
            texts = list(map(tokenizer.texts.text_of, ids)) if body.return_token_strs else None
            tokens = Tokens.model_construct(count=len(ids), max_model_len=limit, tokens=ids, token_strs=texts)
            return Response(tokens.model_dump_json(), media_type="application/json")

        found: Response = answer() if len(ids) <= INLINE_CHARS else await away(answer)
        return found

    @routes.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeRequest) -> Text:
        """The text of token ids, special tokens among it."""
        _, tokenizer = require(body.model)
        try:
            (text,) = await tokenizer.said([body.tokens], skip_special_tokens=False, away=away_for(request))
        except PromptError as error:
            raise bad_request(f"Invalid tokens: {error}.", param="tokens", code="invalid_value") from error
        return Text(prompt=text)

    return routes


# -------- admin routes
# /kv/reset and /kv/resize: what only the administrator may do. Without an admin key there are no such routes.


class ResetRequest(WireRequest):
    """POST /kv/reset: `{}`."""


class ResizeRequest(WireRequest):
    """POST /kv/resize."""

    budget_bytes: Annotated[int, Field(ge=1, lt=1 << 62)]
    """What --kv-budget was."""


class Memory(BaseModel):
    """What there is now."""

    freed_bytes: int
    """That were held and are free, or the device's again."""
    budget_bytes: int
    pool_tokens: int
    """Tokens of one sequence that the budget holds."""


def admin_routes(engine: EngineClient) -> APIRouter:
    """The two routes."""
    routes = APIRouter(dependencies=[Depends(_require_administrator)])

    @routes.post("/kv/reset")
    async def reset(body: ResetRequest) -> Memory:
        """Forget every prefix that no running request uses."""
        return await _manage(engine, Forget())

    @routes.post("/kv/resize")
    async def resize(body: ResizeRequest) -> Memory:
        """Give KV memory back to the device, or take more, while requests run."""
        return await _manage(engine, Resize(budget_bytes=body.budget_bytes))

    return routes


async def _require_administrator(request: Request) -> None:
    caller = getattr(request.state, CALLER)
    assert isinstance(caller, Caller)
    if not caller.is_admin:
        raise errors.not_the_administrator()


async def _manage(engine: EngineClient, message: Forget | Resize) -> Memory:
    try:
        managed: Managed = await engine.manage(message)
    except (EngineNotReady, EngineDead) as error:
        raise errors.unavailable(str(error)) from error
    except RequestFailed as error:
        raise errors.bad_request(str(error), param="budget_bytes", code="invalid_value") from error
    return Memory(freed_bytes=managed.freed_bytes, budget_bytes=managed.budget_bytes, pool_tokens=managed.pool_tokens)


# -------- document
# The OpenAPI document of a server: what FastAPI knows of the routes, and what it cannot know.
#
# That all errors have one form, that an answer may be a stream, which model there is, and whether a key is wanted.

_ERROR: Final = {"$ref": "#/components/schemas/ErrorBody"}
_STREAMED: Final = ("/v1/completions", "/v1/chat/completions")
_OPEN: Final = ("/health",)


def document(app: FastAPI, *, model: str, has_keys: bool) -> dict[str, Any]:
    """The document, made anew. `model` is the only one that requests can name."""
    whole: dict[str, Any] = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
    schemas: dict[str, Any] = whole.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    of_errors = ErrorBody.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(of_errors.pop("$defs"))
    schemas["ErrorBody"] = of_errors
    for name in ("CompletionRequest", "ChatRequest", "TokenizeRequest", "DetokenizeRequest"):
        _name_the_model(schemas[name]["properties"], model)
    if has_keys:
        whole["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in whole["paths"].items():
        for operation in operations.values():
            answers = operation["responses"]
            answers.pop("422", None)
            for status, what in (("4XX", "The request cannot be answered."), ("5XX", "The server cannot answer.")):
                answers.setdefault(status, {"description": what, "content": {"application/json": {"schema": _ERROR}}})
            if path in _STREAMED:
                answers["200"]["content"]["text/event-stream"] = {}  # its events have no schema in OpenAPI 3.1
            if has_keys and path not in _OPEN:
                operation["security"] = [{"key": []}]
    return whole


def _name_the_model(properties: dict[str, Any], model: str) -> None:
    given = properties["model"]
    is_optional = "anyOf" in given
    properties["model"] = {"enum": [model, None] if is_optional else [model], "title": given["title"]}


_ABOUT: Final = "OpenAI's API over one model. Every error has the form of ErrorBody, and every answer an X-Request-Id."


# -------- app

log = logging.getLogger(__name__)

T = TypeVar("T")
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions. A chat may go on as long as it fits."""
INLINE_LOGPROBS = 512
"""Those that are written in a few milliseconds: not worth the way to another thread and back."""
QUEUED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""What the engine works on."""
TOKENISING_AT_ONCE = 4
"""Texts that are long: a short one takes no turn."""
MAX_TOKENISING = 4096
WRITING_AT_ONCE = 2
"""Answers of many log-probabilities. As many may wait as requests are in flight: what is finished is not turned away."""

router = APIRouter()


class Service:
    """What the routes work with: one model, its engine, and its tokenizer once that is loaded; who may ask for how much."""

    def __init__(self, engine: EngineClient, model: str, front: FrontConfig | None = None, hosts: Hosts | None = None) -> None:
        self.front = front or FrontConfig()
        self.hosts = hosts or Hosts(self.front.allowed_hosts)
        self.engine = engine
        self.model = model
        self.metrics = Metrics(engine)
        self.viewers = Viewers(engine, self.metrics, self.health, model)
        self.keys = Keys(self.front.api_keys, self.front.admin_key)
        self.grammars = GrammarService()
        self.tokenising = Turns("long texts", at_once=TOKENISING_AT_ONCE, most=MAX_TOKENISING, shared=self.keys.are_several)
        self.writing = Turns("long answers", at_once=WRITING_AT_ONCE, shared=self.keys.are_several)
        self.intake = Intake(engine, self.front)
        self.watchdog = Watchdog(engine.silent_s, self.front.stuck_after_s)
        self.stalls = Stalls()
        self.tokenizer: Tokenizer | None = None
        self.created = int(time.time())
        self._drained_by_s: float | None = None

    def health(self) -> Health:
        """Whether requests can be taken, and if not, why."""
        match self.engine.phase:
            case Dead(reason=reason):
                return Health(status="dead", reason=reason)
            case Loading(stage=stage, done=done, total=total):
                return Health(status="loading", reason=f"{stage}: {done} of {total}")
            case Ready():
                if self._drained_by_s is not None:
                    still = counted(self.intake.num_sequences, "sequence")
                    return Health(status="draining", reason=f"still in flight: {still}")
                if (complaint := self.watchdog.complaint()) is not None:
                    return Health(status="stuck", reason=complaint)
                loading = self.tokenizer is None
                return Health(status="loading", reason="the tokenizer") if loading else Health(status="ok")

    async def drain(self) -> bool:
        """Take no more requests, and wait for those in flight, up to the drain timeout; have they all ended?"""
        self._drained_by_s = time.monotonic() + self.front.drain_timeout_s
        while self.intake.num_sequences and time.monotonic() < self._drained_by_s:
            await asyncio.sleep(0.02)
        return not self.intake.num_sequences

    def check_room(self) -> None:
        """Raises: ApiError if no request can be taken now: 503 while draining, 429 while the queue is full."""
        if self._drained_by_s is not None:
            left_s = max(1, math.ceil(self._drained_by_s - time.monotonic()))
            raise errors.unavailable("The server is shutting down.", retry_after_s=left_s)
        self.intake.check_room()

    def away(self, request: Request, wanted_s: float | None = None, arrived_s: float | None = None) -> Away:
        """A long text is read in a thread when its sender's turn comes, if the client is there then, and the time not over.

        Raises, then: ApiError (408, 429, 499, 503).
        """
        caller = getattr(request.state, CALLER)
        arrived_s = time.perf_counter() if arrived_s is None else arrived_s

        async def away(work: Callable[[], Any]) -> Any:
            try:
                done = await _in_time(request, self.tokenising.in_thread(caller, work), self.timeout_s(wanted_s), arrived_s)
            except QueueFull as error:
                raise errors.no_turn(error) from error
            if done is None:
                raise errors.client_left()
            return done

        return away

    def writes(self, request: Request) -> Away:
        """A long answer is written in a thread when its sender's turn comes."""
        return functools.partial(self.writing.in_thread, getattr(request.state, CALLER))

    def timeout_s(self, wanted_s: float | None) -> float | None:
        """How long a request may take that asked for so much."""
        return min((each for each in (wanted_s, self.front.request_timeout_s) if each is not None), default=None)

    def require(self, model: str | None) -> tuple[Ready, Tokenizer]:
        """The engine's limits and the tokenizer. Raises: ApiError, 404 for another model, 503 while not ready."""
        if model is not None and model != self.model:
            raise errors.model_not_found(model, self.model)
        try:
            ready = self.engine.require_ready()
        except (EngineNotReady, EngineDead) as error:
            raise errors.unavailable(str(error)) from error
        if self.tokenizer is None:
            raise errors.unavailable("The tokenizer is loading; try again in a while.")
        return ready, self.tokenizer

    def describe(self) -> Model:
        """The model as /v1/models shows it."""
        ready = self.engine.phase
        if not isinstance(ready, Ready):
            return Model(id=self.model, created=self.created)
        reach = min(ready.max_tokens, ready.pool_tokens)
        return Model(id=self.model, created=self.created, max_model_len=reach, implementation=ready.implementation)


class _App(FastAPI):
    """With a document of its own."""

    def openapi(self) -> dict[str, Any]:
        """What /openapi.json shows: made once, for it takes a tenth of a second of the event loop."""
        if self.openapi_schema is None:
            service = self.state.service
            assert isinstance(service, Service)
            self.openapi_schema = document(self, model=service.model, has_keys=service.keys.are_required)
        return self.openapi_schema


def create_app(service: Service) -> FastAPI:
    """The application over one service. It starts nothing; `launch` does."""
    app = _App(title="vmmkv", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(router)
    page.install(app, service.engine, service.viewers, service.keys)
    app.include_router(token_routes(service.require, service.away))
    if service.front.admin_key is not None:
        app.include_router(admin_routes(service.engine))
    errors.install(app)
    app.add_middleware(
        Guard,
        keys=service.keys,
        max_body_bytes=service.front.max_body_bytes,
        queued_paths=QUEUED_PATHS,
        check_room=service.check_room,
        on_refused=lambda status: service.metrics.refused.labels(str(status)).inc(),
        hosts=service.hosts,
        stalls=service.stalls,
    )
    return app


def _service(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


@router.get("/health", response_model=Health, responses={503: {"model": Health}})
async def health(request: Request) -> JSONResponse:
    """200 when requests are taken, else 503 with the reason."""
    state = _service(request).health()
    return JSONResponse(state.model_dump(), status_code=200 if state.status == "ok" else 503)


@router.get("/version")
async def version() -> Version:
    """Of the package."""
    return Version(version=__version__)


@router.get("/metrics", response_class=PlainTextResponse, dependencies=[Depends(page.may_see)])
async def metrics(request: Request) -> Response:
    """For Prometheus; answers in every state."""
    return Response(_service(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
async def models(request: Request) -> ModelList:
    """The one model."""
    return ModelList(data=[_service(request).describe()])


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Model:
    """The one model, by its name."""
    service = _service(request)
    if name != service.model:
        raise errors.model_not_found(name, service.model)
    return service.describe()


@router.post("/v1/completions", response_model=Completion)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue each prompt; each has `n` choices of the answer."""
    service, arrived_s = _service(request), time.perf_counter()
    ready, tokenizer = service.require(body.model)
    ticket = _enter(request, body)
    away = service.away(request, body.timeout, arrived_s)
    try:
        prompts = await tokenizer.encode(body.prompt, away=away)
    except PromptError as error:
        raise bad_request(f"Invalid prompt: {error}.", param="prompt", code="invalid_prompt") from error
    new_tokens = [
        fit_new_tokens(
            len(prompt), body.max_tokens, DEFAULT_COMPLETION_TOKENS, ready, model=service.model, prompt_param="prompt"
        )
        for prompt in prompts
    ]
    check_prompt_logprobs(body, prompts)
    said = echoes = None
    if body.num_prompt_logprobs is not None:
        echoes = await tokenizer.echoes(body.prompt, prompts, away=away)
    elif body.echo:
        said = [text for text in await tokenizer.said(body.prompt, away=away) for _ in range(body.num_choices)]
    answer = CompletionAnswer(f"cmpl-{uuid.uuid4().hex}", service.model, tokenizer.texts, said)
    return await _respond(
        request, body, ticket, answer, prompts, new_tokens, continues=True, echoes=echoes, arrived_s=arrived_s
    )


@router.post("/v1/chat/completions", response_model=ChatCompletion)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """The assistant's next turn."""
    service, arrived_s = _service(request), time.perf_counter()
    ready, tokenizer = service.require(body.model)
    ticket = _enter(request, body)
    try:
        away = service.away(request, body.timeout, arrived_s)
        prompt = await tokenizer.encode_chat(body.messages, body.chat_template_kwargs, away=away)
    except PromptError as error:
        raise bad_request(f"Invalid messages: {error}.", param="messages", code="invalid_messages") from error
    wanted = body.wanted_tokens
    new_tokens = fit_new_tokens(len(prompt), wanted, None, ready, model=service.model, prompt_param="messages")
    answer = ChatAnswer(f"chatcmpl-{uuid.uuid4().hex}", service.model, tokenizer.texts)
    return await _respond(request, body, ticket, answer, [prompt], [new_tokens], continues=False, arrived_s=arrived_s)


def _enter(request: Request, body: GenerationRequest) -> Ticket:
    """A place for a request until its answer is sent. Raises: ApiError (429; 503: a drain may have begun since its headers)."""
    service, caller, at_end = _service(request), getattr(request.state, CALLER), getattr(request.state, AT_END)
    assert isinstance(caller, Caller) and isinstance(at_end, contextlib.ExitStack)
    service.check_room()
    ticket = service.intake.enter(caller, body.widest[1] * body.num_prompts)
    at_end.callback(ticket.close)
    return ticket


async def _respond(
    request: Request,
    body: GenerationRequest,
    ticket: Ticket,
    answer: Answer,
    prompts: list[list[int]],
    new_tokens: list[int],
    *,
    continues: bool,
    echoes: Sequence[Echo] | None = None,
    arrived_s: float,
) -> Response:
    """Start the generation and answer with it, whole or as a stream; `continues` says that it goes on in the prompt's text.

    `echoes` are the prompts, where their tokens are scored too.
    """
    service = _service(request)
    ready, tokenizer = service.require(body.model)
    fit_beams(body, ready)
    check_priority(body, may_go_first=service.keys.sees_all(ticket.caller))
    check_token_ids(body, tokenizer.vocab_size)
    limit = service.intake.key_limit(ticket.caller)
    new_tokens = fit_key(body, prompts, new_tokens, limit)
    check_min_tokens(body, new_tokens)
    num_each = body.widest[1]
    num_prompt = num_each * sum(map(len, prompts))
    ticket.reserve(num_prompt, num_prompt + num_each * sum(new_tokens))
    namespace = service.keys.namespace(ticket.caller, body.cache_salt)
    compiled = await _compiled(request, body, ready, namespace, arrived_s)
    if compiled is None:
        return errors.client_left().response()
    grammar, spared_s = compiled
    service.require(body.model)  # again: the engine may have died while the prompt was tokenised and the grammar compiled
    requests = engine_requests(body, answer.id, prompts, new_tokens, namespace=namespace, grammar=grammar)
    candidates = [
        Candidate(
            tokenizer.detokenizer(body.stop, prompt if continues else (), min_tokens=body.min_tokens or 0),
            scored=body.num_logprobs is not None,
            echo=None if echoes is None else echoes[index],
        )
        for index, prompt in enumerate(prompts)
        for _ in range(body.num_candidates)
    ]
    generation = Generation(
        service.engine,
        service.metrics,
        requests,
        candidates,
        num_prompts=len(prompts),
        num_choices=body.num_choices,
        arrived_s=arrived_s,
        timeout_s=service.timeout_s(body.timeout),
        spared_s=spared_s,
        at_end=not body.stream and not body.stop,
    )
    setattr(request.state, HAS_BEGUN, True)
    if body.stream:
        opening = answer.opening(len(prompts) * body.num_choices)
        return _EventStream(_events(answer, opening, generation, body, service.writes(request)), generation.close)
    try:
        whole = await _unless_disconnected(request, _whole(answer, generation, service.writes(request)))
    except (RequestFailed, EngineDead) as error:
        raise _api_error(error) from error
    finally:
        generation.close()
    if whole is None:
        return errors.client_left().response()
    return Response(whole, media_type="application/json")


async def _compiled(
    request: Request, body: GenerationRequest, ready: Ready, namespace: str | None, arrived_s: float
) -> tuple[bytes, float] | None:
    """What the answer follows, for the engine, and the seconds by which the request's time is longer; None if the client went
    away. Raises: ApiError, also when the time is over."""
    service, (_, grammar) = _service(request), body.grammar
    if grammar is None:
        return b"", 0.0
    starting = service.grammars.start(grammar, ready, namespace=namespace)
    spared_s = await _unless_disconnected(request, _while_engine_lives(service, starting))
    if spared_s is None:
        return None
    work = service.grammars.compiled(body, ready, namespace=namespace)
    work = _while_engine_lives(service, work)
    compiled = await _in_time(request, work, service.timeout_s(body.timeout), arrived_s + spared_s)
    return None if compiled is None else (compiled, spared_s)


async def _in_time(request: Request, work: Coroutine[Any, Any, T], timeout_s: float | None, arrived_s: float) -> T | None:
    """The result of `work`, or None, and `work` cancelled, if the client goes away before. Raises: ApiError (408) when the
    request's time is over."""
    left_s = None if timeout_s is None else arrived_s + timeout_s - time.perf_counter()
    try:
        async with asyncio.timeout(left_s):
            return await _unless_disconnected(request, work)
    except TimeoutError as error:
        assert timeout_s is not None
        raise errors.too_late(timeout_s) from error


async def _whole(answer: Answer, generation: Generation, away: Away) -> str:
    """As JSON."""
    deltas: dict[int, list[TextDelta]] = {}
    async for delta in generation.deltas():
        deltas.setdefault(delta.index, []).append(delta)
    choices = [TextDelta.joined(place, deltas[index]) for place, index in enumerate(generation.chosen())]
    return await _written(lambda: answer.whole(choices, generation.usage()), choices, away)


async def _written(make: Callable[[], BaseModel], deltas: Sequence[TextDelta], away: Away) -> str:
    """JSON of what is made of these, off the event loop if they have many log-probabilities."""

    def write() -> str:
        return make().model_dump_json()

    is_short = sum(delta.num_logprobs for delta in deltas) <= INLINE_LOGPROBS
    written: str = write() if is_short else await away(write)
    return written


async def _events(
    answer: Answer, opening: Sequence[BaseModel], generation: Generation, body: GenerationRequest, away: Away
) -> AsyncIterator[str]:
    """Server-sent events; an error after the start can only be one of them, for the status is sent."""

    def counted(chunk: BaseModel) -> BaseModel:
        return chunk.model_copy(update={"usage": generation.usage()}) if body.includes_usage_so_far else chunk

    def chunk_of(delta: TextDelta) -> BaseModel:
        return counted(answer.chunk(delta))

    try:
        for chunk in opening:
            yield _event(counted(chunk))
        async for delta in generation.deltas():
            yield f"data: {await _written(functools.partial(chunk_of, delta), [delta], away)}\n\n"
        if body.include_usage:
            yield _event(answer.closing(generation.usage()))
    except ApiError as error:
        yield _event(error.body)
    except (RequestFailed, EngineDead) as error:
        yield _event(_api_error(error).body)
    except Exception as error:
        log.exception("the stream of request %s failed", limits.current.get())
        yield _event(errors.unexpected(error).body)
    yield "data: [DONE]\n\n"


def _event(body: BaseModel) -> str:
    return f"data: {body.model_dump_json()}\n\n"


def _api_error(error: RequestFailed | EngineDead) -> ApiError:
    return errors.internal_error(str(error)) if isinstance(error, RequestFailed) else errors.unavailable(str(error))


class _EventStream(StreamingResponse):
    """A stream that calls `close` at its end, however it ends: also when its client left before it began."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _while_engine_lives(service: Service, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, unless the engine dies, or the server ends, before. Raises: ApiError (503)."""
    working, dying = asyncio.create_task(work), asyncio.create_task(service.engine.dead.wait())
    try:
        await asyncio.wait((working, dying), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            service.require(None)
        return await working
    finally:
        working.cancel()
        dying.cancel()


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None, and `work` cancelled, if the client goes away before."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        working.cancel()
        watching.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
