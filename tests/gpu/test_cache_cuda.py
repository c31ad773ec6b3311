"""The cache's laws on a GPU: growth and reclaim around kernels that run, streams, graphs, tenants."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.unit.support import grown
from vmmkv import MIB, GraphCapture, KVCache, KVLayout, Pool
from vmmkv.driver.cuda import CudaDriver
from vmmkv.testing.fake_driver import FakeDriver

LAYOUT = KVLayout.uniform(layers=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)  # 16 tokens a page
LONG = 400_000_000
"""Cycles: about 0.2 s."""


@pytest.fixture
def make(gpu: torch.device) -> Iterator[Callable[..., KVCache]]:
    made: list[KVCache] = []

    def cache(*, budget_bytes: int = 256 * MIB, slots: int = 4, guard_tokens: int = 0) -> KVCache:
        pool = Pool(gpu, budget_bytes, driver=FakeDriver(over=CudaDriver(gpu), memory_bytes=2**50))
        made.append(KVCache(LAYOUT, pool, slots=slots, max_tokens=100_000, guard_tokens=guard_tokens))
        return made[-1]

    yield cache
    for one in made:
        one.check()
        one.close()
        one.pool.close()
        calls = one.pool.driver.calls
        assert calls["create"] == calls["release"] and calls["map"] == calls["unmap"]


def test_every_byte_comes_back_through_both_views(make: Callable[..., KVCache]) -> None:
    cache = make()
    sequences = [cache.open() for _ in range(3)]
    written = {}
    for step in range(4):
        for sequence in sequences:
            sequence.grow(sequence.length + 37)
            for layer in (0, 17, 31):
                keys = torch.randn(37, 8, 128, device=cache.device).bfloat16()
                sequence.k(layer)[sequence.length : sequence.length + 37] = keys
                cache.v(layer)[sequence.slot, sequence.length : sequence.length + 37] = -keys
                written[sequence.slot, layer, step] = keys
            sequence.advance(37)
            cache.check()
    for (slot, layer, step), keys in written.items():
        rows = slice(37 * step, 37 * step + 37)
        assert torch.equal(cache.k(layer)[slot, rows], keys)
        assert torch.equal(next(one for one in sequences if one.slot == slot).v(layer)[rows], -keys)


def test_growing_does_not_wait_for_a_kernel(make: Callable[..., KVCache]) -> None:
    cache = make()
    sequence = cache.open()
    sequence.grow(16)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    running = cache.pool.driver.fence()
    began = time.perf_counter()
    sequence.grow(200)
    waited = time.perf_counter() - began
    assert not running.done(), f"growing took {waited} s, as long as the kernel"
    sequence.k(3)[:200] = 1.0  # behind the kernel, and behind the zeroes
    running.wait()
    assert bool((sequence.k(3)[:200] == 1).all())


def test_nothing_is_unmapped_before_its_fence(make: Callable[..., KVCache]) -> None:
    cache = make()
    sequence = cache.open()
    sequence.grow(160)
    sequence.k(0)[:160] = 2.0
    sequence.k(0)[:160].sum().item()  # loads the kernel: loading waits for whatever runs
    torch.cuda._sleep(LONG)
    total = sequence.k(0)[:160].sum()  # reads when the sleep is over
    sequence.close()
    assert cache.map_ahead() == 0 and cache.stats().pending_reclaim_bytes == 10 * 2 * MIB
    assert float(total) == 160 * 8 * 128 * 2.0
    torch.cuda.synchronize()
    assert cache.map_ahead() == 10 and cache.stats().pending_reclaim_bytes == 0


def test_other_streams_are_waited_for_once_recorded(make: Callable[..., KVCache]) -> None:
    cache = make()
    side = torch.cuda.Stream()
    cache.record_stream(side)
    sequence = cache.open()
    sequence.grow(160)
    sequence.k(0)[:160].sum().item()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        total = sequence.k(0)[:160].sum()
    sequence.close()
    assert cache.map_ahead() == 0, "the side stream still reads"
    assert not side.query(), "the sleep is too short: the assertion above shows nothing"
    side.synchronize()
    assert float(total) == 0.0 and cache.map_ahead() == 10


def test_a_captured_graph_serves_every_length(make: Callable[..., KVCache]) -> None:
    cache = make()
    sequence = cache.open()
    sequence.grow(10)
    keys, values = cache.k(5), cache.v(5)
    position = torch.zeros(1, dtype=torch.int64, device=cache.device)
    row = torch.zeros(1, 8, 128, dtype=torch.bfloat16, device=cache.device)
    slot = torch.full((1,), sequence.slot, device=cache.device)

    def step() -> None:
        keys[slot, position] = row
        values[slot, position] = row + 1
        position.add_(1)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    position.zero_()
    for token in range(100):
        sequence.grow(token + 1)
        row.fill_(float(token))
        graph.replay()
        sequence.advance()
    assert sequence.k(5)[:100, 0, 0].tolist() == [float(token) for token in range(100)]
    assert torch.equal(sequence.v(5)[:100], sequence.k(5)[:100] + 1)


def test_device_limits_follow(make: Callable[..., KVCache]) -> None:
    cache = make(guard_tokens=20)
    sequence = cache.open(max_tokens=90)
    sequence.grow(30)
    assert cache.limit.tolist()[sequence.slot] == sequence.limit == 4 * 16 - 20
    sequence.grow(90)
    assert cache.limit.tolist()[sequence.slot] == 90
    slot = sequence.slot
    sequence.close()
    torch.cuda.synchronize()
    assert cache.limit.tolist()[slot] == 0


def control_stream(cache: KVCache) -> torch.cuda.Stream:
    """The driver's own stream, on which zeroes and limits travel."""
    stream = cache.pool.driver.over.control
    assert isinstance(stream, torch.cuda.Stream)
    return stream


def test_zeroes_and_limits_come_before_work_on_every_recorded_stream(make: Callable[..., KVCache]) -> None:
    cache = make()
    side = torch.cuda.Stream()
    cache.record_stream(side)
    sequence = cache.open()
    with torch.cuda.stream(control_stream(cache)):
        torch.cuda._sleep(LONG)  # the zeroes have to wait, and so must writes
    sequence.grow(160)
    with torch.cuda.stream(side):
        sequence.k(0)[:160] = 1.0
        seen = cache.limit.clone()
    sequence.k(1)[:160] = 2.0
    torch.cuda.synchronize()
    assert bool((sequence.k(0)[:160] == 1).all()) and bool((sequence.k(1)[:160] == 2).all())
    assert int(seen[sequence.slot]) == 160


def test_a_lowered_limit_is_seen_by_whatever_is_launched_next(make: Callable[..., KVCache]) -> None:
    cache = make()
    sequence = grown(cache, 160)
    with torch.cuda.stream(control_stream(cache)):
        torch.cuda._sleep(LONG)
    sequence.truncate(64)  # one handle
    seen = cache.limit.clone()
    assert int(seen[sequence.slot]) == 64


@pytest.mark.parametrize("end", ["close", "truncate", "close the cache"])
def test_a_lowered_limit_is_not_seen_by_what_was_launched_before(make: Callable[..., KVCache], end: str) -> None:
    cache = make()
    sequence = grown(cache, 100)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    seen = cache.limit[sequence.slot].clone()
    if end == "close":
        sequence.close()
    elif end == "truncate":
        sequence.truncate(10)
    else:
        cache.close()
    assert seen.item() >= 100


def test_a_sequence_opened_meanwhile_reads_its_own_truncated_rows_again(make: Callable[..., KVCache]) -> None:
    cache = make()
    sequence = cache.open()
    sequence.grow(160)
    sequence.k(0)[:160] = 5.0
    sequence.advance(160)
    torch.cuda._sleep(LONG)
    sequence.truncate(16)
    calls = cache.pool.driver.calls.copy()
    sequence.grow(160)  # revived: its pages had not been unmapped yet
    assert cache.pool.driver.calls["map"] == calls["map"]
    assert bool((sequence.k(0)[:160] == 5).all())


def test_resize_gives_memory_back_to_the_device_and_takes_it_again(make: Callable[..., KVCache]) -> None:
    cache = make(budget_bytes=1024 * MIB)
    sequence = cache.open()
    sequence.grow(8000)  # 1000 MiB
    sequence.close()
    cache.drain()
    before, _ = torch.cuda.mem_get_info()
    cache.pool.resize(64 * MIB)
    after, _ = torch.cuda.mem_get_info()
    assert after - before >= 900 * MIB
    cache.pool.resize(1024 * MIB)
    again = cache.open()
    again.grow(8000)
    again.k(0)[:8000] = 1.0
    assert bool((again.k(0)[:8000] == 1).all())


@pytest.mark.parametrize("flow", ["truncate", "adopt"])
def test_a_raise_of_a_limit_never_overtakes_the_one_before(make: Callable[..., KVCache], flow: str) -> None:
    cache = make()
    sequence = grown(cache, 384)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG // 4)  # step 1, under way
    parked = None
    if flow == "truncate":
        sequence.truncate(100)
    else:
        parked = sequence.park()
    lowered = torch.cuda.Event()
    lowered.record()
    torch.cuda._sleep(4 * LONG)  # step 2, launched before the slot is used again
    if parked is None:
        sequence.grow(200)
    else:
        sequence = cache.adopt(parked)
    lowered.synchronize()
    assert not torch.cuda.current_stream().query(), "step 2 is over already"
    sequence.grow(1000)
    torch.cuda.synchronize()
    assert int(cache.limit[sequence.slot]) == sequence.limit >= 1000


@pytest.mark.parametrize("call", ["grow", "map_ahead", "truncate", "park", "close"])
def test_a_capture_refuses_what_maps_or_reclaims_and_goes_on(make: Callable[..., KVCache], call: str) -> None:
    cache = make()
    sequence, other = grown(cache, 384), cache.open()
    torch.cuda.synchronize()
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device=cache.device)
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(GraphCapture):
            {
                "grow": lambda: sequence.grow(2000),
                "map_ahead": cache.map_ahead,
                "truncate": lambda: sequence.truncate(1),
                "park": sequence.park,
                "close": sequence.close,
            }[call]()
        sequence.grow(384)
        sequence.k(0)[:384].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [1.0] * 8
    assert (sequence.length, sequence.closed) == (384, False)
    cache.check()
    other.grow(1000)
    sequence.grow(1000)
    sequence.truncate(1)
    cache.drain()


def test_closed_caches_give_their_addresses_to_later_ones_of_the_same_size(gpu: torch.device) -> None:
    addresses = set()
    for _ in range(200):  # of 12 TiB
        with Pool(gpu, 4 * MIB) as pool, KVCache(LAYOUT, pool, slots=1000, max_tokens=100_000) as cache:
            addresses.add(cache.k(0).data_ptr())
    assert len(addresses) == 1
