"""HM3: a policy that builds layer paths, learned from the trials' results (`workers.training.hm3`).

Every trial is an episode. An UPDATE step stands between the iterations; the policies are read from checkpoints, so that
the searcher keeps no state. The outcome of an episode is R = sum_k lambda_k f_k - beta_1 T, where f_k is 1 - the cost
of objective k (a metric in [0, 1] itself) and T the number of layers. A candidate that failed counts with the worst
result of each objective among those known.

An iteration learns from its own trials alone, whatever else is known: so a search is the same with any number of
replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from search_spaces.parameters import Parameters
from search_spaces.spaces.layer_paths import LayerPaths
from service.tune.searchers.base import Observation, SearchSetting
from service.tune.steps import Step, StepKind, StepRequest, StepResult

if TYPE_CHECKING:
    from workers.training.hm3.training import Training

__all__ = ["SEARCHER", "Hm3Searcher", "paths_of"]


class Hm3Searcher:
    """See the module's docstring; `service.tune.searchers.base.LearningSearcher` for the methods."""

    def advance(
        self,
        parameters: Parameters,
        *,
        number: int,
        seed: int,
        observations: Sequence[Observation],
        pending: Sequence[Mapping[str, Any]] = (),
        steps: Sequence[Step] = (),
        setting: SearchSetting,
        checkpoints: Mapping[int, bytes],
    ) -> StepRequest | dict[str, Any]:
        training = _training(parameters, seed, setting, checkpoints)
        episode = number - setting.num_baselines
        num_finished = sum(step.request.kind is StepKind.UPDATE for step in steps)
        if num_finished < training.num_needed(episode):
            return _request(training, num_finished, setting)
        return paths_of(parameters).configuration(training.play(episode).path)

    def learn(
        self,
        parameters: Parameters,
        *,
        iteration: int,
        seed: int,
        observations: Sequence[Observation],
        setting: SearchSetting,
        checkpoints: Mapping[int, bytes],
    ) -> tuple[StepResult, bytes | None]:
        import torch

        training = _training(parameters, seed, setting, checkpoints)
        numbers = training.numbers_in(iteration)
        results = _results(observations, [setting.num_baselines + number for number in numbers])
        lengths = [len(paths_of(parameters).path(configuration)) for configuration, _ in results]
        values = np.array([values for _, values in results])
        penalties = setting.policy.length_penalty * np.array(lengths, dtype=np.float64)
        outcomes = values - penalties[:, None]
        vectors = np.array([training.preference_of(number) for number in numbers])
        statistics = {
            "outcome": float((outcomes * vectors).sum(axis=1).mean()),
            "outcome_std": float((outcomes * vectors).sum(axis=1).std()),
            "length": float(np.mean(lengths)),
        }
        found = training.learn(iteration, torch.tensor(outcomes, dtype=torch.float32))
        if found is None:
            return StepResult(statistics=statistics), None
        statistics |= {
            "policy_loss": found.policy_loss,
            "value_loss": found.value_loss,
            "entropy": found.entropy,
            "kl": found.kl,
        }
        content = training.saved[iteration]
        return StepResult(statistics=statistics, checkpoint=hashlib.sha256(content).hexdigest()), content

    def slot(self, iteration: int, *, setting: SearchSetting) -> str:
        num_policies = _num_policies(setting)
        return f"hm3-policy-{iteration % num_policies}-{iteration // num_policies % 2}"

    def kept(self, num_finished: int, *, setting: SearchSetting) -> range:
        return range(max(0, num_finished - 2 * _num_policies(setting)), num_finished)


SEARCHER = Hm3Searcher()


def paths_of(parameters: Parameters) -> LayerPaths:
    """The layer paths that the parameters of a space stand for. Preflight has refused other spaces."""
    assert isinstance(parameters.structure, LayerPaths), "hm3 searches layer paths"
    return parameters.structure


def _preferences(setting: SearchSetting) -> tuple[tuple[float, ...], ...]:
    num = len(setting.objectives)
    return setting.preferences or ((1 / num,) * num,)


def _num_policies(setting: SearchSetting) -> int:
    return 1 if setting.policy.policy == "conditioned" else len(_preferences(setting))


def _training(parameters: Parameters, seed: int, setting: SearchSetting, checkpoints: Mapping[int, bytes]) -> Training:
    from workers.training.hm3.descriptors import layer_descriptors
    from workers.training.hm3.learner import LearnerOptions
    from workers.training.hm3.networks import NetworkOptions
    from workers.training.hm3.training import Training, TrainingOptions

    paths, options = paths_of(parameters), setting.policy
    descriptors = None if setting.family is None else layer_descriptors(setting.family, paths.models)
    is_conditioned = options.policy == "conditioned"
    return Training(
        paths,
        TrainingOptions(
            episodes=options.episodes,
            warm_up=options.warm_up,
            k=options.neighbours,
            exploration=options.exploration,
            explored=options.explored,
            is_conditioned=is_conditioned,
            learner=LearnerOptions(
                clip=options.clip,
                gamma=options.gamma,
                gae_lambda=options.gae_lambda,
                value_coefficient=options.value_coefficient,
                entropy_coefficient=options.entropy_coefficient,
                learning_rate=options.learning_rate,
                epochs=options.epochs,
                mini_batches=options.mini_batches,
            ),
            networks=NetworkOptions(
                num_objectives=len(setting.objectives),
                num_statistics=0 if descriptors is None else descriptors.shape[2],
                sees_preference=is_conditioned,
            ),
        ),
        seed=seed,
        preferences=_preferences(setting),
        descriptors=descriptors,
        saved=checkpoints,
    )


def _request(training: Training, iteration: int, setting: SearchSetting) -> StepRequest:
    label = f"iteration {iteration}"
    if training.num_policies == 1:
        return StepRequest(StepKind.UPDATE, label, iteration=iteration)
    preference = training.preference_of(training.numbers_in(iteration)[0])
    shares = dict(zip(setting.objectives, preference, strict=True))
    return StepRequest(StepKind.UPDATE, label, preference=shares, iteration=iteration)


def _results(
    observations: Sequence[Observation], numbers: Sequence[int]
) -> list[tuple[Mapping[str, Any], tuple[float, ...]]]:
    """The configuration of each of the trials, and the value of each objective, larger is better."""
    known = {observation.number: observation for observation in observations if observation.number <= numbers[-1]}
    scored = [tuple(1 - cost for cost in o.costs) for o in known.values() if o.costs is not None]
    worst = tuple(map(min, zip(*scored, strict=True)))
    found = []
    for number in numbers:
        observation = known[number]
        values = worst if observation.costs is None else tuple(1 - cost for cost in observation.costs)
        found.append((observation.configuration, values))
    return found
