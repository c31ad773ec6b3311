"""Shared prefixes: what each way in and out does and costs, and what is said of bad input."""

import itertools
import signal
import subprocess
import sys
import time

import pytest
import torch

from vmmkv import KVCache, KVLayout, OutOfPages, Pool, SequenceTooLong
from vmmkv.errors import BudgetError
from vmmkv.layout import Group, Plane
from vmmkv.memory.pool import LARGE_PAGES
from vmmkv.prefix import AttachMethod, PrefixCache
from vmmkv.units import PAGE_BYTES

# 128 KiB a row: 16 tokens a page.
LAYOUT = KVLayout.uniform(layers=4, kv_heads=8, head_dim=512, dtype=torch.float32)
TOKENS_PER_PAGE = 16
# 672 KiB a row: token 3 lies in two pages, the first of which is shareable with 4 tokens.
STRADDLING = KVLayout.uniform(layers=4, kv_heads=8, head_dim=2688, dtype=torch.float32)

PROMPT = [7 * token % 251 for token in range(100)]


@pytest.fixture
def pool(driver):
    pool = Pool("cpu", 32 * PAGE_BYTES, driver=driver)
    yield pool
    pool.close()
    assert (driver.live_handles, driver.live_mappings) == (0, 0)


@pytest.fixture
def cache(pool):
    with KVCache(LAYOUT, pool, slots=4, max_tokens=128) as cache:
        yield cache
        cache.check()


@pytest.fixture
def prefix(cache):
    return PrefixCache(cache)


@pytest.fixture
def straddling(pool):
    with KVCache(STRADDLING, pool, slots=4, max_tokens=16) as cache:
        yield PrefixCache(cache)
        cache.check()


def write(sequence, num_tokens):
    """Token t's rows are full of t + 1, from the sequence's length on; one by one, so that they lie in pages."""
    for token in range(sequence.length, num_tokens):
        sequence.grow(token + 1)
        at = token - sequence.start()
        for layer in sequence.cache.layout.group_of:
            sequence.k(layer)[at] = token + 1
            sequence.v(layer)[at] = -token - 1
        sequence.advance()


def assert_reads(sequence, num_tokens):
    """Its rows are what `write` wrote, whoever wrote it."""
    assert sequence.length == num_tokens
    rows = slice(0, num_tokens - sequence.start())
    wanted = torch.arange(sequence.start() + 1, num_tokens + 1, dtype=torch.float32).view(-1, 1, 1)
    for layer in sequence.cache.layout.group_of:
        k, v = sequence.k(layer)[rows], sequence.v(layer)[rows]
        assert torch.equal(k, wanted.expand_as(k))
        assert torch.equal(v, -wanted.expand_as(v))


def test_a_prefix_cache_says_what_it_holds(prefix, cache):
    assert repr(prefix) == "<PrefixCache on cpu: 0 tokens in 0 nodes, 0 B held>"
    sequence = prefix.attach(PROMPT[:40]).sequence
    write(sequence, 40)
    prefix.park(sequence, PROMPT[:40])
    assert repr(prefix) == "<PrefixCache on cpu: 40 tokens in 1 node, 4.0 MiB held>"
    cache.close()
    assert repr(prefix) == "<PrefixCache on cpu, closed>"


def begin(prefix, tokens, **options):
    """A sequence with these tokens, all inserted."""
    sequence = prefix.attach(tokens, **options).sequence
    write(sequence, len(tokens))
    prefix.insert(sequence, tokens)
    return sequence


def park(prefix, tokens, **options):
    prefix.park(begin(prefix, tokens, **options), tokens)


def pages(sequence):
    """The extents under a sequence, in order."""
    return [mapping.extent for mapping in sequence.cache.memory.spans(sequence.slot)[0].live()]


class Calls:
    """The driver calls since it was made, by name."""

    def __init__(self, driver):
        self.driver, self.before = driver, driver.calls.copy()

    def made(self):
        return dict(self.driver.calls - self.before)


# what hits


def test_the_last_token_of_a_prompt_is_always_computed(prefix):
    begin(prefix, PROMPT[:32])
    attached = prefix.attach(PROMPT[:32])
    assert attached.num_tokens == 31
    assert_reads(attached.sequence, 31)
    assert prefix.attach(PROMPT[:1]).num_tokens == 0


def test_what_was_computed_and_not_inserted_is_nobody_elses(prefix):
    sequence = prefix.attach(PROMPT[:40]).sequence
    write(sequence, 40)
    assert prefix.match(PROMPT) == 0
    prefix.insert(sequence, PROMPT[:20])
    assert prefix.match(PROMPT) == 20


def test_a_namespace_never_hits_anothers(prefix):
    for namespace in ("red", ("red", "adapter"), None):
        assert prefix.match(PROMPT, namespace=namespace) == 0
        park(prefix, PROMPT[:40], namespace=namespace)
    assert prefix.match(PROMPT, namespace="blue") == 0
    assert prefix.attach(PROMPT, namespace="blue").method is AttachMethod.COMPUTE
    assert prefix.attach(PROMPT[:41], namespace="red").sequence.tenant == "red"


def test_a_hit_can_end_inside_an_extent(prefix):
    owner = begin(prefix, PROMPT[:40])
    attached = prefix.attach([*PROMPT[:21], 0, 0], method=AttachMethod.ALIAS)
    assert attached.num_tokens == 21
    assert_reads(attached.sequence, 21)
    first, second = pages(attached.sequence)
    assert first is pages(owner)[0]  # tokens 0 to 15
    assert second is not pages(owner)[1]  # its first 5 rows are copied
    write(attached.sequence, 40)
    assert_reads(owner, 40)


def test_a_row_on_a_page_border_is_copied_in_part(straddling):
    owner = begin(straddling, PROMPT[:7])
    third = straddling.attach([*PROMPT[:3], 0, 0], method=AttachMethod.ALIAS).sequence
    assert not set(pages(third)) & set(pages(owner))  # page 0 has a part of row 3 too
    fourth = straddling.attach([*PROMPT[:4], 0, 0], method=AttachMethod.ALIAS).sequence
    assert [each is own for each, own in zip(pages(fourth), pages(owner), strict=False)] == [True, False]
    for sequence, length in ((third, 3), (fourth, 4)):
        assert_reads(sequence, length)
        write(sequence, 6)
    assert_reads(owner, 7)


def test_prompts_that_part_share_what_they_have_in_common(prefix):
    owner = begin(prefix, PROMPT[:48])
    other = begin(prefix, [*PROMPT[:32], *range(300, 316)])
    assert pages(other)[:2] == pages(owner)[:2]
    assert prefix.match([*PROMPT[:32], *range(300, 320)]) == 48
    assert prefix.match(PROMPT) == 48


# the methods


def test_adopting_a_parked_slot_costs_no_driver_call_but_the_limits_write(prefix, driver):
    park(prefix, PROMPT[:40])
    calls = Calls(driver)
    attached = prefix.attach(PROMPT[:50])
    assert calls.made() == {"write": 1}
    assert (attached.method, attached.num_tokens) == (AttachMethod.ADOPT, 40)
    assert_reads(attached.sequence, 40)


def test_adopting_a_part_forgets_what_will_be_written_over(prefix):
    park(prefix, PROMPT[:40])
    attached = prefix.attach([*PROMPT[:20], 0])
    assert (attached.method, attached.num_tokens) == (AttachMethod.ADOPT, 20)
    assert prefix.match(PROMPT) == 20


@pytest.mark.parametrize(("num_past", "method"), [(256, AttachMethod.ADOPT), (257, AttachMethod.ALIAS)])
def test_adopting_loses_at_most_sixteen_pages_of_another_prompt(pool, num_past, method):
    pool.resize(64 * PAGE_BYTES)
    with KVCache(LAYOUT, pool, slots=4, max_tokens=400) as cache:
        prefix = PrefixCache(cache)
        prompt = list(range(20 + num_past))
        park(prefix, prompt)
        attached = prefix.attach([*prompt[:20], 0])
        assert (attached.method, attached.num_tokens) == (method, 20)
        assert prefix.match([*prompt, 0]) == (20 if method is AttachMethod.ADOPT else 20 + num_past)
        cache.check()


def test_of_less_than_a_page_an_alias_is_a_copy(prefix):
    begin(prefix, PROMPT[:10])
    attached = prefix.attach(PROMPT[:11])
    assert (attached.method, attached.num_tokens, attached.num_aliased) == (AttachMethod.ALIAS, 10, 0)
    assert_reads(attached.sequence, 10)


def test_a_slot_is_not_adopted_when_others_still_need_its_rows(prefix):
    park(prefix, PROMPT[:40])
    prefix.pin(PROMPT[:40])
    attached = prefix.attach([*PROMPT[:20], 0])
    assert (attached.method, attached.num_tokens) == (AttachMethod.ALIAS, 20)
    assert prefix.match(PROMPT) == 40


def test_a_slot_is_not_adopted_when_other_prompts_go_on_from_its_tokens(prefix):
    park(prefix, PROMPT[:40])
    other = [*PROMPT[:32], *range(300, 316)]
    prefix.release(
        begin(prefix, other, method=AttachMethod.ALIAS)
    )  # its pages alone are left, behind 32 tokens of the parked slot
    attached = prefix.attach([*PROMPT[:20], 0])
    assert (attached.method, attached.num_tokens) == (AttachMethod.ALIAS, 20)
    assert prefix.match([*other, 0]) == 48
    assert prefix.match(PROMPT) == 40


def test_an_alias_costs_a_map_and_an_access_call_for_each_extent(prefix, driver):
    begin(prefix, PROMPT[:96])
    calls = Calls(driver)
    attached = prefix.attach([*PROMPT[:64], 0], method=AttachMethod.ALIAS)
    assert calls.made() == {"map": 4, "set_access": 4, "write": 1}
    assert attached.sequence.limit == 64


def test_a_large_extent_is_one_handle(pool, driver):
    with KVCache(LAYOUT, pool, slots=4, max_tokens=400) as cache:
        prefix = PrefixCache(cache)
        prompt = [token % 251 for token in range(256)]
        owner = prefix.attach(prompt).sequence
        owner.grow(256)  # at once, as a prompt is laid
        write(owner, 256)
        prefix.insert(owner, prompt)
        calls = Calls(driver)
        attached = prefix.attach([*prompt, 0], method=AttachMethod.ALIAS)
        assert calls.made() == {"map": 1, "set_access": 1, "write": 1}
        assert_reads(attached.sequence, 256)


def test_where_prompts_part_inside_a_large_extent_the_first_copies_and_the_others_share(pool):
    """250 of 256 tokens: a large extent would end past what they have in common, and nobody could share it."""
    pool.resize(96 * PAGE_BYTES)
    with KVCache(LAYOUT, pool, slots=6, max_tokens=512) as cache:
        prefix = PrefixCache(cache)
        shared = [7 * token % 251 for token in range(250)]
        first = prefix.attach([*shared, *range(300, 330)], max_tokens=300).sequence
        first.grow(280)
        assert any(extent.num_pages == LARGE_PAGES for extent in pages(first)), "a prompt is laid in large extents"
        write(first, 280)
        prefix.insert(first, [*shared, *range(300, 330)])
        used = [pool.used_bytes]
        for other in (400, 500, 600):
            attached = prefix.attach([*shared, other, other + 1])
            assert attached.num_tokens == 250
            assert_reads(attached.sequence, 250)
            used.append(pool.used_bytes)
        pages_taken = [(after - before) // PAGE_BYTES for before, after in itertools.pairwise(used)]
        assert pages_taken == [16, 1, 1], "all of it once, then the page that is not full"
        cache.check()


@pytest.mark.parametrize("end", ["run", "park", "release"])
def test_rows_are_copied_from_whoever_has_them(prefix, driver, end):
    """From a running slot, from a parked one, or from the tree alone: through a window, at addresses of nobody's slot."""
    owner = begin(prefix, PROMPT[:48])
    if end != "run":
        getattr(prefix, end)(owner, PROMPT[:48])
    calls = Calls(driver)
    attached = prefix.attach([*PROMPT[:40], 0], method=AttachMethod.ALIAS)
    assert attached.num_tokens == 40
    assert_reads(attached.sequence, 40)
    windows = end == "release"
    assert calls.made()["map"] == 3 + windows
    assert calls.made().get("fence", 0) == (end != "run")  # nothing goes before it is read


def test_without_the_rest_of_a_page_fewer_tokens_hit(prefix):
    prefix.release(begin(prefix, PROMPT[:40]))
    assert prefix.match(PROMPT) == 32  # rows 32 to 39 were in a page that was not full, and went with the slot


def test_where_a_forced_method_is_impossible_all_is_computed(prefix):
    begin(prefix, PROMPT[:40])
    assert prefix.attach(PROMPT[:41], method=AttachMethod.ADOPT).method is AttachMethod.COMPUTE  # nobody has parked
    assert prefix.attach([1, 2, 3], method=AttachMethod.ALIAS).method is AttachMethod.COMPUTE


@pytest.mark.parametrize("count", [20, 32, 40])
def test_other_tokens_for_rows_that_were_inserted_are_refused(prefix, count):
    sequence = begin(prefix, PROMPT[:40])
    with pytest.raises(ValueError, match="inserted"):
        prefix.insert(sequence, [9] * count)
    prefix.insert(sequence, PROMPT[:40])  # the same again is nothing
    assert prefix.match([9] * 41) == 0
    assert prefix.match(PROMPT[:41]) == 40


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
    assert_reads(first, 32)


def test_inserting_costs_no_driver_call(prefix, driver):
    sequence = prefix.attach(PROMPT[:40]).sequence
    write(sequence, 40)
    calls = Calls(driver)
    for num_tokens in (3, 16, 16, 40):
        prefix.insert(sequence, PROMPT[:num_tokens])
    assert calls.made() == {}


def test_truncating_below_what_is_shared_takes_pages_of_ones_own(prefix):
    owner = begin(prefix, PROMPT[:40])
    sharer = prefix.attach(PROMPT[:41], method=AttachMethod.ALIAS).sequence
    sharer.truncate(20)
    assert pages(sharer)[0] is pages(owner)[0]
    assert pages(sharer)[1] is not pages(owner)[1]
    assert_reads(sharer, 20)
    write(sharer, 48)
    assert_reads(owner, 40)
    owner.truncate(10)  # the tree still has what the owner cuts
    assert_reads(owner, 10)
    assert prefix.match(PROMPT) >= 32


def test_truncating_at_a_border_of_pages_exchanges_nothing(prefix, driver):
    begin(prefix, PROMPT[:40])
    sharer = prefix.attach(PROMPT[:41], method=AttachMethod.ALIAS).sequence
    calls = Calls(driver)
    sharer.truncate(16)
    assert calls.made() == {"write": 1}  # the limit, which is a fence too


def test_a_row_before_a_window_is_never_taken_for_one_that_was_written(pool):
    """A page can have more rows than a window: who attaches has its last rows only, and others may not take it for full."""
    plane = Plane(name="k", heads=1, dim=128 * 1024 // 4, dtype=torch.float32)
    values = Plane(name="v", heads=1, dim=128 * 1024 // 4, dtype=torch.float32)
    layout = KVLayout(groups=(Group(layers=(0,), planes=(plane, values), window=3),))  # 8 rows a page
    with KVCache(layout, pool, slots=4, max_tokens=64) as cache:
        prefix = PrefixCache(cache)
        first = begin(prefix, PROMPT[:6])
        second = prefix.attach(PROMPT[:16])
        assert (second.num_tokens, second.sequence.start()) == (6, 4)  # rows 4 and 5 of page 0 are copied
        write(second.sequence, 16)
        prefix.insert(second.sequence, PROMPT[:16])
        first.close()
        assert prefix.match([*PROMPT[:4], 0]) == 0  # it needs rows 2 and 3, which the tree's page 0 has not
        third = prefix.attach(PROMPT[:17], method=AttachMethod.ALIAS)
        assert third.num_tokens == 16
        assert_reads(third.sequence, 16)


# forks


def test_fork_shares_extents_until_either_writes(prefix, cache, driver):
    parent = begin(prefix, PROMPT[:40])
    calls = Calls(driver)
    child = cache.fork(parent)[0]
    assert calls.made() == {"create": 1, "map": 3, "set_access": 3, "write": 1}
    assert pages(child)[:2] == pages(parent)[:2]
    assert pages(child)[2] is not pages(parent)[2]
    write(child, 50)
    parent.truncate(30)
    assert_reads(parent, 30)
    write(parent, 45)
    assert_reads(child, 50)
    assert_reads(parent, 45)
    assert pages(child)[0] is pages(parent)[0]
    assert pages(child)[1] is not pages(parent)[1]


def test_forks_outlive_their_parent(cache):
    parent = cache.open()
    write(parent, 40)
    children = cache.fork(parent, 3)
    parent.close()
    cache.drain()
    for child in children:
        write(child, 44)
        assert_reads(child, 44)


READ_ONLY = """
import torch
from vmmkv import KVCache, KVLayout, Pool
from vmmkv.driver.base import Access
from vmmkv.prefix import PrefixCache
from vmmkv.prefix import AttachMethod
from vmmkv.units import MIB

pool = Pool("cpu", 32 * MIB)
cache = KVCache(KVLayout.uniform(layers=1, kv_heads=1, head_dim=64 * 1024, dtype=torch.float16), pool, slots=2, max_tokens=64)
cache.memory.mapper.alias_access = Access.READ
prefix = PrefixCache(cache)
owner = prefix.attach(range(16)).sequence
owner.grow(16)
owner.k(0)[:] = 1.0
owner.advance(16)
prefix.insert(owner, range(16))
sharer = prefix.attach(range(20), method=AttachMethod.ALIAS).sequence
sharer.grow(20)
sharer.k(0)[sharer.length] = 2.0
print(sharer.length, float(sharer.k(0)[3, 0, 0]), "and then", flush=True)
sharer.k(0)[3] = 2.0
print("nothing happened")
"""


def test_a_write_to_what_others_hold_faults_where_aliases_are_read_only():
    child = subprocess.run([sys.executable, "-c", READ_ONLY], capture_output=True, text=True, timeout=60, check=False)
    assert child.stdout == "16 1.0 and then\n", child.stderr
    assert child.returncode == -signal.SIGSEGV


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


def test_evicting_a_leaf_cuts_the_parked_slot_that_ends_there(prefix, cache):
    park(prefix, PROMPT[:48])
    park(prefix, [*PROMPT[:20], *range(300, 310)])  # adopts: the first 20 tokens become a node of their own
    prefix.release(begin(prefix, PROMPT[:48]))
    assert prefix.evict(1)
    cache.check()
    assert prefix.match([*PROMPT[:20], *range(300, 311)]) >= 16


def test_pages_are_evicted_for_whoever_needs_them(prefix, pool):
    for number in (1, 2, 3):
        park(prefix, [number] * 40)
    pool.resize(10 * PAGE_BYTES)
    sequence = prefix.attach([9] * 100).sequence
    sequence.grow(100)
    assert [prefix.match([number] * 41) for number in (1, 2, 3)] == [0, 0, 40]
    assert prefix.stats().evicted_pages == 4  # two full pages each; the third of each went with its slot


def test_what_a_sequence_runs_on_is_not_evicted(prefix):
    begin(prefix, PROMPT[:40])
    sharer = prefix.attach(PROMPT[:41], method=AttachMethod.ALIAS).sequence
    assert prefix.evict() == 0
    assert prefix.match(PROMPT) == 40
    assert_reads(sharer, 40)


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


def test_a_pool_does_not_shrink_below_what_is_pinned(prefix, pool):
    prefix.release(begin(prefix, PROMPT[:64]))
    prefix.pin(PROMPT[:64])
    with pytest.raises(BudgetError, match=r"2\.0 MiB is less than the 8\.0 MiB .* ask for at least 8388608 bytes"):
        pool.resize(PAGE_BYTES)
    pool.resize(8388608)


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


def test_a_refused_resize_evicts_nothing(prefix, pool):
    for number in (1, 2, 3):
        park(prefix, [number] * 40)
    prefix.pin([1] * 40)
    before = prefix.stats(), len(prefix.cache.parked()), pool.stats()
    with pytest.raises(BudgetError, match=r"2\.0 MiB is less than the 4\.0 MiB .* ask for at least 4194304 bytes"):
        pool.resize(PAGE_BYTES)
    assert (prefix.stats(), len(prefix.cache.parked()), pool.stats()) == before
    pool.resize(4194304)


def test_closing_the_cache_frees_what_is_pinned(pool):
    with KVCache(LAYOUT, pool, slots=4, max_tokens=128) as cache:
        prefix = PrefixCache(cache)
        prefix.release(begin(prefix, PROMPT[:64]))
        prefix.pin(PROMPT[:64])
    assert pool.stats().held_bytes == 0


def test_a_sequence_that_is_closed_leaves_what_it_inserted(prefix):
    begin(prefix, PROMPT[:40]).close()
    assert prefix.match(PROMPT) == 32


# what is counted, and what is refused


def test_stats_say_what_is_held_and_what_was_done(prefix):
    park(prefix, PROMPT[:40])
    begin(prefix, PROMPT[:50])
    prefix.attach(PROMPT[:33], method=AttachMethod.ALIAS)
    stats = prefix.stats()
    assert stats.attached == {"adopt": 1, "alias": 1, "compute": 1}
    assert all((stats.attach_us[method] > 0) == (count > 0) for method, count in stats.attached.items())
    assert (stats.hit_tokens, stats.missed_tokens) == (40 + 32, 40 + 10 + 1)
    assert (stats.num_tokens, stats.held_bytes, stats.inserted_pages) == (50, 3 * PAGE_BYTES, 3)
    assert stats.num_nodes >= 2


def test_matching_changes_nothing(prefix):
    park(prefix, PROMPT[:40])
    before = prefix.stats()
    assert prefix.match(PROMPT[:20]) == 19
    assert prefix.match([]) == 0
    assert prefix.stats() == before


def test_bad_input_is_refused_and_changes_nothing(prefix, cache):
    sequence = begin(prefix, PROMPT[:20])
    before = prefix.stats()
    with pytest.raises(ValueError, match="tokens: none; a prompt has at least 1"):
        prefix.attach([])
    with pytest.raises(ValueError, match="wanted integers in"):
        prefix.attach([-1, 2])
    with pytest.raises(SequenceTooLong, match="a prompt of 30 tokens is attached to a sequence of max_tokens=20"):
        prefix.attach(PROMPT[:30], max_tokens=20)
    with pytest.raises(ValueError, match=r"19 tokens: the sequence in slot 1 has 20, of which 20 were inserted before"):
        prefix.insert(sequence, PROMPT[:19])
    with pytest.raises(ValueError, match=r"21 tokens: the sequence in slot 1 has 20"):
        prefix.insert(sequence, PROMPT[:21])
    with pytest.raises(ValueError, match="has a prefix cache already"):
        PrefixCache(cache)
    assert prefix.stats() == before


@pytest.mark.parametrize("wrong", [0, 3, 19])
def test_other_tokens_than_before_are_refused(prefix, cache, wrong):
    sequence = begin(prefix, PROMPT[:20])
    write(sequence, 40)
    tokens = PROMPT[:40]
    tokens[wrong] = 300
    with pytest.raises(ValueError, match="slot 1: other tokens were inserted for its first 20 rows"):
        prefix.insert(sequence, tokens)
    cache.check()
    assert prefix.match(PROMPT) == 20
    prefix.insert(sequence, PROMPT[:40])


def test_a_sequence_that_did_not_come_from_attach_is_refused(prefix, cache):
    sequence = begin(prefix, PROMPT[:20])
    for stranger in (cache.open(), cache.fork(sequence)[0]):
        with pytest.raises(ValueError, match="has ended, or did not come from attach"):
            prefix.insert(stranger, [])
    prefix.park(sequence, PROMPT[:20])
    with pytest.raises(ValueError, match="has ended, or did not come"):
        prefix.park(sequence, PROMPT[:20])


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
    assert_reads(attached.sequence, 20)
    assert prefix.match(PROMPT) == 20
