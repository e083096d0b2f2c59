"""Proposals by Optuna's samplers: for each proposal, all trials are added to a new study in memory.

A trial has its result at the highest rung that it has reached, or the worst observed value if it failed. Earlier
proposals without results are added as running trials. Akiba et al., "Optuna" (KDD 2019).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from search_spaces.parameters import Categorical, Float, Integer, Parameter, Parameters
from service.tune.searchers.base import Observation, ProposalContext
from service.tune.searchers.encoding import Encoding
from service.tune.searchers.history import by_trial, thinned

__all__ = ["propose"]

# Times of all trials; no sampler that is used here reads them.
_TIME = datetime(2000, 1, 1)


def propose(
    sampler_of: Callable[[int], BaseSampler],
    context: ProposalContext,
    *,
    num_initial: int,
    max_numbers: int,
    max_rows: int = 10**9,
    group: int = 1,
) -> dict[str, Any]:
    """The configuration that an Optuna sampler proposes, or a random one if the sampler repeats a configuration.

    `sampler_of` makes a sampler from a seed. The sampler receives the results in `context`. In long searches, the
    sampler receives the results of the best and the newest trials only: at most `max_rows` results, and so few that
    (number of results) x (number of parameters) is at most `max_numbers`. The number of trials that are left out is a
    multiple of `group`, the size of a generation. `num_initial` is used only in a space with a structure, such as layer
    paths (sequences of layers): in such a space, configurations are random until `num_initial` trials are observed.
    """
    rng, parameters = context.generator(), context.parameters
    trials = by_trial(thinned(context, max_numbers=max_numbers, max_rows=max_rows, group=group).observations)
    # Samplers draw uniformly at first; a space with a structure draws in its own way.
    is_first = parameters.structure is not None and len(trials) < num_initial
    if is_first or all(trial.costs is None for trial in trials):
        return context.sample_unseen(rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        configuration = _ask(sampler_of(int(rng.integers(2**32))), parameters, trials, context.pending)
    configuration = dict(parameters.repair(configuration))
    rows = Encoding(parameters)
    is_known = rows.first_unknown(rows.encode([configuration]), context.known_configurations()) is None
    return context.sample_unseen(rng) if is_known else configuration


def _ask(
    sampler: BaseSampler,
    parameters: Parameters,
    trials: Sequence[Observation],
    pending: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # no message about each study
    distributions = {parameter.name: _distribution(parameter) for parameter in parameters}
    costs, constraints = _without_failures(trials)
    storage = optuna.storages.InMemoryStorage()
    study_id = storage.create_new_study([StudyDirection.MINIMIZE] * costs.shape[1], "study")
    for index, trial in enumerate(trials):
        told = _trial(trial.configuration, distributions, TrialState.COMPLETE, costs[index].tolist())
        for name, value in enumerate(constraints[index].tolist()):
            told.set_constraint(str(name), value)
        if isinstance(sampler, optuna.samplers.BaseGASampler) and sampler.population_size:
            generation = index // sampler.population_size
            told.system_attrs = {**told.system_attrs, sampler._get_generation_key(): generation}
        storage.create_new_trial(study_id, told)
    for configuration in pending:
        storage.create_new_trial(study_id, _trial(configuration, distributions, TrialState.RUNNING, None))
    asked = optuna.Study("study", storage, sampler=sampler).ask()
    return parameters.build(lambda parameter: _suggest(asked, parameter))


def _without_failures(trials: Sequence[Observation]) -> tuple[Any, Any]:
    """The costs [trial, objective] and constraint values [trial, constraint] of all trials, with failures filled in.

    A failed trial gets, for each objective and each constraint, the worst value of the trials that did not fail.
    """
    scored = [trial for trial in trials if trial.costs is not None]
    costs = np.array([trial.costs for trial in scored])
    constraints = np.array([trial.constraints for trial in scored])
    worst = costs.max(axis=0), constraints.max(axis=0)
    return (
        np.array([worst[0] if trial.costs is None else trial.costs for trial in trials]),
        np.array([worst[1] if trial.costs is None else trial.constraints for trial in trials]),
    )


class _ToldTrial(FrozenTrial):
    """An Optuna trial whose deep copy shares its contents with the original.

    With hundreds of parameters, copying would take most of the time of a proposal.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _ToldTrial:
        return copy.copy(self)


def _trial(
    configuration: Mapping[str, Any],
    distributions: Mapping[str, BaseDistribution],
    state: TrialState,
    values: list[float] | None,
) -> _ToldTrial:
    return _ToldTrial(
        number=-1,
        trial_id=-1,
        state=state,
        value=None,
        values=values,
        datetime_start=_TIME,
        datetime_complete=None if values is None else _TIME,
        params=dict(configuration),
        distributions={name: distributions[name] for name in configuration},
        user_attrs={},
        system_attrs={},
        intermediate_values={},
    )


def _distribution(parameter: Parameter) -> BaseDistribution:
    match parameter:
        case Float():
            return FloatDistribution(parameter.low, parameter.high)
        case Integer():
            return IntDistribution(parameter.low, parameter.high)
        case Categorical():
            return CategoricalDistribution(parameter.choices)


def _suggest(trial: optuna.Trial, parameter: Parameter) -> Any:
    # Each call of a `suggest` method copies all values so far; those that were drawn together are known already.
    if parameter.name in trial.relative_params:
        return trial.relative_params[parameter.name]
    match parameter:
        case Float():
            return trial.suggest_float(parameter.name, parameter.low, parameter.high)
        case Integer():
            return trial.suggest_int(parameter.name, parameter.low, parameter.high)
        case Categorical():
            return trial.suggest_categorical(parameter.name, parameter.choices)
