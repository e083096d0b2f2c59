"""Derivatives by the scales of layers and of their weights, compared with differences of losses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from search_spaces.study.engine import EngineOptions
from tests.workers.recipes import num_layers
from workers.training.gradients import CoefficientGradients
from workers.types import Family, TaskSpec

BATCH = {"sums": range(6)}
STEP = 2e-3


@pytest.fixture(scope="module")
def trained(tied_family: Family, sums: TaskSpec) -> CoefficientGradients:
    return CoefficientGradients(tied_family, EngineOptions(max_model_len=256, dtype="float32"), {"sums": sums})


@pytest.fixture(scope="module")
def scaled(tied_family: Family) -> Recipe:
    """A recipe of one expert with factors on its weights and outputs, and on the output of one MLP."""

    def layer(index: int) -> LayerRecipe:
        norm = Merge("passthrough", (Source("math", index),))
        own = replace(norm, coefficients={"scale": 0.9 + 0.15 * index})
        return LayerRecipe(own, own, norm, scale=1.2 - 0.3 * index, mlp_scale=0.6 if index == 1 else 1.0)

    whole = Merge("passthrough", (Source("math"),))
    layers = tuple(layer(index) for index in range(num_layers(tied_family)))
    return Recipe(tied_family.fingerprints, "base", layers, whole, whole)


def loss(trained: CoefficientGradients, recipe: Recipe) -> float:
    losses = trained.losses(recipe, BATCH)["sums"]
    return sum(losses) / len(losses)


def with_layer(recipe: Recipe, index: int, layer: LayerRecipe) -> Recipe:
    return replace(recipe, layers=tuple(layer if i == index else own for i, own in enumerate(recipe.layers)))


def test_derivatives_by_layer_scales_are_those_of_differences(trained: CoefficientGradients, scaled: Recipe) -> None:
    found = trained.loss_and_gradient(scaled, BATCH, {"sums": 1.0}, by_scales=True).layer_scales
    assert sorted(found) == list(range(len(scaled.layers)))
    differences = {}
    for index, layer in enumerate(scaled.layers):
        high, low = (with_layer(scaled, index, replace(layer, scale=layer.scale + s)) for s in (STEP, -STEP))
        differences[index] = (loss(trained, high) - loss(trained, low)) / (2 * STEP)
    largest = max(map(abs, differences.values()))
    assert largest > 1e-3
    for index, expected in differences.items():
        assert found[index] == pytest.approx(expected, rel=0.02, abs=0.005 * largest), index
    assert found[len(scaled.layers) - 1] == 0.0  # the final norm takes the last scale off again


def test_factor_derivatives(trained: CoefficientGradients, scaled: Recipe) -> None:
    """Derivatives by factors of weights are those of finite differences."""
    result = trained.loss_and_gradient(scaled, BATCH, {"sums": 1.0}, by_scales=True)
    for index, layer in enumerate(scaled.layers):
        prefix = f".{index}."
        found = sum(of["scale"] for name, of in result.shared.items() if prefix in name)

        def moved(step: float, index: int = index, layer: LayerRecipe = layer) -> Recipe:
            factor = layer.attention.number("scale") + step
            own = replace(layer.attention, coefficients={"scale": factor})
            return with_layer(scaled, index, replace(layer, attention=own, mlp=own))

        expected = (loss(trained, moved(STEP)) - loss(trained, moved(-STEP))) / (2 * STEP)
        assert abs(expected) > 1e-4
        assert found == pytest.approx(expected, rel=0.02)


def test_scales_are_differentiated_where_asked_for_only(trained: CoefficientGradients, scaled: Recipe) -> None:
    plain = trained.loss_and_gradient(scaled, BATCH, {"sums": 1.0})
    both = trained.loss_and_gradient(scaled, BATCH, {"sums": 1.0}, by_scales=True)
    assert not plain.layer_scales
    assert json.dumps(plain.shared) == json.dumps(both.shared)
    assert plain.losses == both.losses


def test_a_layer_with_scale_1_has_a_derivative_too(trained: CoefficientGradients, scaled: Recipe) -> None:
    plain = replace(scaled, layers=tuple(replace(layer, scale=1.0) for layer in scaled.layers))
    found = trained.loss_and_gradient(plain, BATCH, {"sums": 1.0}, by_scales=True).layer_scales
    assert found[0] != 0.0
