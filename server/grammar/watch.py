"""Calls that nobody can interrupt, made in a thread that can be left alone with them.

    run ── the thread makes one call after the other, the caller waits ──┬── what each gave, or raised
                                                                         └── OverTime, for one that takes more than CALL_S: the
                                                                             thread is left with it, another makes the rest

xgrammar's calls are C++, which no signal ends, and release Python's lock. How long one takes depends on the text as well as on
the grammar: whoever chooses both can make the call after a quick one take minutes. Measured with SmolLM2's 49,152 tokens, calls
that come after none of more than 15 ms, and how long they would have held the loop:

    (.{0,3}){0,300}                          the first mask                 5.9 s
    root ::= root root | [^\\n]              a token of 64 characters       2.9 s
    ((a{0,20}){0,20}){0,20}                  a mask, five tokens on         1.5 s
    a rule that doubles 22 times             the text that is forced        1.4 s

All of these are OverTime after 50 ms; most are refused before, when they are compiled, for that tries some tokens. The way to
the thread and back takes 10 to 30 us on two busy cores, whatever number of calls is made there.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")
CALL_S: Final = 0.05
"""For a call, which is all that an answer's matcher does for one token. Of a thread's own time: one that is not scheduled
holds nobody up for longer than the machine does anyway.
"""
MAX_LEFT: Final = 2
"""Threads that may work on for nobody before nothing new is to be begun: each takes a core."""


class OverTime(Exception):
    """A call takes too long; what it works on is not to be touched again, for it goes on."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What one call gave, or raised."""

    value: T | None
    error: BaseException | None
    took_s: float
    """Of its thread's time."""

    def get(self) -> T:
        """Raises: what the call raised, or OverTime."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # it is the call's


class Watch:
    """Makes calls, one at a time. `left` are those that went on."""

    def __init__(self, call_s: float = CALL_S) -> None:
        self._call_s = call_s
        self._worker: _Worker | None = None
        self._left: list[_Worker] = []

    @property
    def num_left(self) -> int:
        """Threads that still work on what nobody waits for."""
        self._left = [worker for worker in self._left if not worker.is_done]
        return len(self._left)

    @property
    def is_full(self) -> bool:
        """Do so many work on for nobody that no more should be risked? What has begun may go on."""
        return self.num_left >= MAX_LEFT

    def run(self, calls: Sequence[Callable[[], T]]) -> list[Outcome[T]]:
        """What each of them gave, in order. Raises nothing of theirs."""
        outcomes: list[Outcome[T]] = []
        while len(outcomes) < len(calls):
            self._worker = self._worker or _Worker()
            outcomes += self._made(self._worker, calls[len(outcomes) :])
        return outcomes

    def close(self) -> None:
        """End the thread. Idempotent; one that is left ends after its call."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _made(self, worker: "_Worker", calls: Sequence[Callable[[], T]]) -> list[Outcome[T]]:
        """What came of them; those behind one that takes too long have not been made."""
        worker.begin(calls)
        left_s = self._call_s
        while not worker.wait(left_s):
            left_s = worker.left_s(self._call_s)
            if left_s <= 0:
                self._worker = None
                self._left.append(worker)
                worker.end()
                error = OverTime(
                    f"it takes too long to follow, more than {1000 * self._call_s:g} ms for one step; make it simpler"
                )
                return [*worker.outcomes[: worker.place], Outcome(None, error, self._call_s)]
        return worker.outcomes


class _Worker:
    """A thread, and locks that are flags: they are quicker than conditions, and there is a trip or two a step."""

    def __init__(self) -> None:
        self._asked, self._answered, self._turning = threading.Lock(), threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._answered.acquire()
        self._calls: Sequence[Callable[[], Any]] = ()
        self.outcomes: list[Outcome[Any]] = []
        self.place = 0
        """Of the call that is being made."""
        self.is_done = True
        self._began_s: float | None = None
        self._ends = False
        self._thread = threading.Thread(target=self._work, name="grammar-calls", daemon=True)  # it may never come back
        self._thread.start()

    def begin(self, calls: Sequence[Callable[[], Any]]) -> None:
        self._calls, self.outcomes, self._began_s, self.is_done = calls, [], None, False
        self._asked.release()

    def wait(self, seconds: float) -> bool:
        return self._answered.acquire(timeout=seconds)

    def left_s(self, call_s: float) -> float:
        """How much of its time the call that is being made still has. If none, it is the thread's last."""
        with self._turning:
            if self._began_s is None or self._thread.ident is None:
                return call_s
            left_s = call_s + self._began_s - time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
            self._ends = left_s <= 0
            return left_s

    def end(self) -> None:
        """Nothing more is asked of it."""
        self._ends = True
        self._asked.release()

    def _work(self) -> None:
        while True:
            self._asked.acquire()
            if self._ends and not self._calls:
                return
            for place, call in enumerate(self._calls):
                with self._turning:
                    if self._ends:
                        break
                    self.place, self._began_s = place, (began_s := time.thread_time())
                try:
                    outcome: Outcome[Any] = Outcome(call(), None, time.thread_time() - began_s)
                except BaseException as error:
                    outcome = Outcome(None, error, time.thread_time() - began_s)
                self.outcomes.append(outcome)
                del call  # with all that it holds, while nothing is asked
            self._calls = ()
            self.is_done = True
            self._answered.release()
            if self._ends:
                return
