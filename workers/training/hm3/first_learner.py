"""PPO learner of version 1 of the searcher `hm3`; studies that began with this version continue with it.

This learner differs from the learner of the module `learner` in three points:

- PPO's ratios compare the policy with the networks that built the episodes, which have missed the last update.
  Therefore most ratios are outside PPO's clip even before the first step, and the clip limits nothing.
- Policy network, value network and encoder have one optimizer, and learn in the same steps.
- The reward of each step of an episode is an equal share of the outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from search_spaces.spaces.layer_paths import LayerPaths
from workers.training.hm3.learner import (
    BaseLearner,
    EpisodeBatch,
    LearnerOptions,
    Memory,
    UpdateStatistics,
    mean_of,
    normalised,
    stacked,
)
from workers.training.hm3.networks import NetworkOptions
from workers.training.hm3.ppo import Losses, gae, log_density, remaining_shares, surrogate

__all__ = ["FirstLearner"]


class FirstLearner(BaseLearner):
    """The PPO learner of version 1 of the searcher `hm3`, in which all networks have one common optimizer.

    Its arguments are those of the base class.
    """

    def __init__(
        self,
        paths: LayerPaths,
        networks: NetworkOptions,
        options: LearnerOptions,
        *,
        seed: int | str,
        descriptors: Tensor | None = None,
    ) -> None:
        super().__init__(paths, networks, options, seed=seed, descriptors=descriptors)
        self._optimizer = torch.optim.Adam(self.networks.parameters(), lr=options.learning_rate)

    def _learn(self, batch: EpisodeBatch, memory: Memory, order: torch.Generator) -> UpdateStatistics:
        advantages = self._advantages(batch)
        seen: list[Losses] = []
        for _ in range(self.options.epochs):
            shuffled = torch.randperm(len(batch.steps), generator=order)
            for rows in shuffled.chunk(min(self.options.mini_batches, len(batch.steps))):
                recalled = torch.randint(len(memory.lengths), (self.options.recalled,), generator=order)
                losses = self.losses(batch.only(rows), advantages[rows], memory.only(recalled))
                self._descend(self._optimizer, losses.total, "the loss")
                seen.append(losses)

        def mean(name: str) -> float:
            return mean_of([getattr(losses, name).detach() for losses in seen])

        return UpdateStatistics(mean("policy"), mean("value"), mean("entropy"), mean("kl"))

    def losses(self, batch: EpisodeBatch, advantages_BT: Tensor, recalled: Memory) -> Losses:
        """Compute PPO's losses for one mini-batch: of the policy on `batch`, of the value network on `recalled`.

        In an episode, a policy builds one layer path (the sequence of layers of a new model). `batch` has episodes of
        the current iteration, and `advantages_BT` are the advantages of their steps. `recalled` has remembered episodes
        of this and earlier iterations. For each state, the value network learns to predict the outcome of the whole
        path.
        """
        options = self.options
        networks = self.networks
        num = len(batch.steps)
        states = networks.states(stacked(batch.steps, recalled.steps))
        length = batch.steps.shape[1]
        # Only outcomes train the encoder: the policy's noisy gradients would undo what it has learned.
        mean = networks.proto(states[:num, :length].detach(), batch.preferences[:, None])
        log_ratio = log_density(batch.protos, mean, networks.log_std) - batch.log_densities
        is_step = batch.is_step
        log_ratio = torch.where(is_step, log_ratio, 0.0)
        policy = -surrogate(log_ratio, advantages_BT, clip=options.clip)[is_step].mean()
        # All states count, including that after the end, whose outcome is the episode's.
        expected = networks.outcomes(states[num:, : recalled.steps.shape[1] + 1], recalled.preferences[:, None])
        errors = ((expected - recalled.outcomes[:, None]) / networks.spread) ** 2
        value = errors[recalled.is_state].mean()
        entropy = networks.log_std.sum() + 0.5 * len(networks.log_std) * (1 + torch.log(torch.tensor(2 * torch.pi)))
        kl = (log_ratio.exp() - 1 - log_ratio)[is_step].mean()
        total = policy + options.value_coefficient * value - options.entropy_coefficient * entropy
        return Losses(total, policy, value, entropy, kl)

    @torch.no_grad()
    def _advantages(self, batch: EpisodeBatch) -> Tensor:
        """The advantages [episodes, steps] of the steps in `batch`, by generalized advantage estimation (GAE).

        `batch` has the episodes of one iteration; in an episode, a policy builds one layer path (the sequence of layers
        of a new model). The advantages are normalised over all steps, and 0 after an episode's end.
        """
        options = self.options
        states = self.networks.states(batch.steps)
        found = self.networks.outcomes(states, batch.preferences[:, None])
        expected = (found * batch.preferences[:, None]).sum(dim=-1)
        outcomes = (batch.outcomes * batch.preferences).sum(dim=-1)
        advantages = torch.zeros_like(batch.log_densities)
        for row, length in enumerate(batch.lengths):
            shares = remaining_shares(length, gamma=options.gamma)
            rewards = (outcomes[row] / length).expand(length)
            values = expected[row, :length] * shares
            advantages[row, :length] = gae(rewards, values, gamma=options.gamma, lambda_=options.gae_lambda)
        return normalised(advantages, batch.is_step)

    def _state(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group["lr"] = self.options.learning_rate
