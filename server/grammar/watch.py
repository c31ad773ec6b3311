"""Calls that nobody can interrupt, made in a thread that can be left alone with them.

    run ── the thread works, the caller waits for CALL_S of its time at most ──┬── what it gave
                                                                               └── OverTime: the thread is left, another comes

xgrammar's calls are C++, which no signal ends, and release Python's lock. How long one takes depends on the text as well as on
the grammar: whoever chooses both can make the call after a quick one take minutes. Measured with SmolLM2's 49,152 tokens, calls
that come after none of more than 15 ms, and how long they would have held the loop:

    (.{0,3}){0,300}                          the first mask                 5.9 s
    root ::= root root | [^\\n]              a token of 64 characters       2.9 s
    ((a{0,20}){0,20}){0,20}                  a mask, five tokens on         1.5 s
    a rule that doubles 22 times             the text that is forced        1.4 s

The way to the thread and back takes 10 to 30 us on two busy cores, and is gone twice for a token. All of these are OverTime
after 50 ms; most are refused before, when they are compiled, for that tries some tokens.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")
CALL_S: Final = 0.05
"""Of a thread's own time: one that is not scheduled holds nobody up for longer than the machine does anyway."""
MAX_LEFT: Final = 2
"""Threads that may work on for nobody before no further calls are begun: each takes a core."""

_here = threading.local()


class OverTime(Exception):
    """A call takes too long; what it works on is not to be touched again, for it goes on."""


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

    def run(self, function: Callable[[], T]) -> tuple[T, float]:
        """What a function gives, and the time that its thread took. Raises: OverTime; what the function raises."""
        if self._worker is None:
            if self.num_left >= MAX_LEFT:
                raise OverTime("others that took too long are still being worked on; try again later")
            self._worker = _Worker()
        worker = self._worker
        worker.begin(function)
        wait_s = self._call_s
        while not worker.wait(wait_s):
            wait_s = self._call_s - worker.used_s()
            if wait_s <= 0:
                self._worker = None
                self._left.append(worker)
                worker.leave()
                raise OverTime(
                    f"it takes too long to follow, more than {1000 * self._call_s:g} ms for one step; make it simpler"
                )
        return worker.result()

    def close(self) -> None:
        """End the thread. Idempotent; one that is left ends after its call."""
        if self._worker is not None:
            self._worker.leave()
            self._worker = None


def is_watched() -> bool:
    """Is this one of those threads? Then calls are made at once."""
    return getattr(_here, "is_watched", False)


class _Worker:
    """A thread, and two locks that are flags: locks are quicker than conditions, and there are several calls a token."""

    def __init__(self) -> None:
        self._asked, self._answered = threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._answered.acquire()
        self._function: Callable[[], Any] | None = None
        self._outcome: tuple[Any, BaseException | None, float] = None, None, 0.0
        self._began_s: float | None = None
        self._ends = False
        self.is_done = True
        self._thread = threading.Thread(target=self._work, name="grammar-calls", daemon=True)  # it may never come back
        self._thread.start()

    def begin(self, function: Callable[[], Any]) -> None:
        self._function, self._began_s, self.is_done = function, None, False
        self._asked.release()

    def wait(self, seconds: float) -> bool:
        return self._answered.acquire(timeout=seconds)

    def result(self) -> tuple[Any, float]:
        value, error, took_s = self._outcome
        self._outcome = None, None, 0.0
        if error is not None:
            raise error
        return value, took_s

    def used_s(self) -> float:
        """Of the thread's time, by the call that it is in."""
        began_s = self._began_s
        if began_s is None or self._thread.ident is None:
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident)) - began_s

    def leave(self) -> None:
        """It is to end, when it can."""
        self._ends = True
        if self.is_done:
            self._asked.release()

    def _work(self) -> None:
        _here.is_watched = True
        while True:
            self._asked.acquire()
            if self._function is None:
                return
            began_s = self._began_s = time.thread_time()
            try:
                self._outcome = self._function(), None, time.thread_time() - began_s
            except BaseException as error:
                self._outcome = None, error, time.thread_time() - began_s
            self._function = None
            self.is_done = True
            self._answered.release()
            if self._ends:
                return
