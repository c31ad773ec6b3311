"""How likely a prompt is: as transformers says, however its chunks, its neighbours and the memory lie."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.engine.conftest import VOCABULARY, Harness, MakeHarness, prompt_of, tiny_model, wide_rows
from vmmkv import MIB
from vmmkv_server import LLM, SamplingParams
from vmmkv_server.engine.features import prompt_scores
from vmmkv_server.protocol import Outputs, PromptLogprobs

TOP = 5
WITHIN = 1e-4


def told(one: Harness, request_id: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What came of one request: of each token but the first its log-probability, those of the likeliest, and their ids."""
    parts = [message for message in one.sent if isinstance(message, PromptLogprobs) and message.request_id == request_id]
    chosen = np.frombuffer(b"".join(part.logprobs for part in parts), np.float32)
    shape = (len(chosen), -1) if len(chosen) else (0, 0)
    values = np.frombuffer(b"".join(part.top_logprobs for part in parts), np.float32).reshape(shape)
    ids = np.frombuffer(b"".join(part.top_ids for part in parts), np.int32).reshape(shape)
    return chosen, values, ids


def truth(one: Harness, prompt: list[int]) -> torch.Tensor:
    """transformers' own log-softmax behind each token: [N, V]."""
    with torch.inference_mode(), one.by_transformers():
        return one.model(torch.tensor([prompt], device=one.cache.device)).logits[0].float().log_softmax(-1).cpu()


def assert_right(one: Harness, request_id: str, prompt: list[int], top: int = TOP, within: float = WITHIN) -> None:
    chosen, values, ids = told(one, request_id)
    logprobs_NV = truth(one, prompt)[:-1]
    assert len(chosen) == len(prompt) - 1, "one for each token but the first: none twice, none left out"
    expected = logprobs_NV.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    np.testing.assert_allclose(chosen, expected, atol=within)
    assert values.shape == ids.shape == (len(prompt) - 1, top)
    best = logprobs_NV.topk(top)
    np.testing.assert_allclose(values, best.values, atol=within)
    np.testing.assert_allclose(logprobs_NV.gather(1, torch.tensor(ids.astype(np.int64))), best.values, atol=within)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_prompt_of_several_chunks_beside_others(harness: MakeHarness, ours: bool, lookahead: int) -> None:
    one = harness(ours=ours, lookahead=lookahead, step_tokens=24)
    prompts = {name: prompt_of(length, length) for name, length in (("long", 100), ("odd", 37), ("short", 2), ("one", 1))}
    for index in range(2):
        one.ask(f"plain {index}", prompt_of(11 + index), 20)
    one.engine.step()
    for name, prompt in prompts.items():
        one.ask(name, prompt, 6, prompt_logprobs=TOP, logprobs=0 if name == "odd" else None)
    one.run()
    for name, prompt in prompts.items():
        assert_right(one, name, prompt, TOP if len(prompt) > 1 else 0)
        assert one.tokens(name) == one.expected(prompt, 6)
    for index in range(2):
        assert one.tokens(f"plain {index}") == one.expected(prompt_of(11 + index), 20)
        assert not len(told(one, f"plain {index}")[0])


@pytest.mark.parametrize("ours", [False, True])
def test_slices_of_rows_are_joined(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    monkeypatch.setattr(prompt_scores, "LOGITS_BYTES", 7 * 4 * VOCABULARY)
    one = harness(ours=ours, step_tokens=64)
    logits = Mock(wraps=one.runner.model.logits)
    monkeypatch.setattr(one.runner.model, "logits", logits)
    one.said(prompt_of(50), 2, prompt_logprobs=TOP)
    assert [len(call.args[0]) for call in logits.call_args_list] == [1, *[7] * 7]
    assert_right(one, "alone", prompt_of(50))


def test_what_a_model_does_behind_its_head_is_done_here_too(harness: MakeHarness) -> None:
    """Transformers' code is not ours to know: here it caps its logits."""
    model = tiny_model()
    forward = model.lm_head.forward
    model.lm_head.forward = lambda states: 0.05 * torch.tanh(forward(states))
    one = harness(model, ours=False, step_tokens=16)
    one.said(prompt_of(40), 2, prompt_logprobs=TOP)
    assert_right(one, "alone", prompt_of(40))


def test_answers_come_behind_their_prompts(harness: MakeHarness) -> None:
    one = harness(ours=True, step_tokens=16)
    one.said(prompt_of(40), 4, prompt_logprobs=0)
    kinds = [type(message) for message in one.sent if isinstance(message, Outputs | PromptLogprobs)]
    assert kinds == [PromptLogprobs] * 3 + [Outputs] * 4
    assert told(one, "alone")[1].shape == (39, 0)


def test_a_prompt_can_be_scored_and_not_continued(harness: MakeHarness) -> None:
    """Also one that takes all that a sequence may have."""
    one = harness(ours=True, share=True, step_tokens=16, max_tokens=64)
    prompts = {str(length): prompt_of(length) for length in (1, 2, 16, 33, 64)}
    for name, prompt in prompts.items():
        one.ask(name, prompt, 0, prompt_logprobs=TOP)
    one.ask("beside", prompt_of(20, 3), 12)
    one.run()
    for name, prompt in prompts.items():
        assert_right(one, name, prompt, TOP if len(prompt) > 1 else 0)
        assert one.tokens(name) == [] and one.finish_reasons(name) == ["length"]
    assert one.tokens("beside") == one.expected(prompt_of(20, 3), 12)


@pytest.mark.parametrize("ours", [False, True])
def test_what_the_prefix_cache_has_is_computed_again(harness: MakeHarness, ours: bool) -> None:
    one = harness(ours=ours, share=True, step_tokens=256)
    prompt = prompt_of(600)
    one.ask("first", prompt, 4)
    one.run()
    assert one.prefix.match(np.array(prompt, np.int32)) >= 599
    for name, options in (("scored", {"prompt_logprobs": TOP}), ("plain", {})):
        one.ask(name, prompt, 4, **options)
        one.run()
        assert one.tokens(name) == one.tokens("first")
    assert_right(one, "scored", prompt)
    assert one.outputs("scored")[0].cached_tokens == 0 and one.outputs("plain")[0].cached_tokens > 500


def test_a_scored_prompt_does_not_wait_for_a_common_prefix(harness: MakeHarness) -> None:
    one = harness(ours=True, share=True, step_tokens=700)
    prompt = prompt_of(600)
    one.ask("first", prompt, 4)
    one.ask("scored", prompt, 4, prompt_logprobs=TOP)
    one.engine.step()
    assert one.engine.num_running == 2
    one.run()
    assert_right(one, "scored", prompt)
    assert one.tokens("scored") == one.tokens("first")


def test_a_preempted_prompt_takes_scored_rows_from_the_cache(harness: MakeHarness) -> None:
    one = harness(wide_rows(), ours=True, share=True, step_tokens=64, slots=4, max_sequences=1, lookahead=0)
    prompt = prompt_of(300)
    one.ask("scored", prompt, 3, prompt_logprobs=TOP, priority=1)
    for _ in range(3):
        one.step()
    assert len(told(one, "scored")[0]) == 192
    one.ask("urgent", prompt_of(5, 1), 3)
    attach = one.prefix.attach
    known = []

    def watched(tokens: Any, **options: Any) -> Any:
        attached = attach(tokens, **options)
        known.append((attached.num_tokens, len(told(one, "scored")[0])))
        return attached

    one.prefix.attach = watched
    one.run()
    assert one.engine.scheduler.counts.preemptions == 1
    assert known[-1][0] == known[-1][1] >= 192, "and no row that is still to be scored"
    assert_right(one, "scored", prompt)


def test_a_model_without_a_head_of_its_own_says_so(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    one = harness()
    monkeypatch.setattr(type(one.model), "base_model_prefix", "")
    one.ask("bad", prompt_of(5), 4, prompt_logprobs=1)
    one.ask("good", prompt_of(5), 4)
    one.run()
    assert "no head of its own" in one.failures()["bad"] and one.tokens("good") == one.expected(prompt_of(5), 4)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, device="cpu", kv_budget_bytes=64 * MIB) as one:
        yield one


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_prompts_log_probabilities_come_with_its_completion(llm: LLM, max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=3, n=2)
    llm.generate("abcd" * 30, SamplingParams(temperature=0.0, max_tokens=8))
    (completion,) = llm.generate("abcd" * 30, params)
    ids, logprobs, tops = completion.prompt_token_ids, completion.prompt_logprobs, completion.prompt_top_logprobs
    assert logprobs is not None and tops is not None and len(logprobs) == len(tops) == len(ids) == 120
    assert logprobs[0] is None and tops[0] is None
    for token, logprob, top in zip(ids[1:], logprobs[1:], tops[1:], strict=True):
        assert logprob is not None and top is not None and len(top) == 3
        assert list(top.values()) == sorted(top.values(), reverse=True) and logprob <= max(top.values())
        assert top.get(token, logprob) == logprob
    assert [len(output.token_ids) for output in completion.outputs] == [max_tokens] * 2
    assert (completion.first_token_s is None) == (max_tokens == 0)
    plain = llm.generate("abcd" * 30, SamplingParams(temperature=0.0, max_tokens=8))[0]
    assert plain.prompt_logprobs is None and plain.prompt_top_logprobs is None
    assert plain.outputs[0].token_ids[:max_tokens] == completion.outputs[0].token_ids
