"""The map of a slot is what is mapped there: every page once, in its state, with its holders."""

import pytest

from tests.unit.support import LAYOUT
from vmmkv import KVCache, Pool
from vmmkv.memory.states import MappedRun, RunState, SlotMap, SlotState
from vmmkv.prefix import AttachMethod, PrefixCache
from vmmkv.units import PAGE_BYTES

PROMPT = list(range(100))


@pytest.fixture
def cache(driver):
    with Pool("cpu", 64 * PAGE_BYTES, driver=driver) as pool, KVCache(LAYOUT, pool, slots=4, max_tokens=512) as cache:
        yield cache
        for slot in range(1, 5):
            pages_are_told_once(cache, slot)
        cache.check()


def look(cache: KVCache, slot: int) -> SlotMap:
    (found,) = cache.slot_maps([slot])
    return found


def pages_are_told_once(cache: KVCache, slot: int) -> None:
    for index, runs in enumerate(look(cache, slot).groups):
        told = [page for run in runs for page in range(run.page, run.page + run.num_pages)]
        mappings = cache.slots.memory.arenas[index].spans[slot].mappings.values()
        assert sorted(told) == sorted(page for each in mappings for page in range(each.page, each.end_page))


def states(cache: KVCache, slot: int) -> list[tuple[int, int, RunState, int]]:
    return [tuple(run)[:4] for run in look(cache, slot).groups[0]]


def test_a_free_slot_has_nothing(cache: KVCache) -> None:
    assert look(cache, 3) == (3, SlotState.FREE, 0, [[]])
    with pytest.raises(ValueError, match="slots 1 to 4"):
        cache.slot_maps([1, 0])


def test_what_lies_past_the_rows_is_ahead(cache: KVCache) -> None:
    sequence = cache.open()
    sequence.grow(48)
    sequence.grow(64)
    sequence.advance(33)
    assert (cache.taken_slots(), cache.slot_pages) == ([sequence.slot], [32])
    assert states(cache, sequence.slot) == [(0, 3, RunState.LIVE, 1), (3, 1, RunState.AHEAD, 1)]
    assert look(cache, sequence.slot)[:3] == (sequence.slot, SlotState.LIVE, 33)


def test_a_closed_sequence_is_pending_reclaim_and_then_there_is_nothing(cache: KVCache) -> None:
    sequence = cache.open()
    sequence.grow(512)  # two large extents
    sequence.close()
    assert states(cache, sequence.slot) == [(0, 32, RunState.PENDING_RECLAIM, 1)]
    cache.drain()
    assert states(cache, sequence.slot) == []


def test_two_that_share_a_prefix_show_the_same_handle_and_the_rest_is_their_own(cache: KVCache) -> None:
    prefix = PrefixCache(cache)

    def begin() -> int:
        attached = prefix.attach(PROMPT, method=AttachMethod.ALIAS)
        attached.sequence.grow(100)
        attached.sequence.advance(100 - attached.num_tokens)
        prefix.insert(attached.sequence, PROMPT)
        return attached.sequence.slot

    first, second = begin(), begin()
    shared = 100 // 16
    runs: list[list[MappedRun]] = [look(cache, slot).groups[0] for slot in (first, second)]
    # Six full pages: each slot, and the tree. What is not full is a slot's own.
    for each in runs:
        assert [tuple(run)[:4] for run in each] == [(0, shared, RunState.LIVE, 3), (shared, 1, RunState.LIVE, 1)]
    assert runs[0][0].handle == runs[1][0].handle
    assert runs[0][1].handle != runs[1][1].handle


def test_a_parked_slot_is_parked_as_far_as_it_is_mapped(cache: KVCache) -> None:
    prefix = PrefixCache(cache)
    attached = prefix.attach(PROMPT)
    attached.sequence.grow(140)
    attached.sequence.advance(100)
    prefix.park(attached.sequence, PROMPT)
    assert look(cache, attached.sequence.slot)[:3] == (attached.sequence.slot, SlotState.PARKED, 100)
    assert states(cache, attached.sequence.slot) == [(0, 4, RunState.PARKED, 2), (4, 5, RunState.PARKED, 1)]
