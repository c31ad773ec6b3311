"""Generation: from a request's body to its answer (check, tokenise, submit, stream).

    body ── Job ── tokenise ── submit ──> Generate ... engine ... Output ── Generation ──> TextDelta ── JSON, or events

`Service` is the state that all requests share.
"""

import asyncio
import dataclasses
import functools
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from vmmkv.units import counted, format_bytes
from vmmkv_server.chats import ChatPrompt
from vmmkv_server.config import ServeConfig
from vmmkv_server.engine_client import Answers, Dead, EngineClient, EngineDead, News, RequestFailed, Watchdog
from vmmkv_server.http import errors
from vmmkv_server.http.errors import ApiError
from vmmkv_server.http.limits import AdmissionQueue, RequestState, current_id
from vmmkv_server.http.responses import (
    ChoiceStream,
    DetokenizedText,
    Health,
    ModelCard,
    RenderedRequest,
    ResponseForm,
    TextDelta,
    Tokens,
    Usage,
)
from vmmkv_server.http.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from vmmkv_server.metrics import Metrics
from vmmkv_server.protocol import Beams, Generate, Loading, Output, PromptLogprobs, Ready
from vmmkv_server.sampling_params import SEED_MASK, InvalidParam, Limits, RequestRefused, SamplingParams
from vmmkv_server.structured_output.compiler import CompilerBusy, CompilerUnavailable, GrammarCompiler
from vmmkv_server.structured_output.schema import Grammar, GrammarRefused
from vmmkv_server.tokenizer import Echo, PromptError, TemplateVariable, Tokenizer, TokenTexts
from vmmkv_server.tools.calls import Toolset
from vmmkv_server.tools.chat_format import ToolChatFormat

log = logging.getLogger(__name__)

T = TypeVar("T")

INLINE_CHARS: Final = 4096
"""Most characters of texts that are tokenised on the event loop: they take about a millisecond."""
INLINE_LOGPROBS: Final = 512
"""Most log-probabilities that are written on the event loop: they take a few milliseconds."""
INLINE_ECHO_TOKENS: Final = 256
"""Most tokens of prompts whose places in the text are found on the event loop: they take about a millisecond."""
COUNTED_BYTES: Final = 1 << 20
"""Most bytes of a body of /tokenize without a limit on its text. A longer text's tokens must fit a request: a tokenizer takes
hundreds of bytes of memory for each character."""
MESSAGE_CHARS: Final = 64
"""A message takes so many characters' time beside its content."""
MAX_PROMPT_LOGPROBS: Final = 1 << 17
"""Log-probabilities of the prompts of one request: each is named in the answer, which takes some microseconds."""
_PROMPT_TOKEN_WEIGHT: Final = 4
"""A token of a prompt counts for so many, beside its likeliest: it has a text, a place and a table of its own."""
_THREADS: Final = ThreadPoolExecutor(4, thread_name_prefix="off-loop")
_LARGE_COST: Final = 1 << 20
"""Work of more than so many characters or tokens is large: a tokenizer takes 250 bytes for a character."""
_LARGE_THREAD: Final = ThreadPoolExecutor(1, thread_name_prefix="off-loop-large")
"""Does all that is large, one after the other, so that its memory is that of one."""
_SEED_STEP: Final = 0x9E3779B97F4A7C15
"""Step between seeds of a request's prompts: 2**64 over the golden ratio, odd, so that the consecutive seeds of one prompt's
choices meet no other's."""


async def off_loop(cost: int, work: Callable[[], T], *, inline: int) -> T:
    """The result of `work`, made in a thread if its `cost` is above `inline`, where the way there and back pays.

    Large work has one thread, the rest four. A caller that is cancelled while it waits for a thread leaves the queue.
    """
    threads = _THREADS if cost <= _LARGE_COST else _LARGE_THREAD
    return work() if cost <= inline else await asyncio.get_running_loop().run_in_executor(threads, work)


class Deadline:
    """The end of a request's time, `timeout_s` after it arrived; never, for None. Times are of time.perf_counter."""

    def __init__(self, arrived_s: float, timeout_s: float | None) -> None:
        self.arrived_s = arrived_s
        self.timeout_s = timeout_s
        self.spared_s = 0.0
        """Seconds that do not count: the start of the grammar compiler."""

    def left_s(self) -> float | None:
        """Seconds that are left; None for any number."""
        if self.timeout_s is None:
            return None
        return self.arrived_s + self.spared_s + self.timeout_s - time.perf_counter()

    async def keep(self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled when the time is over. Raises: ApiError (408)."""
        try:
            async with asyncio.timeout(self.left_s()):
                return await work
        except TimeoutError as error:
            raise self.error() from error

    def error(self) -> errors.ApiError:
        """408. OpenAI's client would send the request again by itself, and is told not to."""
        return errors.too_late(f"The answer was not finished within {self.timeout_s:g} s.", {"x-should-retry": "false"})


class GrammarService:
    """The grammars that requests ask for, and the compiler of one server, created for the first of them."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._compiler: GrammarCompiler | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        """Thread that reads schemas, one at a time. Each holds Python's lock, which several would take from the event loop."""

    async def read(self, request: GenerationRequest, prompt: ChatPrompt | None, *, namespace: str | None) -> Grammar | None:
        """The grammar of a request; None if its answer is free. Raises: ApiError (400)."""
        may_call = prompt is not None and prompt.may_call
        make = functools.partial(prompt.grammar, namespace) if prompt is not None and may_call else request.grammar
        try:
            if may_call or request.has_schema:  # it waits for those before it
                return await asyncio.get_running_loop().run_in_executor(self._reader, make)
            return make() if request.grammar_source else None
        except GrammarRefused as error:
            param = "tools" if may_call else request.grammar_source
            raise errors.invalid(error.param or param, error) from error

    async def compiled(
        self, param: str, grammar: Grammar, prompt: ChatPrompt | None, *, namespace: str | None, deadline: Deadline
    ) -> bytes:
        """The grammar of `param` as the engine takes it; empty if it is refused, and the chat's `prompt` does not need it.

        The compiler's start is not on the request's time.
        Raises: EngineNotReady, EngineDead; ApiError: 400 naming the parameter, 408, 503.
        """
        if self._compiler is None:
            ready = self._engine.require_ready()
            self._compiler = GrammarCompiler(Path(ready.model), ready.limits.vocabulary_size, ready.end_tokens)
        compiler, began_s = self._compiler, time.perf_counter()
        try:
            if not compiler.knows(grammar, namespace=namespace):
                await compiler.start()
                deadline.spared_s += time.perf_counter() - began_s
            return await deadline.keep(compiler.compile(grammar, namespace=namespace))
        except GrammarRefused as error:
            if prompt is None or prompt.needs_grammar:
                raise errors.invalid(param, error, code="invalid_grammar") from error
            log.info("calls are read without a grammar: %s", error)
            return b""
        except CompilerBusy as error:
            raise errors.unavailable(f"{error} Try again in a while.") from error
        except CompilerUnavailable as error:
            raise errors.unavailable(str(error)) from error

    async def close(self) -> None:
        """End the compiler's process and the reader's thread. Idempotent."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            await self._compiler.close()


_CUT_OFF: Final = (
    "the holder of the KV memory is gone: this server goes on with the memory that it has, which does not outlive it, and gets "
    "nothing from other servers; start a holder again, and then the servers that use it"
)


class Service:
    """One model: its engine, its tokenizer once that is loaded, and admission to it."""

    def __init__(
        self, engine: EngineClient, model: str, config: ServeConfig | None = None, hosts: Collection[str] | None = None
    ) -> None:
        """`hosts`: as of `Guard`."""
        self.config = config or ServeConfig()
        self.hosts = hosts
        self.engine = engine
        self.model = model
        self.metrics = Metrics(engine, model)
        self.in_flight: set[Generation] = set()
        self.queue = AdmissionQueue(engine, self.config)
        self.grammars = GrammarService(engine)
        self.watchdog = Watchdog(engine.silent_s, self.config.stuck_after_s)
        self.at_stop: list[Callable[[], None]] = []
        """Ends of streams that have none by themselves."""
        self.tokenizer: Tokenizer | None = None
        self._chat_format: ToolChatFormat | None = None
        self.created = int(time.time())

    def health(self) -> Health:
        """Are requests taken, and if not, why?"""
        match self.engine.phase:
            case Dead(reason=reason):
                return Health(status="dead", reason=reason)
            case Loading(stage=stage, done=done, total=total):
                return Health(status="loading", reason=f"{stage}: {done} of {total}")
            case Ready():
                still = f"still in flight: {counted(self.queue.num_sequences, 'sequence')}"
                if self.queue.drained_by_s is not None:
                    return Health(status="draining", reason=still)
                if self.queue.is_asleep:
                    reason = still if self.queue.num_sequences else "POST /wake_up ends it"
                    return Health(status="asleep", reason=reason)
                if (complaint := self.watchdog.complaint()) is not None:
                    return Health(status="stuck", reason=complaint)
                if self.tokenizer is None:
                    return Health(status="loading", reason="the tokenizer")
                is_cut_off = self.engine.snapshot is not None and self.engine.snapshot.memory.holder_up is False
                return Health(status="ok", reason=_CUT_OFF if is_cut_off else None)

    def check_name(self, model: str | None) -> None:
        """Raises: ApiError (404) for another model, with the name that would work."""
        if model not in (None, self.model):
            message = f"The model {model!r} does not exist; this server has {self.model!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def require(self, model: str | None) -> tuple[Limits, Tokenizer]:
        """Limits of a request, and the tokenizer.

        Raises: EngineNotReady, EngineDead; ApiError: 404 for another model, 503.
        """
        self.check_name(model)
        limits = self.engine.require_ready().limits
        if self.tokenizer is None:
            raise errors.unavailable("The tokenizer is loading; try again in a while.")
        return dataclasses.replace(limits, model=self.model, vocabulary_size=self.tokenizer.vocab_size), self.tokenizer

    @property
    def chat_format(self) -> ToolChatFormat:
        """The format of the model's chats. Raises: ApiError (503) while the tokenizer is loading."""
        if self.tokenizer is None:
            raise errors.unavailable("The tokenizer is loading; try again in a while.")
        if self._chat_format is None or self._chat_format.tokenizer is not self.tokenizer:
            self._chat_format = ToolChatFormat.of(self.tokenizer, self.config.engine)
        return self._chat_format

    def stop(self) -> None:
        """End the streams that have no end."""
        for end in self.at_stop:
            end()

    def deadline(self, wanted_s: float | None = None) -> Deadline:
        """The end of a request that arrives now and asked for so much time."""
        limits_s = [each for each in (wanted_s, self.config.request_timeout_s) if each is not None]
        return Deadline(time.perf_counter(), min(limits_s, default=None))

    def describe(self) -> ModelCard:
        """The model as /v1/models shows it."""
        card, ready = ModelCard(id=self.model, created=self.created), self.engine.phase
        if isinstance(ready, Ready):
            card.max_model_len, card.implementation = ready.limits.max_tokens, ready.implementation
            card.kv_cache_dtype = ready.kv_cache_dtype
        return card


class Job:
    """A request on its way to the engine. Making one checks what can be without its tokens.

    Raises: EngineNotReady, EngineDead; ApiError: 400 naming the parameter, 404 for another model, 408, 503.
    """

    def __init__(self, service: Service, request: Request, body: GenerationRequest) -> None:
        self.state: RequestState = request.state.request
        self.deadline = service.deadline(body.timeout)
        _, self.tokenizer = service.require(body.model)
        self.prompts: list[list[int]] = []
        """Token ids of each prompt, once it is tokenised."""
        self.params: list[SamplingParams] = []
        """The sampling parameters of each prompt."""
        self._service = service
        self._body = body
        self._namespace = service.queue.namespace(self.state.caller, body.cache_salt)
        self._asked: Grammar | None = None
        self._grammar = b""
        self._chat: ChatPrompt | None = None
        """The prompt of a chat."""
        self._echoes: list[Echo] | None = None
        """Texts that answers begin with, and their tokens' places if those are scored; None without `echo`."""
        if body.priority < 0 and not service.queue.sees_all(self.state.caller):
            why = f"{body.priority} goes before the requests of other keys; send 0, or more to go later"
            raise errors.invalid("priority", why)

    @property
    def _limits(self) -> Limits:
        """The limits of now: an operator may give another budget while a prompt is tokenised."""
        return self._service.require(self._body.model)[0]

    async def tokenise(self) -> None:
        """Read the grammar, tokenise the prompts, and check what they ask for."""
        body = self._body
        try:
            await self.deadline.keep(self._encode())
            self._asked = await self.deadline.keep(self._service.grammars.read(body, self._chat, namespace=self._namespace))
            self.params = list(map(functools.partial(self._params_for, self._limits), self.prompts))
        except PromptError as error:
            raise errors.invalid(body.prompt_param, error, code=f"invalid_{body.prompt_param}") from error
        except InvalidParam as error:
            raise errors.invalid(error.param, f"it {error.reason}") from error
        except RequestRefused as error:
            names = {"prompt": body.prompt_param, "beam_width": "beam_width" if body.beam_width else "n"}
            param = names.get(error.param, error.param)
            raise ApiError(400, str(error).replace("beam_width", param), param=param, code=error.code) from error

    async def prepare(self, check_tokens: Callable[[int], None]) -> None:
        """Tokenise, and compile the grammar if there is room for so many tokens: `check_tokens` raises if not."""
        await self.tokenise()
        check_tokens(self._body.params.num_sequences * sum(map(len, self.prompts)))
        if self._asked is not None:
            self._grammar = await self._service.grammars.compiled(
                self._body.grammar_param, self._asked, self._chat, namespace=self._namespace, deadline=self.deadline
            )

    def submit(self, name: str) -> "Generation":
        """Send the request to the engine: for each prompt a Generate for each choice, or one for its beam search.

        Choice i of the first prompt has the request's seed + i: the answer that a request for it alone would get. Later prompts
        begin at seeds of their own, so that equal prompts may get different answers.
        """
        body = self._body
        first_seed = secrets.randbits(63) if body.params.seed is None else body.params.seed
        num_each = 1 if body.params.is_search else body.params.n
        requests, choices = list[Generate](), list[ChoiceStream]()
        for prompt_index, (prompt, params) in enumerate(zip(self.prompts, self.params, strict=True)):
            for index in range(num_each):
                seed = (first_seed + prompt_index * _SEED_STEP + index) & SEED_MASK
                requests.append(
                    Generate(
                        request_id=f"{name}-{prompt_index * num_each + index}",
                        prompt=prompt,
                        params=dataclasses.replace(params, seed=seed),
                        priority=body.priority,
                        cache_salt=self._namespace,
                        grammar=self._grammar,
                        gate=self._chat.gate if self._chat is not None and self._grammar else None,
                    )
                )
            for _ in range(params.n):
                context = prompt if body.is_continued else ()
                reader, kept = (None, ()) if self._chat is None else (self._chat.reader(), self._chat.kept)
                detokenizer = self.tokenizer.detokenizer(params.stop, context, min_tokens=params.min_tokens, kept=kept)
                echo = None if self._echoes is None else self._echoes[prompt_index]
                end = None if self._chat is None else self._chat.reasoning_end
                is_scored = params.logprobs is not None
                choices.append(ChoiceStream(detokenizer, scored=is_scored, echo=echo, reader=reader, reasoning_end=end))
        at_end = not body.stream and not body.stop
        return Generation(self._service, requests, choices, num_choices=body.params.n, deadline=self.deadline, at_end=at_end)

    async def _encode(self) -> None:
        """Raises: PromptError, RequestRefused, ApiError."""
        body, tokenizer = self._body, self.tokenizer
        if isinstance(body, ChatRequest):
            self._chat = await _encode_chat(
                self._service.chat_format,
                body.messages,
                body.template_variables,
                self._limits,
                body.wanted_tokens,
                has_grammar=bool(body.grammar_param),
                toolset=body.toolset,
            )
            self.prompts = [self._chat.token_ids]
            return
        assert isinstance(body, CompletionRequest)
        num_given = sum(map(len, body.prompt))
        encode = functools.partial(tokenizer.encode, limits=self._limits, wanted=body.wanted_tokens)
        self.prompts = prompts = await off_loop(num_given, lambda: list(map(encode, body.prompt)), inline=INLINE_CHARS)
        if body.params.prompt_logprobs is not None:
            _check_prompt_logprobs(body.params, prompts)
            num_tokens = sum(map(len, prompts))
            self._echoes = await off_loop(
                num_tokens, lambda: list(map(tokenizer.echo, body.prompt, prompts)), inline=INLINE_ECHO_TOKENS
            )
        elif body.echo:
            texts = await off_loop(num_given, lambda: list(map(tokenizer.text_of, body.prompt)), inline=INLINE_CHARS)
            self._echoes = [Echo(text, (), ()) for text in texts]

    def _params_for(self, limits: Limits, prompt: list[int]) -> SamplingParams:
        """Raises: InvalidParam, RequestRefused for what can never be served here."""
        body = self._body
        eviction = limits.eviction(body.params)
        new_tokens = limits.fit(len(prompt), body.wanted_tokens, default=body.default_tokens, eviction=eviction)
        params = dataclasses.replace(body.params, max_tokens=new_tokens)
        limits.check(prompt, params, follows_grammar=bool(body.grammar_param))
        return params


def _check_prompt_logprobs(params: SamplingParams, prompts: Sequence[list[int]]) -> None:
    """Raises: ApiError (400) if a request is for more log-probabilities of its prompts than an answer may hold."""
    assert params.prompt_logprobs is not None, "they are asked for"
    each, num_tokens = _PROMPT_TOKEN_WEIGHT + params.prompt_logprobs, params.n * sum(map(len, prompts))
    if each * num_tokens > MAX_PROMPT_LOGPROBS:
        why = (
            f"with echo this request counts for {each * num_tokens} log-probabilities, {each} for each of {num_tokens} tokens "
            f"of prompts, and {MAX_PROMPT_LOGPROBS} is the most: lower logprobs, or send fewer prompts or choices in a request"
        )
        raise errors.invalid("logprobs", why, code="too_many_logprobs")


async def _encode_chat(
    chat_format: ToolChatFormat,
    messages: Sequence[ChatMessage],
    variables: dict[str, TemplateVariable] | None,
    limits: Limits | None = None,
    wanted: int | None = None,
    *,
    has_grammar: bool = False,
    toolset: Toolset | None,
) -> ChatPrompt:
    """Raises: PromptError; RequestRefused beyond the `limits`."""
    turns = [message.model_dump(exclude_unset=True) for message in messages]
    texts = (value for turn in turns for value in turn.values() if isinstance(value, str))
    cost = MESSAGE_CHARS * len(turns) + sum(map(len, texts))
    has_more = toolset is not None or any(message.model_extra or message.tool_calls for message in messages)  # of any size
    encode = functools.partial(chat_format.encode, turns, variables, limits, wanted, has_grammar=has_grammar, toolset=toolset)
    return await off_loop(cost, encode, inline=0 if has_more else INLINE_CHARS)


class Generation:
    """All choices of one HTTP request, from the engine. `close` it in any case: that aborts what still runs.

    Choices stand in the order of the prompts, `num_choices` for each prompt; so do the engine's requests.
    With `at_end` the text is wanted whole, so only ends wake this task.

    Raises: EngineNotReady, EngineDead; ApiError (408) if the time is over already.
    """

    def __init__(
        self,
        service: "Service",
        requests: Sequence[Generate],
        choices: Sequence[ChoiceStream],
        *,
        num_choices: int,
        deadline: Deadline,
        at_end: bool,
    ) -> None:
        self.arrived_s = deadline.arrived_s
        self._service = service
        self._choices = choices
        self._num_choices = num_choices
        choices_each = len(choices) // len(requests)
        self._first_choice = {request.request_id: index * choices_each for index, request in enumerate(requests)}
        self._first_requests = requests[:: num_choices // choices_each]
        """One request of each prompt; the others hit the prefix that it computed."""
        self._prompt_tokens = sum(len(request.prompt) for request in self._first_requests)
        self._unreturned_tokens = 0
        """Tokens of beams beyond the best `num_choices`."""
        self._id = requests[0].request_id.rpartition("-")[0]
        self._outcome: str | None = None
        left_s = deadline.left_s()
        if left_s is not None and left_s <= 0:
            raise deadline.error()
        self._answers: Answers = service.engine.submit(requests, arrived_s=self.arrived_s, at_end=at_end)
        self._timer: asyncio.TimerHandle | None = None
        if left_s is not None:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._answers.fail, deadline.error())
        service.in_flight.add(self)

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return len(self._choices)

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """New text as it comes, of all choices mixed. Raises: RequestFailed, EngineDead; ApiError when the time is over."""
        async for indices in self._fed():
            for index in indices:
                if (delta := self._choices[index].take(index)) is not None:
                    yield delta

    async def whole(self) -> list[TextDelta]:
        """Each choice as one delta, at the end. Raises: as `deltas`."""
        async for _ in self._fed():
            pass
        return [delta for index, choice in enumerate(self._choices) if (delta := choice.take(index)) is not None]

    def token_counts(self) -> tuple[int, Counter[str], int, int]:
        """Tokens so far: of the prompts, those of them found in the prefix cache by where they were, of the answers, and those
        of them that are reasoning.
        """
        completion_tokens = sum(choice.detokenizer.num_tokens for choice in self._choices) + self._unreturned_tokens
        reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self._choices)
        return self._prompt_tokens, self._cached, completion_tokens, reasoning_tokens

    def kept_rows(self) -> Counter[str]:
        """Rows that compactions by the requests' `kv_policy` have `kept` at last, and `dropped`; empty without any."""
        every = self._answers.compacted.values()
        return sum((Counter(kept=each.kept_rows, dropped=each.dropped_rows) for each in every), Counter[str]())

    def describe(self, now_s: float) -> dict[str, Any]:
        """Numbers and no text, for the dashboard: None for what the engine has not said yet."""
        has_begun = self._answers.first_s is not None
        return {
            "id": self._id,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached.total() if has_begun else None,
            "generated_tokens": self._answers.num_tokens if has_begun else None,
            "age_s": round(now_s - self.arrived_s, 2),
            "has_begun": has_begun,
        }

    def close(self) -> None:
        """Abort what still runs. Idempotent, never blocks."""
        self._answers.close()
        if self._timer is not None:
            self._timer.cancel()
        self._end("aborted")

    @property
    def _cached(self) -> Counter[str]:
        cached, none = self._answers.cached, Counter[str]()
        return sum((cached.get(request.request_id, none) for request in self._first_requests), none)

    async def _fed(self) -> AsyncIterator[Collection[int]]:
        """Feed the choices with the engine's messages; yields the indices of those fed. Raises: as `deltas`."""
        try:
            async for news in self._answers:
                yield self._feed(news)
        except Exception:
            self._end("failed")
            raise
        self._end("finished")

    def _feed(self, news: Sequence[News]) -> Collection[int]:
        """Each choice gets its outputs at once, however many came together. Raises: RequestFailed."""
        outputs: defaultdict[int, list[Output]] = defaultdict(list)
        for each in news:
            index = self._first_choice[each.request_id]
            if isinstance(each, Beams):
                outputs |= {index + rank: [output] for rank, output in enumerate(self._best(each))}
            elif isinstance(each, PromptLogprobs):
                self._choices[index].feed_prompt(each)
                outputs.setdefault(index, [])
            else:
                outputs[index].append(each)
        for index, own in outputs.items():
            if own:
                self._choices[index].feed(own)
                if self._choices[index].detokenizer.stopped:
                    self._answers.abort(own[0].request_id)
        return outputs.keys()

    def _best(self, message: Beams) -> list[Output]:
        """The best beams, which are the choices of their prompt. Raises: RequestFailed if they are too few."""
        best, rest = message.beams[: self._num_choices], message.beams[self._num_choices :]
        if len(best) < self._num_choices:
            raise RequestFailed(
                f"The beam search found {len(best)} answers for n={self._num_choices}; lower n or raise max_tokens."
            )
        self._unreturned_tokens += sum(len(beam.token_ids) for beam in rest)
        return [
            Output(request_id=message.request_id, token_ids=tuple(beam.token_ids), finish_reason=beam.finish_reason)
            for beam in best
        ]

    def _end(self, outcome: str) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome
        self._service.in_flight.discard(self)
        self._service.metrics.requests.labels(outcome).inc()
        self._service.metrics.request_seconds.observe(time.perf_counter() - self.arrived_s)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("request ended", extra={"outcome": outcome, "tokens": self.token_counts()})


async def _present(request: Request, work: Coroutine[Any, Any, T], engine: EngineClient | None = None) -> T:
    """The result of `work`, which is cancelled when the client goes away, or an engine that it needs dies.

    Raises: ApiError (499), EngineDead.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    dying = leaving if engine is None else asyncio.create_task(engine.dead.wait())
    try:
        await asyncio.wait({working, leaving, dying}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if engine is not None and not leaving.done():
            engine.require_ready()
        raise ApiError(499, "The client went away.", code="client_closed_request")  # the status is nginx's
    finally:
        for task in (working, leaving, dying):
            task.cancel()


async def _disconnected(request: Request) -> bool:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return True


# The routes.


async def answer(
    service: Service, request: Request, body: GenerationRequest, form_type: Callable[[str, TokenTexts], ResponseForm]
) -> Response:
    """Check a request, tokenise it, submit it, and send its answer whole or as a stream.

    Raises: ApiError, EngineNotReady, EngineDead, RequestFailed.
    """
    job = Job(service, request, body)
    # Again: a drain may have begun since its headers came.
    check_tokens = job.state.at_end.enter_context(service.queue.place(body.num_prompts * body.params.num_sequences))
    await _present(request, job.prepare(check_tokens), service.engine)
    form = form_type(service.model, job.tokenizer.texts)
    generation = job.submit(form.id)
    job.state.at_end.callback(generation.close)
    job.state.has_begun = True
    if body.stream:
        return StreamingResponse(
            _events(form, generation, body), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
    return Response(await _present(request, _whole(form, generation)), media_type="application/json")


async def render(service: Service, request: Request, body: GenerationRequest, form_type: type[ResponseForm]) -> Response:
    """Send what `answer` would send to the engine. Raises: ApiError, EngineNotReady, EngineDead."""
    if body.use_beam_search:
        raise errors.invalid("use_beam_search", "a beam search cannot be rendered: leave it out")
    job = Job(service, request, body)
    await _present(request, job.tokenise())

    def write() -> str:
        id_prefix = form_type.id_prefix
        texts = [
            RenderedRequest.of(body, prompt, params, model=service.model, id_prefix=id_prefix).model_dump_json()
            for prompt, params in zip(job.prompts, job.params, strict=True)
        ]
        return texts[0] if isinstance(body, ChatRequest) else f"[{','.join(texts)}]"

    return Response(await off_loop(sum(map(len, job.prompts)), write, inline=INLINE_CHARS), media_type="application/json")


async def tokenize(service: Service, request: Request, body: TokenizeRequest) -> Response:
    """Send the token ids of a text or a conversation. Raises: ApiError, EngineNotReady, EngineDead."""
    limits, tokenizer = service.require(body.model)
    most = limits if len(await request.body()) > COUNTED_BYTES else None
    if body.prompt is None:
        param, work = "messages", _tokens_of_chat(body, service.chat_format, most)
    else:
        add_special_tokens = body.add_special_tokens is not False
        encode = functools.partial(tokenizer.encode, body.prompt, most, add_special_tokens=add_special_tokens)
        param, work = "prompt", off_loop(len(body.prompt), encode, inline=INLINE_CHARS)
    try:
        ids = await _present(request, service.deadline().keep(work))
    except PromptError as error:
        raise errors.invalid(param, error) from error
    except RequestRefused as error:
        size = format_bytes(COUNTED_BYTES)
        message = (
            f"A body of more than {size} is tokenised only if its text may fit into a request, which can have "
            f"{limits.max_tokens} tokens, and this one has more: send the text in parts, in bodies of {size} or less."
        )
        raise ApiError(400, message, param=param, code=error.code) from error

    def write() -> str:
        texts = list(map(tokenizer.texts.text_of, ids)) if body.return_token_strs else None
        return Tokens.model_construct(
            count=len(ids), max_model_len=limits.max_tokens, tokens=ids, token_strs=texts
        ).model_dump_json()

    return Response(await off_loop(len(ids), write, inline=INLINE_CHARS), media_type="application/json")


async def _tokens_of_chat(body: TokenizeRequest, chat_format: ToolChatFormat, limits: Limits | None) -> list[int]:
    """Raises: as `_encode_chat`."""
    encoded = _encode_chat(chat_format, body.messages or (), body.chat_template_kwargs, limits, toolset=body.toolset)
    return (await encoded).token_ids


async def detokenize(service: Service, request: Request, body: DetokenizeRequest) -> DetokenizedText:
    """The text of token ids, special tokens among it. Raises: ApiError, EngineNotReady, EngineDead."""
    _, tokenizer = service.require(body.model)
    decode = functools.partial(tokenizer.text_of, body.tokens, skip_special_tokens=False)
    work = off_loop(len(body.tokens), decode, inline=INLINE_CHARS)
    try:
        return DetokenizedText(prompt=await _present(request, service.deadline().keep(work)))
    except PromptError as error:
        raise errors.invalid("tokens", error) from error


async def _whole(form: ResponseForm, generation: Generation) -> str:
    """The answer as JSON."""
    choices = await generation.whole()
    usage = Usage.of(generation.token_counts(), generation.kept_rows())
    return await _written(lambda: form.whole(choices, usage).model_dump_json(), choices)


async def _written(write: Callable[[], str], deltas: Iterable[TextDelta]) -> str:
    """Text made of these deltas, off the event loop if they have many log-probabilities."""
    return await off_loop(sum(delta.num_logprobs for delta in deltas), write, inline=INLINE_LOGPROBS)


async def _events(form: ResponseForm, generation: Generation, body: GenerationRequest) -> AsyncIterator[str]:
    """Server-sent events. An error after the start is one of them, for the status is sent."""

    async def events(*deltas: TextDelta, with_usage: bool) -> str:
        usage = Usage.of(generation.token_counts(), generation.kept_rows()) if with_usage else None
        return await _written(lambda: form.events(deltas, usage), deltas)

    try:
        for delta in form.opening(generation.num_choices):
            yield await events(delta, with_usage=bool(body.stream_counts.continuous_usage_stats))
        async for delta in generation.deltas():
            yield await events(delta, with_usage=bool(body.stream_counts.continuous_usage_stats))
        if body.stream_counts.include_usage:
            yield await events(with_usage=True)
    except Exception as error:
        if not isinstance(error, ApiError | RequestFailed | EngineDead):
            log.exception("the stream of request %s failed", current_id.get())
        yield form.error_events(errors.from_exception(error).body)
    if form.stream_end:
        yield form.stream_end
