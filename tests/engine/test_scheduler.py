"""Refusal, admission by prefix and preemption by priority: which requests run, and that their tokens do not change."""

from typing import Any

import pytest
import torch

from tests.engine.conftest import PAGE_TOKENS, VOCABULARY, Harness, MakeHarness, prompt_of, tiny_model, wide_rows, windowed
from vmmkv import PAGE_BYTES, KVLayout
from vmmkv.prefix.radix_tree import num_common
from vmmkv_server.engine import waiting
from vmmkv_server.engine.engine import Engine
from vmmkv_server.engine.kv_backend import least_bytes
from vmmkv_server.protocol import Abort

SHARES = pytest.mark.parametrize("share", [False, True])
WAYS = pytest.mark.parametrize(("lookahead", "share"), [(0, False), (2, True)])


def running(one: Harness) -> list[str]:
    """The running requests, the oldest first."""
    return [request.ask.request_id for request in one.engine.scheduler.running]


@WAYS
def test_the_newest_of_the_lowest_priority_gives_its_slot(harness: MakeHarness, lookahead: int, share: bool) -> None:
    one = harness(wide_rows(), ours=True, max_sequences=3, share=share, lookahead=lookahead)
    sampled = {"temperature": 1.0, "seed": 3}
    asked: dict[str, dict[str, Any]] = {"old": {"priority": 1}, "first": {"priority": 2}, "second": {"priority": 2, **sampled}}
    for index, (name, options) in enumerate(asked.items()):
        one.ask(name, prompt_of(40, index), 30, **options)
    one.step(10)
    one.ask("pressing", prompt_of(30, 7), 20, priority=-1)
    one.step(2)
    assert running(one) == ["old", "first", "pressing"]
    one.run()
    assert not one.failures() and one.engine.scheduler.counts.preemptions == 1
    names = [output.request_id for output in one.outputs() if output.finish_reason]
    assert names.index("pressing") < names.index("second")

    assert one.tokens("second") == harness(wide_rows(), ours=True).said(prompt_of(40, 2), 30, **sampled)
    for index, name in enumerate(("old", "first")):
        assert one.tokens(name) == one.expected(prompt_of(40, index), 30)
    assert one.tokens("pressing") == one.expected(prompt_of(30, 7), 20)


@WAYS
def test_as_many_lower_priorities_are_preempted_as_it_takes(harness: MakeHarness, lookahead: int, share: bool) -> None:
    one = harness(windowed(), ours=True, budget_pages=4, step_tokens=512, share=share, lookahead=lookahead)
    for index in range(4):
        one.ask(str(index), prompt_of(40, index), 20, priority=index + 1)  # a page each
    one.step(4)
    one.ask("pressing", prompt_of(100, 7), 20)  # two pages
    one.step()
    assert running(one) == ["0", "1", "pressing"]
    one.run()
    assert not one.failures() and one.engine.scheduler.counts.preemptions == 2
    for index in range(4):
        assert one.tokens(str(index)) == one.expected(prompt_of(40, index), 20)
    assert one.tokens("pressing") == one.expected(prompt_of(100, 7), 20)


@SHARES
def test_no_preemption_while_sliding_windows_makes_room(harness: MakeHarness, share: bool) -> None:
    one = harness(windowed(), ours=True, budget_pages=5, step_tokens=300, share=share)
    one.ask("long", prompt_of(250), 60, priority=1)
    one.step()
    one.ask("pressing", prompt_of(100, 1), 10)
    one.step(2)
    assert running(one) == ["long", "pressing"]
    one.run()
    assert not one.failures() and one.engine.scheduler.counts.preemptions == 0


def test_a_cached_prompt_is_a_hit_once_and_resumed_tokens_are_counted_apart(harness: MakeHarness) -> None:
    one = harness(wide_rows(), share=True, max_sequences=1)
    prompt, counts = prompt_of(150), one.engine.scheduler.counts
    one.ask("first", prompt, 2)
    one.run()
    one.ask("again", prompt, 20, priority=1)
    one.step(3)
    assert counts.hit_tokens == {"device": 149} and counts.resumed_tokens == {}
    one.ask("pressing", prompt_of(30, 7), 5)
    one.run()
    assert not one.failures() and counts.preemptions == 1
    assert counts.hit_tokens == {"device": 149} and counts.resumed_tokens["device"] > 100


def cached(harness: Harness, request_id: str) -> int:
    """What the first output says was known of the prompt; the others say nothing."""
    first, *others = (output.cached_tokens for output in harness.outputs(request_id))
    assert not any(others)
    return first


@pytest.mark.parametrize("length", [1, 2, 100, PAGE_TOKENS, PAGE_TOKENS + 1, PAGE_TOKENS + 700])
def test_a_prompt_that_was_there_before_computes_its_last_token_only(harness: MakeHarness, length: int) -> None:
    one = harness(share=True, step_tokens=4096)
    prompt = prompt_of(length)
    one.ask("first", prompt)
    one.run()
    one.ask("second", prompt)
    one.ask("longer", [*prompt, *one.tokens("first")[:-1], 7, 8, 9])
    one.run()
    assert one.tokens("first") == one.tokens("second") == one.expected(prompt)
    assert one.tokens("longer") == one.expected([*prompt, *one.tokens("first")[:-1], 7, 8, 9])
    assert (cached(one, "first"), cached(one, "second")) == (0, length - 1)
    assert cached(one, "longer") == length + 7


def test_requests_of_one_prompt_wait_for_the_first_and_share_its_rows(harness: MakeHarness) -> None:
    prompt = prompt_of(PAGE_TOKENS + 300)
    one = harness(share=True, step_tokens=4096)
    for index in range(4):
        one.ask(str(index), prompt, 8)
    one.run()
    assert [cached(one, str(index)) for index in range(4)] == [0, *[len(prompt) - 1] * 3]


def test_a_salt_never_hits_anothers(harness: MakeHarness) -> None:
    one = harness(share=True)
    prompt = prompt_of(300)
    for index, salt in enumerate((None, "red", "blue", "red")):
        one.ask(str(index), prompt, cache_salt=salt)
        one.run()
    assert [cached(one, str(index)) for index in range(4)] == [0, 0, 0, 299]


def test_windowed_layers_need_their_last_window_only(harness: MakeHarness) -> None:
    one = harness(windowed(100), share=True, step_tokens=512)
    prompt = prompt_of(600)
    one.ask("first", prompt)
    one.run()
    longer = [*prompt, *one.tokens("first")[:-1], 5]
    assert one.said(longer) == one.expected(longer)
    assert cached(one, "alone") == len(longer) - 1


@pytest.mark.parametrize(("is_idle", "admitted"), [(False, 16), (True, 8)])
def test_fewer_are_admitted_while_the_device_waits(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, is_idle: bool, admitted: int
) -> None:
    monkeypatch.setattr(Engine, "is_idle", lambda engine: is_idle)
    one = harness(slots=24, step_tokens=512)
    for index in range(24):
        one.ask(str(index), prompt_of(5, index), 4)
    one.step()
    assert running(one) == [str(index) for index in range(admitted)]


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_an_aborted_request_leaves_what_it_computed(harness: MakeHarness, lookahead: int) -> None:
    """Rows of steps in flight are not confirmed yet, and are not shared."""
    one = harness(share=True, step_tokens=64, lookahead=lookahead)
    prompt = prompt_of(300)
    one.ask("gone", prompt)
    one.step(3)
    one.engine.receive(Abort(request_id="gone"))
    assert one.said(prompt) == one.expected(prompt)
    assert cached(one, "alone") == 64 * (3 - lookahead)


IDS = "is not a token id of this model: they go from 0 to 198."
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("no prompt", {"prompt": []}, "The prompt has no tokens; send at least one."),
    (
        "too long", {"prompt": [1] * 8000, "max_tokens": 1000},
        "This request is for 9000 tokens, 8000 of prompt and 1000 new, but one request can have 8192 (the most that this "
        "engine takes here): lower max_tokens to 192 or shorten the prompt to 7192 tokens.",
    ),
    ("below the ids", {"prompt": [1, -1]}, f"Invalid prompt: -1 {IDS}"),
    ("beyond the ids", {"prompt": [2**40]}, f"Invalid prompt: {2**40} {IDS}"),
    ("bias", {"logit_bias": {3: 1.0, VOCABULARY: 1.0}}, f"Invalid logit_bias: 199 {IDS}"),
    ("stop id", {"stop_token_ids": [VOCABULARY]}, f"Invalid stop_token_ids: 199 {IDS}"),
    ("scores", {"prompt_logprobs": 5000}, "prompt_logprobs is 5000; 1024 is the most"),
    (
        "only ends", {"min_tokens": 2, "stop_token_ids": list(range(VOCABULARY))},
        "min_tokens=2 leaves no token: each of the vocabulary ends this answer; give fewer stop_token_ids",
    ),
    (
        "grammar and min_tokens", {"min_tokens": 2, "grammar": b"a"},
        "min_tokens is not for an answer that follows a grammar, which ends where the grammar does",
    ),
]  # fmt: skip


def test_what_cannot_be_served_is_refused_alone_with_the_reason(harness: MakeHarness) -> None:
    one = harness(ours=True, slots=4)
    one.ask("before", prompt_of(9))
    for name, given, _ in REFUSED:
        options = given.copy()
        one.ask(name, **{"prompt": prompt_of(5), "max_new_tokens": options.pop("max_tokens", 8)} | options)
    one.ask("after", prompt_of(9))
    assert one.failures() == {name: reason for name, _, reason in REFUSED}
    one.run()
    assert one.tokens("before") == one.tokens("after") == one.expected(prompt_of(9))


LAYERS = pytest.mark.parametrize("model", [wide_rows, windowed])
"""64 rows a page, of which the second attends to the last 30."""


@LAYERS
@SHARES
def test_a_request_that_never_fits_is_refused_while_others_run(harness: MakeHarness, model: Any, share: bool) -> None:
    one = harness(model(), ours=True, budget_pages=5, step_tokens=512, share=share)
    one.ask("runs", prompt_of(20), 30)
    one.step()
    one.ask("prompt", prompt_of(5 * 64 + 1), 1)
    one.ask("answer", prompt_of(20), 5 * 64)
    refused = {"prompt", "answer"} if model is wide_rows else set() if share else {"prompt"}
    assert one.failures().keys() == refused, "a window of 30 rows and what is known of a prompt need a page or two"
    one.run()
    assert len(one.tokens("runs")) == 30 and "runs" not in one.failures()


def test_a_refusal_says_what_was_asked_what_there_is_and_what_would_work(harness: MakeHarness) -> None:
    one = harness(wide_rows(), budget_pages=5)
    one.ask("prompt", prompt_of(400), 40)
    prompt = one.failures()["prompt"]
    assert "a prompt of 400 tokens and 40 new ones take at least 13.7 MiB" in prompt  # 439 rows of 32 KiB
    assert "whole KV budget is 10.0 MiB, 320 tokens of one sequence: ask for fewer tokens, or raise the budget" in prompt
    one.ask("fits", prompt_of(300), 20)
    one.pool.resize(7 * PAGE_BYTES)
    one.ask("fits since", prompt_of(400), 40)
    one.run()
    assert one.failures().keys() == {"prompt"}


@LAYERS
@pytest.mark.parametrize(("num_prompt", "num_new"), [(320, 1), (257, 64)])
def test_what_fits_to_the_last_row_is_not_refused(harness: MakeHarness, model: Any, num_prompt: int, num_new: int) -> None:
    one = harness(model(), ours=True, budget_pages=5, step_tokens=512)
    one.said(prompt_of(num_prompt), num_new)
    assert not one.failures()


def test_a_request_that_may_stop_early_is_not_refused_for_its_limit(harness: MakeHarness) -> None:
    one = harness(wide_rows(), budget_pages=5, step_tokens=512)
    first = one.expected(prompt_of(300), 1)
    one.said(prompt_of(300), 400, stop_token_ids=first)
    assert one.finish_reasons("alone") == ["stop"]


@pytest.mark.parametrize("window", [None, 1, 30])
def test_the_least_is_no_more_than_what_a_layout_says(window: int | None) -> None:
    layout = KVLayout.uniform(layers=2, kv_heads=16, head_dim=128, dtype=torch.float32, windows=[None, window])
    for num_prompt, num_rows in ((1, 0), (29, 2), (200, 100)):
        rows = least_bytes(layout, num_prompt, num_rows, num_beams=1, attaches=True)
        assert rows == layout.token_bytes(num_prompt + num_rows)
        computed = least_bytes(layout, num_prompt, num_rows, num_beams=1, attaches=False)
        assert rows <= computed <= layout.peak_pages(num_prompt + num_rows, sliding=False) * PAGE_BYTES


def test_prompts_that_wait_for_a_running_one_are_compared_with_it_once(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    monkeypatch.setattr(waiting, "num_common", lambda *prompts: compared.append(num_common(*prompts)) or compared[-1])
    one, stem = harness(ours=True, share=True, step_tokens=1200), prompt_of(1000)
    for index in range(4):
        one.ask(str(index), [*stem, 1 + index], 4)
    one.step()
    for _ in range(5):  # its rows have not been read back
        one.engine.scheduler.schedule()
    assert running(one) == ["0"] and compared == [1000, 1000, 1000]
    one.run()
    assert all(one.tokens(str(index)) == one.expected([*stem, 1 + index], 4) for index in range(4))


def test_a_request_without_room_does_not_try_again_in_every_step() -> None:
    one = Harness(tiny_model(), share=True, budget_pages=3, step_tokens=4096)
    one.ask("large", prompt_of(4000), 40)
    one.ask("waits", prompt_of(3000, 5), 2)
    one.run()
    assert not one.failures()
    assert sum(one.prefix.stats().attached.values()) <= 4  # each once, and once or twice in vain
    one.close()
