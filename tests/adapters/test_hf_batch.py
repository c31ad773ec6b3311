"""A batch that is repeated, selected and reordered, against transformers' own cache."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.adapters.hf_models import gemma3, wide_llama
from vmmkv import Pool
from vmmkv.adapters import hf_twins
from vmmkv.adapters.hf import VmmCache
from vmmkv.adapters.hf_lineage import Lineage


def random_ids(generator: torch.Generator, batch: int, num_tokens: int) -> torch.Tensor:
    return torch.randint(1, 199, (batch, num_tokens), generator=generator)


@pytest.mark.parametrize("seed", range(4))
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
    moves = lineage.select([1, 0, 2]).moves()
    assert moves is not None and (moves.sources, moves.targets, moves.first_token) == ([1, 0], [0, 1], 13)
    moves = lineage.select([0, 1, 1]).moves()
    assert moves is not None and (moves.sources, moves.targets, moves.first_token) == ([1], [2], 10)


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
    assert hf_twins.prompts(states, states) == [0, 0, 1]
    other = states.clone()
    other[1, :, 700] = states[1, :, 701]  # one token of them all
    assert hf_twins.prompts(other, other) == [0, 1, 2]
    assert hf_twins.prompts(states, other) == [0, 1, 2]
    assert hf_twins.agree(states, states, [0, 0, 1]) and not hf_twins.agree(states, states, [0, 0, 0])
