"""Requests put to an engine when they arrive, and when each of their tokens came: a closed or an open loop around its step."""

import heapq
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.timing import WrongNumbers
from bench.workloads import Ask
from vmmkv.server.engine.core import EngineCore
from vmmkv.server.protocol import Failed, FromEngine, Generate, Output, Outputs


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run of a workload."""

    served: list[Served]
    """In the order of its requests."""
    seconds: float
    """From the begin until the last token."""
    running: list[int]
    """Requests that ran, a sample a step."""


class Drive:
    """One run. The engine is stepped while it has work; who waits for an arrival sleeps."""

    def __init__(self, core: EngineCore, said: deque[FromEngine], asks: Sequence[Ask]) -> None:
        self._core, self._said, self._asks = core, said, asks
        self._prompts = [ask.prompt.tolist() for ask in asks]
        self._served = [Served() for _ in asks]
        self._unfinished = len(asks)
        self._coming = [(ask.arrival_s, index) for index, ask in enumerate(asks) if ask.after is None]
        heapq.heapify(self._coming)
        self._followers: dict[int, list[int]] = {}
        for index, ask in enumerate(asks):
            if ask.after is not None:
                self._followers.setdefault(ask.after, []).append(index)

    def run(self) -> Outcome:
        """Raises: WrongNumbers if a request fails, or has not exactly its number of tokens."""
        began_s = time.perf_counter()
        running: list[int] = []
        while self._unfinished:
            self._admit(time.perf_counter() - began_s)
            if self._core.has_work:
                self._core.step()
                running.append(self._core.num_running)
                self._read(time.perf_counter() - began_s)
            else:
                assert self._coming, f"the engine has lost {self._unfinished} requests"
                time.sleep(max(0.0, self._coming[0][0] - (time.perf_counter() - began_s)))
        seconds = max(served.token_s[-1] for served in self._served)
        self._core.settle()
        self._said.clear()
        return Outcome(self._served, seconds, running)

    def _admit(self, now_s: float) -> None:
        while self._coming and self._coming[0][0] <= now_s:
            arrival_s, index = heapq.heappop(self._coming)
            self._served[index].arrival_s = arrival_s
            self._core.receive(
                Generate(
                    request_id=str(index),
                    prompt=self._prompts[index],
                    max_new_tokens=self._asks[index].num_out,
                    temperature=0.0,
                    ignore_eos=True,
                )
            )

    def _read(self, now_s: float) -> None:
        while self._said:
            message = self._said.popleft()
            if isinstance(message, Outputs):
                for output in message.outputs:
                    self._take(output, now_s)
            elif isinstance(message, Failed):
                raise WrongNumbers(f"request {message.request_id} failed: {message.message}")

    def _take(self, output: Output, now_s: float) -> None:
        index = int(output.request_id)
        served, ask = self._served[index], self._asks[index]
        served.tokens += output.token_ids
        served.token_s += [now_s] * len(output.token_ids)
        if output.finish_reason is None:
            return
        if len(served.tokens) != ask.num_out or output.finish_reason != "length":
            raise WrongNumbers(
                f"request {index} has {len(served.tokens)} tokens of {ask.num_out}, and ended by {output.finish_reason}"
            )
        self._unfinished -= 1
        for follower in self._followers.get(index, ()):
            so_far = self._prompts[index] + served.tokens  # what was said, where the workload has something at random
            self._prompts[follower] = so_far + self._prompts[follower][len(so_far) :]
            heapq.heappush(self._coming, (now_s + self._asks[follower].think_s, follower))
