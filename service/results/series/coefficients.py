"""Data of the chart on the best trial's coefficients, one for each expert, layer and component."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from search_spaces.recipe import COMPONENTS, Merge, Recipe
from search_spaces.spaces import SPACES
from search_spaces.spaces.layers import IN_LAYER, expert_of
from service.results.record import RunRecord
from service.results.series.base import chart
from service.types import JobRecord, TrialRecord

__all__ = ["Coefficient", "CoefficientsPlot", "coefficients"]


@dataclass(frozen=True)
class Coefficient:
    expert: str
    layer: Annotated[int | None, Field(description="Number of the layer from 0; null outside of layers.")]
    part: Annotated[
        str, Field(description="Component or tensor of the layer, or of the model; empty for the whole layer.")
    ]
    value: float


@dataclass(frozen=True)
class CoefficientsPlot:
    """Coefficients of the best or of a given trial: factors on task vectors, or experts' weights in an average.

    A task vector is an expert minus the base. Merges without such a factor, such as SLERP, are left out.
    """

    plot: Literal["coefficients"]
    trial: int | None
    experts: list[str]
    values: tuple[Coefficient, ...]


def _of_trial(study: JobRecord, trial: TrialRecord) -> CoefficientsPlot:
    named = study.document.get("models", {}).get("experts", ())
    recipe = trial.read_recipe()
    experts = [*named] or [alias for alias in recipe.models if alias != recipe.base]
    kind = study.document.get("search_space", {}).get("kind", "")
    if kind in SPACES and SPACES[kind](kind=kind).changes_layers:  # parameters of a path are not coefficients
        return CoefficientsPlot("coefficients", trial.number, experts, ())
    values = tuple(_searched(trial.configuration or {}, experts)) or tuple(_of_recipe(recipe, experts))
    return CoefficientsPlot("coefficients", trial.number, experts, values)


@chart(place=7, of_trial=_of_trial)
def coefficients(run: RunRecord) -> CoefficientsPlot:
    """Coefficients of the best trial: for each layer, component and expert."""
    return CoefficientsPlot("coefficients", None, [], ()) if run.best is None else _of_trial(run.study, run.best)


def _searched(configuration: Mapping[str, Any], experts: list[str]) -> Iterator[Coefficient]:
    """Yield the parameters of a configuration as experts' coefficients, each with its layer and component.

    A parameter is a coefficient of an expert if its value is a number and its name ends with "." and the expert's
    alias. Nothing is yielded if the configuration has a parameter that is no coefficient, or if none of its
    coefficients belongs to a layer.
    """
    found = []
    for key, value in configuration.items():
        expert = expert_of(key, experts)
        if expert is None or not isinstance(value, float):
            return
        piece = key.removesuffix(f".{expert}")
        inside = IN_LAYER.fullmatch(piece)
        layer = None if inside is None else int(inside["layer"])
        part = piece if inside is None else inside["part"] or ""
        found.append(Coefficient(expert, layer, part.removesuffix(".weight"), value))
    if any(coefficient.layer is not None for coefficient in found):
        yield from found


def _of_recipe(recipe: Recipe, experts: list[str]) -> Iterator[Coefficient]:
    places: list[tuple[int | None, str, Merge]] = [(None, "embedding", recipe.embedding)]
    for number, layer in enumerate(recipe.layers):
        places += [(number, name, layer.component(name)) for name in COMPONENTS]
    places.append((None, "head", recipe.head))
    for number_of_layer, part, merge in places:
        own = _coefficients(merge)
        if own is not None:
            for expert in experts:
                yield Coefficient(expert, number_of_layer, part, own.get(expert, 0.0))


def _coefficients(merge: Merge) -> Mapping[str, float] | None:
    """Coefficient of each model in a merge, keyed by alias: its weight times its lambda (the factor on task vectors).

    A weight or lambda that the merge does not have counts as 1. In a merge that is one unchanged model, the model has
    the coefficient 1. Returns None if a merge of several models has neither weights nor lambdas.
    """
    if merge.method == "passthrough":
        return {merge.sources[0].model: 1.0}
    given = [merge.coefficients[name] for name in ("weight", "lambda") if name in merge.coefficients]
    if not given:
        return None
    found: dict[str, float] = {}
    for index, source in enumerate(merge.sources):
        value = 1.0
        for own in given:
            value *= own[index] if isinstance(own, tuple) else own
        found[source.model] = found.get(source.model, 0.0) + value
    return found
