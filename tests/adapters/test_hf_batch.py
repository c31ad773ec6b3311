"""A batch that is repeated, selected and reordered, against transformers' own cache."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from tests.adapters.hf_models import gemma3, gpt_neox, llama, wide_llama
from vmmkv import MIB, Pool
from vmmkv.adapters.transformers import VmmCache
from vmmkv.adapters.transformers import batch as batch_module
from vmmkv.adapters.transformers.batch import Batch, Lineage


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_are_compared_in_little_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(1, 2, 200, 64, generator=torch.Generator().manual_seed(0)).to(dtype).repeat(8, 1, 1, 1)
    states[5:, :, 150] += 0.3
    for most_bytes in (2 * MIB, 5000):  # less than one token of all pairs takes
        monkeypatch.setattr(batch_module, "_MOST_BYTES", most_bytes)
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
    indices = Batch._indices_of
    model = llama()
    ids = random_ids(torch.Generator().manual_seed(0), 1, 20).expand(2, -1)

    def spy(self: Batch, *arguments: Any) -> Any:
        sent.append(id(indices(self, *arguments).leaders))
        return indices(self, *arguments)

    monkeypatch.setattr(Batch, "_indices_of", spy)
    with VmmCache(model.config, pool) as cache, torch.inference_mode():
        model(ids, past_key_values=cache)
        model(ids, past_key_values=cache)
    assert len(sent) == 12 and len(set(sent)) == 1
