"""Systems: requests come when they may, runs are checked, models have bounds, and streams are read to their end."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.harness import WrongNumbers
from bench.systems import over_http
from bench.systems.models import MODELS, decode_s, padded, requests_s, vocabulary_of
from bench.systems.runs import Served, ServedRun, Turns, alike, share_off, share_same, take_turns
from bench.workloads import Ask, Workload
from tests.unit.recorded import recorder_in


def ask(num_prompt: int, num_out: int, **when: float) -> Ask:
    return Ask(prompt=np.arange(num_prompt, dtype=np.int32), num_out=num_out, **when)  # type: ignore[arg-type]


def test_a_follower_comes_when_its_turn_before_has_ended_with_that_ones_answer_in_its_prompt() -> None:
    turns = Turns([ask(2, 2), ask(6, 1, after=0, think_s=0.5), ask(3, 1, arrival_s=2.0)])
    assert turns.arrived(0.0) == [0]
    turns.served[0].tokens, turns.served[0].token_s = [70, 71], [0.5, 1.0]
    turns.end(0)
    assert turns.next_s == 1.5
    assert turns.arrived(1.5) == [1]
    assert turns.prompts[1] == [0, 1, 70, 71, 4, 5]
    assert turns.arrived(5.0) == [2]
    turns.served[1].tokens = [1, 2]
    with pytest.raises(WrongNumbers, match="2 tokens of 1"):
        turns.end(1)


def test_log_probabilities_that_are_off_or_of_other_tokens_are_refused() -> None:
    right, other = [{1: -1.0, 2: -2.0}], [{1: -3.0, 2: -0.5}]
    assert share_off(right, [{1: -1.0, 2: -2.0}], other, torch.float32, "x") == 0
    with pytest.raises(WrongNumbers, match="off by"):
        share_off(right, [{1: -1.1, 2: -2.0}], other, torch.float32, "x")
    with pytest.raises(WrongNumbers, match="other likeliest tokens"):
        share_off(right, [{8: -1.0, 9: -2.0}], other, torch.float32, "x")
    with pytest.raises(WrongNumbers, match="change nothing"):
        share_off(right, right, right, torch.float32, "x")
    assert alike({1: 0.0}, {1: 0.0, 2: 0.0, 3: 0.0})


def test_other_answers_are_a_share_or_an_error() -> None:
    wanted = ServedRun([Served(tokens=[1]), Served(tokens=[2])], 1.0)
    other = ServedRun([Served(tokens=[1]), Served(tokens=[3])], 1.0)
    assert share_same([wanted, other], wanted, strict=False) == 0.5
    with pytest.raises(WrongNumbers, match=r"1 of 2 requests have other tokens in another run: \[1\]"):
        share_same([other], wanted, strict=True)


def test_systems_take_turns_forward_and_backward_and_later_workloads_keep_the_cache(tmp_path: Path) -> None:
    order: list[tuple[str, str, bool]] = []

    class System:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, workload: Workload, *, keep: bool = False) -> ServedRun:
            order.append((self.name, workload.name, keep))
            return ServedRun([], 1.0)

    cold, warm = (Workload(name=name, text="", asks=()) for name in ("cold", "warm"))

    def leaves_out(system: str, round_: int, place: int) -> bool:
        return (system, round_, place) == ("b", 1, 1)

    by_place = take_turns(
        recorder_in(tmp_path), [System("a"), System("b")], [[cold, warm]] * 2, ["c", "w"], leaves_out=leaves_out
    )
    assert [name for name, workload, _ in order if workload == "cold"] == ["a", "b", "b", "a"]
    assert all(keep == (workload == "warm") for _, workload, keep in order)
    assert [{name: len(of) for name, of in runs.items()} for runs in by_place] == [{"a": 2, "b": 2}, {"a": 2, "b": 1}]


def test_bounds_follow_from_bytes_and_operations() -> None:
    llama = MODELS["llama-3.1-8b"]
    assert llama.row_bytes == 131072
    assert 2 * llama.step_parameters == pytest.approx(15.0e9, rel=0.01)
    assert decode_s(llama, 1, 1000) == pytest.approx((2 * llama.step_parameters + 1000 * 131072) / 4.5e12)
    cold, warm = (requests_s(llama, [5000] * 2, [2, 2], shared=4000, known=known) for known in (False, True))
    assert warm < cold < requests_s(llama, [5000] * 2, [2, 2])


def test_a_tokenizer_is_padded_to_a_models_tokens_without_new_merges(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": []}))
    tokenizer = json.loads(padded(path, 6))
    assert sorted(tokenizer["model"]["vocab"].values()) == list(range(6))
    assert tokenizer["model"]["merges"] == []
    assert vocabulary_of(path) == 2
    with pytest.raises(ValueError, match="name a smaller one"):
        padded(path, 1)
    with pytest.raises(ValueError, match="cannot be padded"):
        path.write_text("{}")
        vocabulary_of(path)


def stream(*events: object) -> bytes:
    return b"".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode() for event in events)


def test_a_stream_is_read_to_its_usage_and_a_broken_one_says_what_is_wrong() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    chunks = [{"choices": [{"text": text}]} for text in "ab"]
    told = over_http.parse(stream(*chunks, {"choices": [], "usage": usage}, "[DONE]"), 200)
    assert (told.text, told.prompt_tokens, told.cached_tokens, told.completion_tokens) == ("ab", 3, 1, 2)
    assert over_http.parse(stream(*chunks), 200).error == "the stream has no end"
    assert over_http.parse(b"no", 500).error == "status 500: no"
    assert "boom" in over_http.parse(stream({"error": "boom"}, "[DONE]"), 200).error
