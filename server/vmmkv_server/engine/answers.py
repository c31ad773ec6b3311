"""Answers: what the results of a step mean for its requests. Rows are confirmed, tokens appended and sent, requests end."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from vmmkv_server.engine.feature import Feature, Features, Followed
from vmmkv_server.engine.kv_backend import Slots, TokenIds
from vmmkv_server.engine.request import Request
from vmmkv_server.engine.sampler import NOT_A_NUMBER
from vmmkv_server.engine.scheduler import Scheduler
from vmmkv_server.engine.step import Chunk, Logprobs, Results, Step
from vmmkv_server.protocol import Failed, FinishReason, FromEngine, Output, Outputs
from vmmkv_server.statistics import AnswerStatistics

_REFUSED: Final = NOT_A_NUMBER - 1000
"""Number in place of a token that a feature refuses."""

NO_NUMBERS: Final = "the model's logits are not numbers: it may need another dtype"
_NO_ROOM: Final = "the device had no room for a row that the host had: this is a bug"


class Answers:
    """Answers the requests of one engine."""

    def __init__(
        self, scheduler: Scheduler, features: Features, send: Callable[[FromEngine], None], eos_ids: frozenset[int]
    ) -> None:
        self.counts: Final = AnswerStatistics()
        self._scheduler = scheduler
        self._table = scheduler.table
        self._features = features
        self._send = send
        self._eos = np.array(sorted(eos_ids), np.int32)

    def give(self, step: Step, results: Results) -> None:
        """Confirm the rows of a step, and give its tokens to the requests that still run."""
        outputs: list[Output] = []
        live = np.flatnonzero(self._table.epochs[step.slots] == step.epochs)
        slots = step.slots[live]
        self._table.num_confirmed[slots] += 1
        row = len(step.slots)
        for chunk in step.chunks:
            if chunk.is_own and chunk.is_live:
                self._confirm(chunk, is_number=not chunk.is_last or results.tokens[row] != NOT_A_NUMBER)
            row += chunk.is_last
        for feature in self._features.having(Feature.results):
            feature.results(step, results)
        rows, sampled = live.tolist(), slots.tolist()
        for row, chunk in step.last_chunks():
            if chunk.num_candidates or not chunk.is_live:
                continue
            if not chunk.request.ask.params.max_tokens and results.tokens[row] >= 0:
                outputs.append(self.output(chunk.request, reason="length"))
                self._scheduler.finish(chunk.request)
            else:
                rows.append(row)
                sampled.append(chunk.slot)
        logprobs = [results.logprobs.get(row) for row in rows] if results.logprobs else None
        self._answer(np.array(sampled, np.int64), results.tokens[rows], logprobs, outputs)
        if outputs:
            self._send(Outputs(outputs=outputs))

    def fail(self, requests: Sequence[Request], message: str) -> None:
        """End these requests by an error."""
        for request in requests:
            self._send(Failed(request_id=request.ask.request_id, message=message))
            self._scheduler.finish(request, keep=False)

    def forced(self, request: Request, tokens: list[int]) -> Output:
        """The message with tokens of a request that no step has sampled."""
        self.counts.generation_tokens += len(tokens)
        return self.output(request, tuple(tokens))

    def output(
        self,
        request: Request,
        tokens: tuple[int, ...] = (),
        reason: FinishReason | None = None,
        logprobs: Logprobs | None = None,
    ) -> Output:
        """The message with the next tokens of a request; they count as sent."""
        is_first = not request.num_answered
        request.num_answered += len(tokens)
        return Output(
            request_id=request.ask.request_id,
            token_ids=tokens,
            finish_reason=reason,
            cached=request.cached if is_first else (),
            queued_us=request.queued_us if is_first else 0,
            logprobs=() if logprobs is None else (logprobs.chosen,),
            top_logprobs=(tuple(logprobs.likeliest),) if logprobs is not None and logprobs.likeliest else (),
        )

    def _confirm(self, chunk: Chunk, *, is_number: bool) -> None:
        """A chunk of a request's own tokens has been computed; `is_number`: and no NaN has come of it."""
        request, confirmed = chunk.request, self._table.num_confirmed
        num_prompt, end = len(request.prompt), chunk.end + request.num_dropped
        num_new = min(end, num_prompt) - min(int(confirmed[chunk.slot]), num_prompt)
        confirmed[chunk.slot] = end
        self.counts.prompt_tokens += num_new
        if num_new and is_number:
            self._scheduler.insert_prefix(request)

    def _answer(
        self, slots: Slots, tokens: TokenIds, logprobs: Sequence[Logprobs | None] | None, outputs: list[Output]
    ) -> None:
        """The requests in these slots have their next tokens. Cost: a few numpy calls, and a message for each request."""
        table = self._table
        stops = np.isin(tokens, self._eos) & ~table.ignores_eos[slots]
        for index in np.flatnonzero(table.has_stops[slots]).tolist():
            request = table.requests[slots[index]]
            stops[index] |= request is not None and int(tokens[index]) in request.stop_ids
        is_kept = ~((tokens < 0) | stops)
        table.append(slots[is_kept], tokens[is_kept])
        self.counts.generation_tokens += int(is_kept.sum())
        ends = stops | (table.num_known[slots] >= table.max_tokens[slots])
        refused, continued = Followed({}, [])
        for feature in self._features.having(Feature.sampled):
            refused, continued = feature.sampled(slots, tokens, is_kept)
        if refused:
            tokens = tokens.copy()
            tokens[list(refused)] = _REFUSED
        finished: list[Request] = []
        for index, (slot, token) in enumerate(zip(slots.tolist(), tokens.tolist(), strict=True)):
            request = table.requests[slot]
            assert request is not None, "no request runs there"
            if token < 0:
                self.fail([request], refused.get(index) or (NO_NUMBERS if token == NOT_A_NUMBER else _NO_ROOM))
                continue
            reason: FinishReason | None = ("stop" if stops[index] else "length") if ends[index] else None
            sent = () if reason == "stop" else (token,)
            outputs.append(self.output(request, sent, reason, logprobs[index] if logprobs else None))
            if reason is not None:
                finished.append(request)
        for request in finished:
            self._scheduler.finish(request)
        for request, forced in continued:
            if forced is None:
                outputs.append(self.output(request, reason="stop"))
                self._scheduler.finish(request)
            else:
                self._scheduler.force(request, forced)
                if forced:
                    outputs.append(self.forced(request, forced))
