"""HM3: a policy that builds layer paths, learned from the trials' results (`workers.training.hm3`).

Every trial is an episode. An UPDATE step stands between the iterations; the policies are read from checkpoints, so that
the searcher keeps no state. The training of the last call is kept: it has the episodes of its iteration, which are
played together. The outcome of an episode is R = sum_k lambda_k f_k - beta_1 T, where f_k is 1 - the cost
of objective k (a metric in [0, 1] itself) and T the number of layers. A candidate that failed counts with the worst
result of each objective among those known.

An iteration learns from its own trials and from those that earlier iterations of its policy learned from, whatever else
is known: so a search is the same with any number of replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from search_spaces.parameters import Parameters
from search_spaces.spaces.layer_paths import MERGED, LayerPaths
from service.tune.searchers.base import Observation, SearchSetting
from service.tune.steps import Step, StepKind, StepRequest, StepResult
from workers.types import Family

if TYPE_CHECKING:
    from torch import Tensor

    from workers.training.hm3.training import PolicyTraining

__all__ = ["SEARCHER", "Hm3Searcher", "paths_of", "training_of"]

# Weights that differ by less are the same.
SAME_WEIGHT = 1e-6


class Hm3Searcher:
    """See the module's docstring; `service.tune.searchers.base.LearningSearcher` for the methods."""

    def __init__(self) -> None:
        self._last: tuple[Parameters, int, SearchSetting, PolicyTraining] | None = None

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
        training = self._training(parameters, seed, setting, checkpoints)
        episode = number - setting.num_baselines
        num_finished = sum(step.request.kind is StepKind.UPDATE for step in steps)
        if num_finished < training.num_needed(episode):
            return _request(training, num_finished, setting)
        played = training.play(episode)
        vector = training.preferences.index(played.preference) if paths_of(parameters).num_preferences > 1 else 0
        return paths_of(parameters).configuration(played.path, preference=vector)

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

        training = self._training(parameters, seed, setting, checkpoints)
        numbers = training.numbers_in(iteration)
        results = _results(observations, [setting.num_baselines + number for number in numbers])
        paths = [paths_of(parameters).path(configuration) for configuration, _ in results]
        lengths = [len(path) for path in paths]
        values = np.array([values for _, values in results])
        penalties = setting.policy.length_penalty * np.array(lengths, dtype=np.float64)
        outcomes = values - penalties[:, None]
        vectors = np.array([training.preference_of(number) for number in numbers])
        statistics = {
            "outcome": float((outcomes * vectors).sum(axis=1).mean()),
            "outcome_std": float((outcomes * vectors).sum(axis=1).std()),
            "length": float(np.mean(lengths)),
        }
        found = training.learn(iteration, torch.tensor(outcomes, dtype=torch.float32), paths=paths)
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

    def learned_from(
        self, *, iteration: int, observations: Sequence[Observation], setting: SearchSetting
    ) -> Sequence[Observation] | None:
        """As of `LearningSearcher`: all episodes up to the iteration's last, and what is known of the sources."""
        num_episodes = (iteration + 1) * setting.policy.episodes
        known = {each.number: each for each in observations if each.number < setting.num_baselines + num_episodes}
        is_known = sum(number >= setting.num_baselines for number in known) == num_episodes
        return [known[number] for number in sorted(known)] if is_known else None

    def proposals(
        self,
        parameters: Parameters,
        *,
        preference: tuple[float, ...],
        count: int,
        seed: int,
        setting: SearchSetting,
        checkpoints: Mapping[int, bytes],
    ) -> list[dict[str, Any]]:
        """At most `count` configurations that the last checkpoint proposes for a preference vector, the best first,
        without learning. Raises ValueError where there is none, or where it is for another vector."""
        training = training_of(parameters, seed, setting, checkpoints)
        usable = [i for i in checkpoints if training.options.is_conditioned or _is_for(training, i, preference)]
        if not checkpoints:
            raise ValueError("no policy has been learned yet")
        if not usable:
            known = sorted({training.preference_of(training.numbers_in(i)[0]) for i in checkpoints}, reverse=True)
            vectors = "; ".join(", ".join(f"{weight:g}" for weight in vector) for vector in known)
            raise ValueError(
                f"its policies are for one preference vector each (policy: per_preference): {vectors}; give one of "
                "these, or train one for all with policy: conditioned"
            )
        paths = paths_of(parameters)
        found = training.proposals(checkpoints[max(usable)], preference=preference, count=count)
        return [paths.configuration(path) for path in found]

    def _training(
        self, parameters: Parameters, seed: int, setting: SearchSetting, checkpoints: Mapping[int, bytes]
    ) -> PolicyTraining:
        """That of the last call with these checkpoints, if it was of the same search."""
        last = self._last
        if last is None or last[0] is not parameters or last[1] != seed or last[2] is not setting:
            last = (parameters, seed, setting, training_of(parameters, seed, setting, checkpoints))
            self._last = last
        last[3].saved = dict(checkpoints)
        return last[3]

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


def _is_for(training: PolicyTraining, iteration: int, preference: tuple[float, ...]) -> bool:
    own = training.preference_of(training.numbers_in(iteration)[0])
    return all(abs(a - b) < SAME_WEIGHT for a, b in zip(own, preference, strict=True))


def _preferences(setting: SearchSetting) -> tuple[tuple[float, ...], ...]:
    num = len(setting.objectives)
    return setting.preferences or ((1 / num,) * num,)


def _num_policies(setting: SearchSetting) -> int:
    return 1 if setting.policy.policy == "conditioned" else len(_preferences(setting))


def training_of(
    parameters: Parameters, seed: int, setting: SearchSetting, checkpoints: Mapping[int, bytes]
) -> PolicyTraining:
    from workers.training.hm3.learner import LearnerOptions
    from workers.training.hm3.networks import NetworkOptions
    from workers.training.hm3.training import PolicyTraining, PolicyTrainingOptions

    paths, options = paths_of(parameters), setting.policy
    descriptors = None if setting.family is None else _descriptors(setting.family, paths)
    is_conditioned = options.policy == "conditioned"
    return PolicyTraining(
        paths,
        PolicyTrainingOptions(
            episodes=options.episodes,
            warm_up=options.warm_up,
            k=options.neighbours,
            exploration=options.exploration,
            explored=options.explored,
            draws_paths=True,
            is_conditioned=is_conditioned,
            learns=options.learns,
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
                by_index=options.knows_models,
                sees_preference=is_conditioned,
            ),
        ),
        seed=seed,
        preferences=_preferences(setting),
        descriptors=descriptors,
        saved=checkpoints,
        start=setting.start,
    )


def _descriptors(family: Family, paths: LayerPaths) -> Tensor:
    """Of the pool's layers. Merged ones are described by the mean of the models that they stand beside: which vector
    they are merged by, a policy knows as its preference."""
    import torch

    from workers.training.hm3.descriptors import layer_descriptors

    found = layer_descriptors(family, tuple(model for model in paths.models if model != MERGED))
    return torch.cat([found, found.mean(dim=0, keepdim=True)]) if MERGED in paths.models else found


def _request(training: PolicyTraining, iteration: int, setting: SearchSetting) -> StepRequest:
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
