"""What an operator asks: the map of memory is what is mapped, and to make it keeps no step waiting; a sleep holds nothing."""

import gc
import math
import re
import time
from types import SimpleNamespace

import pytest

from tests.engine.conftest import PAGE_TOKENS, Harness, MakeHarness, prompt_of, wide_rows
from tests.server.fake_engine import READY
from vmmkv import PAGE_BYTES, HostTier
from vmmkv.memory.states import SlotMap
from vmmkv_server.engine import administration
from vmmkv_server.engine.__main__ import freeze_survivors
from vmmkv_server.engine.administration import REST, SLICE_US, MapMaker, manage
from vmmkv_server.engine.kv_backend import SlotBackend
from vmmkv_server.engine.loading import Loaded
from vmmkv_server.protocol import (
    Forget,
    FromEngine,
    Managed,
    MemoryMap,
    Resize,
    Sleep,
    Snapshot,
    WakeUp,
    decode_from_engine,
    encode,
)


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


def test_after_a_map_there_is_none_for_many_times_as_long_but_when_idle(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1.0]
    monkeypatch.setattr(administration, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    one = harness()
    mapper, maps = maker(one)
    real = one.cache.taken_slots
    monkeypatch.setattr(one.cache, "taken_slots", lambda: (now_s.append(now_s.pop() + 0.25), real())[1])
    mapper.ask()
    mapper.work(1e6)
    assert len(maps) == 1 and maps[0].took_us == 0.25e6
    mapper.ask()
    for pause_s in (0.0, 0.9 * REST * 0.25):
        now_s[0] += pause_s
        mapper.work(1e6)
        assert len(maps) == 1
    mapper.work(math.inf)
    assert len(maps) == 2
    mapper.ask()
    now_s[0] += 1.1 * REST * 0.25
    mapper.work(1e6)
    assert len(maps) == 3


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
    assert sum(last.prefix.attaches.values()) == 2 and last.prefix.attaches["compute"] == 1
    assert last.prefix.prefix_hit_tokens + last.prefix.prefix_missed_tokens == 2 * len(prompt)
    assert last.memory.kv_used_bytes == 0


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
        before = len(looked)
        mapper.work(SLICE_US)
        assert len(looked) == before + 1, "a slice ends when its time is over"
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
    assert one.engine.num_running == 1 and one.engine.scheduler.waiting
    one.pool.resize(8 * 2**21)
    one.engine.budget_changed()
    one.step()
    assert one.engine.num_running == 2
    one.run()


def test_a_larger_budget_that_an_operator_gives_admits_requests_that_found_no_room(harness: MakeHarness) -> None:
    one = harness(slots=4, budget_pages=16, step_tokens=4096, open_memory=SlotBackend.open)
    loaded = Loaded(one.engine, READY, one.memory)
    least_bytes = int(re.findall(r"the least is (\d+) bytes", str(manage(loaded, Resize(budget_bytes=1)).error))[0])
    assert manage(loaded, Resize(budget_bytes=least_bytes)).error is None
    prompts = {str(seed): prompt_of(least_bytes // 2**21 * PAGE_TOKENS * 2 // 3, seed) for seed in range(2)}
    for name, prompt in prompts.items():
        one.ask(name, prompt, 20)
    one.step(3)
    assert one.engine.num_running == 1 and one.engine.scheduler.waiting
    assert manage(loaded, Resize(budget_bytes=16 * PAGE_BYTES)).error is None
    one.step()
    assert one.engine.num_running == 2
    one.run()


def test_what_goes_back_to_the_device_and_what_to_the_pool_counts_as_freed(harness: MakeHarness) -> None:
    one = harness(wide_rows(), ours=True, share=True, max_tokens=1024, open_memory=SlotBackend.open)
    loaded = Loaded(one.engine, READY, one.memory)
    one.said(prompt_of(500))
    held_bytes = one.pool.held_bytes
    assert manage(loaded, Forget()).freed_bytes == held_bytes - one.pool.held_bytes > 0
    created_bytes = one.pool.created_bytes
    assert manage(loaded, Sleep()).freed_bytes == created_bytes > 0 == one.pool.held_bytes


def test_a_sleep_stores_what_a_tier_has_not_had_time_to_take(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = HostTier(64 * PAGE_BYTES)
    one = harness(wide_rows(), ours=True, share=True, max_tokens=1024, open_memory=SlotBackend.open, tiers=[tier])
    with monkeypatch.context() as patch:
        patch.setattr(one.engine, "poll_tiers", lambda *_: True)
        one.said(prompt_of(500))
    assert not tier.stats().held_bytes
    assert manage(Loaded(one.engine, READY, one.memory), Sleep()).error is None
    assert tier.stats().held_bytes == 7 * PAGE_BYTES, "each full page"
    one.close()
    tier.close()


@pytest.mark.parametrize("has_tier", [False, True])
def test_asleep_it_holds_nothing_and_awake_it_answers_as_before(
    harness: MakeHarness, slow_prefill: None, has_tier: bool
) -> None:
    tiers = [HostTier(64 * PAGE_BYTES)] * has_tier
    one = harness(wide_rows(), ours=True, share=True, max_tokens=1024, open_memory=SlotBackend.open, tiers=tiers)
    loaded = Loaded(one.engine, READY, one.memory)
    prompts = [prompt_of(500, seed) for seed in range(3)]
    expected = [one.said(prompt) for prompt in prompts]
    assert expected == [one.expected(prompt) for prompt in prompts]
    pool, address = one.pool, one.cache.k(0).data_ptr()
    for _ in range(2):
        created_bytes = pool.created_bytes
        assert created_bytes > 0
        for freed_bytes in (created_bytes, 0):
            assert manage(loaded, Sleep()) == Managed(
                freed_bytes=freed_bytes, budget_bytes=64 * PAGE_BYTES, pool_tokens=one.memory.num_tokens
            )
            assert pool.created_bytes == 0
            assert pool.driver.calls["create"] - pool.driver.calls["release"] == 1, "the null page"
        last = [message for message in one.sent if isinstance(message, Snapshot)][-1]
        assert (last.memory.kv_budget_bytes, last.memory.kv_created_bytes, last.prefix.prefix_pages) == (0, 0, 0)
        assert "wake it up" in str(manage(loaded, Resize(budget_bytes=32 * PAGE_BYTES)).error)
        one.cache.check()
        for _ in range(2):
            assert manage(loaded, WakeUp()).error is None
        fetched = one.prefix.stats().fetched_tokens
        assert [one.said(prompt) for prompt in prompts] == expected
        assert one.prefix.stats().fetched_tokens - fetched == has_tier * 3 * 448, "seven full pages of each"
        assert one.cache.k(0).data_ptr() == address
    for tier in tiers:
        one.close()
        tier.close()


def test_it_does_not_sleep_while_requests_run(harness: MakeHarness) -> None:
    one = harness(share=True, open_memory=SlotBackend.open)
    prompt = prompt_of(100)
    one.ask("a", prompt, 20)
    one.step(3)
    refused = manage(Loaded(one.engine, READY, one.memory), Sleep())
    assert "running sequences" in str(refused.error)
    assert refused.budget_bytes == one.pool.budget_bytes == 64 * PAGE_BYTES
    one.run()
    assert one.tokens("a") == one.expected(prompt, 20)


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
