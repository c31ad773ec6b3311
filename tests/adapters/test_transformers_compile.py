"""A compiled step over a VmmCache: one graph whatever the length, and the tokens of the eager model."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache

from tests.adapters.models import deepseek, gemma3, gemma4, gpt_oss, llama, prompts
from vmmkv import Pool, SequenceTooLong
from vmmkv.adapters.transformers import VmmCache
from vmmkv.adapters.transformers.attention import DeclinedWarning
from vmmkv.kernels import checks

IDS = prompts(10, 10)["input_ids"]


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets what it has compiled. Attention is by sdpa: what runs in the operations is tested elsewhere."""
    monkeypatch.setattr(checks, "INTERPRETED", False)
    torch.compiler.reset()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeclinedWarning)
        yield
    torch.compiler.reset()


def steps(model: Any, call: Any, cache: Any, count: int = 20) -> tuple[list[list[int]], torch.Tensor]:
    """The likeliest tokens behind the prompt, and the last logits. The prompt is not compiled."""
    logits, tokens = model(IDS, past_key_values=cache).logits, []
    for _ in range(count):
        tokens.append(logits[:, -1:].argmax(-1))
        logits = call(tokens[-1], past_key_values=cache).logits
    answer: list[list[int]] = torch.cat(tokens, 1).tolist()
    return answer, logits


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: llama(num_hidden_layers=2), id="full"),
        pytest.param(lambda: gemma3(16), marks=pytest.mark.nightly, id="sliding and full"),
    ],
)
def test_twenty_steps_are_one_graph_and_give_the_eager_tokens(pool: Pool, make: Any) -> None:
    model, counter = make(), CompileCounter()
    model.set_attn_implementation("vmmkv")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    with VmmCache(model.config, pool) as cache:
        expected, logits = steps(model, model, cache)
        cache.reset()
        for _ in range(2):  # another batch of it is the same graph
            tokens, ours = steps(model, compiled, cache)
            assert tokens == expected and torch.allclose(ours, logits, atol=1e-5)
            assert cache.get_seq_length() == 30
            cache.check()
            cache.reset()
    with VmmCache(model.config, pool) as cache:
        assert steps(model, compiled, cache)[0] == expected
    assert counter.frame_count == 1, "over windows' ends, batches and caches"


@pytest.mark.nightly
def test_without_asking_for_any_length_one_graph_more_is_made(pool: Pool) -> None:
    model, counter = llama(num_hidden_layers=1), CompileCounter()
    model.set_attn_implementation("vmmkv")
    with VmmCache(model.config, pool) as cache:
        steps(model, torch.compile(model, backend=counter, fullgraph=True), cache)
    assert counter.frame_count == 2, "one of the first length, and one of all"


@pytest.mark.nightly
def test_what_a_compiler_may_rearrange_keeps_the_rows(pool: Pool) -> None:
    """By AOTAutograd, which makes the graph functional and drops what nobody reads."""
    model = llama(num_hidden_layers=2)
    model.set_attn_implementation("vmmkv")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with VmmCache(model.config, pool) as cache, VmmCache(model.config, pool) as other:
        assert steps(model, compiled, cache, 5)[0] == steps(model, model, other, 5)[0]
        for layer in range(2):
            for one, two in zip(cache.states(layer), other.states(layer), strict=True):
                assert torch.equal(one, two)


def test_a_padded_batch_is_one_graph_too(pool: Pool) -> None:
    model, counter = llama(num_hidden_layers=1), CompileCounter()
    model.set_attn_implementation("vmmkv")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    inputs = prompts(10, 4)
    with VmmCache(model.config, pool) as cache, VmmCache(model.config, pool) as other:
        seen, ids = inputs["attention_mask"], inputs["input_ids"]
        for each in (cache, other):
            model(ids, attention_mask=seen, past_key_values=each)
        for _ in range(4):
            seen = torch.nn.functional.pad(seen, (0, 1), value=1)
            given = {"input_ids": ids[:, :1], "attention_mask": seen}
            ours, theirs = (call(**given, past_key_values=each).logits for call, each in ((compiled, cache), (model, other)))
            assert torch.allclose(ours, theirs, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.nightly
def test_transformers_own_cache_is_compiled_too(pool: Pool) -> None:
    model = llama(num_hidden_layers=1)
    model.set_attn_implementation("vmmkv")
    expected, _ = steps(model, model, DynamicCache(config=model.config), 4)
    compiled = torch.compile(model, backend="eager", dynamic=True)
    assert steps(model, compiled, DynamicCache(config=model.config), 4)[0] == expected


def test_errors_come_out_of_the_graph(pool: Pool) -> None:
    model = llama(num_hidden_layers=1)
    model.set_attn_implementation("vmmkv")
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    with VmmCache(model.config, pool, max_tokens=12) as cache:
        with pytest.raises(SequenceTooLong, match="max_tokens=12"):
            steps(model, compiled, cache)
        assert cache.get_seq_length() == 12


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
def test_a_pass_whose_output_nobody_reads_keeps_its_rows(pool: Pool, backend: str) -> None:
    model = llama(num_hidden_layers=2)
    model.set_attn_implementation("vmmkv")

    def fill(ids: torch.Tensor, cache: VmmCache) -> None:
        model(ids, past_key_values=cache)

    with VmmCache(model.config, pool) as cache:
        torch.compile(fill, backend=backend, fullgraph=True, dynamic=True)(IDS, cache)
        assert cache.get_seq_length() == 10


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "of_the_first",
    [pytest.param(False, id="the same token"), pytest.param(True, marks=pytest.mark.nightly, id="the next token")],
)
def test_a_second_pass_in_a_graph_is_refused(pool: Pool, backend: str, of_the_first: bool) -> None:
    """It would have the positions of the first."""
    model = llama(num_hidden_layers=2)
    model.set_attn_implementation("vmmkv")

    def two_steps(ids: torch.Tensor, cache: VmmCache) -> Any:
        logits = model(ids, past_key_values=cache).logits
        return logits, model(logits.argmax(-1) if of_the_first else ids, past_key_values=cache).logits

    with VmmCache(model.config, pool) as cache:
        model(IDS, past_key_values=cache)
        with pytest.raises(RuntimeError, match="entered with 10 tokens in the VmmCache, and now there are 11"):
            torch.compile(two_steps, backend=backend, fullgraph=True, dynamic=True)(IDS[:, :1], cache)
        assert cache.get_seq_length() == 11
        model(IDS[:, :1], past_key_values=cache)


@pytest.mark.nightly
def test_what_is_more_than_causal_attention_is_not_compiled(pool: Pool) -> None:
    model = llama(num_hidden_layers=1)
    model.set_attn_implementation("vmmkv")
    compiled = torch.compile(model, backend="eager", dynamic=True)
    layer = model.model.layers[0].self_attn
    with VmmCache(model.config, pool) as cache:
        model(IDS, past_key_values=cache)
        with pytest.raises(NotImplementedError, match="num_items_in_batch given to attention: not compiled"):
            compiled(IDS[:, :1], past_key_values=cache, num_items_in_batch=torch.tensor(1))
        layer.attention_dropout = 0.5
        model.train()
        with pytest.raises(NotImplementedError, match="dropout: not compiled"):
            compiled(IDS[:, :1], past_key_values=cache)
        model.eval()
        layer.is_causal = False
        with pytest.raises(NotImplementedError, match="not causal: not compiled"):
            compiled(IDS[:, :2], past_key_values=cache)
        layer.is_causal = True
        layer.k_proj.requires_grad_(False), layer.v_proj.requires_grad_(False)
        model.model.embed_tokens.requires_grad_(False), model.model.layers[0].input_layernorm.requires_grad_(False)
        with torch.enable_grad(), pytest.raises(NotImplementedError, match="gradients: not compiled"):
            compiled(IDS[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 10


@pytest.mark.nightly
@pytest.mark.parametrize(
    "make", [lambda: gemma4(16), lambda: deepseek(num_hidden_layers=2)], ids=["read what others keep", "expand what they keep"]
)
def test_a_model_whose_layers_do_more_than_attend_breaks_its_graph(pool: Pool, make: Any) -> None:
    model = make()
    model.set_attn_implementation("vmmkv")
    with VmmCache(model.config, pool) as cache:
        expected, _ = steps(model, model, cache, 3)
        cache.reset()
        assert steps(model, torch.compile(model, backend="eager", dynamic=True), cache, 3)[0] == expected


@pytest.mark.nightly
def test_keys_that_a_model_changes_before_it_attends_are_named(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing in the configuration says so."""
    model = deepseek(num_hidden_layers=2)
    model.set_attn_implementation("vmmkv")
    monkeypatch.setattr(VmmCache, "_is_attended_by_vmmkv", True)
    with VmmCache(model.config, pool) as cache:
        model(IDS, past_key_values=cache)
        with pytest.raises(AttributeError, match=r"takes \.shape of the keys.*set_attn_implementation"):
            torch.compile(model, backend="eager", dynamic=True)(IDS[:, :1], past_key_values=cache)


@pytest.mark.nightly
def test_a_graph_over_transformers_own_cache_has_latents_and_sinks_too() -> None:
    for model in (deepseek(num_hidden_layers=2), gpt_oss()):
        model.set_attn_implementation("vmmkv")
        expected, _ = steps(model, model, DynamicCache(config=model.config), 3)
        compiled = torch.compile(model, backend="eager", dynamic=True)
        assert steps(model, compiled, DynamicCache(config=model.config), 3)[0] == expected
        torch.compiler.reset()
