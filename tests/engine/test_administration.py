"""The engine's map of memory: it is what is mapped, and to make it keeps no step waiting."""

import gc
import math
import time

import pytest

from tests.engine.conftest import PAGE_TOKENS, Harness, MakeHarness, prompt_of
from vmmkv.memory.memory_map import SlotMap
from vmmkv.server.engine.__main__ import freeze_survivors
from vmmkv.server.engine.administration import SLICE_US, MapMaker
from vmmkv.server.protocol import FromEngine, MemoryMap, Snapshot, decode_from_engine, encode


def maker(one: Harness) -> tuple[MapMaker, list[MemoryMap]]:
    """A maker, and what it sends: as it comes over the wire."""
    maps: list[MemoryMap] = []

    def send(message: FromEngine) -> None:
        found = decode_from_engine(encode(message))
        assert isinstance(found, MemoryMap)
        maps.append(found)

    return MapMaker(one.cache, one.engine.request_in, send), maps


def test_no_map_is_sent_unless_asked(harness: MakeHarness) -> None:
    mapper, maps = maker(harness())
    mapper.work(math.inf)
    assert maps == []
    mapper.ask()
    mapper.ask()
    mapper.work(math.inf)
    mapper.work(math.inf)
    assert [(each.num_slots, each.slot_pages, each.slots) for each in maps] == [(8, [4], [])]


def test_the_map_has_every_mapped_page_and_names_the_requests(harness: MakeHarness) -> None:
    one = harness(step_tokens=8192)
    mapper, maps = maker(one)
    one.ask("a", prompt_of(3000, 1), 8)
    one.ask("b", prompt_of(100, 2), 8)
    one.engine.step()
    mapper.ask()
    mapper.work(math.inf)
    (found,) = maps
    assert sorted(found.requests.values()) == ["a", "b"]
    assert {each.num_tokens for each in found.slots} == {3000, 100}
    pages = sum(run.num_pages for each in found.slots for runs in each.groups for run in runs)
    assert pages * 2**21 == one.cache.stats().mapped_bytes
    one.run()


def test_after_a_map_there_is_none_for_many_times_as_long_but_when_idle(harness: MakeHarness) -> None:
    mapper, maps = maker(harness())
    mapper.ask()
    mapper.work(1e6)
    mapper._rest_until_s = time.perf_counter() + 60
    mapper.ask()
    mapper.work(1e6)
    assert len(maps) == 1
    mapper.work(math.inf)
    assert len(maps) == 2


def test_the_first_answer_says_how_long_it_was_queued(harness: MakeHarness) -> None:
    one = harness(slots=1)
    for name in ("a", "b"):
        one.ask(name, prompt_of(5), 6)
    time.sleep(0.02)
    one.run()
    for name in ("a", "b"):
        first, *others = one.outputs(name)
        assert first.queued_us >= 20_000
        assert {each.queued_us for each in others} == {0}
    assert one.outputs("b")[0].queued_us > one.outputs("a")[0].queued_us


def test_the_snapshot_counts_what_was_attached_and_what_is_used_once(harness: MakeHarness) -> None:
    one = harness(step_tokens=8192, share=True)
    prompt = prompt_of(PAGE_TOKENS + 10)
    one.ask("a", prompt, 2)
    one.run()
    one.ask("b", prompt, 2)
    one.run()
    last = [message for message in one.sent if isinstance(message, Snapshot)][-1]
    assert sum(last.attached.values()) == 2 and last.attached["compute"] == 1
    assert last.prefix_hit_tokens + last.prefix_missed_tokens == 2 * len(prompt)
    assert last.kv_used_bytes == 0


def test_a_slice_has_no_more_slots_than_fit_where_each_takes_long(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of long sequences have thousands of extents: sixteen of them are no slice."""
    one = harness(slots=8)
    for index in range(8):
        one.ask(str(index), prompt_of(9, index), 40)
    one.engine.step()
    mapper, maps = maker(one)
    real, looked = one.cache.slot_maps, list[int]()

    def slow(slots: list[int]) -> list[SlotMap]:
        looked.append(len(slots))
        time.sleep(0.001 * len(slots))
        return real(slots)

    monkeypatch.setattr(one.cache, "slot_maps", slow)
    mapper.ask()
    while not maps:
        mapper.work(SLICE_US)
        one.engine.step()
    assert looked == [1] * 8 and len(maps[0].slots) == 8
    looked.clear()
    mapper.ask()
    mapper.work(math.inf)
    assert sum(looked) == 8 and len(looked) == 2
    one.run()


def test_a_larger_budget_admits_requests_that_found_no_room(harness: MakeHarness) -> None:
    one = harness(slots=4, budget_pages=2, step_tokens=4096)
    one.ask("a", prompt_of(1500, 1), 500)
    one.ask("b", prompt_of(4000, 2), 20)
    one.step(3)
    assert one.engine.num_running == 1 and one.engine._scheduler.waiting
    one.pool.resize(8 * 2**21)
    one.engine.budget_changed()
    one.step()
    assert one.engine.num_running == 2
    one.run()


def test_what_survives_a_full_garbage_collection_is_walked_by_no_later_one() -> None:
    old: list[object] = []
    gc.callbacks.append(freeze_survivors)
    try:
        gc.collect(1)
        assert any(each is old for each in gc.get_objects())
        gc.collect()
        assert not any(each is old for each in gc.get_objects())
    finally:
        gc.callbacks.remove(freeze_survivors)
        gc.unfreeze()
