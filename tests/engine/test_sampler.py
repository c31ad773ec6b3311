"""Sampling follows the distribution, and keeps to top-p."""

import numpy as np
import torch

from vmmkv.server.engine.sampler import NOT_A_NUMBER, Choice, sample, uniform


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
