"""Token for token what transformers' own cache gives, in every way to generate."""

import contextlib
import copy
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    BloomConfig,
    DynamicCache,
    GPTNeoXJapaneseConfig,
    Mamba2Config,
    MllamaTextConfig,
    OpenAIGPTConfig,
    ProphetNetConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    XLNetConfig,
)

from tests.adapters.models import MODELS, assert_same, forward, gemma3, generated, llama, prompts
from tests.attending import attending_by
from vmmkv import MIB, Closed, LayoutError, OutOfSlots, Pool, SequenceTooLong
from vmmkv.adapters.transformers import VmmCache
from vmmkv.model_config import read

# the same tokens

WAYS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "greedy": ((45,), {}),
    "sampling": ((45,), {"do_sample": True}),
    "four beams": ((45,), {"num_beams": 4}),
    "three answers": ((45,), {"do_sample": True, "num_return_sequences": 3}),
    "prompt lookup": ((45,), {"prompt_lookup_num_tokens": 4}),
    "chunks, then beams": ((45,), {"prefill_chunk_size": 7, "num_beams": 3}),
    "padded": ((45, 3, 17, 40, 1, 29, 44, 8), {}),
    "padded, beams": ((37, 12, 25), {"num_beams": 4, "num_return_sequences": 2}),
}
"""Lengths of the prompts, and options of `generate`."""


def nightly_but(names: Iterable[str], by_default: Iterable[str]) -> list[Any]:
    """Parameters, all but a few of which run nightly."""
    return [pytest.param(name, marks=() if name in by_default else pytest.mark.nightly) for name in names]


KINDS = ("grouped", "multi-head", "multi-query", "pages of 32 tokens", "sliding", "sliding and full, head size 256")


@pytest.fixture(scope="module", params=nightly_but(KINDS, ("grouped", "sliding and full, head size 256")))
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


@pytest.mark.parametrize(
    "way", nightly_but(WAYS, ("four beams", "prompt lookup", "chunks, then beams", "padded", "padded, beams"))
)
def test_the_tokens_are_those_of_transformers_own_cache(model: Any, pool: Pool, way: str) -> None:
    lengths, options = WAYS[way]
    inputs = prompts(*lengths)
    if len(lengths) == 1:
        inputs["input_ids"][:, 20:40] = inputs["input_ids"][:, :20]  # so that prompt lookup finds something
    assert_same(model, pool, inputs, **options)


@pytest.mark.parametrize("kind", ["keys wider than values", "heads of two sizes, layers that read others' rows"])
def test_layers_of_other_shapes(pool: Pool, kind: str) -> None:
    model = MODELS[kind]()
    assert_same(model, pool, prompts(40, 23))
    assert_same(model, pool, prompts(40), num_beams=3)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["grouped", "sliding and full, head size 256"])
def test_three_thousand_tokens_in_chunks(pool: Pool, name: str) -> None:
    assert_same(MODELS[name](), pool, prompts(3000), prefill_chunk_size=512, max_new_tokens=8)


def test_eager_attention_reads_the_strided_views(pool: Pool) -> None:
    for make in (llama, lambda: gemma3(16)):
        model = make()
        model.set_attn_implementation("eager")
        assert_same(model, pool, prompts(33, 20))


def test_half_precision_keeps_its_type(pool: Pool) -> None:
    assert_same(llama().to(torch.bfloat16), pool, prompts(33, 20))


def test_a_chat_goes_on_from_the_rows_of_the_last_turn(model: Any, pool: Pool) -> None:
    ours, own = VmmCache(model.config, pool), DynamicCache(config=model.config)
    with ours:
        ids = prompts(20)["input_ids"]
        for turn in range(3):
            mask = torch.ones_like(ids)
            answers = [generated(model, cache, {"input_ids": ids, "attention_mask": mask}) for cache in (ours, own)]
            assert answers[0] == answers[1]
            assert ours.get_seq_length() == own.get_seq_length() == len(answers[0][0]) - 1
            ids = torch.cat([torch.tensor(answers[0]), prompts(9, seed=turn)["input_ids"]], dim=1)
        ours.check()


def test_a_draft_models_tokens_are_taken_back(pool: Pool) -> None:
    assert_same(gemma3(16), pool, prompts(30), assistant_model=llama(num_hidden_layers=1))


@pytest.mark.nightly
def test_smollm2_in_every_way(smollm2: Path, pool: Pool) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    texts = ["The colours of the rainbow are red, orange,", "Once upon a time", "Hello", "A, B, C, D, E, F, G,"]
    inputs = dict(tokenizer(texts, return_tensors="pt", padding=True))
    options = {"pad_token_id": tokenizer.pad_token_id, "max_new_tokens": 12}
    first = {name: tensor[:1] for name, tensor in inputs.items()}
    assert_same(model, pool, first, prompt_lookup_num_tokens=3, **options)
    for way in ({}, {"num_beams": 3}, {"do_sample": True}, {"do_sample": True, "num_return_sequences": 3}):
        assert_same(model, pool, inputs, **options, **way)


# what is refused

IDS = prompts(9, 9)["input_ids"]


@pytest.fixture(scope="module")
def small() -> Any:
    return llama()


@pytest.fixture
def cache(small: Any, pool: Pool) -> Iterator[VmmCache]:
    with VmmCache(small.config, pool) as cache:
        yield cache


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BartConfig(), r"\(bart\) is an encoder and a decoder"),
        (Qwen3NextConfig(num_hidden_layers=4), r"a state \(gated delta rule\) in layers 0 to 2\. .*use DynamicCache"),
        (Mamba2Config(num_hidden_layers=2), "mamba2 keeps more than keys and values by token: a state .* in layers 0, 1"),
        (RecurrentGemmaConfig(num_hidden_layers=3), r"recurrent_gemma keeps more .* a state \(RG-LRU\) in layers 0, 1"),
        (MllamaTextConfig(), r"keys and values of another input \(cross-attention\) in layers 3, 8, .* use DynamicCache"),
        (RwkvConfig(num_hidden_layers=2), r"rwkv keeps more than keys and values by token: a state \(RWKV\) in layers 0, 1"),
        (XLNetConfig(), "xlnet: XLNetLMHeadModel takes no past_key_values .* call it without a cache"),
        (OpenAIGPTConfig(), "openai-gpt: .* takes no past_key_values"),
        (GPTNeoXJapaneseConfig(), "gpt_neox_japanese: its attention takes contiguous keys alone, .* use DynamicCache"),
    ],
)
def test_models_of_other_kinds_are_refused(pool: Pool, config: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        VmmCache(config, pool)


def test_a_configuration_that_turns_caches_off_is_refused(pool: Pool, small: Any) -> None:
    config = copy.deepcopy(small.config)
    config.use_cache = False
    with pytest.raises(ValueError, match=r"use_cache=False, .* set model\.config\.use_cache"):
        VmmCache(config, pool)


@pytest.mark.parametrize(
    "config",
    [
        BartConfig(
            d_model=64, encoder_layers=2, decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=96, vocab_size=1000
        ),
        ProphetNetConfig(
            hidden_size=64, num_encoder_layers=3, num_decoder_layers=2, num_decoder_attention_heads=4, decoder_ffn_dim=96,
            vocab_size=1000,
        ),
    ],
    ids=["more layers than its encoder", "fewer"],
)  # fmt: skip
def test_a_decoder_alone_has_its_own_number_of_layers_and_heads(pool: Pool, config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    found = read(model.config)
    assert (len(found.layers), found.num_heads) == (len(model.get_decoder().layers), 4)
    options = {"max_new_tokens": 12, "do_sample": False, **prompts(20)}
    with VmmCache(model.config, pool) as cache:
        ours = model.generate(past_key_values=cache, **options)
    assert torch.equal(ours, model.generate(use_cache=False, **options))  # their cache counts the encoder


def test_arguments_of_other_kinds_are_refused(pool: Pool, small: Any) -> None:
    with pytest.raises(TypeError, match=r"such as model\.config"):
        VmmCache(small, pool)
    with pytest.raises(TypeError, match="takes a Pool"):
        VmmCache(small.config, torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="both must be at least 1"):
        VmmCache(small.config, pool, max_tokens=0)
    with pytest.raises(ValueError, match="give max_tokens"):
        VmmCache(BloomConfig(), pool)


def test_a_closed_pool_or_cache_is_refused_by_every_call(small: Any) -> None:
    with Pool("cpu", budget_bytes=64 * MIB) as pool:
        cache = VmmCache(small.config, pool)
        forward(small, cache, IDS)
    with pytest.raises(Closed, match="the pool of this VmmCache is closed"):
        VmmCache(small.config, pool)
    zeros = torch.zeros(2, 2, 1, 32)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: forward(small, cache, IDS[:, :1]),
        lambda: generated(small, cache, prompts(20)),
        lambda: cache.update(zeros, zeros, 0),
        lambda: cache.states(0),
        lambda: cache.layers[0].keys,
        cache.reset,
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0])),
        lambda: copy.deepcopy(cache),
    )
    for use in calls:
        with pytest.raises(Closed, match=r"^the pool of this VmmCache is closed; make another"):
            use()
    assert cache.get_seq_length() == 9
    assert repr(cache) == "<VmmCache on cpu, closed>"
    for _ in range(2):
        cache.close()
        with pytest.raises(Closed, match=r"^this VmmCache is closed; make another"):
            cache.reset()


def test_gradients_are_refused(cache: VmmCache) -> None:
    model = llama()
    with pytest.raises(NotImplementedError, match=r"torch\.no_grad\(\)"):
        model(IDS, past_key_values=cache)
    for mode, num_tokens in ((torch.no_grad(), 9), (torch.inference_mode(), 1), (torch.no_grad(), 2)):
        with mode:
            model(IDS[:, :num_tokens], past_key_values=cache)
    model.requires_grad_(False)
    model(IDS[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 13


def test_another_batch_is_refused(cache: VmmCache, small: Any) -> None:
    forward(small, cache, IDS)
    with pytest.raises(ValueError, match=r"a batch of 2, and the model computes one of 1: reset\(\)"):
        forward(small, cache, IDS[:1])
    with pytest.raises(ValueError, match=r"rows \[0, 2\] of a batch of 2"):
        cache.reorder_cache(torch.tensor([0, 2]))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_pass_without_a_new_token_is_refused_and_reset_begins_anew(cache: VmmCache, small: Any, size: int) -> None:
    """Of a prompt that is half as long as what the cache holds, transformers leaves nothing to compute."""
    other = {"input_ids": IDS[:1, :5].repeat(size, 1)}
    generated(small, cache, {"input_ids": IDS}, min_new_tokens=5, max_new_tokens=5)
    with pytest.raises(ValueError, match=r"batch of 2 with 13 tokens each.* reset\(\) begins anew.* give all 13 tokens"):
        generated(small, cache, other)
    cache.reset()
    assert len(generated(small, cache, other)) == size


def test_another_model_is_refused(cache: VmmCache, small: Any) -> None:
    forward(small, cache, IDS)
    with pytest.raises(LayoutError, match=r"gives \[2, 1, 9, 32\] torch.float32 .*rows are \[2, 2, 9, 32\]"):
        forward(llama(num_key_value_heads=1), cache, IDS)
    k, v = torch.zeros(2, 2, 2, 1, 32)
    with pytest.raises(ValueError, match="layer 4 keeps no keys"):
        cache.update(k, v, 4)
    for keys, values in ((k.half(), v), (k, v.half()), (k[:, :1], v), (k, v[..., :16]), (k.to("meta"), v)):
        with pytest.raises(LayoutError, match=r"layer 2 gives .* and its rows are \[2, 2, 1, 32\] torch\.float32 on cpu"):
            cache.update(keys, values, 2)


@pytest.mark.parametrize("num_tokens", [1, 4, 5000])
def test_a_layer_with_other_tokens_than_the_first_is_refused(cache: VmmCache, num_tokens: int) -> None:
    states, others = torch.randn(2, 2, 3, 32), torch.randn(2, 2, num_tokens, 32)
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


def test_a_first_pass_that_failed_does_not_say_the_shapes(cache: VmmCache, small: Any) -> None:
    states = torch.randn(2, 2, 4, 32)
    cache.update(states.half(), states, 0)
    with pytest.raises(LayoutError, match="one shape and type"):
        cache.update(states, states, 1)
    cache.reset()
    forward(small, cache, IDS)
    assert cache.get_seq_length() == 9
    cache.check()
    cache.reset()
    with pytest.raises(LayoutError, match="another model wants"):
        cache.update(states.half(), states, 0)
    with copy.deepcopy(cache) as other:  # of a pass that has failed
        forward(small, other, IDS)


def test_addresses_that_there_are_not_name_what_would_take_less(pool: Pool, small: Any) -> None:
    with VmmCache(small.config, pool, max_tokens=2**30) as cache:
        with pytest.raises(ValueError, match=r"slots=64 of max_tokens=1073741824 take 130.0 TiB .* max_tokens=[1-9]\d+ can$"):
            forward(small, cache, IDS)
        assert cache.batch_size == -1


def test_copies_that_are_garbage_give_their_slots_and_pages_back(pool: Pool, small: Any) -> None:
    with Pool("cpu", 64 * MIB, driver=pool.driver) as tight, VmmCache(small.config, tight, slots=6) as cache:
        forward(small, cache, IDS)
        (running,) = (rows.cache.sequences for rows in cache.batch.groups)
        for _ in range(9):
            copied = copy.deepcopy(cache)  # two slots of six
            forward(small, copied, IDS[:, :3])
            assert copied.get_seq_length() == 12
        del copied
        gc.collect()
        forward(small, cache, IDS[:, :1])
        assert len(running) == 2
        cache.check()


def test_a_copy_goes_on_when_the_cache_that_it_is_of_is_garbage(pool: Pool, small: Any) -> None:
    cache = VmmCache(small.config, pool)
    forward(small, cache, IDS)
    with copy.deepcopy(cache) as copied, VmmCache(small.config, pool) as other:
        forward(small, other, IDS)
        del cache
        gc.collect()
        assert torch.equal(*(forward(small, each, IDS[:, :4]) for each in (copied, other)))
        (rows,) = copied.batch.groups
        assert len(rows.cache.sequences) == 2
        copied.check()


def test_slots_that_copies_have_are_refused_in_words_of_copies(pool: Pool, small: Any) -> None:
    with VmmCache(small.config, pool, slots=6) as cache:
        forward(small, cache, IDS)
        with (
            copy.deepcopy(cache),
            copy.deepcopy(cache),
            pytest.raises(OutOfSlots, match=r"6 of them hold rows: close\(\) copies"),
        ):
            copy.deepcopy(cache)
        copy.deepcopy(cache).close()


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_cache_that_is_not_closed_says_so(pool: Pool, small: Any, has_copy: bool) -> None:
    with Pool("cpu", 64 * MIB, driver=pool.driver) as tight:
        cache = VmmCache(small.config, tight)
        forward(small, cache, IDS)
        if has_copy:
            copy.deepcopy(cache).close()
        with pytest.warns(ResourceWarning, match="VmmCache on cpu: a batch of 2 .* was not closed"):
            del cache
            gc.collect()


def test_a_pass_that_failed_is_taken_back(cache: VmmCache, pool: Pool, small: Any) -> None:
    states = torch.randn(2, 2, 3, 32)
    with VmmCache(small.config, pool) as other:
        for each in (cache, other):
            forward(small, each, IDS)
        for layer in range(2):
            cache.update(states, states, layer)
        assert [cache.get_seq_length(layer) for layer in range(4)] == [12, 12, 9, 9]
        for refused in (lambda: cache.update(states, states, 0), lambda: cache.reorder_cache(torch.tensor([0, 1]))):
            with pytest.raises(RuntimeError, match=r"crop\(0\) takes"):
                refused()
        cache.crop(0)
        cache.check()
        assert torch.equal(*(forward(small, each, IDS[:, :4]) for each in (cache, other)))


class FailsAt(TorchDispatchMode):
    """One operation of torch finds no memory: that of this number, from 0 on."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == -1:
            raise torch.OutOfMemoryError("told to fail")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("num_past", "is_held"), [(0, False), (5, False), (5, True)])
def test_a_pass_is_taken_back_at_whichever_operation_it_fails(pool: Pool, num_past: int, is_held: bool) -> None:
    """While the exception is there, and when it is gone."""
    model, errors = llama(num_hidden_layers=1), []
    past, new = IDS[:, :num_past], IDS[:, num_past:]
    with VmmCache(model.config, pool) as cache:
        expected = forward(model, DynamicCache(config=model.config), IDS)[:, num_past:]
        for number in itertools.count():
            cache.reset()
            if num_past:
                forward(model, cache, past)
            with contextlib.suppress(torch.OutOfMemoryError), FailsAt(number) as failing:
                try:
                    forward(model, cache, new)
                except torch.OutOfMemoryError as error:
                    errors += [error] * is_held
                    raise
            if failing.left >= 0:
                break
            cache.crop(0)
            assert cache.get_seq_length() == num_past, f"operation {number}"
            assert torch.allclose(forward(model, cache, new), expected, atol=1e-4), f"operation {number}"
        cache.check()
    assert number > 50


def test_a_pass_that_failed_behind_its_last_layer_is_taken_back_before_anything_else(cache: VmmCache, small: Any) -> None:
    forward(small, cache, IDS)
    with pytest.raises(ZeroDivisionError), hooked(small.lm_head, lambda *_: 1 / 0):
        forward(small, cache, IDS)
    for use in (lambda: forward(small, cache, IDS), lambda: copy.deepcopy(cache), cache.offload):
        with pytest.raises(RuntimeError, match=r"crop\(0\) takes"):
            use()
    with pytest.raises(ValueError, match="minus the number of tokens to remove, of 9"):
        cache.crop(-10)
    cache.crop(-2)
    assert cache.get_seq_length() == 7


def test_a_pass_whose_call_has_returned_is_kept_whatever_fails_then(cache: VmmCache, small: Any) -> None:
    class Draft(torch.nn.Module):
        def forward(self, past_key_values: VmmCache) -> None:
            for _ in range(2):
                small(IDS[:, :2], past_key_values=past_key_values)
                past_key_values.crop(0)
            small(IDS[:, :1], None, None, past_key_values)
            raise ZeroDivisionError

    forward(small, cache, IDS)
    with pytest.raises(ZeroDivisionError):
        forward(small, cache, IDS[:, : 1 // (cache.get_seq_length() - 9)])
    cache.crop(0)
    assert cache.get_seq_length() == 9
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        Draft()(cache)
    assert cache.get_seq_length() == 14


def test_an_exception_that_the_model_caught_and_kept_does_not_make_its_pass_a_failed_one(cache: VmmCache, small: Any) -> None:
    kept: list[Exception] = []

    def keep(*_: Any) -> None:
        try:
            raise ImportError
        except ImportError as error:
            kept.append(error)  # and with it the frames of all calls around this one

    with hooked(small.model.layers[0], keep), hooked(small.lm_head, keep):
        for num_tokens in (9, 18):
            forward(small, cache, IDS)
            cache.crop(0)
            assert cache.get_seq_length() == num_tokens
        with pytest.raises(ZeroDivisionError), hooked(small.lm_head, lambda *_: 1 / 0):
            forward(small, cache, IDS)
        with pytest.raises(RuntimeError, match=r"crop\(0\) takes"):
            forward(small, cache, IDS)
        cache.crop(0)
        assert cache.get_seq_length() == 18


@contextlib.contextmanager
def hooked(module: torch.nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_an_unfinished_pass_is_of_one_cache_and_not_of_its_copies(cache: VmmCache, small: Any) -> None:
    states = torch.randn(2, 2, 3, 32)
    forward(small, cache, IDS)
    with copy.deepcopy(cache) as other:
        for unfinished, each in ((other, cache), (cache, other)):
            unfinished.update(states, states, 0)
            forward(small, each, IDS[:, :1])
            assert each.get_seq_length() == 10
            unfinished.crop(0)
            each.crop(-1)


def test_too_many_tokens_are_refused_before_any_is_written(pool: Pool, small: Any) -> None:
    with VmmCache(small.config, pool, max_tokens=10) as cache:
        forward(small, cache, IDS)
        with pytest.raises(SequenceTooLong, match="max_tokens=10"):
            forward(small, cache, IDS[:, :2])
        assert cache.get_seq_length() == 9
        forward(small, cache, IDS[:, :1])


@pytest.mark.parametrize("removed", [1, -10])
def test_a_crop_is_told_how_many_tokens_to_remove(cache: VmmCache, small: Any, removed: int) -> None:
    forward(small, cache, IDS)
    with pytest.raises(ValueError, match="minus the number of tokens to remove, of 9"):
        cache.crop(removed)


def test_there_is_nothing_to_see_before_the_first_token(cache: VmmCache, small: Any) -> None:
    assert cache.layers[0].keys is None and not cache.is_initialized
    with pytest.raises(ValueError, match="no tokens yet"):
        cache.states(0)
    cache.crop(0)
    cache.reorder_cache(torch.tensor([], dtype=torch.long))
    cache.batch_repeat_interleave(3)
    with copy.deepcopy(cache) as other:
        assert other.get_mask_sizes(5, 0) == (5, 0)
    forward(small, cache, IDS)
    assert cache.is_initialized


def logits_without(model: Any, cache: DynamicCache, dropped: torch.Tensor, ids: torch.Tensor, window: int) -> torch.Tensor:
    """Of a pass whose tokens do not see `dropped` in layers of full attention, where every row is still there."""
    past, new = cache.get_seq_length(), ids.shape[1]
    seen = torch.arange(past + new)[None, :] <= torch.arange(past, past + new)[:, None]
    passed = torch.arange(past + new)[None, :] <= torch.arange(past, past + new)[:, None] - window
    masks = {"full_attention": seen.index_fill(1, dropped, False), "sliding_attention": seen & ~passed}
    first = max(0, past - window + 1)  # what the cache gives layers with windows
    masks = {name: mask[None, None, :, first if "sliding" in name else 0 :] for name, mask in masks.items()}
    return forward(model, cache, ids, attention_mask=masks if "gemma" in model.config.model_type else masks["full_attention"])


@pytest.mark.parametrize("attention", nightly_but(["vmmkv", "sdpa"], ["sdpa"]))
@pytest.mark.parametrize("kind", ["grouped", "sliding and full, head size 256"])
def test_after_a_compaction_the_logits_are_those_without_the_dropped_keys(pool: Pool, kind: str, attention: str) -> None:
    model = MODELS[kind]()
    window = getattr(model.config, "sliding_window", None) or 8192
    own, ids = DynamicCache(config=model.config), prompts(90)["input_ids"]
    with VmmCache(model.config, pool) as cache, attending_by(model, attention):
        forward(model, cache, ids)
        with attending_by(model, "sdpa"):
            forward(model, own, ids)
        kept = torch.rand(90) < 0.4
        cache.compact(kept)
        dropped, position = (~kept).nonzero()[:, 0], 90
        for num_new in (1, 7, 1):
            ids = prompts(num_new, seed=num_new)["input_ids"]
            with attending_by(model, "sdpa"):
                expected = logits_without(model, own, dropped, ids, window)
            torch.testing.assert_close(forward(model, cache, ids), expected, atol=2e-5, rtol=1e-4)
            position += num_new
            assert cache.get_seq_length() == position
        length = int(kept.sum()) + 9
        assert max(cache.states(layer)[0].shape[2] for layer in range(4)) == length
        cache.compact(torch.arange(length) != length - 2)  # once more
        ids = prompts(1, seed=9)["input_ids"]
        with attending_by(model, "sdpa"):
            expected = logits_without(model, own, torch.cat([dropped, torch.tensor([97])]), ids, window)
        torch.testing.assert_close(forward(model, cache, ids), expected, atol=2e-5, rtol=1e-4)
        with pytest.raises(ValueError, match="it would go back before 99 tokens"):
            cache.crop(-2)
        cache.crop(-1)
        cache.check()


def test_a_compacted_batch_goes_on_as_beams_and_copies(pool: Pool) -> None:
    """Every page that rows moved in is its sequence's own, also where pages were shared."""
    model = MODELS["pages of 32 tokens"]()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, prompts(100)["input_ids"])
        cache.batch_repeat_interleave(3)
        forward(model, cache, prompts(1, 1, 1)["input_ids"])
        with copy.deepcopy(cache) as other:
            before = [states.clone() for states in other.states(0)]
            cache.compact([0, 1, *range(50, 80), 100])
            expected = [states[:, :, [0, 1, *range(50, 80), 100]] for states in before]
            for ours, theirs in zip(cache.states(0), expected, strict=True):
                assert torch.equal(ours, theirs)
            for order in ([2, 0, 1], [1, 1, 0]):
                cache.reorder_cache(torch.tensor(order))
                forward(model, cache, prompts(1, 1, 1)["input_ids"])
                expected = [states[order] for states in expected]
                for ours, theirs in zip(cache.states(0), expected, strict=True):
                    assert torch.equal(ours[:, :, :33], theirs)
            for ours, theirs in zip(other.states(0), before, strict=True):
                assert torch.equal(ours, theirs)
        cache.check()


def test_it_can_be_iterated_as_a_dynamic_cache(pool: Pool) -> None:
    model = gemma3(4)
    own = DynamicCache(config=model.config)
    with VmmCache(model.config, pool) as cache:
        assert [each[:2] for each in cache] == [(None, None)] * 4
        for each in (cache, own):
            forward(model, each, IDS)
        for ours, theirs in zip(cache, own, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert [window is None for _, _, window in cache] == [False] * 3 + [True]


def test_layers_refer_to_the_cache(cache: VmmCache) -> None:
    layer = cache.layers[0]
    for call in (layer.crop, layer.reorder_cache, layer.reset):
        with pytest.raises(NotImplementedError, match="call this on the cache"):
            call()
    with pytest.raises(NotImplementedError, match=r"all layers at once: call its offload\(\)"):
        layer.offload()
    with pytest.raises(NotImplementedError, match="as tokens come"):
        layer.lazy_initialization(None, None)


def test_what_generate_leaves_behind_can_be_asked(cache: VmmCache, small: Any) -> None:
    answer = generated(small, cache, prompts(7), max_new_tokens=5)
    assert cache.get_seq_length() == len(answer[0]) - 1
    assert repr(cache) == "<VmmCache on cpu: a batch of 1 with 11 tokens each>"
    assert cache.get_max_length() == 8192 and cache.is_sliding == [False] * 4 and not cache.is_compileable
