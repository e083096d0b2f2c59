"""Functions that several spaces use: groups of layers, recipes of layer paths, and recipes with a space's aliases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from search_spaces.recipe import COMPONENTS, Component, LayerRecipe, Merge, Recipe, Source
from search_spaces.spaces.base import LayerGroup, SearchedModels

__all__ = ["ScaleOf", "path_of_recipe", "recipe_of_path", "shared_merges", "split_layers", "with_own_aliases"]

# What the scale of a layer multiplies: the residual stream after the layer (`LayerRecipe.scale`), or only what the
# layer's MLP adds to it (`LayerRecipe.mlp_scale`).
ScaleOf = Literal["stream", "mlp"]


def split_layers(num_layers: int, num_groups: int) -> tuple[LayerGroup, ...]:
    """The division of `num_layers` layers into `num_groups` groups of consecutive layers.

    The sizes of groups differ by at most one; larger groups come first.
    """
    size, longer = divmod(num_layers, num_groups)
    starts = [i * size + min(i, longer) for i in range(num_groups + 1)]
    return tuple(LayerGroup(f"g{i + 1}", starts[i], starts[i + 1]) for i in range(num_groups))


def shared_merges(layers: Sequence[LayerRecipe], *, start: int) -> dict[Component, Merge] | None:
    """The merges of the components of several adjacent layers, if all of these layers are merged in the same way.

    `start` is the number of the first layer. Returns None if the layers differ. Returns None also if a layer has a
    scale, an alignment, a stated base, or sources from a layer with another number than its own.
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
    """The recipe of a path of whole layers, each given as model, layer number and scale.

    `scale_of` says whether the scales multiply the residual stream or the output of the MLP. The embedding is that of
    the first layer's model. The final norm and the output head are those of the last layer's model.
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
    """The path of whole layers that a recipe describes, each given as model, layer number and scale.

    `scale_of` says which of a layer's two scales is read: the factor on the residual stream or on the MLP's output.
    Returns None if the other scale is not 1 in some layer, or if a layer is merged from several models or has an
    alignment.
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
    """A copy of a recipe with the aliases of a search space, which has the same models under other names.

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
