"""Functions that several spaces use, for groups of layers, recipes of layer paths and aliases of models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from search_spaces.recipe import COMPONENTS, Component, LayerRecipe, Merge, Recipe, Source
from search_spaces.spaces.base import LayerGroup, SearchedModels

__all__ = [
    "IN_LAYER",
    "ScaleOf",
    "expert_of",
    "one_layer",
    "path_of_recipe",
    "recipe_of_path",
    "shared_merges",
    "split_layers",
    "with_own_aliases",
]

# Layer and part in the name of a part of a model, such as "layers.0.attention" or
# "model.layers.0.mlp.experts.3.w1.weight".
IN_LAYER = re.compile(r"(?:.*?\.)?(?P<layer>\d+)(?:\.(?P<part>.+))?")

# The possible operands of a layer's scale: the residual stream after the layer (`LayerRecipe.scale`), or only what the
# layer's MLP adds to it (`LayerRecipe.mlp_scale`).
ScaleOf = Literal["stream", "mlp"]


def split_layers(num_layers: int, num_groups: int) -> tuple[LayerGroup, ...]:
    """The division of `num_layers` layers into `num_groups` groups of consecutive layers.

    The sizes of groups differ by at most one; larger groups come first.
    """
    size, longer = divmod(num_layers, num_groups)
    starts = [i * size + min(i, longer) for i in range(num_groups + 1)]
    return tuple(LayerGroup(f"g{i + 1}", starts[i], starts[i + 1]) for i in range(num_groups))


def one_layer(layer: int) -> LayerGroup:
    """The group that consists of a single layer (0-based)."""
    return LayerGroup(f"layer {layer}", layer, layer + 1)


def expert_of(parameter: str, experts: Sequence[str]) -> str | None:
    """The expert whose alias, after a dot, ends the name of a parameter; None if no alias does.

    Aliases may contain dots; if several aliases end the name, the result is the longest.
    """
    return max((alias for alias in experts if parameter.endswith(f".{alias}")), key=len, default=None)


def shared_merges(layers: Sequence[LayerRecipe], *, start: int) -> dict[Component, Merge] | None:
    """The merges of the components of several adjacent layers, if all of these layers are merged in the same way.

    `start` is the number of the first layer. Returns None if the layers differ. Also returns None if any of the layers
    has a scale other than 1, has an alignment (a map that is applied to the residual stream after it), takes a source
    from a layer with another number, or has a merge with a base other than the recipe's.
    """
    stripped: list[dict[Component, Merge]] = []
    for layer, recipe in enumerate(layers, start):
        merges = {component: recipe.component(component) for component in COMPONENTS}
        own = all(source.layer == layer for merge in merges.values() for source in merge.sources)
        usual = all(merge.base is None for merge in merges.values())
        if not (own and usual) or (recipe.scale, recipe.mlp_scale, recipe.alignment) != (1, 1, None):
            return None
        stripped.append({component: merge.at_layer(None) for component, merge in merges.items()})
    return stripped[0] if all(merges == stripped[0] for merges in stripped) else None


def recipe_of_path(models: SearchedModels, layers: Sequence[tuple[str, int, float]], *, scale_of: ScaleOf) -> Recipe:
    """The recipe of a merge that consists of whole layers, each copied from one model (a layer path).

    `layers` has, for each layer of the merge, the model, the number of the layer in this model, and a scale. `models`
    has the models that may be named. `scale_of` says whether the scales multiply the residual stream or the output of
    the MLP. The embedding is from the first layer's model. The final norm and the output head are from the last layer's
    model.
    """
    return Recipe(
        models.fingerprints,
        models.base,
        tuple(_whole_layer(model, layer, scale, scale_of) for model, layer, scale in layers),
        embedding=Merge("passthrough", (Source(layers[0][0]),)),
        head=Merge("passthrough", (Source(layers[-1][0]),)),
        tokenizer=models.tokenizer,
    ).canonical()


def path_of_recipe(recipe: Recipe, *, scale_of: ScaleOf) -> list[tuple[str, int, float]] | None:
    """Read the layer path from a recipe that copies whole layers of models; None for other recipes.

    The result contains, for each layer of the merge, the model, the number of the layer in this model, and a scale. A
    layer has a scale on the residual stream and a scale on the output of the MLP; `scale_of` says which scale is read.
    Returns None also if the other scale is not 1 in some layer, or if a layer has an alignment (a learned map that is
    applied to the residual stream after it).
    """
    layers = [_step(layer, scale_of) for layer in recipe.layers]
    found = [step for step in layers if step is not None]
    return found if found and len(found) == len(layers) else None


def _whole_layer(model: str, layer: int, scale: float, scale_of: ScaleOf) -> LayerRecipe:
    merge = Merge("passthrough", (Source(model, layer),))
    whole = LayerRecipe(merge, merge, merge)
    return replace(whole, scale=scale) if scale_of == "stream" else replace(whole, mlp_scale=scale)


def _step(layer: LayerRecipe, scale_of: ScaleOf) -> tuple[str, int, float] | None:
    merges = {layer.component(component) for component in COMPONENTS}
    merge = merges.pop()
    (source, *others) = merge.sources
    is_one = not (merges or others or merge.coefficients) and merge.method == "passthrough" and layer.alignment is None
    scale, other = (layer.scale, layer.mlp_scale) if scale_of == "stream" else (layer.mlp_scale, layer.scale)
    return (source.model, source.layer, scale) if is_one and source.layer is not None and other == 1 else None


def with_own_aliases(recipe: Recipe, *, base: str, fingerprints: Mapping[str, str]) -> Recipe | None:
    """A copy of a recipe with the aliases of a search space that has the same models under other names.

    Models are matched by their fingerprints. `fingerprints` maps the space's aliases to content fingerprints, and
    `base` is the space's base model. Returns None if the recipe has another base or uses a model that the space does
    not have.
    """
    mine = {fingerprint: alias for alias, fingerprint in reversed(list(fingerprints.items()))}
    names = {alias: mine.get(fingerprint) for alias, fingerprint in recipe.models.items()}
    if None in names.values() or names[recipe.base] != base:
        return None

    def renamed(source: Source) -> Source:
        return replace(source, model=str(names[source.model]))

    def rename(merge: Merge) -> Merge:
        return replace(merge, sources=tuple(map(renamed, merge.sources)), base=merge.base and renamed(merge.base))

    known = {**recipe.models, **fingerprints}
    return replace(recipe, models=known, base=base).rewritten(rename)
