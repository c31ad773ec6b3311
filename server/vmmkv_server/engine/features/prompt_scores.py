"""Log-probabilities of prompts, for `echo` and `prompt_logprobs`: of a chunk's rows, in bounded memory.

    rows of a chunk ──> the model's last states ── some rows at a time ──> logits ──> the next token's, the likeliest

A row from the prefix cache has no state, so such a request computes its whole prompt.

Legend: W rows that are scored, E hidden, V vocabulary, T likeliest tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from vmmkv import MIB
from vmmkv_server.engine.feature import Feature, Need
from vmmkv_server.engine.features import Core
from vmmkv_server.engine.kv_backend import TokenIds
from vmmkv_server.engine.request import Request, Shape
from vmmkv_server.engine.runner import Runner
from vmmkv_server.engine.sampler import logprobs
from vmmkv_server.engine.step import Chunk, Results, Step
from vmmkv_server.protocol import Generate, PromptLogprobs

LOGITS_BYTES: Final = 64 * MIB
"""Float32 log-probabilities, rows * vocabulary, that are held at once; torch makes a copy or two."""


class ScoredRows(NamedTuple):
    """Rows of a chunk whose next token is scored."""

    chunk: int
    """Index of the chunk in the step."""
    start: int
    """First of the rows within the chunk."""
    tokens: TokenIds
    """The prompt's token behind each row."""
    num_likeliest: int


class PromptScores(Feature):
    """Scores the prompts of requests with `prompt_logprobs`, and sends what comes."""

    def __init__(self, core: Core) -> None:
        self._runner = core.runner
        self._send = core.send
        self._num_sent: dict[Request, int] = {}
        """Rows whose next token's log-probability has been sent; of those of which some have."""

    @staticmethod
    def warm_up(runner: Runner, whole: Chunk, behind: Chunk, compute: Callable[..., None]) -> None:
        """Score all tokens of a prompt."""
        if runner.model.has_states:
            scored = ScoredRows(0, 0, whole.request.prompt[1:], 1)
            compute(whole, wanted=ScoredStates(runner, [scored]))

    def refusal(self, ask: Generate) -> str | None:
        """Models of transformers that have no head of their own give no states."""
        if ask.params.prompt_logprobs is None or self._runner.model.has_states:
            return None
        return "this model has no head of its own, and so no log-probabilities of its prompts: leave them out"

    def need(self, ask: Generate, need: Need) -> Need:
        """The prompt is computed as a whole."""
        return need._replace(attaches=need.attaches and ask.params.prompt_logprobs is None)

    def shape(self, request: Request, shape: Shape) -> Shape:
        """Rows whose next token is still to be scored are not attached: cached rows have no logits."""
        num_sent = self._num_sent.get(request, 0)
        if request.ask.params.prompt_logprobs is None or num_sent >= len(request.prompt) - 1:
            return shape
        return shape._replace(num_attachable=min(shape.num_attachable, num_sent + 1))

    def planned(self, step: Step) -> None:
        """Ask for the states of the rows to be scored."""
        found: list[ScoredRows] = []
        for index, chunk in enumerate(step.chunks):
            request, count = chunk.request, chunk.request.ask.params.prompt_logprobs
            if count is None:
                continue
            first, end = max(chunk.start, self._num_sent.get(request, 0)), min(chunk.end, len(request.prompt) - 1)
            if first < end:
                found.append(ScoredRows(index, first - chunk.start, request.prompt[first + 1 : end + 1], count))
        if found:
            assert step.wanted is None, "another feature wants states"
            step.wanted = ScoredStates(self._runner, found)

    def results(self, step: Step, results: Results) -> None:
        """Send the scores of the requests that still run."""
        begin = 0
        for each in step.wanted.scored if isinstance(step.wanted, ScoredStates) else ():
            rows, columns = slice(begin, begin + len(each.tokens)), slice(each.num_likeliest)
            begin, chunk = rows.stop, step.chunks[each.chunk]
            if chunk.is_live:
                request = chunk.request
                assert chunk.start + each.start == self._num_sent.get(request, 0), "each is sent once, in order"
                self._num_sent[request] = chunk.start + each.start + len(each.tokens)
                chosen_W, values_WT, ids_WT = (tensor[rows].numpy() for tensor in results.of_states)
                scores = chosen_W, values_WT[:, columns], ids_WT[:, columns]
                self._send(PromptLogprobs.packed(request.ask.request_id, *scores))

    def finished(self, request: Request) -> None:
        """Forget how much of a request has been sent."""
        self._num_sent.pop(request, None)


@dataclass(frozen=True, slots=True)
class ScoredStates:
    """The `WantedStates` of the rows of a step that are scored."""

    runner: Runner
    scored: list[ScoredRows]

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        """Chunks and their rows, as `WantedStates.rows`."""
        return [(each.chunk, each.start, len(each.tokens)) for each in self.scored]

    def read(self, states_WE: torch.Tensor) -> list[torch.Tensor]:
        """[W] float32, the next token's log-probability, and [W, T] those of the likeliest and their int64 ids.

        T is the most that any of the requests wants. They are of the logits as they are. One upload; waits for nothing.
        """
        model, top = self.runner.model, max(each.num_likeliest for each in self.scored)
        (tokens_W,) = self.runner.uploads.pack([np.concatenate([each.tokens for each in self.scored])])
        num_rows = max(1, LOGITS_BYTES // (4 * model.vocabulary_size))
        pieces = zip(torch.split(states_WE, num_rows), torch.split(tokens_W, num_rows), strict=True)
        parts = [logprobs(model.logits(states_RE), tokens_R, slice(None), top) for states_RE, tokens_R in pieces]
        return [torch.cat(each) for each in zip(*parts, strict=True)]
