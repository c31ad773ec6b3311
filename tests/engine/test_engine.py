"""Requests come, wait, run, give way, fail and leave; memory follows them, and each is answered once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.attending import attending_by
from tests.engine.conftest import VOCABULARY, Harness, prompt_of
from vmmkv import DriverError
from vmmkv.server.engine.engine import EngineDied
from vmmkv.server.protocol import Abort, Snapshot


def test_memory_follows_the_tokens_and_comes_back(harness: Callable[..., Harness]) -> None:
    one = harness(step_tokens=4096)
    one.ask("a", prompt_of(4000), 4)
    one.engine.step()
    assert one.cache.stats().mapped_bytes == 2 * 2**21
    assert one.cache.stats().num_tokens == 4000
    one.run()
    last = [message for message in one.sent if isinstance(message, Snapshot)][-1]
    assert (last.running, last.waiting, last.kv_mapped_bytes, last.kv_retiring_bytes) == (0, 0, 0, 0)
    assert last.generated_tokens == 4 and last.prompt_tokens == 4000


def test_more_requests_than_slots_wait(harness: Callable[..., Harness]) -> None:
    one = harness(slots=2)
    for index in range(5):
        one.ask(str(index), prompt_of(3, index))
    one.engine.step()
    assert one.cache.stats().num_sequences == 2
    one.run()
    assert all(len(one.tokens(str(index))) == 8 for index in range(5))


def test_of_many_at_once_the_first_begin_before_all_have_memory(harness: Callable[..., Harness]) -> None:
    one = harness(slots=40)
    for index in range(40):
        one.ask(str(index), prompt_of(5, index), 8)
    running = []
    for _ in range(3):
        one.engine.step()
        running.append(one.engine.num_running)
    assert running == [16, 32, 40]
    one.run()
    for index in range(40):
        assert one.tokens(str(index)) == one.expected(prompt_of(5, index), 8)


def test_what_does_not_fit_now_waits(harness: Callable[..., Harness]) -> None:
    one = harness(budget_pages=3, step_tokens=8192)
    one.ask("a", prompt_of(4090, 1), 4)  # two pages
    one.ask("b", prompt_of(4090, 2), 4)  # two more: not yet
    one.engine.step()
    assert one.cache.stats().num_sequences == 1
    one.run()
    assert not one.failures()
    for name, seed in (("a", 1), ("b", 2)):
        assert one.tokens(name) == one.expected(prompt_of(4090, seed), 4)


def test_the_newest_gives_way_and_is_computed_again(harness: Callable[..., Harness]) -> None:
    one = harness(budget_pages=2, step_tokens=8192)
    prompts = {"a": prompt_of(2030, 1), "b": prompt_of(2030, 2)}  # a page each, and each will want a second
    for name, prompt in prompts.items():
        one.ask(name, prompt, 40)
    one.run()
    assert one.engine._scheduler.num_preempted >= 1
    for name, prompt in prompts.items():
        assert one.tokens(name) == one.expected(prompt, 40), name


def test_a_request_that_can_never_fit_fails_alone(harness: Callable[..., Harness]) -> None:
    one = harness(budget_pages=1, step_tokens=8192)
    one.ask("small", prompt_of(9))
    one.ask("large", prompt_of(3000))
    one.ask("grows", prompt_of(2040), 20)
    one.ask("last", prompt_of(9))
    one.run()
    assert one.failures().keys() == {"large", "grows"}
    assert "never fit" in one.failures()["large"] and "budget" in one.failures()["large"]
    assert one.tokens("small") == one.tokens("last") == one.expected(prompt_of(9))


@pytest.mark.parametrize(("prompt", "new_tokens"), [([], 4), ([1], 0), ([1] * 8000, 1000)])
def test_a_malformed_request_is_answered(harness: Callable[..., Harness], prompt: list[int], new_tokens: int) -> None:
    one = harness()
    one.ask("bad", prompt, new_tokens)
    assert not one.engine.has_work and "bad" in one.failures()


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**31, 2**40])
def test_tokens_that_the_model_does_not_have_are_refused_alone(harness: Callable[..., Harness], token: int) -> None:
    one = harness(ours=True)
    one.ask("good", prompt_of(9))
    one.ask("prompt", [1, 2, token, 3])
    one.ask("bias", prompt_of(9), logit_bias={3: 1.0, token: 1.0})
    one.ask("never sampled", prompt_of(9), stop_token_ids=[token])
    one.run()
    assert one.failures().keys() == {"prompt", "bias"}
    assert all(f"token {token}; wanted" in reason and "0 to 198" in reason for reason in one.failures().values())
    assert one.tokens("good") == one.tokens("never sampled") == one.expected(prompt_of(9))


def test_a_step_that_fails_ends_its_requests_only(harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    one = harness(slots=2)
    for name in "abc":
        one.ask(name, prompt_of(5))
    forward = one.runner.forward
    calls = 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of luck")
        return forward(*args)

    monkeypatch.setattr(one.runner, "forward", failing)
    one.run()
    assert one.failures().keys() == {"a", "b"} and "out of luck" in one.failures()["a"]
    assert one.tokens("c") == one.expected(prompt_of(5))
    for name in "ab":
        assert one.tokens(name) == one.expected(prompt_of(5))[: len(one.tokens(name))], "what came before was right"


def test_a_driver_that_fails_does_not_end_the_engine(harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    one = harness()
    one.ask("a", prompt_of(5))
    with monkeypatch.context() as patch:

        def refuse(*args: Any) -> None:
            raise DriverError("no", call="map", code="TEST")

        patch.setattr(one.pool.driver, "map", refuse)
        one.run()
    assert one.failures().keys() == {"a"}
    one.ask("b", prompt_of(5))
    one.run()
    assert one.tokens("b") == one.expected(prompt_of(5))


@pytest.mark.parametrize("running", [True, False])
def test_an_aborted_request_leaves_at_once(harness: Callable[..., Harness], running: bool) -> None:
    one = harness(slots=1, lookahead=0)
    one.ask("first", prompt_of(5), 500)
    one.ask("second", prompt_of(6), 5)
    one.engine.step()
    gone, stays = ("first", "second") if running else ("second", "first")
    one.engine.receive(Abort(request_id=gone))
    one.engine.receive(Abort(request_id="never heard of"))
    one.run()
    assert len(one.tokens(stays)) == {"first": 500, "second": 5}[stays]
    assert one.finish_reasons(gone) == ([None] if running else [])


def test_finish_reasons(harness: Callable[..., Harness]) -> None:
    one = harness()
    free = one.expected(prompt_of(5), 8)
    stop = next(token for token in free if free.index(token) > 1)
    ended = harness(eos_ids=frozenset([stop]))
    ended.ask("eos", prompt_of(5))
    ended.ask("ignored", prompt_of(5), ignore_eos=True)
    ended.ask("stop id", prompt_of(5), ignore_eos=True, stop_token_ids=[stop])
    ended.run()
    before = free[: free.index(stop)]
    assert ended.tokens("eos") == before and ended.finish_reasons("eos")[-1] == "stop"
    assert ended.tokens("ignored") == free and ended.finish_reasons("ignored")[-1] == "length"
    assert ended.tokens("stop id") == before and ended.finish_reasons("stop id")[-1] == "stop"
    assert all(reason is None for reason in ended.finish_reasons("eos")[:-1])


def test_sampled_tokens_depend_on_seed_and_position_only(harness: Callable[..., Harness]) -> None:
    alone = harness()
    alone.ask("x", prompt_of(9), 30, temperature=1.0, top_p=0.9, seed=7)
    alone.run()
    crowd = harness(step_tokens=5)
    for index in range(4):
        crowd.ask(str(index), prompt_of(3 + index, index), 20, temperature=1.5, seed=index)
    crowd.ask("x", prompt_of(9), 30, temperature=1.0, top_p=0.9, seed=7)
    crowd.ask("y", prompt_of(9), 30, temperature=1.0, top_p=0.9, seed=8)
    crowd.run()
    assert crowd.tokens("x") == alone.tokens("x") != crowd.tokens("y")


@pytest.mark.parametrize("after", [0, 5])
def test_logits_that_are_no_numbers_fail_their_request_alone(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    one = harness()
    one.ask("good", prompt_of(5))
    one.ask("bad", prompt_of(6))
    for _ in range(after):
        one.engine.step()
    if after:
        bad = one.engine._scheduler.find("bad")
        assert bad is not None
        bad.memory.v(0)[:5] = float("nan")
    else:
        forward = one.runner.model.forward

        def spoiling(ids_N: Any, batch: Any, last_B: Any) -> Any:
            logits_BV = forward(ids_N, batch, last_B)
            logits_BV[[run.count == 6 for run in batch.runs]] = float("nan")
            return logits_BV

        monkeypatch.setattr(one.runner.model, "forward", spoiling)
    one.run()
    assert one.failures().keys() == {"bad"} and "not numbers" in one.failures()["bad"]
    assert one.tokens("good") == one.expected(prompt_of(5))
    assert one.tokens("bad") == one.expected(prompt_of(6))[:after], "of the steps before, and NOT_A_NUMBER is no token"


def test_a_lost_context_ends_the_engine_before_the_device_is_touched_again(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = harness()
    one.ask("a", prompt_of(5))

    def lost(*args: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    def died() -> None:
        raise EngineDied("the device's context is lost")

    with monkeypatch.context() as patch:
        patch.setattr(one.runner, "forward", lost)
        patch.setattr(one.engine, "_check_device", died)
        patch.setattr(one.engine._scheduler, "finish", lost)
        with pytest.raises(EngineDied):
            one.engine.step()


def test_what_fails_ahead_of_need_fails_nobody(harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    one = harness()
    one.ask("a", prompt_of(5))

    def fail(*args: Any, **options: Any) -> int:
        raise DriverError("not now", call="map", code="TEST")

    with monkeypatch.context() as patch:
        patch.setattr(one.cache, "map_ahead", fail)
        one.run()
    assert one.tokens("a") == one.expected(prompt_of(5))


def test_log_probabilities_are_the_models_own_and_only_of_who_asked(harness: Callable[..., Harness]) -> None:
    one = harness(step_tokens=6)
    one.ask("greedy", prompt_of(9), 5, want_logprobs=True)
    one.ask("beside", prompt_of(4), 5)
    one.ask("sampled", prompt_of(7, 1), 5, temperature=0.7, top_p=0.8, seed=3, want_logprobs=True)
    one.run()
    assert one.logprobs("beside") == []
    for name, prompt in (("greedy", prompt_of(9)), ("sampled", prompt_of(7, 1))):
        tokens = one.tokens(name)
        with torch.inference_mode(), attending_by(one.model, "sdpa"):
            logits_TV = one.model(torch.tensor([prompt + tokens])).logits[0]
        all_TV = torch.log_softmax(logits_TV[len(prompt) - 1 : -1], dim=-1)
        wanted = [float(row[token]) for row, token in zip(all_TV, tokens, strict=True)]
        assert one.logprobs(name) == pytest.approx(wanted, abs=1e-5)


def test_an_end_token_has_a_log_probability_though_it_is_not_sent(harness: Callable[..., Harness]) -> None:
    free = harness().expected(prompt_of(5), 8)
    stop = next(token for token in free if free.index(token) > 1)
    one = harness(eos_ids=frozenset([stop]))
    one.ask("a", prompt_of(5), want_logprobs=True)
    one.run()
    assert len(one.logprobs("a")) == len(one.tokens("a")) + 1 == free.index(stop) + 1


def test_choices_of_one_prompt_are_what_each_would_be_alone(harness: Callable[..., Harness]) -> None:
    together = harness()
    for index in range(4):
        together.ask(f"choice {index}", prompt_of(9), 20, temperature=1.0, seed=40 + index)
    together.run()
    for index in range(4):
        alone = harness()
        alone.ask("x", prompt_of(9), 20, temperature=1.0, seed=40 + index)
        alone.run()
        assert together.tokens(f"choice {index}") == alone.tokens("x")
    assert len({tuple(together.tokens(f"choice {index}")) for index in range(4)}) == 4


def test_the_first_message_alone_says_what_was_cached(harness: Callable[..., Harness]) -> None:
    one = harness(step_tokens=4, share=True)
    for name in ("a", "b"):
        one.ask(name, prompt_of(9), 3)
        one.run()
    sent = [output.cached_tokens for output in one.outputs("b")]
    assert sent == [8, 0, 0]
