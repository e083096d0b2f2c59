"""Data of the chart on the trials at full budget and the Pareto front among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from search_spaces.objectives import Objective
from service.results.documents import pareto
from service.results.feasibility import violations
from service.results.record import RunRecord
from service.results.selection import accuracy_objectives, full_budget_trials
from service.results.series.base import chart
from service.results.statistics import Bounds, interval_of_mean, mean_of
from service.schemas.files import (
    Interval,
    Number,
    ObjectiveDocument,
    StandardErrors,
    Values,
    Violations,
    VolumeDocument,
)
from service.types import Estimate, TrialResult

__all__ = ["FrontPlot", "FrontPoint", "front"]


@dataclass(frozen=True)
class FrontPoint:
    trial: Number
    label: str
    origin: str
    values: Values
    standard_errors: StandardErrors
    violations: Violations
    intervals: Annotated[
        dict[str, Interval], Field(description="95 % interval of each value, clipped to the objective's range.")
    ]
    is_on_front: bool
    is_best: bool
    mean_interval: Annotated[
        Interval | None,
        Field(
            description="95 % interval of the mean of the accuracy objectives, whose errors count as independent; null "
            "if there are fewer than two."
        ),
    ] = None


@dataclass(frozen=True)
class FrontPlot:
    """Trials that were scored on all samples of the search, and the hypervolume of the Pareto front among them.

    `reference_point` is the point, in costs of the objectives, up to which hypervolumes are measured. `hypervolume` is
    the value on search data, and `holdout_hypervolume` is the value on holdout data. `points` has the trials.
    """

    plot: Literal["front"]
    objectives: list[ObjectiveDocument]
    reference_point: list[float]
    hypervolume: float
    holdout_hypervolume: VolumeDocument | None
    points: tuple[FrontPoint, ...]


@chart(place=2)
def front(run: RunRecord) -> FrontPlot:
    """Trials that were scored on all samples, and which of them are on the Pareto front."""
    document = pareto(run)
    averaged = accuracy_objectives(run.objectives)
    numbers = {row["trial"] for row in document["front"]}
    best = run.best
    return FrontPlot(
        plot="front",
        objectives=document["objectives"],
        reference_point=document["reference_point"],
        hypervolume=document["hypervolume"],
        holdout_hypervolume=document["holdout_hypervolume"],
        points=tuple(
            FrontPoint(
                trial=trial.number,
                label=trial.label,
                origin=trial.origin.value,
                values=dict(trial.values),
                standard_errors=dict(trial.standard_errors),
                violations=violations(trial.values, run.objectives, run.sources),
                intervals={name: list(ends) for name, ends in intervals.items()},
                is_on_front=trial.number in numbers,
                is_best=best is not None and trial.number == best.number,
                mean_interval=_interval_of_mean(trial, intervals, averaged),
            )
            for trial, intervals in ((each, _intervals(each, run)) for each in full_budget_trials(run.trials))
        ),
    )


def _intervals(trial: TrialResult, run: RunRecord) -> dict[str, Bounds]:
    return {
        objective.name: _interval(trial, objective, run.full_budget.get(objective.name, 0))
        for objective in run.objectives
    }


def _interval_of_mean(trial: TrialResult, intervals: Mapping[str, Bounds], names: Sequence[str]) -> Interval | None:
    """Ends of the 95 % interval of the mean of the objectives `names`; None for fewer than two objectives.

    `intervals` has the ends of each objective's interval, from which the ends of the mean's interval are computed
    (function `mean_of`).
    """
    if len(names) < 2:
        return None
    errors = trial.standard_errors
    found = mean_of([Estimate(trial.values[name], errors.get(name) or 0.0, 0, intervals[name]) for name in names])
    return list(found.ci95)


def _interval(trial: TrialResult, objective: Objective, full_budget: int) -> Bounds:
    """Ends of the 95 % interval of a trial's value on search data, clipped to the objective's range.

    The function `interval_of_mean` computes the interval from the value, its standard error and the number of samples
    of the trial's last rung (or `full_budget`, if this number is not stored). A value of a single sample has no
    standard error; its interval is the whole range. Objectives that count the recipe's layers or parameters are exact:
    both ends are the value.
    """
    value = trial.values[objective.name]
    if objective.cost_of_recipe is not None:
        return value, value
    last = trial.rungs[-1].num_samples if trial.rungs else {}
    error, n = trial.standard_errors.get(objective.name, 0.0), last.get(objective.name, full_budget)
    if error is None or n == 0:  # a single sample leaves all values possible
        low, high = objective.bounds
        return min(low, value), max(high, value)
    return interval_of_mean(value, error, n, bounds=objective.bounds)
