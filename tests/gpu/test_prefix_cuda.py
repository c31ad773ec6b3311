"""Prefix sharing on a GPU: aliases and copies around kernels that run, and the laws under random use."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from tests.gpu.conftest import WALK
from tests.gpu.test_cache_machine_cuda import OverCuda
from tests.laws.test_prefix_machine import PrefixMachine
from vmmkv import GIB, AttachMethod, KVCache, KVLayout, Pool, PrefixCache, Sequence
from vmmkv.driver.cuda import CudaDriver
from vmmkv.testing.fake_driver import FakeDriver

LAYOUT = KVLayout.uniform(layers=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)  # 16 tokens a page
LONG = 400_000_000
"""Cycles: about 0.2 s."""
PROMPT = list(range(1000))
LAYER = 5


@pytest.fixture
def cache(gpu: torch.device) -> Iterator[KVCache]:
    pool = Pool(gpu, 2 * GIB, driver=FakeDriver(over=CudaDriver(gpu), memory_bytes=2**50))
    made = KVCache(LAYOUT, pool, slots=8, max_tokens=4096)
    yield made
    made.close()
    assert pool.held_bytes == 0
    pool.close()


def write(sequence: Sequence, start: int, end: int) -> None:
    numbers = torch.arange(start, end, device="cuda", dtype=torch.bfloat16)[:, None, None]
    sequence.k(LAYER)[start:end] = numbers
    sequence.v(LAYER)[start:end] = -numbers


def assert_reads(sequence: Sequence, end: int) -> None:
    numbers = torch.arange(end, device="cuda", dtype=torch.bfloat16)[:, None, None]
    assert (sequence.k(LAYER)[:end] == numbers).all()
    assert (sequence.v(LAYER)[:end] == -numbers).all()


def computed(cache: KVCache, prefix: PrefixCache) -> Sequence:
    sequence = prefix.attach(PROMPT).sequence
    sequence.grow(1000)
    write(sequence, 0, 1000)
    sequence.advance(1000)
    prefix.insert(sequence, PROMPT)
    return sequence


def test_a_fork_sees_what_is_still_being_written(cache: KVCache) -> None:
    parent = cache.open()
    parent.grow(1000)
    write(parent, 0, 1000)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    write(parent, 0, 1000)
    parent.advance(1000)
    (child,) = cache.fork(parent)
    assert not torch.cuda.current_stream().query()
    assert_reads(child, 1000)
    child.grow(1010)
    write(child, 1000, 1010)
    child.advance(10)
    parent.close()
    cache.drain()
    assert_reads(child, 1010)
    cache.check()


def test_rows_that_no_slot_has_are_read_through_a_window(cache: KVCache) -> None:
    prefix = PrefixCache(cache)
    prefix.release(computed(cache, prefix), PROMPT)
    cache.drain()
    torch.cuda._sleep(LONG)
    attached = prefix.attach([*PROMPT[:777], 5, 6])
    assert attached.num_tokens == 777
    assert_reads(attached.sequence, 777)
    cache.drain()
    cache.check()


def test_a_truncated_fork_writes_to_pages_of_its_own(cache: KVCache) -> None:
    parent = cache.open()
    parent.grow(1000)
    write(parent, 0, 1000)
    parent.advance(1000)
    (child,) = cache.fork(parent)
    torch.cuda._sleep(LONG)
    total = parent.k(LAYER)[:1000].float().sum()
    child.truncate(500)
    child.grow(600)
    child.k(LAYER)[500:600] = 7.0
    child.advance(100)
    assert float(total) == float(torch.arange(1000, dtype=torch.bfloat16).float().sum()) * 8 * 128
    assert_reads(parent, 1000)
    assert_reads(child, 500)
    cache.check()


def test_sharers_decode_what_one_would(cache: KVCache) -> None:
    from vmmkv_kernels.attention.decode import decode

    prefix = PrefixCache(cache)
    first = computed(cache, prefix)
    others: list[Sequence] = [prefix.attach([*PROMPT, own], method=AttachMethod.ALIAS).sequence for own in range(4)]
    sequences = [first, *others]
    slots_B = torch.tensor([sequence.slot for sequence in sequences], device="cuda", dtype=torch.int32)
    lengths_B = torch.full((5,), 1000, device="cuda", dtype=torch.int32)
    q_BHD = torch.randn(1, 32, 128, device="cuda").bfloat16().expand(5, 32, 128).contiguous()
    out = decode(q_BHD, cache.k(LAYER), cache.v(LAYER), lengths_B, slots_B, limit_S=cache.limit)
    assert (out == out[0]).all()


class CudaPrefixMachine(OverCuda, PrefixMachine):
    """See OverCuda."""


TestPrefixesOnCuda: Callable[..., object] = CudaPrefixMachine.TestCase
TestPrefixesOnCuda.settings = settings(WALK, max_examples=20)  # type: ignore[attr-defined]
