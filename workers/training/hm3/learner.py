"""The learner of a policy in HM3: updates the policy's networks from the episodes of one iteration.

Its state is saved and restored as bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from search_spaces.spaces.layer_paths import LayerPaths
from workers.training.hm3.episodes import Episode, generator_of
from workers.training.hm3.networks import NetworkOptions, Networks
from workers.training.hm3.ppo import Losses, gae, log_density, remaining_shares, surrogate

__all__ = ["EpisodeBatch", "Learner", "LearnerOptions", "Memory", "UpdateStatistics"]

# Streams of random numbers that differ from those of episodes, whose numbers are at least 0.
FIRST_NETWORKS, MINI_BATCHES = -1, -2


@dataclass(frozen=True)
class LearnerOptions:
    """Options for updating the policy network and the value network.

    The options `clip`, `gamma` and the lambda of GAE have the values that HM3's authors state; the others were chosen
    here. `recalled` is the number of earlier episodes that the value network learns from in each mini-batch.
    """

    clip: float = 0.1
    gamma: float = 0.990
    gae_lambda: float = 0.95
    value_coefficient: float = 0.5
    entropy_coefficient: float = 0.002
    learning_rate: float = 3e-3
    epochs: int = 12
    mini_batches: int = 4
    recalled: int = 64
    max_gradient_norm: float = 0.5


@dataclass(frozen=True)
class UpdateStatistics:
    """Losses, entropy and KL divergence of one update, as means over its mini-batches."""

    policy_loss: float
    value_loss: float
    entropy: float
    kl: float


class Learner:
    """The networks of a policy with their optimizer, and the number of iterations that they have learned from.

    It computes on the CPU in float32.
    """

    def __init__(
        self,
        paths: LayerPaths,
        networks: NetworkOptions,
        options: LearnerOptions,
        *,
        seed: int,
        descriptors: Tensor | None = None,
    ) -> None:
        self.options = options
        self.num_updates = 0
        self._seed = seed
        self._memory: Memory | None = None
        # The initial networks are a function of the seed; no other random state changes.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_of(seed, FIRST_NETWORKS).initial_seed())
            self.networks = Networks(paths, networks, descriptors)
        self._optimizer = torch.optim.Adam(self.networks.parameters(), lr=options.learning_rate)

    @property
    def num_remembered(self) -> int:
        """The number of episodes, from the last iteration and earlier ones, that the value network learns from."""
        return 0 if self._memory is None else len(self._memory.lengths)

    def update(self, episodes: Sequence[Episode], outcomes_BK: Tensor) -> UpdateStatistics:
        """Update the networks by the episodes of one iteration.

        `outcomes_BK` [episodes, objectives] are the parts of each episode's outcome R by objective, less the price of
        the path's length. R is the sum of these parts weighted by the episode's preference. Each of the T steps of an
        episode gets the reward R / T.
        """
        batch = EpisodeBatch.of(episodes, outcomes_BK)
        if self.num_updates == 0:
            self.networks.measure(outcomes_BK)
        self._memory = batch.remembered if self._memory is None else self._memory.joined(batch.remembered)
        advantages = self._advantages(batch)
        order = torch.Generator().manual_seed(generator_of(self._seed, MINI_BATCHES - self.num_updates).initial_seed())
        seen: list[Losses] = []
        for _ in range(self.options.epochs):
            shuffled = torch.randperm(len(episodes), generator=order)
            for rows in shuffled.chunk(min(self.options.mini_batches, len(episodes))):
                recalled = torch.randint(len(self._memory.lengths), (self.options.recalled,), generator=order)
                losses = self.losses(batch.only(rows), advantages[rows], self._memory.only(recalled))
                self._optimizer.zero_grad()
                losses.total.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(self.networks.parameters(), self.options.max_gradient_norm)
                self._optimizer.step()
                seen.append(losses)
        self.num_updates += 1

        def mean(name: str) -> float:
            return float(torch.stack([getattr(losses, name).detach() for losses in seen]).mean())

        return UpdateStatistics(mean("policy"), mean("value"), mean("entropy"), mean("kl"))

    def losses(self, batch: EpisodeBatch, advantages_BT: Tensor, recalled: Memory) -> Losses:
        """PPO's losses for one mini-batch: of the policy on `batch`, and of the value network on `recalled`.

        `batch` are episodes of this iteration, with the advantages `advantages_BT` of their steps; `recalled` are
        episodes of any iteration. The value network predicts the outcome of the whole path. The value of a state is
        this expected outcome, times the share of it that is still to be paid as rewards. Therefore expected outcomes of
        states after any number of steps can be compared, and the choice between ending now or later depends on the
        outcome alone.
        """
        options = self.options
        networks = self.networks
        num = len(batch.steps)
        states = networks.states(_stacked(batch.steps, recalled.steps))
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
        """The advantages [episodes, steps] of an iteration's episodes by generalized advantage estimation (GAE).

        They are normalised over all steps of the iteration, and 0 after an episode's end.
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
        real = advantages[batch.is_step]
        scale = real.std(unbiased=False) + 1e-8
        return torch.where(batch.is_step, (advantages - real.mean()) / scale, 0.0)

    def to_bytes(self) -> bytes:
        """The state on which the next update depends, as bytes.

        It consists of networks, optimizer, the number of updates, and the episodes that the value network learns from.
        """
        buffer = io.BytesIO()
        state = {
            "networks": self.networks.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "num_updates": self.num_updates,
            "memory": None if self._memory is None else vars(self._memory),
        }
        torch.save(state, buffer)
        return buffer.getvalue()

    def restore(self, content: bytes, *, remembers: bool = True) -> None:
        """Restore the state that `to_bytes` returned, of a learner with networks of the same shapes.

        With `remembers` false the remembered episodes are left out, because they are those of another search. Raises
        ValueError with the shapes for other networks.
        """
        state = torch.load(io.BytesIO(content), weights_only=True)
        given = {name: list(tensor.shape) for name, tensor in state["networks"].items()}
        own = {name: list(tensor.shape) for name, tensor in self.networks.state_dict().items()}
        if differing := sorted(name for name in {*given, *own} if given.get(name) != own.get(name)):
            pairs = (f"{n} {given.get(n, 'is missing')} instead of {own.get(n, 'none')}" for n in differing)
            raise ValueError(f"networks of other shapes: {'; '.join(pairs)}")
        self.networks.load_state_dict(state["networks"])
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group["lr"] = self.options.learning_rate
        self.num_updates = int(state["num_updates"])
        memory = state.get("memory") if remembers else None
        self._memory = None if memory is None else Memory(**memory)


@dataclass(frozen=True)
class Memory:
    """The data of B episodes that the value network learns from, as tensors.

    `steps` [B, T] are the steps of each episode, padded to T steps with step 0, and `lengths` [B] the numbers of steps.
    `preferences` and `outcomes` are [B, K] for K objectives.
    """

    steps: Tensor
    lengths: Tensor
    preferences: Tensor
    outcomes: Tensor

    @property
    def is_state(self) -> Tensor:
        return torch.arange(self.steps.shape[1] + 1)[None] <= self.lengths[:, None]

    def only(self, rows: Tensor) -> Memory:
        return Memory(self.steps[rows], self.lengths[rows], self.preferences[rows], self.outcomes[rows])

    def joined(self, other: Memory) -> Memory:
        return Memory(
            _stacked(self.steps, other.steps),
            torch.cat([self.lengths, other.lengths]),
            torch.cat([self.preferences, other.preferences]),
            torch.cat([self.outcomes, other.outcomes]),
        )


def _stacked(first_BT: Tensor, second_BT: Tensor) -> Tensor:
    """Join the steps [episodes, T] of two batches of episodes to one batch, padded with 0 to the longest episode."""
    longest = max(first_BT.shape[1], second_BT.shape[1])
    return torch.cat([torch.nn.functional.pad(steps, (0, longest - steps.shape[1])) for steps in (first_BT, second_BT)])


@dataclass(frozen=True)
class EpisodeBatch:
    """B episodes in tensors, padded to T steps with step 0.

    `steps` and `log_densities` are [B, T], `protos` [B, T, D] for proto-actions of dimension D, `preferences` and
    `outcomes` [B, K] for K objectives. `lengths` are the numbers of steps without padding.
    """

    steps: Tensor
    protos: Tensor
    log_densities: Tensor
    preferences: Tensor
    outcomes: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, episodes: Sequence[Episode], outcomes_BK: Tensor) -> EpisodeBatch:
        pad = torch.nn.utils.rnn.pad_sequence
        return cls(
            steps=pad([episode.steps for episode in episodes], batch_first=True),
            protos=pad([episode.protos for episode in episodes], batch_first=True),
            log_densities=pad([episode.log_densities for episode in episodes], batch_first=True),
            preferences=torch.tensor([episode.preference for episode in episodes], dtype=torch.float32),
            outcomes=outcomes_BK.to(torch.float32),
            lengths=tuple(len(episode.steps) for episode in episodes),
        )

    @property
    def is_step(self) -> Tensor:
        return torch.arange(self.steps.shape[1])[None] < torch.tensor(self.lengths)[:, None]

    @property
    def remembered(self) -> Memory:
        return Memory(self.steps, torch.tensor(self.lengths), self.preferences, self.outcomes)

    def only(self, rows: Tensor) -> EpisodeBatch:
        return EpisodeBatch(
            self.steps[rows],
            self.protos[rows],
            self.log_densities[rows],
            self.preferences[rows],
            self.outcomes[rows],
            tuple(self.lengths[row] for row in rows.tolist()),
        )
