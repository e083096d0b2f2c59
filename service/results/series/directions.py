"""Data of the chart on directions and scales of the merges of a study in the space `m3`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from search_spaces.directions import direction_of
from service.results.documents import has_directions
from service.results.record import RunRecord
from service.results.selection import ranked_trials
from service.results.series.base import chart
from service.schemas.files import Number
from service.types import Origin, TrialRecord

__all__ = ["DirectionPoint", "DirectionsPlot", "directions"]


@dataclass(frozen=True)
class DirectionPoint:
    trial: Number
    origin: str
    label: str
    method: str
    shares: Annotated[dict[str, float], Field(description="Share of each expert in the task vectors, summing to 1.")]
    scale: Annotated[float | None, Field(description="Scale of the task vectors; null for an average.")]
    p: Annotated[float | None, Field(description="Exponent of the p-series; null if shares were drawn.")]
    order: Annotated[str | None, Field(description="Order of the experts in the p-series, if the study searches it.")]
    coefficients: Annotated[dict[str, float], Field(description="Shares of elements that are kept: k, density.")]
    values: Annotated[dict[str, float], Field(description="Value of each objective at full budget.")]


@dataclass(frozen=True)
class DirectionsPlot:
    """Directions and scales of the merges that were scored on all samples.

    The direction of a merge is every expert's share of the sum of task vectors, and its scale is the factor of this
    sum. `points` contains the merges, and `experts` contains the aliases of the experts. Some studies search an order
    of the experts, in which the k-th expert gets a share proportional to k^-p; `best_of_orders` then contains the best
    proposal of each order. The plot is empty unless the study's search space is `m3`, which gives each expert one share
    for the whole model.
    """

    plot: Literal["directions"]
    experts: list[str]
    points: tuple[DirectionPoint, ...]
    best: Annotated[
        tuple[DirectionPoint, ...],
        Field(description="The best proposal and the best published recipe of each method."),
    ]
    best_of_orders: Annotated[
        tuple[DirectionPoint, ...], Field(description="The best proposal of each order of the experts.")
    ]


@chart(place=13)
def directions(run: RunRecord) -> DirectionsPlot:
    """Experts' shares and scale of the task vectors in each merge; the best merge by method and by order of experts."""
    experts = list(run.study.document.get("models", {}).get("experts", ()))
    if not has_directions(run.study):
        return DirectionsPlot("directions", experts, (), (), ())
    ranked = [
        point
        for trial in ranked_trials(run.trials, run.objectives)
        if isinstance(trial, TrialRecord) and trial.origin is not Origin.SOURCE
        if (point := _point(trial)) is not None
    ]
    by_method: dict[tuple[str, bool], DirectionPoint] = {}
    by_order: dict[str, DirectionPoint] = {}
    for point in ranked:
        by_method.setdefault((point.method, point.origin == Origin.PUBLISHED), point)
        if point.order is not None:
            by_order.setdefault(point.order, point)
    return DirectionsPlot(
        "directions",
        experts,
        points=tuple(sorted(ranked, key=lambda point: point.trial)),
        best=tuple(by_method[key] for key in sorted(by_method)),
        best_of_orders=tuple(by_order[order] for order in sorted(by_order)),
    )


def _point(trial: TrialRecord) -> DirectionPoint | None:
    recipe = trial.read_recipe()
    direction = direction_of(recipe)
    if direction is None:
        return None
    configuration, merge = trial.configuration or {}, recipe.head
    shares = (name for name in ("k", "density") if isinstance(merge.coefficients.get(name), float))
    return DirectionPoint(
        trial=trial.number,
        origin=trial.origin.value,
        label=trial.label,
        method=configuration.get("method", merge.method),
        shares=dict(direction.shares),
        scale=direction.scale,
        p=configuration.get("p"),
        order=configuration.get("order"),
        coefficients={name: merge.number(name) for name in shares},
        values=dict(trial.values),
    )
