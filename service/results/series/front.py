"""Data of the chart on the trials at full budget and the Pareto front among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from service.results.documents import pareto
from service.results.feasibility import violations
from service.results.record import RunRecord
from service.results.selection import full_budget_trials
from service.results.series.base import chart
from service.schemas.files import Number, ObjectiveDocument, StandardErrors, Values, Violations, VolumeDocument

__all__ = ["FrontPlot", "FrontPoint", "front"]


@dataclass(frozen=True)
class FrontPoint:
    trial: Number
    label: str
    origin: str
    values: Values
    standard_errors: StandardErrors
    violations: Violations
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
                is_on_front=trial.number in numbers,
                is_best=best is not None and trial.number == best.number,
            )
            for trial in full_budget_trials(run.trials)
        ),
    )
