"""Importances of the parameters of a study for one objective, by PED-ANOVA, and their sums by part of the model.

Watanabe, Bansal and Hutter, "PED-ANOVA: Efficiently Quantifying Hyperparameter Importance in Arbitrary Subspaces"
(2023), with the changes for parameters that exist only under a condition, as Optuna implements both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from search_spaces.objectives import Objective
from search_spaces.spaces import SPACES
from search_spaces.spaces.base import LayerGroup, ParameterPlace
from service.resolved_study import ResolvedStudy
from service.results.columns import PARAMETER, Columns, optuna_trials
from service.results.selection import full_budget_trials
from service.types import JobRecord, TrialResult

__all__ = [
    "MIN_TRIALS",
    "TITLE",
    "ImportancePlot",
    "importance_columns",
    "importance_json",
    "importance_plot",
    "importances",
    "missing_plot",
    "scored_trials",
]

TITLE = "Importance of each parameter for an objective, and sums by layers, part of a layer and expert."

# Below this number of trials, the best tenth has fewer than five, for which importances are mostly noise.
MIN_TRIALS = 50

# Most values of parameters from which importances are computed; that takes up to about 10 s of one core.
MAX_NUMBERS = 400_000

Share = Annotated[float, Field(description="From 0 to 1; the importances of all parameters sum to 1.")]


@dataclass(frozen=True)
class ParameterImportance:
    """Importance of a parameter, and the part of the merge that it changes; null if it changes several parts."""

    name: str
    importance: Share
    layers: Annotated[str | None, Field(description="Layers or layer group, as in `layers` of the plot.")]
    part: Annotated[str | None, Field(description="Component of these layers, tensor, or part outside of layers.")]
    expert: str | None


@dataclass(frozen=True)
class ImportanceSum:
    """Sum of the importances of the parameters that change one part of the layers, or one expert's share."""

    name: str
    importance: Share
    parameters: Annotated[int, Field(description="Number of these parameters.")]


@dataclass(frozen=True)
class LayersImportance:
    """Sum of the importances of the parameters that change the layers [start, stop), counted from 0."""

    name: str
    start: int
    stop: int
    importance: Share
    parameters: Annotated[int, Field(description="Number of these parameters.")]


@dataclass(frozen=True)
class ImportancePlot:
    """Importance of each parameter for reaching the best tenth of the values of one objective.

    `parameters` is sorted, the most important first. If `parameters` is null, `reason` says why. `layers`, `parts` and
    `experts` have the sums of the importances for each group of layers, each part of a layer and each expert;
    parameters that belong to several are left out.
    """

    plot: Literal["importance"]
    objective: str
    trials: Annotated[int, Field(description="Trials at full budget with a configuration.")]
    used: Annotated[int, Field(description="Trials of them that were used; fewer if there are very many numbers.")]
    reason: Annotated[str | None, Field(description="Why there are no importances; null if there are.")]
    parameters: list[ParameterImportance] | None
    layers: list[LayersImportance]
    parts: list[ImportanceSum]
    experts: list[ImportanceSum]


def scored_trials(trials: Iterable[TrialResult], objective: str) -> list[TrialResult]:
    """Select the valid trials at full budget that have a value of the objective."""
    return [trial for trial in full_budget_trials(trials) if objective in trial.values]


def importance_columns(
    trials: Sequence[TrialResult], configurations: Mapping[int, Mapping[str, Any]], objective: str
) -> Columns:
    """Input columns of `importances`: the values of the objective, and the values of each parameter.

    `trials` are at full budget, and have configurations. If the trials have more than MAX_NUMBERS values of parameters
    in all, only every second trial is used, or every third, and so on.
    """
    names = dict.fromkeys(name for trial in trials for name in configurations[trial.number])
    wanted = max(MIN_TRIALS, MAX_NUMBERS // max(1, len(names)))
    step = max(1, -(-len(trials) // wanted))
    taken = trials[::step]
    return {
        "state": ["COMPLETE"] * len(taken),
        f"value.{objective}": [trial.values[objective] for trial in taken],
        **{PARAMETER + name: [configurations[trial.number].get(name) for trial in taken] for name in names},
    }


def importances(columns: Columns, objective: str, direction: str) -> dict[str, float]:
    """Compute the importance of each parameter by PED-ANOVA, the most important first; importances sum to 1.

    `columns` is a result of the function `importance_columns`, and `direction` is "minimize" or "maximize". The
    function takes seconds and imports Optuna, so a server calls it in a process of its own. If no parameter has an
    influence, all importances are 0.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction=optuna.study.StudyDirection[direction.upper()])
    study.add_trials(list(optuna_trials(columns, [objective])))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of the option normalize
        found = optuna.importance.get_param_importances(study, evaluator=evaluator, normalize=False)
    total = sum(found.values())
    return {name: value / total if total > 0 else 0.0 for name, value in found.items()}


def importance_plot(
    study: JobRecord, objective: Objective, found: Mapping[str, float], *, num_trials: int, num_used: int
) -> ImportancePlot:
    """Describe the importance of each parameter, and the sums by group of layers, by part of a layer and by expert.

    `found` maps each parameter to its importance, which was computed from `num_used` of `num_trials` trials.
    """
    document = study.document["search_space"]
    section = SPACES[document["kind"]].model_validate(document)
    experts, num_layers = [*study.document["models"]["experts"]], ResolvedStudy.of(study).num_layers
    places = {name: section.place_of(name, experts=experts, num_layers=num_layers) for name in found}
    layers = {place.layers: place.layers for place in places.values() if place.layers is not None}

    def sums(key: Callable[[ParameterPlace], Any]) -> dict[Any, tuple[float, int]]:
        totals: dict[Any, tuple[float, int]] = {}
        for name, place in places.items():
            if (of := key(place)) is not None:
                total, count = totals.get(of, (0.0, 0))
                totals[of] = total + found[name], count + 1
        return totals

    by_layers = sums(lambda place: place.layers)
    return ImportancePlot(
        "importance",
        objective.name,
        num_trials,
        num_used,
        None,
        [
            ParameterImportance(name, value, _name(place.layers), place.part, place.expert)
            for name, value in found.items()
            for place in (places[name],)
        ],
        [
            LayersImportance(of.name, of.start, of.stop, *by_layers[of])
            for of in sorted(layers, key=lambda of: (of.start, of.stop))
        ],
        [ImportanceSum(name, *total) for name, total in sums(lambda place: place.part).items()],
        [ImportanceSum(name, *total) for name, total in sums(lambda place: place.expert).items()],
    )


def _name(layers: LayerGroup | None) -> str | None:
    return None if layers is None else layers.name


def missing_plot(objective: str, reason: str, *, num_trials: int) -> ImportancePlot:
    """Make the importance plot of a study whose importances are missing; `reason` says why."""
    return ImportancePlot("importance", objective, num_trials, 0, reason, None, [], [], [])


def importance_json(plot: ImportancePlot) -> bytes:
    """Encode an importance plot as JSON text."""
    return TypeAdapter(ImportancePlot).dump_json(plot)
