"""One batch of a VmmCache: what is mapped, shared, copied and given back, and how rows are written."""

import copy
import itertools
import re
import weakref
from collections import Counter
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from tests.adapters.models import (
    Calls,
    assert_same,
    forward,
    gemma3,
    generated,
    gpt_neox,
    ids_of,
    llama,
    mistral,
    prompts,
    states_of,
    wide_llama,
)
from vmmkv import GIB, MIB, DriverError, KVCache, OutOfPages, Pool, RowsUnmapped
from vmmkv.adapters.transformers import VmmCache
from vmmkv.adapters.transformers import batch as batch_module
from vmmkv.adapters.transformers.batch import Lineage, WindowRows
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import PAGE_BYTES

PAGE_TOKENS = 32
"""Of `wide_llama`, `wide_mistral` and each group of `wide_gemma3`."""


WIDE = {"num_key_value_heads": 4, "head_dim": 512}


def wide_mistral() -> Any:
    return mistral(40, **WIDE)


def wide_gemma3() -> Any:
    return gemma3(4096, **WIDE)


def pages(pool: Pool) -> int:
    return pool.held_bytes // PAGE_BYTES


def drain(cache: VmmCache) -> None:
    """Unmap what is pending reclaim."""
    for rows in cache.batch.groups:
        rows.cache.drain()


def parents(cache: VmmCache) -> tuple[int, ...]:
    assert cache.batch.lineage is not None
    return cache.batch.lineage.parents


# memory


def test_rows_are_appended_in_place_and_seen_as_views(pool: Pool) -> None:
    model = llama()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, 1, num_tokens=5))
        before = cache.layers[3].keys
        kept = before.clone()
        forward(model, cache, ids_of(0, 1, num_tokens=1))
        after = cache.layers[3].keys
        assert (before.shape, after.shape) == ((2, 2, 5, 32), (2, 2, 6, 32))
        assert after.data_ptr() == before.data_ptr() and torch.equal(after[:, :, :5], kept)
        assert len({layer.keys.untyped_storage().data_ptr() for layer in cache.layers}) == 1


def test_memory_is_that_of_the_tokens_and_a_page(pool: Pool) -> None:
    model = wide_llama()
    with VmmCache(model.config, pool, max_tokens=2**20) as cache:
        for length in (PAGE_TOKENS, 1, 30, 1, 1):
            forward(model, cache, ids_of(0, 1, num_tokens=length))
            assert pages(pool) == 2 * -(-cache.get_seq_length() // PAGE_TOKENS)


def test_memory_is_mapped_once_a_group_before_any_layer_is_written(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, grow, written = gemma3(16), WindowRows.grow, []
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, num_tokens=5))

        def counted(rows: WindowRows, num_tokens: int) -> None:
            written.append(sum(cache.get_seq_length(layer) > 5 for layer in range(len(cache.layers))))
            grow(rows, num_tokens)

        monkeypatch.setattr(WindowRows, "grow", counted)
        forward(model, cache, ids_of(0, num_tokens=1))
    assert written == [0, 0]


def test_equal_prompts_side_by_side_are_kept_once(pool: Pool) -> None:
    model = wide_llama()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, 0, 0, 1, 2, 2, num_tokens=2 * PAGE_TOKENS + 5))
        assert pages(pool) == 3 * 3
        assert cache.batch_size == 6 and cache.layers[0].keys.shape[0] == 6
        forward(model, cache, ids_of(*range(6), num_tokens=1))
        cache.check()
        drain(cache)
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


def test_beams_copy_only_what_was_written_since_they_parted(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_llama(initializer_range=0.3)
    copy_rows, fork_rows = Mock(wraps=WindowRows.copies), Mock(wraps=WindowRows.fork)
    monkeypatch.setattr(WindowRows, "copies", lambda *arguments: copy_rows(*arguments))
    monkeypatch.setattr(WindowRows, "fork", lambda *arguments: fork_rows(*arguments))
    with VmmCache(model.config, pool) as cache:
        generated(model, cache, prompts(70), num_beams=4, max_new_tokens=40)
        assert [len(call.args[1]) for call in fork_rows.call_args_list] == [4]
        copies = [(len(targets), first, end) for _, _, targets, first, end in (each.args for each in copy_rows.call_args_list)]
        assert copies and all(0 < count <= 4 and 70 <= first < end for count, first, end in copies)
        assert max(first for _, first, _ in copies) > 70
        drain(cache)
        assert pages(pool) <= 2 + 4 * 2  # two pages of the prompt are shared to the end


def test_windows_give_pages_back_and_copy_none_that_they_have_passed(pool: Pool) -> None:
    model = wide_mistral()
    own = DynamicCache(config=model.config)
    with VmmCache(model.config, pool) as cache:
        for seed in range(8):
            for each in (cache, own):
                forward(model, each, ids_of(0, 1, num_tokens=PAGE_TOKENS, seed=seed))
            cache.check()
        assert pool.created_bytes // PAGE_BYTES <= 2 * 4  # 39 rows behind and 32 new ones; what was left is what came next
        for each in (cache, own):
            each.reorder_cache(torch.tensor([1, 0]))
        assert torch.allclose(*(forward(model, each, ids_of(0, 1, num_tokens=1)) for each in (cache, own)), atol=1e-5)
        cache.check()


def test_a_prompt_longer_than_the_window_is_written_from_where_it_is_seen_again(pool: Pool) -> None:
    model = wide_mistral()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, num_tokens=20 * PAGE_TOKENS))
        assert pages(pool) == 2  # 39 rows
        assert cache.get_seq_length() == 20 * PAGE_TOKENS
        assert cache.get_mask_sizes(1, 0) == (40, 20 * PAGE_TOKENS - 39)


def test_what_a_window_has_passed_is_cropped_only_if_it_was_recorded(pool: Pool) -> None:
    model = wide_mistral()
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
        drain(cache)
        assert pages(pool) == 2 < before  # of rows [51, 90)
        assert cache.layers[0].keys.shape[2] == 39


def test_reset_gives_the_memory_back_and_takes_a_batch_of_another_size(pool: Pool) -> None:
    model = llama()
    with VmmCache(model.config, pool) as cache:
        first = generated(model, cache, prompts(20))
        cache.reset()
        assert (cache.batch_size, cache.get_seq_length()) == (-1, 0)
        drain(cache)
        assert pages(pool) == 0
        generated(model, cache, prompts(20, 11, 13))
        cache.reset()
        assert generated(model, cache, prompts(20)) == first


def test_a_deep_copy_costs_a_page_for_each_row_of_the_batch(pool: Pool) -> None:
    model = wide_llama()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, 1, num_tokens=5 * PAGE_TOKENS + 1))
        before = pages(pool)
        with copy.deepcopy(cache):
            assert pages(pool) == before + 2


def test_a_batch_shrinks_by_one_row_at_a_time(pool: Pool) -> None:
    model = llama()
    with VmmCache(model.config, pool, max_tokens=512, slots=1) as cache:
        forward(model, cache, ids_of(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, num_tokens=9))
        forward(model, cache, ids_of(*range(10), num_tokens=1))  # the slots of five prompts are free before its own
        for size in range(9, 0, -1):
            cache.batch_select_indices(torch.arange(size))
            forward(model, cache, ids_of(*range(size), num_tokens=1))


# no page


def least_bytes(error: pytest.ExceptionInfo[OutOfPages]) -> int:
    """The budget that a message says would do."""
    found = re.search(r"resize\(\) the budget to at least (\d+) bytes", str(error.value))
    assert found is not None
    return int(found[1])


def test_a_pass_that_finds_no_page_leaves_all_as_it_was(pool: Pool) -> None:
    model = wide_llama()
    small = Pool("cpu", 8 * PAGE_BYTES, driver=pool.driver)
    ids, more = ids_of(0, 1, 2, num_tokens=PAGE_TOKENS), ids_of(0, 1, 2, num_tokens=1)
    with small, VmmCache(model.config, small) as cache, VmmCache(model.config, small) as other:
        for each in (cache, other):
            forward(model, each, ids)
        with pytest.raises(OutOfPages, match=r"3 rows cannot grow to 33 tokens: 3 pages .*, 2 are free") as error:
            forward(model, cache, more)
        cache.check()
        assert (least_bytes(error), pages(small), cache.get_seq_length()) == (9 * PAGE_BYTES, 6, PAGE_TOKENS)
        small.resize(least_bytes(error))
        own = DynamicCache(config=model.config)
        forward(model, own, ids)
        assert torch.allclose(forward(model, cache, more), forward(model, own, more), atol=1e-5)


@pytest.mark.parametrize("make", [wide_llama, wide_gemma3], ids=["two pages a row", "one in each of two groups"])
def test_a_first_pass_names_what_the_whole_batch_needs_and_leaves_nothing(pool: Pool, make: Any) -> None:
    """In a hybrid model the first layers have seen no keys of the others."""
    model = make()
    small = Pool("cpu", 2 * PAGE_BYTES, driver=pool.driver)
    with small, VmmCache(model.config, small) as cache:
        ids = ids_of(*range(5), num_tokens=PAGE_TOKENS + 1)
        message = (
            r"a batch of 5 rows cannot grow to 33 tokens: 10 pages \(20\.0 MiB\) are needed, 2 are free and 0 can be evicted; "
            r".* fewer rows in a batch, offload\(\) or reset\(\) another cache of this pool$"
        )
        with pytest.raises(OutOfPages, match=message) as error:
            forward(model, cache, ids)
        assert (cache.batch_size, cache.get_seq_length(), least_bytes(error)) == (-1, 0, 10 * PAGE_BYTES)
        small.resize(least_bytes(error) - PAGE_BYTES)
        with pytest.raises(OutOfPages):
            forward(model, cache, ids)
        small.resize(least_bytes(error))
        forward(model, cache, ids)
        cache.check()


def test_answers_to_one_prompt_name_what_all_of_them_need(pool: Pool) -> None:
    model = wide_llama()
    small = Pool("cpu", 3 * PAGE_BYTES, driver=pool.driver)
    with small, VmmCache(model.config, small) as cache:
        forward(model, cache, ids_of(0, 0, 0, 0, num_tokens=PAGE_TOKENS + 1))
        with pytest.raises(OutOfPages, match=r"a batch of 4 rows cannot be forked.*: 4 pages .*, 1 are free") as error:
            forward(model, cache, ids_of(0, 1, 2, 3, num_tokens=1))
        assert least_bytes(error) == 6 * PAGE_BYTES
        small.resize(least_bytes(error))
        forward(model, cache, ids_of(0, 1, 2, 3, num_tokens=1))
        cache.check()


@pytest.mark.parametrize("make", [wide_llama, wide_gemma3], ids=["full", "hybrid"])
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


# a reorder that fails


def num_sequences(cache: VmmCache) -> int:
    """Running sequences in the slots of the cache and of its deep copies."""
    return sum(len(rows.cache.sequences) for rows in cache.batch.groups)


def test_a_pass_that_forks_is_all_or_none_at_whichever_driver_call_it_fails(pool: Pool) -> None:
    model, ids = gemma3(16), [ids_of(0, 0, num_tokens=40), *(ids_of(0, 1, num_tokens=1, seed=seed) for seed in (1, 2))]
    driver, failures = cast(FakeDriver, pool.driver), 0
    for number in itertools.count():
        own = DynamicCache(config=model.config)
        with Pool("cpu", GIB, driver=driver) as new, VmmCache(model.config, new) as cache:
            for each, tokens in itertools.product((own, cache), ids[:2]):
                forward(model, each, tokens)
            with copy.deepcopy(cache) as other:  # so that the rows may not be written, and are forked
                before, kept = num_sequences(cache), [each.clone() for each in states_of(other)]
                for each in (own, cache):
                    each.reorder_cache(torch.tensor([1, 0]))
                driver.fail_at = {driver.num_calls + number}
                try:
                    logits = forward(model, cache, ids[2])
                except DriverError:
                    failures += 1
                    cache.crop(0)
                    logits = forward(model, cache, ids[2])
                driver.fail_at = set()
                assert torch.allclose(logits, forward(model, own, ids[2]), atol=1e-4), f"call {number} failed"
                assert num_sequences(cache) == before
                assert all(map(torch.equal, kept, states_of(other)))
                cache.check()
            assert num_sequences(cache) == before / 2
        if failures == number:
            break
    assert failures > 4 * 2  # of the forks and of the ends of as many sequences


class Fails(TorchDispatchMode):
    """One call of a function of torch finds no memory: that of this number, from 0 on."""

    def __init__(self, function: str, number: int) -> None:
        super().__init__()
        self._function, self._left = function, number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == self._function:
            self._left -= 1
            if self._left == -1:
                raise torch.OutOfMemoryError("told to fail")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("number", [0, 1])
def test_a_swap_that_finds_no_memory_to_copy_is_made_once(pool: Pool, number: int) -> None:
    model, ids, more = gemma3(16), ids_of(0, 1, num_tokens=40), ids_of(0, 1, num_tokens=1, seed=1)
    own = DynamicCache(config=model.config)
    with VmmCache(model.config, pool) as cache:
        for each in (own, cache):
            forward(model, each, ids)
            each.reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(torch.OutOfMemoryError), Fails("index_select", number):
            forward(model, cache, more)
        cache.crop(0)
        assert torch.allclose(forward(model, cache, more), forward(model, own, more), atol=1e-4)


def test_sequences_that_the_driver_does_not_let_end_are_ended_by_the_next_reset(pool: Pool) -> None:
    model, driver = gemma3(16), cast(FakeDriver, pool.driver)
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, 1, num_tokens=40))
        driver.fail_at = {driver.num_calls + 1}
        with pytest.raises(DriverError):
            cache.reset()
        assert cache.batch_size == -1
        cache.reset()
        assert num_sequences(cache) == 0


def test_a_cache_that_the_driver_does_not_let_close_is_closed_by_the_next_call(pool: Pool) -> None:
    model, driver = gemma3(16), cast(FakeDriver, pool.driver)
    for number in itertools.count():
        cache = VmmCache(model.config, pool)
        forward(model, cache, ids_of(0, num_tokens=3))
        driver.fail_at = {driver.num_calls + number}
        try:
            cache.close()
        except DriverError:
            driver.fail_at = set()
            cache.close()
            assert not pool.caches, f"call {number} failed"
        else:
            driver.fail_at = set()
            break
    assert number > 4


def test_a_first_pass_says_why_it_failed_even_if_the_pool_was_closed(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = llama(), Pool("cpu", GIB, driver=pool.driver)

    def fail(*_: Any) -> None:
        other.close()
        raise DriverError("lost", call="map", code="FAKE")

    monkeypatch.setattr(WindowRows, "grow", fail)
    with VmmCache(model.config, other) as cache, pytest.raises(DriverError, match="lost"):
        forward(model, cache, ids_of(0, num_tokens=3))


# a batch that is repeated, selected, reordered, cropped and copied


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 12))])
@pytest.mark.parametrize("make", [wide_llama, lambda: gemma3(16)], ids=["full", "hybrid"])
def test_any_order_of_calls_gives_the_same_logits_and_leaves_copies_alone(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, make: Any, seed: int
) -> None:
    model = make()
    generator = torch.Generator().manual_seed(seed)

    def choose(high: int, *shape: int) -> Any:
        return torch.randint(0, high, shape, generator=generator).tolist()

    ours, own = VmmCache(model.config, pool), DynamicCache(config=model.config)
    left: list[tuple[VmmCache, list[torch.Tensor]]] = []
    for cache in (own, ours):
        cache.activate_past_recording()
    copies, happened = WindowRows.copies, set()
    monkeypatch.setattr(WindowRows, "copies", lambda *arguments: (happened.add("copy"), copies(*arguments))[1])
    ids = torch.tensor(choose(198, 3 + seed % 2, 40)) + 1
    ids[1] = ids[seed % 2]  # equal prompts too
    for step in range(25):
        assert torch.allclose(forward(model, ours, ids), forward(model, own, ids), atol=1e-4)
        batch, removed = len(ids), choose(ids.shape[1])
        call = (8, 4)[step] if step < 2 else choose(9)  # the first two rows own what they do not share, and change places
        changes = {
            0: ("batch_repeat_interleave", 2 if batch <= 3 else 1),
            1: ("batch_select_indices", torch.tensor(choose(batch, max(2, batch - 1)))),
            2: ("batch_select_indices", torch.arange(batch) != max(1, batch // 2)),  # a mask
            3: ("reorder_cache", torch.tensor(choose(batch, batch))),
            4: ("reorder_cache", torch.tensor([*reversed(range(min(2, batch))), *range(2, batch)])),
        }
        for cache in (ours, own):
            cache.crop(-removed)
            if call in changes:
                name, argument = changes[call]
                getattr(cache, name)(argument)
        if call == 6:
            ours.offload()
            happened.add("offload")
        if call in (3, 4) and batch >= 3 and changes[call][1].tolist() != [*range(batch)]:
            happened.add("reorder of three rows or more")
        if 2 <= ours.batch_size < batch:
            happened.add("shrink to two rows or more")
        assert ours.get_seq_length() == own.get_seq_length()
        assert ours.get_mask_sizes(3, 0) == own.get_mask_sizes(3, 0)
        if call == 5 and len(left) < 3:
            left.append((ours, [each.clone() for each in states_of(ours)]))
            ours = copy.deepcopy(ours)
        ours.check()
        ids = torch.tensor(choose(198, ours.batch_size, choose(3) + 1)) + 1
    for cache, states in left:
        assert all(map(torch.equal, states, states_of(cache)))
        cache.check()
        cache.close()
    ours.close()
    assert happened == {"copy", "offload", "reorder of three rows or more", "shrink to two rows or more"}


def test_beams_know_how_far_they_are_the_same() -> None:
    lineage = Lineage.of_prompts([0, 0, 0]).followed(10, forked=True)
    lineage = lineage.select([0, 0, 2]).followed(13, forked=False)  # 1 goes on from 0
    assert lineage.common[0, 1] == 13 and lineage.common[0, 2] == lineage.common[1, 2] == 10
    assert lineage.select([1, 0, 2]).moves() == ([1, 0], [0, 1], 13)
    assert lineage.select([0, 1, 1]).moves() == ([1], [2], 10)
    cut = lineage.cut(7)
    assert (cut.common[0, 1], cut.own_from) == (7, 7)


def test_rows_of_other_prompts_are_forked_and_not_copied() -> None:
    lineage = Lineage.of_prompts([0, 0, 1, 1]).followed(10, forked=True)
    assert lineage.select([0, 1, 1, 3]).moves() is None  # row 2 has nothing in common with row 1, and its pages are shared
    assert Lineage.of_prompts([0, 1]).select([1, 0]).moves() is not None  # no page of these is shared


# equal prompts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_order_of_a_sum_makes_no_other_prompt(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs, weights = torch.randn(1500, 512), torch.randn(512, 64)
    whole, backwards = inputs @ weights, inputs.flip(1) @ weights.flip(0)
    assert not torch.equal(whole, backwards)
    states = torch.stack([whole, backwards, whole.roll(1, 0)]).to(dtype).unflatten(-1, (2, 32)).transpose(1, 2)
    assert batch_module.prompts(states, states) == [0, 0, 1]
    other = states.clone()
    other[1, :, 700] = states[1, :, 701]  # one token of them all
    assert batch_module.prompts(other, other) == [0, 1, 2]
    assert batch_module.prompts(states, other) == [0, 1, 2]
    assert batch_module.agree(states, states, [0, 0, 1]) and not batch_module.agree(states, states, [0, 0, 0])


@pytest.mark.parametrize(
    ("dtype", "where", "factor", "same"),
    [
        (torch.float32, (3, 17, 5), 1.2, False),
        (torch.bfloat16, (3, 17, 5), 1.2, False),
        (torch.bfloat16, (..., slice(None, None, 32)), 1 + 2**-7, True),  # few last bits
        (torch.bfloat16, (..., slice(None, None, 4)), 1 + 2**-7, False),  # many
    ],
)
def test_more_than_rounding_makes_another_prompt(dtype: torch.dtype, where: Any, factor: float, same: bool) -> None:
    states = torch.randn(1, 4, 50, 128).add(3.0).to(dtype).repeat(2, 1, 1, 1)
    other = states.clone()
    other[1][where] *= factor
    expected = [0, 0] if same else [0, 1]
    assert batch_module.prompts(other, states) == batch_module.prompts(states, other) == expected
    assert batch_module.prompts(states, states) == [0, 0]


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
        monkeypatch.setattr(batch_module, "COMPARED_BYTES", most_bytes)
        with Temporaries() as temporaries:
            assert batch_module.prompts(states, states) == [0, 0, 0, 0, 0, 1, 1, 1]
            assert batch_module.agree(states, states, [0, 0, 0, 0, 0, 1, 1, 1])
        assert most_bytes / 4 < temporaries.most_bytes < 1.05 * most_bytes


SLOW = {"rope_type": "default", "rope_theta": 1e6}
"""A rotary embedding as of Qwen: most of its turns are lost in the rounding of bfloat16."""


@pytest.mark.parametrize("make", [lambda: llama(head_dim=128, rope_parameters=SLOW), gpt_neox], ids=["slow", "a quarter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_tokens_at_other_positions_are_other_prompts(pool: Pool, make: Any, dtype: torch.dtype) -> None:
    model = make().to(dtype)
    positions = torch.arange(1, 21).repeat(6, 1)
    positions[2:4] -= 1  # as behind a pad
    positions[4:, 7:] += 1
    with VmmCache(model.config, pool, max_tokens=4096) as cache:
        forward(model, cache, ids_of(*[0] * 6, num_tokens=20), position_ids=positions)
        assert parents(cache) == (0, 0, 1, 1, 2, 2)


def test_rows_that_a_hook_changes_are_not_shared_if_one_says_so(pool: Pool) -> None:
    model = llama(initializer_range=0.3)
    steer = torch.tensor([0.0, 3.0])[:, None, None]
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, output: output + steer)
    ids = ids_of(0, 0, num_tokens=20)
    own = DynamicCache(config=model.config)
    forward(model, own, ids)
    with VmmCache(model.config, pool, share_prompts=False) as cache:
        forward(model, cache, ids)
        with copy.deepcopy(cache) as other:
            other.reset()
            forward(model, other, ids)
            for layer in range(4):
                assert torch.equal(cache.states(layer)[0], own.layers[layer].keys)
                assert torch.equal(other.states(layer)[0], own.layers[layer].keys)


def test_a_layer_of_shared_prompts_sends_nothing_to_the_device(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tensor, made = llama(), torch.tensor, []
    monkeypatch.setattr(torch, "tensor", lambda *given, **how: (made.append(given), tensor(*given, **how))[1])
    with VmmCache(model.config, pool) as cache:
        for _ in range(2):
            forward(model, cache, ids_of(0, 0, num_tokens=20))
    indices = [given for given, *_ in made if isinstance(given, tuple)]
    assert indices == [(0,), (0, 0)], "for all layers and passes: which rows to write, and which to see"


# how rows are written


@pytest.fixture
def far_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written as where torch would split a copy."""
    monkeypatch.setattr(batch_module, "splits_a_copy", lambda device, span_bytes: True)


def append(cache: VmmCache, num_layers: int, num_tokens: int) -> None:
    """A pass of random keys and values, of a batch of 8."""
    for layer in range(num_layers):
        cache.update(*torch.randn(2, 8, 2, num_tokens, 32), layer)


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


@pytest.mark.parametrize("make", [wide_llama, lambda: gemma3(16)], ids=["full", "hybrid"])
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

    def streams(self) -> set[tuple[str, ...]]:
        """The streams that one index was read on, for each."""
        of_index: dict[int, set[str]] = {}
        for index, stream in self.read:
            of_index.setdefault(index.untyped_storage()._cdata, set()).add(stream)
        return {tuple(sorted(streams)) for streams in of_index.values()}


def test_an_index_is_read_on_the_stream_that_it_was_made_on_and_no_other(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, far_slots: None
) -> None:
    """Another one might read it before it is written, or after its memory was reused."""
    recorded: list[Any] = []
    monkeypatch.setattr(KVCache, "record_stream", lambda cache, stream: recorded.append(stream))
    with VmmCache(llama().config, pool) as cache, torch.inference_mode(), IndicesByStream() as indices:
        monkeypatch.setattr(batch_module, "current_stream", lambda device: indices.stream)
        for layer in range(4):
            cache.update(*torch.randn(2, 1, 2, 3, 32).repeat_interleave(8, dim=1), layer)  # equal prompts, kept once
        for stream in ("first", "second", "second", "first", "third"):
            indices.stream = stream
            cache.states(2)
        assert recorded == ["first", "second", "second", "first", "first", "third"]
        for stream in ("third", "second", "first"):
            indices.stream = stream
            append(cache, 4, 1)
        indices.stream = "second"
    assert recorded[-2:] == ["first", "second"]  # what is closed there waits too
    assert indices.streams() == {("first",), ("second",), ("third",)}


def test_a_deep_copy_on_another_stream_makes_indices_of_its_own(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "record_stream", lambda cache, stream: None)
    with VmmCache(llama().config, pool) as cache, torch.inference_mode(), IndicesByStream() as indices:
        monkeypatch.setattr(batch_module, "current_stream", lambda device: indices.stream)
        for layer in range(4):
            cache.update(*torch.randn(2, 1, 2, 3, 32).repeat_interleave(8, dim=1), layer)  # equal prompts, kept once
        cache.states(2)
        with copy.deepcopy(cache) as other:
            for each, indices.stream in ((other, "second"), (cache, "first")):
                each.states(2)
    assert indices.streams() == {("first",), ("second",)}
