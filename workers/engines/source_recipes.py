"""Recipes whose merge is one source model, unchanged."""

from __future__ import annotations

from search_spaces.recipe import Recipe
from workers.models.config import read_config
from workers.types import Family

__all__ = ["base_recipe", "source_recipe"]


def base_recipe(family: Family) -> Recipe:
    """The recipe whose merge is the unchanged base model of `family`, a base model and its experts."""
    num_layers = int(read_config(family.base.directory)["num_hidden_layers"])
    return source_recipe(family, family.base.alias, num_layers=num_layers)


def source_recipe(family: Family, alias: str, *, num_layers: int) -> Recipe:
    """The recipe whose merge is one unchanged model of `family`, a base model and its experts.

    `alias` is the model's name in the family, and `num_layers` is its number of layers.
    """
    return Recipe.of_model(
        alias,
        models=family.fingerprints,
        base=family.base.alias,
        num_layers=num_layers,
        tokenizer=family.tokenizer,
        vocabulary=family.vocabulary,
    )
