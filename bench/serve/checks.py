"""Is what the engine says right? Checked before it is timed.

Random weights make near-ties, and in bfloat16 the rounding of a batch's shape decides them: a sequence alone and in a batch
may part after some tokens, and both are right. So whole answers are compared between runs that do the same, and what batching,
chunks and sharing do is seen in the log-probabilities of the first token, against those of the request alone over an empty
cache. How far these may be off follows from how far they move if the prompt is another one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from bench.serve.engine import Answers, ServedEngine
from bench.serve.requests import Requests, Workload
from bench.timing import WrongNumbers

TOLERANCE: Final = {torch.float32: 0.001, torch.bfloat16: 0.15, torch.float16: 0.15}
"""Of what another prompt would change, by the type of weights, K and V.

Of four seeds, right systems were off by up to 0.02 % in float32 on a CPU (transformers; engines by less), of one by 6.1 % in
bfloat16 on an H200. One that reads zeroes for each sequence's first key is off by 26 %.
"""

_LEAST_COMMON: Final = 0.5
"""Of the likeliest tokens, the share that both must have, for their log-probabilities to be compared."""

_MOST_TOKENS: Final = 65_536
"""That are computed alone, of all prompts of a workload: some seconds of a large model."""

LogProbs = Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The likeliest first tokens of some requests of a workload, each computed alone."""

    sampled: list[int]
    likeliest: list[dict[int, float]]
    shift: float
    """By how much the log-probabilities change if all but a prompt's own tokens are others: root mean square."""
    tolerance: float
    """How much of that they may be off by."""

    @classmethod
    def of(cls, engine: ServedEngine, workload: Workload, requests: Requests, count: int) -> "Alone":
        """Of the first `count` requests, fewer if they are long.

        Raises: WrongNumbers if a wrong prompt could not be told from the right one.
        """
        longest = max(map(len, workload.prompts))
        sampled = list(range(min(count, len(workload.prompts), max(1, _MOST_TOKENS // longest))))
        prompts = [workload.prompts[index] for index in sampled]
        own = workload.own_tokens
        others = [requests.tokens(len(prompt) - own, 6, index) + prompt[-own:] for index, prompt in enumerate(prompts)]
        right, wrong = ([_likeliest(engine, prompt) for prompt in each] for each in (prompts, others))
        shift = math.inf if not all(map(alike, right, wrong)) else distance(right, wrong)
        if not shift > 0:
            raise WrongNumbers(f"other tokens before the last {own} change nothing: a wrong prefix would not be seen")
        return cls(sampled=sampled, likeliest=right, shift=shift, tolerance=TOLERANCE[engine.dtype])

    def check(self, answers: Answers) -> float:
        """By how much the same requests' are off, as a share of what another beginning changes. Raises WrongNumbers."""
        for index, (wanted, given) in enumerate(zip(self.likeliest, answers.likeliest, strict=True)):
            if not alike(wanted, given):
                raise WrongNumbers(f"request {self.sampled[index]} has other likeliest first tokens than it has alone")
        # Where another beginning leaves nothing in common, log-probabilities of flat distributions still differ by about 1.
        off = distance(self.likeliest, answers.likeliest) / min(self.shift, 1.0)
        check_off(off, self.tolerance, "first tokens")
        return off


def check_off(off: float, tolerance: float, what: str) -> None:
    """Raises: WrongNumbers if `what` is off by more, as a share of what another prompt changes."""
    if not off <= tolerance:  # NaN is not
        raise WrongNumbers(
            f"{what} are off by {100 * off:.2g} % of what another prompt would change, at most {100 * tolerance:g} %"
        )


def share_of_same(runs: Sequence[Answers], *, strict: bool) -> float:
    """How many of the requests have the same tokens in all runs, as a share. `strict`: raises WrongNumbers if not all have."""
    first, *others = runs
    differing = [index for index, tokens in enumerate(first.tokens) if any(other.tokens[index] != tokens for other in others)]
    if differing and strict:
        raise WrongNumbers(
            f"{len(differing)} of {len(first.tokens)} requests have other tokens in another run: {differing[:8]}"
        )
    return 1 - len(differing) / len(first.tokens)


def distance(some: Sequence[LogProbs], others: Sequence[LogProbs]) -> float:
    """Root mean square of the differences, over the tokens that both have."""
    squares = [
        (one[token] - other[token]) ** 2 for one, other in zip(some, others, strict=True) for token in one.keys() & other.keys()
    ]
    return math.sqrt(sum(squares) / len(squares)) if squares else math.inf


def _likeliest(engine: ServedEngine, prompt: list[int]) -> dict[int, float]:
    engine.forget()
    return engine.ask([prompt], [1], scored=[0]).likeliest[0]


def alike(one: LogProbs, other: LogProbs) -> bool:
    """Have they enough tokens in common?"""
    return len(one.keys() & other.keys()) >= _LEAST_COMMON * max(len(one), len(other), 1)
