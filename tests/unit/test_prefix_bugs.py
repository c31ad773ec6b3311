"""What went wrong once with shared prefixes: evicting under copies, memory that nobody could get back, what others lost."""

from collections.abc import Iterator

import pytest
import torch

from tests.engine.conftest import Harness, prompt_of, tiny_model
from vmmkv import KVCache, KVLayout, OutOfPages, Pool, Sequence
from vmmkv.prefix import AttachMethod, PrefixCache
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import PAGE_BYTES

# 128 KiB a row: 16 tokens a page.
LAYOUT = KVLayout.uniform(layers=4, kv_heads=8, head_dim=512, dtype=torch.float32)
WINDOWED = KVLayout.uniform(layers=4, kv_heads=8, head_dim=512, dtype=torch.float32, windows=[20] * 4)
PROMPT = list(range(129))  # 8 pages and a token


@pytest.fixture
def pool(driver: FakeDriver) -> Iterator[Pool]:
    pool = Pool("cpu", 80 * PAGE_BYTES, driver=driver)
    yield pool
    pool.close()
    assert (driver.live_handles, driver.live_mappings) == (0, 0)


def prefix_over(pool: Pool, layout: KVLayout = LAYOUT) -> PrefixCache:
    return PrefixCache(KVCache(layout, pool, slots=6, max_tokens=1024))


def compute(prefix: PrefixCache, tokens: list[int], method: AttachMethod | None = None, *, in_pages: bool = False) -> Sequence:
    """A sequence that has all of a prompt; with `in_pages` there is no large extent."""
    sequence = prefix.attach(tokens, method=method).sequence
    while sequence.length < len(tokens):
        count = 1 if in_pages else len(tokens) - sequence.length
        sequence.grow(sequence.length + count)
        sequence.advance(count)
    return sequence


def test_what_a_parked_slot_has_for_itself_can_be_had_while_others_run_from_its_prefix(driver: FakeDriver) -> None:
    pool = Pool("cpu", 20 * PAGE_BYTES, driver=driver)
    prefix = prefix_over(pool)
    twins = [compute(prefix, PROMPT, AttachMethod.COMPUTE) for _ in range(2)]
    for twin in twins:
        prefix.park(twin, PROMPT)
    sequence = prefix.attach([*PROMPT, 7], method=AttachMethod.ALIAS).sequence
    assert (sequence.length, pool.spare_pages) == (129, 1)
    sequence.grow(16 * 12)  # 3 pages more; the second of the twins has 9 that nobody shares
    prefix.cache.check()
    pool.close()


def test_what_is_held_only_to_be_read_gives_way_to_computing_it_again(driver: FakeDriver) -> None:
    pool = Pool("cpu", 9 * PAGE_BYTES, driver=driver)
    prefix = prefix_over(pool)
    prefix.park(compute(prefix, PROMPT), PROMPT)
    assert pool.spare_pages == 0
    prompt = [*PROMPT[:100], 7, 7, 7]
    attached = prefix.attach(prompt, method=AttachMethod.ALIAS)  # there is no page for the 4 rows behind the aliased ones
    assert (attached.method, attached.num_tokens) == (AttachMethod.COMPUTE, 0)
    attached.sequence.grow(len(prompt))
    prefix.cache.check()
    pool.close()


@pytest.mark.parametrize("last", [0, 1])
def test_a_window_that_can_neither_be_opened_nor_undone_is_unmapped_later(
    pool: Pool, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    prefix = prefix_over(pool)
    prefix.release(compute(prefix, PROMPT), PROMPT)
    (extent, *_) = prefix._index.holders()
    target = torch.empty(8, dtype=torch.uint8)
    driver.fail_at = {driver.num_calls + 1, driver.num_calls + 1 + last}  # the access call, and the unmap
    with pytest.raises(Exception, match="told to fail"):
        prefix._attacher._windows.copy(extent, 0, target.numel(), target.data_ptr())
    driver.fail_at = set()
    prefix.cache.check()
    prefix.cache.drain()
    prefix.cache.check()


def test_what_is_held_is_counted_without_a_walk(pool: Pool) -> None:
    prefix = prefix_over(pool)
    prefix.release(compute(prefix, PROMPT), PROMPT)
    assert prefix.stats().held_bytes == 8 * PAGE_BYTES
    prefix.evict()
    assert prefix.stats().held_bytes == 0
    prefix.cache.check()


def test_who_finds_no_room_does_not_try_again_in_every_step() -> None:
    one = Harness(tiny_model(), share=True, budget_pages=3, step_tokens=4096)
    assert one.prefix is not None
    one.ask("large", prompt_of(4000), 40)
    one.ask("waits", prompt_of(3000, 5), 2)
    one.run()
    assert not one.failures()
    assert sum(one.prefix.stats().attached.values()) <= 4  # each once, and once or twice in vain
    one.close()


def test_what_a_window_has_passed_can_be_had_while_its_sequence_runs(driver: FakeDriver) -> None:
    pool = Pool("cpu", 10 * PAGE_BYTES, driver=driver)
    prefix = prefix_over(pool, WINDOWED)
    sequence = compute(prefix, PROMPT)
    prefix.insert(sequence, PROMPT)
    sequence.advance_start(0)  # of 9 pages it needs 3
    assert (pool.spare_pages, pool.kept_pages) == (1, 6)
    prefix.cache.open().grow(16 * 7)
    prefix.cache.check()
    assert (pool.spare_pages, pool.kept_pages) == (0, 0)
    assert prefix.match([*PROMPT, 7]) == 129, "whoever goes on from its end needs its last window only"
    assert prefix.match([*PROMPT[:64], 7]) == 0
    prefix.release(sequence, PROMPT)
    assert prefix.match([*PROMPT, 7]) == 128
    prefix.cache.check()
    pool.close()


def test_what_a_window_has_passed_stays_while_another_reads_it_or_wants_it_kept(driver: FakeDriver) -> None:
    pool = Pool("cpu", 12 * PAGE_BYTES, driver=driver)
    prefix = prefix_over(pool, WINDOWED)
    sequence = compute(prefix, PROMPT)
    prefix.insert(sequence, PROMPT)
    behind = prefix.attach([*PROMPT[:64], 7], method=AttachMethod.ALIAS).sequence  # pages 2 and 3
    sequence.advance_start(0)
    prefix.pin(PROMPT[:32])  # pages 0 and 1
    assert pool.spare_pages == 3
    other = prefix.cache.open()
    with pytest.raises(OutOfPages):
        other.grow(16 * 6)
    other.grow(16 * 5)
    prefix.cache.check()
    assert (prefix.match([*PROMPT[:32], 7]), prefix.match([*PROMPT[:64], 7])) == (32, 64)
    prefix.unpin(PROMPT[:32])
    behind.close()
    other.grow(16 * 9)
    prefix.cache.check()
    pool.close()


def test_of_what_windows_have_passed_the_least_recently_used_goes_first(driver: FakeDriver) -> None:
    pool = Pool("cpu", 30 * PAGE_BYTES, driver=driver)
    prefix = prefix_over(pool, WINDOWED)
    template = PROMPT[:64]
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
    prefix.cache.check()
    pool.close()
