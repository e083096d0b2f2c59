"""PPO learner of HM3's policies, which updates a policy's networks with the episodes of one iteration.

The learner's state is saved and restored as bytes.
"""

from __future__ import annotations

import copy
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from search_spaces.spaces.layer_paths import LayerPaths
from workers.errors import TrainingFailed
from workers.training.hm3.actions import Action, LegalSteps, distribution
from workers.training.hm3.episodes import Episode, generator_of
from workers.training.hm3.networks import NetworkOptions, Networks
from workers.training.hm3.ppo import gae, surrogate
from workers.training.hm3.scalarisation import Scalarisation, scalarised

__all__ = [
    "BaseLearner",
    "EpisodeBatch",
    "Learner",
    "LearnerOptions",
    "Memory",
    "UpdateStatistics",
    "action_in",
    "mean_of",
    "normalised",
    "stacked",
]

# Streams of random numbers that differ from those of episodes, whose numbers are at least 0.
FIRST_NETWORKS, MINI_BATCHES = -1, -2


@dataclass(frozen=True)
class LearnerOptions:
    """Options for updating the policy network and the value network.

    `clip` and `gae_lambda` have the values that HM3's authors state. The values of all other options were chosen for
    this project.

    - `clip`: PPO's clip range (epsilon) for the ratio of the new policy's density to the old policy's density
    - `gamma`: the discount factor
    - `gae_lambda`: the lambda of generalized advantage estimation
    - `value_coefficient`, `entropy_coefficient`: the factors of the value network's loss, and of the policy's entropy
    - `epochs`, `mini_batches`: the number of passes over an iteration's episodes, and of mini-batches in each pass
    - `recalled`: the number of remembered episodes in each mini-batch of the value network
    - `max_gradient_norm`: the norm to which gradients are clipped
    - `target_kl`: a limit, in nats per step of an episode, on the KL divergence between the policies before and after
      an update; beyond it, the policy network is not trained further in this update
    - `action`: the kind of action that the policy draws
    - `scalarisation`: the function that combines the outcomes of several objectives
    """

    clip: float = 0.1
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_coefficient: float = 0.5
    entropy_coefficient: float = 0.002
    learning_rate: float = 3e-3
    epochs: int = 12
    mini_batches: int = 4
    recalled: int = 64
    max_gradient_norm: float = 0.5
    target_kl: float = 0.02
    action: Action = Action.WOLPERTINGER
    scalarisation: Scalarisation = Scalarisation.WEIGHTED_SUM


@dataclass(frozen=True)
class UpdateStatistics:
    """Losses, entropy and changes of the policy in one PPO update; losses and entropy are means over its mini-batches.

    - `kl`: the KL divergence, in nats per step, between the policy before and the policy after the training of the
      policy network
    - `clipped`: the share, in [0, 1], of the steps whose ratio was outside PPO's clip after this training
    - `drift`: the KL divergence between the policy after this training and the policy at the end of the update. In
      between, the training of the value network changes the encoder, on which the policy also depends.
    - `policy_steps`: the number of gradient steps of the policy network

    In studies of version 1 of the searcher, `kl` is the mean over mini-batches, and `clipped`, `drift` and
    `policy_steps` are not measured.
    """

    policy_loss: float
    value_loss: float
    entropy: float
    kl: float
    clipped: float | None = None
    drift: float | None = None
    policy_steps: int | None = None


class BaseLearner(ABC):
    """Base class of learners, which improve a policy's networks by the episodes of this policy.

    A learner has the networks, the number of their updates, and a replay buffer: the remembered episodes, from which
    the value network learns. The learner computes on the CPU in float32. In an episode, a policy builds one layer path,
    a sequence of layers of several models; `paths` has these models. `descriptors` are statistics of the layers'
    weights, or None. `networks` are the options of the networks, and `options` are the options of the learner. `seed`
    determines the learner's random numbers. Subclasses implement the method `_learn` with their own optimizers.
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
        self.options = options
        self.num_updates = 0
        self._paths = paths
        self._seed = seed
        self._descriptors = descriptors
        self._memory: Memory | None = None
        # The initial networks are a function of the seed; no other random state changes.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_of(seed, FIRST_NETWORKS).initial_seed())
            self.networks = Networks(paths, networks, descriptors)

    @property
    def num_remembered(self) -> int:
        """Number of episodes (layer sequences built by a policy), old and new, that the value network learns from."""
        return 0 if self._memory is None else len(self._memory.lengths)

    @property
    def ideal(self) -> Tensor | None:
        """The ideal point [objectives], the best known outcome in each objective of the remembered episodes.

        An episode is a sequence of layers (layer path) that a policy has built for a new model, and an outcome is a
        score of this model. Tchebycheff's function measures the distance of outcomes from the point (module
        `scalarisation`). If no episode is remembered, each number is 1, the best possible outcome. The result is None
        if outcomes are combined by weighted sums.
        """
        if self.options.scalarisation is Scalarisation.WEIGHTED_SUM:
            return None
        if self._memory is None:
            return torch.ones(self.networks.options.num_objectives)
        return self._memory.outcomes.amax(dim=0)

    def update(self, episodes: Sequence[Episode], outcomes_BK: Tensor) -> UpdateStatistics:
        """Update the networks with the episodes (layer sequences built by the policy) of one iteration.

        `outcomes_BK` [episodes, objectives] are the episodes' outcomes, from which the price of the path's length is
        already subtracted. The policy learns to raise one number, into which the outcomes are combined by the episode's
        preference vector, the weights of the objectives (module `scalarisation`). Raises TrainingFailed if an outcome,
        a loss or a number in the networks is NaN or infinite; the learner must not be used after that.
        """
        batch = EpisodeBatch.of(episodes, outcomes_BK)
        self._check(batch.outcomes, "an outcome")
        if self.num_updates == 0:
            self.networks.measure(outcomes_BK)
        self._memory = batch.remembered if self._memory is None else self._memory.joined(batch.remembered)
        order = torch.Generator().manual_seed(generator_of(self._seed, MINI_BATCHES - self.num_updates).initial_seed())
        found = self._learn(batch, self._memory, order)
        self._check_networks()
        self.num_updates += 1
        return found

    def to_bytes(self) -> bytes:
        """Serialise the state that the next update depends on.

        The state consists of the networks, their optimizers, the number of updates, and the episodes (sequences of
        layers, built by a policy) that the value network learns from.
        """
        buffer = io.BytesIO()
        state = {
            "networks": self.networks.state_dict(),
            **self._state(),
            "num_updates": self.num_updates,
            "memory": None if self._memory is None else vars(self._memory),
        }
        torch.save(state, buffer)
        return buffer.getvalue()

    def restore(self, content: bytes, *, remembers: bool = True) -> None:
        """Restore the state `content` that the method `to_bytes` returned for networks of the same shapes.

        The state contains a replay buffer, the episodes of earlier updates from which the value network also learns.
        `remembers` is False for a state that another search has saved; its buffer is then left out. Raises ValueError
        if the saved networks have other shapes, or if the saved policy draws another kind of action (class `Action`)
        than this learner's policy. Raises TrainingFailed if the saved networks contain NaN or infinity.
        """
        state = torch.load(io.BytesIO(content), weights_only=True)
        given = {name: list(tensor.shape) for name, tensor in state["networks"].items()}
        own = {name: list(tensor.shape) for name, tensor in self.networks.state_dict().items()}
        if differing := sorted(name for name in {*given, *own} if given.get(name) != own.get(name)):
            pairs = (f"{n} {given.get(n, 'is missing')} instead of {own.get(n, 'none')}" for n in differing)
            raise ValueError(f"networks of other shapes: {'; '.join(pairs)}")
        self.networks.load_state_dict(state["networks"])
        self.num_updates = int(state["num_updates"])
        self._restore(state)
        self._check_networks()
        memory = state.get("memory") if remembers else None
        self._memory = None if memory is None else Memory(**memory)

    # -- what a version of the learner defines ---------------------------------------------------------------------

    @abstractmethod
    def _learn(self, batch: EpisodeBatch, memory: Memory, order: torch.Generator) -> UpdateStatistics:
        """Learn from the episodes of one iteration (`batch`) and from all remembered episodes (`memory`).

        In an episode, a policy builds one layer path (the sequence of layers of a new model); an iteration is the group
        of episodes between two updates. `memory` also contains the episodes of `batch`. `order` is the random number
        generator that draws mini-batches. Returns the losses and policy changes of this update.
        """

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """State that a subclass saves beside the state of this base class, such as its optimizers, keyed by name."""

    @abstractmethod
    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore what a subclass saves, such as its optimizers, from `state`, the saved state of a learner."""

    # -- for all versions ------------------------------------------------------------------------------------------

    def _check(self, values: Tensor, what: str) -> None:
        """Raise TrainingFailed if one of `values` is NaN or infinite; `what` names the values in the message."""
        if not bool(torch.isfinite(values).all()):
            wrong = float(values.detach()[~torch.isfinite(values)][0])
            raise TrainingFailed(
                f"hm3: {what} is {wrong} in update {self.num_updates + 1} of a policy, so the policy cannot learn "
                f"further; start a new study, with a learning rate below search.hm3.learning_rate="
                f"{self.options.learning_rate:g} if the outcomes are finite"
            )

    def _check_networks(self) -> None:
        for name, values in self.networks.state_dict().items():
            self._check(values, f"a number of the networks ({name})")

    def _descend(self, optimizer: torch.optim.Optimizer, loss: Tensor, what: str) -> None:
        """Take one optimizer step on a loss with clipped gradients; `what` names the loss in messages."""
        self._check(loss, what)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, self.options.max_gradient_norm)
        optimizer.step()


class Learner(BaseLearner):
    """The PPO learner, whose policy network and value network have separate optimizers.

    An update has two phases, after Cobbe et al., "Phasic Policy Gradient" (2020). In the first phase, the policy
    network learns from the iteration's episodes, whose states are frozen. PPO's ratios refer to the policy at the start
    of the update, so they begin at 1. The phase ends when the KL divergence from that policy is above the option
    `target_kl`. In the second phase, the value network and the encoder learn from all episodes so far. This changes the
    encoder's states, which the policy network reads. Therefore the policy network is trained to draw the same actions
    from the new states.

    For each state, the value network predicts the outcome times gamma^n, where gamma is the discount factor and n is
    the number of steps that are left. The outcome belongs to the state after the last step, so the reward of the last
    step is the outcome times gamma.

    The constructor has the arguments of the base class, and `discounts_end`. If it is False, the reward of the last
    step is the outcome itself, as in versions 2 and 3 of the searcher, which favour an early end if gamma is below 1.
    """

    def __init__(
        self,
        paths: LayerPaths,
        networks: NetworkOptions,
        options: LearnerOptions,
        *,
        seed: int | str,
        descriptors: Tensor | None = None,
        discounts_end: bool = True,
    ) -> None:
        super().__init__(paths, networks, options, seed=seed, descriptors=descriptors)
        self._discounts_end = discounts_end
        self._legal = LegalSteps(paths)
        rate = options.learning_rate
        self._optimizers = {
            "policy": torch.optim.Adam([*self.networks.policy.parameters(), self.networks.log_std], lr=rate),
            "value": torch.optim.Adam(
                [p for n, p in self.networks.named_parameters() if not _is_of_policy(n)], lr=rate
            ),
        }

    def restart(self) -> None:
        """Reinitialise the policy network and its optimizer, without changing the encoder and the value network."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_of(f"{self._seed} restart", self.num_updates).initial_seed())
            fresh = Networks(self._paths, self.networks.options, self._descriptors)
        own = {name: value for name, value in fresh.state_dict().items() if _is_of_policy(name)}
        self.networks.load_state_dict(own, strict=False)
        self._optimizers["policy"].state.clear()

    def _learn(self, batch: EpisodeBatch, memory: Memory, order: torch.Generator) -> UpdateStatistics:
        advantages = self._advantages(batch)
        policy_losses, entropies, kl, clipped = self._improve_policy(batch, advantages, order)
        value_losses, drift = self._improve_value(batch, memory, order)
        return UpdateStatistics(
            policy_loss=mean_of(policy_losses),
            value_loss=mean_of(value_losses),
            entropy=mean_of(entropies),
            kl=kl,
            clipped=clipped,
            drift=drift,
            policy_steps=len(policy_losses),
        )

    def _improve_policy(
        self, batch: EpisodeBatch, advantages_BT: Tensor, order: torch.Generator
    ) -> tuple[list[Tensor], list[Tensor], float, float]:
        """Train the policy network on `batch`, the episodes of one iteration.

        In an episode, a policy builds one layer path (the sequence of layers of a new model), step by step.
        `advantages_BT` are the advantages of the steps. `order` is the random number generator that draws mini-batches.
        Returns the loss and the entropy in each mini-batch; the KL divergence between the policies before and after the
        training; and the share of the episodes' steps whose probability ratio is outside PPO's clip after the training.
        """
        options, is_step = self.options, batch.is_step
        taken = batch.steps if options.action is Action.CATEGORICAL else batch.protos
        with torch.no_grad():
            states = self.networks.states(batch.steps)[:, :-1]
            legal = self._legal.before(batch.steps)
            former = self._actions(states, batch.preferences, legal)
            before = former.log_prob(taken)
        losses: list[Tensor] = []
        entropies: list[Tensor] = []
        kl = 0.0
        for rows in self._mini_batches(len(batch.steps), order):
            real = is_step[rows]
            now = self._actions(states[rows], batch.preferences[rows], legal[rows])
            log_ratio = torch.where(real, now.log_prob(taken[rows]) - before[rows], 0.0)
            loss = -surrogate(log_ratio, advantages_BT[rows], clip=options.clip)[real].mean()
            entropy = now.entropy()[real].mean()
            self._descend(self._optimizers["policy"], loss - options.entropy_coefficient * entropy, "the policy's loss")
            losses.append(loss.detach())
            entropies.append(entropy.detach())
            with torch.no_grad():
                now = self._actions(states, batch.preferences, legal)
                kl = float(kl_divergence(former, now)[is_step].mean())
            if not kl <= options.target_kl:
                break
        with torch.no_grad():
            ratios = (now.log_prob(taken) - before)[is_step].exp()
        return losses, entropies, kl, float(((ratios - 1).abs() > options.clip).float().mean())

    def _improve_value(self, batch: EpisodeBatch, memory: Memory, order: torch.Generator) -> tuple[list[Tensor], float]:
        """Train the value network and the encoder on remembered episodes, without changing the policy's actions.

        In an episode, a policy builds one layer path (the sequence of layers of a new model). `memory` has the
        remembered episodes, among them the newest episodes, `batch`. `order` is the random number generator that draws
        mini-batches. Returns the value network's losses and the policy's drift. The drift is the KL divergence between
        the policies before and after this training, over the steps of `batch`.
        """
        options, networks = self.options, self.networks
        former = copy.deepcopy(networks)
        keeping = torch.optim.Adam(networks.policy.parameters(), lr=options.learning_rate)
        losses: list[Tensor] = []
        for _ in range(options.epochs * min(options.mini_batches, len(batch.steps))):
            recalled = memory.only(torch.randint(len(memory.lengths), (options.recalled,), generator=order))
            states = networks.states(recalled.steps)
            expected = networks.outcomes(states, recalled.preferences[:, None])
            targets = recalled.outcomes[:, None] * options.gamma ** recalled.num_left.clamp(min=0)[:, :, None]
            loss = (((expected - targets) / networks.spread) ** 2)[recalled.is_state].mean()
            self._descend(self._optimizers["value"], options.value_coefficient * loss, "the value network's loss")
            losses.append(loss.detach())
            self._descend(keeping, self._moved(former, recalled), "the policy's drift")
        with torch.no_grad():
            return losses, float(self._moved(former, batch.remembered))

    def _moved(self, former: Networks, episodes: Memory) -> Tensor:
        """Mean KL divergence between a former and the current policy, over the steps of `episodes`.

        In an episode, a policy builds one layer path (the sequence of layers of a new model), step by step. `former`
        are the networks of the former policy.
        """
        legal = self._legal.before(episodes.steps)
        with torch.no_grad():
            states = self.networks.states(episodes.steps)[:, :-1]
            before = former.states(episodes.steps)[:, :-1]
            known = distribution(former, before, episodes.preferences[:, None], legal, self.options.action)
        now = self._actions(states, episodes.preferences, legal)
        return kl_divergence(known, now)[episodes.is_step].mean()

    def _actions(self, states_BTH: Tensor, preferences_BK: Tensor, legal_BTA: Tensor) -> Distribution:
        return distribution(self.networks, states_BTH, preferences_BK[:, None], legal_BTA, self.options.action)

    def _mini_batches(self, num: int, order: torch.Generator) -> Iterable[Tensor]:
        for _ in range(self.options.epochs):
            yield from torch.randperm(num, generator=order).chunk(min(self.options.mini_batches, num))

    @torch.no_grad()
    def _advantages(self, batch: EpisodeBatch) -> Tensor:
        """The advantages [episodes, steps] of the steps in `batch`, by generalized advantage estimation (GAE).

        `batch` has the episodes of one iteration; in an episode, a policy builds one layer path (the sequence of layers
        of a new model). The advantages are normalised over all steps, and 0 after an episode's end.
        """
        options = self.options
        found = self.networks.outcomes(self.networks.states(batch.steps), batch.preferences[:, None])
        values = scalarised(found, batch.preferences[:, None], self.ideal)
        outcomes = scalarised(batch.outcomes, batch.preferences, self.ideal)
        advantages = torch.zeros(batch.steps.shape)
        for row, length in enumerate(batch.lengths):
            rewards = torch.zeros(length)
            rewards[-1] = outcomes[row] * (options.gamma if self._discounts_end else 1.0)
            advantages[row, :length] = gae(
                rewards, values[row, :length], gamma=options.gamma, lambda_=options.gae_lambda
            )
        return normalised(advantages, batch.is_step)

    def _state(self) -> dict[str, Any]:
        optimizers = {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()}
        return {"action": str(self.options.action), "optimizers": optimizers}

    def _restore(self, state: Mapping[str, Any]) -> None:
        if (action := _action_of(state)) != self.options.action:
            raise ValueError(f"a policy with action: {action}; this study's has action: {self.options.action}")
        # Studies of version 1 have one optimizer for all networks.
        for name, stored in state.get("optimizers", {}).items():
            optimizer = self._optimizers[name]
            optimizer.load_state_dict(stored)
            for group in optimizer.param_groups:
                group["lr"] = self.options.learning_rate


def action_in(content: bytes) -> Action:
    """The kind of action that a saved policy draws for each step (next layer) of a layer path.

    `content` is the policy's saved state (method `BaseLearner.to_bytes`).
    """
    return _action_of(torch.load(io.BytesIO(content), weights_only=True))


def _action_of(state: Mapping[str, Any]) -> Action:
    return Action(state.get("action", Action.WOLPERTINGER))  # studies of version 1 do not state it


def _is_of_policy(parameter: str) -> bool:
    return parameter == "log_std" or parameter.startswith("policy.")


def mean_of(values: Sequence[Tensor]) -> float:
    return float(torch.stack(list(values)).mean())


def normalised(advantages_BT: Tensor, is_step_BT: Tensor) -> Tensor:
    """Scale `advantages_BT` [episodes, steps] to mean 0 and standard deviation 1 over steps that are not padding.

    An advantage says by how much a policy's action was better than expected. `is_step_BT` [episodes, steps] is True for
    real steps and False for padding. At padding the result is 0.
    """
    real = advantages_BT[is_step_BT]
    scale = real.std(unbiased=False) + 1e-8
    return torch.where(is_step_BT, (advantages_BT - real.mean()) / scale, 0.0)


@dataclass(frozen=True)
class Memory:
    """Episodes from which the value network learns, as tensors padded to the longest episode.

    In an episode, a policy builds one layer path, step by step. The fields are:

    - `steps`: [episodes, T], the steps of each episode, padded to T steps with step 0
    - `lengths`: [episodes], the numbers of steps without padding
    - `preferences`: [episodes, objectives], the weights of the objectives in each episode
    - `outcomes`: [episodes, objectives], the outcomes of the layer paths
    """

    steps: Tensor
    lengths: Tensor
    preferences: Tensor
    outcomes: Tensor

    @property
    def is_step(self) -> Tensor:
        return torch.arange(self.steps.shape[1])[None] < self.lengths[:, None]

    @property
    def is_state(self) -> Tensor:
        return self.num_left >= 0

    @property
    def num_left(self) -> Tensor:
        """Number of steps of the episode that follow each state: [episodes, steps + 1].

        In an episode, a policy builds one layer path (the sequence of layers of a new model), step by step. An episode
        with n steps has n + 1 states, one before each step and one at the end. The number is negative at the padding
        after the end.
        """
        return self.lengths[:, None] - torch.arange(self.steps.shape[1] + 1)[None]

    def only(self, rows: Tensor) -> Memory:
        return Memory(self.steps[rows], self.lengths[rows], self.preferences[rows], self.outcomes[rows])

    def joined(self, other: Memory) -> Memory:
        return Memory(
            stacked(self.steps, other.steps),
            torch.cat([self.lengths, other.lengths]),
            torch.cat([self.preferences, other.preferences]),
            torch.cat([self.outcomes, other.outcomes]),
        )


def stacked(first_BT: Tensor, second_BT: Tensor) -> Tensor:
    """Concatenate two batches of episodes, given as the steps of each episode: [episodes, steps].

    In an episode, a policy builds one layer path (the sequence of layers of a new model). The result contains the
    episodes of `first_BT`, then the episodes of `second_BT`, padded with 0 to the longest episode.
    """
    longest = max(first_BT.shape[1], second_BT.shape[1])
    return torch.cat([torch.nn.functional.pad(steps, (0, longest - steps.shape[1])) for steps in (first_BT, second_BT)])


@dataclass(frozen=True)
class EpisodeBatch:
    """Episodes of one iteration as tensors, padded with step 0 to the longest episode of T steps.

    In an episode, a policy builds one layer path, step by step. The fields are:

    - `steps`: [episodes, T], the steps of each episode
    - `protos`: [episodes, T, D], the proto-action of each step: a point that the policy drew in the space of the steps'
      embeddings
    - `log_densities`: [episodes, T], the log densities of the proto-actions under the policy that drew them
    - `preferences`: [episodes, objectives], the weights of the objectives in each episode
    - `outcomes`: [episodes, objectives], the outcomes of the layer paths
    - `lengths`: the numbers of steps without padding
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
