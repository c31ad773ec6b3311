"""A request's tokens are its own: the same alone and in a crowd, whether it gave way or not, whatever was known already."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from tests.engine.conftest import Harness, prompt_of, tiny_model

PROMPT = prompt_of(100)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0, "seed": 7},
    "hot, of the likeliest": {"temperature": 1.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 2**63 - 1},
    "penalised": {
        "temperature": 0.9, "seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4,
        "logit_bias": {3: 2.0, 5: -100.0},
    },
}  # fmt: skip


@functools.cache
def model() -> LlamaForCausalLM:
    """A row of 16 KiB: 128 tokens fill a page."""
    return tiny_model(hidden_size=32, num_attention_heads=16, num_key_value_heads=16, head_dim=64, max_position_embeddings=1024)


@functools.cache
def alone(sampling: str, ours: bool) -> list[int]:
    """In an engine of its own, each step read at once."""
    one = Harness(model(), ours=ours, lookahead=0, slots=1, step_tokens=1024)
    one.ask("x", PROMPT, 60, **SAMPLING[sampling])
    one.run()
    one.close()
    return one.tokens("x")


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "transformers"])
@pytest.mark.parametrize("share", [True, False])
def test_in_a_batch_of_64(harness: Callable[..., Harness], share: bool, ours: bool) -> None:
    """Beside others of all kinds, some of whose prompts begin as that one's does."""
    wanted = {name: alone(name, ours) for name in SAMPLING}
    one = harness(model(), ours=ours, share=share, slots=64, step_tokens=300, budget_pages=160)
    for index in range(60):
        prompt = [*PROMPT[: index % 40], *prompt_of(1 + index % 23, index)]
        options = list(SAMPLING.values())[index % 4] | {"seed": 100 + index, "want_logprobs": index % 5 == 0}
        one.ask(str(index), prompt, 50 + 7 * index % 60, **options)
    for name, options in SAMPLING.items():
        one.ask(name, PROMPT, 60, **options)
    most = 0
    while one.engine.has_work:
        one.step()
        most = max(most, len(one.engine._scheduler.running))
    assert most == 64 and one.engine._scheduler.num_preempted == 0
    assert {name: one.tokens(name) for name in SAMPLING} == wanted


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_after_it_gave_way(harness: Callable[..., Harness], sampling: str, share: bool, lookahead: int) -> None:
    """Again and again: what it had generated is computed again, and its penalties count it once."""
    wanted = alone(sampling, True)
    one = harness(model(), ours=True, share=share, slots=8, step_tokens=300, budget_pages=4, lookahead=lookahead)
    for index in range(3):
        one.ask(str(index), prompt_of(60 + 20 * index, index), 90, temperature=1.0, seed=index)
    one.ask("x", PROMPT, 60, **SAMPLING[sampling])
    gave_way = 0
    begun = False
    while one.engine.has_work:
        one.step()
        waits = any(request.ask.request_id == "x" and request.num_generated for request in one.engine._scheduler.waiting)
        gave_way += waits and not begun
        begun = waits
    assert gave_way >= 1 and not one.failures()
    assert one.tokens("x") == wanted


@pytest.mark.parametrize("known", [1, 64, 99, 100])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_whatever_is_known_of_its_prompt(harness: Callable[..., Harness], sampling: str, known: int) -> None:
    one = harness(model(), ours=True, share=True, slots=4, step_tokens=33)
    one.ask("before", [*PROMPT[:known], 11], 3, temperature=1.0, seed=5)
    one.run()
    one.ask("x", PROMPT, 60, **SAMPLING[sampling])
    one.run()
    assert one.outputs("x")[0].cached_tokens == min(known, 99)
    assert one.tokens("x") == alone(sampling, True)


def test_seeds_differ_and_are_all_that_differs(harness: Callable[..., Harness]) -> None:
    one = harness(model(), ours=True, share=True, slots=16)
    for index in range(12):
        one.ask(str(index), PROMPT, 30, temperature=1.0, seed=index % 6)
    one.run()
    for index in range(6):
        assert one.tokens(str(index)) == one.tokens(str(index + 6))
    assert len({tuple(one.tokens(str(index))) for index in range(6)}) == 6
