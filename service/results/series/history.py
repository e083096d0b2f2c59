"""Data of the chart on the search history: the trials' values at the rungs that they finished, and the best so far."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from search_spaces.objectives import Objective
from service.results.feasibility import violations
from service.results.record import RunRecord
from service.results.selection import accuracy_objectives
from service.results.series.base import chart
from service.schemas.files import Number
from service.types import TrialResult, TrialState

__all__ = ["HistoryPlot", "HistoryPoint", "HistorySeries", "RecordPoint", "history"]


@dataclass(slots=True)  # a frozen one takes three times as long to make, and a chart has one for every rung
class HistoryPoint:
    trial: Number
    label: str
    origin: str
    rung: Number
    samples: Annotated[int, Field(description="Samples of each objective at that rung.")]
    value: float
    is_full: Annotated[bool, Field(description="Whether this is the trial's value at full budget.")]
    # Samples of the objective with the most samples; `samples` is for the objective with the fewest samples.
    most_samples: Annotated[int, Field(exclude=True)]


@dataclass(frozen=True)
class RecordPoint:
    trial: Number
    value: float


@dataclass(frozen=True)
class HistorySeries:
    name: Annotated[str, Field(description='Objective, or "mean" for the mean of the accuracy objectives.')]
    direction: Literal["maximize", "minimize"]
    points: tuple[HistoryPoint, ...]
    record: Annotated[
        tuple[RecordPoint, ...],
        Field(description="Trials that were the best so far at full budget, among those that keep to all constraints."),
    ]


@dataclass(frozen=True)
class HistoryPlot:
    """Values of every trial for each objective, at each rung that the trial finished.

    A rung is a number of samples at which trials are compared.
    """

    plot: Literal["history"]
    series: tuple[HistorySeries, ...]
    failed: Annotated[tuple[int, ...], Field(description="Numbers of the trials that failed.")]


@chart(place=1)
def history(run: RunRecord) -> HistoryPlot:
    """Values of every trial at each number of samples that it reached, for each objective and for the mean accuracy."""
    trials = sorted(run.trials, key=lambda trial: trial.number)
    averaged = accuracy_objectives(run.objectives)
    left_out = {
        trial.number
        for trial in trials
        if trial.invalid is not None or violations(trial.values, run.objectives, run.sources)
    }
    series = [_series(trials, (objective.name,), objective, left_out) for objective in run.objectives]
    if len(averaged) > 1:
        series.insert(0, _series(trials, averaged, Objective("mean", "mean", "maximize"), left_out))
    failed = tuple(trial.number for trial in trials if trial.state is TrialState.FAIL)
    return HistoryPlot("history", tuple(series), failed)


def _series(
    trials: Sequence[TrialResult], names: Sequence[str], objective: Objective, left_out: Collection[int]
) -> HistorySeries:
    """Compute the data of one line of the history chart: each trial's value at every rung that the trial finished.

    A rung is a number of samples at which trials are compared. The line belongs to one objective, or to the mean of
    several objectives.

    Args:
        trials: Trials, sorted by number.
        names: The objectives, averaged if there are several.
        objective: Name and direction of the values that the line shows.
        left_out: Numbers of trials that are invalid or violate constraints, which cannot be the best so far.
    """
    points: list[HistoryPoint] = []
    record: list[RecordPoint] = []
    is_mean = len(names) > 1
    for trial in trials:
        number, label, origin = trial.number, trial.label, trial.origin.value
        last = trial.rungs[-1] if trial.state is TrialState.COMPLETE else None
        for rung in trial.rungs:
            try:
                values = [rung.values[name] for name in names]
            except KeyError:
                continue
            # The cost of a recipe has no samples: it is placed at the rung's number of samples, if there are any.
            samples = [rung.num_samples[name] for name in names if name in rung.num_samples]
            samples = samples or [*rung.num_samples.values()] or [0]
            fewest, most = (min(samples), max(samples)) if len(samples) > 1 else (samples[0], samples[0])
            value = statistics.fmean(values) if is_mean else values[0]
            is_full = rung is last
            points.append(HistoryPoint(number, label, origin, rung.rung, fewest, value, is_full, most))
            if is_full and number not in left_out and (not record or objective.is_better(value, record[-1].value)):
                record.append(RecordPoint(number, value))
    return HistorySeries(objective.name, objective.direction, tuple(points), tuple(record))
