"""From a checked request to text as it comes: the engine's requests, and a stream of text for each choice.

prompts ── engine_requests ──> Generate ... engine ... Output ── ChoiceStream ──> TextDelta
"""

import asyncio
import dataclasses
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from vmmkv_server.engine_client import Answers, EngineClient, News, RequestFailed
from vmmkv_server.http import errors
from vmmkv_server.http.schemas import GenerationRequest
from vmmkv_server.metrics import Metrics
from vmmkv_server.protocol import LOGPROB_BYTES, Beams, FinishReason, Generate, Output, PromptLogprobs, Ready
from vmmkv_server.sampling_params import SEED_MASK, SamplingParams
from vmmkv_server.structured_output.compiler import CompilerBusy, CompilerUnavailable, GrammarCompiler
from vmmkv_server.structured_output.schema import Grammar, GrammarRefused
from vmmkv_server.tokenizer import Detokenizer, Echo

log = logging.getLogger(__name__)

T = TypeVar("T")

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
"""Between the seeds of a request's prompts: 2**64 over the golden ratio, odd, so that the consecutive seeds of one prompt's
choices meet no other's."""


async def off_loop(cost: int, work: Callable[[], T], *, inline: int) -> T:
    """The result of `work`, made in a thread if its `cost` is above `inline`, where the way there and back pays.

    What is large has one thread, the rest four. A caller that is cancelled while it waits for a thread leaves the queue.
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

    def error(self) -> errors.ApiError:
        """408. OpenAI's client would send the request again by itself, and is told not to."""
        return errors.too_late(f"The answer was not finished within {self.timeout_s:g} s.", {"x-should-retry": "false"})


def check_prompt_logprobs(request: GenerationRequest, prompts: Sequence[list[int]]) -> None:
    """Raises: ApiError (400) if a request is for more log-probabilities of its prompts than an answer may hold."""
    if request.params.prompt_logprobs is None:
        return
    each = _PROMPT_TOKEN_WEIGHT + request.params.prompt_logprobs
    num_tokens = request.params.n * sum(map(len, prompts))
    if each * num_tokens > MAX_PROMPT_LOGPROBS:
        why = (
            f"with echo this request counts for {each * num_tokens} log-probabilities, {each} for each of {num_tokens} tokens "
            f"of prompts, and {MAX_PROMPT_LOGPROBS} is the most: lower logprobs, or send fewer prompts or choices in a request"
        )
        raise errors.invalid("logprobs", why, code="too_many_logprobs")


def engine_requests(
    request: GenerationRequest,
    base_id: str,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    *,
    grammar: bytes,
    namespace: str | None,
) -> list[Generate]:
    """For each prompt, with its params, a Generate for each choice, or one for its beam search.

    Choice i of the first prompt has the request's seed + i: the answer that a request for it alone would get. Later prompts
    begin at seeds of their own, so that equal prompts may get different answers.
    """
    first_seed = secrets.randbits(63) if request.params.seed is None else request.params.seed
    num_each = 1 if request.params.is_search else request.params.n
    return [
        Generate(
            request_id=f"{base_id}-{prompt_index * num_each + index}",
            prompt=prompt,
            params=dataclasses.replace(own, seed=(first_seed + prompt_index * _SEED_STEP + index) & SEED_MASK),
            priority=request.priority,
            cache_salt=namespace,
            grammar=grammar,
        )
        for prompt_index, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        for index in range(num_each)
    ]


class GrammarService:
    """The grammars that requests ask for, and the compiler of one server, created for the first of them."""

    def __init__(self) -> None:
        self._compiler: GrammarCompiler | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        """Of schemas: to read one holds Python's lock, which several threads would take from the event loop in turn."""

    async def read(self, request: GenerationRequest) -> Grammar:
        """The grammar of a request that has one. A schema waits for those before it. Raises: ApiError (400)."""
        try:
            if not request.has_schema:
                return request.grammar()
            return await asyncio.get_running_loop().run_in_executor(self._reader, request.grammar)
        except GrammarRefused as error:
            raise errors.invalid(request.grammar_source, error) from error

    async def compiled(self, param: str, grammar: Grammar, ready: Ready, *, namespace: str | None, deadline: Deadline) -> bytes:
        """The grammar of `param` as the engine takes it. The compiler's start is not on the request's time.

        Raises: ApiError: 400 naming the parameter, 408, 503.
        """
        if self._compiler is None:
            self._compiler = GrammarCompiler(Path(ready.model), ready.limits.vocabulary_size, ready.end_tokens)
        compiler, began_s = self._compiler, time.perf_counter()
        try:
            if not compiler.knows(grammar, namespace=namespace):
                await compiler.start()
                deadline.spared_s += time.perf_counter() - began_s
            async with asyncio.timeout(deadline.left_s()):
                return await compiler.compile(grammar, namespace=namespace)
        except GrammarRefused as error:
            raise errors.invalid(param, error, code="invalid_grammar") from error
        except TimeoutError as error:
            raise deadline.error() from error
        except CompilerBusy as error:
            raise errors.unavailable(f"{error} Try again in a while.") from error
        except CompilerUnavailable as error:
            raise errors.unavailable(str(error)) from error

    async def close(self) -> None:
        """End the compiler's process and the reader's thread. Idempotent."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            await self._compiler.close()


class Score(NamedTuple):
    """The log-probability of a token of the answer."""

    token_id: int
    logprob: float | None
    """None for the first token of a prompt, which comes after nothing."""
    likeliest: Sequence[tuple[int, float]]
    """The likeliest tokens at its place, and their log-probabilities; as many as were asked for."""
    offset: int
    """Where the token begins in the text of the answer, in characters."""


@dataclass(frozen=True, slots=True)
class EchoScores:
    """The Scores of a prompt, packed as the engine sent them: unpacking takes long, so it is done off the event loop."""

    echo: Echo
    messages: list[PromptLogprobs] = field(default_factory=list)

    @property
    def are_complete(self) -> bool:
        """Whether every token has one; the first token of the prompt has one although nothing is sent of it."""
        return 1 + sum(len(message.logprobs) for message in self.messages) // LOGPROB_BYTES == len(self.echo.token_ids)

    @property
    def num_logprobs(self) -> int:
        """Log-probabilities, those of the likeliest tokens among them."""
        return sum(len(message.logprobs) + len(message.top_logprobs) for message in self.messages) // LOGPROB_BYTES

    def unpacked(self) -> Iterator[Score]:
        """The Score of each token, in order. Takes a few microseconds each."""
        scores = [(None, ()), *chain.from_iterable(zip(*message.unpacked(), strict=True) for message in self.messages)]
        for token_id, (logprob, likeliest), offset in zip(self.echo.token_ids, scores, self.echo.offsets, strict=True):
            yield Score(token_id, logprob, likeliest, offset)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one choice; its last one has a finish reason."""

    index: int
    """Of the choice."""
    text: str
    finish_reason: FinishReason | None
    scores: Sequence[Score] | None = None
    """Of the new tokens; None unless they were asked for."""
    echo_scores: EchoScores | None = None
    """Of a prompt that stands before the new tokens."""

    @property
    def num_logprobs(self) -> int:
        """Log-probabilities to write."""
        of_echo = 0 if self.echo_scores is None else self.echo_scores.num_logprobs
        return of_echo + (len(self.scores) * (1 + len(self.scores[0].likeliest)) if self.scores else 0)

    def all_scores(self) -> list[Score]:
        """Those of an echoed prompt too."""
        return [*(self.echo_scores.unpacked() if self.echo_scores else ()), *(self.scores or ())]


class ChoiceStream:
    """The text of one choice: `feed` it the engine's outputs, `take` what is new.

    The text begins with that of an `echo`. `scored`: keep a Score for each token; those of the echo come by `feed_prompt`,
    before any output.
    """

    def __init__(self, detokenizer: Detokenizer, *, scored: bool = False, echo: Echo | None = None) -> None:
        self.detokenizer = detokenizer
        self._text = "" if echo is None else echo.text
        self._first_offset = len(self._text)
        self._scores: list[Score] | None = [] if scored else None
        self._echo_scores = EchoScores(echo) if scored and echo is not None else None
        self._reason: FinishReason | None = None

    def feed_prompt(self, message: PromptLogprobs) -> None:
        """Log-probabilities of the next tokens of the echoed prompt, in order."""
        assert self._echo_scores is not None, "they were not asked for"
        self._echo_scores.messages.append(message)

    def feed(self, outputs: Sequence[Output]) -> None:
        """The engine's outputs since the last call, in order. Tokens after a stop string are dropped."""
        if self.detokenizer.stopped:
            return
        reason = outputs[-1].finish_reason
        token_ids = list(chain.from_iterable(output.token_ids for output in outputs))
        if self._scores is not None:
            self._feed_scored(token_ids, outputs)
            token_ids = []
        if reason is None:
            self._text += self.detokenizer.feed(token_ids)
        elif not self.detokenizer.stopped:
            self._text += self.detokenizer.finish(token_ids)
        self._reason = "stop" if self.detokenizer.stopped else reason

    def take(self, index: int) -> TextDelta | None:
        """New text since the last call, as of choice `index`. None if there is none: scores wait for text."""
        is_waiting = self._echo_scores is not None and not self._echo_scores.are_complete
        if self._reason is None and (is_waiting or not self._text):
            return None
        delta = TextDelta(index, self._text, self._reason, self._scores, self._echo_scores)
        self._text, self._echo_scores = "", None
        if self._scores is not None:
            self._scores = []
        return delta

    def _feed_scored(self, token_ids: Sequence[int], outputs: Sequence[Output]) -> None:
        logprobs = list(chain.from_iterable(output.logprobs for output in outputs))
        likeliest = chain.from_iterable(output.top_logprobs or ((),) * len(output.logprobs) for output in outputs)
        assert self._scores is not None and len(logprobs) >= len(token_ids), "the engine sent no log-probabilities"
        # Both can be longer by one: an end token has its own, and is not among the tokens.
        for token_id, logprob, likely in zip(token_ids, logprobs, likeliest, strict=False):
            if self.detokenizer.stopped:
                return
            offset = self._first_offset + self.detokenizer.num_characters
            self._scores.append(Score(token_id, logprob, likely, offset))
            self._text += self.detokenizer.feed([token_id])


class Generation:
    """All choices of one HTTP request, from the engine. `close` it in any case: that aborts what still runs.

    Choices stand in the order of the prompts, `num_choices` for each prompt; so do the engine's requests.
    With `at_end` the text is wanted whole, so only ends wake this task.

    Raises: EngineNotReady, EngineDead; ApiError (408) if the time is over already.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        in_flight: "set[Generation]",
        requests: Sequence[Generate],
        choices: Sequence[ChoiceStream],
        *,
        num_choices: int,
        deadline: Deadline,
        at_end: bool = False,
    ) -> None:
        self.arrived_s = deadline.arrived_s
        self._metrics = metrics
        self._in_flight = in_flight
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
        self._answers: Answers = engine.submit(requests, arrived_s=self.arrived_s, at_end=at_end)
        self._timer: asyncio.TimerHandle | None = None
        if left_s is not None:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._answers.fail, deadline.error())
        in_flight.add(self)

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

    def token_counts(self) -> tuple[int, Counter[str], int]:
        """Tokens so far: of the prompts, those of them found in the prefix cache by where they were, and of the answers."""
        completion_tokens = sum(choice.detokenizer.num_tokens for choice in self._choices) + self._unreturned_tokens
        return self._prompt_tokens, self._cached, completion_tokens

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
        self._in_flight.discard(self)
        self._metrics.requests.labels(outcome).inc()
        self._metrics.request_seconds.observe(time.perf_counter() - self.arrived_s)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("request ended", extra={"outcome": outcome, "tokens": self.token_counts()})
