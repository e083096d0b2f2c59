"""Data of the chart on gradient descents: the losses at each gradient, and the trials made along each descent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from search_spaces.preferences import equal_preference
from service.results.record import RunRecord
from service.results.series.base import chart
from service.schemas.files import Number
from service.store.steps import GradientStep

__all__ = ["DescentPoint", "DescentSeries", "DescentStep", "DescentsPlot", "descents"]


@dataclass(frozen=True)
class DescentStep:
    gradient: Annotated[int, Field(ge=1, description="Counted over all descents.")]
    losses: Annotated[dict[str, float], Field(description="By objective: the mean over the batch, before the step.")]
    relative: Annotated[
        dict[str, float],
        Field(
            description="The same in units of the mean over the baselines, or of the loss before the first gradient "
            "along a path that is refined."
        ),
    ]
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
    """The gradient descents of a search, in the order in which they were made; empty for a search without gradients."""

    plot: Literal["descents"]
    descents: tuple[DescentSeries, ...]


@chart(place=6)
def descents(run: RunRecord) -> DescentsPlot:
    """Losses at each gradient of the gradient descents, and the trials made along each descent."""
    found: dict[int, list[tuple[int, GradientStep]]] = {}
    for number, gradient in enumerate(run.gradients, start=1):
        found.setdefault(gradient.request.descent, []).append((number, gradient))
    # During a descent, a trial that a user requested may take the number that a step was stored with.
    proposed = {trial.number for trial in run.trials if trial.origin.is_searched}
    return DescentsPlot("descents", tuple(_series(steps, proposed) for steps in found.values()))


def _series(steps: Sequence[tuple[int, GradientStep]], proposed: set[int]) -> DescentSeries:
    first = steps[0][1].request
    preference = _preference(steps[0][1])
    failure = next((step.result.failure for _, step in steps if step.result.failure), None)
    done = [(number, step) for number, step in steps if not step.result.failure]
    last = {step.proposal: number for number, step in done}
    failed = {step.proposal for _, step in steps if step.result.failure}
    return DescentSeries(
        name=first.label or f"descent {first.descent}",
        preference=dict(preference),
        steps=tuple(_step(number, step, preference) for number, step in done),
        points=tuple(
            DescentPoint(trial, number) for trial, number in last.items() if trial in proposed and trial not in failed
        ),
        failure=failure,
    )


def _step(number: int, step: GradientStep, preference: Mapping[str, float]) -> DescentStep:
    weights = step.request.weights
    losses = {name: loss for name, loss in step.result.losses.items() if preference.get(name)}
    return DescentStep(
        gradient=number,
        losses=losses,
        relative={name: loss * weights[name] / preference[name] for name, loss in losses.items()},
        loss=math.fsum(loss * weights[name] for name, loss in losses.items()),
    )


def _preference(step: GradientStep) -> Mapping[str, float]:
    """The weights that the user gave to the objectives, for the gradient descent to which `step` belongs.

    In a study without such weights, all weights are equal.
    """
    weights = step.request.weights
    return step.request.preference or dict(zip(weights, equal_preference(len(weights)), strict=True))
