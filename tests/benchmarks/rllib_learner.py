"""Learner of HM3's policies by RLlib's RLModule, Learner and PPO, as a replacement of the project's learner.

Episodes are built by our runner. RLlib receives finished episodes: the observation is the path so far, the action is
the proto-action, and the step that Wolpertinger chose appears only in the next observation. The module needs
`ray[rllib]`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import TorchDiagGaussian
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from torch import Tensor

from workers.training.hm3.learner import BaseLearner, EpisodeBatch, Memory, UpdateStatistics
from workers.training.hm3.networks import Networks

__all__ = ["RecallingRllibLearner", "RllibLearner"]

NO_STEP = -1


class PathModule(TorchRLModule, ValueFunctionAPI):  # type: ignore[misc]  # ray has no types
    """HM3's networks as an RLModule. An observation holds the steps so far (with padding) and the preferences."""

    def setup(self) -> None:
        super().setup()
        self.networks: Networks = self.model_config["networks"]
        self.action_dist_cls = TorchDiagGaussian

    def _forward(self, batch: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        states, preferences = self._read(batch)
        seen = states.detach() if self.model_config["recalls"] else states
        means = self.networks.proto(seen, preferences)
        return {Columns.ACTION_DIST_INPUTS: torch.cat([means, self.networks.log_std.expand_as(means)], dim=-1)}

    def compute_values(self, batch: Mapping[str, Any], embeddings: Any = None) -> Tensor:
        states, preferences = self._read(batch)
        return (self.networks.outcomes(states, preferences) * preferences).sum(dim=-1)

    def _read(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        num_objectives = self.networks.options.num_objectives
        steps, preferences = batch[Columns.OBS].split([self.networks.paths.longest, num_objectives], dim=1)
        states = self.networks.states(steps.long().clamp(min=0))
        return states[torch.arange(len(steps)), (steps != NO_STEP).sum(dim=1)], preferences


class RecallingPPO(PPOTorchLearner):  # type: ignore[misc]  # ray has no types
    """PPO whose value network learns from remembered episodes instead of the GAE targets of the last iteration."""

    memory: Memory
    order: torch.Generator
    recalled: int
    coefficient: float

    def compute_loss_for_module(self, *, module_id: str, **given: Any) -> Tensor:
        networks: Networks = self.module[module_id].unwrapped().networks
        rows = torch.randint(len(self.memory.lengths), (self.recalled,), generator=self.order)
        recalled = self.memory.only(rows)
        expected = networks.outcomes(networks.states(recalled.steps), recalled.preferences[:, None])
        errors = ((expected - recalled.outcomes[:, None]) / networks.spread) ** 2
        loss: Tensor = super().compute_loss_for_module(module_id=module_id, **given)
        return loss + self.coefficient * errors[recalled.is_state].mean()


class RllibLearner(BaseLearner):
    """Learner by RLlib's unchanged PPOTorchLearner: KL penalty, one optimizer, and GAE targets of one iteration.

    RLlib's state does not contain the KL coefficient. The learner keeps the coefficient if `keeps_kl` is true, and
    otherwise begins with the initial one.
    """

    recalls = False
    keeps_kl = True
    _saved: Mapping[str, Any] | None = None
    _rllib: Any = None

    def _learn(self, batch: EpisodeBatch, memory: Memory, order: torch.Generator) -> UpdateStatistics:
        learner = self._learner()
        before = self._distribution(batch)
        if self.recalls:
            learner.memory, learner.order = memory, order
            learner.recalled, learner.coefficient = self.options.recalled, self.options.value_coefficient
        # RLlib shuffles with NumPy's global generator.
        np.random.seed(order.initial_seed() % 2**32)
        # RLlib adds a step to each episode.
        num_rows = sum(batch.lengths) + len(batch.lengths)
        learner.update(
            episodes=self._episodes(batch, before),
            num_epochs=self.options.epochs,
            minibatch_size=-(-num_rows // self.options.mini_batches),
            shuffle_batch_per_epoch=True,
        )
        now, real = self._distribution(batch), batch.is_step
        ratios = (now.logp(batch.protos) - before.logp(batch.protos))[real].exp()
        nothing = float("nan")
        return UpdateStatistics(
            policy_loss=nothing,
            value_loss=nothing,
            entropy=float(now.entropy()[real].mean()),
            kl=float(before.kl(now)[real].mean()),
            clipped=float(((ratios - 1).abs() > self.options.clip).float().mean()),
        )

    def _learner(self) -> PPOTorchLearner:
        """RLlib's learner for the networks, which is built at the first update."""
        if self._rllib is not None:
            return self._rllib
        options, networks = self.options, self.networks
        observations = networks.paths.longest + networks.options.num_objectives
        every = float("inf")
        spec = RLModuleSpec(
            module_class=PathModule,
            observation_space=gymnasium.spaces.Box(-every, every, (observations,), np.float32),
            action_space=gymnasium.spaces.Box(-every, every, (len(networks.log_std),), np.float32),
            model_config={"networks": networks, "recalls": self.recalls},
        )
        value_coefficient = 0.0 if self.recalls else options.value_coefficient / float(networks.spread.square().mean())
        config = (
            PPOConfig()
            .training(
                lr=options.learning_rate,
                gamma=options.gamma,
                lambda_=options.gae_lambda,
                clip_param=options.clip,
                kl_target=options.target_kl,
                entropy_coeff=options.entropy_coefficient,
                vf_loss_coeff=value_coefficient,
                vf_clip_param=every,
                grad_clip=options.max_gradient_norm,
                grad_clip_by="global_norm",
            )
            .learners(num_gpus_per_learner=0)
        )
        learner_class = RecallingPPO if self.recalls else PPOTorchLearner
        learner = learner_class(config=config, module_spec=spec)
        learner.build()
        # RLlib copies the module's configuration.
        self.networks = learner.module[DEFAULT_MODULE_ID].unwrapped().networks
        if self._saved is not None:
            learner.set_state(self._saved["learner"])
            if self.keeps_kl:
                learner.curr_kl_coeffs_per_module[DEFAULT_MODULE_ID].data.fill_(self._saved["kl"])
        self._rllib = learner
        return learner

    @torch.no_grad()
    def _distribution(self, batch: EpisodeBatch) -> TorchDiagGaussian:
        means = self.networks.proto(self.networks.states(batch.steps)[:, :-1], batch.preferences[:, None])
        return TorchDiagGaussian(loc=means, scale=self.networks.log_std.detach().exp().expand_as(means))

    def _episodes(self, batch: EpisodeBatch, policy: TorchDiagGaussian) -> list[SingleAgentEpisode]:
        longest = self.networks.paths.longest
        scales = policy._dist.scale.log()
        inputs, densities = torch.cat([policy.loc, scales], dim=-1), policy.logp(batch.protos)
        found = []
        for row, length in enumerate(batch.lengths):
            observations = np.full((length + 1, longest), NO_STEP, dtype=np.float32)
            for at in range(1, length + 1):
                observations[at, : min(at, longest)] = batch.steps[row, : min(at, longest)]
            preferences = np.broadcast_to(batch.preferences[row].numpy(), (length + 1, batch.preferences.shape[1]))
            outcome = float((batch.outcomes[row] * batch.preferences[row]).sum())
            found.append(
                SingleAgentEpisode(
                    observations=list(np.concatenate([observations, preferences], axis=1)),
                    actions=list(batch.protos[row, :length].numpy()),
                    rewards=[0.0] * (length - 1) + [outcome],
                    terminated=True,
                    extra_model_outputs={
                        Columns.ACTION_DIST_INPUTS: list(inputs[row, :length].numpy()),
                        Columns.ACTION_LOGP: list(densities[row, :length].numpy()),
                    },
                    len_lookback_buffer=0,
                )
            )
        return found

    def _state(self) -> dict[str, Any]:
        if self._rllib is None:
            return {"rllib": None}
        kl = self._rllib.curr_kl_coeffs_per_module[DEFAULT_MODULE_ID].item()
        state = {"learner": self._rllib.get_state(not_components="rl_module"), "kl": kl}
        # RLlib's state has NumPy arrays and objects, which a checkpoint of tensors cannot have.
        return {"rllib": torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._saved = None if state["rllib"] is None else pickle.loads(bytes(state["rllib"].tolist()))


class RecallingRllibLearner(RllibLearner):
    """Learner by RLlib. Its value network learns from all episodes so far and alone trains the encoder."""

    recalls = True
