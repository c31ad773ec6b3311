"""Does a system compute what the first one did? Its logits in each step, and the rows that its cache has in the end.

B sequences, K kv heads, T tokens, D head dim, V vocabulary
"""

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from bench.timing import WrongNumbers


class Bounds(NamedTuple):
    """The most by which something may be off: the length of the difference from the first system's, over that one's length."""

    logits: float
    row: float


BOUNDS: Final = {
    torch.float32: Bounds(logits=1e-3, row=1e-3),
    torch.bfloat16: Bounds(logits=0.1, row=0.5),
}
"""By the model's type. What has nothing in common is off by 1.4: a row of another token, or logits behind another prompt.

Adding up in another order changes bfloat16 by 0.4 % at a time, in each layer, and of half a million rows the worst is judged.
"""


@dataclass(slots=True)
class Expected:
    """What the first system computed, filled as it goes."""

    logits_BV: list[torch.Tensor] = field(default_factory=list)
    """Behind the prompt, and behind each step."""
    rows: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """By the number of tokens, K and V of the first and of the last layer, [B, K, T, D]."""


class Judge:
    """Holds one system against what is expected; the first system says what that is."""

    def __init__(self, expected: Expected, dtype: torch.dtype, *, first: bool) -> None:
        self._expected, self._first = expected, first
        self._bounds, self._dtype = BOUNDS[dtype], dtype
        self._num_taken = 0
        self._taken: tuple[torch.Tensor, torch.Tensor] | None = None
        self._same: dict[str, list[float]] = {}
        self.off: dict[str, list[float]] = {}
        """Of each step of a name, by how much its logits are off."""

    def take(self, logits_BV: torch.Tensor) -> None:
        """What was computed. Finding the likeliest is part of a step, and is timed with it."""
        self._taken = logits_BV, logits_BV.argmax(-1)

    def next_ids(self) -> torch.Tensor:
        """Of the step to come, int64 [B, 1]: the likeliest by the first system."""
        return self._expected.logits_BV[self._num_taken - 1].argmax(-1, keepdim=True)

    def judge(self, name: str) -> None:
        """Compare what was taken last. Raises: WrongNumbers; in float32 the likeliest token must be the same."""
        assert self._taken is not None, "a step has been run"
        (logits_BV, tokens_B), self._taken = self._taken, None
        if self._first:
            self._expected.logits_BV.append(logits_BV.clone())
        expected_BV = self._expected.logits_BV[self._num_taken]
        off = _most_off(logits_BV, expected_BV)
        same = float((tokens_B == expected_BV.argmax(-1)).float().mean())
        self.off.setdefault(name, []).append(off)
        self._same.setdefault(name, []).append(same)
        where = f"{name}, {self._num_taken} tokens behind the prompt"
        if not off <= self._bounds.logits:  # NaN is not
            raise WrongNumbers(f"{where}: logits are off by {off:.2g} of their length, over {self._bounds.logits}")
        if self._dtype == torch.float32 and same < 1:
            raise WrongNumbers(f"{where}: {100 * same:.0f} % of the tokens are those that a DynamicCache gives")
        self._num_taken += 1

    def go_back(self, num_steps: int) -> None:
        """The last steps are computed again, in another way. The first system is then held against itself."""
        self._first = False
        self._num_taken -= num_steps

    def share_same(self, name: str) -> float:
        """Of a name's tokens, how many the first system found likeliest too."""
        return sum(self._same[name]) / len(self._same[name])

    def judge_rows(self, cache: Any, num_tokens: int) -> None:
        """Compare rows of this many tokens. Raises: WrongNumbers for the first layer with one that is another's."""
        layers = (0, len(cache.layers) - 1)
        rows = [
            plane[:, :, :num_tokens] for layer in layers for plane in (cache.layers[layer].keys, cache.layers[layer].values)
        ]
        if self._first:
            self._expected.rows[num_tokens] = rows
        if num_tokens not in self._expected.rows:
            raise WrongNumbers(
                f"{num_tokens} tokens were written, and a DynamicCache had {', '.join(map(str, self._expected.rows))}"
            )
        for number, (given, wanted) in enumerate(zip(rows, self._expected.rows[num_tokens], strict=True)):
            what = f"{'KV'[number % 2]} of layer {layers[number // 2]}"
            if given.shape != wanted.shape or wanted.shape[2] != num_tokens:
                raise WrongNumbers(f"{what}: rows {list(given.shape)}, and {num_tokens} tokens were written")
            off = _most_off(given, wanted)
            if not off <= self._bounds.row:
                raise WrongNumbers(f"{what}: a row is off by {off:.2g} of its length, over {self._bounds.row}")


def _most_off(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of vectors in the last dimension, the one that is off most."""
    wanted = wanted.float()
    return float(((given.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
