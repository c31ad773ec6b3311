"""Cascade attention over prefix groups on a GPU: the tokens of transformers, and the same bits for the same batches."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.engine.conftest import Harness, making, prompt_of
from tests.gpu.test_decode_steps_cuda import DEVICE, model_of
from vmmkv.layout import KV_KINDS
from vmmkv_server.engine.step import Readback


@pytest.fixture(params=[None, *KV_KINDS])
def harness(request: pytest.FixtureRequest) -> Iterator[Callable[..., Harness]]:
    """Over exact rows and over quantised ones."""
    yield from making(request.param)


def test_shared_prefixes_as_one_problem_give_the_same_tokens(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vmmkv_server.engine.features.prefix_groups.MIN_SAVED", 1)
    one = harness(model_of("qwen3"), device=DEVICE, ours=True, capture=True, slots=16, share=True, budget_pages=512)
    shared, other = prompt_of(900), prompt_of(600, 7)
    prompts = {str(own): [*shared[: 900 - 37 * (own % 2)], *prompt_of(5 + own, own)] for own in range(8)}
    prompts |= {f"other {own}": [*other, *prompt_of(3 + own, 90 + own)] for own in range(4)}
    prompts["alone"] = prompt_of(333, 5)
    for name, prompt in prompts.items():
        one.ask(name, prompt, 60 if name != "0" else 20)
    one.run()
    assert one.runner.has_prefix_groups
    for name, prompt in prompts.items():
        assert one.tokens(name) == one.expected(prompt, 60 if name != "0" else 20), name


def test_the_same_batches_give_the_same_bits(harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    """By prefix groups beside chunks of prompts too. The pace of the device does not change the batches here."""
    monkeypatch.setattr("vmmkv_server.engine.features.prefix_groups.MIN_SAVED", 1)
    monkeypatch.setattr(Readback, "is_done", False)
    model = model_of("qwen3").to(torch.bfloat16)
    one = harness(model, device=DEVICE, ours=True, capture=True, slots=64, share=True, step_tokens=256, budget_pages=512)
    beside_chunks = 0
    graph_for = one.runner.mixed.graph_for

    def counted(num_tokens: int, *, is_grouped: bool) -> Any:
        nonlocal beside_chunks
        beside_chunks += is_grouped
        return graph_for(num_tokens, is_grouped=is_grouped)

    monkeypatch.setattr(one.runner.mixed, "graph_for", counted)
    shared, runs = prompt_of(3000), []
    for number in range(4):
        for index in range(24):
            one.ask(f"{number} {index}", [*shared, *prompt_of(40 + index, index)], 30, logprobs=0)
        one.run()
        runs.append([(one.tokens(f"{number} {index}"), one.logprobs(f"{number} {index}")) for index in range(24)])
        one.engine.forget()
    assert beside_chunks > 4
    assert runs[1] == runs[2] == runs[3], "the first run computes into slots that are not parked yet"
