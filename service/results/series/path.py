"""Data of the chart of the best trial's layer path: at each position the model, its layer, and the layer's scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from search_spaces.recipe import COMPONENTS, LayerRecipe
from service.results.record import RunRecord
from service.results.series.base import chart
from service.schemas.files import Number
from service.types import JobRecord, TrialRecord

__all__ = ["PathPlot", "PathStep", "layer_path", "path"]


@dataclass(frozen=True)
class PathStep:
    position: Annotated[Number, Field(description="Position in the merged model, from 0 at the input.")]
    model: Annotated[str | None, Field(description="Model of the layer; null for a layer that is merged from several.")]
    layer: Annotated[int | None, Field(description="Number of the layer in its model, from 0.")]
    scale: Annotated[float, Field(description="Factor of the layer's output.")]
    weights: Annotated[float, Field(description="Factor of the weights of attention and MLP.")]
    mlp_scale: Annotated[float, Field(description="Factor of what the layer's MLP adds to the residual stream.")]


@dataclass(frozen=True)
class PathPlot:
    """Layer path of the best or of a given trial: the sequence of the source layers that the merge consists of.

    The path has no layers before there is a best trial.
    """

    plot: Literal["path"]
    trial: int | None
    models: list[str]
    is_plain: Annotated[
        bool,
        Field(description="Whether all layers are at their own positions, of one model or merged, without scales."),
    ]
    steps: tuple[PathStep, ...]


def _of_trial(study: JobRecord, trial: TrialRecord) -> PathPlot:
    recipe = trial.read_recipe()
    steps = layer_path(recipe.layers)
    named = [recipe.base, *study.document.get("models", {}).get("experts", ())]
    used = {step.model for step in steps}
    return PathPlot(
        plot="path",
        trial=trial.number,
        models=[model for model in named if model in used],
        is_plain=_is_plain(steps, recipe.layers),
        steps=steps,
    )


@chart(place=9, of_trial=_of_trial)
def path(run: RunRecord) -> PathPlot:
    """Layers of the best trial: at each position the model, its layer, and the layer's scales (factors)."""
    if run.best is None:
        return PathPlot("path", trial=None, models=[], is_plain=True, steps=())
    return _of_trial(run.study, run.best)


def layer_path(layers: Sequence[LayerRecipe]) -> tuple[PathStep, ...]:
    """Convert the layers of a recipe to a layer path: for each layer, the source model and source layer."""
    return tuple(_step(position, layer) for position, layer in enumerate(layers))


def _step(position: int, layer: LayerRecipe) -> PathStep:
    merges = [layer.component(component) for component in COMPONENTS]
    sources = {source for merge in merges for source in merge.sources}
    is_one = len(sources) == 1 and all(merge.method == "passthrough" for merge in merges)
    if not is_one:
        return PathStep(position, None, None, layer.scale, 1.0, layer.mlp_scale)
    (source,) = sources
    weights = layer.attention.number("scale")
    return PathStep(position, source.model, source.layer, layer.scale, weights, layer.mlp_scale)


def _is_plain(steps: Sequence[PathStep], layers: Sequence[LayerRecipe]) -> bool:
    at_home = all(
        source.layer == position
        for position, layer in enumerate(layers)
        for component in COMPONENTS
        for source in layer.component(component).sources
    )
    models = {step.model for step in steps}
    return at_home and len(models) <= 1 and all(step.scale == step.weights == step.mlp_scale == 1 for step in steps)
