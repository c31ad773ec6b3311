"""Conversations in rounds: in each of them every conversation says something more, when the round before has ended.

Together they have four times as many tokens as fit: a system that keeps what it evicts need not compute it again.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final, Protocol, Self

import numpy as np

from bench.systems.runs import ServedRun
from bench.workloads import TokenIds, Workload, at_once

Talks = list[list[TokenIds]]
"""By turn and conversation, what is said."""


class System(Protocol):
    """A system that can keep what it knows between runs."""

    def run(self, workload: Workload, *, keep: bool = False) -> ServedRun:
        """Serve a workload; with `keep`, over what is known of its prompts. See System of bench.systems."""

    def forget(self) -> None:
        """Forget all prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Sizes of conversations."""

    count: int
    turns: int
    begin: tuple[int, int]
    """Least and most tokens of a first turn; of the other ones in `more`."""
    more: tuple[int, int]
    out: int

    @classmethod
    def of(cls, *, small: bool) -> Self:
        """The sizes of all suites; `small`: to see that everything works."""
        if small:
            return cls(count=8, turns=2, begin=(1030, 1100), more=(300, 400), out=4)
        return cls(count=64, turns=4, begin=(1600, 2400), more=(200, 400), out=64)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest conversation."""
        return self.begin[1] + (self.turns - 1) * self.more[1] + self.turns * self.out

    def drawn(self, seed: int, number: int, vocabulary: int) -> Talks:
        """Tokens that each turn of each conversation adds, in the run of this number."""
        rng = np.random.default_rng((seed, 12, number))
        lengths = [rng.integers(least, most + 1, self.count) for least, most in [self.begin] + [self.more] * (self.turns - 1)]
        return [[rng.integers(0, vocabulary, length, dtype=np.int32) for length in of_turn] for of_turn in lengths]

    def num_tokens(self, talks: Talks) -> int:
        """Tokens of all conversations at their end."""
        return sum(len(new) + self.out for of_turn in talks for new in of_turn)

    def text(self, talks: Talks) -> str:
        """Name of the workload."""
        tokens = self.num_tokens(talks) // self.count
        return f"{self.count} conversations of {self.turns} turns, {tokens} tokens each, a quarter of them on the device"


SHARE: Final = 4
"""Part of the conversations that fits, as its divisor."""


def in_rounds(system: System, talks: Talks, num_out: int) -> ServedRun:
    """All turns as one run, in which all requests of a round arrive together."""
    system.forget()
    so_far = [np.empty(0, np.int32)] * len(talks[0])
    whole = ServedRun([], 0.0)
    for news in talks:
        prompts = [np.concatenate(parts) for parts in zip(so_far, news, strict=True)]
        run = system.run(at_once(prompts, num_out), keep=True)
        so_far = [np.array([*prompt, *each.tokens], np.int32) for prompt, each in zip(prompts, run.served, strict=True)]
        cached = Counter(whole.cached_by_source) + Counter(run.cached_by_source)
        whole = ServedRun(
            whole.served + run.served,
            whole.seconds + run.seconds,
            cached_tokens=whole.cached_tokens + run.cached_tokens,
            cached_by_source=cached,
        )
    return whole
