"""Rows that leave the device for host memory and come back as they were, at whichever call the driver fails."""

import copy
import itertools
from typing import Any, cast

import pytest
import torch
from transformers import DynamicCache

from tests.adapters.models import forward, gemma3, ids_of, states_of, wide_llama
from vmmkv import MIB, BudgetError, DriverError, OutOfPages, Pool, saved
from vmmkv.adapters.transformers import VmmCache
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import PAGE_BYTES

MODELS = pytest.mark.parametrize("make", [wide_llama, lambda: gemma3(16)], ids=["full", "hybrid"])


@MODELS
def test_offloaded_rows_come_back_to_their_addresses_and_share_what_they_shared(
    pool: Pool, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "CHUNK_BYTES", 3 * MIB)
    model = make()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, 0, 1, 1, num_tokens=600), logits_to_keep=1)  # two prompts, in large extents
        for seed in range(3):
            forward(model, cache, ids_of(0, 1, 2, 3, num_tokens=20, seed=seed))
        addresses, before, used_bytes = [each.data_ptr() for each in states_of(cache)], states_of(cache), pool.used_bytes
        before = [each.clone() for each in before]
        cache.offload()
        cache.offload()
        for rows in cache.batch.groups:
            rows.cache.map_ahead(lookahead_tokens=700)  # for nothing: what is on the host needs no memory
        assert pool.used_bytes == 0 and cache.get_seq_length() == 660
        assert repr(cache) == "<VmmCache on the host, offloaded: a batch of 4 with 660 tokens each>"
        cache.check()
        cache.restore()
        cache.restore()
        assert pool.used_bytes == used_bytes
        assert [each.data_ptr() for each in states_of(cache)] == addresses
        assert all(map(torch.equal, states_of(cache), before))
        cache.check()


def test_caches_of_one_pool_take_turns_and_a_pass_restores_what_it_needs(pool: Pool) -> None:
    model, driver = wide_llama(), pool.driver
    ids, more = ids_of(0, 1, num_tokens=40), ids_of(0, 1, num_tokens=1, seed=1)
    own = DynamicCache(config=model.config)
    forward(model, own, ids)
    with Pool("cpu", 6 * PAGE_BYTES, driver=driver) as small:
        caches = [VmmCache(model.config, small) for _ in range(3)]
        for cache in caches:
            forward(model, cache, ids)
            cache.offload()
        first, second, third = caches
        logits = forward(model, own, more)
        assert torch.allclose(forward(model, first, more), logits, atol=1e-5)
        with pytest.raises(
            OutOfPages, match=r"2 rows cannot come back from host memory: 4 pages .*, 0 are free and 2 can be evicted"
        ):
            forward(model, second, more)
        assert small.used_bytes == 4 * PAGE_BYTES and second.get_seq_length() == 40
        first.offload()
        for cache in (second, third):
            assert torch.allclose(forward(model, cache, more), logits, atol=1e-5)
            cache.offload()
        for cache in caches:
            cache.check()
            cache.close()


@MODELS
def test_what_reads_or_ends_rows_needs_no_restore_beforehand(pool: Pool, make: Any) -> None:
    model, ids, more = make(), ids_of(0, 1, num_tokens=20), ids_of(0, 1, num_tokens=2, seed=1)
    own = DynamicCache(config=model.config)
    with VmmCache(model.config, pool) as cache:
        for each in (cache, own):
            each.activate_past_recording()
            forward(model, each, ids)
        cache.offload()
        with copy.deepcopy(cache) as other:
            for each in (cache, other):
                each.offload()
            assert pool.used_bytes == 0
            for each in (cache, other, own):
                each.crop(-10)
            logits = forward(model, own, more)
            for each in (cache, other):
                assert torch.allclose(forward(model, each, more), logits, atol=1e-4)
            other.offload()
        cache.offload()
        cache.reset()
        cache.offload()
        forward(model, cache, ids_of(0, num_tokens=5))
        cache.offload()


@MODELS
def test_at_whichever_driver_call_it_fails_all_is_as_it_was(pool: Pool, make: Any) -> None:
    model, driver = make(), cast(FakeDriver, pool.driver)
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, 0, 1, num_tokens=40))
        forward(model, cache, ids_of(0, 1, 2, num_tokens=1))
        before, used_bytes = [each.clone() for each in states_of(cache)], pool.used_bytes
        for act, undo, least in ((cache.offload, cache.restore, 5), (cache.restore, cache.offload, 20)):
            for number in itertools.count():
                at_first, failing = pool.used_bytes, driver.num_calls + number
                driver.fail_at = {failing}
                try:
                    act()
                except DriverError:
                    driver.fail_at = set()
                    assert pool.used_bytes == at_first, f"call {number} failed"
                    cache.check()
                    act()
                driver.fail_at = set()
                if driver.num_calls <= failing:  # else a fence was made again, if nothing has failed
                    break
                undo()
            assert number > least
        assert pool.used_bytes == used_bytes
        assert all(map(torch.equal, states_of(cache), before))
        assert forward(model, cache, ids_of(0, 1, 2, num_tokens=1)).isfinite().all()
        cache.check()


def test_without_host_memory_or_in_an_unfinished_pass_nothing_leaves(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_llama()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, 1, num_tokens=40))
        used_bytes = pool.used_bytes
        monkeypatch.setattr("vmmkv.driver.pinned.HEADROOM_BYTES", 2**60)
        with pytest.raises(BudgetError, match="of host memory for cpu cannot be had: this process, in its control group"):
            cache.offload()
        cache.update(torch.zeros(2, 4, 1, 512), torch.zeros(2, 4, 1, 512), 0)
        with pytest.raises(RuntimeError, match=r"crop\(0\)"):
            cache.offload()
        cache.crop(0)
        assert pool.used_bytes == used_bytes
        cache.check()
