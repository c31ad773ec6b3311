"""The config-driven decoder on a GPU: the tokens of transformers, the same bits with and without graphs, nothing uploaded."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.engine.conftest import Harness, harness, prompt_of, tiny_model
from tests.engine.decoder_models import small
from vmmkv_server.engine.engine import Engine
from vmmkv_server.engine.runner import Runner

__all__ = ["harness"]

DEVICE = "cuda:0"
SIZES = {
    "hidden_size": 128, "intermediate_size": 200, "num_attention_heads": 8, "head_dim": 32, "max_position_embeddings": 4096
}  # fmt: skip
WIDE_DRAWS = SIZES | {"initializer_range": 0.1}
"""With transformers' 0.02 it would hardly matter what a window hides."""


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    if family == "llama3":
        scaling = {
            "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        }  # fmt: skip
        return tiny_model(rope_parameters=scaling)
    made = {
        "mistral": lambda: MistralForCausalLM(small(MistralConfig, **SIZES, sliding_window=None)),
        "mistral, window of 100": lambda: MistralForCausalLM(small(MistralConfig, **WIDE_DRAWS, sliding_window=100)),
        "qwen2": lambda: Qwen2ForCausalLM(small(Qwen2Config, **SIZES)),
        "qwen2, tied, windows from layer 1 on": lambda: Qwen2ForCausalLM(
            small(
                Qwen2Config,
                **WIDE_DRAWS,
                use_sliding_window=True,
                sliding_window=100,
                max_window_layers=1,
                tie_word_embeddings=True,
            )
        ),
        "qwen3": lambda: Qwen3ForCausalLM(small(Qwen3Config, **SIZES, tie_word_embeddings=True)),
    }
    return made[family]().eval()


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize(
    "family",
    ["llama3", "mistral", "mistral, window of 100", "qwen2", "qwen2, tied, windows from layer 1 on", "qwen3"],
)
def test_tokens_are_those_of_transformers(harness: Callable[..., Harness], family: str, capture: bool) -> None:
    one = harness(model_of(family), device=DEVICE, ours=True, capture=capture, share=True, step_tokens=512, slots=16)
    prompts = {str(length): prompt_of(length, length) for length in (1, 2, 17, 63, 130, 700, 1500)}
    one.serve(prompts, 40)
    one.assert_expected(prompts, 40)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_graphs_change_no_bit(harness: Callable[..., Harness], dtype: torch.dtype) -> None:
    said = []
    for capture in (True, False):
        one = harness(model_of("qwen3").to(dtype), device=DEVICE, ours=True, capture=capture, slots=16)
        for index in range(16):
            options = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": index} if index % 2 else {}
            one.ask(str(index), prompt_of(5 + 31 * index, index), 50, logprobs=0, **options)
        one.run()
        said.append({str(index): (one.tokens(str(index)), one.logprobs(str(index))) for index in range(16)})
    assert said[0] == said[1]


def test_an_engine_is_captured_while_one_with_graphs_is_garbage(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = Harness(model_of("qwen3"), device=DEVICE, ours=True, capture=True, slots=8)
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "close", lambda runner: None)  # as if it had not been closed
        dropped.close()
    held: list[Any] = [dropped]
    dropped.sent.append(held)  # type: ignore[arg-type]  # in a cycle, so that a collection alone frees it
    kept = [held]
    del dropped, held
    one = harness(model_of("qwen3"), device=DEVICE, ours=True, slots=8)
    forward = one.runner.model.forward

    def forward_after_a_collection(*given: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            kept.clear()
            if gc.isenabled():  # then one may come at any allocation
                gc.collect()
        return forward(*given)

    monkeypatch.setattr(one.runner.model, "forward", forward_after_a_collection)
    one.runner.capture()
    assert not kept


def test_logits_hardly_depend_on_the_batch(harness: Callable[..., Harness]) -> None:
    model = model_of("qwen3").to(torch.bfloat16)
    alone = harness(model, device=DEVICE, ours=True, capture=True, slots=64)
    alone.ask("x", prompt_of(300), 1, logprobs=0)
    alone.run()
    crowd = harness(model, device=DEVICE, ours=True, capture=True, slots=64, step_tokens=512)
    for index in range(63):
        crowd.ask(str(index), prompt_of(20 + index, index), 30)
    crowd.ask("x", prompt_of(300), 1, logprobs=0)
    crowd.run()
    assert crowd.logprobs("x") == pytest.approx(alone.logprobs("x"), abs=0.05)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_steady_step_takes_nothing_from_the_host(harness: Callable[..., Harness], sampled: bool) -> None:
    one = harness(model_of("qwen3"), device=DEVICE, ours=True, capture=True, slots=16)
    for index in range(12):
        options = {"temperature": 0.8, "top_p": 0.9, "seed": index} if sampled else {}
        one.ask(str(index), prompt_of(40 + index, index), 400, **options)
    for _ in range(20):
        one.engine.step()
    uploads = one.runner.uploads.count
    copies, launches = _copies(one.engine, 30)
    assert one.runner.uploads.count == uploads
    assert copies == 0
    assert launches >= 30
    one.run()


def _copies(engine: Engine, num_steps: int) -> tuple[int, int]:
    """Copies from the host to the device in some steps, on the device's own record, and graphs launched."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        for _ in range(num_steps):
            engine.step()
        torch.cuda.synchronize()
    names = [event.name for event in record.events()]
    return sum("Memcpy HtoD" in name for name in names), sum("cudaGraphLaunch" in name for name in names)
