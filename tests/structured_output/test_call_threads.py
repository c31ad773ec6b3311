"""A call that takes too long is left alone; a grammar whose forced text has no end is refused wherever that hides."""

import functools
import hashlib
import itertools
import signal
import threading
import time

import pytest

from tests.server.support import eventually
from vmmkv.server.structured_output.matcher import MAX_ABANDONED, CallOverran, CallThreads, _CallThread


def busy() -> bytes:
    """Half a second or more in C, without Python's lock, as in xgrammar."""
    return hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2_000_000)


def test_what_calls_give_or_raise_is_what_their_caller_has() -> None:
    watch = CallThreads()
    first, second, third = watch.run([threading.get_ident, lambda: 1 // 0, threading.get_ident])
    assert first.get() == third.get() != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        second.get()
    assert watch.run([]) == []
    assert watch.run([lambda: 7])[0].get() == 7
    watch.close()


def test_nobody_waits_for_a_call_that_takes_too_long_and_the_others_are_made() -> None:
    watch, made = CallThreads(), list[str]()
    began_s = time.monotonic()
    before, slow, after = watch.run([lambda: "before", busy, lambda: made.append("after") or "after"])  # type: ignore[func-returns-value]
    waited_s = time.monotonic() - began_s
    assert (before.get(), after.get(), made) == ("before", "after", ["after"])
    with pytest.raises(CallOverran, match="50 ms for one step"):
        slow.get()
    assert watch.num_abandoned == 1, f"after {waited_s} s it had ended"
    assert watch.run([lambda: "next"])[0].get() == "next"
    assert eventually(lambda: watch.num_abandoned == 0, within_s=30)
    assert made == ["after"], "the thread that was left made no other call"
    watch.close()


def test_calls_have_their_time_each_for_itself() -> None:
    watch = CallThreads(0.05)

    def works() -> str:
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            pass
        return "done"

    assert [outcome.get() for outcome in watch.run([works] * 5)] == ["done"] * 5
    watch.close()


def test_a_thread_that_has_had_no_time_is_waited_for() -> None:
    watch = CallThreads(0.01)
    assert watch.run([lambda: time.sleep(0.2) or "slept"])[0].get() == "slept"  # type: ignore[func-returns-value]
    watch.close()


def test_calls_are_spread_over_threads_and_what_they_give_is_in_order() -> None:
    watch, both = CallThreads(num_threads=2), threading.Barrier(2)

    def made(place: int) -> int:
        both.wait(30)  # each needs another beside it
        return place

    for _ in range(20):
        outcomes = watch.run([functools.partial(made, place) for place in range(8)], spread=True)
        assert [outcome.get() for outcome in outcomes] == list(range(8))
    assert watch.run([], spread=True) == []
    apart = [outcome.get() for outcome in watch.run([threading.get_ident] * 8)]
    assert len(set(apart)) == 1, "who does not ask for it has one thread"
    watch.close()


def test_others_make_the_calls_that_a_thread_with_a_slow_one_has_left() -> None:
    watch, go = CallThreads(0.02, num_threads=3), threading.Event()

    def spins() -> None:
        while not go.is_set():
            pass

    calls = [functools.partial(int, place) for place in range(40)]
    outcomes = watch.run([*calls[:7], spins, *calls[7:30], spins, *calls[30:]], spread=True)
    slow = [place for place, outcome in enumerate(outcomes) if isinstance(outcome.error, CallOverran)]
    assert slow == [7, 31] and watch.num_abandoned == 2
    assert [outcome.get() for place, outcome in enumerate(outcomes) if place not in slow] == list(range(40))
    assert [outcome.get() for outcome in watch.run(calls, spread=True)] == list(range(40))
    go.set()
    assert eventually(lambda: watch.num_abandoned == 0)
    watch.close()


def test_it_says_when_too_many_work_on_for_nobody_and_what_has_begun_goes_on() -> None:
    watch = CallThreads(0.01)
    go = threading.Event()

    def spins() -> None:
        while not go.is_set():
            pass

    *slow, last = watch.run([*([spins] * MAX_ABANDONED), lambda: None])
    assert all("for one step" in str(outcome.error) for outcome in slow) and last.error is None
    assert watch.num_abandoned >= MAX_ABANDONED and watch.run([lambda: "next"])[0].get() == "next"
    go.set()
    assert eventually(lambda: watch.num_abandoned == 0) and not watch.num_abandoned >= MAX_ABANDONED
    watch.close()


def test_a_thread_that_is_left_just_as_its_call_ends_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, before, is_looked_at, now_s = CallThreads(0.002), threading.active_count(), threading.Event(), time.clock_gettime

    def late_s(clock: int) -> float:
        is_looked_at.set()
        return now_s(clock) + 1

    monkeypatch.setattr(time, "clock_gettime", late_s)
    for _ in range(200):  # whether the call ends before the thread is told to, or after, is up to the machine
        is_looked_at.clear()
        (outcome,) = watch.run([lambda: is_looked_at.wait(30)])
        assert isinstance(outcome.error, CallOverran)
    watch.close()
    assert eventually(lambda: threading.active_count() <= before)


class Interrupted(BaseException):
    """What a signal's handler raises, as KeyboardInterrupt is."""


@pytest.mark.parametrize("spread", [False, True])
def test_a_signal_while_it_waits_leaves_the_threads_and_the_next_calls_are_made_by_others(spread: bool) -> None:
    watch, go, made, before = CallThreads(num_threads=2), threading.Event(), list[int](), threading.active_count()

    def interrupts(*_: object) -> None:
        raise Interrupted

    main = threading.get_ident()
    all_wait = threading.Barrier(1 + spread, action=lambda: signal.pthread_kill(main, signal.SIGALRM))

    def waits(place: int) -> int:
        made.append(place)
        all_wait.wait(30)
        go.wait(30)
        return -1

    usual = signal.signal(signal.SIGALRM, interrupts)
    try:
        with pytest.raises(Interrupted):
            watch.run([functools.partial(waits, place) for place in range(8)], spread=spread)
    finally:
        signal.signal(signal.SIGALRM, usual)
    assert watch.num_abandoned == 1 + spread
    calls = [functools.partial(int, place) for place in range(8)]
    for _ in range(5):
        assert [outcome.get() for outcome in watch.run(calls, spread=spread)] == list(range(8))
    go.set()
    assert eventually(lambda: watch.num_abandoned == 0)
    assert [outcome.get() for outcome in watch.run(calls, spread=spread)] == list(range(8))
    assert sorted(made) == list(range(1 + spread)), "those that were left made no other call"
    watch.close()
    assert eventually(lambda: threading.active_count() <= before)


def test_wherever_a_signal_strikes_the_next_calls_are_made_and_no_thread_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [functools.partial(int, place) for place in range(8)]

    def left_by(owner: type, name: str, *, after: bool, which: int) -> None:
        watch, before, num_calls = CallThreads(num_threads=2), threading.active_count(), 0
        real = getattr(owner, name)

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
            patch.setattr(owner, name, struck)
            with pytest.raises(Interrupted):
                watch.run(calls, spread=True)
        for _ in range(3):
            assert [outcome.get() for outcome in watch.run(calls, spread=True)] == list(range(8))
        watch.close()
        assert eventually(lambda: threading.active_count() <= before), (name, after, which)

    places = (_CallThread, "begin"), (_CallThread, "wait"), (threading.Thread, "start")
    for (owner, name), after, which in itertools.product(places, (False, True), (1, 2)):
        left_by(owner, name, after=after, which=which)
