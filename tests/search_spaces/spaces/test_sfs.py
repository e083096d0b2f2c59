"""SFS: a factor on the weights and one on the output of each layer of one model."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.baselines import all_baselines
from search_spaces.errors import InvalidStudy
from search_spaces.parameters import Float
from search_spaces.recipe import Merge, Source
from search_spaces.spaces.base import DifferentiableSpace, SearchedModels
from tests.search_spaces.spaces.families import HEAD, models, space


def sfs(family: SearchedModels | None = None, **options: Any) -> Any:
    return space("sfs", family, **options)


def test_two_factors_per_layer() -> None:
    """Parameters are two factors per layer and one for the last."""
    names = [f"layers.{layer}.{kind}" for layer in range(4) for kind in ("weights", "output")][:-1]
    assert list(sfs().parameters) == [Float(name, 0.5, 1.5, default=1.0) for name in names]
    assert set(sfs().parameters.roles.values()) == {"weights", "output"}


def test_factors_scale_weights_and_output() -> None:
    """Factors scale the weights of attention and MLP and the layer's output."""
    own = sfs()
    recipe = own.to_recipe(
        dict.fromkeys(own.parameters.names, 1.0) | {"layers.1.weights": 0.75, "layers.1.output": 1.25}
    )
    plain = [Merge("passthrough", (Source("math", layer),)) for layer in range(4)]
    scaled = Merge("passthrough", (Source("math", 1),), {"scale": 0.75})
    assert [layer.attention for layer in recipe.layers] == [plain[0], scaled, *plain[2:]]
    assert [layer.mlp for layer in recipe.layers] == [plain[0], scaled, *plain[2:]]
    assert [layer.norm for layer in recipe.layers] == plain
    assert [layer.scale for layer in recipe.layers] == [1.0, 1.25, 1.0, 1.0]
    assert recipe.embedding == recipe.head == Merge("passthrough", (Source("math"),))


def test_only_the_scaled_model_is_a_source_in_the_space() -> None:
    family = models()
    known = all_baselines(base="base", experts=family.experts, fingerprints=family.fingerprints, num_layers=4)
    found = {label: sfs(family, model="text").from_recipe(recipe) for _, label, recipe in known}
    contained = {label: configuration for label, configuration in found.items() if configuration is not None}
    assert list(contained) == ["expert:text"]
    assert set(contained["expert:text"].values()) == {1.0}


def test_it_is_differentiable_in_both_factors() -> None:
    own = sfs(models(is_tied=True), model="math")
    assert isinstance(own, DifferentiableSpace)
    assert own.slots("model.layers.2.mlp.up_proj.weight") == (("math", "layers.2.weights"),)
    assert own.slots("model.layers.2.input_layernorm.weight") == own.slots(HEAD) == ()
    assert own.layer_scales == {layer: f"layers.{layer}.output" for layer in range(3)}
    with pytest.raises(KeyError):
        own.slots("other")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "is missing; give one of math, code, text, base"),
        ({"model": "other"}, "'other' is not a model of the study; give one of math, code, text, base"),
    ],
)
def test_a_model_that_is_not_clear_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidStudy) as refused:
        sfs(models(), **options)
    (problem,) = refused.value.problems
    assert (problem.field, problem.message) == ("search_space.model", message)
