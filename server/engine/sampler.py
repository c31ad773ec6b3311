"""From logits to token ids, on whatever device the logits are.

A row's random number depends on its request's seed and the token's position alone, never on who runs beside it. (The
logits themselves can differ in their last bits with the size of the batch, and so, rarely, can the token.) Sampling is
by inverse distribution in the order of the vocabulary, one number a token.

Log-probabilities are the model's own: log_softmax of the logits as they are, before temperature and top-p.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

NOT_A_NUMBER: Final = -1
"""In place of a token whose logits were not numbers: the host must fail that request."""

COLDEST: Final = 1e-5
"""Temperatures below are greedy: divided by them, logits leave float32."""


class Choice(NamedTuple):
    """How one row's next token is chosen."""

    temperature: float
    """0 takes the likeliest."""
    top_p: float
    """The least probable tokens go until this much probability is left; the likeliest always stays."""
    seed: int
    position: int


class Pick(NamedTuple):
    """What was sampled for one row, on the host."""

    token: int
    """Or NOT_A_NUMBER."""
    logprob: float | None
    """None if it was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What a step sampled, on the device; B rows, of which R were asked for their log-probability."""

    tokens_B: torch.Tensor
    """int64; NOT_A_NUMBER among them."""
    rows: Sequence[int] = ()
    """Those that were asked for it."""
    logprobs_R: torch.Tensor | None = None

    def tolist(self) -> list[Pick]:
        """All rows, read back from the device in one copy, which this waits for."""
        if self.logprobs_R is None:
            return [Pick(token, None) for token in self.tokens_B.tolist()]
        # A float64 holds every token id exactly.
        packed = torch.cat((self.tokens_B.double(), self.logprobs_R.double())).tolist()
        tokens, logprobs = packed[: len(self.tokens_B)], packed[len(self.tokens_B) :]
        logprob_of = dict(zip(self.rows, logprobs, strict=True))
        return [Pick(int(token), logprob_of.get(row)) for row, token in enumerate(tokens)]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of these two: counter-based (Philox, Salmon et al., SC 2011)."""
    return float(np.random.Generator(np.random.Philox(key=seed & (2**64 - 1), counter=position)).random())


def sample(logits_BV: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    """[B] int64 token ids on the logits' device, or NOT_A_NUMBER; B rows, V vocabulary. Does not wait for the device."""
    tokens_B = logits_BV.argmax(dim=-1)
    rows = [row for row, choice in enumerate(choices) if choice.temperature >= COLDEST]
    if rows:
        rows_R = torch.tensor(rows, device=logits_BV.device)
        tokens_B[rows_R] = _draw(logits_BV[rows_R].float(), [choices[row] for row in rows])
    return tokens_B.masked_fill(logits_BV.isnan().any(dim=-1), NOT_A_NUMBER)


def logprobs_of(logits_BV: torch.Tensor, tokens_B: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """[R] float32: the log-probability of each of these rows' token; of NOT_A_NUMBER it is no number. Does not wait."""
    rows_R = torch.tensor(rows, device=logits_BV.device)
    logprobs_RV = torch.log_softmax(logits_BV[rows_R], dim=-1, dtype=torch.float32)
    return logprobs_RV.gather(1, tokens_B[rows_R, None].clamp(min=0))[:, 0]


def likeliest(logits_BV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, count] float32 log-probabilities, the highest first, and their int64 token ids; at most V of them."""
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1, dtype=torch.float32)
    best = logprobs_BV.topk(min(count, logits_BV.shape[-1]), dim=-1)
    return best.values, best.indices


def _draw(logits_RV: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    """[R] token ids, drawn. Whatever the logits are, an id of the vocabulary comes out: an index past it loses the device."""
    numbers = [(choice.temperature, choice.top_p, uniform(choice.seed, choice.position)) for choice in choices]
    temperature_R1, top_p_R1, uniform_R1 = torch.tensor(numbers, device=logits_RV.device).T[:, :, None]
    sorted_RV, ids_RV = torch.softmax(logits_RV / temperature_R1, dim=-1).sort(dim=-1, descending=True, stable=True)
    cut_RV = sorted_RV.cumsum(dim=-1) - sorted_RV >= top_p_R1
    cut_RV[:, 0] = False
    kept_RV = torch.zeros_like(sorted_RV).scatter(1, ids_RV, sorted_RV.masked_fill(cut_RV, 0.0))
    sums_RV = kept_RV.cumsum(dim=-1)
    # The first sum above the number, so that a token of probability 0 never is; rounding can leave none above the last.
    picks_R = (sums_RV <= uniform_R1 * sums_RV[:, -1:]).sum(dim=-1)
    return torch.where(picks_R < logits_RV.shape[-1], picks_R, ids_RV[:, 0])
