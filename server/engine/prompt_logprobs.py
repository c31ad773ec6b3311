"""How likely each token of a prompt was, behind those before it: of a chunk's rows, in bounded memory.

    rows of a chunk ──> the model's last states ── some rows at a time ──> logits ──> the next token's, the likeliest

A row that comes from the prefix cache has no state: whoever asks computes the whole prompt (`Request.attachable`).

Legend: W rows that are asked about, E hidden, V vocabulary, T likeliest tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from vmmkv import MIB
from vmmkv.server.engine.kv_backend import TokenIds
from vmmkv.server.engine.models import Model
from vmmkv.server.engine.sampler import logprobs

LOGITS_BYTES: Final = 64 * MIB
"""Of the float32 log-probabilities, rows * vocabulary, that are held at once; torch makes a copy or two."""


class ScoredRows(NamedTuple):
    """What is asked about a chunk of a prompt: how likely its tokens were."""

    first: int
    """The first of the rows: what stands there says how likely the token behind it was."""
    tokens: TokenIds
    """The prompt's, behind each of the rows."""
    num_likeliest: int


@dataclass(frozen=True, slots=True)
class States:
    """What a step computed for those who ask."""

    states_WE: torch.Tensor
    tokens_W: torch.Tensor
    """The token behind each, on the device too."""
    scored: Sequence[tuple[int, ScoredRows]]
    """By whose chunk of the step, in the order of the rows."""


def scores(model: Model, states: States) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[W] float32, the next token's log-probability, and [W, T] those of the likeliest and their int64 ids.

    T is the most that anybody wants. They are of the logits as they are. Waits for nothing.
    """
    top = max(each.num_likeliest for _, each in states.scored)
    num_rows = max(1, LOGITS_BYTES // (4 * model.vocabulary_size))
    parts = []
    for states_RE, tokens_R in zip(
        torch.split(states.states_WE, num_rows), torch.split(states.tokens_W, num_rows), strict=True
    ):
        logits_RV = model.logits(states_RE)
        parts.append(logprobs(logits_RV, tokens_R, slice(None), top))
    chosen, values, ids = zip(*parts, strict=True)
    return torch.cat(chosen), torch.cat(values), torch.cat(ids)
