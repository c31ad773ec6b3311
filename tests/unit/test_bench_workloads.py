"""Workloads: the same of the same seed, lengths as published, conversations that go on, arrivals at a rate."""

from collections.abc import Callable

import numpy as np
import pytest

from bench import workloads
from bench.workloads import CHAT_OUT, CHAT_PROMPT, DOCUMENT_OUT, DOCUMENT_PROMPT, LogNormal, Workload

MAKERS: list[Callable[..., Workload]] = [
    workloads.uniform,
    workloads.chat,
    workloads.long_documents,
    workloads.shared_prefix,
    workloads.multi_turn,
    workloads.skewed,
    workloads.ragged,
]


def made(maker: Callable[..., Workload], seed: int = 0, count: int = 60, max_tokens: int = 4096, **sizes: object) -> Workload:
    return maker(seed=seed, vocabulary=500, count=count, max_tokens=max_tokens, **sizes)


def asked(workload: Workload) -> list[tuple[bytes, int, float, int | None, float]]:
    return [(ask.prompt.tobytes(), ask.num_out, ask.arrival_s, ask.after, ask.think_s) for ask in workload.asks]


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_a_seed_asks_the_same_again_and_every_request_fits(maker: Callable[..., Workload]) -> None:
    workload = made(maker, seed=3)
    assert asked(workload) == asked(made(maker, seed=3)) != asked(made(maker, seed=4))
    for ask in workload.asks:
        assert len(ask.prompt) >= 1 and ask.num_out >= 1 and len(ask.prompt) + ask.num_out <= 4096
        assert ask.prompt.dtype == np.int32 and 0 <= ask.prompt.min() <= ask.prompt.max() < 500


@pytest.mark.parametrize("known", [CHAT_PROMPT, CHAT_OUT, DOCUMENT_PROMPT, DOCUMENT_OUT])
def test_published_quantiles_come_back_from_what_is_drawn(known: LogNormal) -> None:
    drawn = known.draw(np.random.default_rng(1), 200_000, 1.0)
    assert np.median(drawn) == pytest.approx(known.median, rel=0.01)
    assert np.percentile(drawn, 90) == pytest.approx(known.p90, rel=0.015)


def test_a_shared_prefix_is_shared_by_all_and_nothing_behind_it_is() -> None:
    prompts = [ask.prompt for ask in made(workloads.shared_prefix, prefix_tokens=70).asks]
    assert all(np.array_equal(prompt[:70], prompts[0][:70]) for prompt in prompts)
    assert len({prompt[70:].tobytes() for prompt in prompts}) == len(prompts)


def test_a_turns_prompt_begins_with_the_turn_before_and_has_room_for_its_answer() -> None:
    asks = made(workloads.multi_turn, count=5, turns=3, new=(4, 9), out=(2, 6)).asks
    assert [ask.after for ask in asks] == [None] * 5 + list(range(10))
    for index, ask in enumerate(asks[5:], start=5):
        before = asks[index - 5]
        assert np.array_equal(ask.prompt[: len(before.prompt)], before.prompt)
        assert 4 <= len(ask.prompt) - len(before.prompt) - before.num_out <= 9
        assert ask.think_s > 0


def test_skewed_and_ragged_have_the_shares_that_were_asked_for() -> None:
    ins = np.array([len(ask.prompt) for ask in made(workloads.skewed, count=160).asks])
    assert np.count_nonzero(ins >= 2048) == 10 and np.count_nonzero(ins <= 256) == 150
    outs = [ask.num_out for ask in made(workloads.ragged, count=20_000, max_tokens=100_000, prompt=(1, 1), mean_out=40).asks]
    assert np.mean(outs) == pytest.approx(40, rel=0.03)


def test_arrivals_are_a_poisson_process_and_followers_have_none() -> None:
    workload = made(workloads.uniform, count=20_000, prompt=(1, 1), out=(1, 1))
    arrived = workloads.arriving(workload, 20.0, seed=1)
    gaps = np.diff([ask.arrival_s for ask in arrived.asks], prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1, rel=0.1)
    assert "20 a second" in arrived.text
    turns = workloads.arriving(made(workloads.multi_turn, count=4, turns=3), 2.0, seed=0).asks
    assert all((ask.arrival_s > 0) == (ask.after is None) for ask in turns)


def test_requests_of_which_none_fits_are_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens=150 tokens however often"):
        made(workloads.uniform, max_tokens=150)
