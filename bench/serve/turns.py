"""Who may be served when: requests as they arrive, a conversation's next turn behind the one before; what became of each."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.timing import WrongNumbers
from bench.workloads import Ask


@dataclass(slots=True)
class Served:
    """What became of one request; seconds from the loop's begin."""

    arrival_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    """When each came."""

    @property
    def first_s(self) -> float:
        """From its arrival to its first token."""
        return self.token_s[0] - self.arrival_s

    @property
    def per_token_s(self) -> float | None:
        """From its first token to its last, for each behind the first; None if there is one only."""
        return None if len(self.token_s) < 2 else (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)


class Turns:
    """The requests of one run; seconds from its begin."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self.asks = asks
        self.served = [Served() for _ in asks]
        self.prompts = [ask.prompt.tolist() for ask in asks]
        """Of those who wait for another, with something at random where that one's answer belongs, until it is there."""
        self.num_unfinished = len(asks)
        self._coming = [(ask.arrival_s, index) for index, ask in enumerate(asks) if ask.after is None]
        heapq.heapify(self._coming)
        self._followers: dict[int, list[int]] = {}
        for index, ask in enumerate(asks):
            if ask.after is not None:
                self._followers.setdefault(ask.after, []).append(index)

    def arrived(self, now_s: float) -> list[int]:
        """Who has come since this was last asked, in order."""
        arrived: list[int] = []
        while self._coming and self._coming[0][0] <= now_s:
            arrival_s, index = heapq.heappop(self._coming)
            self.served[index].arrival_s = arrival_s
            arrived.append(index)
        return arrived

    @property
    def next_s(self) -> float | None:
        """When the next one comes; None if nobody does before another has ended."""
        return self._coming[0][0] if self._coming else None

    @property
    def seconds(self) -> float:
        """Until the last token of all."""
        return max(served.token_s[-1] for served in self.served)

    def end(self, index: int) -> None:
        """All its tokens are there, and who waits for it comes. Raises: WrongNumbers if they are too many or too few."""
        served, ask = self.served[index], self.asks[index]
        if len(served.tokens) != ask.num_out:
            raise WrongNumbers(f"request {index} has {len(served.tokens)} tokens of {ask.num_out}")
        self.num_unfinished -= 1
        for follower in self._followers.get(index, ()):
            so_far = self.prompts[index] + served.tokens
            self.prompts[follower] = so_far + self.prompts[follower][len(so_far) :]
            heapq.heappush(self._coming, (served.token_s[-1] + self.asks[follower].think_s, follower))
