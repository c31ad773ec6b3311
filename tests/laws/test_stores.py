"""A tier over any store that engines share: one that fails is a miss and is left alone. Real stores: see store_laws.py."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from importlib.metadata import EntryPoint

import pytest

from tests.laws.faulty_tier import FaultyStore
from tests.laws.store_laws import clock, is_left_alone, value_of
from tests.laws.test_tiers import CPU, NUM_RECORDS, found, key_of, load, store
from tests.stores import until
from vmmkv import TierUnavailable
from vmmkv.tiers import answering, open_store, shared

__all__ = ["clock"]


def test_what_was_not_asked_before_a_close_is_asked_when_the_tier_is_open_again():
    tier, asked, ends = FaultyStore(NUM_RECORDS), [], threading.Event()
    ask = tier.ask
    tier.ask = lambda names: (asked.append(names), ends.wait(60), ask(names))[2]
    tier.open(CPU)
    until(lambda: asked)
    assert tier.lookup([key_of(1)]) is None  # behind the first question
    closing = threading.Thread(target=tier.close)
    closing.start()
    until(lambda: tier.lookup([key_of(1)]) == [False])  # it asks no more
    ends.set()
    closing.join()
    tier.open(CPU)
    assert found(tier, 1) == [False]
    tier.close()


def test_a_store_is_asked_once_for_a_record_however_often_the_tier_is(monkeypatch):
    tier, ends, questions = FaultyStore(NUM_RECORDS), threading.Event(), list[str]()
    ask = tier.ask
    monkeypatch.setattr(tier, "ask", lambda names: (questions.extend(names), ends.wait(60), ask(names))[2])
    tier.open(CPU)
    for numbers in ([1], [1, 2], [2, 1], [1]):
        assert tier.lookup([key_of(number) for number in numbers]) is None
    ends.set()
    assert found(tier, 1, 2) == [False, False]
    assert questions == [value_of(tier, 1), value_of(tier, 2)]
    tier.close()


def test_what_is_looked_up_while_a_store_answers_is_one_question(monkeypatch):
    tier, ends, questions = FaultyStore(NUM_RECORDS), threading.Event(), list[list[str]]()
    ask = tier.ask
    monkeypatch.setattr(tier, "ask", lambda names: (questions.append(names), ends.wait(60), ask(names))[2])
    tier.open(CPU)
    until(lambda: questions)  # whether it answers
    for number in range(5):
        assert tier.lookup([key_of(number)]) is None
    ends.set()
    assert found(tier, *range(5)) == [False] * 5
    assert questions == [[], [value_of(tier, number) for number in range(5)]]
    tier.close()


def test_what_an_interrupted_close_has_cancelled_is_asked_when_the_tier_is_open_again(monkeypatch):
    tier, ends = FaultyStore(NUM_RECORDS), threading.Event()
    ask = tier.ask
    monkeypatch.setattr(tier, "ask", lambda names: ends.wait(60) and ask(names))
    tier.open(CPU)
    assert tier.lookup([key_of(1)]) is None  # behind the first question

    def shutdown(executor, **options):
        ends.set()
        end(executor, **options)
        raise KeyboardInterrupt

    end = ThreadPoolExecutor.shutdown
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ThreadPoolExecutor, "shutdown", shutdown)
        tier.close()
    tier.close()
    tier.open(CPU)
    assert found(tier, 1) == [False]
    tier.close()


def test_a_store_that_answers_a_tier_opened_again_is_left_alone_when_it_fails():
    tier = FaultyStore(NUM_RECORDS)
    tier.fault = "gone"
    tier.open(CPU)
    until(lambda: is_left_alone(tier))
    tier.close()
    tier.fault = None
    tier.open(CPU)
    until(lambda: not is_left_alone(tier))
    assert found(tier, 0) == [False]
    tier.fault = "gone"
    tier.lookup([key_of(1)])
    until(lambda: is_left_alone(tier))
    tier.close()


def test_what_a_store_had_is_not_believed_after_an_outage(clock):
    """It may come back empty."""
    tier = FaultyStore(NUM_RECORDS)
    tier.open(CPU)
    assert store(tier, 1) and found(tier, 1, 2) == [True, False]
    tier.fault = "gone"
    tier.lookup([key_of(3)])
    until(lambda: is_left_alone(tier))
    tier.values.clear()
    tier.fault = None
    clock.pass_for(answering.FIRST_PAUSE_S)
    until(lambda: not is_left_alone(tier))
    assert answering.FIRST_PAUSE_S < shared.KNOWN_S and found(tier, 1) == [False]
    assert tier.stats().held_bytes == 0 and store(tier, 1) and load(tier, 1)
    tier.close()


@pytest.mark.parametrize("fault", ["short", "corrupted"])
def test_a_value_that_is_not_the_record_is_a_miss_is_removed_and_found_no_more(fault):
    tier = FaultyStore(NUM_RECORDS)
    tier.open(CPU)
    assert store(tier, 1) and found(tier, 1) == [True]
    tier.fault = fault
    assert not load(tier, 1)
    assert found(tier, 1) == [False] and not tier.values
    assert tier.stats().errors == 1 and not is_left_alone(tier)
    tier.fault = None
    assert store(tier, 1) and load(tier, 1)
    tier.close()


def test_a_load_from_a_store_that_is_left_alone_is_a_miss_and_takes_no_buffer():
    tier = FaultyStore(NUM_RECORDS)
    tier.open(CPU)
    assert store(tier, 1)
    tier.fault = "gone"
    tier.lookup([key_of(2)])
    until(lambda: is_left_alone(tier))
    transfer = tier.load(key_of(1))
    assert transfer is not None and transfer.missed and not transfer.address
    tier.close()


def test_a_store_that_stays_away_is_asked_half_as_often_each_time(clock, monkeypatch):
    tier, asked, questions = FaultyStore(NUM_RECORDS), [], []
    tier.fault = "gone"
    answer, submit = tier.answer, ThreadPoolExecutor.submit
    tier.answer = lambda: (asked.append(clock.now_s), answer())
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda *given: questions.append(submit(*given)) or questions[-1])
    tier.open(CPU)
    until(lambda: is_left_alone(tier) and len(asked) == 1)
    for _ in range(63):
        clock.pass_for(answering.FIRST_PAUSE_S / 2)
        is_left_alone(tier)  # asks, if it is time to
        wait(questions)
    pauses = [(later - earlier) / answering.FIRST_PAUSE_S for earlier, later in itertools.pairwise(asked)]
    assert pauses == [1, 2, 4, 8, 16]
    tier.close()


def test_an_answer_to_an_old_call_does_not_end_a_stores_pause(clock):
    tier, begun, ends = FaultyStore(NUM_RECORDS), threading.Event(), threading.Event()
    tier.open(CPU)
    assert store(tier, 1)
    tier.get = lambda name: (begun.set(), ends.wait(60), FaultyStore.get(tier, name))[-1]
    loading = tier.load(key_of(1))
    assert begun.wait(60)
    tier.fault = "gone"
    tier.lookup([key_of(2)])
    until(lambda: is_left_alone(tier))
    tier.fault = None
    ends.set()
    until(lambda: loading.ended)
    assert not loading.missed and is_left_alone(tier)
    tier.finished(loading)
    clock.pass_for(answering.FIRST_PAUSE_S)
    until(lambda: not is_left_alone(tier))
    tier.close()


def test_tiers_of_packages_are_found_by_the_scheme_of_a_url(monkeypatch):
    entries = [
        EntryPoint("shelf", "tests.laws.test_stores:Shelf", shared.ENTRY_POINTS),
        EntryPoint("gone", "no_such_package:Tier", shared.ENTRY_POINTS),
    ]
    monkeypatch.setattr(shared, "entry_points", lambda group: entries)
    assert open_store("shelf://anywhere").url == "shelf://anywhere"
    with pytest.raises(TierUnavailable, match=r"no_such_package:Tier, the tier for gone://, .*No module named"):
        open_store("gone://")
    for url in ("cups://", "shelf", "/tmp"):
        with pytest.raises(ValueError, match="there are gone://, shelf://"):
            open_store(url)


class Shelf:
    """The tier of a third party."""

    def __init__(self, url: str) -> None:
        self.url = url
