"""Recipes whose merge is a source model itself."""

from __future__ import annotations

from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from workers.models.config import read_config
from workers.types import Family

__all__ = ["base_recipe", "source_recipe"]


def base_recipe(family: Family) -> Recipe:
    """The recipe whose merge is the base model itself."""
    num_layers = int(read_config(family.base.directory)["num_hidden_layers"])
    return source_recipe(family, family.base.alias, num_layers=num_layers)


def source_recipe(family: Family, alias: str, *, num_layers: int) -> Recipe:
    """The recipe whose merge is the model `alias` itself."""

    def copied(layer: int | None) -> Merge:
        return Merge("passthrough", (Source(alias, layer),))

    layers = tuple(LayerRecipe(copied(i), copied(i), copied(i)) for i in range(num_layers))
    return Recipe(
        family.fingerprints,
        family.base.alias,
        layers,
        embedding=copied(None),
        head=copied(None),
        tokenizer=family.tokenizer,
        vocabulary=family.vocabulary,
    )
