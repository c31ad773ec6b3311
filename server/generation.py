"""One HTTP request's way through the engine: what it needs, whether it can fit, and its text as it comes."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from vmmkv.server.api_errors import bad_request
from vmmkv.server.client import Answers, EngineClient
from vmmkv.server.detokenize import Detokenizer
from vmmkv.server.metrics import Metrics
from vmmkv.server.protocol import Generate, Ready
from vmmkv.server.schemas import FinishReason, GenerationRequest, Usage
from vmmkv.units import format_bytes

_SEED_MASK = (1 << 63) - 1
"""Seeds reach the engine as non-negative numbers of 63 bits."""
_SEED_STEP = 0x9E3779B97F4A7C15
"""Odd, so that the seeds of a request's prompts all differ; 2**64 over the golden ratio spreads them far from its own."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one choice; the last one of a choice has a finish reason."""

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


def engine_requests(
    request: GenerationRequest, base_id: str, prompts: Sequence[list[int]], new_tokens: Sequence[int]
) -> list[Generate]:
    """The engine's part of a request: one Generate for each prompt, all with the same sampling parameters.

    Each has a seed of its own, that equal prompts may get different answers; the first one's is the request's.
    """
    first_seed = secrets.randbits(63) if request.seed is None else request.seed
    return [
        Generate(
            request_id=f"{base_id}-{index}",
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=(first_seed + index * _SEED_STEP) & _SEED_MASK,
        )
        for index, (prompt, max_new_tokens) in enumerate(zip(prompts, new_tokens, strict=True))
    ]


class Generation:
    """The text of one HTTP request, all its choices. `close` it whatever happens: what still runs is aborted then."""

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        requests: Sequence[Generate],
        choices: Sequence[Detokenizer],
        *,
        arrived_s: float,
    ) -> None:
        """Sends the requests to the engine. `arrived_s` is of time.perf_counter.

        Raises: EngineNotReady, EngineDead.
        """
        self._metrics = metrics
        self._requests = requests
        self._choices = choices
        self._indices = {request.request_id: index for index, request in enumerate(requests)}
        self._arrived_s = arrived_s
        self._outcome: str | None = None
        self._answers: Answers = engine.submit(requests)

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """New text as it comes, of all choices mixed. Raises: RequestFailed, EngineDead."""
        first = True
        try:
            async for message in self._answers:
                if first:
                    first = False
                    self._metrics.first_token_seconds.observe(time.perf_counter() - self._arrived_s)
                index = self._indices[message.request_id]
                choice, reason = self._choices[index], message.finish_reason
                text = choice.feed(message.token_ids)
                if reason is not None and not choice.stopped:
                    text += choice.finish()
                if choice.stopped:
                    reason = "stop"
                    self._answers.abort(message.request_id)
                if text or reason is not None:
                    yield TextDelta(index, text, reason)
        except Exception:
            self._end("failed")
            raise
        self._end("finished")

    def usage(self) -> Usage:
        """Tokens so far."""
        prompt_tokens = sum(len(request.prompt) for request in self._requests)
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        return Usage(
            prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=prompt_tokens + completion_tokens
        )

    def close(self) -> None:
        """Abort what still runs. Idempotent, never blocks."""
        self._answers.close()
        self._end("aborted")

    def _end(self, outcome: str) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._metrics.requests.labels(outcome).inc()
            self._metrics.request_seconds.observe(time.perf_counter() - self._arrived_s)
