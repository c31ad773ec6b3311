"""What once went wrong in the engine's core, each as the law that it broke."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from tests.engine.conftest import VOCABULARY, Harness, prompt_of, tiny_model
from vmmkv import DriverError
from vmmkv.server import Engine
from vmmkv.server.engine import kv_backend, loading
from vmmkv.server.engine.request import RequestTable

PENALTIES = {"frequency_penalty": 1.5, "presence_penalty": 0.5}


def windowed() -> MistralForCausalLM:
    """Sixteen tokens a page, and a window of thirty."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=16, head_dim=128, max_position_embeddings=1024, sliding_window=30,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


@pytest.mark.parametrize("share", [False, True])
def test_beams_do_not_count_into_anothers_penalties(harness: Callable[..., Harness], share: bool) -> None:
    alone = harness(slots=6, ours=True)
    alone.ask("B", prompt_of(12, 1), 30, **PENALTIES)
    alone.run()
    one = harness(slots=6, ours=True, share=share)
    one.ask("plain", prompt_of(9, 5), 12)
    one.step()
    one.ask("A", prompt_of(10, 2), 6, **PENALTIES)
    one.ask("keeper", prompt_of(10, 7), 80)
    while "length" not in one.finish_reasons("plain"):
        one.step()
    for _ in range(5):
        one.step()
    one.ask("B", prompt_of(12, 1), 30, **PENALTIES)
    one.step()
    one.ask("beams", prompt_of(20, 3), 25, beam_width=4 if share else 3)
    one.run()
    assert one.tokens("B") == alone.tokens("B")


def test_memory_trouble_at_admission_fails_one_request(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = harness(slots=4, ours=True)
    one.ask("good", prompt_of(12, 1), 10)
    one.step()

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(one.runner._sampler._penalties), "_grow", full)
    one.ask("bad", prompt_of(10, 2), 6, **PENALTIES)
    one.run()
    assert one.failures().keys() == {"bad"}
    assert len(one.tokens("good")) == 10


def test_of_those_who_begin_together_one_that_cannot_keeps_nobody_from_what_it_asked(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, dict[str, Any]] = {
        "plain": {"temperature": 1.0, "seed": 3},
        "bad": PENALTIES,
        "last": {"temperature": 0.7, "top_k": 5, "seed": 4},
        "scored": {"want_logprobs": True, "num_logprobs": 2},
    }
    alone = {}
    for index, (name, options) in enumerate(asked.items()):
        other = harness(slots=6, ours=True)
        other.ask(name, prompt_of(10, index), 12, **options)
        other.run()
        alone[name] = other.tokens(name)
    one = harness(slots=6, ours=True)

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(one.runner._sampler._penalties), "_grow", full)
    for index, (name, options) in enumerate(asked.items()):
        one.ask(name, prompt_of(10, index), 12, **options)
    one.run()
    assert one.failures().keys() == {"bad"}
    assert {name: one.tokens(name) for name in asked if name != "bad"} == {
        name: tokens for name, tokens in alone.items() if name != "bad"
    }


@pytest.mark.parametrize("share", [False, True])
def test_there_are_slots_for_as_many_again_as_may_run(harness: Callable[..., Harness], share: bool) -> None:
    """Those of who has ended are still read by the device when the next begins."""
    one = harness(slots=3, ours=True, share=share, max_sequences=3, open_memory=kv_backend.SlotsInPool.open, max_tokens=64)
    one.pool = one.cache.pool
    assert one.cache.num_slots >= 6
    for index in range(9):
        one.ask(str(index), prompt_of(10, index), 6)
    one.run()
    assert one.failures() == {} and all(len(one.tokens(str(index))) == 6 for index in range(9))


def test_all_who_begin_in_a_step_are_told_to_the_device_in_one_upload(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = harness(slots=6, ours=True)
    uploads: list[int] = []
    assign = one.runner._sampler.assign

    def counting(entries: Any) -> None:
        uploads.append(len(entries))
        assign(entries)

    monkeypatch.setattr(one.runner._sampler, "assign", counting)
    for index in range(5):
        one.ask(str(index), prompt_of(10, index), 6, temperature=1.0, seed=index)
    one.run()
    assert uploads == [5]


@pytest.mark.parametrize("share", [False, True])
def test_what_a_window_gives_back_lets_others_in(harness: Callable[..., Harness], share: bool) -> None:
    one = harness(windowed(), slots=4, ours=True, budget_pages=5, step_tokens=300, share=share)
    one.ask("long", prompt_of(250), 150)
    one.step()
    one.ask("short", prompt_of(100, 1), 10)
    for _ in range(60):
        one.step()
    assert one.outputs("short") and one.engine._scheduler.num_preempted == 0


def test_windows_slide_before_anybody_gives_way(harness: Callable[..., Harness]) -> None:
    one = harness(windowed(), slots=4, ours=True, budget_pages=5, step_tokens=300)
    one.ask("a", prompt_of(120), 200)
    one.ask("b", prompt_of(125, 1), 200)
    one.run()
    assert one.engine._scheduler.num_preempted == 0


def test_a_token_that_the_device_had_no_room_for_is_no_answer(harness: Callable[..., Harness]) -> None:
    one = harness(slots=4, ours=True, lookahead=0)
    one.ask("a", prompt_of(12, 1), 10)
    one.step()
    one.cache.limit[one.engine._scheduler.running[0].memory.slot] = 12  # as if a raise of it had been lost
    one.engine.step()
    assert min(one.tokens("a")) >= 0 and one.failures().keys() == {"a"}


def test_idle_time_is_no_steps_time(harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    one = harness(ours=True)
    one.ask("a", prompt_of(12), 3)
    one.run()
    now_s = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: now_s() + 3600)
    one.ask("b", prompt_of(13, 1), 3)
    one.run()
    assert one.engine._step_us < 60e6, "of the hour some has come in"


def test_a_few_common_tokens_keep_nobody_waiting(harness: Callable[..., Harness]) -> None:
    one = harness(ours=True, share=True, step_tokens=256)
    for index in range(8):
        one.ask(str(index), [1, 2, 3, *prompt_of(20, index + 1)], 4)
    one.step()
    assert len(one.engine._scheduler.running) == 8


def test_a_load_that_fails_gives_its_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model().save_pretrained(tmp_path)
    pools = []
    make = kv_backend.Pool

    def made(*args: Any) -> Any:
        pools.append(make(*args))
        return pools[-1]

    def refuse(*args: Any) -> None:
        raise ValueError("it cannot be served")

    monkeypatch.setattr(kv_backend, "Pool", made)
    monkeypatch.setattr(loading, "warm_up", refuse)
    with pytest.raises(ValueError, match="cannot be served"):
        Engine(str(tmp_path), device="cpu")
    assert [pool.closed for pool in pools] == [True]


def test_a_close_that_failed_can_be_called_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model().save_pretrained(tmp_path)
    engine = Engine(str(tmp_path), device="cpu", load_format="dummy")
    engine.generate([[1, 2, 3]])
    pool = engine._open().engine.cache.pool

    def refuse(*args: Any) -> None:
        raise DriverError("no", call="unmap", code="TEST")

    with monkeypatch.context() as patch:
        patch.setattr(pool.driver, "unmap", refuse)
        with pytest.raises(DriverError):
            engine.close()
    engine.close()
    assert pool.closed


@pytest.mark.parametrize("length_penalty", [1e308, -1e308, 10.1, float("inf"), float("nan")])
def test_a_length_penalty_beyond_floats_fails_one_request(harness: Callable[..., Harness], length_penalty: float) -> None:
    one = harness(slots=6, ours=True)
    one.ask("good", prompt_of(12, 1), 10)
    one.ask("bad", prompt_of(10, 2), 6, beam_width=3, length_penalty=length_penalty)
    one.ask("last", prompt_of(12, 3), 10)
    one.run()
    assert one.failures().keys() == {"bad"}
    assert "wanted from -10 to 10" in one.failures()["bad"]
    assert len(one.tokens("good")) == len(one.tokens("last")) == 10


@pytest.mark.parametrize(("num_slots", "max_tokens"), [(2**24, 2**31), (2**40, 2**31)])
def test_more_token_ids_than_the_host_has_room_for_name_the_options(num_slots: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"[0-9.]+ \w+ of the host's memory.* lower max_num_seqs or max_tokens"):
        RequestTable(num_slots, max_tokens)
