"""PPO's formulas, compared with numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from workers.training.hm3.ppo import gae, log_density, remaining_shares, surrogate


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_advantages_are_the_discounted_sums_of_the_differences() -> None:
    # gamma 0.5, lambda 0.5. delta_2 = 3 - 1 = 2; delta_1 = 2 + 0.5 * 1 - 4 = -1.5; delta_0 = 1 + 0.5 * 4 - 2 = 1.
    # A_2 = 2; A_1 = -1.5 + 0.25 * 2 = -1; A_0 = 1 + 0.25 * -1 = 0.75.
    found = gae(numbers(1, 2, 3), numbers(2, 4, 1), gamma=0.5, lambda_=0.5)
    assert found.tolist() == [0.75, -1.0, 2.0]


def test_advantage_with_lambda_one() -> None:
    """With lambda one, an advantage is the return less the value."""
    # Returns: 3; 2 + 0.9 * 3 = 4.7; 1 + 0.9 * 4.7 = 5.23.
    found = gae(numbers(1, 2, 3), numbers(1, 1, 1), gamma=0.9, lambda_=1.0)
    assert found.tolist() == pytest.approx([4.23, 3.7, 2.0])


def test_what_is_still_to_be_paid_falls_to_one_step_s_share() -> None:
    # 1/4 each, gamma 0.5: 0.25; 0.25 + 0.125; 0.4375; 0.46875.
    assert remaining_shares(4, gamma=0.5).tolist() == [0.46875, 0.4375, 0.375, 0.25]
    assert remaining_shares(5, gamma=1.0).tolist() == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_expected_outcome_has_no_advantage() -> None:
    """Expected outcomes give no advantage at any length."""
    for length in (1, 3, 8):
        values = 0.7 * remaining_shares(length, gamma=0.99)
        rewards = torch.full((length,), 0.7 / length)
        assert gae(rewards, values, gamma=0.99, lambda_=0.95).abs().max() < 1e-6


def test_the_surrogate_is_clipped_where_that_makes_it_smaller() -> None:
    ratios = numbers(1.0, 1.3, 0.7, 1.3, 0.7)
    advantages = numbers(2.0, 2.0, 2.0, -2.0, -2.0)
    # Clip 0.1: 2; 1.1 * 2; 0.7 * 2 (not clipped: it is the smaller); -1.3 * 2 (the same); 0.9 * -2.
    found = surrogate(ratios.log(), advantages, clip=0.1)
    assert found.tolist() == pytest.approx([2.0, 2.2, 1.4, -2.6, -1.8])


def test_a_clipped_step_has_no_gradient() -> None:
    log_ratio = numbers(1.3, 1.05).log().requires_grad_()
    surrogate(log_ratio, numbers(1.0, 1.0), clip=0.1).sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == pytest.approx([0.0, 1.05])


def test_the_density_is_that_of_independent_normal_distributions() -> None:
    # Two dimensions, standard deviations 1 and 2, distances of 1 and 2 means: each exponent -1/2.
    found = log_density(numbers(1, 3), numbers(0, 1), numbers(0, math.log(2)))
    assert float(found) == pytest.approx(-1.0 - math.log(2) - math.log(2 * math.pi))
