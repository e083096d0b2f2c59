"""Data of the chart on the trials at full budget and the Pareto front among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from search_spaces.objectives import Objective
from service.results.documents import pareto
from service.results.feasibility import violations
from service.results.record import RunRecord
from service.results.selection import full_budget_trials
from service.results.series.base import chart
from service.results.statistics import interval_of_mean
from service.schemas.files import (
    Interval,
    Number,
    ObjectiveDocument,
    StandardErrors,
    Values,
    Violations,
    VolumeDocument,
)
from service.types import TrialResult

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


@dataclass(frozen=True)
class FrontPlot:
    """Trials that were scored on all samples of the search, and the hypervolume of the Pareto front among them.

    `reference_point` is the point, in costs of the objectives, up to which hypervolumes are measured. `hypervolume` is
    on search data, and `holdout_hypervolume` on holdout data. `points` has the trials.
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
                intervals={
                    objective.name: list(_interval(trial, objective, run.full_budget.get(objective.name, 0)))
                    for objective in run.objectives
                },
                is_on_front=trial.number in numbers,
                is_best=best is not None and trial.number == best.number,
            )
            for trial in full_budget_trials(run.trials)
        ),
    )


def _interval(trial: TrialResult, objective: Objective, full_budget: int) -> tuple[float, float]:
    """Ends of the 95 % interval of a trial's value on search data, clipped to the objective's range.

    The interval is computed by `interval_of_mean`, as for the list of studies, with the number of samples of the
    trial's last rung, or else `full_budget`. A value of a single sample has no standard error; its interval is the
    whole range. Objectives that count the recipe's layers or parameters are exact: both ends are the value.
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
