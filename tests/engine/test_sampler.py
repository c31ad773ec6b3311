"""Sampling follows the distribution, and keeps to top-p."""

import math

import numpy as np
import pytest
import torch

from vmmkv.server.engine.sampler import NOT_A_NUMBER, Choice, Pick, Sampled, likeliest, logprobs_of, sample, uniform


def test_greedy_takes_the_likeliest_beside_sampled_rows() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    tokens = sample(logits, [Choice(0.0, 1.0, 0, 0), Choice(1.0, 1e-9, 1, 1), Choice(0.0, 0.5, 0, 0)])
    assert tokens.tolist() == [1, 0, 2]


def test_frequencies_are_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = 4000
    logits = probabilities.log().repeat(draws, 1)
    tokens = sample(logits, [Choice(1.0, 1.0, 3, position) for position in range(draws)])
    observed = np.bincount(tokens.numpy(), minlength=4) / draws
    assert np.abs(observed - probabilities.numpy()).max() < 0.03  # about four standard deviations


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(500, 1)
    for top_p, kept in ((0.49, {0}), (0.6, {0, 1}), (0.94, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        tokens = sample(logits, [Choice(1.0, top_p, 1, position) for position in range(500)])
        assert set(tokens.tolist()) == kept


def test_temperature_sharpens() -> None:
    logits = torch.tensor([1.0, 0.0]).repeat(2000, 1)
    shares = []
    for temperature in (0.25, 1.0, 4.0):
        tokens = sample(logits, [Choice(temperature, 1.0, 5, position) for position in range(2000)])
        shares.append(float((tokens == 0).float().mean()))
    assert shares[0] > 0.95 > shares[1] > 0.69 > shares[2] > 0.5


def test_a_token_of_no_probability_is_never_taken() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf")]).repeat(100, 1)
    assert set(sample(logits, [Choice(1.0, 1.0, 0, position) for position in range(100)]).tolist()) == {1}


def test_uniform_is_a_function_of_seed_and_position() -> None:
    assert uniform(1, 2) == uniform(1, 2)
    assert len({uniform(seed, position) for seed in range(20) for position in range(20)}) == 400
    assert 0 <= uniform(2**63 + 5, 0) < 1 and 0 <= uniform(-1, 0) < 1


def test_extreme_parameters_are_greedy_and_touch_no_other_row() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0], [0.0, 0.0, 9.0], [0.0, 2.0, 0.0]])
    tokens = sample(
        logits, [Choice(1e-40, 1.0, 0, 0), Choice(1.0, 1e-46, 1, 1), Choice(0.0, 1.0, 0, 0), Choice(1e-6, 1.0, 2, 3)]
    )
    assert tokens.tolist() == [1, 0, 2, 1]


def test_logits_that_are_no_numbers_are_told_and_touch_no_other_row() -> None:
    nan = float("nan")
    logits = torch.tensor([[nan, 1.0], [nan, nan], [0.0, 1.0], [nan, 0.0]])
    tokens = sample(logits, [Choice(1.0, 0.9, 0, 0), Choice(0.0, 1.0, 0, 0), Choice(0.0, 1.0, 0, 0), Choice(1.0, 1.0, 0, 0)])
    assert tokens.tolist() == [NOT_A_NUMBER, NOT_A_NUMBER, 1, NOT_A_NUMBER]


def test_infinite_logits_give_ids_of_the_vocabulary() -> None:
    infinite = float("inf")
    logits = torch.tensor([[infinite, 0.0, infinite], [-infinite, -infinite, -infinite]])
    tokens = sample(logits, [Choice(1.0, 1.0, 0, 0), Choice(1.0, 1.0, 0, 0)])
    assert all(-1 <= token < 3 for token in tokens.tolist())


def test_log_probabilities_are_those_of_the_rows_that_asked() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.25, 0.25, 0.5]])
    logits = probabilities.log() + torch.tensor([[3.0], [-2.0], [0.0]])  # whatever their scale
    tokens = torch.tensor([1, 2, 0])
    sampled = Sampled(tokens_B=tokens, rows=[0, 2], logprobs_R=logprobs_of(logits, tokens, [0, 2]))
    first, second, third = sampled.tolist()
    assert (first.token, second, third.token) == (1, Pick(2, None), 0)
    assert [first.logprob, third.logprob] == pytest.approx([math.log(0.3), math.log(0.25)])
    assert Sampled(tokens_B=tokens).tolist() == [Pick(1, None), Pick(2, None), Pick(0, None)]


def test_log_probabilities_of_16_bit_logits_are_32_bit() -> None:
    logits = torch.tensor([[0.0, -7.0]], dtype=torch.bfloat16)
    assert float(logprobs_of(logits, torch.tensor([0]), [0])) == pytest.approx(-math.log1p(math.exp(-7.0)), rel=1e-4)


def test_a_row_without_numbers_has_no_log_probability_and_touches_no_other() -> None:
    logits = torch.tensor([[float("nan"), 1.0], [0.0, 0.0]])
    bad, good = logprobs_of(logits, torch.tensor([NOT_A_NUMBER, 1]), [0, 1]).tolist()
    assert math.isnan(bad) and good == pytest.approx(math.log(0.5))


def test_the_likeliest_come_in_order_and_no_more_than_there_are() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]]).log()
    logprobs, tokens = likeliest(logits, 2)
    assert tokens.tolist() == [[1, 2], [0, 2]]
    assert logprobs.exp().flatten().tolist() == pytest.approx([0.5, 0.3, 0.6, 0.3])
    assert likeliest(logits, 9)[1].shape == (2, 3)
