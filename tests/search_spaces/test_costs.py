"""Costs of recipes: layers and parameters, from the recipe alone."""

from __future__ import annotations

from dataclasses import replace

from search_spaces.costs import ModelSize
from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source

SIZE = ModelSize(1000, {"attention": (10, 20), "mlp": (100, 200), "norm": (1, 2)}, 3)


def recipe(*layers: tuple[int, int, int]) -> Recipe:
    merges = [[Merge("passthrough", (Source("base", layer),)) for layer in of] for of in layers]
    whole = Merge("passthrough", (Source("base"),))
    return Recipe({"base": "b"}, "base", tuple(LayerRecipe(a, b, c) for a, b, c in merges), whole, whole)


def test_layers_are_those_of_the_merge() -> None:
    assert [SIZE.of(recipe(*((0, 0, 0),) * depth), "layers") for depth in (1, 2, 3)] == [1.0, 2.0, 3.0]


def test_parameters_are_counted() -> None:
    """The number of parameters sums each component of each layer and the rest."""
    assert SIZE.of(recipe((0, 0, 0), (1, 1, 1)), "parameters") == 1000 + 111 + 222
    assert SIZE.of(recipe((1, 1, 1), (1, 1, 1), (1, 1, 1)), "parameters") == 1000 + 3 * 222  # a repeat counts again
    assert SIZE.of(recipe((0, 1, 0)), "parameters") == 1000 + 10 + 200 + 1


def test_maximum_cost() -> None:
    """The maximum cost is that of the deepest merge of the largest layer."""
    assert (SIZE.most("layers"), SIZE.most("parameters")) == (3.0, 1000 + 3 * 222)
    assert replace(SIZE, max_layers=5).most("layers") == 5.0
