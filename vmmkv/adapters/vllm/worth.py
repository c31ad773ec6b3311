"""Worth: how much of what tiers have of a prompt is loaded faster than it would be computed. It knows no memory and no vLLM.

The bandwidth of each tier and the rate of prefill are measured while the engine runs. Where loading takes longer than computing
the slowest tier is left out, with what is behind its records. Each request that leaves it out raises the estimate of its
bandwidth a little, so that now and then a load measures it again. A load takes a step at least, in which others compute. So the
rest of the step in which it begins is not counted.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from vmmkv.rate import Rate

LEAST_MEASURED: Final = 256
"""Tokens of a step that measures the rate of prefill, or of a load that measures a tier. Fewer measure other things."""

_FIRST_TOKENS_PER_S: Final = 1000.0
"""Rate of prefill until it is measured: a low one, so that loads are tried."""

_LEAST_TIMEOUT_S: Final = 1.0
_MOST_TIMEOUT_S: Final = 15.0
_PATIENCE: Final = 4.0
"""Multiple of the time of computing after which a load that has not ended is given up, within these bounds."""


class Worth:
    """Rates of loading and computing, and what follows from them. `clock` is for tests."""

    def __init__(self, *, record_tokens: int, record_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.prefill: Final = Rate(_FIRST_TOKENS_PER_S)
        """Prompt tokens that are computed in a second."""
        self.loads: Final = defaultdict[str, Rate](partial(Rate, math.inf))
        """Bytes a second of each tier, by its name."""
        self._record_tokens, self._record_bytes, self._clock = record_tokens, record_bytes, clock
        self._ended_s = 0.0
        """Time at which the last step ended."""
        self._steps: dict[int, tuple[float, int]] = {}
        """Begin and prompt tokens of the steps under way that measure the rate of prefill, by number."""
        self._loading: dict[str, Counter[str]] = {}
        """Records of each load under way by tier, by the name of its request."""
        self._counted_s: dict[str, float] = {}
        """Time from which on each of these counts: the end of the step in which it began."""

    def most(self, tiers: Sequence[str], *, hopes: bool = True) -> int:
        """Number of the first records of a prompt that are worth loading, each from its tier. `hopes`: raise the estimates."""
        while tiers:
            loading_s = {tier: self._loading_s(tier, count) for tier, count in Counter(tiers).items()}
            if sum(loading_s.values()) < self._computing_s(len(tiers)):
                break
            slowest = max(loading_s, key=loading_s.__getitem__)
            if hopes:
                self.loads[slowest].hope()
            tiers = tiers[: tiers.index(slowest)]
        return len(tiers)

    def timeout_s(self, num_records: int) -> float:
        """Time after which a load of so many records is given up, and they are computed."""
        return min(max(_LEAST_TIMEOUT_S, _PATIENCE * self._computing_s(num_records)), _MOST_TIMEOUT_S)

    def load_begins(self, name: str, tiers: Sequence[str]) -> None:
        """A request begins to load records, each from its tier."""
        self._loading[name] = Counter(tiers)

    def load_ends(self, name: str, *, has_failed: bool) -> None:
        """A load has ended. Its slowest tier is taken to have had all of the time; with a record, if the load has failed."""
        counts, now_s = self._loading.pop(name, Counter[str]()), self._clock()
        began_s = self._counted_s.pop(name, now_s)
        if counts.total() * self._record_tokens >= LEAST_MEASURED:
            slowest = max(counts, key=lambda tier: self._loading_s(tier, counts[tier]))
            self.loads[slowest].add((1 if has_failed else counts[slowest]) * self._record_bytes, began_s, now_s)

    def given_up(self, name: str) -> None:
        """A request has ended, perhaps while it loaded."""
        self._loading.pop(name, None)
        self._counted_s.pop(name, None)

    def step_begins(self, number: int, prompt_tokens: int) -> bool:
        """A step begins. Does it measure the rate of prefill? Then `step_ends` is to be told its number."""
        measures = prompt_tokens >= LEAST_MEASURED
        if measures:
            self._steps[number] = self._clock(), prompt_tokens
        return measures

    def step_ends(self, number: int | None) -> None:
        """A step has ended, the one behind the last that ended; its number if it measures the rate of prefill."""
        now_s = self._clock()
        if number is not None and number in self._steps:
            began_s, tokens = self._steps.pop(number)
            self.prefill.add(tokens, max(began_s, self._ended_s), now_s)
        self._ended_s = now_s
        for name in self._loading:
            self._counted_s.setdefault(name, now_s)

    def _loading_s(self, tier: str, num_records: int) -> float:
        return num_records * self._record_bytes / self.loads[tier].per_s

    def _computing_s(self, num_records: int) -> float:
        return num_records * self._record_tokens / self.prefill.per_s
