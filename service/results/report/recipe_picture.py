"""Report picture of a recipe: layers by components, coloured by method, with every model's share.

The picture depends on the recipe alone, not on trials and scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from search_spaces.recipe import COMPONENTS, Component, LayerRecipe, Merge, Recipe
from service.results.report.charts import Bar, Legend, legend, stacked_bar
from service.results.report.marks import NUM_COLOURS
from service.results.series.recipe import layer_runs, model_shares

__all__ = ["recipe_picture"]

# These have the same colour in every report, the first one grey.
USUAL_METHODS = ("passthrough", "task_arithmetic", "ties", "linear", "slerp")


def recipe_picture(recipe: Recipe, *, experts: Sequence[str] = ()) -> dict[str, Any]:
    """Build the data of the report's picture of a recipe: how much each model contributes to each part of the merge.

    The parts are the embedding, the head, and in each layer attention, MLP and norms. A model's contribution is its
    part of the sum of the coefficients. Models are shown in this order: the base, `experts` (aliases), then other
    models.
    """
    models = list(dict.fromkeys([recipe.base, *experts, *recipe.models]))
    colours = dict.fromkeys(models[:1], "var(--base)")
    colours |= {alias: f"var(--c{index % NUM_COLOURS})" for index, alias in enumerate(models[1:])}
    methods = list(dict.fromkeys([*USUAL_METHODS, *(merge.method for merge in recipe.merges())]))
    method_colours = {method: f"var(--m{index % NUM_COLOURS})" for index, method in enumerate(methods)}

    def bar(shares: Mapping[str, float]) -> Markup:
        return stacked_bar([Bar(alias, shares.get(alias, 0.0), f"background:{colours[alias]}") for alias in models])

    def cell(merge: Merge) -> dict[str, Any]:
        sources = sorted(_source_texts(merge), key=lambda pair: models.index(pair[0]))
        numbers = [(name, value) for name, value in merge.coefficients.items() if not isinstance(value, tuple)]
        return {
            "method": merge.method.replace("_", " "),
            "colour": method_colours[merge.method],
            "numbers": ", ".join(f"{_symbol(name)} {value:.2f}" for name, value in numbers),
            "sources": [{"model": model, "colour": colours[model], "text": text} for model, text in sources],
            "bar": bar(model_shares(merge)),
        }

    rows = []
    for start, stop, layer in layer_runs(recipe.layers):
        merges = [layer.component(component) for component in COMPONENTS]
        rows.append(
            {
                "name": f"layer {start}" if stop == start + 1 else f"layers {start} to {stop - 1}",
                "cells": [cell(merge) for merge in (merges[:1] if len(set(merges)) == 1 else merges)],
                "note": ", ".join(_notes(layer)),
            }
        )
    used = [alias for alias in models if any(alias in model_shares(merge) for merge in recipe.merges())]
    return {
        "components": COMPONENTS,
        "embedding": cell(recipe.embedding),
        "rows": rows,
        "head": cell(recipe.head),
        "tensors": [{"name": name, "cell": cell(merge)} for name, merge in recipe.tensors.items()],
        "legend": legend([Legend(alias, "swatch", "square", style=f"fill:{colours[alias]}") for alias in used]),
        "models": used,
        "contributions": [
            {
                "name": name,
                "shares": [shares.get(alias, 0.0) for alias in used],
                "bar": bar(shares),
            }
            for name, shares in _contributions(recipe)
        ],
        "digest": recipe.digest,
    }


def _notes(layer: LayerRecipe) -> Iterator[str]:
    if layer.scale != 1:
        yield f"scale {layer.scale:.3f}"
    if layer.mlp_scale != 1:
        yield f"scale of the MLP {layer.mlp_scale:.3f}"


def _symbol(name: str) -> str:
    return {"lambda": "λ"}.get(name, name)


def _source_texts(merge: Merge) -> Iterator[tuple[str, str]]:
    """Yield the alias of each source of a merge, and a text with this source's own coefficients.

    The text is "" if all sources share the coefficients. For SLERP it is the weight of the source, 1 - t or t.
    """
    per_source = [value for value in merge.coefficients.values() if isinstance(value, tuple)]
    for index, source in enumerate(merge.sources):
        text = " ".join(f"{value[index]:.2f}" for value in per_source)
        if merge.method == "slerp":
            t = merge.number("t")
            text = f"{(1 - t, t)[index]:.2f}"
        yield source.model, text


def _contributions(recipe: Recipe) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield the name of each part of a recipe, and the share of each model in this part, keyed by model.

    The parts are all layers together, each component of layers (attention, MLP, norms), the embedding, the head, and
    the single tensors that differ from their component. A model's share in a part is the mean of its shares in the
    part's merges (function `model_shares`), so the shares of a part sum to 1.
    """

    def mean(merges: Sequence[Merge]) -> dict[str, float]:
        shares: dict[str, float] = {}
        for merge in merges:
            for model, share in model_shares(merge).items():
                shares[model] = shares.get(model, 0.0) + share / len(merges)
        return shares

    in_layers = [layer.component(component) for layer in recipe.layers for component in COMPONENTS]
    if in_layers:
        yield "all layers", mean(in_layers)
    for component in _distinct_components(recipe):
        yield component, mean([layer.component(component) for layer in recipe.layers])
    yield "embedding", mean([recipe.embedding])
    yield "head", mean([recipe.head])
    if recipe.tensors:
        yield "single tensors", mean(list(recipe.tensors.values()))


def _distinct_components(recipe: Recipe) -> tuple[Component, ...]:
    """Components of layers (attention, MLP, norms) that the picture draws separately.

    The picture shows how large each expert's share of a merge is. If each layer of the recipe is merged as a whole, the
    shares are the same in all components of the layer, and the result is empty.
    """
    is_whole = all(layer.attention == layer.mlp == layer.norm for layer in recipe.layers)
    return () if is_whole else COMPONENTS
