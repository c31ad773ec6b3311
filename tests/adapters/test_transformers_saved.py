"""Keys and values of a VmmCache outside of it: as tensors that torch copies."""

import copy
import pickle

import pytest
import torch

from tests.adapters.models import forward, gemma3, llama
from vmmkv import Pool, ViewNotCloned
from vmmkv.adapters.transformers import VmmCache


def ids(*rows: int, num_tokens: int) -> torch.Tensor:
    """A prompt for each row: rows of one number are equal."""
    return torch.stack([torch.arange(num_tokens) * (3 + row) % 97 + 1 for row in rows])


@pytest.mark.parametrize("make", [llama, lambda: gemma3(16)], ids=["full", "windows"])
def test_views_of_one_sequence_are_copied_as_they_are_and_stay_views(pool: Pool, make) -> None:
    model, prompt = make(), ids(0, num_tokens=45)
    with VmmCache(model.config, pool) as cache, VmmCache(model.config, pool) as alone:
        for chunk in prompt.split(20, dim=1):
            logits, of_alone = (forward(model, each, chunk) for each in (cache, alone))
        for layer in range(len(cache.layers)):
            of_pass = cache._seen(cache._rows(layer), layer, 0)  # what a pass reads, over the whole arena
            for view, seen in zip(cache.states(layer), of_pass, strict=True):
                assert (view.shape, view.data_ptr(), view.stride()[1:]) == (seen.shape, seen.data_ptr(), seen.stride()[1:])
                for copied in (copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
                    assert torch.equal(copied, seen)
        with pytest.warns(UserWarning, match="does not reach the cache"):
            cache.layers[0].keys.share_memory_()
        logits, of_alone = (forward(model, each, prompt[:, :1]) for each in (cache, alone))
        assert torch.equal(logits, of_alone)


def test_views_of_several_sequences_are_refused_and_copies_are_not(pool: Pool) -> None:
    model = llama()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids(0, 1, num_tokens=20))
        for view in cache.states(0):
            with pytest.raises(ViewNotCloned):
                copy.deepcopy(view)
        cache.reset()
        forward(model, cache, ids(0, 0, num_tokens=20))  # kept once
        keys, _ = cache.states(0)
        assert torch.equal(copy.deepcopy(keys), keys) and torch.equal(keys[0], keys[1])
