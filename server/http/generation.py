"""One HTTP request's way through the engine: what it needs, whether it can fit, and its text as it comes."""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from pathlib import Path
from typing import Any, NamedTuple

from vmmkv.server.engine_client import Answers, EngineClient, News, RequestFailed
from vmmkv.server.http import errors
from vmmkv.server.http.errors import bad_request, too_late
from vmmkv.server.http.schemas import MAX_PROMPT_LOGPROBS, PROMPT_TOKEN_WEIGHT, GenerationRequest, PromptTokensDetails, Usage
from vmmkv.server.metrics import Metrics
from vmmkv.server.protocol import LOGPROB_BYTES, Beams, FinishReason, Generate, Output, PromptLogprobs, Ready, unpacked
from vmmkv.server.sampling_params import DoesNotFit, Limits
from vmmkv.server.structured_output.compiler import CompilerBusy, CompilerUnavailable, GrammarCompiler
from vmmkv.server.structured_output.schema import Grammar, GrammarRefused
from vmmkv.server.tokenizer import Detokenizer, Echo

# -------- candidate
# One text as it comes: its tokens to text, and what is known of each token.


class Score(NamedTuple):
    """How likely a token of the answer was."""

    token_id: int
    logprob: float | None
    """None for the first of a prompt, which comes after nothing."""
    likeliest: Sequence[tuple[int, float]]
    """Tokens that were likely there, and their log-probabilities; as many as were asked for."""
    offset: int
    """Where the token begins in the text of the answer, in characters."""


@dataclass(frozen=True, slots=True)
class EchoScores:
    """The Scores of a prompt as the engine sent them: to unpack them takes long, and the event loop is not the place for it."""

    echo: Echo
    messages: Sequence[PromptLogprobs]

    @property
    def num_tokens(self) -> int:
        """The first of a prompt among them, of which nothing is sent."""
        return 1 + sum(len(message.logprobs) for message in self.messages) // LOGPROB_BYTES

    @property
    def num_logprobs(self) -> int:
        """Those of the likeliest tokens among them."""
        return sum(len(message.logprobs) + len(message.top_logprobs) for message in self.messages) // LOGPROB_BYTES

    def unpacked(self) -> Iterator[Score]:
        """Of each token, in order."""
        yield Score(self.echo.token_ids[0], None, (), self.echo.offsets[0])
        end = 1
        for message in self.messages:
            logprobs, likeliest = unpacked(message)
            begin, end = end, end + len(logprobs)
            echo = self.echo
            yield from starmap(Score, zip(echo.token_ids[begin:end], logprobs, likeliest, echo.offsets[begin:end], strict=True))


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one candidate, which is a choice of the answer; the last one of each has a finish reason."""

    index: int
    text: str
    finish_reason: FinishReason | None
    scores: Sequence[Score] | None = None
    """Of the new tokens; None if nobody asked."""
    echo_scores: EchoScores | None = None
    """Of a prompt that stands before the new tokens."""

    @property
    def num_logprobs(self) -> int:
        """How many there are to write."""
        of_echo = 0 if self.echo_scores is None else self.echo_scores.num_logprobs
        return of_echo + (len(self.scores) * (1 + len(self.scores[0].likeliest)) if self.scores else 0)

    def all_scores(self) -> Sequence[Score] | None:
        """Those of an echoed prompt too, which takes a few microseconds each."""
        if self.echo_scores is None:
            return self.scores
        return [*self.echo_scores.unpacked(), *(self.scores or ())]

    @staticmethod
    def joined(index: int, deltas: Sequence["TextDelta"]) -> "TextDelta":
        """All that came of one candidate, as if it had come at once."""
        scores = None if deltas[0].scores is None else [score for delta in deltas for score in delta.scores or ()]
        echo_scores = next((delta.echo_scores for delta in deltas if delta.echo_scores is not None), None)
        return TextDelta(index, "".join(delta.text for delta in deltas), deltas[-1].finish_reason, scores, echo_scores)


class Candidate:
    """One text: a choice of the answer, or one that `best_of` may drop. `feed` it what the engine says, `take` what is new."""

    def __init__(self, detokenizer: Detokenizer, *, scored: bool = False, echo: Echo | None = None) -> None:
        """`scored`: who asked wants a Score for each token; those of `echo` come by `feed_prompt`, before any other."""
        self._detokenizer = detokenizer
        self._text = ""
        self._scores: list[Score] | None = [] if scored else None
        self._first_offset = 0 if echo is None else len(echo.text)
        self._echo_scores = None if echo is None else EchoScores(echo, ())
        self._show_echo()
        self._reason: FinishReason | None = None
        self._logprob_sum = 0.0
        self._num_logprobs = 0

    @property
    def num_tokens(self) -> int:
        """So far; those after the one that completed a stop string are not counted."""
        return self._detokenizer.num_tokens

    @property
    def stopped(self) -> bool:
        """A stop string was found: nothing more is wanted of it."""
        return self._detokenizer.stopped

    @property
    def mean_logprob(self) -> float:
        """Of the tokens chosen, the end token among them; the worst there is if they were not numbers."""
        mean = self._logprob_sum / max(1, self._num_logprobs)
        return -math.inf if math.isnan(mean) else mean

    def feed_prompt(self, message: PromptLogprobs) -> None:
        """What the engine said of the prompt that is echoed: of its next tokens, in order."""
        assert self._echo_scores is not None and self._scores is not None, "nobody asked for them"
        self._echo_scores = EchoScores(self._echo_scores.echo, (*self._echo_scores.messages, message))
        self._show_echo()

    def feed(self, outputs: Sequence[Output]) -> None:
        """What the engine said since the last time, in order. What comes after a stop string counts for nothing."""
        if self.stopped:
            return
        before, reason = self.num_tokens, outputs[-1].finish_reason
        token_ids = list(chain.from_iterable(output.token_ids for output in outputs))
        logprobs = list(chain.from_iterable(output.logprobs for output in outputs))
        if self._scores is not None:
            likeliest = list(chain.from_iterable(output.top_logprobs for output in outputs))
            self._feed_scored(token_ids, logprobs, likeliest or [()] * len(token_ids))
            token_ids = []
        if reason is None:
            self._text += self._detokenizer.feed(token_ids)
        elif not self.stopped:
            self._text += self._detokenizer.finish(token_ids)
        self._reason = "stop" if self.stopped else reason
        used = logprobs[: self.num_tokens - before] if self.stopped else logprobs
        self._logprob_sum += sum(used)
        self._num_logprobs += len(used)

    def take(self, index: int) -> TextDelta | None:
        """What is new since the last time, as of candidate `index`. None if there is nothing to show: scores wait for text."""
        if not self._text and self._reason is None:
            return None
        delta = TextDelta(index, self._text, self._reason, self._scores, self._echo_scores)
        self._text, self._echo_scores = "", None
        if self._scores is not None:
            self._scores = []
        return delta

    def _show_echo(self) -> None:
        """Of a prompt that is scored, when all its scores are there."""
        scores = self._echo_scores
        if scores is not None and scores.num_tokens == len(scores.echo.token_ids):
            self._text = scores.echo.text

    def _feed_scored(
        self, token_ids: Sequence[int], logprobs: Sequence[float], likeliest: Sequence[Sequence[tuple[int, float]]]
    ) -> None:
        assert self._scores is not None and len(logprobs) >= len(token_ids), "the engine sent no log-probabilities"
        # Both can be longer by one: an end token has its own, and is not among the tokens.
        for token_id, logprob, likely in zip(token_ids, logprobs, likeliest, strict=False):
            if self.stopped:
                return
            offset = self._first_offset + self._detokenizer.num_characters
            self._scores.append(Score(token_id, logprob, likely, offset))
            self._text += self._detokenizer.feed([token_id])


# -------- generation

log = logging.getLogger(__name__)

_SEED_MASK = (1 << 63) - 1
"""Seeds reach the engine as non-negative numbers of 63 bits."""
_SEED_STEP = 0x9E3779B97F4A7C15
"""Between a request's prompts. Odd, so that their seeds all differ; 2**64 over the golden ratio spreads them far apart, so
that the seeds of one prompt's choices, which follow each other, meet no other's."""


def fit_new_tokens(
    num_prompt_tokens: int, wanted: int | None, default: int | None, ready: Ready, *, model: str, prompt_param: str
) -> int:
    """See `Limits.fit`. `model` is the name that clients know; `ready.model` may be a path of this machine.

    Raises: ApiError (400), naming `prompt_param` or max_tokens.
    """
    limits = Limits(model=model, of_model=ready.max_tokens, of_pool=ready.pool_tokens, budget_bytes=ready.budget_bytes)
    try:
        return limits.fit(num_prompt_tokens, wanted, default=default)
    except DoesNotFit as error:
        param = prompt_param if error.at_fault == "prompt" else "max_tokens"
        code = "empty_prompt" if error.empty else "context_length_exceeded"
        raise bad_request(str(error), param=param, code=code) from error


def check_token_ids(request: GenerationRequest, vocab_size: int) -> None:
    """Raises: ApiError (400) if a bias, or a stop, is of what is no token of this model."""
    for param, token_ids in (("logit_bias", request.logit_bias or ()), ("stop_token_ids", request.stop_token_ids)):
        unknown = next((token_id for token_id in token_ids if token_id >= vocab_size), None)
        if unknown is not None:
            message = f"Invalid {param}: {unknown} is not a token id of this model: they go from 0 to {vocab_size - 1}."
            raise bad_request(message, param=param, code="invalid_value")


def check_min_tokens(request: GenerationRequest, new_tokens: Sequence[int]) -> None:
    """Raises: ApiError (400) if an answer can have fewer tokens than it is to have at the least."""
    least, most = request.min_tokens or 0, min(new_tokens)
    if least > most:
        message = f"Invalid min_tokens: {least} of an answer that can have {most} tokens here: lower it, or raise max_tokens."
        raise bad_request(message, param="min_tokens", code="invalid_value")


def check_prompt_logprobs(request: GenerationRequest, prompts: Sequence[list[int]]) -> None:
    """Raises: ApiError (400) if it asks for more log-probabilities of its prompts than an answer may hold."""
    if request.num_prompt_logprobs is None:
        return
    each = PROMPT_TOKEN_WEIGHT + request.num_prompt_logprobs
    num_tokens = request.num_candidates * sum(map(len, prompts))
    if each * num_tokens > MAX_PROMPT_LOGPROBS:
        message = (
            f"Invalid logprobs: with echo this request counts for {each * num_tokens} log-probabilities, {each} for each of "
            f"{num_tokens} tokens of prompts, and {MAX_PROMPT_LOGPROBS} is the most: lower logprobs, or send fewer prompts or "
            "choices in a request."
        )
        raise bad_request(message, param="logprobs", code="too_many_logprobs")


def check_priority(request: GenerationRequest, *, may_go_first: bool) -> None:
    """Raises: ApiError (400) if a request would go before those of others, and may not."""
    if request.priority < 0 and not may_go_first:
        message = f"Invalid priority: {request.priority} goes before the requests of other keys; send 0, or more to go later."
        raise bad_request(message, param="priority", code="invalid_value")


def fit_key(request: GenerationRequest, prompts: Sequence[list[int]], new_tokens: list[int], limit: int | None) -> list[int]:
    """The new tokens of each prompt under what a key may have in flight: fewer, where nobody asked for so many by number.

    Raises: ApiError (400) if the request alone is more than that.
    """
    if limit is None:
        return new_tokens
    _, num_each = request.widest
    num_prompt = num_each * sum(map(len, prompts))
    share = (limit - num_prompt) // (num_each * len(prompts))
    if request.wanted_tokens is None and share >= 1:
        return [min(count, share) for count in new_tokens]
    num_tokens = num_prompt + num_each * sum(new_tokens)
    if num_tokens <= limit:
        return new_tokens
    remedy = f"lower max_tokens to {share}" if share >= 1 else "shorten the prompt or ask for fewer choices"
    message = f"This request can come to {num_tokens} tokens, and a key may have {limit} in flight here: {remedy}."
    raise bad_request(message, param="max_tokens", code="key_limit_exceeded")


def fit_beams(request: GenerationRequest, ready: Ready) -> None:
    """Raises: ApiError (400) if the engine has fewer slots than a search has beams, which all run at once."""
    if request.num_beams > ready.max_sequences:
        param, _ = request.widest
        message = f"A search of {request.num_beams} beams needs as many slots, and this server has {ready.max_sequences}"
        raise bad_request(f"{message}: lower {param} to {ready.max_sequences}.", param=param, code="too_many_beams")


def engine_requests(
    request: GenerationRequest,
    base_id: str,
    prompts: Sequence[list[int]],
    new_tokens: Sequence[int],
    *,
    grammar: bytes = b"",
    namespace: str | None,
) -> list[Generate]:
    """The engine's part of a request: for each prompt a Generate for each candidate, or one for its beam search.

    Candidate i of the first prompt has the request's seed + i, so that it is what a request for it alone would give. Later
    prompts begin at seeds of their own, that equal ones may get different answers. Requests of one
    `namespace` share what is known of their prompts.
    """
    first_seed = secrets.randbits(63) if request.seed is None else request.seed
    temperature = 1.0 if request.temperature is None else request.temperature
    num_each = 1 if request.num_beams else request.num_candidates
    return [
        Generate(
            request_id=f"{base_id}-{prompt_index * num_each + index}",
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            min_tokens=request.min_tokens or 0,
            temperature=0.0 if request.num_beams else temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(0, request.top_k or 0),
            min_p=request.min_p or 0.0,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
            logit_bias=request.logit_bias or {},
            seed=(first_seed + prompt_index * _SEED_STEP + index) & _SEED_MASK,
            want_logprobs=request.num_logprobs is not None or request.num_candidates > request.num_choices,
            num_logprobs=request.num_logprobs or 0,
            num_prompt_logprobs=request.num_prompt_logprobs,
            priority=request.priority,
            cache_salt=namespace,
            beam_width=request.num_beams,
            length_penalty=request.length_penalty,
            grammar=grammar,
        )
        for prompt_index, (prompt, max_new_tokens) in enumerate(zip(prompts, new_tokens, strict=True))
        for index in range(num_each)
    ]


class Generation:
    """The text of one HTTP request, all its candidates. `close` it whatever happens: what still runs is aborted then.

    The engine's requests, and the candidates, of one prompt stand side by side, as many for each prompt.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        requests: Sequence[Generate],
        candidates: Sequence[Candidate],
        *,
        num_prompts: int,
        num_choices: int,
        arrived_s: float,
        timeout_s: float | None = None,
        spared_s: float = 0.0,
        at_end: bool = False,
    ) -> None:
        """Sends the requests to the engine. Of the candidates each prompt has `num_choices` returned.

        `arrived_s` is of time.perf_counter; `timeout_s` counts from `spared_s` after it, for what is not the client's to pay
        for. `at_end`: the text is wanted when it is whole, and no stop string ends it before.
        Raises: EngineNotReady, EngineDead; ApiError (408) if the time is over already.
        """
        left_s = None if timeout_s is None else arrived_s + spared_s + timeout_s - time.perf_counter()
        if timeout_s is not None and left_s is not None and left_s <= 0:
            raise too_late(timeout_s)
        self._metrics = metrics
        self._candidates = candidates
        self._num_each = len(candidates) // num_prompts
        self._num_choices = num_choices
        num_of_request = len(candidates) // len(requests)
        self._first_candidate = {request.request_id: index * num_of_request for index, request in enumerate(requests)}
        self._first_requests = requests[:: len(requests) // num_prompts]
        """Of each prompt one, which computes it; the prompt's others hit what this one computed."""
        self._prompt_tokens = sum(len(request.prompt) for request in self._first_requests)
        self._unreturned_tokens = 0
        """Of beams, of which only the best become candidates."""
        self.arrived_s = arrived_s
        self._id = requests[0].request_id.rpartition("-")[0]
        self._outcome: str | None = None
        self._answers: Answers = engine.submit(requests, arrived_s=arrived_s, at_end=at_end)
        metrics.in_flight.add(self)
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None and left_s is not None:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._answers.fail, too_late(timeout_s))

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """New text as it comes, of all candidates mixed. Raises: RequestFailed, EngineDead; ApiError when the time is over."""
        try:
            async for news in self._answers:
                for delta in self._took(news):
                    yield delta
        except Exception:
            self._end("failed")
            raise
        self._end("finished")

    def chosen(self) -> list[int]:
        """The candidates that are the answer's choices, in their order: of each prompt all, or the likeliest first."""
        order: list[int] = []
        for first in range(0, len(self._candidates), self._num_each):
            own: Sequence[int] = range(first, first + self._num_each)
            if self._num_each > self._num_choices:
                own = sorted(own, key=lambda index: self._candidates[index].mean_logprob, reverse=True)
            order += own[: self._num_choices]
        return order

    def usage(self) -> Usage:
        """Tokens so far."""
        prompt_tokens = self._prompt_tokens
        completion_tokens = sum(candidate.num_tokens for candidate in self._candidates) + self._unreturned_tokens
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached),
        )

    def describe(self, now_s: float) -> dict[str, Any]:
        """Numbers, and no text, for whoever looks: None for what the engine has not said yet."""
        has_begun = self._answers.first_s is not None
        return {
            "id": self._id,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._num_cached if has_begun else None,
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
    def _num_cached(self) -> int:
        """Tokens of the prompts that the prefix cache had, as far as they have begun."""
        cached = self._answers.cached_tokens
        return sum(cached.get(request.request_id, 0) for request in self._first_requests)

    def _took(self, news: Sequence[News]) -> Iterator[TextDelta]:
        """What is new of each candidate, in one piece, however many outputs of it came together. Raises: RequestFailed."""
        of_request: dict[str, list[Output]] = {}
        for each in news:
            index = self._first_candidate[each.request_id]
            if isinstance(each, PromptLogprobs):
                self._candidates[index].feed_prompt(each)
                of_request.setdefault(each.request_id, [])
                continue
            if isinstance(each, Beams):
                yield from self._found(index, each)
            else:
                of_request.setdefault(each.request_id, []).append(each)
        for request_id, outputs in of_request.items():
            index = self._first_candidate[request_id]
            candidate = self._candidates[index]
            if outputs:
                candidate.feed(outputs)
            if candidate.stopped:
                self._answers.abort(request_id)
            if (delta := candidate.take(index)) is not None:
                yield delta

    def _found(self, first: int, message: Beams) -> Iterator[TextDelta]:
        """The best of what a search found are the candidates from `first` on. Raises: RequestFailed if they are too few."""
        if len(message.beams) < self._num_choices:
            raise RequestFailed(
                f"The beam search found {len(message.beams)} answers for n={self._num_choices}; lower n or raise max_tokens."
            )
        self._unreturned_tokens += sum(len(beam.token_ids) for beam in message.beams[self._num_choices :])
        for index, beam in enumerate(message.beams[: self._num_choices], start=first):
            output = Output(request_id=message.request_id, token_ids=tuple(beam.token_ids), finish_reason=beam.finish_reason)
            self._candidates[index].feed([output])
            delta = self._candidates[index].take(index)
            assert delta is not None, "a beam is whole"
            yield delta

    def _end(self, outcome: str) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._metrics.in_flight.discard(self)
            self._metrics.requests.labels(outcome).inc()
            if log.isEnabledFor(logging.DEBUG):
                log.debug("request ended", extra={"outcome": outcome, "usage": self.usage().model_dump()})
            self._metrics.request_seconds.observe(time.perf_counter() - self.arrived_s)


# -------- service
# Grammars for the routes: from a request to what the engine is sent, with refusals in OpenAI's shape.


class GrammarService:
    """The grammar compiler of one server, created for the first grammar."""

    def __init__(self) -> None:
        self._compiler: GrammarCompiler | None = None

    async def start(self, grammar: Grammar, ready: Ready, *, namespace: str | None) -> float:
        """Have the compiler run, if this grammar needs it; how many seconds that took. Raises: ApiError (503)."""
        compiler, began_s = self._compiler_of(ready), time.perf_counter()
        if compiler.knows(grammar, namespace=namespace):
            return 0.0
        try:
            await compiler.start()
        except CompilerUnavailable as error:
            raise errors.unavailable(str(error)) from error
        return time.perf_counter() - began_s

    async def compiled(self, request: GenerationRequest, ready: Ready, *, namespace: str | None) -> bytes:
        """What the engine is sent; nothing for a free answer. Raises: ApiError, 400 naming the parameter, or 503."""
        param, grammar = request.grammar
        if grammar is None:
            return b""
        try:
            return await self._compiler_of(ready).compile(grammar, namespace=namespace)
        except GrammarRefused as error:
            raise bad_request(f"Invalid {param}: {error}.", param=param, code="invalid_grammar") from error
        except CompilerBusy as error:
            raise errors.unavailable(f"{error} Try again in a while.") from error
        except CompilerUnavailable as error:
            raise errors.unavailable(str(error)) from error

    async def close(self) -> None:
        """End what runs beside the server. Idempotent."""
        if self._compiler is not None:
            await self._compiler.close()

    def _compiler_of(self, ready: Ready) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler(Path(ready.model), ready.vocabulary_size, ready.end_tokens)
        return self._compiler
