"""What a VmmCache does not support, and what it says."""

import copy
import gc
from typing import Any

import pytest
import torch
from transformers import BartConfig, BloomConfig, DynamicCache, Mamba2Config, Qwen3NextConfig

from tests.adapters.hf_models import gemma3, generated, llama, prompts
from vmmkv import MIB, Closed, DriverError, KVCache, LayoutError, Pool, SequenceTooLong
from vmmkv.adapters.transformers import VmmCache
from vmmkv.adapters.transformers import batch as batch_module

IDS = torch.randint(1, 199, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BartConfig(), "bart is an encoder and a decoder"),
        (Qwen3NextConfig(num_hidden_layers=4), r"LinearAttentionLayer in layers 0, 1, 2\. .*use DynamicCache"),
        (Mamba2Config(num_hidden_layers=2), "mamba2 keeps more than keys and values by token: .* in layers 0, 1"),
    ],
)
def test_models_of_other_kinds_are_refused(pool: Pool, config: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        VmmCache(config, pool)


def test_arguments_of_other_kinds_are_refused(pool: Pool, model: Any) -> None:
    with pytest.raises(TypeError, match=r"such as model\.config"):
        VmmCache(model, pool)
    with pytest.raises(TypeError, match="takes a Pool"):
        VmmCache(model.config, torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="both must be at least 1"):
        VmmCache(model.config, pool, max_tokens=0)
    with pytest.raises(ValueError, match="give max_tokens"):
        VmmCache(BloomConfig(), pool)


def test_a_closed_pool_is_refused_when_the_cache_is_made(model: Any) -> None:
    with Pool("cpu", budget_bytes=64 * MIB) as pool:
        pass
    with pytest.raises(Closed, match="the pool of this VmmCache is closed"):
        VmmCache(model.config, pool)


def test_a_pool_that_was_closed_is_said_by_whatever_needs_it(model: Any) -> None:
    with Pool("cpu", budget_bytes=64 * MIB) as pool:
        cache = VmmCache(model.config, pool)
        with torch.no_grad():
            model(IDS, past_key_values=cache)
    zeros = torch.zeros(2, 2, 1, 32)
    for use in (
        lambda: model(IDS[:, :1], past_key_values=cache),
        lambda: generated(model, cache, prompts(20)),
        lambda: cache.update(zeros, zeros, 0),
        lambda: cache.states(0),
        lambda: cache.layers[0].keys,
        cache.reset,
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0])),
        lambda: copy.deepcopy(cache),
    ):
        with torch.no_grad(), pytest.raises(Closed, match=r"^the pool of this VmmCache is closed; make another"):
            use()
    assert cache.get_seq_length() == 9
    assert repr(cache) == "<VmmCache on cpu, closed>"
    cache.close()
    with pytest.raises(Closed, match=r"^this VmmCache is closed; make another"):
        cache.reset()


def test_gradients_are_refused(pool: Pool) -> None:
    model = llama()
    with VmmCache(model.config, pool) as cache:
        with pytest.raises(NotImplementedError, match=r"torch\.no_grad\(\)"):
            model(IDS, past_key_values=cache)
        with torch.no_grad():
            model(IDS, past_key_values=cache)
        with torch.inference_mode():
            model(IDS[:, :1], past_key_values=cache)
        with torch.no_grad():
            model(IDS[:, :2], past_key_values=cache)
        model.requires_grad_(False)
        model(IDS[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 13


def test_another_batch_is_refused(pool: Pool, model: Any) -> None:
    with VmmCache(model.config, pool) as cache, torch.no_grad():
        model(IDS, past_key_values=cache)
        with pytest.raises(ValueError, match=r"a batch of 2, and the model computes one of 1: reset\(\)"):
            model(IDS[:1], past_key_values=cache)
        with pytest.raises(ValueError, match=r"rows \[0, 2\] of a batch of 2"):
            cache.reorder_cache(torch.tensor([0, 2]))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_pass_without_a_new_token_is_refused_and_reset_begins_anew(pool: Pool, model: Any, size: int) -> None:
    """Of a prompt that is half as long as what the cache holds, transformers leaves nothing to compute."""
    other = {"input_ids": IDS[:1, :5].repeat(size, 1)}
    with VmmCache(model.config, pool) as cache:
        generated(model, cache, {"input_ids": IDS}, min_new_tokens=5, max_new_tokens=5)
        with pytest.raises(ValueError, match=r"batch of 2 with 13 tokens each.* reset\(\) begins anew.* give all 13 tokens"):
            generated(model, cache, other)
        cache.check()
        cache.reset()
        assert len(generated(model, cache, other)) == size


def test_another_model_is_refused(pool: Pool, model: Any) -> None:
    with VmmCache(model.config, pool) as cache, torch.no_grad():
        model(IDS, past_key_values=cache)
        with pytest.raises(LayoutError, match=r"gives \[2, 1, 9, 32\] torch.float32 .*rows are \[2, 2, 9, 32\]"):
            llama(num_key_value_heads=1)(IDS, past_key_values=cache)
        with pytest.raises(ValueError, match="layer 4 keeps no keys"):
            cache.update(torch.zeros(2, 2, 1, 32), torch.zeros(2, 2, 1, 32), 4)


@pytest.mark.parametrize("num_tokens", [1, 4, 5000])
def test_a_layer_with_other_tokens_than_the_first_is_refused(pool: Pool, model: Any, num_tokens: int) -> None:
    states, others = torch.randn(2, 2, 3, 32), torch.randn(2, 2, num_tokens, 32)
    with VmmCache(model.config, pool) as cache, torch.no_grad():
        with pytest.raises(LayoutError, match=f"keys of 2 rows with 3 tokens and values of 2 with {num_tokens}"):
            cache.update(states, others, 0)
        for tokens in (3, 6):
            cache.update(states, states, 0)
            for keys, values in ((others, others), (states, others), (others, states), (states[:1], states[:1])):
                with pytest.raises(LayoutError, match=r"layer 1 gives .* this pass is one of 2 with 3"):
                    cache.update(keys, values, 1)
            for layer in range(1, 4):
                cache.update(states, states, layer)
            assert cache.get_seq_length() == tokens


def test_a_first_pass_that_failed_does_not_say_the_shapes(pool: Pool, model: Any) -> None:
    states = torch.randn(2, 2, 4, 32)
    with VmmCache(model.config, pool) as cache, torch.no_grad():
        cache.update(states.half(), states, 0)
        with pytest.raises(LayoutError, match="one shape and type"):
            cache.update(states, states, 1)
        cache.reset()
        model(IDS, past_key_values=cache)
        assert cache.get_seq_length() == 9
        cache.check()
        cache.reset()
        with pytest.raises(LayoutError, match="another model wants"):
            cache.update(states.half(), states, 0)


def test_addresses_that_there_are_not_name_what_would_take_less(pool: Pool, model: Any) -> None:
    with VmmCache(model.config, pool, max_tokens=2**30) as cache, torch.no_grad():
        with pytest.raises(DriverError, match=r"64 slots of max_tokens=1073741824 take 128.0 TiB.* max_tokens=134217728\)"):
            model(IDS, past_key_values=cache)
        assert cache.batch_size == -1


def test_a_stream_that_another_one_follows_is_waited_for(pool: Pool, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Any] = []
    streams: list[Any] = ["first", "first", "second"]
    monkeypatch.setattr(KVCache, "record_stream", lambda _, stream: recorded.append(stream))
    monkeypatch.setattr(batch_module, "_current_stream", lambda _: streams[0])
    with VmmCache(model.config, pool) as cache, torch.no_grad():
        for expected in ([], [], ["first", "second"]):
            model(IDS, past_key_values=cache)
            assert recorded == expected
            streams = streams[1:] or streams
        streams = ["third"]
    assert recorded == ["first", "second", "second", "third"]  # what is closed there waits too


def test_a_cache_or_a_copy_that_is_not_closed_says_so(pool: Pool, model: Any) -> None:
    with Pool("cpu", 64 * MIB, driver=pool.driver) as small, VmmCache(model.config, small) as cache, torch.no_grad():
        model(IDS, past_key_values=cache)
        other = copy.deepcopy(cache)
        with pytest.warns(ResourceWarning, match="VmmCache on cpu: a batch of 2 .* was not closed"):
            del other
            gc.collect()


def test_a_pass_that_failed_is_taken_back(pool: Pool, model: Any) -> None:
    with VmmCache(model.config, pool) as cache, VmmCache(model.config, pool) as other, torch.no_grad():
        for each in (cache, other):
            model(IDS, past_key_values=each)
        states = torch.randn(2, 2, 3, 32)
        for layer in range(2):
            cache.update(states, states, layer)
        assert [cache.get_seq_length(layer) for layer in range(4)] == [12, 12, 9, 9]
        for refused in (lambda: cache.update(states, states, 0), lambda: cache.reorder_cache(torch.tensor([0, 1]))):
            with pytest.raises(RuntimeError, match=r"crop\(0\) takes"):
                refused()
        cache.crop(0)
        cache.check()
        more = IDS[:, :4]
        assert torch.equal(model(more, past_key_values=cache).logits, model(more, past_key_values=other).logits)


def test_too_many_tokens_are_refused_before_any_is_written(pool: Pool, model: Any) -> None:
    with VmmCache(model.config, pool, max_tokens=10) as cache, torch.no_grad():
        model(IDS, past_key_values=cache)
        with pytest.raises(SequenceTooLong, match="max_tokens=10"):
            model(IDS[:, :2], past_key_values=cache)
        assert cache.get_seq_length() == 9
        model(IDS[:, :1], past_key_values=cache)


@pytest.mark.parametrize("removed", [1, -10])
def test_a_crop_is_told_how_many_tokens_to_remove(pool: Pool, model: Any, removed: int) -> None:
    with VmmCache(model.config, pool) as cache, torch.no_grad():
        model(IDS, past_key_values=cache)
        with pytest.raises(ValueError, match="minus the number of tokens to remove, of 9"):
            cache.crop(removed)


def test_there_is_nothing_to_see_before_the_first_token(pool: Pool, model: Any) -> None:
    with VmmCache(model.config, pool) as cache:
        assert cache.layers[0].keys is None and not cache.is_initialized
        with pytest.raises(ValueError, match="no tokens yet"):
            cache.states(0)
        cache.crop(0)
        cache.reorder_cache(torch.tensor([], dtype=torch.long))
        cache.batch_repeat_interleave(3)
        with copy.deepcopy(cache) as other:
            assert other.get_mask_sizes(5, 0) == (5, 0)
        with torch.no_grad():
            model(IDS, past_key_values=cache)
        assert cache.is_initialized


def test_it_can_be_iterated_as_a_dynamic_cache(pool: Pool) -> None:
    model = gemma3(4)
    own = DynamicCache(config=model.config)
    with VmmCache(model.config, pool) as cache, torch.no_grad():
        assert [each[:2] for each in cache] == [(None, None)] * 4
        for each in (cache, own):
            model(IDS, past_key_values=each)
        for ours, theirs in zip(cache, own, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert [window is None for _, _, window in cache] == [False] * 3 + [True]


def test_layers_refer_to_the_cache(pool: Pool, model: Any) -> None:
    with VmmCache(model.config, pool) as cache:
        for call in (cache.layers[0].crop, cache.layers[0].reorder_cache, cache.layers[0].reset):
            with pytest.raises(NotImplementedError, match="call this on the cache"):
                call()
        with pytest.raises(NotImplementedError, match="device 'cpu'"):
            cache.layers[0].offload()
        with pytest.raises(NotImplementedError, match="as tokens come"):
            cache.layers[0].lazy_initialization(None, None)


def test_a_closed_cache_says_so(pool: Pool, model: Any) -> None:
    cache = VmmCache(model.config, pool)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        assert repr(cache) == "<VmmCache on cpu: a batch of 2 with 9 tokens each>"
        cache.close()
        cache.close()
        assert repr(cache) == "<VmmCache on cpu, closed>"
        with pytest.raises(Closed, match="make another"):
            model(IDS, past_key_values=cache)


def test_a_compiled_model_breaks_its_graph_at_the_cache(pool: Pool) -> None:
    model = llama(num_hidden_layers=1)
    with VmmCache(model.config, pool) as cache, VmmCache(model.config, pool) as other, torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        for length in (9, 1):
            ids = IDS[:, :length]
            assert torch.allclose(
                compiled(ids, past_key_values=cache).logits, model(ids, past_key_values=other).logits, atol=1e-5
            )
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
            torch.compile(model, backend="eager", fullgraph=True)(IDS[:, :1], past_key_values=cache)
        torch.compiler.reset()


def test_a_cache_that_is_not_named_again_is_still_the_users(pool: Pool, model: Any) -> None:
    """What `generate` leaves behind can be asked, and given to it again."""
    with VmmCache(model.config, pool) as cache:
        answer = generated(model, cache, prompts(7), max_new_tokens=5)
        assert cache.get_seq_length() == len(answer[0]) - 1
        assert repr(cache) == "<VmmCache on cpu: a batch of 1 with 11 tokens each>"
        assert cache.get_max_length() == 8192 and cache.is_sliding == [False] * 4 and not cache.is_compileable
