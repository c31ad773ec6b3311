"""Passive data of a step: which rows are scored, and its results, on their way to the host and there.

Legend: W rows that are scored, T likeliest tokens, R rows of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vmmkv_server.engine.kv_backend import TokenIds


class ScoredRows(NamedTuple):
    """Rows of a prompt whose next token is scored."""

    first: int
    """The first of the rows. The row at index i gives the log-probability of token i + 1."""
    tokens: TokenIds
    """The prompt's token behind each row."""
    num_likeliest: int


class PromptScores(NamedTuple):
    """Log-probabilities of some tokens of a prompt, each with the T likeliest tokens in its place."""

    first: int
    """The first of the scored rows, as in `ScoredRows`."""
    chosen_W: npt.NDArray[np.float32]
    values_WT: npt.NDArray[np.float32]
    ids_WT: npt.NDArray[np.int64]


class Logprobs(NamedTuple):
    """Log-probabilities of one token, under the model's own distribution. A beam samples none: its `chosen` means nothing."""

    chosen: float
    likeliest: list[tuple[int, float]]
    """Token ids and log-probabilities, the highest first; as many as were asked for."""


class Results(NamedTuple):
    """Results of a step, on the host."""

    tokens: TokenIds
    """By row."""
    logprobs: dict[int, Logprobs]
    """By row, where they are wanted, or the row is a beam's: then `likeliest` are the candidates."""
    scores: dict[int, PromptScores]
    """By chunk of the step, where log-probabilities of the prompt are wanted."""


@dataclass(slots=True)
class Readback:
    """The results of a step on their way to the host, through pinned memory."""

    tokens_R: torch.Tensor
    logprobs: list[tuple[Sequence[tuple[int, int]], list[torch.Tensor]]] = field(default_factory=list)
    """Rows with log-probabilities, how many of the likeliest tokens each wants, and what `sampler.logprobs` gives for them."""
    scored: Sequence[tuple[int, ScoredRows]] = ()
    scores: Sequence[torch.Tensor] = ()
    done: torch.cuda.Event | None = None
    """Recorded behind all of it; None on a CPU."""

    @property
    def is_done(self) -> bool:
        """Has the device ended the step, be it by a failure, which `wait` raises? Never on a CPU. Cost: 2 us."""
        try:
            return self.done is not None and bool(self.done.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True

    def wait(self) -> Results:
        """The results. Blocks until the device is done with the step. It can be called again."""
        if self.done is not None:
            self.done.synchronize()
        found: dict[int, Logprobs] = {}
        for rows, tensors in self.logprobs:
            for (row, count), chosen, values, ids in zip(rows, *(tensor.tolist() for tensor in tensors), strict=True):
                found[row] = Logprobs(chosen, list(zip(ids[:count], values[:count], strict=True)))
        return Results(self.tokens_R.numpy(), found, _read(self.scored, *self.scores) if self.scored else {})


def _read(
    scored: Sequence[tuple[int, ScoredRows]], chosen_W: torch.Tensor, values_WT: torch.Tensor, ids_WT: torch.Tensor
) -> dict[int, PromptScores]:
    """Scores by chunk of the step: views of what `prompt_logprobs.scores` gave, once it is on the host."""
    found, begin = dict[int, PromptScores](), 0
    for index, each in scored:
        rows, columns = slice(begin, begin + len(each.tokens)), slice(each.num_likeliest)
        begin = rows.stop
        found[index] = PromptScores(
            each.first, chosen_W[rows].numpy(), values_WT[rows, columns].numpy(), ids_WT[rows, columns].numpy()
        )
    return found
