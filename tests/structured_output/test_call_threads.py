"""Threads that make calls with a time limit each: a call that overruns is abandoned, the others are made."""

import functools
import hashlib
import itertools
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.server.support import eventually
from vmmkv_server.structured_output.matcher import CallOverran, CallThread, CallThreads

AMPLE_S = 60.0
"""A limit that no call here overruns. What a host takes from a virtual machine counts as the CPU time of who had the core."""


class Endless:
    """Calls that take their thread's time until `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self) -> None:
        while not self.go.is_set():
            pass


def indices(count: int) -> list[Callable[[], int]]:
    return [functools.partial(int, index) for index in range(count)]


def assert_works(threads: CallThreads, num_threads: int = 2) -> None:
    assert [outcome.get() for outcome in threads.run(indices(8), num_threads=num_threads)] == list(range(8))


def test_outcomes_are_values_or_errors_in_order() -> None:
    threads = CallThreads(AMPLE_S)
    first, second, third = threads.run([threading.get_ident, lambda: 1 // 0, threading.get_ident])
    assert first.get() == third.get() != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        second.get()
    assert threads.run([]) == threads.run([], num_threads=0) == []
    threads.close()


def test_a_call_in_c_that_overruns_is_abandoned_and_the_others_are_made() -> None:
    threads, made = CallThreads(), list[str]()
    # Half a second or more in C, without Python's lock, as in xgrammar.
    slow = functools.partial(hashlib.pbkdf2_hmac, "sha256", b"a", b"b", 2_000_000)
    before, overran, after = threads.run([lambda: b"before", slow, lambda: made.append("after") or b"after"])  # type: ignore[func-returns-value]
    assert (before.get(), after.get()) == (b"before", b"after")
    with pytest.raises(CallOverran, match="50 ms for one step"):
        overran.get()
    assert threads.num_abandoned == 1
    assert_works(threads)
    assert eventually(lambda: threads.num_abandoned == 0)
    assert made == ["after"], "the abandoned thread made no other call"
    threads.close()


def test_each_call_has_its_own_limit_of_cpu_time() -> None:
    def works() -> str:
        until_s = time.thread_time() + 0.08
        while time.thread_time() < until_s:
            pass
        return "done"

    threads = CallThreads(0.2)
    assert [outcome.get() for outcome in threads.run([works] * 5)] == ["done"] * 5
    sleeps = CallThreads(0.01)
    assert sleeps.run([lambda: time.sleep(0.2) or "slept"])[0].get() == "slept"  # type: ignore[func-returns-value]
    threads.close()
    sleeps.close()


def test_calls_in_several_threads_run_side_by_side() -> None:
    threads, both = CallThreads(AMPLE_S, num_threads=2), threading.Barrier(2)

    def made(index: int) -> int:
        both.wait(60)  # each needs another beside it
        return index

    for _ in range(20):
        outcomes = threads.run([functools.partial(made, index) for index in range(8)], num_threads=2)
        assert [outcome.get() for outcome in outcomes] == list(range(8))
    assert len({outcome.get() for outcome in threads.run([threading.get_ident] * 8)}) == 1
    threads.close()


def test_other_threads_make_the_calls_behind_one_that_overruns() -> None:
    threads, endless = CallThreads(0.2, num_threads=3), Endless()
    calls: list[Callable[[], int | None]] = [*indices(40)]
    calls[7:7] = [endless]
    calls[31:31] = [endless]
    outcomes = threads.run(calls, num_threads=3)
    overran = [index for index, outcome in enumerate(outcomes) if isinstance(outcome.error, CallOverran)]
    assert overran == [7, 31] and threads.num_abandoned == 2
    assert [outcome.get() for index, outcome in enumerate(outcomes) if index not in overran] == list(range(40))
    assert_works(threads)
    endless.go.set()
    assert eventually(lambda: threads.num_abandoned == 0)
    threads.close()


def test_a_thread_abandoned_just_as_its_call_ends_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, before, is_looked_at, now_s = CallThreads(0.002), threading.active_count(), threading.Event(), time.clock_gettime

    def late_s(clock: int) -> float:
        is_looked_at.set()
        return now_s(clock) + 1

    monkeypatch.setattr(time, "clock_gettime", late_s)
    for _ in range(100):  # whether the call ends before the thread is told to, or after, is up to the machine
        is_looked_at.clear()
        (outcome,) = threads.run([lambda: is_looked_at.wait(60)])
        assert isinstance(outcome.error, CallOverran)
    threads.close()
    assert eventually(lambda: threading.active_count() <= before)


class Interrupted(BaseException):
    """What a signal's handler raises, as KeyboardInterrupt is."""


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_signal_while_waiting_abandons_the_threads(num_threads: int) -> None:
    # A signal that comes just before a wait does not wake it: the wait is looked at again after 5 s of no CPU time.
    threads, go, made, before = CallThreads(5.0, num_threads=2), threading.Event(), list[int](), threading.active_count()

    def interrupts(*_: object) -> None:
        raise Interrupted

    main = threading.get_ident()
    all_wait = threading.Barrier(num_threads, action=lambda: signal.pthread_kill(main, signal.SIGALRM))

    def waits(index: int) -> int:
        made.append(index)
        all_wait.wait(60)
        go.wait(60)
        return -1

    usual = signal.signal(signal.SIGALRM, interrupts)
    try:
        with pytest.raises(Interrupted):
            threads.run([functools.partial(waits, index) for index in range(8)], num_threads=num_threads)
    finally:
        signal.signal(signal.SIGALRM, usual)
    assert threads.num_abandoned == num_threads
    assert_works(threads, num_threads)
    go.set()
    assert eventually(lambda: threads.num_abandoned == 0)
    assert sorted(made) == list(range(num_threads)), "the abandoned threads made no other call"
    threads.close()
    assert eventually(lambda: threading.active_count() <= before)


PLACES = (CallThread, "begin"), (CallThread, "wait"), (threading.Thread, "start")


@pytest.mark.parametrize(("place", "after", "which"), [*itertools.product(PLACES, (False, True), (1, 2))])
def test_wherever_a_signal_strikes_no_thread_stays(
    monkeypatch: pytest.MonkeyPatch, place: tuple[type, str], after: bool, which: int
) -> None:
    threads, before, num_calls = CallThreads(AMPLE_S, num_threads=2), threading.active_count(), 0
    real = getattr(*place)

    def struck(*arguments: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == which and not after:
            raise Interrupted
        value = real(*arguments)
        if num_calls == which:
            raise Interrupted
        return value

    with monkeypatch.context() as patch:
        patch.setattr(*place, struck)
        with pytest.raises(Interrupted):
            threads.run(indices(8), num_threads=2)
    assert_works(threads)
    threads.close()
    assert eventually(lambda: threading.active_count() <= before)
