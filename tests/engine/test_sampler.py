"""Sampling follows the distribution, keeps to its parameters, and depends on no other row."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vmmkv_kernels.reference import least_kept
from vmmkv_server.engine.request import Request
from vmmkv_server.engine.sampler import NOT_A_NUMBER, Sampler, logprobs
from vmmkv_server.engine.uploads import Uploads
from vmmkv_server.protocol import Generate
from vmmkv_server.sampling_params import SamplingParams

CPU = torch.device("cpu")
INFINITY = float("inf")


def request_in(slot: int, prompt: Sequence[int] = (0,), generated: Sequence[int] = (), **options: Any) -> Request:
    request = Request(
        Generate(request_id=str(slot), prompt=list(prompt), params=SamplingParams(max_tokens=1, **options)), frozenset()
    )
    request.begin_with(generated)
    request.sequence = SimpleNamespace(slot=slot)  # type: ignore[assignment]
    return request


def make_sampler(vocabulary: int, *requests: Request) -> Sampler:
    sampler = Sampler(1 + max((each.memory.slot for each in requests), default=0), vocabulary, Uploads(CPU))
    if requests:
        sampler.assign(requests)
    return sampler


def draw(logits_V: torch.Tensor, count: int, *, first_position: int = 0, **options: Any) -> torch.Tensor:
    """[count] tokens of one request, at positions that follow each other."""
    sampler = make_sampler(len(logits_V), request_in(1, **options))
    positions_B = torch.arange(first_position, first_position + count, dtype=torch.int32)
    return sampler.sample(logits_V.expand(count, -1), torch.ones(count, dtype=torch.int32), positions_B, greedy=False)


def sample_rows(logits_BV: torch.Tensor, asked: Sequence[dict[str, Any]], position: int = 3) -> list[int]:
    """A token for each row, whose slots have these options."""
    sampler = make_sampler(logits_BV.shape[1], *(request_in(1 + row, **options) for row, options in enumerate(asked)))
    slots_B = torch.arange(1, 1 + len(asked), dtype=torch.int32)
    return sampler.sample(logits_BV, slots_B, torch.full_like(slots_B, position), greedy=False).tolist()


def assert_follows(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Pearson's test: the statistic of tokens that follow these probabilities is within four deviations of its mean."""
    observed = torch.bincount(tokens.long(), minlength=len(probabilities)).double()
    expected = probabilities.double() / probabilities.double().sum() * len(tokens)
    assert observed[expected == 0].sum() == 0
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom) + 4, statistic


@pytest.mark.parametrize(("seed", "temperature"), [(0, 1.0), (-1, 0.5), (2**62, 2.5)])
def test_frequencies_are_the_probabilities(seed: int, temperature: float) -> None:
    logits = torch.randn(37, generator=torch.Generator().manual_seed(5))
    tokens = draw(logits, 6000, seed=seed, temperature=temperature)
    assert_follows(tokens, torch.softmax(logits / temperature, dim=-1))


def test_frequencies_are_the_probabilities_in_a_vocabulary_of_many_groups() -> None:
    logits = torch.zeros(5003)
    tokens = draw(logits, 2000, seed=2)
    assert_follows(tokens // 140, torch.bincount(torch.arange(5003) // 140).double())
    assert_follows(tokens % 4, torch.bincount(torch.arange(5003) % 4).double())


def test_seeds_are_independent_at_one_position() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    tokens = sample_rows(logits.expand(3000, -1), [{"seed": seed} for seed in range(3000)])
    assert_follows(torch.tensor(tokens), logits.exp())


def test_successive_tokens_of_a_request_are_independent() -> None:
    tokens = draw(torch.zeros(4), 8000, seed=9).long()
    assert_follows(tokens[:-1:2] * 4 + tokens[1::2], torch.ones(16))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_k": 5}, 4),
        ({"top_p": 0.49}, 1),
        ({"top_p": 0.51}, 2),
        ({"top_p": 0.94}, 3),
        ({"top_p": 1e-46}, 1),
        ({"min_p": 0.29}, 3),
        ({"min_p": 0.31}, 2),
        ({"min_p": 1.0}, 1),
        ({"top_k": 3, "top_p": 0.6}, 2),
        ({"top_k": 2, "top_p": 0.6}, 1),  # of the two that are left the first has 0.625
    ],
)
def test_what_a_filter_keeps_is_drawn_in_proportion(options: dict[str, Any], kept: int) -> None:
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3])
    order = probabilities.argsort(descending=True)
    expected = torch.zeros(4)
    expected[order[:kept]] = probabilities[order[:kept]]
    assert_follows(draw(probabilities.log(), 4000, seed=11, **options), expected)


@pytest.mark.parametrize("ties", [False, True])
def test_filters_keep_what_their_definitions_say(ties: bool) -> None:
    generator = np.random.default_rng(4)
    for _ in range(60):
        logits = 3 * generator.standard_normal(101).astype(np.float32)
        logits = np.round(logits) if ties else logits
        temperature, top_p, min_p = generator.uniform(0.3, 3), generator.uniform(0.05, 1), generator.choice([0, 0.01, 0.1])
        top_k = int(generator.choice([0, 1, 7, 60, 101, 500]))
        numbers = (temperature, top_k, top_p, min_p)
        parameters = (
            torch.tensor([number], dtype=torch.int32 if index == 1 else torch.float32) for index, number in enumerate(numbers)
        )
        least = float(least_kept(torch.from_numpy(logits)[None], *parameters))

        weights = np.exp(logits.astype(np.float64) / temperature)
        kth = np.sort(logits)[::-1][(top_k or 101) - 1] if top_k < 101 else -np.inf
        left = weights[logits >= kth].sum()
        kept = [
            logit >= kth
            and (weights[logits > logit].sum() < top_p * left or logit == logits.max())
            and weight >= min_p * weights.max()
            for logit, weight in zip(logits, weights, strict=True)
        ]
        assert np.array_equal(logits >= least, kept), numbers


def test_a_token_depends_on_no_neighbour() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(40, 1500, generator=generator)
    asked = [
        {"seed": row % 7, "temperature": (0.0, 0.8, 1.3)[row % 3], "top_p": (1.0, 0.9)[row % 2], "top_k": (0, 40, 0)[row % 3]}
        for row in range(40)
    ]
    together = sample_rows(logits, asked)
    order = torch.randperm(40, generator=generator).tolist()
    assert sample_rows(logits[order], [asked[row] for row in order]) == [together[row] for row in order]
    assert [sample_rows(logits[row : row + 1], asked[row : row + 1])[0] for row in range(40)] == together


def test_a_row_without_filters_draws_as_one_whose_filters_keep_all() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1))
    plain = draw(logits, 200, seed=3)
    assert torch.equal(draw(logits, 200, seed=3, top_k=299, top_p=0.999999, min_p=1e-9), plain)


def test_another_seed_and_another_position_are_another_stream() -> None:
    logits = torch.zeros(1000)
    tokens = draw(logits, 100, seed=5)
    assert torch.equal(draw(logits, 60, seed=5, first_position=40), tokens[40:])
    assert (draw(logits, 100, seed=6) == tokens).sum() < 5
    assert (draw(logits, 100, seed=5 + 2**32) == tokens).sum() < 5
    assert (draw(logits, 100, seed=5, first_position=100) == tokens).sum() < 5


def test_greedy_takes_the_first_of_the_likeliest_beside_sampled_rows() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 0.0, 0.0], [0.0, 9.0, 9.0], [0.0, 2.0, 0.0]])
    asked = [{"temperature": 0.0}, {"top_p": 1e-9}, {"temperature": 1e-40}, {"temperature": 1e-6, "seed": 2}]
    assert sample_rows(logits, asked) == [1, 0, 1, 1]
    sampler = make_sampler(3)
    slots_B = torch.zeros(4, dtype=torch.int32)
    assert sampler.sample(logits, slots_B, slots_B, greedy=True).tolist() == [1, 0, 1, 1]
    assert sampler.sample(logits, slots_B, slots_B, greedy=False).tolist() == [1, 0, 1, 1]  # slot 0 is the null slot


def test_a_token_of_no_probability_is_never_taken() -> None:
    logits = torch.tensor([-INFINITY, 0.0, -INFINITY])
    assert set(draw(logits, 100).tolist()) == {1}
    assert set(draw(logits, 100, top_k=2, top_p=0.99).tolist()) == {1}


def test_logits_that_are_no_numbers_are_told_and_touch_no_other_row() -> None:
    nan = float("nan")
    logits = torch.tensor([[nan, 1.0], [nan, nan], [0.0, 1.0], [nan, 0.0], [0.0, nan]])
    asked = [{"top_p": 0.9}, {"temperature": 0.0}, {"temperature": 0.0}, {}, {"top_k": 1, "min_p": 0.5}]
    assert sample_rows(logits, asked) == [NOT_A_NUMBER, NOT_A_NUMBER, 1, NOT_A_NUMBER, NOT_A_NUMBER]


def test_infinite_logits_give_ids_of_the_vocabulary() -> None:
    logits = torch.tensor([[INFINITY, 0.0, INFINITY], [-INFINITY, -INFINITY, -INFINITY]])
    for options in ({}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}):
        first, second = sample_rows(logits, [options, options])
        assert first in (0, 2) and second in (0, 1, 2)


def test_tokens_are_int32_for_logits_of_16_bits_too() -> None:
    logits = torch.randn(900, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    tokens = draw(logits, 50, seed=1, top_p=0.9)
    assert tokens.dtype == torch.int32
    assert torch.equal(tokens, draw(logits.float(), 50, seed=1, top_p=0.9))


def test_slots_are_given_anew() -> None:
    sampler = make_sampler(4, request_in(1, temperature=1.0), request_in(2, temperature=0.0, repetition_penalty=2.0))
    assert sampler.is_greedy.tolist() == [True, False, True]
    assert (sampler.adjusted_until > 0).tolist() == [False, False, True]
    sampler.assign([request_in(1, temperature=0.0), request_in(2, temperature=0.5)])
    assert sampler.is_greedy.tolist() == [True, True, False]
    assert not sampler.adjusted_until.any()


def adjusted(sampler: Sampler, logits_V: torch.Tensor, slot: int) -> torch.Tensor:
    logits_BV = logits_V.float().repeat(2, 1)
    sampler.adjust(logits_BV, torch.tensor([0, slot], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32))
    assert torch.equal(logits_BV[0], logits_V)
    return logits_BV[1]


def test_penalties_and_bias_are_as_defined() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, -1.0, 0.5, 0.0])
    prompt, generated = [0, 1, 0], [2, 3, 2, 2]
    count = torch.tensor([0.0, 0.0, 3.0, 1.0, 0.0, 0.0])
    for options, expected in (
        ({"repetition_penalty": 2.0}, torch.tensor([1.0, -4.0, 0.5, -2.0, 0.5, 0.0])),
        ({"frequency_penalty": 0.25}, logits - 0.25 * count),
        ({"presence_penalty": -0.5}, logits + 0.5 * (count > 0)),
        ({"logit_bias": {5: 100.0, 0: -1.5}}, logits + torch.tensor([-1.5, 0.0, 0.0, 0.0, 0.0, 100.0])),
        (
            {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 1.0, "logit_bias": {2: 3.0}},
            torch.tensor([1.0, -4.0, 0.5 - 0.75 - 1.0 + 3.0, -2.0 - 0.25 - 1.0, 0.5, 0.0]),
        ),
    ):
        sampler = make_sampler(6, request_in(1, prompt, generated, **options))
        torch.testing.assert_close(adjusted(sampler, logits, 1), expected)


@torch.inference_mode()  # as the runner counts
def test_tokens_that_are_counted_are_as_tokens_that_were_there() -> None:
    logits = torch.linspace(-3, 3, 20)
    options = {"frequency_penalty": 0.3, "presence_penalty": 0.1, "repetition_penalty": 1.4}
    one, other = request_in(1, [1, 2], [], **options), request_in(2, [3], [4, 4], **options)
    sampler = make_sampler(20, one, other, request_in(3))
    slots_B = torch.tensor([2, 0, 3, 1, 0], dtype=torch.int32)
    for tokens in ([5, 1, 1, 7, 2], [NOT_A_NUMBER, 1, 1, 7, 2], [19, -2, 1, 0, -2]):
        sampler.count(slots_B, torch.tensor(tokens, dtype=torch.int32))
    again = make_sampler(20, request_in(1, [1, 2], [7, 7, 0], **options), request_in(2, [3], [4, 4, 5, 19], **options))
    for slot in (1, 2):
        assert torch.equal(adjusted(sampler, logits, slot), adjusted(again, logits, slot))
    assert torch.equal(adjusted(sampler, logits, 3), logits)


def test_rows_of_state_are_made_when_asked_for_and_used_again() -> None:
    sampler = make_sampler(50, *(request_in(slot) for slot in range(1, 20)))
    assert sampler.penalties.num_rows == 0
    logits = torch.randn(50, generator=torch.Generator().manual_seed(6))
    expected = {}
    for slot in range(1, 20):
        sampler.assign(
            [request_in(slot, [slot], [slot, 49], frequency_penalty=0.5, logit_bias={slot: 1.0} if slot % 2 else {})]
        )
        expected[slot] = adjusted(sampler, logits, slot)
    size = sampler.penalties.num_rows
    assert 20 <= size <= 40
    for slot in range(1, 20):
        assert torch.equal(adjusted(sampler, logits, slot), expected[slot])
        sampler.release(slot)
        sampler.release(slot)
        assert not sampler.adjusted_until[slot]
    sampler.assign([request_in(slot, [0], [], presence_penalty=1.0) for slot in range(1, 20)])
    assert sampler.penalties.num_rows == size
    assert all(torch.equal(adjusted(sampler, logits, slot), logits) for slot in range(1, 20))  # nothing generated yet


def test_log_probabilities_are_those_of_the_rows_that_asked() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.25, 0.3, 0.45]])
    logits = probabilities.log() + torch.tensor([[3.0], [-2.0], [0.0]])  # whatever their scale
    chosen, values, ids = logprobs(logits, torch.tensor([1, 2, 0], dtype=torch.int32), torch.tensor([0, 2]), 2)
    assert chosen.tolist() == pytest.approx([math.log(0.3), math.log(0.25)])
    assert ids.tolist() == [[0, 1], [2, 1]]
    assert values.exp().flatten().tolist() == pytest.approx([0.5, 0.3, 0.45, 0.3])
    assert logprobs(logits, torch.tensor([1, 2, 0]), torch.tensor([1]), 0)[2].shape == (1, 0)
    assert logprobs(logits, torch.tensor([1, 2, 0]), torch.tensor([1]), 9)[2].shape == (1, 3)


def test_log_probabilities_of_16_bit_logits_are_32_bit() -> None:
    logits = torch.tensor([[0.0, -7.0]], dtype=torch.bfloat16)
    chosen, _, _ = logprobs(logits, torch.tensor([0]), torch.tensor([0]), 1)
    assert float(chosen) == pytest.approx(-math.log1p(math.exp(-7.0)), rel=1e-4)


def test_a_row_without_numbers_has_no_log_probability_and_touches_no_other() -> None:
    logits = torch.tensor([[float("nan"), 1.0], [0.0, 0.0]])
    bad, good = logprobs(logits, torch.tensor([NOT_A_NUMBER, 1]), torch.tensor([0, 1]), 0)[0].tolist()
    assert math.isnan(bad) and good == pytest.approx(math.log(0.5))
