"""Data of the chart on the best trial's merge: groups of adjacent equal layers, and each model's share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from search_spaces.recipe import COMPONENTS, LayerRecipe, Merge
from service.results.record import RunRecord
from service.results.series.base import chart
from service.schemas.files import Number
from service.types import JobRecord, TrialRecord

__all__ = ["LayersPicture", "MergePicture", "RecipePlot", "layer_runs", "model_shares", "recipe"]


@dataclass(frozen=True)
class MergePicture:
    method: str
    sources: Annotated[list[str], Field(description="Model of each operand; lists of coefficients have this order.")]
    shares: Annotated[dict[str, float], Field(description="Share of each model, summing to 1.")]
    coefficients: dict[str, float | list[float]]


@dataclass(frozen=True)
class LayersPicture:
    first: Number
    last: Number
    components: Annotated[dict[str, MergePicture], Field(description="Merges of attention, mlp and norm.")]
    scale: Annotated[float, Field(description="Factor of the residual stream after each layer.")]
    mlp_scale: Annotated[float, Field(description="Factor of what each layer's MLP adds to the residual stream.")]


@dataclass(frozen=True)
class RecipePlot:
    """Merge of the best trial or of a given trial, with every model's share; empty before there is a best trial."""

    plot: Literal["recipe"]
    trial: int | None
    models: list[str]
    embedding: MergePicture | None
    layers: list[LayersPicture]
    head: MergePicture | None
    tensors: Annotated[
        dict[str, MergePicture],
        Field(description="Merges of single tensors that differ from their component, by tensor name."),
    ]


def _of_trial(_: JobRecord, trial: TrialRecord) -> RecipePlot:
    whole = trial.read_recipe()
    return RecipePlot(
        plot="recipe",
        trial=trial.number,
        models=list(whole.models),
        embedding=_picture(whole.embedding),
        layers=[
            LayersPicture(
                start,
                stop - 1,
                {name: _picture(layer.component(name)) for name in COMPONENTS},
                layer.scale,
                layer.mlp_scale,
            )
            for start, stop, layer in layer_runs(whole.layers)
        ],
        head=_picture(whole.head),
        tensors={name: _picture(merge) for name, merge in whole.tensors.items()},
    )


@chart(place=4, of_trial=_of_trial)
def recipe(run: RunRecord) -> RecipePlot:
    """Merge of the best trial: every model's share, by groups of adjacent equal layers and by component."""
    if run.best is None:
        return RecipePlot("recipe", trial=None, models=[], embedding=None, layers=[], head=None, tensors={})
    return _of_trial(run.study, run.best)


def _picture(merge: Merge) -> MergePicture:
    coefficients = {name: list(v) if isinstance(v, tuple) else v for name, v in merge.coefficients.items()}
    sources = [source.model for source in merge.sources]
    return MergePicture(merge.method, sources, dict(model_shares(merge)), coefficients)


def layer_runs(layers: Sequence[LayerRecipe]) -> Iterator[tuple[int, int, LayerRecipe]]:
    """Group adjacent layers that are merged in the same way.

    The merges of these layers have the same methods, models, coefficients and scales. They also take their sources from
    the same relative position: for example, layer 5 from layer 3 of a model, and layer 6 from layer 4.

    Yields:
        Index of the group's first layer, index after its last layer, and the first layer.
    """

    def shape(index: int) -> tuple[object, ...]:
        layer = layers[index]
        merges = tuple(
            (
                merge.method,
                tuple((s.model, None if s.layer is None else s.layer - index) for s in merge.sources),
                tuple(merge.coefficients.items()),
                merge.seed,
            )
            for merge in (layer.component(component) for component in COMPONENTS)
        )
        return (merges, layer.scale, layer.mlp_scale, layer.alignment)

    start = 0
    for index in range(1, len(layers) + 1):
        if index == len(layers) or shape(index) != shape(start):
            yield start, index, layers[start]
            start = index


def model_shares(merge: Merge) -> dict[str, float]:
    """Compute the share of each model in a merge of one tensor; the shares sum to 1.

    A model's share is proportional to the magnitude of its coefficient; without coefficients, all shares are equal. For
    methods on task vectors, the shares divide the change that is added to the base, and the base has no share.
    """
    if merge.method == "slerp":
        t = merge.number("t")
        weights: tuple[float, ...] = (1 - t, t)
    else:
        own = merge.coefficients.get("weight", merge.coefficients.get("lambda"))
        weights = tuple(map(abs, own)) if isinstance(own, tuple) else (1.0,) * len(merge.sources)
    total = sum(weights)
    shares: dict[str, float] = {}
    for source, weight in zip(merge.sources, weights, strict=True):
        shares[source.model] = shares.get(source.model, 0.0) + (weight / total if total else 0.0)
    return shares
