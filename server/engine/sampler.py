"""From logits to token ids, on whatever device the logits are.

A row's random number depends on its request's seed and the token's position alone, so a request's tokens do not depend
on who runs beside it. Sampling is by inverse distribution over the sorted probabilities, one number a token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class Choice(NamedTuple):
    """How one row's next token is chosen."""

    temperature: float
    """0 takes the likeliest."""
    top_p: float
    """The least probable tokens go until this much probability is left."""
    seed: int
    position: int


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of these two: counter-based (Philox, Salmon et al., SC 2011)."""
    return float(np.random.Generator(np.random.Philox(key=seed & (2**64 - 1), counter=position)).random())


def sample(logits_BV: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    """[B] int64 token ids on the logits' device; B rows, V vocabulary. Does not wait for the device."""
    tokens_B = logits_BV.argmax(dim=-1)
    rows = [row for row, choice in enumerate(choices) if choice.temperature > 0]
    if not rows:
        return tokens_B
    chosen = [choices[row] for row in rows]
    numbers = torch.tensor(
        [(choice.temperature, choice.top_p, uniform(choice.seed, choice.position)) for choice in chosen],
        dtype=torch.float32,
        device=logits_BV.device,
    )
    temperature_R, top_p_R, uniform_R = numbers.unbind(dim=1)
    rows_R = torch.tensor(rows, device=logits_BV.device)
    probabilities_RV = torch.softmax(logits_BV[rows_R].float() / temperature_R[:, None], dim=-1)
    sorted_RV, ids_RV = probabilities_RV.sort(dim=-1, descending=True, stable=True)
    before_RV = sorted_RV.cumsum(dim=-1) - sorted_RV
    sorted_RV = sorted_RV.masked_fill(before_RV >= top_p_R[:, None], 0.0)
    sums_RV = sorted_RV.cumsum(dim=-1)
    # Of equal sums the first is taken, so that a token of probability 0 never is; the clamp is for rounding at the end.
    picks_R1 = torch.searchsorted(sums_RV, uniform_R[:, None] * sums_RV[:, -1:], right=True)
    last_R1 = (sorted_RV > 0).sum(dim=-1, keepdim=True) - 1
    tokens_B[rows_R] = ids_RV.gather(1, torch.minimum(picks_R1, last_R1)).squeeze(1)
    return tokens_B
