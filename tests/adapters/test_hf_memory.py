"""What is mapped, shared, copied and given back under a VmmCache."""

import copy
import re
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.adapters.hf_models import gemma3, generated, llama, mistral, prompts, wide_llama
from vmmkv import MIB, OutOfPages, Pool, RowsUnmapped
from vmmkv.adapters.transformers import VmmCache
from vmmkv.adapters.transformers.batch import BatchRows
from vmmkv.units import PAGE_BYTES

PAGE_TOKENS = 32
"""Of `wide_llama`."""


def forward(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits of one pass, with no mask."""
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, past_key_values=cache).logits
    return logits


def ids_of(*rows: int, num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Random prompts of one length; equal numbers are equal prompts."""
    generator = torch.Generator().manual_seed(seed)
    each = torch.randint(1, 199, (max(rows) + 1, num_tokens), generator=generator)
    return each[list(rows)]


def pages(pool: Pool) -> int:
    return pool.held_bytes // PAGE_BYTES


def test_rows_are_appended_in_place_and_seen_as_views(pool: Pool) -> None:
    model = llama()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, 1, num_tokens=5))
        before = cache.layers[3].keys
        assert before is not None and before.shape == (2, 2, 5, 32)
        kept = before.clone()
        forward(model, cache, ids_of(0, 1, num_tokens=1))
        after = cache.layers[3].keys
        assert after is not None and after.shape == (2, 2, 6, 32)
        assert after.data_ptr() == before.data_ptr() and torch.equal(after[:, :, :5], kept)
        assert len({layer.keys.untyped_storage().data_ptr() for layer in cache.layers}) == 1


def test_memory_is_that_of_the_tokens_and_a_page(pool: Pool) -> None:
    model = wide_llama()
    with VmmCache(model.config, pool, max_tokens=2**20) as cache:
        for length in (PAGE_TOKENS, 1, 30, 1, 1):
            forward(model, cache, ids_of(0, 1, num_tokens=length))
            assert pages(pool) == 2 * -(-cache.get_seq_length() // PAGE_TOKENS)


def test_memory_is_mapped_in_the_first_layer_of_a_pass_alone(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gemma3(16)
    grown: list[int] = []
    grow = BatchRows.grow
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, num_tokens=5))
        monkeypatch.setattr(
            BatchRows, "grow", lambda self, tokens: (grown.append(len(cache._batch.written)), grow(self, tokens))[1]
        )
        forward(model, cache, ids_of(0, num_tokens=1))
    assert grown == [0, 0]  # each group once, before any layer is written


def test_equal_prompts_side_by_side_are_kept_once(pool: Pool) -> None:
    model = wide_llama()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, 0, 0, 1, 2, 2, num_tokens=2 * PAGE_TOKENS + 5))
        assert pages(pool) == 3 * 3
        assert cache.batch_size == 6 and cache.layers[0].keys.shape[0] == 6
        forward(model, cache, ids_of(0, 1, 2, 3, 4, 5, num_tokens=1))
        cache.check()
        cache.pool.acquire(0)
        for rows in cache._batch.groups:
            rows.cache.drain()
        assert pages(pool) == 3 * 2 + 6  # the full pages shared, the last one each row's own


def test_prompts_in_chunks_stay_one_until_they_differ(pool: Pool) -> None:
    model = wide_llama()
    with VmmCache(model.config, pool) as cache:
        for seed in range(3):
            forward(model, cache, ids_of(0, 0, num_tokens=PAGE_TOKENS, seed=seed))
        assert pages(pool) == 3
        forward(model, cache, ids_of(0, 1, num_tokens=PAGE_TOKENS))
        assert pages(pool) == 3 + 2
        cache.check()


def test_prompts_that_differ_in_one_token_are_two(pool: Pool) -> None:
    model = wide_llama()
    ids = ids_of(0, 0, num_tokens=40)
    ids[1, 11] = ids[0, 11] % 198 + 1
    with VmmCache(model.config, pool) as cache, VmmCache(model.config, pool) as alone:
        both = forward(model, cache, ids)
        assert cache._batch._lineage is not None and cache._batch._lineage.parents == (0, 1)
        assert torch.allclose(both[1:], forward(model, alone, ids[1:]), atol=1e-5)


def test_beams_copy_only_what_was_written_since_they_parted(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_llama(initializer_range=0.3)
    copies: list[tuple[int, int, int]] = []
    forks: list[int] = []
    copied, forked = BatchRows.copy, BatchRows.fork

    def copy_rows(self: BatchRows, sources: Any, targets: Any, first: int, end: int) -> None:
        copies.append((len(targets), first, end))
        copied(self, sources, targets, first, end)

    def fork(self: BatchRows, parents: Any) -> BatchRows:
        forks.append(len(parents))
        return forked(self, parents)

    monkeypatch.setattr(BatchRows, "copy", copy_rows)
    monkeypatch.setattr(BatchRows, "fork", fork)
    with VmmCache(model.config, pool) as cache:
        generated(model, cache, prompts(70), num_beams=4, max_new_tokens=40)
        assert forks == [4]
        assert copies and all(0 < count <= 4 and 70 <= first < end for count, first, end in copies)
        assert max(first for _, first, _ in copies) > 70
        for rows in cache._batch.groups:
            rows.cache.drain()
        assert pages(pool) <= 2 + 4 * 2  # two pages of the prompt are shared to the end


def test_windows_give_pages_back(pool: Pool) -> None:
    model = mistral(40, num_key_value_heads=4, head_dim=512)
    with VmmCache(model.config, pool) as cache:
        for _ in range(8):
            forward(model, cache, ids_of(0, num_tokens=PAGE_TOKENS))
            cache.check()
        assert pool.created_bytes // PAGE_BYTES <= 4  # 39 rows behind and 32 new ones; what was left is what came next


def test_rows_that_a_window_has_passed_are_not_copied(pool: Pool) -> None:
    model = mistral(40, num_key_value_heads=4, head_dim=512)
    own = DynamicCache(config=model.config)
    with VmmCache(model.config, pool) as cache:
        for seed in range(5):
            for each in (cache, own):
                forward(model, each, ids_of(0, 1, num_tokens=PAGE_TOKENS, seed=seed))
        for each in (cache, own):
            each.reorder_cache(torch.tensor([1, 0]))
        logits = [forward(model, each, ids_of(0, 1, num_tokens=1)) for each in (cache, own)]
        assert torch.allclose(*logits, atol=1e-5)
        cache.check()


def test_a_prompt_longer_than_the_window_is_written_from_where_it_is_seen_again(pool: Pool) -> None:
    model = mistral(40, num_key_value_heads=4, head_dim=512)
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, num_tokens=20 * PAGE_TOKENS))
        assert pages(pool) == 2  # 39 rows
        assert cache.get_seq_length() == 20 * PAGE_TOKENS
        assert cache.get_mask_sizes(1, 0) == (40, 20 * PAGE_TOKENS - 39)


def test_a_pass_that_finds_no_page_leaves_all_as_it_was(pool: Pool) -> None:
    model = wide_llama()
    small = Pool("cpu", 3 * PAGE_BYTES, driver=pool.driver)
    with small, VmmCache(model.config, small) as cache, VmmCache(model.config, pool) as other:
        ids, more = ids_of(0, num_tokens=3 * PAGE_TOKENS), ids_of(0, num_tokens=1, seed=5)
        for each in (cache, other):
            forward(model, each, ids)
        with pytest.raises(OutOfPages, match=r"cannot grow to 97 tokens: 1 page .* is needed, 0 are free"):
            forward(model, cache, more)
        cache.check()
        assert cache.get_seq_length() == 3 * PAGE_TOKENS
        small.resize(8 * PAGE_BYTES)
        assert torch.equal(forward(model, cache, more), forward(model, other, more))


def test_a_first_pass_that_finds_no_page_leaves_nothing(pool: Pool) -> None:
    model = wide_llama()
    small = Pool("cpu", 2 * PAGE_BYTES, driver=pool.driver)
    with small, VmmCache(model.config, small) as cache:
        with pytest.raises(OutOfPages):
            forward(model, cache, ids_of(0, 1, num_tokens=50))
        assert (cache.batch_size, cache.get_seq_length()) == (-1, 0)
        forward(model, cache, ids_of(0, num_tokens=50))
        cache.check()


def least_bytes(error: pytest.ExceptionInfo[OutOfPages]) -> int:
    """The budget that a message says would do."""
    found = re.search(r"resize\(\) the budget to at least (\d+) bytes", str(error.value))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(
    "make",
    [wide_llama, lambda: gemma3(4096, head_dim=512, num_key_value_heads=4)],  # two pages a row; one in each of two groups
    ids=["full", "hybrid"],
)
def test_what_the_whole_batch_needs_is_named_and_does(pool: Pool, make: Any) -> None:
    """Of layers with a window and without, too, though the first of these have seen no keys of the others."""
    model = make()
    small = Pool("cpu", 2 * PAGE_BYTES, driver=pool.driver)
    with small, VmmCache(model.config, small) as cache:
        ids = ids_of(*range(5), num_tokens=PAGE_TOKENS + 1)
        message = (
            r"a batch of 5 rows cannot grow to 33 tokens: 10 pages \(20\.0 MiB\) are needed, 2 are free and 0 can be evicted; "
            r".* fewer rows in a batch, or reset\(\) another cache of this pool$"
        )
        with pytest.raises(OutOfPages, match=message) as error:
            forward(model, cache, ids)
        assert least_bytes(error) == 10 * PAGE_BYTES
        small.resize(least_bytes(error) - PAGE_BYTES)
        with pytest.raises(OutOfPages):
            forward(model, cache, ids)
        small.resize(least_bytes(error))
        forward(model, cache, ids)
        cache.check()


def test_a_batch_that_cannot_grow_has_grown_nowhere(pool: Pool) -> None:
    model = wide_llama()
    small = Pool("cpu", 8 * PAGE_BYTES, driver=pool.driver)
    with small, VmmCache(model.config, small) as cache, VmmCache(model.config, small) as other:
        forward(model, cache, ids_of(0, 1, 2, num_tokens=PAGE_TOKENS))
        forward(model, other, ids_of(0, 1, 2, num_tokens=PAGE_TOKENS))
        with pytest.raises(OutOfPages, match=r"3 rows cannot grow to 33 tokens: 3 pages .*, 2 are free") as error:
            forward(model, cache, ids_of(0, 1, 2, num_tokens=1))
        assert (least_bytes(error), pages(small)) == (9 * PAGE_BYTES, 6)
        other.reset()
        forward(model, cache, ids_of(0, 1, 2, num_tokens=1))


def test_answers_to_one_prompt_name_what_all_of_them_need(pool: Pool) -> None:
    model = wide_llama()
    small = Pool("cpu", 3 * PAGE_BYTES, driver=pool.driver)
    with small, VmmCache(model.config, small) as cache:
        forward(model, cache, ids_of(0, 0, 0, 0, num_tokens=PAGE_TOKENS + 1))
        with pytest.raises(OutOfPages, match=r"a batch of 4 rows cannot be forked.*: 4 pages .*, 1 are free") as error:
            forward(model, cache, ids_of(0, 1, 2, 3, num_tokens=1))
        assert least_bytes(error) == 6 * PAGE_BYTES
        cache.check()
        small.resize(least_bytes(error))
        forward(model, cache, ids_of(0, 1, 2, 3, num_tokens=1))
        cache.check()


def test_deep_copies_share_full_pages_and_go_their_own_ways(pool: Pool) -> None:
    model = gemma3(16)
    with VmmCache(model.config, pool) as cache, VmmCache(model.config, pool) as alone:
        prompt, ways = prompts(60), [prompts(61 + way, seed=way) for way in range(3)]
        forward(model, cache, prompt["input_ids"])
        forks = [copy.deepcopy(cache) for _ in ways]
        for way in ways:
            way["input_ids"][:, :60] = prompt["input_ids"]
        answers = [generated(model, fork, way) for fork, way in zip(forks, ways, strict=True)]
        cache.check()
        forks[0].close()
        answers.append(generated(model, cache, ways[0]))
        for way, answer in zip([*ways, ways[0]], answers, strict=True):
            assert answer == generated(model, alone, way)
            alone.reset()
        for fork in forks:
            fork.close()
            fork.close()


def test_a_deep_copy_costs_a_page_for_each_row_of_the_batch(pool: Pool) -> None:
    model = wide_llama()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, 1, num_tokens=5 * PAGE_TOKENS + 1))
        before = pages(pool)
        with copy.deepcopy(cache):
            assert pages(pool) == before + 2


def test_equal_prompts_that_are_deep_copied_part_in_each(pool: Pool) -> None:
    model = wide_llama()
    own = DynamicCache(config=model.config)
    ids = ids_of(0, 0, 1, num_tokens=PAGE_TOKENS + 7)
    with VmmCache(model.config, pool) as cache:
        for each in (cache, own):
            forward(model, each, ids)
        with copy.deepcopy(cache) as other:
            assert pages(pool) == 2 * 2 + 2  # the last page of each prompt
            more = ids_of(0, 1, 2, num_tokens=1)
            expected = forward(model, own, more)
            for each in (cache, other):
                assert torch.allclose(forward(model, each, more), expected, atol=1e-5)
                each.check()


def test_beams_of_a_deep_copy_leave_the_other_alone(pool: Pool) -> None:
    model = wide_llama()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, 1, 2, num_tokens=2 * PAGE_TOKENS + 3))
        kept = [tuple(states.clone() for states in cache.states(layer)) for layer in range(4)]
        with copy.deepcopy(cache) as other:
            for seed in range(4):
                forward(model, other, ids_of(0, 1, 2, num_tokens=1, seed=seed))
                other.reorder_cache(torch.tensor([2, 0, 0]))
            other.check()
        for layer, states in enumerate(kept):
            assert all(torch.equal(*pair) for pair in zip(states, cache.states(layer), strict=True))


def test_cropped_rows_are_written_again(pool: Pool) -> None:
    model = wide_llama()
    with VmmCache(model.config, pool) as cache, VmmCache(model.config, pool) as alone:
        ids = ids_of(0, 1, num_tokens=3 * PAGE_TOKENS)
        forward(model, cache, ids)
        cache.crop(-40)
        assert cache.get_seq_length() == 3 * PAGE_TOKENS - 40
        cache.check()
        more = ids_of(0, 1, num_tokens=3, seed=9)
        forward(model, alone, ids[:, :-40])
        assert torch.allclose(forward(model, cache, more), forward(model, alone, more), atol=1e-5)


def test_cropping_into_shared_pages_leaves_the_other_alone(pool: Pool) -> None:
    model = wide_llama()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, num_tokens=3 * PAGE_TOKENS))
        kept = cache.states(2)[0].clone()
        with copy.deepcopy(cache) as other:
            other.crop(-2 * PAGE_TOKENS + 5)
            forward(model, other, ids_of(0, num_tokens=20, seed=3))
            other.check()
            assert torch.equal(other.states(2)[0][:, :, : PAGE_TOKENS + 5], kept[:, :, : PAGE_TOKENS + 5])
        assert torch.equal(cache.states(2)[0], kept)


def test_what_a_window_has_passed_is_cropped_only_if_it_was_recorded(pool: Pool) -> None:
    model = mistral(40, num_key_value_heads=4, head_dim=512)
    ids = ids_of(0, num_tokens=5 * PAGE_TOKENS)
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids)
        with pytest.raises(RowsUnmapped, match=r"activate_past_recording\(\) before"):
            cache.crop(-1)
        assert cache.get_seq_length() == 5 * PAGE_TOKENS
        cache.reset()
        cache.activate_past_recording()
        forward(model, cache, ids)
        forward(model, cache, ids[:, :2])
        before = pages(pool)
        cache.crop(-72)
        assert cache.get_seq_length() == 5 * PAGE_TOKENS - 70
        cache.check()
        for rows in cache._batch.groups:
            rows.cache.drain()
        assert pages(pool) == 2 < before  # of rows [51, 90)
        seen = cache.layers[0].keys
        assert seen is not None and seen.shape[2] == 39


def test_reset_gives_the_memory_back_and_takes_a_batch_of_another_size(pool: Pool) -> None:
    model = llama()
    with VmmCache(model.config, pool) as cache:
        first = generated(model, cache, prompts(20))
        cache.reset()
        assert (cache.batch_size, cache.get_seq_length()) == (-1, 0)
        for rows in cache._batch.groups:
            rows.cache.drain()
        assert pages(pool) == 0
        generated(model, cache, prompts(20, 11, 13))
        cache.reset()
        assert generated(model, cache, prompts(20)) == first


def test_caches_share_a_pool(pool: Pool) -> None:
    models = [llama(), gemma3(16), mistral(16)]
    caches = [VmmCache(model.config, pool) for model in models]
    together = [generated(model, cache, prompts(20)) for model, cache in zip(models, caches, strict=True)]
    assert pool.held_bytes == sum(2 * MIB * len(cache._batch.groups) for cache in caches)
    for model, cache, answer in zip(models, caches, together, strict=True):
        cache.check()
        cache.close()
        with VmmCache(model.config, pool) as alone:
            assert generated(model, alone, prompts(20)) == answer


def test_a_pool_that_closes_first_leaves_nothing_to_close() -> None:
    model = llama()
    pool = Pool("cpu", 64 * MIB)
    cache = VmmCache(model.config, pool)
    forward(model, cache, ids_of(0, num_tokens=3))
    pool.close()
    cache.close()


@pytest.mark.parametrize(
    "make", [wide_llama, lambda: gemma3(4096, head_dim=512, num_key_value_heads=4)], ids=["full", "hybrid"]
)
def test_a_crop_that_finds_no_page_leaves_all_as_it_was(pool: Pool, make: Any) -> None:
    model = make()
    ids, more = ids_of(0, 1, num_tokens=3 * PAGE_TOKENS), ids_of(0, 1, num_tokens=1, seed=5)
    small = Pool("cpu", 64 * PAGE_BYTES, driver=pool.driver)
    with small, VmmCache(model.config, small) as cache, VmmCache(model.config, pool) as other:
        for each in (cache, other):
            forward(model, each, ids)
        with copy.deepcopy(cache):
            small.resize(small.held_bytes + PAGE_BYTES)  # for one of several sequences
            with pytest.raises(OutOfPages):
                cache.crop(-40)
        assert cache.get_seq_length() == 3 * PAGE_TOKENS
        cache.check()
        small.resize(64 * PAGE_BYTES)
        assert torch.equal(forward(model, cache, more), forward(model, other, more))
        for each in (cache, other):
            each.crop(-41)
        assert torch.equal(forward(model, cache, more), forward(model, other, more))
        cache.check()


def test_a_batch_shrinks_by_one_row_at_a_time(pool: Pool) -> None:
    model = llama()
    with VmmCache(model.config, pool, max_tokens=512, slots=1) as cache:
        forward(model, cache, ids_of(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, num_tokens=9))
        forward(model, cache, ids_of(*range(10), num_tokens=1))  # the slots of five prompts are free before its own
        for size in range(9, 0, -1):
            cache.batch_select_indices(torch.arange(size))
            forward(model, cache, ids_of(*range(size), num_tokens=1))
