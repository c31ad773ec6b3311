"""One batch of a VmmCache: what is mapped, shared, copied and given back, and how rows are written."""

import copy
import re
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from tests.adapters.models import assert_same, gemma3, generated, gpt_neox, llama, mistral, prompts, wide_llama
from vmmkv import GIB, MIB, KVCache, LayoutError, OutOfPages, Pool, RowsUnmapped
from vmmkv.adapters.transformers import VmmCache
from vmmkv.adapters.transformers import batch as batch_module
from vmmkv.adapters.transformers.batch import CachedBatch, Lineage, WindowRows
from vmmkv.units import PAGE_BYTES

# memory

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
    grow = WindowRows.grow
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, num_tokens=5))
        monkeypatch.setattr(
            WindowRows, "grow", lambda self, tokens: (grown.append(len(cache._batch.written)), grow(self, tokens))[1]
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
    copied, forked = WindowRows.copy, WindowRows.fork

    def copy_rows(self: WindowRows, sources: Any, targets: Any, first: int, end: int) -> None:
        copies.append((len(targets), first, end))
        copied(self, sources, targets, first, end)

    def fork(self: WindowRows, parents: Any) -> WindowRows:
        forks.append(len(parents))
        return forked(self, parents)

    monkeypatch.setattr(WindowRows, "copy", copy_rows)
    monkeypatch.setattr(WindowRows, "fork", fork)
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


# a batch that is repeated, selected and reordered


def random_ids(generator: torch.Generator, batch: int, num_tokens: int) -> torch.Tensor:
    return torch.randint(1, 199, (batch, num_tokens), generator=generator)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 12))])
@pytest.mark.parametrize("make", [wide_llama, lambda: gemma3(16)], ids=["full", "hybrid"])
def test_any_order_of_calls_gives_the_same_logits(pool: Pool, make: Any, seed: int) -> None:
    model = make()
    generator = torch.Generator().manual_seed(seed)

    def choose(high: int, count: int = 1) -> list[int]:
        return torch.randint(0, high, (count,), generator=generator).tolist()

    with VmmCache(model.config, pool) as ours, torch.inference_mode():
        own = DynamicCache(config=model.config)
        own.activate_past_recording()
        ours.activate_past_recording()
        ids = random_ids(generator, 2, 40)
        for _ in range(25):
            logits = [model(ids, past_key_values=cache).logits for cache in (ours, own)]
            assert torch.allclose(*logits, atol=1e-4)
            batch, call, removed = len(ids), choose(6)[0], choose(ids.shape[1])[0]
            arguments: Any = torch.tensor(choose(batch, batch))
            name, after = "reorder_cache", batch
            if call == 0 and batch < 6:
                arguments, name, after = 2, "batch_repeat_interleave", 2 * batch
            elif call == 1 and batch > 1:
                arguments, name, after = arguments[1:], "batch_select_indices", batch - 1
            for cache in (ours, own):
                cache.crop(-removed)
                if call < 4:
                    getattr(cache, name)(arguments)
            assert ours.get_seq_length() == own.get_seq_length()
            assert ours.get_mask_sizes(3, 0) == own.get_mask_sizes(3, 0)
            ours.check()
            ids = random_ids(generator, after if call < 4 else batch, choose(3)[0] + 1)


def test_a_mask_selects_rows_too(pool: Pool) -> None:
    model = wide_llama()
    with VmmCache(model.config, pool) as cache, torch.inference_mode():
        model(random_ids(torch.Generator().manual_seed(0), 3, 40), past_key_values=cache)
        kept = cache.states(1)[0].clone()
        cache.batch_select_indices(torch.tensor([True, False, True]))
        assert torch.equal(cache.states(1)[0], kept[[0, 2]])


def test_beams_know_how_far_they_are_the_same() -> None:
    lineage = Lineage.of_prompts([0, 0, 0]).settle(10, forked=True)
    lineage = lineage.select([0, 0, 2]).settle(13, forked=False)  # 1 goes on from 0
    assert lineage.common[0, 1] == 13 and lineage.common[0, 2] == lineage.common[1, 2] == 10
    assert lineage.select([1, 0, 2]).moves() == ([1, 0], [0, 1], 13)
    assert lineage.select([0, 1, 1]).moves() == ([1], [2], 10)


def test_rows_of_other_prompts_are_forked_and_not_copied() -> None:
    lineage = Lineage.of_prompts([0, 0, 1, 1]).settle(10, forked=True)
    assert lineage.select([0, 1, 1, 3]).moves() is None  # row 2 has nothing in common with row 1, and its pages are shared
    assert Lineage.of_prompts([0, 1]).select([1, 0]).moves() is not None  # nobody else holds these


def test_cut_rows_are_not_in_common_any_more() -> None:
    lineage = Lineage.of_prompts([0, 0]).settle(10, forked=True).cut(7)
    assert (lineage.common[0, 1], lineage.own_from) == (7, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_order_of_a_sum_makes_no_other_prompt(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs, weights = torch.randn(1500, 512), torch.randn(512, 64)
    whole, halves = inputs @ weights, inputs[:, :256] @ weights[:256] + inputs[:, 256:] @ weights[256:]
    assert not torch.equal(whole, halves)
    states = torch.stack([whole, halves, whole.roll(1, 0)]).to(dtype).unflatten(-1, (2, 32)).transpose(1, 2)
    assert batch_module.prompts(states, states) == [0, 0, 1]
    other = states.clone()
    other[1, :, 700] = states[1, :, 701]  # one token of them all
    assert batch_module.prompts(other, other) == [0, 1, 2]
    assert batch_module.prompts(states, other) == [0, 1, 2]
    assert batch_module.agree(states, states, [0, 0, 1]) and not batch_module.agree(states, states, [0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_number_that_differs_by_more_than_rounding_makes_another_prompt(dtype: torch.dtype) -> None:
    states = torch.randn(1, 4, 50, 128, generator=torch.Generator().manual_seed(0)).to(dtype).repeat(2, 1, 1, 1)
    assert batch_module.prompts(states, states) == [0, 0]
    other = states.clone()
    other[1, 3, 17, 5] += 0.2
    assert batch_module.prompts(other, states) == batch_module.prompts(states, other) == [0, 1]


def test_half_precision_differs_in_few_last_bits_or_is_another_prompt() -> None:
    states = torch.randn(1, 4, 50, 128, generator=torch.Generator().manual_seed(0)).bfloat16().repeat(2, 1, 1, 1)
    for every, expected in ((32, [0, 0]), (4, [0, 1])):
        other = states.clone()
        other[1, :, :, ::every] *= 1 + 2**-7
        assert batch_module.prompts(states, other) == expected


class Temporaries(TorchDispatchMode):
    """The most memory that what torch made within takes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        if isinstance(made, torch.Tensor) and not func.is_view and made is not (args[0] if args else None):
            self._made.append(weakref.ref(made))
        alive = [tensor for tensor in (ref() for ref in self._made) if tensor is not None]
        self._made = [weakref.ref(tensor) for tensor in alive]
        self.most_bytes = max(self.most_bytes, sum(tensor.untyped_storage().nbytes() for tensor in alive))
        return made


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prompts_are_compared_in_little_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(1, 2, 200, 64, generator=torch.Generator().manual_seed(0)).to(dtype).repeat(8, 1, 1, 1)
    states[5:, :, 150] += 0.3
    for most_bytes in (2 * MIB, 5000):  # less than one token of all pairs takes
        monkeypatch.setattr(batch_module, "_COMPARED_BYTES", most_bytes)
        with Temporaries() as temporaries:
            assert batch_module.prompts(states, states) == [0, 0, 0, 0, 0, 1, 1, 1]
            assert batch_module.agree(states, states, [0, 0, 0, 0, 0, 1, 1, 1])
        assert most_bytes / 4 < temporaries.most_bytes < 1.05 * most_bytes


def test_a_batch_of_many_prompts_takes_no_more() -> None:
    states = torch.randn(1, 8, 128, 128).bfloat16().expand(64, -1, -1, -1)
    with Temporaries() as temporaries:
        assert batch_module.prompts(states, states) == [0] * 64
    assert temporaries.most_bytes < 64 * MIB


SLOW = {"rope_type": "default", "rope_theta": 1e6}
"""A rotary embedding as of Qwen: most of its turns are lost in the rounding of bfloat16."""


@pytest.mark.parametrize("make", [lambda: llama(head_dim=128, rope_parameters=SLOW), gpt_neox], ids=["slow", "a quarter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_tokens_at_other_positions_are_other_prompts(pool: Pool, make: Any, dtype: torch.dtype) -> None:
    model = make().to(dtype)
    ids = random_ids(torch.Generator().manual_seed(0), 1, 20).expand(6, -1)
    positions = torch.arange(1, 21).repeat(6, 1)
    positions[2:4] -= 1  # as behind a pad
    positions[4:, 7:] += 1
    with VmmCache(model.config, pool, max_tokens=4096) as cache, torch.inference_mode():
        model(ids, past_key_values=cache, position_ids=positions)
        assert cache._batch._lineage is not None and cache._batch._lineage.parents == (0, 0, 1, 1, 2, 2)


def test_rows_that_a_hook_changes_are_not_shared_if_one_says_so(pool: Pool) -> None:
    model = llama(initializer_range=0.3)

    def steer(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output + torch.tensor([0.0, 3.0])[:, None, None]

    model.model.layers[1].mlp.register_forward_hook(steer)
    ids = random_ids(torch.Generator().manual_seed(0), 1, 20).expand(2, -1)
    own = DynamicCache(config=model.config)
    with VmmCache(model.config, pool, share_prompts=False) as cache, torch.inference_mode():
        for each in (own, cache):
            model(ids, past_key_values=each)
        for layer in range(4):
            assert torch.equal(cache.states(layer)[0], own.layers[layer].keys)
        with copy.deepcopy(cache) as other:
            other.reset()
            model(ids, past_key_values=other)
            assert torch.equal(other.states(3)[0], own.layers[3].keys)


def test_a_layer_of_shared_prompts_sends_nothing_to_the_device(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    indices = CachedBatch._index
    model = llama()
    ids = random_ids(torch.Generator().manual_seed(0), 1, 20).expand(2, -1)

    def spy(self: CachedBatch, *arguments: Any) -> Any:
        index = indices(self, *arguments)
        sent.append(id(index))
        return index

    monkeypatch.setattr(CachedBatch, "_index", spy)
    with VmmCache(model.config, pool) as cache, torch.inference_mode():
        model(ids, past_key_values=cache)
        model(ids, past_key_values=cache)
    assert len(sent) == 12 and len(set(sent)) == 2


# how rows are written


class Calls(TorchDispatchMode):
    """What torch is asked for within, views among it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.fixture
def far_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written as where torch would split a copy."""
    monkeypatch.setattr(batch_module, "splits_a_copy", lambda device, span_bytes: True)


def append(cache: VmmCache, num_layers: int, num_tokens: int, batch: int = 8) -> None:
    """A pass of random keys and values."""
    for layer in range(num_layers):
        cache.update(*torch.randn(2, batch, 2, num_tokens, 32), layer)


def calls_of_a_step(pool: Pool, num_layers: int) -> Counter[str]:
    with VmmCache(llama(num_hidden_layers=num_layers).config, pool) as cache, torch.inference_mode():
        for num_tokens in (5, 1):
            append(cache, num_layers, num_tokens)
        k, v = torch.randn(2, 8, 2, 1, 32)
        with Calls() as calls:
            for layer in range(num_layers):
                cache.update(k, v, layer)
    return calls.names


def test_a_layer_of_a_step_calls_torch_twice(pool: Pool) -> None:
    few, many = calls_of_a_step(pool, 4), calls_of_a_step(pool, 12)
    assert many - few == Counter(copy_=2 * 8)
    assert few.total() < 2 * 4 + 10


def test_rows_that_are_far_apart_are_written_by_one_call_for_all_slots(pool: Pool, far_slots: None) -> None:
    calls = calls_of_a_step(pool, 4)
    assert calls["index_copy_"] == 2 * 4 and calls["copy_"] == calls["arange"] == 0


@pytest.mark.parametrize(
    ("device", "span_bytes", "splits"),
    [("cuda:0", 2**31 + 1, True), ("cuda:0", 2**31, False), ("cpu", 2**40, False)],
)
def test_torch_splits_a_copy_past_offsets_of_32_bits_on_a_gpu(device: str, span_bytes: int, splits: bool) -> None:
    assert batch_module.splits_a_copy(torch.device(device), span_bytes) is splits


@pytest.mark.parametrize(("max_tokens", "span_bytes"), [(2**16, 4 * GIB + 2**16), (2**10, 2**26 + 2**16)])
def test_the_span_is_from_the_first_slots_row_to_the_last_ones(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, max_tokens: int, span_bytes: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(batch_module, "splits_a_copy", lambda device, span_bytes: bool(asked.append(span_bytes)))
    with VmmCache(wide_llama().config, pool, max_tokens=max_tokens, slots=6) as cache, torch.inference_mode():
        for layer in range(4):
            cache.update(*torch.randn(2, 2, 4, 3, 512), layer)
    assert asked == [span_bytes]


@pytest.mark.parametrize(
    "make", [llama, wide_llama, lambda: mistral(16), lambda: gemma3(16)], ids=["full", "wide", "sliding", "hybrid"]
)
def test_far_rows_are_those_of_transformers_own_cache(pool: Pool, make: Any, far_slots: None) -> None:
    assert_same(make(), pool, prompts(45, 20, 3))
    assert_same(make(), pool, prompts(45), num_beams=3, prefill_chunk_size=7)  # of which windows drop some


def test_far_rows_are_written_under_any_mode(pool: Pool, far_slots: None) -> None:
    model = llama().requires_grad_(False)
    expected = generated(model, None, prompts(9), max_new_tokens=3)
    with VmmCache(model.config, pool) as cache:
        ids = prompts(9)["input_ids"]
        for mode in (torch.inference_mode(), torch.no_grad(), torch.enable_grad()):
            with mode:
                chosen = model(ids[:, cache.get_seq_length() :], past_key_values=cache).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, chosen.clone()], dim=1)
        assert ids.tolist() == expected


class IndicesByStream(TorchDispatchMode):
    """Which index tensors are read on which stream. They are kept, so that each is known again."""

    def __init__(self) -> None:
        super().__init__()
        self.stream: Any = "first"
        self.read: list[tuple[torch.Tensor, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("index_copy_", "index_select"):
            self.read.append((args[2], self.stream))
        return func(*args, **kwargs or {})


def test_an_index_is_read_on_the_stream_that_it_was_made_on_and_no_other(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, far_slots: None
) -> None:
    """Another one might read it before it is written, or after its memory was given to somebody else."""
    recorded: list[Any] = []
    monkeypatch.setattr(KVCache, "record_stream", lambda cache, stream: recorded.append(stream))
    with VmmCache(llama().config, pool) as cache, torch.inference_mode(), IndicesByStream() as indices:
        monkeypatch.setattr(batch_module, "_current_stream", lambda device: indices.stream)
        for layer in range(4):
            cache.update(*torch.randn(2, 1, 2, 3, 32).repeat_interleave(8, dim=1), layer)  # equal prompts, kept once
        for stream in ("first", "second", "second", "first", "third"):
            indices.stream = stream
            cache.states(2)
        for stream in ("third", "second", "first"):
            indices.stream = stream
            append(cache, 4, 1)
        cache.reset()
    streams_of: dict[int, set[str]] = {}
    for index, stream in indices.read:
        streams_of.setdefault(index.untyped_storage()._cdata, set()).add(stream)
    assert {stream for streams in streams_of.values() for stream in streams} == {"first", "second", "third"}
    assert all(len(streams) == 1 for streams in streams_of.values())
    assert set(recorded) == {"first", "second", "third"}


def test_far_rows_of_another_kind_are_refused(pool: Pool, far_slots: None) -> None:
    with VmmCache(llama().config, pool) as cache, torch.inference_mode():
        append(cache, 4, 3)
        k, v = torch.randn(2, 8, 2, 1, 32)
        for keys, values in ((k.half(), v), (k, v.half()), (k[:, :1], v), (k, v[..., :16]), (k.to("meta"), v)):
            with pytest.raises(LayoutError, match=r"layer 2 gives .* and its rows are \[8, 2, 1, 32\] torch\.float32 on cpu"):
                cache.update(keys, values, 2)
        append(cache, 4, 1)
        assert cache.get_seq_length() == 4
