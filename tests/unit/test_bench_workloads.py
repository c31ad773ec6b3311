"""Workloads: the same of the same seed, the lengths that were promised, conversations that go on, arrivals at a rate."""

import re
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
every_maker = pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)


def made(maker: Callable[..., Workload], seed: int = 0, count: int = 60, max_tokens: int = 4096, **sizes: object) -> Workload:
    return maker(seed=seed, vocabulary=500, count=count, max_tokens=max_tokens, **sizes)


def lengths(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    return np.array([len(ask.prompt) for ask in workload.asks]), np.array([ask.num_out for ask in workload.asks])


def same(first: Workload, second: Workload) -> bool:
    pairs = zip(first.asks, second.asks, strict=True)
    return all(
        np.array_equal(a.prompt, b.prompt)
        and (a.num_out, a.arrival_s, a.after, a.think_s) == (b.num_out, b.arrival_s, b.after, b.think_s)
        for a, b in pairs
    )


@every_maker
def test_the_same_seed_asks_the_same_and_another_seed_something_else(maker: Callable[..., Workload]) -> None:
    assert same(made(maker, seed=3), made(maker, seed=3))
    assert not same(made(maker, seed=3), made(maker, seed=4))
    assert made(maker, seed=3).text == made(maker, seed=3).text


@every_maker
def test_every_request_fits_and_its_tokens_are_in_the_vocabulary(maker: Callable[..., Workload]) -> None:
    workload = made(maker, count=200)
    ins, outs = lengths(workload)
    assert (ins >= 1).all()
    assert (outs >= 1).all()
    assert (ins + outs <= 4096).all()
    for ask in workload.asks:
        assert ask.prompt.dtype == np.int32
        assert 0 <= ask.prompt.min() <= ask.prompt.max() < 500
        assert ask.arrival_s == 0.0


@pytest.mark.parametrize("known", [CHAT_PROMPT, CHAT_OUT, DOCUMENT_PROMPT, DOCUMENT_OUT])
def test_published_quantiles_come_back_from_what_is_drawn(known: LogNormal) -> None:
    drawn = known.draw(np.random.default_rng(1), 200_000, 1.0)
    assert np.median(drawn) == pytest.approx(known.median, rel=0.01)
    assert np.percentile(drawn, 90) == pytest.approx(known.p90, rel=0.015)


def test_chat_has_the_published_quantiles_where_nothing_is_cut_and_shorter_ones_where_it_is() -> None:
    ins, outs = lengths(made(workloads.chat, count=4000, max_tokens=1_000_000))
    assert np.median(ins) == pytest.approx(1730, rel=0.06)
    assert np.percentile(outs, 90) == pytest.approx(834, rel=0.06)
    cut, _ = lengths(made(workloads.chat, count=4000))
    assert np.median(cut) < np.median(ins)
    small, _ = lengths(made(workloads.chat, count=4000, max_tokens=100_000, scale=0.1))
    assert np.median(small) == pytest.approx(173, rel=0.06)


def test_uniform_reaches_both_ends_and_nothing_beyond() -> None:
    for each in lengths(made(workloads.uniform, count=3000, prompt=(3, 9), out=(3, 9))):
        assert set(each) == set(range(3, 10))


def test_long_documents_ask_much_and_answer_little() -> None:
    ins, outs = lengths(made(workloads.long_documents, count=400, max_tokens=16384))
    assert np.median(ins) > 20 * np.median(outs)


def test_a_shared_prefix_is_shared_by_all_and_nothing_behind_it_is() -> None:
    prompts = [ask.prompt for ask in made(workloads.shared_prefix, prefix_tokens=70).asks]
    assert all(np.array_equal(prompt[:70], prompts[0][:70]) for prompt in prompts)
    assert len({prompt[70:].tobytes() for prompt in prompts}) == len(prompts)


def test_a_turns_prompt_begins_with_the_whole_turn_before_and_has_room_for_its_answer() -> None:
    asks = made(workloads.multi_turn, count=5, turns=3, new=(4, 9), out=(2, 6)).asks
    assert len(asks) == 15
    assert [ask.after for ask in asks[:5]] == [None] * 5
    for index, ask in enumerate(asks[5:], start=5):
        assert ask.after == index - 5
        before = asks[ask.after]
        assert np.array_equal(ask.prompt[: len(before.prompt)], before.prompt)
        assert 4 <= len(ask.prompt) - len(before.prompt) - before.num_out <= 9
        assert ask.think_s > 0


def test_people_think_for_as_long_as_was_said_on_average() -> None:
    asks = made(workloads.multi_turn, count=2000, turns=2, new=(1, 2), out=(1, 2), think_s=3.0).asks
    assert np.mean([ask.think_s for ask in asks if ask.after is not None]) == pytest.approx(3.0, rel=0.1)


def test_skewed_has_just_the_share_of_long_prompts_that_was_asked_for() -> None:
    ins, _ = lengths(made(workloads.skewed, count=160))
    assert np.count_nonzero(ins >= 2048) == 10
    assert np.count_nonzero(ins <= 256) == 150
    assert len(made(workloads.skewed, count=1).asks[0].prompt) >= 2048


def test_ragged_answers_are_geometric() -> None:
    _, outs = lengths(made(workloads.ragged, count=20_000, max_tokens=100_000, prompt=(1, 1), mean_out=40))
    assert outs.mean() == pytest.approx(40, rel=0.03)
    # Without memory: half of those that have lasted for so long last for as long again.
    half = np.log(2) * 40
    for start in (0, 30, 60):
        assert np.mean(outs[outs > start] > start + half) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for(burstiness: float) -> None:
    asked = made(workloads.uniform, count=20_000, prompt=(1, 1), out=(1, 1))
    arrived = workloads.arriving(asked, 20.0, burstiness, seed=1)
    moments = np.array([ask.arrival_s for ask in arrived.asks])
    gaps = np.diff(moments, prepend=0.0)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(burstiness, rel=0.1)
    assert same(arrived, workloads.arriving(asked, 20.0, burstiness, seed=1))
    assert not same(arrived, workloads.arriving(asked, 20.0, burstiness, seed=2))
    assert "20 a second" in arrived.text


def test_who_waits_for_another_has_no_moment_of_its_own() -> None:
    arrived = workloads.arriving(made(workloads.multi_turn, count=4, turns=3), 2.0, seed=0).asks
    assert all(ask.arrival_s > 0 for ask in arrived[:4])
    assert all(ask.arrival_s == 0 for ask in arrived[4:])


@pytest.mark.parametrize(
    ("maker", "sizes", "said"),
    [
        (workloads.uniform, {"count": 0}, "count=0"),
        (workloads.uniform, {"prompt": (9, 3)}, "from 9 to 3"),
        (workloads.uniform, {"max_tokens": 150}, "max_tokens=150 tokens however often"),
        (workloads.chat, {"max_tokens": 64}, "raise it, or make"),
        (workloads.chat, {"scale": 0.0}, "scale=0"),
        (workloads.shared_prefix, {"max_tokens": 1000}, "however often"),
        (workloads.multi_turn, {"turns": 0}, "from 0 to 0"),
        (workloads.multi_turn, {"think_s": -1.0}, "think_s=-1"),
        (workloads.skewed, {"long_share": 0.0}, "long_share=0"),
        (workloads.ragged, {"mean_out": 0.5}, "mean_out=0.5"),
    ],
)
def test_sizes_that_cannot_be_are_refused(maker: Callable[..., Workload], sizes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        made(maker, **sizes)


@pytest.mark.parametrize(("rate_per_s", "burstiness"), [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_arrivals_that_cannot_be_are_refused(rate_per_s: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        workloads.arriving(made(workloads.uniform, count=2), rate_per_s, burstiness, seed=0)
