"""Calls that nobody can interrupt, made in threads that can be left alone with them.

    run ── a thread makes one call after the other, the caller waits ──┬── what each gave, or raised
                                                                       └── OverTime, for one that takes more than CALL_S: the
                                                                           thread is left with it, another makes the rest
    run, spread ── several threads take the next call each, until there is none ── the same

xgrammar's calls are C++, which no signal ends, and release Python's lock. How long one takes depends on the text as well as on
the grammar: whoever chooses both can make the call after a quick one take minutes. Measured with SmolLM2's 49,152 tokens, calls
that come after none of more than 15 ms, and how long they would have held the loop:

    (.{0,3}){0,300}                          the first mask                 5.9 s
    root ::= root root | [^\\n]              a token of 64 characters       2.9 s
    ((a{0,20}){0,20}){0,20}                  a mask, five tokens on         1.5 s
    a rule that doubles 22 times             the text that is forced        1.4 s

All of these are OverTime after 50 ms; most are refused before, when they are compiled, for that tries some tokens. The way to
the thread and back takes 10 to 30 us on two busy cores, whatever number of calls is made there. Calls are spread where most of
their time is C++: what they do in Python still comes one behind the other.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")
CALL_S: Final = 0.05
"""For a call, of which an answer's matcher makes two for one token. Of a thread's own time: one that is not scheduled holds
nobody up for longer than the machine does anyway.
"""
MAX_LEFT: Final = 2
"""Threads that may work on for nobody before nothing new is to be begun: each takes a core."""
_MOST_THREADS: Final = 4
"""That calls are spread over. With more of them Python's lock would be what they wait for."""
_LEAST_CALLS: Final = 4
"""That a further thread is worth waking for."""


class OverTime(Exception):
    """A call takes too long; what it works on is not to be touched again, for it goes on."""


class Outcome(NamedTuple, Generic[T]):
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
    """Makes calls, and waits for them. `num_threads` are those that it spreads calls over: up to _MOST_THREADS of half the
    cores if None.
    """

    def __init__(self, call_s: float = CALL_S, num_threads: int | None = None) -> None:
        self._call_s = call_s
        self._num_threads = num_threads or max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._workers: list[_Worker] = []
        self._left: list[_Worker] = []
        """Those that went on."""

    @property
    def num_left(self) -> int:
        """Threads that still work on what nobody waits for."""
        self._left = [worker for worker in self._left if not worker.is_done]
        return len(self._left)

    @property
    def is_full(self) -> bool:
        """Do so many work on for nobody that no more should be risked? What has begun may go on."""
        return self.num_left >= MAX_LEFT

    def run(self, calls: Sequence[Callable[[], T]], *, spread: bool = False) -> list[Outcome[T]]:
        """What each of them gave, in order. Raises nothing of theirs. `spread`: they may be made side by side.

        A signal's handler may raise while it waits: the threads are left with the calls that they make, no other is begun, and
        the next run has threads of its own.
        """
        outcomes: dict[int, Outcome[T]] = {}
        places = iter(range(len(calls)))
        try:
            while left := len(calls) - len(outcomes):
                num_threads = max(1, min(self._num_threads, left // _LEAST_CALLS)) if spread else 1
                while len(self._workers) < num_threads:
                    self._workers.append(_Worker())
                working = self._workers[:num_threads]
                for worker in working:
                    worker.begin(calls, places)
                for worker in working:
                    outcomes.update(self._made(worker))
        except BaseException:
            self._leave(self._workers)
            raise
        return [outcomes[place] for place in range(len(calls))]

    def close(self) -> None:
        """End the threads. Idempotent; one that is left ends after its call."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _made(self, worker: "_Worker") -> dict[int, Outcome[Any]]:
        """What came of the calls that a thread has taken; it takes none behind one that takes too long."""
        left_s = self._call_s
        while not worker.wait(left_s):
            left_s = worker.left_s(self._call_s)
            if left_s <= 0:
                self._leave([worker])
                error = OverTime(
                    f"it takes too long to follow, more than {1000 * self._call_s:g} ms for one step; make it simpler"
                )
                return {**worker.outcomes, worker.place: Outcome(None, error, self._call_s)}
        return worker.outcomes

    def _leave(self, workers: "list[_Worker]") -> None:
        """Ask nothing more of these."""
        self._left += [worker for worker in workers if worker not in self._left]
        self._workers = [worker for worker in self._workers if worker not in workers]
        for worker in workers:
            worker.end()


class _Worker:
    """A thread, and locks that are flags: they are quicker than conditions, and there is a trip or two a step."""

    def __init__(self) -> None:
        self._asked, self._answered, self._turning = threading.Lock(), threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._answered.acquire()
        self._calls: Sequence[Callable[[], Any]] = ()
        self._places: Iterator[int] = iter(())
        """Of the calls that nobody has taken yet. Others take from it too: that is one step of the interpreter."""
        self.outcomes: dict[int, Outcome[Any]] = {}
        """By their places."""
        self.place = 0
        """Of the call that is being made."""
        self.is_done = True
        self._began_s: float | None = None
        self._ends = False
        self._thread = threading.Thread(target=self._work, name="grammar-calls", daemon=True)  # it may never come back
        try:
            self._thread.start()
        except BaseException:  # of a signal's handler: it may have started
            self.end()
            raise

    def begin(self, calls: Sequence[Callable[[], Any]], places: Iterator[int]) -> None:
        self._calls, self._places, self.outcomes, self._began_s, self.is_done = calls, places, {}, None, False
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
        """Nothing more is asked of it. Idempotent."""
        self._ends = True
        with contextlib.suppress(RuntimeError):  # it has not yet taken what was asked last: it will see that it ends
            self._asked.release()

    def _work(self) -> None:
        while True:
            self._asked.acquire()
            if self._ends and not self._calls:
                return
            began_s = time.thread_time()
            while True:
                with self._turning:
                    self._began_s = began_s
                    if self._ends or (place := next(self._places, None)) is None:
                        break
                    self.place = place
                value, failure = None, None
                try:
                    value = self._calls[place]()
                except BaseException as error:
                    failure = error
                ended_s = time.thread_time()
                self.outcomes[place] = Outcome(value, failure, ended_s - began_s)
                began_s = ended_s
            value = failure = None  # nor anything of the calls is kept while nothing is asked
            self._calls, self._places = (), iter(())
            self.is_done = True
            self._answered.release()
            if self._ends:
                return
