"""Requests put to an engine when they arrive, and when each of their tokens came: a closed or an open loop around its step."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from bench.serve.turns import Served, Turns
from bench.timing import WrongNumbers
from bench.workloads import Ask
from vmmkv.server.engine.engine import Engine
from vmmkv.server.protocol import Abort, Failed, FromEngine, Generate, Output, Outputs


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

    def __init__(self, core: Engine, said: deque[FromEngine], asks: Sequence[Ask]) -> None:
        self._core, self._said = core, said
        self._turns = Turns(asks)

    def run(self) -> Outcome:
        """Raises: WrongNumbers if a request fails, or has not exactly its number of tokens; then the others are ended."""
        try:
            return self._run()
        except BaseException:
            for index in range(len(self._turns.asks)):
                self._core.receive(Abort(request_id=str(index)))
            while self._core.has_work:
                self._core.step()
            self._said.clear()
            raise

    def _run(self) -> Outcome:
        turns, began_s = self._turns, time.perf_counter()
        running: list[int] = []
        while turns.num_unfinished:
            for index in turns.arrived(time.perf_counter() - began_s):
                self._core.receive(self._message(index))
            if self._core.has_work:
                self._core.step()
                running.append(self._core.num_running)
                self._read(time.perf_counter() - began_s)
            else:
                assert turns.next_s is not None, f"the engine has lost {turns.num_unfinished} requests"
                time.sleep(max(0.0, turns.next_s - (time.perf_counter() - began_s)))
        self._core.settle()
        self._said.clear()
        return Outcome(turns.served, turns.seconds, running)

    def _message(self, index: int) -> Generate:
        return Generate(
            request_id=str(index),
            prompt=self._turns.prompts[index],
            max_new_tokens=self._turns.asks[index].num_out,
            temperature=0.0,
            ignore_eos=True,
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
        served = self._turns.served[index]
        served.tokens += output.token_ids
        served.token_s += [now_s] * len(output.token_ids)
        if output.finish_reason is not None:
            self._turns.end(index)
