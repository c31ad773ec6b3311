"""A request that can never be served is refused when it arrives, with the reason; no other request is."""

from typing import Any

import pytest
import torch

from tests.engine.conftest import VOCABULARY, MakeHarness, prompt_of, wide_rows, windowed
from vmmkv import PAGE_BYTES, KVLayout
from vmmkv.server.engine.kv_backend import least_bytes

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
    ("beams", {"beam_width": 5}, "A search of 5 beams needs as many slots, and this server has 4: lower beam_width to 4."),
    ("scores", {"prompt_logprobs": 5000}, "prompt_logprobs is 5000; 1024 is the most"),
    (
        "only ends", {"min_tokens": 2, "stop_token_ids": list(range(VOCABULARY))},
        "min_tokens=2 leaves no token: each of the vocabulary ends this answer; give fewer stop_token_ids",
    ),
    (
        "grammar and min_tokens", {"min_tokens": 2, "grammar": b"a"},
        "min_tokens is not for an answer that follows a grammar, which ends where the grammar does",
    ),
    ("grammar", {"grammar": b"a"}, "this engine knows no grammars"),
]  # fmt: skip


def test_what_cannot_be_served_is_refused_alone_with_the_reason(harness: MakeHarness) -> None:
    one = harness(ours=True, slots=4)
    one.ask("before", prompt_of(9))
    for name, options, _ in REFUSED:
        one.ask(name, **{"prompt": prompt_of(5), "max_new_tokens": options.pop("max_tokens", 8)} | options)
    one.ask("after", prompt_of(9))
    assert one.failures() == {name: reason for name, _, reason in REFUSED}
    one.run()
    assert one.tokens("before") == one.tokens("after") == one.expected(prompt_of(9))


WINDOWS = pytest.mark.parametrize("model", [wide_rows, windowed])
"""64 rows a page, of which the second attends to the last 30."""


@WINDOWS
@pytest.mark.parametrize("share", [False, True])
def test_a_request_that_never_fits_is_refused_while_others_run(harness: MakeHarness, model: Any, share: bool) -> None:
    one = harness(model(), ours=True, budget_pages=5, step_tokens=512, share=share)
    one.ask("runs", prompt_of(20), 30)
    one.step()
    one.ask("prompt", prompt_of(5 * 64 + 1), 1)
    one.ask("answer", prompt_of(20), 5 * 64)
    one.ask("beams", prompt_of(20), 90, beam_width=4)
    refused = {"prompt", "answer", "beams"} if model is wide_rows else set() if share else {"prompt"}
    assert one.failures().keys() == refused, "a window of 30 rows and what is known of a prompt need a page or two"
    one.run()
    assert len(one.tokens("runs")) == 30 and "runs" not in one.failures()


def test_a_refusal_says_what_was_asked_what_there_is_and_what_would_work(harness: MakeHarness) -> None:
    one = harness(wide_rows(), budget_pages=5)
    one.ask("prompt", prompt_of(400), 40)
    one.ask("beams", prompt_of(64), 129, beam_width=3)
    prompt, beams = one.failures()["prompt"], one.failures()["beams"]
    assert "a prompt of 400 tokens and 40 new ones take at least 13.7 MiB" in prompt  # 439 rows of 32 KiB
    assert "whole KV budget is 10.0 MiB, 320 tokens of one sequence: ask for fewer tokens, or raise the budget" in prompt
    assert "129 new ones in each of 3 beams take at least 14.0 MiB" in beams and "fewer tokens or beams" in beams
    one.ask("fits", prompt_of(300), 20)
    one.pool.resize(7 * PAGE_BYTES)
    one.ask("fits since", prompt_of(400), 40)
    one.run()
    assert one.failures().keys() == {"prompt", "beams"}


@WINDOWS
@pytest.mark.parametrize(("num_prompt", "num_new", "width"), [(320, 1, 0), (257, 64, 0), (64, 65, 4), (1, 128, 2)])
def test_what_fits_to_the_last_row_is_not_refused(
    harness: MakeHarness, model: Any, num_prompt: int, num_new: int, width: int
) -> None:
    one = harness(model(), ours=True, budget_pages=5, step_tokens=512)
    one.ask("full", prompt_of(num_prompt), num_new, beam_width=width)
    one.run()
    assert not one.failures()


def test_a_request_that_may_stop_early_is_not_refused_for_its_limit(harness: MakeHarness) -> None:
    one = harness(wide_rows(), budget_pages=5, step_tokens=512)
    first = one.expected(prompt_of(300), 1)
    one.ask("stops", prompt_of(300), 400, stop_token_ids=first)
    one.run()
    assert one.finish_reasons("stops") == ["stop"]


@pytest.mark.parametrize("window", [None, 1, 30])
def test_the_least_is_no_more_than_what_a_layout_says(window: int | None) -> None:
    layout = KVLayout.uniform(layers=2, kv_heads=16, head_dim=128, dtype=torch.float32, windows=[None, window])
    for num_prompt, num_rows in ((1, 0), (29, 2), (200, 100)):
        rows = least_bytes(layout, num_prompt, num_rows, num_beams=1, attaches=True)
        assert rows == layout.token_bytes(num_prompt + num_rows)
        computed = least_bytes(layout, num_prompt, num_rows, num_beams=1, attaches=False)
        assert rows <= computed <= layout.peak_pages(num_prompt + num_rows, sliding=False) * PAGE_BYTES
