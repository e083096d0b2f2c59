"""The searcher of HM3: a policy (`workers.training.hm3`) builds layer paths, and learns from the trials' results.

A layer path is the sequence of source models' layers of which a merge consists. Every trial is an episode, and the
policy is updated after each iteration, a fixed number of episodes. Policies are read from checkpoints, so the searcher
needs no state. The object that trains the policies is kept from the last call, because this is faster and changes no
result.

The outcome of an episode is R = sum_k lambda_k f_k - beta_1 T:

- f_k: 1 - the cost of objective k (the metric itself, if it is in [0, 1])
- lambda_k: the weight of objective k
- T: the number of layers
- beta_1: the price of a layer

A trial that failed counts with the worst known result of each objective.

An iteration learns from its own trials, from the trials that earlier iterations of its policy learned from, and from no
other results. Therefore a search is the same with any number of replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.parameters import Parameters
from search_spaces.searchers import SEARCHERS
from search_spaces.spaces.layer_paths import LENGTH, MERGED, LayerPaths
from service.store.steps import StepRequest, UpdateRequest, UpdateResult, UpdateStep
from service.tune.searchers.base import Observation, ProposalContext, SearchSetting
from service.tune.searchers.elites import KnownPaths, archive, last_improvement, outcomes_of, unseen_near
from workers.types import Family

if TYPE_CHECKING:
    from torch import Tensor

    from workers.training.hm3.episodes import Episode
    from workers.training.hm3.training import PolicyTraining

__all__ = ["FIRST_GAMMA", "SEARCHER", "Hm3Searcher", "action_of", "paths_of", "training_of"]

# Weights that differ by less than this are equal.
SAME_WEIGHT = 1e-6

# The discount in studies of version 1 that do not state one.
FIRST_GAMMA = 0.99

# The first version of the searcher with elites, and whose policies do not repeat paths.
FIRST_WITH_ELITES = 3

# The first version whose mutants add merged layers of the episode's own preference vector, and whose conditioned
# policies learn from a path for the vector of its merged layers.
FIRST_WITH_OWN_VECTORS = 4

# The largest number of allowed steps from which a policy with `action: auto` draws one.
FEW_STEPS = 32


class Hm3Searcher:
    """The searcher of HM3: a policy that builds layer paths, trained on the results of its trials.

    A layer path is the sequence of source models' layers of which a merge consists. Each trial is an episode; the
    policy is updated after each iteration, a fixed number of episodes.
    """

    def __init__(self) -> None:
        self._last: tuple[Parameters, int, SearchSetting, PolicyTraining] | None = None

    def advance(self, context: ProposalContext) -> StepRequest | dict[str, Any]:
        training = self._training_of(context)
        episode = context.number - context.setting.num_baselines
        num_finished = sum(isinstance(step, UpdateStep) for step in context.steps)
        if num_finished < training.num_needed(episode):
            return _request(training, num_finished, context.setting)
        played, paths = training.play(episode), paths_of(context.parameters)
        vector = training.preferences.index(played.preference) if paths.num_preferences > 1 else 0
        if training.options.version < FIRST_WITH_ELITES or not training.options.learns:
            return paths.configuration(played.path, preference=vector, scales=played.scales)
        return _unseen(context, training, played, vector)

    def learn(self, context: ProposalContext, *, iteration: int) -> tuple[UpdateResult, bytes | None]:
        import torch

        setting, training = context.setting, self._training_of(context)
        numbers = training.numbers_in(iteration)
        results = _results(context.observations, [setting.num_baselines + number for number in numbers])
        paths = [paths_of(context.parameters).path(configuration) for configuration, _ in results]
        scales = [paths_of(context.parameters).scales(configuration) for configuration, _ in results]
        lengths = [len(path) for path in paths]
        values = np.array([values for _, values in results])
        penalties = setting.options.hm3.length_penalty * np.array(lengths, dtype=np.float64)
        outcomes = values - penalties[:, None]
        vectors = np.array([training.preference_of(number) for number in numbers])
        statistics = {
            "outcome": float((outcomes * vectors).sum(axis=1).mean()),
            "outcome_std": float((outcomes * vectors).sum(axis=1).std()),
            "length": float(np.mean(lengths)),
        }
        restarts = _has_stalled(context, training, iteration)
        found = training.learn(
            iteration,
            torch.tensor(outcomes, dtype=torch.float32),
            paths=paths,
            scales=scales,
            vectors=_vectors_of(context.parameters, training, [configuration for configuration, _ in results]),
            restarts=restarts,
        )
        if found is None:
            return UpdateResult(statistics=statistics), None
        statistics |= {"restarts": 1.0} if restarts else {}
        statistics |= {name: float(value) for name, value in asdict(found).items() if value is not None}
        content = training.saved[iteration]
        return UpdateResult(statistics=statistics, checkpoint=hashlib.sha256(content).hexdigest()), content

    def learned_from(self, context: ProposalContext, *, iteration: int) -> Sequence[Observation] | None:
        """The results in `context` that the policy update of `iteration` depends on, sorted by trial number.

        An iteration is a fixed number of proposed trials (episodes). The update depends on the results of all episodes
        up to the end of the iteration, and on the known results of baselines. Returns None while the result of an
        episode is not known.
        """
        setting = context.setting
        num_episodes = (iteration + 1) * setting.options.hm3.episodes
        known = {o.number: o for o in context.observations if o.number < setting.num_baselines + num_episodes}
        is_known = sum(number >= setting.num_baselines for number in known) == num_episodes
        return [known[number] for number in sorted(known)] if is_known else None

    def num_policies(self, setting: SearchSetting) -> int:
        return 1 if setting.options.hm3.policy == "conditioned" else len(setting.vectors)

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
        """At most `count` configurations that a trained policy proposes for one preference, the best first.

        `preference` is a vector with the weight of each objective. `parameters`, `seed` and `setting` belong to the
        study that trained the policy; `checkpoints` contains the policy's checkpoints, keyed by training iteration. The
        newest checkpoint that fits the vector is used; it is not trained further. Raises ValueError if there is no
        checkpoint, or if all checkpoints are for other vectors.
        """
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

    def _training_of(self, context: ProposalContext) -> PolicyTraining:
        """The object that trains the study's policies; it has the checkpoints of `context`.

        The object of the last call is returned again if the search space, the seed and the setting are the same.
        """
        parameters, seed, setting = context.parameters, context.seed, context.setting
        last = self._last
        if last is None or last[0] is not parameters or last[1] != seed or last[2] is not setting:
            last = (parameters, seed, setting, training_of(parameters, seed, setting, context.checkpoints))
            self._last = last
        last[3].saved = dict(context.checkpoints)
        return last[3]


SEARCHER = Hm3Searcher()


def paths_of(parameters: Parameters) -> LayerPaths:
    """The set of all layer paths (sequences of layers) of a search space, which its `parameters` describe."""
    assert isinstance(parameters.structure, LayerPaths), "hm3 searches layer paths"
    return parameters.structure


def _is_for(training: PolicyTraining, iteration: int, preference: tuple[float, ...]) -> bool:
    own = training.preference_of(training.numbers_in(iteration)[0])
    return all(abs(a - b) < SAME_WEIGHT for a, b in zip(own, preference, strict=True))


def training_of(
    parameters: Parameters, seed: int, setting: SearchSetting, checkpoints: Mapping[int, bytes]
) -> PolicyTraining:
    """Make the object that trains a study's policies.

    `parameters` and `setting` are the search space and further facts of the study, and `seed` fixes all random numbers.
    `checkpoints` has the policies' checkpoints by training iteration; the training continues from them.
    """
    from workers.training.hm3.actions import Action
    from workers.training.hm3.learner import LearnerOptions
    from workers.training.hm3.networks import NetworkOptions
    from workers.training.hm3.scalarisation import Scalarisation
    from workers.training.hm3.training import PolicyTraining, PolicyTrainingOptions

    paths, options = paths_of(parameters), setting.options.hm3
    descriptors = None if setting.family is None else _descriptors(setting.family, paths)
    is_conditioned = options.policy == "conditioned"
    version = SEARCHERS["hm3"].version if setting.version is None else setting.version
    gamma = (FIRST_GAMMA if version == 1 else 1.0) if options.gamma is None else options.gamma
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
            version=version,
            learner=LearnerOptions(
                clip=options.clip,
                gamma=gamma,
                gae_lambda=options.gae_lambda,
                value_coefficient=options.value_coefficient,
                entropy_coefficient=options.entropy_coefficient,
                learning_rate=options.learning_rate,
                epochs=options.epochs,
                mini_batches=options.mini_batches,
                target_kl=options.target_kl,
                action=Action(action_of(paths, setting)),
                scalarisation=Scalarisation(options.scalarisation if version > 2 else "weighted_sum"),
            ),
            networks=NetworkOptions(
                num_objectives=len(setting.objectives),
                num_statistics=0 if descriptors is None else descriptors.shape[2],
                by_index=options.knows_models,
                sees_preference=is_conditioned,
                scales=paths.scale_range is not None,
            ),
        ),
        seed=seed,
        preferences=setting.vectors,
        descriptors=descriptors,
        saved=checkpoints,
        start=setting.start,
    )


def action_of(paths: LayerPaths, setting: SearchSetting) -> str:
    """How policies choose the next layer of a merge: "categorical" or "wolpertinger".

    A layer path is the sequence of source models' layers of which a merge consists; each layer is a step. With
    "categorical", a policy draws from all allowed steps. With "wolpertinger", it draws a point in the space of the
    steps' embeddings, and one of the nearest allowed steps is chosen. The result is the option `action` in `setting`.
    If the option is "auto", it is "categorical" if at most FEW_STEPS steps are allowed at any position of the path.
    Policies of version 1, and policies for paths whose layers have scales (factors on outputs), can only be
    "wolpertinger".
    """
    from workers.training.hm3.actions import LegalSteps

    has_scales = paths.scale_range is not None
    chosen = "wolpertinger" if setting.version == 1 or has_scales else setting.options.hm3.action
    if chosen != "auto":
        return chosen
    return "categorical" if LegalSteps(paths).most <= FEW_STEPS else "wolpertinger"


def _descriptors(family: Family, paths: LayerPaths) -> Tensor:
    """Statistics of the weights of each source layer, as input to the policy that builds layer paths.

    `family` has the models, and `paths` describes all layer paths, which are sequences of their layers. The models of
    `paths` may include MERGED: a model that is itself merged from all others, by coefficients that depend on the
    preference vector (the importances of the objectives). Because its weights differ from vector to vector, its layers
    get the mean statistics of the other models' layers.
    """
    import torch

    from workers.training.hm3.descriptors import layer_descriptors

    found = layer_descriptors(family, tuple(model for model in paths.models if model != MERGED))
    return torch.cat([found, found.mean(dim=0, keepdim=True)]) if MERGED in paths.models else found


def _unseen(context: ProposalContext, training: PolicyTraining, played: Episode, vector: int) -> dict[str, Any]:
    """The configuration that an episode proposes: the policy's own layer path, or a mutant of it or of a good path.

    A layer path is the sequence of source models' layers of which a merge consists; a mutant is a random change of a
    path. An episode is one trial; `played` is the episode, with the path that the policy has built. `vector` is the
    index of its preference vector (weights of the objectives); this index becomes a part of the configuration.
    `context` has the known results, and `training` trains the policies.

    A share of the episodes propose a mutant of one of the best paths so far. If one policy has all vectors as inputs, a
    mutant keeps the vector of its path's merged layers, and merged layers that it adds to a path without any have the
    episode's vector. A policy of one vector knows only the merged model of this vector, so all merged layers of its
    mutants have this vector. A policy's path that was proposed before is replaced by a mutant of it, if a new mutant is
    found. The best paths are chosen only among baselines and trials that must have ended before this episode is built,
    so the result does not depend on the number of engines.
    """
    options, paths = context.setting.options.hm3, paths_of(context.parameters)
    rng = np.random.default_rng(training.seed_of("elites", played.number))
    known = KnownPaths(context.known_configurations())
    added = vector if training.options.version >= FIRST_WITH_OWN_VECTORS else None
    if rng.random() < options.elite_share:
        num_needed = training.num_needed(played.number)
        scored, values = _scored(context, num_iterations=num_needed)
        if scored and num_needed > 0:
            outcomes = outcomes_of(values, played.preference, options.scalarisation)
            elites = archive([o.configuration for o in scored], outcomes, size=options.archive)
            parent = elites[int(rng.integers(len(elites)))]
            if added is not None and not training.options.is_conditioned:
                parent = paths.with_preference(parent, added)
            found = unseen_near(paths, parent, known, rng, preference=added)
            if found is not None:
                return found
    configuration = paths.configuration(played.path, preference=vector, scales=played.scales)
    if configuration in known and options.avoids_repeats:
        return unseen_near(paths, configuration, known, rng, preference=added) or configuration
    return configuration


def _vectors_of(
    parameters: Parameters, training: PolicyTraining, configurations: Sequence[Mapping[str, Any]]
) -> list[int | None]:
    """The preference vector for which a policy learns from each path, by its index; None is the vector of the episode.

    A path is a sequence of layers, some of which may be merged from the experts by one preference vector (weights of
    the objectives). A mutant of a good path may keep the vector of this path's merged layers. A policy that has the
    vector as an input learns from such a path what it is worth for that vector. Since version 4, the paths of policies
    of one vector are merged for their own vector; policies of earlier versions learn from all paths as from their own.
    """
    paths = paths_of(parameters)
    if not training.options.is_conditioned or training.options.version < FIRST_WITH_OWN_VECTORS:
        return [None] * len(configurations)
    return [paths.merged_preference(configuration) for configuration in configurations]


def _scored(context: ProposalContext, *, num_iterations: int) -> tuple[list[Observation], NDArray[np.float64]]:
    """The results from which policies learn: results of all baselines and of the first `num_iterations` iterations.

    An iteration is a fixed number of trials, after which a policy learns. The results are taken from `context`. Returns
    two values. The first is the list of the successful observations, sorted by trial number. The second is an array
    [num_trials, num_objectives] of values: 1 minus the cost, minus a penalty for the merge's number of layers.
    """
    setting, options = context.setting, context.setting.options.hm3
    end = setting.num_baselines + num_iterations * options.episodes
    found = sorted((o for o in context.observations if o.number < end and o.costs is not None), key=lambda o: o.number)
    lengths = np.array([o.configuration[LENGTH] for o in found], dtype=np.float64)
    values = 1 - np.array([o.costs for o in found], dtype=np.float64).reshape(len(found), len(setting.objectives))
    return found, values - options.length_penalty * lengths[:, None]


def _has_stalled(context: ProposalContext, training: PolicyTraining, iteration: int) -> bool:
    """Whether the policy of `iteration` must be reset, because its last iterations have found nothing better.

    An iteration is a fixed number of trials of one policy; the policies take turns. A policy is reset each time that
    `restart_after` of its iterations (an option of the study) have passed without a better result. A result in
    `context` is better if it is the best so far for at least one of the policy's preference vectors (weights of the
    objectives). `training` knows which iterations each policy has.
    """
    patience = context.setting.options.hm3.restart_after
    if patience is None or training.options.version < FIRST_WITH_ELITES:
        return False
    scored, values = _scored(context, num_iterations=iteration + 1)
    if not scored:
        return False
    vectors = {training.preference_of(number) for number in training.numbers_in(iteration)}
    last = scored[last_improvement(values, sorted(vectors), context.setting.options.hm3.scalarisation)].number
    since = training.turn_of(iteration) - training.turn_of(
        training.iteration_of(max(0, last - context.setting.num_baselines))
    )
    return since > 0 and since % patience == 0


def _request(training: PolicyTraining, iteration: int, setting: SearchSetting) -> UpdateRequest:
    label = f"iteration {iteration}"
    if training.num_policies == 1:
        return UpdateRequest(label=label, iteration=iteration)
    preference = training.preference_of(training.numbers_in(iteration)[0])
    shares = dict(zip(setting.objectives, preference, strict=True))
    return UpdateRequest(label=label, preference=shares, iteration=iteration)


def _results(
    observations: Sequence[Observation], numbers: Sequence[int]
) -> list[tuple[Mapping[str, Any], tuple[float, ...]]]:
    """Data from which a policy learns: the configuration and the objective values of each trial in `numbers`.

    The data are taken from `observations`. A value is 1 minus the cost, so larger is better. For a failed trial, the
    value of each objective is the worst value of any trial with a number up to the last of `numbers`.
    """
    known = {observation.number: observation for observation in observations if observation.number <= numbers[-1]}
    scored = [tuple(1 - cost for cost in o.costs) for o in known.values() if o.costs is not None]
    worst = tuple(map(min, zip(*scored, strict=True)))
    found = []
    for number in numbers:
        observation = known[number]
        values = worst if observation.costs is None else tuple(1 - cost for cost in observation.costs)
        found.append((observation.configuration, values))
    return found
