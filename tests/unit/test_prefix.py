"""Shared prefixes: what each way in and out does and costs, and what is said of bad input.

That rows are right under any order of calls is proved in tests/laws.
"""

import contextlib
import inspect
import itertools
import signal
import time

import numpy as np
import pytest
import torch

from tests.unit.support import LAYOUT, Calls, assert_reads
from vmmkv import Closed, DriverError, GraphCapture, KVCache, KVLayout, OutOfPages, SequenceTooLong
from vmmkv.errors import BudgetError
from vmmkv.memory.extents import SIZE_CLASSES
from vmmkv.memory.pool import Reclaimer
from vmmkv.memory.slots import RowKeeper, Slots
from vmmkv.prefix import AttachMethod, PrefixCache, attach
from vmmkv.prefix.index import PrefixIndex
from vmmkv.units import PAGE_BYTES

PROMPT = [7 * token % 251 for token in range(100)]


@pytest.fixture
def cache(pool):
    with KVCache(LAYOUT, pool, slots=4, max_tokens=128) as cache:
        yield cache
        cache.check()


@pytest.fixture
def prefix(cache):
    return PrefixCache(cache)


@pytest.fixture
def long_prefix(pool):
    """Of sequences with up to 1,024 tokens."""
    with KVCache(LAYOUT, pool, slots=6, max_tokens=1024) as cache:
        yield PrefixCache(cache)
        cache.check()


@pytest.fixture
def windowed_prefix(pool):
    """The same, where every layer sees the last 20 tokens."""
    layout = KVLayout.uniform(layers=4, kv_heads=8, head_dim=512, dtype=torch.float32, windows=[20] * 4)
    with KVCache(layout, pool, slots=6, max_tokens=1024) as cache:
        yield PrefixCache(cache)
        cache.check()


def write(sequence, num_tokens):
    """Row t is full of t + 1, whatever its token, from the sequence's length on; one by one, so that they lie in pages."""
    for token in range(sequence.length, num_tokens):
        sequence.grow(token + 1)
        at = token - sequence.start()
        for layer in sequence.live.slots.layout.group_of:
            sequence.k(layer)[at] = token + 1
            sequence.v(layer)[at] = -token - 1
        sequence.advance()


def begin(prefix, tokens, *, at_once=False, **options):
    """A sequence with these tokens, all inserted; at once, in extents as large as they can be, as for a prompt."""
    sequence = prefix.attach(tokens, **options).sequence
    if at_once:
        sequence.grow(len(tokens))
    write(sequence, len(tokens))
    prefix.insert(sequence, tokens)
    return sequence


def park(prefix, tokens, **options):
    prefix.park(begin(prefix, tokens, **options), tokens)


def pages(sequence):
    """The extents under a sequence, in order."""
    return [mapping.extent for mapping in sequence.live.slots.memory.spans(sequence.slot)[0].live()]


# what hits


def hooks(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_the_prefix_tree_overrides_every_hook_of_the_cache() -> None:
    """A hook that is not overridden does nothing, and would not be missed."""
    assert hooks(RowKeeper) <= hooks(PrefixIndex)


def test_slots_and_trees_override_the_hooks_that_they_answer() -> None:
    """The same of what the pool asks its reclaimers."""
    assert hooks(Reclaimer) - hooks(Slots) == {"pinned_extents", "unevictable_bytes"}
    assert hooks(Reclaimer) - hooks(PrefixIndex) == {"collect", "pending_pages", "wait_for_reclaim"}


def test_a_close_can_be_repeated_whichever_of_its_calls_fails(driver, pool):
    for number in itertools.count():
        cache = KVCache(LAYOUT, pool, slots=2, max_tokens=128)
        park(PrefixCache(cache), PROMPT)
        driver.fail_at = {driver.num_calls + number}
        with contextlib.suppress(DriverError):
            cache.close()
        has_failed, driver.fail_at = bool(pool.caches), set()
        cache.close()
        assert not pool.caches and not pool.reclaimers
        if not has_failed:
            break
    assert number > 2


@pytest.mark.parametrize("num_tokens", [29, 33])
def test_rows_hit_whose_last_page_belongs_to_a_node_behind_them(pool, num_tokens):
    """The prompts part at token 28. No full layer has a page past token 21, and window page 1 ends behind token 28.

    full layers     |   page 0   |    page 1  ...      of 21 1/3 tokens; page 1 is in no node
    windows         | page 0 | page 1 |                of 16 tokens; the first prompt has passed both
    """
    layout = KVLayout.uniform(layers=7, kv_heads=8, head_dim=512, dtype=torch.float32, windows=[None] * 3 + [8] * 4)
    with KVCache(layout, pool, slots=2, max_tokens=64) as cache:
        prefix, first, second = PrefixCache(cache), PROMPT[:40], [*PROMPT[:28], *range(300, 305)]
        sequence = compute(prefix, first)
        sequence.advance_start(1)
        prefix.insert(sequence, first)
        prefix.release(compute(prefix, second), second)
        assert prefix.match(second[:num_tokens]) == 21


# the methods


def test_adopting_a_parked_slot_costs_no_driver_call_but_the_limits_write(prefix, driver):
    park(prefix, PROMPT[:40])
    calls = Calls(driver)
    attached = prefix.attach(PROMPT[:50])
    assert calls.made() == {"write": 1}
    assert (attached.method, attached.num_tokens) == (AttachMethod.ADOPT, 40)
    assert_reads(attached.sequence, range(40))


@pytest.mark.parametrize(
    ("num_shared", "num_past", "method"),
    [
        (256, 256, AttachMethod.ADOPT),
        (257, 257, AttachMethod.ALIAS),  # over 16 pages
        (20, 20, AttachMethod.ADOPT),
        (20, 21, AttachMethod.ALIAS),
    ],
)
def test_adopting_loses_at_most_sixteen_pages_of_another_prompt_and_no_more_than_it_gains(
    pool, long_prefix, num_shared, num_past, method
):
    pool.resize(128 * PAGE_BYTES)
    prompt = list(range(num_shared + num_past))
    park(long_prefix, prompt)
    attached = long_prefix.attach([*prompt[:num_shared], 0])
    assert (attached.method, attached.num_tokens) == (method, num_shared)
    assert long_prefix.match([*prompt, 0]) == (num_shared if method is AttachMethod.ADOPT else num_shared + num_past)


def test_new_conversations_with_one_system_prompt_do_not_overwrite_each_other(prefix):
    for token in range(3):
        park(prefix, [*PROMPT[:10], *[token] * 20])
    assert [prefix.match([*PROMPT[:10], *[token] * 21]) for token in range(3)] == [30] * 3


def test_of_many_slots_with_the_prompt_some_are_looked_at_in_turn(prefix, monkeypatch):
    monkeypatch.setattr(attach, "MOST_LOOKED_AT", 1)
    begin(prefix, [*PROMPT[:20], 1])
    park(prefix, [*PROMPT[:20], 2], method=AttachMethod.ALIAS)
    methods = [prefix.attach([*PROMPT[:20], token]).method for token in (3, 4)]
    assert methods == [AttachMethod.ALIAS, AttachMethod.ADOPT]  # the first one is running


def test_of_less_than_a_page_an_alias_is_a_copy(prefix):
    begin(prefix, PROMPT[:10])
    attached = prefix.attach(PROMPT[:11])
    assert (attached.method, attached.num_tokens, attached.num_aliased) == (AttachMethod.ALIAS, 10, 0)
    assert_reads(attached.sequence, range(10))


def test_a_slot_is_not_adopted_when_others_still_need_its_rows(prefix):
    park(prefix, PROMPT[:40])
    prefix.pin(PROMPT[:40])
    attached = prefix.attach([*PROMPT[:20], 0])
    assert (attached.method, attached.num_tokens) == (AttachMethod.ALIAS, 20)
    assert prefix.match(PROMPT) == 40


def test_a_slot_is_not_adopted_when_other_prompts_go_on_from_its_tokens(prefix):
    park(prefix, PROMPT[:40])
    other = [*PROMPT[:32], *range(300, 316)]
    prefix.release(begin(prefix, other, method=AttachMethod.ALIAS))  # its pages are left, behind 32 tokens of the parked slot
    attached = prefix.attach([*PROMPT[:20], 0])
    assert (attached.method, attached.num_tokens) == (AttachMethod.ALIAS, 20)
    assert prefix.match([*other, 0]) == 48
    assert prefix.match(PROMPT) == 40


@pytest.mark.parametrize("branches", [([251] * 60, [252] * 8), ([252] * 8, [251] * 60)])
def test_the_last_rows_are_found_in_any_branch_below(windowed_prefix, branches):
    """The long one has passed the page of rows 32 to 48, of the other one it is the last."""
    windowed_prefix.release(begin(windowed_prefix, PROMPT[:32]), PROMPT[:32])
    for branch in branches:
        prompt = [*PROMPT[:40], *branch]
        sequence = windowed_prefix.attach(prompt, method=AttachMethod.COMPUTE).sequence
        write(sequence, len(prompt))
        sequence.advance_start(0)
        windowed_prefix.release(sequence, prompt)
    attached = windowed_prefix.attach([*PROMPT[:40], 0])
    assert_reads(attached.sequence, range(40))


def test_an_alias_costs_a_map_and_an_access_call_for_each_extent(prefix, driver):
    begin(prefix, PROMPT[:96])
    calls = Calls(driver)
    attached = prefix.attach([*PROMPT[:64], 0], method=AttachMethod.ALIAS)
    assert calls.made() == {"map": 4, "set_access": 4, "write": 1}
    assert attached.sequence.limit == 64


def test_a_large_extent_is_one_handle(long_prefix, driver):
    prompt = [token % 251 for token in range(256)]
    begin(long_prefix, prompt, at_once=True)
    calls = Calls(driver)
    attached = long_prefix.attach([*prompt, 0], method=AttachMethod.ALIAS)
    assert calls.made() == {"map": 1, "set_access": 1, "write": 1}
    assert_reads(attached.sequence, range(256))


def test_pages_in_use_count_for_prompts_that_need_them(long_prefix, windowed_prefix):
    for prefix, wanted in ((long_prefix, (6, 6)), (windowed_prefix, (1, 0))):
        running = prefix.attach(PROMPT).sequence
        running.grow(100)
        running.advance(100)
        prefix.insert(running, PROMPT)
        found = [prefix.cache.slots.keeper.used_pages(None, tokens) for tokens in (PROMPT, [*PROMPT, *PROMPT])]
        assert tuple(found) == wanted, "of 16 tokens each; the window of the longer one has passed"
        prefix.park(running, PROMPT)
        assert prefix.cache.slots.keeper.used_pages(None, PROMPT) == 0


def test_where_prompts_part_in_a_large_extent_the_first_copies_and_others_share(pool, long_prefix):
    """250 of 256 tokens: a large extent would end past what they have in common, and no other prompt could share it."""
    pool.resize(96 * PAGE_BYTES)
    shared = [7 * token % 251 for token in range(250)]
    first = long_prefix.attach([*shared, *range(300, 330)], max_tokens=300).sequence
    first.grow(280)
    assert any(extent.num_pages == SIZE_CLASSES[0] for extent in pages(first)), "a prompt is laid in large extents"
    write(first, 280)
    long_prefix.insert(first, [*shared, *range(300, 330)])
    used = [pool.used_bytes]
    for other in (400, 500, 600):
        attached = long_prefix.attach([*shared, other, other + 1])
        assert attached.num_tokens == 250
        assert_reads(attached.sequence, range(250))
        used.append(pool.used_bytes)
    pages_taken = [(after - before) // PAGE_BYTES for before, after in itertools.pairwise(used)]
    assert pages_taken == [16, 1, 1], "all of it once, then the page that is not full"


@pytest.mark.parametrize("end", ["run", "park", "release"])
def test_rows_are_copied_from_a_slot_or_from_an_extent_of_the_tree(prefix, driver, end):
    """From a running slot, from a parked one, or from the tree alone: through a window, at addresses of no slot."""
    owner = begin(prefix, PROMPT[:48])
    if end != "run":
        getattr(prefix, end)(owner, PROMPT[:48])
    calls = Calls(driver)
    attached = prefix.attach([*PROMPT[:40], 0], method=AttachMethod.ALIAS)
    assert attached.num_tokens == 40
    assert_reads(attached.sequence, range(40))
    windows = end == "release"
    assert calls.made()["map"] == 3 + windows
    assert calls.made().get("fence", 0) == (end != "run")  # nothing goes before it is read


# on


def test_two_that_computed_the_same_at_once_keep_a_copy_each(prefix, pool):
    first, second = prefix.attach(PROMPT[:32]).sequence, prefix.attach(PROMPT[:32]).sequence
    for sequence in (first, second):
        write(sequence, 32)
        prefix.insert(sequence, PROMPT[:32])
    assert not set(pages(first)) & set(pages(second))
    stats = prefix.stats()
    assert (stats.inserted_pages, stats.duplicate_pages, stats.held_bytes) == (2, 2, 2 * PAGE_BYTES)
    second.close()
    prefix.cache.drain()
    assert pool.stats().held_bytes == 2 * PAGE_BYTES
    assert_reads(first, range(32))


def test_truncating_at_a_border_of_pages_exchanges_nothing(prefix, driver):
    begin(prefix, PROMPT[:40])
    sharer = prefix.attach(PROMPT[:41], method=AttachMethod.ALIAS).sequence
    calls = Calls(driver)
    sharer.truncate(16)
    assert calls.made() == {"write": 1}  # the limit, which is a fence too


def test_truncating_in_the_last_page_of_a_large_extent_duplicates_no_more_than_that(long_prefix, pool):
    pool.resize(40 * PAGE_BYTES)
    prompt = [token % 251 for token in range(256)]
    sequence = begin(long_prefix, prompt, at_once=True)  # one extent of 16 pages
    sequence.truncate(250)
    write(sequence, 256)
    long_prefix.release(sequence, [*prompt[:250], *[251] * 6])
    assert long_prefix.stats().held_bytes == (16 + 1) * PAGE_BYTES


def test_what_was_inserted_stays_when_its_sequence_is_compacted(prefix, cache, driver):
    sequence = begin(prefix, PROMPT[:60])
    sequence.compact([*range(20), 40, 41, 59])
    assert prefix.match(PROMPT) == 48  # whole pages
    assert sequence.k(0)[:23, 0, 0].tolist() == [*range(1, 21), 41, 42, 60]
    for use in (prefix.insert, prefix.park, prefix.release):
        with pytest.raises(ValueError, match="was compacted, so its rows are no prefix"):
            use(sequence, PROMPT[:23])
    with pytest.raises(ValueError, match="was compacted"):
        prefix.insert(sequence, PROMPT[:20])
    again = prefix.attach(PROMPT[:60])
    assert again.num_tokens == 48
    assert_reads(again.sequence, range(48))
    prefix.release(sequence)
    assert_reads(again.sequence, range(48))


# forks


def test_compacting_rows_that_are_shared_takes_large_extents_where_they_stay(long_prefix, pool, driver):
    pool.resize(80 * PAGE_BYTES)
    prompt = [token % 251 for token in range(512)]
    sequence = begin(long_prefix, prompt, at_once=True)  # two extents of 16 pages
    calls = Calls(driver)
    sequence.compact(range(200, 500))
    assert calls.made()["map"] == 1 + 16, "the second one is cut, so a page each"
    assert sequence.k(0)[:300, 0, 0].tolist() == [*range(201, 501)]
    assert long_prefix.match([*prompt, 0]) == 512


def test_fork_shares_extents_until_either_writes(prefix, cache, driver):
    parent = begin(prefix, PROMPT[:40])
    calls = Calls(driver)
    child = cache.fork(parent)[0]
    assert calls.made() == {"create": 1, "map": 3, "set_access": 3, "write": 1}
    assert pages(child)[:2] == pages(parent)[:2]
    assert pages(child)[2] is not pages(parent)[2]
    write(child, 50)
    parent.truncate(30)
    assert_reads(parent, range(30))
    write(parent, 45)
    assert_reads(child, range(50))
    assert_reads(parent, range(45))
    assert pages(child)[0] is pages(parent)[0]
    assert pages(child)[1] is not pages(parent)[1]


@pytest.mark.parametrize("act", ["alias", "truncate"])
def test_rows_of_a_failed_copy_are_never_another_tenants(prefix, cache, driver, act):
    """Whichever driver call fails: memory is known to be the tenant's before bytes are written to it (law 7)."""
    prefix.release(begin(prefix, PROMPT[:40], namespace="red"))
    failed, number = True, 0
    while failed:
        sharer = prefix.attach([*PROMPT[:24], 0], namespace="red").sequence if act == "truncate" else None
        driver.fail_at, failed = {driver.num_calls + number}, False
        try:
            if sharer is None:
                sharer = prefix.attach([*PROMPT[:24], 0], namespace="red").sequence
            else:
                sharer.truncate(8)
        except DriverError:
            failed = True
        driver.fail_at, number = set(), number + 1
        if sharer is not None:
            sharer.close()
        cache.drain()
        other = cache.open(tenant="blue")
        other.grow(128)
        assert not any(view[:128].any() for layer in range(4) for view in (other.k(layer), other.v(layer)))
        other.close()
        cache.drain()
    assert number > 3


# what stays, and what goes


def test_a_released_prefix_keeps_full_extents_alone(prefix, pool):
    prefix.release(begin(prefix, PROMPT[:20]), PROMPT[:20])
    prefix.cache.drain()
    assert pool.stats().held_bytes == prefix.stats().held_bytes == PAGE_BYTES
    assert prefix.match(PROMPT) == prefix.stats().num_tokens == 16


def test_what_was_used_least_recently_goes_first(prefix):
    prompts = [[number] * 32 for number in (1, 2, 3)]
    for prompt in prompts:
        park(prefix, prompt)
    prefix.attach([*prompts[0], 0]).sequence.close()  # used again, and its slot given up: pages only
    assert prefix.evict(1) == 2
    assert [prefix.match([*prompt, 0]) for prompt in prompts] == [32, 0, 32]
    assert prefix.evict(1) == 2
    assert [prefix.match([*prompt, 0]) for prompt in prompts] == [32, 0, 0]


def test_pages_are_evicted_for_a_sequence_that_needs_them(prefix, pool):
    for number in (1, 2, 3):
        park(prefix, [number] * 40)
    pool.resize(10 * PAGE_BYTES)
    sequence = prefix.attach([9] * 100).sequence
    sequence.grow(100)
    assert [prefix.match([number] * 41) for number in (1, 2, 3)] == [0, 0, 40]
    assert prefix.stats().evicted_pages == 4  # two full pages each; the third of each went with its slot


def test_a_pinned_prefix_stays_until_it_is_unpinned_or_its_time_is_over(prefix):
    for number, ttl_s in ((1, None), (2, 0.02), (3, 1e6)):
        park(prefix, [number] * 32)
        assert prefix.pin([number] * 32, ttl_s=ttl_s) == 32
    assert prefix.pin([4] * 32) == 0
    time.sleep(0.03)
    prefix.evict()
    assert [prefix.match([number] * 33) for number in (1, 2, 3)] == [32, 0, 32]
    prefix.unpin([1] * 32)
    prefix.evict()
    assert [prefix.match([number] * 33) for number in (1, 2, 3)] == [0, 0, 32]


def test_unpin_takes_back_the_pin_of_exactly_these_tokens(prefix):
    pinned, other = [*PROMPT[:48], 300], [PROMPT[0], *range(400, 447)]
    for tokens in (pinned, other):
        park(prefix, tokens)
    prefix.pin(pinned)
    prefix.pin(PROMPT[:32])
    for tokens in (other, PROMPT[:40], PROMPT[:1], [*pinned, 1], []):
        prefix.unpin(tokens)
        prefix.evict()
        assert prefix.match([*pinned, 1]) == 49, f"gone by unpin of {len(tokens)} other tokens"
    prefix.unpin(pinned)
    prefix.evict()
    assert prefix.match(PROMPT) == 32
    prefix.unpin(PROMPT[:32])
    prefix.evict()
    assert prefix.match(PROMPT) == 0


def test_unpin_finds_a_pin_of_tokens_that_were_not_all_known(prefix):
    park(prefix, PROMPT[:40])
    assert prefix.pin(PROMPT[:60]) == 40
    park(prefix, PROMPT[:60])
    prefix.evict()
    assert prefix.match(PROMPT) == 48, "the page in which the 40 end"
    prefix.unpin(PROMPT[:60])
    prefix.evict()
    assert prefix.match(PROMPT) == 0


@pytest.mark.parametrize("lives", [(None, 1e-9), (1e-9, None)])
def test_of_two_pins_the_one_that_ends_later_counts(prefix, lives):
    park(prefix, PROMPT[:32])
    for ttl_s in lives:
        prefix.pin(PROMPT[:32], ttl_s=ttl_s)
    prefix.evict()
    assert prefix.match(PROMPT) == 32


def test_a_pin_keeps_what_is_left_of_its_tokens(prefix, cache):
    park(prefix, PROMPT[:16])
    park(prefix, PROMPT[:30])  # its last rows are in no full page
    prefix.pin(PROMPT[:30])
    for parked in cache.parked():
        cache.evict(parked)
    prefix.evict()
    assert prefix.match(PROMPT) == 16


@pytest.mark.parametrize(("num_tokens", "at_once"), [(20, False), (250, True)])
def test_the_last_pinned_rows_stay_in_an_extent_that_another_prompt_fills(long_prefix, pool, num_tokens, at_once):
    """A page that ends at token 32, and an extent of 16 pages that ends at token 256, are of the node below the pinned one."""
    pool.resize(40 * PAGE_BYTES)
    prompt = [token % 251 for token in range(288)]
    long_prefix.release(begin(long_prefix, prompt, at_once=at_once))
    assert long_prefix.pin(prompt[:num_tokens]) == num_tokens
    long_prefix.evict()
    sequence = long_prefix.attach([*prompt[:num_tokens], 0]).sequence
    assert_reads(sequence, range(num_tokens))
    sequence.close()
    long_prefix.unpin(prompt[:num_tokens])
    long_prefix.evict()
    assert (long_prefix.match(prompt), pool.used_bytes) == (0, 0)


def test_of_many_prompts_that_go_on_from_a_pinned_one_one_keeps_its_last_rows(prefix):
    for token in (300, 400, 500):
        prefix.release(begin(prefix, [*PROMPT[:20], *range(token, token + 28)], method=AttachMethod.COMPUTE))
    for _ in range(2):
        prefix.pin(PROMPT[:20])
        prefix.evict()
        assert prefix.stats().held_bytes == 2 * PAGE_BYTES
        assert prefix.match([*PROMPT[:20], 0]) == 20


def test_the_last_pinned_rows_are_kept_in_a_page_that_is_filled_later(prefix, cache):
    sequence = begin(prefix, PROMPT[:20])
    prefix.pin(PROMPT[:20])
    write(sequence, 48)
    prefix.release(sequence, PROMPT[:48])
    for parked in cache.parked():
        cache.evict(parked)
    prefix.evict()
    assert_reads(prefix.attach([*PROMPT[:20], 0]).sequence, range(20))


def test_pages_that_pins_keep_are_not_evictable_and_unpin_is_named(prefix, pool, cache):
    for number in (1, 2):
        prefix.release(begin(prefix, [number] * 32))
    prefix.pin([1] * 32)
    pool.resize(4 * PAGE_BYTES)
    sequence = cache.open()
    assert [prefix.has_room([0], room_pages=num_pages) for num_pages in (2, 3)] == [True, False]
    with pytest.raises(
        OutOfPages,
        match=r"3 pages .* are needed, 0 are free and 2 can be evicted; pins keep 2 pages, which unpin\(\) would free; "
        rf"resize\(\) the budget to at least {5 * PAGE_BYTES} bytes",
    ):
        sequence.grow(48)
    assert [prefix.match([number] * 33) for number in (1, 2)] == [32, 32]
    prefix.unpin([1] * 32)
    sequence.grow(48)


@pytest.mark.parametrize("end", ["release", "close", "truncate", "compact"])
def test_the_last_rows_of_a_pinned_prompt_do_not_go_with_a_sequence_that_continues_it(prefix, end):
    park(prefix, PROMPT[:40])  # the last 8 rows are in no full page
    prefix.pin(PROMPT[:40])
    sequence = prefix.attach(PROMPT[:50]).sequence
    assert_reads(sequence, range(40))
    write(sequence, 50)
    if end == "truncate":
        sequence.truncate(4)
    elif end == "compact":
        sequence.compact(range(1, 50))
    if end == "close":
        sequence.close()
    else:
        prefix.release(sequence)
    assert_reads(prefix.attach(PROMPT[:41]).sequence, range(40))


@pytest.mark.parametrize("end", ["release", "close", "compact"])
def test_a_running_prompt_that_is_pinned_keeps_its_last_rows_when_it_ends(prefix, cache, pool, end):
    sequence = begin(prefix, PROMPT[:46])
    prefix.pin(PROMPT[:40])
    if end == "compact":
        sequence.compact([*range(43), *range(44, 46)])
    if end == "close":
        sequence.close()
    else:
        prefix.release(sequence)
    cache.check()
    assert [(parked.length, parked.num_pages) for parked in cache.parked()] == [(40, 3)]
    prefix.evict()
    again = prefix.attach(PROMPT[:60]).sequence
    assert_reads(again, range(40))
    write(again, 60)
    prefix.insert(again, PROMPT[:60])


def test_a_sequence_ends_for_good_where_another_slot_has_the_pinned_rows(prefix, cache):
    first, second = begin(prefix, PROMPT[:40]), begin(prefix, PROMPT[:50])
    prefix.pin(PROMPT[:40])
    prefix.release(first)
    assert not cache.parked()
    prefix.unpin(PROMPT[:40])
    prefix.release(second)
    assert not cache.parked()


def test_a_pinned_slot_is_adopted_where_there_is_no_other(prefix, cache):
    park(prefix, PROMPT[:40])
    prefix.pin(PROMPT[:40])
    others = [cache.open() for _ in range(3)]
    assert prefix.attach(PROMPT[:50]).method is AttachMethod.ADOPT
    others[0].close()
    assert prefix.attach(PROMPT[:41]).num_tokens == 40


def test_a_closing_slot_is_taken_before_a_pinned_one(prefix, cache, driver):
    park(prefix, PROMPT[:40])
    prefix.pin(PROMPT[:40])
    others = [cache.open() for _ in range(3)]
    kernel = driver.launch([])
    for sequence in others:
        sequence.grow(16)
        sequence.close()
    assert not kernel.finished and cache.taken_slots() == [1, 2, 3, 4]
    cache.open()  # waits for the kernel
    assert prefix.match(PROMPT) == 40


def test_a_batch_spares_pinned_slots_while_others_can_be_taken(prefix, cache):
    for number in range(4):
        park(prefix, [number] * 20)
    prefix.pin([0] * 20)
    assert [sequence.slot for sequence in cache.open_batch(2)] == [2, 3]
    assert prefix.match([0] * 21) == 20


def test_pinned_slots_are_not_freed_ahead_of_need(prefix, cache):
    for number in range(2):
        park(prefix, [number] * 20)
    prefix.pin([0] * 20)
    prefix.free_slots(4)
    assert [parked.slot for parked in cache.parked()] == [1]


@pytest.mark.parametrize("namespace", ["red", "blue"])
def test_a_pinned_parked_slot_is_taken_last(prefix, namespace):
    for number in (1, 2, 3, 4):
        park(prefix, [number] * 20, namespace="red")
    prefix.pin([1] * 20, namespace="red")
    prefix.attach([9] * 20, namespace=namespace)
    known = [prefix.match([number] * 21, namespace="red") for number in (1, 2, 3, 4)]
    assert (known[0], sorted(known)) == (20, [16, 20, 20, 20])


def test_under_pressure_a_pinned_parked_slot_is_taken_last(prefix, pool):
    """No leaf can be evicted, and two parked slots have pages of their own."""
    pinned, other = ([*PROMPT[:36], last] for last in (300, 301))
    for tokens in (pinned, other):
        park(prefix, tokens, method=AttachMethod.COMPUTE)
    kept, _ = prefix.cache.parked()
    prefix.pin(pinned)
    prefix.attach([*other, 0], method=AttachMethod.ALIAS)
    pool.resize(pool.held_bytes)
    prefix.cache.open().grow(16)
    assert prefix.cache.parked() == [kept]


def test_an_expired_pin_does_not_keep_a_slot_from_being_adopted(prefix):
    park(prefix, PROMPT[:40])
    prefix.pin(PROMPT[:40], ttl_s=1e-9)
    assert prefix.attach([*PROMPT[:20], 0]).method is AttachMethod.ADOPT


def test_a_refused_resize_evicts_nothing_and_names_what_works(prefix, pool):
    for number in (1, 2, 3):
        park(prefix, [number] * 40)
    prefix.pin([1] * 40)
    prefix.cache.open().grow(32)
    before = prefix.stats(), len(prefix.cache.parked()), pool.stats()
    with pytest.raises(BudgetError, match=r"2\.0 MiB is less than the 8\.0 MiB .* ask for at least 8388608 bytes"):
        pool.resize(PAGE_BYTES)
    assert (prefix.stats(), len(prefix.cache.parked()), pool.stats()) == before
    pool.resize(8388608)


def test_while_a_graph_is_captured_prefixes_stay_as_they_are(prefix, cache, driver):
    park(prefix, PROMPT[:40])
    sequence = begin(prefix, PROMPT[:20], method=AttachMethod.COMPUTE)
    before, driver.captures = (prefix.stats(), cache.stats()), True
    for use in (
        *(lambda: prefix.attach(PROMPT[:50]), lambda: prefix.attach([1])),
        *(lambda: prefix.park(sequence, PROMPT[:20]), lambda: prefix.release(sequence)),
    ):
        with pytest.raises(GraphCapture, match="nothing has changed"):
            use()
        assert (prefix.stats(), cache.stats()) == before
    driver.captures = False


def test_an_interrupted_attach_leaves_no_sequence(prefix, cache, driver, monkeypatch):
    park(prefix, PROMPT[:40])
    write = driver.write
    monkeypatch.setattr(driver, "write", lambda *arguments: (signal.raise_signal(signal.SIGINT), write(*arguments)))
    with pytest.raises(KeyboardInterrupt):
        prefix.attach(PROMPT[:50])
    monkeypatch.undo()
    assert cache.stats().num_sequences == 0
    assert prefix.match(PROMPT) == 32


# what is counted, and what is refused


def test_stats_say_what_is_held_and_what_was_done(prefix):
    assert repr(prefix) == "<PrefixCache on cpu: 0 tokens in 0 nodes, 0 B held>"
    park(prefix, PROMPT[:40])
    assert repr(prefix) == "<PrefixCache on cpu: 40 tokens in 1 node, 4.0 MiB held>"
    begin(prefix, PROMPT[:50])
    prefix.attach(PROMPT[:33], method=AttachMethod.ALIAS)
    stats = prefix.stats()
    assert stats.attached == {"adopt": 1, "alias": 1, "compute": 1}
    assert all((stats.attach_us[method] > 0) == (count > 0) for method, count in stats.attached.items())
    assert (stats.hit_tokens, stats.missed_tokens) == (40 + 32, 40 + 10 + 1)
    assert (stats.num_tokens, stats.held_bytes, stats.inserted_pages) == (50, 3 * PAGE_BYTES, 3)
    assert stats.num_nodes >= 2
    prefix.cache.close()
    assert repr(prefix) == "<PrefixCache on cpu, closed>"


@pytest.mark.parametrize("owner", [True, 1.0, (1, True), ["red"], np.str_("red")], ids=repr)
def test_names_that_are_equal_and_not_the_same_are_no_tenant_and_no_namespace(prefix, cache, tmp_path, owner):
    """1, 1.0 and True are one key of a dictionary: they would share rows, and memory would pass between them as it is."""
    sequence = cache.open(tenant=1)
    sequence.grow(20)
    given = {"tokens": PROMPT, "count": 2, "parked": sequence.park(), "path": tmp_path / "saved", "room_pages": 1}
    calls = set()
    for one, name in ((cache, "tenant"), (prefix, "namespace")):
        for method, call in inspect.getmembers(one, inspect.ismethod):
            taken = inspect.signature(call).parameters
            if name in taken and not method.startswith("_") and taken[name].kind is inspect.Parameter.KEYWORD_ONLY:
                needed = {key: given[key] for key in taken if key in given}
                with pytest.raises(ValueError, match=f"{name}=.* is a (bool|float|list|str_); give a str, bytes, an int, None"):
                    call(**needed, **{name: owner})
                calls.add(method)
    assert calls == {
        *("open", "open_batch", "adopt", "restore"),
        *("match", "lookup", "attach", "borrow", "fetch", "has_room", "pin", "unpin"),
    }
    assert cache.taken_slots() == [1]


def test_bad_input_is_refused_and_changes_nothing(prefix, cache):
    sequence = begin(prefix, PROMPT[:20])
    strangers = [cache.open(), *cache.fork(sequence)]
    other = KVCache(LAYOUT, cache.pool, slots=1, max_tokens=64).open()
    assert other.slot == sequence.slot
    before = prefix.stats()
    for error, message, use in (
        (ValueError, "tokens: none; a prompt has at least 1", lambda: prefix.attach([])),
        (ValueError, "wanted integers in", lambda: prefix.attach([-1, 2])),
        (SequenceTooLong, "a prompt of 30 tokens is .* max_tokens=20", lambda: prefix.attach(PROMPT[:30], max_tokens=20)),
        (ValueError, "19 tokens: .* slot 1 has 20, of which 20 were inserted", lambda: prefix.insert(sequence, PROMPT[:19])),
        (ValueError, "21 tokens: the sequence in slot 1 has 20", lambda: prefix.insert(sequence, PROMPT[:21])),
        (ValueError, "has a prefix cache already", lambda: PrefixCache(cache)),
        (TypeError, "is a Pool; give a KVCache", lambda: PrefixCache(cache.pool)),
        (TypeError, "sequence=None is a NoneType; give a Sequence of this cache", lambda: prefix.insert(None, [1])),
        (TypeError, "sequence=None is a NoneType", lambda: prefix.release(None)),
        (Closed, "is no running sequence of this cache", lambda: prefix.release(other)),
        (Closed, "is no running sequence of this cache", lambda: prefix.park(other, [])),
        (ValueError, "did not come from attach", lambda: prefix.insert(strangers[0], [])),
        (ValueError, "did not come from attach", lambda: prefix.insert(strangers[1], [])),
    ):
        with pytest.raises(error, match=message):
            use()
    assert prefix.stats() == before
    prefix.park(sequence, PROMPT[:20])
    for end in (prefix.park, prefix.release):
        with pytest.raises(Closed, match="no running sequence"):
            end(sequence, PROMPT[:20])


@pytest.mark.parametrize("end", ["run", "park"])
def test_without_a_page_for_the_rest_all_of_it_is_computed(prefix, pool, cache, end):
    """What it would be copied from does not make room for the copy."""
    owner = begin(prefix, PROMPT[:20])
    if end == "park":
        prefix.park(owner, PROMPT[:20])
    pool.resize(2 * PAGE_BYTES)
    attached = prefix.attach(PROMPT[:21], method=AttachMethod.ALIAS)
    assert (attached.method, attached.num_tokens) == (AttachMethod.COMPUTE, 0)
    assert prefix.stats().attached["alias"] == 0
    if end == "run":
        with pytest.raises(OutOfPages):
            attached.sequence.grow(21)
    else:
        attached.sequence.grow(21)
    cache.check()


def test_what_lies_below_makes_room_but_for_what_is_copied_from_it(prefix, pool):
    prefix.release(begin(prefix, PROMPT[:48]))
    prefix.pin(PROMPT[:20])  # a node of its own, whose last rows are in a page of the node below
    pool.resize(3 * PAGE_BYTES)
    attached = prefix.attach([*PROMPT[:20], 0], method=AttachMethod.ALIAS)
    assert attached.num_tokens == 20
    assert_reads(attached.sequence, range(20))
    assert prefix.match(PROMPT) == 32


# memory that is needed elsewhere

LONG = list(range(129))  # 8 pages and a token


def compute(prefix, tokens, method=None):
    """A sequence that has all of a prompt, laid at once."""
    sequence = prefix.attach(tokens, method=method).sequence
    sequence.grow(len(tokens))
    sequence.advance(len(tokens) - sequence.length)
    return sequence


def test_a_parked_slots_own_pages_can_be_had_while_others_run_from_its_prefix(pool, long_prefix):
    pool.resize(20 * PAGE_BYTES)
    twins = [compute(long_prefix, LONG, AttachMethod.COMPUTE) for _ in range(2)]
    for twin in twins:
        long_prefix.park(twin, LONG)
    sequence = long_prefix.attach([*LONG, 7], method=AttachMethod.ALIAS).sequence
    assert (sequence.length, pool.spare_pages) == (129, 1)
    sequence.grow(16 * 12)  # 3 pages more; the second of the twins has 9 that no other holds


@pytest.mark.parametrize("last", [0, 1])
def test_a_window_that_can_neither_be_opened_nor_undone_is_unmapped_later(long_prefix, driver, monkeypatch, last):
    long_prefix.release(compute(long_prefix, LONG), LONG)
    rows_SRHD = long_prefix.cache.k(0)
    first = rows_SRHD.data_ptr()
    slots = range(first, first + len(rows_SRHD) * rows_SRHD.stride(0) * rows_SRHD.itemsize)
    set_access = driver.set_access

    def fail_in_a_window(address, *given):
        if address not in slots:
            driver.fail_at = {driver.num_calls, driver.num_calls + last}  # the access call, and the unmap
        set_access(address, *given)

    monkeypatch.setattr(driver, "set_access", fail_in_a_window)
    with pytest.raises(DriverError, match="told to fail"):
        long_prefix.attach([*LONG[:-3], 0, 0])
    monkeypatch.undo()
    driver.fail_at = set()
    long_prefix.cache.check()
    long_prefix.cache.drain()


def test_what_a_window_has_passed_can_be_had_while_its_sequence_runs(pool, windowed_prefix):
    pool.resize(10 * PAGE_BYTES)
    prefix = windowed_prefix
    sequence = compute(prefix, LONG)
    prefix.insert(sequence, LONG)
    sequence.advance_start(0)  # of 9 pages it needs 3
    assert (pool.spare_pages, pool.kept_pages) == (1, 6)
    prefix.cache.open().grow(16 * 7)
    prefix.cache.check()
    assert (pool.spare_pages, pool.kept_pages) == (0, 0)
    assert prefix.match([*LONG, 7]) == 129, "a prompt that goes on from its end needs its last window only"
    assert prefix.match([*LONG[:64], 7]) == 0
    prefix.release(sequence, LONG)
    assert prefix.match([*LONG, 7]) == 128


def test_what_a_window_has_passed_stays_while_another_reads_it_or_it_is_pinned(pool, windowed_prefix):
    pool.resize(12 * PAGE_BYTES)
    prefix = windowed_prefix
    sequence = compute(prefix, LONG)
    prefix.insert(sequence, LONG)
    behind = prefix.attach([*LONG[:64], 7], method=AttachMethod.ALIAS).sequence  # pages 2 and 3
    sequence.advance_start(0)
    prefix.pin(LONG[:32])  # pages 0 and 1
    assert pool.spare_pages == 3
    other = prefix.cache.open()
    with pytest.raises(OutOfPages):
        other.grow(16 * 6)
    other.grow(16 * 5)
    prefix.cache.check()
    assert (prefix.match([*LONG[:32], 7]), prefix.match([*LONG[:64], 7])) == (32, 64)
    prefix.unpin(LONG[:32])
    behind.close()
    other.grow(16 * 9)


def test_a_page_takes_the_place_of_one_with_fewer_rows(windowed_prefix):
    prefix, prompt = windowed_prefix, LONG[:64]
    source, whole, beam = (compute(prefix, tokens) for tokens in (prompt, prompt, [*prompt[:5], *range(900, 959)]))
    source.advance_start(0)  # to token 45, in page 2
    prefix.cache.copy_rows([(source, beam)], 5, 64)
    source.close()
    prefix.release(beam, prompt)
    assert prefix.match([*prompt, 7]) == 64, "the last rows are there"
    assert prefix.match([*prompt[:63], 7]) == 0
    prefix.release(whole, prompt)
    assert prefix.match([*prompt[:63], 7]) == 63


def test_of_what_windows_have_passed_the_least_recently_used_goes_first(pool, windowed_prefix):
    pool.resize(30 * PAGE_BYTES)
    prefix, template = windowed_prefix, LONG[:64]
    prompts = [[*template, *range(first, first + 65)] for first in (300, 900)]
    for prompt in prompts:  # the second is the template's last use
        sequence = compute(prefix, prompt)
        prefix.insert(sequence, prompt)
        sequence.advance_start(0)
    assert pool.kept_pages == 4 + 2 * 2  # the template's, and two of each one's own
    other = prefix.cache.open()
    other.grow((pool.spare_pages + 1) * 16)
    assert prefix.match([*prompts[0][:96], 7]) < 96, "the first prompt's own"
    assert prefix.match([*template, 7]) == 64
    other.grow((pool.spare_pages + pool.kept_pages) * 16)
