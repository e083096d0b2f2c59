"""Data of the chart of the Pareto front's hypervolume over the samples spent, for several objectives."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from search_spaces.objectives import REFERENCE_COST, Candidate, constrained_dominates
from search_spaces.objectives import hypervolume as volume_of
from service.results.record import RunRecord
from service.results.series.base import chart
from service.schemas.files import Number
from service.types import Origin

__all__ = ["HypervolumePlot", "HypervolumePoint", "hypervolume"]


@dataclass(frozen=True)
class HypervolumePoint:
    trial: Number
    label: str
    origin: str
    spent: Annotated[int, Field(description="Samples that all trials and steps up to this trial cost.")]
    hypervolume: Annotated[float, Field(ge=0, description="Hypervolume of the front of the trials up to this one.")]


@dataclass(frozen=True)
class HypervolumePlot:
    """Hypervolume of the Pareto front after each trial that was scored on all samples of the search.

    `reference_point` is the point, in costs of the objectives, up to which the volume is measured. There are no
    `points` in a study with a single objective.
    """

    plot: Literal["hypervolume"]
    reference_point: list[float]
    baselines_spent: Annotated[int, Field(description="Samples scored for the baselines.")]
    points: tuple[HypervolumePoint, ...]


@chart(place=9)
def hypervolume(run: RunRecord) -> HypervolumePlot:
    """Hypervolume of the Pareto front on search data, over the number of samples used so far."""
    baselines = (Origin.SOURCE, Origin.PUBLISHED)
    return HypervolumePlot(
        plot="hypervolume",
        reference_point=[REFERENCE_COST] * len(run.objectives),
        baselines_spent=sum(trial.samples_scored for trial in run.trials if trial.origin in baselines),
        points=_points(run) if len(run.objectives) > 1 else (),
    )


def _points(run: RunRecord) -> tuple[HypervolumePoint, ...]:
    spent = _spent(run)
    front: list[Candidate] = []
    volume = 0.0
    points = []
    for trial, candidate in run.candidates:
        if not any(constrained_dominates(other, candidate) for other in front):
            front = [other for other in front if not constrained_dominates(candidate, other)]
            front = [other for other in front if other.violation == candidate.violation]
            front.append(candidate)
            volume = volume_of([of.costs for of in front if of.costs is not None])
        points.append(
            HypervolumePoint(trial.number, trial.label, trial.origin.value, spent[trial.number], volume),
        )
    return tuple(points)


def _spent(run: RunRecord) -> dict[int, int]:
    """Total number of samples that the search has used up to and including each trial, keyed by trial number.

    Samples that were scored for a trial count as used. The losses and gradients that were computed for the trial's
    proposal also count as a number of samples.
    """
    trials = sorted(run.trials, key=lambda trial: trial.number)
    each = [trial.samples_scored + run.search.charges.get(trial.number, 0) for trial in trials]
    return {trial.number: total for trial, total in zip(trials, itertools.accumulate(each), strict=True)}
