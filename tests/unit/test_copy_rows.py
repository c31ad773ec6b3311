"""Rows of one sequence under another: what `KVCache.copy_rows` moves, what it leaves alone, and what it refuses."""

from collections.abc import Iterator

import pytest
import torch

from vmmkv import Closed, KVCache, KVLayout, Pool, RowsUnmapped, Sequence
from vmmkv.prefix import PrefixCache
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import PAGE_BYTES

# 128 KiB a row: 16 tokens a page.
LAYOUT = KVLayout.uniform(layers=4, kv_heads=8, head_dim=512, dtype=torch.float32)
PAGE_TOKENS = 16

# Two groups of 64 KiB a row, 32 tokens a page; layers 1 and 3 see the last 40 tokens.
WINDOWED = KVLayout.uniform(layers=4, kv_heads=8, head_dim=512, dtype=torch.float32, windows=[None, 40, None, 40])


@pytest.fixture
def pool(driver: FakeDriver) -> Iterator[Pool]:
    pool = Pool("cpu", 32 * PAGE_BYTES, driver=driver)
    yield pool
    pool.close()
    assert (driver.live_handles, driver.live_mappings) == (0, 0)


@pytest.fixture
def cache(pool: Pool) -> Iterator[KVCache]:
    with KVCache(LAYOUT, pool, slots=6, max_tokens=128) as cache:
        yield cache
        cache.check()


@pytest.fixture
def windowed(pool: Pool) -> Iterator[KVCache]:
    with KVCache(WINDOWED, pool, slots=3, max_tokens=256) as cache:
        yield cache
        cache.check()


def group_of(sequence: Sequence, layer: int) -> int:
    """Of the two layouts above."""
    return layer % len(sequence.cache.layout.groups)


def append(sequence: Sequence, num_tokens: int, mark: float) -> None:
    """More tokens, whose rows say whose they are and where they stand."""
    first = sequence.length
    sequence.grow(first + num_tokens)
    numbers = torch.arange(first, first + num_tokens, dtype=torch.float32).view(-1, 1, 1) + mark
    for layer in range(4):
        begin = first - sequence.start(group_of(sequence, layer))
        sequence.k(layer)[begin : begin + num_tokens] = numbers
        sequence.v(layer)[begin : begin + num_tokens] = -numbers
    sequence.advance(num_tokens)


def opened(cache: KVCache, num_tokens: int, mark: float, tenant: str | None = None) -> Sequence:
    sequence = cache.open(tenant=tenant)
    append(sequence, num_tokens, mark)
    return sequence


def rows(sequence: Sequence, layer: int = 0) -> list[float]:
    """What the rows that are kept say, of both planes."""
    start = sequence.start(group_of(sequence, layer))
    k, v = sequence.k(layer)[: sequence.length - start], sequence.v(layer)[: sequence.length - start]
    assert torch.equal(k, -v)
    assert (k == k[:, :1, :1]).all()
    return k[:, 0, 0].tolist()


def test_a_target_has_its_own_rows_then_the_sources(cache: KVCache) -> None:
    source, target = opened(cache, 50, 1000), opened(cache, 45, 2000)
    target.grow(50)
    cache.copy_rows([(source, target)], 20, 50)
    for layer in range(4):
        assert rows(target, layer) == [2000 + row for row in range(20)] + [1000 + row for row in range(20, 50)]
        assert rows(source, layer) == [1000 + row for row in range(50)]
    append(target, 1, 3000)
    assert rows(target)[-2:] == [1049, 3050]
    assert len(rows(source)) == 50


def test_a_source_has_as_many_targets_as_are_wanted_and_no_driver_is_called(cache: KVCache, driver: FakeDriver) -> None:
    sequences = [opened(cache, 40, 1000 * mark) for mark in range(5)]
    before = driver.calls.copy()
    cache.copy_rows([(sequences[0], sequences[1]), (sequences[2], sequences[3]), (sequences[0], sequences[4])], 33, 40)
    assert driver.calls == before
    for index, source in enumerate((0, 0, 2, 2, 0)):
        assert rows(sequences[index]) == [1000 * index + row for row in range(33)] + [
            1000 * source + row for row in range(33, 40)
        ]


def test_a_longer_target_is_cut(cache: KVCache) -> None:
    source, target = opened(cache, 20, 1000), opened(cache, 60, 2000)
    cache.copy_rows([(source, target)], 18, 19)
    assert rows(target) == [2000 + row for row in range(18)] + [1018]
    cache.check()


def test_no_rows_set_the_length_alone(cache: KVCache) -> None:
    source, target = opened(cache, 20, 1000), opened(cache, 20, 2000)
    cache.copy_rows([], 3, 5)
    cache.copy_rows([(source, target)], 7, 7)
    assert rows(target) == [2000 + row for row in range(7)]


def test_forks_take_each_others_rows_over(cache: KVCache) -> None:
    parent = opened(cache, 2 * PAGE_TOKENS + 5, 0)
    forks = cache.fork(parent, 2)
    beams = [parent, *forks]
    for turn in range(3):  # over a page's end
        for mark, beam in enumerate(beams):
            append(beam, 7, 1000 * (mark + 1))
        cache.check()
        prompt, end = 2 * PAGE_TOKENS + 5, parent.length
        cache.copy_rows([(beams[turn], beam) for beam in beams if beam is not beams[turn]], prompt, end)
        cache.check()
        assert rows(parent) == rows(forks[0]) == rows(forks[1])
        assert rows(parent)[:prompt] == [float(row) for row in range(prompt)]
        assert rows(parent)[end - 7 :] == [1000 * (turn + 1) + row for row in range(end - 7, end)]


def test_what_others_hold_is_not_written(cache: KVCache) -> None:
    parent = opened(cache, 3 * PAGE_TOKENS, 0)
    (fork,) = cache.fork(parent)
    other = opened(cache, 3 * PAGE_TOKENS, 1000)
    first, end = PAGE_TOKENS + 3, 3 * PAGE_TOKENS
    with pytest.raises(ValueError, match=rf"slot {fork.slot} shares a page .*truncate\({first}\) and grow\({end}\)"):
        cache.copy_rows([(other, fork)], first, end)
    assert rows(fork) == rows(parent)
    fork.truncate(first)  # as it says
    fork.grow(end)
    cache.copy_rows([(other, fork)], first, end)
    assert rows(fork) == rows(parent)[:first] + rows(other)[first:]
    assert rows(parent) == [float(row) for row in range(end)]


def test_the_prefix_cache_forgets_what_is_written_over(cache: KVCache) -> None:
    prefix = PrefixCache(cache)
    tokens = list(range(10))
    target = prefix.attach(tokens).sequence
    append(target, 10, 0)
    prefix.insert(target, tokens)
    source = opened(cache, 10, 1000)
    cache.copy_rows([(source, target)], 6, 10)
    cache.check()
    assert prefix.match([*tokens, 99]) == 6
    copied = prefix.attach([*tokens, 99])
    assert rows(copied.sequence) == [float(row) for row in range(6)]


def test_rows_that_a_window_has_passed_are_not_there(windowed: KVCache) -> None:
    source, target = opened(windowed, 100, 1000), opened(windowed, 100, 2000)
    for sequence in (source, target):
        sequence.advance_start(1)
    assert source.start(1) == 61
    windowed.drain()  # and what they were in is unmapped
    windowed.copy_rows([(source, target)], 20, 100)
    assert rows(target, 0) == [2000 + row for row in range(20)] + [1000 + row for row in range(20, 100)]
    assert rows(target, 1) == [1000 + row for row in range(61, 100)]
    append(target, 30, 3000)
    target.advance_start(1)
    windowed.check()


def test_a_target_loses_the_rows_that_its_source_has_lost(windowed: KVCache) -> None:
    source, target = opened(windowed, 200, 1000), opened(windowed, 20, 2000)
    source.advance_start(1)
    target.grow(200)
    windowed.copy_rows([(source, target)], 20, 200)
    windowed.check()
    assert target.start(1) == source.start(1) == 161
    assert rows(target, 1) == [1000 + row for row in range(161, 200)]
    assert rows(target, 2) == [2000 + row for row in range(20)] + [1000 + row for row in range(20, 200)]
    before = windowed.stats().mapped_bytes
    append(target, 1, 3000)
    target.advance_start(1)
    assert windowed.stats().mapped_bytes < before, "what the window has passed goes with its next advance"


def test_windows_that_have_passed_too_far_are_refused(windowed: KVCache) -> None:
    source, target = opened(windowed, 200, 1000), opened(windowed, 120, 2000)
    source.advance_start(1)
    with pytest.raises(RowsUnmapped, match="the window of group 1 begins at row 81"):
        windowed.copy_rows([(source, target)], 100, 120)
    target.advance_start(1)
    with pytest.raises(RowsUnmapped, match="are gone"):
        windowed.copy_rows([(opened(windowed, 100, 0), target)], 50, 100)


def test_what_cannot_be_is_refused_and_nothing_is_copied(cache: KVCache) -> None:
    source, target, red = opened(cache, 20, 1000), opened(cache, 10, 2000), opened(cache, 20, 3000, "red")
    full = opened(cache, 20, 4000)
    for pairs, first, end, error, match in (
        ([(source, target)], 5, PAGE_TOKENS + 1, RowsUnmapped, r"grow\(17\) first"),
        ([(source, full), (target, red)], 5, 10, ValueError, "two tenants"),
        ([(source, full), (target, full)], 5, 10, ValueError, "twice"),
        ([(source, full), (full, target)], 5, 10, ValueError, "target and source"),
        ([(source, source)], 5, 10, ValueError, "target and source"),
        ([(source, target)], 11, 12, ValueError, f"slot {target.slot} has 10 and must have 11"),
        ([(target, full)], 5, 11, ValueError, f"slot {target.slot} has 10 tokens and must have 11"),
        ([(source, target)], 6, 5, ValueError, "end no earlier"),
        ([(source, target)], -1, 5, ValueError, "at 0 at least"),
    ):
        with pytest.raises(error, match=match):
            cache.copy_rows(pairs, first, end)
    with pytest.raises(TypeError):
        cache.copy_rows([(source, target)], 1.5, 5)  # type: ignore[arg-type]
    assert rows(full) == [4000 + row for row in range(20)]
    assert rows(target) == [2000 + row for row in range(10)]
    target.close()
    with pytest.raises(Closed, match="no running sequence"):
        cache.copy_rows([(source, target)], 5, 10)
