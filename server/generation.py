"""One HTTP request's way through the engine: what it needs, whether it can fit, and its text as it comes."""

import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from vmmkv.server.answer_schemas import FinishReason, PromptTokensDetails, Usage
from vmmkv.server.api_errors import bad_request
from vmmkv.server.client import Answers, EngineClient, RequestFailed
from vmmkv.server.detokenize import Detokenizer
from vmmkv.server.metrics import Metrics
from vmmkv.server.protocol import Beams, Generate, Ready, Tokens
from vmmkv.server.schemas import GenerationRequest
from vmmkv.units import format_bytes

_SEED_MASK = (1 << 63) - 1
"""Seeds reach the engine as non-negative numbers of 63 bits."""
_SEED_STEP = 0x9E3779B97F4A7C15
"""Between a request's prompts. Odd, so that their seeds all differ; 2**64 over the golden ratio spreads them far apart, so
that the seeds of one prompt's choices, which follow each other, meet no other's."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one candidate, which is a choice of the answer; the last one of each has a finish reason."""

    index: int
    text: str
    finish_reason: FinishReason | None


def fit_new_tokens(
    num_prompt_tokens: int, wanted: int | None, default: int | None, ready: Ready, *, model: str, prompt_param: str
) -> int:
    """How many new tokens a request may have: what it `wanted`, else `default`, else whatever fits.

    `model` is the name that clients know; `ready.model` may be a path of this machine.
    Raises: ApiError (400) if the prompt is empty or the request could never fit, whatever else runs.
    """
    limit = min(ready.max_tokens, ready.pool_tokens)
    if num_prompt_tokens == 0:
        raise bad_request("The prompt has no tokens; send at least one.", param=prompt_param, code="empty_prompt")
    room = limit - num_prompt_tokens
    if wanted is not None and wanted <= room:
        return wanted
    if wanted is None and room > 0:
        return room if default is None else min(default, room)

    if ready.pool_tokens < ready.max_tokens:
        reason = f"all that the KV budget of {format_bytes(ready.budget_bytes)} can hold; a larger budget would hold more"
    else:
        reason = f"the most that {model} takes here"
    given = f"{num_prompt_tokens} tokens of prompt"
    if wanted is not None:
        given = f"{num_prompt_tokens + wanted} tokens, {num_prompt_tokens} of prompt and {wanted} new"
    remedy = f"shorten the prompt to {limit - (wanted or 1)} tokens" if limit > (wanted or 1) else ""
    if wanted is not None and room > 0:
        remedy = f"lower max_tokens to {room}" + (f" or {remedy}" if remedy else "")
    remedy = remedy or f"shorten the prompt and lower max_tokens to {limit} together at most"
    message = f"This request is for {given}, but one request can have {limit} ({reason}): {remedy}."
    raise bad_request(message, param=prompt_param if room <= 0 else "max_tokens", code="context_length_exceeded")


def fit_beams(request: GenerationRequest, ready: Ready) -> None:
    """Raises: ApiError (400) if the engine has fewer slots than a search has beams, which all run at once."""
    if request.num_beams > ready.max_sequences:
        param, _ = request.widest
        message = f"A search of {request.num_beams} beams needs as many slots, and this server has {ready.max_sequences}"
        raise bad_request(f"{message}: lower {param} to {ready.max_sequences}.", param=param, code="too_many_beams")


def engine_requests(
    request: GenerationRequest, base_id: str, prompts: Sequence[list[int]], new_tokens: Sequence[int]
) -> list[Generate]:
    """The engine's part of a request: for each prompt a Generate for each candidate, or one for its beam search.

    Candidate i of the first prompt has the request's seed + i, so that it is what a request for it alone would give. Later
    prompts begin at seeds of their own, that equal ones may get different answers.
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
            temperature=0.0 if request.num_beams else temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=(first_seed + prompt_index * _SEED_STEP + index) & _SEED_MASK,
            want_logprobs=request.num_candidates > request.num_choices,
            cache_salt=request.cache_salt,
            beam_width=request.num_beams,
            length_penalty=request.length_penalty,
        )
        for prompt_index, (prompt, max_new_tokens) in enumerate(zip(prompts, new_tokens, strict=True))
        for index in range(num_each)
    ]


class Candidate:
    """One text: a choice of the answer, or one that `best_of` may drop."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self.detokenizer = detokenizer
        self._logprob_sum = 0.0
        self._num_logprobs = 0

    def feed(self, message: Tokens) -> str:
        """The text that can be shown now; what comes after a stop string counts for nothing."""
        before = self.detokenizer.num_tokens
        text = self.detokenizer.feed(message.token_ids)
        if message.finish_reason is not None and not self.detokenizer.stopped:
            text += self.detokenizer.finish()
        num_used = self.detokenizer.num_tokens - before
        used = message.logprobs[:num_used] if num_used < len(message.token_ids) else message.logprobs
        self._logprob_sum += sum(used)
        self._num_logprobs += len(used)
        return text

    @property
    def mean_logprob(self) -> float:
        """Of the tokens chosen, the end token among them; the worst there is if they were not numbers."""
        mean = self._logprob_sum / max(1, self._num_logprobs)
        return -math.inf if math.isnan(mean) else mean


class Generation:
    """The text of one HTTP request, all its candidates. `close` it whatever happens: what still runs is aborted then.

    The engine's requests, and the candidates, of one prompt stand side by side, as many for each prompt.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        requests: Sequence[Generate],
        detokenizers: Sequence[Detokenizer],
        *,
        num_prompts: int,
        num_choices: int,
        arrived_s: float,
    ) -> None:
        """Sends the requests to the engine; a detokenizer is a candidate, of which each prompt has `num_choices` returned.

        `arrived_s` is of time.perf_counter. Raises: EngineNotReady, EngineDead.
        """
        self._metrics = metrics
        self._candidates = [Candidate(detokenizer) for detokenizer in detokenizers]
        self._num_each = len(detokenizers) // num_prompts
        self._num_choices = num_choices
        num_of_request = len(detokenizers) // len(requests)
        self._first_candidate = {request.request_id: index * num_of_request for index, request in enumerate(requests)}
        self._prompt_tokens = sum(len(request.prompt) for request in requests[:: len(requests) // num_prompts])
        self._cached_tokens = 0
        self._unreturned_tokens = 0
        """Of beams, of which only the best become candidates."""
        self._arrived_s = arrived_s
        self._outcome: str | None = None
        self._answers: Answers = engine.submit(requests)

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """New text as it comes, of all candidates mixed. Raises: RequestFailed, EngineDead."""
        first = True
        try:
            async for message in self._answers:
                if first:
                    first = False
                    self._metrics.first_token_seconds.observe(time.perf_counter() - self._arrived_s)
                index = self._first_candidate[message.request_id]
                if index % self._num_each == 0:  # the prompt's first candidate; the others hit what this one computed
                    self._cached_tokens += message.cached_tokens
                if isinstance(message, Beams):
                    for delta in self._found(index, message):
                        yield delta
                elif (delta := self._continued(index, message)).text or delta.finish_reason is not None:
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
        completion_tokens = sum(candidate.detokenizer.num_tokens for candidate in self._candidates) + self._unreturned_tokens
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._cached_tokens),
        )

    def close(self) -> None:
        """Abort what still runs. Idempotent, never blocks."""
        self._answers.close()
        self._end("aborted")

    def _continued(self, index: int, message: Tokens) -> TextDelta:
        """One candidate goes on; at a stop string the engine is told to stop it."""
        text, reason = self._candidates[index].feed(message), message.finish_reason
        if self._candidates[index].detokenizer.stopped:
            reason = "stop"
            self._answers.abort(message.request_id)
        return TextDelta(index, text, reason)

    def _found(self, first: int, message: Beams) -> list[TextDelta]:
        """The best of what a search found are the candidates from `first` on. Raises: RequestFailed if they are too few."""
        if len(message.beams) < self._num_choices:
            raise RequestFailed(
                f"The beam search found {len(message.beams)} answers for n={self._num_choices}; lower n or raise max_tokens."
            )
        deltas = []
        for index, beam in enumerate(message.beams[: self._num_choices], start=first):
            tokens = Tokens(request_id=message.request_id, token_ids=beam.token_ids, finish_reason=beam.finish_reason)
            deltas.append(self._continued(index, tokens))
        self._unreturned_tokens += sum(len(beam.token_ids) for beam in message.beams[self._num_choices :])
        return deltas

    def _end(self, outcome: str) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._metrics.requests.labels(outcome).inc()
            self._metrics.request_seconds.observe(time.perf_counter() - self._arrived_s)
