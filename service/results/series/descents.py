"""The descents of a search by gradients: the losses of every gradient's batch, and which points became trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from service.results.record import GradientRecord, RunRecord
from service.results.series.base import chart
from service.schemas.files import Number

__all__ = ["DescentPoint", "DescentSeries", "DescentStep", "DescentsPlot", "descents"]


@dataclass(frozen=True)
class DescentStep:
    gradient: Annotated[int, Field(ge=1, description="Counted over all descents.")]
    losses: Annotated[dict[str, float], Field(description="By objective: the mean over the batch, before the step.")]
    relative: Annotated[dict[str, float], Field(description="The same in units of the mean over the baselines.")]
    loss: Annotated[float, Field(description="What the step makes smaller: relative, weighted by the preference.")]


@dataclass(frozen=True)
class DescentPoint:
    trial: Number
    gradient: Annotated[int, Field(ge=1, description="The trial is the point after this gradient.")]


@dataclass(frozen=True)
class DescentSeries:
    name: str
    preference: Annotated[dict[str, float], Field(description="By objective, summing to 1.")]
    steps: tuple[DescentStep, ...]
    points: Annotated[tuple[DescentPoint, ...], Field(description="Trials.")]
    failure: Annotated[str | None, Field(description="Why it ended before its last step.")]


@dataclass(frozen=True)
class DescentsPlot:
    """The descents in the order in which they were made; none for searches without gradients."""

    plot: Literal["descents"]
    descents: tuple[DescentSeries, ...]


@chart(place=6)
def descents(run: RunRecord) -> DescentsPlot:
    """The loss over the gradients of each descent, and the points that became trials."""
    found: dict[str, list[tuple[int, GradientRecord]]] = {}
    for number, gradient in enumerate(run.gradients, start=1):
        found.setdefault(gradient.descent, []).append((number, gradient))
    proposed = {trial.number for trial in run.trials}
    return DescentsPlot("descents", tuple(_series(name, steps, proposed) for name, steps in found.items()))


def _series(name: str, steps: Sequence[tuple[int, GradientRecord]], proposed: set[int]) -> DescentSeries:
    preference = _preference(steps[0][1])
    failure = next((gradient.failure for _, gradient in steps if gradient.failure), None)
    done = [(number, gradient) for number, gradient in steps if not gradient.failure]
    last = {gradient.proposal: number for number, gradient in done}
    failed = {gradient.proposal for _, gradient in steps if gradient.failure}
    return DescentSeries(
        name=name,
        preference=dict(preference),
        steps=tuple(_step(number, gradient, preference) for number, gradient in done),
        points=tuple(
            DescentPoint(trial, number) for trial, number in last.items() if trial in proposed and trial not in failed
        ),
        failure=failure,
    )


def _step(number: int, gradient: GradientRecord, preference: Mapping[str, float]) -> DescentStep:
    losses = {name: loss for name, loss in gradient.losses.items() if preference.get(name)}
    relative = {name: loss * gradient.weights[name] / preference[name] for name, loss in losses.items()}
    return DescentStep(
        gradient=number,
        losses=losses,
        relative=relative,
        loss=math.fsum(loss * gradient.weights[name] for name, loss in losses.items()),
    )


def _preference(gradient: GradientRecord) -> Mapping[str, float]:
    """Equal weights where the study has no preference vectors."""
    return gradient.preference or dict.fromkeys(gradient.weights, 1 / len(gradient.weights))
