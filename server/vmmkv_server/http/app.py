"""The HTTP application: OpenAI's completions and chat completions, tokenizing, health, metrics, the page.

    request ── Guard ── route ── tokenise ── check ── compile a grammar ── Generation ── JSON, or a stream of events

`Service` is the state that the routes share. The app starts nothing; `launch` does.
"""

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, Final, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from vmmkv import __version__
from vmmkv.units import counted
from vmmkv_server.config import FrontConfig
from vmmkv_server.engine_client import Dead, EngineClient, EngineDead, RequestFailed, Watchdog
from vmmkv_server.http import errors, page, responses, schemas
from vmmkv_server.http.errors import ApiError, ErrorBody
from vmmkv_server.http.generation import (
    ChoiceStream,
    Deadline,
    Generation,
    GrammarService,
    TextDelta,
    check_prompt_logprobs,
    engine_requests,
    off_loop,
)
from vmmkv_server.http.limits import AdmissionQueue, Guard, RequestState, check_host, current_id
from vmmkv_server.metrics import Metrics
from vmmkv_server.protocol import Forget, Loading, Manage, Managed, Ready, Resize, Sleep, WakeUp
from vmmkv_server.sampling_params import InvalidParam, Limits, RequestRefused, SamplingParams
from vmmkv_server.structured_output.schema import Grammar
from vmmkv_server.tokenizer import Echo, PromptError, TemplateVariable, Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")
INLINE_CHARS: Final = 4096
"""Texts of fewer characters together are tokenised in about a millisecond."""
INLINE_LOGPROBS: Final = 512
"""So many log-probabilities are written in a few milliseconds."""
INLINE_ECHO_TOKENS: Final = 256
"""For so many tokens of prompts, the places in their text are found in about a millisecond."""
COUNTED_BYTES: Final = 1 << 20
"""Of a body of /tokenize. The text of a longer one must be such that its tokens may fit into a request: a tokenizer takes
hundreds of bytes of memory for each character."""
MESSAGE_CHARS: Final = 64
"""A message takes so many characters' time beside its content."""


_CUT_OFF: Final = (
    "the holder of the KV memory is gone: this server goes on with the memory that it has, which does not outlive it, and gets "
    "nothing from other servers; start a holder again, and then the servers that use it"
)


class Service:
    """One model: its engine, its tokenizer once that is loaded, and admission to it."""

    def __init__(
        self, engine: EngineClient, model: str, front: FrontConfig | None = None, hosts: Collection[str] | None = None
    ) -> None:
        """`hosts`: as of `Guard`."""
        self.front = front or FrontConfig()
        self.hosts = hosts
        self.engine = engine
        self.model = model
        self.metrics = Metrics(engine, model)
        self.in_flight: set[Generation] = set()
        self.queue = AdmissionQueue(engine, self.front)
        self.grammars = GrammarService()
        self.watchdog = Watchdog(engine.silent_s, self.front.stuck_after_s)
        self.dashboard = page.Dashboard(engine, self.in_flight, self.health, model)
        self.tokenizer: Tokenizer | None = None
        self.created = int(time.time())

    def health(self) -> responses.Health:
        """Whether requests are taken, and if not, why."""
        match self.engine.phase:
            case Dead(reason=reason):
                return responses.Health(status="dead", reason=reason)
            case Loading(stage=stage, done=done, total=total):
                return responses.Health(status="loading", reason=f"{stage}: {done} of {total}")
            case Ready():
                still = f"still in flight: {counted(self.queue.num_sequences, 'sequence')}"
                if self.queue.drained_by_s is not None:
                    return responses.Health(status="draining", reason=still)
                if self.queue.is_asleep:
                    reason = still if self.queue.num_sequences else "POST /wake_up ends it"
                    return responses.Health(status="asleep", reason=reason)
                if (complaint := self.watchdog.complaint()) is not None:
                    return responses.Health(status="stuck", reason=complaint)
                if self.tokenizer is None:
                    return responses.Health(status="loading", reason="the tokenizer")
                is_cut_off = self.engine.snapshot is not None and self.engine.snapshot.holder_is_gone
                return responses.Health(status="ok", reason=_CUT_OFF if is_cut_off else None)

    def check_name(self, model: str | None) -> None:
        """Raises: ApiError (404) for another model, with the name that would work."""
        if model not in (None, self.model):
            message = f"The model {model!r} does not exist; this server has {self.model!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def require(self, model: str | None) -> tuple[Ready, Tokenizer]:
        """The engine's limits and the tokenizer. Raises: EngineNotReady, EngineDead; ApiError: 404 for another model, 503."""
        self.check_name(model)
        ready = self.engine.require_ready()
        if self.tokenizer is None:
            raise errors.unavailable("The tokenizer is loading; try again in a while.")
        return ready, self.tokenizer

    def limits(self, tokenizer: Tokenizer) -> Limits:
        """What one request can have. Raises: EngineNotReady, EngineDead."""
        limits = self.engine.require_ready().limits
        return dataclasses.replace(limits, model=self.model, vocabulary_size=tokenizer.vocab_size)

    def deadline(self, wanted_s: float | None = None) -> Deadline:
        """The end of a request that arrives now and asked for so much time."""
        limits_s = [each for each in (wanted_s, self.front.request_timeout_s) if each is not None]
        return Deadline(time.perf_counter(), min(limits_s, default=None))

    def describe(self) -> responses.ModelCard:
        """The model as /v1/models shows it."""
        card, ready = responses.ModelCard(id=self.model, created=self.created), self.engine.phase
        if isinstance(ready, Ready):
            card.max_model_len, card.implementation = ready.limits.max_tokens, ready.implementation
            card.kv_cache_dtype = ready.kv_cache_dtype
        return card


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
        _server_routes(service),
        page.routes(service.engine, service.dashboard, service.queue),
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
    app.add_middleware(_Origins, allowed=service.front.allowed_origins, hosts=service.hosts)
    return app


class _Origins(CORSMiddleware):
    """CORS. A browser that asks for a page of an origin which is not allowed is told what would allow it, and the log once.

    `hosts` as of `Guard`, which sees no such question.
    """

    def __init__(self, app: ASGIApp, *, allowed: Sequence[str], hosts: Collection[str] | None) -> None:
        super().__init__(
            app,
            allow_origins=allowed,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_credentials=False,  # pages send a key themselves; a browser adds nothing of its own
            expose_headers=["X-Request-Id", "Retry-After"] if allowed else [],
        )
        self._hosts = hosts
        self._has_told = False

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a browser that asks whether a page may send its request."""
        try:
            check_host(request_headers.get("host", ""), self._hosts)
            self._check_origin(request_headers["origin"])
        except ApiError as error:
            return error.response({"Vary": "Origin"})
        return super().preflight_response(request_headers)

    def _check_origin(self, origin: str) -> None:
        if self.is_allowed_origin(origin):
            return
        allowed = f"; allowed are {', '.join(self.allow_origins)}" if self.allow_origins else ""
        message = (
            f"Pages of the origin {origin!r} may not use this server from a browser{allowed}: start it with --allowed-origin "
            "and that origin."
        )
        if not self._has_told:
            self._has_told = True
            log.warning(message)
        raise ApiError(400, message, code="unknown_origin")


def _generation_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", response_model=responses.Completion, responses=_STREAMED)
    async def completions(request: Request, body: schemas.CompletionRequest) -> Response:
        """Continue each prompt; each has `n` choices of the answer."""
        return await _answer(service, request, body, responses.CompletionForm)

    @router.post("/v1/chat/completions", response_model=responses.ChatCompletion, responses=_STREAMED)
    async def chat_completions(request: Request, body: schemas.ChatRequest) -> Response:
        """The assistant's next turn."""
        return await _answer(service, request, body, responses.ChatForm)

    @router.post("/v1/completions/render", response_model=list[responses.RenderedRequest])
    async def render_completions(request: Request, body: schemas.CompletionRequest) -> Response:
        """Each prompt as token ids, with its sampling parameters: what the engine would get."""
        return await _render(service, request, body, responses.CompletionForm.id_prefix)

    @router.post("/v1/chat/completions/render", response_model=responses.RenderedRequest)
    async def render_chat(request: Request, body: schemas.ChatRequest) -> Response:
        """The conversation as token ids, with its sampling parameters: what the engine would get."""
        return await _render(service, request, body, responses.ChatForm.id_prefix)

    @router.post("/tokenize", response_model=responses.Tokens)
    async def tokenize(request: Request, body: schemas.TokenizeRequest) -> Response:
        """The token ids of a text."""
        ready, tokenizer = service.require(body.model)
        limits = service.limits(tokenizer) if len(await request.body()) > COUNTED_BYTES else None
        if body.prompt is None:
            param, work = "messages", _encode_chat(tokenizer, body.messages or (), body.chat_template_kwargs, limits)
        else:
            add_special_tokens = body.add_special_tokens is not False
            encode = functools.partial(tokenizer.encode, body.prompt, limits, add_special_tokens=add_special_tokens)
            param, work = "prompt", off_loop(len(body.prompt), encode, inline=INLINE_CHARS)
        try:
            ids = await _present(service, request, work, service.deadline())
        except PromptError as error:
            raise errors.invalid(param, error) from error
        except RequestRefused as error:
            raise ApiError(400, str(error), param=param, code=error.code) from error
        limit = ready.limits.max_tokens

        def write() -> str:
            texts = list(map(tokenizer.texts.text_of, ids)) if body.return_token_strs else None
            tokens = responses.Tokens.model_construct(count=len(ids), max_model_len=limit, tokens=ids, token_strs=texts)
            return tokens.model_dump_json()

        return Response(await off_loop(len(ids), write, inline=INLINE_CHARS), media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(request: Request, body: schemas.DetokenizeRequest) -> responses.DetokenizedText:
        """The text of token ids, special tokens among it."""
        _, tokenizer = service.require(body.model)
        decode = functools.partial(tokenizer.text_of, body.tokens, skip_special_tokens=False)
        work = off_loop(len(body.tokens), decode, inline=INLINE_CHARS)
        try:
            return responses.DetokenizedText(prompt=await _present(service, request, work, service.deadline()))
        except PromptError as error:
            raise errors.invalid("tokens", error) from error

    return router


def _server_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/version")
    async def version() -> responses.Version:
        """Of the package."""
        return responses.Version(version=__version__)

    @router.get("/server_info")
    async def server_info() -> responses.ServerInfo:
        """What is served, under vLLM's names."""
        return responses.ServerInfo.of(service.engine.require_ready(), service.model)

    @router.get("/kv_event_sources")
    async def kv_event_sources() -> dict[str, responses.KVEventSource]:
        """Where KV events are published, by data-parallel rank; empty if they are off."""
        source = service.engine.require_ready().kv_events
        return {} if source is None else {"0": responses.KVEventSource.model_validate(source, from_attributes=True)}

    sees_all = [Depends(service.queue.require_sees_all)]

    @router.get("/metrics", response_class=Response, responses=_METRICS, dependencies=sees_all)
    async def metrics() -> Response:
        """For Prometheus; answers in every state."""
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


# A generation, from its body to its answer.


async def _tokenise(
    body: schemas.GenerationRequest, tokenizer: Tokenizer, limits: Limits
) -> tuple[list[list[int]], list[Echo] | None]:
    """Token ids of each prompt; with `echo` the texts that answers begin with, and their tokens' places if those are scored.

    Raises: PromptError, RequestRefused, ApiError.
    """
    if isinstance(body, schemas.ChatRequest):
        return [await _encode_chat(tokenizer, body.messages, body.chat_template_kwargs, limits, body.wanted_tokens)], None
    assert isinstance(body, schemas.CompletionRequest)
    num_given = sum(map(len, body.prompt))
    encode = functools.partial(tokenizer.encode, limits=limits, wanted=body.wanted_tokens)
    prompts = await off_loop(num_given, lambda: list(map(encode, body.prompt)), inline=INLINE_CHARS)
    check_prompt_logprobs(body, prompts)
    if body.params.prompt_logprobs is not None:
        num_tokens = sum(map(len, prompts))
        echoes = await off_loop(num_tokens, lambda: list(map(tokenizer.echo, body.prompt, prompts)), inline=INLINE_ECHO_TOKENS)
        return prompts, echoes
    if body.echo:
        texts = await off_loop(num_given, lambda: list(map(tokenizer.text_of, body.prompt)), inline=INLINE_CHARS)
        return prompts, [Echo(text, (), ()) for text in texts]
    return prompts, None


async def _encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[schemas.ChatMessage],
    variables: dict[str, TemplateVariable] | None,
    limits: Limits | None = None,
    wanted: int | None = None,
) -> list[int]:
    """Raises: PromptError; RequestRefused beyond the `limits`."""
    turns = [message.model_dump() for message in messages]
    texts = (value for turn in turns for value in turn.values() if isinstance(value, str))
    cost = MESSAGE_CHARS * len(turns) + sum(map(len, texts))
    has_more = any(message.model_extra for message in messages)  # of any size
    encode = functools.partial(tokenizer.encode_chat, turns, variables, limits, wanted)
    return await off_loop(cost, encode, inline=0 if has_more else INLINE_CHARS)


async def _answer(
    service: Service, request: Request, body: schemas.GenerationRequest, form_type: type[responses.ResponseForm]
) -> Response:
    """Admit a request, and answer it whole or as a stream. Raises: ApiError, EngineNotReady, EngineDead, RequestFailed."""
    state: RequestState = request.state.request
    deadline = service.deadline(body.timeout)
    _, tokenizer = service.require(body.model)
    # Again: a drain may have begun since its headers came.
    check_tokens = state.at_end.enter_context(service.queue.place(body.num_prompts * body.params.num_sequences))
    asked = await _grammar(service, request, body, deadline)
    prompts, echoes = await _prompts(service, request, body, tokenizer, deadline)
    params = _check(service, body, state, prompts)
    check_tokens(body.params.num_sequences * sum(map(len, prompts)))
    namespace = service.queue.namespace(state.caller, body.cache_salt)
    grammar = b""
    if asked is not None:
        ready, _ = service.require(body.model)
        compiling = service.grammars.compiled(body.grammar_param, asked, ready, namespace=namespace, deadline=deadline)
        grammar = await _present(service, request, compiling, needs_engine=True)
        service.require(body.model)  # again: the engine may have died meanwhile
    form = form_type(service.model, tokenizer.texts)
    requests = engine_requests(body, form.id, prompts, params, grammar=grammar, namespace=namespace)
    choices = [
        ChoiceStream(
            tokenizer.detokenizer(own.stop, prompt if body.is_continued else (), min_tokens=own.min_tokens),
            scored=own.logprobs is not None,
            echo=None if echoes is None else echoes[index],
        )
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        for _ in range(own.n)
    ]
    at_end = not body.stream and not body.stop
    generation = Generation(
        service.engine,
        service.metrics,
        service.in_flight,
        requests,
        choices,
        num_choices=body.params.n,
        deadline=deadline,
        at_end=at_end,
    )
    state.at_end.callback(generation.close)
    state.has_begun = True
    if body.stream:
        events = _events(form, generation, body, len(choices))
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    return Response(await _present(service, request, _whole(form, generation)), media_type="application/json")


async def _render(service: Service, request: Request, body: schemas.GenerationRequest, id_prefix: str) -> Response:
    """What `_answer` would send to the engine. Raises: ApiError, EngineNotReady, EngineDead."""
    if body.use_beam_search:
        raise errors.invalid("use_beam_search", "a beam search cannot be rendered: leave it out")
    _, tokenizer = service.require(body.model)
    deadline = service.deadline(body.timeout)
    await _grammar(service, request, body, deadline)
    prompts, _ = await _prompts(service, request, body, tokenizer, deadline)
    params = _check(service, body, request.state.request, prompts)

    def write() -> str:
        texts = [
            responses.RenderedRequest.of(body, prompt, own, model=service.model, id_prefix=id_prefix).model_dump_json()
            for prompt, own in zip(prompts, params, strict=True)
        ]
        return texts[0] if isinstance(body, schemas.ChatRequest) else f"[{','.join(texts)}]"

    return Response(await off_loop(sum(map(len, prompts)), write, inline=INLINE_CHARS), media_type="application/json")


async def _grammar(service: Service, request: Request, body: schemas.GenerationRequest, deadline: Deadline) -> Grammar | None:
    """What the answer follows; None for any text. Raises: ApiError: 400 naming the parameter, 408, 499, 503."""
    return await _present(service, request, service.grammars.read(body), deadline) if body.grammar_param else None


async def _prompts(
    service: Service, request: Request, body: schemas.GenerationRequest, tokenizer: Tokenizer, deadline: Deadline
) -> tuple[list[list[int]], list[Echo] | None]:
    """As `_tokenise`. Raises: ApiError: 400 naming the parameter, 408, 499, 503."""
    try:
        return await _present(service, request, _tokenise(body, tokenizer, service.limits(tokenizer)), deadline)
    except PromptError as error:
        raise errors.invalid(body.prompt_param, error, code=f"invalid_{body.prompt_param}") from error
    except RequestRefused as error:
        raise _refused(body, error) from error


def _check(
    service: Service, body: schemas.GenerationRequest, state: RequestState, prompts: Sequence[list[int]]
) -> list[SamplingParams]:
    """The sampling parameters of each prompt. Raises: ApiError (400) for a request that can never be served here."""
    _, tokenizer = service.require(body.model)
    limits = service.limits(tokenizer)
    if body.priority < 0 and not service.queue.sees_all(state.caller):
        raise errors.invalid("priority", f"{body.priority} goes before the requests of other keys; send 0, or more to go later")
    params = []
    try:
        for prompt in prompts:
            eviction = limits.eviction(body.params)
            new_tokens = limits.fit(len(prompt), body.wanted_tokens, default=body.default_tokens, eviction=eviction)
            params.append(dataclasses.replace(body.params, max_tokens=new_tokens))
            limits.check(prompt, params[-1], follows_grammar=bool(body.grammar_param))
    except InvalidParam as error:
        raise errors.invalid(error.param, f"it {error.reason}") from error
    except RequestRefused as error:
        raise _refused(body, error) from error
    return params


def _refused(body: schemas.GenerationRequest, error: RequestRefused) -> ApiError:
    """400, in the words of the request."""
    names = {"prompt": body.prompt_param, "beam_width": "beam_width" if body.beam_width else "n"}
    param = names.get(error.param, error.param)
    return ApiError(400, str(error).replace("beam_width", param), param=param, code=error.code)


async def _present(
    service: Service,
    request: Request,
    work: Coroutine[Any, Any, T],
    deadline: Deadline | None = None,
    *,
    needs_engine: bool = False,
) -> T:
    """The result of `work`, which is cancelled when the client goes away, the time is over, or an engine that it needs dies.

    Raises: ApiError: 499, 408, 503.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    dying = asyncio.create_task(service.engine.dead.wait()) if needs_engine else leaving
    try:
        left_s = None if deadline is None else deadline.left_s()
        await asyncio.wait({working, leaving, dying}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if leaving.done():
            raise ApiError(499, "The client went away.", code="client_closed_request")  # the status is nginx's
        service.require(None)
        assert deadline is not None, "nothing else has ended"
        raise deadline.error()
    finally:
        for task in (working, leaving, dying):
            task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _whole(form: responses.ResponseForm, generation: Generation) -> str:
    """The answer as JSON."""
    choices = await generation.whole()
    usage = responses.Usage.of(generation.token_counts(), generation.kept_rows())
    return await _json(lambda: form.whole(choices, usage), choices)


async def _json(make: Callable[[], BaseModel], deltas: Iterable[TextDelta]) -> str:
    """JSON made of these deltas, off the event loop if they have many log-probabilities."""
    num_logprobs = sum(delta.num_logprobs for delta in deltas)
    return await off_loop(num_logprobs, lambda: make().model_dump_json(), inline=INLINE_LOGPROBS)


async def _events(
    form: responses.ResponseForm, generation: Generation, body: schemas.GenerationRequest, num_choices: int
) -> AsyncIterator[str]:
    """Server-sent events. An error after the start is one of them, for the status is sent."""

    async def chunk(*deltas: TextDelta, with_usage: bool) -> str:
        usage = responses.Usage.of(generation.token_counts(), generation.kept_rows()) if with_usage else None
        return f"data: {await _json(lambda: form.chunk(deltas, usage), deltas)}\n\n"

    try:
        for delta in form.opening(num_choices):
            yield await chunk(delta, with_usage=bool(body.stream_counts.continuous_usage_stats))
        async for delta in generation.deltas():
            yield await chunk(delta, with_usage=bool(body.stream_counts.continuous_usage_stats))
        if body.stream_counts.include_usage:
            yield await chunk(with_usage=True)
    except Exception as error:
        if not isinstance(error, ApiError | RequestFailed | EngineDead):
            log.exception("the stream of request %s failed", current_id.get())
        yield f"data: {errors.from_exception(error).body.model_dump_json()}\n\n"
    yield "data: [DONE]\n\n"


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
