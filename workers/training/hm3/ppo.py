"""Advantages and losses of PPO as formulas on tensors.

Schulman et al., "Proximal Policy Optimization Algorithms" (2017), equations 7 and 9; "High-Dimensional Continuous
Control Using Generalized Advantage Estimation" (2016), equation 16. Axes: B episodes, T steps, D dimensions of a
proto-action.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Losses", "gae", "log_density", "remaining_shares", "surrogate"]


@dataclass(frozen=True)
class Losses:
    """PPO's losses for one mini-batch; the optimizer minimises `total`.

    `policy` and `value` are the losses of the policy network and of the value network. `entropy` is the entropy of the
    distribution from which actions are drawn.
    """

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    kl: Tensor
    """Estimate of the KL divergence between the old and the new policy: the mean of (ratio - 1) - log(ratio)."""


def gae(rewards_T: Tensor, values_T: Tensor, *, gamma: float, lambda_: float) -> Tensor:
    """Generalized advantage estimation: the advantage of each step [T] of a finished episode.

    The advantage of step t is the sum over l of (gamma lambda)^l delta_{t+l}. Here delta_t is r_t + gamma V(s_{t+1}) -
    V(s_t). r_t is the reward of step t (`rewards_T`), and V(s_t) is the value of the state before step t (`values_T`).
    The value after the last step is 0.
    """
    following = torch.cat([values_T[1:], values_T.new_zeros(1)])
    deltas = rewards_T + gamma * following - values_T
    advantages = torch.empty_like(deltas)
    running = deltas.new_zeros(())
    for t in reversed(range(len(deltas))):
        running = deltas[t] + gamma * lambda_ * running
        advantages[t] = running
    return advantages


def remaining_shares(num_steps: int, *, gamma: float) -> Tensor:
    """For each step of an episode, the discounted sum of the rewards from this step on, as a share of the outcome: [T].

    In an episode, a policy builds a sequence of layers step by step, and the outcome is the score of the new model.
    Each of the T = `num_steps` steps has the reward outcome / T. The share at step t is therefore (1 / T) sum_{j >= t}
    gamma^(j - t), where gamma is the discount factor.
    """
    return gae(torch.full((num_steps,), 1.0 / num_steps), torch.zeros(num_steps), gamma=gamma, lambda_=1.0)


def log_density(proto: Tensor, mean: Tensor, log_std_D: Tensor) -> Tensor:
    """Log density of points with D coordinates under a normal distribution with independent coordinates.

    `proto` [..., D] are the points, `mean` are the means, and `log_std_D` are the logarithms of the D standard
    deviations. The result is [...].
    """
    z = (proto - mean) * torch.exp(-log_std_D)
    return (-0.5 * z**2 - log_std_D - 0.5 * math.log(2 * math.pi)).sum(dim=-1)


def surrogate(log_ratio: Tensor, advantages: Tensor, *, clip: float) -> Tensor:
    """PPO's clipped objective (larger is better) for each step, from advantages and ratios of densities.

    A step is one action of the policy. The objective is min(ratio A, clip(ratio, 1 - clip, 1 + clip) A). A is the
    advantage. The ratio is the density of an action under the new policy divided by the density under the old policy;
    `log_ratio` is its logarithm.
    """
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
