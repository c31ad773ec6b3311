"""Log-probabilities of prompts, for `echo` and `prompt_logprobs`: of a chunk's rows, in bounded memory.

    rows of a chunk ──> the model's last states ── some rows at a time ──> logits ──> the next token's, the likeliest

A row from the prefix cache has no state, so such a request computes its whole prompt (`Request.attachable`). The runner
computes the states and calls `scores`; the engine sends what `Readback.wait` gives.

Legend: W rows that are scored, E hidden, V vocabulary, T likeliest tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from vmmkv import MIB
from vmmkv_server.engine.models import EngineModel
from vmmkv_server.engine.sampler import logprobs
from vmmkv_server.engine.step import ScoredRows

LOGITS_BYTES: Final = 64 * MIB
"""Float32 log-probabilities, rows * vocabulary, that are held at once; torch makes a copy or two."""


@dataclass(frozen=True, slots=True)
class States:
    """The model's states of all rows of a step that are scored."""

    states_WE: torch.Tensor
    tokens_W: torch.Tensor
    """The token behind each row, on the device."""
    scored: Sequence[tuple[int, ScoredRows]]
    """By chunk of the step, in the order of the rows."""


def scores(model: EngineModel, states: States) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[W] float32, the next token's log-probability, and [W, T] those of the likeliest and their int64 ids.

    T is the most that any of the requests wants. They are of the logits as they are. Waits for nothing.
    """
    top = max(each.num_likeliest for _, each in states.scored)
    num_rows = max(1, LOGITS_BYTES // (4 * model.vocabulary_size))
    pieces = zip(torch.split(states.states_WE, num_rows), torch.split(states.tokens_W, num_rows), strict=True)
    parts = [logprobs(model.logits(states_RE), tokens_R, slice(None), top) for states_RE, tokens_R in pieces]
    chosen, values, ids = zip(*parts, strict=True)
    return torch.cat(chosen), torch.cat(values), torch.cat(ids)
