"""A compiled step over a VmmCache: one graph whatever the length, and the tokens of the eager model."""

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache

from tests.adapters.models import deepseek, gemma3, gemma4, gpt_oss, llama, prompts
from vmmkv import Pool, SequenceTooLong
from vmmkv.adapters.transformers import VmmCache
from vmmkv.adapters.transformers.attention import DeclinedWarning
from vmmkv_kernels import checks

IDS = prompts(10, 10)["input_ids"]

BACKENDS = ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)]
"""aot_eager makes the graph functional and drops what no output needs."""


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets what it has compiled. Attention is by sdpa: what runs in the operations is tested elsewhere."""
    monkeypatch.setattr(checks, "INTERPRETED", False)
    torch.compiler.reset()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeclinedWarning)
        yield
    torch.compiler.reset()


def attending(model: Any) -> Any:
    """The model with vmmkv's attention."""
    model.set_attn_implementation("vmmkv")
    return model


def compiled(model: Any, backend: Any = "eager", *, fullgraph: bool = True) -> Any:
    return torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=True)


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
    model, counter = attending(make()), CompileCounter()
    call = compiled(model, counter)
    with VmmCache(model.config, pool) as cache:
        expected, logits = steps(model, model, cache)
        cache.reset()
        for _ in range(2):  # another batch of it is the same graph
            tokens, ours = steps(model, call, cache)
            assert tokens == expected and torch.allclose(ours, logits, atol=1e-5)
            assert cache.get_seq_length() == 30
            cache.check()
            cache.reset()
    with VmmCache(model.config, pool) as cache:
        assert steps(model, call, cache)[0] == expected
    assert counter.frame_count == 1, "over windows' ends, batches and caches"


def test_a_padded_batch_is_one_graph_too(pool: Pool) -> None:
    model, counter = attending(llama(num_hidden_layers=1)), CompileCounter()
    call, inputs = compiled(model, counter), prompts(10, 4)
    with VmmCache(model.config, pool) as cache, VmmCache(model.config, pool) as other:
        seen, ids = inputs["attention_mask"], inputs["input_ids"]
        for each in (cache, other):
            model(ids, attention_mask=seen, past_key_values=each)
        for _ in range(4):
            seen = torch.nn.functional.pad(seen, (0, 1), value=1)
            given = {"input_ids": ids[:, :1], "attention_mask": seen}
            ours, theirs = (run(**given, past_key_values=each).logits for run, each in ((call, cache), (model, other)))
            assert torch.allclose(ours, theirs, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pass_without_use_of_its_output_keeps_its_rows(pool: Pool, backend: str) -> None:
    model = attending(llama(num_hidden_layers=2))

    def fill(ids: torch.Tensor, cache: VmmCache) -> None:
        model(ids, past_key_values=cache)

    with VmmCache(model.config, pool) as cache, VmmCache(model.config, pool) as other:
        compiled(fill, backend)(IDS, cache)
        fill(IDS, other)
        assert cache.get_seq_length() == 10
        for layer in range(2):
            assert all(map(torch.equal, cache.states(layer), other.states(layer)))


def test_errors_come_out_of_the_graph(pool: Pool) -> None:
    model = attending(llama(num_hidden_layers=1))
    with VmmCache(model.config, pool, max_tokens=12) as cache:
        with pytest.raises(SequenceTooLong, match="max_tokens=12"):
            steps(model, compiled(model), cache)
        assert cache.get_seq_length() == 12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "of_the_first",
    [pytest.param(False, id="the same token"), pytest.param(True, marks=pytest.mark.nightly, id="the next token")],
)
def test_a_second_pass_in_a_graph_is_refused(pool: Pool, backend: str, of_the_first: bool) -> None:
    """It would have the positions of the first."""
    model = attending(llama(num_hidden_layers=2))

    def two_steps(ids: torch.Tensor, cache: VmmCache) -> Any:
        logits = model(ids, past_key_values=cache).logits
        return logits, model(logits.argmax(-1) if of_the_first else ids, past_key_values=cache).logits

    with VmmCache(model.config, pool) as cache:
        model(IDS, past_key_values=cache)
        with pytest.raises(RuntimeError, match="entered with 10 tokens in the VmmCache, and now there are 11"):
            compiled(two_steps, backend)(IDS[:, :1], cache)
        assert cache.get_seq_length() == 11
        model(IDS[:, :1], past_key_values=cache)


@pytest.mark.nightly
def test_what_is_more_than_causal_attention_is_not_compiled(pool: Pool) -> None:
    model = attending(llama(num_hidden_layers=1))
    call = compiled(model, fullgraph=False)
    layer = model.model.layers[0].self_attn
    with VmmCache(model.config, pool) as cache:
        model(IDS, past_key_values=cache)
        with pytest.raises(NotImplementedError, match="num_items_in_batch given to attention: not compiled"):
            call(IDS[:, :1], past_key_values=cache, num_items_in_batch=torch.tensor(1))
        layer.attention_dropout = 0.5
        model.train()
        with pytest.raises(NotImplementedError, match="dropout: not compiled"):
            call(IDS[:, :1], past_key_values=cache)
        model.eval()
        layer.is_causal = False
        with pytest.raises(NotImplementedError, match="not causal: not compiled"):
            call(IDS[:, :2], past_key_values=cache)
        layer.is_causal = True
        for fixed in (layer.k_proj, layer.v_proj, model.model.embed_tokens, model.model.layers[0].input_layernorm):
            fixed.requires_grad_(False)
        with torch.enable_grad(), pytest.raises(NotImplementedError, match="gradients: not compiled"):
            call(IDS[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 10


@pytest.mark.nightly
def test_keys_that_a_model_changes_before_it_attends_are_named(pool: Pool) -> None:
    """Where nothing in the configuration says so."""
    model = attending(deepseek(num_hidden_layers=2))

    class Unaware(VmmCache):
        _is_attended_by_vmmkv = True

    with Unaware(model.config, pool) as cache:
        model(IDS, past_key_values=cache)
        with pytest.raises(AttributeError, match=r"takes \.shape of the keys.*set_attn_implementation"):
            compiled(model, fullgraph=False)(IDS[:, :1], past_key_values=cache)


@pytest.mark.nightly
@pytest.mark.parametrize("over", ["VmmCache", "DynamicCache"])
@pytest.mark.parametrize(
    "make",
    [llama, lambda: gemma4(16), lambda: deepseek(num_hidden_layers=2), gpt_oss],
    ids=["full", "layers that read what others keep", "latents", "sinks"],
)
def test_a_graph_that_may_break_gives_the_eager_tokens(pool: Pool, make: Any, over: str) -> None:
    model, answers = attending(make()), []
    for call in (model, compiled(model, fullgraph=False)):
        with VmmCache(model.config, pool) if over == "VmmCache" else nullcontext(DynamicCache(config=model.config)) as cache:
            answers.append(steps(model, call, cache, 3)[0])
    assert answers[0] == answers[1]
