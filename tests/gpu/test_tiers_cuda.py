"""Tiers on a GPU: copies beside kernels that run, in both directions, and the laws under random use."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.gpu.conftest import WALK
from tests.gpu.test_cache_machine_cuda import OverCuda
from tests.gpu.test_prefix_cuda import LONG, PROMPT, assert_reads, cache, computed
from tests.laws.test_tier_machine import TierMachine
from vmmkv import MIB, DiskTier, HostTier, KeyChain, KVCache, PrefixCache, Store, Tier
from vmmkv.saved import Offloaded

__all__ = ["cache"]


@pytest.fixture(params=["host", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made = HostTier(256 * MIB) if request.param == "host" else DiskTier(tmp_path / "kv", 256 * MIB)
    yield made
    made.close()


def test_what_is_evicted_comes_back(cache: KVCache, tier: Tier) -> None:
    prefix = PrefixCache(cache, [tier], fingerprint="model")
    prefix.release(computed(cache, prefix), PROMPT)
    assert prefix.flush(30)
    prefix.evict()
    cache.drain()
    junk = cache.open(tenant="other")  # what was given back is written by another
    junk.grow(4000)
    junk.k(5)[:4000] = 7.0
    junk.close()
    cache.drain()
    fetch = prefix.fetch(PROMPT)
    assert fetch is not None and fetch.num_tokens == 992
    assert prefix.flush(30) and fetch.done
    attached = prefix.attach(PROMPT)
    assert attached.num_tokens == 992
    assert_reads(attached.sequence, 992)
    cache.check()


def test_blocks_of_an_engine_are_stored_as_they_are_when_their_kernels_have_ended(tier: Tier) -> None:
    written, got = (torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    (key,) = KeyChain("model", every=16).of(range(16)).keys()
    with Store([tier], "cuda") as store:
        torch.cuda._sleep(LONG)
        written.fill_(7)
        put = store.put(key, [(written.data_ptr(), MIB), (written[MIB:].data_ptr(), MIB)])
        store.poll()
        assert not torch.cuda.current_stream().query() and not put.done, "a put waited for the kernel, or not for its rows"
        assert store.flush(30) and put.done
        written.zero_()
        get = store.get(key, [(got.data_ptr(), 2 * MIB)])
        assert store.flush(30) and get.found and bool((got == 7).all())


def test_stores_and_loads_wait_for_no_kernel_and_hold_up_none(cache: KVCache) -> None:
    tier = HostTier(256 * MIB)
    prefix = PrefixCache(cache, [tier], fingerprint="model")
    prefix.release(computed(cache, prefix), PROMPT)
    assert prefix.flush(30)
    prefix.evict()
    cache.drain()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    fetch = prefix.fetch(PROMPT)
    assert fetch is not None
    while not fetch.done:
        prefix.poll()
    assert not torch.cuda.current_stream().query(), "a load waited for the kernel"
    attached = prefix.attach(PROMPT)
    assert_reads(attached.sequence, 992)
    cache.close()
    tier.close()


def test_pinned_memory_is_given_back_to_the_machine(gpu: torch.device) -> None:
    def shared_kib() -> int:
        """Pinned memory is in it: no file, and all of it there."""
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem"))
        return int(line.split()[1])

    before = shared_kib()
    for _ in range(3):
        tier = HostTier(256 * MIB)
        tier.open(gpu)
        assert shared_kib() - before > 192 << 10  # Linux counts pages for each CPU, and adds that up now and then
        tier.close()
        assert shared_kib() - before < 64 << 10


def test_a_saved_sequence_is_restored(cache: KVCache, tmp_path: Path) -> None:
    prefix = PrefixCache(cache)
    computed(cache, prefix).save(tmp_path / "one")
    assert_reads(cache.restore(tmp_path / "one"), 1000)
    cache.check()


def test_offloaded_sequences_come_back_to_their_addresses(cache: KVCache) -> None:
    sequence = computed(cache, PrefixCache(cache))
    sequences = [sequence, *cache.fork(sequence, 2)]
    address, used_bytes = sequence.k(5).data_ptr(), cache.pool.used_bytes
    torch.cuda._sleep(LONG)
    offloaded = Offloaded([[sequence.live for sequence in sequences]])
    offloaded.release()
    cache.drain()
    junk = cache.open(tenant="other")
    junk.grow(4000)
    junk.k(5)[:4000] = 7.0
    junk.close()
    offloaded.restore()
    assert (sequence.k(5).data_ptr(), cache.pool.used_bytes) == (address, used_bytes)
    for each in sequences:
        assert_reads(each, 1000)
    cache.check()


class CudaTierMachine(OverCuda, TierMachine):
    """See OverCuda."""


TestTiersOnCuda: Callable[..., object] = CudaTierMachine.TestCase
TestTiersOnCuda.settings = settings(WALK, max_examples=10)  # type: ignore[attr-defined]
