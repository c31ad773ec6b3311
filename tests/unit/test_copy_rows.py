"""`KVCache.copy_rows` by example, and what it refuses; tests/laws/test_prefix_machine.py proves whose rows a target has."""

import pytest
import torch

from tests.unit.support import WINDOWED, Calls
from vmmkv import Closed, KVCache, Pool, RowsUnmapped
from vmmkv.units import PAGE_BYTES

PAGE_TOKENS = 32


@pytest.fixture
def cache(driver):
    pool = Pool("cpu", 64 * PAGE_BYTES, driver=driver)
    with pool, KVCache(WINDOWED, pool, slots=6, max_tokens=256) as cache:
        yield cache
        cache.check()


def append(sequence, num_tokens, mark):
    """More tokens, whose rows say whose they are and where they stand."""
    first = sequence.length
    sequence.grow(first + num_tokens)
    for layer in range(4):
        begin = first - sequence.start(layer % 2)
        numbers = torch.arange(first, first + num_tokens, dtype=torch.float32).view(-1, 1, 1) + mark
        sequence.k(layer)[begin : begin + num_tokens] = numbers
        sequence.v(layer)[begin : begin + num_tokens] = -numbers
    sequence.advance(num_tokens)


def opened(cache, num_tokens, mark, tenant=None):
    sequence = cache.open(tenant=tenant)
    append(sequence, num_tokens, mark)
    return sequence


def rows(sequence, layer=0):
    """What the rows that are kept say, of both planes."""
    num_rows = sequence.length - sequence.start(layer % 2)
    k, v = sequence.k(layer)[:num_rows], sequence.v(layer)[:num_rows]
    assert torch.equal(k, -v)
    assert (k == k[:, :1, :1]).all()
    return k[:, 0, 0].tolist()


def marked(mark, first, end):
    return [float(mark + row) for row in range(first, end)]


def test_forks_take_each_others_rows_over_without_a_driver_call(cache, driver):
    prompt = 2 * PAGE_TOKENS - 7
    parent = opened(cache, prompt, 0)
    beams = [parent, *cache.fork(parent, 2)]
    for turn in range(3):  # over a page's end
        for mark, beam in enumerate(beams):
            append(beam, 7, 1000 * (mark + 1))
        end, calls = parent.length, Calls(driver)
        cache.copy_rows([(beams[turn], beam) for beam in beams if beam is not beams[turn]], prompt, end)
        assert calls.made() == {}
        cache.check()
        assert rows(beams[0]) == rows(beams[1]) == rows(beams[2])
        assert rows(parent)[:prompt] == marked(0, 0, prompt)
        assert rows(parent)[end - 7 :] == marked(1000 * (turn + 1), end - 7, end)
    cache.copy_rows([], 3, 5)


def test_what_cannot_be_is_refused_and_nothing_is_copied(cache):
    source, target, red = opened(cache, 20, 1000), opened(cache, 10, 2000), opened(cache, 20, 3000, "red")
    full = opened(cache, 2 * PAGE_TOKENS, 4000)
    (fork,) = cache.fork(full)
    passed = opened(cache, 200, 5000)
    passed.advance_start(1)
    for pairs, first, end, error, match in (
        ([(full, target)], 5, PAGE_TOKENS + 1, RowsUnmapped, r"grow\(33\) first"),
        ([(passed, source)], 5, 20, RowsUnmapped, "the window of group 1 begins at row 0, and rows before 161 are gone"),
        ([(target, source), (target, red)], 5, 10, ValueError, "two tenants"),
        ([(source, full), (target, full)], 5, 10, ValueError, "twice"),
        ([(source, full), (full, target)], 5, 10, ValueError, "target and source"),
        ([(source, source)], 5, 10, ValueError, "target and source"),
        ([(source, target)], 11, 12, ValueError, f"slot {target.slot} has 10 and must have 11"),
        ([(target, source)], 5, 11, ValueError, f"slot {target.slot} has 10 tokens and must have 11"),
        ([(source, target)], 6, 5, ValueError, "end no earlier"),
        ([(source, target)], -1, 5, ValueError, "at 0 at least"),
        ([(source, target)], 1.5, 5, TypeError, "first=1.5"),
        ([(full, fork)], 35, 64, ValueError, rf"slot {fork.slot} shares a page .*truncate\(35\) and grow\(64\)"),
    ):
        with pytest.raises(error, match=match):
            cache.copy_rows(pairs, first, end)
    assert rows(full) == rows(fork) == marked(4000, 0, 64)
    assert rows(target) == marked(2000, 0, 10)
    fork.truncate(35)  # as it says
    fork.grow(64)
    cache.copy_rows([(full, fork)], 35, 64)
    target.close()
    with pytest.raises(Closed, match="no running sequence"):
        cache.copy_rows([(source, target)], 5, 10)
