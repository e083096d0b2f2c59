"""Coefficients along a path: their defaults give the path itself, and each tensor has the coefficients of its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from search_spaces.errors import InvalidConfiguration
from search_spaces.recipe import Merge, Recipe, Source
from search_spaces.spaces.base import Coefficients, RefinableSpace
from search_spaces.spaces.hm3 import STRENGTHS
from tests.search_spaces.spaces.families import EMBEDDING, HEAD, NORM, models, space

EXPERTS = ("math", "code", "text")
VECTORS = ({"math": 0.5, "code": 0.3, "text": 0.2}, {"math": 0.7, "code": 0.3, "text": 0.0})


def coefficients_along(recipe: Recipe, **options: Any) -> Coefficients:
    own = space("hm3", replace(models(), preferences=VECTORS), **options)
    assert isinstance(own, RefinableSpace)
    return own.coefficients_of(recipe)


def defaults(coefficients: Coefficients) -> dict[str, Any]:
    return {parameter.name: parameter.default_value for parameter in coefficients.parameters}


@pytest.mark.parametrize("method", [None, *STRENGTHS])
@pytest.mark.parametrize("scales", [None, (0.8, 1.25)])
def test_defaults_give_the_path(method: str | None, scales: tuple[float, float] | None) -> None:
    """The coefficients' defaults give every drawn path, bit for bit, with any method and with scales."""
    merged = None if method is None else {"method": method}
    options = {"merged": merged, "scales": scales, "models": (*EXPERTS, "base")}
    own = space("hm3", replace(models(), preferences=VECTORS), **options)
    rng = np.random.default_rng(0)
    for _ in range(30):
        recipe = own.to_recipe(own.parameters.sample(rng))
        found = own.coefficients_of(recipe)
        assert found.to_recipe(defaults(found)).digest == recipe.digest
        moved = found.to_recipe({parameter.name: parameter.low for parameter in found.parameters})
        assert moved.digest != recipe.digest
        assert len(moved.layers) == len(recipe.layers)


def path(*layers: tuple[str, int], **options: Any) -> tuple[Coefficients, Recipe]:
    own = space("hm3", replace(models(), preferences=VECTORS), max_jump=None, **options)
    steps = [own.paths.step(own.paths.models.index(model), layer) for model, layer in layers]
    recipe = own.to_recipe(own.paths.configuration(steps))
    return own.coefficients_of(recipe), recipe


def test_each_place_has_its_own_coefficients() -> None:
    """A layer that a path repeats has coefficients at each of its places, and so have its components."""
    found, recipe = path(("math", 0), ("math", 0), ("text", 3))
    assert len(recipe.layers) == 3
    assert found.slots("model.layers.0.mlp.up_proj.weight") == tuple((e, f"layer1.mlp.{e}") for e in EXPERTS)
    assert found.slots("model.layers.1.mlp.down_proj.weight") == tuple((e, f"layer2.mlp.{e}") for e in EXPERTS)
    assert found.slots("model.layers.2.input_layernorm.weight") == tuple((e, f"layer3.norm.{e}") for e in EXPERTS)
    assert found.slots(EMBEDDING) == tuple((e, f"embedding.{e}") for e in EXPERTS)
    assert found.slots(NORM) == found.slots(HEAD) == tuple((e, f"head.{e}") for e in EXPERTS)
    with pytest.raises(KeyError):
        found.slots("model.layers.3.mlp.up_proj.weight")
    # 3 layers of 3 components, embedding and head.
    assert len(found.parameters) == 11 * len(EXPERTS)

    changed = {**defaults(found), "layer2.mlp.code": 0.25, "layer2.mlp.math": 0.5}
    merge = Merge("task_arithmetic", (Source("math", 0), Source("code", 0)), {"lambda": (0.5, 0.25)})
    expected = replace(recipe, models=models().fingerprints)
    layers = list(expected.layers)
    layers[1] = replace(layers[1], mlp=merge)
    assert found.to_recipe(changed).digest == replace(expected, layers=tuple(layers)).digest
    with pytest.raises(InvalidConfiguration):
        found.to_recipe({**changed, "layer2.mlp.code": 7.0})


def test_merged_layers_keep_their_method() -> None:
    """A merged layer's weights are those of its method, or its strength where it has no weights."""
    found, _ = path(("merged", 0), ("math", 1), ("math", 3), merged={"method": "dare_ties_l1"})
    slots = dict(found.slots("model.layers.0.mlp.up_proj.weight"))
    assert slots == {e: f"layer1.mlp.{e}" for e in EXPERTS}
    assert {e: defaults(found)[name] for e, name in slots.items()} == VECTORS[0]
    recipe = found.to_recipe({**defaults(found), "layer1.mlp.math": 0.9})
    assert recipe.layers[0].mlp.method == "dare_ties_l1"
    assert recipe.layers[0].attention.method == "dare_ties_l1"
    assert 0.9 in recipe.layers[0].mlp.per_source("weight")

    found, _ = path(("merged", 0), ("math", 1), ("math", 3), merged={"method": "pcb"})
    ((_, strength),) = found.slots("model.layers.0.mlp.up_proj.weight")
    assert found.to_recipe({**defaults(found), strength: 0.7}).layers[0].mlp.number("lambda") == 0.7


def test_tied_heads_have_the_embedding() -> None:
    """An output head that is tied to the embedding has the embedding's coefficients."""
    own = space("hm3", models(is_tied=True))
    recipe = own.to_recipe(own.parameters.sample(np.random.default_rng(1)))
    found = own.coefficients_of(recipe)
    assert found.slots(HEAD) == found.slots(EMBEDDING)
    assert found.slots(NORM) == tuple((e, f"head.{e}") for e in EXPERTS)


def test_only_models_of_the_pool_have_coefficients() -> None:
    """Experts whose layers the space does not use have no coefficients."""
    found = coefficients_along(path(("math", 0), ("text", 2), ("text", 3))[1], models=("math", "text"))
    assert {name.partition(".")[2].rpartition(".")[2] for name in found.parameters.names} == {"math", "text"}
    assert found.layer_scales == {}
